"""The lender's side of a loan (_offer.py has the messages): other engines' host memory, and members of their groups.

States of a loan, moved by the thread of Lending:

    ASKED -> REGISTERING -> WAITING -> READY -> LENDING     an offer came; all is registered; READY was sent; GO came
    READY, LENDING -> WAITING                               this engine sleeps
    any -> gone                                             the connection has ended, or something failed

Memory is registered and given back in chunks, each while the engine is idle. Memory of an owner that has ended is given
back after ten seconds in any case, a chunk at a time: until then the kernel cannot free it.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import re
import socket
import stat
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvswap import _C
from kvswap._log import logger
from kvswap.share import Member, Place, Role, core_of, member_of
from kvswap.share._meet import check_peer
from kvswap.share._offer import GO, READY, SECONDS, Offer, hello, unpack

_logger = logger("kvswap.share")

CHUNK = 64 << 20  # bytes that are registered at a time: some milliseconds
_AGAIN = 10.0  # seconds until an owner is asked again that had no place for a lender
_MOST_NAMES = 1000


class Loaned(NamedTuple):
    """A loan that this process has made. pid: of the owner. lends: its pieces are brought now. brought: bytes, D2H and
    H2D, of the member that lends now."""

    pid: int
    registered_nbytes: int
    lends: bool
    brought: tuple[int, int]


class _Held:
    """An address for a pool, which holds the mapping."""

    def __init__(self, ptr: int, hold: object) -> None:
        self._ptr, self._hold = ptr, hold

    def data_ptr(self) -> int:
        return self._ptr


class Own(NamedTuple):
    """This process's own rows, which replicas of its engine may have as well: registered here from row 0 at ptr on."""

    offer: Offer
    ptr: int
    pools: tuple[_C.Pool, ...]  # of its blocks


