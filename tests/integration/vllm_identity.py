"""Which engines find each other's blocks in kvswap.vllm.FileTier, by vLLM's own configuration objects.

    python tests/integration/vllm_identity.py SOURCE

SOURCE: an unpacked vLLM source package (pip download --no-deps --no-binary vllm), or nothing: the one that is
installed. Nothing of vLLM is compiled; no GPU is needed, and no model runs. An engine is vLLM's VllmConfig, its
OffloadingConnector on the scheduler's side, its tiering and the tier in it, over a directory that all of them share.

Each row of DIFFERENT changes one thing of the configuration: an engine with the change must miss the blocks of one
without it, which finds them after a restart. Each row of SHARED changes something that leaves the bytes as they are:
its engine must find them, with the right bytes.
"""

# ruff: noqa: E402  (vLLM is imported once it is known from where)
# mypy: ignore-errors

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", nargs="?", help="unpacked source package of vLLM; default: the installed one")
    return parser.parse_args()


def take_source(source: Path) -> None:
    """Import vLLM from there. A package that was not installed has no metadata, where vLLM looks for its platform."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-metadata-"))
    version = source.name.removeprefix("vllm-") + "+cpu"
    described = folder / f"vllm-{version}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    sys.path[:0] = [str(folder), str(source)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], *filter(None, [os.environ.get("PYTHONPATH")])])


OPTIONS = parse()
if OPTIONS.source:
    take_source(Path(OPTIONS.source).resolve())
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import vllm
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.tiering import base as tiering
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvswap.identity import FIELDS

RELEASE = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])
if RELEASE < (0, 29):  # which else has random seeds
    os.environ.setdefault("PYTHONHASHSEED", "0")
TOKENS, HEADS, SIZE, LAYERS, BLOCKS = 16, 4, 32, 4, 16
PLACED = any(name == "layers" for name in KVCacheTensor.__dataclass_fields__)
BY_PATH = "module_path" in inspect.getsource(SecondaryTierFactory.get_tier_class)
if not BY_PATH:
    SecondaryTierFactory.register_tier("FileTier", "kvswap.vllm", "FileTier")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": SIZE,
    "num_hidden_layers": LAYERS,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float16",
}
DEEPSEEK = {
    **LLAMA,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": LAYERS,
    "moe_intermediate_size": 64,
}
DEEPSEEK.pop("head_dim")
WORK = Path(tempfile.mkdtemp(prefix="kvswap-identity-"))


def folder(name: str, config: dict[str, Any] = LLAMA, weights: bytes = b"weights", when: int = 1_000_000_000) -> str:
    """A model's folder. Nothing reads the weights."""
    path = WORK / "models" / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(weights)
    os.utime(path / "model.safetensors", ns=(when, when))
    return str(path)


def snapshot(commit: str) -> str:
    return folder(f"hub/models--org--model/snapshots/{commit * 40}")


BASE: dict[str, Any] = {"model": {"model": snapshot("a")}}
MLA: dict[str, Any] = {"model": {"model": folder("mla", DEEPSEEK)}, "mla": True}


