"""kvswap.offload's handler under vLLM: options from vLLM's configuration, logging, failures."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from kvswap import _C
from kvswap._log import logger
from kvswap.offload import SingleDirectionOffloadingHandler, TransferResult
from kvswap.offload._layout import share_tensors
from kvswap.typing import Path
from kvswap.vllm._parts import cut_blocks

_logger = logger("kvswap.vllm")

_PATHS = get_args(Path)
_PRIORITIES = ("normal", "high", "background")
_WAIT_TIMEOUT = 300.0  # seconds
_LOG_EVERY = 60.0  # seconds
_SHARED_MS = 1.0
_BUDGET = 1 << 30  # bytes, of sync_load_budget_bytes under kvswap_overlap


def options_of(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """kvswap's options in kv_connector_extra_config. ValueError: an unknown or wrong one."""
    known = {
        *("kvswap_path", "kvswap_priority", "kvswap_max_ctas", "kvswap_pace_gbps", "kvswap_wait_timeout_s"),
        *("kvswap_fallback", "kvswap_metrics_port", "kvswap_block_first"),
        *("kvswap_overlap", "kvswap_overlap_shared_ms", "kvswap_overlap_ahead"),
    }
    unknown = sorted(key for key in extra_config if key.startswith("kvswap_") and key not in known)
    if unknown:
        raise ValueError(f"kv_connector_extra_config has {', '.join(unknown)}; of kvswap's there are {sorted(known)}")
    path, priority = extra_config.get("kvswap_path", "auto"), extra_config.get("kvswap_priority")
    if path not in _PATHS:
        raise ValueError(f"kvswap_path is {path!r}; it is one of {', '.join(_PATHS)}")
    if priority is not None and priority not in _PRIORITIES:
        raise ValueError(f"kvswap_priority is {priority!r}; it is one of {', '.join(_PRIORITIES)}")
    ctas, pace = extra_config.get("kvswap_max_ctas"), extra_config.get("kvswap_pace_gbps")
    if ctas is not None and not (_is_number(ctas, int) and 1 <= ctas <= 1024):
        raise ValueError(f"kvswap_max_ctas is {ctas!r}; it is a whole number from 1 to 1024")
    if pace is not None and not (_is_number(pace, (int, float)) and 0 < pace < math.inf):
        raise ValueError(f"kvswap_pace_gbps is {pace!r}; it is a number above 0")
    limit = extra_config.get("kvswap_wait_timeout_s", _WAIT_TIMEOUT)
    if limit is not None and not (_is_number(limit, (int, float)) and 0 < limit <= threading.TIMEOUT_MAX):
        raise ValueError(f"kvswap_wait_timeout_s is {limit!r}; it is a number of seconds above 0, or null for no limit")
    return {"path": path, "priority": priority, "max_ctas": ctas, "pace_gbps": pace, "wait_timeout": limit}


def _switch(extra_config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = extra_config.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it is true or false")
    return value


def falls_back(extra_config: Mapping[str, Any]) -> bool:
    """kvswap_fallback: whether the engine goes on with vLLM's own transfers where kvswap's cannot be used."""
    return _switch(extra_config, "kvswap_fallback", False)


def block_first_of(extra_config: Mapping[str, Any]) -> bool:
    """kvswap_block_first: whether the GPU's cache is to have all layers of a block together."""
    return _switch(extra_config, "kvswap_block_first", True)


@dataclass(frozen=True)
class OverlapSettings:
    """Loads in the step that needs them."""

    on: bool
    shared_ms: float
    budget: int  # bytes that a step loads on a worker
    ahead: bool = False  # asynchronous loads are reported before they end


def overlap_of(extra_config: Mapping[str, Any]) -> OverlapSettings:
    """kvswap_overlap and what belongs to it. ValueError: a wrong one."""
    on = _switch(extra_config, "kvswap_overlap", False)
    shared = extra_config.get("kvswap_overlap_shared_ms", _SHARED_MS)
    if not (_is_number(shared, (int, float)) and 0 <= shared < math.inf):
        raise ValueError(f"kvswap_overlap_shared_ms is {shared!r}; it is a number of milliseconds, 0 or more")
    budget = extra_config.get("sync_load_budget_bytes", _BUDGET if on else 0)
    ahead = _switch(extra_config, "kvswap_overlap_ahead", True)
    try:
        return OverlapSettings(on, float(shared), int(budget), on and ahead)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"sync_load_budget_bytes is {budget!r}; it is a number of bytes") from None


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


