"""A client's control connections to all nodes. One thread owns the sockets; requests are futures.

A peer is up between the node's Welcome and the end of its connection. ZeroMQ's heartbeats end the connection of a node
that is silent, so that no peer is up for longer than HEARTBEAT after its node has died; then every unanswered request
fails at once. ZeroMQ connects again by itself, and the next Hello finds the node's new run.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvswap import _C

from . import _messages as m
from ._placement import Node
from ._secrets import Secret, curve_client

_log = logging.getLogger("kvswap.remote")

HEARTBEAT = 0.6  # seconds of silence that end a connection
_PING = 0.2
_POLL_MS = 100
_AT_ONCE = 64
_MOST_UNANSWERED = 1024  # of one node
_SLOW_SECONDS = 1.0  # a node that did not answer in time is asked nothing for so long
_CLOSE = 5.0
_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class NodeDown(_C.Error):
    """The node has died, or cannot be reached: its blocks are missing until it returns."""


class Peer:
    """A node as this client sees it. Fields are the link's: read welcome once."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.welcome: m.Welcome | None = None  # None: down
        self.run = 0  # counts the node's runs that were met
        self.why = "it has not answered yet"
        self.slow_until = 0.0
        self.answers: dict[int, concurrent.futures.Future[Any]] = {}  # guarded by Link._lock, as the next
        self.outgoing: deque[bytes] = deque()
        self.socket: Any = None  # the thread's, as the next
        self.monitor: Any = None
        self.warned = ""

    def down(self) -> NodeDown:
        return NodeDown(f"node {self.node.placed_by} is down: {self.why}")


