"""The transfer manager against a model in NumPy that copies block by block: bytes, order, failures, words."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Buffer, Gate, check_pattern, usable, write_pattern

import kvswap
from kvswap import testing
from kvswap.trtllm import Block, KVCacheBlockPool, KVCacheTransferManager, KvCacheTransferStats

PRIMARY, SECONDARY, TOKENS = 10, 14, 4
HALF: dict[str, Any] = {
    "num_layers": 3,
    "kv_factor": 2,
    "num_kv_heads": 2,
    "tokens_per_block": TOKENS,
    "size_per_head": 9,
    "dtype": "fp16",
}
MLA: dict[str, Any] = {**HALF, "num_layers": 5, "kv_factor": 1, "num_kv_heads": 1, "size_per_head": 7, "dtype": "fp8"}
FP4: dict[str, Any] = {**HALF, "size_per_head": 16, "dtype": "fp4"}
SCALES: dict[str, Any] = {**HALF, "size_per_head": 1, "dtype": "fp8", "contains_block_scales": True}
POOLS = (HALF, MLA, FP4, SCALES)


class Rig:
    """A manager, its memory, and what that memory should hold."""

    def __init__(self, device: kvswap.Device, *geometries: dict[str, Any], **options: Any) -> None:
        self.device = device
        self.geometries = geometries or POOLS
        self.buffers: dict[bool, list[Buffer]] = {True: [], False: []}
        self.model: dict[bool, list[Any]] = {True: [], False: []}
        self.jobs: list[Any] = []  # a job that is dropped is waited for
        self.pools = [self.pool(i, dict(geometry)) for i, geometry in enumerate(self.geometries)]
        self.manager = KVCacheTransferManager(self.pools, device=device, **options)

    def pool(self, i: int, geometry: dict[str, Any]) -> KVCacheBlockPool:
        shape = KVCacheBlockPool(1, 1, 1, 1, **geometry)
        strides = {True: geometry.get("primary_stride"), False: geometry.get("secondary_stride")}
        for primary, blocks in ((True, PRIMARY), (False, SECONDARY)):
            stride = strides[primary] or shape.block_nbytes
            buffer = Buffer(self.device, blocks * stride, "gpu" if primary else "cpu")
            self.model[primary].append(buffer.randomise(100 * i + primary).reshape(blocks, stride).copy())
            self.buffers[primary].append(buffer)
        return KVCacheBlockPool(self.buffers[True][-1].ptr, self.buffers[False][-1].ptr, PRIMARY, SECONDARY, **geometry)

    def copied(self, source: Block, target: Block, num_tokens: int = 0) -> None:
        """The model of one copy, by the shape of a block."""
        for i, geometry in enumerate(self.geometries):
            src, dst = self.model[source.is_primary][i], self.model[target.is_primary][i]
            tokens = geometry["tokens_per_block"]
            whole = geometry["dtype"] == "fp4" or "contains_block_scales" in geometry or not 0 < num_tokens < tokens
            if whole:
                nbytes = self.pools[i].block_nbytes
                dst[target.index, :nbytes] = src[source.index, :nbytes]
                continue
            rows = geometry["num_layers"] * geometry["kv_factor"] * geometry["num_kv_heads"]
            token = geometry["size_per_head"] * {"fp16": 2, "fp8": 1}[geometry["dtype"]]
            shape, nbytes = (rows, tokens, token), rows * tokens * token
            there = dst[target.index, :nbytes].reshape(shape)
            there[:, :num_tokens] = src[source.index, :nbytes].reshape(shape)[:, :num_tokens]

    def check(self) -> None:
        self.device.synchronize(PATIENCE)
        for primary in (True, False):
            for i, buffer in enumerate(self.buffers[primary]):
                there = buffer.get().reshape(self.model[primary][i].shape)
                np.testing.assert_array_equal(there, self.model[primary][i], err_msg=f"primary {primary}, pool {i}")

    def offload(self, *args: Any, **options: Any) -> kvswap.Transfer:
        return self.manager.offload(*args, **options)

    def onboard(self, *args: Any, **options: Any) -> kvswap.Transfer:
        return self.manager.onboard(*args, **options)

    def waits(self) -> tuple[int, ...]:
        stats = self.device.stats()
        return stats["waits_raw"], stats["waits_war"], stats["waits_waw"]

    def ptrs(self, block: Block) -> Any:
        """Where each pool has it."""
        strides = [array.shape[1] for array in self.model[block.is_primary]]
        bases = [buffer.ptr for buffer in self.buffers[block.is_primary]]
        return np.array([base + block.index * stride for base, stride in zip(bases, strides, strict=True)])

    def write(self, stream: Any, block: int, key: int) -> None:
        """Work on a stream that writes the first bytes of a primary block."""
        keys = np.arange(len(self.pools)) + key
        self.jobs.append(write_pattern(self.device, self.ptrs(Block(block)), 16, keys, stream))

    def look(self, stream: Any, block: Block, key: int) -> Any:
        job = check_pattern(self.device, self.ptrs(block), 16, np.arange(len(self.pools)) + key, stream)
        self.jobs.append(job)
        return job


@pytest.fixture
def rig(device: kvswap.Device) -> Rig:
    return Rig(device)


def right(job: Any) -> bool:
    return job.result(PATIENCE)[0] == 0


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_there_and_back(device: kvswap.Device, path: str) -> None:
    rig = Rig(device, path=path)
    transfer = rig.offload(3, 7)
    transfer.wait(PATIENCE)
    rig.copied(Block(3), Block(7, False))
    rig.check()
    assert transfer.nbytes == sum(pool.block_nbytes for pool in rig.pools)
    assert transfer.path == ("dma" if path == "strided" else path) or path == "auto"  # a block is one row here
    rig.onboard(7, 9).wait(PATIENCE)
    rig.copied(Block(7, False), Block(9))
    rig.onboard(0, 0).wait(PATIENCE)
    rig.copied(Block(0, False), Block(0))
    rig.check()


BATCHES: dict[str, Callable[[list[int], bool], Any]] = {
    "list": lambda ids, primary: ids,
    "tuple": lambda ids, primary: tuple(ids),
    "int64": lambda ids, primary: np.array(ids),
    "int32": lambda ids, primary: np.array(ids, np.int32),
    "numpy ints": lambda ids, primary: [np.int64(i) for i in ids],
    "generator": lambda ids, primary: iter(ids),
    "blocks": lambda ids, primary: [Block(i, primary) for i in ids],
    "mixed": lambda ids, primary: [Block(ids[0], primary), *ids[1:]],
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_is_one_transfer(rig: Rig, kind: str) -> None:
    make = BATCHES[kind]
    submitted = rig.device.stats()["submitted"]
    down = rig.offload(make([7, 0, 9], True), make([2, 13, 0], False))
    up = rig.onboard(make([13, 1], False), make([3, 8], True))
    assert rig.device.stats()["submitted"] == submitted + 2
    for transfer in (down, up):
        transfer.wait(PATIENCE)
    for source, target in ((7, 2), (0, 13), (9, 0)):
        rig.copied(Block(source), Block(target, False))
    for source, target in ((13, 3), (1, 8)):
        rig.copied(Block(source, False), Block(target))
    rig.check()


@pytest.mark.parametrize("kind", ["int", "block", "numpy int", "numpy array of one", "index"])
def test_one_block_of_every_kind(rig: Rig, kind: str) -> None:
    class Index:
        def __index__(self) -> int:
            return 4

    one = {"int": 4, "block": Block(4), "numpy int": np.int32(4), "numpy array of one": np.array(4), "index": Index()}
    rig.offload(one[kind], 2).wait(PATIENCE)
    rig.copied(Block(4), Block(2, False))
    rig.check()


def test_nothing_to_copy_is_a_transfer(rig: Rig) -> None:
    for transfer in (rig.offload([], []), rig.onboard(np.zeros(0, np.int64), []), rig.onboard([], [], 2)):
        transfer.wait(PATIENCE)
        assert transfer.nbytes == 0
    rig.check()


@pytest.mark.parametrize("tokens", [-1, 0, 1, TOKENS - 1, TOKENS, TOKENS + 1])
@pytest.mark.parametrize("batch", [False, True], ids=["one", "batch"])
def test_the_first_tokens(device: kvswap.Device, tokens: int, batch: bool, path: str) -> None:
    """The rest of the target block stays as it was; what cannot be cut goes whole."""
    rig = Rig(device, path=path)
    sources, targets = ([5, 1, 2], [8, 9, 3]) if batch else ([5], [8])
    given = (sources, targets) if batch else (5, 8)
    moved = rig.offload(*given, tokens)
    moved.wait(PATIENCE)
    for source, target in zip(sources, targets, strict=True):
        rig.copied(Block(source), Block(target, False), tokens)
    rig.check()
    assert moved.nbytes == len(sources) * sum(pool.nbytes(tokens) for pool in rig.pools)
    rig.onboard(*given, tokens).wait(PATIENCE)
    for source, target in zip(sources, targets, strict=True):
        rig.copied(Block(source, False), Block(target), tokens)
    rig.check()


@pytest.mark.parametrize("layers", [False, True], ids=["at once", "layer by layer"])
def test_pools_of_different_block_sizes(device: kvswap.Device, layers: bool) -> None:
    """So many tokens are all of one pool's block, and a part of another's."""
    rig = Rig(device, HALF, {**MLA, "tokens_per_block": 2 * TOKENS}, {**HALF, "tokens_per_block": 1, "num_layers": 1})
    for i, tokens in enumerate((1, TOKENS, TOKENS + 1, 2 * TOKENS)):
        rig.offload(i, i + 1, tokens, layer_events=layers).wait(PATIENCE)
        rig.copied(Block(i), Block(i + 1, False), tokens)
        rig.check()


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_within_one_memory(rig: Rig, tokens: int) -> None:
    """Partial reuse, and whatever else a Block names."""
    for move, source, target in (
        (rig.onboard, Block(3), 5),
        (rig.offload, 4, Block(6)),
        (rig.offload, Block(2, False), 11),
        (rig.onboard, 3, Block(12, False)),
    ):
        move(source, target, tokens).wait(PATIENCE)
        primary = move == rig.onboard
        ends = [
            end if isinstance(end, Block) else Block(end, default)
            for end, default in ((source, not primary), (target, primary))
        ]
        rig.copied(*ends, tokens)
        rig.check()
    rig.onboard([Block(0), Block(1)], [8, Block(9)], tokens).wait(PATIENCE)
    rig.copied(Block(0), Block(8), tokens)
    rig.copied(Block(1), Block(9), tokens)
    rig.check()


@pytest.mark.parametrize("tokens", [0, 2, TOKENS])
def test_strides_and_padding(device: kvswap.Device, tokens: int) -> None:
    nbytes = KVCacheBlockPool(1, 1, 1, 1, **HALF).block_nbytes
    padded = {**HALF, "block_nbytes": nbytes + 24, "primary_stride": nbytes + 40, "secondary_stride": nbytes + 24}
    rig = Rig(device, padded, {**MLA, "secondary_stride": 256})
    assert rig.pools[0].nbytes() == nbytes + 24 and rig.pools[0].nbytes(2) == nbytes // 2
    rig.offload([3, 4], [7, 8], tokens).wait(PATIENCE)
    rig.onboard([9, 2], [5, 6], tokens, layer_events=True).wait(PATIENCE)
    for source, target in ((3, 7), (4, 8)):
        rig.copied(Block(source), Block(target, False), tokens)
    for source, target in ((9, 5), (2, 6)):
        rig.copied(Block(source, False), Block(target), tokens)
    rig.check()


def test_tensors_are_taken_and_held(device: kvswap.Device) -> None:
    if device.kind != "host":
        pytest.skip("a NumPy array is no GPU memory")
    gpu = np.random.default_rng(1).integers(0, 256, (6, 48), dtype=np.uint8)
    cpu = np.zeros((8, 48), np.uint8)
    shape = {"num_layers": 2, "kv_factor": 2, "num_kv_heads": 1, "tokens_per_block": 2, "size_per_head": 3}
    manager = KVCacheTransferManager([KVCacheBlockPool(gpu, cpu, 6, 8, **shape, dtype=np.float16)], device=device.name)
    manager.offload([1, 5], [0, 7]).wait(PATIENCE)
    assert (cpu[[0, 7]] == gpu[[1, 5]]).all()
    assert "array" not in repr(manager.primary_pools) + repr(KVCacheBlockPool(gpu, cpu, 6, 8, **shape, dtype="fp16"))
    for tensors, side in (((gpu[:3], cpu.copy()), "primary"), ((gpu.copy(), cpu[:3]), "secondary")):
        with pytest.raises(ValueError, match=rf"pools\[0\]\.{side}: ptr is a tensor of 144 bytes"):
            KVCacheTransferManager([KVCacheBlockPool(*tensors, 6, 8, **shape, dtype=np.float16)], device=device)
    for wrong in ({**shape, "num_layers": 1, "dtype": "fp16"}, {**shape, "dtype": "int8"}):  # half of each block
        pool = KVCacheBlockPool(gpu.copy(), cpu.copy(), 6, 8, **wrong)
        with pytest.raises(ValueError, match=r"pools\[0\]\.primary: .*a block of the tensor has 48 bytes"):
            KVCacheTransferManager([pool], device=device)


# -- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_layer_by_layer(device: kvswap.Device, tokens: int, path: str) -> None:
    rig = Rig(device, path=path)
    for transfer in (
        rig.onboard([4, 2], [1, 6], tokens, layer_events=True),
        rig.offload([3, 9], [8, 0], tokens, layer_events=True),
    ):
        assert transfer.num_layers == rig.manager.num_layers == 5
        stream = kvswap.Stream(device)
        for layer in range(5):
            transfer.make_wait_layer(layer, stream)
        stream.synchronize(PATIENCE)
        assert transfer.layer_done(4)
        transfer.wait(PATIENCE)
    for source, target in ((4, 1), (2, 6)):
        rig.copied(Block(source, False), Block(target), tokens)
    for source, target in ((3, 8), (9, 0)):
        rig.copied(Block(source), Block(target, False), tokens)
    rig.check()


def test_a_layer_arrives_before_the_next_may_begin(rig: Rig) -> None:
    """after_layers holds layer 2 up: layers 0 and 1 of every pool are there, nothing of the others."""
    streams = [kvswap.Stream(rig.device) for _ in range(5)]
    before = [buffer.get() for buffer in rig.buffers[True]]
    with Gate(rig.device) as gate:
        gate.hold(streams[2])
        transfer = rig.onboard([4, 2], [1, 6], 3, layer_events=True, after_layers=streams)
        consumer = kvswap.Stream(rig.device)
        transfer.make_wait_layer(1, consumer)
        consumer.synchronize(PATIENCE)
        assert transfer.layer_done(0) and transfer.layer_done(1)
        assert not transfer.layer_done(2) and not transfer.done()
        rig.copied(Block(4, False), Block(1), 3)
        rig.copied(Block(2, False), Block(6), 3)
        for i, pool in enumerate(rig.pools):
            there = rig.buffers[True][i].get().reshape(PRIMARY, -1)
            arrived = 2 * pool.layer_nbytes
            model, old = rig.model[True][i], before[i].reshape(PRIMARY, -1)
            np.testing.assert_array_equal(there[:, :arrived], model[:, :arrived])
            np.testing.assert_array_equal(there[:, arrived:], old[:, arrived:])
        gate.open()
        transfer.wait(PATIENCE)
    rig.check()


def test_after_layers_alone(rig: Rig) -> None:
    """A store that follows the model layer by layer."""
    layers = [kvswap.Event(rig.device) for _ in range(5)]
    compute = kvswap.Stream(rig.device)
    with Gate(rig.device) as gate:
        gate.hold(compute)
        for event in layers:
            event.record(compute)
        transfer = rig.offload(3, 7, after_layers=layers)
        assert not transfer.done() and transfer.num_layers == 0
        gate.open()
        transfer.wait(PATIENCE)
    with pytest.raises(ValueError, match="after_layers"):
        rig.offload(3, 7, after_layers=layers[:3])
    rig.copied(Block(3), Block(7, False))
    rig.check()


# -- order between copies ---------------------------------------------------------------------------------------------


def test_two_offloads_to_one_slot(rig: Rig) -> None:
    """The second wins, also where it is on the other lane."""
    with testing.race_checker(), Gate(rig.device) as gate:
        gate.hold(rig.manager.offload_stream)
        rig.offload(1, 5)
        rig.offload(2, 5)
        rig.copied(Block(2), Block(5, False))
        rig.offload(3, 6)
        last = rig.onboard(0, Block(6, False))  # host to host, on a lane without a wait
        rig.copied(Block(0, False), Block(6, False))
        assert not last.done()
        gate.open()
        last.wait(PATIENCE)
    rig.check()


@pytest.mark.parametrize("tokens", [0, 2])
@pytest.mark.parametrize("lane", ["same lane", "other lane"])
def test_partial_reuse_of_a_block_that_is_being_onboarded(rig: Rig, lane: str, tokens: int) -> None:
    waits = rig.waits()
    with testing.race_checker(), Gate(rig.device) as gate:
        gate.hold(rig.manager.onboard_stream)
        rig.onboard(5, 1)
        reuse = (rig.onboard if lane == "same lane" else rig.offload)(Block(1), Block(2), tokens)
        assert not reuse.done()
        if lane == "other lane":
            assert rig.waits() == (waits[0] + 1, *waits[1:])
        gate.open()
        reuse.wait(PATIENCE)
    rig.copied(Block(5, False), Block(1))
    rig.copied(Block(1), Block(2), tokens)
    rig.check()


def test_primary_0_and_secondary_0_are_two_blocks(rig: Rig) -> None:
    """primary 0 -> secondary 1 and secondary 0 -> primary 1 have nothing to do with each other."""
    waits = rig.waits()
    with Gate(rig.device) as gate:
        gate.hold(rig.manager.offload_stream)
        held = rig.offload(0, 1)
        rig.onboard(0, 1).wait(PATIENCE)
        assert not held.done()
        gate.open()
        held.wait(PATIENCE)
    assert rig.waits() == waits
    with Gate(rig.device) as gate:
        gate.hold(rig.manager.onboard_stream)
        held = rig.onboard(2, 3)
        rig.offload(2, 3).wait(PATIENCE)
        assert not held.done()
    assert rig.waits() == waits
    rig.copied(Block(0, False), Block(1))
    rig.copied(Block(0), Block(1, False))
    rig.copied(Block(2), Block(3, False))
    rig.copied(Block(2, False), Block(3))
    rig.check()


@pytest.mark.parametrize(("source", "target", "hazard"), [(1, 7, "raw"), (2, 0, "war")])
def test_a_load_waits_for_a_store(rig: Rig, source: int, target: int, hazard: str) -> None:
    """For the one that writes its source, and for the one that reads its destination."""
    raw, war, waw = rig.waits()
    with Gate(rig.device) as gate:
        gate.hold(rig.manager.offload_stream)
        rig.offload(0, 1)
        load = rig.onboard(source, target)
        assert not load.done()
        assert rig.waits() == (raw + (hazard == "raw"), war + (hazard == "war"), waw)
        gate.open()
        load.wait(PATIENCE)
    rig.copied(Block(0), Block(1, False))
    rig.copied(Block(source, False), Block(target))
    rig.check()


@pytest.mark.parametrize("first_opened", [0, 1])
def test_a_writer_waits_for_all_readers(rig: Rig, first_opened: int) -> None:
    """Two lanes read a block, a third writes it: for both, not for the last one only."""
    manager, third, waits = rig.manager, kvswap.Stream(rig.device), rig.waits()
    lanes = [manager.onboard_stream, manager.offload_stream]
    with testing.race_checker(), Gate(rig.device) as gate, Gate(rig.device) as other:
        gates = [gate, other]
        for lane, held in zip(lanes, gates, strict=True):
            held.hold(lane)
        rig.onboard(4, 1)
        rig.offload(Block(4, False), 6)
        writer = kvswap.move_blocks(manager.primary_pools, manager.secondary_pools, [2], [4], stream=third)
        assert rig.waits() == (waits[0], waits[1] + 2, waits[2])
        gates[first_opened].open()
        lanes[first_opened].synchronize(PATIENCE)
        assert not writer.done()
        gates[1 - first_opened].open()
        writer.wait(PATIENCE)
    rig.copied(Block(4, False), Block(1))
    rig.copied(Block(4, False), Block(6, False))
    rig.copied(Block(2), Block(4, False))
    rig.check()


def test_a_reader_does_not_wait_for_a_reader(rig: Rig) -> None:
    waits = rig.waits()
    with testing.race_checker(), Gate(rig.device) as gate:
        gate.hold(rig.manager.onboard_stream)
        held = rig.onboard(4, 1)
        rig.offload(Block(4, False), 6).wait(PATIENCE)
        assert not held.done()
        gate.open()
    assert rig.waits() == waits
    rig.copied(Block(4, False), Block(6, False))
    rig.copied(Block(4, False), Block(1))
    rig.check()


def swapping(seed: int, skip: str) -> bool:
    """Blocks go round between the memories on both lanes, on a device that reorders: are all bytes right?"""
    device = testing.deterministic_device(seed)
    rig = Rig(device, HALF, MLA)
    rng = np.random.default_rng(seed)
    hazard = testing.fault(device, "hazard", "skip", operation=skip) if skip else nullcontext()
    with hazard, Gate(device) as gate:  # so that nothing has ended when the next one comes
        gate.hold(rig.manager.offload_stream)
        gate.hold(rig.manager.onboard_stream)
        for _ in range(12):
            ids, memories = rng.permutation(4)[:2].tolist(), rng.integers(2, size=2).tolist()
            source, target = Block(ids[0], bool(memories[0])), Block(ids[1], bool(memories[1]))
            lanes = [rig.onboard, rig.offload]
            if source.is_primary == target.is_primary:
                rng.shuffle(lanes)
            tokens = int(rng.integers(TOKENS))
            lanes[source.is_primary](source, target, tokens)
            rig.copied(source, target, tokens)
    try:
        rig.check()
    except AssertionError:
        return False
    return True


@pytest.mark.not_sanitized("minutes: all interleavings")
def test_every_interleaving() -> None:
    assert [seed for seed in range(1, 61) if not swapping(seed, "")] == []


@pytest.mark.parametrize("kind", ["raw", "war", "waw"])
def test_without_a_wait_some_interleaving_shows_it(kind: str) -> None:
    """The control: were the waits for that kind of hazard missing, the test above would fail."""
    assert any(not swapping(seed, kind) for seed in range(1, 201))


# -- order with the model ---------------------------------------------------------------------------------------------


@pytest.fixture(params=["device", "deterministic"])
def stepped(request: pytest.FixtureRequest, device: kvswap.Device) -> Rig:
    return Rig(device if request.param == "device" else testing.deterministic_device(5))


def is_held_up(device: kvswap.Device, done: Callable[[], bool]) -> bool:
    """A deterministic device runs all that can run, so that it is sure."""
    with suppress(ValueError):
        testing.step(device, 1_000_000)
    try:
        return not done()
    except kvswap.Error as error:
        return "nothing can run" in str(error)


def test_sync_with_compute(stepped: Rig) -> None:
    """Copies that are submitted later wait for the stream, on both lanes; those submitted before do not."""
    rig, compute = stepped, kvswap.Stream(stepped.device)
    with Gate(rig.device) as gate:
        gate.hold(compute)
        rig.offload(1, 1).wait(PATIENCE)
        rig.onboard(2, 2).wait(PATIENCE)
        rig.write(compute, 3, 100)
        rig.manager.sync_with_compute(compute)
        stored, loaded = rig.offload(3, 4), rig.onboard(5, 6)
        assert is_held_up(rig.device, stored.done) and is_held_up(rig.device, loaded.done)
        gate.open()
        stored.wait(PATIENCE)
        assert right(rig.look(kvswap.Stream(rig.device), Block(4, False), 100))
        loaded.wait(PATIENCE)


def test_sync_transfers(stepped: Rig) -> None:
    """The stream's later work waits for the copies of both lanes; earlier work does not, nor do other streams."""
    rig, compute, free = stepped, kvswap.Stream(stepped.device), kvswap.Stream(stepped.device)
    for lane in (rig.manager.offload_stream, rig.manager.onboard_stream):
        with Gate(rig.device) as gate:
            gate.hold(lane)
            rig.offload(1, 1)
            rig.onboard(2, 2)
            before, after = kvswap.Event(rig.device), kvswap.Event(rig.device)
            before.record(compute)
            before.synchronize(PATIENCE)
            rig.manager.sync_transfers(compute)
            after.record(compute)
            assert is_held_up(rig.device, after.query)
            free.synchronize(PATIENCE)
            gate.open()
            after.synchronize(PATIENCE)


