"""Pools and move_blocks: bytes against NumPy for every shape of blocks, order without `after`, failure that spreads,
layers, and wrong arguments refused with nothing moved."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from conftest import (
    PATIENCE,
    Buffer,
    Bytes,
    Gate,
    bindings,
    names_of_threads,
    need_bindings,
    run_python,
    until,
    usable,
)

import kvswap
from kvswap import _C, _races, memory, testing
from kvswap.files import FileStore, Layout

BLOCKS = 9
NBYTES = 4 * 251  # of a block: four odd rows


class Tier:
    """A pool over memory that the test fills, and where in it each byte of each block lies."""

    def __init__(
        self, device: kvswap.Device, side: str, nbytes: int = NBYTES, blocks: int = BLOCKS, **layout: Any
    ) -> None:
        rows = layout.get("rows", 1)
        row = nbytes // rows
        stride, pitch = layout.get("stride") or row, layout.get("pitch") or row
        offsets = [np.arange(blocks) * stride, np.arange(rows) * pitch, np.arange(row)]
        self.where = np.add.outer(np.add.outer(offsets[0], offsets[1]), offsets[2]).reshape(blocks, nbytes)
        self.buffer = Buffer(device, int(self.where.max()) + 1, side)
        self.before = self.buffer.randomise(sum(map(ord, side)) + nbytes)
        self.pool = kvswap.Pool(device, self.buffer.memory or self.buffer.array, blocks, nbytes, **layout)

    def blocks(self) -> Bytes:
        """As they were at first, a row a block."""
        return self.before[self.where]

    def now(self) -> Bytes:
        return self.buffer.get()[self.where]

    def check(self, blocks: Bytes) -> None:
        """These blocks, and between the blocks nothing has changed."""
        expected = self.before.copy()
        expected[self.where] = blocks
        np.testing.assert_array_equal(self.buffer.get(), expected)


def copied(src: Tier, dst: Tier, src_ids: Any, dst_ids: Any) -> Bytes:
    blocks = dst.blocks()
    blocks[np.asarray(dst_ids)] = src.blocks()[np.asarray(src_ids)]
    return blocks


def move(src: Any, dst: Any, src_ids: Any, dst_ids: Any, **options: Any) -> kvswap.Transfer:
    pools = [[tier.pool for tier in side] if isinstance(side, list) else side.pool for side in (src, dst)]
    return kvswap.move_blocks(*pools, src_ids, dst_ids, **options)


@pytest.fixture
def pair(device: kvswap.Device) -> tuple[Tier, Tier]:
    return Tier(device, "gpu"), Tier(device, "cpu")


# -- bytes ------------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, int]] = {
    "packed": {},
    "strided": {"stride": NBYTES + 13},
    "rows within blocks": {"rows": 4, "pitch": 260, "stride": 4 * 260 + 7},
    "blocks within rows": {"rows": 4, "stride": 251, "pitch": 251 * BLOCKS + 5},
    "two odd rows": {"rows": 2, "stride": 505, "pitch": 505 * BLOCKS},
}
SIDES = {"D2H": ("gpu", "cpu"), "H2D": ("cpu", "gpu"), "GPU": ("gpu", "gpu"), "CPU": ("cpu", "cpu")}


# Each two layouts on two of the four sides, and each layout on each side: every path runs them all.
WHOLE = [
    (src, dst, sides)
    for i, src in enumerate(LAYOUTS)
    for j, dst in enumerate(LAYOUTS)
    for k, sides in enumerate(SIDES)
    if (i + j + k) % 4 in (0, 2)
]


@pytest.mark.parametrize(("src", "dst", "sides"), WHOLE)
def test_whole_blocks(device: kvswap.Device, path: str, src: str, dst: str, sides: str) -> None:
    source, target = Tier(device, SIDES[sides][0], **LAYOUTS[src]), Tier(device, SIDES[sides][1], **LAYOUTS[dst])
    src_ids, dst_ids = [0, 1, 2, 7, 8, 3], [4, 5, 6, 0, 8, 2]
    transfer = move(source, target, src_ids, np.array(dst_ids, np.int32), path=path)
    transfer.wait(PATIENCE)
    target.check(copied(source, target, src_ids, dst_ids))
    source.check(source.blocks())
    assert (transfer.num_blocks, transfer.nbytes) == (6, 6 * NBYTES)
    assert transfer.failed_positions.size == 0


def test_several_pairs(device: kvswap.Device, path: str) -> None:
    """Pairs of their own sizes and layouts; more of them than fit in the room that needs no allocation."""
    sizes = [4 * (3 + i) for i in range(11)]
    sources = [Tier(device, "cpu", nbytes, rows=2, pitch=nbytes, stride=2 * nbytes) for nbytes in sizes]
    targets = [Tier(device, "gpu", nbytes, stride=nbytes + i) for i, nbytes in enumerate(sizes)]
    transfer = move(sources, targets, [1, 5], [5, 0], path=path)
    transfer.wait(PATIENCE)
    for source, target in zip(sources, targets, strict=True):
        target.check(copied(source, target, [1, 5], [5, 0]))
    assert transfer.nbytes == 2 * sum(sizes)


def test_the_same_pool_on_both_sides(device: kvswap.Device) -> None:
    tier = Tier(device, "gpu")
    move(tier, tier, [0, 1], [2, 3]).wait(PATIENCE)
    tier.check(copied(tier, tier, [0, 1], [2, 3]))


def test_nothing_to_move(pair: tuple[Tier, Tier]) -> None:
    for parts in (None, np.zeros((0, 6), np.int64), [(0, 0, 0, 1, 8, 0)]):
        transfer = move(*pair, [], [], parts=parts)
        transfer.wait(PATIENCE)
        assert (transfer.nbytes, transfer.state) == (0, "done")
    transfer = move(*pair, [1], [2], parts=np.zeros((0, 6), np.int64))
    transfer.wait(PATIENCE)
    assert transfer.nbytes == 0
    pair[1].check(pair[1].blocks())


def part_bytes(parts: Any, pair: int) -> np.ndarray[Any, Any]:
    """Which bytes of a block the parts move."""
    spans = [
        np.add.outer(np.arange(rows) * pitch, np.arange(nbytes)).ravel() + offset
        for which, _, offset, rows, nbytes, pitch in parts
        if which == pair
    ]
    return np.concatenate(spans) if spans else np.zeros(0, np.int64)


PARTS: dict[str, list[tuple[int, ...]]] = {
    "one row": [(0, 0, 3, 1, 500, 0)],
    "over rows": [(0, 0, 250, 1, 300, 0)],
    "many rows": [(0, 0, 1, 5, 20, 200)],
    "two parts": [(0, 0, 0, 2, 11, 502), (0, 0, 900, 1, 104, 0)],
    "the end": [(0, 0, NBYTES - 1, 1, 1, 0)],
    "all of it": [(0, 0, 0, 1, NBYTES, 0)],
    "layers": [(0, 0, 0, 1, 251, 0), (0, 1, 251, 1, 251, 0), (0, 2, 502, 2, 100, 251)],
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("layouts", [("packed", "packed"), ("rows within blocks", "two odd rows"), ("strided",) * 2])
def test_parts(device: kvswap.Device, path: str, layouts: tuple[str, str], name: str) -> None:
    source, target = Tier(device, "gpu", **LAYOUTS[layouts[0]]), Tier(device, "cpu", **LAYOUTS[layouts[1]])
    src_ids, dst_ids = [8, 0, 1], [1, 7, 8]
    parts = PARTS[name]
    transfer = move(source, target, src_ids, dst_ids, parts=np.array(parts, np.int32), path=path)
    transfer.wait(PATIENCE)
    expected, moved = target.blocks(), part_bytes(parts, 0)
    expected[np.ix_(dst_ids, moved)] = source.blocks()[np.ix_(src_ids, moved)]
    target.check(expected)
    assert transfer.nbytes == len(src_ids) * moved.size


def test_parts_of_several_pairs(device: kvswap.Device) -> None:
    """A pair may have several parts, or none; the list may be any integers of shape (n, 6)."""
    sources = [Tier(device, "gpu", nbytes) for nbytes in (64, 96, 128)]
    targets = [Tier(device, "cpu", nbytes, stride=200) for nbytes in (64, 96, 128)]
    parts = [(2, 0, 0, 1, 8, 0), (0, 1, 8, 2, 4, 16), (0, 2, 40, 1, 24, 0)]
    for made in (
        parts,
        tuple(parts),
        np.array(parts, np.uint64),
        np.array(parts, np.uint32),
        np.array(parts).T.copy().T,
    ):
        move(sources, targets, [1], [2], parts=made).wait(PATIENCE)
    for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
        expected, moved = target.blocks(), part_bytes(parts, index)
        expected[2, moved] = source.blocks()[1, moved]
        target.check(expected)


# -- the object -------------------------------------------------------------------------------------------------------


def test_attributes(device: kvswap.Device) -> None:
    array = np.zeros(4096, np.uint8)
    pool = kvswap.Pool(device, array, 4, 600, rows=3, stride=250, pitch=1000, name="primary 0")
    assert pool.device == device
    assert (pool.ptr, pool.num_blocks, pool.block_nbytes) == (array.ctypes.data, 4, 600)
    assert (pool.stride, pool.rows, pool.pitch) == (250, 3, 1000)
    assert (pool.name, pool.group) == ("primary 0", None)
    assert repr(pool) == f"<kvswap.Pool 'primary 0' 4 blocks of 600 B on {device.name}>"
    del pool
    pool = kvswap.Pool(device.name, array.ctypes.data, 1, 4096)
    assert (pool.stride, pool.rows, pool.pitch) == (4096, 1, 4096)
    assert re.fullmatch(r"pool \d+", pool.name)
    assert repr(pool) == f"<kvswap.Pool '{pool.name}' 1 block of 4.0 KiB on {device.name}>"
    for name in ("name", "ptr", "other"):
        with pytest.raises(AttributeError):
            setattr(pool, name, 1)


def test_default_device() -> None:
    array = np.zeros(64, np.uint8)
    pool = kvswap.Pool(None, array, 1, 64)
    assert pool.device == kvswap.Device()


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "device must be a Device", {"device": 5.0}),
        (ValueError, "x:0", {"device": "x:0"}),
        (TypeError, "ptr must be an address or a tensor", {"ptr": None}),
        (ValueError, "ptr is 0", {"ptr": 0}),
        (ValueError, "ptr .*0x10", {"ptr": 0x10}),
        (TypeError, "num_blocks must be an int, not str", {"num_blocks": "4"}),
        (ValueError, "num_blocks is -1: must not be negative", {"num_blocks": -1}),
        (ValueError, "num_blocks is 0; it is 1 to", {"num_blocks": 0}),
        (ValueError, "num_blocks is 4294967296; it is 1 to 4294967295", {"num_blocks": 1 << 32, "ptr": 4096}),
        (TypeError, "block_nbytes must be an int, not float", {"block_nbytes": 1.0}),
        (ValueError, "block_nbytes is 0", {"block_nbytes": 0}),
        (TypeError, "stride must be an int", {"stride": "x"}),
        (TypeError, "pitch must be an int, not NoneType", {"pitch": None}),
        (ValueError, "rows is 0: a block has at least one row", {"rows": 0}),
        (ValueError, "block_nbytes is 64, which 3 rows cannot share", {"rows": 3}),
        (ValueError, "blocks overlap: rows of 64 bytes, stride 63", {"stride": 63}),
        (ValueError, "blocks overlap", {"rows": 2, "stride": 32, "pitch": 64, "ptr": 1 << 20}),
        (ValueError, "beyond the address space", {"ptr": (1 << 64) - 100}),
        (TypeError, "group must be a Pool or None, not str", {"group": "x"}),
        (TypeError, "name must be a str or None, not int", {"name": 5}),
        (ValueError, "name is '': must be 1 to 31 bytes", {"name": ""}),
        (ValueError, "name is 'ä+': must be 1 to 31 bytes", {"name": "ä" * 16}),
        (ValueError, r"name is 'a\\x00b': must be 1 to 31 bytes of UTF-8, none of them 0", {"name": "a\0b"}),
    ],
)
def test_wrong_layouts(device: kvswap.Device, error: type[Exception], message: str, change: dict[str, Any]) -> None:
    good: dict[str, Any] = {"device": device, "ptr": np.zeros(256, np.uint8), "num_blocks": 4, "block_nbytes": 64}
    with pytest.raises(error, match=message) as caught:
        kvswap.Pool(**{**good, **change})
    assert type(caught.value) is error
    kvswap.Pool(**good, name="ä" * 15)


@pytest.mark.parametrize(
    ("nbytes", "layout", "message"),
    [
        (255, {}, "255 bytes, but 4 blocks of 64 bytes without a stride need 256: it has room for 3 of them"),
        (255, {"stride": 64}, "255 bytes, but 4 blocks of 64 bytes at stride 64, in 1 rows at pitch 64, need 256"),
        (363, {"stride": 100}, "363 bytes, but 4 blocks of 64 bytes at stride 100, in 1 rows at pitch 64, need 364"),
        (
            351,
            {"rows": 4, "stride": 16, "pitch": 96},
            "351 bytes, but 4 blocks of 64 bytes at stride 16, in 4 rows at pitch 96, need 352",
        ),
        (4096, {"stride": 1 << 63}, f"stride {1 << 63}, in 1 rows at pitch 64, need {(1 << 64) - 1}"),
    ],
)
def test_the_tensor_must_hold_the_pool(device: kvswap.Device, nbytes: int, layout: Any, message: str) -> None:
    room = np.zeros(4096, np.uint8)
    with pytest.raises(ValueError, match=f"ptr is a tensor of .*{message}"):
        kvswap.Pool(device, room[:nbytes], 4, 64, **layout)
    if nbytes < 4096:
        kvswap.Pool(device, room[: nbytes + 1], 4, 64, **layout)


def test_a_tensor_without_a_stride_has_the_pool_and_nothing_else(device: kvswap.Device) -> None:
    """Else half of each block would be moved, from and to half the right offset."""
    room = np.zeros((4, 128), np.uint8)
    for blocks, message in (
        (4, "a block of the tensor has 128 bytes: is block_nbytes in elements, or the number of blocks not 8"),
        (7, "name a stride if other bytes lie between or behind them"),
    ):
        with pytest.raises(ValueError, match=f"ptr is a tensor of 512 bytes, but {blocks} blocks of 64 .*: {message}"):
            kvswap.Pool(device, room, blocks, 64)
    assert kvswap.Pool(device, room, 4, 64, stride=128).stride == 128


def test_pools_must_not_share_bytes(device: kvswap.Device) -> None:
    room = np.zeros(4096, np.uint8)
    first = kvswap.Pool(device, room[:2048], 4, 256, stride=512, name="first")
    with pytest.raises(ValueError, match="overlap those of pool 'first'"):
        kvswap.Pool(device, room[256:], 4, 257, stride=512)
    second = kvswap.Pool(device, room[256:], 4, 256, stride=512)  # in the gaps
    del first
    again = kvswap.Pool(device, room, 4, 256, stride=512)
    move_ids = [0, 1], [2, 3]
    kvswap.move_blocks(again, second, *move_ids).wait(PATIENCE)


@contextmanager
def half_released(device: kvswap.Device) -> Iterator[tuple[Any, threading.Event]]:
    """Blocks of a dropped Pool, `first`, whose transfer was waited for, and which another thread releases next, after
    an object that takes its time until the event is set."""
    releasing, go = threading.Event(), threading.Event()

    class Slow(np.ndarray[Any, Any]):
        def __del__(self) -> None:
            releasing.set()
            go.wait(PATIENCE)

    room, held = (np.frombuffer(device.alloc(128, host=True), np.uint8) for _ in range(2))  # pinned
    stream = kvswap.Stream(device)
    with Gate(device) as gate:
        gate.hold(stream)  # or the test is skipped, and nothing may be slow then
        held, target = held.view(Slow), Tier(device, "gpu", 64)
        first, slow = kvswap.Pool(device, room, 2, 64, name="first"), kvswap.Pool(device, held, 2, 64)
        transfers = [
            kvswap.move_blocks(pool, target.pool, [0], [slot], stream=stream) for slot, pool in enumerate((first, slow))
        ]
        del first, slow, held
        collector = threading.Thread(target=transfers[1].wait, args=[PATIENCE])  # whose objects are released first
        collector.start()
        gate.open()
        try:
            assert releasing.wait(PATIENCE)
            transfers[0].wait(PATIENCE)
            yield room, go
        finally:
            go.set()
            collector.join(PATIENCE)


def test_blocks_of_a_pool_that_another_thread_releases_are_free(device: kvswap.Device) -> None:
    """A dropped pool whose transfers have ended blocks no new pool there, also while another thread releases it."""
    with half_released(device) as (room, go):
        seen: list[str] = []
        look = threading.Timer(0.2, lambda: seen.extend(repr(x) for x in gc.get_objects() if type(x) is kvswap.Pool))
        look.start()
        with pytest.raises(ValueError, match="overlap those of pool 'first'"):  # not for ever
            kvswap.Pool(device, room, 2, 64)
        look.join(PATIENCE)
        assert any("'first'" in text for text in seen), "nor was one half made"
        threading.Timer(0.1, go.set).start()
        kvswap.Pool(device, room, 2, 64)


@pytest.mark.parametrize("host", [False, True])
def test_a_pool_ends_with_its_memory(device: kvswap.Device, host: bool) -> None:
    """Else a later transfer would reach what is allocated there next."""
    memory, source = device.alloc(4096, host=host), Buffer(device, 4096, "gpu" if host else "cpu")
    source.randomise(1)
    other = kvswap.Pool(device, source.memory or source.array, 8, 512)
    first = kvswap.Pool(device, memory, 4, 512, stride=512)
    second = kvswap.Pool(device, memory.ptr + 2048, 4, 512, name="second")
    kvswap.move_blocks(other, first, [1], [2]).wait(PATIENCE)
    memory.free()
    for src, dst in ((other, first), (second, other)):
        with pytest.raises(kvswap.Error, match=r"pool '(pool \d+|second)' lies in memory that has been freed"):
            kvswap.move_blocks(src, dst, [1], [2])
    again = device.alloc(4096, host=host)  # often at the same address
    kvswap.move_blocks(other, kvswap.Pool(device, again, 8, 512), [1], [2]).wait(PATIENCE)


def test_nobody_takes_a_pool_whose_memory_was_freed(tmp_path: Path) -> None:
    """Neither a FileStore, in place or by staging, nor an export."""
    device = kvswap.Device("host:0")
    with FileStore(tmp_path, Layout(512), capacity=1 << 20, device=device) as store:
        store.store([b"k"], [np.ones(512, np.uint8)]).wait(PATIENCE)
        for host in (True, False):
            own = device.alloc(4096, host=host)
            pool = kvswap.Pool(device, own, 8, 512, name="old")
            own.free()
            uses: list[Callable[[], Any]] = [
                lambda pool=pool: store.load([b"k"], pool, [3]),
                lambda pool=pool: store.store([b"m"], pool, [3]),
                lambda pool=pool: memory.export(pool),
            ]
            for use in uses:
                with pytest.raises(kvswap.Error, match="pool 'old' lies in memory that has been freed"):
                    use()


def test_a_pool_whose_memory_was_freed_is_in_no_race() -> None:
    device, source = kvswap.Device("host:0"), np.ones(512, np.uint8)
    with testing.race_checker(raise_at_exit=False) as checker:
        own = device.alloc(4096)
        pool = kvswap.Pool(device, own, 8, 512)
        testing.note_access(kvswap.Stream(device), pool, [1], True)
        own.free()
        others = [device.alloc(4096) for _ in range(20)]
        again = next((other for other in others if other.ptr == pool.ptr), None)
        if again is None:
            pytest.skip("the address was not given again")
        kvswap.swap_blocks_batch([source], [again.ptr + 512], 512, device=device).wait(PATIENCE)
        assert checker.races == []


def test_a_pool_of_another_device_ends_with_its_memory() -> None:
    device, second = kvswap.Device("host:0"), kvswap.Device("host:1")
    memory = device.alloc(4096, host=True)
    pool, own = kvswap.Pool(second, memory, 64, 64), kvswap.Pool(second, second.alloc(4096), 64, 64)
    kvswap.move_blocks(pool, own, [1], [2]).wait(PATIENCE)
    memory.free()
    with pytest.raises(kvswap.Error, match="freed"):
        kvswap.move_blocks(pool, own, [1], [2])


def test_memory_is_not_freed_while_a_transfer_is_being_submitted() -> None:
    """Between the check of its pools and its place in the lane; it looks memory of another device up in between."""
    device = kvswap.Device("host:1")
    own = kvswap.Device("host:0").alloc(4096, host=True)
    pool, source = kvswap.Pool(device, own, 8, 512), kvswap.Pool(device, device.alloc(4096), 8, 512)
    transfers: list[kvswap.Transfer] = []
    with testing.fault(device, "call", "delay", operation="pointer_query", delay=0.5):
        thread = threading.Thread(target=lambda: transfers.append(kvswap.move_blocks(source, pool, [1], [2])))
        thread.start()
        time.sleep(0.1)
        assert not transfers, "it is being submitted"
        own.free()
        thread.join(PATIENCE)
    assert [transfer.done() for transfer in transfers] == [True], "the memory went before"


def test_a_device_that_is_opened_while_memory_is_about_to_go() -> None:
    """Its pool there ends too. The free waits for another device's lock, whose submission waits for its driver."""
    need_bindings()
    script = """
        import threading, time, kvswap
        from kvswap import testing
        first, second = kvswap.Device("host:0"), kvswap.Device("host:1")
        own, other = first.alloc(1 << 16, host=True), first.alloc(4096, host=True)
        address = own.ptr
        pools = [kvswap.Pool(second, x, 8, 512) for x in (second.alloc(4096), other)]
        with testing.fault(second, "call", "delay", operation="pointer_query", delay=1.0):
            move = threading.Thread(target=kvswap.move_blocks, args=(*pools, [1], [2]))
            threads = [move, threading.Thread(target=own.free)]
            for thread in threads:
                thread.start()
                time.sleep(0.2)
            third = kvswap.Device("host:2")
            late = kvswap.Pool(third, address, 8, 512, name="late")
            for thread in threads:
                thread.join(60)
        try:
            kvswap.move_blocks(kvswap.Pool(third, third.alloc(4096), 8, 512), late, [1], [2])
        except kvswap.Error as error:
            print(error)
        """
    assert "pool 'late' lies in memory that has been freed" in run_python(script).stdout


