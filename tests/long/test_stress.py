"""Long runs, seeded. Each takes ``--long-seconds`` (2 by default, 5 in CI); by hand, whole:

    pytest tests/long --long-seconds 3600 --long-seed 1
    pytest tests/long --device cuda:0 --long-seconds 600

A failure names its seed; ``--long-seed N`` begins with it.
"""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Buffer, check_pattern, write_pattern

import kvswap
from kvswap import testing

pytestmark = pytest.mark.slow


@pytest.fixture
def seeds(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[Iterator[int]]:
    """Seeds, one after another, until the time is over."""
    begin, first = time.monotonic(), int(request.config.getoption("--long-seed"))
    limit = float(request.config.getoption("--long-seconds"))
    last = [first - 1]

    def count() -> Iterator[int]:
        seed = first
        while seed == first or time.monotonic() - begin < limit:
            last[0] = seed
            yield seed
            seed += 1

    yield count()
    with capsys.disabled():
        print(f" seeds {first} to {last[0]}", end="")


class Model:
    """GPU and host blocks with the key of the pattern that each must hold; 0 where that is not known.

    Every operation is ordered behind all earlier ones that touch its blocks by `after` or by its stream, so that the
    model, which makes them one after another, says what is there at the end.
    """

    KEYS = 1 << 20

    def __init__(self, device: kvswap.Device, seed: int, blocks: int = 24) -> None:
        self.device, self.rng, self.blocks = device, np.random.default_rng(seed), blocks
        self.nbytes = int(self.rng.choice([1, 7, 16, 100, 513, 4096]))
        self.sides = [Buffer(device, blocks * self.nbytes, "gpu"), Buffer(device, blocks * self.nbytes, "cpu")]
        self.keys = np.zeros((2, blocks), np.int64)
        self.last: list[list[Any]] = [[None] * blocks, [None] * blocks]  # what used a block last
        self.streams = [kvswap.Stream(device) for _ in range(3)]
        self.jobs: list[Any] = []
        self.transfers: list[kvswap.Transfer] = []
        self.next_key = int(self.rng.integers(1, self.KEYS))
        for side in (0, 1):
            self.write(side, np.arange(blocks), self.streams[0])

    def stream(self) -> kvswap.Stream:
        return self.streams[self.rng.integers(len(self.streams))]

    def some(self) -> Any:
        return self.rng.permutation(self.blocks)[: self.rng.integers(1, self.blocks)]

    def users(self, side: int, ids: Any) -> list[Any]:
        return list({id(user): user for i in ids if (user := self.last[side][i]) is not None}.values())

    def behind(self, stream: kvswap.Stream, *uses: tuple[int, Any]) -> None:
        """Let the stream wait for all who used these blocks."""
        for side, ids in uses:
            for user in self.users(side, ids):
                if isinstance(user, kvswap.Transfer):
                    user.make_wait(stream)
                else:
                    user.wait(stream)

    def used(self, user: Any, *uses: tuple[int, Any]) -> None:
        for side, ids in uses:
            for i in ids:
                self.last[side][i] = user

    def mark(self, stream: kvswap.Stream) -> kvswap.Event:
        event = kvswap.Event(self.device)
        event.record(stream)
        return event

    def ptrs(self, side: int, ids: Any) -> Any:
        return self.sides[side].ptr + np.asarray(ids) * self.nbytes

    def write(self, side: int, ids: Any, stream: kvswap.Stream) -> None:
        self.behind(stream, (side, ids))
        keys = self.next_key + np.arange(len(ids))
        self.next_key += len(ids)
        self.jobs.append((write_pattern(self.device, self.ptrs(side, ids), self.nbytes, keys, stream), False))
        self.keys[side][ids] = keys
        self.used(self.mark(stream), (side, ids))

    def check(self, side: int, ids: Any, stream: kvswap.Stream) -> None:
        ids = ids[self.keys[side][ids] > 0]
        if not len(ids):
            return
        self.behind(stream, (side, ids))
        job = check_pattern(self.device, self.ptrs(side, ids), self.nbytes, self.keys[side][ids], stream)
        self.jobs.append((job, True))
        self.used(self.mark(stream), (side, ids))

    def path(self) -> str:
        paths = ["auto", "dma"] + (["kernel"] if self.device.info["kernels"] else [])
        return str(self.rng.choice([*paths, "direct"] if self.device.kind == "host" else paths))

    def swap(self, stream: kvswap.Stream, on_stream: bool) -> None:
        gpu_ids, direction = self.some(), int(self.rng.integers(2))
        cpu_ids = self.rng.permutation(self.blocks)[: len(gpu_ids)]
        uses = (0, gpu_ids), (1, cpu_ids)
        before = [user for side, ids in uses for user in self.users(side, ids)]
        options: dict[str, Any] = {"stream": stream} if on_stream else {}
        transfer = kvswap.swap_cache_per_layer_async(
            self.sides[0].ptr,
            self.sides[1].ptr,
            self.nbytes,
            self.blocks,
            self.blocks,
            gpu_ids.astype(np.int32),
            cpu_ids,
            direction,
            device=self.device,
            after=before,
            path=self.path(),
            priority=str(self.rng.choice(["high", "normal", "background"])),
            **options,
        )
        self.transfers.append(transfer)
        if direction:
            self.keys[0][gpu_ids] = self.keys[1][cpu_ids]
        else:
            self.keys[1][cpu_ids] = self.keys[0][gpu_ids]
        self.used(transfer, *uses)

    def step(self) -> None:
        stream, choice = self.stream(), self.rng.random()
        side = int(self.rng.integers(2))
        if choice < 0.5:
            self.swap(stream, self.rng.random() < 0.5)
        elif choice < 0.7:
            self.write(side, self.some(), stream)
        elif choice < 0.9:
            self.check(side, self.some(), stream)
        elif choice < 0.95 and self.transfers:
            self.transfers[self.rng.integers(len(self.transfers))].wait(PATIENCE)
        elif self.transfers:
            self.transfers.pop(int(self.rng.integers(len(self.transfers))))

    def finish(self) -> None:
        for side in (0, 1):
            self.check(side, np.arange(self.blocks), self.streams[0])
        for transfer in self.transfers:
            transfer.wait(PATIENCE)
        for job, checks in self.jobs:
            wrong, item, offset = job.result(PATIENCE)
            assert not checks or wrong == 0, f"{wrong} wrong bytes, the first in block {item} at {offset}"


def run(device: kvswap.Device, seed: int, steps: int) -> None:
    try:
        model = Model(device, seed)
        for _ in range(steps):
            model.step()
        model.finish()
    except BaseException as error:
        raise AssertionError(f"seed {seed} on {device.name}: {error}") from error


def test_deterministic_devices(seeds: Iterator[int]) -> None:
    """One thread, an interleaving a seed: thousands in an hour."""
    for seed in seeds:
        run(testing.deterministic_device(seed), seed, 25)


def test_one_thread(device: kvswap.Device, seeds: Iterator[int]) -> None:
    if not device.info["kernels"]:
        pytest.skip(f"no kernels: {device.info['kernels_note']}")
    for seed in seeds:
        run(device, seed, 60)
    assert device.stats()["unfinished"] == 0


def test_many_threads(device: kvswap.Device, seeds: Iterator[int]) -> None:
    """Every thread has blocks and streams of its own and shares the device: lanes, staging, events."""
    if not device.info["kernels"]:
        pytest.skip(f"no kernels: {device.info['kernels_note']}")
    for seed in seeds:
        failures: list[AssertionError] = []

        def work(own: int, failures: list[AssertionError] = failures) -> None:
            try:
                run(device, own, 25)
            except AssertionError as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=[seed * 1000 + i]) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == [], failures[0]
    device.synchronize(PATIENCE)
    assert device.stats()["unfinished"] == 0


