"""One list of calls of the seam, made on the device under test and, where that is a GPU, on a host device beside it:
both must answer as the table says. A host device that answers otherwise than a driver is no oracle."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Buffer, Gate, seam

import kvswap
from kvswap import testing

Answer = Any
CASES: dict[str, tuple[Callable[[kvswap.Device], Answer], Answer]] = {}
HOST_ONLY: set[str] = set()  # handles and addresses that a driver may not be asked about


def case(expected: Answer, host_only: bool = False) -> Callable[[Callable[[kvswap.Device], Answer]], Any]:
    """Adds a case to the list with the answer that both devices must give."""

    def add(function: Callable[[kvswap.Device], Answer]) -> Callable[[kvswap.Device], Answer]:
        name = function.__name__
        assert name not in CASES, name
        CASES[name] = (function, expected)
        if host_only:
            HOST_ONLY.add(name)
        return function

    return add


def code(device: kvswap.Device, operation: str, *args: Any) -> Any:
    """The driver's code, 0 for success, or the kind of exception that has no code."""
    try:
        answer = seam(device, operation, *args)
    except kvswap.DeviceError as error:
        return error.code
    except (kvswap.Error, MemoryError, ValueError) as error:
        return type(error).__name__
    if operation.endswith("alloc"):
        seam(device, "free" if operation == "alloc" else "host_free", answer)
    return 0


def at(device: kvswap.Device, nbytes: int = 8192, side: str = "gpu") -> Buffer:
    buffer = Buffer(device, nbytes, side)
    buffer.randomise(nbytes)
    keep.append(buffer)
    return buffer


def stream_of(device: kvswap.Device) -> int:
    """A stream of the device's own that lives as long as the test."""
    keep.append(kvswap.Stream(device))
    return int(keep[-1].handle)


def event_of(device: kvswap.Device, timing: bool = True) -> int:
    keep.append(kvswap.Event(device, timing=timing))
    return int(keep[-1].handle)


keep: list[Any] = []  # what lives until the case has ended


class Registered:
    """Two neighbouring ranges of one mapping, each registered by itself."""

    def __init__(self, device: kvswap.Device, pages: int = 2) -> None:
        self.device, self.page = device, mmap.PAGESIZE
        self.room = Buffer(device, (2 * pages + 1) * self.page, "plain")
        self.base = self.room.ptr + -self.room.ptr % self.page
        self.middle, self.nbytes = self.base + pages * self.page, pages * self.page
        seam(device, "host_register", self.base, self.nbytes)
        seam(device, "host_register", self.middle, self.nbytes)
        keep.append(self)

    def close(self) -> None:
        seam(self.device, "host_unregister", self.base)
        seam(self.device, "host_unregister", self.middle)


# -- memory -----------------------------------------------------------------------------------------------------------


@case((1, 1))
def alloc_of_nothing(d: kvswap.Device) -> Answer:
    return code(d, "alloc", 0), code(d, "host_alloc", 0)


@case(("MemoryError", "MemoryError"))
def alloc_of_too_much(d: kvswap.Device) -> Answer:
    return code(d, "alloc", 1 << 50), code(d, "host_alloc", 1 << 50)


@case([0] * 4)
def addresses_are_aligned(d: kvswap.Device) -> Answer:
    return [Buffer(d, nbytes, side).ptr % 256 for nbytes in (1, 1000) for side in ("gpu", "cpu")]


@case((1, 1))
def free_of_an_unknown_address(d: kvswap.Device) -> Answer:
    return code(d, "free", 0xDEAD000), code(d, "host_free", 0xDEAD000)


@case((1, 1))
def free_inside_an_allocation(d: kvswap.Device) -> Answer:
    return code(d, "free", at(d).ptr + 256), code(d, "host_free", at(d, side="cpu").ptr + 256)


@case((1, 1))
def free_of_the_other_kind(d: kvswap.Device) -> Answer:
    return code(d, "free", at(d, side="cpu").ptr), code(d, "host_free", at(d).ptr)


@case((0, 1))
def free_twice(d: kvswap.Device) -> Answer:
    ptr = seam(d, "alloc", 4096)
    return code(d, "free", ptr), code(d, "free", ptr)


@case((712, 712, 712))
def register_what_is_registered(d: kvswap.Device) -> Answer:
    r = Registered(d)
    return (
        code(d, "host_register", r.base, r.nbytes),
        code(d, "host_register", r.base + r.page, r.nbytes),
        code(d, "host_register", r.base, r.page),
    )


