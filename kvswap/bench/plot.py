"""Pictures of the results. Needs matplotlib, which is an optional extra: ask kvswap.replay.plot.require() first."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kvswap.replay.units import format_size

from . import beside, handlers, regret, table
from .methods import METHODS
from .shapes import LAYOUTS

Result: TypeAlias = table.Result | beside.Result | regret.Result | handlers.Result
_MARKERS = "osv^D<>pXP*hd8"


def draw(result: Result, path: str | Path) -> None:
    """Bandwidth over block size, slow-down against bandwidth, or how far auto is from the best."""
    figure_type = importlib.import_module("matplotlib.figure").Figure
    if isinstance(result, table.Result):
        figure = _table(figure_type, result)
    elif isinstance(result, beside.Result):
        figure = _beside(figure_type, result)
    elif isinstance(result, regret.Result):
        figure = _regret(figure_type, result)
    else:
        raise TypeError("a result of --handlers has no plot")
    figure.savefig(path)


def _table(figure_type: Any, result: table.Result) -> Any:
    """A picture a family and direction, a line a method."""
    pictures = list(dict.fromkeys((row.family, row.direction) for row in result.rows))
    lines = -(-len(pictures) // 2)
    figure = figure_type(figsize=(13, 4 * lines), layout="constrained")
    grid = figure.subplots(lines, 2, squeeze=False).reshape(-1)
    for axes, (family, way) in zip(grid, pictures, strict=False):
        rows = [row for row in result.rows if (row.family, row.direction) == (family, way)]
        for method in dict.fromkeys(row.method for row in rows):
            line = [(row.block_nbytes, row.figures) for row in rows if row.method == method and row.figures]
            if line:
                speeds = [figures.device_gbps or figures.gbps for _, figures in line]
                axes.plot([nbytes for nbytes, _ in line], speeds, label=method, **_style(method))
        axes.axhline(result.ceilings_gbps[way], color="grey", linestyle="--", label="one bare copy")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda nbytes, _: format_size(nbytes))
        axes.set(xlabel="bytes a block", ylabel="GB/s on the device", title=f"{family}, {way}", ylim=(0, None))
        axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    for axes in grid[len(pictures) :]:
        axes.set_visible(False)
    figure.suptitle(f"{result.device_name}: {format_size(result.bytes_per_case)} a case")
    return figure


def _beside(figure_type: Any, result: beside.Result) -> Any:
    """A picture a direction; each method a mark for every block size, with the median's interval."""
    ways = list(dict.fromkeys(row.direction for row in result.rows))
    figure = figure_type(figsize=(6.5 * len(ways), 5), layout="constrained")
    for axes, way in zip(figure.subplots(1, len(ways), squeeze=False)[0], ways, strict=True):
        rows = [row for row in result.rows if row.direction == way and row.slowdown is not None]
        for method in dict.fromkeys(row.method for row in rows):
            marks = [row for row in rows if row.method == method]
            middle = np.array([row.slowdown for row in marks])
            ends = np.array([row.slowdown_interval for row in marks]).T
            speeds = [row.gbps for row in marks]
            axes.errorbar(
                speeds, middle, np.abs(ends - middle), linestyle="", capsize=3, label=method, **_style(method)
            )
            for row in marks:
                name = row.layout if row.layout in LAYOUTS else format_size(row.block_nbytes)
                offset = {"xytext": (5, 5), "textcoords": "offset points"}
                axes.annotate(name, (row.gbps, row.slowdown), fontsize="x-small", **offset)
        axes.axvline(result.ceilings_gbps[way], color="grey", linestyle="--", label="one bare copy, alone")
        axes.axhline(1.0, color="grey", linestyle=":")
        axes.set_yscale("log")
        axes.set(xlabel="GB/s of the copies while the load ran", ylabel="slow-down of the load", title=way)
        axes.legend(fontsize="x-small")
    figure.suptitle(f"{result.device_name}, beside {result.load_is}", wrap=True)
    return figure


def _regret(figure_type: Any, result: regret.Result) -> Any:
    """The shapes from the worst to the best."""
    figure = figure_type(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    share = np.arange(1, len(result.rows) + 1) / len(result.rows)
    axes.plot(share, sorted(row.ratio for row in result.rows), label="auto")
    axes.plot(share, sorted(row.choice for row in result.rows), label="the path that it took")
    axes.axhline(regret.GOAL_NEAR, color="grey", linestyle="--")
    axes.axvline(1 - regret.GOAL_SHARE, color="grey", linestyle="--")
    axes.set(xlabel="share of the shapes", ylabel="of the best path's speed", ylim=(0, 1.05))
    axes.set_title(f"{result.device_name}: {result.draws} shapes, seed {result.seed}")
    axes.legend(loc="lower right")
    return figure


def _style(method: str) -> dict[str, Any]:
    """The same for a method in all pictures, and no two alike."""
    number = list(METHODS).index(method) if method in METHODS else len(METHODS)
    colors = importlib.import_module("matplotlib").colormaps["tab20"].colors
    return {"color": colors[number % len(colors)], "marker": _MARKERS[number % len(_MARKERS)]}
