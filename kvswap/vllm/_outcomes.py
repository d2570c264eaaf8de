"""What became of loaded blocks, in vLLM's own statistics of the connector: whether a step of the model had them.

vLLM counts hits when it looks blocks up, which is before they are loaded. Here a load counts once, with all of its GPU
blocks, when its outcome is known:

- used: a step had its request, after the load or beside it, and the load succeeded. A request that is preempted later
  has used its load. What it loads again is another load.
- failed: the load failed, or one that shares its blocks, and the request is computed instead; or the request ended with
  an error.
- aborted: the request ended before a step had it.

vLLM preempts only requests that a step had, and one that waits keeps what was loaded for it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics
from vllm.v1.kv_offload.base import OffloadingCounterMetadata

_BLOCKS = "kvswap_loaded_blocks"
_USED, _FAILED, _ABORTED = "used", "failed", "aborted"
_HELP = (
    "GPU blocks that were loaded from the host, by what became of them: "
    f"{_USED} (a step of the model had them), {_FAILED}, {_ABORTED} (the request ended before a step had it)."
)


def _is_known() -> bool:
    """Whether the metric can be described to vLLM's frontend, which refuses to count what it does not know."""
    kept = {"_offloading_metric_metadata", "_offloading_metric_defs", "_create_metric"}
    return kept <= set(OffloadPromMetrics.__init__.__code__.co_names)


def describe(metrics: Any) -> None:
    """Add the metric to those of vLLM's frontend. metrics: what vLLM's build_prom_metrics() has made."""
    if _is_known():
        about = OffloadingCounterMetadata(_HELP, ("what",))
        metrics._offloading_metric_metadata[_BLOCKS] = about
        metrics._offloading_metric_defs[_BLOCKS] = metrics._create_metric(_BLOCKS, about)


@dataclass
class _Load:
    request: str
    blocks: int
    ran: bool = False  # a step had the request


class Outcomes:
    """theirs: vLLM's connector_scheduler. vLLM's scheduler calls, in its own thread."""

    def __init__(self, theirs: Any) -> None:
        self._scheduler = theirs
        self.loads: dict[int, _Load] = {}  # by job, of unknown outcome; empty in most steps

    def planned(self, load_jobs: dict[int, Any], scheduled: Collection[str]) -> None:
        """A step is planned, with these loads and these requests."""
        for job_id, job in load_jobs.items():
            self.loads[job_id] = _Load(job.req_id, len(job.dst_spec.block_ids))
        for load in self.loads.values():
            load.ran = load.ran or load.request in scheduled
        self.reported()

    def reported(self) -> None:
        """Loads may have ended. Those that failed are no longer here, see failed()."""
        unfinished = self._scheduler._jobs
        for job_id, load in [*self.loads.items()]:
            if load.ran and job_id not in unfinished:
                self._settle(job_id, _USED)

    def failed(self, requests: Collection[str]) -> None:
        """What was loaded for these requests is not used."""
        for job_id, load in [*self.loads.items()]:
            if load.request in requests:
                self._settle(job_id, _FAILED)

    def ended(self, request: Any) -> None:
        """A request has finished. If a step had it, its load may be unfinished still."""
        for job_id, load in [*self.loads.items()]:
            if load.request == request.request_id and not load.ran:
                self._settle(job_id, _FAILED if request.status.name == "FINISHED_ERROR" else _ABORTED)

    def _settle(self, job_id: int, what: str) -> None:
        self._scheduler._connector_stats.increase_counter(_BLOCKS, self.loads.pop(job_id).blocks, (what,))


def make(theirs: Any) -> Outcomes | None:
    """None: this vLLM's statistics are not known."""
    return Outcomes(theirs) if hasattr(theirs, "_connector_stats") and _is_known() else None
