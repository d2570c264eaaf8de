"""TensorRT-LLM's copy functions: bytes of every pair of tiers, order on the stream, words and codes."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Buffer, Gate

import kvswap
from kvswap import testing, trtllm
from kvswap.trtllm import CacheTier, CopyTask

PAGES, NBYTES = 12, 200
DST, SRC = [3, 0, 11, 5], [7, 2, 2, 9]
TIERS = {"gpu": CacheTier.GPU_MEM, "cpu": CacheTier.HOST_MEM}
FUNCTIONS = {
    ("gpu", "gpu"): trtllm.copy_device_to_device,
    ("gpu", "cpu"): trtllm.copy_host_to_device,
    ("cpu", "gpu"): trtllm.copy_device_to_host,
    ("cpu", "cpu"): trtllm.copy_host_to_host,
}


@dataclass
class MemToMemTask:
    dst: int
    src: int


class Pages:
    """Pages on two sides, as many tasks from one to the other, and what is there afterwards."""

    def __init__(self, device: kvswap.Device, dst: str = "cpu", src: str = "gpu") -> None:
        self.device, self.sides = device, (dst, src)
        self.dst, self.src = (Buffer(device, PAGES * NBYTES, side) for side in (dst, src))
        self.before = self.dst.randomise(1)
        self.source = self.src.randomise(2)
        self.stream = kvswap.Stream(device)

    def pairs(self) -> list[tuple[int, int]]:
        return [(self.dst.ptr + d * NBYTES, self.src.ptr + s * NBYTES) for d, s in zip(DST, SRC, strict=True)]

    def copy(self, tasks: Any = None, num_bytes: int = NBYTES, **options: Any) -> None:
        dst, src = (TIERS[side] for side in self.sides)
        tasks = self.pairs() if tasks is None else tasks
        trtllm.batched_copy(dst, src, num_bytes, tasks, self.stream, device=self.device, **options)

    def native(self, tasks: Any = None) -> int:
        tasks = [MemToMemTask(dst, src) for dst, src in self.pairs()] if tasks is None else tasks
        return FUNCTIONS[self.sides](tasks, NBYTES, self.stream.handle, device=self.device)

    def check(self, copied: bool = True) -> None:
        self.device.synchronize(PATIENCE)
        after = self.before.copy().reshape(PAGES, NBYTES)
        if copied:
            after[DST] = self.source.reshape(PAGES, NBYTES)[SRC]
        np.testing.assert_array_equal(self.dst.get().reshape(PAGES, NBYTES), after)


@pytest.fixture
def pages(device: kvswap.Device) -> Pages:
    return Pages(device)


def test_names_and_numbers() -> None:
    assert [(tier.name, int(tier)) for tier in CacheTier] == [("GPU_MEM", 0), ("HOST_MEM", 1), ("DISK", 2)]
    assert CopyTask(dst=1, src=2) == (1, 2)


@pytest.mark.parametrize("sides", FUNCTIONS, ids=lambda sides: f"{sides[1]} to {sides[0]}")
def test_every_pair_of_tiers(device: kvswap.Device, sides: tuple[str, str]) -> None:
    pages = Pages(device, *sides)
    pages.copy()
    pages.check()
    again = Pages(device, *sides)
    assert again.native() == 0
    again.check()


TASKS: dict[str, Callable[[list[tuple[int, int]]], Any]] = {
    "tuples": lambda pairs: pairs,
    "CopyTask": lambda pairs: [CopyTask(*pair) for pair in pairs],
    "objects": lambda pairs: [MemToMemTask(*pair) for pair in pairs],
    "tuple": lambda pairs: tuple(CopyTask(*pair) for pair in pairs),
    "generator": lambda pairs: (CopyTask(*pair) for pair in pairs),
    "numpy ints": lambda pairs: [(np.uint64(dst), np.int64(src)) for dst, src in pairs],
    "int64": lambda pairs: np.array(pairs, np.int64),
    "uint64": lambda pairs: np.array(pairs, np.uint64),
    "strided": lambda pairs: np.repeat(np.array(pairs, np.uint64), 2, axis=0)[::2],
    "columns": lambda pairs: np.asfortranarray(np.array(pairs, np.int64)),
}


@pytest.mark.parametrize("kind", TASKS)
def test_tasks_of_every_kind(pages: Pages, kind: str) -> None:
    pages.copy(TASKS[kind](pages.pairs()))
    pages.check()
    assert pages.native(TASKS[kind](pages.pairs())) == 0
    pages.check()


@pytest.mark.parametrize(
    "none", [[], (), np.zeros((0, 2), np.int64), iter(())], ids=["list", "tuple", "array", "iterator"]
)
def test_no_tasks(pages: Pages, none: Any) -> None:
    submitted = pages.device.stats()["submitted"]
    pages.copy(none)
    assert pages.native(none) == 0
    assert pages.device.stats()["submitted"] == submitted
    pages.check(copied=False)


def test_as_if_enqueued_on_the_stream(pages: Pages) -> None:
    """After the stream's work so far, before its later work, and nobody waits on the host."""
    back = Pages(pages.device, "gpu", "cpu")
    back.stream = pages.stream
    with Gate(pages.device) as gate:
        gate.hold(pages.stream)
        pages.copy()
        chained = [(back.dst.ptr + d * NBYTES, dst) for d, (dst, _) in zip(DST, pages.pairs(), strict=True)]
        back.copy(chained)
        end = kvswap.Event(pages.device)
        end.record(pages.stream)
        assert not end.query()
        gate.open()
        end.synchronize(PATIENCE)
    pages.check()
    after = back.before.copy().reshape(PAGES, NBYTES)
    after[DST] = pages.source.reshape(PAGES, NBYTES)[SRC]
    np.testing.assert_array_equal(back.dst.get().reshape(PAGES, NBYTES), after)


