"""Compares ways to offload a KV cache in whole vLLM engines that run side by side on one GPU and take turns.

    PYTHONPATH=benchmarks python3 -m serving --regime pages64k --configs none,native,kvswap --out OUT

All engines of a regime start together and stay; each phase is asked of one after the other (A, B, B, A, A, B ...),
while the others are idle. OUT/serving.jsonl gets a line as soon as something is measured, OUT/summary.txt the tables.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvswap import memory
from serving import configurations, table
from serving.configurations import REPEATED
from serving.options import parser_of, values_of
from serving.process import Clock, Failed, Process
from serving.regimes import REGIMES, Regime, regime

ONCE = ("truth", "store")  # before what is repeated


def parse() -> argparse.Namespace:
    """The command line."""
    parser = parser_of("serving", __doc__)
    add = parser.add_argument
    add("--regime", action="append", choices=[*REGIMES], help="may be given several times; pages64k")
    add("--configs", default="native,kvswap", help=f"of {', '.join(configurations.NAMES)}; NAME:PATH, NAME:PRIORITY")
    add("--phases", default=",".join((*ONCE, *REPEATED, "profile")), help="what to run")
    add("--pairs", type=int, default=5, help="how often what is repeated is, if there is time")
    add("--scatter", action="store_true", help="then again with a fragmented host cache, as regime NAME+scattered")
    add("--one-by-one", action="store_true", help="start the engines one after the other, so that their start is timed")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="another value for a field of the regime")
    add("--out", type=Path, default=Path("serving-results"))
    add("--work", type=Path, default=Path("/tmp/kvswap-serving/run"), help="logs and models")
    add("--seconds", type=float, default=3600.0, help="for everything")
    add("--share", type=float, default=1.0, help="the part of --seconds that is taken")
    return parser.parse_args()


class Record:
    """serving.jsonl and summary.txt."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self.lines = folder, list[dict[str, Any]]()
        self._begin = time.monotonic()

    def add(self, **line: Any) -> None:
        """One more, written at once."""
        line["at_s"] = round(time.monotonic() - self._begin, 1)
        self.lines.append(line)
        with (self._folder / "serving.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if any(key in line for key in ("error", "failed", "about")) or (line.get("record") or {}).get("short"):
            print(json.dumps(line), flush=True)

    def tables(self) -> str:
        """Of all lines so far."""
        text = table.tables(self.lines)
        (self._folder / "summary.txt").write_text(text + "\n")
        return text


class Comparison:
    """The engines of one regime."""

    def __init__(self, name: str, options: argparse.Namespace, record: Record, clock: Clock) -> None:
        self.regime, self.options, self.clock = name, options, clock
        self.name = " ".join([name, *options.set])
        self.record, self.number = record, time.time_ns()
        self.overrides = overrides_of(options.set)
        self.engines: dict[str, Process] = {}
        self.neighbours: dict[str, Process] = {}  # of the engines that have one; they are not measured

    def run(self) -> None:
        """Start, measure, end."""
        try:
            self._start()
            self._measure(self.name, self.clock.share(0.65) if self.options.scatter else self.clock)
            if "profile" in self.options.phases.split(","):
                self._each("profile", self.name)
            if self.options.scatter:
                self._each("scatter", self.name + "+scattered")
                self._measure(
                    self.name + "+scattered", self.clock, skip=("truth", "alone", "stores", "idle", "profile")
                )
        finally:
            for engine in (*self.engines.values(), *self.neighbours.values()):
                engine.end()
            if self.neighbours:
                memory.clean()  # a pool of replicas stays where all were killed

    def _start(self) -> None:
        waiting = []
        for config in self.options.configs.split(","):
            configurations.split(config)
            beside = configurations.has_neighbour(config)
            given = config, self.regime, self.overrides, self.options.work
            self.engines[config] = Process(*given, gpu=0 if beside else None)
            waiting.append(self.engines[config])
            if beside:
                self.neighbours[config] = Process(*given, gpu=1)
                waiting.append(self.neighbours[config])
            if self.options.one_by_one:
                self._all_ready(waiting)
                waiting.clear()
        self._all_ready(waiting)
        for neighbour in [*self.neighbours.values()]:
            self._prepare(neighbour)
        self._each("prepare", self.name)
        self._each("meet", self.name)

    def _all_ready(self, engines: list[Process]) -> None:
        for engine in engines:
            if engine.name in self.engines:  # neither it nor its neighbour has failed
                self._ready(engine)

    def _prepare(self, neighbour: Process) -> None:
        try:
            made = neighbour.ask("prepare", min(90.0, self.clock.left()))
        except Failed as failed:
            self._drop(neighbour, failed)
        else:
            self._note(neighbour.name, phase="neighbour", repeat=0, **made)

    def _ready(self, engine: Process) -> None:
        begin = time.monotonic()
        try:
            about = engine.ready(min(240.0, self.clock.left()))
        except Failed as failed:
            self._drop(engine, failed)
        else:
            if engine is not self.engines[engine.name]:
                return
            self._note(engine.name, about=about, waited_s=round(time.monotonic() - begin, 1))

    def _note(self, config: str, **what: Any) -> None:
        self.record.add(run=self.number, regime=self.name, config=config, **what)

    def _drop(self, engine: Process, failed: Failed) -> None:
        self._note(engine.name, error=str(failed))
        print(engine.tail(), flush=True)
        self.engines.pop(engine.name).end()
        if engine.name in self.neighbours:
            self.neighbours.pop(engine.name).end()

    def _each(self, phase: str, regime_name: str, *, backwards: bool = False, repeat: int = 0) -> None:
        """A phase of all engines that have it, one after the other."""
        names = [*self.engines]
        for config in names[::-1] if backwards else names:
            if self.clock.left() < 5:
                return
            engine = self.engines[config]
            if not configurations.takes(config, phase):
                continue
            try:
                made = self._ask(engine, phase)
            except Failed as failed:
                self._drop(engine, failed)
                continue
            self.record.add(run=self.number, regime=regime_name, config=config, phase=phase, repeat=repeat, **made)

    def _ask(self, engine: Process, phase: str) -> dict[str, Any]:
        """A phase of an engine. With a neighbour, the record has "by_neighbour": bytes that the engine got over its
        link meanwhile, and as many as the neighbour has counted."""
        limit, neighbour = min(90.0, self.clock.left()), self.neighbours.get(engine.name)
        if neighbour is None:
            return engine.ask(phase, limit)
        given = {}
        if phase == "foreign":
            offered = neighbour.ask("offer", limit)
            if "record" not in offered:
                return offered
            given = offered["record"]
        before = self._links(engine, neighbour, limit)
        made = engine.ask(phase, limit, **given)
        if before and made.get("record") is not None:
            after = self._links(engine, neighbour, limit)
            made["record"]["by_neighbour"] = [b - a for a, b in zip(before, after, strict=True)]
        return made

    def _links(self, engine: Process, neighbour: Process, limit: float) -> list[int]:
        if not configurations.lends(engine.name):
            return []
        asked = (engine.ask("links", limit), "got"), (neighbour.ask("links", limit), "given")
        if missing := [made["failed"] for made, _ in asked if "failed" in made]:
            raise Failed(f"{engine.name}: {missing[0]}")
        return [made["record"][key] for made, key in asked]

    def _measure(self, regime_name: str, clock: Clock, skip: tuple[str, ...] = ()) -> None:
        asked = [phase for phase in self.options.phases.split(",") if phase not in skip]
        self.record.add(run=self.number, regime=regime_name, asked=asked, configs=self.options.configs.split(","))
        for phase in ONCE:
            if phase in asked:
                self._each(phase, regime_name)
                if phase == "truth":
                    self._each("skipped", regime_name)
        longest = 0.0
        for repeat in range(self.options.pairs):
            if clock.left() < 1.1 * longest + 5:
                print(f"{regime_name}: {repeat} of {self.options.pairs} turns, for want of time", flush=True)
                break
            begin = time.monotonic()
            for phase in REPEATED:
                if phase in asked:
                    self._each(phase, regime_name, backwards=repeat % 2 == 1, repeat=repeat)
            longest = max(longest, time.monotonic() - begin)


def overrides_of(texts: list[str]) -> dict[str, Any]:
    """--set FIELD=VALUE. SystemExit: there is no such field."""
    return values_of(texts, {field.name for field in fields(Regime)} - {"model"})


def main() -> int:
    """All regimes, until the time is over."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines are ended, in sessions of their own
    options = parse()
    options.work.mkdir(parents=True, exist_ok=True)
    record, clock = Record(options.out), Clock(options.share * options.seconds)
    names = options.regime or ["pages64k"]
    for number, name in enumerate(names):
        regime(name, overrides_of(options.set))
        Comparison(name, options, record, clock.share(1 / (len(names) - number))).run()
        print(record.tables(), flush=True)
    names = dict.fromkeys(line["regime"] for line in record.lines)
    return 1 if any(table.faults(record.lines, name) for name in names) else 0


if __name__ == "__main__":
    sys.exit(main())
