"""The remote tier beside NIXL itself: the same blocks from and to the same node's memory, in the same run.

    python benchmarks/bench_remote.py [--block 2MiB] [--blocks 32] [--runs 15]     (UCX_TLS=tcp: without shared memory)

The node is a process of this machine (kvswap remote serve). NIXL's own transfer is one READ or WRITE of all blocks, by
the same agents and between the same registered memories, without checksum, control message or copy. The store's calls
go the whole way: placement, control messages, NIXL, header and checksum of each block, copy to the caller's memory;
every byte is compared afterwards, outside of the timed part. They take turns. s: seconds of this process's processor a
GB. Then where the store's time goes: seconds a GB of its threads together, in NIXL's calls, in sealing and checking
blocks, and in waiting for the node's answers. Look-ups are of 1,000 keys over tcp.

--piece: what the store moves at once.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np

import kvswap
from kvswap import _C
from kvswap.files import Layout
from kvswap.remote import RemoteStore, _store, new_secret, write_secret
from kvswap.remote._messages import Abort, Claim
from kvswap.replay.units import parse_size

WAIT = 120.0
Result: TypeAlias = "tuple[float, float]"


@contextmanager
def node(folder: Path, block_nbytes: int, blocks: int, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A node; its line is in `nodes`, the client's key in `client`."""
    client = new_secret()
    if not (folder / "client").exists():
        write_secret(folder / "client", client)
        write_secret(folder / "node", new_secret())
        (folder / "allowed").write_text(client.public + "\n")
        (folder / "allowed").chmod(0o600)
    command = [sys.executable, "-m", "kvswap", "remote", "serve", "--bind", "127.0.0.1:0", "--block", str(block_nbytes)]
    command += ["--blocks", str(blocks), "--key", str(folder / "node"), "--clients", str(folder / "allowed"), *more]
    env = os.environ | {"PYTHONSAFEPATH": "1"}  # not the sources, where this runs among them
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the node did not start")
        (folder / "nodes").write_text(line)
        try:
            yield process
        finally:
            process.terminate()


class Clock:
    """GB/s, and seconds of this process's processor a GB, since it was made."""

    def __init__(self, nbytes: int) -> None:
        self.gb, self.begin, self.used = nbytes / 1e9, time.perf_counter(), time.process_time()

    def read(self) -> Result:
        return self.gb / (time.perf_counter() - self.begin), (time.process_time() - self.used) / self.gb


class Parts:
    """Where the store's threads spend their time."""

    def __init__(self, store: Any) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.wrap(store._agent, "in NIXL", "begin", "running")
        self.wrap(store._link, "waiting for the node", "answer")
        extension = SimpleNamespace(**vars(_C))
        vars(_store)["_C"] = extension
        self.wrap(extension, "sealing", "_remote_seal")
        self.wrap(extension, "checking", "_remote_check")

    def wrap(self, owner: Any, part: str, *names: str) -> None:
        for name in names:
            setattr(owner, name, functools.partial(self.timed, part, getattr(owner, name)))

    def timed(self, part: str, call: Any, *arguments: Any) -> Any:
        begin = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            self.seconds[part] += time.perf_counter() - begin

    def measure(self, ours: Ours, runs: int) -> None:
        for operation in ("WRITE", "READ"):
            self.seconds.clear()
            found = [1 / ours.move(operation)[0] for _ in range(runs)]
            gb = runs * ours.source.nbytes / 1e9
            parts = ", ".join(f"{name} {seconds / gb:.3f}" for name, seconds in sorted(self.seconds.items()))
            what = "store" if operation == "WRITE" else "load"
            print(f"{what:<6} {statistics.median(found):.3f} s a GB; in all threads: {parts}", flush=True)


class Bare:
    """NIXL without kvswap: the store's agent, its staging memory, and slots of the node that are claimed meanwhile."""

    def __init__(self, store: Any, block_nbytes: int, blocks: int) -> None:
        self.store, self.nbytes, self.blocks = store, block_nbytes, blocks
        self.peer = next(iter(store._peers.values()))

    def move(self, operation: Any) -> Result:
        store, welcome = self.store, self.peer.welcome
        names = np.random.default_rng().bytes(16 * self.blocks)
        places = store._request(self.peer, lambda number: Claim(number, names, True))
        slots = np.frombuffer(places.slots, "<i8")
        if (slots < 0).any():
            raise SystemExit(f"no slots for NIXL alone: {slots}")
        staged = store._staging.take(self.blocks, time.monotonic() + WAIT)
        assert len(staged) == self.blocks
        local = store._staging.addresses(staged)
        remote = np.uint64(welcome.base) + slots.astype(np.uint64) * np.uint64(welcome.stride)
        clock = Clock(self.blocks * self.nbytes)
        handle = store._agent.begin(operation, welcome.agent, local, remote, self.nbytes)
        while store._agent.running(handle):
            time.sleep(0.00005)
        result = clock.read()
        store._agent.end(handle)
        store._staging.give(staged)
        store._link.tell(self.peer, Abort(places.generations, True))
        return result


