"""Operations: a pool in host memory whose blocks are coded, and one on the device. Which blocks fit, and which slots
hold a block, is what kvswap.codecs says of the model's bytes."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np

import kvswap
from differential.copies import ids_as
from differential.frame import Memory, Use, World, check, operation
from differential.pools import GOOD, LOST, MAYBE, Group, lay, slots_of, touched
from kvswap import testing
from kvswap.codecs import CODECS, Coding, Field

PAGES = 3
SLOTS = {"gpu": 7, "cpu": 6}


class Coded:
    """A layer-first pool of normal values, some of which no codec without loss can hold, and its coded blocks."""

    def __init__(self, world: World) -> None:
        rng = world.rng
        page = rng.choice((528, 2048, 33 << 10))
        self.page = Coding(page, rng.choice(CODECS), fields=[Field(0, page - 16, "bf16")])
        self.whole = Coding(page * PAGES, self.page.codec, page_nbytes=page, fields=self.page.fields)
        values = np.random.default_rng(rng.getrandbits(32)).standard_normal(
            SLOTS["gpu"] * PAGES * page // 2, np.float32
        )
        data = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).copy()
        for _ in range(rng.choice((0, 0, 1, 3))):
            at = rng.randrange(data.size - 512)
            data[at : at + 512] = np.frombuffer(rng.randbytes(512), np.uint8)
        gpu = world.add(Memory(world.device, "coded gpu", "gpu", data.tobytes()))
        cpu = world.add(Memory(world.device, "coded cpu", "cpu", rng.randbytes(SLOTS["cpu"] * self.whole.coded_nbytes)))
        self.gpu = Group("coded gpu", [lay(kvswap.Pool(
            world.device, gpu.ptr, SLOTS["gpu"], PAGES * page, rows=PAGES, stride=page, pitch=SLOTS["gpu"] * page
        ), gpu)])  # fmt: skip
        pool = kvswap.Pool(world.device, cpu.ptr, SLOTS["cpu"], self.whole.coded_nbytes, coding=self.whole)
        check(pool.coding is self.whole, "a pool's coding")
        self.cpu = Group("coded cpu", [lay(pool, cpu)])

    def columns(self, stores: bool, pages: list[int]) -> tuple[Any, Any]:
        """Bytes of a block, of source and target, that are these pages."""
        sizes = self.page.block_nbytes, self.page.coded_nbytes
        of_gpu, of_cpu = (np.concatenate([page * size + np.arange(size) for page in pages]) for size in sizes)
        return (of_gpu, of_cpu) if stores else (of_cpu, of_gpu)


def coded_of(world: World) -> Coded:
    if "coded" not in world.parts:
        world.parts["coded"] = Coded(world)
    return world.parts["coded"]


@operation(10, "Pool.coding")
def move_coded(world: World) -> None:
    if not world.device.info["kernels"]:
        return
    coded = coded_of(world)
    stores = world.rng.random() < 0.5
    source, target = (coded.gpu, coded.cpu) if stores else (coded.cpu, coded.gpu)
    src, dst = slots_of(world, source, target)
    stream = world.stream()
    options = world.options(stream)
    options["path"] = world.rng.choice(("auto", "burst", "kernel"))
    pages = list(range(PAGES))
    if world.rng.random() < 0.3:
        pages = sorted(world.rng.sample(pages, world.rng.randint(1, PAGES)))
        size = coded.page.block_nbytes
        options["parts"] = np.array([(0, i, page * size, 1, size, size) for i, page in enumerate(pages)])
    if world.rng.random() < 0.2:
        options["layer_events"] = True
    text = f"move_coded {source.name}{src.tolist()} -> {target.name}{dst.tolist()} {options}".replace("\n", "")
    world.say(text)
    uses = touched(source, target, src, dst)
    after = world.behind(uses, stream, pooled=True)
    src_ids, dst_ids = ids_as(world, src), ids_as(world, dst)

    def make(transfer: Any, faulted: bool) -> Use:
        def carry_out() -> None:
            carry(world, coded, stores, src, dst, pages, transfer, faulted)

        return Use(text, uses, carry_out, transfer, stream, pooled=True, faulted=faulted, tainted=True)

    pools = source.ones[0].pool, target.ones[0].pool

    def call() -> kvswap.Transfer:
        try:
            return kvswap.move_blocks(*pools, src_ids, dst_ids, after=after, **options)
        except kvswap.Error as error:  # the slots were given back; the device's default does not code
            if "is off" not in str(error) and "moves bytes as they are" not in str(error):
                raise
            return kvswap.move_blocks(*pools, src_ids, dst_ids, after=after, **{**options, "path": "kernel"})

    world.submit(call, make)


def carry(
    world: World, coded: Coded, stores: bool, src: Any, dst: Any, pages: list[int], transfer: Any, faulted: bool
) -> None:
    source, target = (coded.gpu, coded.cpu) if stores else (coded.cpu, coded.gpu)
    one, other = source.ones[0], target.ones[0]
    of, to = coded.columns(stores, pages)
    there = np.ascontiguousarray(one.area.model[one.where[src][:, of]])
    unknown = np.zeros(len(src), bool)
    if one.area.unknown is not None:
        unknown = one.area.unknown[one.where[src][:, of]].any(axis=1)
    made, verdicts = (coded.page.encode if stores else coded.page.decode)(there)
    made, bad = made.reshape(len(src), -1), verdicts.reshape(len(src), -1).any(axis=1)
    was = source.state[src]
    failed = world.told(transfer, faulted or bool((bad | unknown | (was != GOOD)).any()))
    lost = np.zeros(len(src), bool)
    lost[failed] = True
    check(bool(lost[was == LOST].all()), f"moves of lost slots {src[was == LOST]} say that they are done")
    check(bool(lost[bad & ~unknown].all()), f"what cannot be coded, {src[bad]}, says that it is done")
    right = faulted or not lost[(was == GOOD) & ~bad & ~unknown].any()
    check(bool(right), f"good blocks failed: {transfer.error!r}, {failed.tolist()}, slots are {was.tolist()}")
    world.totals.events["blocks that no codec holds"] += int((bad & ~unknown).sum())
    world.totals.events["blocks coded"] += int((~lost).sum())
    sure = ~unknown & (~lost | (bad & (was == GOOD) & (not faulted)))
    where = other.where[dst][:, to]
    other.area.set(where[sure], made[sure])
    other.area.forget(where[~sure])
    target.state[dst[lost]] = LOST
    arrived = dst[~lost]
    if len(pages) == PAGES:
        target.state[arrived] = GOOD
    else:
        target.state[arrived[target.state[arrived] == LOST]] = MAYBE
    check(transfer.num_blocks == len(src), "num_blocks")


@operation(2)
def write_what_is_coded(world: World) -> None:
    """Other work has written these blocks, whole: what a failed transfer left there no longer counts."""
    if not world.device.info["kernels"]:
        return
    coded = coded_of(world)
    group = world.rng.choice((coded.gpu, coded.cpu))
    slots = np.array(world.rng.sample(range(group.slots), 2))
    stream = world.rng.choice(world.streams)
    text = f"note {group.name}{slots.tolist()}"
    world.say(text)
    uses = [(group.ones[0].area, 0, group.bits(0, slots))]
    for thing in world.behind(uses, stream):
        world.make_wait(world.mark(thing) if isinstance(thing, kvswap.Stream) else thing, stream)
    testing.note_access(stream, group.ones[0].pool, slots, True)

    def carry_out() -> None:
        group.state[slots] = GOOD

    world.uses.append(Use(text, uses, carry_out, world.mark(stream), stream))
