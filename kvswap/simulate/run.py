"""The clock: requests, look-ups, transfers and failures in the order of simulated time.

A request is a generator that yields the time at which it goes on:

    admit --look-up--> loads from other nodes ---> load to the GPUs ---> ready --> store to the host --> store to nodes
      +----------------> load of host hits to the GPUs ----------------^

What it finds and what it evicts is decided when it is admitted, as in the replay. Computing takes no time.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

import numpy as np

from kvswap.replay.tiers import Admission, Tiers
from kvswap.replay.trace import Trace

from .links import Link, through
from .pools import Pools, Shared, Store
from .report import Report
from .settings import Failure, Settings
from .traffic import Arrival, Router, Traffic

# Of a look-up, besides the round trip: the record of the remote tier has 0.57 to 0.98 ms for 1,000 keys on one node; to
# place 24 keys among 1,000 nodes takes 80 us. What one more node costs is assumed.
_KEY_SECONDS = 1e-6
_ASK_SECONDS = 30e-6  # of each node after the first
_PLACE_SECONDS = 3.3e-9  # a key and a node of the list
SILENCE = 0.6  # seconds until a client knows that a silent node is down: kvswap.remote._link.HEARTBEAT
WINDOWS = 60

Steps = Generator[float, float, None]
_READ, _WRITE = 0, 1


class _Node:
    """A node's tiers and links. A node that only stores has no tiers."""

    def __init__(self, settings: Settings, number: int, shared: Shared | None, window: float) -> None:
        self._settings, self.shared = settings, shared
        self.number, self.rack, self.under_way = number, settings.rack_of(number), 0
        gpus, nics = settings.gpus * settings.gpu_link, settings.nics * settings.nic
        self.h2d, self.d2h = (Link(gpus, settings.latency, window) for _ in range(2))
        self.nic_out, self.nic_in = (Link(nics, settings.latency, window) for _ in range(2))
        self.disk = [Link(settings.disk, settings.latency, window) for _ in range(2)]
        self.tiers = self._tiers()

    def _tiers(self) -> Tiers:
        third = 0 if self.shared is None else self.shared
        return Tiers(self._settings.gpu_blocks, self._settings.host_blocks, third)

    def die(self) -> None:
        self.tiers = self._tiers()


