"""Clears that race with loads and stores of several processes: no block of an older epoch is ever served.

Each block's bytes say which weights made it. Engines load and store without pause; a store is submitted under a lock,
with the weights of that time. Clearing takes all locks (no engine submits blocks of older weights afterwards), clears
from one of several places, and begins the next weights. A load that began later must not return older ones.
"""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, until
from test_files import have_engine, keys_of
from test_files_shared import LAYOUT, NBYTES, SEGMENT

import kvswap
from kvswap import files
from kvswap.files import FileStore

ENGINES, KEYS, SECONDS = 3, 40, 2.0


def open_engine(folder: str, engine: str, shared: bool, number: int) -> FileStore:
    if not shared and number:
        return FileStore(folder, LAYOUT, readonly=True, engine=engine)
    capacity = 3 * SEGMENT  # blocks are evicted, too
    return FileStore(
        folder, LAYOUT, capacity=capacity, segment_nbytes=SEGMENT, engine=engine, shared=shared, events=10**6
    )


def block_of(key: bytes, weights: int) -> Any:
    block = np.full(NBYTES, weights % 251, np.uint8)
    block[:8] = np.frombuffer(weights.to_bytes(8, "little"), np.uint8)
    block[8 : 8 + len(key)] = np.frombuffer(key, np.uint8)
    return block


class Engine:
    """Of another process."""

    def __init__(self, shared: Any, seed: int) -> None:
        self.weights, self.lock, self.stop, self.served, self.wrong = shared
        self.random = random.Random(seed)
        self.keys = keys_of(KEYS)
        self.known: set[bytes] = set()

    def run(self, folder: str, engine: str, shared: bool, number: int) -> None:
        self.number = number
        with open_engine(folder, engine, shared, number) as store:
            stores: list[Any] = []
            loader = threading.Thread(target=self.load_on, args=(store,))
            loader.start()
            while not self.stop.is_set():
                if shared or not number:
                    stores = [each for each in stores if not each.done()]
                    self.store(store, stores)
                else:
                    store.refresh()
                self.load(store, self.random)
                if self.random.random() < 0.1:
                    store.delete(self.random.sample(self.keys, 2)) if shared or not number else store.touch(self.keys)
                self.take(store)
            loader.join()

    def load_on(self, store: FileStore) -> None:
        """Several threads look the epoch up."""
        choose = random.Random(self.number)
        while not self.stop.is_set():
            self.load(store, choose)

    def store(self, store: FileStore, stores: list[Any]) -> None:
        some = self.random.sample(self.keys, 4)
        with self.lock:
            blocks = [block_of(key, self.weights.value) for key in some]
            try:
                stores.append(store.store(some, blocks, replace=self.random.random() < 0.3))
            except kvswap.QueueFull:
                time.sleep(0.001)

    def load(self, store: FileStore, choose: random.Random) -> None:
        some = choose.sample(self.keys, 6)
        least, target = self.weights.value, np.zeros((6, NBYTES), np.uint8)
        there = store.contains(some)
        load = store.load(some, target, range(6))
        try:
            load.wait(PATIENCE)
        except kvswap.Error:
            for reason in load.reasons.values():
                if "is not in the store" not in str(reason):
                    self.wrong.put(str(reason))
        failed = set(load.failed_positions.tolist())
        for i, key in enumerate(some):
            if i in failed:
                continue
            made_by = int.from_bytes(target[i, :8].tobytes(), "little")
            if made_by < least or not np.array_equal(target[i], block_of(key, made_by)):
                self.wrong.put(f"{self.number} {key!r}: weights {made_by}, at least {least}; it was there: {there[i]}")
            self.served.value += 1

    def take(self, store: FileStore) -> None:
        found, lost = store.take_events()
        assert not lost
        for key, now in found:
            (self.known.add if now else self.known.discard)(key)


def serve(folder: str, engine: str, is_shared: bool, number: int, seed: int, shared: Any) -> None:
    try:
        Engine(shared, seed).run(folder, engine, is_shared, number)
    except BaseException as error:
        shared[-1].put(f"engine {number}: {error!r}")
        raise


@pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")
@pytest.mark.parametrize(("engine", "shared"), [("threads", False), ("threads", True), ("io_uring", True)])
def test_no_block_of_an_older_epoch_is_served(tmp_path: Path, engine: str, shared: bool) -> None:
    """Engines are stopped across some of the clears, and go on where they were."""
    have_engine(engine, tmp_path)
    seed = int(os.environ.get("KVSWAP_SEED", time.time_ns() % 10**6))
    print(f"KVSWAP_SEED={seed}")
    choose, spawn, folder = random.Random(seed), multiprocessing.get_context("spawn"), str(tmp_path / "s")
    open_engine(folder, engine, shared, 0).close()
    weights, stop, wrong = spawn.RawValue("q", 1), spawn.Event(), spawn.Queue()
    # without locks, which a stopped engine may hold
    locks, served = [spawn.Lock() for _ in range(ENGINES)], [spawn.RawValue("q", 0) for _ in range(ENGINES)]
    engines = [
        spawn.Process(
            target=serve,
            args=(folder, engine, shared, i, seed + i, (weights, locks[i], stop, served[i], wrong)),
            daemon=True,
        )
        for i in range(ENGINES)
    ]
    for each in engines:
        each.start()
    try:
        until(lambda: all(each.value > 50 for each in served) or not wrong.empty(), "nothing is served")
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and wrong.empty():
            time.sleep(choose.random() * 0.05)
            with ExitStack() as held:
                for lock in locks:
                    assert lock.acquire(timeout=PATIENCE)
                    held.callback(lock.release)
                stopped = [each for each in engines if choose.random() < 0.2 and each.pid]
                for each in stopped:
                    os.kill(each.pid, signal.SIGSTOP)
                held.callback(lambda all_=stopped: [os.kill(each.pid, signal.SIGCONT) for each in all_])
                files.clear(folder)
                weights.value += 1
                time.sleep(choose.random() * 0.01)
    finally:
        stop.set()
        for each in engines:
            each.join(PATIENCE)
    found = [wrong.get() for _ in range(0 if wrong.empty() else wrong.qsize())]
    assert found == [] and [each.exitcode for each in engines] == [0] * ENGINES
    print(f"{weights.value - 1} clears, {sum(each.value for each in served)} blocks served")
    assert weights.value > 20 and all(each.value > 50 for each in served)
    with open_engine(folder, engine, shared, 0) as store:
        left = store.keys()
        target = np.zeros((max(1, len(left)), NBYTES), np.uint8)
        store.load(left, target, range(len(left))).wait(PATIENCE)
        for key, block in zip(left, target, strict=False):
            assert np.array_equal(block, block_of(key, weights.value))
