"""kvswap.offload: a job whose tensors can be waited for one after another."""

# mypy: ignore-errors

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Gate, seam
from test_offload import Cache, Library, check_both_ways, oracle, plain, specs

import kvswap
from kvswap import testing
from kvswap.offload import CanonicalKVCacheRef
from kvswap.offload._layers import by_parts, places_of, waits_of

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
        held.wait_and_read(tensor, [tensor]).wait(PATIENCE)  # already loaded: only the second group is held
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


# -- parts of a tensor's blocks ---------------------------------------------------------------------------------------

WHOLE, PARTS = 2048, [[(512, 1024), (0, 512), (1024, 2048)]]  # in the order in which they are moved


def copies_of(cache: Cache, layered: bool) -> int:
    """Of a load of three blocks that lie apart."""
    gpu, cpu = specs([1, 5, 9], [2, 6, 10], [3], [0])
    before = cache.library.device.stats()["copies"]
    cache.load.transfer_async(1, (cpu, gpu), layer_events=layered)
    assert cache.finish(cache.load)[0].success
    return int(cache.library.device.stats()["copies"]) - before


def test_only_a_job_in_layers_moves_parts(library: Library) -> None:
    """Else a block is one copy."""
    cache = Cache(library, [WHOLE], plain([WHOLE]), 1, layer_parts=PARTS)
    assert cache.load.layer_parts == (tuple(PARTS[0]),)
    assert [copies_of(cache, layered) for layered in (False, True)] == [3, 9]
    cache.close()


@pytest.mark.parametrize(("path", "expected"), [("auto", "dma"), ("burst", "burst"), ("kernel", "kernel")])
def test_parts_are_copied_by_the_copy_engine(library: Library, path: str, expected: str) -> None:
    """Unless the caller names another path."""
    cache = Cache(library, [WHOLE], plain([WHOLE]), 1, layer_parts=PARTS, path=path)
    copies_of(cache, True)
    assert set(cache.load.stats().paths) == {expected}
    cache.close()


@pytest.mark.parametrize("factor", [1, 3])
def test_jobs_in_parts_move_the_same_bytes_on_every_path(library: Library, path: str, factor: int) -> None:
    pages, sizes = [1024, 512, 2048, 256], [7, 5]
    parts = [[(0, 512), (512, 1024)], [(0, 512)], [(1536, 2048), (0, 1536)], [(128, 256), (0, 128)]]
    for together in (False, True):
        for layered in (False, True):
            options = {"together": together, "path": path, "layer_parts": parts}
            refs = plain(pages, 2)
            refs[0].append(refs[1][-1])  # groups share a tensor
            cache = Cache(library, pages, refs, factor, **options)
            for handler in (cache.store, cache.load):
                submit = handler.transfer_async
                handler.transfer_async = lambda *args, submit=submit, layered=layered: submit(
                    *args, layer_events=layered
                )
            check_both_ways(cache, sizes, seed=factor)


def test_a_reference_to_the_beginning_of_a_block_moves_no_more(library: Library) -> None:
    refs = [[CanonicalKVCacheRef(0, 768)]]
    cache = Cache(library, [WHOLE], refs, 1, layer_parts=PARTS)
    assert cache.load._order == ((0, (0,), True), (1, (0, 1), True))
    submit = cache.load.transfer_async
    cache.load.transfer_async = lambda *args: submit(*args, layer_events=True)
    check_both_ways(cache, [7], seed=5)


class InSteps:
    """A load in parts on a device whose work runs step by step, and a model that reads one part after another."""

    def __init__(self, seed: int) -> None:
        self.device = testing.deterministic_device(seed)
        self.cache = Cache(Library("numpy", self.device), [WHOLE], plain([WHOLE]), 1, layer_parts=PARTS)
        self.model = kvswap.Stream(self.device, priority="high")  # it mostly goes on as soon as it may
        self.before = kvswap.Stream(self.device)
        self.read = [np.zeros((2, end - begin), np.int8) for begin, end in PARTS[0]]

    def go(self, waits: list[list[int] | None]) -> tuple[list[bool], bool]:
        """Whether each part had arrived when it was read, and whether one was read before the last had arrived."""
        gpu, cpu = specs([1, 5], [2, 6], [2], [0])
        load, source = self.cache.load, self.cache.cpu[0][[2, 6]].copy()
        with Gate(self.device) as gate:  # else a step in each of these calls would end the load
            gate.hold(self.before)
            load._compute = lambda: self.before
            load.transfer_async(1, (cpu, gpu), layer_events=True)
            load._compute = lambda: self.model
            for part, wait in enumerate(waits):
                if wait != []:
                    load.make_wait(1, wait)
                self.queue_read(part)
            gate.open()
            early = self.run(source)
        right = [
            np.array_equal(read, source[:, begin:end]) for read, (begin, end) in zip(self.read, PARTS[0], strict=True)
        ]
        self.cache.finish(load)
        self.cache.close()
        return right, early

    def run(self, source: np.ndarray) -> bool:
        """To the end; whether the first part was read before the last one was there. By their bytes: asking an event
        would run steps too."""
        early = False
        (begin, end), (last, _) = PARTS[0][0], PARTS[0][-1]
        while testing.step(self.device):
            read = np.array_equal(self.read[0], source[:, begin:end])
            early |= read and not np.array_equal(self.cache.gpu[0][[1, 5], last:], source[:, last:])
        return early

    def queue_read(self, part: int) -> None:
        begin, end = PARTS[0][part]
        for row, block in enumerate((1, 5)):
            places = address(self.read[part][row]), address(self.cache.gpu[0][block]) + begin
            seam(self.device, "copy", *places, end - begin, self.model.handle)


