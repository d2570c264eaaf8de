"""The connection of a client to the manager's rank 0: a thread that owns the socket; calls come and go as futures."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import zmq

from kvswap import _C
from kvswap.fastdeploy.manager import messages, places
from kvswap.fastdeploy.manager.messages import Answer, Bye, Result, Submit, Task

__all__ = ["Future", "Link", "ManagerError", "NotReady", "error_of"]

_log = logging.getLogger("kvswap.manager")

_POLL_MS = 50
_MOST_UNCOLLECTED = 65536
_LAST_WORDS = 0.3  # seconds that messages of a process that has ended may take
Future: TypeAlias = "concurrent.futures.Future[Any]"


class ManagerError(_C.Error):
    """The manager said no, or has died. code: "refused", "not_ready", "malformed", "busy", "timeout", "failed",
    "died", "closed"."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class NotReady(ManagerError):
    """The manager takes no tasks now: a rank is missing, the caches are cleared, it is draining or stopping."""


def error_of(answer: Answer) -> Exception:
    if answer.code == "full":
        return _C.QueueFull(answer.message)
    if answer.code == "not_ready":
        return NotReady(answer.code, answer.message)
    return ManagerError(answer.code, answer.message)


def _new_future() -> Future:
    return concurrent.futures.Future()


class _Sent(NamedTuple):
    """A task that was sent, and its Result to come."""

    task: Task
    future: Future


