"""What a transfer's methods return while it runs and after it has ended: done, failed or cancelled."""

# mypy: disable-error-code="comparison-overlap,arg-type"

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Cache, Gate, run_python, seam

import kvswap
from kvswap import _C, testing


@pytest.fixture(params=[0, 1], ids=["D2H", "H2D"])
def cache(request: pytest.FixtureRequest, device: kvswap.Device) -> Cache:
    return Cache(device, 16, 96, int(request.param))


class Blocked:
    """A transfer that cannot begin until the gate is opened."""

    def __init__(self, cache: Cache, **options: Any) -> None:
        self.cache, self.gate = cache, Gate(cache.device)
        self.stream = kvswap.Stream(cache.device)
        self.gate.hold(self.stream)
        self.transfer = cache.swap([1, 2, 5], [4, 5, 0], stream=self.stream, **options)

    def __enter__(self) -> Blocked:
        return self

    def __exit__(self, *error: object) -> None:
        self.gate.__exit__(*error)

    def finish(self) -> None:
        self.gate.open()
        self.transfer.wait(PATIENCE)
        self.cache.check([1, 2, 5], [4, 5, 0])


def test_while_it_runs_and_after(cache: Cache, path: str) -> None:
    with Blocked(cache, path=path) as blocked:
        transfer = blocked.transfer
        assert not transfer.done()
        assert transfer.state == "running"
        assert transfer.elapsed is None
        assert transfer.error is None
        assert transfer.failed_positions.size == 0 and transfer.failed_positions.dtype == np.int64
        assert transfer.cancel() is False
        assert not transfer.event.query()
        assert "running" in repr(transfer)
        with pytest.raises(TimeoutError, match="goes on"):
            transfer.wait(0.01)
        with pytest.raises(TimeoutError):
            transfer.wait(timeout=0)
        assert transfer.state == "running"
        blocked.finish()
        assert transfer.done()
        assert transfer.state == "done"
        assert transfer.error is None
        assert transfer.failed_positions.size == 0
        assert transfer.elapsed is not None and transfer.elapsed >= 0
        assert transfer.event.query()
        assert transfer.cancel() is False
        transfer.wait()
        transfer.wait(timeout=0)
    assert transfer.nbytes == 3 * 96
    assert transfer.num_blocks == 3
    assert transfer.device == cache.device
    direction = "H2D" if cache.direction else "D2H"
    assert re.fullmatch(
        rf"<kvswap\.Transfer {direction} 3 blocks, 288 B, done on {cache.device.name}>", repr(transfer)
    ), repr(transfer)


def test_num_blocks_counts_pairs(device: kvswap.Device) -> None:
    """Positions in failed_positions are below num_blocks, also where there are several tensors."""
    cache = Cache(device, 16, 96)
    ptrs = [cache.gpu.ptr, cache.gpu.ptr + 768], [cache.cpu.ptr, cache.cpu.ptr + 768]
    transfer = kvswap.swap_cache_all_layers_async(*ptrs, 96, 8, 8, [0, 1, 2], [3, 4, 5], 0, device=device)
    transfer.wait(PATIENCE)
    assert (transfer.nbytes, transfer.num_blocks) == (2 * 3 * 96, 3)


def test_sequence_rises_by_one_in_a_lane(cache: Cache) -> None:
    stream = kvswap.Stream(cache.device)
    first = cache.swap([0], [1], stream=stream).sequence
    assert [cache.swap([0], [1], stream=stream).sequence for _ in range(5)] == list(range(first + 1, first + 6))
    cache.device.synchronize(PATIENCE)


def test_elapsed_is_of_the_device(device: kvswap.Device) -> None:
    """What a transfer waits for before it starts is not its own time; its copies are."""
    cache, stream = Cache(device, 4096, 4096), kvswap.Stream(device)
    ids = np.random.default_rng(1).permutation(4096)
    with Gate(device) as gate:
        gate.hold(stream)
        transfer = cache.swap(ids, ids[::-1], stream=stream)
        time.sleep(0.1)
        opened = time.monotonic()
    transfer.wait(PATIENCE)
    assert transfer.elapsed is not None and 0 < transfer.elapsed < time.monotonic() - opened


def test_a_transfer_that_nobody_waits_for(cache: Cache) -> None:
    gc.collect()
    with Blocked(cache) as blocked:
        del blocked.transfer
        gc.collect()
        blocked.gate.open()
        cache.device.synchronize(PATIENCE)
        cache.check([1, 2, 5], [4, 5, 0])
    assert cache.device.stats()["unfinished"] == 0


