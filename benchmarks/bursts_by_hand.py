"""Bursts by hand and by kvswap beside a decode step: what the copies reach, and what the step takes.

By hand: three slots of 64 MiB; a kernel on one stream gathers scattered blocks of 32 KiB into a slot, and the copy
engine moves the slot on another stream, joined by events; back the other way round. The rows differ in the kernel (of
path `kernel`, with 72 registers a thread, or of bursts, with 32; also with shared memory, so that fewer of its CTAs fit
on an SM), in the priority of its stream (0 is the model's), and in whether streams and slots were made before the
model. kvswap moves as many bytes, 64 tensors x 32 KiB, block-first. Every byte of the last 256 MiB is checked. Needs a
GPU and torch; on a host device it shows that it runs.
"""

from __future__ import annotations

import argparse
import statistics
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

import kvswap
from kvswap import _C, Direction
from kvswap.bench import beside
from kvswap.bench.loads import Load, load_for
from kvswap.bench.measure import opened
from kvswap.bench.methods import METHODS, Pieces
from kvswap.bench.shapes import WAIT_LIMIT, Shape, Words
from kvswap.replay.check import WrongBytes

SLOTS, QUARTERS, BLOCKS = 3, 4, 2048  # blocks of a slot
COPIES_PRIORITY = -2  # of the stream of copies, as kvswap's loads
AHEAD = 6  # slots that are queued


@dataclass(frozen=True)
class Row:
    """kernel None: copies alone. shared: bytes of shared memory that a CTA holds. early: streams and slots were made
    before the model."""

    name: str
    kernel: str | None = "launch_pack"
    priority: int = -1
    shared: int = 0
    early: bool = False
    ctas: int = 264


ROWS = (
    Row("copies alone", None),
    Row("kernel of path kernel, priority 0", "launch_copy", 0),
    Row("kernel of path kernel", "launch_copy"),
    Row("kernel of path kernel, before the model", "launch_copy", early=True),
    Row("kernel of bursts, priority 0", priority=0),
    Row("kernel of bursts"),
    Row("kernel of bursts, priority -5", priority=-5),
    Row("kernel of bursts, 48 KiB a CTA", shared=48 << 10),
    Row("kernel of bursts, 132 CTAs", ctas=132),
    Row("kernel of bursts, before the model", early=True),
    Row("copies alone, before the model", None, early=True),
)


class Stock:
    """Streams of each priority, and slots."""

    def __init__(self, device: _C.Device, block: int) -> None:
        self.device, self.slots = device, device.alloc(SLOTS * BLOCKS * block)
        self._made: dict[tuple[str, int], int] = {}
        for row in ROWS:
            self.stream("kernel", row.priority)
        self.stream("copies", COPIES_PRIORITY)

    def stream(self, what: str, priority: int) -> int:
        """Its handle."""
        if (what, priority) not in self._made:
            self._made[what, priority] = _C._seam(self.device, "stream_create", priority & (1 << 64) - 1)
        return self._made[what, priority]


