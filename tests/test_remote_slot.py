"""The slots of a remote pool: what is sealed is right, and nothing else is. The headers are also read by code of this
file's own, from docs/remote.md."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from kvswap import _C

RIGHT, NO_HEADER, OTHER_KEY, OTHER_GENERATION, OTHER_LENGTH, WRONG_BYTES = range(6)
HEADER = 64
SIZES = (1, 7, 64, 4096, 65536, 65537, 200_001)


def crc32c(data: bytes) -> int:
    """Bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


class Slots:
    """Sealed slots, and blocks to load to."""

    def __init__(self, count: int, nbytes: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.nbytes, self.count = nbytes, count
        self.blocks = rng.integers(0, 256, (count, nbytes), np.uint8)
        self.slots = np.zeros((count, HEADER + nbytes), np.uint8)
        self.to = np.full((count, nbytes), 0xEE, np.uint8)
        self.keys = rng.bytes(16 * count)
        self.generations = np.arange(1, count + 1, dtype=np.int64) << 40
        _C._remote_seal(rows(self.slots), rows(self.blocks), nbytes, self.keys, self.generations)

    def check(self, **changed: Any) -> list[int]:
        given = {"blocks": rows(self.to), "nbytes": self.nbytes, "keys": self.keys, "generations": self.generations}
        given.update(changed)
        return list(_C._remote_check(rows(self.slots), *given.values()))


def rows(array: Any) -> Any:
    return array.ctypes.data + np.arange(len(array), dtype=np.int64) * array.strides[0]


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_sealed_is_right(nbytes: int) -> None:
    slots = Slots(5, nbytes)
    assert slots.check() == [RIGHT] * 5
    assert (slots.to == slots.blocks).all()
    assert slots.check(generations=None, blocks=None) == [RIGHT] * 5


def test_the_header_is_as_documented() -> None:
    slots = Slots(2, 777)
    header = slots.slots[1, :HEADER].tobytes()
    magic, generation, nbytes, key, rest, block_crc, header_crc = struct.unpack("<8sQQ16s16sII", header)
    assert (magic, generation, nbytes, key, rest) == (b"KVSSLOT1", 2 << 40, 777, slots.keys[16:], bytes(16))
    assert block_crc == crc32c(slots.blocks[1].tobytes()) and header_crc == crc32c(header[:60])


def test_each_bit_counts() -> None:
    """A slot with one wrong bit anywhere is not right, and nothing is copied."""
    slots = Slots(1, 100)
    for bit in range(8 * slots.slots.shape[1]):
        slots.slots[0, bit // 8] ^= 1 << bit % 8
        assert slots.check() == [NO_HEADER if bit < 8 * HEADER else WRONG_BYTES], bit
        slots.slots[0, bit // 8] ^= 1 << bit % 8
    assert (slots.to == 0xEE).all()
    assert slots.check() == [RIGHT]


def test_another_block_is_named() -> None:
    slots = Slots(3, 128)
    other = bytearray(slots.keys)
    other[16] ^= 1
    assert slots.check(keys=bytes(other)) == [RIGHT, OTHER_KEY, RIGHT]
    assert slots.check(generations=slots.generations + np.array([0, 0, 1])) == [RIGHT, RIGHT, OTHER_GENERATION]
    assert slots.check(nbytes=127) == [OTHER_LENGTH] * 3
    assert (slots.to[2] == slots.blocks[2]).all() and slots.check() == [RIGHT] * 3


def test_void_and_renumber() -> None:
    slots = Slots(3, 128)
    _C._remote_void(rows(slots.slots)[1:2])
    assert slots.check() == [RIGHT, NO_HEADER, RIGHT]
    _C._remote_renumber(rows(slots.slots)[::2], slots.generations[::2] + 1)
    assert slots.check() == [OTHER_GENERATION, NO_HEADER, OTHER_GENERATION]
    assert slots.check(generations=slots.generations + 1) == [RIGHT, NO_HEADER, RIGHT]


def test_a_damaged_block_stays_damaged_when_it_is_renumbered() -> None:
    """Its checksum is that of the bytes that were stored."""
    slots = Slots(1, 128)
    slots.slots[0, HEADER + 5] ^= 1
    _C._remote_renumber(rows(slots.slots), slots.generations)
    assert slots.check() == [WRONG_BYTES]


def test_wrong_arguments() -> None:
    slots = Slots(3, 128)
    with pytest.raises(ValueError, match="keys has 47 bytes; 3 slots need 48"):
        slots.check(keys=slots.keys[:-1])
    with pytest.raises(ValueError, match="blocks has 2"):
        slots.check(blocks=rows(slots.to)[:2])
    with pytest.raises(ValueError, match="generations has 1"):
        _C._remote_renumber(rows(slots.slots), slots.generations[:1])
    with pytest.raises(TypeError, match="slots must be an int64 or uint64 array"):
        _C._remote_void([1, 2])
    assert slots.check() == [RIGHT] * 3


def test_addresses_of_blocks() -> None:
    memory = np.zeros((6, 64), np.uint8)
    addresses, hold = _C._remote_addresses(memory, [5, 0], 64, 2, True)
    assert list(addresses) == [memory.ctypes.data + 5 * 64, memory.ctypes.data] and hold[0] is memory
    addresses, hold = _C._remote_addresses([memory[1], memory.ctypes.data], None, 64, 2, False)
    assert list(addresses) == [memory.ctypes.data + 64, memory.ctypes.data]
    with pytest.raises(IndexError, match=r"ids\[1\] is 6; blocks has 6 blocks of 64 bytes"):
        _C._remote_addresses(memory, [0, 6], 64, 2, True)
    with pytest.raises(ValueError, match=r"blocks\[0\] has 64 bytes; a block of the store has 65"):
        _C._remote_addresses([memory[1]], None, 65, 1, False)
    with pytest.raises(ValueError, match="ids has 1"):
        _C._remote_addresses(memory, [0], 64, 2, True)
    memory.flags.writeable = False
    with pytest.raises(ValueError):
        _C._remote_addresses(memory, [0], 64, 1, True)
