"""FastDeploy's swap ops, with its names and positional arguments.

FastDeploy (releases 2.0 to 2.6) defines them in custom_ops/gpu_ops/: swap_cache.cu, swap_cache_batch.cu,
swap_cache_layout.cu and swap_cache_optimized.cu.

Each op copies blocks between caches on a GPU and host memory: block swap_block_ids_gpu[i] of every cache <-> block
swap_block_ids_cpu[i] of the cache's host memory. Common arguments:

cache: any tensor that kvswap takes (paddle's, torch's, NumPy's, ...), contiguous, of any element type: shape
  [num_blocks, kv_heads, block_size, head_dim], or [num_blocks, kv_heads, block_size] for scales. Host memory is an
  address, of cuda_host_alloc() or of any memory that the device can reach.
swap_block_ids_gpu, swap_block_ids_cpu: sequences of ints or integer arrays, of the same length; no target block twice.
  Error messages call them gpu_block_ids and cpu_block_ids, mode direction, and max_block_num_cpu num_cpu_blocks.
rank: selects the device: cuda:rank, or host:rank if there is no GPU. mode: 0 copies from the GPU to the host (D2H), 1
  from the host to the GPU (H2D).
stream: the swap behaves as if enqueued on this stream. None: CuPy's current stream if one is set (the swap then also
  starts after the tensor's stream), else the tensor's stream. device: a kvswap Device or its name, instead of rank's.

All arguments are checked before any byte moves: IndexError for an id, ValueError and TypeError for the rest. Ops that
are not async return when the copy is done, or raise its error, and wait for room in a full lane (60 s at most). Any
thread may call.
"""

from __future__ import annotations

import inspect
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from kvswap import _C
from kvswap.fastdeploy._tensors import Blocks, blocks_of, framework_gpu, order_of

if TYPE_CHECKING:
    from kvswap.typing import DeviceLike

__all__ = [
    "cuda_host_alloc",
    "cuda_host_free",
    "swap_cache",
    "swap_cache_all_layers",
    "swap_cache_all_layers_async",
    "swap_cache_layout",
    "swap_cache_layout_async",
    "swap_cache_per_layer",
    "swap_cache_per_layer_async",
]

_T = TypeVar("_T")
_Swap: TypeAlias = Callable[..., _T]  # the C function: returns the Transfer, or None when it is done
_Ids: TypeAlias = Any  # a sequence of ints, or an integer array
_Device: TypeAlias = "DeviceLike | None"


def _index(value: Any, name: str, least: int = 0) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not bool")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, not {type(value).__name__}") from None
    if number < least:
        raise ValueError(f"{name} is {number}: must be at least {least}")
    return number


@lru_cache(maxsize=64)
def _device_named(name: str) -> _C.Device:
    return _C.Device(name)


def _opened(device: DeviceLike) -> _C.Device:
    return _device_named(device) if isinstance(device, str) else _C.Device(device)


@lru_cache(maxsize=1)
def device_kind() -> str:
    """The kind of the devices that a GPU's number names: host devices if there is no GPU."""
    return "cuda" if _C._cuda_count()[0] > 0 else "host"


_last: _C.Device | None = None  # the device that the last op of this process used


def device_of(rank: Any, device: _Device = None) -> _C.Device:
    """The given device, else the one that `rank` selects; opened once and cached."""
    global _last
    if not isinstance(device, _C.Device):
        device = _opened(f"{device_kind()}:{_index(rank, 'rank')}" if device is None else device)
    _last = device
    return device


_noted: int | None = None  # the GPU that paddle was set to last


def note_gpu(name: Any) -> None:
    """Remember the GPU that paddle.set_device() sets. FastDeploy's managers set paddle to the CPU before they allocate
    host memory; without this record kvswap would open another GPU for the allocation."""
    global _noted
    kind, _, number = str(name).partition(":")
    if kind == "gpu" and number.isdigit():
        _noted = int(number)


def current_device(device: _Device = None, tensor: Any = None) -> _C.Device:
    """The device of an op without a rank. The first of: the given device; the tensor's GPU; the GPU that the tensor's
    framework (or paddle, if imported) has set, or had set before the CPU; the device of the last op; the current GPU;
    host:0. GPU number N selects a device as `rank` N does."""
    global _last
    if device is None:
        number = framework_gpu(tensor)
        number = _noted if number is None else number
        device = None if number is None else f"{device_kind()}:{number}"
    if device is not None and not isinstance(device, _C.Device):
        device = _opened(device)
    _last = device or _last or _C.Device(None)
    return _last