def test_no_pool_is_opened_in_memory_that_is_being_freed() -> None:
    device = kvswap.Device("host:229")  # none that has such a thread already
    own = device.alloc(4096, host=True)
    address, before = own.ptr, names_of_threads().count("kvswap-reclaim")
    with testing.fault(device, "call", "delay", operation="host_free", delay=2.0):
        thread = threading.Thread(target=own.free)
        thread.start()
        until(lambda: names_of_threads().count("kvswap-reclaim") > before, "the thread that frees")
        time.sleep(0.5)
        try:
            kvswap.Pool(device, address, 8, 512)  # it waits for the end of that
        except ValueError as error:
            assert "not mapped" in str(error)
        thread.join(1.0)  # something else may have been mapped there, but after the end
        assert not thread.is_alive()


def test_a_pool_outlives_a_registration(device: kvswap.Device) -> None:
    """The memory is the caller's, and pageable again."""
    array = np.zeros(1 << 16, np.uint8)
    device.register(array)
    pool, other = kvswap.Pool(device, array, 64, 1024), kvswap.Pool(device, device.alloc(1 << 16), 64, 1024)
    device.unregister(array)
    array[1024:2048] = 7
    kvswap.move_blocks(pool, other, [1], [2]).wait(PATIENCE)
    kvswap.move_blocks(other, pool, [2], [3]).wait(PATIENCE)
    assert (array[3072:4096] == 7).all()


