"""kvswap beside the driver's own calls, in one run: scattered blocks, both directions, every destination byte checked.

For each block size: one big copy of as many bytes (the ceiling), a bare cuMemcpyBatchAsync over the same arrays, and
kvswap's paths (``dma`` over the same pointer arrays, ``kernel`` and ``auto`` by block ids). Times are wall-clock from
the call until the bytes are there, medians of --repeats; ``cpu`` is the time until the call returned. Needs a GPU and
its driver, nothing else::

    python benchmarks/bench_gpu.py [--device 0] [--repeats 9] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvswap
from kvswap import _C

SIZES = [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20]
BLOCKS = 8192
TOTAL_MAX = 2 << 30

Pointers = NDArray[np.uint64]


class Driver:
    """The few driver calls that kvswap is held to, through ctypes."""

    def __init__(self, ordinal: int) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.version = version.value
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
        self.call("cuCtxSetCurrent", context)
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        self.stream = stream
        self.batch = self.find_batch()

    def call(self, name: str, *args: Any) -> None:
        code = getattr(self.lib, name)(*args)
        if code:
            raise SystemExit(f"{name} failed with {code}")

    def find_batch(self) -> Callable[..., int]:
        function = ctypes.c_void_p()
        status = ctypes.c_int()
        asked = 13000 if self.version >= 13000 else 12080
        self.call(
            "cuGetProcAddress_v2",
            b"cuMemcpyBatchAsync",
            ctypes.byref(function),
            asked,
            ctypes.c_uint64(0),
            ctypes.byref(status),
        )
        pointers = 3 * [ctypes.c_void_p] + [ctypes.c_size_t] + 2 * [ctypes.c_void_p] + [ctypes.c_size_t]
        fail = [] if asked == 13000 else [ctypes.c_void_p]
        return ctypes.CFUNCTYPE(ctypes.c_int, *pointers, *fail, ctypes.c_void_p)(function.value or 0)

    def synchronize(self) -> None:
        self.call("cuStreamSynchronize", self.stream)

    def big_copy(self, dst: int, src: int, nbytes: int) -> None:
        self.call("cuMemcpyAsync", ctypes.c_uint64(dst), ctypes.c_uint64(src), ctypes.c_size_t(nbytes), self.stream)

    def batch_copy(self, src: Pointers, dst: Pointers, sizes: Pointers) -> None:
        attributes = (ctypes.c_uint32 * 16)()  # CUmemcpyAttributes: source order, two locations, flags
        attributes[0] = 1  # stream order
        index, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        args: list[Any] = [dst.ctypes.data, src.ctypes.data, sizes.ctypes.data, len(src)]
        args += [ctypes.addressof(attributes), ctypes.addressof(index), 1]
        if self.version < 13000:
            args.append(ctypes.addressof(failed))
        code = self.batch(*args, self.stream)
        if code:
            raise SystemExit(f"cuMemcpyBatchAsync failed with {code}")


class Case:
    """Blocks of one size, scattered on both sides, filled with a pattern on the source side."""

    def __init__(self, device: kvswap.Device, size: int, direction: str) -> None:
        self.device, self.size, self.direction = device, size, direction
        self.count = min(BLOCKS, TOTAL_MAX // size)
        self.nbytes = self.count * size
        self.gpu = device.alloc(self.nbytes)
        self.cpu = device.alloc(self.nbytes, host=True)
        rng = np.random.default_rng(size)
        ends = [self.gpu.ptr, self.cpu.ptr] if direction == "D2H" else [self.cpu.ptr, self.gpu.ptr]
        ids = [rng.permutation(self.count) for _ in ends]
        self.gpu_ids, self.cpu_ids = ids if direction == "D2H" else ids[::-1]
        self.src, self.dst = (end + i.astype(np.uint64) * np.uint64(size) for end, i in zip(ends, ids, strict=True))
        self.ends = ends
        self.sizes = np.full(self.count, size, np.uint64)
        self.keys = rng.integers(1, 1 << 62, self.count).astype(np.uint64)
        self.pattern(False, self.src)

    def pattern(self, check: bool, ptrs: Pointers) -> int:
        keys = self.keys if check or ptrs is self.src else self.keys + np.uint64(1)
        wrong, _, _ = _C._pattern(self.device, check, ptrs, self.sizes, keys, 1).result(60)
        return wrong

    def run(self, work: Callable[[], Callable[[], None]], repeats: int, scattered: bool) -> dict[str, float]:
        total, cpu = [], []
        for repeat in range(repeats + 1):
            self.pattern(False, self.dst)  # other bytes, so that nothing of an earlier run can pass for this one's
            start = time.perf_counter()
            wait = work()
            called = time.perf_counter()
            wait()
            done = time.perf_counter()
            wrong = self.pattern(True, self.dst) if scattered else 0
            if wrong:
                raise SystemExit(f"{wrong} wrong bytes: {self.direction} {self.size}")
            if repeat:
                total.append(done - start)
                cpu.append(called - start)
        return {"gbps": self.nbytes / statistics.median(total) / 1e9, "cpu_us": statistics.median(cpu) * 1e6}

    def free(self) -> None:
        self.gpu.free()
        self.cpu.free()


def spin(transfer: kvswap.Transfer) -> None:
    while not transfer.done():
        pass
    transfer.result(0)


def measure(driver: Driver, device: kvswap.Device, size: int, direction: str, repeats: int) -> dict[str, Any]:
    case = Case(device, size, direction)

    def big() -> Callable[[], None]:
        driver.big_copy(case.ends[1], case.ends[0], case.nbytes)
        return driver.synchronize

    def bare() -> Callable[[], None]:
        driver.batch_copy(case.src, case.dst, case.sizes)
        return driver.synchronize

    def ours(path: Any, pointers: bool) -> Callable[[], Callable[[], None]]:
        def call() -> Callable[[], None]:
            if pointers:
                transfer = kvswap.swap_blocks_batch(case.src, case.dst, case.sizes, device=device, path=path)
            else:
                transfer = kvswap.swap_cache_per_layer_async(
                    case.gpu.ptr,
                    case.cpu.ptr,
                    case.size,
                    case.count,
                    case.count,
                    case.gpu_ids,
                    case.cpu_ids,
                    int(direction == "H2D"),
                    device=device,
                    path=path,
                )
            return lambda: spin(transfer)

        return call

    row: dict[str, Any] = {"size": size, "direction": direction, "blocks": case.count}
    row["big copy"] = case.run(big, repeats, False)
    row["bare batch"] = case.run(bare, repeats, True)
    row["dma"] = case.run(ours("dma", True), repeats, True)  # over the same arrays as the bare call
    row["kernel"] = case.run(ours("kernel", False), repeats, True)
    row["auto"] = case.run(ours("auto", False), repeats, True)
    case.free()
    return row


def show(row: dict[str, Any]) -> str:
    ceiling, bare = row["big copy"]["gbps"], row["bare batch"]
    text = f"{row['direction']} {row['size'] >> 10:5d} KiB x {row['blocks']:5d}: "
    text += f"big {ceiling:5.1f}  bare {bare['gbps']:5.1f}"
    for path in ["dma", "kernel", "auto"]:
        ours = row[path]
        share, ratio = ours["gbps"] / ceiling, ours["gbps"] / bare["gbps"]
        text += f"  {path} {ours['gbps']:5.1f} ({share:5.3f} of big, {ratio:4.2f} of bare)"
    extra = (row["dma"]["cpu_us"] - bare["cpu_us"]) / row["blocks"]
    return text + f"  cpu/block: bare {bare['cpu_us'] / row['blocks']:.2f} us, dma {extra:+.3f} us"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json")
    args = parser.parse_args()
    driver = Driver(args.device)
    device = kvswap.Device(f"cuda:{args.device}")
    name, python = device.info["name"], platform.python_version()
    print(f"{name}, driver {driver.version}, Python {python}; GB/s, medians of {args.repeats}")
    rows = []
    for direction in ["D2H", "H2D"]:
        for size in SIZES:
            rows.append(measure(driver, device, size, direction, args.repeats))
            print(show(rows[-1]), flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"device": device.info["name"], "driver": driver.version, "rows": rows}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
