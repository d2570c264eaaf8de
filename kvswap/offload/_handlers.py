"""Both directions of a cache: the host's memory for it, and a queue a direction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from kvswap import _C
from kvswap.offload._jobs import Deadline, HandlerStats, SingleDirectionOffloadingHandler
from kvswap.offload._layout import device_of, in_pages, is_torch
from kvswap.offload._slab import Slab
from kvswap.offload._specs import CanonicalKVCaches, TransferResult


def _canonical_page(kv_caches: CanonicalKVCaches, tensor: int) -> int:
    """Bytes that a block of this tensor has on the host, by its mappings."""
    refs = [ref for group in kv_caches.group_data_refs for ref in group if ref.tensor_idx == tensor]
    pages = [ref.mapping.canonical_page_size_bytes for ref in refs if ref.mapping is not None]
    if not pages or len(pages) < len(refs):
        raise ValueError(f"tensor {tensor}: the canonical layout needs a mapping in each reference to it")
    return max(pages)


def _view_of(region: Any, nbytes: int, canonical: bool) -> Any:
    """Chunks of the next tensor in a shared region, by the name that its release of vLLM has for it."""
    names = ("create_next_canonical_view",) if canonical else ("create_next_worker_view", "create_next_view")
    for name in names:
        if hasattr(region, name):
            return getattr(region, name)(nbytes)
    raise TypeError(f"mmap_region has none of {', '.join(names)}: its release of vLLM is not known")


class _Region:
    """A shared region, pinned if nobody did."""

    def __init__(self, region: Any, device: _C.Device) -> None:
        self._region, self._device = region, device
        self._registered: int | None = None
        base = getattr(region, "_base", None)
        if device.kind == "cuda" and base is not None and not getattr(region, "is_pinned", False):
            device.register(base.data_ptr(), base.nbytes)
            self._registered = base.data_ptr()

    def unpin(self) -> None:
        ptr, self._registered = self._registered, None
        if ptr is not None:
            self._device.unregister(ptr)

    def cleanup(self) -> None:
        try:
            self.unpin()
        finally:  # a device that is lost unregisters nothing, and the region would outlive the process
            self._region.cleanup()


def make_handlers(
    kv_caches: CanonicalKVCaches,
    block_size_factor: int,
    num_cpu_blocks: int,
    mmap_region: Any,
    directions: Sequence[bool],
    *,
    canonical_layout: bool = False,
    device: _C.Device | str | None = None,
    **options: Any,
) -> list[SingleDirectionOffloadingHandler]:
    """A handler a direction (True: to the host), over memory that is allocated here or taken from the region.

    Until it returns the region is the caller's: where it raises, nothing that it registered stays so.
    """
    if not kv_caches.tensors:
        raise ValueError("kv_caches has no tensors")
    first = kv_caches.tensors[0].tensor
    target = device if isinstance(device, _C.Device) else _C.Device(device or device_of(first))
    with ExitStack() as undo:
        shared = None if mmap_region is None else _Region(mmap_region, target)
        if shared is not None:
            undo.callback(shared.unpin)
        gpu_tensors, pages = [], []
        for i, entry in enumerate(kv_caches.tensors):
            gpu_tensors.append(in_pages(entry.tensor, entry.page_size_bytes, f"tensors[{i}]"))
            pages.append(_canonical_page(kv_caches, i) if canonical_layout else entry.page_size_bytes)
        if mmap_region is not None:
            cpu_tensors = [_view_of(mmap_region, page * block_size_factor, canonical_layout) for page in pages]
        else:
            slab = Slab(target, pages, kv_caches.group_data_refs, num_cpu_blocks, block_size_factor)
            cpu_tensors = slab.tensors(is_torch(first))
        handlers = [
            SingleDirectionOffloadingHandler(
                gpu_tensors,
                cpu_tensors,
                block_size_factor,
                kv_caches.group_data_refs,
                gpu_to_cpu,
                shared,
                canonical_layout=canonical_layout,
                device=target,
                **options,
            )
            for gpu_to_cpu in directions
        ]
        undo.pop_all()
        return handlers


class CpuGpuOffloadingHandlers:
    """Both directions of a cache: .gpu_to_cpu_handler and .cpu_to_gpu_handler.

    kv_caches: CanonicalKVCaches; its tensors are seen as (blocks, page_size_bytes) and held.
    block_size_factor: GPU blocks a CPU block holds. num_cpu_blocks: how many CPU blocks there are to be.
    mmap_region: None: memory is allocated, pinned where there is a GPU, all tensors of a block together (see below).
      Else vLLM's shared region: views of it are taken, it is registered if it was not, and cleaned up when both
      handlers were shut down.
    options: as SingleDirectionOffloadingHandler takes them.

    What is allocated is one piece of memory, all tensors of a block together and a chunk's blocks one behind the other:
    a block is one long run, wherever its chunk lies. The CPU tensors are views of it, (chunks, page_size_bytes), or
    (chunks, block_size_factor, page_size_bytes) where the factor is above 1.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        block_size_factor: int,
        num_cpu_blocks: int,
        mmap_region: Any = None,
        **options: Any,
    ) -> None:
        self.gpu_to_cpu_handler, self.cpu_to_gpu_handler = make_handlers(
            kv_caches, block_size_factor, num_cpu_blocks, mmap_region, (True, False), **options
        )


