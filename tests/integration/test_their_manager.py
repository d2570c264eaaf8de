"""FastDeploy's own cache managers, unmodified, on kvswap's ops.

Their sources are taken when the test runs: FASTDEPLOY_SOURCE names a checkout, or FASTDEPLOY_REF a branch or tag that
is cloned from GitHub. Whatever of FastDeploy and paddle they import is a stub here, but for the ops, which are kvswap's
by install(). A checkout of July 2025 has one manager, a newer one two: each that is there is run.

    FASTDEPLOY_REF=develop pytest tests/integration/test_their_manager.py
"""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import contextlib
import ctypes
import enum
import importlib.util
import logging
import math
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Buffer, Bytes

import kvswap
from kvswap import fastdeploy
from kvswap.fastdeploy import _install

LAYERS, SHAPE, HOST_BLOCKS = 3, (20, 2, 8, 16), 30
ITEM = {"bfloat16": 2, "float16": 2, "uint8": 1, "float32": 4}
REPOSITORY = "https://github.com/PaddlePaddle/FastDeploy"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "FASTDEPLOY_SOURCE" in os.environ:
        return Path(os.environ["FASTDEPLOY_SOURCE"])
    if "FASTDEPLOY_REF" not in os.environ:
        pytest.skip("needs FastDeploy's sources: set FASTDEPLOY_SOURCE to a checkout, or FASTDEPLOY_REF to a branch")
    folder = tmp_path_factory.mktemp("fastdeploy")
    command = ["git", "clone", "-q", "--depth", "1", "--branch", os.environ["FASTDEPLOY_REF"], REPOSITORY, str(folder)]
    subprocess.run(command, check=True, timeout=600)
    return folder


# -- stubs ------------------------------------------------------------------------------------------------------------


class Tensor:
    """paddle's, as far as the managers look at one."""

    def __init__(self, device: kvswap.Device, shape: list[int], dtype: str) -> None:
        self.shape, self.dtype = list(shape), dtype
        nbytes = math.prod(shape) * ITEM[dtype]
        self.buffer = Buffer(device, nbytes) if shape else None

    def data_ptr(self) -> int:
        assert self.buffer is not None
        return self.buffer.ptr

    @property
    def nbytes(self) -> int:
        return self.numel() * self.element_size()

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return ITEM[self.dtype]

    def is_contiguous(self) -> bool:
        return True


class Paddle(types.ModuleType):
    """The part of paddle that the managers call."""

    def __init__(self, device: kvswap.Device) -> None:
        super().__init__("paddle")
        self._default = "bfloat16"
        self.full = lambda shape, fill_value, dtype: Tensor(device, shape, dtype)
        self.empty = lambda shape, dtype: Tensor(device, shape, dtype)
        self.set_device = lambda name: None
        self.is_compiled_with_cuda = lambda: True
        self.get_default_dtype = lambda: self._default
        self.set_default_dtype = lambda dtype: setattr(self, "_default", dtype)
        counts = {name: lambda: 0 for name in ("memory_allocated", "max_memory_allocated", "memory_reserved",
                                               "max_memory_reserved", "empty_cache")}  # fmt: skip
        current = f"gpu:{device.name.partition(':')[2]}" if device.kind == "cuda" else "cpu"
        self.device = SimpleNamespace(cuda=SimpleNamespace(**counts), get_device=lambda: current)


