"""Every call of the driver may fail. Whatever fails, either the call raises and nothing has moved, or the transfer says
exactly which blocks are lost; the lane goes on; and a copy that silently does not happen is noticed by those who look
at bytes."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Cache, Gate, bindings, check_pattern, usable, write_pattern

import kvswap
from kvswap import testing

OPERATIONS = (
    "stream_info",
    "stream_create",
    "stream_wait",
    "event_create",
    "event_record",
    "event_query",
    "event_elapsed",
    "copy",
    "copy_batch",
    "copy_direct",
    "launch",
    "pointer_query",
    "host_alloc",
    "alloc",
)
BLOCKS = 200


@pytest.fixture(params=[0, 1], ids=["D2H", "H2D"])
def cache(request: pytest.FixtureRequest, device: kvswap.Device) -> Cache:
    return Cache(device, BLOCKS, 72, int(request.param))


def permutations(seed: int, count: int = 150) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.permutation(BLOCKS)[:count], rng.permutation(BLOCKS)[:count]


def check_result(cache: Cache, transfer: kvswap.Transfer, gpu_ids: Any, cpu_ids: Any, code: int) -> bool:
    """The transfer tells the truth about every block; whether any is lost."""
    try:
        transfer.wait(PATIENCE)
        failed = np.array([], np.int64)
    except kvswap.Error as error:
        if isinstance(error, kvswap.DeviceError):
            assert error.code == code
        failed = transfer.failed_positions
        assert failed.size > 0
        assert transfer.state == "failed"
    kept = np.delete(np.arange(len(gpu_ids)), failed)
    there, expected = cache.target.get(), cache.expected(gpu_ids[kept], cpu_ids[kept])
    lost = (gpu_ids if cache.direction else cpu_ids)[failed]
    for array in (there, expected):  # what is lost is lost: its bytes may be anything
        array.reshape(BLOCKS, -1)[lost] = 0
    np.testing.assert_array_equal(there, expected)
    return bool(failed.size)


def fail_nth(cache: Cache, nth: int, path: str, operation: str, on_stream: bool, every: int = 0) -> str:
    """What came of a submission whose nth call of the driver failed."""
    gpu_ids, cpu_ids = permutations(nth)
    options: dict[str, Any] = {"path": path}
    if on_stream:
        options["stream"] = kvswap.Stream(cache.device)
    cache.target.put(cache.target_before)
    submitted = cache.device.stats()["submitted"]
    try:
        with testing.fault(cache.device, "call", "fail", operation=operation, nth=nth, every=every, code=33):
            transfer = cache.swap(gpu_ids, cpu_ids, **options)
    except (kvswap.DeviceError, ValueError) as error:
        if isinstance(error, kvswap.DeviceError):
            assert error.code == 33
        cache.device.synchronize(PATIENCE)
        cache.check_untouched()
        assert cache.device.stats()["submitted"] == submitted
        outcome = "raised"
    else:
        lost = check_result(cache, transfer, gpu_ids, cpu_ids, 33)
        outcome = "lost" if lost else "done"
    stats = cache.device.stats()
    assert stats["unfinished"] == 0
    cache.target.put(cache.target_before)
    again = cache.swap(gpu_ids, cpu_ids, **options)
    again.wait(PATIENCE)
    cache.check(gpu_ids, cpu_ids)
    return outcome


@pytest.mark.parametrize("on_stream", [False, True], ids=["None", "S"])
def test_the_nth_call_fails(cache: Cache, path: str, on_stream: bool) -> None:
    outcomes = [fail_nth(cache, nth, path, "", on_stream) for nth in range(1, 40)]
    assert "raised" in outcomes
    assert outcomes[-1] == "done", "there are more calls than the test goes through"


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("every", [0, 1], ids=["once", "always"])
def test_a_member_fails(cache: Cache, path: str, operation: str, every: int) -> None:
    for nth in range(1, 9):
        fail_nth(cache, nth, path, operation, True, every)


def test_everything_fails(cache: Cache, path: str) -> None:
    for nth in range(1, 30):
        fail_nth(cache, nth, path, "", True, every=1)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_delayed_call_changes_nothing(cache: Cache, path: str, operation: str) -> None:
    gpu_ids, cpu_ids = permutations(5)
    with testing.fault(cache.device, "call", "delay", operation=operation, delay=0.002):
        transfer = cache.swap(gpu_ids, cpu_ids, path=path, stream=kvswap.Stream(cache.device))
    assert not check_result(cache, transfer, gpu_ids, cpu_ids, 0)


@pytest.mark.parametrize(("nth", "every"), [(1, 0), (150, 0), (1, 1), (7, 13), (2, 2), (151, 1)])
def test_copies_fail(cache: Cache, path: str, nth: int, every: int) -> None:
    """No two blocks of these lists are neighbours: the copies are the blocks, and the lost ones are counted exactly."""
    gpu_ids, cpu_ids = np.arange(0, 200, 2), np.random.default_rng(1).permutation(100) * 2
    with testing.fault(cache.device, "copy", "fail", nth=nth, every=every, code=44):
        transfer = cache.swap(gpu_ids, cpu_ids, path=path)
    check_result(cache, transfer, gpu_ids, cpu_ids, 44)
    expected = 0 if nth > 100 else 1 if every == 0 else 1 + (100 - nth) // every
    assert transfer.failed_positions.size == expected
    untouched = gpu_ids if cache.direction else cpu_ids
    there, before = cache.target.get().reshape(BLOCKS, -1), cache.target_before.reshape(BLOCKS, -1)
    lost = untouched[transfer.failed_positions]
    np.testing.assert_array_equal(there[lost], before[lost])


@pytest.mark.parametrize("every", [1, 3, 50, 100])
def test_skipped_copies_are_noticed(cache: Cache, path: str, every: int) -> None:
    """The transfer believes that it is done. The checker of patterns, which shares nothing with copies, does not."""
    usable(cache.device, "kernel")
    ids, nbytes = np.arange(0, 200, 2), 72
    source = (cache.cpu if cache.direction else cache.gpu).ptr + ids * nbytes
    target = cache.target.ptr + ids * nbytes
    stream = kvswap.Stream(cache.device)
    write_pattern(cache.device, source, nbytes, ids, stream).result(PATIENCE)
    with testing.fault(cache.device, "copy", "skip", every=every):
        transfer = cache.swap(ids, ids, path=path, stream=stream)
    wrong, item, offset = check_pattern(cache.device, target, nbytes, ids, stream).result(PATIENCE)
    transfer.wait(PATIENCE)
    assert transfer.state == "done"
    there = cache.target.get().reshape(BLOCKS, nbytes)
    before = cache.target_before.reshape(BLOCKS, nbytes)
    skipped = [i for i in range(100) if (there[ids[i]] == before[ids[i]]).all()]
    assert len(skipped) == 100 // every
    assert wrong > 70 * len(skipped)
    assert (item, offset is not None and offset < 3) == (skipped[0], True)
    with testing.fault(cache.device, "copy", "skip", nth=10_000):
        cache.swap(ids, ids, path=path, stream=stream).wait(PATIENCE)
    assert check_pattern(cache.device, target, nbytes, ids, stream).result(PATIENCE) == (0, None, None)


def test_the_code_of_a_refused_end_is_kept(cache: Cache) -> None:
    """Without the event that marks its end the order that stream=S promises cannot be kept: the whole transfer fails,
    and says which call was refused with what."""
    found = 0
    for nth in range(1, 8):
        with testing.fault(cache.device, "call", "fail", operation="event_record", nth=nth, code=33):
            try:
                transfer = cache.swap([1, 5], [2, 9], path="dma", stream=kvswap.Stream(cache.device))
            except kvswap.DeviceError as error:
                assert (error.code, error.operation) == (33, "event_record")
                continue
        cache.device.synchronize(PATIENCE)
        if transfer.done() and transfer.error is None:
            continue
        found += 1
        assert isinstance(transfer.error, kvswap.DeviceError), transfer.error
        assert (transfer.error.code, transfer.error.operation) == (33, "event_record")
        assert transfer.failed_positions.tolist() == [0, 1]
    assert found == 1


@pytest.mark.parametrize("operation", ["event_record", "stream_wait"])
def test_what_is_queued_later_comes_later_all_the_same(cache: Cache, path: str, operation: str) -> None:
    """A transfer whose stream could not be made to wait for it is lost, and its copies run. What the caller queues on
    the stream after it must not be overwritten by them."""
    device, ids, found = cache.device, np.arange(0, 200, 2), 0
    usable(device, "kernel")
    target = cache.target.ptr + ids * cache.nbytes
    cache.swap(ids, ids, path=path).wait(PATIENCE)  # its table of rows is there: each transfer makes the same calls
    for nth in [*range(1, 30)] * 5:  # a transfer now and then makes a call more, and its end is not met at once
        if nth == 1 and found:
            break
        stream, other = kvswap.Stream(device), kvswap.Stream(device)
        with Gate(device) as gate:
            gate.hold(other)
            with testing.fault(device, "call", "fail", operation=operation, nth=nth, code=33):
                try:
                    transfer = cache.swap(ids, ids, path=path, stream=stream, after=[other])
                except kvswap.DeviceError:
                    transfer = None
            written = write_pattern(device, target, cache.nbytes, ids, stream)
            time.sleep(0.002)
            gate.open()
        written.result(PATIENCE)
        device.synchronize(PATIENCE)
        assert check_pattern(device, target, cache.nbytes, ids, stream).result(PATIENCE) == (0, None, None), nth
        found += transfer is not None and transfer.failed_positions.size == 100
    assert found >= 1


def test_looking_whether_a_table_arrived_may_fail(cache: Cache) -> None:
    """It only spares a wait: nothing is lost by it."""
    usable(cache.device, "kernel")
    for nth in range(1, 5):
        blocks = np.random.default_rng(nth).permutation(BLOCKS)[: 20 + nth]
        with testing.fault(cache.device, "call", "fail", operation="event_query", nth=nth, every=1, code=33):
            transfer = kvswap.swap_cache_all_layers_async(
                np.array([cache.gpu.ptr]), np.array([cache.cpu.ptr]), 60 + nth, BLOCKS, BLOCKS, blocks, blocks,
                cache.direction, device=cache.device, path="kernel", gpu_stride=72, cpu_stride=72,
            )  # fmt: skip
        transfer.wait(PATIENCE)


def test_a_wait_that_cannot_poll_says_so(cache: Cache) -> None:
    transfer = cache.swap([1], [2], stream=kvswap.Stream(cache.device))
    cache.device.synchronize(PATIENCE)
    with testing.fault(cache.device, "call", "fail", operation="event_query", every=1, code=9):
        if not transfer.done():
            with pytest.raises(kvswap.DeviceError) as caught:
                transfer.wait(PATIENCE)
            assert caught.value.code == 9
    transfer.wait(PATIENCE)
    cache.check([1], [2])


def test_a_delay_ends_with_its_block(device: kvswap.Device) -> None:
    event, ended = kvswap.Event(device), threading.Event()
    event.record(kvswap.Stream(device))

    def ask() -> None:
        event.synchronize(PATIENCE)
        ended.set()

    thread = threading.Thread(target=ask)
    with testing.fault(device, "call", "delay", operation="event_query", every=1, delay=5 * PATIENCE):
        thread.start()
        assert not ended.wait(0.2)
    assert ended.wait(PATIENCE)
    thread.join(PATIENCE)


def test_faults_end_with_their_block(cache: Cache) -> None:
    for kind, action in (("call", "fail"), ("copy", "fail"), ("copy", "skip")):
        with testing.fault(cache.device, kind, action, every=1):
            pass
        cache.swap([1], [2]).wait(PATIENCE)
        cache.check([1], [2])
        cache.target.put(cache.target_before)


def test_wrong_faults(device: kvswap.Device) -> None:
    for wrong, message in (
        ({"kind": "row"}, "kind.*row"),
        ({"action": "explode"}, "action.*explode"),
        ({"nth": 0}, "nth"),
        ({"operation": "x" * 40}, "operation"),
    ):
        arguments: dict[str, Any] = {"kind": "call", "action": "fail", "nth": 1, "operation": "", **wrong}
        with pytest.raises(ValueError, match=message):
            bindings.set_fault(device, arguments.pop("kind"), arguments.pop("action"), **arguments)
    assert testing.parse_kind("copy") == "copy" and testing.parse_kind("row") is None
    assert testing.parse_action("lose") == "lose" and testing.parse_action("explode") is None


def test_allocation_fails(device: kvswap.Device) -> None:
    for host, operation in ((False, "alloc"), (True, "host_alloc")):
        for member in (operation, "pointer_query"):
            refusal = testing.fault(device, "call", "fail", operation=member, code=3)
            with refusal, pytest.raises(kvswap.DeviceError) as caught:
                device.alloc(64, host=host)
            assert caught.value.code == 3
        device.alloc(64, host=host).free()
    array = np.zeros(4096, np.uint8)
    for member in ("host_register", "pointer_query"):
        with testing.fault(device, "call", "fail", operation=member, code=3), pytest.raises(kvswap.DeviceError):
            device.register(array)
        device.register(array)
        device.unregister(array)


def test_a_fault_of_copies_is_one_of_rows_too(device: kvswap.Device) -> None:
    """Path strided, whose copies are of many blocks' rows, is not taken while single copies are to fail."""
    gpu, cpu = device.alloc(4096), device.alloc(4096, host=True)
    tensors = [gpu.ptr, gpu.ptr + 2048], [cpu.ptr, cpu.ptr + 32]

    def swap() -> kvswap.Transfer:
        return kvswap.swap_cache_all_layers_async(
            *tensors, 32, 64, 64, np.arange(20), np.arange(20), 0, cpu_stride=64, device=device, path="strided"
        )

    swap().wait(PATIENCE)
    with testing.fault(device, "copy", "fail"):
        transfer = swap()
        with pytest.raises(kvswap.DeviceError):
            transfer.wait(PATIENCE)
    assert transfer.failed_positions.size > 0
    swap().wait(PATIENCE)


def test_bindings_that_cannot_be_looked_for_are_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that gave up its rights may not read the package's folder any more."""
    monkeypatch.setitem(sys.modules, "kvswap._testing", None)  # an import fails as where there is no such file

    def refuse(folder: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(kvswap.Error, match=r"whether kvswap has test bindings is not known: .*: Permission denied"):
        testing.deterministic_device(1)
