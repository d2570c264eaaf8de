"""The frame of the differential program: memory with a model of every byte, operations and what they use, what order
they must be put in, and the comparison.

A round is some hundred random operations on fresh memory, drawn by (seed, round): each can be run again alone. An
operation submits work and appends a Use: what it reads and writes, what to wait on, and what it does to the model. An
operation that conflicts with an earlier one is put behind it, by any of the ways that there are (World.behind).
settle() lets everything end, carries the uses out on the model one after another, and compares every byte of all
memory. Of what failed with a report the bytes may be anything until then; afterwards they are what they were found to
be.
"""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from conftest import PATHS, PATIENCE, Buffer, Bytes, address_of, seam
from transfers import GUARD, Chooser, Side, Work, draw

import kvswap
from kvswap import testing

CELL = 128  # bytes: uses are compared by cells
CODE = 33  # what injected faults say
MOST_USES = 60  # from one comparison to the next: fewer than a lane holds
THREADS = 4  # that share a device, where several do
REFUSED = ("copy", "copy_batch", "launch", "event_record", "stream_wait", "event_create", "alloc", "")
REFUSED += ("copy_rect",) * 3  # which are tried again row by row


class Difference(AssertionError):
    """The library did something else than the model."""


def check(right: bool, what: str) -> None:
    if not right:
        raise Difference(what)


class Area:
    """Memory, and what it must hold. side: "gpu", "cpu" (pinned), "plain" (pageable on a GPU), "peer" (of another
    device, in place of the host's)."""

    def __init__(self, name: str, side: str, ptr: int, nbytes: int, read: Callable[[], Bytes]) -> None:
        self.name, self.side, self.ptr, self.nbytes, self.read = name, side, ptr, nbytes, read
        self.model: Bytes = read()
        self.unknown: Any = None  # bool array: bytes that may be anything; None: there are none

    def forget(self, where: Any) -> None:
        if self.unknown is None:
            self.unknown = np.zeros(self.nbytes, bool)
        self.unknown[where] = True

    def copy(self, where: Any, source: Area, there: Any) -> None:
        """These bytes become those of the source, known or not."""
        self.model[where] = source.model[there]
        if self.unknown is not None or source.unknown is not None:
            if self.unknown is None:
                self.unknown = np.zeros(self.nbytes, bool)
            self.unknown[where] = False if source.unknown is None else source.unknown[there]

    def set(self, where: Any, data: Bytes) -> None:
        self.model[where] = data
        if self.unknown is not None:
            self.unknown[where] = False

    def compare(self) -> str:
        there = self.read()
        if self.unknown is not None:
            self.model[self.unknown] = there[self.unknown]
            self.unknown = None
        if np.array_equal(there, self.model):
            return ""
        wrong = np.flatnonzero(there != self.model)
        return f"{self.name}: {wrong.size} bytes are wrong, from {wrong[0]} to {wrong[-1]} of {self.nbytes}"


class Memory(Area):
    """An area of its own memory, as the tests have it."""

    def __init__(self, device: kvswap.Device, name: str, side: str, data: bytes) -> None:
        self.buffer = Buffer(device, len(data), "gpu" if side == "peer" else side)
        self.buffer.put(np.frombuffer(data, np.uint8))
        super().__init__(name, side, self.buffer.ptr, len(data), self.buffer.get)


