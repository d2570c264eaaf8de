"""kvswap.metrics: the numbers are exactly what was moved, and reading them changes nothing."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import gc
import json
import logging
import re
import shutil
import subprocess
import sys
import threading
import time
import types
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from conftest import AT_ONCE, PATIENCE, ROOT, Cache, Gate, run_python

import kvswap
from kvswap import _C, files, memory, metrics, testing, tracing
from kvswap._families import families
from kvswap.typing import ForcedPath

DEVICE = "host:81"  # this file's own
TIMES, SIZES = metrics.bounds()
PATHS = [
    path for path in get_args(ForcedPath) if path not in ("strided", "borrow")
]  # one run of blocks is dma's; no lender


@pytest.fixture
def own() -> kvswap.Device:
    return kvswap.Device(DEVICE)


def device_row(name: str = DEVICE) -> metrics.DeviceMetrics:
    found = [row for row in metrics.snapshot()["devices"] if row["device"] == name]
    assert len(found) == 1
    return found[0]


def path_row(direction: str, path: str, name: str = DEVICE) -> Any:
    """Zeros where there was no transfer."""
    zeros = {"buckets": [0] * (len(TIMES) + 1), "sum": 0}
    empty: Any = {"blocks": 0, "link_bytes": 0, "device_seconds": 0.0, "failed": {}, "failed_blocks": 0}
    empty |= {"duration": zeros, "queue": zeros, "size": zeros}
    rows = [row for row in device_row(name)["paths"] if (row["direction"], row["path"]) == (direction, path)]
    return rows[0] if rows else empty


def count(histogram: Any) -> int:
    return sum(histogram["buckets"])


def bucket_of(value: float, bounds: tuple[float, ...]) -> int:
    """By the definition: the first bound that the value does not exceed."""
    return next((i for i, bound in enumerate(bounds) if value <= bound), len(bounds))


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_bounds_rise_and_are_round() -> None:
    assert len(TIMES) == len(SIZES) == 20
    assert all(low < high for bounds in (TIMES, SIZES) for low, high in pairwise(bounds))
    assert TIMES[:4] == (1e-05, 2e-05, 5e-05, 1e-04) and TIMES[-3:] == (5.0, 10.0, 20.0)
    assert tuple(1 << n for n in range(12, 32)) == SIZES


# -- transfers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("direction", [0, 1], ids=["d2h", "h2d"])
def test_what_was_moved_is_what_is_counted(own: kvswap.Device, path: str, direction: int) -> None:
    name = ("d2h", "h2d")[direction]
    cache = Cache(own, 64, 1024, direction)
    before, submitted = path_row(name, path), device_row()["submitted"]
    sizes = [1, 4, 5, 64]  # blocks: 1 KiB, 4 KiB, just above, 64 KiB
    transfers = [cache.swap(range(n), range(n), path=path) for n in sizes]
    for transfer in transfers:
        transfer.wait(PATIENCE)
        assert transfer.path == path
    after = path_row(name, path)
    assert device_row()["submitted"] - submitted == len(sizes)
    assert after["blocks"] - before["blocks"] == sum(sizes)
    assert after["size"]["sum"] - before["size"]["sum"] == 1024 * sum(sizes) == sum(each.nbytes for each in transfers)
    assert after["link_bytes"] - before["link_bytes"] == 1024 * sum(sizes)
    grown = [new - old for new, old in zip(after["size"]["buckets"], before["size"]["buckets"], strict=True)]
    assert grown == [sum(bucket_of(1024 * n, SIZES) == i for n in sizes) for i in range(len(SIZES) + 1)]
    assert count(after["duration"]) - count(before["duration"]) == len(sizes)
    assert count(after["queue"]) - count(before["queue"]) == len(sizes)
    seconds = after["duration"]["sum"] - before["duration"]["sum"]
    assert seconds == pytest.approx(sum(each.duration for each in transfers), rel=1e-6)
    elapsed = sum(each.elapsed for each in transfers)
    assert after["device_seconds"] - before["device_seconds"] == pytest.approx(elapsed, rel=1e-6)
    queued = sum(max(0.0, each.duration - each.elapsed) for each in transfers)
    assert after["queue"]["sum"] - before["queue"]["sum"] == pytest.approx(queued, rel=1e-6)


def test_the_same_as_stats(own: kvswap.Device) -> None:
    cache = Cache(own, 8, 512)
    cache.swap([1, 2], [3, 4]).wait(PATIENCE)
    stats, rows = own.stats(), device_row()["paths"]
    for row in rows:
        if count(row["size"]):
            known = stats["paths"][row["direction"]][row["path"]]
            assert (known["transfers"], known["bytes"], known["blocks"]) == (
                count(row["size"]),
                row["size"]["sum"],
                row["blocks"],
            )
    assert sum(count(row["size"]) for row in rows) == stats["done"]
    assert sum(sum(row["failed"].values()) for row in rows) == stats["failed"]


def test_the_duration_is_from_the_call_to_the_end(own: kvswap.Device) -> None:
    cache = Cache(own, 8, 512)
    stream = kvswap.Stream(own)
    before = path_row("d2h", "direct")
    with Gate(own) as gate:
        gate.hold(stream)
        transfer = cache.swap([1], [2], stream=stream, path="direct")
        assert transfer.duration is None and path_row("d2h", "direct") == before
        threading.Event().wait(0.3)
    transfer.wait(PATIENCE)
    after = path_row("d2h", "direct")
    assert transfer.duration >= 0.3
    assert after["duration"]["sum"] - before["duration"]["sum"] == pytest.approx(transfer.duration, rel=1e-6)
    # It waited for the gate before it was on the device.
    assert after["queue"]["sum"] - before["queue"]["sum"] >= 0.29
    first = bucket_of(0.2, TIMES)
    assert sum(after["duration"]["buckets"][first:]) == sum(before["duration"]["buckets"][first:]) + 1


def lanes_of(direction: str, priority: str) -> metrics.LaneMetrics:
    found = [row for row in device_row()["lanes"] if (row["direction"], row["priority"]) == (direction, priority)]
    assert len(found) == 1
    return found[0]


def test_queues_are_shown_as_they_are(own: kvswap.Device) -> None:
    cache = Cache(own, 32, 512, 1)
    one, other = kvswap.Stream(own), kvswap.Stream(own)
    with Gate(own) as gate:
        gate.hold(one)
        gate.hold(other)
        held = [cache.swap([i], [i], stream=one, priority="high") for i in range(3)]
        held += [cache.swap([8, 9], [8, 9], stream=other, priority="high")]
        row = lanes_of("h2d", "high")
        assert (row["unfinished"], row["bytes"], row["fullest"]) == (4, 5 * 512, 3)
        assert row["limit"] == 128 and row["lanes"] >= 2
        threading.Event().wait(0.05)
        again = lanes_of("h2d", "high")
        assert 0 < row["oldest_seconds"] < again["oldest_seconds"] and again["oldest_seconds"] >= 0.05
    for transfer in held:
        transfer.wait(PATIENCE)
    row = lanes_of("h2d", "high")
    assert (row["unfinished"], row["bytes"], row["fullest"], row["oldest_seconds"]) == (0, 0, 0, 0.0)


def test_a_scrape_sees_what_has_ended_unasked(own: kvswap.Device) -> None:
    """Reading the counters polls the transfer; no other call does."""
    cache = Cache(own, 8, 512)
    before = count(path_row("d2h", "direct")["size"])
    transfer = cache.swap([1], [2], path="direct")
    own.synchronize(PATIENCE)
    deadline = threading.Event()
    for _ in range(600):
        if count(path_row("d2h", "direct")["size"]) == before + 1:
            break
        deadline.wait(0.1)
    assert count(path_row("d2h", "direct")["size"]) == before + 1
    del transfer


# -- failures ---------------------------------------------------------------------------------------------------------


def test_failures_by_kind_and_their_blocks(own: kvswap.Device) -> None:
    cache = Cache(own, 64, 4096)
    before = path_row("d2h", "dma")
    ids = np.arange(0, 20, 2)  # apart, so that each block is a copy
    with testing.fault(own, "copy", "fail", nth=3, code=700):
        transfer = cache.swap(ids, ids, path="dma")
        with pytest.raises(kvswap.DeviceError):
            transfer.wait(PATIENCE)
    after = path_row("d2h", "dma")
    lost = len(transfer.failed_positions)
    assert lost >= 1
    assert after["failed"].get("refused", 0) - before["failed"].get("refused", 0) == 1
    assert after["failed_blocks"] - before["failed_blocks"] == lost
    assert count(after["size"]) == count(before["size"]) and after["size"]["sum"] == before["size"]["sum"]


def test_a_full_queue_is_counted(own: kvswap.Device) -> None:
    cache = Cache(own, 8, 512)
    stream = kvswap.Stream(own)
    before = device_row()["refused_full"]
    with Gate(own) as gate:
        gate.hold(stream)
        held = []
        with pytest.raises(kvswap.QueueFull):
            for _ in range(1000):
                held.append(cache.swap([1], [2], stream=stream, priority="background"))
        assert device_row()["refused_full"] == before + 1
        row = lanes_of("d2h", "background")
        assert row["fullest"] == row["limit"] == len(held)
    for transfer in held:
        transfer.wait(PATIENCE)


LOST = """
    import numpy as np, kvswap
    from kvswap import metrics, testing

    device = kvswap.Device("host:82")
    a, b = np.zeros(8192, np.uint8), np.zeros(8192, np.uint8)
    ids = np.arange(2)
    testing.fault
    with testing.fault(device, "call", "lose", operation="event_query"):
        transfer = kvswap.swap_cache_per_layer_async(a, b, 4096, 2, 2, ids, ids, 0, device=device)
        try:
            transfer.wait(60)
        except kvswap.DeviceError:
            pass
    (row,) = metrics.snapshot()["devices"]
    assert row["lost"], row
    (path,) = row["paths"]
    assert path["failed"] == {"lost": 1} and path["failed_blocks"] == 2 and sum(path["size"]["buckets"]) == 0, path
    assert all(lane["unfinished"] == 0 for lane in row["lanes"])
