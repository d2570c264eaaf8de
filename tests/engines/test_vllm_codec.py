"""kvswap_codec: what vLLM's description of a cache means for a codec, and what is refused; the sizes that vLLM computes
from coded blocks. tests/integration/vllm_codec.py runs it in vLLM's own scheduler and workers."""

# mypy: ignore-errors

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvswap.codecs import CODECS, Field
from kvswap.vllm import _codec, _handler, _identity
from kvswap.vllm._memory import give_block_views

TOKENS, HEADS, SIZE = 16, 8, 128


@dataclasses.dataclass(frozen=True)
class Spec:
    """vLLM's KVCacheSpec of a layer, as far as kvswap reads it. Subclasses have the names of vLLM's."""

    dtype: str = "torch.bfloat16"
    head_size: int = SIZE
    head_size_v: int = SIZE
    num_kv_heads: int = HEADS
    block_size: int = TOKENS
    page_size_padded: int | None = None
    cache_dtype_str: str | None = None
    model_version: str | None = None
    row: int | None = None  # bytes of a token's head, if not keys and values
    kv_quant_mode: Any = None

    @property
    def unpadded_page_size_bytes(self) -> int:
        width = {"torch.bfloat16": 2, "torch.float16": 2, "torch.float32": 4}.get(self.dtype, 1)
        return TOKENS * self.num_kv_heads * (self.row or (self.head_size + self.head_size_v) * width)

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.unpadded_page_size_bytes


def spec_of(name: str, **values: Any) -> Spec:
    """Of one of vLLM's classes."""
    return type(name, (Spec,), {})(**values)


FULL, MLA = "FullAttentionSpec", "MLAAttentionSpec"
TOKEN = (Field(0, 256, "bf16"), Field(256, 256, "bf16"))


def latent(**values: Any) -> Spec:
    return spec_of(MLA, **{"num_kv_heads": 1, "head_size": 576, "head_size_v": 0, **values})


@pytest.mark.parametrize(
    ("spec", "fields", "pitch"),
    [
        (spec_of(FULL), TOKEN, 512),
        (spec_of("SlidingWindowSpec"), TOKEN, 512),
        (spec_of("ChunkedLocalAttentionSpec"), TOKEN, 512),
        (spec_of("CrossAttentionSpec"), TOKEN, 512),
        (spec_of(FULL, head_size_v=64), (Field(0, 256, "bf16"), Field(256, 128, "bf16")), 384),
        (spec_of(FULL, dtype="torch.float16"), (Field(0, 256, "fp16"), Field(256, 256, "fp16")), 512),
        (latent(), (Field(0, TOKENS * 1152, "bf16"),), TOKENS * 1152),
        (
            latent(dtype="torch.uint8", cache_dtype_str="fp8_ds_mla", row=656),
            (Field(0, 512, "e4m3"), Field(512, 16, "fp32"), Field(528, 128, "bf16")),
            656,
        ),
        (latent(dtype="torch.uint8", head_size=132), (), 0),  # an indexer's
        (spec_of(FULL, dtype="torch.uint8"), (), 0),
        (spec_of(FULL, dtype="torch.float8_e4m3fn"), (), 0),
        (spec_of(FULL, dtype="torch.int8", kv_quant_mode=SimpleNamespace(is_per_token_head=True)), (), 0),
        (spec_of("MambaSpec", page_size_padded=1 << 20), (), 0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Spec) else "",
)
def test_fields(spec: Spec, fields: tuple[Field, ...], pitch: int) -> None:
    page = _codec.page_of("layer", spec)
    assert page == (spec.unpadded_page_size_bytes, fields, pitch)
    assert page.is_coded("mxfp8") == any(field.kind in ("bf16", "fp16") for field in fields)


def test_fp4_leaves_the_rope_part_beside_latents_of_e4m3() -> None:
    """fp4 codes a bf16 cache as a whole. The RoPE part of fp8_ds_mla is in bf16 for its precision."""
    spec = latent(dtype="torch.uint8", cache_dtype_str="fp8_ds_mla", row=656)
    codecs = {name: _codec.page_of("layer", spec).coding(name).fields for name in CODECS}
    assert [field.codec for field in codecs["fp4"]] == [None, "raw", "raw"]
    assert codecs["exact"] == codecs["mxfp8"] == _codec.page_of("layer", spec).fields
    plan = _codec.plan_of("fp4", config_of(spec))
    nbytes = spec.unpadded_page_size_bytes
    assert nbytes / plan.coded_nbytes(nbytes, 16) > 1.55
    rows = np.random.default_rng(1).integers(0, 256, (TOKENS, 656)).astype(np.uint8)
    coding = plan.coding_of(nbytes)
    back = coding.decode(coding.encode(rows)[0])[0].reshape(rows.shape)
    assert np.array_equal(back[:, 512:], rows[:, 512:]) and not np.array_equal(back[:, :512], rows[:, :512])


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (spec_of("HiddenStateCacheSpec"), "a HiddenStateCacheSpec, whose bytes kvswap does not know"),
        (spec_of("TQFullAttentionSpec"), "a TQFullAttentionSpec"),
        (spec_of(FULL, dtype="torch.float64"), "keeps torch.float64"),
        (spec_of(FULL, row=300), "are not keys of 256 and values of 256 bytes"),
        (latent(dtype="torch.uint8", cache_dtype_str="fp8_ds_mla", row=584, model_version="deepseek_v4"), "656"),
    ],
)
def test_what_is_not_known_is_refused_by_its_layer(spec: Spec, why: str) -> None:
    with pytest.raises(ValueError, match=f"kvswap_codec: layer model.7.attn .*{why}.*Leave kvswap_codec out"):
        _codec.page_of("model.7.attn", spec)


