"""The remote tier with blocks in a device's memory, over the stand-in agent of remote_agent.py."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Gate, until
from test_remote import NBYTES, Rack, block, blocks, get, keys, patient, put, rack

import kvswap
from kvswap import testing

__all__ = ["patient", "rack"]  # fixtures

SLOTS = 24


class Gpu:
    """Blocks of a device's memory, and what they are."""

    def __init__(self, device: kvswap.Device) -> None:
        self.device = device
        self.memory = device.alloc(SLOTS * NBYTES)

    def write(self, data: Any) -> None:
        own = np.ascontiguousarray(data).reshape(-1)
        kvswap.swap_blocks_batch([own.ctypes.data], [self.memory.ptr], own.nbytes, device=self.device).wait(PATIENCE)

    def read(self) -> Any:
        own = np.empty((SLOTS, NBYTES), np.uint8)
        kvswap.swap_blocks_batch([self.memory.ptr], [own.ctypes.data], own.nbytes, device=self.device).wait(PATIENCE)
        return own


@pytest.fixture
def gpu(device: kvswap.Device) -> Iterator[Gpu]:
    made = Gpu(device)
    made.write(blocks(range(SLOTS)))
    yield made
    device.synchronize(PATIENCE)


def load(store: Any, gpu: Gpu, numbers: list[int], slots: list[int]) -> Any:
    gpu.write(np.full((SLOTS, NBYTES), 0xEE, np.uint8))
    transfer = store.load(keys(*numbers), gpu.memory, slots)
    with suppress(kvswap.Error):
        transfer.wait(PATIENCE)
    return transfer


def check(gpu: Gpu, expected: dict[int, int]) -> None:
    """Slots that have the blocks of these numbers; all others are unchanged."""
    found = gpu.read()
    for slot in range(SLOTS):
        right = block(expected[slot]) if slot in expected else np.full(NBYTES, 0xEE, np.uint8)
        assert (found[slot] == right).all(), f"slot {slot}"


@pytest.mark.parametrize("staging", [64 << 20, 3 * NBYTES])
def test_there_and_back(rack: Rack, gpu: Gpu, staging: int) -> None:
    rack.node()
    store = rack.store(device=gpu.device, staging_nbytes=staging)
    store.store(keys(*range(SLOTS)), gpu.memory, range(SLOTS)).wait(PATIENCE)
    numbers = [3, 17, 0, 9, 23]
    load(store, gpu, numbers, [5, 4, 3, 2, 1]).wait(PATIENCE)
    check(gpu, dict(zip([5, 4, 3, 2, 1], numbers, strict=True)))
    assert get(store, range(SLOTS))[0] == set(range(SLOTS)), "into host memory"
    put(store, [40, 41])  # from host memory
    load(store, gpu, [41], [0]).wait(PATIENCE)
    check(gpu, {0: 41})


def test_what_is_missing_or_damaged_leaves_its_memory_alone(rack: Rack, gpu: Gpu) -> None:
    rack.node()
    store = rack.store(device=gpu.device)
    put(store, range(4))

    def damage(operation: str, address: int) -> None:
        if operation == "READ" and not damaged:
            damaged.append(address)
            np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * 8).from_address(address + 100))[:] ^= 1

    damaged: list[int] = []
    store.agent.damage = damage
    transfer = load(store, gpu, [0, 1, 77, 2], [0, 1, 2, 3])
    failed = transfer.failed_blocks.tolist()
    assert len(damaged) == 1 and len(failed) == 2 and 2 in failed
    assert all(isinstance(transfer.reasons[i], kvswap.MissingKey) for i in failed)
    check(gpu, {i: [0, 1, 77, 2][i] for i in range(4) if i not in failed})


@pytest.mark.parametrize("nth", [1, 3])
def test_a_copy_out_that_fails_fails_its_block(rack: Rack, gpu: Gpu, nth: int) -> None:
    rack.node()
    store = rack.store(device=gpu.device)
    slots = [1, 5, 9, 13]  # not merged
    with testing.fault(gpu.device, "copy", "fail", nth=nth):
        transfer = store.store(keys(*slots), gpu.memory, slots)
        with pytest.raises(kvswap.DeviceError):
            transfer.wait(PATIENCE)
    assert transfer.failed_blocks.tolist() == [nth - 1]
    assert store.contains(keys(*slots)) == [i != nth - 1 for i in range(4)]
    assert get(store, [slot for i, slot in enumerate(slots) if i != nth - 1])[1].state == "done"
    assert len(store._staging._free) == store._staging.count


def test_a_copy_in_that_fails_fails_its_block(rack: Rack, gpu: Gpu) -> None:
    rack.node()
    store = rack.store(device=gpu.device)
    put(store, range(4))
    gpu.write(np.full((SLOTS, NBYTES), 0xEE, np.uint8))
    with testing.fault(gpu.device, "copy", "fail", nth=2):
        transfer = store.load(keys(0, 1, 2, 3), gpu.memory, [2, 4, 6, 8])
        with pytest.raises(kvswap.DeviceError):
            transfer.wait(PATIENCE)
    assert transfer.failed_blocks.tolist() == [1] and store.stats()["failed"] == 1
    found = gpu.read()
    for number, slot in ((0, 2), (2, 6), (3, 8)):
        assert (found[slot] == block(number)).all()


