"""Operations: swaps by every call, streams, events, waits, layer events, the device's settings."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import gc
import time
from contextlib import suppress
from typing import Any

import numpy as np
from conftest import PATHS, PATIENCE, seam
from transfers import D2H, H2D, TINY, Side, Work, view

import kvswap
import kvswap.fastdeploy as fastdeploy
from differential.frame import CODE, Area, Tensor, Touched, Use, World, bits, cells, check, operation
from kvswap import testing, trtllm


def ids_as(world: World, ids: Any) -> Any:
    kind = world.rng.choice((np.int32, np.int64, list))
    return ids.tolist() if kind is list else ids.astype(kind)


class GpuIds:
    """Ids in GPU memory, written there in stream order: what was there before is no id of any block."""

    def __init__(self, world: World, ids: Any, stream: kvswap.Stream | None) -> None:
        self.dtype, self.step = np.dtype(world.rng.choice((np.int32, np.int64))), world.rng.choice((1, 1, 2, 3))
        self.count, nbytes = ids.size, ids.size * self.step * self.dtype.itemsize
        self.memory, self.staged = world.device.alloc(nbytes), world.device.alloc(nbytes, host=True)
        there = np.frombuffer(self.staged, self.dtype)
        there[:] = -7
        there[:: self.step] = ids
        self.named = stream is None  # without a stream of the call, a stream of the array's own
        self.stream = stream or kvswap.Stream(world.device)
        seam(world.device, "copy", self.memory.ptr, self.staged.ptr, nbytes, self.stream.handle)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.count,),
            "typestr": self.dtype.str,
            "data": (self.memory.ptr, True),
            "strides": (self.step * self.dtype.itemsize,),
            "version": 3,
            "stream": self.stream.handle if self.named else None,
        }


def on_the_gpu(world: World, ids: Any, most: int, write: bool, options: dict[str, Any], stream: Any) -> Any:
    """Sometimes the ids of the GPU's side as a GPU array, some of them bad, with the bad positions; else None."""
    rng = world.rng
    if not world.device.info["kernels"] or rng.random() > 0.25:
        return None
    options["path"] = rng.choice([path for path in world.paths if path in ("borrow", "burst", "kernel")])
    ids, bad = ids.astype(np.int64), set()
    if rng.random() < 0.3:
        for position in rng.sample(range(ids.size), rng.randint(1, ids.size)):
            ids[position] = rng.choice((-1, most, most + 5, -(1 << 30)))
            bad.add(position)
    if write and ids.size > 1 and rng.random() < 0.2:
        one, other = rng.sample(range(ids.size), 2)
        ids[one] = ids[other]
        bad |= {one, other}
    world.totals.events["ids on the GPU"] += 1
    world.totals.events["bad ids"] += len(bad)
    return GpuIds(world, ids, stream), np.array(sorted(bad), np.int64)


def scribble(*arrays: Any) -> None:
    """What was passed belongs to the caller again."""
    for array in arrays:
        if isinstance(array, np.ndarray):
            array.fill(1 << 30)


def both_ways(world: World) -> tuple[Area, Area, Work]:
    gpu, cpu = world.area("gpu"), world.area("cpu", "cpu", "plain", "peer")
    if world.device.kind == "cuda" and cpu.side == "plain":
        world.open_gates()  # a driver makes the caller wait for what is before such a copy
    return gpu, cpu, world.draw(gpu, cpu)


def brief(work: Work) -> str:
    way = "to the GPU" if work.direction == H2D else "to the host"
    sizes = set(work.nbytes)
    return f"{len(work.nbytes)} x {work.count} blocks of {sizes if len(sizes) < 4 else '...'} bytes {way}"


def touched(work: Work, gpu: Area, cpu: Area) -> Touched:
    here, there = cells(gpu, work.gpu, work.gpu_ids, work.nbytes), cells(cpu, work.cpu, work.cpu_ids, work.nbytes)
    if work.direction == H2D:
        return [(gpu, 0, here), (cpu, there, 0)]
    return [(gpu, here, 0), (cpu, 0, there)]


def places(work: Work, gpu: Area, cpu: Area, tensor: int) -> tuple[Any, Any]:
    """Byte positions of a tensor's blocks, as [block, byte], on both sides."""
    columns = np.arange(work.nbytes[tensor])
    sides = ((work.gpu, work.gpu_ids), (work.cpu, work.cpu_ids))
    here, there = (side.begins[tensor] + ids[:, None] * side.strides[tensor] + columns for side, ids in sides)
    return here, there


