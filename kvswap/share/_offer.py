"""The owner's side of a loan: it offers its host memory to lenders of other engines (_lend.py).

    owner                                        lender (_loan.py)
    listens on lend-NAME-ID.sock                 finds the socket, and connects
                                 <- HELLO
    gives it a rank
    OFFER, with a descriptor ->                  maps the memory, and registers it while its engine is idle
                                 <- READY
    GO, while the engine is idle ->              joins the owner's group
                                 <- READY        after it slept

The loan ends with the connection. Both sides ask the kernel for the other's user.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvswap import _C
from kvswap._log import logger
from kvswap._top_socket import peer_of, start_time
from kvswap.share._meet import check_peer

_logger = logger("kvswap.share")

HELLO = struct.Struct("<40sq20s")  # magic and build, pid, start time
MAGIC = f"kvslend2{_C._sources}".encode()  # members of other builds make no links: nothing is registered for them
READY, GO = b"ready", b"go"
SECONDS = 10.0  # for the next message; and until the owner is idle
_OFFER = struct.Struct("<40sIIq11Q128s")
_MOST_PARTS = 8
_SHORT_PAUSE = 1.0  # where no connection can be accepted


class Offer(NamedTuple):
    """An owner's host memory: row i begins at begin + i * stride of the file, and block i is the block_nbytes bytes
    from `offset` of row i on. A block in several parts has equal pieces in so many rows, part_stride bytes apart."""

    rank: int  # of the lender, in the owner's group
    slots: int
    pid: int
    device: int  # of the file
    inode: int
    begin: int
    stride: int
    num_blocks: int
    offset: int
    block_nbytes: int
    piece_nbytes: int
    parts: int
    part_stride: int
    generation: int
    path: str

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        return (self.parts - 1) * self.part_stride + self.stride * self.num_blocks

    @property
    def is_possible(self) -> bool:
        """Whether there is memory of this form, whose registrations can all end between rows."""
        if not (self.num_blocks > 0 and 1 <= self.parts <= _MOST_PARTS and self.block_nbytes >= self.parts):
            return False
        inside = self.offset + self.block_nbytes // self.parts <= self.stride and self.block_nbytes % self.parts == 0
        apart = self.part_stride >= self.stride * self.num_blocks and self.part_stride % self.stride == 0
        return inside and (self.parts == 1 or apart) and self.nbytes < 1 << 62

    def pack(self) -> bytes:
        *numbers, path = self
        return _OFFER.pack(MAGIC, *numbers, path.encode())


def unpack(message: bytes) -> Offer:
    """ValueError: it is no offer."""
    if len(message) != _OFFER.size or message[: len(MAGIC)] != MAGIC:
        raise ValueError(f"its offer of {len(message)} bytes is not of this build of kvswap: all engines need the same")
    _, *numbers, path = _OFFER.unpack(message)
    offer = Offer._make([*numbers, path.rstrip(b"\0").decode()])
    if not (1 <= offer.rank <= 15 and offer.is_possible):
        raise ValueError(f"its offer has numbers that no memory has: {offer}")
    return offer


def hello() -> bytes:
    pid = os.getpid()
    return HELLO.pack(MAGIC, pid, start_time(pid).encode())


class _Client:
    """A lender. States: connected; offered (rank); ready, until GO is sent."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.deadline = connection, time.monotonic() + SECONDS
        self.rank = self.pid = 0
        self.ready_since: float | None = None


class Offering:
    """Offers memory to the first `most` lenders that come. By one thread."""

    def __init__(self, listening: socket.socket, offer: Offer, fd: int, most: int, is_idle: Callable[[], bool]) -> None:
        self._listening, self._offer, self._fd, self._most, self._is_idle = listening, offer, fd, most, is_idle
        self._clients: list[_Client] = []
        self._accept_after = 0.0
        self._said: set[int] = set()  # pids

    def sockets(self) -> list[socket.socket]:
        """What is polled for input."""
        listening = [self._listening] if time.monotonic() >= self._accept_after else []
        return [*listening, *(client.connection for client in self._clients)]

    @property
    def waits(self) -> bool:
        """Whether a lender waits until the engine is idle."""
        return any(client.ready_since is not None for client in self._clients)

    def serve(self, ready: set[int]) -> None:
        """Read what has come; ready: descriptors."""
        now = time.monotonic()
        kept = []
        for client in self._clients:
            served = client.connection.fileno() not in ready or self._hear(client)
            if served and (client.rank or now < client.deadline):
                kept.append(client)
            else:
                client.connection.close()
        self._clients = kept
        if self._listening.fileno() in ready:
            self._accept()

    def work(self) -> None:
        """Let those join that have registered the memory: now if the engine is idle, and after ten seconds in any case.
        The slots for a lender are allocated then."""
        for client in self._clients:
            since = client.ready_since
            if since is not None and (self._is_idle() or time.monotonic() - since > SECONDS):
                client.ready_since = None
                with contextlib.suppress(OSError):  # its end is read
                    client.connection.send(GO)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except BlockingIOError:
            return
        except OSError:
            self._accept_after = time.monotonic() + _SHORT_PAUSE
            return
        connection.setblocking(False)
        try:
            check_peer(connection)
        except (OSError, ValueError) as error:
            _logger.warning("the host memory is not offered to a process: %s", error)
            connection.close()
            return
        self._clients.append(_Client(connection))

    def _hear(self, client: _Client) -> bool:
        """False: the connection has ended, or is to end."""
        try:
            message = client.connection.recv(HELLO.size + 1)
            if not client.rank:
                return self._greet(client, message)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if message != READY:
            return False
        client.ready_since = time.monotonic()
        return True

    def _greet(self, client: _Client, message: bytes) -> bool:
        if len(message) != HELLO.size or message[: len(MAGIC)] != MAGIC:
            self._say_another_build(client, message)
            return False
        taken = {each.rank for each in self._clients}
        free = [rank for rank in range(1, self._most + 1) if rank not in taken]
        if not free:
            return False
        client.rank, client.pid = free[0], HELLO.unpack(message)[1]
        socket.send_fds(client.connection, [self._offer._replace(rank=client.rank).pack()], [self._fd])
        return True

    def _say_another_build(self, client: _Client, message: bytes) -> None:
        """Once for a process, which asks again."""
        pid, _ = peer_of(client.connection)
        if message and pid not in self._said:  # without a message it only looked whether the socket is taken
            self._said.add(pid)
            text = "the host memory is not offered to process %d: it has another build of kvswap, and all need the same"
            _logger.warning(text, pid)

    def close(self, path: Path | None) -> None:
        """path: of the socket; None: it stays, in the child of a fork."""
        for each in (self._listening, *(client.connection for client in self._clients)):
            each.close()
        self._clients = []
        os.close(self._fd)
        if path is not None:
            path.unlink(missing_ok=True)
