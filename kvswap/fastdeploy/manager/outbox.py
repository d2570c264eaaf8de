"""Messages to clients: each client's in order, and those that it cannot take yet are kept.

Results are kept in any case, for who submits no more has lost none; a client that asks thousands of times and takes
nothing gets no more answers. A client that does not read costs the others nothing: one attempt a flush.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable

from kvswap.fastdeploy.manager.messages import Result, ToClient

__all__ = ["Outbox"]

_log = logging.getLogger("kvswap.manager")

_MOST_KEPT = 4096  # messages for one client; beyond them results alone


class Outbox:
    """`send` returns whether the client could take the message now."""

    def __init__(self, send: Callable[[bytes, ToClient], bool]) -> None:
        self._send = send
        self._kept: dict[bytes, deque[ToClient]] = {}  # by client; none is empty
        self._results: Counter[bytes] = Counter()  # of those, by client
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def results_of(self, client: bytes) -> int:
        """How many results it has not taken."""
        return self._results[client]

    def deliver(self, client: bytes, message: ToClient) -> None:
        """Now, or behind what is kept for the client."""
        kept = self._kept.get(client)
        if kept is None and self._send(client, message):
            return
        if isinstance(message, Result):
            self._results[client] += 1
        elif kept is not None and len(kept) > _MOST_KEPT:
            return
        self._kept.setdefault(client, deque()).append(message)
        self._count += 1

    def flush(self) -> None:
        """Send what is kept. A client that does not read holds up its own messages only."""
        for client in list(self._kept):
            while (kept := self._kept.get(client)) and self._send(client, kept[0]):
                if self._kept.get(client) is kept:  # else sending found that it is gone
                    self._drop_first(client, kept)

    def _drop_first(self, client: bytes, kept: deque[ToClient]) -> None:
        if isinstance(kept.popleft(), Result):
            self._results[client] -= 1
        self._count -= 1
        if not kept:
            del self._kept[client], self._results[client]

    def gone(self, client: bytes) -> None:
        """Nobody reads what is kept for it."""
        kept = self._kept.pop(client, None)
        del self._results[client]
        if kept:
            self._count -= len(kept)
            _log.warning("a client is gone: %d messages for it are dropped", len(kept))
