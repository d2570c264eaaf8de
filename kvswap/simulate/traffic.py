"""The requests of many services, made of one trace.

Each copy of the trace is a service with blocks of its own, but for a share of common ones: the blocks with the most
references, which are beginnings of prompts, since no block has more references than the one before it. A copy begins
at a time drawn from 0 to `shift` seconds of the trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvswap.replay.trace import Trace

from .settings import Settings


@dataclass(frozen=True)
class Arrival:
    time: float
    copy: int
    request: int  # of the trace


class Traffic:
    """Arrivals in order of time. Blocks are numbered from 0 over all copies."""

    def __init__(self, trace: Trace, settings: Settings) -> None:
        self._trace = trace
        distinct, first, ids, counts = np.unique(
            trace.hashes, return_index=True, return_inverse=True, return_counts=True
        )
        self._ids: NDArray[np.int64] = ids.astype(np.int64)
        self._distinct = len(distinct)
        self.num_blocks = len(distinct) * settings.copies
        common = np.zeros(len(distinct), bool)
        order = np.lexsort((first, -counts))  # the most used first; of equal ones the first in the trace
        shares = np.cumsum(counts[order]) / max(1, len(trace.hashes))
        common[order[: np.searchsorted(shares, settings.common, "right") if settings.common < 1 else None]] = True
        self._common = common
        self.common_blocks = int(common.sum())
        self.common_share = float(counts[common].sum() / max(1, len(trace.hashes)))
        shifts = np.random.default_rng(settings.seed).random(settings.copies) * settings.shift
        shifts[0] = 0
        times = (trace.timestamps[None, :] / 1e3 + shifts[:, None]) / settings.speed
        times -= times.min()
        self._order = np.argsort(times, axis=None, kind="stable")
        self._times = times.ravel()[self._order]
        self.requests = len(self._order)
        self.seconds = float(self._times[-1])

    def __iter__(self) -> Iterator[Arrival]:
        requests = len(self._trace)
        for time, at in zip(self._times.tolist(), self._order.tolist(), strict=True):
            yield Arrival(time, at // requests, at % requests)

    def blocks(self, arrival: Arrival) -> NDArray[np.uint64]:
        trace = self._trace
        ids = self._ids[trace.offsets[arrival.request] : trace.offsets[arrival.request + 1]]
        if arrival.copy:
            ids = np.where(self._common[ids], ids, ids + arrival.copy * self._distinct)
        return ids.astype(np.uint64)

    def tokens(self, arrival: Arrival) -> int:
        return int(self._trace.input_tokens[arrival.request])


class Router:
    """Which node serves a request: the next one that is up, or the one that served the longest part of its prefix."""

    def __init__(self, settings: Settings, traffic: Traffic) -> None:
        self._prefix = settings.route == "prefix"
        self._last = np.full(traffic.num_blocks if self._prefix else 0, -1, np.int32)
        lists, size = (settings.racks, settings.rack) if settings.lists == "rack" else (1, settings.nodes)
        self._groups = [range(i * size, min((i + 1) * size, settings.nodes)) for i in range(lists)]
        self._next = [0] * lists

    def choose(self, arrival: Arrival, blocks: NDArray[np.uint64], up: list[bool]) -> int | None:
        """None: no node of the service is up. With lists of a rack each service stays in one rack."""
        node = self._known(blocks, up) if self._prefix else None
        if node is None:
            node = self._in_turn(arrival.copy % len(self._groups), up)
        if self._prefix and node is not None:
            self._last[blocks.astype(np.int64)] = node
        return node

    def _known(self, blocks: NDArray[np.uint64], up: list[bool]) -> int | None:
        """The node that served the deepest known block, if that is half of the prompt: a first block that all share
        says nothing."""
        last = self._last[blocks.astype(np.int64)]
        known = np.flatnonzero(last >= 0)
        if not len(known) or 2 * (known[-1] + 1) < len(blocks):
            return None
        node = int(last[known[-1]])
        return node if up[node] else None

    def _in_turn(self, group: int, up: list[bool]) -> int | None:
        nodes = self._groups[group]
        for _ in range(len(nodes)):
            node = nodes[self._next[group] % len(nodes)]
            self._next[group] += 1
            if up[node]:
                return node
        return None
