"""What copies cost a load that runs beside them: windows without copies, with, without, with, ..., without.

A pair's slow-down is the time of a piece of load in a window with copies, over its mean in the windows before and after
it. Copies run without pause, two in flight, from before such a window begins until after it ended, and only bytes moved
within it count. Their last copy is checked; all of a window carry the same bytes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvswap import _C
from kvswap.replay.errors import UsageError
from kvswap.replay.units import format_size

from .loads import Load, load_for
from .measure import Job, Lab, opened, refusals
from .methods import METHODS, NotMeasured, Pending
from .report import Document, Table, document
from .shapes import FAMILIES, WAIT_LIMIT, Family, Shape
from .table import DIRECTIONS, check_room

SIZES = (16 << 10, 64 << 10)
_NBYTES = {"cuda": 256 << 20, "host": 16 << 20}
_METHODS = {
    "cuda": ("background", "high", "kernel", "batch", "warp"),
    "host": ("dma", "kernel", "direct"),
}
_ONE_COPY = "one copy"  # a bare one of all bytes: the reference, measured first
_IN_FLIGHT = 2
_SEED = 1
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    device: _C.Device
    load: str
    pairs: int
    seconds: float  # of a window
    nbytes: int
    family: Family
    sizes: tuple[int, ...]
    directions: tuple[str, ...]
    methods: tuple[str, ...]


def plan(
    device: _C.Device,
    load: str,
    *,
    quick: bool = False,
    pairs: int | None = None,
    seconds: float | None = None,
    nbytes: int | None = None,
    family: str | None = None,
    sizes: Sequence[int] | None = None,
    directions: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
) -> Plan:
    """Fill in what suits the device. UsageError: there is not as much memory."""
    if family is not None and FAMILIES[family].both:
        raise UsageError(f"--shape {family} copies both ways at once: --load takes one direction at a time")
    made = Plan(
        device,
        load,
        pairs or (2 if quick else 10),
        seconds or (0.1 if quick else 1.0),
        nbytes or _NBYTES[device.kind],
        FAMILIES[family or "run"],
        tuple(sizes or (SIZES[-1:] if quick else SIZES)),
        tuple(directions or DIRECTIONS),
        tuple(methods or _METHODS[device.kind]),
    )
    check_room(device, [made.family.of(size, made.nbytes) for size in made.sizes])
    return made


@dataclass(frozen=True)
class Row:
    """One method beside the load, or why it was not measured."""

    method: str
    direction: str
    tensors: int
    block_nbytes: int
    blocks: int
    slowdown: float | None = None  # 1.0: none; median of the pairs
    slowdown_interval: tuple[float, float] | None = None  # of that median, 95 %
    gbps: float | None = None  # of the copies while the load ran, median of the pairs
    gbps_alone: float | None = None
    slowdowns: tuple[float, ...] = ()
    note: str = ""


@dataclass
class Result(Document):
    """All rows."""

    load: str = ""
    load_is: str = ""
    pairs: int = 0
    window_seconds: float = 0.0
    bytes_per_copy: int = 0
    ceilings_gbps: dict[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"what": "beside a load", **asdict(self)}


# -- one window -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Window:
    """begin, end: on the load's stream."""

    begin: _C.Event
    end: _C.Event
    pieces: int

    @property
    def piece_seconds(self) -> float:
        return self.begin.elapsed_time(self.end) / self.pieces


def _run_load(device: _C.Device, load: Load, seconds: float) -> _Window:
    """Keep the load running for so long, and wait for its end."""
    begin, end = _C.Event(device), _C.Event(device)
    marks = [_C.Event(device, timing=False) for _ in range(load.ahead)]
    begin.record(load.stream)
    begin.synchronize(WAIT_LIMIT)  # on a busy host device the mark itself may be late
    pieces, until = 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        marks[pieces % load.ahead].synchronize(WAIT_LIMIT)  # of the piece that was queued `ahead` pieces ago
        load.queue()
        marks[pieces % load.ahead].record(load.stream)
        pieces += 1
    end.record(load.stream)
    end.synchronize(WAIT_LIMIT)
    return _Window(begin, end, pieces)


class _Copies:
    """Copies of one job without pause, and when each ran, in seconds after `origin`."""

    def __init__(self, lab: Lab, job: Job) -> None:
        self._job, self._device = job, lab.device
        self._after = _C.Stream(lab.device)  # marks the ends, and holds up nobody
        self._in_flight: deque[tuple[Pending, _C.Event]] = deque()
        self._origin = _C.Event(lab.device)
        self._spans: list[tuple[float, float]] = []
        self._origin.record(self._after)

    def run_while(self, running: Callable[[], bool]) -> None:
        while running():
            (pending,) = self._job.submit()
            end = _C.Event(self._device)
            pending.make_wait(self._after)
            end.record(self._after)
            self._in_flight.append((pending, end))
            if len(self._in_flight) >= _IN_FLIGHT:
                self._finish_one()

    def drain(self) -> None:
        while self._in_flight:
            self._finish_one()

    def _finish_one(self) -> None:
        pending, end = self._in_flight.popleft()
        pending.wait(WAIT_LIMIT)
        end.synchronize(WAIT_LIMIT)
        ended = self._origin.elapsed_time(end)
        self._spans.append((ended - (pending.elapsed or 0.0), ended))

    def nbytes_within(self, window: _Window) -> float:
        begin, end = (self._origin.elapsed_time(mark) for mark in (window.begin, window.end))
        return self._job.nbytes * copies_within(self._spans, begin, end)