"""


def test_a_lost_device() -> None:
    run = run_python(LOST)
    assert run.returncode == 0, run.stderr


# -- files, pools, handlers -------------------------------------------------------------------------------------------


def store_row(folder: Path) -> metrics.FileMetrics:
    found = [row for row in metrics.snapshot()["files"] if row["directory"] == str(folder)]
    assert len(found) == 1
    return found[0]


def operation(row: metrics.FileMetrics, name: str) -> metrics.FileOperation:
    return next(each for each in row["operations"] if each["operation"] == name)


def test_files_exactly(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    blocks = [np.full(5000, i, np.uint8) for i in range(4)]
    keys = [b"a", b"b", b"c", b"d"]
    with files.FileStore(folder, files.Layout(5000), capacity=1 << 20) as store:
        store.store(keys, blocks).wait(PATIENCE)
        store.store(keys[:1], blocks[:1], replace=False).wait(PATIENCE)  # kept
        store.load(keys[:3], blocks[:3]).wait(PATIENCE)
        missing = store.load([b"a", b"none"], blocks[:2])
        with pytest.raises(kvswap.Error):
            missing.wait(PATIENCE)
        store.delete(keys[:1]).wait(PATIENCE)
        row = store_row(folder)
        stats = store.stats()
    known = ("blocks", "stored", "kept", "loaded", "deleted", "evicted", "pinned", "lost_slots", "refused_full")
    for name in known:
        assert row[name] == stats[name], name
    assert (row["stored"], row["kept"], row["loaded"], row["deleted"], row["block_bytes"]) == (4, 1, 4, 1, 5000)
    stores, loads, deletes = (operation(row, name) for name in ("store", "load", "delete"))
    assert count(stores["size"]) == 2 and stores["size"]["sum"] == 20000
    assert stores["size"]["buckets"][0] == 1  # the one that was kept moved nothing
    assert count(loads["size"]) == 1 and loads["size"]["sum"] == 15000
    assert loads["failed"] == 1 and loads["failed_blocks"] == {"missing": 1}
    assert count(deletes["size"]) == 1 and deletes["size"]["sum"] == 0
    assert count(loads["duration"]) == 1 and loads["duration"]["sum"] > 0
    assert row["unfinished_loads"] == row["unfinished_stores"] == 0 and row["oldest_seconds"] == 0.0
    assert str(folder) not in [each["directory"] for each in metrics.snapshot()["files"]]  # closed


def test_two_stores_on_one_directory_are_one_series(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    block = np.zeros(4096, np.uint8)
    with files.FileStore(folder, files.Layout(4096), capacity=1 << 20) as store:
        store.store([b"a"], [block]).wait(PATIENCE)
        with files.FileStore(folder, files.Layout(4096), capacity=1 << 20, readonly=True) as reader:
            reader.load([b"a"], [block]).wait(PATIENCE)
            made = {family.name: family for family in families(metrics.snapshot(rank=5))}
    where = str(folder)
    assert made["kvswap_file_stored_blocks"].samples["5", where] == 1  # the same block
    assert made["kvswap_file_bytes"].samples["5", where, "store"] == 4096
    assert made["kvswap_file_bytes"].samples["5", where, "load"] == 4096
    assert count(made["kvswap_file_size_bytes"].samples["5", where, "load"]) == 1


def test_host_pools_come_and_go(own: kvswap.Device) -> None:
    def mine() -> list[metrics.HostPoolMetrics]:
        return [row for row in metrics.snapshot()["host_pools"] if row["device"] == DEVICE]

    assert mine() == []
    with memory.HostPool(16, 8192, device=own):
        (row,) = mine()
        assert (row["blocks"], row["bytes"], row["state"], row["shared"]) == (16, 16 * 8192, "ready", False)
        assert row["pinned"] and row["populated_bytes"] >= row["bytes"]
    assert mine() == []


def test_memory_and_pools_of_a_device(own: kvswap.Device) -> None:
    own.stats()  # releases what transfers of other tests held
    gc.collect()
    before = device_row()
    held, host = own.alloc(1 << 16), own.alloc(1 << 12, host=True)
    array = np.zeros(1 << 20, np.uint8)
    own.register(array)
    pool = kvswap.Pool(own, held, 16, 4096)
    now = device_row()
    assert now["allocated_bytes"] + now["allocated_host_bytes"] - before["allocated_bytes"] - before[
        "allocated_host_bytes"
    ] >= (1 << 16) + (1 << 12)
    assert now["registered_bytes"] - before["registered_bytes"] == 1 << 20
    assert (now["pools"] - before["pools"], now["pool_blocks"] - before["pool_blocks"]) == (1, 16)
    del pool
    own.unregister(array)
    held.free(), host.free()
    after = device_row()
    assert after["registered_bytes"] == before["registered_bytes"] and after["pools"] == before["pools"]


def test_handlers_count_their_jobs() -> None:
    from kvswap import offload
    from kvswap.offload import _counts

    gpu, cpu = np.zeros((16, 512), np.uint8), np.zeros((16, 512), np.uint8)
    refs = [[offload.CanonicalKVCacheRef(0, 512)]]
    store = offload.SingleDirectionOffloadingHandler([gpu], [cpu], 1, refs, True, device=DEVICE)

    def row() -> Any:
        return next(each for each in _counts.rows() if (each["device"], each["direction"]) == (DEVICE, "d2h"))

    before = row()
    assert before["handlers"] == 1
    one = offload.GPULoadStoreSpec(np.arange(3), group_sizes=[3], block_indices=[0])
    assert store.transfer_async(1, (one, offload.CPULoadStoreSpec(np.arange(3))))
    assert row()["unfinished"] == 1
    store.wait([1], PATIENCE)
    (result,) = store.get_finished()
    after = row()
    assert after["bytes"] - before["bytes"] == 3 * 512 == result.transfer_size
    assert count(after["duration"]) - count(before["duration"]) == 1 and after["unfinished"] == 0
    assert after["failed"] == before["failed"]
    store.shutdown(PATIENCE)
    gone = row()
    assert gone["handlers"] == 0 and gone["bytes"] == after["bytes"]  # counters outlive the handler


# -- threads, fork ----------------------------------------------------------------------------------------------------


def test_others_open_and_close_meanwhile(own: kvswap.Device, tmp_path: Path) -> None:
    """Counters never fall, and nothing raises, while threads move blocks, open and close."""
    stop, wrong = threading.Event(), []

    def work(task: Any, number: int) -> None:
        turn = 0
        try:
            while not stop.is_set():
                task(number, turn := turn + 1)
        except Exception as error:
            wrong.append(error)
            raise

    def move(number: int, turn: int) -> None:
        caches[number].swap([turn % 8], [turn % 8]).wait(PATIENCE)
        moved[number] += 1

    def open_files(number: int, turn: int) -> None:
        folder = tmp_path / f"{number}"
        block = np.zeros(4096, np.uint8)
        with files.FileStore(folder, files.Layout(4096), capacity=1 << 20) as store:
            store.store([b"%d" % (turn % 8)], [block]).wait(PATIENCE)

    def open_pools(number: int, turn: int) -> None:
        with memory.HostPool(4, 4096, device=own):
            pass

    caches, moved = [Cache(own, 8, 512) for _ in range(2)], [0, 0]
    before = sum(count(row["size"]) for row in device_row()["paths"])
    tasks = [(move, 0), (move, 1), (open_files, 2), (open_files, 3), (open_pools, 4)]
    threads = [threading.Thread(target=work, args=task) for task in tasks]
    for thread in threads:
        thread.start()
    seen = 0
    for _ in range(100):
        total = sum(count(row["size"]) for row in device_row()["paths"])
        assert total >= seen
        seen = total
        list(families(metrics.snapshot()))
    stop.set()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert wrong == []
    assert sum(count(row["size"]) for row in device_row()["paths"]) - before == sum(moved)


@pytest.mark.slow
def test_a_scrape_does_not_wait_for_a_lane(own: kvswap.Device) -> None:
    """Another thread holds the lane's lock while the driver does not answer."""
    cache = Cache(own, 8, 512)
    stream = kvswap.Stream(own)
    with Gate(own) as gate, testing.fault(own, "call", "delay", operation="event_query", delay=PATIENCE):
        gate.hold(stream)
        transfer = cache.swap([1], [2], stream=stream)
        poll = threading.Thread(target=transfer.done)
        poll.start()
        threading.Event().wait(0.5)
        begin = time.monotonic()
        metrics.snapshot()
        assert time.monotonic() - begin < AT_ONCE
    poll.join(PATIENCE)
    transfer.wait(PATIENCE)


