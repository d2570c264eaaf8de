"""The paths that copy by a kernel, `burst` and `kernel`, from the public calls: anything that may be asked for, against
a model in NumPy; what may be queued beside it, before it and after it; and every call of a burst that may be refused.
What bursts alone promise is in test_burst.py."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Gate, bindings, check_pattern, run_python, usable, write_pattern
from hypothesis import given
from hypothesis import strategies as st
from transfers import (
    CALLS,
    D2H,
    GUARD,
    H2D,
    MIB,
    SIZES,
    TINY,
    Chooser,
    Drawn,
    Sides,
    Work,
    carry_out,
    draw,
    four_bursts,
    halves,
    lay_out,
    plain,
    pointers,
    tiny_slots,
    view,
)

import kvswap
from kvswap import _C, testing
from kvswap.typing import Path, Priority

INLINE = (0, 1, 8, 479, 480, 481, 2000)  # pairs of slots, round about as many as travel as parameters


@pytest.fixture(params=["burst", "kernel"])
def path(request: pytest.FixtureRequest, session_device: kvswap.Device) -> str:
    return usable(session_device, str(request.param))


@pytest.fixture
def sides(device: kvswap.Device) -> Sides:
    return Sides(device, 4 * MIB)


@pytest.fixture
def seamed(device: kvswap.Device) -> Iterator[Sides]:
    """The host's side is memory of the caller's, registered in parts."""
    sides = Sides(device, 4 * MIB, registered=True)
    yield sides
    sides.close()


# -- anything ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
def test_any_transfer(sides: Sides, path: str, direction: int, call: str) -> None:
    choose = Chooser(random.Random(f"{path} {direction} {call}"))
    for _ in range(60):
        sides.run(draw(choose, sides.room, direction=direction), call, path=path)


@pytest.mark.parametrize("call", CALLS)
def test_any_transfer_over_seams(seamed: Sides, path: str, direction: int, call: str) -> None:
    choose = Chooser(random.Random(f"{path} {direction} {call} seams"))
    for _ in range(30):
        seamed.run(draw(choose, seamed.room, direction=direction, begin=seamed.begin), call, path=path)


@given(st.data(), st.sampled_from(["burst", "kernel"]), st.sampled_from(sorted(CALLS)))
def test_whatever_is_asked_for(session_device: kvswap.Device, data: st.DataObject, path: str, call: str) -> None:
    usable(session_device, path)
    Sides(session_device, MIB).run(draw(Drawn(data), MIB, 500), call, path=path)


def test_any_interleaving(path: str) -> None:
    """On devices that reorder all that nothing orders, each by its seed."""
    for seed in range(1, 41):
        sides, choose = Sides(testing.deterministic_device(seed), MIB), Chooser(random.Random(seed))
        for call in CALLS:
            sides.run(draw(choose, sides.room, 500), call, path=path)


@pytest.mark.parametrize("count", INLINE)
@pytest.mark.parametrize("tensors", [1, 90])
@pytest.mark.parametrize("together", [True, False], ids=["block-first", "layer-first"])
def test_numbers_of_pairs(sides: Sides, path: str, direction: int, count: int, tensors: int, together: bool) -> None:
    for nbytes in (1, 16, 20):
        work = plain(nbytes, tensors, count, direction, together=together, seed=nbytes)
        transfer = sides.run(work, path=path)
        assert (transfer.path, transfer.num_blocks, transfer.nbytes) == (path, count, count * tensors * nbytes)


@pytest.mark.parametrize("nbytes", SIZES)
def test_sizes_and_alignments(sides: Sides, path: str, direction: int, nbytes: int) -> None:
    for gpu_at, cpu_at in ((0, 0), (1, 3), (8, 0), (4, 12), (15, 1), (2, 2)):
        rng, sizes = np.random.default_rng(nbytes + gpu_at), (nbytes, nbytes)
        places = (lay_out(sizes, 7, GUARD + gpu_at, 0, False), lay_out(sizes, 7, GUARD + cpu_at, 0, True))
        work = Work(sizes, *places, rng.permutation(7), rng.permutation(7), direction)
        for call in ("swap", "batch"):
            sides.run(work, call, path=path)


@pytest.fixture
def tiny(device: kvswap.Device) -> Iterator[kvswap.Device]:
    """The device under test, with slots so small that small transfers are many bursts."""
    with tiny_slots(device):
        yield device


def tiny_device(seed: int, count: int = 2) -> kvswap.Device:
    device = testing.deterministic_device(seed)
    device.set_slots(TINY, count)
    return device


@pytest.mark.parametrize("call", CALLS)
def test_any_transfer_in_tiny_slots(tiny: kvswap.Device, direction: int, call: str) -> None:
    sides, choose = Sides(tiny, 3 * MIB), Chooser(random.Random(f"{direction} {call} tiny"))
    for _ in range(40):
        sides.run(draw(choose, sides.room, direction=direction), call, path="burst")


@pytest.mark.parametrize("call", CALLS)
def test_many_bursts(tiny: kvswap.Device, direction: int, call: str) -> None:
    """More of them than there are slots, so that each waits for one before it; on the host in few runs and in many."""
    sides = Sides(tiny, 3 * MIB)
    for nbytes, tensors, count, together in ((20 << 10, 2, 60, True), (409, 3, 1900, False), (900, 64, 40, True)):
        work = plain(nbytes, tensors, count, direction, together=together)
        assert sides.run(work, call, path="burst").path == "burst"


@pytest.mark.not_sanitized("minutes: all interleavings")
@pytest.mark.parametrize("count", [2, 3, 8])
def test_many_bursts_in_every_interleaving(direction: int, count: int) -> None:
    """Whichever of a burst's two stages happens early or late."""
    for seed in range(1, 31):
        sides = Sides(tiny_device(seed, count), 3 * MIB)
        work = plain(4 << 10, 1, (500, 220)[seed // 2 % 2], direction, together=seed % 3 > 0)
        sides.run(work, ("swap", "batch")[seed % 2], path="burst")
        assert sides.device.stats()["second_attempts"] == 0


def test_blocks_larger_than_a_slot(tiny: kvswap.Device, direction: int) -> None:
    sides = Sides(tiny, 6 * MIB)
    for nbytes, tensors, count in ((TINY, 2, 7), (TINY + 1, 1, 7), (3 * TINY + 5, 2, 3)):
        assert sides.run(plain(nbytes, tensors, count, direction), path="burst").path == "burst"


@pytest.mark.not_sanitized("minutes: slots of a GPU's size")
@pytest.mark.parametrize("call", CALLS)
def test_slots_of_the_usual_size(device: kvswap.Device, direction: int, call: str) -> None:
    sides = Sides(device, 40 * MIB)
    for nbytes, tensors, count, together in ((200 << 10, 2, 90, True), (4096, 3, 2900, False), (9000, 64, 60, True)):
        work = plain(nbytes, tensors, count, direction, together=together)
        assert sides.run(work, call, path="burst").path == "burst"


PARTS = {
    "a row": [(0, 0, 3, 1, 500, 0)],
    "rows": [(0, 0, 1, 5, 20, 200), (1, 0, 0, 1, 1004, 0)],
    "three parts": [(0, 0, 0, 2, 11, 502), (0, 0, 900, 1, 104, 0), (1, 0, 1003, 1, 1, 0)],
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("count", [8, 480, 481])
def test_parts_of_blocks(sides: Sides, path: str, direction: int, parts: list[Any], count: int) -> None:
    work = plain(1004, 2, count, direction)
    sides.prepare(max(work.gpu.end, work.cpu.end))
    transfer = sides.move(work, path=path, parts=np.array(parts))
    for pair, _, offset, rows, nbytes, pitch in parts:
        for row in range(rows):
            at = offset + row * pitch
            here, there = (
                view(model[at:], side, pair, nbytes)
                for model, side in ((sides.gpu_model, work.gpu), (sides.cpu_model, work.cpu))
            )
            if direction == H2D:
                here[work.gpu_ids] = there[work.cpu_ids]
            else:
                there[work.cpu_ids] = here[work.gpu_ids]
    transfer.wait(PATIENCE)
    sides.check(parts)
    assert transfer.path == path


def test_one_source_many_destinations(sides: Sides, path: str, direction: int) -> None:
    for count in (12, 481):
        work = plain(513, 3, count, direction)
        (work.cpu_ids if direction == H2D else work.gpu_ids)[: count // 2] = 1
        sides.run(work, path=path)


# -- what else is queued ----------------------------------------------------------------------------------------------


def test_others_are_submitted_before_it_begins(device: kvswap.Device, path: str, direction: int) -> None:
    """Transfers of so many tables of rows that not all have a place on the device, all held up at once: what each of
    them reads is its own, whatever is submitted after it."""
    many, room = 40, 40000
    sides, stream = Sides(device, many * room), kvswap.Stream(device)
    for count in (8, 480, 481):
        works = [plain(7 + i % 5, 3, count, direction, seed=i, begin=GUARD + i * room) for i in range(many)]
        sides.prepare(many * room)
        with Gate(device) as gate:
            gate.hold(stream)
            transfers = [sides.swap(work, path=path, stream=stream) for work in works]
            transfers += [sides.swap(work, path=path, stream=stream) for work in works[:3]]  # tables that are in use
            gate.open()
        for transfer, work in zip(transfers, works + works[:3], strict=True):
            transfer.wait(PATIENCE)
            carry_out(work, sides.gpu_model, sides.cpu_model)
        sides.check(f"{count} pairs")


def test_tables_come_and_go(sides: Sides, path: str, direction: int) -> None:
    """One after another, of more tables than there are places, and again; some of them larger than those they evict."""
    works = [plain(16 + i, 1 + i % 9, 5, direction, begin=GUARD + i, seed=i) for i in range(70)]
    works += [plain(8, 1300 + i, 2, direction, begin=GUARD + i) for i in range(3)]
    for work in works + works[::-1] + works[::7] * 3:
        assert sides.run(work, path=path).path == path


def test_what_does_not_fit_beside_the_tables(device: kvswap.Device, direction: int) -> None:
    """All tables are in use, and one more transfer takes all the room there is: for rows and for pairs."""
    small, room = 40, 4000
    sides, stream = Sides(device, 2 * MIB), kvswap.Stream(device)
    works = [plain(5 + i, 2, 4, direction, begin=GUARD + i * room) for i in range(small)]
    works.append(plain(1, 90, 7500, direction, together=False, begin=GUARD + small * room))
    sides.prepare(sides.room)
    with Gate(device) as gate:
        gate.hold(stream)
        transfers = [sides.swap(work, path="burst", stream=stream) for work in works]
        gate.open()
    for transfer, work in zip(transfers, works, strict=True):
        transfer.wait(PATIENCE)
        carry_out(work, sides.gpu_model, sides.cpu_model)
    sides.check()


def test_two_bursts_of_one_direction(device: kvswap.Device, direction: int) -> None:
    """From two streams: neither waits for the other."""
    sides, streams = Sides(device, 32 * MIB), [kvswap.Stream(device) for _ in range(2)]
    works = halves(direction, 8192, 900, room=sides.room)
    for turn in range(4):
        sides.prepare(sides.room)
        testing.delay(device, 0.002 * turn, streams[0])
        transfers = [sides.swap(work, path="burst", stream=s) for work, s in zip(works, streams, strict=True)]
        for transfer, work in zip(transfers, works, strict=True):
            transfer.wait(PATIENCE)
            carry_out(work, sides.gpu_model, sides.cpu_model)
            assert transfer.path == "burst"
        sides.check()


@pytest.mark.not_sanitized("minutes: all interleavings")
def test_bursts_in_every_interleaving() -> None:
    """Two of each direction at once, from four streams."""
    for seed in range(1, 41):
        device = testing.deterministic_device(seed)
        sides, streams = Sides(device, MIB), [kvswap.Stream(device) for _ in range(4)]
        works = [plain(700, 2, 40, i % 2, seed=seed + i, begin=GUARD + i * MIB // 4) for i in range(4)]
        sides.prepare(sides.room)
        if seed % 2:
            testing.delay(device, 0.001, streams[seed % 4])
        transfers = [sides.swap(work, path="burst", stream=s) for work, s in zip(works, streams, strict=True)]
        for transfer, work in zip(transfers, works, strict=True):
            transfer.wait(PATIENCE)
            carry_out(work, sides.gpu_model, sides.cpu_model)
            assert transfer.path == "burst"
        sides.check(f"seed {seed}")


def test_threads(device: kvswap.Device, path: str) -> None:
    """Each with its stream and its part of the buffers, both directions, all at once."""
    number, turns, room = 6, 12, 2 * MIB
    sides = Sides(device, number * room)
    sides.prepare(number * room)
    works = [plain(1000 + i, 3, 200, i % 2, seed=i, begin=GUARD + i * room) for i in range(number)]
    errors: list[BaseException] = []

    def work(mine: Work) -> None:
        try:
            stream = kvswap.Stream(device)
            for turn in range(turns):
                call = (sides.swap, sides.batch)[turn % 2]
                call(mine, path=path, stream=stream if turn % 3 else None).wait(PATIENCE)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for mine in works:
        carry_out(mine, sides.gpu_model, sides.cpu_model)
    sides.check()


def test_rows_of_other_sizes_in_other_threads(device: kvswap.Device) -> None:
    """Launches that take more and less shared memory, which is allowed by a setting of the kernel."""
    sizes, turns, room = (600, 1500, 8192, 1500, 8192), 200, MIB
    sides = Sides(device, len(sizes) * room)
    sides.prepare(len(sizes) * room)
    works = [plain(nbytes, 2, 8, i % 2, seed=i, begin=GUARD + i * room) for i, nbytes in enumerate(sizes)]

    def work(mine: Work) -> None:
        stream = kvswap.Stream(device)
        for _ in range(turns):
            sides.swap(mine, path="kernel", stream=stream).wait(PATIENCE)

    with ThreadPoolExecutor(len(works)) as pool:
        for job in [pool.submit(work, mine) for mine in works]:
            job.result(PATIENCE)
    for mine in works:
        carry_out(mine, sides.gpu_model, sides.cpu_model)
    sides.check()


# -- order ------------------------------------------------------------------------------------------------------------


def store_and_load(device: kvswap.Device, path: str, on_stream: bool, nbytes: int, count: int) -> None:
    """The model writes blocks late; they are stored; it writes over them at once, and reads those late. Then they are
    loaded back, and it reads them at once. No call waits for anything."""
    sides, stream, other = Sides(device, 4 * MIB), kvswap.Stream(device), kvswap.Stream(device)
    store = plain(nbytes, 2, count, D2H)
    load = Work(store.nbytes, store.gpu, store.cpu, store.gpu_ids, store.cpu_ids, H2D)
    sides.prepare(sides.room)
    gpu, cpu = pointers(sides.gpu, store.gpu, store.gpu_ids), pointers(sides.cpu, store.cpu, store.cpu_ids)
    first, second = np.arange(gpu.size), np.arange(gpu.size) + 1000000
    if not on_stream:
        device.set_compute_stream(stream)
    options: dict[str, Any] = {"path": path, **({"stream": stream} if on_stream else {})}
    testing.delay(device, 0.003, stream)
    written = write_pattern(device, gpu, nbytes, first, stream)
    stored = sides.swap(store, **options)
    if not on_stream:  # which holds up no stream: one that needs it waits for it
        stored.make_wait(stream)
    over = write_pattern(device, gpu, nbytes, second, stream)
    testing.delay(device, 0.003, stream)
    seen = check_pattern(device, gpu, nbytes, second, stream)  # the load must not come before it
    loaded = sides.swap(load, after=[stored], **options)
    loaded.make_wait(other)
    if not on_stream:
        loaded.make_wait(stream)
    jobs = [seen] + [check_pattern(device, gpu, nbytes, first, s) for s in (stream, other)]
    jobs.append(check_pattern(device, cpu, nbytes, first, other))
    written.result(PATIENCE), over.result(PATIENCE)
    assert [job.result(PATIENCE)[0] for job in jobs] == [0, 0, 0, 0]
    stored.wait(PATIENCE), loaded.wait(PATIENCE)
    assert stored.path == loaded.path == path


@pytest.mark.parametrize("on_stream", [True, False], ids=["S", "None"])
@pytest.mark.parametrize(("nbytes", "count"), [(64, 300), (4096, 100), (20000, 90)])
def test_late_producers_and_consumers(
    device: kvswap.Device, path: str, on_stream: bool, nbytes: int, count: int
) -> None:
    store_and_load(device, path, on_stream, nbytes, count)


@pytest.mark.not_sanitized("minutes: all interleavings")
@pytest.mark.parametrize("on_stream", [True, False], ids=["S", "None"])
def test_late_producers_and_consumers_in_every_interleaving(path: str, on_stream: bool) -> None:
    for seed in range(1, 31):
        store_and_load(testing.deterministic_device(seed), path, on_stream, 600, 30)


# -- what the driver refuses ------------------------------------------------------------------------------------------

OPERATIONS = ("copy", "copy_batch", "launch", "event_record", "stream_wait", "event_query", "pointer_query")
MOST_CALLS = 70  # that a transfer of four bursts makes, and some more


def outcome_of(sides: Sides, work: Work, transfer: kvswap.Transfer) -> str:
    """That the transfer tells the truth about every block, and nothing else has changed."""
    try:
        transfer.wait(PATIENCE)
        failed = np.array([], np.int64)
    except kvswap.DeviceError as error:
        assert error.code == 33
        failed = transfer.failed_positions
        assert failed.size > 0 and transfer.state == "failed"
    kept = np.delete(np.arange(work.count), failed)
    carry_out(work, sides.gpu_model, sides.cpu_model, kept)
    sides.forget(work, failed)
    sides.check(f"{failed.size} lost")
    return "lost" if failed.size else "done"


def refuse(
    sides: Sides, work: Work, nth: int, operation: str, every: int = 0, call: str = "swap", **options: Any
) -> str:
    """What came of a burst whose nth call of the driver was refused; and that the next ones are none the worse."""
    device = sides.device
    sides.prepare(max(work.gpu.end, work.cpu.end))
    before = device.stats()
    try:
        with testing.fault(device, "call", "fail", operation=operation, nth=nth, every=every, code=33):
            transfer = CALLS[call](sides, work, path="burst", **options)
    except kvswap.DeviceError as error:
        assert error.code == 33
        device.synchronize(PATIENCE)
        sides.check("raised")
        assert device.stats()["submitted"] == before["submitted"]
        outcome = "raised"
    else:
        outcome = outcome_of(sides, work, transfer)
        again = device.stats()["second_attempts"] - before["second_attempts"]
        assert again == (transfer.path == "dma"), f"{transfer.path}, {again} second attempts, {outcome}"
        outcome = "again" if transfer.path == "dma" and outcome == "done" else outcome
        sides.prepare(sides.end)
        device.synchronize(PATIENCE)
        sides.check("something was written after the transfer's end")
    for _ in range(2):
        assert sides.run(work, path="burst", **options).path == "burst"
    assert device.stats()["unfinished"] == 0
    return outcome


@pytest.fixture(params=["threads", *(pytest.param(f"seed {n}", marks=pytest.mark.host_device) for n in (3, 4))])
def faulty(request: pytest.FixtureRequest, tiny: kvswap.Device) -> Sides:
    """On the device under test and on deterministic ones, in slots of which a transfer takes four."""
    usable(tiny, "kernel")
    kind = str(request.param)
    return Sides(tiny if kind == "threads" else tiny_device(int(kind[5:])), MIB)


@pytest.mark.not_sanitized("refuses one call after the other, as test_faults does")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_nth_of_an_operation_is_refused(faulty: Sides, direction: int, operation: str) -> None:
    outcomes = [refuse(faulty, four_bursts(direction), nth, operation) for nth in range(1, 24)]
    assert outcomes[-1] == "done", "there are more calls than the test goes through"
    if operation in ("copy_batch", "launch", "event_record", "stream_wait"):
        assert "again" in outcomes, outcomes


@pytest.mark.not_sanitized("refuses one call after the other, as test_faults does")
@pytest.mark.parametrize("on_stream", [False, True], ids=["None", "S"])
def test_the_nth_call_is_refused(faulty: Sides, direction: int, on_stream: bool) -> None:
    options = {"stream": kvswap.Stream(faulty.device)} if on_stream else {}
    outcomes = [refuse(faulty, four_bursts(direction), nth, "", **options) for nth in range(1, MOST_CALLS)]
    assert {"raised", "again"} <= set(outcomes) and outcomes[-1] == "done"


@pytest.mark.not_sanitized("refuses one call after the other, as test_faults does")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_is_refused_from_then_on(faulty: Sides, direction: int, operation: str) -> None:
    for nth in range(1, 20):
        refuse(faulty, four_bursts(direction), nth, operation, every=1)


@pytest.mark.not_sanitized("refuses one call after the other, as test_faults does")
def test_all_is_refused_from_then_on(faulty: Sides, direction: int) -> None:
    for nth in range(1, MOST_CALLS, 2):
        refuse(faulty, four_bursts(direction), nth, "", every=1)


def cheapest(device: kvswap.Device, name: str) -> None:
    """Let AUTO find that path the fastest."""
    costs = _C._costs_read(None)
    for paths in (costs["d2h"], costs["h2d"]):
        for path, cost in paths.items():
            cost["start"] = 1.0 if path == name else 1e9
    bindings.costs_use(device, costs)


def test_a_device_that_is_full(path: str, direction: int) -> None:
    """AUTO then takes the copy engine, which needs no memory for lists; a path that was asked for is refused."""
    device = testing.deterministic_device(direction + 5)
    sides, work = Sides(device, 4 * MIB), plain(16, 2, 9000, direction)
    cheapest(device, path)
    sides.prepare(max(work.gpu.end, work.cpu.end))
    with testing.fault(device, "call", "fail", operation="alloc", every=1, code=2):
        with pytest.raises(MemoryError, match="alloc"):
            sides.swap(work, path=path)
        sides.check("raised")
        transfer = sides.swap(work)
    transfer.wait(PATIENCE)
    carry_out(work, sides.gpu_model, sides.cpu_model)
    sides.check("no room")
    assert transfer.path == "dma"
    assert sides.run(work).path == path


def test_a_device_that_is_full_waits_for_nobody(device: kvswap.Device, path: str, direction: int) -> None:
    """A free would wait for all that is queued, and that may wait for the caller."""
    usable(device, path)
    sides, work, held = Sides(device, 4 * MIB), plain(16, 2, 9000, direction), kvswap.Stream(device)
    sides.prepare(max(work.gpu.end, work.cpu.end))
    refused: list[str] = []

    def submit() -> None:
        try:
            for _ in range(100):  # until no list is left of those that earlier transfers had
                sides.swap(work, path=path, stream=held)
        except MemoryError as error:
            refused.append(str(error))

    with Gate(device) as gate:
        gate.hold(held)
        with testing.fault(device, "call", "fail", operation="alloc", every=1, code=2):
            caller = threading.Thread(target=submit)
            caller.start()
            caller.join(PATIENCE)
            hangs = caller.is_alive()
            gate.open()
        caller.join(PATIENCE)
    assert not hangs and "alloc failed with code 2" in refused[0]
    assert sides.run(work, path=path).path == path


@pytest.mark.not_sanitized("refuses one call after the other, as test_faults does")
@pytest.mark.parametrize("call", ["batch", "move"])
def test_lists_are_refused_too(faulty: Sides, direction: int, call: str) -> None:
    """By pointers: the kernel reads a list of pieces."""
    outcomes = [refuse(faulty, four_bursts(direction), nth, "", call=call) for nth in range(1, MOST_CALLS)]
    assert {"raised", "again"} <= set(outcomes) and outcomes[-1] == "done"


@pytest.mark.not_sanitized("refuses one call after the other, as test_faults does")
def test_a_refusal_while_others_are_on_their_way(direction: int) -> None:
    """Three transfers, of which the first is late. Whatever the driver refuses of the second one, the third must not
    come into a slot before those before it have left it; if that cannot be told, it takes another path."""
    paths = []
    for nth in range(1, MOST_CALLS):
        works = halves(direction, 70000, 6, number=3)
        device = tiny_device(nth)
        sides, streams = Sides(device, 4 * MIB), [kvswap.Stream(device) for _ in works]
        sides.prepare(sides.room)
        with Gate(device) as gate:
            gate.hold(streams[0])
            transfers = [sides.swap(works[0], path="burst", stream=streams[0])]
            try:
                with testing.fault(device, "call", "fail", nth=nth, code=33):
                    transfers.append(sides.swap(works[1], path="burst", stream=streams[1]))
            except kvswap.DeviceError:
                works[1:2] = []
            with suppress(kvswap.QueueFull):  # of a lane whose copies can be told of by none
                transfers.append(sides.swap(works[-1], path="burst", stream=streams[1 + nth % 2]))
                paths.append(transfers[-1].path)
            gate.open()
            device.synchronize(PATIENCE)
        for transfer, work in zip(transfers, works[: len(transfers)], strict=True):
            if transfer.error is None:
                carry_out(work, sides.gpu_model, sides.cpu_model)
            else:
                assert transfer is transfers[1] and len(works) == 3
                sides.forget(work, np.arange(work.count))
        sides.check(f"call {nth}")
    assert set(paths) == {"burst", "kernel"}, "some calls were not gone through"


def write_twice(device: kvswap.Device, operation: str, nth: int, direction: int, one_stream: bool) -> bool:
    """The same blocks from two streams, or one, by a burst of which calls are refused and by plain copies; whether the
    second transfer was refused."""
    sides, work = Sides(device, 2 * MIB), plain(8 << 10, 1, 120, direction)
    ids = np.arange(work.count)
    sides.prepare(max(work.gpu.end, work.cpu.end))
    pools = [
        kvswap.Pool(device, buffer.ptr + side.begins[0], side.blocks, work.nbytes[0])
        for buffer, side in ((sides.gpu, work.gpu), (sides.cpu, work.cpu))
    ]
    source, target = pools[::-1] if direction == H2D else pools
    first = kvswap.Stream(device)
    second = first if one_stream else kvswap.Stream(device)
    try:
        with testing.fault(device, "call", "fail", operation=operation, nth=nth, every=1, code=33):
            kvswap.move_blocks(source, target, ids, ids, path="burst", stream=first)
    except kvswap.DeviceError:
        return False
    try:
        kvswap.move_blocks(source, target, ids[::-1].copy(), ids, path="dma", stream=second)
    except kvswap.Error as error:
        assert ("its copies still run" if one_stream else "gave no event") in str(error)
        return True
    device.synchronize(PATIENCE)
    gpu_ids, cpu_ids = (ids, ids[::-1]) if direction == H2D else (ids[::-1], ids)
    carry_out(Work(work.nbytes, work.gpu, work.cpu, gpu_ids, cpu_ids, direction), sides.gpu_model, sides.cpu_model)
    sides.check(f"{operation} {nth} on {device.name}")
    return False


@pytest.mark.not_sanitized("refuses one call after the other, as test_faults does")
@pytest.mark.parametrize("one_stream", [False, True])
@pytest.mark.parametrize("operation", ["stream_wait", "event_record"])
def test_what_comes_after_a_burst_that_cannot_be_waited_for(direction: int, operation: str, one_stream: bool) -> None:
    """Its copies may still be under way when all that could tell of them is over: what writes to the same blocks
    is refused, or comes after them."""
    devices = [(nth, tiny_device(seed)) for nth in range(1, 24) for seed in (1, 2, 3)]
    refused = sum(write_twice(device, operation, nth, direction, one_stream) for nth, device in devices)
    assert refused > 0 or (one_stream and operation == "event_record")  # where all may be over by then


@pytest.mark.parametrize("operation", ["", *OPERATIONS])
def test_the_device_is_lost_on_the_way(direction: int, operation: str) -> None:
    """At whatever call: all that is unfinished fails, nothing hangs, and the device says that it is lost."""
    lost = 0
    for nth in range(1, MOST_CALLS if operation == "" else 24):
        device = tiny_device(nth)
        sides, work = Sides(device, MIB), four_bursts(direction)
        sides.prepare(max(work.gpu.end, work.cpu.end))
        before = sides.swap(work, path="burst")
        transfer = None
        try:
            with testing.fault(device, "call", "lose", operation=operation, nth=nth, code=700):
                transfer = sides.swap(work, path="burst")
        except kvswap.DeviceError as error:
            assert error.code == 700
        if not device.lost:
            continue
        lost += 1
        for unfinished in (before, transfer):
            if unfinished is None or unfinished.state == "done":  # the first may have been over by then
                assert unfinished is not transfer or transfer is None
                continue
            with pytest.raises(kvswap.DeviceError):
                unfinished.wait(PATIENCE)
            assert unfinished.failed_positions.tolist() == list(range(work.count))
        with pytest.raises(kvswap.DeviceError, match="lost"):
            sides.swap(work, path="burst")
    assert lost > 0 or operation in ("event_query", "pointer_query"), "no such call was made"


# -- the environment --------------------------------------------------------------------------------------------------

TRY = """
    import numpy as np
    import kvswap
    device = kvswap.Device({device!r})
    gpu, cpu = device.alloc(4096), device.alloc(4096, host=True)
    there = np.frombuffer(cpu, np.uint8)
    for path in {paths}:
        there[:] = np.arange(4096) % 251
        want = there.reshape(64, 64)[:20].copy()
        try:
            tensors = [gpu.ptr, gpu.ptr + 2048], [cpu.ptr, cpu.ptr + 32]
            ids = np.arange(20), np.arange(20)
            for direction in (1, 0):
                transfer = kvswap.swap_cache_all_layers_async(
                    *tensors, 32, 64, 64, *ids, direction, cpu_stride=64, device=device, path=path)
                transfer.wait(30)
                if direction:
                    there[:] = 0
            print(path, transfer.path, bool((there.reshape(64, 64)[:20] == want).all()))
        except kvswap.Error as error:
            print(path, error)
"""


@pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")
@pytest.mark.parametrize(
    ("environment", "answers"),
    [
        (
            {"KVSWAP_DISABLE": "burst"},
            {"burst": "path 'burst' is off: KVSWAP_DISABLE names 'burst'", "kernel": "kernel True"},
        ),
        (
            {"KVSWAP_DISABLE": "kernel"},
            {
                "burst": "path 'burst' is off: KVSWAP_DISABLE names 'kernel'",
                "kernel": "path 'kernel' is off: KVSWAP_DISABLE names 'kernel'",
                "strided": "strided True",
            },
        ),
        ({"KVSWAP_DISABLE": "strided"}, {"strided": "strided True", "burst": "burst True"}),
        ({"KVSWAP_DISABLE": "batch"}, {"burst": "burst True", "dma": "dma True"}),
        ({"KVSWAP_DISABLE": "burst,kernel,strided,batch"}, {"dma": "dma True"}),
        ({"KVSWAP_PATH": "burst"}, {"auto": "burst True", "dma": "dma True", "kernel": "kernel True"}),
        ({"KVSWAP_PATH": "kernel"}, {"auto": "kernel True", "burst": "burst True"}),
    ],
    ids=lambda value: " ".join(value.values()) if isinstance(value, dict) and len(value) == 1 else "",
)
def test_the_environment(device: kvswap.Device, environment: dict[str, str], answers: dict[str, str]) -> None:
    usable(device, "kernel")
    run = run_python(TRY.format(device=device.name, paths=list(answers)), **environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [f"{path} {answer}" for path, answer in answers.items()]


BATCHES = """
    import numpy as np
    import kvswap
    from kvswap import testing
    device = kvswap.Device("host:0")
    gpu, cpu = device.alloc(4096), device.alloc(4096, host=True)
    ids = np.arange(20), np.arange(20)[::-1].copy() * 3
    for path in ("dma", "burst"):
        before = device.stats()["second_attempts"]
        with testing.fault(device, "call", "fail", operation="copy_batch", every=1):
            transfer = kvswap.swap_cache_per_layer_async(
                gpu.ptr, cpu.ptr, 64, 64, 64, *ids, 0, device=device, path=path)
            transfer.wait(30)
        print(path, transfer.path, device.stats()["second_attempts"] - before)
"""


@pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")
def test_no_batch_is_queued_where_the_environment_says_so() -> None:
    """Neither by copies nor by bursts: a batch that is refused is seen, since another attempt follows."""
    wanted = {"batch": ["dma dma 0", "burst burst 0"], "strided": ["dma dma 0", "burst dma 1"]}
    for off, lines in wanted.items():
        run = run_python(BATCHES, KVSWAP_DISABLE=off)
        assert (run.returncode, run.stdout.splitlines()) == (0, lines), run


@pytest.mark.parametrize(
    ("mode", "size", "calls"),
    [(0, 1024, [16, 16, 32, 64, 128, 128]), (1, 1024, [16, 16, 32, 32, 32]), (1, 32768, [16, 16, 32, 64, 128, 256])],
)
def test_batches_begin_short(mode: int, size: int, calls: list[int]) -> None:
    """The k-th call is there if the device that it loses is lost. Copies of under 28 KiB H2D go in short ones."""
    rng = np.random.default_rng(2)
    memory = rng.integers(0, 256, (2, 1024, size), np.uint8)

    def lost(count: int, path: Path, k: int) -> bool:
        device = testing.deterministic_device(1)
        memory[1 - mode] = 0
        ids = rng.permutation(512)[:count], rng.permutation(512)[:count] * 2  # no two are neighbours on the host
        with testing.fault(device, "call", "lose", operation="copy_batch", nth=k, code=700):
            try:
                swap = kvswap.swap_cache_per_layer_async(
                    memory[0].ctypes.data, memory[1].ctypes.data, size, 1024, 1024, *ids, mode, device=device, path=path
                )
                swap.wait(30)
            except kvswap.DeviceError:
                return True
        assert swap.path == path and np.array_equal(memory[0, ids[0]], memory[1, ids[1]])
        return False

    checked: dict[Path, int] = {"dma": len(calls), "burst": 2}  # each burst begins anew
    for path, few in checked.items():
        for k, count in enumerate(itertools.accumulate(calls[:few]), 1):
            assert lost(count, path, k) and not lost(count, path, k + 1), (path, k)


def use_costs(device: kvswap.Device, price: Callable[[str], tuple[float, float, float]]) -> None:
    """price: of a path, the start, and each row in both of their kinds, of any size."""
    costs = _C._costs_read(None)
    for paths in (costs["d2h"], costs["h2d"]):
        for path, cost in paths.items():
            start, each, run = price(path)
            cost["start"], cost["extra"] = start, 0.0
            cost["each"], cost["run"] = [each] * len(cost["each"]), [run] * len(cost["run"])
    bindings.costs_use(device, costs)


@pytest.mark.parametrize(
    ("other", "slower", "taken_of_few", "taken_of_many"),
    [
        ("dma", 0.9, "burst", "burst"),
        ("dma", 0.98, "dma", "burst"),
        ("dma", 1.2, "dma", "burst"),
        ("dma", 1.4, "dma", "dma"),
        ("kernel", 1.005, "burst", "burst"),
        ("kernel", 1.2, "kernel", "kernel"),
    ],
)
def test_auto_bursts_many_copies(
    direction: int, other: str, slower: float, taken_of_few: str, taken_of_many: str
) -> None:
    """Submitting many copies takes the caller's time, and a kernel takes the model's. So with many copies `auto` takes
    a burst that is a little slower, and with few it takes copies that are a little slower than a burst, except at
    priority `high`, which ignores the model."""
    device = testing.deterministic_device(1)
    sides = Sides(device, 16 * MIB)
    # So long that the extra cost of a list's first copies does not matter.
    each = {other: 1e5, "burst": 1e5 * slower}
    use_costs(device, lambda path: (1.0, each.get(path, 1e9), each.get(path, 1e9) if path == "kernel" else 0.0))

    def taken(count: int, priority: Priority = "normal") -> str:
        ids = np.random.default_rng(1).permutation(count)
        few = replace(plain(4096, 1, count, direction), gpu_ids=ids, cpu_ids=np.arange(count))
        return sides.run(few, priority=priority).path

    assert [taken(500), taken(2000)] == [taken_of_few, taken_of_many]
    assert taken(500, "high") == ("burst" if slower < 1 else other)


def test_auto_leaves_large_copies_to_the_copy_engine(direction: int) -> None:
    """Bursts that are 6 % faster are taken for blocks below 512 KiB; for larger ones they must be 8 % faster."""
    device = testing.deterministic_device(1)
    sides, ids = Sides(device, 16 * MIB), np.arange(12)[::-1]  # no two are one copy

    def taken(size: int, faster: float, priority: Priority = "normal") -> str:
        each = {"dma": 1e6, "burst": 1e6 / faster}
        use_costs(device, lambda path: (1.0, each.get(path, 1e9), 1e9 if path == "kernel" else 0.0))
        large = replace(plain(size, 1, 12, direction), gpu_ids=ids, cpu_ids=np.arange(12))
        return sides.run(large, priority=priority).path

    assert [taken(256 << 10, 1.06), taken(512 << 10, 1.06), taken(512 << 10, 1.1)] == ["burst", "dma", "burst"]
    assert taken(512 << 10, 1.06, "high") == "burst"


def test_auto_knows_that_layers_are_launches(direction: int) -> None:
    """With layer events path kernel launches once for each group of layers of about 2 MiB. A kernel that is a tenth
    faster than bursts is slower with several launches; a transfer below 2 MiB has one."""
    device = testing.deterministic_device(1)
    sides, of_both = Sides(device, 16 * MIB), {"kernel": (1e5, 1e5), "burst": (1.1e5, 0.0)}
    use_costs(device, lambda path: (1.0, *of_both.get(path, (1e9, 1e9))))
    large, small = plain(4096, 8, 100, direction), plain(4096, 8, 50, direction)
    ways = [(large, False), (large, True), (small, True)]
    taken = [sides.run(work, priority="normal", layer_events=layers).path for work, layers in ways]
    assert taken == ["kernel", "burst", "kernel"]


def test_auto_knows_that_short_runs_of_bursts_begin_slowly(direction: int) -> None:
    """20 runs of 16 KiB are predicted faster than the kernel, but host to device a burst's first ones cost more; those
    of path dma do not."""
    device = testing.deterministic_device(1)
    ids, apart = np.random.default_rng(1).permutation(40)[:20], 2 * np.arange(20)
    sides = Sides(device, 16 * MIB)

    def taken(fast: str, size: int) -> str:
        starts = {fast: 1.0, "kernel": 50e3}
        each = {"dma": 1000.0, "burst": 0.0}[fast]
        use_costs(
            device,
            lambda path: (starts.get(path, 1e9), each if path == fast else 0.0, 1000.0 if path == "burst" else 0.0),
        )
        few = replace(plain(size, 1, 40, direction), gpu_ids=ids, cpu_ids=apart)
        return sides.run(few, priority="normal").path

    assert [taken("burst", 16 << 10), taken("burst", 28 << 10)] == ["kernel" if direction == 1 else "burst", "burst"]
    assert [taken("dma", 16 << 10), taken("dma", 28 << 10)] == ["dma", "dma"]


def test_auto_leaves_out_what_is_off(device: kvswap.Device) -> None:
    usable(device, "kernel")
    for off in ("burst", "kernel,burst", "strided"):
        script = """
            import numpy as np
            import kvswap
            from kvswap import _C, _testing, testing
            device = testing.deterministic_device(1)
            memory = np.zeros(1 << 16, np.uint8)
            at = memory.ctypes.data
            for cheap in ("burst", "kernel", "strided"):
                costs = _C._costs_read(None)
                for paths in (costs["d2h"], costs["h2d"]):
                    for path, cost in paths.items():
                        cost["start"] = 1.0 if path == cheap else 1e6 if path == "dma" else 1e9
                _testing.costs_use(device, costs)
                swap = kvswap.swap_cache_all_layers_async(
                    [at, at + 8192], [at + 32768, at + 32800], 32, 64, 64, [1, 5, 3, 9, 20], [2, 7, 4, 30, 11], 0,
                    cpu_stride=64, device=device)
                swap.wait(30)
                print(cheap, swap.path)
        """
        run = run_python(script, KVSWAP_DISABLE=off)
        assert run.returncode == 0, run.stderr
        wanted = [f"{cheap} {'dma' if cheap in off else cheap}" for cheap in ("burst", "kernel", "strided")]
        if "kernel" in off:
            wanted[0] = "burst dma"
        assert run.stdout.splitlines() == wanted


ONE_QUEUE = """
    import numpy as np
    import kvswap
    from kvswap import _C, _testing, testing
    device = testing.deterministic_device(1)
    memory = np.zeros(1 << 21, np.uint8)
    gpu, cpu = memory.ctypes.data, memory.ctypes.data + (1 << 20)
    ids = [1, 5, 3, 9, 7], [2, 7, 4, 1, 11]
    layers = {"layers": [gpu, gpu + (1 << 18)], "one": [gpu]}
    for cheap in ("kernel", "burst"):
        costs = _C._costs_read(None)
        for paths in (costs["d2h"], costs["h2d"]):
            for path, cost in paths.items():
                cost["start"] = {cheap: 1.0, "strided": 1e5, "dma": 1e6}.get(path, 1e9)
        _testing.costs_use(device, costs)
        for of, size in (("one", 16384), ("one", 16383), ("layers", 8192)):
            for mode in (0, 1):
                taken = []
                for priority in ("normal", "background", "high"):
                    swap = kvswap.swap_cache_all_layers_async(
                        layers[of], [cpu + at - gpu for at in layers[of]], size, 12, 12, *ids, mode, device=device,
                        priority=priority)
                    swap.wait(30)
                    taken.append(swap.path)
                print(cheap, of, size, mode, *taken)
"""


def test_with_one_queue_auto_leaves_kernels_out() -> None:
    """Where there is another way: 2-D copies, or copies that are large enough."""
    for queues in ("1", "32"):
        run = run_python(ONE_QUEUE, CUDA_DEVICE_MAX_CONNECTIONS=queues)
        assert run.returncode == 0, run.stderr
        wanted = []
        for cheap in ("kernel", "burst"):
            for what, careful in (("one 16384", "dma"), ("one 16383", cheap), ("layers 8192", "strided")):
                path = careful if queues == "1" else cheap
                wanted += [f"{cheap} {what} {mode} {path} {path} {cheap}" for mode in (0, 1)]
        assert run.stdout.splitlines() == wanted
