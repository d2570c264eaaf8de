"""Random transfers by the paths that copy by a kernel, many of them in flight at once, against a model that runs them
one after another. Each test takes ``--long-seconds`` (1 by default). By hand, for 100,000 transfers:

    pytest tests/random/test_any_transfer.py --long-seconds 300
    pytest tests/random/test_any_transfer.py --device cuda:0 --long-seconds 120

Each transfer has a part of two buffers to itself, where it is right to compare all bytes; what they share is streams,
slots, tables of rows and staging memory. A failure names its seed; ``--long-seed N`` begins with it.
"""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import numpy as np
import pytest
from conftest import PATIENCE, usable
from transfers import GUARD, TINY, Chooser, Sides, Work, carry_out, draw, tiny_slots

import kvswap
from kvswap import testing

pytestmark = pytest.mark.slow

PART, PARTS = 48 << 10, 24  # of the buffers: bytes, and how many
LARGE = 3 << 20
OPERATIONS = ("copy", "copy_batch", "launch", "event_record", "stream_wait", "event_create", "alloc", "")


class Seeds:
    """Seeds, one after another, until the time is over; and what was done with them."""

    def __init__(self, first: int, limit: float) -> None:
        self.first, self.limit = first, limit
        self.last, self.begin = first - 1, time.monotonic()
        self.transfers, self.blocks, self.nbytes, self.faults, self.lost = 0, 0, 0, 0, 0
        self.paths: dict[str, int] = {}

    def __iter__(self) -> Iterator[int]:
        while self.last < self.first or time.monotonic() - self.begin < self.limit:
            self.last += 1
            yield self.last

    def add(self, work: Work, transfer: kvswap.Transfer) -> None:
        self.transfers += 1
        self.blocks += work.count * len(work.nbytes)
        self.nbytes += transfer.nbytes
        self.lost += transfer.state == "failed"
        self.paths[transfer.path] = self.paths.get(transfer.path, 0) + 1

    def __str__(self) -> str:
        paths = ", ".join(f"{path} {count}" for path, count in sorted(self.paths.items()))
        return (
            f" seeds {self.first} to {self.last}: {self.transfers} transfers of {self.blocks} rows of blocks, "
            f"{self.nbytes / 2**30:.1f} GiB ({paths}); {self.faults} calls refused, {self.lost} transfers lost"
        )


@pytest.fixture
def seeds(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[Seeds]:
    seeds = Seeds(int(request.config.getoption("--long-seed")), float(request.config.getoption("--long-seconds")))
    yield seeds
    with capsys.disabled():
        print(seeds, end="")


class Round:
    """Transfers of all parts at once, and the comparison afterwards."""

    def __init__(self, sides: Sides, seed: int, streams: list[kvswap.Stream | None], faults: bool = False) -> None:
        self.sides, self.rng, self.streams, self.faults = sides, random.Random(seed), streams, faults
        self.what = f"seed {seed} on {sides.device.name}"
        self.refused = 0

    def submit(self, work: Work, listed: bool) -> kvswap.Transfer | None:
        """None: it was refused, and nothing moves."""
        try:
            return self.submit_unless_held(work, listed)
        except kvswap.QueueFull as error:  # behind copies that a refused call left with no event to wait for
            assert self.faults and "its copies still run" in str(error), error
            return None

    def submit_unless_held(self, work: Work, listed: bool) -> kvswap.Transfer | None:
        path = self.rng.choice(("burst", "burst", "kernel", "auto"))
        call = self.sides.batch if listed else self.sides.swap
        options = {"path": path, "stream": self.rng.choice(self.streams)}
        options["priority"] = self.rng.choice(("normal", "normal", "high", "background"))
        if not self.faults or self.rng.random() < 0.7:
            return call(work, **options)
        operation, nth = self.rng.choice(OPERATIONS), self.rng.choice((1, 1, 2, 3, 5, 8))
        every = self.rng.choice((0, 0, 0, 1, 7))
        self.refused += 1
        try:
            with testing.fault(self.sides.device, "call", "fail", operation=operation, nth=nth, every=every, code=33):
                return call(work, **options)
        except kvswap.DeviceError as error:
            assert error.code == 33
            return None

    def run(self, seeds: Seeds, part: int, parts: int) -> None:
        choose, submitted = Chooser(self.rng), []
        self.sides.prepare(parts * part)
        for number in range(parts):
            if self.rng.random() < 0.05:
                testing.delay(self.sides.device, self.rng.uniform(1e-6, 2e-4), self.rng.choice(self.streams[1:]))
            work = draw(choose, (number + 1) * part, 200, begin=number * part + GUARD)
            listed = self.rng.random() < 0.3
            submitted.append((work, listed, self.submit(work, listed)))
        self.sides.device.synchronize(PATIENCE)
        for work, listed, transfer in submitted:
            if transfer is None:
                continue
            assert transfer.done(), self.what
            assert self.faults or transfer.error is None, f"{self.what}: {transfer.error}"
            assert transfer.nbytes == 0 or (transfer.error is None) == (transfer.failed_positions.size == 0), self.what
            blocks = np.arange(work.count)
            failed = (
                blocks if listed and transfer.error else transfer.failed_positions
            )  # a list's: in an order of its own
            carry_out(work, self.sides.gpu_model, self.sides.cpu_model, np.delete(blocks, failed))
            self.sides.forget(work, failed)
            seeds.add(work, transfer)
        self.sides.check(self.what)
        seeds.faults += self.refused


def streams_of(device: kvswap.Device) -> list[kvswap.Stream | None]:
    return [None, *(kvswap.Stream(device) for _ in range(4))]


@pytest.mark.parametrize("faults", [False, True], ids=["", "refusals"])
def test_small_transfers(device: kvswap.Device, seeds: Seeds, faults: bool) -> None:
    usable(device, "kernel")
    sides, streams = Sides(device, PART * PARTS), streams_of(device)
    for seed in seeds:
        Round(sides, seed, streams, faults).run(seeds, PART, PARTS)


@pytest.mark.parametrize("faults", [False, True], ids=["", "refusals"])
def test_large_transfers(device: kvswap.Device, seeds: Seeds, faults: bool) -> None:
    """Of many bursts each."""
    usable(device, "kernel")
    sides, streams = Sides(device, 4 * LARGE), streams_of(device)
    with tiny_slots(device):
        for seed in seeds:
            Round(sides, seed, streams, faults).run(seeds, LARGE, 4)


@pytest.mark.not_sanitized("minutes: all interleavings")
@pytest.mark.parametrize("faults", [False, True], ids=["", "refusals"])
def test_every_interleaving(seeds: Seeds, faults: bool) -> None:
    """On devices that reorder all that nothing orders, each by its seed."""
    for seed in seeds:
        device = testing.deterministic_device(seed)
        device.set_slots(TINY, 2 + seed % 3)
        part = PART if seed % 3 else 8 * PART  # of several bursts
        Round(Sides(device, part * 8), seed, streams_of(device), faults).run(seeds, part, 8)
