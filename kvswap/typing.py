"""Types for annotations: what kvswap's functions take as addresses, ids and streams, and what info and stats hold."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, SupportsIndex, TypeAlias, TypedDict, Union

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvswap._C import Device, Event, Pool, Transfer

# -- addresses --------------------------------------------------------------------------------------------------------


class HasDataPtr(Protocol):
    """A torch or Paddle tensor, or a kvswap Memory."""

    def data_ptr(self) -> int: ...


class HasDLPack(Protocol):
    """Any array library's tensor. Its memory is read in place: one that exports a copy is refused."""

    def __dlpack__(self, *, stream: Any = None) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, int]: ...


class HasCudaArrayInterface(Protocol):
    @property
    def __cuda_array_interface__(self) -> Any: ...


class HasArrayInterface(Protocol):
    @property
    def __array_interface__(self) -> Any: ...


if sys.version_info >= (3, 12):
    from collections.abc import Buffer

    BufferLike: TypeAlias = Buffer
else:
    BufferLike: TypeAlias = bytes | bytearray | memoryview

# Its memory is used, and it is held until the transfer ends.
Tensor: TypeAlias = NDArray[Any] | HasDataPtr | HasDLPack | HasCudaArrayInterface | HasArrayInterface | BufferLike
Address: TypeAlias = SupportsIndex | Tensor  # a number: memory that the caller keeps mapped
# An array's items are addresses. One tensor is not a list: pass [tensor].
Addresses: TypeAlias = NDArray[np.int64] | NDArray[np.uint64] | Sequence[Address]

# -- numbers ----------------------------------------------------------------------------------------------------------


class HostTensor(Protocol):
    """A torch or Paddle tensor of integers in host memory: it converts to a NumPy array."""

    def __array__(self) -> NDArray[Any]: ...
    def numel(self) -> Any: ...


Ids: TypeAlias = NDArray[np.integer[Any]] | HostTensor | Sequence[SupportsIndex]
# Those of the GPU's side may lie in GPU memory: a torch or CuPy array, or any with these protocols.
GpuIds: TypeAlias = Ids | HasDLPack | HasCudaArrayInterface
GpuOrder: TypeAlias = Literal["pool", "stream"]  # with ids in GPU memory: who orders the GPU's side
Sizes: TypeAlias = SupportsIndex | NDArray[np.integer[Any]] | Sequence[SupportsIndex]  # one, or one a tensor
DirectionLike: TypeAlias = Literal["D2H", "H2D", "d2h", "h2d"] | SupportsIndex  # 0 and 1; kvswap.Direction
ForcedPath: TypeAlias = Literal["dma", "strided", "borrow", "burst", "kernel", "direct"]
Path: TypeAlias = Literal["auto", ForcedPath]
Priority: TypeAlias = Literal["high", "normal", "background"]

# -- streams and devices ----------------------------------------------------------------------------------------------


class HasCudaStream(Protocol):
    """torch.cuda.Stream."""

    @property
    def cuda_stream(self) -> int: ...


class HasPtr(Protocol):
    """cupy.cuda.Stream."""

    @property
    def ptr(self) -> int: ...


