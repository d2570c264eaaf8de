"""Names of blocks between nodes: 16 bytes of BLAKE2b over the layout and the key.

Two layouts never share a block, keys have one length on the wire, and a node does not learn the engine's keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

KEY_NBYTES = 16
_MOST_KEY_NBYTES = 512


class Namer:
    """Names the keys of one layout."""

    def __init__(self, block_nbytes: int, text: str) -> None:
        self._base = hashlib.blake2b(f"{block_nbytes} {text}\0".encode(), digest_size=KEY_NBYTES)

    def names(self, keys: Any) -> bytes:
        """keys: as for kvswap.files.FileStore. The names one after the other."""
        found = []
        for key in _as_bytes(keys):
            state = self._base.copy()
            state.update(key)
            found.append(state.digest())
        return b"".join(found)


def _as_bytes(keys: Any) -> Sequence[bytes]:
    if isinstance(keys, np.ndarray):
        return _rows(keys)
    if isinstance(keys, (bytes, bytearray, str)) or not hasattr(keys, "__len__"):
        raise TypeError(f"keys must be a sequence of bytes, not {type(keys).__name__}: pass [x] for one")
    found = list(keys)
    for i, key in enumerate(found):
        if isinstance(key, tuple) and len(key) == 2:
            key = found[i] = b"block_%d_pool_%d" % key
        if not isinstance(key, bytes):
            raise TypeError(f"keys[{i}] must be bytes or (block id, pool), not {type(key).__name__}")
        if not 1 <= len(key) <= _MOST_KEY_NBYTES:
            raise ValueError(f"keys[{i}] has {len(key)} bytes: must have 1 to {_MOST_KEY_NBYTES}")
    return found


def _rows(keys: np.ndarray[Any, Any]) -> list[bytes]:
    if keys.ndim != 2 or keys.dtype.itemsize != 1 or not 1 <= keys.shape[1] <= _MOST_KEY_NBYTES:
        raise ValueError(
            f"keys must be a 2-D array of bytes, 1 to {_MOST_KEY_NBYTES} a row, not {keys.dtype}{keys.shape}"
        )
    data, width = keys.tobytes(), keys.shape[1]
    return [data[at : at + width] for at in range(0, len(data), width)]