def test_a_part_is_there_when_it_is_waited_for() -> None:
    """In every interleaving; and the first part's wait is not for the last one."""
    found = [InSteps(seed).go([[0], [1], [2]]) for seed in range(1, 41)]
    assert all(right == [True] * 3 for right, _ in found)
    assert any(early for _, early in found)


@pytest.mark.parametrize("waits", [[[], [0], [1]], [[0], [0], [0]]], ids=["too-late", "for-the-first"])
def test_a_wait_for_another_part_is_found(waits: list[list[int]]) -> None:
    """The test above can fail."""
    assert not all(all(InSteps(seed).go(waits)[0]) for seed in range(1, 41))


def test_a_wait_for_the_whole_job_has_all_parts() -> None:
    found = [InSteps(seed).go([None, [], []]) for seed in range(1, 21)]
    assert all(right == [True] * 3 and not early for right, early in found)


def test_a_load_in_parts_waits_for_the_store_of_whole_blocks(library: Library, gate: Gate) -> None:
    """Both are ordered, and their failures known, in common."""
    cache = Cache(library, [WHOLE], plain([WHOLE]), 1, layer_parts=PARTS)
    behind = kvswap.Stream(library.device)
    expected = cache.bytes()[0][0][[40, 41]]
    gate.hold(behind)
    with library.computing_on(behind):
        cache.store.transfer_async(1, specs([40, 41], [20, 21], [2], [0]))
    cache.load.transfer_async(2, specs([1, 2], [20, 21], [2], [0])[::-1], layer_events=True)
    with pytest.raises(TimeoutError):
        cache.load.drain(0.05)
    gate.open()
    assert all(result.success for result in cache.finish(cache.store) + cache.finish(cache.load))
    np.testing.assert_array_equal(cache.bytes()[0][0][[1, 2]], expected)
    cache.close()


def test_a_load_in_parts_of_what_a_failed_store_left_fails(library: Library) -> None:
    cache = Cache(library, [WHOLE], plain([WHOLE]), 1, layer_parts=PARTS)
    gpu, cpu = specs([1], [2], [1], [0])
    with testing.fault(library.device, "copy", "fail"):
        cache.store.transfer_async(1, (gpu, cpu))
        cache.store.drain(PATIENCE)
    cache.load.transfer_async(2, (cpu, gpu), layer_events=True)
    (result,) = cache.finish(cache.load)
    assert "does not hold what it should" in str(result.error)
    cache.store.get_finished()
    cache.close()


@pytest.mark.parametrize(
    "parts",
    [
        [[]],
        [[(0, 512)]],
        [[(0, 512), (512, 1024), (1024, 1024), (1024, 2048)]],
        [[(0, 1024), (512, 2048)]],
        [[(0, 512), (1024, 2048)]],
        [[(0, 1024), (1024, 4096)]],
        [[(0, 2048), (0, 2048)]],
    ],
)
def test_parts_are_the_block_each_once(parts: Any) -> None:
    with pytest.raises(ValueError, match=r"layer_parts\[0\] is .*: together they are the 2048 bytes of a block"):
        Cache(Library("numpy", kvswap.Device("host:0")), [WHOLE], plain([WHOLE]), 1, layer_parts=parts)


def test_parts_belong_to_the_tensors() -> None:
    library = Library("numpy", kvswap.Device("host:0"))
    with pytest.raises(ValueError, match="layer_parts has 2 entries; there are 1 tensors"):
        Cache(library, [WHOLE], plain([WHOLE]), 1, layer_parts=PARTS * 2)
    with pytest.raises(ValueError, match="layer_parts is for one group, or for groups of which each has a tensor"):
        Cache(library, [WHOLE, WHOLE], plain([WHOLE, WHOLE], 2), 1, layer_parts=PARTS * 2)
    with pytest.raises(ValueError, match="takes no layer_parts"):
        Cache(library, [WHOLE], plain([WHOLE]), 1, layer_parts=PARTS, canonical_layout=True)


def test_parts_may_be_in_a_map_several_times() -> None:
    """Once for each place of a block in a chunk, where copies of all blocks would be too many for one group."""
    order = ((2, (0, 0, 1), False), (2, (0, 0, 1), True))
    assert by_parts(order, [(2, 0, 5), (2, 0, 4)]) == ((2, (5, 4, 1), False), (2, (5, 4, 1), True))
