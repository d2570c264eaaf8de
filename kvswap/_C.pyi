"""Types of the C extension. Docstrings live in the module itself (``help(kvswap)``)."""

import sys
from collections.abc import Callable, Generator, Sequence
from os import PathLike
from typing import Any, Final, Literal, TypeAlias, TypedDict, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self, disjoint_base

from kvswap.typing import (
    Address,
    Addresses,
    After,
    AfterItem,
    ArrayInterface,
    Blocks,
    BufferLike,
    BuildInfo,
    CudaInfo,
    DeviceLike,
    DeviceStats,
    DirectionLike,
    FileInfo,
    FileStats,
    GpuIds,
    GpuOrder,
    HostMemory,
    Ids,
    Keys,
    LayoutLike,
    OpenedInfo,
    Path,
    Priority,
    Sizes,
    StreamLike,
)

# write, transfer, lane, sequence, what, stream, where
_RaceParty: TypeAlias = tuple[bool, int, int, int, str, str, str]
_Race: TypeAlias = tuple[str, int, _RaceParty, _RaceParty]  # pool, slot, first, second

__version__: Final[str]
_sources: Final[str]  # digest of csrc/ (packaging/kvswap_build/digest.py)
_API: Final[object]  # a capsule: kvswap_capi.h

class Error(Exception):
    """Base of kvswap's own errors. Wrong arguments are ValueError, IndexError or TypeError instead, a passed
    time limit is TimeoutError and exhausted memory MemoryError."""

class QueueFull(Error):
    """The lane holds its maximum of unfinished transfers. Nothing of the refused call was queued: wait for
    an earlier transfer and call again."""

class MissingKey(Error, KeyError):
    """A key is not in the store. A KeyError too, with a plain message."""

class DeviceError(Error):
    """A call of the device's driver failed.

    code: the driver's number (CUresult; a host device uses the same numbers), 0 if there is none.
    operation: name of the call that failed, or None."""

    code: int
    operation: str | None

@final
class Device:
    """A device: 'cuda', 'cuda:1', 'host', 'host:0'. None: the current GPU, or host:0 where there is none.

    A number is that of a GPU. A torch.device is taken too: 'cuda' is then torch's current GPU. 'cpu' is host:0.
    A host device is memory and threads of this process that behave as a GPU does. Objects of the same name are the
    same device, and equal. The first use of a GPU in a process opens its primary context (about 600 MB of its memory).
    Any thread may use it. ValueError: not a device name. kvswap.Error: there is no such device."""
    def __new__(cls, name: DeviceLike | None = None) -> Device: ...
    @property
    def name(self) -> str:
        """str: 'cuda:0', 'host:0'."""
    @property
    def kind(self) -> str:
        """str: 'cuda' or 'host'."""
    @property
    def info(self) -> OpenedInfo:
        """dict: facts of the device; kvswap.typing.OpenedInfo says what each is."""
    @property
    def lost(self) -> bool:
        """bool: the device is lost after an asynchronous fault; every transfer on it fails."""
    def set_compute_stream(self, stream: StreamLike, /) -> None:
        """Set the compute stream, on which the model runs. Transfers without stream= start after its work.

        Default: the legacy default stream. Applies to transfers submitted later. Any thread may call."""
    def set_defaults(
        self,
        *,
        path: Path = "auto",
        priority: Priority | None = None,
        max_ctas: int | None = None,
        pace_gbps: float | None = None,
    ) -> None:
        """Set the defaults of transfers that leave these open (path='auto', None), with values as for swap_blocks_batch().
        All four are set: what is left out goes back to built-in values. The first ones come from KVSWAP_PATH,
        KVSWAP_MAX_CTAS and KVSWAP_PACE_GBPS. For transfers submitted later. Any thread may call."""
    def set_slots(self, slot_nbytes: int, count: int = 3, *, timeout: float | None = 10.0) -> None:
        """Set the GPU memory of path 'burst': each direction has `count` (2 to 8) slots of slot_nbytes bytes
        (a multiple of 128 KiB, at most 1 GiB) and two of half as much. 0 frees the memory; path 'burst' is off then.

        Waits until the device's transfers have ended: TimeoutError after `timeout` seconds (None: no limit), and nothing
        has changed. The driver's allocating and freeing may hold up what else runs on the device, and the call until all
        that is queued there has run, `timeout` or not. ValueError: sizes beyond these.
        DeviceError: there is not so much memory; path 'burst' is off then. Ctrl-C works. Any thread may call."""
    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until all work queued on the device has ended, that of other libraries too.

        timeout: seconds, None for no limit; after TimeoutError the work goes on. Ctrl-C works. Any thread may call. On a
        GPU this is the driver's own wait, which keeps a core busy unless the context's flags say otherwise."""
    def alloc(self, nbytes: int, *, host: bool = False, chunks: bool = False) -> Memory:
        """Allocate nbytes bytes of device memory, or with host=True of pinned host memory; not initialised.

        chunks=True: device memory mapped in chunks, as torch's expandable segments are; kvswap.memory.export() shares it
        chunk by chunk.

        MemoryError, DeviceError: the memory is not available. Any thread may call."""
    def register(self, ptr: Address, nbytes: int | None = None) -> None:
        """Pin host memory of the caller: copies of pinned memory reach the link's speed.

        ptr: an address, then nbytes is needed, or a tensor, then nbytes may be left out. Ranges must not overlap, and no
        copy is merged across the end of a range. The caller keeps the memory mapped until unregister(ptr)."""
    def unregister(self, ptr: Address, timeout: float | None = 60.0) -> None:
        """Undo register(ptr), after waiting for the transfers that may use the memory and all other work of the device.

        timeout: seconds, None for no limit; after TimeoutError or Ctrl-C call it again. The memory must stay mapped
        until it returns. ValueError: nothing is registered at ptr."""
    def stats(self) -> DeviceStats:
        """Dict of counters since the device was opened: submitted, done, failed, cancelled (transfers), bytes_d2h, bytes_h2d,
        bytes_other (of transfers done), copies (issued), merged (blocks copied together with a neighbouring block),
        refused_full (submissions that a full lane refused), second_attempts (transfers that took another path after
        the first one was refused or failed),
        waits_raw, waits_war, waits_waw (waits inserted between transfers of pools: for a read after a write, a write after
        a read, a write after a write; one may serve several), and as of now unfinished, lanes, staging_nbytes.

        paths: {'d2h': {'dma': {'transfers': ..., 'blocks': ..., 'bytes': ..., 'seconds': on the device, a float}}}, by
        direction ('d2h', 'h2d', 'other') and path, of transfers done, where there were any. Any thread may call."""

@final
class Memory:
    """Memory from Device.alloc(). Dropping the last reference does not wait: the memory is freed once the work
    that is queued on the device by then has ended.

    It has the buffer protocol (writable bytes) and __array_interface__ if the CPU can read it,
    __cuda_array_interface__ if it is GPU memory. Accepted as a tensor by all of kvswap."""
    @property
    def ptr(self) -> int:
        """int: the address. kvswap.Error if freed."""
    @property
    def nbytes(self) -> int:
        """int: bytes of the memory."""
    @property
    def device(self) -> Device:
        """Device: the device that allocated it."""
    @property
    def host(self) -> bool:
        """bool: pinned host memory."""
    @property
    def __cuda_array_interface__(self) -> ArrayInterface: ...
    @property
    def __array_interface__(self) -> ArrayInterface: ...
    def data_ptr(self) -> int:
        """The address; the same as ptr. For torch's protocol."""
    def free(self, timeout: float | None = 60.0) -> None:
        """Free the memory, after waiting for the transfers that may use it and all other work of the device. Transfers of
        pools in it are refused from then on; one that another thread is just submitting comes before or is refused.

        timeout: seconds, None for no limit; after TimeoutError or Ctrl-C nothing was freed, and free() may be called
        again, unless the driver is already freeing. BufferError: arrays of it are alive, or transfers of a FileStore
        are under way in it. kvswap.Error: it is freed already. Any thread may call."""
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Mapped:
    """Device memory of another process, from kvswap.memory.open(). Closed by close(), its with block or its last
    reference. Accepted as a tensor by all of kvswap; has the protocols of kvswap.Memory.

    The owner may write the bytes at any time, and must not free them while this process uses them. Any
    thread may use it."""
    @property
    def ptr(self) -> int:
        """int: the address in this process. kvswap.Error if closed."""
    @property
    def nbytes(self) -> int:
        """int: bytes of the memory."""
    @property
    def shape(self) -> tuple[int, ...]:
        """tuple of int: as it was exported, elements."""
    @property
    def dtype(self) -> str:
        """str: as it was exported ('bfloat16'); empty if unknown."""
    @property
    def generation(self) -> int:
        """int: as it was exported."""
    @property
    def owner(self) -> int:
        """int: the process that owns it."""
    @property
    def local(self) -> bool:
        """bool: this process is the owner, and ptr is the plain address."""
    @property
    def closed(self) -> bool:
        """bool: closed."""
    @property
    def device(self) -> Device:
        """Device: the memory's device."""
    @property
    def __cuda_array_interface__(self) -> ArrayInterface: ...
    @property
    def __array_interface__(self) -> ArrayInterface: ...
    def data_ptr(self) -> int:
        """The address; the same as ptr. For torch's protocol."""
    def pool(self, *, name: str | None = None) -> Pool:
        """The kvswap.Pool that was exported, as a pool of this process.

        Transfers of the two processes are not ordered with each other: use events (export_event).
        ValueError: no pool was exported. kvswap.Error: the owner has ended, or this is closed."""
    def close(self, timeout: float | None = 60.0) -> None:
        """Unmap the memory after all work queued on the device has ended. Pools of this memory become unusable. A
        second call does nothing.

        timeout: seconds, None for no limit; TimeoutError leaves the memory open. BufferError: arrays of it are
        alive. Ctrl-C works."""
    def alive(self) -> bool:
        """Whether the process that owns the memory still runs. After its end the bytes may be incomplete."""
    def __enter__(self) -> Mapped: ...
    def __exit__(self, type: object, value: object, traceback: object, /) -> None: ...
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Stream:
    """A new stream of a device (Device, name, or None: as Device(None)), not ordered with the legacy default stream.

    Work on one stream runs in order, work on two in no order until an event joins them. priority: 'high', 'normal' or
    'background'. Queued work finishes when the object is dropped. Any thread may use it. Create streams before work is
    queued: if the driver has no room for another one, the call returns only when the GPU has finished all queued work."""
    def __new__(cls, device: DeviceLike | None = None, *, priority: Priority = "normal") -> Stream: ...
    @property
    def handle(self) -> int:
        """int: the driver's handle."""
    @property
    def device(self) -> Device:
        """Device: the stream's device."""
    def query(self) -> bool:
        """Whether all work queued on the stream has ended. Never blocks."""
    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until all work queued on the stream has ended.

        timeout: seconds, None for no limit; after TimeoutError the work goes on. Ctrl-C works. Any thread may call."""
    def __cuda_stream__(self) -> tuple[int, int]: ...

@final
class Event:
    """A mark in the work of a stream of a device (Device, name, or None: as Device(None)).

    An event that was never recorded counts as reached. timing=False: no elapsed_time(), all else is
    cheaper. An event with timing that is recorded on a stream which waits for a transfer slows that transfer's
    copies by up to a tenth while a model runs. interprocess=True: kvswap.memory.export_event() can share it with
    other processes; it has no timing. Any thread may use it."""
    def __new__(cls, device: DeviceLike | None = None, *, timing: bool = True, interprocess: bool = False) -> Event: ...
    @property
    def handle(self) -> int:
        """int: the driver's handle."""
    @property
    def device(self) -> Device:
        """Device: the event's device."""
    def record(self, stream: StreamLike, /) -> None:
        """Mark the work queued on the stream so far. Recording again moves the mark, but not for earlier waits.
        ValueError: a transfer's event."""
    def query(self) -> bool:
        """Whether the event has been reached. Never blocks."""
    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until the event is reached.

        timeout: seconds, None for no limit; TimeoutError. Ctrl-C works. A transfer's event gives order only: check
        Transfer.error before using the bytes. Any thread may call."""
    def elapsed_time(self, other: Event, /) -> float:
        """Seconds from this event to the other, a float. Both must have been reached and be of one device.

        DeviceError: one was never recorded or has no timing (code 400), or was not reached yet (600)."""
    def wait(self, stream: StreamLike, /) -> None:
        """Work queued on the stream later waits for this event. Does not block the caller.
        A kvswap.Stream may be of another device of the same kind."""

@disjoint_base
class _AnyTransfer:
    """What Transfer and FileTransfer have in common."""
    def __await__(self) -> Generator[Any, None, None]: ...
    def done(self) -> bool:
        """Whether the transfer has ended, well or not: check error. Never blocks."""
    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end; raise the error if the transfer failed or was cancelled.

        timeout: seconds, None for no limit. TimeoutError and Ctrl-C leave the transfer running."""
    def cancel(self) -> bool:
        """Skip the blocks that have not begun; returns whether there were any. The transfer then ends as
        cancelled, with these blocks among its failed blocks. Always False of a Transfer: work issued to a
        device cannot be recalled."""
    @property
    def state(self) -> Literal["running", "done", "failed", "cancelled"]:
        """str: 'running', 'done', 'failed' or 'cancelled'."""
    @property
    def nbytes(self) -> int:
        """int: bytes of all its blocks; of a delete 0."""
    @property
    def num_blocks(self) -> int:
        """int: blocks; of a Transfer pairs of them, each in every tensor."""
    @property
    def elapsed(self) -> float | None:
        """float: seconds; of a Transfer on the device, 0.0 if not measured, of a FileTransfer from the call to its end. None
        while it runs."""
    @property
    def error(self) -> Exception | None:
        """Exception: why the transfer, or its first failed block, failed; None while it runs and if it succeeded."""
    @property
    def failed_positions(self) -> NDArray[np.int64]:
        """int64 array: positions, in the lists that were passed, of the blocks that are lost, ascending. All of them where the
        device cannot say which; empty while it runs."""