def _pairs(tensors: Any, ptrs: Any) -> tuple[list[Any], list[int]]:
    """The caches and their host addresses, without the pairs (None, 0): MLA's layers have no value cache."""
    if isinstance(tensors, str) or not isinstance(tensors, Sequence):
        raise TypeError(f"cache_gpu_tensors must be a list of tensors, not {type(tensors).__name__}")
    if len(tensors) != len(ptrs):
        raise ValueError(
            f"cache_gpu_tensors has {len(tensors)} tensors and cache_cpu_ptrs has {len(ptrs)} addresses: one for each"
        )
    kept, addresses = [], []
    for i, (tensor, ptr) in enumerate(zip(tensors, ptrs, strict=True)):
        address = ptr if type(ptr) is int and ptr > 0 else _index(ptr, f"cache_cpu_ptrs[{i}]")
        if tensor is None and address == 0:
            continue
        if tensor is None or address == 0:
            missing = "cache_gpu_tensors" if tensor is None else "cache_cpu_ptrs"
            raise ValueError(f"{missing}[{i}] is {None if tensor is None else 0}, but its other side is not")
        kept.append(tensor)
        addresses.append(address)
    return kept, addresses


def _submit(
    swap: _Swap[_T],
    tensors: list[Any],
    blocks: list[Blocks],
    ptrs: list[int],
    cpu_blocks: int,
    ids: tuple[_Ids, _Ids],
    mode: int,
    device: _C.Device,
    stream: Any,
    cpu_stride: int | None = None,
) -> _T:
    if all(map(_is_empty, ids)):  # without ids there is nothing to check
        tensors, blocks, ptrs, ids = [], [], [], ((), ())
    stream, after = order_of(tensors[0], stream) if tensors else (stream, ())
    nbytes, numbers = [block.nbytes for block in blocks], [block.num for block in blocks]
    options: Any = {"cpu_stride": cpu_stride, "stream": stream, "after": after, "device": device}
    return swap(tensors, ptrs, nbytes, numbers, cpu_blocks, *ids, mode, **options)


def _is_empty(ids: _Ids) -> bool:
    return hasattr(ids, "__len__") and len(ids) == 0


# -- the ops: each returns when the copy is done, and its _async twin returns the Transfer at once ---------------------

_P = ParamSpec("_P")
_AT_ONCE = """As {}(), but returns the Transfer at once: wait for the Transfer or its `event`, or on a
stream."""


def _pair(
    op: Callable[Concatenate[_Swap[Any], _P], Any],
) -> tuple[Callable[_P, None], Callable[_P, _C.Transfer]]:
    """The two ops that are `op` with one or the other of kvswap's functions, which `op` takes first."""

    def done(*args: _P.args, **kwargs: _P.kwargs) -> None:
        op(_C.swap_cache_all_layers, *args, **kwargs)

    def at_once(*args: _P.args, **kwargs: _P.kwargs) -> _C.Transfer:
        transfer: _C.Transfer = op(_C.swap_cache_all_layers_async, *args, **kwargs)
        return transfer

    signature = inspect.signature(op)
    name, parameters = op.__name__.lstrip("_"), list(signature.parameters.values())[1:]
    for twin, suffix, returns in ((done, "", "None"), (at_once, "_async", "_C.Transfer")):
        twin.__name__ = twin.__qualname__ = name + suffix
        twin.__signature__ = signature.replace(parameters=parameters, return_annotation=returns)  # type: ignore[union-attr]
    op.__qualname__ = name  # for Python's errors
    done.__doc__, at_once.__doc__ = op.__doc__, _AT_ONCE.format(name)
    return done, at_once


def _swap_cache_all_layers(
    swap: _Swap[_T],
    cache_gpu_tensors: Sequence[Any],
    cache_cpu_ptrs: Sequence[int],
    max_block_num_cpu: int,
    swap_block_ids_gpu: _Ids,
    swap_block_ids_cpu: _Ids,
    rank: int,
    mode: int,
    *,
    stream: Any = None,
    device: _Device = None,
) -> _T:
    """Copy the same blocks of every cache; returns when the copy is done. FastDeploy's swap_cache_batch.cu.

    cache_gpu_tensors: a list of caches, each with its own number of blocks and block size. An empty list does nothing
      (a model without value caches). cache_cpu_ptrs: one address for each cache, of max_block_num_cpu blocks.

    Other arguments, order and errors: help(kvswap.fastdeploy.ops).
    """
    on, ids = device_of(rank, device), (swap_block_ids_gpu, swap_block_ids_cpu)
    kept, addresses = _pairs(cache_gpu_tensors, cache_cpu_ptrs)
    blocks = [blocks_of(tensor, f"cache_gpu_tensors[{i}]") for i, tensor in enumerate(kept)]
    return _submit(swap, kept, blocks, addresses, max_block_num_cpu, ids, mode, on, stream)


def _swap_cache_per_layer(
    swap: _Swap[_T],
    cache_gpu: Any,
    cache_cpu_ptr: int,
    max_block_num_cpu: int,
    swap_block_ids_gpu: _Ids,
    swap_block_ids_cpu: _Ids,
    rank: int,
    mode: int,
    *,
    stream: Any = None,
    device: _Device = None,
) -> _T:
    """Copy blocks of one cache; returns when the copy is done. FastDeploy's swap_cache.cu and swap_cache_optimized.cu.

    cache_gpu: the cache. cache_cpu_ptr: the address of max_block_num_cpu blocks. An event recorded after the call on
      CuPy's current stream (on the tensor's, if CuPy has none) completes after the copy.

    Other arguments, order and errors: help(kvswap.fastdeploy.ops).
    """
    on, ids = device_of(rank, device), (swap_block_ids_gpu, swap_block_ids_cpu)
    blocks, address = [blocks_of(cache_gpu, "cache_gpu")], [_index(cache_cpu_ptr, "cache_cpu_ptr", 1)]
    return _submit(swap, [cache_gpu], blocks, address, max_block_num_cpu, ids, mode, on, stream)


