"""The Python surface on a host device: what is taken, what is refused in which words, what is held for how long."""

from __future__ import annotations

import ctypes
import gc
import inspect
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np
import pytest
from conftest import Gate, bindings

import kvswap
from kvswap import _C
from kvswap.memory import HostPool
from kvswap.typing import ForcedPath

NBYTES = 256  # of a block
BLOCKS = 16
LIMIT = 60.0  # seconds; nothing here takes as long


@pytest.fixture
def device() -> kvswap.Device:
    return kvswap.Device("host:0")


@pytest.fixture
def stream(device: kvswap.Device) -> Iterator[kvswap.Stream]:
    stream = kvswap.Stream(device)
    yield stream
    stream.synchronize(LIMIT)


@pytest.fixture
def gate(device: kvswap.Device) -> Iterator[Gate]:
    with Gate(device) as gate:
        yield gate


@pytest.fixture
def busy(device: kvswap.Device, gate: Gate) -> kvswap.Stream:
    """A stream on which nothing moves until the gate is opened."""
    stream = kvswap.Stream(device)
    gate.hold(stream)
    return stream


def cache(seed: int = 1) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (BLOCKS, NBYTES), dtype=np.uint8)


def swap(gpu: Any, cpu: Any, gpu_ids: Any = (0,), cpu_ids: Any = (0,), direction: Any = 0, **options: Any) -> Any:
    options.setdefault("device", "host:0")
    return kvswap.swap_cache_per_layer_async(gpu, cpu, NBYTES, BLOCKS, BLOCKS, gpu_ids, cpu_ids, direction, **options)


# -- what arrives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [list, tuple, np.int32, np.int64, "strided", "swapped", "range"])
def test_ids_of_every_kind(ids: Any) -> None:
    gpu, cpu = cache(), np.zeros((BLOCKS, NBYTES), np.uint8)
    made: Any
    if ids == "strided":
        made = np.repeat(np.array([2, 3, 4]), 2)[::2]
        assert not made.flags.c_contiguous
    elif ids == "swapped":
        made = np.array([2, 3, 4], dtype=np.dtype(np.int64).newbyteorder())
    elif ids == "range":
        made = range(2, 5)
    else:
        made = ids([2, 3, 4]) if ids in (list, tuple) else np.array([2, 3, 4], dtype=ids)
    swap(gpu, cpu, made, [7, 8, 9]).wait(LIMIT)
    assert (cpu[7:10] == gpu[2:5]).all()
    assert not cpu[:7].any() and not cpu[10:].any()


def test_the_five_functions_move_bytes(device: kvswap.Device) -> None:
    gpu, cpu = [cache(1), cache(2)], [np.zeros((BLOCKS, NBYTES), np.uint8) for _ in range(2)]
    kvswap.swap_cache_per_layer(gpu[0], cpu[0], NBYTES, BLOCKS, BLOCKS, [1], [2], kvswap.Direction.D2H, device=device)
    assert (cpu[0][2] == gpu[0][1]).all()
    args = (NBYTES, BLOCKS, [BLOCKS, BLOCKS], [3, 4], [5, 6])
    kvswap.swap_cache_all_layers(gpu, cpu, *args, 0, device=device)
    assert all((cpu[i][5:7] == gpu[i][3:5]).all() for i in range(2))
    transfer = kvswap.swap_cache_all_layers_async(gpu, cpu, *args, kvswap.Direction.H2D, device=device)
    transfer.wait(LIMIT)
    assert transfer.nbytes == 4 * NBYTES
    pointers = np.array([gpu[0].ctypes.data], np.uint64), np.array([gpu[1].ctypes.data], np.int64)
    kvswap.swap_blocks_batch(*pointers, np.array([NBYTES]), device=device).wait(LIMIT)
    assert (gpu[0][0] == gpu[1][0]).all()


def test_strides(device: kvswap.Device) -> None:
    gpu, cpu = cache(), np.zeros(8 * 100, np.uint8)
    kvswap.swap_cache_per_layer(
        gpu, cpu, 100, BLOCKS, 8, [1, 2], [0, 1], 0, gpu_stride=NBYTES, cpu_stride=100, device=device
    )
    assert (cpu[:100] == gpu[1][:100]).all() and (cpu[100:200] == gpu[2][:100]).all()


def test_nothing_to_move_is_a_transfer() -> None:
    for transfer in (
        kvswap.swap_blocks_batch([], [], 4, device="host:0"),
        kvswap.swap_blocks_batch([], [], [], device="host:0"),
        swap(cache(), cache(), [], []),
        kvswap.swap_cache_all_layers_async([], [], 4, 1, 1, [], [], 0, device="host:0"),
    ):
        transfer.wait(LIMIT)
        assert (transfer.nbytes, transfer.state, transfer.error) == (0, "done", None)
        assert transfer.failed_positions.dtype == np.int64 and transfer.failed_positions.shape == (0,)