def config_of(*groups: Any, **more: Any) -> Any:
    """KVCacheConfig of groups (spec, or specs by layer)."""
    found = []
    for g, spec in enumerate(groups):
        each = spec if isinstance(spec, dict) else {}
        names = list(each) or [f"{g}.{i}" for i in range(2)]
        held = SimpleNamespace(kv_cache_specs=each) if each else spec
        found.append(SimpleNamespace(layer_names=names, kv_cache_spec=held, **more))
    return SimpleNamespace(kv_cache_groups=found)


def test_all_layers_have_equal_pages() -> None:
    full, window = spec_of(FULL), spec_of("SlidingWindowSpec")
    plan = _codec.plan_of("exact", config_of(full, window))
    assert plan.page == _codec.page_of("", full) and plan.padded == full.page_size_bytes
    assert _codec.plan_of("exact", config_of({"a": full, "b": full})) == plan
    with pytest.raises(ValueError, match="layer b has other pages than layer a"):
        _codec.plan_of("exact", config_of({"a": full, "b": spec_of(FULL, head_size=64)}))
    with pytest.raises(ValueError, match=r"layer 1.0 has other pages than layer 0.0"):
        _codec.plan_of("exact", config_of(latent(), latent(dtype="torch.uint8", head_size=132)))
    assert _codec.plan_of("exact", config_of(full, host_resident=False)) == plan


@pytest.mark.parametrize(
    ("codec", "spec"),
    [
        ("exact", spec_of(FULL, dtype="torch.float16")),
        ("mxfp8", spec_of(FULL, dtype="torch.uint8")),
        ("fp4", spec_of("MambaSpec")),
    ],
)
def test_a_codec_that_codes_nothing_is_refused(codec: str, spec: Spec) -> None:
    with pytest.raises(ValueError, match=f"layer 0.0 has a cache that {codec} makes no smaller"):
        _codec.plan_of(codec, config_of(spec))


def test_tensors_hold_one_layer_or_several() -> None:
    full = spec_of(FULL)
    plan, page = _codec.plan_of("exact", config_of(full)), full.page_size_bytes
    one, four = plan.coding_of(page), plan.coding_of(4 * page)
    assert four.coded_nbytes == 4 * one.coded_nbytes and four.page_nbytes == page
    with pytest.raises(ValueError, match="no whole pages"):
        plan.coding_of(4 * page + 16)
    padded = _codec.plan_of("exact", config_of(spec_of(FULL, page_size_padded=page + 512)))
    assert padded.coding_of(page + 512).block_nbytes == page
    with pytest.raises(ValueError, match="padded pages of several layers"):
        padded.coding_of(2 * (page + 512))


def layers_of(*numbers: int, spec: Spec | None = None) -> dict[str, Spec]:
    return {f"model.layers.{number}.self_attn.attn": spec or spec_of(FULL) for number in numbers}


def canonical(plan: _codec.Plan, order: list[int]) -> Any:
    """CanonicalKVCaches with a tensor a layer: layer i has tensor order[i]."""
    tensors = [SimpleNamespace(page_size_bytes=plan.padded) for _ in order]
    return SimpleNamespace(tensors=tensors, group_data_refs=[[SimpleNamespace(tensor_idx=i) for i in order]])


