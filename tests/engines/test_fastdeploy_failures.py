"""Swaps that fail, and ranks that are given up: nobody is told that stale bytes are what he asked for."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import select
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from conftest import PATIENCE, Gate, until
from managers import Manager, Model

import kvswap
from kvswap import memory, testing
from kvswap.fastdeploy.client import SWAP2CPU, SWAP2GPU, AsyncClient, NotReady
from kvswap.fastdeploy.manager import arguments, caches
from kvswap.fastdeploy.manager.messages import Done, Kind, State, Task
from kvswap.fastdeploy.manager.worker import Worker

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")


@pytest.fixture(autouse=True)
def _on_the_host(device_name: str) -> None:
    if device_name != "host:0":
        pytest.skip("the ranks of these tests are on host devices")


@pytest.fixture
def model() -> Iterator[Model]:
    """Two ranks; GPU block i holds its own bytes, host block 9 those of GPU block 9, host block 31 nothing."""
    with Manager(2, "--rank_timeout", "5") as manager:
        client = manager.ready_client()
        model = Model(manager, client)
        model.write(range(20))
        assert client.result(model.swap(SWAP2CPU, [9], [9]), PATIENCE).ok
        yield model
        model.close()


def test_what_a_refused_load_should_have_written(model: Model) -> None:
    """Tasks that were sent before anybody was told fail too; then the engine writes the block itself, and goes on."""
    client = model.client
    bad = client.swap(SWAP2GPU, [3], [31])
    at_once = client.swap(SWAP2CPU, [3], [10])
    until(lambda: client.status()["failed"] == 2, "two failures")
    uncollected = client.swap(SWAP2CPU, [3], [11])  # the client has the results, its caller does not
    back = client.swap(SWAP2GPU, [4], [10])
    results = [client.result(task, PATIENCE) for task in (bad, at_once, uncollected, back)]
    assert [result.ok for result in results] == [False] * 4
    assert (
        f"gpu_block_ids[0] is 3: that GPU block does not hold what it should, since task {bad!r}" in results[1].reason
    )
    assert "cpu_block_ids[0] is 31" in results[1].reason and list(results[0].lost) == [3]
    assert "cpu_block_ids[0] is 10: that host block holds nothing" in results[3].reason
    model.write([3, 4])  # the engine computes what it did not get
    for gpu, cpu in ((3, 10), (4, 11)):
        assert client.result(model.swap(SWAP2CPU, [gpu], [cpu]), PATIENCE).ok
    model.check_host()


def test_what_a_refused_store_should_have_written(model: Model) -> None:
    """The host block holds somebody else's bytes from before."""
    client = model.client
    bad = client.swap(SWAP2CPU, [3], [9], events=[b"no event", b"no event"])
    at_once = client.swap(SWAP2GPU, [5], [9])
    assert not client.result(bad, PATIENCE).ok
    for task in (at_once, client.swap(SWAP2GPU, [5], [9])):
        result = client.result(task, PATIENCE)
        assert not result.ok and "cpu_block_ids[0] is 9: that host block holds nothing" in result.reason
    model.check()  # nothing was written
    model.write([5])  # and is told: it can be stored
    assert client.result(model.swap(SWAP2CPU, [5], [9]), PATIENCE).ok
    model.check_host()


def test_other_clients_are_told_too(model: Model) -> None:
    other = model.manager.client()
    assert not model.client.result(model.client.swap(SWAP2GPU, [3], [31])).ok
    model.write([3])
    for expected in (False, True):
        assert other.result(other.swap(SWAP2CPU, [3], [12])).ok == expected

    async def use() -> None:
        async with AsyncClient(model.manager.directory) as client:
            for expected in (False, True):
                assert (await client.result(await client.swap(SWAP2CPU, [3], [12]))).ok == expected

    asyncio.run(use())