# -- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.bool_, np.complex128, object])
def test_other_dtypes_of_ids_are_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match=rf"gpu_block_ids must be int32 or int64, not {np.dtype(dtype)}"):
        swap(cache(), cache(), np.zeros(1, dtype), [0])


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint32, np.bool_, np.uint8])
def test_other_dtypes_of_pointers_are_refused(dtype: Any) -> None:
    with pytest.raises(
        TypeError, match=r"src_ptrs is one tensor \([a-z0-9]+, shape \(1,\)\): must be a list of tensors"
    ):
        kvswap.swap_blocks_batch(np.zeros(1, dtype), [0], 4, device="host:0")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gpu_block_ids": [0, "x"]}, TypeError, r"gpu_block_ids\[1\] must be an int, not str"),
        ({"gpu_block_ids": [0, True]}, TypeError, r"gpu_block_ids\[1\] must be an int, not bool"),
        ({"gpu_block_ids": [0, 1.0]}, TypeError, r"gpu_block_ids\[1\] must be an int, not float"),
        ({"gpu_block_ids": [0, 2**63]}, ValueError, r"gpu_block_ids\[1\] is 9223372036854775808: must be a signed"),
        (
            {"gpu_block_ids": np.array([2**63, 0], np.uint64)},
            IndexError,
            r"gpu_block_ids\[0\] is 9223372036854775808: a",
        ),
        ({"gpu_block_ids": [0, BLOCKS]}, IndexError, "gpu"),
        ({"gpu_block_ids": [-1, 0]}, IndexError, "gpu"),
        (
            {"gpu_block_ids": 7},
            TypeError,
            "gpu_block_ids must be an int32 or int64 array or a sequence of ints, not int",
        ),
        ({"gpu_block_ids": "ab"}, TypeError, "gpu_block_ids must be"),
        ({"gpu_block_ids": b"ab"}, TypeError, "gpu_block_ids must be int32 or int64"),
        ({"gpu_block_ids": np.zeros((2, 1), int)}, ValueError, "gpu_block_ids must be one-dimensional, not 2-D"),
        ({"cpu_block_ids": [1, 2, 3]}, ValueError, "cpu_block_ids has 3 items, but gpu_block_ids has 2"),
        ({"block_nbytes": -1}, ValueError, "block_nbytes is -1: must not be negative"),
        ({"block_nbytes": 2**64}, ValueError, "block_nbytes is 18446744073709551616: must be"),
        ({"block_nbytes": 1.5}, TypeError, "block_nbytes must be an int, not float"),
        ({"num_gpu_blocks": BLOCKS + 1}, ValueError, "gpu_ptr is a tensor of 4096 bytes, but 17 blocks of 256 bytes"),
        ({"cpu_stride": 512}, ValueError, "cpu_ptr is a tensor of 4096 bytes, but 16 blocks of 256 .* need 7936"),
        ({"cpu_stride": 2**63}, ValueError, "cpu_ptr is a tensor of 4096 bytes"),
        ({"cpu_stride": -256}, ValueError, "cpu_stride is -256"),
        ({"direction": 2}, ValueError, r'direction is 2: must be 0 \("D2H"'),
        ({"direction": True}, ValueError, "direction is True"),
        ({"direction": "HD"}, ValueError, "direction is 'HD'"),
        ({"direction": 2**70}, ValueError, "direction is 1180591620717411303424"),
        (
            {"path": "ring"},
            ValueError,
            "path is 'ring': must be one of 'auto', 'dma', 'strided', 'borrow', 'burst', 'kernel', 'direct'",
        ),
        ({"path": None}, TypeError, "path must be a str, one of .* not NoneType"),
        ({"priority": "low"}, ValueError, "priority is 'low'"),
        ({"max_ctas": 0}, ValueError, "max_ctas is 0"),
        ({"max_ctas": 2**40}, ValueError, "max_ctas"),
        ({"pace_gbps": 0}, ValueError, "pace_gbps is 0"),
        ({"pace_gbps": float("nan")}, ValueError, "pace_gbps is nan"),
        ({"pace_gbps": "fast"}, TypeError, "pace_gbps must be a number, not str"),
        ({"device": 3.0}, TypeError, "device must be a Device, a name"),
        ({"device": True}, TypeError, "device must be a Device, a name"),
        ({"device": "gpu"}, ValueError, "gpu"),
        ({"stream": "x"}, TypeError, "stream must be a stream"),
        ({"stream": -1}, ValueError, "stream is -1"),
        ({"stream": True}, TypeError, "stream must be an int, not bool"),
        ({"after": 1.5}, TypeError, "after must be an Event, a Transfer or a stream"),
        ({"after": ["x"]}, TypeError, r"after\[0\] must be an Event"),
        ({"after": "x"}, TypeError, "after must be"),
        ({"gpu_ptr": None}, TypeError, "gpu_ptr must be an address or a tensor .* not NoneType"),
        ({"gpu_ptr": True}, TypeError, "gpu_ptr must be an int, not bool"),
        ({"gpu_ptr": 1.0}, TypeError, "gpu_ptr must be an address or a tensor"),
        ({"gpu_ptr": np.float64(1)}, TypeError, "gpu_ptr must be an int, not"),
        ({"gpu_ptr": -1}, ValueError, "gpu_ptr is -1"),
        ({"unknown": 1}, TypeError, "got an unexpected keyword argument 'unknown'"),
    ],
)
def test_wrong_arguments(device: kvswap.Device, change: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {
        "gpu_ptr": cache(),
        "cpu_ptr": cache(2),
        "block_nbytes": NBYTES,
        "num_gpu_blocks": BLOCKS,
        "num_cpu_blocks": BLOCKS,
        "gpu_block_ids": [0, 1],
        "cpu_block_ids": [2, 3],
        "direction": 0,
        "device": device,
    }
    before = device.stats()
    cpu = good["cpu_ptr"].copy()  # type: ignore[attr-defined]
    for function in (kvswap.swap_cache_per_layer, kvswap.swap_cache_per_layer_async):
        with pytest.raises(error, match=message):
            function(**{**good, **change})
    assert (good["cpu_ptr"] == cpu).all()
    assert device.stats()["submitted"] == before["submitted"]


def test_wrong_lists_of_tensors() -> None:
    gpu, cpu = [cache(), cache()], [cache(), cache()]

    def call(gpu: Any = gpu, cpu: Any = cpu, nbytes: Any = NBYTES, blocks: Any = BLOCKS, **options: Any) -> None:
        kvswap.swap_cache_all_layers(gpu, cpu, nbytes, blocks, blocks, [0], [0], 0, device="host:0", **options)

    with pytest.raises(ValueError, match="cpu_ptrs has 1 items, but gpu_ptrs has 2"):
        call(cpu=cpu[:1])
    with pytest.raises(ValueError, match="block_nbytes has 3 items, but gpu_ptrs has 2"):
        call(nbytes=[1, 2, 3])
    with pytest.raises(ValueError, match=r"block_nbytes\[1\] is -2"):
        call(nbytes=[1, -2])
    with pytest.raises(ValueError, match=r"block_nbytes\[1\] is -2: must be 0 or more"):
        call(nbytes=np.array([1, -2], np.int32))
    with pytest.raises(TypeError, match="num_gpu_blocks must be integers of 32 or 64 bits, not float64"):
        call(blocks=np.ones(2))
    with pytest.raises(TypeError, match="num_gpu_blocks must be an int or a list of ints, not str"):
        call(blocks="xy")
    with pytest.raises(ValueError, match=r"gpu_ptrs\[1\] is a tensor of 4096 bytes, but 20 blocks"):
        call(blocks=[BLOCKS, 20])
    with pytest.raises(ValueError, match=r"cpu_ptrs\[0\] is a tensor of 4096 bytes"):
        call(cpu_stride=[2 * NBYTES, NBYTES])
    with pytest.raises(TypeError, match=r"gpu_ptrs\[1\] must be an address or a tensor"):
        call(gpu=[gpu[0], None])
    with pytest.raises(TypeError, match="gpu_ptrs is one tensor"):
        call(gpu=gpu[0].reshape(-1))
    with pytest.raises(TypeError, match=r"gpu_ptrs must be a list of tensors or addresses, .* not int"):
        call(gpu=5)
    with pytest.raises(ValueError, match="sizes has 2 items, but src_ptrs has 1"):
        kvswap.swap_blocks_batch(gpu[:1], cpu[:1], [1, 2], device="host:0")
    with pytest.raises(ValueError, match=r"dst_ptrs\[0\] is a tensor of 4096 bytes, but 5000 are to be copied"):
        kvswap.swap_blocks_batch([np.zeros(5000, np.uint8)], cpu[:1], 5000, device="host:0")


def test_calls_are_parsed_as_python_does() -> None:
    call: Any = kvswap.swap_blocks_batch
    with pytest.raises(TypeError, match=r"swap_blocks_batch\(\) missing required argument 'sizes'"):
        call([], [])
    with pytest.raises(TypeError, match=r"takes at most 3 positional arguments \(4 given\)"):
        call([], [], 1, None)
    with pytest.raises(TypeError, match="got multiple values for argument 'sizes'"):
        call([], [], 1, sizes=1)
    kvswap.swap_blocks_batch(sizes=1, dst_ptrs=[], src_ptrs=[], device="host:0").wait(LIMIT)


# -- tensors ---------------------------------------------------------------------------------------------------------


class Torchlike:
    """data_ptr() and what torch says beside it."""

    def __init__(self, array: np.ndarray[Any, Any], contiguous: bool = True, sized: bool = True) -> None:
        self.array, self.contiguous = array, contiguous
        if sized:
            self.nbytes = array.nbytes

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def is_contiguous(self) -> bool:
        return self.contiguous

    def __index__(self) -> int:
        raise TypeError("only one-element tensors")


class Counted:
    """numel() and element_size(): an older torch."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.array.itemsize


class Dlpack:
    def __init__(self, array: np.ndarray[Any, Any], versioned: bool = True) -> None:
        self.array, self.versioned = array, versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **options: Any) -> Any:
        if options and not self.versioned:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**options)


class Interface:
    def __init__(self, array: np.ndarray[Any, Any], name: str = "__array_interface__", **change: Any) -> None:
        self.array = array
        setattr(self, name, {**array.__array_interface__, **change})


class Index:
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __index__(self) -> int:
        return self.array.ctypes.data


KINDS: dict[str, Callable[[Any], Any]] = {
    "array": lambda array: array,
    "int": lambda array: array.ctypes.data,
    "numpy int": lambda array: np.int64(array.ctypes.data),
    "index": Index,
    "data_ptr": Torchlike,
    "data_ptr, unsized": lambda array: Torchlike(array, sized=False),
    "data_ptr, counted": Counted,
    "dlpack": Dlpack,
    "dlpack, unversioned": lambda array: Dlpack(array, versioned=False),
    "array interface": Interface,
    "cuda array interface": lambda array: Interface(array, "__cuda_array_interface__"),
    "buffer": memoryview,
    "ctypes": lambda array: (ctypes.c_char * array.nbytes).from_buffer(array),
}


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class ExchangeTable(ctypes.Structure):
    """DLPack's table of C functions, as a type offers it."""

    READ = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("unused", ctypes.c_void_p * 3),
        ("read", READ),
    )


