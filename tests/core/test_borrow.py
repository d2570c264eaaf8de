"""Path borrow: transfers that go over another device's link too. host:0 and host:210, or two GPUs."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import AT_ONCE, PATIENCE, Buffer, Gate, run_python, second_device, sums, until, usable
from transfers import (
    CALLS,
    D2H,
    H2D,
    MIB,
    TINY,
    Chooser,
    Sides,
    carry_out,
    draw,
    finish,
    halves,
    plain,
    tiny_slots,
)

import kvswap
from kvswap import testing
from kvswap.codecs import Coding

KIB = 1 << 10


def lent_bytes(device: kvswap.Device) -> tuple[int, int]:
    stats = device.stats()
    return stats["lent_bytes_d2h"], stats["lent_bytes_h2d"]


def moved_by(device: kvswap.Device, before: tuple[int, int], direction: int) -> int:
    return lent_bytes(device)[direction] - before[direction]


@pytest.fixture(scope="module")
def lender(session_device: kvswap.Device) -> kvswap.Device:
    usable(session_device, "kernel")
    return second_device(session_device, "host:210")


@pytest.fixture
def lent(device: kvswap.Device, lender: kvswap.Device) -> Iterator[kvswap.Device]:
    """The lender; its pieces, and the slots of bursts, are so small that small transfers are many."""
    with tiny_slots(device):
        lender.lend(device, TINY, 2, timeout=PATIENCE)
        yield lender
        lender.lend(device, 0, timeout=PATIENCE)


# -- right bytes, in the right order ----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("seed", range(12))
def test_any_transfer(device: kvswap.Device, lent: kvswap.Device, call: str, seed: int) -> None:
    """Every byte of both sides, by rows, lists and pools, whatever the sizes and the gaps between blocks."""
    sides, choose = Sides(device, 6 * MIB), Chooser(random.Random(seed))
    before = lent_bytes(lent)
    for _ in range(8):
        sides.run(draw(choose, sides.room), call, path="borrow")
    sides.run(plain(5000, 3, 90, seed % 2, together=seed % 3 == 0), call, path="borrow")
    assert lent_bytes(lent) > before


@pytest.mark.parametrize("together", [False, True])
def test_half_of_the_bytes_go_over_the_other_link(
    device: kvswap.Device, lent: kvswap.Device, direction: int, together: bool
) -> None:
    work, sides = plain(16 * KIB, 4, 100, direction, together=together), Sides(device, 8 * MIB)
    before, stats = lent_bytes(lent), device.stats()
    transfer = sides.run(work, path="borrow")
    assert transfer.path == "borrow"
    assert moved_by(lent, before, direction) == pytest.approx(transfer.nbytes / 2, rel=0.1)
    name: Any = ("borrowed_bytes_d2h", "borrowed_bytes_h2d")[direction]
    assert device.stats()[name] - stats[name] == moved_by(lent, before, direction)
    assert moved_by(lent, before, 1 - direction) == 0
    before = lent_bytes(lent)
    layered = sides.run(work, path="borrow", layer_events=True)
    assert moved_by(lent, before, direction) == pytest.approx(layered.nbytes / 2, rel=0.2)
    assert device.stats()["second_attempts"] == stats["second_attempts"]


@pytest.mark.parametrize("share", [0.25, 3])
def test_a_share(device: kvswap.Device, lent: kvswap.Device, direction: int, share: float) -> None:
    lent.lend(device, TINY, 3, share=share, timeout=PATIENCE)
    assert device.info["lenders"] == {lent.name: {"slot_nbytes": TINY, "count": 3, "share": share}}
    before = lent_bytes(lent)
    transfer = Sides(device, 16 * MIB).run(plain(16 * KIB, 4, 200, direction), path="borrow")
    assert moved_by(lent, before, direction) == pytest.approx(transfer.nbytes * share / (1 + share), rel=0.1)


def test_several_lenders(device: kvswap.Device, lent: kvswap.Device, direction: int) -> None:
    if device.kind == "cuda":
        pytest.skip("needs three GPUs")
    third = kvswap.Device("host:211")
    third.lend(device, 2 * TINY, 2, timeout=PATIENCE)
    try:
        before = lent_bytes(lent), lent_bytes(third)
        transfer = Sides(device, 16 * MIB).run(plain(16 * KIB, 4, 200, direction), path="borrow")
        for other, counted in zip((lent, third), before, strict=True):
            assert moved_by(other, counted, direction) == pytest.approx(transfer.nbytes / 3, rel=0.1)
    finally:
        third.lend(device, 0, timeout=PATIENCE)
    assert list(device.info["lenders"]) == [lent.name]


def test_transfers_that_follow_each_other(device: kvswap.Device, lent: kvswap.Device) -> None:
    """In one lane and in several, over the same blocks and over others; each sees what those before it left."""
    sides, choose = Sides(device, 4 * MIB), Chooser(random.Random(5))
    streams = [None, kvswap.Stream(device), kvswap.Stream(device)]
    for turn in range(8):
        works = [draw(choose, sides.room) for _ in range(6)]
        sides.prepare(sides.room)
        transfers: list[kvswap.Transfer] = []
        for i, work in enumerate(works):
            options = {} if (i + turn) % 2 else {"stream": choose.of(streams[1:])}
            path = choose.of(("borrow", "borrow", "burst", "dma"))
            transfers.append(sides.swap(work, path=path, after=transfers[-1:], **options))
        finish(sides, transfers, works)


def test_pieces_count_until_their_transfer_has_ended(
    device: kvswap.Device, lent: kvswap.Device, direction: int
) -> None:
    """160 pieces are queued on a link at most. It lends again when one transfer has ended, though another has not."""
    lent.lend(device, TINY, 2, share=10, timeout=PATIENCE)
    works = halves(direction, 16 * KIB, 400, number=3, room=(room := 64 * MIB))
    sides = Sides(device, room)
    sides.prepare(room)
    with Gate(device) as gate, Gate(device) as later:
        for each, held in ((gate, first := kvswap.Stream(device)), (later, second := kvswap.Stream(device))):
            each.hold(held)
        before = lent_bytes(lent)
        transfers = [sides.swap(works[0], path="borrow", after=[first])]
        transfers.append(sides.swap(works[1], path="borrow", after=[second]))
        assert moved_by(lent, before, direction) == pytest.approx(160 * TINY, rel=0.05)
        gate.open()
        transfers[0].wait(PATIENCE)
        before = lent_bytes(lent)
        transfers.append(sides.swap(works[2], path="borrow"))
        assert moved_by(lent, before, direction) > 40 * TINY
        later.open()
        finish(sides, transfers, works)


@pytest.mark.parametrize("how", ["stream", "after", "layers"])
def test_nothing_moves_before_its_start(device: kvswap.Device, lent: kvswap.Device, direction: int, how: str) -> None:
    """A transfer's start dependency delays its pieces on the lent link, too, and delays no other transfer."""
    sides, held = Sides(device, 8 * MIB), kvswap.Stream(device)
    works = halves(direction, 16 * KIB, 60, number=3, room=sides.room)
    sides.prepare(sides.room)
    with Gate(device) as gate:
        gate.hold(held)
        if how == "layers":
            first = sides.move(works[0], path="borrow", after_layers=[held, None])
        else:
            first = sides.swap(works[0], path="borrow", **{how: held if how == "stream" else [held]})
        other = sides.swap(works[1], path="borrow", stream=kvswap.Stream(device))
        back = sides.swap(replace(works[2], direction=1 - direction), path="borrow")
        for transfer in (other, back):
            transfer.wait(PATIENCE)
        assert not first.done() and first.path == "borrow"
        carry_out(works[1], sides.gpu_model, sides.cpu_model)
        carry_out(replace(works[2], direction=1 - direction), sides.gpu_model, sides.cpu_model)
        sides.check("before the gate opens")
        gate.open()
        first.wait(PATIENCE)
        carry_out(works[0], sides.gpu_model, sides.cpu_model)
        sides.check("afterwards")


