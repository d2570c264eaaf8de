"""The scheduler's side of loads whose end has not been reported.

A request waits for its asynchronous load. A step waits for the loads of its own requests, and for loads that a worker
reported before they had ended (_ahead.py). After such a report vLLM's scheduler may schedule the request in the next
step that it plans. So the metadata of that step, whatever it runs, names the job among those to wait for (awaited).

Blocks that a load still writes must not be reallocated:
- A request that is aborted or ends with an error after its load was reported keeps its blocks: request_finished()
  returns True, and the request is added to finished_sending when the load has ended. A request that ends normally has
  run in a step that waited for the load.
- For a request that ended before the report, vLLM would free the blocks on the report. Such a request is added to
  finished_recving only when the load has ended.

If a load that a step waits for fails, everything computed from its blocks is invalid. The requests that share the
blocks may be preempted or finished before the failure is known. So these requests are recorded, with the blocks that
each computed: in each group, all blocks from its first computed token on. A window group's blocks may be valid while
the full group's are not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

_CUT_SHORT = ("FINISHED_ABORTED", "FINISHED_ERROR")


class _Load:
    """A load that a step waits for. spoilt: the blocks that are invalid if it fails, its own and those computed from
    them. sharers: the requests that compute from these blocks, and how many tokens of each were there before its first
    step; None: it has not been scheduled."""

    def __init__(self, job: Any) -> None:
        self.blocks: set[int] = set(np.asarray(job.dst_spec.block_ids).tolist())
        self.spoilt = set(self.blocks)
        self.sharers: dict[str, int | None] = {job.req_id: None}

    def begins(self, name: str, tokens: int, groups: list[list[int]]) -> None:
        """A request with these blocks is scheduled; so many of its tokens need not be computed. Record it if it shares
        some of the load's blocks."""
        if name in self.sharers or any(not self.spoilt.isdisjoint(group) for group in groups):
            self.sharers[name] = tokens

    def spoil(self, name: str, groups: list[list[int]], sizes: list[int]) -> None:
        """Add the blocks that this sharer computed. sizes: a block's tokens in each group."""
        tokens = self.sharers.get(name)
        if tokens is None:
            return
        for size, group in zip(sizes, groups, strict=True):
            self.spoilt.update(group[tokens // size :])
        self.spoilt.discard(0)  # vLLM's null block


class Unfinished:
    """theirs: vLLM's connector_scheduler. make_sync: called for a job that is reported ahead, which loads for a request
    in its own step from then on."""

    def __init__(self, theirs: Any, make_sync: Callable[[int, Any], None]) -> None:
        self._scheduler, self._make_sync = theirs, make_sync
        self._asynchronous: dict[int, Any] = {}  # job -> its TransferJob
        self._loads: dict[int, _Load] = {}  # that steps wait for, by job
        self._awaited: set[int] = set()  # of those, reported ahead, and in no step's metadata yet
        self._ahead: dict[int, str] = {}  # of those, reported ahead: job -> request
        self._kept: set[str] = set()  # requests of these that have ended, and have their blocks
        self._withheld: dict[int, str] = {}  # asynchronous, reported ahead, which vLLM is not told of: job -> request

    def __bool__(self) -> bool:
        """Whether planned() may have something to do in a step without loads, or reported() in one whose report has no
        ended job."""
        return bool(self._loads or self._withheld)

    def planned(self, load_jobs: dict[int, Any], own: Collection[int], output: Any) -> frozenset[int]:
        """A step is planned, with these loads, of which these are its own requests'. The loads that it has to wait for
        because they were reported ahead."""
        for job_id, job in load_jobs.items():
            if job_id in own:
                self._loads[job_id] = _Load(job)
            else:
                self._asynchronous[job_id] = job
        awaited, self._awaited = frozenset(self._awaited), set()
        if self._loads:
            self._spoil(output)
        return awaited

    def _spoil(self, output: Any) -> None:
        """Record what the step's requests compute from the blocks of unfinished loads. Only a request that is new or
        resumed in this step can begin to share blocks."""
        cached = output.scheduled_cached_reqs
        fresh = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
        if cached.resumed_req_ids:
            begun = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            fresh |= {name: tokens for name, tokens in begun if name in cached.resumed_req_ids}
        sizes = self._sizes()
        copies = getattr(output, "kv_cache_block_copies", None) or ()  # of parts of shared blocks, made before the step
        for load in self._loads.values():
            load.spoilt.update(copy.dst_block_id for copy in copies if copy.src_block_id in load.spoilt)
            before = -1
            while before != len(load.spoilt):  # a request may share what another one of this step computes
                before = len(load.spoilt)
                for name, tokens in fresh.items():
                    load.begins(name, tokens, self._blocks_of(name))
                for name in load.sharers:
                    load.spoil(name, self._blocks_of(name), sizes)
                if not fresh:
                    break

    def _blocks_of(self, name: str) -> list[list[int]]:
        status = self._scheduler._req_status.get(name)
        return [group.block_ids for group in status.group_states] if status else [[] for _ in self._sizes()]

    def _sizes(self) -> list[int]:
        return [group.tokens_per_block for group in self._scheduler.config.kv_group_configs]

    def ended(self, request: Any) -> None:
        """A request has finished. vLLM's connector knows it still."""
        name = request.request_id
        for load in self._loads.values():
            load.spoil(name, self._blocks_of(name), self._sizes())
        if request.status.name in _CUT_SHORT and name in self._ahead.values():
            self._kept.add(name)

    def keeps(self, name: str) -> bool:
        """Whether a request that has ended keeps its blocks."""
        return name in self._kept

    def failed(self, blocks: set[int]) -> tuple[set[str], set[int]]:
        """The requests whose loads these blocks are of, and those that share them; and the blocks that do not hold what
        they should."""
        bad, names = set(blocks), set[str]()
        for load in self._loads.values():
            if not load.blocks.isdisjoint(blocks):
                bad |= load.spoilt
                names |= load.sharers.keys()
        return names, bad

    def reported(self, output: Any, known: Collection[str]) -> None:
        """A step's report of all workers, after vLLM's connector has read it, and before its scheduler does. known: the
        requests that have not ended."""
        jobs = self._scheduler._jobs
        if output.finished_recving:
            self._find_ahead(output, jobs, known)
        if self._ahead or self._withheld:
            self._let_go(output, jobs)
        self._loads = {job_id: load for job_id, load in self._loads.items() if job_id in jobs}
        self._awaited &= self._loads.keys()
        self._asynchronous = {job_id: job for job_id, job in self._asynchronous.items() if job_id in jobs}

    def _find_ahead(self, output: Any, jobs: dict[int, Any], known: Collection[str]) -> None:
        """The loads that are reported and have not ended."""
        for job_id, job in [*self._asynchronous.items()]:
            if job.req_id not in output.finished_recving or job_id not in jobs:
                continue
            if job.req_id not in known:
                output.finished_recving = output.finished_recving - {job.req_id}
                self._withheld[job_id] = job.req_id
                continue
            self._loads[job_id] = _Load(self._asynchronous.pop(job_id))
            self._awaited.add(job_id)
            self._ahead[job_id] = job.req_id
            self._make_sync(job_id, jobs[job_id])

    def _let_go(self, output: Any, jobs: dict[int, Any]) -> None:
        """The blocks of requests that have ended, whose loads have ended now."""
        for job_id in [job_id for job_id in self._withheld if job_id not in jobs]:
            output.finished_recving = (output.finished_recving or set()) | {self._withheld.pop(job_id)}
        for job_id in [job_id for job_id in self._ahead if job_id not in jobs]:
            name = self._ahead.pop(job_id)
            if name in self._kept:
                self._kept.remove(name)
                output.finished_sending = (output.finished_sending or set()) | {name}
