"""vLLM's offloading connector (vllm/distributed/kv_transfer/kv_connector/v1/offloading_connector.py) with failures.

vLLM's connector asserts that every job succeeded. _Watch, between the connector and its worker, reports a failed job to
the connector as ended, and the failure to KVSwapConnector:

- a store: the scheduler's side calls complete_store(success=False), so that its keys are dropped. kvswap.offload has
  recorded the failure of its host blocks, so that a later load of them fails.
- a load: get_block_ids_with_load_errors() reports its GPU blocks, and vLLM recomputes or ends the request, by
  kv_load_failure_policy. In a model with several groups block ids do not identify a request: there the request is
  reported, in releases that support it (KVConnectorTransferResults); others cannot recompute, and an error is raised.
- a load whose request was computed in the same step (kvswap_overlap; sync_load_budget_bytes, 0.33): the step has
  computed from wrong bytes, and its stores may be under way. All stores since that load are dropped, and the request is
  computed again from its first token on (_failures.py). A load that was reported before it ended (_ahead.py) is one of
  these.

Nothing is loaded any more for a request of which a load failed. _finished.py has what a request that ended stores,
_windows.py what is stored of sliding windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

import kvswap
from kvswap._log import logger
from kvswap.offload import TransferResult
from kvswap.vllm import _block_first, _codec, _finished, _share, _windows
from kvswap.vllm._handler import OverlapSettings, VLLMHandler, codec_of, falls_back, lend_of, overlap_of, share_of

if TYPE_CHECKING:
    from kvswap.share._lend import Lending
    from kvswap.share._steps import Steps
    from kvswap.vllm._ahead import Ahead
    from kvswap.vllm._layers import StepLoads
    from kvswap.vllm._outcomes import Outcomes
    from kvswap.vllm._overlap import Overlap
    from kvswap.vllm._own_stats import LinkStats
    from kvswap.vllm._replica_manager import ReplicaManager

_logger = logger("kvswap.vllm")

NotStored: TypeAlias = dict[int, dict[int, str]]  # job -> position of a chunk -> why
_STILL = 3  # after so many steps that ran nothing, requests whose blocks are loaded come first in each second step


@dataclass
class KVSwapWorkerMetadata(OffloadingWorkerMetadata):  # type: ignore[misc]
    """vLLM's metadata from a worker to the scheduler, plus the failed stores, and the failed loads whose requests were
    computed in the same step; each with its reason. not_stored: by store, the positions of the chunks that its codec
    could not store, and why."""

    failed_stores: dict[int, str] = field(default_factory=dict)
    failed_sync_loads: dict[int, str] = field(default_factory=dict)
    not_stored: NotStored = field(default_factory=dict)

    def aggregate(self, other: Any) -> KVSwapWorkerMetadata:
        """Merge the metadata of two workers: a failure on one worker is a failure."""
        stores = {**self.failed_stores, **getattr(other, "failed_stores", {})}
        loads = {**self.failed_sync_loads, **getattr(other, "failed_sync_loads", {})}
        not_stored = _joined(self.not_stored, getattr(other, "not_stored", {}))
        return _with_failures(super().aggregate(other), stores, loads, not_stored)


def _joined(one: NotStored, other: NotStored) -> NotStored:
    """What one worker could not store, none has."""
    return {job: {**one.get(job, {}), **other.get(job, {})} for job in {**one, **other}}


def _with_failures(
    meta: OffloadingWorkerMetadata, stores: dict[int, str], sync_loads: dict[int, str], not_stored: NotStored
) -> KVSwapWorkerMetadata:
    own = {f.name: getattr(meta, f.name) for f in fields(OffloadingWorkerMetadata)}
    return KVSwapWorkerMetadata(**own, failed_stores=stores, failed_sync_loads=sync_loads, not_stored=not_stored)


@dataclass
class _Failure:
    job_id: int
    error: str
    gpu_blocks: Any  # of a load: its destination's, an array or a list; None: it was a store


def _gpu_blocks(spec: Any) -> Any:
    """The GPU blocks of a load's destination; None for a host spec, which has no group_sizes. Not read before the load
    has failed, so that submitting takes no time for each block."""
    return spec.block_ids if hasattr(spec, "group_sizes") else None


class _Watch:
    """Wraps a vLLM worker: failed jobs end as successful ones, and their failures are recorded."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._loads: dict[int, Any] = {}  # job -> GPU blocks
        self._refused: list[_Failure] = []  # jobs that could not be submitted
        self.failures: list[_Failure] = []  # not reported yet
        self.not_stored: NotStored = {}  # not reported yet
        self.distrusted: dict[int, str] = {}  # loads that count as failed, and why
        self.steps_own: StepLoads | None = None
        self.ahead: Ahead | None = None
        self.handlers = _handlers_of(worker)
        for handler in self.handlers:
            handler.strict = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def _submit(self, job_id: int, target: Any, submit: Any, *args: Any, **kwargs: Any) -> bool:
        blocks, error = _gpu_blocks(target), "the worker refused it"
        try:
            accepted = submit(job_id, *args, **kwargs)
        except Exception as refused:  # any error: the job ends as failed and the engine goes on
            accepted, error = False, str(refused)
        if not accepted:
            what = "store" if blocks is None else "load"
            _logger.error("offloading job %d (%s) could not be submitted: %s", job_id, what, error)
            self._refused.append(_Failure(job_id, error, blocks))
        elif blocks is not None:
            self._loads[job_id] = blocks
            if self.ahead is not None and not (self.steps_own and job_id in self.steps_own.jobs):
                self.ahead.submitted(job_id, sum(handler.nbytes_of(job_id) for handler in self.handlers))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, dst_spec, self._worker.submit_store, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **options: Any) -> bool:
        return self._submit(job_id, dst_spec, self._worker.submit_load, src_spec, dst_spec, **options)

    def wait(self, job_ids: Iterable[int]) -> None:
        """As the worker's; vLLM's wait for the loads of the step's own requests is left to the layers."""
        own = self.steps_own
        late = own.jobs if own is not None and own.submitting else frozenset()
        self._worker.wait(set(job_ids) - late)

    def get_finished(self) -> list[Any]:
        """All ended jobs; failed ones without size and time, so that metrics do not count them."""
        results: list[Any] = self._worker.get_finished()
        if not results and not self._refused:  # as in most steps
            return results
        refused, self._refused = self._refused, []
        ended: list[Any] = []
        for result in results:
            blocks = self._loads.pop(result.job_id, None)
            if blocks is not None and self.ahead is not None:
                self.ahead.ended(result.job_id, result.transfer_size, result.transfer_time if result.success else None)
            why = self.distrusted.pop(result.job_id, None)
            if result.success and why is None:
                ended.append(result)
                if getattr(result, "not_stored", None):
                    self.not_stored[result.job_id] = result.not_stored
            else:
                error = str(why if result.success else getattr(result, "error", None))
                refused.append(_Failure(result.job_id, error, blocks))
        for failure in refused:  # the handler, or _submit(), has logged it
            ended.append(TransferResult(failure.job_id, True))  # ended; the failure is reported separately
        self.failures += refused
        return ended


