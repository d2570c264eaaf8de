"""Operations: memory that comes and goes, pinned or not; host pools, shared pools, exports."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from conftest import PATIENCE, Buffer, Bytes, address_of

import kvswap
from differential.frame import Area, Memory, World, check, host_array, operation
from kvswap import memory

PAGE = os.sysconf("SC_PAGESIZE")
MOST = 4  # areas that come and go, at once
_names = itertools.count()


def extras(world: World) -> dict[str, Any]:
    """Areas that came, each with what takes it away."""
    return world.parts.setdefault("extras", {})


def come(
    world: World, kind: str, side: str, ptr: int, nbytes: int, read: Callable[[], Bytes], gone: Callable[[], Any]
) -> Area:
    name = f"{kind} {len(world.history)}.{next(_names)}"
    area = world.add(Area(name, side, ptr, nbytes, read))
    extras(world)[name] = area, gone
    return area


def size_of(world: World) -> int:
    return world.rng.choice((5000, 9000, 4 * PAGE, 16 << 10))


def fill(world: World, array: Bytes) -> None:
    array[:] = np.frombuffer(world.rng.randbytes(array.size), np.uint8)


@operation(
    1,
    *("Device.alloc", "Memory", "Memory.ptr", "Memory.nbytes", "Memory.device", "Memory.host", "Memory.data_ptr"),
    "Memory.free",
)
def allocate(world: World) -> None:
    if len(extras(world)) >= MOST:
        return
    nbytes, host = size_of(world), world.rng.random() < 0.5
    chunks = not host and world.rng.random() < 0.3
    world.say(f"allocate {nbytes}, host {host}, chunks {chunks}")
    world.open_gates()
    buffer = Buffer(world.device, nbytes, "cpu" if host else "gpu")
    if chunks:
        buffer.memory = world.device.alloc(nbytes, chunks=True)
        buffer.ptr = buffer.memory.ptr
    buffer.put(np.frombuffer(world.rng.randbytes(nbytes), np.uint8))
    own = buffer.memory
    check(own.device == world.device and own.host == host and own.data_ptr() == own.ptr, "memory's facts")
    check(own.nbytes == nbytes, f"memory of {own.nbytes} bytes, asked for {nbytes}")
    name = "pinned" if host else "device"

    def gone() -> None:
        if world.rng.random() < 0.5:
            world.open_gates()
            own.free(PATIENCE)
            with suppress(kvswap.Error):
                check(own.ptr == 0, "freed memory has an address")
        buffer.memory = None  # its last reference: waits for nothing

    come(world, name, "cpu" if host else "gpu", own.ptr, nbytes, buffer.get, gone)


@operation(1, "memory.host_alloc", "memory.host_free", "fastdeploy.cuda_host_alloc", "fastdeploy.cuda_host_free")
def host_alloc(world: World) -> None:
    if len(extras(world)) >= MOST:
        return
    import kvswap.fastdeploy as fastdeploy

    nbytes, ours = size_of(world), world.rng.random() < 0.7
    world.say(f"host_alloc {nbytes}")
    world.open_gates()
    alloc, free = (
        (memory.host_alloc, memory.host_free) if ours else (fastdeploy.cuda_host_alloc, fastdeploy.cuda_host_free)
    )
    ptr = alloc(nbytes, device=world.device)
    fill(world, host_array(ptr, nbytes))

    def gone() -> None:
        world.open_gates()
        free(ptr)
        if not world.alone:  # another thread may have memory there by now
            return
        try:
            free(ptr)
        except ValueError:
            return
        check(False, "host_free() freed twice")

    come(world, "host_alloc", "cpu", ptr, nbytes, lambda: host_array(ptr, nbytes).copy(), gone)


@operation(1, "memory.host_register", "memory.host_unregister", "Device.register", "Device.unregister")
def register(world: World) -> None:
    if len(extras(world)) >= MOST:
        return
    nbytes = world.rng.choice((2, 5)) * PAGE
    room = np.empty(nbytes + PAGE, np.uint8)
    array = room[-address_of(room) % PAGE :][:nbytes]
    fill(world, array)
    ptr, by_device = address_of(array), world.rng.random() < 0.5
    world.say(f"register {nbytes}, by the device {by_device}")
    world.open_gates()
    if by_device:
        world.device.register(array if world.rng.random() < 0.5 else ptr, nbytes)
    else:
        memory.host_register(ptr, nbytes, device=world.device)

    def gone() -> None:
        world.open_gates()
        if by_device:
            world.device.unregister(ptr, PATIENCE)
        else:
            memory.host_unregister(ptr, timeout=PATIENCE)

    come(world, "registered", "cpu", ptr, nbytes, lambda: array.copy(), gone)


@operation(1.5)
def take_away(world: World) -> None:
    """Memory goes while transfers may use it."""
    if extras(world):
        name = world.rng.choice(list(extras(world)))
        world.say(f"take away {name}")
        if world.rng.random() < 0.3:
            world.settle()  # the last look at it
        area, gone = extras(world).pop(name)
        world.areas.remove(area)
        gone()


def leave(world: World) -> None:
    """All of them, at the round's end."""
    for name in list(extras(world)):
        area, gone = extras(world).pop(name)
        world.areas.remove(area)
        gone()


