"""Measures path auto against the others on random shapes, and vLLM's job queue; draws results. Every byte is verified.

PYTHONPATH=benchmarks python3 -m kvbench regret --seed 5
PYTHONPATH=benchmarks python3 -m kvbench handlers --json=handlers.json
PYTHONPATH=benchmarks python3 -m kvbench plot bench.json bench.png
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench import handlers, plot, regret
from kvswap.bench.methods import METHODS
from kvswap.commands.output import document, for_person
from kvswap.commands.parser import (
    Parser,
    add_device,
    add_json,
    add_names,
    count,
    duration,
    open_device,
    positive,
    some_size,
)
from kvswap.replay.progress import Progress


def _parser() -> Parser:
    parser = Parser(prog="kvbench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    shapes = commands.add_parser("regret", help="shapes drawn at random: how far auto is from the best path")
    shapes.add_argument("--draws", type=positive, metavar="N", help="number of shapes (default 200)")
    shapes.add_argument("--seed", type=count, metavar="N", help="seed of the shapes (default: a random one)")
    shapes.add_argument("--bytes", type=some_size, metavar="SIZE", help="bytes of a shape (default 256MiB on a GPU)")
    add_names(shapes, "--method", METHODS, "methods")
    shapes.set_defaults(run=_regret)
    queue = commands.add_parser("handlers", help="vLLM's job queue, by kvswap and by vLLM's ways")
    queue.add_argument("--repeats", type=positive, metavar="N", help="repeats of a case; the median counts (default 3)")
    queue.add_argument("--pairs", type=positive, metavar="N", help="windows beside a decode-shaped product (default 3)")
    queue.add_argument("--seconds", type=duration, metavar="S", help="length of a window (default 0.5)")
    add_names(queue, "--direction", ("D2H", "H2D"), "directions", convert=str.upper)
    queue.set_defaults(run=_handlers)
    for command in (shapes, queue):
        command.add_argument("--quick", action="store_true", help="a short run")
        add_device(command)
        add_json(command)
    picture = commands.add_parser("plot", help="draw a result, which needs matplotlib")
    picture.add_argument("document", type=Path, help="the JSON document of regret, or of kvswap bench")
    picture.add_argument("picture", type=Path, help="the file to write: .png, .svg or .pdf")
    picture.set_defaults(run=lambda args: plot.draw(args.document, args.picture))
    return parser


def _regret(args: argparse.Namespace) -> None:
    seed = secrets.randbits(32) if args.seed is None else args.seed
    device, progress = open_device(args.device), Progress(sys.stderr)
    plan = regret.plan(device, seed, quick=args.quick, draws=args.draws, nbytes=args.bytes, methods=args.method)
    with document(args, "kvbench") as out:
        try:
            out.write(regret.run(plan, for_person(args), progress).to_dict())
        finally:
            progress.clear()


def _handlers(args: argparse.Namespace) -> None:
    options = {"repeats": args.repeats, "pairs": args.pairs, "seconds": args.seconds, "directions": args.direction}
    plan = handlers.plan(open_device(args.device), quick=args.quick, **options)
    with document(args, "kvbench") as out:
        out.write(handlers.run(plan, for_person(args)).to_dict())


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    main()
