"""What stands in for paddle, CuPy and most of FastDeploy where its own cache managers run on kvswap's ops.

enter(source) makes an unpacked FastDeploy importable with nothing else installed. The modules that stubs() lists are
made here; every other module of FastDeploy that something imports is the source's own file. report(source) says which
those were. FastDeploy's compiled ops are kvswap's, by install(): the functions that they take the place of only raise.

The tensors lie on kvswap's devices: on GPUs where there are any, else on host devices.
"""

# mypy: ignore-errors

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import json
import logging
import math
import os
import signal
import sys
import threading
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import kvswap
from kvswap.fastdeploy import _install, install, ipc, ops

ITEM = {"bfloat16": 2, "float16": 2, "uint8": 1, "float32": 4}
LIMIT = 60.0  # seconds until a wait is given up


def device(number: int) -> kvswap.Device:
    """GPU number `number`, or the host device that stands for it. On a machine with fewer GPUs ranks share them."""
    if ops.device_kind() == "cuda":
        number %= kvswap._C._cuda_count()[0]
    return kvswap.Device(f"{ops.device_kind()}:{number}")


# -- paddle -----------------------------------------------------------------------------------------------------------


class Tensor:
    """paddle's, as far as FastDeploy's managers and the ops look at one."""

    __module__ = "paddle"

    def __init__(self, shape: list[int], dtype: str, ptr: int, owner: Any) -> None:
        self.shape, self.dtype, self._ptr, self._owner = list(shape), dtype, ptr, owner

    def data_ptr(self) -> int:
        return self._ptr

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return ITEM[self.dtype]

    def is_contiguous(self) -> bool:
        return True

    def view(self, dtype: str) -> Tensor:
        nbytes = self.numel() * self.element_size()
        return Tensor([nbytes // ITEM[dtype]], dtype, self._ptr, self._owner)

    def reshape(self, shape: list[int]) -> Tensor:
        return Tensor(shape, self.dtype, self._ptr, self._owner)


class Paddle(types.ModuleType):
    """The part of paddle that the managers and kvswap's ops call. The device is "gpu:N" or "cpu", as paddle's."""

    def __init__(self) -> None:
        super().__init__("paddle")
        self.Tensor, self._device, self._default = Tensor, "gpu:0", "bfloat16"
        counts = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "empty_cache")
        cuda = SimpleNamespace(**dict.fromkeys(counts, lambda: 0))
        self.device = SimpleNamespace(cuda=cuda, get_device=lambda: self._device)

    def set_device(self, name: str) -> None:
        self._device = name

    def is_compiled_with_cuda(self) -> bool:
        return True

    def get_default_dtype(self) -> str:
        return self._default

    def set_default_dtype(self, dtype: str) -> None:
        self._default = dtype

    def set_flags(self, flags: dict[str, Any]) -> None:
        pass

    def full(self, shape: list[int], fill_value: int, dtype: str) -> Tensor:
        assert fill_value == 0
        if not shape:
            return Tensor([], dtype, 0, None)
        assert self._device.startswith("gpu:"), "a cache would be made in the CPU's memory"
        memory = device(int(self._device[4:])).alloc(math.prod(shape) * ITEM[dtype])
        ipc.zero(memory)
        return Tensor(shape, dtype, memory.ptr, memory)

    def empty(self, shape: list[int], dtype: str) -> Tensor:
        return self.full(shape, 0, dtype)

    def to_tensor(self, data: Any) -> Tensor:
        """Of what has an array interface, without a copy."""
        interface = data.__cuda_array_interface__
        return Tensor(list(interface["shape"]), "uint8", interface["data"][0], data)


# -- CuPy -------------------------------------------------------------------------------------------------------------


class CuPy(types.ModuleType):
    """CuPy's streams and events, over kvswap's."""

    def __init__(self) -> None:
        super().__init__("cupy")
        local, own = threading.local(), device(0)

        class Stream:
            def __init__(self, ptr: int | None = None, non_blocking: bool = False) -> None:
                self.own = kvswap.Stream(own) if ptr is None else None
                self.ptr = self.own.handle if self.own is not None else ptr
                self.device_id = 0

            def __enter__(self) -> Stream:
                local.stack = [*getattr(local, "stack", []), self]
                return self

            def __exit__(self, *error: object) -> None:
                local.stack = local.stack[:-1]

            def synchronize(self) -> None:
                self.own.synchronize(LIMIT)

        class Event:
            def __init__(self) -> None:
                self.own = kvswap.Event(own)

            def record(self) -> None:
                self.own.record(current().ptr)

        class Device:
            def __init__(self, number: int) -> None: ...
            def __enter__(self) -> Device:
                return self

            def __exit__(self, *error: object) -> None: ...

        def current() -> Stream:
            stack = getattr(local, "stack", [])
            return stack[-1] if stack else Stream(0)

        runtime = SimpleNamespace(getDevice=lambda: 0)
        self.cuda = SimpleNamespace(
            Stream=Stream, Event=Event, Device=Device, runtime=runtime, get_current_stream=current
        )


# -- FastDeploy -------------------------------------------------------------------------------------------------------


class Store:
    """Stands in for a storage behind the host memory: keeps blocks in this process."""

    def __init__(self, **options: Any) -> None:
        self.held: dict[str, bytes] = {}

    def register_buffer(self, ptr: int, nbytes: int) -> None:
        pass

    def query(self, *lists: Any) -> int:
        """How many leading blocks are there of all the lists of keys; the last argument is a time limit."""
        found = [keys for keys in lists[:-1] if keys]
        held = [all(key in self.held for key in keys) for keys in zip(*found, strict=True)]
        return held.index(False) if False in held else len(held)

    def batch_set(self, keys: list[str], target_locations: list[int], target_sizes: list[int]) -> list[int]:
        for key, ptr, nbytes in zip(keys, target_locations, target_sizes, strict=True):
            self.held[key] = ctypes.string_at(ptr, nbytes)
        return [0] * len(keys)

    def batch_get(self, keys: list[str], target_locations: list[int], target_sizes: list[int]) -> list[int]:
        for key, ptr, nbytes in zip(keys, target_locations, target_sizes, strict=True):
            ctypes.memmove(ptr, self.held[key], nbytes)
        return list(target_sizes)


class Config:
    """SpeculativeConfig, CacheConfig and RoutingReplayConfig, as far as the managers look at them."""

    enable_routing_replay = False

    def __init__(self, options: Any = None, **more: Any) -> None:
        options = {**(options or {}), **more}  # the oldest is given keywords
        self.num_extra_cache_layer = options.get("num_extra_cache_layer", 0)
        self.num_gpu_block_expand_ratio = options.get("num_gpu_block_expand_ratio", 1)

    @staticmethod
    def get_cache_bytes(dtype: str) -> int:
        return 1 if dtype == "block_wise_fp8" else ITEM[dtype]


class Messages:
    """FMQ: a queue of messages that nobody reads here."""

    def queue(self, name: str, role: str) -> Messages:
        self.name = name
        return self

    async def put(self, message: Any) -> None:
        await asyncio.sleep(0)


def _own_op(*args: Any) -> Any:
    raise AssertionError("FastDeploy's own op was called")


def stubs() -> dict[str, dict[str, Any]]:
    """The modules that are not FastDeploy's, and what is in them. A name that ends with a dot is a package whose other
    modules are FastDeploy's own."""
    log = logging.getLogger("fastdeploy")
    platform = SimpleNamespace(
        is_cuda=lambda: True, is_xpu=lambda: False, is_maca=lambda: False, is_iluvatar=lambda: False
    )
    op_names = (*_install._OPS, "get_output_kv_signal", "ipc_sent_key_value_cache_by_remote_ptr",
                "ipc_sent_key_value_cache_by_remote_ptr_block_sync")  # fmt: skip
    config = dict.fromkeys(("SpeculativeConfig", "CacheConfig", "RoutingReplayConfig"), Config)
    stores = dict.fromkeys(("AttentionStore", "FileStore", "MooncakeStore"), Store)
    logs = dict.fromkeys(("llm_logger", "console_logger", "fmq_logger"), log)
    return {
        "fastdeploy.": {},
        "fastdeploy.utils": {"get_logger": lambda *names: log, **logs},
        "fastdeploy.config": config,
        "fastdeploy.engine": {},
        "fastdeploy.engine.config": config,
        "fastdeploy.engine.request": {"ControlRequest": object, "ControlResponse": object},
        "fastdeploy.platforms": {"current_platform": platform},
        "fastdeploy.model_executor": {},
        "fastdeploy.model_executor.ops": {},
        "fastdeploy.model_executor.ops.gpu": dict.fromkeys(op_names, _own_op),
        "fastdeploy.cache_manager.transfer_factory": stores,
        "fastdeploy.cache_manager.v1.": {},
        "fastdeploy.inter_communicator.": {},
        "fastdeploy.inter_communicator.fmq": {"FMQ": Messages},
        "paddleformers": {},
        "paddleformers.utils": {},
        "paddleformers.utils.log": {"logger": log},
        "yaml": {},
    }


def enter(source: Path) -> None:
    """Make this source's FastDeploy importable in this process, and put kvswap's ops into it."""
    sys.modules.update({"paddle": Paddle(), "cupy": CuPy()})
    for name, values in stubs().items():
        plain = name.removesuffix(".")
        module = types.ModuleType(plain)
        module.__path__ = [str(source.joinpath(*plain.split(".")))] if name.endswith(".") else []
        vars(module).update(values)
        sys.modules[plain] = module
        parent, _, last = plain.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], last, module)
    from fastdeploy.inter_communicator.engine_cache_queue import EngineCacheQueue
    from fastdeploy.inter_communicator.ipc_signal import IPCSignal

    package = sys.modules["fastdeploy.inter_communicator"]
    package.EngineCacheQueue, package.IPCSignal = EngineCacheQueue, IPCSignal
    if (source / "fastdeploy" / "inter_communicator" / "ipc_signal_const.py").exists():
        from fastdeploy.inter_communicator import ipc_signal_const

        package.KVCacheStatus = getattr(ipc_signal_const, "KVCacheStatus", None)
    install()


