"""A rank of vllm_package.py: vLLM's worker-side connector, and blocks that are written and checked.

In this process, or in one of its own, which shares vLLM's region of host memory with the others. Going to sleep and
waking up are those of vLLM's GPU worker, over memory that really goes.
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import inspect
import json
import mmap
import multiprocessing
import os
import traceback
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import vllm_replicas
from vllm.config import (
    CacheConfig,
    CUDAGraphMode,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.utils.hashing import sha256
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.outputs import KVConnectorOutput

import kvswap
import kvswap.vllm
from kvswap import testing
from kvswap.offload import _member

try:
    from vllm.v1.core import kv_cache_planning as planner
except ImportError:  # to 0.32
    from vllm.v1.core import kv_cache_utils as planner
from kvswap.vllm import _lend, _parts, _replicas
from kvswap.vllm._handler import VLLMHandler

TOKENS = 16  # of a block
HEADS, HEAD_SIZE = 2, 32  # of a rank
LATENT = 2 * HEADS * HEAD_SIZE  # of MLA, in place of K and V
PAGE = TOKENS * LATENT * 2  # float16, or bfloat16
DEFERS = "has_sync_kv_loads" in getattr(SchedulerOutput, "__dataclass_fields__", {})  # loads of no request of the step


def made(cls: Any, **values: Any) -> Any:
    """An object of a release's class, with those of the values that it has a place for."""
    names = {f.name for f in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in values.items() if name in names})


def longest_of(options: argparse.Namespace) -> int:
    """Tokens of a request."""
    return 16 << 10 if options.codec else 4096


def dtype_of(options: argparse.Namespace) -> str:
    return "bfloat16" if options.codec else "float16"


def model_folder(folder: Path, layers: int, dtype: str) -> str:
    """A configuration, and no weights: no model is loaded."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HEADS * HEAD_SIZE,
        "intermediate_size": 128,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "num_hidden_layers": layers,
        "vocab_size": 1000,
        "max_position_embeddings": 16 << 10,
        "rms_norm_eps": 1e-6,
        "torch_dtype": dtype,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def connector_of(options: argparse.Namespace) -> dict[str, str]:
    """Of the configuration."""
    if options.stock or options.simple:
        return {"kv_connector": "OffloadingConnector" if options.stock else "SimpleCPUOffloadConnector"}
    return {"kv_connector": "KVSwapConnector", "kv_connector_module_path": "kvswap.vllm"}


class NoStream:
    """A stream or an event of torch where there is no GPU."""

    def __init__(self, priority: int = 0) -> None:
        del priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def record(self, stream: Any) -> None:
        pass


def copies_by_plugin(on_gpu: bool) -> None:
    """KVSWAP_VLLM_SIMPLE_OFFLOAD=1 in the environment, as vLLM's plugin hook finds it."""
    os.environ["KVSWAP_VLLM_SIMPLE_OFFLOAD"] = "1"
    kvswap.vllm.register()
    if not on_gpu:
        torch.cuda.Stream = torch.Event = NoStream
        torch.cuda.current_stream = NoStream


def file_tier(folder: Path) -> dict[str, Any]:
    tier = {"type": "FileTier", "directory": str(folder / "kv"), "capacity": 64 << 20}
    if "module_path" in inspect.getsource(SecondaryTierFactory.get_tier_class):
        return tier | {"module_path": "kvswap.vllm"}
    if "FileTier" not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier("FileTier", "kvswap.vllm", "FileTier")
    return tier