class Link:
    """The connection: a thread that owns the socket. Calls come and go as futures."""

    def __init__(self, directory: Path) -> None:
        places.check_directory(directory)
        self._path = places.socket_path(directory)
        self._lock = threading.Lock()
        self._requests: dict[int, Future] = {}  # guarded by _lock, and so is what follows
        self._outgoing: deque[tuple[bytes, Future]] = deque()
        self._tasks: dict[str, _Sent] = {}  # not ended, or not collected
        self._submitted: dict[int, str] = {}  # tasks whose answer has not come, by request
        self._ended: deque[str] = deque()  # not collected, in the order in which they ended
        self._getters: deque[Future] = deque()
        self._closed = False
        self._owner = os.getpid()
        self._numbers = itertools.count(1)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._pid = 0  # of rank 0, as the kernel says; the thread's alone, and so is what follows
        self._watch: int | None = None
        self._dying: float | None = None  # it has ended: until when what it said before may still arrive
        self._thread = threading.Thread(target=self._run, name="kvswap-client", daemon=True)
        self._thread.start()

    # -- from any thread ----------------------------------------------------------------------------------------------

    def ask(self, kind: Any, *args: Any) -> Future:
        """Send a request; the future is its Answer."""
        with self._lock:
            return self._ask_locked(kind(next(self._numbers), *args))

    def _ask_locked(self, message: Any) -> Future:
        if self._closed:
            raise _C.Error("the client is closed")
        if os.getpid() != self._owner:
            raise _C.Error("this client was made before fork(): make one in this process")
        try:
            data = messages.encode(message)
        except (OverflowError, TypeError) as error:
            raise type(error)(f"this cannot be sent: {error}") from None
        if len(data) > messages.MAX_MESSAGE_NBYTES:
            raise ValueError(f"the message has {len(data)} bytes; {messages.MAX_MESSAGE_NBYTES} are the most")
        future = self._requests[message.request] = _new_future()
        self._outgoing.append((data, future))
        os.eventfd_write(self._wake, 1)
        return future

    def submit(self, task: Task) -> Future:
        with self._lock:
            if len(self._tasks) >= _MOST_UNCOLLECTED:
                raise _C.QueueFull(f"{len(self._tasks)} results were not collected: call result() or next_result()")
            name = task.transfer_task_id
            if name in self._tasks:
                raise ValueError(f"transfer_task_id {name!r} is of a task whose result is not collected")
            number = next(self._numbers)
            future = self._ask_locked(Submit(number, task))
            self._tasks[name] = _Sent(task, _new_future())
            self._submitted[number] = name
            return future

    def give_up(self, future: Future) -> bool:
        """The caller waits no longer. True: it was not sent yet, and never will be."""
        with self._lock:
            unsent = any(other is future for _, other in self._outgoing)
            self._outgoing = deque((message, other) for message, other in self._outgoing if other is not future)
            for number, other in list(self._requests.items()):
                if other is future:
                    del self._requests[number]
            return unsent

    def forget(self, task_id: str) -> None:
        """A task that was not taken."""
        with self._lock:
            self._tasks.pop(task_id, None)

    def result_of(self, task_id: str) -> Future:
        with self._lock:
            if task_id not in self._tasks:
                raise ValueError(f"no task {task_id!r} is under way here, or its result was collected")
            return self._tasks[task_id].future

    def collect(self, task_id: str) -> None:
        with self._lock:
            self._tasks.pop(task_id, None)
            with contextlib.suppress(ValueError):
                self._ended.remove(task_id)

    def next_ended(self) -> Future:
        """The next Result that nobody has collected."""
        future = _new_future()
        with self._lock:
            if self._ended:
                task_id = self._ended.popleft()
                future.set_result(self._tasks.pop(task_id).future.result())
            else:
                self._getters.append(future)
        return future

    def leave_getters(self, future: Future) -> Result | None:
        """It waits no longer. A Result that came just now is given back."""
        with self._lock, contextlib.suppress(ValueError):
            self._getters.remove(future)
        return future.result() if future.done() else None

    def give_back(self, future: Future) -> None:
        """It waits no longer. A Result that came just now goes to the next one who asks."""
        result = self.leave_getters(future)
        if result is None:
            return
        with self._lock:
            if self._getters:
                self._getters.popleft().set_result(result)
                return
            task = Task(result.transfer_task_id, result.event_type, result.gpu_block_ids, result.cpu_block_ids)
            future = _new_future()
            future.set_result(result)
            self._tasks[result.transfer_task_id] = _Sent(task, future)
            self._ended.appendleft(result.transfer_task_id)

    @property
    def under_way(self) -> int:
        with self._lock:
            return len(self._tasks) - len(self._ended)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if os.getpid() != self._owner:
                return  # the thread is the parent's
            os.eventfd_write(self._wake, 1)
        if self._thread is not threading.current_thread():
            self._thread.join()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is kept for a manager that is not there
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_NBYTES)
        socket.connect(f"ipc://{self._path}")
        try:
            while not self._closed:
                self._loop_once(socket)
            with contextlib.suppress(zmq.Again):
                socket.send(messages.encode(Bye()), zmq.NOBLOCK)
        finally:
            with self._lock:
                self._closed = True
                self._outgoing.clear()
            self._fail_all("closed", "the client was closed")
            socket.close()
            context.term()
            os.close(self._wake)
            if self._watch is not None:
                os.close(self._watch)

    def _loop_once(self, socket: zmq.Socket[bytes]) -> None:
        unsent = self._dying is None and self._send(socket)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        if self._watch is not None:
            poller.register(self._watch, zmq.POLLIN)
        ready = dict(poller.poll(5 if unsent else _POLL_MS))
        if self._wake in ready:
            os.eventfd_read(self._wake)
        self._take(socket)
        if self._watch is not None and self._watch in ready:
            os.close(self._watch)
            self._watch, self._dying = None, time.monotonic() + _LAST_WORDS
        elif self._dying is not None and time.monotonic() > self._dying:
            self._bury()

    def _bury(self) -> None:
        """Rank 0 has ended, and all that it said has been read."""
        pid, self._pid, self._dying = self._pid, 0, None
        self._fail_all("died", f"rank 0 (process {pid}), which hands out the tasks, died")

    def _send(self, socket: zmq.Socket[bytes]) -> bool:
        while True:
            with self._lock:
                if not self._outgoing:
                    return False
                data, _ = self._outgoing[0]
                try:
                    socket.send(data, zmq.NOBLOCK)
                except zmq.Again:
                    return True
                self._outgoing.popleft()

    def _take(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frame = socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            peer = places.Peer(frame)
            if not peer.ours:
                _log.warning("a message of user %d (process %d) is not looked at", peer.uid, peer.pid)
                continue
            if self._dying is not None and peer.pid == self._pid:
                self._dying = time.monotonic() + _LAST_WORDS
            elif peer.pid != self._pid:
                if self._dying is not None:
                    self._bury()
                self._pid = peer.pid
                if self._watch is not None:
                    os.close(self._watch)
                self._watch = places.watch_process(peer.pid)
            try:
                message = messages.to_client.decode(frame.buffer)
            except (msgspec.MsgspecError, ValueError) as error:
                _log.warning("malformed message of the manager: %s", error)
                continue
            if isinstance(message, Answer):
                self._answered(message)
            else:
                self._end(message)

    def _answered(self, answer: Answer) -> None:
        with self._lock:
            future = self._requests.pop(answer.request, None)
            name = self._submitted.pop(answer.request, None)
            if future is None and name is not None and answer.code != "ok":
                self._tasks.pop(name, None)  # it waits no longer, and now it is known that it was not taken
        if future is not None:
            future.set_result(answer)

    def _end(self, result: Result) -> None:
        with self._lock:
            sent = self._tasks.get(result.transfer_task_id)
            if sent is None or sent.future.done():
                return
            sent.future.set_result(result)
            if self._getters:
                del self._tasks[result.transfer_task_id]
                self._getters.popleft().set_result(result)
            else:
                self._ended.append(result.transfer_task_id)

    def _fail_all(self, code: str, why: str) -> None:
        """What was asked is answered with an error, what was under way ends as failed. What was not sent yet waits for
        whoever takes it."""
        with self._lock:
            unsent = {id(future) for _, future in self._outgoing}
            asked = {number: future for number, future in self._requests.items() if id(future) not in unsent}
            self._requests = {number: self._requests[number] for number in self._requests if number not in asked}
            self._submitted = {number: name for number, name in self._submitted.items() if number in self._requests}
            waiting = set(self._submitted.values())
            lost = [sent.task for name, sent in self._tasks.items() if not sent.future.done() and name not in waiting]
        for future in asked.values():
            future.set_exception(ManagerError(code, why))
        for task in lost:
            nodes, gpu, cpu = task.swap_node_ids, task.gpu_block_ids, task.cpu_block_ids
            self._end(Result(task.transfer_task_id, task.event_type, nodes, gpu, cpu, False, 0, why))