class Ours:
    def __init__(self, store: Any, block_nbytes: int, blocks: int) -> None:
        self.store, self.blocks = store, blocks
        self.source = np.random.default_rng(2).integers(0, 256, (blocks, block_nbytes), np.uint8)
        self.to = np.zeros_like(self.source)
        self.round = 0

    def move(self, operation: str) -> Result:
        if operation == "WRITE":
            self.round += 1
        keys = [b"%d-%d" % (self.round, i) for i in range(self.blocks)]
        self.to[:] = 0
        clock = Clock(self.source.nbytes)
        if operation == "WRITE":
            self.store.store(keys, self.source, range(self.blocks), replace=False).wait(WAIT)
        else:
            self.store.load(keys, self.to, range(self.blocks)).wait(WAIT)
        result = clock.read()
        if operation == "READ" and not (self.to == self.source).all():
            raise SystemExit("WRONG BYTES")
        return result


def measure(store: Any, ours: Ours, block_nbytes: int, blocks: int, runs: int) -> None:
    bare = Bare(store, block_nbytes, blocks)
    found: dict[str, list[tuple[float, float]]] = {"WRITE": [], "READ": []}
    used: dict[tuple[str, int], list[float]] = defaultdict(list)
    for run in range(-2, runs):  # the first two are not counted: connections are made
        for operation, pairs in found.items():
            first, second = (bare, ours) if run % 2 else (ours, bare)
            speeds = {}
            for each in (first, second):
                speeds[id(each)], processor = each.move(operation)
                used[operation, id(each)].append(processor)
            if run >= 0:
                pairs.append((speeds[id(bare)], speeds[id(ours)]))
    for operation, pairs in found.items():
        own = statistics.median(pair[0] for pair in pairs)
        mine = statistics.median(pair[1] for pair in pairs)
        ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
        cpu = [statistics.median(used[operation, id(each)]) for each in (bare, ours)]
        what = "store" if operation == "WRITE" else "load"
        print(
            f"{what:<6} NIXL alone {own:6.2f} GB/s {cpu[0]:5.2f} s | kvswap {mine:6.2f} GB/s {cpu[1]:5.2f} s | "
            f"of the medians {mine / own:.2f}, median of the pairs' ratios {ratio:.2f}",
            flush=True,
        )


def look_up(store: Any, runs: int) -> None:
    keys = [b"look-up-%d" % i for i in range(1000)]
    times = []
    for _ in range(runs * 10):
        begin = time.perf_counter()
        store.contains(keys)
        times.append(time.perf_counter() - begin)
    times.sort()
    middle, late = (times[int(len(times) * part)] * 1e3 for part in (0.5, 0.99))
    print(f"contains() of 1,000 keys: median {middle:.2f} ms, p99 {late:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block", type=parse_size, default=2 << 20)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--piece", type=parse_size, default=_store._PIECE_NBYTES)
    args = parser.parse_args()
    _store._PIECE_NBYTES = args.piece
    load = os.getloadavg()[0]
    print(
        f"kvswap {kvswap.__version__}, {os.cpu_count()} processors, load average {load:.1f}, UCX_TLS "
        f"{os.environ.get('UCX_TLS', 'default')}, {args.blocks} blocks of {args.block:,} bytes, {args.runs} runs, "
        f"pieces of {args.piece:,}",
        flush=True,
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(node(folder, args.block, 4 * args.blocks))
        room = (args.blocks + 1) * (args.block + 128)
        store = RemoteStore(folder / "nodes", Layout(args.block), key=folder / "client", staging_nbytes=room)
        stack.enter_context(store)
        if store.wait_nodes(timeout=WAIT) != 1:
            raise SystemExit(f"the node is not up: {store.stats()}")
        ours = Ours(store, args.block, args.blocks)
        measure(store, ours, args.block, args.blocks, args.runs)
        Parts(store).measure(ours, args.runs)
        look_up(store, args.runs)
        print("blocks:", {name: value for name, value in store.counts.items() if value})


if __name__ == "__main__":
    main()
