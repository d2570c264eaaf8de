"""How members of a group meet: each listens on a socket of its own, and connects to those of lower rank.

The sockets are in the user's folder of kvswap's sockets (mode 0700, owner checked). Both sides ask the kernel for the
other's user. Each sends one message: a record of fixed size, and a descriptor of the receive slots that it has for the
other. Then the socket belongs to csrc/share. A thread of each member does this, one connection at a time, each within
two seconds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvswap import _C
from kvswap._log import logger
from kvswap._top_socket import folder_path, peer_of, prepare_folder, start_time

_logger = logger("kvswap.share")

# magic and build, rank, slots, pid, start time, lends; of the memory: generation, blocks, their bytes; bytes of a slot;
# path
_HELLO = struct.Struct("<40sIIq20s?QQQQ128s")
_AGREED = _HELLO.size - 160  # both have the same from the generation on
_MAGIC = f"kvshare1{_C._sources}".encode()  # messages and digests may differ from build to build
_SECONDS = 2.0  # for one meeting
_LEAST_PAUSE, _MOST_PAUSE = 0.02, 1.0  # between attempts to reach members of lower rank
_LONG_PAUSE = 10.0  # of one that is there, but makes no link
_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_BYE = struct.pack("<IH42x", 0x3153564B, 4)  # csrc/share/wire.h
_BACKLOG = 16
_SOCKET = re.compile(r"share-([A-Za-z0-9._-]{1,40})\.([0-9]{1,2})\.sock")
_LENT = re.compile(r"lend-([A-Za-z0-9._-]{1,20}-[0-9a-f]{16})\.([0-9]{1,2})\.sock")  # of kvswap.share._lend
_MEETS = re.compile(r"(share-|lend-)[A-Za-z0-9._-]{1,60}\.sock")  # what listen_at() makes
_MOST_STALE = 1000  # are looked at
_FOLDER = re.compile(r"[\w./-]*/kvswap-([0-9]{1,10})")
_ACCEPTS = 0x10000  # in the flags of /proc/net/unix: a socket that listens


@dataclass(frozen=True)
class Group:
    """Members of this user on this machine. links: pairs that reach each other's GPUs."""

    name: str
    ranks: list[int]
    links: int

    def __str__(self) -> str:
        if len(self.ranks) == 1:
            return f"group {self.name}: rank {self.ranks[0]} alone, so that all comes over its own link"
        pairs = len(self.ranks) * (len(self.ranks) - 1) // 2
        ranks = f"group {self.name}: ranks {', '.join(map(str, self.ranks))}"
        if self.links >= pairs:
            return f"{ranks}, each linked to all others"
        return f"{ranks}, {self.links} of {pairs} links: the log of each rank says what is missing"


@dataclass(frozen=True)
class Loan:
    """A process of an engine on this machine, of this user, whose loads and stores go over other GPUs' links too. name:
    of the engines that lend to each other; engine: the same for processes of one; lenders: how many lend to it now."""

    name: str
    engine: str
    lenders: int

    def __str__(self) -> str:
        who = f"{self.name}: a process of engine {self.engine}"
        if not self.lenders:
            return f"{who}, to which no other lends its link: kvswap doctor says why"
        return f"{who}, to which {self.lenders} others lend their link"


@dataclass(frozen=True)
class Stray:
    """As Loan, of a process that those with this process's folder of sockets cannot meet: its sockets are in another
    folder, or in a folder of the same name that is not the one seen here. uid: whose folder it is."""

    name: str
    folder: str
    uid: int


def loans(root: str = "") -> list[Loan]:
    """As groups(), of engines that lend each other their links."""
    found = _listed(_LENT, root)
    return [Loan(group[:-17], group[-16:-8], links) for group, (ranks, links) in found.items() if 0 in ranks]


def strays(root: str = "") -> list[Stray]:
    """As groups(), of engines that lend each other their links, but in vain for those of this folder."""
    here, found = folder_path(), []
    for path, listens in _sockets(root):
        named, folder = _LENT.fullmatch(path.name), _FOLDER.fullmatch(str(path.parent))
        if named is None or folder is None or not listens or named[2] != "0":
            continue
        if path.parent != here or not os.path.exists(f"{root}{path}"):
            found.append(Stray(named[1][:-17], str(path.parent), int(folder[1])))
    return found


def groups(root: str = "") -> list[Group]:
    """The groups that have members now, as the kernel lists their sockets: no member is asked. root: put before every
    path, for tests."""
    return [Group(name, ranks, links) for name, (ranks, links) in _listed(_SOCKET, root).items()]


