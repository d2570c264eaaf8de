"""Steps in which vLLM's OffloadingConnector has nothing to load or to store.

vLLM's scheduler side looks at each request of each step. A request is settled when all chunks that it may store were
offered, in each group:

    next_stored_chunk_idx >= min(num_prompt_tokens, max_offload_tokens) // tokens_per_chunk

By default (offload_prompt_only) every request that decodes is settled. Of such a request vLLM's code then changes two
things alone: its block ids, when it has new blocks, and its list of keys. The keys may be late: vLLM's code brings the
list up to date before it reads it. vLLM moves the index back, or lets the prompt grow, only when the cache is reset or
before the request is scheduled as a new or a resumed one; these are settled no more.

So vLLM's code plans a step without its settled requests, and does not run if nothing else is left. This holds for the
releases whose code was read: known() compares the text. In others nothing is left out.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector import utils
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler, worker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import OffloadingManager

_READ = {  # digest() of releases
    "dc5097c66618648f": "0.26.0",
    "7b7651323778c7fe": "0.27.1",
    "86c123b8a7a4d6e2": "0.28.0",
    "822265cae4d5a13f": "0.29.0",
    "37850e9187a0f445": "0.30.0",
    "5d24608d703b233c": "0.31.0",
    "cbe40426bc43e0d6": "0.32.0",
    "3c814617215bed9f": "0.33.0",
}
# Of vLLM's scheduler side: what a step has planned before it ends, or a reset left behind.
_PLANNED = (
    *("_current_batch_load_jobs", "_current_batch_jobs_to_flush", "_current_batch_allocated_block_ids"),
    *("_step_region", "_reset_fence"),  # 0.33
)


def digest() -> str:
    """Of the text of vLLM's code that this module relies on."""
    parts = (scheduler, worker, offloading_connector, utils.yield_req_data)
    return hashlib.sha256("".join(map(inspect.getsource, parts)).encode()).hexdigest()[:16]


@functools.cache
def known() -> bool:
    """Whether vLLM's code is one that was read."""
    try:
        return digest() in _READ
    except (OSError, TypeError, AttributeError):  # there is no text, or a part is elsewhere
        return False


class _Settled:
    """In the place of vLLM's build_connector_meta() and reset_cache()."""

    def __init__(self, theirs: Any) -> None:
        self._scheduler, self._build, self._reset = theirs, theirs.build_connector_meta, theirs.reset_cache
        self._names: set[str] = set()
        told = ("scheduled_new_reqs", "finished_req_ids", "preempted_req_ids")
        since = ("kv_cache_block_copies", "partial_tail_offloads")  # from 0.29 on; 0.28
        self._told = attrgetter(*told, *(name for name in since if name in SchedulerOutput.__dataclass_fields__))
        self._has_state = "kv_connector_block_state" in SchedulerOutput.__dataclass_fields__  # from 0.29 on
        self._planned = attrgetter(*(name for name in _PLANNED if hasattr(theirs, name)))
        # A manager with tiers acts at the end of each step.
        self._acts = type(theirs.manager).on_schedule_end is not OffloadingManager.on_schedule_end

    def reset_cache(self) -> None:
        self._names.clear()
        self._reset()

    def build_connector_meta(self, output: Any) -> Any:
        names, cached, tokens = self._names, output.scheduled_cached_reqs, output.num_scheduled_tokens
        state = output.kv_connector_block_state if self._has_state else None
        offers = state.boundary_state_offloads if state else None
        if not (
            any(self._told(output))
            or any(self._planned(self._scheduler))
            or cached.resumed_req_ids
            or offers
            or self._acts
            or not tokens.keys() <= names
        ) and (not any(cached.new_block_ids) or self._add_blocks(cached)):
            return OffloadingConnectorMetadata({}, {}, set())
        names.difference_update(
            (request.req_id for request in output.scheduled_new_reqs),
            cached.resumed_req_ids,
            output.finished_req_ids or (),
        )
        due = {name: count for name, count in tokens.items() if name not in names}
        whole = bool(offers or getattr(output, "partial_tail_offloads", None))  # these name requests, settled or not
        meta = self._build(output if whole else _part(output, due))
        names.update(name for name in due if self._is_settled(name))
        return meta

    def _add_blocks(self, cached: Any) -> bool:
        """Note the new blocks of settled requests. False: windows or unfinished stores may hold them, too."""
        theirs = self._scheduler
        if theirs._sliding_window_groups or theirs._block_id_to_pending_jobs:
            return False
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks:
                status = theirs._req_status[name]
                status.update_offload_keys()
                status.update_block_id_groups(blocks)
        return True

    def _is_settled(self, name: str) -> bool:
        status = self._scheduler._req_status.get(name)
        if status is None or status.req.is_finished():
            return False
        most, limit = status.req.num_prompt_tokens, status.max_offload_tokens
        most = most if limit is None else min(most, limit)
        groups = zip(self._scheduler.config.kv_group_configs, status.group_states, strict=True)
        return all(state.next_stored_chunk_idx >= most // group.tokens_per_chunk for group, state in groups)


def _part(output: Any, due: dict[str, int]) -> Any:
    """What vLLM's code reads of a scheduler's output, of the requests that are due or have new blocks."""
    cached = output.scheduled_cached_reqs
    each = zip(cached.req_ids, cached.new_block_ids, strict=True)
    kept = [(name, blocks) for name, blocks in each if blocks or name in due]
    part = SimpleNamespace(
        req_ids=[name for name, _ in kept],
        new_block_ids=[blocks for _, blocks in kept],
        resumed_req_ids=cached.resumed_req_ids,
    )
    return SimpleNamespace(**{**vars(output), "scheduled_cached_reqs": part, "num_scheduled_tokens": due})


def install(theirs: Any) -> None:
    """vLLM's connector_scheduler passes over settled requests, where it may store prompts alone."""
    if known() and theirs.config.offload_prompt_only:
        settled = _Settled(theirs)
        theirs.build_connector_meta, theirs.reset_cache = settled.build_connector_meta, settled.reset_cache
