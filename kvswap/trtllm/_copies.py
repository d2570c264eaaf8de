"""The copy functions of kv_cache_manager_v2. Its pages may be in files (CacheTier.DISK)."""

from __future__ import annotations

import operator
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvswap import _C

if TYPE_CHECKING:
    from kvswap.typing import DeviceLike

_DISK_BACKENDS = ("posix", "nixl_gds")
_PAGE = 4096  # files opened with O_DIRECT want memory at its multiples
_CHUNK = 16 << 20  # of staging
_CHUNKS = 4
_MOST_PENDING = 4096  # copies of files that have not ended
_ROOM_SECONDS = 60.0  # limit of a wait for room in the stream's queue

Tasks: TypeAlias = "Iterable[Any] | NDArray[Any]"
_Addresses: TypeAlias = NDArray[np.uint64]


class CacheTier(IntEnum):
    """The memory that holds a page."""

    GPU_MEM = 0
    HOST_MEM = 1
    DISK = 2


_MEMORIES = {CacheTier.GPU_MEM: ("pinned host", "pageable host"), CacheTier.HOST_MEM: ("device",)}  # not of the tier


class DiskAddress(NamedTuple):
    """A page of an open file: the descriptor, and the offset of its first byte."""

    fd: int
    pos: int


class CopyTask(NamedTuple):
    """One page: its destination and source."""

    dst: int | DiskAddress
    src: int | DiskAddress


class DiskCopy:
    """Copies from or to files, queued on a stream. Dropping it changes nothing. Any thread may call."""

    __slots__ = ("_end", "_jobs", "_told")

    def __init__(self, end: _C.Event, jobs: list[tuple[Any, int]]) -> None:
        self._end = end
        self._jobs = jobs  # (C's copy, its first task)
        self._told = False

    def done(self) -> bool:
        """Whether the stream has executed the copies. Never blocks. DeviceError: the device is lost."""
        return self._end.query()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the stream has executed the copies, and raise the first failure.

        timeout: seconds, None for no limit; after TimeoutError the copies go on. Ctrl-C works.
        """
        self._end.synchronize(timeout)
        failed = self.failed
        if failed:
            raise _first(failed)

    @property
    def failed(self) -> dict[int, Exception]:
        """{position of a task: why it failed}; empty until the end."""
        failed: dict[int, Exception] = {}
        if not self._ended():
            return failed
        for job, first in self._jobs:
            for position, reason in _C._disk_failed(job):
                failed.setdefault(first + position, reason)
        self._told = True
        return dict(sorted(failed.items()))

    def _ended(self) -> bool:
        return all(_C._disk_ended(job) for job, _ in self._jobs)


def _first(failed: dict[int, Exception]) -> Exception:
    position, reason = next(iter(failed.items()))
    more = f"; in all {len(failed)} tasks failed" if len(failed) > 1 else ""
    return _C.Error(f"tasks[{position}]: {reason}{more}")


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
) -> DiskCopy | None:
    """Copy num_bytes from each task's src to its dst, from one tier to the other, as if enqueued on `stream`.

    disk_backend: "posix" or "nixl_gds"; kvswap moves the same bytes by the same way for both.
    gds_thread_count: threads that read and write files at once, in one call.

    Returns None, or a DiskCopy if a tier is DISK. ValueError, TypeError: wrong arguments, also addresses of another
    tier than named; QueueFull: no room in the stream's queue for 60 seconds; DeviceError; kvswap.Error: an earlier copy
    of files has failed. After an error nothing has moved, unless the device refused only some of the copies, or pages
    that go in several chunks found no room for all of them.
    """
    dst, src = CacheTier(dst_cache_tier), CacheTier(src_cache_tier)
    if disk_backend not in _DISK_BACKENDS:
        raise ValueError(f"disk_backend is {disk_backend!r}; it is one of {', '.join(_DISK_BACKENDS)}")
    if operator.index(gds_thread_count) < 1:
        raise ValueError(f"gds_thread_count is {gds_thread_count}: must be at least 1")
    if CacheTier.DISK in (dst, src):
        return _copy_files(dst, src, tasks, num_bytes, stream, device, operator.index(gds_thread_count))
    _raise_earlier()
    _copy(dst, src, tasks, num_bytes, stream, device)
    return None


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


def copy_disk_to_disk(tasks: Tasks, num_bytes: int, stream: Any, *, device: DeviceLike | None = None) -> int:
    """Copy each task's num_bytes between open files; otherwise as copy_device_to_host().

    A file's failure is raised by the next call of this module.
    """
    return _result(CacheTier.DISK, CacheTier.DISK, tasks, num_bytes, stream, device)


def copy_disk_to_host(tasks: Tasks, num_bytes: int, stream: Any, *, device: DeviceLike | None = None) -> int:
    """Copy each task's num_bytes from an open file to host memory; otherwise as copy_disk_to_disk()."""
    return _result(CacheTier.HOST_MEM, CacheTier.DISK, tasks, num_bytes, stream, device)


