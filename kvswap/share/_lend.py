"""Engines on one machine that lend each other their GPU's link to the host (docs/share.md, "Between engines").

Each process of an engine has a group of its own, in which it only takes pieces. Processes of other engines with the
same name join it as lenders, which only bring pieces. An engine's host memory is its own: a lender gets it as a
descriptor, maps it, and registers it with its device while its engine is idle. _offer.py has what is said, _loan.py
what a lender does. One thread of each process does both.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from kvswap import _C
from kvswap._log import logger
from kvswap._top_socket import prepare_folder
from kvswap.share import Member, Place, Role, core_of, member_of
from kvswap.share._loan import Loaned, Loans, Own
from kvswap.share._meet import listen_at
from kvswap.share._offer import Offer, Offering

_logger = logger("kvswap.share")

DEFAULT_NAME = "default"
LENDERS = 3  # each has slots on the owner's GPU
MOST_LENDERS = 15
NAME = re.compile(r"[A-Za-z0-9._-]{1,20}")
_LOOK = 1.0  # seconds between looks for engines
_GIVE_BACK = 5.0  # seconds to unregister others' memory at the end
_SOON = 0.05  # where something waits until the engine is idle


class HostFile(NamedTuple):
    """The file behind an engine's host memory. fd: any descriptor of it; it stays the caller's. begin: where the rows
    begin in it, on a page. ptr: the address of the first row here. Parts of blocks are a whole number of rows apart."""

    fd: int
    begin: int
    ptr: int


class Lending:
    """One process of an engine. member: loads and stores its blocks; with no lender, over its own link.

    name: engines with the same name lend to each other. engine: a text that differs from engine to engine; processes of
      one engine do not lend to each other, since they load at the same times. place, gpus, hosts: as for
      share.join_at().
    is_idle: whether the engine runs nothing on the device. Called by the thread.
    lenders: at most so many engines lend to this one, and this one lends to so many: 1 to 15.

    Joining allocates memory of the device: `slots` pieces for each lender, and four for each engine that this one lends
    to. kvswap.Error: no socket can be made. Any thread may use it; a forked child must make a new one.
    """

    def __init__(
        self,
        name: str,
        engine: str,
        place: Place,
        gpus: tuple[_C.Pool, ...],
        hosts: tuple[_C.Pool, ...],
        file: HostFile,
        *,
        is_idle: Callable[[], bool] = lambda: True,
        lenders: int = LENDERS,
        piece_nbytes: int = 4 << 20,
        slots: int = 4,
        share: float = 1.0,
        stall: float = 0.02,
    ) -> None:
        if not NAME.fullmatch(name):
            raise ValueError(f"name is {name!r}: 1 to 20 letters, digits, '.', '_' or '-'")
        if not 1 <= lenders <= MOST_LENDERS:
            raise ValueError(f"lenders is {lenders}; it is 1 to {MOST_LENDERS}")
        own = hashlib.blake2b(engine.encode(), digest_size=4).hexdigest() + os.urandom(4).hex()
        self._group, self._folder = f"{name}-{own}", prepare_folder()
        self._path = self._folder / f"lend-{self._group}.sock"
        core = core_of(
            place, gpus, hosts, slots=slots, piece_nbytes=piece_nbytes, share=share, stall=stall, takes_only=True
        )
        block, blocks, slot, _, _ = core.form()
        there, stride = os.fstat(file.fd), place.stride or place.block_nbytes // place.parts
        offer = Offer(
            0, slots, os.getpid(), there.st_dev, there.st_ino, file.begin, stride, blocks, place.ptr - file.ptr, block,
            slot, place.parts, place.part_stride, place.generation, place.path,
        )  # fmt: skip
        if not offer.is_possible:
            raise ValueError(f"the parts of {place} are no whole number of rows apart")
        if there.st_size < file.begin + offer.nbytes:
            raise ValueError(f"the file has {there.st_size} bytes, and the rows need {file.begin + offer.nbytes}")
        self._stop = self._sleeps = False
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        listening = listen_at(self._folder, self._path, f"another process has {self._path}")
        self._offering = Offering(listening, offer, os.dup(file.fd), lenders, is_idle)
        ours = Own(offer, file.ptr, hosts)
        self._loans = Loans(name, own, gpus[0].device, ours, self._folder, lenders, is_idle, 10.0)
        self.member: Member = member_of(core, self._group, 0, place, gpus[0].device, Role(True, False), "lend")
        self._changed = threading.Condition()
        self._ended = False
        self._lenders: tuple[int, ...] = ()
        self._thread = threading.Thread(target=self._run, name="kvswap-lend", daemon=True)
        self._thread.start()
        _all.add(self)
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # last, so that it runs first

    @property
    def loans(self) -> list[Loaned]:
        """What this process lends to others."""
        return self._loans.snapshot()

    def pause(self, limit: float = 20.0) -> None:
        """Lend nothing until resume(): this engine sleeps. TimeoutError: pieces were still under way."""
        self._ask_to_sleep(True)
        end = time.monotonic() + limit
        with self._changed:
            while not (self._loans.sleeps or self._ended):
                if not self._changed.wait(max(0.0, end - time.monotonic())):
                    raise TimeoutError(f"the link was still lent after {limit:g} s")

    def resume(self) -> None:
        """Lend again."""
        self._ask_to_sleep(False)

    def _ask_to_sleep(self, sleeps: bool) -> None:
        self._sleeps = sleeps
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def close(self, limit: float | None = 60.0) -> None:
        """Leave all groups. A second call does nothing. limit: seconds; None: none. TimeoutError: pieces are still
        under way; call again."""
        begin = time.monotonic()
        self._stop = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(limit)
        if self._thread.is_alive():
            raise TimeoutError(f"the link was still lent after {limit} s")
        self.member.close(None if limit is None else max(0.0, limit - (time.monotonic() - begin)))
        self._wake.close()
        self._woken.close()
        _all.discard(self)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        look_at = 0.0
        try:
            while not self._stop:
                if time.monotonic() >= look_at:
                    self._loans.look()
                    self._say_who_lends()
                    look_at = time.monotonic() + _LOOK
                self._change_sleep()
                self._offering.work()
                more = self._loans.work()
                soon = _SOON if self._loans.waits or self._offering.waits else _LOOK
                self._serve(0.0 if more else min(soon, max(0.0, look_at - time.monotonic())))
        except Exception:
            _logger.exception("links are lent no more")
        finally:
            with contextlib.suppress(OSError):
                self._offering.close(self._path)
            self._loans.close(_GIVE_BACK)
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _serve(self, wait: float) -> None:
        polling = select.poll()  # select() takes no descriptor above 1023
        for one in (self._woken, *self._offering.sockets(), *self._loans.sockets()):
            polling.register(one, select.POLLIN)
        ready = {fd for fd, _ in polling.poll(1000 * wait)}
        if self._woken.fileno() in ready:
            self._woken.recv(64)
        self._offering.serve(ready)
        self._loans.serve(ready)

    def _change_sleep(self) -> None:
        if self._sleeps == self._loans.sleeps:
            return
        if self._sleeps:
            self._loans.pause()
        with self._changed:
            self._loans.sleeps = self._sleeps
            self._changed.notify_all()

    def _say_who_lends(self) -> None:
        now = self.member.peers
        if now != self._lenders:
            _logger.info("engines that lend this one their link: %d", len(now))
        self._lenders = now

    def _abandon(self) -> None:
        """In the child of a fork."""
        self._stop = True
        self._offering.close(None)
        self._loans.abandon()
        self._wake.close()
        self._woken.close()


_all: set[Lending] = set()  # until close()


def _close_all() -> None:
    for lending in list(_all):
        with contextlib.suppress(Exception):
            lending.close(20)


def _in_child() -> None:
    for lending in list(_all):
        lending._abandon()
    _all.clear()


os.register_at_fork(after_in_child=_in_child)