def exchanging(table: ExchangeTable) -> type[Torchlike]:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule = new(ctypes.addressof(table), b"dlpack_exchange_api", None)
    return type("Exchanging", (Torchlike,), {"__dlpack_c_exchange_api__": capsule})


@pytest.mark.parametrize("case", ["read", "refused", "strided", "elsewhere", "newer", "older", "subclass"])
def test_lists_of_tensors_are_read_in_c_where_their_type_offers_that(case: str) -> None:
    reads = []

    def read(tensor: Any, made: Any) -> int:
        array = tensor.array
        shape, strides = tensor.keep = (ctypes.c_int64 * 2)(*array.shape), (ctypes.c_int64 * 2)(array.shape[1], 1)
        if case == "strided":
            strides[0] += 1
        made[0] = DLTensor(array.ctypes.data - 8, 4 if case == "elsewhere" else 1, 0, 2, 1, 8, 1, shape, strides, 8)
        reads.append(tensor)
        return -1 if case == "refused" else 0

    table = ExchangeTable(2 if case in ("newer", "older") else 1, 3, read=ExchangeTable.READ(read))
    first = ExchangeTable(1, 2, read=ExchangeTable.READ(read))
    if case == "older":
        table.older = ctypes.addressof(first)
    made: Any = exchanging(table)
    if case == "subclass":
        made = type("Subclass", (made,), {})
    gpu, cpu = [cache(seed) for seed in (1, 2)], [np.zeros((BLOCKS, NBYTES), np.uint8) for _ in range(2)]
    sides = [made(array) for array in gpu], [made(array) for array in cpu]
    kvswap.swap_cache_all_layers(*sides, NBYTES, BLOCKS, BLOCKS, [1, 2], [8, 9], 0, device="host:0")
    assert all((cpu[i][8:10] == gpu[i][1:3]).all() for i in range(2))
    assert reads == ([] if case in ("newer", "subclass") else [*sides[0], *sides[1]])
    reads.clear()
    with pytest.raises(ValueError, match=rf"gpu_ptrs\[0\] is a tensor of {BLOCKS * NBYTES} bytes"):
        kvswap.swap_cache_all_layers(*sides, NBYTES, BLOCKS + 1, BLOCKS, [1], [8], 0, device="host:0")


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_every_kind(kind: str) -> None:
    gpu, cpu = cache(), np.zeros((BLOCKS, NBYTES), np.uint8)
    made = KINDS[kind]
    swap(made(gpu), made(cpu), [1, 2], [3, 4]).wait(LIMIT)
    assert (cpu[3:5] == gpu[1:3]).all()
    args = ([made(gpu)], [made(cpu)], NBYTES, BLOCKS, BLOCKS, [1, 2], [8, 9], 0)
    kvswap.swap_cache_all_layers(*args, device="host:0")
    assert (cpu[8:10] == gpu[1:3]).all()
    kvswap.swap_blocks_batch([made(gpu)], [made(cpu)], NBYTES, device="host:0").wait(LIMIT)
    assert (cpu[0] == gpu[0]).all()


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("int", "numpy int", "index", "data_ptr, unsized")])
def test_sizes_of_tensors_are_checked(kind: str) -> None:
    with pytest.raises(ValueError, match=r"gpu_ptr is a tensor of 256 bytes, but 16 blocks of 256 bytes .* need 4096"):
        swap(KINDS[kind](cache()[0].copy()), cache())


def test_a_number_that_is_refused_is_named() -> None:
    """Of an array that was copied: the copy is large enough to leave the process when it is freed."""
    with pytest.raises(ValueError, match=r"sizes\[9\] is -5: must be 0 or more"):
        sizes = np.zeros(1 << 24, np.int32)
        sizes[9] = -5
        kvswap.swap_blocks_batch([0], [0], sizes, device="host:0")


def test_an_array_interface_that_changes_while_it_is_read() -> None:
    """By the __index__ of its address here; by another thread where there is no GIL."""
    gpu = cache()[0].copy()
    tensor: Any = Interface(gpu)

    class Address:
        def __index__(self) -> int:
            tensor.__array_interface__.clear()
            return gpu.ctypes.data

    tensor.__array_interface__["data"] = (Address(), False)
    with pytest.raises(ValueError, match="gpu_ptr is a tensor of 256 bytes"):
        swap(tensor, cache())
    assert tensor.__array_interface__ == {}


@pytest.mark.parametrize("many", [False, True])
def test_a_tensor_without_a_stride_has_its_blocks_and_nothing_else(many: bool) -> None:
    """Elements given for bytes would move half of each block, from and to half the right offset."""
    gpu, cpu = np.ones((BLOCKS, NBYTES), np.float16), np.zeros((BLOCKS, NBYTES), np.float16)
    call = kvswap.swap_cache_all_layers if many else kvswap.swap_cache_per_layer
    sides: Any = ([gpu], [cpu]) if many else (gpu, cpu)
    name = r"gpu_ptrs\[0\]" if many else "gpu_ptr"
    with pytest.raises(ValueError, match=rf"{name} is a tensor of 8192 bytes.* need 4096: .*512 bytes.*in elements"):
        call(*sides, NBYTES, BLOCKS, BLOCKS, [3], [5], 0, device="host:0")
    for blocks, nbytes, hint in (
        (BLOCKS - 1, 2 * NBYTES, "name a stride if other bytes lie between or behind them"),
        (0, 2 * NBYTES, "name a stride"),
        (BLOCKS + 1, 2 * NBYTES, f"it has room for {BLOCKS} of them$"),
        (2 * BLOCKS, 2 * NBYTES, f"it has room for {BLOCKS} of them, or for {2 * BLOCKS} of 256 bytes$"),
        (BLOCKS, 2 * NBYTES - 1, "a block of the tensor has 512 bytes; name a stride if the other bytes"),
        (BLOCKS, 2 * NBYTES + 1, "a block of the tensor has 512 bytes$"),
    ):
        with pytest.raises(ValueError, match=hint):
            call(*sides, nbytes, blocks, BLOCKS, [3], [5], 0, device="host:0")
    with pytest.raises(ValueError, match=rf"{name.replace('gpu', 'cpu')} is a tensor of"):
        call(*sides, NBYTES, BLOCKS, BLOCKS, [3], [5], 0, gpu_stride=NBYTES, device="host:0")
    assert not cpu.any()
    call(*sides, 2 * NBYTES, BLOCKS, BLOCKS, [3], [5], 0, device="host:0")
    assert (np.flatnonzero(cpu.any(axis=1)) == [5]).all()
    call(*sides, NBYTES, BLOCKS, BLOCKS, [0], [0], 0, gpu_stride=2 * NBYTES, cpu_stride=2 * NBYTES, device="host:0")


