"""Every swap call, both directions, every path, odd sizes and addresses, against a model in NumPy: each byte that
should move has moved, and no other byte of either side has changed."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from conftest import PATHS, PATIENCE, Buffer, Bytes, Cache, seam, usable
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvswap
from kvswap import Direction

Ids = NDArray[Any]

SIZES = (1, 7, 8, 12, 15, 16, 24, 4095, 4096, 4097, 65536 + 3)
OFFSETS = ((0, 0), (1, 3), (3, 1), (8, 0), (0, 8), (8, 8), (1, 1))
GUARD = 64


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies in the two buffers."""

    nbytes: int
    gpu_blocks: int
    cpu_blocks: int
    gpu_stride: int
    cpu_stride: int
    gpu_at: int
    cpu_at: int


@dataclass(frozen=True)
class Case:
    device: kvswap.Device
    gpu_ptr: int
    cpu_ptr: int
    tensors: list[Tensor]
    gpu_ids: Ids
    cpu_ids: Ids
    direction: int
    options: dict[str, Any]


def lay_out(shapes: list[tuple[int, int, int, int, int]], offsets: tuple[int, int]) -> tuple[list[Tensor], int, int]:
    """Tensors one after another, guard bytes between them; also the bytes that each side takes."""
    tensors, at = [], [GUARD + offsets[0], GUARD + offsets[1]]
    for nbytes, gpu_blocks, cpu_blocks, gpu_gap, cpu_gap in shapes:
        tensors.append(Tensor(nbytes, gpu_blocks, cpu_blocks, nbytes + gpu_gap, nbytes + cpu_gap, at[0], at[1]))
        at[0] += gpu_blocks * (nbytes + gpu_gap) + GUARD
        at[1] += cpu_blocks * (nbytes + cpu_gap) + GUARD
    return tensors, at[0] + GUARD, at[1] + GUARD


def model(case: Case, gpu: Bytes, cpu: Bytes) -> tuple[Bytes, Bytes]:
    """Both sides as they have to be afterwards."""
    gpu, cpu = gpu.copy(), cpu.copy()
    for t in case.tensors:
        for g, c in zip(case.gpu_ids.tolist(), case.cpu_ids.tolist(), strict=True):
            here = slice(t.gpu_at + g * t.gpu_stride, t.gpu_at + g * t.gpu_stride + t.nbytes)
            there = slice(t.cpu_at + c * t.cpu_stride, t.cpu_at + c * t.cpu_stride + t.nbytes)
            if case.direction == Direction.H2D:
                gpu[here] = cpu[there]
            else:
                cpu[there] = gpu[here]
    return gpu, cpu


def spoil(*arrays: NDArray[Any]) -> None:
    for array in arrays:
        array.fill(1 << 30)


def strides(t: Tensor) -> dict[str, int | None]:
    return {
        "gpu_stride": None if t.gpu_stride == t.nbytes else t.gpu_stride,
        "cpu_stride": None if t.cpu_stride == t.nbytes else t.cpu_stride,
    }


def layer_arguments(case: Case, t: Tensor) -> tuple[Any, ...]:
    return (
        case.gpu_ptr + t.gpu_at,
        case.cpu_ptr + t.cpu_at,
        t.nbytes,
        t.gpu_blocks,
        t.cpu_blocks,
        case.gpu_ids,
        case.cpu_ids,
        case.direction,
    )


def per_layer(case: Case) -> None:
    for t in case.tensors:
        kvswap.swap_cache_per_layer(*layer_arguments(case, t), **strides(t), **case.options)


def per_layer_async(case: Case) -> None:
    transfers = []
    for t in case.tensors:
        transfers.append(kvswap.swap_cache_per_layer_async(*layer_arguments(case, t), **strides(t), **case.options))
    spoil(case.gpu_ids, case.cpu_ids)
    for transfer in transfers:
        transfer.wait(PATIENCE)


