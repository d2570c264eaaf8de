"""copy_blocks() and Pool(device, tensor): sizes, counts, strides and direction are read from the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from kvswap import _C
from kvswap.typing import After, AfterItem, DeviceLike, GpuIds, Path, Priority, StreamLike, Tensor


class _Blocks(NamedTuple):
    """A tensor of blocks: how many, the bytes of one, and the bytes from one to the next."""

    number: int
    nbytes: int
    stride: int


class _View:
    """A tensor with other bytes between its blocks, as the core takes one: all bytes from its first to its last."""

    def __init__(self, tensor: Any, blocks: _Blocks, name: str) -> None:
        self.tensor = tensor
        if callable(getattr(tensor, "data_ptr", None)):
            data = int(tensor.data_ptr()), False
        else:
            found = [getattr(tensor, f"__{kind}_interface__", None) for kind in ("cuda_array", "array")]
            interface = found[0] or found[1]
            if interface is None:
                raise TypeError(f"{name} has bytes between its blocks and neither data_ptr() nor an array interface")
            data = interface["data"]
        nbytes = max(blocks.number - 1, 0) * blocks.stride + blocks.nbytes
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": data}


def _tensors(side: Any, name: str) -> list[Any]:
    if isinstance(side, (list, tuple)):
        return list(side)
    if isinstance(side, int):
        raise TypeError(f"{name} is an address, which says no shape: swap_cache_all_layers_async() takes addresses")
    return [side]


def _strides(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...] | None, int] | None:
    """Shape, strides in bytes (None: contiguous) and bytes of an element; None: it does not say."""
    if isinstance(getattr(tensor, "strides", None), tuple):  # NumPy, CuPy, memoryview
        return tuple(tensor.shape), tensor.strides, tensor.itemsize
    if callable(getattr(tensor, "element_size", None)):  # torch, Paddle: strides count elements
        width = int(tensor.element_size())
        strides = tensor.stride() if callable(getattr(tensor, "stride", None)) else tensor.strides
        return tuple(tensor.shape), tuple(stride * width for stride in strides), width
    for name in ("__cuda_array_interface__", "__array_interface__"):
        interface = getattr(tensor, name, None)
        if isinstance(interface, dict):
            strides = interface.get("strides")
            return tuple(interface["shape"]), strides and tuple(strides), np.dtype(interface["typestr"]).itemsize
    if hasattr(tensor, "shape") and hasattr(tensor, "nbytes"):  # arrays that are always contiguous, as JAX's
        shape = tuple(tensor.shape)
        return shape, None, tensor.nbytes // max(prod(shape), 1)
    try:
        memory = memoryview(tensor)
    except TypeError:
        return None
    return memory.shape or (), memory.strides, memory.itemsize


def _blocks(tensor: Any, name: str) -> _Blocks:
    """ValueError: blocks that are not in one piece each. The core checks all else."""
    if callable(getattr(tensor, "is_contiguous", None)) and tensor.is_contiguous():  # torch: the common case, and fast
        shape = tensor.shape
        if len(shape) > 1 and shape[0] > 0:
            nbytes = tensor.nbytes // shape[0]
            return _Blocks(shape[0], nbytes, nbytes)
    layout = _strides(tensor)
    if layout is None:
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    shape, strides, width = layout
    if len(shape) < 2:
        raise ValueError(
            f"{name} has shape {shape}: its first dimension must count the blocks and the others be one block; "
            "reshape it to (blocks, elements of a block)"
        )
    nbytes = width
    for extent, stride in reversed(list(zip(shape[1:], strides[1:], strict=True))) if strides else ():
        if extent != 1 and stride != nbytes and 0 not in shape:
            raise ValueError(
                f"a block of {name} is not in one piece (shape {shape}, strides {strides} in bytes): permute the cache "
                "so that the dimension of blocks comes first in memory too, or make Pools with rows and a pitch"
            )
        nbytes *= extent
    nbytes = width * prod(shape[1:])
    stride = strides[0] if strides and shape[0] > 1 else nbytes
    if stride < nbytes:
        raise ValueError(f"the blocks of {name} overlap: one has {nbytes} bytes, and the next is {stride} bytes away")
    return _Blocks(shape[0], nbytes, stride)


def pool_blocks(tensor: Any) -> tuple[Any, int, int, int | None]:
    """The ptr, num_blocks, block_nbytes and stride of Pool(device, tensor)."""
    blocks = _blocks(tensor, "ptr")
    if blocks.stride == blocks.nbytes:
        return tensor, blocks.number, blocks.nbytes, None
    return _View(tensor, blocks, "ptr"), *blocks


class _Side(NamedTuple):
    """One side of a copy, as the core takes it."""

    tensors: list[Any]
    blocks: list[_Blocks]
    ids: GpuIds

    def numbers(self) -> list[int]:
        return [blocks.number for blocks in self.blocks]

    def strides(self) -> list[int] | None:
        """None: no tensor has bytes between its blocks, and the core checks that each has the size of its blocks."""
        gaps = any(blocks.stride != blocks.nbytes for blocks in self.blocks)
        return [blocks.stride for blocks in self.blocks] if gaps else None

    def pointers(self, name: str) -> list[Any]:
        return [
            tensor if blocks.stride == blocks.nbytes else _View(tensor, blocks, f"{name}[{i}]")
            for i, (tensor, blocks) in enumerate(zip(self.tensors, self.blocks, strict=True))
        ]


def _side(side: Any, ids: GpuIds, name: str) -> _Side:
    tensors = _tensors(side, name)
    return _Side(tensors, [_blocks(tensor, f"{name}[{i}]") for i, tensor in enumerate(tensors)], ids)


def copy_blocks(
    src: Tensor | Sequence[Tensor],
    dst: Tensor | Sequence[Tensor],
    src_ids: GpuIds,
    dst_ids: GpuIds,
    *,
    stream: StreamLike | None = None,
    after: After = (),
    device: DeviceLike | None = None,
    path: Path = "auto",
    priority: Priority | None = None,
    max_ctas: int | None = None,
    pace_gbps: float | None = None,
    layer_events: bool = False,
    after_layers: Sequence[AfterItem | None] | None = None,
) -> _C.Transfer:
    """Copy block src_ids[i] of every tensor of src to block dst_ids[i] of its partner in dst; returns the Transfer.

    src, dst: one tensor a side, or lists (tuples) of one length; a list has one tensor a layer, say. The first
      dimension of a tensor counts its blocks, all others are one block, which lies in one piece; bytes between blocks
      are left alone, so that cache[:, layer] of a cache with all layers in a block works. Of a cache of shape
      (2, blocks, ...) pass [cache[0], cache[1]]. Partners have blocks of as many bytes; their shapes and dtypes may
      differ.
    src_ids, dst_ids: integer arrays (n,), or sequences of ints, of one length. Those of the GPU's side may lie in GPU
      memory.
    One side is memory of the device, the other host memory or another GPU's; kvswap finds out which.
    device: Device, or what Device() takes; None: the GPU that the tensors lie on, else host:0.
    stream, after, path, priority, max_ctas, pace_gbps, layer_events, after_layers: as for
      swap_cache_all_layers_async(), which does the work.

    Reading a tensor costs a microsecond or two in each call: an engine that has many tensors and calls in each step
    passes addresses to swap_cache_all_layers_async(), or makes Pools once.

    Tensors are held until the transfer ends. ValueError, IndexError, TypeError: wrong arguments, nothing moved;
    QueueFull, DeviceError: as there. Any thread may call."""
    source, target = _side(src, src_ids, "src"), _side(dst, dst_ids, "dst")
    if len(source.tensors) != len(target.tensors):
        raise ValueError(
            f"src has {len(source.tensors)} tensors and dst {len(target.tensors)}: each tensor needs its partner"
        )
    for i, (one, other) in enumerate(zip(source.blocks, target.blocks, strict=True)):
        if one.nbytes != other.nbytes:
            raise ValueError(f"a block of src[{i}] has {one.nbytes} bytes, and one of dst[{i}] {other.nbytes}")
    pointers = source.pointers("src"), target.pointers("dst")
    onboard = bool(source.tensors) and _C._is_onboard(pointers[0][0], pointers[1][0], device)
    gpu, cpu = (target, source) if onboard else (source, target)
    gpu_ptrs, cpu_ptrs = reversed(pointers) if onboard else pointers
    return _C.swap_cache_all_layers_async(
        gpu_ptrs,
        cpu_ptrs,
        [blocks.nbytes for blocks in gpu.blocks],
        gpu.numbers(),
        cpu.numbers(),
        gpu.ids,
        cpu.ids,  # type: ignore[arg-type]  # the core refuses ids in GPU memory for the host's side
        "H2D" if onboard else "D2H",
        gpu_stride=gpu.strides(),
        cpu_stride=cpu.strides(),
        stream=stream,
        after=after,
        device=device,
        path=path,
        priority=priority,
        max_ctas=max_ctas,
        pace_gbps=pace_gbps,
        layer_events=layer_events,
        after_layers=after_layers,
    )
