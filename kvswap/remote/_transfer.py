"""The handle of one store() or load() of the remote tier."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvswap import _C
from kvswap._timeouts import seconds


class RemoteTransfer:
    """Blocks on their way to or from nodes, with what a FileTransfer has. It goes on if it is dropped, and holds its
    tensors until its end. It ends in exactly one state, at the latest at its limit, which the caller's own calls see
    to: blocks without an outcome fail then. Any thread may use it."""

    def __init__(self, what: Literal["store", "load"], count: int, block_nbytes: int, hold: Any, limit: float) -> None:
        self.what = what
        self.num_blocks, self.nbytes = count, count * block_nbytes
        self.cancelled = False
        self._begin, self._limit = time.monotonic(), limit
        self._elapsed: float | None = None
        self._left = set(range(count))  # positions without an outcome; guarded by _lock, as the next four
        self._touched = set[int]()  # those whose memory a thread of the store reads or writes
        self._arrived = 0  # blocks of a load that were checked
        self._over = False  # the limit has come, or all were cancelled
        self._reasons: dict[int, Exception] = {}
        self._hold = hold
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._pid = os.getpid()
        if count == 0:
            self._elapsed = 0.0
            self._ended.set()

    def done(self) -> bool:
        """Whether the transfer has ended, well or not: check error. Never blocks."""
        if self._pid != os.getpid():
            return True
        if not self._ended.is_set() and time.monotonic() >= self._begin + self._limit:
            self._stop(_C.Error(f"there was no answer within {self._limit:g} seconds"))
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end; raise the error of the first failed block, if any.

        timeout: seconds, None for no limit but the store's. TimeoutError and Ctrl-C leave the transfer running."""
        timeout = seconds(timeout)
        if self._pid == os.getpid() and not self.done():
            left = self._begin + self._limit - time.monotonic()
            self._ended.wait(max(0.0, left if timeout is None else min(left, timeout)))
            if not self.done() and (timeout is None or left <= timeout):
                self._ended.wait(timeout)  # a copy in memory is under way
            if not self.done():
                raise TimeoutError(f"the {self.what} has not ended after {timeout:g} seconds; it goes on")
        if self.error is not None:
            raise self.error

    def cancel(self) -> bool:
        """Fail the blocks that have no outcome; returns whether the transfer had not ended. Nothing reaches the memory
        of a cancelled load afterwards, once done() is True."""
        if self.done():
            return False
        self.cancelled = True
        self._stop(_C.Error("cancelled"))
        return True

    @property
    def state(self) -> Literal["running", "done", "failed", "cancelled"]:
        """'running', 'done', 'failed' or 'cancelled'."""
        if not self.done():
            return "running"
        if not self.reasons:
            return "done"
        return "cancelled" if self.cancelled else "failed"

    @property
    def elapsed(self) -> float | None:
        """Seconds from the call to its end; None while it runs."""
        return self._elapsed

    @property
    def error(self) -> Exception | None:
        """Of its first failed block; None while it runs and if none failed."""
        reasons = self.reasons
        return reasons[min(reasons)] if reasons else None

    @property
    def failed_positions(self) -> NDArray[np.int64]:
        """Positions, in the lists that were passed, of the blocks that failed, ascending; empty while it runs."""
        return np.array(sorted(self.reasons), np.int64)

    @property
    def reasons(self) -> dict[int, Exception]:
        """An Exception for each of failed_positions, by position; empty while it runs."""
        if self._pid != os.getpid():
            forked = _C.Error("the transfer was begun before fork(), by another process")
            return dict.fromkeys(range(self.num_blocks), forked)
        return dict(self._reasons) if self.done() else {}

    # -- for the store ------------------------------------------------------------------------------------------------

    def _touch(self, positions: list[int]) -> bool:
        """Before the caller's memory of these blocks is read or written. False: they have ended already."""
        with self._lock:
            if self._over:
                return False
            self._touched.update(positions)
        return True

    def _settle(self, right: Iterable[int], wrong: Iterable[tuple[int, Exception]] = ()) -> None:
        """The outcome of some blocks; the first one of each counts."""
        with self._lock:
            before = bool(self._left)
            for position, error in wrong:
                if position in self._left:
                    self._reasons[position] = error
                    self._left.discard(position)
                self._touched.discard(position)
            self._left.difference_update(right)
            self._touched.difference_update(right)
            over = before and not self._left
        if over:
            self._end()

    def _untouch(self, positions: list[int]) -> bool:
        """The caller's memory has been read, or written, and the blocks have no outcome yet. Whether there are no
        others without one."""
        with self._lock:
            self._touched.difference_update(positions)
            self._arrived += len(positions)
            whole, late = self._arrived >= len(self._left), self._over
        if late:
            self._stop(_C.Error(f"there was no answer within {self._limit:g} seconds"))
        return whole

    def _stop(self, error: Exception) -> None:
        """Fail what has no outcome. Blocks whose memory is used now get theirs from the thread that does."""
        with self._lock:
            self._over = True
            gone = self._left - self._touched
        self._settle((), [(position, error) for position in gone])

    def _end(self) -> None:
        self._elapsed = time.monotonic() - self._begin
        self._hold = None
        self._ended.set()

    def __repr__(self) -> str:
        return f"<RemoteTransfer {self.what} of {self.num_blocks} blocks, {self.state}>"
