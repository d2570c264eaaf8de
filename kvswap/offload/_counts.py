"""Counts of the jobs of all handlers of this process, by device and direction. They outlive the handlers."""

from __future__ import annotations

import os
import threading
import weakref
from bisect import bisect_left
from typing import Any

from kvswap import _C

_BOUNDS = _C._metrics_bounds()[0]


class JobCounts:
    """Of one device and direction ("d2h", "h2d"). Guarded by the module's lock."""

    def __init__(self) -> None:
        self.failed = self.bytes = self.stalls = 0
        self.not_stored: dict[str, int] = {}  # blocks, by why
        self.device_seconds = self.queued_seconds = 0.0
        self.buckets = [0] * (len(_BOUNDS) + 1)  # of done jobs, by duration
        self.seconds = 0.0


_lock = threading.RLock()  # a collection under it may end a job in a destructor
_counts: dict[tuple[str, str], JobCounts] = {}
_handlers: weakref.WeakSet[Any] = weakref.WeakSet()


def _forget() -> None:
    """In the child of a fork: the jobs are the parent's."""
    global _lock
    _lock = threading.RLock()
    _counts.clear()
    _handlers.clear()


os.register_at_fork(after_in_child=_forget)


def direction_of(handler: Any) -> str:
    return "d2h" if handler.gpu_to_cpu else "h2d"


def _of_locked(handler: Any) -> JobCounts:
    return _counts.setdefault((handler.device.name, direction_of(handler)), JobCounts())


def add_handler(handler: Any) -> None:
    with _lock:
        _handlers.add(handler)
        _of_locked(handler)


def stalled(handler: Any) -> None:
    with _lock:
        _of_locked(handler).stalls += 1


def not_stored(handler: Any, why: str, blocks: int) -> None:
    with _lock:
        counts = _of_locked(handler).not_stored
        counts[why] = counts.get(why, 0) + blocks


def job_ended(handler: Any, ok: bool, nbytes: int, duration: float, on_device: float) -> None:
    """duration: seconds from submission until the job was collected."""
    with _lock:
        counts = _of_locked(handler)
        counts.device_seconds += on_device
        counts.queued_seconds += max(0.0, duration - on_device)
        if not ok:
            counts.failed += 1
            return
        counts.bytes += nbytes
        counts.seconds += duration
        counts.buckets[bisect_left(_BOUNDS, duration)] += 1


def rows() -> list[dict[str, Any]]:
    """kvswap.metrics.HandlerMetrics of each device and direction."""
    with _lock:
        alive = list(_handlers)
        found: list[dict[str, Any]] = [
            {
                "device": device,
                "direction": direction,
                "handlers": 0,
                "unfinished": 0,
                "failed": counts.failed,
                "not_stored": dict(counts.not_stored),
                "bytes": counts.bytes,
                "duration": {"buckets": list(counts.buckets), "sum": counts.seconds},
                "device_seconds": counts.device_seconds,
                "queued_seconds": counts.queued_seconds,
                "stalls": counts.stalls,
            }
            for (device, direction), counts in list(_counts.items())
        ]
    by_key = {(row["device"], row["direction"]): row for row in found}
    for handler in alive:
        row = by_key.get((handler.device.name, direction_of(handler)))
        if row is not None and not handler._closed:
            row["handlers"] += 1
            row["unfinished"] += len(handler._transfers)
    return found
