"""Links shared by processes: closing memory, full lanes, lost links and reports, and pools that are part of a block."""

# ruff: noqa: F811  # fixtures of test_share are arguments
# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from conftest import AT_ONCE, PATIENCE, ROOT, elsewhere, until
from test_share import BLOCK, BLOCKS, BYE, DROP, FAULT, FOUR, LAYERS, TAKE, Here, Other, Rank, Rogue, answer, asked_for
from test_share import here as here
from test_share import name as name
from test_share import other as other
from test_share import rogue as rogue

import kvswap
from kvswap import share, testing
from kvswap.memory import SharedPool
from kvswap.share import _meet

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")


def ended(one: Other) -> None:
    one.stop()
    one.end()


# -- pools that are part of the blocks ---------------------------------------------------------------------------------


def test_a_store_leaves_the_rest_of_a_block_as_it_is(here: Here) -> None:
    """The last layer is in no pool of this member. A piece that another member writes has whole blocks."""
    here.member.close(PATIENCE)
    here.member = share.join(here.name, 0, here.memory, here.pools[:2], host=here.hosts[:2], **here.options)
    rogue = Rogue(here)
    last = here.memory.layer(2).copy()
    host, gpu = here.ids(FOUR)
    transfer = here.member.store(gpu, host)
    while not transfer.done():
        if not rogue.quiet():
            kind, *take, ids = rogue.hear()
            if kind == TAKE:
                answer(rogue, (*take, ids), True)
    assert np.array_equal(here.memory.layer(2), last)
    assert all(np.array_equal(here.memory.layer(layer)[host], here.gpu(layer)[gpu]) for layer in range(2))
    rogue.close()


