"""csrc/paths/costs_default.c, the costs that serve where nothing was calibrated, from a calibration:

python3 benchmarks/cost_table.py CALIBRATION > csrc/paths/costs_default.c

With --rows PATH, only that path's rows are taken from it, and all else stays what it was: where only how this path runs
has changed. Starts are microseconds of a processor, which differ from machine to machine more than paths do.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import get_args

from kvswap import _C
from kvswap.typing import ForcedPath

_HEAD = """\
/* The costs that serve where nothing was calibrated: those of an H200 on PCIe 5. Made by benchmarks/cost_table.py
 * from a calibration of that machine; do not edit. */
#include "paths/costs_default.h"

/* clang-format off */
static const struct kvs_costs costs = {
  .paths = {"""
_TAIL = """};
/* clang-format on */

const struct kvs_costs *kvs_costs_default(void) { return &costs; }
"""


def table(costs: _C._Costs, before: _C._Costs) -> str:
    """The whole file. Of a path that a GPU has not, `direct`, the costs stay what they were before, and so does tuning
    that was not found."""
    lines = [_HEAD]
    for name, of_direction, kept in (("D2H", costs["d2h"], before["d2h"]), ("H2D", costs["h2d"], before["h2d"])):
        lines.append(f"    [KVS_{name}] = {{")
        for path in get_args(ForcedPath):
            lines += _path(path, of_direction.get(path, kept.get(path)))
        lines.append("    },")
    lines.append("  },")
    lines += _tuning({**before["tuning"], **costs["tuning"]})
    return "\n".join([*lines, _TAIL])


def _path(path: str, cost: _C._PathCost | None) -> Iterator[str]:
    name = f"      [KVS_PATH_{path.upper()}] ="
    if cost is None:
        yield f"{name} {{.start = -1}}, /* unknown */"
        return
    yield f"{name} {{.start = {cost['start']:.15g}, .extra = {cost['extra']:.15g},"
    yield f"        .each = {{{_numbers(cost['each'])}}}{',' if cost['run'] else '},'}"
    if cost["run"]:
        yield f"        .run = {{{_numbers(cost['run'])}}}}},"


def _tuning(tuning: _C._Tuning) -> Iterator[str]:
    yield "  .tuning = {"
    yield f"    .link_gbps = {{{tuning['link_gbps_d2h']:.15g}, {tuning['link_gbps_h2d']:.15g}}},"
    yield "    .kernel = {"
    for direction, of_direction in (
        ("D2H", (tuning["kernel_normal_d2h"], tuning["kernel_high_d2h"], tuning["kernel_background_d2h"])),
        ("H2D", (tuning["kernel_normal_h2d"], tuning["kernel_high_h2d"], tuning["kernel_background_h2d"])),
    ):
        yield f"      [KVS_{direction}] = {{"
        for priority, numbers in zip(("NORMAL", "HIGH", "BACKGROUND"), of_direction, strict=True):
            yield f"        [KVS_PRIORITY_{priority}] = {{{_numbers(numbers)}}},"
        yield "      },"
    yield "    },"
    yield "  },"


def _numbers(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.15g}" for number in numbers)


def with_rows(path: ForcedPath, found: _C._Costs, before: _C._Costs) -> _C._Costs:
    """The costs as they were before, with the rows of one path that were found; for path kernel, with its rates too."""
    for of_direction, new in ((before["d2h"], found["d2h"]), (before["h2d"], found["h2d"])):
        of_direction[path] |= {"each": new[path]["each"], "run": new[path]["run"]}
    if path == "kernel":
        tuning, new_tuning = before["tuning"], found["tuning"]
        tuning["kernel_high_d2h"], tuning["kernel_high_h2d"] = (
            new_tuning["kernel_high_d2h"],
            new_tuning["kernel_high_h2d"],
        )
        tuning["kernel_normal_d2h"] = (*tuning["kernel_normal_d2h"][:2], new_tuning["kernel_normal_d2h"][2])
        tuning["kernel_normal_h2d"] = (*tuning["kernel_normal_h2d"][:2], new_tuning["kernel_normal_h2d"][2])
    return before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calibration", help="the file that `kvswap calibrate` stored")
    parser.add_argument("--rows", metavar="PATH", choices=get_args(ForcedPath), help="take this path's rows alone")
    options = parser.parse_args()
    found, before = _C._costs_read(options.calibration), _C._costs_read(None)
    if options.rows:
        found = with_rows(options.rows, found, _C._costs_read(None))
    print(table(found, before), end="")


if __name__ == "__main__":
    main()