def _sockets(root: str) -> Iterator[tuple[Path, bool]]:
    """Of all users and folders, with whether it listens."""
    try:
        lines = Path(f"{root}/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    except OSError:
        return
    for line in lines:
        _, _, _, flags, _, _, _, *path = line.split(maxsplit=7)
        if path:
            yield Path(path[0]), bool(int(flags, 16) & _ACCEPTS)


def _listed(socket_name: re.Pattern[str], root: str) -> dict[str, tuple[list[int], int]]:
    """By group: the ranks whose sockets listen, and the number of links."""
    folder = folder_path()
    found: dict[str, tuple[list[int], list[int]]] = {}
    for path, listens in _sockets(root):
        named = socket_name.fullmatch(path.name) if path.parent == folder else None
        if named is not None and os.path.exists(f"{root}{path}"):
            listening, links = found.setdefault(named[1], ([], []))
            (listening if listens else links).append(int(named[2]))
    return {name: (sorted(ranks), len(links)) for name, (ranks, links) in sorted(found.items()) if ranks}


class Meeting:
    """Makes the links of a member until close(). kvswap.Error: another process has the rank."""

    def __init__(
        self, core: _C._Share, group: str, rank: int, path: str, generation: int, lends: bool, kind: str = "share"
    ) -> None:
        """path, generation: of the memory on the host, the same for all members that have mapped it. kind: what the
        names of the group's sockets begin with."""
        self._core, self._group, self._rank, self._kind = core, group, rank, kind
        self._folder = prepare_folder()
        block, blocks, slot, _, slots = core.form()
        pid = os.getpid()
        start = start_time(pid).encode()
        memory = generation, blocks, block, slot, path.encode()
        self._hello = _HELLO.pack(_MAGIC, rank, slots, pid, start, lends, *memory)
        self._agreed = self._hello[_AGREED:]
        self._said: set[str] = set()
        self._listening = self._listen()
        self._wake, self._woken = socket.socketpair()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="kvswap-meet", daemon=True)
        self._thread.start()
        _meetings.add(self)

    @property
    def stopped(self) -> bool:
        """Whether it was closed, or is the parent's in the child of a fork."""
        return self._stop

    def close(self, limit: float | None) -> None:
        """Meet no other members any more. The links stay."""
        if self._stop:
            return
        self._stop = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(3 * _SECONDS if limit is None else min(limit, 3 * _SECONDS))
        with contextlib.suppress(OSError):
            self._path(self._rank).unlink()
        self._close_sockets()

    def _close_sockets(self) -> None:
        for one in (self._listening, self._wake, self._woken):
            one.close()

    def _path(self, rank: int) -> Path:
        return self._folder / f"{self._kind}-{self._group}.{rank}.sock"

    # -- listening ---------------------------------------------------------------------------------------------------

    def _listen(self) -> socket.socket:
        taken = f"another process has rank {self._rank} of group {self._group!r}: take another rank"
        return listen_at(self._folder, self._path(self._rank), taken)

    def _run(self) -> None:
        due, pause = [0.0] * self._rank, [_LEAST_PAUSE] * self._rank  # by rank: when it is tried again
        accept_after = 0.0
        while not self._stop:
            self._reach_all(due, pause)
            now = time.monotonic()
            wait = min([_MOST_PAUSE, *(max(at - now, 0.0) for at in due if at > now)]) if self._rank else None
            polling = select.poll()  # select() takes no descriptor above 1023
            try:
                polling.register(self._woken, select.POLLIN)
                if now >= accept_after:
                    polling.register(self._listening, select.POLLIN)
                else:
                    wait = min(accept_after - now, _MOST_PAUSE if wait is None else wait)
                ready = dict(polling.poll(None if wait is None else 1000 * wait))
                if self._listening.fileno() in ready and not self._guarded(self._admit):
                    accept_after = time.monotonic() + _MOST_PAUSE  # its connection stays, and would be ready again
            except (OSError, ValueError):
                return  # closed

    def _reach_all(self, due: list[float], pause: list[float]) -> None:
        """Try members of lower rank that are missing. One that was there but made no link is tried less often: slots
        were allocated for it."""
        linked = self._core.linked()
        for rank in range(min(self._rank, 1) if self._kind == "lend" else self._rank):  # lenders have only the owner
            now = time.monotonic()
            if linked >> rank & 1:
                if now > due[rank] + _LONG_PAUSE:
                    pause[rank] = _LEAST_PAUSE
            elif now >= due[rank] and not self._stop:
                self._guarded(self._reach, rank)
                pause[rank] = min(2 * pause[rank], _LONG_PAUSE if self._allocated else _MOST_PAUSE)
                due[rank] = time.monotonic() + pause[rank]

    def _guarded(self, meet: Callable[..., bool], *rank: int) -> bool:
        """One meeting. What fails is said once, and tried again later. False: no connection can be taken now."""
        self._allocated = False
        try:
            return meet(*rank)
        except Exception as error:
            text = f"{f'rank {rank[0]}' if rank else 'a member'} of group {self._group!r} takes no part: {error}"
            level = _logger.debug if isinstance(error, OSError) or text in self._said else _logger.warning
            self._said.add(text)
            level("%s", text)
        return True

    # -- meeting -----------------------------------------------------------------------------------------------------

    def _reach(self, rank: int) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_SECONDS)
            try:
                connection.connect(str(self._path(rank)))
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
                    return True  # not there yet
                raise
            check_peer(connection)
            with self._greeted(connection, rank):
                hello, fds = _receive(connection)
                try:
                    if self._check(hello) != rank:
                        raise ValueError(f"the socket of rank {rank} belongs to another rank")
                    self._link(connection, rank, hello, fds)
                finally:
                    _close(fds)
        return True

    def _admit(self) -> bool:
        try:
            connection, _ = self._listening.accept()
        except OSError as error:
            return error.errno not in _SHORT_OF
        with connection:
            connection.settimeout(_SECONDS)
            check_peer(connection)
            hello, fds = _receive(connection)
            if not hello:
                return True  # it only looked whether the rank is taken
            try:
                rank = self._check(hello)
                if rank <= self._rank:
                    raise ValueError(f"rank {rank} connects to rank {self._rank}: only higher ranks do")
                with self._greeted(connection, rank):
                    self._link(connection, rank, hello, fds)
            finally:
                _close(fds)
        return True

    @contextlib.contextmanager
    def _greeted(self, connection: socket.socket, rank: int) -> Iterator[None]:
        """The greeting, with slots for that member. If no link is made, the slots are given back, and the other side is
        told: it may have made one."""
        fd = self._core.meet(rank)
        self._allocated = True
        given = [] if fd < 0 else [fd]  # a member that only lends has no slots
        try:
            socket.send_fds(connection, [self._hello], given)
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                connection.send(_BYE)
            raise
        finally:
            _close(given)
            self._core.unmeet(rank)

    def _check(self, hello: bytes) -> int:
        if not hello:
            raise ValueError("it ended the connection: its log says why")
        if len(hello) != _HELLO.size or hello[:40] != _MAGIC:
            raise ValueError("its greeting is not of this build of kvswap: all members need the same")
        if hello[_AGREED:] != self._agreed:
            raise ValueError("it has another shared pool, or pieces of another size")
        rank: int = _HELLO.unpack(hello)[1]
        return rank

    def _link(self, connection: socket.socket, rank: int, hello: bytes, fds: list[int]) -> None:
        _, _, slots, pid, start, lends, *_ = _HELLO.unpack(hello)
        if len(fds) != (slots > 0):
            raise ValueError(f"{len(fds)} descriptors came with its greeting, which has {slots} slots")
        process = _process(connection, pid, start.rstrip(b"\0").decode())
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            given = os.dup(connection.fileno())
        except OSError:
            if process >= 0:
                os.close(process)
            raise
        self._core.link(rank, given, process, fds[0] if fds else -1, slots, lends)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    hello, fds, _, _ = socket.recv_fds(connection, _HELLO.size + 1, 4, socket.MSG_CMSG_CLOEXEC)
    return hello, fds


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def listen_at(folder: Path, path: Path, taken: str) -> socket.socket:
    """A socket of this user that listens, and does not block. kvswap.Error: `taken`, or it cannot be made."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _locked(folder):
            if _is_taken(path):
                raise _C.Error(taken)
            path.unlink(missing_ok=True)
            _remove_stale(folder)
            listening.bind(str(path))
            os.chmod(path, 0o600)
            listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise _C.Error(f"cannot listen on {path}: {error.strerror}") from None
    except BaseException:
        listening.close()
        raise
    listening.setblocking(False)
    return listening


def check_peer(connection: socket.socket) -> None:
    """ValueError: the other side is another user's."""
    _, uid = peer_of(connection)
    if uid != os.geteuid():
        raise ValueError(f"it is a process of user {uid}")


