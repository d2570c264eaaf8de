"""KVSWAP_METRICS_PORT: one port on which Prometheus finds all of a user's kvswap processes on this machine.

Each process answers on its own Unix socket (_top_socket.py). One of them holds a lock in the folder of these sockets,
listens on the port, and asks the others when it is scraped; the kernel gives the lock to another one when it ends. The
answers are JSON, from sockets that only this user can make. A port that something else listens on is one warning: the
process with the lock goes on trying.

A client has five seconds, and there are at most eight. A process that does not answer within two is counted as such.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvswap import _C, _top_socket
from kvswap._families import Family, families
from kvswap._log import logger

_log = logger("kvswap.metrics")

VARIABLE = "KVSWAP_METRICS_PORT"
_HOST = "127.0.0.1"
_AGAIN_SECONDS = 1.0  # until the lock, or the port, is tried again
_CLIENTS = 8  # at once; others are refused
_CLIENT_SECONDS = 5.0
_MOST_REQUEST = 8192  # bytes
_PAUSE_SECONDS = 0.1  # where no connection can be accepted
_PROCESSES = 256  # that are asked
_ASKED_AT_ONCE = 16
_ASK_SECONDS = 2.0
_ENDED: Any = object()
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def address_of(text: str) -> tuple[str, int]:
    """(host, port) of "9400", "0.0.0.0:9400" or "[::1]:9400". ValueError: what it may be."""
    host, _, port = text.strip().rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not port.isascii() or not port.isdecimal() or not 1 <= int(port) <= 65535 or ("]" in text and not host):
        raise ValueError(f"{VARIABLE} is {text!r}; it is a port from 1 to 65535, or HOST:PORT")
    return host or _HOST, int(port)


# -- the text that Prometheus reads -----------------------------------------------------------------------------------


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _line(name: str, labels: Mapping[str, str], value: Any) -> str:
    if not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}")
    inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{inside}}} {float(value)!r}\n"


def _samples(family: Family, pid: int) -> Iterable[str]:
    for values, value in family.samples.items():
        labels = {**dict(zip(family.labels, values, strict=True)), "pid": str(pid)}
        if family.kind != "histogram":
            yield _line(family.exported, labels, value)
            continue
        total = 0
        for bound, total in family.cumulative(value):
            yield _line(f"{family.name}_bucket", {**labels, "le": bound}, total)
        yield _line(f"{family.name}_count", labels, total)
        yield _line(f"{family.name}_sum", labels, value["sum"])


def text_of(snapshots: Iterable[tuple[int, Any]]) -> str:
    """The metrics of processes: (pid, snapshot; None: it did not answer)."""
    heads = {family.exported: f"# HELP {family.exported} {family.help}\n# TYPE {family.exported} {family.kind}\n"
             for family in families(None)}  # fmt: skip
    found: dict[str, list[str]] = {name: [] for name in heads}
    states = {"up": 0, "no_answer": 0}
    for pid, snapshot in snapshots:
        try:
            lines = {family.exported: [*_samples(family, pid)] for family in families(snapshot)} if snapshot else None
        except (AttributeError, KeyError, TypeError, ValueError):  # of another version of kvswap
            lines = None
        states["up" if lines is not None else "no_answer"] += 1
        for name, each in (lines or {}).items():
            found[name] += each
    text = [heads[name] + "".join(lines) for name, lines in found.items() if lines]
    text.append("# HELP kvswap_processes Processes of this user that have KVSWAP_METRICS_PORT or KVSWAP_TOP\n")
    text.append("# TYPE kvswap_processes gauge\n")
    text += [_line("kvswap_processes", {"state": state}, count) for state, count in states.items()]
    return "".join(text)


# -- the server -------------------------------------------------------------------------------------------------------


class Server:
    """Serves on the port whenever no other process of this user does, until close().

    snapshot: of this process. kvswap.Error: the folder of sockets cannot be used, or no thread starts.
    """

    def __init__(self, host: str, port: int, snapshot: Callable[[], Any]) -> None:
        self.address, self._snapshot = (host, port), snapshot
        self._path = _top_socket.prepare_folder() / f"metrics-{port}.lock"
        self._lock: int | None = None  # the descriptor that holds it
        self._listening: socket.socket | None = None
        self._inodes: list[int] = []  # of both
        self._end = threading.Event()
        self._clients = threading.BoundedSemaphore(_CLIENTS)
        self._scraping = threading.Lock()
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="kvswap-metrics", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise _C.Error(f"{VARIABLE}: {error}") from None
        atexit.register(self.close)

    @property
    def serving(self) -> bool:
        """Whether it is this process that serves."""
        return self._listening is not None

    def _run(self) -> None:
        while not self._end.is_set():
            if self._listening is not None:
                self._accept(self._listening)
            elif self._take_lock() and self._listen():
                _log.info("kvswap's metrics are on http://%s:%d/metrics", *self.address)
            else:
                self._end.wait(_AGAIN_SECONDS)
        self._let_go()

    def _take_lock(self) -> bool:
        if self._lock is not None:
            return True
        try:
            lock = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            self._warn(f"{self._path}: {error.strerror}")
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._lock, self._inodes = lock, [os.fstat(lock).st_ino]
        return True

    def _listen(self) -> bool:
        host, port = self.address
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listening = socket.create_server((host, port), family=family, backlog=_CLIENTS)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "another program listens there" if taken else error.strerror or error
            self._warn(f"no metrics on {host}:{port}: {why}")
            return False
        self._listening, self._inodes = listening, [os.fstat(listening.fileno()).st_ino, *self._inodes]
        return True

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("%s: %s. It is tried again", VARIABLE, what)

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except OSError:  # closing, the client has gone, there are no descriptors, or another one has this number
            if not self._still_ours():
                self._let_go()
            self._end.wait(_PAUSE_SECONDS)
            return
        if not self._clients.acquire(blocking=False):
            connection.close()
            return
        try:
            threading.Thread(target=self._serve, args=(connection,), name="kvswap-scrape", daemon=True).start()
        except RuntimeError:
            connection.close()
            self._clients.release()

    def _serve(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + _CLIENT_SECONDS
        try:
            with connection, contextlib.suppress(OSError):
                request = _request(connection, deadline)
                status, body = self._answer(request)
                head = f"HTTP/1.1 {status}\r\nContent-Type: {_TYPE}\r\nContent-Length: {len(body)}\r\n"
                _left(connection, deadline)
                body = b"" if request.startswith(b"HEAD ") else body
                connection.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)
        except Exception:
            _log.exception("a scrape was not answered")
        finally:
            self._clients.release()

    def _answer(self, request: bytes) -> tuple[str, bytes]:
        words = request.split(b"\r\n", 1)[0].split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return "400 Bad Request", b"not HTTP\n"
        if words[0] not in (b"GET", b"HEAD"):
            return "405 Method Not Allowed", b"GET it\n"
        if words[1].partition(b"?")[0] not in (b"/", b"/metrics"):
            return "404 Not Found", b"there is /metrics\n"
        with self._scraping:  # clients at once do not ask each process at once
            return "200 OK", text_of(self._snapshots()).encode()

    def _snapshots(self) -> list[tuple[int, Any]]:
        own = os.getpid()
        others = [(pid, path) for pid, path in _top_socket.sockets().items() if pid != own][: _PROCESSES - 1]
        with ThreadPoolExecutor(min(_ASKED_AT_ONCE, len(others) or 1), "kvswap-scrape") as pool:
            answers = pool.map(_ask, [path for _, path in others])
            asked = [(pid, got) for (pid, _), got in zip(others, answers, strict=True) if got is not _ENDED]
            return [(own, self._snapshot()), *asked]

    def _descriptors(self) -> list[int]:
        listening, lock = self._listening, self._lock  # the server's thread may let go meanwhile
        descriptors = [] if listening is None else [listening.fileno()]
        return descriptors if lock is None else [*descriptors, lock]

    def _look(self) -> list[int]:
        return [os.fstat(fd).st_ino for fd in self._descriptors()]

    def _still_ours(self) -> bool:
        """Whether the descriptors are this server's: a program may close all of them and reuse the numbers."""
        try:
            return self._look() == self._inodes
        except OSError:
            return False

    def _let_go(self) -> None:
        if self._still_ours():
            for fd in self._descriptors():
                os.close(fd)
        if self._listening is not None:
            self._listening.detach()
        self._listening = self._lock = None

    def close(self) -> None:
        """Release the port and the lock. May be called twice."""
        atexit.unregister(self.close)
        self._end.set()
        listening = self._listening  # the server's thread may let go meanwhile: a client has woken it
        if listening is not None and self._still_ours():
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes accept()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLIENT_SECONDS)

    def abandon(self) -> None:
        """In the child of a fork: its copies of the descriptors would keep lock and port from other processes."""
        atexit.unregister(self.close)
        self._let_go()


def _left(connection: socket.socket, deadline: float) -> None:
    connection.settimeout(max(0.001, deadline - time.monotonic()))


def _request(connection: socket.socket, deadline: float) -> bytes:
    """Up to the end of its header; OSError: it does not come in time."""
    request = b""
    while b"\r\n\r\n" not in request and len(request) < _MOST_REQUEST:
        _left(connection, deadline)
        part = connection.recv(_MOST_REQUEST - len(request))
        if not part:
            break
        request += part
    return request


def _ask(path: Any) -> Any:
    """None: no answer, or none that is to be trusted. _ENDED: the process has left its socket."""
    try:
        return _top_socket.ask(path, _ASK_SECONDS)
    except (ConnectionRefusedError, FileNotFoundError):
        return _ENDED
    except (OSError, _C.Error):
        return None
