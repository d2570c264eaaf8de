"""kvswap.offload: each line of the contract that vLLM's handlers keep, on every path, and what goes beyond it."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import gc
import random
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from conftest import AT_ONCE, PATIENCE, Gate, run_python

import kvswap
from kvswap import testing
from kvswap.offload import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
    CpuGpuOffloadingHandlers,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingWorker,
    SingleDirectionOffloadingHandler,
    TransferResult,
    _handlers,
)
from kvswap.offload._slab import Slab
from kvswap.vllm._handler import VLLMHandler, options_of

Refs = list[list[CanonicalKVCacheRef]]


class Library:
    """Tensors of the device under test, and of its host, by one library."""

    def __init__(self, name: str, device: kvswap.Device) -> None:
        self.name, self.device = name, device
        if name == "torch":
            self.torch = pytest.importorskip("torch")
            if device.kind == "cuda" and not self.torch.cuda.is_available():
                pytest.skip("torch has no CUDA here")
        elif device.kind == "cuda":
            pytest.skip("NumPy has no memory of a GPU's")

    def gpu(self, array: np.ndarray) -> Any:
        if self.name == "numpy":
            return array.copy()
        tensor = self.torch.from_numpy(array.copy())
        return tensor.to(self.device.name) if self.device.kind == "cuda" else tensor

    def cpu(self, array: np.ndarray) -> Any:
        if self.name == "numpy":
            return array.copy()
        tensor = self.torch.from_numpy(array.copy())
        return tensor.pin_memory() if self.device.kind == "cuda" else tensor

    def read(self, tensor: Any) -> np.ndarray:
        return tensor.cpu().numpy().copy() if self.name == "torch" else np.array(tensor)

    @contextmanager
    def computing_on(self, stream: kvswap.Stream) -> Iterator[None]:
        """The model runs on that stream."""
        if self.name == "torch" and self.device.kind == "cuda":
            with self.torch.cuda.stream(self.torch.cuda.ExternalStream(stream.handle)):
                yield
            return
        self.device.set_compute_stream(stream)
        try:
            yield
        finally:
            self.device.set_compute_stream(0)


@pytest.fixture(params=["numpy", "torch"])
def library(request: pytest.FixtureRequest, device: kvswap.Device) -> Library:
    return Library(str(request.param), device)


def random_blocks(seed: int, blocks: int, page: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-128, 128, (blocks, page), dtype=np.int8)


class Cache:
    """Tensors on both sides, handlers over them, and what the bytes have to be."""

    def __init__(
        self,
        library: Library,
        pages: list[int],
        refs: Refs,
        factor: int,
        *,
        gpu_blocks: int = 64,
        chunks: int = 24,
        padding: int | None = None,
        together: bool = False,
        host_pages: list[int] | None = None,
        **options: Any,
    ) -> None:
        self.library, self.refs, self.factor, self.pages = library, refs, factor, pages
        self.host_pages = host_pages or pages
        self.gpu = [library.gpu(random_blocks(i, gpu_blocks, page)) for i, page in enumerate(pages)]
        if together:
            slab = Slab(library.device, self.host_pages, refs, chunks, factor)
            np.frombuffer(slab.memory, np.int8)[:] = random_blocks(100, 1, slab.memory.nbytes)[0]
            self.cpu = slab.tensors(library.name == "torch")
        elif padding is None:
            hosts = [random_blocks(100 + i, chunks, page * factor) for i, page in enumerate(self.host_pages)]
            self.cpu = [library.cpu(host) for host in hosts]
        else:  # as vLLM's shared region: all tensors of a chunk in one row, and something behind them
            row = sum(self.host_pages) * factor + padding
            self.slab = library.cpu(random_blocks(100, chunks, row))
            ends = np.cumsum([page * factor for page in self.host_pages])
            self.cpu = [
                self.slab[:, end - page * factor : end] for end, page in zip(ends, self.host_pages, strict=True)
            ]
        options.setdefault("wait_timeout", PATIENCE)
        self.store, self.load = (
            SingleDirectionOffloadingHandler(self.gpu, self.cpu, factor, refs, to_cpu, device=library.device, **options)
            for to_cpu in (True, False)
        )

    def bytes(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        cpus = [self.library.read(t) for t in self.cpu]
        return [self.library.read(t) for t in self.gpu], [cpu.reshape(len(cpu), -1) for cpu in cpus]

    def finish(self, handler: SingleDirectionOffloadingHandler) -> list[TransferResult]:
        handler.drain(PATIENCE)
        return handler.get_finished()

    def close(self) -> None:
        self.store.shutdown(PATIENCE)
        self.load.shutdown(PATIENCE)


def plain(pages: list[int], groups: int = 1) -> Refs:
    """Tensors dealt out to groups, each whole."""
    return [
        [CanonicalKVCacheRef(i, page) for i, page in enumerate(pages) if i % groups == group] for group in range(groups)
    ]


def draw_job(rng: random.Random, cache: Cache, sizes: list[int]) -> tuple[list[int], list[int], list[int]]:
    """GPU blocks, chunks and block_indices for groups of those sizes, beginning and ending anywhere in a chunk."""
    gpu = rng.sample(range(len(cache.gpu[0])), sum(sizes))
    indices = [rng.randrange(5 * cache.factor) for _ in sizes]
    needed = [
        size and -(-(size + index % cache.factor) // cache.factor) for size, index in zip(sizes, indices, strict=True)
    ]
    return gpu, rng.sample(range(len(cache.cpu[0])), sum(needed)), indices


def specs(gpu: Any, chunks: Any, sizes: list[int], indices: list[int]) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
    return GPULoadStoreSpec(gpu, sizes, indices), CPULoadStoreSpec(chunks)


def oracle(
    cache: Cache, before: tuple[list[np.ndarray], list[np.ndarray]], job: Any, sizes: list[int], to_cpu: bool
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Both sides after a job, byte by byte, by vLLM's words for it and nothing of ours."""
    gpu, chunks, indices = job
    gpus, cpus = [a.copy() for a in before[0]], [a.copy() for a in before[1]]
    at = chunk_at = 0
    for group, (size, index) in enumerate(zip(sizes, indices, strict=True)):
        skip = index % cache.factor
        for k in range(size):
            chunk, sub = chunks[chunk_at + (skip + k) // cache.factor], (skip + k) % cache.factor
            for ref in cache.refs[group]:
                page = cache.host_pages[ref.tensor_idx]
                for local, host, nbytes, writes in fragments(ref, chunk * cache.factor + sub):
                    there = slice(sub * page + host, sub * page + host + nbytes)
                    here = slice(local, local + nbytes)
                    if to_cpu and writes:
                        cpus[ref.tensor_idx][chunk, there] = before[0][ref.tensor_idx][gpu[at + k], here]
                    elif not to_cpu:
                        gpus[ref.tensor_idx][gpu[at + k], here] = before[1][ref.tensor_idx][chunk, there]
        at += size
        chunk_at += -(-(size + skip) // cache.factor) if size else 0
    return gpus, cpus


def fragments(ref: CanonicalKVCacheRef, host_block: int) -> Iterator[tuple[int, int, int, bool]]:
    if ref.mapping is None:
        yield 0, 0, ref.page_size_bytes, True
        return
    for run in ref.mapping.runs:
        for i in range(run.num_fragments):
            writes = ref.mapping.is_writer(host_block)
            local, canonical = run.local_offset + i * run.local_stride, run.canonical_offset + i * run.canonical_stride
            yield local, canonical, run.fragment_size, writes


def moved_bytes(cache: Cache, sizes: list[int]) -> int:
    return sum(size * sum(r.page_size_bytes for r in refs) for size, refs in zip(sizes, cache.refs, strict=True))


def check_both_ways(cache: Cache, sizes: list[int], seed: int = 1, width: type = np.int64) -> None:
    rng = random.Random(seed)
    for number, to_cpu in enumerate((True, False, True)):
        job = draw_job(rng, cache, sizes)
        before = cache.bytes()
        handler = cache.store if to_cpu else cache.load
        gpu, cpu = specs(np.array(job[0], width), np.array(job[1], width), sizes, job[2])
        assert handler.transfer_async(number, (gpu, cpu) if to_cpu else (cpu, gpu))
        (result,) = cache.finish(handler)
        assert (result.job_id, result.success, result.error) == (number, True, None)
        assert result.transfer_type == (("GPU", "CPU") if to_cpu else ("CPU", "GPU"))
        assert result.transfer_time > 0
        expected = oracle(cache, before, job, sizes, to_cpu)
        for side, after in zip(expected, cache.bytes(), strict=True):
            for want, have in zip(side, after, strict=True):
                np.testing.assert_array_equal(have, want)
    cache.close()


# -- where bytes go ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "padding"), [(1, None), (3, None), (1, 0), (4, 0), (3, 96), (4, 4096)])
def test_blocks_arrive_on_every_path(library: Library, path: str, factor: int, padding: int | None) -> None:
    pages = [512] * 4
    check_both_ways(Cache(library, pages, plain(pages), factor, padding=padding, path=path), [3 * factor + 1])


@pytest.mark.parametrize("width", [np.int32, np.int64])
@pytest.mark.parametrize("sizes", [[5, 0, 7], [0, 0, 4], [4, 6, 3]], ids=str)
@pytest.mark.parametrize("factor", [1, 3])
def test_several_groups(library: Library, factor: int, sizes: list[int], width: type) -> None:
    pages = [512, 256, 1024, 512, 256, 1024]
    cache = Cache(library, pages, plain(pages, 3), factor)
    assert cache.store.layer_refs_per_group is cache.store.kv_cache_groups_data_refs
    check_both_ways(cache, sizes, seed=factor, width=width)


@pytest.mark.parametrize("padding", [None, 64])
def test_pages_of_several_sizes_and_odd_ones(library: Library, path: str, padding: int | None) -> None:
    pages = [96, 513, 7, 4096]
    check_both_ways(Cache(library, pages, plain(pages), 3, padding=padding, path=path), [8])


@pytest.mark.parametrize(("factor", "groups"), [(1, 1), (3, 2), (8, 1)])
@pytest.mark.parametrize("pages", [[512] * 4, [41984, 8448], [96, 513, 7, 4096]], ids=["mha", "mla", "odd"])
def test_blocks_whose_tensors_lie_together(
    library: Library, path: str, pages: list[int], factor: int, groups: int
) -> None:
    cache = Cache(library, pages, plain(pages, groups), factor, together=True, chunks=8, path=path)
    sizes = [2 * factor + 1, factor - 1][:groups]
    check_both_ways(cache, sizes, seed=factor)
    stats = cache.store.stats()
    assert sum(stats.paths.values()) == 2 * sum(map(bool, sizes))  # a transfer a group: pages of any size


def test_layers_use_less_than_a_page_and_groups_share_tensors(library: Library, path: str) -> None:
    refs = [
        [CanonicalKVCacheRef(0, 512), CanonicalKVCacheRef(1, 300)],
        [CanonicalKVCacheRef(0, 256), CanonicalKVCacheRef(1, 512)],
    ]
    check_both_ways(Cache(library, [512, 512], refs, 2, path=path), [5, 4])


def test_a_layer_that_shares_anothers_blocks_is_moved_once(library: Library) -> None:
    refs = [[CanonicalKVCacheRef(0, 512), CanonicalKVCacheRef(0, 512)]]
    check_both_ways(Cache(library, [512], refs, 1), [5])


def test_pages_and_rows_without_a_common_measure(library: Library) -> None:
    pages = [509, 1021]
    check_both_ways(Cache(library, pages, plain(pages), 3, padding=2), [7])


def test_too_many_units_for_slots(device: kvswap.Device) -> None:
    """A million odd rows: each block of a chunk is a copy group. Only the blocks moved are touched."""
    if device.kind == "cuda":
        pytest.skip("wants gigabytes of host memory that are never touched")
    pages, factor, chunks = [509, 1021], 3, 1 << 20
    slab = np.zeros((chunks, sum(pages) * factor + 2), np.int8)
    cpu = [slab[:, : 509 * factor], slab[:, 509 * factor : sum(pages) * factor]]
    gpu = [random_blocks(i, 16, page) for i, page in enumerate(pages)]
    store = SingleDirectionOffloadingHandler(gpu, cpu, factor, plain(pages), True, device=device)
    store.transfer_async(1, specs([3, 7, 1, 9], [chunks - 1, 12345], [4], [1]))
    store.drain(PATIENCE)
    (result,) = store.get_finished()
    assert result.success and sum(store.stats().paths.values()) == 3  # a transfer a copy group
    for tensor, there, page in zip(gpu, cpu, pages, strict=True):
        np.testing.assert_array_equal(there[chunks - 1].reshape(factor, page)[1:], tensor[[3, 7]])
        np.testing.assert_array_equal(there[12345].reshape(factor, page)[:2], tensor[[1, 9]])
        assert not there[12345].reshape(factor, page)[2].any() and not there[12344].any()
    store.shutdown()


def test_a_group_that_has_nothing(library: Library) -> None:
    cache = Cache(library, [256], [[CanonicalKVCacheRef(0, 256)], []], 1)
    check_both_ways(cache, [3, 2])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("factor", [1, 3])
def test_the_canonical_layout_of_several_ranks(library: Library, path: str, factor: int, ranks: int) -> None:
    """Heads of one page scatter over the ranks; each loads its own part, and the parts make the page."""
    tokens, piece = 4, 64
    host_page = 2 * tokens * ranks * piece
    maps = [
        CanonicalPageMapping(
            host_page,
            2 * tokens * piece,
            tuple(
                CopyRun(
                    half * tokens * piece, half * host_page // 2 + rank * piece, piece, tokens, piece, ranks * piece
                )
                for half in range(2)
            ),
            1,
            0,
            True,
        )
        for rank in range(ranks)
    ]
    for mapping in maps:
        refs = [[CanonicalKVCacheRef(0, 2 * tokens * piece, mapping)]]
        options = {"canonical_layout": True, "host_pages": [host_page], "path": path}
        check_both_ways(Cache(library, [2 * tokens * piece], refs, factor, **options), [2 * factor + 1])


@pytest.mark.parametrize("index", [0, 1, 2])
def test_writers_take_turns(library: Library, index: int) -> None:
    mapping = CanonicalPageMapping(256, 256, (CopyRun(0, 0, 256, 1, 256, 256),), 3, index, True)
    cache = Cache(library, [256], [[CanonicalKVCacheRef(0, 256, mapping)]], 2, canonical_layout=True)
    check_both_ways(cache, [9])


def test_a_writer_of_nothing_ends_all_the_same(library: Library) -> None:
    mapping = CanonicalPageMapping(256, 256, (CopyRun(0, 0, 256, 1, 256, 256),), 64, 63, True)
    cache = Cache(library, [256], [[CanonicalKVCacheRef(0, 256, mapping)]], 1, canonical_layout=True)
    cache.store.transfer_async(1, specs([1], [2], [1], [0]))
    (result,) = cache.finish(cache.store)
    assert result.success and result.transfer_size == 0
    cache.close()


def test_transfer_size_is_what_the_layers_have(library: Library) -> None:
    pages = [512, 256]
    cache = Cache(library, pages, plain(pages, 2), 2)
    cache.store.transfer_async(1, specs([1, 2, 3], [4, 5], [2, 1], [0, 1]))
    assert cache.finish(cache.store)[0].transfer_size == moved_bytes(cache, [2, 1]) == 2 * 512 + 256
    cache.close()


def test_tensors_of_more_dimensions(library: Library) -> None:
    """vLLM's are (blocks, 2, tokens, heads, size); what counts is bytes."""
    gpu = [library.gpu(random_blocks(1, 16, 256).reshape(16, 2, 4, 32))]
    cpu = [library.cpu(random_blocks(2, 8, 512))]
    store = SingleDirectionOffloadingHandler(gpu, cpu, 2, plain([256]), True, device=library.device)
    store.transfer_async(1, specs([3, 9], [5], [2], [0]))
    store.drain(PATIENCE)
    there = library.read(cpu[0])[5].reshape(2, 256)
    np.testing.assert_array_equal(there, library.read(gpu[0]).reshape(16, 256)[[3, 9]])
    store.shutdown()


# -- jobs -------------------------------------------------------------------------------------------------------------


def make(library: Library, **options: Any) -> Cache:
    return Cache(library, [256, 256], plain([256, 256]), options.pop("factor", 2), **options)


def test_a_job_of_nothing_ends_as_one(library: Library) -> None:
    cache = make(library)
    for handler in (cache.store, cache.load):
        pair = specs([], [], [0], [0])
        assert handler.transfer_async(5, pair if handler is cache.store else pair[::-1])
        (result,) = cache.finish(handler)
        assert (result.job_id, result.success, result.transfer_size) == (5, True, 0)
        assert result.transfer_time > 0
    cache.close()


def test_both_ways_to_pass_the_specs(library: Library) -> None:
    cache = make(library)
    gpu, cpu = specs([1], [2], [1], [0])
    assert cache.store.transfer_async(1, (gpu, cpu)) and cache.store.transfer_async(2, gpu, cpu)
    assert {job.job_id for job in cache.store._transfers} == {1, 2}
    assert [result.job_id for result in cache.finish(cache.store)] == [1, 2]
    cache.close()


def test_jobs_wait_for_the_compute_stream_and_come_in_order(library: Library) -> None:
    """Store and load: for the kernels that write what is stored, and for those that still read what is loaded."""
    cache, stream = make(library), kvswap.Stream(library.device)
    for handler, flip in ((cache.store, 1), (cache.load, -1)):
        with Gate(library.device) as gate:
            gate.hold(stream)
            with library.computing_on(stream):
                for job in (1, 2, 3):
                    handler.transfer_async(job, specs([job], [job], [1], [0])[::flip])
            begin = time.monotonic()
            assert handler.get_finished() == []
            assert time.monotonic() - begin < AT_ONCE
            with pytest.raises(TimeoutError, match="job 2"):
                handler.wait({2}, timeout=0.05)
            gate.open()
            handler.wait({3, 99}, PATIENCE)
            assert [result.job_id for result in handler.get_finished()] == [1, 2, 3]
            assert handler.get_finished() == []
    cache.close()


def test_all_of_a_job_is_on_the_device_when_the_call_returns(library: Library) -> None:
    cache = make(library)
    cache.store.transfer_async(1, specs([1, 2, 3], [4, 5], [3], [0]))
    library.device.synchronize(PATIENCE)
    assert [result.job_id for result in cache.store.get_finished()] == [1]
    cache.close()


def test_the_lists_may_be_overwritten_at_once(library: Library) -> None:
    cache, stream = make(library), kvswap.Stream(library.device)
    before = cache.bytes()
    with Gate(library.device) as gate:
        gate.hold(stream)
        gpu, cpu = specs([3, 4], [5], [2], [0])
        with library.computing_on(stream):
            cache.store.transfer_async(1, (gpu, cpu))
        gpu.block_ids[:] = 0
        cpu.block_ids[:] = 0
        gate.open()
        cache.finish(cache.store)
    expected = oracle(cache, before, ([3, 4], [5], [0]), [2], True)
    np.testing.assert_array_equal(cache.bytes()[1][0], expected[1][0])
    cache.close()


def test_a_load_of_what_is_being_stored_waits_and_others_overtake(library: Library) -> None:
    """Two queues, and the order between them is by blocks."""
    cache, stream, free = make(library), kvswap.Stream(library.device), kvswap.Stream(library.device)
    before = cache.bytes()
    with Gate(library.device) as gate:
        gate.hold(stream)
        with library.computing_on(stream):
            cache.store.transfer_async(1, specs([1, 2], [7], [2], [0]))
        with library.computing_on(free):
            cache.load.transfer_async(2, specs([10, 11], [8], [2], [0])[::-1])
            cache.load.wait({2}, PATIENCE)  # another chunk: it overtakes the store
            cache.load.transfer_async(3, specs([20, 21], [7], [2], [0])[::-1])
        with pytest.raises(TimeoutError):
            cache.load.wait({3}, timeout=0.05)
        gate.open()
        assert [r.success for r in cache.finish(cache.load)] == [True, True]
    after = cache.bytes()
    np.testing.assert_array_equal(after[0][0][[20, 21]], before[0][0][[1, 2]])
    cache.close()


def test_it_is_the_hazard_table_that_orders_them(library: Library) -> None:
    """With its waits left out, the load does not wait for the store of its blocks: the test above can fail."""
    cache, stream, free = make(library), kvswap.Stream(library.device), kvswap.Stream(library.device)
    with Gate(library.device) as gate, testing.fault(library.device, "hazard", "skip", operation="raw"):
        gate.hold(stream)
        with library.computing_on(stream):
            cache.store.transfer_async(1, specs([1, 2], [7], [2], [0]))
        with library.computing_on(free):
            cache.load.transfer_async(2, specs([20, 21], [7], [2], [0])[::-1])
        cache.load.wait({2}, PATIENCE)
        gate.open()
        cache.store.drain(PATIENCE)
    cache.close()


def test_memory_that_is_not_pinned(library: Library) -> None:
    """The copy engine reaches it through the driver's staging."""
    gpu = [library.gpu(random_blocks(i, 16, 4096)) for i in range(2)]
    plain_memory = [random_blocks(10 + i, 8, 8192) for i in range(2)]
    cpu = [library.torch.from_numpy(a) for a in plain_memory] if library.name == "torch" else plain_memory
    store, load = (
        SingleDirectionOffloadingHandler(gpu, cpu, 2, plain([4096] * 2), to_cpu, device=library.device)
        for to_cpu in (True, False)
    )
    store.transfer_async(1, specs([3, 9, 1], [5, 2], [3], [0]))
    store.drain(PATIENCE)
    load.transfer_async(2, specs([11, 12, 13], [5, 2], [3], [0])[::-1])
    load.drain(PATIENCE)
    assert [store.get_finished()[0].success, load.get_finished()[0].success] == [True, True]
    for tensor, host in zip(gpu, plain_memory, strict=True):
        there = library.read(tensor)
        np.testing.assert_array_equal(host[5].reshape(2, 4096), there[[3, 9]])
        np.testing.assert_array_equal(there[[11, 12, 13]], there[[3, 9, 1]])
    store.shutdown()
    load.shutdown()


def test_separate_handlers_of_the_same_tensors_are_ordered_too(library: Library) -> None:
    cache, stream, free = make(library), kvswap.Stream(library.device), kvswap.Stream(library.device)
    other = SingleDirectionOffloadingHandler(
        list(cache.gpu), list(cache.cpu), 2, plain([256, 256]), True, device=library.device
    )
    with Gate(library.device) as gate:
        gate.hold(stream)
        with library.computing_on(stream):
            cache.store.transfer_async(1, specs([1], [7], [1], [0]))
        with library.computing_on(free):
            other.transfer_async(2, specs([2], [7], [1], [0]))
        with pytest.raises(TimeoutError):
            other.wait({2}, timeout=0.05)
        gate.open()
        other.wait({2}, PATIENCE)
    other.shutdown()
    cache.close()


def test_many_jobs_from_many_threads(library: Library) -> None:
    cache = make(library, gpu_blocks=256, chunks=128)
    before = cache.bytes()

    def submit(worker: int) -> None:
        for k in range(16):
            block = worker * 16 + k
            cache.store.transfer_async(block, specs([block], [block], [1], [0]))

    threads = [threading.Thread(target=submit, args=(worker,)) for worker in range(8)]
    collected: list[int] = []
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        collected += [result.job_id for result in cache.store.get_finished()]
    collected += [result.job_id for result in cache.finish(cache.store)]
    assert sorted(collected) == list(range(128))
    np.testing.assert_array_equal(cache.bytes()[1][0][:, :256], before[0][0][:128])
    cache.close()


def open_when_full(cache: Cache, gate: Gate) -> threading.Thread:
    """Opens the gate when a job waits for room."""
    stalls = cache.store.stats().stalls

    def wait() -> None:
        end = time.monotonic() + PATIENCE
        while cache.store.stats().stalls == stalls and time.monotonic() < end:
            time.sleep(0.001)
        gate.open()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_full_queue_is_waited_for(library: Library) -> None:
    """Nothing is refused that vLLM would have taken; the stall is counted."""
    cache, stream = make(library), kvswap.Stream(library.device)
    with Gate(library.device) as gate:
        gate.hold(stream)
        opener = open_when_full(cache, gate)
        with library.computing_on(stream):
            for job in range(140):
                cache.store.transfer_async(job, specs([job % 64], [job % 24], [1], [0]))
        opener.join(PATIENCE)
        assert len(cache.finish(cache.store)) == 140
    assert cache.store.stats().stalls > 0
    cache.close()


def test_a_full_queue_in_the_middle_of_a_job(library: Library) -> None:
    """A job of several groups is several transfers: it goes on where it was."""
    pages = [256, 512, 128]
    cache, stream = Cache(library, pages, plain(pages, 3), 1), kvswap.Stream(library.device)
    before = cache.bytes()
    with Gate(library.device) as gate:
        gate.hold(stream)
        opener = open_when_full(cache, gate)
        with library.computing_on(stream):
            for job in range(50):
                cache.store.transfer_async(job, specs([1, 2, 3], [4, 5, 6], [1, 1, 1], [0, 0, 0]))
        opener.join(PATIENCE)
        results = cache.finish(cache.store)
    assert [result.success for result in results] == [True] * 50
    assert {result.transfer_size for result in results} == {sum(pages)}
    expected = oracle(cache, before, ([1, 2, 3], [4, 5, 6], [0, 0, 0]), [1, 1, 1], True)
    for want, have in zip(expected[1], cache.bytes()[1], strict=True):
        np.testing.assert_array_equal(have, want)
    cache.close()


def test_a_queue_that_stays_full_fails_the_job_in_its_place(library: Library) -> None:
    pages = [256, 512, 128]
    cache, stream = Cache(library, pages, plain(pages, 3), 1, wait_timeout=0.05), kvswap.Stream(library.device)
    with Gate(library.device) as gate:
        gate.hold(stream)
        with library.computing_on(stream):
            for job in range(43):  # the last finds room for two transfers of its three
                cache.store.transfer_async(job, specs([1, 2, 3], [4, 5, 6], [1, 1, 1], [0, 0, 0]))
        gate.open()
        results = cache.finish(cache.store)
    assert [result.success for result in results] == [True] * 42 + [False]
    assert isinstance(results[-1].error, TimeoutError)
    result = one(cache, cache.load, 1, specs([1, 2, 3], [4, 5, 6], [1, 1, 1], [0, 0, 0]))
    assert not result.success and "not queued in whole" in str(result.error)
    cache.close()


def test_a_job_of_which_a_part_runs_is_told_of_once(library: Library) -> None:
    """What goes wrong while the rest waits for room is the job's failure: raised, it would seem not to have begun."""
    pages, answers = [256, 512, 128], iter([None])  # a compute stream for one attempt
    cache, stream = Cache(library, pages, plain(pages, 3), 1), kvswap.Stream(library.device)
    with Gate(library.device) as gate:
        gate.hold(stream)
        with library.computing_on(stream):
            for job in range(42):
                cache.store.transfer_async(job, specs([1, 2, 3], [4, 5, 6], [1, 1, 1], [0, 0, 0]))
        cache.store._compute = lambda: next(answers)
        opener = open_when_full(cache, gate)
        assert cache.store.transfer_async(42, specs([1, 2, 3], [4, 5, 6], [1, 1, 1], [0, 0, 0]))
        opener.join(PATIENCE)
        results = cache.finish(cache.store)
    assert [result.job_id for result in results] == list(range(43))
    assert [result.success for result in results] == [True] * 42 + [False]
    assert isinstance(results[-1].error, StopIteration)
    with pytest.raises(StopIteration):  # of this one nothing was queued
        cache.store.transfer_async(43, specs([1, 2, 3], [4, 5, 6], [1, 1, 1], [0, 0, 0]))
    assert cache.store.get_finished() == [] and not cache.store._transfers
    cache.close()


def test_stats(library: Library) -> None:
    cache = make(library)
    cache.store.transfer_async(1, specs([1, 2], [3], [2], [0]))
    assert cache.store.stats().unfinished == 1
    cache.finish(cache.store)
    stats = cache.store.stats()
    assert (stats.jobs, stats.failed, stats.bytes, stats.unfinished) == (1, 0, 1024, 0)
    assert stats.device_seconds > 0 and stats.queued_seconds >= 0
    assert sum(stats.paths.values()) == 1
    stats.paths.clear()
    assert cache.store.stats().paths
    cache.close()


# -- the end ----------------------------------------------------------------------------------------------------------


def test_shutdown_drains_and_lets_go(library: Library) -> None:
    cache, stream = make(library), kvswap.Stream(library.device)
    held = [weakref.ref(t) for t in [*cache.gpu, *cache.cpu]]
    store, load, device = cache.store, cache.load, library.device
    with Gate(device) as gate:
        gate.hold(stream)
        with library.computing_on(stream):
            store.transfer_async(1, specs([1], [2], [1], [0]))
        with pytest.raises(TimeoutError):
            store.shutdown(timeout=0.05)
        gate.open()
        store.shutdown(PATIENCE)
    store.shutdown()
    load.shutdown()
    assert (store.src_tensors, store.dst_tensors, list(store._transfers)) == ([], [], [])
    with pytest.raises(kvswap.Error, match="shut down"):
        store.transfer_async(2, specs([1], [2], [1], [0]))
    assert store.get_finished() == []
    store.wait({1})
    del cache
    gc.collect()
    assert [ref() for ref in held] == [None] * 4
    assert device.stats()["unfinished"] == 0


def test_shutdown_keeps_its_limit_while_a_job_waits_for_room(library: Library) -> None:
    cache, stream = make(library, wait_timeout=None), kvswap.Stream(library.device)
    with Gate(library.device) as gate:
        gate.hold(stream)

        def fill() -> None:
            with library.computing_on(stream), suppress(kvswap.Error):  # shut down is what comes next
                for job in range(140):
                    cache.store.transfer_async(job, specs([job % 64], [job % 24], [1], [0]))

        thread = threading.Thread(target=fill)
        thread.start()
        while not cache.store.stats().stalls:
            time.sleep(0.001)
        late = threading.Timer(PATIENCE, gate.open)
        late.start()
        with pytest.raises(TimeoutError, match=r"still being submitted after 0\.05 s"):
            cache.store.shutdown(0.05)
        late.cancel()
        gate.open()
        thread.join(PATIENCE)
    cache.store.shutdown(1e12)  # more than a lock's time limit can say
    cache.close()


def test_a_wait_for_a_worker_has_one_limit(library: Library) -> None:
    worker = OffloadingWorker(caches_of(library, [256]), 2, 8, device=library.device, wait_timeout=PATIENCE)
    limits: list[float] = []
    for handler in worker.handlers:
        wait_for = handler._wait_for

        def slow(wanted: Any, deadline: Any, wait_for: Any = wait_for) -> None:
            limits.append(deadline.timeout)
            time.sleep(0.02)
            wait_for(wanted, deadline)

        handler._wait_for = slow
    worker.wait({1}, 60)
    worker.drain(60)
    assert max(limits[1], limits[4]) <= 59.98 and max(limits[2], limits[5]) <= 59.96
    worker.shutdown(60)
    assert limits[8] <= 59.96


def test_vllms_shutdown_waits_as_long_as_its_configuration_says(library: Library) -> None:
    gpu, cpu = library.gpu(random_blocks(0, 8, 256)), library.cpu(random_blocks(1, 8, 256))
    handler = VLLMHandler([gpu], [cpu], 1, plain([256]), True, device=library.device, wait_timeout=0.05)
    stream = kvswap.Stream(library.device)
    with Gate(library.device) as gate:
        gate.hold(stream)
        with library.computing_on(stream):
            handler.transfer_async(1, specs([1], [2], [1], [0]))
        with pytest.raises(TimeoutError, match=r"job 1 .* has not ended after 0\.05 s"):
            handler.shutdown()
    handler.shutdown()


@pytest.mark.parametrize(
    ("key", "values", "good"),
    [
        ("path", ["copy", None, 1], "dma"),
        ("priority", ["fast", 1], "background"),
        ("max_ctas", [0, 1025, 2.5, "8", True], 8),
        ("pace_gbps", [0, -1.0, float("nan"), float("inf"), "9"], 20),
        ("wait_timeout_s", [-1, "300", float("nan"), float("inf")], 2.5),
        ("speed", [1], None),
    ],
)
def test_what_vllms_configuration_says_is_looked_at_once_at_the_start(key: str, values: list[Any], good: Any) -> None:
    """And not as the failure of each job."""
    for value in values:
        with pytest.raises(ValueError, match=f"kvswap_{key}"):
            options_of({f"kvswap_{key}": value})
    if good is not None:
        assert good in options_of({f"kvswap_{key}": good, "block_size": 16}).values()
    assert options_of({})["wait_timeout"] == 300


def test_the_child_of_a_fork_is_not_told_that_a_job_ended() -> None:
    done = run_python(
        """
        import os
        import numpy as np
        from kvswap import Device, Error, testing
        from kvswap.offload import *
        device = Device("host:0")
        tensor = CanonicalKVCacheTensor(np.ones((4, 64), np.int8), 64)
        caches = CanonicalKVCaches([tensor], [[CanonicalKVCacheRef(0, 64)]])
        store = CpuGpuOffloadingHandlers(caches, 1, 4).gpu_to_cpu_handler
        testing.delay(device, 1, 0)
        store.transfer_async(1, (GPULoadStoreSpec([1], [1], [0]), CPULoadStoreSpec([2])))
        child = os.fork()
        if child == 0:
            try:
                store.wait({1}, 5)
            except Error as error:
                os._exit(7 if "fork" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        store.wait({1}, 60)
        assert store.get_finished()[0].success
        """
    )
    assert done.returncode == 0, done.stderr


def test_a_handler_that_is_dropped_keeps_its_tensors_until_its_jobs_ended(library: Library) -> None:
    cache, stream, device = make(library), kvswap.Stream(library.device), library.device
    held = weakref.ref(cache.cpu[0])
    with Gate(device) as gate:
        gate.hold(stream)
        with library.computing_on(stream):
            cache.store.transfer_async(1, specs([1], [2], [1], [0]))
        del cache
        gc.collect()
        assert held() is not None
        gate.open()
        device.synchronize(PATIENCE)
    device.stats()
    gc.collect()
    assert held() is None


class Region:
    """What there is of vLLM's shared region."""

    def __init__(self, library: Library, chunks: int, row: int) -> None:
        self._base = library.cpu(random_blocks(5, chunks, row))
        self.is_pinned = True
        self.at = 0
        self.cleaned = 0

    def create_next_view(self, nbytes: int) -> Any:
        self.at += nbytes
        return self._base[:, self.at - nbytes : self.at]

    def cleanup(self) -> None:
        self.cleaned += 1


def caches_of(library: Library, pages: list[int], blocks: int = 32) -> CanonicalKVCaches:
    tensors = [library.gpu(random_blocks(i, blocks, page)) for i, page in enumerate(pages)]
    entries = [CanonicalKVCacheTensor(t, page) for t, page in zip(tensors, pages, strict=True)]
    return CanonicalKVCaches(entries, plain(pages))


def test_a_region_is_cleaned_up_when_both_directions_have_let_go(library: Library) -> None:
    pages, region = [256, 512], Region(library, 16, 2 * (256 + 512) + 100)
    handlers = CpuGpuOffloadingHandlers(caches_of(library, pages), 2, 16, region, device=library.device)
    handlers.gpu_to_cpu_handler.transfer_async(1, specs([3, 4], [5], [2], [0]))
    handlers.gpu_to_cpu_handler.drain(PATIENCE)
    source = library.read(handlers.gpu_to_cpu_handler.src_tensors[1])
    np.testing.assert_array_equal(library.read(region._base)[5, 512:1536], source[[3, 4]].reshape(-1))
    handlers.gpu_to_cpu_handler.shutdown()
    assert region.cleaned == 0
    handlers.cpu_to_gpu_handler.shutdown()
    handlers.cpu_to_gpu_handler.shutdown()
    assert region.cleaned == 1


class Registrar:
    """Stands in for a GPU where memory is registered: keeps the set of registered addresses."""

    kind = "cuda"

    def __init__(self) -> None:
        self.registered: set[int] = set()
        self.lost = False

    def register(self, ptr: int, nbytes: int) -> None:
        self.registered.add(ptr)

    def unregister(self, ptr: int) -> None:
        if self.lost:
            raise kvswap.DeviceError("it is lost")
        self.registered.remove(ptr)


class Unpinned(Region):
    """A region that nobody has registered yet, with room for so many tensors."""

    def __init__(self, library: Library, chunks: int, row: int, tensors: int = 99) -> None:
        super().__init__(library, chunks, row)
        self._base = random_blocks(5, chunks, row)
        self._base = library.torch.from_numpy(self._base) if library.name == "torch" else self._base.view(Addressed)
        self.is_pinned = False
        self.left = tensors

    def create_next_view(self, nbytes: int) -> Any:
        self.left -= 1
        assert self.left >= 0, "the region has no room for it"
        return super().create_next_view(nbytes)


class Addressed(np.ndarray):
    def data_ptr(self) -> int:
        return int(self.ctypes.data)


def break_second_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []

    class Breaks(SingleDirectionOffloadingHandler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self.gpu_to_cpu)
            if len(made) == 2:
                raise MemoryError("no more")

    monkeypatch.setattr(_handlers, "SingleDirectionOffloadingHandler", Breaks)


@pytest.mark.parametrize("broken", ["view", "references", "second handler"])
def test_a_region_is_not_left_registered_where_making_handlers_fails(
    library: Library, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registrar, taken = Registrar(), _handlers._Region
    monkeypatch.setattr(_handlers, "_Region", lambda region, device: taken(region, registrar))
    region = Unpinned(library, 16, 2 * (256 + 512), tensors=1 if broken == "view" else 2)
    caches = caches_of(library, [256, 512])
    if broken == "references":
        caches.group_data_refs[0][1].tensor_idx = 7
    if broken == "second handler":
        break_second_handler(monkeypatch)
    with pytest.raises((AssertionError, IndexError, MemoryError)):
        CpuGpuOffloadingHandlers(caches, 2, 16, region, device=library.device)
    assert registrar.registered == set() and region.cleaned == 0  # it is the caller's still


def test_a_region_that_was_registered_is_given_back_at_the_end(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = _handlers._Region
    for lost in (False, True):
        registrar, region = Registrar(), Unpinned(library, 16, 2 * 256)
        monkeypatch.setattr(_handlers, "_Region", lambda region, device, to=registrar: taken(region, to))
        handlers = CpuGpuOffloadingHandlers(caches_of(library, [256]), 2, 16, region, device=library.device)
        assert len(registrar.registered) == 1
        handlers.gpu_to_cpu_handler.shutdown()
        registrar.lost = lost
        if lost:  # it says so, and the region goes all the same
            with pytest.raises(kvswap.DeviceError, match="lost"):
                handlers.cpu_to_gpu_handler.shutdown()
        else:
            handlers.cpu_to_gpu_handler.shutdown()
            assert registrar.registered == set()
        assert region.cleaned == 1


@pytest.mark.parametrize("broken", ["view", "references", "second handler"])
def test_the_driver_has_nothing_registered_where_making_handlers_fails(
    cuda: kvswap.Device, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library("torch", cuda)
    region = Unpinned(library, 16, 2 * (256 + 512), tensors=1 if broken == "view" else 2)
    caches = caches_of(library, [256, 512])
    if broken == "references":
        caches.group_data_refs[0][1].tensor_idx = 7
    with monkeypatch.context() as patch:
        if broken == "second handler":
            break_second_handler(patch)
        with pytest.raises((AssertionError, IndexError, MemoryError)):
            CpuGpuOffloadingHandlers(caches, 2, 16, region, device=cuda)
    cuda.register(region._base.data_ptr(), region._base.nbytes)  # refused while it is registered
    cuda.unregister(region._base.data_ptr())
    whole = Unpinned(library, 16, 2 * (256 + 512))
    handlers = CpuGpuOffloadingHandlers(caches_of(library, [256, 512]), 2, 16, whole, device=cuda)
    with pytest.raises(ValueError, match="registered already"):
        cuda.register(whole._base.data_ptr(), whole._base.nbytes)
    handlers.gpu_to_cpu_handler.shutdown()
    handlers.cpu_to_gpu_handler.shutdown()
    cuda.register(whole._base.data_ptr(), whole._base.nbytes)
    cuda.unregister(whole._base.data_ptr())


def runs_of(tensors: list[Any], factor: int, chunks: list[int]) -> list[int]:
    """Bytes of each run that those chunks of all tensors make on the host, by their addresses."""
    pieces = []
    for tensor in tensors:
        blocks = np.asarray(tensor)
        blocks = blocks.reshape(len(blocks), factor, -1) if blocks.ndim < 3 else blocks
        step, (chunk, pitch, _) = blocks.ctypes.data, blocks.strides
        pieces += [(step + c * chunk + j * pitch, blocks.shape[2]) for c in chunks for j in range(factor)]
    runs: list[int] = []
    end = None
    for begin, nbytes in sorted(pieces):
        assert end is None or begin >= end
        if begin == end:
            runs[-1] += nbytes
        else:
            runs.append(nbytes)
        end = begin + nbytes
    return runs


@pytest.mark.parametrize("factor", [1, 8])
@pytest.mark.parametrize("pages", [[512] * 4, [41984, 8448], [10496] * 3], ids=["mha", "mla", "656"])
def test_a_chunk_is_one_run_wherever_it_lies(library: Library, pages: list[int], factor: int) -> None:
    handlers = CpuGpuOffloadingHandlers(caches_of(library, pages), factor, 16, device=library.device)
    tensors = handlers.gpu_to_cpu_handler.dst_tensors
    assert runs_of(tensors, factor, [3, 14, 9, 0, 6]) == [factor * sum(pages)] * 5
    assert [np.asarray(tensor).ctypes.data % 256 for tensor in tensors] == [0] * len(pages)
    for handler in (handlers.gpu_to_cpu_handler, handlers.cpu_to_gpu_handler):
        handler.shutdown()


def test_tensors_of_a_group_lie_together(library: Library) -> None:
    """Their order in the cache alternates between two groups, and each moves alone."""
    caches = caches_of(library, [256, 512, 256, 512])
    caches.group_data_refs = plain([256, 512, 256, 512], 2)
    worker = OffloadingWorker(caches, blocks_per_chunk=1, num_cpu_chunks=8, device=library.device)
    tensors = worker.handlers[0].dst_tensors
    assert runs_of(tensors[0::2], 1, [5, 2]) == [512, 512] and runs_of(tensors[1::2], 1, [5, 2]) == [1024, 1024]
    worker.shutdown()


def test_odd_pages_begin_at_16_bytes(library: Library) -> None:
    handlers = CpuGpuOffloadingHandlers(caches_of(library, [513, 7, 96]), 2, 4, device=library.device)
    tensors = [np.asarray(tensor) for tensor in handlers.gpu_to_cpu_handler.dst_tensors]
    assert all(tensor.ctypes.data % 16 == 0 and tensor.strides[1] % 16 == 0 for tensor in tensors)
    for handler in (handlers.gpu_to_cpu_handler, handlers.cpu_to_gpu_handler):
        handler.shutdown()


def test_no_chunks_are_refused(library: Library) -> None:
    with pytest.raises(ValueError, match="0 chunks of 2 blocks"):
        CpuGpuOffloadingHandlers(caches_of(library, [256]), 2, 0, device=library.device)


@pytest.mark.parametrize("factor", [1, 3])
def test_handlers_allocate_the_hosts_side(library: Library, factor: int) -> None:
    handlers = CpuGpuOffloadingHandlers(caches_of(library, [256, 512]), factor, 8, device=library.device)
    store, load = handlers.gpu_to_cpu_handler, handlers.cpu_to_gpu_handler
    shape = (8,) if factor == 1 else (8, factor)
    assert [tuple(t.shape) for t in store.dst_tensors] == [(*shape, 256), (*shape, 512)]
    assert all((library.read(t) == 0).all() for t in store.dst_tensors)
    before = [library.read(t) for t in load.dst_tensors]
    store.transfer_async(1, specs([9], [2], [1], [0]))
    store.drain(PATIENCE)
    load.transfer_async(2, specs([10], [2], [1], [0])[::-1])
    load.drain(PATIENCE)
    for was, now in zip(before, load.dst_tensors, strict=True):
        was[10] = was[9]
        np.testing.assert_array_equal(library.read(now), was)
    store.shutdown()
    load.shutdown()


def test_the_worker_of_newer_releases(library: Library) -> None:
    caches = caches_of(library, [256])
    worker = OffloadingWorker(caches, blocks_per_chunk=2, num_cpu_chunks=8, device=library.device)
    before = library.read(caches.tensors[0].tensor)
    stream, free = kvswap.Stream(library.device), kvswap.Stream(library.device)
    gpu, cpu = specs([1, 2], [3], [2], [0])
    assert worker.submit_store(1, gpu, cpu)
    worker.wait({1}, PATIENCE)
    with Gate(library.device) as gate:
        gate.hold(stream)
        with library.computing_on(stream):
            worker.submit_load(2, cpu, specs([5, 6], [3], [2], [0])[0])
        with library.computing_on(free):
            worker.submit_load(3, cpu, specs([7, 8], [3], [2], [0])[0], expedited=True)
            worker.wait({3}, PATIENCE)  # behind no other load
        assert {result.job_id for result in worker.get_finished()} == {1, 3}
        gate.open()
        worker.drain(PATIENCE)
    assert [result.job_id for result in worker.get_finished()] == [2]
    np.testing.assert_array_equal(library.read(caches.tensors[0].tensor)[[5, 6, 7, 8]], before[[1, 2, 1, 2]])
    assert {name: stats.jobs for name, stats in worker.stats().items()} == {"store": 1, "load": 1, "expedited_load": 1}
    worker.shutdown()
    worker.shutdown()


# -- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "error", "message"),
    [
        (([64], [0], [1], [0]), IndexError, r"gpu_blocks\[0\] is 64; there are 64 blocks, 0 to 63"),
        (([1, -1], [0], [2], [0]), IndexError, r"gpu_blocks\[1\] is -1"),
        (([1], [24], [1], [0]), IndexError, r"chunks\[0\] is 24; there are 24 chunks"),
        (([1], [-3], [1], [0]), IndexError, r"chunks\[0\] is -3"),
        (([1, 2, 3], [0], [3], [0]), ValueError, r"chunks has 1 entries, and group 0 needs more"),
        (([1, 2], [0], [2], [1]), ValueError, r"chunks has 1 entries, and group 0 needs more"),
        (([1], [0, 1], [1], [0]), ValueError, r"chunks has 2 entries, but the groups need 1"),
        (([1, 2, 3], [4, 4], [3], [0]), ValueError, r"chunk 4 is written twice"),
        (([1], [0], [1], [-1]), IndexError, r"block_indices\[0\] is -1"),
    ],
)
def test_wrong_lists_are_named_and_nothing_is_queued(
    library: Library, job: Any, error: type[Exception], message: str
) -> None:
    cache = make(library)
    before = cache.bytes()
    with pytest.raises(error, match=message):
        cache.store.transfer_async(1, specs(*job))
    assert cache.store.get_finished() == [] and not cache.store._transfers
    for side, after in zip(before, cache.bytes(), strict=True):
        for want, have in zip(side, after, strict=True):
            np.testing.assert_array_equal(have, want)
    cache.store.transfer_async(1, specs([1], [2], [1], [0]))
    assert cache.finish(cache.store)[0].success
    cache.close()


def test_a_part_that_a_job_does_not_have(library: Library) -> None:
    """Nothing is queued, and nothing counts as stored."""
    cache = make(library, factor=1)
    with testing.fault(library.device, "copy", "fail"):
        assert not one(cache, cache.store, 1, specs([1], [3], [1], [0])).success
    for first in (1, 99):
        with pytest.raises(IndexError, match=f"has 1 parts, and none is left from {first} on"):
            cache.store._map.submit([1], [3], [1], [0], 0, first=first)
    assert not one(cache, cache.load, 2, specs([10], [3], [1], [0])).success
    cache.close()


def test_wrong_lists_of_a_load_and_of_groups(library: Library) -> None:
    cache = make(library)
    with pytest.raises(ValueError, match=r"gpu_blocks\[1\] is 5, which is written twice"):
        cache.load.transfer_async(1, specs([5, 5], [3], [2], [0])[::-1])
    with pytest.raises(ValueError, match="group_sizes has 2 entries; there are 1 groups"):
        cache.load.transfer_async(1, specs([5, 6], [3], [1, 1], [0, 0])[::-1])
    cache.load.transfer_async(1, specs([5, 6], [3], [2], [0])[::-1])  # what was refused left no mark
    with pytest.raises(ValueError, match="job 1 was submitted before"):
        cache.load.transfer_async(1, specs([7], [3], [1], [0])[::-1])
    cache.close()
    with pytest.raises(ValueError, match="adds up to 3"):
        GPULoadStoreSpec([1], [3], [0])
    with pytest.raises(ValueError, match="block_indices has 2"):
        GPULoadStoreSpec([1], [1], [0, 0])
    with pytest.raises(ValueError, match="one list"):
        CPULoadStoreSpec(np.zeros((2, 2), np.int32))


def test_the_same_gpu_block_in_groups_that_share_no_tensor(library: Library) -> None:
    pages = [256, 512]
    cache = Cache(library, pages, plain(pages, 2), 1)
    cache.load.transfer_async(1, specs([5, 5], [1, 2], [1, 1], [0, 0])[::-1])
    assert cache.finish(cache.load)[0].success
    cache.close()
    refs = [[CanonicalKVCacheRef(0, 256)], [CanonicalKVCacheRef(1, 512)], [CanonicalKVCacheRef(0, 128)]]
    mixed = Cache(library, pages, refs, 1)
    mixed.load.transfer_async(1, specs([5, 5, 6], [1, 2, 3], [1, 1, 1], [0, 0, 0])[::-1])
    for twice in ([5, 7, 5], [7, 6, 7]):
        with pytest.raises(ValueError, match=rf"gpu_blocks\[2\] is {twice[2]}, which is written twice"):
            mixed.load.transfer_async(2, specs(twice, [1, 2, 3], [1, 1, 1], [0, 0, 0])[::-1])
    mixed.load.transfer_async(2, specs([7, 5, 6], [1, 2, 3], [1, 1, 1], [0, 0, 0])[::-1])  # and no mark is left
    assert [result.success for result in mixed.finish(mixed.load)] == [True, True]
    mixed.close()
    shared = Cache(library, [256], [[CanonicalKVCacheRef(0, 256)], [CanonicalKVCacheRef(0, 128)]], 1)
    with pytest.raises(ValueError, match="written twice"):
        shared.load.transfer_async(1, specs([5, 5], [1, 2], [1, 1], [0, 0])[::-1])
    shared.close()


def overlapped(library: Library) -> Any:
    """(4, 2, 512) whose blocks share half of their bytes."""
    host = library.cpu(np.zeros((4, 2048), np.int8))
    if library.name == "torch":
        return host.as_strided((4, 2, 512), (2048, 256, 1))
    return np.lib.stride_tricks.as_strided(host, (4, 2, 512), (2048, 256, 1))


def test_tensors_that_do_not_fit(library: Library) -> None:
    gpu, cpu = [library.gpu(random_blocks(1, 8, 256))], [library.cpu(random_blocks(2, 4, 512))]
    device = library.device

    def attempt(match: str, error: type[Exception] = ValueError, **changes: Any) -> None:
        given = {"gpu_tensors": gpu, "cpu_tensors": cpu, "block_size_factor": 2, "layer_refs_per_group": plain([256])}
        with pytest.raises(error, match=match):
            SingleDirectionOffloadingHandler(**{**given, **changes}, gpu_to_cpu=True, device=device)

    attempt("2 GPU tensors and 1 CPU", gpu_tensors=gpu * 2)
    attempt("gpu_tensors is empty", gpu_tensors=[])
    attempt("chunks of 512 bytes: they are 3 blocks", block_size_factor=3)
    attempt("block_size_factor is 0", block_size_factor=0)
    attempt("refers to tensor 1; there are 1", IndexError, layer_refs_per_group=[[CanonicalKVCacheRef(1, 256)]])
    attempt("page_size_bytes is 257", layer_refs_per_group=plain([257]))
    attempt("needs a mapping", canonical_layout=True)
    attempt("its first dimension is blocks", gpu_tensors=[gpu[0].reshape(-1)])
    attempt("must lie together", gpu_tensors=[gpu[0][:, ::2]])
    attempt("must lie together", cpu_tensors=[library.cpu(np.zeros((4, 2, 512), np.int8))[..., ::2]])
    attempt("blocks 256 bytes apart that are 512", cpu_tensors=[overlapped(library)])
    attempt("must be a tensor", TypeError, cpu_tensors=["no"])
    attempt("needed", TypeError, block_size_factor=None)
    overlapping = [cpu[0], cpu[0]]
    attempt(
        "share bytes on the host", gpu_tensors=[gpu[0], library.gpu(random_blocks(3, 8, 256))], cpu_tensors=overlapping
    )
    attempt(
        "share bytes on the GPU",
        gpu_tensors=gpu * 2,
        cpu_tensors=[cpu[0], library.cpu(random_blocks(4, 4, 512))],
        layer_refs_per_group=plain([256, 256]),
    )


# -- failures ---------------------------------------------------------------------------------------------------------


def one(cache: Cache, handler: SingleDirectionOffloadingHandler, job: int, pair: Any) -> TransferResult:
    handler.transfer_async(job, pair if handler is cache.store else pair[::-1])
    (result,) = cache.finish(handler)
    return result


def test_a_job_that_fails_says_so_and_poisons_what_it_should_have_stored(library: Library) -> None:
    cache = make(library, factor=1)
    before = cache.bytes()
    with testing.fault(library.device, "copy", "fail"):
        result = one(cache, cache.store, 1, specs([1, 2], [3, 4], [2], [0]))
    assert not result.success and isinstance(result.error, kvswap.DeviceError)
    np.testing.assert_array_equal(cache.bytes()[1][0], before[1][0])
    result = one(cache, cache.load, 2, specs([10, 11], [4, 5], [2], [0]))
    assert not result.success
    assert "chunk 4 does not hold what it should since transfer" in str(result.error)
    after = cache.bytes()
    np.testing.assert_array_equal(after[0][0][10], before[0][0][10])  # not written with stale bytes
    np.testing.assert_array_equal(after[0][0][11], before[1][0][5])  # the other block is there
    assert one(cache, cache.load, 3, specs([12], [5], [1], [0])).success
    assert one(cache, cache.store, 4, specs([2], [4], [1], [0])).success  # stored again
    assert one(cache, cache.load, 5, specs([13], [4], [1], [0])).success
    assert not one(cache, cache.load, 6, specs([13], [3], [1], [0])).success
    assert cache.load.stats().failed == 2
    cache.close()


def test_a_store_of_which_nothing_could_be_queued_poisons_its_blocks_too(library: Library) -> None:
    cache = make(library, factor=1)
    with testing.fault(library.device, "call", "fail", operation="event_record"):
        result = one(cache, cache.store, 1, specs([1, 2], [3, 4], [2], [0]))
    assert not result.success and isinstance(result.error, kvswap.DeviceError) and result.transfer_size == 0
    result = one(cache, cache.load, 2, specs([10, 11], [4, 5], [2], [0]))
    assert not result.success and "not queued in whole" in str(result.error)
    with pytest.raises(ValueError, match="path is"):  # of this one nothing is a failure
        cache.store._map.submit([1], [5], [1], [0], 0, path="wrong")
    with pytest.raises(IndexError):
        cache.store.transfer_async(3, specs([64], [5], [1], [0]))
    assert one(cache, cache.load, 4, specs([12], [5], [1], [0])).success
    assert one(cache, cache.store, 5, specs([2], [4], [1], [0])).success  # stored again
    assert one(cache, cache.load, 6, specs([13], [4], [1], [0])).success
    cache.close()


def test_groups_that_share_no_tensor_fail_apart(library: Library) -> None:
    """A store of one into the same chunk tells nothing of what the other has there."""
    pages = [256, 512]
    cache = Cache(library, pages, plain(pages, 2), 1)
    assert one(cache, cache.store, 1, specs([2], [3], [0, 1], [0, 0])).success
    with testing.fault(library.device, "copy", "fail"):
        assert not one(cache, cache.store, 2, specs([1], [3], [1, 0], [0, 0])).success
    assert one(cache, cache.load, 3, specs([5], [3], [0, 1], [0, 0])).success
    assert one(cache, cache.store, 4, specs([2], [3], [0, 1], [0, 0])).success
    result = one(cache, cache.load, 5, specs([5], [3], [1, 0], [0, 0]))
    assert not result.success and "chunk 3 does not hold what it should" in str(result.error)
    assert one(cache, cache.load, 6, specs([5], [3], [0, 1], [0, 0])).success
    assert one(cache, cache.store, 7, specs([1], [3], [1, 0], [0, 0])).success
    assert one(cache, cache.load, 8, specs([5], [3], [1, 0], [0, 0])).success
    cache.close()
    shared = Cache(library, [256], [[CanonicalKVCacheRef(0, 256)], [CanonicalKVCacheRef(0, 128)]], 1)
    with testing.fault(library.device, "copy", "fail"):
        assert not one(shared, shared.store, 1, specs([1], [3], [1, 0], [0, 0])).success
    assert not one(shared, shared.load, 2, specs([5], [3], [0, 1], [0, 0])).success  # it is the same memory
    shared.close()


def test_the_gpus_blocks_are_the_models_business(library: Library) -> None:
    """A load that failed is told of; the model computes the block, unseen, and it is stored again."""
    cache = make(library)
    with testing.fault(library.device, "copy", "fail"):
        assert not one(cache, cache.load, 1, specs([1, 2], [3], [2], [0])).success
    assert one(cache, cache.store, 2, specs([1, 2], [4], [2], [0])).success
    cache.close()


def test_failures_are_not_remembered_where_others_write_too(library: Library) -> None:
    cache = make(library, remember_failures=False)
    with testing.fault(library.device, "copy", "fail"):
        assert not one(cache, cache.store, 1, specs([1, 2], [3], [2], [0])).success
    assert one(cache, cache.load, 2, specs([1, 2], [3], [2], [0])).success
    cache.close()


def test_a_failed_job_does_not_keep_a_strict_handler_from_shutting_down(library: Library) -> None:
    """Under vLLM's own connector a failure raises, and is logged where nobody asks any more."""
    cleaned: list[str] = []

    class Region:
        def cleanup(self) -> None:
            cleaned.append("region")

    gpu, cpu = library.gpu(random_blocks(0, 8, 256)), library.cpu(random_blocks(1, 8, 256))
    handler = VLLMHandler([gpu], [cpu], 1, plain([256]), True, Region(), device=library.device)
    with testing.fault(library.device, "copy", "fail"):
        handler.transfer_async(1, specs([1], [2], [1], [0]))
    handler.shutdown()
    assert cleaned == ["region"] and handler.src_tensors == []
    handler.shutdown()


def test_one_refused_copy_fails_its_block_alone(library: Library) -> None:
    cache = make(library, factor=1, path="dma")
    before = cache.bytes()
    with testing.fault(library.device, "copy", "fail", nth=2):
        result = one(cache, cache.store, 1, specs([1, 5, 9], [3, 7, 11], [3], [0]))
    assert not result.success
    after = cache.bytes()[1][0]
    np.testing.assert_array_equal(after[[3, 11]], before[0][0][[1, 9]])
    ended = {chunk: one(cache, cache.load, chunk, specs([20], [chunk], [1], [0])).success for chunk in (3, 7, 11)}
    assert ended == {3: True, 7: False, 11: True}
    cache.close()


def test_a_lost_device_fails_every_job(library: Library) -> None:
    if library.device.kind == "cuda":
        pytest.skip("a GPU that is lost cannot be had back")
    device = testing.deterministic_device(seed=3)
    cache = Cache.__new__(Cache)
    library = Library(library.name, device)
    cache.__init__(library, [256], plain([256]), 1)
    cache.store.transfer_async(1, specs([1], [2], [1], [0]))
    with testing.fault(device, "call", "lose"):
        cache.store.transfer_async(2, specs([3], [4], [1], [0]))
    cache.store.transfer_async(3, specs([5], [6], [1], [0]))
    results = {result.job_id: result for result in cache.finish(cache.store)}
    assert not results[2].success and not results[3].success
    assert all(result.error is not None for result in results.values() if not result.success)
    assert len(results) == 3


# -- modules ----------------------------------------------------------------------------------------------------------


def test_neither_torch_nor_vllm_is_imported() -> None:
    done = run_python(
        """
        import sys
        import kvswap, kvswap.offload, kvswap.vllm
        assert not {"torch", "vllm"} & set(sys.modules), sorted(sys.modules)
        import numpy as np
        from kvswap.offload import *
        tensor = CanonicalKVCacheTensor(np.ones((4, 64), np.int8), 64)
        caches = CanonicalKVCaches([tensor], [[CanonicalKVCacheRef(0, 64)]])
        handlers = CpuGpuOffloadingHandlers(caches, 1, 4)
        store = handlers.gpu_to_cpu_handler
        store.transfer_async(1, (GPULoadStoreSpec([1], [1], [0]), CPULoadStoreSpec([2])))
        store.wait({1})
        assert store.get_finished()[0].success and store.dst_tensors[0][2].sum() == 64
        assert not {"torch", "vllm"} & set(sys.modules)
        """
    )
    assert done.returncode == 0, done.stderr


def test_the_plugin_hook_does_nothing_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvswap.vllm

    monkeypatch.delenv("KVSWAP_VLLM_SWAP_BLOCKS", raising=False)
    before = set(sys.modules)
    kvswap.vllm.register()
    assert "vllm" not in set(sys.modules) - before
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = kvswap.vllm.Other


@pytest.mark.parametrize("busy", [False, True])
def test_vllms_swap_blocks_batch_raises_what_was_refused(device: kvswap.Device, busy: bool) -> None:
    """Also while the stream is busy, and the failure waits for its place in it."""
    from kvswap.vllm._plugin import swap_blocks_batch

    library = Library("torch", device)
    torch = library.torch
    source, target = library.gpu(random_blocks(1, 1, 4096)), library.cpu(random_blocks(2, 1, 4096))
    before = library.read(target)
    lists = [torch.tensor([number], dtype=torch.int64) for number in (source.data_ptr(), target.data_ptr(), 4096)]
    stream = kvswap.Stream(device)
    with Gate(device) as gate, testing.fault(device, "copy", "fail"):
        if busy:
            gate.hold(stream if device.kind == "cuda" else 0)
        with library.computing_on(stream), pytest.raises(kvswap.DeviceError, match="injected"):
            swap_blocks_batch(*lists)
        gate.open()
        device.synchronize(PATIENCE)
        np.testing.assert_array_equal(library.read(target), before)
    swap_blocks_batch(*lists)
    device.synchronize(PATIENCE)
    np.testing.assert_array_equal(library.read(target), library.read(source))
