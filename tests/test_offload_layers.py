"""kvswap.offload: a job whose tensors can be waited for one after another."""

# mypy: ignore-errors

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Gate
from test_offload import Cache, Library, check_both_ways, oracle, plain, specs

import kvswap
from kvswap import testing
from kvswap.offload._layers import places_of, waits_of

PAGES = [512] * 4


@pytest.fixture(params=["numpy", "torch"])
def library(request: pytest.FixtureRequest, device: kvswap.Device) -> Library:
    return Library(str(request.param), device)


def address(tensor: Any) -> int:
    return tensor.data_ptr() if hasattr(tensor, "data_ptr") else tensor.ctypes.data


class Reader:
    """Reads a tensor on the model's stream, as its attention would."""

    def __init__(self, cache: Cache, stream: kvswap.Stream) -> None:
        self.cache, self.stream = cache, stream
        self.copies: list[tuple[int, Any]] = []

    def read(self, tensor: int) -> kvswap.Transfer:
        source = self.cache.gpu[tensor]
        target = self.cache.library.cpu(np.zeros(tuple(source.shape), np.int8))
        self.copies.append((tensor, target))
        sizes = np.array([512 * len(source)], np.int64)
        ends = np.array([address(source)], np.int64), np.array([address(target)], np.int64)
        return kvswap.swap_blocks_batch(*ends, sizes, stream=self.stream, device=self.cache.library.device)

    def check(self, expected: list[np.ndarray]) -> None:
        for tensor, target in self.copies:
            np.testing.assert_array_equal(self.cache.library.read(target), expected[tensor])


class Held:
    """A load of two groups. Its second transfer waits for a store of its chunks, which a gate holds; its first does
    not. The model computes on a stream of its own."""

    def __init__(self, library: Library, gate: Gate, layered: bool) -> None:
        self.library = library
        self.cache = Cache(library, PAGES, plain(PAGES, 2), 1)
        self.behind, self.compute = kvswap.Stream(library.device), kvswap.Stream(library.device)
        before = self.cache.bytes()  # here: a process's first copy out of a GPU waits for all that is queued on it
        gate.hold(self.behind)
        with library.computing_on(self.behind):
            self.cache.store.transfer_async(1, specs([40, 41], [20, 21], [0, 2], [0, 0]))
        job = [1, 2, 3, 4], [10, 11, 20, 21], [0, 0]
        before[1][1][[20, 21]] = before[0][1][[40, 41]]  # what the store writes
        before[1][3][[20, 21]] = before[0][3][[40, 41]]
        self.expected = oracle(self.cache, before, job, [2, 2], False)[0]
        with library.computing_on(self.compute):
            pair = specs(*job[:2], [2, 2], job[2])
            self.cache.load.transfer_async(2, pair[::-1], layer_events=layered)
        self.reader = Reader(self.cache, self.compute)

    def wait_and_read(self, tensor: int, tensors: list[int] | None) -> kvswap.Transfer:
        with self.library.computing_on(self.compute):
            if self.library.device.kind == "host":
                self.cache.load._compute = lambda: self.compute  # else the caller waits
            self.cache.load.make_wait(2, tensors)
        return self.reader.read(tensor)

    def close(self) -> None:
        self.cache.store.drain(PATIENCE)
        self.cache.load.drain(PATIENCE)
        self.library.device.synchronize(PATIENCE)
        results = self.cache.store.get_finished() + self.cache.load.get_finished()
        assert [result.success for result in results] == [True, True]
        self.reader.check(self.expected)
        self.cache.close()


@pytest.fixture
def gate(device: kvswap.Device) -> Iterator[Gate]:
    with Gate(device) as gate:
        yield gate


def test_a_stream_waits_for_the_tensors_that_it_reads(library: Library, gate: Gate) -> None:
    held = Held(library, gate, True)
    for tensor in (0, 2):
        held.wait_and_read(tensor, [tensor]).wait(PATIENCE)  # they are there: only the second group is held
    late = [held.wait_and_read(tensor, [tensor]) for tensor in (1, 3)]
    assert not any(transfer.done() for transfer in late)
    gate.open()
    held.close()


@pytest.mark.parametrize(("layered", "tensors"), [(True, None), (False, [0])], ids=["whole", "without-layers"])
def test_a_stream_waits_for_the_whole_job(
    library: Library, gate: Gate, layered: bool, tensors: list[int] | None
) -> None:
    held = Held(library, gate, layered)
    first = held.wait_and_read(0, tensors)
    assert not first.done()
    gate.open()
    held.close()


