"""Which loads run in their request's own step: the scheduler's side of kvswap_overlap.

vLLM from 0.33 on has such loads (sync_load_budget_bytes): OffloadingConnectorScheduler reserves a part of the step's
budget for a request, and vLLM schedules the request in the step that loads its blocks. There Overlap only says no
(_reserve_sync_load). In releases before, the connector's scheduler knows asynchronous loads alone, and what 0.33 does
is done here: see Emulated. _failures.py has what happens when such a load fails.

A load stays asynchronous if another request would wait for it for longer than kvswap_overlap_shared_ms. The time is its
bytes at the rate that the loads so far had. Of a prompt that the host has to its last token, all blocks but the last
are loaded, and the step computes that one: it has to compute a token in any case.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field, fields
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading import common, scheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import AttentionSpec

from kvswap.vllm import _failures
from kvswap.vllm._handler import OverlapSettings
from kvswap.vllm._unfinished import Unfinished
from kvswap.vllm._windows import has_window

_RATE = 10e9  # bytes a second, until a load was measured
_REMEMBERED = 16 << 30  # bytes of loads that the rate is made of

ANY = OverlapSettings(True, math.inf, 0)  # vLLM's own rule alone (sync_load_budget_bytes without kvswap_overlap)


# -- where vLLM can take it --------------------------------------------------------------------------------------------


def is_native() -> bool:
    """Whether this vLLM has loads in the request's own step."""
    return hasattr(scheduler.OffloadingConnectorScheduler, "_reserve_sync_load")


def steps_before_a_load() -> int:
    """How many steps are queued before a load that a step submits: one is under way, and from 0.30 on loads are
    submitted behind the step's own forward pass."""
    return 2 if "has_sync_kv_loads" in getattr(SchedulerOutput, "__dataclass_fields__", {}) else 1


def _why_not_release() -> str | None:
    theirs = scheduler.OffloadingConnectorScheduler
    if is_native():
        taken = list(inspect.signature(theirs._reserve_sync_load).parameters)
        return (
            None if taken == ["self", "req_status", "num_computed_tokens", "num_hit_tokens"] else "_reserve_sync_load"
        )
    names = {"block_hash", "is_null", "_current_batch_load_jobs", "_jobs"}
    if not names <= set(theirs.update_state_after_alloc.__code__.co_names):
        return "update_state_after_alloc"
    if [f.name for f in fields(common.TransferJob)] != ["req_id", "src_spec", "dst_spec"]:
        return "TransferJob"
    asked = list(inspect.signature(theirs.get_num_new_matched_tokens).parameters)[1:]
    if asked[:2] != ["request", "num_computed_tokens"] or asked[2:] not in ([], ["max_num_new_tokens"]):  # from 0.30 on
        return "get_num_new_matched_tokens"
    return None


def _specs_of(group: Any) -> list[Any]:
    each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return list(each.values()) if each else [group.kv_cache_spec]


