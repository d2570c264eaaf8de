"""The transfer manager's modes "posix" and "gds": blocks in files."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvswap import _C
from kvswap.files import FileStore, FileTransfer, Layout, read_block_files

_CAPACITY = 64 << 30
_WAIT = 60.0  # seconds


class ManagerFiles:
    """The stores of a manager, one for each directory, opened at first use, and their running transfers.

    A block is the bytes of all pools, under the key block_{id}. If a directory has block_{id}_pool_{i}.bin files
    (TensorRT-LLM's) and not the key, a load reads the block from them.
    """

    def __init__(
        self, device: _C.Device, pool_nbytes: Sequence[int], shape: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        self._device, self._pool_nbytes = device, list(pool_nbytes)
        self._layout = Layout(sum(pool_nbytes), use="KVCacheTransferManager", **shape)
        self._options = {"capacity": _CAPACITY, **options}
        self._gds = {"posix": "off", "gds": self._options.pop("gds", "auto")}  # FileStore's gds= for each mode
        self._lock = threading.Lock()
        self._stores: dict[str, tuple[FileStore, str]] = {}  # guarded by _lock; store and the mode of its opening
        self._under_way: list[tuple[FileTransfer, frozenset[int]]] = []  # guarded by _lock; with their primary blocks

    def store_of(self, directory: str | None, mode: str) -> FileStore:
        """The directory's store. If the mode changes, the store is reopened after its transfers have ended."""
        if not directory:
            raise ValueError("directory is needed: modes 'posix' and 'gds' keep blocks in files there")
        path = os.path.abspath(directory)
        with self._lock:
            store, opened_for = self._stores.get(path, (None, ""))
            if store is not None and opened_for == mode:
                return store
            if mode == "gds":  # before closing the other mode's store
                self._check_gds(*_C._file_gds(self._gds[mode] == "compat"))
            if store is not None:
                store.close(_WAIT)
                del self._stores[path]
            store = FileStore(path, self._layout, device=self._device, gds=self._gds[mode], **self._options)
            if mode == "gds" and store.info["gds"] == "off":
                store.close()
                self._check_gds(False, store.info["gds_note"])
            self._stores[path] = store, mode
            return store

    def _check_gds(self, usable: bool, why: str) -> None:
        if not usable:
            raise _C.Error(f"mode 'gds' cannot be used: {why}; mode 'posix' moves the same blocks through host memory")

    def offload(self, directory: str | None, mode: str, pools: Any, slots: Any, ids: Any, after: Any) -> FileTransfer:
        store = self.store_of(directory, mode)
        return self._began(store.store(_keys(ids), pools, slots, after=after), slots)

    def onboard(self, directory: str | None, mode: str, pools: Any, slots: Any, ids: Any, after: Any) -> FileTransfer:
        store = self.store_of(directory, mode)
        assert directory is not None
        self._take_in(store, directory, ids)
        return self._began(store.load(_keys(ids), pools, slots, after=after), slots)

    def _take_in(self, store: FileStore, directory: str, ids: Any) -> None:
        """Store blocks that only TensorRT-LLM's files hold; the following load reads them after that."""
        keys = _keys(ids)
        for key, number, there in zip(keys, ids, store.contains(keys), strict=True):
            block = None if there else read_block_files(directory, int(number), self._pool_nbytes)
            if block is not None:
                store.store([key], [np.ascontiguousarray(block)], replace=False)

    def _began(self, transfer: FileTransfer, slots: Any) -> FileTransfer:
        with self._lock:
            self._under_way = [pair for pair in self._under_way if not pair[0].done()]
            self._under_way.append((transfer, frozenset(int(slot) for slot in slots)))
        return transfer

    def wait_for(self, slots: Any | None, timeout: float | None = _WAIT) -> None:
        """Wait until no file transfer uses these primary blocks (None: any). Ignores the transfers' failures."""
        with self._lock:
            self._under_way = [pair for pair in self._under_way if not pair[0].done()]
            wanted = list(self._under_way)
        if not wanted:
            return
        used = None if slots is None else frozenset(int(slot) for slot in slots)
        end = None if timeout is None else time.monotonic() + timeout
        for transfer, blocks in wanted:
            if used is not None and not used & blocks:
                continue
            try:
                transfer.wait(None if end is None else max(0.0, end - time.monotonic()))
            except TimeoutError:
                raise
            except _C.Error:
                pass  # the transfer reports it

    def close(self, timeout: float | None) -> None:
        with self._lock:
            stores, self._stores = list(self._stores.values()), {}
        for store, _ in stores:
            store.close(timeout)


def _keys(ids: Any) -> list[bytes]:
    return [b"block_%d" % int(number) for number in ids]
