"""SGLang's HiCacheStorage (sglang/srt/mem_cache/hicache_storage.py) over kvswap.files.

SGLang calls it from two threads of each rank's scheduler process, one for loads (prefetch) and one for stores (backup);
both may block. Pages are found only where all agrees that gives their bytes a meaning (kvswap.identity). Pages that all
tensor-parallel ranks have alike (MLA) are one store, which the rank writes that SGLang names; the others read it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from kvswap import _options
from kvswap._log import logger
from kvswap._shared_files import SharedFiles, is_one, shares
from kvswap.identity import Identity, Said
from kvswap.sglang._identity import identity_of, ranks_of
from kvswap.sglang._pages import Pages, PageStore

_log = logger("kvswap.sglang")
_KV = str(PoolName.KV)
_MOST_MOVES = 4096
_EXTRA = "the storage backend's extra config"


class FileStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang may be missing when types are checked
    """A storage backend of SGLang's HiCache: pages of its host pools in files.

    In --hicache-storage-backend-extra-config, beside SGLang's own keys ("interface_v1": 1 is needed):

    directory: parent of the stores; each identity of pages (kvswap.identity) has its own folder. A list: several
      disks, over which the pages are spread.
    revision, weight_version, name, unversioned: what the pages are of, where SGLang cannot tell it or the weights are
      replaced in place.
    capacity: limit of the bytes of all files in the directory, of all ranks, engines and models, running or not; the
      first process sets it. Beyond it the least recently used pages are evicted. Of a list: of a rank's files; the
      pools of a hybrid model then share it as they share the host memory.
    durability, engine, depth, queue, buffered: as for kvswap.files.FileStore.
    shared: all engines and ranks of the machine that name the directory store in it, and find each other's pages.
      False, for network file systems, and a list of directories: the first process writes, the others read.
    """

    _known: tuple[_options.Option, ...] = _options.FILE_STORAGE  # of the extra config
    takes_coded_pages = True  # _coded_tree.py asks

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        del kwargs
        self._config = storage_config
        extra = storage_config.extra_config
        self._options = _options.read(extra, self._known, _EXTRA, theirs=_options.OF_SGLANG)
        self._said = Said.pop(self._options)
        _check(storage_config, extra or {})
        self._lock = threading.Lock()
        self._hosts: dict[str, Any] = {}  # guarded by _lock, as is _pages
        self._pages: dict[str, Pages] = {}
        self._closed = False
        # of the last stores, and loads: pages and GB/s
        self._moves: tuple[deque[tuple[int, float]], ...] = (deque(maxlen=_MOST_MOVES), deque(maxlen=_MOST_MOVES))

    # -- host pools ---------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """SGLang's: the host pool of KV pages."""
        self.mem_pool_host = mem_pool_host
        with self._lock:
            self._hosts[_KV] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """SGLang's: a further host pool of a hybrid model."""
        with self._lock:
            self._hosts.setdefault(str(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """SGLang's: all pools are known. An exception refuses the backend."""
        with self._lock:
            self._open()

    def _open(self) -> None:
        """The stores of all pools that have none. Under the lock."""
        if self._closed:
            raise RuntimeError("this storage backend is closed")
        for name, host in self._hosts.items():
            self._check_draft(name, host)
        new = {
            name: Pages(name, host, partial(self._identity, name, host))
            for name, host in self._hosts.items()
            if name not in self._pages
        }
        for pages in [*new.values()][:1]:
            pages.identity.warn(_log, _EXTRA)
        total = sum(pages.disk_nbytes for pages in (self._pages or new).values())  # what comes later is beyond it
        for name, pages in new.items():
            pages.store = self._open_store(name, pages, total)
            how = "in place" if pages.in_place else "in one block"
            _log.info("pages of %s: %d pieces of %s bytes, %s", name, len(pages.sizes), set(pages.sizes), how)
        self._pages.update(new)

    def _open_store(self, name: str, pages: Pages, total: int) -> PageStore:
        """The store of a pool's pages; total: disk_nbytes of all pools."""
        options = dict(self._options)
        directory, capacity = options.pop("directory"), options.pop("capacity")
        if not is_one(directory):
            capacity = capacity * pages.disk_nbytes // total
        return SharedFiles(directory, pages.layout, capacity, self._may_write(name), options)

    def _engines_share(self) -> bool:
        """Whether engines find each other's pages."""
        return shares(self._options["directory"], self._options)

    def _pages_of(self, name: Any) -> Pages | None:
        pages = self._pages.get(str(name))
        if pages is None:
            with self._lock:
                if str(name) in self._hosts:
                    self._open()
                pages = self._pages.get(str(name))
        if pages is None:
            _log.warning("SGLang names a host pool %s that it did not register: nothing is stored or loaded", name)
        return pages

    def _replicated(self, name: str) -> bool:
        """Whether all tensor-parallel ranks have the same pages. Mamba states are a rank's own in any model."""
        return bool(self._config.is_mla_model) and name != str(PoolName.MAMBA)

    def _may_write(self, name: str) -> bool:
        return not self._replicated(name) or bool(self._config.is_storage_writer)

    def _check_draft(self, name: str, host: Any) -> None:
        """Refuse a draft model with heads (MHA) beside an MLA model: its pages differ between ranks."""
        heads = hasattr(host, "head_num") and not hasattr(host, "kv_cache_dim")
        if name.startswith(str(PoolName.DRAFT)) and heads and self._replicated(name) and self._config.tp_size > 1:
            raise ValueError(
                f"host pool {name}: SGLang would store its pages on one rank, and they differ between ranks"
            )

    def _identity(self, name: str, host: Any, sizes: list[int]) -> Identity:
        """What this rank's pages of that pool mean."""
        more = {"ranks": ranks_of(self._config, replicated=self._replicated(name))}
        if (
            not self._engines_share()
        ):  # one process writes: a store for each rank that does attention for other requests
            more["replica"] = self._config.dp_rank
        return identity_of(self._config, name, host, sizes, self._said, **more)

    # -- pages of KV --------------------------------------------------------------------------------------------------

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many of the pages, from the first one on, are stored."""
        pages = self._pages_of(_KV)
        return 0 if pages is None else _leading(pages.find(keys))

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Load pages into the host pool; whether each arrived."""
        return self._move(_KV, keys, host_indices, load=True)

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of the host pool; whether each is stored."""
        return self._move(_KV, keys, host_indices, load=False)

    def exists(self, key: str) -> bool:
        """Whether the page is stored."""
        return self.batch_exists([key]) == 1

    # -- pages of several pools ---------------------------------------------------------------------------------------

    def batch_exists_v2(self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """The prefixes that every pool can restore, by its policy."""
        stored = self.batch_exists(keys)
        hits = {PoolName.KV: stored} if stored else {}
        usable = set(range(1, stored + 1))
        for transfer in pool_transfers or ():
            pages = self._pages_of(transfer.name)
            found = pages.find(keys[:stored]) if pages is not None and stored else []
            whole = _restorable(found, transfer)
            if whole:
                hits[transfer.name] = max(whole)
            usable &= whole
        return PoolTransferResult(max(usable, default=0), hits, sorted(usable))

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Load pages into several host pools; whether each arrived."""
        return {each.name: self._move(each.name, each.keys or [], each.host_indices, load=True) for each in transfers}

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of several host pools; whether each is stored."""
        return {each.name: self._move(each.name, each.keys or [], each.host_indices, load=False) for each in transfers}

    def _move(self, name: Any, keys: Sequence[str], host_indices: Any, *, load: bool) -> list[bool]:
        pages = self._pages_of(name)
        if pages is None or host_indices is None:
            return [False] * len(keys)
        begin = time.monotonic()
        moved = (pages.load if load else pages.save)(keys, host_indices)
        if getattr(self._config, "enable_storage_metrics", False):
            seconds = max(1e-9, time.monotonic() - begin)
            self._moves[load].append((len(keys), sum(moved) * pages.page_nbytes / seconds / 1e9))
        return moved

    # -- the rest -----------------------------------------------------------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Not there: SGLang calls it without interface_v1 only."""
        raise NotImplementedError(_NEEDS_V1)

    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any:
        """Not there, as get()."""
        raise NotImplementedError(_NEEDS_V1)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Not there, as get()."""
        raise NotImplementedError(_NEEDS_V1)

    def batch_set(self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        """Not there, as get()."""
        raise NotImplementedError(_NEEDS_V1)

    def clear(self) -> None:
        """Remove all pages of this rank's kinds, those of other engines too, of ended ones included. Error: a directory
        cannot be written."""
        failures: list[Exception] = []
        for pages in list(self._pages.values()):
            try:
                pages.clear()
            except Exception as error:  # the others are cleared all the same
                _log.error("pages of %s are not cleared: %s", pages.name, error)
                failures.append(error)
        if failures:
            raise failures[0]

    def get_stats(self) -> Any:
        """SGLang's StorageMetrics since the last call, for its own metrics."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        metrics = StorageMetrics()
        for moves, counts, rates in zip(
            self._moves,
            (metrics.backup_pgs, metrics.prefetch_pgs),
            (metrics.backup_bandwidth, metrics.prefetch_bandwidth),
            strict=True,
        ):
            for _ in range(len(moves)):  # other threads append
                count, rate = moves.popleft()
                counts.append(count)
                rates.append(rate)
        return metrics

    def close(self) -> None:
        """Close the stores. The next engine finds the pages."""
        with self._lock:
            self._closed = True
            opened, self._pages = list(self._pages.values()), {}
        for pages in opened:
            if pages.store is not None:
                pages.store.close()


_NEEDS_V1 = 'kvswap.sglang needs "interface_v1": 1 in --hicache-storage-backend-extra-config'


def _check(config: Any, extra: dict[str, Any]) -> None:
    if not extra.get("interface_v1"):
        raise ValueError(_NEEDS_V1)
    if getattr(config, "should_split_heads", False):
        raise ValueError('kvswap.sglang stores whole pages of a rank: remove "tp_lcm_size"')
    if getattr(config, "dcp_size", 1) > 1:
        raise ValueError("kvswap.sglang does not know decode context parallelism")


def _leading(found: Sequence[bool]) -> int:
    return next((i for i, there in enumerate(found) if not there), len(found))


def _restorable(found: Sequence[bool], transfer: Any) -> set[int]:
    """The lengths of prefixes for which this pool has what its policy asks for."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, _leading(found) + 1))
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        window = max(1, len(transfer.keys or ()))
        return {end for end in range(1, len(found) + 1) if all(found[max(0, end - window) : end])}
    raise ValueError(f"pool {transfer.name}: kvswap does not know the policy {transfer.hit_policy}")