class CuPy(types.ModuleType):
    """CuPy's streams and events, over kvswap's."""

    def __init__(self, device: kvswap.Device) -> None:
        super().__init__("cupy")
        local = threading.local()

        class Stream:
            def __init__(self, ptr: int | None = None, non_blocking: bool = False) -> None:
                self.own = kvswap.Stream(device) if ptr is None else None
                self.ptr = self.own.handle if self.own is not None else ptr
                self.device_id = 0

            def __enter__(self) -> Stream:
                local.stack = [*getattr(local, "stack", []), self]
                return self

            def __exit__(self, *error: object) -> None:
                local.stack = local.stack[:-1]

            def synchronize(self) -> None:
                assert self.own is not None
                self.own.synchronize(PATIENCE)

        class Event:
            def __init__(self) -> None:
                self.own = kvswap.Event(device)

            def record(self) -> None:
                self.own.record(current().ptr)

        def current() -> Stream:
            stack = getattr(local, "stack", [])
            return stack[-1] if stack else Stream(0)

        class Device:
            def __init__(self, number: int) -> None: ...
            def __enter__(self) -> Device:
                return self

            def __exit__(self, *error: object) -> None: ...

        runtime = SimpleNamespace(getDevice=lambda: 0)
        self.cuda = SimpleNamespace(
            Stream=Stream, Event=Event, Device=Device, runtime=runtime, get_current_stream=current
        )


class Barrier:
    def wait(self) -> None: ...
    def reset(self) -> None: ...


class Queue:
    """EngineCacheQueue of one rank, in this process. Stopped, it ends the manager's loop."""

    made: Queue

    def __init__(self, **options: Any) -> None:
        self.tasks: list[Any] = []
        self.done: list[Any] = []
        self.stopped = False
        Queue.made = self

    def __getattr__(self, name: str) -> Any:
        if "barrier" in name:
            return Barrier()
        raise AttributeError(name)

    def empty(self) -> bool:
        if self.stopped:
            raise SystemExit
        if not self.tasks:
            time.sleep(0.001)
        return not self.tasks

    def get_transfer_task(self) -> tuple[Any, bool]:
        return self.tasks.pop(0), True

    def put_transfer_done_signal(self, item: Any) -> None:
        self.done.append(item)


class Thread(threading.Thread):
    """One of their threads, which loop for ever: SystemExit ends it."""

    started: list[Thread]

    def start(self) -> None:
        Thread.started.append(self)
        super().start()

    def run(self) -> None:
        with contextlib.suppress(SystemExit):
            super().run()


class Ending:
    """In the place of a signal's array: who looks at it ends."""

    def __getitem__(self, index: int) -> int:
        raise SystemExit


class Signal:
    """IPCSignal, in this process."""

    made: dict[str, Signal] = {}

    def __new__(cls, name: str, array: Any = None, **options: Any) -> Signal:
        if name not in cls.made:
            cls.made[name] = super().__new__(cls)
            cls.made[name].value = np.array(array)
        return cls.made[name]


class CacheStatus(enum.Enum):
    GPU = 0
    SWAP2CPU = 1
    SWAP2GPU = 2
    CPU = 3
    STORAGE2GPU = 4
    GPU2STORAGE = 5


