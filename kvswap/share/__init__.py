"""Processes of one user that share the links of their GPUs, and one copy of the cache on the host.

    memory = kvswap.memory.SharedPool("kv", num_blocks, slot_nbytes, create=None, layers=32, device=device)
    with kvswap.share.join("engine", rank, memory, gpu_pools) as member:
        member.load(host_ids, gpu_ids).wait(10)

docs/share.md says how it works and what it takes.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import re
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

from kvswap import _C
from kvswap._C import ShareTransfer
from kvswap._timeouts import seconds
from kvswap.codecs import Coding
from kvswap.share._meet import Meeting
from kvswap.typing import Ids, ShareStats, StreamLike

__all__ = ["Member", "ShareTransfer", "join"]

_MOST_RANKS = 16
_NAME = re.compile(r"[A-Za-z0-9._-]{1,40}")
_members: set[Member] = set()  # until close()


class Place(NamedTuple):
    """Blocks on the host that all members have mapped: block i is the block_nbytes bytes at ptr + i * block_nbytes.
    path, generation: the same for all that have mapped this memory, and for no other memory. padded: bytes of a block
    that are in no pool are padding, which stores of other members may write to. stride: bytes from a block to the next
    one, in the place of block_nbytes. parts: a block lies in so many parts of equal size, as keys and values: part p is
    the block_nbytes / parts bytes at ptr + p * part_stride + i * stride."""

    ptr: int
    block_nbytes: int
    num_blocks: int
    path: str
    generation: int
    padded: bool = False
    stride: int = 0
    parts: int = 1
    part_stride: int = 0


class Role(NamedTuple):
    """Whether others bring pieces for a member, and whether it brings pieces for others."""

    borrows: bool
    lends: bool


class Member:
    """One process of a group. From join(). It lives until close() or the end of the process, even if nothing refers to
    it. Any thread may use it; a forked child must join anew."""

    def __init__(self, core: _C._Share, meeting: Meeting, group: str, rank: int, device: str, role: Role) -> None:
        """Use join()."""
        self._core, self._meeting = core, meeting
        self._group, self._rank = group, rank
        self._device, self._role = device, role

    @property
    def group(self) -> str:
        """The name of the group."""
        return self._group

    @property
    def rank(self) -> int:
        """This member's number in the group."""
        return self._rank

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks of the other members that are here now, ascending."""
        linked = self._core.linked()
        return tuple(rank for rank in range(_MOST_RANKS) if linked >> rank & 1)

    def wait_peers(self, ranks: Sequence[int], timeout: float | None = 60) -> None:
        """Wait until all these members are here. TimeoutError: not all came in time."""
        mask = 0
        for index, rank in enumerate(ranks):
            mask |= 1 << _rank(rank, f"ranks[{index}]")
        self._core.wait_linked(mask & ~(1 << self._rank), seconds(timeout))

    def load(
        self,
        host_ids: Ids,
        gpu_ids: Ids,
        *,
        shared: str | None = None,
        generation: int = 0,
        ranks: Sequence[int] | None = None,
        after: StreamLike | None = None,
    ) -> ShareTransfer:
        """Copy host block host_ids[i] to GPU block gpu_ids[i], each in every pool; other members' links take part.

        Starts after the work that is queued now on the stream `after`; None: on the device's compute stream. Unlike
        other transfers it is not all queued when the call returns: it goes on in a thread, no stream waits for it, and
        its blocks on both sides belong to it until it has ended. What others do not bring in time comes over this
        process's own link. Which blocks failed is in failed_positions; pools do not pass it on, as they do else,
        because other processes write to the same blocks.

        shared: a name for this load, if other members load the same host blocks to GPUs of their own: each brings a
        part from the host, and takes the others' parts from their GPUs. generation: a number of the caller; a name and
        a generation are used once. ranks: the members that share it, with this one; None: all that are here now.
        Members may call at different times: a part is waited for as long as join(share_wait=) says, then it comes from
        the host. Members whose host_ids or ranks differ load alone.

        IndexError: a block that does not exist. ValueError: a destination named twice, or lists of unequal length.
        QueueFull: too many unfinished transfers.
        """
        return self._core.submit("H2D", host_ids, gpu_ids, *self._named(shared, generation, ranks), after)

    def store(
        self,
        gpu_ids: Ids,
        host_ids: Ids,
        *,
        shared: str | None = None,
        generation: int = 0,
        ranks: Sequence[int] | None = None,
        after: StreamLike | None = None,
    ) -> ShareTransfer:
        """Copy GPU block gpu_ids[i] to host block host_ids[i]. As load(). A store that a member took part in that has
        stopped without ending, as by SIGSTOP, does not end before that process goes on or ends: it may still write.

        shared: as of load(): the members hold the same blocks, and each writes a part of them. A block is stored only
        if its part was written: failed_positions names those of a member that failed, did not call within
        join(store_wait=) seconds, or called with other host_ids or ranks. Ask every member before a hit is promised.
        """
        return self._core.submit("D2H", host_ids, gpu_ids, *self._named(shared, generation, ranks), after)

    def _named(self, name: str | None, generation: int, ranks: Sequence[int] | None) -> tuple[int, int, int]:
        """key, ranks as a mask, own rank; key 0: not shared."""
        if name is None:
            return 0, 0, 0
        mask = self._core.linked() | 1 << self._rank
        if ranks is not None:
            mask = sum({1 << _rank(rank, f"ranks[{index}]") for index, rank in enumerate(ranks)})
        digest = hashlib.blake2b(f"{generation}\0{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") | 1, mask, self._rank

    def stats(self) -> ShareStats:
        """Counts since the member joined."""
        return self._core.stats()

    def close(self, timeout: float | None = 60) -> None:
        """Leave the group. Unfinished transfers fail, except for the blocks that are under way. A second call does
        nothing. TimeoutError: pieces were still under way; call again."""
        limit, begin = seconds(timeout), time.monotonic()
        self._meeting.close(limit)
        self._core.close(limit and max(0.0, limit - (time.monotonic() - begin)))
        _members.discard(self)

    def __enter__(self) -> Member:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<kvswap.share.Member {self._rank} of {self._group!r}, with {list(self.peers)}>"


def join(
    group: str,
    rank: int,
    memory: _C.SharedPool,
    gpu: _C.Pool | Sequence[_C.Pool],
    *,
    host: _C.Pool | Sequence[_C.Pool] | None = None,
    coding: Coding | Sequence[Coding] | None = None,
    lend: bool = True,
    slots: int = 4,
    piece_nbytes: int = 4 << 20,
    share: float = 1.0,
    stall: float = 0.02,
    share_wait: float = 0.002,
    store_wait: float = 1.0,
) -> Member:
    """Join a group of processes of this user on this machine, each with a device of its own.

    group: the same name in each process: 1 to 40 letters, digits, '.', '_' or '-'. rank: 0 to 15, each once.
    memory: the blocks on the host: a SharedPool, block-first and registered, that each member has opened by its name.
    gpu: pools in memory of the device of `memory`. host: as many Pools in `memory`: the blocks of host[i] and gpu[i]
      are copied. None: memory.pool() for one pool, else memory's layers, one for each pool.
    coding: the blocks in memory are coded (docs/codecs.md): a kvswap.codecs.Coding for the blocks of each pool of gpu,
      or one for all. They cross all links coded. Blocks that do not fit are in a store's failed_positions, and are not
      stored. None: they are not coded, or the pools of host say how.
    lend: bring pieces for the others, when no transfer of this process uses the link in that direction.
    slots: pieces that each other member may bring at a time, 2 to 8; so much memory of the device is taken for each of
      them, and as much for 4 pieces once. piece_nbytes: about the size of a piece, which is whole blocks, at most
      64 MiB.
    share: bytes that another member brings for each byte that comes over the own link, 0.1 to 10.
    stall: seconds; a member that answers nothing for so long is not waited for. share_wait, store_wait: seconds that
      other members wait for this one's call of a shared load, and this one for others' parts of a shared store.

    Members may come and go at any time: Member.peers says who is here. Joining allocates memory and makes streams:
    do it before the model runs. Members of one group must agree on memory and piece_nbytes; others stay apart, and the
    log says why. kvswap.Error: another process has the rank, or no socket can be made.
    """
    if not _NAME.fullmatch(group):
        raise ValueError(f"group is {group!r}: 1 to 40 letters, digits, '.', '_' or '-'")
    rank = _rank(rank, "rank")
    if not isinstance(memory, _C.SharedPool):
        raise TypeError(f"memory must be a SharedPool, not {type(memory).__name__}")
    gpus = (gpu,) if isinstance(gpu, _C.Pool) else tuple(gpu)
    if not gpus:
        raise ValueError("gpu has no pools: at least one is needed")
    if host is not None and coding is not None:
        raise ValueError("coding is given, and host: the pools of host have their own coding")
    codings = tuple(coding) if isinstance(coding, Sequence) else (coding,) * len(gpus)
    if len(codings) != len(gpus):
        raise ValueError(f"gpu has {len(gpus)} pools, and coding {len(codings)} items: one for each, or one for all")
    hosts = _pools_of(memory, codings) if host is None else (host,) if isinstance(host, _C.Pool) else tuple(host)
    place = Place(memory.ptr, memory.slot_nbytes, memory.num_blocks, memory.path, memory.generation)
    return join_at(
        group,
        rank,
        place,
        gpus,
        hosts,
        lend=lend,
        slots=slots,
        piece_nbytes=piece_nbytes,
        share=share,
        stall=stall,
        share_wait=share_wait,
        store_wait=store_wait,
    )


def join_at(
    group: str,
    rank: int,
    place: Place,
    gpus: tuple[_C.Pool, ...],
    hosts: tuple[_C.Pool, ...],
    *,
    lend: bool = True,
    slots: int = 4,
    piece_nbytes: int = 4 << 20,
    share: float = 1.0,
    stall: float = 0.02,
    share_wait: float = 0.002,
    store_wait: float = 1.0,
) -> Member:
    """join(), for memory that is no SharedPool: an engine's."""
    core = core_of(
        place,
        gpus,
        hosts,
        slots=slots,
        piece_nbytes=piece_nbytes,
        share=share,
        stall=stall,
        share_wait=share_wait,
        store_wait=store_wait,
    )
    return member_of(core, group, rank, place, hosts[0].device, Role(True, bool(lend)))


