"""What vLLM's scheduler does with requests that ran in the step of a load that failed.

vLLM (0.26 to 0.33) moves num_computed_tokens of such a request back and lets it run on. That gives wrong tokens with
asynchronous scheduling, where the request is in the next step already, and in the second model runner, which keeps
the number on the GPU (vLLM #45138, #49250). So the request is preempted instead, by vLLM's own means: its blocks leave
the prefix cache, what is under way for it is dropped, and it is computed from its first token on. So is each request
that shares such a block, also one that waits for a load of its own: vLLM moves the number of one of these alone back.
With "kv_load_failure_policy": "fail" these requests end, as in vLLM.

A request that waited for a load that failed looks for host blocks again, in vLLM: it would load until a load succeeds.
Meanwhile the scheduler (0.26) keeps room for it that it does not have, so that no other load may begin, and no request
runs any more. So such a request gives up its room, and is computed.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import time
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from kvswap._log import logger

_logger = logger("kvswap.vllm")


def _why_not_handle() -> str | None:
    handle = getattr(Scheduler, "_handle_invalid_blocks", None)
    if handle is not None:
        taken = list(inspect.signature(inspect.unwrap(handle)).parameters)
        if taken == ["self", "invalid_block_ids", "num_scheduled_tokens"]:
            return None
    return "Scheduler._handle_invalid_blocks"


def why_not() -> str | None:
    """What of vLLM's scheduler is not known; None: nothing."""
    unknown = _why_not_handle()
    if unknown is not None:
        return unknown
    preempt = list(inspect.signature(Scheduler._preempt_request).parameters)
    if preempt not in (["self", "request", "timestamp"], ["self", "request", "timestamp", "drop_stale_output"]):
        return "Scheduler._preempt_request"
    counter = "num_stale_output_tokens" if _drops() else "async_tokens_to_discard"
    if not {counter, "num_in_flight_tokens"} <= set(Request.__init__.__code__.co_names):
        return f"Request.{counter}"
    return None


def _drops() -> bool:
    """Whether vLLM's _preempt_request() can drop the outputs that are under way."""
    return "drop_stale_output" in inspect.signature(Scheduler._preempt_request).parameters


def _preempt(scheduler: Any, request: Any, scheduled: int) -> None:
    """scheduled: tokens of the step that is being looked at; a later step may have the request too."""
    later = request.num_in_flight_tokens - scheduled
    scheduler.running.remove(request)
    if _drops():
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
    else:
        scheduler._preempt_request(request, time.monotonic())
        request.async_tokens_to_discard += int(later > 0 and not request.is_prefill_chunk)
        request.num_output_placeholders = 0
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def behind(groups: Iterable[Iterable[int]], bad: set[int]) -> set[int]:
    """A request's blocks from the first of these blocks on, in each of its groups."""
    found = [list(itertools.dropwhile(lambda block: block not in bad, group)) for group in groups]
    return set(itertools.chain.from_iterable(found)) - {0}  # vLLM's null block


def _holders(scheduler: Any, requests: Iterable[Any], bad: set[int]) -> list[Any]:
    """The requests with one of these blocks. What such a request computed behind it is added to them."""
    rest, found = list(requests), list[Any]()
    blocks_of = scheduler.kv_cache_manager.get_block_ids
    while True:
        more = [r for r in rest if any(not bad.isdisjoint(group) for group in blocks_of(r.request_id))]
        if not more:
            return found
        for request in more:
            bad |= behind(blocks_of(request.request_id), bad)
        found += more
        rest = [request for request in rest if request not in more]


def _handle(scheduler: Any, ours: Any, invalid: set[int], scheduled: dict[str, int]) -> set[str]:
    own: set[str]
    own, bad = ours.failed_sync_loads(invalid)
    stale = {name for name in scheduled if _is_discarded(scheduler.requests.get(name))}
    holders = _holders(scheduler, (r for r in scheduler.requests.values() if not r.is_finished()), bad)
    running = [request for request in scheduler.running if request in holders]
    scheduler.kv_cache_manager.evict_blocks(bad)
    ours.compute_instead(own | {request.request_id for request in holders})
    for name in own - {request.request_id for request in running}:
        request = scheduler.requests.get(name)
        if request is not None and request.status == RequestStatus.PREEMPTED and not _drops():
            request.num_output_placeholders = 0  # preempted meanwhile: the step's output of it is dropped
    if not scheduler.recompute_kv_load_failures:
        return own | {request.request_id for request in holders}
    for request in reversed(running):
        _preempt(scheduler, request, scheduled.get(request.request_id, 0))
    for request in holders:
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:  # vLLM frees its blocks when its load has ended
            request.num_computed_tokens = 0
            scheduler.failed_recving_kv_req_ids.add(request.request_id)
        elif request not in running:  # its load was reported, and no step had room for it yet
            scheduler.kv_cache_manager.free(request)
            request.num_computed_tokens = 0
            _reserved(scheduler).discard(request)
    if running:
        _logger.warning("a load failed beside the model: %d request(s) are computed again", len(running))
    return (own | {request.request_id for request in running}) - stale


def _is_discarded(request: Any) -> bool:
    """Whether vLLM (to 0.26) discards the request's next output: the request was preempted while a step computed it.
    vLLM counts such outputs down as they come. If it skips one, the count stays, and vLLM discards the next output,
    which is good."""
    return bool(getattr(request, "async_tokens_to_discard", 0))


def _reserved(scheduler: Any) -> set[Any]:
    """Requests that the scheduler keeps room for (to 0.32)."""
    found: set[Any] = getattr(scheduler, "_inflight_prefills", set())
    return found


def _give_up(scheduler: Any, ours: Any) -> None:
    """The requests whose asynchronous loads failed are computed, and keep no room until then."""
    failed = set(scheduler.failed_recving_kv_req_ids)
    ours.compute_instead(failed)
    loading = _reserved(scheduler)
    loading -= {request for request in loading if request.request_id in failed}


def _ours(connector: Any, kind: type) -> Any:
    """The connector of this class, alone or among those of a MultiConnector."""
    each = getattr(connector, "_connectors", None) or [connector]
    return next((one for one in each if isinstance(one, kind)), None)


def install(kind: type) -> str | None:
    """Where the scheduler's connector is of this class, failed loads are handled as above; for has_sync_loads why_not()
    is None. Once. What of vLLM's scheduler is not known; None: nothing."""
    unknown = _why_not_handle()
    if unknown is not None:
        return unknown
    theirs = Scheduler._handle_invalid_blocks
    if getattr(theirs, "of_kvswap", False):
        return None

    @functools.wraps(theirs)
    def handle(self: Any, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]) -> set[str]:
        ours = _ours(self.connector, kind)
        if ours is None:
            return set(theirs(self, invalid_block_ids, num_scheduled_tokens))
        if ours.has_sync_loads:
            found = _handle(self, ours, invalid_block_ids, num_scheduled_tokens)
        else:
            found = set(theirs(self, invalid_block_ids, num_scheduled_tokens))
        _give_up(self, ours)
        return found

    handle.of_kvswap = True  # type: ignore[attr-defined]
    Scheduler._handle_invalid_blocks = handle
    return None