@case(1)
def register_nothing(d: kvswap.Device) -> Answer:
    return code(d, "host_register", Registered(d).base, 0)


@case((713, 713))
def unregister_the_unknown(d: kvswap.Device) -> Answer:
    return code(d, "host_unregister", Registered(d).base + 2 * mmap.PAGESIZE * 100), code(d, "host_unregister", 0x10000)


@case((0, 713, 0, 0))
def unregister_and_register_again(d: kvswap.Device) -> Answer:
    r = Registered(d)
    codes = [code(d, "host_unregister", r.base), code(d, "host_unregister", r.base)]
    codes += [code(d, "host_register", r.base, r.page), code(d, "host_unregister", r.base)]
    seam(d, "host_register", r.base, r.nbytes)
    return tuple(codes)


@case(1)
def register_pinned_memory(d: kvswap.Device) -> Answer:
    return code(d, "host_register", at(d, side="cpu").ptr, 4096)


def region(d: kvswap.Device, ptr: int, base: int) -> tuple[Any, ...]:
    r = seam(d, "pointer_query", ptr)
    return r["memory"], r["base"] - base, r["nbytes"], r["seam"], r["writable"], r["device"]


@case([("device", 0, 5000, True, True, 0)] * 2)
def query_of_device_memory(d: kvswap.Device) -> Answer:
    b = at(d, 5000)
    return [region(d, b.ptr, b.ptr), region(d, b.ptr + 4999, b.ptr)]


@case([("pinned host", 0, 5000, True, True, -1)] * 2)
def query_of_pinned_memory(d: kvswap.Device) -> Answer:
    b = at(d, 5000, "cpu")
    return [region(d, b.ptr, b.ptr), region(d, b.ptr + 4999, b.ptr)]


@case([("pinned host", 0, 8192, True, True, -1)] * 2)
def query_of_registered_memory(d: kvswap.Device) -> Answer:
    r = Registered(d)
    return [region(d, r.base + 4097, r.base), region(d, r.middle, r.middle)]


@case((False, True, -1))
def query_of_plain_memory(d: kvswap.Device) -> Answer:
    b = at(d, 5000, "plain")
    answer = seam(d, "pointer_query", b.ptr)
    return answer["seam"], answer["writable"], answer["device"]


@case("ValueError")
def query_of_nothing(d: kvswap.Device) -> Answer:
    return code(d, "pointer_query", 0x10)


@case(True)
def a_reused_address_is_another_buffer(d: kvswap.Device) -> Answer:
    ptrs: dict[int, int] = {}
    for _ in range(50):
        ptr = seam(d, "alloc", 1 << 20)
        buffer_id = seam(d, "pointer_query", ptr)["buffer_id"]
        seam(d, "free", ptr)
        if ptrs.get(ptr) == buffer_id:
            return False
        ptrs[ptr] = buffer_id
    return True


# -- copies -----------------------------------------------------------------------------------------------------------


@case((0, 0))
def copy_of_nothing(d: kvswap.Device) -> Answer:
    a, b, s = at(d), at(d, side="cpu"), stream_of(d)
    return code(d, "copy", a.ptr, b.ptr, 0, s), code(d, "copy", b.ptr, a.ptr, 0, 0)


@case((0, 1, 1, 0, 0))
def copy_across_two_registrations(d: kvswap.Device) -> Answer:
    r, gpu, s = Registered(d), at(d), stream_of(d)
    return (
        code(d, "copy", gpu.ptr, r.base + 4096, 4096, s),
        code(d, "copy", gpu.ptr, r.base + 4096, 4097, s),
        code(d, "copy", r.middle - 1, gpu.ptr, 2, s),
        code(d, "copy", r.middle - 1, gpu.ptr, 1, s),
        code(d, "copy", r.middle, gpu.ptr, 8192, s),
    )


@case((1, 1))
def copy_beyond_an_allocation(d: kvswap.Device) -> Answer:
    gpu, cpu, s = at(d, 4096), at(d, 1 << 22, "cpu"), stream_of(d)
    return code(d, "copy", cpu.ptr, gpu.ptr, 1 << 22, s), code(d, "copy", gpu.ptr, cpu.ptr, 1 << 22, s)


