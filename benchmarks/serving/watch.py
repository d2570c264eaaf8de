"""How long the engine's thread is in a connector's submissions, and what came of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from serving.engine import Engine


class Direction:
    """Stores, or loads, since the last take()."""

    def __init__(self) -> None:
        self.begun: list[float] = []  # time.perf_counter() at each submission
        self.submitting: list[float] = []  # seconds in each
        self.seen: list[float] = []  # when a job was seen to have ended
        self.bytes = 0
        self.seconds = 0.0  # on the device
        self.blocks = self.runs = 0  # host blocks, and runs of neighbours among them

    def count(self, blocks: Any) -> None:
        """A job's host blocks."""
        if len(blocks):
            self.blocks += len(blocks)
            self.runs += 1 + int((blocks[1:] != blocks[:-1] + 1).sum())

    def record(self) -> dict[str, Any]:
        """For the benchmark's record."""
        made: dict[str, Any] = {"jobs": len(self.seen), "bytes": self.bytes, "device_s": round(self.seconds, 6)}
        made["submit_ms"] = [round(1e3 * value, 4) for value in self.submitting]
        if self.seconds:
            made["GBps"] = round(self.bytes / self.seconds / 1e9, 2)
        if self.runs:
            made["host_blocks_a_run"] = round(self.blocks / self.runs, 2)
        return made


class Watch:
    """Of an engine whose connector has a worker for its jobs, or vLLM's simple one's backend; of others, nothing.

    vLLM's own counters would not do: an engine in this process takes them from steps that have outputs, and a step that
    only waits for a load has none."""

    def __init__(self, engine: Engine) -> None:
        self._kinds: dict[int, str] = {}
        self.store, self.load = Direction(), Direction()
        worker = engine.transfers
        if hasattr(worker, "submit_load"):
            worker.submit_store = self._watched("store", worker.submit_store)
            worker.submit_load = self._watched("load", worker.submit_load)
            worker.get_finished = self._counted(worker.get_finished)
        backend: Any = getattr(getattr(engine.connector_worker, "worker_handler", None), "_backend", None)
        if hasattr(backend, "launch_copy"):
            backend.launch_copy = self._launched(backend.launch_copy)

    def take(self) -> dict[str, Any]:
        """What happened since the last call."""
        made = {kind: getattr(self, kind).record() for kind in ("store", "load") if getattr(self, kind).begun}
        self.store, self.load = Direction(), Direction()
        return made

    def _watched(self, kind: str, submit: Callable[..., Any]) -> Callable[..., Any]:
        def timed(job: int, source: Any, target: Any, **keywords: Any) -> Any:
            self._kinds[job] = kind
            direction: Direction = getattr(self, kind)
            direction.count((target if kind == "store" else source).block_ids)
            begin = time.perf_counter()
            direction.begun.append(begin)
            try:
                return submit(job, source, target, **keywords)
            finally:
                direction.submitting.append(time.perf_counter() - begin)

        return timed

    def _launched(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, is_store: bool, **keywords: Any) -> Any:
            direction = self.store if is_store else self.load
            begin = time.perf_counter()
            direction.begun.append(begin)
            try:
                return launch(*args, is_store=is_store, **keywords)
            finally:
                direction.submitting.append(time.perf_counter() - begin)

        return timed

    def _counted(self, finished: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **keywords: Any) -> Any:
            results = finished(*args, **keywords)
            for result in results:
                direction: Direction = getattr(self, self._kinds.pop(result.job_id, "load"))
                direction.seen.append(time.perf_counter())
                direction.bytes += result.transfer_size or 0
                direction.seconds += result.transfer_time or 0.0
            return results

        return counted
