"""Key pairs of CURVE: who may talk to whom. A secret file is of this user alone; public keys are no secret."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvswap import _C
from kvswap._regular import open_regular

if TYPE_CHECKING:
    import zmq

_MOST_NBYTES = 1 << 20
_KEY = re.compile(r"[!-~]{40}")


@dataclass(frozen=True)
class Secret:
    """A key pair, in Z85."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"Secret(public={self.public!r})"


def need_curve() -> None:
    """kvswap.Error: what the remote tier needs is not installed."""
    try:
        import msgspec
        import zmq
    except ImportError as error:
        raise _C.Error(f"kvswap.remote needs {error.name}: pip install 'kvswap[remote]'") from None
    assert msgspec
    if not zmq.has("curve"):
        raise _C.Error("kvswap.remote needs a libzmq with CURVE: pip install pyzmq, whose wheels have it")


def new_secret() -> Secret:
    """A new key pair. kvswap.Error: pyzmq or msgspec is missing."""
    need_curve()
    import zmq

    public, secret = zmq.curve_keypair()
    return Secret(public.decode(), secret.decode())


def write_secret(path: str | os.PathLike[str], pair: Secret) -> None:
    """Mode 0600. FileExistsError: a secret is never overwritten."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(f"{pair.public}\n{pair.secret}\n")


def read_secret(path: str | os.PathLike[str]) -> Secret:
    """kvswap.Error: the file belongs to another user, or others may read it, or it holds no key pair."""
    with open(open_regular(path, follow=True), "rb") as file:
        found = os.fstat(file.fileno())
        text = file.read(256).decode("ascii", "replace")
    if found.st_uid not in (os.getuid(), 0):
        raise _C.Error(f"{path} belongs to user {found.st_uid}, not to {os.getuid()}: it is not trusted")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise _C.Error(f"{path} has mode {stat.S_IMODE(found.st_mode):o}: it must be 600, for this user alone")
    lines = text.split()
    if len(lines) != 2 or not all(map(_KEY.fullmatch, lines)):
        raise _C.Error(f"{path} holds no key pair: make one with kvswap remote keygen")
    import zmq

    if zmq.curve_public(lines[1].encode()).decode() != lines[0]:
        raise _C.Error(f"{path}: its public key is not that of its secret key")
    return Secret(*lines)


def read_allowed(path: str | os.PathLike[str]) -> set[str]:
    """Public keys, the first word of each line; # begins a comment. kvswap.Error: others may write the file, or a line
    is no key."""
    with open(open_regular(path, follow=True), "rb") as file:
        found = os.fstat(file.fileno())
        lines = file.read(_MOST_NBYTES).decode("utf-8", "replace").splitlines()
    if found.st_uid not in (os.getuid(), 0) or found.st_mode & 0o022:
        raise _C.Error(f"{path} belongs to another user, or others may write to it: it says who may connect")
    keys = set()
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0] == "#" or line.lstrip().startswith("# "):
            continue
        if not _KEY.fullmatch(words[0]):
            raise _C.Error(f"{path}, line {number}: must begin with a public key of 40 characters")
        keys.add(words[0])
    return keys


def curve_server(socket: zmq.Socket[bytes], pair: Secret) -> None:
    socket.curve_server = True
    _own(socket, pair)


def curve_client(socket: zmq.Socket[bytes], pair: Secret, server: str) -> None:
    socket.curve_serverkey = server.encode()
    _own(socket, pair)


def _own(socket: zmq.Socket[bytes], pair: Secret) -> None:
    socket.curve_publickey, socket.curve_secretkey = pair.public.encode(), pair.secret.encode()
