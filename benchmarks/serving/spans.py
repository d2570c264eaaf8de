"""Where an engine's step spends its time: spans round the calls that it makes."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from serving.engine import Engine

# Made by each step, on the scheduler's side and the worker's.
_SCHEDULER = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
)
_WORKER = (
    "begin_step",  # kvswap_overlap's
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)


class Spans:
    """(name, begin, seconds) of each call while recording() is on."""

    def __init__(self, engine: Engine) -> None:
        self.found: list[tuple[str, float, float]] = []
        core = engine.core
        self._calls: list[tuple[Any, str, str]] = [
            (core.scheduler, "schedule", "schedule"),
            (core.scheduler, "update_from_output", "update"),
            (core.model_executor, "execute_model", "execute"),
            (core.model_executor, "sample_tokens", "sample"),
        ]
        for side, names in ((engine.connector, _SCHEDULER), (engine.connector_worker, _WORKER)):
            self._calls += [(side, name, f"connector.{name}") for name in names if hasattr(side, name)]

    @contextmanager
    def recording(self) -> Iterator[list[tuple[str, float, float]]]:
        """While it lasts, calls are recorded."""
        self.found = []
        wrapped = []
        for owner, name, label in self._calls:
            if hasattr(owner, name):
                setattr(owner, name, self._timed(getattr(owner, name), label))
                wrapped.append((owner, name))
        try:
            yield self.found
        finally:
            for owner, name in wrapped:
                delattr(owner, name)

    def _timed(self, call: Callable[..., Any], label: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **keywords: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **keywords)
            finally:
                self.found.append((label, begin, time.perf_counter() - begin))

        return timed


def total(found: list[tuple[str, float, float]], begin: float, end: float) -> dict[str, float]:
    """Milliseconds by name, of the spans that begin in this time."""
    made: dict[str, float] = defaultdict(float)
    for name, at, seconds in found:
        if begin <= at < end:
            made[name] += 1e3 * seconds
    return {name: round(value, 3) for name, value in made.items()}


def middles(found: list[tuple[str, float, float]]) -> dict[str, float]:
    """The median of the seconds in each call, by name."""
    made: dict[str, list[float]] = defaultdict(list)
    for name, _, seconds in found:
        made[name].append(seconds)
    return {name: median(values) for name, values in made.items()}


def steps(found: list[tuple[str, float, float]]) -> list[float]:
    """Seconds that each step was in the connector's calls; a step begins with schedule()'s end, as spans are noted when
    they end, so that its first connector calls count for it as well."""
    made, now = [], 0.0
    for name, _, seconds in found:
        now += seconds if name.startswith("connector.") else 0.0
        if name == "update":
            made.append(now)
            now = 0.0
    return made
