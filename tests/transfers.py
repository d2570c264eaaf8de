"""Transfers of any shape and what must come of them, for the tests of the copy engine: a model in NumPy of two buffers,
and the calls that move blocks between the real ones."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from conftest import PATIENCE, Buffer, Bytes
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvswap

Ids = NDArray[Any]

D2H, H2D = 0, 1
TINY = 128 << 10  # the smallest slot that there may be
GUARD = 96
ENTRIES = 3000  # rows of blocks of one transfer, unless a test says otherwise
MIB = 1 << 20
SIZES = [1, 2, 3, 4, 7, 8, 12, 15, 16, 17, 24, 31, 32, 33, 64, 100, 255, 256, 511, 512, 513, 1000, 1024, 2049]
SIZES += [4095, 4096, 4097, 8192, 20000, 32767, 32768, 32769, 65536, 100001, 131072, 200 << 10]
COUNTS = (0, 1, 2, 7, 8, 31, 100, 479, 480, 481, 2000)
TENSORS = (1, 1, 2, 3, 5, 17, 64, 90)


# -- what is moved ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """Where each tensor's blocks lie in a buffer: block i at begins[t] + i * strides[t]."""

    begins: tuple[int, ...]
    strides: tuple[int, ...]
    blocks: int
    end: int


@dataclass(frozen=True)
class Work:
    """Blocks of some tensors, with their places in two buffers."""

    nbytes: tuple[int, ...]  # of a block of each tensor
    gpu: Side
    cpu: Side
    gpu_ids: Ids
    cpu_ids: Ids
    direction: int

    @property
    def count(self) -> int:
        return int(self.gpu_ids.size)


def lay_out(nbytes: tuple[int, ...], blocks: int, begin: int, gap: int, together: bool) -> Side:
    """`together`: a block's bytes of all tensors side by side; else tensor by tensor. `gap`: after each block."""
    begins, at = [], begin
    for size in nbytes:
        begins.append(at)
        at += size if together else blocks * (size + gap) + (gap and GUARD)
    if not together:
        return Side(tuple(begins), tuple(size + gap for size in nbytes), blocks, at + GUARD)
    stride = sum(nbytes) + gap
    return Side(tuple(begins), (stride,) * len(nbytes), blocks, begin + blocks * stride + GUARD)


