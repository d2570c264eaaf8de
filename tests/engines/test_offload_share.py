"""Handlers of ranks that hold the same cache: they load it once, each a part, from one host memory; one rank stores."""

# mypy: ignore-errors

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
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
    SingleDirectionOffloadingHandler,
)
from kvswap.offload._member import Share

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")

KIB = 1 << 10
PAGES = [64 * KIB, 48 * KIB + 8, 64 * KIB]  # of each layer: 16 KiB and more, and not all multiples of 16
ROW = sum(PAGES) + 100  # of a chunk, with something behind it that is nobody's
BLOCKS, CHUNKS = 300, 250
names = iter(range(1 << 20))

RANK = """
import json, os, sys
sys.path.insert(0, sys.argv[2])
from test_offload_share import Rank
given = json.loads(sys.argv[1])
rank = Rank(**given)
print(json.dumps("here"), flush=True)
for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
rank.close()
"""


class Region:
    """Host memory that all ranks have mapped, as vLLM's: rows of chunks, in a file. factor: the blocks of a chunk lie
    one behind the other."""

    def __init__(self, path: str, device: kvswap.Device, row: int = ROW, factor: int = 1) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, CHUNKS * factor * row)
        self.file = os.fstat(fd)
        os.close(fd)
        self.base = np.memmap(path, np.int8, "r+", shape=(CHUNKS, factor, row))
        self.at, self.device, self.factor = 0, device, factor
        device.register(self.base.ctypes.data, self.base.nbytes)

    def create_next_worker_view(self, nbytes: int) -> Any:
        self.at += nbytes // self.factor
        view = self.base[:, :, self.at - nbytes // self.factor : self.at]
        return view[:, 0] if self.factor == 1 else view

    def cleanup(self) -> None:
        self.device.unregister(self.base.ctypes.data)


class Rank:
    """A worker of one rank, over a cache of its own."""

    def __init__(
        self, group: str, rank: int, path: str, ranks: int = 2, wait: float = 10.0, stall: float = 10.0
    ) -> None:
        self.device = kvswap.Device(f"host:{rank}")
        self.region = Region(path, self.device)
        self.gpu = [np.zeros((BLOCKS, page), np.int8) for page in PAGES]
        entries = [CanonicalKVCacheTensor(tensor, page) for tensor, page in zip(self.gpu, PAGES, strict=True)]
        refs = [[CanonicalKVCacheRef(i, page) for i, page in enumerate(PAGES)]]
        share = Share(group, rank, ranks, path, self.region.file.st_ino, wait, stall)
        self.worker = OffloadingWorker(
            CanonicalKVCaches(entries, refs), 1, CHUNKS, self.region, device=self.device, share=share
        )
        self.member = self.worker._store_handler._map.member

    def load(self, job: int, chunks: list[int], blocks: list[int], expedited: bool = False) -> None:
        self.worker.submit_load(job, CPULoadStoreSpec(chunks), GPULoadStoreSpec(blocks, [len(blocks)], [0]), expedited)

    def store(self, job: int, blocks: list[int], chunks: list[int]) -> None:
        self.worker.submit_store(job, GPULoadStoreSpec(blocks, [len(blocks)], [0]), CPULoadStoreSpec(chunks))

    def end(self, jobs: list[int]) -> dict[int, str | None]:
        """The errors of these jobs, which are all that have not been collected."""
        self.worker.wait(set(jobs), PATIENCE)
        return {r.job_id: str(r.error) if r.error else None for r in self.worker.get_finished()}

    def holds(self, chunks: list[int], blocks: list[int]) -> bool:
        """Whether these GPU blocks and these chunks are the same."""
        views = self.worker._store_handler.dst_tensors
        return all(np.array_equal(gpu[blocks], host[chunks]) for gpu, host in zip(self.gpu, views, strict=True))

    def fill(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for tensor in self.gpu:
            tensor[:] = rng.integers(-128, 128, tensor.shape, np.int8)

    def close(self) -> None:
        self.worker.shutdown(PATIENCE)


class Other:
    """A rank in a process of its own, which evaluates lines."""

    def __init__(self, **given: Any) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", RANK, json.dumps(given), os.path.dirname(__file__)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **elsewhere(),
        )  # fmt: skip

    def say(self, line: str) -> None:
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()

    def hear(self) -> Any:
        return json.loads(self.popen.stdout.readline())

    def ask(self, line: str) -> Any:
        self.say(line)
        return self.hear()

    def end(self) -> int:
        self.popen.communicate(timeout=PATIENCE)
        return self.popen.returncode


@pytest.fixture
def given(tmp_path: Any) -> dict[str, Any]:
    return {"group": f"offload{os.getpid()}.{next(names)}", "path": str(tmp_path / "region")}


@pytest.fixture
def ranks(given: dict[str, Any]) -> Iterator[tuple[Rank, Other]]:
    here, other = Rank(rank=0, **given), Other(rank=1, **given)
    assert other.hear() == "here"
    here.member.wait_peers([1], PATIENCE)
    yield here, other
    other.popen.send_signal(signal.SIGCONT)
    other.popen.kill()
    other.end()
    here.close()


def ids(seed: int, count: int) -> tuple[list[int], list[int], list[int]]:
    """Chunks, and blocks of two ranks."""
    rng = np.random.default_rng(seed)
    return tuple(rng.permutation(most)[:count].tolist() for most in (CHUNKS, BLOCKS, BLOCKS))


def test_a_load_of_both_ranks_crosses_the_links_once(ranks: tuple[Rank, Other]) -> None:
    here, other = ranks
    here.fill(1)
    chunks, first, second = ids(2, 200)
    here.store(1, first, chunks)
    assert here.end([1]) == {1: None} and here.holds(chunks, first)
    here.fill(3)
    for job, expedited in ((2, False), (3, True)):
        other.say(f"rank.load({job}, {chunks}, {second}, {expedited})")
        here.load(job, chunks, first, expedited)
        assert other.hear() is None
        assert here.end([job]) == {job: None} and here.holds(chunks, first)
        assert other.ask(f"rank.end([{job}])") == {str(job): None}
        assert other.ask(f"rank.holds({chunks}, {second})")
    mine, theirs = here.member.stats(), other.ask("rank.member.stats()")
    nbytes = 2 * 200 * ROW  # of each rank
    for one in (mine, theirs):
        assert 0.3 * nbytes < one["brought_by_others_h2d"] < 0.7 * nbytes, one
    stats = here.worker.stats()
    assert stats["load"].paths == stats["expedited_load"].paths == {"share": 1}
    assert stats["load"].jobs == 1 and stats["load"].bytes == 200 * ROW


def test_one_rank_stores_and_the_links_of_others_take_part(ranks: tuple[Rank, Other]) -> None:
    here, other = ranks
    jobs = itertools.count()

    def brought_by_others() -> int:
        job = next(jobs)
        here.fill(job)
        chunks, first, _ = ids(job, 240)
        here.store(job, first, chunks)
        assert here.end([job]) == {job: None} and here.holds(chunks, first)
        return here.member.stats()["brought_by_others_d2h"]

    until(brought_by_others, "a store that the other's link takes part in")  # a busy machine's other process is late
    assert other.ask("rank.end([])") == {}


def test_jobs_of_several_queues(ranks: tuple[Rank, Other]) -> None:
    """Loads beside a store, which the other rank has in another order."""
    here, other = ranks
    here.fill(1)
    chunks, first, second = ids(4, 240)
    here.store(0, first, chunks)
    assert here.end([0]) == {0: None}
    parts = [slice(60 * i, 60 * i + 60) for i in range(4)]
    for i in (2, 0, 1):
        other.ask(f"rank.load({i + 1}, {chunks[parts[i]]}, {second[parts[i]]})")
    here.store(9, first[parts[3]], chunks[parts[3]])
    for i in range(3):
        here.load(i + 1, chunks[parts[i]], first[parts[i]], i == 1)
    assert here.end([1, 2, 3, 9]) == dict.fromkeys([1, 2, 3, 9])
    assert other.ask("rank.end([1, 2, 3])") == dict.fromkeys(["1", "2", "3"])
    assert other.ask(f"rank.holds({chunks[:180]}, {second[:180]})") and here.holds(chunks, first)


def test_a_rank_whose_call_does_not_come_is_not_waited_for(given: dict[str, Any]) -> None:
    here, other = Rank(rank=0, wait=0.02, **given), Other(rank=1, wait=0.02, **given)
    assert other.hear() == "here"
    here.member.wait_peers([1], PATIENCE)
    here.fill(5)
    chunks, first, second = ids(6, 100)
    here.store(1, first, chunks)
    assert here.end([1]) == {1: None}
    here.fill(6)
    here.load(2, chunks, first)
    assert here.end([2]) == {2: None} and here.holds(chunks, first)
    assert other.ask(f"rank.load(2, {chunks}, {second}) or rank.end([2])") == {"2": None}
    assert other.ask(f"rank.holds({chunks}, {second})")
    assert other.end() == 0
    here.close()


@pytest.mark.parametrize("seed", range(6))
def test_a_rank_that_is_killed_in_the_middle(ranks: tuple[Rank, Other], seed: int) -> None:
    """The blocks of the one that is left are right, within a limit."""
    here, other = ranks
    chance = random.Random(seed)
    other.say("[(rank.load(j, *[list(range(200))] * 2), rank.end([j])) for j in range(1, 10000) if j % 3] and 0")
    killer = threading.Timer(chance.random() * 0.1, other.popen.kill)
    begin = time.monotonic()
    killer.start()
    for job in range(1, 10000):
        here.fill(job)
        if job % 3 == 0:
            here.store(job, list(range(200)), list(range(200)))
        else:
            here.load(job, list(range(200)), list(range(200)))
        assert here.end([job]) == {job: None} and here.holds(list(range(200)), list(range(200)))
        if not here.member.peers and job > 3:
            break
        assert time.monotonic() < begin + PATIENCE
    killer.join()


def test_a_failed_load_is_reported_and_the_next_one_is_right(ranks: tuple[Rank, Other]) -> None:
    here, other = ranks
    here.fill(1)
    chunks, first, second = ids(8, 200)
    here.store(1, first, chunks)
    assert here.end([1]) == {1: None}
    with testing.fault(here.device, "copy", "fail", nth=1, every=1):
        here.load(2, chunks, first)
        other.say(f"rank.load(2, {chunks}, {second}) or rank.end([2])")
        assert "injected fault" in here.end([2])[2]
        assert other.hear() == {"2": None} and other.ask(f"rank.holds({chunks}, {second})")
    here.fill(9)  # as a model that computes them instead
    here.store(3, first, chunks)
    assert here.end([3]) == {3: None} and here.holds(chunks, first)


def test_a_failed_store_is_reported_and_stored_again(ranks: tuple[Rank, Other]) -> None:
    here, other = ranks
    chunks, first, _ = ids(9, 200)
    with testing.fault(here.device, "copy", "fail", nth=1, every=1):
        here.store(1, first, chunks)
        assert "injected fault" in here.end([1])[1]
    here.fill(9)
    here.store(2, first, chunks)
    assert here.end([2]) == {2: None} and here.holds(chunks, first)
    here.load(3, chunks, first)
    other.ask(f"rank.load(3, {chunks}, {first})")
    assert here.end([3]) == {3: None}


def test_a_full_queue_waits_for_its_oldest_job(ranks: tuple[Rank, Other]) -> None:
    here, _ = ranks
    here.fill(3)
    for job in range(CHUNKS):
        here.store(job, [job], [job])
    assert here.end(list(range(CHUNKS))) == dict.fromkeys(range(CHUNKS))
    assert here.holds(list(range(CHUNKS)), list(range(CHUNKS)))


def test_the_memory_can_go_when_the_handlers_have_ended(given: dict[str, Any]) -> None:
    for _ in range(3):
        here = Rank(rank=0, **given)
        here.fill(1)
        here.store(1, [1, 2], [3, 4])
        assert here.end([1]) == {1: None}
        here.load(2, [3, 4], [5, 6])
        here.close()  # which waits for the load
        with pytest.raises(ValueError, match="already given back"):
            here.region.cleanup()
        with pytest.raises(kvswap.Error, match="the member is closed"):
            here.member.load([1], [1])


def test_no_stream_waits_for_a_shared_load(ranks: tuple[Rank, Other]) -> None:
    here, _ = ranks
    handler = here.worker._load_handler
    here.load(1, [1], [1])
    with pytest.raises(ValueError, match=r"job 1 is shared: .* no stream waits for it"):
        handler.make_wait(1)
    with pytest.raises(ValueError, match="layer_events: a shared load is not all queued"):
        handler.transfer_async(2, CPULoadStoreSpec([2]), GPULoadStoreSpec([2], [1], [0]), layer_events=True)
    with pytest.raises(ValueError, match="2 gpu_blocks and 1 chunks do not fit group_sizes"):
        handler.transfer_async(2, CPULoadStoreSpec([2]), _wrong())
    with pytest.raises(IndexError, match=r"chunks\[0\] is 250"):
        handler.transfer_async(2, CPULoadStoreSpec([CHUNKS]), GPULoadStoreSpec([2], [1], [0]))
    assert here.end([1]) == {1: None}


def _wrong() -> GPULoadStoreSpec:
    spec = GPULoadStoreSpec([2, 3], [2], [0])
    spec.group_sizes = [1]
    return spec


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"path": "dma"}, "share: path does not apply"),
        ({"priority": "high"}, "share: priority does not apply"),
        ({"pace_gbps": 3.0}, "share: pace_gbps does not apply"),
        ({"canonical_layout": True}, "share: canonical_layout does not apply"),
        ({"layer_parts": [[[0, 256], [256, 512]]]}, "share: layer_parts does not apply"),
        ({"block_size_factor": 2, "kv_cache_groups_data_refs": [[CanonicalKVCacheRef(0, 256)]]}, "not registered with"),
        ({"kv_cache_groups_data_refs": [[], []]}, "2 groups of layers: it must be one"),
        ({"kv_cache_groups_data_refs": [[CanonicalKVCacheRef(0, 513)]]}, "page_size_bytes is 513"),
        ({}, "not registered with host:0"),
    ],
)
def test_what_members_cannot_bring_is_refused(more: dict[str, Any], why: str) -> None:
    arguments = {
        "block_size_factor": 1,
        "kv_cache_groups_data_refs": [[CanonicalKVCacheRef(0, 512)]],
        "share": Share("refused", 0, 2, "nowhere", 0),
        **more,
    }
    with pytest.raises(ValueError, match=why):
        SingleDirectionOffloadingHandler([np.zeros((8, 512), np.int8)], [np.zeros((8, 512), np.int8)], **arguments)


