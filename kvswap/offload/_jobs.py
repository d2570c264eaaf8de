"""One direction of offloading: a queue of jobs. What runs per block is in kvswap._C.OffloadMap."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvswap import _C
from kvswap.offload._layout import SharedMap, device_of, give_map, is_torch, make_layout, take_map
from kvswap.offload._nvtx import ranges
from kvswap.offload._specs import TransferResult

_logger = logging.getLogger("kvswap.offload")

_SLICE = 10.0  # seconds: how often a wait that goes on says so
_SHORTEST = 1e-9  # seconds: of a job that takes the device no time that it could measure


@dataclass(eq=False)
class Job:
    """A job that was submitted and not yet collected."""

    job_id: int
    transfers: list[_C.Transfer]
    num_bytes: int
    submitted: float  # time.monotonic()
    error: BaseException | None = None  # of what could not be queued
    next_part: int = 0  # where OffloadMap.submit() has to go on

    def ended(self) -> bool:
        """Whether all of it has, however. Never blocks."""
        return all(transfer.done() for transfer in reversed(self.transfers))

    def why_failed(self) -> BaseException | None:
        """None where all of it is done; of a job that has ended."""
        errors = (transfer.error for transfer in self.transfers)
        return self.error or next((error for error in errors if error is not None), None)

    def seconds(self) -> float:
        """The device's time."""
        return max(_SHORTEST, sum(transfer.elapsed or 0.0 for transfer in self.transfers))


@dataclass
class HandlerStats:
    """What a handler's jobs came to.

    jobs, failed, bytes, device_seconds: of collected jobs; bytes of those that succeeded. queued_seconds: from
    submission until they were seen to have ended, less the device's time. paths: transfers by the path they took.
    stalls: how often submitting had to wait since the queue was full. second_attempts: of the device, by anybody: what
    one path gave up and another did.
    """

    jobs: int = 0
    failed: int = 0
    unfinished: int = 0
    bytes: int = 0
    device_seconds: float = 0.0
    queued_seconds: float = 0.0
    stalls: int = 0
    second_attempts: int = 0
    paths: dict[str, int] = field(default_factory=dict)


