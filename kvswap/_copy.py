"""copy_blocks() and Pool(device, tensor): sizes, counts, strides and direction are read from the tensors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from kvswap import _C
from kvswap.codecs import Coding, Field
from kvswap.codecs._pages import kind_of, name_of
from kvswap.typing import After, AfterItem, DeviceLike, GpuIds, Path, Priority, StreamLike, Tensor


class _Blocks(NamedTuple):
    """A tensor of blocks: how many, the bytes of one, and the bytes from one to the next."""

    number: int
    nbytes: int
    stride: int


def _data(tensor: Any) -> tuple[int, bool] | None:
    """Address, and whether it is read-only; None: the tensor does not say."""
    if callable(getattr(tensor, "data_ptr", None)):
        return int(tensor.data_ptr()), False
    for name in ("__cuda_array_interface__", "__array_interface__"):
        interface = getattr(tensor, name, None)
        if isinstance(interface, dict):
            address, readonly = interface["data"]
            return int(address), bool(readonly)
    return None


class _View:
    """A tensor with other bytes between its blocks, as the core takes one: all bytes from its first to its last."""

    def __init__(self, tensor: Any, blocks: _Blocks, name: str) -> None:
        self.tensor = tensor
        data = _data(tensor)
        if data is None:
            raise TypeError(f"{name} has bytes between its blocks and neither data_ptr() nor an array interface")
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


# -- blocks that are coded on the way ---------------------------------------------------------------------------------

_pools_lock = threading.Lock()
_pools: WeakValueDictionary[tuple[Any, ...], _C.Pool] = WeakValueDictionary()  # guarded by _pools_lock


def _kind(tensor: Any, dtype: Any) -> str:
    given = getattr(tensor, "dtype", None) if dtype is None else dtype
    kind = kind_of(given)
    if kind not in ("bf16", "fp16"):
        name = name_of(given)
        raise ValueError(f"codecs code bf16 and fp16: the GPU's tensors are {name}; dtype= says what their bytes are")
    return kind


@lru_cache(maxsize=256)
def _coding(nbytes: int, codec: str, kind: str) -> Coding:
    return Coding(nbytes, codec, fields=[Field(0, nbytes, kind)])


def _pool(device: DeviceLike, tensor: Any, blocks: _Blocks, coding: Coding | None, name: str) -> _C.Pool:
    """Over the tensor: the one that a transfer of an earlier call still holds, or a new one."""
    data = _data(tensor)
    if data is None:
        raise TypeError(f"{name} has neither data_ptr() nor an array interface, which codec= needs")
    key = (getattr(device, "name", str(device)), data[0], *blocks, coding)
    found = _pools.get(key)
    if found is None:
        memory = tensor if blocks.stride == blocks.nbytes else _View(tensor, blocks, name)
        found = _C.Pool(device, memory, blocks.number, blocks.nbytes, stride=blocks.stride, coding=coding)
        _pools[key] = found
    return found


def _coded_pools(
    device: DeviceLike, gpu: _Side, cpu: _Side, codec: str, dtype: Any, names: tuple[str, str]
) -> tuple[list[_C.Pool], list[_C.Pool]]:
    made: tuple[list[_C.Pool], list[_C.Pool]] = ([], [])
    for i, (tensor, blocks, coded) in enumerate(zip(gpu.tensors, gpu.blocks, cpu.blocks, strict=True)):
        coding = _coding(blocks.nbytes, codec, _kind(tensor, dtype))
        if coded.nbytes != coding.coded_nbytes:
            raise ValueError(
                f"a block of {names[1]}[{i}] has {coded.nbytes} bytes; one of {names[0]}[{i}] is coded to "
                f"{coding.coded_nbytes}"
            )
        with _pools_lock:
            made[0].append(_pool(device, tensor, blocks, None, f"{names[0]}[{i}]"))
            made[1].append(_pool(device, cpu.tensors[i], coded, coding, f"{names[1]}[{i}]"))
    return made


def _check_partners(source: _Side, target: _Side, codec: str | None, dtype: Any) -> None:
    if len(source.tensors) != len(target.tensors):
        raise ValueError(
            f"src has {len(source.tensors)} tensors and dst {len(target.tensors)}: each tensor needs its partner"
        )
    if not source.tensors:
        raise ValueError("src and dst have no tensors")
    if codec is not None:
        return  # the coding says which sizes go together
    if dtype is not None:
        raise ValueError("dtype goes with codec")
    for i, (one, other) in enumerate(zip(source.blocks, target.blocks, strict=True)):
        if one.nbytes != other.nbytes:
            raise ValueError(f"a block of src[{i}] has {one.nbytes} bytes, and one of dst[{i}] {other.nbytes}")


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
    codec: str | None = None,
    dtype: Any = None,
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

    codec: the host's blocks are coded (kvswap.codecs): each has Coding(bytes of the GPU's block, codec).coded_nbytes.
      They are coded on the way to the host and decoded on the way back, ordered as between Pools, which are made for
      the call: no other Pool may lie over the tensors. A block that does not fit is in failed_positions at the end.
    dtype: with codec: "bf16" or "fp16", where the GPU's tensors do not say it themselves (as uint8 or int16).

    Reading a tensor costs a microsecond or two in each call: an engine that has many tensors and calls in each step
    passes addresses to swap_cache_all_layers_async(), or makes Pools once.

    Tensors are held until the transfer ends. ValueError, IndexError, TypeError: wrong arguments, nothing moved;
    QueueFull, DeviceError: as there. Any thread may call."""
    source, target = _side(src, src_ids, "src"), _side(dst, dst_ids, "dst")
    _check_partners(source, target, codec, dtype)
    pointers = source.pointers("src"), target.pointers("dst")
    onboard, name = _C._way(pointers[0][0], pointers[1][0], device)
    gpu, cpu = (target, source) if onboard else (source, target)
    gpu_ptrs, cpu_ptrs = reversed(pointers) if onboard else pointers
    options: Any = {
        "stream": stream, "after": after, "path": path, "priority": priority, "max_ctas": max_ctas,
        "pace_gbps": pace_gbps, "layer_events": layer_events, "after_layers": after_layers,
    }  # fmt: skip
    if codec is not None:
        names = ("dst", "src") if onboard else ("src", "dst")
        pools = _coded_pools(name if device is None else device, gpu, cpu, codec, dtype, names)
        return _C.move_blocks(pools[onboard], pools[not onboard], src_ids, dst_ids, **options)
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
        device=device,
        **options,
    )
