"""The bytes a block must hold, in NumPy: a twin of kvs_pattern_value in csrc/kernels/kernels.h, made without it.

Byte i of an item is byte i % 8 (little-endian) of value(kind, key, i // 8). A key is a mix of block hash, group, layer
and seed, so that a block that lands in another block's place, layer or group is as wrong as one that never arrived.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvswap.codecs import Coding
from kvswap.codecs.reader import units_of

# bytes: any. Of blocks that are coded, bf16: window: a codec without loss holds them, unless the key says otherwise;
# coarse: few values, which every codec gives back as they are.
Kind = Literal["bytes", "window", "coarse"]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MUL1 = np.uint64(0xBF58476D1CE4E5B9)
_MUL2 = np.uint64(0x94D049BB133111EB)
_LAYER = np.uint64(0xD6E8FEB86659FD93)  # odd: layers of a block keep apart
POISON_KEY = np.uint64(0x5EED0FDEADB10C5)  # what slots that were given up hold


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64."""
    z = (values ^ (values >> np.uint64(30))) * _MUL1
    z = (z ^ (z >> np.uint64(27))) * _MUL2
    return np.asarray(z ^ (z >> np.uint64(31)), dtype=np.uint64)


def pattern_words(keys: NDArray[np.uint64], nwords: int) -> NDArray[np.uint64]:
    """The first words of each key's pattern, one row a key."""
    index = np.arange(1, nwords + 1, dtype=np.uint64)
    return mix(keys.reshape(-1, 1) + index * _STEP)


# What a block of kind `window` is: within the window; a value in 256 below it, which fits; any bytes; as many values
# below it as have a place in the first unit of a page of `exact`; and one more.
PLAIN, ESCAPES, MISFIT, FULL, BEYOND = range(5)
# Of a number that is drawn for each block: (n, r) is one block in n, whose remainder is r. The last one counts.
_SHARES = {ESCAPES: (10, 0), FULL: (100, 1), MISFIT: (2000, 0), BEYOND: (2000, 1000)}
_COUNTED, _COUNT_BITS = 3, 14  # of a key, instead of FULL and BEYOND; the number of values below is above these bits
_SIZES = np.array([1, 1.5, 2, 3, 4, 6, 2, 3], np.float32).view(np.uint32) >> 16


def _window(key: int, values: NDArray[np.uint16]) -> NDArray[np.uint16]:
    if key % 4 == MISFIT:
        return values
    exponent = (values >> 7 & 7) + 121
    if key % 4 == ESCAPES:
        exponent[::256] = 20
    if key % 4 == _COUNTED:
        exponent[::32][: key >> 2 & (1 << _COUNT_BITS) - 1] = 20
    return np.asarray(values & 0x807F | exponent << 7, np.uint16)


def _coarse(values: NDArray[np.uint16]) -> NDArray[np.uint16]:
    size = _SIZES[values & 7].astype(np.uint16)
    size[::16] = _SIZES[5]
    return np.asarray(values & 0x8000 | size, np.uint16)


def pattern_bytes(key: int, nbytes: int, kind: Kind = "bytes") -> NDArray[np.uint8]:
    """What an item of this key must hold."""
    words = pattern_words(np.array([key], np.uint64), -(-nbytes // 8))
    values = words.astype("<u8").view("<u2").reshape(-1)
    if kind != "bytes":
        values = _window(key, values) if kind == "window" else _coarse(values)
    return values.astype("<u2").view(np.uint8)[:nbytes]


def block_keys(hashes: NDArray[np.uint64], group: int, layers: int, seed: int) -> NDArray[np.uint64]:
    """Keys of blocks in the layers of a group: shape (layers, blocks), the order in which items are laid out."""
    salt = mix(np.array([(seed << 8 | group) & (2**64 - 1)], np.uint64) + _STEP)
    rows = np.arange(1, layers + 1, dtype=np.uint64).reshape(-1, 1) * _LAYER
    return mix(mix(hashes ^ salt) + rows)


def classes(hashes: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """PLAIN to BEYOND, of blocks of kind `window`."""
    drawn = mix(hashes ^ mix(np.array([seed & (2**64 - 1)], np.uint64) + _LAYER))
    found = np.full(len(hashes), PLAIN, np.uint64)
    for which, (every, remainder) in _SHARES.items():
        found[drawn % np.uint64(every) == remainder] = which
    return found


def most_escapes(page_nbytes: int) -> int:
    """Values below the window that have a place in the first unit of a page of bf16, under `exact`."""
    return units_of(Coding(page_nbytes, "exact"))[0].most_escapes


def window_keys(keys: NDArray[np.uint64], found: NDArray[np.uint64], most: int) -> NDArray[np.uint64]:
    """Keys of kind `window`, which say of what class their blocks are. most: of most_escapes()."""
    low = found & np.uint64(3)
    counted = found >= FULL
    low[counted] = (most + found[counted] - np.uint64(FULL)) << np.uint64(2) | np.uint64(_COUNTED)
    return np.asarray(keys & ~np.uint64((1 << 2 + _COUNT_BITS) - 1) | low, np.uint64)


def misfits(hashes: NDArray[np.uint64], seed: int, kind: Kind) -> NDArray[np.int64]:
    """Positions of the blocks that a codec cannot hold."""
    if kind != "window":
        return np.zeros(0, np.int64)
    return np.flatnonzero(np.isin(classes(hashes, seed), (MISFIT, BEYOND)))


def first_wrong(data: NDArray[np.uint8], key: int) -> tuple[int, int | None]:
    """How many bytes differ from the key's pattern, and the offset of the first."""
    wrong = np.flatnonzero(data != pattern_bytes(key, data.size))
    return (int(wrong.size), int(wrong[0])) if wrong.size else (0, None)
