"""Who is told what of a task, whatever happens in whatever order: rank 0's coordinator, without processes."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import argparse
import collections
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("zmq")

from hypothesis import given
from hypothesis import strategies as st

from kvswap.fastdeploy.manager import arguments, coordinator
from kvswap.fastdeploy.manager.coordinator import Coordinator
from kvswap.fastdeploy.manager.messages import (
    Answer,
    Attach,
    Beat,
    Clear,
    Do,
    Done,
    GetStatus,
    Restore,
    Result,
    State,
    Step,
    StepDone,
    Submit,
    Task,
)
from kvswap.fastdeploy.manager.metrics import Metrics

RANKS = 3


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return 1


class World:
    """A coordinator, and what it said."""

    def __init__(self, *options: str) -> None:
        parser = argparse.ArgumentParser()
        arguments.add_run(parser)
        words = ["--mp_num", str(RANKS), "--num_gpu_blocks", "50", "--num_cpu_blocks", "50", "--create_cache_tensor"]
        settings = arguments.settings_of(parser.parse_args([*words, *options]))
        self.clock = coordinator.time = Clock()  # restored by the fixture
        self.taken: set[bytes] = set()  # clients that take nothing now
        self.said: dict[bytes, list[Any]] = collections.defaultdict(list)
        self.given: list[list[Any]] = [[] for _ in range(RANKS)]
        self.states: list[State] = []
        self.coordinator = Coordinator(
            settings, State.NORMAL, self._to_client, self._to_rank, self.states.append, Metrics(None)
        )
        for rank in range(RANKS):
            self.hello(rank)
        self.coordinator.ask(b"engine", Attach(0, 1.0))
        self.requests = 0

    def _to_client(self, client: bytes, message: Any) -> bool:
        if client in self.taken:
            return False
        self.said[client].append(message)
        return True

    def _to_rank(self, rank: int, message: Any) -> None:
        self.given[rank].append(message)

    def hello(self, rank: int) -> None:
        self.coordinator.hello(rank, 100 + rank)
        self.given[rank] = []
        self.beat(rank)

    def beat(self, rank: int, ready: bool = True) -> None:
        self.coordinator.beat(Beat(rank, ready, "ready", 0, 1))

    def submit(self, name: str, client: bytes = b"c", block: int = 1, kind: int = 1) -> str:
        self.requests += 1
        before = len(self.said[client])
        self.coordinator.ask(client, Submit(self.requests, Task(name, kind, [block], [block])))
        answers = [each for each in self.said[client][before:] if isinstance(each, Answer)]
        return answers[0].code if answers else ""

    def numbers(self, rank: int) -> list[int]:
        return [message.number for message in self.given[rank] if isinstance(message, Do)]

    def end(self, rank: int, ok: bool = True, which: int = 0) -> None:
        """The rank ends a task that it was given."""
        doing = [message for message in self.given[rank] if isinstance(message, Do)]
        if doing:
            message = doing[which % len(doing)]
            self.given[rank].remove(message)
            self.coordinator.done(Done(rank, message.number, ok, "" if ok else "it broke", 10, 0.5))

    def results(self, client: bytes = b"c") -> list[Result]:
        return [message for message in self.said[client] if isinstance(message, Result)]

    def later(self, seconds: float, alive: bool = True) -> None:
        """In steps, as a loop that runs; alive: the ranks say that they are."""
        while seconds > 0:
            self.clock.now += min(seconds, 0.5)
            seconds -= 0.5
            for rank in range(RANKS):
                if alive and self.coordinator.ranks[rank].here:
                    self.coordinator.ranks[rank].seen = self.clock.now
            self.coordinator.tick()


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "time", coordinator.time)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "end", "end", "end", "fail", "lost", "hello", "later", "slow", "stop"]),
        st.integers(0, RANKS - 1),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(ACTIONS)
def test_every_task_that_was_taken_is_reported_once(actions: list[tuple[str, int, int]]) -> None:
    """And as done only if every rank has done it."""
    before = coordinator.time
    world = World("--task_timeout", "2", "--rank_timeout", "1")
    taken: list[str] = []
    done: dict[str, set[int]] = collections.defaultdict(set)
    name_of: dict[int, str] = {}
    for i, (action, rank, which) in enumerate(actions):
        if action == "submit" and world.submit(f"t{i}") == "ok":
            taken.append(f"t{i}")
            for given_to in range(RANKS):
                name_of.update((m.number, m.task.transfer_task_id) for m in world.given[given_to] if isinstance(m, Do))
        elif action in ("end", "fail"):
            numbers = world.numbers(rank)
            if numbers and action == "end":
                done[name_of[numbers[which % len(numbers)]]].add(rank)
            world.end(rank, action == "end", which)
        elif action == "lost":
            world.coordinator.lost(rank, "died")
            world.given[rank] = []
        elif action == "hello":
            world.hello(rank)
        elif action == "later":
            world.later(which / 2)
        elif action == "slow":
            world.later(1 + which / 4, alive=False)
        elif action == "stop":
            world.coordinator.tick()
    world.coordinator.abandon("the manager was stopped")
    results = world.results()
    assert sorted(result.transfer_task_id for result in results) == sorted(taken)
    for result in results:
        assert result.ok == (result.rank is None) == (not result.reason)
        assert not result.ok or done[result.transfer_task_id] == set(range(RANKS))
    coordinator.time = before


def test_the_first_rank_that_failed_is_named() -> None:
    world = World()
    assert world.submit("a") == "ok"
    world.end(0)
    world.end(2, ok=False)
    assert world.results() == []  # rank 1 still works on it
    world.end(1, ok=False)
    (result,) = world.results()
    assert (result.ok, result.rank, result.reason, result.nbytes) == (False, 2, "it broke", 30)


def test_a_rank_that_comes_back_had_nothing_in_hand() -> None:
    world = World()
    world.submit("a")
    world.end(0)
    world.end(2)
    world.coordinator.hello(1, 999)
    (result,) = world.results()
    assert result.rank == 1 and "was started again as process 999" in result.reason


def test_a_late_end_changes_nothing() -> None:
    """The task was reported as too slow; others are taken once the rank has ended it."""
    world = World("--task_timeout", "2")
    world.submit("a")
    world.end(0)
    world.end(1)
    world.later(3)
    (result,) = world.results()
    assert result.rank == 2 and "took longer than 2 s" in result.reason
    assert world.submit("b") == "not_ready"
    world.end(2)
    assert world.submit("b") == "ok" and len(world.results()) == 1


def test_a_client_that_does_not_read_holds_up_itself() -> None:
    """What it cannot take is kept in order, counts as under way, and is delivered once."""
    world = World("--queue_limit", "3")
    world.submit("a", b"slow")
    world.taken.add(b"slow")
    for rank in range(RANKS):
        world.end(rank)
    world.coordinator.ask(b"slow", GetStatus(7))
    assert world.coordinator.undelivered == 2 and world.results(b"slow") == []
    assert world.submit("b") == "ok"
    world.later(0.5)
    assert world.submit("c") == "full"  # one under way, two kept
    world.taken.clear()
    world.later(0.5)
    assert [type(message) for message in world.said[b"slow"]] == [Answer, Result, Answer]
    assert world.coordinator.undelivered == 0 and world.submit("c") == "ok"


def test_a_client_that_never_reads_is_dropped() -> None:
    """Its messages are not kept without end."""
    world = World()
    world.taken.add(b"dead")
    most = 0
    for request in range(10_000):
        world.coordinator.ask(b"dead", GetStatus(request))
        most = max(most, world.coordinator.undelivered)
    assert most <= coordinator._MOST_KEPT + 1
    world.coordinator.gone(b"dead")
    assert world.coordinator.undelivered == 0 and world.submit("a") == "ok"


def test_the_states_of_clearing() -> None:
    world = World()
    world.submit("a")
    world.coordinator.ask(b"c", Clear(50, 5.0))
    assert world.states == [State.CLEARING] and world.submit("b") == "not_ready"
    assert not any(isinstance(message, Step) for message in world.given[1])  # the task is under way
    for rank in range(RANKS):
        world.end(rank)
    world.coordinator.tick()
    steps = [next(m for m in world.given[rank] if isinstance(m, Step)) for rank in range(RANKS)]
    for step in steps[:2]:
        world.coordinator.step_done(StepDone(steps.index(step), step.number, True, ""))
    world.coordinator.step_done(StepDone(2, steps[2].number, False, "no"))
    (answer,) = [message for message in world.said[b"c"] if isinstance(message, Answer) and message.request == 50]
    assert (answer.code, answer.message) == ("failed", "rank 2: no") and world.coordinator.state == State.CLEARING
    world.coordinator.ask(b"c", Restore(51, 5.0))
    assert world.said[b"c"][-1].code == "refused"
    world.coordinator.ask(b"c", Clear(52, 5.0))
    for rank in range(RANKS):
        step = [m for m in world.given[rank] if isinstance(m, Step)][-1]
        world.coordinator.step_done(StepDone(rank, step.number, True, ""))
    assert world.said[b"c"][-1].code == "ok" and world.states == [State.CLEARING, State.CLEARED]
    world.coordinator.ask(b"c", Clear(53, 5.0))
    assert world.said[b"c"][-1].code == "ok" and world.states[-1] == State.CLEARED
    world.coordinator.ask(b"c", Restore(54, 1.0))
    world.later(2)
    assert world.said[b"c"][-1].code == "timeout" and world.coordinator.state == State.UPDATING
