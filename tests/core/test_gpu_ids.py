"""Block ids in GPU memory: read in stream order and once, checked before they touch anything, ordered, failing block by
block. On a host device the ids lie in memory that counts as the device's, behind __cuda_array_interface__ or DLPack."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import ctypes
import gc
import itertools
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Buffer, Bytes, Gate, run_python, seam
from test_pool import BLOCKS, NBYTES, Tier, move

import kvswap
from kvswap import testing

D2H, H2D = 0, 1


class DeviceIds:
    """Ids in device memory, as CuPy describes its arrays; `step` items apart, also backwards."""

    def __init__(
        self, device: kvswap.Device, ids: Any, dtype: str = "int64", step: int = 1, stream: kvswap.Stream | None = None
    ) -> None:
        self.device, self.dtype, self.step, self.stream = device, np.dtype(dtype), step, stream
        self.count = len(ids)
        self.width = self.dtype.itemsize
        self.buffer = Buffer(device, max(self.count, 1) * abs(step) * self.width)
        self.staged: list[Buffer] = []
        self.buffer.put(self._bytes(ids))

    def _bytes(self, ids: Any) -> Bytes:
        room = np.full(max(self.count, 1) * abs(self.step), 99, self.dtype)
        room[:: self.step][: self.count] = ids
        return room.view(np.uint8)

    def change(self, ids: Any, stream: kvswap.Stream) -> None:
        """Behind the stream's work."""
        staged = Buffer(self.device, self.buffer.nbytes, "cpu")
        staged.put(self._bytes(ids))
        self.staged.append(staged)
        seam(self.device, "copy", self.buffer.ptr, staged.ptr, staged.nbytes, stream.handle)

    @property
    def ptr(self) -> int:
        last = max(self.count, 1) * abs(self.step) - 1
        return self.buffer.ptr + (last * self.width if self.step < 0 else 0)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.count,),
            "typestr": self.dtype.str,
            "data": (self.ptr, False),
            "strides": (self.step * self.width,),
            "version": 3,
            "stream": None if self.stream is None else self.stream.handle,
        }


@pytest.fixture
def pair(device: kvswap.Device) -> tuple[Tier, Tier]:
    return Tier(device, "gpu"), Tier(device, "cpu")


@pytest.fixture(params=["auto", "burst", "kernel"])
def ids_path(request: pytest.FixtureRequest, device: kvswap.Device) -> str:
    if not device.info["kernels"]:
        pytest.skip(f"no kernels: {device.info['kernels_note']}")
    return str(request.param)


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest, session_device: kvswap.Device) -> None:
    if not session_device.info["kernels"]:
        pytest.skip(f"no kernels: {session_device.info['kernels_note']}")


def swap(pair: tuple[Tier, Tier], direction: int, gpu: Any, cpu: Any, **options: Any) -> kvswap.Transfer:
    """Between pools, the GPU's ids on whichever side they are."""
    return move(*pair, gpu, cpu, **options) if direction == D2H else move(pair[1], pair[0], cpu, gpu, **options)


def expect(pair: tuple[Tier, Tier], direction: int, gpu: Any, cpu: Any, bad: Any = ()) -> None:
    """These blocks were moved; those at positions `bad` are zeros on the host, and untouched on the GPU."""
    good = [i for i in range(len(gpu)) if i not in bad]
    gpu, cpu = np.asarray(gpu), np.asarray(cpu)
    blocks = pair[0].blocks() if direction == H2D else pair[1].blocks()
    if direction == D2H:
        blocks[cpu[good]] = pair[0].blocks()[gpu[good]]
        blocks[cpu[list(bad)]] = 0
        pair[1].check(blocks)
        pair[0].check(pair[0].blocks())
    else:
        blocks[gpu[good]] = pair[1].blocks()[cpu[good]]
        pair[0].check(blocks)
        pair[1].check(pair[1].blocks())


