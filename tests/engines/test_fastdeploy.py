"""FastDeploy's swap ops (kvswap.fastdeploy.ops): bytes against NumPy, what is refused, on which stream they run."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import ctypes
import gc
import math
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Buffer, Bytes, Gate, random_bytes, run_python, seam
from numpy.typing import NDArray

import kvswap
from kvswap import fastdeploy, testing

SHAPE = (40, 2, 8, 16)  # blocks, heads, tokens, size of a head
HOST_BLOCKS = 64
GPU_IDS, CPU_IDS = [0, 7, 8, 9, 39, 21, 3], [63, 10, 11, 12, 0, 5, 44]
DIRECTIONS = pytest.mark.parametrize("mode", [0, 1], ids=["d2h", "h2d"])


class Tensor:
    """A tensor of paddle's kind in a device's memory: what it can say is what torch's and paddle's can."""

    def __init__(self, device: kvswap.Device, shape: tuple[int, ...], itemsize: int = 2, seed: int = 1) -> None:
        self.shape, self.itemsize_ = list(shape), itemsize
        self.buffer = Buffer(device, math.prod(shape) * itemsize, "gpu")
        self.before = self.buffer.randomise(seed)

    def data_ptr(self) -> int:
        return self.buffer.ptr

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return self.itemsize_

    def is_contiguous(self) -> bool:
        return True

    @property
    def block_nbytes(self) -> int:
        return math.prod(self.shape[1:]) * self.itemsize_


class Layers:
    """Caches of a model, each with host memory of its own from cuda_host_alloc, and what both hold."""

    def __init__(self, device: kvswap.Device, shapes: list[tuple[int, ...]], itemsize: int = 2) -> None:
        self.device = device
        self.tensors = [Tensor(device, shape, itemsize, seed) for seed, shape in enumerate(shapes)]
        self.ptrs = [
            fastdeploy.cuda_host_alloc(HOST_BLOCKS * tensor.block_nbytes, device=device) for tensor in self.tensors
        ]
        self.before = [random_bytes(1000 + i, self.host(i).size) for i in range(len(shapes))]
        for i, data in enumerate(self.before):
            self.host(i)[:] = data

    def host(self, i: int) -> Bytes:
        nbytes = HOST_BLOCKS * self.tensors[i].block_nbytes
        return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(self.ptrs[i]), np.uint8)

    def check(self, gpu_ids: list[int], cpu_ids: list[int], mode: int) -> None:
        """One side is as it was, the other has those blocks and is otherwise as it was."""
        for i, tensor in enumerate(self.tensors):
            gpu = tensor.before.reshape(-1, tensor.block_nbytes).copy()
            cpu = self.before[i].reshape(-1, tensor.block_nbytes).copy()
            if mode == 0:
                cpu[cpu_ids] = gpu[gpu_ids]
            else:
                gpu[gpu_ids] = cpu[cpu_ids]
            np.testing.assert_array_equal(tensor.buffer.get(), gpu.reshape(-1))
            np.testing.assert_array_equal(self.host(i), cpu.reshape(-1))

    def check_untouched(self) -> None:
        self.check([], [], 0)

    def free(self) -> None:
        for ptr in self.ptrs:
            fastdeploy.cuda_host_free(ptr)


@pytest.fixture
def make(device: kvswap.Device) -> Iterator[Callable[..., Layers]]:
    made: list[Layers] = []

    def make(*shapes: tuple[int, ...], itemsize: int = 2) -> Layers:
        made.append(Layers(device, list(shapes), itemsize))
        return made[-1]

    yield make
    device.synchronize(PATIENCE)
    for layers in made:
        layers.free()


def per_layer(op: str, layers: Layers, gpu_ids: Any, cpu_ids: Any, mode: Any, **options: Any) -> Any:
    options.setdefault("device", layers.device)
    call = getattr(fastdeploy, op)
    return call(layers.tensors[0], layers.ptrs[0], HOST_BLOCKS, gpu_ids, cpu_ids, 0, mode, **options)


def all_layers(op: str, layers: Layers, gpu_ids: Any, cpu_ids: Any, mode: Any, **options: Any) -> Any:
    options.setdefault("device", layers.device)
    call = getattr(fastdeploy, op)
    return call(layers.tensors, layers.ptrs, HOST_BLOCKS, gpu_ids, cpu_ids, 0, mode, **options)


OPS: dict[str, Callable[..., Any]] = {
    "swap_cache": per_layer,
    "swap_cache_per_layer": per_layer,
    "swap_cache_per_layer_async": per_layer,
    "swap_cache_all_layers": all_layers,
    "swap_cache_all_layers_async": all_layers,
}


def swap(op: str, layers: Layers, gpu_ids: Any, cpu_ids: Any, mode: Any, **options: Any) -> None:
    transfer = OPS[op](op, layers, gpu_ids, cpu_ids, mode, **options)
    if op.endswith("_async"):
        transfer.wait(PATIENCE)
    else:
        assert transfer is None


# -- bytes ------------------------------------------------------------------------------------------------------------


@DIRECTIONS
@pytest.mark.parametrize("op", OPS)
def test_bytes(make: Callable[..., Layers], op: str, mode: int) -> None:
    layers = make(SHAPE)
    swap(op, layers, GPU_IDS, CPU_IDS, mode)
    layers.check(GPU_IDS, CPU_IDS, mode)


@DIRECTIONS
def test_many_layers_and_scales(make: Callable[..., Layers], mode: int) -> None:
    """Layers of another size, of scales (3-D), and an extra layer with another number of blocks."""
    layers = make(SHAPE, SHAPE, (40, 2, 8), (40, 4, 8, 16), (60, 2, 8, 16))
    swap("swap_cache_all_layers", layers, GPU_IDS, CPU_IDS, mode)
    layers.check(GPU_IDS, CPU_IDS, mode)


@DIRECTIONS
@pytest.mark.parametrize("ids", ["singles", "runs"])
@pytest.mark.parametrize(("shape", "itemsize"), [((40, 1, 3, 7), 1), ((40, 1, 1, 5), 2), ((40, 3, 11), 4), (SHAPE, 8)])
def test_any_block_size(
    make: Callable[..., Layers], shape: tuple[int, ...], itemsize: int, ids: str, mode: int
) -> None:
    """Blocks of 21, 10 and 132 bytes too, one by one and where neighbours are copied as one: no tail is dropped."""
    layers = make(shape, itemsize=itemsize)
    gpu_ids, cpu_ids = (GPU_IDS, CPU_IDS) if ids == "singles" else ([*range(5, 30)], [*range(20, 45)])
    swap("swap_cache_per_layer", layers, gpu_ids, cpu_ids, mode)
    layers.check(gpu_ids, cpu_ids, mode)


@DIRECTIONS
def test_kinds_of_ids(make: Callable[..., Layers], mode: int) -> None:
    for kind in (np.int32, np.int64, list, tuple):
        layers = make(SHAPE)
        gpu_ids, cpu_ids = ((np.array(ids, kind) if kind in (np.int32, np.int64) else kind(ids))  # type: ignore[operator]
                            for ids in (GPU_IDS, CPU_IDS))  # fmt: skip
        swap("swap_cache_all_layers", layers, gpu_ids, cpu_ids, mode)
        layers.check(GPU_IDS, CPU_IDS, mode)


@DIRECTIONS
@pytest.mark.parametrize("op", OPS)
def test_no_ids_do_nothing(make: Callable[..., Layers], op: str, mode: int) -> None:
    layers = make(SHAPE)
    swap(op, layers, [], [], mode)
    layers.check_untouched()


@DIRECTIONS
def test_no_values_do_nothing(make: Callable[..., Layers], mode: int) -> None:
    """A model that has keys only: an empty list, or no tensor and no address in each layer's place."""
    layers = make(SHAPE)
    for tensors, ptrs in (([], []), ([None, None], [0, 0])):
        assert (
            fastdeploy.swap_cache_all_layers(
                tensors, ptrs, HOST_BLOCKS, GPU_IDS, CPU_IDS, 0, mode, device=layers.device
            )
            is None
        )
        assert fastdeploy.swap_cache_layout(tensors[:0], layers.ptrs[0], [], GPU_IDS, CPU_IDS, 0, mode) is None
        with pytest.raises(IndexError, match=r"cpu_block_ids\[0\] is 99"):
            fastdeploy.swap_cache_all_layers(tensors, ptrs, HOST_BLOCKS, [0], [99], 0, mode, device=layers.device)
    layers.check_untouched()


