"""Links shared by processes: python3 benchmarks/bench_share.py [--gpus 0 1 ...] [--codec exact] [--lend] [--own].

A process for each GPU, which sees no other GPU, and one pool on the host that all have registered. The first process
loads and stores while the others bring pieces over their links, in turns with one bare copy of as many bytes and with
bursts over its own link alone. Then the first two load and store at once, with and without lending. Blocks lie
scattered on the GPU, and on the host all layers of a block together. Last, all load the same blocks, each a part.
--codec: the blocks on the host are coded; all rates count bytes before coding, and the bare copy has as many. --lend:
each process has host memory of its own, as engines have (kvswap_lend in vLLM), which the others register; nothing is
loaded in parts. --own measures only what the second process's own transfers take, as bench_borrow.py --own does.
Medians of wall-clock time. Every byte is checked where it lands; exit status 1: one was wrong. --host: host devices in
place of GPUs, to try the program.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

SHAPES = {"64x32k": (64, 32 << 10), "80x8k": (80, 8 << 10), "61x36k": (61, 36 << 10)}
SLOTS = [(4 << 20, 4), (4 << 20, 6), (2 << 20, 6)]
LIMIT = 120.0


# -- a process ---------------------------------------------------------------------------------------------------------


class Worker:
    """Does what the program says, by lines of JSON: it has a cache on its device, and is a member of the group."""

    def __init__(self, device: str, rank: int) -> None:
        import kvswap

        self.device, self.rank = kvswap.Device(device), rank
        self.stream, self.turn = kvswap.Stream(self.device), 0
        self.member: Any = None
        self.rows: Any = None
        self.own: Any = None
        self.busy: Any = None

    def open(self, name: str, layers: int, page: int, blocks: int, own: bool, codec: str | None) -> dict[str, Any]:
        import numpy as np

        import kvswap
        from kvswap import share
        from kvswap.codecs import Coding
        from kvswap.memory import SharedPool

        begin = time.perf_counter()
        self.layers, self.page, self.blocks, self.slots = layers, page, blocks, 2 * blocks
        coding = Coding(page, codec) if codec else None
        self.kind: Literal["bytes", "coarse"] = "coarse" if codec else "bytes"  # coarse: which each codec gives back
        slot = layers * (coding.coded_nbytes if coding else page)
        if own:
            self.own_memory(slot, coding)
        else:
            self.memory = SharedPool(name, blocks, slot, create=self.rank == 0, layers=layers, device=self.device)
            self.host = share._pools_of(self.memory, [coding] * layers)
        took = time.perf_counter() - begin
        self.gpu = self.device.alloc(layers * self.slots * page)
        self.pools: list[kvswap.Pool] = []
        for i in range(layers):
            more: Any = {"group": self.pools[0]} if i else {}
            self.pools.append(kvswap.Pool(self.device, self.gpu.ptr + i * self.slots * page, self.slots, page, **more))
        rng = np.random.default_rng(self.rank)
        self.ids, self.all = rng.permutation(self.slots)[:blocks], np.arange(blocks)
        ptrs = self.gpu.ptr + np.add.outer(np.arange(layers) * self.slots, self.ids).ravel() * page
        self.ptrs, self.sizes = ptrs.astype(np.uint64), np.full(layers * blocks, page, np.uint64)
        self.nbytes = blocks * layers * page
        memory = self.device.alloc(self.nbytes), self.device.alloc(self.nbytes, host=True)
        self.bare = [kvswap.Pool(self.device, each, 1, self.nbytes) for each in memory]
        return {"rank": self.rank, "registered MiB": blocks * slot >> 20, "seconds": took}

    def own_memory(self, row: int, coding: Any) -> None:
        """As an engine's: a file without a name."""
        import numpy as np

        import kvswap

        self.row, page = row, row // self.layers
        self.fd = os.memfd_create("bench")
        os.ftruncate(self.fd, self.blocks * row)
        self.rows = np.frombuffer(mmap.mmap(self.fd, self.blocks * row), np.uint8)
        self.rows[:] = 0
        self.device.register(self.rows.ctypes.data, self.rows.nbytes)
        hosts: list[Any] = []
        for i in range(self.layers):
            more: Any = {"group": hosts[0]} if i else {}
            at = self.rows.ctypes.data + i * page
            hosts.append(kvswap.Pool(self.device, at, self.blocks, page, stride=row, coding=coding, **more))
        self.host = tuple(hosts)

    def close(self) -> dict[str, Any]:
        self.bare, self.pools, self.host = [], [], ()
        if self.rows is None:
            self.memory.close(LIMIT)
        else:
            self.device.unregister(self.rows.ctypes.data)
            os.close(self.fd)
            self.rows = None
        return {}

    def lend(self, group: str, size: int, lend: bool, piece: int, slots: int, stall: float) -> dict[str, Any]:
        """Until all others lend to this process. lend False: it is the only engine of a name."""
        from kvswap.share import Place, _lend

        begin = time.perf_counter()
        there = os.fstat(self.fd)
        ptr = self.rows.ctypes.data
        place = Place(ptr, self.row, self.blocks, f"bench {there.st_dev}", there.st_ino, True)
        name, engine = group if lend else f"{group}.{self.rank}", f"engine {self.rank} of {os.getpid()}"
        self.lending = _lend.Lending(
            name, engine, place, tuple(self.pools), tuple(self.host), _lend.HostFile(self.fd, 0, ptr), lenders=15,
            piece_nbytes=piece, slots=slots, stall=stall,
        )  # fmt: skip
        self.member = self.lending.member
        wanted = size - 1 if lend else 0
        while len(self.member.peers) < wanted or sum(loan.lends for loan in self.lending.loans) < wanted:
            if time.perf_counter() - begin > LIMIT:
                raise SystemExit(f"{self.member.peers} lend to rank {self.rank}, and it makes {self.lending.loans}")
            time.sleep(0.01)
        registered = sum(loan.registered_nbytes for loan in self.lending.loans)
        return {"rank": self.rank, "seconds to meet": time.perf_counter() - begin, "MiB of others": registered >> 20}

    def lent(self) -> dict[str, Any]:
        brought = [list(loan.brought) for loan in self.lending.loans]
        return {"rank": self.rank, **self.member.stats(), "lent D2H, H2D": brought}

    def stop_lending(self) -> dict[str, Any]:
        self.lending.close(LIMIT)
        return {}

    def join(self, group: str, size: int, lend: bool, piece: int, slots: int, stall: float) -> dict[str, Any]:
        from kvswap import share

        begin = time.perf_counter()
        self.member = share.join(
            group, self.rank, self.memory, self.pools, host=self.host, lend=lend, slots=slots, piece_nbytes=piece,
            stall=stall,
        )  # fmt: skip
        self.member.wait_peers([rank for rank in range(size) if rank != self.rank], 30)
        return {"rank": self.rank, "join seconds": time.perf_counter() - begin}

    def leave(self) -> dict[str, Any]:
        stats = self.member.stats()
        self.member.close(LIMIT)
        return {"rank": self.rank, **stats}

    # -- moving ------------------------------------------------------------------------------------------------------

    def transfers(self) -> dict[tuple[str, str], Callable[[], Any]]:
        import kvswap

        move, one = kvswap.move_blocks, [0]
        return {
            ("copy", "D2H"): partial(move, self.bare[0], self.bare[1], one, one, path="dma"),
            ("copy", "H2D"): partial(move, self.bare[1], self.bare[0], one, one, path="dma"),
            ("burst", "D2H"): partial(move, self.pools, self.host, self.ids, self.all, path="burst"),
            ("burst", "H2D"): partial(move, self.host, self.pools, self.all, self.ids, path="burst"),
            ("share", "D2H"): partial(self.member.store, self.ids, self.all),
            ("share", "H2D"): partial(self.member.load, self.all, self.ids),
        }

    def shared_check(self, ranks: list[int], turn: int) -> dict[str, Any]:
        """Wrong words of a store and a load, both in parts; each rank writes the same bytes."""
        self.pattern(False, 100 + turn)
        self.member.store(self.ids, self.all, shared=f"store {turn}", ranks=ranks).wait(LIMIT)
        self.pattern(False, 101 + turn)
        transfer = self.member.load(self.all, self.ids, shared=f"check {turn}", ranks=ranks)
        transfer.wait(LIMIT)
        return {"wrong": self.pattern(True, 100 + turn), "by_others": transfer.by_others / transfer.nbytes}

    def shared(self, ranks: list[int], repeats: int, start: float) -> dict[str, Any]:
        """All ranks begin each load at times that they share: seconds until this one has it, from its own call."""
        times, others = [], 0
        for turn in range(-2, repeats):
            until = start + 0.1 * (turn + 2)
            while time.clock_gettime(time.CLOCK_MONOTONIC) < until:
                pass
            begin = time.perf_counter()
            transfer = self.member.load(self.all, self.ids, shared="load", generation=turn + 2, ranks=ranks)
            transfer.wait(LIMIT)
            if turn >= 0:
                times.append(time.perf_counter() - begin)
                others += transfer.by_others
        return {"GB/s": self.nbytes / statistics.median(times) / 1e9, "by others": others / repeats / self.nbytes}

    def fill(self, turn: int) -> dict[str, Any]:
        """The same blocks in each process. Two that store to one block at once would leave no coded block otherwise."""
        self.pattern(False, turn)
        return {}

    def pattern(self, check: bool, turn: int) -> int:
        import numpy as np

        from kvswap import _C

        keys = np.arange(self.ptrs.size, dtype=np.uint64) + np.uint64(1000003 * turn)
        return _C._pattern(self.device, check, self.ptrs, self.sizes, keys, self.stream, self.kind).result(LIMIT)[0]

    def check(self) -> dict[str, Any]:
        """Wrong words after a store and a load of new bytes."""
        ways, self.turn = self.transfers(), self.turn + 2
        self.pattern(False, self.turn)
        ways["share", "D2H"]().wait(LIMIT)
        self.pattern(False, self.turn + 1)
        ways["share", "H2D"]().wait(LIMIT)
        return {"wrong": self.pattern(True, self.turn)}

    def begin(self, way: str, turn: int) -> dict[str, Any]:
        """Store or load without a pause, two transfers at a time, each of half the blocks, until end()."""
        from bench_borrow import Busy

        self.pattern(False, turn)
        half = self.blocks // 2
        halves = itertools.cycle([(self.ids[:half], self.all[:half]), (self.ids[half:], self.all[half:])])
        move, order = (self.member.store, 1) if way == "D2H" else (self.member.load, -1)
        self.busy = Busy(lambda: move(*next(halves)[::order]))
        self.busy.__enter__()
        return {}

    def end(self) -> dict[str, Any]:
        self.busy.__exit__()
        return {}

    def wrong(self, turn: int) -> dict[str, Any]:
        return {"wrong": self.pattern(True, turn)}

    def own_window(self, most: int) -> dict[str, Any]:
        from bench_borrow import Own

        self.own = self.own or Own(self.device, most)
        return {"rows": self.own.window()}

    def measure(self, methods: list[str], ways: list[str], repeats: int) -> dict[str, Any]:
        times: dict[str, list[float]] = {}
        others = dict.fromkeys(ways, 0)
        calls = self.transfers()
        for turn in range(-1, repeats):
            for method in methods:
                for way in ways:
                    begin = time.perf_counter()
                    transfer = calls[method, way]()
                    transfer.wait(LIMIT)
                    if turn >= 0:
                        times.setdefault(f"{method} {way}", []).append(time.perf_counter() - begin)
                    if method == "share" and turn >= 0:
                        others[way] += transfer.by_others
        found = {key: self.nbytes / statistics.median(each) / 1e9 for key, each in times.items()}
        return {**found, **{f"by others {way}": others[way] / (repeats * self.nbytes) for way in ways}}