def test_where_the_model_has_no_stream_the_caller_waits(library: Library, gate: Gate) -> None:
    if library.device.kind != "host":
        pytest.skip("a GPU's model has a stream")
    held = Held(library, gate, True)
    held.cache.load.make_wait(2, [0, 2])  # returns: they are there
    held.cache.load.wait_timeout = 0.05
    with pytest.raises(TimeoutError, match="layer 1 of a load has not arrived"):
        held.cache.load.make_wait(2, [1, 3])
    with pytest.raises(TimeoutError):
        held.cache.load.make_wait(2)
    gate.open()
    held.cache.load.wait_timeout = PATIENCE
    held.cache.load.make_wait(2, [1, 3])
    held.close()


def test_jobs_in_layers_move_the_same_bytes_on_every_path(library: Library, path: str) -> None:
    pages = [512, 256, 1024, 512, 256, 1024]
    for together in (False, True):
        cache = Cache(library, pages, plain(pages, 2), 3, together=together, path=path)
        for handler in (cache.store, cache.load):
            submit = handler.transfer_async
            handler.transfer_async = lambda *args, submit=submit: submit(*args, layer_events=True)
        check_both_ways(cache, [7, 5], seed=3)


def test_a_job_that_is_not_there_is_not_waited_for(library: Library) -> None:
    cache = Cache(library, PAGES, plain(PAGES), 1)
    cache.load.make_wait(7)
    gpu, cpu = specs([1], [2], [1], [0])
    cache.load.transfer_async(1, (cpu, gpu), layer_events=True)
    assert cache.finish(cache.load)[0].success
    cache.load.make_wait(1, [0])
    cache.close()


def test_a_known_failure_is_raised(library: Library) -> None:
    cache = Cache(library, PAGES, plain(PAGES), 1)
    gpu, cpu = specs([1], [2], [1], [0])
    with testing.fault(library.device, "copy", "fail"):
        cache.store.transfer_async(1, (gpu, cpu))
        cache.store.drain(PATIENCE)
    cache.load.transfer_async(2, (cpu, gpu), layer_events=True)  # of a chunk that was not stored
    with pytest.raises(kvswap.Error, match="does not hold what it should"):
        cache.load.make_wait(2, [0])
    results = cache.finish(cache.store) + cache.finish(cache.load)
    assert [result.success for result in results] == [False, False]
    cache.close()


def test_a_tensors_last_part_is_waited_for() -> None:
    order = ((0, (0, 0, 2), True), (1, (1, 0), True), (2, (5,), True))
    places = places_of(order, [True, True, False])
    assert places == (2, {0: ((0, 1), (1, 1)), 2: ((0, 2),), 1: ((1, 0),)})
    first, second = object(), object()
    assert waits_of([first, second], places, [0, 1]) == [(first, 1), (second, 1)]
    assert waits_of([first, second], places, [2]) == [(first, 2)]
    assert waits_of([first, second], places, [7]) == []  # it is in none
    assert waits_of([first], places, [2]) == [(first, None)]  # a part of the job was refused
    assert waits_of([first, second], None, [2]) == [(first, None), (second, None)]
    assert places_of(((0, (0,), False),), [True]) is None and places_of(((0, (0,), False),), [False]) == (0, {})


def test_the_order_of_a_map(library: Library) -> None:
    cache = Cache(library, PAGES, plain(PAGES, 2), 2)
    assert cache.load._map.order == ((0, (0, 2), True), (1, (1, 3), True))
    cache.close()


def test_a_job_takes_no_events_of_layers() -> None:
    cache = Cache(Library("numpy", kvswap.Device("host:0")), [64], plain([64]), 1)
    with pytest.raises(TypeError, match="after_layers"):
        cache.load._map.submit([1], [2], [1], [0], 1, after_layers=[None])
    cache.close()


def test_an_error_keeps_no_callers_frame() -> None:
    """What a caller has goes when the caller returns, not when the collector comes: it may be memory."""

    class Mine: ...

    def call() -> weakref.ref[Mine]:
        mine = Mine()
        try:
            cache.load.make_wait(1)
        except kvswap.Error:
            return weakref.ref(mine)
        raise AssertionError("the load did not fail")

    device = kvswap.Device("host:0")
    cache = Cache(Library("numpy", device), [64], plain([64]), 1)
    with testing.fault(device, "copy", "fail"):
        cache.load.transfer_async(1, specs([1], [2], [1], [0])[::-1])
    device.synchronize(PATIENCE)
    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()
    cache.load.drain(PATIENCE)
    assert not cache.load.get_finished()[0].success
    cache.close()
