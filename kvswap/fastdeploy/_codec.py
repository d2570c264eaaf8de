"""What a block of one of FastDeploy's caches holds, for codecs (docs/codecs.md)."""

from __future__ import annotations

from kvswap.codecs._pages import Page, kind_of, plain
from kvswap.fastdeploy.manager.layout import Cache


def page_of(cache: Cache) -> Page:
    """A block of a layer's keys or values, [kv_heads, block_size, head_dim]; scales, [kv_heads, block_size], are kept
    as they are. ValueError, with the cache's name: its type is not known."""
    kind = kind_of(cache.dtype) if len(cache.shape) == 4 else "raw"
    if kind is None:
        raise ValueError(
            f"{cache.name} has elements of {cache.dtype}, which kvswap does not know: no codec can be used"
        )
    return plain(cache.block_nbytes, kind)
