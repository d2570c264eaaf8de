"""Whether the bytes that come back are those that left: sums of the blocks of requests."""

from __future__ import annotations

from serving.engine import Engine, Request
from serving.models import BLOCK

Sums = dict[tuple[str, int, int], tuple[int, ...]]  # by request, group and place in the request: a number a rank


def sums_of(engine: Engine, name: str, request: Request, tokens: int) -> Sums:
    """Of the blocks of a running request that `tokens` tokens fill; name: what to call it. Blocks that a window has
    left behind are not there."""
    found: list[tuple[str, int, int]] = []
    blocks: list[int] = []
    for group, ids in enumerate(engine.blocks_of(request)):
        for place, block in enumerate(ids[: tokens // BLOCK]):
            if block:
                found.append((name, group, place))
                blocks.append(block)
    ranks = engine.each("serving_sums", blocks, engine.gpu_blocks)
    return dict(zip(found, zip(*ranks, strict=True), strict=True))


def compare(before: Sums, after: Sums) -> tuple[int, int]:
    """Blocks that both have, and how many of them differ."""
    both = before.keys() & after.keys()
    return len(both), sum(before[block] != after[block] for block in both)
