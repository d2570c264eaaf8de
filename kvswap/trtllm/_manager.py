"""KVCacheTransferManager and its pools."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from kvswap import _C
from kvswap._timeouts import seconds
from kvswap.codecs import Coding, Field
from kvswap.codecs._pages import kind_of, name_of
from kvswap.files import FileTransfer
from kvswap.trtllm._files import ManagerFiles

if TYPE_CHECKING:
    from kvswap.typing import DeviceLike

TransferMode: TypeAlias = Literal["dram", "posix", "gds"]
"""Transfer modes: between memories ("dram"), to and from files ("posix"), to and from files by GPUDirect Storage
("gds")."""

_BITS = {
    **dict.fromkeys(("fp32", "float32", "int32"), 32),
    **dict.fromkeys(("fp16", "float16", "half", "bf16", "bfloat16"), 16),
    **dict.fromkeys(("fp8", "e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"), 8),
    **dict.fromkeys(("fp4", "nvfp4", "int4"), 4),
}

_MEMORIES = ("secondary", "primary")  # by is_primary

_Parts: TypeAlias = NDArray[np.int64]
_Ids: TypeAlias = NDArray[Any] | Sequence[Any]


class Block(NamedTuple):
    """A block and its memory: is_primary True: GPU memory; False: host memory."""

    index: int  # type: ignore[assignment]  # slot in the pools of that memory, from 0; hides tuple.index()
    is_primary: bool = True


def _index(value: Any, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, not {type(value).__name__}") from None


def _bits_of(dtype: Any) -> int:
    """Bits of an element, from a name, a number of bits, or an object with an itemsize (NumPy, torch, TensorRT)."""
    if isinstance(dtype, str):
        name = dtype.lower().removeprefix("torch.")
        if name not in _BITS:
            raise ValueError(f"dtype is {dtype!r}; by name it is one of {', '.join(_BITS)}")
        return _BITS[name]
    if isinstance(dtype, int | np.integer) and not isinstance(dtype, bool):
        if isinstance(dtype, Enum) or dtype not in (4, 8, 16, 32, 64):
            raise ValueError(f"dtype is {dtype!r}; a number is the bits of an element: 4, 8, 16, 32 or 64")
        return int(dtype)
    if isinstance(dtype, type) and issubclass(dtype, np.generic):
        dtype = np.dtype(dtype)
    itemsize = getattr(dtype, "itemsize", None)
    if not isinstance(itemsize, int | float) or itemsize <= 0 or itemsize * 8 != int(itemsize * 8):
        raise TypeError(f"dtype must be a name, a number of bits, or have an itemsize, not {type(dtype).__name__}")
    return int(itemsize * 8)


@dataclass(frozen=True, eq=False)
class KVCacheBlockPool:
    """The blocks of a set of layers, in both memories. TensorRT-LLM's KVCacheBlockPool (kvCacheManager.h).

    A block is laid out as [num_layers][kv_factor][num_kv_heads][tokens_per_block][size_per_head] elements, as in
    TensorRT-LLM; block i of a memory lies at its address + i * stride bytes.

    primary, secondary: address or tensor of the GPU's and of the host's blocks (pinned, or registered with the device).
      The pool holds a tensor, which has its blocks and no more bytes unless a stride is given. secondary None goes with
      num_secondary_blocks 0: no host memory.
    num_primary_blocks, num_secondary_blocks: number of blocks; equal in all pools of a manager, because a block is one
      slot of each pool.
    num_layers, kv_factor (2: keys and values; 1: one latent, as MLA has), num_kv_heads, tokens_per_block,
      size_per_head: the shape, in elements.
    dtype: of an element: a name ("fp16", "bf16", "fp8", "fp32", "int8", "fp4", "int4", ...), a number of bits, or a
      NumPy, torch or TensorRT dtype (its itemsize counts).
    block_nbytes: bytes of a block; None: the shape's. Bytes beyond the shape are padding at the block's end, and are
      moved with whole blocks.
    primary_stride, secondary_stride: bytes from block to block; None: block_nbytes.
    contains_block_scales: the elements are scales of another pool's elements; their order interleaves tokens.
    codec: of the host's blocks (kvswap.codecs): a block there has secondary_nbytes bytes, which secondary_stride counts
      by default. dtype is then fp16 or bf16 by name, or such a dtype, and a block has no padding. Blocks move whole
      between the memories, whatever num_tokens_to_copy says. All pools of a manager are coded, or none.
    """

    primary: Any = field(repr=False)
    secondary: Any = field(repr=False)
    num_primary_blocks: int
    num_secondary_blocks: int
    num_layers: int
    kv_factor: int
    num_kv_heads: int
    tokens_per_block: int
    size_per_head: int
    dtype: Any
    block_nbytes: int | None = None
    primary_stride: int | None = None
    secondary_stride: int | None = None
    contains_block_scales: bool = False
    codec: str | None = None
    coding: Coding | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        for name in ("num_primary_blocks", "num_layers", "kv_factor", "num_kv_heads", "tokens_per_block"):
            self._check_number(name, 1)
        self._check_number("size_per_head", 1)
        self._check_number("num_secondary_blocks", 0)
        if (self.secondary is None) != (self.num_secondary_blocks == 0):
            given = "no secondary" if self.secondary is None else "a secondary"
            raise ValueError(f"{given} was given, but num_secondary_blocks is {self.num_secondary_blocks}")
        layer_bits = self.kv_factor * self.num_kv_heads * self.tokens_per_block * self.size_per_head * self.bits
        if layer_bits % 8:
            raise ValueError(f"a layer of a block has {layer_bits} bits: no whole number of bytes")
        least = self.num_layers * layer_bits // 8
        if self.block_nbytes is None:
            object.__setattr__(self, "block_nbytes", least)
        self._check_number("block_nbytes", least)
        if self.codec is not None:
            object.__setattr__(self, "coding", self._make_coding(self.codec, least))

    def _make_coding(self, codec: str, nbytes: int) -> Coding:
        """Keys and values of each layer are pages."""
        kind = kind_of(self.dtype)
        if kind not in ("bf16", "fp16") or self.contains_block_scales:
            what = "its elements are scales" if self.contains_block_scales else f"its dtype is {name_of(self.dtype)}"
            raise ValueError(f"codec is {codec!r}, and codecs code bf16 and fp16 by name: {what}")
        if self.block_nbytes != nbytes:
            raise ValueError(f"codec is {codec!r}, and a block has {self.nbytes() - nbytes} bytes of padding")
        page = self.layer_nbytes // self.kv_factor
        return Coding(nbytes, codec, page_nbytes=page, fields=[Field(0, page, kind)])

    @property
    def secondary_nbytes(self) -> int:
        """Bytes of a block in host memory."""
        return self.nbytes() if self.coding is None else self.coding.coded_nbytes

    def _check_number(self, name: str, least: int) -> None:
        number = _index(getattr(self, name), name)
        if number < least:
            raise ValueError(f"{name} is {number}: must be at least {least}")
        object.__setattr__(self, name, number)

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return _bits_of(self.dtype)

    def _shape(self) -> list[int | bool]:
        """The fields that define the layout of a block."""
        numbers = [self.num_layers, self.kv_factor, self.num_kv_heads, self.tokens_per_block, self.size_per_head]
        return [*numbers, self.bits, self.nbytes(), self.contains_block_scales]

    @property
    def can_cut(self) -> bool:
        """Whether the first tokens of a block can be copied alone. False for 4-bit types and block scales."""
        return self.bits % 8 == 0 and not self.contains_block_scales

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer of a block, padding not counted."""
        elements = self.kv_factor * self.num_kv_heads * self.tokens_per_block * self.size_per_head
        return elements * self.bits // 8

    def nbytes(self, num_tokens: int = 0) -> int:
        """Bytes of a block that a copy of num_tokens tokens moves. num_tokens <= 0, or all tokens: the whole block."""
        if not self.cuts(num_tokens):
            assert self.block_nbytes is not None
            return self.block_nbytes
        return self.num_layers * self.layer_nbytes // self.tokens_per_block * num_tokens

    def cuts(self, num_tokens: int) -> bool:
        """Whether a copy of num_tokens tokens moves less than a whole block."""
        return self.can_cut and 0 < num_tokens < self.tokens_per_block

    def _part(self, pair: int, num_tokens: int, layer: int | None) -> tuple[int, int, int, int, int, int]:
        """A row of move_blocks(parts=): the tokens of one layer; layer None: of all layers."""
        layers = self.num_layers if layer is None else 1
        begin = 0 if layer is None else layer * self.layer_nbytes
        if self.cuts(num_tokens):
            rows = layers * self.kv_factor * self.num_kv_heads
            pitch = self.layer_nbytes // (self.kv_factor * self.num_kv_heads)
            return pair, layer or 0, begin, rows, pitch // self.tokens_per_block * num_tokens, pitch
        assert self.block_nbytes is not None
        last = layer is None or layer == self.num_layers - 1
        nbytes = self.block_nbytes - begin if last else self.layer_nbytes
        return pair, layer or 0, begin, 1, nbytes, nbytes


