"""The file tier with a device: blocks of pools through staging, after what they start after, and its failures."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Buffer, Gate, random_bytes

import kvswap
from kvswap import testing
from kvswap.files import FileStore, Layout

ENGINES = ["threads", "auto"]
SIZES = (5000, 16384, 333)  # of a block's pools
BLOCKS = 40


class Rig:
    """Three pools on a device that make one block, a store of such blocks, and what the memory should hold."""

    def __init__(self, device: kvswap.Device, folder: Path, side: str = "gpu", **options: Any) -> None:
        self.device, self.nbytes = device, sum(SIZES)
        self.buffers = [Buffer(device, BLOCKS * nbytes, side) for nbytes in SIZES]
        self.pools: list[kvswap.Pool] = []
        for buffer, nbytes in zip(self.buffers, SIZES, strict=True):
            group = self.pools[0] if self.pools else None
            self.pools.append(kvswap.Pool(device, buffer.memory, BLOCKS, nbytes, group=group))
        self.model = [
            buffer.randomise(seed).reshape(BLOCKS, nbytes).copy()
            for seed, (buffer, nbytes) in enumerate(zip(self.buffers, SIZES, strict=True))
        ]
        self.folder = folder / "store"
        self.options = {"capacity": 8 << 20, "segment_nbytes": 1 << 20, "device": device, **options}
        self.store = self.open()

    def open(self, **options: Any) -> FileStore:
        return FileStore(self.folder, Layout(self.nbytes), **{**self.options, **options})

    def poison(self, ids: Any) -> None:
        for buffer, rows in zip(self.buffers, self.model, strict=True):
            rows[ids] = 0xEE
            buffer.put(rows.reshape(-1))

    def check(self) -> None:
        for buffer, rows in zip(self.buffers, self.model, strict=True):
            np.testing.assert_array_equal(buffer.get().reshape(rows.shape), rows)


@pytest.fixture(params=ENGINES)
def rig(request: pytest.FixtureRequest, device: kvswap.Device, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(device, tmp_path, engine=request.param)
    yield rig
    rig.store.close()


def keys_of(ids: Any) -> list[bytes]:
    return [b"block-%d" % i for i in ids]


def test_there_and_back(rig: Rig) -> None:
    rng = np.random.default_rng(1)
    sources, targets = rng.permutation(BLOCKS)[:25], rng.permutation(BLOCKS)[:25]
    wanted = [rows[sources].copy() for rows in rig.model]
    rig.store.store(keys_of(sources), rig.pools, sources).wait(PATIENCE)
    rig.check()
    rig.poison(slice(None))
    load = rig.store.load(keys_of(sources), rig.pools, targets.astype(np.int32))
    load.wait(PATIENCE)
    for rows, blocks in zip(rig.model, wanted, strict=True):
        rows[targets] = blocks
    rig.check()
    assert load.nbytes == 25 * rig.nbytes


@pytest.mark.parametrize("memory", ["pools", "host"])
def test_a_block_passes_the_engine_queue_once(rig: Rig, memory: str) -> None:
    """Where a slot on disk is free. A stored block that replaces one is written, and the older one erased."""
    ids = np.arange(10)
    blocks = rig.pools if memory == "pools" else np.zeros((BLOCKS, rig.nbytes), np.uint8)
    store, load = ((lambda call=call: call(keys_of(ids), blocks, ids)) for call in (rig.store.store, rig.store.load))
    rig.store.store([b"makes the segment"], blocks, [30]).wait(PATIENCE)
    requests = [rig.store.stats()["requests"]]
    for call in (store, load, store, lambda: rig.store.delete(keys_of(ids))):
        call().wait(PATIENCE)
        requests.append(rig.store.stats()["requests"])
    assert np.diff(requests).tolist() == [10, 10, 20, 10]


def test_what_the_device_stored_the_host_reads(rig: Rig) -> None:
    """A block on disk is its pools' bytes, one after the other."""
    rig.store.store(keys_of([3, 9]), rig.pools, [3, 9]).wait(PATIENCE)
    block = np.zeros((2, rig.nbytes), np.uint8)
    rig.store.load(keys_of([9, 3]), block, [0, 1]).wait(PATIENCE)
    for row, i in zip(block, (9, 3), strict=True):
        np.testing.assert_array_equal(row, np.concatenate([rows[i] for rows in rig.model]))
    data = random_bytes(5, rig.nbytes)
    rig.store.store([b"host"], [data]).wait(PATIENCE)
    rig.store.load([b"host"], rig.pools, [7]).wait(PATIENCE)
    at = 0
    for rows in rig.model:
        rows[7] = data[at : at + rows.shape[1]]
        at += rows.shape[1]
    rig.check()


