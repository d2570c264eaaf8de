"""What copies cost a load that runs beside them, in windows of time without and with copies, in turns.

A pair is a window with copies and the two windows without copies around it. The slow-down of a pair is the time of a
piece of the load in the window with copies, over the mean time in the other two. Copies run without pause, three in
flight, from before the window begins until after it ends; only bytes that moved within it count. The host sees when
copies end: an event with timing behind a copy, on a stream that waits for it, can make the copies a tenth slower
(benchmarks/marks.py). All copies of a window carry the same bytes, and the last copy is checked. A load can stand still
until the copies pause, as `--load tokens` does beside bare copies: they end two seconds after the window should, the
row says so, and its slow-down is a lower bound.

The methods of a layout and a bare copy are measured in turns, so that a disturbance of the machine affects all of them.
Each round begins with the next one of them: a GPU at its power limit is slower in some turns of a round than in others.
Before each window the load runs alone for 0.05 s, since after a pause such a GPU is faster.
The reference of a direction is the bare copy's median over all of its windows in the run.

The load also runs alone before the first copy and after the last: kernels on another stream make a CUDA graph slower
for as long as the process runs (docs/performance.md), which the pairs cannot show.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from kvswap import _C, Direction
from kvswap.replay.errors import UsageError
from kvswap.replay.progress import Progress
from kvswap.replay.units import format_size

from .loads import Load, load_for
from .measure import Job, Lab, opened, refusals
from .methods import METHODS, NotMeasured, Pending
from .report import Cell, Document, Rows, Table, document
from .shapes import FAMILIES, LAYOUTS, WAIT_LIMIT, Family, Shape, host_nbytes
from .table import DIRECTIONS, check_room, layouts

SIZES = (16 << 10, 64 << 10)
_NBYTES = {"cuda": 256 << 20, "host": 16 << 20}
_METHODS = ("auto", "background", "high")  # the priorities
_ONE_COPY = "one copy"  # a bare copy of all bytes: the reference
_IN_FLIGHT = 3  # one moves, one waits, one is being submitted
_LATE_SECONDS = 2.0  # that copies go on for when the window should have ended
_ALONE_SECONDS = 0.1
_WARM_SECONDS = 0.05
_ALONE_WINDOWS = 5  # before the first copy, and after the last
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
    layouts: tuple[tuple[Family, int], ...]  # a family, and bytes a block
    directions: tuple[str, ...]
    methods: tuple[str, ...]

    @property
    def about_seconds(self) -> float:
        """The least time of a direction: its windows."""
        windows = 1 + 2 * self.pairs * (1 + len(self.methods))
        return len(self.layouts) * windows * (_WARM_SECONDS + self.seconds)


def plan(
    device: _C.Device,
    load: str,
    *,
    quick: bool = False,
    pairs: int | None = None,
    seconds: float | None = None,
    nbytes: int | None = None,
    families: Sequence[str] | None = None,
    sizes: Sequence[int] | None = None,
    directions: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
) -> Plan:
    """Fill in the device's defaults. UsageError: there is not enough memory.

    All layouts, methods and directions together take about four minutes on an H200. With fewer than 6 pairs the
    interval of the median has less than 95 % confidence.
    """
    both = [key for key in families or () if key in FAMILIES and FAMILIES[key].both]
    if both:
        raise UsageError(f"--shape {both[0]} copies both ways at once: --load takes one direction at a time")
    chosen = list(families or LAYOUTS)
    if quick and not families:
        chosen = chosen[:1]
    made = Plan(
        device,
        load,
        pairs or (2 if quick else 6),
        seconds or (0.1 if quick else 0.2),
        nbytes or _NBYTES[device.kind],
        layouts(chosen, sizes, SIZES[-1:] if quick else SIZES),
        tuple(directions or DIRECTIONS),
        tuple(methods or _METHODS),
    )
    check_room(device, [_shapes(made, family, size) for family, size in made.layouts])
    return made


def _shapes(plan: Plan, family: Family, size: int) -> tuple[Shape, Shape]:
    """A layout, and the bare copy that it is compared with."""
    (shape,) = family.of(size, plan.nbytes)
    return shape, Shape(1, plan.nbytes)


@dataclass(frozen=True)
class Row:
    """One method beside the load, or why it was not measured."""

    layout: str
    method: str
    direction: str
    tensors: int
    block_nbytes: int
    blocks: int
    slowdown: float | None = None  # 1.0: none; median of the pairs
    slowdown_interval: tuple[float, float] | None = None  # of that median, 95 %
    above_copy: float | None = None  # slow-down less the bare copy's
    gbps: float | None = None  # of the copies while the load ran, median of the pairs
    of_copy: float | None = None  # share of the bare copy's GB/s while the load ran
    gbps_alone: float | None = None
    path: str = ""  # the paths taken while the load ran, the most frequent first
    stood_still: bool = False  # in most windows the load went on only when the copies had ended
    slowdowns: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
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
    first_piece_seconds: float = 0.0  # of the load alone, before kvswap has run anything; median
    last_piece_seconds: float = 0.0  # of the load alone, after all copies
    rows: list[Row] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"what": "beside a load", **asdict(self)}


# -- one window -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Window:
    """begin: recorded on the load's clock before its first piece. end: on its stream after the last one."""

    begin: _C.Event
    end: _C.Event
    pieces: int

    @property
    def piece_seconds(self) -> float:
        return self.begin.elapsed_time(self.end) / self.pieces