def test_keyword_arguments(make: Callable[..., Layers]) -> None:
    layers = make(SHAPE)
    fastdeploy.swap_cache_all_layers(
        cache_gpu_tensors=layers.tensors,
        cache_cpu_ptrs=layers.ptrs,
        max_block_num_cpu=HOST_BLOCKS,
        swap_block_ids_gpu=GPU_IDS,
        swap_block_ids_cpu=CPU_IDS,
        rank=0,
        mode=0,
        device=layers.device,
    )
    layers.check(GPU_IDS, CPU_IDS, 0)


def test_arrays_of_numpy_on_rank_0_and_1() -> None:
    """Where there is no GPU, rank N is host:N, and whatever memory the process has serves."""
    if fastdeploy.ops.device_kind() != "host":
        pytest.skip("there is a GPU: rank is its number")
    for rank in (0, 1):
        cache: NDArray[np.float16] = np.arange(np.prod(SHAPE)).reshape(SHAPE).astype(np.float16)
        host = np.zeros((HOST_BLOCKS, *SHAPE[1:]), np.float16)
        fastdeploy.swap_cache(cache, host.ctypes.data, HOST_BLOCKS, GPU_IDS, CPU_IDS, rank, 0)
        np.testing.assert_array_equal(host[CPU_IDS], cache[GPU_IDS])
        transfer = fastdeploy.swap_cache_per_layer_async(
            cache, host.ctypes.data, HOST_BLOCKS, GPU_IDS, CPU_IDS, rank, 1
        )
        transfer.wait(PATIENCE)
        assert transfer.device.name == f"host:{rank}"