def test_steps_of_a_model() -> None:
    """Every interleaving of steps as an engine makes them: produce, store, reuse, load, use."""
    for seed in range(1, 41):
        device = testing.deterministic_device(seed)
        rig = Rig(device, HALF, MLA)
        compute = kvswap.Stream(device)
        jobs = []
        for step in range(5):
            rig.write(compute, 1, 100 + 10 * step)
            rig.manager.sync_with_compute(compute)
            rig.offload(1, step)
            rig.onboard(step, 2)
            rig.manager.sync_transfers(compute)
            jobs.append(rig.look(compute, Block(2), 100 + 10 * step))
        assert all(right(job) for job in jobs), f"seed {seed}"


def test_syncs_of_every_order(rig: Rig) -> None:
    compute = kvswap.Stream(rig.device)
    for _ in range(3):
        rig.manager.sync_transfers(compute)
        rig.manager.sync_with_compute(compute)
        rig.manager.sync_with_compute(compute.handle)
        rig.manager.sync_transfers(0)
    rig.offload(1, 1).wait(PATIENCE)
    with pytest.raises(TypeError, match="stream"):
        rig.manager.sync_with_compute("x")


def test_after(rig: Rig) -> None:
    stream = kvswap.Stream(rig.device)
    with Gate(rig.device) as gate:
        gate.hold(stream)
        rig.write(stream, 3, 100)
        stored = rig.offload(3, 4, after=stream)
        loaded = rig.onboard(5, 6, after=[stored])
        assert not stored.done() and not loaded.done()
        gate.open()
        loaded.wait(PATIENCE)
        assert right(rig.look(stream, Block(4, False), 100))


