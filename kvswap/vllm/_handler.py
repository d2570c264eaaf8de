"""kvswap.offload's handler under vLLM: options from vLLM's configuration, logging, failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from kvswap import _C, _options
from kvswap._log import logger
from kvswap.codecs import CODECS
from kvswap.offload import SingleDirectionOffloadingHandler, TransferResult
from kvswap.offload._layout import share_tensors
from kvswap.share._lend import DEFAULT_NAME, LENDERS, MOST_LENDERS, NAME
from kvswap.typing import Path
from kvswap.vllm._parts import cut_blocks

_logger = logger("kvswap.vllm")

_WAIT, _WAIT_TIMEOUT = "kvswap_wait_timeout_s", 300.0  # null, for no limit, is not the default
_LOG_EVERY = 60.0  # seconds
_SHARED_MS = 1.0
_STEP_BUDGET = "sync_load_budget_bytes"  # vLLM's too
_BUDGET = 1 << 30  # its default under kvswap_overlap
_NOT_GIVEN: Any = object()


def _name_of(value: Any) -> str | bool:
    if isinstance(value, bool):
        return DEFAULT_NAME if value else False
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise _options.NotAllowedError
    return value


_OPTIONS = (
    _options.choice("kvswap_path", [path for path in get_args(Path) if path != "borrow"], "auto"),  # of one process
    _options.choice("kvswap_priority", ("normal", "high", "background"), None),
    _options.count("kvswap_max_ctas", 1, 1024, None),
    _options.number("kvswap_pace_gbps", "a number above 0", lambda pace: pace > 0, None),
    _options.number(_WAIT, "a number of seconds above 0", lambda limit: 0 < limit <= threading.TIMEOUT_MAX, None),
    _options.count("kvswap_metrics_port", 1, 65535, None),
    _options.flag("kvswap_fallback", False),
    _options.choice("kvswap_codec", CODECS, None),
    _options.counts("kvswap_codec_keep", "layers", ()),
    _options.flag("kvswap_block_first", True),
    _options.flag("kvswap_overlap", False),
    _options.number("kvswap_overlap_shared_ms", "a number of milliseconds, 0 or more", lambda ms: ms >= 0, _SHARED_MS),
    _options.flag("kvswap_overlap_ahead", True),
    _options.count(_STEP_BUDGET, 0, (1 << 63) - 1, _NOT_GIVEN),
    _options.flag("kvswap_share", False),
    _options.Option(
        "kvswap_lend", "true, false, or a name of 1 to 20 letters, digits, '.', '_' or '-'", _name_of, False
    ),
    _options.count("kvswap_lenders", 1, MOST_LENDERS, LENDERS),
    _options.text("kvswap_replicas", None),
    _options.number("kvswap_share_wait_ms", "a number of milliseconds from 0 to 1000", lambda ms: 0 <= ms <= 1000, 2.0),
)


def _read(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """kvswap's options in kv_connector_extra_config. ValueError: an unknown or wrong one."""
    return _options.read(extra_config, _OPTIONS, "kv_connector_extra_config", theirs=None, prefix="kvswap_")


def options_of(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """What kvswap's transfers take. ValueError: an unknown or wrong option."""
    given = _read(extra_config)
    taken = {name: given[f"kvswap_{name}"] for name in ("path", "priority", "max_ctas", "pace_gbps")}
    return {**taken, "wait_timeout": given[_WAIT] if _WAIT in extra_config else _WAIT_TIMEOUT}


def port_of(extra_config: Mapping[str, Any]) -> int | None:
    """kvswap_metrics_port: worker N serves on this port + N. None: it does not."""
    port: int | None = _read(extra_config)["kvswap_metrics_port"]
    return port


def falls_back(extra_config: Mapping[str, Any]) -> bool:
    """kvswap_fallback: whether the engine goes on with vLLM's own transfers where kvswap's cannot be used."""
    return bool(_read(extra_config)["kvswap_fallback"])


def codec_of(extra_config: Mapping[str, Any]) -> str | None:
    """kvswap_codec: the codec of blocks in host memory."""
    codec: str | None = _read(extra_config)["kvswap_codec"]
    return codec


def kept_layers_of(extra_config: Mapping[str, Any]) -> tuple[int, ...]:
    """kvswap_codec_keep: the layers whose blocks a codec keeps as they are, ascending. ValueError: without a codec."""
    given = _read(extra_config)
    kept: tuple[int, ...] = given["kvswap_codec_keep"]
    if kept and given["kvswap_codec"] is None:
        raise ValueError(
            "kvswap_codec_keep: no codec is set, so that all layers are kept. Set kvswap_codec, or leave it out"
        )
    return kept


def share_of(extra_config: Mapping[str, Any]) -> float | None:
    """kvswap_share: how many seconds a rank waits for another one's call of a load. None: loads are not shared."""
    given = _read(extra_config)
    return given["kvswap_share_wait_ms"] / 1e3 if given["kvswap_share"] else None


def lend_of(extra_config: Mapping[str, Any]) -> tuple[str, int] | None:
    """kvswap_lend and kvswap_lenders: the name of the engines that lend to each other, and how many lend to one at
    most. None: no links are lent."""
    given = _read(extra_config)
    return (given["kvswap_lend"], given["kvswap_lenders"]) if given["kvswap_lend"] else None


def replicas_of(extra_config: Mapping[str, Any]) -> str | None:
    """kvswap_replicas: the name of the replicas that have one host pool. None: it is this engine's own."""
    name: str | None = _read(extra_config)["kvswap_replicas"]
    return name


def block_first_of(extra_config: Mapping[str, Any]) -> bool:
    """kvswap_block_first: whether the GPU's cache is to have all layers of a block together."""
    return bool(_read(extra_config)["kvswap_block_first"])


@dataclass(frozen=True)
class OverlapSettings:
    """Loads in the step that needs them."""

    on: bool
    shared_ms: float
    budget: int  # bytes that a step loads on a worker
    ahead: bool = False  # asynchronous loads are reported before they end


def overlap_of(extra_config: Mapping[str, Any]) -> OverlapSettings:
    """kvswap_overlap and what belongs to it. ValueError: a wrong one."""
    given = _read(extra_config)
    on, budget = given["kvswap_overlap"], given[_STEP_BUDGET]
    if budget is _NOT_GIVEN:
        budget = _BUDGET if on else 0
    return OverlapSettings(on, given["kvswap_overlap_shared_ms"], budget, on and given["kvswap_overlap_ahead"])


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
            "%s -> %s: %d jobs, %d failed, %d unfinished, %.3f GB at %.1f GB/s, queued %.3f s in all, paths %s%s",
            *self.transfer_type,
            stats.jobs,
            stats.failed,
            stats.unfinished,
            stats.bytes / 1e9,
            speed,
            stats.queued_seconds,
            stats.paths,
            f", {stats.not_stored} blocks did not fit their coded size" if stats.not_stored else "",
        )
