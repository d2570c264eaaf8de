"""Memory of another device as the other side of a swap: host:0 and host:1, or two GPUs."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from conftest import (
    AT_ONCE,
    PATHS,
    PATIENCE,
    Buffer,
    Gate,
    bindings,
    check_pattern,
    random_bytes,
    second_device,
    until,
    usable,
    write_pattern,
)
from processes import Process

import kvswap
from kvswap import memory, testing
from kvswap.offload import CanonicalKVCacheRef, CPULoadStoreSpec, GPULoadStoreSpec, SingleDirectionOffloadingHandler

BLOCKS, NBYTES = 64, 4096


@pytest.fixture(scope="module")
def other(session_device: kvswap.Device) -> kvswap.Device:
    return second_device(session_device, "host:1")


@pytest.fixture
def pair(device: kvswap.Device, other: kvswap.Device) -> Iterator[tuple[Buffer, Buffer]]:
    """Here and there, random."""
    buffers = Buffer(device, BLOCKS * NBYTES), Buffer(other, BLOCKS * NBYTES)
    for seed, buffer in enumerate(buffers):
        buffer.randomise(seed)
    yield buffers
    other.synchronize(PATIENCE)


def blocks_of(buffer: Buffer) -> np.ndarray[Any, Any]:
    return buffer.get().reshape(BLOCKS, NBYTES)


def some_ids(seed: int, count: int = 20) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.permutation(BLOCKS)[:count], rng.permutation(BLOCKS)[:count]


def pools_of(pair: tuple[Buffer, Buffer]) -> tuple[kvswap.Pool, kvswap.Pool]:
    return tuple(kvswap.Pool(buffer.device, buffer.memory, BLOCKS, NBYTES) for buffer in pair)  # type: ignore[return-value]


def host_pool_of(device: kvswap.Device) -> tuple[Buffer, kvswap.Pool]:
    host = Buffer(device, BLOCKS * NBYTES, "cpu")
    return host, kvswap.Pool(device, host.memory, BLOCKS, NBYTES)


# -- the calls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("direction", [0, 1])
def test_swap_cache(device: kvswap.Device, pair: tuple[Buffer, Buffer], path: str, direction: int) -> None:
    here, there = pair
    before = blocks_of(here), blocks_of(there)
    here_ids, there_ids = some_ids(direction)
    transfer = kvswap.swap_cache_per_layer_async(
        here.memory, there.memory, NBYTES, BLOCKS, BLOCKS, here_ids, there_ids, direction, device=device,
        path=usable(device, path),
    )  # fmt: skip
    transfer.wait(PATIENCE)
    assert transfer.device == device and transfer.path != "burst"
    expected = [side.copy() for side in before]
    if direction:
        expected[0][here_ids] = before[1][there_ids]
    else:
        expected[1][there_ids] = before[0][here_ids]
    np.testing.assert_array_equal(blocks_of(here), expected[0])
    np.testing.assert_array_equal(blocks_of(there), expected[1])


@pytest.mark.parametrize("path", PATHS)
def test_layers_in_a_slab(device: kvswap.Device, pair: tuple[Buffer, Buffer], path: str) -> None:
    here, there = pair
    layers, count = 4, BLOCKS // 4
    before = blocks_of(here), blocks_of(there)
    ids, back = np.arange(12)[::-1].copy(), np.arange(2, 14)
    step = count * NBYTES
    kvswap.swap_cache_all_layers(
        [here.ptr + i * step for i in range(layers)], [there.ptr + i * step for i in range(layers)], NBYTES, count,
        count, ids, back, 0, device=device, path=usable(device, path),
    )  # fmt: skip
    expected = before[1].reshape(layers, count, NBYTES).copy()
    expected[:, back] = before[0].reshape(layers, count, NBYTES)[:, ids]
    np.testing.assert_array_equal(blocks_of(there), expected.reshape(BLOCKS, NBYTES))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("push", [True, False])
def test_batch(device: kvswap.Device, pair: tuple[Buffer, Buffer], path: str, push: bool) -> None:
    source, target = pair if push else pair[::-1]
    before = source.get()
    at = np.cumsum([0, 100, 1, 4096, 77, 5000])
    sizes = np.array([100, 1, 4096, 77, 5000, 9])
    kvswap.swap_blocks_batch(
        source.ptr + at, target.ptr + at, sizes, device=device, path=usable(device, path)
    ).wait(PATIENCE)  # fmt: skip
    np.testing.assert_array_equal(target.get(9283), before[:9283])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("push", [True, False])
def test_move_between_pools_of_two_devices(
    device: kvswap.Device, pair: tuple[Buffer, Buffer], path: str, push: bool
) -> None:
    buffers = pair if push else pair[::-1]
    source, target = pools_of(buffers)
    before = blocks_of(buffers[0]), blocks_of(buffers[1])
    ids, slots = some_ids(5)
    transfer = kvswap.move_blocks(source, target, ids, slots, path=usable(device, path))
    transfer.wait(PATIENCE)
    assert transfer.device == source.device
    before[1][slots] = before[0][ids]
    np.testing.assert_array_equal(blocks_of(buffers[1]), before[1])


@pytest.mark.parametrize("path", ["auto", "dma", "kernel"])
def test_rows_to_blocks(device: kvswap.Device, pair: tuple[Buffer, Buffer], path: str) -> None:
    """Layer-first here, block-first there."""
    here, there = pair
    layers, count, row = 4, 16, NBYTES
    before = blocks_of(here).reshape(layers, count, row)
    first = kvswap.Pool(device, here.memory, count, layers * row, stride=row, rows=layers, pitch=count * row)
    second = kvswap.Pool(there.device, there.memory, count, layers * row)
    ids = np.random.default_rng(1).permutation(count)
    kvswap.move_blocks(first, second, ids, np.arange(count), path=usable(device, path)).wait(PATIENCE)
    np.testing.assert_array_equal(there.get().reshape(count, layers, row), before[:, ids].transpose(1, 0, 2))


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_swap_is_with_one_other_device(device: kvswap.Device, pair: tuple[Buffer, Buffer]) -> None:
    here, there = pair
    if device.kind == "host":
        third = Buffer(kvswap.Device("host:2"), NBYTES)
        with pytest.raises(ValueError, match="one other device"):
            kvswap.swap_blocks_batch([there.ptr, third.ptr], [here.ptr, here.ptr + 99], 50, device=device)
        pools = [kvswap.Pool(buffer.device, buffer.memory, 1, NBYTES, stride=NBYTES) for buffer in (here, there, third)]
        with pytest.raises(ValueError, match="between two of a kind"):
            kvswap.move_blocks([pools[0]] * 2, [pools[1], pools[2]], [0], [0])
    with pytest.raises(ValueError, match=f"this call runs on {device.name}"):
        kvswap.swap_cache_per_layer(
            there.memory, here.memory, NBYTES, BLOCKS, BLOCKS, [1], [1], 0, device=device
        )  # fmt: skip


def test_without_peer_access(device: kvswap.Device, other: kvswap.Device, pair: tuple[Buffer, Buffer]) -> None:
    """Copies are staged; a kernel is not launched, for it would lose the device."""
    if device.kind != "host":
        pytest.skip("only a host device can be made so")
    here, there = pair
    before = blocks_of(here)
    ids, slots = some_ids(9)
    arguments = (here.memory, there.memory, NBYTES, BLOCKS, BLOCKS, ids, slots, 0)
    with testing.peer_access(device, other, False):
        with pytest.raises(kvswap.Error, match="no peer access"):
            kvswap.swap_cache_per_layer(*arguments, device=device, path="kernel")
        for path in ("burst", "dma", "strided", "auto"):
            transfer = kvswap.swap_cache_per_layer_async(*arguments, device=device, path=path)
            transfer.wait(PATIENCE)
            assert transfer.path in ("dma", "direct", "strided"), transfer.path
            np.testing.assert_array_equal(blocks_of(there)[slots], before[ids])
            there.randomise(1)
    assert not device.lost
    kvswap.swap_cache_per_layer(*arguments, device=device, path="kernel")
    np.testing.assert_array_equal(blocks_of(there)[slots], before[ids])


def test_memory_of_another_process_on_another_device(
    device: kvswap.Device, other: kvswap.Device, pair: tuple[Buffer, Buffer]
) -> None:
    """Copied, and touched by no kernel of this device."""
    with Process(f"device = kvswap.Device({other.name!r}); shared = device.alloc({NBYTES})") as owner:
        with memory.open(bytes.fromhex(owner.do("memory.export(shared).to_bytes().hex()"))) as mapped:
            assert mapped.device == other
            before = blocks_of(pair[0])[5]
            arguments = (pair[0].memory, mapped, NBYTES, BLOCKS, 1, [5], [0], 0)
            with pytest.raises(kvswap.Error, match="no peer access"):
                kvswap.swap_cache_per_layer(*arguments, device=device, path="kernel")
            for path in ("auto", "dma"):
                kvswap.swap_cache_per_layer(*arguments, device=device, path=path)
            kvswap.swap_cache_per_layer(
                pair[0].memory, mapped, NBYTES, BLOCKS, 1, [6], [0], 1, device=device
            )  # fmt: skip
        np.testing.assert_array_equal(blocks_of(pair[0])[6], before)


def test_a_kernel_beyond_its_reach_loses_the_device() -> None:
    """The host device says so, as a GPU would."""
    device, other = kvswap.Device("host:21"), kvswap.Device("host:22")
    mine, theirs = device.alloc(64), other.alloc(64)
    pieces = np.array([theirs.ptr, mine.ptr, 64], np.uint64)
    with testing.peer_access(device, other, False):
        stream = kvswap.Stream(device)
        bindings.seam(device, "launch_copy", 1, int(pieces.ctypes.data), 1, 32, stream.handle)
        with pytest.raises(kvswap.DeviceError):
            stream.synchronize(PATIENCE)
    assert device.lost and not other.lost


# -- order ------------------------------------------------------------------------------------------------------------


def test_it_starts_after_an_event_of_the_other_device(
    device: kvswap.Device, other: kvswap.Device, pair: tuple[Buffer, Buffer]
) -> None:
    """Written there behind a gate, taken here: the event there is all that orders the two."""
    here, there = pair
    stream, event = kvswap.Stream(other), kvswap.Event(other)
    new = random_bytes(77, NBYTES)
    host = other.alloc(NBYTES, host=True)
    np.frombuffer(host, np.uint8)[:] = new
    with Gate(other) as gate:
        gate.hold(stream)
        bindings.seam(other, "copy", there.ptr, host.ptr, NBYTES, stream.handle)
        event.record(stream)
        transfer = kvswap.swap_cache_per_layer_async(
            here.memory, there.memory, NBYTES, BLOCKS, BLOCKS, [3], [0], 1, device=device, after=event
        )
        time.sleep(0.05)
        assert not transfer.done()
    transfer.wait(PATIENCE)
    np.testing.assert_array_equal(blocks_of(here)[3], new)


def test_the_other_device_waits_for_it(
    device: kvswap.Device, other: kvswap.Device, pair: tuple[Buffer, Buffer]
) -> None:
    here, there = pair
    stream, after = kvswap.Stream(device), kvswap.Event(other)
    theirs = kvswap.Stream(other)
    with Gate(device) as gate:
        gate.hold(stream)
        transfer = kvswap.swap_cache_per_layer_async(
            here.memory, there.memory, NBYTES, BLOCKS, BLOCKS, [3], [0], 0, device=device, stream=stream
        )
        transfer.event.wait(theirs)
        after.record(theirs)
        second = kvswap.swap_cache_per_layer_async(
            there.memory, other.alloc(NBYTES, host=True), NBYTES, BLOCKS, 1, [0], [0], 0, device=other, after=transfer
        )
        time.sleep(0.05)
        assert not after.query() and not second.done()
    after.synchronize(PATIENCE)
    second.wait(PATIENCE)
    assert transfer.done()


def test_layers_start_after_events_of_the_other_device(
    device: kvswap.Device, other: kvswap.Device, pair: tuple[Buffer, Buffer]
) -> None:
    here, there = pair
    stream, events = kvswap.Stream(other), [kvswap.Event(other), kvswap.Event(other)]
    half = BLOCKS // 2
    arguments = (
        [here.ptr, here.ptr + half * NBYTES], [there.ptr, there.ptr + half * NBYTES], NBYTES, half, half, [1], [2], 0,
    )  # fmt: skip
    events[0].record(stream)
    with Gate(other) as gate:
        gate.hold(stream)
        events[1].record(stream)
        transfer = kvswap.swap_cache_all_layers_async(
            *arguments, device=device, layer_events=True, after_layers=events
        )  # fmt: skip
        deadline = time.monotonic() + PATIENCE
        while not transfer.layer_done(0) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert transfer.layer_done(0) and not transfer.layer_done(1)
    transfer.wait(PATIENCE)


def test_pools_keep_two_devices_in_order(
    device: kvswap.Device, other: kvswap.Device, pair: tuple[Buffer, Buffer]
) -> None:
    """A store here into the other's pool, a load there from it, and back: nothing but the pools orders them."""
    here, _ = pair
    mine, theirs = pools_of(pair)
    host, kept = host_pool_of(other)
    before = blocks_of(here)
    stream = kvswap.Stream(device)
    with testing.race_checker(), Gate(device) as gate:
        gate.hold(stream)
        first = kvswap.move_blocks(mine, theirs, [1], [5], stream=stream)  # by the one
        second = kvswap.move_blocks(theirs, kept, [5], [7])  # by the other
        third = kvswap.move_blocks(kept, theirs, [9], [5])  # overwrites what second reads
        fourth = kvswap.move_blocks(theirs, mine, [5], [2])  # reads that
        time.sleep(0.05)
        assert not any(transfer.done() for transfer in (first, second, third, fourth))
        gate.open()
        for transfer in (first, second, third, fourth):
            transfer.wait(PATIENCE)
    np.testing.assert_array_equal(host.get().reshape(BLOCKS, NBYTES)[7], before[1])
    np.testing.assert_array_equal(blocks_of(here)[2], host.get().reshape(BLOCKS, NBYTES)[9])
    assert [transfer.device for transfer in (first, second, third, fourth)] == [device, other, other, other]


