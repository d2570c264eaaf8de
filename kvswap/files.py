"""The file tier: blocks that leave memory for files, and come back exactly or are reported lost.

    layout = Layout(2 << 20, model="llama-3-70b", dtype="bf16", tokens=16, tp_rank=0, tp_size=8)
    with FileStore("/mnt/nvme/kv", layout, capacity=500 << 30, device="cuda:0") as store:
        store.store(hashes, gpu_pools, ids, replace=False).wait(timeout=10)
        load = store.load(hashes, gpu_pools, ids)
        load.wait(timeout=10)  # raises what went wrong; load.failed_blocks says which blocks are lost, load.reasons why

A store is a directory; docs/files.md describes its files byte by byte. What a load delivers has been compared with the
checksum that was made when it was stored, before a byte of it goes to a device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvswap._C import FileStore, FileTransfer

__all__ = ["FileStore", "FileTransfer", "Layout"]

_MOST_TEXT = 3072


class Layout:
    """What the blocks of a store are. Two stores hold the same kind of blocks if, and only if, their layouts are equal.

    block_nbytes: bytes of a block, from 1 on. fields: whatever tells blocks of one kind from another: model, dtype,
    tokens a block, layers, heads, tensor-parallel rank and size; strings, numbers, booleans, None, or lists and dicts
    of them. Their order does not count.
    """

    __slots__ = ("block_nbytes", "fields", "text")

    def __init__(self, block_nbytes: int, **fields: Any) -> None:
        if isinstance(block_nbytes, bool) or not hasattr(block_nbytes, "__index__"):
            raise TypeError(f"block_nbytes must be an int, not {type(block_nbytes).__name__}")
        self.block_nbytes: int = block_nbytes.__index__()
        if self.block_nbytes < 1:
            raise ValueError(f"block_nbytes is {self.block_nbytes}: must be at least 1")
        self.fields: Mapping[str, Any] = dict(fields)
        self.text: str = _canonical(fields)  # stands in the store's files

    @classmethod
    def parse(cls, block_nbytes: int, text: str) -> Layout:
        """The layout of which a store's files hold this text."""
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError(f"layout is {text!r}: must be a JSON object")
        return cls(block_nbytes, **fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and (self.block_nbytes, self.text) == (other.block_nbytes, other.text)

    def __hash__(self) -> int:
        return hash((self.block_nbytes, self.text))

    def __repr__(self) -> str:
        fields = "".join(f", {name}={value!r}" for name, value in self.fields.items())
        return f"Layout({self.block_nbytes}{fields})"


def _canonical(fields: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a layout's fields must be what JSON can hold: {error}") from None
    if len(text) > _MOST_TEXT:
        raise ValueError(f"a layout's fields take {len(text)} bytes as JSON: at most {_MOST_TEXT}")
    return text