@pytest.mark.parametrize("what", ["store", "load"])
def test_a_copy_that_does_not_end_keeps_its_staging(rack: Rack, gpu: Gpu, what: str) -> None:
    rack.node()
    store = rack.store(device=gpu.device, timeout=0.3)
    put(store, range(2))
    with Gate(gpu.device) as gate:
        gate.hold(store._copies)
        transfer = getattr(store, what)(keys(0), gpu.memory, [7])
        with pytest.raises(kvswap.Error, match=r"a copy did not end within 0\.3 seconds"):
            transfer.wait(PATIENCE)
        assert store._staging.count - len(store._staging._free) == 1, "the copy may still use it"
        assert gpu.memory in store._staging._late[0][2], "and the blocks"
        gate.open()
    taken: list[int] = []
    until(lambda: taken.extend(store._staging.take(99999, time.monotonic() + 1)) or len(taken) == store._staging.count)


def test_the_copies_come_after_what_they_are_told(rack: Rack, gpu: Gpu) -> None:
    rack.node()
    store, hasty = rack.store(device=gpu.device, timeout=PATIENCE), rack.store(device=gpu.device, timeout=0.2)
    stream, event = kvswap.Stream(gpu.device), kvswap.Event(gpu.device)
    with Gate(gpu.device) as gate:
        gate.hold(stream)
        source = blocks([50])
        gpu.device.register(source)  # a copy of pageable memory would wait for the stream in the call
        where = [source.ctypes.data], [gpu.memory.ptr]
        late = kvswap.swap_blocks_batch(*where, NBYTES, device=gpu.device, stream=stream)
        event.record(stream)
        transfers = [store.store(keys(50 + i), gpu.memory, [0], after=[each]) for i, each in enumerate((event, late))]
        with pytest.raises(kvswap.Error, match=r"what a copy comes after did not end within 0\.2 seconds"):
            hasty.store(keys(52), gpu.memory, [0], after=[event]).wait(PATIENCE)
        store.store(keys(53), gpu.memory, [1]).wait(PATIENCE)  # holds up nobody
        assert not any(each.done() for each in transfers)
        gate.open()
        for each in transfers:
            each.wait(PATIENCE)
    gpu.device.unregister(source.ctypes.data)
    to = np.zeros((2, NBYTES), np.uint8)
    store.load(keys(50, 51), to, range(2)).wait(PATIENCE)
    assert (to == block(50)).all() and store.contains(keys(52)) == [False]


def test_what_is_queued_after_the_call_is_not_waited_for(rack: Rack, gpu: Gpu) -> None:
    rack.node()
    store = rack.store(device=gpu.device, timeout=2.0)
    stream, before = kvswap.Stream(gpu.device), kvswap.Stream(gpu.device)
    with Gate(gpu.device) as first, Gate(gpu.device) as second:
        first.hold(before)
        gpu.device.set_compute_stream(before)
        transfer = store.store(keys(1), gpu.memory, [1])
        second.hold(stream)  # a step that waits for the transfer, say
        gpu.device.set_compute_stream(stream)
        assert not transfer.done()
        first.open()
        transfer.wait(PATIENCE)
        gpu.device.set_compute_stream(0)


def test_what_comes_after_a_failed_transfer_fails(rack: Rack, gpu: Gpu) -> None:
    rack.node()
    store = rack.store(device=gpu.device)
    with testing.fault(gpu.device, "copy", "fail"):
        failed = kvswap.swap_blocks_batch([gpu.memory.ptr], [gpu.memory.ptr + NBYTES], NBYTES, device=gpu.device)
        with suppress(kvswap.Error):
            failed.wait(PATIENCE)
    with pytest.raises(kvswap.DeviceError):
        store.store(keys(1), gpu.memory, [0], after=[failed]).wait(PATIENCE)
    assert store.contains(keys(1)) == [False] and len(store._staging._free) == store._staging.count


def test_arguments(rack: Rack, gpu: Gpu) -> None:
    rack.node()
    plain, store = rack.store(), rack.store(device=gpu.device)
    with pytest.raises(TypeError, match=r"blocks\[0\] is in GPU memory: that needs RemoteStore\(device=\.\.\.\)"):
        plain.store(keys(0), [SimpleNamespace(__cuda_array_interface__={})])
    with pytest.raises(TypeError, match="after is for a store with a device"):
        plain.store(keys(0), blocks([0]), [0], after=[kvswap.Event(gpu.device)])
    with pytest.raises(TypeError, match=r"after\[1\] is a str"):
        store.load(keys(0), gpu.memory, [0], after=[kvswap.Event(gpu.device), "x"])
    with pytest.raises(IndexError):
        store.load(keys(0), gpu.memory, [SLOTS])