def stub_modules(device: kvswap.Device) -> dict[str, types.ModuleType]:
    """Everything that the managers import but themselves and the module that gathers the ops."""
    log = logging.getLogger("their-manager")
    status = SimpleNamespace(NORMAL=0, UPDATING=1, CLEARING=-1, CLEARED=-2)
    platform = SimpleNamespace(
        is_cuda=lambda: True, is_xpu=lambda: False, is_maca=lambda: False, is_iluvatar=lambda: False
    )

    def own_op(*args: Any) -> Any:
        raise AssertionError("FastDeploy's own op was called")

    def extra(config: Any) -> Any:
        return SimpleNamespace(num_extra_cache_layer=1, num_gpu_block_expand_ratio=1)

    names = (*_install._OPS, "get_output_kv_signal", "ipc_sent_key_value_cache_by_remote_ptr",
             "ipc_sent_key_value_cache_by_remote_ptr_block_sync")  # fmt: skip
    envs = SimpleNamespace(
        FD_ENABLE_SWAP_SPACE_CLEARING=True, FD_CACHE_PROC_EXIT_TIMEOUT=600, FD_CACHE_PROC_ERROR_COUNT=10
    )
    made: dict[str, dict[str, Any]] = {
        "fastdeploy": {"envs": envs},
        "fastdeploy.cache_manager": {},
        "fastdeploy.cache_manager.cache_data": {"CacheStatus": CacheStatus},
        "fastdeploy.cache_manager.cache_tasks": {"ReadStorageTask": object, "WriteStorageTask": object},
        "fastdeploy.cache_manager.transfer_factory": dict.fromkeys(("AttentionStore", "FileStore", "MooncakeStore")),
        "fastdeploy.cache_manager.v1": {},
        "fastdeploy.cache_manager.v1.cache_utils": {"storage_key_for_block": None},
        "fastdeploy.cache_manager.v1.storage": {"create_storage_connector": lambda *args, **options: None},
        "fastdeploy.cache_manager.v1.transfer": {"create_transfer_connector": lambda *args, **options: None},
        "fastdeploy.config": {"SpeculativeConfig": extra},
        "fastdeploy.inter_communicator": {"EngineCacheQueue": Queue, "IPCSignal": Signal, "KVCacheStatus": status},
        "fastdeploy.model_executor": {},
        "fastdeploy.model_executor.ops": {},
        "fastdeploy.model_executor.ops.gpu": dict.fromkeys(names, own_op),
        "fastdeploy.platforms": {"current_platform": platform},
        "fastdeploy.utils": {"get_logger": lambda *args: log, "llm_logger": log, "console_logger": log},
        "paddleformers": {},
        "paddleformers.utils": {},
        "paddleformers.utils.log": {"logger": log},
        "yaml": {},
    }
    modules: dict[str, types.ModuleType] = {"paddle": Paddle(device), "cupy": CuPy(device)}
    for name, values in made.items():
        modules[name] = types.ModuleType(name)
        modules[name].__path__ = []
        vars(modules[name]).update(values)
    return modules