def abandon(world: World) -> None:
    """All of them, after a difference. What stayed registered would be pinned to every later allocation there."""
    for _, gone in extras(world).values():
        with suppress(Exception):
            gone()
    extras(world).clear()


# -- host pools -------------------------------------------------------------------------------------------------------


HOST_POOL = [
    *("num_blocks", "max_blocks", "slot_nbytes", "layers", "layer_nbytes", "layer_stride", "chunks", "layout", "pages"),
    *("state", "pinned", "numa_node", "device", "notices", "ready", "wait", "cancel", "grow", "shrink", "layer"),
    *("layer_ptrs", "pool", "close", "ptr", "nbytes", "mapped_nbytes"),
]


def pool_facts(pool: Any, world: World) -> None:
    check(pool.state == "ready" and pool.device == world.device, f"state {pool.state}")
    check(pool.nbytes == pool.num_blocks * pool.slot_nbytes <= pool.mapped_nbytes, "a pool's bytes")
    check(pool.layer_nbytes * pool.layers == pool.slot_nbytes, "a pool's layers")
    check(pool.chunks >= 1 and isinstance(pool.notices, tuple) and bool(pool.pages), "a pool's chunks")
    check(isinstance(pool.pinned, bool) and pool.ready(pool.num_blocks - 1), "a pool's blocks")
    check(pool.numa_node is None or isinstance(pool.numa_node, int | str), "a pool's node")


@operation(0.8, "memory.HostPool", *(f"memory.HostPool.{name}" for name in HOST_POOL))
def host_pool(world: World) -> None:
    """Comes up, is swapped to and from by layers and by slots, grows, shrinks and goes; several live side by side."""
    rng, layers = world.rng, world.rng.choice((1, 2, 3))
    blocks, layer_nbytes = rng.randint(4, 30), rng.choice((64, 700, 4096))
    layout = rng.choice(("block-first", "layer-first"))
    most = rng.choice((None, blocks + 20))
    world.say(f"host pool {blocks} x {layers} x {layer_nbytes}, {layout}, most {most}")
    world.open_gates()
    told: list[tuple[int, int]] = []
    pool = memory.HostPool(
        blocks,
        layers * layer_nbytes,
        max_blocks=most,
        device=world.device,
        layers=layers,
        layout=layout,
        pages=rng.choice(("default", "transparent")),
        chunk_nbytes=rng.choice((PAGE, 1 << 20)),
        threads=rng.choice((None, 2)),
        reserve=0,
        progress=lambda done, total: told.append((done, total)),
        wait=rng.random() < 0.5,
    )
    pool.wait(PATIENCE)
    try:
        pool_facts(pool, world)
        check(pool.layout == layout and pool.layers == layers and pool.max_blocks == (most or blocks), "a pool's shape")
        other = memory.HostPool(4, 100, device=world.device, reserve=0, wait=False)  # beside it
        other.cancel()
        other.close(PATIENCE)
        check(other.state == "closed", f"state {other.state}")
        use_host_pool(world, pool, blocks)
        if most:
            grown = rng.randint(blocks + 1, most)
            before = [pool.layer(layer).copy() for layer in range(layers)]
            pool.grow(grown, PATIENCE)
            same = [np.array_equal(pool.layer(layer)[:blocks], before[layer]) for layer in range(layers)]
            check(all(same) and pool.num_blocks == grown, "growing changed a pool")
            use_host_pool(world, pool, grown)
            before = [pool.layer(layer)[: blocks - 2].copy() for layer in range(layers)]
            pool.shrink(blocks - 2, PATIENCE)
            same = [np.array_equal(pool.layer(layer), before[layer]) for layer in range(layers)]
            check(all(same) and pool.num_blocks == blocks - 2, "shrinking changed a pool")
    finally:
        if rng.random() < 0.3:
            pool.close(PATIENCE, force=True)
        else:
            pool.close(PATIENCE)
    check(pool.state == "closed", "a closed pool")


