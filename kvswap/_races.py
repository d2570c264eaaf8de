"""Races as text, and in the log with KVSWAP_RACECHECK=1.

A race is what kvswap._C._racecheck_take() gives: (pool, slot, first, second), a accessor being (write, transfer, lane,
sequence, what, stream, where).
"""

import logging
from typing import Any

from kvswap import _C

Accessor = tuple[bool, int, int, int, str, str, str]
Race = tuple[str, int, Accessor, Accessor]


def describe_accessor(accessor: Accessor | tuple[Any, ...]) -> str:
    """'D2H by dma (transfer 12, lane 3 #4, cuda:0 stream 0x55, engine.py:12 in step) reads'."""
    write, transfer, lane, sequence, what, stream, where = accessor
    known = [f"transfer {transfer}", f"lane {lane} #{sequence}"] if transfer else []
    known += [text for text in (stream, where) if text]
    details = f" ({', '.join(known)})" if known else ""
    return f"{what or 'an access'}{details} {'writes' if write else 'reads'}"


def describe(race: Race | tuple[Any, ...]) -> str:
    """One line that names the block and both accesses."""
    pool, slot, first, second = race
    if not pool:  # how the core says it
        return "the race checker has run out of memory: races may go unnoticed"
    accessors = f"{describe_accessor(first)}, and {describe_accessor(second)}"
    return f"race on slot {slot} of pool {pool!r}: {accessors}, with no order between them"


_logged: set[tuple[str, ...]] = set()


def log_races() -> None:
    """Take the new races and log them as errors: for _C._set_race_hook().

    A pair of lines that race again and again is logged once.
    """
    logger = logging.getLogger("kvswap")
    for race in _C._racecheck_take():
        pool, _, first, second = race
        lines = (pool, first[4], first[6], second[4], second[6])
        if lines not in _logged and len(_logged) < 1000:
            _logged.add(lines)
            logger.error("%s", describe(race))
