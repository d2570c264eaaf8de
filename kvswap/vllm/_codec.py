"""kvswap_codec: which bytes of vLLM's cache a codec codes, and what is refused (docs/codecs.md).

The scheduler and each worker compute the size of a coded block from the same description, KVCacheConfig, before vLLM's
spec computes how many chunks fit the host's memory. So all layers must have equal pages: the scheduler's copy of the
description has one layer's for a group of several kinds.

In vLLM's layouts the keys and the values of a token's head lie side by side, whatever lies outside of them: heads or
tokens, and, in a cache of all layers together, layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from kvswap.codecs import Coding, Field
from kvswap.codecs._pages import Page, kind_of, plain, token_by_token
from kvswap.vllm import _together
from kvswap.vllm._handler import codec_of, kept_layers_of

_ATTENTION = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "RSWASpec", "CrossAttentionSpec")
_MLA = ("MLAAttentionSpec", "SlidingWindowMLASpec")
_DS_MLA = 656  # bytes of a token in fp8_ds_mla: 512 fp8, 4 scales, 64 of RoPE


def _refuse(name: str, why: str) -> ValueError:
    return ValueError(f"kvswap_codec: layer {name} {why}. Leave kvswap_codec out for this model")


def _cell_of(spec: Any, nbytes: int) -> float:
    """Bytes of a token's head. Releases with layouts say them."""
    said = getattr(spec, "state_content_size_bytes", None)
    tokens = getattr(spec, "storage_block_size", spec.block_size)
    return int(said) if said is not None else nbytes / (tokens * spec.num_kv_heads)


def page_of(name: str, spec: Any) -> Page:
    """What a layer's page holds, from its KVCacheSpec. ValueError, with the layer's name: it is not known."""
    kind = type(spec).__name__
    if kind == "MambaSpec":  # a state, which each step changes: an error would stay in it
        return Page(int(dataclasses.replace(spec, page_size_padded=None).page_size_bytes))
    if kind not in _ATTENTION + _MLA:
        raise _refuse(name, f"has a {kind}, whose bytes kvswap does not know")
    nbytes = int(spec.unpadded_page_size_bytes)
    if getattr(spec, "cache_dtype_str", None) == "fp8_ds_mla":
        if getattr(spec, "model_version", None) is not None or nbytes % _DS_MLA:
            raise _refuse(name, "keeps fp8_ds_mla of another form than rows of 656 bytes")
        return Page(nbytes, (Field(0, 512, "e4m3"), Field(512, 16, "fp32"), Field(528, 128, "bf16")), _DS_MLA)
    of = kind_of(spec.dtype)
    if of == "raw" or getattr(getattr(spec, "kv_quant_mode", None), "is_per_token_head", False):
        return Page(nbytes)
    if of is None:
        raise _refuse(name, f"keeps {spec.dtype}, which kvswap does not know")
    width = 4 if of == "fp32" else 2
    values = 0 if kind in _MLA else getattr(spec, "head_size_v", spec.head_size)
    k, v = int(spec.head_size) * width, int(values) * width
    if _cell_of(spec, nbytes) != k + v:
        raise _refuse(name, f"has {nbytes} bytes a page, which are not keys of {k} and values of {v} bytes")
    return token_by_token(nbytes, k, v, of) if v else plain(nbytes, of)


def _refuse_keep(why: str) -> ValueError:
    return ValueError(f"kvswap_codec_keep: {why}. Leave kvswap_codec_keep out for this model")


def _specs_of(kv_cache_config: Any) -> Iterator[tuple[str, Any]]:
    for group in kv_cache_config.kv_cache_groups:
        if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
            continue
        each = getattr(group.kv_cache_spec, "kv_cache_specs", None) or {}
        for name in group.layer_names:
            yield name, each.get(name, group.kv_cache_spec)


