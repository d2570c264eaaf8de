"""Which block is where: a GPU tier, a host tier and perhaps a file tier, the least recently used out first.

Book-keeping: nothing moves here.

The rules, which tests hold against a brute-force model:
- A request's hits are its leading blocks that some tier holds; from the first block that none holds on, all are
  computed, even those that a tier happens to hold (prefix caching).
- All blocks of a request are in the GPU tier while it runs: hits of the host tier are loaded, the others computed. A
  request longer than the GPU tier is cut to it.
- A computed block that the host tier lacks is written through to it; the first ones where it has no room for all.
- A block that the host tier gives up goes to the file tier, if there is one and it lacks it; from there it is loaded to
  the GPU tier, and stays where it is.
- A request touches its blocks in all tiers, the last block first: of one prefix the end goes before the start.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int64]


@dataclass(frozen=True)
class GivenUp:
    """Blocks that leave a tier, and their slots."""

    hashes: NDArray[np.uint64]
    slots: Slots
    last_user: int  # the last request that used any of them; -1 if there are none


_NOTHING = GivenUp(np.zeros(0, np.uint64), np.zeros(0, np.int64), -1)


class Tier:
    """Blocks in slots, ordered by last use."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._slots: OrderedDict[int, int] = OrderedDict()  # oldest first
        self._free = list(range(num_blocks - 1, -1, -1))
        self._last_use = np.full(num_blocks, -1, np.int64)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, block: int) -> bool:
        return block in self._slots

    def slots_of(self, blocks: Iterable[int]) -> Slots:
        return np.fromiter((self._slots[block] for block in blocks), np.int64)

    def touch(self, blocks: Sequence[int], request: int) -> None:
        """Make the blocks that are in this tier the most recently used, the first block last."""
        for block in reversed(blocks):
            slot = self._slots.get(block)
            if slot is not None:
                self._slots.move_to_end(block)
                self._last_use[slot] = request

    def make_room(self, count: int) -> GivenUp:
        """Evict the oldest blocks until `count` slots are free."""
        if count <= len(self._free):
            return _NOTHING
        oldest = [self._slots.popitem(last=False) for _ in range(count - len(self._free))]
        self._free.extend(slot for _, slot in reversed(oldest))
        slots = np.array([slot for _, slot in oldest], np.int64)
        hashes = np.array([block for block, _ in oldest], np.uint64)
        return GivenUp(hashes, slots, int(self._last_use[slots].max(initial=-1)))

    def forget(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._free.append(self._slots.pop(block))

    def insert(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._slots[block] = self._free.pop()

    def find(self, blocks: Sequence[int], elsewhere: Sequence[bool]) -> list[bool]:
        """Which blocks are here. elsewhere: those that a tier before this one has, which need no look-up."""
        return [block in self._slots for block in blocks]

    def take(self, blocks: Sequence[int], request: int) -> tuple[list[int], NDArray[np.uint64]]:
        """Insert what is lacking (the last blocks if not all fit): its positions, and the blocks that leave for it."""
        lacking = [i for i, block in enumerate(blocks) if block not in self._slots]
        stores = lacking[max(0, len(lacking) - self.num_blocks) :]
        leaving = self.make_room(len(stores)).hashes
        self.insert(blocks[i] for i in stores)
        self.touch([blocks[i] for i in stores], request)
        return stores, leaving

    def residents(self) -> tuple[NDArray[np.uint64], Slots]:
        """Every block of the tier, and its slot."""
        blocks = np.fromiter(self._slots.keys(), np.uint64, len(self._slots))
        return blocks, np.fromiter(self._slots.values(), np.int64, len(self._slots))


@dataclass(frozen=True)
class Admission:
    """The hits of a request, and the moves that it needs. Positions index `hashes`."""

    request: int
    hashes: NDArray[np.uint64]  # its blocks, cut to the GPU tier
    cut: int  # blocks beyond the GPU tier, left out
    gpu_hits: int
    host_hits: int
    slots: Slots  # GPU slot of every block
    loads: Slots  # positions of the host hits
    load_from: Slots  # their host slots
    stores: Slots  # positions of the computed blocks that are written through
    store_to: Slots  # their host slots
    gpu_given_up: GivenUp  # its last user must have ended before
    host_given_up: GivenUp
    file_hits: int = 0
    file_loads: Slots = field(default_factory=lambda: np.zeros(0, np.int64))  # positions of the file hits
    file_stores: Slots = field(default_factory=lambda: np.zeros(0, np.int64))  # positions in host_given_up
    file_given_up: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))

    @property
    def leading(self) -> int:
        """How many blocks are hits; those from there on are computed."""
        return self.gpu_hits + self.host_hits + self.file_hits

    @property
    def misses(self) -> int:
        return len(self.hashes) - self.leading


