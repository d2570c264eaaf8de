"""A third tier on other nodes, in the place of the one in files: the same calls, over kvswap.remote.

Blocks go from the host tier to the nodes, and come back through host memory to the GPU. The tier's book-keeping
(tiers.py) decides which blocks are there: the nodes must have room for more, and a block that is missing is an error.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvswap import _C
from kvswap.files import Layout

from .errors import UsageError
from .file_tier import keys_of
from .memory import GroupMemory, TierMemory, Words
from .settings import Settings
from .tiers import Slots

if TYPE_CHECKING:
    from kvswap.remote import RemoteStore

_AT_ONCE = 256  # blocks of the memory through which they come back
_H2D = 1
_PATIENCE = 10.0  # seconds until all nodes must be up


class Moved:
    """Work that wait() does, in the place of a FileTransfer."""

    def __init__(self, nbytes: int, work: Callable[[float], None]) -> None:
        self.nbytes = nbytes
        self.elapsed: float | None = None
        self._work = work

    def wait(self, timeout: float) -> None:
        begin = time.monotonic()
        self._work(timeout)
        self.elapsed = time.monotonic() - begin


class RemoteTier:
    """The store, and where its blocks are in memory."""

    def __init__(self, device: _C.Device, memory: TierMemory, settings: Settings) -> None:
        assert settings.remote is not None
        if len(memory.groups) != 1:
            raise UsageError("--remote is for models with one group of layers: a node has blocks of one size")
        self._device, self._settings = device, settings
        self._group: GroupMemory = memory.groups[0]
        nbytes = self._group.group.block_nbytes
        self._pool = _C.HostPool(min(_AT_ONCE, settings.sizes.gpu_blocks), nbytes, device=device)
        try:
            self._store = _open(settings, nbytes)
        except BaseException:
            self._pool.close()
            raise

    def store(self, hashes: Words, host_slots: Slots, after: Sequence[Any]) -> list[Moved]:
        """Store from host memory, after these transfers."""
        addresses = self._group.host_addresses(host_slots)[0]

        def work(timeout: float) -> None:
            for transfer in after:
                transfer.wait(timeout)
            self._store.store(keys_of(hashes), addresses, replace=False).wait(timeout)

        return [Moved(addresses.size * self._pool.slot_nbytes, work)]

    def load(self, hashes: Words, gpu_slots: Slots, after: Sequence[Any]) -> list[Moved]:
        """Through host memory; the copies to the GPU start after the compute stream and `after`."""

        def work(timeout: float) -> None:
            for begin in range(0, len(hashes), self._pool.num_blocks):
                some = slice(begin, begin + self._pool.num_blocks)
                ids = np.arange(len(hashes[some]))
                self._store.load(keys_of(hashes[some]), self._pool, ids).wait(timeout)
                self._to_gpu(gpu_slots[some], ids, after, timeout)

        return [Moved(len(hashes) * self._pool.slot_nbytes, work)]

    def _to_gpu(self, slots: Slots, ids: Slots, after: Sequence[Any], timeout: float) -> None:
        group, sizes = self._group, self._settings.sizes
        offsets = np.arange(len(group.gpu), dtype=np.uint64) * np.uint64(group.group.layer_nbytes)
        _C.swap_cache_all_layers_async(
            group.gpu_ptrs,
            np.uint64(self._pool.ptr) + offsets,
            group.group.layer_nbytes,
            sizes.gpu_blocks,
            self._pool.num_blocks,
            group.gpu_ids[slots],
            ids,
            _H2D,
            cpu_stride=group.group.block_nbytes,
            after=after,
            device=self._device,
            path=self._settings.path,
        ).wait(timeout)

    def drop(self, hashes: Words) -> list[Moved]:
        return [Moved(0, lambda timeout: self._store.delete(keys_of(hashes)).wait(timeout))]

    def describe(self) -> str:
        nodes = self._store.stats()["nodes"]
        return f"{len(nodes)} nodes, a replica each" if self._store.replicas == 1 else f"{len(nodes)} nodes"

    def close(self) -> None:
        self._store.close()
        self._pool.close()


def _open(settings: Settings, nbytes: int) -> RemoteStore:
    """Keys of another run are of another layout, so that no block of it is found."""
    from kvswap.remote import RemoteStore

    assert settings.remote is not None
    nodes, key = settings.remote
    store = RemoteStore(nodes, Layout(nbytes, use="kvswap replay", run=secrets.token_hex(8)), key=key)
    if store.wait_nodes(timeout=_PATIENCE) < len(store.stats()["nodes"]):
        found = store.stats()["nodes"]
        store.close(0)
        down = ", ".join(f"{name}: {why}" for name, why in found.items() if why != "up")
        raise _C.Error(f"a node of {nodes} is not up (blocks of {nbytes:,} bytes): {down}")
    return store
