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

from kvswap.vllm._own_stats import ABORTED, FAILED, LOADED, USED, is_known


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
                self._settle(job_id, USED)

    def failed(self, requests: Collection[str]) -> None:
        """What was loaded for these requests is not used."""
        for job_id, load in [*self.loads.items()]:
            if load.request in requests:
                self._settle(job_id, FAILED)

    def ended(self, request: Any) -> None:
        """A request has finished. If a step had it, its load may be unfinished still."""
        for job_id, load in [*self.loads.items()]:
            if load.request == request.request_id and not load.ran:
                self._settle(job_id, FAILED if request.status.name == "FINISHED_ERROR" else ABORTED)

    def _settle(self, job_id: int, what: str) -> None:
        self._scheduler._connector_stats.increase_counter(LOADED, self.loads.pop(job_id).blocks, (what,))


def make(theirs: Any) -> Outcomes | None:
    """None: this vLLM's statistics are not known."""
    return Outcomes(theirs) if hasattr(theirs, "_connector_stats") and is_known() else None
