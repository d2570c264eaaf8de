"""The epoch of an identity: 16 random bytes in an object of Mooncake. They are in the name of each block, so that a new
epoch is the end of all blocks of the one before.

Several threads read the object all the time, so that it is at most a second old, and again after each load. Where a
node does not answer, one thread waits for it; the others do not ask this node as long as the master names it first. The
bytes of a read that failed can still arrive, and be those of an old epoch: another slot is used from then on.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from kvswap import _C

from ._calls import Turn
from ._client import Client, Closed
from ._codes import reason
from ._names import HASH_NBYTES, hashes

_log = logging.getLogger("kvswap.remote")
SLOT_NBYTES = 128
_NBYTES = 64 + HASH_NBYTES
SLOTS = 64
_READERS = 4
FRESH_SECONDS = 1.0
_PERIOD_SECONDS = 0.4
_SLOW_SECONDS = 0.25
_REPLICAS = 2
_WRONG_MAC = 6
_MOST_DAMAGED = 3  # reads in a row, until a new epoch is written over it


class Epoch:
    """The epoch of an identity: threads read its object from the nodes again and again. Any thread may call.

    slots: addresses of SLOT_NBYTES registered bytes each. A reader takes one; after a read that failed it takes the
    next one, round and round, because late bytes may still arrive in the old one. turn: the lock by which loads take
    turns; a read of the epoch takes its turn, too.
    """

    def __init__(self, client: Client, identity: bytes, secret: bytes | None, slots: list[int], turn: Turn) -> None:
        self._client, self._identity, self._secret, self._turn = client, identity, secret, turn
        self.name = f"kvswap/{identity.hex()}/epoch"
        self._hash = hashes([self.name])
        self._config = client.config()
        self._config.with_hard_pin, self._config.replica_num = True, _REPLICAS
        self._lock = threading.Lock()
        self._wanted, self._found = threading.Condition(self._lock), threading.Condition(self._lock)
        self._value: bytes | None = None  # guarded by _lock, as all below
        self._as_of = -FRESH_SECONDS  # when the read began that found it
        self._due = 0.0  # when the next read begins
        self._reading: dict[int, float] = {}
        self._calls: deque[tuple[float, Callable[[bytes], None]]] = deque()  # in the order of their time
        self._suspect: str | None = None  # the node that a slow read waits for
        self._damaged = 0
        self._why = "it has not been read yet"
        self._closed = False
        self._slots = itertools.cycle(slots)
        for i in range(_READERS):
            threading.Thread(target=self._work, args=(i,), name=f"kvswap-remote-epoch-{i}", daemon=True).start()

    def known(self) -> bytes | None:
        """At most a second old; None: it cannot be read."""
        with self._lock:
            return self._value if time.monotonic() - self._as_of <= FRESH_SECONDS else None

    def since(self, begin: float, end: float) -> bytes | None:
        """By a read that begins after `begin`; None: there was none until `end`."""
        with self._lock:
            self._due = min(self._due, begin)
            self._wanted.notify()
            while self._as_of < begin and not self._closed and (left := end - time.monotonic()) > 0:
                self._found.wait(left)
            return self._value if self._as_of >= begin else None

    def then(self, call: Callable[[bytes], None], *, at_once: bool) -> None:
        """Call `call` with the epoch, on a reader's thread, after a read that begins after this call. at_once: that
        read begins immediately; otherwise it is the next regular one. Without a successful read `call` is not made."""
        with self._lock:
            now = time.monotonic()
            self._calls.append((now, call))
            if at_once and now < self._due:
                self._due = now
                self._wanted.notify()

    @property
    def why(self) -> str:
        """Empty, or why it cannot be read."""
        return "" if self.known() is not None else self._why

    def write(self, slot: int, epoch: bytes, *, replace: bool) -> int:
        """Mooncake's code. Without replace an epoch that there is stays."""
        block = np.frombuffer(epoch, np.uint8)
        at, address = np.array([slot], np.uint64), np.array([block.ctypes.data], np.uint64)
        _C._remote_seal(at, address, HASH_NBYTES, self._identity, self._hash, self._secret)
        how = "batch_upsert_from" if replace else "batch_put_from"
        return self._client.codes(how, 1, [self.name], [slot], [_NBYTES], self._config)[0]

    def renew(self, slot: int, end: float) -> str:
        """Begin a new epoch, and read one that is not the one before: where another client's came between, that one
        serves as well. Empty, or what went wrong."""
        begin = time.monotonic()
        before = self.since(begin, begin + min(FRESH_SECONDS, (end - begin) / 2))  # there may be none that can be read
        while True:
            code = self.write(slot, os.urandom(HASH_NBYTES), replace=True)
            after = self.since(time.monotonic(), end)
            if after is not None and (after != before if before is not None else code == 0):
                return ""
            if time.monotonic() >= end:
                return f"{reason(code)}; {self.why or 'the epoch that is read is the old one'}"
            time.sleep(0.02)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._wanted.notify_all()
            self._found.notify_all()

    # -- a reader's thread --------------------------------------------------------------------------------------------

    def _work(self, reader: int) -> None:
        slot = next(self._slots)
        while True:
            with self._lock:
                while not self._closed and (pause := self._pause_locked()) > 0:
                    self._wanted.wait(pause)
                if self._closed:
                    return
                begin = self._reading[reader] = time.monotonic()
                self._due = begin + _PERIOD_SECONDS
                slow = len(self._reading) > 1
            try:
                found = self._read(slot, slow)
            except Closed:
                return
            except Exception as error:
                found = str(error) or type(error).__name__
                slot = next(self._slots)
            ready: list[Callable[[bytes], None]] = []
            with self._lock:
                del self._reading[reader]
                if not self._reading:
                    self._suspect = None
                if isinstance(found, bytes):
                    if begin > self._as_of:
                        self._value, self._as_of = found, begin
                    while self._calls and self._calls[0][0] <= begin:
                        ready.append(self._calls.popleft()[1])
                else:
                    self._why = found
                self._found.notify_all()
                if not isinstance(found, bytes) and not self._closed:
                    self._wanted.wait(0.05)
            if isinstance(found, bytes):
                for call in ready:
                    call(found)

    def _pause_locked(self) -> float:
        """Seconds until a read may begin: one at a time, unless one is slow."""
        now = time.monotonic()
        quick = [since for since in self._reading.values() if now - since < _SLOW_SECONDS]
        return _SLOW_SECONDS - (now - max(quick)) if quick else self._due - now

    def _read(self, slot: int, slow: bool) -> bytes | str:
        if slow:
            first = self._first_node()
            with self._lock:
                if self._suspect is None:
                    self._suspect = first
                if first == self._suspect:
                    return f"node {first} does not answer"
        code = self._get(slot)
        if code == -704:
            made = self.write(slot, os.urandom(HASH_NBYTES), replace=False)
            if made != 0:
                return f"no node has {self.name}, and it could not be made: {reason(made)}"
            code = self._get(slot)
        if code != _NBYTES:
            raise _C.Error(f"reading {self.name}: {reason(code)}")
        return self._checked(slot)

    def _get(self, slot: int) -> int:
        with self._turn.taken():
            return self._client.codes("batch_get_into", 1, [self.name], [slot], [_NBYTES])[0]

    def _checked(self, slot: int) -> bytes | str:
        value = np.zeros(HASH_NBYTES, np.uint8)
        at, address = np.array([slot], np.uint64), np.array([value.ctypes.data], np.uint64)
        verdict = _C._remote_check(at, address, HASH_NBYTES, self._identity, self._hash, self._secret)[0]
        if verdict == 0:
            self._damaged = 0
            return value.tobytes()
        if verdict == _WRONG_MAC:
            return f"{self.name} was made with another secret"
        self._damaged += 1
        if self._damaged >= _MOST_DAMAGED:
            _log.warning("%s is damaged: a new epoch begins", self.name)
            self._damaged = 0
            self.write(slot, os.urandom(HASH_NBYTES), replace=True)
        return f"{self.name} is damaged"

    def _first_node(self) -> str:
        found = node_of(self._client.call("batch_get_replica_desc", [self.name]).get(self.name, ()))
        return found or "of the epoch"


def node_of(replicas: object) -> str | None:
    """The node that Mooncake reads from: the first one whose replica is in memory. Empty: a replica without a node;
    None: there is none."""
    listed = list(replicas)  # type: ignore[call-overload]
    for each in listed:
        if each.is_memory_replica() and getattr(each.status, "name", "") == "COMPLETE":
            return str(each.get_memory_descriptor().buffer_descriptor.transport_endpoint)
    return "" if listed else None
