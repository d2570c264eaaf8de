"""TensorRT-LLM's copy functions: bytes of every pair of tiers, order on the stream, words and codes."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Buffer, Gate, run_python

import kvswap
from kvswap import testing, trtllm
from kvswap.trtllm import CacheTier, CopyTask, DiskAddress, _copies

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
    """After the stream's work so far, before its later work, and without a wait on the host."""
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


# -- files ------------------------------------------------------------------------------------------------------------


class Disk:
    """Pages of one file, at odd offsets, and what they must be."""

    def __init__(self, path: Path, pages: int = PAGES, nbytes: int = NBYTES, seed: int = 9, flags: int = 0) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
        self.nbytes, self.base = nbytes, 0 if flags else 37
        self.bytes = np.random.default_rng(seed).integers(0, 256, (pages, nbytes), np.uint8)
        if not flags:
            os.pwrite(self.fd, self.bytes.tobytes(), self.base)

    def at(self, page: int) -> DiskAddress:
        return DiskAddress(self.fd, self.base + page * self.nbytes)

    def get(self) -> Any:
        data = os.pread(self.fd, self.bytes.size, self.base)
        return np.frombuffer(data, np.uint8).reshape(self.bytes.shape)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "pages")
    yield disk
    os.close(disk.fd)
    _copies._pending.clear()  # a failure of this test is not another's


def of_memory(pages: Buffer, page: int) -> int:
    return pages.ptr + page * NBYTES


@pytest.mark.parametrize("backend", ["posix", "nixl_gds"])
@pytest.mark.parametrize("side", ["gpu", "cpu"])
def test_between_files_and_memory(device: kvswap.Device, disk: Disk, side: str, backend: str) -> None:
    memory, stream = Buffer(device, PAGES * NBYTES, side), kvswap.Stream(device)
    source = memory.randomise(3).reshape(PAGES, NBYTES)
    expected = disk.bytes.copy()
    expected[DST] = source[SRC]
    out = [CopyTask(disk.at(d), of_memory(memory, s)) for d, s in zip(DST, SRC, strict=True)]
    copy = trtllm.batched_copy(CacheTier.DISK, TIERS[side], NBYTES, out, stream, backend, device=device)
    copy.wait(PATIENCE)
    assert copy.done() and copy.failed == {}
    np.testing.assert_array_equal(disk.get(), expected)
    back = [CopyTask(of_memory(memory, d), disk.at(s)) for d, s in zip(SRC, DST, strict=True) if d != 2]
    trtllm.batched_copy(TIERS[side], CacheTier.DISK, NBYTES, back, stream, backend, 1, device=device).wait(PATIENCE)
    loaded = source.copy()
    loaded[[7, 9]] = expected[[3, 5]]
    np.testing.assert_array_equal(memory.get().reshape(PAGES, NBYTES), loaded)


def test_between_files(device: kvswap.Device, disk: Disk, tmp_path: Path) -> None:
    other, stream = Disk(tmp_path / "other", nbytes=NBYTES, seed=4), kvswap.Stream(device)
    tasks = [CopyTask(other.at(d), disk.at(s)) for d, s in zip(DST, SRC, strict=True)]
    assert trtllm.copy_disk_to_disk(tasks, NBYTES, stream, device=device) == 0
    stream.synchronize(PATIENCE)
    expected = other.bytes.copy()
    expected[DST] = disk.bytes[SRC]
    np.testing.assert_array_equal(other.get(), expected)
    os.close(other.fd)


def test_functions_by_the_native_names(device: kvswap.Device, disk: Disk) -> None:
    memory, stream = Buffer(device, PAGES * NBYTES, "cpu"), kvswap.Stream(device)
    memory.randomise(3)
    assert trtllm.copy_disk_to_host([(memory.ptr, disk.at(4))], NBYTES, stream.handle, device=device) == 0
    assert trtllm.copy_host_to_disk([(disk.at(6), memory.ptr)], NBYTES, stream.handle, device=device) == 0
    stream.synchronize(PATIENCE)
    np.testing.assert_array_equal(disk.get()[6], disk.bytes[4])


@pytest.mark.parametrize("side", ["gpu", "cpu"])
def test_files_are_ordered_on_the_stream(device: kvswap.Device, disk: Disk, side: str) -> None:
    """A write sees the bytes that the stream's work before it wrote, a read those of the write before it."""
    memory, stream = Buffer(device, PAGES * NBYTES, side), kvswap.Stream(device)
    source = memory.randomise(3).reshape(PAGES, NBYTES)
    result = Buffer(device, NBYTES, side)
    with Gate(device) as gate:
        gate.hold(stream)
        to_disk = trtllm.batched_copy(
            CacheTier.DISK, TIERS[side], NBYTES, [(disk.at(0), of_memory(memory, 5))], stream, device=device
        )
        trtllm.batched_copy(TIERS[side], CacheTier.DISK, NBYTES, [(result.ptr, disk.at(0))], stream, device=device)
        assert not to_disk.done()
        np.testing.assert_array_equal(disk.get(), disk.bytes)
        gate.open()
        stream.synchronize(PATIENCE)
    np.testing.assert_array_equal(result.get(), source[5])