def _handlers_of(worker: Any) -> list[VLLMHandler]:
    """kvswap's handlers of a worker."""
    return [handler for handler in vars(worker).values() if isinstance(handler, VLLMHandler)]


_SPECS = {  # vLLM's specs, which its factory takes by name, whatever module the configuration names
    "CPUOffloadingSpec": "KVSwapOffloadingSpec",
    "TieringOffloadingSpec": "KVSwapTieringOffloadingSpec",
}


def _choose_spec(extra_config: dict[str, Any]) -> None:
    """Put kvswap's spec in the place of vLLM's; specs of others stay."""
    asked = extra_config.get("spec_name", "CPUOffloadingSpec")
    if asked in _SPECS:
        extra_config.update(spec_name=_SPECS[asked], spec_module_path="kvswap.vllm")
    elif asked in _SPECS.values():
        extra_config.setdefault("spec_module_path", "kvswap.vllm")


# Imported where they are asked for: their parts of vLLM differ more from release to release.


def _why_no_overlap(vllm_config: Any, kv_cache_config: Any) -> str | None:
    try:
        from kvswap.vllm import _overlap
    except ImportError as error:
        return str(error)
    return _overlap.why_not(vllm_config, kv_cache_config)


def _has_own_sync_loads() -> bool:
    try:
        from kvswap.vllm import _failures, _overlap
    except ImportError:
        return False
    return _overlap.is_native() and _failures.why_not() is None