def test_layers_that_are_kept() -> None:
    """Each layer's tensor has its own coding, whatever the order of tensors; a block is so much larger."""
    config = config_of(layers_of(0, 1, 2, 3))
    coded, plan = _codec.plan_of("fp4", config), _codec.plan_of("fp4", config, [0, 2])
    assert plan.kept == (True, False, True, False) and plan[:3] == coded[:3] and coded.kept == ()
    page = plan.page.nbytes
    found = plan.codings(canonical(plan, [2, 0, 3, 1]))
    assert [coding.lossless for coding in found] == [False, False, True, True]
    assert [coding.coded_nbytes > page for coding in found] == [False, False, True, True]
    nbytes = sum(coding.coded_nbytes for coding in found)
    assert plan.coded_nbytes(4 * page, 1) == nbytes > coded.coded_nbytes(4 * page, 1) * 2
    values = np.random.default_rng(1).integers(0, 1 << 16, (3, page // 2)).astype(np.uint16)
    assert np.array_equal(found[2].decode(found[2].encode(values)[0])[0].view(np.uint16), values)
    texts = {_codec.plan_of("fp4", config, keep).text for keep in ([], [0], [1], [0, 2], [0, 1, 2, 3])}
    assert len(texts) == 5, "stores of the file tier are told apart"


@pytest.mark.parametrize(
    ("groups", "keep", "why"),
    [
        ([layers_of(0, 1)], [2], "there is no layer 2: layers have the numbers 0 to 1"),
        ([layers_of(0, 1), layers_of(2, 3)], [0], "the cache has 2 groups of layers"),
        (
            [{"encoder.3.layers.7": spec_of(FULL)}],
            [7],
            "the name of layer encoder.3.layers.7 has no number, or several",
        ),
        ([{"attention": spec_of(FULL)}], [0], "the name of layer attention has no number"),
    ],
)
def test_layers_that_cannot_be_kept(groups: list[Any], keep: list[int], why: str) -> None:
    with pytest.raises(ValueError, match=f"kvswap_codec_keep: {why}.*Leave kvswap_codec_keep out"):
        _codec.plan_of("fp4", config_of(*groups), keep)


def test_kept_layers_need_a_tensor_each() -> None:
    plan = _codec.plan_of("fp4", config_of(layers_of(0, 1)), [0])
    together = SimpleNamespace(
        tensors=[SimpleNamespace(page_size_bytes=2 * plan.padded)], group_data_refs=[[SimpleNamespace(tensor_idx=0)]]
    )
    with pytest.raises(ValueError, match="the cache has 1 tensors for 2 layers, not one for each"):
        plan.codings(together)
    with pytest.raises(ValueError, match="a block of a worker has 3 pages for 2 layers"):
        plan.coded_nbytes(3 * plan.padded, 16)
    extra = {"kvswap_codec": "fp4", "kvswap_codec_keep": [0], **OURS}
    with pytest.raises(ValueError, match="divided among 2 pipeline stages"), _codec.planned(extra, None, stages=2):
        pass
    with _codec.planned(extra, config_of(layers_of(0, 1))):
        assert _codec.take_plan(extra) == plan


@pytest.mark.parametrize("keep", [[-1], [0, 0], "0", 0, [0.5], [True], ["1"], None])
def test_what_names_no_layers_is_refused(keep: Any) -> None:
    with pytest.raises(
        ValueError, match=r"kvswap_codec_keep.* is .* a list of layers, whole numbers from 0 on, each once"
    ):
        _handler.kept_layers_of({"kvswap_codec": "fp4", "kvswap_codec_keep": keep})
    with pytest.raises(ValueError, match="kvswap_codec_keep: no codec is set"):
        _handler.kept_layers_of({"kvswap_codec_keep": [1]})
    assert _handler.kept_layers_of({"kvswap_codec": "fp4", "kvswap_codec_keep": [3, 1]}) == (1, 3)
    assert _handler.kept_layers_of({}) == ()


@dataclasses.dataclass(frozen=True)
class OffloadingConfig:
    """vLLM's."""

    worker_kv_bytes_per_block: int
    cache: Any
    parallel: Any
    replicated_layout: bool = False


@pytest.mark.parametrize("alignment", [1, 4096])
@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("factor", [1, 2, 3, 16, 64])
def test_a_chunk_is_whole_blocks(factor: int, world: int, replicated: bool, alignment: int) -> None:
    """Of all workers together, with vLLM's alignment of a chunk: so its blocks are slots at one distance."""
    full = spec_of(FULL)
    plan = _codec.plan_of("exact", config_of(full))
    cache, parallel = SimpleNamespace(blocks_per_chunk=factor), SimpleNamespace(world_size=world)
    config = OffloadingConfig(5 * full.page_size_bytes, cache, parallel, replicated)
    block = _codec.shrink(config, plan, alignment).worker_kv_bytes_per_block
    coded = 5 * plan.coding_of(full.page_size_bytes).coded_nbytes
    assert 0 <= block - coded < max(16, alignment) and block % 16 == 0
    chunk = -(-factor * block * (1 if replicated else world) // alignment) * alignment
    assert factor == 1 or chunk % block == 0
    empty = dataclasses.replace(config, worker_kv_bytes_per_block=0)
    assert _codec.shrink(empty, plan, alignment).worker_kv_bytes_per_block == 0


OURS = {"spec_name": "KVSwapOffloadingSpec", "spec_module_path": "kvswap.vllm"}


def test_the_spec_takes_the_connectors_plan() -> None:
    extra, config = {"kvswap_codec": "exact", **OURS}, config_of(spec_of(FULL))
    with _codec.planned(extra, config):
        assert _codec.take_plan(extra) == _codec.plan_of("exact", config)
    with _codec.planned({}, config_of(spec_of("HiddenStateCacheSpec"))):
        assert _codec.take_plan({}) is None
    assert _codec.take_plan({}) is None
    with pytest.raises(ValueError, match='needs "kv_connector": "KVSwapConnector"'):
        _codec.take_plan(extra)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"canonical_layout": True}, "canonical_layout has fragments"),
        ({"spec_name": "Theirs", "spec_module_path": "their.module"}, "the spec Theirs does not move"),
        ({"kvswap_path": "dma"}, "kvswap_path dma moves bytes as they are"),
        ({"secondary_tiers": [{"type": "FileTier"}, {"type": "fs"}]}, "the secondary tier fs does not know"),
        ({"secondary_tiers": [{"type": "FileTier", "module_path": "theirs"}]}, "the secondary tier FileTier does"),
    ],
)
def test_what_does_not_go_with_a_codec_is_refused_by_name(more: dict[str, Any], why: str) -> None:
    config = config_of(spec_of(FULL))
    extra = {"kvswap_codec": "exact", **OURS, **more}
    with pytest.raises(ValueError, match=f"kvswap_codec: {why}"), _codec.planned(extra, config):
        pass
    with _codec.planned({**OURS, **more}, config):
        pass


