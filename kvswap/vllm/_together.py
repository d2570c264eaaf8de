"""Keys of kv_connector_extra_config that do not go together, or not with another connector.

An engine with them does not start; kvswap doctor --config says so before. All here raise ValueError with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvswap.codecs._coding import PATHS
from kvswap.vllm._handler import codec_of, falls_back, lend_of, options_of, overlap_of, replicas_of, share_of

TIERS = ("FileTier", "RemoteTier")  # whose stores name the codec, and the order of blocks
_ONE = "Leave out one of the two"


def check(extra: Mapping[str, Any], connector: bool) -> None:
    """All that can be said without vLLM. connector: it is KVSwapConnector."""
    if replicas_of(extra) is not None:
        check_replicas(extra, connector, extra.get("spec_name") == "TieringOffloadingSpec")
    if lend_of(extra) is not None:
        check_lend(extra, connector)
    if share_of(extra) is not None:
        check_share(extra, connector)
    if codec_of(extra) is not None:
        check_codec(extra, connector)


def check_lend(extra: Mapping[str, Any], connector: bool) -> None:
    if share_of(extra) is not None:
        raise ValueError(f"kvswap_lend: with kvswap_share the ranks of an engine are a group already. {_ONE}")
    _check_links("kvswap_lend", "lent", extra)
    _check_connector("kvswap_lend", connector)


def check_share(extra: Mapping[str, Any], connector: bool) -> None:
    _check_links("kvswap_share", "shared", extra)
    _check_connector("kvswap_share", connector)


def check_replicas(extra: Mapping[str, Any], connector: bool, tiering: bool) -> None:
    """tiering: the spec is vLLM's tiering spec, or derived from it."""
    why = ""
    if share_of(extra) is not None:
        why = f"kvswap_share is for the ranks of one engine. {_ONE}"
    elif falls_back(extra):
        why = f"with kvswap_fallback vLLM's own transfers may stay, which know no common pool. {_ONE}"
    elif extra.get("canonical_layout"):
        why = f"canonical_layout has rows of another form. {_ONE}"
    elif extra.get("eviction_policy", "lru") != "lru" or extra.get("cache_policy_module_path"):
        why = (
            "the common index evicts the least recently used block. Leave out eviction_policy, cache_policy_module_path"
        )
    elif extra.get("store_threshold", 0) not in (0, 1):
        why = "the common index stores what it is offered. Leave out store_threshold"
    elif tiering:
        why = "secondary tiers take the host pool for one engine's. Leave out spec_name TieringOffloadingSpec"
    if why:
        raise ValueError(f"kvswap_replicas: {why}")
    _check_connector("kvswap_replicas", connector)


def check_codec(extra: Mapping[str, Any], connector: bool) -> None:
    path, foreign = options_of(extra)["path"], foreign_tier(extra)
    if extra.get("canonical_layout"):
        raise ValueError(
            f"kvswap_codec: canonical_layout has fragments of pages in the host's memory, which no codec codes. {_ONE}"
        )
    if path not in PATHS:
        raise ValueError(f"kvswap_codec: kvswap_path {path} moves bytes as they are. Use one of {', '.join(PATHS)}")
    if foreign is not None:
        raise ValueError(
            f"kvswap_codec: the secondary tier {foreign} does not know that blocks are coded. Use "
            f"{' or '.join(TIERS)} of kvswap.vllm, or leave out kvswap_codec"
        )
    if not connector:
        raise ValueError(
            'kvswap_codec needs "kv_connector": "KVSwapConnector", "kv_connector_module_path": "kvswap.vllm": vLLM\'s '
            "own OffloadingConnector cannot drop a block that does not fit its coded size"
        )


def foreign_tier(extra: Mapping[str, Any]) -> str | None:
    """A secondary tier whose stores do not name how kvswap lays out a chunk."""
    for tier in extra.get("secondary_tiers") or ():
        if tier.get("type") not in TIERS or tier.get("module_path", "kvswap.vllm") != "kvswap.vllm":
            return str(tier.get("type"))
    return None


def _check_links(key: str, load: str, extra: Mapping[str, Any]) -> None:
    """What does not go with transfers over several links. load: what such a load is called."""
    why = ""
    if overlap_of(extra).on:
        why = f"the layers of a {load} load come in any order, and kvswap_overlap waits for each. {_ONE}"
    elif extra.get("canonical_layout"):
        why = f"with canonical_layout each rank stores pages of its own by vLLM's rule. {_ONE}"
    given = options_of(extra)
    for name in ("path", "priority", "max_ctas", "pace_gbps"):
        if not why and given[name] not in (None, "auto"):
            why = f"kvswap_{name} does not apply to transfers over several links. {_ONE}"
    if why:
        raise ValueError(f"{key}: {why}")


def _check_connector(key: str, connector: bool) -> None:
    if not connector:
        raise ValueError(
            f'{key}: it needs "kv_connector": "KVSwapConnector", "kv_connector_module_path": "kvswap.vllm"'
        )