@case(["equal"] * 6)
def copies_move_bytes(d: kvswap.Device) -> Answer:
    answers = []
    for source, target in (
        ("gpu", "cpu"),
        ("cpu", "gpu"),
        ("gpu", "gpu"),
        ("cpu", "cpu"),
        ("plain", "gpu"),
        ("gpu", "plain"),
    ):
        a, b, s = at(d, side=source), at(d, side=target), kvswap.Stream(d)
        expected = b.get()
        expected[7 : 7 + 4001] = a.get()[3 : 3 + 4001]
        seam(d, "copy", b.ptr + 7, a.ptr + 3, 4001, s.handle)
        s.synchronize(PATIENCE)
        answers.append("equal" if (b.get() == expected).all() else f"{source} to {target} differ")
    return answers


def lists(*columns: list[int]) -> list[np.ndarray[Any, Any]]:
    return [np.array(column, np.uint64) for column in columns]


@case((1, 1, 0, 0))
def batch_on_a_default_stream(d: kvswap.Device) -> Answer:
    a, b = at(d), at(d, side="cpu")
    arguments = lists([b.ptr, b.ptr + 16], [a.ptr + 8, a.ptr], [8, 8])
    return tuple(code(d, "copy_batch", *arguments, stream) for stream in (0, 1, 2, stream_of(d)))


@case((1, True))
def batch_with_one_wrong_entry_copies_nothing_for_sure(d: kvswap.Device) -> Answer:
    r, gpu, s = Registered(d), at(d), kvswap.Stream(d)
    arguments = lists([gpu.ptr, gpu.ptr + 64], [r.base, r.middle - 8], [16, 16])
    answer = code(d, "copy_batch", *arguments, s.handle)
    s.synchronize(PATIENCE)
    return answer, s.query()


@case("equal")
def batch_moves_bytes(d: kvswap.Device) -> Answer:
    a, b, s = at(d), at(d, side="cpu"), kvswap.Stream(d)
    expected, rng = b.get(), np.random.default_rng(3)
    sizes = [int(n) for n in rng.integers(1, 100, 60)]
    sources, targets = rng.permutation(60) * 130, rng.permutation(60) * 130
    for n, i, j in zip(sizes, sources, targets, strict=True):
        expected[j : j + n] = a.get()[i : i + n]
    arguments = lists([b.ptr + int(j) for j in targets], [a.ptr + int(i) for i in sources], sizes)
    seam(d, "copy_batch", *arguments, s.handle)
    s.synchronize(PATIENCE)
    return "equal" if (b.get() == expected).all() else "differ"


def rect(
    d: kvswap.Device, dst: int, src: int, pitches: tuple[int, int], heights: tuple[int, int], box: tuple[int, int, int]
) -> Any:
    stream = kvswap.Stream(d)
    answer = code(d, "copy_rect", dst, src, *pitches, *heights, *box, stream.handle)
    stream.synchronize(PATIENCE)
    return answer


@case((1, 1))
def rect_with_a_pitch_below_the_width(d: kvswap.Device) -> Answer:
    a, b = at(d), at(d, side="cpu")
    return rect(d, b.ptr, a.ptr, (99, 100), (0, 0), (100, 5, 1)), rect(d, b.ptr, a.ptr, (100, 99), (0, 0), (100, 5, 1))


@case((1, 1))
def rect_beyond_the_largest_pitch(d: kvswap.Device) -> Answer:
    a, b = at(d), at(d, side="cpu")
    over = d.info["max_pitch"] + 1
    return rect(d, b.ptr, a.ptr, (over, 100), (0, 0), (16, 2, 1)), rect(
        d, b.ptr, a.ptr, (100, over), (0, 0), (16, 2, 1)
    )


@case(1)
def rect_across_allocations(d: kvswap.Device) -> Answer:
    first, second, b = at(d, 1 << 22), at(d, 1 << 22), at(d, side="cpu")
    low, high = sorted((first.ptr, second.ptr))
    pitch = high - low
    if pitch > d.info["max_pitch"]:
        return 1
    return rect(d, b.ptr, low, (64, pitch), (0, 0), (64, 2, 1))


@case((0, 0, 0))
def rect_of_nothing(d: kvswap.Device) -> Answer:
    a, b = at(d), at(d, side="cpu")
    return tuple(rect(d, b.ptr, a.ptr, (64, 64), (4, 4), box) for box in ((0, 4, 1), (64, 0, 1), (64, 4, 0)))