@final
class Transfer(_AnyTransfer):
    """A submitted transfer. It continues if the object is dropped, and holds its tensors until its end.

    It ends in exactly one state: done, failed or cancelled. Any thread may use it. In asyncio `await transfer` is wait()
    without blocking the loop; a cancelled await leaves the transfer running."""
    def make_wait(self, stream: StreamLike, /) -> None:
        """Work queued on the stream later waits for the transfer, and for all earlier ones of its lane. Does not block.

        It gives order only, and raises if a failure is known already. Before using the bytes check error."""
    def make_wait_layer(self, layer: int, stream: StreamLike) -> None:
        """Work queued on the stream later waits for layers 0 to `layer`. Does not block. As make_wait() it gives order
        only, and raises if a failure is known already.

        ValueError: the transfer was submitted without layer_events. IndexError: it has no such layer."""
    def layer_done(self, layer: int, /) -> bool:
        """Whether layers 0 to `layer` have arrived. Raises the transfer's error if it failed. Never blocks.

        ValueError: the transfer was submitted without layer_events. IndexError: it has no such layer."""
    @property
    def event(self) -> Event:
        """Event: reached at the end, failed or not. Holds the transfer."""
    @property
    def device(self) -> Device:
        """Device: the transfer runs on it."""
    @property
    def num_layers(self) -> int:
        """int: layers that can be waited for, 0 without layer_events."""
    @property
    def number(self) -> int:
        """int: its number among all transfers of the device, from 1."""
    @property
    def lane(self) -> int:
        """int: number of its lane. A lane's transfers run and complete in order."""
    @property
    def sequence(self) -> int:
        """int: position in the lane, from 1."""
    @property
    def duration(self) -> float | None:
        """float: seconds from the call until a call of kvswap saw the end; None while it runs."""
    @property
    def path(self) -> str:
        """str: the path taken, one of kvswap.typing.ForcedPath."""

@final
class Pool:
    """Blocks in memory. kvswap records the accesses to each slot, so that move_blocks() orders transfers between pools.

    device: Device, its name, or None: as Device(None). ptr: an address, or a tensor, which the pool holds; the
      caller keeps the memory of a plain address valid. Device or host memory.
    num_blocks, block_nbytes: number of blocks (up to 2**32 - 1), and bytes of a block, all its rows together. Both
      None: a tensor's first dimension counts the blocks, and all others are one block, which lies in one piece.
    stride: bytes from block to block, None: block_nbytes / rows. Block i begins at ptr + i * stride. A tensor that
      is larger than its blocks needs a stride, since its blocks may be larger than block_nbytes says.
    rows, pitch: a block is `rows` equal rows, `pitch` bytes apart (required if rows > 1): the layers of a layer-first cache,
      or K and V in separate halves.
    group: another Pool of as many blocks: slot i of both is one block, ordered as one. name: for messages, 1 to 31
      bytes; None: 'pool N'.

    Pools of one device must not share bytes. ValueError: a layout that does not fit, or unknown memory.
    Any thread may use it."""
    def __new__(
        cls,
        device: DeviceLike | None,
        ptr: Address,
        num_blocks: int | None = None,
        block_nbytes: int | None = None,
        *,
        stride: int | None = None,
        rows: int = 1,
        pitch: int = 0,
        group: Pool | None = None,
        name: str | None = None,
    ) -> Pool: ...
    @property
    def device(self) -> Device:
        """Device: where its transfers run."""
    @property
    def ptr(self) -> int:
        """int: address of block 0."""
    @property
    def num_blocks(self) -> int:
        """int: slots 0 to num_blocks - 1."""
    @property
    def block_nbytes(self) -> int:
        """int: bytes of a block, of all its rows."""
    @property
    def stride(self) -> int:
        """int: bytes from block to block."""
    @property
    def rows(self) -> int:
        """int: rows of a block."""
    @property
    def pitch(self) -> int:
        """int: bytes from row to row."""
    @property
    def group(self) -> Pool | None:
        """Pool: the one given as group=, or None."""
    @property
    def name(self) -> str:
        """str: for messages."""

