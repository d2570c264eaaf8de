"""Every public call, by several threads at once, on objects that they share: what an interpreter without a GIL needs,
and what must hold with one too.

    python3.14t -m pytest tests/random/test_public.py --long-seconds 600

Objects are shared through the lists of a World: a thread takes one, uses it, or puts another in its place, so that the
last reference is dropped by any thread. A thread copies between arrays of its own, each copy after the one before, and
in the end compares them with its model. CALLS names what is called; a public name that is in neither CALLS nor APART
fails test_every_public_call_is_listed. Attributes are all read."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE

import kvswap
from kvswap import codecs, files, memory, testing

pytestmark = pytest.mark.slow

THREADS, BLOCKS, NBYTES, KEYS = 6, 24, 512, 40
Call = Callable[["World", "Mine"], Any]
CALLS: dict[str, Call] = {}
APART = {
    "kvswap.DeviceError": "raised, not called",
    "kvswap.DeviceInfo": "made by devices()",
    "kvswap.Direction": "an enum",
    "kvswap.Error": "raised, not called",
    "kvswap.files.MissingKey": "raised, not called",
    "kvswap.QueueFull": "raised, not called",
    "kvswap.Memory": "made by Device.alloc()",
    "kvswap.Transfer": "made by what submits",
    "kvswap.memory.Mapped": "made by open()",
    "kvswap.memory.HostPool.torch": "needs torch",
    "kvswap.memory.SharedPool.torch": "needs torch",
    "kvswap.files.FileTransfer": "made by what submits",
    "kvswap.files.FileStore.close": "ends the store: at the end of the test",
    "kvswap.files.FileStore.clear": "ends all blocks: test_files_epoch_races.py",
    "kvswap.files.clear": "the same, of a directory",
    "kvswap.files.Cleared": "made by clear()",
    "kvswap.files.read_block_files": "plain files, in Python",
    "kvswap.files.write_block_files": "plain files, in Python",
    "kvswap.codecs.Field": "a tuple",
    "kvswap.codecs.Verdict": "an enum",
}


def call(*names: str) -> Callable[[Call], Call]:
    def add(function: Call) -> Call:
        CALLS.update(dict.fromkeys(names, function))
        return function

    return add


def public_calls() -> list[str]:
    found = []
    for module in (kvswap, memory, files, codecs):
        for name in module.__all__:
            value = getattr(module, name)
            if not callable(value):
                continue
            found.append(f"{module.__name__}.{name}")
            if isinstance(value, type) and not issubclass(value, (BaseException, tuple, int)):
                methods = [key for key in dir(value) if key[0] != "_" and callable(getattr(value, key))]
                found += [f"{module.__name__}.{name}.{key}" for key in methods]
    return [*found, "kvswap.testing.note_access", "kvswap.testing.note_order"]  # which engines call


class World:
    """What all threads use."""

    def __init__(self, device: kvswap.Device, folder: Path) -> None:
        self.device, self.folder, self.stop = device, folder, threading.Event()
        self.arrays = [np.zeros((BLOCKS, NBYTES), np.uint8) for _ in range(3)]
        self.pools = [kvswap.Pool(device, array, BLOCKS, NBYTES) for array in self.arrays]
        self.host = memory.HostPool(8, 4096, max_blocks=32, device=device)
        self.shared = memory.SharedPool(f"test-public-{os.getpid()}", THREADS, 4096, device=device)
        layout = files.Layout(NBYTES, model="m")
        self.store = files.FileStore(folder / "store", layout, capacity=1 << 19, device=device, events=100)
        self.coding = codecs.Coding(NBYTES, "mxfp8")
        self.streams = [kvswap.Stream(device) for _ in range(4)]
        self.events = [kvswap.Event(device) for _ in range(4)]
        self.memories = [device.alloc(8192) for _ in range(3)]
        self.exports = [memory.export(each) for each in self.memories]
        self.mapped = [memory.open(export) for export in self.exports]
        self.transfers = [kvswap.move_blocks(self.pools[0], self.pools[1], [0], [0]) for _ in range(4)]
        self.file_transfers = [self.store.delete([b"none"])]
        # One dict for all who ask, which they change.
        self.source = np.zeros(NBYTES, np.uint8)
        self.interface: dict[str, Any] = dict(self.source.__array_interface__)
        self.calls: Counter[str] = Counter()  # under lock
        self.seen: set[str] = set()  # under lock: of calls that some thread has made
        self.lock, self.wrong = threading.Lock(), []

    def close(self) -> None:
        self.store.close()
        self.shared.close(force=True)
        self.host.close(force=True)
        self.device.synchronize(timeout=PATIENCE)


class Mine:
    """What one thread alone writes, with its model."""

    def __init__(self, world: World, number: int, seed: int) -> None:
        self.number, self.rng = number, np.random.default_rng([seed, number])
        self.gpu, self.cpu = (self.rng.integers(0, 256, (BLOCKS, NBYTES)).astype(np.uint8) for _ in range(2))
        self.model = [self.gpu.copy(), self.cpu.copy()]
        self.slots = np.zeros((4, NBYTES), np.uint8)
        self.pool = kvswap.Pool(world.device, self.slots, 4, NBYTES)
        self.before: Any = ()

    def of(self, items: list[Any]) -> Any:
        return items[self.rng.integers(len(items))]

    def put(self, items: list[Any], item: Any) -> Any:
        items[self.rng.integers(len(items))] = item
        return item

    def ids(self, most: int = BLOCKS) -> Any:
        return self.rng.permutation(BLOCKS)[: self.rng.integers(1, most)]

    def chance(self, one_in: int) -> bool:
        return bool(self.rng.integers(one_in) == 0)

    def check(self) -> None:
        if self.before != ():
            self.before.wait(PATIENCE)
        assert (self.gpu == self.model[0]).all() and (self.cpu == self.model[1]).all()


class Interface:
    """A tensor whose interface is one dict for all, which other threads change."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


