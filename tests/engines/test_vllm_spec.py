"""What kvswap.vllm's spec does with a worker's host memory, on a stand-in for vLLM's worker.

The stand-in has the seams of vLLM's: a class that takes a region or allocates a tensor a layer, and hands the tensors
to handlers. tests/integration/vllm_package.py runs the same on the real package.
"""

# mypy: ignore-errors

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE

import kvswap
from kvswap import testing
from kvswap.offload import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
)
from kvswap.vllm import _memory, _share
from kvswap.vllm._handler import VLLMHandler

pytestmark = pytest.mark.not_sanitized("Python only")


class TheirHandler:
    """vLLM's own: it knows rows of chunks alone."""

    def __init__(
        self,
        gpu_tensors: list[Any],
        cpu_tensors: list[Any],
        blocks_per_chunk: int,
        kv_cache_groups_data_refs: Any,
        gpu_to_cpu: bool,
        mmap_region: Any = None,
    ) -> None:
        assert all(
            cpu.ndim == 2 and cpu.shape[1] == gpu.shape[1] * blocks_per_chunk
            for gpu, cpu in zip(gpu_tensors, cpu_tensors, strict=True)
        )
        self.cpu_tensors = cpu_tensors


def make_worker(gpu_worker: ModuleType) -> type:
    class CPUOffloadingWorker:
        def __init__(self, kv_caches: Any, blocks_per_chunk: int, num_cpu_blocks: int, mmap_region: Any = None) -> None:
            if mmap_region is not None:
                gpu_worker.pin_mmap_region(mmap_region)
            gpu = [entry.tensor for entry in kv_caches.tensors]
            cpu = []
            for entry in kv_caches.tensors:
                nbytes = entry.page_size_bytes * blocks_per_chunk
                allocated = np.zeros((num_cpu_blocks, nbytes), np.int8) if mmap_region is None else None
                cpu.append(mmap_region.create_next_view(nbytes) if allocated is None else allocated)
            self.handlers = [
                gpu_worker.SingleDirectionOffloadingHandler(
                    gpu_tensors=gpu,
                    cpu_tensors=cpu,
                    blocks_per_chunk=blocks_per_chunk,
                    kv_cache_groups_data_refs=kv_caches.group_data_refs,
                    gpu_to_cpu=to_cpu,
                    mmap_region=mmap_region if to_cpu else None,
                )
                for to_cpu in (True, False)
            ]

    return CPUOffloadingWorker


