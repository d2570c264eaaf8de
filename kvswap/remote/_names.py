"""Names of blocks in Mooncake: identity, epoch, the engine's key. Two of them that differ in anything differ."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

HASH_NBYTES = 16
_MOST_KEY_NBYTES = 512
_PLAIN_NBYTES = 40  # a longer key is hashed


def identity_of(block_nbytes: int, text: str) -> bytes:
    """16 bytes that stand for a layout."""
    return hashlib.blake2b(f"{block_nbytes} {text}".encode(), digest_size=HASH_NBYTES).digest()


def names(identity: bytes, epoch: bytes, keys: Sequence[bytes]) -> list[str]:
    """Mooncake's keys. A hashed key begins with a letter that is no hexadecimal digit."""
    start = f"kvswap/{identity.hex()}/{epoch.hex()}/"
    if max(map(len, keys), default=0) <= _PLAIN_NBYTES:
        return [start + text for text in map(bytes.hex, keys)]
    return [
        start + (key.hex() if len(key) <= _PLAIN_NBYTES else f"h{hashlib.blake2b(key, digest_size=32).hexdigest()}")
        for key in keys
    ]


def hashes(of: Sequence[str]) -> bytes:
    """16 bytes a name, one after the other: what a block's header has."""
    return b"".join(hashlib.blake2b(name.encode(), digest_size=HASH_NBYTES).digest() for name in of)


def as_bytes(keys: Any) -> list[bytes]:
    """keys: as for kvswap.files.FileStore."""
    if isinstance(keys, np.ndarray):
        return _rows(keys)
    if isinstance(keys, (bytes, bytearray, str)) or not hasattr(keys, "__len__"):
        raise TypeError(f"keys must be a sequence of bytes, not {type(keys).__name__}: pass [x] for one")
    found = list(keys)
    if set(map(type, found)) == {bytes}:
        lengths = set(map(len, found))
        if min(lengths) >= 1 and max(lengths) <= _MOST_KEY_NBYTES:
            return found
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