def report(source: Path, *scripts: Path) -> dict[str, str]:
    """The source's own files that ran in this process, with their SHA-256."""
    files = {Path(module.__file__) for module in list(sys.modules.values()) if getattr(module, "__file__", None)}
    own = sorted(path for path in {*files, *scripts} if path.is_relative_to(source))
    return {str(path.relative_to(source)): hashlib.sha256(path.read_bytes()).hexdigest() for path in own}


def drop_a_block() -> None:
    """Have swaps of all layers leave out their last block: what runs on them has to notice."""
    whole = _install._OPS["swap_cache_all_layers"]

    def lossy(caches: Any, ptrs: Any, most: int, gpu_ids: Any, cpu_ids: Any, *rest: Any) -> None:
        whole(caches, ptrs, most, gpu_ids[:-1], cpu_ids[:-1], *rest)

    _install._OPS["swap_cache_all_layers"] = lossy


def enter_manager() -> None:
    """In the process of a manager, called by its sitecustomize.py, before FastDeploy's script begins."""
    settings = json.loads(os.environ["FASTDEPLOY_STUBS"])
    source = Path(settings["source"])
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    if settings["drop"]:
        drop_a_block()
    enter(source)

    def end(number: int, frame: Any) -> None:
        devices = sorted({memory.device.name for memory in ops._host.values()})
        found = {"files": report(source, Path(settings["script"])), "devices": devices}
        Path(settings["report"]).write_text(json.dumps(found))
        os._exit(0)  # their threads and their loop never end by themselves

    signal.signal(signal.SIGTERM, end)


def read(tensor: Any, nbytes: int, where: kvswap.Device) -> np.ndarray:
    """The bytes of a cache, by the driver's plain copy."""
    if where.kind == "host":
        return np.frombuffer(ctypes.string_at(tensor.data_ptr(), nbytes), np.uint8)
    bounce, stream = where.alloc(nbytes, host=True), kvswap.Stream(where)
    kvswap._C._seam(where, "copy", bounce.ptr, tensor.data_ptr(), nbytes, stream.handle)
    stream.synchronize(LIMIT)
    return np.frombuffer(bounce, np.uint8).copy()


def write(tensor: Any, data: np.ndarray, where: kvswap.Device, at: int = 0) -> None:
    """Bytes into a cache, by the driver's plain copy."""
    plain = np.ascontiguousarray(data).reshape(-1)
    if where.kind == "host":
        ctypes.memmove(tensor.data_ptr() + at, plain.ctypes.data, plain.size)
        return
    bounce, stream = where.alloc(plain.size, host=True), kvswap.Stream(where)
    np.frombuffer(bounce, np.uint8)[:] = plain
    kvswap._C._seam(where, "copy", tensor.data_ptr() + at, bounce.ptr, plain.size, stream.handle)
    stream.synchronize(LIMIT)