@pytest.mark.parametrize("kind", ["array", "dlpack", "dlpack, unversioned", "array interface", "buffer"])
def test_read_only_tensors_are_sources_only(kind: str) -> None:
    gpu, cpu = cache(), np.zeros((BLOCKS, NBYTES), np.uint8)
    gpu.flags.writeable = False
    frozen = KINDS[kind](gpu)
    if kind == "dlpack, unversioned":  # the old protocol cannot say read-only, and NumPy then refuses
        with pytest.raises(TypeError, match="gpu_ptr must be an address or a tensor"):
            swap(frozen, cpu)
        return
    swap(frozen, cpu, [1], [1]).wait(LIMIT)
    assert (cpu[1] == gpu[1]).all()
    with pytest.raises(ValueError, match="gpu_ptr is the destination and read-only"):
        swap(frozen, cpu, [1], [1], 1)
    with pytest.raises(ValueError, match=r"dst_ptrs\[0\] is the destination and read-only"):
        kvswap.swap_blocks_batch([cpu], [frozen], NBYTES, device="host:0")


def test_bytes_are_a_source() -> None:
    cpu = np.zeros(3, np.uint8)
    kvswap.swap_blocks_batch([b"abc"], [cpu], 3, device="host:0").wait(LIMIT)
    assert cpu.tobytes() == b"abc"


def test_tensors_that_are_not_contiguous() -> None:
    array: Any = np.zeros((BLOCKS, 2 * NBYTES), np.uint8)[:, ::2]
    for made in (array, memoryview(array), Dlpack(array), Interface(array), Torchlike(array, contiguous=False)):
        with pytest.raises(ValueError, match="gpu_ptr is not contiguous"):
            swap(made, cache())


def test_a_scalar_or_a_tensor_of_pointers_is_not_taken_for_its_memory() -> None:
    table = np.array([cache().ctypes.data], np.int64)

    class Tensor:  # walked as a sequence it would give tensors, whose addresses are not the pointers
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return table

        def __getitem__(self, i: int) -> Any:
            raise AssertionError("walked")

        def __len__(self) -> int:
            return 1

    source = cache()
    table[0] = source.ctypes.data
    target = cache(2)
    kvswap.swap_blocks_batch(Tensor(), [target], NBYTES, device="host:0").wait(LIMIT)
    assert (target[0] == source[0]).all()


def test_an_attribute_that_raises_what_nobody_expects() -> None:
    class Raises:
        @property
        def __cuda_array_interface__(self) -> Any:
            raise RuntimeError("not now")

    with pytest.raises(RuntimeError, match="not now"):
        swap(Raises(), cache())


def test_tables_of_an_offloading_map() -> None:
    for tables, message in (
        (([1], []), "^tensors must be rows of 8 integers, one after another$"),
        (([[1] * 8], []), "^tensors must be one-dimensional"),
        (([0] * 8, [1, 2]), "^parts must be rows of 10 integers, one after another$"),
    ):
        with pytest.raises(ValueError, match=message):
            _C.OffloadMap("host:0", *(np.array(table, np.uint64) for table in tables), 1, 1, 1)


def test_tensors_that_lie() -> None:
    class Raises:
        def data_ptr(self) -> int:
            raise RuntimeError("no storage")

    with pytest.raises(ValueError, match=r"without one address .no storage."):
        swap(Raises(), cache())
    for change in ({"data": None}, {"data": (1,)}):
        with pytest.raises(TypeError, match="must be an address or a tensor"):
            swap(Interface(cache(), **change), cache())
    with pytest.raises(ValueError, match="has an impossible shape"):
        swap(Interface(cache(), shape=(2**40, 2**40)), cache())

    class NoCapsule(Dlpack):
        def __dlpack__(self, **options: Any) -> Any:
            return 5

    with pytest.raises(TypeError, match="must be an address or a tensor"):
        swap(NoCapsule(cache()), cache())


# -- holding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["array", "data_ptr", "dlpack", "array interface"])
def test_tensors_are_held_until_the_transfer_ended(busy: kvswap.Stream, gate: Gate, kind: str) -> None:
    class Kept(np.ndarray):
        pass

    gpu = cache().view(Kept)
    alive = weakref.ref(gpu)
    transfer = swap(KINDS[kind](gpu), cache(), [1], [1], stream=busy)
    del gpu
    gc.collect()
    assert not transfer.done()
    assert alive() is not None
    gate.open()
    transfer.wait(LIMIT)
    gc.collect()
    assert alive() is None


def test_what_was_held_is_let_go_without_the_transfer(device: kvswap.Device, busy: kvswap.Stream, gate: Gate) -> None:
    memory = bytearray(cache().tobytes())
    swap(memory, cache(), [1], [1], stream=busy)
    with pytest.raises(BufferError):
        memory.append(1)
    gate.open()
    busy.synchronize(LIMIT)
    deadline = time.monotonic() + LIMIT
    while device.stats()["unfinished"] and time.monotonic() < deadline:
        time.sleep(0.001)
    memory.append(1)  # no export is left, so it may grow


def test_a_refused_call_holds_nothing() -> None:
    gpu, cpu = Torchlike(cache()), Torchlike(cache())
    counts = sys.getrefcount(gpu), sys.getrefcount(cpu)
    for change in ({"gpu_ids": [99]}, {"direction": 3}, {"device": "host:0", "stream": "x"}, {"path": "none"}):
        with pytest.raises((ValueError, IndexError, TypeError)):
            swap(gpu, cpu, **change)
    assert (sys.getrefcount(gpu), sys.getrefcount(cpu)) == counts


