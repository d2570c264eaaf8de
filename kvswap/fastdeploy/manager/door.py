"""Bounds the connections to rank 0's socket.

libzmq accepts whatever connects, and ends the process when it cannot accept for want of a descriptor. A thread follows
its events, and shuts down connections beyond the limit; those that were there before stay.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvswap._log import logger

__all__ = ["Door", "raise_limit"]

_log = logger("kvswap.manager")
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_HANDSHAKE_MS = 5000
_JOIN = 5.0  # seconds
_LOOK_MS = 200  # until the thread sees that it is to end


def raise_limit() -> int:
    """Raise the limit of descriptors as far as it goes; returns it. A burst of connections needs room, until those that
    are too many are shut down."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else 1 << 20
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            return most
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


class Door:
    """Shuts down connections beyond `most`. Its thread owns the monitor's socket; close() before the context ends."""

    def __init__(self, listening: zmq.Socket[bytes], path: Path, most: int) -> None:
        """Before bind()."""
        listening.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self._listening, self._path, self._most = listening, os.fsencode(path), most
        self._stopped = False
        self._open: set[int] = set()  # descriptors of connections, libzmq's; of the thread alone
        self._monitor: Any = listening.get_monitor_socket(_EVENTS)
        self._thread = threading.Thread(target=self._run, name="kvswap-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The thread ends, so that the context can."""
        self._stopped = True
        self._thread.join(_JOIN)
        self._listening.disable_monitor()

    def _run(self) -> None:
        try:
            while not self._stopped:
                if self._monitor.poll(_LOOK_MS):
                    event = recv_monitor_message(self._monitor)
                    self._see(event["event"], int(event["value"]))
        except zmq.ZMQError as error:
            _log.warning("connections to the manager are not counted any more: %s", error)
        finally:
            self._monitor.close(0)

    def _see(self, event: int, descriptor: int) -> None:
        if event != zmq.EVENT_ACCEPTED:
            self._open.discard(descriptor)
            return
        self._open.add(descriptor)
        if len(self._open) > self._most:
            _log.warning("more than %d connections to the manager: the newest is shut down", self._most)
            self._shut(descriptor)

    def _shut(self, descriptor: int) -> None:
        """libzmq then closes it. By now the number may be that of another descriptor: only a connection to this socket
        is shut down."""
        try:
            connection = socket.socket(fileno=descriptor)
        except OSError:
            return
        try:
            if connection.family == socket.AF_UNIX and os.fsencode(connection.getsockname()) == self._path:
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        finally:
            connection.detach()