class VLLMHandler(SingleDirectionOffloadingHandler):
    """One direction under a vLLM worker.

    strict: get_finished() raises for a failed job and names the job, since vLLM's own connector counts every result as
    a success or ends with an assertion. KVSwapConnector turns strict off and reads the results.
    """

    strict = True
    in_layers: frozenset[int] = frozenset()  # jobs whose tensors the step waits for one after another

    def __init__(self, *args: Any, layers: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """layers: the layers' caches by name, if steps wait for them: blocks that hold several are cut for it."""
        given = dict(zip(("gpu_tensors", "cpu_tensors", "factor", "refs"), args, strict=False)) | kwargs
        refs = given.get("refs", given.get("kv_cache_groups_data_refs", given.get("layer_refs_per_group", ())))
        if layers and not kwargs.get("canonical_layout") and share_tensors(refs):
            kwargs["layer_parts"] = cut_blocks(layers, given["gpu_tensors"])
        super().__init__(*args, **kwargs)
        self._kept: list[TransferResult] = []  # results collected in a call that raised another job's failure
        self._logged = time.monotonic()
        self._logged_jobs = 0
        path = self._options["path"]
        _logger.info(
            "kvswap moves KV blocks %s -> %s on %s, path %s: %d tensors, %d blocks a chunk",
            *self.transfer_type,
            self.device.name,
            path,
            len(self.src_tensors),
            self.blocks_per_chunk,
        )
        for parts in () if self.gpu_to_cpu else self.layer_parts:
            if len(parts) > 1:
                sizes = ", ".join(str((end - begin) >> 10) for begin, end in parts)
                _logger.info("kvswap_overlap: a step loads a block of its own in parts of %s KiB", sizes)

    def transfer_async(self, job_id: int, spec: Any, dst_spec: Any = None, *, layer_events: bool = False) -> bool:
        """As the base class; layer_events for the jobs of in_layers."""
        return super().transfer_async(job_id, spec, dst_spec, layer_events=layer_events or job_id in self.in_layers)

    def nbytes_of(self, job_id: int) -> int:
        """Bytes of a job that is not collected."""
        with self._lock:
            return next((job.num_bytes for job in reversed(self._transfers) if job.job_id == job_id), 0)

    @property
    def has_jobs(self) -> bool:
        """Whether get_finished() may have something to report; not so in most steps of an engine."""
        return bool(self._transfers or self._kept)

    def get_finished(self) -> list[TransferResult]:
        """As the base class; strict, kvswap.Error for a job that failed."""
        if not self.has_jobs:
            return []
        results, self._kept = self._kept + super().get_finished(), []
        if time.monotonic() - self._logged >= _LOG_EVERY:
            self._log()
        failed = next((result for result in results if not result.success), None)
        if failed is None or not self.strict:
            return results
        self._kept = [result for result in results if result is not failed]
        raise _C.Error(
            f"offloading job {failed.job_id} ({' to '.join(self.transfer_type)}, {failed.transfer_size} bytes) failed: "
            f"{failed.error}. KVSwapConnector goes on in such a case"
        ) from failed.error

    def shutdown(self, timeout: float | None = None) -> None:
        """As the base class; the default limit is kvswap_wait_timeout_s."""
        super().shutdown(timeout)

    def _log(self) -> None:
        """Log the counts of the last minute or more, if there were jobs."""
        stats = self.stats()
        self._logged = time.monotonic()
        if stats.jobs == self._logged_jobs:
            return
        self._logged_jobs = stats.jobs
        speed = stats.bytes / stats.device_seconds / 1e9 if stats.device_seconds else 0.0
        _logger.info(
            "%s -> %s: %d jobs, %d failed, %d unfinished, %.3f GB at %.1f GB/s, queued %.3f s in all, paths %s",
            *self.transfer_type,
            stats.jobs,
            stats.failed,
            stats.unfinished,
            stats.bytes / 1e9,
            speed,
            stats.queued_seconds,
            stats.paths,
        )