def test_more_chunks_than_a_queue_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are waited for: an error would come between chunks that are queued and chunks that are not."""
    device = kvswap.Device("host:143")
    testing.set_lane_depth(device, 2)
    monkeypatch.setattr(_copies, "_CHUNK", 4096)
    monkeypatch.setattr(_copies, "_stagings", {})
    large, memory, stream = Disk(tmp_path / "large", 12, 4096), Buffer(device, 12 * 4096, "gpu"), kvswap.Stream(device)
    tasks = [(memory.ptr + p * 4096, large.at(p)) for p in range(12)]
    with Gate(device) as gate:
        gate.hold(stream)
        threading.Timer(0.2, gate.open).start()
        trtllm.batched_copy(CacheTier.GPU_MEM, CacheTier.DISK, 4096, tasks, stream, device=device).wait(PATIENCE)
    np.testing.assert_array_equal(memory.get().reshape(12, 4096), large.bytes)
    monkeypatch.setattr(_copies, "_ROOM_SECONDS", 0.05)
    with Gate(device) as gate:
        gate.hold(stream)
        with pytest.raises(kvswap.QueueFull):
            trtllm.batched_copy(CacheTier.GPU_MEM, CacheTier.DISK, 4096, tasks, stream, device=device)
        gate.open()
    stream.synchronize(PATIENCE)
    os.close(large.fd)


def test_more_than_the_staging_holds(
    device: kvswap.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk
) -> None:
    """Chunks are used again and again, by two streams, and pages larger than a chunk go in parts."""
    monkeypatch.setattr(_copies, "_CHUNK", 8192)
    monkeypatch.setattr(_copies, "_stagings", {})
    pages, nbytes = 40, 20001
    large = Disk(tmp_path / "large", pages, nbytes)
    streams = [kvswap.Stream(device), kvswap.Stream(device)]
    for size in (nbytes, 3000):
        memory = Buffer(device, pages * nbytes, "gpu")
        memory.put(np.zeros(pages * nbytes, np.uint8))
        for i, stream in enumerate(streams):
            tasks = [(memory.ptr + p * nbytes, large.at(p)) for p in range(i, pages, 2)]
            trtllm.batched_copy(CacheTier.GPU_MEM, CacheTier.DISK, size, tasks, stream, device=device)
        device.synchronize(PATIENCE)
        loaded = memory.get().reshape(pages, nbytes)
        np.testing.assert_array_equal(loaded[:, :size], large.bytes[:, :size])
        assert not loaded[:, size:].any()
    os.ftruncate(large.fd, 0)
    tasks = [(large.at(p), memory.ptr + p * nbytes) for p in range(pages)]
    trtllm.batched_copy(CacheTier.DISK, CacheTier.GPU_MEM, nbytes, tasks, streams[0], device=device).wait(PATIENCE)
    np.testing.assert_array_equal(large.get(), memory.get().reshape(pages, nbytes))
    os.close(large.fd)


def test_files_opened_with_o_direct(device: kvswap.Device, tmp_path: Path, disk: Disk) -> None:
    try:
        direct = Disk(tmp_path / "direct", 4, 4096, flags=os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"the file system does not take O_DIRECT: {error}")
    memory, stream = Buffer(device, 4 * 4096, "gpu"), kvswap.Stream(device)
    source = memory.randomise(1).reshape(4, 4096)
    tasks = [(direct.at(p), memory.ptr + p * 4096) for p in (3, 1)]
    copy = trtllm.batched_copy(CacheTier.DISK, CacheTier.GPU_MEM, 4096, tasks, stream, device=device)
    copy.wait(PATIENCE)
    with open(tmp_path / "direct", "rb") as file:
        stored = np.frombuffer(file.read(), np.uint8).reshape(4, 4096)
    np.testing.assert_array_equal(stored[[3, 1]], source[[3, 1]])
    os.close(direct.fd)


def test_descriptors_may_be_closed(device: kvswap.Device, disk: Disk, tmp_path: Path) -> None:
    """The descriptors are closed, and their numbers used for another file, while the copy is queued."""
    memory, stream = Buffer(device, NBYTES, "cpu"), kvswap.Stream(device)
    source = memory.randomise(3)
    other = Disk(tmp_path / "other", seed=4)
    with Gate(device) as gate:
        gate.hold(stream)
        copy = trtllm.batched_copy(
            CacheTier.DISK, CacheTier.HOST_MEM, NBYTES, [(other.at(2), memory.ptr)], stream, device=device
        )
        os.dup2(disk.fd, other.fd)
        gate.open()
        copy.wait(PATIENCE)
    np.testing.assert_array_equal(disk.get(), disk.bytes)
    written = (tmp_path / "other").read_bytes()[37:]
    assert written[2 * NBYTES : 3 * NBYTES] == source.tobytes()
    os.close(other.fd)


@pytest.mark.parametrize("side", ["gpu", "cpu"])
def test_a_short_file_is_told(device: kvswap.Device, disk: Disk, side: str) -> None:
    """By wait(), by `failed`, and else by the next call. The other pages are there; no stale bytes reach the GPU."""
    os.ftruncate(disk.fd, disk.base + 9 * NBYTES + 50)
    memory, stream = Buffer(device, PAGES * NBYTES, side), kvswap.Stream(device)
    memory.randomise(3)
    tasks = [CopyTask(of_memory(memory, i), disk.at(p)) for i, p in enumerate((1, 9, 3, 10))]

    def load() -> trtllm.DiskCopy:
        copy = trtllm.batched_copy(TIERS[side], CacheTier.DISK, NBYTES, tasks, stream, device=device)
        assert copy is not None
        return copy

    copy = load()
    with pytest.raises(
        kvswap.Error, match=r"tasks\[1\]: reading 200 bytes at offset 1837 of .*/pages, after 50 "
    ) as error:
        copy.wait(PATIENCE)
    assert "shorter" in str(error.value) and "2 tasks failed" in str(error.value)
    assert list(copy.failed) == [1, 3] and "after 0 of them" in str(copy.failed[3])
    loaded = memory.get().reshape(PAGES, NBYTES)
    np.testing.assert_array_equal(loaded[[0, 2]], disk.bytes[[1, 3]])
    if side == "gpu":
        assert not loaded[[1, 3]].any()
    load()
    device.synchronize(PATIENCE)
    with pytest.raises(kvswap.Error, match=r"an earlier copy of files has failed: tasks\[1\]: reading"):
        load()
    trtllm.batched_copy(CacheTier.HOST_MEM, CacheTier.HOST_MEM, 0, [], stream, device=device)
    assert load().failed is not None


def test_a_full_disk_is_told() -> None:
    """A limit of this process's own stands for the disk's."""
    run = run_python(
        """
        import os, resource, signal, tempfile
        import numpy as np
        import kvswap
        from kvswap.trtllm import CacheTier, DiskAddress, batched_copy

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        device = kvswap.Device("host:7")
        stream, pages = kvswap.Stream(device), np.ones((3, 1000), np.uint8)
        with tempfile.TemporaryFile() as file:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2500, 2500))
            tasks = [(DiskAddress(file.fileno(), 1000 * i), pages[i].ctypes.data) for i in range(3)]
            copy = batched_copy(CacheTier.DISK, CacheTier.HOST_MEM, 1000, tasks, stream, device=device)
            try:
                copy.wait(30)
            except kvswap.Error as error:
                print(error)
            print(list(copy.failed), os.fstat(file.fileno()).st_size)
        """
    )
    assert run.returncode == 0, run.stderr
    out = run.stdout
    assert "tasks[2]: writing 1000 bytes at offset 2000 of " in out and "after 500 of them: File too large" in out
    assert out.endswith("[2] 2500\n")


@pytest.mark.parametrize(
    ("tasks", "error", "message"),
    [
        (lambda d, m: [(m, m)], TypeError, r"tasks\[0\].src must be a DiskAddress\(fd, pos\), not int"),
        (lambda d, m: [(m, d.at(0)), (m, DiskAddress(-1, 0))], ValueError, r"tasks\[1\].src.fd is -1"),
        (lambda d, m: [(m, DiskAddress(1 << 40, 0))], ValueError, r"tasks\[0\].src.fd is 1099511627776"),
        (lambda d, m: [(m, DiskAddress(d.fd, -8))], ValueError, r"tasks\[0\].src is -8"),
        (
            lambda d, m: [(m, DiskAddress(d.fd, (1 << 63) - 9))],
            ValueError,
            r"tasks\[0\].src: 200 bytes at offset .* 2\*\*63",
        ),
        (lambda d, m: [(m, DiskAddress(999_999, 0))], ValueError, r"tasks\[0\].src: descriptor 999999 is not open"),
        (lambda d, m: [(m, d.at(0)), (m + 199, d.at(1))], ValueError, r"tasks\[0\].dst and tasks\[1\].dst overlap"),
        (lambda d, m: np.zeros((2, 2), np.int64), TypeError, "holds no descriptors"),
        (lambda d, m: [(m,)], ValueError, r"tasks\[0\] has 1 items"),
        (lambda d, m: [7], TypeError, r"tasks\[0\] must be a pair"),
        (lambda d, m: [("x", d.at(0))], TypeError, r"tasks\[0\].dst must be an address, not str"),
    ],
)
def test_wrong_files(device: kvswap.Device, disk: Disk, tasks: Any, error: type[Exception], message: str) -> None:
    memory, stream = Buffer(device, PAGES * NBYTES, "cpu"), kvswap.Stream(device)
    before = memory.randomise(3)
    with pytest.raises(error, match=message):
        trtllm.batched_copy(CacheTier.HOST_MEM, CacheTier.DISK, NBYTES, tasks(disk, memory.ptr), stream, device=device)
    device.synchronize(PATIENCE)
    np.testing.assert_array_equal(memory.get(), before)


def test_wrong_descriptors(device: kvswap.Device, disk: Disk, tmp_path: Path) -> None:
    memory, stream = Buffer(device, PAGES * NBYTES, "cpu"), kvswap.Stream(device)
    memory.randomise(3)
    reads, pipe = os.open(tmp_path / "pages", os.O_RDONLY), os.pipe()
    assert stat.S_ISFIFO(os.fstat(pipe[0]).st_mode)

    def store(*places: DiskAddress) -> None:
        tasks = [(place, of_memory(memory, i)) for i, place in enumerate(places)]
        trtllm.batched_copy(CacheTier.DISK, CacheTier.HOST_MEM, NBYTES, tasks, stream, device=device)

    with pytest.raises(ValueError, match=r"tasks\[1\].dst: descriptor \d+ was not opened for writing"):
        store(disk.at(0), DiskAddress(reads, 0))
    with pytest.raises(ValueError, match=r"tasks\[0\].dst: descriptor \d+ is no file"):
        store(DiskAddress(pipe[1], 0))
    other = os.open(tmp_path / "pages", os.O_RDWR)  # the same file by another descriptor
    with pytest.raises(ValueError, match=r"tasks\[0\].dst and tasks\[1\].dst overlap"):
        store(disk.at(0), DiskAddress(other, disk.base + 100))
    with pytest.raises(ValueError, match=r"tasks\[[01]\].* overlap"):
        trtllm.copy_disk_to_disk([(disk.at(0), DiskAddress(other, 100))], NBYTES, stream, device=device)
    device.synchronize(PATIENCE)
    np.testing.assert_array_equal(disk.get(), disk.bytes)
    for fd in (reads, other, *pipe):
        os.close(fd)


def test_gpu_pages_of_files_are_checked_first(device: kvswap.Device, disk: Disk) -> None:
    memory, stream = Buffer(device, PAGES * NBYTES, "gpu"), kvswap.Stream(device)
    memory.randomise(3)
    tasks = [(disk.at(0), memory.ptr), (disk.at(0), of_memory(memory, 1))]
    with pytest.raises(ValueError, match="overlap"):
        trtllm.batched_copy(CacheTier.DISK, CacheTier.GPU_MEM, NBYTES, tasks, stream, device=device)
    with testing.fault(device, "copy", "fail", every=1, code=33), pytest.raises(kvswap.DeviceError):
        trtllm.batched_copy(CacheTier.DISK, CacheTier.GPU_MEM, NBYTES, tasks[:1], stream, device=device)
    device.synchronize(PATIENCE)
    np.testing.assert_array_equal(disk.get(), disk.bytes)


def test_unfinished_copies_of_files_are_bounded(
    device: kvswap.Device, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_copies, "_MOST_PENDING", 3)
    memory, stream = Buffer(device, NBYTES, "cpu"), kvswap.Stream(device)
    memory.randomise(3)
    with Gate(device) as gate:
        gate.hold(stream)
        for i in range(3):
            trtllm.copy_host_to_disk([(disk.at(i), memory.ptr)], NBYTES, stream, device=device)
        with pytest.raises(kvswap.QueueFull, match="3 copies of files have not ended"):
            trtllm.copy_host_to_disk([(disk.at(3), memory.ptr)], NBYTES, stream, device=device)
        gate.open()
        stream.synchronize(PATIENCE)
    assert trtllm.copy_host_to_disk([(disk.at(3), memory.ptr)], NBYTES, stream, device=device) == 0
    stream.synchronize(PATIENCE)
    assert (disk.get()[:4] == memory.get()).all()


def test_captured_streams_take_no_files(device: kvswap.Device, disk: Disk) -> None:
    if device.kind != "host":
        pytest.skip("a real capture is in test_gpu.py")
    memory, stream = Buffer(device, NBYTES, "cpu"), kvswap.Stream(device)
    with testing.capture(device, stream), pytest.raises(kvswap.Error, match="captured"):
        trtllm.copy_host_to_disk([(disk.at(0), memory.ptr)], NBYTES, stream, device=device)
