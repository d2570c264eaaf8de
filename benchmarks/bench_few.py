"""How long transfers of few blocks take by each path, from the call to their end, and what they are predicted to take.

Blocks lie scattered on both sides: of one tensor, or of 8 tensors whose rows are neighbours on the host. Every byte is
checked. What is predicted is by the built-in costs, or by a calibration of this machine (--calibration).
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import TypeAlias

import kvswap
from kvswap import _C, _testing
from kvswap._rig import DIRECTIONS, WAIT_LIMIT, Direction, Rig, Shape, Unavailable
from kvswap.replay.units import format_size
from kvswap.typing import ForcedPath

PATHS: tuple[ForcedPath, ...] = ("dma", "burst", "kernel")
SIZES = tuple(kib << 10 for kib in (4, 8, 12, 16, 24, 32, 48, 64, 96))
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
ROUNDS, REPEATS = 3, 5

Microseconds: TypeAlias = dict[str, float]


def measured(rig: Rig, direction: Direction, shape: Shape) -> Microseconds:
    """Medians; the paths take turns."""
    found: dict[ForcedPath, list[float]] = {path: [] for path in PATHS}
    for turn in range(ROUNDS):
        for path in PATHS[:: 1 if turn % 2 else -1]:
            try:
                found[path].append(1e6 * rig.measure(path, direction, shape, REPEATS))
            except Unavailable:
                continue
    return {path: round(statistics.median(times), 2) for path, times in found.items() if times}


def predicted(costs: _C._Costs, direction: Direction, shape: Shape) -> Microseconds:
    """By these costs alone, without what `auto` weighs besides."""
    rows, runs = shape.rows, shape.blocks

    def ns(path: ForcedPath) -> float:
        return _testing.costs_predict(
            costs, path, direction, shape.nbytes, copies=rows, pieces=rows, rows=rows, runs=runs
        )

    return {path: round(ns(path) / 1e3, 2) for path in PATHS}


def main() -> None:
    """A line a shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None)
    parser.add_argument("--calibration", help="costs for what is predicted; the built-in ones")
    parser.add_argument("--json")
    options = parser.parse_args()
    costs, device = _C._costs_read(options.calibration), kvswap.Device(options.device)
    stream = kvswap.Stream(device)
    device.set_compute_stream(stream)
    rig, rows = Rig(device, stream), []
    tuning = costs["tuning"]
    rig.kernel_runs = {"d2h": tuning["kernel_normal_d2h"][:2], "h2d": tuning["kernel_normal_h2d"][:2]}
    head = "".join(f"{path:>9}{'(says)':>9}" for path in PATHS)
    print(f"{device.name} ({device.info['name']}), us\n{'':<24}{head}")
    for direction in DIRECTIONS:
        for tensors in (1, 8):
            for size in SIZES:
                for count in COUNTS:
                    if count % tensors:
                        continue
                    shape = Shape(tensors, size, count // tensors)
                    took, says = measured(rig, direction, shape), predicted(costs, direction, shape)
                    rows.append({"direction": direction, "tensors": tensors, "size": size, "count": count, "us": took,
                                 "predicted": says})  # fmt: skip
                    name = f"{direction.upper()} {tensors} x {format_size(size)} x {count // tensors}"
                    cells = "".join(f"{took.get(path, float('nan')):>9.1f}{says[path]:>9.1f}" for path in PATHS)
                    print(f"{name:<24}{cells}", flush=True)
    device.synchronize(WAIT_LIMIT)
    device.set_compute_stream(0)
    rig.close()
    print(f"{format_size(rig.bytes_verified)} verified, 0 wrong bytes")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"device": device.info["name"], "rows": rows}, file)


if __name__ == "__main__":
    main()
