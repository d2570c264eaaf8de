"""kvswap.offload with codings: the host's bytes are those of kvswap.codecs. A store whose blocks do not all fit is a
success that names their chunks; a load of such a chunk fails, also one that was queued before the store ended."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Buffer, Bytes, Gate, usable

import kvswap
from kvswap import metrics, testing
from kvswap.codecs import Coding, Field
from kvswap.offload import (
    CanonicalKVCacheRef,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    SingleDirectionOffloadingHandler,
    TransferResult,
)
from kvswap.offload._slab import Slab

PAGE = 4096
PITCH = 256  # K and V of a token
TENSORS = 3
BLOCKS, CHUNKS = 48, 20
FIELDS = [Field(0, PITCH // 2, "bf16"), Field(PITCH // 2, PITCH // 2, "bf16")]


@pytest.fixture(autouse=True)
def _kernels(session_device: kvswap.Device) -> None:
    usable(session_device, "kernel")


def bf16(shape: tuple[int, ...], seed: int) -> Bytes:
    values = np.random.default_rng(seed).standard_normal((*shape[:-1], shape[-1] // 2), np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def unfit(seed: int = 0) -> Bytes:
    """A page whose exponents are random."""
    return np.random.default_rng(seed).integers(0, 256, PAGE, np.uint8)


class Tensor:
    """Blocks of a page in the device's memory, without a library; read and written as rows of bytes."""

    def __init__(self, device: kvswap.Device, blocks: Bytes) -> None:
        self.shape = blocks.shape
        self.memory = Buffer(device, blocks.nbytes)
        self.memory.put(blocks.reshape(-1))
        name = "__cuda_array_interface__" if device.kind == "cuda" else "__array_interface__"
        described = {"shape": self.shape, "typestr": "|i1", "data": (self.memory.ptr, False), "version": 3}
        setattr(self, name, described)

    def get(self) -> Bytes:
        return self.memory.get().reshape(self.shape)

    def __getitem__(self, blocks: Any) -> Bytes:
        return self.get()[blocks]

    def __setitem__(self, blocks: Any, content: Bytes) -> None:
        changed = self.get()
        changed[blocks] = content
        self.memory.put(changed.reshape(-1))


class Cache:
    """Tensors in two groups (0 and 1; 2), and coded chunks."""

    def __init__(
        self, device: kvswap.Device, factor: int = 2, *, codec: str = "exact", row: int = 0, **options: Any
    ) -> None:
        self.factor = factor
        self.gpu = [Tensor(device, bf16((BLOCKS, PAGE), i)) for i in range(TENSORS)]
        self.coding = Coding(PAGE, codec, fields=FIELDS, pitch=PITCH)
        refs = [[CanonicalKVCacheRef(i, PAGE) for i in group] for group in ((0, 1), (2,))]
        size = self.coding.coded_nbytes
        if row:  # as a region of several workers, whose cells lie side by side; this is the second
            cell = factor * TENSORS * size
            self.region = device.alloc(CHUNKS * row * cell, host=True)
            whole = np.frombuffer(self.region, np.int8).reshape(CHUNKS, row, factor, TENSORS, size)
            self.cpu = [whole[:, 1, :, i] for i in range(TENSORS)]
            if factor == 1:
                self.cpu = [each[:, 0] for each in self.cpu]
        else:
            self.slab = Slab(device, [size] * TENSORS, refs, CHUNKS, factor)
            self.cpu = self.slab.tensors(torch=False)
        options = {"codings": [self.coding] * TENSORS, "device": device, "wait_timeout": PATIENCE, **options}
        self.store, self.load = (
            SingleDirectionOffloadingHandler(self.gpu, self.cpu, factor, refs, to_cpu, **options)
            for to_cpu in (True, False)
        )
        self.jobs = 0

    def coded(self, tensor: int, chunk: int, block: int) -> Bytes:
        return self.cpu[tensor].reshape(CHUNKS, self.factor, -1)[chunk, block].view(np.uint8)

    def submit(
        self, handler: Any, blocks: list[int], chunks: list[int], sizes: list[int], indices: list[int], **more: Any
    ) -> int:
        self.jobs += 1
        gpu, cpu = GPULoadStoreSpec(blocks, sizes, indices), CPULoadStoreSpec(chunks)
        handler.transfer_async(self.jobs, gpu if handler is self.store else cpu, cpu if handler is self.store else gpu,
                               **more)  # fmt: skip
        return self.jobs

    def finish(self, handler: Any) -> list[TransferResult]:
        handler.drain(PATIENCE)
        return handler.get_finished()

    def close(self) -> None:
        for handler in (self.store, self.load):
            handler.shutdown(PATIENCE)


