"""Jobs of replicas that have one host memory, and lend each other their links (docs/share.md, "Replicas in vLLM").

A load of some size goes by a member of a group, whose other members have mapped the same memory: each brings a part of
it. Stores go over the own link only. If this process is killed, the blocks that it wrote are given to others once it
has ended, and no copy to them may be under way in another process then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvswap import _C
from kvswap.offload._layout import Layout, make_layout
from kvswap.offload._member import MemberLayout, Share, member_layout, pools_of
from kvswap.share import Member, Place, join_at

_LEAST_PIECES = 4  # of a load that goes by the member: of fewer, others bring next to nothing


class ReplicaLayout(NamedTuple):
    """The places of a cache's blocks on both sides, for both ways."""

    plain: Layout
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
) -> ReplicaLayout:
    """ValueError: they are not blocks that others can bring. Other processes write to the same host blocks: no failure
    is remembered."""
    if factor != 1:
        raise ValueError(f"a chunk has {factor} blocks, layer by layer: members bring blocks of all layers")
    plain = make_layout(device, gpu_tensors, cpu_tensors, factor, groups, canonical=False, remember_failures=False)
    return ReplicaLayout(plain, member_layout(device, gpu_tensors, cpu_tensors, factor, groups, None), share)


class ReplicaMap:
    """The methods of kvswap._C.OffloadMap."""

    def __init__(self, layout: ReplicaLayout, device: _C.Device, hold: object) -> None:
        share, first = layout.share, layout.member.cpus[0]
        begin = min(cpu.ptr for cpu in layout.member.cpus)
        place = Place(begin, first.stride, first.chunks, share.path, share.generation, True)
        gpus, hosts = pools_of(layout.member, device, hold)
        self._map = layout.plain.open(device, hold)
        self._member = join_at(
            share.group, share.rank, place, gpus, hosts, stall=share.stall, piece_nbytes=share.piece_nbytes
        )
        self._least = _LEAST_PIECES * share.piece_nbytes // sum(layout.member.pages)  # blocks

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
        lent = direction == 1 and first == 0 and not layer_events and len(gpu_blocks) >= self._least
        if not (lent and self._member.peers):
            return self._map.submit(
                gpu_blocks, chunks, group_sizes, block_indices, direction, first=first, stream=stream, after=after,
                after_compute=after_compute, layer_events=layer_events, **options,
            )  # fmt: skip
        if [len(gpu_blocks)] != [int(size) for size in group_sizes]:
            raise ValueError(f"{len(gpu_blocks)} gpu_blocks do not fit group_sizes {list(group_sizes)}")
        return (self._member.load(chunks, gpu_blocks, after=None if after_compute else after),), 1, None

    @property
    def member(self) -> Member:
        """The kvswap.share.Member."""
        return self._member

    def close(self) -> None:
        """Leave the group. TimeoutError: pieces are still under way, so that the memory must stay."""
        self._member.close()
