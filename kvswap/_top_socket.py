"""The socket between a process that serves its metrics and `kvswap top`.

The socket is in the user's folder of kvswap's sockets (mode 0700, owner checked), under a name with the pid and start
time of its process. Both sides ask the kernel for the other's user. A request is one line of at most 32 bytes; the
answer is one JSON document, then the connection ends. One thread serves all clients without blocking: each has its own
time limit, so a slow client delays only itself.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvswap import _C
from kvswap._log import logger

_logger = logger("kvswap.top")

_REQUEST = b"kvswap-metrics 1\n"
_MOST_REQUEST = 32  # bytes
_MOST_ANSWER = 16 << 20
_CLIENTS = 8  # at once; others wait in the backlog
_BACKLOG = 64
_CLIENT_SECONDS = 5.0  # for request and answer
_FRESH_SECONDS = 0.05  # an answer is reused for this long: clients cannot keep the process busy
_PAUSE_SECONDS = 1.0  # where no connection can be accepted
_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PEER = struct.Struct("3i")  # pid, uid, gid


def folder_path() -> Path:
    """Where the sockets of this user are; csrc/ipc/serve.c chooses the same folder."""
    run = os.environ.get("XDG_RUNTIME_DIR", "")
    with contextlib.suppress(OSError):
        there = os.lstat(run)
        if run.startswith("/") and len(run) < 48 and stat.S_ISDIR(there.st_mode) and there.st_uid == os.geteuid():
            return Path(run, f"kvswap-{os.geteuid()}")
    return Path(f"/tmp/kvswap-{os.geteuid()}")


def check_folder(folder: Path) -> None:
    """kvswap.Error: not a folder that only this user can use. FileNotFoundError."""
    there = os.lstat(folder)
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.geteuid() or there.st_mode & 0o077:
        raise _C.Error(f"{folder} is not a folder that only this user can use (mode 0700): remove it")


def prepare_folder() -> Path:
    folder = folder_path()
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        check_folder(folder)
    except OSError as error:
        raise _C.Error(f"cannot make {folder} for sockets: {error.strerror}") from None
    return folder


def start_time(pid: int) -> str:
    """The process's start in clock ticks since boot; empty: no such process, or not readable."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the other side, from the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, _ = _PEER.unpack(raw)
    return pid, uid


