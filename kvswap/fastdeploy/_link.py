"""A client's connection to rank 0 of the manager. One thread owns the socket; calls and answers are futures."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import itertools
import logging
import os
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import zmq

from kvswap import _C
from kvswap.fastdeploy.manager import messages, places
from kvswap.fastdeploy.manager.messages import Answer, Ask, Bye, Kind, Result, Submit, Task, result_of

__all__ = ["Asked", "Future", "Link", "ManagerError", "NotReady", "error_of"]

_log = logging.getLogger("kvswap.manager")

_POLL_MS = 50
_CLOSE = 5.0  # seconds: limit for joining the thread
_MOST_UNCOLLECTED = 65536
_LAST_WORDS = 0.3  # seconds: how long messages are still received after the connection has ended
Future: TypeAlias = "concurrent.futures.Future[Any]"
_links: weakref.WeakSet[Link] = weakref.WeakSet()  # closed at exit


class ManagerError(_C.Error):
    """The manager refused a request, or has died. code: "refused", "not_ready", "malformed", "busy", "timeout",
    "failed", "died", "closed"."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class NotReady(ManagerError):
    """The manager takes no tasks now: a rank is missing, the caches are cleared, or the manager drains or stops."""


def error_of(answer: Answer) -> Exception:
    if answer.code == "full":
        return _C.QueueFull(answer.message)
    return (NotReady if answer.code == "not_ready" else ManagerError)(answer.code, answer.message)


@dataclass(eq=False)
class Asked:
    """A request. answer: its Answer, also if none can arrive. task: of a Submit. result: the task's Result."""

    number: int
    data: bytes | None  # None once sent
    task: Task | None
    answer: Future = field(default_factory=concurrent.futures.Future)
    result: Future = field(default_factory=concurrent.futures.Future)
    left: bool = False  # the caller has stopped waiting