# -- transfers --------------------------------------------------------------------------------------------------------


@call(
    "kvswap.swap_cache_per_layer",
    "kvswap.swap_cache_per_layer_async",
    "kvswap.swap_cache_all_layers",
    "kvswap.swap_cache_all_layers_async",
)
def swap_cache(w: World, me: Mine) -> None:
    name = me.of(["per_layer", "per_layer_async", "all_layers", "all_layers_async"])
    many, later = name.startswith("all"), name.endswith("async")
    gpu, cpu, back = me.ids(), me.rng.permutation(BLOCKS), bool(me.rng.integers(2))
    cpu = cpu[: len(gpu)]
    sides = ([me.gpu], [me.cpu]) if many else (me.gpu, me.cpu)
    options: dict[str, Any] = {"stream": me.of([None, me.of(w.streams)]), "after": me.before, "device": w.device}
    options["path"] = me.of(["auto", "dma", "direct", "kernel"])
    if later and many:
        options["layer_events"] = True
    made = getattr(kvswap, f"swap_cache_{name}")(
        *sides, NBYTES, BLOCKS, BLOCKS, gpu.tolist() if me.chance(2) else gpu, cpu, int(back), **options
    )
    if back:
        me.model[0][gpu] = me.model[1][cpu]
    else:
        me.model[1][cpu] = me.model[0][gpu]
    if later:
        me.before = me.put(w.transfers, made)
    if me.chance(4):
        me.check()


@call("kvswap.copy_blocks")
def copy_blocks(w: World, me: Mine) -> None:
    gpu, cpu = me.ids(), me.rng.permutation(BLOCKS)
    cpu, back = cpu[: len(gpu)], bool(me.rng.integers(2))
    one, other = me.gpu.reshape(BLOCKS, -1), me.cpu.reshape(BLOCKS, -1)
    sides = (other, one, cpu, gpu) if back else (one, other, gpu, cpu)
    transfer = kvswap.copy_blocks(*sides, stream=me.of([None, me.of(w.streams)]), after=me.before, device=w.device)
    if back:
        me.model[0][gpu] = me.model[1][cpu]
    else:
        me.model[1][cpu] = me.model[0][gpu]
    me.before = me.put(w.transfers, transfer)