def core_of(
    place: Place,
    gpus: tuple[_C.Pool, ...],
    hosts: tuple[_C.Pool, ...],
    *,
    slots: int = 4,
    piece_nbytes: int = 4 << 20,
    share: float = 1.0,
    stall: float = 0.02,
    share_wait: float = 0.002,
    store_wait: float = 1.0,
    **role: int,
) -> _C._Share:
    """A member that has not met any other. gpus: none: it only lends its link, and hosts is one pool, of all bytes.
    role: takes_only, file, file_nbytes (csrc/share/share.h)."""
    return _C._Share(
        hosts,
        gpus,
        *place[:3],
        int(piece_nbytes),
        int(slots),
        float(share),
        float(stall),
        float(share_wait),
        float(store_wait),
        place.padded,
        stride=place.stride,
        parts=place.parts,
        part_stride=place.part_stride,
        **role,  # type: ignore[arg-type]
    )


def member_of(
    core: _C._Share, group: str, rank: int, place: Place, device: _C.Device, role: Role, kind: str = "share"
) -> Member:
    """Meet the others of the group. kind: of the group (_meet.py)."""
    meeting = Meeting(core, group, rank, place.path, place.generation, role.lends, kind)
    member = Member(core, meeting, group, rank, device.name, role)
    _members.add(member)
    atexit.unregister(_close_all)
    atexit.register(_close_all)  # last, so that it runs first: before the device is shut down
    return member


