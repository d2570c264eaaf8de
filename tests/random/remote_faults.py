#!/usr/bin/env python3
"""Faults inside transfers of the remote tier, over Mooncake's own master and nodes on loopback, from a seed.

    python tests/random/remote_faults.py --faults 300 --seed 1

Each round starts loads and stores of a client, and does something to a node or the master while bytes move: kill or
stop a node, kill or stop the master, flip a bit in a node's memory, remove what is read. "inside" counts the rounds in
which, at that moment, some of the staging memory had arrived and not all. Every block that a load gives is compared. No
call may take longer than its limit and a second.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from mooncake_nodes import Cluster, Raw

from kvswap import Error
from kvswap.files import Layout
from kvswap.remote import RemoteStore, _store

NBYTES, BLOCKS, LIMIT, LEASE = 1 << 20, 48, 1.0, 1.0
KINDS = ("kill node", "stop node", "kill master", "stop master", "flip", "remove")


def blocks_of(seed: int, number: int) -> Any:
    return np.random.default_rng([seed, number]).integers(0, 256, NBYTES, np.uint8)


class Faults:
    def __init__(self, folder: Path, seed: int) -> None:
        self.random, self.seed, self.counts = random.Random(seed), seed, Counter[str]()
        self.cluster = Cluster(folder, memory="256MB", lease=LEASE)
        self.layout = Layout(NBYTES, faults=seed, time=time.time_ns())
        self.want = np.stack([blocks_of(seed, i) for i in range(BLOCKS)])
        self.keys = [b"%d" % i for i in range(BLOCKS)]
        self.store: Any = None
        self.worst = 0.0

    def timed(self, run: Any, limit: float) -> Any:
        begin = time.monotonic()
        try:
            return run()
        except Error:
            self.counts["refused calls"] += 1
            return None
        finally:
            took = time.monotonic() - begin
            self.worst = max(self.worst, took - limit)
            assert took < limit + 1.0, f"{run} took {took:.1f} s"

    def fill(self) -> None:
        """All blocks are there and right, by a store that is open, on nodes that run."""
        end = time.monotonic() + 60
        while True:
            if self.store is None:
                self.store = RemoteStore(self.cluster.address, self.layout, timeout=LIMIT)
            found = np.zeros_like(self.want)
            for move, memory in ((self.store.store, self.want), (self.store.load, found)):
                transfer = move(self.keys, memory, range(BLOCKS))
                while not transfer.done():
                    time.sleep(0.001)
            self.compare(transfer, found)
            if not len(transfer.failed_blocks):
                return
            assert time.monotonic() < end, transfer.error
            time.sleep(0.2)
            if self.store.stats()["epoch"] or "answer" in str(transfer.error):
                self.timed(self.store.close, LIMIT)  # late calls hold its threads
                self.store = None

    def compare(self, load: Any, found: Any) -> int:
        failed = set(load.failed_blocks.tolist())
        right = [i for i in range(BLOCKS) if i not in failed]
        wrong = [i for i in right if not np.array_equal(found[i], self.want[i])]
        self.counts["wrong blocks"] += len(wrong)
        assert not wrong, f"wrong blocks {wrong}, seed {self.seed}"
        return len(right)

    def moved(self) -> float:
        """The share of the staging memory's blocks that has arrived: 0xEE was there before."""
        staging = self.store._memory[: self.store._calls.threads * self.store._piece * self.store._stride]
        busy = len(self.store._calls._lanes)
        sample = staging[::4096]
        return float((sample != 0xEE).mean()) if busy else 0.0

    def one(self, kind: str) -> None:
        self.fill()
        raw = Raw(self.cluster) if kind in ("flip", "remove") else None
        self.store._memory[: self.store._calls.threads * self.store._piece * self.store._stride] = 0xEE
        found = np.zeros_like(self.want)
        load = self.store.load(self.keys, found, range(BLOCKS))
        store = self.store.store([b"new " + key for key in self.keys], self.want, range(BLOCKS))
        time.sleep(self.random.uniform(0.002, 0.05))
        node = self.random.randrange(2)
        share = self.moved()
        ended = load.done() and store.done()
        self.do(kind, node, raw)
        self.counts["inside" if 0 < share < 1 and not ended else "outside"] += 1
        for transfer in (load, store):
            begin = time.monotonic()
            while not transfer.done():
                assert time.monotonic() - begin < LIMIT + 1.0
                time.sleep(0.001)
        self.counts["blocks loaded beside a fault"] += self.compare(load, found)
        self.counts["blocks missed beside a fault"] += len(load.failed_blocks)
        after = np.zeros_like(self.want)
        load = self.timed(lambda: self.store.load(self.keys, after, range(BLOCKS)), 0.1)
        if load is not None:
            begin = time.monotonic()
            while not load.done():
                assert time.monotonic() - begin < LIMIT + 1.0
                time.sleep(0.001)
            self.compare(load, after)
        self.timed(lambda: self.store.contains(self.keys), LIMIT)
        if raw is not None:
            raw.close()
        self.mend(kind, node)
        self.counts[kind] += 1

    def do(self, kind: str, node: int, raw: Any) -> None:
        target = self.cluster.nodes[node] if "node" in kind else self.cluster.master
        if kind.startswith("kill"):
            target.kill()
        elif kind.startswith("stop"):
            target.send_signal(signal.SIGSTOP)
        else:
            epoch = self.store.epoch
            names = _store.names(self.store.identity, epoch, self.keys) if epoch else []
            for name in self.random.sample(names, min(4, len(names))):
                if kind == "remove":
                    raw.store.remove(name, True)
                else:
                    try:
                        raw.flip(
                            name, self.random.choice([self.random.randrange(56), 64 + self.random.randrange(NBYTES)])
                        )
                        self.counts["flipped"] += 1
                    except (AssertionError, IndexError, OSError):
                        pass

    def mend(self, kind: str, node: int) -> None:
        if kind == "stop node":
            self.cluster.nodes[node].send_signal(signal.SIGCONT)
        elif kind == "stop master":
            self.cluster.master.send_signal(signal.SIGCONT)
        elif kind == "kill node":
            self.cluster.nodes[node].wait()
            self.cluster.nodes[node] = self.cluster.start_node()
        elif kind == "kill master":
            self.cluster.restart_master()
        elif kind == "flip":
            end = time.monotonic() + 10 * LEASE
            while self.store._damaged and time.monotonic() < end:
                time.sleep(0.05)
            assert not self.store._damaged, "a damaged block is removed after its lease"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600.0)
    args = parser.parse_args()
    _store.LEASE_SECONDS = LEASE
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        faults = Faults(Path(folder), args.seed)
        try:
            for i in range(args.faults):
                if time.monotonic() - begin > args.seconds:
                    break
                faults.one(KINDS[i % len(KINDS)])
                if i % 10 == 9:
                    print(f"{i + 1} faults, {time.monotonic() - begin:.0f} s: {dict(faults.counts)}", flush=True)
            faults.timed(faults.store.close, LIMIT)
        finally:
            faults.cluster.close()
    print(f"seed {args.seed}, {time.monotonic() - begin:.0f} s: {dict(faults.counts)}")
    print(f"the longest call took {faults.worst:+.2f} s more than its limit; {threading.active_count()} threads")


if __name__ == "__main__":
    main()
