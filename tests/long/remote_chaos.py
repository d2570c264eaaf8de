"""Faults in the remote tier, by the clock or by the number of kills. Needs NIXL.

    UCX_TLS=tcp python tests/long/remote_chaos.py [--seconds 60] [--kills 500] [--cut] [--seed 1]

Two nodes in processes of their own; clients in threads store and load blocks without pause, in a pool that is too small
for all keys. Meanwhile nodes are killed (kill -9) and started again, stopped and continued, their memory is damaged by
another NIXL agent, blocks are deleted, and a client with other messages knocks. With --cut, as root and best in a
network namespace of its own, their TCP connections are cut, too. With --kills a node is killed in the
middle of a transfer, until that has been so many times, and how long the transfers take to end is told.

Each load is checked: a block has the bytes of its key in one version that was stored, or is reported as missing and its
memory is unchanged. A transfer that has not ended after 30 s is a hang. Exit status 1: a wrong block, or a hang.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import kvswap
from kvswap.files import Layout
from kvswap.remote import RemoteStore, new_secret, write_secret
from kvswap.remote._agent import NixlAgent

WORDS = 1 << 15  # of a block: 256 KiB
KEYS = 96
SLOTS = 48  # of a node
HANG = 30.0
PLACES = np.arange(WORDS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def block(key: int, version: int) -> Any:
    return PLACES ^ np.uint64(key << 32 | version)


class Node:
    """A process that is killed and started again on the same port."""

    def __init__(self, folder: Path, name: str, allowed: Path) -> None:
        self.key, self.allowed, self.name = folder / name, allowed, name
        self.pair = new_secret()
        write_secret(self.key, self.pair)
        self.bind, self.line = "127.0.0.1:0", ""
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "kvswap", "remote", "serve", "--bind", self.bind, "--block", str(8 * WORDS)]
        command += ["--blocks", str(SLOTS), "--key", str(self.key), "--clients", str(self.allowed), "--name", self.name]
        end = time.monotonic() + 60
        while True:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert self.process.stdout is not None
            self.line = self.process.stdout.readline()
            if self.line:
                break
            self.process.wait()  # the port is not free yet
            if time.monotonic() > end:
                raise SystemExit("a node does not start")
        self.bind = self.line.split()[0]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


class Count:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values: dict[str, int] = {}
        self.slowest = 0.0

    def add(self, **values: int) -> None:
        with self.lock:
            for name, value in values.items():
                self.values[name] = self.values.get(name, 0) + value


def look_at(data: Any, numbers: Any, load: Any, newest: int, count: Count) -> None:
    """What was loaded."""
    failed = set(load.failed_blocks.tolist())
    for i, key in enumerate(numbers.tolist()):
        if i in failed:
            count.add(missed=1, wrong=int((data[i] != 0).any()))
            continue
        tag = int(data[i, 0])
        right = tag >> 32 == key and tag & 0xFFFFFFFF <= newest and (data[i] == block(key, tag & 0xFFFFFFFF)).all()
        count.add(right=1) if right else count.add(wrong=1)


class Versions:
    def __init__(self) -> None:
        self.newest = 0
        self.lock = threading.Lock()

    def next(self) -> int:
        with self.lock:
            self.newest += 1
            return self.newest


def client(store: Any, seed: int, stop: threading.Event, versions: Versions, count: Count) -> None:
    rng = np.random.default_rng(seed)
    while not stop.is_set():
        numbers = rng.choice(KEYS, 8, replace=False)
        keys = [b"%d" % number for number in numbers]
        what = rng.random()
        begin = time.monotonic()
        try:
            if what < 0.4:
                version = versions.next()
                data = np.stack([block(int(number), version) for number in numbers])
                transfer = store.store(keys, data, range(8))
            elif what < 0.98:
                data = np.zeros((8, WORDS), np.uint64)
                transfer = store.load(keys, data, range(8))
            else:
                transfer = store.delete(keys[:2])
        except kvswap.QueueFull:
            count.add(queue_full=1)
            time.sleep(0.01)
            continue
        if not transfer._ended.wait(HANG):
            count.add(hangs=1)
            continue
        with count.lock:
            count.slowest = max(count.slowest, time.monotonic() - begin)
        if transfer.what == "load":
            look_at(data, numbers, transfer, versions.newest, count)
        else:
            count.add(**{transfer.what: transfer.num_blocks, f"{transfer.what}_failed": transfer.failed_blocks.size})


def damage(store: Any, agent: Any, rng: random.Random, count: Count) -> None:
    """Write a few bytes somewhere into a node's pool, as a hostile or broken peer can."""
    peer = rng.choice(list(store._peers.values()))
    welcome = peer.welcome
    if welcome is None:
        return
    memory = np.frombuffer(rng.randbytes(64), np.uint8).copy()
    agent.register(memory.ctypes.data, 64)
    try:
        agent.add(welcome.metadata)
        at = welcome.base + rng.randrange(welcome.slots) * welcome.stride + rng.randrange(welcome.stride - 64)
        local, remote = (np.array([address], np.uint64) for address in (memory.ctypes.data, at))
        handle = agent.begin("WRITE", welcome.agent, local, remote, 64)
        end = time.monotonic() + 2
        while agent.running(handle) and time.monotonic() < end:
            time.sleep(0.001)
        agent.end(handle)
        count.add(damages=1)
    except Exception as error:  # the node has died meanwhile
        count.add(**{f"damage_{type(error).__name__}": 1})
    agent.kept.append(memory)


