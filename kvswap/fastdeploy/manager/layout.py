"""Names, shapes and sizes of a rank's caches, in FastDeploy's order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

ITEM_NBYTES = {"uint8": 1, "block_wise_fp8": 1, "float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Cache:
    """One tensor. name: the name of its segment in FastDeploy. dtype: name of the element type."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_blocks(self) -> int:
        return self.shape[0]

    @property
    def block_nbytes(self) -> int:
        return math.prod(self.shape[1:]) * ITEM_NBYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_nbytes


@dataclass(frozen=True)
class Layout:
    """The caches of one rank.

    key_shape, value_shape: [num_blocks, kv_heads, block_size, head_dim]; value_shape empty: keys only.
    cache_dtype "block_wise_fp8": bytes, and scales of scale_dtype beside each cache, which move with it.
    num_extra_layers: layers of a draft model, after the num_layers of the model, with extra_blocks blocks each.
    """

    rank: int
    device_id: int
    num_layers: int
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    cache_dtype: str
    scale_dtype: str
    num_extra_layers: int
    extra_blocks: int
    num_cpu_blocks: int

    @property
    def has_scales(self) -> bool:
        return self.cache_dtype == "block_wise_fp8"

    @property
    def num_gpu_blocks(self) -> int:
        """The limit of GPU block ids: every layer has at least this many blocks."""
        return min(self.key_shape[0], self.extra_blocks) if self.num_extra_layers else self.key_shape[0]

    def caches(self) -> list[Cache]:
        """Layer by layer: keys, scales of keys, values, scales of values."""
        return [cache for layer in range(self.num_layers + self.num_extra_layers) for cache in self._layer(layer)]

    def _layer(self, layer: int) -> Iterator[Cache]:
        blocks = self.key_shape[0] if layer < self.num_layers else self.extra_blocks
        dtype = "uint8" if self.has_scales else self.cache_dtype
        where = f"{layer}_rank{self.rank}.device{self.device_id}"
        for kind, shape in (("key", self.key_shape), ("value", self.value_shape)):
            if not shape:
                continue
            yield Cache(f"{kind}_caches_{where}", (blocks, *shape[1:]), dtype)
            if self.has_scales:
                yield Cache(f"{kind}_cache_scales_{where}", (blocks, *shape[1:3]), self.scale_dtype)

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one block in all layers, which is the size of a host slot."""
        return sum(cache.block_nbytes for cache in self.caches())

    def describe(self) -> str:
        """The layout as text; equal on all ranks of a model."""
        value = "x".join(map(str, self.value_shape)) or "none"
        return (
            f"{self.num_layers}+{self.num_extra_layers} layers, keys {'x'.join(map(str, self.key_shape))}, values "
            f"{value}, {self.cache_dtype} (scales {self.scale_dtype}), {self.extra_blocks} blocks in extra layers, "
            f"{self.num_cpu_blocks} host blocks"
        )
