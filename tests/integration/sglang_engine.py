"""One rank of an SGLang without a model, on the CPU: its own radix tree, cache controller, pools and storage calls.

What there is of a model is here: the KV of a token is a function of the tokens up to it, of layer, head and K or V, so
that the bytes of every token that SGLang counts as computed can be checked. What stands in: the copies between device
and host pools, which SGLang has for GPUs only (transfer_kv_..._direct), unless kvswap does them; pinning, and operators
of torchvision, which SGLang imports and KV caching does not use.
"""

# mypy: ignore-errors

from __future__ import annotations

import json
import os
import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):  # its package for CUDA beside a torch for the CPU
    _library = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms", "roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool", "deform_conv2d"):
        _library.define(f"{_name}(Tensor a) -> Tensor")
    for _name in ("roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool", "deform_conv2d"):
        _library.define(f"_{_name}_backward(Tensor a) -> Tensor")

import sglang
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.pool_host import common, mha, mla
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context, get_parallel

VERSION = sglang.__version__
PAGE, LAYERS, HEADS, HEAD_DIM, LATENT, ROPE = 16, 3, 2, 16, 48, 16
WINDOW = 2 * PAGE
NONSENSE = -7


def _rows(indices: torch.Tensor, page_size: int) -> list[int]:
    return indices[::page_size].tolist()