@final
class OffloadMap:
    """The places of a cache's blocks on the GPU and on the host, for kvswap.offload.

    tensors: rows of 8 integers, flat: gpu, gpu_blocks, gpu_stride, gpu_page, cpu, cpu_stride, cpu_page, cpu_pitch.
      Block j of chunk c is the cpu_page bytes at cpu + c * cpu_stride + j * cpu_pitch.
    parts: rows of 10: group, tensor, gpu_offset, cpu_offset, nbytes, count, gpu_pitch, cpu_pitch, writers, writer.
    hold: an object kept until the map is gone and its transfers have ended.
    remember_failures: a load of a chunk that a failed store was to write fails too, until it is stored again.

    ValueError: a layout that does not fit, or unknown memory. Any thread may use it."""
    def __new__(
        cls,
        device: DeviceLike | None,
        tensors: NDArray[Any],
        parts: NDArray[Any],
        num_groups: int,
        num_chunks: int,
        blocks_per_chunk: int,
        *,
        hold: object = None,
        remember_failures: bool = True,
    ) -> OffloadMap: ...
    def submit(
        self,
        gpu_blocks: Ids,
        chunks: Ids,
        group_sizes: Ids,
        block_indices: Ids,
        direction: DirectionLike,
        *,
        stream: StreamLike | None = None,
        after: After = (),
        path: Path = "auto",
        priority: Priority | None = None,
        max_ctas: int | None = None,
        pace_gbps: float | None = None,
        first: int = 0,
        after_compute: bool = False,
        layer_events: bool = False,
    ) -> tuple[tuple[Transfer, ...], int, Error | None]:
        """Queue a job: (transfers, next, error). error None: all was queued. Else the transfers go on, and the same call with
        first=next submits the rest. If nothing was queued, the error is raised.

        gpu_blocks, chunks, group_sizes, block_indices: integer arrays or sequences.
        direction: 0 or 'D2H' stores, 1 or 'H2D' loads.
        after_compute: with a stream too, start after the device's compute stream.
        layer_events: each transfer can be waited for layer by layer, in the order of `order`.
        stream: behave as if enqueued on it: start after all its work so far; its later work waits. An int handle
          (0, 1 and 2 as in CUDA), or a torch, cupy or kvswap stream. None: start after the device's compute stream,
          and no stream waits.
        after: an Event, Transfer or stream to start after, or an iterable of them. A Transfer that failed raises its
          error.
        path: 'auto', 'dma', 'strided', 'burst', 'kernel', 'direct': docs/paths.md says how each copies.
        priority: 'high', 'normal', 'background'. max_ctas, pace_gbps: bounds of kernels, in CTAs (1 to 1024) and 10^9
          bytes a second (path 'kernel' only). 'auto' and None: the device's default (Device.set_defaults), else the
          calibrated value: 'background' has fewer CTAs and a lower pace, so that a model beside it hardly slows down.

        All that the host has is checked before anything is queued. ValueError, IndexError, TypeError: wrong arguments, nothing
        moved; QueueFull: too many unfinished transfers; DeviceError: the driver. Any thread may call."""
    @property
    def order(self) -> tuple[tuple[int, tuple[int, ...], bool], ...]:
        """tuple: an entry for each transfer of a job with blocks in all groups: (group, tensors, every_block). Layer k of the
        transfer is a part of tensor tensors[k]. A group without blocks in a load has no transfer; unless every_block, a
        load may lack it in any case."""

@final
class FileTransfer(_AnyTransfer):
    """A transfer of blocks to or from files. It continues if the object is dropped, and holds its tensors until
    its end. It ends in exactly one state: done, failed or cancelled. Any thread may use it. In asyncio
    `await transfer` is wait() without blocking the loop; a cancelled await leaves the transfer running."""
    @property
    def what(self) -> Literal["store", "load", "delete"]:
        """str: 'store', 'load' or 'delete'."""
    @property
    def num_kept(self) -> int:
        """int: existing blocks that a store left unchanged (replace=False); 0 while it runs."""
    @property
    def reasons(self) -> dict[int, Exception]:
        """dict: an Exception for each of failed_positions, by position."""

@final
class FileStore:
    """Blocks by key in the files of a directory, which is created if missing (mode 0700).

    directory: a path, or a list of paths on several disks, over which the blocks are spread. A store is opened with
      all its directories or not at all; their order does not count.
    layout: a Layout. A directory of another layout is refused (ValueError) and left unchanged.
    capacity: limit of the files' bytes; beyond it the least recently used blocks are evicted.
    device: of the Pools whose blocks are stored and loaded: a Device or its name. None: host memory only.
    durability: when a block counts as stored: 'none': the kernel has it (it survives this process); 'flush': it was
      handed to the disk; 'fsync': the disk reports that it survives a power failure.
    engine: 'threads', 'io_uring', or 'auto': io_uring if build and kernel have it. depth: concurrent reads
      and writes, 1 to 256. buffered: use the page cache even if O_DIRECT is possible. `info` says what is used.
    queue: limit of unfinished loads, of stores and of deletes, each, before QueueFull; None: 128.
    segment_nbytes: bytes of a file, for a new store. staging_nbytes: memory between pools and files; None: 128 MiB.
    gds: of pools on a GPU, GPUDirect Storage, with staging on the GPU: 'auto': where the driver says that it is real;
      'compat': else libcufile's compatibility mode, which goes through host memory by itself; 'off'. Where it cannot
      be used staging is pinned host memory; info['gds'] and info['gds_note'] say what is used and why.
    readonly: read a store that another process writes; refresh() finds its new blocks. One process writes.
    shared: several processes of a machine store in this directory, and each finds the
      blocks of all as they are stored. A key stands for its bytes: all store the same under it. delete()
      deletes own blocks only.
    events: how many events are kept for take_events(); None: none.
    bound: a directory around this one, at most three folders up: capacity is then the limit of all files below it, of
      every process, model and layout. The first store sets it; later ones go by that, with a warning. None: this
      directory where it is shared, otherwise none.

    Calls on one key take effect in the order of the calls. Between keys there is no order, and loads go first.
    Error: the directory cannot be used. Any thread may use it."""
    def __new__(
        cls,
        directory: str
        | bytes
        | PathLike[str]
        | PathLike[bytes]
        | Sequence[str | bytes | PathLike[str] | PathLike[bytes]],
        layout: LayoutLike,
        *,
        capacity: int | None = None,
        device: DeviceLike | None = None,
        durability: Literal["none", "flush", "fsync"] = "none",
        engine: Literal["auto", "threads", "io_uring"] = "auto",
        depth: int | None = None,
        queue: int | None = None,
        segment_nbytes: int | None = None,
        staging_nbytes: int | None = None,
        buffered: bool = False,
        readonly: bool = False,
        gds: Literal["auto", "compat", "off"] = "auto",
        shared: bool = False,
        events: int | None = None,
        bound: str | bytes | PathLike[str] | PathLike[bytes] | None = None,
    ) -> FileStore: ...
    @property
    def info(self) -> FileInfo:
        """dict: engine, direct (O_DIRECT), gds, each with the reason if off, checksum, sizes in bytes, depth."""
    @property
    def block_nbytes(self) -> int:
        """int: bytes of a block."""
    def store(
        self,
        keys: Keys,
        blocks: Blocks,
        ids: Ids | None = None,
        *,
        after: After = (),
        parts: Sequence[int] | NDArray[Any] | None = None,
        replace: bool = True,
    ) -> FileTransfer:
        """Store blocks under keys; returns the FileTransfer at once. The bytes must not change until it ended.

        keys: a sequence of bytes (1 to 512 each) or of pairs (block id, pool), or a 2-D array of bytes, a row a key.
        blocks, ids: a Pool of the store's device, or several whose slots make one block, in this order, with the slots
          in ids; or one tensor of host memory, block i at its address + i * block_nbytes, with i in ids; or, without
          ids, one address or tensor of host memory a key. Tensors and pools are held until the transfer ended; memory
          behind plain addresses, also of a pool, must stay mapped as long.
        parts: bytes of the parts of a block, which make block_nbytes in all, for blocks in several ranges of host memory (K
          and V, layers, groups): blocks then has len(parts) addresses or tensors a key, key by key; or, with ids, one tensor
          a part, and part p of block i is at address p + i * parts[p]. The parts pass through a buffer.
        after: an Event, Transfer or stream to start after, or an iterable of them; with pools it starts after the
          device's compute stream in any case. A Transfer that failed raises its error.
        replace: False: an existing key is left unchanged and counts as stored, for keys that determine the bytes.

        If the store is full, the least recently used blocks are evicted; if none can be, the block fails.

        All or nothing is queued: ValueError, IndexError, TypeError: wrong arguments; QueueFull: too many unfinished
        transfers. Later failures are reported block by block (FileTransfer.failed_positions, reasons). Any thread may call."""
    def load(
        self,
        keys: Keys,
        blocks: Blocks,
        ids: Ids | None = None,
        *,
        after: After = (),
        parts: Sequence[int] | NDArray[Any] | None = None,
    ) -> FileTransfer:
        """Load the blocks of these keys; returns the FileTransfer at once. A missing or damaged block is among the failed
        blocks, and its memory is then undefined.

        keys: a sequence of bytes (1 to 512 each) or of pairs (block id, pool), or a 2-D array of bytes, a row a key.
        blocks, ids: a Pool of the store's device, or several whose slots make one block, in this order, with the slots
          in ids; or one tensor of host memory, block i at its address + i * block_nbytes, with i in ids; or, without
          ids, one address or tensor of host memory a key. Tensors and pools are held until the transfer ended; memory
          behind plain addresses, also of a pool, must stay mapped as long.
        parts: bytes of the parts of a block, which make block_nbytes in all, for blocks in several ranges of host memory (K
          and V, layers, groups): blocks then has len(parts) addresses or tensors a key, key by key; or, with ids, one tensor
          a part, and part p of block i is at address p + i * parts[p]. The parts pass through a buffer.
        after: an Event, Transfer or stream to start after, or an iterable of them; with pools it starts after the
          device's compute stream in any case. A Transfer that failed raises its error.

        All or nothing is queued: ValueError, IndexError, TypeError: wrong arguments; QueueFull: too many unfinished
        transfers. Later failures are reported block by block (FileTransfer.failed_positions, reasons). Any thread may call."""
    def delete(self, keys: Keys, /) -> FileTransfer:
        """Delete blocks, also pinned ones; returns the FileTransfer at once. A missing key counts as deleted.
        A deleted block does not come back, not even after a crash.

        keys: as in store(). QueueFull: too many unfinished transfers. Any thread may call."""
    def contains(self, keys: Keys, /) -> list[bool]:
        """Whether each key's block exists now: a list of bool. An unpinned block may be evicted before it is loaded."""
    def pin(self, keys: Keys, /) -> None:
        """Keep these blocks from eviction until unpin(); pins are counted. All or none: Error names a missing one."""
    def unpin(self, keys: Keys, /) -> None:
        """Remove one pin of each block. ValueError: one is not pinned."""
    def touch(self, keys: Keys, /) -> None:
        """Mark these blocks as used now, the first one as the most recent; missing ones are skipped."""
    def keys(self) -> list[bytes]:
        """The keys of all blocks, as bytes, least recently used first."""
    def take_events(self) -> tuple[list[tuple[bytes, bool]], int]:
        """([(key, whether its block is there)], lost): which blocks came and went since the last call, in order,
        those of other writers of a shared directory too. Blocks found at open or in the files of another writer, and
        those that a clear removed, come in pieces of a few thousand a call: call until the list is empty. Where more
        than `events` others were not taken, none is given, and lost says how many: keys() has what is there."""
    def refresh(self) -> None:
        """Of a reader: find the blocks that the writer has stored since. Transfers may run meanwhile. Any
        thread may call; Error while another thread is in refresh()."""
    def clear(self) -> None:
        """Remove all blocks of this store, for all processes that use it or will: for an update of the model's weights. When
        it returns, no block that was submitted before is found or loaded any more, by stores and loads under way neither;
        what is submitted later is stored. Slots become free; the files stay. A reader clears too, where it may write the
        directory.

        Error: the directory cannot be written, and nothing has changed. Ctrl-C ends the wait only."""
    def stats(self) -> FileStats:
        """Counters: dict of int; docs/files.md explains each."""
    def close(self, timeout: float | None = 60.0) -> None:
        """Refuse new calls, let the transfers end, and close the files. After `timeout` seconds (None: no limit) unbegun
        blocks are cancelled, and those under way have another minute. A second call does nothing. Ctrl-C ends
        the wait, and the closing goes on. Dropping the last handle closes the store too, and never waits."""
    def __enter__(self) -> FileStore: ...
    def __exit__(self, *args: object) -> None: ...
    def _set_fault(self, call: str, action: str, nth: int, every: int, code: int, delay: float, /) -> None:
        """For kvswap.testing: inject a fault into the nth such call, and each `every` later."""