def test_a_transfer_that_has_ended_comes_first_too(
    device: kvswap.Device, other: kvswap.Device, pair: tuple[Buffer, Buffer]
) -> None:
    """No call has seen the first transfer's end: for the race checker the pools order the second one behind it."""
    mine, theirs = pools_of(pair)
    host, kept = host_pool_of(other)
    with testing.race_checker():
        first = kvswap.move_blocks(mine, theirs, [1], [5])
        until(lambda: device.stats()["unfinished"] == 0, "the end of the first")
        second = kvswap.move_blocks(theirs, kept, [5], [7])
        second.wait(PATIENCE)
        first.wait(PATIENCE)
    np.testing.assert_array_equal(host.get().reshape(BLOCKS, NBYTES)[7], blocks_of(pair[0])[1])


def test_a_new_pool_waits_for_the_other_device(
    device: kvswap.Device, other: kvswap.Device, pair: tuple[Buffer, Buffer]
) -> None:
    """Its memory is in use when the pool is made, by a transfer that knows no pools."""
    here, there = pair
    stream = kvswap.Stream(device)
    host, kept = host_pool_of(other)
    expected = blocks_of(here)[0]
    with Gate(device) as gate:
        gate.hold(stream)
        first = kvswap.swap_blocks_batch(
            np.array([here.ptr]), np.array([there.ptr + 5 * NBYTES]), NBYTES, device=device, stream=stream
        )
        theirs = kvswap.Pool(other, there.memory, BLOCKS, NBYTES)
        second = kvswap.move_blocks(theirs, kept, [5], [7])
        time.sleep(0.05)
        assert not second.done()
    for transfer in (first, second):
        transfer.wait(PATIENCE)
    np.testing.assert_array_equal(host.get().reshape(BLOCKS, NBYTES)[7], expected)


