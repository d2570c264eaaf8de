"""The host's cache as the scheduler's side keeps it: what it has, blocks taken out of it, blocks in random order."""

from __future__ import annotations

import random
from typing import Any, Protocol


class Host(Protocol):
    """Of one engine."""

    def capacity(self) -> int:
        """Blocks that it has room for."""

    def keys(self) -> set[Any]:
        """Of the blocks that it has."""

    def evict(self, keys: set[Any]) -> bool:
        """Take these blocks out, to be handed out next and by their numbers: what takes their place is as fragmented as
        they were. False: a copy still uses some of them, and all stay."""

    def scatter(self) -> int:
        """Empty it, and hand its blocks out in random order from now on. The number of them."""


def host_of(connector: Any) -> Host | None:
    """None: no connector, or one whose cache is not known here."""
    manager = getattr(getattr(connector, "connector_scheduler", None), "manager", None)
    if hasattr(manager, "_free_list") and hasattr(manager, "_policy"):
        return Managed(connector, manager)
    manager = getattr(connector, "scheduler_manager", None)
    return None if manager is None else Pooled(manager)


class Managed:
    """OffloadingConnector's. Its blocks are called chunks from 0.30 on."""

    def __init__(self, connector: Any, manager: Any) -> None:
        self._connector, self._manager = connector, manager
        self._word = "chunk" if hasattr(manager, "_num_chunks") else "block"

    def capacity(self) -> int:
        """See Host."""
        return int(getattr(self._manager, f"_num_{self._word}s"))

    def keys(self) -> set[Any]:
        """See Host."""
        return set(getattr(self._manager._policy, f"{self._word}s"))

    def evict(self, keys: set[Any]) -> bool:
        """See Host."""
        policy, word = self._manager._policy, self._word
        evictable = f"_num_evictable_cache_{word}s"
        found = {key: block for key in keys if (block := policy.get(key)) is not None}
        if any(block.ref_cnt for block in found.values()):
            return False
        for key, block in sorted(found.items(), key=lambda item: -getattr(item[1], f"{word}_id")):  # last, taken first
            policy.remove(key)
            getattr(self._manager, f"_free_{word}")(block)
            setattr(self._manager, evictable, getattr(self._manager, evictable) - 1)
        return True

    def scatter(self) -> int:
        """See Host."""
        self._connector.reset_cache()
        manager, count = self._manager, self.capacity()
        manager._free_list[:] = range(count)
        random.Random(0).shuffle(manager._free_list)
        setattr(manager, f"_num_allocated_{self._word}s", count)
        return count


class Pooled:
    """SimpleCPUOffloadConnector's: a pool of blocks as the GPU's cache has one."""

    def __init__(self, manager: Any) -> None:
        self._manager, self._pool = manager, manager.cpu_block_pool

    def capacity(self) -> int:
        """See Host."""
        return sum(not block.is_null for block in self._pool.blocks)

    def keys(self) -> set[Any]:
        """See Host."""
        return set(self._pool.cached_block_hash_to_block._cache)

    def evict(self, keys: set[Any]) -> bool:
        """See Host. At their old place in the queue, new blocks would push others out first."""
        blocks = (self._pool.cached_block_hash_to_block.get_one_block(key) for key in keys)
        found = sorted((block for block in blocks if block is not None), key=lambda block: block.block_id)
        if any(block.ref_cnt for block in found) or keys & self._being_stored():
            return False
        self._pool.evict_blocks({block.block_id for block in found})
        for block in found:
            self._pool.free_block_queue.remove(block)
        self._pool.free_block_queue.prepend_n(found)
        return True

    def _being_stored(self) -> set[Any]:
        """Keys that keys() has once their copies have ended."""
        jobs = self._manager._store_event_to_blocks.values()
        return {self._pool.blocks[block].block_hash for job in jobs for block in job.cpu_block_ids}

    def scatter(self) -> int:
        """See Host."""
        if not self._manager.reset():
            raise RuntimeError("the host's cache was not emptied: copies are under way")
        blocks = [block for block in self._pool.blocks if not block.is_null]
        random.Random(0).shuffle(blocks)
        self._pool.free_block_queue = type(self._pool.free_block_queue)(blocks)
        return len(blocks)