def layers_arguments(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def each(name: str) -> Any:
        values = [getattr(t, name) for t in case.tensors]
        return values[0] if len(set(values)) == 1 else np.array(values, np.int64)

    positional = (
        np.array([case.gpu_ptr + t.gpu_at for t in case.tensors], np.uint64),
        np.array([case.cpu_ptr + t.cpu_at for t in case.tensors], np.int64),
        each("nbytes"),
        each("gpu_blocks"),
        each("cpu_blocks"),
        case.gpu_ids,
        case.cpu_ids,
        case.direction,
    )
    return positional, {"gpu_stride": each("gpu_stride"), "cpu_stride": each("cpu_stride"), **case.options}


def all_layers(case: Case) -> None:
    positional, named = layers_arguments(case)
    kvswap.swap_cache_all_layers(*positional, **named)


def all_layers_async(case: Case) -> None:
    positional, named = layers_arguments(case)
    transfer = kvswap.swap_cache_all_layers_async(*positional, **named)
    spoil(*[value for value in (*positional, *named.values()) if isinstance(value, np.ndarray)])
    transfer.wait(PATIENCE)


def batch(case: Case) -> None:
    gpu, cpu, sizes = [], [], []
    for t in case.tensors:
        gpu.append(np.asarray(case.gpu_ids, np.int64) * t.gpu_stride + case.gpu_ptr + t.gpu_at)
        cpu.append(np.asarray(case.cpu_ids, np.int64) * t.cpu_stride + case.cpu_ptr + t.cpu_at)
        sizes.append(np.full(case.gpu_ids.size, t.nbytes, np.int64))
    src, dst = np.concatenate(gpu), np.concatenate(cpu)
    if case.direction == Direction.H2D:
        src, dst = dst, src
    lengths: Any = np.concatenate(sizes)
    one = len({t.nbytes for t in case.tensors}) == 1
    transfer = kvswap.swap_blocks_batch(
        src, dst.astype(np.uint64), case.tensors[0].nbytes if one else lengths, **case.options
    )
    spoil(src, dst, lengths)
    transfer.wait(PATIENCE)


CALLS: dict[str, Callable[[Case], None]] = {
    "swap_blocks_batch": batch,
    "swap_cache_per_layer": per_layer,
    "swap_cache_per_layer_async": per_layer_async,
    "swap_cache_all_layers": all_layers,
    "swap_cache_all_layers_async": all_layers_async,
}


class Sides:
    """The two buffers, large enough for every case of a test."""

    def __init__(self, device: kvswap.Device, nbytes: int, host: str = "cpu") -> None:
        self.device = device
        self.gpu, self.cpu = Buffer(device, nbytes, "gpu"), Buffer(device, nbytes, host)
        self.gpu_bytes, self.cpu_bytes = self.gpu.randomise(11), self.cpu.randomise(12)

    def run(
        self,
        call: str,
        shapes: list[tuple[int, int, int, int, int]],
        offsets: tuple[int, int],
        gpu_ids: Ids,
        cpu_ids: Ids,
        direction: int,
        **options: Any,
    ) -> None:
        tensors, gpu_nbytes, cpu_nbytes = lay_out(shapes, offsets)
        assert max(gpu_nbytes, cpu_nbytes) <= self.gpu.nbytes, "the test needs larger buffers"
        options["device"] = self.device
        self.gpu.put(self.gpu_bytes[:gpu_nbytes])
        self.cpu.put(self.cpu_bytes[:cpu_nbytes])
        case = Case(self.device, self.gpu.ptr, self.cpu.ptr, tensors, gpu_ids, cpu_ids, direction, options)
        gpu, cpu = model(case, self.gpu_bytes[:gpu_nbytes], self.cpu_bytes[:cpu_nbytes])
        what = f"{call} of {shapes} at {offsets}, {direction=}, {options}"
        CALLS[call](case)
        np.testing.assert_array_equal(self.gpu.get(gpu_nbytes), gpu, err_msg=what)
        np.testing.assert_array_equal(self.cpu.get(cpu_nbytes), cpu, err_msg=what)


def permutations(seed: int, gpu_blocks: int, cpu_blocks: int, count: int, dtype: Any) -> tuple[Ids, Ids]:
    rng = np.random.default_rng(seed)
    return rng.permutation(gpu_blocks)[:count].astype(dtype), rng.permutation(cpu_blocks)[:count].astype(dtype)


@pytest.mark.parametrize("call", ["swap_blocks_batch", "swap_cache_per_layer", "swap_cache_all_layers_async"])
def test_sizes_and_addresses(device: kvswap.Device, path: str, direction: int, call: str) -> None:
    """Blocks of every odd size at every odd address, permuted on both sides, with ids of both widths."""
    sides = Sides(device, 2 << 20)
    for i, nbytes in enumerate(SIZES):
        for j, offsets in enumerate(OFFSETS if nbytes < 5000 else OFFSETS[:3]):
            dtype = np.int32 if (i + j) % 2 else np.int64
            gpu_ids, cpu_ids = permutations(i * 100 + j, 20, 23, 18, dtype)
            sides.run(call, [(nbytes, 20, 23, 0, 0)], offsets, gpu_ids, cpu_ids, direction, path=path)


@pytest.mark.parametrize("call", CALLS)
def test_strides_and_values_per_tensor(device: kvswap.Device, path: str, direction: int, call: str) -> None:
    """Tensors that differ in everything that may differ."""
    sides = Sides(device, 1 << 20)
    shapes = [(12, 9, 8, 0, 0), (4095, 8, 10, 1, 33), (7, 30, 9, 9, 0), (16, 8, 8, 16, 48)]
    for i, offsets in enumerate(OFFSETS):
        gpu_ids, cpu_ids = permutations(i, 8, 8, 7, np.int64)
        sides.run(call, shapes, offsets, gpu_ids, cpu_ids, direction, path=path)


@pytest.mark.parametrize("call", CALLS)
def test_neighbours(device: kvswap.Device, path: str, direction: int, call: str) -> None:
    """Runs that go up on both sides, on one, down, and blocks that touch without being a run."""
    sides = Sides(device, 1 << 20)
    lists = [
        ([4, 5, 6, 7, 1, 2], [0, 1, 2, 3, 9, 10]),
        ([4, 5, 6, 7, 8, 9], [9, 8, 7, 6, 5, 4]),
        ([7, 6, 5, 4], [3, 2, 1, 0]),
        ([0, 2, 4, 6, 8, 10], [0, 1, 2, 3, 4, 5]),
        ([11], [0]),
        (list(range(12)), list(range(12))),
    ]
    for gpu_ids, cpu_ids in lists:
        for shapes in ([(4097, 12, 12, 0, 0)], [(24, 12, 12, 0, 0), (24, 12, 12, 0, 0), (24, 12, 12, 8, 0)]):
            sides.run(call, shapes, (0, 0), np.array(gpu_ids), np.array(cpu_ids), direction, path=path)


@pytest.mark.parametrize("call", CALLS)
def test_nothing_to_do(device: kvswap.Device, path: str, call: str) -> None:
    sides = Sides(device, 4096)
    none = np.array([], np.int64)
    sides.run(call, [(16, 4, 4, 0, 0)], (0, 0), none, none.copy(), 0, path=path)


def test_no_tensors(device: kvswap.Device) -> None:
    none = np.array([], np.int64)
    transfer = kvswap.swap_cache_all_layers_async(none, none, 16, 4, 4, [0], [1], 0, device=device)
    transfer.wait(PATIENCE)
    assert transfer.nbytes == 0
    transfer = kvswap.swap_blocks_batch([], [], 16, device=device)
    transfer.wait(PATIENCE)
    assert (transfer.nbytes, transfer.num_blocks, transfer.state) == (0, 0, "done")


def test_many_tiny_blocks(device: kvswap.Device, path: str, direction: int) -> None:
    blocks = 20000
    sides = Sides(device, blocks * 12 + 4096)
    gpu_ids, cpu_ids = permutations(3, blocks, blocks, blocks, np.int32)
    sides.run(
        "swap_cache_all_layers_async", [(12, blocks, blocks, 0, 0)], (0, 0), gpu_ids, cpu_ids, direction, path=path
    )


def test_many_tensors(device: kvswap.Device, path: str, direction: int) -> None:
    sides = Sides(device, 1 << 20)
    gpu_ids, cpu_ids = permutations(4, 10, 12, 9, np.int64)
    shapes = [(200 + i % 3, 10, 12, i % 5, 0) for i in range(300)]
    sides.run("swap_cache_all_layers_async", shapes, (0, 0), gpu_ids, cpu_ids, direction, path=path)


def test_plain_host_memory(device: kvswap.Device, direction: int) -> None:
    """Pageable host memory: NumPy's own."""
    sides = Sides(device, 1 << 20, host="plain")
    for nbytes in SIZES:
        gpu_ids, cpu_ids = permutations(nbytes, 8, 9, 8, np.int64)
        sides.run("swap_cache_per_layer_async", [(nbytes, 8, 9, 0, 0)], (3, 1), gpu_ids, cpu_ids, direction)


def test_both_sides_plain(device: kvswap.Device, path: str, direction: int) -> None:
    """On a host device ordinary arrays serve as both sides, passed as they are."""
    if device.kind != "host":
        pytest.skip("a GPU's side is GPU memory")
    rng = np.random.default_rng(1)
    gpu, cpu = rng.integers(0, 9, (16, 100), np.int32), rng.integers(0, 9, (16, 100), np.int32)
    before = cpu.copy() if direction == Direction.D2H else gpu.copy()
    kvswap.swap_cache_per_layer(gpu, cpu, 400, 16, 16, [3, 1], [0, 9], direction, device=device, path=path)
    expected = before
    if direction == Direction.D2H:
        expected[[0, 9]] = gpu[[3, 1]]
        np.testing.assert_array_equal(cpu, expected)
    else:
        expected[[3, 1]] = cpu[[0, 9]]
        np.testing.assert_array_equal(gpu, expected)


def test_copies_within_one_kind_of_memory(device: kvswap.Device, path: str) -> None:
    for side in ("gpu", "cpu"):
        buffer = Buffer(device, 8192, side)
        before = buffer.randomise(5)
        src = np.array([buffer.ptr + i * 64 for i in range(20)])
        kvswap.swap_blocks_batch(src, src + 4096, 63, device=device, path=path).wait(PATIENCE)
        expected = before.copy()
        for i in range(20):
            expected[4096 + i * 64 : 4096 + i * 64 + 63] = before[i * 64 : i * 64 + 63]
        np.testing.assert_array_equal(buffer.get(), expected)


@pytest.mark.parametrize("nbytes", [16, 4096])
def test_one_source_many_destinations(device: kvswap.Device, path: str, nbytes: int) -> None:
    cache = Cache(device, 8, nbytes)
    cache.swap([3, 3, 3], [0, 5, 7], path=path).wait(PATIENCE)
    cache.check([3, 3, 3], [0, 5, 7])


@pytest.mark.parametrize("nbytes", [4097, 65536])
@pytest.mark.parametrize("max_ctas", [None, 1])
@pytest.mark.parametrize("by", ["kernel", "burst"])
@pytest.mark.parametrize("priority", ["high", "normal", "background"])
def test_priorities_and_bounds(
    device: kvswap.Device, priority: str, by: str, max_ctas: int | None, nbytes: int, direction: int
) -> None:
    cache = Cache(device, 40, nbytes, direction)
    ids = np.random.default_rng(2).permutation(40)
    path = by if device.info["kernels"] else "dma"
    cache.swap(ids, ids[::-1], path=path, priority=priority, max_ctas=max_ctas, pace_gbps=5.0).wait(PATIENCE)
    cache.check(ids, ids[::-1])


def test_the_path_taken_is_said(device: kvswap.Device, path: str) -> None:
    cache = Cache(device, 4, 64)
    taken = cache.swap([0], [1], path=path).path
    if path == "strided":
        assert taken == "dma"  # there are no rows to a block
    else:
        assert taken == path if path != "auto" else taken in ("dma", "kernel", "direct")


# -- merging ----------------------------------------------------------------------------------------------------------


def counted(device: kvswap.Device, swap: Callable[[], kvswap.Transfer]) -> tuple[int, int]:
    before = device.stats()
    swap().wait(PATIENCE)
    after = device.stats()
    return after["copies"] - before["copies"], after["merged"] - before["merged"]


@pytest.mark.parametrize(
    ("gpu_ids", "cpu_ids", "copies"),
    [
        ([1, 2, 3, 4], [5, 6, 7, 8], 1),
        ([1, 2, 3, 4], [8, 7, 6, 5], 4),
        ([1, 2, 4, 5], [5, 6, 7, 8], 2),
        ([9, 1, 2, 3], [0, 5, 6, 8], 3),
        ([3], [3], 1),
        ([], [], 0),
    ],
)
def test_neighbours_are_one_copy(
    device: kvswap.Device, gpu_ids: list[int], cpu_ids: list[int], copies: int, direction: int
) -> None:
    cache = Cache(device, 10, 96, direction)
    assert counted(device, lambda: cache.swap(gpu_ids, cpu_ids, path="dma")) == (copies, len(gpu_ids) - copies)
    cache.check(np.array(gpu_ids, np.int64), np.array(cpu_ids, np.int64))


def test_neighbours_in_a_batch_are_one_copy(device: kvswap.Device, direction: int) -> None:
    """Both sides have to go on: a gap on either begins another copy."""
    cache = Cache(device, 10, 96, direction)
    gpu, cpu = cache.gpu.ptr, cache.cpu.ptr
    for here, there, copies in (
        ([1, 2, 3, 4], [5, 6, 7, 8], 1),
        ([1, 2, 4, 5], [5, 6, 7, 8], 2),
        ([3, 2, 1], [2, 1, 0], 3),
    ):
        src, dst = gpu + 96 * np.array(here), cpu + 96 * np.array(there)
        if direction:
            src, dst = dst, src

        def swap(src: Any = src, dst: Any = dst) -> kvswap.Transfer:
            return kvswap.swap_blocks_batch(src, dst, 96, device=device, path="dma")

        assert counted(device, swap) == (copies, len(here) - copies)
        cache.target.put(cache.target_before)


def test_strided_blocks_do_not_merge(device: kvswap.Device) -> None:
    cache = Cache(device, 10, 96)

    def swap() -> kvswap.Transfer:
        return kvswap.swap_cache_per_layer_async(
            cache.gpu.ptr, cache.cpu.ptr, 48, 20, 10, [0, 1, 2], [0, 1, 2], 0, cpu_stride=96, device=device
        )

    assert counted(device, swap) == (3, 0)


def test_merged_counts_every_tensor(device: kvswap.Device) -> None:
    """`merged`: blocks that rode in another block's copy. A block of two tensors is two."""
    sides = Sides(device, 4096)
    ptrs = [sides.gpu.ptr, sides.gpu.ptr + 2048], [sides.cpu.ptr, sides.cpu.ptr + 2048]

    def swap(gpu_ids: list[int], cpu_ids: list[int]) -> kvswap.Transfer:
        return kvswap.swap_cache_all_layers_async(*ptrs, 16, 8, 8, gpu_ids, cpu_ids, 0, device=device)

    assert counted(device, lambda: swap([0, 1, 2, 3], [4, 5, 6, 7])) == (2, 6)
    assert counted(device, lambda: swap([0, 1, 2], [4, 5, 7])) == (4, 2)


def test_pointer_lists_merge(device: kvswap.Device) -> None:
    sides = Sides(device, 4096)
    src = sides.gpu.ptr + np.array([0, 10, 30, 100, 200])
    dst = sides.cpu.ptr + np.array([50, 60, 80, 500, 600])
    sizes = np.array([10, 20, 5, 100, 100])
    assert counted(device, lambda: kvswap.swap_blocks_batch(src, dst, sizes, device=device)) == (2, 3)
    expected = sides.cpu_bytes.copy()
    for s, d, n in zip(src - sides.gpu.ptr, dst - sides.cpu.ptr, sizes, strict=True):
        expected[d : d + n] = sides.gpu_bytes[s : s + n]
    np.testing.assert_array_equal(sides.cpu.get(), expected)


def test_a_merged_run_is_cut_at_a_seam(device: kvswap.Device, direction: int, path: str) -> None:
    """Two registrations that touch: a run of blocks across them is two copies, a block across them too."""
    page = 4096
    room = Buffer(device, 4 * page + page, "plain")
    start = -room.ptr % page
    base = room.ptr + start
    device.register(base, 2 * page)
    device.register(base + 2 * page, 2 * page)
    try:
        gpu = Buffer(device, 4 * page, "gpu")
        for nbytes, ids in ((1024, list(range(16))), (3000, [0, 1, 2, 3]), (3000, [2, 0])):
            cpu_before, gpu_before = room.randomise(1), gpu.randomise(2)
            kvswap.swap_cache_per_layer(
                gpu.ptr,
                base,
                nbytes,
                4 * page // nbytes,
                4 * page // nbytes,
                ids,
                ids,
                direction,
                device=device,
                path=path,
            )
            for i in ids:
                a, b = slice(i * nbytes, (i + 1) * nbytes), slice(start + i * nbytes, start + (i + 1) * nbytes)
                if direction == Direction.D2H:
                    cpu_before[b] = gpu_before[a]
                else:
                    gpu_before[a] = cpu_before[b]
            np.testing.assert_array_equal(room.get(), cpu_before)
            np.testing.assert_array_equal(gpu.get(), gpu_before)
    finally:
        device.unregister(base)
        device.unregister(base + 2 * page)


# -- anything ---------------------------------------------------------------------------------------------------------

shapes = st.tuples(
    st.sampled_from([1, 2, 3, 8, 15, 16, 31, 64, 100, 257]),
    st.integers(1, 12),
    st.integers(1, 12),
    st.sampled_from([0, 0, 1, 16]),
    st.sampled_from([0, 0, 3, 16]),
)


@given(
    st.data(),
    st.sampled_from(sorted(CALLS)),
    st.sampled_from(PATHS),
    st.lists(shapes, min_size=1, max_size=4),
    st.integers(0, 1),
)
def test_anything(
    session_device: kvswap.Device, data: st.DataObject, call: str, path: str, shapes: list[Any], direction: int
) -> None:
    info = session_device.info
    if (path == "direct" and session_device.kind != "host") or (path in ("burst", "kernel") and not info["kernels"]):
        path = "auto"
    fewest_gpu, fewest_cpu = min(s[1] for s in shapes), min(s[2] for s in shapes)
    count = data.draw(st.integers(0, min(fewest_gpu, fewest_cpu)))
    gpu_ids = np.array(data.draw(st.permutations(range(fewest_gpu)))[:count], np.int64)
    cpu_ids = np.array(data.draw(st.permutations(range(fewest_cpu)))[:count], np.int32)
    offsets = data.draw(st.tuples(st.integers(0, 17), st.integers(0, 17)))
    Sides(session_device, 32768).run(call, shapes, offsets, gpu_ids, cpu_ids, direction, path=path)


@pytest.mark.parametrize("kernel", ["launch_copy", "launch_pack"])
def test_a_kernel_alone(device: kvswap.Device, kernel: str) -> None:
    """By the seam, without a planner: pieces of every size and alignment."""
    usable(device, "kernel")
    room = Buffer(device, 1 << 16, "gpu")
    before = room.randomise(8)
    expected, pieces, at = before.copy(), [], 0
    for i, nbytes in enumerate([0, 1, 2, 3, 5, 7, 8, 12, 15, 16, 17, 31, 33, 64, 100, 1000, 2049] * 3):
        src, dst = at + i % 17, 32768 + at + i * 5 % 19
        pieces += [room.ptr + dst, room.ptr + src, nbytes]
        expected[dst : dst + nbytes] = before[src : src + nbytes]
        at += nbytes + 40
    table = Buffer(device, len(pieces) * 8, "gpu")
    table.put(np.array(pieces, np.uint64).view(np.uint8))
    stream = kvswap.Stream(device)
    seam(device, kernel, len(pieces) // 3, table.ptr, 3, 64, stream.handle)
    stream.synchronize(PATIENCE)
    np.testing.assert_array_equal(room.get(), expected)