def test_a_link_that_carries_nothing_holds_up_nobody(
    device: kvswap.Device, lent: kvswap.Device, direction: int
) -> None:
    """A small transfer that waits goes by its own link alone: another lane's does not stand behind it."""
    sides, held = Sides(device, 8 * MIB), kvswap.Stream(device)
    small, large = plain(4 * KIB, 1, 4, direction), plain(16 * KIB, 2, 80, direction, begin=4 * MIB)
    sides.prepare(sides.room)
    with Gate(device) as gate:
        gate.hold(held)
        before = lent_bytes(lent)
        first = sides.swap(small, path="borrow", stream=held)
        assert lent_bytes(lent) == before
        second = sides.swap(large, path="borrow", stream=kvswap.Stream(device))
        second.wait(PATIENCE)
        assert moved_by(lent, before, direction) > 0 and not first.done()
        gate.open()
        finish(sides, [first, second], [small, large])


def test_a_stream_waits_for_lent_pieces(device: kvswap.Device, lent: kvswap.Device) -> None:
    """Work that follows on the caller's stream finds all blocks."""
    sides, stream = Sides(device, 8 * MIB), kvswap.Stream(device)
    work = plain(16 * KIB, 4, 100, H2D)
    copy = Buffer(device, sides.room, "cpu")
    for _ in range(10):
        sides.prepare(sides.room)
        transfer = sides.swap(work, path="borrow", stream=stream)
        kvswap.swap_blocks_batch([sides.gpu.ptr], [copy.ptr], sides.room, device=device, stream=stream).wait(PATIENCE)
        carry_out(work, sides.gpu_model, sides.cpu_model)
        assert copy.holds(sides.gpu_model)
        transfer.wait(PATIENCE)


