"""Jobs on blocks that are coded in host memory (docs/codecs.md): OffloadMap's methods, over pools.

A tensor has a pool on each side, and its own coding. The pools of a side are one group: slot i of all of them is one
block. Block j of chunk c is slot c * chunk_slots + j on the host. A job is a transfer for each group of layers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate, compress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvswap import _C
from kvswap.codecs import Coding
from kvswap.offload._layout import Blocks, Chunks, Layout, Ranges, blocks_of, chunks_of, make_layout

_Ids = NDArray[np.int64]


class CodedLayout(NamedTuple):
    """The places of a cache's blocks on both sides, and how they are coded."""

    device: str
    gpus: tuple[Blocks, ...]
    cpus: tuple[Chunks, ...]
    codings: tuple[Coding, ...]
    groups: tuple[tuple[int, ...], ...]  # the tensors of each
    parts: tuple[Ranges, ...]  # of each tensor's block, that a job with layer_events moves one after another
    factor: int
    remember_failures: bool
    numbers: tuple[tuple[int, int, int], ...] = ()  # CodedMap.order has the parts already

    def key(self) -> tuple[Any, ...]:
        """Equal for the same blocks of the same memory, coded alike."""
        return (*self[:3], tuple(coding.text for coding in self.codings), *self[4:])

    def open(self, device: _C.Device, hold: object) -> CodedMap:
        """The map of these blocks."""
        return CodedMap(self, device, hold)


def _check_parts(i: int, ranges: Ranges, coding: Coding) -> None:
    if any(begin % coding.page_nbytes for begin, _ in ranges):
        raise ValueError(f"layer_parts[{i}] is {ranges}: a part begins with a page of {coding.page_nbytes} bytes")


def coded_layout(
    device: str,
    gpu_tensors: Sequence[Any],
    cpu_tensors: Sequence[Any],
    factor: int,
    groups: Sequence[Sequence[Any]],
    *,
    codings: Sequence[Coding],
    remember_failures: bool,
    layer_parts: tuple[Ranges, ...],
) -> CodedLayout:
    """Check an engine's tensors, references and codings. layer_parts: as checked_parts() gives them."""
    if not len(gpu_tensors) == len(cpu_tensors) == len(codings):
        raise ValueError(
            f"{len(gpu_tensors)} GPU tensors, {len(cpu_tensors)} CPU tensors and {len(codings)} codings: as many each"
        )
    gpus = tuple(blocks_of(tensor, f"gpu_tensors[{i}]") for i, tensor in enumerate(gpu_tensors))
    cpus = tuple(chunks_of(tensor, factor, f"cpu_tensors[{i}]") for i, tensor in enumerate(cpu_tensors))
    for i, (gpu, cpu, coding) in enumerate(zip(gpus, cpus, codings, strict=True)):
        if cpu.page != coding.coded_nbytes or cpu.chunks != cpus[0].chunks:
            raise ValueError(
                f"cpu_tensors[{i}] has {cpu.chunks} chunks of {cpu.page * factor} bytes: they are {cpus[0].chunks} of "
                f"{factor} coded blocks of {coding.coded_nbytes} bytes each"
            )
        if gpu.blocks != gpus[0].blocks or gpu.page < coding.block_nbytes:
            raise ValueError(
                f"gpu_tensors[{i}] has {gpu.blocks} blocks of {gpu.page} bytes: they are {gpus[0].blocks} of at least "
                f"{coding.block_nbytes}"
            )
        if factor > 1 and cpu.stride % cpu.pitch:
            raise ValueError(f"cpu_tensors[{i}] has blocks {cpu.pitch} bytes apart, and chunks {cpu.stride}")
        _check_parts(i, layer_parts[i], coding)
    for group, refs in enumerate(groups):
        for ref in refs:
            if not 0 <= ref.tensor_idx < len(gpus):
                raise IndexError(f"group {group} refers to tensor {ref.tensor_idx}; there are {len(gpus)}, from 0")
            if ref.page_size_bytes != codings[ref.tensor_idx].block_nbytes:
                raise ValueError(
                    f"group {group}, tensor {ref.tensor_idx}: page_size_bytes is {ref.page_size_bytes}; its coding has "
                    f"blocks of {codings[ref.tensor_idx].block_nbytes} bytes"
                )
    return CodedLayout(
        device,
        gpus,
        cpus,
        tuple(codings),
        tuple(tuple(sorted({ref.tensor_idx for ref in refs})) for refs in groups),
        layer_parts,
        factor,
        remember_failures,
    )


def layout_of(
    places: tuple[Any, ...],
    codings: Sequence[Coding] | None,
    canonical: bool,
    remember_failures: bool,
    layer_parts: tuple[Ranges, ...],
) -> Layout | CodedLayout:
    """Of a handler. places: device, tensors of both sides, factor, references."""
    if codings is None:
        return make_layout(*places, canonical=canonical, remember_failures=remember_failures, layer_parts=layer_parts)
    if canonical:
        raise ValueError("blocks in the canonical layout cannot be coded: its fragments are parts of pages")
    return coded_layout(*places, codings=codings, remember_failures=remember_failures, layer_parts=layer_parts)