class Link:
    """up(peer, welcome), down(peer): called in the thread. block_nbytes: that of the blocks; 0: none are moved."""

    def __init__(
        self,
        pair: Secret,
        block_nbytes: int,
        up: Callable[[Peer, m.Welcome], None],
        down: Callable[[Peer], None],
    ) -> None:
        self._pair, self._block_nbytes = pair, block_nbytes
        self._up, self._down = up, down
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._changes: deque[tuple[str, Peer]] = deque()  # nodes to connect to, and to leave
        self._peers: list[Peer] = []  # the thread's
        self._closed = False
        self._owner = os.getpid()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvswap-remote-link", daemon=True)
        self._thread.start()

    # -- from any thread ----------------------------------------------------------------------------------------------

    def connect(self, nodes: Iterable[Node]) -> list[Peer]:
        peers = [Peer(node) for node in nodes]
        self._changes.extend(("connect", peer) for peer in peers)
        self._tell()
        return peers

    def leave(self, peers: Iterable[Peer]) -> None:
        self._changes.extend(("leave", peer) for peer in peers)
        self._tell()

    def ask(self, peer: Peer, make: Callable[[int], m.Message]) -> concurrent.futures.Future[Any]:
        """Send make(number of the request). The future's result is the answer; NodeDown."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            if self._closed or peer.welcome is None:
                raise peer.down()
            if peer.slow_until > time.monotonic() or len(peer.answers) >= _MOST_UNANSWERED:
                raise NodeDown(f"node {peer.node.placed_by} does not answer in time")
            number = next(self._numbers)
            peer.answers[number] = future
            peer.outgoing.append(m.encode(make(number)))
        self._tell()
        return future

    def tell(self, peer: Peer, message: m.Message) -> None:
        """Send a message that has no answer; where the node is down, nothing."""
        with self._lock:
            if peer.welcome is None or len(peer.outgoing) >= _MOST_UNANSWERED:
                return
            peer.outgoing.append(m.encode(message))
        self._tell()

    def answer(self, peer: Peer, future: concurrent.futures.Future[Any], end: float) -> Any:
        """Wait for it until `end` (of time.monotonic()). NodeDown: it did not come."""
        try:
            found = future.result(max(0.0, end - time.monotonic()))
        except concurrent.futures.TimeoutError:
            peer.slow_until = time.monotonic() + _SLOW_SECONDS
            with self._lock:
                for number in [number for number, each in peer.answers.items() if each is future]:
                    del peer.answers[number]
            raise NodeDown(f"node {peer.node.placed_by} did not answer in time") from None
        if isinstance(found, m.Refused):
            raise _C.Error(f"node {peer.node.placed_by} refused: {found.message}")
        return found

    def stop(self) -> None:
        """Never waits; the garbage collector may call, on any thread and under any lock."""
        self._closed = True
        if os.getpid() == self._owner:
            self._tell()

    def close(self) -> None:
        self.stop()
        self._thread.join(_CLOSE)

    def _tell(self) -> None:
        os.eventfd_write(self._wake, 1)

    def __del__(self) -> None:
        """Not earlier: a descriptor that is closed may be another's when it is written to."""
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._wake)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        try:
            while not self._closed:
                self._once(context, poller)
        finally:
            self._closed = True
            for peer in self._peers:
                self._end(peer, poller, "the client was closed")
            context.destroy(linger=0)

    def _once(self, context: zmq.Context[Any], poller: zmq.Poller) -> None:
        unsent = any(peer.outgoing for peer in self._peers)
        ready = dict(poller.poll(2 if unsent else _POLL_MS))
        if self._wake in ready:
            os.eventfd_read(self._wake)
        while self._changes:
            what, peer = self._changes.popleft()
            if what == "connect":
                self._open(peer, context, poller)
                self._peers.append(peer)
            elif peer in self._peers:
                self._peers.remove(peer)
                self._end(peer, poller, "it is not in the list any more")
        for peer in self._peers:
            if peer.monitor in ready:
                self._watch(peer)
            if peer.socket in ready:
                self._receive(peer)
            self._send(peer)

    def _open(self, peer: Peer, context: zmq.Context[Any], poller: zmq.Poller) -> None:
        socket = peer.socket = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, 1),
            (zmq.IMMEDIATE, 1),  # queue nothing while there is no connection
            (zmq.SNDHWM, _MOST_UNANSWERED),
            (zmq.RCVHWM, _MOST_UNANSWERED),
            (zmq.MAXMSGSIZE, m.MAX_NBYTES),
            (zmq.HEARTBEAT_IVL, int(_PING * 1000)),
            (zmq.HEARTBEAT_TIMEOUT, int((HEARTBEAT - _PING) * 1000)),
            (zmq.CONNECT_TIMEOUT, 1000),
            (zmq.HANDSHAKE_IVL, 1000),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 500),
        ):
            socket.setsockopt(option, value)
        try:
            curve_client(socket, self._pair, peer.node.key)
            peer.monitor = socket.get_monitor_socket(_EVENTS)
            socket.connect(f"tcp://{peer.node.address}")
        except (zmq.ZMQError, ValueError) as error:
            peer.why = f"{peer.node.address}: {error}"
            self._warn(peer)
            return
        poller.register(socket, zmq.POLLIN)
        poller.register(peer.monitor, zmq.POLLIN)

    def _watch(self, peer: Peer) -> None:
        while peer.monitor.poll(0):
            event = recv_monitor_message(peer.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._lost(peer, "the connection was made anew")  # if the end of the earlier one was not seen
                self._greet(peer)
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                peer.why = "it does not take this client's key"
                self._warn(peer)
            else:
                self._lost(peer, "the connection ended")

    def _greet(self, peer: Peer) -> None:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            number = next(self._numbers)
            peer.answers[number] = future
            peer.outgoing.append(m.encode(m.Hello(number, m.VERSION, self._block_nbytes)))
        future.add_done_callback(lambda ended: self._welcomed(peer, ended))

    def _welcomed(self, peer: Peer, future: concurrent.futures.Future[Any]) -> None:
        """In the thread: it sets all futures."""
        if future.exception() is not None:
            return
        answer = future.result()
        if isinstance(answer, m.Welcome):
            if self._block_nbytes not in (0, answer.block_nbytes) or not 0 < answer.base < 1 << 62:
                peer.why = f"it says that it has blocks of {answer.block_nbytes} bytes at {answer.base}"
                self._warn(peer)
                return
            peer.run += 1
            peer.why, peer.warned = "", ""
            self._up(peer, answer)
            peer.welcome = answer
        elif isinstance(answer, m.Refused):
            peer.why = answer.message
            self._warn(peer)

    def _warn(self, peer: Peer) -> None:
        if peer.why != peer.warned:
            _log.warning("node %s cannot be used: %s", peer.node.placed_by, peer.why)
        peer.warned = peer.why

    def _lost(self, peer: Peer, why: str) -> None:
        with self._lock:
            was_up, peer.welcome = peer.welcome is not None, None
            unanswered = list(peer.answers.values())
            peer.answers.clear()
            peer.outgoing.clear()
        if was_up:
            peer.why = why
            _log.info("node %s is down: %s", peer.node.placed_by, why)
            self._down(peer)
        for future in unanswered:
            future.set_exception(peer.down())

    def _end(self, peer: Peer, poller: zmq.Poller, why: str) -> None:
        self._lost(peer, why)
        for socket in (peer.monitor, peer.socket):
            if socket is not None and socket in poller:
                poller.unregister(socket)
        if peer.monitor is not None:
            peer.socket.disable_monitor()
            peer.monitor.close()
        peer.socket.close()

    def _send(self, peer: Peer) -> None:
        with self._lock:
            while peer.outgoing:
                try:
                    peer.socket.send(peer.outgoing[0], zmq.NOBLOCK)
                except zmq.Again:
                    return
                peer.outgoing.popleft()

    def _receive(self, peer: Peer) -> None:
        for _ in range(_AT_ONCE):
            try:
                data = peer.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                answer = m.to_client.decode(data)
            except (msgspec.MsgspecError, ValueError) as error:
                peer.why = f"malformed message: {error}"
                self._warn(peer)
                continue
            with self._lock:
                future = peer.answers.pop(answer.request, None)
            if isinstance(answer, m.Refused) and answer.code == "hello":
                self._greet(peer)  # the node has forgotten this client
            if future is not None:
                future.set_result(answer)
