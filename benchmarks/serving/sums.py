"""One number for the bytes of a block of the GPU's cache, to see whether what comes back is what left."""

from __future__ import annotations

from typing import Any

from serving.engine import Engine, Request
from serving.models import BLOCK

Sums = dict[tuple[str, int, int], int]  # of a block: its request's name, its group, its place in the request


def sums_of(engine: Engine, name: str, request: Request, tokens: int) -> Sums:
    """Of the blocks of a running request that `tokens` tokens fill; name: what to call it. Blocks that a window has
    left behind are not there."""
    torch = engine.torch
    found: list[tuple[str, int, int]] = []
    blocks: list[int] = []
    for group, ids in enumerate(engine.blocks_of(request)):
        for place, block in enumerate(ids[: tokens // BLOCK]):
            if block:
                found.append((name, group, place))
                blocks.append(block)
    total: Any = None
    weights: dict[int, Any] = {}
    for rows in _rows(engine):
        page = rows.index_select(0, torch.tensor(blocks, device=rows.device)).view(torch.int64)
        if page.shape[1] not in weights:
            made = torch.Generator("cpu").manual_seed(7)
            drawn = torch.randint(-(2**62), 2**62, (page.shape[1],), generator=made) | 1
            weights[page.shape[1]] = drawn.to(rows.device)
        part = (page * weights[page.shape[1]]).sum(1)
        total = part if total is None else total * 1_000_003 + part
    return dict(zip(found, total.tolist(), strict=True))


def _rows(engine: Engine) -> list[Any]:
    """Each piece of memory of the cache once, as bytes, a row a block."""
    torch, found = engine.torch, {}
    blocks = engine.core.vllm_config.cache_config.num_gpu_blocks
    for cache in engine.caches():
        storage = cache.untyped_storage()
        raw = torch.empty(0, dtype=torch.int8, device=cache.device).set_(storage)
        found[storage.data_ptr()] = raw.view(blocks, -1)
    return list(found.values())


def compare(before: Sums, after: Sums) -> tuple[int, int]:
    """Blocks that both have, and how many of them differ."""
    both = before.keys() & after.keys()
    return len(both), sum(before[block] != after[block] for block in both)