def test_layers_arrive_one_by_one(device: kvswap.Device, lent: kvswap.Device, direction: int) -> None:
    """A layer's event comes after its lent pieces."""
    layers, count, nbytes = 12, 40, 16 * KIB
    sides = Sides(device, 12 * MIB)
    work = plain(nbytes, layers, count, direction, together=False)
    side, target = (work.cpu, sides.cpu) if direction == D2H else (work.gpu, sides.gpu)
    ids = work.cpu_ids if direction == D2H else work.gpu_ids
    seen = Buffer(device, layers * count * nbytes, "cpu")
    sides.prepare(sides.room)
    transfer = sides.swap(work, path="borrow", layer_events=True)
    assert transfer.path == "borrow"
    stream = kvswap.Stream(device)
    for layer in range(layers):
        transfer.make_wait_layer(layer, stream)
        src = [target.ptr + side.begins[layer] + int(i) * side.strides[layer] for i in ids]
        dst = [seen.ptr + (layer * count + i) * nbytes for i in range(count)]
        kvswap.swap_blocks_batch(src, dst, nbytes, device=device, stream=stream)
    stream.synchronize(PATIENCE)
    transfer.wait(PATIENCE)
    carry_out(work, sides.gpu_model, sides.cpu_model)
    sides.check()
    model = sides.cpu_model if direction == D2H else sides.gpu_model
    for layer in range(layers):
        for i, block in enumerate(ids):
            at = side.begins[layer] + int(block) * side.strides[layer]
            there = seen.get().reshape(layers, count, nbytes)[layer, i]
            assert (there == model[at : at + nbytes]).all(), (layer, i)


def test_coded_blocks(device: kvswap.Device, lent: kvswap.Device) -> None:
    """Pieces are coded as bursts are: the lender's link carries coded bytes."""
    rng = np.random.default_rng(3)
    values = rng.standard_normal((40, 32 * KIB), np.float32).view(np.uint32)
    gpu = Buffer(device, 40 * 64 * KIB)
    blocks = (values >> 16).astype(np.uint16)
    gpu.put(blocks.view(np.uint8).ravel())
    coding = Coding(64 * KIB, "exact")
    host = Buffer(device, 50 * coding.coded_nbytes, "cpu")
    cache = kvswap.Pool(device, gpu.memory, 40, 64 * KIB)
    pool = kvswap.Pool(device, host.memory, 50, coding.coded_nbytes, coding=coding)
    ids, slots = rng.permutation(40)[:30], rng.permutation(50)[:30]
    before = lent_bytes(lent)
    transfer = kvswap.move_blocks(cache, pool, ids, slots, path="borrow")
    transfer.wait(PATIENCE)
    assert transfer.path == "borrow" and 0 < moved_by(lent, before, D2H) < 30 * coding.coded_nbytes
    coded, _ = coding.encode(blocks.view(np.uint8).reshape(40, -1)[ids])
    assert (host.get().reshape(50, -1)[slots] == coded).all()
    gpu.put(np.zeros(gpu.nbytes, np.uint8))
    kvswap.move_blocks(pool, cache, slots, ids, path="borrow").wait(PATIENCE)
    assert moved_by(lent, before, H2D) > 0
    assert (gpu.get().reshape(40, -1)[ids] == blocks.view(np.uint8).reshape(40, -1)[ids]).all()


# -- lenders come first -----------------------------------------------------------------------------------------------