def test_failure_travels_between_devices(
    device: kvswap.Device, other: kvswap.Device, pair: tuple[Buffer, Buffer]
) -> None:
    mine, theirs = pools_of(pair)
    _host, kept = host_pool_of(other)
    with testing.fault(device, "copy", "fail", nth=2):
        first = kvswap.move_blocks(mine, theirs, [1, 8, 3], [5, 7, 9], path="dma")
    second = kvswap.move_blocks(theirs, kept, [5, 7, 9], [0, 1, 2])
    for transfer in (first, second):
        with pytest.raises(kvswap.DeviceError):
            transfer.wait(PATIENCE)
        assert transfer.failed_positions.tolist() == [1]
    kvswap.move_blocks(mine, theirs, [8], [7]).wait(PATIENCE)
    kvswap.move_blocks(theirs, kept, [7], [1]).wait(PATIENCE)


def test_transfers_that_start_after_work_of_a_lost_device_fail() -> None:
    """They end, rather than wait for it."""
    device, other = kvswap.Device("host:23"), kvswap.Device("host:24")
    mine, theirs = device.alloc(64), other.alloc(64)
    stream, event = kvswap.Stream(other), kvswap.Event(other)
    with Gate(other) as gate:
        gate.hold(stream)
        event.record(stream)
        transfer = kvswap.swap_blocks_batch([theirs], [mine], 64, device=device, after=event)
        assert not transfer.done()
        with testing.fault(other, "call", "lose"), pytest.raises(kvswap.DeviceError):
            other.alloc(64)
        with pytest.raises(kvswap.DeviceError, match="lost"):
            transfer.wait(PATIENCE)
        with suppress(kvswap.DeviceError):
            gate.open()
        gate.device = device  # the other one cannot be waited for any more
    assert not device.lost
    kvswap.swap_blocks_batch([mine], [np.zeros(64, np.uint8)], 64, device=device).wait(PATIENCE)


