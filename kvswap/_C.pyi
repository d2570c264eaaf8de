"""Types of the C extension. Docstrings live in the module itself (``help(kvswap)``)."""

import sys
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from typing import Any, Final, Literal, TypeAlias, TypedDict, final

import numpy as np
from numpy.typing import NDArray

_Path: TypeAlias = Literal["auto", "dma", "strided", "relay", "kernel", "direct"]
_Priority: TypeAlias = Literal["high", "normal", "background"]
_StreamLike: TypeAlias = Any  # int handle, or an object with cuda_stream, ptr, __cuda_stream__, or a kvswap Stream
_Address: TypeAlias = Any  # int, or a tensor: data_ptr(), DLPack, array interfaces, buffer protocol
_Addresses: TypeAlias = Any  # NumPy int64/uint64 array, or a sequence of _Address
_Ids: TypeAlias = Any  # NumPy int32/int64 array, or a sequence of ints
_Sizes: TypeAlias = Any  # one int, or one a tensor
_After: TypeAlias = Any  # Event, Transfer or a stream; or an iterable of them
_AfterLayers: TypeAlias = Sequence[_After | None]  # one thing a layer
_Parts: TypeAlias = Any  # integers, shape (n, 6): pair, layer, offset, rows, row_nbytes, row_pitch
# write, transfer, lane, sequence, what, stream, where
_RaceParty: TypeAlias = tuple[bool, int, int, int, str, str, str]
_Keys: TypeAlias = Any  # sequence of bytes or of pairs (block id, pool), or a 2-D array of bytes
_Blocks: TypeAlias = Any  # Pool, sequence of Pools, a tensor, or a sequence or array of addresses
_Layout: TypeAlias = Any  # kvswap.files.Layout
_Race: TypeAlias = tuple[str, int, _RaceParty, _RaceParty]  # pool, slot, first, second

__version__: Final[str]

class Error(Exception): ...
class QueueFull(Error): ...

class DeviceError(Error):
    code: int
    operation: str | None

@final
class Device:
    def __new__(cls, name: str | None = None) -> Device: ...
    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def info(self) -> dict[str, Any]: ...
    @property
    def lost(self) -> bool: ...
    def set_compute_stream(self, stream: _StreamLike, /) -> None: ...
    def set_defaults(
        self,
        *,
        path: _Path = "auto",
        priority: _Priority | None = None,
        max_ctas: int | None = None,
        pace_gbps: float | None = None,
    ) -> None: ...
    def synchronize(self, timeout: float | None = None) -> None: ...
    def alloc(self, nbytes: int, *, host: bool = False) -> Memory: ...
    def register(self, ptr: _Address, nbytes: int | None = None) -> None: ...
    def unregister(self, ptr: _Address, /) -> None: ...
    def stats(self) -> dict[str, Any]: ...

@final
class Memory:
    """From Device.alloc: the buffer protocol where the CPU can read it, else __cuda_array_interface__."""
    @property
    def ptr(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> Device: ...
    @property
    def host(self) -> bool: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    def data_ptr(self) -> int: ...
    def free(self) -> None: ...
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Stream:
    def __new__(cls, device: Device | str | None = None, *, priority: _Priority = "normal") -> Stream: ...
    @property
    def handle(self) -> int: ...
    @property
    def device(self) -> Device: ...
    def query(self) -> bool: ...
    def synchronize(self, timeout: float | None = None) -> None: ...
    def __cuda_stream__(self) -> tuple[int, int]: ...

@final
class Event:
    def __new__(cls, device: Device | str | None = None, *, timing: bool = True) -> Event: ...
    @property
    def handle(self) -> int: ...
    @property
    def device(self) -> Device: ...
    def record(self, stream: _StreamLike, /) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self, timeout: float | None = None) -> None: ...
    def elapsed_time(self, other: Event, /) -> float: ...
    def wait(self, stream: _StreamLike, /) -> None: ...

