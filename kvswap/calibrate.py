"""kvswap calibrate: what a transfer costs on this machine, by path, direction and size.

Each path is measured by moving many blocks of one size between scattered places, by the public call with the path
forced, from the call until the bytes are there. Before each transfer its destination is poisoned; after it every byte
is checked, and only then does its time count. The costs of a transfer (`start`), of one more block (`each`, and `run`
of another kind of block) and of the first blocks (`extra`) follow from transfers of one block, of some and of many: see
solve(). Few sizes are measured first, then those between them: if the time is too short, sizes are interpolated, and no
path is left out. How path kernel runs beside a model is not measured: its paces are fixed shares of the link's rate.

docs/calibration.md says what the numbers mean and how they are stored.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np

from kvswap import _C, _together
from kvswap._rig import DIRECTIONS, PATHS, WAIT_LIMIT, Direction, Rig, Shape, Unavailable
from kvswap.replay.check import WrongBytes
from kvswap.replay.errors import UsageError
from kvswap.replay.units import format_size
from kvswap.typing import ForcedPath

Kind: TypeAlias = Literal["start", "extra", "each", "run"]
_Measured: TypeAlias = "dict[Kind, dict[int, tuple[Shape, float]]]"

# As csrc/plan/cost.h has them: KVS_COST_SIZES, ..._BATCH, ..._ALONE, ..._SLOT.
SIZES = tuple(512 << i for i in range(14))
_BATCH = 16
_ALONE = 8 << 20
_SLOT = 16 << 20

_LEAST_MOVED = 8 << 20  # least bytes of a transfer; a fast link gets as many as it moves in this time:
_MOVED_SECONDS = 2e-3
_ROWS = 8192  # most rows a transfer
_LAYERS = 64  # tensors, where a path is for several
_FEW_LAYERS = 8
_FEW_COPIES, _FEW_INDEX = 32, 8  # and their size: one that is always measured, and bound by the link
_REPEATS, _LEAST_REPEATS, _START_REPEATS = 5, 3, 15
_CTAS = (1, 2, 4, 8, 16, 32, 64)
_CTAS_SIZE = 4 << 10  # at which they are compared: small rows need the most
_ENOUGH = 0.97  # of the best, for fewer CTAs
_LEAST_CTAS: dict[Direction, int] = {"d2h": 8, "h2d": 4}  # the caller's work hides what they bring
_PACE_SIZE = 32 << 10  # of the blocks by which it is told what the kernel reaches at its pace
# CTAs of path kernel (0: as many as it needs), and its pace as a share of the link (0: unpaced): at `normal` and
# `background` what a decode step on an H200 hardly felt. `normal` is first: costs are measured with its settings.
_KernelName: TypeAlias = Literal[
    "kernel_normal_d2h",
    "kernel_normal_h2d",
    "kernel_high_d2h",
    "kernel_high_h2d",
    "kernel_background_d2h",
    "kernel_background_h2d",
]
_KERNELS: tuple[tuple[_KernelName, Direction, int, float], ...] = (
    ("kernel_normal_d2h", "d2h", 2, 0.77),
    ("kernel_normal_h2d", "h2d", 2, 0.0),
    ("kernel_high_d2h", "d2h", 0, 0.0),
    ("kernel_high_h2d", "h2d", 0, 0.0),
    ("kernel_background_d2h", "d2h", 2, 0.5),
    ("kernel_background_h2d", "h2d", 2, 0.5),
)
# On a GPU with less memory bandwidth, D2H at most this share: a decode step on an H100 (3,352 GB/s) felt more
# (csrc/plan/cost.c).
_FAST_MEMORY_GBPS = 4000
_SLOW_MEMORY_SHARE = 0.47
# Variables that are set for one run must not influence what is stored for all.
_UNWANTED = ("KVSWAP_DISABLE", "KVSWAP_PACE_GBPS", "KVSWAP_RACECHECK", "CUDA_LAUNCH_BLOCKING")


@dataclass(frozen=True)
class Point:
    """One measurement, and what follows from it: the cost of size number `index`."""

    path: ForcedPath
    direction: Direction
    kind: Kind
    index: int
    shape: Shape

    @property
    def level(self) -> int:
        """0 is always measured; a larger level is measured later."""
        if self.kind in ("start", "extra") or self.index in (0, len(SIZES) - 1):
            return 0
        return next(level for level, step in enumerate((8, 4, 2, 1)) if self.index % step == 0)

    def __str__(self) -> str:
        size = format_size(SIZES[self.index]) if self.kind in ("each", "run") else self.kind
        return f"{self.path} {self.direction} {size}"


@dataclass
class Result:
    """The results. seconds: of each measured point. skipped: points for which the time was too short.
    unavailable: paths that the device lacks, and why. together: of several links at once; together_note: why there is
    nothing."""

    device: str
    product: str
    costs: _C._Costs
    seconds: dict[Point, float] = field(default_factory=dict)
    skipped: int = 0
    unavailable: dict[ForcedPath, str] = field(default_factory=dict)
    bytes_verified: int = 0
    together: list[_together.Together] = field(default_factory=list)
    together_note: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "device_name": self.product,
            "costs": self.costs,
            "unavailable": self.unavailable,
            "together": [asdict(one) for one in self.together],
            "together_note": self.together_note,
            "transfers_timed": len(self.seconds),
            "interpolated": self.skipped,
            "bytes_verified": self.bytes_verified,
            "wrong_bytes": 0,  # the first one ends the command
        }


Progress: TypeAlias = Callable[[int, int, str], None]


def check_environment() -> None:
    """UsageError for a variable that would change what is measured."""
    for name in _UNWANTED:
        if os.environ.get(name, "") not in ("", "0"):
            raise UsageError(f"{name} is set, and what is measured with it would be stored for runs without: unset it")


def check_writable(path: str) -> None:
    """UsageError if a calibration could not be stored there. Makes the folder."""
    folder = os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror or error}") from None
    if os.path.isdir(path) or not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: a calibration cannot be stored there; name a file with --output")


def calibrate(device: _C.Device, deadline: float, progress: Progress = lambda done, total, what: None) -> Result:
    """Measure until the deadline (of time.monotonic), or a little longer if some path has no costs by then.

    WrongBytes: a transfer delivered one wrong byte.
    """
    product = str(device.info["name"])
    stream = _C.Stream(device)
    rig = Rig(device, stream)
    try:
        device.set_compute_stream(stream)
        tuning = _measure_tuning(rig, progress)
        _measure_kernels(rig, tuning, progress)
        result = Result(device.name, product, {"d2h": {}, "h2d": {}, "tuning": tuning})
        _measure_points(rig, result, deadline, progress)
    finally:
        device.synchronize(WAIT_LIMIT)
        device.set_compute_stream(0)
        rig.close()
    result.bytes_verified = rig.bytes_verified
    result.costs = {**solve(result.seconds), "tuning": tuning}
    return result


def measure_together(
    result: Result, devices: Sequence[_C.Device], progress: Progress = lambda done, total, what: None
) -> None:
    """Add what the links of these devices reach together: two or more, with the one of the result.

    WrongBytes: a byte was wrong. Where it cannot be measured, the note says why."""
    try:
        result.together, verified = _together.measure(devices, progress)
    except WrongBytes:
        raise
    except (_C.Error, MemoryError, TimeoutError) as error:
        result.together_note = f"{', '.join(device.name for device in devices)} were not measured at once: {error}"
        return
    result.bytes_verified += verified
    last = result.together[-1]
    sums: _C._Tuning = {"host_gbps_d2h": last.d2h, "host_gbps_h2d": last.h2d, "host_gbps_both": last.both}
    result.costs["tuning"] |= {"host_links": last.links, **sums}


def keep_together(result: Result, before: _C._Costs) -> None:
    """Take over what an earlier calibration has of several links, if this one has measured none."""
    for name in ("host_links", "host_gbps_d2h", "host_gbps_h2d", "host_gbps_both"):
        if not result.together and name in before["tuning"]:
            result.costs["tuning"][name] = before["tuning"][name]


# -- what is measured -------------------------------------------------------------------------------------------------


def points(path: ForcedPath, direction: Direction, moved: int) -> list[Point]:
    """All measurements of one path: transfers of at most `moved` bytes."""

    def start(tensors: int) -> Point:
        return Point(path, direction, "start", 0, Shape(tensors, SIZES[0], 1))

    def many(size: int, tensors: int) -> Shape:
        rows = min(_ROWS, moved // size)
        tensors = min(tensors, rows)
        return Shape(tensors, size, rows // tensors)

    def every(kind: Literal["each", "run"], shape: Callable[[int], Shape]) -> list[Point]:
        return [Point(path, direction, kind, i, shape(size)) for i, size in enumerate(SIZES)]

    def each(tensors: int) -> list[Point]:
        return every("each", lambda size: many(size, tensors))

    match path:
        case "dma":
            few = Shape(1, SIZES[_FEW_INDEX], _FEW_COPIES)
            return [start(1), Point(path, direction, "extra", _FEW_INDEX, few), *each(1)]
        case "strided":
            extra = Point(path, direction, "extra", 0, many(SIZES[0], 2))
            run = every("run", lambda size: replace(many(size, _LAYERS), apart=True))
            return [start(2), extra, *each(_LAYERS), *run]
        case "burst":
            # Twice the bytes of others, and one slot's: what a transfer that fills a slot costs once is the difference.
            moved *= 2
            slot = _SLOT if moved >= 4 * _SLOT else moved // 8
            together = every("each", lambda size: replace(many(size, _LAYERS), together=True))
            few = Shape(_LAYERS, SIZES[_FEW_INDEX], max(1, slot // _LAYERS // SIZES[_FEW_INDEX]), together=True)
            extra = Point(path, direction, "extra", _FEW_INDEX, few)
            run = every("run", lambda size: many(size, 1))  # of one row: nothing is gathered faster
            return [start(_FEW_LAYERS), extra, *together, *run]
        case "kernel":
            return [start(1), *each(1), *every("run", lambda size: replace(many(size, 1), skew=True))]
        case _:
            return [start(1), *each(1)]


def _measure_tuning(rig: Rig, progress: Progress) -> _C._Tuning:
    progress(0, 1, "the link")
    link = {direction: rig.area / rig.measure_link(direction) / 1e9 for direction in DIRECTIONS}
    rig.moved = moved(rig.moved, min(link.values()))
    tuning: _C._Tuning = {"link_gbps_d2h": round(link["d2h"], 3), "link_gbps_h2d": round(link["h2d"], 3)}
    shape = Shape(1, _CTAS_SIZE, min(_ROWS, rig.moved // _CTAS_SIZE))
    try:
        gbps = {
            ctas: [shape.nbytes / rig.measure("kernel", d, shape, _LEAST_REPEATS, ctas) / 1e9 for d in DIRECTIONS]
            for ctas in _CTAS
            if ctas <= max(1, int(rig.device.info["sms"]))
        }
    except Unavailable:
        return tuning
    for i, direction in enumerate(DIRECTIONS):
        reached = {ctas: both[i] for ctas, both in gbps.items()}
        enough = fewest(reached, _ENOUGH * max(reached.values()))
        high = max(enough, max(ctas for ctas in reached if ctas <= _LEAST_CTAS[direction]))
        rig.kernel_runs[direction] = (high, 0.0)
    return tuning


def _measure_kernels(rig: Rig, tuning: _C._Tuning, progress: Progress) -> None:
    """CTAs and pace of path kernel at each priority, and the GB/s that it reaches alone; the rig's kernel then runs as
    at `normal`."""
    if not rig.kernel_runs:
        return
    progress(0, 1, "the kernel's paces")
    link: dict[Direction, float] = {"d2h": tuning["link_gbps_d2h"], "h2d": tuning["link_gbps_h2d"]}
    most = {direction: ctas for direction, (ctas, _) in rig.kernel_runs.items()}  # within the SMs
    shape = Shape(1, _PACE_SIZE, max(1, rig.moved // _PACE_SIZE))
    memory_gbps = int(rig.device.info["memory_gbps"])
    for name, direction, ctas, share in _KERNELS:
        if direction == "d2h" and 0 < memory_gbps < _FAST_MEMORY_GBPS:
            share = min(share, _SLOW_MEMORY_SHARE)
        run = min(ctas or most[direction], most[direction]), round(share * link[direction], 3)
        if rig.device.kind == "host":  # no SMs to share with a model
            run = most[direction], 0.0
        if name.startswith("kernel_normal"):
            rig.kernel_runs[direction] = run
        gbps = 0.0
        if run != rig.kernel_runs[direction]:  # whose costs say what it reaches
            gbps = shape.nbytes / rig.measure("kernel", direction, shape, _LEAST_REPEATS, *run) / 1e9
        tuning[name] = (*run, round(gbps, 3))


def moved(most: int, gbps: float) -> int:
    """Bytes of a transfer, a power of two: on a slow link few long transfers must not take the whole time."""
    while most > _LEAST_MOVED and most > gbps * 1e9 * _MOVED_SECONDS:
        most //= 2
    return most


def fewest(reached: dict[int, float], enough: float) -> int:
    """The smallest number of CTAs that reaches `enough`; 0: none does."""
    return min((ctas for ctas, value in reached.items() if value >= enough), default=0)


def _measure_points(rig: Rig, result: Result, deadline: float, progress: Progress) -> None:
    """Level by level. After the first level a point is skipped if the longest measurement so far would not fit."""
    plan = [point for path in PATHS for direction in DIRECTIONS for point in points(path, direction, rig.moved)]
    plan.sort(key=lambda point: point.level)  # which keeps the rest of the order
    longest = 0.0
    for done, point in enumerate(plan):
        begin = time.monotonic()
        if point.path in result.unavailable:
            continue
        if point.level > 0 and begin + longest > deadline:
            result.skipped += 1
            continue
        progress(done, len(plan), str(point))
        single = point.kind in ("start", "extra")  # numbers on which much depends, of small transfers
        repeats = _START_REPEATS if single else _REPEATS if begin < deadline else _LEAST_REPEATS
        try:
            result.seconds[point] = rig.measure(point.path, point.direction, point.shape, repeats)
        except Unavailable as error:
            if point.kind == "start":
                result.unavailable[point.path] = str(error)
        if not single:
            longest = max(longest, time.monotonic() - begin)
    progress(len(plan), len(plan), "done")


# -- costs from what was measured -------------------------------------------------------------------------------------


def solve(seconds: dict[Point, float]) -> _C._Costs:
    """Costs from which csrc/plan/cost.c predicts the measured times; none is negative."""
    costs: _C._Costs = {"d2h": {}, "h2d": {}, "tuning": {}}
    for direction, of_direction in (("d2h", costs["d2h"]), ("h2d", costs["h2d"])):
        for path in PATHS:
            of_path = {
                point: took for point, took in seconds.items() if (point.path, point.direction) == (path, direction)
            }
            needed = {point.kind for point in points(path, "d2h", _LEAST_MOVED)}
            if {point.kind for point in of_path} == needed:
                of_direction[path] = _solve_path(path, of_path)
        if "burst" in of_direction and "dma" in of_direction:
            _bound_runs(of_direction["burst"], of_direction["dma"])
    return costs


def _bound_runs(burst: _C._PathCost, dma: _C._PathCost) -> None:
    """A burst's runs are copies by the engine of path dma, and take no longer. One calibration of an H100 had runs of
    64 to 256 KiB at 24 to 36 GB/s and dma's copies at 45 to 50; bursts of such runs reached 37 to 46 right after it."""
    burst["run"] = [min(run, copy) for run, copy in zip(burst["run"], dma["each"], strict=True)]


