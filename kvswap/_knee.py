"""The knee of harm: how many CTAs path kernel may have, at which pace, before a model beside it begins to suffer.

A kernel that stores to the host near the link's rate stalls all other work of the GPU; a little slower it costs almost
nothing. The knee is measured: a load, kvswap's copy kernel on every SM within GPU memory, is timed alone, beside one
bare copy of the whole link, and beside path kernel with a few numbers of CTAs and paces, in turns. What each pair costs
the load above what the bare copy costs it decides what the priorities `normal` and `background` take.

choose() decides from the rows alone and needs no device.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvswap import _C
from kvswap._rig import WAIT_LIMIT, Direction
from kvswap.bench.methods import Pieces

# What a priority may cost the load above one bare copy. A model is promised 0.05 at most: the rest is for noise, and
# for models that suffer more than the load does.
NORMAL_EXTRA = 0.035
BACKGROUND_EXTRA = 0.01
# The load keeps the GPU's memory wholly busy, and suffers so many times what a decode step does: on an H200 two CTAs at
# 42 GB/s, device to host, cost it 0.087 more than a bare copy and the step 0.025.
LOAD_SUFFERS = 3.0
_SUFFERS = 0.05  # a load that nothing costs as much shows no knee

# CTAs, and shares of the link as the pace; 0: none. From the gentlest on.
_PAIRS = ((1, 0.0), (2, 0.5), (2, 0.65), (2, 0.77), (2, 0.0), (4, 0.83), (8, 0.0))
_CAREFUL: dict[Direction, tuple[tuple[int, float], ...]] = {  # of normal and of background, as measured on an H200
    "d2h": ((2, 0.77), (2, 0.5)),
    "h2d": ((2, 0.0), (2, 0.5)),
}

_LAUNCH_NBYTES = 384 << 20  # that a launch of the load reads and writes: some 100 us of a large GPU
_BUFFER = 128 << 20  # of the load, two of them: beyond any cache
_ENTRY = 32 << 10
_THREADS, _CTAS_PER_SM = 512, 2
_WINDOW_SECONDS = 0.012
_LEAST_LAUNCHES = 8
_IN_FLIGHT = 3
_LEAST_ROUNDS, _MOST_ROUNDS = 4, 9


@dataclass(frozen=True)
class Pair:
    """How path kernel runs. pace_gbps 0: unpaced."""

    ctas: int
    pace_gbps: float = 0.0

    def __str__(self) -> str:
        pace = f"at {self.pace_gbps:.1f} GB/s" if self.pace_gbps else "unpaced"
        return f"{self.ctas} CTA{'' if self.ctas == 1 else 's'} {pace}"


@dataclass(frozen=True)
class Row:
    """What was measured beside the load. pair None: one bare copy. slowdowns: of the load, one a round."""

    direction: Direction
    pair: Pair | None
    gbps: float
    slowdowns: tuple[float, ...]

    @property
    def slowdown(self) -> float:
        return statistics.median(self.slowdowns)

    @property
    def error(self) -> float:
        """The standard error of that median, from the quartiles; 0 where rounds are too few to tell."""
        if len(self.slowdowns) < _LEAST_ROUNDS:
            return 0.0
        low, _, high = statistics.quantiles(self.slowdowns, n=4)
        return 0.93 * (high - low) / math.sqrt(len(self.slowdowns))


@dataclass(frozen=True)
class Choice:
    """What a direction's priorities take. note: why not what was measured, or empty."""

    normal: Pair
    background: Pair
    note: str = ""


def pairs(link_gbps: float, sms: int) -> list[Pair]:
    """What is measured on a link of that rate."""
    return [Pair(ctas, round(share * link_gbps, 3)) for ctas, share in _PAIRS if ctas <= max(1, sms)]


def careful(direction: Direction, link_gbps: float, sms: int, note: str = "") -> Choice:
    """What serves where no knee is known."""
    normal, background = (
        Pair(min(ctas, max(1, sms)), round(share * link_gbps, 3)) for ctas, share in _CAREFUL[direction]
    )
    return Choice(normal, background, note)


def choose(rows: Sequence[Row], otherwise: Choice, suffers: float | None = None) -> Choice:
    """From the rows of one direction; `otherwise`, with a note, where they tell nothing. suffers: so many times what a
    model would; None: as the load does."""
    suffers = LOAD_SUFFERS if suffers is None else suffers
    normal, background = round(NORMAL_EXTRA * suffers, 4), round(BACKGROUND_EXTRA * suffers, 4)
    bare = next((row for row in rows if row.pair is None), None)
    kernels = [row for row in rows if row.pair is not None]
    if bare is None or not kernels:
        return _instead(otherwise, "nothing was measured")
    if bare.error > normal / 2:
        return _instead(otherwise, f"the load beside one bare copy is known to {bare.error:.3f} only")
    clear = [row for row in kernels if row.error <= normal]
    if not clear:
        return _instead(otherwise, "the load beside the kernel varies too much")
    extra = {row: row.slowdown - bare.slowdown for row in clear}
    if max(extra.values()) < _SUFFERS:
        return _instead(otherwise, f"no pace costs the load {_SUFFERS} more than one bare copy does")
    gentlest = min(clear, key=lambda row: extra[row])
    notes = []

    def fastest(priority: str, most: float) -> Pair:
        good = [row for row in clear if extra[row] <= most]
        if not good:
            notes.append(f"{priority} costs the load {extra[gentlest]:.3f} more than one bare copy, not {most} at most")
        found = max(good or [gentlest], key=lambda row: row.gbps).pair
        assert found is not None
        return found

    return Choice(fastest("normal", normal), fastest("background", background), "; ".join(notes))


