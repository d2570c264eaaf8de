"""The slots of a node and the blocks in them. Names and numbers only: no memory, no clock, no socket.

A slot is in one state at a time:

    free --claim--> claimed --commit--> published --retire--> free
                       |                    |
                       | abort, expired     | retired while a reader may still read it
                       v                    v
                     resting ---------------+---(its time has come)--> free

claim:   a client gets the slot, with a generation that no other claim of this node ever has.
commit:  its bytes were checked; the block has a name now, and a block that had this name is retired.
retire:  replaced, deleted, evicted (the least recently used block that is neither leased nor being stored in files),
         or found damaged.
lease:   a reader was told the place; the block is not evicted until the lease is over or all readers are done. A slow
         reader finds another header, or another checksum, and counts a miss.
resting: a client may still write to it (a claim that ended badly) or read it. It holds no block.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from ._messages import FULL, KEPT, NONE

_LOOK_AT = 64  # blocks that eviction looks at before it says that none can go
CLAIM_SECONDS = 15.0  # until the client must have written
REST_SECONDS = 30.0  # after a claim that ended badly: its writes may be late


@dataclass(slots=True)
class Claim:
    slot: int
    name: bytes
    client: bytes
    until: float
    replace: bool


@dataclass(slots=True)
class Block:
    slot: int
    generation: int
    leased: float = 0.0  # until then; 0: it is not being read
    readers: int = 0
    busy: int = 0  # transfers to files that read it


class SlotTable:
    """first: the first generation. Later runs of a node must begin above those of earlier ones."""

    def __init__(self, slots: int, *, first: int, lease: float = 2.0) -> None:
        self.slots, self.lease = slots, lease
        self.blocks: OrderedDict[bytes, Block] = OrderedDict()  # least recently used first
        self.claims: dict[int, Claim] = {}
        self.evicted = self.expired = 0
        self._free = deque(range(slots))
        self._resting: deque[tuple[float, int]] = deque()
        self._retired: list[tuple[int, Block]] = []  # out of use but still read by transfers to files
        self._held: dict[bytes, int] = {}  # claims by client
        self._next = first

    # -- readers ------------------------------------------------------------------------------------------------------

    def locate(self, name: bytes, now: float) -> tuple[int, int]:
        """(slot, generation), or (NONE, 0)."""
        block = self.blocks.get(name)
        if block is None:
            return NONE, 0
        self.blocks.move_to_end(name)
        block.leased = now + self.lease
        block.readers += 1
        return block.slot, block.generation

    def release(self, name: bytes, generation: int) -> None:
        """A reader is done. One that never says so has its lease until the end of it."""
        block = self.blocks.get(name)
        if block is not None and block.generation == generation and block.readers:
            block.readers -= 1
            block.leased = block.leased if block.readers else 0.0

    # -- writers ------------------------------------------------------------------------------------------------------

    def claim(self, name: bytes, client: bytes, replace: bool, now: float) -> tuple[int, int]:
        """(slot, generation), or (KEPT, 0), or (FULL, 0): nothing can be evicted now, or the client holds its share."""
        if not replace and name in self.blocks:
            self.blocks.move_to_end(name)
            return KEPT, 0
        if self._held.get(client, 0) >= max(1, self.slots // 2):
            return FULL, 0
        slot = self._take(now)
        if slot is None:
            return FULL, 0
        self._next += 1
        self.claims[self._next] = Claim(slot, name, client, now + CLAIM_SECONDS, replace)
        self._held[client] = self._held.get(client, 0) + 1
        return slot, self._next

    def of_client(self, generation: int, client: bytes) -> Claim | None:
        claim = self.claims.get(generation)
        return claim if claim is not None and claim.client == client else None

    def publish(self, generation: int, now: float) -> Block:
        """The slot's bytes are right."""
        claim = self._end(generation)
        self.drop(claim.name, now)
        block = self.blocks[claim.name] = Block(claim.slot, generation)
        return block

    def give_up(self, generation: int, now: float, *, idle: bool) -> None:
        """idle: nothing can write to the slot any more."""
        claim = self._end(generation)
        if idle:
            self._free.append(claim.slot)
        else:
            self._rest(claim.slot, now + REST_SECONDS)

    def _end(self, generation: int) -> Claim:
        claim = self.claims.pop(generation)
        self._held[claim.client] -= 1
        if not self._held[claim.client]:
            del self._held[claim.client]
        return claim

    # -- the end of blocks --------------------------------------------------------------------------------------------

    def drop(self, name: bytes, now: float) -> bool:
        """Retire a block. False: there is none."""
        block = self.blocks.pop(name, None)
        if block is None:
            return False
        if block.busy:
            self._retired.append((block.slot, block))
        elif block.leased > now:
            self._rest(block.slot, block.leased)
        else:
            self._free.append(block.slot)
        return True

    def tick(self, now: float) -> None:
        """Move on what time has ended."""
        late = [generation for generation, claim in self.claims.items() if claim.until <= now]
        for generation in late:
            self.give_up(generation, now, idle=False)
        self.expired += len(late)
        for _ in range(len(self._resting)):
            until, slot = self._resting.popleft()
            if until <= now:
                self._free.append(slot)
            else:
                self._resting.append((until, slot))
        for slot, block in [each for each in self._retired if not each[1].busy]:
            self._retired.remove((slot, block))
            self._free.append(slot)

    def _rest(self, slot: int, until: float) -> None:
        self._resting.append((until, slot))

    def _take(self, now: float) -> int | None:
        if not self._free:
            self._evict(now)
        return self._free.popleft() if self._free else None

    def _evict(self, now: float) -> None:
        for looked, (name, block) in enumerate(self.blocks.items()):
            if looked == _LOOK_AT:
                return
            if not block.busy and block.leased <= now:
                self.evicted += 1
                self.drop(name, now)
                return

    def counts(self) -> dict[str, int]:
        return {
            "slots": self.slots,
            "blocks": len(self.blocks),
            "claimed": len(self.claims),
            "resting": len(self._resting) + len(self._retired),
            "free": len(self._free),
            "evicted": self.evicted,
            "expired": self.expired,
        }
