"""All layers of a block together in the GPU's cache: one copy a block, by the copy engine alone.

With a tensor a layer small pages need kernels, which take the model's SMs. vLLM's first model runner asks its connector
for the other layout (prefer_cross_layer_blocks). The second one, which most dense models have, takes a tensor a layer,
and so does any runner from 0.30 on under vLLM's own OffloadingConnector. What is done about it:

- 0.26: the second runner has a packed layout, which vLLM plans for DeepSeek V4 (KVCacheTensor.block_stride).
  The engine's core plans it before there is a connector, so kvswap replaces the planner's function that decides on it
  (_use_packed_kv_cache_config). Before 0.26 that layout swaps a page's heads and tokens, and is not used.
- from 0.30 on: a connector's class names the layout that it prefers (get_required_kvcache_layout). vLLM takes another
  one, and says so, where an attention backend does not support it.

In both, the bytes of a layer lie side by side in a block, so that steps can wait for a part of it (kvswap_overlap,
_parts.py). In the first runner's tensor they do not: with kvswap_overlap that runner keeps a tensor a layer.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

from kvswap.vllm._handler import block_first_of, kept_layers_of
from kvswap.vllm._plugin import PLANNER

_LAYER_FIRST, _BLOCK_FIRST = "LBHNC", "BLHNC"
_FIRST_RIGHT = 0, 26  # vLLM's first release whose packed layout is right
_WHOLE = (None, 16, 32, 64)  # tokens: blocks that no attention backend takes for several; None: not known yet


def _has_files_of_chunks(extra_config: Any) -> bool:
    """Tiers behind the host's keep a chunk of several blocks as the GPU's cache lies, and do not name that layout."""
    chunks = extra_config.get("blocks_per_chunk", 1) != 1 or extra_config.get("block_size") is not None
    return chunks and bool(extra_config.get("secondary_tiers"))


def _kinds_of_layers(model: Any) -> int:
    return len(set(getattr(getattr(model, "hf_text_config", None), "layer_types", None) or ()))


def _not_whole(tokens: int | None) -> str | None:
    """Why blocks of so many tokens keep a tensor a layer."""
    return None if tokens in _WHOLE else f"a block of {tokens} tokens may be several of the attention backend's"


def why_not(vllm_config: Any) -> str | None:
    """Why this configuration keeps a tensor a layer; None: nothing is against one of all layers. ValueError: a wrong
    option."""
    transfer, model = vllm_config.kv_transfer_config, vllm_config.model_config
    if transfer is None or transfer.kv_connector != "KVSwapConnector":
        return "KVSwapConnector is not the connector"
    extra_config = transfer.kv_connector_extra_config
    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    against = {
        "kvswap_block_first is false": not block_first_of(extra_config),
        "kvswap_codec_keep keeps layers apart": bool(kept_layers_of(extra_config)),
        "canonical_layout keeps layers apart": bool(extra_config.get("canonical_layout")),
        "secondary tiers have several blocks a chunk": _has_files_of_chunks(extra_config),
        # Measured: a decode step took 1.06 to 1.18 times as long with the latents of all layers together (0.26, H100).
        "the model has MLA": bool(getattr(model, "use_mla", False)),
        "some layers have no attention cache": any(
            getattr(model, name, False) for name in ("is_hybrid", "has_inner_state")
        ),
        "the layers are of several kinds": _kinds_of_layers(model) > 1,
        "FlexAttention wants a dense tensor": "FLEX" in str(getattr(backend, "name", backend)).upper(),
    }
    reason = next((reason for reason, holds in against.items() if holds), None)
    return reason or _not_whole(vllm_config.cache_config.block_size)


def why_not_groups(groups: Any) -> str | None:
    """In 0.26: why the layers of these groups keep a tensor each; None: they can lie together."""
    if len(groups) != 1:  # vLLM's own key for these is enable_cross_layers_blocks
        return f"the cache has {len(groups)} groups"
    spec = groups[0].kv_cache_spec
    if not getattr(spec, "indexes_kv_by_block_stride", False):
        return f"the attention backend does not take it ({type(spec).__name__})"
    if getattr(spec, "page_size_padded", None) is not None:
        return "its pages are padded"
    return _not_whole(spec.block_size)


def layout(vllm_config: Any, theirs: str | None) -> str | None:
    """From 0.30 on: the layout to prefer in place of vLLM's own choice. If a connector of several connectors asks,
    which must agree, vLLM's choice stays."""
    asked_by_parent = sys._getframe(2).f_code.co_name == "get_required_kvcache_layout"
    if theirs != _LAYER_FIRST or asked_by_parent or why_not(vllm_config) is not None:
        return theirs
    return _BLOCK_FIRST


def is_packed(kv_cache_config: Any) -> bool:
    """In 0.26: whether a plan has all layers of a block together."""
    return any(getattr(tensor, "block_stride", 0) for tensor in kv_cache_config.kv_cache_tensors)


def _decision() -> Any:
    """The planner's function that decides on the packed layout; None: this process, or this release, has none that is
    known."""
    theirs = getattr(sys.modules.get(PLANNER), "_use_packed_kv_cache_config", None)
    release = re.match(r"(\d+)\.(\d+)", str(getattr(sys.modules.get("vllm"), "__version__", "")))
    if theirs is None or release is None or tuple(map(int, release.groups())) < _FIRST_RIGHT:
        return None
    return theirs if list(inspect.signature(theirs).parameters) == ["vllm_config", "kv_cache_groups"] else None


def is_installed() -> bool:
    """Whether this process plans caches as KVSwapConnector wants them."""
    return getattr(_decision(), "of_kvswap", False)


def install() -> None:
    """In a process that plans caches; once."""
    theirs = _decision()
    if theirs is None or is_installed():
        return

    @functools.wraps(theirs)
    def packed(vllm_config: Any, kv_cache_groups: Any) -> bool:
        second_runner = getattr(vllm_config, "use_v2_model_runner", False)
        ours = second_runner and why_not(vllm_config) is None and why_not_groups(kv_cache_groups) is None
        return ours or bool(theirs(vllm_config, kv_cache_groups))

    packed.of_kvswap = True  # type: ignore[attr-defined]
    sys.modules[PLANNER]._use_packed_kv_cache_config = packed  # type: ignore[attr-defined]
