"""kvswap's metrics in vLLM's own statistics of the connector: their names, and what a worker's links carried.

vLLM's frontend refuses to count what was not described to it, in a process of its own: describe(). A metric of each
engine, as all of vLLM's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
    OffloadPromMetrics,
)
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

from kvswap import _C
from kvswap.vllm._handler import lend_of, replicas_of, share_of

LOADED = "kvswap_loaded_blocks"
USED, FAILED, ABORTED = "used", "failed", "aborted"
LINK_BYTES = "kvswap_shared_link_bytes"
REPLICA_CHUNKS = "kvswap_replica_loaded_chunks"
REPLICA_ENGINES = "kvswap_replica_engines"
EVERY = 1.0  # seconds between looks at numbers that cost a call


def is_known() -> bool:
    """Whether a metric can be described to vLLM's frontend."""
    kept = {"_offloading_metric_metadata", "_offloading_metric_defs", "_create_metric"}
    return kept <= set(OffloadPromMetrics.__init__.__code__.co_names)


def _definitions(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        LOADED: OffloadingCounterMetadata(
            "GPU blocks that were loaded from the host, by what became of them: "
            f"{USED} (a step of the model had them), {FAILED}, {ABORTED} (the request ended before a step had it).",
            ("what",),
        )
    }
    if lend_of(extra_config) is not None or share_of(extra_config) is not None:
        found[LINK_BYTES] = OffloadingCounterMetadata(
            "Bytes that other GPUs' links carried for this engine (borrowed), and its own GPUs' for others (lent).",
            ("what", "direction"),
        )
    if replicas_of(extra_config) is not None:
        text = "Chunks of host memory that were loaded, by the replica that stored them: own, or others."
        found[REPLICA_CHUNKS] = OffloadingCounterMetadata(text, ("stored_by",))
        found[REPLICA_ENGINES] = OffloadingGaugeMetadata("Engines that have the same host pool now, with this one.")
    return found


def describe(metrics: Any, extra_config: Mapping[str, Any]) -> None:
    """Add kvswap's to the metrics of vLLM's frontend. metrics: what vLLM's build_prom_metrics() has made."""
    if not is_known():
        return
    for name, about in _definitions(extra_config).items():
        metrics._offloading_metric_metadata[name] = about
        metrics._offloading_metric_defs[name] = metrics._create_metric(name, about)


class LinkStats:
    """What the links of a worker's GPU carried, as differences since the last look. The worker's thread calls."""

    def __init__(self, device: _C.Device) -> None:
        self._device = device
        self._before = self._carried()
        self._next = 0.0

    def _carried(self) -> dict[tuple[str, str], int]:
        stats = self._device.stats()
        return {
            ("lent", "d2h"): stats["lent_bytes_d2h"],
            ("lent", "h2d"): stats["lent_bytes_h2d"],
            ("borrowed", "d2h"): stats["borrowed_bytes_d2h"],
            ("borrowed", "h2d"): stats["borrowed_bytes_h2d"],
        }

    def take(self) -> Any:
        """An OffloadingConnectorStats, or None: it is not time yet, or nothing came."""
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + EVERY
        before, self._before = self._before, self._carried()
        found = OffloadingConnectorStats()
        for labels, nbytes in self._before.items():
            if nbytes > before[labels]:
                found.increase_counter(LINK_BYTES, nbytes - before[labels], labels)
        return None if found.is_empty() else found


def links_of(device: _C.Device) -> LinkStats | None:
    """None: this vLLM's statistics are not known."""
    return LinkStats(device) if is_known() else None