@pytest.fixture
def make(device: kvswap.Device) -> Iterator[Any]:
    made: list[Cache] = []

    def make(*args: Any, **options: Any) -> Cache:
        made.append(Cache(device, *args, **options))
        return made[-1]

    yield make
    for cache in made:
        cache.close()


@pytest.mark.parametrize("row", [0, 3], ids=["slab", "region"])
@pytest.mark.parametrize("factor", [1, 2, 4])
@pytest.mark.parametrize("codec", ["exact", "mxfp8", "fp4"])
def test_there_and_back(make: Any, codec: str, factor: int, row: int) -> None:
    cache = make(factor, codec=codec, row=row)
    first, second = list(range(2 * factor)), list(range(20, 20 + factor))
    cache.submit(cache.store, first + second, [7, 3, 11], [len(first), len(second)], [0, 5 * factor])
    (stored,) = cache.finish(cache.store)
    assert stored.success and not stored.not_stored and stored.error is None
    assert stored.transfer_size == PAGE * (2 * len(first) + len(second))
    for tensor, blocks, chunks in ((0, first, [7, 3]), (1, first, [7, 3]), (2, second, [11])):
        expected = cache.coding.encode(cache.gpu[tensor][blocks])[0]
        for i, block in enumerate(expected):
            np.testing.assert_array_equal(cache.coded(tensor, chunks[i // factor], i % factor), block)
    targets = [40 + i for i in range(factor)]
    cache.submit(cache.load, targets, [3], [factor, 0], [0, 0])
    (loaded,) = cache.finish(cache.load)
    assert loaded.success
    for tensor in (0, 1):
        blocks = cache.gpu[tensor][first[factor:]]
        expected = cache.coding.decode(cache.coding.encode(blocks)[0])[0]
        np.testing.assert_array_equal(cache.gpu[tensor][targets], expected)


def test_a_load_begins_inside_a_chunk(make: Any) -> None:
    cache = make(4)
    cache.submit(cache.store, list(range(8)), [5, 6], [8, 0], [0, 0])
    assert cache.finish(cache.store)[0].success
    cache.submit(cache.load, [30, 31, 32], [5, 6], [3, 0], [3, 0])  # block 3 of chunk 5, blocks 0 and 1 of chunk 6
    assert cache.finish(cache.load)[0].success
    np.testing.assert_array_equal(cache.gpu[0][[30, 31, 32]], cache.gpu[0][[3, 4, 5]])


@pytest.mark.parametrize("tensor", [0, 1])
def test_a_block_that_does_not_fit_drops_its_chunk_alone(make: Any, tensor: int) -> None:
    cache = make(2)
    before = [tensor.get() for tensor in cache.gpu]
    cache.gpu[tensor][5] = unfit()
    cache.submit(cache.store, [*range(8), 20, 21], [9, 8, 7, 6, 5], [8, 2], [0, 0])
    (stored,) = cache.finish(cache.store)
    assert stored.success and stored.error is None and stored.not_stored == {2: "codec"}
    assert cache.store.stats().not_stored == 1 and cache.store.stats().failed == 0
    cache.submit(cache.load, [30, 31, 32, 33], [7, 8], [4, 0], [0, 0])
    (loaded,) = cache.finish(cache.load)
    assert not loaded.success and "not" in str(loaded.error)
    np.testing.assert_array_equal(cache.gpu[0][[32, 33]], before[0][[2, 3]])
    cache.gpu[0][:] = before[0]
    cache.gpu[tensor][5] = before[tensor][5]
    cache.submit(cache.store, [30, 31], [7], [2, 0], [0, 0])  # the model has written blocks whose load failed
    assert cache.finish(cache.store)[0].not_stored == {}
    cache.submit(cache.load, [34, 35], [7], [2, 0], [0, 0])
    assert cache.finish(cache.load)[0].success


def test_a_load_that_was_queued_before_the_verdict_fails(make: Any, device: kvswap.Device) -> None:
    cache, stream = make(2), kvswap.Stream(device)
    cache.gpu[1][3] = unfit()
    with Gate(device) as gate:
        gate.hold(stream)
        device.set_compute_stream(stream)
        try:
            cache.submit(cache.store, [0, 1, 2, 3], [4, 5], [4, 0], [0, 0])
            cache.submit(cache.load, [40, 41], [4], [2, 0], [0, 0])
            cache.submit(cache.load, [42, 43], [5], [2, 0], [0, 0])
        finally:
            device.set_compute_stream(0)
        assert not cache.store.get_finished() and not cache.load.get_finished()
        gate.open()
        assert cache.finish(cache.store)[0].not_stored == {1: "codec"}
        assert [result.success for result in cache.finish(cache.load)] == [True, False]


def test_another_writer_makes_good_what_was_not_stored(make: Any) -> None:
    """A tier that brings blocks back, of which kvswap does not know; without one a slot stays lost."""
    for remember in (True, False):
        cache = make(1, remember_failures=remember)
        cache.gpu[0][3] = unfit()
        cache.submit(cache.store, [3], [9], [1, 0], [0, 0])
        assert cache.finish(cache.store)[0].not_stored == {0: "codec"}
        cache.submit(cache.load, [40], [9], [1, 0], [0, 0])
        assert not cache.finish(cache.load)[0].success  # the bytes of the slot say so, too
        good = bf16((1, PAGE), 5)
        for tensor in (0, 1):
            cache.cpu[tensor][9] = cache.coding.encode(good)[0][0].view(np.int8)
        cache.submit(cache.load, [41], [9], [1, 0], [0, 0])
        assert cache.finish(cache.load)[0].success is not remember
        assert remember or np.array_equal(cache.gpu[0][41], good[0])
        cache.close()


@pytest.mark.parametrize("remember", [True, False])
def test_the_race_checker_finds_nothing(make: Any, remember: bool) -> None:
    """Blocks that do not fit are stored and loaded again and again, over the same slots."""
    cache, good = make(2, remember_failures=remember), bf16((PAGE,), 5)
    with testing.race_checker():
        for i in range(4):
            cache.gpu[0][5] = good if i % 2 else unfit()
            cache.submit(cache.store, [*range(8), 20, 21], [9, 8, 7, 6, 5], [8, 2], [0, 0])
            cache.submit(cache.load, [30, 31, 32, 33], [7, 8], [4, 0], [0, 0])
            assert cache.finish(cache.store)[0].not_stored == ({} if i % 2 else {2: "codec"})
            assert cache.finish(cache.load)[0].success == bool(i % 2)


def test_a_device_that_fails_fails_the_job(make: Any, device: kvswap.Device) -> None:
    cache = make(2)
    with testing.fault(device, "call", "fail", operation="launch", every=1):
        cache.submit(cache.store, [0, 1], [4], [2, 0], [0, 0])
        (stored,) = cache.finish(cache.store)
    assert not stored.success and not stored.not_stored


def test_blocks_that_are_not_stored_are_counted(make: Any, device: kvswap.Device) -> None:
    def counted() -> int:
        rows = [row for row in metrics.snapshot()["handlers"] if row["device"] == device.name]
        return sum(row["not_stored"].get("codec", 0) for row in rows)

    cache, before = make(2), counted()
    cache.gpu[0][[0, 1, 6]] = unfit()
    cache.submit(cache.store, list(range(8)), [0, 1, 2, 3], [8, 0], [0, 0])
    assert cache.finish(cache.store)[0].not_stored == {0: "codec", 3: "codec"}
    assert counted() - before == 3


def test_layers_of_a_load_are_waited_for(make: Any) -> None:
    parts = [[(0, PAGE)]] * TENSORS
    cache = make(2, layer_parts=parts)
    cache.submit(cache.store, [0, 1], [4], [2, 0], [0, 0])
    assert cache.finish(cache.store)[0].success
    job = cache.submit(cache.load, [30, 31], [4], [2, 0], [0, 0], layer_events=True)
    for tensor in (0, 1):
        cache.load.make_wait(job, [tensor])
        np.testing.assert_array_equal(cache.gpu[tensor][30], cache.gpu[tensor][0])
    assert cache.finish(cache.load)[0].success


def test_parts_of_a_block_with_all_layers(device: kvswap.Device) -> None:
    layers = 4
    gpu = [Tensor(device, bf16((BLOCKS, layers * PAGE), 1))]
    coding = Coding(layers * PAGE, "exact", page_nbytes=PAGE, fields=FIELDS, pitch=PITCH)
    slab = Slab(device, [coding.coded_nbytes], [[CanonicalKVCacheRef(0, layers * PAGE)]], CHUNKS, 1)
    options = {"codings": [coding], "device": device, "wait_timeout": PATIENCE}
    options["layer_parts"] = [[(0, PAGE), (PAGE, layers * PAGE)]]
    refs = [[CanonicalKVCacheRef(0, layers * PAGE)]]
    store, load = (
        SingleDirectionOffloadingHandler(gpu, slab.tensors(False), 1, refs, to_cpu, **options)
        for to_cpu in (True, False)
    )
    store.transfer_async(1, GPULoadStoreSpec([0, 1], [2], [0]), CPULoadStoreSpec([3, 4]))
    store.drain(PATIENCE)
    assert store.get_finished()[0].success
    load.transfer_async(2, CPULoadStoreSpec([3, 4]), GPULoadStoreSpec([30, 31], [2], [0]), layer_events=True)
    load.make_wait(2, [0])
    np.testing.assert_array_equal(gpu[0][30][:PAGE], gpu[0][0][:PAGE])
    load.make_wait(2, [1])
    np.testing.assert_array_equal(gpu[0][30], gpu[0][0])
    for handler in (store, load):
        handler.shutdown(PATIENCE)
    options["layer_parts"] = [[(0, 256), (256, layers * PAGE)]]
    with pytest.raises(ValueError, match="a part begins with a page"):
        SingleDirectionOffloadingHandler(gpu, slab.tensors(False), 1, refs, True, **options)


@pytest.mark.parametrize(
    ("lists", "error", "text"),
    [
        (([0, 1], [4], [1, 0], [0, 0]), ValueError, "adds up"),
        (([0, 1], [4, 5], [2, 0], [0, 0]), ValueError, "do not fit"),
        (([0, 99], [4], [2, 0], [0, 0]), IndexError, "gpu_blocks\\[1\\] is 99"),
        (([0, 1], [99], [2, 0], [0, 0]), IndexError, "chunks\\[0\\] is 99"),
        (([0, 1, 2, 3], [4, 4], [4, 0], [0, 0]), ValueError, "written twice"),
        (([0, 1, 2, 3], [4, 4], [2, 2], [0, 0]), ValueError, "written twice"),
        (([0, 1], [4], [2], [0]), ValueError, "2 groups"),
    ],
)
def test_wrong_lists_move_nothing(make: Any, lists: Any, error: type[Exception], text: str) -> None:
    cache = make(2)
    before = [np.array(each) for each in cache.cpu]
    with pytest.raises(error, match=text):
        cache.submit(cache.store, *lists)
    assert cache.finish(cache.store) == []
    for each, old in zip(cache.cpu, before, strict=True):
        np.testing.assert_array_equal(each, old)


def test_a_job_without_blocks_ends(make: Any) -> None:
    cache = make(2)
    cache.submit(cache.store, [], [], [0, 0], [0, 0])
    (ended,) = cache.finish(cache.store)
    assert ended.success and ended.transfer_size == 0


def test_what_does_not_fit_the_codings_is_refused(make: Any, device: kvswap.Device) -> None:
    cache = make(2)
    with pytest.raises(ValueError, match="cpu_tensors\\[0\\] has 20 chunks"):
        make(2, codings=[Coding(PAGE, "mxfp8")] * TENSORS)
    with pytest.raises(ValueError, match="as many each"):
        make(2, codings=[cache.coding])
    with pytest.raises(ValueError, match="canonical"):
        make(2, canonical_layout=True)
