"""What a simulation counts, as JSON and as a table for a person."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvswap.replay.tiers import Admission
from kvswap.replay.trace import Trace
from kvswap.replay.units import format_size

from .links import Link
from .settings import Settings

if TYPE_CHECKING:
    from .pools import Store
    from .run import _Node
    from .traffic import Arrival, Traffic

_AS_BEFORE = 0.99  # of the hits of a run without the failure
_LINKS = ("H2D", "D2H", "NIC out", "NIC in", "disk reads", "disk writes", "uplinks out", "uplinks in")


def _times(seconds: Sequence[float]) -> dict[str, Any]:
    values = np.asarray(seconds, float) * 1e3
    if not len(values):
        return {"count": 0, "mean": None, "p50": None, "p99": None}
    p50, p99 = np.percentile(values, (50, 99)).tolist()
    return {"count": len(values), "mean": float(values.mean()), "p50": p50, "p99": p99}


class Report:
    """The counts of one run."""

    def __init__(self, trace: Trace, settings: Settings, traffic: Traffic) -> None:
        self._trace, self._settings, self._traffic = trace, settings, traffic
        self.requests = self.refused = 0
        self.gpu_hits = self.host_hits = self.own_hits = self.other_hits = self.file_hits = self.misses = 0
        self.cut = self.tokens = self.tokens_saved = 0
        self.seconds = traffic.seconds if settings.in_flight is None else 0.0
        self.took = 0.0
        self.waits, self.loading = array("d"), array("d")  # of all requests; of those that load anything
        self.host_loads, self.host_stores = array("d"), array("d")
        self.shared_loads, self.shared_stores = array("d"), array("d")
        self._lookups, self._asked, self._keys = array("d"), array("l"), 0
        self._hits: Counter[int] = Counter()  # by window
        self._hits_shared: Counter[int] = Counter()
        self.links: list[dict[str, Any]] = []
        self.hot: dict[str, Any] = {}
        self.pools: dict[str, Any] = {}
        self.failure: dict[str, Any] = {}

    # -- while it runs ------------------------------------------------------------------------------------------------

    def admit(
        self, admission: Admission, arrival: Arrival, tokens: int, window: int, sources: Counter[int], node: int
    ) -> None:
        self.requests += 1
        self.gpu_hits += admission.gpu_hits
        self.host_hits += admission.host_hits
        self.own_hits += sources[node]
        self.other_hits += admission.file_hits - sources[node]
        self.misses += admission.misses
        self.cut += admission.cut
        self.tokens += tokens
        self.tokens_saved += min(tokens, admission.leading * self._settings.geometry.block_tokens)
        self._hits[window] += admission.leading
        self._hits_shared[window] += admission.file_hits

    def look(self, asked: Counter[int], seconds: float) -> None:
        self._lookups.append(seconds)
        self._asked.append(len(asked))
        self._keys += sum(asked.values())

    def ready(self, waited: float, loads: bool) -> None:
        self.waits.append(waited)
        if loads:
            self.loading.append(waited)

    # -- at the end ---------------------------------------------------------------------------------------------------

    def finish(
        self,
        nodes: Sequence[_Node],
        uplinks: Sequence[Sequence[Link]],
        stores: Mapping[int, Store],
        loads_of: NDArray[np.int32],
        window: float,
    ) -> None:
        self._window = window
        serving = nodes[: self._settings.nodes]
        groups: list[list[Link]] = [[n.h2d for n in serving], [n.d2h for n in serving]]
        groups += [[n.nic_out for n in nodes], [n.nic_in for n in nodes]]
        groups += [[n.disk[way] for n in nodes] for way in (0, 1)] + [[u[way] for u in uplinks] for way in (0, 1)]
        for name, links in zip(_LINKS, groups, strict=True):
            if any(link.transfers for link in links) and not (name.startswith("uplinks") and not self._settings.uplink):
                self.links.append(self._link(name, links))
        served = np.array([nodes[number].nic_out.nbytes for number in stores], float)
        place = int(np.argmax(loads_of)) if len(loads_of) else 0
        loads = int(loads_of.sum())
        self.hot = {
            "node_over_mean": float(served.max() / served.mean()) if served.any() else None,
            "loads": loads,
            "block_loads": int(loads_of[place]) if loads else 0,
            "top_1000_share": float(np.sort(loads_of)[::-1][:1000].sum() / loads) if loads else None,
        }
        held = np.array([len(store.pool) + len(store.files) for store in stores.values()], float)
        self.pools = {
            "blocks": int(held.sum()),
            "bytes": int(held.sum()) * self._settings.geometry.block_nbytes,
            "fullest_over_mean": float(held.max() / held.mean()) if held.any() else None,
        }

    def _link(self, name: str, links: Sequence[Link]) -> dict[str, Any]:
        busy = np.array([link.busy for link in links]) / max(self.seconds, 1e-12)
        return {
            "name": name,
            "links": len(links),
            "bytes": sum(link.nbytes for link in links),
            "mean": float(busy.mean()),
            "most_loaded": float(busy.max()),
            "peak": max(link.peak() for link in links),
        }

    def compare(self, without: Report) -> None:
        """What the failures cost, against a run without them."""
        first = min(failure.at for failure in self._settings.failures)
        windows = range(int(first / self._window), max(without._hits, default=0) + 1)
        lost = {w: without._hits[w] - self._hits[w] for w in windows}
        late = [w for w in windows if self._hits[w] < _AS_BEFORE * without._hits[w]]
        total = sum(without._hits[w] for w in windows)
        worst = max((lost[w] / without._hits[w] for w in windows if without._hits[w]), default=0.0)
        until = (late[-1] + 1) * self._window - first if late else 0.0
        self.failure = {
            "failures": [{"what": str(each), "at": each.at, "back": each.back} for each in self._settings.failures],
            "hits_lost": sum(lost.values()),
            "hits_lost_share": sum(lost.values()) / total if total else 0.0,
            "worst_window_share": worst,
            "window_seconds": self._window,
            "as_before_after_seconds": None if late and late[-1] == windows[-1] else until,
            "wait_ms_without": _times(without.waits),
        }

    # -- shown --------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The JSON document; its keys are a promise to scripts."""
        s, traffic = self._settings, self._traffic
        asked = np.asarray(self._asked, float)
        return {
            "trace": self._trace.name,
            "trace_requests": len(self._trace),
            "geometry": s.geometry.name,
            "bytes_per_block": s.geometry.block_nbytes,
            "nodes": s.nodes,
            "store_nodes": s.store_nodes,
            "racks": s.racks,
            "tiers": {"gpu": s.gpu_blocks, "host": s.host_blocks, "pool": s.pool_blocks, "files": s.file_blocks},
            "traffic": {
                "copies": s.copies,
                "common_blocks": traffic.common_blocks,
                "common_share": traffic.common_share,
                "shift": s.shift,
                "speed": s.speed,
                "route": s.route,
                "in_flight": s.in_flight,
                "seed": s.seed,
            },
            "placement": {"lists": s.lists, "replicas": s.replicas, "stores": s.stores},
            "seconds": self.seconds,
            "took_seconds": self.took,
            "requests": self.requests,
            "refused": self.refused,
            "hits": {"gpu": self.gpu_hits, "host": self.host_hits, "own_pool": self.own_hits, "pools": self.other_hits},
            "misses": self.misses,
            "truncated_blocks": self.cut,
            "tokens_total": self.tokens,
            "tokens_saved": self.tokens_saved,
            "wait_ms": _times(self.waits),
            "wait_ms_of_loads": _times(self.loading),
            "host_load_ms": _times(self.host_loads),
            "host_store_ms": _times(self.host_stores),
            "pool_load_ms": _times(self.shared_loads),
            "pool_store_ms": _times(self.shared_stores),
            "links": self.links,
            "lookup": {
                "lookups": len(asked),
                "keys_mean": self._keys / len(asked) if len(asked) else None,
                "nodes_mean": float(asked.mean()) if len(asked) else None,
                "nodes_p99": float(np.percentile(asked, 99)) if len(asked) else None,
                "messages_per_node_second": float(asked.sum()) / max(self.seconds, 1e-12) / self._holders,
                "ms": _times(self._lookups),
            },
            "hot": self.hot,
            "pools": self.pools,
            **({"failure": self.failure} if self.failure else {}),
        }

    @property
    def _holders(self) -> int:
        return self._settings.store_nodes or self._settings.nodes

    def to_text(self) -> str:
        rows = [*self._hit_rows(), *self._time_rows(), *self._link_rows(), *self._pool_rows(), *self._failure_rows()]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)

    def _hit_rows(self) -> list[tuple[str, str]]:
        blocks = self.gpu_hits + self.host_hits + self.own_hits + self.other_hits + self.misses
        rows = [
            ("requests", f"{self.requests:,} in {self.seconds:,.1f} s of the clock, {self.took:.1f} s of yours"),
            ("hits in the GPU tier", _share(self.gpu_hits, blocks)),
            ("hits in the host tier", _share(self.host_hits, blocks)),
        ]
        if self._settings.shared:
            rows.append(("hits in pools", _share(self.own_hits + self.other_hits, blocks)))
        rows += [("computed", _share(self.misses, blocks)), ("prefill saved", _saved(self.tokens_saved, self.tokens))]
        if self.cut:
            rows.append(("TRUNCATED", f"{self.cut:,} blocks of requests longer than the GPU tier"))
        if self.refused:
            rows.append(("refused", f"{self.refused:,} requests: no node was up"))
        return rows

    def _time_rows(self) -> list[tuple[str, str]]:
        rows = [("wait for blocks", f"{_ms(_times(self.waits))}, of all requests")]
        if len(self.loading):
            rows.append(("wait where loaded", f"{_ms(_times(self.loading))}, of {len(self.loading):,} requests"))
        if len(self._lookups):
            asked = np.asarray(self._asked, float)
            rate = asked.sum() / max(self.seconds, 1e-12) / self._holders
            rows.append(
                (
                    "look-ups",
                    f"{_ms(_times(self._lookups))}; {self._keys / len(asked):.1f} keys on {asked.mean():.1f} nodes, "
                    f"{rate:,.1f} messages/s a node",
                )
            )
        return rows

    def _link_rows(self) -> list[tuple[str, str]]:
        return [
            (
                each["name"],
                f"{format_size(each['bytes']):>10}, load {100 * each['mean']:.2f} % (most loaded "
                f"{100 * each['most_loaded']:.2f} %), peak of {self._window:.1f} s {100 * each['peak']:.1f} %",
            )
            for each in self.links
        ]

    def _pool_rows(self) -> list[tuple[str, str]]:
        if not self._settings.shared:
            return []
        rows = [("pools hold", f"{self.pools['blocks']:,} blocks, {format_size(self.pools['bytes'])}")]
        if self.hot["loads"]:
            over = self.hot["node_over_mean"]
            rows.append(
                (
                    "hot prefixes",
                    (f"most loaded node {over:.2f} of the mean, " if over is not None else "")
                    + f"most loaded block {self.hot['block_loads']:,} of {self.hot['loads']:,} loads, "
                    f"top 1,000 blocks {100 * self.hot['top_1000_share']:.1f} %",
                )
            )
        return rows

    def _failure_rows(self) -> list[tuple[str, str]]:
        if not self.failure:
            return []
        found, names = self.failure, ", ".join(str(each) for each in self._settings.failures)
        after = found["as_before_after_seconds"]
        return [
            (
                "failure",
                f"{names}: {found['hits_lost']:,} hits lost ({100 * found['hits_lost_share']:.2f} % of those after), "
                f"{100 * found['worst_window_share']:.1f} % in the worst {found['window_seconds']:.1f} s",
            ),
            ("as before", "not within the run" if after is None else f"after {after:,.1f} s (99 % of the hits)"),
            ("wait without it", f"{_ms(found['wait_ms_without'])}, of all requests"),
        ]