def test_a_device_that_is_lost_fails_who_comes_after_those() -> None:
    """What a third transfer reads was to be written by one that came after the lost device."""
    device, other = kvswap.Device("host:25"), kvswap.Device("host:26")
    theirs, stream, event = other.alloc(64), kvswap.Stream(other), kvswap.Event(other)
    first, second = (kvswap.Pool(device, device.alloc(64), 1, 64) for _ in range(2))
    with Gate(other) as gate:
        gate.hold(stream)
        event.record(stream)
        own = kvswap.Stream(device)
        written = kvswap.move_blocks(first, second, [0], [0], after=event)
        read = kvswap.move_blocks(second, first, [0], [0], stream=own)
        assert theirs and not read.done()
        with testing.fault(other, "call", "lose"), pytest.raises(kvswap.DeviceError):
            other.alloc(64)
        for transfer in (written, read):
            with pytest.raises(kvswap.DeviceError, match="lost"):
                transfer.wait(PATIENCE)
        with suppress(kvswap.DeviceError):
            gate.open()
        gate.device = device
    assert not device.lost


@contextmanager
def about_to_be_lost(other: kvswap.Device, device: kvswap.Device) -> Iterator[tuple[kvswap.Event, Callable[[], None]]]:
    """An event of the other device that is not reached before that device is lost, which the function does."""
    theirs, stream, event = other.alloc(64), kvswap.Stream(other), kvswap.Event(other)

    def lose() -> None:
        with testing.fault(other, "call", "lose"), pytest.raises(kvswap.DeviceError):
            other.alloc(64)

    with Gate(other) as gate:
        gate.hold(stream)
        event.record(stream)
        yield event, lose
        with suppress(kvswap.DeviceError):
            gate.open()
        gate.device = device  # the other one cannot be waited for any more
    assert theirs and not device.lost