def _run_load(device: _C.Device, load: Load, seconds: float) -> _Window:
    """Run the load for `seconds`, and wait for its end."""
    begin, end = _C.Event(device), _C.Event(device)
    marks = [_C.Event(device, timing=False) for _ in range(load.ahead)]
    begin.record(load.clock)
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


def _warm_up(device: _C.Device, load: Load) -> None:
    _run_load(device, load, _WARM_SECONDS)


def _run_alone(device: _C.Device, load: Load, seconds: float) -> float:
    """Seconds of a piece."""
    _warm_up(device, load)
    return _run_load(device, load, seconds).piece_seconds


class _Copies:
    """Copies of one job without pause, and when each ran, in seconds after `origin`."""

    def __init__(self, lab: Lab, job: Job) -> None:
        self._job = job
        self._in_flight: deque[Pending] = deque()
        self._origin = _C.Event(lab.device)
        self._spans: list[tuple[float, float]] = []
        self.paths: Counter[str] = Counter()
        self._origin.record(lab.stream)
        self._origin.synchronize(WAIT_LIMIT)
        self._began = time.perf_counter()

    def run_while(self, running: Callable[[], bool]) -> None:
        while running():
            (pending,) = self._job.submit()
            self._in_flight.append(pending)
            if len(self._in_flight) >= _IN_FLIGHT:
                self._finish_one()

    def drain(self) -> None:
        while self._in_flight:
            self._finish_one()

    def _finish_one(self) -> None:
        pending = self._in_flight.popleft()
        pending.wait(WAIT_LIMIT)
        ended = time.perf_counter() - self._began
        self.paths[pending.path] += 1
        self._spans.append((ended - (pending.elapsed or 0.0), ended))

    def nbytes_within(self, window: _Window) -> float:
        begin, end = (self._origin.elapsed_time(mark) for mark in (window.begin, window.end))
        return self._job.nbytes * copies_within(self._spans, begin, end)


