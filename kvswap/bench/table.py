"""The cases of ``kvswap bench``: every method, shape, size and direction; and small transfers, end to end.

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
from kvswap.replay.progress import Progress
from kvswap.replay.settings import room
from kvswap.replay.units import format_size

from .measure import BOTH, Figures, Lab, opened, refusals
from .methods import METHODS, NotMeasured, paths
from .report import Cell, Document, Rows, Table, document
from .shapes import FAMILIES, LAYOUTS, Family, Shape, gpu_nbytes, host_nbytes

SIZES = tuple(1024 * kib for kib in (4, 8, 16, 64))
DIRECTIONS = ("D2H", "H2D")
_NBYTES = {"cuda": 1 << 30, "host": 32 << 20}
_QUICK_NBYTES = {"cuda": 128 << 20, "host": 4 << 20}
_CELL_SECONDS = 0.4  # no repeat of a case begins after so long
_HIGH = ("high",)  # besides paths, whose priority is normal
_PICKED = ("auto", "background", "high")  # methods whose path kvswap picks
_SMALL = {  # one block; then 1, 8 and 64 blocks of all layers: 2, 10 and 34 MB
    str(shape).replace(" ", ""): shape
    for shape in (Shape(1, 64 << 10), Shape(64, 32 << 10), Shape(80, 16 << 10, 8), Shape(64, 8 << 10, 64))
}
_SMALL_METHODS = ("auto", "high", "dma", "burst", "kernel")
_SMALL_REPEATS, _SMALL_FEWEST = 200, 20
_NEAR = 0.9  # of the bytes of a case: compared with a bare copy of all of them
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
    """Fill in the device's defaults. UsageError: there is not enough memory."""
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
    """Families of these names in the given sizes, or else in the default ones."""
    families = [(FAMILIES | LAYOUTS)[key] for key in keys]
    made = tuple((family, size) for family in families for size in family.sizes(sizes, default))
    if not made:
        raise UsageError(f"--size: no --shape of {', '.join(keys)} has blocks of such a size")
    return made


def check_room(device: _C.Device, layouts: Sequence[Sequence[Shape]]) -> None:
    """UsageError names a layout that does not fit: each side on a GPU, both together on a host device."""
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
    share: float | None = None  # of the bare copy of as many bytes in the same direction, on the device
    whole_share: float | None = None  # the same, from the call until the bytes are there
    note: str = ""


@dataclass(frozen=True)
class SmallRow:
    """A small transfer, from the call until its end is known."""

    key: str
    shape: str
    nbytes: int
    direction: str
    method: str
    p50_us: float | None = None
    p99_us: float | None = None
    times_bare: float | None = None  # p50, of a bare copy's of as many bytes
    path: str = ""
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
    bare_copies: dict[int, dict[str, Figures]] = field(default_factory=dict)  # by bytes and direction
    rows: list[Row] = field(default_factory=list)
    small_rows: list[SmallRow] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"what": "table", **asdict(self)}


# -- the cases --------------------------------------------------------------------------------------------------------


def cases(plan: Plan) -> Iterator[Case]:
    """In the order in which they run: those that share their memory one after another."""
    for family, size in plan.layouts:
        methods = plan.methods or (*paths(plan.device), *_HIGH, *family.peers)
        shapes = family.of(size, plan.nbytes)
        for direction in (BOTH,) if family.both else plan.directions:
            for method in methods:
                yield _case(plan, family, shapes, direction, method)
    small = [m for m in plan.methods or _SMALL_METHODS if m in (*paths(plan.device), *_PICKED)]
    for key, shape in _SMALL.items():
        if shape.nbytes <= plan.nbytes:
            for direction in plan.directions:
                for method in ("bare", *small):
                    yield _small_case(key, shape, direction, method)


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
        bare = result.bare_copies[_bare_nbytes(plan, nbytes)][direction]
        share = (figures.device_gbps or figures.gbps) / (bare.device_gbps or bare.gbps)
        return replace(blank, figures=figures, share=share, whole_share=figures.gbps / bare.gbps)

    return Case(key, f"{shape}, {family.description}; {METHODS[method].description}", run)


def _bare_nbytes(plan: Plan, nbytes: int) -> int:
    """Bytes of the bare copy that such a case is compared with."""
    return plan.nbytes if nbytes >= _NEAR * plan.nbytes else nbytes


def _small_case(key: str, shape: Shape, direction: str, method: str) -> Case:
    blank = SmallRow(f"small/{key}/{direction}/{method}", str(shape), shape.nbytes, direction, method)
    what = "a bare copy of as many bytes and an event" if method == "bare" else METHODS[method].description
    measure = _bare_seconds if method == "bare" else _method_seconds

    def run(lab: Lab, result: Result) -> SmallRow:
        try:
            with refusals(lab.device):
                took, path = measure(lab, method, shape, Direction[direction])
        except NotMeasured as why:
            return replace(blank, note=str(why))
        p50, p99 = (float(np.percentile(took, percent)) * 1e6 for percent in (50, 99))
        bare = next((row.p50_us for row in result.small_rows if row.key == f"small/{key}/{direction}/bare"), p50)
        return replace(blank, p50_us=p50, p99_us=p99, times_bare=p50 / bare if bare else None, path=path)

    return Case(blank.key, f"{shape} ({shape.nbytes / 1e6:.3g} MB), end to end; {what}", run)


