"""What the bytes of SGLang's pages mean, for its storage backends (kvswap.identity).

A backend is given a HiCacheStorageConfig, which has ranks and the served name, and host pools, which have shapes and
the dtype of their memory. The rest is SGLang's configuration of the process (sglang.srt.runtime_context): what it has
resolved, in namespaces. Where none is published (a program that makes a backend by itself), that is unknown.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvswap._revision import DUMMY, format_of, weights_of
from kvswap.identity import Identity, Said, digest_of

_SHAPE = (
    "layer_num", "start_layer", "end_layer", "target_layer_num", "head_num", "head_dim", "v_head_dim", "kv_cache_dim",
    "kv_lora_rank", "qk_rope_head_dim", "page_size", "logical_page_size",
)  # fmt: skip
_DTYPES = ("dtype", "conv_dtype", "temporal_dtype", "store_dtype", "kv_cache_dtype", "index_dtype")
_BYTES = ("uint8", "int8")  # memory of them may have numbers of any format
_LONGEST = 1 << 20  # bytes of a file of scales that are read
_WITHOUT_WEIGHTS = ("NGRAM", "NONE", None)  # speculation without a model


def identity_of(config: Any, name: str, pool: Any, sizes: Sequence[int], said: Said, **more: Any) -> Identity:
    """Of the pages of a host pool. sizes: of their pieces. more: fields that the backend knows: ranks, replica."""
    model, exec_, speculation, serving, lora = (
        _namespace(which) for which in ("model", "exec", "spec", "serving", "lora")
    )
    found = _of_model(model, speculation, lora) | {
        "served_name": config.model_name,
        "kv_format": _format(model, pool),
        "kv_scales": _scales(getattr(model, "quantization_param_path", None)),
        "layout": {
            "order": str(getattr(pool, "layout", None)),
            "pieces": list(sizes) if len(set(sizes)) > 1 else [len(sizes), sizes[0]],
            "format": getattr(pool, "storage_format_tag", None),
        },
        "backend": _backend(exec_),
        "tokens": getattr(pool, "logical_page_size", None) or getattr(pool, "page_size", None),
        "layers": {key: value for key in _SHAPE if isinstance(value := getattr(pool, key, None), int)},
        "mla": bool(config.is_mla_model),
        "hash": "sha256",
        "pool": [name, type(pool).__name__],
        **more,
    }
    version = getattr(serving, "weight_version", None)
    if version not in (None, "default"):  # SGLang's text for none
        found["weight_version"] = str(version)
    return Identity("sglang", found, said)


def ranks_of(config: Any, *, replicated: bool) -> Any:
    """Which part of the model's KV a page has; `whole`: all of it. replicated: all TP ranks have the same."""
    sizes = {
        "tp": [config.tp_rank, config.tp_size],
        "pp": [config.pp_rank, config.pp_size],
        "cp": [config.attn_cp_rank, config.attn_cp_size],
    }
    if replicated:
        del sizes["tp"]
    parts = {key: value for key, value in sizes.items() if value[1] > 1}
    return parts or "whole"


def _namespace(name: str) -> Any:
    """A namespace of SGLang's configuration, or None: there is none, or this process may not read it."""
    try:
        from sglang.srt.runtime_context import get_context

        context = get_context()
        return context.config_bag(name) if context.is_config_namespace_published(name) else None
    except Exception:  # a release without it, or one whose processes have a list of what they read
        return None


def _of_model(model: Any, speculation: Any, lora: Any) -> dict[str, Any]:
    if model is None:
        return {}
    load, cache = getattr(model, "load_format", None), getattr(model, "download_dir", None)
    called, revision = weights_of(
        str(model.model_path), getattr(model, "revision", None), cache=cache, load_format=load
    )
    draft, adapters = _draft(speculation, cache), _adapters(lora, cache)
    if (draft and draft[2] is None) or any(known is None for _, known in adapters):
        revision = None
    overrides = {
        "configuration": getattr(model, "json_model_override_args", None),
        "parser": getattr(model, "model_config_parser", None),
        "decrypted": getattr(model, "decrypted_config_file", None),
    }
    quantization = [getattr(model, key, None) for key in ("quantization", "modelopt_quant", "torchao_config")]
    return {
        "model": called,
        "revision": revision,
        "weights": DUMMY if format_of(load) == DUMMY else None,
        "dtype": getattr(model, "dtype", None),
        "quantization": [str(each) for each in quantization if each] or None,
        "overrides": {key: value for key, value in overrides.items() if value not in (None, "", "{}", "auto")} or None,
        "draft": draft,
        "lora": digest_of(adapters) if adapters else None,
    }


def _draft(speculation: Any, cache: str | None) -> list[Any] | None:
    """Algorithm, draft model, its revision and what else changes its pages; None: there is none."""
    algorithm = getattr(speculation, "speculative_algorithm", None)
    path = getattr(speculation, "speculative_draft_model_path", None)
    if algorithm in _WITHOUT_WEIGHTS or path is None:
        return None
    names = ("quantization", "kv_cache_dtype", "window_size", "sink_size")
    keys = ("speculative_draft_model_quantization", *(f"speculative_draft_{name}" for name in names[1:]))
    load = getattr(speculation, "speculative_draft_load_format", None)
    revision = getattr(speculation, "speculative_draft_model_revision", None)
    weights = weights_of(str(path), revision, cache=cache, load_format=load)
    return [str(algorithm), *weights, *(getattr(speculation, key, None) for key in keys)]


def _adapters(lora: Any, cache: str | None) -> list[tuple[str, str | None]]:
    """The adapters of --lora-paths. SGLang's keys know them by name and path, behind which the weights may change."""
    found = []
    for each in getattr(lora, "lora_paths", None) or ():
        path = each.get("lora_path") if isinstance(each, dict) else getattr(each, "lora_path", each)
        path = str(path).rpartition("=")[2]
        revision = weights_of(path, cache=cache).revision
        if revision is None or revision not in path:  # else the path of a snapshot, which does not change
            found.append((path, revision))
    return sorted(found, key=lambda adapter: adapter[0])


def _format(model: Any, pool: Any) -> Any:
    """What the numbers are. None: bytes, and SGLang does not tell of which format."""
    dtypes = [str(value).removeprefix("torch.") for name in _DTYPES if (value := getattr(pool, name, None)) is not None]
    asked = getattr(model, "kv_cache_dtype", None)
    if asked is None and (not dtypes or any(dtype in _BYTES for dtype in dtypes)):
        return None
    more = [str(value) for key in ("qsa_indexer_dtype",) if (value := getattr(model, key, "auto")) != "auto"]
    return [*([str(asked)] if asked is not None else []), *dtypes, *more]


def _scales(path: str | None) -> str | None:
    if not path:
        return None
    try:
        with open(Path(path), encoding="utf-8") as file:
            return digest_of(json.loads(file.read(_LONGEST)))
    except (OSError, ValueError):
        return digest_of(str(path))


def _backend(exec_: Any) -> Any:
    """Those of prefill and decode, if they are not one."""
    bags = (exec_, getattr(exec_, "kernel", None))
    found = {
        kind or "all": value
        for kind in ("", "prefill", "decode")
        for bag in bags
        if (value := getattr(bag, f"{kind}_attention_backend" if kind else "attention_backend", None)) is not None
    }
    return found or None
