"""The open remote stores of this process, for kvswap.metrics. Imports nothing of the remote tier."""

from __future__ import annotations

import weakref
from typing import Any

NAMES = ("stored", "loaded", "deleted", "missed", "changed", "failed", "refused_full")
_stores: weakref.WeakSet[Any] = weakref.WeakSet()


def new() -> dict[str, int]:
    return dict.fromkeys(NAMES, 0)


def add(store: Any) -> None:
    _stores.add(store)


def remove(store: Any) -> None:
    _stores.discard(store)


def stores() -> list[Any]:
    return list(_stores)


def rows() -> list[dict[str, Any]]:
    """A row a store."""
    return [{"block_bytes": store.layout.block_nbytes, **store.stats()} for store in stores()]
