"""The handle of one store(), load() or delete() of the remote tier."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray


class RemoteTransfer:
    """A transfer of blocks to or from other nodes, with what a FileTransfer has. It goes on if it is dropped, and holds
    its tensors until its end. It ends in exactly one state. Any thread may use it."""

    def __init__(
        self, what: Literal["store", "load", "delete"], count: int, block_nbytes: int, hold: Any, ended: Any
    ) -> None:
        self.what = what
        self.num_blocks, self.nbytes = count, 0 if what == "delete" else count * block_nbytes
        self.num_kept = 0
        self.cancelled = False
        self._begin = time.monotonic()
        self._elapsed: float | None = None
        self._left = set(range(count))  # positions without an outcome; guarded by _lock, as the next
        self._reasons: dict[int, Exception] = {}
        self._hold, self._on_end = hold, ended
        self._after: tuple[Any, ...] = ()  # kvswap Events and Transfers that the device's copies start after
        self._lock = threading.Lock()
        self._ended = threading.Event()
        if count == 0:
            self._elapsed = 0.0
            self._ended.set()

    def done(self) -> bool:
        """Whether the transfer has ended, well or not: check error. Never blocks."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end; raise the error of the first failed block, if any.

        timeout: seconds, None for no limit. TimeoutError and Ctrl-C leave the transfer running."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the {self.what} has not ended after {timeout:g} seconds; it goes on")
        if self.error is not None:
            raise self.error

    def result(self, timeout: float | None = None) -> None:
        """The same as wait()."""
        self.wait(timeout)

    def cancel(self) -> bool:
        """Skip the blocks that have not begun; returns whether the transfer had not ended."""
        self.cancelled = True
        return not self.done()

    @property
    def state(self) -> Literal["running", "done", "failed", "cancelled"]:
        """'running', 'done', 'failed' or 'cancelled'."""
        if not self.done():
            return "running"
        if not self._reasons:
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
    def failed_blocks(self) -> NDArray[np.int64]:
        """Positions, in the lists that were passed, of the blocks that failed, ascending; empty while it runs."""
        return np.array(sorted(self.reasons), np.int64)

    @property
    def reasons(self) -> dict[int, Exception]:
        """An Exception for each of failed_blocks, by position; empty while it runs."""
        return dict(self._reasons) if self.done() else {}

    # -- for the store ------------------------------------------------------------------------------------------------

    def _settle(self, right: list[int], wrong: Iterable[tuple[int, Exception]] = (), kept: int = 0) -> None:
        """The outcome of some blocks; the first one of each counts."""
        with self._lock:
            before = len(self._left)
            self._reasons.update((position, error) for position, error in wrong if position in self._left)
            self._left.difference_update(right, self._reasons)
            self.num_kept += kept
            over = before > 0 and not self._left
        if over:
            self._end()

    def _end(self) -> None:
        self._elapsed = time.monotonic() - self._begin
        self._hold = None
        self._ended.set()
        self._on_end(self)

    def __repr__(self) -> str:
        return f"<RemoteTransfer {self.what} of {self.num_blocks} blocks, {self.state}>"
