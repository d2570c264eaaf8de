"""For tests: faults, deterministic host devices (work runs step by step, in an order given by a seed), delays, the race
checker.

    device = kvswap.testing.deterministic_device(seed=7)
    with kvswap.testing.fault(device, "copy", "skip", every=10_000):
        ...
    with kvswap.testing.race_checker():  # raises RaceFound if anything in here was not ordered
        ...

A deterministic device runs queued work only inside calls on it; equal seeds and equal calls give equal interleavings,
and equal numbers from trace().
"""

from __future__ import annotations

import errno
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any, Literal, TypeAlias

from kvswap import _C, _races
from kvswap._C import note_access, note_order

__all__ = [
    "Action",
    "Kind",
    "Race",
    "RaceChecker",
    "RaceFound",
    "RaceParty",
    "capture",
    "delay",
    "deterministic_device",
    "fault",
    "file_fault",
    "note_access",
    "note_order",
    "parse_action",
    "parse_kind",
    "peer_access",
    "race_checker",
    "set_lane_depth",
    "step",
    "trace",
]

Kind: TypeAlias = Literal["call", "copy", "code", "hazard"]
Action: TypeAlias = Literal["fail", "skip", "lose", "delay", "spoil"]

_KINDS: dict[str, Kind] = {"call": "call", "copy": "copy", "code": "code"}  # that can be counted
_ACTIONS: dict[str, Action] = {"fail": "fail", "skip": "skip", "lose": "lose", "delay": "delay", "spoil": "spoil"}

ACTIONS_OF: dict[str, tuple[str, ...]] = {
    "call": ("fail", "lose", "delay"),
    "copy": ("fail", "skip"),
    "code": ("spoil",),
    "hazard": ("skip",),
}
OPERATIONS = (
    *("alloc", "free", "host_alloc", "host_free", "host_register", "host_unregister", "pointer_query"),
    *("stream_create", "stream_destroy", "stream_query", "stream_info", "synchronize", "stream_wait"),
    *("event_create", "event_destroy", "event_record", "event_query", "event_elapsed"),
    *("copy", "copy_batch", "copy_direct", "copy_rect", "gap", "fill", "launch", "write32", "wait32", "call"),
    *("memory_share", "memory_open", "memory_close", "event_create_shared", "event_share", "event_open"),
    *("chunk_granularity", "range_reserve", "range_free", "chunk_map", "chunk_unmap", "chunk_query", "chunk_share"),
    *("peer", "stream_wait_foreign"),
)
HAZARDS = ("raw", "war", "waw")


def parse_kind(text: str) -> Kind | None:
    """The kind of fault by that name, of those that take every= (not "hazard"), or None."""
    return _KINDS.get(text)


def parse_action(text: str) -> Action | None:
    """The action of a fault by that name, or None."""
    return _ACTIONS.get(text)


def _binding(name: str) -> Any:
    """A function of kvswap._testing, which wheels lack."""
    try:
        found = importlib.import_module("kvswap._testing")
    except ModuleNotFoundError:
        folder = os.path.dirname(__file__)
        try:  # Python finds no module in a folder that it may not read
            os.listdir(folder)
        except OSError as error:
            raise _C.Error(f"whether kvswap has test bindings is not known: {folder}: {error.strerror}") from None
        raise _C.Error(
            "this build of kvswap lacks its test bindings (KVSWAP_TEST_BINDINGS=off, as in wheels), which faults and "
            "deterministic devices need: build it from source (pip install --force-reinstall --no-deps PATH)"
        ) from None
    return getattr(found, name)


def deterministic_device(seed: int) -> _C.Device:
    """A private host device whose work runs only inside calls on it, in an order that the seed (not 0) decides.

    A call that queues work also runs up to two steps of what is queued already: what should begin later has to wait for
    an event or a word in memory."""
    device: _C.Device = _binding("deterministic_device")(seed)
    return device


def step(device: _C.Device, steps: int = 1) -> int:
    """Run up to `steps` steps of a deterministic device's queued work; returns the number run."""
    ran: int = _binding("host_step")(device, steps)
    return ran