@final
class Transfer:
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> None: ...
    def result(self, timeout: float | None = None) -> None: ...
    def cancel(self) -> bool: ...
    def make_wait(self, stream: _StreamLike, /) -> None: ...
    def make_wait_layer(self, layer: int, stream: _StreamLike) -> None: ...
    def layer_done(self, layer: int, /) -> bool: ...
    @property
    def event(self) -> Event: ...
    @property
    def device(self) -> Device: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def lane(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def elapsed(self) -> float | None: ...
    @property
    def path(self) -> str: ...
    @property
    def state(self) -> Literal["running", "done", "failed", "cancelled"]: ...
    @property
    def error(self) -> Exception | None: ...
    @property
    def failed_blocks(self) -> NDArray[np.int64]: ...

@final
class Pool:
    def __new__(
        cls,
        device: Device | str | None,
        ptr: _Address,
        num_blocks: int,
        block_nbytes: int,
        *,
        stride: int | None = None,
        rows: int = 1,
        pitch: int = 0,
        group: Pool | None = None,
        name: str | None = None,
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

@final
class FileTransfer:
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> None: ...
    def result(self, timeout: float | None = None) -> None: ...
    def cancel(self) -> bool: ...
    @property
    def what(self) -> Literal["store", "load", "delete"]: ...
    @property
    def state(self) -> Literal["running", "done", "failed", "cancelled"]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_kept(self) -> int: ...
    @property
    def elapsed(self) -> float | None: ...
    @property
    def error(self) -> Exception | None: ...
    @property
    def failed_blocks(self) -> NDArray[np.int64]: ...
    @property
    def reasons(self) -> dict[int, Exception]: ...

@final
class FileStore:
    def __new__(
        cls,
        directory: str | bytes | PathLike[str] | PathLike[bytes],
        layout: _Layout,
        *,
        capacity: int | None = None,
        device: Device | str | None = None,
        durability: Literal["none", "flush", "fsync"] = "none",
        engine: Literal["auto", "threads", "io_uring"] = "auto",
        depth: int | None = None,
        queue: int | None = None,
        segment_nbytes: int | None = None,
        staging_nbytes: int | None = None,
        buffered: bool = False,
        readonly: bool = False,
    ) -> FileStore: ...
    @property
    def info(self) -> dict[str, Any]: ...
    @property
    def block_nbytes(self) -> int: ...
    def store(
        self,
        keys: _Keys,
        blocks: _Blocks,
        ids: _Ids | None = None,
        *,
        after: _After | Iterable[_After] = (),
        replace: bool = True,
    ) -> FileTransfer: ...
    def load(
        self, keys: _Keys, blocks: _Blocks, ids: _Ids | None = None, *, after: _After | Iterable[_After] = ()
    ) -> FileTransfer: ...
    def delete(self, keys: _Keys, /) -> FileTransfer: ...
    def contains(self, keys: _Keys, /) -> list[bool]: ...
    def pin(self, keys: _Keys, /) -> None: ...
    def unpin(self, keys: _Keys, /) -> None: ...
    def touch(self, keys: _Keys, /) -> None: ...
    def keys(self) -> list[bytes]: ...
    def refresh(self) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def close(self, timeout: float | None = 60.0) -> None: ...
    def __enter__(self) -> FileStore: ...
    def __exit__(self, *args: object) -> None: ...
    def _set_fault(self, call: str, action: str, nth: int, every: int, code: int, delay: float, /) -> None: ...

def swap_blocks_batch(
    src_ptrs: _Addresses,
    dst_ptrs: _Addresses,
    sizes: _Sizes,
    *,
    stream: _StreamLike | None = None,
    after: _After | Iterable[_After] = (),
    device: Device | str | None = None,
    path: _Path = "auto",
    priority: _Priority | None = None,
    max_ctas: int | None = None,
    pace_gbps: float | None = None,
) -> Transfer: ...
def swap_cache_per_layer(
    gpu_ptr: _Address,
    cpu_ptr: _Address,
    block_nbytes: int,
    num_gpu_blocks: int,
    num_cpu_blocks: int,
    gpu_block_ids: _Ids,
    cpu_block_ids: _Ids,
    direction: int,
    *,
    gpu_stride: int | None = None,
    cpu_stride: int | None = None,
    stream: _StreamLike | None = None,
    after: _After | Iterable[_After] = (),
    device: Device | str | None = None,
    path: _Path = "auto",
    priority: _Priority | None = None,
    max_ctas: int | None = None,
    pace_gbps: float | None = None,
) -> None: ...
def swap_cache_per_layer_async(
    gpu_ptr: _Address,
    cpu_ptr: _Address,
    block_nbytes: int,
    num_gpu_blocks: int,
    num_cpu_blocks: int,
    gpu_block_ids: _Ids,
    cpu_block_ids: _Ids,
    direction: int,
    *,
    gpu_stride: int | None = None,
    cpu_stride: int | None = None,
    stream: _StreamLike | None = None,
    after: _After | Iterable[_After] = (),
    device: Device | str | None = None,
    path: _Path = "auto",
    priority: _Priority | None = None,
    max_ctas: int | None = None,
    pace_gbps: float | None = None,
) -> Transfer: ...
def swap_cache_all_layers(
    gpu_ptrs: _Addresses,
    cpu_ptrs: _Addresses,
    block_nbytes: _Sizes,
    num_gpu_blocks: _Sizes,
    num_cpu_blocks: _Sizes,
    gpu_block_ids: _Ids,
    cpu_block_ids: _Ids,
    direction: int,
    *,
    gpu_stride: _Sizes | None = None,
    cpu_stride: _Sizes | None = None,
    stream: _StreamLike | None = None,
    after: _After | Iterable[_After] = (),
    device: Device | str | None = None,
    path: _Path = "auto",
    priority: _Priority | None = None,
    max_ctas: int | None = None,
    pace_gbps: float | None = None,
) -> None: ...
def swap_cache_all_layers_async(
    gpu_ptrs: _Addresses,
    cpu_ptrs: _Addresses,
    block_nbytes: _Sizes,
    num_gpu_blocks: _Sizes,
    num_cpu_blocks: _Sizes,
    gpu_block_ids: _Ids,
    cpu_block_ids: _Ids,
    direction: int,
    *,
    gpu_stride: _Sizes | None = None,
    cpu_stride: _Sizes | None = None,
    stream: _StreamLike | None = None,
    after: _After | Iterable[_After] = (),
    device: Device | str | None = None,
    path: _Path = "auto",
    priority: _Priority | None = None,
    max_ctas: int | None = None,
    pace_gbps: float | None = None,
    layer_events: bool = False,
    after_layers: _AfterLayers | None = None,
) -> Transfer: ...
def move_blocks(
    src: Pool | Sequence[Pool],
    dst: Pool | Sequence[Pool],
    src_ids: _Ids,
    dst_ids: _Ids,
    *,
    parts: _Parts | None = None,
    layer_events: bool = False,
    after_layers: _AfterLayers | None = None,
    stream: _StreamLike | None = None,
    after: _After | Iterable[_After] = (),
    path: _Path = "auto",
    priority: _Priority | None = None,
    max_ctas: int | None = None,
    pace_gbps: float | None = None,
) -> Transfer: ...
def note_access(
    stream: _StreamLike, pool: Pool, slots: _Ids, write: bool, *, offset: int = 0, nbytes: int | None = None
) -> None: ...
def note_order(before: _After, after: _StreamLike | None, *, device: Device | str | None = None) -> None: ...

# Underscored: for kvswap's own modules (kvswap.testing, kvswap.replay, kvswap.devices).

@final
class _PatternJob:
    def done(self) -> bool: ...
    def result(self, timeout: float | None = None) -> tuple[int, int | None, int | None]: ...

def _file_gds() -> str: ...
def _file_peek(directory: str | bytes | PathLike[str] | PathLike[bytes], /) -> tuple[str, int]: ...
def _pattern(
    device: Device,
    check: bool,
    ptrs: NDArray[np.uint64] | NDArray[np.int64],
    nbytes: NDArray[np.uint64] | NDArray[np.int64],
    keys: NDArray[np.uint64],
    stream: _StreamLike,
) -> _PatternJob: ...
def _pattern_word(key: int, index: int) -> int: ...
def _delay(device: Device, seconds: float, stream: _StreamLike) -> None: ...
def _deterministic_device(seed: int) -> Device: ...
def _host_step(device: Device, steps: int) -> int: ...
def _host_trace(device: Device, /) -> int: ...
def _host_capture(device: Device, stream: _StreamLike, begin: bool) -> None: ...
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
) -> None: ...
def _set_race_hook(hook: Callable[[], object] | None, /) -> Callable[[], object] | None: ...
def _racecheck_start() -> None: ...
def _racecheck_stop() -> None: ...
def _racecheck_found() -> int: ...
def _racecheck_take() -> list[_Race]: ...
def _set_lane_depth(device: Device, depth: int) -> None: ...
def _cuda_count() -> tuple[int, str]: ...
def _cuda_info(ordinal: int) -> dict[str, Any]: ...
def _fatbin() -> dict[str, Any]: ...
def _shutdown(timeout: float) -> None: ...

class _PathCost(TypedDict):
    start: float
    extra: float
    each: Sequence[float]
    run: Sequence[float]

class _Tuning(TypedDict, total=False):
    kernel_ctas: int
    background_ctas: int
    background_gbps: float
    link_gbps_d2h: float
    link_gbps_h2d: float

class _Costs(TypedDict):
    d2h: dict[str, _PathCost]
    h2d: dict[str, _PathCost]
    tuning: _Tuning

def _costs_read(path: str | PathLike[str] | None, /) -> _Costs: ...
def _costs_write(path: str | PathLike[str], costs: _Costs, machine: str) -> None: ...
def _costs_what(device: Device, /) -> str: ...
def _costs_use(device: Device, costs: _Costs | None) -> None: ...
def _costs_path(what: str, /) -> str: ...
def _costs_predict(
    costs: _Costs | None,
    path: _Path,
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
) -> float: ...

# Seam calls, one a member of csrc/device.h: for the conformance suite. Each returns what the member returns and raises
# DeviceError with its code.
def _seam(device: Device, operation: str, /, *args: Any) -> Any: ...