def test_ids_may_be_freed_at_once(cache: Cache, path: str) -> None:
    gc.collect()
    with Gate(cache.device) as gate:
        stream = kvswap.Stream(cache.device)
        gate.hold(stream)
        gpu_ids, cpu_ids = np.arange(16)[::-1].copy(), np.arange(16)
        transfer = cache.swap(gpu_ids, cpu_ids, stream=stream, path=path)
        gpu_ids[:] = 99
        del gpu_ids, cpu_ids
        gc.collect()
        gate.open()
        transfer.wait(PATIENCE)
    cache.check(np.arange(16)[::-1], np.arange(16))


class Tensor:
    """Something with data_ptr() whose end can be noticed."""

    def __init__(self, ptr: int) -> None:
        self.ptr_ = ptr

    def data_ptr(self) -> int:
        return self.ptr_


def test_tensors_are_held_until_the_end_and_no_longer(cache: Cache) -> None:
    gc.collect()
    with Gate(cache.device) as gate:
        stream, tensor = kvswap.Stream(cache.device), Tensor(cache.cpu.ptr)
        gate.hold(stream)
        transfer = kvswap.swap_cache_per_layer_async(
            cache.gpu.ptr, tensor, 96, 16, 16, [1], [2], cache.direction, stream=stream, device=cache.device
        )
        alive = weakref.ref(tensor)
        del tensor
        gc.collect()
        assert alive() is not None
        gate.open()
        transfer.wait(PATIENCE)
        gc.collect()
        assert alive() is None
    cache.check([1], [2])


def test_tensors_of_a_refused_call_are_not_held(cache: Cache) -> None:
    tensor = Tensor(cache.cpu.ptr)
    with pytest.raises(IndexError):
        kvswap.swap_cache_per_layer_async(cache.gpu.ptr, tensor, 96, 16, 16, [99], [2], 0, device=cache.device)
    alive = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert alive() is None


# -- events -----------------------------------------------------------------------------------------------------------


def test_the_event_given_out_before_the_end(cache: Cache) -> None:
    """It stays this transfer's, although later ones use the lane's events again."""
    with Blocked(cache) as blocked:
        event, again = blocked.transfer.event, blocked.transfer.event
        assert event.handle == again.handle != 0
        later = [cache.swap([1], [2], stream=blocked.stream) for _ in range(20)]
        assert not event.query()
        with pytest.raises(TimeoutError):
            event.synchronize(0.01)
        blocked.gate.open()
        event.synchronize(PATIENCE)
        assert event.query()
        later[-1].wait(PATIENCE)
    with Blocked(cache) as other:
        assert not other.transfer.done()
        assert event.query()


def test_the_event_given_out_after_the_end(cache: Cache) -> None:
    transfer = cache.swap([1], [2])
    transfer.wait(PATIENCE)
    with Blocked(cache) as blocked:
        event = transfer.event
        assert event.query()
        event.synchronize(0)
        assert event.handle != blocked.transfer.event.handle
    assert transfer.event.handle == event.handle


def test_the_event_keeps_the_transfer(cache: Cache) -> None:
    gc.collect()
    with Blocked(cache) as blocked:
        event = blocked.transfer.event
        del blocked.transfer
        gc.collect()
        assert not event.query()
        blocked.gate.open()
        event.synchronize(PATIENCE)
        cache.check([1, 2, 5], [4, 5, 0])


def test_the_event_cannot_be_recorded(cache: Cache) -> None:
    transfer = cache.swap([1], [2])
    with pytest.raises(ValueError, match="marks a transfer's end"):
        transfer.event.record(kvswap.Stream(cache.device))
    transfer.wait(PATIENCE)


def test_a_stream_waits_for_the_event(cache: Cache) -> None:
    with Blocked(cache) as blocked:
        stream = kvswap.Stream(cache.device)
        blocked.transfer.event.wait(stream)
        mark = kvswap.Event(cache.device)
        mark.record(stream)
        assert not mark.query()
        blocked.gate.open()
        mark.synchronize(PATIENCE)
        assert blocked.transfer.done()


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_many_threads_wait_for_one(cache: Cache) -> None:
    with Blocked(cache) as blocked:
        ended, started = [], threading.Barrier(9)

        def wait() -> None:
            started.wait()
            blocked.transfer.wait(PATIENCE)
            ended.append(blocked.transfer.state)

        threads = [threading.Thread(target=wait) for _ in range(8)]
        for thread in threads:
            thread.start()
        started.wait()
        assert ended == []
        blocked.gate.open()
        for thread in threads:
            thread.join(PATIENCE)
        assert ended == ["done"] * 8