def _solve_path(path: ForcedPath, seconds: dict[Point, float]) -> _C._PathCost:
    """Each number is computed from the others, in turns. They converge at once: the start is a small part of a transfer
    of many blocks, and blocks are a small part of a transfer of one."""
    nanoseconds: _Measured = {"start": {}, "extra": {}, "each": {}, "run": {}}
    for point, took in seconds.items():
        nanoseconds[point.kind][point.index] = (point.shape, took * 1e9)
    solve_once = _solve_burst if path == "burst" else _solve_rows
    cost: _C._PathCost = {"start": 0.0, "extra": 0.0, "each": [0.0] * len(SIZES), "run": [0.0] * len(SIZES)}
    for _ in range(50):
        cost = solve_once(path, nanoseconds, cost)
    return {
        "start": round(cost["start"], 3),
        "extra": round(cost["extra"], 3),
        "each": _rounded(cost["each"]),
        "run": _rounded(cost["run"]),
    }


def _solve_rows(path: ForcedPath, nanoseconds: _Measured, cost: _C._PathCost) -> _C._PathCost:
    """The time is start + extra + rows, of one of two kinds."""

    def rows(kind: Kind) -> list[float]:
        known = {
            i: max(0.0, ns - cost["start"] - cost["extra"] * _extras(path, shape)) / shape.rows
            for i, (shape, ns) in nanoseconds[kind].items()
        }
        return fill(known) if known else []

    each, run, extra = rows("each"), rows("run"), 0.0
    for shape, ns in nanoseconds["extra"].values():
        extra = max(0.0, ns - cost["start"] - _rows(shape, each)) / _extras(path, shape)
    shape, ns = nanoseconds["start"][0]
    start = max(0.0, ns - _rows(shape, each) - extra * _extras(path, shape))
    return {"start": start, "extra": extra, "each": each, "run": run}


