"""The engine's side of the cache transfer manager.

    with Client(port=9923) as client:
        client.attach()                                     # unless the managers created the caches
        task = client.swap(SWAP2CPU, gpu_block_ids=[3, 4], cpu_block_ids=[17, 90], timeout=5)
        result = client.result(task, timeout=5)
        if not result.ok:
            print(f"rank {result.rank}: {result.reason}")

AsyncClient is the same for asyncio. Every call has a time limit, in seconds; TimeoutError says that it is over. A task
that was taken ends with exactly one Result, also when the manager dies. Any thread may call.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import os
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import msgspec
import zmq

from kvswap import _C
from kvswap.fastdeploy.manager import messages, places
from kvswap.fastdeploy.manager.messages import (
    Answer,
    Attach,
    Bye,
    Clear,
    Drain,
    GetHandles,
    GetStatus,
    Handles,
    Kind,
    Restore,
    Result,
    Submit,
    Task,
)

__all__ = ["SWAP2CPU", "SWAP2GPU", "AsyncClient", "Client", "ManagerError", "NotReady", "Result"]

_log = logging.getLogger("kvswap.manager")

SWAP2CPU, SWAP2GPU = Kind.SWAP2CPU, Kind.SWAP2GPU

_POLL_MS = 50
_MOST_UNCOLLECTED = 65536
_LAST_WORDS = 0.3  # seconds that messages of a process that has ended may take
_Future: TypeAlias = "concurrent.futures.Future[Any]"


class ManagerError(_C.Error):
    """The manager said no, or has died. code: "refused", "malformed", "busy", "timeout", "failed", "died"."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class NotReady(ManagerError):
    """The manager takes no tasks now: a rank is missing, the caches are cleared, it is draining or stopping."""


def _error_of(answer: Answer) -> Exception:
    if answer.code == "full":
        return _C.QueueFull(answer.message)
    if answer.code == "not_ready":
        return NotReady(answer.code, answer.message)
    return ManagerError(answer.code, answer.message)


def _new_future() -> _Future:
    return concurrent.futures.Future()


class _Sent(NamedTuple):
    """A task that was sent, and its Result to come."""

    task: Task
    future: _Future


class _Link:
    """The connection: a thread that owns the socket. Calls come and go as futures."""

    def __init__(self, directory: Path) -> None:
        places.check_directory(directory)
        self._path = places.socket_path(directory)
        self._lock = threading.Lock()
        self._requests: dict[int, _Future] = {}  # guarded by _lock, and so is what follows
        self._outgoing: deque[tuple[bytes, _Future]] = deque()
        self._tasks: dict[str, _Sent] = {}  # not ended, or not collected
        self._submitted: dict[int, str] = {}  # tasks whose answer has not come, by request
        self._ended: deque[str] = deque()  # not collected, in the order in which they ended
        self._getters: deque[_Future] = deque()
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

    def ask(self, kind: Any, *args: Any, **fields: Any) -> _Future:
        """Send a request; the future is its Answer."""
        with self._lock:
            return self._ask_locked(kind(next(self._numbers), *args, **fields))

    def _ask_locked(self, message: Any) -> _Future:
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

    def submit(self, task: Task) -> _Future:
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

    def give_up(self, future: _Future) -> bool:
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

    def result_of(self, task_id: str) -> _Future:
        with self._lock:
            if task_id not in self._tasks:
                raise ValueError(f"no task {task_id!r} is under way here, or its result was collected")
            return self._tasks[task_id].future

    def collect(self, task_id: str) -> None:
        with self._lock:
            self._tasks.pop(task_id, None)
            with contextlib.suppress(ValueError):
                self._ended.remove(task_id)

    def next_ended(self) -> _Future:
        """The next Result that nobody has collected."""
        future = _new_future()
        with self._lock:
            if self._ended:
                task_id = self._ended.popleft()
                future.set_result(self._tasks.pop(task_id).future.result())
            else:
                self._getters.append(future)
        return future

    def leave_getters(self, future: _Future) -> Result | None:
        """It waits no longer. A Result that came just now is given back."""
        with self._lock, contextlib.suppress(ValueError):
            self._getters.remove(future)
        return future.result() if future.done() else None

    def give_back(self, future: _Future) -> None:
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


