"""A file store over several directories beside one over one: GB/s of stores and loads, every byte compared.

    python benchmarks/bench_disks.py DIR [DIR ...]    # directories on different disks
    python benchmarks/bench_disks.py --mbps 400       # two directories here, each as slow as a disk of that speed

With --mbps a library is preloaded (slow_disk.c, built by cc) by which reads and writes of one directory take turns.
Medians of --rounds; JSON with --json FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvswap.files import FileStore, Layout

HERE = Path(__file__).resolve().parent
Figures = dict[str, list[float]]


def one_round(directories: list[str], args: argparse.Namespace, seed: int) -> tuple[float, float]:
    """GB/s stored and loaded, of a new store."""
    nbytes, count = args.block_kib << 10, args.blocks
    blocks = np.random.default_rng(seed).integers(0, 256, (count, nbytes), np.uint8)
    back, keys = np.zeros_like(blocks), [b"%d" % i for i in range(count)]
    folders = [Path(directory, f"bench-{os.getpid()}") for directory in directories]
    try:
        with FileStore(
            folders, Layout(nbytes), capacity=4 * count * nbytes, segment_nbytes=16 * nbytes, engine="threads",
            depth=args.depth, buffered=args.mbps is not None,
        ) as store:  # fmt: skip
            begin = time.perf_counter()
            store.store(keys, blocks, range(count)).wait(600)
            middle = time.perf_counter()
            store.load(keys, back, range(count)).wait(600)
            end = time.perf_counter()
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    if not np.array_equal(blocks, back):
        sys.exit("wrong bytes")
    total = count * nbytes / 1e9
    return total / (middle - begin), total / (end - middle)


def measure(directories: list[str], args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"directories": len(directories), "rounds": args.rounds, "mbps": args.mbps}
    one: Figures = {"store": [], "load": []}
    all_: Figures = {"store": [], "load": []}
    for seed in range(args.rounds):
        for figures, some in ((one, directories[:1]), (all_, directories)):
            for name, speed in zip(("store", "load"), one_round(some, args, seed), strict=True):
                figures[name].append(speed)
    for name in ("store", "load"):
        single, several = statistics.median(one[name]), statistics.median(all_[name])
        found[name] = {"one_gbps": single, "all_gbps": several, "ratio": several / single}
        print(
            f"{name}: one {single:.3f} GB/s, {len(directories)} directories {several:.3f} GB/s, {several / single:.2f}x"
        )
    return found


def slowed(args: argparse.Namespace) -> int:
    """This program again, with the library preloaded."""
    with tempfile.TemporaryDirectory() as folder:
        library, disks = Path(folder, "slow_disk.so"), [Path(folder, f"disk{i}") for i in range(2)]
        cc = (os.environ.get("CC") or "cc").split()
        subprocess.run(
            [*cc, "-D_GNU_SOURCE", "-O2", "-shared", "-fPIC", "-o", library, HERE / "slow_disk.c", "-ldl", "-lpthread"],
            check=True,
        )
        for disk in disks:
            disk.mkdir()
        names = ":".join(map(str, disks))
        more = {"LD_PRELOAD": str(library), "SLOW_DISKS": names, "SLOW_MBPS": str(args.mbps)}
        command = [sys.executable, __file__, *map(str, disks), *sys.argv[1:]]
        return subprocess.run(command, env={**os.environ, **more}, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directories", metavar="DIR", nargs="*")
    parser.add_argument("--mbps", type=float)
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.mbps is not None and "SLOW_MBPS" not in os.environ:
        return slowed(args)
    if len(args.directories) < 2:
        parser.error("name two directories, or --mbps")
    found = measure(args.directories, args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
