"""Jobs that go over several links while other processes bring parts of them: OffloadMap's methods.

Jobs of some size go by a member of a group (kvswap.share), if others are there. All others go as if there were none: by
OffloadMap, or by CodedMap if blocks are coded, queued as a whole. The two are not ordered among each other: the engine
submits a job only when the jobs before it that have its blocks have ended, as vLLM's scheduler does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvswap import _C
from kvswap.codecs import Coding
from kvswap.offload._coded import CodedLayout, CodedMap, chunks_not_stored, layout_of
from kvswap.offload._layout import Layout, Ranges
from kvswap.offload._member import MemberLayout, member_layout, pools_of
from kvswap.share import Member

_LEAST_PIECES = 4  # of a job that goes by the member: of fewer, others bring next to nothing


def layouts_of(
    device: str,
    gpu_tensors: Sequence[Any],
    cpu_tensors: Sequence[Any],
    factor: int,
    groups: Sequence[Sequence[Any]],
    codings: Sequence[Coding] | None,
    parts: tuple[Ranges, ...],
) -> tuple[Layout | CodedLayout, MemberLayout]:
    """The places of a cache's blocks on both sides, for both ways. codings: None: blocks are not coded. parts: as
    checked_parts() gives them. ValueError: they are not blocks that others can bring.

    A store by one way clears no failure that the other way remembers: so none is remembered."""
    if factor != 1:
        raise ValueError(f"a chunk has {factor} blocks, layer by layer: members bring blocks of all layers")
    places = device, gpu_tensors, cpu_tensors, factor, groups
    return layout_of(places, codings, False, False, parts), member_layout(*places, None, codings)


class BothWays(NamedTuple):
    """The map of jobs that are queued as a whole, and the pools of the member of a group: the GPU's and the host's.
    nbytes: of a block on the host, all layers."""

    plain: _C.OffloadMap | CodedMap
    gpus: tuple[_C.Pool, ...]
    hosts: tuple[_C.Pool, ...]
    nbytes: int


def open_both(plain: Layout | CodedLayout, member: MemberLayout, device: _C.Device, hold: object) -> BothWays:
    """CodedMap has pools already, and no others may have their bytes. hold: kept while the pools live."""
    made = plain.open(device, hold)
    gpus, hosts = made.pools_of_group(0) if isinstance(made, CodedMap) else pools_of(member, device, hold)
    return BothWays(made, gpus, hosts, sum(member.coded_pages))


class LinksMap:
    """The methods of kvswap._C.OffloadMap. stores: stores go by the member, too."""

    def __init__(self, ways: BothWays, member: Member, piece_nbytes: int, stores: bool) -> None:
        self._map, self._member, self._stores = ways.plain, member, stores
        self._least = _LEAST_PIECES * piece_nbytes // ways.nbytes  # blocks

    @property
    def order(self) -> tuple[tuple[int, tuple[int, ...], bool], ...]:
        """As OffloadMap's."""
        return self._map.order

    @property
    def coded(self) -> bool:
        """Whether blocks are coded on the way."""
        return isinstance(self._map, CodedMap)

    def not_stored(
        self, transfers: Sequence[Any], group_sizes: Sequence[int], block_indices: Sequence[int]
    ) -> tuple[int, set[int]]:
        """As chunks_not_stored()."""
        return chunks_not_stored(transfers, [True], group_sizes, block_indices, 1)

    @property
    def member(self) -> Member:
        """The kvswap.share.Member."""
        return self._member

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
        large = first == 0 and not layer_events and len(gpu_blocks) >= self._least
        if not (large and (direction == 1 or self._stores) and self._member.peers):
            return self._map.submit(
                gpu_blocks, chunks, group_sizes, block_indices, direction, first=first, stream=stream, after=after,
                after_compute=after_compute, layer_events=layer_events, **options,
            )  # fmt: skip
        if [len(gpu_blocks)] != [int(size) for size in group_sizes]:
            raise ValueError(f"{len(gpu_blocks)} gpu_blocks do not fit group_sizes {list(group_sizes)}")
        if isinstance(self._map, CodedMap):
            self._map.forget_failures(chunks)
        start = None if after_compute else after
        if direction == 0:
            return (self._member.store(gpu_blocks, chunks, after=start),), 1, None
        return (self._member.load(chunks, gpu_blocks, after=start),), 1, None

    def close(self) -> None:
        """Leave the group. TimeoutError: pieces are still under way, so that the memory must stay."""
        self._member.close()