def cut(node: Node, rng: random.Random, count: Count) -> None:
    """Reset one or more of a node's TCP connections, those of control messages and those of bytes alike."""
    listing = subprocess.run(["ss", "-tnpH", "state", "established"], capture_output=True, text=True, check=True).stdout
    ports = [line.split()[2].rpartition(":")[2] for line in listing.splitlines() if f"pid={node.process.pid}," in line]
    for port in rng.sample(ports, min(len(ports), rng.randint(1, 4))):
        killed = subprocess.run(["ss", "-KtH", f"sport = :{port}"], capture_output=True, text=True, check=False).stdout
        count.add(cuts=len(killed.splitlines()))


def knock(store: Any, pair: Any) -> None:
    """A client that says nonsense, and one with another version."""
    import zmq

    from kvswap.remote import _messages as m

    context = zmq.Context()
    for peer in list(store._peers.values()):
        socket = context.socket(zmq.DEALER)
        socket.linger = 200
        socket.curve_serverkey = peer.node.key.encode()
        socket.curve_publickey, socket.curve_secretkey = pair.public.encode(), pair.secret.encode()
        socket.connect(f"tcp://{peer.node.address}")
        for data in (b"nonsense", m.encode(m.Hello(1, 99, 8 * WORDS)), m.encode(m.Locate(2, b"x" * 16))):
            socket.send(data)
        socket.close()
    context.term()


def chaos(nodes: list[Node], store: Any, pair: Any, args: argparse.Namespace) -> Count:
    count, stop, versions, rng = Count(), threading.Event(), Versions(), random.Random(args.seed)
    threads = [
        threading.Thread(target=client, args=(store, args.seed * 100 + i, stop, versions, count)) for i in range(3)
    ]
    for thread in threads:
        thread.start()
    agent: Any = NixlAgent(f"hostile-{os.getpid()}")
    agent.kept = []
    end = told = time.monotonic()
    end += args.seconds
    while time.monotonic() < end:
        time.sleep(rng.random() * 0.5)
        what = rng.random()
        node = rng.choice(nodes)
        if what < 0.15:
            node.kill()
            time.sleep(rng.random())
            node.start()
            count.add(kills=1)
        elif what < 0.35:
            node.signal(signal.SIGSTOP)
            time.sleep(rng.random() * 1.5)
            node.signal(signal.SIGCONT)
            count.add(stops=1)
        elif what < 0.5 and args.cut:
            cut(node, rng, count)
        elif what < 0.9:
            damage(store, agent, rng, count)
        else:
            knock(store, pair)
            count.add(knocks=1)
        if time.monotonic() > told + 60:
            told = time.monotonic()
            print(f"{told - end + args.seconds:6.0f} s: {count.values}, slowest {count.slowest:.2f} s", flush=True)
    stop.set()
    for thread in threads:
        thread.join(2 * HANG)
        count.add(hangs=int(thread.is_alive()))
    return count


