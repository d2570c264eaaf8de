"""The size of a KV-cache block of a model: groups of layers, and bytes a block in each layer.

The numbers are those of the published config.json of each model (num_hidden_layers, num_key_value_heads, head_dim;
kv_lora_rank + qk_rope_head_dim for MLA), with 2-byte elements. Under tensor parallelism a rank holds its share of the
key/value heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from .errors import UsageError
from .units import format_size

BLOCK_TOKENS = 512  # of the Mooncake traces
MIN_BLOCK_NBYTES = 64 << 10  # below it a replay measures calls, not copies
_ALIGN = 16


@dataclass(frozen=True)
class Group:
    """Layers that share block ids: each is one tensor of [num_blocks, layer_nbytes]."""

    name: str
    layers: tuple[int, ...]  # their numbers in the model
    layer_nbytes: int

    @property
    def block_nbytes(self) -> int:
        return len(self.layers) * self.layer_nbytes


@dataclass(frozen=True)
class Geometry:
    """A block of a model: its part in every layer of every group."""

    name: str
    groups: tuple[Group, ...]
    full_nbytes: int  # of a block before scaling
    block_tokens: int

    @property
    def block_nbytes(self) -> int:
        return sum(group.block_nbytes for group in self.groups)

    @property
    def scaled(self) -> bool:
        return self.block_nbytes != self.full_nbytes

    def describe(self) -> str:
        parts = ", ".join(
            (f"{group.name} " if len(self.groups) > 1 else "")
            + f"{len(group.layers)} layers x {format_size(group.layer_nbytes)}"
            for group in self.groups
        )
        size = f"{format_size(self.block_nbytes)} a block"
        if self.scaled:
            size += f", SCALED from {format_size(self.full_nbytes)}"
        return f"{self.name}: {size} ({parts})"

    def unscaled(self, tiers: Iterable[tuple[str, int]]) -> str:
        """What tiers of so many blocks would hold with blocks that are not scaled."""
        sizes = ", ".join(f"{name} {format_size(count * self.full_nbytes)}" for name, count in tiers if count)
        return (
            f"{sizes}, with the model's blocks of {format_size(self.full_nbytes)}: --gpu-bytes and --host-bytes "
            "mean these"
        )


@dataclass(frozen=True)
class _Model:
    layers: int
    kv_heads: int
    head_dim: int
    kv: int = 2
    sliding: bool = False  # every other layer, from the first, is a sliding-window layer with block ids of its own


_MODELS = {
    "llama-3.1-8b": _Model(32, 8, 128),
    "llama-3.1-70b": _Model(80, 8, 128),
    "deepseek-v3": _Model(61, 1, 576, kv=1),
    "qwen3-8b": _Model(36, 8, 128),
    "gpt-oss-120b": _Model(36, 8, 64, sliding=True),
}
_TENSOR_PARALLEL = {"llama-3.1-70b": (1, 4, 8)}


def names() -> list[str]:
    """Every name that `named` takes."""
    shards = [f"{model}-tp{ranks}" for model, sizes in _TENSOR_PARALLEL.items() for ranks in sizes]
    return sorted([*_MODELS, *shards])


def named(name: str, *, block_tokens: int = BLOCK_TOKENS) -> Geometry:
    """The geometry of a model by name, in any case."""
    key = name.lower()
    if key not in names():
        raise UsageError(f"no geometry is called {name!r}; there are {', '.join(names())}")
    base, _, ranks = key.partition("-tp")
    model = _MODELS[base]
    heads = model.kv_heads // int(ranks or 1)
    return _build(key, replace(model, kv_heads=heads), dtype_nbytes=2, block_tokens=block_tokens)


def custom(
    layers: int, kv_heads: int, head_dim: int, *, dtype_nbytes: int = 2, kv: int = 2, block_tokens: int = BLOCK_TOKENS
) -> Geometry:
    """A geometry by numbers. kv is 2 where a layer keeps keys and values, 1 where it keeps one latent."""
    numbers = {"layers": layers, "kv-heads": kv_heads, "head-dim": head_dim, "dtype-bytes": dtype_nbytes}
    for name, value in numbers.items():
        if value < 1:
            raise UsageError(f"--{name} must be at least 1, not {value}")
    if kv not in (1, 2):
        raise UsageError(f"--kv must be 1 or 2, not {kv}")
    name = f"{layers}x{kv}x{kv_heads}x{head_dim}x{dtype_nbytes}B"
    return _build(name, _Model(layers, kv_heads, head_dim, kv), dtype_nbytes=dtype_nbytes, block_tokens=block_tokens)


def _build(name: str, model: _Model, *, dtype_nbytes: int, block_tokens: int) -> Geometry:
    if block_tokens < 1:
        raise UsageError(f"--block-tokens must be at least 1, not {block_tokens}")
    layer_nbytes = block_tokens * model.kv * model.kv_heads * model.head_dim * dtype_nbytes
    every = tuple(range(model.layers))
    groups: tuple[Group, ...] = (Group("all", every, layer_nbytes),)
    if model.sliding:
        groups = (Group("sliding", every[0::2], layer_nbytes), Group("full", every[1::2], layer_nbytes))
    return Geometry(name, groups, sum(group.block_nbytes for group in groups), block_tokens)


def scale(geometry: Geometry, block_nbytes: int, *, allow_tiny: bool = False) -> Geometry:
    """The same layers with a block of about `block_nbytes`: each layer's part shrinks alike, rounded up to 16 bytes."""
    if block_nbytes < MIN_BLOCK_NBYTES and not allow_tiny:
        raise UsageError(
            f"--bytes-per-block {block_nbytes} is under {format_size(MIN_BLOCK_NBYTES)}: such a run measures calls, "
            "not copies (--allow-tiny takes it all the same)"
        )
    if block_nbytes < 1:
        raise UsageError(f"--bytes-per-block must be at least 1, not {block_nbytes}")
    if block_nbytes > geometry.full_nbytes:
        raise UsageError(
            f"--bytes-per-block {block_nbytes} is more than a block of {geometry.name} has: {geometry.full_nbytes}"
        )
    return replace(
        geometry, groups=tuple(_shrink(group, block_nbytes, geometry.full_nbytes) for group in geometry.groups)
    )


def _shrink(group: Group, part: int, whole: int) -> Group:
    exact = -(-group.layer_nbytes * part // whole)
    return replace(group, layer_nbytes=min(group.layer_nbytes, -(-exact // _ALIGN) * _ALIGN))
