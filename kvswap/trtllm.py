"""TensorRT-LLM's copy functions for KV cache pages (kv_cache_manager_v2), implemented by kvswap.

    import kvswap.trtllm as engine
    engine.batched_copy(engine.CacheTier.HOST_MEM, engine.CacheTier.GPU_MEM, page_nbytes, tasks, stream)

Names and arguments follow TensorRT-LLM's tensorrt_llm/runtime/kv_cache_manager_v2 (_copy_engine.py, _common.py) and the
native functions below it (copy_device_to_host and similar). Every function behaves as if enqueued on `stream`: the
copies start after all its work so far, its later work waits for them, and the call returns at once.

    tasks      a sequence of (dst, src) pairs of addresses, of CopyTask or of any object with .dst and .src, or an array
               (n, 2) of int64 or uint64: dst in column 0, src in column 1. Empty: does nothing.
    num_bytes  bytes of every task; any number
    stream     int handle, or a torch, cupy or kvswap stream
    device     kvswap.Device, its name, or None: the stream's if it is a kvswap, torch or cupy stream, else the
               current GPU, else host:0

The caller keeps the addresses mapped, and accesses their bytes only by work on `stream`, until `stream` has executed
the copies. A copy that the device refuses when queued is an error of the call. A later failure is sticky: the device
reports errors from then on. Files (CacheTier.DISK) are not supported. Any thread may call.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvswap import _C
from kvswap._devices import log_build

if TYPE_CHECKING:
    from kvswap.typing import DeviceLike

__all__ = [
    "CacheTier",
    "CopyTask",
    "batched_copy",
    "copy_device_to_device",
    "copy_device_to_host",
    "copy_host_to_device",
    "copy_host_to_host",
]

log_build()

_DISK_BACKENDS = ("posix", "nixl_gds")

Tasks: TypeAlias = "Iterable[Any] | NDArray[Any]"
_Addresses: TypeAlias = NDArray[np.uint64]


class CacheTier(IntEnum):
    """The memory that holds a page."""

    GPU_MEM = 0
    HOST_MEM = 1
    DISK = 2


_MEMORIES = {CacheTier.GPU_MEM: ("pinned host", "pageable host"), CacheTier.HOST_MEM: ("device",)}  # not of the tier


class CopyTask(NamedTuple):
    """One page: its destination and source addresses."""

    dst: int
    src: int


def batched_copy(
    dst_cache_tier: CacheTier,
    src_cache_tier: CacheTier,
    num_bytes: int,
    tasks: Tasks,
    stream: Any,
    disk_backend: str = "posix",
    gds_thread_count: int = 8,
    *,
    device: DeviceLike | None = None,
) -> None:
    """Copy num_bytes from each task's src to its dst, from one tier to the other, as if enqueued on `stream`.

    disk_backend, gds_thread_count: checked and ignored; they apply to files.

    kvswap.Error: a tier is DISK. ValueError, TypeError: wrong arguments, also addresses of another tier than
    named; QueueFull; DeviceError. After an error nothing has moved, unless the device refused only some of the copies.
    """
    dst, src = CacheTier(dst_cache_tier), CacheTier(src_cache_tier)
    if disk_backend not in _DISK_BACKENDS:
        raise ValueError(f"disk_backend is {disk_backend!r}; it is one of {', '.join(_DISK_BACKENDS)}")
    if operator.index(gds_thread_count) < 1:
        raise ValueError(f"gds_thread_count is {gds_thread_count}: must be at least 1")
    if CacheTier.DISK in (dst, src):
        raise _C.Error(f"{src.name} to {dst.name}: the file tier is not there yet")
    _copy(dst, src, tasks, num_bytes, stream, device)


def copy_device_to_host(tasks: Tasks, num_bytes: int, stream: Any, *, device: DeviceLike | None = None) -> int:
    """Copy each task's num_bytes from GPU to host memory, as if enqueued on `stream`; returns a CUresult.

    Returns 0 or the code of the failed driver call, as TensorRT-LLM's native function does. Other errors are raised:
    ValueError, TypeError, QueueFull, kvswap.Error.
    """
    return _result(CacheTier.HOST_MEM, CacheTier.GPU_MEM, tasks, num_bytes, stream, device)


def copy_host_to_device(tasks: Tasks, num_bytes: int, stream: Any, *, device: DeviceLike | None = None) -> int:
    """Copy each task's num_bytes from host to GPU memory; otherwise as copy_device_to_host()."""
    return _result(CacheTier.GPU_MEM, CacheTier.HOST_MEM, tasks, num_bytes, stream, device)


def copy_device_to_device(tasks: Tasks, num_bytes: int, stream: Any, *, device: DeviceLike | None = None) -> int:
    """Copy each task's num_bytes within GPU memory; otherwise as copy_device_to_host()."""
    return _result(CacheTier.GPU_MEM, CacheTier.GPU_MEM, tasks, num_bytes, stream, device)


