"""The engine's client of the cache transfer manager.

    with Client(port=9923) as client:
        client.attach()                                     # unless the managers created the caches
        task = client.swap(SWAP2CPU, gpu_block_ids=[3, 4], cpu_block_ids=[17, 90], timeout=5)
        result = client.result(task, timeout=5)
        if not result.ok:
            print(f"rank {result.rank}: {result.reason}")

AsyncClient is the same for asyncio. Every call has a time limit in seconds and raises TimeoutError at its end. A task
that the manager has taken ends with exactly one Result, even if the manager dies. Any thread may call.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import os
import time
import uuid
import weakref
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvswap._timeouts import seconds

try:
    from kvswap.fastdeploy._link import Asked, Future, Link, ManagerError, NotReady, error_of
    from kvswap.fastdeploy.manager import places
    from kvswap.fastdeploy.manager.messages import Answer, Handles, Kind, Result, Task
except ModuleNotFoundError as error:
    if error.name not in ("zmq", "msgspec"):
        raise
    need = f"the client needs {error.name}: pip install 'kvswap[manager]'"
    raise ModuleNotFoundError(need, name=error.name) from None

__all__ = ["SWAP2CPU", "SWAP2GPU", "AsyncClient", "Client", "ManagerError", "NotReady", "Result"]

SWAP2CPU, SWAP2GPU = Kind.SWAP2CPU, Kind.SWAP2GPU

_P = ParamSpec("_P")
_T = TypeVar("_T")

_READY_EVERY = 0.05
_MOST_SECONDS = 86400.0  # that the manager takes
_NO_LIMIT = 1e6  # seconds, twelve days: what None and longer ones wait, as a lock of Python takes it
_LATER = 5.0  # seconds beyond the manager's own limit, so that the manager's answer arrives and says what is missing


def _ready(status: dict[str, Any]) -> str:
    """Why the manager takes no tasks; empty if it takes them."""
    return "" if status["ready"] else str(status["why_not"])


def _started(status: dict[str, Any]) -> str:
    for rank in status["ranks"]:
        if not rank["here"] or rank["phase"] in ("starting", "allocating", "open"):
            return f"rank {rank['rank']}: {rank['phase']}"
    return ""


def _limit(timeout: float | None) -> float:
    """The seconds to wait. TypeError, ValueError: it is no timeout."""
    limit = seconds(timeout)
    return _NO_LIMIT if limit is None else min(limit, _NO_LIMIT)


class _Calls:
    """What both clients do. Only how they wait differs: see _wait()."""

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, *, port: int = 9923, data_parallel_id: int = 0
    ) -> None:
        self.directory = Path(directory) if directory else places.default_directory(port, data_parallel_id)
        self._link = Link(self.directory)
        self._finalizer = weakref.finalize(self, self._link.stop)  # stop() does not wait

    async def _wait(self, future: Future, timeout: float) -> None:
        """Wait until the future is done or the time is over. Other callers may wait for it too."""
        raise NotImplementedError

    async def _answer(self, asked: Asked, timeout: float) -> Any:
        """The answer's body. Raises the answer's error, or TimeoutError if there is no answer."""
        try:
            await self._wait(asked.answer, timeout)
        finally:  # also after Ctrl-C, or cancelled
            unsent = self._link.give_up(asked)  # has no effect if the answer has arrived
        if not asked.answer.done():
            if unsent:
                raise TimeoutError(f"{self.directory}: nobody took the message in {timeout:g} s: does rank 0 run?")
            raise TimeoutError(f"{self.directory}: rank 0 did not answer in {timeout:g} s")
        answer: Answer = asked.answer.result()
        if answer.code != "ok":
            raise error_of(answer)
        return answer.body

    async def _ask(self, what: str, timeout: float, handles: Any = None, later: float = _LATER) -> Any:
        limit = _limit(timeout)
        return await self._answer(self._link.ask(what, min(limit, _MOST_SECONDS), handles), limit + later)

    async def _wait_until(self, missing: Callable[[dict[str, Any]], str], timeout: float) -> dict[str, Any]:
        timeout, status = _limit(timeout), dict[str, Any]()
        end = time.monotonic() + timeout
        while True:
            try:
                status = await self._ask("status", max(0.1, end - time.monotonic()), later=0.0)
                why = missing(status)
            except ManagerError as error:  # it died; it may be started again
                why = str(error)
            if not why:
                return status
            if time.monotonic() > end:
                raise TimeoutError(f"not ready after {timeout:g} s: {why}")
            await self._wait(concurrent.futures.Future(), _READY_EVERY)

    def holds(self, task_id: str) -> bool:
        """Whether that task was taken, or may have been, and its result is uncollected."""
        return self._link.holds(task_id)

    @property
    def under_way(self) -> int:
        """Number of tasks that were sent and have not ended."""
        return self._link.under_way


class AsyncClient(_Calls):
    """Client for asyncio: the same methods, arguments and errors. Use it in one event loop."""

    async def _wait(self, future: Future, timeout: float) -> None:
        await asyncio.wait({asyncio.wrap_future(future)}, timeout=timeout)  # does not cancel the future

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
        """Swap blocks on all ranks. Returns the task's id once the manager has taken the task, which then ends with a
        Result.

        kind: SWAP2CPU or SWAP2GPU. gpu_block_ids, cpu_block_ids: ints, as many in both; item i of both is one pair.
        task_id: None generates one. node_ids: returned in the Result.
        events: for each rank an event from kvswap.memory.export_event(), recorded after the kernels that write or read
          those blocks; None: the engine has synchronised with those kernels.

        kvswap.QueueFull: too many tasks are under way. NotReady: the manager takes no tasks now. ManagerError: the task
        is wrong, or (code "died") rank 0 died before it answered: then the blocks may have been written, and there is
        no result. TimeoutError: no answer; the manager may still take the task if it was sent, and then there is a
        result.
        """
        task = Task(
            transfer_task_id=uuid.uuid4().hex if task_id is None else task_id,
            event_type=int(kind),  # type: ignore[arg-type]  # the manager checks it
            gpu_block_ids=[int(i) for i in gpu_block_ids],
            cpu_block_ids=[int(i) for i in cpu_block_ids],
            swap_node_ids=list(node_ids),
            events=None if events is None else list(events),
        )
        limit = _limit(timeout)
        await self._answer(self._link.submit(task), limit)
        return task.transfer_task_id

    async def result(self, task_id: str, timeout: float = 60.0) -> Result:
        """Wait for that task's Result. TimeoutError: the task has not ended."""
        timeout = _limit(timeout)
        future = self._link.result_of(task_id)
        await self._wait(future, timeout)
        if not future.done():
            raise TimeoutError(f"task {task_id} has not ended after {timeout:g} s")
        return self._link.collect(future.result())

    async def next_result(self, timeout: float = 60.0) -> Result:
        """The Result of the next task that ends, in the order of their ends. TimeoutError: none has ended.

        A result is handed out once: wait for a task by this or by result(), not by both.
        """
        timeout = _limit(timeout)
        end = time.monotonic() + timeout
        while not isinstance(found := self._link.collect_next(), Result):
            try:
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no task has ended in {timeout:g} s")
                await self._wait(found, left)
            finally:
                self._link.leave(found)
        return found

    async def status(self, timeout: float = 10.0) -> dict[str, Any]:
        """State, ranks and tasks, as `kvswap manager status` prints them."""
        status: dict[str, Any] = await self._ask("status", timeout, later=0.0)
        return status

    async def wait_ready(self, timeout: float = 60.0) -> dict[str, Any]:
        """Wait until the manager takes tasks; returns the status. TimeoutError says what is missing."""
        return await self._wait_until(_ready, timeout)

    async def wait_started(self, timeout: float = 60.0) -> dict[str, Any]:
        """Wait until every rank is ready or waits for attach(); returns the status. TimeoutError says what is
        missing."""
        return await self._wait_until(_started, timeout)

    async def attach(self, handles: Sequence[Handles] | None = None, timeout: float = 60.0) -> None:
        """Tell all ranks to open the engine's caches. They take tasks from then on.

        handles: for each rank a dict from a cache's name to the bytes of kvswap.memory.export(); None: the engine has
          exported the caches by set_data_ipc() under FastDeploy's names.

        If the managers created the caches, attach() says that the engine has opened the present ones.
        """
        await self._ask("attach", timeout, None if handles is None else list(handles))

    async def clear(self, timeout: float = 60.0) -> None:
        """Refuse new tasks, let tasks under way end, and make all ranks free their caches or close the engine's. Does
        nothing if they are cleared already.

        ManagerError, TimeoutError: name the rank that failed and why; calling clear() again continues.
        """
        await self._ask("clear", timeout)

    async def restore(self, handles: Sequence[Handles] | None = None, timeout: float = 60.0) -> None:
        """Undo clear(): all ranks allocate host memory again, and create the caches or open the engine's. handles: as
        in attach()."""
        await self._ask("restore", timeout, None if handles is None else list(handles))

    async def drain(self, timeout: float = 60.0, *, undo: bool = False) -> None:
        """Refuse new tasks, and return when none is under way. undo: take tasks again."""
        await self._ask("undo" if undo else "drain", timeout)

    async def handles(self, timeout: float = 10.0) -> list[dict[str, Any]]:
        """For each rank a dict: the "generation" of the caches that it created, and "handles" for kvswap.memory.open().

        The managers assume that the caller opens the caches, and take tasks from then on. A restarted rank has created
        new caches: the manager takes no task until handles() or attach() is called again.
        """
        body: list[dict[str, Any]] = await self._ask("handles", timeout, later=0.0)
        return body

    async def close(self) -> None:
        """End the connection; results of tasks under way are lost. A second call does nothing."""
        await asyncio.to_thread(self._link.close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _blocking(
    call: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[Any, _P], _T]:
    """A call of AsyncClient for Client, whose waits block: the coroutine runs to its end without being suspended."""

    def run(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            call(self, *args, **kwargs).send(None)
        except StopIteration as end:
            result: _T = end.value
            return result
        raise AssertionError("a wait of Client's did not block")

    functools.update_wrapper(run, call)
    run.__signature__ = inspect.signature(call)  # type: ignore[attr-defined]
    del run.__wrapped__  # type: ignore[attr-defined]  # a coroutine function, which run is not
    return run


class Client(_Calls):
    """See the module. directory: the socket's folder, if the manager was started with --socket_dir; None: the folder
    that port and data-parallel id name.

    kvswap.Error: the folder is missing, or belongs to another user. TypeError, ValueError: port is not from 0 to 65535.
    """

    async def _wait(self, future: Future, timeout: float) -> None:
        with contextlib.suppress(concurrent.futures.TimeoutError):
            future.exception(timeout)

    swap = _blocking(AsyncClient.swap)
    result = _blocking(AsyncClient.result)
    next_result = _blocking(AsyncClient.next_result)
    status = _blocking(AsyncClient.status)
    wait_ready = _blocking(AsyncClient.wait_ready)
    wait_started = _blocking(AsyncClient.wait_started)
    attach = _blocking(AsyncClient.attach)
    clear = _blocking(AsyncClient.clear)
    restore = _blocking(AsyncClient.restore)
    drain = _blocking(AsyncClient.drain)
    handles = _blocking(AsyncClient.handles)

    def close(self) -> None:
        """End the connection; results of tasks under way are lost. A second call does nothing."""
        self._link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