def trace(device: _C.Device) -> int:
    """A hash of all work that ran on a host device so far, and of its order."""
    found: int = _binding("host_trace")(device)
    return found


@contextmanager
def capture(device: _C.Device, stream: Any) -> Iterator[None]:
    """Make a host device's stream behave as one that records a graph: work on it is refused, as a driver does."""
    _binding("host_capture")(device, stream, True)
    try:
        yield
    finally:
        _binding("host_capture")(device, stream, False)


@contextmanager
def peer_access(device: _C.Device, other: _C.Device, reached: bool) -> Iterator[None]:
    """Whether kernels of a host device reach the memory of another, while the block runs; else they always do. Copies
    between the two are made in any case."""
    ordinal = int(other.name.rpartition(":")[2])
    _binding("host_peer")(device, ordinal, reached)
    try:
        yield
    finally:
        _binding("host_peer")(device, ordinal, True)


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
    `code` (2: out of memory), "lose" loses the device with it, "delay" has it return `delay` seconds late, or when the
    block ends. The nth occurrence is hit (by default the first, or with `every` the every-th), then each `every`-th
    after it; with every=0 only that one.

    kind "code" counts the units of blocks that are coded (kvswap.codecs): "spoil" makes four bytes of one wrong, in
    silence. Copies of coded blocks are not planned copies.

    kind "hazard" with "skip" leaves out the waits between transfers of pools that one kind of hazard, `operation`, is
    the reason for: "raw" (reads what an earlier one writes), "war" (writes what an earlier one reads), "waw" (both
    write). All of them, so nth and every stay as they are; a wait that another kind needs as well is kept.

    One fault a kind at a time. ValueError: no such fault.
    """
    if kind not in ACTIONS_OF:
        raise ValueError(f"kind is {kind!r}; it is one of {', '.join(ACTIONS_OF)}")
    if action not in ACTIONS_OF[kind]:
        raise ValueError(f"action is {action!r}; a fault of kind {kind!r} is one of {', '.join(ACTIONS_OF[kind])}")
    operations = HAZARDS if kind == "hazard" else OPERATIONS
    if (operation or kind == "hazard") and operation not in operations:
        raise ValueError(f"operation is {operation!r}; it is one of {', '.join(operations)}")
    if kind == "hazard" and (nth is not None or every):
        raise ValueError("nth and every are not for hazards: all waits of the kind are left out")
    if every < 0 or (nth is not None and nth < 1):
        raise ValueError(f"nth is {nth} and every is {every}: nth counts from 1, every is 0 or more")
    first = (every or 1) if nth is None else nth
    _binding("set_fault")(device, kind, action, operation=operation, nth=first, every=every, code=code, delay=delay)
    try:
        yield
    finally:
        _binding("set_fault")(device, kind, "none")


FileCall: TypeAlias = Literal["read", "write", "allocate", "open", "sync"]
FileAction: TypeAlias = Literal["fail", "short", "interrupt", "delay"]


@contextmanager
def file_fault(
    store: _C.FileStore | None,
    call: FileCall,
    action: FileAction,
    *,
    nth: int | None = None,
    every: int = 0,
    code: int = errno.EIO,
    delay: float = 0.0,
) -> Iterator[None]:
    """Inject a fault into a kvswap.files.FileStore's calls of the file system while the block runs; without a store,
    into the calls that open one.

    "fail" has the call fail with errno `code`; "short" has a read or write do about half; "interrupt" has it do nothing
    and say EINTR; "delay" has it begin `delay` seconds late, of an open store at most until the block ends. nth and
    every count the calls of that kind, as in fault(). One fault a kind of call at a time. ValueError: no such fault.
    """
    if action == "short" and call not in ("read", "write"):
        raise ValueError(f"action 'short' is for reads and writes, not for {call!r}")
    if every < 0 or (nth is not None and nth < 1):
        raise ValueError(f"nth is {nth} and every is {every}: nth counts from 1, every is 0 or more")
    if action == "interrupt" and every == 1:
        raise ValueError("action 'interrupt' with every=1: the call would never get through")
    inject = _binding("file_set_fault")
    inject(store, call, action, (every or 1) if nth is None else nth, every, code, delay)
    try:
        yield
    finally:
        inject(store, call, "none", 1, 0, 0, 0.0)


def delay(device: _C.Device, seconds: float, stream: Any) -> None:
    """Keep a stream busy for a time, 10 seconds at most: for tests of order."""
    _C._delay(device, seconds, stream)


def set_lane_depth(device: _C.Device, depth: int) -> None:
    """How many transfers a lane holds unfinished before kvswap.QueueFull, 1 to 65536. For lanes made afterwards."""
    _binding("set_lane_depth")(device, depth)


# -- races ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RaceParty:
    """One of two accesses that nothing orders.

    write: else it reads. transfer: Transfer.number, 0 for note_access(). lane, sequence: which transfer of which
    lane. what: "D2H by dma", "access". stream: "cuda:0 stream 0x55...". where: who submitted it, "engine.py:123 in
    step". Texts are empty where something is not known.
    """

    write: bool
    transfer: int
    lane: int
    sequence: int
    what: str
    stream: str
    where: str

    def __str__(self) -> str:
        return _races.describe_accessor(astuple(self))


@dataclass(frozen=True)
class Race:
    """Two accesses to one block of a pool, one of them a write, with no order between them.

    pool: its name. slot: the block. first, second: in the order in which they were queued.
    """

    pool: str
    slot: int
    first: RaceParty
    second: RaceParty

    def __str__(self) -> str:
        return _races.describe(astuple(self))


class RaceFound(AssertionError):
    """Races were found. races: all of them, a list of Race."""

    _SHOWN = 10

    def __init__(self, races: list[Race]) -> None:
        self.races = races
        shown = [str(race) for race in races[: self._SHOWN]]
        more = [f"... and {len(races) - self._SHOWN} more"] if len(races) > self._SHOWN else []
        super().__init__("\n".join([f"{len(races)} found:", *shown, *more]))


_checkers_lock = threading.Lock()
_checkers: list[RaceChecker] = []  # guarded by _checkers_lock: open ones, the innermost last
_hook: Callable[[], object] | None = None  # guarded by _checkers_lock: set aside while any is open


class RaceChecker:
    """The result of race_checker(): the races found so far."""

    def __init__(self) -> None:
        self._races: list[Race] = []  # guarded by _checkers_lock

    @property
    def races(self) -> list[Race]:
        """All races since the checker was entered, oldest first; those of checkers within it are theirs."""
        with _checkers_lock:
            _hand_out()
            return list(self._races)


def _hand_out() -> None:
    """Give what was found since the last call to the innermost checker. Under _checkers_lock."""
    for pool, slot, first, second in _C._racecheck_take():
        _checkers[-1]._races.append(Race(pool, slot, RaceParty(*first), RaceParty(*second)))


def _open(checker: RaceChecker) -> None:
    global _hook
    with _checkers_lock:
        if _checkers:
            _hand_out()
        else:
            _hook = _C._set_race_hook(None)
            (_hook or _C._racecheck_take)()  # earlier races belong to the log, or are dropped
        _C._racecheck_start()
        _checkers.append(checker)


def _close(checker: RaceChecker) -> None:
    with _checkers_lock:
        _hand_out()
        _checkers.remove(checker)
        if not _checkers:
            _C._set_race_hook(_hook)
        _C._racecheck_stop()


@contextmanager
def race_checker(*, raise_at_exit: bool = True) -> Iterator[RaceChecker]:
    """Look for races while the block runs: two accesses to one block of a pool, one of them a write, that nothing
    orders, whatever their timing was this time.

    It sees the transfers of all pools of the process, on all threads, and all order that is made through kvswap. Report
    other work by note_access() and note_order(). Accesses before the first checker was entered are unknown. If the
    block ends without an exception, RaceFound names the races that were found; with raise_at_exit=False they are only
    in `.races`. At most 1000 are kept from one look at `.races` to the next.

    Checkers nest: races go to the innermost one only (over all threads, the one entered last), and not to the log, to
    which KVSWAP_RACECHECK sends them otherwise.
    """
    checker = RaceChecker()
    _open(checker)
    try:
        yield checker
    finally:
        _close(checker)
    if raise_at_exit and checker._races:
        raise RaceFound(list(checker._races))
