"""Draws a JSON document of `kvswap bench`, `kvswap bench --load` or `kvbench regret`. Needs matplotlib.

Path auto is drawn last, so in front, and thick. Where a result has many methods, all those by hand become one line: the
fastest of them at each size.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvswap._rig import PATHS
from kvswap.bench.methods import METHODS
from kvswap.bench.shapes import FAMILIES, LAYOUTS
from kvswap.replay.units import format_size

from . import regret

_MOST_LINES = 6
_WAYS = {"D2H": "GPU to host (D2H)", "H2D": "host to GPU (H2D)", "both": "both directions at once"}
_BY_HAND = "fastest by hand"
_BARE = "one bare copy"
_PATH_COLOURS = ("#4c78a8", "#72b7b2", "#54a24b", "#b279a2", "#9d755d", "#ff9da6", "#d37295", "#86bcb6", "#b6992d")
_COLOURS: dict[str, str] = {
    "auto": "#c1272d",
    **dict(zip(PATHS, _PATH_COLOURS, strict=False)),
    "high": "#f58518",
    "background": "#eeca3b",
    _BY_HAND: "#6b6b6b",
}
_OTHER_COLOURS = ("#6b6b6b", "#9c9c9c", "#3f3f3f", "#bab0ac", "#7f7f7f", "#565656", "#a9a9a9")
_MARKERS = "os^Dvp<>XPh*"


class Fields(dict[str, Any]):
    """An object of the document: its values as attributes, too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def draw(document: Path, picture: Path) -> None:
    """GB/s by block size, the slow-down of a load, or auto beside the best path."""
    result = json.loads(document.read_text(encoding="utf-8"), object_hook=Fields)
    plots = {"table": _table, "beside a load": _beside, "regret": _regret}
    if result.what not in plots:
        raise ValueError(f"{document}: a result of {result.what} has no plot")
    plots[result.what](importlib.import_module("matplotlib.figure").Figure, result).savefig(picture)


# -- the table --------------------------------------------------------------------------------------------------------