class Deadline:
    """One time limit for several waits; None: none."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self.end = None if timeout is None else time.monotonic() + timeout

    def left(self) -> float | None:
        return None if self.end is None else max(0.0, self.end - time.monotonic())


def _wait(transfer: _C.Transfer, deadline: Deadline, what: str) -> None:
    """Until it ended, however. Says every ten seconds that it goes on; TimeoutError."""
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
                raise  # in the child of a fork it never ends
            return  # its result tells


class SingleDirectionOffloadingHandler:
    """Moves blocks one way, in the order of submission; vLLM's class of this name, on kvswap.

    gpu_tensors, cpu_tensors: as many, first dimension blocks, of bytes that lie together: (num_gpu_blocks, page) and
      (num_cpu_blocks, page * block_size_factor), or (num_cpu_blocks, block_size_factor, page). Rows may have padding
      or other tensors' bytes between them, and in the last form blocks too. They are held until shutdown().
    block_size_factor (blocks_per_chunk): how many GPU blocks a CPU block (a chunk) holds.
    kv_cache_groups_data_refs (layer_refs_per_group): a list of CanonicalKVCacheRef for each group of layers.
    gpu_to_cpu: True stores, False loads.
    mmap_region: None, or what the CPU tensors lie in: its cleanup() is called when the last handler of these tensors
      was shut down.
    canonical_layout: each reference has a mapping, which says where the page's fragments lie on the host.
    device: Device, its name, or None: the GPU tensors' (host:0 where they lie in the process's memory).
    compute_stream: a callable that gives the stream on which the model runs, asked at each job; None: torch's current
      stream where the tensors are torch's, else the device's (Device.set_compute_stream).
    wait_timeout: seconds after which wait() gives up where it is called without a limit; None: never.
    remember_failures: a load of what a failed store should have written fails, until it is stored again. Turn it off
      where others write to the CPU tensors as well.
    path, priority, max_ctas, pace_gbps: as kvswap.swap_blocks_batch takes them.

    Order. A job starts after all that the compute stream holds when it is submitted, after the jobs of its handler that
    were submitted before, and after those transfers of any handler of the same tensors that touch the same blocks. When
    transfer_async() returns, all of it is queued on the device. Several handlers of one direction are several queues.

    Failures. Wrong arguments are ValueError, IndexError or TypeError, and nothing is queued. What the device refuses is
    a TransferResult with success=False and the reason in `error`, in the job's place.

    Threads: any thread may call anything; jobs of one handler are queued one at a time.
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
        device: _C.Device | str | None = None,
        compute_stream: Callable[[], Any] | None = None,
        wait_timeout: float | None = None,
        remember_failures: bool = True,
        path: str = "auto",
        priority: str | None = None,
        max_ctas: int | None = None,
        pace_gbps: float | None = None,
    ) -> None:
        del host_memory_is_pinned  # found out by itself
        factor = block_size_factor if block_size_factor is not None else blocks_per_chunk
        refs = kv_cache_groups_data_refs if kv_cache_groups_data_refs is not None else layer_refs_per_group
        if factor is None or refs is None:
            raise TypeError("block_size_factor and kv_cache_groups_data_refs are needed")
        if factor < 1:
            raise ValueError(f"block_size_factor is {factor}: must be at least 1")
        if not gpu_tensors:
            raise ValueError("gpu_tensors is empty: there must be at least one")
        self._device = device if isinstance(device, _C.Device) else _C.Device(device or device_of(gpu_tensors[0]))
        layout = make_layout(
            self._device.name,
            gpu_tensors,
            cpu_tensors,
            int(factor),
            refs,
            canonical=canonical_layout,
            remember_failures=remember_failures,
        )
        self.gpu_to_cpu = bool(gpu_to_cpu)
        self.blocks_per_chunk = int(factor)
        self.kv_cache_groups_data_refs = self.layer_refs_per_group = refs
        self.transfer_type = ("GPU", "CPU") if gpu_to_cpu else ("CPU", "GPU")
        self.wait_timeout = wait_timeout
        self._second_attempts = int(self._device.stats()["second_attempts"])
        sides = list(gpu_tensors), list(cpu_tensors)
        self.src_tensors, self.dst_tensors = sides if gpu_to_cpu else sides[::-1]
        self._compute = compute_stream or _current_stream(gpu_tensors[0], self._device)
        self._options: dict[str, Any] = {
            "path": path,
            "priority": priority,
            "max_ctas": max_ctas,
            "pace_gbps": pace_gbps,
        }
        self._stream: _C.Stream | None = _C.Stream(self._device)  # carries waits only: this queue's name
        self._what = "store" if gpu_to_cpu else "load"
        self._range = ranges(self._device.kind)
        self._submitting = threading.Lock()
        self._lock = threading.Lock()
        self._transfers: deque[Job] = deque()  # guarded by _lock
        self._stats = HandlerStats()  # guarded by _lock
        self._closed = False
        # Last: the map counts its users, and one that was never made would not give it back.
        shared = take_map(layout, self._device, (tuple(gpu_tensors), tuple(cpu_tensors)), mmap_region)
        self._shared: SharedMap | None = shared
        self._map: _C.OffloadMap | None = shared.map

    @property
    def device(self) -> _C.Device:
        """Where its jobs run."""
        return self._device

    # -- submitting ---------------------------------------------------------------------------------------------------

    def transfer_async(self, job_id: int, spec: Any, dst_spec: Any = None) -> bool:
        """Queue a job; True once all of it is on the device, or it is known to have failed and get_finished() says so.

        job_id: told back by get_finished(); unique among jobs that were not collected.
        spec: (source, destination), or the source, followed by the destination: GPULoadStoreSpec and CPULoadStoreSpec,
          in the order of this handler's direction.

        ValueError, IndexError, TypeError: wrong lists or ids, which are named; nothing was queued. Where more jobs are
        unfinished than the queue holds (128 transfers), it waits for the oldest.
        """
        source, target = spec if dst_spec is None else (spec, dst_spec)
        gpu, cpu = (source, target) if self.gpu_to_cpu else (target, source)
        with self._submitting:
            if self._closed or self._map is None:
                raise _C.Error("the offloading handler was shut down")
            with self._lock:
                if any(job.job_id == job_id for job in self._transfers):
                    raise ValueError(f"job {job_id} was submitted before, and not collected yet")
            job = Job(job_id, [], 0, time.monotonic())
            lists = (gpu.block_ids, cpu.block_ids, gpu.group_sizes, gpu.block_indices)
            try:
                with self._range(f"kvswap {self._what} {job_id}: {len(gpu.block_ids)} blocks"):
                    while not self._submit(self._map, job, lists):
                        self._make_room(job)
            except TimeoutError as late:
                job.error = late
            except Exception as broken:
                if not job.transfers:
                    raise
                job.error = broken  # a part of it runs: it is a job, and ends as one that failed
            except BaseException as broken:
                job.error = broken
                if job.transfers:
                    self._append(job)
                raise
            self._append(job)
        if job.error is not None:
            _logger.error("job %s could not be queued: %s", job_id, job.error)
        return True

    def _append(self, job: Job) -> None:
        job.num_bytes = sum(transfer.nbytes for transfer in job.transfers)
        with self._lock:
            self._transfers.append(job)

    def _submit(self, target: _C.OffloadMap, job: Job, lists: tuple[Any, Any, Any, Any]) -> bool:
        """False: the queue is full, and the job has to go on later."""
        compute = self._compute()
        try:
            transfers, job.next_part, error = target.submit(
                *lists,
                0 if self.gpu_to_cpu else 1,
                stream=self._stream,
                after=() if compute is None else compute,
                after_compute=compute is None,
                first=job.next_part,
                **self._options,
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

    def _make_room(self, job: Job) -> None:
        """Wait for the oldest transfer of this queue; or, where it has none, for others to leave room. TimeoutError."""
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
        """The jobs that have ended since the last call, in order, each once. Never blocks."""
        ended: list[Job] = []
        with self._lock:
            while self._transfers and self._transfers[0].ended():
                ended.append(self._transfers.popleft())
            return [self._collect_locked(job) for job in ended]

    def _collect_locked(self, job: Job) -> TransferResult:
        error, seconds, stats = job.why_failed(), job.seconds(), self._stats
        stats.jobs += 1
        stats.failed += error is not None
        stats.bytes += job.num_bytes if error is None else 0
        stats.device_seconds += seconds
        stats.queued_seconds += max(0.0, time.monotonic() - job.submitted - seconds)
        for transfer in job.transfers:
            stats.paths[transfer.path] = stats.paths.get(transfer.path, 0) + 1
        if error is not None:
            _logger.error("job %s (%s to %s) failed: %s", job.job_id, *self.transfer_type, error)
        return TransferResult(job.job_id, error is None, job.num_bytes, seconds, self.transfer_type, error)

    def wait(self, job_ids: Iterable[int], timeout: float | None = None) -> None:
        """Until these jobs have ended, however; get_finished() tells how. Jobs that are not known are not waited for.

        timeout: seconds for all of them, None: wait_timeout. TimeoutError names the job that goes on. Every ten seconds
        the log says that it waits; Ctrl-C works.
        """
        wanted = set(job_ids)
        self._wait_for(lambda job: job.job_id in wanted, self._deadline(timeout))

    def drain(self, timeout: float | None = None) -> None:
        """Until all jobs have ended, before memory is taken away (sleep mode); as wait(). They are still collected."""
        self._wait_for(lambda _: True, self._deadline(timeout))

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self.wait_timeout if timeout is None else timeout)

    def _wait_for(self, wanted: Callable[[Job], bool], deadline: Deadline) -> None:
        with self._lock:
            jobs = [job for job in self._transfers if wanted(job)]
        for job in jobs:
            for transfer in job.transfers:
                _wait(transfer, deadline, f"job {job.job_id} ({self.transfer_type[0]} to {self.transfer_type[1]})")

    def stats(self) -> HandlerStats:
        """A copy of what it has done so far."""
        second_attempts = int(self._device.stats()["second_attempts"]) - self._second_attempts
        with self._lock:
            return replace(
                self._stats,
                paths=dict(self._stats.paths),
                unfinished=len(self._transfers),
                second_attempts=second_attempts,
            )

    # -- the end ------------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = 60.0) -> None:
        """Take no more jobs, wait for those submitted, and let go of the tensors; again and again if wanted.

        timeout: seconds, None: wait_timeout. TimeoutError leaves everything as it is but for new jobs, and shutdown()
        may be called again. Jobs that were not collected are forgotten, and logged if they failed.
        """
        deadline = self._deadline(timeout)
        self._closed = True
        left = deadline.left()
        if not self._submitting.acquire(timeout=-1 if left is None else min(left, threading.TIMEOUT_MAX)):
            raise TimeoutError(f"a job is still being submitted after {deadline.timeout:g} s")
        try:
            self._wait_for(lambda _: True, deadline)
            SingleDirectionOffloadingHandler.get_finished(self)  # which a class may have made raise
            shared, self._shared, self._map, self._stream = self._shared, None, None, None
            self.src_tensors, self.dst_tensors = [], []
        finally:
            self._submitting.release()
        if shared is not None:
            give_map(shared)


def _current_stream(tensor: Any, device: _C.Device) -> Callable[[], Any]:
    """Who says on which stream the model runs; None: the device's compute stream."""
    if not is_torch(tensor) or device.kind != "cuda":
        return lambda: None
    import torch

    where = tensor.device

    def current() -> Any:
        return torch.cuda.current_stream(where)

    return current