class Link:
    """The connection. Its thread owns the socket. Futures are set under the lock, so that a caller's timeout and the
    outcome of its task cannot contradict each other."""

    def __init__(self, directory: Path) -> None:
        places.check_directory(directory)
        self._path = places.socket_path(directory)
        self._lock = threading.Lock()
        self._requests: dict[int, Asked] = {}  # unanswered; guarded by _lock, as all fields below
        self._outgoing: deque[Asked] = deque()
        self._tasks: dict[str, Asked] = {}  # unended or uncollected
        self._ended: deque[Asked] = deque()  # uncollected, in the order in which they ended
        self._waiters: set[Future] = set()  # set when the next task ends
        self._known_losses: dict[int, int] = {}  # GPU block -> number of the loss that a collected result has reported
        self._untold: set[Asked] = set()  # tasks that wrote GPU blocks when rank 0 died; their caller was not told yet
        self._closed = False
        self._owner = os.getpid()
        self._numbers = itertools.count(1)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._pid = 0  # of rank 0, as the kernel reports it; used by the thread alone, as all fields below
        self._warned = 0.0
        self._dying: float | None = None  # after the connection ended: until when messages are still received
        self._thread = threading.Thread(target=self._run, name="kvswap-client", daemon=True)
        self._thread.start()
        _links.add(self)

    # -- from any thread ----------------------------------------------------------------------------------------------

    def _own(self) -> threading.Lock:
        """The lock. Raises in the child of a fork(): the parent's thread may have held the lock, and the child has no
        such thread."""
        if os.getpid() != self._owner:
            raise _C.Error("this client was made before fork(): make one in this process")
        return self._lock

    def ask(self, what: Any, limit: float = 0.0, handles: Any = None) -> Asked:
        """Send a request: messages.Ask."""
        with self._own():
            return self._ask_locked(Ask(next(self._numbers), what, limit, handles), None)

    def _ask_locked(self, message: Any, task: Task | None) -> Asked:
        if self._closed:
            raise _C.Error("the client is closed")
        try:
            data = messages.encode(message)
        except (OverflowError, TypeError) as error:
            raise type(error)(f"this cannot be sent: {error}") from None
        if len(data) > messages.MAX_MESSAGE_NBYTES:
            raise ValueError(f"the message has {len(data)} bytes; {messages.MAX_MESSAGE_NBYTES} are the most")
        asked = self._requests[message.request] = Asked(message.request, data, task)
        self._outgoing.append(asked)
        os.eventfd_write(self._wake, 1)
        return asked

    def submit(self, task: Task) -> Asked:
        with self._own():
            if len(self._tasks) >= _MOST_UNCOLLECTED:
                raise _C.QueueFull(f"{len(self._tasks)} results were not collected: call result() or next_result()")
            name = task.transfer_task_id
            if name in self._tasks:
                raise ValueError(f"transfer_task_id {name!r} is of a task whose result is not collected")
            if why := self._untold_locked(task):
                raise ManagerError("refused", why)
            reads = task.gpu_block_ids if task.event_type == Kind.SWAP2CPU else []
            known = {self._known_losses[block] for block in reads if block in self._known_losses}
            asked = self._ask_locked(Submit(next(self._numbers), task, sorted(known)), task)
            self._tasks[name] = asked
            return asked

    def _untold_locked(self, task: Task) -> str:
        """Why a task reads a block that is lost without the caller's knowledge; empty if it reads none."""
        for asked in self._untold if task.event_type == Kind.SWAP2CPU else ():
            assert asked.task is not None
            for i, block in enumerate(task.gpu_block_ids):
                if block in asked.task.gpu_block_ids:
                    why = f"task {asked.task.transfer_task_id!r}, which should have written that GPU block, failed"
                    return f"gpu_block_ids[{i}] is {block}: {why}: ask for its result first"
        return ""

    def give_up(self, asked: Asked) -> bool:
        """The caller stops waiting. True: the request was not sent and will not be. False: check the answer once more.
        If there is none then, it stays so; if rank 0 takes the task all the same, the task ends with a Result."""
        with self._own():
            if asked.answer.done():
                return False
            asked.left = True
            unsent = asked.data is not None
            if unsent:
                self._outgoing.remove(asked)
                self._discard_locked(asked)
            if unsent or asked.task is None:
                self._requests.pop(asked.number, None)
            return unsent

    def holds(self, task_id: str) -> bool:
        """Whether the task was taken, or may have been, and its Result is uncollected."""
        with self._own():
            return task_id in self._tasks

    def result_of(self, task_id: str) -> Future:
        with self._own():
            if task_id not in self._tasks:
                raise ValueError(f"no task {task_id!r} is under way here, or its result was collected")
            return self._tasks[task_id].result

    def collect(self, result: Result) -> Result:
        """The caller receives this result, and so is told which blocks are lost."""
        with self._own():
            return self._collect_locked(result)

    def _collect_locked(self, result: Result) -> Result:
        for block, number in result.lost.items():  # numbers rise
            self._known_losses[block] = max(number, self._known_losses.get(block, 0))
        asked = self._tasks.get(result.transfer_task_id)
        if asked is not None and asked.result.done() and asked.result.result() is result:
            self._discard_locked(asked)
        return result

    def collect_next(self) -> Result | Future:
        """The Result of the task that ended first; else a future, for leave(), that is done when a task ends."""
        with self._own():
            if self._ended:
                return self._collect_locked(self._ended[0].result.result())
            waiter: Future = concurrent.futures.Future()
            self._waiters.add(waiter)
            return waiter

    def leave(self, waiter: Future) -> None:
        with self._own():
            self._waiters.discard(waiter)

    @property
    def under_way(self) -> int:
        with self._own():
            return sum(not asked.result.done() for asked in self._tasks.values())

    def stop(self) -> None:
        """Called by the garbage collector, on any thread and under any lock: sets a flag that the thread reads at its
        next poll."""
        if os.getpid() == self._owner:
            self._closed = True

    def close(self) -> None:
        if os.getpid() != self._owner:
            return  # the thread is the parent's
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wake, 1)
            self._closed = True
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE)

    # -- tasks --------------------------------------------------------------------------------------------------------

    def _discard_locked(self, asked: Asked) -> None:
        """Forget a task that was refused, or whose result was collected."""
        self._untold.discard(asked)
        if asked.task is not None and self._tasks.get(asked.task.transfer_task_id) is asked:
            del self._tasks[asked.task.transfer_task_id]
            with contextlib.suppress(ValueError):
                self._ended.remove(asked)

    def _end_locked(self, asked: Asked, result: Result) -> None:
        asked.result.set_result(result)
        self._ended.append(asked)
        for waiter in self._waiters:
            waiter.set_result(None)
        self._waiters.clear()

    def _answer_locked(self, answer: Answer) -> None:
        asked = self._requests.pop(answer.request, None)
        if asked is None:
            return
        if answer.code != "ok":
            self._discard_locked(asked)
        if not asked.left:
            asked.answer.set_result(answer)

    def _fail_all(self, code: str, why: str, *, unsent: bool = False) -> None:
        """Answer every request with an error, and end every taken task as failed. A task with an unknown answer gets
        one of the two. unsent: also fail requests that were not sent yet."""
        with self._lock:
            if unsent:
                self._outgoing.clear()
            for asked in list(self._requests.values()):
                if asked.left:
                    del self._requests[asked.number]  # its task ends below
                elif unsent or asked.data is None:
                    self._answer_locked(Answer(asked.number, code, why))
            for asked in list(self._tasks.values()):
                task = asked.task
                if task is not None and asked.data is None and not asked.result.done():
                    if task.event_type == Kind.SWAP2GPU:
                        self._untold.add(asked)
                    self._end_locked(asked, result_of(task, False, 0, why))
            self._known_losses.clear()  # the numbers came from the rank 0 that died
            for asked in list(self._outgoing):
                if asked.task is not None and (lost := self._untold_locked(asked.task)):
                    self._outgoing.remove(asked)
                    self._answer_locked(Answer(asked.number, "refused", lost))

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        for option, value in ((zmq.IMMEDIATE, 1), (zmq.RECONNECT_IVL, 20), (zmq.LINGER, 500)):
            socket.setsockopt(option, value)  # IMMEDIATE: do not queue messages while there is no connection
        socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_NBYTES)
        ends = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        poller = zmq.Poller()
        for each in (socket, ends, self._wake):
            poller.register(each, zmq.POLLIN)
        socket.connect(f"ipc://{self._path}")
        try:
            while not self._closed:
                self._loop_once(socket, ends, poller)
            self._say_bye(socket)
        finally:
            with self._lock:
                self._closed = True
            self._fail_all("closed", "the client was closed", unsent=True)
            socket.disable_monitor()
            ends.close()
            socket.close()
            context.term()
            os.close(self._wake)

    def _say_bye(self, socket: zmq.Socket[bytes]) -> None:
        with contextlib.suppress(zmq.Again):
            socket.send(messages.encode(Bye()), zmq.NOBLOCK)

    def _loop_once(self, socket: zmq.Socket[bytes], ends: zmq.Socket[bytes], poller: zmq.Poller) -> None:
        while ends.poll(0):  # before sending: a message sent now may reach a new rank 0
            ends.recv_multipart(zmq.NOBLOCK)
            self._dying = time.monotonic() + _LAST_WORDS
        unsent = self._dying is None and self._send(socket)
        ready = dict(poller.poll(5 if unsent else _POLL_MS))
        if self._wake in ready:
            os.eventfd_read(self._wake)
        self._take(socket)
        if self._dying is not None and time.monotonic() > self._dying:  # all that rank 0 had sent was read
            who = f"rank 0 (process {self._pid})" if self._pid else "rank 0"
            self._pid, self._dying = 0, None
            self._fail_all("died", f"{who}, which hands out the tasks, died or ended the connection")

    def _send(self, socket: zmq.Socket[bytes]) -> bool:
        """Send queued requests. True: some are left that cannot be sent now."""
        while True:
            with self._lock:
                if not self._outgoing:
                    return False
                asked = self._outgoing[0]
                assert asked.data is not None
                try:
                    socket.send(asked.data, zmq.NOBLOCK)
                except zmq.Again:
                    return True
                asked.data = None
                self._outgoing.popleft()

    def _take(self, socket: zmq.Socket[bytes]) -> None:
        """Receive messages, a bounded number at once: requests must be sent even if messages arrive faster than they
        are read."""
        for (frame, *_), peer in places.received(socket):
            if not peer.ours:
                self._warn("ignored a message of %s", peer)
                continue
            if self._dying is not None:
                self._dying = time.monotonic() + _LAST_WORDS
            self._pid = peer.pid
            try:
                message = messages.to_client.decode(frame.buffer)
            except (msgspec.MsgspecError, ValueError) as error:
                self._warn("malformed message of the manager: %s", error)
                continue
            with self._lock:
                if isinstance(message, Answer):
                    self._answer_locked(message)
                elif isinstance(message, Result):
                    asked = self._tasks.get(message.transfer_task_id)
                    if asked is not None and not asked.result.done():
                        self._end_locked(asked, message)
                else:
                    self._say_bye(socket)

    def _warn(self, text: str, what: object) -> None:
        """Log at most once a second."""
        if time.monotonic() - self._warned > 1.0:
            self._warned = time.monotonic()
            _log.warning(text, what)


@atexit.register
def _close_all() -> None:
    for link in list(_links):
        link.close()
