"""A client with the method names of FastDeploy's EngineCacheQueue, so that an engine changes only an import.

    from kvswap.fastdeploy.queue import EngineCacheQueue        # there: fastdeploy.inter_communicator

FastDeploy's class is in fastdeploy/inter_communicator/engine_cache_queue.py (releases 2.0 to 2.6). This one connects to
`kvswap manager` and is not wire-compatible with FastDeploy's queue. It uses no pickle and opens no port (the address's
port only names the manager). A full queue raises kvswap.QueueFull. A failed task raises TaskFailed; FastDeploy reports
it as done.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from kvswap import _C
from kvswap.fastdeploy.client import Client, Result
from kvswap.fastdeploy.manager import places

__all__ = ["EngineCacheQueue", "TaskFailed"]


class TaskFailed(_C.Error):
    """A task failed. Raised by get_transfer_done_signal().

    item: the task as it was put. rank: the first rank that failed, or None. Do not use the blocks that the task was to
    write.
    """

    def __init__(self, item: tuple[Any, ...], result: Result) -> None:
        super().__init__(f"swap task {result.transfer_task_id} failed on rank {result.rank}: {result.reason}")
        self.item, self.rank = item, result.rank


class EngineCacheQueue:
    """See the module. Positional arguments as FastDeploy's; only the address's port and the data-parallel id are used.

    Any thread may call.
    """

    def __init__(
        self,
        address: tuple[str, int] = ("127.0.0.1", 56666),
        authkey: bytes = b"",
        is_server: bool = False,
        num_client: int = 1,
        client_id: int = -1,
        local_data_parallel_size: int = 1,
        local_data_parallel_id: int = 0,
        *,
        timeout: float = 10.0,
    ) -> None:
        self.address, self.is_server = address, is_server
        self._timeout = timeout
        directory = places.default_directory(address[1], local_data_parallel_id)
        places.prepare_directory(directory)  # the engine creates the queue before it starts the managers
        self._client = Client(directory)
        self._lock = threading.Lock()
        self._items: dict[str, tuple[Any, ...]] = {}  # guarded by _lock; tasks as they were put

    @property
    def client(self) -> Client:
        """The client, for calls that EngineCacheQueue lacks: attach(), clear(), restore(), status()."""
        return self._client

    def get_server_port(self) -> int:
        """The port that names the manager. FastDeploy's queue listens on it, kvswap does not."""
        return self.address[1]

    def put_transfer_task(self, item: Sequence[Any]) -> None:
        """Swap blocks.

        item: (swap_node_ids, gpu_block_ids, cpu_block_ids, event_type, transfer_task_id), or the order of newer
          FastDeploys: (event_type, transfer_task_id, swap_node_ids, gpu_block_ids, cpu_block_ids). event_type: a
          CacheStatus, or its number.

        kvswap.QueueFull: too many tasks are under way. NotReady: the manager takes no tasks now. ManagerError: the task
        is wrong. TimeoutError: no answer; the manager may still take the task if it was sent, and
        get_transfer_done_signal() then reports its end.
        """
        parts = tuple(item)
        if len(parts) != 5:
            raise ValueError(
                f"a swap task has 5 items, not {len(parts)}: reading from and writing to storage is not served"
            )
        older = isinstance(parts[0], Sequence)
        kind, task_id, nodes, gpu_ids, cpu_ids = (*parts[3:], *parts[:3]) if older else parts
        kind, name = int(getattr(kind, "value", kind)), str(task_id)
        with self._lock:
            if name in self._items:
                raise ValueError(f"transfer_task_id {name!r} is under way already")
            self._items[name] = parts
        try:
            self._client.swap(kind, gpu_ids, cpu_ids, task_id=name, node_ids=nodes, timeout=self._timeout)
        except BaseException:
            if not self._client.holds(name):
                with self._lock:
                    self._items.pop(name, None)
            raise

    def get_transfer_done_signal(self) -> tuple[Any, ...] | None:
        """The next task that is done, as it was put; None if none is. TaskFailed: the next one that ended failed."""
        try:
            result = self._client.next_result(0.0)
        except TimeoutError:
            return None
        with self._lock:
            item = self._items.pop(result.transfer_task_id, None)
        if item is None:  # of a task that was not sent by put_transfer_task()
            nodes, gpu_ids, cpu_ids = result.swap_node_ids, result.gpu_block_ids, result.cpu_block_ids
            item = (nodes, gpu_ids, cpu_ids, result.event_type, result.transfer_task_id)
        if not result.ok:
            raise TaskFailed(item, result)
        return item

    def empty(self) -> bool:
        """Whether no task is under way."""
        return self._client.under_way == 0

    def close(self) -> None:
        """End the connection."""
        self._client.close()