class Simulation:
    """One run. run() once."""

    def __init__(self, trace: Trace, settings: Settings, on_progress: Callable[[int, int], None] | None = None) -> None:
        self._settings, self._progress = settings, on_progress or (lambda done, total: None)
        self.traffic = Traffic(trace, settings)
        self._router = Router(settings, self.traffic)
        self._window = max(self.traffic.seconds / WINDOWS, 1e-3) if settings.in_flight is None else 1.0
        self._events: list[tuple[float, int, Steps]] = []
        self._number = 0  # of the next event: those of one time stay in order
        self._make_nodes()
        self.report = Report(trace, settings, self.traffic)
        self._loads_of = np.zeros(self.traffic.num_blocks, np.int32)
        self._waiting: list[list[Arrival]] = [[] for _ in self._nodes]  # with in_flight: the next one last

    def _make_nodes(self) -> None:
        settings, window = self._settings, self._window
        holders = range(settings.nodes, settings.all_nodes) if settings.store_nodes else range(settings.nodes)
        self._stores = {number: Store(settings) for number in holders}
        parts = [list(holders)]
        if settings.lists == "rack":
            parts = [list(holders)[at : at + settings.rack] for at in range(0, settings.nodes, settings.rack)]
        pools = [Pools(settings, part, self._stores) for part in parts]
        self._nodes = []
        for number in range(settings.all_nodes):
            pool = pools[settings.rack_of(number) if settings.lists == "rack" else 0]
            serves = number < settings.nodes and settings.shared
            shared = Shared(pool, settings.stores) if serves else None
            self._nodes.append(_Node(settings, number, shared, window))
        self._up = [True] * settings.nodes
        uplink = settings.uplink or float("inf")
        self._uplinks = [[Link(uplink, 0.0, window) for _ in range(2)] for _ in range(settings.racks)]

    def run(self) -> Report:
        begin = time.monotonic()
        if self._settings.in_flight is None:
            self._start(0.0, self._arrivals(iter(self.traffic)))
        else:
            self._share_out()
        for failure in self._settings.failures:
            self._start(failure.at, self._fail(failure))
        while self._events:
            now, _, steps = heapq.heappop(self._events)
            self._advance(now, steps)
        self.report.finish(self._nodes, self._uplinks, self._stores, self._loads_of, self._window)
        self.report.took = time.monotonic() - begin
        return self.report

    def _start(self, at: float, steps: Steps) -> None:
        """Begin it at that time."""
        next(steps)
        heapq.heappush(self._events, (at, self._number, steps))
        self._number += 1

    def _advance(self, now: float, steps: Steps) -> None:
        try:
            at = steps.send(now)
        except StopIteration:
            return
        heapq.heappush(self._events, (at, self._number, steps))
        self._number += 1

    # -- requests -----------------------------------------------------------------------------------------------------

    def _arrivals(self, arrivals: Iterator[Arrival]) -> Steps:
        yield 0.0
        for done, arrival in enumerate(arrivals):
            now = yield arrival.time
            blocks = self.traffic.blocks(arrival)
            node = self._router.choose(arrival, blocks, self._up)
            if node is None:
                self.report.refused += 1
            else:
                self._start(now, self._request(self._nodes[node], arrival))
            if not done % 256:
                self._progress(done, self.traffic.requests)

    def _share_out(self) -> None:
        """Requests without times: each node has its own, and so many of them at a time."""
        for arrival in self.traffic:
            number = self._router.choose(arrival, self.traffic.blocks(arrival), self._up)
            assert number is not None  # all are up
            self._waiting[number].append(arrival)
        for waiting in self._waiting:
            waiting.reverse()
        for node in self._nodes:
            for _ in range(self._settings.in_flight or 0):
                self._next_of(node, 0.0)

    def _next_of(self, node: _Node, now: float) -> None:
        if self._waiting[node.number]:
            self._start(now, self._request(node, self._waiting[node.number].pop()))
            self._progress(self.report.requests, self.traffic.requests)

    def _request(self, node: _Node, arrival: Arrival) -> Steps:
        report, nbytes = self.report, self._settings.geometry.block_nbytes
        begin = now = yield 0.0
        admission = node.tiers.admit(self.traffic.blocks(arrival))
        shared = node.shared
        if shared is not None:
            if self._settings.stores == "computed":
                shared.keep(admission.hashes[admission.leading :].tolist())
            self._loads_of[shared.loaded] += 1
            asked, sources, from_files = shared.asked, shared.sources, shared.from_files
            sent, to_files = shared.sent, shared.to_files
        else:
            asked = sources = from_files = sent = to_files = Counter[int]()
        report.admit(admission, arrival, self.traffic.tokens(arrival), int(begin / self._window), sources, node.number)

        ready = now
        if len(admission.loads):
            ready = node.h2d.take(now, len(admission.loads) * nbytes)
            report.host_loads.append(ready - now)
        if asked:
            lookup = self._lookup(now, asked)
            report.look(asked, lookup)
            now = yield now + lookup
        if sources:
            asked_at, now = now, now + self._settings.rtt  # for the places
            now = yield max(self._load(now, node, *each, nbytes, from_files) for each in sources.items())
            report.shared_loads.append(now - asked_at)
            ready = max(ready, node.h2d.take(now, sum(sources.values()) * nbytes))
        ready = max(ready, now)
        now = yield ready
        report.ready(now - begin, bool(len(admission.loads) or sources))
        now = yield from self._store(now, node, admission, sent, to_files)
        report.seconds = max(report.seconds, now)
        if self._settings.in_flight is not None:
            self._next_of(node, now)

    def _lookup(self, now: float, asked: Counter[int]) -> float:
        settings = self._settings
        keys = sum(asked.values())
        seconds = settings.rtt + keys * _KEY_SECONDS + (len(asked) - 1) * _ASK_SECONDS
        seconds += keys * settings.list_nodes * _PLACE_SECONDS
        silent = max((self._stores[number].down_since for number in asked if not self._stores[number].up), default=None)
        return seconds if silent is None else max(seconds, silent + SILENCE - now)

    def _load(self, now: float, node: _Node, source: int, blocks: int, nbytes: int, from_files: Counter[int]) -> float:
        other = self._nodes[source]
        end = through(self._between(other, node), now, blocks * nbytes)
        if from_files[source]:
            end = max(end, other.disk[_READ].take(now, from_files[source] * nbytes))
        return end

    def _store(
        self, now: float, node: _Node, admission: Admission, sent: Counter[int], to_files: Counter[int]
    ) -> Generator[float, float, float]:
        """When all is stored."""
        nbytes = self._settings.geometry.block_nbytes
        if len(admission.stores):
            begin = now
            now = yield node.d2h.take(now, len(admission.stores) * nbytes)
            self.report.host_stores.append(now - begin)
        if sent:
            rtt = self._settings.rtt
            begin, end = now, now + rtt  # for the places, and later to commit
            for number, blocks in sent.items():
                other = self._nodes[number]
                end = max(end, through(self._between(node, other), now + rtt, blocks * nbytes))
                if to_files[number]:
                    other.disk[_WRITE].take(now + rtt, to_files[number] * nbytes)
            now = yield end + rtt
            self.report.shared_stores.append(now - begin)
        return now

    def _between(self, source: _Node, to: _Node) -> list[Link]:
        """None of a node's own blocks go over its NIC."""
        if source is to:
            return []
        if source.rack == to.rack:
            return [source.nic_out, to.nic_in]
        return [source.nic_out, self._uplinks[source.rack][0], self._uplinks[to.rack][1], to.nic_in]

    # -- failures -----------------------------------------------------------------------------------------------------

    def _fail(self, failure: Failure) -> Steps:
        """Memory is lost; files are there when the node comes back. Requests under way end as they would have."""
        now = yield 0.0
        settings = self._settings
        some = [n for n in self._nodes if failure.number == (n.number if failure.what == "node" else n.rack)]
        for node in some:
            node.die()
            if node.number < settings.nodes:
                self._up[node.number] = False
            if node.number in self._stores:
                self._stores[node.number].die(now)
        if failure.back is None:
            return
        yield failure.back
        for node in some:
            if node.number < settings.nodes:
                self._up[node.number] = True
            if node.number in self._stores:
                self._stores[node.number].up = True


def simulate(trace: Trace, settings: Settings, on_progress: Callable[[int, int], None] | None = None) -> Report:
    """With failures a second run, without them, says what they cost."""
    report = Simulation(trace, settings, on_progress).run()
    if settings.failures:
        report.compare(Simulation(trace, replace(settings, failures=()), on_progress).run())
    return report
