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
from kvswap.codecs import Coding
from kvswap.offload import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    OffloadingWorker,
    SingleDirectionOffloadingHandler,
)
from kvswap.offload._lend import Lend
from kvswap.share import _lend

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")

KIB = 1 << 10
PAGES = [16 * KIB, 12 * KIB + 8]
CODED_PAGES = [16 * KIB, 8 * KIB]
CELL, RANKS = 28 * KIB + 100, 2  # of a row: the second cell is another rank's
CODED_CELL = 24 * KIB
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

    def __init__(self, device: kvswap.Device, cell: int, pages: list[int]) -> None:
        self.fd, self.device, self.at, self.pages = os.memfd_create("region"), device, cell, iter(pages)
        os.ftruncate(self.fd, CHUNKS * RANKS * cell)
        self.base = np.memmap(f"/proc/self/fd/{self.fd}", np.int8, "r+", shape=(CHUNKS, RANKS * cell))
        self.base[:] = 0x55
        device.register(self.base.ctypes.data, self.base.nbytes)

    def create_next_worker_view(self, _: int) -> Any:
        nbytes = next(self.pages)
        self.at += nbytes
        return self.base[:, self.at - nbytes : self.at]

    def cleanup(self) -> None:
        self.device.unregister(self.base.ctypes.data)


class Engine:
    def __init__(self, name: str, engine: str, device: str, codec: str | None = None) -> None:
        _lend._LOOK = 0.1
        self.device = kvswap.Device(device)
        pages = PAGES if codec is None else CODED_PAGES
        self.codings = None if codec is None else [Coding(page, codec) for page in pages]
        self.pages = pages if codec is None else [coding.coded_nbytes for coding in self.codings]  # on the host
        self.cell = CELL if codec is None else CODED_CELL
        self.region = Region(self.device, self.cell, self.pages)
        self.gpu = [np.zeros((BLOCKS, page), np.int8) for page in pages]
        entries = [CanonicalKVCacheTensor(tensor, page) for tensor, page in zip(self.gpu, pages, strict=True)]
        refs = [[CanonicalKVCacheRef(i, page) for i, page in enumerate(pages)]]
        file = _lend.HostFile(self.region.fd, 0, self.region.base.ctypes.data)
        piece = 4 * sum(self.pages)
        lend = Lend(name, engine, "test", os.fstat(self.region.fd).st_ino, file, True, 3, lambda: True, piece)
        given = {"device": self.device, "lend": lend, "codings": self.codings}
        self.worker = OffloadingWorker(CanonicalKVCaches(entries, refs), 1, CHUNKS, self.region, **given)
        self.rng, self.jobs = np.random.default_rng(3), itertools.count()

    @property
    def lending(self) -> _lend.Lending:
        return self.worker._store_handler.lending

    def run(self, count: int) -> tuple[int, set[str]]:
        """A store and a load of new bytes; bytes by others, and paths."""
        blocks, chunks = self.rng.permutation(BLOCKS)[:count], self.rng.permutation(CHUNKS)[:count]
        self.fill(blocks)
        wanted, rows = [tensor[blocks].copy() for tensor in self.gpu], self.region.base.copy()
        at = self.cell
        for i, nbytes in enumerate(self.pages):
            coded = wanted[i]
            if self.codings is not None:
                coded, verdicts = self.codings[i].encode(wanted[i])
                wanted[i] = self.codings[i].decode(coded)[0].view(np.int8)
                assert not verdicts.any()
            rows[chunks, at : at + nbytes] = coded.view(np.int8)
            at += nbytes
        gpu, cpu = GPULoadStoreSpec(blocks, [count], [0]), CPULoadStoreSpec(chunks)
        transfers = []
        for submit, sides in ((self.worker.submit_store, (gpu, cpu)), (self.worker.submit_load, (cpu, gpu))):
            job = next(self.jobs)
            submit(job, *sides)
            handler = self.worker._store_handler if submit == self.worker.submit_store else self.worker._load_handler
            transfers += handler._transfers[-1].transfers
            handler.make_wait(job)
            assert all(transfer.done() for transfer in transfers)
            assert np.array_equal(self.region.base[:, :at], rows[:, :at])
            for tensor in self.gpu if submit == self.worker.submit_store else ():
                tensor[:] = 0
        assert all(result.success for result in self.worker.get_finished())
        assert all(np.array_equal(tensor[blocks], page) for tensor, page in zip(self.gpu, wanted, strict=True))
        return sum(getattr(each, "by_others", 0) for each in transfers), {each.path for each in transfers}

    def fill(self, blocks: Any) -> None:
        """Random bytes; where blocks are coded, normal values in bf16."""
        for tensor in self.gpu:
            shape = len(blocks), tensor.shape[1]
            if self.codings is None:
                tensor[blocks] = self.rng.integers(-128, 128, shape, np.int8)
            else:
                values = self.rng.standard_normal((shape[0], shape[1] // 2), np.float32)
                tensor[blocks] = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.int8)

    def finish(self, job: int, *sides: Any) -> Any:
        """The result of a store, or of a load."""
        store = isinstance(sides[0], GPULoadStoreSpec)
        (self.worker.submit_store if store else self.worker.submit_load)(job, *sides)
        self.worker.wait([job], PATIENCE)
        [result] = self.worker.get_finished()
        return result

    def close(self) -> None:
        self.worker.shutdown(PATIENCE)
        os.close(self.region.fd)


class Other:
    def __init__(self, name: str, codec: str | None = None) -> None:
        paths = json.dumps([os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))])
        self.popen = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", ENGINE, json.dumps([name, "other", "host:1", codec]), paths],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **elsewhere(),
        )  # fmt: skip

    def end(self) -> int:
        self.popen.communicate(timeout=PATIENCE)
        return self.popen.returncode