def test_many_threads(rig: Rig) -> None:
    """Threads copy blocks of their own there and back, and synchronise as they like."""
    failures: list[BaseException] = []
    streams = [kvswap.Stream(rig.device) for _ in range(4)]

    def work(own: int) -> None:
        try:
            for i in range(40):
                mine = [2 * own, 2 * own + 1]
                rig.manager.sync_with_compute(streams[own])
                rig.offload(mine, [3 * own, 3 * own + 1], i % 6)
                rig.onboard([3 * own + 1, 3 * own], mine, i % 6).wait(PATIENCE)
                rig.manager.sync_transfers(streams[own])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=[own]) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for own in range(4):
        for i in range(40):
            for k in range(2):
                rig.copied(Block(2 * own + k), Block(3 * own + k, False), i % 6)
            for k in range(2):
                rig.copied(Block(3 * own + 1 - k, False), Block(2 * own + k), i % 6)
    rig.check()
    stats = rig.manager.get_and_reset_transfer_stats()
    assert (stats.offload_blocks, stats.onboard_blocks) == (320, 320)


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_failed_store_is_no_source(rig: Rig) -> None:
    with testing.fault(rig.device, "copy", "fail", every=1, code=33):
        stored = rig.offload([2, 1], [4, 5])
    loaded = rig.onboard([5, 6], [7, 8])
    again = rig.offload([7, 8], [9, 10])  # what should have been loaded is no source either
    for transfer, lost in ((stored, [0, 1]), (loaded, [0]), (again, [0])):
        with pytest.raises(kvswap.DeviceError) as caught:
            transfer.wait(PATIENCE)
        assert (transfer.state, transfer.failed_positions.tolist()) == ("failed", lost)
        assert "code 33" in str(caught.value)
        assert transfer is stored or f"transfer {stored.number} failed" in str(transfer.error)
    rig.copied(Block(6, False), Block(8))
    rig.copied(Block(8), Block(10, False))
    rig.check()


