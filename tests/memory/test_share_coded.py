"""Links shared by processes, over coded pools: every byte of loads and stores, and blocks that do not fit."""

# ruff: noqa: F811  # fixtures of test_share are arguments
# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, until
from test_share import (
    BLOCK,
    BLOCKS,
    FOUR,
    LAYERS,
    PAGE,
    Here,
    Other,
    Rank,
    Rogue,
    all_ask,
    answer,
    asked_for,
    three_ranks,
)  # fmt: skip
from test_share import name as name

import kvswap
from kvswap import share, testing
from kvswap.codecs import Coding
from kvswap.memory import SharedPool

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")


@pytest.fixture(params=["exact", "mxfp8"])
def here(name: str, request: pytest.FixtureRequest) -> Iterator[Here]:
    one = Here(name, codec=request.param, piece_nbytes=8 * Coding(PAGE, request.param).coded_nbytes * LAYERS)
    yield one
    one.close()


def other_of(here: Here, rank: int = 1) -> Other:
    one = Other(here.name, rank, codec=here.coding.codec, piece_nbytes=here.options["piece_nbytes"])
    here.member.wait_peers([rank], PATIENCE)
    return one


@pytest.fixture
def other(here: Here) -> Iterator[Other]:
    one = other_of(here)
    yield one
    one.stop()
    one.end()


@pytest.fixture
def exact(name: str) -> Iterator[Here]:
    """Blocks of `exact`, in pieces of 8."""
    one = Here(name, codec="exact", piece_nbytes=8 * Coding(PAGE, "exact").coded_nbytes * LAYERS)
    yield one
    one.close()


def spoil(here: Here, block: int, layer: int = 1) -> None:
    """Random bits, which `exact` does not hold."""
    here.buffers[layer].put(np.random.default_rng(block).integers(0, 256, PAGE, dtype=np.uint8), block * PAGE)


# -- right bytes -------------------------------------------------------------------------------------------------------


