"""Messages to clients: each client's in order, and those that it cannot take yet are kept.

Results are kept in any case, for who submits no more has lost none; a client that asks thousands of times and takes
nothing gets no more answers.
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
        self._kept: deque[tuple[bytes, ToClient]] = deque()
        self._of_client: Counter[bytes] = Counter()  # of those
        self.results = 0  # of those

    def __len__(self) -> int:
        return len(self._kept)

    def deliver(self, client: bytes, message: ToClient) -> None:
        """Now, or behind what is kept for the client."""
        if not self._of_client[client] and self._send(client, message):
            return
        if isinstance(message, Result):
            self.results += 1
        elif self._of_client[client] > _MOST_KEPT:
            return
        self._kept.append((client, message))
        self._of_client[client] += 1

    def flush(self) -> None:
        """Send what is kept. A client that does not read holds up its own messages only."""
        blocked: set[bytes] = set()
        kept, self._kept = self._kept, deque()
        for client, message in kept:
            if client in blocked or not self._send(client, message):
                blocked.add(client)
                self._kept.append((client, message))
            elif self._of_client[client] > 1:
                self._of_client[client] -= 1
            else:
                del self._of_client[client]
        self._count_results()

    def gone(self, client: bytes) -> None:
        """Nobody reads what is kept for it."""
        dropped = self._of_client.pop(client, 0)
        if dropped:
            self._kept = deque((to, message) for to, message in self._kept if to != client)
            self._count_results()
            _log.warning("a client is gone: %d messages for it are dropped", dropped)

    def _count_results(self) -> None:
        self.results = sum(isinstance(message, Result) for _, message in self._kept)
