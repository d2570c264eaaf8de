"""The third tier: blocks that leave host memory go to files, and come back to the GPU. One store a group of layers.

The tier's book-keeping (tiers.py) decides which blocks are here. The stores have room for more blocks, so that a store
evicts none; a block that is not there is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvswap import _C
from kvswap.files import FileStore, FileTransfer, Layout

from .errors import UsageError
from .memory import GroupMemory, TierMemory, Words
from .settings import Settings
from .tiers import Slots

_PAGE = 4096
_SPARE = 1.25  # more slots than blocks: room for blocks that are being written
_SEGMENT_NBYTES = 64 << 20


class FileTier:
    """The stores, and where their blocks are in memory."""

    def __init__(self, device: _C.Device, memory: TierMemory, settings: Settings) -> None:
        self._stores: list[tuple[FileStore, GroupMemory]] = []
        try:
            for group in memory.groups:
                store = _open(group, device, settings, alone=len(memory.groups) == 1)
                self._stores.append((store, group))
                store.delete(store.keys()).wait(settings.wait_limit)  # of an earlier run
        except BaseException:
            self.close()
            raise

    def store(self, hashes: Words, host_slots: Slots, after: Sequence[Any]) -> list[FileTransfer]:
        """Store from host memory. Few transfers are unfinished, so that the queue is never full."""
        return [
            store.store(keys_of(hashes), group.host_addresses(host_slots)[0], after=after, replace=False)
            for store, group in self._stores
        ]

    def load(self, hashes: Words, gpu_slots: Slots, after: Sequence[Any]) -> list[FileTransfer]:
        return [
            store.load(keys_of(hashes), list(group.gpu_pools), group.gpu_ids[gpu_slots], after=after)
            for store, group in self._stores
        ]

    def drop(self, hashes: Words) -> list[FileTransfer]:
        return [store.delete(keys_of(hashes)) for store, _ in self._stores]

    def describe(self) -> str:
        info = self._stores[0][0].info
        how = "O_DIRECT" if info["direct"] else f"buffered: {info['direct_note']}"
        return f"{info['engine']}, {how}"

    def close(self) -> None:
        for store, _ in self._stores:
            store.close()
        self._stores.clear()


def _open(group: GroupMemory, device: _C.Device, settings: Settings, *, alone: bool) -> FileStore:
    """The group's store: in the directory itself if it is the only one, so that `kvswap files` finds it there."""
    assert settings.file_tier is not None
    folder = Path(settings.file_tier)
    if not alone:
        folder /= group.group.name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    codings = [] if group.coding is None else [group.coding] * len(group.group.layers)
    nbytes = len(group.group.layers) * group.host_nbytes
    slot = _PAGE + -(-nbytes // _PAGE) * _PAGE
    segment = max(_SEGMENT_NBYTES, 4 * slot)
    slots = int(settings.sizes.file_blocks * _SPARE) + 64
    layout = Layout(nbytes, coding=codings, use="kvswap replay", group=group.group.name, seed=settings.seed)
    capacity = (-(-slots // ((segment - _PAGE) // slot)) + 1) * segment
    try:
        return FileStore(folder, layout, capacity=capacity, segment_nbytes=segment, device=device)
    except ValueError as error:  # another seed, model or size of a block, or another program's store
        raise UsageError(f"--file-tier: {error}; name another folder, or empty it") from None


def keys_of(hashes: Words) -> Any:
    """A row of eight bytes a block."""
    return np.ascontiguousarray(hashes, dtype="<u8").view(np.uint8).reshape(len(hashes), 8)
