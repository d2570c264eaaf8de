"""No kind of request waits for ever because others never pause: stores and deletes beside loads, and the other way.

The file system's calls are delayed by the fault seam, and one thread serves the queue, so that the order in which
transfers end is the order of the queue. How many loads ended before a store says what the queue did, not how fast."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import AT_ONCE, PATIENCE, Buffer, Gate, random_bytes, until
from test_files import have_engine

import kvswap
from kvswap import testing
from kvswap.files import FileStore, FileTransfer, Layout
from kvswap.lmcache import FileConnector

pytestmark = pytest.mark.not_sanitized("counts the order of ends, which a sanitizer's pace changes")

MIB = 1 << 20
OVERDUE, LONGEST, SHARE = 0.1, 0.5, 16  # as in files/queue.h; and 64 MiB
READ = 0.002  # seconds that a read takes at least


class Rig:
    """A store with blocks of a size. One thread serves it, or one ring with one request in flight."""

    def __init__(self, folder: Path, nbytes: int = MIB, blocks: int = 4, **options: Any) -> None:
        self.block = np.tile(random_bytes(1, 4096), -(-nbytes // 4096))[:nbytes].reshape(1, nbytes)
        options = {"engine": "threads", "depth": 1, "queue": 4096, "capacity": 256 * MIB, **options}
        self.store = FileStore(folder / "s", Layout(nbytes), **options)
        self.target = np.zeros((1, nbytes), np.uint8)
        self.keys = [b"there-%d" % i for i in range(blocks)]
        for key in self.keys:
            self.put(key).wait(PATIENCE)
        self.begun: dict[FileTransfer, float] = {}

    def put(self, key: bytes) -> FileTransfer:
        return self.store.store([key], self.block, [0])

    def submit(self, call: Callable[[], FileTransfer]) -> FileTransfer:
        begin = time.monotonic()
        transfer = call()
        self.begun[transfer] = begin
        return transfer

    def loads(self, count: int, first: int = 0) -> list[FileTransfer]:
        keys = [self.keys[i % len(self.keys)] for i in range(first, first + count)]
        return [self.submit(lambda key=key: self.store.load([key], self.target, [0])) for key in keys]

    def slow(self, call: Any = "read", seconds: float = READ) -> Any:
        return testing.file_fault(self.store, call, "delay", every=1, delay=seconds)

    def end(self, transfer: FileTransfer) -> float:
        transfer.wait(PATIENCE)
        return self.begun[transfer] + transfer.elapsed

    def ended_before(self, transfer: FileTransfer, others: list[FileTransfer]) -> int:
        end = self.end(transfer)
        return sum(self.end(other) < end for other in others)


@contextmanager
def loading(
    load: Callable[[int], Any], unfinished: int, done: Callable[[Any], bool] = FileTransfer.done
) -> Iterator[None]:
    """Loads that never pause while the block runs: there are always so many."""
    stop, full = threading.Event(), threading.Event()

    def run() -> None:
        running: list[Any] = []
        for i in itertools.count():
            if stop.is_set():
                break
            running.append(load(i))
            while len(running) >= unfinished and not stop.is_set():
                full.set()
                running = [each for each in running if not done(each)]
                time.sleep(0.0005)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert full.wait(PATIENCE)
        yield
        assert thread.is_alive()
    finally:
        stop.set()
        thread.join(PATIENCE)


def write_of(rig: Rig, what: str) -> FileTransfer:
    call = {
        "store": lambda: rig.put(b"new"),
        "replace": lambda: rig.put(b"old"),
        "delete": lambda: rig.store.delete([b"old"]),
    }[what]
    return rig.submit(call)


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
@pytest.mark.parametrize("what", ["store", "replace", "delete"])
def test_it_goes_first_after_64_mib_of_loads(tmp_path: Path, engine: str, what: str) -> None:
    """Loads are always waiting. A replacing store has two requests: the second is not held up again."""
    rig = Rig(tmp_path, engine=have_engine(engine, tmp_path))
    rig.put(b"old").wait(PATIENCE)
    with rig.slow():
        loads = rig.loads(200)
        transfer = write_of(rig, what)
        before = rig.ended_before(transfer, loads)
        assert before <= 68
        assert before >= 60 or transfer.elapsed > LONGEST
    assert rig.store.contains([b"new", b"old"]) == [what == "store", what != "delete"]
    rig.store.close()


def test_it_waits_for_100_ms_too(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 16 * MIB, blocks=1)
    with rig.slow():
        loads = rig.loads(40)
        transfer = write_of(rig, "store")
        before = rig.ended_before(transfer, loads)
        assert transfer.elapsed >= OVERDUE and 4 <= before < 40
    rig.store.close()


def test_slow_loads_hold_it_up_for_half_a_second(tmp_path: Path) -> None:
    rig = Rig(tmp_path, 4096)
    with rig.slow(seconds=0.05):
        loads = rig.loads(40)
        transfer = write_of(rig, "store")
        before = rig.ended_before(transfer, loads)
        assert before <= 12 and transfer.elapsed >= LONGEST
    rig.store.close()


def test_stores_that_wait_get_a_share(tmp_path: Path) -> None:
    """They do not go one after the other as soon as all are overdue: sixteen loads go between two of them."""
    rig = Rig(tmp_path, queue=4096)
    with rig.slow():
        loads = rig.loads(300)
        stores = [rig.submit(lambda i=i: rig.put(b"new-%d" % i)) for i in range(12)]
        before = [rig.ended_before(each, loads) for each in stores]
    assert before[0] <= 68 and before == sorted(before)
    gaps = np.diff(before)
    assert gaps.min() >= SHARE - 1 and gaps.max() <= SHARE + 2
    rig.store.close()


def test_deletes_do_not_wait_for_all_stores(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    with rig.slow("write"):
        stores = [rig.submit(lambda i=i: rig.put(b"new-%d" % i)) for i in range(60)]
        deletes = [rig.submit(lambda i=i: rig.store.delete([rig.keys[i]])) for i in range(2)]
        assert [rig.ended_before(each, stores) for each in deletes] <= [3, 5]
        late = rig.submit(lambda: rig.put(b"late"))
        assert rig.ended_before(late, stores) == 60  # of one kind, the oldest goes first
    rig.store.close()


def test_stores_and_deletes_beside_loads_take_turns(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.put(b"old").wait(PATIENCE)
    with rig.slow():
        loads = rig.loads(250)
        stores = [rig.submit(lambda i=i: rig.put(b"new-%d" % i)) for i in range(20)]
        delete = write_of(rig, "delete")
        assert rig.ended_before(delete, loads) < 100 and rig.ended_before(delete, stores) <= 2
    rig.store.close()


def test_each_kind_has_its_own_limit(tmp_path: Path) -> None:
    """No kind fills the queue of another."""
    rig = Rig(tmp_path, 4096, queue=3)
    with testing.file_fault(rig.store, "read", "delay", every=1, delay=PATIENCE):
        running = [rig.store.load([rig.keys[0]], rig.target, [0]) for _ in range(3)]
        running += [rig.put(b"new-%d" % i) for i in range(3)]
        running += [rig.store.delete([b"new-%d" % i]) for i in range(3)]
        for call, kind in (
            (lambda: rig.store.load([rig.keys[1]], rig.target, [0]), "loads"),
            (lambda: rig.put(b"more"), "stores"),
            (lambda: rig.store.delete([b"more"]), "deletes"),
        ):
            with pytest.raises(kvswap.QueueFull, match=f"holds 3 unfinished {kind} "):
                call()
        stats = rig.store.stats()
        assert (stats["unfinished_loads"], stats["unfinished_stores"], stats["refused_full"]) == (3, 6, 3)
    for transfer in running:
        transfer.wait(PATIENCE)
    rig.store.close()


def test_stores_that_never_pause_do_not_hold_up_a_load(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    with rig.slow("write"):
        stores = [rig.submit(lambda i=i: rig.put(b"new-%d" % i)) for i in range(60)]
        load = rig.loads(1)[0]
        assert rig.ended_before(load, stores) <= 3
    rig.store.close()


@pytest.mark.parametrize("what", ["replace", "delete"])
def test_a_key_that_is_loaded_without_pause(tmp_path: Path, what: str) -> None:
    """A replace or a delete waits for the loads before it; the loads after it wait for that."""
    rig = Rig(tmp_path, 4096)
    rig.put(b"old").wait(PATIENCE)
    with rig.slow(seconds=0.0005):
        load = lambda: rig.store.load([b"old"], rig.target, [0])  # noqa: E731
        before = [rig.submit(load) for _ in range(50)]
        write = write_of(rig, what)
        after = [rig.submit(load) for _ in range(50)]
        end = rig.end(write)
        assert all(rig.end(each) < end for each in before)
        if what == "replace":
            assert all(rig.end(each) > end for each in after)
        for each in after if what == "delete" else ():
            with pytest.raises(kvswap.Error, match="not in the store"):
                each.wait(PATIENCE)
    rig.store.close()


# -- no slot is free --------------------------------------------------------------------------------------------------


def full_rig(folder: Path, **options: Any) -> Rig:
    """Eight slots, each with a block."""
    slot = MIB + 4096
    segment = 4096 + 8 * slot
    return Rig(folder, blocks=8, capacity=segment, segment_nbytes=segment, **options)


def test_all_blocks_are_loaded_without_pause(tmp_path: Path) -> None:
    """The store evicts a block when the loads before it have ended; loads of that key after it find nothing."""
    rig = full_rig(tmp_path)
    with rig.slow(), loading(lambda i: rig.loads(1, i)[0], 40):
        rig.put(b"new").wait(PATIENCE)
        stats = rig.store.stats()
        assert (stats["evicted"], stats["blocks"], stats["failed"]) == (1, 8, 0)
    assert rig.store.contains([b"new"]) == [True] and sum(rig.store.contains(rig.keys)) == 7
    rig.store.close()


def test_a_pinned_block_is_not_claimed(tmp_path: Path) -> None:
    rig = full_rig(tmp_path)
    rig.store.pin(rig.keys[:7])
    with rig.slow():
        loads = rig.loads(100)
        transfer = write_of(rig, "store")
        transfer.wait(PATIENCE)
        for each in loads:
            each.wait(PATIENCE)  # earlier loads find their block
    assert rig.store.contains(rig.keys) == [True] * 7 + [False]
    rig.store.close()


def test_a_claimed_block_is_given_back_with_the_store(tmp_path: Path) -> None:
    """A cancelled store evicts nothing, and loads that waited for the key get the block."""
    rig = full_rig(tmp_path)
    with rig.slow(seconds=0.005):
        loads = rig.loads(300)
        transfer = write_of(rig, "store")
        while transfer.elapsed == 0 and time.monotonic() < rig.begun[transfer] + 0.7:
            time.sleep(0.01)  # it is due by now, and has found no slot
        late = rig.loads(50)
        cancelled = transfer.cancel()
        for each in loads + late:
            each.wait(PATIENCE)
    assert cancelled and rig.store.stats()["evicted"] == 0
    rig.store.close()


def test_stores_that_wait_for_a_slot_get_one_each(tmp_path: Path) -> None:
    """Ten stores over eight blocks that are all in use: each ends, in order, and no load fails but for a block that
    went."""
    rig = full_rig(tmp_path)
    with rig.slow(seconds=0.001):
        loads = rig.loads(400)
        stores = [rig.submit(lambda i=i: rig.put(b"new-%d" % i)) for i in range(10)]
        late = rig.loads(400)
        ends = [rig.end(each) for each in stores]
        for each in loads:
            each.wait(PATIENCE)
    assert ends == sorted(ends)
    for each in late:
        if each.error is not None:
            assert "not in the store" in str(each.error)
    assert rig.store.stats()["evicted"] == 10 and rig.store.stats()["failed"] == 0
    rig.store.close()


# -- blocks of pools --------------------------------------------------------------------------------------------------


class PoolRig(Rig):
    """Blocks of a host device's pool, through four slots of staging."""

    def __init__(self, device: kvswap.Device, folder: Path, **options: Any) -> None:
        self.store_device, self.buffer = device, Buffer(device, 8 * MIB)
        self.pool = kvswap.Pool(device, self.buffer.memory, 8, MIB)
        super().__init__(folder, blocks=8, device=device, staging_nbytes=1, **options)

    def put(self, key: bytes) -> FileTransfer:
        return self.store.store([key], self.pool, [0])

    def loads(self, count: int, first: int = 0) -> list[FileTransfer]:
        which = [i % 8 for i in range(first, first + count)]
        return [self.submit(lambda i=i: self.store.load([self.keys[i]], self.pool, [i])) for i in which]

    def submit(self, call: Callable[[], FileTransfer]) -> FileTransfer:
        """A lane holds 128 start dependencies. They have nothing to wait for here."""
        while True:
            try:
                return super().submit(call)
            except kvswap.QueueFull:
                time.sleep(0.001)