def why_not(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Why loads must stay asynchronous; None: they need not. Equal in the scheduler and in the workers."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    unknown = _why_not_release() or _failures.why_not()
    if unknown is not None:
        return f"this vLLM's {unknown} is not known"
    if vllm_config.speculative_config is not None:
        return "a draft model reads the cache beside the model's layers (speculative decoding)"
    if parallel.pipeline_parallel_size > 1:
        return "with pipeline parallelism several steps are under way"
    if any(getattr(parallel, f"{kind}_context_parallel_size", 1) > 1 for kind in ("decode", "prefill")):
        return "context parallelism is not known to it"
    if getattr(parallel, "use_ubatching", getattr(parallel, "enable_dbo", False)):
        return "several threads run the model, a part of a step each (enable_dbo, ubatch_size)"
    if getattr(model, "is_encoder_decoder", False):
        return "the model is an encoder and a decoder"
    groups = kv_cache_config.kv_cache_groups
    if not all(isinstance(spec, AttentionSpec) for group in groups for spec in _specs_of(group)):
        return "some layers' state is no attention cache, and vLLM does not wait for such layers"
    if any(getattr(group, "host_resident", False) for group in groups):
        return "a part of the cache is in host memory"
    return None


# -- which loads -------------------------------------------------------------------------------------------------------


def _bytes_per_token(group: Any) -> float:
    spec = group.kv_cache_spec
    layers = 1 if getattr(spec, "kv_cache_specs", None) else len(group.layer_names)
    return float(spec.page_size_bytes * layers / spec.block_size)


class Overlap:
    """Decides, for each request whose blocks the host has, whether its own step loads them."""

    def __init__(self, theirs: Any, kv_cache_config: Any, settings: OverlapSettings) -> None:
        self.scheduler, self._settings = theirs, settings
        groups = kv_cache_config.kv_cache_groups
        self._per_token = sum(_bytes_per_token(group) for group in groups)
        # Windows are looked up for the hit as it is: one that ends earlier may need a block that the host has not.
        self._windows = any(has_window(spec) for group in groups for spec in _specs_of(group))
        self._known: set[str] = set()  # requests that have not finished
        self._given_up: set[str] = set()  # requests of which a load failed
        self._step_bytes = 0.0
        self._bytes = self._seconds = 0.0  # of loads so far
        self.loads = Unfinished(theirs, self._make_sync)
        if is_native():
            self._reserve, theirs._reserve_sync_load = theirs._reserve_sync_load, self._reserve_if

    def _reserve_if(self, status: Any, num_computed_tokens: int, num_hit_tokens: int | None) -> bool:
        self.scheduler._current_batch_sync_loads.discard(status.req.request_id)
        tokens = self.may_load(status.req, num_computed_tokens, num_hit_tokens)
        reserved = bool(tokens and self._reserve(status, num_computed_tokens, tokens))
        self._step_bytes += self._nbytes(tokens) if reserved else 0
        return reserved

    def _nbytes(self, tokens: int) -> float:
        return tokens * self._per_token

    def _loads_under_way(self) -> bool:
        """Asynchronous loads: they share the link, and their requests are to run next."""
        return any(not job.is_store and not self.is_sync(job_id, job) for job_id, job in self.scheduler._jobs.items())

    def is_sync(self, job_id: int, job: Any) -> bool:
        """Whether the job loads for a request in its own step."""
        del job_id
        return bool(job.is_sync_load)

    def _make_sync(self, job_id: int, job: Any) -> None:
        """For vLLM the job loads for a request in its own step from now on."""
        del job_id
        job.is_sync_load = True

    def seconds(self, nbytes: float) -> float:
        """What a load takes, at the rate of those so far."""
        return nbytes / (self._bytes / self._seconds if self._seconds else _RATE)

    def may_load(self, request: Any, num_computed_tokens: int, num_hit_tokens: int | None) -> int:
        """How many of these tokens the request's own step may load; not whether the budget has room. 0: none."""
        if not num_hit_tokens or request.request_id in self._given_up:
            return 0
        if self._settings is ANY:
            return num_hit_tokens
        tokens = self._in_whole_blocks(request, num_computed_tokens, num_hit_tokens)
        if tokens <= 0 or self._loads_under_way():
            return 0
        alone = not self._known - {request.request_id}
        shared = self.seconds(self._step_bytes + self._nbytes(tokens)) * 1e3
        return tokens if alone or shared <= self._settings.shared_ms else 0

    def _in_whole_blocks(self, request: Any, computed: int, hit: int) -> int:
        """The tokens of a hit without those of a block that the step has to compute in: the step must not write to a
        block that is being loaded."""
        block = math.lcm(*(group.tokens_per_block for group in self.scheduler.config.kv_group_configs))
        end = min(computed + hit, request.num_tokens - 1) // block * block
        return hit if end == computed + hit else 0 if self._windows else end - computed

    # -- what the connector is told -----------------------------------------------------------------------------------

    def matched(self, request: Any, computed: int, found: tuple[int | None, bool]) -> tuple[int | None, bool]:
        """What get_num_new_matched_tokens() answers."""
        tokens, asynchronous = found
        if tokens and request.request_id in self._given_up:
            return 0, False
        if tokens and not asynchronous and self._settings is not ANY:  # reserved: _reserve_if()
            tokens = self._in_whole_blocks(request, computed, tokens)
        return tokens, asynchronous

    def allocate(self, request: Any, blocks: Any, tokens: int) -> Any:
        """Before update_state_after_alloc(): the blocks that it is given."""
        del request, tokens
        return blocks

    def allocated(self, request: Any, tokens: int) -> None:
        """After update_state_after_alloc()."""

    def build(self, build: Any, scheduler_output: Any) -> Any:
        """build_connector_meta()."""
        meta = build(scheduler_output)
        return self._note(meta, scheduler_output)

    def _note(self, meta: Any, output: Any) -> Any:
        """The step is planned. The metadata for the workers."""
        self._step_bytes = 0.0
        if not (meta.load_jobs or self.loads):  # as in most steps
            return meta
        own = self._own_loads(meta)
        return self._told(meta, frozenset(own), self.loads.planned(meta.load_jobs, own, output))

    def _own_loads(self, meta: Any) -> set[int]:
        """The jobs of the planned step that load for its own requests."""
        return sync_loads_of(meta)

    def _told(self, meta: Any, own: frozenset[int], awaited: frozenset[int]) -> Any:
        return _with(meta, own, awaited) if awaited else meta

    def added(self, request: Any) -> None:
        """A request has come."""
        self._known.add(request.request_id)

    def ended(self, request: Any) -> None:
        """A request has finished. vLLM's connector knows it still."""
        name = request.request_id
        self._known.discard(name)
        if name in self._given_up and request.status.name == "FINISHED_ERROR":
            self._store_no_more(name)
        self._given_up.discard(name)
        self.loads.ended(request)

    def compute_instead(self, requests: set[str]) -> None:
        """Loads of these requests failed: nothing is loaded for them any more."""
        self._given_up |= requests & self._known
        for name in requests - self._known:
            self._store_no_more(name)

    def _store_no_more(self, name: str) -> None:
        """Of a request that has ended vLLM stores what was not stored yet; of this one it would be nonsense."""
        status = self.scheduler._req_status.get(name)
        if status is not None:
            status.max_offload_tokens = 0

    def reported(self, output: Any) -> None:
        """A step's report of all workers, as Unfinished.reported(); and how long the loads that have ended took."""
        self.loads.reported(output, self._known)
        stats = getattr(getattr(output.kv_connector_worker_meta, "transfer_stats", None), "load", None)
        if stats is None or not stats.time:
            return
        self._bytes, self._seconds = self._bytes + stats.bytes, self._seconds + stats.time
        if self._bytes > _REMEMBERED:
            self._bytes, self._seconds = self._bytes / 2, self._seconds / 2


@dataclass
class KVSwapConnectorMetadata(OffloadingConnectorMetadata):  # type: ignore[misc]
    """vLLM's metadata for the workers, plus the loads of the step's own requests, and those that were reported before
    they had ended, for which the step waits."""

    sync_loads: frozenset[int] = field(default_factory=frozenset)
    awaited: frozenset[int] = field(default_factory=frozenset)


def _with(meta: Any, sync_loads: frozenset[int], awaited: frozenset[int]) -> KVSwapConnectorMetadata:
    theirs = {f.name: getattr(meta, f.name) for f in fields(OffloadingConnectorMetadata)}
    return KVSwapConnectorMetadata(**theirs, sync_loads=sync_loads, awaited=awaited)


def sync_loads_of(meta: Any) -> set[int]:
    """The jobs of a step that load for requests of this step."""
    named = getattr(meta, "sync_loads", None)
    if named is not None:
        return set(named)
    return {job_id for job_id, job in meta.load_jobs.items() if getattr(job, "sync", False)}


class _Block:
    """A block for update_state_after_alloc(), which loads the blocks that have no hash."""

    __slots__ = ("block_hash", "block_id", "is_null")

    def __init__(self, block: Any, fresh: bool) -> None:
        self.block_id, self.is_null = block.block_id, block.is_null
        self.block_hash = None if fresh else block.block_hash or b""


class _Blocks:
    def __init__(self, blocks: tuple[list[_Block], ...]) -> None:
        self.blocks = blocks


class Emulated(Overlap):
    """Before 0.33: vLLM's scheduler knows only asynchronous loads. A load in its request's step differs in three ways:

    - A block of a request that runs in this step has its hash already; of asynchronous loads it gets it after the load.
    - A request may have a store job beside its load. vLLM asserts that it has not, so the load is presented as a store.
    - The worker does not report the load's end to vLLM's scheduler, because the request does not wait for it.
    """

    def __init__(self, theirs: Any, kv_cache_config: Any, settings: OverlapSettings) -> None:
        super().__init__(theirs, kv_cache_config, settings)
        self._now: set[str] = set()  # requests whose step loads their blocks
        self._jobs: set[int] = set()  # their loads, unfinished

    def is_sync(self, job_id: int, job: Any) -> bool:
        del job
        return job_id in self._jobs

    def matched(self, request: Any, computed: int, found: tuple[int | None, bool]) -> tuple[int | None, bool]:
        hit, asynchronous = super().matched(request, computed, found)
        self._now.discard(request.request_id)
        tokens = self.may_load(request, computed, hit) if asynchronous else 0
        if not tokens or self._nbytes(tokens) > self._settings.budget - self._step_bytes:
            return hit, asynchronous
        self._step_bytes += self._nbytes(tokens)
        self._now.add(request.request_id)
        return tokens, False

    def _make_sync(self, job_id: int, job: Any) -> None:
        del job
        self._jobs.add(job_id)

    def allocate(self, request: Any, blocks: Any, tokens: int) -> Any:
        if not tokens or request.request_id not in self._now:
            return blocks
        computed = self.scheduler._req_status[request.request_id].num_locally_computed_tokens
        configs = self.scheduler.config.kv_group_configs
        groups = list(blocks.blocks)  # from 0.30 on some may not be offloaded
        for position, group in enumerate(configs):
            index = getattr(group, "group_idx", position)
            first = -(-computed // group.tokens_per_block)
            groups[index] = [_Block(block, i >= first) for i, block in enumerate(blocks.blocks[index])]
        return _Blocks(tuple(groups))

    def allocated(self, request: Any, tokens: int) -> None:
        if tokens and request.request_id in self._now:
            self._jobs.add(next(reversed(self.scheduler._current_batch_load_jobs)))

    def build(self, build: Any, scheduler_output: Any) -> Any:
        meta = self._build_beside(build, scheduler_output) if self._jobs else build(scheduler_output)
        self._now.clear()
        return self._note(meta, scheduler_output)

    def _build_beside(self, build: Any, scheduler_output: Any) -> Any:
        """A step is planned while such loads are unfinished."""
        jobs = self.scheduler._jobs
        self._jobs &= jobs.keys()
        for job_id in self._jobs:
            jobs[job_id].is_store = True
        try:
            return build(scheduler_output)
        finally:
            for job_id in self._jobs:
                jobs[job_id].is_store = False

    def _own_loads(self, meta: Any) -> set[int]:
        own: set[int] = self._jobs & meta.load_jobs.keys()
        return own

    def _told(self, meta: Any, own: frozenset[int], awaited: frozenset[int]) -> Any:
        return _with(meta, own, awaited) if own or awaited else meta


def make(theirs: Any, kv_cache_config: Any, settings: OverlapSettings) -> Overlap:
    """For vLLM's scheduler side of the connector."""
    return (Overlap if is_native() else Emulated)(theirs, kv_cache_config, settings)
