"""Operations: the file tier, with several versions of each key, faults and damage; and vLLM's handlers."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import errno
import os
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
from conftest import PATIENCE

import kvswap
from differential.frame import Difference, Memory, Tensor, Touched, Use, World, bits, check, operation
from differential.pools import GOOD, MAYBE, groups_of
from kvswap import testing
from kvswap.files import FileStore, FileTransfer, Layout, read_block_files, write_block_files
from kvswap.offload import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CpuGpuOffloadingHandlers,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    SingleDirectionOffloadingHandler,
    TransferResult,
)

KEYS = 12
MISSING = None
SEGMENT_SLOTS = 8


class Tier:
    """A store of blocks like those of the pools, and for each key what it may hold."""

    def __init__(self, world: World) -> None:
        self.world, self.rng = world, world.rng
        self.nbytes = sum(groups_of(world)[0].nbytes)
        self.folder = world.folder / "store"
        self.allowed: list[list[Any]] = [[MISSING] for _ in range(KEYS)]  # contents, at the point of the model
        self.ever: list[list[Any]] = [[] for _ in range(KEYS)]
        self.buffered = self.rng.random() < 0.5
        self.faulted = False  # since it was opened
        self.store: FileStore | None = None
        self.open()
        world.cleanup.callback(lambda: self.store.close(PATIENCE))

    def options(self) -> dict[str, Any]:
        slot = 4096 + -(-self.nbytes // 4096) * 4096
        return {
            "segment_nbytes": 4096 + SEGMENT_SLOTS * slot,
            "capacity": 8 * (4096 + SEGMENT_SLOTS * slot),
            "buffered": self.buffered,
            "staging_nbytes": 1 << 20,
        }

    def open(self) -> None:
        self.faulted = False
        layout = Layout(self.nbytes, what="differential")
        check(
            Layout.parse(self.nbytes, layout.text) == layout and layout.fields == {"what": "differential"}, "a layout"
        )
        check(layout.block_nbytes == self.nbytes, "a layout's bytes")
        self.store = FileStore(
            self.folder,
            layout,
            device=self.world.device,
            engine=self.rng.choice(("threads", "auto")),
            durability=self.rng.choice(("none", "none", "none", "none", "flush", "fsync")),
            depth=self.rng.choice((1, 4, 16)),
            **self.options(),
        )
        check(self.store.block_nbytes == self.nbytes and bool(self.store.info["engine"]), "a store's facts")

    def key(self, number: int) -> bytes:
        return b"key %d" % number

    def allow(self, number: int, content: Any, *, also: bool) -> None:
        known = [old for old in self.allowed[number] if also and not same(old, content)]
        self.allowed[number] = [*known, content]
        if content is not MISSING and not any(same(content, old) for old in self.ever[number]):
            self.ever[number] = [*self.ever[number][-6:], content]

    def note_evictions(self) -> None:
        """There is room for all keys, so only a segment that could not be made is a reason to evict any."""
        evicted = self.store.stats()["evicted"]
        check(self.faulted or evicted == 0, f"{evicted} blocks were evicted, with room for all")
        for number in range(KEYS if evicted else 0):
            self.allow(number, MISSING, also=True)

    def may_be_missing(self, number: int) -> bool:
        return any(content is MISSING for content in self.allowed[number])

    def anything(self) -> None:
        """After damage: whatever a key ever held, or nothing."""
        for number in range(KEYS):
            self.allowed[number] = [MISSING, *self.ever[number]]


def same(one: Any, other: Any) -> bool:
    return (one is MISSING) == (other is MISSING) and (one is MISSING or np.array_equal(one, other))


def tier(world: World) -> Tier:
    if "tier" not in world.parts:
        world.parts["tier"] = Tier(world)
    return world.parts["tier"]


FILE_TRANSFER = (
    "done",
    "wait",
    "cancel",
    "what",
    "state",
    "nbytes",
    "num_blocks",
    "num_kept",
    "elapsed",
    "error",
)


@operation(
    5,
    *(
        "files.FileStore",
        "files.FileStore.store",
        "files.FileStore.load",
        "files.FileStore.delete",
        "files.FileTransfer",
    ),
    *("files.FileTransfer.failed_positions", "files.FileTransfer.reasons", "files.Layout", "files.Layout.parse"),
    *(f"files.FileTransfer.{name}" for name in FILE_TRANSFER),
    *("files.FileStore.info", "files.FileStore.block_nbytes"),
    *("files.Layout.block_nbytes", "files.Layout.fields", "files.Layout.text"),
)
def file_call(world: World) -> None:
    one_call(world, faulty=False)


def one_call(world: World, faulty: bool) -> None:
    mine, rng = tier(world), world.rng
    what = rng.choice(("store", "store", "load", "load", "load", "delete"))
    by_pools = rng.random() < 0.6
    group = rng.choice(groups_of(world))
    count = rng.randint(1, min(5, group.slots))
    numbers = rng.sample(range(KEYS), count)
    keys: Any = [mine.key(number) for number in numbers]
    slots = rng.sample(range(group.slots), count)
    host = rng.choice(world.areas[2:5])  # the large ones of the host
    at = [position * mine.nbytes for position in rng.sample(range(host.nbytes // mine.nbytes), count)]
    text = f"file {what} {numbers} {group.name if by_pools else host.name} {slots if by_pools else at}, faulty {faulty}"
    world.say(text)
    world.open_gates()
    uses: Touched = []
    if what != "delete" and by_pools:
        for i, one in enumerate(group.ones):
            own = group.bits(i, slots)
            uses.append((one.area, own, 0) if what == "store" else (one.area, 0, own))
    elif what != "delete":
        own = bits(at, [begin + mine.nbytes for begin in at], host.nbytes)
        uses.append((host, own, 0) if what == "store" else (host, 0, own))
    if by_pools and any(use.tainted for use in world.uses):
        world.settle()  # what is lost is known then
    if by_pools and what == "store" and group.state[slots].any():
        return
    after: list[Any] = []
    if by_pools and group.ones[0].area.side == "gpu" and what != "delete":
        after = world.behind(uses, None, pooled=True)  # transfers between pools are waited for
    else:
        for use in world.before(uses):
            world.wait_for(use)
    blocks: Any = [one.pool for one in group.ones] if by_pools else [host.ptr + begin for begin in at]
    places: Any = [blocks, slots] if by_pools else [blocks]
    keep = what == "store" and rng.random() < 0.15
    if what == "delete":
        transfer = mine.store.delete(keys)
    elif what == "store":
        transfer = mine.store.store(keys, *places, after=after, replace=not keep)
    else:
        transfer = mine.store.load(keys, *places, after=after)
    cancelled = rng.random() < 0.1 and transfer.cancel()
    wheres = [
        [(one.where[slot], one.area) for one in group.ones]
        if by_pools
        else [(np.arange(begin, begin + mine.nbytes), host)]
        for slot, begin in zip(slots, at, strict=True)
    ]
    loaded: list[Any] = []

    def seen() -> None:
        """What a load delivered, before anything else is done to it."""
        if what == "load" and not loaded:
            there = {id(area): area.read() for _, area in wheres[0]}
            loaded.extend(np.concatenate([there[id(area)][where] for where, area in places]) for places in wheres)

    def carry_out() -> None:
        file_told(transfer, what, count, mine)
        mine.note_evictions()
        reasons = transfer.reasons
        check(faulty or cancelled or what == "load" or not reasons, f"failed without a fault: {reasons}")
        for position, (number, places) in enumerate(zip(numbers, wheres, strict=True)):
            reason, allowed = reasons.get(position), mine.allowed[number]
            if what == "load":
                arrive(mine, number, reason, faulty or cancelled, places, loaded[position])
                if by_pools and (reason is not None or group.state[slots[position]] != GOOD):
                    group.state[slots[position]] = MAYBE
                continue
            effect = MISSING if what == "delete" else np.concatenate([area.model[where] for where, area in places])
            if reason is not None:
                if not (cancelled and "cancel" in str(reason)):
                    mine.allow(number, MISSING, also=True)
            elif not keep or mine.may_be_missing(number):
                mine.allow(number, effect, also=keep and len(allowed) > 1)

    world.uses.append(Use(text, uses, carry_out, transfer, by_host=True, seen=seen))


def arrive(mine: Tier, number: int, reason: Any, faulty: bool, places: Any, there: Any) -> None:
    """What came of one block of a load, on the model."""
    allowed = mine.allowed[number]
    if reason is not None:
        missing = "not in the store" in str(reason)
        check(faulty or missing or "damaged" in str(reason), f"a load failed without a fault: {reason!r}")
        if missing and not mine.may_be_missing(number) and not faulty:
            raise Difference(f"key {number} is not there, and must be")
        if faulty:  # a block that could not be read is not there any more, for loads beside that one
            mine.allow(number, MISSING, also=True)
        for where, area in places:
            area.forget(where)
        return
    fits = [content for content in allowed if content is not MISSING and np.array_equal(content, there)]
    check(bool(fits), f"key {number} was loaded with other bytes than it may hold; {len(allowed)} versions allowed")
    mine.allowed[number] = [*fits, MISSING] if faulty and mine.may_be_missing(number) else fits
    begin = 0
    for where, area in places:
        area.set(where, fits[0][begin : begin + len(where)])
        begin += len(where)


def file_told(transfer: FileTransfer, what: str, count: int, mine: Tier) -> None:
    failed = transfer.failed_positions.tolist()
    check(transfer.done() and transfer.what == what and transfer.num_blocks == count, "a file transfer's facts")
    check(sorted(transfer.reasons) == failed, f"failed {failed}, reasons {transfer.reasons}")
    check(
        (transfer.error is None) == (not failed) == (transfer.state == "done"), f"{transfer.state}, {transfer.error!r}"
    )
    check(transfer.nbytes == (0 if what == "delete" else count * mine.nbytes) and transfer.elapsed >= 0, "its bytes")
    check(0 <= transfer.num_kept <= count, "num_kept")
    try:
        transfer.wait(0)
        check(not failed, "wait() raised nothing")
    except kvswap.Error as error:
        check(str(error) == str(transfer.error), f"{error!r}, {transfer.error!r}")


STORE = ("contains", "pin", "unpin", "touch", "keys", "stats")


@operation(1, *(f"files.FileStore.{name}" for name in STORE))
def file_facts(world: World) -> None:
    mine = tier(world)
    world.say("file facts")
    world.settle()
    mine.note_evictions()
    numbers = world.rng.sample(range(KEYS), 4)
    keys = [mine.key(number) for number in numbers]
    there = mine.store.contains(keys)
    for number, found in zip(numbers, there, strict=True):
        may = [content is not MISSING for content in mine.allowed[number]]
        check(found in may, f"contains() says {found} of key {number}")
    listed = set(mine.store.keys())
    check([key in listed for key in keys] == there, "keys() and contains() differ")
    mine.store.touch(keys)
    present = [key for key, found in zip(keys, there, strict=True) if found]
    mine.store.pin(present)
    stats = mine.store.stats()
    check(stats["pinned"] == len(present) and stats["blocks"] == len(listed), f"{stats}")
    mine.store.unpin(present)
    check(stats["unfinished_loads"] + stats["unfinished_stores"] == 0, f"{stats}")


@operation(0.8, "testing.file_fault")
def file_faults(world: World) -> None:
    """Short, interrupted, refused and late calls of the file system."""
    mine, rng = tier(world), world.rng
    world.settle()
    mine.faulted = True
    with ExitStack() as stack:
        for call in ("read", "write"):
            action = rng.choice(("none", "short", "interrupt", "fail", "delay"))
            if action != "none":
                every, code = rng.randint(2, 20), rng.choice((errno.ENOSPC, errno.EIO))
                world.say(f"file fault: {call} {action}, every {every}")
                stack.enter_context(testing.file_fault(mine.store, call, action, every=every, code=code, delay=0.0005))
        for _ in range(rng.randint(1, 4)):
            one_call(world, faulty=True)
        world.settle()


@operation(0.7, "files.FileStore.close", "files.FileStore.refresh")
def file_reopen(world: World) -> None:
    """Close and open again, perhaps with a damaged file in between; a reader sees the same."""
    mine, rng = tier(world), world.rng
    damage = rng.random() < 0.4
    world.say(f"file reopen, damage {damage}")
    world.settle()
    if rng.random() < 0.5:
        with FileStore(mine.folder, Layout(mine.nbytes, what="differential"), readonly=True) as reader:
            reader.refresh()
            more = set(reader.keys()) - set(mine.store.keys())  # a writer forgets what it found damaged, at any time
            sure = [mine.key(number) for number in range(KEYS) if not mine.may_be_missing(number)]
            check(mine.faulted or more.isdisjoint(sure), f"a reader sees {more}, the writer does not")
            check(set(mine.store.keys()) <= set(reader.keys()), "a reader sees less than the writer")
    stats = mine.store.stats()
    lost_before = stats["lost_slots"] + stats["evicted"]  # which may come back
    mine.store.close(PATIENCE)
    if damage:
        segments = sorted(mine.folder.glob("segment-*.kvs"))
        for _ in range(rng.randint(1, 3) if segments else 0):
            path = rng.choice(segments)
            with open(path, "r+b") as file:
                file.seek(rng.randrange(max(1, path.stat().st_size)))
                file.write(rng.randbytes(rng.choice((1, 16, 5000))))
                size = path.stat().st_size
            if size % 4096:
                os.truncate(path, size // 4096 * 4096)
        if segments and rng.random() < 0.2:
            os.truncate(rng.choice(segments), rng.choice((0, 100, 8192)))
    mine.open()
    stats = mine.store.stats()
    if damage or lost_before or stats["foreign"] or stats["lost_slots"]:
        mine.faulted = True  # what cannot be read takes room
        mine.anything()


@operation(0.3, "files.read_block_files", "files.write_block_files")
def block_files(world: World) -> None:
    """TensorRT-LLM's files: one for each block and pool."""
    world.say("block files")
    folder = world.folder / "blocks"
    folder.mkdir(exist_ok=True)
    sizes = [world.rng.randint(1, 3000) for _ in range(world.rng.randint(1, 3))]
    block, number = np.frombuffer(world.rng.randbytes(sum(sizes)), np.uint8), world.rng.randrange(4)
    write_block_files(folder, number, sizes, block)
    check(np.array_equal(read_block_files(folder, number, sizes), block), "files of a block differ")
    check(read_block_files(folder, 99, sizes) is None, "a block that was never written")


