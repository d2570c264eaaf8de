"""How much of a request that has ended vLLM's OffloadingConnector may store.

vLLM 0.26 takes all tokens of such a request for computed. So an engine ends with an AssertionError when a client goes
away whose request waits (vLLM #49118), and with offload_prompt_only off a block that the last token fills is stored
although the token's own slot was never computed: the next turn of a conversation loads it (vLLM #54193). Later releases
mend both.
"""

from __future__ import annotations

import inspect
from typing import Any


def stored_tokens(request: Any) -> int:
    """Tokens of a request that has ended whose keys and values were computed: never those of the last one sampled, none
    of a request that waits or was preempted."""
    return int(min(request.num_computed_tokens, max(request.num_prompt_tokens, request.num_tokens - 1)))


def _placed_tokens(config: Any, status: Any) -> int:
    """Tokens whose GPU blocks the connector knows, in each group."""
    groups = zip(config.kv_group_configs, status.group_states, strict=True)
    per_chunk = config.blocks_per_chunk
    return int(min(len(state.block_ids) // per_chunk * group.tokens_per_chunk for group, state in groups))


def _is_mended(scheduler: Any) -> bool:
    build = getattr(type(scheduler), "_build_store_jobs", None)
    return build is None or {"FINISHED_ABORTED", "num_prompt_tokens"} <= set(inspect.unwrap(build).__code__.co_names)


def install(scheduler: Any) -> None:
    """vLLM's connector_scheduler stores what was computed, in releases that store more."""
    theirs = getattr(scheduler, "_calc_num_offloadable_tokens", None)
    if theirs is None or _is_mended(scheduler):
        return

    def computed(status: Any, tokens: int) -> int:
        found: int = theirs(status, tokens)
        if not status.req.is_finished():
            return found
        return min(found, stored_tokens(status.req), _placed_tokens(scheduler.config, status))

    scheduler._calc_num_offloadable_tokens = computed