def swap_blocks_batch(
    src_ptrs: Addresses,
    dst_ptrs: Addresses,
    sizes: Sizes,
    *,
    stream: StreamLike | None = None,
    after: After = (),
    device: DeviceLike | None = None,
    path: Path = "auto",
    priority: Priority | None = None,
    max_ctas: int | None = None,
    pace_gbps: float | None = None,
) -> Transfer:
    """Copy sizes[i] bytes from src_ptrs[i] to dst_ptrs[i], in any order; returns the Transfer at once.

    src_ptrs, dst_ptrs: int64 or uint64 arrays (n,), or sequences of addresses and tensors. sizes: bytes, an array or
      sequence (n,), or one int for all.
    stream: behave as if enqueued on it: start after all its work so far; its later work waits. An int handle
      (0, 1 and 2 as in CUDA), or a torch, cupy or kvswap stream. None: start after the device's compute stream,
      and no stream waits.
    after: an Event, Transfer or stream to start after, or an iterable of them. A Transfer that failed raises its
      error.
    device: Device, or what Device() takes; None: the pointers' GPU, else host:0.
    path: 'auto', 'dma', 'strided', 'burst', 'kernel', 'direct': docs/paths.md says how each copies.
    priority: 'high', 'normal', 'background'. max_ctas, pace_gbps: bounds of kernels, in CTAs (1 to 1024) and 10^9
      bytes a second (path 'kernel' only). 'auto' and None: the device's default (Device.set_defaults), else the
      calibrated value: 'background' has fewer CTAs and a lower pace, so that a model beside it hardly slows down.

    Tensors are held until the transfer ends; the caller keeps the memory of plain addresses valid until done().
    All that the host has is checked before anything is queued. ValueError, IndexError, TypeError: wrong arguments, nothing
    moved; QueueFull: too many unfinished transfers; DeviceError: the driver. Any thread may call."""

def swap_cache_per_layer(
    gpu_ptr: Address,
    cpu_ptr: Address,
    block_nbytes: int,
    num_gpu_blocks: int,
    num_cpu_blocks: int,
    gpu_block_ids: GpuIds,
    cpu_block_ids: Ids,
    direction: DirectionLike,
    *,
    gpu_stride: int | None = None,
    cpu_stride: int | None = None,
    stream: StreamLike | None = None,
    after: After = (),
    device: DeviceLike | None = None,
    path: Path = "auto",
    priority: Priority | None = None,
    max_ctas: int | None = None,
    pace_gbps: float | None = None,
) -> None:
    """Copy block gpu_block_ids[i] <-> block cpu_block_ids[i] of one tensor; returns None when the copy is
    done, or raises its error. Ctrl-C works, and the transfer then goes on. In a full lane it waits for room, at most
    60 s, and then raises QueueFull.

    gpu_ptr, cpu_ptr: an address or a tensor. block_nbytes, num_gpu_blocks, num_cpu_blocks: ints.
    Block i of a tensor lies at its pointer + i * stride bytes (stride None: block_nbytes) and is block_nbytes long.
    A tensor without a stride must have exactly (number of blocks) * block_nbytes bytes.
    gpu_block_ids, cpu_block_ids: integer arrays (n,), or sequences of ints, of one length. int32 and int64 arrays are
      read in place.
    gpu_block_ids may lie in GPU memory. An int32 or int64 GPU array (DLPack, __cuda_array_interface__; strided too) is not read by the call: a kernel does
      so, after the array's own stream and before any block is touched, on paths 'burst' and 'kernel'. A block whose id
      is out of range, or is a destination twice, then fails: the GPU stays as it is, the host gets zeros. A GPU array
      (n, t) names each block by its t tokens, n * t and those after it in their order; other rows fail too.
    direction: Direction.D2H, 0 or 'D2H'; Direction.H2D, 1 or 'H2D'.
    stream: behave as if enqueued on it: start after all its work so far; its later work waits. An int handle
      (0, 1 and 2 as in CUDA), or a torch, cupy or kvswap stream. None: start after the device's compute stream,
      and no stream waits.
    after: an Event, Transfer or stream to start after, or an iterable of them. A Transfer that failed raises its
      error.
    device: Device, or what Device() takes; None: the pointers' GPU, else host:0.
    path: 'auto', 'dma', 'strided', 'burst', 'kernel', 'direct': docs/paths.md says how each copies.
    priority: 'high', 'normal', 'background'. max_ctas, pace_gbps: bounds of kernels, in CTAs (1 to 1024) and 10^9
      bytes a second (path 'kernel' only). 'auto' and None: the device's default (Device.set_defaults), else the
      calibrated value: 'background' has fewer CTAs and a lower pace, so that a model beside it hardly slows down.

    Tensors are held until the transfer ends; the caller keeps the memory of plain addresses valid until done().
    All that the host has is checked before anything is queued. ValueError, IndexError, TypeError: wrong arguments, nothing
    moved; QueueFull: too many unfinished transfers; DeviceError: the driver. Any thread may call."""

def swap_cache_per_layer_async(
    gpu_ptr: Address,
    cpu_ptr: Address,
    block_nbytes: int,
    num_gpu_blocks: int,
    num_cpu_blocks: int,
    gpu_block_ids: GpuIds,
    cpu_block_ids: Ids,
    direction: DirectionLike,
    *,
    gpu_stride: int | None = None,
    cpu_stride: int | None = None,
    stream: StreamLike | None = None,
    after: After = (),
    device: DeviceLike | None = None,
    path: Path = "auto",
    priority: Priority | None = None,
    max_ctas: int | None = None,
    pace_gbps: float | None = None,
) -> Transfer:
    """Copy block gpu_block_ids[i] <-> block cpu_block_ids[i] of one tensor; returns the Transfer at once.

    gpu_ptr, cpu_ptr: an address or a tensor. block_nbytes, num_gpu_blocks, num_cpu_blocks: ints.
    Block i of a tensor lies at its pointer + i * stride bytes (stride None: block_nbytes) and is block_nbytes long.
    A tensor without a stride must have exactly (number of blocks) * block_nbytes bytes.
    gpu_block_ids, cpu_block_ids: integer arrays (n,), or sequences of ints, of one length. int32 and int64 arrays are
      read in place.
    gpu_block_ids may lie in GPU memory. An int32 or int64 GPU array (DLPack, __cuda_array_interface__; strided too) is not read by the call: a kernel does
      so, after the array's own stream and before any block is touched, on paths 'burst' and 'kernel'. A block whose id
      is out of range, or is a destination twice, then fails: the GPU stays as it is, the host gets zeros. A GPU array
      (n, t) names each block by its t tokens, n * t and those after it in their order; other rows fail too.
    direction: Direction.D2H, 0 or 'D2H'; Direction.H2D, 1 or 'H2D'.
    stream: behave as if enqueued on it: start after all its work so far; its later work waits. An int handle
      (0, 1 and 2 as in CUDA), or a torch, cupy or kvswap stream. None: start after the device's compute stream,
      and no stream waits.
    after: an Event, Transfer or stream to start after, or an iterable of them. A Transfer that failed raises its
      error.
    device: Device, or what Device() takes; None: the pointers' GPU, else host:0.
    path: 'auto', 'dma', 'strided', 'burst', 'kernel', 'direct': docs/paths.md says how each copies.
    priority: 'high', 'normal', 'background'. max_ctas, pace_gbps: bounds of kernels, in CTAs (1 to 1024) and 10^9
      bytes a second (path 'kernel' only). 'auto' and None: the device's default (Device.set_defaults), else the
      calibrated value: 'background' has fewer CTAs and a lower pace, so that a model beside it hardly slows down.

    Tensors are held until the transfer ends; the caller keeps the memory of plain addresses valid until done().
    All that the host has is checked before anything is queued. ValueError, IndexError, TypeError: wrong arguments, nothing
    moved; QueueFull: too many unfinished transfers; DeviceError: the driver. Any thread may call."""