class _Client:
    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.deadline = connection, time.monotonic() + _CLIENT_SECONDS
        self.request, self.answer = b"", memoryview(b"")

    @property
    def events(self) -> int:
        return select.POLLOUT if len(self.answer) else select.POLLIN

    def serve(self, answer: Callable[[], bytes]) -> bool:
        """Read and write as much as possible without blocking. False: the connection has ended."""
        try:
            if not len(self.answer):
                got = self.connection.recv(_MOST_REQUEST - len(self.request))
                self.request += got
                if not got or not _REQUEST.startswith(self.request):
                    return False
                if self.request != _REQUEST:
                    return True
                self.answer = memoryview(answer())
            self.answer = self.answer[self.connection.send(self.answer, socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            return True
        except OSError:
            return False
        except Exception:
            _logger.exception("kvswap top was not answered")
            return False
        return len(self.answer) > 0


class Server:
    """Answers with snapshot() as JSON until close(). kvswap.Error: the socket cannot be made."""

    def __init__(self, snapshot: Callable[[], Any]) -> None:
        folder = prepare_folder()
        remove_stale(folder)
        self._snapshot = snapshot
        self._answer, self._answered = b"", -1.0
        self.path = str(folder / f"top-{os.getpid()}-{start_time(os.getpid())}.sock")
        self._clients: list[_Client] = []
        self._accept_after = 0.0
        with contextlib.ExitStack() as undo:
            try:
                self._listening = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                self._wake, self._woken = map(undo.enter_context, socket.socketpair())
                self._inodes = self._look()
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.path)  # of an earlier process with this pid and start
                self._listening.bind(self.path)
                undo.callback(os.unlink, self.path)
                os.chmod(self.path, 0o600)
                self._listening.listen(_BACKLOG)
                self._listening.setblocking(False)
                self._thread = threading.Thread(target=self._run, name="kvswap-top", daemon=True)
                self._thread.start()
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread
                reason = getattr(error, "strerror", None) or error
                raise _C.Error(f"cannot listen on {self.path}: {reason}") from None
            undo.pop_all()
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _look(self) -> list[int]:
        return [os.fstat(each.fileno()).st_ino for each in (self._listening, self._woken)]

    def _still_ours(self) -> bool:
        """Whether the descriptors are still this server's: a program may close all of them and reuse the numbers."""
        try:
            return self._look() == self._inodes
        except OSError:
            return False

    def _let_go(self, *sockets: socket.socket) -> None:
        ours = self._still_ours()
        for each in sockets:
            if ours:
                each.close()
            else:
                each.detach()  # so that the end of the object does not close the number

    def _run(self) -> None:
        while self._still_ours():
            polling = select.poll()
            polling.register(self._woken, select.POLLIN)
            now = time.monotonic()
            ends = [client.deadline - now for client in self._clients]
            if now < self._accept_after:
                ends.append(self._accept_after - now)
            elif len(self._clients) < _CLIENTS:
                polling.register(self._listening, select.POLLIN)
            for client in self._clients:
                polling.register(client.connection, client.events)
            wait = min(ends, default=None)
            ready = dict(polling.poll(None if wait is None else max(0.0, wait * 1000)))
            if self._woken.fileno() in ready:
                break
            self._serve(ready)
        self._let_go(*(client.connection for client in self._clients))
        self._clients = []

    def _serve(self, ready: dict[int, int]) -> None:
        now, kept = time.monotonic(), []
        for client in self._clients:
            served = client.connection.fileno() in ready
            goes_on = client.serve(self._answer_now) if served else True
            if goes_on and now < client.deadline:
                kept.append(client)
            else:
                client.connection.close()
        self._clients = kept
        if self._listening.fileno() in ready:
            self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError as error:  # or the client has gone
            if error.errno in _SHORT_OF:  # the connection stays in the backlog, and would be ready again at once
                self._accept_after = time.monotonic() + _PAUSE_SECONDS
            return
        connection.setblocking(False)
        if peer_of(connection)[1] == os.geteuid():
            self._clients.append(_Client(connection))
        else:
            connection.close()

    def _answer_now(self) -> bytes:
        if time.monotonic() - self._answered > _FRESH_SECONDS:
            self._answer = json.dumps(self._snapshot()).encode()
            self._answered = time.monotonic()
        return self._answer

    def close(self) -> None:
        """Ends the thread and removes the socket. Twice is harmless."""
        atexit.unregister(self.close)
        if self._still_ours():
            with contextlib.suppress(OSError):
                self._wake.send(b".", socket.MSG_NOSIGNAL)
            if threading.current_thread() is not self._thread:
                self._thread.join(5.0)
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        self._let_go(self._listening, self._wake, self._woken)

    def abandon(self) -> None:
        """In the child of a fork: closes its copies of the descriptors. The socket's name stays with the parent."""
        atexit.unregister(self.close)
        self._let_go(self._listening, self._wake, self._woken, *(client.connection for client in self._clients))


# -- the other side ---------------------------------------------------------------------------------------------------


def remove_stale(folder: Path) -> None:
    """Removes the sockets of processes that have ended, as csrc/ipc/serve.c does for its own."""
    for path in list(folder.glob("top-*.sock"))[:1000]:
        pid, _, start = path.stem.removeprefix("top-").partition("-")
        if pid.isdecimal() and start_time(int(pid)) != start and _is_deserted(path):
            with contextlib.suppress(OSError):
                path.unlink()


def _is_deserted(path: Path) -> bool:
    """A process that is not visible may be in another pid namespace: its socket then takes connections."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        try:
            connection.connect(os.fspath(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def sockets() -> dict[int, Path]:
    """The sockets of this user's processes, by pid. kvswap.Error: the folder is not this user's alone."""
    folder = folder_path()
    try:
        check_folder(folder)
    except FileNotFoundError:
        return {}
    found = {}
    for path in sorted(folder.glob("top-*.sock")):
        pid = path.stem.split("-")[1]
        if pid.isdecimal():
            found[int(pid)] = path
    return found


def _connect(connection: socket.socket, path: Path, deadline: float) -> None:
    """Connect until the deadline. While the backlog is full, connect() fails at once if it may not block."""
    while True:
        try:
            connection.connect(os.fspath(path))
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{path} takes no connection: too many ask it") from None
            time.sleep(0.01)


def ask(path: Path, timeout: float = 10.0) -> Any:
    """The snapshot of the process behind a socket. OSError: it does not answer in time or has ended. kvswap.Error: the
    answer is not as it should be."""
    deadline = time.monotonic() + timeout
    parts, total = [], 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        _connect(connection, path, deadline)
        uid = peer_of(connection)[1]
        if uid != os.geteuid():
            raise _C.Error(f"{path} belongs to user {uid}: it is not trusted")
        connection.sendall(_REQUEST)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{path} does not answer")
            connection.settimeout(left)
            part = connection.recv(1 << 16)
            if not part:
                break
            parts.append(part)
            total += len(part)
            if total > _MOST_ANSWER:
                raise _C.Error(f"{path} answers with more than {_MOST_ANSWER >> 20} MiB")
    try:
        answer = json.loads(b"".join(parts))
    except ValueError:
        raise _C.Error(f"{path} did not answer as kvswap does") from None
    if not isinstance(answer, dict):
        raise _C.Error(f"{path} did not answer as kvswap does")
    return answer