def test_rank_names_the_device(device_name: str, make: Callable[..., Layers]) -> None:
    if device_name != f"{fastdeploy.ops.device_kind()}:0":
        pytest.skip("rank 0 is another device")
    layers = make(SHAPE)
    swap("swap_cache_all_layers", layers, GPU_IDS, CPU_IDS, 0, device=None)
    layers.check(GPU_IDS, CPU_IDS, 0)


# -- block-first objects ----------------------------------------------------------------------------------------------


class Objects:
    """Layers and host objects of all of them: [objects, layers, heads, tokens, size]."""

    def __init__(self, layers: Layers, objects: int = 16) -> None:
        self.layers = layers
        tensor = layers.tensors[0]
        self.shape = (objects, len(layers.tensors), tensor.block_nbytes)
        self.ptr = fastdeploy.cuda_host_alloc(math.prod(self.shape), device=layers.device)
        self.before = random_bytes(77, math.prod(self.shape)).reshape(self.shape)
        self.view()[:] = self.before

    def view(self) -> Bytes:
        memory = (ctypes.c_uint8 * math.prod(self.shape)).from_address(self.ptr)
        return np.frombuffer(memory, np.uint8).reshape(self.shape)

    def swap(self, gpu_ids: Any, cpu_ids: Any, mode: Any, shape: Any = None) -> kvswap.Transfer:
        tensors = self.layers.tensors
        shape = tensors[0].shape if shape is None else shape
        return fastdeploy.swap_cache_layout_async(
            tensors, self.ptr, shape, gpu_ids, cpu_ids, 0, mode, device=self.layers.device
        )


@DIRECTIONS
@pytest.mark.parametrize("shape", [SHAPE, (40, 3, 7)], ids=["cache", "scales"])
def test_layout(make: Callable[..., Layers], shape: tuple[int, ...], mode: int) -> None:
    layers = make(shape, shape, shape)
    objects = Objects(layers)
    gpu_ids, cpu_ids = [39, 0, 8, 9], [2, 15, 0, 1]
    transfer = objects.swap(gpu_ids, cpu_ids, mode)
    transfer.wait(PATIENCE)
    assert transfer.nbytes == 3 * 4 * layers.tensors[0].block_nbytes  # one transfer for all layers
    expected = objects.before.copy()
    for i, tensor in enumerate(layers.tensors):
        gpu = tensor.before.reshape(-1, tensor.block_nbytes).copy()
        if mode == 0:
            expected[cpu_ids, i] = gpu[gpu_ids]
        else:
            gpu[gpu_ids] = expected[cpu_ids, i]
        np.testing.assert_array_equal(tensor.buffer.get(), gpu.reshape(-1))
    np.testing.assert_array_equal(objects.view(), expected)
    fastdeploy.cuda_host_free(objects.ptr)