def slots_of(device: kvswap.Device, count: int, slots: int = 2) -> list[kvswap.Pool]:
    return [kvswap.Pool(device, device.alloc(slots * 64), slots, 64) for _ in range(count)]


def fails(transfer: kvswap.Transfer) -> list[int]:
    with pytest.raises(kvswap.DeviceError, match="lost"):
        transfer.wait(PATIENCE)
    return transfer.failed_positions.tolist()


def test_in_a_lane_it_fails_who_reads_what_was_to_be_written_and_no_neighbour() -> None:
    """A failure spreads by common blocks, also after all has ended, and not by the order of a lane."""
    device = kvswap.Device("host:29")
    first, second, third, fourth = slots_of(device, 4)
    with about_to_be_lost(kvswap.Device("host:30"), device) as (event, lose):
        written = kvswap.move_blocks(first, second, [0], [0], after=event)
        read = kvswap.move_blocks(second, third, [1, 0], [1, 0])
        beside = kvswap.move_blocks(first, fourth, [0], [0])
        assert written.lane == read.lane == beside.lane and not beside.done()
        lose()
        assert fails(written) == [0] and fails(read) == [0, 1]
        beside.wait(PATIENCE)
        late = kvswap.move_blocks(second, fourth, [0, 1], [0, 1])
        assert fails(late) == [0]  # of this one, each block is known
        assert fails(kvswap.move_blocks(fourth, first, [0], [0])) == [0]
        kvswap.move_blocks(fourth, first, [1], [1]).wait(PATIENCE)
    kvswap.move_blocks(fourth, second, [1], [0]).wait(PATIENCE)  # written whole
    kvswap.move_blocks(second, third, [0], [0]).wait(PATIENCE)


def test_another_lane_learns_of_all_that_it_reads() -> None:
    """It waits for the last of several of a lane alone, and an earlier one is the one that fails."""
    device = kvswap.Device("host:31")
    first, second, third = slots_of(device, 3)
    stream = kvswap.Stream(device)
    with about_to_be_lost(kvswap.Device("host:32"), device) as (event, lose):
        written = kvswap.move_blocks(first, second, [0], [0], after=event)
        beside = kvswap.move_blocks(first, second, [1], [1])
        both = kvswap.move_blocks(second, third, [1], [1], stream=stream)  # which has waited for the lane
        again = kvswap.move_blocks(second, third, [0], [0], stream=stream)
        lose()
        assert fails(written) == [0] and fails(again) == [0]
        for transfer in (beside, both):
            transfer.wait(PATIENCE)


def test_what_ended_well_fails_nobody_when_a_device_is_lost_later() -> None:
    device = kvswap.Device("host:33")
    first, second, third = slots_of(device, 3)
    other = kvswap.Device("host:34")
    reached = kvswap.Event(other)
    reached.record(kvswap.Stream(other))
    with about_to_be_lost(other, device) as (_, lose):
        kvswap.move_blocks(first, second, [0], [0], after=reached).wait(PATIENCE)
        lose()
        kvswap.move_blocks(second, third, [0], [0]).wait(PATIENCE)


def test_a_block_that_is_written_in_part_needs_the_rest() -> None:
    device = kvswap.Device("host:35")
    first, second, third = slots_of(device, 3)
    half = np.array([[0, 0, 32, 1, 32, 0]])
    with about_to_be_lost(kvswap.Device("host:36"), device) as (event, lose):
        written = kvswap.move_blocks(first, second, [0], [0], after=event)
        part = kvswap.move_blocks(first, second, [1], [0], parts=half)
        read = kvswap.move_blocks(second, third, [0], [0])
        lose()
        for transfer in (written, part, read):
            assert fails(transfer) == [0]
        part = kvswap.move_blocks(first, second, [1], [0], parts=half)
        part.wait(PATIENCE)
        assert fails(kvswap.move_blocks(second, third, [0], [0])) == [0]


