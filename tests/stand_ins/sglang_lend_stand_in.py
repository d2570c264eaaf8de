"""The part of SGLang that lent links meet, beside what sglang_copies_stand_in has: an allocator of host memory that the
device registers, pools that are cleared and destroyed, the tree that makes them, and a scheduler. An engine of it, here
or in another process. tests/integration/sglang_lend.py runs the same code under SGLang itself."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,attr-defined,misc,no-any-return"

from __future__ import annotations

import importlib
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import sglang_copies_stand_in as copies
import sglang_shared_stand_in as shared
from sglang_coded_stand_in import NAMES, ComponentType
from sglang_copies_stand_in import L2Transfer, Tensor, pages

import kvswap
from kvswap.sglang import _plugin

PAGE, LAYERS, HOST_PAGES, DEVICE_PAGES = 4, 3, 96, 64
OURS = ("kvswap.sglang._copies", "kvswap.sglang._memory", "kvswap.sglang._joint", "kvswap.sglang._lend")
SWITCHES = {"KVSWAP_SGLANG_COPIES": "1", "KVSWAP_SGLANG_LEND": "1"}
LEAST = 24  # pages of a load that goes over several links
ALL = {**copies.NAMES, **NAMES, "scheduler": "sglang.srt.managers.scheduler"}


class HostTensorAllocator:
    def allocate(self, dims, dtype, device):
        return Tensor(np.zeros(dims, np.uint8))


class HostKVCache:
    cleared = 0

    def clear(self):
        self.cleared += 1

    def destroy(self):
        kvswap.Device(self._transfer_device).unregister(self.kv_buffer.data_ptr())
        self.kv_buffer = None


class Allocated(HostKVCache):
    def fill(self, parts, row, device_tokens, gap=0):
        super().fill(parts, row, device_tokens, gap)
        self.allocator = sys.modules[ALL["common"]].HostTensorAllocator()
        self.kv_buffer = self.allocator.allocate(self.kv_buffer.array.shape, np.dtype(np.uint8), "cpu")
        nbytes = self.kv_buffer.array.nbytes
        kvswap.Device(self._transfer_device).register(self.kv_buffer.data_ptr(), nbytes)  # as SGLang pins it
        self.clear()


class MHATokenToKVPoolHost(Allocated, copies.MHATokenToKVPoolHost):
    pass


class MLATokenToKVPoolHost(Allocated, copies.MLATokenToKVPoolHost):
    pass


class Scheduler:
    def __init__(self, stream: Any, overlap: bool = True) -> None:
        self.enable_overlap = overlap
        self.forward_stream, self.schedule_stream = (stream, None) if overlap else (None, stream)

    def run_batch(self, batch, pp_proxy_tensors=None):
        return batch()


class UnifiedRadixCache:
    def __init__(self, group: Any = None, **more: Any) -> None:
        self.tree_components, self.pp_size = (ComponentType.FULL,), 1
        self.tp_group, self.attn_tp_group, self.attn_cp_group = group, None, None
        for name, value in more.items():
            setattr(self, name, value)

    def init_hicache(self, server_args, params):
        """params: what makes the host pool and the controller."""
        host, self.cache_controller = params()
        self.host_pool_group = SimpleNamespace(entries=[SimpleNamespace(host_pool=host)])
        return "made"


def modules(device: Any) -> dict[str, Any]:
    """What stands in, by the names that are imported."""
    made = copies.add_modules(copies.modules(device), ALL)
    of = {short: made[name] for short, name in ALL.items()}
    of["mha"].MHATokenToKVPoolHost, of["mla"].MLATokenToKVPoolHost = MHATokenToKVPoolHost, MLATokenToKVPoolHost
    for name, kind in (("base", HostKVCache), ("tree", UnifiedRadixCache), ("scheduler", Scheduler)):
        setattr(of[name], kind.__name__, kind)
    of["common"].HostTensorAllocator = HostTensorAllocator
    of["component"].ComponentType = ComponentType
    memory = SimpleNamespace(hicache_host_memory_mode="cache", hicache_mem_layout="page_first_direct")
    disagg = SimpleNamespace(disaggregation_mode="null")
    of["context"].get_memory, of["context"].get_disagg = lambda: memory, lambda: disagg
    made["torch"] = shared.torch()
    return made


def hook() -> None:
    _plugin.register()
    sys.modules[ALL["hooks"]].HookRegistry.apply_hooks()


class Engine:
    """An SGLang with kvswap's hooks. name: of the engines that lend to each other."""

    def __init__(
        self,
        name: str,
        device: str,
        kind: str = "mha",
        layout: str = "page_first_direct",
        policy: str = "write_back",
        tree: Any = None,
        saver: bool = False,
    ) -> None:
        of = {short: sys.modules[path] for short, path in ALL.items()}
        of["context"].get_memory().hicache_mem_layout = layout
        self.copies = of["controller"].L2TransferEngine("direct")

        def make():
            pool = of[kind].MHATokenToKVPoolHost if kind == "mha" else of[kind].MLATokenToKVPoolHost
            host = pool(LAYERS, HOST_PAGES * PAGE, PAGE, layout, device)
            return host, SimpleNamespace(l2_transfer_engine=self.copies, write_policy=policy)

        row = PAGE * LAYERS * (48 if kind == "mha" else 40)  # of a page
        settings, lend = _plugin.lend, importlib.import_module("kvswap.share._lend")
        lend._LOOK = 0.1
        if OURS[-1] in sys.modules:
            ours = sys.modules[OURS[-1]]
            ours._PIECE, ours._LEAST_STORE, ours._STALL = 4 * row, LEAST * row, 10.0
        _plugin.lend = lambda: settings() and _plugin.Lend(name, 3, LEAST * row)
        try:
            self.tree = of["tree"].UnifiedRadixCache(**(tree or {}))
            args = SimpleNamespace(enable_memory_saver=saver)
            assert self.tree.init_hicache(args, make) == "made"
        finally:
            _plugin.lend = settings
        (entry,) = self.tree.host_pool_group.entries
        self.host = entry.host_pool
        self.scheduler = of["scheduler"].Scheduler(of["transfer"].device_module.Stream())
        self.rng = np.random.default_rng(os.getpid())

    @property
    def lending(self) -> Any:
        return sys.modules[OURS[-1]]._pools[self.host].lending

    def peers(self) -> list[int]:
        return list(self.lending.member.peers)

    def lent(self) -> list[list[Any]]:
        """Whether it is lent, and bytes brought D2H and H2D, of each loan."""
        return [[loan.lends, *loan.brought] for loan in self.lending.loans]

    def brought(self) -> list[int]:
        """By others, stores and loads."""
        stats = self.lending.member.stats()
        return [stats["brought_by_others_d2h"], stats["brought_by_others_h2d"]]

    def store(self, host: Any, device: Any) -> Any:
        call = L2Transfer(self.host, object(), pages(host, PAGE), pages(device, PAGE))
        return self.copies.submit_device_to_host([call]).finish_event

    def load(self, host: Any, device: Any) -> list[int]:
        """The layers for which events were recorded, in the order in which they were."""
        done = list[int]()
        call = L2Transfer(self.host, object(), pages(host, PAGE), pages(device, PAGE))
        end = self.copies.submit_host_to_device([call], transfer_layer_id_max=LAYERS, on_layer_done=done.append)
        end.finish_event.synchronize()
        return done

    def rows(self, device: Any) -> Any:
        """The GPU's bytes of pages."""
        tokens = np.asarray(pages(device, PAGE))
        return np.stack([layer[tokens] for part in self.host.device for layer in part])

    def check(self, count: int = 48) -> list[int]:
        """New bytes are stored and loaded elsewhere, and all are compared; what came over other links."""
        before = self.brought()
        host = [int(page) for page in self.rng.permutation(HOST_PAGES)[:count]]
        device = [int(page) for page in self.rng.permutation(DEVICE_PAGES)[:count]]
        tokens = np.asarray(pages(device, PAGE))
        for part in self.host.device:
            for layer in part:
                layer[:] = 0
                layer[tokens] = self.rng.integers(0, 256, (len(tokens), layer.shape[1]), np.uint8)
        memory, rows = self.host.kv_buffer.array.copy(), self.rows(device)
        self.store(host, device).synchronize()
        places = np.asarray(pages(host, PAGE))
        for part, layers in enumerate(self.host.device):
            for layer, right in enumerate(layers):
                assert np.array_equal(self.host.host_rows(part, layer, places), right[tokens]), (part, layer)
                if self.host.layout == "page_first":
                    memory[part, places, layer] = right[tokens]
                else:
                    memory[part, places // PAGE, layer, places % PAGE] = right[tokens]
                right[:] = 0
        assert np.array_equal(self.host.kv_buffer.array, memory), "a store wrote elsewhere"
        target = [int(page) for page in self.rng.permutation(DEVICE_PAGES)[:count]]
        assert self.load(host, target) == list(range(LAYERS))
        assert np.array_equal(self.rows(target), rows)
        others = [page for page in range(DEVICE_PAGES) if page not in target]
        assert not self.rows(others).any(), "a load wrote elsewhere"
        return [now - first for now, first in zip(self.brought(), before, strict=True)]


def serve() -> None:
    """An engine in a process of its own, which evaluates lines."""
    given = json.loads(sys.argv[1])
    os.environ.update(SWITCHES)
    sys.modules.update(modules(given["device"]))
    hook()
    names = {"engine": Engine(**given)}
    for line in sys.stdin:
        print(json.dumps(eval(line, names)), flush=True)
    names["engine"].host.destroy()