def _solve_burst(path: ForcedPath, nanoseconds: _Measured, cost: _C._PathCost) -> _C._PathCost:
    """The time is start + the longer of rows and runs + a share of the shorter. From rows that take longer than runs,
    only a bound of the runs follows, and the other way round; so noise of one is not part of the other. Large rows
    are gathered no slower, by the byte, than small ones: the nearer bound, as many large ones take the link's time."""
    each = {
        i: max(0.0, ns - _burst_once(cost, shape) - _alone(shape) * at(cost["run"], shape.nbytes)) / shape.rows
        for i, (shape, ns) in nanoseconds["each"].items()
    }
    for smaller, i in pairwise(sorted(each)):
        if each[smaller] > 0:  # else within the noise
            each[i] = min(each[i], each[smaller] * SIZES[i] / SIZES[smaller])
    run = {
        i: max(0.0, ns - _burst_once(cost, shape) - _alone(shape) * _rows(shape, cost["each"])) / shape.blocks
        for i, (shape, ns) in nanoseconds["run"].items()
    }
    shape, ns = nanoseconds["start"][0]
    start = max(0.0, ns - _rows(shape, cost["each"]) - at(cost["run"], shape.nbytes))
    start = max(0.0, start - cost["extra"] * min(1.0, shape.nbytes / _SLOT))
    few, few_ns = nanoseconds["extra"][_FEW_INDEX]
    gather, move = _rows(few, cost["each"]), at(cost["run"], few.nbytes)
    extra = max(0.0, few_ns - start - max(gather, move) - _alone(few) * min(gather, move))
    if few.nbytes < _SLOT:  # there it is in proportion, as the rows are, and cannot be told from these
        extra = 0.0
    return {"start": start, "extra": extra, "each": fill(each), "run": fill(run)}


