"""All layers of a block together in the GPU's cache, too: one copy a block, by the copy engine alone.

vLLM's first model runner asks its connector for this (prefer_cross_layer_blocks), but the second one, which most dense
models have, takes a tensor a layer, and so does any from 0.29 on under vLLM's own OffloadingConnector. With a tensor a
layer small pages need kernels, which take the model's SMs.

- 0.24 to 0.28: the second runner takes a packed cache where the plan has one (KVCacheTensor.block_stride), as for
  DeepSeek V4. vLLM's engine core plans it before there is a connector, so its question
  (kv_cache_utils._use_packed_kv_cache_config) is answered here.
- from 0.29 on: a connector's class says which layout it prefers (get_required_kvcache_layout); where a backend does not
  have it, vLLM says so and takes another.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from kvswap.vllm._handler import block_first_of, overlap_of
from kvswap.vllm._plugin import PLANNER

_LAYER_FIRST, _BLOCK_FIRST = "LBHNC", "BLHNC"
_WHOLE = (16, 32, 64)  # tokens: a block that no attention backend takes for several, which a packed plan does not allow


def is_wanted(vllm_config: Any) -> bool:
    """Whether the connector is KVSwapConnector, and nothing needs layers of their own: a step that waits for one layer
    after another (kvswap_overlap), or vLLM's canonical_layout. Nor for MLA: decoding alone took a tenth longer with its
    latents of all layers together (0.26, H100)."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != "KVSwapConnector":
        return False
    extra_config = transfer.kv_connector_extra_config
    by_layer = overlap_of(extra_config).on or bool(extra_config.get("canonical_layout"))
    mla = bool(getattr(vllm_config.model_config, "use_mla", False))
    return block_first_of(extra_config) and not by_layer and not mla


def layout(vllm_config: Any, theirs: str | None) -> str | None:
    """From 0.29 on: the layout to prefer, in the place of vLLM's own choice."""
    return _BLOCK_FIRST if theirs == _LAYER_FIRST and is_wanted(vllm_config) else theirs


def why_not_groups(groups: Any) -> str | None:
    """Why the layers of these groups keep a tensor each; None: they can lie together."""
    if len(groups) != 1:  # vLLM's own key for these is enable_cross_layers_blocks
        return f"the cache has {len(groups)} groups"
    spec = groups[0].kv_cache_spec
    if not getattr(spec, "indexes_kv_by_block_stride", False):
        return f"the attention backend does not take it ({type(spec).__name__})"
    if spec.block_size not in _WHOLE:
        return f"blocks of {spec.block_size} tokens may be several of the attention backend's"
    if getattr(spec, "page_size_padded", None) is not None:
        return "its pages are padded"
    return None


def is_packed(kv_cache_config: Any) -> bool:
    """To 0.28: whether a plan has all layers of a block together."""
    return any(getattr(tensor, "block_stride", 0) for tensor in kv_cache_config.kv_cache_tensors)


def install() -> None:
    """In a process that plans caches; once, and in releases that ask (0.24 to 0.28)."""
    planner = sys.modules.get(PLANNER)
    theirs = getattr(planner, "_use_packed_kv_cache_config", None)
    if theirs is None or getattr(theirs, "of_kvswap", False):
        return
    if list(inspect.signature(theirs).parameters) != ["vllm_config", "kv_cache_groups"]:
        return

    @functools.wraps(theirs)
    def packed(vllm_config: Any, kv_cache_groups: Any) -> bool:
        ours = is_wanted(vllm_config) and vllm_config.use_v2_model_runner and why_not_groups(kv_cache_groups) is None
        return ours or bool(theirs(vllm_config, kv_cache_groups))

    packed.of_kvswap = True  # type: ignore[attr-defined]
    planner._use_packed_kv_cache_config = packed  # type: ignore[union-attr]