def work(device: str, rank: int) -> None:
    worker = Worker(device, rank)
    print(json.dumps({"device": worker.device.info["name"], "pci": worker.device.info.get("pci")}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(worker, command.pop("do"))(**command)
        print(json.dumps(answer), flush=True)
    if worker.member is not None:
        worker.member.close(LIMIT)


# -- the program -------------------------------------------------------------------------------------------------------


class Process:
    def __init__(self, gpu: int, rank: int, host: bool) -> None:
        device = f"host:{rank}" if host else "cuda:0"
        self.popen = subprocess.Popen(
            [sys.executable, __file__, "--work", device, str(rank)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **({} if host else {"CUDA_VISIBLE_DEVICES": str(gpu)})},
        )  # fmt: skip

    def tell(self, **command: Any) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(command) + "\n")
        self.popen.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            raise SystemExit(f"a process ended with {self.popen.wait(LIMIT)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        self.popen.communicate(timeout=LIMIT)


def say(**row: Any) -> None:
    print(json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}))
    sys.stdout.flush()


def all_do(processes: list[Process], **command: Any) -> list[dict[str, Any]]:
    for process in processes:
        process.tell(**command)
    return [process.hear() for process in processes]


def one_borrows(processes: list[Process], name: str, options: argparse.Namespace) -> int:
    wrong, first = 0, processes[0]
    for piece, slots in options.slots:
        how = {"size": len(processes), "lend": True, "piece": piece, "slots": slots, "stall": options.stall}
        joined = all_do(processes, do="lend" if options.lend else "join", group=f"bench{os.getpid()}", **how)
        first.tell(do="check")
        wrong += first.hear()["wrong"]
        first.tell(do="measure", methods=["copy", "burst", "share"], ways=["D2H", "H2D"], repeats=options.repeats)
        found = first.hear()
        for way in ("D2H", "H2D"):
            rates = {method: found[f"{method} {way}"] for method in ("copy", "burst", "share")}
            say(
                shape=name, codec=options.codec, slots=f"{slots} x {piece >> 20} MiB", dir=way,
                by_others=found[f"by others {way}"],
                **{f"{method} GB/s": rate for method, rate in rates.items()},
                of_copy=rates["share"] / rates["copy"], of_burst=rates["share"] / rates["burst"],
            )  # fmt: skip
        first.tell(do="check")
        wrong += first.hear()["wrong"]
        for join, stats in zip(joined, all_do(processes, do="lent" if options.lend else "leave"), strict=True):
            say(**{**join, **stats})
        if options.lend:
            all_do(processes, do="stop_lending")
    return wrong