class HasCudaStreamProtocol(Protocol):
    """cuda.core.Stream, kvswap.Stream."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


StreamLike: TypeAlias = SupportsIndex | HasCudaStream | HasPtr | HasCudaStreamProtocol


class HasCudaEvent(Protocol):
    """torch.cuda.Event."""

    @property
    def cuda_event(self) -> int: ...


AfterItem: TypeAlias = Union["Event", "Transfer", HasCudaEvent, StreamLike]
After: TypeAlias = AfterItem | Iterable[AfterItem] | None


class TorchDevice(Protocol):
    """torch.device."""

    @property
    def type(self) -> str: ...
    @property
    def index(self) -> int | None: ...


DeviceLike: TypeAlias = Union["Device", str, SupportsIndex, TorchDevice]

# -- the file tier ----------------------------------------------------------------------------------------------------


class LayoutLike(Protocol):
    """kvswap.files.Layout."""

    @property
    def block_nbytes(self) -> int: ...
    @property
    def text(self) -> str: ...


Keys: TypeAlias = Sequence[bytes] | Sequence[tuple[int, int]] | NDArray[np.uint8]
Blocks: TypeAlias = Union["Pool", Sequence["Pool"], Address, Addresses]

# -- facts ------------------------------------------------------------------------------------------------------------


class CudaInfo(TypedDict):
    """What is known of a device without opening it."""

    name: str  # "NVIDIA H200"
    pci: str  # "0000:01:00.0"; empty: a host device
    uuid: str
    memory: int  # bytes
    memory_gbps: int  # its bandwidth; 0: unknown, or a host device
    max_pitch: int  # largest pitch of a 2-D copy, bytes
    driver: int  # the CUDA version that it is for, 13000 for 13.0; 0: a host device
    cc_major: int
    cc_minor: int
    sms: int
    copy_engines: int
    numa_node: int  # -1: unknown
    priority_low: int  # of streams, as the driver has them: low >= high
    priority_high: int
    batch: bool  # the driver has a call for many copies
    memops: bool  # stream memory operations work
    kernels: bool  # kernels are loaded
    kernels_note: str  # from what image, or why not


class BuildInfo(TypedDict):
    """The kernels in this build."""

    nbytes: int
    archs: str  # "sm_80 sm_90 compute_80"; empty: built without nvcc


class HostMemory(TypedDict):
    """Host memory that can be allocated, bytes; 2**64 - 1: unknown, no limit."""

    available: int
    total: int
    group_max: int  # limit of the control group that leaves the least
    group_used: int  # without page cache that the kernel can drop
    group: str  # its folder; "above FOLDER": a group that cannot be seen
    knob: str  # name of the limit's file


class ArrayInterface(TypedDict):
    shape: tuple[int, ...]
    typestr: str
    data: tuple[int, bool]
    version: int


class Lending(TypedDict):
    slot_nbytes: int
    count: int
    share: float


class OpenedInfo(CudaInfo):
    """Device.info."""

    burst: str  # "on", or why path burst is off or has less memory than wanted
    slots_nbytes: int  # GPU memory that path burst uses
    lenders: dict[str, Lending]  # devices that lend their link to this one, and what Device.lend() was told
    costs: str  # the source of the costs by which path auto predicts


class PathStats(TypedDict):
    transfers: int
    blocks: int
    bytes: int
    link_bytes: int
    seconds: float


class DeviceStats(TypedDict):
    """Device.stats()."""

    submitted: int
    done: int
    failed: int
    cancelled: int
    bytes_d2h: int
    bytes_h2d: int
    bytes_other: int
    copies: int
    merged: int
    unfinished: int
    lanes: int
    refused_full: int
    second_attempts: int
    staging_nbytes: int
    waits_raw: int
    waits_war: int
    waits_waw: int
    lent_bytes_d2h: int
    lent_bytes_h2d: int
    borrowed_bytes_d2h: int
    borrowed_bytes_h2d: int
    paths: dict[str, dict[str, PathStats]]


class FileInfo(TypedDict):
    """FileStore.info."""

    engine: Literal["threads", "io_uring"]
    engine_note: str
    direct: bool
    direct_note: str
    gds: str
    gds_note: str
    checksum: str
    readonly: bool
    readonly_note: str  # why a store that was opened for writing is read-only
    block_nbytes: int
    slot_nbytes: int
    segment_nbytes: int
    capacity: int
    depth: int
    bound: str
    bound_note: str


class ShareStats(TypedDict):
    """kvswap.share.Member.stats(). Bytes, by direction, and counts."""

    brought_for_others_d2h: int  # over this member's link
    brought_for_others_h2d: int
    brought_by_others_d2h: int  # over others' links
    brought_by_others_h2d: int
    passed_on: int  # of shared loads, from this member's GPU to others
    pieces_late: int  # others did not bring them in time
    answers_dropped: int  # of an earlier use of a slot
    links_lost: int  # members that ended without leaving


class FileStats(TypedDict):
    """FileStore.stats(). docs/files.md says what each counts."""

    blocks: int
    pinned: int
    slots: int
    segments: int
    file_nbytes: int
    stored: int
    kept: int
    loaded: int
    deleted: int
    evicted: int
    missed: int
    damaged: int
    failed: int
    found: int
    cut: int
    foreign: int
    lost_slots: int
    unfinished_loads: int
    unfinished_stores: int
    refused_full: int
    gds_read_nbytes: int
    gds_written_nbytes: int
    gds_by_host: int
    directory_nbytes: int
    reclaimed_segments: int
    retired_segments: int
    requests: int