def test_pools_of_devices_that_cannot_be_in_one_transfer() -> None:
    """Either side is looked at: of a third device, of one that another kind cannot wait for."""
    names = [kvswap.Device(f"host:{number}") for number in (61, 62, 63)] + [testing.deterministic_device(1)]
    memories = [device.alloc(4096) for device in names]
    pools = [kvswap.Pool(device, memory, 4, 1024) for device, memory in zip(names, memories, strict=True)]
    first, second, third, stepped = pools
    for src, dst, wrong in (
        ([first, first], [second, third], r"dst\[1\]"),
        ([first, second], [first, third], r"dst\[1\]"),
        ([first, second, third], [first, first, first], r"src\[2\]"),
        ([first], [stepped], r"dst\[0\]"),
        ([stepped], [first], r"dst\[0\]"),
    ):
        with pytest.raises(ValueError, match=wrong + " is a pool of host:.*a transfer is within one device"):
            kvswap.move_blocks(src, dst, [0], [1])
    kvswap.move_blocks([first, second], [second, first], [0], [1]).wait(PATIENCE)


def test_three_devices() -> None:
    """One writes into another's pool after an event of a third; that one is lost."""
    device, reader = kvswap.Device("host:37"), kvswap.Device("host:38")
    (mine,), (theirs, kept) = slots_of(device, 1), slots_of(reader, 2)
    with about_to_be_lost(kvswap.Device("host:39"), device) as (event, lose):
        written = kvswap.move_blocks(mine, theirs, [0], [0], after=event)
        beside = kvswap.move_blocks(mine, theirs, [1], [1])
        read = kvswap.move_blocks(theirs, kept, [0], [0])
        assert (written.device, read.device) == (device, reader)
        lose()
        assert fails(written) == [0] and fails(read) == [0]
        beside.wait(PATIENCE)
        assert fails(kvswap.move_blocks(theirs, kept, [0, 1], [0, 1])) == [0]


def test_a_pool_that_a_lost_device_was_writing_is_not_read() -> None:
    """The device is gone before anybody asks: nothing there is unfinished, and yet the bytes may be anything."""
    device, other = kvswap.Device("host:27"), kvswap.Device("host:28")
    pool, back = (kvswap.Pool(device, device.alloc(64), 1, 64) for _ in range(2))
    theirs, stream = kvswap.Pool(other, other.alloc(64), 1, 64), kvswap.Stream(other)
    with Gate(other) as gate:
        gate.hold(stream)
        stored = kvswap.move_blocks(theirs, pool, [0], [0], stream=stream)
        with testing.fault(other, "call", "lose"), pytest.raises(kvswap.DeviceError):
            other.alloc(64)
        with pytest.raises(kvswap.DeviceError):
            stored.wait(PATIENCE)
        with pytest.raises(kvswap.DeviceError, match="lost"):
            kvswap.move_blocks(pool, back, [0], [0]).wait(PATIENCE)
        with suppress(kvswap.DeviceError):
            gate.open()
        gate.device = device
    kvswap.move_blocks(back, kvswap.Pool(device, device.alloc(64), 1, 64), [0], [0]).wait(PATIENCE)


def test_memory_is_not_freed_under_the_other_devices_transfer(
    device: kvswap.Device, other: kvswap.Device, pair: tuple[Buffer, Buffer]
) -> None:
    here, _ = pair
    theirs, stream = other.alloc(NBYTES), kvswap.Stream(device)
    with Gate(device) as gate:
        gate.hold(stream)
        transfer = kvswap.swap_blocks_batch(
            np.array([here.ptr]), np.array([theirs.ptr]), NBYTES, device=device, stream=stream
        )
        ended: list[bool] = []
        thread = threading.Thread(target=lambda: (theirs.free(), ended.append(transfer.done())))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        gate.open()
        thread.join(PATIENCE)
        assert ended == [True]


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("register", [False, True])
def test_a_host_pool_waits_for_the_other_devices_transfers(lost: bool, register: bool) -> None:
    """Also a pageable one, which no driver holds on to, and one whose own device runs nothing any more."""
    number = 46 + 4 * lost + 2 * register
    device, other = kvswap.Device(f"host:{number}"), kvswap.Device(f"host:{number + 1}")
    pool = memory.HostPool(4, NBYTES, device=device, register=register)
    theirs, stream = other.alloc(NBYTES), kvswap.Stream(other)
    if lost:
        with testing.fault(device, "call", "lose"), pytest.raises(kvswap.DeviceError):
            device.alloc(64)
    with Gate(other) as gate:
        gate.hold(stream)
        transfer = kvswap.swap_blocks_batch(
            np.array([theirs.ptr]), np.array([pool.ptr]), NBYTES, device=other, stream=stream
        )
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            pool.close(timeout=0.05)
        assert time.monotonic() - begin < AT_ONCE
    transfer.wait(PATIENCE)
    pool.close()