@pytest.mark.parametrize("stream", ["handle", "object", "legacy"])
def test_streams(pages: Pages, stream: str) -> None:
    own = pages.stream
    pages.stream = {"handle": own.handle, "object": own, "legacy": 0}[stream]
    pages.copy()
    pages.check()


def test_devices_are_found(device: kvswap.Device) -> None:
    """By the pointers, by the stream, by what there is."""
    for sides in FUNCTIONS:
        pages = Pages(device, *sides)
        dst, src = (TIERS[side] for side in sides)
        trtllm.batched_copy(dst, src, NBYTES, pages.pairs(), pages.stream)
        pages.check()
    deterministic = testing.deterministic_device(3)
    pages = Pages(deterministic, "cpu", "cpu")
    trtllm.batched_copy(CacheTier.HOST_MEM, CacheTier.HOST_MEM, NBYTES, pages.pairs(), pages.stream)
    pages.check()


def test_many_tasks(device: kvswap.Device) -> None:
    count, nbytes = 5000, 16
    dst, src = Buffer(device, count * nbytes, "cpu"), Buffer(device, count * nbytes, "gpu")
    source, order = src.randomise(5).reshape(count, nbytes), np.random.default_rng(6).permutation(count)
    tasks = [CopyTask(dst.ptr + i * nbytes, src.ptr + int(order[i]) * nbytes) for i in range(count)]
    stream = kvswap.Stream(device)
    trtllm.batched_copy(CacheTier.HOST_MEM, CacheTier.GPU_MEM, nbytes, tasks, stream, device=device)
    stream.synchronize(PATIENCE)
    np.testing.assert_array_equal(dst.get().reshape(count, nbytes), source[order])


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tasks": [(1, 2, 3)]}, ValueError, r"tasks\[0\] has 3 items"),
        ({"tasks": [(1 << 12, 2), (3,)]}, ValueError, r"tasks\[1\] has 1 items"),
        ({"tasks": [CopyTask(1, 2), 7]}, TypeError, r"tasks\[1\] must be a pair .* not int"),
        ({"tasks": [7]}, TypeError, r"tasks\[0\] must be a pair .* not int"),
        ({"tasks": [(1, 2.5)]}, TypeError, r"tasks\[0\].src must be an address, not float"),
        ({"tasks": [(None, 2)]}, TypeError, r"tasks\[0\].dst must be an address, not NoneType"),
        ({"tasks": [(1, 2), (-5, 2)]}, ValueError, r"tasks\[1\].dst is -5"),
        ({"tasks": [MemToMemTask(1, 1 << 64)]}, ValueError, r"tasks\[0\].src is 18446744073709551616"),
        ({"tasks": np.zeros((2, 3), np.int64)}, ValueError, r"tasks is an array of int64, shape \(2, 3\)"),
        ({"tasks": np.zeros((2, 2))}, ValueError, "tasks is an array of float64"),
        ({"num_bytes": -1}, ValueError, "-1"),
        ({"num_bytes": 1.5}, TypeError, "float"),
        ({"disk_backend": "nfs"}, ValueError, "disk_backend is 'nfs'; it is one of posix, nixl_gds"),
        ({"gds_thread_count": 0}, ValueError, "gds_thread_count is 0"),
        ({"stream": "x"}, TypeError, "stream"),
        ({"dst_cache_tier": 3}, ValueError, "3"),
    ],
)
def test_wrong_arguments(pages: Pages, change: dict[str, Any], error: type[Exception], message: str) -> None:
    good: dict[str, Any] = {
        "dst_cache_tier": CacheTier.HOST_MEM,
        "src_cache_tier": CacheTier.GPU_MEM,
        "num_bytes": NBYTES,
        "tasks": pages.pairs(),
        "stream": pages.stream,
        "disk_backend": "posix",
        "gds_thread_count": 8,
        "device": pages.device,
    }
    with pytest.raises(error, match=message):
        trtllm.batched_copy(**{**good, **change})
    pages.check(copied=False)