def copies_within(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """How many copies ran between two times. A copy across either of them counts by its share."""
    return sum(
        max(0.0, min(ended, end) - max(started, begin)) / (ended - started)
        for started, ended in spans
        if ended > started
    )


class Beside(NamedTuple):
    """A window with copies."""

    piece_seconds: float  # of the load
    gbps: float  # of the copies
    paths: Counter[str]
    stood_still: bool = False


def _run_both(lab: Lab, load: Load, job: Job, seconds: float, thread: ThreadPoolExecutor) -> Beside:
    job.fill()
    copies = _Copies(lab, job)
    begin = time.perf_counter()
    copies.run_while(lambda: time.perf_counter() < begin + min(0.05, seconds / 10))  # the window begins under way
    future = thread.submit(_run_load, lab.device, load, seconds)
    stood_still = False
    try:
        copies.run_while(lambda: not future.done() and time.perf_counter() < begin + seconds + _LATE_SECONDS)
        stood_still = not future.done()
    finally:  # after a refused copy too: the next window must not run beside this load
        window = future.result()
    copies.drain()
    lab.check(job)
    gbps = copies.nbytes_within(window) / window.begin.elapsed_time(window.end) / 1e9
    return Beside(window.piece_seconds, gbps, copies.paths, stood_still)


# -- rows -------------------------------------------------------------------------------------------------------------


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval that holds the median with 95 % confidence, for any distribution; of few values, all of them."""
    ordered, n = sorted(values), len(values)
    outside, rank = 0.0, 0  # chance that the median lies below the value of that rank, or above its mirror
    while rank < n // 2:
        outside += 2 * math.comb(n, rank) / 2**n
        if outside > 1 - _CONFIDENCE:
            break
        rank += 1
    rank = max(rank - 1, 0)
    return ordered[rank], ordered[n - 1 - rank]


@dataclass
class _Samples:
    """Samples of a method on a layout, or of the bare copy in all windows of a direction."""

    slowdowns: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    paths: Counter[str] = field(default_factory=Counter)
    stood_still: int = 0  # windows

    def add(self, slowdown: float, beside: Beside) -> None:
        self.slowdowns.append(slowdown)
        self.rates.append(beside.gbps)
        self.paths += beside.paths
        self.stood_still += beside.stood_still

    def fill(self, row: Row) -> Row:
        return replace(
            row,
            slowdown=statistics.median(self.slowdowns),
            slowdown_interval=median_interval(self.slowdowns),
            gbps=statistics.median(self.rates),
            path=" ".join(path for path, _ in self.paths.most_common()),
            stood_still=2 * self.stood_still > len(self.slowdowns),
            slowdowns=tuple(self.slowdowns),
            rates=tuple(self.rates),
        )


def compared(row: Row, copy: Row) -> Row:
    """The row with its figures relative to the bare copy's, where both were measured."""
    if row.slowdown is None or row.gbps is None or copy.slowdown is None:
        return row
    share = row.gbps / copy.gbps if copy.gbps else None  # None if no bare copy ended in most windows
    above = None if row.stood_still or copy.stood_still else row.slowdown - copy.slowdown
    return replace(row, above_copy=above, of_copy=share)


class _Turns:
    """Measures all layouts in one direction."""

    def __init__(
        self,
        lab: Lab,
        load: Load,
        plan: Plan,
        direction: str,
        thread: ThreadPoolExecutor,
        progress: Progress | None = None,
    ) -> None:
        self._lab, self._load, self._plan, self._thread, self._progress = lab, load, plan, thread, progress
        self._windows = 0  # with copies, that ended
        self._direction = direction
        self._bare = _Samples()

    def rows(self) -> list[Row]:
        """The bare copy's row first: its median is known after the last layout."""
        plan, rows = self._plan, []
        for family, size in plan.layouts:
            rows += self._layout(family.key, _shapes(plan, family, size))
        if self._progress is not None:
            self._progress.clear()
        copy = self._bare.fill(Row("", _ONE_COPY, self._direction, 1, plan.nbytes, 1))
        return [replace(copy, above_copy=0.0, of_copy=1.0), *(compared(row, copy) for row in rows)]

    def _job(self, method: Any, shapes: tuple[Shape, ...], which: int) -> Job:
        return Job(self._lab, method, [self._lab.places(shapes)[which]], [Direction[self._direction]])

    def _layout(self, key: str, shapes: tuple[Shape, ...]) -> list[Row]:
        shape, jobs, samples = shapes[0], {_ONE_COPY: self._job(METHODS["loop"], shapes, 1)}, {_ONE_COPY: self._bare}
        rows = {
            method: Row(key, method, self._direction, shape.tensors, shape.block_nbytes, shape.blocks)
            for method in self._plan.methods
        }
        for method in rows:
            try:
                with refusals(self._lab.device):
                    job = self._job(METHODS[method], shapes, 0)
                    figures = self._lab.figures(job, 3, _ALONE_SECONDS)
            except NotMeasured as why:
                rows[method] = replace(rows[method], note=str(why))
                continue
            rows[method] = replace(rows[method], gbps_alone=figures.device_gbps or figures.gbps)
            jobs[method], samples[method] = job, _Samples()
        for method, reason in self._pairs(jobs, samples).items():
            rows[method] = replace(rows[method], note=reason)
        return [row if row.note else samples[method].fill(row) for method, row in rows.items()]

    def _pairs(self, jobs: dict[str, Job], samples: dict[str, _Samples]) -> dict[str, str]:
        """Measures in rounds. Returns the methods that were refused with several copies in flight, and why."""
        left_out: dict[str, str] = {}
        before = self._alone()
        for turn in range(self._plan.pairs):
            first = turn % len(jobs)
            order = [*jobs][first:] + [*jobs][:first]
            for method in [method for method in order if method not in left_out]:
                _warm_up(self._lab.device, self._load)
                try:
                    with refusals(self._lab.device):
                        beside = _run_both(self._lab, self._load, jobs[method], self._plan.seconds, self._thread)
                except NotMeasured as why:
                    if method == _ONE_COPY:
                        raise
                    left_out[method] = str(why)
                    self._lab.device.synchronize(WAIT_LIMIT)  # for the copies that were submitted
                    before = self._alone()
                    continue
                after = self._alone()
                self._show_progress(method)
                samples[method].add(beside.piece_seconds / statistics.mean((before, after)), beside)
                before = after
        return left_out

    def _show_progress(self, method: str) -> None:
        plan = self._plan
        self._windows += 1
        if self._progress is not None:
            total = len(plan.layouts) * plan.pairs * (1 + len(plan.methods))
            self._progress(self._windows, total, f"windows of {plan.seconds:g} s, {self._direction} {method}")

    def _alone(self) -> float:
        return _run_alone(self._lab.device, self._load, self._plan.seconds)


def _load_of(plan: Plan) -> Load:
    try:
        with refusals(plan.device):
            return load_for(plan.device, plan.load)
    except NotMeasured as why:
        raise UsageError(f"--load {plan.load} cannot run here: {why}") from None


def run(plan: Plan, show: Callable[[str], None], progress: Progress | None = None) -> Result:
    """Measure all methods beside the load, a direction at a time. Raises WrongBytes for one wrong byte."""
    result = Result(
        **document(plan.device),
        load=plan.load,
        pairs=plan.pairs,
        window_seconds=plan.seconds,
        bytes_per_copy=plan.nbytes,
    )
    load = _load_of(plan)
    result.first_piece_seconds = _piece_alone(plan, load)
    with opened(plan.device, _SEED) as lab, ThreadPoolExecutor(1) as thread:
        result.load_is = load.name
        result.ceilings_gbps = lab.ceilings(plan.nbytes, 3)
        lab.reserve(max(host_nbytes(_shapes(plan, family, size)) for family, size in plan.layouts))
        show(f"{result.title()}, beside a load: {load.name}")
        for family in dict.fromkeys(family for family, _ in plan.layouts):
            show(f"{family.key}: {family.description}")
        for method in plan.methods:
            show(f"{method}: {METHODS[method].description}")
        show(f"{plan.pairs} pairs of {plan.seconds:g} s without and with copies, in turns; medians")
        show("the interval holds the median slow-down with 95 % confidence, from 6 pairs on")
        for direction in plan.directions:
            show("")
            show(f"{direction}, more than {plan.about_seconds:.0f} s:")
            copy, *others = _Turns(lab, load, plan, direction, thread, progress).rows()
            rows = [replace(copy, gbps_alone=result.ceilings_gbps[direction]), *others]
            result.rows += rows
            show(_spread(rows[0]))
            lines = Rows(_ROW, show)
            for row in rows:
                _add(lines, row)
        result.last_piece_seconds = _piece_alone(plan, load)
        result.bytes_verified = lab.bytes_verified
    show("")
    first, last = result.first_piece_seconds, result.last_piece_seconds
    show(
        f"a piece of the load alone: {first * 1e3:.3f} ms before the first copy, {last * 1e3:.3f} after the last "
        f"({last / first:.3f})"
    )
    show(f"{format_size(result.bytes_verified)} verified, 0 wrong bytes")
    return result


def _piece_alone(plan: Plan, load: Load) -> float:
    return statistics.median(_run_alone(plan.device, load, plan.seconds) for _ in range(_ALONE_WINDOWS))


def _spread(copy: Row) -> str:
    slow, rates = copy.slowdowns, copy.rates
    return (
        f"one bare copy over the run, {len(slow)} windows: slow-down {min(slow):.3f} to {max(slow):.3f}, "
        f"{min(rates):.1f} to {max(rates):.1f} GB/s"
    )


_ROW = Table(
    ("layout", "<18"),
    ("shape", "<21"),
    ("dir", "<4"),
    ("method", "<11"),
    ("slow-down", ">9.3f"),
    ("interval", "<13"),
    ("above copy", ">10.3f"),
    ("GB/s", ">7.2f"),
    ("of copy", ">7.2f"),
    ("alone", ">7.2f"),
    ("took", "<8"),
    lead=3,
)


def _add(rows: Rows, row: Row) -> None:
    shape = str(Shape(row.tensors, row.block_nbytes, row.blocks))
    cells: list[Cell] = [row.layout, shape, row.direction, row.method]
    if row.slowdown_interval is None:
        rows.add(cells, row.note)
        return
    interval = "{:.3f}-{:.3f}".format(*row.slowdown_interval)
    took = f"{row.path} (the load stood still)".strip() if row.stood_still else row.path
    rows.add([*cells, row.slowdown, interval, row.above_copy, row.gbps, row.of_copy, row.gbps_alone, took])
