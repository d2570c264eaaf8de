"""What path burst promises beyond right bytes: a transfer delays no transfer of another lane, a slot's former bytes
never reach a destination, and layers complete one by one."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Buffer, Gate, check_pattern, usable, write_pattern
from transfers import (
    CALLS,
    D2H,
    GUARD,
    H2D,
    MIB,
    TINY,
    Chooser,
    Sides,
    Work,
    carry_out,
    draw,
    finish,
    four_bursts,
    halves,
    lay_out,
    plain,
    tiny_slots,
    view,
)

import kvswap
from kvswap import testing

KIB = 1 << 10


@pytest.fixture(autouse=True)
def _bursts(session_device: kvswap.Device) -> None:
    usable(session_device, "kernel")


@pytest.fixture
def tiny(device: kvswap.Device) -> Iterator[kvswap.Device]:
    """The device under test, with slots so small that small transfers are many bursts."""
    with tiny_slots(device):
        yield device


# -- a transfer holds up no other lane's ------------------------------------------------------------------------------


def held_by_stream(sides: Sides, work: Work, held: kvswap.Stream) -> kvswap.Transfer:
    return sides.swap(work, path="burst", stream=held)


def held_by_after(sides: Sides, work: Work, held: kvswap.Stream) -> kvswap.Transfer:
    return sides.swap(work, path="burst", after=[held])


def held_by_compute(sides: Sides, work: Work, held: kvswap.Stream) -> kvswap.Transfer:
    sides.device.set_compute_stream(held)
    try:
        return sides.swap(work, path="burst")
    finally:
        sides.device.set_compute_stream(0)


def held_by_a_layer(sides: Sides, work: Work, held: kvswap.Stream) -> kvswap.Transfer:
    return sides.move(work, path="burst", after_layers=[None, held])


def held_by_a_transfer(sides: Sides, work: Work, held: kvswap.Stream) -> kvswap.Transfer:
    """The transfer before started; its second layer is what waits."""
    first = sides.move(work, path="dma", after_layers=[None, held])
    return sides.swap(work, path="burst", after=[first])


HELD = (held_by_stream, held_by_after, held_by_compute, held_by_a_layer, held_by_a_transfer)


@pytest.mark.parametrize("how", HELD, ids=lambda how: how.__name__)
def test_a_transfer_that_waits_holds_up_no_other_lane(
    tiny: kvswap.Device, direction: int, how: Callable[..., kvswap.Transfer]
) -> None:
    """Others of its direction, of other streams and priorities, go on, by the spare slots or another way; those of the
    other direction do not notice."""
    room = 40 * MIB
    sides, held = Sides(tiny, room), kvswap.Stream(tiny)
    works = halves(direction, 64 * KIB, 34, number=7, room=room)  # so large that layers go by themselves
    works[-1] = replace(works[-1], direction=1 - direction)
    sides.prepare(room)
    ways: list[dict[str, Any]] = [
        {"stream": kvswap.Stream(tiny)},
        {"priority": "high"},
        {"stream": kvswap.Stream(tiny), "priority": "background"},
        {"stream": kvswap.Stream(tiny)},
        {"priority": "high", "after": [kvswap.Stream(tiny)]},
    ]
    with Gate(tiny) as gate:
        gate.hold(held)
        transfers = [how(sides, works[0], held)]
        for i, options in enumerate(ways):
            transfers.append(sides.swap(works[1 + i], path="burst", **options))
            if i < 2:
                transfers[-1].wait(PATIENCE)
        transfers.append(sides.swap(works[-1], path="burst"))
        for transfer in transfers[1:]:
            transfer.wait(PATIENCE)
        assert not transfers[0].done()
        assert {transfers[i].path for i in (0, 1, 2, 6)} == {"burst"}
        gate.open()
        finish(sides, transfers, works)


def test_when_transfers_that_wait_have_all_slots(tiny: kvswap.Device, direction: int) -> None:
    """Then others take another path; the other direction has slots of its own."""
    sides, held = Sides(tiny, 4 * MIB), kvswap.Stream(tiny)
    works = halves(direction, 8 * KIB, 12, number=6)
    works[4] = replace(works[4], direction=1 - direction)
    sides.prepare(sides.room)
    with Gate(tiny) as gate:
        gate.hold(held)
        transfers = [sides.swap(works[0], path="burst", after=[held])]
        transfers.append(sides.swap(works[1], path="burst", after=[held], stream=kvswap.Stream(tiny)))
        transfers.append(sides.swap(works[2], path="burst", stream=kvswap.Stream(tiny)))
        transfers.append(sides.swap(works[3], path="burst", priority="high"))
        transfers.append(sides.swap(works[4], path="burst"))
        for transfer in transfers[2:]:
            transfer.wait(PATIENCE)
        assert [transfer.done() for transfer in transfers] == [False, False, True, True, True]
        assert [transfer.path for transfer in transfers] == ["burst", "burst", "kernel", "kernel", "burst"]
        gate.open()
        for transfer in transfers[:2]:
            transfer.wait(PATIENCE)
        transfers.append(sides.swap(works[5], path="burst", stream=kvswap.Stream(tiny)))
        finish(sides, transfers, works)
        assert transfers[-1].path == "burst"


def test_a_lane_that_began_and_waits_again(tiny: kvswap.Device, direction: int) -> None:
    """Lanes may wait for the slots of its first transfer, which runs; not for those of its second, which waits."""
    sides, held = Sides(tiny, 4 * MIB), kvswap.Stream(tiny)
    works = halves(direction, 8 * KIB, 20, number=5)
    sides.prepare(sides.room)
    with Gate(tiny) as gate:
        gate.hold(held)
        transfers = [sides.swap(works[0], path="burst"), sides.swap(works[1], path="burst", after=[held])]
        transfers += [sides.swap(work, path="burst", stream=kvswap.Stream(tiny)) for work in works[2:]]
        for transfer in (transfers[0], *transfers[2:]):
            transfer.wait(PATIENCE)
        assert not transfers[1].done()
        gate.open()
        finish(sides, transfers, works)


def test_slots_that_several_lanes_take_in_turn(tiny: kvswap.Device, direction: int) -> None:
    """Each waits for the slots of others that have begun, and is right whatever was in them."""
    sides, choose = Sides(tiny, 8 * MIB), Chooser(random.Random(direction))
    streams = [kvswap.Stream(tiny) for _ in range(5)]
    for turn in range(6):
        works = halves(direction, 4 * KIB + turn, 40, number=16, room=sides.room)
        sides.prepare(sides.room)
        transfers = [
            sides.swap(
                work, path="burst", stream=choose.of(streams), priority=choose.of(("normal", "high", "background"))
            )
            for work in works
        ]
        assert "burst" in {transfer.path for transfer in transfers}
        finish(sides, transfers, works)


# -- priorities -------------------------------------------------------------------------------------------------------


def arrived(sides: Sides, work: Work) -> int:
    """How many blocks of the first tensor are there, by their last bytes."""
    gpu = sides.gpu if work.direction == H2D else sides.gpu_model, work.gpu, work.gpu_ids
    cpu = sides.cpu_model if work.direction == H2D else sides.cpu, work.cpu, work.cpu_ids
    last = work.nbytes[0] - 64
    here, there = (
        view((memory if isinstance(memory, np.ndarray) else memory._view())[last:], side, 0, 64)[ids]
        for memory, side, ids in (gpu, cpu)
    )
    return int((here == there).all(axis=1).sum())


@pytest.mark.not_sanitized("minutes: all interleavings")
def test_high_overtakes_background_in_every_interleaving(direction: int) -> None:
    """Of 64 slots' worth of background that has begun, hardly anything more arrives before all of `high` has."""
    for seed in range(1, 16):
        device = testing.deterministic_device(seed)
        device.set_slots(TINY, 3)
        sides, held = Sides(device, 11 * MIB), kvswap.Stream(device)
        large = plain(32 * KIB, 1, 256, direction)
        small = plain(8 * KIB, 1, 8, direction, begin=10 * MIB)
        sides.prepare(sides.room)
        with Gate(device) as gate:  # or most of it would run inside the call that queues it
            gate.hold(held)
            background = sides.swap(large, path="burst", priority="background", after=[held])
            gate.open()
            while arrived(sides, large) < 4:
                assert testing.step(device) == 1
            before = arrived(sides, large)
            assert before <= 32
            high = sides.swap(small, path="burst", priority="high")
            while arrived(sides, small) < small.count:
                assert testing.step(device) == 1
            assert arrived(sides, large) - before <= 32, "an eighth of all"
            assert (background.path, high.path) == ("burst", "burst")
            finish(sides, [background, high], [large, small])