def test_a_pool_of_rows(device: kvswap.Device, tmp_path: Path) -> None:
    """Blocks whose rows lie apart, as those of a layer-first cache do."""
    layers, blocks, page = 6, 10, 1536
    buffer = Buffer(device, layers * blocks * page)
    before = buffer.randomise(4).reshape(layers, blocks, page).copy()
    pool = kvswap.Pool(device, buffer.memory, blocks, layers * page, stride=page, rows=layers, pitch=blocks * page)
    with FileStore(tmp_path / "s", Layout(layers * page), capacity=1 << 20, device=device) as store:
        store.store(keys_of([1, 5]), pool, [1, 5]).wait(PATIENCE)
        store.load(keys_of([5, 1]), pool, [2, 3]).wait(PATIENCE)
    before[:, [2, 3]] = before[:, [5, 1]]
    np.testing.assert_array_equal(buffer.get().reshape(before.shape), before)


def check_churn(rig: Rig, transfers: list[Any]) -> None:
    """Of stores of blocks 0 to 19, and loads of them 20 further on, all end, and none is wrong: a load that found its
    key gone left what was there."""
    for transfer in transfers:
        try:
            transfer.wait(PATIENCE)
        except kvswap.Error as error:
            assert transfer.what == "load" and "is not in the store" in str(error), error
    after = [buffer.get().reshape(rows.shape) for buffer, rows in zip(rig.buffers, rig.model, strict=True)]
    for i in range(20):
        loaded = all((rows[20 + i] == model[i]).all() for rows, model in zip(after, rig.model, strict=True))
        untouched = all((rows[20 + i] == model[20 + i]).all() for rows, model in zip(after, rig.model, strict=True))
        assert loaded or untouched, i


@pytest.mark.parametrize("side", ["gpu", "cpu"])
def test_little_staging_and_little_room(device: kvswap.Device, tmp_path: Path, side: str) -> None:
    """Four staging slots, eight blocks on disk, hundreds of loads and stores at once: all end, none is wrong."""
    rig = Rig(device, tmp_path, side, staging_nbytes=1, capacity=8 * 32768, segment_nbytes=4 * 32768)
    rng = np.random.default_rng(3)
    transfers = []
    for _ in range(60):
        ids = rng.permutation(20)[:5]
        transfers.append(rig.store.store(keys_of(ids), rig.pools, ids))
        some = rng.permutation(20)[:5]
        transfers.append(rig.store.load(keys_of(some), rig.pools, some + 20))
    check_churn(rig, transfers)
    assert rig.store.stats()["loaded"] > 0 and rig.store.stats()["evicted"] > 0
    rig.store.close()


def test_it_starts_after_the_compute_stream_and_what_it_is_given(rig: Rig) -> None:
    device = rig.device
    rig.store.store(keys_of([0]), rig.pools, [0]).wait(PATIENCE)
    compute, other = kvswap.Stream(device), kvswap.Stream(device)
    device.set_compute_stream(compute)
    for stream, after in ((compute, ()), (other, other), (other, [kvswap.Event(device)])):
        with Gate(device) as gate:
            gate.hold(stream)
            if isinstance(after, list):
                after[0].record(other)
            waiting = [rig.store.store(keys_of([1]), rig.pools, [1], after=after)]
            waiting.append(rig.store.load(keys_of([0]), rig.pools, [2], after=after))
            with pytest.raises(TimeoutError):
                waiting[0].wait(0.05)
            assert not any(transfer.done() for transfer in waiting)
            gate.open()
            for transfer in waiting:
                transfer.wait(PATIENCE)
    for rows in rig.model:
        rows[2] = rows[0]
    rig.check()


