"""Pools that hold coded blocks: the bytes are those of kvswap.codecs on each path, also after refusals; blocks that do
not fit fail by themselves, and so do loads of them; what cannot be coded is refused with nothing moved."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import sys
import typing
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Buffer, Bytes, Gate, run_python, usable
from test_gpu_ids import DeviceIds
from transfers import tiny_slots

import kvswap
from kvswap import testing
from kvswap.codecs import Coding, Field, Verdict, _coding
from kvswap.memory import HostPool
from kvswap.typing import ForcedPath

LAYERS = 3
PAGE = 4096 + 72  # 72 bytes that no field names
GPU_BLOCKS = 40
HOST_BLOCKS = 50
PATHS = ("auto", "burst", "kernel")
CODECS = ("exact", "mxfp8", "fp4")


@pytest.fixture(autouse=True)
def _kernels(session_device: kvswap.Device) -> None:
    usable(session_device, "kernel")


@pytest.fixture
def tiny(device: kvswap.Device) -> Iterator[kvswap.Device]:
    with tiny_slots(device):
        yield device


def bf16(shape: tuple[int, ...], seed: int) -> Bytes:
    """Normal values, as bytes."""
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def coding_of(codec: str, page: int = PAGE, pages: int = LAYERS) -> Coding:
    return Coding(page * pages, codec, page_nbytes=page, fields=[Field(0, page - 72, "bf16")])


class Tiers:
    """A cache on the device, layer first: a block's pages are rows of one pool, or `split`: pools of a group. On the
    host a block's coded pages lie together."""

    def __init__(
        self,
        device: kvswap.Device,
        coding: Coding,
        *,
        split: bool = False,
        seed: int = 1,
        gpu_blocks: int = GPU_BLOCKS,
        host_blocks: int = HOST_BLOCKS,
    ) -> None:
        self.coding, self.page = coding, coding.page_nbytes
        pages = coding.block_nbytes // self.page
        self.gpu = Buffer(device, pages * gpu_blocks * self.page, "gpu")
        self.host = Buffer(device, host_blocks * coding.coded_nbytes, "cpu")
        self.shape = (pages, gpu_blocks, self.page)
        self.put(bf16((pages, gpu_blocks, self.page // 2), seed))
        self.before = self.host.randomise(seed)
        step = gpu_blocks * self.page
        if split:
            one = Coding(self.page, coding.codec, fields=coding.fields)
            coded = coding.coded_nbytes // pages
            self.gpu_pools: Any = []
            self.host_pools: Any = []
            for i in range(pages):
                for pools, ptr, blocks, nbytes, more in (
                    (self.gpu_pools, self.gpu.ptr + i * step, gpu_blocks, self.page, {}),
                    (self.host_pools, self.host.ptr + i * coded, host_blocks, coded,
                     {"stride": coding.coded_nbytes, "coding": one}),
                ):  # fmt: skip
                    group = pools[0] if pools else None
                    pools.append(kvswap.Pool(device, ptr, blocks, nbytes, group=group, **more))
        else:
            self.gpu_pools = kvswap.Pool(
                device, self.gpu.ptr, gpu_blocks, coding.block_nbytes, rows=pages, pitch=step, stride=self.page
            )
            self.host_pools = kvswap.Pool(device, self.host.ptr, host_blocks, coding.coded_nbytes, coding=coding)

    def put(self, pages: Bytes) -> None:
        self.gpu.put(np.ascontiguousarray(pages).reshape(-1))

    def blocks(self) -> Bytes:
        """Of the GPU, a row a block."""
        pages = self.gpu.get().reshape(self.shape)
        return np.ascontiguousarray(pages.transpose(1, 0, 2)).reshape(self.shape[1], -1)

    def coded(self) -> Bytes:
        return self.host.get().reshape(-1, self.coding.coded_nbytes)

    def store(self, gpu: Any, host: Any, **options: Any) -> kvswap.Transfer:
        return kvswap.move_blocks(self.gpu_pools, self.host_pools, gpu, host, **options)

    def load(self, host: Any, gpu: Any, **options: Any) -> kvswap.Transfer:
        return kvswap.move_blocks(self.host_pools, self.gpu_pools, host, gpu, **options)


def ids(count: int, of: int, seed: int) -> Any:
    return np.random.default_rng(seed).permutation(of)[:count]


def check_stored(tiers: Tiers, gpu: Any, host: Any) -> None:
    """Those slots hold the blocks as kvswap.codecs codes them, and no other byte has changed."""
    expected = tiers.before.reshape(-1, tiers.coding.coded_nbytes).copy()
    expected[host] = tiers.coding.encode(tiers.blocks()[gpu])[0]
    np.testing.assert_array_equal(tiers.coded(), expected)


def check_loaded(tiers: Tiers, before: Bytes, host: Any, gpu: Any) -> None:
    expected = before.copy()
    expected[gpu] = tiers.coding.decode(tiers.coded()[host])[0]
    np.testing.assert_array_equal(tiers.blocks(), expected)


def there_and_back(tiers: Tiers, count: int = 30, **options: Any) -> None:
    gpu, host = ids(count, GPU_BLOCKS, 2), ids(count, HOST_BLOCKS, 3)
    transfer = tiers.store(gpu, host, **options)
    transfer.wait(PATIENCE)
    assert transfer.path in ("burst", "kernel")
    check_stored(tiers, gpu, host)
    tiers.put(bf16((tiers.shape[0], tiers.shape[1], tiers.page // 2), 9))
    before, to = tiers.blocks(), ids(count, GPU_BLOCKS, 4)
    transfer = tiers.load(host, to, **options)
    transfer.wait(PATIENCE)
    check_loaded(tiers, before, host, to)


# -- right bytes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [False, True], ids=["rows", "pools"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("codec", CODECS)
def test_there_and_back(device: kvswap.Device, codec: str, path: str, split: bool) -> None:
    there_and_back(Tiers(device, coding_of(codec), split=split), path=path)


@pytest.mark.parametrize("path", PATHS)
def test_many_bursts(tiny: kvswap.Device, path: str) -> None:
    there_and_back(Tiers(tiny, coding_of("exact")), path=path)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_blocks(device: kvswap.Device, count: int) -> None:
    there_and_back(Tiers(device, coding_of("exact")), count)


def test_exact_loses_no_bit(device: kvswap.Device) -> None:
    tiers = Tiers(device, coding_of("exact"))
    before, all_ids = tiers.blocks(), np.arange(GPU_BLOCKS)
    tiers.store(all_ids, all_ids).wait(PATIENCE)
    tiers.put(np.zeros(tiers.shape, np.uint8))
    tiers.load(all_ids, all_ids).wait(PATIENCE)
    np.testing.assert_array_equal(tiers.blocks(), before)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("split", [False, True], ids=["rows", "pools"])
def test_layer_by_layer(tiny: kvswap.Device, path: str, split: bool) -> None:
    tiers = Tiers(tiny, coding_of("exact"), split=split)
    gpu, host = ids(30, GPU_BLOCKS, 2), ids(30, HOST_BLOCKS, 3)
    parts = None if split else [(0, layer, layer * PAGE, 1, PAGE, 0) for layer in range(LAYERS)]
    stream = kvswap.Stream(tiny)
    transfer = tiers.store(gpu, host, parts=parts, layer_events=True, path=path)
    for layer in range(LAYERS):
        transfer.make_wait_layer(layer, stream)
    transfer.wait(PATIENCE)
    check_stored(tiers, gpu, host)
    before = tiers.blocks()
    transfer = tiers.load(host, gpu, parts=parts, layer_events=True, path=path)
    transfer.wait(PATIENCE)
    check_loaded(tiers, before, host, gpu)


def test_parts_of_blocks(device: kvswap.Device) -> None:
    """The first and the last page of each block; the others stay as they are."""
    tiers = Tiers(device, coding_of("exact"))
    tiers.store([5, 7], [1, 2], parts=[(0, 0, 0, 2, PAGE, 2 * PAGE)]).wait(PATIENCE)
    expected = tiers.before.reshape(HOST_BLOCKS, LAYERS, -1).copy()
    coded = tiers.coding.encode(tiers.blocks()[[5, 7]])[0].reshape(2, LAYERS, -1)
    for page in (0, 2):
        expected[[1, 2], page] = coded[:, page]
    np.testing.assert_array_equal(tiers.coded(), expected.reshape(HOST_BLOCKS, -1))


def test_tensors_that_are_coded_in_two_ways(tiny: kvswap.Device) -> None:
    """An indexer's page beside a layer's: one call moves both."""
    sizes, codings = (PAGE, 1024), (coding_of("exact", pages=1), Coding(1024, "mxfp8"))
    gpu = [Buffer(tiny, GPU_BLOCKS * size, "gpu") for size in sizes]
    host = [Buffer(tiny, HOST_BLOCKS * coding.coded_nbytes, "cpu") for coding in codings]
    for buffer, size in zip(gpu, sizes, strict=True):
        buffer.put(bf16((GPU_BLOCKS, size // 2), size).reshape(-1))
    src = [kvswap.Pool(tiny, one.ptr, GPU_BLOCKS, size) for one, size in zip(gpu, sizes, strict=True)]
    dst = [
        kvswap.Pool(tiny, one.ptr, HOST_BLOCKS, coding.coded_nbytes, coding=coding)
        for one, coding in zip(host, codings, strict=True)
    ]
    to = ids(GPU_BLOCKS, HOST_BLOCKS, 1)
    for path in PATHS:
        kvswap.move_blocks(src, dst, np.arange(GPU_BLOCKS), to, path=path).wait(PATIENCE)
        for i, coding in enumerate(codings):
            expected, _ = coding.encode(gpu[i].get().reshape(GPU_BLOCKS, -1))
            np.testing.assert_array_equal(host[i].get().reshape(HOST_BLOCKS, -1)[to], expected)
            host[i].randomise(i)


@pytest.mark.parametrize("layout", ["block-first", "layer-first"])
def test_a_host_pool_of_coded_blocks(device: kvswap.Device, layout: str) -> None:
    coding = coding_of("exact")
    tiers = Tiers(device, coding)
    memory = HostPool(HOST_BLOCKS, coding.coded_nbytes, layers=LAYERS, layout=layout, device=device)
    tiers.host_pools = memory.pool(coding=coding)
    tiers.store([1, 2, 3], [7, 8, 5]).wait(PATIENCE)
    tiers.load([7, 8, 5], [4, 5, 6]).wait(PATIENCE)
    blocks = tiers.blocks()
    np.testing.assert_array_equal(blocks[[4, 5, 6]], blocks[[1, 2, 3]])
    with pytest.raises(TypeError, match=r"coding must be a kvswap.codecs.Coding, not str"):
        memory.pool(coding="exact")


def test_coded_blocks_between_coded_pools_move_as_they_are(device: kvswap.Device) -> None:
    tiers = Tiers(device, coding_of("fp4"))
    other = Buffer(device, HOST_BLOCKS * tiers.coding.coded_nbytes, "cpu")
    pool = kvswap.Pool(device, other.ptr, HOST_BLOCKS, tiers.coding.coded_nbytes, coding=coding_of("fp4"))
    tiers.store([0, 1], [3, 4]).wait(PATIENCE)
    kvswap.move_blocks(tiers.host_pools, pool, [3, 4], [8, 7]).wait(PATIENCE)
    np.testing.assert_array_equal(other.get().reshape(HOST_BLOCKS, -1)[[8, 7]], tiers.coded()[[3, 4]])


@pytest.mark.parametrize("path", PATHS)
def test_ids_on_the_device(device: kvswap.Device, path: str) -> None:
    tiers = Tiers(device, coding_of("exact"))
    gpu, host = ids(20, GPU_BLOCKS, 2), ids(20, HOST_BLOCKS, 3)
    named = gpu.copy()
    named[4] = GPU_BLOCKS
    on_device = DeviceIds(device, named)
    transfer = tiers.store(on_device, host, path=path)
    with pytest.raises(kvswap.Error, match=r"src_ids\[4\] is 40, read on the device"):
        transfer.wait(PATIENCE)
    assert transfer.failed_positions.tolist() == [4]
    good = np.delete(np.arange(20), 4)
    expected = tiers.coding.encode(tiers.blocks()[gpu[good]])[0]
    np.testing.assert_array_equal(tiers.coded()[host[good]], expected)
    before = tiers.blocks()
    transfer = tiers.load(host, on_device, path=path)
    with pytest.raises(kvswap.Error, match=r"dst_ids\[4\] is 40"):
        transfer.wait(PATIENCE)
    check_loaded(tiers, before, host[good], gpu[good])


# -- what does not fit -------------------------------------------------------------------------------------------------


def spoil(tiers: Tiers, block: int, page: int) -> None:
    """Random bits in one page: `exact` cannot hold them."""
    pages = tiers.gpu.get().reshape(tiers.shape)
    pages[page, block] = np.random.default_rng(block).integers(0, 256, tiers.page, np.uint8)
    tiers.put(pages)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("split", [False, True], ids=["rows", "pools"])
def test_a_block_that_does_not_fit_fails_alone(tiny: kvswap.Device, path: str, split: bool) -> None:
    tiers = Tiers(tiny, coding_of("exact"), split=split)
    spoil(tiers, 17, 1)
    gpu, host = np.arange(GPU_BLOCKS), ids(GPU_BLOCKS, HOST_BLOCKS, 3)
    transfer = tiers.store(gpu, host, path=path)
    with pytest.raises(kvswap.Error, match=r"position 17 does not fit the coded size of pool 'pool \d+'"):
        transfer.wait(PATIENCE)
    assert transfer.failed_positions.tolist() == [17]
    check_stored(tiers, gpu, host)  # its page says so, the others are there
    before = tiers.blocks()
    back = tiers.load(host, gpu, path=path)
    with pytest.raises(kvswap.Error, match="17"):
        back.wait(PATIENCE)
    assert back.failed_positions.tolist() == [17]
    check_loaded(tiers, before, host, gpu)
    tiers.put(bf16((LAYERS, GPU_BLOCKS, PAGE // 2), 5))
    tiers.store([3], host[17:18], path=path).wait(PATIENCE)  # a block that fits is right again
    tiers.load(host[17:18], [2], path=path).wait(PATIENCE)
    np.testing.assert_array_equal(tiers.blocks()[2], tiers.blocks()[3])


def test_more_tables_than_an_engine_keeps(device: kvswap.Device) -> None:
    """Transfers of other rows and codings each, none of which has ended: the later ones carry their own tables."""
    pages = 40
    tiers, held = Tiers(device, coding_of("exact", pages=pages), split=True), kvswap.Stream(device)
    with Gate(device) as gate:
        gate.hold(held)
        made = [
            kvswap.move_blocks(tiers.gpu_pools[i], tiers.host_pools[i], [3, 4], [5, 1], after=[held], path="kernel")
            for i in range(pages)
        ]
        gate.open()
        for transfer in made:
            transfer.wait(PATIENCE)
    check_stored(tiers, [3, 4], [5, 1])


def test_a_load_that_is_queued_before_the_verdict(device: kvswap.Device) -> None:
    tiers, held = Tiers(device, coding_of("exact")), kvswap.Stream(device)
    spoil(tiers, 3, 0)
    with Gate(device) as gate:
        gate.hold(held)
        stored = tiers.store([2, 3, 4], [0, 1, 2], after=[held])
        loaded = tiers.load([0, 1, 2], [10, 11, 12])
        gate.open()
        for transfer in (loaded, stored):
            with pytest.raises(kvswap.Error):
                transfer.wait(PATIENCE)
            assert transfer.failed_positions.tolist() == [1]
    now = tiers.blocks()
    np.testing.assert_array_equal(now[[10, 12]], now[[2, 4]])
    assert not now[11, :4096].any()


@pytest.mark.parametrize("path", PATHS)
def test_within_the_device(device: kvswap.Device, path: str) -> None:
    """A coded pool in memory of the device, as processes that share links have: coded and decoded by the kernel."""
    tiers = Tiers(device, coding_of("exact"))
    coding = tiers.coding
    room = Buffer(device, HOST_BLOCKS * coding.coded_nbytes, "gpu")
    room.randomise(1)
    within = kvswap.Pool(device, room.ptr, HOST_BLOCKS, coding.coded_nbytes, coding=coding)
    spoil(tiers, 17, 1)
    gpu, slots = ids(GPU_BLOCKS, GPU_BLOCKS, 4), ids(GPU_BLOCKS, HOST_BLOCKS, 5)
    bad = int(np.flatnonzero(gpu == 17)[0])
    transfer = kvswap.move_blocks(tiers.gpu_pools, within, gpu, slots, path=path)
    with pytest.raises(kvswap.Error, match=f"position {bad} does not fit"):
        transfer.wait(PATIENCE)
    assert transfer.failed_positions.tolist() == [bad] and transfer.path == "kernel"
    coded = room.get().reshape(-1, coding.coded_nbytes)
    np.testing.assert_array_equal(coded[slots], coding.encode(tiers.blocks()[gpu])[0])
    before, to = tiers.blocks(), ids(gpu.size, GPU_BLOCKS, 6)
    back = kvswap.move_blocks(within, tiers.gpu_pools, slots, to, path=path)
    with pytest.raises(kvswap.Error):
        back.wait(PATIENCE)
    assert back.failed_positions.tolist() == [bad]
    before[to] = coding.decode(coded[slots])[0]
    np.testing.assert_array_equal(tiers.blocks(), before)
    with pytest.raises(kvswap.Error, match="with ids in host memory"):
        kvswap.move_blocks(within, tiers.gpu_pools, slots[:2], DeviceIds(device, to[:2]))


@pytest.mark.parametrize("path", PATHS)
def test_damaged_blocks(device: kvswap.Device, path: str) -> None:
    """Bytes that the codec has not written: the position fails, and its page is zeros."""
    tiers = Tiers(device, coding_of("exact"))
    gpu, host = ids(20, GPU_BLOCKS, 2), ids(20, HOST_BLOCKS, 3)
    tiers.store(gpu, host).wait(PATIENCE)
    coded = tiers.coded()
    coded[host[6], 2] ^= 1  # the version, in a head
    tiers.host.put(coded.reshape(-1))
    before = tiers.blocks()
    transfer = tiers.load(host, gpu, path=path)
    with pytest.raises(kvswap.Error, match=r"for position 6, does not hold a block that this pool's codec"):
        transfer.wait(PATIENCE)
    assert transfer.failed_positions.tolist() == [6]
    check_loaded(tiers, before, host, gpu)
    assert tiers.coding.decode(coded[host])[1].tolist().count(Verdict.DAMAGED) == 1


@pytest.mark.parametrize("codec", CODECS)
def test_any_bytes_are_decoded(device: kvswap.Device, codec: str) -> None:
    """Coded blocks with random bytes behind their heads, and in them: zeros or what the CPU makes of them, and nothing
    outside the blocks. 36,000 units a codec."""
    rng, blocks = np.random.default_rng(CODECS.index(codec)), 1000
    coding = Coding(1024, codec)
    gpu, host = Buffer(device, 2 * blocks * 1024, "gpu"), Buffer(device, blocks * coding.coded_nbytes, "cpu")
    src = kvswap.Pool(device, host.ptr, blocks, coding.coded_nbytes, coding=coding)
    dst = kvswap.Pool(device, gpu.ptr, blocks, 1024, stride=2048)
    good, _ = coding.encode(bf16((blocks, 512), 1))
    failed = 0
    for turn in range(36):
        coded, untouched = good.copy(), gpu.randomise(turn)
        changed = rng.random(blocks) < 0.9
        coded[changed, 16:] = rng.integers(0, 256, (changed.sum(), coding.coded_nbytes - 16), np.uint8)
        heads = rng.random(blocks) < 0.3
        coded[heads, rng.integers(0, 16, heads.sum())] = rng.integers(0, 256, heads.sum(), np.uint8)
        host.put(coded.reshape(-1))
        expected = untouched.reshape(blocks, 2048).copy()
        expected[:, :1024], verdicts = coding.decode(coded)
        transfer = kvswap.move_blocks(src, dst, np.arange(blocks), np.arange(blocks))
        with suppress(kvswap.Error):
            transfer.wait(PATIENCE)
        np.testing.assert_array_equal(gpu.get().reshape(blocks, 2048), expected)
        assert transfer.failed_positions.tolist() == np.flatnonzero(verdicts).tolist()
        failed += len(transfer.failed_positions)
    assert 0 < failed < 36 * blocks


# -- refusals of the driver --------------------------------------------------------------------------------------------


CALLS = ("alloc", "copy", "copy_batch", "launch", "event_record", "stream_wait")


@pytest.mark.parametrize("nth", [1, 2, 5])
@pytest.mark.parametrize("operation", CALLS)
def test_a_refused_burst_is_repeated_by_the_kernel(tiny: kvswap.Device, operation: str, nth: int) -> None:
    """Or its blocks fail: no block is there half, and no raw path takes it."""
    tiers = Tiers(tiny, coding_of("exact"))
    gpu, host = ids(30, GPU_BLOCKS, 2), ids(30, HOST_BLOCKS, 3)
    for way in ("store", "load"):
        before = tiers.blocks()
        with testing.fault(tiny, "call", "fail", operation=operation, nth=nth):
            try:
                transfer = tiers.store(gpu, host) if way == "store" else tiers.load(host, gpu)
            except kvswap.Error:
                assert operation in ("event_record", "stream_wait", "alloc"), "nothing was moved"
                continue
        assert transfer.path in ("burst", "kernel")
        try:
            transfer.wait(PATIENCE)
        except kvswap.Error:
            assert len(transfer.failed_positions) == 30
            continue
        if way == "store":
            check_stored(tiers, gpu, host)
        else:
            check_loaded(tiers, before, host, gpu)
    there_and_back(Tiers(tiny, coding_of("exact"), seed=4))  # the slots were given back


def test_without_launches_all_blocks_fail(device: kvswap.Device) -> None:
    tiers = Tiers(device, coding_of("exact"))
    with testing.fault(device, "call", "fail", operation="launch", every=1):
        transfer = tiers.store([0, 1], [0, 1])
    with pytest.raises(kvswap.Error):
        transfer.wait(PATIENCE)
    assert transfer.failed_positions.tolist() == [0, 1]


def test_while_other_transfers_hold_both_sets_of_slots(tiny: kvswap.Device) -> None:
    tiers = Tiers(tiny, coding_of("exact"))
    held, streams = kvswap.Stream(tiny), [kvswap.Stream(tiny) for _ in range(3)]
    with Gate(tiny) as gate:
        gate.hold(held)
        waiting = [tiers.store([i], [i], after=[held], stream=streams[i]) for i in range(2)]
        free = tiers.store([5, 6], [5, 6], stream=streams[2])
        free.wait(PATIENCE)
        assert free.path == "kernel"
        gate.open()
        for transfer in waiting:
            transfer.wait(PATIENCE)
    check_stored(tiers, [0, 1, 5, 6], [0, 1, 5, 6])


def test_the_race_checker_follows_them(device: kvswap.Device) -> None:
    tiers, held = Tiers(device, coding_of("exact")), kvswap.Stream(device)
    with testing.race_checker() as checker:
        tiers.store([1, 2], [3, 4])
        tiers.load([3, 4], [5, 6]).wait(PATIENCE)
    assert not checker.races
    with testing.race_checker(raise_at_exit=False) as checker, Gate(device) as gate:
        gate.hold(held)
        with testing.fault(device, "hazard", "skip", operation="raw"):
            stored = tiers.store([1, 2], [3, 4], after=[held])
            loaded = tiers.load([4], [7], priority="high")
        gate.open()
        for transfer in (stored, loaded):
            transfer.wait(PATIENCE)
    assert [race.slot for race in checker.races] == [4]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["dma", "strided", "direct"])
def test_raw_paths_are_refused(device: kvswap.Device, path: str) -> None:
    usable(device, path)
    tiers = Tiers(device, coding_of("exact"))
    with pytest.raises(kvswap.Error, match=rf"path '{path}' moves bytes as they are, and pool 'pool \d+' is coded"):
        tiers.store([0], [0], path=path)
    np.testing.assert_array_equal(tiers.host.get(), tiers.before)


def test_layouts_that_are_refused(device: kvswap.Device) -> None:
    coding = coding_of("exact")
    coded = coding.coded_nbytes
    host = Buffer(device, 8 * coded + 64, "cpu")
    ptr = host.ptr + -host.ptr % 16

    def refused(match: str, *args: Any, **options: Any) -> None:
        with pytest.raises((ValueError, TypeError), match=match):
            kvswap.Pool(device, *args, **{"coding": coding, **options})

    refused(rf"block_nbytes is {coded + 16}; a block is coded to {coded} bytes", ptr, 4, coded + 16)
    refused("multiples of 16", ptr + 8, 4, coded)
    refused("multiples of 16", ptr, 4, coded, stride=coded + 8)
    refused("do not hold whole coded pages", ptr, 4, coded, rows=2 * LAYERS, pitch=coded)
    refused("coding must be a kvswap.codecs.Coding, not str", ptr, 4, coded, coding="exact")


def test_moves_that_are_refused(device: kvswap.Device) -> None:
    tiers = Tiers(device, coding_of("exact"))
    coding = tiers.coding

    def refused(match: str, src: Any, dst: Any, **options: Any) -> None:
        with pytest.raises((ValueError, kvswap.Error), match=match):
            kvswap.move_blocks(src, dst, [0], [0], **options)

    for part in ((0, 0, 8, 1, PAGE, 0), (0, 0, 0, 1, PAGE - 8, 0), (0, 0, 0, 2, PAGE, PAGE + 8)):
        refused(
            "is coded in pages of 4168 bytes, and a part is whole pages",
            tiers.gpu_pools,
            tiers.host_pools,
            parts=[part],
        )
    fp4 = Buffer(device, 4 * coding_of("fp4").coded_nbytes, "cpu")
    other = kvswap.Pool(device, fp4.ptr, 4, coding_of("fp4").coded_nbytes, coding=coding_of("fp4"))
    refused("are coded in two ways", tiers.host_pools, other)
    plain = Buffer(device, 4 * coding.block_nbytes, "cpu")
    pool = kvswap.Pool(device, plain.ptr, 4, coding.block_nbytes)
    refused("blocks are coded on the way from memory of the device", pool, tiers.host_pools)
    half = kvswap.Pool(
        device,
        Buffer(device, 4 * coding.block_nbytes).memory,
        4,
        coding.block_nbytes,
        rows=2,
        pitch=2 * coding.block_nbytes,
        stride=coding.block_nbytes // 2,
    )
    refused("a page must lie in one row", half, tiers.host_pools)
    gpu = kvswap.Pool(device, Buffer(device, 4 * 64).memory, 4, 64)
    host = kvswap.Pool(device, Buffer(device, 4 * 64, "cpu").memory, 4, 64)
    refused(r"src\[1\] -> dst\[1\] is not coded", [tiers.gpu_pools, gpu], [tiers.host_pools, host])
    refused("name the parts", tiers.gpu_pools, host)


def test_pageable_host_memory_is_refused(device: kvswap.Device) -> None:
    if device.kind != "cuda":
        pytest.skip("all host memory of a host device is pinned")
    tiers = Tiers(device, coding_of("exact"))
    memory = Buffer(device, HOST_BLOCKS * tiers.coding.coded_nbytes, "plain")
    pool = kvswap.Pool(device, memory.ptr, HOST_BLOCKS, tiers.coding.coded_nbytes, coding=tiers.coding)
    with pytest.raises(ValueError, match="pageable"):
        kvswap.move_blocks(tiers.gpu_pools, pool, [0], [0])


WITHOUT_KERNELS = """
    import kvswap
    from kvswap.codecs import Coding
    device, coding = kvswap.Device({device!r}), Coding(4096, "exact")
    memory = device.alloc(4 * coding.coded_nbytes, host=True)
    try:
        kvswap.Pool(device, memory, 4, coding.coded_nbytes, coding=coding)
    except kvswap.Error as error:
        print(error)
"""


def test_without_kernels_a_coded_pool_is_refused(device: kvswap.Device) -> None:
    run = run_python(WITHOUT_KERNELS.format(device=device.name), KVSWAP_DISABLE="kernel")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("a coded pool needs kernels, and they are off: KVSWAP_DISABLE names 'kernel'")


def test_the_paths_that_code_are_those_of_the_table(device: kvswap.Device) -> None:
    """Python refuses the others before anything is queued; so does the call."""
    assert PATHS == _coding.PATHS
    tiers = Tiers(device, coding_of("exact"))
    for path in typing.get_args(ForcedPath):
        if path in PATHS:
            tiers.store([1], [2], path=path).wait(PATIENCE)
        else:
            with pytest.raises((kvswap.Error, ValueError)):
                tiers.store([1], [2], path=path)


def test_a_pool_holds_its_coding(device: kvswap.Device) -> None:
    coding = coding_of("exact")
    pool = kvswap.Pool(device, device.alloc(coding.coded_nbytes, host=True), 1, coding.coded_nbytes, coding=coding)
    assert pool.coding is coding
    held = sys.getrefcount(coding)
    del pool
    assert sys.getrefcount(coding) == held - 1
    assert kvswap.Pool(device, device.alloc(64), 1, 64).coding is None


def test_bytes_on_the_link_are_counted(device: kvswap.Device) -> None:
    """Of whole blocks, and of parts, which are whole pages."""
    tiers = Tiers(device, coding_of("exact"))

    def counted(direction: str) -> tuple[int, int]:
        paths = device.stats()["paths"].get(direction, {}).values()
        return sum(path["bytes"] for path in paths), sum(path["link_bytes"] for path in paths)

    before = counted("d2h")
    tiers.store(range(5), range(5)).wait(PATIENCE)
    tiers.store(range(3), range(3), parts=[(0, 0, PAGE, 1, PAGE, 0)]).wait(PATIENCE)
    nbytes, link = (new - old for new, old in zip(counted("d2h"), before, strict=True))
    assert nbytes == 5 * tiers.coding.block_nbytes + 3 * PAGE
    assert link == (5 * LAYERS + 3) * tiers.coding.coded_nbytes // LAYERS < nbytes
    before = counted("h2d")
    tiers.load(range(5), range(5)).wait(PATIENCE)
    assert [new - old for new, old in zip(counted("h2d"), before, strict=True)] == [
        5 * tiers.coding.block_nbytes, 5 * tiers.coding.coded_nbytes
    ]  # fmt: skip


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("valid", [2, 1000, 1026, PAGE])
def test_blocks_with_fewer_tokens(device: kvswap.Device, codec: str, path: Any, valid: int) -> None:
    """What stands behind the valid bytes neither matters nor is kept, even where it could not be coded."""
    tiers = Tiers(device, coding_of(codec))
    before = tiers.blocks().reshape(GPU_BLOCKS, LAYERS, PAGE)
    pages = before.copy()
    pages[:, :, valid:] = np.random.default_rng(5).integers(0, 256, pages[:, :, valid:].shape, np.uint8)
    tiers.put(pages.transpose(1, 0, 2))
    tiers.store(range(6), range(6), path=path, valid_nbytes=valid).wait(PATIENCE)
    coded, verdicts = tiers.coding.encode(before[:6].reshape(6, -1), valid_nbytes=valid)
    assert not verdicts.any()
    np.testing.assert_array_equal(tiers.coded()[:6], coded)


def test_valid_bytes_of_blocks_that_are_not_coded(device: kvswap.Device) -> None:
    tiers = Tiers(device, coding_of("exact"))
    tiers.store([1], [1]).wait(PATIENCE)
    with pytest.raises(ValueError, match="valid_nbytes is 64, which is for blocks that are encoded"):
        tiers.load([1], [1], valid_nbytes=64)
    with pytest.raises(ValueError, match="valid_nbytes is 0: must be at least 1, or None"):
        tiers.store([1], [1], valid_nbytes=0)