def _make_task(
    kind: int,
    gpu_block_ids: Sequence[int],
    cpu_block_ids: Sequence[int],
    task_id: str | None,
    node_ids: Sequence[int | str],
    events: Sequence[bytes | None] | None,
) -> Task:
    return Task(
        transfer_task_id=uuid.uuid4().hex if task_id is None else task_id,
        event_type=int(kind),
        gpu_block_ids=[int(i) for i in gpu_block_ids],
        cpu_block_ids=[int(i) for i in cpu_block_ids],
        swap_node_ids=list(node_ids),
        events=None if events is None else list(events),
    )


class _Unsent(TimeoutError):
    """It was not sent, and will not be."""


class _Calls:
    """What both clients have in common."""

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, *, port: int = 9923, data_parallel_id: int = 0
    ) -> None:
        self.directory = Path(directory) if directory else places.default_directory(port, data_parallel_id)
        self._link = _Link(self.directory)
        self._finalizer = weakref.finalize(self, self._link.close)

    def _body(self, future: _Future, timeout: float) -> Any:
        """Of the answer that came, or the error that it is, or that none came."""
        if not future.done():
            if self._link.give_up(future):
                raise _Unsent(f"{self.directory}: nobody took the message in {timeout:g} s: does rank 0 run?")
            raise TimeoutError(f"{self.directory}: rank 0 did not answer in {timeout:g} s")
        answer: Answer = future.result()
        if answer.code != "ok":
            raise _error_of(answer)
        return answer.body

    def _forget_untaken(self, task: Task, error: Exception) -> None:
        """Whatever was answered, the task was not taken; where nothing was, it may have been."""
        if not isinstance(error, TimeoutError) or isinstance(error, _Unsent):
            self._link.forget(task.transfer_task_id)

    def _next(self, future: _Future, timeout: float) -> Result:
        result = self._link.leave_getters(future)
        if result is None:
            raise TimeoutError(f"no task has ended in {timeout:g} s")
        return result

    def _ended(self, task_id: str, future: _Future, timeout: float) -> Result:
        if not future.done():
            raise TimeoutError(f"task {task_id} has not ended after {timeout:g} s")
        result: Result = future.result()
        self._link.collect(task_id)
        return result

    @property
    def under_way(self) -> int:
        """Tasks that were sent and have not ended."""
        return self._link.under_way


def _ready(status: dict[str, Any]) -> str:
    """What is missing until tasks are taken; empty: nothing."""
    return "" if status["ready"] else str(status["why_not"])


def _started(status: dict[str, Any]) -> str:
    for rank in status["ranks"]:
        if not rank["here"] or rank["phase"] in ("starting", "allocating", "open"):
            return f"rank {rank['rank']}: {rank['phase']}"
    return ""


_READY_EVERY = 0.05
_LATER = 5.0  # the manager's own limit comes first, so that its answer says what is missing