def swap_cache_all_layers(
    gpu_ptrs: Addresses,
    cpu_ptrs: Addresses,
    block_nbytes: Sizes,
    num_gpu_blocks: Sizes,
    num_cpu_blocks: Sizes,
    gpu_block_ids: GpuIds,
    cpu_block_ids: Ids,
    direction: DirectionLike,
    *,
    gpu_stride: Sizes | None = None,
    cpu_stride: Sizes | None = None,
    stream: StreamLike | None = None,
    after: After = (),
    device: DeviceLike | None = None,
    path: Path = "auto",
    priority: Priority | None = None,
    max_ctas: int | None = None,
    pace_gbps: float | None = None,
) -> None:
    """Copy block gpu_block_ids[i] <-> block cpu_block_ids[i] of every tensor; returns None when the copy is
    done, or raises its error. Ctrl-C works, and the transfer then goes on. In a full lane it waits for room, at most
    60 s, and then raises QueueFull.

    gpu_ptrs, cpu_ptrs: int64 or uint64 arrays (t,), or sequences of addresses and tensors. block_nbytes,
      num_gpu_blocks, num_cpu_blocks, gpu_stride, cpu_stride: one int, or t of them.
    Block i of a tensor lies at its pointer + i * stride bytes (stride None: block_nbytes) and is block_nbytes long.
    A tensor without a stride must have exactly (number of blocks) * block_nbytes bytes.
    gpu_block_ids, cpu_block_ids: integer arrays (n,), or sequences of ints, of one length. int32 and int64 arrays are
      read in place.
    gpu_block_ids may lie in GPU memory. An int32 or int64 GPU array (DLPack, __cuda_array_interface__; strided too) is not read by the call: a kernel does
      so, after the array's own stream and before any block is touched, on paths 'burst' and 'kernel'. A block whose id
      is out of range, or is a destination twice, then fails: the GPU stays as it is, the host gets zeros. A GPU array
      (n, t) names each block by its t tokens, n * t and those after it in their order; other rows fail too.
    direction: Direction.D2H, 0 or 'D2H'; Direction.H2D, 1 or 'H2D'.
    stream: behave as if enqueued on it: start after all its work so far; its later work waits. An int handle
      (0, 1 and 2 as in CUDA), or a torch, cupy or kvswap stream. None: start after the device's compute stream,
      and no stream waits.
    after: an Event, Transfer or stream to start after, or an iterable of them. A Transfer that failed raises its
      error.
    device: Device, or what Device() takes; None: the pointers' GPU, else host:0.
    path: 'auto', 'dma', 'strided', 'burst', 'kernel', 'direct': docs/paths.md says how each copies.
    priority: 'high', 'normal', 'background'. max_ctas, pace_gbps: bounds of kernels, in CTAs (1 to 1024) and 10^9
      bytes a second (path 'kernel' only). 'auto' and None: the device's default (Device.set_defaults), else the
      calibrated value: 'background' has fewer CTAs and a lower pace, so that a model beside it hardly slows down.

    Tensors are held until the transfer ends; the caller keeps the memory of plain addresses valid until done().
    All that the host has is checked before anything is queued. ValueError, IndexError, TypeError: wrong arguments, nothing
    moved; QueueFull: too many unfinished transfers; DeviceError: the driver. Any thread may call."""

def swap_cache_all_layers_async(
    gpu_ptrs: Addresses,
    cpu_ptrs: Addresses,
    block_nbytes: Sizes,
    num_gpu_blocks: Sizes,
    num_cpu_blocks: Sizes,
    gpu_block_ids: GpuIds,
    cpu_block_ids: Ids,
    direction: DirectionLike,
    *,
    gpu_stride: Sizes | None = None,
    cpu_stride: Sizes | None = None,
    stream: StreamLike | None = None,
    after: After = (),
    device: DeviceLike | None = None,
    path: Path = "auto",
    priority: Priority | None = None,
    max_ctas: int | None = None,
    pace_gbps: float | None = None,
    layer_events: bool = False,
    after_layers: Sequence[AfterItem | None] | None = None,
) -> Transfer:
    """Copy block gpu_block_ids[i] <-> block cpu_block_ids[i] of every tensor; returns the Transfer at once.

    gpu_ptrs, cpu_ptrs: int64 or uint64 arrays (t,), or sequences of addresses and tensors. block_nbytes,
      num_gpu_blocks, num_cpu_blocks, gpu_stride, cpu_stride: one int, or t of them.
    Block i of a tensor lies at its pointer + i * stride bytes (stride None: block_nbytes) and is block_nbytes long.
    A tensor without a stride must have exactly (number of blocks) * block_nbytes bytes.
    gpu_block_ids, cpu_block_ids: integer arrays (n,), or sequences of ints, of one length. int32 and int64 arrays are
      read in place.
    gpu_block_ids may lie in GPU memory. An int32 or int64 GPU array (DLPack, __cuda_array_interface__; strided too) is not read by the call: a kernel does
      so, after the array's own stream and before any block is touched, on paths 'burst' and 'kernel'. A block whose id
      is out of range, or is a destination twice, then fails: the GPU stays as it is, the host gets zeros. A GPU array
      (n, t) names each block by its t tokens, n * t and those after it in their order; other rows fail too.
    direction: Direction.D2H, 0 or 'D2H'; Direction.H2D, 1 or 'H2D'.
    stream: behave as if enqueued on it: start after all its work so far; its later work waits. An int handle
      (0, 1 and 2 as in CUDA), or a torch, cupy or kvswap stream. None: start after the device's compute stream,
      and no stream waits.
    after: an Event, Transfer or stream to start after, or an iterable of them. A Transfer that failed raises its
      error.
    device: Device, or what Device() takes; None: the pointers' GPU, else host:0.
    path: 'auto', 'dma', 'strided', 'burst', 'kernel', 'direct': docs/paths.md says how each copies.
    priority: 'high', 'normal', 'background'. max_ctas, pace_gbps: bounds of kernels, in CTAs (1 to 1024) and 10^9
      bytes a second (path 'kernel' only). 'auto' and None: the device's default (Device.set_defaults), else the
      calibrated value: 'background' has fewer CTAs and a lower pace, so that a model beside it hardly slows down.
    A layer is one tensor of the lists; layers are copied in this order:
    layer_events: True: each layer can be waited for alone, by Transfer.make_wait_layer() and layer_done().
    after_layers: None, or a sequence with one entry a layer: an Event, a Transfer or a stream that the layer's
      copies also start after; or None. Layers are copied in order.

    Tensors are held until the transfer ends; the caller keeps the memory of plain addresses valid until done().
    All that the host has is checked before anything is queued. ValueError, IndexError, TypeError: wrong arguments, nothing
    moved; QueueFull: too many unfinished transfers; DeviceError: the driver. Any thread may call."""

def _is_onboard(src: Address, dst: Address, device: DeviceLike | None, /) -> bool:
    """Whether a copy from src to dst goes from host memory to the device's. device None: that of the pointers."""

def move_blocks(
    src: Pool | Sequence[Pool],
    dst: Pool | Sequence[Pool],
    src_ids: GpuIds,
    dst_ids: GpuIds,
    *,
    parts: NDArray[np.integer[Any]] | Sequence[Sequence[int]] | None = None,
    layer_events: bool = False,
    after_layers: Sequence[AfterItem | None] | None = None,
    stream: StreamLike | None = None,
    after: After = (),
    path: Path = "auto",
    priority: Priority | None = None,
    max_ctas: int | None = None,
    pace_gbps: float | None = None,
    gpu_order: GpuOrder = "pool",
) -> Transfer:
    """Copy slot src_ids[i] of each source Pool to slot dst_ids[i] of its destination Pool; returns the Transfer.

    The transfer starts after the transfers between pools, on any lane, that write its source slots, and that read
    or write its destination slots; streams alone order it with other work. A block fails if its source slot was to
    be written by a failed transfer. Its destination slot then counts as failed too, until a whole block is written
    to it or note_access() records a write.

    src, dst: a Pool each, or sequences of as many Pools, which form pairs, all of one device: GPU to host, host to GPU, or within
      one of them.
    src_ids, dst_ids: int32 or int64 arrays (n,), or sequences of ints, of one length. No destination slot twice,
      and no slot both read and written. Those of the GPU's side may lie in GPU memory.
    An int32 or int64 GPU array (DLPack, __cuda_array_interface__; strided too) is not read by the call: a kernel does
      so, after the array's own stream and before any block is touched, on paths 'burst' and 'kernel'. A block whose id
      is out of range, or is a destination twice, then fails: the GPU stays as it is, the host gets zeros. A GPU array
      (n, t) names each block by its t tokens, n * t and those after it in their order; other rows fail too.
    gpu_order: with ids in GPU memory. 'pool': the transfer is ordered as if it touched every slot of the GPU's pools.
      'stream': on that side the caller orders it, by stream= and after=.
    parts: None: whole blocks, pair i being layer i. Else an integer array, shape (p, 6): the parts of each
      block to move. Columns: pair, layer, offset, rows, row_nbytes, row_pitch: `rows` rows of row_nbytes bytes,
      row_pitch bytes apart, the first at offset. Offsets count the block's own bytes, 0 to block_nbytes, row by row.
      Layers count from 0 without gaps; the parts of a pair ascend in the block and do not overlap.
    layer_events: True: each layer can be waited for alone, by Transfer.make_wait_layer() and layer_done().
    after_layers: None, or a sequence with one entry a layer: an Event, a Transfer or a stream that the layer's
      copies also start after; or None. Layers are copied in order.
    stream: behave as if enqueued on it: start after all its work so far; its later work waits. An int handle
      (0, 1 and 2 as in CUDA), or a torch, cupy or kvswap stream. None: start after the device's compute stream,
      and no stream waits.
    after: an Event, Transfer or stream to start after, or an iterable of them. A Transfer that failed raises its
      error.
    path: 'auto', 'dma', 'strided', 'burst', 'kernel', 'direct': docs/paths.md says how each copies.
    priority: 'high', 'normal', 'background'. max_ctas, pace_gbps: bounds of kernels, in CTAs (1 to 1024) and 10^9
      bytes a second (path 'kernel' only). 'auto' and None: the device's default (Device.set_defaults), else the
      calibrated value: 'background' has fewer CTAs and a lower pace, so that a model beside it hardly slows down.

    The pools are held until the transfer ends.
    All that the host has is checked before anything is queued. ValueError, IndexError, TypeError: wrong arguments, nothing
    moved; QueueFull: too many unfinished transfers; DeviceError: the driver. Any thread may call."""