def boxes_equal(d: kvswap.Device, source: str, target: str, box: tuple[int, int, int]) -> str:
    a, b = at(d, 1 << 16, source), at(d, 1 << 16, target)
    width, height, depth = box
    expected, before = b.get(), a.get()
    for z in range(depth):
        for y in range(height):
            i, j = 5 + (z * 7 + y) * 200, 3 + (z * 6 + y) * 128
            expected[j : j + width] = before[i : i + width]
    answer = rect(d, b.ptr + 3, a.ptr + 5, (128, 200), (6, 7), box)
    return "equal" if answer == 0 and (b.get() == expected).all() else f"{answer}"


@case(["equal"] * 8)
def rects_move_bytes(d: kvswap.Device) -> Answer:
    boxes = ((100, 6, 1), (1, 6, 1), (128, 4, 5), (33, 1, 1))
    return [boxes_equal(d, *sides, box) for sides in (("gpu", "cpu"), ("cpu", "gpu")) for box in boxes]


@case((0, 1, 0, True))
def fills(d: kvswap.Device) -> Answer:
    a, s = at(d), kvswap.Stream(d)
    expected = a.get()
    expected[8:408] = np.full(100, 0x01020304, np.uint32).view(np.uint8)
    answers = (
        code(d, "fill", a.ptr + 8, 0x01020304, 100, s.handle),
        code(d, "fill", a.ptr + 2, 7, 4, s.handle),
        code(d, "fill", a.ptr, 7, 0, s.handle),
    )
    s.synchronize(PATIENCE)
    return (*answers, bool((a.get() == expected).all()))


# -- streams ----------------------------------------------------------------------------------------------------------


@case((True, False, True))
def stream_ids_are_never_used_again(d: kvswap.Device) -> Answer:
    ids, capturing = set(), False
    for _ in range(20):
        stream = kvswap.Stream(d)
        number, captured = seam(d, "stream_info", stream.handle)
        ids.add(number)
        capturing |= captured
    return len(ids) == 20, capturing, 0 not in ids


@case((True, True))
def ids_of_the_default_streams(d: kvswap.Device) -> Answer:
    zero, legacy, thread = (seam(d, "stream_info", handle)[0] for handle in (0, 1, 2))
    return zero == legacy, legacy != thread


@case([0] * 5)
def priorities_are_clamped(d: kvswap.Device) -> Answer:
    codes = []
    for priority in (-1000, -1, 0, 1, 1000):
        handle = seam(d, "stream_create", priority)
        codes.append(code(d, "stream_destroy", handle))
    return codes


@case(True)
def an_idle_stream_is_ready(d: kvswap.Device) -> Answer:
    return seam(d, "stream_query", stream_of(d))


@case((False, True))
def a_busy_stream_is_not_ready(d: kvswap.Device) -> Answer:
    with Gate(d) as gate:
        stream = kvswap.Stream(d)
        gate.hold(stream)
        before = seam(d, "stream_query", stream.handle)
        gate.open()
        stream.synchronize(PATIENCE)
        return before, seam(d, "stream_query", stream.handle)


@case((400, 400), host_only=True)
def handles_that_are_none(d: kvswap.Device) -> Answer:
    return code(d, "stream_query", 0xDEAD), code(d, "event_query", 0xDEAD)


@case((400, 400), host_only=True)
def handles_that_were_given_back(d: kvswap.Device) -> Answer:
    stream, event = seam(d, "stream_create", 0), seam(d, "event_create", True)
    seam(d, "stream_destroy", stream), seam(d, "event_destroy", event)
    return code(d, "stream_query", stream), code(d, "event_query", event)


# -- events -----------------------------------------------------------------------------------------------------------


@case((True, 0))
def an_event_that_was_never_recorded(d: kvswap.Device) -> Answer:
    event = event_of(d)
    return seam(d, "event_query", event), code(d, "stream_wait", stream_of(d), event)


@case((400, 400))
def elapsed_without_timing(d: kvswap.Device) -> Answer:
    stream, plain, timed = kvswap.Stream(d), event_of(d, timing=False), event_of(d)
    for event in (plain, timed):
        seam(d, "event_record", event, stream.handle)
    stream.synchronize(PATIENCE)
    return code(d, "event_elapsed", plain, timed), code(d, "event_elapsed", timed, plain)


@case((400, 400))
def elapsed_of_what_was_never_recorded(d: kvswap.Device) -> Answer:
    stream, recorded, never = kvswap.Stream(d), event_of(d), event_of(d)
    seam(d, "event_record", recorded, stream.handle)
    stream.synchronize(PATIENCE)
    return code(d, "event_elapsed", recorded, never), code(d, "event_elapsed", never, recorded)


