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
    Ask,
    Beat,
    Do,
    Done,
    Kind,
    Result,
    State,
    Step,
    StepDone,
    Submit,
    Task,
)
from kvswap.fastdeploy.manager.metrics import Metrics

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")

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
            settings, State.NORMAL, self._to_client, self._to_rank, self.states.append, Metrics(None, 0)
        )
        for rank in range(RANKS):
            self.hello(rank)
        self.coordinator.ask(b"engine", Ask(0, "attach", 1.0))
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

    def beat(self, rank: int, ready: bool = True, abandoned: int = 0) -> None:
        self.coordinator.beat(Beat(rank, ready, "ready", 1, abandoned=abandoned))

    def submit(
        self,
        name: str,
        client: bytes = b"c",
        block: int = 1,
        kind: int = 1,
        *,
        blocks: tuple[list[int], list[int]] | None = None,
        known: list[int] | None = None,
    ) -> str:
        """blocks: on the GPU and on the host; else one on both. known: losses that the caller was told of."""
        self.requests += 1
        before = len(self.said[client])
        gpu_ids, cpu_ids = blocks if blocks is not None else ([block], [block])
        self.coordinator.ask(client, Submit(self.requests, Task(name, Kind(kind), gpu_ids, cpu_ids), known or []))
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
            self.coordinator.done(Done(rank, message.number, "" if ok else "it broke", 10, 0.5))

    def end_all(self, failing: int | None = None) -> None:
        """All ranks report all of their tasks as done, in order; rank `failing` reports its own as failed."""
        for rank in range(RANKS):
            while self.numbers(rank):
                self.end(rank, rank != failing)

    def results(self, client: bytes = b"c") -> list[Result]:
        return [message for message in self.said[client] if isinstance(message, Result)]

    def last(self, client: bytes = b"c") -> Result:
        return self.results(client)[-1]

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
    """Results that it cannot take are kept in order and delivered once; it is not served before, and others are."""
    world = World("--queue_limit", "2")
    for name in ("a", "b"):
        world.submit(name, b"slow")
    world.taken.add(b"slow")
    world.coordinator.ask(b"slow", Ask(7, "status"))  # its answer cannot be sent
    world.end_all()
    assert world.coordinator.undelivered == 2 and world.results(b"slow") == []
    world.taken.clear()
    assert world.submit("c", b"slow") == "" and world.coordinator.under_way == 0
    assert world.submit("d") == "ok" and world.coordinator.under_way == 1
    world.later(0.5)
    assert [type(message) for message in world.said[b"slow"]] == [Answer, Answer, Result, Result]
    assert [result.transfer_task_id for result in world.results(b"slow")] == ["a", "b"]
    world.end_all()
    assert world.coordinator.undelivered == 0 and world.submit("c", b"slow") == "ok"


def test_a_task_whose_answer_cannot_be_sent_is_not_taken() -> None:
    world = World()
    world.taken.add(b"slow")
    assert world.submit("a", b"slow") == "" and world.coordinator.under_way == 0
    assert world.submit("a") == "ok"


def test_others_have_room_whatever_one_does() -> None:
    """One client takes nothing and another fills the queue; every other one has its own tasks all the same."""
    world = World("--queue_limit", "8")
    world.taken.add(b"silent")
    for i in range(1000):
        world.submit(f"silent {i}", b"silent", i % 50)
        if i % 5 == 0:
            world.end_all()
    world.end_all()
    assert world.coordinator.undelivered == 0  # no task of it was taken
    assert world.submit("a") == "ok"
    world.end_all()
    while world.submit(f"greedy {world.requests}", b"greedy") == "ok":
        continue
    for i in range(coordinator.MOST_CLIENTS):
        assert world.submit(f"mine {i}", b"client %d" % i) == "ok"
        assert world.submit(f"mine too {i}", b"client %d" % i) == "full"
        assert world.coordinator.under_way <= coordinator.most_tasks(8)
    assert world.submit("more", b"greedy") == "full"