def note_access(
    stream: StreamLike, pool: Pool, slots: Ids, write: bool, *, offset: int = 0, nbytes: int | None = None
) -> None:
    """Record that work which kvswap did not submit, now queued on the stream, reads or writes slots of a Pool.

    A write of whole blocks clears the failure record of their slots: move_blocks() reads them again. Otherwise the
    call serves the race checker only, and is cheap while that is off. It moves and orders nothing.

    stream: an int handle, or a torch, cupy or kvswap stream, of the pool's device. slots: an int32 or int64 array
      (n,), or a sequence of ints. write: whether it writes. offset, nbytes: which bytes of each block, counted in
      the block's own bytes; nbytes None: all from offset to the end.

    IndexError: a slot that the pool does not have. ValueError: bytes that a block does not have. Any thread may
    call."""

def note_order(before: AfterItem, after: StreamLike | None, *, device: DeviceLike | None = None) -> None:
    """Tell the race checker of an order that was made without kvswap. The call itself orders nothing.

    before: an Event, a Transfer or a stream: all work queued up to it comes first. after: a stream: work
      queued on it from now on comes later; None: the host has waited, so all work that it queues now comes later.
    device: Device or its name, of these streams; needed only if before is an int handle and after is no
      kvswap Stream. Cheap while the checker is off. Any thread may call."""

# kvswap.memory

_Layout: TypeAlias = Literal["block-first", "layer-first"]
_Pages: TypeAlias = Literal["default", "transparent", "2MiB", "1GiB"]
_Numa: TypeAlias = Literal["auto", "interleave"] | int | None
_Progress: TypeAlias = Callable[[int, int], object]  # done_nbytes, total_nbytes