@pytest.mark.parametrize("what", ["store", "replace", "delete"])
def test_loads_that_wait_for_staging(tmp_path: Path, what: str) -> None:
    rig = PoolRig(kvswap.Device("host:0"), tmp_path)
    rig.put(b"old").wait(PATIENCE)
    with rig.slow():
        loads = rig.loads(250)
        transfer = write_of(rig, what)
        assert rig.ended_before(transfer, loads) <= 80
    rig.store.close()


def test_stores_that_wait_for_staging_get_a_share(tmp_path: Path) -> None:
    rig = PoolRig(kvswap.Device("host:0"), tmp_path)
    with rig.slow():
        loads = rig.loads(300)
        stores = [rig.submit(lambda i=i: rig.put(b"new-%d" % i)) for i in range(8)]
        before = sorted(rig.ended_before(each, loads) for each in stores)  # neighbours may change places
    assert before[0] <= 80
    between = (before[-1] - before[0]) / 7  # where stores come first none, and where loads do all 300 come before
    assert SHARE / 2 <= between <= 2 * SHARE
    rig.store.close()


def test_start_dependencies_of_loads_neither_refuse_nor_delay_a_store(tmp_path: Path) -> None:
    """The start dependencies of loads, which wait, have another lane than those of stores."""
    rig = PoolRig(kvswap.Device("host:0"), tmp_path)
    stream = kvswap.Stream(rig.store_device)
    with Gate(rig.store_device) as gate:
        gate.hold(stream)
        with pytest.raises(kvswap.QueueFull):  # of the lane
            for i in range(1000):
                rig.store.load([rig.keys[i % 8]], rig.pool, [i % 8], after=stream)
        rig.put(b"new").wait(PATIENCE)
        gate.open()
    rig.store.close()


