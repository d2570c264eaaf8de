"""Likely mistakes of a first user: what is meant clearly is accepted, and of the rest the message says what was wrong,
which item, and what to do."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from conftest import PATIENCE, run_python

import kvswap
from kvswap import _C, fastdeploy, offload
from kvswap.files import FileStore, Layout, MissingKey

pytestmark = pytest.mark.not_sanitized("Python only")

BLOCKS, NBYTES = 8, 64
HOST = "host:77"


class Cache:
    """Two layers on each side, and a swap of blocks 0 to 3 by swap_cache_all_layers or swap_cache_per_layer."""

    def __init__(self) -> None:
        self.gpu = [np.full((BLOCKS, NBYTES), 1 + layer, np.uint8) for layer in range(2)]
        self.cpu = [np.zeros((BLOCKS, NBYTES), np.uint8) for _ in range(2)]

    COMMON: ClassVar[dict[str, Any]] = {
        "block_nbytes": NBYTES,
        "num_gpu_blocks": BLOCKS,
        "num_cpu_blocks": BLOCKS,
        "gpu_block_ids": range(4),
        "cpu_block_ids": range(4),
        "direction": 0,
        "device": HOST,
    }

    def all_layers(self, **change: Any) -> None:
        kvswap.swap_cache_all_layers(**{"gpu_ptrs": self.gpu, "cpu_ptrs": self.cpu, **self.COMMON, **change})

    def per_layer(self, **change: Any) -> None:
        kvswap.swap_cache_per_layer(**{"gpu_ptr": self.gpu[0], "cpu_ptr": self.cpu[0], **self.COMMON, **change})


@pytest.fixture
def cache() -> Cache:
    return Cache()


# -- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(BLOCKS, NBYTES), (BLOCKS * NBYTES,), ()])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16])
def test_one_tensor_where_a_list_is_wanted(cache: Cache, shape: tuple[int, ...], dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"gpu_ptrs is one tensor \(.*shape .*\): must be a list of tensors") as caught:
        cache.all_layers(gpu_ptrs=np.zeros(shape, dtype))
    assert f"({np.dtype(dtype)}, shape {shape})" in str(caught.value)
    with pytest.raises(TypeError, match="src_ptrs is one tensor"):
        kvswap.swap_blocks_batch(np.zeros(shape, dtype), [0], 64, device=HOST)


class Unconvertible:
    """A tensor on a GPU, or of a type that NumPy lacks: its __array__ raises."""

    shape = (2, 8)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("Got unsupported ScalarType BFloat16")


def test_one_tensor_that_numpy_cannot_read(cache: Cache) -> None:
    with pytest.raises(TypeError, match=r"cpu_ptrs is one tensor \(.*Unconvertible.*, shape \(2, 8\)\)"):
        cache.all_layers(cpu_ptrs=Unconvertible())


@pytest.mark.parametrize("value", [0, 5, -3, 1 << 60])
def test_contents_of_a_tensor_read_as_addresses(cache: Cache, value: int) -> None:
    contents = np.full(2, cache.gpu[0].ctypes.data)
    contents[1] = value
    with pytest.raises(ValueError, match=rf"\(gpu_ptrs\[1\] is {value}, which is no address: .* pass \[tensor\]\)$"):
        cache.all_layers(gpu_ptrs=contents)
    with pytest.raises(ValueError, match=rf"\(dst_ptrs\[1\] is {value}, which is no address"):
        kvswap.swap_blocks_batch(contents[:1].repeat(2), contents, 4, device=HOST)


def test_an_error_that_is_not_of_the_addresses_stays(cache: Cache) -> None:
    """Addresses in an array are right here; what is wrong is something else."""
    addresses = np.array([array.ctypes.data for array in cache.gpu])
    cache.all_layers(gpu_ptrs=addresses)
    with pytest.raises(ValueError, match="are both 1: two blocks would be written"):
        cache.all_layers(gpu_ptrs=addresses, gpu_block_ids=[0, 1], cpu_block_ids=[1, 1])


def test_several_tensors_where_one_is_wanted(cache: Cache) -> None:
    with pytest.raises(TypeError, match=r"gpu_ptr must be an address or a tensor .* not list: this argument takes one"):
        cache.per_layer(gpu_ptr=cache.gpu)
    with pytest.raises(TypeError, match=r"src_ptrs must be a list .* not int: pass \[x\] for one"):
        kvswap.swap_blocks_batch(cache.gpu[0].ctypes.data, [0], 64, device=HOST)


@pytest.mark.parametrize("kind", ["array", "torch", "buffer", "interface"])
def test_not_contiguous(cache: Cache, kind: str) -> None:
    strided = np.zeros((BLOCKS, 2 * NBYTES), np.uint8)[:, :NBYTES]
    given: Any = {
        "array": strided,
        "torch": types.SimpleNamespace(
            data_ptr=lambda: strided.ctypes.data, is_contiguous=lambda: False, shape=strided.shape
        ),
        "buffer": memoryview(strided),
        "interface": types.SimpleNamespace(__array_interface__=strided.__array_interface__, shape=strided.shape),
    }[kind]
    message = r"is not contiguous \(shape \(8, 64\)\): to use its memory in place pass its address, data_ptr\(\)"
    with pytest.raises(ValueError, match=rf"gpu_ptr {message}"):
        cache.per_layer(gpu_ptr=given)
    with pytest.raises(ValueError, match=rf"gpu_ptrs\[1\] {message}"):
        cache.all_layers(gpu_ptrs=[cache.gpu[0], given])
    strided[:] = 9
    cache.per_layer(gpu_ptr=strided.ctypes.data, gpu_stride=2 * NBYTES)  # what the message says to do
    assert (cache.cpu[0][:4] == 9).all() and not cache.cpu[0][4:].any()


class Meta:
    """A tensor on torch's meta device."""

    device = "meta"
    nbytes = BLOCKS * NBYTES

    def data_ptr(self) -> int:
        return 0

    def is_contiguous(self) -> bool:
        return True


