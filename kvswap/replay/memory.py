"""The memory of both tiers, and the addresses of blocks in it.

GPU side, layer-first as engines have it: one tensor a layer, [num_blocks, layer_nbytes]. Host side, block-first: one
pool a group in which a block's layers are neighbours. Each group has block ids of its own: a seeded permutation of the
tier's slots, so that ids are as scattered as on a server that has run for a day.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvswap import _C
from kvswap.codecs import Coding

from .geometry import Geometry, Group
from .settings import Sizes, coding_of
from .tiers import Slots

Words = NDArray[np.uint64]
SCRATCH = 32  # further GPU slots, where coded blocks of the host tier are decoded to be checked


@dataclass(frozen=True)
class GroupMemory:
    """One group's tensors and ids."""

    group: Group
    gpu: tuple[_C.Memory, ...]
    host: _C.HostPool | None
    gpu_ptrs: Words  # base of each layer's tensor
    host_ptrs: Words  # where each layer begins in the pool's first block
    gpu_ids: Slots  # block id of a slot
    host_ids: Slots
    coding: Coding | None  # of a layer's part in the host tier
    gpu_pools: tuple[_C.Pool, ...]  # one a layer; of a replay with files or a codec
    host_pools: tuple[_C.Pool, ...]  # of one with a codec

    @property
    def host_nbytes(self) -> int:
        """Of a layer's part in the host tier."""
        return self.group.layer_nbytes if self.coding is None else self.coding.coded_nbytes

    def gpu_addresses(self, slots: Slots) -> Words:
        """Shape (layers, slots)."""
        return _grid(self.gpu_ptrs, self.gpu_ids[slots], self.group.layer_nbytes)

    def host_addresses(self, slots: Slots) -> Words:
        """Shape (layers, slots)."""
        return _grid(self.host_ptrs, self.host_ids[slots], len(self.group.layers) * self.host_nbytes)


def _grid(bases: Words, ids: Slots, stride: int) -> Words:
    addresses: Words = bases.reshape(-1, 1) + ids.astype(np.uint64) * np.uint64(stride)
    return addresses


class TierMemory:
    """All groups' memory. Allocated whole or not at all; close() frees it, and nothing queued may use it by then.

    codec: of the host tier. pools: make pools of the GPU tier, too.
    progress: called as progress(done_nbytes, total_nbytes) while a group's host memory comes up.
    """

    def __init__(
        self,
        device: _C.Device,
        geometry: Geometry,
        sizes: Sizes,
        seed: int,
        codec: str | None,
        pools: bool,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        self._owned: list[_C.Memory] = []
        self._pools: list[_C.HostPool] = []
        self._device = device
        self._progress = progress
        self._codec, self._with_pools = codec, pools or codec is not None
        self.scratch = SCRATCH if codec is not None else 0
        rng = np.random.default_rng(seed)
        try:
            self.groups = tuple(self._allocate(group, sizes, rng) for group in geometry.groups)
        except BaseException:
            self.close()
            raise

    def _allocate(self, group: Group, sizes: Sizes, rng: np.random.Generator) -> GroupMemory:
        gpu_blocks = sizes.gpu_blocks + self.scratch
        coding = None if self._codec is None else coding_of(group, self._codec)
        part = group.layer_nbytes if coding is None else coding.coded_nbytes
        gpu = tuple(self._own(gpu_blocks * group.layer_nbytes) for _ in group.layers)
        host = self._pool(sizes.host_blocks, len(gpu) * part) if sizes.host_blocks else None
        offsets = np.arange(len(group.layers), dtype=np.uint64) * np.uint64(part)
        gpu_pools: list[_C.Pool] = []
        host_pools: list[_C.Pool] = []
        for i, tensor in enumerate(gpu if self._with_pools else ()):
            first = gpu_pools[0] if i else None
            gpu_pools.append(_C.Pool(self._device, tensor, gpu_blocks, group.layer_nbytes, group=first))
            if coding is not None and host is not None:
                host_pools.append(
                    _C.Pool(
                        self._device, host.ptr + i * part, sizes.host_blocks, part, stride=len(gpu) * part,
                        group=host_pools[0] if i else None, coding=coding,
                    )
                )  # fmt: skip
        return GroupMemory(
            group=group,
            gpu=gpu,
            host=host,
            gpu_ptrs=np.array([memory.ptr for memory in gpu], np.uint64),
            host_ptrs=offsets + np.uint64(host.ptr if host is not None else 0),
            gpu_ids=rng.permutation(gpu_blocks).astype(np.int64),
            host_ids=rng.permutation(sizes.host_blocks).astype(np.int64),
            coding=coding,
            gpu_pools=tuple(gpu_pools),
            host_pools=tuple(host_pools),
        )

    def _own(self, nbytes: int) -> _C.Memory:
        memory = self._device.alloc(nbytes)
        self._owned.append(memory)
        return memory

    def _pool(self, num_blocks: int, nbytes: int) -> _C.HostPool:
        pool = _C.HostPool(num_blocks, nbytes, device=self._device, pages="transparent", progress=self._progress)
        self._pools.append(pool)
        return pool

    def close(self) -> None:
        self.groups = ()  # and pools over the memory
        while self._pools:
            self._pools.pop().close()
        while self._owned:
            self._owned.pop().free()
