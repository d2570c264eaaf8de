"""Two engines that lend each other their links (vllm_package.py --lend): separate regions of host memory, every byte
checked. The second engine is this program in another process, which does what it is told."""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import vllm_codec

LIMIT = 240.0  # seconds, with the start of an engine
MARK = "=> "


class Other:
    """The second engine."""

    def __init__(self, name: str) -> None:
        arguments = [each for each in sys.argv[1:] if each != "--lend"]
        program = os.path.join(os.path.dirname(__file__), "vllm_package.py")
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", program, *arguments, "--lend-name", name, "--lender"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def say(self, what: str, *args: Any) -> None:
        self.popen.stdin.write(json.dumps([what, *args]) + "\n")
        self.popen.stdin.flush()

    def hear(self) -> Any:
        line = "vLLM logs here too"
        while line and not line.startswith(MARK):
            line = self.popen.stdout.readline()
        assert line, f"the other engine ended with {self.popen.wait(LIMIT)}"
        return json.loads(line.removeprefix(MARK))

    def ask(self, what: str, *args: Any) -> Any:
        self.say(what, *args)
        return self.hear()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.communicate()

    def end(self) -> None:
        self.popen.communicate(timeout=LIMIT)
        assert self.popen.returncode == 0, self.popen.returncode


def serve(engine: Any, core: Callable[[], Any], prompt: Callable[[int, int], list[int]]) -> None:
    """The second engine, until its input ends."""
    cores: list[Any] = []
    for line in sys.stdin:
        what, *args = json.loads(line)
        if what == "again":
            engine.again(prompt(*args))
            answer: Any = engine.again(prompt(*args))
        elif what in ("sleep", "wake_up"):
            cores = cores or [core()]
            answer = getattr(cores[0], what)(*args)
        else:
            answer = engine.workers.call(what, *args)
        print(MARK + json.dumps(answer), flush=True)


def until(holds: Callable[[], Any]) -> Any:
    end = time.monotonic() + LIMIT
    while not (found := holds()):
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.02)
    return found


def brought(engine: Any) -> list[int]:
    """By others, stores and loads, on all ranks."""
    stats = engine.workers.call("shared")
    return [sum(one[f"brought_by_others_{way}"] for one in stats) for way in ("d2h", "h2d")]


def late(engine: Any) -> int:
    """Pieces that were given up, on all ranks: a busy machine's processes wait for a processor."""
    return sum(stats["pieces_late"] for stats in engine.workers.call("shared"))


def lent(other: Other) -> list[int]:
    """By the other engine, on all of its ranks to all ranks."""
    loans = [loan for of_rank in other.ask("lent") for loan in of_rank]
    return [sum(loan[3 + way] for loan in loans) for way in range(2)]


def large(engine: Any, other: Other, options: argparse.Namespace, say: Any, prompt: Any) -> None:
    """One large store and load: what the lender has counted is what the owner has got from it."""
    blocks = options.gpu_blocks - 10
    before, earlier, were_late = brought(engine), lent(other), late(engine)
    for seed in range(100, 140):
        engine.again(prompt(seed, blocks))
        assert engine.again(prompt(seed, blocks)) == blocks * 16
        got = [after - first for after, first in zip(brought(engine), before, strict=True)]
        if all(got):
            break
    assert all(got), got
    counted = [after - first for after, first in zip(lent(other), earlier, strict=True)]
    slack = (late(engine) - were_late) * 2 * options.layers * 4096  # brought too late, and by the own link as well
    for theirs, mine in zip(counted, got, strict=True):
        assert 0.95 * mine <= theirs <= 1.05 * mine + slack, (counted, got, slack)
    say(f"the other engine brought {got[0] >> 10} KiB of stores and {got[1] >> 10} of loads, and counted as much")


def scenario(engine: Any, options: argparse.Namespace, say: Any, prompt: Any, name: str) -> None:
    ranks = [options.ranks] * options.ranks
    assert brought(engine) == [0, 0]
    paths = {path for stats in engine.workers.call("stats") for path in stats["paths"]}
    assert "share" not in paths, "with no lender, jobs go as ever"
    other = Other(name)
    until(lambda: engine.workers.call("lenders") == ranks)
    until(lambda: other.ask("lenders") == ranks)
    say("another engine came, and each lends to the other")
    large(engine, other, options, say, prompt)
    if options.codec:
        stores = brought(engine)[0]
        vllm_codec.scenario(engine, options, say, prompt)
        assert brought(engine)[0] > stores, "the job with a block that does not fit"

    other.say("again", 7, 40)
    hits = [engine.again(prompt(200, 40)) for _ in range(3)]
    assert other.hear() == 40 * 16 and hits[1:] == [40 * 16] * 2, hits
    say("both at once: all tokens came from the host, all blocks checked")

    tokens = prompt(201, 40)
    engine.again(tokens)
    engine.forget_gpu()
    engine.external = 0
    engine.add(tokens)
    engine.step()
    other.kill()
    engine.run()
    assert engine.external == 40 * 16 and engine.stats("failed") == 0
    until(lambda: engine.workers.call("lenders") == [0] * options.ranks)
    assert engine.again(tokens) == 40 * 16
    say("the other engine was killed beside a load: all blocks came, and none failed")

    other = Other(name)
    until(lambda: engine.workers.call("lenders") == ranks)
    if options.naps:
        other.ask("sleep", 1, "abort")
        until(lambda: engine.workers.call("lenders") == [0] * options.ranks)
        assert engine.again(tokens) == 40 * 16
        other.ask("wake_up")
        until(lambda: engine.workers.call("lenders") == ranks)
        say("an engine that sleeps lends nothing until it wakes up")
    large(engine, other, options, say, prompt)
    other.end()