@pytest.fixture
def name() -> str:
    return f"o{os.getpid()}.{next(names)}"


@pytest.fixture
def here(name: str, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(name, "here", "host:0", getattr(request, "param", None))
    yield engine
    engine.close()


@pytest.mark.parametrize(("here", "codec"), [(None, "exact"), ("exact", None), ("mxfp8", "exact")], indirect=["here"])
def test_jobs_go_over_the_others_link_while_it_is_lent(here: Engine, name: str, codec: str | None) -> None:
    """Whatever the lender's own codec is: it moves bytes."""
    assert "share" not in here.run(BLOCKS)[1]
    other = Other(name, codec)
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
        assert not here.finish(1000, gpu, cpu).success
    other = Other(name)
    until(lambda: here.lending.member.peers)
    assert here.finish(1001, gpu, cpu).success
    assert other.end() == 0
    until(lambda: not here.lending.member.peers)
    assert here.finish(1002, cpu, gpu).success


@pytest.mark.parametrize("here", ["exact"], indirect=True)
def test_a_block_that_does_not_fit_is_known_by_any_way(here: Engine, name: str) -> None:
    gpu, cpu = GPULoadStoreSpec(range(BLOCKS), [BLOCKS], [0]), CPULoadStoreSpec(range(BLOCKS))
    other = Other(name)
    until(lambda: here.lending.member.peers)
    here.fill(range(BLOCKS))
    bad = [2, 70, BLOCKS - 1]  # over the own link, and over the other's
    for block in bad:
        here.gpu[1][block] = here.rng.integers(-128, 128, CODED_PAGES[1], np.int8)
    result = here.finish(1, gpu, cpu)
    assert result.success and result.not_stored == dict.fromkeys(bad, "codec")
    stats = here.worker.stats()["store"]
    assert stats.not_stored == len(bad) and set(stats.paths) == {"share"}
    assert not here.finish(2, cpu, gpu).success, "their slots say so"
    for block in bad:
        one = GPULoadStoreSpec([block], [1], [0]), CPULoadStoreSpec([block])
        assert not here.finish(10 + block, *one[::-1]).success, "also of a load as without a lender"
    here.fill(range(BLOCKS))
    assert here.finish(3, gpu, cpu).not_stored == {} and here.finish(4, cpu, gpu).success
    here.gpu[1][0] = here.gpu[1][0] ^ here.rng.integers(-128, 128, CODED_PAGES[1], np.int8)
    row = here.region.base[0].copy()
    one = GPULoadStoreSpec([0], [1], [0]), CPULoadStoreSpec([0])
    assert here.finish(5, *one).not_stored == {0: "codec"}
    here.region.base[0] = row  # as a store would, of which the other brings this block
    assert here.finish(6, cpu, gpu).success, "what the pools remember of jobs as without a lender"
    assert other.end() == 0


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
        SingleDirectionOffloadingHandler(
            [gpu], [cpu], 1, [[CanonicalKVCacheRef(0, 4096)]], device=device, lend=lend, **options
        )