def test_layout_refuses(make: Callable[..., Layers]) -> None:
    layers = make(SHAPE, SHAPE)
    objects = Objects(layers)
    for gpu_ids, cpu_ids, mode, shape, error, message in (
        ([0], [0], 2, None, ValueError, "direction is 2"),
        ([0, 1], [0], 0, None, ValueError, "cpu_block_ids has 1 items, but gpu_block_ids has 2"),
        ([40], [0], 0, None, IndexError, r"gpu_block_ids\[0\] is 40"),
        ([0], [-1], 0, None, IndexError, r"cpu_block_ids\[0\] is -1"),
        ([0], [0], 0, (40, 2, 8, 17), ValueError, r"cache_gpu_tensors\[0\] has shape .* cache_shape is"),
        ([0], [0], 0, (40,), ValueError, "3 or 4 extents"),
        ([0], [1 << 40], 0, None, ValueError, r"cache_cpu_ptrs|cpu_ptrs"),
    ):
        with pytest.raises(error, match=message):
            objects.swap(gpu_ids, cpu_ids, mode, shape)
    layers.check_untouched()
    np.testing.assert_array_equal(objects.view(), objects.before)
    assert objects.swap([], [], 0).wait(PATIENCE) is None
    fastdeploy.cuda_host_free(objects.ptr)


# -- what is refused --------------------------------------------------------------------------------------------------


@DIRECTIONS
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("gpu_ids", "cpu_ids", "error", "message"),
    [
        ([0, 1], [0], ValueError, "cpu_block_ids has 1 items, but gpu_block_ids has 2"),
        ([0], [0, 1], ValueError, "cpu_block_ids has 2 items, but gpu_block_ids has 1"),
        ([-1, 0], [0, 1], IndexError, r"gpu_block_ids\[0\] is -1"),
        ([40, 0], [0, 1], IndexError, r"gpu_block_ids\[0\] is 40"),
        ([0, 40], [0, 1], IndexError, r"gpu_block_ids\[1\] is 40"),
        ([0, -1], [0, 1], IndexError, r"gpu_block_ids\[1\] is -1"),
        ([0, 1], [-1, 0], IndexError, r"cpu_block_ids\[0\] is -1"),
        ([0, 1], [64, 0], IndexError, r"cpu_block_ids\[0\] is 64"),
        ([0, 1], [0, 64], IndexError, r"cpu_block_ids\[1\] is 64"),
        ([0, 1], [0, -1], IndexError, r"cpu_block_ids\[1\] is -1"),
        (7, [0], TypeError, "gpu_block_ids must be an int32 or int64 array or a sequence of ints"),
        ([0], "0", TypeError, "cpu_block_ids must be an int32 or int64 array or a sequence of ints"),
    ],
)
def test_ids_are_checked(
    make: Callable[..., Layers], op: str, mode: int, gpu_ids: Any, cpu_ids: Any, error: type[Exception], message: str
) -> None:
    layers = make(SHAPE)
    with pytest.raises(error, match=message):
        swap(op, layers, gpu_ids, cpu_ids, mode)
    layers.check_untouched()


@pytest.mark.parametrize("op", OPS)
def test_duplicate_destinations(make: Callable[..., Layers], op: str) -> None:
    """Of a source, many copies; a destination has one."""
    layers = make(SHAPE)
    with pytest.raises(ValueError, match=r"cpu_block_ids\[0\] and cpu_block_ids\[2\] are both 5"):
        swap(op, layers, [0, 1, 2], [5, 6, 5], 0)
    with pytest.raises(ValueError, match=r"gpu_block_ids\[0\] and gpu_block_ids\[1\] are both 3"):
        swap(op, layers, [3, 3], [5, 6], 1)
    layers.check_untouched()
    swap(op, layers, [3, 3], [5, 6], 0)
    layers.check([3, 3], [5, 6], 0)