@call("kvswap.swap_blocks_batch")
def swap_batch(w: World, me: Mine) -> None:
    gpu, cpu = me.ids(), me.rng.permutation(BLOCKS)
    pairs = [(me.gpu.ctypes.data + NBYTES * int(i), me.cpu.ctypes.data + NBYTES * int(k)) for i, k in zip(gpu, cpu)]  # noqa: B905
    src, dst = (np.array(side, np.uint64) for side in zip(*pairs, strict=True))
    me.before = kvswap.swap_blocks_batch(src, dst, NBYTES, after=me.before, device=w.device)
    me.model[1][cpu[: len(gpu)]] = me.model[0][gpu]
    w.interface["data"] = (w.interface["data"][0] + 0, False)
    there = np.zeros(NBYTES, np.uint8)
    kvswap.swap_blocks_batch([Interface(w.interface)], [there], [NBYTES], device=w.device).wait(PATIENCE)
    w.interface["version"] = w.interface.pop("version", 3)


@call("kvswap.move_blocks")
def move(w: World, me: Mine) -> None:
    first = int(me.rng.integers(3))
    src, dst = w.pools[first], w.pools[(first + 1) % 3]
    ids = me.ids(8)
    me.put(w.transfers, kvswap.move_blocks(src, dst, ids, me.rng.permutation(BLOCKS)[: len(ids)], layer_events=True))


@call("kvswap.testing.note_access", "kvswap.testing.note_order")
def note(w: World, me: Mine) -> None:
    stream = me.of(w.streams)
    testing.note_access(stream, me.of(w.pools), me.ids(), bool(me.rng.integers(2)))
    testing.note_order(me.of(w.transfers), stream)
    if me.chance(8):
        with testing.race_checker(raise_at_exit=False) as checker:
            move(w, me)
            _ = checker.races


@call(*(f"kvswap.Transfer.{name}" for name in ("cancel", "done", "make_wait", "wait")))
def transfer(w: World, me: Mine) -> None:
    one = me.of(w.transfers)
    one.done(), one.cancel(), one.make_wait(me.of(w.streams)), repr(one)
    one.wait(timeout=PATIENCE if me.chance(2) else 0.001)


@call("kvswap.Transfer.layer_done", "kvswap.Transfer.make_wait_layer")
def layers(w: World, me: Mine) -> None:
    one = me.of(w.transfers)
    if one.num_layers:
        one.layer_done(0)
        one.make_wait_layer(0, me.of(w.streams))


# -- devices ----------------------------------------------------------------------------------------------------------


@call("kvswap.Device", "kvswap.devices", "kvswap.get_include", "kvswap.Device.stats", "kvswap.Device.set_defaults")
def device(w: World, me: Mine) -> None:
    again = kvswap.Device(w.device.name)
    assert again == w.device and hash(again) == hash(w.device)
    again.stats()
    again.set_defaults(priority=me.of(["normal", "high", "background"]))
    assert kvswap.get_include()
    if me.chance(8):
        kvswap.devices()


@call("kvswap.Device.synchronize", "kvswap.Device.set_compute_stream", "kvswap.Device.set_slots", "kvswap.Device.lend")
def device_rarely(w: World, me: Mine) -> None:
    w.device.synchronize(timeout=PATIENCE if me.chance(2) else 0.01)
    w.device.set_compute_stream(me.of([0, me.of(w.streams)]))
    if me.chance(8):
        w.device.set_slots(me.of([0, 1 << 20]), timeout=0.05)
    if me.chance(8) and w.device.kind == "host":
        kvswap.Device("host:58").lend(w.device, me.of([0, 128 << 10, 1 << 20]), timeout=0.05)


