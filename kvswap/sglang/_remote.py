"""The same backend over kvswap.remote: pages of SGLang's host pools in the memory of other nodes, by Mooncake Store.

    {"backend_name": "kvswap", "module_path": "kvswap.sglang", "class_name": "RemoteStorage", "interface_v1": 1,
     "master": "10.0.0.1:50051"}

A page of two equal pieces, or of one, goes from and to SGLang's host memory, a block a piece. SGLang's storage threads
may wait, and do so at most as long as RemoteStore's limit says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvswap import _options
from kvswap._log import logger
from kvswap.sglang._pages import Pages, PageStore
from kvswap.sglang._storage import FileStorage

if TYPE_CHECKING:
    from kvswap.remote import RemoteStore, RemoteTransfer

_log = logger("kvswap.sglang")


class _Nodes:
    """SharedFiles' calls over a RemoteStore."""

    def __init__(self, store: RemoteStore, may_write: bool) -> None:
        self._store, self._may_write = store, may_write

    def find(self, keys: list[bytes]) -> list[bool]:
        return self._store.contains(keys) if keys else []

    def touch(self, keys: list[bytes]) -> None:
        """Nothing: Mooncake counts as used what is looked up and read."""

    def load(self, keys: list[bytes], blocks: Any, parts: list[int] | None = None) -> RemoteTransfer:
        return self._store.load(keys, blocks)

    def store(self, keys: list[bytes], blocks: Any, parts: list[int] | None = None) -> RemoteTransfer | None:
        return self._store.store(keys, blocks) if self._may_write else None

    def clear(self) -> None:
        self._store.clear()

    def close(self) -> None:
        self._store.close()


class RemoteStorage(FileStorage):
    """A storage backend of SGLang's HiCache: pages of its host pools on nodes of Mooncake Store.

    In --hicache-storage-backend-extra-config, beside SGLang's own keys ("interface_v1": 1 is needed):

    master: HOST:PORT of mooncake_master. The other options are those of kvswap.remote.RemoteStore.
    """

    _known = _options.REMOTE_STORAGE
    takes_coded_pages = False  # the nodes do not look whether a page fits

    def _open_store(self, name: str, pages: Pages, total: int) -> PageStore:
        from kvswap.remote import RemoteStore

        if not pages.in_place:
            raise ValueError(
                f"pages of host pool {name} have {len(pages.sizes)} pieces: RemoteStorage takes pages of one piece, or "
                "of two of equal size, as in SGLang's page_first layouts"
            )
        store = RemoteStore(layout=pages.layout, **self._options)
        _log.info("pages of %s: %s", name, store)
        return _Nodes(store, self._may_write(name))

    def _engines_share(self) -> bool:
        return True