@disjoint_base
class _AnyHostPool:
    """What HostPool and SharedPool have in common."""
    @property
    def ptr(self) -> int:
        """int: address of the first block. kvswap.Error if the pool is closed."""
    @property
    def nbytes(self) -> int:
        """int: bytes of all blocks, num_blocks * slot_nbytes."""
    @property
    def mapped_nbytes(self) -> int:
        """int: bytes of memory used: nbytes, rounded up to pages."""
    @property
    def num_blocks(self) -> int:
        """int: blocks 0 to num_blocks - 1."""
    @property
    def slot_nbytes(self) -> int:
        """int: bytes of a slot: one block, of all layers."""
    @property
    def layers(self) -> int:
        """int: layers of a block."""
    @property
    def layer_nbytes(self) -> int:
        """int: bytes of a block in one layer."""
    @property
    def layer_stride(self) -> int:
        """int: bytes from block to block within a layer: cpu_stride of the swap calls."""
    @property
    def chunks(self) -> int:
        """int: number of registrations with the driver."""
    @property
    def layout(self) -> _Layout:
        """str: 'block-first' or 'layer-first'."""
    @property
    def pages(self) -> _Pages:
        """str: kind of pages: 'default', 'transparent', '2MiB', '1GiB'."""
    @property
    def state(self) -> Literal["populating", "ready", "failed", "cancelled", "closed"]:
        """str: 'populating', 'ready', 'failed', 'cancelled' or 'closed'."""
    @property
    def pinned(self) -> bool:
        """bool: the whole pool is registered with the device."""
    @property
    def numa_node(self) -> int | Literal["interleave"] | None:
        """int, 'interleave' or None: requested NUMA node of the pages."""
    @property
    def device(self) -> Device:
        """Device: the pool is registered with it."""
    @property
    def notices(self) -> tuple[str, ...]:
        """tuple of str: what differs from the request; logged too."""
    def ready(self, block: int, /) -> bool:
        """Whether that block can be used: populated and, with register=True, registered. Never blocks."""
    def wait(self, timeout: float | None = None) -> None:
        """Wait until all blocks are ready; calls progress= meanwhile, in this thread.

        timeout: seconds; after TimeoutError populating goes on. MemoryError: memory is short. kvswap.Error: it
        was cancelled. Any thread may wait."""
    def cancel(self) -> None:
        """Stop populating. Ready blocks stay ready; close() frees all memory."""
    def layer(self, layer: int) -> NDArray[np.uint8]:
        """One layer as a NumPy array of uint8, shape (num_blocks, layer_nbytes): a view, with gaps between its rows if
        the layout is block-first. While the array lives the pool can neither close nor shrink."""
    def torch(self, layer: int, dtype: Any = None, shape: Sequence[int] | None = None) -> Any:
        """One layer as a torch tensor on the CPU: layer(i) as dtype (None: uint8) and shape (num_blocks, *shape).
        While the tensor lives the pool can neither close nor shrink."""
    def layer_ptrs(self) -> NDArray[np.uint64]:
        """Address of each layer's part of block 0, NumPy uint64: cpu_ptrs of the swap calls, with cpu_stride=layer_stride."""
    def pool(self, *, name: str | None = None, device: DeviceLike | None = None) -> Pool:
        """A kvswap.Pool of the blocks, for move_blocks(), on this pool's device or another one. While the kvswap.Pool lives
        this pool can neither close nor shrink. At most one on a device, since pools must not share bytes."""
    def close(self, timeout: float | None = 60, *, force: bool = False) -> None:
        """Free the memory, after waiting for the transfers that may use it. A second call does nothing.

        timeout: seconds to wait, None: no limit; after TimeoutError the pool is unchanged.
        force: close although views are alive, which otherwise is a BufferError. The views then read zeros, and their
          addresses are not reused before the views are gone.
        kvswap.Error in the child of a fork."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...
        def __release_buffer__(self, buffer: memoryview, /) -> None: ...

@final
class HostPool(_AnyHostPool):
    """Blocks of pinned host memory, populated by several threads and registered with a device. Uses exactly the
    requested bytes, rounded up to a page.

    num_blocks, slot_nbytes: number of blocks (up to 2**32 - 1), and bytes of a slot: one block, all layers.
    layers, layout: 'block-first': all layers of a block together, which gives long runs for the copy paths and one
      object a block for files. 'layer-first': all blocks of a layer together, as engines hold them.
    max_blocks: limit of grow(); reserves addresses, no memory. None: num_blocks.
    device: Device, its name, or None: as Device(None).
    pages: 'default'; 'transparent': huge pages if the kernel has them; '2MiB', '1GiB': reserved huge pages of the
      system. An unavailable kind becomes the next smaller one, with a notice.
    numa: 'auto': the device's node; a node's number; 'interleave': all nodes; None: the system's default.
    chunk_nbytes: approximate bytes of a registration, a whole number of blocks: no block crosses from one registration
      to the next. threads: number of populating threads, 1 to 64.
    register: False: pageable memory. A chunk that the driver refuses makes the pool pageable, with a notice.
    reserve: bytes of the machine's memory that must stay free, None: a share; negative: assume that so many bytes
      more than now will be free, as on virtual machines whose memory grows.
    progress: called as progress(done_nbytes, total_nbytes) in the thread that waits. An exception of progress is
      raised there; in the constructor it also frees the pool.
    wait: False: return at once; ready() says which blocks can be used.

    The pool has the buffer protocol (all blocks' bytes; one row a layer if layers have room to grow) and is accepted
    as a tensor by all of kvswap. The child of a fork() does not have the memory.

    MemoryError: a limit of the machine or of a control group, checked before any allocation. ValueError.
    Any thread may use it."""
    def __new__(
        cls,
        num_blocks: int,
        slot_nbytes: int,
        *,
        max_blocks: int | None = None,
        device: DeviceLike | None = None,
        layers: int = 1,
        layout: _Layout = "block-first",
        pages: _Pages = "default",
        numa: _Numa = "auto",
        chunk_nbytes: int = 1073741824,
        threads: int | None = None,
        register: bool = True,
        reserve: int | None = None,
        progress: _Progress | None = None,
        wait: bool = True,
    ) -> HostPool: ...
    @property
    def max_blocks(self) -> int:
        """int: limit of grow()."""
    def grow(self, num_blocks: int, timeout: float | None = 60) -> None:
        """Grow to num_blocks blocks, at most max_blocks, and wait until they are ready. Addresses and contents stay.

        timeout: seconds to wait for transfers that use the last block, if the new blocks share a page with it."""
    def shrink(self, num_blocks: int, timeout: float | None = 60) -> None:
        """Free the last blocks, so that num_blocks remain. Their addresses and contents stay.

        timeout: seconds to wait for transfers that use the pool. BufferError while views of it are alive."""

@final
class SharedPool(_AnyHostPool):
    """A host pool that several processes of one user map: the ranks of a model, or one copy of what all of them need.

    name: 1 to 100 letters, digits, '.', '_' and '-'. The file is /dev/shm/kvswap.<name>, mode 0600.
    create: True: create the pool, replacing one of a dead owner. False: join an existing pool; num_blocks,
      slot_nbytes, layers and layout must be equal. None: join, or create if there is none.
    generation: with create=False: join only the segment of this generation.
    Everything else as for HostPool; pages '2MiB' and '1GiB' become 'transparent', with a notice.

    The creating process is the owner. The name is removed when the owner closes the pool or ends; joined processes
    keep the memory. Each process registers it with its own device. A killed owner leaves the name until the next start.

    Each block has a word that all processes see. One process writes a block, many read it: claim(), write,
    publish(); readers wait_ready(). Publish after the transfer that writes the block has ended.

    ValueError: the pool exists (create=True), does not exist, or differs. kvswap.Error: it belongs to another user, or
    to a running process of another pid namespace. MemoryError: no room in /dev/shm, or as for HostPool. Any thread may use it."""
    def __new__(
        cls,
        name: str,
        num_blocks: int,
        slot_nbytes: int,
        *,
        create: bool | None = True,
        generation: int | None = None,
        device: DeviceLike | None = None,
        layers: int = 1,
        layout: _Layout = "block-first",
        pages: _Pages = "default",
        numa: _Numa = "auto",
        chunk_nbytes: int = 1073741824,
        threads: int | None = None,
        register: bool = True,
        reserve: int | None = None,
        progress: _Progress | None = None,
        wait: bool = True,
    ) -> SharedPool: ...
    @property
    def path(self) -> str:
        """str: path of the file."""
    @property
    def generation(self) -> int:
        """int: differs from that of every other pool of this name."""
    @property
    def owner(self) -> bool:
        """bool: this process created the pool."""
    @property
    def owner_pid(self) -> int:
        """int: the process that created the pool."""
    @property
    def owner_alive(self) -> bool:
        """bool: the owner still runs."""
    def claim(self, blocks: Ids, /) -> NDArray[np.bool_]:
        """Claim empty blocks, and blocks of a dead writer, for writing by this process. blocks: ids. Returns a
        bool array: which of them were claimed. Never blocks."""
    def publish(self, blocks: Ids, /) -> None:
        """Mark blocks as written and wake waiting processes. ValueError: another process is writing one of
        them; then none is published."""
    def retract(self, blocks: Ids, /) -> None:
        """Mark blocks as empty, to be written again. The caller must make sure that no process still reads
        them. ValueError: another process is writing one of them."""
    def published(self, blocks: Ids, /) -> NDArray[np.bool_]:
        """Which of these blocks are published: a bool array. Never blocks."""
    def wait_ready(self, blocks: Ids, timeout: float | None = None) -> None:
        """Wait until all of these blocks are published.

        timeout: seconds; TimeoutError. kvswap.Error: the writing process of a block has ended."""
    def unlink(self) -> None:
        """Remove the name: no more processes can join, joined ones keep the memory. For the owner. Twice is no error."""

def clean(*, root: str | PathLike[str] | None = None) -> list[str]:
    """Remove shared pools of this user whose owners ended without closing them; returns their names. Creating a
    shared pool does this too. Processes that have joined such a pool keep its memory.

    root: a folder instead of /dev/shm; '/proc/PID/root/dev/shm' is that of a container in which process PID runs. No
    symbolic link in it is followed. ValueError: it cannot be opened."""

def host_alloc(nbytes: int, *, device: DeviceLike | None = None) -> int:
    """Allocate pinned host memory; returns its address. Only host_free() frees it.

    device: Device, its name, or None: as Device(None); every GPU of the process can copy it. MemoryError."""

def host_free(ptr: Address, *, timeout: float | None = 60.0) -> None:
    """Free memory of host_alloc(), after waiting for the transfers that may use it and all other work of the
    device. timeout: seconds, None for no limit. After TimeoutError or Ctrl-C nothing was freed.
    ValueError: not an address of host_alloc(), or freed already."""

def host_register(ptr: Address, nbytes: int, *, device: DeviceLike | None = None) -> None:
    """Pin the caller's host memory: an address, or a tensor, and its bytes. It must stay mapped until
    host_unregister(). Copies are split at its ends, so pieces of one pool can be registered one by one.

    ValueError: it overlaps a registration or an allocation. kvswap.DeviceError: the driver refuses."""

def host_unregister(ptr: Address, *, timeout: float | None = 60.0) -> None:
    """Undo host_register(). Waits as host_free() does; after TimeoutError or Ctrl-C call it again.
    ValueError: nothing is registered there."""

# Underscored: for kvswap's own modules (kvswap.testing, kvswap.replay, kvswap.devices).

@final
class _PatternJob:
    """A pattern being written or checked on a stream. Dropping it waits for the job, at most 60 s."""
    def done(self) -> bool:
        """Whether the job has ended. Never blocks."""
    def result(self, timeout: float | None = None) -> tuple[int, int | None, int | None]:
        """Wait; returns (wrong bytes, item of the first, its offset in the item), or (0, None, None) if all bytes are right or written."""

def _disk_check(
    dsts: NDArray[Any], srcs: NDArray[Any], dst_fds: NDArray[Any], src_fds: NDArray[Any], num_bytes: int
) -> None:
    """For kvswap.trtllm: check descriptors, offsets and overlaps of tasks.

    dsts, srcs: int64 arrays, an offset in a file, or an address where the descriptor is -1."""

def _disk_queue(
    dsts: NDArray[Any],
    srcs: NDArray[Any],
    dst_fds: NDArray[Any],
    src_fds: NDArray[Any],
    num_bytes: int,
    device: Device,
    stream: StreamLike,
    threads: int,
    clear: bool,
) -> Any:
    """For kvswap.trtllm: queue copies between files and host memory on a stream; returns a capsule.

    clear: memory of a failed read becomes zeros."""

def _disk_ended(copy: Any, /) -> bool:
    """Whether the stream has executed these copies."""

def _disk_failed(copy: Any, /) -> list[tuple[int, Exception]]:
    """[(position, exception)] of copies that have ended."""

def _file_facts() -> tuple[str, str]:
    """(Why files are not read and written by io_uring; empty: they are. What computes checksums.)"""

def _coding_open(
    block_nbytes: int, page_nbytes: int, pitch: int, codec: str, fields: tuple[tuple[Any, ...], ...]
) -> Any:
    """For kvswap.codecs: how blocks are coded, a capsule. fields: (offset, nbytes, kind, codec or None), each."""

def _coding_info(coding: Any, /) -> tuple[int, int, int, int, int, bool]:
    """(block_nbytes, page_nbytes, coded_nbytes, coded_page_nbytes, units of a page, lossless)."""

def _coding_encode(
    coding: Any,
    blocks: int,
    stride: int,
    page_stride: int,
    coded: int,
    coded_stride: int,
    count: int,
    verdicts: int,
    valid_nbytes: int,
) -> int:
    """Encode blocks at an address to another; returns how many do not fit. verdicts: address of a byte a block."""

def _coding_decode(
    coding: Any, blocks: int, stride: int, page_stride: int, coded: int, coded_stride: int, count: int, verdicts: int
) -> int:
    """The inverse; returns how many blocks are not whole."""

def _file_gds(compat: bool, /) -> tuple[bool, str]:
    """(Whether a store would use GPUDirect Storage, with compat also libcufile's compatibility mode; by what, or why not), as far as is known without opening libcufile's driver."""

def _file_gds_close() -> bool:
    """For tests: close libcufile's driver, so that the next store looks for the library again. False: a store still uses it."""

def _file_clear(directory: str | bytes | PathLike[str] | PathLike[bytes], /) -> None:
    """Begin a new epoch of a store's directory, or of a shared one."""

def _file_limit(directory: str | bytes | PathLike[str] | PathLike[bytes], nbytes: int, /) -> tuple[int, int, int]:
    """(limit, bytes of all segments below, running writers) of a directory that bounds stores; nbytes: the new
    limit, 0: unchanged. Error: it has none."""

def _file_peek(directory: str | bytes | PathLike[str] | PathLike[bytes], /) -> tuple[str, int]:
    """(text of the layout, block_nbytes) of a store's directory."""

def _file_set_fault(call: str, action: str, nth: int, every: int, code: int, delay: float, /) -> None:
    """For kvswap.testing: inject a fault into the nth such call, and each `every` later, while a store opens."""

def _pattern(
    device: Device,
    check: bool,
    ptrs: NDArray[np.uint64] | NDArray[np.int64],
    nbytes: NDArray[np.uint64] | NDArray[np.int64],
    keys: NDArray[np.uint64],
    stream: StreamLike,
) -> _PatternJob:
    """Write the pattern of keys[i] to the nbytes[i] bytes at ptrs[i], or check it there, in the stream's order.

    ptrs and nbytes: int64 or uint64 arrays; keys: a uint64 array; all of one length. The caller keeps the memory."""

def _await_news() -> int:
    """How often _await_tell() was called."""

def _await_tell() -> None:
    """End the sleep of all threads in _wait_first()."""

def _wait_first(transfers: Sequence[Transfer | FileTransfer], seen: int) -> list[int]:
    """Wait until one of the transfers has ended, or _await_news() is not `seen`; returns the positions of those
    that have ended."""

def _pattern_word(key: int, index: int) -> int:
    """Word `index` of the pattern: its bytes 8 * index to 8 * index + 7, little-endian."""

def _delay(device: Device, seconds: float, stream: StreamLike) -> None:
    """Keep the stream busy for `seconds`, at most 10."""

def _deterministic_device(seed: int) -> Device:
    """A private host device whose work runs only inside calls on it, in an order that the seed (not 0) decides."""

def _host_step(device: Device, steps: int) -> int:
    """Run up to `steps` steps of a deterministic device's queued work; returns the number run."""

def _host_trace(device: Device, /) -> int:
    """A hash of all work that ran on a host device so far, and of its order."""

def _host_capture(device: Device, stream: StreamLike, begin: bool) -> None:
    """Begin or end a modelled graph capture on a host device's stream."""

def _host_peer(device: Device, ordinal: int, reached: bool) -> None:
    """Whether kernels of a host device reach the memory of host:<ordinal>."""

def _set_fault(
    device: Device,
    kind: Literal["call", "copy", "hazard"],
    action: Literal["none", "fail", "skip", "lose", "delay"],
    *,
    operation: str = "",
    nth: int = 1,
    every: int = 0,
    code: int = 1,
    delay: float = 0.0,
) -> None:
    """From now on let the nth 'call' (of a member of the seam, '' for any) or 'copy' fail, be skipped, delayed by so many
    seconds, or lose the device; then each `every` more, 0: once. action 'none' ends it. One fault a kind.
    kind 'hazard', action 'skip', operation 'raw', 'war' or 'waw': the waits between transfers of pools for such a hazard
    are left out."""

def _set_race_hook(hook: Callable[[], object] | None, /) -> Callable[[], object] | None:
    """hook() is called after a call that submits, notes or waits while new races have been found; None: nothing is.
    Returns the previous hook."""

def _racecheck_start() -> None:
    """Start the checker. Starts and stops nest."""

def _racecheck_stop() -> None:
    """Undo one start."""

def _racecheck_found() -> int:
    """How many races since the first start."""

def _racecheck_take() -> list[_Race]:
    """The races not taken yet, at most 1000, oldest first: (pool, slot, first, second), each access being
    (write, transfer, lane, sequence, what, stream, where)."""

def _set_lane_depth(device: Device, depth: int) -> None:
    """Set the limit of unfinished transfers of a lane, 1 to 65536. Applies to lanes created later."""

def _set_trace_hook(hook: Callable[[str], Callable[[Any, Any], object] | None] | None, /) -> None:
    """hook(function) is called at the begin of each call that submits; None: nothing is. If it returns a callable, that is called
    at the end of the call with what the call returns, or None, and with the type of the exception that it raises, or None."""

def _metrics() -> dict[str, Any]:
    """Counters and histograms of all open devices, file stores and host pools, as dicts: kvswap.metrics has their types.
    Waits for no transfer. Any thread may call."""

def _metrics_bounds() -> tuple[tuple[float, ...], tuple[int, ...]]:
    """The histograms' upper bounds: (seconds, bytes). One more bucket holds what is above them."""

def _remote_seal(
    slots: NDArray[Any], blocks: NDArray[Any], nbytes: int, identity: bytes, keys: bytes, secret: bytes | None
) -> None:
    """Copy blocks into slots behind headers. slots, blocks: addresses; keys: 16 bytes each, joined."""

def _remote_check(
    slots: NDArray[Any],
    blocks: NDArray[Any] | None,
    nbytes: int,
    identity: bytes,
    keys: bytes,
    secret: bytes | None,
    how: int = 0,
) -> bytes:
    """A byte a slot: 0: right, and copied to blocks unless that is None. how: 1: check the copies, too; 2: slots have headers only, check the blocks where they are."""

def _remote_exit_count(opened: bool, /) -> None:
    """A client of Mooncake was opened, or closed. At exit a process with open ones leaves by _exit()."""

def _remote_addresses(
    blocks: Any, ids: Ids | None, nbytes: int, count: int, write: bool
) -> tuple[NDArray[np.uint64], Any]:
    """(addresses, what keeps them) of the caller's blocks, as FileStore takes them, of host memory."""

def _cuda_count() -> tuple[int, str]:
    """(number of GPUs, why there is none). Opens no context."""

def _cuda_info(ordinal: int) -> CudaInfo:
    """As Device.info, of a GPU. Opens no context."""

def _fatbin() -> BuildInfo:
    """The kernels in this build: {'nbytes': 0 where none, 'archs': 'sm_80 ...'}."""

def _paths() -> list[_PathFacts]:
    """The paths: of each its name, and whether it needs kernels, or a host device's threads."""

def _host_memory(root: str) -> HostMemory:
    """What the machine and the control groups of this process permit, bytes; 2**64 - 1: unknown, no limit.
    root: put before every path that is read; '': this machine."""

def _environment() -> str:
    """Why no device opens with the environment's KVSWAP_... variables; empty: devices open."""

def _shutdown(timeout: float) -> None:
    """Drain every open device, at most `timeout` seconds in all. Afterwards nothing can be submitted."""

class _PathFacts(TypedDict):
    name: str
    kernels: bool
    threads: bool

class _ExportFields(TypedDict):
    device: str
    uuid: bytes
    pid: int
    generation: int
    allocation_nbytes: int
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    num_blocks: int
    block_nbytes: int
    stride: int
    rows: int
    pitch: int

def _ipc_export(
    source: Address | Pool,
    *,
    device: DeviceLike | None = None,
    nbytes: int | None = None,
    dtype: str = "",
    shape: Sequence[int] = (),
    generation: int = 0,
) -> tuple[bytes, object | None]:
    """Device memory (a tensor, Memory, Pool or address) as the bytes of struct kvs_export, and the server of its chunks or None."""

def _ipc_stop(server: object, /) -> None:
    """Stop serving. Call once."""

def _ipc_read(data: BufferLike, /) -> _ExportFields:
    """The fields of an export's bytes, as a dict. ValueError: not an export."""

def _ipc_handle(data: BufferLike, /) -> bytes:
    """The driver's 64-byte handle in an export, of the whole allocation."""

def _ipc_of_handle(handle: BufferLike, device: DeviceLike, nbytes: int) -> bytes:
    """An export from a foreign handle, whose allocation has at least nbytes bytes."""

def _ipc_open(data: BufferLike, *, device: DeviceLike | None = None, generation: int | None = None) -> Mapped:
    """Open an export's bytes; returns a Mapped."""

def _ipc_export_event(event: Event, /) -> bytes:
    """An interprocess event as bytes."""

def _ipc_open_event(data: BufferLike, *, device: DeviceLike | None = None) -> Event:
    """Open an exported event."""

class _PathCost(TypedDict):
    start: float
    extra: float
    each: Sequence[float]
    run: Sequence[float]

_KernelTuning: TypeAlias = tuple[
    int, float, float
]  # CTAs, pace in GB/s (0: none), GB/s that it reaches so (0: unknown)

class _Tuning(TypedDict, total=False):
    link_gbps_d2h: float
    link_gbps_h2d: float
    kernel_normal_d2h: _KernelTuning
    kernel_high_d2h: _KernelTuning
    kernel_background_d2h: _KernelTuning
    kernel_normal_h2d: _KernelTuning
    kernel_high_h2d: _KernelTuning
    kernel_background_h2d: _KernelTuning

class _Costs(TypedDict):
    d2h: dict[str, _PathCost]
    h2d: dict[str, _PathCost]
    tuning: _Tuning

def _costs_read(path: str | PathLike[str] | None, /) -> _Costs:
    """The costs in a calibration file; None: the built-in ones. IndexError: there is no such file."""

def _costs_write(path: str | PathLike[str], costs: _Costs, machine: str) -> None:
    """Write costs to a new file, mode 0600, which replaces the old one."""

def _costs_what(name: str, driver: int) -> str:
    """The name of the calibration of a device, by its name and driver in Device.info."""

def _costs_of(device: Device, /) -> _Costs:
    """The costs that a device uses."""

def _costs_use(device: Device, costs: _Costs | None) -> None:
    """Use these costs on a device; None: the built-in ones. No other thread may submit meanwhile."""

def _costs_path(what: str, /) -> str:
    """The file of the calibration of this name. IndexError: no folder is known for it."""

def _costs_predict(
    costs: _Costs | None,
    path: Path,
    direction: Literal["d2h", "h2d"],
    nbytes: int,
    *,
    copies: int = 0,
    rects: int = 0,
    rect_rows: int = 0,
    rect_nbytes: int = 0,
    apart_rows: int = 0,
    apart_nbytes: int = 0,
    rest_copies: int = 0,
    pieces: int = 0,
    skew_pieces: int = 0,
    skew_nbytes: int = 0,
    rows: int = 0,
    runs: int = 0,
) -> float:
    """Nanoseconds that a transfer of this shape (struct kvs_shape) takes; costs None: the built-in ones."""

# Seam calls, one a member of csrc/device/device.h: for the conformance suite. Each returns what the member returns and
# raises DeviceError with its code.
def _seam(device: Device, operation: str, /, *args: Any) -> Any:
    """Call one member of csrc/device/device.h and return what it returns; queries return whether it is ready.

    copy_batch and copy_direct take (dsts, srcs, sizes, stream), launch_copy and launch_pack (npieces, address of
    the pieces, grid, threads, stream), launch_crc (address, bytes, address of a word, stream), copy_rect the fields of struct kvs_rect and the stream, all others as they stand."""