@call(*(f"kvswap.{name}" for name in ("Device.alloc", "Memory.data_ptr", "Memory.free")))
def allocate(w: World, me: Mine) -> None:
    one = w.device.alloc(int(me.rng.integers(1, 50000)), host=bool(me.rng.integers(2)))
    np.asarray(one)[:] = 1
    assert one.data_ptr() == one.ptr
    if me.chance(2):
        one.free(timeout=PATIENCE)
    me.put(w.memories, w.device.alloc(8192, chunks=me.chance(2)))


@call("kvswap.Device.register", "kvswap.Device.unregister", *(f"kvswap.memory.host_{x}register" for x in ("", "un")))
def register(w: World, me: Mine) -> None:
    own = np.zeros(1 << 16, np.uint8)
    if me.chance(2):
        w.device.register(own)
        w.device.unregister(own, timeout=PATIENCE)
    else:
        memory.host_register(own.ctypes.data, own.nbytes, device=w.device)
        memory.host_unregister(own.ctypes.data, timeout=PATIENCE)


@call("kvswap.memory.host_alloc", "kvswap.memory.host_free", "kvswap.memory.clean")
def host_alloc(w: World, me: Mine) -> None:
    memory.host_free(memory.host_alloc(5000, device=w.device), timeout=PATIENCE)
    if me.chance(8):
        memory.clean()


@call("kvswap.Stream", *(f"kvswap.Stream.{name}" for name in ("query", "synchronize")))
def stream(w: World, me: Mine) -> None:
    one = me.of(w.streams)
    one.query(), repr(one), one.__cuda_stream__()
    one.synchronize(timeout=PATIENCE if me.chance(2) else 0.001)
    me.put(w.streams, kvswap.Stream(w.device, priority=me.of(["high", "normal"])))


@call("kvswap.Event", *(f"kvswap.Event.{name}" for name in ("query", "synchronize", "record", "wait", "elapsed_time")))
def event(w: World, me: Mine) -> None:
    one, other = me.of(w.events), me.of(w.events)
    one.query(), repr(one), one.wait(me.of(w.streams)), other.record(me.of(w.streams))
    one.synchronize(timeout=PATIENCE if me.chance(2) else 0.001)
    me.of(w.transfers).event.query()
    me.put(w.events, kvswap.Event(w.device, timing=bool(me.rng.integers(2))))
    one.elapsed_time(other)


@call("kvswap.Pool")
def pool(w: World, me: Mine) -> None:
    first = kvswap.Pool(w.device, np.zeros((BLOCKS, NBYTES), np.uint8), BLOCKS, NBYTES, name="a")
    kvswap.Pool(w.device, np.zeros((BLOCKS, NBYTES), np.uint8), BLOCKS, NBYTES, group=first)
    me.put(w.transfers, kvswap.move_blocks(me.of(w.pools), first, [0, 1], [2, 3]))


# -- host memory ------------------------------------------------------------------------------------------------------

COMMON = ("cancel", "close", "layer", "layer_ptrs", "pool", "ready", "wait")


@call("kvswap.memory.HostPool", *(f"kvswap.memory.HostPool.{name}" for name in (*COMMON, "grow", "shrink")))
def host_pool(w: World, me: Mine) -> None:
    one = w.host
    one.ready(0), one.layer_ptrs(), repr(one)
    if me.chance(4):
        one.layer(0)[0, 0]
        with suppress(ValueError):  # another thread has one: there is one at a time
            one.pool()
    with suppress(ValueError):  # another thread made it larger, or smaller, than this
        me.of([one.grow, one.shrink])(int(me.rng.integers(8, 33)), timeout=0.05)
    own = memory.HostPool(4, 4096, device=w.device, progress=lambda done, total: None, wait=bool(me.rng.integers(2)))
    if me.chance(2):
        own.cancel()
    if me.chance(2):
        own.close(timeout=PATIENCE, force=True)
    one.wait(timeout=0.01)