def both_at_once(processes: list[Process], name: str, options: argparse.Namespace) -> int:
    rates: dict[bool, list[dict[str, Any]]] = {}
    two, (piece, slots) = processes[:2], options.slots[0]
    for lend in (False, True):
        how = {"size": 2, "lend": lend, "piece": piece, "slots": slots, "stall": options.stall}
        all_do(two, do="lend" if options.lend else "join", group=f"both{os.getpid()}", **how)
        all_do(two, do="fill", turn=1)
        for way in ("D2H", "H2D"):
            for rank, found in enumerate(all_do(two, do="measure", methods=["share"], ways=[way], repeats=9)):
                rates.setdefault(lend, [{}, {}])[rank].update(found)
        all_do(two, do="stop_lending" if options.lend else "leave")
    for way in ("D2H", "H2D"):
        alone, lending = ([each[f"share {way}"] for each in rates[lend]] for lend in (False, True))
        say(shape=name, codec=options.codec, both="at once", dir=way, alone=alone, lending=lending,
            ratios=[b / a for a, b in zip(alone, lending, strict=True)])  # fmt: skip
    return 0


def all_load_the_same(processes: list[Process], name: str, options: argparse.Namespace) -> int:
    """Each rank loads the same blocks of the host: bytes that a rank has a second, against its own link alone."""
    wrong, ranks = 0, list(range(len(processes)))
    for piece, slots in options.slots:
        how = {"size": len(processes), "lend": True, "piece": piece, "slots": slots, "stall": options.stall}
        all_do(processes, do="join", group="shared", **how)
        for turn in (0, 2):
            found = all_do(processes, do="shared_check", ranks=ranks, turn=turn)
            wrong += sum(one["wrong"] for one in found)
        alone = all_do(processes, do="measure", methods=["copy", "burst"], ways=["H2D"], repeats=options.repeats)
        start = time.clock_gettime(time.CLOCK_MONOTONIC) + 0.2
        together = all_do(processes, do="shared", ranks=ranks, repeats=options.repeats, start=start)
        rates = [one["GB/s"] for one in together]
        copies = [one["copy H2D"] for one in alone]
        say(
            shape=name, codec=options.codec, shared="load", slots=f"{slots} x {piece >> 20} MiB",
            **{"GB/s of each rank": rates},
            copy=copies, burst=[one["burst H2D"] for one in alone], by_others=[one["by others"] for one in together],
            of_copy=min(rate / copy for rate, copy in zip(rates, copies, strict=True)),
        )  # fmt: skip
        for stats in all_do(processes, do="leave"):
            say(**stats)
    return wrong


