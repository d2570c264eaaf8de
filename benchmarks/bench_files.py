"""The file tier beside fio: sequential and random load and store of blocks, on the same disk, in the same run.

    python benchmarks/bench_files.py DIR [--bytes 4GiB] [--runs 3] [--device cuda:0]

Both use O_DIRECT, the same block size, depth and durability; they take turns in going first, and medians are told, with
the processor's time a GB. fio writes bare blocks, the store blocks with a header page and their checksum, which it
compares on loading. With a device, also GPU to file and back through staging, beside one bare copy of the link.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kvswap
from kvswap.files import FileStore, FileTransfer, Layout
from kvswap.replay.units import parse_size

SIZES = (2 << 20, 256 << 10)
WAIT = 600.0


class Result(NamedTuple):
    gbps: float
    cpu: float  # seconds of the processor a GB


class Store:
    """A store whose blocks are stored from, and loaded to, memory that is used again and again."""

    def __init__(self, folder: Path, nbytes: int, total: int, engine: Any, depth: int, durability: Any) -> None:
        self.nbytes, self.count = nbytes, total // nbytes
        slot = nbytes + 4096
        self.store = FileStore(
            folder,
            Layout(nbytes, use="bench"),
            capacity=int(self.count * slot * 1.3) + (2 << 30),
            engine=engine,
            depth=depth,
            durability=durability,
        )
        self.window = max(1, min(256, (256 << 20) // nbytes))
        room = np.zeros(self.window * nbytes + 4096, np.uint8)
        start = -room.ctypes.data % 4096
        self.memory = room[start : start + self.window * nbytes].reshape(self.window, nbytes)
        self.memory[:] = np.random.default_rng(1).integers(0, 256, self.memory.shape, np.uint8)
        self.keys = np.arange(self.count, dtype="<u8").view(np.uint8).reshape(self.count, 8)

    def run(self, load: bool, order: Any) -> Result:
        """All blocks, in pieces of an eighth of the memory, a few of them under way."""
        piece = max(1, self.window // 8)
        under_way: list[FileTransfer] = []
        begin, before = time.monotonic(), cpu_seconds()
        for at in range(0, self.count, piece):
            some = order[at : at + piece]
            ids = (np.arange(at, at + len(some))) % self.window
            if len(under_way) == 6:
                under_way.pop(0).wait(WAIT)
            call = self.store.load if load else self.store.store
            under_way.append(call(self.keys[some], self.memory, ids))
        for transfer in under_way:
            transfer.wait(WAIT)
        return result(self.count * self.nbytes, begin, before)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def result(nbytes: int, begin: float, before: float) -> Result:
    return Result(nbytes / (time.monotonic() - begin) / 1e9, (cpu_seconds() - before) / (nbytes / 1e9))


FIO = {
    (False, False): "write",
    (False, True): "randwrite",
    (True, False): "read",
    (True, True): "randread",
}


def fio(
    folder: Path, nbytes: int, total: int, load: bool, at_random: bool, engine: str, depth: int, dsync: bool
) -> Result:
    """io_uring at that depth, or as many jobs of psync."""
    jobs, total = (1, total) if engine == "io_uring" else (depth, total // depth // nbytes * nbytes)
    command = ["fio", "--name=kvswap", f"--directory={folder}", f"--rw={FIO[load, at_random]}", f"--bs={nbytes}"]
    command += [f"--size={total}", "--direct=1", f"--ioengine={engine}", f"--numjobs={jobs}", "--group_reporting"]
    command += [f"--iodepth={depth if engine == 'io_uring' else 1}", "--output-format=json", "--fallocate=native"]
    command += ["--sync=dsync"] if dsync else []
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    job = json.loads(told[told.index("{") :])["jobs"][0]
    side = job["read" if load else "write"]
    seconds = side["runtime"] / 1e3
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds * (jobs if engine != "io_uring" else 1)
    return Result(side["io_bytes"] / seconds / 1e9, cpu / (side["io_bytes"] / 1e9))


def median(results: list[Result]) -> Result:
    return Result(statistics.median(r.gbps for r in results), statistics.median(r.cpu for r in results))


def show(results: list[Result] | None) -> str:
    if not results:
        return f"{'-':>22}"
    middle = median(results)
    return f"{middle.gbps:>8.2f} GB/s {middle.cpu:6.3f} s"


def one_size(args: argparse.Namespace, nbytes: int, engine: str) -> None:
    depth = 32 if engine == "io_uring" else 8
    folder, bare = args.folder / "store", args.folder / "fio"
    rng = np.random.default_rng(2)
    cases: dict[tuple[bool, bool], tuple[list[Result], list[Result]]] = {}
    for run in range(args.runs):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(bare, ignore_errors=True)
        bare.mkdir(parents=True)
        store = Store(folder, nbytes, args.bytes, engine, depth, args.durability)
        for load, at_random in ((False, False), (True, False), (True, True), (False, True)):
            order = rng.permutation(store.count) if at_random else np.arange(store.count)
            if at_random and not load:  # into slots that came free at random
                store.store.delete(store.keys[order]).wait(WAIT)
            ours, theirs = cases.setdefault((load, at_random), ([], []))
            for first in (run % 2 == 0, run % 2 == 1):  # a disk may give its best to who comes first
                if first:
                    ours.append(store.run(load, order))
                elif shutil.which("fio"):
                    name = "io_uring" if engine == "io_uring" else "psync"
                    dsync = args.durability == "fsync"
                    theirs.append(fio(bare, nbytes, args.bytes, load, at_random, name, depth, dsync))
        store.store.close()
    for (load, at_random), (ours, theirs) in cases.items():
        what = f"{'random' if at_random else 'sequential'} {'load' if load else 'store'}"
        share = f"{median(ours).gbps / median(theirs).gbps:5.2f}" if theirs else "    -"
        print(f"{engine:<9} {nbytes >> 10:>5} KiB {what:<17} {show(ours)} | fio {show(theirs)} | {share}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(bare, ignore_errors=True)


def timed(nbytes: int, call: Callable[[], Any]) -> float:
    begin = time.monotonic()
    call().wait(WAIT)
    return nbytes / (time.monotonic() - begin) / 1e9


def through_staging(args: argparse.Namespace) -> None:
    """GPU -> file -> GPU, beside the same from host memory and one bare copy each way."""
    device = kvswap.Device(args.device)
    nbytes, count = 2 << 20, min(1024, args.bytes // (2 << 20))
    gpu, host = device.alloc(count * nbytes), device.alloc(count * nbytes, host=True)
    pools = [kvswap.Pool(device, memory, count, nbytes) for memory in (gpu, host)]
    ids, back = np.arange(count), np.random.default_rng(3).permutation(count)
    all_of_it = count * nbytes
    keys = np.arange(count, dtype="<u8").view(np.uint8).reshape(count, 8)
    for direction, (source, target) in (("D2H", pools), ("H2D", pools[::-1])):
        best = max(timed(all_of_it, partial(kvswap.move_blocks, source, target, ids, ids)) for _ in range(3))
        print(f"one copy {direction}, {all_of_it >> 20} MiB: {best:.2f} GB/s")
    folder = args.folder / "gpu"
    for name, pool in (("host memory", pools[1]), ("GPU", pools[0])):
        rates: dict[str, list[float]] = {"store": [], "load": []}
        for _ in range(args.runs):
            shutil.rmtree(folder, ignore_errors=True)
            with FileStore(folder, Layout(nbytes), capacity=2 * all_of_it + (2 << 30), device=device) as store:
                rates["store"].append(timed(all_of_it, partial(store.store, keys, pool, ids)))
                rates["load"].append(timed(all_of_it, partial(store.load, keys, pool, back)))
        told = ", ".join(f"{what} {statistics.median(values):.2f} GB/s" for what, values in rates.items())
        print(f"{name:<11} <-> file, blocks of 2 MiB: {told}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder on the disk in question")
    parser.add_argument("--bytes", type=parse_size, default=4 << 30, help="of all blocks (default 4GiB)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--durability", choices=("none", "flush", "fsync"), default="none")
    parser.add_argument("--device", help="also through staging, on this device")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with FileStore(args.folder / "probe", Layout(1), capacity=1 << 20) as store:
        info = store.info
    shutil.rmtree(args.folder / "probe")
    print(
        f"kvswap {kvswap.__version__}, {os.cpu_count()} processors, {info['engine']}, O_DIRECT {info['direct']}, "
        f"durability {args.durability}, {args.bytes >> 20} MiB a case, medians of {args.runs}; s: processor a GB"
    )
    for engine in ("io_uring", "threads") if info["engine"] == "io_uring" else ("threads",):
        for nbytes in SIZES:
            one_size(args, nbytes, engine)
    if args.device:
        through_staging(args)


if __name__ == "__main__":
    main()
