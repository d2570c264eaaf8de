"""Threads that call Mooncake, whose calls can take a minute whatever the limit says.

Each thread has a part of the staging memory of its own, so that a call that has not returned keeps its part from all
others, and a thread that is free has its part free. A task belongs to a lane: a node that loads come from, the stores,
or the master. A lane has at most a quarter of the threads. So a node that is silent holds at most half of them, by its
loads and by stores, and the other half serves the other nodes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

_log = logging.getLogger("kvswap.remote")
MASTER, STORES = "master", "stores"


@dataclass
class _Lane:
    tasks: deque[Callable[[int], None]] = field(default_factory=deque)
    running: dict[int, float] = field(default_factory=dict)  # since when, by thread


class Calls:
    """Any thread may use it. late: seconds after which a call counts as late."""

    def __init__(self, threads: int, late: float) -> None:
        self.threads, self._late, self._most = threads, late, max(1, threads // 4)
        self._changed = threading.Condition()
        self._lanes: dict[str, _Lane] = {}  # guarded by _changed, as the next three; those with tasks, or running ones
        self._later: list[tuple[float, str, Callable[[int], None]]] = []  # in the order of their time
        self._closed = False
        self._said: set[str] = set()  # lanes whose refusal was logged
        self._pid = os.getpid()
        for i in range(threads):
            threading.Thread(target=self._work, args=(i,), name=f"kvswap-remote-{i}", daemon=True).start()

    def submit(self, lane: str, task: Callable[[int], None]) -> bool:
        """task(thread): on a thread, whose part of the staging memory it may use. False: the lane cannot take it now,
        as all that it may have is held by late calls, or the end has come."""
        with self._changed:
            if self._closed:
                return False
            if self._is_held_locked(lane):
                if lane not in self._said:
                    self._said.add(lane)
                    _log.warning("%s does not answer: its blocks are misses until a call returns", lane)
                return False
            self._said.discard(lane)
            self._lanes.setdefault(lane, _Lane()).tasks.append(task)
            self._changed.notify()
        return True

    def submit_later(self, seconds: float, lane: str, task: Callable[[int], None]) -> None:
        with self._changed:
            self._later.append((time.monotonic() + seconds, lane, task))
            self._later.sort(key=lambda each: each[0])
            self._changed.notify()

    def late(self) -> list[str]:
        """The lanes that late calls hold."""
        with self._changed:
            return [name for name in self._lanes if self._is_held_locked(name)]

    def _is_held_locked(self, name: str) -> bool:
        before = time.monotonic() - self._late
        lane = self._lanes.get(name)
        if lane is not None and sum(since < before for since in lane.running.values()) >= self._most:
            return True
        everywhere = [since for each in self._lanes.values() for since in each.running.values()]
        return sum(since < before for since in everywhere) >= self.threads

    def _next_locked(self) -> tuple[str, Callable[[int], None]] | None:
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            _, name, task = self._later.pop(0)
            self._lanes.setdefault(name, _Lane()).tasks.append(task)
        for name, lane in self._lanes.items():
            if lane.tasks and len(lane.running) < self._most:
                self._lanes[name] = self._lanes.pop(name)  # the other lanes come first next time
                return name, lane.tasks.popleft()
        return None

    def _work(self, thread: int) -> None:
        while True:
            with self._changed:
                while (found := self._next_locked()) is None and not self._closed:
                    self._changed.wait(self._later[0][0] - time.monotonic() if self._later else None)
                if found is None:
                    return
                name, task = found
                self._lanes[name].running[thread] = time.monotonic()
            try:
                task(thread)
            except Exception:
                _log.exception("kvswap.remote: a defect")
            del task, found
            with self._changed:
                lane = self._lanes[name]
                del lane.running[thread]
                if not lane.running and not lane.tasks:
                    del self._lanes[name]
                self._changed.notify_all()

    def close(self) -> None:
        """Threads end when they are free; tasks that have not begun are dropped."""
        if self._pid != os.getpid():
            return
        with self._changed:
            self._closed = True
            self._later.clear()
            for lane in self._lanes.values():
                lane.tasks.clear()
            self._changed.notify_all()
