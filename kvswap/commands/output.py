"""What the command writes: text for a person, by rich on a terminal and plain elsewhere, and JSON for a script.

Text is the same with rich and without, but for colour. On a terminal long lines are wrapped; in a pipe they are not, so
that a script finds a line where it looks for one.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from kvswap.replay.errors import check_writable
from kvswap.replay.progress import is_terminal

_LEAST_WIDTH = 40  # narrower lines are for the terminal to wrap
# What rich highlights; a group's name is a key of _STYLES.
_STYLES = {"good": "green", "bad": "bold red", "note": "yellow"}
_PATTERNS = (
    r"(?P<good>\b0 wrong bytes\b|\bon\b(?=$|:)|\bmet\b)",
    r"(?P<bad>WRONG BYTES|\bFAILED\b|\bdoes not open\b|\b[1-9][0-9,]* (?:wrong bytes|damaged)\b)",
    r"(?P<note>\boff(?=:)|\bnot measured\b|\bSCALED\b|\bTRUNCATED\b|\bNO GAIN\b|\bmissed\b)",
)


class Output:
    """Writes lines for a person to one stream. A call of it writes a line.

    width: columns of a terminal; None in a pipe.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.width = max(_LEAST_WIDTH, shutil.get_terminal_size().columns) if stream.isatty() else None
        self._console = _console(stream) if is_terminal(stream) else None

    def __call__(self, line: str = "", *, hang: int = 0) -> None:
        """One line. hang: where its value begins after a name, and its continuations on a terminal."""
        self._write(line, hang, "bold" if line[:hang].strip() and line[hang - 1 : hang] == " " else "", hang)

    def header(self, line: str) -> None:
        self._write(line, 0, "bold", len(line))

    def text(self, lines: str, *, hang: int = 0) -> None:
        for line in lines.split("\n"):
            self(line, hang=hang)

    def _write(self, line: str, hang: int, style: str, styled: int) -> None:
        """style: of the first `styled` columns."""
        if self.width is not None and len(line) > self.width:
            line = textwrap.fill(line, self.width, subsequent_indent=" " * hang, break_on_hyphens=False)
        if self._console is None:
            print(line, file=self._stream, flush=True)
            return
        text = importlib.import_module("rich.text").Text(line)
        for pattern in _PATTERNS:
            for match in re.finditer(pattern, line):
                text.stylize(_STYLES[str(match.lastgroup)], *match.span())
        if style:
            text.stylize(style, 0, styled)
        self._console.print(text, soft_wrap=True)
        self._stream.flush()


def _console(stream: TextIO) -> Any:
    """rich's console; None where rich is not installed."""
    try:
        return importlib.import_module("rich.console").Console(file=stream, highlight=False, markup=False)
    except ImportError:
        return None


def for_person(args: Any) -> Output:
    """Where a subcommand's text goes: to the standard output, unless its document does."""
    return Output(sys.stderr if args.json == "-" else sys.stdout)


# -- documents --------------------------------------------------------------------------------------------------------


class Document:
    """Where a subcommand's JSON document goes: nowhere, to the standard output or to a file."""

    def __init__(self, command: str, name: str | None) -> None:
        self._command, self._name = command, name

    def write(self, found: Mapping[str, Any]) -> None:
        """The document: `found` after the command's name and version."""
        from kvswap import _C

        if self._name is None:
            return
        document = {"command": self._command, "kvswap": _C.__version__, **found}
        text = json.dumps(document, indent=2, default=_plain) + "\n"
        if self._name == "-":
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            Path(self._name).write_text(text, encoding="utf-8")


def _plain(value: object) -> object:
    """UUIDs and keys come as bytes."""
    return value.hex() if isinstance(value, bytes) else str(value)


@contextlib.contextmanager
def document(args: Any, command: str) -> Iterator[Document]:
    """The document of a subcommand with --json. A file that cannot be written is refused before anything runs.

    A file that was not there before is removed if nothing was written to it.
    """
    name = args.json
    if name is None or name == "-":
        yield Document(command, name)
        return
    path = Path(name)
    existed = path.exists()
    check_writable("--json", name)
    path.touch()
    try:
        yield Document(command, name)
    finally:
        if not existed and path.stat().st_size == 0:
            path.unlink(missing_ok=True)