def test_meta_tensors(cache: Cache) -> None:
    with pytest.raises(ValueError, match=r"gpu_ptr is a tensor without memory \(Meta on device meta, address 0\)"):
        cache.per_layer(gpu_ptr=Meta())
    with pytest.raises(ValueError, match=r"cpu_ptrs\[1\] is a tensor without memory .*: allocate it on a real device"):
        cache.all_layers(cpu_ptrs=[cache.cpu[0], Meta()])


def test_a_tensor_without_one_address(cache: Cache) -> None:
    def data_ptr() -> int:
        raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")

    sparse = types.SimpleNamespace(data_ptr=data_ptr)
    with pytest.raises(ValueError, match=r"gpu_ptr is a .* without one address \(Cannot .*\): must be a dense tensor"):
        cache.per_layer(gpu_ptr=sparse)


def test_block_bytes_given_in_elements_or_a_wrong_number_of_blocks(cache: Cache) -> None:
    with pytest.raises(ValueError, match=r"a block .* has 128 bytes: is block_nbytes in elements, or .* not 8"):
        cache.per_layer(num_gpu_blocks=BLOCKS // 2)
    with pytest.raises(TypeError, match=r"block_nbytes must be an int, not float \(64.0\): pass int\(x\), or"):
        cache.per_layer(block_nbytes=NBYTES * 2 / 2)


# -- ids and plain values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint64, np.uint32, np.uint16, np.uint8, np.int16, np.int8])
def test_ids_of_any_integers(cache: Cache, dtype: Any) -> None:
    cache.per_layer(gpu_block_ids=np.array([5, 2], dtype), cpu_block_ids=np.array([7, 0], dtype))
    assert cache.cpu[0].any(axis=1).nonzero()[0].tolist() == [0, 7]
    with pytest.raises(IndexError, match=r"gpu_block_ids\[1\] is 100; that side has 8 blocks"):
        cache.per_layer(gpu_block_ids=np.array([5, 100], dtype), cpu_block_ids=[1, 2])
    cache.per_layer(gpu_block_ids=np.array([5, 0, 2, 0], dtype)[::2], cpu_block_ids=[1, 2])


@pytest.mark.parametrize("value", [1 << 63, (1 << 64) - 1])
def test_uint64_ids_that_do_not_fit(cache: Cache, value: int) -> None:
    with pytest.raises(IndexError, match=rf"gpu_block_ids\[2\] is {value}: a block id is below 2\*\*63"):
        cache.per_layer(gpu_block_ids=np.array([0, 1, value], np.uint64), cpu_block_ids=[0, 1, 2])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.zeros(4, bool), r"int32 or int64, not bool: of a mask pass numpy.flatnonzero\(mask\)"),
        (np.zeros(4), r"int32 or int64, not float64: convert it, x.astype\(numpy.int64\)"),
        (3, r"a sequence of ints, not int: pass \[x\] for one"),
        ({0, 1, 2, 3}, "not set: pass lists, whose items pair up by position"),
        ({0: 1}, "not dict: pass lists, whose items pair up by position"),
        (np.zeros((2, 2), int), r"one-dimensional, not 2-D: pass x.reshape\(-1\), or of pairs one column each"),
        (Unconvertible(), r"that the host cannot read \(Got unsupported .*\): pass a copy in host memory, ids.cpu\(\)"),
    ],
    ids=["mask", "floats", "number", "set", "mapping", "pairs", "unreadable"],
)
def test_ids_that_are_none(cache: Cache, ids: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"gpu_block_ids .*{message}"):
        cache.per_layer(gpu_block_ids=ids)


