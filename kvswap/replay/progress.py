"""One line on a terminal that shows how far the work is; nothing in a pipe."""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING, TextIO

from .units import format_size

if TYPE_CHECKING:
    from .report import Report

_INTERVAL = 0.1
_BAR = 24


def is_terminal(stream: TextIO) -> bool:
    """A terminal whose cursor can be moved: not a pipe, nor a terminal that calls itself dumb."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


class Progress:
    """The line. Each call may draw it; it is drawn ten times a second at most."""

    def __init__(self, stream: TextIO, *, enabled: bool | None = None) -> None:
        self._stream = stream
        self._enabled = is_terminal(stream) if enabled is None else enabled
        self._next = 0.0
        self._drawn = False

    def __call__(self, done: int, total: int, what: str) -> None:
        """Any work: so many of so many steps are done, and the next is called `what`."""
        if self._due():
            self._draw(f"[{_bar(done, total)}] {done:,}/{total:,}  {what}")

    def update(self, report: Report, total: int) -> None:
        """A replay."""
        if self._due():
            self._draw(progress_line(report, total))

    def memory(self, done: int, total: int) -> None:
        """Bytes of host memory that are ready: progress= of a host pool."""
        if self._due():
            self._draw(f"[{_bar(done, total)}] {format_size(done)} of {format_size(total)} of host memory")

    def _due(self) -> bool:
        now = time.monotonic()
        if not self._enabled or now < self._next:
            return False
        self._next = now + _INTERVAL
        return True

    def _draw(self, text: str) -> None:
        line = text[: max(1, shutil.get_terminal_size().columns - 1)]
        self._drawn = True
        self._stream.write(f"\r{line}\x1b[K")
        self._stream.flush()

    def clear(self) -> None:
        """Leave the line empty for what is printed next."""
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._drawn = False


def _bar(done: int, total: int) -> str:
    return ("#" * round(done / total * _BAR if total else _BAR)).ljust(_BAR, ".")


def progress_line(report: Report, total: int) -> str:
    return (
        f"[{_bar(report.requests, total)}] {report.requests:,}/{total:,}  in {format_size(report.loads.nbytes)}  "
        f"out {format_size(report.stores.nbytes)}  verified {report.verified_where_used:,}  wrong {report.wrong_bytes}"
    )
