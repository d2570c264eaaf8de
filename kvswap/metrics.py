"""What kvswap does in this process, in numbers.

snapshot() gives them as plain dicts. Collector gives them to prometheus_client. serve() lets `kvswap top` see them.

Reading waits for no transfer. Devices, file stores and host pools may be opened and closed meanwhile by other threads.
In the child of a fork, only what the child opened is counted. docs/metrics.md lists every metric.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypedDict

from kvswap import _C, _top_socket
from kvswap._families import families
from kvswap._log import logger
from kvswap._switches import switch

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from kvswap import _metrics_port

__all__ = [
    "Collector",
    "DeviceMetrics",
    "FileMetrics",
    "FileOperation",
    "HandlerMetrics",
    "Histogram",
    "HostPoolMetrics",
    "LaneMetrics",
    "PathMetrics",
    "RemoteMetrics",
    "ShareMetrics",
    "Snapshot",
    "bounds",
    "close",
    "serve",
    "snapshot",
]


class Histogram(TypedDict):
    """buckets[i] counts values above bound i - 1 and up to bound i of bounds(); the last one, those above them all."""

    buckets: list[int]
    sum: float


class PathMetrics(TypedDict):
    """Transfers of a device by one path in one direction. Histograms, blocks and device_seconds: of transfers done."""

    direction: str
    path: str
    duration: Histogram
    queue: Histogram
    size: Histogram
    blocks: int
    link_bytes: int
    device_seconds: float
    failed: dict[str, int]
    failed_blocks: int


class LaneMetrics(TypedDict):
    """The lanes of one direction and priority, now."""

    direction: str
    priority: str
    lanes: int
    unfinished: int
    bytes: int
    fullest: int
    limit: int
    oldest_seconds: float


class DeviceMetrics(TypedDict):
    """An open device. Entries that end in _bytes, and pools and pool_blocks: now; the other numbers only rise."""

    device: str
    lost: bool
    submitted: int
    copies: int
    merged: int
    refused_full: int
    second_attempts: int
    waits_raw: int
    waits_war: int
    waits_waw: int
    lent_bytes_d2h: int
    lent_bytes_h2d: int
    borrowed_bytes_d2h: int
    borrowed_bytes_h2d: int
    staging_bytes: int
    slots_bytes: int
    allocated_bytes: int
    allocated_host_bytes: int
    registered_bytes: int
    imported_bytes: int
    pools: int
    pool_blocks: int
    paths: list[PathMetrics]
    lanes: list[LaneMetrics]


class FileOperation(TypedDict):
    """operation: store, load or delete. Histograms: of transfers done. failed_blocks: by kind."""

    operation: str
    duration: Histogram
    size: Histogram
    failed: int
    cancelled: int
    failed_blocks: dict[str, int]


class FileMetrics(TypedDict):
    """An open file store; docs/files.md explains its counts."""

    directory: str
    block_bytes: int
    capacity_bytes: int
    file_bytes: int
    blocks: int
    slots: int
    pinned: int
    segments: int
    stored: int
    kept: int
    loaded: int
    deleted: int
    evicted: int
    lost_slots: int
    refused_full: int
    unfinished_loads: int
    unfinished_stores: int
    unfinished_load_blocks: int
    unfinished_store_blocks: int
    gds_read_bytes: int
    gds_written_bytes: int
    oldest_seconds: float
    operations: list[FileOperation]


class HostPoolMetrics(TypedDict):
    """A host pool or a shared pool that is not closed."""

    device: str
    shared: bool
    pinned: bool
    state: str
    blocks: int
    bytes: int
    populated_bytes: int


class HandlerMetrics(TypedDict):
    """Collected jobs of kvswap.offload's handlers of one device and direction. handlers, unfinished: now. not_stored:
    blocks, by why; "codec": they do not fit their coded size."""

    device: str
    direction: str
    handlers: int
    unfinished: int
    failed: int
    not_stored: dict[str, int]
    bytes: int
    duration: Histogram
    device_seconds: float
    queued_seconds: float
    stalls: int


class RemoteMetrics(TypedDict):
    """An open remote store. nodes: by address, "up" or "no answer". epoch: empty, or why everything is a miss."""

    block_bytes: int
    stored: int
    loaded: int
    deleted: int
    missed: int
    failed: int
    late: int
    no_room: int
    no_header: int
    other_identity: int
    other_key: int
    other_length: int
    wrong_bytes: int
    wrong_mac: int
    cleared: int
    refused_full: int
    unfinished: int
    nodes: dict[str, str]
    epoch: str


class ShareMetrics(TypedDict):
    """A device in groups of processes that share links (kvswap.share). lenders: other processes that bring parts of its
    loads and stores now; borrowers: those for which it brings parts."""

    device: str
    lenders: int
    borrowers: int


class Snapshot(TypedDict):
    """All of it. time: time.time(); monotonic: time.monotonic()."""

    version: str
    pid: int
    rank: str
    time: float
    monotonic: float
    command: str
    devices: list[DeviceMetrics]
    files: list[FileMetrics]
    host_pools: list[HostPoolMetrics]
    handlers: list[HandlerMetrics]
    remote: list[RemoteMetrics]
    share: list[ShareMetrics]


def bounds() -> tuple[tuple[float, ...], tuple[int, ...]]:
    """The histograms' upper bounds: of durations in seconds, and of sizes in bytes."""
    return _C._metrics_bounds()


