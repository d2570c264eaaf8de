"""Which loads a worker reports before they end (kvswap_overlap).

vLLM's scheduler learns of an asynchronous load's end from the output of a step, and the request runs in the step after
that; with asynchronous scheduling, one step later still. Between the end of a load and its request's step lie one to
three steps of the other requests. So a load is reported while it runs, if it is expected to end before its request's
step can begin. That step's stream waits for the load (_layers.py), so a wrong estimate only costs time. A load that is
expected to end later is reported in a later step, or when it has ended.

The estimate: loads run one after another, at the rate of the last ones, and begin when the steps that were queued
before them have ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

_LOADS, _STEPS = 16, 8  # of the past that the estimates are made of


class Ahead:
    """Estimates when loads end. In each step the worker's thread calls submitted() for new loads, ended() for loads
    that have ended, stepped(), and due().

    steps: how many steps begin between a report and the request's step: 2 with asynchronous scheduling. behind: how
    many steps are queued before a load when it is submitted. shared_ms: how long the request's step may wait for it.
    """

    def __init__(self, steps: int, behind: int, shared_ms: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ahead, self._behind, self._shared, self._clock = steps, behind, shared_ms / 1e3, clock
        self._ends: dict[int, float] = {}  # expected, of the loads that were neither reported nor ended
        self._free = self._looked = 0.0  # when all loads are expected to have ended; when stepped() was called last
        self._loads: deque[tuple[int, float]] = deque(maxlen=_LOADS)  # bytes, seconds
        self._steps: deque[float] = deque(maxlen=_STEPS)  # seconds

    def _step(self) -> float:
        """Seconds: a quarter of the last steps took no longer. A step that waited for something says little."""
        return sorted(self._steps)[(len(self._steps) - 1) // 4] if self._steps else 0.0

    def submitted(self, job_id: int, nbytes: int) -> None:
        """A load is queued. None is estimated until one has ended."""
        seconds = sum(seconds for _, seconds in self._loads)
        if not seconds:
            return
        begins = max(self._clock() + self._behind * self._step(), self._free)
        self._free = self._ends[job_id] = begins + nbytes * seconds / sum(nbytes for nbytes, _ in self._loads)

    def ended(self, job_id: int, nbytes: int | None, seconds: float | None) -> None:
        """A load has ended; without seconds, it failed. It had not when stepped() was called before."""
        if nbytes and seconds:
            self._loads.append((nbytes, seconds))
        expected = self._ends.pop(job_id, None)
        if expected is not None:
            self._shift(self._looked - expected)

    def _shift(self, seconds: float) -> None:
        """The loads are later than expected, by so much at least."""
        if seconds > 0:
            self._free += seconds
            self._ends = {job_id: end + seconds for job_id, end in self._ends.items()}

    def stepped(self) -> None:
        """A step is queued, and the loads that have ended are known."""
        now = self._clock()
        if self._looked:
            self._steps.append(now - self._looked)
        self._looked = now

    def due(self, unreported: Iterable[int]) -> list[int]:
        """The loads of these that are to be reported now. Each once."""
        if not self._ends:
            return []
        self._shift(self._looked - min(self._ends.values()))
        until = self._looked + self._ahead * self._step() + self._shared
        found = [job_id for job_id in unreported if self._ends.get(job_id, until + 1) <= until]
        for job_id in found:
            del self._ends[job_id]
        return found