def own_transfers(processes: list[Process], name: str, options: argparse.Namespace) -> int:
    """What the second process's own transfers take, with and without the first one borrowing, in turns."""
    from bench_borrow import say_own

    def ask(process: Process, **command: Any) -> dict[str, Any]:
        return all_do([process], **command)[0]

    windows: dict[str, list[list[dict[str, Any]]]] = {"nothing": [], "D2H": [], "H2D": []}
    (first, second), wrong, (piece, slots) = processes[:2], 0, options.slots[0]
    how = {"size": 2, "lend": True, "piece": piece, "slots": slots, "stall": options.stall}
    all_do([first, second], do="lend" if options.lend else "join", group=f"own{os.getpid()}", **how)
    for turn in range(0, 2 * options.repeats, 2):
        windows["nothing"].append(ask(second, do="own_window", most=options.nbytes)["rows"])
        for i, way in enumerate(("D2H", "H2D")):
            ask(first, do="begin", way=way, turn=turn + i)
            windows[way].append(ask(second, do="own_window", most=options.nbytes)["rows"])
            ask(first, do="end")
        wrong += ask(first, do="wrong", turn=turn)["wrong"]
    wrong += say_own(windows, shape=name, slots=f"{slots} x {piece >> 20} MiB")
    all_do([first, second], do="stop_lending" if options.lend else "leave")
    return int(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", type=int, default=[0, 1], help="the borrower's, then lenders' (0 1)")
    parser.add_argument("--lend", action="store_true", help="each process has host memory of its own")
    parser.add_argument("--own", action="store_true", help="only what the second process's own transfers take")
    parser.add_argument("--host", action="store_true", help="host devices")
    parser.add_argument("--nbytes", type=int, default=1 << 30, help="of a transfer (default 1 GiB)")
    parser.add_argument("--shape", action="append", choices=tuple(SHAPES))
    parser.add_argument("--codec", help="of the blocks on the host: exact, mxfp8 or fp4")
    parser.add_argument("--slots", nargs=2, type=int, action="append", metavar=("NBYTES", "COUNT"))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--stall", type=float, default=0.02, help="seconds, as of join() (default 0.02)")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work[0], int(options.work[1]))
        return 0
    options.slots, wrong = options.slots or SLOTS, 0
    options.shape = options.shape or (["64x32k"] if options.own else list(SHAPES))
    processes = [Process(gpu, rank, options.host) for rank, gpu in enumerate(options.gpus)]
    for process in processes:
        say(**process.hear())
    for name in options.shape:
        layers, page = SHAPES[name]
        command = {"do": "open", "name": f"bench_share.{os.getpid()}", "layers": layers, "page": page,
                   "codec": options.codec}  # fmt: skip
        for process in processes:  # the first makes the pool
            process.tell(**command, own=options.lend, blocks=max(1, options.nbytes // (layers * page)))
            say(**process.hear())
        if options.own:
            wrong += own_transfers(processes, name, options)
        elif name != "61x36k" or options.lend:
            wrong += one_borrows(processes, name, options)
            wrong += both_at_once(processes, name, options)
        if not options.lend and not options.own:
            wrong += all_load_the_same(processes, name, options)
        for process in processes[::-1]:
            process.tell(do="close")
            process.hear()
    for process in processes:
        process.end()
    print(f"{wrong} wrong words")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
