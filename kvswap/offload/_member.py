"""Jobs of ranks that hold the same cache (docs/share.md): OffloadMap's methods, over a member of a group.

All ranks have mapped one host memory. Each rank gives its member the loads under the job's id, which is the same on all
ranks: each brings a part from the host, and has the others' parts from their GPUs. One rank stores; the links of the
others take part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvswap import _C
from kvswap.codecs import Coding
from kvswap.offload._coded import MemoryOf, Shape, chunks_not_stored, expand_job
from kvswap.offload._layout import Blocks, Chunks, blocks_of, chunks_of
from kvswap.share import Member, Place, join_at


class Share(NamedTuple):
    """Who shares a cache. group: a name, as for kvswap.share.join(). path, generation: the same for all ranks that have
    mapped this host memory, and for no other memory; bytes of its chunks that are in no tensor are padding.
    share_wait, stall: as for kvswap.share.join(). ranks 0: replicas, whose jobs are their own (_replicas.py)."""

    group: str
    rank: int
    ranks: int
    path: str
    generation: int
    share_wait: float = 0.002
    stall: float = 0.02
    piece_nbytes: int = 4 << 20  # of replicas
    cells: bool = False  # of replicas: the rows have blocks of other ranks too


class MemberLayout(NamedTuple):
    """The places of a cache's blocks on both sides, how they are coded, and who shares them."""

    device: str
    gpus: tuple[Blocks, ...]
    cpus: tuple[Chunks, ...]
    pages: tuple[int, ...]  # bytes of a block that are moved, as the GPU has them
    codings: tuple[Coding | None, ...]
    factor: int
    share: Share | None  # None: of a cache that is one rank's (_lend.py)
    numbers: tuple[tuple[int, int, int], ...] = ()

    @property
    def step(self) -> int:
        """Bytes from block to block on the host."""
        return self.cpus[0].stride if self.factor == 1 else self.cpus[0].pitch

    @property
    def coded_pages(self) -> tuple[int, ...]:
        """Bytes of a block that are moved, as the host has them."""
        return tuple(
            page if coding is None else coding.coded_nbytes
            for page, coding in zip(self.pages, self.codings, strict=True)
        )

    @property
    def shape(self) -> Shape:
        """For a job's lists."""
        cpu = self.cpus[0]
        return Shape(1, self.gpus[0].blocks, cpu.chunks, self.factor, cpu.stride // self.step)

    @property
    def slots(self) -> int:
        """Blocks on the host, with what lies between those of one chunk and of the next."""
        shape = self.shape
        return (shape.chunks - 1) * shape.slots + shape.factor

    def key(self) -> tuple[Any, ...]:
        """Equal for the same blocks of the same memory, coded alike."""
        return (*self[:4], tuple(coding and coding.text for coding in self.codings), *self[5:])

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
    codings: Sequence[Coding] | None = None,
) -> MemberLayout:
    """Check an engine's tensors and references. ValueError: they are not blocks that members can bring."""
    if len(groups) != 1:
        raise ValueError(
            f"the cache has {len(groups)} groups of layers: it must be one, since members bring blocks of all layers"
        )
    if not len(gpu_tensors) == len(cpu_tensors) > 0:
        raise ValueError(
            f"{len(gpu_tensors)} GPU tensors and {len(cpu_tensors)} CPU tensors: as many, and one at least"
        )
    if codings is not None and len(codings) != len(gpu_tensors):
        raise ValueError(f"{len(gpu_tensors)} GPU tensors and {len(codings)} codings: as many each")
    pages: dict[int, int] = {}
    for ref in groups[0]:
        pages[ref.tensor_idx] = max(int(ref.page_size_bytes), pages.get(ref.tensor_idx, 0))
    numbers = sorted(pages)
    gpus = tuple(blocks_of(gpu_tensors[i], f"gpu_tensors[{i}]") for i in numbers)
    cpus = tuple(chunks_of(cpu_tensors[i], factor, f"cpu_tensors[{i}]") for i in numbers)
    ways = tuple(None if codings is None else codings[i] for i in numbers)
    for i, gpu, cpu, coding in zip(numbers, gpus, cpus, ways, strict=True):
        _check_tensor(i, gpu, cpu, pages[i], coding)
        if (cpu.chunks, cpu.stride, gpu.blocks) != (cpus[0].chunks, cpus[0].stride, gpus[0].blocks):
            raise ValueError(f"tensor {i} has not the blocks of the others: {gpu}, {cpu}")
    made = MemberLayout(device, gpus, cpus, tuple(pages[i] for i in numbers), ways, factor, share)
    if factor > 1:
        _check_chunks(made)
    return made


