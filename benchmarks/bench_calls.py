"""How long a submitting call holds its caller, and a transfer takes from there to its end: few blocks and many.

80 tensors, host block-first, and single blocks of 64 KiB; medians. The same tensors as pools, and coded on
the host's side, for what coding adds to a call. Bytes are not checked here (kvswap bench does that).
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

import kvswap
from kvswap.codecs import Coding
from kvswap.typing import Path

TENSORS, NBYTES, SLOTS = 80, 8192, 1024
SINGLE = 64 << 10
PATHS: tuple[Path, ...] = ("auto", "kernel", "burst", "strided", "dma")


def measure(submit: Callable[[], kvswap.Transfer], repeats: int) -> dict[str, float]:
    """Medians in microseconds: in the call, of the caller's CPU time in it, until the end, and of the process's CPU
    time where the wait sleeps."""
    calls, callers, totals, cpus = [], [], [], []
    for _ in range(repeats):
        begin, own = time.perf_counter(), time.thread_time()
        transfer = submit()
        called, own = time.perf_counter(), time.thread_time() - own
        callers.append(own)
        while not transfer.done():
            pass
        totals.append(time.perf_counter() - begin)
        calls.append(called - begin)
    for _ in range(min(repeats, 50)):
        cpu = time.process_time()
        submit().wait(30.0)
        cpus.append(time.process_time() - cpu)
    found = {"call_us": calls, "caller_us": callers, "total_us": totals, "cpu_us": cpus}
    return {name: round(statistics.median(times) * 1e6, 2) for name, times in found.items()}


def pools(device: kvswap.Device, ptr: int, apart: int, stride: int, coding: Coding | None = None) -> list[kvswap.Pool]:
    """A pool for each tensor; a coding of its own each, as engines give them."""
    made: list[kvswap.Pool] = []
    for tensor in range(TENSORS):
        own = coding and Coding.parse(coding.text)
        nbytes = coding.coded_nbytes if coding else NBYTES
        group = made[0] if made else None
        made.append(kvswap.Pool(device, ptr + tensor * apart, SLOTS, nbytes, stride=stride, group=group, coding=own))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    device = kvswap.Device(arguments.device)
    stream = kvswap.Stream(device)
    device.set_compute_stream(stream)
    nbytes = TENSORS * NBYTES * SLOTS
    gpu, cpu = device.alloc(nbytes), device.alloc(nbytes, host=True)
    rng = np.random.default_rng(1)
    gpu_ptrs = gpu.ptr + np.arange(TENSORS, dtype=np.uint64) * np.uint64(NBYTES * SLOTS)
    cpu_ptrs = cpu.ptr + np.arange(TENSORS, dtype=np.uint64) * np.uint64(NBYTES)
    rows = []

    def show(what: str, path: str, figures: dict[str, float]) -> None:
        rows.append({"what": what, "path": path, **figures})
        print(f"{what:<44} {path:<8} " + "  ".join(f"{value:10.1f}" for value in figures.values()), flush=True)

    print(f"{device.name} ({device.info['name']})\n{'':<44} {'path':<8}    call us   caller us    total us      CPU us")
    src, dst = np.array([gpu.ptr], np.uint64), np.array([cpu.ptr], np.uint64)
    for path in (PATHS[0], PATHS[-1]):
        single = functools.partial(kvswap.swap_blocks_batch, src, dst, SINGLE, device=device, path=path)
        show("one block of 64 KiB by pointers, D2H", path, measure(single, 2000))
    for blocks, where in ((1, "permuted"), (8, "permuted"), (512, "one run"), (512, "permuted")):
        gpu_ids = rng.permutation(SLOTS)[:blocks]
        cpu_ids = np.arange(blocks) if where == "one run" else rng.permutation(SLOTS)[:blocks]
        for direction in (kvswap.Direction.D2H, kvswap.Direction.H2D):
            for path in PATHS:
                call = functools.partial(
                    kvswap.swap_cache_all_layers_async,
                    *(gpu_ptrs, cpu_ptrs, NBYTES, SLOTS, SLOTS, gpu_ids, cpu_ids, direction),
                    cpu_stride=TENSORS * NBYTES,
                    device=device,
                    path=path,
                )
                show(f"80 x 8 KiB x {blocks} {direction.name}, host {where}", path, measure(call, 40))
    on_gpu = pools(device, gpu.ptr, NBYTES * SLOTS, NBYTES)
    for kind, coding in (("pools", None), ("coded pools", Coding(NBYTES, "exact"))):
        each = coding.coded_nbytes if coding else NBYTES
        on_cpu = pools(device, cpu.ptr, each, each * TENSORS, coding)
        for blocks in (1, 8, 512):
            ids = {id(on_gpu): rng.permutation(SLOTS)[:blocks], id(on_cpu): rng.permutation(SLOTS)[:blocks]}
            for way, source, target in (("D2H", on_gpu, on_cpu), ("H2D", on_cpu, on_gpu)):
                for path in ("kernel", "burst"):
                    given = (source, target, ids[id(source)], ids[id(target)])
                    move = functools.partial(kvswap.move_blocks, *given, path=path)
                    show(f"80 x 8 KiB x {blocks} {way}, {kind}", path, measure(move, 40))
        device.synchronize(30.0)
        del on_cpu, source, target, given, move
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"device": device.info["name"], "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
