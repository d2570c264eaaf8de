"""kill -9 and SIGSTOP at random points of engines that lend each other their links (kvswap_lend).

    python tests/random/kill_lenders.py TURNS SEED

In each turn three engines, with host memory of their own, store and load new blocks: of one in two parts, of two coded.
In one of four turns one of them is killed and starts again, in another one is stopped for a while. What each engine has
stored and loaded must be right: its own rows, and no byte beside its blocks. An engine answers within a limit, and at
the end all lend to each other. Prints what it found as JSON; exit status 1: something was wrong.
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

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "memory")]
from test_share_lend import BLOCKS, Other  # noqa: E402

ENGINES = 3
LIMIT = 60.0  # seconds for an answer; a busy machine needs some


class Engines:
    def __init__(self, chance: random.Random) -> None:
        self.chance, self.name, self.wrong = chance, f"kill{os.getpid()}", list[str]()
        self.counts = dict.fromkeys(("turns", "kills", "stops", "stored_by_others", "loaded_by_others"), 0)
        self.engines = [self.engine(i) for i in range(ENGINES)]

    def engine(self, i: int) -> Other:
        return Other(self.name, f"engine {i}", stall=0.05, parts=1 + i % 2, codec="exact" if i else "")

    def say(self, i: int, line: str) -> None:
        stdin = self.engines[i].popen.stdin
        assert stdin is not None
        stdin.write(line + "\n")
        stdin.flush()

    def hear(self, i: int, line: str) -> Any:
        stdout = self.engines[i].popen.stdout
        assert stdout is not None
        answer = stdout.readline() if select.select([stdout], [], [], LIMIT)[0] else ""
        if answer:
            return json.loads(answer)
        self.wrong.append(f"turn {self.counts['turns']}: engine {i} did not answer: {line}")
        return None

    def disturb(self) -> int | None:
        """The engine that was killed."""
        act, victim = self.chance.random(), self.chance.randrange(ENGINES)
        time.sleep(self.chance.random() * 0.03)
        popen = self.engines[victim].popen
        if act < 0.25:
            self.counts["kills"] += 1
            popen.send_signal(signal.SIGKILL)
            return victim
        if act < 0.5:
            self.counts["stops"] += 1
            popen.send_signal(signal.SIGSTOP)
            time.sleep(self.chance.random() * 0.3)
            popen.send_signal(signal.SIGCONT)
        return None

    def turn(self) -> None:
        self.counts["turns"] += 1
        lines = [f"engine.check({self.chance.randint(1, BLOCKS)})" for _ in range(ENGINES)]
        for i, line in enumerate(lines):
            self.say(i, line)
        killed = self.disturb()
        for i, line in enumerate(lines):
            answer = self.hear(i, line) if i != killed else None
            if answer is not None:
                self.counts["stored_by_others"] += answer[0]
                self.counts["loaded_by_others"] += answer[1]
        if killed is not None:
            self.engines[killed].kill()
            self.engines[killed] = self.engine(killed)

    def end(self) -> None:
        until = time.monotonic() + LIMIT
        line = "[len(engine.lending.member.peers), len(engine.lent())]"
        for i in range(ENGINES):
            found = None
            while found != [ENGINES - 1] * 2 and time.monotonic() < until and not self.wrong:
                self.say(i, line)
                found = self.hear(i, line)
                time.sleep(0.05)
            if found != [ENGINES - 1] * 2 and not self.wrong:
                self.wrong.append(f"at the end engine {i} has {found} lenders and loans")
        for i, engine in enumerate(self.engines):
            if self.wrong:
                engine.kill()
            elif engine.end():
                self.wrong.append(f"engine {i} ended with {engine.popen.returncode}")


def main() -> int:
    turns, seed = map(int, sys.argv[1:])
    engines = Engines(random.Random(seed))
    begin = time.monotonic()
    while engines.counts["turns"] < turns and not engines.wrong:
        engines.turn()
    engines.end()
    seconds = round(time.monotonic() - begin, 1)
    print(json.dumps({"seed": seed, **engines.counts, "seconds": seconds, "wrong": engines.wrong}))
    return int(bool(engines.wrong))


if __name__ == "__main__":
    sys.exit(main())