def _method_seconds(lab: Lab, method: str, shape: Shape, direction: Direction) -> tuple[list[float], str]:
    job = lab.job(METHODS[method], (shape,), direction.name)
    _, path = lab.warm_up(job)
    return _repeated(lambda: lab.idle(job)[0]), path


def _bare_seconds(lab: Lab, _: str, shape: Shape, direction: Direction) -> tuple[list[float], str]:
    """The least that a driver needs: one copy and one event."""
    device, stream = lab.device, lab.stream
    (place,) = lab.places((Shape(1, shape.nbytes),))
    src, dst = (int(ends[0]) for ends in place.ends(direction))
    event = _C.Event(device, timing=False)

    def once() -> float:
        place.fill(direction, stream)
        begin = time.perf_counter()
        _C._seam(device, "copy", dst, src, shape.nbytes, stream.handle)
        event.record(stream)
        while not event.query():
            pass
        took = time.perf_counter() - begin
        place.check(direction, stream, f"bare copy {direction.name}")
        return took

    once()
    return _repeated(once), ""


def _repeated(once: Callable[[], float]) -> list[float]:
    """Times of the repeats; fewer repeats where they and their checks take long."""
    took, begin = [once()], time.perf_counter()
    while len(took) < _SMALL_REPEATS and (len(took) < _SMALL_FEWEST or time.perf_counter() - begin < _CELL_SECONDS):
        took.append(once())
    return took


# -- running them -----------------------------------------------------------------------------------------------------


def run(plan: Plan, show: Callable[[str], None], progress: Progress | None = None) -> Result:
    """Measure all cases, showing each as it ends. Raises WrongBytes for one wrong byte.

    Shares are of one bare copy of as many bytes: on the device, and of the whole call.
    """
    result = Result(**document(plan.device), bytes_per_case=plan.nbytes, repeats=plan.repeats)
    show(f"{result.title()}: about {format_size(plan.nbytes)} a case, {plan.repeats} repeats")
    with opened(plan.device, _SEED) as lab:
        shapes = [family.of(size, plan.nbytes) for family, size in plan.layouts]
        for nbytes in dict.fromkeys(
            (plan.nbytes, *(_bare_nbytes(plan, sum(shape.nbytes for shape in some)) for some in shapes))
        ):
            bare = result.bare_copies[nbytes] = lab.bare_copies(nbytes, plan.repeats)
            reached = [f"{way} {found.device_gbps or found.gbps:.1f} ({found.gbps:.1f})" for way, found in bare.items()]
            show(
                f"one bare copy of {format_size(nbytes)}, GB/s on the device (of the whole call): {', '.join(reached)}"
            )
        result.ceilings_gbps = {
            way: found.device_gbps or found.gbps for way, found in result.bare_copies[plan.nbytes].items()
        }
        group, rows, every = "", None, list(cases(plan))
        for number, case in enumerate(every):
            if progress is not None:
                progress(number, len(every), case.key)
            row = case.run(lab, result)
            if progress is not None:
                progress.clear()
            if isinstance(row, Row):
                result.rows.append(row)
            else:
                result.small_rows.append(row)
            if rows is None or case.key.partition("/")[0] != group:
                group = case.key.partition("/")[0]
                show("")
                show((FAMILIES | LAYOUTS)[group].description if group in FAMILIES | LAYOUTS else _SMALL_TITLE)
                rows = Rows(_ROW if isinstance(row, Row) else _SMALL_ROW, show)
            _add(rows, row)
        result.bytes_verified = lab.bytes_verified
    if any(row.figures and not row.figures.queued for row in result.rows):
        show("* the call outlasted the spin in front of it: the device waited for the caller too")
    show(f"{format_size(result.bytes_verified)} verified, 0 wrong bytes")
    return result


_SMALL_TITLE = "small transfers, end to end from Python; blocks scattered on both sides, host block-first"
_ROW = Table(
    ("shape", "<22"),
    ("dir", "<5"),
    ("method", "<11"),
    ("device GB/s", ">11.2f", "device", ">7.2f"),
    ("share", ">6.2f"),
    ("end to end", ">10.2f", "whole", ">7.2f"),
    ("share", ">6.2f"),
    ("blocked ms", ">11.3f", "call ms", ">8.3f"),
    ("CPU ms", ">9.3f", "CPU ms", ">8.3f"),
    lead=2,
)
_SMALL_ROW = Table(
    ("shape", "<22"), ("dir", "<5"), ("method", "<11"), ("p50 us", ">8.1f"), ("p99 us", ">8.1f"), ("x bare", ">7.2f")
)


def _add(rows: Rows, row: Row | SmallRow) -> None:
    cells: list[Cell]
    if isinstance(row, SmallRow):
        cells = [row.shape, row.direction, row.method]
        if row.p50_us is None:
            rows.add(cells, row.note)
        else:
            rows.add([*cells, row.p50_us, row.p99_us, row.times_bare], after=_took(row.method, row.path))
        return
    cells, figures = [str(Shape(row.tensors, row.block_nbytes, row.blocks)), row.direction, row.method], row.figures
    if figures is None:
        rows.add(cells, row.note)
        return
    cells += [figures.device_gbps, row.share, figures.gbps, row.whole_share, figures.blocked_ms, figures.cpu_ms]
    rows.add(cells, after=("" if figures.queued else " *") + _took(row.method, figures.path))


def _took(method: str, path: str) -> str:
    return f"  took {path}" if method in _PICKED else ""
