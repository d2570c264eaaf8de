"""All operations, and the drawing of one."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import itertools
from functools import lru_cache

from differential import children, coded, copies, hosts, pools, tiers  # noqa: F401  # they fill the table
from differential.frame import OPERATIONS, World


@lru_cache(maxsize=8)
def _table(alone: bool, only: tuple[str, ...]) -> tuple[list[str], list[float]]:
    entries = sorted(OPERATIONS.items())  # whatever was imported first
    names = [name for name, entry in entries if (alone or not entry.alone) and (not only or name in only)]
    return names, list(itertools.accumulate(OPERATIONS[name].weight for name in names))


def draw(world: World, only: tuple[str, ...] = ()) -> None:
    """Do one operation."""
    names, shares = _table(world.alone, only)
    name = world.rng.choices(names, cum_weights=shares)[0]
    world.totals.by_name[name] += 1
    OPERATIONS[name].do(world)
