"""The memory of path burst: how much it is, giving it back and growing it, and what comes of transfers meanwhile."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from conftest import PATIENCE, Gate, bindings, run_python, usable
from transfers import GUARD, MIB, TINY, Sides, Work, carry_out, finish, four_bursts, plain, tiny_slots

import kvswap
from kvswap import _C, testing

KIB = 1 << 10


@pytest.fixture(autouse=True)
def _bursts(session_device: kvswap.Device) -> None:
    usable(session_device, "kernel")


@pytest.fixture
def resized(device: kvswap.Device) -> Iterator[kvswap.Device]:
    """A device whose slots the test may change."""
    with tiny_slots(device):
        device.set_slots(2 * TINY, 3)
        yield device


def memory_of(device: kvswap.Device) -> int:
    return int(device.info["slots_nbytes"])


ALLOWED = "2 to 8 of a multiple of 128 KiB, at most 1 GiB; 0 bytes: none"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1, 3), ValueError, f"3 slots of 1 bytes: {ALLOWED}"),
        ((TINY - 1,), ValueError, f"3 slots of {TINY - 1} bytes: {ALLOWED}"),
        ((TINY + 1, 2), ValueError, f"2 slots of {TINY + 1} bytes: {ALLOWED}"),
        ((64 * KIB, 2), ValueError, f"2 slots of {64 * KIB} bytes: {ALLOWED}"),
        (((1 << 30) + TINY, 2), ValueError, f"2 slots of {(1 << 30) + TINY} bytes: {ALLOWED}"),
        ((1 << 63, 2), ValueError, f"2 slots of {1 << 63} bytes: {ALLOWED}"),
        ((TINY, 0), ValueError, f"0 slots of {TINY} bytes: {ALLOWED}"),
        ((TINY, 1), ValueError, f"1 slots of {TINY} bytes: {ALLOWED}"),
        ((TINY, 9), ValueError, f"9 slots of {TINY} bytes: {ALLOWED}"),
        ((TINY, 1 << 40), ValueError, f"slots of {TINY} bytes: {ALLOWED}"),
        ((-1,), ValueError, "slot_nbytes is -1"),
        ((TINY, -1), ValueError, "count is -1"),
        (("1",), TypeError, "slot_nbytes must be an int, not str"),
        ((TINY, 2.0), TypeError, "count must be an int, not float"),
    ],
)
def test_slots_that_there_cannot_be(
    resized: kvswap.Device, arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        resized.set_slots(*arguments)
    for timeout, wrong in ((-1, ValueError), ("1", TypeError)):
        with pytest.raises(wrong, match="timeout"):
            resized.set_slots(TINY, 2, timeout=timeout)
    assert memory_of(resized) == 8 * 2 * TINY and resized.info["burst"] == "on"


@pytest.mark.parametrize(("nbytes", "count"), [(TINY, 2), (TINY, 8), (MIB, 3), (5 * TINY, 7)])
def test_what_slots_take(resized: kvswap.Device, direction: int, nbytes: int, count: int) -> None:
    resized.set_slots(nbytes, count)
    assert memory_of(resized) == 2 * (count * nbytes + nbytes)  # a direction: and two of half as much
    assert Sides(resized, 2 * MIB).run(plain(9000, 2, 60, direction), path="burst").path == "burst"


def cheapest_burst(device: kvswap.Device) -> None:
    """Let AUTO find path burst the fastest."""
    costs = _C._costs_read(None)
    for paths in (costs["d2h"], costs["h2d"]):
        for path, cost in paths.items():
            cost["start"] = 1.0 if path == "burst" else 1e9
    bindings.costs_use(device, costs)


def test_giving_slots_back(direction: int) -> None:
    """Path burst is refused with the reason, AUTO takes another one; and it is all as before once there are slots."""
    device = testing.deterministic_device(3)
    cheapest_burst(device)
    sides, work = Sides(device, 2 * MIB), four_bursts(direction)
    assert sides.run(work).path == "burst"
    for _ in range(3):
        device.set_slots(0)
        assert (memory_of(device), device.info["burst"]) == (0, "its slots were given back")
        with pytest.raises(kvswap.Error, match="path 'burst' is off: its slots were given back"):
            sides.swap(work, path="burst")
        assert sides.run(work).path != "burst"
        with pytest.raises(ValueError, match="at most 1 GiB"):
            device.set_slots(TINY, 9)
        assert device.info["burst"] == "its slots were given back"
        device.set_slots(TINY, 2)
        assert (memory_of(device), device.info["burst"]) == (8 * TINY - 2 * TINY, "on")
        assert sides.run(work).path == "burst"


def test_info_tells_of_slots(resized: kvswap.Device) -> None:
    from kvswap.info import collect

    def line() -> str:
        _, _, text = collect(open_devices=True).to_text().partition(f"\n{resized.name} ")
        return next(line.strip() for line in text.splitlines() if line.strip().startswith("bursts "))

    assert line() == "bursts on; they take 2 MiB of its memory"
    resized.set_slots(0)
    assert line() == "bursts its slots were given back; they take 0 B of its memory"


def test_slots_are_in_use(resized: kvswap.Device, direction: int) -> None:
    """Nothing changes until the transfers have ended."""
    sides, work, held = Sides(resized, MIB), four_bursts(direction), kvswap.Stream(resized)
    sides.prepare(MIB)
    with Gate(resized) as gate:
        gate.hold(held)
        transfer = sides.swap(work, path="burst", stream=held)
        for arguments in ((TINY, 2), (0,), (2 * TINY, 3)):
            with pytest.raises(TimeoutError, match=r"work that may use the slots did not end within 0\.1 s"):
                resized.set_slots(*arguments, timeout=0.1)
            assert memory_of(resized) == 16 * TINY and resized.info["burst"] == "on"
        waiting = threading.Thread(target=resized.set_slots, args=(TINY, 2), kwargs={"timeout": PATIENCE})
        waiting.start()
        gate.open()
        waiting.join(PATIENCE)
        assert memory_of(resized) == 6 * TINY
        transfer.wait(PATIENCE)
        carry_out(work, sides.gpu_model, sides.cpu_model)
        sides.check()
    assert sides.run(work, path="burst").path == "burst"


def test_slots_that_are_still_in_use_of_another_lane(resized: kvswap.Device, direction: int) -> None:
    """A small transfer waited for one slot of a large one of another lane, and ends before that has used the others. (A
    GPU's copy engine takes the lanes' copies as it likes: whether that is met there cannot be said, and all that is
    looked at are the bytes.)"""
    slot_nbytes, seen = 2 * MIB, 0
    room = 46 * slot_nbytes
    large = plain(slot_nbytes // 4, 1, 120, direction)
    spare = plain(slot_nbytes // 4, 1, 32, direction, begin=32 * slot_nbytes)
    small = plain(4 * KIB, 1, 4, direction, begin=room - MIB)
    sides = Sides(resized, room)
    turns = 5 if resized.kind == "cuda" else 30
    for _ in range(turns):
        resized.set_slots(slot_nbytes, 8, timeout=PATIENCE)
        sides.prepare(room)
        transfers = [sides.swap(work, path="burst", stream=kvswap.Stream(resized)) for work in (large, spare, small)]
        for transfer in transfers[1:]:
            transfer.wait(PATIENCE)
        try:
            resized.set_slots(0, timeout=0)
        except TimeoutError:
            seen += 1
        finish(sides, transfers, [large, spare, small])
        resized.set_slots(0, timeout=PATIENCE)
        if seen == 2:
            return
    assert turns < 30, "slots were given back while a transfer used them, or it was over too early each time"


def test_there_is_no_memory_for_slots(direction: int) -> None:
    """Path burst is off then, and says why; what memory there was is whole again."""
    for operation, when in (("alloc", (1,)), ("event_create", (1, 2, 4))):
        for nth in when:
            device = testing.deterministic_device(nth)
            cheapest_burst(device)
            sides, work = Sides(device, MIB), four_bursts(direction)
            refused = testing.fault(device, "call", "fail", operation=operation, nth=nth, code=2)
            with refused, pytest.raises(MemoryError, match=f"{operation} failed with code 2"):
                device.set_slots(TINY, 4)
            assert memory_of(device) == 0 and f"{operation} failed with code 2" in device.info["burst"]
            with pytest.raises(kvswap.Error, match=f"path 'burst' is off: {operation} failed with code 2"):
                sides.swap(work, path="burst")
            assert sides.run(work).path != "burst"
            device.set_slots(TINY, 4)
            assert sides.run(work).path == "burst"


def test_slots_of_a_lost_device() -> None:
    device = testing.deterministic_device(1)
    with testing.fault(device, "call", "lose", operation="event_record", code=719), suppress(kvswap.DeviceError):
        kvswap.Event(device).record(kvswap.Stream(device))
    assert device.lost
    for arguments in ((0,), (TINY, 2)):
        with pytest.raises(kvswap.DeviceError, match="719"):
            device.set_slots(*arguments)


def test_slots_from_two_threads(resized: kvswap.Device) -> None:
    """Two of them change slots over and over while two others transfer: each transfer is right, by whatever path."""
    room, errors, stop = MIB, [], threading.Event()
    sides = Sides(resized, 2 * room)
    sides.prepare(2 * room)
    works = [plain(1000 + i, 3, 90, i % 2, seed=i, begin=GUARD + i * room) for i in range(2)]
    paths: set[str] = set()

    def guarded(what: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            try:
                what()
            except BaseException as error:
                errors.append(error)

        return call

    def transfer(work: Work) -> None:
        stream = kvswap.Stream(resized)
        while not stop.is_set():
            swap = sides.swap(work, path="burst", stream=stream)
            swap.wait(PATIENCE)
            paths.add(swap.path)

    def change(sizes: tuple[int, ...]) -> None:
        for turn in range(60):
            resized.set_slots(sizes[turn % len(sizes)], 2 + turn % 3, timeout=PATIENCE)

    changing = [
        threading.Thread(target=guarded(lambda sizes=sizes: change(sizes))) for sizes in ((TINY, 2 * TINY), (3 * TINY,))
    ]
    moving = [threading.Thread(target=guarded(lambda work=work: transfer(work))) for work in works]
    for thread in (*moving, *changing):
        thread.start()
    for thread in changing:
        thread.join(2 * PATIENCE)
    stop.set()
    for thread in moving:
        thread.join(PATIENCE)
    assert not errors, errors
    for work in works:
        carry_out(work, sides.gpu_model, sides.cpu_model)
    sides.check()
    assert "burst" in paths


def test_bursts_that_the_environment_turns_off(device: kvswap.Device) -> None:
    for name in ("burst", "kernel"):
        script = f"""
            import kvswap
            device = kvswap.Device({device.name!r})
            print(device.info["slots_nbytes"], device.info["burst"])
            print(next(d for d in kvswap.devices() if d.name == device.name).paths["burst"])
        """
        run = run_python(script, KVSWAP_DISABLE=name)
        assert run.returncode == 0, run.stderr
        opened, listed = run.stdout.splitlines()
        assert opened == f"0 {listed}" and listed == f"KVSWAP_DISABLE names '{name}'"