@pytest.mark.parametrize("mode", [2, -1, True, None, "0", 0.5])
@pytest.mark.parametrize("op", OPS)
def test_modes_are_checked(make: Callable[..., Layers], op: str, mode: Any) -> None:
    layers = make(SHAPE)
    with pytest.raises(ValueError, match="direction is"):
        swap(op, layers, GPU_IDS, CPU_IDS, mode)
    layers.check_untouched()


class Strided(Tensor):
    def is_contiguous(self) -> bool:
        return False


@DIRECTIONS
def test_caches_are_checked(device: kvswap.Device, make: Callable[..., Layers], mode: int) -> None:
    layers = make(SHAPE)
    good = layers.tensors[0]
    strided = np.zeros(SHAPE, np.float16).transpose(1, 0, 2, 3)
    for tensor, error, message in (
        (Strided(device, SHAPE), ValueError, "not contiguous"),
        (strided, ValueError, "not contiguous"),
        (Tensor(device, (40, 4)), ValueError, r"has shape \[40, 4\]"),
        (Tensor(device, (40, 1, 1, 2, 2)), ValueError, r"has shape \[40, 1, 1, 2, 2\]"),
        (good.data_ptr(), TypeError, "must be a tensor with a shape, not int"),
    ):
        with pytest.raises(error, match=message):
            fastdeploy.swap_cache_per_layer(tensor, layers.ptrs[0], HOST_BLOCKS, [0], [0], 0, mode, device=device)
        with pytest.raises(error, match=message):
            fastdeploy.swap_cache_all_layers(
                [good, tensor], layers.ptrs * 2, HOST_BLOCKS, [0], [0], 0, mode, device=device
            )
    layers.check_untouched()


def test_lists_of_layers_are_checked(device: kvswap.Device, make: Callable[..., Layers]) -> None:
    layers = make(SHAPE, SHAPE)
    for tensors, ptrs, error, message in (
        (layers.tensors, layers.ptrs[:1], ValueError, "2 tensors and cache_cpu_ptrs has 1"),
        (layers.tensors[0], layers.ptrs, TypeError, "must be a list of tensors, not Tensor"),
        ([layers.tensors[0], None], layers.ptrs, ValueError, r"cache_gpu_tensors\[1\] is None"),
        (layers.tensors, [layers.ptrs[0], 0], ValueError, r"cache_cpu_ptrs\[1\] is 0"),
        (layers.tensors, [layers.ptrs[0], 1.5], TypeError, r"cache_cpu_ptrs\[1\] must be an int, not float"),
    ):
        with pytest.raises(error, match=message):
            fastdeploy.swap_cache_all_layers(tensors, ptrs, HOST_BLOCKS, [0], [0], 0, 0, device=device)
    with pytest.raises(ValueError, match="num_cpu_blocks is -1"):
        fastdeploy.swap_cache_all_layers(layers.tensors, layers.ptrs, -1, [0], [0], 0, 0, device=device)
    with pytest.raises(ValueError, match="rank is -1"):
        fastdeploy.swap_cache_all_layers(layers.tensors, layers.ptrs, HOST_BLOCKS, [0], [0], -1, 0)
    layers.check_untouched()


def test_a_copy_that_fails_is_told(device: kvswap.Device, make: Callable[..., Layers]) -> None:
    layers = make(SHAPE)
    with testing.fault(device, "copy", "fail", every=1), pytest.raises(kvswap.DeviceError):
        swap("swap_cache_all_layers", layers, GPU_IDS, CPU_IDS, 1)
    layers.check_untouched()


# -- streams ----------------------------------------------------------------------------------------------------------


class FakeCuPy(types.ModuleType):
    """As much of CuPy as says which stream is current: `with stream:` there sets it."""

    def __init__(self, handle: int) -> None:
        super().__init__("cupy")
        stream = types.SimpleNamespace(ptr=handle)
        self.cuda = types.SimpleNamespace(get_current_stream=lambda: stream)


