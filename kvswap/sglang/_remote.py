"""The same backend over kvswap.remote: pages of SGLang's host pools in the memory of other nodes.

    {"backend_name": "kvswap", "module_path": "kvswap.sglang", "class_name": "RemoteStorage", "interface_v1": 1,
     "nodes": "/etc/kvswap/nodes", "key": "/etc/kvswap/client.key"}

A page of two equal pieces, or of one, goes from and to SGLang's host memory, a block a piece; each node serves blocks
of one size. SGLang's storage threads may wait, and do so for a node at most as long as RemoteStore does.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvswap import _options
from kvswap._log import logger
from kvswap.sglang._pages import Pages, PageStore, wait
from kvswap.sglang._storage import FileStorage

if TYPE_CHECKING:
    from kvswap.remote import RemoteStore, RemoteTransfer

_log = logger("kvswap.sglang")
_NODES = _options.path("nodes", "the list of nodes")


def _take_nodes(value: Any) -> Any:
    """One list for all host pools, or one a pool."""
    return {name: _NODES.take(each) for name, each in value.items()} if isinstance(value, dict) else _NODES.take(value)


_MOST_KEYS = 1 << 20  # that clear() can delete


class _Nodes:
    """SharedFiles' calls over a RemoteStore."""

    def __init__(self, store: RemoteStore, may_write: bool) -> None:
        self._store, self._may_write = store, may_write
        self._lock = threading.Lock()
        self._stored: dict[bytes, None] = {}  # guarded by _lock; the oldest first

    def find(self, keys: list[bytes]) -> list[bool]:
        return self._store.contains(keys) if keys else []

    def touch(self, keys: list[bytes]) -> None:
        """Nothing: a node counts as used what is read from it."""

    def load(self, keys: list[bytes], blocks: Any, parts: list[int] | None = None) -> RemoteTransfer:
        return self._store.load(keys, blocks)

    def store(self, keys: list[bytes], blocks: Any, parts: list[int] | None = None) -> RemoteTransfer | None:
        if not self._may_write:
            return None
        with self._lock:
            self._stored.update(dict.fromkeys(keys))
            while len(self._stored) > _MOST_KEYS:
                del self._stored[next(iter(self._stored))]
        return self._store.store(keys, blocks, replace=False)

    def clear(self) -> None:
        """Delete what this process stored: nodes do not list theirs."""
        with self._lock:
            keys, self._stored = list(self._stored), {}
        if not keys:
            return
        transfer = self._store.delete(keys)
        wait(transfer, "deleting", "nodes")
        if transfer.error is not None:
            failed = len(transfer.failed_blocks)
            _log.warning("deleting: %d of %d blocks failed: %s", failed, transfer.num_blocks, transfer.error)

    def close(self) -> None:
        self._store.close(5.0)


class RemoteStorage(FileStorage):
    """A storage backend of SGLang's HiCache: pages of its host pools on nodes (kvswap remote serve).

    In --hicache-storage-backend-extra-config, beside SGLang's own keys ("interface_v1": 1 is needed):

    nodes: path of the list of nodes; or, for models with several host pools, {pool name: path}, since each node serves
      blocks of one size, which the log names. key: path of this client's key pair.
    replicas, queue, timeout, staging_nbytes: as for kvswap.remote.RemoteStore.
    """

    _known = (*_options.REMOTE, replace(_NODES, allowed=f"{_NODES.allowed}; or {{pool: path}}", take=_take_nodes))

    def _open_store(self, name: str, pages: Pages, total: int) -> PageStore:
        from kvswap.remote import RemoteStore

        if not pages.in_place:
            raise ValueError(
                f"pages of host pool {name} have {len(pages.sizes)} pieces: RemoteStorage takes pages of one piece, or "
                "of two of equal size, as in SGLang's page_first layouts"
            )
        options = dict(self._options)
        nodes = options.pop("nodes")
        if isinstance(nodes, dict) and name not in nodes:
            raise ValueError(f'host pool {name} has no list of nodes: "nodes" has {", ".join(sorted(nodes))}')
        store = RemoteStore(nodes[name] if isinstance(nodes, dict) else nodes, pages.layout, **options)
        _log.info("pages of %s: %s; blocks of %d bytes", name, store, pages.layout.block_nbytes)
        return _Nodes(store, self._may_write(name))

    def _engines_share(self) -> bool:
        return True