def make_config(options: argparse.Namespace, folder: Path, engine_id: str, rank: int) -> VllmConfig:
    extra = {
        "cpu_bytes_to_use": 64 << 20,
        "block_size": TOKENS * options.blocks_per_chunk,
        "kvswap_wait_timeout_s": 60,
    }
    if options.stock or options.spec != "KVSwapOffloadingSpec":  # KVSwapConnector takes that one by itself
        extra |= {"spec_name": options.spec, "spec_module_path": "kvswap.vllm"}
    if options.sync_loads:
        extra["sync_load_budget_bytes"] = 1 << 30
    if options.overlap:
        extra |= {"kvswap_overlap": True, "kvswap_overlap_shared_ms": options.shared_ms}
    if options.share:  # this machine may be slow
        extra |= {"kvswap_share": True, "kvswap_share_wait_ms": 1000}
    elif options.mla and options.ranks > 1:
        extra["canonical_layout"] = True  # 0.33: one copy for all ranks, who take turns at writing it
    if options.lend_name:
        extra["kvswap_lend"] = options.lend_name
    if options.replicas:
        extra |= {"kvswap_replicas": vllm_replicas.name_of(), "cpu_bytes_to_use": 2 << 20}
    if options.codec:
        extra |= {"kvswap_codec": options.codec, "kvswap_codec_keep": options.keep}
    if options.sleep and "Tiering" in options.spec:  # which keeps its blocks while the engine sleeps
        extra["secondary_tiers"] = [file_tier(folder)]
    if options.simple:
        extra = {"cpu_bytes_to_use": 64 << 20}
    transfer = KVTransferConfig(
        **connector_of(options),
        kv_role="kv_both",
        kv_connector_extra_config=extra,
        kv_load_failure_policy=options.policy,
        engine_id=engine_id,
    )
    model = ModelConfig(
        model=model_folder(folder, options.layers, dtype_of(options)),
        skip_tokenizer_init=True,
        dtype=dtype_of(options),
        max_model_len=longest_of(options),
        enforce_eager=True,
    )
    scheduler = SchedulerConfig(
        max_num_seqs=16,
        max_num_batched_tokens=longest_of(options) if options.codec else 256,  # a prompt is one step, and one store
        max_model_len=longest_of(options),
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=options.async_scheduling,
    )
    cache = CacheConfig(block_size=TOKENS, enable_prefix_caching=True)
    if hasattr(cache, "kv_cache_layout") and not options.block_first:
        cache.kv_cache_layout = "LBNHC"  # the engine does so before it makes connectors
    parallel = ParallelConfig(tensor_parallel_size=options.ranks, distributed_executor_backend="mp")
    parallel.rank = rank
    device = DeviceConfig("cuda" if options.device.startswith("cuda") else "cpu")
    made = VllmConfig(
        model_config=model,
        scheduler_config=scheduler,
        cache_config=cache,
        kv_transfer_config=transfer,
        parallel_config=parallel,
        device_config=device,
    )
    if hasattr(cache, "kv_cache_layout") and options.block_first:  # as the engine asks for it
        cache.kv_cache_layout = get_kv_connector_cache_layout(made)
        assert cache.kv_cache_layout == "BLHNC", cache.kv_cache_layout
    if options.share:
        ModelConfig.use_mla = property(lambda _: True)
    return made


def groups_of(options: argparse.Namespace) -> list[list[str]]:
    """Layer names by group."""
    groups = 2 if options.hybrid else 1
    return [[f"model.layers.{groups * i + g}.self_attn.attn" for i in range(options.layers)] for g in range(groups)]


def placed() -> bool:
    """Whether a release says where in an allocation each layer lies."""
    return any(f.name == "layers" for f in dataclasses.fields(KVCacheTensor))


def planned(config: VllmConfig, groups: list[list[str]], specs: list[Any], blocks: int) -> KVCacheConfig:
    """As vLLM's engine core plans it for its second runner, which needs Triton."""
    if not placed():
        kvswap.vllm.register()  # vLLM's plugin hook
        specs = [dataclasses.replace(spec, indexes_kv_by_block_stride=True) for spec in specs]
    asked = [KVCacheGroupSpec(names, spec) for names, spec in zip(groups, specs, strict=True)]
    nbytes = blocks * sum(PAGE * len(names) for names in groups[:1])
    with mock.patch.object(VllmConfig, "use_v2_model_runner", True, create=True):
        plan = planner.get_kv_cache_config_from_groups(config, asked, nbytes)
    assert plan.num_blocks == blocks
    assert all(tensor.block_stride == PAGE * len(groups[0]) for tensor in plan.kv_cache_tensors)
    if not placed():
        check_views(plan, specs[0])
    return plan


