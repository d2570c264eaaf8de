"""How long the engine's thread is in a connector's submissions, and what came of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from serving.engine import Engine


class Direction:
    """Stores, or loads, since the last take()."""

    def __init__(self) -> None:
        self.begun: list[float] = []  # time.perf_counter() at each submission
        self.submitting: list[float] = []  # seconds in each
        self.seen: list[float] = []  # when a job was seen to have ended
        self.took: list[float] = []  # seconds from a job's submission until then
        self.bytes = 0
        self.seconds = 0.0  # on the device
        self.blocks = self.runs = 0  # host blocks, and runs of neighbours among them
        self.threads: list[float] = []  # seconds in which a thread of the connector's submitted a job

    def count(self, blocks: Any) -> None:
        """A job's host blocks."""
        if len(blocks):
            self.blocks += len(blocks)
            self.runs += 1 + int((blocks[1:] != blocks[:-1] + 1).sum())

    def record(self) -> dict[str, Any]:
        """For the benchmark's record."""
        made: dict[str, Any] = {"jobs": len(self.seen), "bytes": self.bytes, "device_s": round(self.seconds, 6)}
        made["submit_ms"] = [round(1e3 * value, 4) for value in self.submitting]
        made["took_ms"] = [round(1e3 * value, 4) for value in self.took]
        if self.threads:
            made["thread_ms"] = [round(1e3 * value, 4) for value in self.threads]
        if self.seconds:
            made["GBps"] = round(self.bytes / self.seconds / 1e9, 2)
        if self.runs:
            made.update(blocks=self.blocks, host_blocks_a_run=round(self.blocks / self.runs, 2))
        return made


class Watch:
    """Of an engine whose connector has a worker for its jobs, or vLLM's simple one's backend; of others, nothing.

    vLLM's own counters would not do: an engine in this process takes them from steps that have outputs, and a step that
    only waits for a load has none."""

    def __init__(self, engine: Engine) -> None:
        self._jobs: dict[int, tuple[str, float]] = {}  # direction, and when it was submitted
        self.store, self.load = Direction(), Direction()
        self.sees = False  # what is submitted
        worker = engine.transfers
        if hasattr(worker, "submit_load"):
            self.sees = True
            worker.submit_store = self._watched("store", worker.submit_store)
            worker.submit_load = self._watched("load", worker.submit_load)
            worker.get_finished = self._counted(worker.get_finished)
        backend: Any = getattr(getattr(engine.connector_worker, "worker_handler", None), "_backend", None)
        if hasattr(backend, "launch_copy"):
            self.sees = True
            backend.launch_copy = self._launched(backend.launch_copy)
        if hasattr(backend, "_copy_loop"):  # vLLM's, not kvswap's
            from vllm.v1.simple_kv_offload import copy_backend

            copy_backend.copy_blocks = self._threaded(copy_backend.copy_blocks, backend)

    def take(self) -> dict[str, Any]:
        """What happened since the last call."""
        made = {kind: getattr(self, kind).record() for kind in ("store", "load") if getattr(self, kind).begun}
        self.store, self.load = Direction(), Direction()
        return made

    def _watched(self, kind: str, submit: Callable[..., Any]) -> Callable[..., Any]:
        def timed(job: int, source: Any, target: Any, **keywords: Any) -> Any:
            direction: Direction = getattr(self, kind)
            direction.count((target if kind == "store" else source).block_ids)
            begin = time.perf_counter()
            self._jobs[job] = kind, begin
            direction.begun.append(begin)
            try:
                return submit(job, source, target, **keywords)
            finally:
                direction.submitting.append(time.perf_counter() - begin)

        return timed

    def _launched(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def timed(source: Any, target: Any, *args: Any, is_store: bool, **keywords: Any) -> Any:
            direction = self.store if is_store else self.load
            direction.count(np.asarray(target if is_store else source))
            begin = time.perf_counter()
            direction.begun.append(begin)
            try:
                return launch(source, target, *args, is_store=is_store, **keywords)
            finally:
                direction.submitting.append(time.perf_counter() - begin)

        return timed

    def _threaded(self, copy: Callable[..., Any], backend: Any) -> Callable[..., Any]:
        """vLLM's simple backend computes addresses and calls the driver in a thread, beside the engine's Python."""

        def timed(source: Any, target: Any, params: Any) -> Any:
            direction = self.load if params is backend._load_params else self.store
            begin = time.perf_counter()
            try:
                return copy(source, target, params)
            finally:
                direction.threads.append(time.perf_counter() - begin)

        return timed

    def _counted(self, finished: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **keywords: Any) -> Any:
            results = finished(*args, **keywords)
            for result in results:
                now = time.perf_counter()
                kind, begin = self._jobs.pop(result.job_id, ("load", now))
                direction: Direction = getattr(self, kind)
                direction.seen.append(now)
                direction.took.append(now - begin)
                direction.bytes += result.transfer_size or 0
                direction.seconds += result.transfer_time or 0.0
            return results

        return counted