def _outcomes_of(scheduler: Any) -> Outcomes | None:
    """scheduler: vLLM's connector_scheduler."""
    try:
        from kvswap.vllm import _outcomes
    except ImportError:
        return None
    return _outcomes.make(scheduler)


def _links_of(device: Any) -> LinkStats | None:
    """None: this vLLM's statistics are not known."""
    try:
        from kvswap.vllm import _own_stats
    except ImportError:
        return None
    return _own_stats.links_of(device)


def _handle_failures(kind: type) -> None:
    try:
        from kvswap.vllm import _failures
    except ImportError as error:
        reason: str | None = str(error)
    else:
        reason = _failures.install(kind)
    if reason is not None:
        _logger.warning("a request whose load failed loads again: %s (vLLM %s)", reason, vllm.__version__)


def _make_overlap(scheduler: Any, kv_cache_config: Any, settings: OverlapSettings | None) -> Overlap:
    """settings None: the loads are vLLM's own, by its rule alone."""
    from kvswap.vllm import _overlap

    return _overlap.make(scheduler, kv_cache_config, settings or _overlap.ANY)


_block_first.install()


class KVSwapConnector(OffloadingConnector):  # type: ignore[misc]
    """vLLM's OffloadingConnector with kvswap's transfers, which goes on when a transfer fails.

    Configured as vLLM's own, with "kv_connector": "KVSwapConnector" and "kv_connector_module_path": "kvswap.vllm". With
    "kv_load_failure_policy": "recompute" a request whose load failed is computed instead; vLLM's default ends it.

    In the place of vLLM's specs (spec_name; CPUOffloadingSpec by default) it takes kvswap's. kvswap.Error when the KV
    caches are registered: the transfers are not kvswap's; with "kvswap_fallback": true in kv_connector_extra_config
    that is a warning, and vLLM's own transfers stay.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._fallback = falls_back(extra_config)
        self._shares_links = lend_of(extra_config) is not None or share_of(extra_config) is not None
        _choose_spec(extra_config)
        settings = overlap_of(extra_config)
        reason = _why_no_overlap(vllm_config, kv_cache_config) if settings.on else None
        if settings.on and reason is None and self._fallback and not _has_own_sync_loads():
            reason = "kvswap_fallback may leave the transfers to vLLM, for which a step does not wait in this release"
        self._overlaps = settings.on and reason is None
        self._settings = settings
        if self._overlaps:
            extra_config.setdefault("sync_load_budget_bytes", settings.budget)
        elif reason is not None and role == KVConnectorRole.SCHEDULER:
            _logger.warning("kvswap_overlap: %s (vLLM %s). Loads stay asynchronous", reason, vllm.__version__)
        stages = vllm_config.parallel_config.pipeline_parallel_size
        with _codec.planned(extra_config, kv_cache_config, stages), _share.allowed(vllm_config, OffloadingConnector):
            super().__init__(vllm_config, role, kv_cache_config)
        self._groups = len(kv_cache_config.kv_cache_groups)
        # Loads in their request's step may be vLLM's own too (0.33). _failures.py handles those that fail.
        self.has_sync_loads = self._overlaps or (settings.budget > 0 and _has_own_sync_loads())
        self._overlap: Overlap | None = None
        self._own_loads: StepLoads | None = None  # worker
        # Blocks that vLLM clears when it prepares the inputs would be cleared after their load.
        self._loads_early = getattr(kv_cache_config, "needs_kv_cache_zeroing", True) is False
        self._submitted: Any = None  # worker: the metadata whose loads were submitted early
        self._awaited: Any = None  # worker: the metadata whose loads the step's stream waits for already
        self._ahead: Ahead | None = None  # worker
        self._sees_beginnings = False  # worker: it is called before all work of a step
        self._watch: _Watch | None = None
        self._steps: Steps | None = None  # worker: with kvswap_lend
        self._links: LinkStats | None = None  # worker: with kvswap_lend or kvswap_share
        self._invalid_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._failed_stores: dict[int, str] = {}  # worker: not reported yet; scheduler: of unfinished jobs
        self._failed_sync_loads: dict[int, str] = {}  # worker: not reported yet
        self._prepared: dict[int, tuple[Any, list[Any]]] = {}  # scheduler: a store's chunks by id(), and their keys
        self._orders: dict[int, list[Any]] = {}  # scheduler: keys of unfinished stores in the order of their chunks
        self._not_stored: NotStored = {}  # scheduler: of unfinished stores
        self._looked_up: set[str] = set()  # scheduler: requests that have not finished
        self._given_up: set[str] = set()  # scheduler: those of which a load failed
        self._loaded: set[str] = set()  # scheduler: those whose load was reported, and that no step has had since
        self._still = 0  # scheduler: how many of the last steps ran nothing
        self._outcomes: Outcomes | None = None  # scheduler: of loads
        self._replicas: ReplicaManager | None = None  # scheduler: with kvswap_replicas
        if role == KVConnectorRole.SCHEDULER:
            manager = self.connector_scheduler.manager
            self._complete_store = manager.complete_store
            # vLLM's tiering counts the calls of a request: those that keep a part of a job from its primary tier do not
            # go through it.
            self._drop_chunks = getattr(manager, "primary_tier", manager).complete_store
            manager.complete_store = self._complete_store_truly
            if codec_of(extra_config) is not None:
                self._prepare_store = manager.prepare_store
                manager.prepare_store = self._prepare_store_in_order
            if hasattr(manager, "reported"):  # of replicas
                scheduler = self.connector_scheduler
                manager.unfinished = lambda: scheduler._jobs
                self._replicas = manager
            self._say_how_blocks_lie(vllm_config, kv_cache_config)
            _finished.install(self.connector_scheduler)
            _windows.install(self.connector_scheduler, kv_cache_config)
            _handle_failures(KVSwapConnector)
            self._outcomes = _outcomes_of(self.connector_scheduler)
            if self.has_sync_loads:
                asked = settings if self._overlaps else None
                if self._overlaps:
                    _logger.info(
                        "kvswap_overlap: requests run in the step that loads their blocks, %d MiB a step at most, and "
                        "%g ms beside other requests",
                        *(settings.budget >> 20, settings.shared_ms),
                    )
                self._overlap = _make_overlap(self.connector_scheduler, kv_cache_config, asked)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """As vLLM's; from 0.30 on, all layers of a block together (kvswap_block_first)."""
        return _block_first.layout(vllm_config, super().get_required_kvcache_layout(vllm_config))

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, with kvswap's own (_own_stats.py)."""
        metrics = super().build_prom_metrics(*args, **kwargs)
        try:
            from kvswap.vllm import _own_stats
        except ImportError:
            return metrics
        vllm_config = args[0] if args else kwargs["vllm_config"]
        _own_stats.describe(metrics, vllm_config.kv_transfer_config.kv_connector_extra_config)
        return metrics

    def get_kv_connector_stats(self) -> Any:
        """As vLLM's; those of a worker that shares links, with what these carried."""
        theirs = super().get_kv_connector_stats()
        ours = self._links.take() if self._links is not None else None
        if theirs is None or ours is None:
            return theirs if ours is None else ours
        return theirs.aggregate(ours)

    def _say_how_blocks_lie(self, vllm_config: Any, kv_cache_config: Any) -> None:
        """0.26, second runner. The first runner and releases with layouts log it themselves."""
        if hasattr(vllm_config.cache_config, "kv_cache_layout") or not vllm_config.use_v2_model_runner:
            return
        if _block_first.is_packed(kv_cache_config):
            _logger.info("kvswap_block_first: all layers of a block lie together in the GPU's cache")
            return
        reason = _block_first.why_not(vllm_config) or _block_first.why_not_groups(kv_cache_config.kv_cache_groups)
        if reason is None and not _block_first.is_installed():
            reason = "this process has not loaded kvswap's plugin, or does not know this vLLM's planner"
        _logger.info(
            "kvswap_block_first: the GPU's cache has a tensor a layer: %s (vLLM %s)",
            *(reason or "it was planned before kvswap was loaded, or by another connector", vllm.__version__),
        )

    # -- worker -------------------------------------------------------------------------------------------------------

    def _attach(self, kv_caches: Any) -> None:
        worker = self.connector_worker.worker
        if isinstance(worker, _Watch):
            return
        if not _handlers_of(worker):
            self._refuse(worker)
        self._watch = self.connector_worker.worker = _Watch(worker)
        self._steps = getattr(self.connector_worker.spec, "steps", None)
        if self._shares_links and self._watch.handlers:
            self._links = _links_of(self._watch.handlers[0].device)
        if self._overlaps and _handlers_of(worker):
            from kvswap.vllm import _overlap
            from kvswap.vllm._layers import StepLoads

            self._sync_loads_of = _overlap.sync_loads_of
            self._own_loads = self._watch.steps_own = StepLoads(_handlers_of(worker), kv_caches)
            if self._begin_early() and self._settings.ahead:
                from kvswap.vllm._ahead import Ahead

                steps = 2 if self._vllm_config.scheduler_config.async_scheduling else 0
                self._ahead = Ahead(steps, _overlap.steps_before_a_load(), self._settings.shared_ms)
                self._watch.ahead = self._ahead

    def _begin_early(self) -> bool:
        """Whether the runner is known."""
        from kvswap.vllm import _early

        unknown = _early.install(KVSwapConnector)
        self._sees_beginnings = not _early.has_second_runner()  # the first one calls handle_preemptions() then
        if unknown is not None:
            _logger.warning(
                "kvswap_overlap: loads begin only when a step's inputs are prepared, and are reported only when they "
                "have ended: %s is not known (vLLM %s)",
                unknown,
                vllm.__version__,
            )
        return unknown is None

    def _refuse(self, worker: Any) -> None:
        spec, theirs = type(self.connector_worker.spec).__name__, type(worker).__name__
        text = (
            f"KVSwapConnector has {spec}, whose {theirs} does not move blocks by kvswap (vLLM {vllm.__version__}, "
            f"kvswap {kvswap.__version__}); where that is kvswap's own spec, a warning of kvswap.vllm above says why"
        )
        if self._fallback:
            _logger.warning("%s. vLLM's own transfers stay, as kvswap_fallback says", text)
            return
        raise kvswap.Error(
            f'{text}. In kv_connector_extra_config leave out "spec_name" and "spec_module_path", or set them to '
            '"KVSwapOffloadingSpec" and "kvswap.vllm"; or set "kvswap_fallback": true to go on without kvswap'
        )

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """As vLLM's, in releases that ask; not where steps are to wait for one layer after another: the tensor of all
        layers has the heads outside of the layers, so that each layer lies all over a block."""
        return not self._overlaps and bool(getattr(super(), "prefer_cross_layer_blocks", False))

    def register_kv_caches(self, kv_caches: Any) -> None:
        """As vLLM's."""
        if self._overlaps and hasattr(self.connector_worker.spec, "layers"):
            self.connector_worker.spec.layers = kv_caches
        super().register_kv_caches(kv_caches)
        self._attach(kv_caches)

    def register_cross_layers_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's, in releases that have it. One tensor has all layers, so that a step waits for all of a load."""
        super().register_cross_layers_kv_cache(*args, **kwargs)
        self._attach({})

    def unregister_kv_caches(self) -> None:
        """vLLM calls it before the cache's memory goes, as in sleep mode (0.33). What is queued on the device has ended
        then, but shared transfers are not all queued there."""
        for handler in () if self._watch is None else self._watch.handlers:
            if handler.member is not None:
                handler.drain()
        lending = self._lending()
        if lending is not None:
            lending.pause()
        if hasattr(super(), "unregister_kv_caches"):
            super().unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        """vLLM calls it when the cache's memory has come back (0.33)."""
        if hasattr(super(), "restore_kv_caches"):
            super().restore_kv_caches()
        lending = self._lending()
        if lending is not None:
            lending.resume()

    def _lending(self) -> Lending | None:
        """Not kept here: it holds the cache's memory."""
        handlers = self._watch.handlers if self._watch is not None else []
        return next((handler.lending for handler in handlers if handler.lending is not None), None)

    def _await_loads(self, kv_connector_metadata: Any) -> None:
        """The step's stream waits for loads that were reported before they had ended (_ahead.py), and for those that
        vLLM gives up (reset_cache()), whose blocks it takes for free."""
        own = self._own_loads
        if own is None:
            return
        jobs = getattr(kv_connector_metadata, "awaited", None) or kv_connector_metadata.jobs_to_flush
        if not jobs or self._awaited is kv_connector_metadata:
            return
        self._awaited = kv_connector_metadata
        jobs = frozenset(jobs).union(kv_connector_metadata.jobs_to_flush or ())
        own.wait_for(jobs & self.connector_worker._load_jobs.keys())

    def begin_step(self, kv_connector_metadata: Any, may_load: Callable[[], bool]) -> None:
        """Before all work of a step of the second runner (_early.py). may_load: whether the step's own loads may
        begin."""
        self._sees_beginnings = True
        if self._steps is not None:
            self._steps.begin()
        self._await_loads(kv_connector_metadata)
        own = kv_connector_metadata.load_jobs and self._own_loads is not None and self._loads_early
        if own and self._sync_loads_of(kv_connector_metadata) and may_load():
            self.handle_preemptions(kv_connector_metadata)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """As vLLM's; then the loads of the step's own requests are submitted, before its inputs are prepared."""
        if self._steps is not None:
            self._steps.begin()
        if self._own_loads is not None:
            self._await_loads(kv_connector_metadata)
        if self._submitted is not None and self._submitted is kv_connector_metadata:
            return  # begin_step() did it
        super().handle_preemptions(kv_connector_metadata)
        own, worker = self._own_loads, self.connector_worker
        if own is None or not self._loads_early:
            return
        jobs = self._sync_loads_of(kv_connector_metadata)
        if jobs:
            self._submit_loads(own, jobs, lambda: worker.start_kv_transfers(kv_connector_metadata))
            self._submitted = kv_connector_metadata

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """As vLLM's; the loads of the step's own requests are waited for by its layers."""
        own, meta = self._own_loads, self._connector_metadata
        if self._steps is not None:
            self._steps.begin()
        start = super().start_load_kv
        if own is None:
            start(forward_context, **kwargs)
            return
        early, self._submitted = self._submitted, None
        if early is None or early is not meta:
            jobs = self._sync_loads_of(meta)
            self._submit_loads(own, jobs, lambda: start(forward_context, **kwargs), forward_context)
        own.before_forward(forward_context)

    def _submit_loads(
        self, own: StepLoads, jobs: set[int], submit: Callable[[], None], forward_context: Any = None
    ) -> None:
        own.begin(jobs, forward_context)
        try:
            submit()
        finally:
            for job_id in jobs:
                self.connector_worker._load_jobs[job_id] = None  # vLLM's mark of a request that runs already

    def wait_for_layer_load(self, layer_name: str) -> None:
        """The model's stream waits for the layer's blocks that this step loads."""
        if self._own_loads is not None:
            self._own_loads.wait_for_layer(layer_name)

    def _end_own_loads(self, own: StepLoads, watch: _Watch) -> None:
        """The step's output must not be used before its loads are known to have succeeded."""
        watch.wait(own.jobs | own.awaited)
        distrusted = own.finish()
        if distrusted:
            watch.distrusted.update(distrusted)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """As vLLM's; records failures for the following calls."""
        own = self._own_loads
        if self._steps is not None:
            self._steps.end()
        if own is not None:
            if own.jobs or own.awaited:
                self._end_own_loads(own, self._watch)  # type: ignore[arg-type]
            else:  # most steps
                own.finish()
        watch, loads = self._watch, self.connector_worker._load_jobs
        requests = dict(loads) if loads else {}
        finished: tuple[set[str], set[str]] = super().get_finished(finished_req_ids)
        if self._ahead is not None:
            self._ahead.stepped()
            if self._sees_beginnings:
                finished[1].update(self._report_ahead(self._ahead, loads))
        if not watch.failures:  # type: ignore[union-attr]
            return finished
        failures, watch.failures = watch.failures, []  # type: ignore[union-attr]
        for failure in failures:
            if failure.gpu_blocks is None:
                self._failed_stores[failure.job_id] = failure.error
            else:
                self._note_failed_load(failure, requests)
        return finished

    @staticmethod
    def _report_ahead(ahead: Ahead, loads: dict[int, str | None]) -> list[str]:
        """The requests whose loads are about to end."""
        names: list[str] = []
        for job_id in ahead.due(loads):
            name, loads[job_id] = loads[job_id], None  # vLLM's mark of a request that runs already
            if name is not None:
                names.append(name)
        return names

    def _note_failed_load(self, failure: _Failure, requests: dict[int, str | None]) -> None:
        request = requests.get(failure.job_id)
        if self._groups == 1:
            self._invalid_blocks.update(int(block) for block in failure.gpu_blocks)
            if request is None and failure.job_id in requests:  # None: vLLM's mark of a request that runs already
                self._failed_sync_loads[failure.job_id] = failure.error
        elif request is None and failure.job_id in requests and self.has_sync_loads:
            self._invalid_blocks.update(int(block) for block in failure.gpu_blocks)
            self._failed_sync_loads[failure.job_id] = failure.error
        elif request is not None and hasattr(OffloadingConnector, "get_transfer_results"):
            self._failed_requests.add(request)
        else:
            raise kvswap.Error(
                f"offloading job {failure.job_id} failed to load ({failure.error}), and vLLM {vllm.__version__} cannot "
                f"recompute blocks of a model with {self._groups} KV-cache groups"
            )

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """As vLLM's, with the requests whose load failed; in releases that have it."""
        results = super().get_transfer_results(finished_req_ids)
        if self._failed_requests:
            results.failed_recving |= self._failed_requests
            self._failed_requests = set()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """GPU blocks of loads that failed since the last call."""
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks

    def build_connector_worker_meta(self) -> Any:
        """As vLLM's, with the stores that failed."""
        worker = self.connector_worker
        meta = super().build_connector_worker_meta()
        if meta is None or worker is None:
            return meta
        stores, self._failed_stores = self._failed_stores, {}
        loads, self._failed_sync_loads = self._failed_sync_loads, {}
        watch = self._watch
        not_stored: NotStored = {}
        if watch is not None:
            not_stored, watch.not_stored = watch.not_stored, {}
        return _with_failures(meta, stores, loads, not_stored)

    # -- scheduler ----------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """As vLLM's."""
        super().on_new_request(request)
        if self._overlap is not None:
            self._overlap.added(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """As vLLM's; (tokens, False) where the request's own step loads them; (None, False), later, while requests that
        have their blocks wait behind this one.

        vLLM passes over a request whose lookup is put off, as while its stores run, and loads for those behind it. If
        the request then finds no room, vLLM's scheduler looks no further: the others have the room, and never run. In
        each second step, for this request may have room where those behind it have none.
        """
        if self._still >= _STILL and self._still % 2 and self._loaded - {request.request_id}:
            return None, False
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._looked_up.add(request.request_id)
        if found[0] and request.request_id in self._given_up:
            return 0, False
        return found if self._overlap is None else self._overlap.matched(request, num_computed_tokens, found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """As vLLM's."""
        overlap = self._overlap
        if overlap is not None:
            blocks = overlap.allocate(request, blocks, num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if overlap is not None:
            overlap.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """As vLLM's, with the loads of the step's own requests."""
        if self._loaded:
            self._loaded.difference_update(scheduler_output.num_scheduled_tokens)
        self._still = 0 if scheduler_output.total_num_scheduled_tokens else self._still + 1
        build = super().build_connector_meta
        meta = build(scheduler_output) if self._overlap is None else self._overlap.build(build, scheduler_output)
        if self._prepared:
            for job_id, job in meta.store_jobs.items():
                spec, keys = self._prepared.get(id(job.dst_spec), (None, []))
                if spec is job.dst_spec:
                    self._orders[job_id] = keys
            self._prepared.clear()
        outcomes = self._outcomes
        if outcomes is not None and (outcomes.loads or meta.load_jobs):
            outcomes.planned(meta.load_jobs, scheduler_output.num_scheduled_tokens)
        return meta

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        """As vLLM's."""
        self._forget(request)
        return self._keep_blocks(request, super().request_finished(request, block_ids))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Any:
        """As vLLM's."""
        self._forget(request)
        return self._keep_blocks(request, super().request_finished_all_groups(request, block_ids))

    def _keep_blocks(self, request: Any, answer: tuple[bool, Any]) -> tuple[bool, Any]:
        """A load into them may be under way."""
        keeps, params = answer
        return keeps or (self._overlap is not None and self._overlap.loads.keeps(request.request_id)), params

    def _forget(self, request: Any) -> None:
        for names in (self._looked_up, self._given_up, self._loaded):
            names.discard(request.request_id)
        if self._outcomes is not None:
            self._outcomes.ended(request)
        if self._overlap is not None:
            self._overlap.ended(request)

    def failed_sync_loads(self, blocks: set[int]) -> tuple[set[str], set[int]]:
        """For _failures: the requests that these blocks were loaded for, and all blocks that hold nonsense now."""
        return (set(), set(blocks)) if self._overlap is None else self._overlap.loads.failed(blocks)

    def compute_instead(self, requests: set[str]) -> None:
        """For _failures: nothing is loaded for these requests any more."""
        self._given_up |= requests & self._looked_up
        self._loaded -= requests
        if self._outcomes is not None:
            self._outcomes.failed(requests)
        if self._overlap is not None:
            self._overlap.compute_instead(requests)

    def update_connector_output(self, connector_output: Any) -> None:
        """As vLLM's; a store that failed on any worker is dropped once all workers have reported."""
        meta = connector_output.kv_connector_worker_meta
        if connector_output.finished_recving:
            self._loaded |= connector_output.finished_recving & self._looked_up
        failed = getattr(connector_output, "failed_recving", None)
        jobs = self.connector_scheduler._jobs
        if meta is not None:
            self._failed_stores.update(getattr(meta, "failed_stores", {}))
            self._not_stored = _joined(self._not_stored, getattr(meta, "not_stored", {}))
            for load, why in getattr(meta, "failed_sync_loads", {}).items():
                computed = f"it may hold what was computed without the bytes of load {load}, which failed: {why}"
                self._failed_stores.update((job, computed) for job in jobs if job > load)
        super().update_connector_output(connector_output)
        if self._replicas is not None and meta is not None:
            self._replicas.reported(meta.completed_jobs)
        self._given_up |= (failed or set()) & self._looked_up
        if self._outcomes is not None and self._outcomes.loads:
            self._outcomes.failed(failed or ())
            self._outcomes.reported()
        if self._overlap is not None:
            self._overlap.reported(connector_output)
        if self._failed_stores:
            jobs = self.connector_scheduler._jobs
            self._failed_stores = {job: why for job, why in self._failed_stores.items() if job in jobs}
        if self._orders or self._not_stored:
            jobs = self.connector_scheduler._jobs
            self._orders = {job: keys for job, keys in self._orders.items() if job in jobs}
            self._not_stored = {job: chunks for job, chunks in self._not_stored.items() if job in jobs}

    def _keys_of(self, jobs: Iterable[int]) -> Iterable[tuple[int, Any]]:
        unfinished = self.connector_scheduler._jobs
        return ((job_id, unfinished[job_id].keys) for job_id in jobs if job_id in unfinished)

    def _prepare_store_in_order(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, which gives the chunks in the order of the keys that it takes, and then forgets their order."""
        output = self._prepare_store(keys, *args, **kwargs)
        if output is not None and output.keys_to_store:
            self._prepared[id(output.store_spec)] = output.store_spec, list(output.keys_to_store)
        return output

    def _complete_store_truly(self, keys: Any, req_context: Any, success: bool = True) -> Any:
        for job_id, failed in self._keys_of(self._failed_stores):
            if failed is keys:
                _logger.error(
                    "store %d failed, its %d blocks are dropped: %s", job_id, len(keys), self._failed_stores[job_id]
                )
                success = False
        dropped = self._dropped_of(keys) if success else set()
        if not dropped:
            return self._complete_store(keys, req_context, success)
        self._drop_chunks(dropped, req_context, False)
        return self._complete_store(keys - dropped, req_context, success)

    def _dropped_of(self, keys: Any) -> set[Any]:
        """The keys of a job that a worker's codec could not store; all, where their order is not known."""
        for job_id, of_job in self._keys_of(self._not_stored):
            if of_job is keys:
                order = self._orders.get(job_id)
                return set(keys) if order is None else {order[position] for position in self._not_stored[job_id]}
        return set()
