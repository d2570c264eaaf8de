#!/usr/bin/env python3
"""Clients of the remote tier store, load, look up, delete and clear for a while, over Mooncake's own nodes on loopback.

    python tests/random/remote_soak.py --seconds 3600 --seed 1
    python tests/random/remote_soak.py --opens 1000

A block's bytes are a function of its key and of the number of clears that were begun before it was stored: a load that
finds bytes of another key is wrong, and one that finds those of before a clear that ended a second ago is resurrected.
Memory and descriptors of this process must stay flat after the first quarter. --opens: instead, so many stores are
opened, used and closed, one after the other; threads must stay flat, too.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from mooncake_nodes import Cluster

from kvswap import Error, QueueFull
from kvswap.files import Layout
from kvswap.remote import RemoteStore

NBYTES, KEYS, CLIENTS = 256 << 10, 400, 3


def pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Soak:
    def __init__(self, master: str, seed: int, seconds: float) -> None:
        self.seed, self.end = seed, time.monotonic() + seconds
        layout = Layout(NBYTES, soak=seed, time=time.time_ns())
        self.stores = [RemoteStore(master, layout) for _ in range(CLIENTS)]
        self.counts = Counter[str]()
        self.lock = threading.Lock()
        self.begun = 0  # clears; guarded by lock, as the next two
        self.floor = [(0.0, 0)]  # from this time on no block of fewer clears may be found
        self.failure: BaseException | None = None

    def count(self, what: str, more: int = 1) -> None:
        with self.lock:
            self.counts[what] += more

    def client(self, number: int) -> None:
        try:
            chosen = random.Random(self.seed * 100 + number)
            while time.monotonic() < self.end and self.failure is None:
                self.step(self.stores[number], chosen)
        except BaseException as error:
            self.failure = error
            raise

    def step(self, store: RemoteStore, chosen: random.Random) -> None:
        what = chosen.choices(("store", "load", "contains", "delete", "clear"), (30, 50, 15, 4, 0.3))[0]
        numbers = chosen.sample(range(KEYS), chosen.randint(1, 24))
        keys = [b"%d" % number for number in numbers]
        self.count(what)
        if what == "contains":
            self.count("looked up, there", sum(store.contains(keys)))
        elif what == "delete":
            self.counts.update(f"delete: {each}" for each in store.delete(keys))
        elif what == "clear":
            with self.lock:
                self.begun += 1
                begun = self.begun
            try:
                store.clear()
            except Error:  # the machine was too busy: it is not sure that the new epoch is known
                return self.count("clear: not sure")
            with self.lock:
                self.floor.append((time.monotonic() + 1.0, begun))
        else:
            self.move(what, store, numbers, keys)
        return None

    def move(self, what: str, store: RemoteStore, numbers: list[int], keys: list[bytes]) -> None:
        memory = np.zeros((len(keys), NBYTES // 8), np.uint64)
        with self.lock:
            begun = self.begun
        begin = time.monotonic()
        if what == "store":
            for row, number in zip(memory, numbers, strict=True):
                row[:] = np.arange(NBYTES // 8, dtype=np.uint64) * np.uint64(number + 1)
                row[0], row[1] = number, begun
        try:
            transfer = (store.store if what == "store" else store.load)(keys, memory, range(len(keys)))
        except QueueFull:
            return self.count("full")
        while not transfer.done():
            time.sleep(0.0005)
        if what == "load":
            failed = set(transfer.failed_positions.tolist())
            with self.lock:
                floor = max(least for since, least in self.floor if since <= begin)
            for i, (row, number) in enumerate(zip(memory, numbers, strict=True)):
                if i not in failed:
                    self.check(row, number, floor)
            self.count("loaded", len(keys) - len(failed))
        else:
            self.count("accepted", len(keys) - len(transfer.failed_positions))
        return None

    def check(self, row: Any, number: int, floor: int) -> None:
        rest = np.arange(2, NBYTES // 8, dtype=np.uint64) * np.uint64(number + 1)
        assert int(row[0]) == number and np.array_equal(row[2:], rest), f"wrong bytes of key {number}, seed {self.seed}"
        assert int(row[1]) >= floor, f"key {number} is of {int(row[1])} clears, {floor} have ended, seed {self.seed}"


def threads() -> int:
    """Those that are ending have a second."""
    time.sleep(1.0)
    return len(os.listdir("/proc/self/task"))


def opens(master: str, count: int, seed: int) -> None:
    layout, memory, missed = Layout(NBYTES, opens=seed, time=time.time_ns()), np.zeros((4, NBYTES), np.uint8), 0
    begin, seen = time.monotonic(), []
    for i in range(count):
        with RemoteStore(master, layout) as store:
            keys = [b"%d %d" % (i, k) for k in range(4)]
            for move in (store.store, store.load):
                transfer = move(keys, memory, range(4))
                while not transfer.done():
                    time.sleep(0.0005)
            missed += len(transfer.failed_positions)
        if i % max(1, count // 20) == 0 or i == count - 1:
            seen.append((pages() * 4096 >> 20, descriptors(), threads()))
    quarter = seen[len(seen) // 4]
    print(f"{count} opens and closes, {time.monotonic() - begin:.0f} s; {missed} of {4 * count} blocks missed")
    for when, (mib, open_files, running) in (("after a quarter", quarter), ("at the end", seen[-1])):
        print(f"{when} {mib} MiB, {open_files} descriptors, {running} threads")
    assert seen[-1][0] < quarter[0] * 1.2 + 32 and seen[-1][1] <= quarter[1] + 8 and seen[-1][2] <= quarter[2] + 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--opens", type=int, default=0)
    args = parser.parse_args()
    begin = time.monotonic()
    if args.opens:
        with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder), memory="64MB", lease=3.0) as cluster:
            opens(cluster.address, args.opens, args.seed)
        return
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder), memory="64MB", lease=3.0) as cluster:
        soak = Soak(cluster.address, args.seed, args.seconds)
        threads = [threading.Thread(target=soak.client, args=(i,)) for i in range(CLIENTS)]
        for thread in threads:
            thread.start()
        seen = []
        while any(thread.is_alive() for thread in threads):
            time.sleep(min(5.0, args.seconds / 20))
            seen.append((pages() * 4096, descriptors()))
        for store in soak.stores:
            store.close()
        assert soak.failure is None, soak.failure
    quarter = seen[len(seen) // 4] if seen else (0, 0)
    print(f"seed {args.seed}, {time.monotonic() - begin:.0f} s: 0 wrong, 0 resurrected; {dict(soak.counts)}")
    print(f"after a quarter {quarter[0] >> 20} MiB, {quarter[1]} descriptors;", end=" ")
    print(f"at the end {seen[-1][0] >> 20} MiB, {seen[-1][1]}")
    assert seen[-1][0] < quarter[0] * 1.2 + (32 << 20) and seen[-1][1] <= quarter[1] + 8


if __name__ == "__main__":
    main()