def test_others_bring_coded_blocks(here: Here, other: Other) -> None:
    brought = [0, 0]
    for count in (BLOCKS, 1, 9, 100, BLOCKS):
        brought[0] += here.check_load(count).by_others
        brought[1] += here.check_store(count).by_others
    assert all(brought)
    coded = [nbytes // BLOCK * LAYERS * here.coding.coded_nbytes for nbytes in brought]
    mine, theirs = here.member.stats(), other.ask("member.stats()")
    assert [mine["brought_by_others_h2d"], mine["brought_by_others_d2h"]] == coded  # what crossed the links
    assert [theirs["brought_for_others_h2d"], theirs["brought_for_others_d2h"]] == coded
    assert mine["pieces_late"] == mine["links_lost"] == 0
    assert here.member.load([1, 2], [3, 4]).nbytes == 2 * BLOCK


def test_exact_gives_back_what_it_got(exact: Here) -> None:
    """As without a codec: stored, and loaded to other blocks."""
    other = other_of(exact)
    for seed in range(3):
        gpu, host, back = (np.random.default_rng([seed, i]).permutation(BLOCKS)[: BLOCKS // 2] for i in range(3))
        wanted = [exact.gpu(layer)[gpu] for layer in range(LAYERS)]
        exact.member.store(gpu, host).wait(PATIENCE)
        exact.member.load(host, back).wait(PATIENCE)
        assert all(np.array_equal(exact.gpu(layer)[back], wanted[layer]) for layer in range(LAYERS))
    until(lambda: exact.check_load(BLOCKS).by_others and exact.check_store(BLOCKS).by_others)
    assert other.end() == 0


# -- blocks that do not fit --------------------------------------------------------------------------------------------


def test_one_that_does_not_fit_in_a_piece_that_another_brings(exact: Here) -> None:
    """It is not stored, and says so on the host. The other blocks of its piece are, over the other's link."""
    rogue = Rogue(exact)
    host, gpu = exact.ids(FOUR)
    bad = [FOUR - 20, FOUR - 5]  # in two pieces of the other
    for position in bad:
        spoil(exact, gpu[position])
    wanted = [exact.memory.layer(layer).copy() for layer in range(LAYERS)]
    for layer in range(LAYERS):
        wanted[layer][host] = exact.on_host(exact.gpu(layer)[gpu])
    store = exact.member.store(gpu, host)
    for take in asked_for(rogue):
        answer(rogue, take, True)
    with pytest.raises(kvswap.Error, match=r"failed_positions do not fit the coded size of pool '.*', and are"):
        store.wait(PATIENCE)
    assert store.failed_positions.tolist() == bad
    assert store.by_others == 4 * 8 * BLOCK
    assert all(np.array_equal(exact.memory.layer(layer), wanted[layer]) for layer in range(LAYERS))
    load = exact.member.load(np.roll(host, 8), np.roll(gpu, 8))  # by other slots
    for take in asked_for(rogue):
        answer(rogue, take, True)
    with pytest.raises(kvswap.Error, match="hold blocks that were not stored"):
        load.wait(PATIENCE)
    assert load.failed_positions.tolist() == [3, FOUR - 12]
    assert load.by_others == 3 * 8 * BLOCK  # the own link brings the piece with such a block, and has the last word
    rogue.close()
    exact.fill()
    exact.check_store(BLOCKS), exact.check_load(BLOCKS)  # no pool remembers it


def test_what_another_brings_is_not_believed(here: Here) -> None:
    """Bytes that no coder has written: the blocks come over the own link."""
    rogue = Rogue(here)

    def bring_junk() -> None:
        for slot, generation, direction, ids in asked_for(rogue):
            rogue.bring(slot, direction, ids, junk=True)
            rogue.say(3, slot, generation)

    assert here.check_load(FOUR, bring_junk).by_others == 0
    rogue.close()


# -- shared loads and stores -------------------------------------------------------------------------------------------

BAD = [5, 60, 61, 200, 399]


@pytest.fixture
def ranks(name: str) -> Iterator[list[Rank]]:
    coding = Coding(PAGE, "exact")
    memory = SharedPool(name, BLOCKS, LAYERS * coding.coded_nbytes, layers=LAYERS, device=kvswap.Device("host:0"))
    with three_ranks(name, codec="exact", bad=BAD, stall=10.0, share_wait=0.3, store_wait=20.0) as members:
        yield members
    memory.close(PATIENCE, force=True)


def test_shared_loads_and_stores(ranks: list[Rank]) -> None:
    for seed in range(2):
        found = all_ask(ranks, f"store({seed}, shared='s', generation={seed})")
        rng = np.random.default_rng(seed)
        stored = rng.permutation(BLOCKS)[: BLOCKS * 3 // 4]
        bad = np.flatnonzero(np.isin(stored, BAD)).tolist()
        assert bad and [failed for _, failed, _ in found] == [bad] * 3
        assert all(right and "do not fit the coded size" in why for right, _, why in found)
    all_ask(ranks, "[globals().update(given={**given, 'bad': []}), 1][1]")
    found = all_ask(ranks, "[t.failed_positions.size for a in [np.arange(given['blocks'])] for _ in [fill(9)] "
                           "for t in [member.store(a, a, shared='all')] if t.wait(30) is None]")  # fmt: skip
    assert found == [[0]] * 3
    seeds = iter(range(1 << 20))

    def each_has_parts_of_others() -> bool:
        seed = next(seeds)
        found = all_ask(ranks, f"load({seed}, shared='l', generation={seed})")
        assert all(right for right, _, _ in found)
        return all(by_others > 0 for _, by_others, _ in found)

    until(each_has_parts_of_others)
    stats = [member.ask("member.stats()") for member in ranks]
    assert sum(one["passed_on"] for one in stats) == sum(one["brought_by_others_h2d"] for one in stats)


def test_ranks_agree_on_many_blocks_that_do_not_fit(name: str) -> None:
    """A report names some. With more, all of a part counts as failed, on its own rank too."""
    slot = LAYERS * Coding(PAGE, "exact").coded_nbytes
    with SharedPool(name, BLOCKS, slot, layers=LAYERS, device=kvswap.Device("host:0")):
        bad = range(0, BLOCKS, 2)
        members = [Rank(name, rank, codec="exact", bad=bad, stall=10.0, store_wait=20.0) for rank in range(2)]
        for member in members:
            member.ask("member.wait_peers([0, 1], 60)")
        first, second = (set(failed) for _, failed, _ in all_ask(members, "store(1, shared='s', ranks=[0, 1])"))
        stored = np.random.default_rng(1).permutation(BLOCKS)[: BLOCKS * 3 // 4]
        unfit = set(np.flatnonzero(np.isin(stored, bad)).tolist())
        assert first == second > unfit
        for member in members:
            member.stop()
            member.end()


def test_ranks_that_code_in_two_ways_store_nothing_for_each_other(name: str) -> None:
    """Their blocks have the same size, but neither could read what the other has stored."""
    here = Here(name, codec="mxfp8", store_wait=20.0)
    other = Rank(name, 1, codec="mxfp8:fp16", piece_nbytes=here.options["piece_nbytes"], stall=10.0, store_wait=20.0)
    here.member.wait_peers([1], PATIENCE)
    other.say("store(3, shared='two', ranks=[0, 1])")
    rng = np.random.default_rng(3)
    gpu, host = (rng.permutation(BLOCKS)[: BLOCKS * 3 // 4] for _ in range(2))
    store = here.member.store(gpu, host, shared="two", ranks=[0, 1])
    with pytest.raises(kvswap.Error, match="rank 1 did not store its part"):
        store.wait(PATIENCE)
    theirs = other.hear()[1]
    assert theirs and sorted([*theirs, *store.failed_positions]) == list(range(host.size))
    other.stop()
    other.end()
    here.close()


# -- kills and refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_time(exact: Here, seed: int) -> None:
    chance = random.Random(seed)
    other = other_of(exact)
    killer = threading.Timer(chance.random() * 0.05, other.stop)
    begin = time.monotonic()
    killer.start()
    while exact.member.peers or time.monotonic() < begin + 0.1:
        exact.check_load(chance.randrange(BLOCKS)), exact.check_store(chance.randrange(BLOCKS))
        assert time.monotonic() < begin + PATIENCE
    other.end()


@pytest.mark.parametrize(("operation", "every"), [("launch", 3), ("copy_batch", 2), ("event_record", 7)])
def test_what_the_own_driver_refuses(exact: Here, operation: str, every: int) -> None:
    """A block is right, or it is named."""
    other = other_of(exact)
    for _ in range(3):
        host, gpu = exact.ids(BLOCKS)
        with testing.fault(exact.device, "call", "fail", operation=operation, every=every):
            load = exact.member.load(host, gpu)
            until(load.done)
        right = np.setdiff1d(np.arange(BLOCKS), load.failed_positions)
        assert (load.error is None) == (right.size == BLOCKS)
        for layer in range(LAYERS):
            assert np.array_equal(exact.gpu(layer)[gpu[right]], exact.on_gpu(exact.memory.layer(layer)[host[right]]))
        with testing.fault(exact.device, "call", "fail", operation=operation, every=every):
            store = exact.member.store(gpu, host)
            until(store.done)
        right = np.setdiff1d(np.arange(BLOCKS), store.failed_positions)
        for layer in range(LAYERS):
            assert np.array_equal(exact.memory.layer(layer)[host[right]], exact.on_host(exact.gpu(layer)[gpu[right]]))
    exact.check_load(BLOCKS), exact.check_store(BLOCKS)
    assert other.end() == 0


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_pools_that_do_not_fit(name: str) -> None:
    device, coding = kvswap.Device("host:0"), Coding(PAGE, "exact")
    with SharedPool(name, 8, 2 * coding.coded_nbytes, layers=2, device=device) as memory:
        kept = [device.alloc(8 * PAGE) for _ in range(2)]
        gpu = [kvswap.Pool(device, each.ptr, 8, PAGE) for each in kept]
        coded = kvswap.Pool(device, int(memory.layer_ptrs()[0]), 8, coding.coded_nbytes, stride=memory.slot_nbytes,
                            coding=coding)  # fmt: skip
        raw = kvswap.Pool(device, int(memory.layer_ptrs()[1]), 8, coding.coded_nbytes, stride=memory.slot_nbytes)

        def refused(match: str, gpus: Any, **how: Any) -> None:
            with pytest.raises((ValueError, kvswap.Error), match=match):
                share.join(name, 0, memory, gpus, **how)

        refused(r"host\[1\] is not coded, and host\[0\] is", gpu, host=[coded, raw])
        refused(rf"gpu\[0\] has blocks of 8 bytes; those of host\[0\] have {PAGE} before coding",
                kvswap.Pool(device, device.alloc(64), 8, 8), host=[coded])  # fmt: skip
        refused("gpu has 2 pools, and coding 1 items", gpu, coding=[coding])
        refused("coding is given, and host", gpu[:1], host=[coded], coding=coding)
        del coded, raw
