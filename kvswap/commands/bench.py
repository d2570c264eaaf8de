"""`kvswap bench`: the table of all paths, and copies beside a load."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvswap.replay.errors import UsageError
from kvswap.replay.progress import Progress

from .output import document, for_person
from .parser import (
    EXIT_OK,
    Commands,
    Parser,
    add_device,
    add_json,
    add_names,
    complain,
    duration,
    open_device,
    positive,
    some_size,
)

if TYPE_CHECKING:
    from kvswap import _C
    from kvswap.bench import beside, table

# Options that only some of the measurements have.
_FEW_BYTES = 1024  # of a block: fewer make millions of copies a case, and may be a number whose unit was left out
_OPTIONS = {
    "the table": ("repeats", "shape", "size", "direction"),
    "--load": ("pairs", "seconds", "shape", "size", "direction"),
}


def add(commands: Commands[Parser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure how fast blocks move, and what that costs",
        usage="%(prog)s [options]",
        description="Measures kvswap's paths, and copies by hand, on shapes of a KV cache, every byte verified.",
    )
    from kvswap.bench.loads import KINDS
    from kvswap.bench.methods import METHODS
    from kvswap.bench.shapes import FAMILIES, LAYOUTS

    what = parser.add_argument_group("what is measured (default: a table of all paths)").add_mutually_exclusive_group()
    what.add_argument(
        "--load", choices=KINDS, metavar="LOAD", help=f"copies beside a load, and its slow-down: {', '.join(KINDS)}"
    )
    what.add_argument("--list", action="store_true", help="list the cases of the table, and measure nothing")
    only = parser.add_argument_group("which part of it (each may be given again)")
    add_names(only, "--shape", FAMILIES | LAYOUTS, "shapes (default with --load: from 64x32k on)")
    only.add_argument("--size", type=some_size, action="append", metavar="SIZE", help="sizes of a block, such as 16KiB")
    add_names(only, "--direction", ("D2H", "H2D"), "directions", convert=str.upper)
    add_names(only, "--method", METHODS, "methods")
    much = parser.add_argument_group("how much")
    add_device(much)
    much.add_argument("--quick", action="store_true", help="a short run: fewer bytes, sizes and repeats")
    much.add_argument(
        "--bytes",
        type=some_size,
        metavar="SIZE",
        help="bytes of a case (default 1GiB on a GPU, 256MiB with --load; less on a host device)",
    )
    much.add_argument("--repeats", type=positive, metavar="N", help="repeats of a case; the median counts (default 3)")
    much.add_argument("--pairs", type=positive, metavar="N", help="--load: windows with copies (default 6)")
    much.add_argument("--seconds", type=duration, metavar="S", help="--load: length of a window (default 0.2)")
    results = parser.add_argument_group("results")
    add_json(results)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    _check(args)
    with document(args, "bench") as out:
        show = for_person(args)
        if args.list:
            cases = _list(args)
            for key, description in cases.items():
                show(f"{key}: {description}", hang=4)
            out.write({"what": "list", "cases": cases})
            return EXIT_OK
        progress = Progress(sys.stderr)
        try:
            result = _measurement(args, open_device(args.device), progress)(show)
        finally:
            progress.clear()
        out.write(result.to_dict())
    return EXIT_OK


def _check(args: argparse.Namespace) -> None:
    """Refuses what does not go together before a device is opened."""
    what = "--load" if args.load else "the table"
    for option in sorted({option for options in _OPTIONS.values() for option in options}):
        if getattr(args, option) is not None and option not in _OPTIONS[what]:
            owners = " and ".join(owner for owner, options in _OPTIONS.items() if option in options)
            raise UsageError(f"--{option} is for {owners}, not for {what}")
    for few in (size for size in args.size or () if size < _FEW_BYTES and not args.list):
        complain(f"--size {few} is {few} bytes a block: a case may take minutes; {few}KiB would be {few << 10:,}")


def _measurement(
    args: argparse.Namespace, device: _C.Device, progress: Progress
) -> Callable[[Callable[[str], None]], beside.Result | table.Result]:
    from kvswap.bench import beside, table

    if not args.load:
        return partial(table.run, _table_plan(args, device), progress=progress)
    common = {"quick": args.quick, "nbytes": args.bytes, "methods": args.method}
    where = {"families": args.shape, "sizes": args.size, "directions": args.direction}
    load = beside.plan(device, args.load, pairs=args.pairs, seconds=args.seconds, **where, **common)
    return partial(beside.run, load, progress=progress)


def _table_plan(args: argparse.Namespace, device: _C.Device) -> table.Plan:
    from kvswap.bench import table

    return table.plan(
        device,
        quick=args.quick,
        nbytes=args.bytes,
        repeats=args.repeats,
        families=args.shape,
        sizes=args.size,
        directions=args.direction,
        methods=args.method,
    )


def _list(args: argparse.Namespace) -> dict[str, str]:
    from kvswap.bench import table

    return {case.key: case.description for case in table.cases(_table_plan(args, open_device(args.device)))}