class TokenRows(DeviceIds):
    """Blocks by their tokens, a row each; `by_column`: those of one token of all blocks lie together."""

    def __init__(self, device: kvswap.Device, rows: Any, dtype: str = "int64", by_column: bool = False) -> None:
        self.rows, self.by_column = np.asarray(rows), by_column
        super().__init__(device, (self.rows.T if by_column else self.rows).ravel(), dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        count, tokens = self.rows.shape
        strides = (self.width, count * self.width) if self.by_column else (tokens * self.width, self.width)
        given = {"shape": (count, tokens), "strides": strides if self.by_column else None}
        return {**super().__cuda_array_interface__, **given}


def tokens_of(blocks: Any, tokens: int) -> Any:
    return np.asarray(blocks)[:, None] * tokens + np.arange(tokens)


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, step", [("int64", 1), ("int32", 1), ("int64", 3), ("int32", -2), ("int64", -1)])
def test_blocks(pair: tuple[Tier, Tier], ids_path: str, direction: int, dtype: str, step: int) -> None:
    device = pair[0].pool.device
    gpu, cpu = [0, 8, 2, 7, 3], [5, 1, 0, 8, 3]
    transfer = swap(pair, direction, DeviceIds(device, gpu, dtype, step), cpu, path=ids_path)
    transfer.wait(PATIENCE)
    expect(pair, direction, gpu, cpu)
    assert transfer.path == ids_path or ids_path == "auto"
    assert (transfer.num_blocks, transfer.failed_positions.size) == (5, 0)


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("tokens", [1, 2, 16])
def test_blocks_by_their_tokens(
    pair: tuple[Tier, Tier], ids_path: str, direction: int, tokens: int, dtype: str, by_column: bool
) -> None:
    gpu, cpu = [0, 8, 2, 7, 3], [5, 1, 0, 8, 3]
    rows = TokenRows(pair[0].pool.device, tokens_of(gpu, tokens), dtype, by_column)
    transfer = swap(pair, direction, rows, cpu, path=ids_path)
    transfer.wait(PATIENCE)
    expect(pair, direction, gpu, cpu)
    assert (transfer.num_blocks, transfer.failed_positions.size) == (5, 0)


@pytest.mark.parametrize(
    "row, message",
    [
        ([8, 9, 11, 10], "begins with token 8, read on the device: these are not the 4 tokens of one block"),
        ([9, 10, 11, 12], "begins with token 9"),
        ([8, 9, 10, 12], "begins with token 8"),
        ([-4, -3, -2, -1], "begins with token -4"),
        ([4 * BLOCKS + i for i in range(4)], f"begins with token {4 * BLOCKS}.* has {BLOCKS} blocks"),
        ([2**63 - 4 + i for i in range(4)], f"begins with token {2**63 - 4}"),
        ([2**63 - 1, -(2**63), 1 - 2**63, 2 - 2**63], f"begins with token {2**63 - 1}"),
    ],
)
def test_tokens_that_are_no_block(
    pair: tuple[Tier, Tier], ids_path: str, direction: int, row: list[int], message: str
) -> None:
    gpu, cpu = [0, 2, 7], [5, 1, 8]
    rows = tokens_of(gpu, 4)
    rows[1] = row
    transfer = swap(pair, direction, TokenRows(pair[0].pool.device, rows), cpu, path=ids_path)
    with pytest.raises(kvswap.Error, match=message):
        transfer.wait(PATIENCE)
    assert transfer.failed_positions.tolist() == [1]
    expect(pair, direction, gpu, cpu, bad=[1])


def test_two_rows_of_the_same_tokens(pair: tuple[Tier, Tier], ids_path: str) -> None:
    rows = TokenRows(pair[0].pool.device, tokens_of([3, 2, 3], 4))
    transfer = swap(pair, H2D, rows, [5, 1, 8], path=ids_path)
    with pytest.raises(kvswap.Error, match=r"_ids\[0\] and \w+_ids\[2\] are both block 3, read on the device"):
        transfer.wait(PATIENCE)
    assert transfer.failed_positions.tolist() == [0, 2]
    expect(pair, H2D, [3, 2, 3], [5, 1, 8], bad=[0, 2])


@pytest.mark.parametrize("count", [0, 1, 479, 481, 2000])
def test_counts(device: kvswap.Device, ids_path: str, direction: int, count: int) -> None:
    """More ids than a kernel's parameters hold, and more than a slot of a burst."""
    gpu, cpu = Tier(device, "gpu", 512, 2003, rows=2, pitch=256 * 2003), Tier(device, "cpu", 512, 2003)
    rng = np.random.default_rng(count)
    ids = rng.permutation(2003)[:count], rng.permutation(2003)[:count]
    swap((gpu, cpu), direction, DeviceIds(device, ids[0]), ids[1], path=ids_path).wait(PATIENCE)
    expect((gpu, cpu), direction, *ids)


def test_layers_of_tensors(device: kvswap.Device, ids_path: str, direction: int) -> None:
    tensors = 5
    gpu = [Tier(device, "gpu", 96 + i, 40) for i in range(tensors)]
    cpu = [Tier(device, "cpu", 96 + i, 40) for i in range(tensors)]
    ids = np.random.default_rng(7).permutation(40)[:30], np.random.default_rng(8).permutation(40)[:30]
    transfer = kvswap.swap_cache_all_layers_async(
        [tier.buffer.ptr for tier in gpu], [tier.buffer.ptr for tier in cpu], [96 + i for i in range(tensors)],
        40, 40, DeviceIds(device, ids[0], "int32"), ids[1], direction, device=device, path=ids_path, layer_events=True,
    )  # fmt: skip
    transfer.wait(PATIENCE)
    assert all(transfer.layer_done(layer) for layer in range(tensors))
    for pair in zip(gpu, cpu, strict=True):
        expect(pair, direction, *ids)


def test_one_tensor_at_once(device: kvswap.Device, pair: tuple[Tier, Tier]) -> None:
    """The call that returns when it is done raises what is found on the device."""
    ptrs = pair[0].buffer.ptr, pair[1].buffer.ptr
    kvswap.swap_cache_per_layer(*ptrs, NBYTES, BLOCKS, BLOCKS, DeviceIds(device, [4, 2]), [1, 0], H2D, device=device)
    expect(pair, H2D, [4, 2], [1, 0])
    with pytest.raises(kvswap.Error, match=r"gpu_block_ids\[1\] is 9, read on the device; the GPU's side has 9 blocks"):
        kvswap.swap_cache_per_layer(
            *ptrs, NBYTES, BLOCKS, BLOCKS, DeviceIds(device, [4, 9]), [1, 0], H2D, device=device
        )


# -- order: when ids are read -----------------------------------------------------------------------------------------


def test_ids_are_read_in_stream_order(pair: tuple[Tier, Tier], ids_path: str, direction: int) -> None:
    """After the work that makes them, and before the work that makes others in their place."""
    device = pair[0].pool.device
    stream = kvswap.Stream(device)
    ids = DeviceIds(device, [-1, 99, 1])
    with Gate(device) as gate:
        gate.hold(stream)
        ids.change([4, 6, 8], stream)
        transfer = swap(pair, direction, ids, [1, 2, 3], path=ids_path, stream=stream)
        ids.change([99, -5, 99], stream)
        assert not transfer.done()
        gate.open()
        transfer.wait(PATIENCE)
        stream.synchronize(PATIENCE)
    expect(pair, direction, [4, 6, 8], [1, 2, 3])


def test_the_stream_of_the_array(pair: tuple[Tier, Tier], ids_path: str, direction: int) -> None:
    """What __cuda_array_interface__ names is waited for, besides what the caller names."""
    device = pair[0].pool.device
    producer = kvswap.Stream(device)
    ids = DeviceIds(device, [-1, -1], stream=producer)
    with Gate(device) as gate:
        gate.hold(producer)
        ids.change([4, 6], producer)
        transfer = swap(pair, direction, ids, [1, 2], path=ids_path, stream=kvswap.Stream(device), after=())
        assert not transfer.done()
        gate.open()
        transfer.wait(PATIENCE)
    expect(pair, direction, [4, 6], [1, 2])


class DLTensor(ctypes.Structure):
    """DLPack's, with what owns it behind it."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class Packed(DeviceIds):
    """The same by DLPack alone, which makes the stream that it is given wait."""

    asked: Any = None
    sizes: Any = None  # of two dimensions, and their strides
    __cuda_array_interface__ = property()  # type: ignore[assignment]

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: Any, max_version: Any = None) -> Any:
        self.asked = stream
        shape, strides = self.sizes or ((self.count,), (self.step,))
        ndim = len(shape)
        self.shape = (ctypes.c_int64 * ndim)(*shape)
        self.strides = (ctypes.c_int64 * ndim)(*strides) if strides else None
        self.tensor = DLTensor(
            data=self.ptr, ndim=ndim, dtype=(0, 8 * self.width, 1, 0), shape=self.shape, strides=self.strides
        )
        self.tensor.device[0] = 2
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


@pytest.mark.parametrize("dtype, step", [("int64", 1), ("int32", 2)])
def test_dlpack(pair: tuple[Tier, Tier], dtype: str, step: int) -> None:
    device = pair[0].pool.device
    ids, stream = Packed(device, [4, 6], dtype, step), kvswap.Stream(device)
    swap(pair, H2D, ids, [1, 2], stream=stream).wait(PATIENCE)
    expect(pair, H2D, [4, 6], [1, 2])
    assert ids.asked == stream.handle
    swap(pair, H2D, ids, [1, 2]).wait(PATIENCE)
    assert ids.asked == 1, "the compute stream, which is the legacy default stream"
    device.set_compute_stream(stream)
    try:
        swap(pair, H2D, ids, [1, 2]).wait(PATIENCE)
        assert ids.asked == stream.handle
    finally:
        device.set_compute_stream(0)


@pytest.mark.parametrize("sizes", [((2, 4), None), ((2, 4), (4, 1)), ((2, 4), (1, 2))])
def test_tokens_by_dlpack(pair: tuple[Tier, Tier], sizes: Any) -> None:
    rows = tokens_of([4, 6], 4)
    ids = Packed(pair[0].pool.device, (rows.T if sizes[1] == (1, 2) else rows).ravel())
    ids.sizes = sizes
    swap(pair, H2D, ids, [1, 2]).wait(PATIENCE)
    expect(pair, H2D, [4, 6], [1, 2])


def test_the_array_is_held(pair: tuple[Tier, Tier]) -> None:
    device = pair[0].pool.device
    stream, ids = kvswap.Stream(device), DeviceIds(device, [4, 6])
    alive = weakref.ref(ids)
    with Gate(device) as gate:
        gate.hold(stream)
        transfer = swap(pair, H2D, ids, [1, 2], stream=stream)
        del ids
        gc.collect()
        assert alive() is not None
        gate.open()
        transfer.wait(PATIENCE)
    swap(pair, H2D, [0], [0]).wait(PATIENCE)  # releases what has ended
    gc.collect()
    assert alive() is None


# -- bad ids ----------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[list[int], int]] = {
    "negative": ([3, -1, 5], 0b010),
    "too large": ([3, 5, BLOCKS], 0b100),
    "far": ([-(1 << 62), 5, (1 << 62) + 3], 0b101),
    "wraps to a good one": ([1 << 32, 5, (1 << 32) + 5], 0b101),
    "all": ([-1, -1, 1000], 0b111),
}


@pytest.mark.parametrize("how", BAD)
def test_ids_out_of_range(pair: tuple[Tier, Tier], ids_path: str, direction: int, how: str) -> None:
    device = pair[0].pool.device
    gpu, mask = BAD[how]
    bad = [i for i in range(3) if mask >> i & 1]
    swap(pair, D2H, [0, 1, 2], [0, 1, 2], path="burst").wait(PATIENCE)  # leaves blocks in the slots
    pair[1].buffer.put(pair[1].before)
    transfer = swap(pair, direction, DeviceIds(device, gpu), [6, 7, 8], path=ids_path)
    name = "src_ids" if direction == D2H else "dst_ids"
    with pytest.raises(
        kvswap.Error,
        match=rf"^{name}\[{bad[0]}\] is {gpu[bad[0]]}, read on the device; pool 'pool \d+' has 9 blocks, 0 to 8",
    ):
        transfer.wait(PATIENCE)
    assert transfer.done() and transfer.failed_positions.tolist() == bad
    expect(pair, direction, gpu, [6, 7, 8], bad)


def test_a_destination_twice(pair: tuple[Tier, Tier], ids_path: str) -> None:
    """None of the blocks that name it is written; a source may be named as often as one likes."""
    device = pair[0].pool.device
    gpu, cpu = [3, 5, 4, 5, -1, 5], [0, 1, 2, 3, 4, 5]
    transfer = swap(pair, H2D, DeviceIds(device, gpu), cpu, path=ids_path)
    with pytest.raises(kvswap.Error, match=r"dst_ids\[1\] and dst_ids\[3\] are both 5, read on the device: two blocks"):
        transfer.wait(PATIENCE)
    assert transfer.failed_positions.tolist() == [1, 3, 4, 5]
    expect(pair, H2D, gpu, cpu, [1, 3, 4, 5])
    pair[0].buffer.put(pair[0].before)
    gpu[4] = 5
    swap(pair, D2H, DeviceIds(device, gpu), cpu, path=ids_path).wait(PATIENCE)
    expect(pair, D2H, gpu, cpu)


def test_many_bad_ids(device: kvswap.Device, ids_path: str, direction: int) -> None:
    """Against the rules in Python: range, and for destinations every id that occurs twice."""
    blocks = 700
    gpu, cpu = Tier(device, "gpu", 24, blocks), Tier(device, "cpu", 24, blocks)
    rng = np.random.default_rng(11)
    ids, places = rng.integers(-100, blocks + 100, 600), rng.permutation(blocks)[:600]
    good = (ids >= 0) & (ids < blocks)
    if direction == H2D:
        values, counts = np.unique(ids, return_counts=True)
        good &= np.isin(ids, values[counts == 1])
    bad = np.flatnonzero(~good).tolist()
    transfer = swap((gpu, cpu), direction, DeviceIds(device, ids, "int32"), places, path=ids_path)
    with pytest.raises(kvswap.Error):
        transfer.wait(PATIENCE)
    assert transfer.failed_positions.tolist() == bad
    expect((gpu, cpu), direction, ids, places, bad)


# -- hazards ----------------------------------------------------------------------------------------------------------


def test_later_transfers_wait_for_the_whole_pool(pair: tuple[Tier, Tier]) -> None:
    device = pair[0].pool.device
    one, other = kvswap.Stream(device), kvswap.Stream(device)
    ids = DeviceIds(device, [-1])
    with Gate(device) as gate:
        gate.hold(one)
        ids.change([4], one)
        load = swap(pair, H2D, ids, [1], stream=one)
        store = swap(pair, D2H, [4], [7], stream=other)
        apart = swap(pair, D2H, [5], [8], stream=other)
        assert not store.done() and not apart.done()
        gate.open()
        for transfer in (load, store, apart):
            transfer.wait(PATIENCE)
    np.testing.assert_array_equal(pair[1].now()[7], pair[1].blocks()[1])


def test_it_waits_for_earlier_transfers(pair: tuple[Tier, Tier]) -> None:
    """A store whose slots are not known waits for every load into the pool, a load for every store too."""
    device = pair[0].pool.device
    streams = [kvswap.Stream(device) for _ in range(3)]
    with Gate(device) as gate:
        gate.hold(streams[0])
        load = swap(pair, H2D, [3], [1], stream=streams[0])
        store = swap(pair, D2H, DeviceIds(device, [3]), [6], stream=streams[1])
        second = swap(pair, H2D, DeviceIds(device, [3]), [2], stream=streams[2])
        assert not store.done() and not second.done()
        gate.open()
        for transfer in (load, store, second):
            transfer.wait(PATIENCE)
    np.testing.assert_array_equal(pair[1].now()[6], pair[1].blocks()[1])
    np.testing.assert_array_equal(pair[0].now()[3], pair[1].blocks()[2])


def test_order_by_the_caller(pair: tuple[Tier, Tier]) -> None:
    device = pair[0].pool.device
    one, other = kvswap.Stream(device), kvswap.Stream(device)
    with Gate(device) as gate:
        gate.hold(one)
        load = swap(pair, H2D, DeviceIds(device, [4]), [1], stream=one, gpu_order="stream")
        store = swap(pair, D2H, DeviceIds(device, [5]), [7], stream=other, gpu_order="stream")
        store.wait(PATIENCE)
        swap(pair, D2H, [6], [8], stream=other).wait(PATIENCE)
        assert not load.done()
        gate.open()
        load.wait(PATIENCE)
    np.testing.assert_array_equal(pair[1].now()[[7, 8]], pair[0].blocks()[[5, 6]])
    with pytest.raises(ValueError, match="gpu_order is 'stream', which is for ids in GPU memory"):
        swap(pair, D2H, [6], [8], gpu_order="stream")
    with pytest.raises(ValueError, match="gpu_order is 'none': must be one of 'pool', 'stream'"):
        swap(pair, D2H, [6], [8], gpu_order="none")


# -- failure travels --------------------------------------------------------------------------------------------------


def lose(pair: tuple[Tier, Tier], direction: int, slot: int) -> None:
    """The slot on the destination's side was to be written, and was not."""
    with testing.fault(pair[0].pool.device, "copy", "fail", code=7):
        transfer = swap(pair, direction, [slot], [slot])
    with pytest.raises(kvswap.DeviceError):
        transfer.wait(PATIENCE)


def test_a_lost_source_on_the_host(pair: tuple[Tier, Tier], ids_path: str) -> None:
    """Known before; where it was to go is known at the end, and is lost from then on."""
    device = pair[0].pool.device
    lose(pair, D2H, 3)
    load = swap(pair, H2D, DeviceIds(device, [5, 6, 7]), [2, 3, 4], path=ids_path)
    with pytest.raises(kvswap.Error, match="does not hold what it should"):
        load.wait(PATIENCE)
    assert load.failed_positions.tolist() == [1]
    np.testing.assert_array_equal(pair[0].now()[6], pair[0].blocks()[6])
    store = swap(pair, D2H, [5, 6, 7], [0, 1, 2])
    with pytest.raises(kvswap.Error, match="does not hold what it should"):
        store.wait(PATIENCE)
    assert store.failed_positions.tolist() == [1]
    for slots, failed in (([0], [0]), ([7, 0], [0, 1])):  # nothing is left to copy
        load = swap(pair, H2D, DeviceIds(device, slots), [3, 3][: len(slots)], path=ids_path)
        with pytest.raises(kvswap.Error):
            load.wait(PATIENCE)
        assert load.failed_positions.tolist() == failed
    store = swap(pair, D2H, [0, 1, 7], [0, 1, 2])
    with pytest.raises(kvswap.Error, match="does not hold what it should"):
        store.wait(PATIENCE)
    assert store.failed_positions.tolist() == [0, 2]
    swap(pair, H2D, DeviceIds(device, [6]), [4]).wait(PATIENCE)  # written whole: right again
    swap(pair, D2H, [6], [0]).wait(PATIENCE)


def test_a_lost_source_on_the_gpu(pair: tuple[Tier, Tier], ids_path: str) -> None:
    device = pair[0].pool.device
    lose(pair, H2D, 6)
    store = swap(pair, D2H, DeviceIds(device, [5, 6, 7]), [0, 1, 2], path=ids_path)
    with pytest.raises(kvswap.Error, match=r"src_ids\[1\]: slot 6 of pool .* does not hold what it should"):
        store.wait(PATIENCE)
    assert store.failed_positions.tolist() == [1]
    back = swap(pair, H2D, [0, 1], [0, 1])
    with pytest.raises(kvswap.Error):
        back.wait(PATIENCE)
    assert back.failed_positions.tolist() == [1]


@pytest.mark.parametrize("order", ["pool", "stream"])
@pytest.mark.parametrize("on_device", [False, True])
def test_failure_travels_before_it_is_known(pair: tuple[Tier, Tier], order: str, on_device: bool) -> None:
    """Both are queued, and follow each other, before the first of them reads its ids."""
    device = pair[0].pool.device
    lose(pair, D2H, 3)
    stream = kvswap.Stream(device)
    ids = DeviceIds(device, [0, 0, 0])
    with Gate(device) as gate:
        gate.hold(stream)
        ids.change([5, 6, 99], stream)
        load = swap(pair, H2D, ids, [2, 3, 4], stream=stream, gpu_order=order)
        slots = DeviceIds(device, [4, 5, 6]) if on_device else [4, 5, 6]
        store = swap(pair, D2H, slots, [0, 1, 7], stream=stream)
        back = swap(pair, H2D, [1, 0], [0, 7], stream=stream)
        assert not (load.done() or store.done() or back.done())
        gate.open()
        for transfer, failed in ((back, [1]), (store, [2]), (load, [1, 2])):
            with pytest.raises(kvswap.Error):
                transfer.wait(PATIENCE)
            assert transfer.failed_positions.tolist() == failed
    np.testing.assert_array_equal(pair[1].now()[[0, 1]], np.stack([pair[0].blocks()[4], pair[1].blocks()[2]]))


def test_a_lost_slot_is_written_again_before_that_is_known(pair: tuple[Tier, Tier]) -> None:
    device = pair[0].pool.device
    lose(pair, H2D, 6)
    stream = kvswap.Stream(device)
    with Gate(device) as gate:
        gate.hold(stream)
        load = swap(pair, H2D, DeviceIds(device, [6]), [2], stream=stream)
        store = swap(pair, D2H, [6], [0], stream=kvswap.Stream(device))
        gate.open()
        store.wait(PATIENCE)
        load.wait(PATIENCE)
    np.testing.assert_array_equal(pair[1].now()[0], pair[1].blocks()[2])


def test_pools_that_are_closed_first(device: kvswap.Device) -> None:
    stream = kvswap.Stream(device)
    with Gate(device) as gate:
        gpu, cpu = Tier(device, "gpu"), Tier(device, "cpu")
        gate.hold(stream)
        load = swap((gpu, cpu), H2D, DeviceIds(device, [4, 99]), [1, 2], stream=stream)
        buffers = gpu.buffer, cpu.buffer
        del gpu.pool, cpu.pool
        gate.open()
        with pytest.raises(kvswap.Error):
            load.wait(PATIENCE)
    assert load.failed_positions.tolist() == [1]
    del buffers


# -- many at once -----------------------------------------------------------------------------------------------------


def test_many_lanes(device: kvswap.Device) -> None:
    """Each stream loads its own slots, stores them elsewhere, and changes its ids in between."""
    lanes, each = 6, 5
    blocks = lanes * each
    gpu, cpu, back = Tier(device, "gpu", 64, blocks), Tier(device, "cpu", 64, blocks), Tier(device, "cpu", 64, blocks)
    rng = np.random.default_rng(3)
    slots = rng.permutation(blocks).reshape(lanes, each)
    streams = [kvswap.Stream(device) for _ in range(lanes)]
    lists = [DeviceIds(device, [-1] * each) for _ in range(lanes)]
    transfers = []
    for turn in range(4):
        for lane, stream in enumerate(streams):
            places = np.arange(blocks).reshape(lanes, each)[(lane + turn) % lanes]
            mine = rng.permutation(slots[lane])
            lists[lane].change(mine, stream)
            order = ("pool", "stream")[turn % 2]
            transfers.append(swap((gpu, cpu), H2D, lists[lane], places, stream=stream, gpu_order=order))
            transfers.append(swap((gpu, back), D2H, lists[lane], places, stream=stream, gpu_order=order))
    for transfer in transfers:
        transfer.wait(PATIENCE)
    np.testing.assert_array_equal(back.now(), cpu.blocks())


@pytest.mark.parametrize("seed", range(1, 9))
def test_any_interleaving(seed: int) -> None:
    """On a deterministic device, where what runs next is chosen by the seed."""
    device = testing.deterministic_device(seed)
    pair = Tier(device, "gpu"), Tier(device, "cpu")
    streams = [kvswap.Stream(device) for _ in range(3)]
    ids = DeviceIds(device, [-1, -1])
    ids.change([4, 99], streams[0])
    load = swap(pair, H2D, ids, [1, 2], stream=streams[0], path="burst")
    store = swap(pair, D2H, DeviceIds(device, [4]), [7], stream=streams[1], path="kernel")
    last = swap(pair, H2D, [4], [3], stream=streams[2])
    last.wait(PATIENCE)
    store.wait(PATIENCE)
    with pytest.raises(kvswap.Error):
        load.wait(PATIENCE)
    np.testing.assert_array_equal(pair[1].now()[7], pair[1].blocks()[1])
    np.testing.assert_array_equal(pair[0].now()[4], pair[1].blocks()[3])


def test_a_block_that_is_lost_at_once_comes_after_what_it_overwrites(device: kvswap.Device) -> None:
    """While a pool's slots are not known, the transfer's outcome is noted when it ends: not before those that it
    follows, whose blocks would then count as the last ones."""
    source, target = Tier(device, "gpu"), Tier(device, "gpu")
    host, other = Tier(device, "cpu"), Tier(device, "cpu")
    with testing.fault(device, "copy", "fail", nth=1, every=1):
        bad = move(source, host, [0], [8])
        with pytest.raises(kvswap.DeviceError):
            bad.wait(PATIENCE)
    with Gate(device) as gate:
        stream = kvswap.Stream(device)
        gate.hold(stream)
        unknown = move(source, other, DeviceIds(device, [2]), [1], stream=stream)
        before = move(source, target, [3], [0], stream=stream)
        last = move(host, target, [8, 4], [0, 3])
        end = time.monotonic() + 0.3
        while not last.done() and time.monotonic() < end:
            time.sleep(0.01)
        gate.open()
        unknown.wait(PATIENCE)
        before.wait(PATIENCE)
        with pytest.raises(kvswap.Error, match=r"slot 8 .* does not hold what it should"):
            last.wait(PATIENCE)
    assert last.failed_positions.tolist() == [0]
    with pytest.raises(kvswap.Error, match=r"slot 0 .* does not hold what it should"):
        move(target, other, [0], [2]).wait(PATIENCE)


def test_done_and_cancel(pair: tuple[Tier, Tier]) -> None:
    device = pair[0].pool.device
    transfer = swap(pair, H2D, DeviceIds(device, [4, 99]), [1, 2])
    assert not transfer.cancel()
    device.synchronize(PATIENCE)
    assert transfer.done(), "its ids are back, and it is settled"
    assert transfer.failed_positions.tolist() == [1] and isinstance(transfer.error, kvswap.Error)


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["launch", "copy", "fill", "event_record", "stream_wait"])
def test_refused_calls(device: kvswap.Device, ids_path: str, direction: int, operation: str) -> None:
    """Whichever call the driver refuses: no stale byte on the host, no slot touched that no id names, and an end. What
    was not copied is among the failed blocks."""
    gpu, cpu = [4, 6, 8], [1, 2, 3]
    for nth in range(1, 12):  # of one operation there are five calls at most
        pair = Tier(device, "gpu"), Tier(device, "cpu")
        ids = DeviceIds(device, gpu)
        with testing.fault(device, "call", "fail", nth=nth, code=7, operation=operation):
            try:
                transfer = swap(pair, direction, ids, cpu, path=ids_path)
            except kvswap.DeviceError:
                continue
            with suppress(kvswap.DeviceError):
                transfer.wait(PATIENCE)
        source, target = (pair[0], pair[1]) if direction == D2H else (pair[1], pair[0])
        src_ids, dst_ids = (gpu, cpu) if direction == D2H else (cpu, gpu)
        now, bad = target.now(), transfer.failed_positions.tolist()
        for i in range(3):
            wanted = source.blocks()[src_ids[i]]
            assert i in bad or (now[dst_ids[i]] == wanted).all(), (operation, nth)
            was = target.blocks()[dst_ids[i]]
            assert np.isin(now[dst_ids[i]], np.union1d(np.union1d(wanted, was), [0])).all()
        rest = [slot for slot in range(BLOCKS) if slot not in dst_ids]
        np.testing.assert_array_equal(now[rest], target.blocks()[rest])
        if direction == H2D and bad:  # and what was to be written there is lost, also where no kernel read the ids
            store = swap(pair, D2H, [5, *gpu], [0, 6, 7, 8])
            with pytest.raises(kvswap.Error, match="does not hold what it should"):
                store.wait(PATIENCE)
            assert store.failed_positions.tolist() == [i + 1 for i in bad]