@pytest.mark.parametrize("name", ["D2H", "d2h", "D2h", kvswap.Direction.D2H, np.int8(0)])
def test_direction_as_a_user_writes_it(cache: Cache, name: Any) -> None:
    cache.all_layers(direction=name)
    assert cache.cpu[1][:4].tolist() == cache.gpu[1][:4].tolist()
    up = {"D2H": "H2D", "d2h": "h2d"}.get(name, 1)
    cache.cpu[0][:] = 7
    cache.all_layers(direction=up)
    assert (cache.gpu[0][:4] == 7).all()


@pytest.mark.parametrize("value", [2, -1, True, None, "", "D2D", "D2H ", "\udc80", 0.0, 1 << 70, ["D2H"]])
def test_no_direction(cache: Cache, value: Any) -> None:
    with pytest.raises(ValueError, match=r'direction is .*: must be 0 \("D2H", GPU to host\) or 1 \("H2D"'):
        cache.per_layer(direction=value)
    assert not cache.cpu[0].any()


def test_mistyped_words(cache: Cache) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'strem': did you mean 'stream'"):
        cache.per_layer(strem=None)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'x': it takes \['gpu_ptr', .*'device'\]"):
        cache.per_layer(x=None)
    with pytest.raises(TypeError, match="priority must be a str, one of 'normal', 'high', 'background', not int"):
        cache.per_layer(priority=1)


# -- devices ----------------------------------------------------------------------------------------------------------


def torch_device(type: Any, index: Any = None) -> Any:
    """What torch.device has."""
    return types.SimpleNamespace(type=type, index=index)


def test_the_cpu_is_a_host_device(cache: Cache) -> None:
    assert kvswap.Device("cpu").name == kvswap.Device(torch_device("cpu")).name == "host:0"
    assert kvswap.Device("cpu:78").name == kvswap.Device(torch_device("cpu", 78)).name == "host:78"
    cache.all_layers(device=torch_device("cpu"))
    assert kvswap.Device(kvswap.Device(HOST)) == kvswap.Device(HOST)
    assert kvswap.Pool(torch_device("cpu", 78), cache.gpu[0], BLOCKS, NBYTES).device.name == "host:78"


@pytest.mark.parametrize("device", [4094, np.int64(4094), torch_device("cuda", 4094)])
def test_a_number_is_that_of_a_gpu(cache: Cache, device: Any) -> None:
    """There is no such GPU: the same is said of the number as of the name."""
    with pytest.raises(kvswap.Error) as named:
        kvswap.Device("cuda:4094")
    with pytest.raises(kvswap.Error) as numbered:
        cache.all_layers(device=device)
    assert str(numbered.value) == str(named.value)
    with pytest.raises(ValueError, match="device is -1: must not be negative"):
        kvswap.Device(-1)
    with pytest.raises(ValueError, match=f"device is {1 << 40}: must be the number of a GPU"):
        kvswap.Device(1 << 40)