def test_a_store_that_is_scraped_can_be_reopened_at_once(tmp_path: Path) -> None:
    """A scrape holds no reference: dropping a store's last handle closes it, also during a scrape."""
    stop = threading.Event()

    def scrape() -> None:
        while not stop.is_set():
            metrics.snapshot()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        for _ in range(100):
            store = files.FileStore(tmp_path / "store", files.Layout(4096), capacity=1 << 20)
            del store
    finally:
        stop.set()
        thread.join(PATIENCE)


LEAKS = """
    import gc, sys, tempfile
    import numpy as np, kvswap
    from kvswap import _C, files, memory, metrics, testing

    device = kvswap.Device("host:85")
    a, b, ids = np.zeros(8192, np.uint8), np.zeros(8192, np.uint8), np.arange(2)
    kvswap.swap_cache_per_layer(a, b, 4096, 2, 2, ids, ids, 0, device=device)
    store = files.FileStore(tempfile.mkdtemp(), files.Layout(4096), capacity=1 << 20)
    pool = memory.HostPool(4, 4096, device=device)
    _C._set_trace_hook(lambda what: lambda result, error: None)

    def use():
        for _ in range(500):
            metrics.snapshot(), metrics.bounds()
            kvswap.swap_cache_per_layer(a, b, 4096, 2, 2, ids, ids, 0, device=device)
        gc.collect()
        return sys.getallocatedblocks()

    use()
    before = use()
    after = use()
    assert after - before < 250, (before, after)  # a leak of one block a turn is 500
"""


