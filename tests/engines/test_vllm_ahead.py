"""When a load is reported before it ends (kvswap_overlap). tests/integration/vllm_package.py --overlap has the rest."""

from __future__ import annotations

import random

import pytest

from kvswap.vllm._ahead import Ahead

pytestmark = pytest.mark.not_sanitized("Python only")

RATE = 50_000_000_000  # bytes a second
LOAD = 500_000_000  # 10 ms


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """Steps of so many seconds, and one load of 10 ms that has ended."""

    def __init__(self, steps: int = 2, behind: int = 1, shared_ms: float = 1.0, step: float = 0.007) -> None:
        self.clock, self.step = Clock(), step
        self.ahead = Ahead(steps, behind, shared_ms, self.clock)
        self.ahead.submitted(0, LOAD)  # nothing is known yet: it is not estimated
        for _ in range(9):
            self.go()
        assert self.ahead.due([0]) == []
        self.ahead.ended(0, LOAD, LOAD / RATE)

    def go(self) -> None:
        self.clock.now += self.step
        self.ahead.stepped()


def test_a_load_is_reported_if_it_ends_before_its_requests_step() -> None:
    rig = Rig()
    rig.ahead.submitted(1, LOAD)  # 7 ms until the queued step has ended, and 10
    rig.go()
    assert rig.ahead.due([1]) == [1]  # 10 ms from now, and its step begins in 14
    assert rig.ahead.due([1]) == []  # once


def test_loads_run_one_after_another() -> None:
    rig = Rig()
    for job in (1, 2, 3):
        rig.ahead.submitted(job, LOAD)
    reported = []
    for step in range(8):
        rig.go()
        reported += [(step, job) for job in rig.ahead.due([1, 2, 3])]
    assert reported == [(0, 1), (1, 2), (3, 3)]  # they end 17, 27 and 37 ms after they were submitted


@pytest.mark.parametrize(("shared_ms", "found"), [(1.0, []), (11.0, [1])])
def test_without_asynchronous_scheduling_the_next_step_may_wait_for_so_long(shared_ms: float, found: list[int]) -> None:
    rig = Rig(steps=0, shared_ms=shared_ms)
    rig.ahead.submitted(1, LOAD)
    rig.go()
    assert rig.ahead.due([1]) == found


def test_the_steps_are_the_short_ones() -> None:
    """A long step says that something was waited for, not how long the next ones take."""
    rig = Rig(step=0.001)
    for seconds in (0.001, 0.1, 0.1, 0.1, 0.001):
        rig.step = seconds
        rig.go()
    rig.step = 0.001
    rig.ahead.submitted(1, LOAD)
    rig.go()
    assert rig.ahead.due([1]) == []


def test_what_is_late_makes_the_others_late() -> None:
    rig = Rig()
    rig.ahead.submitted(1, LOAD)
    rig.ahead.submitted(2, LOAD)
    for _ in range(5):
        rig.go()  # 35 ms: both should have ended
    rig.ahead.ended(1, LOAD, LOAD / RATE)  # it had not at the look before, 28 ms after it was submitted
    rig.ahead.submitted(3, LOAD)
    assert rig.ahead.due([2, 3]) == [2]
    rig.go()
    assert rig.ahead.due([3]) == [3]


def test_a_load_that_ended_or_failed_is_not_reported() -> None:
    rig = Rig()
    rig.ahead.submitted(1, LOAD)
    rig.ahead.submitted(2, LOAD)
    rig.ahead.ended(1, None, None)
    rig.go()
    rig.go()
    assert rig.ahead.due([]) == [] and rig.ahead.due([1, 2]) == [2]


def test_the_rate_is_that_of_the_bytes() -> None:
    """Many small loads, which take a hundred times as long a byte, say little of a large one."""
    rig = Rig()
    for job in range(1, 12):
        rig.ahead.ended(job, 10_000, 20e-6)
    rig.ahead.submitted(20, LOAD)
    rig.go()
    assert rig.ahead.due([20]) == [20]


def test_each_load_is_reported_at_most_once() -> None:
    for seed in range(50):
        chance = random.Random(seed)
        rig = Rig(chance.choice([0, 2]), chance.choice([1, 2]))
        unreported, ended, reported = set[int](), set[int](), list[int]()
        for job in range(1, 200):
            if chance.random() < 0.5:
                rig.ahead.submitted(job, chance.randrange(1, 2 * LOAD))
                unreported.add(job)
            for old in [each for each in unreported | set(reported) if chance.random() < 0.2 and each not in ended]:
                rig.ahead.ended(old, 1000, chance.choice([None, 1e-6]))
                unreported.discard(old)
                ended.add(old)
            rig.step = chance.choice([0.001, 0.007, 0.05])
            rig.go()
            found = rig.ahead.due(unreported)
            assert set(found) <= unreported
            unreported -= set(found)
            reported += found
        assert len(reported) == len(set(reported))
