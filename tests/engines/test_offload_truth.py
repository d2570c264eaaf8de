"""kvswap.offload under faults: whatever is refused, a job that is told of as done has moved the right bytes.

Stores, loads and expedited loads of several groups, on a device that runs them in an order of the seed's, beside a
model in NumPy.
"""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from conftest import PATHS, PATIENCE

from kvswap import testing
from kvswap.offload import CanonicalKVCacheRef, CPULoadStoreSpec, GPULoadStoreSpec, SingleDirectionOffloadingHandler

GPU_BLOCKS, CHUNKS = 24, 14
REFUSABLE = ("copy_batch", "copy", "copy_rect", "launch", "event_record", "stream_wait")


@dataclass
class Job:
    store: bool
    sizes: list[int]
    indices: list[int]
    gpu: list[int]
    chunks: list[int]


class Side:
    """A tensor, what its bytes have to be, and which of them nobody can say."""

    def __init__(self, tensor: np.ndarray) -> None:
        self.tensor, self.expected = tensor, tensor.copy()
        self.unknown = np.zeros(tensor.shape, bool)  # written by a load that failed, or copied from there
        self.lost = np.zeros(tensor.shape, bool)  # of a store that failed: there, or a load of it fails

    def right(self) -> bool:
        return bool(((self.tensor == self.expected) | self.unknown | self.lost).all())


class World:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.device = testing.deterministic_device(seed)
        self.factor, self.groups = rng.randrange(1, 5), rng.randrange(1, 4)
        self.pages = [rng.choice([7, 64, 96, 128, 256, 513]) for _ in range(rng.randrange(1, 5))]
        self.refs = [
            [
                CanonicalKVCacheRef(i, rng.randrange(1, page + 1))
                for i, page in enumerate(self.pages)
                if rng.random() < 0.7
            ]
            for _ in range(self.groups)
        ]
        numbers = np.random.default_rng(seed)
        self.gpu = [Side(numbers.integers(-128, 128, (GPU_BLOCKS, page), np.int8)) for page in self.pages]
        row = sum(self.pages) * self.factor + rng.choice([0, 5, 32])
        slab, ends = numbers.integers(-128, 128, (CHUNKS, row), np.int8), np.cumsum(self.pages).tolist()
        if rng.random() < 0.5:  # all tensors of a block together
            blocks = slab[:, : ends[-1] * self.factor].reshape(CHUNKS, self.factor, -1)
            hosts = [blocks[..., e - p : e] for p, e in zip(self.pages, ends, strict=True)]
            views = hosts
        else:
            hosts = [slab[:, (e - p) * self.factor : e * self.factor] for p, e in zip(self.pages, ends, strict=True)]
            views = [host.reshape(CHUNKS, self.factor, -1) for host in hosts]
        assert all(np.shares_memory(slab, view) for view in views)
        self.cpu = [Side(view) for view in views]
        tensors = [side.tensor for side in self.gpu], hosts
        options: dict[str, Any] = {
            "device": self.device,
            "path": rng.choice([path for path in PATHS if path != "direct"]),
            "wait_timeout": PATIENCE,
        }
        self.handlers = [
            SingleDirectionOffloadingHandler(*tensors, self.factor, self.refs, store, **options)
            for store in (True, False, False)
        ]

    def fault(self) -> Any:
        if self.rng.random() < 0.5:
            return testing.fault(
                self.device, "copy", "fail", nth=self.rng.randrange(1, 40), every=self.rng.choice([0, 3, 7, 20])
            )
        operation, nth = self.rng.choice(REFUSABLE), self.rng.randrange(1, 30)
        return testing.fault(self.device, "call", "fail", operation=operation, nth=nth, every=self.rng.choice([0, 5]))

    def draw(self) -> tuple[SingleDirectionOffloadingHandler, Job]:
        """Each chunk is one group's, as an engine has it."""
        handler, sizes = self.rng.choice(self.handlers), [self.rng.randrange(5) for _ in range(self.groups)]
        indices = [self.rng.randrange(3 * self.factor) for _ in sizes]
        needed = [size and -(-(size + i % self.factor) // self.factor) for size, i in zip(sizes, indices, strict=True)]
        chunks = [c for g, n in enumerate(needed) for c in self.rng.sample(range(g, CHUNKS, self.groups), n)]
        gpu = self.rng.sample(range(GPU_BLOCKS), sum(sizes))
        return handler, Job(handler.gpu_to_cpu, sizes, indices, gpu, chunks)

    def happen(self, job: Job, success: bool) -> None:
        at = chunk_at = 0
        for refs, size, index in zip(self.refs, job.sizes, job.indices, strict=True):
            skip = index % self.factor
            for k in range(size):
                chunk, sub = job.chunks[chunk_at + (skip + k) // self.factor], (skip + k) % self.factor
                for ref in refs:
                    gpu, cpu = self.gpu[ref.tensor_idx], self.cpu[ref.tensor_idx]
                    here = (job.gpu[at + k], slice(ref.page_size_bytes))
                    there = (chunk, sub, slice(ref.page_size_bytes))
                    if job.store:
                        cpu.expected[there], cpu.unknown[there] = gpu.expected[here], gpu.unknown[here]
                        cpu.lost[there] = not success
                    elif success:
                        gpu.expected[here], gpu.unknown[here] = cpu.expected[there], cpu.unknown[there]
                    else:
                        gpu.unknown[here] = True
            at += size
            chunk_at += size and -(-(size + skip) // self.factor)


@pytest.mark.parametrize("first", range(1, 801, 100))
def test_what_is_told_of_as_done_is_there(first: int) -> None:
    ends = {True: 0, False: 0}
    for seed in range(first, first + 100):
        world, jobs = World(seed), []
        with world.fault():
            for number in range(world.rng.randrange(3, 14)):
                handler, job = world.draw()
                jobs.append(job)
                gpu, cpu = GPULoadStoreSpec(job.gpu, job.sizes, job.indices), CPULoadStoreSpec(job.chunks)
                handler.transfer_async(number, (gpu, cpu) if job.store else (cpu, gpu))
                if world.rng.random() < 0.4:
                    testing.step(world.device, world.rng.randrange(1, 20))
            for handler in world.handlers:
                handler.drain(PATIENCE)
        results = {result.job_id: result for handler in world.handlers for result in handler.get_finished()}
        assert sorted(results) == list(range(len(jobs)))
        for number, job in enumerate(jobs):
            world.happen(job, results[number].success)
            ends[results[number].success] += 1
        for name, sides in (("GPU", world.gpu), ("host", world.cpu)):
            assert all(side.right() for side in sides), f"seed {seed}: bytes on the {name} are not what was told"
        for handler in world.handlers:
            handler.shutdown(PATIENCE)
    assert ends[True] > 100 and ends[False] > 10, ends