def test_reading_and_tracing_leak_nothing() -> None:
    run = run_python(LEAKS)
    assert run.returncode == 0, run.stderr


FORK = """
    import json, os, sys, tempfile, warnings
    import numpy as np, kvswap
    from kvswap import files, memory, metrics, offload

    warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
    device = kvswap.Device("host:83")
    a, b, ids = np.zeros(8192, np.uint8), np.zeros(8192, np.uint8), np.arange(2)
    kvswap.swap_cache_per_layer(a, b, 4096, 2, 2, ids, ids, 0, device=device)
    store = files.FileStore(tempfile.mkdtemp(), files.Layout(4096), capacity=1 << 20)
    pool = memory.HostPool(4, 4096, device=device)
    refs = [[offload.CanonicalKVCacheRef(0, 512)]]
    gpu, cpu = np.zeros((4, 512), np.uint8), np.zeros((4, 512), np.uint8)
    handler = offload.SingleDirectionOffloadingHandler([gpu], [cpu], 1, refs, True, device=device)
    parent = metrics.snapshot()
    assert all(len(parent[part]) == 1 for part in ("devices", "files", "host_pools", "handlers")), parent
    child = os.fork()
    if child == 0:
        try:
            empty = metrics.snapshot()
            assert [empty[part] for part in ("devices", "files", "host_pools", "handlers")] == [[]] * 4, empty
            assert empty["pid"] == os.getpid() != parent["pid"]
            again = kvswap.Device("host:83")
            kvswap.swap_cache_per_layer(a, b, 4096, 2, 2, ids, ids, 0, device=again)
            (row,) = metrics.snapshot()["devices"]
            assert row["submitted"] == 1, row
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    (row,) = metrics.snapshot()["devices"]
    assert row["submitted"] == parent["devices"][0]["submitted"]
"""


def test_a_forked_child_counts_its_own() -> None:
    run = run_python(FORK)
    assert run.returncode == 0, run.stderr


# -- prometheus_client ------------------------------------------------------------------------------------------------


@pytest.fixture
def scrape() -> Iterator[Any]:
    prometheus = pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    registry = prometheus.CollectorRegistry()
    registry.register(metrics.Collector(rank=7))

    def read() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        text = prometheus.generate_latest(registry).decode()
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    return read


def test_the_collector_exports_the_snapshot(own: kvswap.Device, scrape: Any) -> None:
    cache = Cache(own, 64, 1024)
    cache.swap(range(5), range(5), path="direct").wait(PATIENCE)
    found, row = scrape(), path_row("d2h", "direct")
    labels = {"rank": "7", "device": DEVICE, "direction": "d2h", "path": "direct"}

    def value(name: str, **more: str) -> float:
        return found[f"kvswap_{name}", frozenset({**labels, **more}.items())]

    assert value("transfer_bytes_total") == value("transfer_size_bytes_sum") == row["size"]["sum"]
    assert value("transfer_duration_seconds_count") == value("transfer_size_bytes_count") == count(row["size"])
    assert value("transfer_duration_seconds_sum") == pytest.approx(row["duration"]["sum"])
    assert value("transfer_blocks_total") == row["blocks"]
    for i, bound in enumerate(TIMES):
        assert value("transfer_duration_seconds_bucket", le=str(bound)) == sum(row["duration"]["buckets"][: i + 1])
    assert value("transfer_duration_seconds_bucket", le="+Inf") == count(row["duration"])
    assert value("transfer_size_bytes_bucket", le="8192.0") == sum(row["size"]["buckets"][:2])