def test_high_overtakes_background(device: kvswap.Device, direction: int) -> None:
    """The same as it comes: `high` is over before half of 64 slots' worth of background is. How few go before it, the
    test above holds; here threads of a busy machine are held up, for as long as several slots take."""
    slot_nbytes = 4 * MIB if device.kind == "cuda" else MIB
    room = 72 * slot_nbytes
    large = plain(slot_nbytes // 4, 1, 256, direction)
    small = plain(slot_nbytes // 16, 1, 8, direction, begin=room - slot_nbytes)
    sides, shares = Sides(device, room), []
    with tiny_slots(device):
        device.set_slots(slot_nbytes, 3)
        for _ in range(20):
            sides.prepare(room)
            background = sides.swap(large, path="burst", priority="background")
            high = sides.swap(small, path="burst", priority="high")
            late = background.done()  # before anything could overtake it
            finish(sides, [background, high], [large, small])
            if not late:  # by the device's clock, and it would wait for slots after its start
                shares.append(high.elapsed / background.elapsed)
            if len(shares) == 5:
                break
    assert len(shares) == 5 and sorted(shares)[2] < 1 / 2, shares


def test_high_waits_for_no_background(device: kvswap.Device, direction: int) -> None:
    """Where that has all slots, a transfer of more priority takes another path; one of as much waits for slots."""
    nbytes = MIB if device.kind == "cuda" else 256 * KIB
    works = halves(direction, nbytes // 2, 60, number=4, room=300 * nbytes)
    works[2:] = [plain(5000, 1, 8, direction, begin=GUARD + i * 75 * nbytes) for i in (2, 3)]
    sides, seen = Sides(device, 300 * nbytes), 0
    with tiny_slots(device):
        device.set_slots(nbytes, 2)
        for _ in range(20):
            sides.prepare(sides.room)
            ways: list[dict[str, Any]] = [{"priority": "background"}, {"stream": kvswap.Stream(device)}]
            transfers = [
                sides.swap(work, path="burst", **{"priority": "background", **way})
                for work, way in zip(works[:2], ways, strict=True)
            ]
            high = sides.swap(works[2], path="burst", priority="high")
            as_high = sides.swap(works[3], path="burst", priority="background", stream=kvswap.Stream(device))
            busy = not any(transfer.done() for transfer in transfers)
            finish(sides, [*transfers, high, as_high], works)
            if busy and [transfer.path for transfer in transfers] == ["burst", "burst"]:
                assert high.path == "kernel"
                seen += 1
            if seen == 3:
                return
    raise AssertionError("background was over too early")


# -- no stale bytes ---------------------------------------------------------------------------------------------------

OPERATIONS = ("", "copy", "copy_batch", "launch", "event_record", "stream_wait", "event_create", "alloc", "host_alloc")
OPERATIONS += ("stream_create", "stream_info")


def keep_right(sides: Sides, works: list[Work], call: str, direction: int, **fault: Any) -> set[str]:
    """Transfers through the same slots, of which the second has calls refused; now and then one is of another lane.
    What came of the second."""
    device, outcomes = sides.device, set()
    sides.prepare(sides.room)
    options: list[dict[str, Any]] = [{}, {}, {}]
    if sides.turns % 3 == 0:
        options[sides.turns // 3 % 2 + 1] = {"stream": kvswap.Stream(device)}
    transfers: list[kvswap.Transfer | None] = []
    for i, work in enumerate(works):
        try:
            if i == 1:
                with testing.fault(device, "call", "fail", code=33, **fault):
                    transfers.append(CALLS[call](sides, work, path="burst", **options[i % 3]))
            else:
                transfers.append(sides.swap(work, path="burst", **options[i % 3]))
        except kvswap.DeviceError as error:
            assert i == 1 and error.code == 33
            outcomes.add("raised")
            transfers.append(None)
        except kvswap.QueueFull:  # the copies of the second may still run, and nothing could come after them
            device.synchronize(PATIENCE)
            transfers.append(sides.swap(work, path="burst", **options[i % 3]))
    device.synchronize(PATIENCE)
    for transfer, work in zip(transfers, works, strict=True):
        if transfer is None:
            continue
        failed = transfer.failed_positions
        carry_out(work, sides.gpu_model, sides.cpu_model, np.delete(np.arange(work.count), failed))
        sides.forget(work, failed)
        assert transfer.state == ("failed" if failed.size else "done")
        assert failed.size == 0 or transfer is transfers[1]
        if transfer is transfers[1]:
            outcomes.add("lost" if failed.size else "again" if transfer.path != "burst" else "done")
    sides.check(f"{fault} on {device.name}")
    return outcomes


@pytest.mark.not_sanitized("refuses one call after the other, as test_faults does")
@pytest.mark.parametrize(("call", "kind"), [("swap", "threads"), ("batch", "seeds")])
def test_no_stale_bytes_whatever_is_refused(tiny: kvswap.Device, direction: int, call: str, kind: str) -> None:
    """Every byte of a slot was something else's before."""
    outcomes: set[str] = set()
    works = [plain(2 * KIB, 1, 150, direction, begin=GUARD + i * 320 * KIB, seed=i) for i in range(3)]
    sides, seeds = Sides(tiny, MIB), iter(range(1, 10000))
    for operation in OPERATIONS:
        for nth in range(1, 60 if operation == "" else 12):
            for every in (0, 1) if nth % 3 == 0 else (0,):
                if kind == "seeds":
                    device = testing.deterministic_device(next(seeds))
                    device.set_slots(TINY, 2)
                    sides = Sides(device, MIB)
                outcomes |= keep_right(sides, works, call, direction, operation=operation, nth=nth, every=every)
    assert outcomes == {"raised", "again", "lost", "done"}


@pytest.mark.parametrize("call", ["swap", "batch"])
def test_a_transfer_that_runs_ahead_and_is_refused(tiny: kvswap.Device, direction: int, call: str) -> None:
    """Several of one lane are on their way, each with its first stage ahead of the copies of the one before."""
    sides = Sides(tiny, 3 * MIB)
    for nth in range(1, 70):
        works = [plain(4 * KIB, 1, 70, direction, begin=GUARD + i * MIB // 2, seed=nth + i) for i in range(5)]
        keep_right(sides, works, call, direction, operation="", nth=nth)


def test_slots_that_a_refused_transfer_may_still_use(tiny: kvswap.Device, direction: int) -> None:
    """What was queued of it waits at a gate: until that is over its slots serve no other lane."""
    sides, held, outcomes = Sides(tiny, 2 * MIB), kvswap.Stream(tiny), set()
    streams = [kvswap.Stream(tiny) for _ in range(3)]
    for nth in range(1, 60):
        works = halves(direction, 2 * KIB, 80, number=3, room=sides.room)
        sides.prepare(sides.room)
        with Gate(tiny) as gate:
            gate.hold(held)
            transfers = [sides.swap(works[0], path="burst", after=[held], stream=streams[0])]
            try:
                with testing.fault(tiny, "call", "fail", nth=nth, code=33):
                    transfers.append(sides.swap(works[1], path="burst", after=[held], stream=streams[1]))
            except kvswap.DeviceError:
                del works[1]
            transfers.append(sides.swap(works[-1], path="burst", stream=streams[2]))
            transfers[-1].wait(PATIENCE)
            assert len(works) == 2 or transfers[-1].path == "kernel", f"call {nth}"
            outcomes.add(transfers[-2].path if len(works) == 3 else "raised")
            gate.open()
            tiny.synchronize(PATIENCE)
        for transfer, work in zip(transfers, works, strict=True):
            carry_out(
                work, sides.gpu_model, sides.cpu_model, np.delete(np.arange(work.count), transfer.failed_positions)
            )
            sides.forget(work, transfer.failed_positions)
        sides.check(f"call {nth}")
    assert outcomes == {"raised", "dma", "burst"}


@pytest.mark.parametrize("what", ["nothing", "lost"])
def test_a_transfer_that_moves_nothing_ends_after_what_it_waits_for(
    tiny: kvswap.Device, direction: int, what: str
) -> None:
    """It was given no blocks, or their sources are lost; and its layers' events come no sooner."""
    count, nbytes, held = 80, 4 * KIB, kvswap.Stream(tiny)
    buffers = [Buffer(tiny, count * nbytes, kind) for kind in ("gpu", "cpu", "cpu" if direction == H2D else "gpu")]
    gpu, cpu, other = (kvswap.Pool(tiny, buffer.ptr, count, nbytes) for buffer in buffers)
    src, dst = (gpu, cpu) if direction == D2H else (cpu, gpu)
    ids = np.arange(0 if what == "nothing" else count)
    if what == "lost":
        with testing.fault(tiny, "copy", "fail", every=1, code=33):
            lost = kvswap.move_blocks([other], [src], ids, ids, path="dma")
        tiny.synchronize(PATIENCE)
        assert lost.failed_positions.size == count
    for options in ({"after": [held]}, {"after_layers": [held], "layer_events": True}):
        with Gate(tiny) as gate:
            gate.hold(held)
            transfer = kvswap.move_blocks([src], [dst], ids, ids, path="burst", **options)
            time.sleep(0.02)
            assert not transfer.done()
            if "layer_events" in options and what == "nothing":
                assert not transfer.layer_done(0)
            gate.open()
            tiny.synchronize(PATIENCE)
            assert transfer.done() and transfer.failed_positions.size == ids.size
            assert transfer.path == "burst"


@pytest.mark.parametrize("operation", ["stream_info", "event_record", "stream_wait"])
def test_a_refused_layer_leaves_no_way_past_what_the_transfer_waits_for(
    tiny: kvswap.Device, direction: int, operation: str
) -> None:
    """An earlier transfer of the same blocks waits at a gate, and a second one fails at its first layer. A third one
    that waits only for the second still starts after the first."""
    count, nbytes, held, other = 80, 4 * KIB, kvswap.Stream(tiny), kvswap.Stream(tiny)
    kinds = ("gpu", "cpu") if direction == H2D else ("cpu", "gpu")
    buffers = [Buffer(tiny, count * nbytes, kind) for kind in (kinds[0], *(kinds[1],) * 3)]
    middle, first, second, third = (kvswap.Pool(tiny, buffer.ptr, count, nbytes) for buffer in buffers)
    ids, outcomes = np.arange(count), set()
    for nth in range(1, 6):
        for i, buffer in enumerate(buffers):
            buffer.put(np.full(count * nbytes, i + 1, np.uint8))
        with Gate(tiny) as gate:
            gate.hold(held)
            kvswap.move_blocks([middle], [first], ids, ids, path="dma", stream=held)
            try:
                with testing.fault(tiny, "call", "fail", operation=operation, nth=nth, code=33):
                    failed = kvswap.move_blocks([second], [middle], ids, ids, path="burst", after_layers=[other])
            except kvswap.DeviceError:
                continue
            last = kvswap.move_blocks([third], [middle], ids, ids, path="dma", stream=kvswap.Stream(tiny))
            time.sleep(0.02)
            assert not failed.done() and not last.done(), nth
            gate.open()
            tiny.synchronize(PATIENCE)
        assert (buffers[1].get(count * nbytes) == 1).all(), nth
        assert (buffers[0].get(count * nbytes) == 4).all(), nth
        outcomes.add(failed.state)
    assert "failed" in outcomes


@pytest.mark.parametrize("layered", [False, True])
def test_a_device_that_is_lost_in_the_middle(direction: int, layered: bool) -> None:
    """At each call: what was done before is right, all else fails and says so, and nothing waits for anything."""
    options: dict[str, Any] = {"layer_events": True} if layered else {}
    lost = 0
    for nth in range(1, 80):
        device = testing.deterministic_device(nth)
        device.set_slots(TINY, 2)
        sides, works = Sides(device, MIB), halves(direction, 2 * KIB, 60, room=MIB)
        sides.prepare(MIB)
        transfers = [sides.move(works[0], path="burst", **options)]
        with suppress(kvswap.DeviceError), testing.fault(device, "call", "lose", nth=nth, code=719):
            transfers.append(sides.move(works[1], path="burst", **options))
        if not device.lost:
            finish(sides, transfers, works)
            continue
        lost += 1
        for transfer in transfers:
            assert transfer.done()
            if transfer.state == "failed":
                assert transfer.failed_positions.size == 60
                with pytest.raises(kvswap.DeviceError, match="719"):
                    transfer.wait(0)
        with pytest.raises(kvswap.DeviceError, match="719"):
            sides.swap(works[0], path="burst")
        with pytest.raises(kvswap.DeviceError, match="719"):
            device.set_slots(0)
    assert 20 < lost < 79


# -- many of one lane -------------------------------------------------------------------------------------------------


def send_many(device: kvswap.Device, seed: int, direction: int, many: int = 24) -> None:
    """Without a stream, so all of one lane, one after the other, of any shape; what they were told is overwritten at
    once. Some write where the one before wrote."""
    part = 192 * KIB
    sides, choose = Sides(device, many * part), Chooser(random.Random(seed))
    sides.prepare(sides.room)
    transfers, works = [], []
    for i in range(many):
        work = draw(choose, (i + 1) * part, 300, direction, begin=i * part + GUARD)
        assert max(work.gpu.end, work.cpu.end) <= (i + 1) * part
        calls = choose.of((("move",), ("swap",), ("batch",), ("swap", "batch"), ("batch", "swap")))
        for again in range(len(calls)):
            ids = {"gpu_ids" if direction == D2H else "cpu_ids": np.roll(work.gpu_ids, again)}
            works.append(replace(work, **ids) if again and work.gpu.blocks == work.cpu.blocks else work)
            path = choose.of(("burst",) * 6 + ("kernel", "dma", "strided"))
            transfers.append(CALLS[calls[again]](sides, works[-1], path=path))
    finish(sides, transfers, works, f"seed {seed} on {device.name}")


def test_many_transfers_of_one_lane(tiny: kvswap.Device, direction: int) -> None:
    for seed in range(8):
        send_many(tiny, seed, direction)


@pytest.mark.not_sanitized("minutes: all interleavings")
def test_many_transfers_of_one_lane_in_every_interleaving(direction: int) -> None:
    for seed in range(1, 31):
        device = testing.deterministic_device(seed)
        device.set_slots(TINY, 2 + seed % 3)
        send_many(device, seed, direction, 12)


def store_late(device: kvswap.Device, direction: int, ordinary: bool) -> None:
    """Over and over the same blocks are written late, moved and looked at where they go; by bursts and by the copy
    engine, all of one lane. No call waits for anything."""
    sides, work, stream = Sides(device, MIB), four_bursts(direction), kvswap.Stream(device)
    if ordinary:  # memory that may be the other side of another transfer of the lane
        sides.gpu, sides.cpu = Buffer(device, MIB, "plain"), Buffer(device, MIB, "plain")
    keys, nbytes, jobs = np.arange(work.count), work.nbytes[0], []
    source, target = (tensor_pointers(sides, work, 0, first) for first in (True, False))
    for i, path in enumerate(("burst", "dma", "burst", "burst", "dma", "burst")):
        testing.delay(device, 0.001, stream)
        jobs.append(write_pattern(device, source, nbytes, keys + 1000 * i, stream))
        transfer = sides.swap(work, path=path, after=[stream])
        assert transfer.path == path
        transfer.make_wait(stream)
        jobs.append(check_pattern(device, target, nbytes, keys + 1000 * i, stream))
    assert [job.result(PATIENCE)[0] for job in jobs] == [0] * len(jobs)


@pytest.mark.parametrize("ordinary", [False, True])
def test_late_producers_of_one_lane(tiny: kvswap.Device, direction: int, ordinary: bool) -> None:
    if ordinary and tiny.kind == "cuda":
        pytest.skip("kernels do not reach ordinary memory")
    store_late(tiny, direction, ordinary)
    for seed in range(1, 31):
        device = testing.deterministic_device(seed)
        device.set_slots(TINY, 2)
        store_late(device, direction, ordinary)


def test_a_lane_waits_once_for_another(direction: int) -> None:
    """What a lane's copies waited for, its bursts need not wait for again: their first stage comes after the copies."""
    for seed in range(1, 41):
        device = testing.deterministic_device(seed)
        device.set_slots(TINY, 2)
        count, nbytes, held = 120, 4 * KIB, kvswap.Stream(device)
        sides = [Buffer(device, count * nbytes, side) for side in ("cpu", "gpu", "cpu")]
        if direction == H2D:
            sides = [Buffer(device, count * nbytes, side) for side in ("gpu", "cpu", "gpu")]
        wanted = sides[0].randomise(seed)
        first, middle, last = (kvswap.Pool(device, side.ptr, count, nbytes) for side in sides)
        ids = np.random.default_rng(seed).permutation(count)
        few, many = ids[:8], ids[8:]
        testing.delay(device, 0.002, held)
        transfers = [kvswap.move_blocks(first, middle, ids, ids, path="dma", stream=held)]
        for path, some in (("dma", few), ("burst", many)) if seed % 2 else (("burst", many), ("dma", few)):
            transfers.append(kvswap.move_blocks(middle, last, some, some, path=path))
            assert transfers[-1].path == path
        for transfer in transfers:
            transfer.wait(PATIENCE)
        np.testing.assert_array_equal(sides[2].get(), wanted)


# -- layers -----------------------------------------------------------------------------------------------------------


def layers_of(sizes: tuple[int, ...], count: int, direction: int) -> Work:
    rng = np.random.default_rng(count)
    sides = lay_out(sizes, count + 3, GUARD, 0, False), lay_out(sizes, count + 2, GUARD, 0, True)
    return Work(sizes, *sides, rng.permutation(count + 3)[:count], rng.permutation(count + 2)[:count], direction)


SMALL = (700, 20, 4096, 333, 16)
LARGE = (70 * KIB, 100 * KIB, 64 * KIB, 128 * KIB, 50001, 90 * KIB, 128 * KIB, 60 * KIB)  # several groups of layers


def tensor_pointers(sides: Sides, work: Work, tensor: int, source: bool) -> Any:
    load = work.direction == H2D
    gpu = load != source
    buffer, side, ids = (sides.gpu, work.gpu, work.gpu_ids) if gpu else (sides.cpu, work.cpu, work.cpu_ids)
    return buffer.ptr + side.begins[tensor] + ids * side.strides[tensor]


def fill_sources(sides: Sides, work: Work) -> None:
    """Of tensor t, block i: the pattern of key 1000 * t + i."""
    sides.prepare(max(work.gpu.end, work.cpu.end))
    stream = kvswap.Stream(sides.device)
    for tensor, nbytes in enumerate(work.nbytes):
        keys = 1000 * tensor + np.arange(work.count)
        where = tensor_pointers(sides, work, tensor, True)
        write_pattern(sides.device, where, nbytes, keys, stream).result(PATIENCE)
    sides.gpu_model, sides.cpu_model = sides.gpu.get(sides.end), sides.cpu.get(sides.end)


def check_layers(sides: Sides, work: Work, transfer: kvswap.Transfer) -> list[Any]:
    """For each layer a look at where it goes, by a stream that waits for that layer alone."""
    jobs = []
    for tensor, nbytes in enumerate(work.nbytes):
        stream = kvswap.Stream(sides.device)
        transfer.make_wait_layer(tensor, stream)
        where = tensor_pointers(sides, work, tensor, False)
        jobs.append(check_pattern(sides.device, where, nbytes, 1000 * tensor + np.arange(work.count), stream))
    return jobs


def go_by_layers(device: kvswap.Device, work: Work, **options: Any) -> kvswap.Transfer:
    sides = Sides(device, max(work.gpu.end, work.cpu.end))
    fill_sources(sides, work)
    transfer = sides.move(work, path="burst", layer_events=True, **options)
    jobs = check_layers(sides, work, transfer)
    assert [job.result(PATIENCE)[0] for job in jobs] == [0] * len(jobs), "a layer's event came before its bytes"
    finish(sides, [transfer], [work])
    assert transfer.path == "burst" and transfer.num_layers == len(work.nbytes)
    return transfer


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
def test_a_layer_is_there_when_its_event_is_reached(device: kvswap.Device, direction: int, sizes: Any) -> None:
    with tiny_slots(device):
        device.set_slots(512 * KIB, 2)
        for count in (1, 30):
            go_by_layers(device, layers_of(sizes, count, direction))
            go_by_layers(device, layers_of(sizes, count, direction), stream=kvswap.Stream(device))


@pytest.mark.not_sanitized("minutes: all interleavings")
@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
def test_layers_in_every_interleaving(direction: int, sizes: tuple[int, ...]) -> None:
    for seed in range(1, 31 if sizes is SMALL else 6):
        device = testing.deterministic_device(seed)
        device.set_slots(512 * KIB if sizes is LARGE else TINY, 2)
        late = [kvswap.Stream(device) for _ in sizes]
        for i, stream in enumerate(late):
            testing.delay(device, 0.001 * (i * seed % 5), stream)
        go_by_layers(device, layers_of(sizes, 24, direction), after_layers=late)


def test_layers_in_parts_of_blocks(tiny: kvswap.Device, direction: int) -> None:
    """Of one pool: a layer is some rows of each block."""
    parts = [(0, 0, 0, 3, 100, 200), (0, 1, 517, 1, 17, 0), (0, 1, 700, 1, 1000, 0), (0, 2, 1800, 2, 90, 100)]
    sides, work = Sides(tiny, 2 * MIB), plain(2000, 1, 300, direction)
    for after in (None, [kvswap.Stream(tiny), None, kvswap.Stream(tiny)]):
        sides.prepare(max(work.gpu.end, work.cpu.end))
        transfer = sides.move(work, path="burst", parts=np.array(parts), layer_events=True, after_layers=after)
        streams = [kvswap.Stream(tiny) for _ in range(3)]
        for layer, stream in enumerate(streams):
            transfer.make_wait_layer(layer, stream)
            stream.synchronize(PATIENCE)
            for _, _, offset, rows, nbytes, pitch in (part for part in parts if part[1] == layer):
                for row in range(rows):
                    at = offset + row * pitch
                    models = (sides.gpu_model, work.gpu), (sides.cpu_model, work.cpu)
                    here, there = (view(model[at:], side, 0, nbytes) for model, side in models)
                    if direction == H2D:
                        here[work.gpu_ids] = there[work.cpu_ids]
                    else:
                        there[work.cpu_ids] = here[work.gpu_ids]
        transfer.wait(PATIENCE)
        sides.check()
        assert transfer.path == "burst"


def test_a_layer_that_waits_holds_up_those_before_it_no_more_than_its_group(
    device: kvswap.Device, direction: int
) -> None:
    work, held = layers_of(LARGE, 30, direction), kvswap.Stream(device)
    sides = Sides(device, max(work.gpu.end, work.cpu.end))
    with tiny_slots(device):
        device.set_slots(512 * KIB, 2)
        fill_sources(sides, work)
        with Gate(device) as gate:
            gate.hold(held)
            after = [None] * 6 + [held, None]
            transfer = sides.move(work, path="burst", layer_events=True, after_layers=after)
            end = time.monotonic() + PATIENCE
            while not all(transfer.layer_done(layer) for layer in range(4)) and time.monotonic() < end:
                time.sleep(0.001)
            assert [transfer.layer_done(layer) for layer in (0, 1, 2, 3, 6, 7)] == [True] * 4 + [False] * 2
            before = [check_pattern_of(sides, work, tensor) for tensor in range(4)]
            assert [job.result(PATIENCE)[0] for job in before] == [0] * 4
            gate.open()
            jobs = check_layers(sides, work, transfer)
            assert [job.result(PATIENCE)[0] for job in jobs] == [0] * 8
            finish(sides, [transfer], [work])
        assert transfer.path == "burst"


def check_pattern_of(sides: Sides, work: Work, tensor: int) -> Any:
    """What a layer's destination holds now."""
    keys, stream = 1000 * tensor + np.arange(work.count), kvswap.Stream(sides.device)
    return check_pattern(sides.device, tensor_pointers(sides, work, tensor, False), work.nbytes[tensor], keys, stream)


@pytest.mark.not_sanitized("refuses one call after the other, as test_faults does")
@pytest.mark.parametrize("sizes", [SMALL, LARGE[2:]], ids=["one group", "groups"])
def test_a_call_of_a_layer_is_refused(
    request: pytest.FixtureRequest, device: kvswap.Device, direction: int, sizes: tuple[int, ...]
) -> None:
    """Each in turn; of many, under compute-sanitizer, each fifth. The layers' events are reached all the same, and
    where the transfer did not fail, with bytes."""
    work, outcomes = layers_of(sizes, 20, direction), set()
    sides = Sides(device, max(work.gpu.end, work.cpu.end))
    with tiny_slots(device):
        device.set_slots(256 * KIB if sizes is not SMALL else TINY, 2)
        every_fifth = request.config.getoption("--serial") and sizes is not SMALL
        for nth in range(1, 60 if sizes is SMALL else 150, 5 if every_fifth else 1):
            fill_sources(sides, work)
            try:
                with testing.fault(device, "call", "fail", nth=nth, every=int(nth % 3 == 0), code=33):
                    transfer = sides.move(work, path="burst", layer_events=True)
            except kvswap.DeviceError as error:
                assert error.code == 33
                device.synchronize(PATIENCE)
                sides.check("raised")
                outcomes.add("raised")
                continue
            jobs = []
            with suppress(kvswap.DeviceError):  # it is known by now that it fails
                jobs = check_layers(sides, work, transfer)
            device.synchronize(PATIENCE)
            failed = transfer.failed_positions
            if jobs:
                assert failed.size == 0 and [job.result(PATIENCE)[0] for job in jobs] == [0] * len(jobs), nth
            carry_out(work, sides.gpu_model, sides.cpu_model, np.delete(np.arange(work.count), failed))
            sides.forget(work, failed)
            sides.check(f"call {nth}")
            outcomes.add("lost" if failed.size else "again" if transfer.path == "dma" else "done")
    assert outcomes == {"raised", "lost", "again", "done"}
