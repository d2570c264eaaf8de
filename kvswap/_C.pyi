"""Types of the C extension. Docstrings live in the module itself (``help(kvswap)``)."""

import sys
from collections.abc import Callable, Collection, Generator, Sequence
from os import PathLike
from typing import Any, Final, Literal, TypeAlias, TypedDict, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self, disjoint_base

from kvswap.codecs import Coding
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
    ShareStats,
    Sizes,
    StreamLike,
)

# write, transfer, lane, sequence, what, stream, where
_RaceParty: TypeAlias = tuple[bool, int, int, int, str, str, str]
_Race: TypeAlias = tuple[str, int, _RaceParty, _RaceParty]  # pool, slot, first, second

__version__: Final[str]
_sources: Final[str]  # digest of csrc/ (packaging/kvswap_build/digest.py)
_API: Final[object]  # a capsule: kvswap_capi.h

class Error(Exception): ...
class QueueFull(Error): ...
class MissingKey(Error, KeyError): ...

class DeviceError(Error):
    code: int
    operation: str | None

@final
class Device:
    def __new__(cls, name: DeviceLike | None = None) -> Device: ...
    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def info(self) -> OpenedInfo: ...
    @property
    def lost(self) -> bool: ...
    def set_compute_stream(self, stream: StreamLike, /) -> None: ...
    def set_defaults(
        self,
        *,
        path: Path = "auto",
        priority: Priority | None = None,
        max_ctas: int | None = None,
        pace_gbps: float | None = None,
    ) -> None: ...
    def set_slots(self, slot_nbytes: int, count: int = 3, *, timeout: float | None = 10.0) -> None: ...
    def lend(
        self,
        to: DeviceLike,
        slot_nbytes: int = 8388608,
        count: int = 2,
        *,
        share: float = 1.0,
        timeout: float | None = 10.0,
    ) -> None: ...
    def synchronize(self, timeout: float | None = None) -> None: ...
    def alloc(self, nbytes: int, *, host: bool = False, chunks: bool = False) -> Memory: ...
    def register(self, ptr: Address, nbytes: int | None = None) -> None: ...
    def unregister(self, ptr: Address, timeout: float | None = 60.0) -> None: ...
    def stats(self) -> DeviceStats: ...