def test_what_is_described_is_what_is_collected() -> None:
    pytest.importorskip("prometheus_client")
    collector = metrics.Collector()
    described = {family.name: family.type for family in collector.describe()}
    assert described == {family.name: family.type for family in collector.collect()}
    assert all(family.samples == [] for family in collector.describe())
    assert len(described) > 40


def test_names_follow_the_conventions() -> None:
    for family in families(None):
        assert re.fullmatch(r"kvswap_[a-z][a-z_]*", family.name) and not family.name.endswith("_total"), family.name
        assert "last" not in family.name and family.help and not family.help.endswith("."), family.name
        if family.kind == "histogram":
            assert family.name.endswith("_seconds" if family.times else "_bytes"), family.name
        assert family.labels[0] == "rank"


def test_one_registry_takes_one_collector_beside_others() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry(auto_describe=True)
    registry.register(metrics.Collector())
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(metrics.Collector())
    prometheus.Counter("another", "Not ours", registry=registry)


def test_without_prometheus_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(kvswap.Error, match=r"pip install 'kvswap\[metrics\]'"):
        metrics.Collector()
    assert metrics.snapshot()["pid"] > 0  # the numbers are there all the same


def test_the_rank_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert metrics.snapshot()["rank"] == "" and metrics.snapshot(rank=0)["rank"] == "0"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert metrics.snapshot()["rank"] == "3"
    monkeypatch.setenv("RANK", "11")
    assert metrics.snapshot()["rank"] == "11"


def test_a_vllm_worker_serves_on_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client")
    from kvswap.vllm import _handler, _metrics

    assert _handler.port_of({}) is None and _handler.port_of({"kvswap_metrics_port": 9400}) == 9400
    with pytest.raises(ValueError, match=r"kvswap_metrics_port.* is '9400'"):
        _handler.port_of({"kvswap_metrics_port": "9400"})
    assert "metrics" not in " ".join(_handler.options_of({"kvswap_metrics_port": 9400}))
    monkeypatch.setattr(_metrics, "_server", None)
    server = _metrics.serve(0, 0)  # the system chooses
    try:
        assert _metrics.serve(0, 0) is server
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=PATIENCE) as answer:
            assert b'kvswap_info{rank="0"' in answer.read()
        monkeypatch.setattr(_metrics, "_server", None)
        assert _metrics.serve(server.server_port - 3, 3) is None  # in use: a warning, and the worker goes on
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("ranks", [range(2), range(2, 4)], ids=["dense", "experts"])
def test_the_number_of_a_vllm_worker(monkeypatch: pytest.MonkeyPatch, ranks: range) -> None:
    """Of the second of two data-parallel engines: torch counts its workers from 0, or from where the first one ends."""
    from kvswap.vllm import _metrics

    parallel = SimpleNamespace(data_parallel_index=1, world_size=2)
    spec = SimpleNamespace(config=SimpleNamespace(parallel=parallel))
    found = []
    for rank in ranks:
        distributed = SimpleNamespace(
            is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda rank=rank: rank
        )
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(distributed=distributed))
        found.append(_metrics.number_of(spec))
    assert found == [2, 3]


# -- what the documents and dashboards name ---------------------------------------------------------------------------

MONITORING = ROOT / "monitoring"


def exported() -> dict[str, tuple[str, set[str]]]:
    """Every name, as Prometheus shows it, with its kind and labels: kvswap.metrics' and the manager's."""
    from kvswap.fastdeploy.manager.metrics import DEFINITIONS

    known = {family.exported: (family.kind, set(family.labels)) for family in families(None)}
    known["kvswap_processes"] = ("gauge", {"state"})  # test_metrics_port.py
    for kind, name, _, labels in DEFINITIONS:
        known[name + ("_total" if kind == "counter" else "")] = (kind, {"rank", *labels})
    return known


def series(name: str, known: dict[str, tuple[str, set[str]]]) -> set[str] | None:
    """Labels of a name in a query; None: it is not exported."""
    if name in known and known[name][0] != "histogram":
        return known[name][1]
    for suffix in ("_bucket", "_sum", "_count"):
        base = name.removesuffix(suffix)
        if base != name and known.get(base, ("", set()))[0] == "histogram":
            return known[base][1] | ({"le"} if suffix == "_bucket" else set())
    return None


TARGET = {"job", "instance"}  # of Prometheus' own


def wrong_in(query: str, known: dict[str, tuple[str, set[str]]]) -> list[str]:
    """What a query names that is not exported."""
    wrong = []
    allowed = set(TARGET)
    for name, selector in re.findall(r"\b(kvswap_\w+)(?:\{([^}]*)\})?", query):
        labels = series(name, known)
        if labels is None:
            wrong.append(name)
            continue
        allowed |= labels
        wrong += [f"{name}: {label}" for label in re.findall(r"(\w+)\s*[=!]", selector) if label not in labels | TARGET]
    for clause in re.findall(r"\b(?:by|on|without|ignoring|group_left)\s*\(([^)]*)\)", query):
        wrong += [label.strip() for label in clause.split(",") if label.strip() and label.strip() not in allowed]
    return wrong


def test_a_wrong_query_is_noticed() -> None:
    known = exported()
    assert wrong_in('sum by (device, le) (rate(kvswap_transfer_duration_seconds_bucket{path="dma"}[5m]))', known) == []
    assert wrong_in("kvswap_transfer_bytes", known) == ["kvswap_transfer_bytes"]  # it has _total
    assert wrong_in('kvswap_device_lost{path="x"} == 1', known) == ["kvswap_device_lost: path"]
    assert wrong_in("sum by (colour) (kvswap_lanes)", known) == ["colour"]
    assert wrong_in("kvswap_transfer_duration_seconds", known) == ["kvswap_transfer_duration_seconds"]


