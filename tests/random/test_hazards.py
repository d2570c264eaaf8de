"""Random programs of copies between few slots, against a model that runs them one after another. Each test takes
``--long-seconds`` (1 by default). By hand, for a million operations and 100,000 waits for each kind of hazard:

    pytest tests/random/test_hazards.py --long-seconds 600
    pytest tests/random/test_hazards.py --device cuda:0 --long-seconds 600

A program is legal: before the model's stream uses a block that a copy used, or the other way round, it synchronises as
the manager wants it. So whatever differs is the library's fault. Lanes are held up by words that they wait for and by
delays, so that most copies are queued before those that they depend on have run.

A failure names its seed; ``--long-seed N`` begins with it.
"""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Buffer, seam

import kvswap
from kvswap import testing
from kvswap.trtllm import Block, KVCacheBlockPool, KVCacheTransferManager

pytestmark = pytest.mark.slow

TOKENS = 4
SHAPES: tuple[dict[str, Any], ...] = (
    {"num_layers": 2, "kv_factor": 2, "num_kv_heads": 1, "size_per_head": 4, "dtype": "fp8"},  # blocks of 64 bytes
    {"num_layers": 3, "kv_factor": 1, "num_kv_heads": 1, "size_per_head": 2, "dtype": "fp16"},  # of 48
)
SLOTS = (7, 6)  # secondary, primary: indexed by is_primary
ROOM = 96  # operations from one comparison to the next, at most: fewer than a lane holds
HAZARDS = ("raw", "war", "waw")


class Seeds:
    """Seeds, one after another, until the time is over; and what was done with them."""

    def __init__(self, first: int, limit: float) -> None:
        self.first, self.limit = first, limit
        self.last, self.begin = first - 1, time.monotonic()
        self.operations, self.blocks, self.comparisons = 0, 0, 0
        self.waits = dict.fromkeys(HAZARDS, 0)

    def __iter__(self) -> Iterator[int]:
        while self.last < self.first or time.monotonic() - self.begin < self.limit:
            self.last += 1
            yield self.last

    def __str__(self) -> str:
        waits = ", ".join(f"{kind} {count}" for kind, count in self.waits.items())
        return (
            f" seeds {self.first} to {self.last}: {self.operations} operations, {self.blocks} blocks copied, "
            f"{self.comparisons} comparisons; waits: {waits}"
        )


