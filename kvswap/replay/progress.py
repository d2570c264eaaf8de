"""How far the work is, in one line on a terminal: by rich where it is installed, else plain. Nothing in a pipe."""

from __future__ import annotations

import importlib
import os
import shutil
import time
from typing import TYPE_CHECKING, Any, TextIO

from .units import format_size

if TYPE_CHECKING:
    from .report import Report

_INTERVAL = 0.1
_BAR = 24
_FIRST_ESTIMATE = 1.0  # seconds of work, before which what is left is a guess


def is_terminal(stream: TextIO) -> bool:
    """A terminal whose cursor can be moved: not a pipe, nor a terminal that calls itself dumb."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


class Progress:
    """The line. Each call may draw it; it is drawn ten times a second at most."""

    def __init__(self, stream: TextIO, *, enabled: bool | None = None) -> None:
        self._stream = stream
        self._enabled = is_terminal(stream) if enabled is None else enabled
        self._next = 0.0
        self._line: _Plain | _Rich | None = None
        self._eta = Eta()

    def __call__(self, done: int, total: int, what: str) -> None:
        """Any work: so many of so many steps are done, and the next is called `what`."""
        if self._due():
            self._draw(done, total, f"{done:,}/{total:,}", what)

    def update(self, report: Report, total: int) -> None:
        """A replay."""
        if self._due():
            self._draw(report.requests, total, f"{report.requests:,}/{total:,}", progress_text(report))

    def memory(self, done: int, total: int) -> None:
        """Bytes of host memory that are ready: progress= of a host pool."""
        if self._due():
            self._draw(done, total, f"{format_size(done)} of {format_size(total)} of host memory")

    def _due(self) -> bool:
        now = time.monotonic()
        if not self._enabled or now < self._next:
            return False
        self._next = now + _INTERVAL
        return True

    def _draw(self, done: int, total: int, count: str, text: str = "") -> None:
        if self._line is None:
            self._line = _line(self._stream)
        left = self._eta.left(done, total, time.monotonic())
        self._line.draw(done, total, "  ".join(part for part in (count, left, text) if part))

    def clear(self) -> None:
        """Leave the line empty for what is printed next."""
        if self._line is not None:
            self._line.clear()


class Eta:
    """The time that is left, from the steps so far. Work with another total, or that goes back, begins anew."""

    def __init__(self) -> None:
        self._total = self._first = self._last = -1
        self._begin = 0.0

    def left(self, done: int, total: int, now: float) -> str:
        """Such as "1:05 left"; nothing while it cannot be known."""
        if total != self._total or done < self._last:
            self._total, self._first, self._begin = total, done, now
        self._last = done
        took, steps = now - self._begin, done - self._first
        if steps <= 0 or took < _FIRST_ESTIMATE or done >= total:
            return ""
        seconds = round(took * (total - done) / steps)
        hours, minutes = divmod(seconds // 60, 60)
        return f"{hours}:{minutes:02}:{seconds % 60:02} left" if hours else f"{minutes}:{seconds % 60:02} left"


def progress_text(report: Report) -> str:
    return (
        f"in {format_size(report.loads.nbytes)}  out {format_size(report.stores.nbytes)}  "
        f"verified {report.verified_where_used:,}  wrong {report.wrong_bytes}"
    )


class _Plain:
    def __init__(self, stream: TextIO) -> None:
        self._stream, self._drawn = stream, False

    def draw(self, done: int, total: int, text: str) -> None:
        bar = ("#" * round(done / total * _BAR if total else _BAR)).ljust(_BAR, ".")
        line = f"[{bar}] {text}"[: max(1, shutil.get_terminal_size().columns - 1)]
        self._drawn = True
        self._stream.write(f"\r{line}\x1b[K")
        self._stream.flush()

    def clear(self) -> None:
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._drawn = False


class _Rich:
    """A bar of rich. clear() takes it away; the next draw() shows it again."""

    def __init__(self, stream: TextIO, progress: Any, console: Any, table: Any) -> None:
        column = table.Column(no_wrap=True, overflow="ellipsis")
        self._bar = progress.Progress(
            progress.BarColumn(bar_width=_BAR),
            progress.TextColumn("{task.description}", markup=False, table_column=column),
            console=console.Console(file=stream, force_terminal=True),
            transient=True,
            auto_refresh=False,  # no thread
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", total=None)
        self._drawn = False

    def draw(self, done: int, total: int, text: str) -> None:
        self._bar.update(self._task, completed=done, total=max(1, total), description=text, refresh=self._drawn)
        if not self._drawn:
            self._bar.start()  # which draws it
            self._drawn = True

    def clear(self) -> None:
        if self._drawn:
            self._bar.stop()
            self._drawn = False


def _line(stream: TextIO) -> _Plain | _Rich:
    try:
        return _Rich(stream, *(importlib.import_module(f"rich.{name}") for name in ("progress", "console", "table")))
    except ImportError:
        return _Plain(stream)