class _Memory:
    """Rows of an owner's file, mapped here. Ranks of one engine may own blocks of the same rows."""

    def __init__(self, device: _C.Device, offer: Offer, fd: int, own: Own | None = None) -> None:
        """own: this process's rows: the same ones are registered already. ValueError: it is not the file that was
        announced, or too short."""
        there = os.fstat(fd)
        if not stat.S_ISREG(there.st_mode) or there.st_uid != os.geteuid():
            raise ValueError(f"its host memory is no file of this user (uid {there.st_uid}, mode {there.st_mode:o})")
        if (there.st_dev, there.st_ino) != (offer.device, offer.inode):
            raise ValueError("its host memory is another file than it announced")
        self.end = offer.begin + offer.nbytes
        if there.st_size < self.end:
            raise ValueError(f"its host memory has {there.st_size} bytes, and it announced {self.end}")
        if offer.begin % mmap.PAGESIZE:
            raise ValueError(f"its rows begin at {offer.begin}, and not on a page")
        self.key = _rows_of(offer)
        self.device, self.users, self.took = device, 0, 0.0
        self.nbytes = offer.nbytes
        rows = math.lcm(offer.stride, mmap.PAGESIZE)  # a registration must not end within a row
        self._step = rows * max(1, CHUNK // rows)
        self._registered: list[int] = []  # where chunks begin
        self._pools: dict[tuple[int, int], tuple[_C.Pool, ...]] = {}
        self._bytes: Any = None
        self.own = own is not None and _rows_of(own.offer) == self.key
        self.fd = os.dup(fd)
        if own is not None and self.own:
            self.ptr = own.ptr
            self._pools[own.offer.offset, own.offer.block_nbytes] = own.pools
            return
        try:
            mapped = mmap.mmap(fd, offer.nbytes, offset=offer.begin)
        except (OSError, ValueError) as error:
            os.close(self.fd)
            raise ValueError(f"its host memory cannot be mapped: {error}") from None
        self._bytes = np.frombuffer(mapped, np.uint8)
        self.ptr = self._bytes.ctypes.data

    @property
    def registered(self) -> int:
        """Bytes."""
        return self.nbytes if self.own else min(self.nbytes, len(self._registered) * self._step)

    def register_next(self) -> None:
        """Another chunk. kvswap.Error, MemoryError: the driver refuses it."""
        begin, at = time.monotonic(), self.registered
        self.device.register(self.ptr + at, min(self._step, self.nbytes - at))
        self._registered.append(at)
        self.took += time.monotonic() - begin

    def unregister_next(self) -> bool:
        """False: nothing is registered any more."""
        if not self._registered:
            return False
        self._pools = {}
        self.device.unregister(self.ptr + self._registered.pop())
        return True

    def is_cut_off(self) -> bool:
        return os.fstat(self.fd).st_size < self.end

    def pools(self, offer: Offer) -> tuple[_C.Pool, ...]:
        """The owner's blocks. Pools must not share bytes, so that owners of the same ones have the same pools."""
        key = offer.offset, offer.block_nbytes
        if key not in self._pools:
            pools, nbytes = list[_C.Pool](), offer.block_nbytes // offer.parts
            for part in range(offer.parts):
                memory: Any = _Held(self.ptr + offer.offset + part * offer.part_stride, self._bytes)
                group = pools[0] if pools else None
                pools.append(_C.Pool(self.device, memory, offer.num_blocks, nbytes, stride=offer.stride, group=group))
            self._pools[key] = tuple(pools)
        return self._pools[key]

    def unmap(self) -> None:
        """With the last reference to it. Nothing is registered."""
        self._pools = {}
        self._bytes = None
        os.close(self.fd)


def _rows_of(offer: Offer) -> tuple[int, ...]:
    return offer.device, offer.inode, offer.begin, offer.stride, offer.num_blocks, offer.parts, offer.part_stride


class _State(Enum):
    ASKED = 0
    REGISTERING = 1
    WAITING = 2
    READY = 3
    LENDING = 4


class _Loan:
    def __init__(self, group: str, connection: socket.socket) -> None:
        self.group, self.connection = group, connection
        self.state, self.deadline = _State.ASKED, time.monotonic() + SECONDS
        self.offer: Offer | None = None
        self.memory: _Memory | None = None
        self.core: _C._Share | None = None
        self.member: Member | None = None
        self.said = False

    def leave(self, limit: float) -> None:
        """Bring nothing more. TimeoutError: pieces are still under way."""
        member, core = self.member, self.core
        if self.state in (_State.READY, _State.LENDING):
            self.state = _State.WAITING
        if member is not None:
            member.close(limit)
        elif core is not None:
            core.close(limit)
        self.member = self.core = None


_kept: list[_Memory] = []  # still registered, and so mapped, until the process ends


class Loans:
    """All loans of a process, to at most `most` engines. By one thread."""

    def __init__(
        self,
        name: str,
        own: str,
        device: _C.Device,
        ours: Own,
        folder: Path,
        most: int,
        is_idle: Callable[[], bool],
        wait: float,
    ) -> None:
        """own: the id of this process; its first half is the engine's. wait: seconds for pieces under way."""
        self._ours: Own | None = ours
        self._socket = re.compile(rf"lend-({re.escape(name)}-([0-9a-f]{{16}}))\.sock")
        self._own, self._device, self._folder, self._most, self._is_idle = own, device, folder, most, is_idle
        self._wait = wait
        self._loans: list[_Loan] = []
        self._memories: dict[tuple[int, ...], _Memory] = {}  # of loans
        self._gone: list[tuple[float, _Memory]] = []  # of none any more, since when
        self._not_before: dict[str, float] = {}  # groups that have refused, or failed
        self.sleeps = False

    def sockets(self) -> list[socket.socket]:
        """What is polled for input."""
        return [loan.connection for loan in self._loans]

    @property
    def waits(self) -> bool:
        """Whether something waits until the engine is idle."""
        working = any(loan.state is _State.REGISTERING for loan in self._loans)
        return (
            working or bool(self._gone) or any(loan.state is _State.WAITING and not self.sleeps for loan in self._loans)
        )

    def snapshot(self) -> list[Loaned]:
        """By any thread."""
        found = []
        for loan in list(self._loans):
            offer, memory, member = loan.offer, loan.memory, loan.member
            if offer is None or memory is None:
                continue
            stats = member.stats() if member is not None else None
            brought = (stats["brought_for_others_d2h"], stats["brought_for_others_h2d"]) if stats else (0, 0)
            found.append(Loaned(offer.pid, memory.registered, bool(member and member.peers), brought))
        return found

    # -- finding ------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Connect to engines that are not known yet, and leave those whose memory was cut off."""
        for loan in list(self._loans):
            if loan.memory is not None and loan.memory.is_cut_off():
                self._fail(loan, "the file of its host memory was cut off")
            elif loan.state is _State.ASKED and time.monotonic() > loan.deadline:
                self._drop(loan, _AGAIN)
            elif loan.member is not None and loan.member.peers and not loan.said:
                loan.said = True
                _logger.info("this GPU's link is lent to process %d", loan.offer.pid if loan.offer else 0)
        known, there = {loan.group for loan in self._loans}, self._there()
        self._not_before = {group: at for group, at in self._not_before.items() if group in there}
        for group in there:
            if (
                len(self._loans) < self._most
                and group not in known
                and self._not_before.get(group, 0) < time.monotonic()
            ):
                self._ask(group)

    def _there(self) -> list[str]:
        """Groups of other engines, beginning with the one behind this process, so that not all lend to the same."""
        try:
            names = [entry.name for entry in os.scandir(self._folder) if entry.name.startswith("lend-")][:_MOST_NAMES]
        except OSError:  # the folder was removed: what is lent already needs none
            return []
        found = [match for match in map(self._socket.fullmatch, names) if match and match[2][:8] != self._own[:8]]
        own = self._own[8:]  # at random
        return [match[1] for match in sorted(found, key=lambda match: (match[2][8:] < own, match[2][8:]))]

    def _ask(self, group: str) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)
        try:
            connection.connect(str(self._folder / f"lend-{group}.sock"))
            check_peer(connection)
            connection.send(hello())
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError):
                _logger.warning("no link is lent to group %s: %s", group, error)
            self._not_before[group] = time.monotonic() + _AGAIN  # it has ended, or is another user's
            connection.close()
            return
        self._loans.append(_Loan(group, connection))

    # -- messages -----------------------------------------------------------------------------------------------------

    def serve(self, ready: set[int]) -> None:
        """Read what has come; ready: descriptors."""
        for loan in list(self._loans):
            if loan.connection.fileno() in ready:
                self._hear(loan)

    def _hear(self, loan: _Loan) -> None:
        fds: list[int] = []
        try:
            message, fds, _, _ = socket.recv_fds(loan.connection, 4096, 4, socket.MSG_CMSG_CLOEXEC)
            if not message:
                self._drop(loan, _AGAIN if loan.state is _State.ASKED else 0.0)
            elif loan.state is _State.ASKED:
                self._take(loan, message, fds)
            elif message == GO and loan.state is _State.READY:
                self._join(loan)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(loan, 0.0)
        except Exception as error:
            self._fail(loan, str(error))
        finally:
            for fd in fds:
                os.close(fd)

    def _take(self, loan: _Loan, message: bytes, fds: list[int]) -> None:
        offer = unpack(message)
        if len(fds) != 1:
            raise ValueError(f"{len(fds)} descriptors came with its offer, not one")
        made = _Memory(self._device, offer, fds[0], self._ours)
        memory = self._memories.setdefault(made.key, made)
        if memory is not made:
            made.unmap()
        memory.users += 1
        loan.offer, loan.memory, loan.state = offer, memory, _State.REGISTERING

    def _join(self, loan: _Loan) -> None:
        if loan.core is None or loan.offer is None or self.sleeps:
            return
        place = Place(0, 0, 0, loan.offer.path, loan.offer.generation)
        try:
            loan.member = member_of(
                loan.core, loan.group, loan.offer.rank, place, self._device, Role(False, True), "lend"
            )
        except _C.Error as error:  # a lender that was killed, or is leaving, has the rank
            _logger.info("no link is lent to process %d yet: %s", loan.offer.pid, error)
            self._drop(loan, _AGAIN)
            return
        loan.state, loan.said = _State.LENDING, False

    # -- work ---------------------------------------------------------------------------------------------------------

    def work(self) -> bool:
        """One piece of work, if the engine is idle. False: there is none, or it is not idle."""
        if self._gone and (self._is_idle() or time.monotonic() - self._gone[0][0] > SECONDS):
            self._give_back()
            return self._is_idle()
        for loan in list(self._loans):
            if loan.state is _State.REGISTERING or (loan.state is _State.WAITING and not self.sleeps):
                if not self._is_idle():
                    return False
                self._advance(loan)
                return True
        return False

    def _advance(self, loan: _Loan) -> None:
        memory, offer = loan.memory, loan.offer
        assert memory is not None and offer is not None
        try:
            if memory.registered < memory.nbytes:
                memory.register_next()
            elif loan.state is _State.REGISTERING and memory.own:
                loan.state = _State.WAITING
            elif loan.state is _State.REGISTERING:
                loan.state = _State.WAITING
                text = "the host memory of process %d is registered: %d MiB in %.2f s, %d MiB at a time"
                _logger.info(text, offer.pid, memory.nbytes >> 20, memory.took, CHUNK >> 20)
            else:
                place = Place(
                    memory.ptr + offer.offset, offer.block_nbytes, offer.num_blocks, offer.path, offer.generation,
                    stride=offer.stride, parts=offer.parts, part_stride=offer.part_stride,
                )  # fmt: skip
                watched = {"file": memory.fd, "file_nbytes": memory.end}
                loan.core = core_of(place, (), memory.pools(offer), piece_nbytes=offer.piece_nbytes, **watched)
                loan.connection.send(READY)
                loan.state = _State.READY
        except OSError:  # the owner has ended, which is read
            loan.state = _State.READY
        except Exception as error:
            self._fail(loan, f"its host memory cannot be used: {error}")

    def _give_back(self) -> None:
        memory = self._gone[0][1]
        try:
            if memory.unregister_next():
                return
            memory.unmap()
        except Exception as error:
            _logger.warning("host memory of an engine that has ended stays registered: %s", error)
        self._gone.pop(0)

    # -- ending -------------------------------------------------------------------------------------------------------

    def _fail(self, loan: _Loan, why: str) -> None:
        _logger.warning(
            "no link is lent to process %d (group %s): %s", loan.offer.pid if loan.offer else 0, loan.group, why
        )
        self._drop(loan, math.inf)

    def _drop(self, loan: _Loan, pause: float) -> None:
        if pause:
            self._not_before[loan.group] = time.monotonic() + pause
        self._loans.remove(loan)
        memory, loan.memory = loan.memory, None
        try:
            loan.leave(self._wait)
        except (TimeoutError, _C.Error) as error:  # its pool and what is behind it stay
            _logger.warning("host memory of an engine stays registered: %s", error)
            return
        finally:
            loan.connection.close()  # the owner gives the rank to another lender then
        if memory is None:
            return
        memory.users -= 1
        if not memory.users:
            del self._memories[memory.key]
            self._gone.append((time.monotonic(), memory))

    def pause(self) -> None:
        """This engine sleeps: its device brings nothing."""
        for loan in self._loans:
            with contextlib.suppress(TimeoutError):
                loan.leave(self._wait)

    def close(self, limit: float) -> None:
        """End all loans, and give memory back for so many seconds. The process mostly ends then, which gives back the
        rest: hundreds of GB would take minutes here."""
        for loan in list(self._loans):
            self._drop(loan, 0.0)
        end = time.monotonic() + limit
        while self._gone and time.monotonic() < end:
            self._give_back()
        _kept.extend(memory for _, memory in self._gone)
        self._ours = None

    def abandon(self) -> None:
        """In the child of a fork."""
        for loan in self._loans:
            loan.connection.close()
