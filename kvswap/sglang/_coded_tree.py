"""Hooks on SGLang's tree for host pools of coded pages (_coded.py): a page that did not fit is no hit."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_disagg, get_memory

from kvswap._log import logger
from kvswap.codecs._coding import PATHS
from kvswap.sglang._coded import CodedPages, WriteBack, refuse
from kvswap.sglang._plugin import CODEC_SWITCH, PROBE

_log = logger("kvswap.sglang")


def _why_not(cache: Any) -> str | None:
    """What does not go with a codec."""
    if set(cache.tree_components) != {ComponentType.FULL}:
        return "has more than full attention: pages of windows and states are not coded"
    if get_memory().hicache_host_memory_mode != "cache":
        return f"is {get_memory().hicache_host_memory_mode} (--hicache-host-memory-mode), and has no place for them"
    if get_disagg().disaggregation_mode == "decode":
        return "may have to give back pages of a retracted request that do not fit"
    if os.environ.get("KVSWAP_PATH", "auto") not in ("", *PATHS):
        return f"cannot be coded by KVSWAP_PATH={os.environ['KVSWAP_PATH']}: use one of {', '.join(PATHS)}"
    if cache.pp_size > 1:
        return "is of one pipeline stage of several, which do not tell each other what does not fit"
    return None


def _foreign(cache: Any) -> str | None:
    """The class of a storage backend that would store pages that do not fit."""
    backend = getattr(cache.cache_controller, "storage_backend", None)
    return None if backend is None or getattr(backend, "takes_coded_pages", False) else type(backend).__name__


def init_hicache(original: Callable[..., Any], cache: Any, server_args: Any, params: Any, *_: Any) -> Any:
    """UnifiedRadixCache.init_hicache: what cannot be coded is refused before requests run."""
    if cache is PROBE:
        return PROBE
    why = _why_not(cache)
    if why is not None:
        raise refuse("kv", why)
    made = original(cache, server_args, params)
    for entry in cache.host_pool_group.entries:
        if not isinstance(entry.host_pool, CodedPages):
            raise refuse(str(entry.name), "is of a kind that is not coded")
        cache.cache_controller.l2_transfer_engine.places(entry.host_pool)
    foreign = _foreign(cache)
    if foreign is not None:
        raise refuse("kv", f"has the storage backend {foreign}, and only kvswap.sglang.FileStorage takes coded pages")
    return made


def attach_storage_backend(original: Callable[..., Any], cache: Any, *given: Any, **named: Any) -> Any:
    """UnifiedRadixCache.attach_storage_backend: another backend would store pages that do not fit. SGLang calls it
    while no request runs."""
    if cache is PROBE:
        return PROBE
    made = original(cache, *given, **named)
    foreign = _foreign(cache)
    if foreign is None:
        return made
    cache.detach_storage_backend()
    return False, f"{CODEC_SWITCH} is set: only kvswap.sglang.FileStorage takes coded pages, and this is {foreign}"


def log_write_ack(original: Callable[..., Any], cache: Any, ack: Any, *_: Any) -> Any:
    """UnifiedRadixCache._log_write_ack_metrics: SGLang calls it on all ranks, for each write-back that has ended, in
    the same order. The ranks agree here on the pages that did not fit on one of them."""
    if cache is PROBE:
        return PROBE
    for copy in getattr(ack.finish_event, "transfers", ()):
        if isinstance(copy, WriteBack):
            flags = np.zeros(len(copy.pages), np.int32)
            flags[copy.lost] = 1
            agreed = torch.from_numpy(flags)
            cache._all_reduce_attn_groups(agreed, torch.distributed.ReduceOp.MAX)
            _note(copy, np.flatnonzero(np.asarray(agreed)))
    return original(cache, ack)


def _note(copy: WriteBack, lost: Any) -> None:
    host, first = copy.host, copy.host.not_stored == 0
    host.miss(copy.pages[lost])
    if first and len(lost):
        _log.info(
            "host pool %s: %d of %d pages did not fit their coded size, and are computed again when they are asked "
            "for. This is said once",
            *(host.pool_label, len(lost), len(copy.pages)),
        )


def match_prefix(original: Callable[..., Any], cache: Any, params: Any, *_: Any) -> Any:
    """UnifiedRadixCache.match_prefix: the prefix ends before a page that did not fit."""
    if cache is PROBE:
        return PROBE
    found = original(cache, params)
    group = getattr(cache, "host_pool_group", None)
    host = group.anchor_entry.host_pool if group is not None else None
    if not found.host_hit_length or not isinstance(host, CodedPages) or not host.not_stored:
        return found
    spec, _aux = cache.tree_core.build_load_back_spec(found.best_match_node)
    pages = np.asarray(spec.host_indices)[:: host.page_size] // host.page_size
    bad = np.flatnonzero(host.missing[pages])
    if not bad.size:
        return found
    good = found.device_prefix_len + int(bad[0]) * host.page_size
    return original(cache, dataclasses.replace(params, key=params.key[:good]))


AROUND = {
    "init_hicache": init_hicache,
    "attach_storage_backend": attach_storage_backend,
    "match_prefix": match_prefix,
    "_log_write_ack_metrics": log_write_ack,
}
