"""What the bytes of vLLM's blocks mean, for its tiers (kvswap.identity).

A tier is given an OffloadingSpec and with it an OffloadingConfig, which knows neither weights nor quantization nor
where layers lie. VllmConfig does. The functions of vLLM that make the tier have it in their frames, beside a
KVCacheConfig, and it is read there. Where none has it (a program that makes a tier by itself), what only VllmConfig
knows is unknown.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from kvswap._revision import DUMMY, format_of, weights_of
from kvswap.identity import RUN_TIME, Identity, Said, digest_of

_FRAMES = 64  # of callers in which VllmConfig is looked for
_SEEDED = "DEFAULT_NONE_HASH_SEED"  # vLLM has it from 0.30 on: before, an unset PYTHONHASHSEED means a random seed
_RANDOMLY_SEEDED = ("xxhash",)  # algorithms that have a random one still
_NOT_IN_BYTES = {"is_draft", "max_tp_shards", "block_stride_alignment", "dcp_sharded", "extra_retained_tokens"}
_LONG = ("longrope", "su")  # positions depend on whether requests may be longer than the model was trained for


def identity_of(offloading_spec: Any, said: Said) -> Identity:
    """Of the blocks of the host tier that this spec makes."""
    config = getattr(offloading_spec, "config", None)
    vllm, cache = _configs(offloading_spec, config)
    found = _of_model(vllm, config) | _of_cache(vllm, config) | _of_layers(offloading_spec, vllm, cache, config)
    return Identity("vllm", found, said)


def _configs(spec: Any, config: Any) -> tuple[Any, Any]:
    """VllmConfig and KVCacheConfig, or None."""
    frame = sys._getframe(1)
    engine_id = getattr(config, "engine_id", None)
    for _ in range(_FRAMES):
        here = {type(value).__name__: value for value in frame.f_locals.values()}
        found = here.get("VllmConfig")
        if found is not None and _get(found, "kv_transfer_config.engine_id") == engine_id:
            return found, here.get("KVCacheConfig")
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None, None


def _get(thing: Any, path: str, default: Any = None) -> Any:
    """thing.a.b.c; default where there is none."""
    for name in path.split("."):
        thing = getattr(thing, name, None)
        if thing is None:
            return default
    return thing


def _name(value: Any) -> Any:
    """An enum's name, a dtype's without torch; other values as they are."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(getattr(value, "name", value)).removeprefix("torch.")


# -- the model --------------------------------------------------------------------------------------------------------


def _of_model(vllm: Any, config: Any) -> dict[str, Any]:
    model = _get(vllm, "model_config")
    if model is None:
        name = str(_get(config, "model.name"))
        called, revision = weights_of(name)
        return {"model": called, "revision": revision}
    load = _get(vllm, "load_config.load_format")
    called, revision = weights_of(
        model.model,
        _get(model, "revision"),
        cache=_get(vllm, "load_config.download_dir"),
        load_format=load,
        read=_get(model, "hf_config._commit_hash"),
    )
    draft, known = _draft(_get(vllm, "speculative_config"))
    return {
        "model": called,
        "revision": revision if known and not _get(model, "model_weights") else None,  # else in an object store
        "weights": DUMMY if format_of(load) == DUMMY else None,
        "dtype": _name(_get(model, "dtype")),
        "quantization": _quantization(model),
        "rope": _rope(model),
        "overrides": _overrides(model),
        "mla": _get(model, "use_mla"),
        "draft": draft,
    }


def _quantization(model: Any) -> Any:
    method, more = _name(_get(model, "quantization")), _get(model, "quantization_config")
    return [method, digest_of(_value(more))] if more else method


def _rope(model: Any) -> Any:
    text = _get(model, "hf_text_config")
    rope = _get(text, "rope_parameters") or {
        name: value for name in ("rope_theta", "rope_scaling") if (value := getattr(text, name, None)) is not None
    }
    kinds = [rope.get("rope_type"), (rope.get("rope_scaling") or {}).get("rope_type")] if rope else []
    if any(kind in _LONG for kind in kinds):
        trained = _get(text, "original_max_position_embeddings") or rope.get("original_max_position_embeddings") or 0
        rope = {**rope, "longer": model.max_model_len > trained}
    return rope or None


