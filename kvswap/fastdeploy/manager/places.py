"""The manager's folder (mode 0700) with its socket and locks, and the checks of its owner and of message senders."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvswap import _C
from kvswap._regular import open_regular

MOST_PORT = 65535
_AT_ONCE = 200  # messages
_MOST_PATH_NBYTES = 107  # limit of a Unix socket's path


def default_directory(port: int, data_parallel_id: int = 0) -> Path:
    """The folder that the manager of this cache queue port and its clients use. TypeError, ValueError: no port."""
    if isinstance(port, bool) or not isinstance(port, int):
        raise TypeError(f"port must be an int, not {type(port).__name__}")
    if not 0 <= port <= MOST_PORT:
        raise ValueError(f"port is {port}: must be from 0 to {MOST_PORT}")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime, "kvswap") if runtime else Path(f"/tmp/kvswap-{os.getuid()}")
    return base / f"manager-{port}.{data_parallel_id}"


def prepare_directory(directory: Path) -> None:
    """Create the folder with mode 0700. kvswap.Error: it exists and belongs to another user, or other users may enter
    it."""
    for folder in (directory.parent, directory):
        if folder == directory or not folder.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_directory(directory)


def check_directory(directory: Path) -> None:
    """kvswap.Error: the folder is missing or belongs to another user, or other users may enter or replace it."""
    try:
        found = os.lstat(directory)
    except FileNotFoundError:
        raise _C.Error(
            f"{directory} is not there: no manager was started with this port (or --socket_dir); start it first, by "
            "kvswap manager run, and try again when its log says step=start"
        ) from None
    if not stat.S_ISDIR(found.st_mode):
        raise _C.Error(f"{directory} is no folder")
    if found.st_uid != os.getuid():
        raise _C.Error(f"{directory} belongs to user {found.st_uid}, not to {os.getuid()}: it is not trusted")
    if found.st_mode & 0o077:
        raise _C.Error(f"{directory} has mode {found.st_mode & 0o777:o}: it must be 700, for this user alone")
    above = os.stat(directory.parent)
    shared = above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX
    if above.st_uid not in (os.getuid(), 0) or shared:
        raise _C.Error(
            f"{directory.parent} belongs to user {above.st_uid} and has mode {above.st_mode & 0o7777:o}: others could "
            "put another folder in the place of the manager's"
        )


def socket_path(directory: Path) -> Path:
    path = directory / "manager.sock"
    if len(os.fsencode(path)) > _MOST_PATH_NBYTES:
        raise _C.Error(f"{path} is too long for a socket's address: choose a shorter --socket_dir")
    return path


def check_running(directory: Path) -> None:
    """kvswap.Error: as check_directory(), or no process listens at the folder's socket."""
    check_directory(directory)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fsencode(socket_path(directory)))
        except (FileNotFoundError, ConnectionRefusedError):
            raise _C.Error(
                f"{directory}: no manager runs there: rank 0 was stopped or killed, or does not listen yet; start it "
                "by kvswap manager run, and try again when its log says step=start"
            ) from None
        except BlockingIOError:
            pass  # a process listens and is slow to accept


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file of the manager's folder; returns the descriptor. FileNotFoundError. kvswap.Error: not a regular file,
    or it cannot be opened."""
    try:
        return open_regular(path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _C.Error(str(error)) from None


class Lock:
    """A lock that a rank holds while it runs. The kernel releases it with the process, also after kill -9."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._fd = open_own(directory / f"rank{rank}.lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise _C.Error(f"rank {rank} runs already in {directory}, as process {owner or 'unknown'}") from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        os.close(self._fd)


class Peer:
    """The sender of a message: uid and pid, as the kernel reports them for the socket."""

    __slots__ = ("pid", "uid")

    def __init__(self, frame: Any) -> None:
        try:
            parts = str(frame.get("Peer-Address")).split(":")
            self.uid, self.pid = int(parts[-3]), int(parts[-1])
        except Exception:
            # Frames of ZMTP 1 and 2 have no Peer-Address, for which pyzmq raises ZMQError; no frame has one with an old
            # libzmq. -1 is no user, so that the message is ignored.
            self.uid = self.pid = -1

    @property
    def ours(self) -> bool:
        return self.uid == os.getuid()

    @property
    def unseen(self) -> str:
        """Why the process cannot be watched; empty if it can. A process whose end cannot be seen is refused."""
        if self.pid > 0:
            return ""
        return (
            "the process is in another pid namespace: both must see each other (containers: share one, or the host's)"
        )

    def __str__(self) -> str:
        return f"user {self.uid} (process {self.pid})"


def received(socket: Any) -> Iterator[tuple[list[Any], Peer]]:
    """The messages that have arrived at a socket, at most _AT_ONCE: their frames and their sender. Bounded, so that the
    caller does its other work even if messages arrive faster than they are read."""
    import zmq

    for _ in range(_AT_ONCE):
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        yield frames, Peer(frames[-1])


def watch_process(pid: int) -> int:
    """A descriptor that is readable once the process has ended; it never is if the kernel has no such descriptors."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return os.eventfd(1, os.EFD_CLOEXEC)
    except (AttributeError, OSError):
        return os.eventfd(0, os.EFD_CLOEXEC)
