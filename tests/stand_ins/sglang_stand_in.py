"""As much of SGLang's shape as a storage backend of its HiCache meets, without SGLang or torch: the abstract class, the
types of its calls, and host pools. tests/integration/sglang_package.py runs the same backend under SGLang itself."""

# mypy: disable-error-code="no-untyped-def,attr-defined,misc"

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

NAMES = ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.hicache_storage")
METRICS = ("sglang.srt.observability", "sglang.srt.observability.metrics_collector")


class PoolName(str, Enum):
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    INDEXER = "indexer"
    DRAFT = "draft"

    def __str__(self) -> str:
        return self.value


class PoolHitPolicy(str, Enum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: Any = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[Any, int]
    restorable_prefix_pages: list[int] | None = None


class HiCacheStorage(ABC):
    @abstractmethod
    def get(self, key, target_location=None, target_sizes=None): ...
    @abstractmethod
    def batch_get(self, keys, target_locations=None, target_sizes=None): ...
    @abstractmethod
    def set(self, key, value=None, target_location=None, target_sizes=None): ...
    @abstractmethod
    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None): ...
    @abstractmethod
    def exists(self, key): ...


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


def modules() -> dict[str, Any]:
    """What stands in, by the names that are imported."""
    made: dict[str, Any] = {name: ModuleType(name) for name in (*NAMES, *METRICS)}
    for thing in (PoolName, PoolHitPolicy, PoolTransfer, PoolTransferResult, HiCacheStorage):
        setattr(made[NAMES[-1]], thing.__name__, thing)
    made[METRICS[-1]].StorageMetrics = StorageMetrics
    made["torch"] = SimpleNamespace(arange=lambda end, dtype: np.arange(end, dtype=dtype), int64=np.int64)
    return made


def install() -> None:
    """In a process of its own."""
    sys.modules.update(modules())


def config(**changes: Any) -> Any:
    """A HiCacheStorageConfig."""
    values: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "model_name": "org/model",
        "dp_rank": 0,
        "should_split_heads": False,
        "dcp_size": 1,
        "dcp_rank": 0,
        **changes,
    }
    values["is_storage_writer"] = not values["is_mla_model"] or values["tp_rank"] == 0
    return SimpleNamespace(**values)


class HostPool:
    """Pages of `tokens` tokens; the pieces of a page are of `sizes` bytes, each kind in an array of its own, as K and
    V are, and the layers of layer_first."""

    dtype = "bfloat16"

    def __init__(self, sizes: list[int], pages: int = 16, tokens: int = 4, layout: str = "page_first", seed: int = 1):
        self.sizes, self.page_size, self.layout, self.layer_num = sizes, tokens, layout, 2
        self.size = pages * tokens
        random = np.random.default_rng(seed)
        self.pieces = [random.integers(0, 256, (pages, size), np.uint8) for size in sizes]

    def get_page_buffer_meta(self, indices: Any) -> Any:
        assert len(indices) % self.page_size == 0
        pages = [int(token) // self.page_size for token in indices[:: self.page_size]]
        return (
            [int(piece.ctypes.data) + page * piece.shape[1] for page in pages for piece in self.pieces],
            [size for _ in pages for size in self.sizes],
        )

    def tokens_of(self, pages: list[int]) -> Any:
        return np.concatenate([np.arange(self.page_size) + page * self.page_size for page in pages])

    def bytes_of(self, page: int) -> bytes:
        return b"".join(piece[page].tobytes() for piece in self.pieces)


class MarkPool(HostPool):
    """Pages without bytes of their own, as DeepSeek V4's KV pool."""

    def get_page_buffer_meta(self, indices: Any) -> Any:
        return None