class Client(_Calls):
    """See the module. directory: of the socket, where the manager was started with --socket_dir; else it is found by
    the port and data-parallel id that both were given.

    kvswap.Error: the folder is not there, or is another user's.
    """

    def _answer(self, future: _Future, timeout: float) -> Any:
        concurrent.futures.wait([future], timeout)
        return self._body(future, timeout)

    def swap(
        self,
        kind: int,
        gpu_block_ids: Sequence[int],
        cpu_block_ids: Sequence[int],
        *,
        task_id: str | None = None,
        node_ids: Sequence[int | str] = (),
        events: Sequence[bytes | None] | None = None,
        timeout: float = 10.0,
    ) -> str:
        """Have blocks swapped on all ranks; returns the task's id once it is taken. It ends with a Result.

        kind: SWAP2CPU or SWAP2GPU. gpu_block_ids, cpu_block_ids: pairs. task_id: None makes one. node_ids: handed back.
        events: for each rank an event from kvswap.memory.export_event(), recorded after the kernels that write or read
          those blocks; None: they are over, the engine has synchronised.

        kvswap.QueueFull: too many are under way. NotReady: not now. ManagerError: the task is wrong. TimeoutError: no
        answer; where it was sent, it may still be taken, and has a result then.
        """
        task = _make_task(kind, gpu_block_ids, cpu_block_ids, task_id, node_ids, events)
        future = self._link.submit(task)
        try:
            self._answer(future, timeout)
        except (_C.Error, TimeoutError) as error:
            self._forget_untaken(task, error)
            raise
        return task.transfer_task_id

    def result(self, task_id: str, timeout: float = 60.0) -> Result:
        """How that task ended. TimeoutError: it has not."""
        future = self._link.result_of(task_id)
        concurrent.futures.wait([future], timeout)
        return self._ended(task_id, future, timeout)

    def next_result(self, timeout: float = 60.0) -> Result:
        """The next task that ended, in the order in which they did. TimeoutError: none has."""
        future = self._link.next_ended()
        try:
            concurrent.futures.wait([future], timeout)
        except BaseException:  # Ctrl-C
            self._link.give_back(future)
            raise
        return self._next(future, timeout)

    def status(self, timeout: float = 10.0) -> dict[str, Any]:
        """State, ranks, tasks: what `kvswap manager status` prints."""
        body: dict[str, Any] = self._answer(self._link.ask(GetStatus), timeout)
        return body

    def wait_ready(self, timeout: float = 60.0) -> dict[str, Any]:
        """Return the status once tasks are taken. TimeoutError says what is missing."""
        return self._wait_until(_ready, timeout)

    def _wait_until(self, missing: Callable[[dict[str, Any]], str], timeout: float) -> dict[str, Any]:
        end = time.monotonic() + timeout
        while True:
            try:
                status = self.status(max(0.1, end - time.monotonic()))
                why = missing(status)
            except ManagerError as error:  # it died; it may be started again
                status, why = {}, str(error)
            if not why:
                return status
            if time.monotonic() > end:
                raise TimeoutError(f"not ready after {timeout:g} s: {why}")
            time.sleep(_READY_EVERY)

    def wait_started(self, timeout: float = 60.0) -> dict[str, Any]:
        """Return the status once all ranks are there and wait for attach(), or are ready. TimeoutError, as above."""
        return self._wait_until(_started, timeout)

    def attach(self, handles: Sequence[Handles] | None = None, timeout: float = 60.0) -> None:
        """The caches are there on the engine's side: all ranks open them, and take tasks from then on.

        handles: for each rank, by the caches' names, what kvswap.memory.export() gave for them, as bytes; None: they
          were exported by set_data_ipc() under FastDeploy's names.

        Where the managers created the caches it says that the engine has opened those that are there now.
        """
        self._operate(Attach, timeout, None if handles is None else list(handles))

    def clear(self, timeout: float = 60.0) -> None:
        """Let tasks end, take no more, and have all ranks free their caches or close the engine's. Harmless if done.

        ManagerError, TimeoutError: which rank failed, and why; the same call goes on from there.
        """
        self._operate(Clear, timeout)

    def restore(self, handles: Sequence[Handles] | None = None, timeout: float = 60.0) -> None:
        """After clear(): allocate again, and create or attach to the caches, as with attach()."""
        self._operate(Restore, timeout, None if handles is None else list(handles))

    def drain(self, timeout: float = 60.0, *, undo: bool = False) -> None:
        """Take no more tasks, and return when none is under way. undo: take tasks again."""
        self._operate(Drain, timeout, undo)

    def _operate(self, kind: Any, timeout: float, *args: Any) -> None:
        self._answer(self._link.ask(kind, timeout, *args), timeout + _LATER)

    def handles(self, timeout: float = 10.0) -> list[dict[str, Any]]:
        """For each rank the "generation" and "handles" (for kvswap.memory.open()) of the caches that it created.

        Who asks is taken to open them: tasks are taken from then on. A rank that is started again has created others,
        and no task is taken until they were asked for, or attach() said that they were opened.
        """
        body: list[dict[str, Any]] = self._answer(self._link.ask(GetHandles), timeout)
        return body

    def close(self) -> None:
        """Results of tasks that are under way go nowhere. Harmless if done."""
        self._finalizer()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(_Calls):
    """Client for asyncio: the same methods, arguments and errors. Use it in one event loop."""

    async def _wait(self, future: _Future, timeout: float) -> None:
        """Without cancelling it: others may wait for it, and it can be waited for again."""
        await asyncio.wait({asyncio.wrap_future(future)}, timeout=timeout)

    async def _answer(self, future: _Future, timeout: float) -> Any:
        await self._wait(future, timeout)
        return self._body(future, timeout)

    async def swap(
        self,
        kind: int,
        gpu_block_ids: Sequence[int],
        cpu_block_ids: Sequence[int],
        *,
        task_id: str | None = None,
        node_ids: Sequence[int | str] = (),
        events: Sequence[bytes | None] | None = None,
        timeout: float = 10.0,
    ) -> str:
        """As Client.swap()."""
        task = _make_task(kind, gpu_block_ids, cpu_block_ids, task_id, node_ids, events)
        future = self._link.submit(task)
        try:
            await self._answer(future, timeout)
        except (_C.Error, TimeoutError) as error:
            self._forget_untaken(task, error)
            raise
        return task.transfer_task_id

    async def result(self, task_id: str, timeout: float = 60.0) -> Result:
        """As Client.result()."""
        future = self._link.result_of(task_id)
        await self._wait(future, timeout)
        return self._ended(task_id, future, timeout)

    async def next_result(self, timeout: float = 60.0) -> Result:
        """As Client.next_result()."""
        future = self._link.next_ended()
        try:
            await self._wait(future, timeout)
        except BaseException:  # cancelled
            self._link.give_back(future)
            raise
        return self._next(future, timeout)

    async def status(self, timeout: float = 10.0) -> dict[str, Any]:
        """As Client.status()."""
        body: dict[str, Any] = await self._answer(self._link.ask(GetStatus), timeout)
        return body

    async def wait_ready(self, timeout: float = 60.0) -> dict[str, Any]:
        """As Client.wait_ready()."""
        return await self._wait_until(_ready, timeout)

    async def _wait_until(self, missing: Callable[[dict[str, Any]], str], timeout: float) -> dict[str, Any]:
        end = time.monotonic() + timeout
        while True:
            try:
                status = await self.status(max(0.1, end - time.monotonic()))
                why = missing(status)
            except ManagerError as error:
                status, why = {}, str(error)
            if not why:
                return status
            if time.monotonic() > end:
                raise TimeoutError(f"not ready after {timeout:g} s: {why}")
            await asyncio.sleep(_READY_EVERY)

    async def wait_started(self, timeout: float = 60.0) -> dict[str, Any]:
        """As Client.wait_started()."""
        return await self._wait_until(_started, timeout)

    async def attach(self, handles: Sequence[Handles] | None = None, timeout: float = 60.0) -> None:
        """As Client.attach()."""
        await self._operate(Attach, timeout, None if handles is None else list(handles))

    async def clear(self, timeout: float = 60.0) -> None:
        """As Client.clear()."""
        await self._operate(Clear, timeout)

    async def restore(self, handles: Sequence[Handles] | None = None, timeout: float = 60.0) -> None:
        """As Client.restore()."""
        await self._operate(Restore, timeout, None if handles is None else list(handles))

    async def drain(self, timeout: float = 60.0, *, undo: bool = False) -> None:
        """As Client.drain()."""
        await self._operate(Drain, timeout, undo)

    async def _operate(self, kind: Any, timeout: float, *args: Any) -> None:
        await self._answer(self._link.ask(kind, timeout, *args), timeout + _LATER)

    async def handles(self, timeout: float = 10.0) -> list[dict[str, Any]]:
        """As Client.handles()."""
        body: list[dict[str, Any]] = await self._answer(self._link.ask(GetHandles), timeout)
        return body

    async def close(self) -> None:
        """As Client.close()."""
        await asyncio.to_thread(self._finalizer)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
