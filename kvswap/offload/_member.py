"""Jobs of ranks that hold the same cache (docs/share.md): OffloadMap's methods, over a member of a group.

All ranks have mapped one host memory. Each rank gives its member the loads under the job's id, which is the same on all
ranks: each brings a part from the host, and has the others' parts from their GPUs. One rank stores; the links of the
others take part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvswap import _C
from kvswap.offload._coded import MemoryOf
from kvswap.offload._layout import Blocks, Chunks, blocks_of, chunks_of
from kvswap.share import Member, Place, join_at


class Share(NamedTuple):
    """Who shares a cache. group: a name, as for kvswap.share.join(). path, generation: the same for all ranks that have
    mapped this host memory, and for no other memory; bytes of its chunks that are in no tensor are padding.
    share_wait, stall: as for kvswap.share.join()."""

    group: str
    rank: int
    ranks: int
    path: str
    generation: int
    share_wait: float = 0.002
    stall: float = 0.02


class MemberLayout(NamedTuple):
    """The places of a cache's blocks on both sides, and who shares it."""

    device: str
    gpus: tuple[Blocks, ...]
    cpus: tuple[Chunks, ...]
    pages: tuple[int, ...]  # bytes of a block that are moved
    share: Share | None  # None: of a cache that is one rank's (_lend.py)
    numbers: tuple[tuple[int, int, int], ...] = ()

    def key(self) -> tuple[Any, ...]:
        """Equal for the same blocks of the same memory."""
        return tuple(self)

    def open(self, device: _C.Device, hold: object) -> MemberMap:
        """The map of these blocks."""
        return MemberMap(self, device, hold)


def member_layout(
    device: str,
    gpu_tensors: Sequence[Any],
    cpu_tensors: Sequence[Any],
    factor: int,
    groups: Sequence[Sequence[Any]],
    share: Share | None,
) -> MemberLayout:
    """Check an engine's tensors and references. ValueError: they are not blocks that members can bring."""
    if factor != 1 or len(groups) != 1:
        raise ValueError(
            f"the cache has {len(groups)} groups of layers, and chunks of {factor} blocks: it must be one of "
            "each, since members bring blocks of all layers"
        )
    if not len(gpu_tensors) == len(cpu_tensors) > 0:
        raise ValueError(
            f"{len(gpu_tensors)} GPU tensors and {len(cpu_tensors)} CPU tensors: as many, and one at least"
        )
    pages: dict[int, int] = {}
    for ref in groups[0]:
        pages[ref.tensor_idx] = max(int(ref.page_size_bytes), pages.get(ref.tensor_idx, 0))
    gpus = tuple(blocks_of(gpu_tensors[i], f"gpu_tensors[{i}]") for i in sorted(pages))
    cpus = tuple(chunks_of(cpu_tensors[i], 1, f"cpu_tensors[{i}]") for i in sorted(pages))
    for i, gpu, cpu in zip(sorted(pages), gpus, cpus, strict=True):
        if not 0 < pages[i] <= min(gpu.page, cpu.page):
            raise ValueError(f"tensor {i}: page_size_bytes is {pages[i]}; it has {gpu.page} and {cpu.page} a block")
        if (cpu.chunks, cpu.stride, gpu.blocks) != (cpus[0].chunks, cpus[0].stride, gpus[0].blocks):
            raise ValueError(f"tensor {i} has not the blocks of the others: {gpu}, {cpu}")
    return MemberLayout(device, gpus, cpus, tuple(pages[i] for i in sorted(pages)), share)


def pools_of(layout: MemberLayout, device: _C.Device, hold: object) -> tuple[tuple[_C.Pool, ...], tuple[_C.Pool, ...]]:
    """The GPU's pools and the host's. hold: kept while they live."""
    sides: tuple[list[_C.Pool], list[_C.Pool]] = [], []
    for gpu, cpu, page in zip(layout.gpus, layout.cpus, layout.pages, strict=True):
        for pools, ptr, blocks, stride in (
            (sides[0], gpu.ptr, gpu.blocks, gpu.stride),
            (sides[1], cpu.ptr, cpu.chunks, cpu.stride),
        ):
            memory: Any = MemoryOf(ptr, hold)
            pools.append(_C.Pool(device, memory, blocks, page, stride=stride, group=pools[0] if pools else None))
    return tuple(sides[0]), tuple(sides[1])


class MemberMap:
    """The methods of kvswap._C.OffloadMap, for a member of a group."""

    order: tuple[tuple[int, tuple[int, ...], bool], ...] = ()  # nothing can be waited for layer by layer

    def __init__(self, layout: MemberLayout, device: _C.Device, hold: object) -> None:
        share, first = layout.share, layout.cpus[0]
        assert share is not None
        begin = min(cpu.ptr for cpu in layout.cpus)
        place = Place(begin, first.stride, first.chunks, share.path, share.generation, True)
        gpus, hosts = pools_of(layout, device, hold)
        self._member = join_at(
            share.group, share.rank, place, gpus, hosts, share_wait=share.share_wait, stall=share.stall
        )
        self._ranks = tuple(range(share.ranks))

    def submit(
        self,
        gpu_blocks: Any,
        chunks: Any,
        group_sizes: Any,
        block_indices: Any,
        direction: int,
        *,
        job: int,
        first: int = 0,
        stream: Any = None,
        after: Any = (),
        after_compute: bool = False,
        layer_events: bool = False,
    ) -> tuple[tuple[Any, ...], int, None]:
        """As OffloadMap.submit(), of a ShareTransfer. job: its id, as on all ranks. Jobs of a queue are not ordered."""
        del block_indices, first, stream
        if layer_events:
            raise ValueError(
                "layer_events: a shared load is not all queued in the call, and its layers come in any order"
            )
        if [len(gpu_blocks)] != [int(size) for size in group_sizes]:
            raise ValueError(f"{len(gpu_blocks)} gpu_blocks do not fit group_sizes {list(group_sizes)}")
        after = None if after_compute else after
        if direction == 0:
            return (self._member.store(gpu_blocks, chunks, after=after),), 1, None
        load = self._member.load(chunks, gpu_blocks, shared=f"load {job}", ranks=self._ranks, after=after)
        return (load,), 1, None

    @property
    def member(self) -> Member:
        """The kvswap.share.Member."""
        return self._member

    def close(self) -> None:
        """Leave the group. TimeoutError: others' pieces are still under way, so that the memory must stay."""
        self._member.close()
