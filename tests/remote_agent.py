"""A stand-in for NIXL: agents of one process that copy between registered memory. It can be held, made to fail, cut
between two pieces, and it can damage what it moves."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

_agents: dict[bytes, LocalAgent] = {}
_lock = threading.Lock()


class LocalAgent:
    """between(operation, i): called before piece i of each transfer; its exception fails the transfer there.
    stuck: while it is set, transfers do not go on. dead: nothing can reach this agent."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.between: Callable[[str, int], None] | None = None
        self.stuck = threading.Event()
        self.dead = False
        self.damage: Callable[[str, int], None] | None = None  # called after a piece, with its destination
        self.regions: list[tuple[int, int]] = []
        self.known: dict[str, LocalAgent] = {}
        self.moved = 0
        with _lock:
            _agents[name.encode()] = self

    def register(self, ptr: int, nbytes: int) -> None:
        self.regions.append((ptr, nbytes))

    def metadata(self) -> bytes:
        return self.name.encode()

    def add(self, metadata: bytes) -> str:
        with _lock:
            other = _agents[metadata]
        self.known[other.name] = other
        return other.name

    def remove(self, name: str) -> None:
        del self.known[name]

    def begin(self, operation: str, name: str, local: Any, remote: Any, nbytes: int) -> Any:
        other = self.known[name]
        for agent, side in ((self, local), (other, remote)):
            for address in side.tolist():
                assert any(at <= address and address + nbytes <= at + size for at, size in agent.regions), "not ours"
        return [operation, other, list(zip(local.tolist(), remote.tolist(), strict=True)), nbytes, 0]

    def running(self, handle: Any) -> bool:
        operation, other, pairs, nbytes, at = handle
        if self.stuck.is_set():
            return True
        if other.dead:
            raise ConnectionError("the peer has died")
        if at == len(pairs):
            return False
        if self.between is not None:
            self.between(operation, at)
        local, remote = pairs[at]
        to, source = (local, remote) if operation == "READ" else (remote, local)
        ctypes.memmove(to, source, nbytes)
        self.moved += nbytes
        if self.damage is not None:
            self.damage(operation, to)
        handle[4] += 1
        return True

    def end(self, handle: Any) -> bool:
        return not self.stuck.is_set()

    def close(self) -> None:
        with _lock:
            _agents.pop(self.name.encode(), None)


def be_patient(monkeypatch: Any, seconds: float) -> None:
    """The limits of answers and heartbeats are for users: a busy machine must not fail a test by them."""
    from kvswap.remote import _link, _server, _store

    monkeypatch.setattr(_server, "_FETCH_SECONDS", seconds)
    monkeypatch.setattr(_store, "_ANSWER_SECONDS", seconds)
    monkeypatch.setattr(_link, "HEARTBEAT", seconds)
