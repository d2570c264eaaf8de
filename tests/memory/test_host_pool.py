"""Host pools: exactly the bytes asked for, populated and registered in chunks, and given back whole."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import ctypes
import gc
import io
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from conftest import AT_ONCE, PATIENCE, ROOT, SANITIZED, Buffer, Gate, bindings, comes_down, random_bytes, seam, until

import kvswap
from kvswap import memory, testing
from kvswap.memory import HostPool
from kvswap.replay.progress import Progress

PAGE = mmap.PAGESIZE
MIB = 1 << 20
KEPT = 150 * MIB  # addresses, not memory: a thread that came meanwhile has 72 MiB for its stack and arena; two of them
LAYOUTS = ("block-first", "layer-first")


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    gc.collect()


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def populated(pool: HostPool) -> int:
    """Bytes of a pool's pages that are there."""
    pages = (ctypes.c_ubyte * (pool.nbytes // PAGE))()
    assert (
        ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(pool.ptr), ctypes.c_size_t(pool.nbytes), pages) == 0
    )
    return sum(page & 1 for page in pages) * PAGE


def resident_between(begin: int, end: int) -> int:
    """Bytes of memory that the process has in mappings that begin in this range."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and ":" not in name:
            inside = begin <= int(name.partition("-")[0], 16) < end
        elif inside and name == "Rss:":
            found += int(rest[0]) * 1024
    return found


def mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


def run_python(code: str, *arguments: str, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=ROOT / "tests",
    )


# -- size -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("blocks", "nbytes", "layers"), [(7, PAGE, 4), (100, 1000, 10), (1, 1, 1), (33, 6 * 4099, 6)])
def test_exactly_what_was_asked_for(device: kvswap.Device, layout: str, blocks: int, nbytes: int, layers: int) -> None:
    with HostPool(blocks, nbytes, device=device, layers=layers, layout=layout) as pool:
        assert (pool.num_blocks, pool.slot_nbytes, pool.layers) == (blocks, nbytes, layers)
        assert pool.nbytes == blocks * nbytes
        assert pool.mapped_nbytes == -(-blocks * nbytes // PAGE) * PAGE
        assert pool.layer_nbytes * layers == nbytes
        assert (pool.layout, pool.pages, pool.state) == (layout, "default", "ready")
        assert pool.pinned and pool.notices == ()
        assert pool.ptr % PAGE == 0 and pool.device == device
        assert memoryview(pool).nbytes == pool.nbytes
        assert not np.asarray(pool).any()
        assert f"{blocks} block" in repr(pool) and "pinned" in repr(pool)


@pytest.mark.parametrize("threads", [1, 3, None])
def test_all_of_it_is_there_and_no_more(device: kvswap.Device, threads: int | None) -> None:
    """Populated before use, and the memory goes with the pool."""
    HostPool(
        96, MIB, device=device, threads=threads, chunk_nbytes=8 * MIB
    ).close()  # the C library keeps what threads had
    gc.collect()
    before, mapped_before = resident(), mapped()
    pool = HostPool(96, MIB, device=device, threads=threads, chunk_nbytes=8 * MIB)
    grown = resident() - before
    assert pool.chunks == 12
    assert populated(pool) == 96 * MIB and grown <= 100 * MIB
    pool.close()
    assert resident() - before < 4 * MIB
    assert mapped() - mapped_before < 96 * MIB  # less than the pool
    assert pool.state == "closed" and "closed" in repr(pool)


def test_chunks_are_of_whole_blocks_and_pages(device: kvswap.Device) -> None:
    """Otherwise two registrations would share a page, or a block would lie in two registrations."""
    for nbytes in (1000, 3 * PAGE, PAGE + 512, 7):
        with HostPool(5000, nbytes, device=device, chunk_nbytes=64 * 1024) as pool:
            step = pool.nbytes if pool.chunks == 1 else None
            for chunk in range(1, pool.chunks):
                step = step or find_seam(device, pool)
                assert chunk * step % PAGE == 0 and chunk * step % nbytes == 0
            assert pool.pinned


def find_seam(device: kvswap.Device, pool: HostPool) -> int:
    """Bytes of the first registration."""
    from conftest import seam

    region = seam(device, "pointer_query", pool.ptr)
    return int(region["nbytes"])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"num_blocks": 0}, ValueError, "num_blocks is 0"),
        ({"num_blocks": 1 << 32}, ValueError, r"2\*\*32 - 1"),
        ({"slot_nbytes": 0}, ValueError, "slot_nbytes is 0"),
        ({"layers": 3}, ValueError, "not a multiple of layers"),
        ({"layers": 0}, ValueError, "layers is 0"),
        ({"layout": "diagonal"}, ValueError, "layout is 'diagonal'"),
        ({"pages": "4KiB"}, ValueError, "pages is '4KiB'"),
        ({"numa": "near"}, ValueError, "numa is 'near'"),
        ({"numa": -1}, ValueError, "numa is -1"),
        ({"numa": 1000}, ValueError, "no such node"),
        ({"chunk_nbytes": 0}, ValueError, "chunk_nbytes is 0"),
        ({"threads": 65}, ValueError, "threads is 65"),
        ({"max_blocks": 3}, ValueError, "max_blocks is 3, less than num_blocks, which is 4"),
        ({"progress": 3}, TypeError, "progress must be callable"),
        ({"reserve": "much"}, TypeError, "reserve must be an int"),
        ({"num_blocks": 1 << 20, "slot_nbytes": 1 << 40}, MemoryError, "more than a process can address"),
    ],
)
def test_wrong_arguments(device: kvswap.Device, arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    if "no such node" in text and not Path("/sys/devices/system/node/has_memory").exists():
        pytest.skip("nothing says which nodes there are")
    grown = set()
    for _ in range(5):  # what is kept is kept each time; malloc, or another thread, may take some once
        before = mapped()
        with pytest.raises(error, match=text):
            HostPool(**{"num_blocks": 4, "slot_nbytes": 4096, "device": device, **arguments})
        grown.add(mapped() - before)
    assert 0 in grown


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1, 2, 64])
def test_more_than_the_machine_has(device: kvswap.Device, factor: int) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * PAGE
    before, mapped_before, threads = resident(), mapped(), threading.active_count()
    start = time.monotonic()
    with pytest.raises(MemoryError, match=r"do not fit.*(reserve=|Raise memory)"):
        HostPool(factor * total // MIB, MIB, device=device)
    assert time.monotonic() - start < AT_ONCE
    assert resident() - before < 8 * MIB and mapped() - mapped_before < KEPT
    assert threading.active_count() == threads


def test_what_is_refused_asks_for_no_flag(device: kvswap.Device) -> None:
    class Flag:
        def __bool__(self) -> bool:
            raise AssertionError("nobody needs it")

    with pytest.raises(MemoryError, match="do not fit"):
        HostPool(os.sysconf("SC_PHYS_PAGES") * PAGE // MIB, MIB, device=device, wait=cast(bool, Flag()))
    with pytest.raises(AssertionError, match="nobody needs it"):
        HostPool(1, PAGE, device=device, wait=cast(bool, Flag()))


def test_reserve(device: kvswap.Device) -> None:
    with pytest.raises(MemoryError, match=r"keeps free 1\.0 PiB"):
        HostPool(1, PAGE, device=device, reserve=1 << 50)
    HostPool(1, PAGE, device=device, reserve=0).close()
    HostPool(1, PAGE, device=device, reserve=-(1 << 50)).close()


def test_reserve_of_the_environment(device: kvswap.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSWAP_RESERVE", str(1 << 50))
    with pytest.raises(MemoryError, match=r"keeps free 1\.0 PiB"):
        HostPool(1, PAGE, device=device)
    HostPool(1, PAGE, device=device, reserve=0).close()
    monkeypatch.setenv("KVSWAP_RESERVE", "-1000")
    HostPool(1, PAGE, device=device).close()
    monkeypatch.setenv("KVSWAP_RESERVE", "8GiB")
    with pytest.raises(ValueError, match="KVSWAP_RESERVE is '8GiB'"):
        HostPool(1, PAGE, device=device)


def test_address_space(device_name: str) -> None:
    """RLIMIT_AS: no room for the addresses is an error, at once."""
    if not device_name.startswith("host"):
        pytest.skip("a driver needs more addresses than such a limit leaves")
    if SANITIZED:
        pytest.skip("so does a sanitizer")
    run = run_python(
        """
        import resource, sys, kvswap
        from kvswap.memory import HostPool
        device = kvswap.Device(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        try:
            HostPool(16, 1 << 20, device=device, max_blocks=1 << 20)
        except MemoryError as error:
            print(error)
        """,
        device_name,
    )
    assert "no address space for" in run.stdout and "RLIMIT_AS" in run.stdout, run.stderr


# -- layouts and views ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [None, 50], ids=["solid", "room"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers(device: kvswap.Device, layout: str, room: int | None) -> None:
    blocks, layers, nbytes = 20, 5, 5 * 1024
    with HostPool(blocks, nbytes, device=device, layers=layers, layout=layout, max_blocks=room) as pool:
        for i in range(layers):
            pool.layer(i)[:] = np.arange(blocks)[:, None] + 100 * i % 251
        ptrs = pool.layer_ptrs()
        for i in range(layers):
            view = pool.layer(i)
            assert view.shape == (blocks, nbytes // layers) and view.dtype == np.uint8 and view.flags.writeable
            assert view.ctypes.data == ptrs[i]
            assert view.strides == (pool.layer_stride, 1)
            assert (view == (np.arange(blocks)[:, None] + 100 * i % 251).astype(np.uint8)).all()
            del view
        if layout == "block-first":
            flat = np.frombuffer(pool, np.uint8).reshape(blocks, layers, nbytes // layers)
            assert all((flat[:, i] == pool.layer(i)).all() for i in range(layers))
            del flat
        else:
            rows = np.asarray(pool).reshape(layers, blocks, nbytes // layers)
            assert all((rows[i] == pool.layer(i)).all() for i in range(layers))
            del rows
        with pytest.raises(IndexError, match="layer is 5; the pool has 5 layers"):
            pool.layer(5)
        gc.collect()


def test_all_layers_of_a_block_lie_together_unless_told_otherwise(device: kvswap.Device) -> None:
    with HostPool(6, 3 * 512, device=device, layers=3) as pool:
        assert (pool.layout, pool.layer_stride) == ("block-first", 3 * 512)
        assert np.diff(pool.layer_ptrs()).tolist() == [512, 512]


def test_torch(device: kvswap.Device) -> None:
    torch = pytest.importorskip("torch")
    with HostPool(6, 3 * 64, device=device, layers=3) as pool:
        tensor = pool.torch(1, torch.bfloat16, (4, 2, 4))
        assert tensor.shape == (6, 4, 2, 4) and tensor.dtype == torch.bfloat16 and tensor[0].is_contiguous()
        tensor.fill_(1.5)
        assert tensor.data_ptr() == pool.layer_ptrs()[1]
        assert (pool.layer(1).reshape(6, -1).view(np.uint16) == 0x3FC0).all()
        assert not pool.layer(0).any() and not pool.layer(2).any()
        with pytest.raises(BufferError, match="1 view of the pool is in use"):
            pool.close()
        del tensor
        assert pool.torch(0).shape == (6, 64)
        gc.collect()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_swaps(device: kvswap.Device, path: str, layout: str) -> None:
    """Every path, across many chunks, from and to a pool of either layout."""
    blocks, layers, nbytes = 64, 4, 8192
    gpu = [Buffer(device, blocks * nbytes) for _ in range(layers)]
    data = [buffer.randomise(seed) for seed, buffer in enumerate(gpu)]
    rng = np.random.default_rng(3)
    with HostPool(blocks, layers * nbytes, device=device, layers=layers, layout=layout, chunk_nbytes=1 << 16) as pool:
        assert pool.chunks >= 32
        ids, slots = rng.permutation(blocks), rng.permutation(blocks)
        ptrs = [buffer.ptr for buffer in gpu]
        arguments = (ptrs, pool.layer_ptrs(), nbytes, blocks, blocks, ids, slots)
        options = {"device": device, "path": path, "cpu_stride": pool.layer_stride}
        kvswap.swap_cache_all_layers(*arguments, kvswap.Direction.D2H, **options)
        for i in range(layers):
            np.testing.assert_array_equal(pool.layer(i)[slots], data[i].reshape(blocks, nbytes)[ids])
            gpu[i].put(np.zeros(blocks * nbytes, np.uint8))
        kvswap.swap_cache_all_layers(*arguments, kvswap.Direction.H2D, **options)
        for i in range(layers):
            np.testing.assert_array_equal(gpu[i].get(), data[i])
        gc.collect()


@pytest.mark.parametrize("room", [None, 40], ids=["solid", "room"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_moves(device: kvswap.Device, layout: str, room: int | None) -> None:
    blocks, layers, nbytes = 32, 4, 4096
    cache = Buffer(device, blocks * layers * nbytes)
    data = cache.randomise(5).reshape(layers, blocks, nbytes)
    source = kvswap.Pool(device, cache.ptr, blocks, layers * nbytes, stride=nbytes, rows=layers, pitch=blocks * nbytes)
    with HostPool(blocks, layers * nbytes, device=device, layers=layers, layout=layout, max_blocks=room) as host:
        target = host.pool(name="host side")
        assert target.name == "host side" and target.num_blocks == blocks
        order = np.random.default_rng(1).permutation(blocks)
        kvswap.move_blocks(source, target, np.arange(blocks), order).wait(PATIENCE)
        for i in range(layers):
            np.testing.assert_array_equal(host.layer(i)[order], data[i])
        with pytest.raises(BufferError, match="in use"):
            host.close()
        with pytest.raises(ValueError, match=r"overlap|lie among"):
            host.pool()
        del target
        gc.collect()


# -- readiness, progress, cancelling ----------------------------------------------------------------------------------


def test_use_begins_before_all_is_populated(device: kvswap.Device) -> None:
    """The second chunk is held up; the first is ready, is swapped to and read back meanwhile."""
    gpu = Buffer(device, 4 * MIB)
    data = gpu.randomise(1)
    with testing.fault(device, "call", "delay", operation="host_register", nth=2, delay=PATIENCE):
        pool = HostPool(16, MIB, device=device, chunk_nbytes=8 * MIB, threads=1, wait=False)
        deadline = time.monotonic() + PATIENCE
        while not pool.ready(0):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert not pool.ready(15) and pool.state == "populating" and not pool.pinned
        with pytest.raises(TimeoutError, match="it goes on"):
            pool.wait(0.01)
        kvswap.swap_cache_per_layer(gpu.ptr, pool.ptr, MIB, 4, 8, [0, 1, 2, 3], [7, 5, 3, 1], 0, device=device)
        assert not pool.ready(15)
        np.testing.assert_array_equal(np.frombuffer(pool, np.uint8).reshape(16, MIB)[[7, 5, 3, 1]].ravel(), data)
        with pytest.raises(kvswap.Error, match="still being populated"):
            pool.grow(17)
    pool.wait(PATIENCE)
    assert pool.ready(15) and pool.pinned
    with pytest.raises(IndexError, match="block is 16; the pool has 16 blocks, 0 to 15"):
        pool.ready(16)
    gc.collect()
    pool.close()


def test_progress(device: kvswap.Device) -> None:
    told: list[tuple[int, int]] = []
    with (
        testing.fault(device, "call", "delay", operation="host_register", every=1, delay=0.06),
        HostPool(
            12, MIB, device=device, chunk_nbytes=2 * MIB, threads=1, progress=lambda *where: told.append(where)
        ) as pool,
    ):
        assert told[-1] == (12 * MIB, 12 * MIB) == (pool.nbytes, pool.nbytes)
    done = [done for done, _ in told]
    assert done == sorted(done) and len(set(done)) >= 4 and all(total == 12 * MIB for _, total in told)


def test_progress_bar(device: kvswap.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    terminal = io.StringIO()
    HostPool(12, MIB, device=device, progress=Progress(terminal, enabled=True).memory).close()
    assert re.search(r"\[[#.]{24}\] [\d.]+ (B|MiB) of 12 MiB of host memory", terminal.getvalue())


def test_what_progress_raises_ends_the_constructor(device: kvswap.Device) -> None:
    def stop(done: int, total: int) -> None:
        raise RuntimeError("enough")

    before = mapped()
    with (
        testing.fault(device, "call", "delay", operation="host_register", every=1, delay=0.06),
        pytest.raises(RuntimeError, match="enough"),
    ):
        HostPool(1024, MIB, device=device, chunk_nbytes=2 * MIB, threads=2, progress=stop)
    gc.collect()
    end = time.monotonic() + PATIENCE
    while mapped() - before >= 512 * MIB:  # it is freed by another thread; those that registered it keep some addresses
        assert time.monotonic() < end, mapped() - before
        time.sleep(0.01)


def test_the_driver_takes_its_time_to_give_memory_back(device: kvswap.Device) -> None:
    """Closing looks again every 50 ms."""
    pool = HostPool(3, MIB, device=device, chunk_nbytes=MIB)
    assert pool.pinned
    with testing.fault(device, "call", "delay", operation="host_unregister", every=1, delay=0.12):
        pool.close()
    assert pool.state == "closed"


def test_cancel(device: kvswap.Device) -> None:
    with testing.fault(device, "call", "delay", operation="host_register", nth=2, every=1, delay=PATIENCE):
        pool = HostPool(64, MIB, device=device, chunk_nbytes=2 * MIB, threads=1, wait=False)
        while not pool.ready(0):
            time.sleep(0.001)
        pool.cancel()
    with pytest.raises(kvswap.Error, match="cancelled"):
        pool.wait(PATIENCE)
    assert pool.state == "cancelled" and pool.ready(0) and not pool.ready(63) and not pool.pinned
    with pytest.raises(kvswap.Error, match="cancelled"):
        pool.grow(65)
    pool.close()


def test_ctrl_c_works_while_it_is_populated(device_name: str) -> None:
    run = run_python(
        """
        import os, signal, sys, threading, time, kvswap
        from kvswap import testing
        from kvswap.memory import HostPool
        device = kvswap.Device(sys.argv[1])
        start = time.monotonic()
        with testing.fault(device, "call", "delay", operation="host_register", every=1, delay=0.5):
            try:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
                HostPool(120, 1 << 20, device=device, chunk_nbytes=1 << 20, threads=1)  # a minute, else
            except KeyboardInterrupt:
                print("interrupted", time.monotonic() - start < 20)
        """,
        device_name,
    )
    assert run.stdout == "interrupted True\n", run.stderr


def test_leaving_while_it_is_populated(device_name: str) -> None:
    """Neither a hang nor a crash."""
    run = run_python(
        """
        import sys, kvswap
        from kvswap.memory import HostPool
        pool = HostPool(512, 1 << 20, device=sys.argv[1], wait=False)
        """,
        device_name,
    )
    assert (run.returncode, run.stderr) == (0, "")


# -- registration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", [1, 3, 8])
def test_a_chunk_that_will_not_register(device: kvswap.Device, caplog: pytest.LogCaptureFixture, nth: int) -> None:
    with testing.fault(device, "call", "fail", operation="host_register", nth=nth, code=801):
        pool = HostPool(64, 65536, device=device, chunk_nbytes=8 * 65536)
    assert pool.chunks == 8 and not pool.pinned and pool.state == "ready"
    assert any("pageable" in notice and "801" in notice for notice in pool.notices)
    assert "pageable" in caplog.text
    for at in range(0, pool.nbytes, 65536):  # nothing of it is registered any more
        with pytest.raises(ValueError, match="was not registered"):
            device.unregister(pool.ptr + at)
    gpu = Buffer(device, pool.nbytes)
    data = gpu.randomise(4)
    ids = np.random.default_rng(1).permutation(64)
    kvswap.swap_cache_per_layer(gpu.ptr, pool, 65536, 64, 64, np.arange(64), ids, 0, device=device)
    np.testing.assert_array_equal(np.asarray(pool).reshape(64, -1)[ids].ravel(), data)
    assert not device.lost
    Buffer(device, 4096, "cpu")  # the driver still works
    gc.collect()
    pool.close()


def test_pageable_on_request(device: kvswap.Device) -> None:
    with HostPool(4, MIB, device=device, register=False) as pool:
        assert not pool.pinned and pool.notices == ()
        with pytest.raises(ValueError, match="was not registered"):
            device.unregister(pool.ptr)


def test_huge_pages_or_a_notice(device: kvswap.Device) -> None:
    for pages in ("transparent", "2MiB", "1GiB"):
        with HostPool(8, MIB, device=device, pages=pages) as pool:
            assert (pool.pages == pages) == (pool.notices == ())
            if pool.pages in ("default", "transparent"):
                assert pool.mapped_nbytes == 8 * MIB
            np.asarray(pool)[:] = 1
            gc.collect()


def test_transparent_huge_pages_are_used(device: kvswap.Device) -> None:
    with HostPool(32, MIB, device=device, pages="transparent") as pool:
        if pool.pages != "transparent":
            pytest.skip("transparent huge pages are off")
        inside, huge = False, 0
        for words in map(str.split, Path("/proc/self/smaps").read_text().splitlines()):
            if not words[0].endswith(":"):  # the line that begins a mapping
                start, end = (int(address, 16) for address in words[0].split("-"))
                inside = start < pool.ptr + pool.nbytes and pool.ptr < end
            elif inside and words[0] == "AnonHugePages:":
                huge += int(words[1]) * 1024
        assert huge >= 16 * MIB


def test_numa(device: kvswap.Device) -> None:
    node = Path("/sys/devices/system/node/node0")
    if not node.exists():
        pytest.skip("the kernel says nothing of NUMA nodes")
    for numa, shown in ((0, 0), ("interleave", "interleave"), (None, None)):
        with HostPool(4, MIB, device=device, numa=numa) as pool:
            assert pool.numa_node == shown or any("place memory" in notice for notice in pool.notices)


# -- growing and shrinking --------------------------------------------------------------------------------------------


def test_a_driver_that_unpins_late(device: kvswap.Device) -> None:
    """It waits for all that the GPU was given, and the caller's limit is what counts; from a second on."""
    pool = HostPool(3, 1000, device=device, max_blocks=64, numa=None)  # its last page has room
    with testing.fault(device, "call", "delay", operation="host_unregister", delay=1.4):
        pool.grow(20, PATIENCE)
    with testing.fault(device, "call", "delay", operation="host_unregister", delay=1.4):
        pool.shrink(4, PATIENCE)
    assert (pool.num_blocks, pool.state, pool.pinned) == (4, "ready", True)
    pool.grow(64)
    with testing.fault(device, "call", "delay", operation="host_unregister", delay=2.5):
        with pytest.raises(TimeoutError, match=r"unpinning the pool's memory did not end within [01][.0-9]* s"):
            pool.shrink(2, timeout=0.5)
        pool.shrink(2, PATIENCE)  # it goes on
    assert (pool.num_blocks, pool.state, pool.pinned) == (2, "ready", True)
    pool.close()


@pytest.mark.parametrize("nbytes", [4 * 4096, 4 * 1000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_grow_and_shrink(device: kvswap.Device, layout: str, nbytes: int) -> None:
    """Addresses and contents stay, memory comes and goes, all of it stays registered."""
    pool = HostPool(
        10, nbytes, device=device, layers=4, layout=layout, max_blocks=3000, chunk_nbytes=64 * 1024, numa=None
    )
    rng, expected = np.random.default_rng(2), np.full((4, 3000, nbytes // 4), 0, np.uint8)
    ptrs = pool.layer_ptrs()
    end = int(ptrs.max()) + 3000 * nbytes // 4 if layout == "layer-first" else pool.ptr + 3000 * nbytes
    for blocks in (11, 500, 30, 29, 3000, 1, 2, 700):
        old = pool.num_blocks
        pool.grow(blocks, PATIENCE) if blocks > old else pool.shrink(blocks, PATIENCE)
        assert pool.num_blocks == blocks and pool.pinned and pool.state == "ready"
        assert (pool.layer_ptrs() == ptrs).all() and pool.ready(blocks - 1)
        assert pool.nbytes == blocks * nbytes <= pool.mapped_nbytes <= pool.nbytes + 4 * PAGE
        for layer in range(4):
            view = pool.layer(layer)
            np.testing.assert_array_equal(view[: min(old, blocks)], expected[layer, : min(old, blocks)])
            view[:] = expected[layer, :blocks] = rng.integers(0, 255, (blocks, nbytes // 4), np.uint8)
            del view
        gc.collect()
    assert 700 * nbytes <= resident_between(pool.ptr, end) < 700 * nbytes + MIB
    gpu = Buffer(device, 700 * nbytes)
    kvswap.swap_cache_all_layers(
        [gpu.ptr + i * nbytes // 4 for i in range(4)],
        ptrs,
        nbytes // 4,
        700,
        700,
        np.arange(700),
        np.arange(700),
        1,
        gpu_stride=nbytes,
        cpu_stride=pool.layer_stride,
        device=device,
    )
    swapped = gpu.get().reshape(700, 4, nbytes // 4)
    np.testing.assert_array_equal(swapped.transpose(1, 0, 2), expected[:, :700])
    pool.close()
    with pytest.raises(ValueError, match="not registered"):
        device.unregister(int(ptrs[0]))


def test_growing_needs_room(device: kvswap.Device) -> None:
    with HostPool(4, 4096, device=device, max_blocks=6) as pool:
        with pytest.raises(ValueError, match="room for 6 blocks"):
            pool.grow(7)
        with pytest.raises(ValueError, match="has 4 blocks already"):
            pool.grow(4)
        for wrong in (0, 4, 5):
            with pytest.raises(ValueError, match="shrinks to 1 to 3"):
                pool.shrink(wrong)
        view = pool.layer(0)
        with pytest.raises(BufferError, match="1 view of the pool is in use"):
            pool.shrink(3)
        pool.grow(6)  # a view does not mind
        assert view.shape == (4, 4096)
        del view
    solid = HostPool(4, 4096, device=device, layers=2, layout="layer-first")
    with pytest.raises(kvswap.Error, match="made with max_blocks"):
        solid.shrink(2)


def test_contiguous_memory_is_asked_of_what_has_gaps(device: kvswap.Device) -> None:
    """By C code, such as torch.frombuffer's: NumPy takes strides."""
    view = ctypes.create_string_buffer(256)  # a Py_buffer
    get, release = ctypes.pythonapi.PyObject_GetBuffer, ctypes.pythonapi.PyBuffer_Release
    get.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int]
    strides, contiguous = 0x10 | 0x08, (0x20, 0x40, 0x80)  # PyBUF_STRIDES, PyBUF_(C|F|ANY)_CONTIGUOUS
    for gaps in (False, True):
        pool = HostPool(4, 8192, device=device, layers=2, layout="layer-first", max_blocks=8 if gaps else 4)
        assert get(pool, view, strides) == 0
        release(view)
        for bit in contiguous:
            if gaps:
                with pytest.raises(BufferError, match="room to grow between them: take layer"):
                    get(pool, view, strides | bit)
            else:
                assert get(pool, view, strides | bit) == 0
                release(view)
        pool.close()


def test_growing_that_will_not_register(device: kvswap.Device) -> None:
    with HostPool(4, 4096, device=device, max_blocks=100) as pool:
        np.asarray(pool)[:] = 9
        with testing.fault(device, "call", "fail", operation="host_register"):
            pool.grow(100)
        assert not pool.pinned and pool.num_blocks == 100
        assert (np.asarray(pool)[: 4 * 4096] == 9).all()
        gc.collect()


def test_growing_into_no_memory(device: kvswap.Device) -> None:
    """What was cancelled in the middle of growing is whole again once it is shrunk."""

    def cancel() -> None:
        end = time.monotonic() + PATIENCE
        while pool.state != "populating" and time.monotonic() < end:
            time.sleep(0.001)
        pool.cancel()
        bindings.set_fault(device, "call", "none")

    thread = threading.Thread(target=cancel)
    with HostPool(4, MIB, device=device, max_blocks=256, chunk_nbytes=MIB) as pool:
        np.asarray(pool)[:] = 9
        gc.collect()
        with (
            testing.fault(device, "call", "delay", operation="host_register", nth=3, every=1, delay=PATIENCE),
            pytest.raises(kvswap.Error, match="cancelled"),
        ):
            thread.start()
            pool.grow(256)
        thread.join(PATIENCE)
        assert pool.state == "cancelled" and pool.ready(3) and not pool.ready(255) and not pool.pinned
        pool.shrink(4)
        assert pool.state == "ready" and pool.pinned and (np.asarray(pool) == 9).all()
        gc.collect()


def test_a_smaller_pool_of_what_there_was_no_memory_for(device: kvswap.Device) -> None:
    """A chunk in the middle that could not be populated is populated then."""
    libc, file = ctypes.CDLL(None), os.memfd_create("hole")  # without a size: nothing is to be had behind it
    with testing.fault(device, "call", "delay", operation="host_register", delay=PATIENCE):
        pool = HostPool(8, MIB, device=device, max_blocks=8, chunk_nbytes=MIB, threads=1, wait=False)
        hole, writable = ctypes.c_void_p(pool.ptr + 3 * MIB), mmap.PROT_READ | mmap.PROT_WRITE
        fixed = 0x10  # MAP_FIXED
        libc.mmap(hole, ctypes.c_size_t(mmap.PAGESIZE), writable, mmap.MAP_SHARED | fixed, file, ctypes.c_long(0))
    with pytest.raises(MemoryError):
        pool.wait(PATIENCE)
    assert pool.state == "failed" and not pool.ready(3)
    os.truncate(file, mmap.PAGESIZE)
    pool.shrink(6)
    assert pool.state == "ready" and pool.pinned and all(pool.ready(block) for block in range(6))
    pool.close()
    os.close(file)


def test_a_driver_that_does_not_unregister(device: kvswap.Device) -> None:
    """Nothing is forgotten: it can be tried again, and the pool is pinned where it says so."""
    pool = HostPool(8, MIB, device=device, max_blocks=16, chunk_nbytes=MIB)
    fault = testing.fault(device, "call", "fail", operation="host_unregister", nth=2)
    with fault, pytest.raises(kvswap.DeviceError, match="injected"):
        pool.shrink(5)
    assert pool.state == "ready" and pool.num_blocks == 8 and not pool.pinned
    pool.grow(9)
    assert pool.pinned
    for block in range(9):
        assert seam(device, "pointer_query", pool.ptr + block * MIB)["memory"] == "pinned host"
    pool.shrink(5)
    assert pool.pinned
    pool.close()
    array = np.zeros(8192, np.uint8)
    memory.host_register(array, array.nbytes, device=device)
    fault = testing.fault(device, "call", "fail", operation="host_unregister")
    with fault, pytest.raises(kvswap.DeviceError, match="injected"):
        memory.host_unregister(array)
    memory.host_unregister(array)


def test_a_pool_of_another_device(device: kvswap.Device) -> None:
    """Registered with one, blocks for the transfers of another."""
    other = kvswap.Device("host:1") if device.kind == "host" else device
    with HostPool(8, 4096, device=device) as host:
        target = host.pool(device=other)
        assert target.device == other and target.num_blocks == 8
        del target
        gc.collect()


def test_a_device_that_runs_step_by_step() -> None:
    device = testing.deterministic_device(seed=5)
    gpu = device.alloc(4 * 4096)
    np.asarray(gpu)[:] = 6
    with HostPool(8, 4096, device=device) as pool:
        kvswap.swap_cache_per_layer(gpu, pool, 4096, 4, 8, [0, 1, 2], [7, 1, 3], 0, device=device)
        assert (pool.layer(0)[[7, 1, 3]] == 6).all() and not pool.layer(0)[[0, 2]].any()
        gc.collect()


# -- the end ----------------------------------------------------------------------------------------------------------


def test_use_after_close(device: kvswap.Device) -> None:
    pool = HostPool(4, 4096, device=device)
    pool.close()
    pool.close()
    for use in (
        lambda: pool.ptr,
        lambda: pool.layer(0),
        lambda: pool.torch(0),
        lambda: pool.layer_ptrs(),
        lambda: pool.pool(),
        lambda: pool.ready(0),
        lambda: pool.wait(),
        lambda: pool.grow(5),
        lambda: pool.shrink(3),
        lambda: memoryview(pool),
        lambda: kvswap.swap_blocks_batch([pool], [pool], 64, device=device),
    ):
        with pytest.raises((kvswap.Error, BufferError, ModuleNotFoundError), match=r"closed|torch"):
            use()


def test_close_waits_for_transfers(device: kvswap.Device) -> None:
    pool = HostPool(4, 4096, device=device)
    gpu, stream = Buffer(device, 4 * 4096), kvswap.Stream(device)
    with Gate(device) as gate:
        gate.hold(stream)
        transfer = kvswap.swap_cache_per_layer_async(
            gpu.ptr, pool, 4096, 4, 4, [0], [1], 0, device=device, stream=stream
        )
        with pytest.raises(TimeoutError):
            pool.close(timeout=0.05)
        assert pool.ready(0) and pool.layer(0).shape == (4, 4096)
        threading.Timer(0.2, gate.open).start()
        pool.close(timeout=PATIENCE)
        assert transfer.done()
    assert pool.state == "closed"


def test_force_leaves_views_readable(device: kvswap.Device) -> None:
    """Views of a closed pool read zeros, and the kernel gives their addresses to no other mapping while they live."""
    before = resident()
    pool = HostPool(64, MIB, device=device)
    view = pool.layer(0)
    view[:] = 7
    ptr = pool.ptr
    with pytest.raises(BufferError, match="drop them first"):
        pool.close()
    pool.close(force=True)
    assert pool.state == "closed" and resident() - before < 8 * MIB
    assert not view[3].any()
    others = [mmap.mmap(-1, 64 * MIB) for _ in range(4)]
    for other in others:
        start = ctypes.addressof(ctypes.c_char.from_buffer(other))
        assert start + 64 * MIB <= ptr or start >= ptr + 64 * MIB
    with pytest.raises((kvswap.Error, BufferError), match="closed"):
        pool.layer(0)


def test_an_error_is_not_hidden_by_views(device: kvswap.Device) -> None:
    with pytest.raises(ZeroDivisionError), HostPool(4, 4096, device=device) as pool:
        view = pool.layer(0)
        view[0] = 1 // 0
    assert pool.state == "ready"
    del view
    with HostPool(4, 4096, device=device) as pool:
        pass
    assert pool.state == "closed"


def await_freed(before: int) -> None:
    """What is dropped is freed by another thread."""
    end = time.monotonic() + PATIENCE
    while resident() - before >= 8 * MIB:
        assert time.monotonic() < end, resident() - before
        time.sleep(0.01)


def test_dropping_it_gives_all_back(device: kvswap.Device) -> None:
    before = resident()
    for _ in range(3):
        HostPool(64, MIB, device=device)
        array = np.asarray(HostPool(64, MIB, device=device))
        array[:] = 1
        del array
    gc.collect()
    await_freed(before)


def test_a_pool_that_transfers_hold(device: kvswap.Device) -> None:
    """Dropped while a transfer runs: the transfer ends well, then the memory goes."""
    before = resident()
    pool, gpu, stream = HostPool(64, MIB, device=device), Buffer(device, MIB), kvswap.Stream(device)
    gpu.put(np.full(MIB, 3, np.uint8))
    with Gate(device) as gate:
        gate.hold(stream)
        transfer = kvswap.swap_cache_per_layer_async(
            gpu.ptr, pool, MIB, 1, 64, [0], [5], 0, device=device, stream=stream
        )
        del pool
        gate.open()
        transfer.wait(PATIENCE)
    del transfer
    device.synchronize(PATIENCE)
    HostPool(1, 4096, device=device).close()
    await_freed(before)


@pytest.mark.slow
def test_no_leak(device: kvswap.Device) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def cycle() -> None:
        with HostPool(16, 65536, device=device, layers=4, max_blocks=32, chunk_nbytes=65536) as pool:
            pool.grow(20)
            pool.shrink(8)
            pool.layer(1)[:] = 1

    for _ in range(20):
        cycle()
    gc.collect()
    before = resident(), mapped(), descriptors(), len(os.listdir("/proc/self/task"))
    for _ in range(200 if device.kind == "host" else 50):  # a GPU's driver that is busy takes a second for one
        cycle()
    gc.collect()
    after = resident(), mapped()
    room = (40 if SANITIZED else 2) * MIB
    # 50 pools would have 50 MiB, and 50 threads; the one that frees what was dropped, and a driver's, come and go.
    assert after[0] - before[0] < room and after[1] - before[1] < room + KEPT
    assert comes_down(descriptors, before[2]) and comes_down(lambda: len(os.listdir("/proc/self/task")), before[3] + 8)


def test_a_forked_child_is_told(device_name: str) -> None:
    run = run_python(
        """
        import os, sys, kvswap
        from kvswap.memory import HostPool
        pool = HostPool(64, 1 << 20, device=sys.argv[1])
        pool.layer(0)[:] = 3
        child = os.fork()
        if child == 0:
            told = 0
            for use in (pool.close, lambda: pool.layer(0), lambda: pool.ptr, lambda: pool.ready(0), pool.wait,
                        lambda: pool.grow(65), pool.cancel, lambda: pool.state, lambda: pool.notices):
                try:
                    use()
                except (kvswap.Error, BufferError) as error:
                    told += "fork" in str(error)
            del pool, use
            os._exit(told)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        assert (pool.layer(0) == 3).all()
        pool.close()
        print("closed")
        """,
        device_name,
    )
    assert run.stdout == "closed\n", run.stderr


@pytest.mark.parametrize("when", ["populating", "registering", "used"])
def test_kill(device_name: str, when: str) -> None:
    """kill -9 at any time: the machine has its memory back."""
    code = """
        import sys, time, kvswap
        from kvswap import testing
        from kvswap.memory import HostPool
        device = kvswap.Device(sys.argv[1])
        if sys.argv[2] == "registering":
            with testing.fault(device, "call", "delay", operation="host_register", every=1, delay=60):
                pool = HostPool(256, 1 << 20, device=device, wait=False, chunk_nbytes=64 << 20)
                print("go", flush=True)
                time.sleep(60)
        pool = HostPool(256, 1 << 20, device=device, wait=sys.argv[2] == "used")
        gpu = device.alloc(1 << 20)
        print("go", flush=True)
        while True:
            kvswap.swap_cache_per_layer(gpu, pool, 1 << 20, 1, 256, [0], [200], 0, device=device)
        """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), device_name, when], stdout=subprocess.PIPE, cwd=ROOT / "tests"
    )
    assert process.stdout is not None and process.stdout.readline() == b"go\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait(PATIENCE) == -signal.SIGKILL
    process.stdout.close()
    with HostPool(256, MIB, device=device_name) as pool:
        assert pool.pinned


def test_a_lost_device(device_name: str) -> None:
    """Its memory can be given back all the same."""
    if not device_name.startswith("host"):
        pytest.skip("a GPU is not lost for a test")
    run = run_python(
        """
        import gc, kvswap
        import numpy as np
        from kvswap import testing
        from kvswap.memory import HostPool
        device = kvswap.Device("host:9")
        pools = [HostPool(64, 1 << 20, device=device) for _ in range(3)]
        gpu = device.alloc(1 << 20)
        try:
            with testing.fault(device, "call", "lose"):
                kvswap.swap_cache_per_layer(gpu.ptr, pools[0].ptr, 1 << 20, 1, 64, [0], [0], 0, device=device)
        except kvswap.DeviceError as error:
            print("lost", device.lost)
        for pool in pools[:2]:
            pool.close()
        del pools, pool
        try:
            HostPool(1, 4096, device=device)
        except kvswap.DeviceError as error:
            print("lost" in str(error))
        """
    )
    assert (run.returncode, run.stdout) == (0, "lost True\nTrue\n"), run.stderr


def test_two_threads_close_and_use(device: kvswap.Device) -> None:
    """No crash: each thread gets a view or an error."""
    for _ in range(20):
        pool = HostPool(8, 65536, device=device, max_blocks=16)
        stop, wrong = threading.Event(), []

        def use(pool: HostPool = pool, stop: threading.Event = stop, wrong: list[Exception] = wrong) -> None:
            while not stop.is_set():
                try:
                    view = pool.layer(0)
                    view[:] = 1
                    del view
                    pool.ready(3)
                except (kvswap.Error, BufferError):
                    pass
                except Exception as error:
                    wrong.append(error)

        threads = [threading.Thread(target=use) for _ in range(3)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 0.2  # with each try the others may hold the GIL for 5 ms
        while time.monotonic() < end:
            try:
                pool.close()
                break
            except BufferError:
                continue
        stop.set()
        for thread in threads:
            thread.join()
        assert wrong == []
        pool.close(force=True)


def test_finalizers_in_two_threads_close_pools() -> None:
    """Each is run by a release, which the other one does not wait for."""
    run = run_python(f"""
        import threading, time
        from contextlib import suppress
        import numpy as np, kvswap
        from kvswap.memory import HostPool

        both, told = threading.Barrier(2), []

        class Owner(np.ndarray):
            def __del__(self):
                with suppress(threading.BrokenBarrierError):
                    both.wait(2)  # in vain, if one thread has released both
                try:
                    self.pool.close(timeout={AT_ONCE})
                    told.append("closed")
                except Exception as error:
                    told.append(repr(error))

        def work(number):
            device = kvswap.Device(f"host:{{number}}")
            owner = np.zeros(64, np.uint8).view(Owner)
            owner.pool = HostPool(2, 4096, device=device)
            transfer = kvswap.swap_blocks_batch([owner], [np.zeros(64, np.uint8)], 64, device=device)
            del owner
            transfer.wait({PATIENCE})

        threads = [threading.Thread(target=work, args=[number]) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(*told)
    """)
    assert (run.stdout, run.stderr) == ("closed closed\n", "")


def test_a_pool_over_a_host_pool_that_its_device_argument_shrinks(device: kvswap.Device) -> None:
    with HostPool(4, 4096, device=device, max_blocks=8) as pool:

        class Which:
            @property
            def type(self) -> str:
                pool.shrink(1)
                return device.kind

            index = 0

        assert pool.pool(device=Which()).num_blocks == 1


@pytest.mark.parametrize("force", [False, True])
def test_a_pool_by_address_ends_with_the_host_pool(device: kvswap.Device, force: bool) -> None:
    """Where a view keeps the addresses of one that was closed by force, a pool that is opened there ends with it."""
    block = 1 << 16
    own = kvswap.Pool(device, device.alloc(8 * block), 8, block)
    host = HostPool(8, block, device=device)
    address = host.ptr
    pool = kvswap.Pool(device, address, 8, block, name="first")
    kvswap.move_blocks(own, pool, [1], [2]).wait(PATIENCE)
    view = host.layer(0) if force else None
    host.close(force=force)
    with pytest.raises(kvswap.Error, match="pool 'first' lies in memory that has been freed"):
        kvswap.move_blocks(own, pool, [1], [2])
    if force:
        del pool
        later = kvswap.Pool(device, address, 8, block, name="later") if device.kind == "host" else None
        del view, host
        if later is not None:
            until(lambda: refused(own, later))


def refused(src: kvswap.Pool, dst: kvswap.Pool) -> bool:
    """Whether the pool's memory was freed."""
    try:
        kvswap.move_blocks(src, dst, [1], [2]).wait(PATIENCE)
    except kvswap.Error as error:
        return "lies in memory that has been freed" in str(error)
    return False


# -- by address -------------------------------------------------------------------------------------------------------


def test_alloc_and_free(device: kvswap.Device) -> None:
    ptr = memory.host_alloc(10000, device=device)
    gpu = Buffer(device, 10000)
    data = gpu.randomise(1)
    kvswap.swap_cache_per_layer(gpu.ptr, ptr, 10000, 1, 1, [0], [0], 0, device=device)
    assert ctypes.string_at(ptr, 10000) == data.tobytes()
    memory.host_free(ptr)
    with pytest.raises(ValueError, match="given back already"):
        memory.host_free(ptr)
    with pytest.raises(ValueError, match="does not come from host_alloc"):
        memory.host_free(gpu.ptr)
    with pytest.raises(ValueError, match="nbytes is 0"):
        memory.host_alloc(0, device=device)
    with pytest.raises(MemoryError):
        memory.host_alloc(1 << 60, device=device)


def test_an_address_is_kept_whose_free_times_out(device: kvswap.Device) -> None:
    """While others are allocated, however many there are: the list of them has room for it."""
    if device.kind != "host":
        pytest.skip("a GPU's driver may wait for its work before it allocates; the list is the same")
    ptrs = [memory.host_alloc(PAGE, device=device)]
    gpu, stream = Buffer(device, PAGE), kvswap.Stream(device)
    with Gate(device) as gate:
        gate.hold(stream)
        transfer = kvswap.swap_blocks_batch([gpu.ptr], [ptrs[0]], PAGE, stream=stream, device=device)
        for _ in range(36):
            other = threading.Timer(0.02, lambda: ptrs.append(memory.host_alloc(PAGE, device=device)))
            other.start()
            with pytest.raises(TimeoutError):
                memory.host_free(ptrs[0], timeout=0.06)
            other.join()
        gate.open()
        transfer.wait(PATIENCE)
    for ptr in ptrs:
        memory.host_free(ptr)


def test_register_piece_by_piece(device: kvswap.Device) -> None:
    """Copies across the seams of what was registered one by one."""
    room = mmap.mmap(-1, 16 * PAGE)
    array = np.frombuffer(room, np.uint8)
    ptr = array.ctypes.data
    for piece in range(4):
        memory.host_register(ptr + piece * 4 * PAGE, 4 * PAGE, device=device)
    with pytest.raises(ValueError, match="registered already"):
        memory.host_register(array, 16 * PAGE, device=device)
    gpu = Buffer(device, 16 * PAGE)
    data = gpu.randomise(1)
    kvswap.swap_cache_per_layer(gpu.ptr, ptr, 16 * PAGE, 1, 1, [0], [0], 0, device=device)
    np.testing.assert_array_equal(array, data)
    for piece in range(4):
        memory.host_unregister(ptr + piece * 4 * PAGE)
    with pytest.raises(ValueError, match=r"does not come from host_register\(\)"):
        memory.host_unregister(array)
    with pytest.raises(ValueError, match="tensor of"):
        memory.host_register(array, 17 * PAGE, device=device)


def test_memlock_is_named(device_name: str) -> None:
    """Where the driver refuses and a limit on locked memory is a likely reason, the notice says what to change."""
    if os.geteuid() != 0:
        pytest.skip("gives up root's right to lock what it likes")
    run = run_python(
        """
        import ctypes, resource, sys, kvswap
        from kvswap import _testing, testing  # imported first: user 65534 may not be able to read the package
        from kvswap.memory import HostPool
        device = kvswap.Device(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        import os
        os.setuid(65534)
        with testing.fault(device, "call", "fail", operation="host_register"):
            print("\\n".join(HostPool(4, 1 << 20, device=device).notices))
        """,
        device_name,
    )
    assert "RLIMIT_MEMLOCK allows 64.0 KiB" in run.stdout and "ulimit -l unlimited" in run.stdout, run.stderr


def test_limits_do_not_depend_on_the_soft_limit_of_open_files(device: kvswap.Device) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 1, hard))
    try:
        HostPool(4, 4096, device=device, numa="interleave").close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_random_bytes_survive_neighbours(device: kvswap.Device) -> None:
    """Two pools side by side: what is written to one is not seen in the other."""
    first, second = HostPool(32, 4096, device=device), HostPool(32, 4096, device=device)
    one, two = random_bytes(1, first.nbytes), random_bytes(2, second.nbytes)
    np.asarray(first)[:], np.asarray(second)[:] = one, two
    assert (np.asarray(first) == one).all() and (np.asarray(second) == two).all()
    gc.collect()
    first.close()
    assert (np.asarray(second) == two).all()
    gc.collect()
    second.close()


def test_a_close_waits_for_a_thread_that_releases_the_views(device: kvswap.Device) -> None:
    """A transfer holds views until some thread releases them. While another thread is at that, a close waits for it."""
    released, go = threading.Event(), threading.Event()

    class Slow(np.ndarray[Any, Any]):
        armed = False

        def __del__(self) -> None:
            if self.armed:
                released.set()
                go.wait(PATIENCE)

    pool = HostPool(8, 4096, device=device)
    other = np.zeros((8, 4096), np.uint8).view(Slow)
    transfer = kvswap.swap_blocks_batch([pool.layer(0)], [other], 4096, device=device)  # the last one is released first
    other.armed = True
    del other
    collector = threading.Thread(target=transfer.wait, args=[PATIENCE])
    collector.start()
    try:
        assert released.wait(PATIENCE)
        with pytest.raises(TimeoutError, match="release"):
            pool.close(timeout=0.2)
    finally:
        go.set()
    pool.close(timeout=PATIENCE)
    collector.join(PATIENCE)
