"""The thread that moves bytes by an agent: it alone calls the agent once transfers have begun.

A caller waits for its move with a limit. A move that the caller has left may still write to its local memory, so the
memory is given back (`over`) when both are done: the caller has left, and the agent has ended the move.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from kvswap import _C

from ._agent import Agent, Operation

_log = logging.getLogger("kvswap.remote")

_MOST_WAITING = 1024
_FORCE_SECONDS = 5.0  # after a node has gone: until its agent is disconnected although moves have not ended
_AGAIN_SECONDS = 0.5  # after a failed move: until NIXL connects to the node again
_SLEEPS = (0.0, 0.00002, 0.00005, 0.0001, 0.0002)


class Move:
    """Pieces of nbytes each between local and remote addresses. over(): nothing writes to the local memory any more."""

    def __init__(
        self, operation: Operation, key: object, local: NDArray[Any], remote: NDArray[Any], nbytes: int,
        over: Callable[[], None],
    ) -> None:  # fmt: skip
        self.operation, self.key = operation, key
        self.local, self.remote, self.nbytes = local, remote, nbytes
        self.error: Exception | None = None
        self.idle = False  # the agent has ended it; guarded by _lock, as the next
        self._left = False
        self._over = over
        self._lock = threading.Lock()
        self._told = threading.Event()

    def wait(self, end: float) -> None:
        """Until it has ended, or the time has come, or the node is down: an exception unless all bytes have moved."""
        if not self._told.wait(max(0.0, end - time.monotonic())):
            raise _C.Error("the bytes did not arrive in time")
        if self.error is not None:
            raise self.error

    def leave(self) -> bool:
        """The caller needs the memory no more. True: the move is over; else over() is called later."""
        with self._lock:
            self._left = True
            idle = self.idle
        if idle:
            self._over()
        return idle

    def tell(self, error: Exception | None) -> None:
        """The outcome; the first one counts."""
        with self._lock:
            if not self._told.is_set():
                self.error = error
                self._told.set()

    def end(self) -> None:
        with self._lock:
            self.idle = True
            left = self._left
        if left:
            self._over()


class Mover:
    """agent: it registers nothing more. Keys name nodes; each run of a node has an agent of its own."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._queue: queue.Queue[tuple[str, Any, Any]] = queue.Queue(_MOST_WAITING)
        self._lock = threading.Lock()
        self._begun: set[Move] = set()  # and not told yet; guarded by _lock
        self._names: dict[object, str] = {}  # the thread's, as all below
        self._metadata: dict[object, bytes] = {}  # of the nodes in _names, and of those that NIXL could not reach
        self._broken: dict[object, float] = {}  # nodes with a failed move, and when to connect to them again
        self._leaving: list[tuple[float, object, str]] = []
        self._active: list[tuple[Move, Any]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvswap-remote-mover", daemon=True)
        self._thread.start()

    # -- from any thread ----------------------------------------------------------------------------------------------

    def connect(self, key: object, metadata: bytes) -> None:
        self._put("connect", key, metadata)

    def disconnect(self, key: object, error: Exception) -> None:
        """Its moves fail at once, also while the agent does not return."""
        with self._lock:
            begun = [move for move in self._begun if move.key == key]
        for move in begun:
            move.tell(error)
        self._put("disconnect", key, error)

    def begin(self, move: Move) -> None:
        with self._lock:
            self._begun.add(move)
        try:
            self._queue.put_nowait(("move", move.key, move))
        except queue.Full:
            move.end()  # nothing has begun
            move.tell(_C.QueueFull(f"{_MOST_WAITING} transfers wait for NIXL"))

    def finish(self, move: Move) -> bool:
        """The caller waits no more: as Move.leave()."""
        with self._lock:
            self._begun.discard(move)
        return move.leave()

    def _put(self, what: str, key: object, value: Any) -> None:
        self._queue.put((what, key, value), timeout=60)

    def stop(self) -> None:
        """Never waits."""
        self._closed = True

    def close(self, timeout: float = 5.0) -> bool:
        """Whether nothing is under way any more."""
        self.stop()
        self._thread.join(timeout)
        return not self._thread.is_alive() and not self._active

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        idle = 0
        while not self._closed:
            moved = self._take(block=not self._active and not self._leaving)
            moved |= self._look()
            self._forget()
            self._mend()
            idle = 0 if moved else min(idle + 1, 40)
            if self._active or self._leaving:
                time.sleep(_SLEEPS[min(idle // 10, len(_SLEEPS) - 1)] if self._active else 0.01)
        for move, _ in self._active:
            move.tell(_C.Error("the store was closed"))

    def _take(self, *, block: bool) -> bool:
        try:
            what, key, value = self._queue.get(timeout=0.1) if block else self._queue.get_nowait()
        except queue.Empty:
            return False
        if what == "move":
            self._begin(value)
            return True
        if key in self._names:
            self._leaving.append((time.monotonic() + _FORCE_SECONDS, key, self._names.pop(key)))
        self._metadata.pop(key, None)
        self._forget()
        if what == "connect":
            self._add(key, value)
        return True

    def _add(self, key: object, metadata: bytes) -> None:
        """A node may have the agent of its earlier run, which is then kept."""
        self._metadata[key] = metadata
        self._broken.pop(key, None)
        try:
            name = self._names[key] = self._agent.add(metadata)
            self._leaving = [each for each in self._leaving if each[2] != name]
        except Exception as error:
            self._broken[key] = time.monotonic() + _AGAIN_SECONDS
            _log.warning("NIXL cannot reach a node: %s: %s", type(error).__name__, error)

    def _begin(self, move: Move) -> None:
        name = self._names.get(move.key)
        handle = None
        if name is not None:
            try:
                handle = self._agent.begin(move.operation, name, move.local, move.remote, move.nbytes)
            except Exception as error:
                self._fail(move, error)
        if handle is not None:
            self._active.append((move, handle))
            return
        move.tell(_C.Error("NIXL has no connection to that node"))
        move.end()

    def _look(self) -> bool:
        """Whether any has ended."""
        still = []
        for move, handle in self._active:
            try:
                ended = not self._agent.running(handle)
                if ended:
                    move.tell(None)
            except Exception as error:
                self._fail(move, error)
                ended = True
            if ended and self._agent.end(handle):
                move.end()
            else:
                still.append((move, handle))
        ended_now = len(still) < len(self._active)
        self._active = still
        return ended_now

    def _fail(self, move: Move, error: Exception) -> None:
        """NIXL's connection to the node may be of no use any more, although the node is up."""
        move.tell(_C.Error(f"NIXL: {type(error).__name__}: {error}"))
        self._broken.setdefault(move.key, time.monotonic() + _AGAIN_SECONDS)

    def _mend(self) -> None:
        """Connect again to nodes with a failed move, once nothing is under way with them."""
        for key, at in list(self._broken.items()):
            metadata = self._metadata.get(key)
            if metadata is None:  # it has gone
                del self._broken[key]
            elif time.monotonic() >= at and not any(move.key == key for move, _ in self._active):
                if key in self._names:
                    self._remove(self._names.pop(key))
                self._add(key, metadata)

    def _forget(self) -> None:
        """Disconnect from agents that have gone, once nothing is under way with them."""
        for each in list(self._leaving):
            until, key, name = each
            if any(move.key == key for move, _ in self._active) and time.monotonic() < until:
                continue
            self._leaving.remove(each)
            self._remove(name)

    def _remove(self, name: str) -> None:
        try:
            self._agent.remove(name)
        except Exception as error:
            _log.info("NIXL: %s: %s: %s", name, type(error).__name__, error)