def test_a_signal_ends_the_wait_for_another_threads_release(device: kvswap.Device) -> None:
    """Also if its handler raises what a wait ends with."""

    def handler(*_: object) -> None:
        raise TimeoutError("of the handler")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with half_released(device) as (room, _):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(TimeoutError, match="of the handler"):
                kvswap.Pool(device, room, 2, 64)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_child_does_not_wait_for_a_thread_of_its_parent(device: kvswap.Device) -> None:
    """Which does not go on in it."""
    if device.kind != "host":
        pytest.skip("a GPU does not survive fork()")
    with half_released(device):
        child = os.fork()
        if child == 0:
            try:
                begin = time.monotonic()
                room = np.zeros(128, np.uint8)
                _first = kvswap.Pool(kvswap.Device("host:1"), room, 2, 64)
                with pytest.raises(ValueError, match="overlap"):
                    kvswap.Pool(kvswap.Device("host:1"), room, 2, 64)
                os._exit(time.monotonic() - begin > 0.5)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_groups(device: kvswap.Device) -> None:
    first = Tier(device, "gpu", 64, name="keys")
    second = Tier(device, "gpu", 32, group=first.pool)
    third = Tier(device, "gpu", 16, group=second.pool)
    assert second.pool.group is first.pool and third.pool.group is second.pool
    with pytest.raises(ValueError, match=f"group has {BLOCKS} blocks, this pool {BLOCKS + 1}"):
        Tier(device, "gpu", 64, BLOCKS + 1, group=first.pool)
    array = np.zeros(BLOCKS, np.uint8)
    with pytest.raises(ValueError, match=f"group is a pool of {device.name}, not of host:7"):
        kvswap.Pool("host:7", array, BLOCKS, 1, group=first.pool)