def dashboard() -> Any:
    return json.loads((MONITORING / "grafana-dashboard.json").read_text())


def panels() -> list[Any]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def test_the_dashboard_names_what_is_exported() -> None:
    known = exported()
    queries = [target["expr"] for panel in panels() for target in panel["targets"]]
    queries += [each["query"]["query"] for each in dashboard()["templating"]["list"] if each["type"] == "query"]
    assert len(queries) > 20
    assert {query: wrong for query in queries if (wrong := wrong_in(query, known))} == {}
    legends = [target.get("legendFormat", "") for panel in panels() for target in panel["targets"]]
    labels = set().union(*(labels for _, labels in known.values())) | TARGET | {"le"}
    assert [label for legend in legends for label in re.findall(r"{{(\w+)}}", legend) if label not in labels] == []


def test_the_dashboard_is_as_grafana_wants_it() -> None:
    """Grafana's JSON model: what it needs to import a dashboard, panels in its grid of 24 columns, none on another."""
    board = dashboard()
    assert board["uid"] and board["title"] and board["schemaVersion"] >= 36 and "id" in board and board["id"] is None
    assert board["time"].keys() == {"from", "to"} and isinstance(board["templating"]["list"], list)
    names = {each["name"] for each in board["templating"]["list"]}
    assert names >= {"datasource", "device", "rank"}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["type"] in {"timeseries", "stat", "heatmap", "table", "bargauge"}, panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(set(refs)) == len(refs)
        for target in panel["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval", "__range"} <= names


def lost_in(written: Any, read: Any, place: str = "") -> list[str]:
    """Where a value was dropped or changed; more may have been added."""
    if isinstance(written, dict) and isinstance(read, dict):
        return [
            lost
            for key, value in written.items()
            for lost in ([f"{place}/{key}"] if key not in read else lost_in(value, read[key], f"{place}/{key}"))
        ]
    if isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        return [lost for i in range(len(read)) for lost in lost_in(written[i], read[i], f"{place}/{i}")]
    return [] if written == read else [place]


def test_grafanas_own_model_reads_the_dashboard() -> None:
    """It gives back what it read, but for four fields that it does not know. .ci/run installs it."""
    pytest.importorskip("grafana_foundation_sdk")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    board = dashboard()
    again = json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))
    unknown = {"/id", "/annotations/list/0/builtIn", *(f"/templating/list/{i}/definition" for i in (1, 2, 3))}
    assert set(lost_in(board, again)) - unknown == set()


def test_the_alerts_name_what_is_exported() -> None:
    known, text = exported(), (MONITORING / "alerts.yml").read_text()
    queries = re.findall(r"^ +expr: (.*)$", text, re.MULTILINE)
    alerts = re.findall(r"^ +- alert: (\w+)$", text, re.MULTILINE)
    assert len(queries) == len(alerts) == len(set(alerts)) > 5
    assert {query: wrong for query in queries if (wrong := wrong_in(query, known))} == {}
    guide = (ROOT / "docs" / "metrics.md").read_text()
    assert [alert for alert in alerts if f"`{alert}`" not in guide] == []


def test_prometheus_reads_the_alerts_and_the_metrics(own: kvswap.Device) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool (apt-get install prometheus): monitoring/try.sh runs this beside a real Prometheus")
    prometheus = pytest.importorskip("prometheus_client")
    rules = subprocess.run([promtool, "check", "rules", MONITORING / "alerts.yml"], capture_output=True, check=False)
    assert rules.returncode == 0, rules.stdout + rules.stderr
    registry = prometheus.CollectorRegistry()
    registry.register(metrics.Collector())
    text = prometheus.generate_latest(registry)
    run = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, check=False)
    assert run.returncode == 0 and not run.stderr, run.stderr