@call(
    "kvswap.memory.SharedPool",
    *(f"kvswap.memory.SharedPool.{name}" for name in COMMON),
    *(
        f"kvswap.memory.SharedPool.{name}"
        for name in ("claim", "publish", "published", "retract", "wait_ready", "unlink")
    ),
)
def shared_pool(w: World, me: Mine) -> None:
    one, mine = w.shared, [me.number]
    if one.claim(mine)[0]:
        np.asarray(one)[me.number * 4096] = 7
        one.publish(mine)
    one.published(list(range(THREADS))), one.ready(0), one.layer_ptrs(), one.wait(timeout=0.01), repr(one)
    if me.chance(2):
        one.retract(mine)
    if me.chance(4):
        name = f"test-public-{os.getpid()}-{me.number}"
        own = memory.SharedPool(name, 2, 4096, device=w.device, wait=False)
        own.cancel(), own.unlink(), own.layer(0), own.close(timeout=PATIENCE)
    one.wait_ready(mine, timeout=0.001)


@call("kvswap.memory.export", "kvswap.memory.open", "kvswap.memory.Export")
def export(w: World, me: Mine) -> None:
    made = memory.export(me.of(w.memories), generation=1)
    data = made.to_bytes()
    me.put(w.exports, memory.Export.from_bytes(data))
    me.put(w.mapped, memory.open(me.of([made, data]), device=w.device, generation=1))


@call(*(f"kvswap.memory.Export.{name}" for name in ("close", "from_bytes", "to_bytes")))
def use_export(w: World, me: Mine) -> None:
    one = me.of(w.exports)
    one.to_bytes(), repr(one)
    own = memory.export(me.of(w.memories))
    own.close()


@call(*(f"kvswap.memory.Mapped.{name}" for name in ("alive", "close", "data_ptr", "pool")))
def mapped(w: World, me: Mine) -> None:
    one = me.of(w.mapped)
    one.alive(), repr(one), one.data_ptr()
    np.asarray(one)
    own = w.device.alloc(NBYTES)
    with memory.open(memory.export(kvswap.Pool(w.device, own, 1, NBYTES)), device=w.device) as opened:
        opened.data_ptr()
        opened.close(timeout=PATIENCE)


@call("kvswap.memory.export_event", "kvswap.memory.open_event")
def export_event(w: World, me: Mine) -> None:
    one = kvswap.Event(w.device, timing=False, interprocess=True)
    one.record(me.of(w.streams))
    with pytest.raises(ValueError, match="this process exported the event"):
        memory.open_event(memory.export_event(one), device=w.device)


# -- files ------------------------------------------------------------------------------------------------------------


@call("kvswap.files.FileStore", "kvswap.files.Layout", "kvswap.files.Layout.parse")
def open_store(w: World, me: Mine) -> None:
    layout = files.Layout(NBYTES, model="m")
    assert files.Layout.parse(NBYTES, layout.text).text == layout.text
    if me.chance(8):
        with files.FileStore(w.folder / f"own-{me.number}", layout, capacity=1 << 18) as own:
            own.store([b"k"], [me.slots[3]]).wait(PATIENCE)


@call(*(f"kvswap.files.FileStore.{name}" for name in ("store", "load", "delete")))
def store(w: World, me: Mine) -> None:
    keys = [b"%d" % i for i in me.rng.permutation(KEYS)[:2]]
    blocks: Any = me.of([([me.slots[0], me.slots[1]],), (me.pool, [2, 3])])
    what = me.of([w.store.store, w.store.load, w.store.store])
    made = me.put(w.file_transfers, what(keys, *blocks) if me.chance(3) else w.store.delete(keys))
    made.wait(PATIENCE)


@call(*(f"kvswap.files.FileTransfer.{name}" for name in ("cancel", "done", "wait")))
def file_transfer(w: World, me: Mine) -> None:
    one = me.of(w.file_transfers)
    one.done(), one.reasons, repr(one)
    if me.chance(4):
        one.cancel()
    one.wait(timeout=PATIENCE)


ASKED = ("contains", "keys", "pin", "refresh", "stats", "take_events", "touch", "unpin")