def test_a_group_is_tracked_as_one(device: kvswap.Device) -> None:
    """A slot of one member that is being written holds up who reads the same slot of another."""
    keys, values = Tier(device, "gpu"), Tier(device, "cpu")
    host_keys = Tier(device, "cpu", name="host keys")
    more = Tier(device, "gpu", 64, group=keys.pool)
    host_more = Tier(device, "cpu", 64)
    stream = kvswap.Stream(device)
    with Gate(device) as gate:
        gate.hold(stream)
        held = move(values, keys, [0], [3], stream=stream)
        other = move(more, host_more, [4], [4])
        waits = move(more, host_more, [3], [3])
        other.wait(PATIENCE)
        alone = move(host_keys, values, [1], [1])
        alone.wait(PATIENCE)
        assert not waits.done() and not held.done()
        gate.open()
        waits.wait(PATIENCE)
        assert held.done()


# -- what is refused --------------------------------------------------------------------------------------------------


def refused(pair: tuple[Tier, Tier], error: type[Exception], message: str, call: Callable[[], Any]) -> None:
    """`call` raises exactly that, nothing was submitted, no byte has changed, and the next call works."""
    src, dst = pair
    before = src.pool.device.stats()["submitted"]
    with pytest.raises(error, match=message) as caught:
        call()
    assert type(caught.value) is error
    assert src.pool.device.stats()["submitted"] == before
    src.check(src.blocks())
    dst.check(dst.blocks())
    move(src, dst, [1], [2]).wait(PATIENCE)
    dst.check(copied(src, dst, [1], [2]))
    dst.buffer.put(dst.before)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "src must be a Pool or a sequence of Pools, not int", {"src": 5}),
        (TypeError, "dst must be a Pool or a sequence of Pools, not str", {"dst": "pool"}),
        (TypeError, r"src\[0\] must be a Pool, not int", {"src": [5]}),
        (TypeError, r"dst\[0\] must be a Pool, not NoneType", {"dst": [None]}),
        (ValueError, "dst has 0 items, but src has 1", {"dst": []}),
        (ValueError, "src has no pools: at least one pair is needed", {"src": (), "dst": ()}),
        (ValueError, "dst_ids has 3 items, but src_ids has 2", {"dst_ids": [1, 2, 3]}),
        (TypeError, "src_ids must be int32 or int64, not float64", {"src_ids": np.array([0.0, 1.0])}),
        (ValueError, "dst_ids must be one-dimensional, not 2-D", {"dst_ids": np.array([[0], [1]])}),
        (TypeError, r"src_ids\[1\] must be an int, not str", {"src_ids": [0, "1"]}),
        (IndexError, rf"src_ids\[1\] is {BLOCKS}.*{BLOCKS} blocks, 0 to {BLOCKS - 1}", {"src_ids": [0, BLOCKS]}),
        (IndexError, rf"dst_ids\[0\] is -1.*{BLOCKS} blocks, 0 to {BLOCKS - 1}", {"dst_ids": [-1, 0]}),
        (ValueError, r"dst_ids\[0\] and dst_ids\[1\] are both 4", {"dst_ids": [4, 4]}),
        (
            ValueError,
            "path is 'x': must be one of 'auto', 'dma', 'strided', 'borrow', 'burst', 'kernel', 'direct'",
            {"path": "x"},
        ),
        (ValueError, "priority is 'x'", {"priority": "x"}),
        (ValueError, "max_ctas is 0: must be 1 to 1024", {"max_ctas": 0}),
        (ValueError, "pace_gbps is -1", {"pace_gbps": -1}),
        (TypeError, "stream must be a stream.*not str", {"stream": "x"}),
        (
            TypeError,
            "after must be an Event, a Transfer or a stream, or an iterable of them, not float",
            {"after": 1.5},
        ),
        (TypeError, r"after\[0\] must be an Event, a Transfer or a stream, not NoneType", {"after": [None]}),
        (TypeError, "after_layers must be a sequence with one entry a layer, or None, not int", {"after_layers": 5}),
        (ValueError, "after_layers has 2 items, but there is 1 layer", {"after_layers": [None, None]}),
        (ValueError, "after_layers has 0 items, but there is 1 layer", {"after_layers": []}),
        (
            TypeError,
            r"after_layers\[0\] must be an Event, a Transfer or a stream, or None, not float",
            {"after_layers": [1.5]},
        ),
        (
            ValueError,
            "after_layers has 1 items, but there are 2 layers",
            {"after_layers": [None], "parts": [(0, 0, 0, 1, 8, 0), (0, 1, 8, 1, 8, 0)]},
        ),
        (TypeError, "parts must be integers of 32 or 64 bits, not float64", {"parts": np.zeros((1, 6))}),
        (TypeError, "parts must be an integer array of shape", {"parts": [[1, 2], [3]]}),
        (ValueError, r"parts has shape \(6,\): must be \(n, 6\)", {"parts": [0, 0, 0, 1, 8, 0]}),
        (ValueError, r"parts has shape \(1, 5\): must be \(n, 6\)", {"parts": [[0, 0, 0, 1, 8]]}),
        (
            ValueError,
            r"parts\[0\] has pair 4294967296: must be 0 to 2\*\*32 - 1",
            {"parts": [(1 << 32, 0, 0, 1, 8, 0)]},
        ),
        (ValueError, r"parts\[0\] has layer -1: must be 0 to 2\*\*32 - 1", {"parts": [(0, -1, 0, 1, 8, 0)]}),
        (ValueError, r"parts\[0\] has row_nbytes -8: must be 0 or more", {"parts": [(0, 0, 0, 1, -8, 0)]}),
        (ValueError, r"parts\[0\] has 0 rows of 8 bytes", {"parts": [(0, 0, 0, 0, 8, 0)]}),
        (ValueError, r"parts\[0\] has rows of 8 bytes only 7 bytes apart", {"parts": [(0, 0, 0, 2, 8, 7)]}),
        (ValueError, rf"parts\[0\].*beyond a block of {NBYTES} bytes", {"parts": [(0, 0, NBYTES - 7, 1, 8, 0)]}),
        (IndexError, r"parts\[0\] is of pair 1; there are 1 pairs, from 0", {"parts": [(1, 0, 0, 1, 8, 0)]}),
        (ValueError, r"parts\[1\].*layer", {"parts": [(0, 0, 0, 1, 8, 0), (0, 2, 8, 1, 8, 0)]}),
        (ValueError, r"parts\[0\].*layer", {"parts": [(0, 1, 0, 1, 8, 0)]}),
        (TypeError, "unexpected keyword argument 'device'", {"device": "host:0"}),
    ],
)
def test_wrong_arguments(pair: tuple[Tier, Tier], error: type[Exception], message: str, change: dict[str, Any]) -> None:
    src, dst = pair
    good: dict[str, Any] = {"src": [src.pool], "dst": (dst.pool,), "src_ids": [0, 1], "dst_ids": [2, 3]}
    refused(pair, error, message, lambda: kvswap.move_blocks(**{**good, **change}))


