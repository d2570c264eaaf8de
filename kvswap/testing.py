"""For tests: faults, host devices that run step by step in an order that a seed decides, delays.

    device = kvswap.testing.deterministic_device(seed=7)
    with kvswap.testing.fault(device, "copy", "skip", every=10_000):
        ...

A deterministic device runs queued work only inside calls on it; equal seeds and equal calls give equal interleavings,
and equal numbers from trace().
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

from kvswap import _C

__all__ = [
    "Action",
    "Kind",
    "capture",
    "delay",
    "deterministic_device",
    "fault",
    "parse_action",
    "parse_kind",
    "set_lane_depth",
    "step",
    "trace",
]

Kind: TypeAlias = Literal["call", "copy"]
Action: TypeAlias = Literal["fail", "skip", "lose", "delay"]

_KINDS: dict[str, Kind] = {"call": "call", "copy": "copy"}
_ACTIONS: dict[str, Action] = {"fail": "fail", "skip": "skip", "lose": "lose", "delay": "delay"}


_KINDS_OF: dict[str, tuple[str, ...]] = {"call": ("fail", "lose", "delay"), "copy": ("fail", "skip")}
OPERATIONS = (
    *("alloc", "free", "host_alloc", "host_free", "host_register", "host_unregister", "pointer_query"),
    *("stream_create", "stream_destroy", "stream_query", "stream_info", "synchronize", "stream_wait"),
    *("event_create", "event_destroy", "event_record", "event_query", "event_elapsed"),
    *("copy", "copy_batch", "copy_direct", "copy_rect", "fill", "launch", "write32", "wait32"),
)


def parse_kind(text: str) -> Kind | None:
    """The kind of fault by that name, or None."""
    return _KINDS.get(text)


def parse_action(text: str) -> Action | None:
    """The action of a fault by that name, or None."""
    return _ACTIONS.get(text)


def deterministic_device(seed: int) -> _C.Device:
    """A private host device whose work runs only inside calls on it, in an order that the seed (not 0) decides."""
    return _C._deterministic_device(seed)


def step(device: _C.Device, steps: int = 1) -> int:
    """Run up to so many steps of a deterministic device's queued work; returns how many there were to run."""
    return _C._host_step(device, steps)


def trace(device: _C.Device) -> int:
    """A number that stands for all that ran on a host device so far, and in what order."""
    return _C._host_trace(device)


@contextmanager
def capture(device: _C.Device, stream: Any) -> Iterator[None]:
    """Make a host device's stream behave as one that records a graph: work on it is refused, as a driver does."""
    _C._host_capture(device, stream, True)
    try:
        yield
    finally:
        _C._host_capture(device, stream, False)


@contextmanager
def fault(
    device: _C.Device,
    kind: Kind,
    action: Action,
    *,
    operation: str = "",
    nth: int | None = None,
    every: int = 0,
    code: int = 1,
    delay: float = 0.0,
) -> Iterator[None]:
    """Inject a fault into a device while the block runs.

    kind "copy" counts planned copies: "skip" drops one in silence, "fail" has it refused with `code`. kind "call"
    counts the calls to the device's driver, or only those of `operation` ("copy_batch"): "fail" refuses one with
    `code`, "lose" loses the device with it, "delay" has it return `delay` seconds late. The nth occurrence is hit (by
    default the first, or with `every` the every-th), then each `every`-th after it; with every=0 only that one. One
    fault a kind at a time.
    """
    if kind not in _KINDS_OF:
        raise ValueError(f"kind is {kind!r}; it is one of {', '.join(_KINDS_OF)}")
    if action not in _KINDS_OF[kind]:
        raise ValueError(f"action is {action!r}; a fault of kind {kind!r} is one of {', '.join(_KINDS_OF[kind])}")
    if operation and operation not in OPERATIONS:
        raise ValueError(f"operation is {operation!r}; it is one of {', '.join(OPERATIONS)}")
    if every < 0 or (nth is not None and nth < 1):
        raise ValueError(f"nth is {nth} and every is {every}: nth counts from 1, every is 0 or more")
    first = (every or 1) if nth is None else nth
    _C._set_fault(device, kind, action, operation=operation, nth=first, every=every, code=code, delay=delay)
    try:
        yield
    finally:
        _C._set_fault(device, kind, "none")


def delay(device: _C.Device, seconds: float, stream: Any) -> None:
    """Keep a stream busy for a time, 10 seconds at most: for tests of order."""
    _C._delay(device, seconds, stream)


def set_lane_depth(device: _C.Device, depth: int) -> None:
    """How many transfers a lane holds unfinished before kvswap.QueueFull, 1 to 65536. For lanes made afterwards."""
    _C._set_lane_depth(device, depth)