def test_replicas_lend_their_links_to_loads_of_some_size_and_never_to_stores(given: dict[str, Any]) -> None:
    """A lender that still wrote for a process that was killed would write to blocks that are another's by then."""
    one, other = Rank(rank=0, ranks=0, **given), Other(rank=1, ranks=0, **given)
    try:
        assert other.hear() == "here"
        until(lambda: one.member.peers == (1,))
        blocks, chunks = list(range(5, 205)), list(range(249, 49, -1))
        one.fill(7)
        one.store(1, blocks, chunks)
        assert one.end([1]) == {1: None} and one.holds(chunks, blocks)
        jobs = itertools.count(2)

        def brought(count: int) -> bool:
            """By the other, of a load; that may be nothing, if the other is late."""
            job = next(jobs)
            for tensor in one.gpu:
                tensor[:] = 0
            one.load(job, chunks[:count], blocks[:count])
            assert one.end([job]) == {job: None} and one.holds(chunks[:count], blocks[:count])
            return one.member.stats()["brought_by_others_h2d"] > 0

        assert not brought(20)  # of 4 MiB
        until(lambda: brought(200))  # of 35
        assert one.member.stats()["brought_by_others_d2h"] == 0
        other.say(
            f"rank.load(1, {chunks}, {blocks}) or rank.end([1]) == {{1: None}} and rank.holds({chunks}, {blocks})"
        )
        assert other.hear() is True
        other.popen.kill()
        brought(200)
    finally:
        other.popen.kill()
        other.popen.communicate()
        one.close()