def test_the_guide_lists_every_metric_once() -> None:
    guide = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(kvswap_\w+)` \| (\w+) \| ([^|]*) \|", guide, re.MULTILINE)
    listed = {name: (kind, {"rank", *re.findall(r"`(\w+)`", labels)}) for name, kind, labels in rows}
    listed["kvswap_processes"][1].remove("rank")
    assert len(listed) == len(rows)
    assert listed == exported()


# -- tracing ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_tracing() -> Iterator[None]:
    yield
    tracing.nvtx(False)
    tracing.opentelemetry(on=False)


class Nvtx(types.ModuleType):
    """The package nvtx, as far as it is used."""

    def __init__(self) -> None:
        super().__init__("nvtx")
        self.__spec__ = types.SimpleNamespace(name="nvtx", loader=None)
        self.open: list[str] = []
        self.seen: list[str] = []

    def push_range(self, name: str) -> None:
        self.open.append(name)
        self.seen.append("/".join(self.open))

    def pop_range(self) -> None:
        self.open.pop()


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch, no_tracing: None) -> Nvtx:
    module = Nvtx()
    monkeypatch.setitem(sys.modules, "nvtx", module)
    monkeypatch.setattr(tracing, "_push_and_pop", lambda: (module.push_range, module.pop_range))
    return module


def test_a_range_round_every_submission(own: kvswap.Device, nvtx: Nvtx, tmp_path: Path) -> None:
    cache = Cache(own, 8, 512)
    pools = [kvswap.Pool(own, buffer.ptr, 8, 512) for buffer in (cache.gpu, cache.cpu)]
    one = (cache.gpu.ptr, cache.cpu.ptr, 512, 8, 8, [1], [1], 0)
    many = ([cache.gpu.ptr], [cache.cpu.ptr], 512, 8, 8, [1], [1], 0)
    with files.FileStore(tmp_path, files.Layout(512), capacity=1 << 20) as store:
        block = np.zeros(512, np.uint8)

        def run() -> None:
            kvswap.swap_blocks_batch([cache.gpu.ptr], [cache.cpu.ptr], 512, device=own).wait(PATIENCE)
            kvswap.swap_cache_per_layer(*one, device=own)
            kvswap.swap_cache_per_layer_async(*one, device=own).wait(PATIENCE)
            kvswap.swap_cache_all_layers(*many, device=own)
            kvswap.swap_cache_all_layers_async(*many, device=own).wait(PATIENCE)
            kvswap.move_blocks(pools[0], pools[1], [1], [2]).wait(PATIENCE)
            store.store([b"a"], [block]).wait(PATIENCE)
            store.load([b"a"], [block]).wait(PATIENCE)
            store.delete([b"a"]).wait(PATIENCE)

        run()
        assert nvtx.seen == []
        tracing.nvtx()
        run()
        with pytest.raises(IndexError):
            cache.swap([99], [1])
        assert nvtx.open == []  # closed also when the call raised
        names = ["swap_blocks_batch", "swap_cache_per_layer", "swap_cache_per_layer_async", "swap_cache_all_layers"]
        names += ["swap_cache_all_layers_async", "move_blocks", "FileStore.store", "FileStore.load", "FileStore.delete"]
        assert nvtx.seen == [f"kvswap.{name}" for name in [*names, "swap_cache_per_layer_async"]]
        tracing.nvtx(False)
        run()
        assert len(nvtx.seen) == len(names) + 1


def test_a_handlers_job_has_a_range_of_its_own(nvtx: Nvtx) -> None:
    from kvswap import offload

    gpu, cpu = np.zeros((16, 512), np.uint8), np.zeros((16, 512), np.uint8)
    refs = [[offload.CanonicalKVCacheRef(0, 512)]]
    store = offload.SingleDirectionOffloadingHandler([gpu], [cpu], 1, refs, True, device=DEVICE)
    tracing.nvtx()
    one = offload.GPULoadStoreSpec(np.arange(3), group_sizes=[3], block_indices=[0])
    store.transfer_async(5, (one, offload.CPULoadStoreSpec(np.arange(3))))
    store.shutdown(PATIENCE)
    assert nvtx.seen == ["kvswap store 5: 3 blocks", "kvswap store 5: 3 blocks/kvswap.OffloadMap.submit"]


def test_a_hook_that_raises_costs_no_transfer(own: kvswap.Device, no_tracing: None) -> None:
    cache = Cache(own, 8, 512)

    def raising(what: str) -> Any:
        raise RuntimeError(what)

    unraisable = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda args: unraisable.append(str(args.exc_value))
    _C._set_trace_hook(raising)
    try:
        cache.swap([1], [2]).wait(PATIENCE)
        _C._set_trace_hook(lambda what: raising)
        cache.swap([1], [2]).wait(PATIENCE)
    finally:
        sys.unraisablehook = hook
        _C._set_trace_hook(None)
    assert len(unraisable) == 2 and unraisable[0] == "swap_cache_per_layer_async"
    with pytest.raises(TypeError, match="hook must be callable or None"):
        _C._set_trace_hook(3)


def test_nvtx_by_the_environment(monkeypatch: pytest.MonkeyPatch, nvtx: Nvtx, own: kvswap.Device) -> None:
    for name in ("KVSWAP_NVTX", "NVTX_INJECTION64_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert not tracing.wanted_by_environment()
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/somewhere/libToolsInjection64.so")
    assert tracing.wanted_by_environment()
    monkeypatch.setenv("KVSWAP_NVTX", "0")
    assert not tracing.wanted_by_environment()
    monkeypatch.setenv("KVSWAP_NVTX", "1")
    tracing.start_from_environment()
    Cache(own, 8, 512).swap([1], [2]).wait(PATIENCE)
    assert nvtx.seen == ["kvswap.swap_cache_per_layer_async"] and nvtx.open == []


def test_a_warning_about_nvtx_keeps_no_object_of_the_caller(
    monkeypatch: pytest.MonkeyPatch, own: kvswap.Device, caplog: pytest.LogCaptureFixture
) -> None:
    """Log records may be kept. Through the frames of an error in one, a pool would stay, and another of the same memory
    would be refused."""
    monkeypatch.setattr(tracing, "_push_and_pop", lambda: None)
    monkeypatch.setenv("KVSWAP_NVTX", "1")
    tracing.start_from_environment()

    buffer = own.alloc(2048)

    def move() -> None:
        pools = [kvswap.Pool(own, buffer.ptr + 1024 * i, 2, 512) for i in range(2)]
        kvswap.move_blocks(*pools, [0], [1]).wait(PATIENCE)

    with caplog.at_level(logging.WARNING, "kvswap.tracing"):
        move()
        move()  # no pool of the first call is left
    assert "no NVTX ranges" in caplog.text


def test_ranges_that_only_a_tool_would_see_are_not_warned_of(
    monkeypatch: pytest.MonkeyPatch, own: kvswap.Device, caplog: pytest.LogCaptureFixture
) -> None:
    """compute-sanitizer sets the variable, too."""
    monkeypatch.setattr(tracing, "_push_and_pop", lambda: None)
    monkeypatch.delenv("KVSWAP_NVTX", raising=False)
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/somewhere/libsanitizer-collection.so")
    tracing.start_from_environment()
    with caplog.at_level(logging.INFO, "kvswap.tracing"):
        Cache(own, 8, 512).swap([1], [2]).wait(PATIENCE)
    (record,) = [record for record in caplog.records if "no NVTX ranges" in record.message]
    assert record.levelno == logging.INFO


class Span:
    """As much of OpenTelemetry's as is used."""

    def __init__(self, name: str, start_time: int) -> None:
        self.name, self.began, self.ended = name, start_time, None
        self.attributes: dict[str, Any] = {}
        self.status: tuple[Any, ...] = ()

    def set_attribute(self, name: str, value: Any) -> None:
        self.attributes[name] = value

    def set_status(self, *status: Any) -> None:
        self.status = status

    def record_exception(self, error: Exception) -> None:
        self.error = error

    def end(self, end_time: int | None = None) -> None:
        assert self.ended is None
        self.ended = end_time or 0


class Tracer:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def start_span(self, name: str, start_time: int) -> Span:
        self.spans.append(Span(name, start_time))
        return self.spans[-1]


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch, no_tracing: None) -> Tracer:
    api: Any = types.ModuleType("opentelemetry.trace")
    api.StatusCode = types.SimpleNamespace(ERROR="error")
    monkeypatch.setitem(sys.modules, "opentelemetry", types.ModuleType("opentelemetry"))
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", api)
    made = Tracer()
    tracing.opentelemetry(made)
    return made


def test_a_span_lasts_as_long_as_its_transfer(own: kvswap.Device, tracer: Tracer) -> None:
    cache = Cache(own, 8, 512)
    stream = kvswap.Stream(own)
    with Gate(own) as gate:
        gate.hold(stream)
        transfer = cache.swap([1, 2], [3, 4], stream=stream)
        tracing.flush()
        (span,) = tracer.spans
        assert span.ended is None
    transfer.wait(PATIENCE)
    tracing.flush()
    assert span.name == "kvswap.swap_cache_per_layer_async"
    assert span.ended - span.began == int(transfer.duration * 1e9)
    assert span.attributes["kvswap.bytes"] == 1024 and span.attributes["kvswap.blocks"] == 2
    assert span.attributes["kvswap.device"] == DEVICE and span.attributes["kvswap.path"] == transfer.path
    assert span.status == ()


def test_spans_of_files_and_of_jobs(tracer: Tracer, tmp_path: Path) -> None:
    from kvswap import offload

    gpu, cpu = np.zeros((16, 512), np.uint8), np.zeros((16, 512), np.uint8)
    refs = [[offload.CanonicalKVCacheRef(0, 512)]]
    store = offload.SingleDirectionOffloadingHandler([gpu], [cpu], 1, refs, True, device=DEVICE)
    one = offload.GPULoadStoreSpec(np.arange(3), group_sizes=[3], block_indices=[0])
    store.transfer_async(5, (one, offload.CPULoadStoreSpec(np.arange(3))))
    store.shutdown(PATIENCE)
    with files.FileStore(tmp_path, files.Layout(512), capacity=1 << 20) as tier:
        transfer = tier.store([b"a", b"b"], [gpu[0], gpu[1]])
        transfer.wait(PATIENCE)
    tracing.flush()
    job, stored = tracer.spans
    assert job.name == "kvswap.OffloadMap.submit" and job.attributes["kvswap.bytes"] == 3 * 512
    assert stored.name == "kvswap.FileStore.store" and stored.attributes["kvswap.blocks"] == 2
    assert stored.ended - stored.began == int(transfer.elapsed * 1e9) and job.ended > job.began


def test_a_span_of_a_failure(own: kvswap.Device, tracer: Tracer) -> None:
    cache = Cache(own, 64, 4096)
    ids = np.arange(0, 20, 2)
    with testing.fault(own, "copy", "fail", nth=3):
        failed = cache.swap(ids, ids, path="dma")
        with pytest.raises(kvswap.DeviceError):
            failed.wait(PATIENCE)
    with pytest.raises(IndexError):
        cache.swap([99], [1])
    tracing.flush()
    one, refused = tracer.spans
    assert one.status[0] == "error" and isinstance(one.error, kvswap.DeviceError) and one.ended is not None
    assert refused.status == ("error", "IndexError") and refused.ended is not None


def test_a_tracer_that_raises_costs_neither_the_range_nor_the_transfer(
    own: kvswap.Device, nvtx: Nvtx, tracer: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(name: str, start_time: int) -> Span:
        raise RuntimeError("no spans today")

    tracing.nvtx(True)
    monkeypatch.setattr(tracer, "start_span", fails)
    Cache(own, 8, 512).swap([1], [2]).wait(PATIENCE)
    assert nvtx.seen and nvtx.open == []


def test_spans_of_running_transfers_end_when_tracing_is_off(own: kvswap.Device, tracer: Tracer) -> None:
    cache, stream = Cache(own, 8, 512), kvswap.Stream(own)
    with Gate(own) as gate:
        gate.hold(stream)
        transfer = cache.swap([1], [2], stream=stream)
        tracing.opentelemetry(on=False)
        assert tracer.spans[0].ended is not None
    transfer.wait(PATIENCE)


def test_ctrl_c_in_a_hook_is_not_lost() -> None:
    script = """
    import signal
    import numpy as np
    import kvswap
    from kvswap import _C
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where these tests run
    def hook(what):
        raise KeyboardInterrupt
    gpu, cpu = np.ones(512, np.uint8), np.zeros(512, np.uint8)
    _C._set_trace_hook(hook)
    try:
        kvswap.swap_cache_per_layer(gpu, cpu, 512, 1, 1, [0], [0], 0, device="host:0")
        for _ in range(1000):  # it comes at the next look for signals
            pass
    except KeyboardInterrupt:
        print("interrupted")
    """
    done = run_python(script)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


def test_without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(kvswap.Error, match="pip install opentelemetry-api"):
        tracing.opentelemetry()


# -- the example ------------------------------------------------------------------------------------------------------


def test_the_example_runs() -> None:
    pytest.importorskip("prometheus_client")
    run = run_python(f"import runpy; runpy.run_path({str(ROOT / 'examples' / 'metrics.py')!r}, run_name='__main__')")
    assert run.returncode == 0, run.stderr
    assert "kvswap_transfer_bytes_total" in run.stdout