def kills(nodes: list[Node], store: Any, args: argparse.Namespace) -> Count:
    """Each time loads and stores of 12 MiB each have begun. The time of the kill is drawn from what a store takes."""
    count, times, rng = Count(), [], random.Random(args.seed)
    numbers = np.arange(SLOTS)
    keys = [b"%d" % number for number in numbers]
    version = -1
    while len(times) < args.kills:
        version += 1
        node = rng.choice(nodes)
        if store.wait_nodes(timeout=HANG) != len(nodes):
            count.add(never_returned=1)
        data = np.stack([block(int(each), version) for each in numbers])
        begin = time.monotonic()
        store.store(keys, data, numbers)._ended.wait(HANG)
        spread = time.monotonic() - begin
        begun = [(store.load(keys, to, numbers), to) for to in (np.zeros_like(data), np.zeros_like(data))]
        begun += [(store.store(keys, data, numbers), None) for _ in range(2)]
        time.sleep(rng.random() * spread)
        under_way = [transfer for transfer, _ in begun if not transfer.done()]
        node.process.kill()
        begin = time.monotonic()
        count.add(hangs=sum(not transfer._ended.wait(HANG) for transfer, _ in begun), kills=1)
        if under_way:
            times.append(time.monotonic() - begin)
            count.add(with_misses=int(any(each.failed_blocks.size for each in under_way)))
        for transfer, to in begun:
            if to is not None:
                look_at(to, numbers, transfer, version, count)
        begin = time.monotonic()
        again = np.zeros_like(data)
        load = store.load(keys, again, numbers)
        count.add(hangs=int(not load._ended.wait(HANG)))
        count.slowest = max(count.slowest, time.monotonic() - begin)
        look_at(again, numbers, load, version, count)
        node.process.wait()
        node.start()
        if version % 20 == 19:
            print(f"{len(times)} kills in mid-transfer: {count.values}, longest {max(times):.2f} s", flush=True)
    times.sort()
    print(
        f"{len(times)} kills in mid-transfer; from kill -9 to the end of all that was under way: median "
        f"{times[len(times) // 2]:.3f} s, longest {times[-1]:.3f} s, over 1 s: {sum(each > 1 for each in times)}"
    )
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--kills", type=int, help="only kill nodes in mid-transfer, so many times")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cut", action="store_true", help="connections are cut, too (root and ss)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, pair = Path(name), new_secret()
        allowed = folder / "allowed"
        allowed.write_text(pair.public + "\n")
        allowed.chmod(0o600)
        nodes = [Node(folder, f"node{i}", allowed) for i in range(2)]
        (folder / "nodes").write_text("".join(node.line for node in nodes))
        store = RemoteStore(folder / "nodes", Layout(8 * WORDS), key=pair, replicas=1, queue=16, timeout=3.0)
        print(
            f"UCX_TLS {os.environ.get('UCX_TLS', 'default')}, seed {args.seed}: {store.wait_nodes()} nodes", flush=True
        )
        begin = time.monotonic()
        try:
            count = kills(nodes, store, args) if args.kills else chaos(nodes, store, pair, args)
        finally:
            for node in nodes:
                node.kill()
        print(f"after {time.monotonic() - begin:.0f} s: {dict(sorted(count.values.items()))}")
        print(f"slowest call {count.slowest:.2f} s; staging free {len(store._staging._free)} of {store._staging.count}")
        print(f"store: {store.counts}")
        store.close(5)
    bad = count.values.get("wrong", 0) + count.values.get("hangs", 0)
    print(f"{count.values.get('wrong', 0)} wrong blocks, {count.values.get('hangs', 0)} hangs")
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