class FakeTorch(types.ModuleType):
    """As much of torch as says which stream a device's kernels go to."""

    def __init__(self, stream: kvswap.Stream) -> None:
        super().__init__("torch")
        current = types.SimpleNamespace(cuda_stream=stream.handle)
        self.cuda = types.SimpleNamespace(current_stream=lambda device: current)


def as_torch(tensor: Tensor) -> Tensor:
    kind = type("Tensor", (Tensor,), {"__module__": "torch", "is_cuda": True, "device": "cuda:0"})
    tensor.__class__ = kind
    return tensor


def is_behind(gate: Gate, layers: Layers, seconds: float = 0.3, **options: Any) -> bool:
    """Whether a swap waits for the gate, for so long. If it does it is let go and its bytes are checked."""
    transfer = per_layer("swap_cache_per_layer_async", layers, GPU_IDS, CPU_IDS, 0, **options)
    try:
        transfer.wait(seconds)
        waited = False
    except TimeoutError:
        waited = True
        gate.open()
        transfer.wait(PATIENCE)
    layers.check(GPU_IDS, CPU_IDS, 0)
    return waited


def test_the_stream_that_is_given(device: kvswap.Device, make: Callable[..., Layers]) -> None:
    stream = kvswap.Stream(device)
    with Gate(device) as gate:
        gate.hold(stream)
        assert is_behind(gate, make(SHAPE), stream=stream)