def lost_slots(pair: tuple[Tier, Tier]) -> list[int]:
    """Of the GPU's pool. Afterwards none is lost."""
    store = swap(pair, D2H, range(BLOCKS), range(BLOCKS))
    with suppress(kvswap.Error):
        store.wait(PATIENCE)
    for tier in pair:
        testing.note_access(0, tier.pool, range(BLOCKS), True)
    return store.failed_positions.tolist()


def test_ids_that_only_a_copy_brings_back(pair: tuple[Tier, Tier]) -> None:
    device = pair[0].pool.device
    for step in (1, 2):
        with testing.fault(device, "call", "fail", nth=1, every=1, code=7, operation="fill"):
            load = swap(pair, H2D, DeviceIds(device, [4], step=step), [1], path="kernel")
        with pytest.raises(kvswap.DeviceError):
            load.wait(PATIENCE)
        assert lost_slots(pair) == [4]


def test_ids_that_are_never_known(pair: tuple[Tier, Tier]) -> None:
    """Neither a kernel nor a copy brings them back: any slot may be the one that was to be written."""
    device = pair[0].pool.device
    found = []
    for nth in range(1, 30):
        ids = DeviceIds(device, [4])
        with testing.fault(device, "call", "fail", nth=nth, every=1, code=7):  # each call from that one on
            try:
                load = swap(pair, H2D, ids, [1], path="kernel")
            except kvswap.DeviceError:
                continue
        with suppress(kvswap.DeviceError):
            load.wait(PATIENCE)
        found.append(lost_slots(pair))
    assert found[0] == list(range(BLOCKS)) and found[-1] == []
    assert all(lost in ([], [4], found[0]) for lost in found)


