"""Timeouts of calls in Python, read as csrc/py/args.c reads those of calls in C."""

from __future__ import annotations

from typing import Any

_NO_LIMIT = 9e9  # seconds, 285 years: what is longer, infinity too, is no limit


def seconds(timeout: Any, name: str = "timeout") -> float | None:
    """A timeout in seconds; None: no limit. TypeError: it is no number. ValueError: negative or nan."""
    if timeout is None:
        return None
    number = hasattr(type(timeout), "__float__") or hasattr(type(timeout), "__index__")
    if isinstance(timeout, bool) or not number:
        raise TypeError(f"{name} must be a number of seconds or None, not {type(timeout).__name__}")
    try:
        value = float(timeout)
    except OverflowError:
        value = _NO_LIMIT if timeout > 0 else -1.0
    if not value >= 0:
        raise ValueError(f"{name} is {value:g}: must be 0 or more seconds")
    return value if value < _NO_LIMIT else None
