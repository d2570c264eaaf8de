"""Another thread writes to the arrays of a call while it runs: each array is read once, so that what was checked is
what is used. A wrong transfer is allowed, a wrong address is not: bytes that no valid argument names are neither read
nor written, and a call that was accepted ends well."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Buffer
from numpy.typing import NDArray

import kvswap
from kvswap import _C, Direction, testing

Array = NDArray[Any]

BLOCKS, NBYTES, GAP = 700, 32, 32  # NumPy lets go of the GIL from 500 elements on; behind each block lie bytes of none
STRIDE = NBYTES + GAP
SECRET = 255  # in all bytes of the source that no valid argument names
SECONDS = 0.3


@pytest.fixture(autouse=True)
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@dataclass
class Tensor:
    """What an engine hands over: it knows how many bytes it has."""

    ptr: int
    nbytes: int

    def data_ptr(self) -> int:
        return self.ptr


@dataclass
class Sides:
    """Blocks with gaps on both sides; those of the source are filled with 1 to 200, the gaps with SECRET."""

    device: kvswap.Device
    gpu: Buffer
    cpu: Buffer
    before: Array

    def put(self) -> None:
        self.cpu.put(np.zeros(self.cpu.nbytes, np.uint8))

    def check(self) -> None:
        after = self.cpu.get().reshape(-1, STRIDE)
        assert not after[:, NBYTES:].any(), "written outside of every block"
        assert not after[BLOCKS:].any(), "written behind the last block"
        assert not (after == SECRET).any(), "read outside of every block"


@pytest.fixture
def sides(device: kvswap.Device) -> Sides:
    extent = 2 * BLOCKS * STRIDE  # as much again lies behind, mapped, and is none of the call's
    gpu, cpu = Buffer(device, extent), Buffer(device, extent, "cpu")
    data = np.full((2 * BLOCKS, STRIDE), SECRET, np.uint8)
    data[:BLOCKS, :NBYTES] = np.random.default_rng(1).integers(1, 200, (BLOCKS, NBYTES))
    gpu.put(data.reshape(-1))
    return Sides(device, gpu, cpu, data)


class Flips:
    """A thread that turns an array of a call into a bad one and back, again and again: all of it, or one entry."""

    def __init__(self) -> None:
        self.arrays: list[tuple[Array, Array, Array]] = []
        self.stop = threading.Event()
        self.flips = 0

    def array(self, good: Any, bad: Any, dtype: Any = np.int64) -> Array:
        good = np.asarray(good, dtype)
        array = good.copy()
        self.arrays.append((array, good, np.broadcast_to(np.asarray(bad, dtype), good.shape).copy()))
        return array

    def run(self) -> None:
        rng = np.random.default_rng(2)
        while not self.stop.is_set():
            array, good, bad = self.arrays[int(rng.integers(len(self.arrays)))]
            at = slice(None) if rng.integers(2) else int(rng.integers(array.size))
            array[at] = bad[at]
            if rng.integers(2):
                time.sleep(0)  # the call goes on, with what it has read or not
            array[at] = good[at]
            self.flips += 1
            if rng.integers(4) == 0:
                time.sleep(float(rng.random()) * 2e-4)


def race(sides: Sides, flips: Flips, call: Callable[[], Any]) -> None:
    """Call until the time is over; `call` returns transfers to wait for."""
    accepted = refused = 0
    thread = threading.Thread(target=flips.run)
    thread.start()
    try:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end or not accepted:
            assert time.monotonic() < end + PATIENCE, "no call was accepted"
            try:
                transfers = call()
            except (ValueError, IndexError):
                refused += 1
                continue
            for transfer in transfers:
                transfer.wait(PATIENCE)  # what was accepted must not meet an address that the device refuses
            accepted += 1
            if accepted % 8 == 0:
                sides.check()
        sides.check()
    finally:
        flips.stop.set()
        thread.join()
    assert flips.flips


def permuted(seed: int) -> Array:
    return np.random.default_rng(seed).permutation(BLOCKS)


@pytest.mark.parametrize("path", ["direct", "dma", "kernel"])
def test_sizes_of_tensors(sides: Sides, path: str) -> None:
    flips = Flips()
    starts = np.arange(BLOCKS) * STRIDE
    sizes = flips.array(np.full(BLOCKS, NBYTES), STRIDE)
    src = [Tensor(sides.gpu.ptr + int(at), NBYTES) for at in starts]
    dst = [Tensor(sides.cpu.ptr + int(at), NBYTES) for at in starts]
    options = {} if path == "direct" and sides.device.kind != "host" else {"path": path}
    race(sides, flips, lambda: [kvswap.swap_blocks_batch(src, dst, sizes, device=sides.device, **options)])


@pytest.mark.parametrize("path", ["dma", "kernel"])
def test_lists_of_pointers(device: kvswap.Device, path: str) -> None:
    """Of plain addresses an allocation's end is what is known."""
    sides = Sides(device, Buffer(device, BLOCKS * STRIDE), Buffer(device, BLOCKS * STRIDE, "cpu"), np.zeros(0))
    flips = Flips()
    starts = permuted(1) * STRIDE
    src = flips.array(sides.gpu.ptr + starts, 0)
    dst = flips.array(sides.cpu.ptr + starts, sides.cpu.ptr + BLOCKS * STRIDE - NBYTES // 2)
    sizes = flips.array(np.full(BLOCKS, NBYTES), 1 << 40)
    race(sides, flips, lambda: [kvswap.swap_blocks_batch(src, dst, sizes, device=device, path=path)])


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
@pytest.mark.parametrize("path", ["dma", "strided", "kernel"])
def test_ids_of_a_cache(sides: Sides, path: str, dtype: Any) -> None:
    flips = Flips()
    gpu_ids = flips.array(permuted(1), BLOCKS, dtype)
    cpu_ids = flips.array(permuted(2), BLOCKS + 3, dtype)
    race(
        sides,
        flips,
        lambda: [
            kvswap.swap_cache_per_layer_async(
                *(sides.gpu.ptr, sides.cpu.ptr, NBYTES, BLOCKS, BLOCKS, gpu_ids, cpu_ids, Direction.D2H),
                gpu_stride=STRIDE,
                cpu_stride=STRIDE,
                device=sides.device,
                path=path,
            )
        ],
    )


@pytest.mark.parametrize("known", ["tensors", "addresses"])
def test_arrays_of_many_tensors(sides: Sides, known: str) -> None:
    """Each block is a tensor of one block, so that every array is long."""
    flips = Flips()
    starts = np.arange(BLOCKS) * STRIDE
    if known == "tensors":
        gpu: Any = [Tensor(sides.gpu.ptr + int(at), NBYTES) for at in starts]
        cpu: Any = [Tensor(sides.cpu.ptr + int(at), NBYTES) for at in starts]
        nbytes = flips.array(np.full(BLOCKS, NBYTES), STRIDE)
        counts = [flips.array(np.ones(BLOCKS), 2) for _ in range(2)]
        strides = [flips.array(np.full(BLOCKS, STRIDE), 1) for _ in range(2)]
    else:
        gpu, cpu = flips.array(sides.gpu.ptr + starts, 0), flips.array(sides.cpu.ptr + starts, 0)
        nbytes = flips.array(np.full(BLOCKS, NBYTES), 1 << 50)
        counts = [flips.array(np.ones(BLOCKS), 1 << 50) for _ in range(2)]
        strides = [flips.array(np.full(BLOCKS, STRIDE), 1 << 60) for _ in range(2)]
    ids = [flips.array([0], 1) for _ in range(2)]
    race(
        sides,
        flips,
        lambda: [
            kvswap.swap_cache_all_layers_async(
                *(gpu, cpu, nbytes, *counts, *ids, Direction.D2H),
                gpu_stride=strides[0],
                cpu_stride=strides[1],
                device=sides.device,
                path="dma",
            )
        ],
    )


@pytest.mark.parametrize("what", ["ids", "parts"])
def test_moves_between_pools(sides: Sides, what: str) -> None:
    flips = Flips()
    src, dst = (
        kvswap.Pool(sides.device, side.ptr, BLOCKS, NBYTES, stride=STRIDE, name=name)
        for side, name in ((sides.gpu, "src"), (sides.cpu, "dst"))
    )
    ids = [flips.array(permuted(seed), BLOCKS + seed) for seed in (1, 2)]
    options: dict[str, Any] = {}
    if what == "parts":  # a byte each, so that the array is long enough
        parts = np.tile(np.array([0, 0, 0, 1, 1, 1]), (NBYTES, 1))
        parts[:, 2] = np.arange(NBYTES)
        bad = parts.copy()
        bad[::2, 4], bad[1::2, 2:4] = STRIDE, 1 << 40
        flips = Flips()
        options["parts"] = flips.array(parts.reshape(-1), bad.reshape(-1)).reshape(parts.shape)
    race(sides, flips, lambda: [kvswap.move_blocks(src, dst, *ids, **options)])


def test_jobs_of_offloading(sides: Sides) -> None:
    flips = Flips()
    tensors = [[sides.gpu.ptr, BLOCKS, STRIDE, NBYTES, sides.cpu.ptr, STRIDE, NBYTES, NBYTES]]
    job = _C.OffloadMap(
        *(sides.device, np.array(tensors, np.uint64).reshape(-1)),
        *(np.array([[0, 0, 0, 0, NBYTES, 1, 0, 0, 1, 0]], np.uint64).reshape(-1), 1, BLOCKS, 1),
    )
    gpu_blocks, chunks = flips.array(permuted(1), BLOCKS), flips.array(permuted(2), BLOCKS + 1)
    sizes, indices = flips.array([BLOCKS], 1 << 40), flips.array([0], -1)

    def submit() -> Any:
        transfers, _, error = job.submit(gpu_blocks, chunks, sizes, indices, 0)
        if error is not None:
            raise error
        return transfers

    race(sides, flips, submit)


def test_tables_of_offloading(sides: Sides) -> None:
    """Opening a map: what its tables name is checked as it was read."""
    flips = Flips()
    ids = permuted(1)
    at = np.arange(BLOCKS) * STRIDE
    rows = np.zeros((BLOCKS, 8), np.int64)
    rows[:, :4] = np.stack([sides.gpu.ptr + at, np.ones(BLOCKS), np.full(BLOCKS, STRIDE), np.full(BLOCKS, NBYTES)], 1)
    rows[:, 4:7] = np.stack([sides.cpu.ptr + at, np.full(BLOCKS, STRIDE), np.full(BLOCKS, NBYTES)], 1)
    rows[:, 7] = NBYTES
    bad = rows.copy()
    bad[:, 1] = 1 << 40
    parts = np.zeros((BLOCKS, 10), np.int64)
    parts[:, 1], parts[:, 4:6], parts[:, 8] = ids, (NBYTES, 1), 1
    wrong = parts.copy()
    wrong[:, 1], wrong[:, 4] = BLOCKS, STRIDE
    tables = [flips.array(good.reshape(-1), other.reshape(-1)) for good, other in ((rows, bad), (parts, wrong))]

    def submit() -> Any:
        job = _C.OffloadMap(sides.device, *tables, 1, 1, 1)
        transfers, _, error = job.submit([0], [0], [1], [0], 0)
        if error is not None:
            raise error
        return transfers

    race(sides, flips, submit)


def test_slots_that_are_told_of(sides: Sides) -> None:
    flips = Flips()
    pool = kvswap.Pool(sides.device, sides.cpu.ptr, BLOCKS, NBYTES, stride=STRIDE)
    slots = flips.array(permuted(1), 1 << 40)

    def note() -> list[Any]:
        testing.note_access(0, pool, slots, write=True)
        return []

    race(sides, flips, note)