def snapshot(rank: int | str | None = None) -> Snapshot:
    """The numbers of this process.

    rank: this process among those of its engine; None: RANK or LOCAL_RANK of the environment, else empty.
    """
    share = sys.modules.get("kvswap.share")
    handlers, remote = (sys.modules.get(f"kvswap.{name}._counts") for name in ("offload", "remote"))
    found: Any = {
        "version": _C.__version__,
        "pid": os.getpid(),
        "rank": _rank(rank),
        "time": time.time(),
        "monotonic": time.monotonic(),
        "command": " ".join(sys.orig_argv)[:400],
        **_C._metrics(),
        "handlers": handlers.rows() if handlers is not None else [],
        "remote": remote.rows() if remote is not None else [],
        "share": share.rows() if share is not None else [],
    }
    result: Snapshot = found
    return result


def _rank(rank: int | str | None) -> str:
    if rank is None:
        rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or ""
    return str(rank)


class Collector:
    """A collector for prometheus_client, whose metrics are read when they are scraped.

        registry = prometheus_client.CollectorRegistry()
        registry.register(kvswap.metrics.Collector())
        prometheus_client.start_http_server(9400, addr="127.0.0.1", registry=registry)

    prometheus_client.REGISTRY serves too, where the process exposes that already.

    rank: the value of the label `rank`, as in snapshot(). kvswap.Error: prometheus_client is not installed.
    """

    def __init__(self, rank: int | str | None = None) -> None:
        try:
            from prometheus_client import metrics_core
        except ImportError:
            raise _C.Error("kvswap.metrics.Collector needs prometheus_client: pip install 'kvswap[metrics]'") from None
        self._core: Any = metrics_core
        self._rank = _rank(rank)

    def collect(self) -> Iterable[Metric]:
        """The metric families with their samples."""
        return self._families(snapshot(self._rank))

    def describe(self) -> Iterable[Metric]:
        """The metric families without samples: the registry asks for the names."""
        return self._families(None)

    def _families(self, numbers: Snapshot | None) -> Iterable[Metric]:
        kinds = {
            "counter": self._core.CounterMetricFamily,
            "gauge": self._core.GaugeMetricFamily,
            "histogram": self._core.HistogramMetricFamily,
        }
        for family in families(numbers):
            made = kinds[family.kind](family.name, family.help, labels=family.labels)
            for labels, value in family.samples.items():
                if family.kind == "histogram":
                    made.add_metric(labels, family.cumulative(value), value["sum"])
                else:
                    made.add_metric(labels, value)
            yield made


# -- kvswap top, and a port for Prometheus -----------------------------------------------------------------------------

_server: _top_socket.Server | None = None
_port: _metrics_port.Server | None = None
_serving = threading.Lock()  # while these two change


def serve(rank: int | str | None = None) -> str:
    """Let `kvswap top` of this user see this process: returns the path of the socket.

    A thread answers on a Unix socket with mode 0600 in a folder with mode 0700. A second call does nothing. The
    environment variable KVSWAP_TOP=1 makes this call when kvswap is imported, and again in the child of a fork.

    kvswap.Error: the folder belongs to another user or is open to others, or the socket cannot be made.
    """
    global _server
    with _serving:
        if _server is None or not _server.alive:
            shown = _rank(rank)
            _server = _top_socket.Server(lambda: snapshot(shown))
        return _server.path


def close() -> None:
    """Undo serve(), and what KVSWAP_METRICS_PORT has started: socket and port are gone, their threads have ended.
    Harmless without."""
    global _server, _port
    with _serving:  # a new socket has the same name
        server, _server = _server, None
        port, _port = _port, None
        if port is not None:
            port.close()
        if server is not None:
            server.close()


def start_from_environment() -> None:
    """KVSWAP_TOP=1: serve(). KVSWAP_METRICS_PORT: serve(), and Prometheus finds this process on that port. What cannot
    be done is a warning."""
    global _port
    port = os.environ.get("KVSWAP_METRICS_PORT")
    if switch("KVSWAP_TOP") is not True and not port:
        return
    try:
        serve()
        if port:
            from kvswap import _metrics_port

            address = _metrics_port.address_of(port)
            with _serving:
                _port = _port or _metrics_port.Server(*address, snapshot)
    except (_C.Error, OSError, RuntimeError, ValueError) as error:
        logger("kvswap.metrics").warning("%s: %s", "KVSWAP_METRICS_PORT" if port else "KVSWAP_TOP", error)


def _after_fork() -> None:
    """What the parent serves is the parent's. A child serves again only if the environment says so."""
    global _server, _port, _serving
    _serving = threading.Lock()
    server, _server = _server, None
    port, _port = _port, None
    if port is not None:
        port.abandon()
    if server is not None:
        server.abandon()
        start_from_environment()


os.register_at_fork(after_in_child=_after_fork)
