"""A rank's caches in GPU and host memory, and the swaps between them.

The GPU caches are created here or opened from the engine. The host memory is one pinned allocation, block-first: a
host block holds all layers contiguously. Both are kvswap.Pools: two swaps of the same blocks run in the order of
submission, and a swap fails that reads a block which a failed swap was to write.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvswap import _C, memory
from kvswap.fastdeploy import ipc
from kvswap.fastdeploy.manager.layout import Cache, Layout
from kvswap.fastdeploy.manager.messages import Handles, Kind

__all__ = ["GpuSide", "HostSide", "attach", "create", "submit"]


class GpuSide:
    """One generation of the caches on the GPU. close() frees the created caches, or closes the opened ones."""

    def __init__(self, device: _C.Device, caches: Sequence[Cache], ptrs: Sequence[int], generation: int) -> None:
        self.generation = generation
        self.handles: Handles = {}
        self._closers: list[Callable[[], None]] = []
        self.pools = _pools(device, caches, ptrs, "gpu")

    def on_close(self, closer: Callable[[], None]) -> None:
        """Register a function that close() calls; the last registered one runs first."""
        self._closers.append(closer)

    def close(self) -> None:
        """Free or close everything. What fails is kept, and a second call tries it again."""
        self.pools = []
        self.handles = {}
        while self._closers:
            self._closers[-1]()
            self._closers.pop()


def _pools(
    device: _C.Device,
    caches: Sequence[Cache],
    ptrs: Sequence[int],
    side: str,
    stride: int | None = None,
    count: int = 0,
) -> list[_C.Pool]:
    """One pool for each cache. Pools with the same number of blocks share their hazard table (group=)."""
    first: dict[int, _C.Pool] = {}
    pools = []
    for cache, ptr in zip(caches, ptrs, strict=True):
        blocks = count or cache.num_blocks
        name = f"{side} {cache.name}"[:31]
        pool = _C.Pool(
            device, ptr, blocks, cache.block_nbytes, stride=stride, group=first.get(cache.num_blocks), name=name
        )
        first.setdefault(cache.num_blocks, pool)
        pools.append(pool)
    return pools


_ALIGN = 512


def create(device: _C.Device, layout: Layout, slab: bool, after: int) -> GpuSide:
    """Create zeroed, exported caches with a generation above `after`.

    slab: one allocation for all caches. Else each cache has its own allocation, a handle, and a FastDeploy segment.
    """
    caches = layout.caches()
    generation = max(after + 1, time.time_ns())
    if slab:
        *offsets, nbytes = itertools.accumulate((-(-cache.nbytes // _ALIGN) * _ALIGN for cache in caches), initial=0)
        allocations = [device.alloc(nbytes)]
        ptrs = [allocations[0].ptr + offset for offset in offsets]
    else:
        allocations = [device.alloc(cache.nbytes) for cache in caches]
        ptrs = [allocation.ptr for allocation in allocations]
    side = GpuSide(device, caches, ptrs, generation)
    for allocation in allocations:
        side.on_close(allocation.free)
    try:
        for allocation in allocations:
            ipc.zero(allocation)
        for cache, ptr in zip(caches, ptrs, strict=True):
            exported = memory.export(ptr, device=device, nbytes=cache.nbytes, generation=generation)
            side.handles[cache.name] = exported.to_bytes()
            if not slab:
                ipc.write_segment(cache.name, device, ptr, cache.nbytes)
                side.on_close(functools.partial(ipc.unlink_segment, cache.name))
    except BaseException:
        side.close()
        raise
    return side


def attach(device: _C.Device, layout: Layout, handles: Handles | None) -> GpuSide:
    """Open the engine's caches. handles: kvswap's; None: FastDeploy's segments.

    kvswap.Error, ValueError: a cache is missing, was freed, or has another size.
    """
    caches = layout.caches()
    if handles is not None and (missing := [cache.name for cache in caches if cache.name not in handles]):
        raise ValueError(f"no handle of {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else ""))
    opened: list[_C.Mapped] = []
    try:
        for cache in caches:
            if handles is None:
                opened.append(ipc.open_segment(cache.name, device, cache.nbytes))
            else:
                opened.append(memory.open(handles[cache.name], device=device))
            _check_last(caches, opened)
        side = GpuSide(device, caches, [each.ptr for each in opened], time.time_ns())
    except BaseException:
        for each in opened:
            each.close()
        raise
    for each in opened:
        side.on_close(each.close)
    return side


def _check_last(caches: Sequence[Cache], opened: Sequence[_C.Mapped]) -> None:
    """Refuse a cache of another size, or at the address of another. FastDeploy's set_data_ipc() shares the start of a
    tensor's allocation, so that all tensors of one allocation open at the same address."""
    last, cache = opened[-1], caches[len(opened) - 1]
    if last.nbytes != cache.nbytes:
        raise ValueError(
            f"{cache.name}: the handle is of {last.nbytes} bytes, but the cache has {cache.nbytes}: the two sides have "
            "other shapes"
        )
    for other, known in zip(caches, opened[:-1], strict=False):
        if last.ptr < known.ptr + known.nbytes and known.ptr < last.ptr + last.nbytes:
            raise ValueError(
                f"{cache.name} opens at the same memory as {other.name}: they lie in one allocation, which a segment "
                "cannot tell apart; let each have its own, or attach with handles of kvswap.memory.export()"
            )


class HostSide:
    """The host blocks, and a flag for each: written since the memory was allocated. A swap to the GPU of an unwritten
    block is refused, since its bytes mean nothing."""

    def __init__(self, device: _C.Device, layout: Layout) -> None:
        caches, count, stride = layout.caches(), layout.num_cpu_blocks, layout.slot_nbytes
        self._memory = memory.HostPool(count, stride, device=device)
        self.written = np.zeros(count, np.bool_)
        offsets = itertools.accumulate((cache.block_nbytes for cache in caches), initial=self._memory.ptr)
        self.pools = _pools(device, caches, list(offsets)[:-1], "host", stride, count)

    def forget(self, ids: Sequence[int]) -> None:
        """Mark blocks as unwritten: a swap to the host failed before it was queued, and they hold older data."""
        self.written[np.asarray(ids, np.int64)] = False

    def close(self) -> None:
        """Free the memory after the swaps that use it have ended. May be called again if it raised."""
        self.pools = []
        self._memory.close()


def submit(
    gpu: GpuSide, host: HostSide, kind: Kind, gpu_ids: list[int], cpu_ids: list[int], after: Sequence[Any]
) -> _C.Transfer:
    """Queue a swap. ValueError: the swap would read an unwritten host block. kvswap.QueueFull: try again later.

    If the swap fails on the device, the pools record the lost blocks. If this call raises, nothing was queued, and the
    caller records them by HostSide.forget().
    """
    here, there = np.asarray(gpu_ids, np.int64), np.asarray(cpu_ids, np.int64)
    if kind == Kind.SWAP2CPU:
        transfer = _C.move_blocks(gpu.pools, host.pools, here, there, after=after)
        host.written[there] = True
        return transfer
    if there.size and not host.written[there].all():
        i = int(np.argmin(host.written[there]))
        raise ValueError(
            f"cpu_block_ids[{i}] is {cpu_ids[i]}: that host block holds nothing since this rank's memory was allocated"
        )
    return _C.move_blocks(host.pools, gpu.pools, there, here, after=after)