def test_kvswaps_own_tiers_name_the_codec() -> None:
    """So no store of other blocks is found."""
    tiers = [{"type": "FileTier", "module_path": "kvswap.vllm"}, {"type": "RemoteTier"}]
    with _codec.planned({"kvswap_codec": "exact", **OURS, "secondary_tiers": tiers}, config_of(spec_of(FULL))):
        pass
    layouts = [None, *(_codec.plan_of(codec, config_of(spec_of(FULL))) for codec in ("exact", "mxfp8", "fp4"))]
    layouts.append(_codec.plan_of("exact", config_of(spec_of(FULL, head_size=64))))
    found = [_identity._layout(SimpleNamespace(plan=plan), None, None, None) for plan in layouts]
    assert found[0] is None and len({str(layout) for layout in found}) == len(layouts)


@pytest.mark.parametrize("factor", [1, 4])
@pytest.mark.parametrize("name", ["create_next_worker_view", "create_next_view"])
def test_a_worker_gets_views_of_coded_size(name: str, factor: int) -> None:
    """All tensors of a block together, in the worker's cell of each row of the region."""
    chunks, coded, padding = 5, [48, 32, 16], 32
    cell = factor * (sum(coded) + padding)
    base = np.zeros((chunks, 3 * cell), np.int8)

    class Region:
        _worker_offset, _worker_area_end = cell, 2 * cell

    def create(self: Any, nbytes: int) -> Any:
        return base[:, self._worker_offset : self._worker_offset + nbytes]

    setattr(Region, name, create)
    region = Region()
    give_block_views(region, coded, factor)
    views = [getattr(region, name)(12345) for _ in coded]
    for i, view in enumerate(views):
        assert view.shape == ((chunks, coded[i]) if factor == 1 else (chunks, factor, coded[i]))
        view[...] = i + 1
    cells = base.reshape(chunks, 3, factor, -1)
    assert not cells[:, [0, 2]].any()
    assert (cells[:, 1] == np.repeat([1, 2, 3, 0], [*coded, padding])).all()
    with pytest.raises(ValueError, match="a block has 1000 bytes"):
        give_block_views(Region(), [1000], factor)
