"""The tier that nodes share: a pool on each, with files behind it, and the remote tier's placement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvswap.remote._names import Namer
from kvswap.remote._placement import Placement
from kvswap.replay.file_tier import keys_of
from kvswap.replay.tiers import Tier

from .settings import Settings

_NONE = np.zeros(0, np.uint64)


class Store:
    """One node's part: blocks in memory, and behind them in files, the least recently used out first."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.up = True
        self.down_since = -np.inf
        self.files = Tier(settings.file_blocks)
        self.pool = Tier(settings.pool_blocks)

    def has(self, block: int) -> bool:
        return block in self.pool or (self.files.num_blocks > 0 and block in self.files)

    def put(self, blocks: Sequence[int], request: int) -> int:
        """Store blocks; how many are written to files, which get each block, too."""
        self.pool.take(blocks, request)
        return len(self.files.take(blocks, request)[0]) if self.files.num_blocks else 0

    def use(self, blocks: Sequence[int], request: int) -> int:
        """Blocks that are here are loaded; how many of them come from files, and so back to memory."""
        from_files = [block for block in blocks if block not in self.pool]
        self.pool.touch(blocks, request)
        if from_files:
            self.pool.take(from_files, request)
        if self.files.num_blocks:
            self.files.touch(blocks, request)
        return len(from_files)

    def die(self, now: float) -> None:
        """What was in memory is lost."""
        self.up, self.down_since = False, now
        self.pool = Tier(self._settings.pool_blocks)


class Pools:
    """All parts with one list of nodes: which of them holds a block."""

    def __init__(self, settings: Settings, nodes: Sequence[int], stores: dict[int, Store]) -> None:
        self._placement = Placement([f"node{node}" for node in nodes])
        self._nodes, self.stores = list(nodes), stores
        self._replicas = settings.replicas
        self._namer = Namer(settings.geometry.block_nbytes, "kvswap simulate")

    def owners(self, blocks: Sequence[int]) -> list[list[int]]:
        """Of each block, the nodes that hold it, the first choice first: by the remote tier's own code."""
        names = self._namer.names(keys_of(np.asarray(blocks, np.uint64)))
        nodes = self._nodes
        return [[nodes[at] for at in row] for row in self._placement.order(names, self._replicas).tolist()]


class Shared(Tier):
    """The third tier of one serving node: its view of the pools, and what the request at hand did to them."""

    def __init__(self, pools: Pools, stores: str) -> None:
        super().__init__(0)
        self._pools, self._through = pools, stores == "computed"
        self._owners: dict[int, list[int]] = {}  # of the blocks that were asked for
        self._requests = 0
        self._clear()

    def _clear(self) -> None:
        self.asked: Counter[int] = Counter()  # keys by node
        self.sources: Counter[int] = Counter()  # loaded blocks by node
        self.from_files: Counter[int] = Counter()  # of them, those that were in files
        self.sent: Counter[int] = Counter()  # stored blocks by node
        self.to_files: Counter[int] = Counter()
        self.loaded: list[int] = []

    def find(self, blocks: Sequence[int], elsewhere: Sequence[bool]) -> list[bool]:
        """Asks the first node of each block that this node's own tiers lack, and the next replica for what is missing.
        The leading ones are loaded."""
        self._clear()
        self._requests += 1
        wanted = [block for block, known in zip(blocks, elsewhere, strict=True) if not known]
        self._owners = dict(zip(wanted, self._pools.owners(wanted), strict=True)) if wanted else {}
        found = {block: node for block in wanted if (node := self._ask(block)) is not None}
        here = [known or block in found for block, known in zip(blocks, elsewhere, strict=True)]
        leading = here.index(False) if False in here else len(blocks)
        self.loaded = [block for block in blocks[:leading] if block in found]
        for node, some in _by_node(self.loaded, (found[block] for block in self.loaded)).items():
            self.sources[node] = len(some)
            self.from_files[node] = self._pools.stores[node].use(some, self._requests)
        return [block in found for block in blocks]

    def _ask(self, block: int) -> int | None:
        for node in self._owners[block]:
            self.asked[node] += 1
            store = self._pools.stores[node]
            if store.up and store.has(block):
                return node
        return None

    def touch(self, blocks: Sequence[int], request: int) -> None:
        """Nothing: a node notices only what is loaded from it."""

    def take(self, blocks: Sequence[int], request: int) -> tuple[list[int], NDArray[np.uint64]]:
        """Blocks that leave the host tier."""
        if not self._through:
            self.keep(blocks)
        return [], _NONE

    def keep(self, blocks: Sequence[int]) -> None:
        """Store blocks on those of their nodes that are up and lack them."""
        unknown = [block for block in blocks if block not in self._owners]
        owners = dict(zip(unknown, self._pools.owners(unknown), strict=True)) if unknown else {}
        pairs = [(block, node) for block in blocks for node in self._owners.get(block) or owners[block]]
        lacking = [(block, node) for block, node in pairs if self._lacks(node, block)]
        for node, some in _by_node((block for block, _ in lacking), (node for _, node in lacking)).items():
            self.sent[node] = len(some)
            self.to_files[node] = self._pools.stores[node].put(some, self._requests)

    def _lacks(self, node: int, block: int) -> bool:
        store = self._pools.stores[node]
        return store.up and not store.has(block)


def _by_node(blocks: Iterable[int], nodes: Iterable[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for block, node in zip(blocks, nodes, strict=True):
        found.setdefault(node, []).append(block)
    return found
