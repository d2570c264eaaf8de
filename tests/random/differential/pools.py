"""Operations: pools, which order their transfers and remember what failed, and the transfer manager over them."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import kvswap
from differential.copies import ids_as, on_the_gpu
from differential.frame import CELL, Area, Difference, Memory, Touched, Use, World, bits, check, operation
from kvswap import testing
from kvswap.trtllm import Block, KVCacheBlockPool, KVCacheTransferManager, KvCacheTransferStats, TransferMode

GOOD, LOST, MAYBE = 0, 1, 2  # what a slot is to a reader: MAYBE where the documents leave it open
TOKENS = 4
SHAPES: tuple[dict[str, Any], ...] = (
    {"num_layers": 2, "kv_factor": 2, "num_kv_heads": 1, "size_per_head": 40, "dtype": "fp8"},  # blocks of 640 bytes
    {"num_layers": 3, "kv_factor": 1, "num_kv_heads": 1, "size_per_head": 2, "dtype": "fp16"},  # of 48
)


@dataclass(eq=False)
class One:
    """A pool and, for each slot, where its bytes lie in the area, in the block's own order."""

    pool: kvswap.Pool
    area: Area
    where: Any  # int array [slot, byte]


class Group:
    """Pools that share their slots: a block is a slot of each."""

    def __init__(self, name: str, ones: list[One]) -> None:
        self.name, self.ones = name, ones
        self.slots = ones[0].pool.num_blocks
        self.state = np.zeros(self.slots, np.int8)  # at the point that the model has reached
        self.nbytes = [one.pool.block_nbytes for one in ones]
        self.cells = [[sum(1 << int(cell) for cell in np.unique(row // CELL)) for row in one.where] for one in ones]

    def bits(self, one: int, slots: Any) -> int:
        found = 0
        for slot in slots:
            found |= self.cells[one][slot]
        return found

    def block(self, slots: Any) -> tuple[list[One], Any]:
        return self.ones, slots


def lay(pool: kvswap.Pool, area: Area) -> One:
    """From what the pool says of itself."""
    row = pool.block_nbytes // pool.rows
    begins = pool.ptr - area.ptr + np.arange(pool.num_blocks)[:, None] * pool.stride
    within = (np.arange(pool.rows)[:, None] * pool.pitch + np.arange(row)).reshape(-1)
    return One(pool, area, begins + within)


def open_group(world: World, name: str, area: Area, nbytes: list[int], slots: int, rows: int) -> Group:
    """Pools of these sizes in one area. rows: of each block, far apart, as layers of a layer-first cache."""
    ones: list[One] = []
    at = 64
    for number, size in enumerate(nbytes):
        options: dict[str, Any] = {"group": ones[0].pool if ones else None, "name": f"{name} {number}"}
        if rows > 1 and size % rows == 0:
            row = size // rows
            options |= {"rows": rows, "stride": row, "pitch": slots * row}
            taken = slots * size
        else:
            gap = world.rng.choice((0, 0, 24))
            options |= {"stride": size + gap}
            taken = slots * (size + gap)
        pool = kvswap.Pool(world.device, area.ptr + at, slots, size, **options)
        check(pool.device == world.device and pool.name == f"{name} {number}", "a pool's name")
        check((pool.group is None) == (number == 0), "a pool's group")
        ones.append(lay(pool, area))
        at += taken + 64
    assert at <= area.nbytes
    return Group(name, ones)


def groups_of(world: World) -> list[Group]:
    """Made when the round first wants them: pools of three memories, and those of a manager."""
    if "groups" not in world.parts:
        rng, sides = world.rng, world.device
        nbytes = rng.choice(([256], [48, 512], [96, 7, 1000]))
        rows = rng.choice((1, 1, 2, 8))
        made = []
        for name, side, slots in (("pool a", "gpu", 9), ("pool b", "gpu", 7), ("pool c", "cpu", 11)):
            area = world.add(Memory(sides, name, side, rng.randbytes(16 << 10)))
            made.append(open_group(world, name, area, nbytes, slots, rows if side == "gpu" else 1))
        world.parts["groups"] = made
    return world.parts["groups"]


def touched(source: Group, target: Group, src: Any, dst: Any) -> Touched:
    uses = [(one.area, source.bits(i, src), 0) for i, one in enumerate(source.ones)]
    return uses + [(one.area, 0, target.bits(i, dst)) for i, one in enumerate(target.ones)]


def use_of(
    world: World,
    text: str,
    source: Group,
    target: Group,
    src: Any,
    dst: Any,
    columns: Any,
    stream: Any,
    positions: int,
    found: Any = None,
    pooled: bool = True,
) -> Any:
    """columns: for each pair of pools the bytes of a block that are moved; None: all of them. found: of ids on the
    GPU, the positions of bad ones, and whether they name sources."""
    bad = np.zeros(positions, bool)
    if found is not None:
        bad[found[0]] = True

    def make(transfer: Any, faulted: bool) -> Use:
        def carry_out() -> None:
            was = source.state[src]
            failed = world.told(transfer, faulted or bool((was != GOOD).any()) or bool(bad.any()))
            lost = np.zeros(positions, bool)
            lost[failed] = True
            check(bool(lost[was == LOST].all()), f"reads of lost slots {src[was == LOST]} say that they are done")
            check(bool(lost[bad].all()), f"bad ids at {np.flatnonzero(bad)}, failed {failed.tolist()}")
            right = faulted or not lost[(was == GOOD) & ~bad].any()
            check(bool(right), f"good slots failed: {transfer.error!r}, {failed.tolist()}, slots are {was.tolist()}")
            world.totals.events["blocks lost behind others"] += int(lost[was != GOOD].sum())
            of_sources = found is not None and found[1]
            zeros = bad if of_sources and not faulted else np.zeros(positions, bool)
            alone = bad if found is not None and not found[1] else np.zeros(positions, bool)
            move(source, target, src, dst, columns, lost, zeros, alone)
            target.state[dst[lost & ~alone]] = LOST
            if faulted and found is not None and not found[1] and lost.all():  # perhaps not even its ids are known
                target.state[target.state == GOOD] = MAYBE
            arrived = dst[~lost]
            covered = [columns is None or len(columns[i]) == nbytes for i, nbytes in enumerate(target.nbytes)]
            if all(covered):
                target.state[arrived] = GOOD
            elif any(covered):  # known pool by pool: the lost one may be among those that are whole again
                target.state[arrived[target.state[arrived] == LOST]] = MAYBE
            check(transfer.num_blocks == positions, "num_blocks")

        uses = touched(source, target, src, dst)
        tainted = faulted or bool(bad.any()) or bool((source.state[src] != GOOD).any())
        tainted |= any(use.tainted and use.conflicts(uses) for use in world.uses)
        return Use(text, uses, carry_out, transfer, stream, pooled=pooled, faulted=faulted, tainted=tainted)

    return make


def move(
    source: Group, target: Group, src: Any, dst: Any, columns: Any, lost: Any, zeros: Any = False, alone: Any = False
) -> None:
    """lost, and of these blocks that become zeros, and those that are left alone."""
    for i, (one, other) in enumerate(zip(source.ones, target.ones, strict=True)):
        which = np.arange(one.where.shape[1]) if columns is None else columns[i]
        to, of = other.where[dst][:, which], one.where[src][:, which]
        other.area.copy(to[~lost], one.area, of[~lost])
        other.area.forget(to[lost & ~zeros & ~alone])
        other.area.set(to[lost & zeros], np.uint8(0))


def slots_of(world: World, source: Group, target: Group) -> tuple[Any, Any]:
    count = world.rng.choice((1, 1, 2, 3, 5))
    if source is target:
        count = min(count, source.slots // 2)
        both = world.rng.sample(range(source.slots), 2 * count)
        return np.array(both[:count]), np.array(both[count:])
    count = min(count, source.slots, target.slots)
    return tuple(np.array(world.rng.sample(range(group.slots), count)) for group in (source, target))


def parts_of(world: World, group: Group, layers: int) -> tuple[Any, Any]:
    """Some bytes of each block, in layers: rows of move_blocks' parts, and the columns that they move."""
    rows, columns = [], []
    for pair, nbytes in enumerate(group.nbytes):
        which = []
        for layer in range(layers):
            begin, end = nbytes * layer // layers, nbytes * (layer + 1) // layers
            if end - begin >= 4:
                half = (end - begin) // 2
                width = world.rng.randint(1, half)
                rows.append((pair, layer, begin, 2, width, half))
                which += [begin + column for row in (0, half) for column in range(row, row + width)]
            elif end > begin:
                rows.append((pair, layer, begin, 1, end - begin, end - begin))
                which += range(begin, end)
        columns.append(np.array(which, np.int64))
    rows.sort(key=lambda row: (row[1], row[0]))
    numbers = sorted({row[1] for row in rows})
    return np.array([(row[0], numbers.index(row[1]), *row[2:]) for row in rows], np.int64), columns


@operation(
    24,
    *("move_blocks", "Pool", "Pool.ptr", "Pool.num_blocks", "Pool.block_nbytes", "Pool.stride", "Pool.rows"),
    *("Pool.pitch", "Pool.group", "Pool.name", "Pool.device"),
)
def move_blocks(world: World) -> None:
    groups = groups_of(world)
    source, target = world.rng.choice(groups), world.rng.choice(groups)
    if source is target or (source.ones[0].area.side, target.ones[0].area.side) == ("cpu", "cpu"):
        target = source if source.ones[0].area.side == "gpu" else groups[0]
    submit(world, source, target)


def submit(world: World, source: Group, target: Group) -> None:
    src, dst = slots_of(world, source, target)
    stream = world.stream()
    options, columns = world.options(stream), None
    layers = world.rng.choice((1, 2, 3))
    if world.rng.random() < 0.3:
        options["parts"], columns = parts_of(world, source, layers)
    if world.rng.random() < 0.2:
        options["layer_events"] = True
    src_ids, dst_ids = ids_as(world, src), ids_as(world, dst)
    sides_on = [group.ones[0].area.side == "gpu" for group in (source, target)]
    by_src = sides_on[0] and not (sides_on[1] and world.rng.random() < 0.5)
    found, pooled = None, True
    if source is not target and any(sides_on):
        ids, group = (src, source) if by_src else (dst, target)
        made = on_the_gpu(world, ids, group.slots, not by_src, options, stream)
        if made is not None:
            src_ids, dst_ids = (made[0], dst_ids) if by_src else (src_ids, made[0])
            found = made[1], by_src
            pooled = world.rng.random() < 0.7
            options["gpu_order"] = "pool" if pooled else "stream"
    text = f"move_blocks {source.name}{src.tolist()} -> {target.name}{dst.tolist()} {options}".replace("\n", "")
    text += f" bad {found}" if found else ""
    world.say(text)
    after = world.behind(touched(source, target, src, dst), stream, pooled=pooled)
    if len(after) == 1 and world.rng.random() < 0.3:
        count = int(options["parts"][:, 1].max()) + 1 if "parts" in options else len(source.ones)
        options["after_layers"], after = [*after, *[None] * (count - 1)], []
    sides: Any = [[one.pool for one in group.ones] for group in (source, target)]
    if len(source.ones) == 1:
        sides = [side[0] for side in sides]
    world.submit(
        lambda: kvswap.move_blocks(*sides, src_ids, dst_ids, after=after, **options),
        use_of(world, text, source, target, src, dst, columns, stream, src.size, found, pooled),
    )
    for array in (src_ids, dst_ids, options.get("parts")):
        if isinstance(array, np.ndarray):
            array.fill(1 << 30)


@operation(2, "testing.note_access", "testing.note_order")
def note(world: World) -> None:
    """Other work writes these slots on some stream, which replaces what a failed transfer left there."""
    group = world.rng.choice(groups_of(world))
    slots = np.array(world.rng.sample(range(group.slots), 2))
    stream = world.rng.choice(world.streams)
    write = world.rng.random() < 0.8
    text = f"note {group.name}{slots.tolist()} write {write}"
    world.say(text)
    uses: Touched = [(one.area, 0, group.bits(i, slots)) for i, one in enumerate(group.ones)]
    for thing in world.behind(uses, stream):
        world.make_wait(world.mark(thing) if isinstance(thing, kvswap.Stream) else thing, stream)
    for one in group.ones:
        testing.note_access(stream, one.pool, slots, write)
    testing.note_order(stream, None, device=world.device)

    def carry_out() -> None:
        if write:
            group.state[slots] = GOOD

    world.uses.append(Use(text, uses, carry_out, world.mark(stream), stream))


@operation(3)
def write_a_pool(world: World) -> None:
    """A plain copy into a slot, which the pool knows nothing of."""
    group = world.rng.choice(groups_of(world)[:2])
    number, slot = world.rng.randrange(len(group.ones)), world.rng.randrange(group.slots)
    one, cpu = group.ones[number], world.area("cpu")
    if one.pool.rows > 1:
        return
    begin, nbytes = int(one.where[slot, 0]), one.pool.block_nbytes
    there = world.rng.randrange(cpu.nbytes - nbytes)
    stream = world.stream()
    options = world.options(stream)
    uses: Touched = [(one.area, 0, bits([begin], [begin + nbytes], one.area.nbytes))]
    uses.append((cpu, bits([there], [there + nbytes], cpu.nbytes), 0))
    text = f"write {group.name} {number}[{slot}] from {cpu.name}[{there}:]"
    world.say(text)
    after = world.behind(uses, stream)

    def make(transfer: Any, faulted: bool) -> Use:
        def carry_out() -> None:
            where = one.where[slot]
            if world.told(transfer, faulted).size:
                one.area.forget(where)
            else:
                one.area.copy(where, cpu, np.arange(there, there + nbytes))

        return Use(text, uses, carry_out, transfer, stream, faulted=faulted)

    ptrs = np.array([cpu.ptr + there]), np.array([one.area.ptr + begin])
    world.submit(lambda: kvswap.swap_blocks_batch(*ptrs, nbytes, after=after, device=world.device, **options), make)


# -- the transfer manager ---------------------------------------------------------------------------------------------


class Managed:
    """A manager over pools of two shapes, and its blocks in files."""

    def __init__(self, world: World) -> None:
        self.world = world
        slots, pools, areas = {True: 7, False: 6}, [], []
        for number, shape in enumerate(SHAPES):
            width = KVCacheBlockPool(1, 1, 1, 1, tokens_per_block=TOKENS, **shape).nbytes()
            sides = [(True, "gpu"), (False, "cpu")]
            pair = [
                world.add(
                    Memory(world.device, f"manager {side} {number}", side, world.rng.randbytes(slots[primary] * width))
                )
                for primary, side in sides
            ]
            areas.append(pair)
            pools.append(
                KVCacheBlockPool(pair[0].ptr, pair[1].ptr, slots[True], slots[False], tokens_per_block=TOKENS, **shape)
            )
        path = world.rng.choice(world.paths)
        self.manager = KVCacheTransferManager(
            pools,
            device=world.device,
            path=path,
            file_options={"capacity": 4 << 20, "segment_nbytes": 1 << 20, "staging_nbytes": 1 << 20},
        )
        self.pools = pools
        manager = self.manager
        self.groups = {
            True: Group(
                "primary", [lay(pool, pair[0]) for pool, pair in zip(manager.primary_pools, areas, strict=True)]
            ),
            False: Group(
                "secondary", [lay(pool, pair[1]) for pool, pair in zip(manager.secondary_pools, areas, strict=True)]
            ),
        }
        self.columns = [self.moved(tokens) for tokens in range(TOKENS)]
        self.directory = str(world.folder / "manager")
        self.files: dict[int, Any] = {}  # number: bytes of each pool's block, at the point that the model has reached
        self.may_fail: set[int] = set()
        self.counted = KvCacheTransferStats()
        world.cleanup.callback(manager.close, 60.0)

    def moved(self, tokens: int) -> Any:
        """The bytes of each pool's block that a copy of so many tokens moves."""
        if tokens == 0:
            return None
        columns = []
        for shape, pool in zip(SHAPES, self.pools, strict=True):
            rows = shape["num_layers"] * shape["kv_factor"] * shape["num_kv_heads"]
            columns.append(np.arange(pool.nbytes()).reshape(rows, TOKENS, -1)[:, :tokens].reshape(-1))
        return columns


def managed(world: World) -> Managed:
    if "manager" not in world.parts:
        world.parts["manager"] = Managed(world)
    return world.parts["manager"]


@operation(
    12,
    *("trtllm.KVCacheTransferManager.offload", "trtllm.KVCacheTransferManager.onboard"),
    *(
        "trtllm.KVCacheTransferManager.primary_pools",
        "trtllm.KVCacheTransferManager.secondary_pools",
    ),
    *("trtllm.KVCacheTransferManager", "trtllm.KVCacheBlockPool", "trtllm.Block"),
    "trtllm.KVCacheTransferManager.close",
    *("trtllm.KVCacheBlockPool.nbytes", "trtllm.KVCacheTransferManager.offload_stream"),
    *("trtllm.KVCacheTransferManager.onboard_stream", "trtllm.KVCacheTransferManager.num_layers"),
)
def manager_copy(world: World) -> None:
    mine = managed(world)
    manager, rng = mine.manager, world.rng
    source, target = rng.random() < 0.5, rng.random() < 0.5
    if not source and not target:
        target = True
    groups = mine.groups[source], mine.groups[target]
    if rng.random() < 0.2 and source != target:
        submit(world, *groups)  # by a lane of its own
        return
    src, dst = slots_of(world, *groups)
    tokens, layered = rng.choice((0, 0, 1, 2, 3)), rng.random() < 0.2
    onboards = (not source) or (source == target and rng.random() < 0.5)
    call = manager.onboard if onboards else manager.offload
    stream = manager.onboard_stream if onboards else manager.offload_stream
    text = f"manager {call.__name__} {source}{src.tolist()} -> {target}{dst.tolist()} tokens {tokens}"
    world.say(text)
    uses = touched(*groups, src, dst)
    if world.parts.get("manager files"):
        world.open_gates()  # it waits for files
    after = world.behind(uses, stream, pooled=True)
    ends: Any = [ids_as(world, src), ids_as(world, dst)]
    if source == target or rng.random() < 0.3:
        ends = [[Block(int(i), side) for i in ids] for ids, side in ((src, source), (dst, target))]

    def make(transfer: Any, faulted: bool) -> Use:
        if layered:
            check(transfer.num_layers == manager.num_layers, "num_layers")
        return use_of(world, text, *groups, src, dst, mine.columns[tokens], stream, src.size)(transfer, faulted)

    transfer = world.submit(lambda: call(*ends, tokens, layer_events=layered, after=after), make)
    if transfer is not None:
        kind = "intra_device_copy" if source and target else "onboard" if target else "offload"
        stats = mine.counted
        setattr(stats, f"{kind}_blocks", getattr(stats, f"{kind}_blocks") + src.size)
        setattr(stats, f"{kind}_bytes", getattr(stats, f"{kind}_bytes") + transfer.nbytes)


@operation(
    2,
    *("trtllm.KVCacheTransferManager.sync_with_compute", "trtllm.KVCacheTransferManager.device"),
    *("trtllm.KVCacheTransferManager.sync_transfers", "trtllm.KvCacheTransferStats"),
    "trtllm.KVCacheTransferManager.get_and_reset_transfer_stats",
)
def manager_sync(world: World) -> None:
    mine = managed(world)
    stream = world.rng.choice(world.streams)
    world.say("manager sync")
    if world.parts.get("manager files"):
        world.open_gates()
    if world.rng.random() < 0.5:
        mine.manager.sync_with_compute(stream)
    else:
        mine.manager.sync_transfers(stream)
    check(mine.manager.device == world.device, "a manager's device")
    stats, mine.counted = mine.counted, KvCacheTransferStats()
    found = mine.manager.get_and_reset_transfer_stats()
    check(found == stats, f"the manager counted {found}, the model {stats}")


@operation(1.5, "trtllm.TransferMode")
def manager_files(world: World) -> None:
    """Blocks to files and back, by number."""
    mine, mode = managed(world), "posix"
    check(mode in TransferMode.__args__, "modes")
    group = mine.groups[True]
    count = world.rng.choice((1, 2, 3))
    slots = np.array(world.rng.sample(range(group.slots), count))
    stores = not mine.files or world.rng.random() < 0.5
    numbers = world.rng.sample(range(8), count)
    text = f"manager files {'store' if stores else 'load'} {slots.tolist()} {numbers}"
    world.say(text)
    world.open_gates()
    uses: Touched = []
    for i, one in enumerate(group.ones):
        own = group.bits(i, slots)
        uses.append((one.area, own, 0) if stores else (one.area, 0, own))
    manager = mine.manager
    if any(use.tainted for use in world.uses):
        world.settle()  # what is lost is known then
    if stores and group.state[slots].any():
        return
    for use in world.before(uses):
        world.wait_for(use)
    if stores:
        stats = mine.counted
        transfer = manager.offload(slots, numbers, 0, mode, mine.directory)
        stats.offload_blocks, stats.offload_bytes = stats.offload_blocks + count, stats.offload_bytes + transfer.nbytes
    else:
        stats = mine.counted
        transfer = manager.onboard(numbers, slots, 0, mode, mine.directory)
        stats.onboard_blocks, stats.onboard_bytes = stats.onboard_blocks + count, stats.onboard_bytes + transfer.nbytes
    world.parts["manager files"] = True

    def carry_out() -> None:
        reasons = transfer.reasons
        for position, (slot, number) in enumerate(zip(slots, numbers, strict=True)):
            if stores:
                check(not reasons, f"a store failed: {reasons}")
                mine.files[number] = [one.area.model[one.where[slot]].copy() for one in group.ones]
                continue
            reason = reasons.get(position)
            if (reason is None) != (number in mine.files):
                raise Difference(f"number {number} was{' not' * (number not in mine.files)} stored: {reason!r}")
            if reason is not None or group.state[slot] != GOOD:
                group.state[slot] = MAYBE
            for i, one in enumerate(group.ones):
                if reason is None:
                    one.area.set(one.where[slot], mine.files[number][i])
                else:
                    one.area.forget(one.where[slot])
        world.parts["manager files"] = False

    world.uses.append(Use(text, uses, carry_out, transfer, by_host=True))


# -- the race checker -------------------------------------------------------------------------------------------------


@operation(
    0.5,
    *("testing.race_checker", "testing.Race", "testing.RaceParty", "testing.RaceFound", "testing.RaceChecker"),
    "testing.RaceChecker.races",
    alone=True,
)
def races(world: World) -> None:
    """Two accesses race exactly where nothing orders them."""
    world.say("races")
    world.settle()
    memory = world.device.alloc(4096)
    pool = kvswap.Pool(world.device, memory, 16, 256, name="raced")
    first, second = world.rng.sample(world.streams, 2)
    slots = [world.rng.sample(range(16), 3) for _ in range(2)]
    ordered, writes = world.rng.random() < 0.5, [world.rng.random() < 0.5 for _ in range(2)]
    with testing.race_checker(raise_at_exit=False) as checker:
        testing.note_access(first, pool, slots[0], writes[0])
        if ordered:
            way = world.rng.randrange(3)
            if way == 0:
                testing.note_order(first, second)
            elif way == 1:
                world.mark(first).wait(second)
            else:
                first.synchronize(60)
        testing.note_access(second, pool, slots[1], writes[1])
    raced = not ordered and any(writes) and set(slots[0]) & set(slots[1])
    check(isinstance(checker, testing.RaceChecker), "a race checker")
    check(bool(checker.races) == bool(raced), f"{len(checker.races)} races; slots {slots}, {writes}, ordered {ordered}")
    for race in checker.races:
        check(isinstance(race, testing.Race) and race.slot in raced and race.pool == "raced", f"{race}")
        check(isinstance(race.first, testing.RaceParty) and "raced" in str(testing.RaceFound([race])), "a race's text")