def test_a_number_is_a_gpu_where_python_takes_devices() -> None:
    """0 is a device, and not "no device"."""
    array = np.zeros((8, 64), np.uint8)
    with pytest.raises(kvswap.Error) as named:
        kvswap.Device("cuda:4094")
    for call in (
        lambda device: offload.SingleDirectionOffloadingHandler([array], [array.copy()], 1, [[]], True, device=device),
        lambda device: fastdeploy.ops.current_device(device),
        lambda device: fastdeploy.ops.device_of(0, device),
    ):
        with pytest.raises(kvswap.Error) as numbered:
            call(4094)
        assert str(numbered.value) == str(named.value)
        if _C._cuda_count()[0] == 0:
            with pytest.raises(kvswap.Error, match=r"there is no CUDA driver|finds none"):
                call(0)


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], int]], None]]:
    def install(current_device: Callable[[], int]) -> None:
        torch = types.ModuleType("torch")
        torch.cuda = types.SimpleNamespace(current_device=current_device)
        monkeypatch.setitem(sys.modules, "torch", torch)

    yield install


def test_cuda_alone_is_the_current_device_of_torch(fake_torch: Callable[[Callable[[], int]], None]) -> None:
    asked = []
    fake_torch(lambda: asked.append(1) or 4093)
    with pytest.raises(kvswap.Error) as named:
        kvswap.Device("cuda:4093")
    with pytest.raises(kvswap.Error) as current:
        kvswap.Device(torch_device("cuda"))
    assert asked and str(current.value) == str(named.value)


def test_a_torch_without_cuda(fake_torch: Callable[[Callable[[], int]], None]) -> None:
    def fails() -> int:
        raise AssertionError("Torch not compiled with CUDA enabled")

    fake_torch(fails)
    try:
        expected = kvswap.Device("cuda").name
    except kvswap.Error as error:
        with pytest.raises(kvswap.Error) as caught:
            kvswap.Device(torch_device("cuda"))
        assert str(caught.value) == str(error)
    else:
        assert kvswap.Device(torch_device("cuda")).name == expected


@pytest.mark.parametrize("name", ["gpu", "CUDA:0", "cuda:", "host:4096", "cpux", "cpu:", "xpu:0"])
def test_unknown_names_of_devices(name: str) -> None:
    with pytest.raises(ValueError, match=r"device '.*' is not known; devices are called cuda:0, .* and host:0 to"):
        kvswap.Device(name)
    with pytest.raises(ValueError, match=r"device '.*' is not known"):
        kvswap.Device(torch_device("meta"))


@pytest.mark.parametrize("device", [True, 1.5, ["cuda:0"], object(), torch_device(3), np.zeros(2)])
def test_no_device(device: Any) -> None:
    with pytest.raises(TypeError, match=r"device must be a Device, a name .*, the number of a GPU, a torch.device"):
        kvswap.Device(device)


# -- the file tier ----------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path, Layout(NBYTES), capacity=1 << 20) as store:
        yield store


def test_a_store_without_a_layout(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"layout must be a kvswap.files.Layout, not int: pass Layout\(65536, model"):
        FileStore(tmp_path, 65536, capacity=1 << 20)
    with pytest.raises(TypeError, match=r"layout must be a kvswap.files.Layout, not str: pass Layout\(nbytes, model"):
        FileStore(tmp_path, "llama", capacity=1 << 20)
    with pytest.raises(TypeError, match="capacity is needed: bytes that the files may take, 500 << 30 for 500 GiB"):
        FileStore(tmp_path, Layout(64))


def test_a_missing_key_is_a_key_error(store: FileStore) -> None:
    block = np.zeros((1, NBYTES), np.uint8)
    with pytest.raises(KeyError, match=r"^block 0 is not in the store$") as caught:
        store.load([b"no"], [block]).wait(PATIENCE)
    assert type(caught.value) is MissingKey and isinstance(caught.value, kvswap.Error)
    assert str(caught.value) == caught.value.args[0]  # a bare KeyError quotes its message
    load = store.load([b"no"], [block])
    with pytest.raises(MissingKey):
        load.wait(PATIENCE)
    assert isinstance(load.reasons[0], KeyError) and isinstance(load.error, KeyError)
    with pytest.raises(KeyError, match=r"keys\[1\] is not in the store"):
        store.store([b"yes"], [block]).wait(PATIENCE)
        store.pin([b"yes", b"no"])