def _make_parts(pools: Sequence[KVCacheBlockPool], num_tokens: int, layered: bool) -> _Parts | None:
    """move_blocks(parts=), shape (parts, 6), or None for whole blocks.

    layered: in the order of the layers: layer l of every pool that has one, then layer l + 1.
    """
    if layered:
        layers = range(max(pool.num_layers for pool in pools))
        rows = [
            pool._part(i, num_tokens, layer)
            for layer in layers
            for i, pool in enumerate(pools)
            if layer < pool.num_layers
        ]
    elif any(pool.cuts(num_tokens) for pool in pools):
        rows = [pool._part(i, num_tokens, None) for i, pool in enumerate(pools)]
    else:
        return None
    parts = np.array(rows, np.int64)
    parts.flags.writeable = False
    return parts


def _locate(blocks: Any, is_primary: bool, name: str) -> tuple[_Ids, bool]:
    """The slots of a batch, and whether they are in primary memory. Plain numbers are in the given memory."""
    if isinstance(blocks, Block):
        return [blocks.index], bool(blocks.is_primary)
    if isinstance(blocks, int):
        return [blocks], is_primary
    if hasattr(blocks, "__array__"):  # arrays, CPU tensors and NumPy's numbers
        array = np.asarray(blocks)
        return (array if array.ndim else array.reshape(1)), is_primary
    if hasattr(blocks, "__index__"):
        return [operator.index(blocks)], is_primary
    if isinstance(blocks, str) or not isinstance(blocks, Iterable):
        raise TypeError(f"{name} must be a Block, an int, or an array or sequence of them, not {type(blocks).__name__}")
    items = blocks if isinstance(blocks, list | tuple) else list(blocks)
    if Block not in map(type, items):
        return items, is_primary
    memories = [bool(item.is_primary) if isinstance(item, Block) else is_primary for item in items]
    if memories.count(memories[0]) < len(items):
        other = memories.index(not memories[0])
        raise ValueError(
            f"{name}[{other}] is in {_MEMORIES[memories[other]]} memory, but {name}[0] in {_MEMORIES[memories[0]]}: "
            "a batch lies in one memory"
        )
    return [item.index if isinstance(item, Block) else item for item in items], memories[0]