@pytest.mark.parametrize("tier", [CacheTier.GPU_MEM, CacheTier.HOST_MEM, CacheTier.DISK])
def test_files_are_not_there_yet(pages: Pages, tier: CacheTier) -> None:
    for tiers in ((tier, CacheTier.DISK), (CacheTier.DISK, tier)):
        with pytest.raises(kvswap.Error, match=r"DISK.*file tier is not there yet"):
            trtllm.batched_copy(*tiers, NBYTES, pages.pairs(), pages.stream, device=pages.device)
    pages.check(copied=False)


@pytest.mark.parametrize("dst", ["gpu", "cpu"])
@pytest.mark.parametrize("src", ["gpu", "cpu"])
def test_addresses_of_another_tier(device: kvswap.Device, dst: str, src: str) -> None:
    pages = Pages(device, dst, src)
    for said in FUNCTIONS:
        if said == (dst, src):
            continue
        with pytest.raises(ValueError, match=r"tasks\[0\]\.(dst|src)"):
            trtllm.batched_copy(*(TIERS[side] for side in said), NBYTES, pages.pairs(), pages.stream, device=device)
        with pytest.raises(ValueError, match=r"tasks\[0\]\.(dst|src)"):
            FUNCTIONS[said](pages.pairs(), NBYTES, pages.stream, device=device)
    pages.check(copied=False)


def test_what_is_refused_is_told(pages: Pages) -> None:
    with testing.fault(pages.device, "copy", "fail", every=1, code=33):
        with pytest.raises(kvswap.DeviceError) as caught:
            pages.copy()
        assert caught.value.code == 33
        assert pages.native() == 33
    with testing.fault(pages.device, "call", "fail", operation="event_record", code=3):
        assert pages.native() == 3
    with pytest.raises(ValueError, match="mapped"):
        pages.native([(8, 16)])
    pages.check(copied=False)