def test_many_threads_on_two_devices(device: kvswap.Device, other: kvswap.Device, pair: tuple[Buffer, Buffer]) -> None:
    """Blocks go to and fro between the pools of two devices; each thread has slots of its own and finds what it put."""
    mine, theirs = pools_of(pair)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        stream = kvswap.Stream(device)
        slots = np.arange(4) + 8 * number
        try:
            for turn in range(15):
                keys = np.arange(4) + 1000 * number + turn * 10 + 1
                write_pattern(device, [mine.ptr + int(slot) * NBYTES for slot in slots], NBYTES, keys, stream)
                out = kvswap.move_blocks(mine, theirs, slots, slots, stream=stream)
                back = kvswap.move_blocks(theirs, mine, slots, slots + 4)
                back.event.wait(stream)
                check = check_pattern(
                    device, [mine.ptr + int(slot + 4) * NBYTES for slot in slots], NBYTES, keys, stream
                )
                assert check.result(PATIENCE)[0] == 0
                out.wait(PATIENCE), back.wait(PATIENCE)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not errors, errors


# -- offloading maps --------------------------------------------------------------------------------------------------


def handlers_of(
    device: kvswap.Device, gpu: Any, cpu: Any, compute: Any = None
) -> tuple[SingleDirectionOffloadingHandler, SingleDirectionOffloadingHandler]:
    """Store and load; `compute` says what the stores start after."""
    refs = [[CanonicalKVCacheRef(0, NBYTES)]]
    store, load = (
        SingleDirectionOffloadingHandler(
            [gpu], [cpu], 1, refs, to_cpu, device=device, compute_stream=compute if to_cpu else None
        )
        for to_cpu in (True, False)
    )
    return store, load


def job_of(gpu: int, chunk: int, store: bool = True) -> tuple[Any, Any]:
    pair = GPULoadStoreSpec([gpu], [1], [0]), CPULoadStoreSpec([chunk])
    return pair if store else pair[::-1]


def outcome(handler: SingleDirectionOffloadingHandler) -> dict[int, bool]:
    handler.drain(PATIENCE)
    return {result.job_id: result.success for result in handler.get_finished()}


def host_blocks(seed: int) -> np.ndarray[Any, Any]:
    return random_bytes(seed, BLOCKS * NBYTES).reshape(BLOCKS, NBYTES).copy()


def test_a_map_of_memory_that_is_as_large_as_its_blocks_and_no_larger(device: kvswap.Device) -> None:
    if device.kind != "host":
        pytest.skip("NumPy has no memory of a GPU's")
    memories = device.alloc(BLOCKS * NBYTES), device.alloc(BLOCKS * NBYTES, host=True)
    gpu, cpu = (np.asarray(memory).view(np.uint8).reshape(BLOCKS, NBYTES) for memory in memories)
    gpu[:], cpu[:] = host_blocks(1), host_blocks(2)
    store, load = handlers_of(device, gpu, cpu)
    store.transfer_async(1, job_of(BLOCKS - 1, BLOCKS - 1))
    assert outcome(store) == {1: True} and (cpu[-1] == gpu[-1]).all()
    store.shutdown()
    load.shutdown()


def test_an_offloading_map_waits_for_the_other_device(device: kvswap.Device, other: kvswap.Device) -> None:
    """The other device writes the map's host memory when the map is opened; its jobs come after that."""
    if device.kind != "host":
        pytest.skip("NumPy has no memory of a GPU's")
    gpu, cpu = host_blocks(1), host_blocks(2)
    before = gpu.copy()
    theirs, stream = Buffer(other, NBYTES), kvswap.Stream(other)
    new = theirs.randomise(3)
    with Gate(other) as gate:
        gate.hold(stream)
        first = kvswap.swap_blocks_batch([theirs.memory], [cpu[5]], NBYTES, device=other, stream=stream)
        store, load = handlers_of(device, gpu, cpu)
        load.transfer_async(1, job_of(7, 5, False))
        store.transfer_async(2, job_of(8, 5))
        time.sleep(0.05)
        assert not first.done() and load.get_finished() == store.get_finished() == []
    first.wait(PATIENCE)
    assert (outcome(store), outcome(load)) == ({2: True}, {1: True})
    np.testing.assert_array_equal(gpu[7], new)
    np.testing.assert_array_equal(cpu[5], before[8])
    store.shutdown()
    load.shutdown()


