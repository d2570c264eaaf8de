"""The part of SGLang that a host pool of several ranks meets, beside what sglang_copies_stand_in has: the host pool of
latents, the tree that makes it, and process groups. tests/integration/sglang_shared.py runs the same code under SGLang
itself."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,attr-defined,misc,no-any-return"

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np
import sglang_copies_stand_in as copies
from sglang_coded_stand_in import NAMES, ComponentType, DType
from sglang_copies_stand_in import L2Transfer, Tensor, pages

import kvswap

PAGE, LAYERS, WIDTH, HOST_PAGES, DEVICE_PAGES = 4, 3, 32, 24, 16  # WIDTH: elements of two bytes a token
OURS = ("kvswap.sglang._copies", "kvswap.sglang._memory", "kvswap.sglang._joint", "kvswap.sglang._shared")
SWITCHES = {"KVSWAP_SGLANG_COPIES": "1", "KVSWAP_SGLANG_SHARE": "1"}


class Group:
    """Of one rank, or of two, with a pipe between them."""

    def __init__(self, rank: int, pipe: Any = None, size: int = 0) -> None:
        self.rank, self.pipe, self.size = rank, pipe, size or (1 if pipe is None else 2)

    def exchange(self, value: Any) -> Any:
        """The other rank's, for one's own."""
        self.pipe.send(value)
        assert self.pipe.poll(60), "the other rank does not call"
        return self.pipe.recv()


class Flag:
    def __init__(self, value: Any, dtype: Any = None) -> None:
        self.value = value

    def item(self):
        return self.value

    tolist = item


class Bytes:
    """A tensor of bytes, of which another one is made."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def view(self, dtype):
        return Bytes(self.array.view(f"u{dtype.itemsize}"))

    def reshape(self, dims):
        return Tensor(self.array.reshape(dims))


def torch() -> Any:
    def all_reduce(flag, op, group):
        assert op == "min"
        flag.value = min(flag.value, group.exchange(flag.value))

    def broadcast(told, src, group):
        assert src == 10
        found = group.exchange(told.value)
        told.value = told.value if group.rank == 0 else found

    distributed = SimpleNamespace(
        ReduceOp=SimpleNamespace(MIN="min"),
        get_world_size=lambda group: group.size,
        get_rank=lambda group: group.rank,
        get_process_group_ranks=lambda group: [10 + rank for rank in range(group.size)],
        all_reduce=all_reduce,
        broadcast=broadcast,
    )

    def frombuffer(memory, dtype, count):
        return Bytes(np.frombuffer(memory, dtype, count))

    return SimpleNamespace(uint8=np.uint8, frombuffer=frombuffer, tensor=Flag, distributed=distributed)


class HostKVCache:
    """Free pages are given out in ascending order."""

    shared_allocation_domain: Any = None
    can_use_write_back_jit = False
    dcp_size = 1
    pin_memory = True
    pool_label = "kv"

    def _allocate_host_buffer(self):
        budget = sys.modules[NAMES["base"]].budget
        assert self.size * self.size_per_token <= budget[-1], "SGLang: not enough host memory"
        self.kv_buffer = self.init_kv_buffer()

    def clear(self):
        self.cleared = True

    def destroy(self):
        raise AssertionError("SGLang unregisters memory that it did not register")

    def prepare_transfer_indices(self, host_indices, device_indices, io_backend):
        return host_indices, device_indices

    def backup_from_device_all_layer_physical(self, *given):
        self.backup_from_device_all_layer(*given)

    def load_to_device_per_layer_physical(self, device_pool, host_indices, device_indices, layer_id, *_, **named):
        self.calls.append(("load", layer_id))


class MLATokenToKVPoolHost(HostKVCache):
    _is_dummy = _layer_shard_enabled = False
    _native_buffers = None

    def __init__(self, layout: str, device: Any, tensors: Any, shard: bool = False) -> None:
        self.layout, self._transfer_device, self._layer_shard_enabled = layout, device, shard
        self.layer_num, self.kv_cache_dim, self.dtype = LAYERS, WIDTH, DType("torch.bfloat16", 2)
        self.size_per_token = LAYERS * WIDTH * 2
        self.page_size, self.page_num, self.size = PAGE, HOST_PAGES, HOST_PAGES * PAGE
        self.device_kv_buffers, self.calls = tensors, list[Any]()
        self._target_layer_indices = tuple(range(LAYERS))
        self._host_layer_by_controller = {i: i for i in range(LAYERS)}
        self._buffer_index_by_layer = dict(self._host_layer_by_controller)
        self._allocate_host_buffer()
        self.clear()
        self._initialize_transfer_views()

    def init_kv_buffer(self):
        self.token_stride_size = WIDTH * 2
        dims = {
            "layer_first": (LAYERS, self.size, 1, WIDTH),
            "page_first": (self.size, LAYERS, 1, WIDTH),
            "page_first_direct": (self.page_num, LAYERS, PAGE, 1, WIDTH),
        }[self.layout]
        return Tensor(np.zeros(dims, np.uint16))

    def _initialize_transfer_views(self):
        self.can_use_write_back_jit = self.layout == "page_first"

    def backup_from_device_all_layer(self, *given):
        self.calls.append(("store", None))


class UnifiedRadixCache:
    def __init__(self, group: Any, **more: Any) -> None:
        self.tree_components, self.pp_size = (ComponentType.FULL,), 1
        self.tp_group, self.attn_tp_group, self.attn_cp_group = group, None, None
        for name, value in more.items():
            setattr(self, name, value)

    def init_hicache(self, server_args, params):
        """server_args: what makes the host pool; params: the engine of the copies."""
        entry = SimpleNamespace(name="kv", host_pool=server_args())
        self.host_pool_group = SimpleNamespace(entries=[entry])
        self.cache_controller = SimpleNamespace(l2_transfer_engine=params)
        return "made"


