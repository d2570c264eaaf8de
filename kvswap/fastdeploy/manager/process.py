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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvswap import _C
from kvswap.fastdeploy.manager import messages, places
from kvswap.fastdeploy.manager.arguments import Settings
from kvswap.fastdeploy.manager.coordinator import MOST_CLIENTS, Coordinator, most_tasks
from kvswap.fastdeploy.manager.door import Door, raise_limit
from kvswap.fastdeploy.manager.messages import Answer, Beat, Do, Done, Hello, State, Step, StepDone, ToRank
from kvswap.fastdeploy.manager.metrics import Metrics
from kvswap.fastdeploy.manager.worker import Worker

__all__ = ["run"]

_log = logging.getLogger("kvswap.manager")

_BEAT_EVERY = 0.5
_FULL_MS = 5  # until unsent messages are tried again
_KEPT_MESSAGES = 8192  # room in a socket's queues, beside tasks
_LAST_WORDS = 3.0  # seconds that clients have to read rank 0's last messages
_SPARE_CONNECTIONS = 64  # that are not clients, or not yet
_DECODE_ERRORS = (msgspec.MsgspecError, RecursionError, ValueError)


def _request_in(frame: zmq.Frame) -> int:
    """The request number in a malformed message, so that its caller can be answered; 0 if there is none."""
    try:
        return msgspec.msgpack.decode(frame.buffer, type=messages.Number).request
    except _DECODE_ERRORS:
        return 0


@dataclass
class _Connection:
    """A process connected to rank 0, a client or another rank; for the other ranks, rank 0. watch: a descriptor."""

    pid: int
    watch: int
    rank: int = -1


class _Process:
    """A rank's loop, its socket and its worker. A subclass says what is received and sent."""

    _tell: Callable[[], None]  # tells rank 0 that this rank is alive
    _report: Callable[[Done | StepDone], None]
    _go_round: Callable[[int], None]  # sends what is to be sent, sleeps some milliseconds, and handles what has arrived
    _take_one: Callable[[list[zmq.Frame], places.Peer], None]  # handles a message
    _unfinished: Callable[[], bool]  # once it is to end: whether to go on
    _under_way: Callable[[], int]  # the number of tasks that have not ended

    def __init__(self, settings: Settings, signals: list[int], kind: int) -> None:
        """signals: those that ask the process to end; a handler adds them."""
        self._settings, self._signals, self._rank = settings, signals, settings.layout.rank
        self._metrics = Metrics(settings.metrics_port, self._rank)
        self._path = places.socket_path(settings.directory)
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        room = _KEPT_MESSAGES + most_tasks(settings.queue_limit)  # for all tasks: a busy rank must not count as lost
        for option, value in ((zmq.SNDHWM, room), (zmq.RCVHWM, room), (zmq.LINGER, 2000)):
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_NBYTES)
        self._warned = 0.0  # time of the last warning about a foreign uid
        self._worker = Worker(settings, self._report)
        self._poller = zmq.Poller()
        for each in (self._socket, self._worker.wake_fd):
            self._poller.register(each, zmq.POLLIN)

    def run(self) -> int:
        deadline, beaten = None, 0.0
        try:
            while deadline is None or (time.monotonic() < deadline and self._unfinished()):
                sleep_ms = self._worker.pump()
                if self._worker.failed:
                    raise _C.Error(self._worker.failed)
                if time.monotonic() - beaten > _BEAT_EVERY:
                    beaten = time.monotonic()
                    self._tell()
                self._go_round(sleep_ms)
                if self._signals:
                    deadline = deadline or time.monotonic() + self._settings.stop_timeout
                    self._tell()
            return 0 if self._under_way() == 0 else 1
        finally:
            self._close()

    def _beat(self) -> Beat:
        worker = self._worker
        facts = worker.ready, worker.phase, worker.generation, worker.handles, worker.abandoned
        return Beat(self._rank, *facts, leaving=bool(self._signals))

    def _take(self) -> None:
        for frames, peer in places.received(self._socket):
            if peer.ours:
                self._take_one(frames, peer)
                continue
            self._metrics.count("foreign_uid")
            if time.monotonic() - self._warned > 1.0:  # at most once a second
                self._warned = time.monotonic()
                _log.warning("ignored a message of %s", peer)

    def _do(self, message: ToRank) -> None:
        if isinstance(message, Do):
            self._worker.take(message.number, message.task)
        elif isinstance(message, Step):
            self._worker.begin(message)

    def _close(self) -> None:
        with contextlib.suppress(Exception):  # the process ends, and the driver frees what is left
            self._worker.close(self._settings.stop_timeout)
        self._close_socket()
        self._metrics.close()

    def _close_socket(self) -> None:
        self._socket.close()
        self._context.term()


