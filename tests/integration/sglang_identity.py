"""Which engines find each other's pages in kvswap.sglang.FileStorage, by SGLang's own configuration and pools.

    python tests/integration/sglang_identity.py SOURCE

SOURCE: a folder with SGLang's package in it (pip download --no-deps sglang; unzip), or nothing: the one that is
installed. Nothing of SGLang is compiled; no GPU is needed, and no model runs. An engine is SGLang's ServerArgs,
resolved and published, its device and host pools, its HiCacheStorageConfig, and the storage backend over a directory
that all engines share.

Each row of DIFFERENT changes one thing: an engine with the change must miss the pages of one without it, which finds
them after a restart. Each row of SHARED changes something that leaves the bytes as they are: its engine must find them.
"""

# ruff: noqa: E402  (SGLang is imported once it is known from where)
# mypy: ignore-errors

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
parser.add_argument("source", nargs="?", help="folder with SGLang's package; default: the installed one")
OPTIONS = parser.parse_args()
os.environ.setdefault("SGLANG_LOGGING_LEVEL", "error")
warnings.filterwarnings("ignore")
sys.path[:0] = [str(Path(__file__).parent), *([str(Path(OPTIONS.source).resolve())] if OPTIONS.source else [])]

import sglang_engine  # what stands in on a CPU
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.runtime_context import get_context

from kvswap.identity import FIELDS
from kvswap.sglang import FileStorage

TOKENS = 256
WORK = Path(tempfile.mkdtemp(prefix="kvswap-identity-"))


def folder(name: str, weights: bytes = b"weights", when: int = 1_000_000_000, **config: Any) -> str:
    """A model's folder. Nothing reads the weights."""
    path = WORK / "models" / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (path / "model.safetensors").write_bytes(weights)
    os.utime(path / "model.safetensors", ns=(when, when))
    return str(path)


def snapshot(commit: str, model: str = "model") -> str:
    return folder(f"hub/models--org--{model}/snapshots/{commit * 40}")


def scales(name: str, value: float) -> str:
    (WORK / name).write_text(
        json.dumps({"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": value}}}})
    )
    return str(WORK / name)


class Engine:
    """asked: args of SGLang; config of the storage; pool; extra config."""

    def __init__(self, asked: dict[str, Any]) -> None:
        mla, dtype = asked.get("mla", False), asked.get("dtype", torch.bfloat16)
        args = {"model_path": snapshot("a"), "served_model_name": "prod", "dtype": "bfloat16", **asked.get("args", {})}
        self.override = get_context().override_server_args(**args)
        if not asked.get("unpublished"):
            self.override.install()
        page, layout = asked.get("page", 16), asked.get("layout", "page_first")
        shape = {"size": TOKENS, "page_size": page, "dtype": dtype, "layer_num": asked.get("layers", 2)}
        shape |= {"device": "cpu", "enable_memory_saver": False}
        given = (2.0, 0, page, layout)
        kept = {"pin_memory": False, "device_capacity_tokens": TOKENS, "start_layer": asked.get("first", 0)}
        kept["end_layer"] = kept["start_layer"] + shape["layer_num"] - 1
        if mla:
            device = MLATokenToKVPool(kv_lora_rank=48, qk_rope_head_dim=16, **shape)
            kept["target_layer_num"] = shape["layer_num"]
            self.host = MLATokenToKVPoolHost(device._mla_buffer_info(), *given, **kept)
        else:
            heads = 4 // asked.get("config", {}).get("tp_size", 1)
            device = MHATokenToKVPool(head_num=heads, head_dim=asked.get("head_dim", 16), **shape)
            self.host = MHATokenToKVPoolHost(device._mha_buffer_info(), *given, **kept)
        self.page = page
        extra = {"backend_name": "kvswap", "module_path": "kvswap.sglang", "class_name": "FileStorage"}
        extra |= {"interface_v1": 1, "directory": str(WORK / "kv"), "capacity": 64 << 20, **asked.get("extra", {})}
        config = {
            "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
            "is_mla_model": mla, "enable_storage_metrics": False, "is_page_first_layout": layout == "page_first",
            "model_name": args["served_model_name"], "extra_config": extra, **asked.get("config", {}),
        }  # fmt: skip
        self.storage = FileStorage(HiCacheStorageConfig(**config), {})
        self.storage.register_mem_pool_host(self.host)
        self.storage.register_mem_host_pool_v2(self.host, PoolName.KV)
        self.storage.on_host_pools_registered()
        self.identity = self.storage._pages["kv"].identity

    def fill(self, value: int) -> None:
        self.host.kv_buffer.view(torch.uint8).fill_(value)

    def store(self, key: str) -> bool:
        return self.storage.batch_set_v1([key], torch.arange(self.page)) == [True]

    def finds(self, key: str) -> bool:
        return self.storage.batch_exists([key]) == 1

    def loads(self, key: str, value: int) -> bool:
        """Whether the first page has this value in all its bytes then."""
        self.fill(0)
        if self.storage.batch_get_v1([key], torch.arange(self.page)) != [True]:
            return False
        addresses, sizes = self.host.get_page_buffer_meta(torch.arange(self.page))
        import ctypes

        return all(set(ctypes.string_at(at, size)) == {value} for at, size in zip(addresses, sizes, strict=True))

    def close(self) -> None:
        self.storage.close()
        self.override.restore()


