"""What is simulated. Rates are bytes a second, times seconds of the simulated clock."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvswap.replay.errors import UsageError
from kvswap.replay.geometry import Geometry

ROUTES = ("turn", "prefix")
LISTS = ("all", "rack")
STORES = ("computed", "evicted")
_FAILURE = re.compile(r"(?P<what>rack|node)?(?P<number>\d+)@(?P<at>\d+(?:\.\d+)?)(?:\+(?P<back>\d+(?:\.\d+)?))?")


@dataclass(frozen=True)
class Failure:
    """A node, or a rack of nodes, is dead from `at` on, until `back` if that is not None."""

    what: str
    number: int
    at: float
    back: float | None = None

    def __str__(self) -> str:
        return f"{self.what} {self.number}"


def parse_failure(text: str) -> Failure:
    """NODE@SECONDS, NODE@SECONDS+SECONDS, or rackN@..."""
    match = _FAILURE.fullmatch(text)
    if match is None:
        raise UsageError(f"--fail takes 3@600, 3@600+120 or rack0@600 (seconds of the simulated clock), not {text!r}")
    at = float(match["at"])
    return Failure(
        match["what"] or "node", int(match["number"]), at, at + float(match["back"]) if match["back"] else None
    )


@dataclass(frozen=True)
class Settings:
    """Nodes with GPUs serve requests; each has a part of the shared tier, unless there are nodes that only store."""

    geometry: Geometry
    nodes: int = 10
    store_nodes: int = 0  # if any, they alone have the shared tier
    gpus: int = 8
    nics: int = 1
    gpu_blocks: int = 2500
    host_blocks: int = 4000
    pool_blocks: int = 4000
    file_blocks: int = 0
    gpu_link: float = 50e9  # of one GPU, each direction
    nic: float = 50e9  # of one NIC, each direction
    disk: float = 12e9  # of a node's files, each direction
    rack: int = 0  # nodes a rack; 0: one rack
    uplink: float = 0.0  # of a rack, each direction; 0: no limit
    rtt: float = 200e-6  # of a control message and its answer
    latency: float = 20e-6  # of a transfer, besides its bytes
    lists: str = "all"
    replicas: int = 1
    stores: str = "computed"
    copies: int = 1
    common: float = 0.0
    shift: float = 60.0
    speed: float = 1.0
    route: str = "turn"
    in_flight: int | None = None  # None: requests come at their times; else so many at a time on each node
    failures: tuple[Failure, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("nodes", 1), ("gpus", 1), ("nics", 1), ("gpu_blocks", 1), ("copies", 1), ("replicas", 1)):
            _at_least(name, getattr(self, name), least)
        for name in ("store_nodes", "host_blocks", "pool_blocks", "file_blocks", "rack"):
            _at_least(name, getattr(self, name), 0)
        for name in ("gpu_link", "nic", "disk", "speed"):
            if not getattr(self, name) > 0:
                raise UsageError(f"--{name.replace('_', '-')} must be above 0, not {getattr(self, name):g}")
        if not 0 <= self.common <= 1:
            raise UsageError(f"--common is a share of the references, 0 to 1, not {self.common:g}")
        if self.uplink and not self.rack:
            raise UsageError("--uplink is that of a rack: say with --rack how many nodes a rack has")
        if self.lists == "rack" and (not self.rack or self.store_nodes):
            raise UsageError("--lists rack needs --rack N, and no --store-nodes")
        if self.replicas > self.list_nodes:
            raise UsageError(f"--replicas {self.replicas} is more than the {self.list_nodes} nodes of a list")
        if self.stores == "evicted" and self.shared and not self.host_blocks:
            raise UsageError("--stores evicted stores what leaves the host tier: there is none (--host-blocks 0)")
        for failure in self.failures:
            count = self.all_nodes if failure.what == "node" else self.racks
            if failure.number >= count:
                raise UsageError(f"--fail: there is no {failure}: there are 0 to {count - 1}")
            if failure.what == "rack" and not self.rack:
                raise UsageError("--fail rackN needs --rack N, how many nodes a rack has")

    @property
    def all_nodes(self) -> int:
        return self.nodes + self.store_nodes

    @property
    def racks(self) -> int:
        return -(-self.all_nodes // self.rack) if self.rack else 1

    @property
    def shared(self) -> bool:
        """Whether there is a tier that nodes share."""
        return self.pool_blocks + self.file_blocks > 0

    @property
    def list_nodes(self) -> int:
        """How many nodes the shortest list of nodes has."""
        if self.lists == "rack":
            return self.nodes % self.rack or min(self.rack, self.nodes)
        return self.store_nodes or self.nodes

    def rack_of(self, node: int) -> int:
        return node // self.rack if self.rack else 0


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
