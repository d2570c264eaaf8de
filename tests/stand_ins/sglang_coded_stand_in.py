"""As much of SGLang's shape as host pools of coded pages meet, beside what sglang_copies_stand_in has: constructors and
sizes of host pools, and a tree that finds prefixes. tests/integration/sglang_codec.py runs the same code under SGLang
itself."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,attr-defined,misc,no-any-return"

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import sglang_copies_stand_in as copies
from sglang_copies_stand_in import Tensor

import kvswap

PAGE, ROW = 4, 256  # tokens of a page, bytes of a token
NAMES = {
    "base": "sglang.srt.mem_cache.pool_host.base",
    "tree": "sglang.srt.mem_cache.unified_radix_cache",
    "core": "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface",
    "component": "sglang.srt.mem_cache.unified_cache.component_type",
    "context": "sglang.srt.runtime_context",
}


class DType:
    def __init__(self, name: str, itemsize: int) -> None:
        self.name, self.itemsize = name, itemsize


class ComponentType(Enum):
    FULL = "full"
    SWA = "swa"


class Indices(copies.Ids):
    def cpu(self):
        return self


class HostKVCache:
    shared_allocation_domain: Any = None
    dcp_size = 1

    def __init__(self, host_size: int, page_size: int, layout: str, pool_label: str) -> None:
        self.page_size, self.layout, self.pool_label = page_size, layout, pool_label
        self.size_per_token = self.get_size_per_token()
        self.page_num = host_size // self.size_per_token // page_size
        self.size = self.page_num * page_size
        self.pin_memory, self.device, self.allocator = True, "cpu", None
        self.kv_buffer = self.init_kv_buffer()
        self.clear()

    def clear(self):
        self.used = np.zeros(self.size, bool)

    def alloc(self, tokens):
        free = np.flatnonzero(~self.used)[:tokens].view(Indices)
        self.used[free] = True
        return free

    def free(self, indices):
        self.used[indices] = False
        return len(indices)

    def get_size_per_token(self):
        raise NotImplementedError

    def init_kv_buffer(self):
        raise NotImplementedError

    def prepare_transfer_indices(self, host_indices, device_indices, io_backend):
        return host_indices, device_indices

    def backup_from_device_all_layer_physical(self, *given):
        self.backup_from_device_all_layer(*given)


class MHATokenToKVPoolHost(HostKVCache):
    def __init__(self, buffer_info, host_to_device_ratio, host_size, page_size, layout, *, pool_label="kv"):
        self.layer_num = self.target_layer_num = len(buffer_info.buffers.k)
        self.dtype, self._transfer_device, self._buffer_infos = buffer_info.dtype, buffer_info.device, [buffer_info]
        super().__init__(host_size, page_size, layout, pool_label)
        self.device_k_buffers, self.device_v_buffers = buffer_info.buffers.k, buffer_info.buffers.v
        self._initialize_transfer_views(buffer_info, None)

    def get_size_per_token(self):
        return 2 * self.layer_num * ROW

    def _initialize_transfer_views(self, buffer_info, write_back_staging):
        raise AssertionError("SGLang's own views of its layouts")


class MLATokenToKVPoolHost(HostKVCache):
    _is_dummy = _layer_shard_enabled = False
    _native_buffers = None

    def __init__(self, buffer_info, host_to_device_ratio, host_size, page_size, layout, *, pool_label="kv", dcp_size=1):
        self.layer_num = len(buffer_info.buffers)
        self.dtype, self._transfer_device = buffer_info.dtype, buffer_info.device
        super().__init__(host_size, page_size, layout, pool_label)
        self.device_kv_buffers = buffer_info.buffers
        self._target_layer_indices = tuple(range(self.layer_num))
        self._host_layer_by_controller = {i: i for i in range(self.layer_num)}
        self._buffer_index_by_layer = dict(self._host_layer_by_controller)
        self._initialize_transfer_views()

    def get_size_per_token(self):
        return self.layer_num * ROW

    def _initialize_transfer_views(self):
        raise AssertionError("SGLang's own views of its layouts")


@dataclasses.dataclass
class Match:
    key: Any


class UnifiedTreeCoreInterface:
    def build_load_back_spec(self, node_id, req=None):
        """A node's host pages are those of all tokens that the device does not have."""
        return SimpleNamespace(host_indices=node_id), {}