def test_a_store_that_a_silent_rank_never_began(model: Model) -> None:
    """It is in the rank's socket when the rank is given up: the block that it names keeps what it held before."""
    client, manager = model.client, model.manager
    manager.signal(1, signal.SIGSTOP)
    tasks = [client.swap(SWAP2CPU, [3], [9]), client.swap(SWAP2GPU, [4], [9])]
    results = [client.result(task, PATIENCE) for task in tasks]
    assert [result.ok for result in results] == [False, False] and "silent" in results[0].reason
    manager.signal(1, signal.SIGCONT)
    client.wait_ready(PATIENCE)
    result = client.result(client.swap(SWAP2GPU, [5], [9]))
    assert not result.ok and "cpu_block_ids[0] is 9" in result.reason
    model.write([4, 5])
    assert client.result(model.swap(SWAP2CPU, [4, 5], [9, 8])).ok
    model.check_host()


def test_swaps_that_go_on_after_their_rank_was_given_up(model: Model) -> None:
    """No task is taken before they have ended, and a drain waits for them."""
    client, manager = model.client, model.manager
    device = kvswap.Device("host:1")  # rank 1's
    event, stream = kvswap.Event(device, timing=False, interprocess=True), kvswap.Stream(device)
    with Gate(device) as gate:
        gate.hold(stream)
        event.record(stream)
        slow = client.swap(SWAP2CPU, [3], [10], events=[None, memory.export_event(event)])
        assert client.result(model.swap(SWAP2GPU, [5], [9]), PATIENCE).ok  # rank 1 has begun its own, which waits
        manager.signal(1, signal.SIGSTOP)
        assert "silent for 5 s" in client.result(slow, PATIENCE).reason
        manager.signal(1, signal.SIGCONT)
        until(lambda: client.status()["ranks"][1]["here"], "the rank")
        waits = "rank 1 is not ready: ending 1 swaps of tasks that were reported failed"
        end = time.monotonic() + 2
        while time.monotonic() < end:
            with pytest.raises(NotReady, match="rank 1"):
                client.swap(SWAP2CPU, [4], [9])
            time.sleep(0.05)
        status = client.status()
        assert status["why_not"] == waits and status["ranks"][1]["abandoned"] == 1
        with pytest.raises(kvswap.Error, match="rank 1 may still be at 1 swaps"):
            client.drain(0.3)
        gate.open()
        client.drain(PATIENCE)
        client.drain(undo=True)
    client.wait_ready(PATIENCE)
    assert client.result(model.swap(SWAP2CPU, [4], [9])).ok
    model.check_host()


@pytest.mark.slow
def test_a_queue_that_is_longer_than_the_sockets() -> None:
    """A rank that is busy for a while is not lost for it."""
    count = 9000

    async def use(manager: Manager) -> None:
        async with AsyncClient(manager.directory) as client:
            tasks = await asyncio.gather(*(client.swap(SWAP2CPU, [i % 20], [i % 30]) for i in range(count)))
            manager.signal(1, signal.SIGCONT)
            results = [await client.result(task, PATIENCE) for task in tasks]
            assert {result.reason for result in results} == {""}

    with Manager(2, "--queue_limit", str(count), "--rank_timeout", "600", "--log_level", "warning") as manager:
        manager.ready_client()
        manager.signal(1, signal.SIGSTOP)
        asyncio.run(use(manager))


def test_rank_0_ends_while_a_client_is_busy() -> None:
    """What it said last is read: it waits a little, because the end of a connection takes with it what is not."""
    device = kvswap.Device("host:0")
    event, stream = kvswap.Event(device, timing=False, interprocess=True), kvswap.Stream(device)
    with Manager(1) as manager, Gate(device) as gate:
        client = manager.ready_client()
        gate.hold(stream)
        event.record(stream)
        exported = [memory.export_event(event)]
        tasks = [client.swap(SWAP2CPU, [i % 20], [i % 30], events=exported) for i in range(400)]
        manager.signal(0, signal.SIGTERM)
        with client._link._lock:  # its thread gets no further than one message
            gate.open()
            time.sleep(0.5)
        assert [client.result(task, PATIENCE).reason for task in tasks] == [""] * len(tasks)
        assert manager.wait(0) == 0