def _overrides(model: Any) -> Any:
    """What vLLM is told to change in the model's configuration, and from where else it takes code."""
    told = {name: _get(model, name) for name in ("hf_config_path", "code_revision", "model_class_overrides")}
    changes = _get(model, "hf_overrides")
    if callable(changes):  # what it makes of the configuration
        made: dict[str, Any] = model.hf_config.to_dict()
        changes = digest_of({name: value for name, value in made.items() if name != "transformers_version"})
    told["hf_overrides"] = changes
    return {name: value for name, value in told.items() if value} or None


def _draft(speculative: Any) -> tuple[Any, bool]:
    """The draft model, if there is one with pages of its own; whether its weights are known."""
    model = _get(speculative, "draft_model_config")
    method = _get(speculative, "method")
    if model is None or method in ("ngram", "ngram_gpu", "suffix"):
        return None, True
    load = _get(speculative, "draft_load_config.load_format")
    called, revision = weights_of(model.model, _get(model, "revision"), load_format=load)
    more = [_name(_get(speculative, name)) for name in ("quantization", "kv_cache_dtype")]
    return [method, called, revision, *more], revision is not None


# -- the cache --------------------------------------------------------------------------------------------------------


def _of_cache(vllm: Any, config: Any) -> dict[str, Any]:
    cache = _get(vllm, "cache_config")
    dtype = _name(_get(cache, "cache_dtype"))
    if dtype in (None, "auto"):
        dtype = _name(_get(config, "model.dtype") or _get(vllm, "model_config.dtype"))
    names = ("kv_cache_dtype_skip_layers", "mamba_cache_dtype", "mamba_ssm_cache_dtype")
    more = {name: _name(value) for name in names if (value := _get(cache, name)) and value != "auto"}
    indexer = _name(_get(vllm, "attention_config.indexer_kv_dtype", "auto"))
    more |= {"indexer": indexer} if indexer != "auto" else {}
    at_run_time = _get(cache, "calculate_kv_scales", False) and str(dtype).startswith("fp8")
    return {
        "kv_format": [dtype, more] if more else dtype,
        "kv_scales": RUN_TIME if at_run_time else None,
        "hash": _hash(cache),
    }


def _hash(cache: Any) -> Any:
    """The algorithm of keys, and a digest of their seed. None: the seed is random, so that no other process has it."""
    from vllm.v1.core import kv_cache_utils

    algorithm = _name(_get(cache, "prefix_caching_hash_algo"))
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        if str(algorithm).startswith(_RANDOMLY_SEEDED):
            return None
        seed = getattr(kv_cache_utils, _SEEDED, None)
    if seed is None:
        return None
    return [algorithm, hashlib.sha256(seed.encode()).hexdigest()[:16]]


# -- layers and ranks -------------------------------------------------------------------------------------------------


def _of_layers(spec: Any, vllm: Any, cache: Any, config: Any) -> dict[str, Any]:
    backends = {
        "backend": _name(_get(vllm, "attention_config.backend")) or os.environ.get("VLLM_ATTENTION_BACKEND"),
        **{kind: _name(one) for kind, one in (_get(vllm, "attention_config.backend_per_kind") or {}).items()},
    }
    return {
        "layout": _layout(spec, vllm, cache, config),
        "backend": {kind: name for kind, name in backends.items() if name} or None,
        "tokens": _tokens(spec, cache, config),
        "layers": _layers(cache, config),
        "ranks": _ranks(spec, vllm, config),
    }


