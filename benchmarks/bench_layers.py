"""Layers of models in one slab, by each path: python3 benchmarks/bench_layers.py [--device cuda:0]
[--repeats 7] [--json FILE].

Blocks are scattered on both sides by random permutations; the host's side is block-first (all layers of a block
together) or layer-first. GB/s from the call until the bytes are there, beside one big copy of as many bytes in the same
run, and the time until the call returned; medians, every destination byte checked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

import kvswap
from kvswap import _C

SHAPES = [(80, 4 << 10, 512), (80, 8 << 10, 512), (32, 64 << 10, 256), (61, 36 << 10, 128), (64, 2 << 10, 1024)]
PATHS = ("dma", "strided", "kernel", "auto")


class Case:
    """`layers` layers of `count` pages, all of them swapped, each page written with a pattern of its own."""

    def __init__(self, device: kvswap.Device, shape: tuple[int, int, int], block_first: bool, direction: int) -> None:
        self.device, self.direction = device, direction
        self.layers, self.page, self.count = shape
        self.nbytes = self.layers * self.page * self.count
        self.gpu, self.cpu = device.alloc(self.nbytes), device.alloc(self.nbytes, host=True)
        rng = np.random.default_rng(self.page)
        self.gpu_ids, self.cpu_ids = rng.permutation(self.count), rng.permutation(self.count)
        layer = np.arange(self.layers)[:, None]
        block_step, layer_step = (
            (self.layers * self.page, self.page) if block_first else (self.page, self.count * self.page)
        )
        self.cpu_stride = block_step
        self.gpu_ptrs = self.gpu.ptr + layer[:, 0] * self.count * self.page
        self.cpu_ptrs = self.cpu.ptr + layer[:, 0] * layer_step
        gpu = (self.gpu_ptrs[:, None] + self.gpu_ids * self.page).reshape(-1).astype(np.uint64)
        cpu = (self.cpu_ptrs[:, None] + self.cpu_ids * block_step).reshape(-1).astype(np.uint64)
        self.src, self.dst = (cpu, gpu) if direction else (gpu, cpu)
        self.keys = rng.integers(1, 1 << 62, self.src.size).astype(np.uint64)
        self.pattern(False, self.src, self.keys)

    def pattern(self, check: bool, ptrs: Any, keys: Any) -> int:
        sizes = np.full(ptrs.size, self.page, np.uint64)
        return _C._pattern(self.device, check, ptrs, sizes, keys, 1).result(60)[0]

    def swap(self, path: str) -> kvswap.Transfer:
        return kvswap.swap_cache_all_layers_async(
            self.gpu_ptrs,
            self.cpu_ptrs,
            self.page,
            self.count,
            self.count,
            self.gpu_ids,
            self.cpu_ids,
            self.direction,
            cpu_stride=self.cpu_stride,
            device=self.device,
            path=path,  # type: ignore[arg-type]
        )

    def big(self) -> kvswap.Transfer:
        ends = (self.cpu.ptr, self.gpu.ptr) if self.direction else (self.gpu.ptr, self.cpu.ptr)
        return kvswap.swap_blocks_batch([ends[0]], [ends[1]], self.nbytes, device=self.device, path="dma")

    def measure(self, path: str, repeats: int) -> tuple[float, float, str]:
        """GB/s, microseconds in the call, and the path taken."""
        took, called, transfer = [], [], None
        for i in range(repeats + 1):
            if path != "big":
                self.pattern(
                    False, self.dst, self.keys + np.uint64(1)
                )  # nothing of an earlier run may pass for this one's
            begin = time.perf_counter()
            transfer = self.big() if path == "big" else self.swap(path)
            returned = time.perf_counter()
            while not transfer.done():
                pass
            end = time.perf_counter()
            transfer.wait()
            if path != "big" and self.pattern(True, self.dst, self.keys):
                raise SystemExit(f"wrong bytes by {path}")
            if i:
                took.append(end - begin)
                called.append(returned - begin)
        assert transfer is not None
        return self.nbytes / statistics.median(took) / 1e9, statistics.median(called) * 1e6, transfer.path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json")
    options = parser.parse_args()
    device = kvswap.Device(options.device)
    rows = []
    print(f"{device.info['name'] or device.name}; GB/s (share of one big copy, microseconds in the call)")
    for shape in SHAPES:
        for block_first in (True, False):
            for direction in (0, 1):
                case = Case(device, shape, block_first, direction)
                ceiling = case.measure("big", options.repeats)[0]
                row: dict[str, Any] = {
                    "shape": shape,
                    "block_first": block_first,
                    "direction": direction,
                    "big": ceiling,
                }
                text = f"big {ceiling:5.1f}"
                for path in PATHS:
                    gbps, called, taken = case.measure(path, options.repeats)
                    row[path] = {"gbps": gbps, "call_us": called, "path": taken}
                    name = f"auto={taken}" if path == "auto" else path
                    text += f"  {name} {gbps:5.1f} ({gbps / ceiling:.2f}, {called:.0f})"
                rows.append(row)
                layers, page, count = shape
                order = "block-first" if block_first else "layer-first"
                print(
                    f"{'H2D' if direction else 'D2H'} {layers:2d} x {page >> 10:2d} KiB x {count:4d} {order}: {text}",
                    flush=True,
                )
                case.gpu.free()
                case.cpu.free()
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"device": device.info["name"], "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