def test_a_lost_device() -> None:
    device = testing.deterministic_device(5)
    pair = Tier(device, "gpu"), Tier(device, "cpu")
    transfer = swap(pair, H2D, DeviceIds(device, [4]), [1])
    with testing.fault(device, "call", "lose", nth=1, code=700), pytest.raises(kvswap.DeviceError):
        transfer.wait(PATIENCE)
    assert transfer.failed_positions.tolist() == [0]


# -- the race checker -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot, races", [(4, 1), (5, 0)])
@pytest.mark.parametrize("first", ["transfer", "kernel"])
def test_races(pair: tuple[Tier, Tier], ids_path: str, first: str, slot: int, races: int) -> None:
    """A kernel of the caller's that nothing orders with the transfer: a race if it touches a slot that the ids name."""
    device = pair[0].pool.device
    one, other = kvswap.Stream(device), kvswap.Stream(device)
    ids = DeviceIds(device, [4, 99])
    with testing.race_checker(raise_at_exit=False) as checker, Gate(device) as gate:
        gate.hold(one)
        if first == "kernel":
            testing.note_access(other, pair[0].pool, [slot], True)
        load = swap(pair, H2D, ids, [1, 2], stream=one, path=ids_path)
        if first == "transfer":
            testing.note_access(other, pair[0].pool, [slot], True)
        if not races:
            testing.note_access(one, pair[0].pool, [4], True)  # behind it: no race
        gate.open()
        with pytest.raises(kvswap.Error):
            load.wait(PATIENCE)
        found = checker.races
    assert [(race.pool, race.slot) for race in found] == [(pair[0].pool.name, slot)] * races
    if races:
        assert {found[0].first.transfer, found[0].second.transfer} == {0, load.number}