def test_missing_arguments(pair: tuple[Tier, Tier]) -> None:
    src, dst = pair
    refused(pair, TypeError, "missing required argument 'dst_ids'", lambda: kvswap.move_blocks(src.pool, dst.pool, [1]))
    call = lambda: kvswap.move_blocks(src.pool, dst.pool, [1], [1], None)  # noqa: E731
    refused(pair, TypeError, "at most 4 positional arguments", call)


def test_overlapping_parts(pair: tuple[Tier, Tier]) -> None:
    parts = [(0, 0, 0, 1, 100, 0), (0, 1, 99, 1, 100, 0)]
    message = r"parts\[1\] begins at byte 99 of a block of pair 0, but an earlier part ends at 100"
    refused(pair, ValueError, message, lambda: move(*pair, [0], [0], parts=parts))


def test_pairs_that_do_not_go_together(pair: tuple[Tier, Tier], device: kvswap.Device) -> None:
    src, dst = pair
    other = Tier(device, "cpu", 64)
    refused(pair, ValueError, r"dst\[1\] .*is named twice", lambda: move([src, src], [dst, dst], [0], [1]))
    message = r"src\[1\] -> dst\[1\] goes host to device, src\[0\] -> dst\[0\] device to host"
    refused(pair, ValueError, message, lambda: move([src, other], [dst, Tier(device, "gpu", 64)], [0], [1]))


def test_blocks_of_unequal_size(device: kvswap.Device) -> None:
    pair = Tier(device, "gpu", 64), Tier(device, "cpu", 32)
    with pytest.raises(ValueError, match=r"src\[0\] has blocks of 64 bytes, dst\[0\] of 32: name the parts"):
        move(*pair, [0], [1])
    move(*pair, [0], [1], parts=[(0, 0, 0, 1, 32, 0)]).wait(PATIENCE)
    expected = pair[1].blocks()
    expected[1] = pair[0].blocks()[0, :32]
    pair[1].check(expected)


def test_a_slot_is_not_read_and_written_by_one_call(device: kvswap.Device) -> None:
    tier = Tier(device, "gpu")
    with pytest.raises(ValueError, match="slot"):
        move(tier, tier, [0, 1], [1, 2])
    tier.check(tier.blocks())


def test_pools_of_another_device(pair: tuple[Tier, Tier]) -> None:
    array = np.zeros((BLOCKS, NBYTES), np.uint8)
    foreign = kvswap.Pool(testing.deterministic_device(7), array, BLOCKS, NBYTES)  # its device waits for no other
    name = pair[0].pool.device.name
    text = f"host:seed-7.*{name}|{name}.*host:seed-7"
    for src, dst in ((pair[0].pool, foreign), (foreign, pair[1].pool)):
        refused(pair, ValueError, text, lambda: kvswap.move_blocks(src, dst, [0], [0]))  # noqa: B023


def test_streams_of_another_device(pair: tuple[Tier, Tier]) -> None:
    stream, event = kvswap.Stream("host:7"), kvswap.Event(testing.deterministic_device(7))
    of = f"is of host:7, not of {pair[0].pool.device.name}"
    refused(pair, ValueError, f"stream {of}", lambda: move(*pair, [0], [0], stream=stream))
    refused(pair, ValueError, r"after\[1\] is of host:seed-7, not of", lambda: move(*pair, [0], [0], after=[0, event]))
    refused(pair, ValueError, rf"after_layers\[0\] {of}", lambda: move(*pair, [0], [0], after_layers=[stream]))
    refused(pair, ValueError, f"stream {of}", lambda: testing.note_access(stream, pair[0].pool, [0], True))


def test_a_pool_is_no_stream(pair: tuple[Tier, Tier]) -> None:
    """Although it has a ptr, as cupy's streams have."""
    refused(pair, TypeError, "stream must be a stream", lambda: move(*pair, [0], [0], stream=pair[0].pool))
    refused(pair, TypeError, "after must be", lambda: move(*pair, [0], [0], after=pair[0].pool))


def test_read_only_memory_is_no_destination(device: kvswap.Device) -> None:
    array = np.zeros((BLOCKS, NBYTES), np.uint8)
    array.flags.writeable = False
    fixed, tier = kvswap.Pool(device, array, BLOCKS, NBYTES), Tier(device, "gpu")
    with pytest.raises(ValueError, match="dst is the destination, and a pool of read-only memory"):
        kvswap.move_blocks(tier.pool, fixed, [0], [0])
    with pytest.raises(ValueError, match=r"dst\[0\] is the destination"):
        kvswap.move_blocks([tier.pool], [fixed], [0], [0])
    kvswap.move_blocks(fixed, tier.pool, [0], [0]).wait(PATIENCE)


# -- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hazard", ["raw", "war", "waw"])
def test_hazards_are_kept(device: kvswap.Device, hazard: str) -> None:
    """With nothing said about order, on lanes of their own; and only where slots are shared."""
    gpu, cpu, more = Tier(device, "gpu"), Tier(device, "cpu"), Tier(device, "cpu", name="more")
    stream = kvswap.Stream(device)
    before = device.stats()
    with Gate(device) as gate:
        gate.hold(stream)
        held = move(*((gpu, cpu) if hazard == "war" else (cpu, gpu)), [3], [3], stream=stream)
        if hazard == "raw":
            after, free = move(gpu, more, [3], [3], priority="high"), move(gpu, more, [4], [4])
        else:
            after, free = move(more, gpu, [3], [3], priority="high"), move(more, gpu, [4], [4])
        free.wait(PATIENCE)
        assert not held.done() and not after.done()
        assert device.stats()[f"waits_{hazard}"] == before[f"waits_{hazard}"] + 1
        gate.open()
        after.wait(PATIENCE)
        held.wait(PATIENCE)
    if hazard == "raw":
        np.testing.assert_array_equal(more.now()[3], cpu.blocks()[3])
    else:
        np.testing.assert_array_equal(gpu.now()[3], more.blocks()[3])
    if hazard == "war":
        np.testing.assert_array_equal(cpu.now()[3], gpu.blocks()[3])


@pytest.mark.parametrize("hazard", ["raw", "war", "waw"])
def test_a_wait_that_is_left_out_is_missed(device: kvswap.Device, hazard: str) -> None:
    """The fault that other tests build on."""
    gpu, cpu, more = Tier(device, "gpu"), Tier(device, "cpu"), Tier(device, "cpu", name="more")
    stream = kvswap.Stream(device)
    bindings.set_fault(device, "hazard", "skip", operation=hazard)
    try:
        with Gate(device) as gate:
            gate.hold(stream)
            held = move(*((gpu, cpu) if hazard == "war" else (cpu, gpu)), [3], [3], stream=stream)
            after = move(*((gpu, more) if hazard == "raw" else (more, gpu)), [3], [3], priority="high")
            after.wait(PATIENCE)
            assert not held.done()
            gate.open()
            held.wait(PATIENCE)
    finally:
        bindings.set_fault(device, "hazard", "none")


def test_faults_of_hazards(device: kvswap.Device) -> None:
    with pytest.raises(ValueError, match="action is 'fail': must be one of 'none', 'skip'"):
        bindings.set_fault(device, "hazard", "fail", operation="raw")
    with pytest.raises(ValueError, match="operation is needed: 'raw', 'war' or 'waw'"):
        bindings.set_fault(device, "hazard", "skip")
    with pytest.raises(ValueError, match="operation is 'rar': must be one of 'raw', 'war', 'waw'"):
        bindings.set_fault(device, "hazard", "skip", operation="rar")
    with pytest.raises(ValueError, match="kind is 'x': must be one of 'call', 'copy', 'code', 'hazard'"):
        bindings.set_fault(device, "x", "none")


def test_numbers_of_transfers(pair: tuple[Tier, Tier]) -> None:
    first, second = move(*pair, [0], [0]), move(*pair, [1], [1])
    other = move(pair[1], pair[0], [2], [2])
    assert first.number < second.number < other.number
    assert second.lane == first.lane != other.lane
    assert second.sequence == first.sequence + 1
    assert first.num_layers == 0


