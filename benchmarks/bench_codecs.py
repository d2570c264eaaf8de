"""Coded transfers beside uncoded bursts and one bare copy of as many bytes of KV, in turns; what the kernels
take; and what a decode step beside them pays.

Blocks lie scattered on the GPU. On the host they are one run, or in random order (--host random). Values are normal
numbers, or real keys and values (--kv FILE.npz with arrays k and v of bf16 as uint16). Every byte is compared: of
`exact` with what was stored, of the others with a second pass. Needs torch with CUDA.

    python benchmarks/bench_codecs.py [--kv FILE] [--host run|random] [--beside [--at GB/s]] [--kernels]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

import kvswap
from kvswap.bench import beside, loads
from kvswap.codecs import CODECS, Coding

SHAPES = {"64x32k": (64, 32 << 10), "32x64k": (32, 64 << 10), "80x8k": (80, 8 << 10)}
NBYTES = 1 << 30
LIMIT = 60.0
SPREAD = 2
PARTS = 32  # of a cache, with --at
ALL = slice(None)
WINDOW = 0.2  # seconds


def values(nbytes: int, file: str | None, seed: int) -> torch.Tensor:
    """bf16 on the GPU, as bytes; real ones are repeated, whole pages of a token at a time."""
    generator = torch.Generator("cuda").manual_seed(seed)
    if file is None:
        made = torch.randn(nbytes // 2, generator=generator, device="cuda", dtype=torch.bfloat16)
        return made.view(torch.uint8)
    with np.load(file) as found:
        flat = np.concatenate([np.moveaxis(found[name], 1, 2).reshape(-1) for name in ("k", "v")])
    one = torch.from_numpy(flat.view(np.int16)).cuda()
    return one.repeat(nbytes // flat.nbytes + 1)[: nbytes // 2].contiguous().view(torch.uint8)


class Cache:
    """Tensors of blocks on the GPU, and the same blocks on the host, coded or not."""

    def __init__(self, device: Any, shape: tuple[int, int], codec: str | None, host: str, file: str | None) -> None:
        layers, page = shape
        self.blocks = NBYTES // (layers * page)
        slots = SPREAD * self.blocks
        self.gpu = values(layers * slots * page, file, 1).view(layers, slots, page)
        coding = Coding(page, codec) if codec else None
        nbytes = coding.coded_nbytes if coding else page
        self.host = device.alloc(slots * layers * nbytes, host=True)
        self.src: list[kvswap.Pool] = []
        self.dst: list[kvswap.Pool] = []
        for i in range(layers):
            ptr, at = self.gpu[i].data_ptr(), self.host.ptr + i * nbytes
            self.src.append(kvswap.Pool(device, ptr, slots, page, group=self.src[0] if i else None))
            self.dst.append(
                kvswap.Pool(
                    device, at, slots, nbytes, stride=layers * nbytes, group=self.dst[0] if i else None, coding=coding
                )
            )
        rng = np.random.default_rng(2)
        self.gpu_ids = rng.permutation(slots)[: self.blocks]
        self.host_ids = np.arange(self.blocks) if host == "run" else rng.permutation(slots)[: self.blocks]
        self.exact = codec in (None, "exact")
        self.nbytes = self.blocks * layers * page
        self.ratio = nbytes / page

    def store(self, blocks: slice = ALL, **options: Any) -> Any:
        return kvswap.move_blocks(self.src, self.dst, self.gpu_ids[blocks], self.host_ids[blocks], **options)

    def load(self, blocks: slice = ALL, **options: Any) -> Any:
        return kvswap.move_blocks(self.dst, self.src, self.host_ids[blocks], self.gpu_ids[blocks], **options)

    def check(self) -> None:
        """A pass that is not lossless changes only the first time."""
        ids = torch.from_numpy(self.gpu_ids).cuda()
        for turn in range(1 if self.exact else 2):
            before = self.gpu[:, ids].clone()
            self.store().wait(LIMIT)
            if self.exact or turn:
                self.gpu[:, ids] = 0
                torch.cuda.synchronize()
            self.load().wait(LIMIT)
            after = self.gpu[:, ids]
            if (self.exact or turn) and not torch.equal(before, after):
                raise SystemExit("WRONG BYTES")


class Bare:
    """One copy of as many bytes."""

    def __init__(self, device: Any) -> None:
        self.gpu, self.host = device.alloc(NBYTES), device.alloc(NBYTES, host=True)
        self.src, self.dst = kvswap.Pool(device, self.gpu, 1, NBYTES), kvswap.Pool(device, self.host, 1, NBYTES)
        self.nbytes = NBYTES

    def store(self) -> Any:
        return kvswap.move_blocks(self.src, self.dst, [0], [0], path="dma")

    def load(self) -> Any:
        return kvswap.move_blocks(self.dst, self.src, [0], [0], path="dma")


def seconds(submit: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    submit().wait(LIMIT)
    return time.perf_counter() - begin


def kernels(cache: Cache, max_ctas: int | None) -> dict[str, float]:
    """TB/s of raw bytes while a kernel runs, by the driver's own records."""
    found = {}
    for name, submit in (
        ("encode", partial(cache.store, max_ctas=max_ctas)),
        ("decode", partial(cache.load, max_ctas=max_ctas)),
    ):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            submit().wait(LIMIT)
            torch.cuda.synchronize()
        busy = sum(event.device_time for event in profile.events() if "kvs_kernel" in event.name)
        found[name] = round(cache.nbytes / busy / 1e6, 3) if busy else 0.0
    return found


