"""The argument parser of the command: suggestions, types of arguments, and the options that subcommands share."""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_args

from kvswap.replay.errors import UsageError
from kvswap.replay.units import parse_size, says_otherwise
from kvswap.typing import Path

from .output import Output

if TYPE_CHECKING:
    from kvswap import _C

__all__ = [
    "EXIT_DEFECT",
    "EXIT_DEVICE",
    "EXIT_INTERRUPTED",
    "EXIT_OK",
    "EXIT_PIPE",
    "EXIT_USAGE",
    "EXIT_WRONG_BYTES",
    "PATHS",
    "Commands",
    "Parser",
    "add_device",
    "add_json",
    "add_names",
    "add_plot",
    "complain",
    "count",
    "duration",
    "open_device",
    "positive",
    "size",
    "some_size",
    "suggestion",
]

EXIT_OK, EXIT_WRONG_BYTES, EXIT_USAGE, EXIT_DEVICE = 0, 1, 2, 3
EXIT_DEFECT, EXIT_INTERRUPTED, EXIT_PIPE = 70, 130, 141
PATHS: tuple[str, ...] = get_args(Path)

Commands = argparse._SubParsersAction
_Number = TypeVar("_Number", int, float)
_ALIKE = 0.7  # of difflib: below it a guess misleads, such as 61x36k for 12x3
_PLAIN = {  # what argparse says, and what it means
    "^the following arguments are required:": "missing:",
    "expected (at least )?one argument$": "needs a value",
    "invalid int value:": "not a whole number:",
    "invalid float value:": "not a number:",
}
_FEW = 8  # so many choices are listed beside a suggestion


def suggestion(word: str, known: Iterable[str]) -> str:
    """': did you mean X?', or nothing where no known word is like it."""
    close = difflib.get_close_matches(word, list(known), 1, _ALIKE)
    return f": did you mean {close[0]}?" if close else ""


def complain(message: str) -> None:
    """One line on stderr."""
    Output(sys.stderr)(f"kvswap: {message}", hang=8)


class Parser(argparse.ArgumentParser):
    """Says in one line what was wrong, and suggests what may have been meant."""

    def error(self, message: str) -> NoReturn:
        if message.endswith("required: COMMAND"):
            commands = next(action for action in self._actions if isinstance(action, argparse._SubParsersAction))
            message = f"COMMAND is missing: there are {', '.join(commands.choices)}"
        for theirs, ours in _PLAIN.items():
            message = re.sub(theirs, ours, message)
        complain(message)
        self.exit(EXIT_USAGE, f"Try '{self.prog} --help'.\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuses what is unknown here: the parser above does not know this one's options."""
        given = list(sys.argv[1:] if args is None else args)
        json = self._option_string_actions.get("--json")
        if json is not None and json.nargs == "?":
            given = _bare_json(given)
        found, unknown = super().parse_known_args(given, namespace)
        if unknown:
            word = unknown[0]
            options = [option for action in self._actions for option in action.option_strings]
            what = "option" if word.startswith("-") else "argument"
            hint = _like_option(word.partition("=")[0], options) if what == "option" else _after_json(word, given)
            self.error(f"unknown {what} {word}{hint}")
        return found, []

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse's own drops an error of the file, such as that of a full file system."""
        (file or sys.stderr).write(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            what = "command" if isinstance(action, argparse._SubParsersAction) else argparse._get_action_name(action)
            text = suggestion(str(value), names)
            if not text:
                text = f": there are {', '.join(names)}"
            elif len(names) <= _FEW:  # the nearest word may not be what was meant
                text += f" There are {', '.join(names)}"
            self.error(f"unknown {what} {value}{text}")


def _like_option(word: str, options: list[str]) -> str:
    """A suggestion; else the options that have the word in their name: --port is a part of --metrics_port."""
    text = suggestion(word, options)
    parts = [option for option in options if len(word) > 3 and word.lstrip("-") in option]
    return text or (f": did you mean {' or '.join(parts)}?" if parts else "")


def _bare_json(args: Sequence[str]) -> list[str]:
    """--json takes a file only as --json=FILE, so that it never takes the argument that follows it."""
    end = args.index("--") if "--" in args else len(args)
    return ["--json=-" if word == "--json" and at < end else word for at, word in enumerate(args)]


def _after_json(word: str, args: Sequence[str]) -> str:
    wanted = ("--json=-", word) in itertools.pairwise(args)
    return f": a file is named as --json={word}" if wanted else ""


# -- types of arguments -----------------------------------------------------------------------------------------------


def size(text: str) -> int:
    """Bytes. Where KB and KiB may be mixed up, says which was taken."""
    try:
        nbytes = parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    note = says_otherwise(text, nbytes)
    if note:
        complain(note)
    return nbytes


def some_size(text: str) -> int:
    nbytes = size(text)
    if nbytes == 0:
        raise argparse.ArgumentTypeError(f"not a size above 0: {text!r}")
    return nbytes


def _at_least(convert: Callable[[str], _Number], text: str, least: _Number, what: str) -> _Number:
    try:
        value = convert(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not {what}: {text!r}") from None
    if not least <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"not {what}: {text!r}")
    return value


def positive(text: str) -> int:
    return _at_least(int, text, 1, "a whole number above 0")


def count(text: str) -> int:
    return _at_least(int, text, 0, "a whole number, 0 or more")


def duration(text: str) -> float:
    return _at_least(float, text, 1e-9, "a number of seconds above 0")


# -- options that subcommands share -----------------------------------------------------------------------------------


def add_device(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--device", metavar="NAME", help="cuda:N or host:N (default: a GPU if there is one)")


def add_json(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="=FILE",
        help="print one JSON document, and the text to stderr; with =FILE, write the document there",
    )


def add_plot(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the result: a .png, .svg or .pdf (needs matplotlib: kvswap[plot])"
    )


def add_names(
    parser: argparse._ActionsContainer,
    option: str,
    choices: Iterable[str],
    what: str,
    *,
    convert: Callable[[str], str] = str,
) -> None:
    """An option that may be given several times, each time with one of these names."""
    names = list(choices)
    parser.add_argument(
        option,
        type=convert,
        choices=names,
        action="append",
        metavar="NAME",
        help=f"only these {what}: {', '.join(names)}",
    )


def open_device(name: str | None) -> _C.Device:
    """UsageError for a name that is no device's. A device that does not open raises what it raises."""
    from kvswap import _C

    try:
        return _C.Device(name)
    except (ValueError, IndexError) as error:
        raise UsageError(str(error)) from None