class UnifiedRadixCache:
    """One prompt, whose first `on_device` tokens are on the device, and the others in host memory, at `rows`."""

    def __init__(self, *components: ComponentType) -> None:
        self.tree_components = components or (ComponentType.FULL,)
        self.tree_core, self.pp_size, self.host_pool_group = UnifiedTreeCoreInterface(), 1, None
        self.on_device, self.rows, self.elsewhere, self.acks = 0, np.zeros(0, np.int64), [], []
        self.at_start: Any = None  # the storage backend

    def hold(self, host_pool, engine):
        self.host_pool_group = SimpleNamespace(entries=[SimpleNamespace(name="kv", host_pool=host_pool)])
        self.host_pool_group.anchor_entry = self.host_pool_group.entries[0]
        self.cache_controller = SimpleNamespace(l2_transfer_engine=engine, storage_backend=self.at_start)

    def init_hicache(self, server_args, params):
        self.hold(*params)

    def match_prefix(self, params):
        length = min(len(params.key), self.on_device + len(self.rows))
        hit = max(0, length - self.on_device)
        on_device = min(length, self.on_device)
        return SimpleNamespace(device_prefix_len=on_device, host_hit_length=hit, best_match_node=self.rows[:hit])

    def attach_storage_backend(self, storage_backend):
        self.cache_controller.storage_backend = storage_backend
        return True, ""

    def detach_storage_backend(self):
        self.cache_controller.storage_backend = None

    def _log_write_ack_metrics(self, ack):
        self.acks.append(ack)

    def _all_reduce_attn_groups(self, tensor, op):
        assert op == "max"
        tensor[self.elsewhere] = 1


def modules(device: Any) -> dict[str, Any]:
    """What stands in, by the names that are imported."""
    made = copies.add_modules(copies.modules(device), NAMES)
    of = {short: made[name] for short, name in (NAMES | copies.NAMES).items()}
    of["mha"].MHATokenToKVPoolHost, of["mla"].MLATokenToKVPoolHost = MHATokenToKVPoolHost, MLATokenToKVPoolHost
    of["base"].HostKVCache, of["component"].ComponentType = HostKVCache, ComponentType
    of["tree"].UnifiedRadixCache = type("UnifiedRadixCache", (), dict(vars(UnifiedRadixCache)))  # hooks change it
    of["core"].UnifiedTreeCoreInterface = UnifiedTreeCoreInterface
    memory = SimpleNamespace(hicache_storage_backend=None, hicache_host_memory_mode="cache")
    disagg = SimpleNamespace(disaggregation_mode="null")
    of["context"].get_memory, of["context"].get_disagg = lambda: memory, lambda: disagg
    opened = kvswap.Device(device)

    def alloc_with_host_register(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes):
        assert dims[1] == registration_granularity_bytes
        array = np.frombuffer(opened.alloc(dims[0] * dims[1], host=True), np.uint8).reshape(dims)
        array[:] = 0xEE
        return Tensor(array)

    of["common"].alloc_with_host_register = alloc_with_host_register
    of["common"].ALLOC_MEMORY_FUNCS = defaultdict(lambda: alloc_with_host_register)
    reduce = SimpleNamespace(ReduceOp=SimpleNamespace(MAX="max"))
    made["torch"] = SimpleNamespace(uint8=np.uint8, from_numpy=lambda array: array, distributed=reduce)
    return made


class Cache:
    """A device pool of bf16 that fits the codec, and its coded host pool. device[part][layer]: arrays of bytes."""

    def __init__(self, device: Any, mla: bool = False, layers: int = 3, tokens: int = 64, **more: Any) -> None:
        opened, random = kvswap.Device(device), np.random.default_rng(1)
        self.device: list[list[Any]] = []
        for _ in range(1 if mla else 2):
            self.device.append([])
            for _ in range(layers):
                rows = np.frombuffer(opened.alloc(tokens * ROW), np.uint8).reshape(tokens, ROW)
                sign, exponent = (
                    random.integers(0, 2, (tokens, ROW // 2)),
                    random.integers(120, 128, (tokens, ROW // 2)),
                )
                rows.view(np.uint16)[:] = sign << 15 | exponent << 7 | random.integers(0, 128, (tokens, ROW // 2))
                self.device[-1].append(rows)
        tensors = [tuple(Tensor(layer) for layer in part) for part in self.device]
        info: Any = SimpleNamespace(dtype=more.pop("dtype", DType("torch.bfloat16", 2)), scales=None)
        info.device, info.transfer_buffers = self._like_torch(device), None
        if mla:
            info.kv_lora_rank, info.qk_rope_head_dim, info.buffers = ROW // 2 - 16, 16, tensors[0]
        else:
            layout = SimpleNamespace(value="nhd")
            info.head_num, info.head_dim = 2, ROW // 4
            info.buffers = SimpleNamespace(k=tensors[0], v=tensors[1], layout=layout)
        kind = sys.modules[copies.NAMES["mla" if mla else "mha"]]
        made = kind.MLATokenToKVPoolHost if mla else kind.MHATokenToKVPoolHost
        nbytes = more.pop("host_nbytes", 32 * PAGE * len(self.device) * layers * ROW)
        self.host = made(info, 2.0, nbytes, PAGE, "page_first", **more)

    @staticmethod
    def _like_torch(device: Any) -> Any:
        return type("Torch", (str,), {"type": "host"})(device)

    def spoil(self, token: int) -> None:
        """What no longer fits: exponents that are far apart."""
        self.device[0][0].view(np.uint16)[token] = (np.arange(ROW // 2) % 200 + 20) << 7