def _layout(spec: Any, vllm: Any, cache: Any, config: Any) -> Any:
    order = _get(config, "kv_cache_layout") or _get(vllm, "cache_config.kv_cache_layout")
    found = {"order": order or os.environ.get("VLLM_KV_CACHE_LAYOUT")}
    if order is None:  # 0.26: what each runner makes of it
        found["runner"] = _get(vllm, "use_v2_model_runner")
    if _get(config, "canonical_layout", False):
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import canonical_mapping

        found["canonical"] = canonical_mapping.CANONICAL_FORMAT_VERSION
    found["coded"] = _get(spec, "plan.text")  # kvswap_codec
    found["chunks"] = "block by block" if _get(spec, "by_blocks", False) else None  # kvswap_share
    places = [_place(one, cache.num_blocks) for one in _get(cache, "kv_cache_tensors") or ()]
    found["places"] = digest_of(places)[:16] if places else None
    return {name: value for name, value in found.items() if value is not None} or None


def _place(tensor: Any, blocks: int) -> list[Any]:
    """Where a block has the pages of these layers, whatever the number of blocks."""
    names = list(_get(tensor, "layers") or _get(tensor, "shared_by") or ())
    layer_stride, block_stride = getattr(tensor, "layer_stride", 0), getattr(tensor, "block_stride", 0)
    if layer_stride and layer_stride >= block_stride * blocks:  # each layer has its blocks together
        return [names, block_stride]
    if not block_stride:
        return [names, tensor.size // max(1, blocks)]
    return [names, layer_stride, block_stride, getattr(tensor, "offset", 0)]


def _tokens(spec: Any, cache: Any, config: Any) -> dict[str, Any]:
    """Of a block in each group, of a hash; and the blocks of a stored chunk."""
    blocks = [group.tokens_per_block for group in config.groups]
    return {
        "block": blocks if len(set(blocks)) > 1 else blocks[:1],
        "hash": _get(config, "cache.tokens_per_hash"),
        "blocks": _get(spec, "blocks_per_chunk") or 1,
    }


def _layers(cache: Any, config: Any) -> Any:
    """The groups in a few words, and a digest of all that their specs have in them."""
    known = _get(config, "groups") or _get(cache, "kv_cache_groups")
    names = [list(group.layer_names) for group in known]
    specs = [_spec(group.kv_cache_spec) for group in _get(cache, "kv_cache_groups") or ()]
    kinds = [spec["kind"] for spec in specs] or ["layers"] * len(names)
    words = [f"{len(some)} {kind}" for some, kind in zip(names, kinds, strict=False)]
    return [", ".join(words), digest_of([names, specs])]


def _spec(spec: Any) -> dict[str, Any]:
    """A KVCacheSpec: all of its fields but those that say nothing of bytes."""
    found: dict[str, Any] = {"kind": type(spec).__name__}
    fields: Iterable[str] = (
        (field.name for field in dataclasses.fields(spec)) if dataclasses.is_dataclass(spec) else vars(spec)
    )
    for name in fields:
        if name not in _NOT_IN_BYTES:
            found[name] = _value(getattr(spec, name))
    return found


def _value(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _spec(value)
    if isinstance(value, Mapping):
        return {str(key): _value(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_value(one) for one in value]
    return _name(value)


def _ranks(spec: Any, vllm: Any, config: Any) -> Any:
    """Which part of the model's KV a block has; `whole`: all of it, once.

    The host tier's rows have the parts of all ranks, one after the other, except where all ranks have the same KV (MLA)
    and vLLM keeps one copy of it.
    """
    parallel = _get(config, "parallel") or _get(vllm, "parallel_config")
    sizes = {
        short: _get(parallel, f"{short}_size") or _get(parallel, f"{name}_size") or 1
        for short, name in (
            ("tp", "tensor_parallel"),
            ("pp", "pipeline_parallel"),
            ("pcp", "prefill_context_parallel"),
            ("dcp", "decode_context_parallel"),
        )
    }
    rank = _get(parallel, "rank", 0)
    if max(sizes.values()) == 1 and rank == 0:
        return "whole"
    if _get(spec, "replicated_layout", _get(config, "replicated_layout", False)):
        return "whole"
    cut = _get(vllm, "parallel_config.cp_kv_cache_interleave_size") if sizes["pcp"] * sizes["dcp"] > 1 else None
    return {**sizes, "rank": rank, **({"interleave": cut} if cut else {})}