def _share(part: int, whole: int) -> str:
    return f"{part:>13,} blocks" + (f"  {100 * part / whole:5.1f} %" if whole else "")


def _saved(part: int, whole: int) -> str:
    return f"{part:>13,} tokens" + (f"  {100 * part / whole:5.1f} %" if whole else "")


def _ms(times: Mapping[str, Any]) -> str:
    if times["mean"] is None:
        return "none"
    return f"mean {times['mean']:.2f} ms, p50 {times['p50']:.2f}, p99 {times['p99']:.2f}"


def opening(trace: Trace, settings: Settings, traffic: Traffic) -> str:
    """What is simulated."""
    s, block = settings, settings.geometry.block_nbytes
    who = f"{s.nodes:,} nodes of {s.gpus} GPUs" + (f", {s.store_nodes:,} that only store" if s.store_nodes else "")
    who += f", {s.racks:,} racks" if s.rack else ""
    how = f"{s.in_flight} requests at a time on each node" if s.in_flight else f"speed {s.speed:g}"
    sizes = [(s.gpu_blocks, "GPU"), (s.host_blocks, "host"), (s.pool_blocks, "pool"), (s.file_blocks, "files")]
    tiers = ", ".join(f"{name} {count:,} ({format_size(count * block)})" for count, name in sizes if count)
    lines = [
        f"simulation of {trace.name}: {traffic.requests:,} requests, {s.copies * len(trace.hashes):,} references",
        f"  nodes     {who}",
        f"  blocks    {s.geometry.describe()}",
        f"  a node    {tiers}",
        *([f"  unscaled  {s.geometry.unscaled((name, count) for count, name in sizes)}"] if s.geometry.scaled else []),
        f"  links     GPU {_rate(s.gpu_link, s.gpus)}, NIC {_rate(s.nic, s.nics)}, files {_rate(s.disk, 1)}"
        + (f", uplink {_rate(s.uplink, 1)}" if s.uplink else ""),
        f"  traffic   {s.copies:,} copies, {100 * traffic.common_share:.1f} % of references common, {how}, "
        f"route {s.route}",
    ]
    if s.shared:
        lines.append(f"  sharing   lists {s.lists}, {s.replicas} of each block, stores {s.stores} blocks")
    return "\n".join(lines)


def _rate(rate: float, count: int) -> str:
    return (f"{count} x " if count > 1 else "") + f"{rate / 1e9:g} GB/s"
