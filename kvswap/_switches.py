"""Switches in the environment: variables that are 1 or 0."""

from __future__ import annotations

import os

_warned: set[str] = set()


def switch(name: str, otherwise: str = "It counts as not set", log: str = "kvswap") -> bool | None:
    """Whether the variable is 1. None: it is not set, empty, or has a value other than 0 and 1. The first time in a
    process that it has such a value, a warning says so.

    otherwise: the end of the warning, the effect of such a value. log: the warning's logger.
    """
    value = os.environ.get(name, "")
    if value in ("0", "1"):
        return value == "1"
    if value and name not in _warned:
        from kvswap._log import logger

        _warned.add(name)
        logger(log).warning("%s is %r; it is 0 or 1. %s", name, value, otherwise)
    return None