def test_the_other_device_waits_for_an_offloading_map(device: kvswap.Device, other: kvswap.Device) -> None:
    """A map, and a pool, that are opened there while a store here writes the same host memory."""
    if device.kind != "host":
        pytest.skip("NumPy has no memory of a GPU's")
    gpu, there, cpu = host_blocks(1), host_blocks(2), host_blocks(3)
    stream = kvswap.Stream(device)
    store, load = handlers_of(device, gpu, cpu, lambda: stream)
    back = Buffer(other, BLOCKS * NBYTES)
    with Gate(device) as gate:
        gate.hold(stream)
        store.transfer_async(1, job_of(7, 5))
        their_store, their_load = handlers_of(other, there, cpu)
        their_load.transfer_async(2, job_of(9, 5, False))
        host, mine = (kvswap.Pool(other, memory, BLOCKS, NBYTES) for memory in (cpu, back.memory))
        read = kvswap.move_blocks(host, mine, [5], [1])
        time.sleep(0.05)
        assert their_load.get_finished() == [] and not read.done()
    read.wait(PATIENCE)
    assert (outcome(store), outcome(their_load)) == ({1: True}, {2: True})
    np.testing.assert_array_equal(there[9], gpu[7])
    np.testing.assert_array_equal(blocks_of(back)[1], gpu[7])
    for handler in (store, load, their_store, their_load):
        handler.shutdown()


def test_an_offloading_map_is_not_used_on_what_a_lost_device_left() -> None:
    device, other = kvswap.Device("host:40"), kvswap.Device("host:41")
    gpu, cpu, theirs = host_blocks(1), host_blocks(2), other.alloc(NBYTES)
    stream = kvswap.Stream(other)
    with Gate(other) as gate:
        gate.hold(stream)
        written = kvswap.swap_blocks_batch([theirs], [cpu[5]], NBYTES, device=other, stream=stream)
        store, load = handlers_of(device, gpu, cpu)
        load.transfer_async(1, job_of(7, 5, False))
        with testing.fault(other, "call", "lose"), pytest.raises(kvswap.DeviceError):
            other.alloc(64)
        assert fails(written) == [0]
        assert outcome(load) == {1: False}
        load.transfer_async(2, job_of(7, 5, False))  # what block 5 holds is unknown
        assert outcome(load) == {2: False}
        with suppress(kvswap.DeviceError):
            gate.open()
        gate.device = device
    store.shutdown()
    load.shutdown()
    store, load = handlers_of(device, gpu, cpu)  # a new map takes what is there as good
    store.transfer_async(3, job_of(7, 5))
    assert outcome(store) == {3: True}
    store.shutdown()
    load.shutdown()


def test_what_a_map_waited_for_is_forgotten() -> None:
    """A device that is lost after its transfer has ended does not fail the map's later jobs."""
    device, other = kvswap.Device("host:42"), kvswap.Device("host:43")
    gpu, cpu, theirs = host_blocks(1), host_blocks(2), other.alloc(NBYTES)
    stream = kvswap.Stream(other)
    with Gate(other) as gate:
        gate.hold(stream)
        first = kvswap.swap_blocks_batch([theirs], [cpu[5]], NBYTES, device=other, stream=stream)
        store, load = handlers_of(device, gpu, cpu)
        gate.open()
        first.wait(PATIENCE)
        load.transfer_async(1, job_of(7, 5, False))
        assert outcome(load) == {1: True}
        with testing.fault(other, "call", "lose"), pytest.raises(kvswap.DeviceError):
            other.alloc(64)
        gate.device = device
    load.transfer_async(2, job_of(7, 5, False))
    assert outcome(load) == {2: True}
    store.shutdown()
    load.shutdown()


def test_a_store_that_a_lost_device_undid_poisons_its_chunk() -> None:
    device = kvswap.Device("host:44")
    gpu, cpu = host_blocks(1), host_blocks(2)
    after: list[Any] = []
    with about_to_be_lost(kvswap.Device("host:45"), device) as (event, lose):
        after.append(event)
        store, load = handlers_of(device, gpu, cpu, lambda: after[0])
        store.transfer_async(1, job_of(7, 5))
        load.transfer_async(2, job_of(20, 5, False))
        load.transfer_async(3, job_of(21, 6, False))
        lose()
        assert outcome(store) == {1: False}
        assert outcome(load) == {2: False, 3: True}
        load.transfer_async(4, job_of(20, 5, False))
        assert outcome(load) == {4: False}
        after[0] = None
        store.transfer_async(5, job_of(7, 5))
        load.transfer_async(6, job_of(20, 5, False))
        assert (outcome(store), outcome(load)) == ({5: True}, {6: True})
    np.testing.assert_array_equal(gpu[20], gpu[7])
    store.shutdown()
    load.shutdown()