def ids_of(rng: np.random.Generator, how: str, blocks: int, count: int) -> Ids:
    if how == "permuted":
        return rng.permutation(blocks)[:count]
    ids = np.arange(count) + (blocks - count)
    return ids[::-1].copy() if how == "down" else np.roll(ids, count // 3) if how == "runs" else ids


class Chooser:
    """One source of choices for both kinds of tests: a seeded generator, or hypothesis."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def of(self, options: Any) -> Any:
        return self.rng.choice(options)

    def upto(self, most: int) -> int:
        return self.rng.randint(0, most)


class Drawn(Chooser):
    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def of(self, options: Any) -> Any:
        return self.data.draw(st.sampled_from(options))

    def upto(self, most: int) -> int:
        return int(self.data.draw(st.integers(0, most)))


def draw(choose: Chooser, room: int, entries: int = ENTRIES, direction: int | None = None, begin: int = GUARD) -> Work:
    """A transfer that lies within the first `room` bytes of both buffers, and begins soon after `begin`."""
    count = choose.of([count for count in COUNTS if count <= entries])
    tensors = choose.of([n for n in TENSORS if n * count <= entries])
    blocks = count + 1 + choose.upto(5), count + 1 + choose.upto(5)
    most = (room - begin - 2 * GUARD) // (tensors * max(blocks)) - 40 - GUARD
    sizes = [size for size in SIZES if size <= max(most, 1)]
    nbytes = (
        tuple(choose.of(sizes) for _ in range(tensors)) if choose.of((True, False)) else (choose.of(sizes),) * tensors
    )
    rng = np.random.default_rng(choose.upto(1 << 20))
    hows, gaps = ("permuted", "permuted", "up", "down", "runs"), (0, 0, 0, 1, 16, 40)
    return Work(
        nbytes,
        lay_out(nbytes, blocks[0], begin + choose.upto(17), choose.of(gaps), choose.of((True, False, False))),
        lay_out(nbytes, blocks[1], begin + choose.upto(17), choose.of(gaps), choose.of((True, False))),
        ids_of(rng, choose.of(hows), blocks[0], count),
        ids_of(rng, choose.of(hows), blocks[1], count),
        choose.upto(1) if direction is None else direction,
    )


def plain(
    nbytes: int, tensors: int, count: int, direction: int, *, together: bool = True, seed: int = 0, begin: int = GUARD
) -> Work:
    """Equal tensors, permuted slots on both sides."""
    rng = np.random.default_rng(seed)
    sizes = (nbytes,) * tensors
    return Work(
        sizes,
        lay_out(sizes, count + 3, begin, 0, False),
        lay_out(sizes, count + 2, begin, 0, together),
        rng.permutation(count + 3)[:count],
        rng.permutation(count + 2)[:count],
        direction,
    )


def four_bursts(direction: int) -> Work:
    """In tiny slots, of which there are fewer; each of several copies."""
    return plain(4 << 10, 1, 110, direction)


def halves(direction: int, nbytes: int, count: int, number: int = 2, room: int = 4 * MIB) -> list[Work]:
    """Transfers in parts of the buffers that have nothing to do with each other."""
    works = [plain(nbytes, 2, count, direction, seed=i, begin=GUARD + i * room // number) for i in range(number)]
    assert max(works[0].gpu.end, works[0].cpu.end) <= room // number
    return works


@contextmanager
def tiny_slots(device: kvswap.Device, count: int = 2) -> Iterator[None]:
    """Slots so small that small transfers are many bursts; afterwards those with which a device is opened."""
    before = device.info["slots_nbytes"] // 8  # a direction has three slots, and two of half as much
    device.set_slots(TINY, count, timeout=PATIENCE)
    try:
        yield
    finally:
        device.set_slots(before, 3, timeout=PATIENCE)


def view(buffer: Bytes, side: Side, tensor: int, nbytes: int) -> Bytes:
    """As [block, byte]."""
    begin, stride = side.begins[tensor], side.strides[tensor]
    return np.lib.stride_tricks.as_strided(buffer[begin:], (side.blocks, nbytes), (stride, 1))


def pointers(buffer: Buffer, side: Side, ids: Ids) -> Ids:
    """Of every block of every tensor, tensor by tensor."""
    return np.concatenate([buffer.ptr + b + ids * s for b, s in zip(side.begins, side.strides, strict=True)])


def carry_out(work: Work, gpu: Bytes, cpu: Bytes, kept: Ids | None = None) -> None:
    """The transfer, or only these of its blocks, on arrays."""
    gpu_ids, cpu_ids = (work.gpu_ids, work.cpu_ids) if kept is None else (work.gpu_ids[kept], work.cpu_ids[kept])
    for tensor, nbytes in enumerate(work.nbytes):
        here, there = view(gpu, work.gpu, tensor, nbytes), view(cpu, work.cpu, tensor, nbytes)
        if work.direction == H2D:
            here[gpu_ids] = there[cpu_ids]
        else:
            there[cpu_ids] = here[gpu_ids]


# -- the calls --------------------------------------------------------------------------------------------------------


@lru_cache(2)  # random bytes take longer than most transfers
def noise(nbytes: int) -> Bytes:
    return np.frombuffer(np.random.default_rng(7).bytes(nbytes), np.uint8)


class Sides:
    """Two buffers and what they should hold. Their first `end` bytes are random before each transfer.

    The submitting call's arrays are overwritten as soon as it has returned."""

    PAGE = 4096

    def __init__(self, device: kvswap.Device, room: int, registered: bool = False) -> None:
        self.device, self.room = device, room
        self.gpu, self.cpu = Buffer(device, room, "gpu"), Buffer(device, room, "plain" if registered else "cpu")
        self.begin = 0
        self.registered: list[int] = []
        if registered:
            self._register()
        self.noise = noise(2 * room + 8192)
        self.turns = 0

    def _register(self) -> None:
        """The host's side, as memory of the caller's: a seam every few pages, from `begin` to `room`."""
        at, last = -(-self.cpu.ptr // self.PAGE), (self.cpu.ptr + self.room) // self.PAGE
        self.begin, self.room = at * self.PAGE - self.cpu.ptr, last * self.PAGE - self.cpu.ptr
        while at < last:
            pages = min(1 + len(self.registered) % 5 * 16, last - at)
            self.device.register(at * self.PAGE, pages * self.PAGE)
            self.registered.append(at * self.PAGE)
            at += pages

    def close(self) -> None:
        for base in self.registered:
            self.device.unregister(base)

    def prepare(self, end: int) -> None:
        """Other bytes than before on both sides."""
        assert end <= self.room
        self.end, self.turns = end, self.turns + 1
        at = self.turns * 1009 % 4096
        self.gpu_model = self.noise[at : at + end].copy()
        self.cpu_model = self.noise[self.room + at + 1 : self.room + at + 1 + end].copy()
        self.gpu.put(self.gpu_model)
        self.cpu.put(self.cpu_model)

    def check(self, what: object = "") -> None:
        """Every byte of both sides, whether it should have moved or not. What it was is printed only where some are
        wrong: to print arrays takes longer than most transfers."""
        for name, buffer, model in (("gpu", self.gpu, self.gpu_model), ("cpu", self.cpu, self.cpu_model)):
            if not buffer.holds(model):
                there = buffer.get(self.end)
                wrong = np.flatnonzero(there != model)
                raise AssertionError(f"{name}: {wrong.size} bytes are wrong, from {wrong[0]} to {wrong[-1]}; {what}")

    def forget(self, work: Work, blocks: Ids) -> None:
        """These blocks are lost and may hold any bytes: take them over into the model."""
        load = work.direction == H2D
        buffer, model = (self.gpu, self.gpu_model) if load else (self.cpu, self.cpu_model)
        side, ids = (work.gpu, work.gpu_ids[blocks]) if load else (work.cpu, work.cpu_ids[blocks])
        there = buffer.get(self.end)
        for tensor, nbytes in enumerate(work.nbytes):
            view(model, side, tensor, nbytes)[ids] = view(there, side, tensor, nbytes)[ids]

    def swap(self, work: Work, **options: Any) -> kvswap.Transfer:
        gpu_ptrs = np.array(work.gpu.begins, np.int64) + self.gpu.ptr
        cpu_ptrs = np.array(work.cpu.begins, np.uint64) + np.uint64(self.cpu.ptr)
        gpu_ids, cpu_ids = work.gpu_ids.astype(np.int64), work.cpu_ids.astype(np.int32)
        nbytes, strides = np.array(work.nbytes, np.int64), (np.array(work.gpu.strides), np.array(work.cpu.strides))
        arrays = (gpu_ptrs, cpu_ptrs, nbytes, work.gpu.blocks, work.cpu.blocks, gpu_ids, cpu_ids)
        transfer = kvswap.swap_cache_all_layers_async(
            *arrays, work.direction, gpu_stride=strides[0], cpu_stride=strides[1], device=self.device, **options
        )
        for array in (gpu_ptrs, cpu_ptrs, nbytes, gpu_ids, cpu_ids, *strides):
            array.fill(1 << 30)
        return transfer

    def batch(self, work: Work, **options: Any) -> kvswap.Transfer:
        """The same by pointers, in an order of their own."""
        gpu = [self.gpu.ptr + b + work.gpu_ids * s for b, s in zip(work.gpu.begins, work.gpu.strides, strict=True)]
        cpu = [self.cpu.ptr + b + work.cpu_ids * s for b, s in zip(work.cpu.begins, work.cpu.strides, strict=True)]
        order = np.arange(work.count * len(work.nbytes))
        if self.turns % 2:
            np.random.default_rng(self.turns).shuffle(order)
        here, there = np.concatenate(gpu)[order].astype(np.int64), np.concatenate(cpu)[order].astype(np.int64)
        sizes = np.repeat(np.array(work.nbytes, np.int64), work.count)[order]
        ends = (there, here) if work.direction == H2D else (here, there)
        transfer = kvswap.swap_blocks_batch(*ends, sizes, device=self.device, **options)
        for array in (here, there, sizes):
            array.fill(1 << 30)
        return transfer

    def move(self, work: Work, **options: Any) -> kvswap.Transfer:
        """The same between pools."""
        sides = [
            [
                kvswap.Pool(self.device, buffer.ptr + begin, side.blocks, nbytes, stride=stride)
                for begin, stride, nbytes in zip(side.begins, side.strides, work.nbytes, strict=True)
            ]
            for buffer, side in ((self.gpu, work.gpu), (self.cpu, work.cpu))
        ]
        ids = [work.gpu_ids.astype(np.int64), work.cpu_ids.astype(np.int64)]
        if work.direction == H2D:
            sides.reverse(), ids.reverse()
        transfer = kvswap.move_blocks(*sides, *ids, **options)
        for array in ids:
            array.fill(1 << 30)
        return transfer

    def run(self, work: Work, call: str = "swap", **options: Any) -> kvswap.Transfer:
        """One transfer from its beginning to its end, on new bytes."""
        self.prepare(max(work.gpu.end, work.cpu.end))
        transfer = CALLS[call](self, work, **options)
        transfer.wait(PATIENCE)
        carry_out(work, self.gpu_model, self.cpu_model)
        self.check((call, options, work))
        return transfer


CALLS: dict[str, Callable[..., kvswap.Transfer]] = {"swap": Sides.swap, "batch": Sides.batch, "move": Sides.move}


def finish(sides: Sides, transfers: list[kvswap.Transfer], works: list[Work], what: object = "") -> None:
    """All of them are done, in the order in which they were submitted, and nothing else has changed."""
    for transfer, work in zip(transfers, works, strict=True):
        transfer.wait(PATIENCE)
        carry_out(work, sides.gpu_model, sides.cpu_model)
    sides.check(what)
