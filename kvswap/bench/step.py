"""A decode step of a model like Llama 8B: products, norms, attention over a KV cache, and the gated feed-forward.

Written twice over the same arrays, with torch for a GPU and with NumPy for a host device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Size:
    """Sizes of the model, and of one step, which decodes `batch` requests of `context` tokens each."""

    layers: int
    batch: int
    context: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    inner: int

    @property
    def group(self) -> int:
        """Query heads that share a head of keys and values."""
        return self.heads // self.kv_heads

    def __str__(self) -> str:
        return f"{self.layers} layers of a Llama 8B, {self.batch} requests of {self.context:,} tokens"


LLAMA = Size(layers=16, batch=64, context=2048, hidden=4096, heads=32, kv_heads=8, head=128, inner=14336)
SMALL = Size(layers=2, batch=4, context=64, hidden=256, heads=8, kv_heads=2, head=32, inner=512)


@dataclass(frozen=True)
class Layer:
    """Weights, and the cache: keys and values are [batch, kv_heads, context, head]."""

    qkv: Any
    out: Any
    gate_up: Any
    down: Any
    keys: Any
    values: Any


@dataclass(frozen=True)
class Model:
    size: Size
    x: Any  # input of the first layer: [batch, hidden]
    layers: tuple[Layer, ...]


def model(size: Size, normal: Callable[[tuple[int, ...], float], Any]) -> Model:
    """normal(shape, scale) returns random numbers. Weights are scaled so that values keep their order of magnitude."""
    queries, cached = size.heads * size.head, 2 * size.kv_heads * size.head
    cache = (size.batch, size.kv_heads, size.context, size.head)

    def weight(rows: int, columns: int) -> Any:
        return normal((rows, columns), rows**-0.5)

    layers = [
        Layer(
            weight(size.hidden, queries + cached),
            weight(queries, size.hidden),
            weight(size.hidden, 2 * size.inner),
            weight(size.inner, size.hidden),
            normal(cache, 1.0),
            normal(cache, 1.0),
        )
        for _ in range(size.layers)
    ]
    return Model(size, normal((size.batch, size.hidden), 1.0), tuple(layers))


def by_torch(torch: Any, model: Model) -> Any:
    """The output of the last layer. No call waits for the GPU, so the step can be captured as a CUDA graph."""
    functional, size, x = torch.nn.functional, model.size, model.x
    for layer in model.layers:
        projected = functional.rms_norm(x, (size.hidden,)) @ layer.qkv
        # The query heads of a group take the place of a prompt's tokens: each attends to the group's whole cache.
        queries = projected[:, : size.heads * size.head].unflatten(1, (size.kv_heads, size.group, size.head))
        seen = functional.scaled_dot_product_attention(queries, layer.keys, layer.values)
        x = x + seen.flatten(1) @ layer.out
        gate, up = (functional.rms_norm(x, (size.hidden,)) @ layer.gate_up).chunk(2, dim=1)
        x = x + (functional.silu(gate) * up) @ layer.down
    return x


def by_numpy(model: Model) -> Any:
    """The same with NumPy."""
    size, x = model.size, model.x
    for layer in model.layers:
        projected = _rms_norm(x) @ layer.qkv
        queries = projected[:, : size.heads * size.head].reshape(size.batch, size.kv_heads, size.group, size.head)
        scores = queries @ layer.keys.swapaxes(2, 3) / np.float32(size.head**0.5)
        weights = np.exp(scores - scores.max(axis=3, keepdims=True))
        seen = weights @ layer.values / weights.sum(axis=3, keepdims=True)
        x = x + seen.reshape(size.batch, -1) @ layer.out
        gate, up = np.split(_rms_norm(x) @ layer.gate_up, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down
    return x


def _rms_norm(x: Any) -> Any:
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + np.finfo(x.dtype).eps)
