"""FastDeploy's segments between processes, and install() in a FastDeploy of stubs."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import copy
import itertools
import os
import struct
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, Buffer, random_bytes
from processes import Failed, Process

import kvswap
from kvswap import _C, fastdeploy
from kvswap.fastdeploy import ipc

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")

_numbers = itertools.count()
SHAPE = (10, 2, 4, 8)
NBYTES = 10 * 2 * 4 * 8 * 2


@pytest.fixture
def name() -> Iterator[str]:
    """Of a segment, of this test alone."""
    name = f"kvswap-test-{os.getpid()}-{next(_numbers)}"
    yield name
    Path("/dev/shm", name).unlink(missing_ok=True)


class Half:
    """A tensor of two-byte elements, as far as share_external_data() asks."""

    dtype = "float16"

    def element_size(self) -> int:
        return 2


def copy_out(device: kvswap.Device, tensor: Any) -> Any:
    """Its bytes, by a swap: the ops take a shared tensor."""
    host = device.alloc(NBYTES, host=True)
    ids = list(range(SHAPE[0]))
    fastdeploy.swap_cache_all_layers([tensor], [host.ptr], SHAPE[0], ids, ids, 0, 0, device=device)
    return np.asarray(host).copy()


OTHER = """
from kvswap import fastdeploy
class Half:
    dtype = "float16"
    def element_size(self):
        return 2
device = kvswap.Device({device!r})
def bytes_of(tensor):
    host = device.alloc({nbytes}, host=True)
    ids = list(range(10))
    fastdeploy.swap_cache_all_layers([tensor], [host.ptr], 10, ids, ids, 0, 0, device=device)
    return np.asarray(host).tolist()
"""


@pytest.fixture
def other(device_name: str) -> Iterator[Process]:
    with Process(OTHER.format(device=device_name, nbytes=NBYTES)) as process:
        yield process


def test_between_processes(device: kvswap.Device, other: Process, name: str) -> None:
    cache = Buffer(device, NBYTES)
    data = cache.randomise(3)
    fastdeploy.set_data_ipc(cache.memory, name, device=device)
    other.do(f"tensor = fastdeploy.share_external_data(Half(), {name!r}, {list(SHAPE)}, device=device)")
    assert other.do("(tensor.numel(), tensor.element_size(), list(tensor.shape))") == [640, 2, list(SHAPE)]
    assert other.do("bytes_of(tensor)") == data.tolist()
    cache.put(random_bytes(4, NBYTES))
    assert other.do("bytes_of(tensor)") == random_bytes(4, NBYTES).tolist()
    address = other.do(f"fastdeploy.get_data_ptr_ipc(Half(), {name!r}, device=device).tolist()")
    assert address == [other.do("tensor.data_ptr()")]
    other.do(f"fastdeploy.unset_data_ipc(tensor, {name!r}, True, False)")
    assert Path("/dev/shm", name).exists()
    other.do(f"fastdeploy.unset_data_ipc(tensor, {name!r}, True, True)")  # get_data_ptr_ipc() had opened it as well
    assert not Path("/dev/shm", name).exists()
    with pytest.raises(Failed, match="or it is closed"):
        other.do(f"fastdeploy.unset_data_ipc(tensor, {name!r}, True, False)")
    fastdeploy.unset_data_ipc(cache.memory, name, False, True)  # gone already: harmless, as there


def test_within_a_process(device: kvswap.Device, name: str) -> None:
    """FastDeploy's cannot: drivers open no handle of their own process."""
    cache = Buffer(device, NBYTES)
    data = cache.randomise(5)
    fastdeploy.set_data_ipc(cache.memory, name, device=device)
    tensor = fastdeploy.share_external_data(Half(), name, SHAPE, device=device)
    assert tensor.data_ptr() == cache.ptr and tensor.is_contiguous() and tensor.nbytes == NBYTES
    assert copy.copy(tensor).data_ptr() == cache.ptr and not hasattr(tensor, "strides")
    assert hasattr(tensor, "__cuda_array_interface__") == (device.kind == "cuda")
    np.testing.assert_array_equal(copy_out(device, tensor), data)
    fastdeploy.unset_data_ipc(tensor, name, True, True)
    with pytest.raises(kvswap.Error, match="there is no segment"):
        fastdeploy.share_external_data(Half(), name, SHAPE, device=device)