def test_stores_of_pools_do_not_hold_up_a_load(tmp_path: Path) -> None:
    rig = PoolRig(kvswap.Device("host:0"), tmp_path)
    with rig.slow("write"):
        stores = [rig.submit(lambda i=i: rig.put(b"new-%d" % i)) for i in range(60)]
        load = rig.loads(1)[0]
        assert rig.ended_before(load, stores) <= 8
    rig.store.close()


@pytest.mark.parametrize("full", [False, True])
def test_a_store_of_pools_does_not_wait_for_a_thread_before_it_is_staged(tmp_path: Path, full: bool) -> None:
    """The block passes the queue once, to be written: its slot on disk is there before."""
    slot = MIB + 4096
    segment = 4096 + 9 * slot
    rig = PoolRig(kvswap.Device("host:0"), tmp_path, capacity=segment, segment_nbytes=segment)
    if full:
        rig.put(b"ninth").wait(PATIENCE)
        rig.store.pin(rig.keys)
    with testing.file_fault(rig.store, "read", "delay", every=1, delay=PATIENCE):
        load = rig.store.load([rig.keys[0]], rig.target, [0])  # the thread is busy
        before = rig.store_device.stats()["bytes_d2h"]
        transfer = rig.put(b"new")
        until(lambda: rig.store_device.stats()["bytes_d2h"] == before + MIB, "the copy to staging")
        assert not transfer.done()
    load.wait(PATIENCE)
    transfer.wait(PATIENCE)
    assert rig.store.contains([b"new", b"ninth"]) == [True, False]
    assert rig.store.stats()["evicted"] == full
    rig.store.close()