def copy_host_to_disk(tasks: Tasks, num_bytes: int, stream: Any, *, device: DeviceLike | None = None) -> int:
    """Copy each task's num_bytes from host memory to an open file; otherwise as copy_disk_to_disk()."""
    return _result(CacheTier.DISK, CacheTier.HOST_MEM, tasks, num_bytes, stream, device)


def _result(
    dst: CacheTier, src: CacheTier, tasks: Tasks, num_bytes: int, stream: Any, device: DeviceLike | None
) -> int:
    try:
        batched_copy(dst, src, num_bytes, tasks, stream, device=device)
    except _C.DeviceError as error:
        if error.code == 0:  # not a driver call: kvswap's own error
            raise
        return error.code
    return 0


def _copy(dst: CacheTier, src: CacheTier, tasks: Tasks, num_bytes: int, stream: Any, device: DeviceLike | None) -> None:
    dst_ptrs, src_ptrs = _addresses(tasks)
    if not dst_ptrs.size:
        return
    on = _device(stream, device)
    _check_tier(on, "dst", int(dst_ptrs[0]), dst)  # the first address; the core checks that all have one direction
    _check_tier(on, "src", int(src_ptrs[0]), src)
    _swap(src_ptrs, dst_ptrs, num_bytes, stream, on)


def _swap(src_ptrs: _Addresses, dst_ptrs: _Addresses, num_bytes: int, stream: Any, on: _C.Device) -> None:
    end = time.monotonic() + _ROOM_SECONDS
    try:
        while True:
            try:
                transfer = _C.swap_blocks_batch(src_ptrs, dst_ptrs, num_bytes, stream=stream, device=on)
                break
            except _C.QueueFull:  # a stream knows no limit, and earlier chunks are queued already
                if time.monotonic() > end:
                    raise
                time.sleep(0.001)
    except (TypeError, ValueError) as error:
        text = re.sub(r"\b(dst|src)_ptrs\[(\d+)\]", r"tasks[\2].\1", str(error)).replace("sizes", "num_bytes")
        text = re.sub(r"\bentry (\d+)", r"tasks[\1]", text)
        raise type(error)(text) from None
    transfer.make_wait(stream)  # ordered already; this call raises refused copies


def _device(stream: Any, device: DeviceLike | None) -> _C.Device:
    return _device_of(stream) if device is None else device if isinstance(device, _C.Device) else _C.Device(device)


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


# -- files ------------------------------------------------------------------------------------------------------------


class _Staging:
    """Pinned memory of a device between GPU pages and files, in chunks. An event a chunk marks its last use."""

    def __init__(self, device: _C.Device) -> None:
        self.memory = device.alloc(_CHUNKS * _CHUNK, host=True)
        self.ends = [_C.Event(device, timing=False) for _ in range(_CHUNKS)]
        self.next = 0
        self.lock = threading.Lock()

    def take(self, stream: Any) -> tuple[int, _C.Event]:
        """The next chunk, for work that is queued on the stream from now on. Call with the lock."""
        at, self.next = self.next, (self.next + 1) % _CHUNKS
        self.ends[at].wait(stream)
        return self.memory.ptr + at * _CHUNK, self.ends[at]


_lock = threading.Lock()
_stagings: dict[_C.Device, _Staging] = {}  # guarded by _lock
_pending: deque[DiskCopy] = deque()  # guarded by _lock: copies whose failures nobody may have seen


def _staging_of(device: _C.Device) -> _Staging:
    with _lock:
        if device not in _stagings:
            _stagings[device] = _Staging(device)
        return _stagings[device]


def _raise_earlier() -> None:
    """Raise a failure of an earlier copy of files that was not told yet."""
    if not _pending:
        return
    with _lock:
        ended = [copy for copy in _pending if copy._told or copy._ended()]
        for copy in ended:
            _pending.remove(copy)
    for i, copy in enumerate(ended):
        failed = {} if copy._told else copy.failed
        if failed:
            with _lock:
                _pending.extendleft(ended[i + 1 :])
            raise _C.Error(f"an earlier copy of files has failed: {_first(failed)}")


def _make_room() -> None:
    with _lock:
        for copy in [copy for copy in _pending if len(_pending) >= _MOST_PENDING and _is_lost(copy)]:
            _pending.remove(copy)
        if len(_pending) >= _MOST_PENDING:
            raise _C.QueueFull(f"{len(_pending)} copies of files have not ended: nothing was queued; wait for one")


def _is_lost(copy: DiskCopy) -> bool:
    try:
        copy.done()
    except _C.DeviceError:
        return True
    return False