def carry(work: Work, gpu: Area, cpu: Area, lost: Any, bad: Any = ()) -> None:
    """On the model. lost: a bool for each block, or for each tensor's each block. bad: positions of those whose id the
    device found bad."""
    lost = np.broadcast_to(lost, (len(work.nbytes), work.count))
    for tensor, nbytes in enumerate(work.nbytes):
        if not lost[tensor].any() and not len(bad) and gpu.unknown is None and cpu.unknown is None:
            here, there = view(gpu.model, work.gpu, tensor, nbytes), view(cpu.model, work.cpu, tensor, nbytes)
            if work.direction == H2D:
                here[work.gpu_ids] = there[work.cpu_ids]
            else:
                there[work.cpu_ids] = here[work.gpu_ids]
            continue
        there, here = places(work, gpu, cpu, tensor)
        target, source, to, of = (gpu, cpu, there, here) if work.direction == H2D else (cpu, gpu, here, there)
        moved, gone = ~lost[tensor], lost[tensor].copy()
        moved[list(bad)] = gone[list(bad)] = False
        target.copy(to[moved], source, of[moved])
        target.forget(to[gone])
        if work.direction == D2H:
            target.set(to[list(bad)], np.uint8(0))


def use_of(
    world: World,
    text: str,
    work: Work,
    gpu: Area,
    cpu: Area,
    more: dict[str, Any],
    order: Any = None,
    bad: Any = (),
) -> Any:
    """What makes a Use of the transfer. order: the entries of a list, as indices of [tensor, block]. bad: positions of
    ids that the device finds bad."""

    def make(transfer: Any, faulted: bool) -> Use:
        def carry_out() -> None:
            failed = world.told(transfer, faulted or len(bad) > 0)
            right = set(bad) <= set(failed.tolist()) if faulted else len(bad) == 0 or failed.tolist() == list(bad)
            check(right, f"bad ids at {bad}, failed {failed.tolist()}")
            lost = np.zeros(work.count if order is None else len(work.nbytes) * work.count, bool)
            lost[failed if order is None else order[failed]] = True
            lost = lost if order is None else lost.reshape(len(work.nbytes), work.count)
            carry(work, gpu, cpu, lost, () if faulted else bad)
            check(transfer.num_blocks == (work.count if order is None else order.size), "num_blocks")
            check(transfer.nbytes == work.count * sum(work.nbytes), f"nbytes is {transfer.nbytes}")

        return Use(text, touched(work, gpu, cpu), carry_out, transfer, faulted=faulted, tainted=len(bad) > 0, **more)

    return make


def lists(world: World, work: Work, gpu: Area, cpu: Area) -> dict[str, Any]:
    """Arguments of the swap calls."""
    return {
        "gpu_ptrs": np.array(work.gpu.begins, np.int64) + gpu.ptr,
        "cpu_ptrs": np.array(work.cpu.begins, np.uint64) + np.uint64(cpu.ptr),
        "block_nbytes": np.array(work.nbytes, np.int64),
        "num_gpu_blocks": work.gpu.blocks,
        "num_cpu_blocks": work.cpu.blocks,
        "gpu_block_ids": ids_as(world, work.gpu_ids),
        "cpu_block_ids": ids_as(world, work.cpu_ids),
        "direction": kvswap.Direction(work.direction),
        "gpu_stride": np.array(work.gpu.strides),
        "cpu_stride": np.array(work.cpu.strides),
        "device": world.device,
    }


