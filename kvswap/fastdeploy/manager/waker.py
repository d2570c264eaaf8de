"""Wakes a rank's loop from poll(): a descriptor, and for each direction a thread that waits for transfers."""

from __future__ import annotations

import contextlib
import os
import queue
import threading

from kvswap import _C

__all__ = ["Waker", "Watcher"]

_SLICE = 1.0  # seconds of one wait


class Waker:
    """A descriptor that is readable after wake() until clear(). Any thread may call wake()."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def wake(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        os.close(self.fd)


class Watcher:
    """A thread that wakes the loop when the transfer last given to watch() has ended."""

    def __init__(self, waker: Waker, name: str) -> None:
        self._waker = waker
        self._given: queue.SimpleQueue[_C.Transfer | None] = queue.SimpleQueue()
        self._watched: _C.Transfer | None = None  # used by the loop alone: the transfer given last
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def watch(self, transfer: _C.Transfer) -> None:
        """Watch a transfer. Does nothing if it is watched already."""
        if transfer is not self._watched:
            self._watched = transfer
            self._given.put(transfer)

    def _run(self) -> None:
        while (transfer := self._given.get()) is not None:
            while not transfer.done():
                try:
                    transfer.wait(_SLICE)
                except TimeoutError:
                    continue
                except _C.Error:
                    break  # the loop also polls, and finds the error
            self._waker.wake()

    def close(self, timeout: float) -> bool:
        """Stop the thread. True: it has ended and calls wake() no more."""
        self._watched = None
        self._given.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()