def _instead(otherwise: Choice, why: str) -> Choice:
    return Choice(otherwise.normal, otherwise.background, f"{why}: careful values")


# -- measuring --------------------------------------------------------------------------------------------------------


class Load:
    """kvswap's copy kernel on every SM, within GPU memory, in launches of some 100 us."""

    def __init__(self, device: _C.Device, launch_nbytes: int = _LAUNCH_NBYTES, buffer_nbytes: int = _BUFFER) -> None:
        self._device, self._stream = device, _C.Stream(device)
        self._buffers: list[_C.Memory] = []
        self._ctas = _CTAS_PER_SM * max(1, int(device.info["sms"]))
        try:
            for _ in range(2):
                self._buffers.append(device.alloc(buffer_nbytes))
            entries = np.arange(launch_nbytes // 2 // _ENTRY, dtype=np.uint64)
            at = entries * np.uint64(_ENTRY) % np.uint64(buffer_nbytes)
            src, dst = (np.uint64(buffer.ptr) + at for buffer in self._buffers)
            self._pieces = Pieces(device, src, dst, np.full_like(src, _ENTRY))
            self._pieces.upload(self._stream.handle)
            self.launches = _LEAST_LAUNCHES
            self.seconds()  # the first launches set things up
            self.launches = max(_LEAST_LAUNCHES, round(_WINDOW_SECONDS / self.seconds()))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._device.synchronize(WAIT_LIMIT)
        for buffer in self._buffers:
            buffer.free()

    def seconds(self, meanwhile: Callable[[], None] = lambda: None) -> float:
        """Of a launch, in a window of `launches`; meanwhile() is called again and again until the window ends."""
        begin, end = _C.Event(self._device), _C.Event(self._device)
        limit = time.monotonic() + WAIT_LIMIT
        begin.record(self._stream)
        for _ in range(self.launches):
            self._pieces.launch(self._stream.handle, threads=_THREADS, ctas=self._ctas)
        end.record(self._stream)
        while not end.query() and time.monotonic() < limit:
            meanwhile()
        end.synchronize(WAIT_LIMIT)
        return begin.elapsed_time(end) / self.launches


class Job(Protocol):
    """Copies of the same bytes that can be queued again and again."""

    nbytes: int

    def fill(self) -> None:
        """Write new bytes into the source, and poison into the target."""

    def submit(self) -> _C.Transfer: ...

    def check(self) -> None:
        """Raises WrongBytes where the target is not as the source."""


class _Copies:
    """A job without pause."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._flight: deque[_C.Transfer] = deque()
        self._took: list[float] = []

    def go_on(self) -> None:
        while len(self._flight) < _IN_FLIGHT:
            self._flight.append(self._job.submit())
        if self._flight[0].done():
            self._finish()

    def drain(self) -> None:
        while self._flight:
            self._finish()

    def _finish(self) -> None:
        transfer = self._flight.popleft()
        transfer.wait(WAIT_LIMIT)
        if transfer.elapsed:
            self._took.append(transfer.elapsed)

    @property
    def gbps(self) -> float:
        return self._job.nbytes / statistics.median(self._took) / 1e9 if self._took else 0.0


def beside(job: Job, seconds: Callable[[Callable[[], None]], float]) -> tuple[float, float]:
    """What seconds() finds while copies of the job run, and their GB/s. They begin before it does; what they leave in
    the end is verified."""
    job.fill()
    copies = _Copies(job)
    copies.go_on()
    try:
        took = seconds(copies.go_on)
    finally:
        copies.drain()
    job.check()
    return took, copies.gbps


Cell = tuple[Direction, Pair | None]


def measure(
    jobs: dict[Cell, Job], seconds: Callable[[Callable[[], None]], float], deadline: float
) -> Iterator[list[Row]]:
    """Rounds over all jobs: the load alone, beside the first, alone, beside the second, ...; after each round what is
    known so far. A slow-down is over the mean of the windows before and after it."""
    slow: dict[Cell, list[float]] = {cell: [] for cell in jobs}
    gbps: dict[Cell, list[float]] = {cell: [] for cell in jobs}
    before = seconds(lambda: None)
    longest = 0.0
    for done in itertools.count():
        begin = time.monotonic()
        if done == _MOST_ROUNDS or (done >= _LEAST_ROUNDS and begin + longest > deadline):
            return
        for cell, job in jobs.items():
            took, reached = beside(job, seconds)
            after = seconds(lambda: None)
            slow[cell].append(took / statistics.mean((before, after)))
            gbps[cell].append(reached)
            before = after
        longest = max(longest, time.monotonic() - begin)
        yield [Row(*cell, statistics.median(gbps[cell]), tuple(slow[cell])) for cell in jobs]


# -- for people -------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row], choices: dict[Direction, Choice]) -> list[str]:
    """A line a row, and which priority takes it."""
    lines = [f"{'beside a load':<24}{'':>4} {'GB/s':>7}{'slow-down':>11}{'extra':>8}"]
    bare = {row.direction: row.slowdown for row in rows if row.pair is None}
    for row in rows:
        choice = choices[row.direction]
        taken = [name for name in ("normal", "background") if getattr(choice, name) == row.pair]
        extra = f"{row.slowdown - bare[row.direction]:8.3f}" if row.pair else f"{'':>8}"
        name = "one bare copy" if row.pair is None else str(row.pair)
        lines.append(
            f"{name:<24}{row.direction:>4} {row.gbps:7.1f}{row.slowdown:11.3f}{extra}  {', '.join(taken)}".rstrip()
        )
    return lines
