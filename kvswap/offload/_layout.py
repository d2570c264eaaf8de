"""Computes the arguments of kvswap._C.OffloadMap from tensors and references. Runs once a handler, not per job."""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvswap import _C

if TYPE_CHECKING:
    from kvswap.offload._coded import CodedLayout, CodedMap
    from kvswap.offload._lend import LendLayout, LendMap
    from kvswap.offload._member import MemberLayout, MemberMap
    from kvswap.offload._replicas import ReplicaLayout, ReplicaMap

_CPU_KINDS = (1, 3)  # DLPack: plain and pinned host memory
_CUDA_KINDS = (2, 13)  # a GPU's, and managed


class Blocks(NamedTuple):
    """A tensor as blocks: block i is the `page` bytes at ptr + i * stride."""

    ptr: int
    blocks: int
    stride: int
    page: int


def is_torch(tensor: Any) -> bool:
    """Without importing torch."""
    return type(tensor).__module__.partition(".")[0] == "torch" and hasattr(tensor, "untyped_storage")


def device_of(tensor: Any) -> str:
    """The device name of a tensor: "cuda:N", or "host:0" for memory of the process."""
    if is_torch(tensor):
        return f"cuda:{tensor.device.index or 0}" if tensor.device.type == "cuda" else "host:0"
    if hasattr(tensor, "__dlpack_device__"):
        kind, index = tensor.__dlpack_device__()
        if kind in _CUDA_KINDS:
            return f"cuda:{int(index)}"
        if kind in _CPU_KINDS:
            return "host:0"
        raise ValueError(f"the tensor lies on a device of DLPack's kind {kind}; kvswap knows CUDA and the host")
    if hasattr(tensor, "__cuda_array_interface__"):
        return "cuda:0"
    return "host:0"


def geometry_of(tensor: Any, name: str) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    """Address, shape, strides in bytes, item size."""
    if is_torch(tensor):
        size = int(tensor.element_size())
        return int(tensor.data_ptr()), tuple(tensor.shape), tuple(s * size for s in tensor.stride()), size
    for attribute in ("__cuda_array_interface__", "__array_interface__"):
        described = getattr(tensor, attribute, None)
        if isinstance(described, dict):
            shape = tuple(described["shape"])
            size = np.dtype(described["typestr"]).itemsize
            strides = described.get("strides") or tuple(size * math.prod(shape[i + 1 :]) for i in range(len(shape)))
            return int(described["data"][0]), shape, tuple(strides), size
    try:
        array: NDArray[Any] = (
            np.from_dlpack(tensor) if hasattr(tensor, "__dlpack__") else np.asarray(memoryview(tensor))
        )
    except (TypeError, RuntimeError, BufferError):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}") from None
    return int(array.ctypes.data), array.shape, array.strides, array.itemsize


def extent_of(tensor: Any, name: str) -> tuple[int, int]:
    """First address of what a tensor's elements lie in, and its end."""
    ptr, shape, strides, size = geometry_of(tensor, name)
    return ptr, ptr + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) + size


def _together(shape: Sequence[int], strides: Sequence[int], nbytes: int, name: str) -> int:
    """Bytes of a block of that shape, whose elements have nbytes."""
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1 and stride != nbytes:
            raise ValueError(f"{name} has strides of {tuple(strides)} bytes: the bytes of a block must lie together")
        nbytes *= extent
    return nbytes


def blocks_of(tensor: Any, name: str) -> Blocks:
    """The blocks of a tensor: the first dimension; the other dimensions must be contiguous."""
    ptr, shape, strides, size = geometry_of(tensor, name)
    if len(shape) < 2:
        raise ValueError(f"{name} has shape {shape}: its first dimension is blocks, the others are their bytes")
    page = _together(shape[1:], strides[1:], size, name)
    if shape[0] > 1 and strides[0] < page:
        raise ValueError(f"{name} has blocks {strides[0]} bytes apart that are {page} bytes long")
    return Blocks(ptr, shape[0], strides[0] if shape[0] > 1 else page, page)


