"""What a page of one of SGLang's host pools holds, for codecs (docs/codecs.md)."""

from __future__ import annotations

from typing import Any

from kvswap.codecs._pages import Page, kind_of, plain


def page_of(name: str, pool: Any) -> Page:
    """A page of a host pool in one of its tensors: keys or values of a layer, or latents. SGLang stores fp8 as bytes,
    scales and rotated parts among them, so such a page is kept as it is. ValueError, with the pool's name: its type is
    not known."""
    kind = kind_of(pool.dtype)
    if kind is None:
        raise ValueError(f"host pool {name} keeps {pool.dtype}, which kvswap does not know: no codec can be used")
    return plain(int(pool.page_size) * int(pool.token_stride_size), kind)
