"""Ranks are stopped, killed and started again under tasks that depend on each other and of which some fail: who is
told ok has the bytes that he asked for, and nobody is locked out."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import signal
import time
from typing import Any

import numpy as np
import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from conftest import PATIENCE
from managers import CPU_BLOCKS, GPU_BLOCKS, Manager
from test_fastdeploy_manager import CACHE_NBYTES, NAMES, Engine

import kvswap
from kvswap.fastdeploy.client import SWAP2CPU, SWAP2GPU, Result

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")

RANKS = 2
NOTHING = -1


class World:
    """An engine, and what its blocks hold as far as it was told: contents by number, NOTHING where it must not look.

    The caches are the engine's own, so they outlive the ranks.
    """

    def __init__(self, manager: Manager, seed: int) -> None:
        self.manager, self.random = manager, np.random.default_rng(seed)
        self.engine = Engine(manager, NAMES, CACHE_NBYTES)
        self.client = manager.client()
        self.client.wait_started(PATIENCE)
        self.client.attach(self.engine.handles())
        self.contents: list[Any] = []
        self.gpu, self.cpu = np.full(GPU_BLOCKS, NOTHING), np.full(CPU_BLOCKS, NOTHING)
        self.taken: list[tuple[str, int, list[int], list[int]]] = []
        self.told = {True: 0, False: 0}

    def rows(self, rank: int, tensor: int) -> Any:
        return np.asarray(self.engine.caches[rank][tensor]).reshape(GPU_BLOCKS, -1)

    def compute(self) -> None:
        """Whatever the engine cannot use it writes anew, and some more. No swap may be under way."""
        for block in range(GPU_BLOCKS):
            if self.gpu[block] == NOTHING or self.random.random() < 0.3:
                self.gpu[block] = len(self.contents)
                size = (RANKS, len(NAMES), self.rows(0, 0).shape[1])
                self.contents.append(self.random.integers(0, 256, size, np.uint8))
                for rank in range(RANKS):
                    for tensor in range(len(NAMES)):
                        self.rows(rank, tensor)[block] = self.contents[-1][rank, tensor]

    def send(self) -> None:
        count = int(self.random.integers(1, 4))
        kind = SWAP2CPU if self.random.random() < 0.5 else SWAP2GPU
        gpu_ids = self.random.choice(GPU_BLOCKS, count, replace=False).tolist()
        cpu_ids = self.random.choice(CPU_BLOCKS, count, replace=False).tolist()
        bad = kind == SWAP2CPU and self.random.random() < 0.05
        events = [None, b"no event"] if bad else None
        try:
            name = self.client.swap(kind, gpu_ids, cpu_ids, events=events, timeout=PATIENCE)
        except (kvswap.QueueFull, kvswap.Error):
            return
        self.taken.append((name, kind, gpu_ids, cpu_ids))

    def collect(self) -> None:
        """All results, in any order; then what they say in the order in which the tasks were taken."""
        results = {result.transfer_task_id: result for result in (self._next() for _ in self.taken)}
        assert sorted(results) == sorted(name for name, *_ in self.taken)
        for name, kind, gpu_ids, cpu_ids in self.taken:
            source, target = (self.gpu, self.cpu) if kind == SWAP2CPU else (self.cpu, self.gpu)
            sources, targets = (gpu_ids, cpu_ids) if kind == SWAP2CPU else (cpu_ids, gpu_ids)
            ok = results[name].ok
            self.told[ok] += 1
            assert not ok or NOTHING not in source[sources], f"{results[name]} read what failed"
            target[targets] = source[sources] if ok else NOTHING
        self.taken = []

    def _next(self) -> Result:
        return self.client.next_result(PATIENCE)

    def check(self) -> None:
        for block in np.flatnonzero(self.gpu != NOTHING):
            for rank in range(RANKS):
                for tensor in range(len(NAMES)):
                    expected = self.contents[self.gpu[block]][rank, tensor]
                    np.testing.assert_array_equal(self.rows(rank, tensor)[block], expected)


def _disturb(world: World, which: int) -> None:
    manager = world.manager
    if which == 0:
        manager.kill(1)
        manager.start(1)
    elif which == 1:
        manager.signal(1, signal.SIGSTOP)
        time.sleep(float(world.random.choice([0.2, 1.2])))  # less and more than --rank_timeout
        manager.signal(1, signal.SIGCONT)
    elif which == 2:
        manager.signal(1, signal.SIGTERM)
        manager.wait(1)
        manager.start(1)
    elif which == 3:
        manager.signal(0, signal.SIGSTOP)
        time.sleep(0.3)
        manager.signal(0, signal.SIGCONT)
    elif which == 4:
        manager.kill(0)
        manager.start(0)


@pytest.mark.slow
def test_chaos(device_name: str, pytestconfig: pytest.Config, long_seconds: float) -> None:
    if device_name != "host:0":
        pytest.skip("the ranks are on host devices")
    seed = pytestconfig.getoption("--long-seed")
    with Manager(RANKS, "--rank_timeout", "0.8", create=False) as manager:
        world, end = World(manager, seed), time.monotonic() + long_seconds
        rounds = 0
        while time.monotonic() < end or rounds < 6:
            world.compute()
            for _ in range(40):
                world.send()
            _disturb(world, rounds % 6)
            for _ in range(10):
                world.send()
            world.collect()
            if rounds % 6 == 4:
                world.client.wait_started(PATIENCE)
                world.client.attach(world.engine.handles())
            world.client.wait_ready(PATIENCE)
            world.check()
            world.compute()
            blocks = list(range(GPU_BLOCKS))  # what the engine has written it can store: it was told of all
            world.taken.append((world.client.swap(SWAP2CPU, blocks, blocks), SWAP2CPU, blocks, blocks))
            before = world.told[True]
            world.collect()
            assert world.told[True] == before + 1
            world.taken.append((world.client.swap(SWAP2GPU, blocks, blocks[::-1]), SWAP2GPU, blocks, blocks[::-1]))
            world.collect()
            assert world.told[True] == before + 2
            world.check()
            rounds += 1
        world.client.clear()
        world.engine.free()
        assert world.told[True] > 20 and world.told[False] > 20
