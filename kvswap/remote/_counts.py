"""The open remote stores of this process, for kvswap.metrics. Imports nothing of the remote tier."""

from __future__ import annotations

import os
import weakref
from typing import Any

NAMES = (
    "stored", "loaded", "deleted", "missed", "failed", "late", "no_room",
    "no_header", "other_identity", "other_key", "other_length", "wrong_bytes", "wrong_mac", "cleared", "refused_full",
)  # fmt: skip
_stores: weakref.WeakSet[Any] = weakref.WeakSet()


def new() -> dict[str, int]:
    return dict.fromkeys(NAMES, 0)


def add(store: Any) -> None:
    _stores.add(store)


def remove(store: Any) -> None:
    _stores.discard(store)


def stores() -> list[Any]:
    """Those of this process: what the parent of a fork() opened is not counted, and its locks are not taken."""
    return [store for store in list(_stores) if store.pid == os.getpid()]


def rows() -> list[dict[str, Any]]:
    """A row a store."""
    return [{"block_bytes": store.layout.block_nbytes, **store.stats()} for store in stores()]
