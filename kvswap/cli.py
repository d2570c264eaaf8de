"""The kvswap command: the table of subcommands, and the exit status of each way in which one can end.

Results go to the standard output, everything else to the standard error. docs/configuration.md lists the statuses.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn

from kvswap.commands.parser import (
    EXIT_DEFECT,
    EXIT_DEVICE,
    EXIT_INTERRUPTED,
    EXIT_PIPE,
    EXIT_USAGE,
    EXIT_WRONG_BYTES,
    Parser,
    complain,
)
from kvswap.replay.errors import UsageError, of_system

# Modules with a function add(commands), in the order in which --help lists them.
COMMANDS = (
    "kvswap.commands.info",
    "kvswap.commands.doctor",
    "kvswap.commands.replay",
    "kvswap.commands.bench",
    "kvswap.commands.calibrate",
    "kvswap.commands.codec",
    "kvswap.commands.files",
    "kvswap.commands.remote",
    "kvswap.top",
    "kvswap.fastdeploy.manager.command",
    "kvswap.commands.completion",
)
_EPILOG = """\
exit status:
  0    done
  1    wrong or damaged bytes
  2    wrong usage or input
  3    a device, file, manager, memory or time limit failed
  70   a defect of kvswap, with a traceback
  130  interrupted
  141  the reader of the output has gone"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    try:
        with contextlib.suppress(AttributeError, ValueError):  # a file's name need not be text
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        status = _run(argv)
        sys.stdout.flush()
        return status
    except UsageError as error:
        return _fail(EXIT_USAGE, str(error))
    except KeyboardInterrupt:
        return _fail(EXIT_INTERRUPTED, "interrupted")
    except BrokenPipeError:
        _drop_output()
        return EXIT_PIPE
    except Exception as error:
        return _failed(error)


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = build_parser().parse_args(argv)
    except SystemExit as end:  # --help, --version, or wrong arguments, of which the parser has told
        return int(end.code or 0)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: complain(f"warning: {message}")
        status: int = args.run(args)
    return status


def _failed(error: Exception) -> int:
    """A failure that is documented is one line; anything else is a defect, with its traceback."""
    from kvswap import _C
    from kvswap.replay.check import WrongBytes

    if isinstance(error, WrongBytes):
        return _fail(EXIT_WRONG_BYTES, str(error))
    if isinstance(error, MemoryError):
        return _fail(EXIT_DEVICE, str(error) or "out of memory")
    if isinstance(error, OSError) and not isinstance(error, TimeoutError):
        _drop_output()  # it may be what failed
        return _fail(EXIT_DEVICE, of_system(error))
    if isinstance(error, (_C.Error, TimeoutError)):
        return _fail(EXIT_DEVICE, str(error) or "the time limit is over")
    traceback.print_exc()
    return _fail(EXIT_DEFECT, "this is a defect of kvswap; please report it with the lines above")


def _drop_output() -> None:
    """What is still to be written would fail once more at exit."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(status: int, message: str) -> int:
    with contextlib.suppress(OSError):  # without stderr the exit status still reports it
        complain(message)
    return status


def build_parser() -> Parser:
    parser = Parser(
        prog="kvswap",
        description="Moves paged KV-cache blocks between GPU memory, host memory and files.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action=_Version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in COMMANDS:
        importlib.import_module(module).add(commands)
    return parser


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from kvswap import _C

        print(f"kvswap {_C.__version__}")
        parser.exit()