def merged(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    return {
        key: {**one[key], **two[key]} if isinstance(two.get(key), dict) and isinstance(one.get(key), dict)
        else two.get(key, one.get(key))
        for key in {**one, **two}
    }  # fmt: skip


class Engine:
    """The scheduler's side of an engine."""

    number = 0

    def __init__(self, asked: dict[str, Any]) -> None:
        Engine.number += 1
        with mock.patch.dict(os.environ, asked.get("env", {})):
            self.config = vllm_config(asked)
            cache = cache_config(asked, self.config)
            self.config.cache_config.num_gpu_blocks = cache.num_blocks
            self.connector = OffloadingConnector(self.config, KVConnectorRole.SCHEDULER, cache)
        manager = self.connector.connector_scheduler.manager
        self.tier = manager.secondary_tiers[0]
        self.rows = self.tier._memory.view(np.uint8)

    def job(self, key: bytes, *, load: bool) -> bool:
        kind = getattr(tiering, "TransferJob", None) or tiering.JobMetadata
        names = kind.__dataclass_fields__ if hasattr(kind, "__dataclass_fields__") else kind._fields
        ids = "chunk_ids" if "chunk_ids" in names else "block_ids"
        values = {"job_id": 1, "keys": [key], "is_promotion": load, "req_context": None, ids: np.array([0])}
        (self.tier.submit_load if load else self.tier.submit_store)(kind(**values))
        self.tier.drain_jobs()
        end = time.monotonic() + 10
        while time.monotonic() < end:
            for result in self.tier.get_finished_jobs():
                return bool(result.success)
        raise AssertionError("the job has no result")

    def finds(self, key: bytes) -> bool:
        return bool(self.tier.lookup(key, None) == base.LookupResult.HIT)

    def close(self) -> None:
        self.rows = None
        self.connector.shutdown()


def vllm_config(asked: dict[str, Any]) -> VllmConfig:
    tier = {"type": "FileTier", "module_path": "kvswap.vllm", "directory": str(WORK / "kv"), "capacity": 64 << 20}
    if not BY_PATH:
        del tier["module_path"]
    extra = {
        "cpu_bytes_to_use": 1 << 20,
        "spec_name": "TieringOffloadingSpec",
        "secondary_tiers": [{**tier, **asked.get("tier", {})}],
        **asked.get("extra", {}),
    }
    model = ModelConfig(
        **{"skip_tokenizer_init": True, "dtype": "float16", "max_model_len": 4096, "enforce_eager": True}
        | asked["model"]
    )
    parallel = ParallelConfig(**{"distributed_executor_backend": "mp", **asked.get("parallel", {})})
    cache = CacheConfig(**{"block_size": TOKENS, "enable_prefix_caching": True, **asked.get("cache", {})})
    if hasattr(cache, "kv_cache_layout"):
        cache.kv_cache_layout = asked.get("layout", "LBNHC")  # the engine resolves it before it makes connectors
    more = {}
    if "draft" in asked:
        more["speculative_config"] = SpeculativeConfig(
            target_model_config=model, target_parallel_config=parallel, **asked["draft"]
        )
    made = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            **{"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 4096, "is_encoder_decoder": False}
            | asked.get("scheduler", {})
        ),
        cache_config=cache,
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config=extra,
            engine_id=f"identity-{os.getpid()}-{Engine.number}",
        ),
        parallel_config=parallel,
        device_config=DeviceConfig("cpu"),
        **more,
    )
    if "backend" in asked:
        made.attention_config.backend = AttentionBackendEnum[asked["backend"]]
    if "load_format" in asked:
        made.load_config.load_format = asked["load_format"]
    return made


