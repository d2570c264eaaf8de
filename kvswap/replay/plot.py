"""A picture of a replay. Needs matplotlib, which is an optional extra."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from .errors import UsageError, check_writable
from .report import Moves, Report

_LABELS = ("GPU tier", "host tier", "file tier", "computed")
_COLOURS = ("#2a7f62", "#8cc084", "#e0b050", "#d9d9d9")
_FORMATS = (".png", ".svg", ".pdf")


def require(path: str | Path) -> None:
    """UsageError where a plot could not be drawn after the run: matplotlib, the format, the folder."""
    if Path(path).suffix.lower() not in _FORMATS:
        raise UsageError(f"--plot writes {', '.join(_FORMATS)}; {str(path)!r} is none of them")
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UsageError(f"--plot needs matplotlib ({error}): pip install 'kvswap[plot]'") from None
    check_writable("--plot", str(path))


def draw(report: Report, path: str | Path) -> None:
    """Hits a tier over the requests, and how long loads and stores took."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(11, 4.5), layout="constrained")
    tiers, times = figure.subplots(1, 2)
    history = np.array(report.history or [(0.0, 0, 0, 0, 0)], np.float64)
    requests = np.arange(1, len(history) + 1)
    tiers.stackplot(requests, *np.cumsum(history[:, 1:], axis=0).T, labels=_LABELS, colors=_COLOURS)
    tiers.set(xlabel="requests", ylabel="blocks so far", title="Where blocks were found")
    tiers.legend(loc="upper left")
    _times(times, "loads (H2D)", report.loads)
    _times(times, "stores (D2H)", report.stores)
    times.set(xlabel="milliseconds", ylabel="share of transfers", title="How long transfers took")
    if times.lines:
        times.set_xscale("log")
        times.legend(loc="lower right")
    figure.suptitle(
        f"{report.trace} on {report.device_name}: {report.geometry}, {report.bytes_per_block:,} bytes a block"
    )
    figure.savefig(path)


def _times(axes: Any, label: str, moves: Moves) -> None:
    if moves.seconds:
        milliseconds = np.sort(moves.seconds) * 1e3
        axes.plot(milliseconds, np.arange(1, len(milliseconds) + 1) / len(milliseconds), label=label)