def _all_layers_to_host(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    layers = len(src_ptrs) // len(dst_ptrs)
    for i, source in enumerate(src_ptrs):
        target = dst_ptrs[i // layers]
        for row, to in zip(_rows(src_indices, page_size), _rows(dst_indices, page_size), strict=True):
            place = target[to // page_size, i % layers]
            place.copy_(source[row : row + page_size].reshape(place.shape))


def _layer_to_device(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        for row, to in zip(_rows(src_indices, page_size), _rows(dst_indices, page_size), strict=True):
            place = target[to : to + page_size]
            place.copy_(source[row // page_size, layer_id].reshape(place.shape))


def _rows_of_layers(src_layers, dst_layers, src_indices, dst_indices, page_size):
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices].reshape(target[dst_indices].shape)


common._cuda_host_register = lambda *given, **named: None
common._cuda_host_unregister = lambda *given, **named: None
for _module in () if os.environ.get("KVSWAP_SGLANG_COPIES") == "1" else (mha, mla):
    _module.transfer_kv_all_layer_direct_lf_pf = _all_layers_to_host
    _module.transfer_kv_per_layer_direct_pf_lf = _layer_to_device
    _module.transfer_kv_direct = _rows_of_layers


class Engine:
    """A rank: `options` of sglang_package.py, the rank, and the folder of the files; None: no storage backend."""

    def __init__(self, options: Any, rank: int, folder: Path | None, **extra: Any) -> None:
        self.options, self.rank, self.handles = options, rank, 0
        given = {"backend_name": "kvswap", "module_path": "kvswap.sglang", "class_name": "FileStorage"}
        given |= {
            "interface_v1": 1,
            "directory": str(folder),
            "capacity": 64 << 20,
            "revision": "that of this program",
            "prefetch_threshold": PAGE,
            **extra,
        }
        given = {name: value for name, value in given.items() if value is not None}
        self.override = get_context().override_server_args(
            tp_size=options.ranks,
            page_size=PAGE,
            enable_hierarchical_cache=True,
            hicache_io_backend="kernel" if options.layout == "page_first" else "direct",
            hicache_mem_layout=options.layout,
            hicache_ratio=2.0,
            hicache_size=getattr(options, "host_gb", 0),
            hicache_write_policy=getattr(options, "write_policy", "write_through"),
            hicache_storage_backend="dynamic" if folder else None,
            hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend_extra_config=json.dumps(given),
        )
        arguments = self.override.install()
        get_parallel().override_permanently(
            tp_rank=rank, pp_rank=0, attn_dcp_rank=0, attn_tp_rank=rank, attn_cp_rank=0, attn_dp_rank=0
        )
        shape = {"size": options.tokens, "page_size": PAGE, "dtype": torch.bfloat16, "layer_num": LAYERS}
        shape |= {"device": "cpu", "enable_memory_saver": False}
        self.windowed: set[int] = set()
        if options.mla:
            self.pool = MLATokenToKVPool(kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, **shape)
            self.parts = [(layer, 0, buffer) for layer, buffer in enumerate(self.pool.kv_buffer)]
        elif options.swa:
            self.windowed = {1}
            layers = {"swa_attention_layer_ids": [1], "full_attention_layer_ids": [0, 2]}
            del shape["layer_num"]
            self.pool = SWAKVPool(size_swa=options.tokens, head_num=HEADS, head_dim=HEAD_DIM, **layers, **shape)
            own = ((0, self.pool.full_kv_pool, 0), (2, self.pool.full_kv_pool, 1), (1, self.pool.swa_kv_pool, 0))
            self.parts = [
                (layer, part, (pool.k_buffer, pool.v_buffer)[part][at]) for layer, pool, at in own for part in (0, 1)
            ]
        else:
            self.pool = MHATokenToKVPool(head_num=HEADS, head_dim=HEAD_DIM, **shape)
            buffers = (self.pool.k_buffer, self.pool.v_buffer)
            self.parts = [(i, part, each) for part, layers in enumerate(buffers) for i, each in enumerate(layers)]
        given = (PAGE, torch.bfloat16, "cpu", self.pool, False)
        if options.swa:
            self.allocator = SWATokenToKVPoolAllocator(options.tokens, options.tokens, *given)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(options.tokens, *given)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(8, options.tokens, "cpu", False),
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tp_cache_group=dist.group.WORLD,
            tree_components=(ComponentType.FULL, *([ComponentType.SWA] if options.swa else [])),
            sliding_window_size=WINDOW if options.swa else None,
        )
        self.tree = UnifiedRadixCache(params)
        self.tree.init_hicache(arguments, params)
        assert self.tree.enable_storage == (folder is not None)
        kind = type(self.tree.cache_controller.l2_transfer_engine).__name__
        assert kind == ("CopyEngine" if options.copies else "L2TransferEngine"), kind
        self.checked = 0

    # -- the model ----------------------------------------------------------------------------------------------------

    def values(self, tokens: list[int], begin: int, part: int, layer: int, width: int) -> torch.Tensor:
        """What tokens[begin:] have in a layer, as int16, a row a token."""
        state, states = 1, []
        for token in tokens:
            state = (state * 31 + token + 1) % 65521
            states.append(state)
        rank = 0 if self.options.mla else self.rank
        own = torch.tensor(states[begin:], dtype=torch.int64)[:, None] * 7 + layer * 131 + part * 8209 + rank * 16411
        return ((own + torch.arange(width) * 37) % 32749).to(torch.int16)

    def rows(self, indices: torch.Tensor, layer: int) -> torch.Tensor:
        """Of a layer's buffer: layers with a window have rows of their own."""
        return self.allocator.full_to_swa_index_mapping[indices] if layer in self.windowed else indices

    def allocate(self, need: int) -> torch.Tensor | None:
        if not self.windowed or not need:
            return self.allocator.alloc(need) if need else torch.empty(0, dtype=torch.int64)
        full = self.allocator.full_attn_allocator.alloc(need)
        windowed = self.allocator.swa_attn_allocator.alloc(need)
        if full is not None and windowed is not None:
            self.allocator.set_full_to_swa_mapping(full, windowed)
        return full

    def compute(self, tokens: list[int], begin: int, indices: torch.Tensor) -> None:
        for layer, part, buffer in self.parts:
            flat = buffer.view(torch.int16).reshape(len(buffer), -1)
            flat[self.rows(indices, layer)] = self.values(tokens, begin, part, layer, flat.shape[1])

    def check(self, tokens: list[int], indices: torch.Tensor, layer: int) -> None:
        """The bytes of all these tokens in that layer; of a layer with a window, of the last ones."""
        begin = max(0, len(indices) - WINDOW) if layer in self.windowed else 0
        rows = self.rows(indices[begin:], layer)
        assert (rows > 0).all(), f"layer {layer}: tokens of the window are not on the device"
        for own_layer, part, buffer in self.parts:
            if own_layer == layer:
                flat = buffer.view(torch.int16).reshape(len(buffer), -1)
                right = flat[rows] == self.values(tokens, begin, part, layer, flat.shape[1])
                wrong = (~right.all(1)).nonzero().flatten().tolist()
                assert not wrong, f"rank {self.rank}: layer {layer}, {'KV'[part]}: wrong bytes of tokens {wrong}"
                self.checked += len(indices)

    def arrived(self) -> None:
        """The model's kernels run behind what its stream waits for; torch's stream of a CPU has no work."""
        stream = cache_controller.device_module.current_stream()
        if hasattr(stream, "synchronize"):
            stream.synchronize()

    # -- what SGLang's scheduler does ---------------------------------------------------------------------------------

    def until(self, condition: Any, what: str, seconds: float = 120.0) -> None:
        """All ranks make the same number of turns, because SGLang's own checks are collective."""
        end = time.monotonic() + seconds
        while True:
            self.tree.check_hicache_events()
            done = torch.tensor(int(bool(condition())))
            dist.all_reduce(done, op=dist.ReduceOp.MIN)
            if done.item():
                return
            assert time.monotonic() < end, f"{what} does not end"
            time.sleep(0.002)

    def serve(self, tokens: list[int]) -> tuple[int, int]:
        """One prompt of whole pages: how many tokens came from files, and how many were not computed at all."""
        tree, key = self.tree, RadixKey(array("q", tokens))
        self.handles += 1
        handle = CacheRequestHandle(f"request-{self.handles}", 0)
        found = tree.match_prefix(MatchPrefixParams(key=key))
        from_files = self.prefetch(handle, tokens, found) if tree.enable_storage else 0
        found = tree.match_prefix(MatchPrefixParams(key=key))
        rest = {"swa_host_hit_length": found.swa_host_hit_length, "mamba_host_hit_length": 0}
        rest |= {"kv": SimpleNamespace(mamba_pool_idx=None), "swa_branching_seqlen": None}
        request = SimpleNamespace(rid=handle.rid, last_node=found.last_device_node, **rest)
        tree.init_load_back(InitLoadBackParams(found.best_match_node, found.host_hit_length, req=request))
        counter = tree.cache_controller.layer_done_counter
        counter.set_consumer(tree.ready_to_load_host_cache())
        found = tree.match_prefix(MatchPrefixParams(key=key))
        known = tree.path_device_indices(found.last_device_node)
        for layer in range(LAYERS):
            counter.wait_until(layer)
            self.arrived()
            self.check(tokens[: len(known)], known, layer)
        lock = tree.lock(found.last_device_node)
        need = len(tokens) - len(known)
        if need > self.allocator.available_size():
            tree.evict_for_alloc(EvictParams(num_tokens=need - self.allocator.available_size()))
        new = self.allocate(need)
        assert new is not None, "no room on the device"
        self.compute(tokens, len(known), new)
        tree.insert(InsertParams(key=key, value=torch.cat([known, new]), prev_prefix_len=len(known)))
        tree.unlock(lock)
        return from_files, len(known)

    def prefetch(self, handle: Any, tokens: list[int], found: Any) -> int:
        """How many tokens came from files."""
        tree, matched = self.tree, found.device_prefix_len + found.host_hit_length
        tree.prefetch_from_storage(
            handle,
            found.last_host_node,
            array("q", tokens[matched:]),
            tree.get_last_hash_value(found.last_host_node),
            matched_prefix_tokens=tokens[:matched],
        )
        self.until(lambda: tree.check_prefetch_progress(handle), "a prefetch")
        return tree.pop_prefetch_loaded_span(handle)[0]

    def settle(self) -> None:
        """Until everything is in host memory and in files, or has failed."""
        self.tree.flush_pending_backups()
        pending = (self.tree.ongoing_write_through, self.tree.ongoing_backup, self.tree.ongoing_load_back)
        self.until(lambda: not any(pending), "a write-back")

    def forget(self) -> None:
        """The caches of device and host are emptied, and their bytes are made useless."""
        self.settle()
        if self.options.mla and self.options.ranks > 1:
            time.sleep(0.3)  # a rank that reads finds a new file of the one that writes
        self.tree.sanity_check()
        self.tree.reset()
        self.allocator.clear()
        for _, _, buffer in self.parts:
            buffer.view(torch.int16).fill_(NONSENSE)
        for entry in self.tree.host_pool_group.entries:
            entry.host_pool.kv_buffer.view(torch.int16).fill_(NONSENSE)
        dist.barrier()  # ranks may share the host pool

    def again(self, tokens: list[int]) -> int:
        """With nothing but the files: how many tokens come from them."""
        self.forget()
        from_files, known = self.serve(tokens)
        assert from_files == known, (from_files, known)
        return known

    @property
    def storage(self) -> Any:
        """kvswap's, without SGLang's injector around it."""
        found = self.tree.cache_controller.storage_backend
        return getattr(found, "_backend", found)

    @property
    def files(self) -> Any:
        return self.storage._pages["kv"].store._store

    def host_pool(self, layout: str) -> Any:
        """A further host pool of this model, in any layout."""
        shape = {"pin_memory": False, "device_capacity_tokens": self.options.tokens}
        shape |= {"start_layer": 0, "end_layer": LAYERS}
        if self.options.mla:
            given = self.pool.get_device_pool_infos()[0].buffer_info
            made = mla.MLATokenToKVPoolHost(given, 1.0, 0, PAGE, layout, target_layer_num=LAYERS, **shape)
        else:
            made = mha.MHATokenToKVPoolHost(self.pool._mha_buffer_info(), 1.0, 0, PAGE, layout, **shape)
        bits = made.kv_buffer.view(torch.int16)
        bits.copy_(torch.randint(0, 32749, bits.shape, generator=torch.Generator().manual_seed(1)).to(torch.int16))
        return made

    def close(self) -> None:
        self.settle()
        self.tree.shutdown()
        self.override.restore()
