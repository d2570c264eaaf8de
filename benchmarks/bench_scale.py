"""`kvswap simulate` beside what it simulates, in pairs: the same trace and tiers by `kvswap replay`, on real links.

    python benchmarks/bench_scale.py one [--pairs 5] [--trace TRACE]   # one node: a host device with a paced link
    python benchmarks/bench_scale.py two [--pairs 5] [--trace TRACE]   # two processes, a limited network (root, NIXL)

Each pair measures the link first, by means that are not the replay's, and gives the simulation what it measured: `one`
by transfers of 1 to 64 blocks, `two` by NIXL alone (bench_remote.py) and look-ups of one key; a line through the times
is latency and rate. `two` makes two network namespaces, joined by a veth
pair with a token bucket filter on each end: UCX has no other way between the processes. The links are slow enough that
two processors are not the limit. What must agree within 10 % is the median of the pairs' ratios: of means and
percentiles, and, since both sides have the same calls in the same order, of single calls (their median a pair).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import kvswap

GOAL = 0.10
BLOCK, SMALL = 32 << 10, 8 << 10  # of one node; of two processes
SIZES = [1, 4, 16, 64]  # blocks
PACE = "0.01"  # GB/s
ONE = ["--allow-tiny", "--gpu-blocks", "64", "--host-blocks", "1000"]
TWO = ["--allow-tiny", "--gpu-blocks", "64", "--host-blocks", "128"]
REMOTE = 2000
TRACE = str(Path(kvswap.__file__).parent / "data" / "demo_trace.jsonl.gz")  # 488 requests


RAW = "raw: "


def real_replay(*args: str, within: Sequence[str] = (), **environment: str) -> dict[str, Any]:
    """A replay in a process of its own: what raw() prints."""
    full = [*within, sys.executable, __file__, "raw", "replay", *args, "--device", "host:0"]
    done = subprocess.run(full, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **environment})
    found: dict[str, Any] = json.loads(done.stdout[done.stdout.index(RAW) + len(RAW) :])
    return found


def raw(arguments: list[str]) -> None:
    """A replay in this process, which prints each of its transfers. The loads of all blocks at its end are left out."""
    from kvswap import cli
    from kvswap.replay import run

    found: dict[str, Any] = {}

    class Raw(run.Replay):
        def _sweep_files(self) -> None:
            report = self.report
            hits = [report.gpu_hits, report.host_hits, report.file_hits, report.misses]
            found.update(hits=hits, seconds=time.monotonic() - self._start)
            near, far = (report.loads, report.stores), (report.file_loads, report.file_stores)
            for name, moves in zip(("near", "far"), (near, far), strict=True):
                found[name] = [list(each.seconds) for each in moves]

    run.Replay = Raw  # type: ignore[misc]
    status = cli.main(arguments)
    if status:
        raise SystemExit(status)
    print(RAW + json.dumps(found))


def simulated(*args: str) -> dict[str, Any]:
    """The same of `kvswap simulate`, run here."""
    from kvswap.cli import build_parser
    from kvswap.commands.simulate import settings_of
    from kvswap.replay.trace import read_trace
    from kvswap.simulate.run import simulate

    parsed = build_parser().parse_args(["simulate", *args])
    report = simulate(read_trace(parsed.trace), settings_of(parsed))
    hits = [report.gpu_hits, report.host_hits, report.own_hits + report.other_hits, report.misses]
    near, far = (report.host_loads, report.host_stores), (report.shared_loads, report.shared_stores)
    return {"hits": hits, "near": [list(each) for each in near], "far": [list(each) for each in far]}


def compare(pairs: Pairs, real: dict[str, Any], found: dict[str, Any], which: str, way: int) -> None:
    """Loads (way 0) or stores. Both have the same calls in the same order."""
    name = ("load", "store")[way]
    moves, model = np.array(real[which][way]) * 1e3, np.array(found[which][way]) * 1e3
    pairs.add(f"calls that {name}", len(moves), len(model))
    if len(moves) == len(model):
        pairs.add(f"{name}, each call, ratio", 1.0, float(np.median(model / moves)))
    pairs.add(f"{name}, mean, ms", float(moves.mean()), float(model.mean()))
    for percent in (50, 99):
        pairs.add(f"{name}, p{percent}, ms", *(float(np.percentile(each, percent)) for each in (moves, model)))


def compare_hits(pairs: Pairs, real: dict[str, Any], found: dict[str, Any]) -> None:
    names = ("GPU hits", "host hits", "remote hits", "computed")
    for name, *counts in zip(names, real["hits"], found["hits"], strict=True):
        pairs.add(f"{name}, blocks", *counts)


def line(times: list[float], block: int = BLOCK) -> list[float]:
    """Latency, and bytes a second, of transfers of SIZES blocks."""
    slope, latency = np.polyfit(np.array(SIZES) * block, times, 1, w=1 / np.array(times))
    return [max(1e-6, float(latency)), 1 / float(slope)]


def tell(number: int, real: dict[str, Any], *links: tuple[str, float, float]) -> None:
    told = ", ".join(f"{name} {rate / 1e6:.3f} MB/s + {latency * 1e3:.3f} ms" for name, latency, rate in links)
    print(
        f"pair {number}: load average {os.getloadavg()[0]:.1f}; {told}; the replay took {real['seconds']:.1f} s",
        flush=True,
    )


class Pairs:
    """Real and simulated figures by name."""

    def __init__(self) -> None:
        self.found: dict[str, list[tuple[float, float]]] = {}

    def add(self, name: str, real: float, simulated: float) -> None:
        self.found.setdefault(name, []).append((real, simulated))

    def tell(self) -> None:
        for name, pairs in self.found.items():
            real, simulated = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
            ratios = sorted(b / a if a else float(a == b) for a, b in pairs)
            ratio = statistics.median(ratios)
            met = "met" if abs(ratio - 1) <= GOAL else "MISSED"
            print(
                f"{name:<24} real {real:>9,.2f}  simulated {simulated:>9,.2f}  median of the ratios {ratio:.3f} "
                f"({ratios[0]:.3f} to {ratios[-1]:.3f})  {met}",
                flush=True,
            )


# -- one node ---------------------------------------------------------------------------------------------------------


def measure_one() -> None:
    """In a process of its own, since the pace is read once: prints latency and rate of both directions."""
    from kvswap.replay import geometry

    shape = geometry.scale(geometry.named("llama-3.1-8b"), BLOCK, allow_tiny=True)
    (group,) = shape.groups
    count, layers = SIZES[-1], len(group.layers)
    gpu = [np.ones((count, group.layer_nbytes), np.uint8) for _ in range(layers)]
    host = np.ones((count, layers, group.layer_nbytes), np.uint8)
    device = kvswap.Device("host:0")
    result = []
    for direction in (1, 0):
        times = []
        for blocks in SIZES:
            ids = np.arange(blocks)
            taken = []
            for _ in range(5):
                transfer = kvswap.swap_cache_all_layers_async(
                    np.array([each.ctypes.data for each in gpu], np.uint64),
                    host.ctypes.data + np.arange(layers, dtype=np.uint64) * np.uint64(group.layer_nbytes),
                    group.layer_nbytes,
                    count,
                    count,
                    ids,
                    ids,
                    direction,
                    cpu_stride=group.block_nbytes,
                    device=device,
                    path="kernel",
                )
                transfer.wait(60)
                taken.append(transfer.elapsed or 0.0)
            times.append(statistics.median(taken))
        result += line(times)
    print(json.dumps(result))


def one(args: argparse.Namespace) -> None:
    pairs = Pairs()
    same = [args.trace, "--bytes-per-block", str(BLOCK), "--in-flight", "1", *ONE]
    for number in range(args.pairs):
        environment = {**os.environ, "KVSWAP_PACE_GBPS": PACE}
        measured = subprocess.run(
            [sys.executable, __file__, "measure-one"], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        h2d_latency, h2d, d2h_latency, d2h = json.loads(measured.stdout)
        real = real_replay(*same, "--path", "kernel", KVSWAP_PACE_GBPS=PACE)
        tell(number, real, ("H2D", h2d_latency, h2d), ("D2H", d2h_latency, d2h))
        for way, rate, latency in ((0, h2d, h2d_latency), (1, d2h, d2h_latency)):
            limits = ["--gpu-link", str(int(rate)), "--latency", f"{latency:.7f}", "--pool-blocks", "0"]
            found = simulated(*same, "--nodes", "1", "--gpus", "1", *limits)
            compare(pairs, real, found, "near", way)
        compare_hits(pairs, real, found)
    pairs.tell()


# -- two processes ----------------------------------------------------------------------------------------------------


def run(*args: str) -> None:
    subprocess.run(args, check=True)


class Network:
    """Two network namespaces with a rate-limited link between them."""

    def __init__(self, rate: str) -> None:
        self.names = [f"kvs{os.getpid()}{side}" for side in "ab"]
        self.devices = [f"kv{os.getpid()}{side}" for side in "ab"]
        for name in self.names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", self.devices[0], "type", "veth", "peer", "name", self.devices[1])
        for i, (name, device) in enumerate(zip(self.names, self.devices, strict=True)):
            run("ip", "link", "set", device, "netns", name)
            run(*self.within(i), "ip", "addr", "add", f"10.77.0.{i + 1}/24", "dev", device)
            for each in (device, "lo"):
                run(*self.within(i), "ip", "link", "set", each, "up")
            add = [*self.within(i), "tc", "qdisc", "add", "dev", device]
            run(*add, "root", "tbf", "rate", rate, "burst", "3000", "latency", "400ms")
            # One queue for all: behind large windows heartbeats come later than 0.6 s, and the node is down.
            for name in ("rmem", "wmem"):
                run(*self.within(i), "sysctl", "-q", "-w", f"net.ipv4.tcp_{name}=4096 32768 32768")

    def within(self, side: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[side]]

    def environment(self, side: int) -> dict[str, str]:
        return {"UCX_TLS": "tcp", "UCX_NET_DEVICES": self.devices[side]}

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def measure_two(nodes: str, key: str) -> None:
    """Prints what NIXL alone takes in this namespace, by a line through its times, and a look-up of one key."""
    from bench_remote import Bare

    from kvswap.files import Layout
    from kvswap.remote import RemoteStore

    with RemoteStore(nodes, Layout(SMALL), key=key) as store:
        if store.wait_nodes(timeout=30) != 1:
            raise SystemExit(f"the node is not up: {store.stats()}")
        result = []
        for operation in ("READ", "WRITE"):
            times = []
            for blocks in SIZES:
                gbps = [Bare(store, SMALL, blocks).move(operation)[0] for _ in range(4)][1:]
                times.append(blocks * SMALL / statistics.median(gbps) / 1e9)
            result += line(times, SMALL)
        times = []
        for i in range(100):
            begin = time.perf_counter()
            store.contains([b"%d" % i])
            times.append(time.perf_counter() - begin)
    print(json.dumps([*result, statistics.median(times)]))


def pair(number: int, network: Network, same: list[str], where: list[str], pairs: Pairs) -> None:
    own = [*network.within(1), sys.executable, __file__]
    there = {**os.environ, **network.environment(1)}
    measure = [*own, "measure-two", *where[1::2]]
    measured = subprocess.run(measure, stdout=subprocess.PIPE, text=True, check=True, env=there)
    *links, rtt = json.loads(measured.stdout.splitlines()[-1])
    real = real_replay(
        *same, *where, "--remote-blocks", str(REMOTE), within=network.within(1), **network.environment(1)
    )
    tell(number, real, ("from the node", *links[:2]), ("to it", *links[2:]))
    print(f"  look-up {rtt * 1e3:.2f} ms", flush=True)
    one_node = [*same, "--nodes", "1", "--store-nodes", "1", "--gpus", "1", "--stores", "evicted"]
    one_node += ["--pool-blocks", str(REMOTE), "--rtt", f"{rtt:.7f}"]
    for way, latency, rate in ((0, *links[:2]), (1, *links[2:])):
        found = simulated(*one_node, "--nic", str(int(rate)), "--latency", f"{latency:.7f}")
        compare(pairs, real, found, "far", way)
    compare_hits(pairs, real, found)


def two(args: argparse.Namespace) -> None:
    from kvswap.remote import new_secret, write_secret

    pairs = Pairs()
    same = [args.trace, "--bytes-per-block", str(SMALL), "--in-flight", "1", *TWO]
    with ExitStack() as stack:
        network = Network(args.rate)
        stack.callback(network.close)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        client = new_secret()
        write_secret(folder / "client", client)
        write_secret(folder / "node", new_secret())
        (folder / "allowed").write_text(client.public + "\n")
        (folder / "allowed").chmod(0o600)
        serve = [sys.executable, "-m", "kvswap", "remote", "serve", "--bind", "10.77.0.1:7400", "--block", str(SMALL)]
        serve += ["--blocks", str(REMOTE * 5 // 4), "--key", str(folder / "node"), "--clients", str(folder / "allowed")]
        node = subprocess.Popen(
            [*network.within(0), *serve],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **network.environment(0)},
        )
        stack.callback(node.wait)
        stack.callback(node.terminate)
        assert node.stdout is not None
        (folder / "nodes").write_text(node.stdout.readline())
        where = ["--remote", str(folder / "nodes"), "--remote-key", str(folder / "client")]
        for number in range(args.pairs):
            try:
                pair(number, network, same, where, pairs)
            except subprocess.CalledProcessError as error:
                print(f"pair {number} is left out: exit status {error.returncode}, see above", flush=True)
        pairs.tell()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function in (("one", one), ("two", two)):
        part = commands.add_parser(name)
        part.add_argument("--trace", default=TRACE, help="the one that ships with kvswap")
        part.add_argument("--pairs", type=int, default=5)
        part.add_argument("--rate", default="2mbit", help="of the network, for tc")
        part.set_defaults(run=function)
    commands.add_parser("measure-one").set_defaults(run=lambda args: measure_one())
    commands.add_parser("raw").set_defaults(run=None)
    part = commands.add_parser("measure-two")
    part.add_argument("nodes")
    part.add_argument("key")
    part.set_defaults(run=lambda args: measure_two(args.nodes, args.key))
    if sys.argv[1:2] == ["raw"]:
        raw(sys.argv[2:])
    else:
        args = parser.parse_args()
        args.run(args)


if __name__ == "__main__":
    main()