class Tiers:
    """The tiers together. file: the third tier, or how many blocks it has. misfits: positions of blocks that are
    stored to the host tier in vain, since its codec cannot hold them."""

    def __init__(
        self,
        gpu_blocks: int,
        host_blocks: int,
        file: int | Tier = 0,
        misfits: Callable[[NDArray[np.uint64]], NDArray[np.int64]] = lambda hashes: np.zeros(0, np.int64),
    ) -> None:
        self.gpu = Tier(gpu_blocks)
        self.host = Tier(host_blocks)
        self.file = file if isinstance(file, Tier) else Tier(file)
        self._misfits = misfits
        self._requests = 0

    def admit(self, hashes: NDArray[np.uint64]) -> Admission:
        """Look up a request's blocks (none twice) and make room for them."""
        request, self._requests = self._requests, self._requests + 1
        blocks: list[int] = hashes[: self.gpu.num_blocks].tolist()
        in_gpu = [block in self.gpu for block in blocks]
        in_host = [block in self.host for block in blocks]
        in_file = self.file.find(blocks, [gpu or host for gpu, host in zip(in_gpu, in_host, strict=True)])
        here = [any(tiers) for tiers in zip(in_gpu, in_host, in_file, strict=True)]
        leading = here.index(False) if False in here else len(blocks)
        loads = [i for i in range(leading) if in_host[i] and not in_gpu[i]]
        file_loads = [i for i in range(leading) if not in_gpu[i] and not in_host[i]]
        self.gpu.touch(blocks, request)
        self.host.touch(blocks, request)
        self.file.touch(blocks, request)

        load_from = self.host.slots_of(blocks[i] for i in loads)
        arriving = [block for block, here in zip(blocks, in_gpu, strict=True) if not here]
        gpu_given_up = self.gpu.make_room(len(arriving))
        self.gpu.insert(arriving)
        self.gpu.touch(blocks, request)

        room = self.host.num_blocks - sum(in_host)
        stores = [i for i in range(leading, len(blocks)) if not in_host[i]][:room]
        host_given_up = self.host.make_room(len(stores))
        self.host.insert(blocks[i] for i in stores)
        self.host.touch(blocks, request)
        store_to = self.host.slots_of(blocks[i] for i in stores)
        offered = np.array([blocks[i] for i in stores], np.uint64)
        self.host.forget(offered[self._misfits(offered)].tolist())
        file_stores, file_given_up = self.file.take(host_given_up.hashes.tolist(), request)
        return Admission(
            request=request,
            hashes=hashes[: len(blocks)],
            cut=len(hashes) - len(blocks),
            gpu_hits=leading - len(loads) - len(file_loads),
            host_hits=len(loads),
            slots=self.gpu.slots_of(blocks),
            loads=np.array(loads, np.int64),
            load_from=load_from,
            stores=np.array(stores, np.int64),
            store_to=store_to,
            gpu_given_up=gpu_given_up,
            host_given_up=host_given_up,
            file_hits=len(file_loads),
            file_loads=np.array(file_loads, np.int64),
            file_stores=np.array(file_stores, np.int64),
            file_given_up=file_given_up,
        )