@call(*(f"kvswap.files.FileStore.{x}" for x in ASKED))
def store_asked(w: World, me: Mine) -> None:
    keys = [b"%d" % i for i in me.rng.permutation(KEYS)[:3]]
    w.store.contains(keys), w.store.touch(keys), w.store.stats(), w.store.refresh()
    if me.chance(8):
        w.store.keys()
    w.store.pin(keys)
    w.store.unpin(keys)
    w.store.take_events()


@call(*(f"kvswap.codecs.Coding{name}" for name in ("", ".decode", ".encode", ".parse")))
def coding(w: World, me: Mine) -> None:
    own = codecs.Coding(NBYTES, me.of(list(codecs.CODECS))) if me.chance(4) else codecs.Coding.parse(w.coding.text)
    block = 0x3E00 | me.rng.integers(0, 1 << 8, NBYTES // 2).astype(np.uint16)
    coded, _ = own.encode(block)
    again, _ = own.encode(own.decode(coded)[0])
    assert np.array_equal(coded, again), repr(own)


def attributes(w: World, me: Mine) -> None:
    shared = [*w.pools, *w.streams, *w.events, *w.memories, *w.exports, *w.mapped, *w.transfers, *w.file_transfers]
    one = me.of([w.device, w.host, w.shared, w.store, *shared])
    for name in dir(type(one)):
        if name[0] != "_" and not callable(getattr(type(one), name)):
            getattr(one, name)


# -- the tests --------------------------------------------------------------------------------------------------------


def test_every_public_call_is_listed() -> None:
    known = CALLS.keys() | APART.keys()
    assert sorted(set(public_calls()) - known) == []
    assert sorted(known - set(public_calls())) == []


def work(w: World, me: Mine) -> None:
    calls, counted = [*dict.fromkeys(CALLS.values()), attributes], Counter[str]()
    while not w.stop.is_set():
        function = me.of(calls)
        counted[function.__name__] += 1
        if counted[function.__name__] == 1:
            with w.lock:
                w.seen.add(function.__name__)
        try:
            function(w, me)
        except (kvswap.Error, BufferError, TimeoutError):
            counted[function.__name__ + " refused"] += 1  # another thread is at it, or was
        except Exception:
            w.wrong.append(traceback.format_exc())
            w.stop.set()
    try:
        me.check()
    except Exception:
        w.wrong.append(traceback.format_exc())
    with w.lock:
        w.calls += counted


def test_every_public_call_from_many_threads(
    device: kvswap.Device, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    if device.kind != "host":
        pytest.skip("its blocks are NumPy's, memory of a host device")
    seed, slots = int(request.config.getoption("--long-seed")), device.info["slots_nbytes"] // 8
    device = kvswap.Device("host:60")  # that no other test uses: its counters, streams and slots the threads share
    world = World(device, tmp_path)
    threads = [threading.Thread(target=work, args=(world, Mine(world, i, seed))) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    world.stop.wait(float(request.config.getoption("--long-seconds")))
    end, every = time.monotonic() + PATIENCE, len({*CALLS.values()}) + 1
    while len(world.seen) < every and time.monotonic() < end and not world.stop.wait(0.05):
        continue  # on a busy machine, until each was called
    world.stop.set()
    for thread in threads:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive()
    world.close()
    device.set_compute_stream(0)  # what the threads have set goes
    device.set_defaults(priority="normal")
    device.set_slots(slots, timeout=PATIENCE)
    assert world.wrong == [], "\n".join(world.wrong[:3])
    kinds = [name for name in world.calls if not name.endswith(" refused")]
    made, refused = sum(world.calls[name] for name in kinds), sum(world.calls[f"{name} refused"] for name in kinds)
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    with capsys.disabled():
        print(f" {made} calls of {len(kinds)} kinds, {refused} refused, {'with' if gil else 'without'} the GIL", end="")
    assert sorted(kinds) == sorted({*(function.__name__ for function in CALLS.values()), "attributes"})


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="an interpreter with a GIL")
def test_the_gil_stays_off() -> None:
    assert not sys._is_gil_enabled()
