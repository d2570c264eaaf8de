"""Handlers of ranks that load a coded cache once: bytes, chunks of several blocks, and blocks that do not fit."""

# ruff: noqa: F811  # fixtures of test_offload_share are arguments
# mypy: ignore-errors

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import test_offload_share
from conftest import PATIENCE, elsewhere, until
from test_offload_share import CHUNKS, Region
from test_offload_share import given as given

import kvswap
from kvswap.codecs import Coding
from kvswap.offload import (
    CanonicalKVCacheRef,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    SingleDirectionOffloadingHandler,
)
from kvswap.offload._member import Share

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")

PAGES = [16 << 10, 8 << 10, 16 << 10]
CODINGS = [Coding(page, "exact") for page in PAGES]
ROW = sum(coding.coded_nbytes for coding in CODINGS)
BLOCKS = 300

RANK = """
import json, sys
sys.path.insert(0, sys.argv[2])
from test_offload_coded_share import Rank
rank = Rank(**json.loads(sys.argv[1]))
print(json.dumps("here"), flush=True)
for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
rank.close()
"""


def bf16(shape: tuple[int, ...], seed: int) -> Any:
    values = np.random.default_rng(seed).standard_normal((*shape[:-1], shape[-1] // 2), np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.int8)


class Rank:
    """The handlers of one rank, over a cache of its own."""

    def __init__(self, group: str, rank: int, path: str, factor: int = 1, cell: int | None = None) -> None:
        """cell: of a replica whose rows have two cells."""
        self.factor, self.device = factor, kvswap.Device(f"host:{rank}")
        self.region = Region(path, self.device, ROW if cell is None else 2 * ROW, factor)
        self.region.at = ROW * (cell or 0)
        self.gpu = [np.zeros((BLOCKS, page), np.int8) for page in PAGES]
        self.cpu = [self.region.create_next_worker_view(factor * coding.coded_nbytes) for coding in CODINGS]
        refs = [[CanonicalKVCacheRef(i, page) for i, page in enumerate(PAGES)]]
        share = Share(group, rank, 2, path, self.region.file.st_ino, 0.3, 10.0)
        if cell is not None:
            share = share._replace(ranks=0, piece_nbytes=4 * ROW, cells=True)
        self.store, self.load = (
            SingleDirectionOffloadingHandler(
                self.gpu, self.cpu, factor, refs, to_cpu, device=self.device, share=share, codings=CODINGS,
                wait_timeout=PATIENCE,
            )
            for to_cpu in (True, False)
        )  # fmt: skip
        self.member = self.store.member
        assert self.load.member is self.member

    def submit(self, job: int, to_cpu: bool, blocks: list[int], chunks: list[int], index: int = 0) -> None:
        gpu, cpu = GPULoadStoreSpec(blocks, [len(blocks)], [index]), CPULoadStoreSpec(chunks)
        (self.store if to_cpu else self.load).transfer_async(job, (gpu, cpu) if to_cpu else (cpu, gpu))

    def end(self, to_cpu: bool) -> Any:
        """Success, and the chunks that are not stored, of the one job."""
        handler = self.store if to_cpu else self.load
        handler.drain(PATIENCE)
        (result,) = handler.get_finished()
        return [result.success, {str(chunk): why for chunk, why in result.not_stored.items()}]

    def holds(self, chunks: list[int], blocks: list[int], index: int = 0) -> bool:
        """Whether these GPU blocks are those of these chunks, from the block `index` on."""
        slots = [(chunks[i // self.factor], i % self.factor) for i in range(index, index + len(blocks))]
        for gpu, host, coding in zip(self.gpu, self.cpu, CODINGS, strict=True):
            coded = host.reshape(CHUNKS, self.factor, -1)[tuple(zip(*slots, strict=True))].view(np.uint8)
            if not np.array_equal(gpu[blocks].view(np.uint8), coding.decode(coded)[0]):
                return False
        return True

    def fill(self, seed: int) -> None:
        for tensor in self.gpu:
            tensor[:] = bf16(tensor.shape, seed)

    def close(self) -> None:
        for handler in (self.store, self.load):
            handler.shutdown(PATIENCE)
        del self.cpu
        self.region.cleanup()


class Other(test_offload_share.Other):
    """A rank in a process of its own, which evaluates lines."""

    def __init__(self, **given: Any) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", RANK, json.dumps(given), os.path.dirname(__file__)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **elsewhere(),
        )  # fmt: skip


@pytest.fixture(params=[1, 3], ids=["a block a chunk", "3 blocks a chunk"])
def ranks(given: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[tuple[Rank, Other]]:
    here, other = Rank(rank=0, factor=request.param, **given), Other(rank=1, factor=request.param, **given)
    assert other.hear() == "here"
    here.member.wait_peers([1], PATIENCE)
    yield here, other
    other.popen.kill()
    other.end()
    here.close()


def test_ranks_load_coded_blocks_once(ranks: tuple[Rank, Other]) -> None:
    """Rank 0 stores whole chunks. Both load, from the second block of a chunk on."""
    here, other = ranks
    factor = here.factor
    rng = np.random.default_rng(factor)
    chunks = rng.permutation(CHUNKS)[: 240 // factor].tolist()
    first, second = (rng.permutation(BLOCKS)[:240].tolist() for _ in range(2))
    here.fill(1)
    here.submit(1, True, first, chunks)
    assert here.end(True) == [True, {}] and here.holds(chunks, first)
    index = min(1, factor - 1)
    jobs = iter(range(2, 1 << 20))

    def both_have_parts_of_the_others() -> bool:
        job = next(jobs)
        here.fill(job)
        other.say(f"rank.submit({job}, False, {second[index:]}, {chunks}, {index})")
        here.submit(job, False, first[index:], chunks, index)
        assert other.hear() is None and here.end(False) == [True, {}] == other.ask("rank.end(False)")
        assert here.holds(chunks, first[index:], index)
        assert other.ask(f"rank.holds({chunks}, {second[index:]}, {index})")
        stats = here.member.stats(), other.ask("rank.member.stats()")
        return all(one["brought_by_others_h2d"] > 0 for one in stats)

    until(both_have_parts_of_the_others)


def test_a_block_that_does_not_fit_drops_its_chunk(ranks: tuple[Rank, Other]) -> None:
    here, _ = ranks
    chunks, blocks = list(range(240 // here.factor)), list(range(240))
    bad = [3, 239]
    here.fill(1)
    for block in bad:
        here.gpu[1][block] = np.random.default_rng(block).integers(-128, 128, PAGES[1], np.int8)
    here.submit(1, True, blocks, chunks)
    assert here.end(True) == [True, {str(block // here.factor): "codec" for block in bad}]
    assert here.store.stats().not_stored == 2
    here.submit(2, False, blocks, chunks)  # queued before anybody knew
    assert here.end(False)[0] is False
    good = [block for block in blocks if block // here.factor not in {one // here.factor for one in bad}]
    here.fill(2)
    here.submit(3, False, good[: here.factor], [good[0] // here.factor])
    assert here.end(False) == [True, {}] and here.holds([good[0] // here.factor], good[: here.factor])


def test_ranks_of_replicas_lend_their_links_to_loads_of_coded_blocks(given: dict[str, Any]) -> None:
    """Each has its cell in the second half of a row; the first half is that of another rank."""
    here, other = Rank(rank=0, cell=1, **given), Other(rank=1, cell=1, **given)
    try:
        assert other.hear() == "here"
        until(lambda: here.member.peers == (1,))
        blocks, chunks = list(range(240)), list(range(239, -1, -1))
        here.region.base[:, :, :ROW] = 0x55
        here.fill(1)
        here.gpu[1][50] = np.random.default_rng(1).integers(-128, 128, PAGES[1], np.int8)
        here.submit(1, True, blocks, chunks)
        assert here.end(True) == [True, {"50": "codec"}] and here.holds(chunks[:50], blocks[:50])
        here.fill(2)
        here.submit(2, True, blocks, chunks)
        assert here.end(True) == [True, {}] and here.member.stats()["brought_by_others_d2h"] == 0
        jobs = iter(range(3, 1 << 20))

        def brought() -> bool:
            job = next(jobs)
            here.fill(job)
            here.submit(job, False, blocks, chunks)
            assert here.end(False) == [True, {}] and here.holds(chunks, blocks)
            return here.member.stats()["brought_by_others_h2d"] > 0

        until(brought)
        assert (here.region.base[:, :, :ROW] == 0x55).all()
        assert other.ask(f"rank.submit(1, False, {blocks}, {chunks}) or rank.end(False)") == [True, {}]
        assert other.ask(f"rank.holds({chunks}, {blocks})")
    finally:
        other.popen.kill()
        other.end()
        here.close()


@pytest.mark.parametrize(
    ("cpu", "factor", "page", "why"),
    [
        (np.zeros((8, 512), np.int8), 1, 1024, "a block has 512 bytes on the host; its coding has 1024, and 8"),
        (np.zeros((8, 2 * CODINGS[1].coded_nbytes), np.int8), 2, 8 << 10, "blocks, layer by layer or at several"),
    ],
)
def test_what_is_refused(cpu: Any, factor: int, page: int, why: str) -> None:
    codings = [Coding(page, "exact")] * 2
    tensors = [np.zeros((8, page), np.int8) for _ in range(2)]
    refs = [[CanonicalKVCacheRef(i, page) for i in range(2)]]
    with pytest.raises(ValueError, match=why):
        SingleDirectionOffloadingHandler(
            tensors, [cpu, cpu.copy()], factor, refs, True, share=Share("refused", 0, 2, "nowhere", 0), codings=codings
        )
