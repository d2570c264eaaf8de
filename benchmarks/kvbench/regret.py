"""How far path ``auto`` is from the best path: shapes drawn at random, each moved by every path, end to end; medians.

Paths are measured in turns, so that a disturbance of the machine affects all of them. There are two figures: the speed
of ``auto`` itself, which a caller gets, and the speed of the path that ``auto`` took, asked for by name, which is free
of the noise between two measurements of the same path.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kvswap import _C
from kvswap.bench.measure import Lab, opened, refusals
from kvswap.bench.methods import METHODS, NotMeasured, paths
from kvswap.bench.report import Document, Table, document
from kvswap.bench.shapes import Shape, host_nbytes
from kvswap.bench.table import DIRECTIONS, check_room
from kvswap.replay.progress import Progress
from kvswap.replay.units import format_size

GOAL_NEAR, GOAL_SHARE, GOAL_LEAST = 0.95, 0.97, 0.90
_SMALLEST, _LARGEST = 1 << 10, 2 << 20  # bytes a block
_MOST_TENSORS, _MOST_COPIES = 128, 32768
_RUNS = (1, 1, 2, 8, 64, 0)  # as Shape's; scattered twice as often as any other
_NBYTES = {"cuda": 256 << 20, "host": 8 << 20}
_LEAST_NBYTES = 64 << 10
_FEWEST, _MOST = 3, 15  # repeats
_SHAPE_SECONDS = 0.15
_WORST = 10


@dataclass(frozen=True)
class Draw:
    """A shape that was drawn."""

    shape: Shape
    direction: str

    def __str__(self) -> str:
        shape = self.shape
        runs = " ".join(f"{side} {run or 'one'}" for side, run in (("gpu", shape.gpu_run), ("host", shape.host_run)))
        where = "slab" if shape.slab else "apart"
        order = "block-first" if shape.block_first else "layer-first"
        return f"{self.direction} {shape}, {where}, {order}, runs: {runs}"


def draw(rng: np.random.Generator, most_nbytes: int) -> Draw:
    """A shape with sizes drawn evenly on a logarithmic scale: 4 to 8 KiB a block as often as 512 KiB to 1 MiB."""
    size = min(_even_log(rng, _SMALLEST, _LARGEST) // 16 * 16, most_nbytes)
    total = _even_log(rng, max(size, _LEAST_NBYTES), most_nbytes)
    copies = min(_MOST_COPIES, total // size)
    tensors = _even_log(rng, 1, min(_MOST_TENSORS, copies))
    blocks = copies // tensors
    gpu_run, host_run = (min(int(run), blocks) for run in rng.choice(_RUNS, 2))
    slab, block_first = bool(rng.integers(2)), bool(rng.integers(2))
    shape = Shape(tensors, size, blocks, slab, block_first, gpu_run, host_run)
    return Draw(shape, DIRECTIONS[int(rng.integers(2))])


def _even_log(rng: np.random.Generator, least: int, most: int) -> int:
    return int(math.exp(rng.uniform(math.log(least), math.log(most + 1))))


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    device: _C.Device
    seed: int
    most_nbytes: int
    draws: tuple[Draw, ...]
    methods: tuple[str, ...]  # besides auto


def plan(
    device: _C.Device,
    seed: int,
    *,
    quick: bool = False,
    draws: int | None = None,
    nbytes: int | None = None,
    methods: Sequence[str] | None = None,
) -> Plan:
    """Fill in the device's defaults. UsageError: there is not enough memory."""
    most = max(_LEAST_NBYTES, nbytes or _NBYTES[device.kind] >> (3 if quick else 0))
    rng = np.random.default_rng(seed)
    drawn = tuple(draw(rng, most) for _ in range(draws or (10 if quick else 200)))
    check_room(device, [[one.shape] for one in drawn])
    return Plan(device, seed, most, drawn, tuple(method for method in methods or paths(device) if method != "auto"))


@dataclass(frozen=True)
class Row:
    """A shape, and the speed of each method."""

    draw: Draw
    took: str  # by auto
    gbps: dict[str, float]  # by method; methods that were refused are not in it
    ratio: float  # speed of auto, as a share of the best
    choice: float  # speed of the path that auto took, asked for by name, as a share of the best