@pytest.mark.parametrize("how", ["whole", "told"])
def test_a_slot_that_is_written_again_is_a_source(rig: Rig, how: str) -> None:
    with testing.fault(rig.device, "copy", "fail", every=1, code=33):
        rig.offload(1, 5)
    if how == "whole":
        rig.offload(2, 5, 1)  # the first token is right now, the others are not
        rig.copied(Block(2), Block(5, False), 1)
        with pytest.raises(kvswap.DeviceError):
            rig.onboard(5, 7).wait(PATIENCE)
        rig.offload(2, 5).wait(PATIENCE)
        rig.copied(Block(2), Block(5, False))
    else:
        for pool in rig.manager.secondary_pools:
            testing.note_access(kvswap.Stream(rig.device), pool, [5], True)
    rig.onboard(5, 7).wait(PATIENCE)
    rig.copied(Block(5, False), Block(7))
    rig.check()


def test_a_lane_goes_on_behind_a_failed_copy(rig: Rig) -> None:
    compute = kvswap.Stream(rig.device)
    with testing.fault(rig.device, "copy", "fail", every=1, code=33):
        rig.offload(1, 5)
    rig.manager.sync_transfers(compute)
    rig.offload(2, 6).wait(PATIENCE)
    rig.onboard(6, 3).wait(PATIENCE)
    compute.synchronize(PATIENCE)
    rig.copied(Block(2), Block(6, False))
    rig.copied(Block(6, False), Block(3))
    rig.check()


