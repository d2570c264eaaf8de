"""Prometheus metrics, served if a port is given. Needs prometheus_client. Without a port nothing is counted."""

from __future__ import annotations

from typing import Any

from kvswap import _C

__all__ = ["Metrics"]

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Metrics of one rank. Rank 0 counts for the whole manager."""

    def __init__(self, port: int | None) -> None:
        """kvswap.Error: a port was given, but prometheus_client is missing or the port is in use."""
        self._server: Any = None
        self._on = port is not None
        if port is None:
            return
        try:
            import prometheus_client as prometheus
        except ImportError:
            raise _C.Error("--metrics_port needs prometheus_client: pip install prometheus_client") from None
        registry = prometheus.CollectorRegistry()
        name = "kvswap_manager_"
        self._tasks = prometheus.Counter(name + "tasks", "Tasks that ended", ["type", "state"], registry=registry)
        self._bytes = prometheus.Counter(name + "bytes", "Bytes moved, on all ranks", ["type"], registry=registry)
        self._time = prometheus.Histogram(
            name + "seconds",
            "Seconds of a task, by phase: on the slowest rank, and in all",
            ["type", "phase"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._speed = prometheus.Gauge(name + "gbps", "GB/s of the last task, all ranks", ["type"], registry=registry)
        self._depth = prometheus.Gauge(name + "queue_depth", "Tasks under way", registry=registry)
        self._refused = prometheus.Counter(name + "refused", "Tasks refused as wrong", registry=registry)
        self._malformed = prometheus.Counter(name + "malformed", "Malformed messages", registry=registry)
        self._foreign_uid = prometheus.Counter(
            name + "foreign_uid", "Ignored messages from other users", registry=registry
        )
        self._lost = prometheus.Counter(name + "ranks_lost", "Ranks that died", ["rank"], registry=registry)
        try:
            self._server = prometheus.start_http_server(port, addr="127.0.0.1", registry=registry)[0]
        except OSError as error:
            raise _C.Error(f"--metrics_port: cannot listen on 127.0.0.1:{port}: {error}") from None

    def task_ended(self, kind: str, ok: bool, nbytes: int, seconds: float, copying: float) -> None:
        """seconds: from the task's arrival to its end. copying: seconds on the slowest rank."""
        if not self._on:
            return
        self._tasks.labels(kind, "done" if ok else "failed").inc()
        self._bytes.labels(kind).inc(nbytes)
        self._time.labels(kind, "rank").observe(copying)
        self._time.labels(kind, "total").observe(seconds)
        if ok and seconds > 0:
            self._speed.labels(kind).set(nbytes / seconds / 1e9)

    def queue_depth(self, depth: int) -> None:
        if self._on:
            self._depth.set(depth)

    def refused(self) -> None:
        if self._on:
            self._refused.inc()

    def malformed(self) -> None:
        if self._on:
            self._malformed.inc()

    def foreign_uid(self) -> None:
        if self._on:
            self._foreign_uid.inc()

    def rank_lost(self, rank: int) -> None:
        if self._on:
            self._lost.labels(str(rank)).inc()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
