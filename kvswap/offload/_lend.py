"""Jobs over the links of other engines' GPUs (docs/share.md, "Between engines"): OffloadMap's methods.

While another engine lends its link, jobs of some size go by a member of a group. All others go as if there were no
lender: by OffloadMap, queued as a whole. The two are not ordered among each other: the engine submits a job only when
the jobs before it that have its blocks have ended, as vLLM's scheduler does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvswap import _C
from kvswap.offload._layout import Layout, make_layout
from kvswap.offload._member import MemberLayout, member_layout, pools_of
from kvswap.share import Member, Place
from kvswap.share._lend import HostFile, Lending

_LEAST_PIECES = 4  # of a job that goes by the member: of fewer, others bring next to nothing


class Lend(NamedTuple):
    """Who lends and borrows. name, engine, lenders, is_idle, piece_nbytes: as for kvswap.share._lend.Lending. path,
    generation: of the memory, as for Place. cells: the rows have blocks of other ranks too."""

    name: str
    engine: str
    path: str
    generation: int
    file: HostFile
    cells: bool
    lenders: int
    is_idle: Callable[[], bool]
    piece_nbytes: int = 4 << 20


class LendLayout(NamedTuple):
    """The places of a cache's blocks on both sides, for both ways."""

    plain: Layout
    member: MemberLayout
    lend: Lend

    @property
    def numbers(self) -> tuple[tuple[int, int, int], ...]:
        """None: blocks are not cut into parts."""
        return ()

    def key(self) -> tuple[Any, ...]:
        """Equal for the same blocks of the same memory."""
        return ("lend", *self.plain.key(), self.lend.name)

    def open(self, device: _C.Device, hold: object) -> LendMap:
        """The map of these blocks."""
        return LendMap(self, device, hold)


def lend_layout(
    device: str,
    gpu_tensors: Sequence[Any],
    cpu_tensors: Sequence[Any],
    factor: int,
    groups: Sequence[Sequence[Any]],
    lend: Lend,
) -> LendLayout:
    """ValueError: they are not blocks that others can bring.

    A store by one way clears no failure that the other way remembers: so none is remembered."""
    if factor != 1:
        raise ValueError(f"a chunk has {factor} blocks, layer by layer: members bring blocks of all layers")
    plain = make_layout(device, gpu_tensors, cpu_tensors, factor, groups, canonical=False, remember_failures=False)
    return LendLayout(plain, member_layout(device, gpu_tensors, cpu_tensors, factor, groups, None), lend)


class LendMap:
    """The methods of kvswap._C.OffloadMap."""

    def __init__(self, layout: LendLayout, device: _C.Device, hold: object) -> None:
        lend, cpus = layout.lend, layout.member.cpus
        gpus, hosts = pools_of(layout.member, device, hold)
        begin = min(cpu.ptr for cpu in cpus)
        stride = cpus[0].stride
        row_rest = stride - (begin - lend.file.ptr) % stride
        block = max(cpu.ptr + cpu.page for cpu in cpus) - begin if lend.cells else row_rest
        place = Place(begin, block, cpus[0].chunks, lend.path, lend.generation, True, stride)
        self._map = layout.plain.open(device, hold)
        self._lending = Lending(
            lend.name, lend.engine, place, gpus, hosts, lend.file,
            is_idle=lend.is_idle, lenders=lend.lenders, piece_nbytes=lend.piece_nbytes,
        )  # fmt: skip
        self._least = _LEAST_PIECES * lend.piece_nbytes // sum(layout.member.pages)  # blocks

    @property
    def order(self) -> tuple[tuple[int, tuple[int, ...], bool], ...]:
        """As OffloadMap's."""
        return self._map.order

    def submit(
        self,
        gpu_blocks: Any,
        chunks: Any,
        group_sizes: Any,
        block_indices: Any,
        direction: int,
        *,
        first: int = 0,
        stream: Any = None,
        after: Any = (),
        after_compute: bool = False,
        layer_events: bool = False,
        **options: Any,
    ) -> tuple[tuple[Any, ...], int, Any]:
        """As OffloadMap.submit(); of a ShareTransfer, if the job goes by the member."""
        lent = first == 0 and not layer_events and len(gpu_blocks) >= self._least and len(self.member.peers) > 0
        if not lent:
            return self._map.submit(
                gpu_blocks, chunks, group_sizes, block_indices, direction, first=first, stream=stream, after=after,
                after_compute=after_compute, layer_events=layer_events, **options,
            )  # fmt: skip
        if [len(gpu_blocks)] != [int(size) for size in group_sizes]:
            raise ValueError(f"{len(gpu_blocks)} gpu_blocks do not fit group_sizes {list(group_sizes)}")
        start = None if after_compute else after
        if direction == 0:
            return (self.member.store(gpu_blocks, chunks, after=start),), 1, None
        return (self.member.load(chunks, gpu_blocks, after=start),), 1, None

    @property
    def member(self) -> Member:
        """The kvswap.share.Member."""
        return self._lending.member

    @property
    def lending(self) -> Lending:
        """What this process lends, and who lends to it."""
        return self._lending

    def close(self) -> None:
        """Leave all groups. TimeoutError: pieces are still under way, so that the memory must stay."""
        self._lending.close()
