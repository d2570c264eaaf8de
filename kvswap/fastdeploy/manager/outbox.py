"""Messages to clients, in order for each client. Messages that cannot be sent yet are queued.

Results are always queued; their number is bounded by the tasks of the client. Answers are dropped beyond a limit, for a
client that sends requests and reads nothing. A client that does not read costs one attempt a flush.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable

from kvswap.fastdeploy.manager.messages import Result, ToClient

__all__ = ["Outbox"]

_log = logging.getLogger("kvswap.manager")

_MOST_KEPT = 4096  # messages for one client; beyond this only results are queued


class Outbox:
    """`send` returns whether the message could be sent now."""

    def __init__(self, send: Callable[[bytes, ToClient], bool]) -> None:
        self._send = send
        self._kept: dict[bytes, deque[ToClient]] = {}  # by client; no deque is empty
        self._results: Counter[bytes] = Counter()  # queued results, by client
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def results_of(self, client: bytes) -> int:
        """Number of unsent results for this client."""
        return self._results[client]

    def deliver(self, client: bytes, message: ToClient) -> None:
        """Send a message now, or append it to the client's queue."""
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
        """Send queued messages. A client that does not read delays only its own."""
        for client in list(self._kept):
            while (kept := self._kept.get(client)) and self._send(client, kept[0]):
                if self._kept.get(client) is kept:  # else send() has found that the client is gone
                    self._drop_first(client, kept)

    def _drop_first(self, client: bytes, kept: deque[ToClient]) -> None:
        if isinstance(kept.popleft(), Result):
            self._results[client] -= 1
        self._count -= 1
        if not kept:
            del self._kept[client], self._results[client]

    def gone(self, client: bytes) -> None:
        """The client has ended: drop its messages."""
        kept = self._kept.pop(client, None)
        del self._results[client]
        if kept:
            self._count -= len(kept)
            _log.warning("a client is gone: %d messages for it are dropped", len(kept))
