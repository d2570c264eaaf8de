"""One direction of offloading: a queue of jobs. kvswap._C.OffloadMap does the work for each block."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvswap import _C
from kvswap._log import logger
from kvswap._timeouts import seconds
from kvswap.offload import _counts
from kvswap.offload._coded import CodedMap, layout_of
from kvswap.offload._layers import Places, by_parts, places_of, wait_here, waits_of
from kvswap.offload._layout import (
    AnyLayout,
    AnyMap,
    Ranges,
    SharedMap,
    checked_parts,
    device_of,
    give_map,
    is_torch,
    take_map,
)
from kvswap.offload._lend import Lend, LendMap, lend_layout
from kvswap.offload._links import LinksMap
from kvswap.offload._member import MemberMap, Share, member_layout
from kvswap.offload._replicas import replica_layout
from kvswap.offload._specs import TransferResult
from kvswap.tracing import nvtx_range

if TYPE_CHECKING:
    from kvswap.codecs import Coding
    from kvswap.share import Member
    from kvswap.share._lend import Lending
    from kvswap.typing import DeviceLike

_logger = logger("kvswap.offload")

_SLICE = 10.0  # seconds between two log lines of a wait
# Parts of blocks are large copies. `auto` may take bursts for them, whose kernels delay those of a model's graphs for
# as long as the engine runs (docs/performance.md, "A model's graphs").
_PATH_OF_PARTS = "dma"
_WHY = "codec"  # of a block that does not fit its coded size
_SHORTEST = 1e-9  # seconds: reported for a job too short to be measured


@dataclass(eq=False)
class Job:
    """A submitted job that is not collected."""

    job_id: int
    transfers: list[_C.Transfer]  # with share=, ShareTransfers, which no stream waits for
    num_bytes: int
    submitted: float  # time.monotonic()
    error: BaseException | None = None  # of a part that could not be queued
    next_part: int = 0  # OffloadMap.submit(first=) of the next call
    layered: bool = False  # its transfers can be waited for layer by layer
    places: tuple[int, Places] | None = None  # of its tensors, if layered
    groups: tuple[list[int], list[int]] | None = None  # sizes and block indices, of a store of coded blocks

    def ended(self) -> bool:
        """Whether all its transfers have ended, well or not. Never blocks."""
        return all(transfer.done() for transfer in reversed(self.transfers))

    def why_failed(self) -> BaseException | None:
        """The error of an ended job; None if it succeeded."""
        errors = (transfer.error for transfer in self.transfers)
        return self.error or next((error for error in errors if error is not None), None)

    def seconds(self) -> float:
        """Seconds on the device."""
        return max(_SHORTEST, sum(transfer.elapsed or 0.0 for transfer in self.transfers))


@dataclass
class HandlerStats:
    """Counters of a handler.

    jobs, failed, bytes, device_seconds: of collected jobs; bytes of successful ones. not_stored: blocks that did not
    fit their coded size. queued_seconds: from submission
    until the end was seen, minus the device's time. paths: number of transfers by path. stalls: how often submitting
    waited because the queue was full. second_attempts: transfers of the whole device that were given to another path
    after the first was refused.
    """

    jobs: int = 0
    failed: int = 0
    not_stored: int = 0
    unfinished: int = 0
    bytes: int = 0
    device_seconds: float = 0.0
    queued_seconds: float = 0.0
    stalls: int = 0
    second_attempts: int = 0
    paths: dict[str, int] = field(default_factory=dict)


class Deadline:
    """One time limit for several waits; None: no limit."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = seconds(timeout)
        self.end = None if self.timeout is None else time.monotonic() + self.timeout

    def left(self) -> float | None:
        return None if self.end is None else max(0.0, self.end - time.monotonic())


def _wait(transfer: _C.Transfer | _C.ShareTransfer, deadline: Deadline, what: str) -> None:
    """Wait for the end of a transfer, well or not. Logs every ten seconds. TimeoutError."""
    begin = time.monotonic()
    while True:
        left = deadline.left()
        try:
            transfer.wait(_SLICE if left is None else min(_SLICE, left))
            return
        except TimeoutError:
            waited = time.monotonic() - begin
            if left is not None and left <= _SLICE:
                raise TimeoutError(f"{what} has not ended after {deadline.timeout:g} s; it goes on") from None
            _logger.warning("%s has not ended after %.0f s", what, waited)
        except Exception:
            if not transfer.done():
                raise  # in the child of a fork() the transfer never ends
            return  # the job's result reports the error


