#!/usr/bin/env python3
"""The remote tier beside Mooncake's own client, in interleaved pairs over the same nodes; every load is compared.

Starts a master and two nodes on loopback. Both clients lend no memory. Each store and load is one call of all blocks,
Mooncake's own from and to memory that is registered. Then a node is stopped while blocks of both are loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from mooncake_nodes import HOST, Cluster, Raw, free_port

from kvswap import _C, Error
from kvswap.files import Layout
from kvswap.remote import RemoteStore, _names
from kvswap.remote._epoch import node_of

LIMIT = 60.0


def seconds(run: Any) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


class Own:
    """Mooncake's own client, as a connector uses it: all blocks in one call."""

    def __init__(self, cluster: Cluster, memory: Any) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.store = MooncakeDistributedStore()
        assert self.store.setup(f"{HOST}:{free_port()}", "P2PHANDSHAKE", 0, 0, "tcp", "", cluster.address) == 0
        assert self.store.register_buffer(memory.ctypes.data, memory.nbytes) == 0
        self.pointers = [memory.ctypes.data + i * memory.shape[1] for i in range(len(memory))]
        self.sizes = [memory.shape[1]] * len(memory)

    def put(self, keys: list[str]) -> None:
        assert set(self.store.batch_put_from(keys, self.pointers, self.sizes)) == {0}

    def get(self, keys: list[str]) -> None:
        assert self.store.batch_get_into(keys, self.pointers, self.sizes) == self.sizes


def moves(cluster: Cluster, nbytes: int, total: int, pairs: int) -> None:
    count = total // nbytes
    blocks = np.random.default_rng(1).integers(0, 256, (count, nbytes), np.uint8)
    memory = blocks.copy()
    own = Own(cluster, memory)
    ratios: dict[str, list[float]] = {"store": [], "load": []}
    rates: dict[str, list[float]] = {"store": [], "load": []}
    with RemoteStore(cluster.address, Layout(nbytes, bench=time.time_ns()), timeout=LIMIT) as store:
        for pair in range(-1, pairs):
            keys, names = [b"%d %d" % (pair, i) for i in range(count)], [f"{nbytes} {pair} {i}" for i in range(count)]
            took: dict[str, float] = {}
            steps = [
                ("kvswap store", lambda keys=keys: store.store(keys, memory, range(count)).wait()),
                ("own store", lambda names=names: own.put(names)),
                ("kvswap load", lambda keys=keys: store.load(keys, memory, range(count)).wait()),
                ("own load", lambda names=names: own.get(names)),
            ]
            for first in (0, 2):
                order = (first, first + 1) if pair % 2 else (first + 1, first)
                for step in order:
                    if first:
                        memory[:] = 0
                    took[steps[step][0]] = seconds(steps[step][1])
                    assert (memory == blocks).all(), steps[step][0]
            time.sleep(0.05)
            for what in ratios if pair >= 0 else ():
                ratios[what].append(took[f"own {what}"] / took[f"kvswap {what}"])
                rates[what].append(total / took[f"kvswap {what}"] / 1e9)
    own.store.close()
    for what, found in ratios.items():
        low, median, high = min(found), statistics.median(found), max(found)
        rate = statistics.median(rates[what])
        spread = f"{median:.2f} of Mooncake's own ({low:.2f} to {high:.2f})"
        print(f"{nbytes >> 10} KiB blocks, {what}: {spread}, {rate:.2f} GB/s")


def look_ups(cluster: Cluster, pairs: int, count: int = 1000) -> None:
    block = np.zeros(4096, np.uint8)
    own = Own(cluster, block.reshape(1, -1))
    added, theirs, cached = [], [], []
    with RemoteStore(cluster.address, Layout(4096, bench=time.time_ns()), timeout=LIMIT) as store:
        for pair in range(pairs):
            keys = [b"%032d" % (pair * count + i) for i in range(count)]
            names = [f"kvswap/{'0' * 32}/{'0' * 32}/{key.hex()}" for key in keys]
            took: dict[bool, float] = {}
            for mine in (pair % 2 == 0, pair % 2 == 1):  # the first of two finds cold caches
                if mine:
                    took[mine] = seconds(lambda keys=keys: store.contains(keys))
                else:
                    took[mine] = seconds(lambda names=names: own.store.batch_is_exist(names))
            cached.append(seconds(lambda keys=keys: store.contains(keys)))
            added.append(took[True] - took[False])
            theirs.append(took[False])
    own.store.close()
    ms = [1e3 * statistics.median(each) for each in (theirs, added, cached)]
    print(f"look-up of {count} keys: Mooncake's own {ms[0]:.2f} ms, kvswap adds {ms[1]:.2f} ms; again {ms[2]:.2f} ms")