def test_the_form_is_fastdeploys(device: kvswap.Device, name: str) -> None:
    """8 bytes that are 0, then the driver's handle: 72 in all; for this user alone."""
    cache = Buffer(device, NBYTES)
    fastdeploy.set_data_ipc(cache.memory, name, device=device)
    path = Path("/dev/shm", name)
    unused, handle = struct.unpack("=Q64s", path.read_bytes())
    assert unused == 0 and any(handle)
    assert handle == _C._ipc_handle(kvswap.memory.export(cache.memory).to_bytes())
    assert path.stat().st_mode & 0o777 == 0o600
    again = Buffer(device, NBYTES)
    fastdeploy.set_data_ipc(again.memory, name, device=device)  # the newest counts
    assert fastdeploy.share_external_data(Half(), name, SHAPE, device=device).data_ptr() == again.ptr


def test_reads_what_fastdeploy_writes(device: kvswap.Device, other: Process, name: str) -> None:
    """There a segment is made first and filled in afterwards, and is as long as the struct."""
    path = Path("/dev/shm", name)
    for early, message in ((b"", "0 bytes instead of 72"), (bytes(72), "holds no handle yet")):
        path.write_bytes(early)
        with pytest.raises(kvswap.Error, match=message):
            fastdeploy.share_external_data(Half(), name, SHAPE, device=device)
    cache = Buffer(device, NBYTES)
    data = cache.randomise(6)
    path.write_bytes(struct.pack("=Q64s", 0, _C._ipc_handle(kvswap.memory.export(cache.memory).to_bytes())))
    other.do(f"tensor = fastdeploy.share_external_data(Half(), {name!r}, {list(SHAPE)}, device=device)")
    assert other.do("bytes_of(tensor)") == data.tolist()


def test_an_interior_tensor_is_refused(device: kvswap.Device, name: str) -> None:
    """A handle stands for a whole allocation: others would open its beginning."""
    slab = device.alloc(4 * NBYTES)
    part = types.SimpleNamespace(data_ptr=lambda: slab.ptr + NBYTES, nbytes=NBYTES)
    with pytest.raises(ValueError, match=f"begins at byte {NBYTES} of an allocation of {4 * NBYTES} bytes"):
        fastdeploy.set_data_ipc(part, name, device=device)
    assert not Path("/dev/shm", name).exists()


def test_what_is_not_opened(device: kvswap.Device, name: str) -> None:
    with pytest.raises(kvswap.Error, match="there is no segment"):
        fastdeploy.share_external_data(Half(), name, SHAPE, device=device)
    for wrong in ("", "a/b", "..", "a\0b", "x" * 300):
        with pytest.raises(ValueError, match="no name for a segment"):
            fastdeploy.share_external_data(Half(), wrong, SHAPE, device=device)
    path = Path("/dev/shm", name)
    for make in (lambda: path.symlink_to("/etc/hostname"), lambda: os.mkfifo(path), path.mkdir):
        make()  # by any user: nothing of that is opened, which for a pipe would wait
        with pytest.raises(OSError, match="not a file: remove it"):
            fastdeploy.share_external_data(Half(), name, SHAPE, device=device)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    path.write_bytes(struct.pack("=Q64s", 0, bytes(range(64))))
    with pytest.raises((kvswap.Error, ValueError)):
        fastdeploy.share_external_data(Half(), name, SHAPE, device=device)
    if os.getuid() == 0:
        os.chown(path, 65534, 65534)
        with pytest.raises(kvswap.Error, match="belongs to user 65534"):
            fastdeploy.share_external_data(Half(), name, SHAPE, device=device)


def test_shapes_and_sizes(device: kvswap.Device, other: Process, name: str) -> None:
    other.do(f"cache = device.alloc({NBYTES}); fastdeploy.set_data_ipc(cache, {name!r}, device=device)")
    for shape in ((0, 2, 4, 8), (), (-1, 2)):
        with pytest.raises(ValueError, match="every extent must be at least 1"):
            fastdeploy.share_external_data(Half(), name, shape, device=device)
    with pytest.raises((kvswap.Error, ValueError), match=str(NBYTES * 1000)):
        fastdeploy.share_external_data(Half(), name, (10_000, 2, 4, 8), device=device)


def test_an_owner_that_has_ended(device: kvswap.Device, device_name: str, name: str) -> None:
    """Its segment stays behind, and does not open."""
    with Process(OTHER.format(device=device_name, nbytes=NBYTES)) as owner:
        owner.do(f"cache = device.alloc({NBYTES}); fastdeploy.set_data_ipc(cache, {name!r}, device=device)")
        owner.kill()
    with pytest.raises((kvswap.Error, ValueError)):
        fastdeploy.share_external_data(Half(), name, SHAPE, device=device)


def test_torch_tensors(device: kvswap.Device, name: str) -> None:
    torch = pytest.importorskip("torch")
    cache = Buffer(device, NBYTES)
    cache.randomise(8)
    fastdeploy.set_data_ipc(cache.memory, name, device=device)
    tensor = fastdeploy.share_external_data(torch.empty(0, dtype=torch.bfloat16), name, SHAPE, device=device)
    assert isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == SHAPE and tensor.dtype == torch.bfloat16
    assert tensor.data_ptr() == cache.ptr
    fastdeploy.unset_data_ipc(tensor, name, True, True)


