"""Handlers of engines that lend each other their links (lend=): which jobs go over the other's link, and every byte.
test_share_lend.py has the loans, tests/integration/vllm_lend.py two whole engines."""

# mypy: ignore-errors

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, elsewhere, until

import kvswap
from kvswap import testing
from kvswap.offload import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingWorker,
)
from kvswap.offload._lend import Lend
from kvswap.share import _lend

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")

KIB = 1 << 10
PAGES = [16 * KIB, 12 * KIB + 8]
CELL, RANKS = 28 * KIB + 100, 2  # of a row: the second cell is another rank's
BLOCKS, CHUNKS = 150, 200
names = itertools.count()

ENGINE = """
import json, sys
sys.path[:0] = json.loads(sys.argv[2])
from test_offload_lend import Engine
engine = Engine(*json.loads(sys.argv[1]))
for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
engine.close()
"""


class Region:
    """Host memory in a file, as vLLM's: rows of chunks, with a cell of each rank."""

    def __init__(self, device: kvswap.Device) -> None:
        self.fd, self.device, self.at = os.memfd_create("region"), device, CELL
        os.ftruncate(self.fd, CHUNKS * RANKS * CELL)
        self.base = np.memmap(f"/proc/self/fd/{self.fd}", np.int8, "r+", shape=(CHUNKS, RANKS * CELL))
        self.base[:] = 0x55
        device.register(self.base.ctypes.data, self.base.nbytes)

    def create_next_worker_view(self, nbytes: int) -> Any:
        self.at += nbytes
        return self.base[:, self.at - nbytes : self.at]

    def cleanup(self) -> None:
        self.device.unregister(self.base.ctypes.data)


class Engine:
    def __init__(self, name: str, engine: str, device: str, **options: Any) -> None:
        _lend._LOOK = 0.1
        self.device = kvswap.Device(device)
        self.region = Region(self.device)
        self.gpu = [np.zeros((BLOCKS, page), np.int8) for page in PAGES]
        entries = [CanonicalKVCacheTensor(tensor, page) for tensor, page in zip(self.gpu, PAGES, strict=True)]
        refs = [[CanonicalKVCacheRef(i, page) for i, page in enumerate(PAGES)]]
        file = _lend.HostFile(self.region.fd, 0, self.region.base.ctypes.data)
        lend = Lend(name, engine, "test", os.fstat(self.region.fd).st_ino, file, True, 3, lambda: True, 4 * sum(PAGES))
        caches = CanonicalKVCaches(entries, refs)
        self.worker = OffloadingWorker(caches, 1, CHUNKS, self.region, device=self.device, lend=lend, **options)
        self.rng, self.jobs = np.random.default_rng(3), itertools.count()

    @property
    def lending(self) -> _lend.Lending:
        return self.worker._store_handler.lending

    def run(self, count: int) -> tuple[int, set[str]]:
        """A store and a load of new bytes; bytes by others, and paths."""
        blocks, chunks = self.rng.permutation(BLOCKS)[:count], self.rng.permutation(CHUNKS)[:count]
        for tensor in self.gpu:
            tensor[blocks] = self.rng.integers(-128, 128, (count, tensor.shape[1]), np.int8)
        wanted, rows = [tensor[blocks].copy() for tensor in self.gpu], self.region.base.copy()
        at = CELL
        for page in wanted:
            rows[chunks, at : at + page.shape[1]] = page
            at += page.shape[1]
        gpu, cpu = GPULoadStoreSpec(blocks, [count], [0]), CPULoadStoreSpec(chunks)
        transfers = []
        for submit, sides in ((self.worker.submit_store, (gpu, cpu)), (self.worker.submit_load, (cpu, gpu))):
            job = next(self.jobs)
            submit(job, *sides)
            handler = self.worker._store_handler if submit == self.worker.submit_store else self.worker._load_handler
            transfers += handler._transfers[-1].transfers
            handler.make_wait(job)
            assert all(transfer.done() for transfer in transfers)
            assert np.array_equal(self.region.base[:, : CELL + sum(PAGES)], rows[:, : CELL + sum(PAGES)])
            for tensor in self.gpu if submit == self.worker.submit_store else ():
                tensor[:] = 0
        assert all(result.success for result in self.worker.get_finished())
        assert all(np.array_equal(tensor[blocks], page) for tensor, page in zip(self.gpu, wanted, strict=True))
        return sum(getattr(each, "by_others", 0) for each in transfers), {each.path for each in transfers}

    def close(self) -> None:
        self.worker.shutdown(PATIENCE)
        os.close(self.region.fd)