def test_nothing_leaks(device: kvswap.Device, stream: kvswap.Stream) -> None:
    gpu, cpu, ids = Torchlike(cache()), Dlpack(cache()), np.array([1, 2])
    event = kvswap.Event(device)
    frozen = cache()
    frozen.flags.writeable = False

    def refuse(function: Callable[..., Any], *args: Any, **options: Any) -> None:
        with pytest.raises((ValueError, IndexError, TypeError, AttributeError, BufferError, kvswap.Error)):
            function(*args, **options)

    def work() -> None:
        transfer = swap(gpu, cpu, ids, [1, 2], stream=stream, after=[event, stream])
        transfer.wait(LIMIT)
        for name in ("event", "device", "error", "failed_positions", "elapsed", "path", "state", "sequence"):
            getattr(transfer, name)
        repr(transfer), repr(device), repr(stream), repr(event)
        swap(gpu, cpu, ids, [1, 2], after=transfer).wait(LIMIT)
        targets = [Torchlike(frozen.copy()), memoryview(bytearray(10))]
        kvswap.swap_blocks_batch([gpu, cpu], targets, [4, 4], device=device).wait(LIMIT)
        memory = device.alloc(100)
        np.asarray(memory)[0] = memory.__array_interface__["data"][0] & 1
        memory.free()
        refuse(memory.free)
        refuse(lambda: memory.ptr)
        refuse(lambda: memory.__cuda_array_interface__)
        refuse(swap, gpu, cpu, ids, [1, 99])
        refuse(swap, gpu, cpu, ids, [1])
        refuse(swap, gpu, frozen, ids, [1, 2])
        refuse(swap, gpu, None, ids, [1, 2])
        refuse(swap, gpu, cpu, ids, [1, 2], after=[event, None])
        refuse(swap, gpu, cpu, ids, [1, 2], nonsense=1)
        refuse(kvswap.swap_blocks_batch, [gpu, None], [gpu, gpu], 4)
        refuse(kvswap.swap_blocks_batch, [gpu], [cpu], ["x"])
        refuse(kvswap.Device, "nothing")
        refuse(kvswap.Stream, device, priority="none")
        refuse(event.record, None)
        _C._pattern(device, True, np.array([memory_of.ctypes.data]), np.array([8]), keys, stream).result(LIMIT)
        refuse(_C._pattern, device, True, np.array([1, 2]), np.array([8]), keys, stream)
        refuse(bindings.seam, device, "copy_batch", [1], [1, 2], [3], stream.handle)
        bindings.seam(device, "pointer_query", memory_of.ctypes.data)
        device.info, device.stats()
        kvswap.devices()

    memory_of = np.zeros(8, np.uint8)
    keys = np.array([1], np.uint64)
    rounds = 60
    growth: list[int] = []
    objects: list[Any] = [gpu, cpu, ids, event, stream, device, kvswap.Device, kvswap.Transfer, kvswap.Event]
    while len(growth) < 4 or (min(growth) >= rounds / 2 and len(growth) < 12):  # caches of Python fill up meanwhile
        references, blocks = [sys.getrefcount(o) for o in objects], sys.getallocatedblocks()
        for _ in range(rounds):
            work()
        gc.collect()
        assert not growth or [sys.getrefcount(o) for o in objects] == references
        growth.append(sys.getallocatedblocks() - blocks)
    assert min(growth) < rounds / 2, growth  # one object a round would be `rounds`


# -- waiting ---------------------------------------------------------------------------------------------------------


def test_waiting_with_a_limit(device: kvswap.Device, busy: kvswap.Stream, gate: Gate) -> None:
    transfer = swap(cache(), cache(), [1], [1], stream=busy)
    event = kvswap.Event(device)
    event.record(busy)
    for wait in (transfer.wait, event.synchronize, busy.synchronize, device.synchronize):
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"did not end within 0\.02 s; it goes on"):
            wait(0.02)
        assert time.monotonic() - began < LIMIT / 4
    assert (transfer.done(), transfer.state, transfer.error, transfer.elapsed) == (False, "running", None, None)
    assert (busy.query(), event.query()) == (False, False)
    gate.open()
    transfer.wait(timeout=LIMIT)
    device.synchronize(LIMIT)
    assert (transfer.done(), transfer.state, busy.query(), event.query()) == (True, "done", True, True)
    assert isinstance(transfer.elapsed, float)
    transfer.wait(0)


@pytest.mark.parametrize(
    ("timeout", "error"),
    [(-1, ValueError), (float("nan"), ValueError), ("1", TypeError), (-float("inf"), ValueError), ([], TypeError)],
)
def test_wrong_limits(device: kvswap.Device, timeout: Any, error: type[Exception]) -> None:
    transfer = kvswap.swap_blocks_batch([], [], 1, device=device)
    for wait in (transfer.wait, device.synchronize, kvswap.Event(device).synchronize):
        with pytest.raises(error, match="timeout"):
            wait(timeout)
    unlimited: list[Any] = [None, float("inf"), 1e300, np.float32(1), 1]
    for none in unlimited:
        transfer.wait(none)


def test_other_threads_run_during_a_wait(busy: kvswap.Stream, gate: Gate) -> None:
    """The other one opens the gate when it is through."""
    transfer = swap(cache(), cache(), [1], [1], stream=busy)

    def tick() -> None:
        for _ in range(50):
            time.sleep(0.001)
        gate.open()

    thread = threading.Thread(target=tick)
    thread.start()
    transfer.wait(LIMIT)
    thread.join()


