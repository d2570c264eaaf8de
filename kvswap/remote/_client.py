"""Mooncake's client behind a count of calls in flight: after close() and in a child of fork() no call reaches it."""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import threading
import time
from typing import Any

from kvswap import _C

_CONNECT_SECONDS = 5.0
_MISSING = (
    "kvswap.remote needs Mooncake's Python package, of which there are several builds with one import name. Install "
    "exactly one: mooncake-transfer-engine (CUDA 12), -cuda13, -non-cuda, -rocm, -npu, -musa or -efa; and on Debian "
    "libibverbs1, librdmacm1, libnuma1 and liburing2"
)


class Closed(Exception):
    """The call was not made."""


class Client:
    """A client that lends no memory, and has no buffer but what register() names.

    hostname: by which nodes reach this machine; None: its address on the way to the master. kvswap.Error: Mooncake is
    not installed, or does not reach the master."""

    def __init__(self, master: str, hostname: str | None, metadata: str, protocol: str, devices: str) -> None:
        try:
            module = importlib.import_module("mooncake.store")
        except ImportError as error:
            raise _C.Error(f"{_MISSING} ({error})") from error
        self.config = module.ReplicateConfig
        self.master = master
        self._store = module.MooncakeDistributedStore()
        # Its destructor runs only after close(): a call that has not returned, and the child of a fork(), still use it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._store))
        self._changed = threading.Condition()
        self._in_flight = 0  # guarded by _changed, as the next one
        self._closed = False
        self._pid = os.getpid()
        own = _address(master)  # whether there is a master, too: Mooncake would try for seconds and not say why
        host = own if hostname is None else hostname
        self._setup(f"{host}:{_free_port(host)}", metadata, protocol, devices)

    def _setup(self, name: str, metadata: str, protocol: str, devices: str) -> None:
        """It holds Python's lock: beside a master that accepts connections and does not answer, for half a minute."""
        try:
            answer = self.call("setup", name, metadata, 0, 0, protocol, devices, self.master)
        except Exception as error:
            answer = error
        _C._remote_exit_count(True)  # Mooncake has registered its handler by now
        if answer != 0:
            self._closed = True
            self._let_go()
            what = f"({protocol}, {metadata}): {answer}; its lines on stderr say why"
            raise _C.Error(f"Mooncake's client {name} cannot use the master at {self.master} {what}")

    def register(self, address: int, nbytes: int) -> None:
        code = self.call("register_buffer", address, nbytes)
        if code != 0:
            raise _C.Error(f"Mooncake did not register {nbytes:,} bytes of memory: {code}")

    def call(self, name: str, *args: Any) -> Any:
        """Closed: the client is. What Mooncake raises passes."""
        if self._pid != os.getpid():
            raise Closed
        with self._changed:
            if self._closed:
                raise Closed
            self._in_flight += 1
        try:
            return getattr(self._store, name)(*args)
        finally:
            with self._changed:
                self._in_flight -= 1
                self._changed.notify_all()

    def codes(self, name: str, count: int, *args: Any) -> list[int]:
        """A call that answers with a code a key. -1 for each where Mooncake raised, or answered something else."""
        try:
            answer = self.call(name, *args)
        except Closed:
            raise
        except Exception:
            return [-1] * count
        if not isinstance(answer, list) or len(answer) != count:
            return [-1] * count
        return answer

    def close(self, timeout: float) -> bool:
        """Whether Mooncake's client is closed. False: calls did not return in time, and it is left as it is."""
        if self._pid != os.getpid():
            return False
        end = time.monotonic() + timeout
        with self._changed:
            first, self._closed = not self._closed, True
            while self._in_flight and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            if not first or self._in_flight:
                return not self._in_flight
        self._store.close()
        self._let_go()
        return True

    def _let_go(self) -> None:
        _C._remote_exit_count(False)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._store))


def split_address(text: Any) -> tuple[str, int]:
    """ValueError: not HOST:PORT."""
    host, _, port = str(text).rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"master is {text!r}: it must be HOST:PORT, where mooncake_master listens")
    return host.strip("[]"), int(port)


def _address(master: str) -> str:
    """This machine's on the way to the master."""
    try:
        with socket.create_connection(split_address(master), _CONNECT_SECONDS) as probe:
            return str(probe.getsockname()[0])
    except OSError as error:
        raise _C.Error(f"there is no way to the master at {master}: {error}") from error


def _free_port(host: str) -> int:
    """By which Mooncake tells clients of one machine apart."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise _C.Error(f"hostname {host} is no address of this machine: {error}") from error
