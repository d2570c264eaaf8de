"""Jobs of replicas that have one host memory, and lend each other their links (docs/share.md, "Replicas in vLLM").

A load of some size goes by a member of a group, whose other members have mapped the same memory: each brings a part of
it. Stores go over the own link only. If this process is killed, the blocks that it wrote are given to others once it
has ended, and no copy to them may be under way in another process then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvswap import _C
from kvswap.codecs import Coding
from kvswap.offload._coded import CodedLayout
from kvswap.offload._layout import Layout, Ranges
from kvswap.offload._links import LinksMap, layouts_of, open_both
from kvswap.offload._member import MemberLayout, Share
from kvswap.share import Place, join_at


class ReplicaLayout(NamedTuple):
    """The places of a cache's blocks on both sides, for both ways."""

    plain: Layout | CodedLayout
    member: MemberLayout
    share: Share

    @property
    def numbers(self) -> tuple[tuple[int, int, int], ...]:
        """None: blocks are not cut into parts."""
        return ()

    def key(self) -> tuple[Any, ...]:
        """Equal for the same blocks of the same memory."""
        return ("replica", *self.plain.key(), self.share)

    def open(self, device: _C.Device, hold: object) -> ReplicaMap:
        """The map of these blocks."""
        return ReplicaMap(self, device, hold)


def replica_layout(
    device: str,
    gpu_tensors: Sequence[Any],
    cpu_tensors: Sequence[Any],
    factor: int,
    groups: Sequence[Sequence[Any]],
    share: Share,
    codings: Sequence[Coding] | None,
    parts: tuple[Ranges, ...],
) -> ReplicaLayout:
    """codings, parts: as layouts_of(). ValueError: they are not blocks that others can bring."""
    return ReplicaLayout(*layouts_of(device, gpu_tensors, cpu_tensors, factor, groups, codings, parts), share)


class ReplicaMap(LinksMap):
    """The methods of kvswap._C.OffloadMap."""

    def __init__(self, layout: ReplicaLayout, device: _C.Device, hold: object) -> None:
        share, cpus = layout.share, layout.member.cpus
        begin, stride = min(cpu.ptr for cpu in cpus), cpus[0].stride
        block = max(cpu.ptr + cpu.page for cpu in cpus) - begin if share.cells else stride
        place = Place(begin, block, cpus[0].chunks, share.path, share.generation, True, stride)
        ways = open_both(layout.plain, layout.member, device, hold)
        member = join_at(
            share.group, share.rank, place, ways.gpus, ways.hosts, stall=share.stall, piece_nbytes=share.piece_nbytes
        )
        super().__init__(ways, member, share.piece_nbytes, stores=False)