def use_host_pool(world: World, pool: Any, blocks: int) -> None:
    """Its layers from a GPU area by the swap calls, its slots from a pool by move_blocks; all bytes compared."""
    rng, layers, nbytes = world.rng, pool.layers, pool.layer_nbytes
    rows = min(blocks, 8)
    gpu = [Memory(world.device, f"layer {i}", "gpu", rng.randbytes(rows * nbytes)) for i in range(layers)]
    model = [pool.layer(layer).copy() for layer in range(layers)]
    count = rng.randint(1, rows)
    ids, slots = rng.sample(range(rows), count), rng.sample(range(blocks), count)
    direction = rng.choice((kvswap.Direction.D2H, kvswap.Direction.H2D))
    kvswap.swap_cache_all_layers(
        np.array([area.ptr for area in gpu]), pool.layer_ptrs(), nbytes, rows, blocks, ids, slots, direction,
        cpu_stride=pool.layer_stride, device=world.device, path=rng.choice(world.paths),
    )  # fmt: skip
    for layer, area in enumerate(gpu):
        cache = area.model.reshape(rows, nbytes)
        if direction == kvswap.Direction.D2H:
            model[layer][slots] = cache[ids]
        else:
            cache[ids] = model[layer][slots]
    whole = Memory(world.device, "slots", "gpu", rng.randbytes(rows * layers * nbytes))
    source = kvswap.Pool(world.device, whole.buffer.memory, rows, layers * nbytes)
    target = pool.pool(name="of a host pool")
    ids, slots = rng.sample(range(rows), count), rng.sample(range(blocks), count)
    store = kvswap.move_blocks(source, target, ids, slots)
    back = rng.sample([slot for slot in range(rows) if slot not in ids], min(count, rows - count))
    load = kvswap.move_blocks(target, source, slots[: len(back)], back)  # comes behind the store by itself
    for transfer in (store, load):
        transfer.wait(PATIENCE)
    blocks_model = whole.model.reshape(rows, layers, nbytes)
    for layer in range(layers):
        model[layer][slots] = blocks_model[ids, layer]
        blocks_model[back, layer] = model[layer][slots[: len(back)]]
    for layer in range(layers):
        check(np.array_equal(pool.layer(layer), model[layer]), f"layer {layer} of a host pool differs")
    for area in (*gpu, whole):
        wrong = area.compare()
        check(not wrong, wrong)


# -- between processes ------------------------------------------------------------------------------------------------


SHARED_POOL = [
    *("num_blocks", "path", "generation", "owner", "owner_pid", "owner_alive", "slot_nbytes", "layers", "layer_nbytes"),
    *(
        "layer_stride",
        "chunks",
        "layout",
        "pages",
        "state",
        "pinned",
        "numa_node",
        "device",
        "notices",
        "ready",
        "wait",
    ),
    *("cancel", "claim", "publish", "retract", "published", "wait_ready", "unlink", "layer", "layer_ptrs", "pool"),
    *("close", "ptr", "nbytes", "mapped_nbytes"),
]