def _check_tensor(i: int, gpu: Blocks, cpu: Chunks, page: int, coding: Coding | None) -> None:
    if coding is None and not 0 < page <= min(gpu.page, cpu.page):
        raise ValueError(f"tensor {i}: page_size_bytes is {page}; it has {gpu.page} and {cpu.page} a block")
    if coding is not None and (page, cpu.page) != (coding.block_nbytes, coding.coded_nbytes):
        raise ValueError(
            f"tensor {i}: page_size_bytes is {page}, and a block has {cpu.page} bytes on the host; its coding has "
            f"{coding.block_nbytes}, and {coding.coded_nbytes} coded"
        )


def _check_chunks(layout: MemberLayout) -> None:
    """Members bring blocks of all tensors: those of a chunk lie one behind the other."""
    cpus, step = layout.cpus, layout.step
    begin, end = min(cpu.ptr for cpu in cpus), max(cpu.ptr + cpu.page for cpu in cpus)
    if any(cpu.pitch != step for cpu in cpus) or end - begin > step or cpus[0].stride % step:
        raise ValueError(
            f"a chunk has {layout.factor} blocks, layer by layer or at several distances: members bring blocks "
            "of all layers, so that those of a chunk must lie one behind the other"
        )


def pools_of(layout: MemberLayout, device: _C.Device, hold: object) -> tuple[tuple[_C.Pool, ...], tuple[_C.Pool, ...]]:
    """The GPU's pools and the host's. hold: kept while they live."""
    sides: tuple[list[_C.Pool], list[_C.Pool]] = [], []
    tensors = zip(layout.gpus, layout.cpus, layout.pages, layout.coded_pages, layout.codings, strict=True)
    for gpu, cpu, page, coded, coding in tensors:
        for pools, ptr, blocks, nbytes, stride, how in (
            (sides[0], gpu.ptr, gpu.blocks, page, gpu.stride, None),
            (sides[1], cpu.ptr, layout.slots, coded, layout.step, coding),
        ):
            group = pools[0] if pools else None
            memory: Any = MemoryOf(ptr, hold)
            pools.append(_C.Pool(device, memory, blocks, nbytes, stride=stride, group=group, coding=how))
    return tuple(sides[0]), tuple(sides[1])


class MemberMap:
    """The methods of kvswap._C.OffloadMap, for a member of a group."""

    order: tuple[tuple[int, tuple[int, ...], bool], ...] = ()  # nothing can be waited for layer by layer

    def __init__(self, layout: MemberLayout, device: _C.Device, hold: object) -> None:
        share = layout.share
        assert share is not None
        begin = min(cpu.ptr for cpu in layout.cpus)
        place = Place(begin, layout.step, layout.slots, share.path, share.generation, True)
        gpus, hosts = pools_of(layout, device, hold)
        self._member = join_at(
            share.group, share.rank, place, gpus, hosts, share_wait=share.share_wait, stall=share.stall
        )
        self._ranks, self._shape = tuple(range(share.ranks)), layout.shape
        self.coded = layout.codings[0] is not None

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
        del first, stream
        if layer_events:
            raise ValueError(
                "layer_events: a shared load is not all queued in the call, and its layers come in any order"
            )
        (blocks,) = expand_job(self._shape, gpu_blocks, chunks, group_sizes, block_indices)
        after = None if after_compute else after
        if direction == 0:
            return (self._member.store(blocks.gpu, blocks.cpu, after=after),), 1, None
        load = self._member.load(blocks.cpu, blocks.gpu, shared=f"load {job}", ranks=self._ranks, after=after)
        return (load,), 1, None

    def not_stored(
        self, transfers: Sequence[Any], group_sizes: Sequence[int], block_indices: Sequence[int]
    ) -> tuple[int, set[int]]:
        """As chunks_not_stored()."""
        return chunks_not_stored(transfers, [True], group_sizes, block_indices, self._shape.factor)

    @property
    def member(self) -> Member:
        """The kvswap.share.Member."""
        return self._member

    def close(self) -> None:
        """Leave the group. TimeoutError: others' pieces are still under way, so that the memory must stay."""
        self._member.close()
