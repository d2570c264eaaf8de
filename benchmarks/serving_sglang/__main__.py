"""Compares SGLang's HiCache with its own copies and with kvswap's, in whole engines that take turns on one GPU.

    PYTHONPATH=benchmarks python3 -m serving_sglang --ways sglang,kvswap --out OUT

All engines start one after the other and stay; each phase is asked of one after the other (A, B, B, A, A, B ...), while
the others are idle. OUT/serving.jsonl gets a line as soon as something is measured, OUT/summary.txt the table. Exit
status 1: an engine or a phase failed, or a page was wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from serving.options import parser_of, values_of
from serving.process import Clock, Failed, Process

from serving_sglang import table
from serving_sglang.ways import LAYOUTS, NAMES, Sizes, split

ONCE = ("truth", "skipped", "store")
REPEATED = ("hits", "burst", "alone", "loads")
START, PHASE = 300.0, 120.0  # seconds


def parse() -> argparse.Namespace:
    """The command line."""
    parser = parser_of("serving_sglang", __doc__)
    add = parser.add_argument
    add("--ways", default="sglang,kvswap", help=f"of {', '.join(NAMES)}; NAME:LAYOUT of {', '.join(LAYOUTS)}")
    add("--phases", default=",".join((*ONCE, *REPEATED)), help="what to run")
    add("--pairs", type=int, default=5, help="how often what is repeated is, if there is time")
    add("--size", action="append", default=[], metavar="FIELD=VALUE", help="another value for a field of Sizes")
    add("--engine", action="append", default=[], metavar="NAME=VALUE", help="another argument of sglang.Engine")
    add("--toy", action="store_true", help="a look at the program, without a GPU")
    add("--out", type=Path, default=Path("serving-results"))
    add("--work", type=Path, default=Path("/tmp/kvswap-serving/run"), help="logs and models")
    add("--seconds", type=float, default=3600.0, help="for everything")
    return parser.parse_args()


class Comparison:
    """The engines."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.clock = options, Clock(options.seconds)
        self.lines: list[dict[str, Any]] = []
        self.engines: dict[str, Process] = {}
        self.given = {
            "toy": options.toy,
            "sizes": values_of(options.size, {each.name for each in fields(Sizes)} - {"model"}),
            "engine": values_of(options.engine),
        }

    def run(self) -> None:
        """Start, measure, end."""
        try:
            for way in self.options.ways.split(","):
                split(way)
                self._start(way)
            self._each("prepare")
            asked = self.options.phases.split(",")
            for phase in ONCE:
                if phase in asked:
                    self._each(phase)
            longest = 0.0
            for repeat in range(self.options.pairs):
                if self.clock.left() < 1.1 * longest + 5:
                    print(f"{repeat} of {self.options.pairs} turns, for want of time", flush=True)
                    break
                begin = time.monotonic()
                for phase in REPEATED:
                    if phase in asked:
                        self._each(phase, repeat)
                longest = max(longest, time.monotonic() - begin)
        finally:
            for engine in self.engines.values():
                engine.end()

    def _start(self, way: str) -> None:
        engine = self.engines[way] = Process(way, "sglang", self.given, self.options.work, "serving_sglang.child")
        try:
            self._note(way, about=engine.ready(min(START, self.clock.left())))
        except Failed as failed:
            self._drop(way, failed)

    def _each(self, phase: str, repeat: int | None = None) -> None:
        """A phase of all engines, one after the other."""
        ways = [*self.engines]
        for way in ways[::-1] if repeat and repeat % 2 else ways:
            if self.clock.left() < 5:
                return
            arguments = {} if repeat is None else {"repeat": repeat}
            try:
                limit = START if phase == "prepare" else PHASE  # kernels are built
                made = self.engines[way].ask(phase, min(limit, self.clock.left()), **arguments)
            except Failed as failed:
                self._drop(way, failed)
                continue
            self._note(way, phase=phase, repeat=repeat or 0, **made)

    def _note(self, way: str, **what: Any) -> None:
        line = {"regime": "sglang", "config": way, **what}
        self.lines.append(line)
        with (self.options.out / "serving.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if any(key in line for key in ("error", "failed", "about")):
            print(json.dumps(line), flush=True)
        (self.options.out / "summary.txt").write_text(table.tables(self.lines) + "\n")

    def _drop(self, way: str, failed: Failed) -> None:
        self._note(way, error=str(failed))
        engine = self.engines.pop(way)
        print(engine.tail(), flush=True)
        engine.end()


def main() -> int:
    """Until the time is over."""
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(options)
    comparison.run()
    print(table.tables(comparison.lines), flush=True)
    failed = any("error" in line or "failed" in line for line in comparison.lines)
    return 1 if failed or table.wrong(comparison.lines) else 0


if __name__ == "__main__":
    sys.exit(main())
