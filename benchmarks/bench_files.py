"""The file tier beside fio: sequential and random load and store of blocks, on the same disk, in the same run.

    python benchmarks/bench_files.py DIR [--bytes 4GiB] [--runs 3] [--device cuda:0 [--gds compat] [--device-only]]
    python benchmarks/bench_files.py DIR --beside [--bytes 512MiB] [--runs 5]

Both use O_DIRECT, the same block size, depth and durability; they take turns in going first, and medians are told, with
the processor's time a GB. fio writes bare blocks, the store blocks with a header page and their checksum, which it
compares on loading. With --beside, what stores and deletes take beside loads that never pause, and what these lose.
With a device, also GPU to file and back through staging, and with --gds by libcufile, every byte
compared, beside one bare copy of the link.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kvswap
from kvswap import _testing
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


# -- loads that never pause ------------------------------------------------------------------------------------------

BLOCK, WINDOW = 1 << 20, 2.0


class Loads:
    """Two threads that load blocks without pause, five transfers of sixteen each."""

    def __init__(self, store: Store) -> None:
        self.store, self.stop, self.counts = store, threading.Event(), [0, 0]
        self.threads = [threading.Thread(target=self.run, args=(i,)) for i in range(2)]
        for thread in self.threads:
            thread.start()

    def run(self, number: int) -> None:
        rng, under_way = np.random.default_rng(number), []
        for turn in itertools.count():
            if self.stop.is_set():
                break
            ids = np.arange(16) + 16 * (5 * number + turn % 5)  # no two loads write to one place
            keys = self.store.keys[rng.permutation(self.store.count)[:16]]
            under_way.append(self.store.store.load(keys, self.store.memory, ids))
            if len(under_way) == 5:
                under_way.pop(0).wait(WAIT)
                self.counts[number] += 16
        for transfer in under_way:
            transfer.wait(WAIT)

    def gbps(self, during: Callable[[], Any]) -> float:
        """Of the loads while that runs, for a window at least."""
        before, begin = sum(self.counts), time.monotonic()
        while time.monotonic() < begin + WINDOW:
            during()
        return (sum(self.counts) - before) * BLOCK / (time.monotonic() - begin) / 1e9

    def end(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()


def lone(call: Callable[[], FileTransfer], count: int = 40) -> float:
    """Median milliseconds of calls that are alone."""
    return statistics.median(seconds(call) for _ in range(count)) * 1e3


def seconds(call: Callable[[], FileTransfer]) -> float:
    transfer = call()
    transfer.wait(WAIT)
    return transfer.elapsed or 0.0


def one_beside(args: argparse.Namespace, engine: str, told: dict[str, list[float]]) -> None:
    """One run: everything alone; then one store or delete after the other beside loads; then stores without pause."""
    folder = args.folder / "beside"
    shutil.rmtree(folder, ignore_errors=True)
    store = Store(folder, BLOCK, args.bytes, engine, 32 if engine == "io_uring" else 8, args.durability)
    files, order = store.store, np.arange(store.count)
    ids = iter(range(1 << 40))

    def put() -> FileTransfer:
        return files.store([b"new-%d" % next(ids)], store.memory, [200])

    def tell(name: str, *values: float) -> None:
        told.setdefault(name, []).extend(values)

    tell("put GB/s", store.run(False, order).gbps)
    tell("get GB/s", store.run(True, order).gbps)
    tell("put ms", lone(put))
    tell("get ms", lone(lambda: files.load(store.keys[:1], store.memory, [201])))
    loads = Loads(store)
    waited: list[float] = []
    kinds: list[Callable[[], FileTransfer]] = [put, lambda: files.delete([b"new-%d" % (next(ids) - 2)])]
    under_way: list[FileTransfer] = []

    def single() -> None:
        waited.extend(seconds(kind) for kind in kinds)

    def many() -> None:
        under_way.append(put())
        if len(under_way) == 64:
            under_way.pop(0).wait(WAIT)

    alone = loads.gbps(lambda: time.sleep(0.05))
    singly = loads.gbps(single)
    before = files.stats()["stored"]
    begin = time.monotonic()
    without_pause = loads.gbps(many)
    tell("put beside GB/s", (files.stats()["stored"] - before) * BLOCK / (time.monotonic() - begin) / 1e9)
    loads.end()
    for transfer in under_way:
        transfer.wait(WAIT)
    tell("loads GB/s", alone)
    tell("share singly", singly / alone)
    tell("share without pause", without_pause / alone)
    tell("store or delete beside s", *waited)
    files.close()
    shutil.rmtree(folder, ignore_errors=True)


def beside(args: argparse.Namespace, engine: str) -> None:
    told: dict[str, list[float]] = {}
    for _ in range(args.runs):
        one_beside(args, engine, told)
    middle = {name: statistics.median(values) for name, values in told.items()}
    waited = told["store or delete beside s"]
    print(
        f"{engine:<9} 1 MiB alone: put {middle['put GB/s']:.2f} GB/s, {middle['put ms']:.2f} ms, "
        f"get {middle['get GB/s']:.2f} GB/s, {middle['get ms']:.2f} ms; "
        f"beside loads of {middle['loads GB/s']:.2f} GB/s: "
        f"{len(waited)} stores and deletes, each {statistics.median(waited):.3f} s, the slowest {max(waited):.3f} s, "
        f"loads at {middle['share singly']:.2f}; stores without pause {middle['put beside GB/s']:.3f} GB/s, "
        f"loads at {middle['share without pause']:.2f}",
        flush=True,
    )


# -- devices ---------------------------------------------------------------------------------------------------------


def timed(nbytes: int, call: Callable[[], Any]) -> float:
    begin = time.monotonic()
    call().wait(WAIT)
    return nbytes / (time.monotonic() - begin) / 1e9


def checksum_by_kernel(device: kvswap.Device, ptr: int, nbytes: int, count: int) -> float:
    """One launch a block, as the file tier makes them when blocks lie in device memory: GB/s."""
    word, stream = device.alloc(4), kvswap.Stream(device)
    begin, end = (kvswap.Event(device, timing=True) for _ in range(2))
    begin.record(stream)
    for i in range(count):
        _testing.seam(device, "launch_crc", ptr + i * nbytes, nbytes, word.ptr, stream.handle)
    end.record(stream)
    end.synchronize(WAIT)
    return count * nbytes / begin.elapsed_time(end) / 1e9


class Gpu:
    """Blocks on the device whose bytes are known, and room beside them on the host to compare."""

    def __init__(self, device: kvswap.Device, nbytes: int, count: int) -> None:
        self.count, self.nbytes = count, count * nbytes
        self.memory = [device.alloc(self.nbytes), device.alloc(self.nbytes, host=True)]
        self.gpu, self.host = (kvswap.Pool(device, memory, count, nbytes) for memory in self.memory)
        room: Any = self.memory[1]
        self.bytes = np.frombuffer(room, np.uint64).reshape(count, nbytes // 8)
        self.ids = np.arange(count)
        self.verified = 0

    def fill(self) -> None:
        """Block i is i + 1 times the odd numbers: none is like another."""
        odd = np.arange(1, 2 * self.bytes.shape[1], 2, dtype=np.uint64)
        np.multiply(odd, (self.ids + 1).astype(np.uint64)[:, None], out=self.bytes)
        kvswap.move_blocks(self.host, self.gpu, self.ids, self.ids).wait(WAIT)

    def check(self, back: Any) -> None:
        """Block i was loaded to slot back[i]."""
        kvswap.move_blocks(self.gpu, self.host, self.ids, self.ids).wait(WAIT)
        odd = np.arange(1, 2 * self.bytes.shape[1], 2, dtype=np.uint64)
        for i, slot in enumerate(back):
            if not (self.bytes[slot] == odd * np.uint64(i + 1)).all():
                raise SystemExit(f"block {i}, loaded to slot {slot}, is wrong")
        self.verified += self.nbytes


def gpu_and_files(args: argparse.Namespace, nbytes: int) -> None:
    """GPU -> file -> GPU through staging and, if asked, by libcufile, beside host memory and one bare copy each way."""
    device = kvswap.Device(args.device)
    gpu = Gpu(device, nbytes, min((2 << 30) // nbytes, args.bytes // nbytes))
    gpu.fill()
    for direction, (source, target) in (("D2H", (gpu.gpu, gpu.host)), ("H2D", (gpu.host, gpu.gpu))):
        best = max(timed(gpu.nbytes, partial(kvswap.move_blocks, source, target, gpu.ids, gpu.ids)) for _ in range(3))
        print(f"one copy {direction}, {gpu.nbytes >> 20} MiB: {best:.2f} GB/s")
    rate = checksum_by_kernel(device, gpu.memory[0].ptr, nbytes, gpu.count)
    print(f"checksum by kernel, a launch a block: {rate:.2f} GB/s")
    keys = np.arange(gpu.count, dtype="<u8").view(np.uint8).reshape(gpu.count, 8)
    back = np.random.default_rng(3).permutation(gpu.count)
    ways = [("host memory", gpu.host, "off"), ("GPU, pinned staging", gpu.gpu, "off")]
    ways += [("GPU, libcufile", gpu.gpu, args.gds)] if args.gds != "off" else []
    rates: dict[str, dict[str, list[Result]]] = {name: {"store": [], "load": []} for name, _, _ in ways}
    notes: dict[str, str] = {}
    for run in range(args.runs):
        for name, pool, gds in ways if run % 2 == 0 else ways[::-1]:  # a disk may give its best to who comes first
            notes[name] = one_way(args, gpu, pool, gds, (keys, back), rates[name])
    for name, of_way in rates.items():
        told = ", ".join(f"{what}{show(results)}" for what, results in of_way.items())
        print(f"{name:<20} <-> file, {nbytes >> 10:>5} KiB: {told}{notes[name]}", flush=True)
    print(f"{gpu.verified} bytes verified")


def one_way(args: argparse.Namespace, gpu: Gpu, pool: Any, gds: Any, what: Any, rates: dict[str, list[Result]]) -> str:
    folder, (keys, back) = args.folder / "gpu", what
    shutil.rmtree(folder, ignore_errors=True)
    nbytes, capacity = gpu.nbytes // gpu.count, 2 * gpu.nbytes + (2 << 30)
    options = {"durability": args.durability, "device": args.device, "gds": gds}
    gpu.fill()
    with FileStore(folder, Layout(nbytes), capacity=capacity, **options) as store:
        for name, ids in (("store", gpu.ids), ("load", back)):
            begin, before = time.monotonic(), cpu_seconds()
            getattr(store, name)(keys, pool, ids).wait(WAIT)
            rates[name].append(result(gpu.nbytes, begin, before))
        info, stats = store.info, store.stats()
    if pool is gpu.gpu:
        gpu.check(back)
    shutil.rmtree(folder, ignore_errors=True)
    by_it = stats["gds_read_nbytes"] + stats["gds_written_nbytes"]
    return f"; gds {info['gds']} ({info['gds_note']}), {by_it} bytes by libcufile" if gds != "off" else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder on the disk in question")
    parser.add_argument("--bytes", type=parse_size, default=4 << 30, help="of all blocks (default 4GiB)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--durability", choices=("none", "flush", "fsync"), default="none")
    parser.add_argument("--device", help="also between this device and files")
    parser.add_argument(
        "--gds", choices=("off", "auto", "compat"), default="off", help="with --device: by libcufile too"
    )
    parser.add_argument("--beside", action="store_true", help="nothing but stores and deletes beside loads")
    parser.add_argument("--device-only", action="store_true", help="nothing but what --device does")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with FileStore(args.folder / "probe", Layout(1), capacity=1 << 20) as store:
        info = store.info
    shutil.rmtree(args.folder / "probe")
    print(
        f"kvswap {kvswap.__version__}, {os.cpu_count()} processors, {info['engine']}, O_DIRECT {info['direct']}, "
        f"durability {args.durability}, {args.bytes >> 20} MiB a case, medians of {args.runs}; s: processor a GB"
    )
    if args.beside:
        for engine in ("io_uring", "threads"):
            beside(args, engine)
        return
    engines = ("io_uring", "threads") if info["engine"] == "io_uring" else ("threads",)
    for engine, nbytes in product(() if args.device_only else engines, SIZES):
        one_size(args, nbytes, engine)
    for nbytes in SIZES if args.device else ():
        gpu_and_files(args, nbytes)


if __name__ == "__main__":
    main()