def _burst_once(cost: _C._PathCost, shape: Shape) -> float:
    return cost["start"] + cost["extra"] * min(1.0, shape.nbytes / _SLOT)


def _extras(path: ForcedPath, shape: Shape) -> int:
    """How often a transfer has the extra cost of its path."""
    if path == "strided":
        return shape.blocks
    return min(shape.rows, _BATCH) if path == "dma" and shape.rows > 1 else 0


def _rows(shape: Shape, each: Sequence[float]) -> float:
    return shape.rows * at(each, shape.row_nbytes)


def _alone(shape: Shape) -> float:
    """The share of a burst that nothing overlaps."""
    return min(1.0, _ALONE / shape.nbytes)


def at(costs: Sequence[float], size: int) -> float:
    """The cost of one copy of that size, as csrc/plan/cost.c has it: linear between two sizes, constant below the
    smallest, in proportion above the largest."""
    return float(np.interp(size, SIZES, costs)) if size <= SIZES[-1] else costs[-1] * size / SIZES[-1]


def fill(known: dict[int, float]) -> list[float]:
    """Costs of all sizes from those of some, by the same rule."""
    indices = sorted(known)
    last = indices[-1]
    found = np.interp(SIZES, [SIZES[i] for i in indices], [known[i] for i in indices])
    return [float(ns) if i <= last else known[last] * SIZES[i] / SIZES[last] for i, ns in enumerate(found)]