def test_a_lender_that_copies_itself_lends_nothing(device: kvswap.Device, lent: kvswap.Device, direction: int) -> None:
    """In the direction in which it does, and nothing for stores while it loads; path borrow is then a burst."""
    sides, theirs, held = Sides(device, 4 * MIB), Sides(lent, MIB), kvswap.Stream(lent)
    work = plain(16 * KIB, 2, 80, direction)
    theirs.prepare(MIB)
    own = plain(1000, 1, 20, direction)
    with Gate(lent) as gate:
        gate.hold(held)
        waiting = theirs.swap(own, stream=held)
        before = lent_bytes(lent)
        assert sides.run(work, path="borrow").path == "burst"
        assert lent_bytes(lent) == before
        opposite = sides.run(replace(work, direction=1 - direction), path="borrow")
        assert opposite.path == ("borrow" if direction == D2H else "burst")
        gate.open()
        finish(theirs, [waiting], [own])
    assert sides.run(work, path="borrow").path == "borrow"


def test_a_link_serves_one_lane_that_waits(device: kvswap.Device, lent: kvswap.Device, direction: int) -> None:
    """Others do not stand behind it: they go by the device's own link."""
    sides, held = Sides(device, 8 * MIB), kvswap.Stream(device)
    works = halves(direction, 16 * KIB, 60, number=3, room=sides.room)
    sides.prepare(sides.room)
    with Gate(device) as gate:
        gate.hold(held)
        transfers = [sides.swap(works[0], path="borrow", stream=held)]
        transfers.append(sides.swap(works[1], path="borrow", stream=held))  # in that lane's own turn
        transfers.append(sides.swap(works[2], path="borrow"))
        transfers[2].wait(PATIENCE)
        assert [transfer.path for transfer in transfers] == ["borrow", "borrow", "burst"]
        gate.open()
        finish(sides, transfers, works)


# -- the host's sum ---------------------------------------------------------------------------------------------------


def test_no_more_is_borrowed_than_the_host_reaches(device: kvswap.Device, lent: kvswap.Device, direction: int) -> None:
    work, sides = plain(16 * KIB, 4, 200, direction), Sides(device, 16 * MIB)
    name = ("d2h", "h2d")[direction]
    for reached, path, share in ((2.5, "borrow", 1), (1.5, "borrow", 0.5), (1.05, "burst", 0), (0.9, "burst", 0)):
        before = lent_bytes(lent)
        with sums(device, **{name: reached}):
            transfer = sides.run(work, path="borrow")
        assert transfer.path == path, reached
        assert moved_by(lent, before, direction) == pytest.approx(transfer.nbytes * share / (1 + share), rel=0.1)


def test_links_of_other_devices_count(device: kvswap.Device, lent: kvswap.Device, direction: int) -> None:
    """While a third device loads. Stores borrow nothing then, where both directions are the limit."""
    if device.kind == "cuda":
        pytest.skip("needs three GPUs")
    third = kvswap.Device("host:211")
    work, sides, theirs = plain(16 * KIB, 4, 100, direction), Sides(device, 16 * MIB), Sides(third, MIB)
    held, own = kvswap.Stream(third), plain(1000, 1, 20, H2D)
    name = ("both", "h2d")[direction]

    def path(links: float) -> str:
        with sums(device, **{name: links}):
            return sides.run(work, path="borrow").path

    theirs.prepare(MIB)
    assert path(2.9) == "borrow"
    with Gate(third) as gate:
        gate.hold(held)
        load = theirs.swap(own, stream=held)
        assert path(3.3) == "borrow"
        assert path(2.05) == "burst"
        assert path(2.9) == ("burst" if direction == D2H else "borrow"), "stores give way as a whole"
        gate.open()
        finish(theirs, [load], [own])
    assert path(2.05) == "borrow"