def copy_host_to_host(tasks: Tasks, num_bytes: int, stream: Any, *, device: DeviceLike | None = None) -> int:
    """Copy each task's num_bytes within host memory; otherwise as copy_device_to_host()."""
    return _result(CacheTier.HOST_MEM, CacheTier.HOST_MEM, tasks, num_bytes, stream, device)


def _result(
    dst: CacheTier, src: CacheTier, tasks: Tasks, num_bytes: int, stream: Any, device: DeviceLike | None
) -> int:
    try:
        _copy(dst, src, tasks, num_bytes, stream, device)
    except _C.DeviceError as error:
        if error.code == 0:  # not a driver call: kvswap's own error
            raise
        return error.code
    return 0


def _copy(dst: CacheTier, src: CacheTier, tasks: Tasks, num_bytes: int, stream: Any, device: DeviceLike | None) -> None:
    dst_ptrs, src_ptrs = _addresses(tasks)
    if not dst_ptrs.size:
        return
    on = _device_of(stream) if device is None else device if isinstance(device, _C.Device) else _C.Device(device)
    _check_tier(on, "dst", int(dst_ptrs[0]), dst)  # the first address; the core checks that all have one direction
    _check_tier(on, "src", int(src_ptrs[0]), src)
    try:
        transfer = _C.swap_blocks_batch(src_ptrs, dst_ptrs, num_bytes, stream=stream, device=on)
    except (TypeError, ValueError) as error:
        text = re.sub(r"\b(dst|src)_ptrs\[(\d+)\]", r"tasks[\2].\1", str(error)).replace("sizes", "num_bytes")
        text = re.sub(r"\bentry (\d+)", r"tasks[\1]", text)
        raise type(error)(text) from None
    transfer.make_wait(stream)  # ordered already; this call raises refused copies


def _device_of(stream: Any) -> _C.Device:
    if isinstance(stream, _C.Stream):
        return stream.device
    ordinal = getattr(stream, "device_index", getattr(stream, "device_id", None))  # torch's, cupy's
    return _C.Device(f"cuda:{ordinal}" if isinstance(ordinal, int) and ordinal >= 0 else None)


def _check_tier(device: _C.Device, name: str, address: int, tier: CacheTier) -> None:
    """Refuse memory that is known to be of another tier. The core refuses unmapped addresses."""
    try:
        memory = _C._seam(device, "pointer_query", address)["memory"]
    except (ValueError, _C.DeviceError):
        return
    if memory in _MEMORIES[tier]:
        raise ValueError(f"tasks[0].{name} = 0x{address:x} is {memory} memory, not {tier.name}")


def _addresses(tasks: Tasks) -> tuple[_Addresses, _Addresses]:
    """The dst and the src addresses of all tasks."""
    if isinstance(tasks, np.ndarray):
        if tasks.ndim != 2 or tasks.shape[1] != 2 or tasks.dtype not in (np.int64, np.uint64):
            raise ValueError(
                f"tasks is an array of {tasks.dtype}, shape {tasks.shape}: must be int64 or uint64, shape (n, 2)"
            )
        both = np.ascontiguousarray(tasks.T).view(np.uint64)
        return both[0], both[1]
    items = tasks if isinstance(tasks, list | tuple) else list(tasks)
    try:
        return _gather(items)
    except (AttributeError, OverflowError, TypeError, ValueError):
        _complain(items)
        raise


def _gather(items: Sequence[Any]) -> tuple[_Addresses, _Addresses]:
    if not items:
        return np.empty(0, np.uint64), np.empty(0, np.uint64)
    if isinstance(items[0], tuple):
        dsts, srcs = zip(*items, strict=True)
    else:
        dsts, srcs = tuple(task.dst for task in items), tuple(task.src for task in items)
    count = len(items)
    return (
        np.fromiter(map(operator.index, dsts), np.uint64, count),
        np.fromiter(map(operator.index, srcs), np.uint64, count),
    )


def _complain(items: Sequence[Any]) -> None:
    """Raise an error that names the malformed task."""
    for i, task in enumerate(items):
        if not isinstance(task, tuple) and not (hasattr(task, "dst") and hasattr(task, "src")):
            raise TypeError(f"tasks[{i}] must be a pair (dst, src) or have .dst and .src, not {type(task).__name__}")
        pair = task if isinstance(task, tuple) else (task.dst, task.src)
        if len(pair) != 2:
            raise ValueError(f"tasks[{i}] has {len(pair)} items: must be a pair (dst, src)")
        for name, address in zip(("dst", "src"), pair, strict=True):
            if not hasattr(address, "__index__"):
                raise TypeError(f"tasks[{i}].{name} must be an address, not {type(address).__name__}")
            if not 0 <= operator.index(address) < 1 << 64:
                raise ValueError(f"tasks[{i}].{name} is {address}: no address")