def check(nbytes: int, pairs: int) -> None:
    """The C check and copy of one thread, over 16 blocks."""
    count, stride = 16, nbytes + 64
    slots, blocks = (
        np.zeros(count * stride, np.uint8),
        np.random.default_rng(2).integers(0, 256, count * nbytes, np.uint8),
    )
    at = [
        each.ctypes.data + np.arange(count, dtype=np.uint64) * np.uint64(step)
        for each, step in ((slots, stride), (blocks, nbytes))
    ]
    who, keys = b"i" * 16, b"k" * 16 * count
    found = []
    for secret in (None, b"s" * 16):
        _C._remote_seal(at[0], at[1], nbytes, who, keys, secret)
        checks = functools.partial(_C._remote_check, at[0], at[1], nbytes, who, keys, secret)
        took = [seconds(checks) for _ in range(pairs)]
        found.append(count * nbytes / statistics.median(took) / 1e9)
    copy = np.zeros_like(blocks)
    plain = count * nbytes / statistics.median([seconds(lambda: np.copyto(copy, blocks)) for _ in range(pairs)]) / 1e9
    rates = f"{found[0]:.1f} GB/s, with a secret {found[1]:.1f}; memcpy {plain:.1f}"
    print(f"{nbytes >> 10} KiB blocks, check and copy: {rates}")


class Loader:
    """Loads the blocks of one node again and again, and counts those that arrive."""

    def __init__(self, store: RemoteStore, keys: list[bytes], nbytes: int) -> None:
        self.store, self.keys, self.memory = store, keys, np.zeros((len(keys), nbytes), np.uint8)
        self.arrived, self.longest, self.over = 0, 0.0, False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while not self.over:
            begin = time.perf_counter()
            load = self.store.load(self.keys, self.memory, range(len(self.keys)))
            with contextlib.suppress(Error):
                load.wait()
            self.longest = max(self.longest, time.perf_counter() - begin)
            self.arrived += len(self.keys) - len(load.failed_positions)
            if load.error is not None:
                time.sleep(0.01)

    def rate(self, during: float) -> float:
        before, begin = self.arrived, time.perf_counter()
        time.sleep(during)
        return (self.arrived - before) * self.memory.shape[1] / (time.perf_counter() - begin) / 1e9


def stopped(has_epoch: bool, during: float, nbytes: int = 1 << 20, limit: float = 10.0) -> None:
    """One of two nodes stops while blocks of both are loaded. has_epoch: the one that the epoch is read from."""
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder), memory="256MB") as cluster:
        store = RemoteStore(cluster.address, Layout(nbytes, bench=time.time_ns()), timeout=limit)
        keys = [b"%d" % i for i in range(64)]
        store.store(keys, np.zeros((64, nbytes), np.uint8), range(64)).wait()
        assert store.epoch is not None
        epoch, *blocks = [f"kvswap/{store.identity.hex()}/epoch", *_names.names(store.identity, store.epoch, keys)]
        raw = Raw(cluster)
        node = {name: node_of(raw.store.get_replica_desc(name)) for name in (epoch, *blocks)}
        parts = [[key for key, name in zip(keys, blocks, strict=True) if (node[name] == node[epoch]) is serves]
                 for serves in (has_epoch, not has_epoch)]  # fmt: skip
        pid = raw.place(blocks[keys.index(parts[0][0])])[0]
        loaders = [Loader(store, part, nbytes) for part in parts]
        before = loaders[1].rate(during / 4)
        os.kill(pid, signal.SIGSTOP)
        beside = loaders[1].rate(during)
        for loader in loaders:
            loader.over = True
        for loader in loaders:
            loader.thread.join()
        closing = seconds(store.close)
        os.kill(pid, signal.SIGCONT)
        raw.close()
    which = "that serves the epoch" if has_epoch else "other"
    longest = max(loader.longest for loader in loaders)
    print(
        f"node {which} stopped for {during:.0f} s: loads from the running one {beside:.2f} GB/s, {before:.2f} before",
        end="",
    )
    print(f" ({beside / before:.2f}); limit {limit:.0f} s: longest load {longest:.1f} s, close() {closing:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--total", type=int, default=64 << 20, help="bytes of each transfer")
    parser.add_argument("--stopped", type=float, default=120.0, metavar="S", help="for how long a node is stopped")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder), memory="2GB", lease=1.0) as cluster:
        for nbytes in (512 << 10, 2 << 20):
            moves(cluster, nbytes, args.total, args.pairs)
            check(nbytes, args.pairs)
        look_ups(cluster, args.pairs)
    for has_epoch in (True, False):
        stopped(has_epoch, args.stopped)


if __name__ == "__main__":
    main()