def test_another_transfer_need_not_wait_for_that(rig: Rig) -> None:
    stream = kvswap.Stream(rig.device)
    rig.store.store(keys_of([0]), rig.pools, [0]).wait(PATIENCE)
    with Gate(rig.device) as gate:
        gate.hold(stream)
        held = rig.store.load(keys_of([0]), rig.pools, [1], after=stream)
        host = np.zeros(rig.nbytes, np.uint8)
        rig.store.load(keys_of([0]), [host]).wait(PATIENCE)
        assert not held.done() and held.cancel()
        gate.open()
        with pytest.raises(kvswap.Error, match="cancelled"):
            held.wait(PATIENCE)
    rig.check()


def test_after_a_transfer_that_fills_the_block(device: kvswap.Device, tmp_path: Path) -> None:
    gpu, cpu = Buffer(device, 8 * 4096), Buffer(device, 8 * 4096, "cpu")
    data = gpu.randomise(9).reshape(8, 4096)
    device_pool, host_pool = (kvswap.Pool(device, buffer.memory, 8, 4096) for buffer in (gpu, cpu))
    with FileStore(tmp_path / "s", Layout(4096), capacity=1 << 20, device=device) as store:
        down = kvswap.move_blocks(device_pool, host_pool, range(8), range(8))
        store.store(keys_of(range(8)), host_pool, range(8), after=down).wait(PATIENCE)
        target = np.zeros((8, 4096), np.uint8)
        store.load(keys_of(range(8)), target, range(8)).wait(PATIENCE)
        np.testing.assert_array_equal(target, data)
        with testing.fault(device, "copy", "fail", every=1):
            failed = kvswap.move_blocks(device_pool, host_pool, range(8), range(8))
            with pytest.raises(kvswap.DeviceError):
                failed.wait(PATIENCE)
        with pytest.raises(kvswap.DeviceError):
            store.store(keys_of(range(8)), host_pool, range(8), after=failed).wait(PATIENCE)


@pytest.mark.parametrize("what", ["store", "load"])
def test_a_copy_that_is_refused_is_a_failed_block(rig: Rig, what: str) -> None:
    ids = np.arange(10)
    rig.store.store(keys_of(ids), rig.pools, ids).wait(PATIENCE)
    with testing.fault(rig.device, "copy", "fail", nth=5, code=1):
        transfer = getattr(rig.store, what)(keys_of(ids), rig.pools, ids)
        with pytest.raises(kvswap.DeviceError, match="the copy between device and staging failed") as told:
            transfer.wait(PATIENCE)
        assert told.value.code == 1
    assert 0 < transfer.failed_positions.size <= 2
    assert set(transfer.reasons) == set(transfer.failed_positions.tolist())
    # a slot that a failed copy should have filled is lost until it is written: so says the pool
    good = [i for i in ids if i not in transfer.failed_positions]
    rig.store.load(keys_of(good), rig.pools, good).wait(PATIENCE)
    rig.store.load(keys_of(ids), rig.pools, ids + 20).wait(PATIENCE)
    for rows in rig.model:
        rows[20:30] = rows[:10]
    if what == "store":
        rig.check()


def test_a_block_stays_if_what_overwrites_it_does_not_come(device: kvswap.Device, tmp_path: Path) -> None:
    """All blocks are pinned, so a new one of a key goes to the slot of the old one."""
    rig = Rig(device, tmp_path, capacity=1 << 20)
    rig.store.store(keys_of([0]), rig.pools, [0]).wait(PATIENCE)
    ids = np.arange(rig.store.stats()["slots"])
    rig.store.store(keys_of(ids[1:]), rig.pools, ids[1:]).wait(PATIENCE)
    rig.store.pin(keys_of(ids))
    with testing.fault(rig.device, "copy", "fail", nth=1, code=1):
        transfer = rig.store.store(keys_of([3]), rig.pools, [BLOCKS - 1])
        with pytest.raises(kvswap.DeviceError, match="the copy between device and staging failed"):
            transfer.wait(PATIENCE)
    assert all(rig.store.contains(keys_of(ids)))
    rig.store.load(keys_of([3]), rig.pools, [BLOCKS - 2]).wait(PATIENCE)
    for rows in rig.model:
        rows[BLOCKS - 2] = rows[3]
    rig.check()
    rig.store.store(keys_of([3]), rig.pools, [BLOCKS - 1]).wait(PATIENCE)
    assert all(rig.store.contains(keys_of(ids)))
    rig.store.close()


