"""Threads that call Mooncake, whose calls can take a minute whatever the limit says.

Each thread has a part of the staging memory of its own, so that a call that has not returned keeps its part from all
others, and a thread that is free has its part free. A task belongs to a lane: a node that loads come from, the stores,
or the master. A lane has at most a quarter of the threads. So a node that is silent holds at most half of them, by its
loads and by stores, and the other half serves the other nodes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from ._client import Closed

_log = logging.getLogger("kvswap.remote")
MASTER, STORES = "master", "stores"
_TURN_SECONDS = 0.1


class Turn:
    """One call at a time, as long as none is slow. Over TCP, Mooncake moves all bytes of a client by one thread, and
    each call spins until they have come. needed: False over other transports."""

    def __init__(self, needed: bool) -> None:
        self._lock = threading.Lock() if needed else None

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        lock = self._lock
        if lock is not None and not lock.acquire(timeout=_TURN_SECONDS):
            lock = self._lock = threading.Lock()
            lock.acquire()
        try:
            yield
        finally:
            if lock is not None:
                lock.release()


@dataclass
class _Lane:
    tasks: deque[Callable[[int], None]] = field(default_factory=deque)
    running: dict[int, float] = field(default_factory=dict)  # since when, by thread


class Calls:
    """Any thread may use it. late: seconds after which a call counts as late."""

    def __init__(self, threads: int, late: float) -> None:
        self.threads, self._late, self._most = threads, late, max(1, threads // 4)
        self._changed = threading.Condition()
        self._lanes: dict[str, _Lane] = {}  # those with tasks, or running ones; guarded by _changed, as all below
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

    def ask(self, lane: str, question: Callable[[int], Any], limit: float) -> Any:
        """What a question returns on a thread; None: nothing within the limit."""
        answers: SimpleQueue[Any] = SimpleQueue()
        if not self.submit(lane, lambda thread: answers.put(question(thread))):
            return None
        try:
            return answers.get(timeout=max(0.0, limit))
        except Empty:
            return None

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
        for name, lane in self._lanes.items():
            if lane.tasks and len(lane.running) < self._most:
                self._lanes[name] = self._lanes.pop(name)  # the other lanes come first next time
                return name, lane.tasks.popleft()
        return None

    def _work(self, thread: int) -> None:
        while True:
            with self._changed:
                while (found := self._next_locked()) is None and not self._closed:
                    self._changed.wait()
                if found is None:
                    return
                name, task = found
                self._lanes[name].running[thread] = time.monotonic()
            try:
                task(thread)
            except Closed:
                pass
            except Exception:
                _log.exception("kvswap.remote: a defect")
            del task, found
            with self._changed:
                lane = self._lanes[name]
                del lane.running[thread]
                if lane.tasks:
                    self._changed.notify()
                elif not lane.running:
                    del self._lanes[name]

    def close(self) -> None:
        """Threads end when they are free; tasks that have not begun are dropped."""
        if self._pid != os.getpid():
            return
        with self._changed:
            self._closed = True
            for lane in self._lanes.values():
                lane.tasks.clear()
            self._changed.notify_all()