def test_a_full_lane() -> None:
    device = testing.deterministic_device(3)
    testing.set_lane_depth(device, 2)
    rig = Rig(device)
    with Gate(device) as gate:
        gate.hold(rig.manager.offload_stream)
        for i in range(2):
            rig.offload(i, i)
            rig.copied(Block(i), Block(i, False))
        with pytest.raises(kvswap.QueueFull):
            rig.offload(3, 3)
        gate.open()
    rig.check()
    assert rig.manager.get_and_reset_transfer_stats().offload_blocks == 2


# -- words ------------------------------------------------------------------------------------------------------------


WRONG: dict[str, tuple[Callable[[Rig], Any], type[Exception], str]] = {
    "beyond": (lambda r: r.offload([1, PRIMARY], [1, 2]), IndexError, rf"block\[1\] is {PRIMARY}.*{PRIMARY} blocks"),
    "target beyond": (
        lambda r: r.offload(1, SECONDARY),
        IndexError,
        rf"offload_block\[0\] is {SECONDARY}.*{SECONDARY} blocks",
    ),
    "negative": (lambda r: r.onboard(-1, 0), IndexError, r"offloaded_block\[0\] is -1"),
    "lengths": (lambda r: r.onboard([1, 2], [3]), ValueError, "block has 1 items, but offloaded_block has 2"),
    "twice": (lambda r: r.offload([1, 2], [3, 3]), ValueError, r"offload_block\[1\]"),
    "read and written": (lambda r: r.onboard([Block(1), Block(2)], [2, 3]), ValueError, "block"),
    "memories": (
        lambda r: r.onboard([1, Block(2), 3], [1, 2, 3]),
        ValueError,
        r"offloaded_block\[1\] is in primary memory, but offloaded_block\[0\] in secondary",
    ),
    "target memories": (
        lambda r: r.offload([1, 2], [Block(1, False), Block(2)]),
        ValueError,
        r"offload_block\[1\] is in primary memory, but offload_block\[0\] in secondary",
    ),
    "wrong way": (lambda r: r.offload(Block(1, False), Block(2)), ValueError, r"that is for onboard\(\)"),
    "other wrong way": (lambda r: r.onboard(Block(1), Block(2, False)), ValueError, r"that is for offload\(\)"),
    "float": (lambda r: r.offload(1.0, 2), TypeError, "block must be .* not float"),
    "float in a list": (lambda r: r.offload([1, 1.0], [2, 3]), TypeError, r"block\[1\] must be an int"),
    "bool": (lambda r: r.offload(True, 2), TypeError, "block.*bool"),
    "text": (lambda r: r.offload("12", 2), TypeError, "block must be .* not str"),
    "none": (lambda r: r.offload(1, None), TypeError, "offload_block must be .* not NoneType"),
    "float array": (lambda r: r.offload(np.zeros(1), [2]), TypeError, "block must be int32 or int64"),
    "square": (lambda r: r.offload(np.zeros((1, 1), int), [2]), ValueError, "block must be one-dimensional"),
    "tokens": (lambda r: r.offload(1, 2, 1.5), TypeError, "num_tokens_to_copy must be an int, not float"),
    "mode": (lambda r: r.offload(1, 2, 0, "disk"), ValueError, "mode is 'disk'"),
    "mode case": (lambda r: r.offload(1, 2, mode="DRAM"), ValueError, "mode is 'DRAM'"),
    "after": (lambda r: r.offload(1, 2, after="x"), TypeError, "after"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments(rig: Rig, what: str) -> None:
    call, error, message = WRONG[what]
    submitted = rig.device.stats()["submitted"]
    with pytest.raises(error, match=message):
        call(rig)
    assert rig.device.stats()["submitted"] == submitted
    assert rig.manager.get_and_reset_transfer_stats() == KvCacheTransferStats()
    rig.check()


def test_directory_is_not_looked_at(rig: Rig) -> None:
    rig.offload(1, 2, 0, "dram", "/nowhere").wait(PATIENCE)
    rig.copied(Block(1), Block(2, False))
    rig.check()


class Halfbyte:
    itemsize = 0.5


@pytest.mark.parametrize(
    ("dtype", "bits", "can_cut"),
    [
        ("fp32", 32, True),
        ("fp16", 16, True),
        ("BF16", 16, True),
        ("fp8", 8, True),
        ("int8", 8, True),
        ("fp4", 4, False),
        ("int4", 4, False),
        (np.float16, 16, True),
        (np.dtype(np.float32), 32, True),
        (16, 16, True),
        (4, 4, False),
        (np.int64(8), 8, True),
        (Halfbyte(), 4, False),
    ],
)
def test_dtypes(dtype: Any, bits: int, can_cut: bool) -> None:
    pool = KVCacheBlockPool(4096, 8192, 2, 2, 3, 2, 1, 4, 8, dtype)
    assert (pool.bits, pool.can_cut) == (bits, can_cut)
    assert pool.block_nbytes == 3 * 2 * 4 * 8 * bits // 8 == 3 * pool.layer_nbytes
    assert pool.nbytes(1) == (pool.block_nbytes // 4 if can_cut else pool.block_nbytes)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dtype": "fp12"}, ValueError, "dtype is 'fp12'; by name it is one of"),
        ({"dtype": None}, TypeError, "dtype must be a name"),
        ({"dtype": True}, TypeError, "dtype must be a name"),
        ({"dtype": 0}, ValueError, "dtype is 0"),
        ({"num_layers": 0}, ValueError, "num_layers is 0: must be at least 1"),
        ({"tokens_per_block": 1.0}, TypeError, "tokens_per_block must be an int, not float"),
        ({"num_primary_blocks": 0}, ValueError, "num_primary_blocks is 0"),
        ({"num_secondary_blocks": -1}, ValueError, "num_secondary_blocks is -1"),
        ({"num_secondary_blocks": 0}, ValueError, "a secondary was given, but num_secondary_blocks is 0"),
        ({"secondary": None}, ValueError, "no secondary was given, but num_secondary_blocks is 2"),
        ({"block_nbytes": 100}, ValueError, "block_nbytes is 100: must be at least 216"),
        ({"dtype": "fp4", "num_layers": 1, "kv_factor": 1, "num_kv_heads": 1}, ValueError, "36 bits"),
    ],
)
def test_wrong_pools(change: dict[str, Any], error: type[Exception], message: str) -> None:
    good: dict[str, Any] = {
        "primary": 4096,
        "secondary": 8192,
        "num_primary_blocks": 2,
        "num_secondary_blocks": 2,
        "num_layers": 3,
        "kv_factor": 2,
        "num_kv_heads": 2,
        "tokens_per_block": 3,
        "size_per_head": 3,
        "dtype": "fp16",
    }
    KVCacheBlockPool(**good)
    with pytest.raises(error, match=message):
        KVCacheBlockPool(**{**good, **change})


def test_wrong_lists_of_pools(rig: Rig) -> None:
    one = rig.pools[0]
    other = KVCacheBlockPool(one.primary, one.secondary, PRIMARY, 3, **HALF)
    with pytest.raises(ValueError, match="pools is empty"):
        KVCacheTransferManager([])
    with pytest.raises(TypeError, match=r"pools\[1\] must be a KVCacheBlockPool, not dict"):
        KVCacheTransferManager([one, HALF])
    with pytest.raises(ValueError, match=rf"num_secondary_blocks is 3 in pools\[1\] and {SECONDARY} in pools\[0\]"):
        KVCacheTransferManager([one, other])
    with pytest.raises(ValueError, match=r"pools\[0\]\.primary: .*overlap"):  # its memory is the fixture's
        KVCacheTransferManager([one], device=rig.device)


def test_options_go_to_every_copy(device: kvswap.Device) -> None:
    for option, value in (("path", "x"), ("priority", "x"), ("max_ctas", 0), ("pace_gbps", 0)):
        with pytest.raises(ValueError, match=option):
            Rig(device, **{option: value}).offload(1, 2)
    transfer = Rig(device, path="dma", priority="high", max_ctas=2, pace_gbps=10.0).offload(1, 2)
    transfer.wait(PATIENCE)
    assert transfer.path == "dma"


def test_without_secondary_memory(device: kvswap.Device) -> None:
    buffer = Buffer(device, PRIMARY * 1024)
    buffer.randomise(1)
    pool = KVCacheBlockPool(buffer.ptr, None, PRIMARY, 0, **{**HALF, "primary_stride": 1024})
    manager = KVCacheTransferManager([pool], device=device)
    assert manager.secondary_pools == ()
    manager.onboard(Block(1), 2).wait(PATIENCE)
    there = buffer.get().reshape(PRIMARY, 1024)
    assert (there[1, : pool.block_nbytes] == there[2, : pool.block_nbytes]).all()
    for call in (lambda: manager.offload(1, 2), lambda: manager.onboard(1, 2)):
        with pytest.raises(ValueError, match="no secondary memory"):
            call()


# -- what there is ----------------------------------------------------------------------------------------------------


def test_stats(rig: Rig) -> None:
    block, part = (sum(pool.nbytes(tokens) for pool in rig.pools) for tokens in (0, 2))
    transfers = [
        rig.offload([1, 2], [3, 4]),
        rig.offload(1, 5, 2),
        rig.onboard(3, 6),
        rig.onboard(Block(1), 7, 2),
        rig.offload(1, Block(8)),
    ]
    with testing.fault(rig.device, "copy", "fail", every=1):
        transfers.append(rig.onboard([9, 10, 11], [0, 3, 4], 2))  # counted, as it was submitted
    assert rig.manager.get_and_reset_transfer_stats() == KvCacheTransferStats(
        onboard_blocks=4,
        onboard_bytes=block + 3 * part,
        offload_blocks=3,
        offload_bytes=2 * block + part,
        intra_device_copy_blocks=2,
        intra_device_copy_bytes=block + part,
    )
    assert rig.manager.get_and_reset_transfer_stats() == KvCacheTransferStats()
    for transfer in transfers[:-1]:
        transfer.wait(PATIENCE)


def test_pools_and_streams(rig: Rig) -> None:
    manager = rig.manager
    assert manager.device is rig.device
    assert len(manager.primary_pools) == len(manager.secondary_pools) == len(POOLS)
    assert [pool.name for pool in manager.primary_pools] == [f"primary {i}" for i in range(4)]
    assert [pool.name for pool in manager.secondary_pools] == [f"secondary {i}" for i in range(4)]
    for side in (manager.primary_pools, manager.secondary_pools):
        assert [pool.group for pool in side] == [None, *[side[0]] * 3]
    assert manager.offload_stream.handle != manager.onboard_stream.handle


def test_close(rig: Rig) -> None:
    with Gate(rig.device) as gate:
        for lane in (rig.manager.offload_stream, rig.manager.onboard_stream):
            gate.hold(lane)
        transfers = [rig.offload(1, 2), rig.onboard(3, 4)]
        with pytest.raises(TimeoutError):
            rig.manager.close(0.01)
        with pytest.raises(kvswap.Error, match="closed"):
            rig.offload(1, 2)
        gate.open()
        rig.manager.close()
        assert all(transfer.done() for transfer in transfers)
    rig.manager.close()
    rig.manager.close(None)
    with pytest.raises(kvswap.Error, match="closed"):
        rig.onboard(1, 2)
    rig.copied(Block(1), Block(2, False))
    rig.copied(Block(3, False), Block(4))
    rig.check()


def test_close_on_a_lost_device() -> None:
    device = testing.deterministic_device(3)
    rig = Rig(device)
    transfer = rig.offload(1, 2)
    with testing.fault(device, "call", "lose", operation="event_record"), pytest.raises(kvswap.DeviceError):
        rig.manager.sync_with_compute(0)
    with pytest.raises(kvswap.DeviceError):
        rig.manager.close()
    with pytest.raises(kvswap.DeviceError):
        transfer.wait(PATIENCE)


def test_a_manager_is_a_context(device: kvswap.Device) -> None:
    rig = Rig(device)
    usable(device, "auto")
    with rig.manager as manager:
        transfer = manager.offload(1, 2)
    assert transfer.done()
    with pytest.raises(kvswap.Error, match="closed"):
        manager.offload(1, 2)


def test_nothing_keeps_a_manager(device: kvswap.Device) -> None:
    """Its pools go with it, at once: their memory can be given to other pools."""
    rig = Rig(device)
    rig.offload(1, 2, 3).wait(PATIENCE)
    gone = weakref.ref(rig.manager)
    gc.disable()
    try:
        del rig.manager
        assert gone() is None
    finally:
        gc.enable()
    KVCacheTransferManager(rig.pools, device=device).offload(1, 2).wait(PATIENCE)


def test_parts_are_remembered_within_bounds(rig: Rig) -> None:
    for _ in range(2):
        for tokens in range(-2, TOKENS + 3):
            for layered in (False, True):
                rig.offload(1, 2, tokens, layer_events=layered).wait(PATIENCE)
    assert rig.manager._parts.cache_info().currsize <= TOKENS


# -- coded host blocks ------------------------------------------------------------------------------------------------


class Coded:
    """Two pools whose host blocks are coded, and normal values in the GPU's."""

    def __init__(self, device: kvswap.Device, codec: str, dtype: Any = "bf16") -> None:
        usable(device, "kernel")
        shape: dict[str, Any] = {**HALF, "dtype": dtype, "size_per_head": 64, "codec": codec}
        self.pools: list[KVCacheBlockPool] = []
        self.gpu: list[Buffer] = []
        self.host: list[Buffer] = []
        self.values: list[Any] = []
        for i in range(2):
            one = KVCacheBlockPool(1, 1, 1, 1, **shape)
            self.gpu.append(Buffer(device, PRIMARY * one.nbytes(), "gpu"))
            self.host.append(Buffer(device, SECONDARY * one.secondary_nbytes, "cpu"))
            values = np.random.default_rng(i).standard_normal((PRIMARY, one.nbytes() // 2), np.float32)
            kind = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bf16" else values.astype(np.float16)
            self.values.append(kind.view(np.uint8).copy())
            self.gpu[-1].put(self.values[-1].reshape(-1))
            self.pools.append(KVCacheBlockPool(self.gpu[-1].ptr, self.host[-1].ptr, PRIMARY, SECONDARY, **shape))
        self.manager = KVCacheTransferManager(self.pools, device=device)

    def blocks(self, pool: int) -> Any:
        return self.gpu[pool].get().reshape(PRIMARY, -1)


@pytest.mark.parametrize(("codec", "dtype"), [("exact", "bf16"), ("mxfp8", "float16"), ("fp4", "bf16")])
def test_coded_host_blocks(device: kvswap.Device, codec: str, dtype: str) -> None:
    rig = Coded(device, codec, dtype)
    with rig.manager as manager:
        manager.offload([1, 2, 5], [3, 4, 0]).wait(PATIENCE)
        onboarded = manager.onboard([4, 0], [7, 8], 1)  # a token: the block moves whole
        onboarded.wait(PATIENCE)
        for i, (values, pool) in enumerate(zip(rig.values, rig.pools, strict=True)):
            assert pool.coding is not None and pool.secondary_nbytes < pool.nbytes()
            coded = rig.host[i].get().reshape(SECONDARY, -1)[[3, 4, 0]]
            np.testing.assert_array_equal(coded, pool.coding.encode(values[[1, 2, 5]])[0])
            values[[7, 8]] = pool.coding.decode(coded[1:])[0]
            np.testing.assert_array_equal(rig.blocks(i), values)
        manager.offload(Block(1), Block(9), 2).wait(PATIENCE)  # on the GPU a part can be copied
        stats = manager.get_and_reset_transfer_stats()
        assert stats.offload_bytes == 3 * sum(pool.nbytes() for pool in rig.pools)
    heads = HALF["num_layers"] * HALF["kv_factor"] * HALF["num_kv_heads"]
    for i, values in enumerate(rig.values):
        rows = values.reshape(PRIMARY, heads, TOKENS, -1)
        rows[9, :, :2] = rows[1, :, :2]
        np.testing.assert_array_equal(rig.blocks(i), values)


def test_coded_layers_in_order(device: kvswap.Device) -> None:
    rig = Coded(device, "exact")
    with rig.manager as manager:
        manager.offload([1, 2], [3, 4], layer_events=True).wait(PATIENCE)
        load = manager.onboard([3, 4], [5, 6], layer_events=True)
        stream = kvswap.Stream(device)
        for layer in range(manager.num_layers):
            load.make_wait_layer(layer, stream)
        stream.synchronize(PATIENCE)
    for i, values in enumerate(rig.values):
        values[[5, 6]] = values[[1, 2]]
        np.testing.assert_array_equal(rig.blocks(i), values)


def test_a_block_that_does_not_fit(device: kvswap.Device) -> None:
    """It fails alone in the batch, and so does loading it."""
    rig = Coded(device, "exact")
    rig.values[1][2] = np.random.default_rng(9).integers(0, 256, rig.values[1].shape[1], np.uint8)
    rig.gpu[1].put(rig.values[1].reshape(-1))
    with rig.manager as manager:
        stored = manager.offload([1, 2, 3], [1, 2, 3])
        with pytest.raises(kvswap.Error, match="position 1 does not fit the coded size"):
            stored.wait(PATIENCE)
        assert stored.failed_positions.tolist() == [1]
        loaded = manager.onboard([2, 3], [6, 7])
        with pytest.raises(kvswap.Error):
            loaded.wait(PATIENCE)
        assert loaded.failed_positions.tolist() == [0]


def test_codecs_that_do_not_fit_the_pool(device: kvswap.Device) -> None:
    for shape, why in (
        ({**HALF, "dtype": "fp8", "codec": "exact"}, "code bf16 and fp16 by name: its dtype is fp8"),
        ({**HALF, "dtype": 16, "codec": "exact"}, "its dtype is 16"),
        ({**SCALES, "codec": "exact"}, "its elements are scales"),
        ({**HALF, "dtype": "bf16", "block_nbytes": 4096, "codec": "exact"}, "bytes of padding"),
        ({**HALF, "dtype": "bf16", "codec": "zip"}, "the codec is zip"),
    ):
        with pytest.raises(ValueError, match=why):
            KVCacheBlockPool(1, 1, 1, 1, **shape)
    rig = Coded(device, "exact")
    plain = KVCacheBlockPool(rig.gpu[0].ptr, rig.host[0].ptr, PRIMARY, SECONDARY, **HALF)
    with pytest.raises(ValueError, match=r"pools\[0\] has a codec and pools\[1\] has none"):
        KVCacheTransferManager([rig.pools[1], plain], device=device)
    rig.manager.close()