def _layout_blocks(tensors: list[Any], cache_shape: Any) -> list[Blocks]:
    if not tensors:  # a model without value caches has no shape for them either
        return []
    shape = [_index(extent, f"cache_shape[{i}]", 1) for i, extent in enumerate(cache_shape)]
    if len(shape) not in (3, 4):
        raise ValueError(f"cache_shape is {shape}: it has 3 or 4 extents, the number of blocks first")
    found = [blocks_of(tensor, f"cache_gpu_tensors[{i}]") for i, tensor in enumerate(tensors)]
    for i, (tensor, blocks) in enumerate(zip(tensors, found, strict=True)):
        extents = [int(extent) for extent in tensor.shape]
        if math.prod(shape[1:]) != math.prod(extents[1:]) or blocks.nbytes != found[0].nbytes:
            raise ValueError(
                f"cache_gpu_tensors[{i}] has shape {extents} ({blocks.nbytes} bytes a block), but cache_shape is "
                f"{shape} and the first tensor's blocks have {found[0].nbytes} bytes: all layers are alike"
            )
    return found


def _swap_cache_layout(
    swap: _Swap[_T],
    cache_gpu_tensors: Sequence[Any],
    cache_cpu_ptrs: int,
    cache_shape: Sequence[int],
    gpu_block_ids: _Ids,
    cpu_block_ids: _Ids,
    rank: int,
    mode: int,
    *,
    stream: Any = None,
    device: _Device = None,
) -> _T:
    """Copy blocks between layer-first caches and block-first host objects, in one transfer; returns when the copy is
    done. FastDeploy's swap_cache_layout.cu.

    cache_gpu_tensors: the layers, all of shape cache_shape. cache_cpu_ptrs: one address. Host object j holds one block
      of every layer, [num_layers, kv_heads, block_size, head_dim], at cache_cpu_ptrs + j * (bytes of an object).

    Other arguments, order and errors: help(kvswap.fastdeploy.ops).
    """
    on, base = device_of(rank, device), _index(cache_cpu_ptrs, "cache_cpu_ptrs", 1)
    if isinstance(cache_gpu_tensors, str) or not isinstance(cache_gpu_tensors, Sequence):
        raise TypeError(f"cache_gpu_tensors must be a list of tensors, not {type(cache_gpu_tensors).__name__}")
    tensors = [] if _is_empty(gpu_block_ids) else list(cache_gpu_tensors)
    blocks = _layout_blocks(tensors, cache_shape)
    *offsets, stride = itertools.accumulate((block.nbytes for block in blocks), initial=0)
    ptrs = [base + offset for offset in offsets]
    most = 1 + max((int(i) for i in cpu_block_ids), default=-1)  # the op is not told how many host objects there are
    ids = gpu_block_ids, cpu_block_ids
    return _submit(swap, tensors, blocks, ptrs, most, ids, mode, on, stream, stride or None)


swap_cache_all_layers, swap_cache_all_layers_async = _pair(_swap_cache_all_layers)
swap_cache_per_layer, swap_cache_per_layer_async = _pair(_swap_cache_per_layer)
swap_cache_layout, swap_cache_layout_async = _pair(_swap_cache_layout)
swap_cache = swap_cache_per_layer  # the older name


# -- host memory ------------------------------------------------------------------------------------------------------

_FLAGS = 0x01 | 0x02 | 0x04  # portable, mapped (this memory always is both), write-combined (ignored)


def cuda_host_alloc(nbytes: int, flags: int = 0, *, device: _Device = None) -> int:
    """Allocate pinned host memory; returns its address. FastDeploy's custom_ops/gpu_ops/cpp_extensions.cc.

    nbytes: at least 1. flags: those of cudaHostAlloc, 0 to 7. The memory is always portable and mapped. The flag
      write-combined is ignored: it makes reads by the CPU slow and no copy faster.
    device: the device to allocate through, which is opened for it; None: as current_device() chooses. Every device can
      copy the memory.

    ValueError: a wrong size or flag. MemoryError, DeviceError: the allocation failed. Any thread may call.
    """
    size, bits = _index(nbytes, "nbytes", 1), _index(flags, "flags")
    if bits & ~_FLAGS:
        raise ValueError(f"flags is {bits:#x}: of cudaHostAlloc's flags there are 1, 2 and 4")
    return _C.host_alloc(size, device=current_device(device))


def cuda_host_free(ptr: int) -> None:
    """Free what cuda_host_alloc() returned, after the transfers that use it and all other work of the device.

    ValueError: not an address of cuda_host_alloc(), or freed already. TimeoutError: they have not ended after 60 s, and
    the memory stays allocated. Any thread may call.
    """
    _C.host_free(_index(ptr, "ptr"))