# -- failure travels --------------------------------------------------------------------------------------------------


def failed_store(pair: tuple[Tier, Tier], slots: list[int], **options: Any) -> kvswap.Transfer:
    """GPU to host, of which the first block is refused."""
    with testing.fault(pair[0].pool.device, "copy", "fail", code=7):
        transfer = move(*pair, slots, slots, **options)
    with pytest.raises(kvswap.DeviceError):
        transfer.wait(PATIENCE)
    return transfer


@pytest.mark.parametrize("cure", ["note", "write", "nothing", "partial note", "partial write", "read note"])
def test_failure_travels(pair: tuple[Tier, Tier], cure: str) -> None:
    src, dst = pair
    failed = failed_store(pair, [3])
    if cure == "note":
        testing.note_access(0, dst.pool, [3], True)
    elif cure == "partial note":
        testing.note_access(0, dst.pool, [3], True, offset=1)
        testing.note_access(0, dst.pool, [3], True, nbytes=NBYTES - 1)
    elif cure == "read note":
        testing.note_access(0, dst.pool, [3], False)
    elif cure == "write":
        move(src, dst, [3], [3]).wait(PATIENCE)
    elif cure == "partial write":
        move(src, dst, [3], [3], parts=[(0, 0, 0, 1, NBYTES - 1, 0)]).wait(PATIENCE)
    back = move(dst, src, [2, 3, 4], [5, 6, 7])
    if cure in ("note", "write"):
        back.wait(PATIENCE)
        np.testing.assert_array_equal(src.now()[6], dst.now()[3])
        return
    with pytest.raises(kvswap.Error, match=f"transfer {failed.number}") as caught:
        back.wait(PATIENCE)
    assert "injected fault" in str(caught.value)
    assert back.failed_positions.tolist() == [1]
    np.testing.assert_array_equal(src.now()[[5, 7]], dst.now()[[2, 4]])
    np.testing.assert_array_equal(src.now()[6], src.blocks()[6])


def test_failure_goes_on_travelling(pair: tuple[Tier, Tier]) -> None:
    """From slot to slot, until a whole block is written there."""
    src, dst = pair
    failed_store(pair, [0])
    for transfer in (move(dst, src, [0], [1]), move(src, dst, [1], [2]), move(dst, dst, [2], [3])):
        with pytest.raises(kvswap.Error):
            transfer.wait(PATIENCE)
        assert transfer.failed_positions.tolist() == [0]
    move(src, dst, [5], [3]).wait(PATIENCE)
    move(dst, src, [3], [4]).wait(PATIENCE)
    np.testing.assert_array_equal(src.now()[4], src.blocks()[5])


def test_failure_travels_through_a_group(device: kvswap.Device) -> None:
    keys, host_keys = Tier(device, "gpu"), Tier(device, "cpu")
    values, host_values = Tier(device, "gpu", 64, group=keys.pool), Tier(device, "cpu", 64, group=host_keys.pool)
    failed_store((keys, host_keys), [3])
    back = move([host_keys, host_values], [keys, values], [3, 4], [5, 6])
    with pytest.raises(kvswap.Error):
        back.wait(PATIENCE)
    assert back.failed_positions.tolist() == [0]


# -- layer by layer ---------------------------------------------------------------------------------------------------


Layered: TypeAlias = tuple[list[Tier], list[Tier], Callable[..., kvswap.Transfer]]


def layers_of_pools(device: kvswap.Device, path: str) -> Layered:
    gpu, cpu = [Tier(device, "gpu", 64 + i) for i in range(3)], [Tier(device, "cpu", 64 + i) for i in range(3)]
    ids = [0, 1, 5], [2, 3, 7]
    return gpu, cpu, lambda **options: move(gpu, cpu, *ids, path=path, **options)


def layers_of_parts(device: kvswap.Device, path: str) -> Layered:
    gpu, cpu = Tier(device, "gpu", 96), Tier(device, "cpu", 96, rows=3, pitch=40, stride=150)
    parts = np.array([(0, i, 32 * i, 1, 32, 0) for i in range(3)])
    ids = [0, 1, 5], [2, 3, 7]
    return [gpu], [cpu], lambda **options: move(gpu, cpu, *ids, path=path, parts=parts, **options)


def layers_of_tensors(device: kvswap.Device, path: str) -> Layered:
    gpu, cpu = [Tier(device, "gpu", 64 + i) for i in range(3)], [Tier(device, "cpu", 64 + i) for i in range(3)]
    ptrs = [[tier.buffer.ptr for tier in side] for side in (gpu, cpu)]
    arguments = ([64, 65, 66], BLOCKS, BLOCKS, [0, 1, 5], [2, 3, 7], 0)
    call = lambda **options: kvswap.swap_cache_all_layers_async(*ptrs, *arguments, device=device, path=path, **options)  # noqa: E731
    return gpu, cpu, call


@pytest.fixture(params=[layers_of_pools, layers_of_parts, layers_of_tensors], ids=["pools", "parts", "tensors"])
def layered(request: pytest.FixtureRequest, device: kvswap.Device, path: str) -> Layered:
    return request.param(device, path)


def right(gpu: list[Tier], cpu: list[Tier]) -> bool:
    return all((dst.now() == copied(src, dst, [0, 1, 5], [2, 3, 7])).all() for src, dst in zip(gpu, cpu, strict=True))


def test_layers_come_one_by_one(device: kvswap.Device, layered: Layered, path: str) -> None:
    gpu, cpu, go = layered
    held, waiting = kvswap.Stream(device), kvswap.Stream(device)
    with Gate(device) as gate:
        gate.hold(held)
        transfer = go(layer_events=True, after_layers=[None, held, None])
        assert transfer.num_layers == 3
        marks = []
        for layer in range(3):
            stream = waiting if layer == 0 else kvswap.Stream(device)
            transfer.make_wait_layer(layer, stream)
            marks.append(kvswap.Event(device))
            marks[-1].record(stream)
        assert transfer.path == path or path in ("auto", "strided")
        until(lambda: transfer.layer_done(0), "the first layer")
        marks[0].synchronize(PATIENCE)
        np.testing.assert_array_equal(cpu[0].now()[2][:32], gpu[0].blocks()[0][:32])
        assert [transfer.layer_done(layer) for layer in range(3)] == [True, False, False]
        assert [mark.query() for mark in marks] == [True, False, False]
        assert not transfer.done()
        gate.open()
        for mark in marks:
            mark.synchronize(PATIENCE)
        transfer.wait(PATIENCE)
    assert all(transfer.layer_done(layer) for layer in range(3))
    assert right(gpu, cpu)


@pytest.mark.parametrize("kind", ["stream", "event", "transfer", "handle"])
def test_layers_start_after(device: kvswap.Device, layered: Any, kind: str) -> None:
    """The last layer's copies wait for anything that `after` takes; without layer_events too."""
    gpu, cpu, go = layered
    stream, spare = kvswap.Stream(device), (Tier(device, "cpu"), Tier(device, "gpu"))
    with Gate(device) as gate:
        gate.hold(stream)
        event = kvswap.Event(device)
        event.record(stream)
        kinds = {"stream": stream, "event": event, "handle": stream.handle}
        before = kinds[kind] if kind in kinds else move(*spare, [0], [0], stream=stream)
        transfer = go(after_layers=(None, None, before))
        move(*spare, [8], [8]).wait(PATIENCE)
        assert transfer.num_layers == 0 and not transfer.done()
        gate.open()
        transfer.wait(PATIENCE)
    assert right(gpu, cpu)