class Region:
    """vLLM's, whose rows are what they are."""

    def __init__(self, chunks: int, row: int) -> None:
        self.base, self.at = np.zeros((chunks, row), np.int8), 0

    def create_next_view(self, nbytes: int) -> Any:
        self.at += nbytes
        return self.base[:, self.at - nbytes : self.at]

    def cleanup(self) -> None:
        pass


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The stand-in, its gpu_worker, and kvswap's spec over them. `pinned` has the regions that vLLM's function got."""
    names = ("vllm", "vllm.v1", "vllm.v1.kv_offload", "vllm.v1.kv_offload.cpu")
    modules = {name: ModuleType(name) for name in (*names, f"{names[-1]}.gpu_worker", f"{names[-1]}.spec")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    gpu_worker, spec = modules[f"{names[-1]}.gpu_worker"], modules[f"{names[-1]}.spec"]
    modules["vllm"].__version__ = "0.0"
    pinned: list[Any] = []
    gpu_worker.pin_mmap_region = pinned.append
    gpu_worker.SingleDirectionOffloadingHandler = TheirHandler
    gpu_worker.CPUOffloadingWorker = make_worker(gpu_worker)

    class CPUOffloadingSpec:
        region: Any = None

        def __init__(self, config: Any) -> None:
            self.config, self.extra_config = config, config.extra_config
            self.factor, self.chunks = config.factor, config.chunks
            vars(self).update(config.more)

        def create_worker(self, kv_caches: Any) -> Any:
            return gpu_worker.CPUOffloadingWorker(
                kv_caches=kv_caches,
                blocks_per_chunk=self.factor,
                num_cpu_blocks=self.chunks,
                **({} if self.region is None else {"mmap_region": self.region}),
            )

    spec.CPUOffloadingSpec = CPUOffloadingSpec
    monkeypatch.delitem(sys.modules, "kvswap.vllm._spec", raising=False)
    ours = importlib.import_module("kvswap.vllm._spec")

    def make(factor: int, chunks: int, extra_config: Any = None, **more: Any) -> Any:
        """A spec. more: its attributes."""
        config = {"extra_config": extra_config or {}, "factor": factor, "chunks": chunks, "more": more}
        return ours.KVSwapOffloadingSpec(SimpleNamespace(**config))

    yield SimpleNamespace(spec=ours, make=make, gpu_worker=gpu_worker, pinned=pinned)
    sys.modules.pop("kvswap.vllm._spec", None)


def caches_of(pages: list[int], blocks: int = 40) -> CanonicalKVCaches:
    rng = np.random.default_rng(1)
    tensors = [rng.integers(-128, 128, (blocks, page), dtype=np.int8) for page in pages]
    entries = [CanonicalKVCacheTensor(tensor, page) for tensor, page in zip(tensors, pages, strict=True)]
    return CanonicalKVCaches(entries, [[CanonicalKVCacheRef(i, page) for i, page in enumerate(pages)]])


@pytest.mark.parametrize("factor", [1, 8])
@pytest.mark.parametrize("pages", [[512] * 3, [656 * 16, 2112]], ids=["mha", "mla"])
def test_a_worker_without_a_region_has_its_chunks_in_one_piece(
    vllm: SimpleNamespace, pages: list[int], factor: int
) -> None:
    caches, chunks = caches_of(pages), [5, 2, 7]
    init = vllm.gpu_worker.CPUOffloadingWorker.__init__
    worker = vllm.make(factor, 9).create_worker(caches)
    assert vllm.gpu_worker.CPUOffloadingWorker.__init__ is init and vllm.pinned == []
    store, load = worker.handlers
    assert isinstance(store, VLLMHandler)
    base = store.dst_tensors[0].ctypes.data
    assert [tensor.ctypes.data - base for tensor in store.dst_tensors] == [sum(pages[:i]) for i in range(len(pages))]
    assert {tensor.strides[:-1] for tensor in store.dst_tensors} == {
        (factor * sum(pages), sum(pages))[: 1 if factor == 1 else 2]
    }
    skip, count = factor // 2, 2 * factor + 1  # neither begins nor ends with a chunk
    chunks = chunks[: -(-(skip + count) // factor)]
    blocks = np.random.default_rng(2).permutation(40)[:count]
    pair = GPULoadStoreSpec(blocks, [count], [skip]), CPULoadStoreSpec(chunks)
    store.transfer_async(1, *pair)
    store.wait({1}, PATIENCE)
    assert store.get_finished()[0].success
    expected = [entry.tensor[blocks].copy() for entry in caches.tensors]
    for tensor, want in zip(store.dst_tensors, expected, strict=True):
        there = np.asarray(tensor).reshape(9, factor, -1)[chunks].reshape(-1, want.shape[1])
        np.testing.assert_array_equal(there[skip : skip + count], want)
    for entry in caches.tensors:
        entry.tensor[:] = 0
    load.transfer_async(2, *pair[::-1])
    load.wait({2}, PATIENCE)
    for entry, want in zip(caches.tensors, expected, strict=True):
        np.testing.assert_array_equal(entry.tensor[blocks], want)
    for handler in worker.handlers:
        handler.shutdown(PATIENCE)


def test_a_failed_job_raises_and_the_others_are_collected_afterwards() -> None:
    """vLLM's own connector: no unfinished job is left when the second call comes."""
    gpu, cpu = [np.ones((8, 512), np.int8)], [np.zeros((8, 512), np.int8)]
    device = kvswap.Device("host:61")
    handler = VLLMHandler(gpu, cpu, 1, [[CanonicalKVCacheRef(0, 512)]], gpu_to_cpu=True, device=device)
    assert handler.get_finished() == []
    for job in range(3):
        with testing.fault(device, "copy", "fail") if job == 1 else nullcontext():
            handler.transfer_async(job, GPULoadStoreSpec([job], [1], [0]), CPULoadStoreSpec([job]))
    handler.wait({0, 1, 2}, PATIENCE)
    with pytest.raises(kvswap.Error, match=r"offloading job 1 \(GPU to CPU"):
        handler.get_finished()
    assert [(result.job_id, result.success) for result in handler.get_finished()] == [(0, True), (2, True)]
    assert handler.get_finished() == []
    handler.shutdown(PATIENCE)


