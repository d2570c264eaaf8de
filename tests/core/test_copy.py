"""copy_blocks() and Pool(device, tensor): sizes, counts, strides and direction are read from the tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Buffer, Gate, usable

import kvswap
from kvswap import _copy
from kvswap.codecs import CODECS, Coding

FROM, TO = [3, 0, 5], [1, 6, 2]
# Where there is a GPU, host memory on both sides is refused unless its device is named.
OF_HOST: Any = {"device": "host:0"} if any(device.kind == "cuda" for device in kvswap.devices()) else {}


class Tensor:
    """As torch's: strides count elements of two bytes."""

    def __init__(self, buffer: Buffer, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> None:
        self.buffer, self.shape = buffer, shape
        self.step = strides or tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        self.nbytes = 2 * prod(shape)
        self.on_gpu = buffer.side == "gpu" and buffer.device.kind == "cuda"

    def data_ptr(self) -> int:
        return self.buffer.ptr

    def element_size(self) -> int:
        return 2

    def stride(self) -> tuple[int, ...]:
        return self.step

    def is_contiguous(self) -> bool:
        return self.step == tuple(prod(self.shape[i + 1 :]) for i in range(len(self.shape)))


class Interface:
    """An array that only has CUDA's or NumPy's interface."""

    def __init__(self, tensor: Tensor) -> None:
        name = "__cuda_array_interface__" if tensor.on_gpu else "__array_interface__"
        strides = None if tensor.is_contiguous() else tuple(2 * stride for stride in tensor.step)
        interface = {"data": (tensor.data_ptr(), False), "shape": tensor.shape, "strides": strides, "typestr": "<u2"}
        setattr(self, name, {**interface, "version": 3})


KINDS: dict[str, Callable[[Tensor], Any]] = {"torch": lambda tensor: tensor, "interface": Interface}


@pytest.fixture(params=["D2H", "H2D"])
def sides(request: pytest.FixtureRequest) -> tuple[str, str]:
    return ("gpu", "cpu") if request.param == "D2H" else ("cpu", "gpu")


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_of_tensors(device: kvswap.Device, sides: tuple[str, str], kind: str) -> None:
    """Tensors of other sizes and counts side by side; partners differ in shape, and only their blocks' bytes agree."""
    shapes = [((8, 4, 16), (10, 64)), ((6, 256), (9, 2, 128))]
    src = [Buffer(device, 2 * prod(shape), sides[0]) for shape, _ in shapes]
    dst = [Buffer(device, 2 * prod(shape), sides[1]) for _, shape in shapes]
    data = [buffer.randomise(7) for buffer in src]
    froms = [KINDS[kind](Tensor(buffer, shape)) for buffer, (shape, _) in zip(src, shapes, strict=True)]
    tos = [KINDS[kind](Tensor(buffer, shape)) for buffer, (_, shape) in zip(dst, shapes, strict=True)]
    kvswap.copy_blocks(froms, tos, FROM, TO, device=device).wait(PATIENCE)
    for i, (shape, partner) in enumerate(shapes):
        expected = np.zeros((partner[0], 2 * prod(partner[1:])), np.uint8)
        expected[TO] = data[i].reshape(shape[0], -1)[FROM]
        assert (dst[i].get() == expected.ravel()).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_blocks_that_hold_all_layers(device: kvswap.Device, sides: tuple[str, str], kind: str) -> None:
    """cache[:, layer]: other bytes lie between its blocks, on either side, and stay as they are."""
    src, dst = Buffer(device, 8 * 4 * 64 * 2, sides[0]), Buffer(device, 8 * 64 * 2, sides[1])
    data = src.randomise(3)
    view, whole = Tensor(src, (8, 64), (4 * 64, 1)), Tensor(dst, (8, 2, 32))
    kvswap.copy_blocks(KINDS[kind](view), KINDS[kind](whole), FROM, TO, device=device).wait(PATIENCE)
    expected = np.zeros((8, 128), np.uint8)
    expected[TO] = data.reshape(8, 4, 128)[FROM, 0]
    assert (dst.get() == expected.ravel()).all()
    kvswap.copy_blocks(KINDS[kind](whole), KINDS[kind](view), TO, [7, 6, 1], device=device).wait(PATIENCE)
    after = data.reshape(8, 4, 128).copy()
    after[[7, 6, 1], 0] = expected[TO]
    assert (src.get() == after.ravel()).all()


def test_numpy_arrays_need_no_device() -> None:
    cache, pool = np.random.default_rng(1).integers(0, 255, (8, 3, 64), np.uint8), np.zeros((8, 64), np.uint8)
    transfer = kvswap.copy_blocks(cache[:, 1], pool, np.array(FROM), np.array(TO), **OF_HOST)
    transfer.wait(PATIENCE)
    assert transfer.nbytes == 3 * 64
    assert (pool[TO] == cache[FROM, 1]).all() and not pool[[0, 3, 4, 5, 7]].any()


def test_one_block_and_none() -> None:
    """The strides of a dimension of one mean nothing; without tensors or ids nothing moves."""
    one = np.lib.stride_tricks.as_strided(np.arange(64, dtype=np.uint8), (1, 64), (1, 1))
    other = np.zeros((1, 64), np.uint8)
    kvswap.copy_blocks(one, other, [0], [0], **OF_HOST).wait(PATIENCE)
    assert (one == other).all()
    assert kvswap.copy_blocks(one, other, [], [], **OF_HOST).nbytes == 0


class Kept(np.ndarray):  # type: ignore[type-arg]
    """An array that can be referred to weakly."""


def test_tensors_are_held(device: kvswap.Device) -> None:
    """Those with bytes between their blocks, too, which the core sees as an address alone."""
    cache, pool = np.full((8, 2, 4096), 7, np.uint8)[:, 1].view(Kept), Buffer(device, 8 * 4096)
    if device.kind == "cuda":
        pytest.skip("a GPU copies pageable memory when the call's turn has come: the call would wait for the gate")
    alive = weakref.ref(cache)
    with Gate(device) as gate:
        gate.hold(stream := kvswap.Stream(device))
        transfer = kvswap.copy_blocks(cache, Tensor(pool, (8, 2048)), FROM, TO, device=device, stream=stream)
        del cache
        gc.collect()
        assert not transfer.done() and alive() is not None
        gate.open()
        transfer.wait(PATIENCE)
    gc.collect()
    assert alive() is None
    assert (pool.get().reshape(8, 4096)[TO] == 7).all()


@pytest.mark.parametrize(
    ("src", "dst", "error", "match"),
    [
        (
            np.zeros((8, 64)),
            np.zeros((8, 32)),
            ValueError,
            r"a block of src\[0\] has 512 bytes, and one of dst\[0\] 256",
        ),
        ([np.zeros((8, 64))] * 2, [np.zeros((8, 64))], ValueError, "src has 2 tensors and dst 1"),
        (np.zeros(64), np.zeros((8, 8)), ValueError, r"src\[0\] has shape \(64,\): its first dimension must count"),
        (np.zeros((8, 4, 6))[:, :, :2], np.zeros((8, 8)), ValueError, r"a block of src\[0\] is not in one piece"),
        (np.zeros((4, 8)), np.zeros((8, 4)).T, ValueError, r"a block of dst\[0\] is not in one piece"),
        (np.zeros((8, 4))[::-1], np.zeros((8, 4)), ValueError, r"the blocks of src\[0\] overlap"),
        (0x7F0000000000, np.zeros((8, 4)), TypeError, "src is an address, which says no shape"),
        (np.zeros((8, 4)), [None], TypeError, r"dst\[0\] must be a tensor, not NoneType"),
        (np.zeros((8, 4)), [0x7F0000000000], TypeError, r"dst\[0\] must be a tensor, not int"),
    ],
)
def test_what_is_no_tensor_of_blocks(src: Any, dst: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        kvswap.copy_blocks(src, dst, [0, 1], [0, 1])


@pytest.mark.parametrize("view", [False, True])
def test_a_destination_that_is_read_only(view: bool) -> None:
    target = np.zeros((8, 2, 64), np.uint8)
    target.flags.writeable = False
    with pytest.raises(ValueError, match="is the destination and read-only"):
        kvswap.copy_blocks(np.zeros((8, 64), np.uint8), target[:, 0] if view else target[0], [0], [0], **OF_HOST)


def test_ids_that_are_out_of_range() -> None:
    with pytest.raises(IndexError, match="8"):
        kvswap.copy_blocks(np.zeros((9, 64), np.uint8), np.zeros((8, 64), np.uint8), [8], [8], **OF_HOST)


# -- pools ------------------------------------------------------------------------------------------------------------


def layout_of(pool: kvswap.Pool) -> tuple[int, ...]:
    return pool.ptr, pool.num_blocks, pool.block_nbytes, pool.stride, pool.rows


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_of_a_tensor(device: kvswap.Device, sides: tuple[str, str], kind: str) -> None:
    """Of all blocks, and of one layer of a cache that has all layers in a block: what lies between is left alone."""
    src, dst = Buffer(device, 2 * 8 * 64, sides[0]), Buffer(device, 2 * 10 * 2 * 64, sides[1])
    data, expected = src.randomise(9).reshape(8, 128), dst.randomise(10).reshape(10, 2, 128).copy()
    source = kvswap.Pool(device, KINDS[kind](Tensor(src, (8, 4, 16))))
    target = kvswap.Pool(device, KINDS[kind](Tensor(dst, (10, 64), (128, 1))))
    assert layout_of(source) == (src.ptr, 8, 128, 128, 1) and layout_of(target) == (dst.ptr, 10, 128, 256, 1)
    kvswap.move_blocks(source, target, FROM, TO).wait(PATIENCE)
    expected[TO, 0] = data[FROM]
    assert (dst.get().reshape(10, 2, 128) == expected).all()


def test_a_pool_holds_its_tensor() -> None:
    cache = np.zeros((8, 2, 64), np.uint8)
    layer = cache[:, 1].view(Kept)
    alive = weakref.ref(layer)
    pool = kvswap.Pool("host:0", layer)
    del layer
    assert pool.ptr == cache.ctypes.data + 64 and alive() is not None
    del pool
    assert alive() is None


def test_a_pool_of_a_tensor_that_is_read_only() -> None:
    blocks = np.zeros((8, 2, 64), np.uint8)
    blocks.flags.writeable = False
    source, target = kvswap.Pool("host:0", np.zeros((8, 64), np.uint8)), kvswap.Pool("host:0", blocks[:, 1])
    with pytest.raises(ValueError, match="read-only"):
        kvswap.move_blocks(source, target, [0], [0])


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((np.zeros(64),), ValueError, r"ptr has shape \(64,\): its first dimension must count the blocks"),
        ((0x7F0000000000,), TypeError, "ptr must be a tensor, not int"),
        ((np.zeros((8, 8)), 8), TypeError, "block_nbytes is missing: give both counts, or only a tensor"),
        ((np.zeros((8, 8)), None, 64), TypeError, "num_blocks is missing"),
        ((np.zeros((4, 8)).T,), ValueError, "a block of ptr is not in one piece"),
    ],
)
def test_what_says_no_counts(arguments: tuple[Any, ...], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        kvswap.Pool("host:0", *arguments)


def test_a_stride_without_counts() -> None:
    with pytest.raises(TypeError, match="block_nbytes is missing"):
        kvswap.Pool("host:0", np.zeros((8, 8)), stride=64)


# -- blocks that are coded on the way ---------------------------------------------------------------------------------


class Numbers(Tensor):
    dtype = "torch.bfloat16"


class Bytes(Tensor):
    dtype = "torch.uint8"

    def element_size(self) -> int:
        return 1


class Coded:
    """Two layers of normal values on the GPU, and room for their coded blocks on the host."""

    def __init__(self, device: kvswap.Device, codec: str, gap: int = 0) -> None:
        usable(device, "kernel")
        self.nbytes, self.coding = 4096, Coding(4096, codec)
        self.values, self.gpu, self.host, self.buffers = [], [], [], []
        for seed in range(2):
            gpu, host = Buffer(device, 8 * (4096 + gap), "gpu"), Buffer(device, 10 * self.coding.coded_nbytes, "cpu")
            host.put(np.zeros(10 * self.coding.coded_nbytes, np.uint8))
            normal = np.random.default_rng(seed).standard_normal((8, (4096 + gap) // 2), np.float32)
            self.values.append((normal.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8))
            gpu.put(self.values[-1].reshape(-1))
            strides = ((4096 + gap) // 2, 64, 1) if gap else None
            self.gpu.append(Numbers(gpu, (8, 32, 64), strides))
            self.host.append(Bytes(host, (10, self.coding.coded_nbytes)))
            self.host[-1].nbytes = 10 * self.coding.coded_nbytes
            self.buffers.append((gpu, host))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("gap", [0, 64])
def test_coded_blocks(device: kvswap.Device, codec: str, gap: int) -> None:
    """There and back; again while the first copy runs, over the same tensors."""
    rig = Coded(device, codec, gap)
    transfers = [kvswap.copy_blocks(rig.gpu, rig.host, FROM, TO, codec=codec, device=device) for _ in range(2)]
    back = kvswap.copy_blocks(rig.host, rig.gpu, TO, [7, 2, 4], codec=codec, device=device, layer_events=True)
    for transfer in (*transfers, back):
        transfer.wait(PATIENCE)
    for values, (gpu, host) in zip(rig.values, rig.buffers, strict=True):
        coded = rig.coding.encode(np.ascontiguousarray(values[FROM, :4096]))[0]
        np.testing.assert_array_equal(host.get().reshape(10, -1)[TO], coded)
        values[[7, 2, 4], :4096] = rig.coding.decode(coded)[0]
        np.testing.assert_array_equal(gpu.get().reshape(values.shape), values)


def test_coded_tensors_can_be_freed(device: kvswap.Device) -> None:
    """No pool is left when the transfers have ended."""
    rig = Coded(device, "exact")
    kvswap.copy_blocks(rig.gpu, rig.host, FROM, TO, codec="exact", device=device).wait(PATIENCE)
    gc.collect()
    assert not [pool for pool in _copy._pools.values() if pool.ptr == rig.gpu[0].data_ptr()]
    kvswap.Pool(device, rig.gpu[0].data_ptr(), 8, 4096)  # which could not be made over another one's bytes


def test_a_coded_block_that_does_not_fit(device: kvswap.Device) -> None:
    rig = Coded(device, "exact")
    rig.values[1][0] = np.random.default_rng(5).integers(0, 256, 4096, np.uint8)
    rig.buffers[1][0].put(rig.values[1].reshape(-1))
    transfer = kvswap.copy_blocks(rig.gpu, rig.host, FROM, TO, codec="exact", device=device)
    with pytest.raises(kvswap.Error, match="position 1 does not fit"):
        transfer.wait(PATIENCE)
    assert transfer.failed_positions.tolist() == [1]


def test_what_codec_refuses(device: kvswap.Device) -> None:
    rig = Coded(device, "exact")
    one: Any = {"src_ids": FROM, "dst_ids": TO, "device": device}
    for src, dst, more, why in (
        (
            rig.gpu,
            rig.gpu[::-1],
            {"codec": "exact"},
            r"a block of dst\[0\] has 4096 bytes; one of src\[0\] is coded to",
        ),
        (rig.gpu, rig.host, {"dtype": "bf16"}, "dtype goes with codec"),
        (
            rig.gpu,
            rig.host,
            {"codec": "exact", "dtype": "int8"},
            "codecs code bf16 and fp16: the GPU's tensors are int8",
        ),
        (rig.gpu, rig.host, {"codec": "zip"}, "the codec is zip"),
        ([], [], {}, "src and dst have no tensors"),
    ):
        with pytest.raises(ValueError, match=why):
            kvswap.copy_blocks(src, dst, **one, **more)
    kvswap.copy_blocks(rig.gpu, rig.host, FROM, TO, codec="exact", dtype="bf16", device=device).wait(PATIENCE)
    raw = np.zeros((8, 4096), np.uint8)
    with pytest.raises(ValueError, match="dtype= says what their bytes are"):
        kvswap.copy_blocks(raw, raw.copy(), FROM, TO, codec="exact", device="host:0")