def check_views(plan: KVCacheConfig, spec: Any) -> None:
    """0.26: what the second runner makes of the plan, for an attention backend, in the layout that vLLM's connector
    asks for."""
    from vllm.v1.attention.backends import utils
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.worker.gpu.attn_utils import _reshape_attention_kv_cache

    utils.set_kv_cache_layout("HND")
    shape = FlashAttentionBackend.get_kv_cache_shape(plan.num_blocks, TOKENS, HEADS, HEAD_SIZE)
    order = FlashAttentionBackend.get_kv_cache_stride_order()
    raw = torch.zeros(plan.kv_cache_tensors[0].size, dtype=torch.int8)
    for i, tensor in enumerate(plan.kv_cache_tensors):
        packing = tensor.offset, tensor.block_stride
        view = _reshape_attention_kv_cache(raw, spec, shape, order, plan.num_blocks, packing)
        assert tuple(view.shape) == tuple(shape), f"{tuple(view.shape)}, and the backend takes {tuple(shape)}"
        view.fill_(i + 1)
    layers = raw.view(spec.dtype).view(plan.num_blocks, len(plan.kv_cache_tensors), -1)
    assert all(bool((layers[:, i] == i + 1).all()) for i in range(layers.shape[1])), "a layer lies elsewhere"
    utils.set_kv_cache_layout(None)


def make_cache(options: argparse.Namespace, config: VllmConfig) -> KVCacheConfig:
    shape = {
        "block_size": TOKENS,
        "num_kv_heads": HEADS,
        "head_size": HEAD_SIZE,
        "dtype": getattr(torch, dtype_of(options)),
    }
    specs = [FullAttentionSpec(**shape)]
    if options.mla:
        specs = [MLAAttentionSpec(**{**shape, "num_kv_heads": 1, "head_size": LATENT})]
    if options.hybrid:
        specs.append(SlidingWindowSpec(**shape, sliding_window=4 * TOKENS))
    groups, blocks = groups_of(options), options.gpu_blocks
    said = any(f.name == "kv_tp_replicas" for f in dataclasses.fields(KVCacheConfig))
    replicas = {"kv_tp_replicas": options.ranks} if said and options.share else {}
    assert specs[0].page_size_bytes == PAGE
    if options.block_first:
        return dataclasses.replace(planned(config, groups, specs, blocks), **replicas)
    if placed():
        strides = {"layer_stride": PAGE * blocks, "block_stride": PAGE}
        size = PAGE * blocks * options.layers
        tensors = [KVCacheTensor(size=size, layers=names, **strides) for names in groups]
    else:
        shared = zip(*groups, strict=True)
        tensors = [KVCacheTensor(size=PAGE * blocks, shared_by=list(names)) for names in shared]
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=[KVCacheGroupSpec(names, spec) for names, spec in zip(groups, specs, strict=True)],
        **replicas,
    )


def expected(rank: int, name: str, tokens: tuple[int, ...], codec: str | None = None, unfit: int = 1) -> torch.Tensor:
    """What a block of a rank holds that ends these tokens: 56 bits of their hash begin a random page. With a codec it
    is bfloat16 with random signs and mantissas, and exponents in a window of 12; UNFIT makes one of rank `unfit` with
    all exponents under `exact`. The mantissas have 3 bits under `mxfp8`, which gives such values back."""
    seed = int.from_bytes(sha256((rank, name, tokens))[:7], "big")
    generator = torch.Generator().manual_seed(seed)
    page = torch.randint(0, 256, (PAGE,), dtype=torch.uint8, generator=generator)
    if codec is None or (codec == "exact" and (rank, name, tokens[-1]) == (unfit, *UNFIT)):
        return page
    words = page.view(torch.int16).to(torch.int32) & 0xFFFF
    exponents = 120 + torch.randint(0, 12, words.shape, dtype=torch.int32, generator=generator)
    words = words & (0x807F if codec == "exact" else 0x8070) | exponents << 7
    return torch.where(words > 0x7FFF, words - 0x10000, words).to(torch.int16).view(torch.uint8)


UNFIT = ("model.layers.2.self_attn.attn", 999)  # layer, and the token that ends the block


def unfit_rank(options: argparse.Namespace) -> int:
    """Of ranks that hold the same, rank 0 stores."""
    return 0 if options.share else 1


def sizes_of(spec: Any) -> dict[str, int]:
    """What vLLM's spec computes: the chunks, their bytes in host memory, and those of each worker."""
    names = "num_chunks" if hasattr(spec, "num_chunks") else "num_blocks", "kv_bytes_per_chunk"
    return {name: getattr(spec, name) for name in (*names, "cpu_page_size_per_worker")}


