"""Jobs over the links of other engines' GPUs (docs/share.md, "Between engines")."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvswap import _C
from kvswap.codecs import Coding
from kvswap.offload._coded import CodedLayout
from kvswap.offload._layout import Layout, Ranges
from kvswap.offload._links import LinksMap, layouts_of, open_both
from kvswap.offload._member import MemberLayout
from kvswap.share import Place
from kvswap.share._lend import HostFile, Lending


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

    plain: Layout | CodedLayout
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
    codings: Sequence[Coding] | None,
    parts: tuple[Ranges, ...],
) -> LendLayout:
    """codings, parts: as layouts_of(). ValueError: they are not blocks that others can bring."""
    return LendLayout(*layouts_of(device, gpu_tensors, cpu_tensors, factor, groups, codings, parts), lend)


class LendMap(LinksMap):
    """The methods of kvswap._C.OffloadMap."""

    def __init__(self, layout: LendLayout, device: _C.Device, hold: object) -> None:
        lend, cpus = layout.lend, layout.member.cpus
        ways = open_both(layout.plain, layout.member, device, hold)
        begin = min(cpu.ptr for cpu in cpus)
        stride = cpus[0].stride
        row_rest = stride - (begin - lend.file.ptr) % stride
        block = max(cpu.ptr + cpu.page for cpu in cpus) - begin if lend.cells else row_rest
        place = Place(begin, block, cpus[0].chunks, lend.path, lend.generation, True, stride)
        self._lending = Lending(
            lend.name, lend.engine, place, ways.gpus, ways.hosts, lend.file,
            is_idle=lend.is_idle, lenders=lend.lenders, piece_nbytes=lend.piece_nbytes,
        )  # fmt: skip
        super().__init__(ways, self._lending.member, lend.piece_nbytes, stores=True)

    @property
    def lending(self) -> Lending:
        """What this process lends, and who lends to it."""
        return self._lending

    def close(self) -> None:
        """Leave all groups. TimeoutError: pieces are still under way, so that the memory must stay."""
        self._lending.close()
