"""One host pool for all ranks of a machine whose KV is the same, as that of MLA under tensor parallelism is.

SGLang keeps a host pool a rank. Here rank 0 creates a SharedPool, which the other ranks map. A load is one of
kvswap.share: each rank brings a part from host memory, and takes the other parts from the other ranks' GPUs. A store is
written once, a part by each rank, and ends on a rank when all ranks have written their parts.

Why one pool is safe: each rank's SGLang allocates and frees host pages for itself, but all do so in the same order,
because their schedulers take the same decisions. A page is locked while it is loaded or stored, until all ranks have
said that they are done (SGLang reduces its acknowledgements over ranks), so that no rank overwrites what another one
still reads. Ranks that disagree on a page are found when it is stored, before it can be loaded: kvswap.share compares
the pages. The store fails on all ranks, and ends the engine.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from kvswap import _C, share
from kvswap._log import logger
from kvswap.sglang import _plugin
from kvswap.sglang._joint import LAYOUTS, Joint, group_of, pools_of, tell, why_not
from kvswap.sglang._places import NotOurs, Places, block_rows, buffers_of, places_of

_log = logger("kvswap.sglang")
_MOST_RANKS = 16
_JOIN_TIMEOUT = 120.0  # seconds, for the other ranks to join
_STORE_TIMEOUT = 200.0  # seconds, for the other ranks' parts of a store
_NAME = struct.Struct("<8sQ")  # of a pool: its name, and the generation


class Ranks(NamedTuple):
    """The processes with the same KV."""

    group: Any  # SGLang's process group, on the CPU
    rank: int
    size: int


@dataclass(frozen=True)
class SharedPlaces(Places):
    """Places in a host pool of several ranks."""

    pool: Any = None

    shared = True

    def joins(self, blocks: int, direction: str | None = None) -> bool:
        """As Places.joins()."""
        return True

    @property
    def how(self) -> str:  # type: ignore[override]
        """For the log."""
        return f"; {self.pool.ranks.size} ranks share the pool"

    def submit(self, ids: tuple[Any, Any], direction: str, queue: Any) -> Joint:
        """Begin a load or store of these blocks (device, host), after what `queue` has now."""
        pool = self.pool
        number = pool.numbers[direction] = pool.numbers[direction] + 1
        load = direction == "H2D"
        call, given = (pool.member.load, ids[::-1]) if load else (pool.member.store, ids)
        name = f"{'load' if load else 'store'} {number}"
        try:
            transfer = call(*given, shared=name, ranks=range(pool.ranks.size), after=queue)
        except _C.QueueFull:  # it is submitted again
            pool.numbers[direction] -= 1
            raise
        made = Joint(transfer, number)
        if not load:
            pool.stores = [store for store in pool.stores if not store.done()] + [made]
        return made


class SharedMLATokenToKVPoolHost(MLATokenToKVPoolHost):  # type: ignore[misc]  # SGLang may be missing
    """SGLang's host pool of latents, in memory of all ranks; where they cannot share it, it is SGLang's own."""

    shared: _C.SharedPool | None = None
    member: share.Member | None = None
    ranks: Ranks
    stores: Sequence[Joint] = ()  # unfinished ones, and the last ones

    def places(self) -> Places:
        """For CopyEngine."""
        found = places_of(self, True)
        return found if self.member is None else SharedPlaces(**vars(found), pool=self)

    def _allocate_host_buffer(self) -> None:
        """SGLang's: it divides the machine's free memory by the ranks. Of one pool for all kvswap looks whether it
        fits."""
        ranks = _sharing
        why = "it is none of HiCache's" if ranks is None else _no_pool(self)
        if why is None:
            assert ranks is not None
            self.shared = _memory_of(self, ranks)
        elif ranks is not None:
            _log.warning("host pool %s is not shared by %d ranks: %s", self.pool_label, ranks.size, why)
        if self.shared is None:
            super()._allocate_host_buffer()
            return
        assert ranks is not None
        self.ranks, self.numbers = ranks, {"H2D": 0, "D2H": 0}
        with base.host_memory_budget_scope(self.size * self.size_per_token):
            super()._allocate_host_buffer()

    def init_kv_buffer(self) -> Any:
        """SGLang's: the host memory."""
        if self.shared is None:
            return super().init_kv_buffer()
        self.token_stride_size = self.kv_cache_dim * self.dtype.itemsize
        self.layout_dim = self.token_stride_size * self.layer_num
        nbytes = self.shared.num_blocks * self.shared.slot_nbytes
        dims: tuple[int, ...] = (self.size, self.layer_num, 1, self.kv_cache_dim)
        if self.layout == "page_first_direct":
            dims = (self.page_num, self.layer_num, self.page_size, 1, self.kv_cache_dim)
        return torch.frombuffer(self.shared, dtype=torch.uint8, count=nbytes).view(self.dtype).reshape(dims)

    def _initialize_transfer_views(self) -> None:
        """SGLang's: of its own copies. Otherwise it would leave the ids of a write-back in GPU memory."""
        super()._initialize_transfer_views()
        if self.shared is not None:
            self.can_use_write_back_jit = False

    def join(self) -> None:
        """Meet the other ranks, in all of them at once. ValueError: they cannot be reached."""
        assert self.shared is not None
        ranks, name = self.ranks, self.shared.path.rpartition(".")[2]
        why = None
        try:
            gpu, cpu = pools_of(places_of(self, True))
            self.member = share.join(name, ranks.rank, self.shared, gpu, host=cpu, store_wait=_STORE_TIMEOUT)
            self.member.wait_peers(range(ranks.size), timeout=_JOIN_TIMEOUT)
        except (NotOurs, AttributeError, ValueError, TimeoutError, MemoryError, _C.Error) as error:
            why = str(error)
        if not _all_agree(ranks, why is None):
            raise ValueError(
                f"{_plugin.SHARE_SWITCH}: host pool {self.pool_label} cannot be shared by {ranks.size} ranks: "
                f"{why or 'another rank says why'}. Unset {_plugin.SHARE_SWITCH} for this engine"
            )

    def clear(self) -> None:
        """SGLang's: nothing is stored. It does not wait for stores that it has forgotten, and other ranks may write to
        the same pages next; a store ends when all ranks have written."""
        for store in self.stores:
            with suppress(_C.Error):
                store.wait(_STORE_TIMEOUT)
        super().clear()

    def backup_from_device_all_layer(self, *given: Any, **named: Any) -> None:
        """SGLang's own copies: each rank would write all, and none would know when the others have."""
        if self.shared is not None:
            raise NotImplementedError(f"host pool {self.pool_label} is shared by ranks: kvswap's copies write it")
        super().backup_from_device_all_layer(*given, **named)

    def destroy(self) -> None:
        """SGLang's: the memory is given back."""
        if self.shared is None:
            super().destroy()
            return
        if self.member is not None:
            self.member.close()
        self.kv_buffer = None


