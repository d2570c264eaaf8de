"""Prometheus metrics, served if a port is given. Needs prometheus_client. Without a port nothing is counted."""

from __future__ import annotations

from typing import Any

from kvswap import _C

__all__ = ["DEFINITIONS", "Metrics"]

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
# Kind, name without _total, what it is, labels besides rank.
DEFINITIONS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("counter", "kvswap_manager_tasks", "Tasks that ended", ("type", "state")),
    ("counter", "kvswap_manager_bytes", "Bytes moved, on all ranks", ("type",)),
    (
        "histogram",
        "kvswap_manager_task_duration_seconds",
        "Seconds of a task, by phase: on the slowest rank, and in all",
        ("type", "phase"),
    ),
    ("gauge", "kvswap_manager_queue_tasks", "Tasks under way", ()),
    ("counter", "kvswap_manager_refused", "Tasks refused as wrong", ()),
    ("counter", "kvswap_manager_malformed", "Malformed messages", ()),
    ("counter", "kvswap_manager_foreign_uid", "Ignored messages from other users", ()),
    ("counter", "kvswap_manager_ranks_lost", "Ranks that died", ("lost_rank",)),
)


class Metrics:
    """Metrics of one rank, with those of kvswap.metrics. Rank 0 counts for the whole manager."""

    def __init__(self, port: int | None, rank: int) -> None:
        """kvswap.Error: a port was given, but prometheus_client is missing or the port is in use."""
        self._server: Any = None
        self._on = port is not None
        self._rank = str(rank)
        if port is None:
            return
        try:
            import prometheus_client as prometheus
        except ImportError:
            raise _C.Error("--metrics_port needs prometheus_client: pip install prometheus_client") from None
        from kvswap.metrics import Collector

        registry = prometheus.CollectorRegistry()
        kinds = {"counter": prometheus.Counter, "gauge": prometheus.Gauge, "histogram": prometheus.Histogram}
        self._metrics: dict[str, Any] = {}
        for kind, name, what, labels in DEFINITIONS:
            options: dict[str, Any] = {"buckets": _SECONDS} if kind == "histogram" else {}
            made = kinds[kind](name, what, ["rank", *labels], registry=registry, **options)
            self._metrics[name.removeprefix("kvswap_manager_")] = made
        for name in ("queue_tasks", "refused", "malformed", "foreign_uid"):
            self._of(name)
        registry.register(Collector(rank))
        try:
            self._server = prometheus.start_http_server(port, addr="127.0.0.1", registry=registry)[0]
        except OSError as error:
            raise _C.Error(f"--metrics_port: cannot listen on 127.0.0.1:{port}: {error}") from None

    def _of(self, name: str, *labels: str) -> Any:
        return self._metrics[name].labels(self._rank, *labels)

    def task_ended(self, kind: str, ok: bool, nbytes: int, seconds: float, copying: float) -> None:
        """seconds: from the task's arrival to its end. copying: seconds on the slowest rank."""
        if not self._on:
            return
        self._of("tasks", kind, "done" if ok else "failed").inc()
        self._of("bytes", kind).inc(nbytes)
        self._of("task_duration_seconds", kind, "rank").observe(copying)
        self._of("task_duration_seconds", kind, "total").observe(seconds)

    def queue_depth(self, depth: int) -> None:
        if self._on:
            self._of("queue_tasks").set(depth)

    def count(self, name: str, *labels: str) -> None:
        """One more of a counter."""
        if self._on:
            self._of(name, *labels).inc()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
