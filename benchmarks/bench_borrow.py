"""Transfers over another device's link too: python3 benchmarks/bench_borrow.py [--devices A B ...] [--beside] [--own].

The first device loads and stores while the others lend it their links; in turns with one bare copy of as many bytes and
with bursts over its own link alone. Blocks lie scattered on the GPU, and on the host all layers of a block together.
Then the first two devices both move blocks at once, with and without lending to each other; and with --beside, what a
decode step on the lender pays. --own measures only what the second device's own transfers take: from 64 KiB to 256 MiB,
one at a time, with pauses, with and without the first device borrowing all the time. Medians of wall-clock time. Every
byte is checked where it lands; exit status 1: one was wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np

import kvswap
from kvswap import _C
from kvswap.bench import beside, loads
from kvswap.codecs import Coding

SHAPES = {"64x32k": (64, 32 << 10), "80x8k": (80, 8 << 10)}
SLOTS = [(8 << 20, 2), (4 << 20, 2), (8 << 20, 3)]  # the default first
CODECS = ("exact", "mxfp8")
LIMIT = 120.0
WINDOW = 0.2  # seconds
OWN_NBYTES = (64 << 10, 2 << 20, 16 << 20, 64 << 20, 256 << 20)
OWN_SAMPLES = 40  # in a window
OWN_PAUSE = 2e-3  # seconds at most


class Cache:
    """Layers on a device, and the same blocks on the host, coded or not."""

    def __init__(self, device: kvswap.Device, shape: tuple[int, int], nbytes: int, codec: str | None = None) -> None:
        layers, page = shape
        self.device, self.stream = device, kvswap.Stream(device)
        self.blocks, self.layers, self.page = nbytes // (layers * page), layers, page
        self.slots, self.nbytes = 2 * self.blocks, self.blocks * layers * page
        coding = Coding(page, codec) if codec else None
        size = coding.coded_nbytes if coding else page
        self.link_nbytes = self.blocks * layers * size
        self.gpu = device.alloc(layers * self.slots * page)
        self.host = device.alloc(self.blocks * layers * size, host=True)
        self.pools: tuple[list[kvswap.Pool], list[kvswap.Pool]] = ([], [])
        for i in range(layers):
            ptrs = self.gpu.ptr + i * self.slots * page, self.host.ptr + i * size
            options: list[Any] = [{}, {"stride": layers * size, "coding": coding}]
            for pools, ptr, count, each, more in zip(
                self.pools, ptrs, (self.slots, self.blocks), (page, size), options, strict=True
            ):
                pools.append(kvswap.Pool(device, ptr, count, each, group=pools[0] if i else None, **more))
        rng = np.random.default_rng(2)
        self.ids = rng.permutation(self.slots)[: self.blocks]
        self.kind: Literal["bytes", "coarse"] = "coarse" if codec else "bytes"  # coarse: which each codec gives back
        ptrs_of = self.gpu.ptr + np.add.outer(np.arange(layers) * self.slots, self.ids).ravel() * page
        self.ptrs, self.sizes = ptrs_of.astype(np.uint64), np.full(layers * self.blocks, page, np.uint64)
        self.turn = 0
        self.pattern(False)

    def pattern(self, check: bool) -> int:
        """Write other bytes than before into the blocks, or count the words that are not those."""
        self.turn += not check
        keys = np.arange(self.ptrs.size, dtype=np.uint64) + np.uint64(1000003 * self.turn)
        job = _C._pattern(self.device, check, self.ptrs, self.sizes, keys, self.stream, self.kind)
        return job.result(LIMIT)[0]

    def wipe(self) -> None:
        self.turn += 1
        keys = np.full(self.ptrs.size, 7, np.uint64)
        _C._pattern(self.device, False, self.ptrs, self.sizes, keys, self.stream).result(LIMIT)
        self.turn -= 1

    def store(self, **options: Any) -> kvswap.Transfer:
        return kvswap.move_blocks(*self.pools, self.ids, np.arange(self.blocks), **options)

    def load(self, **options: Any) -> kvswap.Transfer:
        return kvswap.move_blocks(*self.pools[::-1], np.arange(self.blocks), self.ids, **options)

    def check(self, **options: Any) -> int:
        """Wrong words after a store and a load of new bytes."""
        self.pattern(False)
        self.store(**options).wait(LIMIT)
        self.wipe()
        self.load(**options).wait(LIMIT)
        return self.pattern(True)


class Bare:
    """One copy of as many bytes."""

    def __init__(self, device: kvswap.Device, nbytes: int) -> None:
        self.memory = device.alloc(nbytes), device.alloc(nbytes, host=True)
        self.gpu, self.host = (kvswap.Pool(device, memory, 1, nbytes) for memory in self.memory)
        self.nbytes = nbytes

    def store(self, **_: Any) -> kvswap.Transfer:
        return kvswap.move_blocks(self.gpu, self.host, [0], [0], path="dma")

    def load(self, **_: Any) -> kvswap.Transfer:
        return kvswap.move_blocks(self.host, self.gpu, [0], [0], path="dma")


def seconds(*submit: Callable[[], kvswap.Transfer]) -> float:
    begin = time.perf_counter()
    for transfer in [one() for one in submit]:
        transfer.wait(LIMIT)
    return time.perf_counter() - begin


def say(**row: Any) -> None:
    print(json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}))
    sys.stdout.flush()


def lend(devices: list[kvswap.Device], count: int, slot_nbytes: int) -> None:
    """All others to the first; 0 bytes: no longer."""
    for lender in devices[1:]:
        lender.lend(devices[0], slot_nbytes, count, timeout=LIMIT)


def lent(devices: list[kvswap.Device]) -> int:
    stats = [device.stats() for device in devices[1:]]
    return sum(each["lent_bytes_d2h"] + each["lent_bytes_h2d"] for each in stats)


def measure(devices: list[kvswap.Device], name: str, options: argparse.Namespace) -> int:
    """A copy, bursts and borrowed transfers in turns; wrong words."""
    bare, wrong = Bare(devices[0], options.nbytes), 0
    for codec in (None, *options.codec):
        cache = Cache(devices[0], SHAPES[name], options.nbytes, codec)
        for slot_nbytes, count in options.slots if codec is None else options.slots[:1]:
            lend(devices, count, slot_nbytes)
            wrong += cache.check(path="borrow")
            times: dict[tuple[str, str], list[float]] = {}
            seconds(bare.store), seconds(bare.load)
            before, moved = lent(devices), 0
            for _ in range(options.repeats):
                for method, path in (("copy", "dma"), ("burst", "burst"), ("borrow", "borrow")):
                    of = bare if method == "copy" else cache
                    for way, submit in (("D2H", of.store), ("H2D", of.load)):
                        times.setdefault((method, way), []).append(seconds(partial(submit, path=path)))
                    moved += 2 * cache.link_nbytes if method == "borrow" else 0
            share = (lent(devices) - before) / moved
            lend(devices, 2, 0)
            for way in ("D2H", "H2D"):
                medians = {method: statistics.median(times[method, way]) for method in ("copy", "burst", "borrow")}
                rates = {
                    method: (bare if method == "copy" else cache).nbytes / s / 1e9 for method, s in medians.items()
                }
                say(
                    shape=name, codec=codec, slots=f"{count} x {slot_nbytes >> 20} MiB", dir=way, lent=share,
                    **{f"{method} GB/s": rate for method, rate in rates.items()},
                    of_copy=rates["borrow"] / rates["copy"], of_burst=rates["borrow"] / rates["burst"],
                )  # fmt: skip
        del cache
    return wrong


def both_at_once(devices: list[kvswap.Device], name: str, options: argparse.Namespace) -> int:
    """Each of two devices loads its own blocks; with lending to each other, and without."""
    caches = [Cache(device, SHAPES[name], options.nbytes) for device in devices[:2]]
    wrong = 0
    for way in ("store", "load"):
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(options.repeats):
            for lending in (False, True):
                for lender, borrower in (devices[:2], devices[1::-1]):
                    lender.lend(borrower, 8 << 20 if lending else 0, timeout=LIMIT)
                path: Any = "borrow" if lending else "burst"
                calls = [partial(cache.store if way == "store" else cache.load, path=path) for cache in caches]
                seconds(*calls)  # beside this one the slots that were taken back are freed, which waits for the GPU
                times[lending].append(seconds(*calls))
        alone, together = (statistics.median(times[lending]) for lending in (False, True))
        say(shape=name, both="at once", way=way, seconds=together, without_lending=alone, ratio=alone / together)
        wrong += sum(cache.check(path="borrow") for cache in caches)
        for lender, borrower in (devices[:2], devices[1::-1]):
            lender.lend(borrower, 0, timeout=LIMIT)
    return wrong


class Busy:
    """Transfers without a pause, two at a time, by a thread."""

    def __init__(self, submit: Callable[[], Any]) -> None:
        self.submit, self.nbytes, self.stop = submit, 0, threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        before: Any = None
        while not self.stop.is_set():
            transfer = self.submit()
            if before is not None:
                before.wait(LIMIT)
                self.nbytes += before.nbytes
            before = transfer
        if before is not None:
            before.wait(LIMIT)

    def __enter__(self) -> Busy:
        self.thread.start()
        time.sleep(WINDOW / 4)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()


def beside_the_lender(devices: list[kvswap.Device], name: str, options: argparse.Namespace) -> None:
    """What a decode step on the lender pays, beside a copy of its own and beside what it lends, in turns."""
    lender = devices[1]
    load, bare = loads.load_for(lender, "step"), Bare(lender, options.nbytes)
    cache = Cache(devices[0], SHAPES[name], options.nbytes)
    lend(devices[:2], 2, 8 << 20)
    ways: dict[str, Callable[[], kvswap.Transfer]] = {
        "own copy D2H": bare.store,
        "own copy H2D": bare.load,
        "lent D2H": lambda: cache.store(path="borrow"),
        "lent H2D": lambda: cache.load(path="borrow"),
    }
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    before = beside._run_alone(lender, load, WINDOW)
    for _ in range(options.repeats):
        for way, submit in ways.items():
            beside._warm_up(lender, load)
            with Busy(submit) as busy:
                begin, counted = time.perf_counter(), busy.nbytes
                step = beside._run_load(lender, load, WINDOW).piece_seconds
                rate = (busy.nbytes - counted) / (time.perf_counter() - begin) / 1e9
            after = beside._run_alone(lender, load, WINDOW)
            found[way].append((2 * step / (before + after), rate))
            before = after
    lend(devices[:2], 2, 0)
    for way, pairs in found.items():
        slow, rate = (statistics.median(values) for values in zip(*pairs, strict=True))
        say(shape=name, beside="the lender's step", way=way, slow_down=slow, **{"GB/s": rate})


class Own:
    """Own transfers of a lender: blocks by path auto, and bare copies, of each size up to `most` bytes."""

    def __init__(self, device: kvswap.Device, most: int) -> None:
        layers, page = SHAPES["64x32k"]
        self.device, self.caches = device, {}
        for nbytes in (nbytes for nbytes in OWN_NBYTES if nbytes <= most):
            self.caches["auto", nbytes] = Cache(device, (min(layers, nbytes // page), page), nbytes)
            self.caches["dma", nbytes] = Cache(device, (1, nbytes), nbytes)

    def lent(self) -> int:
        stats = self.device.stats()
        return stats["lent_bytes_d2h"] + stats["lent_bytes_h2d"]

    def window(self) -> list[dict[str, Any]]:
        """Each size both ways, one transfer at a time: their seconds, what was lent meanwhile, and wrong words."""
        rows: list[dict[str, Any]] = []
        for (path, nbytes), cache in self.caches.items():
            cache.pattern(False)
            for way, submit in (("D2H", cache.store), ("H2D", cache.load)):
                if way == "H2D":
                    cache.wipe()
                times, before, begin = [], self.lent(), time.perf_counter()
                for _ in range(OWN_SAMPLES):
                    time.sleep(random.random() * OWN_PAUSE)
                    times.append(seconds(partial(submit, path=path)))
                row = {"own": path, "nbytes": nbytes, "dir": way, "times": times, "lent": self.lent() - before}
                rows.append({**row, "took": time.perf_counter() - begin, "wrong": 0})
            rows[-1]["wrong"] = cache.pattern(True)
        return rows


def say_own(windows: dict[str, list[list[dict[str, Any]]]], **more: Any) -> int:
    """windows: all that Own.window() returned, by what was borrowed meanwhile. Returns wrong words."""

    def of(borrowed: str, i: int) -> tuple[float, float, float]:
        rows = [window[i] for window in windows[borrowed]]
        times = statistics.quantiles([time for row in rows for time in row["times"]], n=10, method="inclusive")
        return 1e3 * times[4], 1e3 * times[8], sum(row["lent"] for row in rows) / sum(row["took"] for row in rows) / 1e9

    for i, row in enumerate(windows["nothing"][0]):
        alone, late_alone, _ = of("nothing", i)
        for borrowed in ("D2H", "H2D"):
            beside, late, rate = of(borrowed, i)
            say(
                **more, own=row["own"], nbytes=row["nbytes"], dir=row["dir"], borrowed=borrowed,
                **{"lent GB/s": rate, "ms": beside, "alone ms": alone, "ratio": beside / alone},
                **{"later ms": beside - alone, "0.9 ms": late, "0.9 alone ms": late_alone},
                **{"0.9 ratio": late / late_alone, "0.9 later ms": late - late_alone},
            )  # fmt: skip
    return sum(row["wrong"] for each in windows.values() for window in each for row in window)


def own_transfers(devices: list[kvswap.Device], options: argparse.Namespace) -> int:
    """What the lender's own transfers take, with and without the first device borrowing, in turns."""
    own, cache = Own(devices[1], options.nbytes), Cache(devices[0], SHAPES["64x32k"], options.nbytes)
    windows: dict[str, list[list[dict[str, Any]]]] = {"nothing": [], "D2H": [], "H2D": []}
    wrong, (slot_nbytes, count) = 0, options.slots[0]
    lend(devices[:2], count, slot_nbytes)
    for _ in range(options.repeats):
        cache.pattern(False)
        windows["nothing"].append(own.window())
        with Busy(partial(cache.store, path="borrow")):
            windows["D2H"].append(own.window())
        cache.wipe()
        with Busy(partial(cache.load, path="borrow")):
            windows["H2D"].append(own.window())
        wrong += cache.pattern(True)
    lend(devices[:2], 2, 0)
    return wrong + say_own(windows, slots=f"{count} x {slot_nbytes >> 20} MiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--devices", nargs="+", default=["cuda:0", "cuda:1"], help="the borrower, then lenders (default cuda:0 cuda:1)"
    )
    parser.add_argument("--nbytes", type=int, default=1 << 30, help="of a transfer (default 1 GiB)")
    parser.add_argument("--shape", action="append", choices=tuple(SHAPES))
    parser.add_argument("--codec", action="append", choices=CODECS)
    parser.add_argument("--slots", nargs=2, type=int, action="append", metavar=("NBYTES", "COUNT"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--beside", action="store_true", help="beside a decode step of the lender, too")
    parser.add_argument("--own", action="store_true", help="only what own transfers of a lender take meanwhile")
    options = parser.parse_args()
    if len(options.devices) < 2 or options.nbytes < 16 << 20:
        parser.error("at least two devices and 16 MiB")
    if options.own and (options.shape or options.codec or options.beside):
        parser.error("--own measures 64x32k: it goes without --shape, --codec and --beside")
    options.codec, options.slots = options.codec or list(CODECS), options.slots or SLOTS
    devices = [kvswap.Device(name) for name in options.devices]
    print(", ".join(device.info["name"] for device in devices), kvswap.__version__)
    wrong = 0
    if options.own:
        wrong += own_transfers(devices, options)
    for name in () if options.own else options.shape or SHAPES:
        wrong += measure(devices, name, options)
        wrong += both_at_once(devices, name, options)
        if options.beside:
            beside_the_lender(devices, name, options)
    print(f"{wrong} wrong words")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
