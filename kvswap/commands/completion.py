"""`kvswap completion SHELL`: the script that completes the command's arguments in a shell."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from typing import Any

from kvswap.replay.errors import UsageError

from .parser import EXIT_OK, Commands, Parser

_INSTALL = """\
where the script goes:
  bash  ~/.local/share/bash-completion/completions/kvswap
  zsh   ~/.zfunc/_kvswap (or another folder of $fpath)
  fish  ~/.config/fish/completions/kvswap.fish"""


def add(commands: Commands[Parser]) -> None:
    parser = commands.add_parser(
        "completion",
        help="print the script that completes kvswap's arguments in a shell",
        description="Prints a script for the shell (needs shtab: pip install 'kvswap[cli]').",
        epilog=_INSTALL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from kvswap.cli import build_parser

    try:
        shtab = importlib.import_module("shtab")
    except ImportError:
        raise UsageError("kvswap completion needs shtab: pip install 'kvswap[cli]'") from None
    parser = build_parser()
    _mark_files(parser, {"TRACE": shtab.FILE, "FILE": shtab.FILE, "DIR": shtab.DIRECTORY})
    print(shtab.complete(parser, args.shell))
    return EXIT_OK


def _mark_files(parser: argparse.ArgumentParser, kinds: Mapping[str, Any]) -> None:
    """Tells shtab which arguments are names of files."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for own in action.choices.values():
                _mark_files(own, kinds)
        elif action.metavar in kinds:
            action.complete = kinds[str(action.metavar)]  # type: ignore[attr-defined]