def test_a_skipped_copy_is_found(seeds: Iterator[int]) -> None:
    """The control: with copies that silently do not happen the runs above fail."""
    found, runs = 0, 0
    for seed in seeds:
        device = testing.deterministic_device(seed)
        runs += 1
        with testing.fault(device, "copy", "skip", every=3):
            try:
                run(device, seed, 25)
            except AssertionError as error:
                assert "wrong bytes" in str(error), error
                found += 1
        if runs >= 200:
            break
    assert found > runs // 2


def test_faults_at_random(seeds: Iterator[int]) -> None:
    """Refused calls and copies at random places: transfers tell the truth, and the device goes on."""
    for seed in seeds:
        device, rng = testing.deterministic_device(seed), np.random.default_rng(seed)
        nbytes, blocks = 48, 32
        gpu, cpu = Buffer(device, nbytes * blocks, "gpu"), Buffer(device, nbytes * blocks, "cpu")
        source = gpu.randomise(seed).reshape(blocks, nbytes)
        expected = cpu.randomise(seed + 1).reshape(blocks, nbytes)
        stream = kvswap.Stream(device)
        for _ in range(6):
            count = int(rng.integers(1, blocks))
            gpu_ids, cpu_ids = rng.permutation(blocks)[:count], rng.permutation(blocks)[:count]
            kind, nth = str(rng.choice(["call", "copy"])), int(rng.integers(1, 12))
            every = int(rng.choice([0, 0, 1, 2, 5]))
            path = str(rng.choice(["dma", "kernel", "direct", "auto"]))
            lost: Any = []
            try:
                with testing.fault(device, kind, "fail", nth=nth, every=every, code=3):
                    transfer = kvswap.swap_cache_per_layer_async(
                        gpu.ptr,
                        cpu.ptr,
                        nbytes,
                        blocks,
                        blocks,
                        gpu_ids,
                        cpu_ids,
                        0,
                        device=device,
                        stream=stream,
                        path=path,
                    )
            except kvswap.DeviceError:
                continue
            try:
                transfer.wait()
            except kvswap.Error:
                lost = transfer.failed_blocks
                assert len(lost), f"seed {seed}: failed without a block"
            kept = np.delete(np.arange(count), lost)
            expected[cpu_ids[kept]] = source[gpu_ids[kept]]
            there = cpu.get().reshape(blocks, nbytes)
            expected[cpu_ids[lost]] = there[cpu_ids[lost]]
            np.testing.assert_array_equal(there, expected, err_msg=f"seed {seed}")
        assert device.stats()["unfinished"] == 0, f"seed {seed}"