FP8 = {"args": {"kv_cache_dtype": "fp8_e4m3"}, "dtype": torch.float8_e4m3fn}
MLA = {"mla": True}
TWO = {"config": {"tp_size": 2}}
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": snapshot("d", "draft")}
DIFFERENT: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    # what, field, the first engine, the change of the second
    ("another commit", "revision", {}, {"args": {"model_path": snapshot("b")}}),
    ("another model of that commit", "model", {}, {"args": {"model_path": snapshot("a", "another")}}),
    ("weights of other times", "revision", {"args": {"model_path": folder("v1/m")}},
     {"args": {"model_path": folder("v2/m", when=5)}}),
    ("weights of another size", "revision", {"args": {"model_path": folder("v1/m")}},
     {"args": {"model_path": folder("v3/m", weights=b"others")}}),
    ("another configuration", "revision", {"args": {"model_path": folder("v1/m")}},
     {"args": {"model_path": folder("v4/m", rope_theta=5e5)}}),
    ("revision", "revision", {"extra": {"revision": "one"}}, {"extra": {"revision": "two"}}),
    ("weight_version", "weight_version", {}, {"extra": {"weight_version": "two"}}),
    ("SGLang's weight_version", "weight_version", {}, {"args": {"weight_version": "two"}}),
    ("name", "name", {"extra": {"name": "one"}}, {"extra": {"name": "two"}}),
    ("name, of a model that is not known", "name", {"args": {"model_path": "org/m"}, "extra": {"name": "one"}},
     {"extra": {"name": "two"}}),
    ("dummy weights", "weights", {}, {"args": {"load_format": "dummy"}}),
    ("float16", "dtype", {}, {"args": {"dtype": "float16"}}),
    ("fp8_e4m3", "kv_format", {}, FP8),
    ("fp8_e5m2, not fp8_e4m3", "kv_format", FP8,
     {"args": {"kv_cache_dtype": "fp8_e5m2"}, "dtype": torch.float8_e5m2}),
    ("mxfp8, not fp8_e4m3", "kv_format", FP8, {"args": {"kv_cache_dtype": "mxfp8"}}),
    ("scales", "kv_scales", FP8, {"args": {"quantization_param_path": scales("one.json", 1.5)}}),
    ("other scales", "kv_scales", {"args": {**FP8["args"], "quantization_param_path": scales("one.json", 1.5)},
     "dtype": torch.float8_e4m3fn}, {"args": {"quantization_param_path": scales("two.json", 2.5)}}),
    ("quantization", "quantization", {}, {"args": {"quantization": "fp8"}}),
    ("overrides", "overrides", {}, {"args": {"json_model_override_args": '{"rope_theta": 1e6}'}}),
    ("page_first_direct", "layout", {}, {"layout": "page_first_direct"}),
    ("layer_first", "layout", {}, {"layout": "layer_first"}),
    ("attention backend", "backend", {}, {"args": {"attention_backend": "fa3"}}),
    ("tokens of a page", "tokens", {}, {"page": 32}),
    ("layers", "layers", {"config": {"pp_size": 2}}, {"first": 2, "config": {"pp_rank": 1}}),
    ("size of heads", "layers", {}, {"head_dim": 32}),
    ("two ranks", "ranks", {}, TWO),
    ("the other rank", "ranks", TWO, {"config": {"tp_rank": 1}}),
    ("context parallelism", "ranks", {}, {"config": {"attn_cp_size": 2}}),
    ("stages", "ranks", {}, {"config": {"pp_size": 2}}),
    ("MLA", "mla", {}, MLA),
    ("a draft model", "draft", {}, {"args": EAGLE}),
    ("another draft model", "draft", {"args": EAGLE},
     {"args": {"speculative_draft_model_path": snapshot("e", "draft")}}),
    ("an adapter of other weights", "lora", {"args": {"lora_paths": [f"x={folder('x1')}"]}},
     {"args": {"lora_paths": [f"x={folder('x2', when=7)}"]}}),
    ("one writer", "replica", {}, {"extra": {"shared": False}}),
]  # fmt: skip
SHARED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("another served name", {}, {"args": {"served_model_name": "canary"}}),
    ("another served name, of a revision that is said", {"args": {"model_path": "org/m"}, "extra": {"revision": "r"}},
     {"args": {"served_model_name": "canary"}}),
    ("nothing published, another served name",
     {"unpublished": True, "extra": {"revision": "r"}}, {"args": {"served_model_name": "canary"}}),
    ("ranks that do attention for other requests", {}, {"config": {"dp_rank": 3}}),
    ("MLA, two ranks", MLA, {"config": {"tp_size": 2, "tp_rank": 1}}),
    ("MLA, fp8, two ranks", {**MLA, **FP8}, TWO),
    ("ports and memory", {}, {"args": {"port": 31000, "mem_fraction_static": 0.5, "max_running_requests": 4}}),
    ("where the folder is", {"args": {"model_path": folder("v1/m")}}, {"args": {"model_path": folder("v9/m")}}),
    ("an adapter in a snapshot", {}, {"args": {"lora_paths": [snapshot("c", "adapter")]}}),
    ("guesses by n-grams", {}, {"args": {"speculative_algorithm": "NGRAM"}}),
]  # fmt: skip


