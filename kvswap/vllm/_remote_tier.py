"""A secondary tier for vLLM's tiered KV offloading: blocks of the host tier in the memory of other nodes.

    "secondary_tiers": [{"type": "RemoteTier", "module_path": "kvswap.vllm",
                         "master": "10.0.0.1:50051"}]

As FileTier, over kvswap.remote. A lookup would be a round trip to Mooncake's master, for which the scheduler must not
wait: the first one of a key is answered RETRY, and a thread asks for all keys that wait.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Collection
from typing import Any

from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kvswap import _options
from kvswap._log import logger

from ._file_tier import StoreTier, tier_of

_log = logger("kvswap.vllm")
_FRESH_SECONDS = 1.0  # an answer is used for so long, and asked for again afterwards
_UNUSED_SECONDS = 60.0  # one that was not used yet is kept longer, as an engine's step can take longer than a second
_MOST_ANSWERS = 65536
_MOST_AT_ONCE = 8192


class _Lookups:
    """Answers of a store, asked for by a thread of its own."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._wanted: dict[bytes, None] = {}  # guarded by _changed, as the next two
        self._answers: dict[bytes, tuple[float, bool]] = {}  # until when; in the order of their time
        self._epoch: bytes | None = None  # of the answers
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvswap-vllm-lookup", daemon=True)
        self._thread.start()

    def get(self, key: bytes) -> bool | None:
        """None: not known yet."""
        with self._changed:
            now = time.monotonic()
            if self._answers and self._epoch != self._store.epoch:  # it was cleared
                self._answers.clear()
            until, there = self._answers.get(key, (0.0, False))
            if until > now:
                self._answers[key] = min(until, now + _FRESH_SECONDS), there
                return there
            if len(self._wanted) < _MOST_ANSWERS:
                self._wanted[key] = None
                self._changed.notify()
        return None

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._wanted and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                keys = list(self._wanted)[:_MOST_AT_ONCE]
            epoch = self._store.epoch
            try:
                found = self._store.contains(keys)
            except Exception as error:  # the requests must not wait for an answer for ever
                _log.warning("the remote tier cannot be asked: %s", error)
                found = [False] * len(keys)
            self._put(keys, found, epoch)

    def _put(self, keys: list[bytes], found: list[bool], epoch: bytes | None) -> None:
        until = time.monotonic() + _UNUSED_SECONDS
        with self._changed:
            if epoch != self._epoch:
                self._answers.clear()
                self._epoch = epoch
            for key, there in zip(keys, found, strict=True):
                self._wanted.pop(key, None)
                self._answers.pop(key, None)
                self._answers[key] = until, there
            if len(self._answers) > _MOST_ANSWERS:  # the older half, in one go: a dict's first key is slow to find
                for key in list(itertools.islice(self._answers, _MOST_ANSWERS // 2)):
                    del self._answers[key]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(5)


class RemoteTier(StoreTier):
    """vLLM's SecondaryTierManager over a kvswap.remote.RemoteStore.

    master: HOST:PORT of mooncake_master. The other options are RemoteStore's.
    """

    # From 0.33 on: where vLLM counts the hits. By the medium it would count them as a disk's.
    cache_hit_source: Any = getattr(SecondaryTierManager, "cache_hit_source", None)

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        locality: str | None = "REMOTE",
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        given = _options.read(options, _options.REMOTE_TIER, tier_of(tier_type))
        super().__init__(offloading_spec, primary_kv_view, tier_type, locality, backpressure_detector)
        from kvswap.remote import RemoteStore

        self._identify(offloading_spec, given)
        if self.identity.storable:
            self._store = RemoteStore(layout=self.identity.layout(self._stride), **given)
        self._lookups = _Lookups(self._store)
        _log.info("remote tier: %s", self._store)

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT or MISS, or RETRY until the master has answered."""
        key = bytes(key)
        there = False if self._is_unreadable(key) else self._lookups.get(key)
        if there is None:
            return LookupResult.RETRY
        return LookupResult.HIT if there else LookupResult.MISS

    def _put(self, keys: list[bytes], addresses: Any) -> Any:
        return self._store.store(keys, addresses)

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Does nothing: Mooncake counts as used what is looked up and read."""

    def shutdown(self) -> None:
        """Disconnect. The nodes keep their blocks."""
        self._lookups.close()
        self._store.close()