# -- a rank's worker, without a process -------------------------------------------------------------------------------


class Rank:
    """A worker on a device of its own."""

    def __init__(self) -> None:
        parser = argparse.ArgumentParser()
        arguments.add_run(parser)
        words = ["--num_gpu_blocks", "8", "--num_cpu_blocks", "8", "--num_layers", "3", "--create_cache_tensor"]
        settings = arguments.settings_of(parser.parse_args([*words, "--device_id", str(os.getpid())]))
        settings = dataclasses.replace(settings, device="host:7")
        self.device = kvswap.Device("host:7")
        self.said: list[Any] = []
        self.worker = Worker(settings, self.said.append)
        self.worker.start(State.NORMAL)
        until(lambda: self.worker.pump() and self.worker.ready, "its caches")
        self.number = 0

    def do(self, kind: int, gpu_ids: list[int], cpu_ids: list[int]) -> Done:
        self.number += 1
        self.worker.take(self.number, Task(str(self.number), Kind(kind), gpu_ids, cpu_ids))
        until(lambda: self.worker.pump() and self.worker.busy == 0, "the task")
        return self.said[-1]

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *error: object) -> None:
        self.worker.close(PATIENCE)


def test_a_rank_goes_on_after_a_copy_that_failed() -> None:
    """A pool knows what a failed copy left; of GPU blocks, which the engine writes too, rank 0 knows more."""
    with Rank() as rank:
        assert not rank.do(SWAP2CPU, [1], [1]).reason
        for kind, block in ((SWAP2GPU, 1), (SWAP2CPU, 2)):
            with testing.fault(rank.device, "copy", "fail", code=7):
                assert rank.do(kind, [block], [block]).reason
        assert not rank.do(SWAP2CPU, [1], [3]).reason  # rank 0 lets it through when the engine knows
        assert rank.do(SWAP2GPU, [1], [2]).reason
        assert not rank.do(SWAP2CPU, [2], [2]).reason and not rank.do(SWAP2GPU, [1], [2]).reason


def test_what_a_rank_does_not_begin_is_not_in_its_host_blocks() -> None:
    with Rank() as rank:
        assert not rank.do(SWAP2CPU, [1, 2], [1, 2]).reason
        rank.worker.take(100, Task("a", SWAP2CPU, [3], [1], events=[b"no event"]))
        until(lambda: rank.worker.pump() and rank.worker.busy == 0, "the task")
        assert rank.said[-1].reason and "holds nothing" in rank.do(SWAP2GPU, [1], [1]).reason
        rank.worker.take(101, Task("b", SWAP2CPU, [3], [2]))
        assert rank.worker.give_up() == 1
        assert "holds nothing" in rank.do(SWAP2GPU, [1], [2]).reason


def test_whatever_goes_wrong_with_a_task_is_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no")

    with Rank() as rank:
        with monkeypatch.context() as patch:
            patch.setattr(caches, "submit", refuse)
            assert rank.do(SWAP2CPU, [1], [1]).reason == "OSError: no"
        assert not rank.do(SWAP2CPU, [1], [1]).reason


def test_the_end_of_a_swap_wakes_the_loop() -> None:
    """It need not look again and again, and when nothing is under way nothing wakes it."""
    with Rank() as rank:
        rank.do(SWAP2CPU, [1], [1])
        for number, kind in ((100, SWAP2CPU), (101, SWAP2GPU)):
            # A thread that watched what the loop found ended by itself wakes it once more.
            until(lambda: rank.worker.pump() and not _is_readable(rank.worker.wake_fd, 0.1), "nothing to wake it")
            rank.worker.take(number, Task("a", Kind(kind), [1], [1]))
            assert rank.worker.pump() >= 50
            assert _is_readable(rank.worker.wake_fd, PATIENCE)
            rank.worker.pump()
            assert rank.said[-1].number == number and rank.worker.busy == 0


def _is_readable(fd: int, timeout: float) -> bool:
    return bool(select.select([fd], [], [], timeout)[0])
