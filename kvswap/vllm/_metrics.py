"""kvswap.metrics of a vLLM worker, served for Prometheus. vLLM's own endpoint is another process's."""

from __future__ import annotations

import sys
from typing import Any

from kvswap import _C
from kvswap._log import logger

_logger = logger("kvswap.vllm")
_server: Any = None


def number_of(spec: Any) -> int:
    """Which of all workers this process is: those of the first engine of a data-parallel deployment come first.

    spec: one of vLLM's offloading specs. torch counts the workers of a dense model's engine from 0 in each engine, and
    those of a model with experts over all engines.
    """
    parallel = spec.config.parallel
    return int(parallel.data_parallel_index * parallel.world_size + _rank() % parallel.world_size)


def _rank() -> int:
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0
    return int(distributed.get_rank())


def serve(port: int, rank: int) -> Any:
    """Serve on 127.0.0.1, port + rank, once for the process. A port in use, or no prometheus_client, is logged.

    rank: number_of() this worker."""
    global _server
    if _server is not None:
        return _server
    from kvswap.metrics import Collector

    try:
        collector = Collector(rank)
        import prometheus_client as prometheus

        registry = prometheus.CollectorRegistry()
        registry.register(collector)
        _server = prometheus.start_http_server(port + rank, addr="127.0.0.1", registry=registry)[0]
    except (OSError, OverflowError, _C.Error) as error:
        _logger.warning("kvswap_metrics_port: no metrics of rank %d on 127.0.0.1:%d: %s", rank, port + rank, error)
        return None
    _logger.info("kvswap's metrics of rank %d are on http://127.0.0.1:%d/metrics", rank, _server.server_port)
    return _server