@pytest.mark.parametrize("codec", [None, "exact"])
def test_auto_borrows_for_large_transfers(device: kvswap.Device, lender: kvswap.Device, codec: str | None) -> None:
    """Both ways, and by a burst while no device lends."""
    if codec is None and device.kind == "host":
        pytest.skip("without a codec a host device copies by threads")
    count, page = 1120, 64 * KIB
    gpu, coding = Buffer(device, count * page), Coding(page, codec) if codec else None
    nbytes = coding.coded_nbytes if coding else page
    host = Buffer(device, count * nbytes, "cpu")
    cache, pool = (
        kvswap.Pool(device, gpu.memory, count, page),
        kvswap.Pool(device, host.memory, count, nbytes, coding=coding),
    )
    values = np.random.default_rng(1).standard_normal(count * page // 2, np.float32).view(np.uint32)
    data = (values >> 16).astype(np.uint16).view(np.uint8)
    gpu.put(data)

    def both(number: int, **options: Any) -> set[str]:
        ids = np.arange(number)[::-1]
        out = kvswap.move_blocks(cache, pool, ids, ids, **options)
        out.wait(PATIENCE)
        gpu.put(np.zeros(gpu.nbytes, np.uint8))
        back = kvswap.move_blocks(pool, cache, ids, ids, **options)
        back.wait(PATIENCE)
        assert (gpu.get()[: number * page] == data[: number * page]).all()
        gpu.put(data)
        return {out.path, back.path}

    assert both(count) == {"burst"}
    lender.lend(device, timeout=PATIENCE)
    try:
        assert both(count) == {"borrow"}
        assert both(320) == {"burst"}
        assert "borrow" not in both(count, priority="background")
        with Gate(lender) as gate:
            gate.hold(held := kvswap.Stream(lender))
            theirs = Sides(lender, MIB)
            theirs.prepare(MIB)
            waiting = [theirs.swap(work, stream=held) for work in (plain(999, 1, 9, D2H), plain(999, 1, 9, H2D))]
            assert both(count) == {"burst"}
            gate.open()
            for transfer in waiting:
                transfer.wait(PATIENCE)
    finally:
        lender.lend(device, 0, timeout=PATIENCE)
    assert both(count) == {"burst"}


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["borrower", "lender"])
def test_a_refused_call(device: kvswap.Device, lent: kvswap.Device, direction: int, whose: str) -> None:
    """Each call of a driver is refused once: the transfer is whole by another path, or the call was refused."""
    sides, work = Sides(device, 2 * MIB), plain(9000, 3, 40, direction)
    refused = device if whose == "borrower" else lent
    attempts = device.stats()["second_attempts"]
    for nth in range(1, 70):
        sides.prepare(sides.room)
        transfer = None
        with testing.fault(refused, "call", "fail", nth=nth, code=33), suppress(kvswap.DeviceError, MemoryError):
            transfer = sides.swap(work, path="borrow")
        if transfer is not None:
            with suppress(kvswap.DeviceError):
                transfer.wait(PATIENCE)
            if transfer.state == "failed":
                sides.forget(work, transfer.failed_positions)
                kept = np.setdiff1d(np.arange(work.count), transfer.failed_positions)
                carry_out(work, sides.gpu_model, sides.cpu_model, kept)
            else:
                carry_out(work, sides.gpu_model, sides.cpu_model)
        sides.check((nth, transfer))
    assert device.stats()["second_attempts"] > attempts
    for _ in range(3):
        transfer = sides.run(work, path="borrow")
    assert transfer.path == "borrow", "the link is used again"


def test_calls_that_are_all_refused(device: kvswap.Device, lent: kvswap.Device, direction: int) -> None:
    """No event can be recorded any more: the transfer fails, and ends only when nothing of it runs on the lender."""
    sides, work = Sides(device, 2 * MIB), plain(9000, 3, 60, direction)
    for nth in range(6, 30):
        sides.prepare(sides.room)
        transfer = None
        refused = testing.fault(device, "call", "fail", operation="event_record", nth=nth, every=1, code=33)
        with refused, suppress(kvswap.DeviceError):
            transfer = sides.swap(work, path="borrow")
        if transfer is None:
            continue
        with suppress(kvswap.DeviceError):
            transfer.wait(PATIENCE)
        after = sides.gpu.get().copy(), sides.cpu.get().copy()
        lent.synchronize(PATIENCE)
        device.synchronize(PATIENCE)
        assert (sides.gpu.get() == after[0]).all() and (sides.cpu.get() == after[1]).all(), nth
    lent.lend(device, 0, timeout=PATIENCE)
    lent.lend(device, TINY, timeout=PATIENCE)
    assert sides.run(work, path="borrow").path == "borrow"