@pytest.fixture
def seeds(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[Seeds]:
    seeds = Seeds(int(request.config.getoption("--long-seed")), float(request.config.getoption("--long-seconds")))
    yield seeds
    if seeds.operations:
        with capsys.disabled():
            print(seeds, end="")


class Rig:
    """Slots in both memories, the manager over them, a third lane, and what every byte should be.

    The model keeps a slot's blocks of all pools side by side: model[is_primary] has shape (slots, bytes).
    """

    def __init__(self, device: kvswap.Device, path: str = "auto", noted: bool = False) -> None:
        self.device, self.path, self.noted = device, path, noted
        pools, self.widths = [], []
        self.buffers: dict[bool, list[Buffer]] = {True: [], False: []}
        for shape in SHAPES:
            width = KVCacheBlockPool(1, 1, 1, 1, tokens_per_block=TOKENS, **shape).nbytes()
            for primary in (True, False):
                self.buffers[primary].append(Buffer(device, SLOTS[primary] * width, "gpu" if primary else "cpu"))
            bases = self.buffers[True][-1].ptr, self.buffers[False][-1].ptr
            pools.append(KVCacheBlockPool(*bases, SLOTS[True], SLOTS[False], tokens_per_block=TOKENS, **shape))
            self.widths.append(width)
        self.manager = KVCacheTransferManager(pools, device=device, path=path)
        self.ends = np.cumsum([0, *self.widths]).tolist()
        self.model = {side: np.zeros((SLOTS[side], self.ends[-1]), np.uint8) for side in (True, False)}
        self.columns = [self.moved_bytes(tokens) for tokens in range(TOKENS)]
        self.streams = [kvswap.Stream(device), self.manager.offload_stream, self.manager.onboard_stream]
        self.compute, self.third = kvswap.Stream(device), self.streams[0]
        self.event = kvswap.Event(device, timing=False)
        self.feed, self.log = (Buffer(device, ROOM * self.ends[-1], "cpu") for _ in range(2))
        self.words = device.alloc(4 * ROOM, host=True)  # gates: 0 closed, 1 open
        self.gates = np.frombuffer(self.words, np.uint32)

    def moved_bytes(self, tokens: int) -> np.ndarray[Any, Any]:
        """The columns of the model that a copy of so many tokens moves."""
        moved = []
        for shape, begin, end in zip(SHAPES, self.ends[:-1], self.ends[1:], strict=True):
            rows = shape["num_layers"] * shape["kv_factor"] * shape["num_kv_heads"]
            columns = np.arange(begin, end).reshape(rows, TOKENS, -1)
            moved.append(columns[:, : tokens or TOKENS].reshape(-1))
        return np.concatenate(moved)

    def fill(self, seed: int) -> None:
        """New bytes everywhere."""
        rng = np.random.default_rng(seed)
        self.gates[:] = 0
        for side in (True, False):
            self.model[side][:] = rng.integers(0, 256, self.model[side].shape, np.uint8)
            for pool, buffer in enumerate(self.buffers[side]):
                buffer.put(self.part(self.model[side], pool).reshape(-1))
        self.feed_model = rng.integers(0, 256, (ROOM, self.ends[-1]), np.uint8)
        self.feed.put(self.feed_model.reshape(-1))
        self.log_model = np.zeros((ROOM, self.ends[-1]), np.uint8)
        self.log.put(self.log_model.reshape(-1))

    def part(self, array: np.ndarray[Any, Any], pool: int) -> np.ndarray[Any, Any]:
        return array[:, self.ends[pool] : self.ends[pool + 1]]

    def difference(self) -> str:
        """What is not as the model has it; nothing may be queued any more."""
        for side, name in ((True, "primary"), (False, "secondary")):
            for pool, buffer in enumerate(self.buffers[side]):
                there = buffer.get().reshape(SLOTS[side], -1)
                wrong = np.flatnonzero((there != self.part(self.model[side], pool)).any(axis=1))
                if wrong.size:
                    return f"{name} {pool} is wrong in slots {wrong.tolist()}"
        wrong = np.flatnonzero((self.log.get().reshape(ROOM, -1) != self.log_model).any(axis=1))
        return f"reads {wrong.tolist()} of the compute stream saw wrong bytes" if wrong.size else ""


class Program:
    """One random program. `clock` counts operations; the rest is when something was last done, for the rules."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig, self.rng = rig, random.Random(seed)
        self.clock, self.gates, self.reads = 1, 0, 0
        self.blocks = 0
        self.transfers: list[kvswap.Transfer] = []
        self.closed: list[int] = []  # gates that streams wait at
        slots = SLOTS[True]
        self.compute_wrote, self.compute_used = [0] * slots, [0] * slots
        self.copy_wrote, self.copy_used = [0] * slots, [0] * slots
        self.compute_synced, self.copies_synced = 0, 0
        rig.fill(seed)

    # -- the rules ----------------------------------------------------------------------------------------------------

    def sync_with_compute(self) -> None:
        self.rig.manager.sync_with_compute(self.rig.compute)
        self.rig.event.record(self.rig.compute)
        self.rig.event.wait(self.rig.third)
        self.compute_synced = self.clock

    def sync_transfers(self) -> None:
        self.rig.manager.sync_transfers(self.rig.compute)
        self.rig.event.record(self.rig.third)
        self.rig.event.wait(self.rig.compute)
        self.copies_synced = self.clock

    def copies_may(self, read: list[int], write: list[int]) -> None:
        """Synchronise, if these primary blocks are not free to be copied."""
        last = [self.compute_wrote[slot] for slot in read] + [self.compute_used[slot] for slot in write]
        if max(last, default=0) > self.compute_synced:
            self.sync_with_compute()
        for slot in read:
            self.copy_used[slot] = self.clock
        for slot in write:
            self.copy_used[slot] = self.copy_wrote[slot] = self.clock

    def compute_may(self, slot: int, write: bool) -> None:
        """The same the other way round."""
        if (self.copy_used if write else self.copy_wrote)[slot] > self.copies_synced:
            self.sync_transfers()
        self.compute_used[slot] = self.clock
        if write:
            self.compute_wrote[slot] = self.clock

    # -- operations ---------------------------------------------------------------------------------------------------

    def copy(self) -> None:
        """Copy some blocks from somewhere to somewhere else, on any lane that does such copies."""
        rig, rng = self.rig, self.rng
        source, target = rng.random() < 0.5, rng.random() < 0.5
        if rig.device.kind == "cuda" and rig.path == "dma":
            target |= not source  # within the host's memory a driver makes the caller wait for the stream
        count = rng.choice((1, 1, 1, 2, 3))
        if source == target:
            chosen = rng.sample(range(SLOTS[source]), 2 * count)
            src, dst = chosen[:count], chosen[count:]
        else:
            src, dst = (rng.sample(range(SLOTS[side]), count) for side in (source, target))
        tokens = rng.choice((0, 0, 1, 2, 3))
        self.copies_may(src if source else [], dst if target else [])
        self.transfers.append(self.submit(source, target, src, dst, tokens))
        columns = rig.columns[tokens]
        rig.model[target][np.ix_(dst, columns)] = rig.model[source][np.ix_(src, columns)]
        self.blocks += count

    def submit(self, source: bool, target: bool, src: list[int], dst: list[int], tokens: int) -> kvswap.Transfer:
        manager, lane = self.rig.manager, self.rng.randrange(3)
        if lane == 2 and tokens == 0:
            sides = manager.secondary_pools, manager.primary_pools
            options: dict[str, Any] = {"stream": self.rig.third, "path": self.rig.path}
            return kvswap.move_blocks(sides[source], sides[target], src, dst, **options)
        if source == target:
            move = manager.offload if lane == 0 else manager.onboard
            return move([Block(i, source) for i in src], [Block(i, target) for i in dst], tokens)
        return (manager.offload if source else manager.onboard)(src, dst, tokens)

    def kernel(self, write: bool) -> None:
        """Work of the model's: write a block, or read it into the log."""
        rig, slot = self.rig, self.rng.randrange(SLOTS[True])
        row = self.clock if write else self.reads
        self.compute_may(slot, write)
        for pool, width in enumerate(rig.widths):
            block = rig.buffers[True][pool].ptr + slot * width
            outside = (rig.feed if write else rig.log).ptr + row * rig.ends[-1] + rig.ends[pool]
            ends = (block, outside) if write else (outside, block)
            if rig.noted:
                testing.note_access(rig.compute, rig.manager.primary_pools[pool], [slot], write)
            seam(rig.device, "copy", *ends, width, rig.compute.handle)
        if write:
            rig.model[True][slot] = rig.feed_model[row]
        else:
            rig.log_model[row] = rig.model[True][slot]
            self.reads += 1

    def hold(self) -> None:
        """Hold a lane up until some later operation opens its gate."""
        if self.gates < ROOM:
            stream = self.rng.choice(self.rig.streams)
            seam(self.rig.device, "wait32", self.rig.words.ptr + 4 * self.gates, 1, stream.handle)
            self.closed.append(self.gates)
            self.gates += 1

    def open(self) -> None:
        if self.closed:
            self.rig.gates[self.closed.pop(0)] = 1

    def delay(self) -> None:
        testing.delay(self.rig.device, self.rng.uniform(1e-6, 5e-5), self.rng.choice(self.rig.streams))

    def step(self) -> None:
        choice, operations = self.rng.random(), self.OPERATIONS
        next(operation for share, operation in operations if choice < share)(self)
        self.clock += 1

    OPERATIONS: tuple[tuple[float, Callable[[Program], None]], ...] = (
        (0.80, copy),
        (0.84, lambda self: self.kernel(True)),
        (0.88, lambda self: self.kernel(False)),
        (0.89, sync_with_compute),
        (0.90, sync_transfers),
        (0.94, hold),
        (0.98, open),
        (1.00, delay),
    )

    def run(self) -> str:
        """The whole program; returns what is different afterwards, or nothing."""
        for _ in range(self.rng.randrange(ROOM // 2, ROOM - 1)):
            self.step()
        self.rig.gates[:] = 1
        self.rig.device.synchronize(PATIENCE)
        errors = [transfer.error for transfer in self.transfers if transfer.error is not None]
        return str(errors[0]) if errors else self.rig.difference()


def run(rig: Rig, seed: int, seeds: Seeds) -> None:
    program = Program(rig, seed)
    before = rig.device.stats()
    different = program.run()
    after = rig.device.stats()
    seeds.operations += program.clock - 1
    seeds.blocks += program.blocks
    seeds.comparisons += 1
    for kind in HAZARDS:
        seeds.waits[kind] += after[f"waits_{kind}"] - before[f"waits_{kind}"]
    assert not different, f"seed {seed} on {rig.device.name}: {different}"


@pytest.fixture
def held(device: kvswap.Device, request: pytest.FixtureRequest) -> kvswap.Device:
    if request.config.getoption("--serial"):
        pytest.skip("--serial: a lane that is held up would never go on")
    if not device.info["memops"]:
        pytest.skip("no stream memory operations")
    return device


def rigs_of(device: kvswap.Device, noted: bool = False) -> list[Rig]:
    """One a path that the device has."""
    paths = [
        "auto",
        "dma",
        *(["kernel"] if device.info["kernels"] else []),
        *(["direct"] if device.kind == "host" else []),
    ]
    return [Rig(device, path, noted) for path in paths]


def deterministic(seed: int, noted: bool = False) -> Rig:
    return Rig(testing.deterministic_device(seed), ("dma", "kernel", "direct")[seed % 3], noted)


def test_threads(held: kvswap.Device, seeds: Seeds) -> None:
    """On the device under test. On a host device that runs so long, it must have done enough."""
    rigs = rigs_of(held)
    for seed in seeds:
        run(rigs[seed % len(rigs)], seed, seeds)
    if seeds.limit >= 600 and held.kind == "host":
        assert seeds.operations >= 1_000_000
        assert min(seeds.waits.values()) >= 100_000


@pytest.mark.not_sanitized("minutes: all interleavings")
def test_every_interleaving(seeds: Seeds) -> None:
    """On devices that reorder all that nothing orders, each by its seed."""
    for seed in seeds:
        run(deterministic(seed), seed, seeds)


@contextmanager
def without(kind: str, program: Program) -> Iterator[None]:
    """Leave out the waits for a kind of hazard, or a call that the manager wants."""
    if kind in HAZARDS:
        with testing.fault(program.rig.device, "hazard", "skip", operation=kind):
            yield
    else:
        setattr(program, kind, lambda: None)
        yield


@pytest.mark.parametrize("kind", [*HAZARDS, "sync_with_compute", "sync_transfers"])
def test_without_one_kind_of_order(kind: str, seeds: Seeds) -> None:
    """The control: about half of the programs above show a difference. So many whatever time they take, and each finds
    the same again."""
    runs, found = 25, 0
    for seed in range(seeds.first, seeds.first + runs):
        program = Program(deterministic(seed), seed)
        with without(kind, program):
            found += program.run() != ""
    assert found > runs // 10, f"a difference in {found} of {runs} programs only"


@pytest.mark.parametrize("checked", ["threads", "interleavings"])
def test_the_race_checker_is_silent(held: kvswap.Device, seeds: Seeds, checked: str) -> None:
    rigs = rigs_of(held, noted=True) if checked == "threads" else []
    for seed in seeds:
        with testing.race_checker():
            run(rigs[seed % len(rigs)] if rigs else deterministic(seed, noted=True), seed, seeds)


@pytest.mark.parametrize("kind", [*HAZARDS, "sync_with_compute", "sync_transfers"])
def test_the_race_checker_finds_what_is_missing(kind: str, seeds: Seeds) -> None:
    found = 0
    for seed in range(seeds.first, seeds.first + 20):
        program = Program(deterministic(seed, noted=True), seed)
        with testing.race_checker(raise_at_exit=False) as checker, without(kind, program):
            program.run()
        found += bool(checker.races)
    assert found > 10, f"races in {found} of 20 programs only"