@dataclass
class Result(Document):
    """All rows."""

    seed: int = 0
    draws: int = 0
    near: float = 0.0  # share of shapes in which auto is within 5 % of the best
    least: float = 0.0  # of the best, in the worst shape
    choice_near: float = 0.0
    choice_least: float = 0.0
    rows: list[Row] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        goal = {"within": GOAL_NEAR, "share": GOAL_SHARE, "least": GOAL_LEAST}
        return {"what": "regret", "goal": goal, **asdict(self)}


def _measure(lab: Lab, plan: Plan, drawn: Draw, order: random.Random) -> Row:
    """In rounds, each in another order: a transfer that follows a similar one finds caches warm."""
    jobs = {"auto": lab.job(METHODS["auto"], (drawn.shape,), drawn.direction)}
    _, took = lab.warm_up(jobs["auto"])
    for method in plan.methods:
        with contextlib.suppress(NotMeasured), refusals(plan.device):
            job = lab.job(METHODS[method], (drawn.shape,), drawn.direction)
            lab.warm_up(job)
            jobs[method] = job
    walls: dict[str, list[float]] = {method: [] for method in jobs}
    repeats = 1
    for done in range(_MOST):
        if done >= repeats:
            break
        for method in order.sample(list(jobs), len(jobs)):
            walls[method].append(lab.idle(jobs[method])[0])
        if done == 0:
            repeats = max(_FEWEST, int(_SHAPE_SECONDS / sum(times[0] for times in walls.values())))
    gbps = {method: drawn.shape.nbytes / statistics.median(times) / 1e9 for method, times in walls.items()}
    best = max(gbps.values())
    return Row(drawn, took, gbps, gbps["auto"] / best, gbps.get(took, gbps["auto"]) / best)


def run(plan: Plan, show: Callable[[str], None], progress: Progress | None = None) -> Result:
    """Measure all shapes, then show both figures and the worst. Raises WrongBytes for one wrong byte."""
    result = Result(**document(plan.device), seed=plan.seed, draws=len(plan.draws))
    show(f"{result.title()}: {result.draws} shapes of at most {format_size(plan.most_nbytes)}, seed {plan.seed}")
    order = random.Random(plan.seed)
    with opened(plan.device, plan.seed) as lab:
        lab.reserve(max(host_nbytes([drawn.shape]) for drawn in plan.draws))
        for drawn in plan.draws:
            result.rows.append(_measure(lab, plan, drawn, order))
            if progress is not None:
                progress(len(result.rows), result.draws, f"shapes, {format_size(lab.bytes_verified)} verified")
        result.bytes_verified = lab.bytes_verified
    if progress is not None:
        progress.clear()
    for name in ("ratio", "choice"):
        values = [getattr(row, name) for row in result.rows]
        prefix = "" if name == "ratio" else "choice_"
        setattr(result, f"{prefix}near", sum(value >= GOAL_NEAR for value in values) / len(values))
        setattr(result, f"{prefix}least", min(values))
    for line in _summary(result):
        show(line)
    return result


_ROW = Table(
    ("of best", ">7.2f"), ("auto took", "<9"), ("GB/s", ">7.2f"), ("best", "<9"), ("GB/s", ">7.2f"), ("shape", "<1")
)


def _met(value: float, goal: float) -> str:
    return "met" if value >= goal else "missed"


def _summary(result: Result) -> list[str]:
    near, least = result.near, result.least
    goals = [f"goal {GOAL_SHARE:.0%}: {_met(near, GOAL_SHARE)}", f"goal {GOAL_LEAST:.2f}: {_met(least, GOAL_LEAST)}"]
    if result.device.startswith("host"):
        goals = ["on a host device no goal", "no goal either: its times are those of threads"]
    lines = [
        f"auto is within 5 % of the best path in {near:.1%} of the shapes ({goals[0]}), "
        f"and at {least:.2f} of it in the worst ({goals[1]})",
        f"the path that it took, asked for by name: {result.choice_near:.1%}, and {result.choice_least:.2f}",
        "the worst shapes:",
        _ROW.header(),
    ]
    for row in sorted(result.rows, key=lambda row: row.ratio)[:_WORST]:
        best = max(row.gbps, key=lambda method: row.gbps[method])
        lines.append(_ROW.line([row.ratio, row.took, row.gbps["auto"], best, row.gbps[best], str(row.draw)]))
    return [*lines, f"{format_size(result.bytes_verified)} verified, 0 wrong bytes"]