# -- at the start -----------------------------------------------------------------------------------------------------

_sharing: Ranks | None = None  # while SGLang makes the host pools of its HiCache


def init_hicache(original: Callable[..., Any], cache: Any, server_args: Any, params: Any, *_: Any) -> Any:
    """UnifiedRadixCache.init_hicache: it makes the host pools, on all ranks."""
    global _sharing
    if cache is _plugin.PROBE:
        return _plugin.PROBE
    ranks = _ranks_of(cache)
    if isinstance(ranks, str):
        _log.warning("%s is set, but host pools are not shared: %s", _plugin.SHARE_SWITCH, ranks)
        return original(cache, server_args, params)
    _sharing = ranks
    try:
        made = original(cache, server_args, params)
    finally:
        _sharing = None
    for entry in cache.host_pool_group.entries:
        if getattr(entry.host_pool, "shared", None) is not None:
            entry.host_pool.join()
            cache.cache_controller.l2_transfer_engine.places(entry.host_pool)
    return made


def _ranks_of(cache: Any) -> Ranks | str:
    """The ranks with which `cache` shares its pool; or why there are none. The same on all ranks."""
    why = why_not(cache, _plugin.SHARE_SWITCH)
    if why is not None:
        return why
    group = group_of(cache)
    size = 1 if group is None else torch.distributed.get_world_size(group=group)
    if size == 1:
        return "one rank has this KV"
    if size > _MOST_RANKS:
        return f"{size} ranks have this KV, and at most {_MOST_RANKS} can share it"
    return Ranks(group, torch.distributed.get_rank(group=group), size)


def _no_pool(pool: Any) -> str | None:
    """Why this pool cannot be shared, the same on all ranks; None: it can."""
    if pool.layout not in LAYOUTS:
        return f"--hicache-mem-layout {pool.layout} keeps the layers of a page apart: use page_first_direct"
    try:
        parts, rows, _ = buffers_of(pool, True)
        _, stride, row = block_rows(parts, rows, pool.layer_num)
    except (NotOurs, AttributeError) as error:
        return str(error)
    if stride != row and pool.layout == "page_first_direct":
        return f"device rows of {row} bytes are {stride} bytes apart"
    return None


def _all_agree(ranks: Ranks, agreed: bool) -> bool:
    flag = torch.tensor(int(agreed))
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=ranks.group)
    return bool(flag.item())


def _memory_of(pool: Any, ranks: Ranks) -> _C.SharedPool | None:
    """Host memory that all ranks have mapped; None: they cannot, and keep pools of their own."""
    token = pool.kv_cache_dim * pool.dtype.itemsize * pool.layer_num
    blocks, nbytes = (pool.size, token) if pool.layout == "page_first" else (pool.page_num, token * pool.page_size)
    name, generation = secrets.token_bytes(8), 0  # 0: rank 0 has none
    made, why = None, None
    for creates in (True, False):  # first rank 0, then the others
        if creates == (ranks.rank == 0) and (creates or generation):
            try:
                made = _C.SharedPool(
                    *(f"sglang-{name.hex()}", blocks, nbytes),
                    create=creates,
                    generation=None if creates else generation,
                    device=_C.Device(pool._transfer_device),
                    numa="interleave",
                )
                generation = made.generation
            except (OSError, ValueError, MemoryError, _C.Error) as error:
                why = str(error)
        if creates:
            name, generation = _NAME.unpack(tell(_NAME.pack(name, generation), ranks.group))
    if why is not None:
        _log.warning("host pool %s is not shared by %d ranks: %s", pool.pool_label, ranks.size, why)
    if _all_agree(ranks, made is not None):
        if made is not None and ranks.rank == 0:
            made.unlink()  # nothing is left of it when the ranks are killed
        return made
    if made is not None:
        made.close()
    return None


AROUND = {"init_hicache": init_hicache}
