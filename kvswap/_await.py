"""`await transfer` in asyncio. One thread a process waits for all awaited transfers of all loops and wakes their loops.

A cancelled await leaves its transfer running, as a TimeoutError of wait() does. A loop that was closed meanwhile is
left alone. The child of a fork starts a thread of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Generator
from contextlib import suppress
from typing import Any

from kvswap import _C


class _Awaited:
    """One await: its transfer, and the future that it waits for on its loop."""

    __slots__ = ("future", "loop", "transfer")

    def __init__(self, transfer: _C.Transfer | _C.FileTransfer, loop: asyncio.AbstractEventLoop) -> None:
        self.transfer, self.loop = transfer, loop
        self.future: asyncio.Future[None] = loop.create_future()

    def end(self, error: str = "") -> None:
        """On the waker's thread: the transfer has ended, or the thread."""
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._wake, error)

    def _wake(self, error: str) -> None:
        if self.future.done():  # cancelled
            return
        if error:
            self.future.set_exception(RuntimeError(error))
        else:
            self.future.set_result(None)


class _Waker:
    """The thread. It starts with the first await and then sleeps while nothing is awaited."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a garbage collection under it may call discard()
        self._awaited: set[_Awaited] = set()  # guarded by _lock
        self._ended = False  # guarded by _lock
        self._thread = threading.Thread(target=self._run, name="kvswap-await", daemon=True)
        self._thread.start()

    def add(self, awaited: _Awaited) -> None:
        with self._lock:
            if self._ended:
                raise RuntimeError("the thread that waits for transfers has ended: nothing can be awaited")
            self._awaited.add(awaited)
        _C._await_tell()

    def discard(self, awaited: _Awaited) -> None:
        with self._lock:
            known = awaited in self._awaited
            self._awaited.discard(awaited)
        if known:  # cancelled: the thread drops the transfer
            _C._await_tell()

    def stop(self) -> None:
        """At exit, before the interpreter is taken down."""
        with self._lock:
            self._ended = True
        _C._await_tell()
        self._thread.join(5)

    def forget(self) -> None:
        """In the child of a fork: the thread is not here, and its lock may be held for ever. What is awaited here still
        keeps this object."""
        self._lock, self._awaited, self._ended = threading.RLock(), set(), True

    def _run(self) -> None:
        try:
            while self._once():
                pass
        except BaseException:  # no await is left behind
            with self._lock:
                self._ended = True
                left = list(self._awaited)
                self._awaited.clear()
            for each in left:
                each.end("the thread that waits for transfers has failed")
            raise

    def _once(self) -> bool:
        """In a frame of its own, which holds nothing while the thread sleeps for longer."""
        with self._lock:
            if self._ended:
                return False
            seen, awaited = _C._await_news(), list(self._awaited)
        ended = [awaited[i] for i in _C._wait_first([each.transfer for each in awaited], seen)]
        with self._lock:
            self._awaited.difference_update(ended)
        for each in ended:
            each.end()
        return True


_waker: _Waker | None = None
_lock = threading.Lock()


def _get_waker() -> _Waker:
    global _waker
    with _lock:
        if _waker is None:
            _waker = _Waker()
            atexit.register(_waker.stop)
        return _waker


def _forget() -> None:
    """In the child of a fork: the thread is the parent's."""
    global _waker, _lock
    if _waker is not None:
        atexit.unregister(_waker.stop)
        _waker.forget()
    _waker, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def awaiting(transfer: _C.Transfer | _C.FileTransfer) -> Generator[Any, None, None]:
    """What `await transfer` iterates over: ends, or raises, as wait() does."""
    try:
        return transfer.wait(0)
    except TimeoutError:
        pass
    awaited, waker = _Awaited(transfer, asyncio.get_running_loop()), _get_waker()
    waker.add(awaited)
    try:
        yield from awaited.future
    finally:
        waker.discard(awaited)
    return transfer.wait()