class MemoryOf:
    """An address for a pool, which holds the object, and so what is held here."""

    def __init__(self, ptr: int, hold: object) -> None:
        self._ptr, self._hold = ptr, hold

    def data_ptr(self) -> int:
        return self._ptr


class _Blocks(NamedTuple):
    """The blocks of a job in one group of layers."""

    gpu: _Ids  # slots
    cpu: _Ids


def _places_of(sizes: Sequence[int], indices: Sequence[int], factor: int) -> list[tuple[_Ids, _Ids]]:
    """For each block of a job, by groups: the position of its chunk in the job's list, and its place in the chunk."""
    found, chunk = [], 0
    for size, index in zip(sizes, indices, strict=True):
        within = int(index) % factor + np.arange(size)
        found.append((chunk + within // factor, within % factor))
        chunk += int(within[-1]) // factor + 1 if size else 0
    return found


class Shape(NamedTuple):
    """What the lists of a job must fit. slots: of a chunk, the places for blocks from one chunk to the next."""

    groups: int
    blocks: int
    chunks: int
    factor: int
    slots: int


def expand_job(shape: Shape, gpu_blocks: Any, chunks: Any, group_sizes: Any, block_indices: Any) -> list[_Blocks]:
    """The slots of each group's blocks. ValueError, IndexError: the lists do not fit."""
    gpu, cpu = (np.asarray(ids, np.int64) for ids in (gpu_blocks, chunks))
    sizes, indices = ([int(n) for n in numbers] for numbers in (group_sizes, block_indices))
    if not len(sizes) == len(indices) == shape.groups or min([*sizes, *indices], default=0) < 0:
        raise ValueError(
            f"group_sizes is {sizes} and block_indices {indices}: {shape.groups} groups have one each, 0 or more"
        )
    places = _places_of(sizes, indices, shape.factor)
    needed = max((int(positions[-1]) + 1 for positions, _ in places if positions.size), default=0)
    if sum(sizes) != gpu.size or needed != cpu.size:
        raise ValueError(f"{gpu.size} gpu_blocks and {cpu.size} chunks do not fit group_sizes {sizes}")
    for name, ids, most in (("gpu_blocks", gpu, shape.blocks), ("chunks", cpu, shape.chunks)):
        bad = np.flatnonzero((ids < 0) | (ids >= most))
        if bad.size:
            raise IndexError(f"{name}[{bad[0]}] is {ids[bad[0]]}; there are {most}, from 0")
    begins = [0, *accumulate(sizes)]
    return [
        _Blocks(gpu[begin : begin + size], cpu[positions] * shape.slots + within)
        for begin, size, (positions, within) in zip(begins, sizes, places, strict=False)
    ]


def chunks_not_stored(
    transfers: Sequence[Any], moved: Sequence[bool], sizes: Sequence[int], indices: Sequence[int], factor: int
) -> tuple[int, set[int]]:
    """Of an ended store: how many blocks failed, and the positions of their chunks in the job's list. moved: whether a
    group has tensors."""
    places = _places_of(sizes, indices, factor)
    count, positions = 0, set[int]()
    groups = [chunks for (chunks, _), some in zip(places, moved, strict=True) if chunks.size and some]
    for chunks, transfer in zip(groups, transfers, strict=True):
        failed = transfer.failed_positions
        count += len(failed)
        positions.update(chunks[failed].tolist())
    return count, positions


class CodedMap:
    """The methods of kvswap._C.OffloadMap, for blocks that are coded."""

    def __init__(self, layout: CodedLayout, device: _C.Device, hold: object) -> None:
        self._layout = layout
        self._slots = 1 if layout.factor == 1 else layout.cpus[0].stride // layout.cpus[0].pitch  # of a chunk
        self._gpu: list[_C.Pool] = []
        self._cpu: list[_C.Pool] = []
        count = (layout.cpus[0].chunks - 1) * self._slots + layout.factor
        for gpu, cpu, coding in zip(layout.gpus, layout.cpus, layout.codings, strict=True):
            step = cpu.stride if layout.factor == 1 else cpu.pitch
            for pools, ptr, blocks, nbytes, stride, how in (
                (self._gpu, gpu.ptr, gpu.blocks, coding.block_nbytes, gpu.stride, None),
                (self._cpu, cpu.ptr, count, coding.coded_nbytes, step, coding),
            ):
                group = pools[0] if pools else None
                memory: Any = MemoryOf(ptr, hold)
                pools.append(_C.Pool(device, memory, blocks, nbytes, stride=stride, group=group, coding=how))
        self._stream = _C.Stream(device)  # carries no work
        self._last: dict[int, _C.Transfer] = {}  # of each lane
        self._lock = threading.Lock()
        self._loads: list[tuple[_C.Transfer, list[_C.Pool], _Ids]] = []  # not known to have ended; guarded by _lock

    @property
    def order(self) -> tuple[tuple[int, tuple[int, ...], bool], ...]:
        """As OffloadMap.order, with the numbers of parts, through all tensors, in the place of tensors."""
        first = [0, *accumulate(len(ranges) for ranges in self._layout.parts)]
        return tuple(
            (
                group,
                tuple(
                    first[i] + self._layout.parts[i].index(part)
                    for i in tensors
                    for part in sorted(self._layout.parts[i])
                ),
                True,
            )
            for group, tensors in enumerate(self._layout.groups)
        )

    def pools_of_group(self, group: int) -> tuple[tuple[_C.Pool, ...], tuple[_C.Pool, ...]]:
        """The pools of the tensors of a group of layers, in ascending order: the GPU's and the host's."""
        tensors = self._layout.groups[group]
        return tuple(self._gpu[i] for i in tensors), tuple(self._cpu[i] for i in tensors)

    def forget_failures(self, slots: Any) -> None:
        """Before a member of a group moves blocks of these pools, which remember failed transfers of this map. slots:
        of the host, that the member reads or writes."""
        self._clear_failed_loads()
        self._clear_failures(self._cpu, np.asarray(slots, np.int64))

    def _expand(self, gpu_blocks: Any, chunks: Any, group_sizes: Any, block_indices: Any) -> list[_Blocks]:
        """The slots of each group. ValueError, IndexError: the lists do not fit."""
        layout = self._layout
        shape = Shape(len(layout.groups), layout.gpus[0].blocks, layout.cpus[0].chunks, layout.factor, self._slots)
        return expand_job(shape, gpu_blocks, chunks, group_sizes, block_indices)

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
        after_compute: bool = False,
        layer_events: bool = False,
        **options: Any,
    ) -> tuple[tuple[_C.Transfer, ...], int, Exception | None]:
        """As OffloadMap.submit(). Without the model's stream all jobs of a direction are in one lane."""
        groups = self._expand(gpu_blocks, chunks, group_sizes, block_indices)
        slots = np.concatenate([group.cpu for group in groups])
        if direction == 0 and np.unique(slots).size < slots.size:
            raise ValueError("a chunk is written twice")
        self._clear_failed_loads()
        options.update(stream=None if after_compute else stream, layer_events=layer_events)
        numbers = [g for g, group in enumerate(groups) if group.gpu.size and self._layout.groups[g]]
        made: list[_C.Transfer] = []
        for group in [g for g in numbers or [0] if g >= first]:
            try:
                made.append(self._move(groups[group], self._layout.groups[group] or (0,), direction, options))
            except _C.Error as error:
                if not made:
                    raise
                return tuple(made), group, error
        return tuple(made), len(groups), None

    def _move(self, blocks: _Blocks, tensors: Sequence[int], direction: int, options: dict[str, Any]) -> _C.Transfer:
        gpu, cpu = [self._gpu[i] for i in tensors], [self._cpu[i] for i in tensors]
        parts = self._parts(tensors) if options["layer_events"] else None
        if direction == 0:
            transfer = _C.move_blocks(gpu, cpu, blocks.gpu, blocks.cpu, parts=parts, **options)
        else:
            if not self._layout.remember_failures:
                self._clear_failures(cpu, blocks.cpu)  # another writer may have written there since
            transfer = _C.move_blocks(cpu, gpu, blocks.cpu, blocks.gpu, parts=parts, **options)
            with self._lock:
                self._loads.append((transfer, gpu, blocks.gpu))
        self._last[transfer.lane] = transfer
        return transfer

    def _parts(self, tensors: Sequence[int]) -> list[tuple[int, int, int, int, int, int]]:
        """Of move_blocks(): each is a layer of its own."""
        ranges = [(pair, part) for pair, i in enumerate(tensors) for part in sorted(self._layout.parts[i])]
        return [
            (pair, layer, begin, 1, min(end, self._layout.codings[tensors[pair]].block_nbytes) - begin, 0)
            for layer, (pair, (begin, end)) in enumerate(ranges)
        ]

    def _clear_failed_loads(self) -> None:
        """Blocks whose load failed are the model's again, which overwrites them: pools know of no write of its."""
        with self._lock:
            done = [load[0].done() for load in self._loads]
            ended = list(compress(self._loads, done))
            self._loads = [load for load, over in zip(self._loads, done, strict=True) if not over]
        for transfer, pools, ids in ended:
            if transfer.error is not None:
                self._clear_failures(pools, ids)

    def _clear_failures(self, pools: Sequence[_C.Pool], slots: _Ids) -> None:
        """Work that kvswap does not know has written these slots. It came after the transfers of them, which had
        ended, and before those that are submitted from now on; so the race checker is told."""
        for transfer in list(self._last.values()):
            _C.note_order(transfer, self._stream)
        for pool in pools:
            _C.note_access(self._stream, pool, slots, True)
        _C.note_order(self._stream, None)

    def not_stored(
        self, transfers: Sequence[_C.Transfer], group_sizes: Sequence[int], block_indices: Sequence[int]
    ) -> tuple[int, set[int]]:
        """As chunks_not_stored()."""
        moved = [bool(tensors) for tensors in self._layout.groups]
        return chunks_not_stored(transfers, moved, group_sizes, block_indices, self._layout.factor)