def _copy_files(
    dst: CacheTier, src: CacheTier, tasks: Tasks, num_bytes: int, stream: Any, device: DeviceLike | None, threads: int
) -> DiskCopy:
    _raise_earlier()
    dsts, srcs, dst_fds, src_fds = _places(dst, src, tasks)
    on, nbytes = _device(stream, device), operator.index(num_bytes)
    copy = DiskCopy(_C.Event(on, timing=False), [])
    if not dsts.size or not nbytes:
        return copy
    for name, tier, places in (("dst", dst, dsts), ("src", src, srcs)):
        if tier is not CacheTier.DISK:
            _check_tier(on, name, int(places[0]), tier)
    _make_room()
    try:
        if CacheTier.GPU_MEM in (dst, src):
            _C._disk_check(dsts, srcs, dst_fds, src_fds, nbytes)
            _through_staging(copy, (dsts, srcs, dst_fds, src_fds), nbytes, stream, on, threads)
        else:
            job = _C._disk_queue(dsts, srcs, dst_fds, src_fds, nbytes, on, stream, threads, False)
            copy._jobs.append((job, 0))
    finally:
        if copy._jobs:
            copy._end.record(stream)
            with _lock:
                _pending.append(copy)
    return copy


def _through_staging(
    copy: DiskCopy, places: tuple[Any, ...], nbytes: int, stream: Any, on: _C.Device, threads: int
) -> None:
    """Both hops, chunk by chunk. A page larger than a chunk goes in parts."""
    dsts, srcs, dst_fds, src_fds = places
    staging = _staging_of(on)
    with staging.lock:
        for part in range(0, nbytes, _CHUNK):
            size = min(_CHUNK, nbytes - part)
            pitch = -(-size // _PAGE) * _PAGE
            for first in range(0, dsts.size, _CHUNK // pitch):
                some = slice(first, first + _CHUNK // pitch)
                to, of = dsts[some] + np.uint64(part), srcs[some] + np.uint64(part)
                none = np.full(to.size, -1, np.int64)
                ptr, end = staging.take(stream)
                middle = np.uint64(ptr) + np.arange(to.size, dtype=np.uint64) * np.uint64(pitch)
                try:
                    if dst_fds[0] >= 0:
                        _swap(of, middle, size, stream, on)
                        job = _C._disk_queue(to, middle, dst_fds[some], none, size, on, stream, threads, False)
                        copy._jobs.append((job, first))
                    else:
                        job = _C._disk_queue(middle, of, none, src_fds[some], size, on, stream, threads, True)
                        copy._jobs.append((job, first))
                        _swap(middle, to, size, stream, on)
                finally:
                    end.record(stream)


def _places(dst: CacheTier, src: CacheTier, tasks: Tasks) -> tuple[Any, ...]:
    """Addresses or offsets of both sides, and their descriptors, -1 for memory."""
    if isinstance(tasks, np.ndarray):
        raise TypeError("tasks is an array, which holds no descriptors: pass pairs with a DiskAddress")
    items = tasks if isinstance(tasks, list | tuple) else list(tasks)
    for i, task in enumerate(items):
        if not isinstance(task, tuple) and not (hasattr(task, "dst") and hasattr(task, "src")):
            raise TypeError(f"tasks[{i}] must be a pair (dst, src) or have .dst and .src, not {type(task).__name__}")
        if isinstance(task, tuple) and len(task) != 2:
            raise ValueError(f"tasks[{i}] has {len(task)} items: must be a pair (dst, src)")
    pairs = [task if isinstance(task, tuple) else (task.dst, task.src) for task in items]
    dsts, dst_fds = _side("dst", dst, [pair[0] for pair in pairs])
    srcs, src_fds = _side("src", src, [pair[1] for pair in pairs])
    return dsts, srcs, dst_fds, src_fds


def _side(name: str, tier: CacheTier, places: list[Any]) -> tuple[_Addresses, NDArray[np.int64]]:
    numbers, fds = np.empty(len(places), np.uint64), np.full(len(places), -1, np.int64)
    for i, place in enumerate(places):
        number = place
        if tier is CacheTier.DISK:
            if not hasattr(place, "fd") or not hasattr(place, "pos"):
                raise TypeError(f"tasks[{i}].{name} must be a DiskAddress(fd, pos), not {type(place).__name__}")
            number = place.pos
            fds[i] = _within(operator.index(place.fd), 1 << 31, f"tasks[{i}].{name}.fd", "a descriptor")
        if not hasattr(number, "__index__"):
            raise TypeError(f"tasks[{i}].{name} must be an address, not {type(number).__name__}")
        numbers[i] = _within(operator.index(number), 1 << 64, f"tasks[{i}].{name}", "an address or offset")
    return numbers, fds


def _within(number: int, end: int, name: str, what: str) -> int:
    if 0 <= number < end:
        return number
    raise ValueError(f"{name} is {number}: no {what.split(maxsplit=1)[1]}")


# -- tasks ------------------------------------------------------------------------------------------------------------


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
