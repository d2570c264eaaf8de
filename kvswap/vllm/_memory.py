"""Block-first host memory for vLLM's worker, instead of the worker's own tensor for each layer.

A worker with a shared region takes its tensors from the region; otherwise it allocates them one by one. Here it gets a
region that is one of kvswap's slabs. vLLM: vllm/v1/kv_offload/cpu/shared_offload_region.py and cpu/gpu_worker.py.

The worker asks for each tensor's bytes as they are on the GPU. Of coded blocks it gets those of the coded size.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from kvswap import _C
from kvswap._log import logger
from kvswap.offload._layout import device_of, is_torch
from kvswap.offload._slab import Slab

_logger = logger("kvswap.vllm")

_CLASS = "CPUOffloadingWorker"
_CHUNKS = ("num_cpu_chunks", "num_cpu_blocks")  # from 0.30 on, and before
_TAKEN = {"self", "kv_caches", "blocks_per_chunk", *_CHUNKS, "mmap_region", "canonical_layout"}


class SlabRegion:
    """A slab with the methods of vLLM's SharedOffloadRegion that the worker uses."""

    def __init__(self, slab: Slab, torch: bool) -> None:
        self.is_pinned = slab.memory.pinned
        self.rows: Callable[[], list[Any]] = lambda: slab.rows(torch)  # for vLLM's own handlers, which know no others
        self._views = iter(slab.tensors(torch))

    def create_next_view(self, nbytes: int) -> Any:
        """The next tensor's chunks."""
        del nbytes  # the slab was made of the same pages
        return next(self._views)

    create_next_worker_view = create_next_view  # from 0.30 on

    def cleanup(self) -> None:
        """Called after the handlers have ended. The memory is freed with the last tensor."""
        self._views = iter(())
        self.rows = list


def worker_class(gpu_worker: Any) -> Any:
    """The class that allocates host memory; None: this release has none that is known."""
    return getattr(gpu_worker, _CLASS, None)


def why_not(worker: Any) -> str | None:
    """Why vLLM's own allocation must stay; None: it can be replaced."""
    if worker is None:
        return f"its gpu_worker has no {_CLASS}"
    taken = inspect.signature(worker.__init__).parameters
    unknown = sorted(set(taken) - _TAKEN)
    if unknown:
        return f"its {worker.__name__} takes {', '.join(unknown)}"
    if "mmap_region" not in taken or not any(name in taken for name in _CHUNKS):
        return f"its {worker.__name__} takes no region"
    return None


_VIEWS = ("create_next_worker_view", "create_next_view")  # from 0.30 on, and before


def give_block_views(region: Any, pages: Sequence[int], factor: int) -> None:
    """A worker's cell of vLLM's region has the blocks of a chunk, each with the bytes of all tensors. pages: bytes of
    each tensor, in the order in which the worker asks for them."""
    name = next(name for name in _VIEWS if hasattr(region, name))
    whole = getattr(region, name)(region._worker_area_end - region._worker_offset)
    blocks = whole.reshape(len(whole), factor, -1)
    if sum(pages) > blocks.shape[-1]:
        raise ValueError(f"a block has {sum(pages)} bytes, and a cell of the region {blocks.shape[-1]} for it")
    ends = list(accumulate(pages))
    views = deque(blocks[..., end - nbytes : end] for end, nbytes in zip(ends, pages, strict=True))

    def create_next_view(nbytes: int) -> Any:
        del nbytes
        view = views.popleft()  # a region whose views are held cannot be unmapped
        return view[:, 0] if factor == 1 else view

    setattr(region, name, create_next_view)


def _register(region: Any, device: _C.Device) -> None:
    """On a host device, where vLLM does not pin the region: codecs and members must know which side is the host's."""
    ptr, cleanup = region._base.data_ptr(), region.cleanup
    device.register(ptr, region._base.nbytes)

    def unregister() -> None:
        if vars(region).pop("cleanup", None) is not None:
            device.unregister(ptr)
        cleanup()

    region.cleanup = unregister


def _slab_for(arguments: dict[str, Any], given: Sequence[int] | None) -> SlabRegion | None:
    """A region for the worker; None if the worker has one, or allocates nothing."""
    caches = arguments["kv_caches"]
    factor = arguments["blocks_per_chunk"]
    chunks = next(arguments[name] for name in _CHUNKS if name in arguments)
    if (
        arguments.get("mmap_region") is not None
        or arguments.get("canonical_layout")
        or chunks < 1
        or not caches.tensors
    ):
        return None
    first = caches.tensors[0].tensor
    pages = [entry.page_size_bytes for entry in caches.tensors] if given is None else given
    try:
        slab = Slab(_C.Device(device_of(first)), pages, caches.group_data_refs, chunks, factor)
    except MemoryError as error:
        if given is not None:
            raise
        _logger.warning("host memory is left to vLLM, a tensor at a time: %s", error)
        return None
    _logger.info(
        "host memory is block-first: %d chunks of %d blocks, %d tensors and %d bytes a block, %.2f GB in one piece",
        *(chunks, factor, len(pages), slab.block_stride, slab.memory.nbytes / 1e9),
    )
    return SlabRegion(slab, is_torch(first))


def allocating(
    init: Callable[..., None],
    made: Callable[[SlabRegion], None],
    pages: Sequence[int] | None = None,
    shared: Callable[[Any], None] | None = None,
    own: Callable[[dict[str, Any]], SlabRegion] | None = None,
) -> Callable[..., None]:
    """Wrap a worker's __init__ to allocate block-first. made: called with the worker's new region. pages: host bytes of
    a block of each tensor, if they are coded, or if the blocks of a chunk lie one behind the other. shared: called with
    vLLM's region, if ranks share loads. own: makes the region of a worker that is called with these arguments, in the
    place of a slab."""
    signature = inspect.signature(init)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        theirs = call.arguments.get("mmap_region")
        if theirs is not None and (pages is not None or shared is not None):
            device = _C.Device(device_of(call.arguments["kv_caches"].tensors[0].tensor))
            if device.kind == "host":
                _register(theirs, device)
            if pages is not None:
                give_block_views(theirs, pages, call.arguments["blocks_per_chunk"])
            if shared is not None:
                shared(theirs)
        region = _slab_for(call.arguments, pages) if own is None else own(call.arguments)
        if region is not None:
            call.arguments["mmap_region"] = region
            made(region)
        init(*call.args, **call.kwargs)

    return __init__
