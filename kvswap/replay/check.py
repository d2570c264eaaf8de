"""Writes, poisons and checks blocks by their pattern, on a stream. Shares no code with the copy paths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvswap import _C

from .memory import GroupMemory, TierMemory, Words
from .pattern import POISON_KEY, Kind, block_keys, classes, most_escapes, window_keys
from .tiers import Slots

_ITEMS_A_CALL = 1 << 16


class WrongBytes(_C.Error):
    """A block does not hold the bytes it must."""

    def __init__(self, message: str, *, wrong_bytes: int, block: int, layer: int, offset: int) -> None:
        super().__init__(message)
        self.wrong_bytes = wrong_bytes
        self.block = block
        self.layer = layer
        self.offset = offset

    def told(self, more: str) -> WrongBytes:
        """The same with a longer message."""
        place = {"block": self.block, "layer": self.layer, "offset": self.offset}
        return WrongBytes(f"{self}; {more}", wrong_bytes=self.wrong_bytes, **place)


@dataclass(frozen=True)
class Blocks:
    """Blocks in slots of one tier, as checked or written by one call."""

    tier: str  # "gpu" or "host"
    hashes: Words
    slots: Slots

    def part(self, start: int, stop: int) -> Blocks:
        return Blocks(self.tier, self.hashes[start:stop], self.slots[start:stop])


@dataclass(frozen=True)
class Check:
    """A check under way."""

    job: _C._PatternJob
    blocks: Blocks
    what: str  # for the message: the checker


class Checker:
    """Knows every block's keys and addresses."""

    def __init__(self, device: _C.Device, memory: TierMemory, seed: int, kind: Kind = "bytes") -> None:
        self._device = device
        self._groups = memory.groups
        self._seed = seed
        self._kind = kind
        self._most_escapes = [most_escapes(m.group.layer_nbytes) for m in self._groups] if kind == "window" else []
        self._layers = sum(len(memory.group.layers) for memory in self._groups)

    def write(self, blocks: Blocks, stream: _C.Stream) -> _C._PatternJob:
        return self._pattern(False, blocks, self._keys(blocks.hashes), stream, self._kind)

    def poison(self, tier: str, slots: Slots, stream: _C.Stream) -> _C._PatternJob:
        blocks = Blocks(tier, np.zeros(len(slots), np.uint64), slots)
        return self._pattern(False, blocks, np.full(len(slots) * self._layers, POISON_KEY), stream, "bytes")

    def check(self, blocks: Blocks, stream: _C.Stream, what: str) -> Check:
        return Check(self._pattern(True, blocks, self._keys(blocks.hashes), stream, self._kind), blocks, what)

    def result(self, check: Check, timeout: float) -> None:
        """Wait for a check; raises WrongBytes, which names the first wrong byte."""
        wrong, item, offset = check.job.result(timeout)
        if wrong:
            assert item is not None and offset is not None
            raise self._wrong(check, wrong, item, offset)

    def parts(self, blocks: Blocks) -> list[Blocks]:
        """The same blocks in lists of bounded size."""
        step = max(1, _ITEMS_A_CALL // self._layers)
        return [blocks.part(start, start + step) for start in range(0, len(blocks.slots), step)]

    def _keys(self, hashes: Words) -> Words:
        keys = [block_keys(hashes, number, len(m.group.layers), self._seed) for number, m in enumerate(self._groups)]
        if self._kind == "window":
            found = classes(hashes, self._seed)
            keys = [window_keys(key, found, most) for key, most in zip(keys, self._most_escapes, strict=True)]
        return np.concatenate([key.ravel() for key in keys])

    def _pattern(self, check: bool, blocks: Blocks, keys: Words, stream: _C.Stream, kind: Kind) -> _C._PatternJob:
        ptrs = np.concatenate([_addresses(memory, blocks).ravel() for memory in self._groups])
        nbytes = np.concatenate(
            [np.full(len(m.group.layers) * len(blocks.slots), _nbytes(m, blocks), np.uint64) for m in self._groups]
        )
        return _C._pattern(self._device, check, ptrs, nbytes, keys, stream, kind)

    def _wrong(self, check: Check, wrong: int, item: int, offset: int) -> WrongBytes:
        """Items lie group by group, layer by layer, block by block."""
        blocks, count = check.blocks, len(check.blocks.slots)
        for memory in self._groups:
            items = len(memory.group.layers) * count
            if item < items:
                break
            item -= items
        layer = memory.group.layers[item // count]
        position = item % count
        slot = int(blocks.slots[position])
        ids = memory.gpu_ids if blocks.tier == "gpu" else memory.host_ids
        block = int(blocks.hashes[position])
        group = f" (group {memory.group.name})" if len(self._groups) > 1 else ""
        message = (
            f"WRONG BYTES: block {block}, layer {layer}{group}, offset {offset}, in {blocks.tier} slot {slot} "
            f"(block id {int(ids[slot])}): found by {check.what}, which saw {wrong} wrong bytes in all"
        )
        return WrongBytes(message, wrong_bytes=wrong, block=block, layer=layer, offset=offset)


def _nbytes(memory: GroupMemory, blocks: Blocks) -> int:
    return memory.group.layer_nbytes if blocks.tier == "gpu" else memory.host_nbytes


def _addresses(memory: GroupMemory, blocks: Blocks) -> NDArray[np.uint64]:
    return memory.gpu_addresses(blocks.slots) if blocks.tier == "gpu" else memory.host_addresses(blocks.slots)
