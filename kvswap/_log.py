"""kvswap's log: Python's logging, logger "kvswap" and those below it."""

from __future__ import annotations

import logging
import threading
import time
import warnings

_LEVELS = ("debug", "info", "warning", "error", "critical")
_MOST, _SECONDS = 10, 60.0


class Limited(logging.Filter):
    """Lets through the first ten warnings and errors of a kind in a minute; the next one after it says how many were
    left out. A kind is what one call logs. Any thread may log."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, int], list[float]] = {}  # begin of the minute, let through, left out

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        if record.levelno < logging.WARNING:
            return True
        now = time.monotonic()
        with self._lock:
            kind = self._kinds.setdefault((record.pathname, record.lineno), [now, 0, 0])
            left_out = 0
            if now - kind[0] >= _SECONDS:
                left_out, kind[:] = int(kind[2]), [now, 0, 0]
            passes = kind[1] < _MOST
            kind[1 if passes else 2] += 1
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} more like this were left out)", None
        return passes


def logger(name: str) -> logging.Logger:
    """The logger of that name, limited."""
    found = logging.getLogger(name)
    if not any(isinstance(given, Limited) for given in found.filters):
        found.addFilter(Limited())
    return found


def to_stderr(level: str) -> None:
    """KVSWAP_LOG=info and the like, for programs that do not set up logging themselves. Another value is a warning."""
    if level.lower() not in _LEVELS:
        warnings.warn(f"KVSWAP_LOG is {level!r}; it is one of {', '.join(_LEVELS)}. Nothing is logged", stacklevel=2)
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s [%(process)d] %(name)s: %(message)s"))
    ours = logging.getLogger("kvswap")
    ours.addHandler(handler)
    ours.setLevel(level.upper())


def into(name: str) -> None:
    """Log by the handlers and the level of another program's logger, unless this program has set up kvswap's."""
    ours = logging.getLogger("kvswap")
    if not ours.handlers and ours.level == logging.NOTSET:
        ours.parent = logging.getLogger(name)