def bits(first: Any, last: Any, nbytes: int) -> int:
    """Cells of the ranges of bytes [first, last), as a number with a bit a cell."""
    steps = np.zeros(nbytes // CELL + 2, np.int32)
    np.add.at(steps, np.asarray(first) // CELL, 1)
    np.add.at(steps, (np.asarray(last) - 1) // CELL + 1, -1)
    return int.from_bytes(np.packbits(np.cumsum(steps) > 0, bitorder="little").tobytes(), "little")


Touched = list[tuple[Area, int, int]]  # area, cells read, cells written


@dataclass(eq=False)
class Use:
    """What an operation uses until the next comparison."""

    text: str
    touched: Touched
    carry_out: Callable[[], None]  # on the model, once it has ended; checks what the library tells of it
    transfer: Any = None  # Transfer, FileTransfer, or an Event behind it
    stream: kvswap.Stream | None = None  # on which it behaves as if enqueued
    lane: Any = None  # of transfers without a stream: direction and priority
    pooled: bool = False  # pools keep it in order with their other transfers
    by_host: bool = False  # nothing but a wait of the host's comes behind it
    faulted: bool = False
    tainted: bool = False  # it may fail: faulted, or it reads what may have failed
    seen: Callable[[], None] | None = None  # once it has ended, and before others use what it wrote

    def conflicts(self, touched: Touched) -> bool:
        return any(
            own is area and (written & (read | write) or own_read & write)
            for own, own_read, written in self.touched
            for area, read, write in touched
        )


@dataclass
class Totals:
    """Of a run: what was done. Counts by operation, and what came of transfers."""

    operations: int = 0
    rounds: int = 0
    comparisons: int = 0
    nbytes: int = 0
    by_name: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)


Do = Callable[["World"], None]


@dataclass(frozen=True)
class Operation:
    weight: float
    do: Do
    calls: tuple[str, ...]
    alone: bool  # it concerns the whole device or process: not beside other threads


OPERATIONS: dict[str, Operation] = {}


def operation(weight: float, *calls: str, alone: bool = False) -> Callable[[Do], Do]:
    """Puts a function among those that are drawn. calls: the public names that it calls, as public.py has them."""

    def put(do: Do) -> Do:
        OPERATIONS[do.__name__] = Operation(weight, do, calls, alone)
        return do

    return put


def lender_of(device: kvswap.Device) -> kvswap.Device | None:
    """A device whose link may carry transfers of this one; None: there is none."""
    if not device.info["kernels"] or device.name.startswith("host:seed"):
        return None
    if device.kind == "host":
        return kvswap.Device("host:56")
    others = [other.name for other in kvswap.devices() if other.kind == "cuda" and other.name != device.name]
    return kvswap.Device(others[0]) if others else None


class World:
    """What the operations of one round work with. One thread uses it; several worlds may share a device."""

    def __init__(self, device: kvswap.Device, rng: random.Random, totals: Totals, folder: Path, alone: bool) -> None:
        self.device, self.rng, self.totals, self.folder, self.alone = device, rng, totals, folder, alone
        self.choose = Chooser(rng)
        self.history: deque[str] = deque(maxlen=60)
        self.operations = 0  # of this round
        self.cleanup = ExitStack()  # of what the round leaves open, last opened first
        self.uses: list[Use] = []
        self.at_settle: list[Callable[[], None]] = []  # of parts with more to check than bytes
        self.parts: dict[str, Any] = {}  # what operations of one kind share: pools, stores, handlers
        self.compute: kvswap.Stream | None = None
        self.streams = [kvswap.Stream(device, priority=rng.choice(("high", "normal"))) for _ in range(3)]
        self.ended: list[Any] = []  # transfers, to be asked again
        self.failed: list[kvswap.Transfer] = []
        self.gates: list[int] = []  # closed ones
        self.words = np.zeros(0, np.uint32)
        if device.info["memops"]:
            self.word_memory = device.alloc(4 * 64, host=True)
            self.words = np.frombuffer(self.word_memory, np.uint32)
            self.words[:] = 0
        self.next_word = 0
        self.paths = [
            path
            for path in PATHS
            if (path != "direct" or device.kind == "host")
            and (path not in ("kernel", "burst") or device.info["kernels"])
        ]
        self.lender = lender_of(device) if alone else None
        self.slots_before = device.info["slots_nbytes"] // 8  # a direction has three, and two of half as much
        large = alone and rng.random() < 0.05
        self.size = 1500 << 10 if large else rng.choice((16 << 10, 64 << 10, 200 << 10))
        self.entries = 400 if large else 60
        self.areas: list[Area] = []
        for name, side in (("gpu0", "gpu"), ("gpu1", "gpu"), ("cpu0", "cpu"), ("cpu1", "cpu"), ("plain", "plain")):
            self.add(Memory(device, name, side, rng.randbytes(self.size)))

    # -- drawing ------------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        self.history.append(f"{self.operations}: {text}")

    def add(self, area: Area) -> Area:
        self.areas.append(area)
        return area

    def area(self, *sides: str, least: int = 4096) -> Area:
        return self.rng.choice([area for area in self.areas if area.side in sides and area.nbytes >= least])

    def draw(self, gpu: Area, cpu: Area) -> Work:
        """A transfer of blocks of several tensors between two areas."""
        room = min(gpu.nbytes, cpu.nbytes)
        while True:
            begin = self.rng.randrange(GUARD, max(room // 2, GUARD + 1))
            work = draw(self.choose, room, self.entries, begin=begin)
            if work.count and max(work.gpu.end, work.cpu.end) <= room:
                return self.again(work)

    def again(self, work: Work) -> Work:
        """Sometimes fewer of its blocks, or as many in runs of any length that both sides have."""
        kind = self.rng.random()
        if kind < 0.3:
            kept = self.rng.randint(1, work.count)
            return replace(work, gpu_ids=work.gpu_ids[:kept], cpu_ids=work.cpu_ids[:kept])
        if kind < 0.6:
            lengths, left = [], work.count
            while left:
                lengths.append(self.rng.randint(1, min(left, 12)))
                left -= lengths[-1]
            gpu_ids, cpu_ids = (in_runs(self.rng, side.blocks, lengths) for side in (work.gpu, work.cpu))
            return replace(work, gpu_ids=gpu_ids, cpu_ids=cpu_ids)
        return work

    def stream(self) -> kvswap.Stream | None:
        return self.rng.choice((None, None, *self.streams))

    def options(self, stream: kvswap.Stream | None, *areas: Area) -> dict[str, Any]:
        pageable = self.device.kind == "cuda" and any(area.side == "plain" for area in areas)
        options: dict[str, Any] = {"path": self.rng.choice(("auto", "dma") if pageable else self.paths)}
        options["priority"] = self.rng.choice(("normal", "normal", "high", "background"))
        if self.rng.random() < 0.1:
            options |= {"max_ctas": self.rng.choice((1, 3, 64)), "pace_gbps": self.rng.choice((None, 0.5, 40.0))}
        if stream is not None:
            options["stream"] = stream.handle if self.rng.random() < 0.2 else stream
        return options

    # -- order --------------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """A stream stands still until a gate opens: most work is queued before what it comes after has run."""
        if self.device.name.startswith("host:seed"):  # it reorders by itself, and takes standing still for a deadlock
            return
        if self.device.kind == "cuda":  # behind a gate a driver may wait for room for another stream
            testing.delay(self.device, self.rng.uniform(1e-4, 2e-3), self.rng.choice(self.streams))
        elif len(self.words) and self.next_word < 64:
            seam(
                self.device,
                "wait32",
                self.word_memory.ptr + 4 * self.next_word,
                1,
                self.rng.choice(self.streams).handle,
            )
            self.gates.append(self.next_word)
            self.next_word += 1

    def open_gates(self) -> None:
        """Before a call that may wait."""
        if self.gates:
            self.words[self.gates] = 1
            self.gates.clear()

    def before(self, touched: Touched, pooled: bool = False) -> list[Use]:
        """The uses that a new operation must come after, by kvswap's order or by this program's waits."""
        if len(self.uses) >= (MOST_USES if self.alone else MOST_USES // THREADS):
            self.settle()
        found = [use for use in self.uses if use.conflicts(touched) and not (pooled and use.pooled)]
        if any(use.faulted or use.tainted for use in found):  # its copies may still run, whatever it says
            self.settle()
            return []
        return found

    def behind(
        self,
        touched: Touched,
        stream: kvswap.Stream | None,
        lane: Any = None,
        *,
        pooled: bool = False,
        host: bool = False,
    ) -> list[Any]:
        """Put a call on this stream behind what conflicts with it; returns what is left to its `after`."""
        after: list[Any] = []
        for use in self.before(touched, pooled):
            if host or use.by_host:
                self.wait_for(use)
            elif (stream is not None and stream is use.stream) or (lane is not None and lane == use.lane):
                self.totals.events["ordered by the lane"] += 1
            elif stream is None and self.compute is not None and use.stream is self.compute:
                self.totals.events["ordered by the compute stream"] += 1
            else:
                self.put(use, stream, after)
        return after

    def put(self, use: Use, stream: kvswap.Stream | None, after: list[Any]) -> None:
        is_event = isinstance(use.transfer, kvswap.Event)
        ways = ["after", "after", "wait"]
        ways += ["stream"] if use.stream is not None else []
        ways += [] if is_event else ["event"]
        ways += ["make_wait", "relay"] if stream is not None else []
        ways += ["layer"] if stream is not None and not is_event and use.transfer.num_layers else []
        way = self.rng.choice(ways)
        self.totals.events[f"ordered by {way}"] += 1
        if way == "wait":
            self.wait_for(use)
        elif way == "after":
            after.append(use.transfer)
        elif way == "stream":
            after.append(use.stream)
        elif way == "event":
            after.append(use.transfer.event)
        elif way == "layer":
            use.transfer.make_wait_layer(use.transfer.num_layers - 1, stream)
        elif way == "make_wait":
            self.make_wait(use.transfer, stream)
        else:
            relay = kvswap.Stream(self.device)
            event = kvswap.Event(self.device, timing=self.rng.random() < 0.5)
            self.make_wait(use.transfer, relay)
            event.record(relay)
            event.wait(stream)

    def make_wait(self, thing: Any, stream: kvswap.Stream) -> None:
        (thing.wait if isinstance(thing, kvswap.Event) else thing.make_wait)(stream)

    def wait_for(self, use: Use) -> None:
        self.open_gates()
        if isinstance(use.transfer, kvswap.Event):
            use.transfer.synchronize(PATIENCE)
        else:
            with suppress(kvswap.Error):
                use.transfer.wait(PATIENCE)
            if use.seen is not None:
                use.seen()

    def mark(self, stream: kvswap.Stream) -> kvswap.Event:
        event = kvswap.Event(self.device)
        event.record(stream)
        return event

    # -- submitting ---------------------------------------------------------------------------------------------------

    def fault(self) -> Any:
        """Sometimes one that the next call meets."""
        if not self.alone or self.rng.random() > 0.07:
            return None
        for use in self.uses:
            if use.by_host:  # what runs beside the call would meet it
                self.wait_for(use)
        kind = self.rng.choice(("call", "call", "copy"))
        operation = self.rng.choice(REFUSED) if kind == "call" else ""
        nth, every = self.rng.choice((1, 1, 2, 3, 5, 8)), self.rng.choice((0, 0, 0, 1, 7))
        self.say(f"fault: {kind} {operation} fails, nth {nth}, every {every}")
        return testing.fault(self.device, kind, "fail", operation=operation, nth=nth, every=every, code=CODE)

    def submit(self, call: Callable[[], Any], use: Callable[[Any, bool], Use]) -> Any:
        """Call it, sometimes with a fault. use(transfer, faulted) is appended; None: refused, nothing moves."""
        fault = self.fault()
        try:
            if fault is None:
                transfer = call()
            else:
                with fault:
                    transfer = call()
        except kvswap.QueueFull as error:
            held = "its copies still run" in str(error) and any(use.faulted for use in self.uses)
            held |= "streams have unfinished transfers" in str(error)
            check(held or not self.alone, f"QueueFull with {len(self.uses)} transfers: {error}")
            self.totals.events["queue full"] += 1
            self.settle()
            return None
        except kvswap.Error as error:
            if self.refused_behind(error, any(use.faulted for use in self.uses)):
                self.settle()
                return None
            if not isinstance(error, kvswap.DeviceError):
                raise
            check(fault is not None and error.code == CODE, f"refused without a fault: {error}")
            self.totals.events["refused"] += 1
            return None
        self.uses.append(use(transfer, fault is not None))
        return transfer

    def refused_behind(self, error: object, faulted: bool) -> bool:
        """Whether a call was refused because it must come behind work whose end event the driver refused. faulted:
        some of the work before it met a fault."""
        refused = faulted and "gave no event for it" in str(error)
        if refused:
            self.totals.events["refused behind one that was refused its end"] += 1
        return refused

    def told(self, transfer: kvswap.Transfer, faulted: bool) -> Any:
        """Positions that failed, of a transfer that must have ended."""
        check(transfer.done(), f"a transfer goes on after the device's end: {transfer!r}")
        error, failed = transfer.error, transfer.failed_positions
        check((error is None) == (transfer.state == "done"), f"state {transfer.state}, error {error!r}")
        check(
            (error is None) == (failed.size == 0) or transfer.nbytes == 0, f"{error!r} with failed_positions {failed}"
        )
        if error is None:
            transfer.wait(0)
            self.totals.nbytes += transfer.nbytes
        else:
            try:
                transfer.wait(PATIENCE)
            except kvswap.Error as raised:
                check(type(raised) is type(error) and str(raised) == str(error), f"{raised!r} and {error!r}")
            else:
                raise Difference(f"wait() raised nothing: {error!r}")
            self.failed.append(transfer)
        self.ended.append(transfer)
        self.totals.events["failed" if failed.size else "done"] += 1
        check(faulted or failed.size == 0, f"failed without a fault: {error!r}, blocks {failed.tolist()}")
        return failed

    # -- comparing ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let everything end; the model follows; every byte is compared."""
        self.open_gates()
        self.device.synchronize(PATIENCE)
        uses, self.uses = self.uses, []
        for use in uses:
            if use.by_host:
                self.wait_for(use)
        for use in uses:
            try:
                use.carry_out()
            except Difference as error:
                raise Difference(f"{use.text}: {error}") from None
        for more in self.at_settle:
            more()
        for area in self.areas:
            wrong = area.compare()
            check(not wrong, wrong)
        if len(self.words):
            self.next_word = 0
            self.words[:] = 0
        del self.ended[:-20], self.failed[:-5]
        self.totals.comparisons += 1

    def close(self) -> None:
        """The round is over."""
        self.settle()
        self.cleanup.close()
        self.parts.clear()  # pools, before the memory that they are of
        self.at_settle.clear()
        if self.alone:
            self.device.set_compute_stream(0)
            self.device.set_defaults()
            self._restore()
        self.device.synchronize(PATIENCE)
        check(not self.alone or self.device.stats()["unfinished"] == 0, "transfers are unfinished after their end")

    def _restore(self) -> None:
        if self.lender is not None:
            self.lender.lend(self.device, 0, timeout=PATIENCE)
        if self.device.info["slots_nbytes"] // 8 != self.slots_before:
            self.device.set_slots(self.slots_before, 3, timeout=PATIENCE)

    def abandon(self) -> None:
        """After a difference: nothing that runs may outlive its memory, or change what the next round finds."""
        self.open_gates()
        with suppress(Exception):
            self.device.synchronize(PATIENCE)
        with suppress(Exception):
            self.cleanup.close()
        if self.alone:
            with suppress(Exception):
                self._restore()


def in_runs(rng: random.Random, blocks: int, lengths: list[int]) -> Any:
    """Block ids, run after run; where the runs lie among the blocks is drawn."""
    order = rng.sample(range(len(lengths)), len(lengths))
    spare = blocks - sum(lengths)
    gaps = sorted(rng.randint(0, spare) for _ in lengths)
    begins, at = [0] * len(lengths), 0
    for run, gap in zip(order, gaps, strict=True):
        begins[run] = at + gap
        at += lengths[run]
    return np.concatenate([np.arange(begin, begin + n) for begin, n in zip(begins, lengths, strict=True)])


def cells(area: Area, side: Side, ids: Any, nbytes: Iterable[int]) -> int:
    """Of these blocks of all tensors."""
    first = [begin + ids * stride for begin, stride in zip(side.begins, side.strides, strict=True)]
    last = [start + size for start, size in zip(first, nbytes, strict=True)]
    return bits(np.concatenate(first), np.concatenate(last), area.nbytes)


class Tensor:
    """Part of an area as an array, by the protocol that its device has."""

    def __init__(
        self, device: kvswap.Device, area: Area, begin: int, shape: tuple[int, ...], dtype: str = "|u1"
    ) -> None:
        self.area, self.shape, self.dtype = area, shape, np.dtype(dtype)
        interface = {"shape": shape, "typestr": dtype, "data": (area.ptr + begin, False), "version": 3, "strides": None}
        kind = "cuda" if device.kind == "cuda" and area.side == "gpu" else ""
        setattr(self, f"__{kind}_array_interface__" if kind else "__array_interface__", interface)


def host_array(ptr: int, nbytes: int) -> Bytes:
    """Host memory at an address, as long as it is there."""

    class Holder:
        __array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (ptr, False), "version": 3}

    array = np.asarray(Holder())
    assert address_of(array) == ptr
    return array