def merged(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    both = {**one, **two}
    return {key: {**one[key], **two[key]} if isinstance(both[key], dict) and key in one and key in two else both[key]
            for key in both}  # fmt: skip


def stored(key: str, asked: dict[str, Any]) -> dict[str, Any]:
    engine = Engine(asked)
    engine.fill(7)
    assert not engine.identity.own, engine.identity.unknown
    assert engine.store(key) and engine.finds(key)
    engine.close()
    return engine.identity.fields


def different(key: str, what: str, field: str, first: dict[str, Any], change: dict[str, Any]) -> None:
    fields = stored(key, first)
    other = Engine(merged(first, change))
    assert not other.finds(key) and not other.loads(key, 7), f"{what}: found"
    assert not other.identity.own, other.identity.unknown
    assert other.identity.fields.get(field) != fields.get(field), f"{what}: {field} is {fields.get(field)}"
    other.close()
    again = Engine(first)
    assert again.finds(key) and again.loads(key, 7), f"{what}: lost"
    again.close()


def shared(key: str, what: str, first: dict[str, Any], change: dict[str, Any]) -> None:
    fields = stored(key, first)
    other = Engine(merged(first, change))
    found = other.finds(key) and other.loads(key, 7)
    assert found, f"{what}: not found\n{fields}\n{other.identity.fields}"
    other.close()


def own_bytes(key: str) -> None:
    """Engines of two formats of fp8, two weights and two ranks store other bytes under one key: each finds its own."""
    formats = [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)]
    asked = [
        {"args": {"model_path": snapshot(commit), "kv_cache_dtype": name}, "dtype": dtype,
         "config": {"tp_size": 2, "tp_rank": rank}}
        for commit, (name, dtype), rank in itertools.product("ab", formats, (0, 1))
    ]  # fmt: skip
    for value, each in enumerate(asked, 1):
        engine = Engine(each)
        assert not engine.finds(key)
        engine.fill(value)
        assert engine.store(key)
        engine.close()
    for value, each in enumerate(asked, 1):
        for name in ("prod", "canary"):
            engine = Engine(merged(each, {"args": {"served_model_name": name}}))
            assert engine.finds(key) and engine.loads(key, value), each
            engine.close()


def unknown(key: str) -> None:
    """Weights that are not known; and bytes of which no configuration says the format."""
    for asked in (
        {"args": {"model_path": "org/m"}},
        {"args": {"lora_paths": ["org/adapter"]}},
        {"unpublished": True, "dtype": torch.float8_e5m2, "extra": {"revision": "r"}},
    ):
        for _ in range(2):
            engine = Engine(asked)
            assert engine.identity.own and not engine.finds(key), asked
            assert engine.store(key) and engine.finds(key)
            engine.close()


def main() -> None:
    logging.getLogger("kvswap").setLevel(logging.ERROR)
    failed = number = 0
    for run, rows in ((different, DIFFERENT), (shared, SHARED), (own_bytes, [()]), (unknown, [()])):
        for row in rows:
            number += 1
            try:
                run(f"{number:064x}", *row)
            except Exception as error:
                failed += 1
                print(f"FAILED {run.__name__} {row[:1]}: {type(error).__name__}: {error}", flush=True)
    missing = {field.name for field in FIELDS if field.sglang} - {row[1] for row in DIFFERENT}
    print(f"SGLang {sglang_engine.VERSION}: {len(DIFFERENT)} changes told apart, {len(SHARED)} shared, {failed} failed")
    print(f"fields without a row: {', '.join(sorted(missing))}")
    shutil.rmtree(WORK, ignore_errors=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
