"""The links of this machine's GPUs to the host, for kvswap info: their NUMA nodes, what they reach together, and
whether another GPU's link is worth borrowing."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass

from kvswap import _C
from kvswap._devices import DeviceInfo

_NODES = "/sys/devices/system/node/node[0-9]*"


@dataclass(frozen=True)
class Links:
    """nodes: by GPU, of its link and of its host pools; -1: unknown. measured: links that were measured at once; 0:
    none were. gbps: what these reach together, by "d2h", "h2d" and "both". borrow: links that a transfer can borrow
    beside its own while all others idle, by "d2h" and "h2d"."""

    nodes: dict[str, int]
    measured: int
    gbps: dict[str, float]
    borrow: dict[str, float]

    def lines(self) -> list[str]:
        """Text, for machines with several GPUs or their sums."""
        if len(self.nodes) < 2 and not self.measured:
            return []
        if not self.measured:
            return [
                f"what {len(self.nodes)} GPUs reach together is not known, and transfers borrow links without a limit: "
                "run kvswap calibrate while all GPUs are visible"
            ]
        sums = f"{self.measured} links together reach {self.gbps['d2h']:.1f} GB/s D2H, {self.gbps['h2d']:.1f} H2D, "
        return [f"{sums}{self.gbps['both']:.1f} both ways", self._borrowing()]

    def _borrowing(self) -> str:
        stores, loads = self.borrow["d2h"], self.borrow["h2d"]
        if max(stores, loads) < _LEAST:
            return "one link is all that the host reaches: borrowing brings nothing here"
        return f"while other GPUs idle, a store can borrow {_some(stores)} and a load {_some(loads)} beside its own"


_LEAST = 0.1  # of a link, as csrc/paths/lend.c has it


def _some(links: float) -> str:
    if links < _LEAST:
        return "no link"
    return f"{links:.1f} link{'' if f'{links:.1f}' == '1.0' else 's'}"


def links(devices: Sequence[DeviceInfo], tuning: _C._Tuning) -> Links:
    """Of these devices, by what a calibration says."""
    nodes = {device.name: device.numa_node for device in devices if device.kind == "cuda"}
    gbps = {
        "d2h": tuning.get("host_gbps_d2h", 0.0),
        "h2d": tuning.get("host_gbps_h2d", 0.0),
        "both": tuning.get("host_gbps_both", 0.0),
    }
    measured = int(tuning.get("host_links", 0))
    if not measured:
        return Links(nodes, 0, {}, {})
    own = {"d2h": tuning.get("link_gbps_d2h", 0.0), "h2d": tuning.get("link_gbps_h2d", 0.0)}
    borrow = {
        way: round(max(0.0, min(gbps[way] / link, measured) - 1), 3) if link else 0.0 for way, link in own.items()
    }
    return Links(nodes, measured, gbps, borrow)


def tuning_of(devices: Sequence[DeviceInfo]) -> _C._Tuning:
    """Of the first GPU that has a calibration with sums; empty: none has."""
    for ordinal in range(sum(device.kind == "cuda" for device in devices)):
        facts = _C._cuda_info(ordinal)
        try:
            tuning = _C._costs_read(_C._costs_path(_C._costs_what(facts["name"], facts["driver"])))["tuning"]
        except (IndexError, ValueError):  # there is none, or it cannot be used: kvswap doctor says why
            continue
        if tuning.get("host_links"):
            return tuning
    return {}


def node_text(node: int) -> str:
    """Of a GPU's link."""
    if node >= 0:
        return f"link and host pools on NUMA node {node}"
    nodes = len(glob.glob(_NODES))
    if nodes < 2:
        return "link and host pools on the only NUMA node"
    return f"the NUMA node of its link is not known: host pools are on any of {nodes}, unless numa= names one"
