"""A leak test for everything public. One table: a row a public name, holding what is done over and over, with its
errors. A public name without a row fails, and so does a row without a name.

What is done is first done some times (caches fill), then often, several times over: what grows with the number of
times, each time, is a leak; what does not is noise.
"""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, SANITIZED, Cache, bindings
from test_bindings import Dlpack, Interface, Torchlike

import kvswap
from kvswap import _C, testing
from kvswap.files import FileStore, Layout, MissingKey
from kvswap.memory import HostPool

WRONG = (ValueError, IndexError, TypeError, MemoryError, kvswap.Error, AttributeError, BufferError, TimeoutError)
TIMES = 200
Rows = dict[str, Callable[["Tools"], Any]]


class Tools:
    """What the rows work with, made once."""

    def __init__(self, device: kvswap.Device) -> None:
        self.device = device
        self.cache, self.made = Cache(device, 64, 64), 0
        self.stream, self.event, self.other = kvswap.Stream(device), kvswap.Event(device), kvswap.Event(device)
        self.ended = self.cache.swap([0], [1])
        self.ended.wait(PATIENCE)
        for event in (self.event, self.other):
            event.record(self.stream)
        device.synchronize(PATIENCE)
        with testing.fault(device, "copy", "fail"):
            self.failed = self.cache.swap([0], [1])
        with suppress(kvswap.DeviceError):
            self.failed.wait(PATIENCE)
        self.ids, self.back = np.arange(0, 40, 2), np.arange(0, 40, 2)[::-1].copy()
        self.array = np.zeros(8192, np.uint8)
        self.memory = device.alloc(256, host=True)
        self.pools = [kvswap.Pool(device, side.memory, 64, 64) for side in (self.cache.gpu, self.cache.cpu)]
        self.arguments: tuple[Any, ...] = (self.cache.gpu.memory, self.cache.cpu.memory, 64, 64, 64)

    def swap(self, name: str) -> None:
        """Right, through every path, with wrong ids, wrong lengths, a wrong stream, refused copies, a failed call."""
        many = "all_layers" in name
        call = getattr(kvswap, name)
        tensors = [[value] for value in self.arguments[:2]] if many else list(self.arguments[:2])
        arguments = [*tensors, *self.arguments[2:]]
        for path in ("auto", "dma", "kernel"):
            self.finish(call, *arguments, self.ids, self.back, 0, path=path)
        self.finish(
            call, *arguments, [1, 2, 3], [4, 5, 6], 1, stream=self.stream, after=[self.event, self.ended, self.stream]
        )
        self.finish(call, *arguments, [1, 99], [2, 3], 0)
        self.finish(call, *arguments, [1], [2, 3], 0)
        self.finish(call, *arguments, ["x"], [2], 0)
        self.finish(call, *arguments, [1], [2], 5)
        self.finish(call, *arguments, [1], [2], 0, stream="x")
        self.finish(call, *arguments, [1], [2], 0, after=[self.event, None])
        self.finish(call, *arguments, [1, 1], [2, 2], 0)
        with testing.fault(self.device, "copy", "fail", every=2):
            self.finish(call, *arguments, self.ids, self.back, 0)
        with testing.fault(self.device, "call", "fail", nth=3, every=3):
            self.finish(call, *arguments, self.ids, self.back, 0)
        self.device.synchronize(PATIENCE)

    def copy_blocks(self) -> None:
        cache, pool = np.zeros((8, 2, 64), np.uint8), np.zeros((8, 64), np.uint8)
        for src, dst in ((cache[:, 1], pool), (pool, cache[:, 0]), ([pool, pool], [pool.copy(), cache[:, 1]])):
            self.finish(kvswap.copy_blocks, src, dst, [1, 2, 3], [4, 5, 6])
            self.finish(kvswap.copy_blocks, src, dst, [1, 99], [2, 3], stream=self.stream)
        for wrong in (pool[:, :2], pool[0], cache, 7, None, [pool]):
            self.finish(kvswap.copy_blocks, wrong, [cache[:, 0], pool], [1], [2])
        self.device.synchronize(PATIENCE)

    def finish(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        with suppress(*WRONG):
            transfer = call(*arguments, device=self.device, **options)
            if transfer is not None:
                transfer.wait(PATIENCE)

    def batch(self) -> None:
        gpu, cpu = self.cache.gpu.ptr, self.cache.cpu.ptr
        self.finish(kvswap.swap_blocks_batch, gpu + self.ids * 64, cpu + self.back * 64, 64)
        self.finish(kvswap.swap_blocks_batch, [self.cache.gpu.memory], [self.memory, self.memory], 64)
        self.finish(kvswap.swap_blocks_batch, [self.cache.gpu.memory], [self.memory], np.array([64]))
        self.finish(kvswap.swap_blocks_batch, [self.cache.gpu.memory], [self.memory], 1 << 30)
        self.finish(kvswap.swap_blocks_batch, [gpu], [0x10], 64)
        self.finish(kvswap.swap_blocks_batch, [gpu, None], [cpu, cpu], 64)

    def wrong(self, call: Callable[[], Any]) -> None:
        with suppress(*WRONG):
            call()

    def fresh(self) -> kvswap.Transfer:
        """A transfer that may still run; now and then all are waited for, since a lane holds so many and no more."""
        self.made += 1
        if self.made % 50 == 0:
            self.device.synchronize(PATIENCE)
        return self.cache.swap([3], [4])

    def alloc(self) -> None:
        for host in (False, True):
            memory = self.device.alloc(1000, host=host)
            self.wrong(lambda: memoryview(memory))  # noqa: B023
            memory.free()
            self.wrong(memory.free)
            self.wrong(lambda: memory.ptr)  # noqa: B023
        self.device.alloc(100)
        self.wrong(lambda: self.device.alloc(0))
        self.wrong(lambda: self.device.alloc(1 << 60))

    def register(self) -> None:
        self.device.register(self.array)
        self.wrong(lambda: self.device.register(self.array))
        self.device.unregister(self.array)
        self.wrong(lambda: self.device.unregister(self.array))


def streams(t: Tools) -> None:
    kvswap.Stream(t.device, priority="high")
    t.wrong(lambda: kvswap.Stream(t.device, priority="none"))
    t.wrong(lambda: kvswap.Stream(5))
    with testing.fault(t.device, "call", "fail", operation="stream_create"):
        t.wrong(lambda: kvswap.Stream(t.device))


def events(t: Tools) -> None:
    event = kvswap.Event(t.device, timing=False)
    event.record(t.stream)
    t.wrong(lambda: kvswap.Event("x:0"))
    with testing.fault(t.device, "call", "fail", operation="event_create"):
        t.wrong(lambda: kvswap.Event(t.device))


def pools(t: Tools) -> None:
    room = np.zeros(4096, np.uint8)
    first = kvswap.Pool(t.device, room[:256], 4, 64, name="leak")
    kvswap.Pool(t.device, room[1024:], 4, 64, rows=2, pitch=256, stride=32, group=first)
    t.wrong(lambda: kvswap.Pool(t.device, room, 4, 64))
    t.wrong(lambda: kvswap.Pool(t.device, room[:64], 4, 64, stride=64))
    t.wrong(lambda: kvswap.Pool(t.device, room[:256], 4, 64))  # overlaps
    t.wrong(lambda: kvswap.Pool(t.device, t.memory, 4, 64, stride=1))
    t.wrong(lambda: kvswap.Pool(t.device, room[2048:2368], 5, 64, group=first))
    t.wrong(lambda: kvswap.Pool(t.device, room[2048:2304], 4, 64, name="x" * 32))
    t.wrong(lambda: kvswap.Pool("x", room[:256], 4, 64))
    kvswap.Pool(t.device, room[2048:].reshape(4, 512))
    kvswap.Pool(t.device, room[2048:].reshape(4, 512)[:, :64])
    t.wrong(lambda: kvswap.Pool(t.device, room))
    t.wrong(lambda: kvswap.Pool(t.device, room[:256], 4))


def moves(t: Tools) -> None:
    """Right, through every path, in parts and layers, with wrong lists, refused copies and what travels from them."""

    def go(*arguments: Any, **options: Any) -> None:
        with suppress(*WRONG):
            kvswap.move_blocks(*arguments, **options).wait(PATIENCE)

    gpu, cpu = t.pools
    parts = [(0, 0, 0, 2, 8, 16), (0, 1, 32, 1, 8, 0)]
    for path in ("auto", "dma", "burst", "kernel"):
        go(gpu, cpu, t.ids, t.back, path=path)
    go([gpu], (cpu,), [1, 2], [3, 4], parts=parts, layer_events=True, after_layers=[None, t.event], stream=t.stream)
    go(gpu, cpu, [1], [2], parts=[(0, 0, 60, 1, 8, 0)])
    go(gpu, cpu, [1], [2], parts=[[1], [2, 3]])
    go(gpu, cpu, [1], [2], parts=np.zeros((1, 6)))
    go(gpu, cpu, [1], [2], parts=[(0, 0, 0, 1, 8, -1)])
    go(gpu, cpu, [1], [2], after_layers=[t.event, t.event])
    go(gpu, cpu, [1], [2], after_layers=["x"])
    go(gpu, cpu, [1, 99], [2, 3])
    go(gpu, cpu, [1], [2, 3])
    go([gpu, 5], [cpu, cpu], [1], [2])
    go([gpu] * 20, [cpu] * 20, [1], [2])
    go(gpu, gpu, [1], [1])
    with testing.fault(t.device, "copy", "fail", every=2):
        go(gpu, cpu, t.ids, t.back)
    go(cpu, gpu, t.back, t.ids)
    go(gpu, cpu, t.ids, t.back)
    testing.note_access(t.stream, gpu, np.arange(64), True)
    with testing.fault(t.device, "call", "fail", nth=3, every=3):
        go(gpu, cpu, t.ids, t.back, layer_events=True)
    testing.note_access(t.stream, cpu, np.arange(64), True)
    t.device.synchronize(PATIENCE)


def layers(t: Tools) -> kvswap.Transfer:
    return kvswap.move_blocks(*t.pools, [1], [2], layer_events=True)


def accesses(t: Tools) -> None:
    testing.note_access(t.stream, t.pools[0], t.ids, True, offset=8, nbytes=8)
    t.wrong(lambda: testing.note_access(t.stream, t.pools[0], [99], True))
    t.wrong(lambda: testing.note_access(t.stream, t.pools[0], ["x"], True))
    t.wrong(lambda: testing.note_access("x", t.pools[0], [1], True))
    t.wrong(lambda: testing.note_access(t.stream, 5, [1], True))


def orders(t: Tools) -> None:
    for before in (t.stream, t.event, t.ended):
        testing.note_order(before, t.stream)
        testing.note_order(before, None)
    t.wrong(lambda: testing.note_order(t.stream.handle, None))
    t.wrong(lambda: testing.note_order("x", t.stream))


def races(t: Tools) -> None:
    """What is found is taken, the rest forgotten."""
    for raise_at_exit in (False, True):
        with suppress(testing.RaceFound), testing.race_checker(raise_at_exit=raise_at_exit) as checker:
            testing.note_access(kvswap.Stream(t.device), t.pools[1], [5], True)
            kvswap.move_blocks(*t.pools, [1], [5]).wait(PATIENCE)
            str(testing.RaceFound(checker.races))


def peers(t: Tools) -> None:
    """Copies to and from another device's memory, with and without peer access."""
    other = kvswap.Device("host:1") if t.device.kind == "host" else t.device
    there = other.alloc(4096)
    if t.device.kind == "host":
        with testing.peer_access(t.device, other, False):
            t.finish(kvswap.swap_blocks_batch, [t.cache.gpu.memory], [there], 64, path="kernel")
    t.finish(kvswap.swap_blocks_batch, [t.cache.gpu.memory], [there], 64)
    pools = [kvswap.Pool(other, there, 64, 64), t.pools[0]]
    kvswap.move_blocks(*pools, [1, 2], [3, 4]).wait(PATIENCE)
    kvswap.move_blocks(*pools[::-1], [1, 2], [3, 4], after=kvswap.Event(other)).wait(PATIENCE)


def deterministic(t: Tools) -> None:
    device = testing.deterministic_device(3)
    device.alloc(64)
    testing.step(device, 3)
    testing.trace(device)


def names(*values: str) -> Callable[[Any], Any]:
    return lambda thing: [getattr(thing, value) for value in values]


POOL_ATTRIBUTES = ("device", "ptr", "num_blocks", "block_nbytes", "stride", "rows", "pitch", "group", "name", "coding")

TABLE: Rows = {
    "__version__": lambda t: kvswap.__version__,
    "devices": lambda t: kvswap.devices(),
    "get_include": lambda t: kvswap.get_include(),
    "Direction": lambda t: (kvswap.Direction(1), t.wrong(lambda: kvswap.Direction(3))),
    "DeviceInfo": lambda t: [repr(info) for info in kvswap.devices()],
    "Error": lambda t: t.wrong(lambda: t.device.unregister(0x99999)),
    "DeviceError": lambda t: t.failed.error,
    "QueueFull": lambda t: str(kvswap.QueueFull("full")),
    "Device": lambda t: (
        kvswap.Device(t.device.name),
        repr(t.device),
        hash(t.device),
        t.wrong(lambda: kvswap.Device("x")),
    ),
    "Device.name": lambda t: t.device.name,
    "Device.kind": lambda t: t.device.kind,
    "Device.info": lambda t: t.device.info,
    "Device.lost": lambda t: t.device.lost,
    "Device.set_defaults": lambda t: (
        t.device.set_defaults(path="kernel", priority="high", max_ctas=2, pace_gbps=3.0),
        t.device.set_defaults(),
        t.wrong(lambda: t.device.set_defaults(path="x")),
    ),
    "Device.set_compute_stream": lambda t: (
        t.device.set_compute_stream(t.stream),
        t.device.set_compute_stream(0),
        t.wrong(lambda: t.device.set_compute_stream("x")),
    ),
    "Device.synchronize": lambda t: (t.device.synchronize(PATIENCE), t.wrong(lambda: t.device.synchronize(-1))),
    "Device.alloc": lambda t: t.alloc(),
    "Device.register": lambda t: t.register(),
    "Device.unregister": lambda t: t.register(),
    "Device.set_slots": lambda t: slots(t),
    "Device.lend": lambda t: lend(t),
    "Device.stats": lambda t: t.device.stats(),
    "Memory": lambda t: (np.frombuffer(t.memory, np.uint8), memoryview(t.memory), repr(t.memory), np.asarray(t.memory)),
    "Memory.ptr": lambda t: t.memory.ptr,
    "Memory.nbytes": lambda t: t.memory.nbytes,
    "Memory.device": lambda t: t.memory.device,
    "Memory.host": lambda t: t.memory.host,
    "Memory.data_ptr": lambda t: t.memory.data_ptr(),
    "Memory.free": lambda t: t.alloc(),
    "Memory.__cuda_array_interface__": lambda t: t.wrong(lambda: t.arguments[0].__cuda_array_interface__),
    "Memory.__array_interface__": lambda t: t.wrong(lambda: t.memory.__array_interface__),
    "Stream": streams,
    "Stream.handle": lambda t: (t.stream.handle, repr(t.stream)),
    "Stream.device": lambda t: t.stream.device,
    "Stream.query": lambda t: t.stream.query(),
    "Stream.synchronize": lambda t: (t.stream.synchronize(PATIENCE), t.wrong(lambda: t.stream.synchronize("x"))),
    "Stream.__cuda_stream__": lambda t: t.stream.__cuda_stream__(),
    "Event": events,
    "Event.handle": lambda t: (t.event.handle, repr(t.event)),
    "Event.device": lambda t: t.event.device,
    "Event.record": lambda t: (t.event.record(t.stream), t.wrong(lambda: t.event.record("x"))),
    "Event.query": lambda t: t.event.query(),
    "Event.synchronize": lambda t: (t.event.synchronize(PATIENCE), t.wrong(lambda: t.event.synchronize(-1))),
    "Event.elapsed_time": lambda t: (
        t.wrong(lambda: t.event.elapsed_time(t.other)),
        t.wrong(lambda: t.event.elapsed_time(3)),
    ),
    "Event.wait": lambda t: (t.event.wait(t.stream), t.wrong(lambda: t.event.wait("x"))),
    "Transfer": lambda t: (t.fresh(), t.fresh().wait(PATIENCE), repr(t.ended), t.wrong(kvswap.Transfer)),
    "Transfer.done": lambda t: (t.fresh().done(), t.failed.done()),
    "Transfer.wait": lambda t: (t.fresh().wait(PATIENCE), t.wrong(t.failed.wait), t.wrong(lambda: t.fresh().wait(0))),
    "Transfer.cancel": lambda t: t.fresh().cancel(),
    "Transfer.make_wait": lambda t: (t.fresh().make_wait(t.stream), t.wrong(lambda: t.failed.make_wait(t.stream))),
    "Transfer.make_wait_layer": lambda t: (
        layers(t).make_wait_layer(0, t.stream),
        t.wrong(lambda: layers(t).make_wait_layer(1, t.stream)),
        t.wrong(lambda: t.failed.make_wait_layer(0, t.stream)),
        t.device.synchronize(PATIENCE),
    ),
    "Transfer.layer_done": lambda t: (
        layers(t).layer_done(0),
        t.wrong(lambda: layers(t).layer_done(1)),
        t.wrong(lambda: t.failed.layer_done(0)),
        t.device.synchronize(PATIENCE),
    ),
    "Transfer.num_layers": lambda t: t.ended.num_layers,
    "Transfer.number": lambda t: t.ended.number,
    "Transfer.lane": lambda t: t.ended.lane,
    "Transfer.event": lambda t: (t.fresh().event, t.ended.event, t.failed.event),
    "Transfer.device": lambda t: t.ended.device,
    "Transfer.nbytes": lambda t: t.ended.nbytes,
    "Transfer.num_blocks": lambda t: t.ended.num_blocks,
    "Transfer.sequence": lambda t: t.ended.sequence,
    "Transfer.elapsed": lambda t: (t.ended.elapsed, t.fresh().elapsed),
    "Transfer.duration": lambda t: (t.ended.duration, t.fresh().duration),
    "Transfer.path": lambda t: t.ended.path,
    "Transfer.state": lambda t: (t.ended.state, t.fresh().state),
    "Transfer.error": lambda t: (t.ended.error, t.failed.error),
    "Transfer.failed_positions": lambda t: (t.ended.failed_positions, t.failed.failed_positions),
    "Pool": pools,
    **{f"Pool.{name}": lambda t, name=name: getattr(t.pools[0], name) for name in POOL_ATTRIBUTES},
    "move_blocks": moves,
    "swap_blocks_batch": lambda t: t.batch(),
    "copy_blocks": lambda t: t.copy_blocks(),
    "swap_cache_per_layer": lambda t: t.swap("swap_cache_per_layer"),
    "swap_cache_per_layer_async": lambda t: t.swap("swap_cache_per_layer_async"),
    "swap_cache_all_layers": lambda t: t.swap("swap_cache_all_layers"),
    "swap_cache_all_layers_async": lambda t: t.swap("swap_cache_all_layers_async"),
    **{f"testing.{name}": races for name in ("Race", "RaceParty", "RaceChecker", "RaceFound", "race_checker")},
    "testing.parse_kind": lambda t: testing.parse_kind("copy"),
    "testing.parse_action": lambda t: testing.parse_action("skip"),
    "testing.Kind": lambda t: testing.Kind,
    "testing.Action": lambda t: testing.Action,
    "testing.peer_access": peers,
    "testing.deterministic_device": deterministic,
    "testing.step": deterministic,
    "testing.trace": deterministic,
    "testing.capture": lambda t: capture(t),
    "testing.fault": lambda t: fault(t),
    "testing.file_fault": lambda t: files(t),
    "testing.note_access": accesses,
    "testing.note_order": orders,
    "testing.delay": lambda t: (testing.delay(t.device, 0, t.stream), t.wrong(lambda: testing.delay(t.device, -1, 0))),
    "testing.set_lane_depth": lambda t: (testing.set_lane_depth(t.device, 128), t.wrong(lambda: depth(t))),
}


@contextmanager
def one_folder() -> Iterator[Path]:
    folder = Path(tempfile.gettempdir()) / f"kvswap-leaks-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def files(t: Tools) -> None:
    """A store that is opened, used, hurt and closed. Its folder has one name: without a GIL Python keeps every name."""
    with one_folder() as folder:
        store = FileStore(folder, Layout(5000), capacity=1 << 20, engine="threads", depth=1)
        data, keys = np.zeros((4, 5000), np.uint8), [b"1", b"2", b"3", b"4"]
        with testing.file_fault(store, "write", "fail", nth=3):
            t.wrong(lambda: store.store(keys, data, range(4)).wait(PATIENCE))
        load = store.load([*keys, b"5"], [*data, np.zeros(5000, np.uint8)])
        t.wrong(lambda: load.wait(PATIENCE))
        assert len(load.reasons) == len(load.failed_positions) == 2
        store.delete(keys).wait(PATIENCE)
        t.wrong(lambda: store.pin([b"nobody"]))
        t.wrong(lambda: store.store([b""], data, [0]))
        assert store.contains(keys) == [False] * 4 and store.stats() and store.info
        store.close()
        with open(folder / "other", "wb+") as file:  # what kvswap.trtllm checks before it copies
            file.truncate(64)
            one = np.zeros(1, np.int64)
            _C._disk_check(one + data.ctypes.data, one, one - 1, one + file.fileno(), 64)


def depth(t: Tools) -> None:
    testing.set_lane_depth(t.device, 0)


def slots(t: Tools) -> None:
    """Other ones, none, none of a size that is refused, and those of before; with a transfer through each."""
    before = t.device.info["slots_nbytes"] // 8  # a direction has three slots, and two of half as much
    for arguments in ((128 << 10, 2), (0,), (before, 3)):
        t.device.set_slots(*arguments)
        with suppress(*WRONG):
            t.finish(t.cache.swap, [1], [2], path="burst")
    t.wrong(lambda: t.device.set_slots(1))
    refused = testing.fault(t.device, "call", "fail", operation="event_create", nth=3)
    with refused, suppress(*WRONG):
        t.device.set_slots(128 << 10, 4)
    t.device.set_slots(before, 3)


def lend(t: Tools) -> None:
    """With a transfer; other sizes; one that is refused; and taken back."""
    if t.device.kind == "cuda" or t.device.name.startswith("host:seed"):
        return t.wrong(lambda: t.device.lend(t.device))
    lender = kvswap.Device("host:57")
    for count in (2, 3):
        lender.lend(t.device, 128 << 10, count)
        t.finish(t.cache.swap, [1], [2], path="borrow")
    with testing.fault(lender, "call", "fail", operation="event_create", nth=3), suppress(*WRONG):
        lender.lend(t.device, 128 << 10, 4)
    t.wrong(lambda: lender.lend(t.device, 1))
    return lender.lend(t.device, 0)


def capture(t: Tools) -> None:
    if t.device.kind == "host":
        with testing.capture(t.device, t.stream):
            t.wrong(lambda: t.cache.swap([1], [2], stream=t.stream))


def fault(t: Tools) -> None:
    with testing.fault(t.device, "call", "fail", operation="copy"):
        t.finish(t.cache.swap, [1], [2])
    t.wrong(lambda: bindings.set_fault(t.device, "call", "x"))


# -- what the packages use beyond the public names --------------------------------------------------------------------


def maps(t: Tools) -> None:
    """An offloading connector's map: made, used and refused."""
    gpu, cpu = t.cache.gpu.ptr, t.cache.cpu.ptr
    tensors, parts = [[gpu, 64, 64, 64, cpu, 64, 64, 64]], [[0, 0, 0, 0, 64, 1, 0, 0, 1, 0]]
    tables = [np.array(table, np.uint64).reshape(-1) for table in (tensors, parts)]
    job = _C.OffloadMap(t.device, *tables, 1, 64, 1)
    for lists in (([1, 2], [3, 4], [2], [0]), ([1, 99], [3, 4], [2], [0]), ([1], [3], ["x"], [0])):
        with suppress(*WRONG):
            for transfer in job.submit(*lists, 0)[0]:
                transfer.wait(PATIENCE)
    for wrong in (
        (t.device, tables[0], tables[1], 1, 0, 1),
        (t.device, tables[0], [[1]], 1, 64, 1),
        (5, *tables, 1, 64, 1),
    ):
        t.wrong(lambda: _C.OffloadMap(*wrong))  # noqa: B023


def host_pools(t: Tools) -> None:
    """With room to grow behind each layer, so that a view of all has shape and strides of its own."""
    with HostPool(4, 8192, device=t.device, layers=2, max_blocks=8, layout="layer-first") as pool:
        view = memoryview(pool)
        assert view.shape == (2, 16384) and view.strides == (32768, 1)
        view.release()
        t.wrong(lambda: pool.layer(2))
        t.wrong(lambda: ctypes.c_char.from_buffer(pool))


def hooks(t: Tools) -> None:
    """Traced calls, whose hook may fail."""
    for hook in (lambda what: None, lambda what: lambda result, error: None, lambda what: 1 // 0):
        _C._set_trace_hook(hook)
        with suppress_unraisable():
            t.cache.swap([1], [2]).wait(PATIENCE)
            t.wrong(lambda: t.cache.swap([99], [2]))
        _C._set_trace_hook(None)


@contextmanager
def suppress_unraisable() -> Iterator[None]:
    before, sys.unraisablehook = sys.unraisablehook, lambda args: None
    yield
    sys.unraisablehook = before


def exports(t: Tools) -> None:
    for data in (b"x" * 512, bytearray(512), b"", 5):
        t.wrong(lambda: _C._ipc_read(data))  # noqa: B023
        t.wrong(lambda: _C._ipc_open(data, device=t.device))  # noqa: B023


def tensors(t: Tools) -> None:
    array = t.array[:4096]
    for made in (Dlpack(array), Interface(array, "__array_interface__"), Torchlike(array), memoryview(array), object()):
        t.finish(kvswap.swap_cache_per_layer, made, t.cache.cpu.memory, 64, 64, 64, [1], [2], 0)


MORE: Rows = {
    "OffloadMap": maps,
    "HostPool": host_pools,
    "MissingKey": lambda t: str(MissingKey("missing")),
    "hooks": hooks,
    "exports": exports,
    "tensors": tensors,
}


def public_names() -> set[str]:
    found = {f"testing.{name}" for name in testing.__all__}
    for name in kvswap.__all__:
        found.add(name)
        value = getattr(kvswap, name)
        if isinstance(value, type) and value.__module__ == "kvswap" and not issubclass(value, (BaseException, int)):
            of_bases = [key for each in value.__mro__ if each is not object for key in vars(each)]
            own = {key for key in of_bases if not key.startswith("_") or key in PROTOCOLS}
            found |= {f"{name}.{key}" for key in own}
    return found


PROTOCOLS = {"__cuda_array_interface__", "__array_interface__", "__cuda_stream__", "__dlpack__", "__dlpack_device__"}


def test_every_public_name_has_a_row() -> None:
    assert public_names() - set(TABLE) == set(), "public, but no leak test"
    assert set(TABLE) - public_names() == set(), "no longer public"


# -- measuring --------------------------------------------------------------------------------------------------------


class Mallinfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    )


def c_bytes() -> int:
    """Bytes that malloc has handed out and not got back; 0 where the C library does not say."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo2.restype = Mallinfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# Python keeps the names of attributes that C looked up last, in places drawn by their address: for hundreds of calls
# memory grows, and nothing leaks.
forget_names = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache


def measure(device: kvswap.Device) -> dict[str, int]:
    device.synchronize(PATIENCE)
    device.stats()
    forget_names()
    gc.collect()
    return {
        "objects": sys.getallocatedblocks(),
        "bytes of C": c_bytes(),
        "bytes of Python": tracemalloc.get_traced_memory()[0],
        "staging": device.stats()["staging_nbytes"],
        "files": descriptors(),
    }


@contextmanager
def tracing() -> Iterator[None]:
    gc.collect()
    tracemalloc.start(1)
    try:
        yield
    finally:
        tracemalloc.stop()


def growth(device: kvswap.Device, action: Callable[[], Any], times: int) -> dict[str, int]:
    """What `times` more repetitions added. A measurement is some 500 bytes itself, which few repetitions would show: so
    another one is alive while each is made."""
    other = measure(device)
    before = measure(device)
    del other
    for _ in range(times):
        action()
    after = measure(device)
    return {name: after[name] - before[name] for name in after}


# For each repetition. The least that malloc hands out is 32 bytes, so a leak each time is more than 24; what lies below
# is the caches that malloc keeps for each thread, which come and go with the device's workers.
ALLOWED = {
    "objects": 0.2,
    "bytes of C": 24.0,
    "bytes of Python": 12.0,
    "staging": 0.0,
    "files": 0.0,
}


def leaks(device: kvswap.Device, action: Callable[[], Any], times: int = TIMES) -> dict[str, float]:
    """What grows, by how much a repetition; nothing where it does not grow each time, and few times often show that."""
    with tracing():
        growth(device, action, 20)
        found = dict.fromkeys(ALLOWED, 0.0)
        for count in (times // 4, *5 * [times]):
            grown = {name: value / count for name, value in growth(device, action, count).items()}
            found = {name: grown[name] for name in found if grown[name] > ALLOWED[name]}
            if not found:
                return {}
        return found


@pytest.fixture(scope="module")
def tools(session_device: kvswap.Device) -> Iterator[Tools]:
    tools = Tools(session_device)
    yield tools
    session_device.synchronize(PATIENCE)


@pytest.mark.parametrize("name", [*TABLE, *MORE])
def test_leaks(device: kvswap.Device, tools: Tools, name: str) -> None:
    if SANITIZED:
        pytest.skip("a sanitizer keeps what is freed")
    row = TABLE.get(name) or MORE[name]
    assert leaks(device, lambda: row(tools)) == {}


def memory_files() -> int:
    """Files behind the memory of host devices that are open: one a device that had some."""
    names = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum("memfd:kvswap" in os.readlink(name) for name in names if os.path.islink(name))


BY_NAME = {"Device", "testing.peer_access"}  # need a device with a name, which stays open


def keeps_its_device(names: list[str], patience: float) -> bool:
    """Whether a device is still open when all is gone that was made of it by these rows."""
    before, end = memory_files(), time.monotonic() + patience
    tools = Tools(testing.deterministic_device(1))
    assert memory_files() == before + 1
    for name in names:
        TABLE[name](tools)
    del tools
    while gc.collect() >= 0 and memory_files() > before and time.monotonic() < end:
        time.sleep(0.01)
    return memory_files() > before


def test_no_call_keeps_its_device(device: kvswap.Device) -> None:
    """A reference that is not given back is no memory that grows, but a device that never closes."""
    if device.kind != "host":
        pytest.skip("a GPU's memory has no file by which to see it")
    rows = [name for name in TABLE if name not in BY_NAME]
    if keeps_its_device(rows, 5):
        assert [name for name in rows if keeps_its_device([name], 0.2)] == []
        raise AssertionError("no single call keeps it, all together do")


def test_a_leak_would_be_found(device: kvswap.Device) -> None:
    """The measurement itself: kept objects and kept bytes of C show."""
    if SANITIZED:
        pytest.skip("a sanitizer keeps what is freed")
    kept: list[Any] = []
    events: list[Any] = []
    # What another thread (pytest-xdist's, say) frees meanwhile may hide it once.
    assert any("objects" in leaks(device, lambda: kept.append(object())) for _ in range(5))
    assert any(leaks(device, lambda: events.append(kvswap.Event(device))) for _ in range(5))
    assert leaks(device, lambda: None) == {}
