"""As much of SGLang's shape as its copies between device and host memory meet, without SGLang or torch: the transfer
engine, the controllers, pools of NumPy's memory, streams of a host device, and the registry of plugins' hooks.
tests/integration/sglang_copies.py runs the same code under SGLang itself."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,attr-defined,misc,no-any-return"

from __future__ import annotations

import functools
import importlib
import logging
import sys
from contextlib import contextmanager
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from sglang_streams import streams_of

from kvswap.sglang import _plugin

DEVICE = "host:141"
NAMES = {
    "environ": "sglang.srt.environ",
    "transfer": "sglang.srt.mem_cache.l2_transfer",
    "controller": "sglang.srt.managers.cache_controller",
    "hybrid": "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller",
    "common": "sglang.srt.mem_cache.pool_host.common",
    "mha": "sglang.srt.mem_cache.pool_host.mha",
    "mla": "sglang.srt.mem_cache.pool_host.mla",
    "hooks": "sglang.srt.plugins.hook_registry",
}


class Ids(np.ndarray):
    """A tensor of token ids on the CPU."""

    device = SimpleNamespace(type="cpu")


class DeviceIds:
    """Ids that claim to be on a GPU."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, values: Ids) -> None:
        self.values = values

    def __len__(self):
        return len(self.values)

    def numel(self):
        return len(self.values)

    def reshape(self, *shape):
        return DeviceIds(self.values.reshape(*shape))

    @property
    def __cuda_array_interface__(self):
        values = np.ascontiguousarray(self.values)
        self.values = values
        shape = {"shape": values.shape, "typestr": "<i8", "data": (values.ctypes.data, False)}
        return {**shape, "strides": None, "version": 3, "stream": None}

    def __array__(self, *given, **options):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def ids(*tokens: Any) -> Any:
    return np.concatenate([np.asarray(part, np.int64).ravel() for part in tokens]).view(Ids)


def pages(numbers: list[int], page: int) -> Any:
    return ids(*[np.arange(page) + number * page for number in numbers])


