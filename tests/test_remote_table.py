"""The slots of a node: random operations, after each of which every slot is in exactly one state."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("msgspec")
from kvswap.remote._messages import FULL, KEPT, NONE
from kvswap.remote._slots import CLAIM_SECONDS, REST_SECONDS, SlotTable


def slots_of(table: Any) -> list[int]:
    """Of all states."""
    found = [claim.slot for claim in table.claims.values()] + [block.slot for block in table.blocks.values()]
    found += list(table._free) + [slot for _, slot in table._resting] + [slot for slot, _ in table._retired]
    return sorted(found)


def stored(table: Any, name: bytes, now: float = 0.0) -> int:
    slot, generation = table.claim(name, b"c", True, now)
    assert slot >= 0
    table.publish(generation, now)
    return generation


@pytest.mark.parametrize("seed", range(8))
def test_each_slot_is_in_one_state(seed: int) -> None:
    rng, now = random.Random(seed), 0.0
    table = SlotTable(12, first=1000, lease=2.0)
    names = [b"%d" % i for i in range(20)]
    generations: set[int] = set()
    busy: list[Any] = []
    for _ in range(3000):
        now += rng.random() * rng.choice([0.01, 0.5, 5])
        name, client = rng.choice(names), rng.choice([b"a", b"b"])
        what = rng.randrange(9)
        if what <= 2:
            slot, generation = table.claim(name, client, rng.random() < 0.7, now)
            if slot >= 0:
                assert generation not in generations
                generations.add(generation)
                assert sum(claim.client == client for claim in table.claims.values()) <= 6
            else:
                assert slot == FULL or (slot == KEPT and name in table.blocks)
        elif what == 3 and table.claims:
            generation = rng.choice(list(table.claims))
            claim = table.claims[generation]
            table.publish(generation, now)
            assert table.blocks[claim.name].slot == claim.slot
        elif what == 4 and table.claims:
            table.give_up(rng.choice(list(table.claims)), now, idle=rng.random() < 0.5)
        elif what == 5:
            slot, generation = table.locate(name, now)
            assert (slot == NONE) == (name not in table.blocks)
            if rng.random() < 0.5:
                table.release(name, generation)
        elif what == 6:
            table.drop(name, now)
        elif what == 7 and table.blocks:
            busy.append(rng.choice(list(table.blocks.values())))
            busy[-1].busy += 1
        elif what == 8 and busy:
            busy.pop(rng.randrange(len(busy))).busy -= 1
        table.tick(now)
        assert slots_of(table) == list(range(12))
        counts = table.counts()
        assert sum(counts[state] for state in ("blocks", "claimed", "resting", "free")) == 12
    for block in busy:
        block.busy = 0
    table.tick(now + CLAIM_SECONDS)
    table.tick(now + CLAIM_SECONDS + REST_SECONDS)
    for name in names:
        table.drop(name, now + 1000)
    table.tick(now + 2000)
    assert table.counts()["free"] == 12 and not table._held


def test_a_leased_or_busy_block_is_not_evicted() -> None:
    table = SlotTable(2, first=0, lease=2.0)
    stored(table, b"a")
    generation = stored(table, b"b")
    assert table.locate(b"a", 10.0)[0] >= 0 and table.locate(b"b", 10.0)[1] == generation
    assert table.claim(b"c", b"c", True, 10.5) == (FULL, 0)
    table.release(b"b", generation)
    assert table.claim(b"c", b"c", True, 10.6)[0] >= 0 and list(table.blocks) == [b"a"]
    table.blocks[b"a"].busy = 1
    assert table.claim(b"d", b"d", True, 99.0) == (FULL, 0)
    table.blocks[b"a"].busy = 0
    assert table.claim(b"d", b"d", True, 99.0)[0] >= 0 and table.evicted == 2


def test_a_lease_lasts_until_the_last_reader_is_done() -> None:
    table = SlotTable(2, first=0, lease=1000.0)
    generation = stored(table, b"a")
    stored(table, b"b")
    for _ in range(2):
        table.locate(b"a", 1.0)
    table.release(b"a", generation + 7)  # of an earlier block
    table.release(b"a", generation)
    table.locate(b"b", 1.0)
    assert table.claim(b"c", b"c", True, 2.0) == (FULL, 0)
    table.release(b"a", generation)
    assert table.claim(b"c", b"c", True, 2.0)[0] >= 0


def test_a_claim_that_ends_badly_rests() -> None:
    table = SlotTable(2, first=0)
    slot, generation = table.claim(b"a", b"c", True, 0.0)
    table.tick(CLAIM_SECONDS)
    assert table.of_client(generation, b"c") is None and table.counts()["resting"] == 1 and table.expired == 1
    table.tick(CLAIM_SECONDS + REST_SECONDS - 0.1)
    assert slot not in table._free
    table.tick(CLAIM_SECONDS + REST_SECONDS + 0.1)
    assert slot in table._free


def test_a_client_has_its_own_claims_alone() -> None:
    table = SlotTable(8, first=0)
    _, generation = table.claim(b"a", b"one", True, 0.0)
    assert table.of_client(generation, b"two") is None and table.of_client(generation, b"one") is not None