def test_what_a_refused_call_left_is_forgotten_with_the_link(device: kvswap.Device, lent: kvswap.Device) -> None:
    """The first transfer is refused before it uses the link, which is taken back: later ones that fail do end."""
    sides, work = Sides(device, 2 * MIB), plain(9000, 3, 60, D2H)
    sides.prepare(sides.room)
    with testing.fault(device, "call", "fail", operation="copy", nth=1, code=33):
        transfer = sides.swap(work, path="borrow")
    transfer.wait(PATIENCE)
    lent.lend(device, 0, timeout=PATIENCE)
    for nth in range(4, 15):
        refused = testing.fault(device, "call", "fail", operation="event_record", nth=nth, every=1, code=33)
        with refused, suppress(kvswap.DeviceError):
            sides.swap(work, path="burst").wait(PATIENCE)
    lent.lend(device, TINY, timeout=PATIENCE)


LOST = """
from contextlib import suppress
from conftest import PATIENCE, Gate
from transfers import MIB, TINY, Sides, carry_out, plain
import kvswap
from kvswap import testing

def pair(number):
    device, lender = kvswap.Device(f"host:{number}"), kvswap.Device(f"host:{number + 1}")
    device.set_slots(TINY, 2)
    lender.lend(device, TINY, 2)
    return device, lender

direction = int(sys.argv[1])
device, lender = pair(300)
sides, held, work = Sides(device, 4 * MIB), kvswap.Stream(device), plain(16 << 10, 2, 80, direction)
sides.prepare(sides.room)
with Gate(device) as gate:  # all is queued when the lender is lost
    gate.hold(held)
    transfer = sides.swap(work, path="borrow", after=[held])
    waiting = kvswap.swap_blocks_batch([], [], 1, device=device, stream=held)  # it uses no lent link
    assert transfer.path == "borrow"
    with testing.fault(lender, "call", "lose"), suppress(kvswap.DeviceError):
        lender.alloc(64)
    assert not waiting.done()
    gate.open()
    try:
        transfer.wait(PATIENCE)
    except kvswap.DeviceError as error:
        assert "host:301, on which this transfer of host:300 relied, is lost" in str(error)
    waiting.wait(PATIENCE)
assert transfer.failed_positions.tolist() == list(range(work.count)) and not device.lost
assert sides.run(work, path="borrow").path == "burst"
try:
    lender.lend(device)
except kvswap.DeviceError as error:
    assert "lost" in str(error)

outcomes = set()
for nth in range(1, 50, 2):  # at each call on the lender, while pieces are queued
    device, lender = pair(300 + 2 * nth)
    sides, work = Sides(device, MIB), plain(9000, 2, 40, direction)
    sides.prepare(sides.room)
    with Gate(device) as gate:
        gate.hold(held := kvswap.Stream(device))
        waiting = kvswap.swap_blocks_batch([], [], 1, device=device, stream=held)
        with testing.fault(lender, "call", "lose", nth=nth, code=719):
            transfer = sides.swap(work, path="borrow")
        assert not waiting.done(), nth
        gate.open()
        waiting.wait(PATIENCE)
    with suppress(kvswap.DeviceError):
        transfer.wait(PATIENCE)
    outcomes.add((transfer.state, lender.lost))
    if transfer.state == "done":
        carry_out(work, sides.gpu_model, sides.cpu_model)
        sides.check()
    else:
        assert len(transfer.failed_positions) == work.count
    assert not device.lost
    sides.run(work, path="borrow")
    lender.lend(device, 0)
    assert device.info["lenders"] == {}
assert ("failed", True) in outcomes and ("failed", False) not in outcomes, outcomes
print("right")
"""


def test_a_lender_that_is_lost(direction: int) -> None:
    """What was on its link fails, and is named; the borrower lives on, by its own link."""
    run = run_python(LOST.replace("sys.argv[1]", str(direction)))
    assert run.stdout == "right\n", run.stderr


# -- lending to each other --------------------------------------------------------------------------------------------


@pytest.fixture
def mutual(device: kvswap.Device, lent: kvswap.Device) -> Iterator[tuple[kvswap.Device, kvswap.Device]]:
    """Two devices that lend to each other."""
    with tiny_slots(lent):
        device.lend(lent, TINY, 2, timeout=PATIENCE)
        yield device, lent
        device.lend(lent, 0, timeout=PATIENCE)