def _check_mode(mode: str) -> None:
    if mode not in ("dram", "posix", "gds"):
        raise ValueError(f"mode is {mode!r}; it is one of 'dram', 'posix', 'gds'")


@dataclass
class KvCacheTransferStats:
    """Counts of submitted blocks and their bytes, whatever the outcome. A block of all pools counts once.

    onboard: secondary to primary memory. offload: primary to secondary. intra_device_copy: within primary memory.
    """

    onboard_blocks: int = 0
    onboard_bytes: int = 0
    offload_blocks: int = 0
    offload_bytes: int = 0
    intra_device_copy_blocks: int = 0
    intra_device_copy_bytes: int = 0


class _Call(NamedTuple):
    """The differences between offload() and onboard()."""

    source: str  # name of the argument
    target: str
    source_primary: bool  # the memory of plain numbers
    target_primary: bool
    opposite: str


_OFFLOAD = _Call("block", "offload_block", True, False, "onboard")
_ONBOARD = _Call("offloaded_block", "block", False, True, "offload")


class KVCacheTransferManager:
    """Moves blocks between primary (GPU) and secondary (host) memory, ordered with the model and with each other.

    pools: KVCacheBlockPools; a block is the same slot of each. device: Device, its name, or None: the current GPU,
      else host:0. path, priority, max_ctas, pace_gbps: as kvswap.move_blocks takes them, for every copy.
    file_options: arguments of kvswap.files.FileStore for modes "posix" and "gds": capacity (default 64 GiB),
      durability, engine, gds (in mode "gds"), ...

    Order. Offloads are one lane, onboards another. A lane behaves as a stream of its own, in the order of submission.
    Copies of the two lanes run side by side, and onboards have the higher priority. A copy of either lane waits for
    the last write to each block that it reads, and for the last write to and all reads since of each block that it
    writes; for nothing else. The model's kernels are on other streams:

    - sync_with_compute(stream) before the first copy of a step: copies submitted from then on start after all work
      that the stream has queued. Call it again after queueing kernels that write a block which a copy will read, or
      that use a block which a copy will write.
    - sync_transfers(stream) after the last copy: later work of the stream starts after all copies so far.

    Each is independent of the other and may be called at any time, any number of times, on any number of streams.

    Failures. A copy that the device refuses fails the Transfer, not the call: wait() and make_wait() raise its error.
    After the end `.error` holds the error and `.failed_positions` the positions in the batch. sync_transfers() gives
    order only: check `.error` before using the bytes. A block copied from a lost block is lost too, until it is
    written whole or kvswap.testing.note_access() records a write.

    Threads: any thread may call any method. Copies of the same blocks from two threads run in the order of submission.

    Limits: a lane holds 128 unfinished transfers (kvswap.QueueFull beyond): submit batches, not blocks one by one.
    """

    def __init__(
        self,
        pools: Iterable[KVCacheBlockPool],
        *,
        device: DeviceLike | None = None,
        path: str = "auto",
        priority: str = "normal",
        max_ctas: int | None = None,
        pace_gbps: float | None = None,
        file_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._pools = _check_pools(pools)
        self._coded = self._pools[0].codec is not None
        self._device = device if isinstance(device, _C.Device) else _C.Device(device)
        self._options: dict[str, Any] = {
            "path": path,
            "priority": priority,
            "max_ctas": max_ctas,
            "pace_gbps": pace_gbps,
        }
        primary = self._open(True)
        self._sides = (self._open(False), primary)  # by is_primary
        # These streams carry waits only. Copies run on the lanes' streams, where onboards have the higher priority.
        self._offload_stream = _C.Stream(self._device)
        self._onboard_stream = _C.Stream(self._device)
        self._most_tokens = max(pool.tokens_per_block for pool in self._pools)
        self._parts = self._cached_parts()
        self._files = ManagerFiles(
            self._device,
            [pool.nbytes() for pool in self._pools],
            {"pools": [pool._shape() for pool in self._pools]},
            file_options or {},
        )
        self._lock = threading.Lock()
        self._event = _C.Event(self._device, timing=False)  # guarded by _lock
        self._stats = KvCacheTransferStats()  # guarded by _lock
        self._closed = False

    def _open(self, primary: bool) -> tuple[_C.Pool, ...]:
        """One kvswap.Pool for each pool, grouped; none for secondary memory without blocks."""
        opened: list[_C.Pool] = []
        for i, pool in enumerate(self._pools):
            ptr, blocks, stride = pool.secondary, pool.num_secondary_blocks, pool.secondary_stride
            if primary:
                ptr, blocks, stride = pool.primary, pool.num_primary_blocks, pool.primary_stride
            if blocks == 0:
                return ()
            group, name = opened[0] if opened else None, f"{_MEMORIES[primary]} {i}"
            try:
                nbytes, coding = (pool.nbytes(), None) if primary else (pool.secondary_nbytes, pool.coding)
                opened.append(
                    _C.Pool(self._device, ptr, blocks, nbytes, stride=stride, group=group, name=name, coding=coding)
                )
            except (TypeError, ValueError) as error:
                raise type(error)(f"pools[{i}].{_MEMORIES[primary]}: {error}") from None
        return tuple(opened)

    def _cached_parts(self) -> Callable[[int, bool], _Parts | None]:
        pools = self._pools

        @lru_cache(maxsize=self._most_tokens)
        def parts(num_tokens: int, layered: bool) -> _Parts | None:
            return _make_parts(pools, num_tokens, layered)

        return parts

    # -- attributes ------------------------------------------------------------------------------------------------

    @property
    def device(self) -> _C.Device:
        """The device of the copies."""
        return self._device

    @property
    def primary_pools(self) -> tuple[_C.Pool, ...]:
        """The GPU side of each pool: for kvswap.testing.note_access() and kvswap.move_blocks()."""
        return self._sides[True]

    @property
    def secondary_pools(self) -> tuple[_C.Pool, ...]:
        """The host side of each pool; empty without secondary blocks."""
        return self._sides[False]

    @property
    def offload_stream(self) -> _C.Stream:
        """The stream of offloads: its work so far runs after earlier offloads and before later ones."""
        return self._offload_stream

    @property
    def onboard_stream(self) -> _C.Stream:
        """The stream of onboards: its work so far runs after earlier onboards and before later ones."""
        return self._onboard_stream

    @property
    def num_layers(self) -> int:
        """Number of layers of a transfer with layer_events: the largest of the pools'."""
        return max(pool.num_layers for pool in self._pools)

    # -- copies -------------------------------------------------------------------------------------------------------

    @overload
    def offload(
        self,
        block: Any,
        offload_block: Any,
        num_tokens_to_copy: int = 0,
        mode: Literal["dram"] = "dram",
        directory: str | None = None,
        *,
        layer_events: bool = False,
        after: Any = (),
        after_layers: Sequence[Any] | None = None,
    ) -> _C.Transfer: ...

    @overload
    def offload(
        self,
        block: Any,
        offload_block: Any,
        num_tokens_to_copy: int,
        mode: Literal["posix", "gds"],
        directory: str | None,
        *,
        after: Any = (),
    ) -> FileTransfer: ...

    def offload(
        self,
        block: Any,
        offload_block: Any,
        num_tokens_to_copy: int = 0,
        mode: TransferMode = "dram",
        directory: str | None = None,
        *,
        layer_events: bool = False,
        after: Any = (),
        after_layers: Sequence[Any] | None = None,
    ) -> _C.Transfer | FileTransfer:
        """Copy blocks from primary to secondary memory; returns the Transfer at once.

        block, offload_block: source and destination: an int, a Block, or an array or sequence of them, as many on both
          sides; a batch is one transfer. An int is primary in `block` and secondary in `offload_block`; a Block names
          its memory, so offload(3, Block(5, True)) copies within primary memory. No destination twice, and none is
          also a source.
        num_tokens_to_copy: copy only the first num_tokens_to_copy tokens of each block; 0 or less, or all tokens: whole
          blocks. Pools whose blocks cannot be cut (KVCacheBlockPool.can_cut) are copied whole.
        mode, directory: "posix": to a file in the directory (kvswap.files; created if missing) instead of secondary
          memory. offload_block is then the blocks' number in the files, 0 or more; onboard() finds them by it. Whole
          blocks are copied; layer_events and after_layers are refused; returns a FileTransfer, which has the same
          methods except those for streams. Later copies from or to these primary blocks wait for it on the host, and
          so does sync_transfers(). "gds": the same files by GPUDirect Storage. kvswap.Error gives the reason if the
          driver does not report true GPUDirect, unless file_options has gds="compat", which allows libcufile's
          compatibility mode. If the mode changes, the directory's store is reopened after its transfers have ended.
        layer_events: layers are copied in order, and each can be waited for (Transfer.make_wait_layer, layer_done).
          Layers count from 0 within each pool; layer l of the transfer is layer l of every pool that has one.
        after: Event, Transfer or stream to start after, or an iterable of them. after_layers: for each layer an item
          that its copies also start after.

        Order: see the class. ValueError, IndexError, TypeError: wrong arguments; QueueFull; DeviceError: nothing
        moved. A later failure is the Transfer's error. Any thread may call.
        """
        _check_mode(mode)
        if mode != "dram":
            layered = layer_events or after_layers is not None
            return self._to_or_from_files(_OFFLOAD, block, offload_block, mode, directory, layered, after)
        return self._move(_OFFLOAD, block, offload_block, num_tokens_to_copy, layer_events, after, after_layers)

    @overload
    def onboard(
        self,
        offloaded_block: Any,
        block: Any,
        num_tokens_to_copy: int = 0,
        mode: Literal["dram"] = "dram",
        directory: str | None = None,
        *,
        layer_events: bool = False,
        after: Any = (),
        after_layers: Sequence[Any] | None = None,
    ) -> _C.Transfer: ...

    @overload
    def onboard(
        self,
        offloaded_block: Any,
        block: Any,
        num_tokens_to_copy: int,
        mode: Literal["posix", "gds"],
        directory: str | None,
        *,
        after: Any = (),
    ) -> FileTransfer: ...

    def onboard(
        self,
        offloaded_block: Any,
        block: Any,
        num_tokens_to_copy: int = 0,
        mode: TransferMode = "dram",
        directory: str | None = None,
        *,
        layer_events: bool = False,
        after: Any = (),
        after_layers: Sequence[Any] | None = None,
    ) -> _C.Transfer | FileTransfer:
        """Copy blocks from secondary to primary memory; returns the Transfer at once.

        An int is secondary in `offloaded_block` and primary in `block`; onboard(Block(3), 5, 20) copies the first 20
        tokens of primary block 3 to primary block 5 (partial reuse). Everything else as offload().
        """
        _check_mode(mode)
        if mode != "dram":
            layered = layer_events or after_layers is not None
            return self._to_or_from_files(_ONBOARD, block, offloaded_block, mode, directory, layered, after)
        return self._move(_ONBOARD, offloaded_block, block, num_tokens_to_copy, layer_events, after, after_layers)

    def _to_or_from_files(
        self, call: _Call, primary: Any, number: Any, mode: str, directory: str | None, layered: bool, after: Any
    ) -> FileTransfer:
        loads = call is _ONBOARD
        slots, is_primary = _locate(primary, True, "block")
        numbers, numbers_primary = _locate(number, False, call.source if loads else call.target)
        if not is_primary or numbers_primary:
            raise ValueError("between primary memory and files: block is in primary memory, the other one is a number")
        if layered:
            raise ValueError("layer_events and after_layers are not for files: blocks come as a whole")
        if self._closed:
            raise _C.Error("the transfer manager is closed")
        if any(int(i) < 0 for i in numbers):
            raise ValueError("a block in files has a number from 0 on")
        order = [self._onboard_stream if loads else self._offload_stream, *_several(after)]
        run = self._files.onboard if loads else self._files.offload
        transfer = run(directory, mode, self._sides[True], slots, numbers, order)
        self._count(False, call, len(slots), transfer.nbytes)
        return transfer

    def _move(
        self,
        call: _Call,
        source: Any,
        target: Any,
        num_tokens: int,
        layer_events: bool,
        after: Any,
        after_layers: Sequence[Any] | None,
    ) -> _C.Transfer:
        src_ids, src_primary = _locate(source, call.source_primary, call.source)
        dst_ids, dst_primary = _locate(target, call.target_primary, call.target)
        if (src_primary, dst_primary) == (call.target_primary, call.source_primary):
            raise ValueError(
                f"{call.source} is in {_MEMORIES[src_primary]} memory and {call.target} in {_MEMORIES[dst_primary]}: "
                f"that is for {call.opposite}()"
            )
        if not (self._sides[src_primary] and self._sides[dst_primary]):
            raise ValueError("there is no secondary memory: num_secondary_blocks is 0")
        if self._closed:
            raise _C.Error("the transfer manager is closed")
        tokens = _index(num_tokens, "num_tokens_to_copy")
        if self._coded and src_primary != dst_primary:
            tokens = 0  # coded blocks move whole
        for ids, primary in ((src_ids, src_primary), (dst_ids, dst_primary)):
            if primary:
                self._files.wait_for(ids)
        layered = layer_events or after_layers is not None
        try:
            transfer = _C.move_blocks(
                self._sides[src_primary],
                self._sides[dst_primary],
                src_ids,
                dst_ids,
                parts=self._parts(tokens if 0 < tokens < self._most_tokens else 0, layered),
                layer_events=layer_events,
                after_layers=after_layers,
                stream=self._onboard_stream if call is _ONBOARD else self._offload_stream,
                after=after,
                **self._options,
            )
        except (IndexError, TypeError, ValueError) as error:
            raise _reworded(error, call) from None
        self._count(src_primary and dst_primary, call, len(src_ids), transfer.nbytes)
        return transfer

    def _count(self, intra_device: bool, call: _Call, blocks: int, nbytes: int) -> None:
        with self._lock:
            stats = self._stats
            if intra_device:
                stats.intra_device_copy_blocks += blocks
                stats.intra_device_copy_bytes += nbytes
            elif call is _ONBOARD:
                stats.onboard_blocks += blocks
                stats.onboard_bytes += nbytes
            else:
                stats.offload_blocks += blocks
                stats.offload_bytes += nbytes

    # -- order --------------------------------------------------------------------------------------------------------

    def sync_with_compute(self, stream: Any) -> None:
        """Make later copies start after all work that `stream` has queued so far. TensorRT-LLM:
        syncWithBufferManager().

        stream: int handle, or a torch, cupy or kvswap stream. Does not block. Any thread may call.
        """
        with self._lock:
            self._event.record(stream)
            self._event.wait(self._offload_stream)
            self._event.wait(self._onboard_stream)

    def sync_transfers(self, stream: Any) -> None:
        """Make later work of `stream` start after all copies submitted so far. TensorRT-LLM: syncTransfers().

        Gives order only: check a Transfer's `.error` before using the bytes. Does not block, except for copies to and
        from files: the call waits for those, at most 60 s (TimeoutError). Any thread may call.
        """
        self._files.wait_for(None)
        with self._lock:
            for lane in (self._offload_stream, self._onboard_stream):
                self._event.record(lane)
                self._event.wait(stream)

    # -- counts and closing
    # -----------------------------------------------------------------------------------------------------

    def get_and_reset_transfer_stats(self) -> KvCacheTransferStats:
        """Counts since the last call, or since the beginning."""
        with self._lock:
            stats, self._stats = self._stats, KvCacheTransferStats()
        return stats

    def close(self, timeout: float | None = 60.0) -> None:
        """Refuse new copies and wait for the end of the submitted ones, at most `timeout` seconds, None: no limit.

        After TimeoutError they go on, and close() may be called again. DeviceError: the device is lost. A second call
        does nothing. Afterwards the memory may be freed, as soon as the model does not use it.
        """
        timeout = seconds(timeout)
        self._closed = True
        end = None if timeout is None else time.monotonic() + timeout
        self._files.wait_for(None, timeout)
        self._offload_stream.synchronize(timeout)  # its work comes after all offloads
        self._onboard_stream.synchronize(None if end is None else max(0.0, end - time.monotonic()))
        self._files.close(timeout)

    def __enter__(self) -> KVCacheTransferManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_pools(pools: Iterable[KVCacheBlockPool]) -> tuple[KVCacheBlockPool, ...]:
    if not isinstance(pools, Iterable):
        raise TypeError(f"pools must be a sequence of KVCacheBlockPools, not {type(pools).__name__}: pass [pool]")
    checked = tuple(pools)
    if not checked:
        raise ValueError("pools is empty: there must be at least one")
    for i, pool in enumerate(checked):
        if not isinstance(pool, KVCacheBlockPool):
            raise TypeError(f"pools[{i}] must be a KVCacheBlockPool, not {type(pool).__name__}")
        for name in ("num_primary_blocks", "num_secondary_blocks"):
            if getattr(pool, name) != getattr(checked[0], name):
                raise ValueError(
                    f"{name} is {getattr(pool, name)} in pools[{i}] and {getattr(checked[0], name)} in pools[0]: a "
                    "block is one slot of every pool"
                )
        if (pool.codec is None) != (checked[0].codec is None):
            one, other = (0, i) if pool.codec is None else (i, 0)
            raise ValueError(f"pools[{one}] has a codec and pools[{other}] has none: all are coded, or none")
    return checked


def _several(after: Any) -> list[Any]:
    """The items of `after`, as a list."""
    if isinstance(after, Iterable) and not isinstance(after, str):
        return list(after)
    return [] if after is None else [after]


def _reworded(error: Exception, call: _Call) -> Exception:
    """The same error with the argument names of the called method."""
    text = str(error).replace("src_ids", call.source).replace("dst_ids", call.target)
    return error if text == str(error) else type(error)(text)
