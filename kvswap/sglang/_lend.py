"""SGLang engines on one machine that lend each other their GPU's link (docs/share.md, "Between engines").

Each rank's host memory is a file, which lenders of other engines map. SGLang keeps the keys of all pages before their
values: a block has two parts (share.Place). A large load goes over several links, and the scheduler waits for all of
it: blocks come with all their layers, in any order, and no stream can wait for them. So a load of less than
KVSWAP_SGLANG_LEND_MIB goes over the own link, layer by layer, and the model computes meanwhile. A write-back goes over
several links only if SGLang's scheduler waits for it, as the policy write_back does.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.pool_host import common
from sglang.srt.runtime_context import get_memory

from kvswap import _C
from kvswap._log import logger
from kvswap.sglang import _plugin
from kvswap.sglang._copies import IS_MLA, queue_of
from kvswap.sglang._joint import LAYOUTS, Joint, group_of, pools_of, tell, why_not
from kvswap.sglang._places import NotOurs, Places, places_of
from kvswap.share import Place
from kvswap.share._lend import HostFile, Lending
from kvswap.share._steps import Steps

_log = logger("kvswap.sglang")
_SLOT = 2 << 20  # bytes: of the host memory
_PIECE = 4 << 20
_LEAST_STORE = 4 * _PIECE  # of fewer pieces, others bring next to nothing
_STALL, _STORE_TIMEOUT = 0.02, 200.0  # seconds

steps = Steps()  # of this process's model
_forward: Any = None  # the stream of the last step


class _Memory(NamedTuple):
    pool: _C.SharedPool
    fd: int
    begin: int  # of its slots in the file


class LentAllocator(common.HostTensorAllocator):  # type: ignore[misc]  # SGLang may be missing
    """Allocates host tensors in files without a name, which lenders map. SGLang registers the memory here."""

    memory: _Memory | None = None

    def allocate(self, dims: tuple[int, ...], dtype: Any, device: str) -> Any:
        """A tensor on the CPU, zeros. Where nothing is lent, or memory is short, it is SGLang's own."""
        nbytes = math.prod(dims) * dtype.itemsize
        if not _lends or device != "cpu" or not nbytes or envs.SGLANG_HUGEPAGE_SIZE.get():
            return super().allocate(dims, dtype, device)
        slots = -(-nbytes // _SLOT)
        try:
            pool = _C.SharedPool(f"sglang-{secrets.token_hex(8)}", slots, _SLOT, register=False)
        except (OSError, MemoryError, _C.Error) as error:
            _log.warning("host memory of %d bytes is left to SGLang, and not lent to: %s", nbytes, error)
            return super().allocate(dims, dtype, device)
        fd = os.open(pool.path, os.O_RDWR | os.O_CLOEXEC)
        pool.unlink()  # nothing is left of it when the engine is killed
        self.memory = _Memory(pool, fd, os.fstat(fd).st_size - slots * _SLOT)
        self.dtype, self.dims = dtype, dims
        return torch.frombuffer(pool, dtype=dtype, count=math.prod(dims)).reshape(dims)


class _Lent:
    """What a host pool lends and borrows."""

    def __init__(self, found: Places, memory: _Memory, engine: str, asked: _plugin.Lend, stores: bool) -> None:
        """stores: write-backs go over several links, too."""
        self.asked, self._memory, self._count = asked, memory, 0
        self._unfinished: Sequence[Joint] = ()  # stores
        parts, begin = found.cpu.shape[1], found.begin
        block, half = parts * found.cpu_stride, found.cpu_blocks * found.cpu_stride
        place = Place(
            begin, block, found.cpu_blocks, memory.pool.path, memory.pool.generation,
            stride=found.cpu_stride, parts=parts, part_stride=half,
        )  # fmt: skip
        file = HostFile(memory.fd, memory.begin + begin - memory.pool.ptr, begin)
        steps.attach(found.device, lambda: queue_of(_forward))
        self.lending = Lending(
            asked.name, engine, place, *pools_of(found), file,
            is_idle=steps.is_idle, lenders=asked.lenders, piece_nbytes=_PIECE, stall=_STALL,
        )  # fmt: skip
        self._least = {"H2D": -(-asked.least_nbytes // block)}  # blocks, by direction
        if stores:
            self._least["D2H"] = -(-_LEAST_STORE // block)

    def joins(self, blocks: int, direction: str | None) -> bool:
        """As Places.joins()."""
        least = min(self._least.values()) if direction is None else self._least.get(direction)
        return least is not None and blocks >= least and bool(self.lending.member.peers)

    def submit(self, ids: tuple[Any, Any], direction: str, queue: Any) -> Joint:
        """Begin a load or store of these blocks (device, host), after what `queue` has now."""
        load, member = direction == "H2D", self.lending.member
        transfer = member.load(*ids[::-1], after=queue) if load else member.store(*ids, after=queue)
        self._count += 1
        made = Joint(transfer, self._count)
        if not load:
            self._unfinished = [store for store in self._unfinished if not store.done()] + [made]
        return made

    def settle(self) -> None:
        """Wait for stores that SGLang is about to forget: other stores may write to the same pages next, and what goes
        over several links is in no stream's order."""
        for store in self._unfinished:
            with suppress(_C.Error):
                store.wait(_STORE_TIMEOUT)

    def close(self) -> None:
        """Leave all groups, before the memory is given back."""
        self.lending.close()
        del self.lending  # and its pools: the device's memory may be given back too
        os.close(self._memory.fd)


@dataclass(frozen=True)
class LentPlaces(Places):
    """Places in the host pool of an engine to which others lend their links."""

    lent: Any = None

    @property
    def how(self) -> str:  # type: ignore[override]
        """For the log."""
        asked = self.lent.asked
        least = asked.least_nbytes >> 20
        return f"; loads of {least} MiB and more use the links of engines of the name {asked.name}"

    def joins(self, blocks: int, direction: str | None = None) -> bool:
        """As Places.joins()."""
        return bool(self.lent.joins(blocks, direction))

    def submit(self, ids: tuple[Any, Any], direction: str, queue: Any) -> Joint:
        """Begin a load or store over several links."""
        made: Joint = self.lent.submit(ids, direction, queue)
        return made


# -- hooks ------------------------------------------------------------------------------------------------------------

_lends = False  # while SGLang makes host pools that are lent to
_pools: WeakKeyDictionary[Any, _Lent] = WeakKeyDictionary()


def init_hicache(original: Callable[..., Any], cache: Any, server_args: Any, params: Any, *_: Any) -> Any:
    """UnifiedRadixCache.init_hicache: it makes the host pools, on all ranks."""
    global _lends
    if cache is _plugin.PROBE:
        return _plugin.PROBE
    asked, why = _plugin.lend(), _why_not(cache, server_args)
    assert asked is not None
    if why is not None:
        _log.warning("%s is set, but links are not lent: %s", _plugin.LEND_SWITCH, why)
        return original(cache, server_args, params)
    engine = _name_of(cache)
    _lends = True
    try:
        made = original(cache, server_args, params)
    finally:
        _lends = False
    for entry in cache.host_pool_group.entries:
        _start(entry.host_pool, engine, asked, cache.cache_controller)
    return made


def _why_not(cache: Any, server_args: Any) -> str | None:
    """Why links are not lent, the same on all ranks; None: they are."""
    if server_args.enable_memory_saver:
        return "with --enable-memory-saver the GPU's memory can be released, and others would still bring pages to it"
    layout = get_memory().hicache_mem_layout
    if layout not in LAYOUTS:
        return f"--hicache-mem-layout {layout} keeps the layers of a page apart: use page_first_direct"
    return why_not(cache, _plugin.LEND_SWITCH)


def _name_of(cache: Any) -> str:
    """A text that the ranks of this engine have, and no other engine has."""
    name, group = secrets.token_bytes(8), group_of(cache)
    if group is not None and torch.distributed.get_world_size(group=group) > 1:
        name = tell(name, group)
    return name.hex()


def _start(pool: Any, engine: str, asked: _plugin.Lend, controller: Any) -> None:
    memory = getattr(pool.allocator, "memory", None)
    if memory is None:
        _log.warning("host pool %s: links are not lent: its memory is not kvswap's", pool.pool_label)
        return
    try:
        if type(pool) not in IS_MLA:
            raise NotOurs("SGLang copies this kind of pool")
        found = places_of(pool, IS_MLA[type(pool)])
        lent = _Lent(found, memory, engine, asked, controller.write_policy == "write_back")
    except (NotOurs, AttributeError, ValueError, MemoryError, _C.Error) as error:
        _log.warning("host pool %s: links are not lent: %s", pool.pool_label, error)
        return
    _pools[pool] = lent
    places = LentPlaces(**vars(found), lent=lent)
    pool.places = lambda: places
    controller.l2_transfer_engine.places(pool)


def clear(original: Callable[..., Any], pool: Any, *_: Any) -> Any:
    """HostKVCache.clear: all pages are forgotten."""
    if pool is _plugin.PROBE:
        return _plugin.PROBE
    if pool in _pools:
        _pools[pool].settle()
    return original(pool)


def destroy(original: Callable[..., Any], pool: Any, *_: Any) -> Any:
    """HostKVCache.destroy: the memory is given back."""
    if pool is _plugin.PROBE:
        return _plugin.PROBE
    lent = _pools.pop(pool, None)
    if lent is not None:
        lent.close()
    return original(pool)


def run_batch(original: Callable[..., Any], scheduler: Any, *given: Any, **named: Any) -> Any:
    """Scheduler.run_batch: a step."""
    global _forward
    if scheduler is _plugin.PROBE:
        return _plugin.PROBE
    steps.begin()
    try:
        return original(scheduler, *given, **named)
    finally:
        _forward = scheduler.forward_stream if scheduler.enable_overlap else scheduler.schedule_stream
        steps.end()


AROUND_TREE = {"init_hicache": init_hicache}
AROUND_POOL = {"clear": clear, "destroy": destroy}