def test_other_threads_run_while_one_waits(cache: Cache) -> None:
    """A wait without a limit does not hold the interpreter: another thread can open the gate."""
    with Blocked(cache) as blocked:
        opener = threading.Thread(target=blocked.gate.open)
        started = threading.Event()

        def wait() -> None:
            started.set()
            blocked.transfer.wait()

        waiter = threading.Thread(target=wait)
        waiter.start()
        started.wait()
        opener.start()
        waiter.join(PATIENCE)
        assert not waiter.is_alive()
        opener.join()


def test_the_synchronous_calls_let_other_threads_run(cache: Cache) -> None:
    with Gate(cache.device) as gate:
        stream = kvswap.Stream(cache.device)
        gate.hold(stream)

        def swap() -> None:
            kvswap.swap_cache_per_layer(
                cache.gpu.ptr, cache.cpu.ptr, 96, 16, 16, [1], [2], cache.direction, stream=stream, device=cache.device
            )

        thread = threading.Thread(target=swap)
        thread.start()
        while cache.device.stats()["unfinished"] == 0:
            pass
        assert thread.is_alive()
        gate.open()
        thread.join(PATIENCE)
    cache.check([1], [2])


def test_ctrl_c_breaks_a_wait(cache: Cache) -> None:
    """The signal comes while the main thread waits; the transfer goes on."""
    with Blocked(cache) as blocked:
        waits = (
            blocked.transfer.wait,
            blocked.transfer.event.synchronize,
            blocked.stream.synchronize,
            cache.device.synchronize,
        )
        for wait in waits:
            pressed = threading.Timer(0.02, lambda: os.kill(os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                pressed.start()
                wait()
            pressed.join()
            assert blocked.transfer.state == "running"
        blocked.finish()


def test_ctrl_c_in_a_synchronous_call(cache: Cache) -> None:
    with Gate(cache.device) as gate:
        stream = kvswap.Stream(cache.device)
        gate.hold(stream)
        pressed = threading.Timer(0.02, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            pressed.start()
            kvswap.swap_cache_per_layer(
                cache.gpu.ptr, cache.cpu.ptr, 96, 16, 16, [1], [2], cache.direction, stream=stream, device=cache.device
            )
        pressed.join()
        assert cache.device.stats()["unfinished"] == 1
    cache.check([1], [2])


# -- lanes and their streams ------------------------------------------------------------------------------------------

KINDS = [(direction, priority) for direction in (0, 1) for priority in ("normal", "high", "background")]


def test_a_submission_makes_no_streams(device: kvswap.Device) -> None:
    """A driver may wait for the whole GPU before it makes one. More streams of the caller than there are lanes."""
    caches = {kind: Cache(device, 16, 64, kind[0]) for kind in KINDS}
    streams = [kvswap.Stream(device) for _ in range(50)]
    for (_, priority), cache in caches.items():
        cache.swap([1], [2], stream=streams[0], priority=priority).wait(PATIENCE)
    with testing.fault(device, "call", "fail", operation="stream_create"):
        for stream in streams:
            for (_, priority), cache in caches.items():
                cache.swap([3], [4], stream=stream, priority=priority).wait(PATIENCE)
    for cache in caches.values():
        cache.check([1, 3], [2, 4])


@pytest.mark.host_device
def test_lanes_that_are_at_work_at_once() -> None:
    """Of each kind four are there without a stream that would have to be made; what cannot be made is said."""
    device = testing.deterministic_device(1)
    cache, streams = Cache(device, 16, 64, 0), [kvswap.Stream(device) for _ in range(5)]
    with Gate(device) as gate, testing.fault(device, "call", "fail", operation="stream_create", code=33):
        for stream in streams:
            gate.hold(stream)
        transfers = [cache.swap([i], [i], stream=stream) for i, stream in enumerate(streams[:4])]
        with pytest.raises(kvswap.DeviceError, match="stream_create"):
            cache.swap([4], [4], stream=streams[4])
        transfers += [cache.swap([5 + i], [5 + i], stream=streams[i], priority="background") for i in range(4)]
        gate.open()
        for transfer in transfers:
            transfer.wait(PATIENCE)
        cache.swap([4], [4], stream=streams[4]).wait(PATIENCE)  # on a lane that is idle again
    cache.check(list(range(9)), list(range(9)))


# -- a full lane ------------------------------------------------------------------------------------------------------


def test_a_full_lane(cache: Cache) -> None:
    device = cache.device
    testing.set_lane_depth(device, 3)
    try:
        with Gate(device) as gate:
            stream = kvswap.Stream(device)
            gate.hold(stream)
            held, before = [], device.stats()
            with pytest.raises(kvswap.QueueFull, match=r"unfinished transfers.*limit"):
                for _ in range(129):  # a lane that was made earlier holds as many as lanes then did
                    held.append(cache.swap([1], [2], stream=stream))
            assert len(held) in (3, 128)
            after = device.stats()
            assert after["refused_full"] == before["refused_full"] + 1
            assert after["submitted"] == before["submitted"] + len(held)
            cache.swap([1], [2]).wait(PATIENCE)  # other lanes are not full
            gate.open()
            held[0].wait(PATIENCE)
            transfer = cache.swap([3], [4], stream=stream)
            transfer.wait(PATIENCE)
            assert transfer.sequence == held[-1].sequence + 1
            assert all(t.state == "done" for t in held)
    finally:
        testing.set_lane_depth(device, 128)


@pytest.mark.parametrize("many", [False, True])
def test_a_call_that_waits_for_its_copy_waits_for_room_too(cache: Cache, many: bool) -> None:
    device, stream = cache.device, kvswap.Stream(cache.device)
    function: Any = kvswap.swap_cache_all_layers if many else kvswap.swap_cache_per_layer
    gpu, cpu = ([cache.gpu.ptr], [cache.cpu.ptr]) if many else (cache.gpu.ptr, cache.cpu.ptr)
    arguments = (gpu, cpu, cache.nbytes, cache.blocks, cache.blocks, [3], [4], cache.direction)
    with ThreadPoolExecutor(1) as pool, Gate(device) as gate:
        gate.hold(stream)
        with pytest.raises(kvswap.QueueFull):
            for _ in range(129):
                cache.swap([1], [2], stream=stream)
        refused = device.stats()["refused_full"]
        future = pool.submit(function, *arguments, stream=stream, device=device)
        assert wait([future], 0.3).not_done  # it neither raises nor returns
        gate.open()
        future.result(PATIENCE)
    assert device.stats()["refused_full"] == refused  # no caller was refused
    cache.check([1, 3], [2, 4])


def test_a_wait_for_room_is_part_of_the_duration(cache: Cache) -> None:
    device = cache.device
    arguments = (cache.gpu.ptr, cache.cpu.ptr, cache.nbytes, cache.blocks, cache.blocks, [3], [4], cache.direction)

    def total() -> float:
        rows = [row["paths"] for row in _C._metrics()["devices"] if row["device"] == device.name]
        return sum(path["duration"]["sum"] for path in rows[0])

    def waited(seconds: float) -> float:
        """What a call that waits so long for room adds to the durations."""
        stream, before, held = kvswap.Stream(device), total(), []
        with ThreadPoolExecutor(1) as pool, Gate(device) as gate:
            gate.hold(stream)
            with pytest.raises(kvswap.QueueFull):
                for _ in range(129):
                    held.append(cache.swap([1], [2], stream=stream))
            future = pool.submit(kvswap.swap_cache_per_layer, *arguments, stream=stream, device=device)
            assert wait([future], seconds).not_done
            gate.open()
            future.result(PATIENCE)
        return total() - before - sum(transfer.duration for transfer in held)

    assert any(waited(seconds) > seconds / 2 for seconds in (0.5, 2, 8))  # its thread may start late


# -- failure ----------------------------------------------------------------------------------------------------------


def test_refused_copies(cache: Cache, path: str) -> None:
    """Which blocks are lost is known exactly; the others have arrived, and the lane goes on."""
    gpu_ids, cpu_ids = [15, 3, 4, 5, 9, 0, 12], [0, 7, 8, 9, 2, 15, 4]  # copies: 15 | 3-5 | 9 | 0 | 12
    stream = kvswap.Stream(cache.device)
    with testing.fault(cache.device, "copy", "fail", nth=2, every=2, code=77):
        transfer = cache.swap(gpu_ids, cpu_ids, path=path, stream=stream)
    with pytest.raises(kvswap.DeviceError) as caught:
        transfer.wait(PATIENCE)
    assert caught.value.code == 77
    assert caught.value.operation == "copy"
    assert transfer.state == "failed"
    assert transfer.done()
    assert isinstance(transfer.error, kvswap.DeviceError) and transfer.error.code == 77
    failed = transfer.failed_positions.tolist()
    assert failed == sorted(set(failed)) and 0 < len(failed) < 7
    assert set(failed) & {1, 2, 3} in (set(), {1, 2, 3})  # a run is one copy
    kept = [i for i in range(7) if i not in failed]
    cache.check([gpu_ids[i] for i in kept], [cpu_ids[i] for i in kept])
    later = cache.swap(gpu_ids, cpu_ids, path=path, stream=stream)
    later.wait(PATIENCE)
    assert later.sequence == transfer.sequence + 1
    cache.check(gpu_ids, cpu_ids)
    with pytest.raises(kvswap.DeviceError):
        transfer.wait()
    with pytest.raises(kvswap.DeviceError):
        transfer.make_wait(stream)


def test_a_refused_batch_is_bisected(device: kvswap.Device) -> None:
    """The call that takes a list fails, the copies in it do not: nothing is lost."""
    cache = Cache(device, 300, 64)
    ids = np.random.default_rng(5).permutation(300)
    with testing.fault(device, "call", "fail", operation="copy_batch", every=1):
        transfer = cache.swap(ids, ids[::-1], path="dma")
    transfer.wait(PATIENCE)
    cache.check(ids, ids[::-1])


def test_one_copy_of_a_bisected_batch_fails(device: kvswap.Device) -> None:
    cache = Cache(device, 300, 64)
    ids = np.arange(0, 300, 3)
    batches = testing.fault(device, "call", "fail", operation="copy_batch", every=1)
    with batches, testing.fault(device, "copy", "fail", nth=42, code=5):
        transfer = cache.swap(ids, ids, path="dma")
    with pytest.raises(kvswap.DeviceError, match="5"):
        transfer.wait(PATIENCE)
    lost = transfer.failed_positions.tolist()
    assert len(lost) == 1
    kept = np.delete(ids, lost)
    cache.check(kept, kept)


def test_a_block_of_several_tensors_is_named_once(device: kvswap.Device) -> None:
    cache = Cache(device, 16, 96)
    ptrs = [cache.gpu.ptr, cache.gpu.ptr + 768], [cache.cpu.ptr, cache.cpu.ptr + 768]
    with testing.fault(device, "copy", "fail", every=1):
        transfer = kvswap.swap_cache_all_layers_async(*ptrs, 96, 8, 8, [0, 2, 4], [3, 5, 7], 0, device=device)
    assert not transfer.done() or transfer.state == "failed"
    with pytest.raises(kvswap.DeviceError):
        transfer.wait(PATIENCE)
    assert transfer.failed_positions.tolist() == [0, 1, 2]
    cache.check_untouched()


def test_a_known_failure_is_raised_by_make_wait(cache: Cache) -> None:
    with Gate(cache.device) as gate:
        stream = kvswap.Stream(cache.device)
        gate.hold(stream)
        with testing.fault(cache.device, "copy", "fail"):
            transfer = cache.swap([1], [2], stream=stream)
        assert transfer.state == "running"
        with pytest.raises(kvswap.DeviceError):
            transfer.make_wait(kvswap.Stream(cache.device))
        gate.open()
        with pytest.raises(kvswap.DeviceError):
            transfer.wait(PATIENCE)
    cache.check_untouched()


def test_counters_of_failures(cache: Cache) -> None:
    before = cache.device.stats()
    cache.swap([0], [1]).wait(PATIENCE)
    with testing.fault(cache.device, "copy", "fail"):
        transfer = cache.swap([1], [2])
    with pytest.raises(kvswap.DeviceError):
        transfer.wait(PATIENCE)
    after = cache.device.stats()
    moved = "bytes_h2d" if cache.direction else "bytes_d2h"
    difference = {name: after[name] - before[name] for name in after if name != "paths" and after[name] != before[name]}
    for name in ("lanes", "staging_nbytes"):
        difference.pop(name, None)
    assert difference == {"submitted": 2, "done": 1, "failed": 1, "copies": 2, moved: 96}


LOSS = """
import threading
import time
import kvswap
from conftest import Cache, Gate
from kvswap import _testing, testing

device = kvswap.Device({name!r})
cache, gate, stream = Cache(device, 8, 64), Gate(device), kvswap.Stream(device)
ended = cache.swap([0], [0])
ended.wait(60)
gate.hold(stream)
transfers = [cache.swap([1, 2], [3, 5], stream=stream) for _ in range(3)] + [cache.swap([1], [6], after=stream)]
errors = []
started = threading.Barrier(len(transfers) + 1)

def wait(transfer):
    started.wait()
    try:
        transfer.wait(60)
    except kvswap.DeviceError as error:
        errors.append((error.code, transfer.state))

threads = [threading.Thread(target=wait, args=[transfer]) for transfer in transfers]
for thread in threads:
    thread.start()
started.wait()
_testing.set_fault(device, "call", "lose", code=719)
try:
    device.stats(), kvswap.Stream(device), kvswap.Stream(device)
except kvswap.DeviceError as error:
    assert error.code == 719, error
for thread in threads:
    thread.join(60)
assert errors == [(719, "failed")] * 4, errors
assert device.lost
assert "lost" in repr(device)
assert [t.failed_positions.tolist() for t in transfers] == [[0, 1]] * 3 + [[0]]
assert all(t.error.code == 719 for t in transfers)
assert ended.state == "done" and ended.error is None
for call in (lambda: cache.swap([0], [0]), lambda: device.synchronize(10), lambda: kvswap.Stream(device),
             lambda: kvswap.Event(device), lambda: device.alloc(16), lambda: transfers[0].make_wait(stream)):
    try:
        call()
    except kvswap.DeviceError as error:
        assert error.code == 719, error
    else:
        raise SystemExit("a lost device took work")
gate.open()
del cache, gate, stream, transfers
print("all told")
"""


@pytest.mark.parametrize("name", ["host:0", None])
def test_a_lost_device_is_told_to_every_waiter(name: str | None, device_name: str) -> None:
    if name is None and device_name == "host:0":
        pytest.skip("the device under test is host:0")
    run = run_python(LOSS.format(name=name or device_name))
    assert (run.returncode, run.stdout) == (0, "all told\n"), run.stderr


def test_loss_while_submitting() -> None:
    """The call raises, and what was queued before has failed."""
    for nth in range(1, 25):
        device = testing.deterministic_device(nth)
        cache = Cache(device, 8, 64)
        earlier = cache.swap([0], [7])
        with testing.fault(device, "call", "lose", nth=nth, code=700):
            try:
                cache.swap([1, 3], [5, 2])
            except kvswap.DeviceError as error:
                assert error.code == 700
                assert device.lost
        if device.lost and earlier.error is not None:
            assert isinstance(earlier.error, kvswap.DeviceError) and earlier.error.code == 700
            assert earlier.failed_positions.tolist() == [0]


# -- streams being captured -------------------------------------------------------------------------------------------


def test_a_captured_stream_is_refused(cache: Cache) -> None:
    """A transfer cannot be a part of a graph: said before anything is queued."""
    if cache.device.kind != "host":
        pytest.skip("a real capture is in test_gpu.py")
    stream, idle = kvswap.Stream(cache.device), cache.swap([0], [0])
    idle.wait(PATIENCE)
    before = cache.device.stats()["submitted"]
    with Blocked(cache) as blocked:
        with testing.capture(cache.device, stream):
            for call in (
                lambda: cache.swap([1], [2], stream=stream),
                lambda: cache.swap([1], [2], after=stream),
                lambda: blocked.transfer.make_wait(stream),
                lambda: cache.swap([0], [0], after=[stream, stream]),
            ):
                with pytest.raises(kvswap.Error, match="captured"):
                    call()
            cache.swap([7], [8]).wait(PATIENCE)  # others are not disturbed
            cache.device.set_compute_stream(stream)
            with pytest.raises(kvswap.Error, match=r"compute stream.*captured"):
                cache.swap([1], [2])
            cache.device.set_compute_stream(0)
        assert cache.device.stats()["submitted"] == before + 2
    cache.swap([1], [2], stream=stream).wait(PATIENCE)


def test_types_cannot_be_made(device: kvswap.Device) -> None:
    for made in (kvswap.Transfer, kvswap.Memory, _C._PatternJob):
        with pytest.raises(TypeError):
            made()
    assert seam(device, "check") is None