@final
class Memory:
    @property
    def ptr(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> Device: ...
    @property
    def host(self) -> bool: ...
    @property
    def __cuda_array_interface__(self) -> ArrayInterface: ...
    @property
    def __array_interface__(self) -> ArrayInterface: ...
    def data_ptr(self) -> int: ...
    def free(self, timeout: float | None = 60.0) -> None: ...
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Mapped:
    @property
    def ptr(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def generation(self) -> int: ...
    @property
    def owner(self) -> int: ...
    @property
    def local(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    @property
    def device(self) -> Device: ...
    @property
    def __cuda_array_interface__(self) -> ArrayInterface: ...
    @property
    def __array_interface__(self) -> ArrayInterface: ...
    def data_ptr(self) -> int: ...
    def pool(self, *, name: str | None = None) -> Pool: ...
    def close(self, timeout: float | None = 60.0) -> None: ...
    def alive(self) -> bool: ...
    def __enter__(self) -> Mapped: ...
    def __exit__(self, type: object, value: object, traceback: object, /) -> None: ...
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Stream:
    def __new__(cls, device: DeviceLike | None = None, *, priority: Priority = "normal") -> Stream: ...
    @property
    def handle(self) -> int: ...
    @property
    def device(self) -> Device: ...
    def query(self) -> bool: ...
    def synchronize(self, timeout: float | None = None) -> None: ...
    def __cuda_stream__(self) -> tuple[int, int]: ...

@final
class Event:
    def __new__(cls, device: DeviceLike | None = None, *, timing: bool = True, interprocess: bool = False) -> Event: ...
    @property
    def handle(self) -> int: ...
    @property
    def device(self) -> Device: ...
    def record(self, stream: StreamLike, /) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self, timeout: float | None = None) -> None: ...
    def elapsed_time(self, other: Event, /) -> float: ...
    def wait(self, stream: StreamLike, /) -> None: ...

@disjoint_base
class _AnyTransfer:
    def __await__(self) -> Generator[Any, None, None]: ...
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> None: ...
    def cancel(self) -> bool: ...
    @property
    def state(self) -> Literal["running", "done", "failed", "cancelled"]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def elapsed(self) -> float | None: ...
    @property
    def error(self) -> Exception | None: ...
    @property
    def failed_positions(self) -> NDArray[np.int64]: ...

@final
class Transfer(_AnyTransfer):
    def make_wait(self, stream: StreamLike, /) -> None: ...
    def make_wait_layer(self, layer: int, stream: StreamLike) -> None: ...
    def layer_done(self, layer: int, /) -> bool: ...
    @property
    def event(self) -> Event: ...
    @property
    def device(self) -> Device: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def lane(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def duration(self) -> float | None: ...
    @property
    def path(self) -> str: ...

@final
class Pool:
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
        coding: Coding | None = None,
    ) -> Pool: ...
    @property
    def device(self) -> Device: ...
    @property
    def ptr(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_nbytes(self) -> int: ...
    @property
    def stride(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def pitch(self) -> int: ...
    @property
    def group(self) -> Pool | None: ...
    @property
    def name(self) -> str: ...
    @property
    def coding(self) -> Coding | None: ...

@final
class OffloadMap:
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
    ) -> tuple[tuple[Transfer, ...], int, Error | None]: ...
    @property
    def order(self) -> tuple[tuple[int, tuple[int, ...], bool], ...]: ...

@final
class FileTransfer(_AnyTransfer):
    @property
    def what(self) -> Literal["store", "load", "delete"]: ...
    @property
    def num_kept(self) -> int: ...
    @property
    def reasons(self) -> dict[int, Exception]: ...

@final
class ShareTransfer(_AnyTransfer):
    @property
    def direction(self) -> Literal["H2D", "D2H"]: ...
    @property
    def by_others(self) -> int: ...
    @property
    def path(self) -> Literal["share"]: ...

@final
class _Share:
    def __new__(
        cls,
        host: tuple[Pool, ...],
        gpu: tuple[Pool, ...],
        ptr: int,
        block_nbytes: int,
        num_blocks: int,
        piece_nbytes: int,
        slots: int,
        share: float,
        stall: float,
        wait: float,
        store_wait: float,
        padded: bool,
        *,
        stride: int = 0,
        takes_only: bool = False,
        file: int = 0,
        file_nbytes: int = 0,
        parts: int = 1,
        part_stride: int = 0,
    ) -> _Share: ...
    def form(self) -> tuple[int, int, int, int, int]: ...
    def meet(self, rank: int, /) -> int: ...
    def link(self, rank: int, socket: int, process: int, slots_fd: int, slots: int, lends: bool, /) -> None: ...
    def unmeet(self, rank: int, /) -> None: ...
    def linked(self) -> int: ...
    def wait_linked(self, ranks: int, timeout: float | None, /) -> None: ...
    def submit(
        self,
        direction: str,
        host_ids: Ids,
        gpu_ids: Ids,
        key: int,
        ranks: int,
        rank: int,
        after: StreamLike | None,
        /,
    ) -> ShareTransfer: ...
    def stats(self) -> ShareStats: ...
    def close(self, timeout: float | None, /) -> None: ...

@final
class _ReplicaIndex:
    def __new__(
        cls, name: str, num_slots: int, slot_nbytes: int, member: str, identity: str | None
    ) -> _ReplicaIndex: ...
    def find(self, key: bytes, pending: float) -> tuple[int, bool] | bool: ...
    def unpin(self, slots: Sequence[int], /) -> None: ...
    def touch(self, keys: Collection[bytes], /) -> None: ...
    def take(self, keys: Collection[bytes], /) -> tuple[list[int | None], int] | None: ...
    def settle(self, slots: Sequence[int], stored: bool) -> None: ...
    def reset(self) -> None: ...
    def info(self) -> dict[str, int]: ...
    def close(self) -> None: ...
    def _hold(self) -> None: ...
    def _let_go(self) -> None: ...
    def _check(self) -> None: ...

def _replica_index_nbytes(num_slots: int, /) -> int: ...
@final
class FileStore:
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
    def info(self) -> FileInfo: ...
    @property
    def block_nbytes(self) -> int: ...
    def store(
        self,
        keys: Keys,
        blocks: Blocks,
        ids: Ids | None = None,
        *,
        after: After = (),
        parts: Sequence[int] | NDArray[Any] | None = None,
        replace: bool = True,
    ) -> FileTransfer: ...
    def load(
        self,
        keys: Keys,
        blocks: Blocks,
        ids: Ids | None = None,
        *,
        after: After = (),
        parts: Sequence[int] | NDArray[Any] | None = None,
    ) -> FileTransfer: ...
    def delete(self, keys: Keys, /) -> FileTransfer: ...
    def contains(self, keys: Keys, /) -> list[bool]: ...
    def pin(self, keys: Keys, /) -> None: ...
    def unpin(self, keys: Keys, /) -> None: ...
    def touch(self, keys: Keys, /) -> None: ...
    def keys(self) -> list[bytes]: ...
    def take_events(self) -> tuple[list[tuple[bytes, bool]], int]: ...
    def refresh(self) -> None: ...
    def clear(self) -> None: ...
    def stats(self) -> FileStats: ...
    def close(self, timeout: float | None = 60.0) -> None: ...
    def __enter__(self) -> FileStore: ...
    def __exit__(self, *args: object) -> None: ...

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
) -> Transfer: ...
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
) -> None: ...
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
) -> Transfer: ...
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
) -> None: ...
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
) -> Transfer: ...
def _way(src: Address, dst: Address, device: DeviceLike | None, /) -> tuple[bool, str]: ...
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
    valid_nbytes: int | None = None,
) -> Transfer: ...
def note_access(
    stream: StreamLike, pool: Pool, slots: Ids, write: bool, *, offset: int = 0, nbytes: int | None = None
) -> None: ...
def note_order(before: AfterItem, after: StreamLike | None, *, device: DeviceLike | None = None) -> None: ...