def _refuse_beside(what: str, canonical: bool, cut: bool, moves: dict[str, Any]) -> None:
    """ValueError: what does not go with share=, or lend=."""
    given = [name for name, value in moves.items() if value not in (None, "auto")]
    given += [name for name, value in (("canonical_layout", canonical), ("layer_parts", cut)) if value]
    if given:
        raise ValueError(f"{what}: {given[0]} does not apply to transfers over several links")


def _shared_layout(
    places: tuple[str, Any, Any, int, Any], share: Share, codings: Sequence[Coding] | None, parts: tuple[Ranges, ...]
) -> AnyLayout:
    """Of replicas, or of the ranks of an engine."""
    if share.ranks == 0:
        return replica_layout(*places, share, codings, parts)
    return member_layout(*places, share, codings)


class SingleDirectionOffloadingHandler:
    """Moves blocks in one direction, in the order of submission. vLLM's class of this name.

    gpu_tensors, cpu_tensors: as many, of contiguous bytes, blocks first: (num_gpu_blocks, page) and
      (num_cpu_blocks, page * block_size_factor), or (num_cpu_blocks, block_size_factor, page). Rows, and in the last
      shape blocks too, may have other bytes between them. They are held until shutdown().
    block_size_factor (blocks_per_chunk): GPU blocks in a CPU block (a chunk).
    kv_cache_groups_data_refs (layer_refs_per_group): a list of CanonicalKVCacheRef for each group of layers.
    gpu_to_cpu: True stores, False loads.
    mmap_region: None, or the region of the CPU tensors: its cleanup() is called when the last handler of these
      tensors is shut down.
    canonical_layout: each reference has a mapping, which gives the places of the page's fragments on the host.
    layer_parts: for tensors whose blocks hold several layers: a list for each tensor, of the byte ranges (begin, end)
      that a job with layer_events moves one after another, in the order of the list. Together they are the block. All
      other jobs move a block of a tensor as one copy. None: a tensor is one part. Several groups must share tensors.
    device: Device, its name, or None: the GPU tensors' device (host:0 if they are in the process's memory).
    compute_stream: a callable that returns the model's stream, called for each job; None: torch's current stream for
      torch tensors, else the device's (Device.set_compute_stream).
    wait_timeout: seconds, the limit of a wait() without a timeout; None: no limit.
    remember_failures: a load of a chunk that a failed store was to write fails, until it is stored again. Turn it off
      if other writers use the CPU tensors too.
    path, priority, max_ctas, pace_gbps: as for kvswap.swap_blocks_batch.
    codings: kvswap.codecs.Coding of each tensor: a block's page_size_bytes are coded on the way, and a block of a CPU
      tensor has coded_nbytes bytes. Blocks that do not fit are in the TransferResult's not_stored. None: not coded.
    share: None, or the ranks that hold the same cache (docs/share.md): they have the same CPU tensors, and each calls
      every load with the same job_id; one of them calls the stores. The blocks of a chunk lie one behind the other.
      Then a job is not all queued in the call, jobs of a handler are not ordered, and a block belongs to its job until
      that has ended; path to pace_gbps do not apply.
    lend: None, or how this process and those of other engines lend each other their links (docs/share.md). While one
      lends, the same holds for jobs of some size, but for layer_events; others go as without it. Failed stores are not
      remembered.

    Order. A job starts after all work on the compute stream at its submission, after the earlier jobs of its handler,
    and after transfers of any handler of the same tensors on the same blocks. When transfer_async() returns, the whole
    job is queued on the device. Several handlers of one direction are several queues.

    Failures. Wrong arguments are ValueError, IndexError or TypeError, and nothing is queued. A device failure is a
    TransferResult with success=False and the reason in `error`, in the job's place.

    Threads: any thread may call any method; jobs of one handler are queued one at a time.
    """

    def __init__(
        self,
        gpu_tensors: Sequence[Any],
        cpu_tensors: Sequence[Any],
        block_size_factor: int | None = None,
        kv_cache_groups_data_refs: Sequence[Sequence[Any]] | None = None,
        gpu_to_cpu: bool = True,
        mmap_region: Any = None,
        *,
        blocks_per_chunk: int | None = None,
        layer_refs_per_group: Sequence[Sequence[Any]] | None = None,
        canonical_layout: bool = False,
        host_memory_is_pinned: bool | None = None,
        device: DeviceLike | None = None,
        compute_stream: Callable[[], Any] | None = None,
        wait_timeout: float | None = None,
        remember_failures: bool = True,
        layer_parts: Sequence[Sequence[Sequence[int]]] | None = None,
        path: str = "auto",
        priority: str | None = None,
        max_ctas: int | None = None,
        pace_gbps: float | None = None,
        codings: Sequence[Coding] | None = None,
        share: Share | None = None,
        lend: Lend | None = None,
    ) -> None:
        del host_memory_is_pinned  # kvswap asks the driver
        factor = block_size_factor if block_size_factor is not None else blocks_per_chunk
        refs = kv_cache_groups_data_refs if kv_cache_groups_data_refs is not None else layer_refs_per_group
        if factor is None or refs is None:
            raise TypeError("block_size_factor and kv_cache_groups_data_refs are needed")
        if factor < 1:
            raise ValueError(f"block_size_factor is {factor}: must be at least 1")
        if not gpu_tensors:
            raise ValueError("gpu_tensors is empty: there must be at least one")
        device = device_of(gpu_tensors[0]) if device is None else device
        self._device = device if isinstance(device, _C.Device) else _C.Device(device)
        self.layer_parts = checked_parts(layer_parts, gpu_tensors, canonical_layout)
        self._cut = codings is None and any(len(ranges) > 1 for ranges in self.layer_parts)
        places = self._device.name, gpu_tensors, cpu_tensors, int(factor), refs
        parts = self.layer_parts if self._cut or codings is not None else ()
        moves = {"path": path, "priority": priority, "max_ctas": max_ctas, "pace_gbps": pace_gbps}
        if share is not None:
            _refuse_beside("share", canonical_layout, self._cut, moves)
            layout: AnyLayout = _shared_layout(places, share, codings, parts)
        elif lend is not None:
            _refuse_beside("lend", canonical_layout, self._cut, moves)
            layout = lend_layout(*places, lend, codings, parts)
        else:
            layout = layout_of(places, codings, canonical_layout, remember_failures, parts)
        self.gpu_to_cpu = bool(gpu_to_cpu)
        self.blocks_per_chunk = int(factor)
        self.kv_cache_groups_data_refs = self.layer_refs_per_group = refs
        self.transfer_type = ("GPU", "CPU") if gpu_to_cpu else ("CPU", "GPU")
        self.wait_timeout = wait_timeout
        self._second_attempts = int(self._device.stats()["second_attempts"])
        sides = list(gpu_tensors), list(cpu_tensors)
        self.src_tensors, self.dst_tensors = sides if gpu_to_cpu else sides[::-1]
        self._compute = compute_stream or current_stream_of(gpu_tensors[0], self._device)
        self._options: dict[str, Any] = moves
        self._stream: _C.Stream | None = _C.Stream(self._device)  # carries waits only; its id names this queue's lane
        self._what = "store" if gpu_to_cpu else "load"
        self._submitting = threading.Lock()
        self._lock = threading.Lock()
        self._transfers: deque[Job] = deque()  # guarded by _lock
        self._stats = HandlerStats()  # guarded by _lock
        self._closed = False
        # Last: the map counts its users, and a handler whose constructor failed would not release it.
        shared = take_map(layout, self._device, (tuple(gpu_tensors), tuple(cpu_tensors)), mmap_region)
        self._shared: SharedMap | None = shared
        self._map: AnyMap | None = shared.map
        self._order = by_parts(shared.map.order, layout.numbers)
        self._places: dict[tuple[bool, ...], tuple[int, Places] | None] = {}  # by groups that have blocks
        _counts.add_handler(self)

    @property
    def device(self) -> _C.Device:
        """The device of the jobs."""
        return self._device

    @property
    def compute_stream(self) -> Callable[[], Any]:
        """Returns the model's stream; None: the device's compute stream."""
        return self._compute

    @property
    def member(self) -> Member | None:
        """The member of a group by which jobs go; None: without share= and lend=."""
        return self._map.member if isinstance(self._map, (MemberMap, LinksMap)) else None

    @property
    def lending(self) -> Lending | None:
        """What this process lends to other engines, and who lends to it; None: without lend=."""
        return self._map.lending if isinstance(self._map, LendMap) else None

    @property
    def _coded_map(self) -> CodedMap | MemberMap | LinksMap | None:
        """The map, if blocks are coded on the way."""
        if isinstance(self._map, CodedMap) or (isinstance(self._map, (MemberMap, LinksMap)) and self._map.coded):
            return self._map
        return None

    # -- submitting ---------------------------------------------------------------------------------------------------

    def transfer_async(self, job_id: int, spec: Any, dst_spec: Any = None, *, layer_events: bool = False) -> bool:
        """Queue a job. True: the whole job is queued, or it has failed and get_finished() reports that.

        job_id: returned by get_finished(); unique among uncollected jobs.
        spec: (source, destination), or the source, followed by dst_spec: GPULoadStoreSpec and CPULoadStoreSpec, in the
          order of this handler's direction.
        layer_events: the tensors are moved in their order, or their parts (layer_parts), and make_wait() can wait for
          some of them.

        ValueError, IndexError, TypeError: wrong lists or ids; the message names them, and nothing was queued. If the
        queue is full (128 unfinished transfers), the call waits for the oldest.
        """
        source, target = spec if dst_spec is None else (spec, dst_spec)
        gpu, cpu = (source, target) if self.gpu_to_cpu else (target, source)
        with self._submitting:
            if self._closed or self._map is None:
                raise _C.Error("the offloading handler was shut down")
            with self._lock:
                if any(job.job_id == job_id for job in self._transfers):
                    raise ValueError(f"job {job_id} was submitted before, and not collected yet")
            job = Job(job_id, [], 0, time.monotonic(), layered=layer_events)
            groups = self._groups_of(gpu.group_sizes, gpu.block_indices, layer_events)
            if layer_events:
                job.places = self._places_of(groups[0])
            lists = (gpu.block_ids, cpu.block_ids, *groups)
            if self.gpu_to_cpu and self._coded_map is not None:
                job.groups = list(gpu.group_sizes), list(gpu.block_indices)
            try:
                with nvtx_range(lambda: f"kvswap {self._what} {job_id}: {len(gpu.block_ids)} blocks"):
                    while not self._submit(self._map, job, lists):
                        self._make_room(job)
            except TimeoutError as late:
                job.error = late
            except Exception as broken:
                if not job.transfers:
                    raise
                job.error = broken  # a part of the job runs: the job ends as failed
            except BaseException as broken:
                job.error = broken
                if job.transfers:
                    self._append(job)
                raise
            self._append(job)
        if job.error is not None:
            _logger.error("job %s could not be queued: %s", job_id, job.error)
        return True

    def _groups_of(self, sizes: Sequence[int], indices: Sequence[int], layered: bool) -> tuple[Any, Any]:
        """The same for the map, which has the groups twice if blocks are cut: whole, and in parts. They are groups of
        one map, so that their jobs are ordered and their failures known in common."""
        if not self._cut:
            return sizes, indices
        none = [0] * len(sizes)
        first, second = (none, sizes) if layered else (sizes, none)
        return [*first, *second], [*indices, *indices]

    def _append(self, job: Job) -> None:
        job.num_bytes = sum(transfer.nbytes for transfer in job.transfers)
        with self._lock:
            self._transfers.append(job)

    def _submit(self, target: AnyMap, job: Job, lists: tuple[Any, Any, Any, Any]) -> bool:
        """Submit the rest of a job. False: the queue is full, and the job continues later."""
        compute, options = self._compute(), self._options
        if isinstance(target, MemberMap):
            options = {"job": job.job_id}
        in_parts = job.layered and self._cut and self._options["path"] == "auto"
        try:
            transfers, job.next_part, error = target.submit(
                *lists,
                0 if self.gpu_to_cpu else 1,
                stream=self._stream,
                after=() if compute is None else compute,
                after_compute=compute is None,
                first=job.next_part,
                layer_events=job.layered,
                **(options if not in_parts else {**options, "path": _PATH_OF_PARTS}),
            )
        except _C.QueueFull:
            return False
        except _C.Error as failed:
            job.error = failed
            return True
        job.transfers += transfers
        if isinstance(error, _C.QueueFull):
            return False
        job.error = error
        return True

    def _places_of(self, group_sizes: Sequence[int]) -> tuple[int, Places] | None:
        has_blocks = tuple(int(size) > 0 for size in group_sizes)
        if has_blocks not in self._places:
            known = len(has_blocks) > max((group for group, _, _ in self._order), default=-1)
            self._places[has_blocks] = places_of(self._order, has_blocks) if known else None
        return self._places[has_blocks]

    def make_wait(self, job_id: int, tensors: Sequence[int] | None = None) -> None:
        """Work that is queued on the model's stream from now on waits for a job; it need not be collected yet.

        tensors: indices of GPU tensors: wait for these only, and for those before them, if the job was submitted with
          layer_events. With layer_parts they are indices of parts, numbered through all tensors. Where the model has no
          stream (on the host device), and for a job over several links, the calling thread waits.

        It gives order only. kvswap.Error: a failure that is known already. A job that is not there is no error, and
        nothing is waited for. TimeoutError, after wait_timeout, on the host device.
        """
        with self._lock:
            job = next((job for job in self._transfers if job.job_id == job_id), None)
        if job is None:
            return
        if isinstance(self._map, MemberMap):
            raise ValueError(
                f"job {job_id} is shared: it is not all queued on the device, so that no stream waits for it"
            )
        stream, failed = self._compute(), None
        for transfer, layer in waits_of(job.transfers, job.places, tensors if job.layered else None):
            try:
                if layer is None and (stream is None or isinstance(transfer, _C.ShareTransfer)):
                    transfer.wait(self.wait_timeout)
                elif stream is None:
                    wait_here(transfer, layer, self.wait_timeout)  # type: ignore[arg-type]
                elif layer is None:
                    transfer.make_wait(stream)
                else:
                    transfer.make_wait_layer(layer, stream)
            except _C.Error as error:  # the others are waited for in any case
                failed = failed or error
        try:
            if failed is not None:
                raise failed
        finally:
            del failed  # else this frame and the traceback hold each other, and all callers' frames

    def _make_room(self, job: Job) -> None:
        """Wait for the oldest transfer of this queue; if there is none, for room in the device. TimeoutError."""
        _counts.stalled(self)
        with self._lock:
            self._stats.stalls += 1
            waiting = [transfer for older in self._transfers for transfer in older.transfers]
        oldest = next((transfer for transfer in waiting + job.transfers if not transfer.done()), None)
        if oldest is not None:
            _wait(oldest, Deadline(self.wait_timeout), f"the oldest transfer before job {job.job_id}")
            return
        if self.wait_timeout is not None and time.monotonic() - job.submitted > self.wait_timeout:
            raise TimeoutError(f"there was no room for job {job.job_id} after {self.wait_timeout:g} s")
        time.sleep(0.0005)

    # -- collecting ---------------------------------------------------------------------------------------------------

    def get_finished(self) -> list[TransferResult]:
        """The jobs that have ended since the last call, in order of submission, each once. Never blocks."""
        if not self._transfers:  # as in most steps of an engine; a job that is being submitted has not ended
            return []
        ended: list[Job] = []
        with self._lock:
            while self._transfers and self._transfers[0].ended():
                ended.append(self._transfers.popleft())
            return [self._collect_locked(job) for job in ended]

    def _collect_locked(self, job: Job) -> TransferResult:
        error, seconds, stats = job.why_failed(), job.seconds(), self._stats
        dropped = self._not_stored_locked(job, error)
        error = None if dropped else error
        stats.jobs += 1
        stats.failed += error is not None
        stats.bytes += job.num_bytes if error is None else 0
        stats.device_seconds += seconds
        duration = time.monotonic() - job.submitted
        stats.queued_seconds += max(0.0, duration - seconds)
        _counts.job_ended(self, error is None, job.num_bytes, duration, seconds)
        for transfer in job.transfers:
            stats.paths[transfer.path] = stats.paths.get(transfer.path, 0) + 1
        if error is not None:
            _logger.error("job %s (%s to %s) failed: %s", job.job_id, *self.transfer_type, error)
        return TransferResult(job.job_id, error is None, job.num_bytes, seconds, self.transfer_type, error, dropped)

    def _not_stored_locked(self, job: Job, error: BaseException | None) -> dict[int, str]:
        """Of a store that failed only by blocks that do not fit their coded size: their chunks, and why."""
        coded = self._coded_map
        if job.groups is None or error is None or job.error is not None or coded is None:
            return {}
        if any(type(transfer.error) not in (_C.Error, type(None)) for transfer in job.transfers):
            return {}
        count, chunks = coded.not_stored(job.transfers, *job.groups)
        self._stats.not_stored += count
        _counts.not_stored(self, _WHY, count)
        return dict.fromkeys(sorted(chunks), _WHY)

    def wait(self, job_ids: Iterable[int], timeout: float | None = None) -> None:
        """Wait until these jobs have ended; get_finished() then returns their results. Unknown jobs are ignored.

        timeout: seconds for all jobs, None: wait_timeout. TimeoutError names the running job. A line is logged every
        ten seconds; Ctrl-C works.
        """
        wanted = set(job_ids)
        self._wait_for(lambda job: job.job_id in wanted, self._deadline(timeout))

    def drain(self, timeout: float | None = None) -> None:
        """Wait until all jobs have ended, before memory is freed (sleep mode); as wait(). The jobs remain to be
        collected."""
        self._wait_for(lambda _: True, self._deadline(timeout))

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self.wait_timeout if timeout is None else timeout)  # infinity: no limit

    def _wait_for(self, wanted: Callable[[Job], bool], deadline: Deadline) -> None:
        with self._lock:
            jobs = [job for job in self._transfers if wanted(job)]
        for job in jobs:
            for transfer in job.transfers:
                _wait(transfer, deadline, f"job {job.job_id} ({self.transfer_type[0]} to {self.transfer_type[1]})")

    def stats(self) -> HandlerStats:
        """A copy of the counters."""
        second_attempts = int(self._device.stats()["second_attempts"]) - self._second_attempts
        with self._lock:
            return replace(
                self._stats,
                paths=dict(self._stats.paths),
                unfinished=len(self._transfers),
                second_attempts=second_attempts,
            )

    # -- closing ------------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = 60.0) -> None:
        """Refuse new jobs, wait for the submitted ones, and release the tensors. A second call does nothing.

        timeout: seconds, None: wait_timeout. After TimeoutError the jobs go on, and shutdown() may be called again.
        Uncollected jobs are dropped, and logged if they failed.
        """
        deadline = self._deadline(timeout)
        self._closed = True
        left = deadline.left()
        if not self._submitting.acquire(timeout=-1 if left is None else min(left, threading.TIMEOUT_MAX)):
            raise TimeoutError(f"a job is still being submitted after {deadline.timeout:g} s")
        try:
            self._wait_for(lambda _: True, deadline)
            SingleDirectionOffloadingHandler.get_finished(self)  # a subclass's may raise
            shared, self._shared, self._map, self._stream = self._shared, None, None, None
            self.src_tensors, self.dst_tensors = [], []
        finally:
            self._submitting.release()
        if shared is not None:
            give_map(shared)


def current_stream_of(tensor: Any, device: _C.Device) -> Callable[[], Any]:
    """A callable that returns the model's stream; None: the device's compute stream."""
    if not is_torch(tensor) or device.kind != "cuda":
        return lambda: None
    import torch

    where = tensor.device

    def current() -> Any:
        return torch.cuda.current_stream(where)

    return current
