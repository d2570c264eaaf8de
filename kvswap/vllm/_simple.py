"""kvswap's transfers under vLLM's SimpleCPUOffloadConnector (vllm/v1/simple_kv_offload/worker.py, 0.26 to 0.33).

CopyBackend takes the place of vLLM's DmaCopyBackend (copy_backend.py), by the same calls. What differs:

- Failures are told. vLLM's backend copies in a thread of its own; an error ends the thread, and the events of all later
  copies never come. Here a wrong argument raises in launch_copy(), and a copy that fails raises when vLLM asks for its
  event. The connector has no way to report a failed block to the scheduler, so that the engine ends, with the reason.
- Loads are ordered behind the steps before the present one. vLLM starts a load without waiting for the GPU, while an
  earlier step may still write to the block that the load fills, if its request has ended meanwhile.
- A store and a load of the same block are ordered on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvswap import _C
from kvswap.offload import (
    CanonicalKVCacheRef,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    SingleDirectionOffloadingHandler,
    TransferResult,
)
from kvswap.offload._jobs import current_stream_of
from kvswap.offload._layout import blocks_of

_WAIT_TIMEOUT = 300.0  # seconds, of vLLM's wait for all copies before blocks of a preempted request are used again
_END_TIMEOUT = 5.0  # seconds, as vLLM's shutdown()


class Copy:
    """What vLLM keeps as the event of one copy."""

    def __init__(self, queue: _Queue, job_id: int) -> None:
        self._queue, self._job_id = queue, job_id
        self._result: TransferResult | None = None

    def query(self) -> bool:
        """Whether the copy has ended. Never blocks. kvswap.Error: it has failed."""
        if self._result is None:
            self._result = self._queue.result_of(self._job_id)
        if self._result is None:
            return False
        if not self._result.success:
            raise _C.Error(
                f"{self._queue.what} {self._job_id} failed: {self._result.error}. SimpleCPUOffloadConnector cannot "
                "report a failed block, so the engine has to end; KVSwapConnector goes on in such a case"
            ) from self._result.error
        return True

    def synchronize(self) -> None:
        """Wait for the end. TimeoutError after five minutes; kvswap.Error as query()."""
        if self._result is None:
            self._queue.handler.wait({self._job_id})
        self.query()


class _Queue:
    """The copies of one direction. One thread calls, vLLM's worker."""

    def __init__(self, handler: SingleDirectionOffloadingHandler) -> None:
        self.handler, self.what = handler, "store" if handler.gpu_to_cpu else "load"
        self._submitted = 0
        self._results: dict[int, TransferResult] = {}  # ended, and not asked for yet

    def submit(self, gpu_blocks: Sequence[int], cpu_blocks: Sequence[int]) -> Copy:
        pair = GPULoadStoreSpec(gpu_blocks, [len(gpu_blocks)], [0]), CPULoadStoreSpec(cpu_blocks)
        self._submitted += 1
        self.handler.transfer_async(self._submitted, pair if self.handler.gpu_to_cpu else pair[::-1])
        return Copy(self, self._submitted)

    def result_of(self, job_id: int) -> TransferResult | None:
        for result in self.handler.get_finished():
            self._results[result.job_id] = result
        return self._results.pop(job_id, None)


class CopyBackend:
    """Copies blocks between vLLM's GPU and CPU tensors: DmaCopyBackend's calls.

    One thread calls, vLLM's worker. Copies of one direction start in the order of their calls.
    """

    def __init__(self) -> None:
        self._store: _Queue | None = None
        self._load: _Queue | None = None
        self._current: Callable[[], Any] = lambda: None
        self._before: _C.Event | None = None  # the end of the steps before the present one
        self._noted = False

    def init(
        self,
        gpu_caches: Mapping[str, Any],
        cpu_caches: Mapping[str, Any],
        device: Any,
        load_stream: Any,
        store_stream: Any,
    ) -> None:
        """Take the tensors, by equal names: (blocks, bytes of a block) each. The streams are vLLM's own and not used.

        ValueError: names or shapes differ.
        """
        del device, load_stream, store_stream
        if list(gpu_caches) != list(cpu_caches):
            raise ValueError(f"gpu_caches has {list(gpu_caches)}, but cpu_caches has {list(cpu_caches)}")
        gpu, cpu = list(gpu_caches.values()), list(cpu_caches.values())
        pages = [blocks_of(tensor, name).page for name, tensor in gpu_caches.items()]
        refs = [[CanonicalKVCacheRef(i, page) for i, page in enumerate(pages)]]
        store = SingleDirectionOffloadingHandler(gpu, cpu, 1, refs, True, wait_timeout=_WAIT_TIMEOUT)
        self._current = current_stream_of(gpu[0], store.device)
        self._before = _C.Event(store.device, timing=False)
        load = SingleDirectionOffloadingHandler(
            gpu, cpu, 1, refs, False, wait_timeout=_WAIT_TIMEOUT, compute_stream=self._loads_start_after
        )
        self._store, self._load = _Queue(store), _Queue(load)

    @property
    def handlers(self) -> tuple[SingleDirectionOffloadingHandler, ...]:
        """Stores, loads; empty before init()."""
        return tuple(queue.handler for queue in (self._store, self._load) if queue is not None)

    def _loads_start_after(self) -> Any:
        return self._before if self._noted else self._current()

    def before_step(self) -> None:
        """The model's next step is about to be queued: loads launched in it wait for the steps before it alone."""
        stream = self._current()
        if stream is not None and self._before is not None:
            self._before.record(stream)
            self._noted = True

    def launch_copy(
        self,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
        wait_event: Any = None,
    ) -> None:
        """Queue a copy of src_blocks to dst_blocks and append (event_idx, its Copy) to events_list.

        A store starts after the work that torch's current stream has (wait_event was recorded there just now); a load
        after that of before_step(). ValueError, IndexError: wrong block numbers; nothing was queued.
        """
        del wait_event
        queue = self._store if is_store else self._load
        if queue is None:
            raise _C.Error("launch_copy() before init(), or after shutdown()")
        if len(src_blocks) != len(dst_blocks):
            raise ValueError(f"src_blocks has {len(src_blocks)} blocks, but dst_blocks has {len(dst_blocks)}")
        gpu, cpu = (src_blocks, dst_blocks) if is_store else (dst_blocks, src_blocks)
        copy = queue.submit(gpu, cpu)
        if not is_store:
            self._noted = False
        events_list.append((event_idx, copy))

    def shutdown(self) -> None:
        """Wait for all copies, five seconds at most (TimeoutError), and release the tensors. A second call does
        nothing."""
        for handler in self.handlers:
            handler.shutdown(_END_TIMEOUT)
        self._store = self._load = None
