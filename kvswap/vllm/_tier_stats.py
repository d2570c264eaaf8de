"""What a secondary tier adds to vLLM's metrics, which count its bytes, seconds and hits: what became of the blocks.

vLLM's scheduler asks each tier once a step (get_stats(), and build_metric_definitions() of its class, in
vllm/v1/kv_offload/tiering/base.py, 0.26 to 0.33).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

_BLOCKS, _REFUSED = "kvswap_tier_blocks", "kvswap_tier_refused_jobs"
_HELD, _FILE_BYTES = "kvswap_tier_held_blocks", "kvswap_tier_file_bytes"
_COUNTS = ("stored", "kept", "loaded", "missed", "damaged", "changed", "failed", "evicted")  # of a store's stats()
_GAUGES = {_HELD: "blocks", _FILE_BYTES: "file_nbytes"}
_EVERY_SECONDS = 1.0


def definitions() -> dict[str, Any]:
    """vLLM's description of each metric."""
    what = "Blocks of a kvswap tier by what became of them: " + ", ".join(_COUNTS) + "."
    return {
        _BLOCKS: OffloadingCounterMetadata(what, ("tier", "what")),
        _REFUSED: OffloadingCounterMetadata("Jobs that a kvswap tier refused, because its queue was full.", ("tier",)),
        _HELD: OffloadingGaugeMetadata("Blocks that a kvswap tier holds.", ("tier",)),
        _FILE_BYTES: OffloadingGaugeMetadata("Bytes of the files of a kvswap tier.", ("tier",)),
    }


class TierStats:
    """The counts of one tier's store, as differences since the last call."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._before: dict[str, int] = {}
        self._next = 0.0

    def due(self) -> bool:
        """Whether it is time to ask the store again."""
        return time.monotonic() >= self._next

    def take(self, counts: Mapping[str, Any]) -> Any:
        """An OffloadingConnectorStats of what came since the last call, or None if nothing did."""
        self._next = time.monotonic() + _EVERY_SECONDS
        told, before, self._before = OffloadingConnectorStats(), self._before, dict(counts)
        for name in (*_COUNTS, "refused_full"):
            more = counts.get(name, 0) - before.get(name, 0)
            if more > 0 and name == "refused_full":
                told.increase_counter(_REFUSED, more, (self._tier,))
            elif more > 0:
                told.increase_counter(_BLOCKS, more, (self._tier, name))
        for metric, name in _GAUGES.items():
            if name in counts and counts[name] != before.get(name):
                told.set_gauge(metric, counts[name], (self._tier,))
        return None if told.is_empty() else told