def test_cupys_current_stream(
    device: kvswap.Device, make: Callable[..., Layers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one is set, the swap goes on it, and an event recorded there afterwards is reached when the bytes are."""
    stream = kvswap.Stream(device)
    monkeypatch.setitem(sys.modules, "cupy", FakeCuPy(stream.handle))
    layers = make(SHAPE)
    with Gate(device) as gate:
        gate.hold(stream)
        transfer = per_layer("swap_cache_per_layer_async", layers, GPU_IDS, CPU_IDS, 1)
        event = kvswap.Event(device)
        event.record(stream)
        assert not event.query() and not transfer.done()
        gate.open()
        event.synchronize(PATIENCE)
    layers.check(GPU_IDS, CPU_IDS, 1)


@pytest.mark.parametrize("cupy", [False, True])
def test_the_tensors_stream(
    device: kvswap.Device, make: Callable[..., Layers], monkeypatch: pytest.MonkeyPatch, cupy: bool
) -> None:
    """A swap starts after the kernels on the tensor's own stream, on CuPy's too: they write what it reads."""
    own, other = kvswap.Stream(device), kvswap.Stream(device)
    monkeypatch.setitem(sys.modules, "torch", FakeTorch(own))
    monkeypatch.setitem(sys.modules, "cupy", FakeCuPy(other.handle if cupy else 0))
    layers = make(SHAPE)
    as_torch(layers.tensors[0])
    with Gate(device) as gate:
        gate.hold(own)
        assert is_behind(gate, layers)
    layers = make(SHAPE)
    as_torch(layers.tensors[0])
    with Gate(device) as gate:  # who names a stream has made its order
        gate.hold(own)
        assert not is_behind(gate, layers, PATIENCE, stream=other)


# -- host memory ------------------------------------------------------------------------------------------------------


def test_host_memory(device: kvswap.Device) -> None:
    for flags in (0, 1, 2, 4, 7):
        ptr = fastdeploy.cuda_host_alloc(12345, flags, device=device)
        assert isinstance(ptr, int) and ptr % 256 == 0
        ctypes.memset(ptr, 7, 12345)
        assert ctypes.string_at(ptr, 12345) == b"\7" * 12345
        fastdeploy.cuda_host_free(ptr)


def test_host_memory_is_for_every_path(device: kvswap.Device, path: str) -> None:
    """It is pinned, a region that the device knows."""
    layers = Layers(device, [SHAPE])
    kvswap.swap_cache_per_layer(
        layers.tensors[0].data_ptr(),
        layers.ptrs[0],
        layers.tensors[0].block_nbytes,
        SHAPE[0],
        HOST_BLOCKS,
        GPU_IDS,
        CPU_IDS,
        1,
        device=device,
        path=path,
    )
    layers.check(GPU_IDS, CPU_IDS, 1)
    assert seam(device, "pointer_query", layers.ptrs[0])["memory"] == "pinned host"
    layers.free()


def test_host_memory_without_a_device() -> None:
    ptr = fastdeploy.cuda_host_alloc(4096)
    gc.collect()  # nobody but the module holds it
    ctypes.memset(ptr, 1, 4096)
    fastdeploy.cuda_host_free(ptr)


def test_host_memory_refuses(device: kvswap.Device) -> None:
    ptr = fastdeploy.cuda_host_alloc(64, device=device)
    with pytest.raises(ValueError, match="does not come from host_alloc"):
        fastdeploy.cuda_host_free(ptr + 1)
    fastdeploy.cuda_host_free(ptr)
    with pytest.raises(ValueError, match="or was given back already"):
        fastdeploy.cuda_host_free(ptr)
    for nbytes, flags, error in ((0, 0, ValueError), (-1, 0, ValueError), (64, 8, ValueError), (64, -1, ValueError),
                                 (1.5, 0, TypeError), (True, 0, TypeError)):  # fmt: skip
        with pytest.raises(error):
            fastdeploy.cuda_host_alloc(nbytes, flags, device=device)


def test_freeing_waits_for_the_swap(device: kvswap.Device, make: Callable[..., Layers]) -> None:
    """FastDeploy's clearing freed pinned memory that copies still used."""
    layers = make(SHAPE)
    block = layers.tensors[0].block_nbytes
    ptr = fastdeploy.cuda_host_alloc(HOST_BLOCKS * block, device=device)
    stream = kvswap.Stream(device)
    testing.delay(device, 0.2, stream)
    transfer = fastdeploy.swap_cache_per_layer_async(
        layers.tensors[0], ptr, HOST_BLOCKS, GPU_IDS, CPU_IDS, 0, 0, stream=stream, device=device
    )
    fastdeploy.cuda_host_free(ptr)
    assert transfer.done() and transfer.error is None


# -- the package ------------------------------------------------------------------------------------------------------


def test_importing_takes_nothing_optional() -> None:
    result = run_python(
        """
        import sys
        import kvswap, kvswap.fastdeploy, kvswap.cli
        kvswap.cli.build_parser()
        for name in ("zmq", "msgspec", "prometheus_client", "paddle", "torch", "cupy"):
            assert name not in sys.modules, name
        """
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("missing", ["zmq", "msgspec"])
def test_the_client_says_what_it_needs(missing: str) -> None:
    result = run_python(f"import sys; sys.modules[{missing!r}] = None; import kvswap.fastdeploy.client")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].endswith(f"the client needs {missing}: pip install 'kvswap[manager]'")


@pytest.mark.parametrize("op", ["swap_cache_per_layer", "swap_cache_all_layers", "swap_cache_layout"])
def test_ops_that_are_not_async_wait_for_room_in_a_full_lane(
    device: kvswap.Device, make: Callable[..., Layers], op: str
) -> None:
    layers, stream = make(SHAPE), kvswap.Stream(device)
    one = op == "swap_cache_per_layer"
    tensors = layers.tensors[0] if one else layers.tensors
    ptrs = layers.ptrs if op == "swap_cache_all_layers" else layers.ptrs[0]
    shape_or_blocks = list(SHAPE) if op == "swap_cache_layout" else HOST_BLOCKS
    arguments = (tensors, ptrs, shape_or_blocks, [7], [10], 0, 0)
    with ThreadPoolExecutor(1) as pool, Gate(device) as gate:
        gate.hold(stream)
        with pytest.raises(kvswap.QueueFull):
            for _ in range(129):
                per_layer("swap_cache_per_layer_async", layers, [3], [4], 0, stream=stream)
        future = pool.submit(getattr(fastdeploy, op), *arguments, stream=stream, device=device)
        assert wait([future], 0.3).not_done  # it neither raises nor returns
        gate.open()
        future.result(PATIENCE)
    layers.check([3, 7], [4, 10], 0)