# -- through the engines' connectors ----------------------------------------------------------------------------------


def test_lmcache_beside_loads(tmp_path: Path) -> None:
    """Stores, deletes and look-ups are answered while loads never pause."""
    connector = FileConnector(str(tmp_path / "kv"), 64 * MIB, engine="threads", depth=1)
    buffers = np.zeros((16, MIB), np.uint8)
    views, keys = [memoryview(each) for each in buffers], [f"key-{i}" for i in range(16)]
    told: dict[int, bool] = {}

    def is_told(number: int) -> bool:
        told.update((number, ok) for number, ok, _, _ in connector.drain_completions())
        return number in told

    def waits(number: int) -> bool:
        until(lambda: number in told, "it is told")
        return told[number]

    first = connector.submit_batch_set(keys, views)
    until(lambda: is_told(first), "the objects are stored")
    files = connector._stores[MIB]._store
    slow = testing.file_fault(files, "read", "delay", every=1, delay=READ)
    with slow, loading(lambda i: connector.submit_batch_get(keys[:8], views[:8]), 8, is_told):
        begin = time.monotonic()
        assert waits(connector.submit_batch_set(["new"], [views[9]]))
        assert waits(connector.submit_batch_exists(["new", keys[0]]))
        assert waits(connector.submit_batch_delete(["new", keys[12]]))
        assert time.monotonic() - begin < AT_ONCE
    connector.close()


def test_engines_of_one_directory(tmp_path: Path) -> None:
    """One loads without pause, its own blocks and those of another, which stores and deletes."""
    options = {"capacity": 64 * MIB, "shared": True, "engine": "threads", "depth": 1}
    one, two = (Rig(tmp_path, blocks=4, **options) for _ in range(2))
    with one.slow(), two.slow(), loading(lambda i: one.loads(1, i)[0], 60), loading(lambda i: two.loads(1, i)[0], 60):
        for rig, other, key in ((one, two, b"first"), (two, one, b"second")):
            rig.put(key).wait(AT_ONCE)
            until(lambda key=key, other=other: other.store.contains([key]) == [True], "the other finds it")
            rig.store.delete([key]).wait(AT_ONCE)
    one.store.close()
    two.store.close()
