"""A picture of a replay. Needs matplotlib, which is an optional extra."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np

from .errors import UsageError, check_writable
from .report import Moves, Report
from .units import format_size

# From the bottom of the plot to its top.
_FOUND = (("GPU tier", "#2a7f62"), ("host tier", "#8cc084"), ("file tier", "#e0b050"), ("computed", "#d9d9d9"))
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
    """Where blocks were found over the requests, and how long loads and stores took."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(11, 4.5), layout="constrained")
    found, times = figure.subplots(1, 2)
    history = np.array(report.history or [(0.0, 0, 0, 0, 0)], np.float64)
    layers = [(column, *look) for column, look in zip(np.cumsum(history[:, 1:], axis=0).T, _FOUND, strict=True)]
    layers = [layer for layer in layers if layer[0].any()]  # a tier without a hit has no area and no label
    if layers:
        columns, labels, colours = zip(*layers, strict=True)
        found.stackplot(np.arange(1, len(history) + 1), *columns, labels=labels, colors=colours)
        found.legend(loc="upper left", reverse=True)
    found.set(xlabel="requests", ylabel="blocks, summed up", title="Where blocks were found")
    for label, moves in _times(report):
        milliseconds = np.sort(moves.seconds) * 1e3
        times.plot(milliseconds, 100 * np.arange(1, len(milliseconds) + 1) / len(milliseconds), label=label)
    times.set(xlabel="time of a transfer (ms)", ylabel="transfers that took no longer (%)")
    times.set_title("How long transfers took")
    if times.lines:
        times.set_xscale("log")
        times.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        times.legend(loc="lower right")
    block = format_size(report.bytes_per_block)
    figure.suptitle(f"{report.trace} on {report.device_name}: {report.geometry}, {block} a block")
    figure.savefig(path)


def _times(report: Report) -> list[tuple[str, Moves]]:
    """Those of which there are times."""
    every = [
        ("host to GPU (H2D)", report.loads),
        ("GPU to host (D2H)", report.stores),
        ("files to GPU", report.file_loads),
        ("host to files", report.file_stores),
    ]
    return [(label, moves) for label, moves in every if moves.seconds]