def test_a_damaged_block_does_not_reach_the_device(rig: Rig) -> None:
    ids = np.arange(6)
    rig.store.store(keys_of(ids), rig.pools, ids).wait(PATIENCE)
    path = sorted(rig.folder.glob("segment-*.kvs"))[0]
    data = bytearray(path.read_bytes())
    at = data.index(rig.model[1][3].tobytes())
    data[at + 77] ^= 4
    path.write_bytes(data)
    load = rig.store.load(keys_of(ids), rig.pools, ids + 10)
    with pytest.raises(kvswap.Error, match="block 3 is damaged on disk"):
        load.wait(PATIENCE)
    assert load.failed_positions.tolist() == [3]
    for rows in rig.model:
        rows[[10, 11, 12, 14, 15]] = rows[[0, 1, 2, 4, 5]]
    rig.check()


def test_a_deterministic_device(tmp_path: Path) -> None:
    """Its work runs only inside calls: the store makes them."""
    rig = Rig(testing.deterministic_device(11), tmp_path)
    rig.store.store(keys_of(range(20)), rig.pools, range(20)).wait(PATIENCE)
    rig.store.load(keys_of(range(20)), rig.pools, range(20, 40)).wait(PATIENCE)
    for rows in rig.model:
        rows[20:] = rows[:20]
    rig.check()
    rig.store.close()


def test_wrong_arguments(rig: Rig, tmp_path: Path) -> None:
    store, pools = rig.store, rig.pools
    for call, kind, message in (
        (lambda: store.store([b"a"], pools), TypeError, "ids are needed with pools"),
        (lambda: store.store([b"a"], pools, [40]), IndexError, r"ids\[0\] is 40; the pool has 40 blocks"),
        (lambda: store.store([b"a"], pools, [-1]), IndexError, r"ids\[0\] is -1"),
        (lambda: store.load([b"a", b"b"], pools, [3, 3]), ValueError, "ids name slot 3 twice"),
        (lambda: store.store([b"a"], pools[:2], [0]), ValueError, "a block of the pools has 21384 bytes in all"),
        (lambda: store.store([b"a"], pools, [0, 1]), ValueError, "ids has 2 items, but keys has 1"),
        (lambda: store.store([b"a"], [pools[0], 7, pools[2]], [0]), TypeError, r"blocks\[1\] must be a Pool, not int"),
        (lambda: store.store([b"a"], pools, [0], after=7.5), TypeError, "after must be"),
    ):
        with pytest.raises(kind, match=message):
            call()
    other = FileStore(tmp_path / "other", Layout(rig.nbytes), capacity=1 << 20)
    with pytest.raises(ValueError, match="opened without a device"):
        other.store([b"a"], pools, [0])
    assert store.stats()["stored"] == 0
    other.close()


def test_the_store_keeps_its_pools(rig: Rig) -> None:
    """Dropped pools and a dropped handle do no harm to what runs."""
    stream = kvswap.Stream(rig.device)
    with Gate(rig.device) as gate:
        gate.hold(stream)
        rig.store.store(keys_of(range(10)), rig.pools, range(10), after=stream)
        rig.pools.clear()
        gate.open()
    rig.store.close()
    rig.store = rig.open()
    assert rig.store.contains(keys_of(range(10))) == [True] * 10


def test_a_cancelled_transfer_that_nobody_holds(rig: Rig) -> None:
    stream = kvswap.Stream(rig.device)
    rig.store.store(keys_of(range(8)), rig.pools, range(8)).wait(PATIENCE)
    for _ in range(20):
        with Gate(rig.device) as gate:
            gate.hold(stream)
            for call, ids in ((rig.store.store, range(8, 16)), (rig.store.load, range(16, 24))):
                transfer = call(keys_of(range(8)), rig.pools, ids, after=stream)
                assert transfer.cancel()
                del transfer
            gate.open()
    rig.store.load(keys_of(range(8)), rig.pools, range(30, 38)).wait(PATIENCE)
    for rows in rig.model:
        rows[30:38] = rows[:8]
    rig.check()
