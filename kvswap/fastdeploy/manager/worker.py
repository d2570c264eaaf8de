"""The worker of a rank: its caches, its swaps under way, and the steps of clearing and restoring.

Only the process's loop calls the Worker. Slow work (allocating, freeing, opening) is a step, which runs on a thread of
its own; at most one runs, and no swap is submitted meanwhile. Tasks are submitted in the order of arrival, up to the
limit of the device's lanes. The end of a swap or a step wakes the loop.

States of a task on a rank. No lock: only the thread of the process's loop moves tasks.

        Do from rank 0
          | take()
          v
        waiting, in _waiting --- give_up(): dropped, no report
          | pump() -> _submit() ---- an error: _fail() reports Done, failed
          v
        running, in _running --- give_up(): abandoned (.abandoned), still writes
          | pump() -> _finish_ended(), once the transfer has ended
          v
        ended: _finish() reports Done; of an abandoned task it reports nothing
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvswap import _C, memory
from kvswap.fastdeploy.manager import caches
from kvswap.fastdeploy.manager.arguments import Settings
from kvswap.fastdeploy.manager.messages import Done, Handles, Kind, State, Step, StepDone, Task

__all__ = ["Worker"]

_log = logging.getLogger("kvswap.manager")

_MOST_UNDER_WAY = 96  # swaps in one direction; a lane of the device holds 128
_MOST_EVENTS = 64
_MOST_SUBMITTING = 0.1  # seconds of submitting before the loop sends the next Beat: a driver takes long for many copies
_IDLE_MS, _RETRY_MS = 50, 1  # how long the loop may sleep
_WAIT_SLICE = 1.0  # seconds of one wait for a transfer


@dataclass
class _Running:
    number: int
    task: Task
    transfer: _C.Transfer
    begun: float
    abandoned: bool = False  # abandoned: reported failed, but still writing its blocks


class _Watcher:
    """A thread that wakes the loop, by an eventfd, when the transfer last given to watch() has ended."""

    def __init__(self, wake_fd: int, name: str) -> None:
        self._wake_fd = wake_fd
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
                    transfer.wait(_WAIT_SLICE)
                except TimeoutError:
                    continue
                except _C.Error:
                    break  # the loop also polls, and finds the error
            os.eventfd_write(self._wake_fd, 1)

    def close(self, timeout: float) -> bool:
        """Stop the thread. True: it has ended and wakes the loop no more."""
        self._watched = None
        self._given.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()


class Worker:
    """See the module. `report` sends a message to rank 0."""

    def __init__(self, settings: Settings, report: Callable[[Done | StepDone], None]) -> None:
        self._settings, self._report = settings, report
        self._layout = settings.layout
        self._device: _C.Device | None = None
        self._gpu: caches.GpuSide | None = None
        self._host: caches.HostSide | None = None
        self.generation = 0  # of the caches on the GPU
        self._waiting: deque[tuple[int, Task, float]] = deque()
        self._running: dict[Kind, deque[_Running]] = {kind: deque() for kind in Kind}
        self._open_event = functools.lru_cache(_MOST_EVENTS)(lambda data: memory.open_event(data, device=self._device))
        self._step: Step | None = None  # runs on _thread, which sets _outcome: why it failed, or empty
        self._outcome: str | None = None
        self._begun = 0.0
        self._thread: threading.Thread | None = None
        self._next_step: Step | None = None  # arrived while another step ran
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable when pump() has work
        self._watchers = {kind: _Watcher(self.wake_fd, f"kvswap-{kind.name}") for kind in Kind}
        self._phase = "starting"
        self.failed = ""  # why the rank could not start

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self._has_caches and self.abandoned == 0

    @property
    def phase(self) -> str:
        if self.abandoned and self._step is None:
            return f"ending {self.abandoned} swaps of tasks that were reported failed"
        return self._phase

    @property
    def _has_caches(self) -> bool:
        return (
            self._step is None
            and self._gpu is not None
            and (self._host is not None or self._layout.num_cpu_blocks == 0)
        )

    @property
    def busy(self) -> int:
        return len(self._waiting) + sum(len(lane) for lane in self._running.values())

    @property
    def abandoned(self) -> int:
        """Number of abandoned swaps: running, but reported failed."""
        return sum(running.abandoned for lane in self._running.values() for running in lane)

    @property
    def handles(self) -> Handles | None:
        """Handles of the caches that this rank created; None if it created none."""
        gpu = self._gpu
        return None if gpu is None or not self._settings.create or self._step is not None else gpu.handles

    # -- steps --------------------------------------------------------------------------------------------------------

    def start(self, state: State) -> None:
        """Open the device; in state NORMAL also allocate."""
        self._begin(Step(number=-1, what="start" if state == State.NORMAL else "open"))

    def begin(self, step: Step) -> None:
        """Begin a step, now or after the running one, which rank 0 may have timed out."""
        if self._step is not None:
            self._next_step = step
        else:
            self._begin(step)

    def _begin(self, step: Step) -> None:
        self._phase = {"start": "allocating", "attach": "attaching", "clear": "clearing"}.get(step.what, step.what)
        self._step, self._outcome, self._begun = step, None, time.monotonic()
        self._thread = threading.Thread(target=self._run, args=[step], name=f"kvswap-{step.what}", daemon=True)
        self._thread.start()

    def _run(self, step: Step) -> None:
        reason = ""
        try:
            self._do(step)
        except Exception as error:  # reported to rank 0
            reason = f"{type(error).__name__}: {error}"
            _log.debug("step %s failed", step.what, exc_info=error)
        self._outcome = reason
        os.eventfd_write(self.wake_fd, 1)

    def _do(self, step: Step) -> None:
        if self._device is None:
            self._device = _C.Device(self._settings.device)
        if step.what == "clear":
            self._clear(self._device, self._settings.step_timeout, self._settings.keep_swap_space)
        elif step.what in ("start", "restore", "attach"):
            self._allocate(self._device, step)

    def _allocate(self, device: _C.Device, step: Step) -> None:
        """Allocate what is missing, so that a repeated step continues after a failure."""
        if self._host is None and self._layout.num_cpu_blocks > 0:
            self._host = caches.HostSide(device, self._layout)
        if self._gpu is None and self._settings.create:
            self._gpu = caches.create(device, self._layout, self._settings.slab, self.generation)
            self.generation = self._gpu.generation
        elif not self._settings.create and step.what != "start":
            self._attach(device, step.handles)

    def _attach(self, device: _C.Device, handles: Handles | None) -> None:
        device.synchronize(self._settings.step_timeout)
        if self._gpu is not None:
            self._gpu.close()
            self._gpu = None
        self._gpu = caches.attach(device, self._layout, handles)
        self.generation = max(self.generation + 1, self._gpu.generation)

    def _clear(self, device: _C.Device, timeout: float, keep_host: bool) -> None:
        """Free the caches, once. Waits for the copies that use them."""
        device.synchronize(timeout)
        self._open_event.cache_clear()
        if self._host is not None:
            # Kept memory counts as unwritten: its keys and values belong to the old weights.
            self._host.written[:] = False
            if not keep_host:
                self._host.close()
                self._host = None
        if self._gpu is not None:
            self._gpu.close()
            self._gpu = None

    def _end_step(self) -> None:
        step, reason = self._step, self._outcome
        if step is None or reason is None:
            return
        self._step = None
        if reason:
            self._phase = f"{step.what} failed: {reason}"[:500]
        else:
            self._phase = "ready" if self._has_caches else "waits for attach()" if step.what == "start" else "cleared"
        _log.info("step=%s rank=%d ok=%s seconds=%.3f phase=%r", step.what, self._layout.rank, not reason,
                  time.monotonic() - self._begun, self._phase)  # fmt: skip
        if step.number >= 0:
            self._report(StepDone(self._layout.rank, step.number, reason))
        elif reason:
            self.failed = reason
        if self._next_step is not None:
            following, self._next_step = self._next_step, None
            self._begin(following)

    # -- tasks --------------------------------------------------------------------------------------------------------

    def take(self, number: int, task: Task) -> None:
        self._waiting.append((number, task, time.monotonic()))

    def refuse(self, task: Task) -> None:
        """A task is not done on this rank: mark its host blocks as unwritten."""
        host = self._host
        if host is not None and task.event_type == Kind.SWAP2CPU:
            host.forget(task.cpu_block_ids)

    def give_up(self) -> int:
        """Drop the waiting tasks and abandon the running ones; returns the number dropped. The rank is not ready before
        the abandoned swaps have ended."""
        dropped = len(self._waiting)
        for _, task, _ in self._waiting:
            self.refuse(task)
        self._waiting.clear()
        for lane in self._running.values():
            for running in lane:
                running.abandoned = True
        return dropped

    def pump(self) -> int:
        """Submit waiting tasks and report ended ones; returns the longest sleep of the loop in milliseconds."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)
        self._end_step()
        self._finish_ended()
        until = time.monotonic() + _MOST_SUBMITTING
        held_up = False
        while self._waiting and not held_up and time.monotonic() < until:
            held_up = not self._submit(*self._waiting[0])
            if not held_up:
                self._waiting.popleft()
        for kind, lane in self._running.items():
            if lane:
                self._watchers[kind].watch(lane[0].transfer)
        if self._waiting and not held_up:
            return 0
        return _RETRY_MS if held_up and self._step is None and not any(self._running.values()) else _IDLE_MS

    def _finish_ended(self) -> None:
        """Report ended swaps in the order of arrival: a swap comes before those that read its blocks."""
        ended = []
        for lane in self._running.values():
            while lane and lane[0].transfer.done():
                ended.append(lane.popleft())
        for running in sorted(ended, key=operator.attrgetter("number")):
            self._finish(running)

    def _submit(self, number: int, task: Task, came: float) -> bool:
        """Submit one task. False: not now. Tasks are submitted in order, since a task may read what an earlier one
        writes."""
        kind = task.event_type
        if not self._has_caches:
            if self._step is None:
                self._fail(number, task, f"no caches: {self.phase}", came)
            return self._step is None
        if len(self._running[kind]) >= _MOST_UNDER_WAY:
            return False
        try:
            if self._gpu is None or self._host is None:
                raise ValueError("there is no host memory (--num_cpu_blocks 0)")
            event = None if task.events is None else task.events[self._layout.rank]
            after = [] if event is None else [self._open_event(event)]
            transfer = caches.submit(self._gpu, self._host, kind, task.gpu_block_ids, task.cpu_block_ids, after)
        except _C.QueueFull:
            return False
        except Exception as error:  # any error fails this task alone
            self._fail(number, task, f"{type(error).__name__}: {error}", came)
            return True
        self._running[kind].append(_Running(number, task, transfer, came))
        return True

    def _fail(self, number: int, task: Task, reason: str, came: float) -> None:
        """Report a task of which nothing was queued as failed."""
        self.refuse(task)
        self._report(Done(self._layout.rank, number, reason, 0, time.monotonic() - came))

    def _finish(self, running: _Running) -> None:
        error = running.transfer.error
        seconds = time.monotonic() - running.begun
        if error is not None and running.task.event_type == Kind.SWAP2GPU:
            self._clear_failures(running.task.gpu_block_ids)
        if running.abandoned:
            _log.info("a swap of a task that was reported failed has ended after %.3f s: %s", seconds, error or "ok")
            return
        reason, nbytes = ("", running.transfer.nbytes) if error is None else (f"{type(error).__name__}: {error}", 0)
        self._report(Done(self._layout.rank, running.number, reason, nbytes, seconds))

    def _clear_failures(self, gpu_ids: list[int]) -> None:
        """Clear the failure record of GPU blocks in the pools. Rank 0 keeps the record instead: the engine's kernels
        rewrite these blocks, and only rank 0 learns of that."""
        gpu = self._gpu
        with contextlib.suppress(_C.Error):  # on a lost device every swap fails anyway
            for pool in gpu.pools if gpu is not None else ():
                _C.note_access(0, pool, np.asarray(gpu_ids, np.int64), True)

    def close(self, timeout: float) -> None:
        """Free everything. Call when no task is under way."""
        if self._thread is not None:
            self._thread.join(timeout)
            self._next_step = None
            self._end_step()
        if self._device is not None and self._step is None:
            self._clear(self._device, timeout, keep_host=False)
        ended = [watcher.close(timeout) for watcher in self._watchers.values()]
        if all(ended) and self._step is None:
            os.close(self.wake_fd)