def _rounded(numbers: Sequence[float]) -> list[float]:
    return [round(number, 3) for number in numbers]


# -- for people -------------------------------------------------------------------------------------------------------


_RUNS = {"strided": "(apart)", "burst": "(runs)", "kernel": "(skewed)"}  # what `run` is of


def table(costs: _C._Costs) -> str:
    """A table a direction, at most 80 columns wide: GB/s by size and path, as the size over the cost of one more."""
    lines = [*_rates("D2H", costs["d2h"]), "", *_rates("H2D", costs["h2d"]), ""]
    tuning = costs["tuning"]
    lines.append(
        f"link       D2H {tuning.get('link_gbps_d2h', 0.0):.1f} GB/s, H2D {tuning.get('link_gbps_h2d', 0.0):.1f} GB/s"
    )
    if "host_links" in tuning:
        lines.append(f"{tuning['host_links']:.0f} links    {_sums(tuning)}, together")
    if any(name.startswith("kernel_") for name in tuning):
        lines.append("path kernel at each priority (and the GB/s that it reached)")
    for name, kernels in (
        ("normal", (tuning.get("kernel_normal_d2h"), tuning.get("kernel_normal_h2d"))),
        ("high", (tuning.get("kernel_high_d2h"), tuning.get("kernel_high_h2d"))),
        ("background", (tuning.get("kernel_background_d2h"), tuning.get("kernel_background_h2d"))),
    ):
        both = [f"{d.upper()} {_runs(kernel)}" for kernel, d in zip(kernels, DIRECTIONS, strict=True) if kernel]
        lines += [f"{name:<11}{', '.join(both)}"] if both else []
    return "\n".join(lines)


