"""A secondary tier for vLLM's tiered KV offloading: blocks evicted from host memory are stored by kvswap.files.

    vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 34359738368,
        "secondary_tiers": [{"type": "FileTier", "module_path": "kvswap.vllm",
                             "directory": "/mnt/nvme/kv", "capacity": "500GiB"}]}}'

For vLLM 0.33, which names a tier by its module; before call SecondaryTierFactory.register_tier("FileTier",
"kvswap.vllm", "FileTier") first. The interface is vllm/v1/kv_offload/tiering/base.py. The tier runs in the scheduler's
process and never blocks it: a lookup reads memory only, transfers run on the store's threads. A block that cannot be
loaded, or is damaged, is reported to vLLM as a failed key. A store beyond the disk's speed is dropped and reported so.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.kv_offload import base as offload_base
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvswap import _C, _options
from kvswap._log import logger
from kvswap.files import FileStore, Layout
from kvswap.identity import Identity, Said, folder, forget
from kvswap.vllm._identity import identity_of

from . import _tier_stats

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logger("kvswap.vllm")
_RESULT_FIELDS = {field.name for field in fields(JobResult)}
_MEDIUM = getattr(offload_base, "Medium", None)
_EVENT_FIELDS = set(getattr(getattr(offload_base, "OffloadingEvent", None), "__dataclass_fields__", ()))
_DRAIN_SECONDS = 600.0
_EVENTS = 1 << 20  # kept until vLLM takes them
# A block that could not be loaded counts as missing for so long. Else vLLM asks for it again and again, and never runs
# the request.
_UNREADABLE_SECONDS = 60.0
_MOST_UNREADABLE = 1 << 16


@dataclass
class _Job:
    """A submitted transfer of vLLM."""

    transfer: Any  # FileTransfer or RemoteTransfer; None: it was refused
    keys: list[bytes]
    load: bool
    begin: float


class StoreTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM may be missing when types are checked
    """vLLM's SecondaryTierManager over a store of blocks by key: a FileStore or a RemoteStore.

    vLLM's scheduler calls it unguarded: an exception would end the engine. What a store refuses is a failed job, or a
    miss, and a line of the log. Only drain_jobs() raises, TimeoutError: afterwards vLLM uses the memory otherwise.
    """

    medium: Any = _MEDIUM.STORAGE if _MEDIUM is not None else "FS"  # 0.26: a str

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        locality: str | None,
        backpressure_detector: Any,
    ) -> None:
        more = {"backpressure_detector": backpressure_detector} if _takes_detector() else {}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **more)
        if locality is not None and hasattr(offload_base, "Locality"):
            self.locality = offload_base.Locality(locality)
        assert primary_kv_view.strides is not None
        self._memory: NDArray[Any] = np.asarray(primary_kv_view)  # keeps it mapped
        self._stride = int(primary_kv_view.strides[0])
        self._jobs: dict[int, _Job] = {}
        self._unreadable: dict[bytes, float] = {}  # until when, by key; the oldest first
        self._store: Any = None  # set by the subclass
        self._readonly = False
        self._stats = _tier_stats.TierStats(tier_type)
        self._entry = tier_of(tier_type)
        self.identity: Identity  # set by the subclass, by _identify()

    def _identify(self, offloading_spec: Any, options: dict[str, Any]) -> None:
        """What this tier's blocks mean. If they mean nothing to another engine, there is a store of nothing."""
        self.identity = identity_of(offloading_spec, Said.pop(options))
        self.identity.warn(_log, self._entry)
        if not self.identity.storable:
            self._store, self._readonly = _Nothing(), True

    # -- vLLM's interface

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT or MISS, from memory."""
        key = bytes(key)
        try:
            there = not self._is_unreadable(key) and self._store.contains([key])[0]
        except Exception as error:
            _log.warning("a block is not looked up: %s", error)
            there = False
        return LookupResult.HIT if there else LookupResult.MISS

    def _is_unreadable(self, key: bytes) -> bool:
        return bool(self._unreadable) and self._unreadable.get(key, 0.0) > time.monotonic()

    def _note_unreadable(self, keys: Iterable[bytes]) -> None:
        until = time.monotonic() + _UNREADABLE_SECONDS
        for key in keys:
            self._unreadable.pop(key, None)
            self._unreadable[key] = until
        while len(self._unreadable) > _MOST_UNREADABLE:
            del self._unreadable[next(iter(self._unreadable))]

    def submit_store(self, job_metadata: Any) -> None:
        """Store blocks of the host tier; existing blocks are left unchanged."""
        self._submit(job_metadata, load=False)

    def submit_load(self, job_metadata: Any) -> None:
        """Load blocks into the host tier."""
        self._submit(job_metadata, load=True)

    def _submit(self, job: Any, *, load: bool) -> None:
        keys = [bytes(key) for key in job.keys]
        ids = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
        transfer: Any = None
        try:
            addresses = self._memory.ctypes.data + np.asarray(ids, np.int64) * self._stride
            if load:
                transfer = self._store.load(keys, addresses)
            elif not self._readonly:
                transfer = self._put(keys, addresses)
        except _C.QueueFull as error:
            _log.debug("job %s is dropped: %s", job.job_id, error)
        except Exception as error:  # the job has failed, and the engine goes on
            _log.warning("%s of %d blocks: %s", "load" if load else "store", len(keys), error)
        self._jobs[job.job_id] = _Job(transfer, keys, load, time.monotonic())

    def _put(self, keys: list[bytes], addresses: NDArray[Any]) -> Any:
        return self._store.store(keys, addresses, replace=False)

    def get_finished_jobs(self) -> Iterable[Any]:
        """The jobs that ended since the last call; of a load with the keys that arrived."""
        ended = [number for number, job in self._jobs.items() if job.transfer is None or job.transfer.done()]
        return [self._result(number, self._jobs.pop(number)) for number in ended]

    def _result(self, number: int, job: _Job) -> Any:
        failed = set(range(len(job.keys))) if job.transfer is None else set(job.transfer.failed_positions.tolist())
        if failed and job.transfer is not None:
            _log.warning("%s of %d blocks: %s", "load" if job.load else "store", len(job.keys), job.transfer.error)
        arrived = tuple(key for i, key in enumerate(job.keys) if i not in failed)
        if job.load and job.transfer is not None:
            self._note_unreadable(job.keys[i] for i in failed)
        for key in arrived if self._unreadable else ():
            self._unreadable.pop(key, None)
        told = {
            "job_id": number,
            "success": not failed,
            "successful_keys": arrived if job.load and failed and arrived else None,
            "transfer_time": job.transfer.elapsed if job.transfer is not None else time.monotonic() - job.begin,
            "transfer_bytes": len(arrived) * self._stride,
        }
        return JobResult(**{name: value for name, value in told.items() if name in _RESULT_FIELDS})

    def on_new_request(self, req_context: Any) -> Any:
        """Does nothing."""
        return RequestOffloadingContext()

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Blocks used in a faster tier count as used here too."""
        try:
            self._store.touch([bytes(key) for key in keys])
        except Exception as error:  # they only count as used earlier
            _log.debug("%d blocks are not touched: %s", len(keys), error)

    def drain_jobs(self) -> None:
        """Wait until every submitted job has ended. The results remain to be fetched."""
        end = time.monotonic() + _DRAIN_SECONDS
        for job in self._jobs.values():
            if job.transfer is not None:
                try:
                    job.transfer.wait(max(0.0, end - time.monotonic()))
                except TimeoutError:
                    raise
                except _C.Error:
                    pass  # told by get_finished_jobs()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """The metrics of get_stats(), as vLLM describes them."""
        return _tier_stats.definitions()

    def get_stats(self) -> Any:
        """For vLLM's metrics: what became of the blocks since the last call. None: nothing, or asked too soon."""
        return self._stats.take(self._store.stats()) if self._stats.due() else None

    def shutdown(self) -> None:
        """Close the store."""
        self._store.close()