def test_order_by_the_caller_is_checked(pair: tuple[Tier, Tier]) -> None:
    device = pair[0].pool.device
    one, other = kvswap.Stream(device), kvswap.Stream(device)
    for slot, races in ((5, 0), (4, 1)):
        with testing.race_checker(raise_at_exit=False) as checker:
            load = swap(pair, H2D, DeviceIds(device, [4]), [1], stream=one, gpu_order="stream")
            store = swap(pair, D2H, DeviceIds(device, [slot]), [7], stream=other, gpu_order="stream")
            store.wait(PATIENCE)
            load.wait(PATIENCE)
            assert len(checker.races) == races


@pytest.mark.parametrize("nth", [3, 4, 5, 6])
def test_when_the_device_has_ended_none_goes_on(pair: tuple[Tier, Tier], nth: int) -> None:
    """Also while another thread is in a submission, without which what the ids were is not known."""
    device = pair[0].pool.device
    stream, ids = kvswap.Stream(device), DeviceIds(device, [4])
    with Gate(device) as gate, testing.fault(device, "call", "delay", delay=0.5, operation="stream_wait", nth=nth):
        gate.hold(stream)
        transfer = swap(pair, H2D, ids, [1], stream=stream)
        other = threading.Thread(target=lambda: swap(pair, D2H, [6], [7]).wait(PATIENCE))
        other.start()
        time.sleep(0.1)
        gate.open()
        device.synchronize(PATIENCE)
        assert transfer.done()
        other.join(PATIENCE)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["dma", "strided", "direct"])