def lines_of(rows: Sequence[Fields], *, few: bool) -> dict[str, dict[int, float]]:
    """GB/s by method and block size, auto last. few: the paths, and the fastest of the methods by hand."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.figures is not None:
            found.setdefault(row.method, {})[row.block_nbytes] = row.figures.device_gbps or row.figures.gbps
    if few:
        kept = {name: line for name, line in found.items() if name in PATHS}
        by_hand: dict[int, float] = {}
        for name, line in found.items():
            if name not in (*PATHS, "auto", "high", "background"):
                for size, gbps in line.items():
                    by_hand[size] = max(gbps, by_hand.get(size, 0.0))
        kept |= {_BY_HAND: by_hand} if by_hand else {}
        found = kept | ({"auto": found["auto"]} if "auto" in found else {})
    if "auto" in found:
        found["auto"] = found.pop("auto")
    return found


def _table(figure_type: Any, result: Fields) -> Any:
    """A plot a family and direction: lines over the block sizes, points if there are two, bars if there is one."""
    plots = list(dict.fromkeys((row.family, row.direction) for row in result.rows))
    height = -(-len(plots) // 2)
    figure = figure_type(figsize=(12, 3.6 * height + 0.8), layout="constrained")
    grid = figure.subplots(height, 2, squeeze=False).reshape(-1)
    handles: dict[str, Any] = {}
    few = len({row.method for row in result.rows if row.figures is not None}) > _MOST_LINES
    for axes, (family, way) in zip(grid, plots, strict=False):
        lines = lines_of([row for row in result.rows if (row.family, row.direction) == (family, way)], few=few)
        description = (FAMILIES | LAYOUTS)[family].description
        axes.set_title(f"{family}, {_WAYS[way]}", loc="left", fontsize="medium", fontweight="bold", pad=18)
        axes.text(0, 1.02, description, transform=axes.transAxes, fontsize="x-small", color="#555555")
        ceiling = result.ceilings_gbps[way]
        nsizes = len({size for line in lines.values() for size in line})
        if nsizes > 1:
            for method, line in lines.items():
                style = _style(method) | ({} if nsizes > 2 else {"linestyle": ""})  # two points do not make a line
                (handles[method],) = axes.plot(list(line), list(line.values()), label=method, **style)
            handles[_BARE] = axes.axhline(ceiling, color="black", linestyle="--", linewidth=1, label=_BARE)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda nbytes, _: format_size(nbytes))
            axes.set(xlabel="size of a block", ylabel="GB/s on the device", ylim=(0, None))
        else:
            values = [next(iter(line.values())) for line in lines.values()]
            axes.barh(list(lines), values, color=[_style(method)["color"] for method in lines])
            handles[_BARE] = axes.axvline(ceiling, color="black", linestyle="--", linewidth=1, label=_BARE)
            sizes = {size for line in lines.values() for size in line}
            axes.set(xlabel=f"GB/s on the device, blocks of {', '.join(map(format_size, sizes))}", xlim=(0, None))
    for axes in grid[len(plots) :]:
        axes.set_visible(False)
    order = sorted(handles, key=lambda name: (name != "auto", name in (_BARE, _BY_HAND)))
    figure.legend([handles[name] for name in order], order, loc="outside lower center", ncols=len(order))
    figure.suptitle(f"Copying speed on {result.device_name}, {format_size(result.bytes_per_case)} a case")
    return figure


def _style(method: str) -> dict[str, Any]:
    """One colour and marker a method, in every plot."""
    names = list(_COLOURS)
    others = [name for name in METHODS if name not in names]
    number = names.index(method) if method in names else len(names) + (others.index(method) if method in others else 0)
    colour = _COLOURS.get(method) or _OTHER_COLOURS[number % len(_OTHER_COLOURS)]
    style: dict[str, Any] = {"color": colour, "marker": _MARKERS[number % len(_MARKERS)], "markersize": 4}
    if method == "auto":
        return style | {"linewidth": 3, "markersize": 7, "zorder": 5}
    return style | {"linewidth": 1.2, "linestyle": ":" if method == _BY_HAND else "-"}


# -- beside a load ----------------------------------------------------------------------------------------------------


def _beside(figure_type: Any, result: Fields) -> Any:
    """For each direction the load's slow-down above, with the median's interval, and the copies' speed below."""
    ways = list(dict.fromkeys(row.direction for row in result.rows))
    figure = figure_type(figsize=(6.5 * len(ways), 7), layout="constrained")
    grid = figure.subplots(2, len(ways), squeeze=False, sharex="col")
    handles: dict[str, Any] = {}
    for (slow, fast), way in zip(grid.T, ways, strict=True):
        rows = [row for row in result.rows if row.direction == way and row.slowdown is not None]
        copy = next(row for row in rows if not row.layout)
        rows = [row for row in rows if row.layout]
        names = list(dict.fromkeys(_layout(row) for row in rows))
        methods = list(dict.fromkeys(row.method for row in rows))
        for number, method in enumerate(methods):
            marks = [row for row in rows if row.method == method]
            width = 0.8 / len(methods)
            at = np.array([names.index(_layout(row)) for row in marks]) + (number - (len(methods) - 1) / 2) * width
            middle = np.array([row.slowdown for row in marks], np.float64)
            ends = np.array([row.slowdown_interval for row in marks], np.float64).reshape(-1, 2).T
            colour = _style(method)["color"]
            slow.errorbar(at, middle, np.abs(ends - middle), linestyle="", capsize=3, color=colour, marker="o")
            handles[method] = fast.bar(at, [row.gbps for row in marks], width, color=colour)
        for axes, value in ((slow, copy.slowdown), (fast, copy.gbps)):
            handles[_BARE] = axes.axhline(value, color="black", linestyle="--", linewidth=1)
        slow.axhline(1.0, color="black", linewidth=0.6)
        slow.set_title(_WAYS[way], loc="left", fontsize="medium", fontweight="bold")
        slow.set(ylabel="time of the load, 1: no copies")
        fast.set(ylabel="GB/s of the copies beside the load")
        fast.set_xticks(range(len(names)), names, rotation=30, ha="right")
    order = sorted(handles, key=lambda name: (name != "auto", name == _BARE))
    figure.legend([handles[name] for name in order], order, loc="outside lower center", ncols=len(order))
    figure.suptitle(f"Copies beside a load on {result.device_name}\n{result.load_is}", fontsize="medium")
    return figure


def _layout(row: Fields) -> str:
    return row.layout if row.layout in LAYOUTS else f"{row.layout}, {format_size(row.block_nbytes)}"


# -- regret -----------------------------------------------------------------------------------------------------------


def _regret(figure_type: Any, result: Fields) -> Any:
    """The shapes from the worst to the best."""
    figure = figure_type(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    share = 100 * np.arange(1, len(result.rows) + 1) / len(result.rows)
    chosen, auto = (100 * np.sort([row[name] for row in result.rows]) for name in ("choice", "ratio"))
    axes.plot(share, chosen, color=_COLOURS["dma"], linewidth=1.2, label="the path that auto took, asked for by name")
    axes.plot(share, auto, color=_COLOURS["auto"], linewidth=3, zorder=5, label="auto")
    goal = f"goal: {regret.GOAL_NEAR:.0%} of the best in {regret.GOAL_SHARE:.0%} of the shapes"
    axes.axhline(100 * regret.GOAL_NEAR, color="black", linestyle="--", linewidth=1, label=goal)
    axes.axvline(100 * (1 - regret.GOAL_SHARE), color="black", linestyle="--", linewidth=1)
    axes.set(xlabel="shapes, from the worst on (%)", ylabel="speed, of the best path's (%)", ylim=(0, 105))
    axes.set_title(f"auto on {result.device_name}: {result.draws} shapes, seed {result.seed}", fontsize="medium")
    axes.legend(loc="lower right", fontsize="small")
    return figure
