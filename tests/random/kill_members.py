"""kill -9 and SIGSTOP at random points of members of a group that share their links (kvswap.share).

    python tests/random/kill_members.py TURNS SEED

In each turn three members load or store, most often together by a name. In one of four turns one of them is killed and
joins again, in another one is stopped for a while. What the others' loads brought must be right, and what a store does
not name as failed; a store that nobody disturbed names nothing. A member answers within a limit, and all meet again.
Prints what it found as JSON; exit status 1: something was wrong.
"""

from __future__ import annotations

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
from kvswap.memory import SharedPool

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "memory")]
from test_share import BLOCK, BLOCKS, LAYERS, PAGE, Rank  # noqa: E402

RANKS = (0, 1, 2)
LIMIT = 30.0  # seconds for an answer; a busy machine needs some


class Group:
    def __init__(self, chance: random.Random) -> None:
        self.chance, self.name, self.wrong = chance, f"kill{os.getpid()}", list[str]()
        self.counts = dict.fromkeys(("turns", "kills", "stops", "stores_in_part"), 0)
        self.memory = SharedPool(self.name, BLOCKS, BLOCK, layers=LAYERS, device=kvswap.Device("host:0"))
        rng = np.random.default_rng(5)
        for layer in range(LAYERS):
            self.memory.layer(layer)[:] = rng.integers(0, 256, (BLOCKS, PAGE), dtype=np.uint8)
        self.members = [self.member(rank) for rank in RANKS]
        self.meet()

    def member(self, rank: int) -> Rank:
        return Rank(self.name, rank, stall=0.05, share_wait=0.05, store_wait=5.0)

    def hear(self, rank: int, line: str) -> Any:
        one = self.members[rank]
        if not select.select([one.popen.stdout], [], [], LIMIT)[0]:
            self.wrong.append(f"turn {self.counts['turns']}: rank {rank} did not answer: {line}")
            return None
        return one.hear()

    def meet(self) -> None:
        line = f"member.wait_peers({list(RANKS)}, {LIMIT - 5})"
        for member in self.members:
            member.say(line)
        for rank in RANKS:
            self.hear(rank, line)

    def disturb(self) -> int | None:
        """The rank that was killed."""
        act, victim = self.chance.random(), self.chance.choice(RANKS)
        time.sleep(self.chance.random() * 0.02)
        if act < 0.25:
            self.counts["kills"] += 1
            self.members[victim].stop()
            return victim
        if act < 0.5:
            self.counts["stops"] += 1
            self.members[victim].stop(signal.SIGSTOP)
            time.sleep(self.chance.random() * 0.3)
            self.members[victim].stop(signal.SIGCONT)
        return None

    def turn(self) -> None:
        self.counts["turns"] += 1
        kind, shared = self.chance.choice(["load", "load", "store"]), self.chance.random() < 0.7
        name = f", shared='k', generation={self.counts['turns']}, ranks={list(RANKS)}" if shared else ""
        line = f"{kind}({self.counts['turns']}{name})"
        ranks = RANKS if shared or kind == "load" else (self.chance.choice(RANKS),)  # stores to the same blocks
        for rank in ranks:
            self.members[rank].say(line)
            if self.chance.random() < 0.2:
                time.sleep(self.chance.random() * 0.01)
        before = self.counts["kills"] + self.counts["stops"]
        killed = self.disturb()
        disturbed = self.counts["kills"] + self.counts["stops"] > before
        for rank in ranks:
            if rank != killed and (found := self.hear(rank, line)) is not None:
                self.check(rank, line, found, disturbed)
        if killed is not None:
            self.members[killed].end()
            self.members[killed] = self.member(killed)
            self.meet()

    def check(self, rank: int, line: str, found: Any, disturbed: bool) -> None:
        in_part = line.startswith("store") and bool(found[1])
        self.counts["stores_in_part"] += in_part
        if found[0] is not True or (in_part and not disturbed):
            self.wrong.append(f"turn {self.counts['turns']}: rank {rank}: {line}: {found}")

    def end(self) -> None:
        for member in self.members:
            member.stop()
            member.end()
        self.memory.close(LIMIT, force=True)


def main(turns: int, seed: int) -> int:
    group, begin = Group(random.Random(seed)), time.monotonic()
    while group.counts["turns"] < turns and not group.wrong:
        group.turn()
    group.end()
    report = {"seed": seed, **group.counts, "wrong": group.wrong, "seconds": round(time.monotonic() - begin, 1)}
    print(json.dumps(report))
    return 1 if group.wrong else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
