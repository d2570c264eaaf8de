"""Links that carry one transfer after the other, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Iterable


class Link:
    """One direction of a link. A transfer takes bytes / rate after those before it, and ends a latency later."""

    __slots__ = ("_free", "_latency", "_rate", "_window", "busy", "nbytes", "times", "transfers")

    def __init__(self, rate: float, latency: float, window: float) -> None:
        self._rate, self._latency, self._window = rate, latency, window
        self._free = 0.0
        self.nbytes = self.transfers = 0
        self.busy = 0.0
        self.times: list[float] = []  # busy seconds of each window

    def take(self, now: float, nbytes: int) -> float:
        """When the transfer ends."""
        begin = max(now, self._free)
        end = self._free = begin + nbytes / self._rate
        self.nbytes += nbytes
        self.transfers += 1
        self.busy += end - begin
        first, last = int(begin / self._window), int(end / self._window)
        if last >= len(self.times):
            self.times.extend([0.0] * (last + 1 - len(self.times)))
        if first == last:
            self.times[first] += end - begin
        else:
            self.times[first] += (first + 1) * self._window - begin
            for at in range(first + 1, last):
                self.times[at] += self._window
            self.times[last] += end - last * self._window
        return end + self._latency

    def peak(self) -> float:
        """The largest share of a window in which it was busy."""
        return max(self.times, default=0.0) / self._window


def through(links: Iterable[Link], now: float, nbytes: int) -> float:
    """When a transfer ends that goes through several links at once: the busiest decides."""
    end = now
    for link in links:
        end = max(end, link.take(now, nbytes))
    return end