def test_no_store_is_no_missing_key(tmp_path: Path) -> None:
    with pytest.raises(kvswap.Error, match="is no store") as caught:
        FileStore(tmp_path, Layout(NBYTES), readonly=True)
    assert not isinstance(caught.value, KeyError)


def test_keys_and_blocks_of_a_store(store: FileStore) -> None:
    blocks = np.zeros((2, NBYTES), np.uint8)
    with pytest.raises(TypeError, match=r"keys\[0\] must be bytes .*, not str: encode it, key.encode\(\)"):
        store.store(["a"], [blocks[0]])
    with pytest.raises(TypeError, match=r"keys\[1\] must be bytes .*, not int: pass key.to_bytes\(8, 'little'\)"):
        store.store([b"a", 1], list(blocks))
    with pytest.raises(TypeError, match=r"blocks is one tensor \(numpy.ndarray\): name its blocks in ids"):
        store.store([b"a", b"b"], blocks)
    store.store([b"a", b"b"], blocks, [0, 1]).wait(PATIENCE)
    store.store([b"a", b"b"], list(blocks)).wait(PATIENCE)
    store.store([b"a", b"b"], np.array([row.ctypes.data for row in blocks])).wait(PATIENCE)


# -- torch itself -----------------------------------------------------------------------------------------------------


def test_with_torch(cache: Cache) -> None:
    """The same with torch's own objects. .ci/run installs torch for it; the tests above have stand-ins."""
    torch = pytest.importorskip("torch", reason="needs torch; .ci/run runs this test with it")
    tensor = torch.zeros(BLOCKS, NBYTES, dtype=torch.uint8)
    cache.all_layers(gpu_ptrs=[tensor, tensor.clone()], device=torch.device("cpu"), direction="D2H")
    with pytest.raises(TypeError, match=r"gpu_ptrs is one tensor \(uint8, shape \(8, 64\)\)"):
        cache.all_layers(gpu_ptrs=tensor)
    with pytest.raises(TypeError, match=r"gpu_ptrs is one tensor \(.*Tensor.*, shape torch.Size"):
        cache.all_layers(gpu_ptrs=tensor.to(torch.bfloat16))
    with pytest.raises(ValueError, match=r"gpu_ptrs\[0\] is 0, which is no address"):
        cache.all_layers(gpu_ptrs=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="is a tensor without memory"):
        cache.per_layer(gpu_ptr=tensor.to("meta"))
    with pytest.raises(ValueError, match="is not contiguous"):
        cache.per_layer(gpu_ptr=tensor.t())
    with pytest.raises(ValueError, match="without one address"):
        cache.per_layer(gpu_ptr=tensor.to_sparse())
    with pytest.raises(TypeError, match="that the host cannot read"):
        cache.per_layer(gpu_block_ids=torch.arange(4, device="meta"))
    with pytest.raises(ValueError, match="device 'meta' is not known"):
        kvswap.Device(torch.device("meta"))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("HostPool", "'HostPool': it is kvswap.memory.HostPool"),
        ("FileStore", "'FileStore': it is kvswap.files.FileStore"),
        ("trtllm", "'trtllm': import kvswap.trtllm first"),
        ("swap_block_batch", "module 'kvswap' has no attribute 'swap_block_batch'"),
    ],
)
def test_names_that_are_elsewhere(name: str, hint: str) -> None:
    """In another process, in which no test has imported a module."""
    code = f"import kvswap\ntry:\n    kvswap.{name}\nexcept AttributeError as error:\n    print(error)"
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(hint)


def test_each_name_that_is_said_to_be_elsewhere_is_there() -> None:
    source = inspect.getsource(kvswap)
    for names, module in re.findall(r'name in \(([^)]*)\):\n *hint = f": it is (kvswap\.\w+)\.', source):
        for name in re.findall(r'"(\w+)"', names):
            assert name in importlib.import_module(module).__all__
    assert "it is kvswap.memory." in source