def copies_within(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """How many copies ran between two times; of one that was under way at either, its share."""
    return sum(
        max(0.0, min(ended, end) - max(started, begin)) / (ended - started)
        for started, ended in spans
        if ended > started
    )


def _run_both(lab: Lab, load: Load, job: Job, seconds: float, thread: ThreadPoolExecutor) -> tuple[float, float]:
    """Seconds a piece of the load, and GB/s of the copies meanwhile."""
    job.fill()
    copies = _Copies(lab, job)
    begin = time.perf_counter()
    copies.run_while(lambda: time.perf_counter() < begin + min(0.05, seconds / 10))  # the window begins under way
    future = thread.submit(_run_load, lab.device, load, seconds)
    copies.run_while(lambda: not future.done())
    window = future.result()
    copies.drain()
    lab.check(job)
    return window.piece_seconds, copies.nbytes_within(window) / window.begin.elapsed_time(window.end) / 1e9


# -- rows -------------------------------------------------------------------------------------------------------------


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies, with 95 % confidence, whatever the distribution; all values where there are few."""
    ordered, n = sorted(values), len(values)
    outside, rank = 0.0, 0  # chance that the median lies below the value of that rank, or above its mirror
    while rank < n // 2:
        outside += 2 * math.comb(n, rank) / 2**n
        if outside > 1 - _CONFIDENCE:
            break
        rank += 1
    rank = max(rank - 1, 0)
    return ordered[rank], ordered[n - 1 - rank]


def _measure(lab: Lab, load: Load, plan: Plan, row: Row, job: Job) -> Row:
    alone, slow, reached = [], [], []
    figures = lab.figures(job, 3, plan.seconds)
    with ThreadPoolExecutor(1) as thread:
        alone.append(_run_load(lab.device, load, plan.seconds).piece_seconds)
        for _ in range(plan.pairs):
            piece, gbps = _run_both(lab, load, job, plan.seconds, thread)
            alone.append(_run_load(lab.device, load, plan.seconds).piece_seconds)
            slow.append(piece / statistics.mean(alone[-2:]))
            reached.append(gbps)
    return replace(
        row,
        slowdown=statistics.median(slow),
        slowdown_interval=median_interval(slow),
        gbps=statistics.median(reached),
        gbps_alone=figures.device_gbps or figures.gbps,
        slowdowns=tuple(slow),
    )


def _cells(plan: Plan) -> Iterator[tuple[str, str, Shape]]:
    for direction in plan.directions:
        yield direction, _ONE_COPY, Shape(1, plan.nbytes)
        for size in plan.sizes:
            (shape,) = plan.family.of(size, plan.nbytes)
            yield from ((direction, method, shape) for method in plan.methods)


def _row(lab: Lab, load: Load, plan: Plan, direction: str, method: str, shape: Shape) -> Row:
    row = Row(method, direction, shape.tensors, shape.block_nbytes, shape.blocks)
    try:
        with refusals(lab.device):
            job = lab.job(METHODS["loop" if method == _ONE_COPY else method], (shape,), direction)
            return _measure(lab, load, plan, row, job)
    except NotMeasured as why:
        return replace(row, note=str(why))


def run(plan: Plan, show: Callable[[str], None]) -> Result:
    """Measure all methods beside the load, showing each as it ends. Raises WrongBytes for one wrong byte."""
    result = Result(
        **document(plan.device),
        load=plan.load,
        pairs=plan.pairs,
        window_seconds=plan.seconds,
        bytes_per_copy=plan.nbytes,
    )
    with opened(plan.device, _SEED) as lab:
        try:
            load = load_for(plan.device, plan.load)
        except NotMeasured as why:
            raise UsageError(f"--load {plan.load} cannot run here: {why}") from None
        result.load_is = load.name
        result.ceilings_gbps = lab.ceilings(plan.nbytes, 3)
        show(f"{result.title()}, beside a load: {load.name}")
        show(f"{plan.family.description}; {plan.pairs} pairs of {plan.seconds:g} s without and with copies")
        show("medians; the interval holds that of the slow-down with 95 % confidence, from 6 pairs on")
        show(_ROW.header())
        for cell in _cells(plan):
            row = _row(lab, load, plan, *cell)
            result.rows.append(row)
            show(_line(row))
        result.bytes_verified = lab.bytes_verified
    show(f"{format_size(result.bytes_verified)} verified, 0 wrong bytes")
    return result


_ROW = Table(
    ("shape", "<22"),
    ("dir", "<5"),
    ("method", "<11"),
    ("slow-down", ">9.3f"),
    ("interval", "<13"),
    ("GB/s", ">8.2f"),
    ("alone", ">8.2f"),
)


def _line(row: Row) -> str:
    begin = [str(Shape(row.tensors, row.block_nbytes, row.blocks)), row.direction, row.method]
    if row.slowdown_interval is None:
        return _ROW.line(begin, row.note)
    interval = "{:.3f}-{:.3f}".format(*row.slowdown_interval)
    return _ROW.line([*begin, row.slowdown, interval, row.gbps, row.gbps_alone])