@case((600, 0))
def elapsed_before_it_is_reached(d: kvswap.Device) -> Answer:
    stream, first, second = kvswap.Stream(d), event_of(d), event_of(d)
    with Gate(d) as gate:
        seam(d, "event_record", first, stream.handle)
        gate.hold(stream)
        seam(d, "event_record", second, stream.handle)
        early = code(d, "event_elapsed", first, second)
        gate.open()
        stream.synchronize(PATIENCE)
    return early, code(d, "event_elapsed", first, second)


@case((True, True))
def elapsed_measures_a_delay(d: kvswap.Device) -> Answer:
    stream, first, second = kvswap.Stream(d), event_of(d), event_of(d)
    seam(d, "event_record", first, stream.handle)
    testing.delay(d, 0.02, stream)
    seam(d, "event_record", second, stream.handle)
    stream.synchronize(PATIENCE)
    return seam(d, "event_elapsed", first, second) >= 15_000_000, seam(d, "event_elapsed", second, first) == 0


@case((False, False, True))
def waits_hold_the_recording_that_they_saw(d: kvswap.Device) -> Answer:
    """Recording the event again, on a stream that goes on, does not release who waits for the earlier recording."""
    held, free, waiting, event = kvswap.Stream(d), kvswap.Stream(d), kvswap.Stream(d), event_of(d)
    with Gate(d) as gate:
        gate.hold(held)
        seam(d, "event_record", event, held.handle)
        before = seam(d, "event_query", event)
        seam(d, "stream_wait", waiting.handle, event)
        seam(d, "event_record", event, free.handle)
        free.synchronize(PATIENCE)
        still = seam(d, "stream_query", waiting.handle)
        gate.open()
        waiting.synchronize(PATIENCE)
        return before, still, seam(d, "event_query", event)


@case(0)
def an_event_may_be_destroyed_while_waited_for(d: kvswap.Device) -> Answer:
    held, waiting = kvswap.Stream(d), kvswap.Stream(d)
    with Gate(d) as gate:
        gate.hold(held)
        event = seam(d, "event_create", False)
        seam(d, "event_record", event, held.handle)
        seam(d, "stream_wait", waiting.handle, event)
        answer = code(d, "event_destroy", event)
        gate.open()
        waiting.synchronize(PATIENCE)
        return answer


# -- stream memory operations and kernels -----------------------------------------------------------------------------


@case([True, False, True, True])
def a_wait_compares_in_a_circle(d: kvswap.Device) -> Answer:
    """Until (int32)(word - value) >= 0: through the wrap, and not beyond half of it."""
    answers = []
    for word, value in ((5, 5), (4, 5), (3, 0xFFFFFFF0), (0x7FFFFFFF, 0)):
        memory, stream = d.alloc(4, host=True), kvswap.Stream(d)
        flag = ctypes.c_uint32.from_address(memory.ptr)
        flag.value = word
        seam(d, "wait32", memory.ptr, value, stream.handle)
        mark = kvswap.Event(d)
        mark.record(stream)
        try:
            mark.synchronize(0.2 if word == 4 else PATIENCE)
            answers.append(True)
        except TimeoutError:
            answers.append(False)
        flag.value = value
        mark.synchronize(PATIENCE)
    return answers


@case((0, 77, 1, 1))
def words_are_written(d: kvswap.Device) -> Answer:
    b, stream = at(d), kvswap.Stream(d)
    answer = code(d, "write32", b.ptr + 4, 77, stream.handle)
    stream.synchronize(PATIENCE)
    return (
        answer,
        int(b.get()[4:8].view(np.uint32)[0]),
        code(d, "write32", b.ptr + 2, 1, stream.handle),
        code(d, "wait32", b.ptr + 2, 1, stream.handle),
    )


@case(True)
def a_written_word_releases_a_wait(d: kvswap.Device) -> Answer:
    flag, waiting, writing = at(d, 256), kvswap.Stream(d), kvswap.Stream(d)
    flag.put(np.zeros(256, np.uint8))
    seam(d, "wait32", flag.ptr, 9, waiting.handle)
    if seam(d, "stream_query", waiting.handle):
        return "did not wait"
    seam(d, "write32", flag.ptr, 9, writing.handle)
    waiting.synchronize(PATIENCE)
    return seam(d, "stream_query", waiting.handle)