def rows() -> list[dict[str, Any]]:
    """kvswap.metrics.ShareMetrics of each device with members."""
    found: dict[str, dict[str, Any]] = {}
    for member in list(_members):
        if member._meeting.stopped:
            continue
        row = found.setdefault(member._device, {"device": member._device, "lenders": 0, "borrowers": 0})
        peers = len(member.peers)
        row["lenders"] += peers * member._role.borrows
        row["borrowers"] += peers * member._role.lends
    return list(found.values())


def _rank(rank: int, name: str) -> int:
    if not 0 <= rank < _MOST_RANKS:
        raise IndexError(f"{name} is {rank}; a group has ranks 0 to {_MOST_RANKS - 1}")
    return int(rank)


def _pools_of(memory: _C.SharedPool, codings: Sequence[Coding | None]) -> tuple[_C.Pool, ...]:
    count = len(codings)
    if count == 1:
        return (memory.pool(coding=codings[0]),)
    if memory.layers != count:
        raise ValueError(f"gpu has {count} pools, and memory {memory.layers} layers: give host, a Pool for each")
    pools: list[_C.Pool] = []
    nbytes, step = memory.layer_nbytes, memory.slot_nbytes
    for ptr, coding in zip(memory.layer_ptrs(), codings, strict=True):
        options: dict[str, Any] = {"group": pools[0]} if pools else {}
        pools.append(_C.Pool(memory.device, int(ptr), memory.num_blocks, nbytes, stride=step, coding=coding, **options))
    return tuple(pools)


def _close_all() -> None:
    for member in list(_members):
        with contextlib.suppress(Exception):
            member.close(10)
