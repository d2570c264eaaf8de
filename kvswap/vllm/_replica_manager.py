"""A scheduler's manager of offloaded blocks, over the index that all replicas have in common (csrc/replicas/index.h).

vLLM calls lookup(), and prepare_load() in the same step. Between the two another replica may make room, so a block that
was looked up is pinned until the end of the step. After a reset vLLM no longer says when a job of before it ends:
KVSwapConnector does, and until then the slots of such jobs are not given back.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import LookupResult, OffloadingManager, PrepareStoreOutput, RequestOffloadingContext
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec, CPUOffloadingMetrics

from kvswap import _C
from kvswap._log import logger
from kvswap.vllm._own_stats import EVERY, REPLICA_CHUNKS, REPLICA_ENGINES, is_known

_logger = logger("kvswap.vllm")

_KEY_NBYTES = 40  # of the index
_PENDING = 2.0  # seconds that a request waits for a block that another replica writes; then it is computed
_SAY_EVERY = 60.0  # seconds
_GAUGES = "CPU_CACHE_USAGE_PERC", "CPU_CACHE_WRITE_USAGE_PERC", "CPU_CACHE_READ_USAGE_PERC"


def _short(key: bytes) -> bytes:
    return key if len(key) <= _KEY_NBYTES else hashlib.blake2b(key, digest_size=_KEY_NBYTES).digest()


class ReplicaManager(OffloadingManager):  # type: ignore[misc]
    """A scheduler's side of the index. One thread calls it."""

    def __init__(self, index: _C._ReplicaIndex, chunks: int, info: Any = None) -> None:
        self._index, self._chunks, self._info = index, chunks, info
        self._looked_up: dict[bytes, int] = {}  # pinned for the rest of the step; slots
        self._reading: dict[bytes, list[int]] = {}  # a slot for each load
        self._writing: dict[bytes, int] = {}
        self._left: tuple[list[int], list[int]] = [], []  # of before a reset: slots of loads, and of stores
        self._jobs: dict[int, int] = {}  # of before a reset: ranks that have not reported
        self._owed: list[tuple[str, list[int], bool]] = []  # calls that could not have the lock
        self.unfinished: Callable[[], Mapping[int, Any]] = dict  # vLLM's jobs, with their status
        self._said = -_SAY_EVERY
        self.loads = {"own": 0, "others": 0}  # chunks, by the replica that stored them
        self._told = dict(self.loads)  # to vLLM's statistics
        self._tells = is_known()
        self._look_at = 0.0  # when the number of engines is read again
        self._foreign: set[int] = set()  # slots of _looked_up

    # -- the lock of the index --

    def _late(self, error: TimeoutError) -> None:
        if time.monotonic() - self._said >= _SAY_EVERY:
            self._said = time.monotonic()
            _logger.warning("kvswap_replicas: nothing is found or stored: %s", error)

    def _call(self, what: str, slots: list[int], stored: bool = True) -> None:
        """Give slots back; later, if the lock cannot be had."""
        if slots:
            self._owed.append((what, slots, stored))
        while self._owed:
            what, slots, stored = self._owed[0]
            try:
                if what == "unpin":
                    self._index.unpin(slots)
                else:
                    self._index.settle(slots, stored)
            except TimeoutError as error:
                self._late(error)
                return
            del self._owed[0]

    # -- vLLM's interface --

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """As vLLM's."""
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """As vLLM's. A hit stays until the end of the step."""
        if key in self._looked_up:
            return LookupResult.HIT
        try:
            found = self._index.find(_short(key), _PENDING)
        except TimeoutError as error:
            self._late(error)
            return LookupResult.MISS
        if isinstance(found, bool):
            return LookupResult.HIT_PENDING if found else LookupResult.MISS
        self._looked_up[key] = found[0]
        if found[1]:
            self._foreign.add(found[0])
        return LookupResult.HIT

    def get_load_source(self, key: bytes, req_context: Any) -> Any:
        """As vLLM's (0.32 on)."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> Any:
        """As vLLM's. Each key was a hit in this step."""
        slots: list[int] = []
        for key in keys:
            if key not in self._looked_up and self.lookup(key, req_context) is not LookupResult.HIT:
                self._call("unpin", slots)
                raise _C.Error(f"kvswap_replicas: a block to load was not looked up in this step, and is gone: {key!r}")
            slot = self._looked_up.pop(key)
            self._reading.setdefault(key, []).append(slot)
            self.loads["others" if slot in self._foreign else "own"] += 1
            self._foreign.discard(slot)
            slots.append(slot)
        return CPULoadStoreSpec(slots)

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """As vLLM's."""
        try:
            self._index.touch([_short(key) for key in keys])
        except TimeoutError as error:
            self._late(error)

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """As vLLM's."""
        slots = []
        for key in keys:
            slots.append(self._reading[key].pop())
            if not self._reading[key]:
                del self._reading[key]
        self._call("unpin", slots)

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput | None:
        """As vLLM's. What another replica has stored, or is storing, is not stored again."""
        keys = list(keys)
        try:
            taken = self._index.take([_short(key) for key in keys])
        except TimeoutError as error:
            self._late(error)
            return None
        if taken is None:
            return None
        new = {key: slot for key, slot in zip(keys, taken[0], strict=True) if slot is not None}
        self._writing.update(new)
        return PrepareStoreOutput(
            keys_to_store=list(new), store_spec=CPULoadStoreSpec(list(new.values())), evicted_keys=[]
        )

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        """As vLLM's."""
        self._call("settle", [self._writing.pop(key) for key in keys if key in self._writing], success)

    def on_schedule_end(self, context: Any) -> None:
        """The end of a step: what was looked up and is not loaded may go."""
        slots = list(self._looked_up.values())
        self._looked_up.clear()
        self._foreign.clear()
        self._call("unpin", slots)

    def reset_cache(self) -> None:
        """As vLLM's, for this replica. What its workers still read and write stays theirs until they have reported."""
        self.on_schedule_end(None)
        reads, writes = self._left
        reads += [slot for slots in self._reading.values() for slot in slots]
        writes += self._writing.values()
        self._reading.clear()
        self._writing.clear()
        self._jobs.update((job, status.pending_count) for job, status in self.unfinished().items())
        self._index.reset()
        self._give_back_left()

    def reported(self, completed: Mapping[int, int]) -> None:
        """Jobs that ranks have reported as ended: job -> ranks."""
        if not self._jobs:
            return
        for job, ranks in completed.items():
            if job in self._jobs:
                self._jobs[job] -= ranks
                if self._jobs[job] <= 0:
                    del self._jobs[job]
        self._give_back_left()

    def _give_back_left(self) -> None:
        if self._jobs:
            return
        (reads, writes), self._left = self._left, ([], [])
        self._call("unpin", reads)
        self._call("settle", writes, False)

    def take_events(self) -> Iterable[Any]:
        """None: engines with events are refused."""
        return ()

    def get_stats(self) -> Any:
        """vLLM's gauges, of this replica's part."""
        stats = OffloadingConnectorStats()
        reads, writes = len(self._reading) + len(self._left[0]), len(self._writing) + len(self._left[1])
        for name, count in zip(_GAUGES, (reads + writes, writes, reads), strict=True):
            stats.set_gauge(getattr(CPUOffloadingMetrics, name), count / self._chunks)
        if self._tells:
            self._tell_of_replicas(stats)
        return stats

    def _tell_of_replicas(self, stats: Any) -> None:
        for stored_by, count in self.loads.items():
            if count > self._told[stored_by]:
                stats.increase_counter(REPLICA_CHUNKS, count - self._told[stored_by], (stored_by,))
        self._told = dict(self.loads)
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + EVERY
            try:
                stats.set_gauge(REPLICA_ENGINES, self._index.info()["members"])
            except TimeoutError as error:
                self._late(error)

    def config_info(self) -> Sequence[Any]:
        """As vLLM's (0.33)."""
        return [self._info.as_config_info()] if self._info is not None else [{}]

    def shutdown(self) -> None:
        """Leave. Slots that workers may still use stay until their processes have ended."""
        self.on_schedule_end(None)
        self._index.close()
