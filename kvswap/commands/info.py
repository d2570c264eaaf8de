"""`kvswap info`: versions, devices, and each path on them: on, or why not."""

from __future__ import annotations

import argparse

from .output import document, for_person
from .parser import EXIT_OK, Commands, Parser, add_json

_HANG = 9  # where the values of the text begin


def add(commands: Commands[Parser]) -> None:
    parser = commands.add_parser("info", help="versions, devices, and which paths work on them or why not")
    parser.add_argument("--open", action="store_true", help="open the devices too (makes a CUDA context on each)")
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from kvswap import info

    with document(args, "info") as out:
        found = info.collect(open_devices=args.open)
        for_person(args).text(found.to_text(), hang=_HANG)
        out.write(found.to_dict())
    return EXIT_OK
