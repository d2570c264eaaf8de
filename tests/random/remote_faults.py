#!/usr/bin/env python3
"""Faults inside loads of the remote tier, over Mooncake's own master and nodes on loopback, from a seed.

    python tests/random/remote_faults.py --faults 300 --seed 1 [--raw]

Each round loads blocks, and does something to the node that a call reads from, or to the master, while the call's bytes
arrive: kill or stop it, flip bits in its memory, remove what is read, or fill it. "inside": of the bytes of that call
some had arrived before the fault, and not all right after it; the shares are of one word of each page, all of which had
another value when the call began. Every block that a load gives is compared, then and again beside the fault. No call
may take longer than its limit and a second. Each flipped block must be missed, and be there again after a store that
comes a lease later. --raw: the same over Mooncake's own client, of which nothing is expected. Both print a row a kind.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from mooncake_nodes import Cluster, Raw

from kvswap import Error
from kvswap.files import Layout
from kvswap.remote import RemoteStore, _names, _store

NBYTES, BLOCKS, LIMIT, LEASE = 1 << 20, 48, 1.0, 1.0
RAW_SECONDS = 90.0  # a call of Mooncake's own client that takes longer is left
KINDS = ("kill node", "stop node", "kill master", "stop master", "flip", "remove", "evict")
POISON = np.uint64(0xEEEEEEEEEEEEEEEE)


def background(call: Any, *args: Any) -> tuple[threading.Thread, list[int]]:
    """Its thread, and where its codes will be."""
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.extend(call(*args)), daemon=True)
    thread.start()
    return thread, codes


def starved() -> dict[str, float]:
    """Of each thread of this process: seconds that it was ready and had no CPU."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return found


class Call:
    """Begins now."""

    def __init__(self) -> None:
        self.starved, self.begin = starved(), time.monotonic()

    def late(self) -> float:
        """Seconds beyond the limit, without those for which the machine kept the thread that waited most from a CPU."""
        late = time.monotonic() - self.begin - LIMIT
        if late < 0.5:
            return late
        return late - max(seconds - self.starved.get(task, 0.0) for task, seconds in starved().items())


class Row:
    """What came of the faults of a kind. Of flips: by a load that begins after them."""

    def __init__(self) -> None:
        self.faults = self.inside = self.given = self.wrong = self.missed = 0
        self.shares: list[float] = []  # of the call's bytes, that had arrived at each fault
        self.longest = 0.0  # seconds of a load

    def __str__(self) -> str:
        low, mid, high = min(self.shares), statistics.median(self.shares), max(self.shares)
        blocks = f"blocks {self.given} given, {self.wrong} of them wrong, {self.missed} missed"
        faults = f"{self.faults} faults, {self.inside} inside, {low:.2f} to {high:.2f} arrived (median {mid:.2f})"
        return f"{faults}; {blocks}; longest load {self.longest:.2f} s"