@pytest.mark.parametrize("direction", [D2H, H2D])
def test_two_that_borrow_at_once_share_both_links(mutual: tuple[kvswap.Device, kvswap.Device], direction: int) -> None:
    """The second borrows while the first, which has taken half of its link, is under way. Its link is in use, and lent
    once more it adds nothing to what the host must reach."""
    scale = 32 if mutual[0].kind == "cuda" else 1  # the first must be under way when the second is submitted
    for device, other in (mutual, mutual[::-1]):
        device.set_slots(scale * TINY, 2, timeout=PATIENCE)
        device.lend(other, scale * TINY, 2, timeout=PATIENCE)
    page = scale * 64 * KIB
    sides, work = [Sides(device, 512 * page) for device in mutual], plain(page, 2, 100, direction)

    def both_at_once() -> bool:
        for side in sides:
            side.prepare(side.room)
        first = sides[0].swap(work, path="borrow")
        second = sides[1].swap(work, path="borrow")
        overlap = not first.done()
        assert first.path == "borrow"
        for side, transfer in zip(sides, (first, second), strict=True):
            finish(side, [transfer], [work])
        return overlap and second.path == "borrow"

    with ExitStack() as stack:
        for device in mutual if direction == D2H else ():
            stack.enter_context(sums(device, d2h=2))
        until(both_at_once, "a second transfer that borrows beside the first")


@pytest.mark.parametrize("direction", [D2H, H2D])
def test_nothing_is_borrowed_from_a_borrower_that_still_waits(
    mutual: tuple[kvswap.Device, kvswap.Device], direction: int
) -> None:
    sides, work = [Sides(device, 2 * MIB) for device in mutual], plain(9000, 2, 60, direction)
    held = kvswap.Stream(mutual[0])
    for side in sides:
        side.prepare(side.room)
    with Gate(mutual[0]) as gate:
        gate.hold(held)
        first = sides[0].swap(work, path="borrow", stream=held)
        second = sides[1].swap(work, path="borrow")
        assert (first.path, second.path) == ("borrow", "burst")
        finish(sides[1], [second], [work])
        gate.open()
        finish(sides[0], [first], [work])


# -- lending and taking back ------------------------------------------------------------------------------------------


def test_a_link_in_use_is_not_taken_back(device: kvswap.Device, lent: kvswap.Device, direction: int) -> None:
    sides, held, work = Sides(device, 2 * MIB), kvswap.Stream(device), plain(9000, 2, 60, direction)
    sides.prepare(sides.room)
    with Gate(device) as gate:
        gate.hold(held)
        transfer = sides.swap(work, path="borrow", stream=held)
        for change in ((0,), (2 * TINY, 2)):
            with pytest.raises(TimeoutError, match=r"had not ended after 0.1 s, and the link of .* is still lent"):
                lent.lend(device, *change, timeout=0.1)
        assert device.info["lenders"][lent.name]["slot_nbytes"] == TINY
        gate.open()
        finish(sides, [transfer], [work])
    lent.lend(device, 2 * TINY, 4, timeout=PATIENCE)
    assert device.info["lenders"][lent.name] == {"slot_nbytes": 2 * TINY, "count": 4, "share": 1.0}
    assert sides.run(work, path="borrow").path == "borrow"


def test_a_lender_that_is_busy_takes_its_link_back(device: kvswap.Device, lent: kvswap.Device) -> None:
    """Its memory is freed when it has time; the borrower's own memory does not wait for that."""
    with Gate(lent) as gate:
        gate.hold(held := kvswap.Stream(lent))
        lent.lend(device, 0, timeout=AT_ONCE)
        assert device.info["lenders"] == {}
        device.alloc(4096).free(timeout=AT_ONCE)
        gate.open()
        held.synchronize(PATIENCE)
    lent.lend(device, TINY, timeout=PATIENCE)


