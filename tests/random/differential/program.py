"""Rounds, one after another, and what they came to."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import argparse
import faulthandler
import logging
import random
import secrets
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import PATIENCE

import kvswap
from differential import hosts, table
from differential.frame import THREADS, Difference, Totals, World
from differential.soak import Samples
from kvswap import testing

STEPS = (60, 300)  # operations of a round
DIFFERENT = "DIFFERENT"
SHOWN = 25  # of the last operations, after a difference


class Failed(Exception):
    """A round's difference, as it is to be printed."""


def rng_of(seed: int, number: int, part: int = 0) -> random.Random:
    return random.Random(f"{seed} {number} {part}")


def play(world: World, name: str, steps: int, stop: Callable[[], bool]) -> None:
    try:
        for _ in range(steps):
            world.operations += 1
            world.rng.seed(f"{name} {world.operations}")  # what one operation met changes no later draw
            if world.rng.random() < 0.03:
                world.settle()
            table.draw(world)
            if stop():
                break
        world.open_gates()
        world.settle()
        hosts.leave(world)
        world.close()
    except BaseException:
        world.abandon()
        hosts.abandon(world)
        raise


def one_round(
    device: kvswap.Device, seed: int, number: int, totals: Totals, folder: Path, stop: Callable[[], bool]
) -> None:
    """Failed, with all that is needed to see and to repeat it."""
    rng = rng_of(seed, number)
    kind, name = rng.random(), device.name
    if device.kind == "host" and kind < 0.3:
        device = testing.deterministic_device(rng.getrandbits(31) | 1)
    threads = THREADS if kind > 0.93 else 1
    steps = rng.randint(*STEPS)
    failures: list[str] = []

    def run(part: int) -> None:
        own = folder / f"{number}-{part}"
        own.mkdir()
        own_totals = Totals() if threads > 1 else totals
        world = None
        try:
            world = World(device, rng_of(seed, number, part + 1), own_totals, own, alone=threads == 1)
            play(world, f"{seed} {number} {part}", steps // threads, stop)
        except Exception as error:
            text = "".join(traceback.format_exception(error)) if not isinstance(error, Difference) else f"{error}\n"
            last = "\n".join(list(world.history)[-SHOWN:]) if world else "before the first"
            at = world.operations if world else 0
            failures.append(
                f"DIFFERENCE: seed {seed}, round {number}, operation {at} of the round, thread {part} of {threads}, on "
                f"{device.name}, after {totals.operations} in all: {text}the last operations:\n{last}\n"
                f"again: python3 tests/random/differential --seed {seed} --round {number} --device {name}"
            )
        if world is not None:
            with lock:
                totals.operations += world.operations
                if own_totals is not totals:
                    totals.comparisons += own_totals.comparisons
                    totals.nbytes += own_totals.nbytes
                    totals.by_name += own_totals.by_name
                    totals.events += own_totals.events
        shutil.rmtree(own, ignore_errors=True)

    lock = threading.Lock()
    if threads == 1:
        run(0)
    else:
        workers = [threading.Thread(target=run, args=[part]) for part in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    totals.rounds += 1
    if failures:
        raise Failed("\n\n".join(failures))


def run(
    device: kvswap.Device,
    seed: int,
    *,
    seconds: float | None = None,
    operations: int | None = None,
    first: int = 1,
    rounds: int | None = None,
    tick: Callable[[Totals], None] = lambda totals: None,
    go_on: bool = False,
) -> Totals:
    """Rounds until the time, the operations or the rounds are over. Failed: a difference; or it is printed, and counted
    among the totals' events, where it goes on."""
    totals, begin, number = Totals(), time.monotonic(), first

    def late() -> bool:
        return rounds is None and seconds is not None and time.monotonic() - begin >= seconds

    # Errors are what faults are injected for: the log of them would be long.
    logging.getLogger("kvswap").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="kvswap-differential-") as folder:
        while rounds is None or number < first + rounds:
            if (late() and number > first) or (operations is not None and totals.operations >= operations):
                break
            try:
                one_round(device, seed, number, totals, Path(folder), late)
            except Failed as failed:
                if not go_on:
                    raise
                print(failed, flush=True)
                totals.events[DIFFERENT] += 1
            tick(totals)
            number += 1
    return totals


def describe(totals: Totals, seed: int, seconds: float) -> str:
    names = ", ".join(f"{name} {count}" for name, count in totals.by_name.most_common())
    events = ", ".join(f"{name} {count}" for name, count in sorted(totals.events.items()))
    return (
        f"seed {seed}: {totals.operations} operations in {totals.rounds} rounds, {totals.comparisons} comparisons of "
        f"all memory, {totals.nbytes / 2**20:.0f} MiB moved, {seconds:.0f} s; "
        f"{totals.events[DIFFERENT] or 'no'} difference\n{names}\n{events}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 tests/random/differential", description="see the first lines of __main__.py"
    )
    parser.add_argument("--seed", type=int, help="default: a random one, which is printed")
    parser.add_argument("--seconds", type=float, help="how long (default 60, unless --operations or --round is given)")
    parser.add_argument("--operations", type=int, help="how many, at least")
    parser.add_argument("--round", type=int, help="this round alone")
    parser.add_argument("--device", default="host:0", help="host:0 (default), cuda:0")
    parser.add_argument("--soak", action="store_true", help="sample what the process takes, and say whether it is flat")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two samples of --soak")
    args = parser.parse_args(argv)
    seed = args.seed if args.seed is not None else secrets.randbelow(1 << 31)
    seconds = args.seconds
    if seconds is None and args.operations is None and args.round is None:
        seconds = 60.0
    print(f"kvswap {kvswap.__version__}, device {args.device}, seed {seed}", flush=True)
    device, begin = kvswap.Device(args.device), time.monotonic()
    samples = Samples(device, args.every) if args.soak else None
    options: dict[str, Any] = {"seconds": seconds, "operations": args.operations}
    if args.round is not None:
        options |= {"first": args.round, "rounds": 1}

    def tick(totals: Totals) -> None:
        faulthandler.dump_traceback_later(10 * PATIENCE, exit=True)  # of the next round
        if samples:
            samples.tick(totals)

    try:
        faulthandler.dump_traceback_later(10 * PATIENCE, exit=True)
        totals = run(device, seed, **options, tick=tick, go_on=args.soak)
    except Failed as failed:
        print(failed, flush=True)
        return 1
    faulthandler.cancel_dump_traceback_later()
    print(describe(totals, seed, time.monotonic() - begin))
    if samples is not None:
        text, flat = samples.verdict()
        print(text)
        return 0 if flat and not totals.events[DIFFERENT] else 1
    return 0