class Plan(NamedTuple):
    """The codec, and the page that all layers have. padded: bytes from page to page on the GPU. kept: of each layer,
    whether its bytes stay as they are; empty: of none."""

    codec: str
    page: Page
    padded: int
    kept: tuple[bool, ...] = ()

    def _pages(self, nbytes: int, what: str) -> int:
        if nbytes % self.padded:
            raise ValueError(f"kvswap_codec: {what} has {nbytes} bytes, no whole pages of {self.padded}")
        if self.padded > self.page.nbytes and nbytes > self.padded:
            raise ValueError(f"kvswap_codec: {what} has padded pages of several layers side by side")
        return nbytes // self.padded

    def coding_of(self, nbytes: int) -> Coding:
        """Of a tensor whose blocks have so many bytes: those of a layer, or of several side by side."""
        return self.page.coding(self.codec, self._pages(nbytes, "a tensor's block"))

    def codings(self, kv_caches: Any) -> list[Coding]:
        """Of each tensor of CanonicalKVCaches."""
        nbytes = [int(entry.page_size_bytes) for entry in kv_caches.tensors]
        if not self.kept:
            return [self.coding_of(each) for each in nbytes]
        tensors = [[int(ref.tensor_idx) for ref in refs] for refs in kv_caches.group_data_refs]
        if len(tensors) != 1 or sorted(tensors[0]) != list(range(len(self.kept))) or set(nbytes) != {self.padded}:
            raise _refuse_keep(f"the cache has {len(nbytes)} tensors for {len(self.kept)} layers, not one for each")
        found = {
            tensor: self._page(kept).coding(self.codec) for tensor, kept in zip(tensors[0], self.kept, strict=True)
        }
        return [found[tensor] for tensor in range(len(nbytes))]

    def _page(self, kept: bool) -> Page:
        return self.page.kept() if kept else self.page

    @property
    def text(self) -> str:
        """What the coded bytes of a page mean, and which layers have others."""
        text = self.page.coding(self.codec).text
        return f"{text} {[i for i, kept in enumerate(self.kept) if kept]}" if self.kept else text

    def coded_nbytes(self, nbytes: int, alignment: int) -> int:
        """Of a block of a worker, of so many bytes. alignment: what it is a multiple of, at least 16."""
        pages = nbytes // self.padded
        if nbytes % self.padded:
            raise ValueError(f"kvswap_codec: a block has {nbytes} bytes, no whole pages of {self.padded}")
        if self.kept and pages != len(self.kept):
            raise _refuse_keep(f"a block of a worker has {pages} pages for {len(self.kept)} layers, not one for each")
        layers = self.kept or (False,) * pages
        coded = sum(self._page(kept).coding(self.codec).coded_nbytes for kept in layers)
        return -(-coded // alignment) * alignment


def _number_of(name: str) -> int:
    """Of a layer, by its name: model.layers.7.self_attn.attn."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise _refuse_keep(f"the name of layer {name} has no number, or several")
    return numbers[0]


def _kept_of(names: list[str], groups: int, keep: Sequence[int]) -> tuple[bool, ...]:
    """Of each layer. keep: numbers."""
    numbers = [_number_of(name) for name in names] if keep else []
    missing = sorted(set(keep) - set(numbers))
    if keep and groups != 1:
        raise _refuse_keep(f"the cache has {groups} groups of layers, which share memory")
    if missing:
        raise _refuse_keep(f"there is no layer {missing[0]}: layers have the numbers {min(numbers)} to {max(numbers)}")
    return tuple(number in keep for number in numbers)


def plan_of(codec: str, kv_cache_config: Any, keep: Sequence[int] = ()) -> Plan:
    """keep: numbers of layers whose bytes stay as they are. ValueError: kvswap does not know what a layer holds, or
    would code nothing of it."""
    found: tuple[str, Page, int] | None = None
    specs = list(_specs_of(kv_cache_config))
    for name, spec in specs:
        page, padded = page_of(name, spec), int(spec.page_size_bytes)
        if found is None:
            found = name, page, padded
        if found[1:] != (page, padded):
            raise _refuse(name, f"has other pages than layer {found[0]}")
    if found is None:
        raise ValueError("kvswap_codec: the model has no layer with a cache")
    if not found[1].is_coded(codec):
        raise _refuse(found[0], f"has a cache that {codec} makes no smaller")
    return Plan(codec, *found[1:], _kept_of([name for name, _ in specs], len(kv_cache_config.kv_cache_groups), keep))


# -- from the connector to the spec that it makes --------------------------------------------------------------------

_planned: ContextVar[Plan | None] = ContextVar("kvswap_codec", default=None)


@contextlib.contextmanager
def planned(extra_config: Mapping[str, Any], kv_cache_config: Any, stages: int = 1) -> Iterator[None]:
    """Specs that are made here take the plan, if the configuration has a codec. stages: of the model's pipeline.
    ValueError as plan_of()."""
    codec, keep = codec_of(extra_config), kept_layers_of(extra_config)
    if codec is None:
        yield
        return
    _together.check_codec(extra_config, True)
    if extra_config.get("spec_module_path") != "kvswap.vllm":
        raise ValueError(
            f"kvswap_codec: the spec {extra_config.get('spec_name')} does not move blocks by kvswap. Leave out "
            "spec_name or kvswap_codec"
        )
    if keep and stages > 1:
        raise _refuse_keep(
            f"the layers are divided among {stages} pipeline stages, whose blocks would have other sizes"
        )
    token = _planned.set(plan_of(codec, kv_cache_config, keep))
    try:
        yield
    finally:
        _planned.reset(token)


def take_plan(extra_config: Mapping[str, Any]) -> Plan | None:
    """For a spec that is being made. ValueError: a codec, and not KVSwapConnector."""
    plan = _planned.get()
    if codec_of(extra_config) is not None:
        _together.check_codec(extra_config, plan is not None)
    return plan


def shrink(config: Any, plan: Plan, alignment: int) -> Any:
    """vLLM's OffloadingConfig with coded blocks, from which its spec computes chunks and cells. alignment: of a chunk,
    all workers together."""
    nbytes = int(config.worker_kv_bytes_per_block)
    step = 16 if int(config.cache.blocks_per_chunk) == 1 else max(16, step_of(config, alignment))
    return dataclasses.replace(config, worker_kv_bytes_per_block=plan.coded_nbytes(nbytes, step) if nbytes else 0)


def step_of(config: Any, alignment: int) -> int:
    """What a block's bytes are a multiple of, where a chunk is whole blocks, so that these are slots at one
    distance."""
    ranks = 1 if getattr(config, "replicated_layout", False) else int(config.parallel.world_size)
    return alignment // math.gcd(alignment, int(config.cache.blocks_per_chunk) * ranks)
