"""Path strided: copies of rows, where tensors lie at equal distances in one allocation."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Buffer, bindings

import kvswap
from kvswap import _C, testing

LAYERS, BLOCKS, SLOTS = 6, 20, 24


class Slab:
    """Layers in one allocation, layer-first, beside a pool that is block-first or layer-first."""

    def __init__(self, device: kvswap.Device, nbytes: int, block_first: bool = True, gap: int = 0) -> None:
        self.device, self.nbytes, self.pitch = device, nbytes, BLOCKS * nbytes + gap
        self.gpu = Buffer(device, LAYERS * self.pitch, "gpu")
        self.cpu = Buffer(device, LAYERS * SLOTS * nbytes, "cpu")
        self.gpu.randomise(1), self.cpu.randomise(2)
        self.gpu_ptrs = [self.gpu.ptr + layer * self.pitch for layer in range(LAYERS)]
        step = nbytes if block_first else SLOTS * nbytes
        self.cpu_ptrs = [self.cpu.ptr + layer * step for layer in range(LAYERS)]
        self.cpu_stride = LAYERS * nbytes if block_first else nbytes
        self.block_first = block_first

    def blocks(self, side: str) -> Any:
        """As [layer, block, byte]."""
        if side == "gpu":
            return self.gpu.get().reshape(LAYERS, self.pitch)[:, : BLOCKS * self.nbytes].reshape(LAYERS, BLOCKS, -1)
        shape = (SLOTS, LAYERS, self.nbytes) if self.block_first else (LAYERS, SLOTS, self.nbytes)
        return self.cpu.get().reshape(shape).swapaxes(0, 1) if self.block_first else self.cpu.get().reshape(shape)

    def swap(self, gpu_ids: Any, cpu_ids: Any, direction: int, order: Any = None, **options: Any) -> kvswap.Transfer:
        order = range(LAYERS) if order is None else order
        return kvswap.swap_cache_all_layers_async(
            [self.gpu_ptrs[i] for i in order],
            [self.cpu_ptrs[i] for i in order],
            self.nbytes,
            BLOCKS,
            SLOTS,
            gpu_ids,
            cpu_ids,
            direction,
            cpu_stride=self.cpu_stride,
            device=self.device,
            **options,
        )

    def expected(self, gpu_ids: Any, cpu_ids: Any, direction: int) -> tuple[Any, Any]:
        gpu, cpu = self.blocks("gpu").copy(), self.blocks("cpu").copy()
        if direction:
            gpu[:, gpu_ids] = cpu[:, cpu_ids]
        else:
            cpu[:, cpu_ids] = gpu[:, gpu_ids]
        return gpu, cpu

    def check(self, expected: tuple[Any, Any]) -> None:
        np.testing.assert_array_equal(self.blocks("gpu"), expected[0])
        np.testing.assert_array_equal(self.blocks("cpu"), expected[1])


def ids(seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.permutation(BLOCKS)[:13], rng.permutation(SLOTS)[:13]


@pytest.mark.parametrize("block_first", [True, False], ids=["block-first", "layer-first"])
@pytest.mark.parametrize("nbytes", [1, 7, 16, 4095, 4096, 8192])
@pytest.mark.parametrize("gap", [0, 5, 4096])
def test_a_slab(device: kvswap.Device, direction: int, nbytes: int, block_first: bool, gap: int) -> None:
    """One copy a block, whatever the order in which the layers are named; and nothing else changes."""
    slab = Slab(device, nbytes, block_first, gap)
    for seed, order in enumerate(([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [3, 0, 5, 1, 4, 2])):
        gpu_ids, cpu_ids = ids(seed)
        expected, before = slab.expected(gpu_ids, cpu_ids, direction), device.stats()["copies"]
        transfer = slab.swap(gpu_ids, cpu_ids, direction, order, path="strided")
        transfer.wait(PATIENCE)
        slab.check(expected)
        assert (transfer.path, device.stats()["copies"] - before) == ("strided", gpu_ids.size)


def test_some_tensors_lie_otherwise(device: kvswap.Device, direction: int) -> None:
    """What is at no equal distance goes by plain copies, in the same transfer."""
    slab = Slab(device, 96)
    slab.gpu_ptrs[4], slab.gpu_ptrs[5] = slab.gpu_ptrs[5], slab.gpu_ptrs[4]
    gpu_ids, cpu_ids = ids(4)
    gpu, cpu = slab.blocks("gpu").copy(), slab.blocks("cpu").copy()
    swapped = [0, 1, 2, 3, 5, 4]
    for layer, there in enumerate(swapped):
        if direction:
            gpu[there, gpu_ids] = cpu[layer, cpu_ids]
        else:
            cpu[layer, cpu_ids] = gpu[there, gpu_ids]
    transfer = slab.swap(gpu_ids, cpu_ids, direction, path="strided")
    transfer.wait(PATIENCE)
    slab.check((gpu, cpu))
    assert transfer.path == "strided"


def test_tensors_of_their_own_are_not_strided(device: kvswap.Device, direction: int) -> None:
    """Separate allocations: the driver refuses rows across them, however evenly they lie."""
    gpu = [Buffer(device, BLOCKS * 64, "gpu") for _ in range(4)]
    cpu = [Buffer(device, SLOTS * 64, "cpu") for _ in range(4)]
    for i, buffer in enumerate([*gpu, *cpu]):
        buffer.randomise(i)
    gpu_ids, cpu_ids = ids(5)
    sources, targets = (cpu, gpu) if direction else (gpu, cpu)
    from_ids, to_ids = (cpu_ids, gpu_ids) if direction else (gpu_ids, cpu_ids)
    expected = [buffer.get().reshape(-1, 64).copy() for buffer in targets]
    for target, source in zip(expected, sources, strict=True):
        target[to_ids] = source.get().reshape(-1, 64)[from_ids]
    transfer = kvswap.swap_cache_all_layers_async(
        [buffer.ptr for buffer in gpu],
        [buffer.ptr for buffer in cpu],
        64,
        BLOCKS,
        SLOTS,
        gpu_ids,
        cpu_ids,
        direction,
        device=device,
        path="strided",
    )
    transfer.wait(PATIENCE)
    for target, wanted in zip(targets, expected, strict=True):
        np.testing.assert_array_equal(target.get().reshape(-1, 64), wanted)


@pytest.mark.parametrize("cheap", ["dma", "strided", "burst", "kernel"])
def test_auto_takes_what_is_predicted_to_be_fastest(direction: int, cheap: str) -> None:
    device = testing.deterministic_device(3)
    costs = _C._costs_read(None)
    for paths in (costs["d2h"], costs["h2d"]):
        for path, cost in paths.items():
            cost["start"] = 1.0 if path == cheap else 1e9
    bindings.costs_use(device, costs)
    slab = Slab(device, 4096)
    gpu_ids, cpu_ids = ids(6)
    expected = slab.expected(gpu_ids, cpu_ids, direction)
    transfer = slab.swap(gpu_ids, cpu_ids, direction)
    transfer.wait(PATIENCE)
    slab.check(expected)
    assert transfer.path == cheap


def test_neighbours_are_better_merged(direction: int) -> None:
    """Long runs of blocks are fewer copies than blocks."""
    device = testing.deterministic_device(3)
    slab = Slab(device, 8192, block_first=False)
    run = np.arange(BLOCKS)
    expected = slab.expected(run, run, direction)
    transfer = slab.swap(run, run, direction)
    transfer.wait(PATIENCE)
    slab.check(expected)
    assert transfer.path == "dma" and device.stats()["copies"] == LAYERS


@pytest.mark.parametrize("refused", [1, 3])
def test_a_refused_block(device: kvswap.Device, direction: int, refused: int) -> None:
    """A copy of rows that the driver refuses goes row by row; rows that it refuses too fail their block alone."""
    slab = Slab(device, 64)
    gpu_ids, cpu_ids = ids(7)
    expected = slab.expected(gpu_ids, cpu_ids, direction)
    with testing.fault(device, "call", "fail", operation="copy_rect", nth=refused, code=1):
        transfer = slab.swap(gpu_ids, cpu_ids, direction, path="strided")
    transfer.wait(PATIENCE)
    slab.check(expected)


def test_a_lost_block(device: kvswap.Device, direction: int) -> None:
    slab = Slab(device, 64)
    gpu_ids, cpu_ids = ids(8)
    gpu, cpu = slab.expected(gpu_ids, cpu_ids, direction)
    with (
        testing.fault(device, "call", "fail", operation="copy_rect", every=1, code=1),
        testing.fault(device, "copy", "fail", nth=10**9),  # the copies are looked at: none are rows then
    ):
        transfer = slab.swap(gpu_ids, cpu_ids, direction, path="strided")
    transfer.wait(PATIENCE)
    slab.check((gpu, cpu))
    assert transfer.path == "dma"


def test_layers_are_copied_one_by_one(device: kvswap.Device, direction: int) -> None:
    """Rows over all layers and events a layer do not go together."""
    slab = Slab(device, 64)
    gpu_ids, cpu_ids = ids(9)
    expected = slab.expected(gpu_ids, cpu_ids, direction)
    transfer = slab.swap(gpu_ids, cpu_ids, direction, path="strided", layer_events=True)
    stream = kvswap.Stream(device)
    transfer.make_wait_layer(LAYERS - 1, stream)
    transfer.wait(PATIENCE)
    slab.check(expected)
    assert (transfer.path, transfer.num_layers) == ("dma", LAYERS)


@pytest.mark.parametrize("path", ["strided", "dma", "kernel", "auto"])
def test_the_race_checker_sees_rows(direction: int, path: str) -> None:
    device = testing.deterministic_device(5)
    slab = Slab(device, 4096)
    pool = kvswap.Pool(device, slab.cpu.ptr, SLOTS, LAYERS * slab.nbytes, name="host")
    stream = kvswap.Stream(device)
    with testing.race_checker(raise_at_exit=False) as checker:
        testing.note_access(stream, pool, [3], True)
        slab.swap([1, 2], [4, 3], direction, path=path).wait(PATIENCE)
        races = checker.races
    assert [(race.pool, race.slot, race.second.write) for race in races] == [("host", 3, direction == 0)]


@pytest.mark.parametrize("apart", [(600 << 20) + 4096, (3400 << 20) + 512])
def test_layers_that_lie_far_apart(device: kvswap.Device, direction: int, apart: int) -> None:
    """Beyond the largest pitch of a 2-D copy (2 GiB) too."""
    nbytes, layers = 65536, 3
    cpu = Buffer(device, layers * 4 * nbytes, "cpu")
    cpu.randomise(1)
    room = 2 * apart + 4 * nbytes
    if device.kind == "cuda":
        memory = device.alloc(room)
        base, size = memory.ptr, 4 * nbytes
        pieces = [Buffer(device, size, "gpu") for _ in range(layers)]
    else:
        mapping = mmap.mmap(
            -1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        )
        whole = np.frombuffer(mapping, np.uint8)
        base = whole.ctypes.data
    there = [base + layer * apart for layer in range(layers)]
    rng = np.random.default_rng(2)
    layer_bytes = [rng.integers(0, 256, 4 * nbytes, np.uint8) for _ in range(layers)]
    for layer in range(layers):
        if device.kind == "cuda":
            pieces[layer].put(layer_bytes[layer])
            kvswap.swap_blocks_batch([pieces[layer].ptr], [there[layer]], 4 * nbytes, device=device).wait(PATIENCE)
        else:
            whole[layer * apart : layer * apart + 4 * nbytes] = layer_bytes[layer]
    before = cpu.get().reshape(4, layers, nbytes).copy()
    transfer = kvswap.swap_cache_all_layers_async(
        there,
        [cpu.ptr + layer * nbytes for layer in range(layers)],
        nbytes,
        4,
        4,
        [2, 0, 3],
        [1, 3, 0],
        direction,
        cpu_stride=layers * nbytes,
        device=device,
        path="strided",
    )
    transfer.wait(PATIENCE)
    assert transfer.path == "strided"
    for layer in range(layers):
        blocks = layer_bytes[layer].reshape(4, nbytes).copy()
        if direction:
            blocks[[2, 0, 3]] = before[[1, 3, 0], layer]
            if device.kind == "cuda":
                kvswap.swap_blocks_batch([there[layer]], [pieces[layer].ptr], 4 * nbytes, device=device).wait(PATIENCE)
                found = pieces[layer].get()
            else:
                found = whole[layer * apart : layer * apart + 4 * nbytes]
            np.testing.assert_array_equal(found.reshape(4, nbytes), blocks)
        else:
            wanted = before[:, layer].copy()
            wanted[[1, 3, 0]] = blocks[[2, 0, 3]]
            np.testing.assert_array_equal(cpu.get().reshape(4, layers, nbytes)[:, layer], wanted)
    if device.kind != "cuda":
        del whole


def test_defaults_of_a_device(direction: int) -> None:
    device = testing.deterministic_device(3)
    slab = Slab(device, 4096)
    gpu_ids, cpu_ids = ids(6)

    def path(**options: Any) -> str:
        expected = slab.expected(gpu_ids, cpu_ids, direction)
        transfer = slab.swap(gpu_ids, cpu_ids, direction, **options)
        transfer.wait(PATIENCE)
        slab.check(expected)
        taken: str = transfer.path
        return taken

    device.set_defaults(path="kernel", priority="background", max_ctas=3, pace_gbps=20.0)
    lanes = device.stats()["lanes"]
    assert (path(), path(path="dma")) == ("kernel", "dma")
    assert device.stats()["lanes"] == lanes + 1  # of the background
    assert path(priority="normal") == "kernel" and device.stats()["lanes"] == lanes + 1
    device.set_defaults(path="burst")
    assert path() == "burst"
    device.set_defaults()
    assert path(path="strided") == "strided"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"path": "ring"}, "path is 'ring'"),
        ({"priority": "low"}, "priority is 'low'"),
        ({"max_ctas": 0}, "max_ctas is 0"),
        ({"pace_gbps": -1}, "pace_gbps is -1"),
    ],
)
def test_wrong_defaults(device: kvswap.Device, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        device.set_defaults(**wrong)
