"""How blocks are moved: kvswap's paths, and copies by hand, all between the same places in memory.

Methods by hand call the driver through ``_C._seam``, one call of the driver at a time, so that only the method differs.
A call costs about a microsecond of Python, which a caller in C does not pay.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from kvswap import _C, Direction
from kvswap._rig import PATHS

from .shapes import Place, Words

if TYPE_CHECKING:
    from kvswap.typing import Path, Priority


class NotMeasured(Exception):
    """Why a method cannot move this shape here."""


class Pending(Protocol):
    """Work that was queued; a Transfer is one."""

    @property
    def path(self) -> str: ...
    @property
    def elapsed(self) -> float | None: ...
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> None: ...
    def make_wait(self, stream: _C.Stream, /) -> None: ...


Submit: TypeAlias = Callable[[], Pending]


@dataclass(frozen=True)
class Method:
    """A way to move blocks. bind: prepares one shape in one direction; returns the function that queues the work."""

    key: str
    description: str
    bind: Callable[[Place, Direction, _C.Stream], Submit]
    path: str = ""  # the path that kvswap must take, if any


# -- kvswap -----------------------------------------------------------------------------------------------------------


def _swap(path: Path, priority: Priority = "normal") -> Callable[[Place, Direction, _C.Stream], Submit]:
    def bind(place: Place, direction: Direction, _: _C.Stream) -> Submit:
        return lambda: _C.swap_cache_all_layers_async(
            place.gpu_ptrs,
            place.host_ptrs,
            place.shape.block_nbytes,
            place.gpu_slots,
            place.host_slots,
            place.gpu_ids,
            place.host_ids,
            direction,
            cpu_stride=place.host_stride,
            device=place.device,
            path=path,
            priority=priority,
        )

    return bind


def _pointers(place: Place, direction: Direction, _: _C.Stream) -> Submit:
    src, dst = place.ends(direction)
    return lambda: _C.swap_blocks_batch(src, dst, place.shape.block_nbytes, device=place.device)


# -- the driver's calls by hand ---------------------------------------------------------------------------------------


class ByHand:
    """Queues work on a stream, its own or a given one, after the work of `compute`, between two events that time it."""

    _KEPT = 4  # pairs of events: more than are in flight at a time

    def __init__(self, device: _C.Device, compute: _C.Stream, stream: Any = None) -> None:
        self.stream = _C.Stream(device) if stream is None else stream
        self._handle: int = self.stream.handle if stream is None else stream.cuda_stream
        self._compute, self._fork = compute, _C.Event(device, timing=False)
        self._events = [(_C.Event(device), _C.Event(device)) for _ in range(self._KEPT)]
        self._used = 0

    def submit(self, queue: Callable[[int], None]) -> Pending:
        start, end = self._events[self._used % self._KEPT]
        self._used += 1
        self._fork.record(self._compute)
        self._fork.wait(self.stream)
        start.record(self.stream)
        queue(self._handle)
        end.record(self.stream)
        return _Queued(start, end)


@dataclass(frozen=True)
class _Queued:
    start: _C.Event
    end: _C.Event
    path: str = ""

    @property
    def elapsed(self) -> float | None:
        return self.start.elapsed_time(self.end) if self.end.query() else None

    def done(self) -> bool:
        return self.end.query()

    def wait(self, timeout: float | None = None) -> None:
        self.end.synchronize(timeout)

    def make_wait(self, stream: _C.Stream, /) -> None:
        self.end.wait(stream)


def _loop(place: Place, direction: Direction, compute: _C.Stream) -> Submit:
    device, by_hand, size = place.device, ByHand(place.device, compute), place.shape.block_nbytes
    src, dst = (ends.tolist() for ends in place.ends(direction))

    def queue(stream: int) -> None:
        for to, origin in zip(dst, src, strict=True):
            _C._seam(device, "copy", to, origin, size, stream)

    return lambda: by_hand.submit(queue)


def _batch(place: Place, direction: Direction, compute: _C.Stream) -> Submit:
    device, by_hand, sizes = place.device, ByHand(place.device, compute), place.sizes
    src, dst = place.ends(direction)
    return lambda: by_hand.submit(lambda stream: _C._seam(device, "copy_batch", dst, src, sizes, stream))


def _numpy(place: Place, direction: Direction, compute: _C.Stream) -> Submit:
    device, by_hand = place.device, ByHand(place.device, compute)

    def queue(stream: int) -> None:
        gpu, host = place.addresses()
        src, dst = (gpu, host) if direction == Direction.D2H else (host, gpu)
        sizes = np.full(len(src), place.shape.block_nbytes, np.uint64)
        _C._seam(device, "copy_batch", dst, src, sizes, stream)

    return lambda: by_hand.submit(queue)


class Pieces:
    """A list of copies in device memory, with addresses of the device, for kvswap's copy kernel."""

    def __init__(self, device: _C.Device, src: Words, dst: Words, sizes: Words) -> None:
        if not device.info["kernels"]:
            raise NotMeasured(f"no kernels: {device.info['kernels_note']}")
        table = np.stack([dst, src, sizes], axis=1)
        self._device, self._count, self._nbytes = device, len(table), table.nbytes
        self._host, self._gpu = device.alloc(table.nbytes, host=True), device.alloc(table.nbytes)
        np.ctypeslib.as_array((ctypes.c_uint64 * table.size).from_address(self._host.ptr))[:] = table.reshape(-1)

    def upload(self, stream: int) -> None:
        _C._seam(self._device, "copy", self._gpu.ptr, self._host.ptr, self._nbytes, stream)

    def launch(self, stream: int, threads: int, ctas: int | None = None) -> None:
        """ctas None: as many as there are copies."""
        _C._seam(self._device, "launch_copy", self._count, self._gpu.ptr, ctas or self._count, threads, stream)