class FileTier(StoreTier):
    """vLLM's SecondaryTierManager over a kvswap.files.FileStore.

    directory: parent of the stores; each identity of blocks (kvswap.identity) has its own folder. Several engines of
      this machine share it: each stores its own blocks and loads those of all. A list of directories, on several
      disks, has one writer; another engine opens it for reading only.
    revision, weight_version, name, unversioned: what the blocks are of, where vLLM cannot tell it or the weights are
      replaced in place.
    capacity: limit of the bytes of all files in the directory, of every engine and model, running or not; the first
      engine sets it. Beyond it the least recently used blocks are evicted. Of a list: of this engine's files.
    durability, engine, depth, queue: as for kvswap.files.FileStore.
    enable_kv_events: tell vLLM which blocks come and go, where its KV cache events are on.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        locality: str | None = None,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        given = _options.read(options, _options.FILE_TIER, tier_of(tier_type))
        super().__init__(offloading_spec, primary_kv_view, tier_type, locality, backpressure_detector)
        self._identify(offloading_spec, given)
        directory, capacity, events = given.pop("directory"), given.pop("capacity"), given.pop("enable_kv_events")
        self._events = False
        if not self.identity.storable:
            return
        layout = self.identity.layout(self._stride)
        folders = [folder(one, layout) for one in (directory if isinstance(directory, list) else [directory])]
        for each in folders:
            each.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._events = _wants_events(offloading_spec, tier_type) if events else False
        given |= {"events": _EVENTS} if self._events else {}
        self._store, self._readonly = _open(folders, layout, capacity, given)
        self._layout, self._folders = layout, folders
        _log.info("file tier %s: %s, %s", ", ".join(map(str, folders)), self._store, self._store.info)
        _log.info(
            "vLLM tells its tiers nothing of weights replaced in a running engine: run kvswap files clear %s then",
            " ".join(str(folder.parent) for folder in folders),
        )

    def shutdown(self) -> None:
        """Close the store. The next engine of the same identity finds its blocks."""
        super().shutdown()
        if self.identity.storable:
            forget(self._layout, self._folders)

    def take_events(self) -> Iterable[Any]:
        """Blocks that came and went since the last call, those of other engines too. What was found at open, or removed
        by a clear, comes in pieces, a call each."""
        if not self._events:
            return
        events, lost = self._store.take_events()
        if lost:
            _log.warning("%d KV cache events of the file tier are lost: they were not taken in time", lost)
        for there, run in itertools.groupby(events, key=lambda event: event[1]):
            told = {
                "keys": [key for key, _ in run],
                "medium": self.medium,
                "removed": not there,
                "locality": getattr(self, "locality", None),
            }
            yield offload_base.OffloadingEvent(**{name: told[name] for name in told if name in _EVENT_FIELDS})


def tier_of(tier_type: str) -> str:
    """What messages call a tier's entry of the configuration."""
    return f'the entry "{tier_type}" of secondary_tiers'


