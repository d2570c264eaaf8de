"""What is moved: shapes of blocks, and a shape laid out in memory, with other bytes in every block and repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvswap import _C, Direction
from kvswap.replay.check import WrongBytes
from kvswap.replay.units import format_size

SPREAD = 2  # slots a block moved
WAIT_LIMIT = 60.0  # seconds, of every single wait

Words = NDArray[np.uint64]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """Blocks of several tensors, under the same ids in each.

    slab: the tensors lie at equal distances in one GPU allocation, else each in its own. block_first: all tensors of a
    block are neighbours on the host, else all blocks of a tensor. gpu_run, host_run: ids come in runs of so many
    neighbours, the runs in random order; 1: every block is scattered, 0: all blocks are one run.
    """

    tensors: int
    block_nbytes: int
    blocks: int = 1
    slab: bool = False
    block_first: bool = True
    gpu_run: int = 1
    host_run: int = 1

    @property
    def copies(self) -> int:
        return self.tensors * self.blocks

    @property
    def nbytes(self) -> int:
        return self.copies * self.block_nbytes

    def slots(self, run: int) -> int:
        """Slots of one side: SPREAD times as many as blocks, in whole runs."""
        run = run or self.blocks
        return SPREAD * -(-self.blocks // run) * run

    def side_nbytes(self, run: int) -> int:
        return self.slots(run) * self.tensors * self.block_nbytes

    def filling(self, nbytes: int) -> Shape:
        """The shape with as many blocks as make up nbytes."""
        return replace(self, blocks=max(1, nbytes // (self.tensors * self.block_nbytes)))

    def __str__(self) -> str:
        tensors = f"{self.tensors} x " if self.tensors > 1 else ""
        return f"{tensors}{format_size(self.block_nbytes)} x {self.blocks:,}"


@dataclass(frozen=True)
class Family:
    """Shapes that differ only in the size of their blocks, or a layout of one size."""

    key: str
    description: str
    shape: Shape  # of any size
    peers: tuple[str, ...] = ()  # methods that are measured on it besides kvswap's paths
    both: bool = False  # one transfer each way at once
    size: int | None = None  # bytes a block, where there is one size alone
    most_blocks: int | None = None

    def of(self, block_nbytes: int, nbytes: int) -> tuple[Shape, ...]:
        """The shapes of one case, one a transfer."""
        shape = replace(self.shape, block_nbytes=block_nbytes).filling(nbytes // 2 if self.both else nbytes)
        if self.most_blocks is not None:
            shape = replace(shape, blocks=min(shape.blocks, self.most_blocks))
        return (shape,) * (2 if self.both else 1)

    def sizes(self, wanted: Sequence[int] | None, default: Sequence[int]) -> tuple[int, ...]:
        """The sizes to measure; none if the family has one size and only others are wanted."""
        if self.size is None:
            return tuple(wanted or default)
        return (self.size,) if not wanted or self.size in wanted else ()


_TENSORS = 80  # of a 70B model: keys and values of a layer in one
_PEERS = ("loop", "batch", "numpy", "warp", "triton", "torch")

FAMILIES = {
    family.key: family
    for family in (
        Family(
            "run",
            f"{_TENSORS} tensors, blocks scattered on the GPU, one long run on the host, block-first",
            Shape(_TENSORS, 1, host_run=0),
            _PEERS,
        ),
        Family(
            "scattered",
            f"{_TENSORS} tensors, blocks scattered on both sides, host block-first",
            Shape(_TENSORS, 1),
        ),
        Family(
            "slab",
            f"{_TENSORS} tensors at equal pitch in one allocation, blocks scattered on both sides, host block-first",
            Shape(_TENSORS, 1, slab=True),
        ),
        Family(
            "slab-layers",
            "as `slab`, with a layer-first host",
            Shape(_TENSORS, 1, slab=True, block_first=False),
        ),
        Family("tensor", "one tensor, blocks scattered on both sides", Shape(1, 1), ("batch", "pointers")),
        Family(
            "rows",
            "one tensor of rows of 656 bytes, as a token of an fp8 MLA cache, scattered on both sides",
            Shape(1, 1),
            ("batch",),
            size=656,
            most_blocks=100_000,
        ),
        Family(
            "both",
            "as `run`, in both directions at once, half of the bytes each",
            Shape(_TENSORS, 1, host_run=0),
            both=True,
        ),
    )
}


def _layout(key: str, description: str, shape: Shape) -> Family:
    return Family(key, description, shape, size=shape.block_nbytes)


# Caches of models, each of one size. Scattered: slots in any order, as a free list leaves them.
LAYOUTS = {
    family.key: family
    for family in (
        _layout("64x32k", "64 tensors x 32 KiB, scattered, host block-first", Shape(64, 32 << 10)),
        _layout("80x8k", "80 tensors x 8 KiB, scattered, host block-first", Shape(80, 8 << 10)),
        _layout("61x36k", "61 tensors x 36 KiB, scattered, host block-first", Shape(61, 36 << 10)),
        _layout("64x32k-layers", "as 64x32k, host layer-first", Shape(64, 32 << 10, block_first=False)),
        _layout(
            "80x16k-slab-layers",
            "80 tensors x 16 KiB in one allocation, scattered, host layer-first",
            Shape(80, 16 << 10, slab=True, block_first=False),
        ),
        _layout("1x64k", "1 tensor x 64 KiB, scattered", Shape(1, 64 << 10)),
    )
}


class Place:
    """A shape in memory: GPU memory of its own, and host memory from host_ptr on."""

    def __init__(self, device: _C.Device, shape: Shape, host_ptr: int, rng: np.random.Generator) -> None:
        self.device, self.shape, self.host_ptr = device, shape, host_ptr
        self._keys = rng.integers(1, 1 << 62, shape.copies).astype(np.uint64)
        self._sizes = np.full(shape.copies, shape.block_nbytes, np.uint64)
        self._round = 0
        size = shape.block_nbytes
        self.gpu_slots, self.host_slots = shape.slots(shape.gpu_run), shape.slots(shape.host_run)
        self.gpu_ids = _ids(rng, shape.blocks, shape.gpu_run or shape.blocks)
        self.host_ids = _ids(rng, shape.blocks, shape.host_run or shape.blocks)
        layers = np.arange(shape.tensors, dtype=np.uint64)
        tensor = self.gpu_slots * size
        self._memory = [device.alloc(tensor * (shape.tensors if shape.slab else 1))]
        if shape.slab:
            self.gpu_ptrs = np.uint64(self._memory[0].ptr) + layers * np.uint64(tensor)
        else:
            self._memory += [device.alloc(tensor) for _ in range(1, shape.tensors)]
            self.gpu_ptrs = np.array([memory.ptr for memory in self._memory], np.uint64)
        self.host_stride = size * shape.tensors if shape.block_first else size
        self.host_ptrs = np.uint64(host_ptr) + layers * np.uint64(size if shape.block_first else self.host_slots * size)
        self._gpu, self._host = self.addresses()

    def close(self) -> None:
        for memory in self._memory:
            memory.free()

    def addresses(self) -> tuple[Words, Words]:
        """Addresses of every block of every tensor, on the GPU and on the host."""
        return (
            _addresses(self.gpu_ptrs, self.gpu_ids, self.shape.block_nbytes),
            _addresses(self.host_ptrs, self.host_ids, self.host_stride),
        )

    def ends(self, direction: Direction) -> tuple[Words, Words]:
        """Source and destination of every copy."""
        return (self._gpu, self._host) if direction == Direction.D2H else (self._host, self._gpu)

    @property
    def sizes(self) -> Words:
        """Bytes of every copy."""
        return self._sizes

    @property
    def host_is_one_run(self) -> bool:
        return self.shape.block_first and bool((np.diff(self.host_ids) == 1).all())

    def fill(self, direction: Direction, stream: _C.Stream) -> None:
        """Write new bytes to the source, so that bytes of an earlier copy are wrong."""
        self._round += 1
        self._pattern(False, self.ends(direction)[0], stream)

    def check(self, direction: Direction, stream: _C.Stream, what: str) -> None:
        """Check every byte of every destination; raises WrongBytes."""
        wrong, item, offset = self._pattern(True, self.ends(direction)[1], stream)
        if wrong:
            tensor, block = divmod(item or 0, self.shape.blocks)
            message = (
                f"WRONG BYTES: {what}: block {block} of the list, tensor {tensor}, offset {offset}; {wrong} in all"
            )
            raise WrongBytes(message, wrong_bytes=wrong, block=block, layer=tensor, offset=offset or 0)

    def _pattern(self, check: bool, ptrs: Words, stream: _C.Stream) -> tuple[int, int | None, int | None]:
        """Waits for the end of the job, so that the device is idle when a measurement begins."""
        keys = self._keys + np.uint64(self._round)
        return _C._pattern(self.device, check, ptrs, self._sizes, keys, stream).result(WAIT_LIMIT)


def _ids(rng: np.random.Generator, blocks: int, run: int) -> Ids:
    runs = -(-blocks // run)
    starts = rng.permutation(runs * SPREAD)[:runs] * run
    ids: Ids = (starts[:, None] + np.arange(run)).reshape(-1)[:blocks].astype(np.int64)
    return ids


def _addresses(bases: Words, ids: Ids, stride: int) -> Words:
    addresses: Words = (bases[:, None] + ids.astype(np.uint64) * np.uint64(stride)).reshape(-1)
    return addresses


def host_nbytes(shapes: Sequence[Shape]) -> int:
    """Bytes of host memory for shapes that are laid out at once."""
    return sum(shape.side_nbytes(shape.host_run) for shape in shapes)


def gpu_nbytes(shapes: Sequence[Shape]) -> int:
    return sum(shape.side_nbytes(shape.gpu_run) for shape in shapes)