def cache_config(asked: dict[str, Any], config: VllmConfig) -> KVCacheConfig:
    """As vLLM plans it for one group, or two."""
    tp = config.parallel_config.tensor_parallel_size
    shape = {"block_size": asked.get("tokens", TOKENS), "dtype": asked.get("dtype", torch.float16)}
    if asked.get("mla"):
        spec = MLAAttentionSpec(**shape, num_kv_heads=1, head_size=80)
    else:
        spec = FullAttentionSpec(**shape, num_kv_heads=HEADS // tp, head_size=SIZE)
    names = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]
    groups = [KVCacheGroupSpec(names, spec)]
    if "window" in asked:
        window = SlidingWindowSpec(**shape, num_kv_heads=HEADS // tp, head_size=SIZE, sliding_window=asked["window"])
        groups = [KVCacheGroupSpec(names[:2], spec), KVCacheGroupSpec(names[2:], window)]
    page, blocks = spec.page_size_bytes, asked.get("blocks", BLOCKS)
    if PLACED:
        ends = asked.get("layout", "LBNHC").startswith("B")
        strides = {"layer_stride": page, "block_stride": page * LAYERS} if ends else {}
        strides = strides or {"layer_stride": page * blocks, "block_stride": page}
        tensors = [KVCacheTensor(size=page * blocks * LAYERS, layers=names, **strides)]
    else:
        tensors = [KVCacheTensor(size=page * blocks, shared_by=[name]) for name in names]
    made = {"num_blocks": blocks, "kv_cache_tensors": tensors, "kv_cache_groups": groups}
    if asked.get("mla") and "kv_tp_replicas" in KVCacheConfig.__dataclass_fields__:
        made["kv_tp_replicas"] = tp
    return KVCacheConfig(**made)


DIFFERENT: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    # what, field, the first engine, the change of the second
    ("another commit", "revision", BASE, {"model": {"model": snapshot("b")}}),
    ("revision of the tier", "revision", BASE, {"tier": {"revision": "two"}}),
    ("weight_version of the tier", "weight_version", BASE, {"tier": {"weight_version": "two"}}),
    ("name of the tier", "name", BASE, {"tier": {"name": "two"}}),
    ("another model of that revision", "model", merged(BASE, {"tier": {"revision": "r"}}),
     {"model": {"model": folder("another")}}),
    ("weights of other times", "revision", {"model": {"model": folder("v1/model")}},
     {"model": {"model": folder("v2/model", when=2_000_000_000)}}),
    ("weights of another size", "revision", {"model": {"model": folder("v1/model")}},
     {"model": {"model": folder("v3/model", weights=b"longer weights")}}),
    ("another configuration", "revision", {"model": {"model": folder("v1/model")}},
     {"model": {"model": folder("v4/model", {**LLAMA, "rope_theta": 500000.0})}}),
    ("dummy weights", "weights", BASE, {"load_format": "dummy"}),
    ("bfloat16", "dtype", BASE, {"model": {"dtype": "bfloat16"}}),
    ("fp8_e4m3", "kv_format", BASE, {"cache": {"cache_dtype": "fp8_e4m3"}}),
    ("fp8_e5m2, not fp8_e4m3", "kv_format", merged(BASE, {"cache": {"cache_dtype": "fp8_e4m3"}, "dtype": torch.uint8}),
     {"cache": {"cache_dtype": "fp8_e5m2"}}),
    ("overrides of the configuration", "overrides", BASE, {"model": {"hf_overrides": {"rms_norm_eps": 1e-5}}}),
    ("rope", "rope", BASE,
     {"model": {"hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}}}),
    ("quantization", "quantization", BASE, {"model": {"quantization": "fp8"}}),
    ("a backend that is chosen", "backend", BASE, {"backend": "TRITON_ATTN"}),
    ("MLA switched off", "mla", MLA, {"env": {"VLLM_MLA_DISABLE": "1"}}),
    ("two ranks", "ranks", BASE, {"parallel": {"tensor_parallel_size": 2}}),
    ("four ranks, not two", "ranks", merged(BASE, {"parallel": {"tensor_parallel_size": 2}}),
     {"parallel": {"tensor_parallel_size": 4}}),
    ("two stages", "ranks", BASE, {"parallel": {"pipeline_parallel_size": 2}}),
    ("two blocks a chunk", "tokens", BASE,
     {"extra": {"blocks_per_chunk": 2} if RELEASE >= (0, 26) else {"block_size": 2 * TOKENS}}),
    ("a sliding window", "layers", BASE, {"window": 4 * TOKENS}),
    ("another window", "layers", merged(BASE, {"window": 4 * TOKENS}), {"window": 8 * TOKENS}),
    ("another algorithm of keys", "hash", BASE, {"cache": {"prefix_caching_hash_algo": "sha256_cbor"}}),
    ("another seed of keys", "hash", BASE, {"env": {"PYTHONHASHSEED": "7"}}),
    ("a draft model", "draft", BASE, {"draft": {"model": folder("draft"), "num_speculative_tokens": 2}}),
    ("another draft model", "draft",
     merged(BASE, {"draft": {"model": folder("draft"), "num_speculative_tokens": 2}}),
     {"draft": {"model": folder("drafts/2", when=5), "num_speculative_tokens": 2}}),
]  # fmt: skip
if PLACED:
    DIFFERENT += [
        ("LBHNC", "layout", BASE, {"layout": "LBHNC"}),
        ("BLNHC", "layout", BASE, {"layout": "BLNHC"}),
        ("BLHNC, not BLNHC", "layout", merged(BASE, {"layout": "BLNHC"}), {"layout": "BLHNC"}),
        ("the canonical layout", "layout", BASE, {"extra": {"canonical_layout": True}}),
    ]
else:
    DIFFERENT += [("HND", "layout", BASE, {"env": {"VLLM_KV_CACHE_LAYOUT": "HND"}})]
TWO = {"parallel": {"tensor_parallel_size": 2}}
SHARED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("another served name", BASE, {"model": {"served_model_name": "prod"}}),
    ("limits of requests", BASE, {"scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 512}}),
    ("a longer context", BASE, {"model": {"max_model_len": 2048}, "scheduler": {"max_model_len": 2048}}),
    ("another share of memory", BASE, {"cache": {"gpu_memory_utilization": 0.5}, "blocks": 4 * BLOCKS}),
    ("more host memory", BASE, {"extra": {"cpu_bytes_to_use": 2 << 20}}),
    ("ranks of data parallelism", BASE, {"parallel": {"data_parallel_size": 2}}),
    ("guesses by n-grams", BASE, {"draft": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}}),
    ("the folder elsewhere", {"model": {"model": folder("v1/model")}}, {"model": {"model": folder("v9/model")}}),
    ("a revision that is said", merged(BASE, {"tier": {"revision": "r"}}),
     {"model": {"model": folder("v/hub/models--org--model/snapshots/" + "c" * 40)}}),
    ("graphs", BASE, {"model": {"enforce_eager": False}}),
]  # fmt: skip
if PLACED:
    SHARED += [
        ("MLA, two ranks", MLA, TWO),
        ("MLA, canonical, two ranks", merged(MLA, {"extra": {"canonical_layout": True}}), TWO),
    ]


def different(what: str, field: str, first: dict[str, Any], change: dict[str, Any]) -> None:
    key = base.make_offload_key(what.encode().ljust(32)[:32], 0)
    one = Engine(first)
    stored = np.random.default_rng(len(what)).integers(0, 256, one.rows.shape[1], np.uint8)
    one.rows[0] = stored
    assert one.job(key, load=False) and one.finds(key) and not one.tier.identity.own, one.tier.identity.unknown
    fields = one.tier.identity.fields
    one.close()
    two = Engine(merged(first, change))
    assert not two.finds(key), f"{what}: found"
    assert not two.job(key, load=True), f"{what}: loaded"
    assert not two.tier.identity.own, two.tier.identity.unknown
    assert two.tier.identity.fields.get(field) != fields.get(field), f"{what}: {field} is {fields.get(field)}"
    two.close()
    again = Engine(first)
    again.rows[:] = 0
    assert again.finds(key) and again.job(key, load=True) and np.array_equal(again.rows[0], stored), f"{what}: lost"
    again.close()


def shared(what: str, first: dict[str, Any], change: dict[str, Any]) -> None:
    key = base.make_offload_key(what.encode().ljust(32)[:32], 1)
    one = Engine(first)
    stored = np.random.default_rng(len(what)).integers(0, 256, one.rows.shape[1], np.uint8)
    one.rows[0] = stored
    assert one.job(key, load=False)
    text = one.tier.identity.text
    one.close()
    two = Engine(merged(first, change))
    two.rows[:] = 0
    found = two.finds(key) and two.job(key, load=True) and np.array_equal(two.rows[0], stored)
    assert found, f"{what}: not found\n{text}\n{two.tier.identity.text}"
    two.close()


def own_bytes() -> None:
    """Engines of two sizes, layouts and revisions store other bytes under one key: each finds its own."""
    key = base.make_offload_key(b"one key".ljust(32), 2)
    layouts = ["LBNHC", "LBHNC", "BLHNC", "BLNHC"] if PLACED else ["LBNHC"]
    asked = [
        {"model": {"model": snapshot(commit)}, "parallel": {"tensor_parallel_size": ranks}, "layout": layout}
        for commit, ranks, layout in itertools.product("ab", (1, 2), layouts)
    ]
    for value, each in enumerate(asked, 1):
        engine = Engine(each)
        assert not engine.finds(key)
        engine.rows[0] = value
        assert engine.job(key, load=False)
        engine.close()
    for value, each in enumerate(asked, 1):
        engine = Engine(each)
        engine.rows[:] = 0
        assert engine.finds(key) and engine.job(key, load=True) and set(engine.rows[0]) == {value}, each
        engine.close()


def unknown() -> None:
    """A model whose weights are not known."""
    nothing = {"model": {"model": folder("nothing")}}
    (Path(nothing["model"]["model"]) / "model.safetensors").unlink()
    key = base.make_offload_key(b"unknown".ljust(32), 0)
    engines = []
    for more in ({}, {}, {"tier": {"unversioned": True}}, {"tier": {"unversioned": True}}):
        engine = Engine(merged(nothing, more))
        engines.append(engine.finds(key))
        assert engine.tier.identity.own == (not more)
        assert engine.job(key, load=False) and engine.finds(key)
        engine.close()
    assert engines == [False, False, False, True], engines


def main() -> None:
    logging.getLogger("kvswap").setLevel(logging.ERROR)
    failed = 0
    for run, rows in ((different, DIFFERENT), (shared, SHARED), (own_bytes, [()]), (unknown, [()])):
        for row in rows:
            try:
                run(*row)
            except Exception as error:
                failed += 1
                print(f"FAILED {run.__name__} {row[:1]}: {type(error).__name__}: {error}", flush=True)
    missing = {f.name for f in FIELDS if f.vllm} - {row[1] for row in DIFFERENT}
    print(f"vLLM {vllm.__version__}: {len(DIFFERENT)} changes told apart, {len(SHARED)} shared, {failed} failed")
    print(f"fields without a row: {', '.join(sorted(missing))}")
    shutil.rmtree(WORK, ignore_errors=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