@pytest.mark.parametrize(
    "what", ["transfer.wait()", "transfer.wait(30)", "stream.synchronize()", "device.synchronize()", "sync"]
)
def test_ctrl_c_ends_a_wait(what: str) -> None:
    call = (
        what
        if what != "sync"
        else "kvswap.swap_cache_per_layer(a, b, 1, 9, 9, [2], [2], 0, stream=stream, device=device)"
    )
    program = f"""
        import kvswap._testing, numpy as np, signal, sys
        signal.alarm(60)  # ends it if it takes no Ctrl-C
        device = kvswap.Device("host:0")
        stream, word = kvswap.Stream(device), device.alloc(4, host=True)
        kvswap._testing.seam(device, "wait32", word.ptr, 1, stream.handle)
        a, b = np.ones(9, np.uint8), np.zeros(9, np.uint8)
        transfer = kvswap.swap_cache_per_layer_async(a, b, 1, 9, 9, [1], [1], 0, stream=stream, device=device)
        print("ready", flush=True)
        try:
            {call}
        except KeyboardInterrupt:
            assert not transfer.done()
            print("interrupted", flush=True)
            np.frombuffer(word, np.uint32)[0] = 1
            transfer.wait()
            assert b[1] == 1
            print("done", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment(), cwd="/") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.2)
        began = time.monotonic()
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "interrupted\n"
        assert time.monotonic() - began < LIMIT / 4
        assert child.stdout.read() == "done\n"
        assert child.wait(LIMIT) == 0


def test_a_program_may_end_under_a_running_transfer() -> None:
    program = """
        import kvswap, numpy as np
        device = kvswap.Device("host:0")
        stream = kvswap.Stream(device)
        kvswap._C._delay(device, 0.3, stream)
        memory = device.alloc(100, host=True)
        t = kvswap.swap_blocks_batch([np.ones(99, np.uint8)], [memory], 99, stream=stream, device=device)
        event = t.event
    """
    began = time.monotonic()
    _run(program, "-X", "dev")
    assert time.monotonic() - began < LIMIT


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def _run(program: str, *options: str) -> None:
    """In a process of its own, which finds the same kvswap: hence not in the folder of the sources."""
    command = [sys.executable, *options, "-c", textwrap.dedent(program)]
    done = subprocess.run(
        command, env=_environment(), cwd="/", text=True, capture_output=True, timeout=LIMIT, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


# -- order -----------------------------------------------------------------------------------------------------------


class Cupylike:
    def __init__(self, handle: int) -> None:
        self.ptr = handle


class CudaStream:
    def __init__(self, *answer: int) -> None:
        self.answer = answer

    def __cuda_stream__(self) -> tuple[int, ...]:
        return self.answer


class TorchStream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


class TorchEvent:
    def __init__(self, handle: int) -> None:
        self.cuda_event = handle


STREAMS: dict[str, Callable[[kvswap.Stream], Any]] = {
    "kvswap": lambda stream: stream,
    "int": lambda stream: stream.handle,
    "numpy": lambda stream: np.uint64(stream.handle),
    "torch": lambda stream: TorchStream(stream.handle),
    "cupy": lambda stream: Cupylike(stream.handle),
    "protocol": lambda stream: CudaStream(0, stream.handle),
    "attribute": lambda stream: type("S", (), {"__cuda_stream__": (0, stream.handle)})(),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_streams_of_every_kind(device: kvswap.Device, busy: kvswap.Stream, gate: Gate, kind: str) -> None:
    made = STREAMS[kind](busy)
    transfers = [swap(cache(), cache(), stream=made), swap(cache(), cache(), after=made)]
    transfers.append(swap(cache(), cache(), after=[made]))
    event = kvswap.Event(device)
    event.record(made)
    assert not any(t.done() for t in transfers)
    assert not event.query()
    other = kvswap.Stream(device)
    event.wait(STREAMS[kind](other))
    transfers[0].make_wait(STREAMS[kind](other))
    assert not other.query()
    gate.open()
    for transfer in transfers:
        transfer.wait(LIMIT)
    other.synchronize(LIMIT)


@pytest.mark.parametrize("kind", ["event", "transfer", "transfer event", "torch event", "generator", "set"])
def test_what_a_transfer_starts_after(device: kvswap.Device, busy: kvswap.Stream, gate: Gate, kind: str) -> None:
    event = kvswap.Event(device)
    event.record(busy)
    earlier = swap(cache(), cache(), stream=busy)
    after: Any = {
        "event": event,
        "transfer": earlier,
        "transfer event": earlier.event,
        "torch event": TorchEvent(event.handle),
        "generator": (e for e in (event, earlier, TorchEvent(0))),
        "set": {event},
    }[kind]
    transfer = swap(cache(), cache(), after=after)
    assert not transfer.done()
    gate.open()
    transfer.wait(LIMIT)
    assert earlier.done() or kind not in ("transfer", "transfer event", "generator")


def test_wrong_streams(device: kvswap.Device) -> None:
    other = bindings.deterministic_device(5)
    with pytest.raises(ValueError, match="stream is of host:seed-5, not of "):
        swap(cache(), cache(), stream=kvswap.Stream(other))
    with pytest.raises(ValueError, match="after is of"):
        swap(cache(), cache(), after=kvswap.Event(other))
    event = kvswap.Event(device)
    for wrong in (None, "x", 1.5, object(), kvswap.Stream):
        with pytest.raises(TypeError, match="stream must be"):
            event.record(wrong)
        with pytest.raises(TypeError, match="stream must be"):
            device.set_compute_stream(wrong)
    with pytest.raises(ValueError, match="__cuda_stream__ version 1"):
        event.record(CudaStream(1, 1))
    with pytest.raises(TypeError, match="no pair"):
        event.record(CudaStream(1))
    with pytest.raises(ValueError, match="marks a transfer's end"):
        kvswap.swap_blocks_batch([], [], 1, device=device).event.record(1)


def test_elapsed_time(device: kvswap.Device, stream: kvswap.Stream) -> None:
    first, last = kvswap.Event(device), kvswap.Event(device)
    first.record(stream)
    _C._delay(device, 0.05, stream)
    last.record(stream)
    last.synchronize(LIMIT)
    assert 0.04 < first.elapsed_time(last) < LIMIT
    with pytest.raises(TypeError, match="other must be an Event"):
        first.elapsed_time(1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="other is of"):
        first.elapsed_time(kvswap.Event(bindings.deterministic_device(3)))


def test_the_compute_stream(device: kvswap.Device, busy: kvswap.Stream, gate: Gate) -> None:
    device.set_compute_stream(busy)
    try:
        transfer = swap(cache(), cache())
        assert not transfer.done()
        gate.open()
        transfer.wait(LIMIT)
    finally:
        device.set_compute_stream(1)


# -- devices and memory ----------------------------------------------------------------------------------------------


def test_devices_by_name() -> None:
    device = kvswap.Device("host")
    assert (device.name, device.kind, device.lost) == ("host:0", "host", False)
    assert device == kvswap.Device(name="host:0") and hash(device) == hash(kvswap.Device("host:0"))
    assert device != kvswap.Device("host:1") and device != object()
    assert device.info["kernels"] is True
    for name, error in (("", ValueError), ("gpu:0", ValueError), ("cuda:x", ValueError), (3.0, TypeError)):
        with pytest.raises(error):
            kvswap.Device(name)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot create"):
        kvswap.Transfer()


@pytest.mark.skipif(_C._cuda_count()[0] > 0, reason="there is a GPU")
def test_the_default_without_a_gpu_is_said_once() -> None:
    program = """
        import logging, kvswap
        said = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append((record.name, record.getMessage()))
        logging.getLogger("kvswap").addHandler(handler)
        logging.getLogger("kvswap").setLevel(logging.INFO)
        assert kvswap.Device().name == kvswap.Device(None).name == "host:0"
        assert [name for name, _ in said] == ["kvswap"] * 2, said
        assert said[0][1].startswith("using host:0") and " opens host:0" in said[1][1], said
    """
    _run(program)
    assert logging.getLogger("kvswap").level == logging.NOTSET


def test_the_list_of_devices() -> None:
    found = kvswap.devices()
    assert found[-1].name == "host:0" and found[-1].kind == "host"
    assert set(found[-1].paths) == set(get_args(ForcedPath))
    with pytest.raises(AttributeError):
        found[-1].name = "x"  # type: ignore[misc]


@pytest.mark.parametrize("host", [False, True])
def test_memory(device: kvswap.Device, host: bool) -> None:
    memory: Any = device.alloc(4096, host=host)
    assert (memory.nbytes, memory.host, memory.device) == (4096, host, device)
    assert memory.ptr == memory.data_ptr() and memory.ptr % 256 == 0
    array = np.frombuffer(memory, np.uint8)
    array[:] = 7
    assert memory.__array_interface__["data"] == (memory.ptr, False)
    assert not hasattr(memory, "__cuda_array_interface__")
    target = cache()
    kvswap.swap_blocks_batch([memory], [target], NBYTES, device=device).wait(LIMIT)
    assert (target[0] == 7).all()
    with pytest.raises(BufferError, match="arrays or transfers of a FileStore still use this memory"):
        memory.free()
    del array
    memory.free()
    assert "freed" in repr(memory)
    for use in (memory.free, memory.data_ptr, lambda: memory.ptr):
        with pytest.raises(kvswap.Error, match="already freed"):
            use()
    with pytest.raises(BufferError):
        memoryview(memory)
    with pytest.raises(kvswap.Error, match="already freed"):
        kvswap.swap_blocks_batch([memory], [target], 4, device=device)


def test_memory_waits_for_its_transfers(device: kvswap.Device, busy: kvswap.Stream, gate: Gate) -> None:
    memory, target = device.alloc(NBYTES), cache()
    np.asarray(memory)[:] = 9
    transfer = kvswap.swap_blocks_batch([memory], [target], NBYTES, stream=busy, device=device)
    later = threading.Timer(0.2, gate.open)
    later.start()
    memory.free()
    later.join()
    assert transfer.done() and (target[0] == 9).all()


@pytest.mark.parametrize(
    ("nbytes", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError), (2**64, ValueError), ("1", TypeError)]
)
def test_wrong_sizes(device: kvswap.Device, nbytes: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="nbytes"):
        device.alloc(nbytes)


def test_registering(device: kvswap.Device) -> None:
    array = np.zeros(1 << 16, np.uint8)
    device.register(array)
    with pytest.raises((ValueError, kvswap.Error)):
        device.register(array.ctypes.data, 4096)
    device.unregister(array)
    device.register(array.ctypes.data, 4096)
    device.unregister(array.ctypes.data)
    with pytest.raises(ValueError, match="nbytes is needed"):
        device.register(array.ctypes.data)
    with pytest.raises(ValueError, match="nbytes is 65537, but ptr is a tensor of 65536 bytes"):
        device.register(array, (1 << 16) + 1)


def test_stats(device: kvswap.Device) -> None:
    before = device.stats()
    swap(cache(), cache(), [1, 2, 5], [1, 2, 5]).wait(LIMIT)
    after = device.stats()
    assert after["submitted"] - before["submitted"] == after["done"] - before["done"] == 1
    assert after["bytes_d2h"] - before["bytes_d2h"] == 3 * NBYTES
    assert all(type(value) is int for name, value in after.items() if name != "paths")


# -- failure ---------------------------------------------------------------------------------------------------------


def test_a_refused_copy_is_a_failed_block() -> None:
    device = kvswap.Device("host:2")
    bindings.set_fault(device, "copy", "fail", nth=2, code=7)
    try:
        transfer = swap(cache(), cache(), [1, 5, 9], [1, 5, 9], device=device, path="dma")
        with pytest.raises(kvswap.DeviceError) as caught:
            transfer.wait(LIMIT)
        assert caught.value.code == 7 and isinstance(caught.value, kvswap.Error)
        assert transfer.done() and transfer.state == "failed"
        assert type(transfer.error) is kvswap.DeviceError and transfer.error.code == 7
        assert transfer.failed_positions.tolist() == [1]
        assert "failed" in repr(transfer)
        with pytest.raises(kvswap.DeviceError):
            bindings.set_fault(device, "copy", "fail", code=7)
            args = (cache(), cache(), NBYTES, BLOCKS, BLOCKS, [1], [1], 1)
            kvswap.swap_cache_per_layer(*args, device=device, path="dma")
    finally:
        bindings.set_fault(device, "copy", "none")


def test_a_full_lane_is_said() -> None:
    device = kvswap.Device("host:3")
    bindings.set_lane_depth(device, 2)
    stream = kvswap.Stream(device)
    held = Torchlike(cache())
    with Gate(device) as gate:
        gate.hold(stream)
        transfers = [swap(held, cache(), device=device, stream=stream) for _ in range(2)]
        count = sys.getrefcount(held)
        with pytest.raises(kvswap.QueueFull):
            swap(held, cache(), device=device, stream=stream)
        assert sys.getrefcount(held) == count
    for transfer in transfers:
        transfer.wait(LIMIT)
    swap(held, cache(), device=device, stream=stream).wait(LIMIT)


def test_a_lost_device_is_said() -> None:
    device = bindings.deterministic_device(11)
    bindings.set_fault(device, "call", "lose", code=700)
    with pytest.raises(kvswap.DeviceError) as caught:
        swap(cache(), cache(), device=device).wait(LIMIT)
    assert caught.value.code == 700
    assert device.lost and "lost" in repr(device)


def test_errors_are_named_and_have_their_attributes() -> None:
    assert kvswap.Error.__module__ == kvswap.DeviceError.__module__ == "kvswap"
    assert issubclass(kvswap.QueueFull, kvswap.Error) and issubclass(kvswap.DeviceError, kvswap.Error)
    assert (kvswap.DeviceError().code, kvswap.DeviceError().operation) == (0, None)
    with pytest.raises(kvswap.DeviceError) as caught:
        bindings.seam(kvswap.Device("host:0"), "event_destroy", 987654321)
    assert caught.value.code == 400 and isinstance(caught.value.operation, str)


# -- the seam, patterns, determinism ---------------------------------------------------------------------------------


def test_the_seam(device: kvswap.Device) -> None:
    def seam(operation: str, *args: Any) -> Any:
        return bindings.seam(device, operation, *args)

    ptr, host = seam("alloc", 4096), seam("host_alloc", 4096)
    stream = seam("stream_create", -5)
    first, last = seam("event_create", True), seam("event_create", 1)
    assert seam("check") is None and seam("synchronize") is None
    region = seam("pointer_query", ptr + 5)
    assert region["base"] == ptr and region["nbytes"] >= 4096 and region["memory"] == "device"
    seam("event_record", first, stream)
    seam("fill", ptr, 0x01020304, 1024, stream)
    seam("copy", host, ptr, 100, stream)
    seam("copy_batch", [host + 100, host + 200], [ptr, ptr], [100, 100], stream)
    seam("copy_rect", host + 300, ptr, 100, 200, 1, 1, 50, 3, 1, stream)
    seam("write32", ptr, 99, stream)
    seam("wait32", ptr, 99, stream)
    pieces = np.array([[host + 1000, ptr, 8], [host + 1008, ptr, 8]], np.uint64)
    seam("launch_copy", 2, pieces.ctypes.data, 1, 32, stream)
    seam("event_record", last, stream)
    seam("stream_wait", stream, last)
    seam("synchronize")
    assert seam("stream_query", stream) is True and seam("event_query", last) is True
    assert seam("event_elapsed", first, last) >= 0
    assert seam("stream_info", stream)[1] is False
    text = ctypes.string_at(host, 1016)
    assert text[:300] == b"\4\3\2\1" * 75 and text[1000:1016] == b"c\0\0\0\4\3\2\1" * 2
    with pytest.raises(ValueError, match="no member of the seam"):
        seam("nothing")
    with pytest.raises(TypeError, match="copy takes 4 numbers"):
        seam("copy", 1)
    for name, handle in (("event_destroy", first), ("event_destroy", last), ("stream_destroy", stream)):
        seam(name, handle)
    seam("free", ptr)
    seam("host_free", host)


def test_patterns(device: kvswap.Device, stream: kvswap.Stream) -> None:
    memory = np.zeros((2, 100), np.uint8)
    ptrs = np.array([row.ctypes.data for row in memory], np.uint64)
    lists = ptrs, np.array([100, 77]), np.array([3, 2**64 - 1], np.uint64)
    assert _C._pattern(device, False, *lists, stream).result(LIMIT) == (0, None, None)
    words = b"".join(bindings.pattern_word(3, i).to_bytes(8, "little") for i in range(13))
    assert memory[0].tobytes() == words[:100]
    assert not memory[1][77:].any()
    job = _C._pattern(device, True, *lists, stream)
    assert job.result() == (0, None, None) and job.done()
    memory[1][5] ^= 1
    memory[1][70] ^= 1
    assert _C._pattern(device, True, *lists, stream).result(LIMIT) == (2, 1, 5)
    with pytest.raises(ValueError, match="nbytes has 1 items, but ptrs has 2"):
        _C._pattern(device, True, ptrs, np.array([1]), lists[2], stream)


def test_deterministic_devices() -> None:
    def run(seed: int) -> int:
        device = bindings.deterministic_device(seed)
        gpu, cpu = cache(), cache(2)
        transfers = [swap(gpu, cpu, [i], [i], device=device, path="dma") for i in range(8)]
        while bindings.host_step(device, 1):
            pass
        assert all(t.done() for t in transfers) and (gpu[:8] == cpu[:8]).all()
        return bindings.host_trace(device)

    assert isinstance(run(5), int)
    with pytest.raises(ValueError, match="not deterministic"):
        bindings.host_step(kvswap.Device("host:0"), 1)
    with pytest.raises(ValueError, match="seed must not be 0"):
        bindings.deterministic_device(0)


def test_a_capturing_stream_is_refused(device: kvswap.Device) -> None:
    stream = kvswap.Stream(device)
    bindings.host_capture(device, stream, True)
    with pytest.raises(kvswap.Error, match="captur"):
        swap(cache(), cache(), stream=stream)
    bindings.host_capture(device, stream, False)
    swap(cache(), cache(), stream=stream).wait(LIMIT)


# -- the surface -----------------------------------------------------------------------------------------------------


def _functions() -> list[Any]:
    types = [kvswap.Device, kvswap.Memory, kvswap.Stream, kvswap.Event, kvswap.Transfer]
    found = [getattr(kvswap, name) for name in kvswap.__all__ if callable(getattr(kvswap, name))]
    for type_ in types:
        members = [getattr(type_, name) for name in dir(type_) if not name.startswith("_")]
        found += [member for member in members if callable(member)]
    return [f for f in found if not (isinstance(f, type) and f in (kvswap.Memory, kvswap.Transfer))]


@pytest.mark.parametrize("function", _functions(), ids=lambda f: f.__name__)
def test_everything_public_is_described(function: Any) -> None:
    assert function.__doc__
    if not (isinstance(function, type) and issubclass(function, Exception)):
        inspect.signature(function)


def test_signatures() -> None:
    common = "stream=None, after=(), device=None, path='auto', priority=None, max_ctas=None, pace_gbps=None"
    layered = ", layer_events=False, after_layers=None"
    assert str(inspect.signature(kvswap.swap_blocks_batch)) == f"(src_ptrs, dst_ptrs, sizes, *, {common})"
    for s, function, more in (
        ("", kvswap.swap_cache_per_layer, ""),
        ("s", kvswap.swap_cache_all_layers, ""),
        ("s", kvswap.swap_cache_all_layers_async, layered),
    ):
        assert str(inspect.signature(function)) == (
            f"(gpu_ptr{s}, cpu_ptr{s}, block_nbytes, num_gpu_blocks, num_cpu_blocks, gpu_block_ids, cpu_block_ids, "
            f"direction, *, gpu_stride=None, cpu_stride=None, {common}{more})"
        )
    assert str(inspect.signature(kvswap.Device)) == "(name=None)"
    assert str(inspect.signature(kvswap.Transfer.wait)) == "(self, /, timeout=None)"


def test_reprs(device: kvswap.Device, busy: kvswap.Stream, gate: Gate) -> None:
    transfer = swap(cache(), cache(), [1, 2], [1, 2], stream=busy)
    assert repr(transfer) == "<kvswap.Transfer D2H 2 blocks, 512 B, running on host:0>"
    gate.open()
    transfer.wait(LIMIT)
    assert repr(transfer) == "<kvswap.Transfer D2H 2 blocks, 512 B, done on host:0>"
    assert repr(busy) == f"<kvswap.Stream {busy.handle:#x} on host:0>"
    assert repr(device).startswith("<kvswap.Device host:0 ")
    assert repr(device.alloc(3 << 19)).startswith("<kvswap.Memory 1.5 MiB at 0x")
    assert "of a transfer" in repr(transfer.event)


def test_directions() -> None:
    assert (kvswap.Direction.D2H, kvswap.Direction.H2D) == (0, 1)


def test_headers_are_found() -> None:
    for name in ("kvswap.h", "kvswap_pool.h", "kvswap_offload.h", "kvswap_status.h"):
        assert os.path.isfile(os.path.join(kvswap.get_include(), name))


def test_importing_starts_nothing() -> None:
    program = """
        import os, numpy
        before = len(os.listdir("/proc/self/task"))
        import kvswap
        assert len(os.listdir("/proc/self/task")) == before
        assert "libcuda" not in open("/proc/self/maps").read()
    """
    _run(program)


def test_many_threads_at_once(device: kvswap.Device) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            stream = kvswap.Stream(device)
            for i in range(50):
                gpu, cpu = cache(seed), cache(seed + 1)
                swap(gpu, cpu, [i % BLOCKS], [3], stream=stream).wait(LIMIT)
                assert (cpu[3] == gpu[i % BLOCKS]).all()
                device.stats()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def required(call: Any) -> list[str]:
    parameters = inspect.signature(call).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def test_calls_that_lack_an_argument(device: kvswap.Device) -> None:
    """Every function, and every method of what is easily made: the first argument that lacks is named."""
    gpu, cpu = cache(1), cache(2)
    memory = device.alloc(4096)
    made = [device, kvswap.Stream(device), kvswap.Event(device), swap(gpu, cpu, [1], [2]), memory]
    made += [kvswap.Pool(device, memory, 4, 1024), HostPool(4, 4096, device=device)]
    calls = [value for value in vars(_C).values() if callable(value) and not isinstance(value, type)]
    calls.remove(_C._seam)  # its arguments are those of the member that it names
    for thing in made:
        methods = [name for name in dir(thing) if name[0] != "_" and callable(getattr(type(thing), name))]
        calls += [getattr(thing, name) for name in methods]
    assert len(calls) > 80
    for call in calls:
        names = required(call)
        for count, name in enumerate(names):
            with pytest.raises(TypeError, match=rf"missing required argument .*{name}|{name}.*pos|exactly"):
                call(*[None] * count)
    made[-1].close()


@pytest.mark.parametrize(
    "name", ["abcd", "abcd:0", "hosts:0", "hostile", "hos:0", "cudas:0", "cud:0", "host:", "host:-1", "host:4096"]
)
def test_names_that_are_no_devices(name: str) -> None:
    with pytest.raises(ValueError, match="is not known"):
        kvswap.Device(name)


def test_data_ptr_may_be_of_the_object_itself() -> None:
    """A number or a function that no class has, as adapters make them."""
    gpu, cpu = cache(1), cache(2)
    for value in (gpu.ctypes.data, lambda: gpu.ctypes.data):
        cpu[3] = 0
        swap(types.SimpleNamespace(data_ptr=value), cpu, [1], [3]).wait(LIMIT)
        assert (cpu[3] == gpu[1]).all()