def _process(connection: socket.socket, pid: int, start: str) -> int:
    """A pidfd of the other process; -1: its end cannot be seen, in another pid namespace or without pidfds."""
    if peer_of(connection)[0] != pid or not hasattr(os, "pidfd_open"):
        return -1
    try:
        process = os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):
            return -1
        raise  # it has ended, or no descriptor is left
    if start_time(pid) == start:
        return process
    os.close(process)
    return -1


def _remove_stale(folder: Path) -> None:
    """The sockets of processes that were killed. Nobody else binds one meanwhile."""
    for path in itertools.islice((path for path in folder.iterdir() if _MEETS.fullmatch(path.name)), _MOST_STALE):
        if path.is_socket() and not _is_taken(path):
            path.unlink(missing_ok=True)


def _is_taken(path: Path) -> bool:
    """Whether a process listens there. The socket of one that was killed refuses."""
    if not path.exists():
        return False
    if not path.is_socket():
        raise _C.Error(f"{path} is no socket: remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return True


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process of this user at a time, within two seconds."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    until = time.monotonic() + _SECONDS
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise _C.Error(
                        f"{folder} has been locked for {_SECONDS:g} s: another process joins a group"
                    ) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)


_meetings: weakref.WeakSet[Meeting] = weakref.WeakSet()


def _in_child() -> None:
    for meeting in list(_meetings):
        meeting._stop = True
        meeting._close_sockets()


os.register_at_fork(after_in_child=_in_child)