class Other:
    def __init__(self, name: str) -> None:
        paths = json.dumps([os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))])
        self.popen = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", ENGINE, json.dumps([name, "other", "host:1"]), paths],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **elsewhere(),
        )  # fmt: skip

    def end(self) -> int:
        self.popen.communicate(timeout=PATIENCE)
        return self.popen.returncode


@pytest.fixture
def name() -> str:
    return f"o{os.getpid()}.{next(names)}"


@pytest.fixture
def here(name: str) -> Iterator[Engine]:
    engine = Engine(name, "here", "host:0")
    yield engine
    engine.close()


def test_jobs_go_over_the_others_link_while_it_is_lent(here: Engine, name: str) -> None:
    assert "share" not in here.run(BLOCKS)[1]
    other = Other(name)
    until(lambda: here.lending.member.peers)
    found = 0
    while not found:
        found, paths = here.run(BLOCKS)
        assert paths == {"share"}
    assert "share" not in here.run(15)[1] and here.run(16)[1] == {"share"}, "of less than four pieces"
    assert other.end() == 0
    until(lambda: not here.lending.member.peers)
    assert "share" not in here.run(BLOCKS)[1]


def test_a_failed_store_is_forgotten_by_both_ways(here: Engine, name: str) -> None:
    gpu, cpu = GPULoadStoreSpec(range(BLOCKS), [BLOCKS], [0]), CPULoadStoreSpec(range(BLOCKS))
    with testing.fault(here.device, "copy", "fail", every=1):
        here.worker.submit_store(1000, gpu, cpu)
        here.worker.wait([1000], PATIENCE)
    assert [result.success for result in here.worker.get_finished()] == [False]
    other = Other(name)
    until(lambda: here.lending.member.peers)
    here.worker.submit_store(1001, gpu, cpu)
    here.worker.wait([1001], PATIENCE)
    assert other.end() == 0
    until(lambda: not here.lending.member.peers)
    here.worker.submit_load(1002, cpu, gpu)
    here.worker.wait([1002], PATIENCE)
    results = here.worker.get_finished()
    assert [result.success for result in results] == [True, True]


def test_layer_events_are_as_ever(here: Engine, name: str) -> None:
    other = Other(name)
    until(lambda: here.lending.member.peers)
    handler = here.worker._load_handler
    handler.transfer_async(
        5, CPULoadStoreSpec(range(BLOCKS)), GPULoadStoreSpec(range(BLOCKS), [BLOCKS], [0]), layer_events=True
    )
    handler.make_wait(5, [0])
    here.worker.wait([5], PATIENCE)
    [result] = here.worker.get_finished()
    assert result.success and "share" not in handler.stats().paths
    assert other.end() == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"path": "dma"}, "lend: path does not apply"),
        ({"priority": "high"}, "lend: priority does not apply"),
        ({"canonical_layout": True}, "lend: canonical_layout does not apply"),
    ],
)
def test_what_does_not_go_with_it_is_refused(name: str, options: dict[str, Any], why: str) -> None:
    device = kvswap.Device("host:0")
    gpu, cpu = (np.zeros((4, 4096), np.int8) for _ in range(2))
    lend = Lend(name, "here", "test", 1, _lend.HostFile(0, 0, 0), False, 3, lambda: True)
    with pytest.raises(ValueError, match=why):
        kvswap.offload.SingleDirectionOffloadingHandler(
            [gpu], [cpu], 1, [[CanonicalKVCacheRef(0, 4096)]], device=device, lend=lend, **options
        )