class Chunks(NamedTuple):
    """A tensor as chunks of blocks: block j of chunk c is the `page` bytes at ptr + c * stride + j * pitch."""

    ptr: int
    chunks: int
    stride: int
    page: int
    pitch: int


def chunks_of(tensor: Any, factor: int, name: str) -> Chunks:
    """A tensor (chunks, bytes of `factor` blocks), or (chunks, factor, bytes of a block) at any distance from each
    other."""
    ptr, shape, strides, size = geometry_of(tensor, name)
    if len(shape) < 3 or factor == 1 or shape[1] != factor:
        rows = blocks_of(tensor, name)
        if rows.page % factor:
            raise ValueError(f"{name} has chunks of {rows.page} bytes: they are {factor} blocks of one size")
        return Chunks(ptr, rows.blocks, rows.stride, rows.page // factor, rows.page // factor)
    page, pitch = _together(shape[2:], strides[2:], size, name), strides[1]
    if pitch < page:
        raise ValueError(f"{name} has blocks {pitch} bytes apart that are {page} bytes long")
    stride = strides[0] if shape[0] > 1 else (factor - 1) * pitch + page
    return Chunks(ptr, shape[0], stride, page, pitch)


def in_pages(tensor: Any, page: int, name: str) -> Any:
    """The same memory as a tensor of bytes, (blocks, page)."""
    if is_torch(tensor):
        import torch

        return tensor.view(torch.int8).view(-1, page)
    if not (hasattr(tensor, "view") and hasattr(tensor, "reshape")):
        tensor = np.asarray(memoryview(tensor))
    flat = tensor.view(np.int8)
    shaped = flat if flat.ndim == 2 and flat.shape[1] == page else flat.reshape(-1, page)
    if blocks_of(shaped, name).ptr != blocks_of(flat if flat.ndim > 1 else shaped, name).ptr:
        raise ValueError(f"{name} cannot be seen as blocks of {page} bytes without copying it")
    return shaped


Ranges: TypeAlias = tuple[tuple[int, int], ...]  # of a block's bytes: begin, end


class Layout(NamedTuple):
    """The arguments of an OffloadMap, and its key.

    numbers: blocks that are cut into parts have twice as many groups: the caller's, of whole blocks, and then the same
    groups in parts. Row i of numbers is (group, tensor, number of the part) of row i of the second half of `parts`.
    """

    device: str
    tensors: NDArray[np.uint64]
    parts: NDArray[np.uint64]
    groups: int
    chunks: int
    factor: int
    remember_failures: bool
    numbers: tuple[tuple[int, int, int], ...] = ()

    def key(self) -> tuple[Any, ...]:
        """Equal for the same blocks of the same memory."""
        return (*self[:1], self.tensors.tobytes(), self.parts.tobytes(), *self[3:])

    def open(self, device: _C.Device, hold: object) -> _C.OffloadMap:
        """The map of these blocks. hold: kept until the map is gone and its transfers have ended."""
        return _C.OffloadMap(
            device,
            self.tensors.ravel(),
            self.parts.ravel(),
            self.groups,
            self.chunks,
            self.factor,
            hold=hold,
            remember_failures=self.remember_failures,
        )


def _parts_of(group: int, ref: Any, canonical: bool, gpu: Blocks, cpu_page: int) -> list[tuple[int, ...]]:
    """Rows for kvswap._C.OffloadMap: what one layer moves of each block."""
    where = f"group {group}, tensor {ref.tensor_idx}"
    if not canonical:
        if not 0 < ref.page_size_bytes <= min(gpu.page, cpu_page):
            raise ValueError(f"{where}: page_size_bytes is {ref.page_size_bytes}; the tensor has {gpu.page} a block")
        nbytes = int(ref.page_size_bytes)
        return [(group, ref.tensor_idx, 0, 0, nbytes, 1, nbytes, nbytes, 1, 0)]
    if ref.mapping is None:
        raise ValueError(f"{where}: the canonical layout needs a mapping for each layer")
    writers = (ref.mapping.num_writers, ref.mapping.writer_index)
    rows = []
    for run in ref.mapping.runs:
        pitches = (run.local_stride, run.canonical_stride) if run.num_fragments > 1 else (run.fragment_size,) * 2
        offsets = (run.local_offset, run.canonical_offset)
        rows.append((group, ref.tensor_idx, *offsets, run.fragment_size, run.num_fragments, *pitches, *writers))
    return [row for row in rows if row[5] > 0]


def checked_parts(
    layer_parts: Sequence[Sequence[Sequence[int]]] | None, gpu_tensors: Sequence[Any], canonical: bool
) -> tuple[Ranges, ...]:
    """The same as tuples: the parts of each tensor's block, in the order in which they are moved. None: a block is
    one."""
    whole = tuple(((0, blocks_of(tensor, f"gpu_tensors[{i}]").page),) for i, tensor in enumerate(gpu_tensors))
    if layer_parts is None:
        return whole
    if canonical:
        raise ValueError("the canonical layout has fragments of its own, and takes no layer_parts")
    made = tuple(tuple((int(begin), int(end)) for begin, end in ranges) for ranges in layer_parts)
    if len(made) != len(whole):
        raise ValueError(f"layer_parts has {len(made)} entries; there are {len(whole)} tensors")
    for i, (ranges, ((_, page),)) in enumerate(zip(made, whole, strict=True)):
        ends = [0, *(end for _, end in sorted(ranges))]
        if [begin for begin, _ in sorted(ranges)] != ends[:-1] or ends != sorted({*ends}) or ends[-1] != page:
            raise ValueError(f"layer_parts[{i}] is {ranges}: together they are the {page} bytes of a block, each once")
    return made


def share_tensors(groups: Sequence[Sequence[Any]]) -> bool:
    """Whether layer_parts can be used: there is one group, or each group shares a tensor with another one. A map has
    one failure record for all groups that share a tensor with another group. With layer_parts every group does.
    """
    owners = Counter(index for refs in groups for index in {ref.tensor_idx for ref in refs})
    return len(groups) == 1 or all(any(owners[ref.tensor_idx] > 1 for ref in refs) for refs in groups)


def _cut(groups: Sequence[Sequence[Any]], layer_parts: Sequence[Ranges]) -> dict[tuple[int, ...], int]:
    """Rows for kvswap._C.OffloadMap: the same groups once more, in parts; and the number of each part."""
    first = [0, *accumulate(len(ranges) for ranges in layer_parts)]
    rows: dict[tuple[int, ...], int] = {}
    for group, refs in enumerate(groups):
        for ref in refs:
            for k, (begin, end) in enumerate(layer_parts[ref.tensor_idx]):
                nbytes = min(end, int(ref.page_size_bytes)) - begin
                if nbytes > 0:
                    row = (len(groups) + group, ref.tensor_idx, begin, begin, nbytes, 1, nbytes, nbytes, 1, 0)
                    rows[row] = first[ref.tensor_idx] + k
    return rows


def make_layout(
    device: str,
    gpu_tensors: Sequence[Any],
    cpu_tensors: Sequence[Any],
    factor: int,
    groups: Sequence[Sequence[Any]],
    *,
    canonical: bool,
    remember_failures: bool,
    layer_parts: Sequence[Ranges] = (),
) -> Layout:
    """Check an engine's tensors and references, and compute the Layout. layer_parts: none, or checked_parts()."""
    if len(gpu_tensors) != len(cpu_tensors) or not gpu_tensors:
        raise ValueError(
            f"{len(gpu_tensors)} GPU tensors and {len(cpu_tensors)} CPU tensors: as many, and one at least"
        )
    gpus = [blocks_of(tensor, f"gpu_tensors[{i}]") for i, tensor in enumerate(gpu_tensors)]
    cpus = [chunks_of(tensor, factor, f"cpu_tensors[{i}]") for i, tensor in enumerate(cpu_tensors)]
    chunks = cpus[0].chunks
    rows = []
    for i, (gpu, cpu) in enumerate(zip(gpus, cpus, strict=True)):
        if cpu.chunks != chunks:
            raise ValueError(f"cpu_tensors[{i}] has {cpu.chunks} chunks, cpu_tensors[0] {chunks}")
        if not canonical and cpu.page != gpu.page:
            raise ValueError(
                f"cpu_tensors[{i}] has chunks of {cpu.page * factor} bytes: they are {factor} blocks of {gpu.page} "
                "bytes each"
            )
        rows.append((gpu.ptr, gpu.blocks, gpu.stride, gpu.page, cpu.ptr, cpu.stride, cpu.page, cpu.pitch))
    parts: dict[tuple[int, ...], None] = {}  # deduplicated: layers that share blocks are moved once
    for group, refs in enumerate(groups):
        for ref in refs:
            if not 0 <= ref.tensor_idx < len(gpus):
                raise IndexError(f"group {group} refers to tensor {ref.tensor_idx}; there are {len(gpus)}, from 0")
            parts.update(dict.fromkeys(_parts_of(group, ref, canonical, gpus[ref.tensor_idx], rows[ref.tensor_idx][6])))
    if layer_parts and not share_tensors(groups):
        raise ValueError("layer_parts is for one group, or for groups of which each has a tensor of another one")
    cut = _cut(groups, layer_parts) if layer_parts else {}
    return Layout(
        device,
        np.array(rows, np.uint64),
        np.array([*parts, *cut], np.uint64).reshape(-1, 10),
        2 * len(groups) if layer_parts else len(groups),
        chunks,
        factor,
        remember_failures,
        tuple((row[0], row[1], number) for row, number in cut.items()),
    )


AnyLayout: TypeAlias = "Layout | CodedLayout | MemberLayout | LendLayout | ReplicaLayout"
AnyMap: TypeAlias = "_C.OffloadMap | CodedMap | MemberMap | LendMap | ReplicaMap"


class SharedMap:
    """A map shared by all handlers of the same blocks, which orders their transfers."""

    def __init__(self, layout: AnyLayout, device: _C.Device, hold: object) -> None:
        self.key = layout.key()
        self.device = device
        self.map: AnyMap = layout.open(device, hold)
        self.users = 0  # guarded by _maps_lock
        self.regions: list[Any] = []  # cleaned up after the last user has released the map


_maps: weakref.WeakValueDictionary[tuple[Any, ...], SharedMap] = weakref.WeakValueDictionary()
_maps_lock = threading.Lock()


def take_map(layout: AnyLayout, device: _C.Device, hold: object, region: Any) -> SharedMap:
    """The map of these blocks: an existing one, or a new one. give_map() releases it."""
    with _maps_lock:
        found = _maps.get(layout.key())
        if found is None:
            found = _maps[layout.key()] = SharedMap(layout, device, hold)
        if region is not None and region not in found.regions:
            found.regions.append(region)
        found.users += 1
        return found


def give_map(shared: SharedMap) -> None:
    """Release the map after a handler's transfers have ended. The last user releases the tensors, then their
    regions. TimeoutError: others still use the memory, which stays."""
    with _maps_lock:
        shared.users -= 1
        if shared.users:
            return
        _maps.pop(shared.key, None)
        regions, shared.regions = shared.regions, []
    if hasattr(shared.map, "close"):
        shared.map.close()
    del shared.map
    shared.device.stats()  # collects what its transfers held
    with ExitStack() as stack:  # clean up all, even if one raises
        for region in reversed(regions):
            stack.callback(region.cleanup)