def test_without_lenders(device: kvswap.Device, lender: kvswap.Device) -> None:
    assert device.info["lenders"] == {}
    with pytest.raises(kvswap.Error, match=r"path 'borrow' is off: no device lends its link to"):
        Sides(device, MIB).run(plain(1000, 1, 10, D2H), path="borrow")
    lender.lend(device, 0)  # nothing to take back


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((1,), ValueError, "slots of 1 bytes: lent slots have a multiple of 128 KiB"),
        ((128 * MIB,), ValueError, "at most 64 MiB"),
        ((TINY, 1), ValueError, "count is 1; a lent link has 2 to 4 slots"),
        ((TINY, 5), ValueError, "count is 5"),
        ((-1,), ValueError, "slot_nbytes"),
        ((None,), TypeError, "slot_nbytes"),
    ],
)
def test_bad_sizes(
    device: kvswap.Device, lender: kvswap.Device, arguments: tuple[Any, ...], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        lender.lend(device, *arguments)
    assert device.info["lenders"] == {}


@pytest.mark.parametrize("share", [0, -1, 11, float("nan"), float("inf")])
def test_bad_shares(device: kvswap.Device, lender: kvswap.Device, share: float) -> None:
    with pytest.raises(ValueError, match=r"share is .*; it is 0.1 to 10"):
        lender.lend(device, share=share)
    with pytest.raises(TypeError, match="share must be a number, not str"):
        lender.lend(device, share="half")


def test_devices_that_cannot_lend(device: kvswap.Device) -> None:
    with pytest.raises(ValueError, match="cannot lend its link to itself"):
        device.lend(device)
    with pytest.raises(kvswap.Error, match="one is deterministic"):
        testing.deterministic_device(3).lend(device)
    first, second = kvswap.Device("host:54"), kvswap.Device("host:55")
    for near, far in ((first, second), (second, first)):
        with testing.peer_access(near, far, False), pytest.raises(kvswap.Error, match="no peer access"):
            second.lend(first)
        assert first.info["lenders"] == {}
    second.lend(first)
    second.lend(first, 0)


@pytest.mark.parametrize("operation", ["alloc", "event_create", "stream_create"])
def test_there_is_no_memory_to_lend(operation: str) -> None:
    """Nothing is lent, and what was allocated is given back."""
    device, lender = kvswap.Device("host:213"), kvswap.Device("host:214")
    for refused in (device, lender):
        with testing.fault(refused, "call", "fail", operation=operation, nth=1, code=2), pytest.raises(MemoryError):
            lender.lend(device, TINY)
        assert device.info["lenders"] == {}
    lender.lend(device, TINY)
    assert Sides(device, 2 * MIB).run(plain(9000, 2, 60, D2H), path="borrow").path == "borrow"
    lender.lend(device, 0)


def test_two_devices_lend_to_each_other() -> None:
    """From four threads, while a fifth changes what is lent: every transfer is right, by whatever path."""
    devices = kvswap.Device("host:215"), kvswap.Device("host:216")
    errors: list[BaseException] = []
    stop, paths = threading.Event(), set()

    def move(device: kvswap.Device, direction: int) -> None:
        sides, choose = Sides(device, 3 * MIB), Chooser(random.Random(direction))
        stream = kvswap.Stream(device)
        while not stop.is_set():
            work, path = draw(choose, sides.room, direction=direction), choose.of(("borrow", "auto", "burst"))
            try:
                paths.add(sides.run(work, path=path, stream=stream).path)
            except kvswap.Error as error:
                if "no device lends its link" not in str(error):
                    raise

    def guarded(*arguments: Any) -> None:
        try:
            move(*arguments)
        except BaseException as error:
            errors.append(error)

    for device in devices:
        device.set_slots(TINY, 2)
    devices[0].lend(devices[1], TINY), devices[1].lend(devices[0], TINY)
    ways = [(device, direction) for device in devices for direction in (D2H, H2D)]
    threads = [threading.Thread(target=guarded, args=way) for way in ways]
    for thread in threads:
        thread.start()
    for turn in range(30):
        lender, borrower = devices if turn % 2 else devices[::-1]
        with suppress(TimeoutError):
            lender.lend(borrower, TINY * (turn % 3), 2 + turn % 3, timeout=2.0)
    with suppress(AssertionError):
        until(lambda: "borrow" in paths or bool(errors))
    stop.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert not errors, errors
    assert "borrow" in paths


def test_works_of_any_size(device: kvswap.Device, lent: kvswap.Device, direction: int) -> None:
    """Blocks that are larger than a lent slot, cut or not; none; one."""
    sides = Sides(device, 8 * MIB)
    for nbytes, tensors, count in ((300 * KIB, 1, 9), (TINY, 2, 12), (TINY + 16, 2, 12), (1, 1, 1), (7, 2, 500)):
        before = lent_bytes(lent)
        transfer = sides.run(plain(nbytes, tensors, count, direction), path="borrow")
        assert (moved_by(lent, before, direction) > 0) == (transfer.nbytes > 4 * TINY), nbytes
    for together in (False, True):
        work = plain(40 * KIB, 12, 8, direction, together=together)
        sides.run(work, "move", path="borrow", layer_events=True)
    empty = replace(work, gpu_ids=work.gpu_ids[:0], cpu_ids=work.cpu_ids[:0])
    assert sides.run(empty, path="borrow").nbytes == 0
