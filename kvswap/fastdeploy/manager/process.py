"""The processes' loops: Rank0 serves the clients and the other ranks, RankN obeys rank 0.

A loop receives messages, lets the worker submit and report, and then sleeps until a message arrives, a swap ends or a
connected process ends; at most 50 ms. Signal handlers only set a flag.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvswap import _C
from kvswap.fastdeploy.manager import messages, places
from kvswap.fastdeploy.manager.arguments import Settings
from kvswap.fastdeploy.manager.coordinator import MOST_CLIENTS, Coordinator, most_tasks
from kvswap.fastdeploy.manager.door import Door, raise_limit
from kvswap.fastdeploy.manager.messages import (
    Answer,
    Beat,
    Bye,
    Closing,
    Do,
    Done,
    Hello,
    Leave,
    Left,
    Refuse,
    State,
    Step,
    StepDone,
    ToClient,
    ToRank,
    Unknown,
    Welcome,
)
from kvswap.fastdeploy.manager.metrics import Metrics
from kvswap.fastdeploy.manager.worker import Worker

__all__ = ["run"]

_log = logging.getLogger("kvswap.manager")

_BEAT_EVERY = 0.5
_FULL_MS = 5  # until unsent messages are tried again
_KEPT_MESSAGES = 4096  # room in a socket's queues, beside tasks
_SILENT = 3.0  # seconds without a delivered message after which an ending manager stops waiting for clients
_LAST_WORDS = 1.0  # seconds that clients have to read rank 0's last messages
_SPARE_CONNECTIONS = 64  # that are not clients, or not yet
_DECODE_ERRORS = (msgspec.MsgspecError, RecursionError, ValueError)


class Stop:
    """A flag that SIGTERM and SIGINT set."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True


def _socket(context: zmq.Context[Any], kind: int, settings: Settings) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_NBYTES)
    room = _KEPT_MESSAGES + most_tasks(settings.queue_limit)  # room for all tasks: a busy rank must not count as lost
    socket.setsockopt(zmq.SNDHWM, room)
    socket.setsockopt(zmq.RCVHWM, room)
    socket.setsockopt(zmq.LINGER, 2000)
    return socket


def _beat(worker: Worker, settings: Settings) -> Beat:
    """This rank's Beat, without handles."""
    return Beat(settings.layout.rank, worker.ready, worker.phase, worker.generation, abandoned=worker.abandoned)


def _request_in(frame: zmq.Frame) -> int:
    """The request number in a malformed message, so that its caller can be answered; 0 if there is none."""
    try:
        found = msgspec.msgpack.decode(frame.buffer)
        number = found.get("request", 0) if isinstance(found, dict) else 0
    except _DECODE_ERRORS:
        return 0
    return number if isinstance(number, int) and 0 <= number < 1 << 62 else 0


class _Connection:
    """A process connected to rank 0: a client or another rank."""

    def __init__(self, pid: int) -> None:
        self.pid, self.watch, self.rank = pid, places.watch_process(pid), -1

    def close(self) -> None:
        if self.watch is not None:
            os.close(self.watch)
            self.watch = None