def test_ranks_with_other_parts_of_the_blocks_share_no_load(name: str) -> None:
    """A rank without the last layer would pass on what its bounce slots hold in its place."""
    here = Here(name, share_wait=5.0)
    here.member.close(PATIENCE)
    here.member = share.join(name, 0, here.memory, here.pools[:2], host=here.hosts[:2], **here.options)
    whole = Rank(name, 1, stall=10.0, share_wait=5.0)
    here.member.wait_peers([1], PATIENCE)
    whole.say("load(3, shared='part', ranks=[0, 1])")
    host = np.random.default_rng(3).permutation(BLOCKS)[: BLOCKS * 3 // 4]
    here.member.load(host, host, shared="part", ranks=[0, 1]).wait(PATIENCE)
    assert whole.hear()[:2] == [True, 0]
    whole.end()
    here.close()


# -- memory that is closed, lanes that are full ------------------------------------------------------------------------

THREAD = "[globals().update(t=__import__('threading').Thread({})), t.start(), t.join(0.5), t.is_alive()][-1]"


def test_the_pool_is_not_closed_before_a_piece_is_queued(here: Here, other: Other) -> None:
    """The copy comes after the look at the pool: in between it would be unmapped."""
    other.ask(FAULT.format("'delay', delay=60", repr("copy_batch"), 1))
    other.ask("f.__enter__()")

    def is_closed_during_a_load() -> bool:
        called: list[bool] = []

        def during() -> None:
            end = time.monotonic() + 1
            while not called and time.monotonic() < end:
                if other.ask(THREAD.format("target=member.stats")):  # the member's thread is in that call
                    called.append(other.ask(THREAD.format("target=memory.close, args=(60,), kwargs={'force': True}")))
                    other.ask("f.__exit__(None, None, None)")

        load = here.check_load(BLOCKS, during)
        assert not called or (called[0] and load.by_others > 0)
        return bool(called)

    until(is_closed_during_a_load)  # on a busy machine the other may come too late to bring anything
    assert other.ask("t.join(60)") is None


def test_a_copy_that_found_no_lane_is_tried_again(here: Here, rogue: Rogue) -> None:
    """Nothing else of the job is under way then."""
    memory = here.device.alloc(64)

    def during() -> None:
        takes = asked_for(rogue)
        for _ in takes:
            assert rogue.hear()[0] == DROP  # the own link has ended its part
        gate = kvswap.Stream(here.device)
        testing.delay(here.device, 2.0, gate)
        opened, held = kvswap.Event(here.device), []
        opened.record(gate)
        with pytest.raises(kvswap.QueueFull):
            while True:
                stream = kvswap.Stream(here.device)
                opened.wait(stream)
                ends = [memory.ptr], [memory.ptr + 32]
                held.append(kvswap.swap_blocks_batch(*ends, 16, stream=stream, device=here.device))
        for take in takes:
            answer(rogue, take, True)
        for transfer in held:
            transfer.wait(PATIENCE)

    assert here.check_load(FOUR, during).by_others == 4 * 8 * BLOCK


def test_a_member_that_comes_holds_up_no_load(here: Here) -> None:
    """Memory for it is made without the lock that loads take."""
    with testing.fault(here.device, "call", "delay", operation="chunk_map", delay=PATIENCE):
        other = Other(here.name, 1)
        until(lambda: (_meet.prepare_folder() / f"share-{here.name}.1.sock").exists())
        thread = threading.Thread(target=here.check_load, args=(BLOCKS,))
        time.sleep(0.5)  # it is being met now, or the load is first, which proves nothing
        thread.start()
        thread.join(AT_ONCE)
        assert not thread.is_alive()
    here.member.wait_peers([1], PATIENCE)
    ended(other)


# -- links that end while both processes go on -------------------------------------------------------------------------


def test_a_store_ends_when_what_a_lost_link_had_begun_has_ended(here: Here, rogue: Rogue) -> None:
    def during() -> None:
        takes = asked_for(rogue)
        rogue.say(9)
        until(lambda: here.member.peers == ())
        for take in takes:
            answer(rogue, take, True)

    assert here.check_store(FOUR, during).by_others == 0


def test_a_store_ends_with_the_bye_of_a_lost_link(here: Here, rogue: Rogue) -> None:
    def during() -> None:
        asked_for(rogue)
        rogue.say(9)
        while rogue.hear()[0] != BYE:
            pass
        rogue.say(BYE)

    assert here.check_store(FOUR, during).by_others == 0


def test_both_meet_again_after_a_lost_link(here: Here, rogue: Rogue) -> None:
    rogue.say(9)
    until(lambda: here.member.peers == ())
    while rogue.hear()[0] != BYE:
        pass
    again = until(lambda: meets(here))
    again.close()


def meets(here: Here) -> Rogue | None:
    try:
        return Rogue(here)
    except IndexError:  # no descriptor came
        return None


@pytest.fixture
def asleep(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """What the rogue's process is taken for."""
    with subprocess.Popen(["sleep", "600"]) as process:
        monkeypatch.setattr(_meet, "_process", lambda *_: os.pidfd_open(process.pid))
        yield process
        process.kill()


def test_a_part_may_be_written_until_the_process_has_ended(name: str, asleep: subprocess.Popen[bytes]) -> None:
    """The socket of a process that is killed may be closed before its last copies have ended."""
    here = Here(name, store_wait=PATIENCE)
    rogue = Rogue(here)
    transfer = here.member.store(*here.ids(FOUR), shared="s", ranks=[0, 1])
    rogue.close()
    until(lambda: here.member.peers == ())
    with pytest.raises(TimeoutError):
        transfer.wait(0.5)
    asleep.kill()
    with pytest.raises(kvswap.Error, match="rank 1 did not store its part"):
        transfer.wait(AT_ONCE)
    assert np.array_equal(transfer.failed_positions, np.flatnonzero(np.arange(FOUR) // 8 % 2))
    here.close()


def test_a_store_asks_nothing_of_one_whose_end_cannot_be_seen(
    here: Here, rogue: Rogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it was killed, the store would wait for ever."""
    rogue.say(BYE)
    until(lambda: here.member.peers == ())
    monkeypatch.setattr(_meet, "_process", lambda *_: -1)
    unseen = until(lambda: meets(here))
    here.check_store(FOUR)
    assert unseen.quiet()
    host, gpu = here.ids(FOUR)
    transfer = here.member.load(host, gpu)
    assert len(asked_for(unseen)) == 4
    unseen.close()
    transfer.wait(PATIENCE)


# -- reports -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(name: str) -> Iterator[list[Rank]]:
    with SharedPool(name, BLOCKS, BLOCK, layers=LAYERS, device=kvswap.Device("host:0")):
        members = [Rank(name, rank, stall=10.0, share_wait=5.0, store_wait=20.0) for rank in range(2)]
        for member in members:
            member.ask("member.wait_peers([0, 1], 60)")
        yield members
        for member in members:
            ended(member)


def test_one_may_be_many_stores_ahead(pair: list[Rank]) -> None:
    many = "globals().update(ts=[member.store([i], [i], shared='s', generation=i, ranks=[0, 1]) for i in range(40)])"
    pair[0].ask(many)
    time.sleep(0.5)  # its reports have come, or the other's call is first, which proves nothing
    pair[1].ask(many)
    for member in pair:
        assert member.ask("[t.wait(30) for t in ts]") == [None] * 40


def test_what_one_reported_before_it_was_killed_counts(pair: list[Rank]) -> None:
    """Its last messages and its end are seen together."""
    pair[0].say("store(7, shared='z', ranks=[0, 1])")
    time.sleep(0.5)
    pair[0].stop(signal.SIGSTOP)
    assert pair[1].ask("store(7, shared='z', ranks=[0, 1])") == [True, [], None]
    ended(pair[1])
    pair[0].stop(signal.SIGCONT)
    assert pair[0].hear() == [True, [], None]


# -- at random ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_members_killed_and_stopped_at_random() -> None:
    """A few turns; 500 kills take `python tests/random/kill_members.py --kills 500`."""
    program = [sys.executable, str(ROOT / "tests" / "random" / "kill_members.py"), "--turns", "24"]
    done = subprocess.run(program, **elsewhere(), capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