# -- install() --------------------------------------------------------------------------------------------------------

NAMES = ("cuda_host_alloc", "cuda_host_free", "set_data_ipc", "share_external_data", "swap_cache_all_layers",
         "swap_cache_per_layer", "swap_cache_per_layer_async", "swap_cache_layout", "unset_data_ipc",
         "get_data_ptr_ipc")  # fmt: skip


def own_op(*args: Any) -> Any:
    raise AssertionError("FastDeploy's own op was called")


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> dict[str, types.ModuleType]:
    """A FastDeploy of empty modules: the ops, those that gather them, and a user that has imported one by its name."""
    paths = ("fastdeploy", "fastdeploy.model_executor", "fastdeploy.model_executor.ops",
             "fastdeploy.model_executor.ops.gpu", "fastdeploy.cache_manager", "fastdeploy.cache_manager.ops",
             "fastdeploy.worker")  # fmt: skip
    made = {path: types.ModuleType(path) for path in paths}
    for path, module in made.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, path, module)
    gpu, gathered = made["fastdeploy.model_executor.ops.gpu"], made["fastdeploy.cache_manager.ops"]
    for name in (*NAMES, "swap_cache", "get_output_kv_signal"):
        setattr(gpu, name, types.FunctionType(own_op.__code__, globals(), name))
    for name in (*NAMES, "get_output_kv_signal"):
        setattr(gathered, name, getattr(gpu, name))
    exec(
        "def share_external_data_(cache, name, shape, use_ipc):\n    return share_external_data(cache, name, shape)",
        vars(gathered),
    )
    made["fastdeploy.worker"].set_data_ipc = gpu.set_data_ipc
    return made


def test_install(stubs: dict[str, types.ModuleType], device: kvswap.Device, name: str) -> None:
    gpu, gathered = stubs["fastdeploy.model_executor.ops.gpu"], stubs["fastdeploy.cache_manager.ops"]
    others = gathered.get_output_kv_signal, gathered.share_external_data_
    before = {each: getattr(gpu, each) for each in NAMES}
    with fastdeploy.install() as installed:
        for each in NAMES:
            assert getattr(gathered, each) is getattr(gpu, each) is getattr(fastdeploy, each)
        assert gpu.swap_cache is fastdeploy.swap_cache and not hasattr(gathered, "swap_cache")
        assert stubs["fastdeploy.worker"].set_data_ipc is fastdeploy.set_data_ipc
        assert (gathered.get_output_kv_signal, gathered.share_external_data_) == others
        assert "fastdeploy.worker.set_data_ipc" in installed.names
        assert fastdeploy.install().names == []  # all of them are ours already
        if device.name == f"{fastdeploy.ops.device_kind()}:0":
            cache = Buffer(device, NBYTES)
            stubs["fastdeploy.worker"].set_data_ipc(cache.memory, name)
            tensor = gathered.share_external_data_(Half(), name, list(SHAPE), True)
            assert tensor.data_ptr() == cache.ptr
            gathered.unset_data_ipc(tensor, name, True, True)
    assert {each: getattr(gpu, each) for each in NAMES} == before
    assert (
        gathered.set_data_ipc is stubs["fastdeploy.worker"].set_data_ipc is gpu.set_data_ipc is before["set_data_ipc"]
    )