class Memory:
    """The model's cache. On the host it can go and come back at the same addresses, as under vLLM's allocator on a GPU;
    an access meanwhile ends the process.
    """

    def __init__(self, nbytes: int, device: str) -> None:
        self.nbytes = nbytes
        if device != "cpu":
            self.tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            return
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.mmap.restype = ctypes.c_void_p
        self.libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self.ptr = self._map(None, mmap.PROT_READ | mmap.PROT_WRITE)
        buffer = (ctypes.c_uint8 * nbytes).from_address(self.ptr)
        self.tensor = torch.frombuffer(buffer, dtype=torch.uint8)

    def _map(self, at: int | None, access: int) -> int:
        fixed = 0x10 if at is not None else 0  # MAP_FIXED
        ptr = self.libc.mmap(at, self.nbytes, access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed, -1, 0)
        assert ptr != ctypes.c_void_p(-1).value, ctypes.get_errno()
        return int(ptr)

    def leave(self) -> None:
        self._map(self.ptr, 0)  # PROT_NONE

    def come_back(self) -> None:
        self._map(self.ptr, mmap.PROT_READ | mmap.PROT_WRITE)


class Worker:
    """One rank."""

    def __init__(self, options: argparse.Namespace, folder: Path, engine_id: str, rank: int) -> None:
        self.options, self.rank = options, rank
        self.part = 0 if options.mla else rank  # all ranks have the same latents, and heads of their own
        where = options.device
        if where == "cpu" and (
            options.ranks > 1 or "Tiering" in options.spec
        ):  # to 0.32 it takes the rank from the index of the GPU
            torch.accelerator.current_device_index = lambda: rank
        elif options.ranks > 1:
            where = f"cuda:{rank}"
            torch.cuda.set_device(rank)
        config = make_config(options, folder, engine_id, rank)
        cache = make_cache(options, config)
        if options.simple:
            copies_by_plugin(where != "cpu")
        config.cache_config.num_gpu_blocks = cache.num_blocks
        # (blocks, K and V, tokens, heads, head size) a layer, or (blocks, tokens, latent); groups lie over each other,
        # a block is one group's
        self.memory = Memory(options.layers * cache.num_blocks * PAGE, where)
        slab = self.memory.tensor.view(getattr(torch, dtype_of(options)))
        block = (TOKENS, LATENT) if options.mla else (2, TOKENS, HEADS, HEAD_SIZE)
        if options.block_first:
            slab = slab.view(cache.num_blocks, options.layers, *block).transpose(0, 1)
        else:
            slab = slab.view(options.layers, cache.num_blocks, *block)
        if options.simple and not placed():  # it takes what shares a storage for one tensor
            slab = [layer.clone() for layer in slab]
        self.layers = {name: slab[i] for names in groups_of(options) for i, name in enumerate(names)}
        if options.share:  # blocks have few KiB here, and a load would be one piece
            _member.join_at = functools.partial(_member.join_at, piece_nbytes=2 * options.layers * PAGE)
        if options.lend_name:
            _lend.Lend = functools.partial(_lend.Lend, piece_nbytes=2 * options.layers * PAGE)
            _replicas.Share = functools.partial(_member.Share, piece_nbytes=2 * options.layers * PAGE)
        if options.overlap and options.block_first:
            _parts.LEAST_NBYTES = PAGE  # blocks have few KiB here, and would be one part each
        with set_current_vllm_config(config):
            self.connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
            self.connector.register_kv_caches(self.layers)
        self.config = config
        self.device = kvswap.Device("host:0" if where == "cpu" else where)
        self.faults = contextlib.ExitStack()
        self.checked = 0
        self.wrong, self.unsound = {}, set()
        self.first_wrong: str | None = None  # layer
        self.play()

    # -- bytes --------------------------------------------------------------------------------------------------------

    def page(self, name: str, block: int) -> torch.Tensor:
        return self.layers[name][block].view(torch.uint8).view(-1)

    def expected(self, name: str, tokens: list[int]) -> torch.Tensor:
        return expected(self.part, name, tuple(tokens), self.options.codec, unfit_rank(self.options))

    def compute(self, request: str, tokens: list[int], blocks: list[tuple[int, int, str]], begin: int) -> None:
        """Check the blocks before `begin`, and write the others, which tokens complete; nonsense after a wrong one."""
        wrong = request in self.unsound
        for index, block, name in blocks:
            page, holds = self.page(name, block), self.expected(name, tokens[: (index + 1) * TOKENS])
            if index >= begin:
                page.copy_(~holds if wrong else holds)
            elif torch.equal(page.cpu(), holds):
                self.checked += 1
            else:
                wrong, self.first_wrong = True, self.first_wrong or name
                self.unsound.add(request)
                where = f" on rank {self.rank}" if self.rank else ""
                self.wrong[block] = f"{request}: block {index} (GPU block {block}) of {name} holds other bytes{where}"

    def forget(self) -> None:
        for tensor in self.layers.values():
            tensor.view(torch.uint8).fill_(0xEE)

    # -- steps --------------------------------------------------------------------------------------------------------

    def context_of(self, work: list[Any], own: Any) -> ForwardContext:
        """As vLLM's model runner sets it; a full CUDA graph is replayed outside of one, or in one that says so."""
        if not work or (own and self.kind == "outside"):
            return made(ForwardContext, no_compile_layers={}, attn_metadata=None, slot_mapping={})
        kind = CUDAGraphMode.FULL if own and self.kind == "full" else CUDAGraphMode.NONE
        metadata = dict.fromkeys(self.layers, object())
        values = {
            "no_compile_layers": {},
            "attn_metadata": metadata,
            "slot_mapping": {},
            "cudagraph_runtime_mode": kind,
        }
        return made(ForwardContext, **values)

    def forward(self, work: list[Any]) -> None:
        """Layer by layer, as a model."""
        context = get_forward_context()
        graph = context.attn_metadata is None or context.cudagraph_runtime_mode == CUDAGraphMode.FULL
        for name in self.layers:
            if not graph and name != self.skipped:
                self.connector.wait_for_layer_load(name)
            for request, tokens, blocks, begin in work:
                self.compute(request, tokens, [place for place in blocks if place[2] == name], begin)

    def play(self, kind: str = "eager", skipped: str | None = None) -> None:
        """What steps with loads of their own run as from now on, and a layer that the model does not wait for."""
        self.kind, self.skipped = kind, skipped

    def take_unsound(self) -> set[str]:
        """The requests of the last step that computed from wrong bytes."""
        return set(self.unsound)

    def own_loads(self) -> dict[str, int]:
        """Steps with loads of their own, by what they waited for."""
        return dict(self.connector._own_loads.counts)

    def reported(self) -> int:
        """Loads that were reported before they had ended."""
        return self.connector._own_loads.reported

    def report_ahead(self, on: bool) -> None:
        """Each load is reported in the step that submits it; False: when it is about to end, by its estimate."""
        ahead = self.connector._ahead
        if on:
            ahead.due = list
        else:
            vars(ahead).pop("due", None)

    def forget_waits(self) -> None:
        """The waits for layers are counted and left out."""
        own, wait = self.connector._own_loads, self.connector._own_loads._wait
        own._broken = False  # from another test
        own._wait = lambda parts: wait(parts) if parts is None else None

    def parts(self) -> list[list[int]]:
        """KiB of the parts that a load in a step moves of each tensor's blocks. A layer waits for those with its bytes,
        and for no others: what changes in its cache when a part is written says which."""
        load = next(handler for handler in self.handlers() if not handler.gpu_to_cpu)
        found, number = {name: [] for name in self.layers}, 0
        for tensor, parts in zip(load.dst_tensors, load.layer_parts, strict=True):
            for begin, end in parts:
                self.memory.tensor.zero_()
                tensor[:, begin:end] = 1
                for name, layer in self.layers.items():
                    found[name] += [number] * bool(layer.view(torch.uint8).any())
                number += 1
        self.forget()
        waits = self.connector._own_loads._parts
        assert waits == {name: tuple(numbers) for name, numbers in found.items()}, f"{waits}, and it is {found}"
        return [[(end - begin) >> 10 for begin, end in parts] for parts in load.layer_parts]

    def step(self, meta: Any, finished: set[str], work: list[tuple[Any, ...]]) -> Any:
        """One engine step, in the order of vLLM's model runner; what it has to tell the scheduler."""
        self.connector.handle_preemptions(meta)
        self.connector.bind_connector_metadata(meta)
        jobs = getattr(meta, "load_jobs", {}).values()  # of SimpleCPUOffloadConnector: none
        own = any(getattr(job, "sync", False) for job in jobs) or getattr(meta, "sync_loads", ())
        context = self.context_of(work, own)
        early = own or not DEFERS
        with override_forward_context(context):
            if early:
                self.connector.start_load_kv(context)
            self.wrong: dict[int, str] = {}
            self.unsound: set[str] = set()
            self.forward(work)
            if not early:  # from 0.30 on: behind the forward pass, where none of its requests waits for a load
                self.connector.start_load_kv(context)
        self.connector.wait_for_save()
        output = KVConnectorOutput()
        if hasattr(output, "failed_recving"):
            results = self.connector.get_transfer_results(finished)
            output.finished_sending, output.finished_recving = results.finished_sending, results.finished_recving
            output.failed_recving = results.failed_recving
        else:
            output.finished_sending, output.finished_recving = self.connector.get_finished(finished)
        output.invalid_block_ids = self.connector.get_block_ids_with_load_errors()
        for block, what in self.wrong.items():
            if block not in output.invalid_block_ids and not (self.options.overlap or self.options.async_scheduling):
                raise AssertionError(what)
        output.kv_connector_worker_meta = self.connector.build_connector_worker_meta()
        output.kv_connector_stats = self.connector.get_kv_connector_stats()
        self.connector.clear_connector_metadata()
        return output

    # -- kvswap -------------------------------------------------------------------------------------------------------

    def handlers(self) -> list[VLLMHandler]:
        from kvswap.vllm import _connector

        if self.options.simple:
            return list(self.connector.worker_handler._backend.handlers)
        worker = self.connector.connector_worker.worker
        return _connector._handlers_of(getattr(worker, "_worker", worker))

    def stats(self) -> dict[str, Any]:
        stats = [handler.stats() for handler in self.handlers()]
        return {
            "handlers": len(stats),
            "device": self.device.name,
            "jobs": sum(s.jobs for s in stats),
            "failed": sum(s.failed for s in stats),
            "not_stored": sum(s.not_stored for s in stats),
            "unfinished": sum(s.unfinished for s in stats),
            "paths": {path for s in stats for path in s.paths},
            "checked": self.checked,
            "runs": self.runs_of_a_chunk(),
            "tensors": len(self.handlers()[0].dst_tensors),
        }

    def shared(self) -> dict[str, int]:
        """What the member of the group has brought."""
        return self.handlers()[0].member.stats()

    def lenders(self) -> int:
        """Engines that lend to this rank."""
        return len(self.connector._lending().member.peers)

    def lent(self) -> list[list[Any]]:
        """What this rank lends: pid, registered bytes, whether now, bytes of stores and loads."""
        return [[*loan[:3], *loan.brought] for loan in self.connector._lending().loans]

    def sizes(self) -> dict[str, int]:
        return sizes_of(self.connector.connector_worker.spec)

    def runs_of_a_chunk(self) -> int:
        """How many pieces the blocks of chunk 0 make on the host, all tensors of them, by their addresses."""
        handler = self.handlers()[0]
        pieces = []
        for chunks in handler.dst_tensors if handler.gpu_to_cpu else handler.src_tensors:
            for row in chunks[0].view(-1, chunks.shape[-1]):
                pieces.append((row.data_ptr(), row.data_ptr() + row.nbytes))
        pieces.sort()
        return 1 + sum(after[0] != before[1] for before, after in pairwise(pieces))

    def fault(self, action: str | None, nth: int = 1, every: int = 0) -> None:
        """The nth copy from now on fails, or is left out, and each every-th after it; None: no more. Where blocks are
        coded, all kernels fail: another path repeats what one refuses."""
        if action is None:
            self.faults.close()
        elif self.options.codec:
            self.faults.enter_context(testing.fault(self.device, "call", action, operation="launch", every=1))
        else:
            self.faults.enter_context(testing.fault(self.device, "copy", action, nth=nth, every=every))

    def hold(self, seconds: float) -> None:
        """The model computes for so long: what is submitted meanwhile waits for it."""
        testing.delay(self.device, seconds, 0)

    def shutdown(self) -> None:
        self.connector.shutdown()
        self.connector.shutdown()

    # -- sleep --------------------------------------------------------------------------------------------------------

    def their_worker(self) -> Any:
        """vLLM's GPU worker, as far as it sleeps: its sleep() and wake_up() with this memory below them."""
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackend
        from vllm.v1.worker import gpu_worker

        memory = self.memory

        class Backend(SleepModeBackend):
            def suspend(self, level: int = 1) -> None:
                memory.leave()

            def resume(self, tags: list[str] | None = None) -> None:
                memory.come_back()

        backend = Backend()

        class Sleeper(gpu_worker.Worker):
            def __init__(self) -> None:
                self._sleep_saved_buffers = {}

            sleep_mode_backend = property(lambda _: backend)

            def _get_sleep_mode_backend(self) -> Backend:
                return backend

            def __getattr__(self, name: str) -> Any:
                if name.startswith("_sleep"):
                    return {}
                raise AttributeError(name)

        sleeper = Sleeper()
        sleeper.model_runner = SimpleNamespace(post_kv_cache_wake_up=lambda: None)  # of FP8's scales
        sleeper.vllm_config = self.config
        sleeper.cache_config = self.config.cache_config
        return sleeper

    def sleep(self, level: int = 1) -> None:
        """Without a GPU, torch.accelerator is the host device: waiting for all that it has queued."""
        if not hasattr(self, "sleeper"):
            self.sleeper = self.their_worker()
        torch.accelerator.synchronize = self.synchronize
        torch.accelerator.get_memory_info = lambda *_: (0, 1)
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        self.sleeper.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(set_current_vllm_config(self.config))
            self.sleeper.wake_up(tags)

    def handshake(self) -> Any:
        return self.connector.get_handshake_metadata()

    def synchronize(self) -> None:
        self.device.synchronize(60)