class Rank0(_Process):
    """Rank 0: serves the clients and the other ranks."""

    def __init__(self, settings: Settings, signals: list[int]) -> None:
        super().__init__(settings, signals, zmq.ROUTER)
        self._state_file = settings.directory / "state"
        state = _read_state(self._state_file)
        self._path.unlink(missing_ok=True)  # left by a killed process: this process holds the lock
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        limit = raise_limit()
        most = MOST_CLIENTS + settings.ranks + _SPARE_CONNECTIONS
        self._door = Door(self._socket, self._path, min(most, max(_SPARE_CONNECTIONS // 8, limit // 4)))
        self._socket.bind(f"ipc://{self._path}")
        self._connections: dict[bytes, _Connection] = {}
        self._coordinator = Coordinator(settings, state, self._send, self._to_rank, self._keep_state, self._metrics)
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

    def _to_rank(self, rank: int, message: ToRank) -> None:
        if rank == 0:
            self._do(message)
        for name, connection in list(self._connections.items()):
            if connection.rank == rank > 0 and not self._send(name, message):
                self._coordinator.lost(rank, f"(process {connection.pid}) takes no messages", gone=False)

    def _tell(self) -> None:
        self._coordinator.beat(self._beat())

    def _report(self, message: Done | StepDone) -> None:
        if isinstance(message, Done):
            self._coordinator.done(message)
        else:
            self._tell()  # first the Beat, which says that this rank is ready
            self._coordinator.step_done(message)

    # -- messages in --------------------------------------------------------------------------------------------------

    def _take_one(self, frames: list[zmq.Frame], peer: places.Peer) -> None:
        name = frames[0].bytes
        if peer.unseen:
            request = _request_in(frames[-1])  # a rank's messages have none
            self._send(name, Answer(request, "refused", peer.unseen) if request else messages.Refuse(peer.unseen))
            return
        try:
            if len(frames) != 2:
                raise ValueError(f"{len(frames) - 1} parts: a message has one")
            message = messages.to_server.decode(frames[1].buffer)
        except _DECODE_ERRORS as error:
            self._metrics.count("malformed")
            _log.debug("malformed message of process %d: %s", peer.pid, error)
            self._send(name, Answer(_request_in(frames[-1]), "malformed", str(error)[:500]))
            return
        self._handle(name, peer.pid, message)

    def _handle(self, name: bytes, pid: int, message: Any) -> None:
        connection = self._connections.get(name)
        if connection is None and (connection := self._admit(name, pid)) is None:
            self._send(name, Answer(getattr(message, "request", 0), "refused", f"{MOST_CLIENTS} clients are here"))
            return
        if isinstance(message, messages.Bye):
            self._forget(name)
        elif isinstance(message, Hello):
            self._hello(name, connection, message)
        elif isinstance(message, Beat | Done | StepDone):
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
        connection = self._connections[name] = _Connection(pid, places.watch_process(pid))
        self._poller.register(connection.watch, zmq.POLLIN)
        return connection

    def _hello(self, name: bytes, connection: _Connection, message: Hello) -> None:
        ours, ranks = self._settings.layout.describe(), self._settings.ranks
        if not 0 < message.rank < ranks:
            self._send(name, messages.Refuse(f"rank {message.rank}: rank 0 was started with --mp_num {ranks}"))
        elif message.shape != ours:
            self._send(name, messages.Refuse(f"its caches are {message.shape}; those of rank 0 are {ours}"))
        else:
            for other, known in list(self._connections.items()):
                if known.rank == message.rank and other != name:
                    self._drop(other)
            connection.rank = message.rank
            self._coordinator.hello(message.rank, connection.pid)
            self._send(name, messages.Welcome(self._coordinator.state))

    def _from_rank(self, name: bytes, connection: _Connection, message: Beat | Done | StepDone) -> None:
        if connection.rank < 0 or connection.rank != message.rank or not self._coordinator.ranks[message.rank].here:
            self._send(name, messages.Unknown())
        elif isinstance(message, Beat):
            self._coordinator.beat(message)
        elif isinstance(message, Done):
            self._coordinator.done(message)
        else:
            self._coordinator.step_done(message)

    def _forget(self, name: bytes) -> None:
        """A process has ended: drop its connection."""
        connection = self._drop(name)
        if connection is not None and connection.rank >= 0:
            self._coordinator.lost(connection.rank, f"(process {connection.pid}) died")
        self._coordinator.gone(name)

    def _drop(self, name: bytes) -> _Connection | None:
        connection = self._connections.pop(name, None)
        if connection is not None:
            self._poller.unregister(connection.watch)
            os.close(connection.watch)
        return connection

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _under_way(self) -> int:
        return self._coordinator.under_way

    def _go_round(self, sleep_ms: int) -> None:
        self._coordinator.stopping = bool(self._signals)
        self._coordinator.tick()
        self._wait(sleep_ms)

    def _unfinished(self) -> bool:
        return self._coordinator.under_way > 0

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
            self._coordinator.flush()
            clients = {name for name, connection in self._connections.items() if connection.rank < 0}
            if not clients:
                return
            for name in clients - asked:
                if not self._coordinator.keeps(name) and self._send(name, messages.Closing()):
                    asked.add(name)
            self._wait(_FULL_MS)

    def _close(self) -> None:
        self._coordinator.abandon("the manager was stopped")
        with contextlib.suppress(zmq.ZMQError):
            self._part()
        for name in list(self._connections):
            self._drop(name)
        super()._close()

    def _close_socket(self) -> None:
        self._door.close()
        super()._close_socket()
        for path in (self._path, self._state_file):
            path.unlink(missing_ok=True)


class RankN(_Process):
    """Any rank but 0: obeys rank 0."""

    def __init__(self, settings: Settings, signals: list[int]) -> None:
        super().__init__(settings, signals, zmq.DEALER)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # do not queue messages while there is no connection
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.connect(f"ipc://{self._path}")
        self._welcome = self._started = self._left = False
        self._cut_off = False  # a report could not be sent
        self._looped = time.monotonic()
        self._told = 0  # generation of the handles that were sent to rank 0
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
        if not self._send(message):  # the queue has room for all reports: there is no connection any more
            self._cut_off = True

    def _tell(self) -> None:
        """Send a Beat, with the handles if they are new; before Welcome, Hello."""
        if not self._welcome:
            self._send(Hello(self._rank, self._settings.layout.describe()))
            return
        beat = self._beat()
        if self._told == beat.generation:
            beat.handles = None
        if self._send(beat) and beat.handles is not None:
            self._told = beat.generation

    def _take_one(self, frames: list[zmq.Frame], peer: places.Peer) -> None:
        if peer.unseen:
            raise _refused(peer.unseen)
        try:
            message = messages.to_rank.decode(frames[0].buffer)
        except _DECODE_ERRORS as error:
            _log.debug("malformed message of rank 0: %s", error)
            return
        self._watch(peer.pid)
        self._handle(message)

    def _watch(self, pid: int) -> None:
        """Watch the process of rank 0; 0: none."""
        if self._rank0 is not None and self._rank0.pid != pid:
            os.close(self._rank0.watch)
            self._rank0 = None
        if self._rank0 is None and pid:
            self._rank0 = _Connection(pid, places.watch_process(pid))

    def _handle(self, message: ToRank) -> None:
        if isinstance(message, Do | Step):
            if self._welcome:
                self._do(message)
            elif isinstance(message, Do):  # sent before rank 0 lost this rank: rank 0 has reported the task failed
                self._worker.refuse(message.task)
        elif isinstance(message, messages.Welcome):
            self._welcome, self._told = True, 0
            if not self._started:
                self._started = True
                self._worker.start(message.state)
        elif isinstance(message, messages.Unknown):
            self._start_over("rank 0 does not know this rank")
        elif isinstance(message, messages.Left):
            self._left = True
        else:
            raise _refused(message.message)

    def _start_over(self, why: str) -> None:
        """Drop unsubmitted tasks and connect anew: rank 0 or its clients count those tasks as failed."""
        if self._welcome:
            _log.warning("%s: %d tasks that were not begun are dropped", why, self._worker.give_up())
            self._welcome = False

    def _look_around(self) -> None:
        """Detect that this process was stopped for long, or that rank 0 has died."""
        now = time.monotonic()
        if now - self._looped > self._settings.rank_timeout / 2:
            self._start_over(f"this rank was away for {now - self._looped:.1f} s")
        self._looped = now
        if self._cut_off:
            self._cut_off = False
            self._start_over("rank 0 takes no messages")
        if self._rank0 is not None and zmq.select([self._rank0.watch], [], [], 0)[0]:
            self._start_over(f"rank 0 (process {self._rank0.pid}) has ended")
            self._watch(0)

    def _under_way(self) -> int:
        return self._worker.busy

    def _go_round(self, sleep_ms: int) -> None:
        self._poller.poll(sleep_ms)
        self._take()
        self._look_around()

    def _unfinished(self) -> bool:
        """Until rank 0 sends Left or is not connected."""
        return self._worker.busy > 0 or (self._welcome and not self._left)

    def _close(self) -> None:
        self._watch(0)
        super()._close()


def _refused(why: str) -> _C.Error:
    return _C.Error(f"rank 0 refuses this rank: {why}")


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
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.append(number))
    try:
        kind = Rank0 if settings.layout.rank == 0 else RankN
        status = kind(settings, signals).run()
        _log.info("step=stop rank=%d ok=%s", settings.layout.rank, status == 0)
        return status
    finally:
        lock.close()