def _as_seen(place: Place, ends: Words) -> Words:
    """Registered host memory may have another address on the device."""
    region = _C._seam(place.device, "pointer_query", int(ends[0]))
    apart = region["alias"] - region["base"] if region["alias"] else 0
    return (ends.astype(np.int64) + apart).astype(np.uint64)


def _warp(place: Place, direction: Direction, compute: _C.Stream) -> Submit:
    src, dst = (_as_seen(place, ends) for ends in place.ends(direction))
    by_hand, pieces = ByHand(place.device, compute), Pieces(place.device, src, dst, place.sizes)

    def queue(stream: int) -> None:
        pieces.upload(stream)
        pieces.launch(stream, threads=32)

    return lambda: by_hand.submit(queue)


# -- with torch and triton --------------------------------------------------------------------------------------------


def _torch(place: Place, direction: Direction, compute: _C.Stream) -> Submit:
    from .with_torch import by_hand

    return by_hand(place, direction, compute)


def _triton(place: Place, direction: Direction, compute: _C.Stream) -> Submit:
    from .with_torch import by_triton

    return by_triton(place, direction, compute)


# -- all of them ------------------------------------------------------------------------------------------------------

METHODS = {
    method.key: method
    for method in (
        Method("auto", "the path that kvswap picks", _swap("auto")),
        *(Method(path, f"kvswap, path {path}", _swap(path), path) for path in PATHS),
        Method("high", "the path that kvswap picks at priority high", _swap("auto", "high")),
        Method("background", "the path that kvswap picks at priority background", _swap("auto", "background")),
        Method("pointers", "kvswap, by a list of pointers instead of ids", _pointers),
        Method("loop", "a call of the driver for every copy", _loop),
        Method("batch", "cuMemcpyBatchAsync over the same pointers, 8,192 copies a call", _batch),
        Method("numpy", "pointers made with NumPy from ids, then batch: as vLLM's handler does", _numpy),
        Method(
            "warp",
            "one warp a block, a grid as long as the list, around kvswap's copy loop: the shape of FastDeploy's and "
            "SGLang's kernels",
            _warp,
        ),
        Method("triton", "12 CTAs of Triton, 8-byte words, H2D: the shape of vLLM's kernel", _triton),
        Method("torch", "torch by hand: index on the GPU, one copy to or from pinned memory", _torch),
    )
}


def paths(device: _C.Device) -> tuple[str, ...]:
    """kvswap's paths that there may be on such a device."""
    return (
        "auto",
        *(
            path["name"]
            for path in _C._paths()
            if not path["lender"] and (device.kind == "host" or not path["threads"])
        ),
    )