class Hand:
    """Blocks on the GPU in random order, and on the host one after the other."""

    def __init__(self, device: _C.Device, block: int, mark: _C.Stream) -> None:
        self.device, self.block, self._mark = device, block, mark
        count = QUARTERS * BLOCKS
        self._gpu, self._host = device.alloc(2 * count * block), device.alloc(count * block, host=True)
        order = np.random.default_rng(1).permutation(2 * count)[:count].astype(np.uint64)
        self._scattered = np.uint64(self._gpu.ptr) + order * np.uint64(block)
        self._in_line = np.uint64(self._host.ptr) + np.arange(count, dtype=np.uint64) * np.uint64(block)
        self._sizes = np.full(count, block, np.uint64)
        self._keys = np.arange(1, count + 1, dtype=np.uint64) << np.uint64(20)
        self._tables: dict[tuple[int, Direction], list[Pieces]] = {}

    def _pattern(self, check: bool, ptrs: Words) -> int:
        return int(_C._pattern(self.device, check, ptrs, self._sizes, self._keys, self._mark).result(WAIT_LIMIT)[0])

    def _pieces(self, slots: int, way: Direction, stream: int) -> list[Pieces]:
        """By slot and quarter."""
        if (slots, way) not in self._tables:
            made = []
            for number in range(SLOTS * QUARTERS):
                slot, quarter = divmod(number, QUARTERS)
                at = np.uint64(slots + slot * BLOCKS * self.block)
                packed = at + np.arange(BLOCKS, dtype=np.uint64) * np.uint64(self.block)
                blocks = self._scattered[quarter * BLOCKS : (quarter + 1) * BLOCKS]
                src, dst = (blocks, packed) if way == Direction.D2H else (packed, blocks)
                made.append(Pieces(self.device, src, dst, np.full(BLOCKS, self.block, np.uint64)))
                made[-1].upload(stream)
            self.device.synchronize(WAIT_LIMIT)
            self._tables[slots, way] = made
        return self._tables[slots, way]

    def run(self, row: Row, stock: Stock, way: Direction, running: Callable[[], bool]) -> list[float]:
        """GB/s of each slot. WrongBytes: one of the last 256 MiB is not what it should be."""
        device, size = self.device, BLOCKS * self.block
        kernel, copies = stock.stream("kernel", row.priority), stock.stream("copies", COPIES_PRIORITY)
        tables = self._pieces(stock.slots.ptr, way, kernel)
        packed, free = ([_C.Event(device, timing=False) for _ in range(SLOTS)] for _ in range(2))
        ends: list[_C.Event] = []
        self._keys += np.uint64(1)
        self._pattern(False, self._scattered if way == Direction.D2H else self._in_line)

        def launch(slot: int, quarter: int) -> None:
            table = tables[slot * QUARTERS + quarter]
            more = [row.shared] if row.kernel == "launch_pack" else []
            if row.kernel is not None:
                _C._seam(device, row.kernel, BLOCKS, table.ptr, row.ctas, 512, kernel, *more)

        def copy(slot: int, quarter: int) -> None:
            ends_of = (stock.slots.ptr + slot * size, self._host.ptr + quarter * size)
            src, dst = ends_of if way == Direction.D2H else ends_of[::-1]
            _C._seam(device, "copy", dst, src, size, copies)
            ends.append(_C.Event(device))
            ends[-1].record(copies)

        number = 0
        while running() or number % QUARTERS or number < 3 * AHEAD:
            slot, quarter = number % SLOTS, number % QUARTERS
            stages = [(kernel, launch), (copies, copy)]
            (first, begin), (second, finish) = stages if way == Direction.D2H else stages[::-1]
            free[slot].wait(first)
            begin(slot, quarter)
            packed[slot].record(first)
            packed[slot].wait(second)
            finish(slot, quarter)
            free[slot].record(second)
            number += 1
            if number >= AHEAD:
                ends[number - AHEAD].synchronize(WAIT_LIMIT)
        device.synchronize(WAIT_LIMIT)
        if row.kernel is None:  # the slots hold anything
            return self._rates(ends, size)
        if wrong := self._pattern(True, self._in_line if way == Direction.D2H else self._scattered):
            raise WrongBytes(
                f"WRONG BYTES: {row.name}, {way.name}: {wrong}", wrong_bytes=wrong, block=0, layer=0, offset=0
            )
        return self._rates(ends, size)

    @staticmethod
    def _rates(ends: list[_C.Event], size: int) -> list[float]:
        return [size / a.elapsed_time(b) / 1e9 for a, b in pairwise(ends[AHEAD:-AHEAD])]


def told(gbps: float, step_seconds: float) -> str:
    """Of a row: what the copies reach, and what a step takes."""
    return f"{gbps:5.1f} GB/s, {1e3 * step_seconds:.3f} ms"


def beside_load(device: _C.Device, load: Load, seconds: float, run: Callable[[Callable[[], bool]], list[float]]) -> str:
    """While both run; the median rate."""
    steps: list[float] = []
    thread = threading.Thread(target=lambda: steps.append(beside._run_load(device, load, seconds).piece_seconds))
    thread.start()
    rates = run(thread.is_alive)
    thread.join()
    return told(statistics.median(rates), steps[0])


def main() -> None:
    """A line a row and direction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None)
    parser.add_argument("--load", default="step")
    parser.add_argument("--seconds", type=float, default=0.1, help="of a window")
    options = parser.parse_args()
    device = kvswap.Device(options.device)
    block = 32 << 10 if device.kind == "cuda" else 64
    stocks = {True: Stock(device, block)}
    load = load_for(device, options.load)
    stocks[False] = Stock(device, block)
    print(f"{device.name} ({device.info['name']}), beside {load.name}; windows of {options.seconds:g} s")
    shape = Shape(64, block, QUARTERS * BLOCKS // 64)
    with opened(device, 1) as lab, ThreadPoolExecutor(1) as thread:
        hand = Hand(device, block, lab.stream)
        for way in Direction:
            for row in ROWS:

                def by_hand(running: Callable[[], bool], row: Row = row, way: Direction = way) -> list[float]:
                    return hand.run(row, stocks[row.early], way, running)

                beside._warm_up(device, load)
                figures = beside_load(device, load, options.seconds, by_hand)
                print(f"{way.name} by hand, {row.name:42} {figures}", flush=True)
            for method in ("auto", "high"):
                job = lab.job(METHODS[method], (shape,), way.name)
                lab.warm_up(job)
                beside._warm_up(device, load)
                both = beside._run_both(lab, load, job, options.seconds, thread)
                print(f"{way.name} kvswap, {method:43} {told(both.gbps, both.piece_seconds)}", flush=True)


if __name__ == "__main__":
    main()