@case((0, 0, 1, 1))
def functions_of_the_host_run_in_their_place(d: kvswap.Device) -> Answer:
    word, stream = d.alloc(64, host=True), kvswap.Stream(d)
    count = ctypes.c_uint32.from_address(word.ptr)
    count.value = 0
    copied = at(d, 4)
    with Gate(d) as gate:
        gate.hold(stream)
        answer = code(d, "call", word.ptr, stream.handle)
        seam(d, "copy", copied.ptr, word.ptr, 4, stream.handle)
        before = count.value
        gate.open()
        stream.synchronize(PATIENCE)
    return answer, before, count.value, int(copied.get()[:4].view(np.uint32)[0])


@case((1, 1, 1, 0))
def launches_of_impossible_shapes(d: kvswap.Device) -> Answer:
    table, stream = at(d, 256), kvswap.Stream(d)
    shapes = ((0, 64), (1, 0), (1, 1025), (1, 64))
    answers = tuple(code(d, "launch_copy", 0, table.ptr, *shape, stream.handle) for shape in shapes)
    stream.synchronize(PATIENCE)
    return answers


# -- the runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tidy() -> Iterator[None]:
    yield
    while keep:
        kept = keep.pop()
        if isinstance(kept, Registered):
            kept.close()


def answer_of(name: str, device: kvswap.Device) -> Answer:
    needs = {"launches_of_impossible_shapes": "kernels", "elapsed_measures_a_delay": "kernels"}
    if name in needs and not device.info[needs[name]]:
        pytest.skip(device.info["kernels_note"])
    return CASES[name][0](device)


@pytest.mark.parametrize("name", CASES)
def test_seam(device: kvswap.Device, name: str, tidy: None) -> None:
    if name in HOST_ONLY and device.kind != "host":
        pytest.skip("a driver may not be asked about handles that are none")
    answers = {device.name: answer_of(name, device)}
    if device.kind != "host":
        answers["host:0"] = answer_of(name, kvswap.Device("host:0"))
    expected = CASES[name][1]
    assert all(answer == expected for answer in answers.values()), f"{name}: expected {expected}, got {answers}"


def test_every_member_is_in_the_list(device: kvswap.Device) -> None:
    """Every member of the seam's table is reachable by name, and an unknown one is an error."""
    with pytest.raises(ValueError, match="no member of the seam"):
        seam(device, "teleport")
    with pytest.raises(TypeError, match="takes 1 numbers"):
        seam(device, "alloc")
    with pytest.raises(TypeError, match="three lists"):
        seam(device, "copy_batch", [])
    assert seam(device, "check") is None
    assert seam(device, "synchronize") is None


def test_captured_streams_refuse_work(device: kvswap.Device) -> None:
    if device.kind != "host":
        pytest.skip("a real capture is in test_gpu.py")
    a, stream, event = at(device), kvswap.Stream(device), kvswap.Event(device)
    with testing.capture(device, stream):
        assert seam(device, "stream_info", stream.handle)[1] is True
        for operation, *args in (
            ("copy", a.ptr, a.ptr + 64, 16),
            ("fill", a.ptr, 1, 1),
            ("write32", a.ptr, 1),
            ("wait32", a.ptr, 0),
            ("call", a.ptr),
            ("stream_query",),
        ):
            with pytest.raises(kvswap.Error, match="captured"):
                seam(device, operation, *args, stream.handle)
        with pytest.raises(kvswap.Error, match="captured"):
            seam(device, "event_record", event.handle, stream.handle)
    assert seam(device, "stream_info", stream.handle)[1] is False
    assert seam(device, "stream_query", stream.handle) is True
    with pytest.raises(kvswap.DeviceError), testing.capture(device, 0):
        pass


def test_copy_direct(device: kvswap.Device) -> None:
    a, b, stream = at(device), at(device, side="cpu"), kvswap.Stream(device)
    arguments = lists([b.ptr, b.ptr + 4096], [a.ptr + 1, a.ptr], [4000, 1])
    if device.kind != "host":
        with pytest.raises(kvswap.Error, match="for host devices"):
            seam(device, "copy_direct", *arguments, stream.handle)
        return
    seam(device, "copy_direct", *arguments, stream.handle)
    stream.synchronize(PATIENCE)
    expected = at(device, side="cpu").get()
    expected[:4000], expected[4096] = a.get()[1:4001], a.get()[0]
    np.testing.assert_array_equal(b.get(), expected)