# kvswap.memory

_Layout: TypeAlias = Literal["block-first", "layer-first"]
_Pages: TypeAlias = Literal["default", "transparent", "2MiB", "1GiB"]
_Numa: TypeAlias = Literal["auto", "interleave"] | int | None
_Progress: TypeAlias = Callable[[int, int], object]  # done_nbytes, total_nbytes

@disjoint_base
class _AnyHostPool:
    @property
    def ptr(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def mapped_nbytes(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def slot_nbytes(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def layer_nbytes(self) -> int: ...
    @property
    def layer_stride(self) -> int: ...
    @property
    def chunks(self) -> int: ...
    @property
    def layout(self) -> _Layout: ...
    @property
    def pages(self) -> _Pages: ...
    @property
    def state(self) -> Literal["populating", "ready", "failed", "cancelled", "closed"]: ...
    @property
    def pinned(self) -> bool: ...
    @property
    def numa_node(self) -> int | Literal["interleave"] | None: ...
    @property
    def device(self) -> Device: ...
    @property
    def notices(self) -> tuple[str, ...]: ...
    def ready(self, block: int, /) -> bool: ...
    def wait(self, timeout: float | None = None) -> None: ...
    def cancel(self) -> None: ...
    def layer(self, layer: int) -> NDArray[np.uint8]: ...
    def torch(self, layer: int, dtype: Any = None, shape: Sequence[int] | None = None) -> Any: ...
    def layer_ptrs(self) -> NDArray[np.uint64]: ...
    def pool(
        self, *, name: str | None = None, device: DeviceLike | None = None, coding: Coding | None = None
    ) -> Pool: ...
    def close(self, timeout: float | None = 60, *, force: bool = False) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...
        def __release_buffer__(self, buffer: memoryview, /) -> None: ...

@final
class HostPool(_AnyHostPool):
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
    def max_blocks(self) -> int: ...
    def grow(self, num_blocks: int, timeout: float | None = 60) -> None: ...
    def shrink(self, num_blocks: int, timeout: float | None = 60) -> None: ...

@final
class SharedPool(_AnyHostPool):
    def __new__(
        cls,
        name: str,
        num_blocks: int,
        slot_nbytes: int,
        *,
        create: bool | None = True,
        generation: int | None = None,
        index_nbytes: int = 0,
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
    def path(self) -> str: ...
    @property
    def generation(self) -> int: ...
    @property
    def owner(self) -> bool: ...
    @property
    def owner_pid(self) -> int: ...
    @property
    def owner_alive(self) -> bool: ...
    def claim(self, blocks: Ids, /) -> NDArray[np.bool_]: ...
    def publish(self, blocks: Ids, /) -> None: ...
    def retract(self, blocks: Ids, /) -> None: ...
    def published(self, blocks: Ids, /) -> NDArray[np.bool_]: ...
    def wait_ready(self, blocks: Ids, timeout: float | None = None) -> None: ...
    def unlink(self) -> None: ...

def clean(*, root: str | PathLike[str] | None = None) -> list[str]: ...
def host_alloc(nbytes: int, *, device: DeviceLike | None = None) -> int: ...
def host_free(ptr: Address, *, timeout: float | None = 60.0) -> None: ...
def host_register(ptr: Address, nbytes: int, *, device: DeviceLike | None = None) -> None: ...
def host_unregister(ptr: Address, *, timeout: float | None = 60.0) -> None: ...

# Underscored: for kvswap's own modules (kvswap.testing, kvswap.replay, kvswap.devices).

@final
class _PatternJob:
    def done(self) -> bool: ...
    def result(self, timeout: float | None = None) -> tuple[int, int | None, int | None]: ...

def _disk_check(
    dsts: NDArray[Any], srcs: NDArray[Any], dst_fds: NDArray[Any], src_fds: NDArray[Any], num_bytes: int
) -> None: ...
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
) -> Any: ...
def _disk_ended(copy: Any, /) -> bool: ...
def _disk_failed(copy: Any, /) -> list[tuple[int, Exception]]: ...
def _file_facts() -> tuple[str, str]: ...
def _coding_open(
    block_nbytes: int, page_nbytes: int, pitch: int, codec: str, fields: tuple[tuple[Any, ...], ...]
) -> Any: ...
def _coding_info(coding: Any, /) -> tuple[int, int, int, int, int, bool, str]: ...
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
) -> int: ...
def _coding_decode(
    coding: Any, blocks: int, stride: int, page_stride: int, coded: int, coded_stride: int, count: int, verdicts: int
) -> int: ...
def _file_gds(compat: bool, /) -> tuple[bool, str]: ...
def _file_clear(directory: str | bytes | PathLike[str] | PathLike[bytes], /) -> None: ...
def _file_limit(directory: str | bytes | PathLike[str] | PathLike[bytes], nbytes: int, /) -> tuple[int, int, int]: ...
def _file_peek(directory: str | bytes | PathLike[str] | PathLike[bytes], /) -> tuple[str, int]: ...
def _pattern(
    device: Device,
    check: bool,
    ptrs: NDArray[np.uint64] | NDArray[np.int64],
    nbytes: NDArray[np.uint64] | NDArray[np.int64],
    keys: NDArray[np.uint64],
    stream: StreamLike,
    kind: Literal["bytes", "window", "coarse"] = "bytes",
) -> _PatternJob: ...
def _await_news() -> int: ...
def _await_tell() -> None: ...
def _wait_first(transfers: Sequence[Transfer | FileTransfer], seen: int) -> list[int]: ...
def _delay(device: Device, seconds: float, stream: StreamLike) -> None: ...
def _set_race_hook(hook: Callable[[], object] | None, /) -> Callable[[], object] | None: ...
def _racecheck_start() -> None: ...
def _racecheck_stop() -> None: ...
def _racecheck_take() -> list[_Race]: ...
def _set_trace_hook(hook: Callable[[str], Callable[[Any, Any], object] | None] | None, /) -> None: ...
def _metrics() -> dict[str, Any]: ...
def _metrics_bounds() -> tuple[tuple[float, ...], tuple[int, ...]]: ...
def _remote_seal(
    slots: NDArray[Any], blocks: NDArray[Any], nbytes: int, identity: bytes, keys: bytes, secret: bytes | None
) -> None: ...
def _remote_check(
    slots: NDArray[Any],
    blocks: NDArray[Any] | None,
    nbytes: int,
    identity: bytes,
    keys: bytes,
    secret: bytes | None,
    how: int = 0,
) -> bytes: ...
def _remote_exit_count(opened: bool, /) -> None: ...
def _remote_addresses(
    blocks: Any, ids: Ids | None, nbytes: int, count: int, write: bool
) -> tuple[NDArray[np.uint64], Any]: ...
def _cuda_count() -> tuple[int, str]: ...
def _cuda_info(ordinal: int) -> CudaInfo: ...
def _cuda_can_reach(ordinal: int, other: int, /) -> bool: ...
def _fatbin() -> BuildInfo: ...
def _paths() -> list[_PathFacts]: ...
def _host_memory(root: str) -> HostMemory: ...
def _environment() -> str: ...
def _shutdown(timeout: float) -> None: ...

class _PathFacts(TypedDict):
    name: str
    kernels: bool
    threads: bool
    codes: bool
    lender: bool

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
) -> tuple[bytes, object | None]: ...
def _ipc_stop(server: object, /) -> None: ...
def _ipc_read(data: BufferLike, /) -> _ExportFields: ...
def _ipc_handle(data: BufferLike, /) -> bytes: ...
def _ipc_of_handle(handle: BufferLike, device: DeviceLike, nbytes: int) -> bytes: ...
def _ipc_open(data: BufferLike, *, device: DeviceLike | None = None, generation: int | None = None) -> Mapped: ...
def _ipc_export_event(event: Event, /) -> bytes: ...
def _ipc_open_event(data: BufferLike, *, device: DeviceLike | None = None) -> Event: ...

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
    host_links: float
    host_gbps_d2h: float
    host_gbps_h2d: float
    host_gbps_both: float
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

def _costs_read(path: str | PathLike[str] | None, /) -> _Costs: ...
def _costs_write(path: str | PathLike[str], costs: _Costs, machine: str) -> None: ...
def _costs_what(name: str, driver: int) -> str: ...
def _costs_of(device: Device, /) -> _Costs: ...
def _costs_path(what: str, /) -> str: ...

# Members of csrc/device/device.h. Each returns what the member returns and raises DeviceError with its code.
def _seam(device: Device, operation: str, /, *args: Any) -> Any: ...