@operation(0.5, "memory.SharedPool", "memory.clean", *(f"memory.SharedPool.{name}" for name in SHARED_POOL))
def shared_pool(world: World) -> None:
    """One segment is mapped twice: bytes written through one mapping are read through the other."""
    if not os.path.isdir("/dev/shm"):
        return
    rng, name = world.rng, f"differential-{os.getpid()}-{next(_names)}"
    blocks, layers = rng.randint(3, 12), rng.choice((1, 2))
    shape: Any = {"layers": layers, "layout": rng.choice(("block-first", "layer-first")), "reserve": 0}
    world.say(f"shared pool of {blocks}, {shape}")
    world.open_gates()
    own = memory.SharedPool(name, blocks, layers * 512, create=True, device=world.device, **shape)
    other = None
    try:
        other = memory.SharedPool(
            name,
            blocks,
            layers * 512,
            create=False,
            generation=own.generation,
            device=world.device,
            register=False,
            **shape,
        )
        for pool in (own, other):
            pool.wait(PATIENCE)
            pool_facts(pool, world)
            check(pool.owner_pid == os.getpid() and pool.owner_alive, "a shared pool's owner")
            check(pool.layout == shape["layout"] and pool.layer_stride >= pool.layer_nbytes, "a shared pool's layout")
        check(
            own.owner and not other.owner and own.path == other.path and own.ptr != other.ptr, "a shared pool's owner"
        )
        check(own.generation == other.generation and len(own.layer_ptrs()) == layers, "a shared pool's generation")
        chosen = rng.sample(range(blocks), 2)
        check(bool(own.claim(chosen).all()) and not other.published(chosen).any(), "claim()")
        gpu = Memory(world.device, "shared", "gpu", rng.randbytes(4 * layers * 512))
        source, target = kvswap.Pool(world.device, gpu.buffer.memory, 4, layers * 512), own.pool()
        kvswap.move_blocks(source, target, [0, 3], chosen).wait(PATIENCE)
        own.publish(chosen)
        other.wait_ready(chosen, PATIENCE)
        check(bool(other.published(chosen).all()), "published()")
        cache = gpu.model.reshape(4, layers, 512)[[0, 3]]
        for layer in range(layers):
            check(
                np.array_equal(other.layer(layer)[chosen], cache[:, layer]), f"layer {layer} of a shared pool differs"
            )
        own.retract(chosen[:1])
        check(list(other.published(chosen)) == [False, True], "retract()")
        del source, target
        own.unlink()
        check(not os.path.exists(own.path), "unlink()")
        if rng.random() < 0.3:
            own.cancel()
        check(name not in memory.clean(), "clean() took a living pool")
    finally:
        for pool in (other, own):
            if pool is not None:
                pool.close(PATIENCE)


EXPORT = (
    "to_bytes",
    "from_bytes",
    "close",
    "device",
    "uuid",
    "owner",
    "nbytes",
    "offset",
    "allocation_nbytes",
    "dtype",
)
MAPPED = (
    "ptr",
    "nbytes",
    "shape",
    "dtype",
    "generation",
    "owner",
    "local",
    "closed",
    "device",
    "data_ptr",
    "pool",
    "close",
)


@operation(
    0.5,
    *("memory.export", "memory.open", "memory.export_event", "memory.open_event", "memory.Export", "memory.Mapped"),
    *("memory.Export.shape", "memory.Export.generation", "memory.Mapped.alive"),
    *(f"memory.Export.{name}" for name in EXPORT),
    *(f"memory.Mapped.{name}" for name in MAPPED),
)
def exports(world: World) -> None:
    """What this process exports and opens itself is the plain memory. (children.py opens it in another.)"""
    world.say("exports")
    world.open_gates()
    gpu = Memory(world.device, "exported", "gpu", world.rng.randbytes(8 * 600))
    pool, generation = kvswap.Pool(world.device, gpu.buffer.memory, 8, 600), world.rng.randrange(1, 1000)
    try:
        export = memory.export(pool, generation=generation)
    except kvswap.DeviceError:
        check(world.device.kind == "cuda", "a host device does not export")
        return
    again = memory.Export.from_bytes(export.to_bytes())
    check(again.generation == generation and again.owner == os.getpid() and again.nbytes >= 8 * 600 - 64, "an export")
    check(again.device == world.device.name and len(again.uuid) == 16, "an export's device")
    check(
        again.offset + again.nbytes <= again.allocation_nbytes and again.shape == () and again.dtype == "", "an export"
    )
    with memory.open(again, device=world.device, generation=generation) as mapped:
        check(isinstance(mapped, memory.Mapped), "open() gave something else")
        check(mapped.local and mapped.alive() and mapped.owner == os.getpid() and not mapped.closed, "a map of its own")
        check(mapped.ptr == mapped.data_ptr() == gpu.ptr and mapped.generation == generation, "a map's address")
        check(mapped.nbytes == again.nbytes and mapped.shape == () and mapped.dtype == "", "a map's shape")
        check(mapped.device == world.device, "a map's device")
    check(mapped.closed, "a closed map")
    mapped.close()
    export.close()
    if world.device.name.startswith("host:seed"):  # shares no events
        return
    event = kvswap.Event(world.device, timing=False, interprocess=True)
    try:
        memory.open_event(memory.export_event(event))
    except (ValueError, kvswap.Error):
        pass
    else:
        check(False, "an event of this process was opened")