def test_a_flush_costs_one_attempt_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of results that nobody takes are not gone through again and again."""
    world = World("--queue_limit", "900")
    for i in range(900):
        world.submit(f"t{i}", b"%d" % (i % 3))
    world.taken.update((b"0", b"1", b"2"))
    world.end_all()
    attempts: list[bytes] = []
    monkeypatch.setattr(world.coordinator, "_to_client", lambda client, message: attempts.append(client))
    world.coordinator.flush()
    assert len(attempts) == 3 and world.coordinator.undelivered == 900


def test_a_client_that_is_gone_while_it_is_sent_to(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    for i in range(10):
        world.submit(f"c{i}", b"c", i)
        world.submit(f"d{i}", b"d", i)
    world.taken.update((b"c", b"d"))
    world.end_all()
    assert world.coordinator.undelivered == 20

    def send(client: bytes, message: Any) -> bool:
        world.coordinator.gone(b"c")
        return True

    monkeypatch.setattr(world.coordinator, "_to_client", send)
    world.coordinator.flush()
    assert world.coordinator.undelivered == 0
    monkeypatch.undo()
    world.taken.clear()
    assert world.submit("again", b"c") == "ok"


def test_a_client_that_ends_with_tasks_under_way() -> None:
    """They end, and nothing is kept for it."""
    world = World()
    world.submit("a", b"dead")
    world.taken.add(b"dead")
    world.coordinator.gone(b"dead")
    world.end_all()
    assert world.coordinator.under_way == 0 and world.coordinator.undelivered == 0


def test_one_client_asks_for_the_same_again_and_again() -> None:
    """What it asks while an operation goes on is not kept without end."""
    world = World()
    world.submit("a")
    for request in range(1000):
        world.coordinator.ask(b"eager", Ask(request, "clear", 60.0))
    world.coordinator.ask(b"other", Ask(1, "clear", 60.0))
    busy = [message for message in world.said[b"eager"] if message.code == "busy"]
    assert len(busy) == 1000 - 16 and not world.said[b"other"]


def test_a_client_that_never_reads() -> None:
    """Nothing but its results is kept, of as many tasks as it had; it is served again once it has read them."""
    world = World()
    world.submit("b", b"dead")
    world.taken.add(b"dead")
    for request in range(1000):
        world.coordinator.ask(b"dead", Ask(request, "status"))
        world.submit(f"more {request}", b"dead")
    assert world.submit("a") == "ok"
    world.end_all()
    assert world.coordinator.undelivered == 1
    world.taken.clear()
    world.later(0.5)
    assert world.coordinator.undelivered == 0 and world.last(b"dead").ok
    world.coordinator.ask(b"dead", Ask(1, "status"))
    assert world.said[b"dead"][-1].code == "ok"


def test_the_states_of_clearing() -> None:
    world = World()
    world.submit("a")
    world.coordinator.ask(b"c", Ask(50, "clear", 5.0))
    assert world.states == [State.CLEARING] and world.submit("b") == "not_ready"
    assert not any(isinstance(message, Step) for message in world.given[1])  # the task is under way
    for rank in range(RANKS):
        world.end(rank)
    world.coordinator.tick()
    steps = [next(m for m in world.given[rank] if isinstance(m, Step)) for rank in range(RANKS)]
    for step in steps[:2]:
        world.coordinator.step_done(StepDone(steps.index(step), step.number, ""))
    world.coordinator.step_done(StepDone(2, steps[2].number, "no"))
    (answer,) = [message for message in world.said[b"c"] if isinstance(message, Answer) and message.request == 50]
    assert (answer.code, answer.message) == ("failed", "rank 2: no") and world.coordinator.state == State.CLEARING
    world.coordinator.ask(b"c", Ask(51, "restore", 5.0))
    assert world.said[b"c"][-1].code == "refused"
    world.coordinator.ask(b"c", Ask(52, "clear", 5.0))
    for rank in range(RANKS):
        step = [m for m in world.given[rank] if isinstance(m, Step)][-1]
        world.coordinator.step_done(StepDone(rank, step.number, ""))
    assert world.said[b"c"][-1].code == "ok" and world.states == [State.CLEARING, State.CLEARED]
    world.coordinator.ask(b"c", Ask(53, "clear", 5.0))
    assert world.said[b"c"][-1].code == "ok" and world.states[-1] == State.CLEARED
    world.coordinator.ask(b"c", Ask(54, "restore", 1.0))
    world.later(2)
    assert world.said[b"c"][-1].code == "timeout" and world.coordinator.state == State.UPDATING


# -- failure travels --------------------------------------------------------------------------------------------------

SWAP2CPU, SWAP2GPU = 1, 2


def test_a_gpu_block_that_a_failed_swap_should_have_written() -> None:
    """Nobody is told that it was stored, until it is written again, or the caller knew of it when he sent the task."""
    world = World()
    world.submit("load", block=3, kind=SWAP2GPU)
    world.submit("store at once", block=3)
    world.end_all(failing=1)
    load, store = world.results()
    assert (load.ok, load.rank) == (False, 1) and list(load.lost) == [3]
    assert not store.ok and "gpu_block_ids[0] is 3" in store.reason and "task 'load' failed: it broke" in store.reason
    assert store.lost == load.lost  # whoever is told of either knows
    world.submit("before it was told", block=3)
    assert world.last().transfer_task_id == "before it was told" and world.last().lost == load.lost
    assert world.last().rank == 1 and not any(world.numbers(rank) for rank in range(RANKS))  # no rank was asked
    (number,) = load.lost.values()
    world.submit("written by the engine", block=3, known=[number])
    world.end_all()
    assert world.last().ok
    world.submit("another engine", b"d", block=3)
    assert not world.last(b"d").ok
    world.submit("load again", kind=SWAP2GPU, blocks=([3], [7]))
    world.end_all()
    world.submit("store again", b"d", block=3)
    world.end_all()
    assert world.last().ok and world.last(b"d").ok


def test_a_host_block_that_a_failed_swap_should_have_written() -> None:
    """It can only be written by another swap."""
    world = World()
    world.submit("old", block=3)
    world.end_all()
    world.submit("new", block=3)
    world.end_all(failing=2)
    assert world.last().lost == {}
    world.submit("load", kind=SWAP2GPU, blocks=([8, 9], [4, 3]), known=[1, 2, 3])
    load = world.last()
    assert "cpu_block_ids[1] is 3: that host block holds nothing, since task 'new' failed: it broke" in load.reason
    assert set(load.lost) == {8, 9} and load.rank == 2
    world.submit("store", blocks=([8], [5]))
    assert "gpu_block_ids[0] is 8" in world.last().reason and "since task 'new' failed" in world.last().reason
    world.submit("newer", block=3)
    world.submit("load again", kind=SWAP2GPU, blocks=([8], [3]))
    world.end_all()
    assert [result.ok for result in world.results()[-2:]] == [True, True]


def test_one_that_ends_before_what_it_reads() -> None:
    """Whatever order the ranks tell it in, how that did is part of how it did."""
    for failing in (None, 0):
        world = World()
        world.submit("load", block=3, kind=SWAP2GPU)
        world.submit("store", block=3)
        for rank in range(RANKS):
            world.end(rank, which=1)
        assert world.results() == []
        world.end_all(failing)
        assert [(result.transfer_task_id, result.ok) for result in world.results()] == [
            ("load", failing is None),
            ("store", failing is None),
        ]


def test_what_is_lost_with_a_rank_or_by_time() -> None:
    world = World("--task_timeout", "2", "--rank_timeout", "1")
    world.submit("a", block=3, kind=SWAP2GPU)
    world.submit("b", block=3)
    world.end(0), world.end(0), world.end(2), world.end(2)
    world.coordinator.lost(1, "died")
    assert [result.ok for result in world.results()] == [False, False] and "since task 'a'" in world.last().reason
    world.hello(1)
    world.coordinator.ask(b"engine", Ask(0, "attach", 1.0))
    world.submit("c", block=4, kind=SWAP2GPU)
    world.submit("d", block=4)
    for rank in range(RANKS):
        world.end(rank, which=1)  # d
    world.later(3)
    assert [result.transfer_task_id for result in world.results()[2:]] == ["c", "d"]
    assert "took longer" in world.results()[2].reason and "since task 'c' failed: took longer" in world.last().reason


def test_other_memory_is_in_its_place() -> None:
    world = World()
    world.submit("load", kind=SWAP2GPU)
    world.end_all(failing=0)
    for request, what in ((1, "clear"), (2, "restore")):
        world.coordinator.ask(b"engine", Ask(request, what, 5.0))
        for rank in range(RANKS):
            step = [message for message in world.given[rank] if isinstance(message, Step)][-1]
            world.coordinator.step_done(StepDone(rank, step.number, ""))
            world.beat(rank)
    assert world.submit("store") == "ok"
    world.end_all()
    assert world.last().ok


def test_an_engine_that_begins() -> None:
    """It is not told of what one before it lost that is gone, but of what another one lost that is there."""
    world = World()
    for client in (b"dead", b"alive"):
        world.submit("load", client, block=len(client), kind=SWAP2GPU)
        world.end_all(failing=0)
    world.coordinator.gone(b"dead")
    world.coordinator.ask(b"new", Ask(0, "attach", 1.0))
    for block in (4, 5):
        world.submit(f"store {block}", b"new", block=block)
        world.end_all()
        assert world.last(b"new").ok == (block == 4)


@given(st.lists(st.tuples(st.sampled_from(["load", "store", "end", "end", "fail"]), st.integers(0, 999)), max_size=80))
def test_failure_travels(actions: list[tuple[str, int]]) -> None:
    """As if the tasks had run one after the other, in the order in which they were taken, each on all ranks."""
    before = coordinator.time
    world = World()
    tasks: dict[
        str, tuple[int, list[tuple[str, bool]]]
    ] = {}  # its own failures so far; what it reads, and is that known
    last: dict[tuple[int, int], str] = {}  # of a side and block, the task that wrote it
    names: dict[int, str] = {}
    failing: set[str] = set()

    def end(action: str, which: int) -> None:
        rank = which % RANKS
        numbers = world.numbers(rank)
        if numbers:
            if action == "fail":
                failing.add(names[numbers[which % len(numbers)]])
            world.end(rank, action == "end", which)

    for i, (action, which) in enumerate(actions):
        if action in ("end", "fail"):
            end(action, which)
            continue
        kind = SWAP2CPU if action == "store" else SWAP2GPU
        gpu_ids, cpu_ids = [which % 3, 3 + which % 2], [which // 3 % 3, 3 + which // 2 % 2]
        sources = gpu_ids if kind == SWAP2CPU else cpu_ids
        lost = {number: result.transfer_task_id for result in world.results() for number in result.lost.values()}
        told = {r.transfer_task_id: set(r.lost.values()) for r in world.results() if r.event_type == SWAP2GPU}
        known = sorted(lost) if which % 4 else []
        reads = []
        for block in sources:
            writer = last.get((SWAP2CPU + SWAP2GPU - kind, block))
            if writer is not None:
                reads.append((writer, kind == SWAP2CPU and bool(told.get(writer, set()) & set(known))))
        name = f"t{i}"
        assert world.submit(name, kind=kind, blocks=(gpu_ids, cpu_ids), known=known) == "ok"
        tasks[name] = (kind, reads)
        for block in cpu_ids if kind == SWAP2CPU else gpu_ids:
            last[kind, block] = name
        for rank in range(RANKS):
            names.update((m.number, m.task.transfer_task_id) for m in world.given[rank] if isinstance(m, Do))
    for which in range(RANKS):
        while world.numbers(which):
            end("end", which)
    ok: dict[str, bool] = {}
    for name, (_, reads) in tasks.items():
        ok[name] = name not in failing and all(ok[writer] or known for writer, known in reads)
    assert {result.transfer_task_id: result.ok for result in world.results()} == ok
    assert len(world.results()) == len(tasks)
    coordinator.time = before


# -- ranks that were given up, and may still write --------------------------------------------------------------------


def test_no_task_is_taken_while_orphans_write() -> None:
    """A rank that was silent is back: its swaps of before go on, so it is not ready, and nothing is drained."""
    world = World("--rank_timeout", "1")
    world.submit("a")
    world.later(2, alive=False)
    for rank in (1, 2):
        assert not world.coordinator.ranks[rank].here and world.coordinator.ranks[rank].abandoned == 1
    world.coordinator.ask(b"c", Ask(90, "drain", 60.0))
    world.end(0)
    world.later(0.5)
    assert len(world.results()) == 1 and not _answers(world, 90)  # they may still write
    for rank in (1, 2):
        world.coordinator.hello(rank, 100 + rank)
        world.beat(rank, ready=False, abandoned=1)
    world.later(0.5)
    assert not _answers(world, 90) and "may still be at 1 swaps" in world.coordinator._held_up(
        world.coordinator._operation
    )
    world.beat(1)
    world.coordinator.lost(2, "died")  # its swaps end with the process
    world.later(0.5)
    assert [answer.code for answer in _answers(world, 90)] == ["ok"]


def _answers(world: World, request: int) -> list[Answer]:
    return [each for each in world.said[b"c"] if isinstance(each, Answer) and each.request == request]


def test_a_rank_that_was_away_is_not_taken_for_another() -> None:
    world = World()
    world.submit("a")
    world.end(0), world.end(2)
    world.coordinator.hello(1, 101)
    assert "(process 101) was away" in world.last().reason and world.coordinator.ranks[1].abandoned == 1
    world.coordinator.hello(1, 102)
    assert world.coordinator.ranks[1].abandoned == 0
