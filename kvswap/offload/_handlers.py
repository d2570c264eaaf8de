"""Both directions of a cache: its host memory, and a queue for each direction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from kvswap import _C
from kvswap.offload._jobs import Deadline, HandlerStats, SingleDirectionOffloadingHandler
from kvswap.offload._layout import device_of, in_pages, is_torch
from kvswap.offload._slab import Slab
from kvswap.offload._specs import CanonicalKVCaches, TransferResult

if TYPE_CHECKING:
    from kvswap.typing import DeviceLike


def _canonical_page(kv_caches: CanonicalKVCaches, tensor: int) -> int:
    """Bytes of a block of this tensor on the host, from its mappings."""
    refs = [ref for group in kv_caches.group_data_refs for ref in group if ref.tensor_idx == tensor]
    pages = [ref.mapping.canonical_page_size_bytes for ref in refs if ref.mapping is not None]
    if not pages or len(pages) < len(refs):
        raise ValueError(f"tensor {tensor}: the canonical layout needs a mapping in each reference to it")
    return max(pages)


def _view_of(region: Any, nbytes: int, canonical: bool) -> Any:
    """The next tensor's chunks in a shared region. The method's name depends on vLLM's release."""
    names = ("create_next_canonical_view",) if canonical else ("create_next_worker_view", "create_next_view")
    for name in names:
        if hasattr(region, name):
            return getattr(region, name)(nbytes)
    raise TypeError(f"mmap_region has none of {', '.join(names)}: its release of vLLM is not known")


class _Region:
    """A shared region, registered here if vLLM has not pinned it."""

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
        finally:  # also if unregistering fails on a lost device: else the region would outlive the process
            self._region.cleanup()


def make_handlers(
    kv_caches: CanonicalKVCaches,
    block_size_factor: int,
    num_cpu_blocks: int,
    mmap_region: Any,
    directions: Sequence[bool],
    *,
    canonical_layout: bool = False,
    device: DeviceLike | None = None,
    **options: Any,
) -> list[SingleDirectionOffloadingHandler]:
    """A handler for each direction (True: to the host), over memory allocated here or views of the region.

    If it raises, the caller still owns the region, and registrations are undone.
    """
    if not kv_caches.tensors:
        raise ValueError("kv_caches has no tensors")
    first = kv_caches.tensors[0].tensor
    device = device_of(first) if device is None else device
    target = device if isinstance(device, _C.Device) else _C.Device(device)
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
    """Both directions of a cache: .gpu_to_cpu_handler and .cpu_to_gpu_handler. vLLM's class of this name (to 0.24).

    kv_caches: CanonicalKVCaches; its tensors are held and viewed as (blocks, page_size_bytes).
    block_size_factor: GPU blocks in a CPU block (a chunk). num_cpu_blocks: number of chunks.
    mmap_region: None: host memory is allocated, pinned if there is a GPU. Else vLLM's shared region: the CPU tensors
      are views of it; it is registered if it was not, and cleaned up after both handlers are shut down.
    options: as for SingleDirectionOffloadingHandler.

    The allocated memory is block-first: all tensors of a block together, and a chunk's blocks contiguous, so that a
    block is one long run. The CPU tensors are views of it, (chunks, page_size_bytes), or
    (chunks, block_size_factor, page_size_bytes) if the factor is above 1.
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
    """All transfers of a cache: stores, loads, and expedited loads, which do not queue behind other loads. The worker
    of vLLM 0.26 and later.

    kv_caches, mmap_region, options: as CpuGpuOffloadingHandlers. blocks_per_chunk: GPU blocks in a chunk.
    num_cpu_chunks: chunks on the host. canonical_layout: the references' mappings give a page's place on the host.
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
        """GPU blocks to host chunks; as SingleDirectionOffloadingHandler.transfer_async."""
        return self._store_handler.transfer_async(job_id, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Host chunks to GPU blocks. expedited: use a separate queue."""
        handler = self._expedited_load_handler if expedited else self._load_handler
        return handler.transfer_async(job_id, src_spec, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        """Jobs that have ended since the last call, each once. Never blocks."""
        return [result for handler in self.handlers for result in handler.get_finished()]

    def wait(self, job_ids: Iterable[int], timeout: float | None = None) -> None:
        """Wait until these jobs have ended; as SingleDirectionOffloadingHandler.wait."""
        wanted, deadline = set(job_ids), Deadline(timeout)
        for handler in self.handlers:
            handler.wait(wanted, deadline.left())

    def drain(self, timeout: float | None = None) -> None:
        """Wait until all jobs have ended. They remain to be collected."""
        deadline = Deadline(timeout)
        for handler in self.handlers:
            handler.drain(deadline.left())

    def stats(self) -> dict[str, HandlerStats]:
        """The stats of each queue."""
        return dict(zip(("store", "load", "expedited_load"), (h.stats() for h in self.handlers), strict=True))

    def shutdown(self, timeout: float | None = 60.0) -> None:
        """Drain all queues and release the memory. A second call does nothing. Tries all queues, then raises the first
        error."""
        first: BaseException | None = None
        deadline = Deadline(timeout)
        for handler in self.handlers:
            try:
                handler.shutdown(deadline.left())
            except (TimeoutError, _C.Error) as error:
                first = first or error
        try:
            if first is not None:
                raise first
        finally:
            del first  # else this frame and the traceback hold each other, and all callers' frames