def test_a_regions_rows_are_used_as_they_are(vllm: SimpleNamespace) -> None:
    spec = vllm.make(2, 9)
    spec.region = Region(9, 2 * 1024 + 100)
    worker = spec.create_worker(caches_of([512, 512]))
    assert vllm.pinned == [spec.region]
    assert all(np.shares_memory(tensor, spec.region.base) for tensor in worker.handlers[0].dst_tensors)
    assert worker.handlers[0].dst_tensors[0].shape == (9, 1024)


class SharedFile(Region):
    """A region that all ranks have mapped."""

    def __init__(self, chunks: int, row: int, path: Path) -> None:
        super().__init__(chunks, row)
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT)
        self._base = SimpleNamespace(data_ptr=lambda: self.base.ctypes.data, nbytes=self.base.nbytes)
        self.cleaned, self._worker_offset, self._worker_area_end = 0, 0, row

    def cleanup(self) -> None:
        self.cleaned += 1
        os.close(self.fd)


@pytest.mark.parametrize("factor", [1, 2])
def test_ranks_share_the_loads_of_one_region(
    factor: int,
    vllm: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The other rank does not come; test_offload_share.py has two."""
    monkeypatch.setattr(_share, "_SECONDS", 0.01)
    parallel = SimpleNamespace(world_size=2, rank=0, data_parallel_index=0)
    config = SimpleNamespace(
        parallel=parallel, cache=SimpleNamespace(blocks_per_chunk=factor), groups=(None,), engine_id="one"
    )
    extra = {"kvswap_share": True}
    asked = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra), model_config=None)
    with _share.allowed(asked, object):
        spec = vllm.make(factor, 9, extra, replicated_layout=True, config=config, by_blocks=factor > 1)
    spec.region = SharedFile(9, factor * (2 * 512 + 100), tmp_path / "region")
    caches = caches_of([512, 512])
    expected = [entry.tensor[[4, 5]].copy() for entry in caches.tensors]
    with caplog.at_level(logging.WARNING, "kvswap.vllm"):
        worker = spec.create_worker(caches)
    assert "of 2 ranks, rank 0 does not reach 1" in caplog.text
    store, load = worker.handlers
    assert store.member is load.member is not None
    pair = GPULoadStoreSpec([4, 5], [2], [0]), CPULoadStoreSpec([7, 2][: 2 // factor])
    store.transfer_async(1, *pair)
    store.wait({1}, PATIENCE)
    assert store.get_finished()[0].success
    for entry in caches.tensors:
        entry.tensor[:] = 0
    load.transfer_async(2, *pair[::-1])
    load.wait({2}, PATIENCE)
    for entry, want in zip(caches.tensors, expected, strict=True):
        np.testing.assert_array_equal(entry.tensor[[4, 5]], want)
    for handler in worker.handlers:
        handler.shutdown(PATIENCE)
    assert spec.region.cleaned == 1


def test_ranks_that_cannot_share_do_not_start(vllm: SimpleNamespace) -> None:
    vllm.gpu_worker.SingleDirectionOffloadingHandler = None
    spec = vllm.make(1, 9)
    spec.share_wait = 0.002
    with pytest.raises(kvswap.Error, match="kvswap_share: its gpu_worker has no SingleDirectionOffloadingHandler"):
        spec.create_worker(caches_of([512]))


def test_a_worker_that_is_not_known_allocates_by_itself(
    vllm: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    known = vllm.gpu_worker.CPUOffloadingWorker

    class CPUOffloadingWorker(known):
        def __init__(self, kv_caches: Any, blocks_per_chunk: int, num_cpu_blocks: int, numa: Any = None) -> None:
            super().__init__(kv_caches, blocks_per_chunk, num_cpu_blocks)

    vllm.gpu_worker.CPUOffloadingWorker = CPUOffloadingWorker
    with caplog.at_level(logging.WARNING, "kvswap.vllm"):
        worker = vllm.make(2, 9).create_worker(caches_of([512, 512]))
    assert "its CPUOffloadingWorker takes numa" in caplog.text
    assert isinstance(worker.handlers[0], VLLMHandler) and worker.handlers[0].dst_tensors[0].flags.c_contiguous


def test_where_a_pool_does_not_fit_vllm_allocates(
    vllm: SimpleNamespace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSWAP_RESERVE", str(1 << 50))
    with caplog.at_level(logging.WARNING, "kvswap.vllm"):
        worker = vllm.make(2, 9).create_worker(caches_of([512, 512]))
    assert "host memory is left to vLLM" in caplog.text
    assert isinstance(worker.handlers[0], VLLMHandler) and worker.handlers[0].dst_tensors[0].flags.c_contiguous


def test_vllms_own_handlers_get_rows_of_the_same_memory(
    vllm: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    caches = caches_of([512, 256])
    caches.group_data_refs[0][1].page_size_bytes = 0  # kvswap's handlers refuse it
    with caplog.at_level(logging.WARNING, "kvswap.vllm"):
        worker = vllm.make(4, 9).create_worker(caches)
    assert "vLLM's own transfers stay" in caplog.text
    assert all(isinstance(handler, TheirHandler) for handler in worker.handlers)
    first, second = worker.handlers[0].cpu_tensors
    assert first.shape == (9, 2048) and second.shape == (9, 1024) and not np.shares_memory(first, second)
    first[:], second[:] = 1, 2
    assert (worker.handlers[1].cpu_tensors[0] == 1).all() and (worker.handlers[1].cpu_tensors[1] == 2).all()


def test_a_cache_of_no_chunks_is_vllms_business(vllm: SimpleNamespace) -> None:
    worker = vllm.make(2, 0).create_worker(caches_of([512]))
    assert all(isinstance(handler, TheirHandler) for handler in worker.handlers)


def test_a_data_parallel_engine_has_ports_of_its_own(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[int, int]] = []
    monkeypatch.setattr(vllm.spec, "serve", lambda port, rank: served.append((port, rank)))
    for index in (0, 1):
        parallel = SimpleNamespace(data_parallel_index=index, world_size=2)
        spec = vllm.make(2, 9, config=SimpleNamespace(parallel=parallel))
        spec.extra_config["kvswap_metrics_port"] = 9400
        spec.create_worker(caches_of([512]))
    assert served == [(9400, 0), (9400, 2)]


SIZES = {
    "0.26": ("kv_bytes_per_chunk", "num_blocks", "blocks_per_chunk"),
    "0.30": ("kv_bytes_per_chunk", "num_chunks", "blocks_per_chunk"),
}


@pytest.mark.parametrize("release", SIZES)
def test_host_memory_of_less_than_a_chunk_is_refused(vllm: SimpleNamespace, release: str) -> None:
    """vLLM rounds it down to no chunk, and would store nothing for ever."""

    def make(nbytes: int, chunks: int) -> Any:
        more = dict(zip(SIZES[release], (nbytes, chunks, 8), strict=True))
        return vllm.make(8, chunks, extra_config={"cpu_bytes_to_use": 1000}, **more)

    said = r"is 1000, less than one chunk: 8 GPU block.* 4096 bytes .* Set cpu_bytes_to_use .* to 4096 or more"
    with pytest.raises(ValueError, match=said):
        make(4096, 0)
    make(4096, 1)
    make(0, 0)  # vLLM does not know the size yet


@pytest.mark.parametrize("missing", ["CPUOffloadingWorker", "mmap_region"])
def test_why_not(missing: str) -> None:
    class CPUOffloadingWorker:
        def __init__(self, kv_caches: Any, blocks_per_chunk: int, num_cpu_blocks: int) -> None:
            pass

    module = (
        SimpleNamespace()
        if missing == "CPUOffloadingWorker"
        else SimpleNamespace(CPUOffloadingWorker=CPUOffloadingWorker)
    )
    reason = _memory.why_not(_memory.worker_class(module))
    assert reason is not None and ("has no CPUOffloadingWorker" if not vars(module) else "takes no region") in reason