def test_wrong_layers(device: kvswap.Device, layered: Layered) -> None:
    _, cpu, go = layered
    stream = kvswap.Stream(device)
    with pytest.raises(ValueError, match="after_layers has 2 items, but there are 3 layers"):
        go(after_layers=[None, None])
    with pytest.raises(
        TypeError, match=r"after_layers\[2\] must be an Event, a Transfer or a stream, or None, not str"
    ):
        go(after_layers=[None, None, "x"])
    for tier in cpu:
        tier.check(tier.blocks())
    transfer = go(layer_events=True)
    for wrong in (3, 1 << 40):
        message = f"layer is {wrong}; the transfer has 3 layers, 0 to 2"
        with pytest.raises(IndexError, match=message):
            transfer.layer_done(wrong)
        with pytest.raises(IndexError, match=message):
            transfer.make_wait_layer(wrong, stream)
    with pytest.raises(ValueError, match="layer is -1"):
        transfer.layer_done(-1)
    with pytest.raises(TypeError, match="layer must be an int, not str"):
        transfer.make_wait_layer("x", stream)
    with pytest.raises(TypeError, match="stream must be a stream"):
        transfer.make_wait_layer(0, "x")
    with pytest.raises(TypeError, match="missing required argument 'stream'"):
        transfer.make_wait_layer(0)
    transfer.wait(PATIENCE)
    plain = go()
    for call in (lambda: plain.layer_done(0), lambda: plain.make_wait_layer(0, stream)):
        with pytest.raises(ValueError, match="layer_events"):
            call()
    plain.wait(PATIENCE)


def test_layers_of_a_failed_transfer(device: kvswap.Device) -> None:
    usable(device, "dma")
    _, _, go = layers_of_pools(device, "dma")
    with testing.fault(device, "copy", "fail", nth=2):
        transfer = go(layer_events=True)
    with pytest.raises(kvswap.DeviceError):
        transfer.wait(PATIENCE)
    with pytest.raises(kvswap.DeviceError):
        transfer.layer_done(2)
    with pytest.raises(kvswap.DeviceError):
        transfer.make_wait_layer(2, kvswap.Stream(device))


def test_only_one_call_of_the_five_goes_layer_by_layer() -> None:
    for name in ("swap_blocks_batch", "swap_cache_per_layer", "swap_cache_per_layer_async", "swap_cache_all_layers"):
        with pytest.raises(TypeError, match="unexpected keyword argument 'layer_events'"):
            getattr(kvswap, name)(layer_events=True)


# -- telling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "stream must be a stream", {"stream": None}),
        (TypeError, "pool must be a Pool, not int", {"pool": 5}),
        (IndexError, rf"slots\[1\] is {BLOCKS}.*{BLOCKS} blocks, 0 to {BLOCKS - 1}", {"slots": [0, BLOCKS]}),
        (IndexError, r"slots\[0\] is -1", {"slots": np.array([-1])}),
        (TypeError, "slots must be int32 or int64, not float64", {"slots": np.zeros(1)}),
        (ValueError, "offset is -1", {"offset": -1}),
        (ValueError, f"offset {NBYTES} .*beyond a block of {NBYTES} bytes", {"offset": NBYTES}),
        (ValueError, f"nbytes {NBYTES} .*beyond a block of {NBYTES} bytes", {"offset": 1, "nbytes": NBYTES}),
        (ValueError, "nbytes is 0: must be 1 or more, or None", {"nbytes": 0}),
        (TypeError, "nbytes must be an int", {"nbytes": "x"}),
    ],
)
def test_wrong_accesses(pair: tuple[Tier, Tier], error: type[Exception], message: str, change: dict[str, Any]) -> None:
    good: dict[str, Any] = {"stream": 0, "pool": pair[0].pool, "slots": [0, 1], "write": True}
    with pytest.raises(error, match=message):
        testing.note_access(**{**good, **change})
    testing.note_access(**good, offset=1, nbytes=NBYTES - 1)
    testing.note_access(**{**good, "slots": []})


def test_orders_that_are_told(pair: tuple[Tier, Tier], device: kvswap.Device) -> None:
    stream, event, transfer = kvswap.Stream(device), kvswap.Event(device), move(*pair, [0], [0])
    for before in (stream, event, transfer):
        for after in (None, kvswap.Stream(device), stream.handle, 0):
            testing.note_order(before, after)
            testing.note_order(before, after, device=device)
    testing.note_order(stream.handle, None, device=device.name)
    testing.note_order(stream.handle, stream)
    with pytest.raises(ValueError, match="device is needed where before is a plain handle"):
        testing.note_order(stream.handle, None)
    with pytest.raises(ValueError, match="device is needed where before is a plain handle"):
        testing.note_order(np.uint64(stream.handle), 0)
    with pytest.raises(TypeError, match="before must be an Event, a Transfer or a stream, not str"):
        testing.note_order("x", stream)
    with pytest.raises(TypeError, match="after must be a stream"):
        testing.note_order(stream, "x")
    with pytest.raises(TypeError, match="device must be a Device"):
        testing.note_order(stream, stream, device=5.0)
    foreign = kvswap.Device("host:7")
    of = f"is of {device.name}, not of host:7"
    with pytest.raises(ValueError, match=f"before {of}"):
        testing.note_order(stream, kvswap.Stream(foreign))
    with pytest.raises(ValueError, match=f"after {of}"):
        testing.note_order(transfer, stream, device=foreign)
    testing.note_order(transfer, kvswap.Stream(foreign))  # a transfer may be of any device
    transfer.wait(PATIENCE)


# -- counters ---------------------------------------------------------------------------------------------------------


def test_counters_of_paths(pair: tuple[Tier, Tier]) -> None:
    def counted(direction: str) -> dict[str, Any]:
        rows = src.pool.device.stats()["paths"].get(direction, {})
        return rows.get("dma", {"transfers": 0, "blocks": 0, "bytes": 0, "seconds": 0.0})

    src, dst = pair
    for direction, tiers in (("d2h", (src, dst)), ("h2d", (dst, src)), ("other", (src, src))):
        before = counted(direction)
        transfer = move(*tiers, [0, 1], [2, 3], path="dma")
        transfer.wait(PATIENCE)
        after = counted(direction)
        assert after["transfers"] == before["transfers"] + 1
        assert after["blocks"] == before["blocks"] + 2
        assert after["bytes"] == before["bytes"] + 2 * NBYTES
        assert after["seconds"] == pytest.approx(before["seconds"] + transfer.elapsed, abs=1e-6)
    stats = src.pool.device.stats()
    assert all(row["transfers"] > 0 for rows in stats["paths"].values() for row in rows.values())
    assert all(type(value) is int for name, value in stats.items() if name != "paths")


def test_rows_that_hold_nothing_are_left_out() -> None:
    assert kvswap.Device("host:9").stats()["paths"] == {}


# -- what is held -----------------------------------------------------------------------------------------------------


def test_a_pool_holds_its_tensor_and_its_group(device: kvswap.Device) -> None:
    array = np.zeros((BLOCKS, 64), np.uint8)
    there = weakref.ref(array)
    pool = kvswap.Pool(device, array, BLOCKS, 64)
    member = kvswap.Pool(device, np.zeros((BLOCKS, 64), np.uint8), BLOCKS, 64, group=pool)
    del array, pool
    gc.collect()
    assert there() is not None
    del member
    assert there() is None


def test_what_was_refused_is_not_held(device: kvswap.Device) -> None:
    array = np.zeros((BLOCKS, 64), np.uint8)
    references = sys.getrefcount(array)
    for _ in range(3):
        with pytest.raises(ValueError, match="name"):
            kvswap.Pool(device, array, BLOCKS, 64, name="")
        with pytest.raises(ValueError, match="blocks overlap"):
            kvswap.Pool(device, array, BLOCKS, 64, stride=1)
    assert sys.getrefcount(array) == references
    ids = np.array([1, 1 << 63], np.uint64)
    references = sys.getrefcount(ids)
    for _ in range(3):
        with pytest.raises(IndexError, match=r"slots\[1\] is 9223372036854775808"):
            testing.note_access(kvswap.Stream(device), kvswap.Pool(device, array, BLOCKS, 64), ids, True)
    assert sys.getrefcount(ids) == references


def test_transfers_hold_their_pools(device: kvswap.Device) -> None:
    source, target, stream = Tier(device, "gpu"), Tier(device, "cpu"), kvswap.Stream(device)
    pool = target.pool
    references = sys.getrefcount(pool)
    with Gate(device) as gate:
        gate.hold(stream)
        first = kvswap.move_blocks(source.pool, pool, [0], [1], stream=stream)
        second = kvswap.move_blocks([source.pool], [pool], [2], [2], stream=stream)
        assert sys.getrefcount(pool) == references + 2
        with pytest.raises(IndexError):
            kvswap.move_blocks(source.pool, pool, [0], [BLOCKS])
        assert sys.getrefcount(pool) == references + 2
        gate.open()
        second.wait(PATIENCE)
        assert first.done()
    assert sys.getrefcount(pool) == references


