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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import zmq

from kvswap import _C
from kvswap.fastdeploy.manager import messages, places
from kvswap.fastdeploy.manager.messages import Answer, Bye, Kind, Result, Submit, Task, result_of

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
    if answer.code == "not_ready":
        return NotReady(answer.code, answer.message)
    return ManagerError(answer.code, answer.message)


def _new_future() -> Future:
    return concurrent.futures.Future()


@dataclass(eq=False)
class _Sent:
    """A task that was sent. future: its Result."""

    task: Task
    future: Future


@dataclass(eq=False)
class Asked:
    """A request. future: its Answer, or ManagerError if no answer can arrive."""

    number: int
    future: Future
    data: bytes | None  # None once sent
    sent: _Sent | None  # the task of a Submit
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
        self._tasks: dict[str, _Sent] = {}  # unended or uncollected
        self._ended: deque[_Sent] = deque()  # uncollected, in the order in which they ended
        self._getters: deque[Future] = deque()  # each receives one ended _Sent
        self._known_losses: dict[int, int] = {}  # GPU block -> number of the loss that a collected result has reported
        self._untold_losses: dict[int, str] = {}  # GPU block -> task; lost with rank 0, not yet reported to the caller
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

    def ask(self, kind: Any, *args: Any) -> Asked:
        """Send a request."""
        with self._own():
            return self._ask_locked(kind(next(self._numbers), *args), None)

    def _ask_locked(self, message: Any, sent: _Sent | None) -> Asked:
        if self._closed:
            raise _C.Error("the client is closed")
        try:
            data = messages.encode(message)
        except (OverflowError, TypeError) as error:
            raise type(error)(f"this cannot be sent: {error}") from None
        if len(data) > messages.MAX_MESSAGE_NBYTES:
            raise ValueError(f"the message has {len(data)} bytes; {messages.MAX_MESSAGE_NBYTES} are the most")
        asked = self._requests[message.request] = Asked(message.request, _new_future(), data, sent)
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
            known: set[int] = set()
            if task.event_type == Kind.SWAP2CPU:
                self._refuse_untold_locked(task)
                known = {loss for block in task.gpu_block_ids if (loss := self._known_losses.get(block)) is not None}
            sent = _Sent(task, _new_future())
            asked = self._ask_locked(Submit(next(self._numbers), task, sorted(known)), sent)
            self._tasks[name] = sent
            return asked

    def _refuse_untold_locked(self, task: Task) -> None:
        for i, block in enumerate(task.gpu_block_ids if self._untold_losses else ()):
            if block in self._untold_losses:
                why = f"task {self._untold_losses[block]!r}, which should have written that GPU block, failed"
                raise ManagerError("refused", f"gpu_block_ids[{i}] is {block}: {why}: ask for its result first")

    def give_up(self, asked: Asked) -> bool:
        """The caller stops waiting. True: the request was not sent and will not be. False: check the future once more.
        If the future is not done then, it stays so; if rank 0 takes the task all the same, the task ends with a
        Result."""
        with self._own():
            if asked.future.done():
                return False
            asked.left = True
            unsent = asked.data is not None
            if unsent:
                self._outgoing.remove(asked)
                self._discard_locked(asked.sent)
            if unsent or asked.sent is None:
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
            return self._tasks[task_id].future

    def collect(self, result: Result) -> None:
        """The caller has received this result, and so has been told which blocks are lost."""
        with self._own():
            for block, number in result.lost.items():  # numbers rise
                self._known_losses[block] = max(number, self._known_losses.get(block, 0))
            for block in result.gpu_block_ids if self._untold_losses else ():
                if self._untold_losses.get(block) == result.transfer_task_id:
                    del self._untold_losses[block]
            sent = self._tasks.get(result.transfer_task_id)
            if sent is not None and sent.future.done() and sent.future.result() is result:
                self._discard_locked(sent)

    def next_ended(self) -> Future:
        """A future of the next ended task with an uncollected Result."""
        future = _new_future()
        with self._own():
            if self._ended:
                sent = self._ended[0]
                self._discard_locked(sent)
                future.set_result(sent)
            else:
                self._getters.append(future)
        return future

    def leave_getters(self, future: Future) -> Result | None:
        """Stop waiting for this future. Returns a Result that has arrived meanwhile."""
        with self._own(), contextlib.suppress(ValueError):
            self._getters.remove(future)
        return future.result().future.result() if future.done() else None

    def give_back(self, future: Future) -> None:
        """Stop waiting for this future. A Result that has arrived meanwhile goes to the next caller."""
        if self.leave_getters(future) is None:
            return
        sent = future.result()
        with self._own():
            if self._getters:
                self._getters.popleft().set_result(sent)
                return
            self._tasks.setdefault(sent.task.transfer_task_id, sent)
            self._ended.appendleft(sent)

    @property
    def under_way(self) -> int:
        with self._own():
            return sum(not sent.future.done() for sent in self._tasks.values())

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

    def _discard_locked(self, sent: _Sent | None) -> None:
        """Forget a task that was refused, or whose result was collected."""
        if sent is None:
            return
        if self._tasks.get(sent.task.transfer_task_id) is sent:
            del self._tasks[sent.task.transfer_task_id]
        with contextlib.suppress(ValueError):
            self._ended.remove(sent)

    def _end_locked(self, sent: _Sent, result: Result) -> None:
        sent.future.set_result(result)
        self._ended.append(sent)
        if self._getters:
            self._discard_locked(sent)
            self._getters.popleft().set_result(sent)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # do not queue messages while there is no connection
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.LINGER, 500)
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
        if self._dying is not None and time.monotonic() > self._dying:
            self._bury()

    def _bury(self) -> None:
        """The connection has ended and all its messages were read: fail what is unanswered."""
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
            if isinstance(message, Answer):
                self._answered(message)
            elif isinstance(message, Result):
                self._end(message)
            else:
                self._say_bye(socket)

    def _warn(self, text: str, what: object) -> None:
        """Log at most once a second."""
        if time.monotonic() - self._warned > 1.0:
            self._warned = time.monotonic()
            _log.warning(text, what)

    def _answered(self, answer: Answer) -> None:
        with self._lock:
            asked = self._requests.pop(answer.request, None)
            if asked is None:
                return
            if answer.code != "ok":
                self._discard_locked(asked.sent)
            if not asked.left:
                asked.future.set_result(answer)

    def _end(self, result: Result) -> None:
        with self._lock:
            sent = self._tasks.get(result.transfer_task_id)
            if sent is not None and not sent.future.done():
                self._end_locked(sent, result)

    def _fail_all(self, code: str, why: str, *, unsent: bool = False) -> None:
        """Answer every request with an error, and end every taken task as failed. A task with an unknown answer gets
        one of the two. unsent: also fail requests that were not sent yet."""
        with self._lock:
            for asked in [asked for asked in self._requests.values() if unsent or asked.data is None]:
                del self._requests[asked.number]
                if not asked.left:
                    self._discard_locked(asked.sent)
                    asked.future.set_exception(ManagerError(code, why))
            if unsent:
                self._outgoing.clear()
            waiting = {asked.sent for asked in self._outgoing}
            for sent in list(self._tasks.values()):
                if sent not in waiting and not sent.future.done():
                    if sent.task.event_type == Kind.SWAP2GPU:
                        self._untold_losses.update(dict.fromkeys(sent.task.gpu_block_ids, sent.task.transfer_task_id))
                    self._end_locked(sent, result_of(sent.task, False, 0, why))
            self._known_losses.clear()  # the numbers came from the rank 0 that died
            self._refuse_unsent_locked()

    def _refuse_unsent_locked(self) -> None:
        """Refuse unsent tasks that read blocks lost just now."""
        for asked in list(self._outgoing):
            if asked.sent is None or asked.sent.task.event_type != Kind.SWAP2CPU:
                continue
            try:
                self._refuse_untold_locked(asked.sent.task)
            except ManagerError as error:
                self._outgoing.remove(asked)
                del self._requests[asked.number]
                self._discard_locked(asked.sent)
                asked.future.set_exception(error)


@atexit.register
def _close_all() -> None:
    for link in list(_links):
        link.close()