# -- in a process of its own ------------------------------------------------------------------------------------------


def serve(pipe: Any, *arguments: Any) -> None:
    """Until told to end: the name of a method and what it is given, answered by what it gives or raises."""
    try:
        worker = Worker(*arguments)
        pipe.send((None, True))
        for name, args in iter(pipe.recv, None):
            try:
                pipe.send((getattr(worker, name)(*args), True))
            except Exception as error:
                pipe.send((error, False))
    except Exception:
        pipe.send((RuntimeError(traceback.format_exc()), False))


class WorkerProcess:
    """A Worker in another process: begin() a call on all of them, then end() it."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, name: str, *args: Any) -> None:
        self.pipe.send((name, args))

    def end(self, limit: float = 180.0) -> Any:
        assert self.pipe.poll(limit), "a rank does not answer"
        value, well = self.pipe.recv()
        if not well:
            raise value
        return value

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join(60)
        assert self.process.exitcode == 0, self.process.exitcode


class Workers:
    """All ranks."""

    def __init__(self, options: argparse.Namespace, folder: Path, engine_id: str) -> None:
        ranks = range(options.ranks)
        self.local = Worker(options, folder, engine_id, 0) if options.ranks == 1 else None
        self.processes = [WorkerProcess(options, folder, engine_id, rank) for rank in ranks if not self.local]
        for process in self.processes:
            process.end()

    def call(self, name: str, *args: Any) -> list[Any]:
        if self.local:
            return [getattr(self.local, name)(*args)]
        for process in self.processes:
            process.begin(name, *args)
        found, broken = [], None
        for process in self.processes:  # each answers, also behind one that failed
            try:
                found.append(process.end())
            except Exception as error:
                broken = broken or error
        if broken is not None:
            raise broken
        return found

    def call_one(self, rank: int, name: str, *args: Any) -> Any:
        if self.local:
            return getattr(self.local, name)(*args)
        self.processes[rank].begin(name, *args)
        return self.processes[rank].end()

    def close(self) -> None:
        for process in self.processes:
            process.close()


def places(options: argparse.Namespace, blocks: Any, end: int) -> Iterator[tuple[int, int, str]]:
    """The first blocks of a request, in each layer; a window's group keeps none of what lies behind it."""
    for names, ids in zip(groups_of(options), blocks, strict=True):
        for index in range(min(end, len(ids))):
            if ids[index] != 0:  # vLLM's null block
                yield from ((index, ids[index], name) for name in names)