class _Nothing:
    """A store in which nothing is stored or found."""

    epoch = None

    def contains(self, keys: list[bytes]) -> list[bool]:
        return [False] * len(keys)

    def load(self, keys: list[bytes], blocks: Any) -> None:
        return None

    def touch(self, keys: list[bytes]) -> None:
        return None

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self, timeout: float = 0.0) -> None:
        return None


def _takes_detector() -> bool:
    return "backpressure_detector" in inspect.signature(SecondaryTierManager.__init__).parameters


def _wants_events(offloading_spec: Any, tier_type: str) -> bool:
    config = getattr(offloading_spec, "kv_events_config", None)
    if getattr(config, "enable_kv_cache_events", False) and hasattr(offload_base, "OffloadingEvent"):
        return True
    _log.warning("enable_kv_events of tier %s has no effect: vLLM's KV cache events are off", tier_type)
    return False


def _open(folders: list[Path], layout: Layout, capacity: int, options: dict[str, Any]) -> tuple[FileStore, bool]:
    """The store, and whether it is read-only."""
    if len(folders) == 1:
        bound = folders[0].parent
        return FileStore(folders[0], layout, capacity=capacity, shared=True, bound=bound, **options), False
    try:
        return FileStore(folders, layout, capacity=capacity, **options), False
    except _C.Error as error:
        if "written by another process" not in str(error):
            raise
        _log.warning("%s; this engine reads it, and stores nothing", error)
        return FileStore(folders, layout, readonly=True, engine=options["engine"], depth=options["depth"]), True
