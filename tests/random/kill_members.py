"""kill -9 and SIGSTOP at random points of members of a group that share their links (kvswap.share).

    python tests/random/kill_members.py --kills 500
    python tests/random/kill_members.py --kills 500 --codec exact
    python tests/random/kill_members.py --gpus 0 1 --kills 20

In each turn three members load or store, most often together by a name. In one of four turns one or two of them are
killed and join again, in another one is stopped for a while. What the others' loads brought must be right, and what a
store does not name as failed; a store that nobody disturbed names nothing. A member answers within a limit, and all
meet again.
--codec: the pools on the host are coded, and some blocks do not fit under `exact`: each store names these.
With GPUs, members take them in turn, and some are killed in each second turn, because a process takes seconds to begin.
Prints what it found as JSON: `slowest` is the longest that a load or store took in whose turn a member was killed, in
seconds, so that none was reported later than that after the kill. Ctrl-C ends it with a report, too. Exit status 1:
something was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import kvswap
from kvswap.codecs import Coding
from kvswap.memory import SharedPool

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "memory")]
from test_share import BLOCKS, LAYERS, PAGE, Rank, bf16  # noqa: E402

RANKS = (0, 1, 2)
BAD = [5, 60, 61, 200, 399]  # on the GPUs: `exact` does not hold them
LIMIT = 30.0  # seconds for an answer; a busy machine needs some


class Group:
    def __init__(self, chance: random.Random, devices: list[str], often: float, codec: str | None) -> None:
        """often: of the turns, how many have a kill; and how many a stop."""
        self.chance, self.devices, self.often, self.codec = chance, devices, often, codec
        self.name, self.wrong, self.slowest = f"kill{os.getpid()}", list[str](), 0.0
        self.bad = BAD if codec == "exact" else []
        self.counts = dict.fromkeys(("turns", "kills", "stops", "stores_in_part"), 0)
        coding = Coding(PAGE, codec) if codec else None
        slot = LAYERS * (coding.coded_nbytes if coding else PAGE)
        self.memory = SharedPool(self.name, BLOCKS, slot, layers=LAYERS, device=kvswap.Device("host:0"))
        rng = np.random.default_rng(5)
        for layer in range(LAYERS):
            blocks = rng.integers(0, 256, (BLOCKS, PAGE), dtype=np.uint8)
            self.memory.layer(layer)[:] = coding.encode(bf16(rng, (BLOCKS, PAGE // 2)))[0] if coding else blocks
        self.members = [self.member(rank) for rank in RANKS]
        self.meet()

    def member(self, rank: int) -> Rank:
        how: dict[str, Any] = {"device": self.devices[rank % len(self.devices)], "codec": self.codec, "bad": self.bad}
        return Rank(self.name, rank, stall=0.05, share_wait=0.05, store_wait=5.0, **how)

    def hear(self, rank: int, line: str) -> Any:
        """What it answered. A member that fails, or answers too late, is what is wrong."""
        one = self.members[rank]
        if not select.select([one.popen.stdout], [], [], LIMIT)[0]:
            self.wrong.append(f"turn {self.counts['turns']}: rank {rank} did not answer: {line}")
            return None
        try:
            return one.hear()
        except ValueError:
            self.wrong.append(f"turn {self.counts['turns']}: rank {rank} ended: {line}")
            return None

    def meet(self) -> None:
        line = f"member.wait_peers({list(RANKS)}, {LIMIT - 5})"
        for member in self.members:
            member.say(line)
        for rank in RANKS:
            self.hear(rank, line)

    def disturb(self) -> list[int]:
        """The ranks that were killed."""
        act, victim = self.chance.random(), self.chance.choice(RANKS)
        time.sleep(self.chance.random() * 0.02)
        if act < self.often:
            killed = self.chance.sample(RANKS, self.chance.choice((1, 1, 2)))
            self.counts["kills"] += len(killed)
            for rank in killed:
                self.members[rank].stop()
            return killed
        if act < 2 * self.often:
            self.counts["stops"] += 1
            self.members[victim].stop(signal.SIGSTOP)
            time.sleep(self.chance.random() * 0.3)
            self.members[victim].stop(signal.SIGCONT)
        return []

    def turn(self) -> None:
        self.counts["turns"] += 1
        kind, shared = self.chance.choice(["load", "load", "store"]), self.chance.random() < 0.7
        name = f", shared='k', generation={self.counts['turns']}, ranks={list(RANKS)}" if shared else ""
        line = f"[{kind}({self.counts['turns']}{name}), transfer.elapsed]"
        ranks = RANKS if shared or kind == "load" else (self.chance.choice(RANKS),)  # stores to the same blocks
        for rank in ranks:
            self.members[rank].say(line)
            if self.chance.random() < 0.2:
                time.sleep(self.chance.random() * 0.01)
        before = self.counts["kills"] + self.counts["stops"]
        killed = self.disturb()
        disturbed = self.counts["kills"] + self.counts["stops"] > before
        for rank in ranks:
            if rank not in killed and (answer := self.hear(rank, line)) is not None:
                self.check(rank, line, answer[0], disturbed)
                self.slowest = max(self.slowest, answer[1] if killed else 0.0)
        for rank in killed:
            self.members[rank].end()
            self.members[rank] = self.member(rank)
        if killed:
            self.meet()

    def check(self, rank: int, line: str, found: Any, disturbed: bool) -> None:
        named = set(found[1]) if line.startswith("[store") else set()
        unfit = self.unfit() if line.startswith("[store") else set()
        self.counts["stores_in_part"] += named > unfit
        if found[0] is not True or not named >= unfit or (named > unfit and not disturbed):
            self.wrong.append(f"turn {self.counts['turns']}: rank {rank}: {line}: {found}")

    def unfit(self) -> set[int]:
        """Positions of this turn's store that hold blocks which do not fit."""
        gpu = np.random.default_rng(self.counts["turns"]).permutation(BLOCKS)[: BLOCKS * 3 // 4]
        return set(np.flatnonzero(np.isin(gpu, self.bad)).tolist())

    def end(self) -> None:
        for member in self.members:
            member.stop()
            member.end()
        self.memory.close(LIMIT, force=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=1 << 30, help="end after so many turns")
    parser.add_argument("--kills", type=int, default=1 << 30, help="end after so many kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gpus", type=int, nargs="+", default=[], help="of the members, in turn; else host devices")
    parser.add_argument("--codec", help="of the pools on the host: exact, mxfp8 or fp4")
    asked = parser.parse_args()
    devices = [f"cuda:{gpu}" for gpu in asked.gpus] or [f"host:{rank}" for rank in RANKS]
    group = Group(random.Random(asked.seed), devices, 0.5 if asked.gpus else 0.25, asked.codec)
    begin = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        while not group.wrong and group.counts["turns"] < asked.turns and group.counts["kills"] < asked.kills:
            group.turn()
    group.end()
    found = {**group.counts, "slowest": round(group.slowest, 3), "wrong": group.wrong}
    print(
        json.dumps({"seed": asked.seed, "codec": asked.codec, **found, "seconds": round(time.monotonic() - begin, 1)})
    )
    return 1 if group.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