# -- offloading, as vLLM does -----------------------------------------------------------------------------------------


class Offloading:
    """Handlers over tensors of their own."""

    GPU, CHUNKS = 20, 7

    def __init__(self, world: World) -> None:
        rng, device = world.rng, world.device
        self.world, self.factor = world, rng.choice((1, 2, 3))
        self.pages = rng.choice(([256], [512, 96], [64, 64, 1000]))
        self.areas = [world.add(self.own(f"vllm gpu {i}", "gpu", page * self.GPU)) for i, page in enumerate(self.pages)]
        groups = [[CanonicalKVCacheRef(i, page)] for i, page in enumerate(self.pages)]
        if rng.random() < 0.5:
            groups = [[ref for group in groups for ref in group]]
        self.groups = groups
        tensors = [
            Tensor(device, area, 0, (self.GPU, page), "|i1") for area, page in zip(self.areas, self.pages, strict=True)
        ]
        options: Any = {"device": device, "wait_timeout": PATIENCE, "path": rng.choice(world.paths)}
        self.worker: OffloadingWorker | None = None
        if device.kind == "cuda" or rng.random() < 0.4:
            hosts = [
                self.own(f"vllm cpu {i}", "cpu", page * self.factor * self.CHUNKS) for i, page in enumerate(self.pages)
            ]
            chunks: Any = [np.frombuffer(area.buffer.memory, np.int8).reshape(self.CHUNKS, -1) for area in hosts]
            self.handlers = [
                SingleDirectionOffloadingHandler(tensors, chunks, self.factor, groups, way, **options)
                for way in (True, False)
            ]
        else:
            arrays = [np.asarray(tensor) for tensor in tensors]
            caches = CanonicalKVCaches(
                [CanonicalKVCacheTensor(array, page) for array, page in zip(arrays, self.pages, strict=True)], groups
            )
            if rng.random() < 0.5:
                self.worker = OffloadingWorker(caches, self.factor, self.CHUNKS, **options)
                self.handlers = list(self.worker.handlers)[:2]
            else:
                both = CpuGpuOffloadingHandlers(caches, self.factor, self.CHUNKS, **options)
                self.handlers = [both.gpu_to_cpu_handler, both.cpu_to_gpu_handler]
        self.hosts = [tensor.reshape(self.CHUNKS, self.factor, -1) for tensor in self.handlers[0].dst_tensors]
        self.models = [host.copy() for host in self.hosts]
        # Blocks that a failed job should have written, or has: what reads them may fail.
        self.lost_hosts = [np.zeros((self.CHUNKS, self.factor), bool) for _ in self.pages]
        self.lost_gpu = [np.zeros(self.GPU, bool) for _ in self.pages]
        self.results: dict[int, TransferResult] = {}
        self.next_job = 1
        self.pending: list[Any] = []
        world.at_settle.append(self.settle)
        world.cleanup.callback(self.close)

    def own(self, name: str, side: str, nbytes: int) -> Memory:
        """Memory that no other operation uses."""
        area = Memory(self.world.device, name, side, self.world.rng.randbytes(nbytes))
        area.side = "vllm"
        return area

    def submit(self) -> None:
        rng, world = self.world.rng, self.world
        stores = rng.random() < 0.5
        sizes = [rng.choice((0, 1, 3, 4)) for _ in self.groups]
        sizes[0] = sizes[0] or 2
        indices = [rng.randrange(3 * self.factor) for _ in sizes]
        needed = [
            -(-(size + index % self.factor) // self.factor) if size else 0
            for size, index in zip(sizes, indices, strict=True)
        ]
        if sum(needed) > self.CHUNKS:
            return
        gpu, chunks = rng.sample(range(self.GPU), sum(sizes)), rng.sample(range(self.CHUNKS), sum(needed))
        job, self.next_job = self.next_job, self.next_job + 1
        world.say(f"vllm {'store' if stores else 'load'} {job}: {gpu} {chunks} {sizes} {indices}")
        specs: Any = GPULoadStoreSpec(gpu, sizes, indices), CPULoadStoreSpec(chunks)
        check(all(isinstance(spec, LoadStoreSpec | BlockIDsLoadStoreSpec) for spec in specs), "specs")
        check([spec.medium() for spec in specs] == ["GPU", "CPU"] and list(specs[1].chunk_ids) == chunks, "a spec")
        if not stores:
            specs = specs[::-1]
        fault = world.fault()
        with fault or ExitStack():
            if self.worker is None:
                self.handlers[0 if stores else 1].transfer_async(job, *specs, layer_events=rng.random() < 0.4)
            elif stores:
                self.worker.submit_store(job, *specs)
            else:
                self.worker.submit_load(job, *specs, expedited=rng.random() < 0.5)
        self.pending.append((job, stores, gpu, chunks, sizes, indices, fault is not None))

    def collect(self) -> None:
        sources: Any = self.handlers if self.worker is None else [self.worker]
        for source in sources:
            for result in source.get_finished():
                check(result.job_id not in self.results, f"job {result.job_id} was told twice")
                self.results[result.job_id] = result

    def settle(self) -> None:
        for job, stores, *_ in self.pending if self.worker is None else []:
            some = self.world.rng.choice((None, [0], list(range(len(self.pages)))))
            with suppress(kvswap.Error):  # it failed: told of below
                self.handlers[0 if stores else 1].make_wait(job, some)
        for source in self.handlers if self.worker is None else [self.worker]:
            source.drain(PATIENCE)
        self.collect()
        behind_fault = False
        for job in self.pending:
            check(job[0] in self.results, f"job {job[0]} was never told of")
            result, faulted = self.results.pop(job[0]), job[-1]
            self.carry_out(result, *job[1:-1], faulted or self.world.refused_behind(result.error, behind_fault))
            behind_fault |= faulted
        self.pending.clear()
        check(not self.results, f"results of unknown jobs: {list(self.results)}")
        for i, (host, model) in enumerate(zip(self.hosts, self.models, strict=True)):
            lost = self.lost_hosts[i]
            check(np.array_equal(host[~lost], model[~lost]), f"the CPU tensor {i} of the handlers differs")
            model[lost] = host[lost]

    def carry_out(
        self, result: TransferResult, stores: bool, gpu: Any, chunks: Any, sizes: Any, indices: Any, faulted: bool
    ) -> None:
        check((result.error is None) == result.success and result.transfer_time > 0, f"{result}")
        check(result.transfer_type == (("GPU", "CPU") if stores else ("CPU", "GPU")), f"{result}")
        at = chunk_at = 0
        reads_lost = False
        for group, (size, index) in enumerate(zip(sizes, indices, strict=True)):
            skip = index % self.factor
            for k in range(size):
                place = chunks[chunk_at + (skip + k) // self.factor], (skip + k) % self.factor
                for ref in self.groups[group]:
                    reads_lost |= self.one(ref.tensor_idx, gpu[at + k], place, stores, result.success)
            at += size
            chunk_at += -(-(size + skip) // self.factor) if size else 0
        check(result.success or faulted or reads_lost, f"job {result.job_id} failed without a fault: {result.error!r}")

    def one(self, tensor: int, block: int, place: tuple[int, int], stores: bool, success: bool) -> bool:
        """A block of one tensor; whether what it reads may be lost."""
        area, page, host = self.areas[tensor], self.pages[tensor], self.models[tensor]
        here = slice(block * page, (block + 1) * page)
        lost = bool(self.lost_gpu[tensor][block] if stores else self.lost_hosts[tensor][place])
        if stores:
            host[place] = area.model[here].view(np.int8)
            self.lost_hosts[tensor][place] = not success or (area.unknown is not None and area.unknown[here].any())
            return lost
        unsure = not success or lost
        self.lost_gpu[tensor][block] = unsure
        if unsure:
            area.forget(here)
        else:
            area.set(here, host[place].view(np.uint8))
        return lost

    def close(self) -> None:
        self.hosts.clear()
        if self.worker is not None:
            self.worker.shutdown(PATIENCE)
        else:
            for handler in self.handlers:
                handler.shutdown(PATIENCE)


OFFLOAD = (
    *(
        "BlockIDsLoadStoreSpec",
        "CPULoadStoreSpec",
        "CanonicalKVCacheRef",
        "CanonicalKVCacheTensor",
        "CanonicalKVCaches",
    ),
    *("CpuGpuOffloadingHandlers", "GPULoadStoreSpec", "LoadStoreSpec", "OffloadingWorker", "TransferResult"),
    *(
        "SingleDirectionOffloadingHandler",
        "CPULoadStoreSpec.chunk_ids",
        "CPULoadStoreSpec.medium",
        "GPULoadStoreSpec.medium",
    ),
)
HANDLER = ("transfer_async", "make_wait", "get_finished", "wait", "drain", "stats", "shutdown", "device")
WORKER = ("submit_store", "submit_load", "get_finished", "wait", "drain", "stats", "shutdown", "handlers")


@operation(
    8,
    *(f"offload.{name}" for name in OFFLOAD),
    *(f"offload.SingleDirectionOffloadingHandler.{name}" for name in HANDLER),
    *(f"offload.OffloadingWorker.{name}" for name in WORKER),
)
def offload_job(world: World) -> None:
    if "offload" not in world.parts:
        world.open_gates()
        world.parts["offload"] = Offloading(world)
    mine, choice = world.parts["offload"], world.rng.random()
    if choice < 0.7:
        mine.submit()
    elif choice < 0.85:
        mine.collect()
    elif choice < 0.95 and mine.pending:
        world.say("vllm wait")
        world.open_gates()
        jobs = [job[0] for job in mine.pending[-2:]]
        for source in mine.handlers if mine.worker is None else [mine.worker]:
            source.wait(jobs, PATIENCE)
    else:
        handler = mine.handlers[0]
        check(handler.device == world.device and handler.stats().unfinished >= 0, "a handler's facts")
        if mine.worker is not None:
            check(len(mine.worker.stats()) == len(mine.worker.handlers) == 3, "a worker's queues")