def modules(device: Any) -> dict[str, Any]:
    """What stands in, by the names that are imported."""
    made = copies.add_modules(copies.modules(device), NAMES)
    of = {short: made[name] for short, name in (NAMES | copies.NAMES).items()}
    of["mla"].MLATokenToKVPoolHost, of["base"].HostKVCache = MLATokenToKVPoolHost, HostKVCache
    of["component"].ComponentType = ComponentType
    of["tree"].UnifiedRadixCache = type("UnifiedRadixCache", (), dict(vars(UnifiedRadixCache)))  # hooks change it
    memory = SimpleNamespace(hicache_host_memory_mode="cache")
    disagg = SimpleNamespace(disaggregation_mode="null")
    of["context"].get_memory, of["context"].get_disagg = lambda: memory, lambda: disagg
    of["base"].budget = [HOST_PAGES * PAGE * LAYERS * WIDTH * 2 // 2]  # a rank's part of the machine's

    @contextmanager
    def host_memory_budget_scope(budget_bytes):
        of["base"].budget.append(budget_bytes)
        yield
        of["base"].budget.pop()

    of["base"].host_memory_budget_scope = host_memory_budget_scope
    made["torch"] = torch()
    return made


class Rank:
    """A rank of an SGLang with kvswap's hooks. The bytes of its GPU are the same on all ranks."""

    def __init__(self, group: Group, device: str, layout: str = "page_first_direct", tree: Any = None, **pool: Any):
        opened, random = kvswap.Device(device), np.random.default_rng(5)
        self.device: list[Any] = []
        for _ in range(LAYERS):
            rows = np.frombuffer(opened.alloc(DEVICE_PAGES * PAGE * WIDTH * 2), np.uint16).reshape(-1, WIDTH)
            rows[:] = random.integers(0, 1 << 16, rows.shape)
            self.device.append(rows)
        of = {short: sys.modules[name] for short, name in (NAMES | copies.NAMES).items()}
        tensors, torch_device = tuple(map(Tensor, self.device)), type("Torch", (str,), {"type": "host"})(device)
        self.engine = of["controller"].L2TransferEngine("direct")
        self.tree = of["tree"].UnifiedRadixCache(group, **(tree or {}))
        kind = of["mla"].MLATokenToKVPoolHost
        assert self.tree.init_hicache(lambda: kind(layout, torch_device, tensors, **pool), self.engine) == "made"
        (entry,) = self.tree.host_pool_group.entries
        self.host, self.ends = entry.host_pool, list[Any]()

    def store(self, host: list[int], device: list[int]) -> int:
        """Begin a write-back; its number."""
        call = L2Transfer(self.host, object(), pages(host, PAGE), pages(device, PAGE))
        self.ends.append(self.engine.submit_device_to_host([call]))
        return len(self.ends) - 1

    def has_ended(self, number: int) -> bool:
        return self.ends[number].finish_event.query()

    def end(self, number: int) -> None:
        self.ends[number].finish_event.synchronize()

    def load(self, host: list[int], device: list[int], layers: int = LAYERS) -> list[int]:
        """The layers for which events were recorded, in the order in which they were."""
        self.done = list[int]()
        call = L2Transfer(self.host, object(), pages(host, PAGE), pages(device, PAGE))
        options = {"transfer_layer_id_max": layers, "on_layer_done": self.done.append}
        self.engine.submit_host_to_device([call], **options).finish_event.synchronize()
        return self.done

    def rows(self, device: list[int]) -> Any:
        """The bytes of pages of the GPU: layer, page, token."""
        return np.stack([layer.reshape(DEVICE_PAGES, PAGE, WIDTH)[device] for layer in self.device])

    def host_rows(self, host: list[int]) -> Any:
        array, at = self.host.kv_buffer.array, np.asarray(pages(host, PAGE))
        if self.host.layout == "page_first":
            found = array[at].swapaxes(0, 1)
        else:
            found = array[at // PAGE, :, at % PAGE].swapaxes(0, 1)
        return found.reshape(LAYERS, len(host), PAGE, WIDTH)

    def fill(self, device: list[int], value: int) -> None:
        for layer in self.device:
            layer.reshape(DEVICE_PAGES, PAGE, WIDTH)[device] = value

    def stats(self) -> dict[str, int]:
        return dict(self.host.member.stats())


def other(control: int, pipe: int, device: str, layout: str, piece_nbytes: int) -> None:
    """Rank 1, in a process of its own: it does what rank 0's test asks for, until that closes the pipe."""
    asked, group = Connection(control), Group(1, Connection(pipe))
    os.environ.update(SWITCHES)
    sys.modules.update(modules(device))
    from kvswap import share
    from kvswap.sglang import register

    register()
    sys.modules[copies.NAMES["hooks"]].HookRegistry.apply_hooks()
    join = share.join
    share.join = lambda *given, **named: join(*given, piece_nbytes=piece_nbytes, **named)  # type: ignore[assignment]
    try:
        rank: Any = Rank(group, device, layout)
        asked.send(None)
        while True:
            name, given = asked.recv()
            try:
                asked.send(eval(name, {"rank": rank, "group": group})(*given))
            except kvswap.Error as error:
                asked.send(str(error))
    except EOFError:
        pass