def test_install_listens_to_paddle(stubs: dict[str, types.ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their managers set the CPU before they allocate host memory: it is for the GPU that was set before, no other."""
    from kvswap.fastdeploy import ops

    paddle, now = types.ModuleType("paddle"), ["gpu:0"]
    paddle.device = types.SimpleNamespace(get_device=lambda: now[-1])
    paddle.set_device = own = lambda name: now.append(name)
    monkeypatch.setitem(sys.modules, "paddle", paddle)
    monkeypatch.setattr(ops, "device_kind", lambda: "host")
    monkeypatch.setattr(ops, "_last", None)
    monkeypatch.setattr(ops, "_noted", None)
    with fastdeploy.install() as installed:
        assert "paddle.set_device" in installed.names and fastdeploy.install().names == []
        paddle.set_device("gpu:3")
        paddle.set_device("cpu")
        assert now[-1] == "cpu" and ops.current_device().name == "host:3"
        fastdeploy.swap_cache_all_layers([], [], 1, [], [], 5, 0)  # what an op used last is another one
        assert ops.current_device().name == "host:3"
    assert paddle.set_device is own


def test_install_in_the_seeds_generation(stubs: dict[str, types.ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing gathers the ops, they are found where they are made."""
    monkeypatch.delitem(sys.modules, "fastdeploy.cache_manager.ops")
    stubs["fastdeploy.cache_manager"].__spec__ = None
    with fastdeploy.install():
        assert stubs["fastdeploy.model_executor.ops.gpu"].swap_cache_all_layers is fastdeploy.swap_cache_all_layers


def test_install_where_fastdeploys_ops_could_not_be_imported(stubs: dict[str, types.ModuleType]) -> None:
    """cache_manager.ops then has None under every name."""
    gathered = stubs["fastdeploy.cache_manager.ops"]
    for name in NAMES:
        setattr(gathered, name, None)
    with fastdeploy.install():
        assert all(getattr(gathered, name) is getattr(fastdeploy, name) for name in NAMES)
    assert gathered.swap_cache_all_layers is None


def test_install_without_fastdeploy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastdeploy", None)
    with pytest.raises(kvswap.Error, match="there is no FastDeploy here"):
        fastdeploy.install()


def test_device_of_paddle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops without a rank go by what paddle was set to, and open no other GPU; without a GPU by what stands for it."""
    from kvswap.fastdeploy import ops
    from kvswap.fastdeploy._tensors import framework_gpu

    paddle = types.ModuleType("paddle")
    paddle.device = types.SimpleNamespace(get_device=lambda: "gpu:3")
    monkeypatch.setitem(sys.modules, "paddle", paddle)
    monkeypatch.setattr(ops, "device_kind", lambda: "host")
    monkeypatch.setattr(ops, "_last", None)
    monkeypatch.setattr(ops, "_noted", None)
    assert framework_gpu(None) == 3
    assert ops.current_device().name == "host:3"
    paddle.device = types.SimpleNamespace(get_device=lambda: "cpu")
    assert framework_gpu(None) is None
    assert ops.current_device().name == "host:3"  # as their managers allocate: paddle was set to the CPU for it
    assert ops.current_device("host:1").name == "host:1"


class Copying:
    """paddle's tensor of a paddle whose reshape() copies."""

    __module__ = "paddle"
    dtype = "bfloat16"

    def __init__(self, ptr: int = 1) -> None:
        self.ptr = ptr

    def data_ptr(self) -> int:
        return self.ptr

    def element_size(self) -> int:
        return 2

    def view(self, dtype: str) -> Copying:
        return self

    def reshape(self, shape: list[int]) -> Copying:
        return Copying(self.ptr + 256)


def test_a_framework_that_copies_is_refused(device: kvswap.Device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if only the last step does: the engine would write one memory, and the swaps read another."""
    cache = Buffer(device, NBYTES)
    fastdeploy.set_data_ipc(cache.memory, name)
    paddle = types.ModuleType("paddle")
    paddle.to_tensor = lambda shared: Copying(shared.data_ptr())
    monkeypatch.setitem(sys.modules, "paddle", paddle)
    shared = ipc.SharedTensor(ipc.open_segment(name, device, NBYTES), SHAPE, 2, "bfloat16")
    gpu = types.SimpleNamespace(kind="cuda", name="cuda:0")
    monkeypatch.setattr(shared, "_opened", types.SimpleNamespace(ptr=cache.ptr, device=gpu))
    with pytest.raises(kvswap.Error, match="this paddle copies what it should share"):
        ipc._as_framework(shared, Copying())


# -- in a manager that FastDeploy starts ------------------------------------------------------------------------------


def test_the_page_on_a_script_that_fastdeploy_starts(tmp_path: Path) -> None:
    """The docs' sitecustomize.py, in a likeness: the script's ops are kvswap's, another script's are not touched."""
    page = (ROOT / "docs" / "fastdeploy.md").read_text()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(page.split("```python\n# sitecustomize.py")[1].split("```")[0])
    package = tmp_path / "fastdeploy"
    for folder in (package / "model_executor" / "ops", package / "cache_manager"):
        folder.mkdir(parents=True)
    (package / "model_executor" / "ops" / "gpu.py").write_text("def swap_cache_all_layers(*args): ...\n")
    script = "from fastdeploy.model_executor.ops.gpu import swap_cache_all_layers as op\nprint(op.__module__)\n"
    here = Path(kvswap.__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}:{tmp_path}:{here}"}
    for name, module in (("cache_transfer_manager.py", "kvswap.fastdeploy.ops"), ("other.py", "fastdeploy.model_")):
        (package / "cache_manager" / name).write_text(script)
        words = [sys.executable, str(package / "cache_manager" / name), "--rank", "0"]
        done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and done.stdout.startswith(module), done.stdout + done.stderr