def one_layer(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same for the calls that take one tensor."""
    names = {"gpu_ptrs": "gpu_ptr", "cpu_ptrs": "cpu_ptr"}
    single = ("gpu_ptrs", "cpu_ptrs", "block_nbytes", "gpu_stride", "cpu_stride")
    return {names.get(key, key): int(value[0]) if key in single else value for key, value in arguments.items()}


class Blocks:
    """Blocks of one tensor, as torch has them: rows of bytes with a stride."""

    def __init__(self, ptr: int, blocks: int, nbytes: int, stride: int) -> None:
        self.ptr, self.shape, self.steps = ptr, (blocks, nbytes), (stride, 1)

    def data_ptr(self) -> int:
        return self.ptr

    def element_size(self) -> int:
        return 1

    def stride(self) -> tuple[int, int]:
        return self.steps


def as_tensors(work: Work, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same for copy_blocks()."""
    nbytes, sides = arguments["block_nbytes"], []
    for side in ("gpu", "cpu"):
        strides, blocks = arguments[f"{side}_stride"], arguments[f"num_{side}_blocks"]
        rows = zip(arguments[f"{side}_ptrs"], nbytes, strides, strict=True)
        sides.append(([Blocks(int(p), blocks, int(n), int(s)) for p, n, s in rows], arguments[f"{side}_block_ids"]))
    (src, src_ids), (dst, dst_ids) = sides if work.direction == D2H else reversed(sides)
    more = {key: arguments[key] for key in ("device", "layer_events", "after_layers") if key in arguments}
    return {"src": src, "dst": dst, "src_ids": src_ids, "dst_ids": dst_ids, **more}


@operation(
    24,
    "copy_blocks",
    "swap_cache_all_layers_async",
    "swap_cache_per_layer_async",
    "Direction",
    "Transfer.num_blocks",
    "Transfer.nbytes",
)
def swap(world: World) -> None:
    gpu, cpu, work = both_ways(world)
    stream = world.stream()
    options = world.options(stream, cpu)
    lane = (work.direction, options["priority"]) if stream is None and cpu.side != "peer" else None
    layered = world.rng.random() < 0.2
    arguments = lists(world, work, gpu, cpu)
    bad: Any = ()
    if cpu.side == "cpu" or (cpu.side == "plain" and world.device.kind == "host"):
        made = on_the_gpu(world, work.gpu_ids, work.gpu.blocks, work.direction == H2D, options, stream)
        arguments["gpu_block_ids"], bad = made or (arguments["gpu_block_ids"], ())
    text = f"swap {gpu.name}, {cpu.name}: {brief(work)} {options} layered {layered}"
    world.say(text)
    uses = touched(work, gpu, cpu)
    after = world.behind(uses, stream, lane)
    if layered:
        call, arguments["layer_events"] = kvswap.swap_cache_all_layers_async, True
        if len(after) < 2:  # before the first layer, as layers are copied in order
            arguments["after_layers"] = [*(after or [None]), *[None] * (len(work.nbytes) - 1)]
            after = []
    elif len(work.nbytes) == 1 and world.rng.random() < 0.7:
        call, arguments = kvswap.swap_cache_per_layer_async, one_layer(arguments)
    else:
        call = kvswap.swap_cache_all_layers_async
    if "gpu_ptrs" in arguments and cpu.side in ("cpu", "plain") and world.rng.random() < 0.3:
        call, arguments = kvswap.copy_blocks, as_tensors(work, arguments)
    more = {"stream": stream, "lane": lane}
    world.submit(
        lambda: call(**arguments, after=after, **options), use_of(world, text, work, gpu, cpu, more, None, bad)
    )
    scribble(*arguments.values())


@operation(2, "swap_cache_all_layers", "swap_cache_per_layer")
def swap_and_wait(world: World) -> None:
    gpu, cpu, work = both_ways(world)
    stream = world.stream()
    options, arguments = world.options(stream, cpu), lists(world, work, gpu, cpu)
    world.say(f"swap and wait {gpu.name}, {cpu.name}: {brief(work)} {options}")
    after = world.behind(touched(work, gpu, cpu), stream)
    world.open_gates()
    one = len(work.nbytes) == 1 and world.rng.random() < 0.5
    if one:
        kvswap.swap_cache_per_layer(**one_layer(arguments), after=after, **options)
    else:
        kvswap.swap_cache_all_layers(**arguments, after=after, **options)
    event = world.mark(stream or world.streams[0])
    world.uses.append(
        Use("swap and wait", touched(work, gpu, cpu), lambda: carry(work, gpu, cpu, False), event, stream)
    )


@operation(10, "swap_blocks_batch")
def batch(world: World) -> None:
    """By pointers, in an order of their own; also within the GPU's memory and within the host's."""
    gpu, cpu, work = both_ways(world)
    if world.rng.random() < 0.25:
        gpu, cpu = world.rng.sample([area for area in world.areas if area.side == "gpu" and area.nbytes >= 4096], 2)
        work = world.draw(gpu, cpu)
    elif world.rng.random() < 0.1 and world.device.kind == "host":
        gpu, cpu = world.rng.sample(world.areas[2:5], 2)
        work = world.draw(gpu, cpu)
    stream = world.stream()
    options = world.options(stream, gpu, cpu)
    order = np.arange(len(work.nbytes) * work.count)
    if world.rng.random() < 0.5:
        order = np.array(world.rng.sample(range(order.size), order.size))
    here = np.concatenate(
        [gpu.ptr + b + work.gpu_ids * s for b, s in zip(work.gpu.begins, work.gpu.strides, strict=True)]
    )
    there = np.concatenate(
        [cpu.ptr + b + work.cpu_ids * s for b, s in zip(work.cpu.begins, work.cpu.strides, strict=True)]
    )
    sizes: Any = np.repeat(np.array(work.nbytes, np.int64), work.count)[order]
    if len(set(work.nbytes)) == 1 and world.rng.random() < 0.5:
        sizes = work.nbytes[0]
    here, there = here[order].astype(np.int64), there[order].astype(np.uint64)
    ends = (there, here) if work.direction == H2D else (here, there)
    text = f"batch {gpu.name}, {cpu.name}: {brief(work)} {options}"
    world.say(text)
    after = world.behind(touched(work, gpu, cpu), stream)
    world.submit(
        lambda: kvswap.swap_blocks_batch(*ends, sizes, after=after, device=world.device, **options),
        use_of(world, text, work, gpu, cpu, {"stream": stream}, order),
    )
    scribble(here, there, sizes)


PAGES = {
    ("device", "host"): trtllm.copy_device_to_host,
    ("host", "device"): trtllm.copy_host_to_device,
    ("device", "device"): trtllm.copy_device_to_device,
    ("host", "host"): trtllm.copy_host_to_host,
}


@operation(
    2,
    *(
        "trtllm.batched_copy",
        "trtllm.copy_device_to_host",
        "trtllm.copy_host_to_device",
        "trtllm.copy_device_to_device",
    ),
    *("trtllm.copy_host_to_host", "trtllm.CopyTask", "trtllm.CacheTier"),
)
def pages(world: World) -> None:
    """TensorRT-LLM's calls: pages of one size, on a stream."""
    sides = world.rng.choice((("gpu", "cpu"), ("gpu", "cpu"), ("gpu", "gpu"), ("cpu", "cpu")))
    if sides == ("cpu", "cpu") and world.device.kind == "cuda":
        world.open_gates()
    if sides[0] == sides[1]:
        gpu, cpu = world.areas[:2] if sides[0] == "gpu" else world.areas[2:4]
    else:
        gpu, cpu = world.area("gpu"), world.area("cpu")
    work = world.draw(gpu, cpu)
    while len(work.nbytes) > 1:
        work = world.draw(gpu, cpu)
    stream = world.rng.choice(world.streams)
    ends = [(cpu, work.cpu, work.cpu_ids), (gpu, work.gpu, work.gpu_ids)]
    if work.direction == H2D:
        ends.reverse()
    dst, src = ([int(area.ptr + side.begins[0] + i * side.strides[0]) for i in ids] for area, side, ids in ends)
    tasks: Any = [trtllm.CopyTask(*pair) for pair in zip(dst, src, strict=True)]
    if world.rng.random() < 0.3:
        tasks = np.array(tasks, np.uint64)
    names = [{"gpu": "device", "cpu": "host"}[area.side] for area, _, _ in ends]
    text = f"trtllm {names[1]} to {names[0]} {gpu.name}, {cpu.name}: {brief(work)}"
    world.say(text)
    uses = touched(work, gpu, cpu)
    for thing in world.behind(uses, stream):
        if isinstance(thing, kvswap.Stream):
            thing = world.mark(thing)
        world.make_wait(thing, stream)
    if world.rng.random() < 0.5:
        tiers = [trtllm.CacheTier.GPU_MEM if name == "device" else trtllm.CacheTier.HOST_MEM for name in names]
        trtllm.batched_copy(*tiers, work.nbytes[0], tasks, stream)
    else:
        copy = PAGES[names[1], names[0]]
        result = copy(tasks, work.nbytes[0], stream, device=world.device)
        check(result == 0, f"result {result}")
    world.uses.append(Use(text, uses, lambda: carry(work, gpu, cpu, False), world.mark(stream), stream))


@operation(
    2,
    *("fastdeploy.swap_cache", "fastdeploy.swap_cache_all_layers", "fastdeploy.swap_cache_all_layers_async"),
    *("fastdeploy.swap_cache_per_layer", "fastdeploy.swap_cache_per_layer_async"),
    *("fastdeploy.swap_cache_layout", "fastdeploy.swap_cache_layout_async"),
)
def fastdeploy_swap(world: World) -> None:
    """FastDeploy's ops: caches of 16-bit elements, all blocks of one tensor side by side."""
    gpu, cpu = world.area("gpu", least=12000), world.area("cpu", least=12000)
    layers, shape = world.rng.choice((1, 1, 3)), (world.rng.randint(2, 12), 2, world.rng.choice((1, 4)), 8)
    nbytes, blocks = 2 * int(np.prod(shape[1:])), (shape[0], world.rng.randint(shape[0], 14))
    begins = [256 + layer * 4096 for layer in range(layers)]
    count = world.rng.randint(1, shape[0])
    ids = [np.array(world.rng.sample(range(most), count)) for most in blocks]
    direction, stream = world.rng.choice((D2H, H2D)), world.rng.choice(world.streams)
    sides = [Side(tuple(begins), (nbytes,) * layers, most, 0) for most in blocks]
    together = world.rng.random() < 0.3  # on the host all layers of a block side by side
    if together:
        at = tuple(256 + layer * nbytes for layer in range(layers))
        sides[1] = Side(at, (layers * nbytes,) * layers, blocks[1], 0)
    work = Work((nbytes,) * layers, *sides, *ids, direction)
    text = f"fastdeploy {gpu.name}, {cpu.name}: {brief(work)}"
    world.say(text)
    uses = touched(work, gpu, cpu)
    for thing in world.behind(uses, stream):
        world.make_wait(world.mark(thing) if isinstance(thing, kvswap.Stream) else thing, stream)
    tensors = [Tensor(world.device, gpu, begin, shape, "<f2") for begin in begins]
    ptrs = [cpu.ptr + begin for begin in begins]
    mode = 0 if direction == D2H else 1
    rest: Any = (blocks[1], ids[0].tolist(), ids[1].tolist(), 0, mode)
    options = {"stream": stream, "device": world.device}
    waits = world.rng.random() < 0.3
    if waits:
        world.open_gates()
    if together:
        call = fastdeploy.swap_cache_layout if waits else fastdeploy.swap_cache_layout_async
        transfer = call(tensors, cpu.ptr + 256, shape, *rest[1:], **options)
    elif layers == 1 and world.rng.random() < 0.7:
        call = world.rng.choice((fastdeploy.swap_cache, fastdeploy.swap_cache_per_layer))
        transfer = (call if waits else fastdeploy.swap_cache_per_layer_async)(tensors[0], ptrs[0], *rest, **options)
    else:
        call = fastdeploy.swap_cache_all_layers if waits else fastdeploy.swap_cache_all_layers_async
        transfer = call(tensors, ptrs, *rest, **options)
    more = {"stream": stream}
    make = use_of(world, text, work, gpu, cpu, more)
    if waits:
        event = world.mark(stream)
        world.uses.append(Use(text, uses, lambda: carry(work, gpu, cpu, False), event, **more))
    else:
        world.uses.append(make(transfer, False))


# -- the model's own work ---------------------------------------------------------------------------------------------


@operation(10, "Event.record")
def kernel(world: World) -> None:
    """Work of a model's on a stream of its own: it writes GPU memory, or reads it."""
    gpu, cpu = world.area("gpu"), world.area("cpu")
    stream, write = world.rng.choice(world.streams), world.rng.random() < 0.5
    nbytes = world.rng.randint(1, 2000)
    here, there = (world.rng.randrange(area.nbytes - nbytes) for area in (gpu, cpu))
    own, other = bits([here], [here + nbytes], gpu.nbytes), bits([there], [there + nbytes], cpu.nbytes)
    uses: Touched = [(gpu, 0, own), (cpu, other, 0)] if write else [(gpu, own, 0), (cpu, 0, other)]
    text = f"kernel {'writes' if write else 'reads'} {gpu.name}[{here}:{here + nbytes}], {cpu.name}[{there}:]"
    world.say(text)
    for thing in world.behind(uses, stream):
        world.make_wait(world.mark(thing) if isinstance(thing, kvswap.Stream) else thing, stream)
    ends = (gpu.ptr + here, cpu.ptr + there) if write else (cpu.ptr + there, gpu.ptr + here)
    seam(world.device, "copy", *ends, nbytes, stream.handle)

    def carry_out() -> None:
        target, to, source, of = (gpu, here, cpu, there) if write else (cpu, there, gpu, here)
        target.copy(np.arange(to, to + nbytes), source, np.arange(of, of + nbytes))

    world.uses.append(Use(text, uses, carry_out, world.mark(stream), stream))


@operation(3, "testing.delay")
def hold_up(world: World) -> None:
    choice = world.rng.random()
    if choice < 0.5:
        world.say("hold a stream")
        world.hold()
    elif choice < 0.8:
        world.say("open the gates")
        world.open_gates()
    else:
        world.say("delay a stream")
        testing.delay(world.device, world.rng.uniform(1e-6, 2e-4), world.rng.choice(world.streams))


# -- looking and waiting ----------------------------------------------------------------------------------------------


@operation(
    6,
    "Transfer",
    *(f"Transfer.{name}" for name in ("done", "wait", "cancel", "layer_done", "make_wait_layer", "make_wait")),
    *(
        f"Transfer.{name}"
        for name in ("device", "num_layers", "number", "lane", "sequence", "elapsed", "duration", "path", "state")
    ),
    *(f"Transfer.{name}" for name in ("event", "error", "failed_positions")),
)
def look(world: World) -> None:
    """At a transfer, whether it runs or has ended."""
    running = [use for use in world.uses if isinstance(use.transfer, kvswap.Transfer)]
    if not running:
        return
    use = world.rng.choice(running)
    transfer, choice = use.transfer, world.rng.randrange(7)
    world.say(f"look {choice} at {use.text[:60]}")
    if choice == 0:
        ended = transfer.done()
        check(not ended or transfer.state in ("done", "failed"), f"state {transfer.state}")
        check(not ended or (transfer.elapsed or 0) >= 0, f"elapsed {transfer.elapsed}")
        check(not ended or (transfer.duration or 0) > 0, f"duration {transfer.duration}")
    elif choice == 1:
        check(transfer.cancel() is False, "cancel() says that it stopped issued work")
    elif choice == 2:
        check(transfer.device == world.device and transfer.path in (*PATHS, "borrow"), f"path {transfer.path}")
        check(transfer.number >= 1 and transfer.sequence >= 1 and transfer.lane >= 0, "number, sequence, lane")
    elif choice == 3 and transfer.num_layers:
        layer, stream = world.rng.randrange(transfer.num_layers), world.rng.choice(world.streams)
        with suppress(*([kvswap.Error] if use.faulted or use.tainted else [])):
            transfer.layer_done(layer)
            transfer.make_wait_layer(layer, stream)
    elif choice == 4 and not world.gates:
        with suppress(*([kvswap.Error] if use.faulted or use.tainted else [])):
            transfer.wait(PATIENCE)
    elif choice == 5 and not use.faulted:
        check(transfer.event.device == world.device, "an event's device")
    else:
        try:
            transfer.wait(0)
            check(transfer.state == "done" and transfer.error is None, "wait() returned before the end")
        except TimeoutError:
            pass
        except kvswap.Error:
            check(use.faulted or use.tainted, f"failed without a fault: {transfer.error!r}")
            check(transfer.failed_positions.size > 0, "failed, with no failed block")


@operation(2)
def ask_again(world: World) -> None:
    """Transfers that ended stay as they are; nothing starts after one that failed."""
    world.say("ask again")
    for transfer in world.ended[-5:]:
        check(transfer.done() and transfer.cancel() is False, "an ended transfer")
    if not world.failed:
        return
    transfer = world.failed[-1]
    gpu, cpu, work = both_ways(world)
    for call in (
        lambda: kvswap.swap_cache_all_layers_async(**lists(world, work, gpu, cpu), after=[world.streams[0], transfer]),
        lambda: transfer.make_wait(world.streams[0]),
    ):
        try:
            call()
        except kvswap.Error as error:
            check(str(error) == str(transfer.error), f"{error!r}, not {transfer.error!r}")
        else:
            check(False, "something comes after a transfer that failed")


@operation(3, "Stream", "Stream.query", "Stream.synchronize", "Stream.handle", "Stream.device", "Device.synchronize")
def streams(world: World) -> None:
    world.say("streams")
    choice = world.rng.random()
    if choice < 0.4:
        number = world.rng.randrange(len(world.streams))
        if world.streams[number] is not world.compute:  # what is queued there goes on
            world.streams[number] = kvswap.Stream(
                world.device, priority=world.rng.choice(("high", "normal", "background"))
            )
    elif choice < 0.6:
        world.open_gates()
        stream = world.rng.choice(world.streams)
        stream.synchronize(PATIENCE)
        check(stream.query(), "a stream has work after synchronize()")
    elif choice < 0.8:
        world.open_gates()
        world.device.synchronize(PATIENCE)
    else:
        stream = world.rng.choice(world.streams)
        check(stream.device == world.device and stream.__cuda_stream__()[1] == stream.handle, "a stream's handle")


@operation(
    2, "Event", "Event.query", "Event.synchronize", "Event.elapsed_time", "Event.handle", "Event.device", "Event.wait"
)
def events(world: World) -> None:
    world.say("events")
    first, second = kvswap.Event(world.device), kvswap.Event(world.device)
    check(first.query(), "an event that was never recorded is not reached")
    stream, other = world.rng.sample(world.streams, 2)
    first.record(stream)
    second.record(stream)
    second.wait(other)
    check(first.device == world.device and first.handle != second.handle, "an event's handle")
    if world.rng.random() < 0.5:
        world.open_gates()
        second.synchronize(PATIENCE)
        check(first.query() and second.query(), "an event is not reached after synchronize()")
        check(first.elapsed_time(second) >= 0, "elapsed_time")


@operation(0.5, "Device.set_compute_stream", alone=True)
def compute_stream(world: World) -> None:
    world.compute = world.rng.choice((None, *world.streams))
    world.say(f"compute stream {world.compute}")
    world.device.set_compute_stream(0 if world.compute is None else world.compute)


@operation(0.3, "Device.set_defaults", alone=True)
def defaults(world: World) -> None:
    paths = ("auto", "dma") if world.device.kind == "cuda" else world.paths  # those that reach pageable memory
    path, priority = world.rng.choice(paths), world.rng.choice((None, "background"))
    world.say(f"defaults {path} {priority}")
    world.device.set_defaults(path=path, priority=priority, max_ctas=world.rng.choice((None, 2)), pace_gbps=None)


@operation(0.1, "Device.set_slots", alone=True)
def slots(world: World) -> None:
    nbytes, count = world.rng.choice((TINY, TINY, 2 * TINY, 0)), world.rng.choice((2, 3))
    if {"manager", "offload"} & set(world.parts):
        nbytes = nbytes or TINY  # those may have been told to go by path burst
    world.say(f"slots of {nbytes}, {count}")
    if world.device.info["kernels"]:
        world.open_gates()
        world.device.set_slots(nbytes, count, timeout=PATIENCE)
        by_slots = ["burst", *(["borrow"] if world.device.info["lenders"] else [])] if nbytes else []
        world.paths = [path for path in world.paths if path not in ("burst", "borrow")] + by_slots


@operation(0.2, "Device.lend", alone=True)
def lend(world: World) -> None:
    if world.lender is None or "burst" not in world.paths:
        return
    nbytes, count, share = (
        world.rng.choice((1, 1, 2)) * TINY,
        world.rng.choice((2, 3, 4)),
        world.rng.choice((0.3, 1, 3)),
    )
    world.say(f"{world.lender.name} lends {count} slots of {nbytes}, share {share}")
    world.open_gates()
    world.lender.lend(world.device, nbytes, count, share=share, timeout=PATIENCE)
    if "borrow" not in world.paths:
        world.paths.append("borrow")


@operation(
    1, "Device", "Device.name", "Device.kind", "Device.info", "Device.lost", "Device.stats", "devices", "DeviceInfo"
)
def facts(world: World) -> None:
    world.say("facts")
    device, stats = world.device, world.device.stats()
    check(not device.lost and device.kind in device.name, "a device's name")
    ended = stats["done"] + stats["failed"] + stats["cancelled"] + stats["unfinished"]
    still = world.alone and not any(use.by_host for use in world.uses)  # those submit beside this
    check(not still or stats["submitted"] == ended, f"transfers do not add up: {stats}")
    check(device.info["memory"] >= 0, "info")
    if world.rng.random() < 0.1 and device.name == "host:0":
        check(kvswap.Device(device.name) == device, "the same name is another device")
        check(any(isinstance(info, kvswap.DeviceInfo) for info in kvswap.devices()), "devices()")


@operation(3, "Error")
def wrong_arguments(world: World) -> None:
    """Refused before anything moves."""
    gpu, cpu, work = both_ways(world)
    arguments = lists(world, work, gpu, cpu)
    kind = world.rng.choice(("id", "negative", "twice", "length", "direction", "address", "path"))
    world.say(f"wrong: {kind}")
    target = "gpu_block_ids" if work.direction == H2D else "cpu_block_ids"
    ids = [int(i) for i in arguments[target]]
    if kind in ("id", "negative"):
        ids[world.rng.randrange(len(ids))] = -1 if kind == "negative" else work.gpu.blocks + work.cpu.blocks
    elif kind == "twice":
        ids += ids[:1]
        other = "cpu_block_ids" if target == "gpu_block_ids" else "gpu_block_ids"
        arguments[other] = [*map(int, arguments[other]), int(arguments[other][0])]
    elif kind == "length":
        ids += [0]
    elif kind == "direction":
        arguments["direction"] = 2
    elif kind == "address":
        arguments["cpu_ptrs"] = np.array([16] * len(work.nbytes), np.uint64)
    else:
        arguments["path"] = "by foot"
    arguments[target] = ids
    before = world.device.stats()["submitted"]
    try:
        kvswap.swap_cache_all_layers_async(**arguments)
    except (ValueError, IndexError, TypeError):
        pass
    else:
        check(False, f"a wrong argument was taken: {kind}")
    alone = world.alone and not any(use.by_host for use in world.uses)
    check(not alone or world.device.stats()["submitted"] == before, "a refused call submitted a transfer")


@operation(0.5, "testing.capture", alone=True)
def captured(world: World) -> None:
    """A stream that records a graph is refused."""
    if world.device.kind != "host":
        return
    world.say("captured")
    gpu, cpu, work = both_ways(world)
    stream = kvswap.Stream(world.device)
    with testing.capture(world.device, stream):
        try:
            kvswap.swap_cache_all_layers_async(**lists(world, work, gpu, cpu), stream=stream)
        except kvswap.Error as error:
            check("captured" in str(error), f"{error!r}")
        else:
            check(False, "a captured stream took a transfer")


@operation(0.5, alone=True)
def late_calls(world: World) -> None:
    """A driver whose calls return late."""
    world.say("a late call")
    with testing.fault(world.device, "call", "delay", nth=world.rng.randint(1, 6), delay=0.0005):
        swap(world)


@operation(0.3, "QueueFull", "testing.set_lane_depth", alone=True)
def full(world: World) -> None:
    """A full lane refuses a transfer with QueueFull, and takes more after some have ended. On a device of this
    operation's own, because lanes that are used again keep the depth that they were made with."""
    seed, depth = world.rng.getrandbits(30) | 1, world.rng.randint(1, 6)
    world.say(f"full: device {seed}, depth {depth}")
    device = testing.deterministic_device(seed)
    testing.set_lane_depth(device, depth)
    inner = World(device, world.rng, world.totals, world.folder, alone=False)
    gpu, cpu = inner.areas[0], inner.areas[2]
    work, stream, gate = inner.draw(gpu, cpu), kvswap.Stream(device), kvswap.Stream(device)
    seam(device, "wait32", inner.word_memory.ptr, 1, gate.handle)
    taken, arguments = [], lists(inner, work, gpu, cpu)
    try:
        while len(taken) <= depth:
            taken.append(kvswap.swap_cache_all_layers_async(**arguments, stream=stream, after=gate))
        check(False, f"a lane of depth {depth} took {len(taken)} transfers")
    except kvswap.QueueFull:
        check(len(taken) == depth, f"a lane of depth {depth} took {len(taken)} transfers")
    inner.words[0] = 1
    for transfer in taken:
        transfer.wait(PATIENCE)
    taken.append(kvswap.swap_cache_all_layers_async(**arguments, stream=stream, after=gate))
    for transfer in taken:
        inner.uses.append(use_of(inner, "full", work, gpu, cpu, {"stream": stream})(transfer, False))
    inner.close()


@operation(1)
def drop(world: World) -> None:
    """Objects go while what they stand for runs."""
    world.say("drop")
    gpu, cpu, work = both_ways(world)
    stream = kvswap.Stream(world.device)
    after = world.behind(touched(work, gpu, cpu), stream)
    kvswap.swap_cache_all_layers_async(**lists(world, work, gpu, cpu), stream=stream, after=after)
    event = world.mark(stream)
    world.uses.append(Use("dropped swap", touched(work, gpu, cpu), lambda: carry(work, gpu, cpu, False), event, stream))
    del stream
    if world.rng.random() < 0.01:
        gc.collect()


@operation(0.3, "DeviceError", alone=True)
def refused_query(world: World) -> None:
    """A query that the driver refuses is no end of anything."""
    right = (use for use in world.uses if isinstance(use.transfer, kvswap.Transfer) and not use.tainted)
    use = next((use for use in right if not use.faulted), None)
    if use is None:
        return
    world.say("refused query")
    with testing.fault(world.device, "call", "fail", operation="event_query", every=1, code=CODE):
        begin = time.monotonic()
        with suppress(TimeoutError, kvswap.DeviceError):
            use.transfer.wait(0.01)
        check(time.monotonic() - begin < PATIENCE / 2, "a wait went beyond its limit")