class Tensor:
    """A torch tensor over NumPy's memory."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __len__(self):
        return len(self.array)

    def __getitem__(self, at):
        return Tensor(self.array[at])

    def numel(self):
        return self.array.size

    def element_size(self):
        return self.array.itemsize

    def is_contiguous(self):
        return self.array.flags.c_contiguous

    def data_ptr(self):
        return self.array.ctypes.data

    def stride(self, dim):
        return self.array.strides[dim] // self.array.itemsize


class HostPool:
    """What all of SGLang's host pools have."""

    shared_allocation_domain: Any = None
    can_use_write_back_jit = False
    dcp_size = 1
    pin_memory = True
    pool_label = "kv"

    def __init__(self, layers: int, tokens: int, page: int, layout: str, device: Any) -> None:
        self.layer_num = self.target_layer_num = layers
        self.size, self.page_size, self.layout, self._transfer_device = tokens, page, layout, device
        self.token_stride_size = 0
        self.calls: list[Any] = []

    def prepare_transfer_indices(self, host_indices, device_indices, io_backend):
        return host_indices, device_indices

    def backup_from_device_all_layer_physical(self, device_pool, host_indices, device_indices, io_backend):
        self.calls.append(("store", None, host_indices, device_indices, io_backend))

    def load_to_device_per_layer_physical(
        self, device_pool, host_indices, device_indices, layer_id, io_backend, *, is_draft=False
    ):
        self.calls.append(("load", layer_id, host_indices, device_indices, io_backend))

    def fill(self, parts: int, row: int, device_tokens: int, gap: int = 0) -> None:
        """Bytes of host and device; rows of the device lie `gap` bytes apart."""
        layers, page, random = self.layer_num, self.page_size, np.random.default_rng(3)
        shape = {
            "layer_first": (parts, layers, self.size, row),
            "page_first": (parts, self.size, layers, row),
            "page_first_direct": (parts, self.size // page, layers, page, row),
        }.get(self.layout, (parts, self.size, row, layers))
        self.token_stride_size = row
        self.kv_buffer = Tensor(random.integers(0, 256, shape, np.uint8))
        wide = [random.integers(0, 256, (device_tokens, row + gap), np.uint8)[:, :row] for _ in range(parts * layers)]
        self.device = [wide[part * layers : (part + 1) * layers] for part in range(parts)]

    def host_rows(self, part: int, layer: int, tokens: Any) -> Any:
        array, tokens = self.kv_buffer.array[part], np.asarray(tokens)
        if self.layout == "layer_first":
            return array[layer, tokens]
        if self.layout == "page_first":
            return array[tokens, layer]
        return array[tokens // self.page_size, layer, tokens % self.page_size]

    def snapshot(self) -> Any:
        return self.kv_buffer.array.copy(), [[layer.copy() for layer in part] for part in self.device]


class MHATokenToKVPoolHost(HostPool):
    def __init__(self, layers=3, tokens=64, page=4, layout="layer_first", device=DEVICE, drafts=0, gap=0):
        super().__init__(layers + drafts, tokens, page, layout, device)
        self.target_layer_num = layers
        self.fill(2, 24, 2 * tokens, gap)
        self.device_k_buffers, self.device_v_buffers = (tuple(map(Tensor, part)) for part in self.device)
        plain = SimpleNamespace(layout=SimpleNamespace(value="nhd"))
        self._buffer_infos = [SimpleNamespace(buffers=plain, scales=None, transfer_buffers=None)]


class MLATokenToKVPoolHost(HostPool):
    _is_dummy = _layer_shard_enabled = False
    _native_buffers = None

    def __init__(self, layers=3, tokens=64, page=4, layout="layer_first", device=DEVICE, first=0):
        super().__init__(layers, tokens, page, layout, device)
        self.fill(1, 40, 2 * tokens)
        self.device_kv_buffers = tuple(map(Tensor, self.device[0]))
        self._target_layer_indices = tuple(range(first, first + layers))
        self._host_layer_by_controller = {first + i: i for i in range(layers)}
        self._buffer_index_by_layer = dict(self._host_layer_by_controller)


class OtherHostPool(HostPool):
    """A kind of pool that kvswap does not know."""


class L2Transfer(NamedTuple):
    host_pool: Any
    device_pool: Any
    host_indices: Any
    device_indices: Any
    layer_mapper: Any = None
    is_draft: bool = False


class TransferCompletion(NamedTuple):
    start_event: Any
    finish_event: Any
    timing_enabled: bool


class Switch:
    value: Any = None

    def get(self):
        return self.value


def add_modules(made: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """`made` with empty modules of these names, and of their packages, where it has none."""
    for name in names.values():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in made:
                made[path] = ModuleType(path)
                if end > 1:
                    setattr(made[".".join(parts[: end - 1])], parts[end - 1], made[path])
    return made


def put_in(monkeypatch: Any, modules: dict[str, Any], ours: tuple[str, ...]) -> None:
    """These modules are what is imported; kvswap's own (`ours`) are imported anew, without hooks of before."""
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(_plugin, "_hooks", [])
    monkeypatch.setattr(_plugin, "_incomplete", set())
    monkeypatch.setattr(logging.getLogger("kvswap"), "parent", logging.getLogger())


def modules(device: Any = DEVICE) -> dict[str, Any]:
    """What stands in, by the names that are imported."""
    made = add_modules({}, NAMES)
    of = {short: made[name] for short, name in NAMES.items()}
    of["environ"].envs = SimpleNamespace(SGLANG_TEST_HICACHE_H2D_DELAY_CYCLES=Switch(), SGLANG_HUGEPAGE_SIZE=Switch())
    of["mha"].MHATokenToKVPoolHost, of["mla"].MLATokenToKVPoolHost = MHATokenToKVPoolHost, MLATokenToKVPoolHost
    _transfer_module(of["transfer"], streams_of(device))
    _controllers(of)
    _hooks(of["hooks"])
    of["common"].HostTensorAllocator = _allocator()
    return made


def _transfer_module(module: Any, device_module: Any) -> None:
    class L2TransferEngine:
        def __init__(self, io_backend):
            self.io_backend = io_backend
            self.device_to_host_stream, self.host_to_device_stream = device_module.Stream(), device_module.Stream()
            self.log: list[Any] = []

        @contextmanager
        def _submission(self, transfers, stream, transfer_key, start_event=None):
            if start_event is None:
                start_event = device_module.Event()
                start_event.record()
            self.log.append("lease")
            try:
                with device_module.stream(stream):
                    start_event.wait(stream)
                    prepared = []
                    for each in transfers:
                        translate = getattr(each.device_pool, "host_transfer_translate", None)
                        device_indices = translate(each.device_indices) if translate else each.device_indices
                        prepared.append(each._replace(device_indices=device_indices))
                    begin, end = device_module.Event(enable_timing=True), device_module.Event(enable_timing=True)
                    begin.record()
                    yield prepared, TransferCompletion(begin, end, True)
                    end.record()
                    self.log.append("recorded")
            except Exception:
                stream.synchronize()
                raise
            finally:
                self.log.append("release")

        def submit_device_to_host(self, transfers):
            self.log.append("own store")
            with self._submission(transfers, self.device_to_host_stream, "device_to_host") as (prepared, completion):
                for each in prepared:
                    each.host_pool.backup_from_device_all_layer_physical(*each[1:4], self.io_backend)
            return completion

        def submit_host_to_device(self, transfers, *, transfer_layer_id_max, start_event=None, on_layer_done=None):
            self.log.append("own load")
            with self._submission(transfers, self.host_to_device_stream, "host_to_device", start_event) as (
                prepared,
                completion,
            ):
                for layer in range(transfer_layer_id_max):
                    for each in prepared:
                        each.host_pool.load_to_device_per_layer_physical(*each[1:4], layer, self.io_backend)
                    if on_layer_done is not None:
                        on_layer_done(layer)
            return completion

    module.device_module, module.L2TransferEngine = device_module, L2TransferEngine
    module.L2Transfer, module.TransferCompletion = L2Transfer, TransferCompletion


def _controllers(of: dict[str, Any]) -> None:
    class HiCacheController:
        def __init__(self, mem_pool_host, io_backend="direct"):
            self.mem_pool_host, self.io_backend, self.device = mem_pool_host, io_backend, DEVICE
            self.l2_transfer_engine = of["controller"].L2TransferEngine(io_backend)

        def move_indices(self, host_indices, device_indices):
            """To the CPU."""
            return tuple(getattr(tokens, "values", tokens) for tokens in (host_indices, device_indices))

    class HybridCacheController(HiCacheController):
        def _move_pool_indices(self, host_pool, host_indices, device_indices, *, write_back_jit):
            return self.move_indices(host_indices, device_indices)

    of["controller"].HiCacheController, of["hybrid"].HybridCacheController = HiCacheController, HybridCacheController
    of["controller"].L2TransferEngine = of["transfer"].L2TransferEngine


def _hooks(module: Any) -> None:
    class HookType(Enum):
        AROUND = "around"
        REPLACE = "replace"

    class HookRegistry:
        _hooks: dict[str, list[Any]] = {}
        _patched: set[str] = set()
        broken: set[str] = set()  # targets that cannot be applied

        @classmethod
        def register(cls, target, hook, hook_type, *, source=None):
            cls._hooks.setdefault(target, []).append((hook_type, hook, source))

        @classmethod
        def apply_hooks(cls):
            for target in sorted(cls._hooks, key=lambda target: not isinstance(cls._hooks[target][0][1], type)):
                if target not in cls._patched and target not in cls.broken:
                    cls._apply(target)
                    cls._patched.add(target)

        @classmethod
        def _apply(cls, target):
            path, _, name = target.rpartition(".")
            try:
                owner: Any = importlib.import_module(path)
            except ModuleNotFoundError:
                path, _, kind = path.rpartition(".")
                owner = getattr(importlib.import_module(path), kind)
            original = wrapped = getattr(owner, name)
            for kind, hook, _ in cls._hooks[target]:
                wrapped = hook if kind is HookType.REPLACE else _around(wrapped, hook)
            setattr(owner, name, wrapped)
            for module in [module for path, module in sys.modules.items() if path.startswith("sglang")]:
                for other, value in list(vars(module).items()):
                    if value is original:
                        setattr(module, other, wrapped)

    module.HookType, module.HookRegistry = HookType, HookRegistry


def _around(original: Any, hook: Any) -> Any:
    @functools.wraps(original)
    def wrapper(*given, **options):
        return hook(original, *given, **options)

    return wrapper


def _allocator() -> Any:
    class HostTensorAllocator:
        def __init__(self):
            self.dtype = self.dims = None

        def allocate(self, dims, dtype, device):
            return "SGLang's own"

    return HostTensorAllocator