class OffloadingWorker:
    """All transfers of a cache, as newer releases of vLLM ask for them: stores, loads, and loads that must not queue
    behind other loads.

    kv_caches, mmap_region, options: as CpuGpuOffloadingHandlers. blocks_per_chunk, num_cpu_chunks: GPU blocks a chunk,
    and chunks on the host. canonical_layout: the references' mappings say where a page lies on the host.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int | None = None,
        num_cpu_chunks: int | None = None,
        mmap_region: Any = None,
        canonical_layout: bool = False,
        *,
        block_size_factor: int | None = None,
        num_cpu_blocks: int | None = None,
        **options: Any,
    ) -> None:
        factor = blocks_per_chunk if blocks_per_chunk is not None else block_size_factor
        chunks = num_cpu_chunks if num_cpu_chunks is not None else num_cpu_blocks
        if factor is None or chunks is None:
            raise TypeError("blocks_per_chunk and num_cpu_chunks are needed")
        self._store_handler, self._load_handler, self._expedited_load_handler = make_handlers(
            kv_caches, factor, chunks, mmap_region, (True, False, False), canonical_layout=canonical_layout, **options
        )

    @property
    def handlers(self) -> tuple[SingleDirectionOffloadingHandler, ...]:
        """Stores, loads, expedited loads."""
        return self._store_handler, self._load_handler, self._expedited_load_handler

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """GPU blocks to chunks of the host; as SingleDirectionOffloadingHandler.transfer_async."""
        return self._store_handler.transfer_async(job_id, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Chunks of the host to GPU blocks. expedited: in a queue of its own."""
        handler = self._expedited_load_handler if expedited else self._load_handler
        return handler.transfer_async(job_id, src_spec, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        """Jobs that have ended since the last call, each once. Never blocks."""
        return [result for handler in self.handlers for result in handler.get_finished()]

    def wait(self, job_ids: Iterable[int], timeout: float | None = None) -> None:
        """Until these have ended, however; as SingleDirectionOffloadingHandler.wait."""
        wanted, deadline = set(job_ids), Deadline(timeout)
        for handler in self.handlers:
            handler.wait(wanted, deadline.left())

    def drain(self, timeout: float | None = None) -> None:
        """Until all have ended; they are still to be collected."""
        deadline = Deadline(timeout)
        for handler in self.handlers:
            handler.drain(deadline.left())

    def stats(self) -> dict[str, HandlerStats]:
        """Of each queue."""
        return dict(zip(("store", "load", "expedited_load"), (h.stats() for h in self.handlers), strict=True))

    def shutdown(self, timeout: float | None = 60.0) -> None:
        """Drain all queues and let go of the memory; idempotent. The first error is raised once all were tried."""
        first: BaseException | None = None
        deadline = Deadline(timeout)
        for handler in self.handlers:
            try:
                handler.shutdown(deadline.left())
            except (TimeoutError, _C.Error) as error:
                first = first or error
        if first is not None:
            raise first