def _rates(direction: str, paths: Mapping[str, _C._PathCost]) -> list[str]:
    columns: list[tuple[str, float, Sequence[float]]] = []
    for path, cost in paths.items():
        columns.append((path, cost["start"], cost["each"]))
        if path in _RUNS:
            columns.append((_RUNS[path], cost["start"], cost["run"]))

    def line(name: str, cells: Iterable[str]) -> str:
        return f"{name:>8}" + "".join(f"{cell:>9}" for cell in cells)

    lines = [f"{direction}, GB/s", line("a block", (name for name, *_ in columns))]
    for i, size in enumerate(SIZES):
        rates = (f"{size / each[i]:.2f}" if each[i] else "-" for *_, each in columns)
        lines.append(line(format_size(size), rates))
    return [*lines, line("start us", (f"{start / 1e3:.1f}" for _, start, _ in columns))]


def _sums(tuning: _C._Tuning) -> str:
    both = tuning.get("host_gbps_both", 0.0)
    return (
        f"D2H {tuning.get('host_gbps_d2h', 0.0):.1f} GB/s, H2D {tuning.get('host_gbps_h2d', 0.0):.1f} GB/s, "
        f"both ways {both:.1f}"
    )


def _runs(kernel: _C._KernelTuning) -> str:
    ctas, pace, gbps = kernel
    paced = f"at {pace:.1f} GB/s" if pace else "unpaced"
    return f"{ctas} CTA{'' if ctas == 1 else 's'} {paced}{f' ({gbps:.1f})' if gbps else ''}"


def summary(result: Result) -> str:
    """The text of a result."""
    lines = [f"{result.device} ({result.product})", table(result.costs)]
    lines += [f"{path:<8} not available: {why}" for path, why in result.unavailable.items()]
    lines += [
        f"{one.links} links at once: D2H {one.d2h:.1f} GB/s (each {one.d2h_least:.1f} or more), "
        f"H2D {one.h2d:.1f} (each {one.h2d_least:.1f} or more), both ways {one.both:.1f}"
        for one in result.together
    ]
    lines += [result.together_note] if result.together_note else []
    measured = f"{len(result.seconds)} transfers timed"
    if result.skipped:
        measured += f", {result.skipped} interpolated for want of time (--seconds)"
    lines.append(f"{measured}; {format_size(result.bytes_verified)} verified, 0 wrong bytes")
    return "\n".join(lines)