def load(source: Path, name: str) -> Any:
    """Their file as their module."""
    path = source.joinpath(*name.split(".")).with_suffix(".py")
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    module.logger = logging.getLogger("their-manager")  # the managers make theirs only when they are run as scripts
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def theirs(source: Path, device: kvswap.Device) -> Iterator[Any]:
    """load(name) of a module of theirs, with our ops in it."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in
              ("fastdeploy", "paddle", "cupy", "paddleformers", "yaml")}  # fmt: skip
    for name in before:
        del sys.modules[name]
    sys.modules.update(stub_modules(device))
    Signal.made = {}
    load(source, "fastdeploy.cache_manager.ops")
    with fastdeploy.install():
        yield lambda name: load(source, name)
    for name in [name for name in sys.modules if name.partition(".")[0] in
                 ("fastdeploy", "paddle", "cupy", "paddleformers", "yaml")]:  # fmt: skip
        del sys.modules[name]
    sys.modules.update(before)


# -- the manager of its own process -----------------------------------------------------------------------------------


class Run:
    """Their manager in a thread, fed by a queue; what its caches must hold is kept beside it."""

    def __init__(self, module: Any, device: kvswap.Device, create: bool) -> None:
        self.newer = "event_args" in Path(module.__file__).read_text()
        self.device, self.random = device, np.random.default_rng(11)
        shape = ",".join(map(str, SHAPE))
        self.args = SimpleNamespace(rank=0, device_id=0, num_layers=LAYERS, mp_num=1, splitwise_role="mixed",
                                    enable_splitwise=0, pod_ip="127.0.0.1", cache_queue_port=1,
                                    engine_worker_queue_port=1, engine_pid="1", rdma_port="", protocol="ipc",
                                    num_cpu_blocks=HOST_BLOCKS, cache_dtype="bfloat16", default_dtype="bfloat16",
                                    speculative_config={}, local_data_parallel_id=0, create_cache_tensor=create,
                                    ipc_suffix="1", key_cache_shape=shape, value_cache_shape=shape,
                                    num_gpu_blocks=SHAPE[0], kv_num_head=SHAPE[1], block_size=SHAPE[2],
                                    head_dim=SHAPE[3], bytes_per_layer_per_block=math.prod(SHAPE[1:]) * 2,
                                    kvcache_storage_backend=None, write_policy="write_through",
                                    model_path="/nowhere/model", max_model_len=100)  # fmt: skip
        for name in ("cache_ready_signal", "swap_space_ready_signal", "kv_cache_status"):
            Signal(name, np.zeros(1, np.int32))
        self.engine: dict[str, Tensor] = {}
        if not create:
            self.export()
        module.args = self.args
        Thread.started = []
        module.threading = SimpleNamespace(Thread=Thread)
        self.manager = module.CacheTransferManager(self.args)
        self.queue = Queue.made
        self.thread = Thread(target=self.manager.do_data_transfer, daemon=True)
        self.thread.start()

    def export(self) -> None:
        """The engine's caches, by FastDeploy's names."""
        for layer in range(LAYERS + 1):
            for kind in ("key", "value"):
                name = f"{kind}_caches_{layer}_rank0.device0"
                self.engine[name] = Tensor(self.device, list(SHAPE), "bfloat16")
                sys.modules["fastdeploy.model_executor.ops.gpu"].set_data_ipc(self.engine[name], name)
        Signal.made["cache_ready_signal"].value[0] = 1

    def blocks(self, name: str) -> tuple[Buffer, Bytes]:
        tensor = self.engine.get(name, self.manager.gpu_cache_kvs[name])
        assert tensor.buffer is not None
        return tensor.buffer, tensor.buffer.get().reshape(SHAPE[0], -1)

    def swap(self, status: CacheStatus, gpu_ids: list[int], cpu_ids: list[int]) -> None:
        name, count = f"task-{len(self.queue.done)}", len(self.queue.done)
        old, new = ([1], gpu_ids, cpu_ids, status, name), (status, name, [1], gpu_ids, cpu_ids)
        self.queue.tasks.append(new if self.newer else old)
        end = time.monotonic() + PATIENCE
        while len(self.queue.done) == count:
            assert time.monotonic() < end and self.thread.is_alive()
            time.sleep(0.001)
        assert tuple(self.queue.done[-1]) == (new if self.newer else old)

    def go(self, rounds: int) -> None:
        """Random swaps, all bytes of all caches looked at after each."""
        names = sorted(self.manager.gpu_cache_kvs)
        assert len(names) == 2 * (LAYERS + 1)
        host: dict[str, dict[int, Bytes]] = {name: {} for name in names}
        model = {}
        for name in names:
            buffer, _ = self.blocks(name)
            model[name] = buffer.randomise(self.random.integers(1 << 30)).reshape(SHAPE[0], -1).copy()
        for i in range(rounds):
            count = int(self.random.integers(1, 6))
            gpu_ids = self.random.choice(SHAPE[0], count, replace=False).tolist()
            held = sorted(host[names[0]])
            if i % 2 and len(held) >= count:
                cpu_ids = self.random.choice(held, count, replace=False).tolist()
                self.swap(CacheStatus.SWAP2GPU, gpu_ids, cpu_ids)
                for name in names:
                    model[name][gpu_ids] = [host[name][block] for block in cpu_ids]
            else:
                cpu_ids = self.random.choice(HOST_BLOCKS, count, replace=False).tolist()
                self.swap(CacheStatus.SWAP2CPU, gpu_ids, cpu_ids)
                for name in names:
                    host[name].update({c: model[name][g].copy() for g, c in zip(gpu_ids, cpu_ids, strict=True)})
            for name in names:
                np.testing.assert_array_equal(self.blocks(name)[1], model[name])

    def status(self, begin: int, end: int) -> None:
        signal = Signal.made["kv_cache_status"]
        if begin < 0 and self.args.create_cache_tensor:
            Signal.made["cache_ready_signal"].value[0] = 0  # the engine has closed them
        signal.value[0] = begin
        limit = time.monotonic() + PATIENCE
        while signal.value[0] != end:
            assert time.monotonic() < limit, f"their manager stays at {signal.value[0]}"
            time.sleep(0.01)

    def close(self) -> None:
        self.queue.stopped = True
        Signal.made["kv_cache_status"].value = Ending()
        for thread in Thread.started:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        for layer in range(LAYERS + 1):
            for kind in ("key", "value"):
                Path("/dev/shm", f"{kind}_caches_{layer}_rank0.device0").unlink(missing_ok=True)


@pytest.mark.parametrize("create", [True, False], ids=["create", "attach"])
def test_the_manager_of_its_own_process(theirs: Any, device: kvswap.Device, create: bool) -> None:
    module = theirs("fastdeploy.cache_manager.cache_transfer_manager")
    if module is None:
        pytest.skip("this FastDeploy has none")
    run = Run(module, device, create)
    try:
        run.go(60)
        if create == run.newer:  # as it is used there; the other way its own clearing is not complete
            assert len(run.manager.k_dst_ptrs) == LAYERS + 1
            run.status(-1, -2)
            assert run.manager.k_dst_ptrs == [] and run.manager.gpu_cache_k_tensors == []
            if not create:
                run.export()
            run.status(1, 0)
            run.go(20)
    finally:
        run.close()


# -- the manager within the engine ------------------------------------------------------------------------------------


def test_the_manager_within_the_engine(theirs: Any, device: kvswap.Device) -> None:
    """Evictions of all layers, loads layer by layer on CuPy's stream, each with an event recorded behind it."""
    module = theirs("fastdeploy.cache_manager.v1.transfer_manager")
    if module is None:
        pytest.skip("this FastDeploy has none")
    cache_config = SimpleNamespace(cache_dtype="bfloat16", num_cpu_blocks=HOST_BLOCKS)
    manager = module.CacheTransferManager(
        SimpleNamespace(cache_config=cache_config, quant_config=None,
                        model_config=SimpleNamespace(num_hidden_layers=LAYERS))
    )  # fmt: skip
    names = [f"{kind}_caches_{layer}_rank0.device0" for layer in range(LAYERS) for kind in ("key", "value")]
    tensors = {name: Tensor(device, list(SHAPE), "bfloat16") for name in names}
    alloc = sys.modules["fastdeploy.model_executor.ops.gpu"].cuda_host_alloc
    block = math.prod(SHAPE[1:]) * 2
    hosts = {name: alloc(HOST_BLOCKS * block) for name in names}
    manager.set_cache_kvs_map(tensors)
    manager.set_host_cache_kvs_map(hosts)
    before = {name: tensors[name].buffer.randomise(i).reshape(SHAPE[0], block) for i, name in enumerate(names)}
    gpu_ids, cpu_ids, back = [3, 4, 5, 17], [20, 21, 22, 0], [9, 0, 1, 12]
    assert manager.evict_to_host_async(gpu_ids, cpu_ids)
    manager.sync_output_stream()
    for name in names:
        memory = (ctypes.c_uint8 * (HOST_BLOCKS * block)).from_address(hosts[name])
        found = np.frombuffer(memory, np.uint8).reshape(HOST_BLOCKS, block)
        np.testing.assert_array_equal(found[cpu_ids], before[name][gpu_ids])
    events = []
    assert manager.load_layers_to_device_async(
        list(range(LAYERS)), cpu_ids, back, lambda layer: events.append(manager.record_input_stream_event())
    )
    for layer, event in enumerate(events):
        event.own.synchronize(PATIENCE)
        for name in names[2 * layer : 2 * layer + 2]:
            expected = before[name].copy()
            expected[back] = before[name][gpu_ids]
            np.testing.assert_array_equal(tensors[name].buffer.get().reshape(SHAPE[0], block), expected)
    assert len(events) == LAYERS
    for ptr in hosts.values():
        fastdeploy.cuda_host_free(ptr)