def test_paths_that_need_ids_on_the_host(pair: tuple[Tier, Tier], direction: int, path: str) -> None:
    device = pair[0].pool.device
    name = "src_ids" if direction == D2H else "dst_ids"
    with pytest.raises(
        kvswap.Error, match=f"path '{path}' needs ids in host memory, and {name} is on the device: use path 'auto'"
    ):
        swap(pair, direction, DeviceIds(device, [1]), [2], path=path)
    pair[0].check(pair[0].blocks())


def test_ids_without_a_dlpack_that_works(pair: tuple[Tier, Tier]) -> None:
    """As arrays have whose DLPack raises for what is no number; the other protocol serves."""

    class Raises(DeviceIds):
        def __dlpack_device__(self) -> tuple[int, int]:
            raise BufferError("no DLPack")

    swap(pair, D2H, Raises(pair[0].pool.device, [3, 1]), [0, 2]).wait(PATIENCE)
    expect(pair, D2H, [3, 1], [0, 2])


def test_wrong_ids(pair: tuple[Tier, Tier]) -> None:
    device = pair[0].pool.device

    class Shaped(DeviceIds):
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {**super().__cuda_array_interface__, "shape": self.shape, "strides": None}

        def shaped(self, *shape: int) -> Shaped:
            self.shape = shape
            return self

    for ids, error, message in (
        (
            DeviceIds(device, [1], "float32"),
            TypeError,
            "src_ids is a GPU array of float32: on the device ids are int32",
        ),
        (DeviceIds(device, [1], "uint64"), TypeError, "src_ids is a GPU array of uint64: on the device ids are int32"),
        (DeviceIds(device, [1], "int16"), TypeError, "src_ids is a GPU array of int16: on the device ids are int32"),
        (DeviceIds(device, [1], ">i8"), TypeError, "in native byte order"),
        (Shaped(device, [1]).shaped(1, 1, 1), ValueError, "src_ids must have one dimension, or two, .* not 3"),
        (Shaped(device, [1]).shaped(), ValueError, "src_ids must have one dimension, or two, .* not 0"),
        (Shaped(device, [1]).shaped(1, 0), ValueError, "src_ids has rows of no tokens"),
        (Shaped(device, [1]).shaped(1, 2**32), ValueError, "src_ids has 4294967296 tokens a block; the limit is"),
        (Shaped(device, [1]).shaped(2, 1), ValueError, "src_ids has 2 entries and dst_ids has 1"),
        (DeviceIds(device, [1, 2]), ValueError, "src_ids has 2 entries and dst_ids has 1"),
    ):
        with pytest.raises(error, match=message):
            move(*pair, ids, [0])
    for src, dst, message in (
        (DeviceIds(device, [1]), DeviceIds(device, [1]), "dst_ids and src_ids are both GPU arrays"),
        (
            [1],
            DeviceIds(device, [1]),
            "dst_ids is on the device, but the transfer goes device to host: only ids of the",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            move(*pair, src, dst)
    with pytest.raises(TypeError, match=r"cpu_block_ids is a GPU array \(DeviceIds\): only ids of the GPU's side"):
        kvswap.swap_cache_per_layer(
            pair[0].buffer.ptr,
            pair[1].buffer.ptr,
            NBYTES,
            BLOCKS,
            BLOCKS,
            [0],
            DeviceIds(device, [1]),
            0,
            device=device,
        )
    ids = DeviceIds(device, [1, 2])
    ids.width = 6  # a stride that is no multiple of the ids' size
    with pytest.raises(ValueError, match="with a stride of 6 bytes: ids of 8 bytes are read at multiples"):
        move(*pair, ids, [0, 1])
    with pytest.raises(ValueError, match="src and dst share slots: whether one is both read and written"):
        move(pair[0], pair[0], DeviceIds(device, [1]), [2])


def test_ids_in_other_memory(pair: tuple[Tier, Tier]) -> None:
    device = pair[0].pool.device
    ids = DeviceIds(device, [1])
    ids.buffer = Buffer(device, 8, "cpu")
    with pytest.raises(ValueError, match=r"src_ids = 0x.* is pinned host memory; device memory is wanted there"):
        move(*pair, ids, [0])
    ids.buffer = Buffer(device, 8)
    gone = ids.buffer.ptr
    ids.buffer.ptr = 1 << 46
    with pytest.raises(ValueError, match="src_ids = 0x400000000000 is not mapped memory"):
        move(*pair, ids, [0])
    ids.buffer.ptr = gone


def test_tensors_that_overlap(device: kvswap.Device) -> None:
    cpu, gpu = Buffer(device, 4096, "cpu"), Buffer(device, 4096)
    with pytest.raises(ValueError, match=r"the memory of these tensors overlaps: .* gpu_block_ids on the device"):
        kvswap.swap_cache_all_layers_async(
            [gpu.ptr, gpu.ptr + 64], [cpu.ptr, cpu.ptr + 64], 64, 8, 8, DeviceIds(device, [1]), [1], H2D, device=device
        )


def test_no_kernels(session_device: kvswap.Device) -> None:
    if session_device.kind != "host":
        pytest.skip("a process of its own, on a host device")
    run = run_python(
        """
        import numpy as np, kvswap
        class Ids:
            room = np.zeros(1, np.int64)
            data = room.ctypes.data, False
            __cuda_array_interface__ = {"shape": (1,), "typestr": "<i8", "data": data, "version": 3}
        a, b = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
        try:
            kvswap.swap_cache_per_layer(a, b, 64, 1, 1, Ids(), [0], 0, device="host:0")
        except kvswap.Error as error:
            print(error)
        """,
        KVSWAP_DISABLE="kernel",
    )
    assert (
        "gpu_block_ids is on the device, which needs kernels, and they are off: KVSWAP_DISABLE names 'kernel'"
        in run.stdout
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_producer_that_raises(pair: tuple[Tier, Tier], error: type[BaseException]) -> None:
    """An Exception means that the object has no DLPack; KeyboardInterrupt reaches the caller."""

    class Broken:
        def __dlpack_device__(self) -> tuple[int, int]:
            raise error("from the producer")

    expected = error if error is KeyboardInterrupt else TypeError
    with pytest.raises(expected, match="from the producer" if error is KeyboardInterrupt else "Broken"):
        swap(pair, H2D, Broken(), [0])
    swap(pair, H2D, [1], [2]).wait(PATIENCE)
    expect(pair, H2D, [1], [2])


def test_lists_of_copies_take_no_ids(device: kvswap.Device) -> None:
    """Other arguments that are arrays on the device are what they were: lists of addresses in host memory."""
    with pytest.raises(TypeError, match="src_ptrs must be a list of tensors or addresses"):
        kvswap.swap_blocks_batch(DeviceIds(device, [1]), [1], 8, device=device)


def test_all_counters_count(device: kvswap.Device, pair: tuple[Tier, Tier]) -> None:
    before = device.stats()
    for gpu in ([1, 2], [1, 99]):
        transfer = swap(pair, H2D, DeviceIds(device, gpu), [0, 1])
        while not transfer.done():
            pass
    after = device.stats()
    assert (after["done"] - before["done"], after["failed"] - before["failed"]) == (1, 1)
    assert list(itertools.chain(transfer.failed_positions)) == [1]