class Rank0:
    """Rank 0: serves the clients and the other ranks."""

    def __init__(self, settings: Settings, stop: Stop) -> None:
        self._settings, self._stop = settings, stop
        self._metrics = Metrics(settings.metrics_port, settings.layout.rank)
        self._state_file = settings.directory / "state"
        state = _read_state(self._state_file)
        self._path = places.socket_path(settings.directory)
        self._path.unlink(missing_ok=True)  # left by a killed process: this process holds the lock
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = _socket(self._context, zmq.ROUTER, settings)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        limit = raise_limit()
        most = MOST_CLIENTS + settings.ranks + _SPARE_CONNECTIONS
        self._door = Door(self._socket, self._path, min(most, max(_SPARE_CONNECTIONS // 8, limit // 4)))
        self._socket.bind(f"ipc://{self._path}")
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._connections: dict[bytes, _Connection] = {}
        self._warned = 0.0  # time of the last warning about a foreign uid
        self._undelivered, self._moved = -1, 0.0  # while ending: number of undelivered messages, and since when
        self._coordinator = Coordinator(
            settings, state, self._to_client, self._to_rank, self._keep_state, self._metrics
        )
        self._worker = Worker(settings, self._report)
        self._poller.register(self._worker.wake_fd, zmq.POLLIN)
        self._coordinator.hello(0, os.getpid())
        self._worker.start(state)

    def _keep_state(self, state: State) -> None:
        """Save the state, so that a restart after kill -9 does not assume that the engine's caches are open."""
        new = self._state_file.with_suffix(".new")
        new.unlink(missing_ok=True)
        fd = places.open_own(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with os.fdopen(fd, "w") as file:
            file.write(state.name)
        new.replace(self._state_file)

    # -- messages out -------------------------------------------------------------------------------------------------

    def _send(self, client: bytes, message: Any) -> bool:
        """Send a message. False: it cannot be sent now. A message to an ended process is dropped."""
        try:
            self._socket.send_multipart([client, messages.encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(client)
        return True

    def _to_client(self, client: bytes, message: ToClient) -> bool:
        return self._send(client, message)

    def _to_rank(self, rank: int, message: ToRank) -> None:
        if rank == 0:
            if isinstance(message, Do):
                self._worker.take(message.number, message.task)
            elif isinstance(message, Step):
                self._worker.begin(message)
            return
        for name, connection in list(self._connections.items()):
            if connection.rank == rank and not self._send(name, message):
                self._coordinator.lost(rank, f"(process {connection.pid}) takes no messages", gone=False)

    def _tell(self) -> None:
        beat = _beat(self._worker, self._settings)
        beat.handles = self._worker.handles
        self._coordinator.beat(beat)

    def _report(self, message: Done | StepDone) -> None:
        if isinstance(message, Done):
            self._coordinator.done(message)
        else:
            self._tell()  # first the Beat, which says that this rank is ready
            self._coordinator.step_done(message)

    # -- messages in --------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        for frames, peer in places.received(self._socket):
            if not peer.ours:
                self._foreign_uid(peer)
                continue
            name = frames[0].bytes
            if peer.unseen:
                request = _request_in(frames[-1])  # a rank's messages have none
                self._send(name, Answer(request, "refused", peer.unseen) if request else Refuse(peer.unseen))
                continue
            try:
                if len(frames) != 2:
                    raise ValueError(f"{len(frames) - 1} parts: a message has one")
                message = messages.to_server.decode(frames[1].buffer)
            except _DECODE_ERRORS as error:
                self._metrics.count("malformed")
                _log.debug("malformed message of process %d: %s", peer.pid, error)
                self._send(name, Answer(_request_in(frames[-1]), "malformed", str(error)[:500]))
                continue
            self._handle(name, peer.pid, message)

    def _foreign_uid(self, peer: places.Peer) -> None:
        self._metrics.count("foreign_uid")
        if time.monotonic() - self._warned > 1.0:  # at most once a second
            self._warned = time.monotonic()
            _log.warning("ignored a message of %s", peer)

    def _handle(self, name: bytes, pid: int, message: Any) -> None:
        connection = self._connections.get(name)
        if connection is None and (connection := self._admit(name, pid)) is None:
            self._send(name, Answer(getattr(message, "request", 0), "refused", f"{MOST_CLIENTS} clients are here"))
            return
        if isinstance(message, Bye):
            self._forget(name)
        elif isinstance(message, Hello):
            self._hello(name, connection, message)
        elif isinstance(message, Beat | Done | StepDone | Leave):
            self._from_rank(name, connection, message)
        else:
            self._coordinator.ask(name, message)

    def _admit(self, name: bytes, pid: int) -> _Connection | None:
        """Register a connection. None: there are too many, even without those whose process has ended."""
        most = MOST_CLIENTS + self._settings.ranks
        if len(self._connections) >= most:
            for known in list(self._connections):
                self._send(known, Answer(0, "ok", "are you there?"))
        if len(self._connections) >= most:
            return None
        connection = self._connections[name] = _Connection(pid)
        if connection.watch is not None:
            self._poller.register(connection.watch, zmq.POLLIN)
        return connection

    def _hello(self, name: bytes, connection: _Connection, message: Hello) -> None:
        ours = self._settings.layout.describe()
        if not 0 < message.rank < self._settings.ranks:
            self._send(name, Refuse(f"rank {message.rank}: rank 0 was started with --mp_num {self._settings.ranks}"))
        elif message.shape != ours:
            self._send(name, Refuse(f"its caches are {message.shape}; those of rank 0 are {ours}"))
        else:
            for other, known in list(self._connections.items()):
                if known.rank == message.rank and other != name:
                    self._drop(other)
            connection.rank = message.rank
            self._coordinator.hello(message.rank, connection.pid)
            self._send(name, Welcome(self._coordinator.state))

    def _from_rank(self, name: bytes, connection: _Connection, message: Beat | Done | StepDone | Leave) -> None:
        if connection.rank < 0 or connection.rank != message.rank or not self._coordinator.ranks[message.rank].here:
            self._send(name, Unknown())
        elif isinstance(message, Beat):
            self._coordinator.beat(message)
        elif isinstance(message, Done):
            self._coordinator.done(message)
        elif isinstance(message, StepDone):
            self._coordinator.step_done(message)
        else:
            self._coordinator.leave(message.rank)

    def _forget(self, name: bytes) -> None:
        """A process has ended: drop its connection."""
        connection = self._drop(name)
        if connection is not None and connection.rank >= 0:
            self._coordinator.lost(connection.rank, f"(process {connection.pid}) died")
        self._coordinator.gone(name)

    def _drop(self, name: bytes) -> _Connection | None:
        connection = self._connections.pop(name, None)
        if connection is not None:
            if connection.watch is not None:
                self._poller.unregister(connection.watch)
            connection.close()
        return connection

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        try:
            deadline = None
            beaten = 0.0
            while deadline is None or self._unfinished(deadline):
                sleep_ms = self._worker.pump()
                if self._worker.failed:
                    raise _C.Error(self._worker.failed)
                if time.monotonic() - beaten > _BEAT_EVERY:
                    beaten = time.monotonic()
                    self._tell()
                self._coordinator.tick()
                self._wait(sleep_ms)
                if self._stop.asked and deadline is None:
                    self._coordinator.stopping = True
                    deadline = time.monotonic() + self._settings.stop_timeout
            return 0 if self._coordinator.under_way == 0 else 1
        finally:
            self._close()

    def _unfinished(self, deadline: float) -> bool:
        """Whether to keep waiting: for tasks until the deadline, for messages while clients still receive some."""
        now, undelivered = time.monotonic(), self._coordinator.undelivered
        if undelivered != self._undelivered:
            self._undelivered, self._moved = undelivered, now
        left = self._coordinator.under_way > 0 or (undelivered > 0 and now - self._moved < _SILENT)
        return left and now < deadline

    def _wait(self, sleep_ms: int) -> None:
        ready = self._poller.poll(min(sleep_ms, _FULL_MS) if self._coordinator.undelivered else sleep_ms)
        gone = {fd for fd, _ in ready if isinstance(fd, int)}
        self._take()  # first the messages that an ended process had sent
        for name, connection in list(self._connections.items()):
            if connection.watch in gone:
                self._forget(name)

    def _part(self) -> None:
        """Wait until the clients have read their messages, or the time is over."""
        self._coordinator.stopping = True
        self._poller.unregister(self._worker.wake_fd)
        until = time.monotonic() + _LAST_WORDS
        asked: set[bytes] = set()
        while time.monotonic() < until:
            clients = {name for name, connection in self._connections.items() if connection.rank < 0}
            asked |= {name for name in clients - asked if self._send(name, Closing())}
            if not clients:
                return
            self._wait(_FULL_MS)

    def _close(self) -> None:
        self._coordinator.abandon("the manager was stopped")
        self._coordinator.flush()
        with contextlib.suppress(zmq.ZMQError):
            self._part()
        for name in list(self._connections):
            self._drop(name)
        with contextlib.suppress(Exception):  # the process ends, and the driver frees what is left
            self._worker.close(self._settings.stop_timeout)
        self._door.close()
        self._socket.close()
        self._context.term()
        for path in (self._path, self._state_file):
            path.unlink(missing_ok=True)
        self._metrics.close()


class RankN:
    """Any rank but 0: obeys rank 0."""

    def __init__(self, settings: Settings, stop: Stop) -> None:
        self._settings, self._stop = settings, stop
        self._metrics = Metrics(settings.metrics_port, settings.layout.rank)
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = _socket(self._context, zmq.DEALER, settings)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # do not queue messages while there is no connection
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.connect(f"ipc://{places.socket_path(settings.directory)}")
        self._worker = Worker(settings, self._report)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._worker.wake_fd, zmq.POLLIN)
        self._reports: deque[Done | StepDone] = deque()  # unsent reports; at most one for each task and step received
        self._welcome = self._started = self._left = False
        self._looped = time.monotonic()
        self._told = 0  # generation of the handles that were sent to rank 0
        self._refused = ""
        self._rank0: _Connection | None = None

    def _send(self, message: Any) -> bool:
        try:
            self._socket.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _report(self, message: Done | StepDone) -> None:
        if isinstance(message, StepDone):
            self._tell()  # first the Beat, which says that this rank is ready
        self._reports.append(message)
        self._send_reports()

    def _send_reports(self) -> None:
        """Send reports in order, until one cannot be sent now."""
        while self._reports and self._send(self._reports[0]):
            self._reports.popleft()

    def _tell(self) -> None:
        """Send a Beat, with the handles if they are new."""
        beat = _beat(self._worker, self._settings)
        if self._told != beat.generation:
            beat.handles = self._worker.handles
        if self._send(beat) and beat.handles is not None:
            self._told = beat.generation

    def _take(self) -> None:
        for (frame, *_), peer in places.received(self._socket):
            if not peer.ours:
                self._metrics.count("foreign_uid")
                continue
            if peer.unseen:
                self._refused = peer.unseen
                return
            try:
                message = messages.to_rank.decode(frame.buffer)
            except _DECODE_ERRORS as error:
                _log.debug("malformed message of rank 0: %s", error)
                continue
            self._watch(peer.pid)
            self._handle(message)

    def _watch(self, pid: int) -> None:
        if self._rank0 is None or self._rank0.pid != pid:
            if self._rank0 is not None:
                self._rank0.close()
            self._rank0 = _Connection(pid)

    def _handle(self, message: ToRank) -> None:
        if isinstance(message, Do | Step) and not self._welcome:
            if isinstance(message, Do):  # sent before rank 0 lost this rank: rank 0 has reported the task failed
                self._worker.refuse(message.task)
        elif isinstance(message, Do):
            self._worker.take(message.number, message.task)
        elif isinstance(message, Step):
            self._worker.begin(message)
        elif isinstance(message, Welcome):
            self._welcome, self._told = True, 0
            if not self._started:
                self._started = True
                self._worker.start(State(message.state))
        elif isinstance(message, Unknown):
            self._start_over("rank 0 does not know this rank")
        elif isinstance(message, Left):
            self._left = True
        else:
            self._refused = message.message

    def _start_over(self, why: str) -> None:
        """Drop unsubmitted tasks and connect anew: rank 0 or its clients count those tasks as failed."""
        if self._welcome:
            _log.warning("%s: %d tasks that were not begun are dropped", why, self._worker.give_up())
            self._reports.clear()
            self._welcome = False

    def _look_around(self) -> None:
        """Detect that this process was stopped for long, or that rank 0 has died."""
        now = time.monotonic()
        if now - self._looped > self._settings.rank_timeout / 2:
            self._start_over(f"this rank was away for {now - self._looped:.1f} s")
        self._looped = now
        if self._rank0 is not None and _has_ended(self._rank0):
            self._start_over(f"rank 0 (process {self._rank0.pid}) has ended")
            self._rank0.close()
            self._rank0 = None

    def run(self) -> int:
        rank, said, deadline = self._settings.layout.rank, 0.0, None
        try:
            while deadline is None or self._unfinished(deadline):
                self._look_around()
                sleep_ms = self._worker.pump()
                if self._worker.failed:
                    raise _C.Error(self._worker.failed)
                if self._refused:
                    raise _C.Error(f"rank 0 refuses this rank: {self._refused}")
                if time.monotonic() - said > _BEAT_EVERY:
                    said = time.monotonic()
                    if self._welcome:
                        self._tell()
                    else:
                        self._send(Hello(rank, self._settings.layout.describe()))
                self._send_reports()
                self._poller.poll(min(sleep_ms, _FULL_MS) if self._reports else sleep_ms)
                self._take()
                if self._stop.asked:
                    deadline = deadline or time.monotonic() + self._settings.stop_timeout
                    self._send(Leave(rank))
            return 0 if self._worker.busy == 0 else 1
        finally:
            self._close()

    def _unfinished(self, deadline: float) -> bool:
        """Whether to keep waiting: until rank 0 sends Left or is not connected."""
        if time.monotonic() > deadline:
            return False
        if not self._welcome:
            return self._worker.busy > 0
        return not self._left or self._worker.busy > 0

    def _close(self) -> None:
        if self._rank0 is not None:
            self._rank0.close()
        with contextlib.suppress(Exception):
            self._worker.close(self._settings.stop_timeout)
        self._socket.close()
        self._context.term()
        self._metrics.close()


def _has_ended(connection: _Connection) -> bool:
    return connection.watch is not None and bool(zmq.select([connection.watch], [], [], 0)[0])


def _read_state(path: Path) -> State:
    try:
        with open(places.open_own(path), "rb") as file:
            return State[file.read(32).decode("ascii", "replace")]
    except (FileNotFoundError, KeyError):
        return State.NORMAL


def run(settings: Settings) -> int:
    """Run a rank until SIGTERM; returns the exit status. kvswap.Error: the rank cannot start."""
    os.umask(0o077)
    places.prepare_directory(settings.directory)
    lock = places.Lock(settings.directory, settings.layout.rank)
    stop = Stop()
    try:
        kind: Callable[[Settings, Stop], Rank0 | RankN] = Rank0 if settings.layout.rank == 0 else RankN
        status = kind(settings, stop).run()
        _log.info("step=stop rank=%d ok=%s", settings.layout.rank, status == 0)
        return status
    finally:
        lock.close()
