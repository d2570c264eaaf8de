"""What a replay counts, as JSON and as a table for a person."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .settings import Settings
from .trace import Trace
from .units import format_size


@dataclass
class Moves:
    """The transfers of one direction that have ended."""

    nbytes: int = 0
    transfers: int = 0
    seconds: list[float] = field(default_factory=list)  # of each transfer, where the device can say
    timed_nbytes: int = 0

    def add(self, nbytes: int, seconds: float | None) -> None:
        self.nbytes += nbytes
        self.transfers += 1
        if seconds is not None:
            self.seconds.append(seconds)
            self.timed_nbytes += nbytes

    def gbps(self) -> float | None:
        """Bytes over the time of the transfers that moved them."""
        total = sum(self.seconds)
        return self.timed_nbytes / total / 1e9 if total > 0 else None

    def percentile_ms(self, percent: float) -> float | None:
        return float(np.percentile(self.seconds, percent)) * 1e3 if self.seconds else None


@dataclass
class Report:
    """The counts of a replay, which can be shown at any time, complete or not."""

    trace: str
    device: str
    device_name: str
    geometry: str
    bytes_per_block: int
    full_bytes_per_block: int
    gpu_blocks: int
    host_blocks: int
    in_flight: int
    seed: int
    path: str
    trace_requests: int
    codec: str = ""  # of the host tier
    coded_bytes_per_block: int = 0  # as the host tier has them
    offered: int = 0  # blocks that were to be stored
    misfits: int = 0  # of them, those that the codec cannot hold: not stored
    requests: int = 0
    gpu_hits: int = 0
    host_hits: int = 0
    misses: int = 0
    file_hits: int = 0
    tokens_total: int = 0
    tokens_saved: int = 0
    truncated_requests: int = 0
    truncated_blocks: int = 0
    not_stored: int = 0
    loads: Moves = field(default_factory=Moves)
    stores: Moves = field(default_factory=Moves)
    file_blocks: int = 0
    file_tier: str = ""  # how it works; empty without one
    file_loads: Moves = field(default_factory=Moves)
    file_stores: Moves = field(default_factory=Moves)
    verified_in_files: int = 0  # loaded again at the end
    verified_where_used: int = 0
    verified_given_up: int = 0  # in the host tier, before the slot was poisoned
    verified_at_end: dict[str, int] = field(default_factory=lambda: {"gpu": 0, "host": 0})
    poisoned: dict[str, int] = field(default_factory=lambda: {"gpu": 0, "host": 0})
    wrong_bytes: int = 0
    error: str | None = None
    ended: str = "running"  # then "complete", "seconds", "interrupted", "wrong bytes" or "failed"
    seconds: float = 0.0
    history: list[tuple[float, int, int, int, int]] = field(default_factory=list)  # seconds, hits by tier, misses

    @property
    def blocks_verified(self) -> int:
        at_end = sum(self.verified_at_end.values()) + self.verified_in_files
        return self.verified_where_used + self.verified_given_up + at_end

    @property
    def scaled(self) -> bool:
        return self.bytes_per_block != self.full_bytes_per_block

    def to_dict(self) -> dict[str, Any]:
        """The JSON document; its keys are a promise to scripts."""
        return {
            "trace": self.trace,
            "trace_requests": self.trace_requests,
            "device": self.device,
            "device_name": self.device_name,
            "geometry": self.geometry,
            "bytes_per_block": self.bytes_per_block,
            "full_bytes_per_block": self.full_bytes_per_block,
            "scaled": self.scaled,
            "gpu_blocks": self.gpu_blocks,
            "host_blocks": self.host_blocks,
            "in_flight": self.in_flight,
            "seed": self.seed,
            "path": self.path,
            "ended": self.ended,
            "error": self.error,
            "seconds": self.seconds,
            "requests": self.requests,
            "hits": {"gpu": self.gpu_hits, "host": self.host_hits},
            "misses": self.misses,
            "tokens_total": self.tokens_total,
            "tokens_saved": self.tokens_saved,
            "truncated": {"requests": self.truncated_requests, "blocks": self.truncated_blocks},
            "not_stored": self.not_stored,
            "bytes_loaded": self.loads.nbytes,
            "bytes_stored": self.stores.nbytes,
            "loads": self.loads.transfers,
            "stores": self.stores.transfers,
            "gbps_load": self.loads.gbps(),
            "gbps_store": self.stores.gbps(),
            "load_ms": {"p50": self.loads.percentile_ms(50), "p99": self.loads.percentile_ms(99)},
            "store_ms": {"p50": self.stores.percentile_ms(50), "p99": self.stores.percentile_ms(99)},
            "blocks_verified": self.blocks_verified,
            "verified": {
                "where_used": self.verified_where_used,
                "host_given_up": self.verified_given_up,
                **{f"{t}_at_end": n for t, n in self.verified_at_end.items()},
            },
            "poisoned": dict(self.poisoned),
            "wrong_bytes": self.wrong_bytes,
            **(self._file_dict() if self.file_blocks else {}),
            **(self._codec_dict() if self.codec else {}),
        }

    def _link_nbytes(self, moves: Moves) -> int:
        return moves.nbytes * self.coded_bytes_per_block // self.bytes_per_block

    def _codec_dict(self) -> dict[str, Any]:
        return {
            "codec": {
                "name": self.codec,
                "bytes_per_block": self.coded_bytes_per_block,
                "offered": self.offered,
                "misfits": self.misfits,
                "link_bytes_loaded": self._link_nbytes(self.loads),
                "link_bytes_stored": self._link_nbytes(self.stores),
            }
        }

    def _file_dict(self) -> dict[str, Any]:
        return {
            "file_tier": {
                "blocks": self.file_blocks,
                "how": self.file_tier,
                "hits": self.file_hits,
                "bytes_loaded": self.file_loads.nbytes,
                "bytes_stored": self.file_stores.nbytes,
                "gbps_load": self.file_loads.gbps(),
                "gbps_store": self.file_stores.gbps(),
                "load_ms": {"p50": self.file_loads.percentile_ms(50), "p99": self.file_loads.percentile_ms(99)},
                "store_ms": {"p50": self.file_stores.percentile_ms(50), "p99": self.file_stores.percentile_ms(99)},
                "verified_at_end": self.verified_in_files,
            }
        }

    def to_text(self) -> str:
        """The closing table. Where nothing was done before a failure, the failure alone."""
        rows = [*self._cache_rows(), *self._moved_rows(), *self._truth_rows()]
        if self.ended == "failed":
            rows = [*(rows if self.requests else []), ("FAILED", str(self.error))]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)

    def _cache_rows(self) -> list[tuple[str, str]]:
        blocks = self.gpu_hits + self.host_hits + self.file_hits + self.misses
        done = f"{self.requests:,} of {self.trace_requests:,}"
        if self.ended != "complete":
            done += f" ({self.ended})"
        rows = [
            ("requests", f"{done} in {self.seconds:.1f} s"),
            ("hits in the GPU tier", _share(self.gpu_hits, blocks, "blocks")),
            ("hits in the host tier", _share(self.host_hits, blocks, "blocks")),
            *([("hits in the file tier", _share(self.file_hits, blocks, "blocks"))] if self.file_blocks else []),
            ("computed", _share(self.misses, blocks, "blocks")),
            ("prefill saved", _share(self.tokens_saved, self.tokens_total, "tokens")),
        ]
        if self.truncated_requests:
            cut = f"{self.truncated_requests:,} requests longer than the GPU tier, by {self.truncated_blocks:,} blocks"
            rows.append(("TRUNCATED", cut))
        if self.not_stored:
            rows.append(("not stored", f"{self.not_stored:,} blocks of requests that are larger than the host tier"))
        if self.codec:
            rows.append(
                ("not coded", f"{_share(self.misfits, self.offered, 'blocks')} of those that were to be stored")
            )
        return rows

    def _moved_rows(self) -> list[tuple[str, str]]:
        rows = [("loaded (H2D)", _moved(self.loads)), ("stored (D2H)", _moved(self.stores))]
        if self.file_blocks:
            rows += [
                ("loaded from files", _moved(self.file_loads)),
                ("stored to files", _moved(self.file_stores)),
            ]
        return rows

    def _truth_rows(self) -> list[tuple[str, str]]:
        end = self.verified_at_end
        verified = (
            f"{self.blocks_verified:,} blocks: {self.verified_where_used:,} where used, "
            f"{self.verified_given_up:,} on leaving the host tier, "
            f"{sum(end.values()) + self.verified_in_files:,} at the end"
        )
        poisoned = f"{self.poisoned['gpu']:,} GPU + {self.poisoned['host']:,} host slots when given up"
        return [("verified", verified), ("poisoned", poisoned), ("wrong bytes", f"{self.wrong_bytes:,}")]


def _share(part: int, whole: int, unit: str) -> str:
    return f"{part:>13,} {unit}" + (f"  {100 * part / whole:5.1f} %" if whole else "")


def _moved(moves: Moves) -> str:
    text = f"{format_size(moves.nbytes):>13} in {moves.transfers:,} transfers"
    gbps, p50, p99 = moves.gbps(), moves.percentile_ms(50), moves.percentile_ms(99)
    if gbps is not None and p50 is not None and p99 is not None:
        text += f", {gbps:.2f} GB/s, p50 {p50:.2f} ms, p99 {p99:.2f} ms"
    return text


def opening(trace: Trace, settings: Settings, report: Report) -> str:
    """What is about to run, and on what."""
    distinct = len(np.unique(trace.hashes))
    geometry, sizes = settings.geometry, settings.sizes
    block = geometry.block_nbytes
    tiers = [("GPU tier", sizes.gpu_blocks), ("host tier", sizes.host_blocks)]
    tiers.append(("file tier", sizes.file_blocks))
    lines = [
        f"replay of {trace.name}: {len(trace):,} requests, {len(trace.hashes):,} references to {distinct:,} blocks",
        f"  device    {report.device} ({report.device_name}), path {settings.path}",
        f"  geometry  {geometry.describe()}",
        f"  GPU tier  {sizes.gpu_blocks:,} blocks, {format_size(sizes.gpu_blocks * block)}",
        f"  host tier {sizes.host_blocks:,} blocks, {format_size(sizes.host_blocks * report.coded_bytes_per_block)}"
        + (
            f", coded by {report.codec}: {report.coded_bytes_per_block / block:.3f} of the size" if report.codec else ""
        ),
        *([f"  file tier {sizes.file_blocks:,} blocks in {settings.file_tier}"] if sizes.file_blocks else []),
        *([f"  unscaled  {geometry.unscaled(tiers)}"] if geometry.scaled else []),
        f"  in flight {settings.in_flight} requests; every block is written and checked by its hash, layer and offset",
    ]
    if trace.repeated:
        lines.append(f"  note      {trace.repeated:,} references repeat a block of their own request and are left out")
    odd = _contradicting(trace, geometry.block_tokens)
    if odd:
        lines.append(
            f"  note      {odd:,} requests name more or fewer blocks than their input_length has of "
            f"{geometry.block_tokens} tokens: so the token counts below are wrong (see --block-tokens)"
        )
    return "\n".join(lines)


def _contradicting(trace: Trace, block_tokens: int) -> int:
    """Requests whose number of hash_ids does not match their tokens. Not known where ids were left out."""
    if trace.repeated:
        return 0
    return int(np.count_nonzero(np.diff(trace.offsets) != -(-trace.input_tokens // block_tokens)))