class Faults:
    def __init__(self, folder: Path, seed: int) -> None:
        self.random, self.seed = random.Random(seed), seed
        self.cluster = Cluster(folder, "--client_ttl=2", memory="256MB", lease=LEASE)
        self.layout = Layout(NBYTES, faults=seed, time=time.time_ns())
        self.want = np.random.default_rng(seed).integers(0, 256, (BLOCKS, NBYTES), np.uint8)
        self.keys = [b"%d" % i for i in range(BLOCKS)]
        self.calls: list[tuple[list[str], list[int]]] = []  # names and addresses of gets that run
        self.rows: dict[str, Row] = defaultdict(Row)
        self.worst = -LIMIT
        self.struck_names: list[str] = []
        self.store: Any = None
        self.raw: Any = None  # Mooncake's own client, as the next one
        self.filler: Any = None
        self.nodes: dict[str, int] = {}  # of a name: index of its node

    # -- a call's bytes -----------------------------------------------------------------------------------------------

    def words(self, address: int) -> Any:
        import ctypes

        return np.frombuffer((ctypes.c_uint64 * (NBYTES // 8)).from_address(address + 64), np.uint64)[::512]

    def watch(self, client: Any) -> None:
        """Gets of blocks are in `calls` while they run, and their slots are poisoned before."""
        real = client.codes

        def codes(name: str, count: int, names: list[str], *rest: Any) -> list[int]:
            if name != "batch_get_into" or names[0].endswith("/epoch"):
                return list(real(name, count, names, *rest))
            for address in rest[0]:
                self.words(address)[:] = POISON
            self.calls.append(call := (names, rest[0]))
            try:
                return list(real(name, count, names, *rest))
            finally:
                self.calls.remove(call)

        client.codes = codes

    def share(self, addresses: list[int]) -> float:
        return float(np.mean([(self.words(address) != POISON).mean() for address in addresses]))

    def strike(self, kind: str, ended: Any) -> bool:
        """Do it when some of a call's bytes have arrived. False: the load ended before."""
        while not ended():
            for names, addresses in list(self.calls):
                before = self.share(addresses)
                if 0.02 < before < 0.9:
                    self.do(kind, names)
                    self.rows[kind].faults += 1
                    self.rows[kind].inside += self.share(addresses) < 1
                    self.rows[kind].shares.append(before)
                    return True
            time.sleep(0.0001)
        return False

    def do(self, kind: str, names: list[str]) -> None:
        self.struck = self.nodes[names[0]]
        target = self.cluster.nodes[self.struck] if "node" in kind else self.cluster.master
        if kind.startswith("kill"):
            target.kill()
        elif kind.startswith("stop"):
            target.send_signal(signal.SIGSTOP)
        self.struck_names = self.random.sample(names, min(4, len(names))) if kind in ("flip", "remove") else []
        for name in self.struck_names:
            if kind == "remove":
                self.raw.store.remove(name, True)
            else:
                where = self.random.choice([self.random.randrange(56), 64 + self.random.randrange(NBYTES)])
                with open(f"/proc/{self.cluster.nodes[self.nodes[name]].pid}/mem", "r+b", 0) as memory:
                    memory.seek(self.places[name] + where)
                    byte = memory.read(1)[0]
                    memory.seek(self.places[name] + where)
                    memory.write(bytes([byte ^ 1 << where % 8]))
        if kind == "evict":
            for i in range(20):
                self.filler.put(f"filler {time.time_ns()} {i}", bytes(4 << 20))

    def locate(self, names: list[str], found: dict[str, Any]) -> None:
        """Which node has each block, and where: the bytes there say so."""
        self.places = {}
        for i, name in enumerate(names):
            at = self.places[name] = found[name][0].get_memory_descriptor().buffer_descriptor.buffer_address
            for index, node in enumerate(self.cluster.nodes):
                try:
                    with open(f"/proc/{node.pid}/mem", "rb", 0) as memory:
                        memory.seek(at + 64)
                        if memory.read(64) == self.want[i][:64].tobytes():
                            self.nodes[name] = index
                except OSError:
                    pass

    # -- rounds -------------------------------------------------------------------------------------------------------

    def finish(self, call: Call, *transfers: Any) -> None:
        for transfer in transfers:
            while not transfer.done():
                time.sleep(0.001)
        self.worst = max(self.worst, call.late())
        assert self.worst < 1.0, f"{self.worst:.1f} s beyond the limit"

    def load(self) -> tuple[Any, Any]:
        found = np.zeros_like(self.want)
        return self.store.load(self.keys, found, range(BLOCKS)), found

    def compare(self, load: Any, found: Any) -> int:
        """How many a load gave, all of which are right."""
        failed = set(load.failed_positions.tolist())
        wrong = [i for i in range(BLOCKS) if i not in failed and not np.array_equal(found[i], self.want[i])]
        assert not wrong, f"wrong blocks {wrong}, seed {self.seed}"
        return BLOCKS - len(failed)

    def fill(self) -> None:
        """All blocks are there and right, by a store that is open, on nodes that run."""
        end = time.monotonic() + 90
        while True:
            if self.store is None:
                self.store = RemoteStore(self.cluster.address, self.layout, timeout=LIMIT)
                self.watch(self.store._client)
            call = Call()
            self.finish(call, self.store.store(self.keys, self.want, range(BLOCKS)))
            call = Call()
            load, found = self.load()
            self.finish(call, load)
            if self.compare(load, found) == BLOCKS:
                return
            assert time.monotonic() < end, load.error
            time.sleep(0.2)
            if self.store.stats()["epoch"] or "answer" in str(load.error):
                self.store.close()  # late calls hold its threads
                self.store = None

    def round(self, kind: str) -> None:
        self.raw = self.filler = Raw(self.cluster) if kind in ("remove", "evict") else None
        for _ in range(20):
            self.fill()
            epoch = self.store.epoch
            if epoch is not None:
                names = _names.names(self.store.identity, epoch, self.keys)
                self.locate(names, self.store._client.call("batch_get_replica_desc", names))
                call = Call()
                load, found = self.load()
                stores = self.store.store([b"new %d" % time.time_ns()] * 4, self.want, range(4))
                if self.strike(kind, load.done):
                    break
                self.finish(call, load, stores)
        else:
            raise AssertionError("no load could be struck")
        self.finish(call, load, stores)
        given, row = self.compare(load, found), self.rows[kind]
        row.longest = max(row.longest, load.elapsed)
        call = Call()
        load, found = self.load()
        self.finish(call, load)
        after = self.compare(load, found)
        if kind == "flip":
            given = after
            assert given <= BLOCKS - len(self.struck_names), "a flipped block is a hit"
        row.given, row.missed = row.given + given, row.missed + BLOCKS - given
        call = Call()
        self.store.contains(self.keys)
        self.finish(call)
        self.mend(kind)

    def raw_round(self, kind: str) -> None:
        """The same over Mooncake's own client, from memory to memory, without headers."""
        self.raw = client = Raw(self.cluster, BLOCKS * (NBYTES + 64))
        self.filler = Raw(self.cluster) if kind == "evict" else None
        slots = client.memory.reshape(BLOCKS, -1)
        at = [client.memory.ctypes.data + i * slots.shape[1] for i in range(BLOCKS)]
        sizes = [slots.shape[1]] * BLOCKS
        for _ in range(50):
            names = [f"raw {time.time_ns()} {i}" for i in range(BLOCKS)]
            slots[:, :64], slots[:, 64:] = 0, self.want
            if set(client.store.batch_put_from(names, at, sizes)) != {0}:
                time.sleep(0.5)  # the master still knows a node that was killed
                continue
            self.locate(names, client.store.batch_get_replica_desc(names))
            slots.view(np.uint64)[:] = POISON
            self.calls = [(names, at)]
            begin = time.monotonic()
            get, codes = background(client.store.batch_get_into, names, at, sizes)
            if self.strike(kind, lambda get=get: not get.is_alive()):
                break
        else:
            raise AssertionError("no get could be struck")
        get.join(RAW_SECONDS)
        took = time.monotonic() - begin
        if kind == "flip":
            codes[:] = client.store.batch_get_into(names, at, sizes)
        given = [i for i, code in enumerate(codes) if code == sizes[0]]
        wrong = sum(not np.array_equal(slots[i][64:], self.want[i]) or slots[i][:64].any() for i in given)
        others = dict(Counter(code for code in codes if code != sizes[0]))
        print(f"{kind}: {took:.1f} s; {len(given)} given, {wrong} of them wrong; other codes {others}", flush=True)
        row = self.rows[kind]
        row.given, row.wrong, row.missed = row.given + len(given), row.wrong + wrong, row.missed + BLOCKS - len(given)
        row.longest = max(row.longest, took)
        self.mend(kind)

    def mend(self, kind: str) -> None:
        if kind.startswith("stop"):
            (self.cluster.nodes[self.struck] if "node" in kind else self.cluster.master).send_signal(signal.SIGCONT)
        elif kind == "kill node":
            self.cluster.nodes[self.struck].wait()
            self.cluster.nodes[self.struck] = self.cluster.start_node()
        elif kind == "kill master":
            self.cluster.restart_master()
        elif kind == "flip":
            time.sleep(LEASE)  # then a store repairs what was damaged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS), help="in turn")
    parser.add_argument("--raw", action="store_true")
    args = parser.parse_args()
    _store.LEASE_SECONDS = LEASE
    begin, kinds = time.monotonic(), args.kinds.split(",")
    with tempfile.TemporaryDirectory() as folder:
        faults = Faults(Path(folder), args.seed)
        try:
            for i in range(args.faults):
                (faults.raw_round if args.raw else faults.round)(kinds[i % len(kinds)])
                if i % 10 == 9:
                    print(f"{i + 1} faults, {time.monotonic() - begin:.0f} s", flush=True)
            try:
                call = Call()
                if faults.store is not None:
                    faults.store.close()
                faults.finish(call)
            except Error as error:
                print(error)
        finally:
            faults.cluster.close()
    print(f"seed {args.seed}, {args.faults} faults, {time.monotonic() - begin:.0f} s")
    for kind, row in faults.rows.items():
        print(f"{kind}: {row}")
    if not args.raw:
        print(f"the longest call took {faults.worst:+.2f} s more than its limit; {threading.active_count()} threads")


if __name__ == "__main__":
    main()