class Repeated:
    """One way of a cache as a job of kvswap.bench."""

    def __init__(self, cache: Any, way: str) -> None:
        self.nbytes, self._submit = cache.nbytes, cache.store if way == "D2H" else cache.load

    def fill(self) -> None:
        """The bytes stay: check() of the cache comes before and after."""

    def submit(self) -> list[Any]:
        return [self._submit()]


class Paced(Repeated):
    """Parts of a cache, as many a second as make this rate: what a connector moves that has no more to move."""

    def __init__(self, cache: Cache, way: str, gbps: float) -> None:
        super().__init__(cache, way)
        self._count = max(1, cache.blocks // PARTS)
        self.nbytes = cache.nbytes // cache.blocks * self._count
        self._pause, self._due, self._turn = self.nbytes / gbps / 1e9, 0.0, 0

    def submit(self) -> list[Any]:
        now = time.perf_counter()
        time.sleep(max(0.0, self._due - now))
        self._due = max(now, self._due) + self._pause
        self._turn = (self._turn + 1) % PARTS
        return [self._submit(slice(self._turn * self._count, (self._turn + 1) * self._count))]


class Nothing:
    """What kvswap.bench asks for beside a job."""

    def __init__(self, device: Any) -> None:
        self.device, self.stream = device, kvswap.Stream(device)
        device.set_compute_stream(self.stream)

    def check(self, job: Repeated) -> None:
        """See Repeated.fill()."""


def measure_beside(
    device: Any, name: str, caches: dict[str, Any], options: argparse.Namespace, gbps: float | None
) -> None:
    """What a decode step pays, in windows with and without transfers, in turns; of so many GB/s of KV, or all."""
    load, lab = loads.load_for(device, "step"), Nothing(device)
    with ThreadPoolExecutor(1) as thread:
        for way in ("D2H", "H2D"):
            found: dict[str, list[tuple[float, float]]] = {method: [] for method in caches}
            before = beside._run_alone(device, load, WINDOW)
            for _ in range(options.pairs):
                for method, cache in caches.items():
                    job: Any = Paced(cache, way, gbps) if gbps else Repeated(cache, way)
                    beside._warm_up(device, load)
                    window = beside._run_both(lab, load, job, WINDOW, thread)  # type: ignore[arg-type]
                    after = beside._run_alone(device, load, WINDOW)
                    found[method].append((2 * window.piece_seconds / (before + after), window.gbps))
                    before = after
            for method, pairs in found.items():
                slow, rate = (statistics.median(values) for values in zip(*pairs, strict=True))
                row = {"shape": name, "beside": "step", "at": gbps, "method": method, "dir": way}
                print(json.dumps({**row, "slow-down": round(slow, 4), "GB/s of KV": round(rate, 2)}), flush=True)
    device.set_compute_stream(0)


def measure(device: Any, options: argparse.Namespace) -> None:
    for name in options.shape or SHAPES:
        caches: dict[str, Any] = {"copy": Bare(device)}
        for codec in (None, *options.codec):
            caches[codec or "uncoded"] = cache = Cache(device, SHAPES[name], codec, options.host, options.kv)
            cache.check()
        times: dict[tuple[str, str], list[float]] = {}
        for _ in range(options.repeats):
            for method, cache in caches.items():
                for way, submit in (("D2H", cache.store), ("H2D", cache.load)):
                    times.setdefault((method, way), []).append(seconds(submit))
        for (method, way), found in times.items():
            gbps = caches[method].nbytes / statistics.median(found) / 1e9
            of_copy = statistics.median(times["copy", way]) / statistics.median(found)
            of_uncoded = statistics.median(times["uncoded", way]) / statistics.median(found)
            row = {
                "shape": name,
                "host": options.host,
                "method": method,
                "dir": way,
                "size": round(getattr(caches[method], "ratio", 1.0), 4),
                "GB/s of KV": round(gbps, 2),
                "of copy": round(of_copy, 3),
                "of uncoded": round(of_uncoded, 3),
            }
            print(json.dumps(row), flush=True)
        if options.kernels:
            for method, cache in caches.items():
                for max_ctas in (None, *options.max_ctas) if method not in ("copy", "uncoded") else ():
                    rates = kernels(cache, max_ctas)
                    line = {"shape": name, "kernels": method, "max_ctas": max_ctas, "TB/s": rates}
                    print(json.dumps(line), flush=True)
        if options.beside:
            measure_beside(device, name, caches, options, None)
            for gbps in options.at:
                coded = {method: cache for method, cache in caches.items() if method != "copy"}
                measure_beside(device, name, coded, options, gbps)
            for method in ("uncoded", *options.codec):
                caches[method].check()
        del caches, cache
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--kv", help="an .npz file of real keys and values")
    parser.add_argument("--host", choices=("run", "random"), default="run")
    parser.add_argument("--shape", action="append", choices=tuple(SHAPES))
    parser.add_argument("--codec", action="append", choices=CODECS)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--beside", action="store_true", help="beside a decode step, too")
    parser.add_argument("--at", type=float, nargs="*", default=(), help="the same at so many GB/s of KV")
    parser.add_argument("--pairs", type=int, default=6, help="of windows beside the step")
    parser.add_argument("--kernels", action="store_true", help="what they take, by torch's profiler")
    parser.add_argument("--max-ctas", type=int, nargs="*", default=(), help="the same with these limits")
    options = parser.parse_args()
    options.codec = options.codec or list(CODECS)
    device = kvswap.Device(options.device)
    print(torch.cuda.get_device_name(), kvswap.__version__)
    measure(device, options)


if __name__ == "__main__":
    main()
