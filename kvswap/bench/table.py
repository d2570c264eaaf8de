"""The cases of ``kvswap bench``: every method, shape, size and direction; and one small block, end to end.

A case is a key, a description and a run, which gives one row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from kvswap import _C, Direction
from kvswap.replay.errors import UsageError
from kvswap.replay.settings import room
from kvswap.replay.units import format_size

from .measure import BOTH, Figures, Lab, opened, refusals
from .methods import METHODS, NotMeasured, paths
from .report import Document, Table, document
from .shapes import FAMILIES, LAYOUTS, Family, Shape, gpu_nbytes, host_nbytes

SIZES = tuple(1024 * kib for kib in (4, 8, 16, 64))
DIRECTIONS = ("D2H", "H2D")
_NBYTES = {"cuda": 1 << 30, "host": 32 << 20}
_QUICK_NBYTES = {"cuda": 128 << 20, "host": 4 << 20}
_CELL_SECONDS = 0.4  # a case is repeated no more once it took so long
_SMALL = Shape(1, 64 << 10)
_SMALL_METHODS = ("auto", "dma", "kernel")
_SMALL_REPEATS = 200
_SEED = 1  # of ids and bytes: the same shapes every time


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    device: _C.Device
    nbytes: int
    repeats: int
    layouts: tuple[tuple[Family, int], ...]  # a family, and bytes a block
    directions: tuple[str, ...]
    methods: tuple[str, ...]  # empty: kvswap's paths, and each family's peers


def plan(
    device: _C.Device,
    *,
    quick: bool = False,
    nbytes: int | None = None,
    repeats: int | None = None,
    families: Sequence[str] | None = None,
    sizes: Sequence[int] | None = None,
    directions: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
) -> Plan:
    """Fill in what suits the device. UsageError: there is not as much memory."""
    default = [key for key, family in FAMILIES.items() if not (family.both and directions)]
    made = Plan(
        device,
        nbytes or (_QUICK_NBYTES if quick else _NBYTES)[device.kind],
        repeats or (1 if quick else 3),
        layouts(families or default, sizes, (SIZES[0], SIZES[-1]) if quick else SIZES),
        tuple(directions or DIRECTIONS),
        tuple(methods or ()),
    )
    check_room(device, [family.of(size, made.nbytes) for family, size in made.layouts])
    return made


def layouts(keys: Sequence[str], sizes: Sequence[int] | None, default: Sequence[int]) -> tuple[tuple[Family, int], ...]:
    """Families of these names in the sizes that are wanted, or else in those of the default."""
    families = [(FAMILIES | LAYOUTS)[key] for key in keys]
    made = tuple((family, size) for family in families for size in family.sizes(sizes, default))
    if not made:
        raise UsageError(f"--size: no --shape of {', '.join(keys)} has blocks of such a size")
    return made


def check_room(device: _C.Device, layouts: Sequence[Sequence[Shape]]) -> None:
    """Each of them must fit, a side at a time and, on a host device, both together. One that is refused is named."""
    there = room(device)
    for shapes in layouts:
        gpu, host = gpu_nbytes(shapes), host_nbytes(shapes)
        need = (
            ((gpu + host, there.host_nbytes),)
            if device.kind == "host"
            else (
                (gpu, there.device_nbytes),
                (host, there.host_nbytes),
            )
        )
        for nbytes, free in need:
            if nbytes > free:
                raise UsageError(
                    f"{shapes[0]} needs {format_size(nbytes)} of memory and {format_size(free)} is free: "
                    "ask for fewer --bytes or a smaller --size"
                )


@dataclass(frozen=True)
class Row:
    """One case measured, or why it was not."""

    key: str
    family: str
    tensors: int
    block_nbytes: int
    blocks: int
    direction: str
    method: str
    nbytes: int
    figures: Figures | None = None
    share: float | None = None  # of the bare copy in the same direction, on the device
    note: str = ""


@dataclass(frozen=True)
class SmallRow:
    """One small block, from the call until it is known to be there."""

    key: str
    direction: str
    method: str
    p50_us: float | None = None
    p99_us: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Case:
    key: str
    description: str
    run: Callable[[Lab, Result], Row | SmallRow]


@dataclass
class Result(Document):
    """All rows."""

    bytes_per_case: int = 0
    repeats: int = 0
    ceilings_gbps: dict[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    small_rows: list[SmallRow] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"what": "table", **asdict(self)}


# -- the cases --------------------------------------------------------------------------------------------------------


def cases(plan: Plan) -> Iterator[Case]:
    """In the order in which they run: those that share their memory one after another."""
    for family, size in plan.layouts:
        methods = plan.methods or (*paths(plan.device), *family.peers)
        shapes = family.of(size, plan.nbytes)
        for direction in (BOTH,) if family.both else plan.directions:
            for method in methods:
                yield _case(plan, family, shapes, direction, method)
    for direction in plan.directions:
        for method in ("bare", *(method for method in plan.methods or _SMALL_METHODS if method in paths(plan.device))):
            yield _small_case(direction, method)


def _case(plan: Plan, family: Family, shapes: tuple[Shape, ...], direction: str, method: str) -> Case:
    shape, nbytes = shapes[0], sum(shape.nbytes for shape in shapes)
    key = f"{family.key}/{format_size(shape.block_nbytes).replace(' ', '')}/{direction}/{method}"
    blank = Row(key, family.key, shape.tensors, shape.block_nbytes, shape.blocks, direction, method, nbytes)

    def run(lab: Lab, result: Result) -> Row:
        try:
            with refusals(lab.device):
                figures = lab.figures(lab.job(METHODS[method], shapes, direction), plan.repeats, _CELL_SECONDS)
        except NotMeasured as why:
            return replace(blank, note=str(why))
        share = (figures.device_gbps or figures.gbps) / result.ceilings_gbps[direction]
        return replace(blank, figures=figures, share=share)

    return Case(key, f"{shape}, {family.description}; {METHODS[method].description}", run)


def _small_case(direction: str, method: str) -> Case:
    key = f"small/{direction}/{method}"
    what = "a bare copy and an event" if method == "bare" else METHODS[method].description
    measure = _bare_seconds if method == "bare" else _method_seconds

    def run(lab: Lab, _: Result) -> SmallRow:
        try:
            with refusals(lab.device):
                took = measure(lab, method, Direction[direction])
        except NotMeasured as why:
            return SmallRow(key, direction, method, note=str(why))
        p50, p99 = (float(np.percentile(took, percent)) * 1e6 for percent in (50, 99))
        return SmallRow(key, direction, method, p50, p99)

    return Case(key, f"one block of {format_size(_SMALL.block_nbytes)}, end to end; {what}", run)


def _method_seconds(lab: Lab, method: str, direction: Direction) -> list[float]:
    job = lab.job(METHODS[method], (_SMALL,), direction.name)
    lab.warm_up(job)
    return [lab.idle(job)[0] for _ in range(_SMALL_REPEATS)]


def _bare_seconds(lab: Lab, _: str, direction: Direction) -> list[float]:
    """The least that a driver needs: no look at anything, one event."""
    device, stream = lab.device, lab.stream
    (place,) = lab.places((_SMALL,))
    src, dst = (int(ends[0]) for ends in place.ends(direction))
    event, took = _C.Event(device, timing=False), []
    for _repeat in range(_SMALL_REPEATS + 1):
        place.fill(direction, stream)
        begin = time.perf_counter()
        _C._seam(device, "copy", dst, src, _SMALL.block_nbytes, stream.handle)
        event.record(stream)
        while not event.query():
            pass
        took.append(time.perf_counter() - begin)
        place.check(direction, stream, f"bare copy {direction.name}")
    return took[1:]


# -- running them -----------------------------------------------------------------------------------------------------


def run(plan: Plan, show: Callable[[str], None]) -> Result:
    """Measure all cases, showing each as it ends. Raises WrongBytes for one wrong byte."""
    result = Result(**document(plan.device), bytes_per_case=plan.nbytes, repeats=plan.repeats)
    show(f"{result.title()}: about {format_size(plan.nbytes)} a case, {plan.repeats} repeats")
    with opened(plan.device, _SEED) as lab:
        result.ceilings_gbps = lab.ceilings(plan.nbytes, plan.repeats)
        reached = ", ".join(f"{way} {gbps:.1f}" for way, gbps in result.ceilings_gbps.items())
        show(f"one bare copy of {format_size(plan.nbytes)}, GB/s: {reached}")
        group = ""
        for case in cases(plan):
            row = case.run(lab, result)
            if isinstance(row, Row):
                result.rows.append(row)
            else:
                result.small_rows.append(row)
            if case.key.partition("/")[0] != group:
                group = case.key.partition("/")[0]
                show("")
                show(
                    (FAMILIES | LAYOUTS)[group].description
                    if group in FAMILIES | LAYOUTS
                    else case.description.partition(";")[0]
                )
                show((_ROW if isinstance(row, Row) else _SMALL_ROW).header())
            show(_line(row))
        result.bytes_verified = lab.bytes_verified
    if any(row.figures and not row.figures.queued for row in result.rows):
        show("* the call outlasted the spin in front of it: the device waited for the caller too")
    show(f"{format_size(result.bytes_verified)} verified, 0 wrong bytes")
    return result


_ROW = Table(
    ("shape", "<22"),
    ("dir", "<5"),
    ("method", "<11"),
    ("device GB/s", ">11.2f"),
    ("share", ">6.2f"),
    ("end to end", ">10.2f"),
    ("blocked ms", ">11.3f"),
    ("CPU ms", ">9.3f"),
)
_SMALL_ROW = Table(("dir", "<5"), ("method", "<11"), ("p50 us", ">8.1f"), ("p99 us", ">8.1f"))


def _line(row: Row | SmallRow) -> str:
    if isinstance(row, SmallRow):
        if row.p50_us is None:
            return _SMALL_ROW.line([row.direction, row.method], row.note)
        return _SMALL_ROW.line([row.direction, row.method, row.p50_us, row.p99_us])
    begin = [str(Shape(row.tensors, row.block_nbytes, row.blocks)), row.direction, row.method]
    figures = row.figures
    if figures is None:
        return _ROW.line(begin, row.note)
    cells = [figures.device_gbps, row.share, figures.gbps, figures.blocked_ms, figures.cpu_ms]
    took = f"  took {figures.path}" if row.method == "auto" else ""
    return _ROW.line([*begin, *cells]) + ("" if figures.queued else " *") + took