class Tensor:
    """Pinned memory, for a driver finishes a copy to other host memory before it returns."""

    def __init__(self, device: kvswap.Device) -> None:
        self.memory = device.alloc(BLOCKS * NBYTES, host=True)
        self.nbytes = self.memory.nbytes

    def data_ptr(self) -> int:
        return self.memory.ptr


def test_the_memory_lives_until_the_transfer_ended(device: kvswap.Device) -> None:
    """Of a pool with no other reference."""
    source, stream, tensor = Tier(device, "gpu"), kvswap.Stream(device), Tensor(device)
    pool, there = kvswap.Pool(device, tensor, BLOCKS, NBYTES), weakref.ref(tensor)
    with Gate(device) as gate:
        gate.hold(stream)
        transfer = kvswap.move_blocks(source.pool, pool, [0], [1], stream=stream)
        del tensor, pool
        assert there() is not None
        gate.open()
        transfer.wait(PATIENCE)
    assert there() is None


def test_a_tensor_that_knows_its_pool_is_collected(device: kvswap.Device) -> None:
    tensor = Tensor(device)
    tensor.pool = kvswap.Pool(device, tensor, BLOCKS, NBYTES)
    there = weakref.ref(tensor)
    assert gc.is_tracked(tensor.pool)
    del tensor
    gc.collect()
    assert there() is None


# -- races ------------------------------------------------------------------------------------------------------------

PARTY = (True, 12, 3, 4, "D2H by dma", "cuda:0 stream 0x55", "engine.py:12 in step")


def test_races_as_text() -> None:
    access = (False, 0, 0, 0, "access", "cuda:0 stream 0x7", "")
    assert _races.describe(("primary 0", 5, PARTY, access)) == (
        "race on slot 5 of pool 'primary 0': D2H by dma (transfer 12, lane 3 #4, cuda:0 stream 0x55, "
        "engine.py:12 in step) writes, and access (cuda:0 stream 0x7) reads, with no order between them"
    )
    assert _races.describe_accessor((False, 0, 0, 0, "", "", "")) == "an access reads"
    assert "out of memory" in _races.describe(("", 0, PARTY, PARTY))


def step(stream: Any, tier: Tier) -> int:
    """Tells of an access; returns the line."""
    testing.note_access(stream, tier.pool, [5], True)
    return sys._getframe().f_lineno - 1


def test_what_a_race_says(device: kvswap.Device) -> None:
    """A write that somebody tells of and a transfer that nothing orders with it, each with who called."""
    src, dst = Tier(device, "gpu", name="primary"), Tier(device, "cpu")
    stream, called = kvswap.Stream(device), []
    before = _C._set_race_hook(lambda: called.append(bindings.racecheck_found()))
    _C._racecheck_start()
    try:
        _C._racecheck_take()
        found = bindings.racecheck_found()
        line = step(stream, src)
        assert called == []
        transfer = move(src, dst, [5, 6], [0, 1])
        assert bindings.racecheck_found() == found + 1
        assert called == [found + 1]
        transfer.wait(PATIENCE)
        assert called == [found + 1]
        ((pool, slot, first, second),) = _C._racecheck_take()
        assert _C._racecheck_take() == []
    finally:
        _C._racecheck_stop()
        _C._set_race_hook(before)
    assert (pool, slot) == ("primary", 5)
    assert first[:5] == (True, 0, 0, 0, "access")
    assert first[5] == f"{device.name} stream {stream.handle:#x}"
    assert first[6] == f"test_pool.py:{line} in step"
    assert second[:4] == (False, transfer.number, transfer.lane, transfer.sequence)
    assert second[4] == f"D2H by {transfer.path}"
    assert second[6].startswith("test_pool.py:") and second[6].endswith(" in move")


def test_no_race_where_order_was_told_or_made(device: kvswap.Device) -> None:
    src, dst, stream = Tier(device, "gpu"), Tier(device, "cpu"), kvswap.Stream(device)
    compute = kvswap.Stream(device)
    _C._racecheck_start()
    try:
        _C._racecheck_take()
        testing.note_access(stream, src.pool, [5], True)
        move(src, dst, [5], [0], stream=stream).wait(PATIENCE)
        testing.note_access(stream, src.pool, [6], True)
        testing.note_order(stream, compute)
        move(src, dst, [6], [1], stream=compute).wait(PATIENCE)
        testing.note_access(stream, src.pool, [7], True)
        testing.note_order(stream, None)
        move(src, dst, [7], [2]).wait(PATIENCE)
        testing.note_access(stream, src.pool, [8], True, offset=8)
        move(src, dst, [8], [3], parts=[(0, 0, 0, 1, 8, 0)]).wait(PATIENCE)
        assert _C._racecheck_take() == []
    finally:
        _C._racecheck_stop()


@pytest.mark.parametrize("where", ["engine.py", os.path.join(os.path.dirname(kvswap.__file__), "offload", "engine.py")])
def test_who_calls_is_outside_the_package(device: kvswap.Device, where: str) -> None:
    names: dict[str, Any] = {"note_access": testing.note_access}
    exec(compile("def note(*arguments):\n    note_access(*arguments)\n", where, "exec"), names)
    tier = Tier(device, "gpu")
    with testing.race_checker(raise_at_exit=False) as checker:
        names["note"](kvswap.Stream(device), tier.pool, [1], True)
        names["note"](kvswap.Stream(device), tier.pool, [1], True)
        ours = "engine.py:2 in note" if where == "engine.py" else "in test_who_calls_is_outside_the_package"
        assert [race.second.where.endswith(ours) for race in checker.races] == [True]
        assert str(checker.races[0]).count(ours) == 2


def test_hooks(device: kvswap.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that raises loses nothing."""

    def broken() -> None:
        raise RuntimeError("broken hook")

    with pytest.raises(TypeError, match="hook must be callable or None, not int"):
        _C._set_race_hook(5)
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: raised.append(str(unraisable.exc_value)))
    tier, host = Tier(device, "gpu"), Tier(device, "cpu")
    before = _C._set_race_hook(broken)
    _C._racecheck_start()
    try:
        testing.note_access(kvswap.Stream(device), tier.pool, [1], True)
        move(tier, host, [1], [2]).wait(PATIENCE)
        assert len(_C._racecheck_take()) == 1
    finally:
        _C._racecheck_stop()
        assert _C._set_race_hook(before) is broken
    assert raised == ["broken hook"]


def test_races_reach_the_log(device_name: str) -> None:
    """With nothing but a variable of the environment."""
    script = f"""
        import logging
        import kvswap
        from conftest import Buffer, PATIENCE
        from kvswap import testing

        logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
        device = kvswap.Device({device_name!r})
        buffers = [Buffer(device, 256, side) for side in ("gpu", "cpu")]
        pools = [kvswap.Pool(device, buffer.ptr, 4, 64, name=buffer.side) for buffer in buffers]

        def step():
            testing.note_access(kvswap.Stream(device), pools[1], [2], False)
            kvswap.move_blocks(*pools, [1], [2]).wait(PATIENCE)

        step()
    """
    for value, expected in (("1", 1), ("0", 0), ("", 0)):
        done = run_python(script, KVSWAP_RACECHECK=value)
        assert done.returncode == 0, done.stderr
        lines = [
            line for line in done.stderr.splitlines() if line.startswith("kvswap ERROR race on slot 2 of pool 'cpu'")
        ]
        assert len(lines) == expected, done.stderr
        for line in lines:
            parties = r"access \(.*in step\) reads, and D2H by \w+ \(transfer 1, .*in step\) writes"
            assert re.search(f"pool 'cpu': {parties}", line), line


def test_no_caller_is_named_without_the_checker(pair: tuple[Tier, Tier], monkeypatch: pytest.MonkeyPatch) -> None:
    """The hot path asks for no frames."""
    assert bindings.racecheck_found() >= 0
    before = _C._set_race_hook(lambda: pytest.fail("called with no checker"))
    try:
        move(*pair, [0], [0]).wait(PATIENCE)
    finally:
        _C._set_race_hook(before)
