"""The cache transfer manager, with ranks as real processes on host devices."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import asyncio
import collections
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

import zmq
from conftest import AT_ONCE, PATIENCE, ROOT, until
from managers import CPU_BLOCKS, GPU_BLOCKS, SHAPE, Manager, Model

import kvswap
from kvswap import memory
from kvswap.fastdeploy import ipc
from kvswap.fastdeploy.client import SWAP2CPU, SWAP2GPU, AsyncClient, Client, ManagerError, NotReady
from kvswap.fastdeploy.manager import messages, places
from kvswap.fastdeploy.queue import EngineCacheQueue, TaskFailed

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")

TASKS = 10_000


@pytest.fixture(autouse=True)
def _on_the_host(device_name: str) -> None:
    if device_name != "host:0":
        pytest.skip("the ranks of these tests are on host devices")


@pytest.fixture(scope="module")
def shared() -> Iterator[Manager]:
    """Two ranks, for tests that leave them as they were."""
    with Manager(2, "--queue_limit", "256") as manager:
        yield manager


@pytest.fixture
def client(shared: Manager) -> Iterator[Client]:
    client = shared.ready_client()
    yield client
    client.close()


# -- swaps ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_many_tasks(ranks: int, long_seconds: float) -> None:
    """Random blocks both ways, many under way at once: as if one after the other. 10,000 tasks: --long-seconds 30."""
    with Manager(ranks) as manager:
        model = Model(manager, manager.ready_client(), seed=ranks)
        end, done = time.monotonic() + long_seconds, 0
        while done < TASKS and (time.monotonic() < end or done == 0):
            model.write(model.random.choice(GPU_BLOCKS, 8, replace=False))
            tasks = [model.swap_some() for _ in range(500)]
            results = model.collect(len(tasks))
            assert collections.Counter(result.transfer_task_id for result in results) == collections.Counter(tasks)
            assert [result.reason for result in results if not result.ok] == []
            model.check()
            done += len(tasks)
        model.check_host()
        status = model.client.status()
        assert status["done"] >= done and status["failed"] == status["under_way"] == 0
        model.close()


def test_results_say_what_was_asked(client: Client) -> None:
    task = client.swap(SWAP2CPU, [3, 4], [5, 6], task_id="mine", node_ids=[17, "x"])
    result = client.result(task)
    assert (result.transfer_task_id, result.event_type, result.swap_node_ids) == ("mine", 1, [17, "x"])
    assert (result.gpu_block_ids, result.cpu_block_ids, result.ok) == ([3, 4], [5, 6], True)
    assert result.nbytes == 2 * 2 * 4 * 128 and result.seconds > 0
    with pytest.raises(ValueError, match="was collected"):
        client.result(task)
    with pytest.raises(TimeoutError, match="no task has ended"):
        client.next_result(0.05)
    empty = client.result(client.swap(SWAP2CPU, [], []))
    assert empty.ok and empty.nbytes == 0


def test_a_host_block_that_holds_nothing(shared: Manager, client: Client) -> None:
    """It is never delivered as if it were somebody's keys and values."""
    client.clear()
    client.restore()
    client.result(client.swap(SWAP2CPU, [1], [7]))
    result = client.result(client.swap(SWAP2GPU, [1, 2], [7, 8]))
    assert not result.ok and result.rank in (0, 1) and "cpu_block_ids[1] is 8" in result.reason
    assert client.result(client.swap(SWAP2GPU, [1], [7])).ok


@pytest.mark.parametrize(
    ("kind", "gpu_ids", "cpu_ids", "message"),
    [
        (1, [1, 2], [1], "gpu_block_ids has 2 ids and cpu_block_ids has 1"),
        (1, [GPU_BLOCKS], [1], rf"gpu_block_ids\[0\] is {GPU_BLOCKS}"),
        (1, [1], [CPU_BLOCKS], rf"cpu_block_ids\[0\] is {CPU_BLOCKS}"),
        (1, [1, 2], [3, 3], "cpu_block_ids names block 3 twice"),
        (2, [1, 1], [3, 4], "gpu_block_ids names block 1 twice"),
    ],
)
def test_wrong_tasks_are_refused(
    client: Client, kind: int, gpu_ids: list[int], cpu_ids: list[int], message: str
) -> None:
    """Rank 0 refuses wrong tasks before any rank gets them."""
    with pytest.raises(ManagerError, match=message) as caught:
        client.swap(kind, gpu_ids, cpu_ids)
    assert caught.value.code == "refused"
    assert client.under_way == 0


@pytest.mark.parametrize(
    ("kind", "gpu_ids", "message"),
    [
        (0, [1], r"Invalid enum value 0 - at `\$.task.event_type`"),
        (3, [1], r"Invalid enum value 3 - at `\$.task.event_type`"),
        (1, [-1], r"Expected `int` >= 0 - at `\$.task.gpu_block_ids"),
    ],
)
def test_malformed_tasks_are_refused(client: Client, kind: int, gpu_ids: list[int], message: str) -> None:
    with pytest.raises(ManagerError, match=message) as caught:
        client.swap(kind, gpu_ids, [1])
    assert caught.value.code == "malformed" and client.under_way == 0


def test_created_caches_are_opened_first() -> None:
    """Before that, a task would be for other memory than the engine's."""
    with Manager(1) as manager:
        client = manager.client()
        client.wait_started(PATIENCE)
        with pytest.raises(NotReady, match="the engine has not opened yet"):
            client.swap(SWAP2CPU, [1], [1])
        assert len(client.handles()[0]["handles"]) == 4
        assert client.result(client.swap(SWAP2CPU, [1], [1])).ok


def test_what_cannot_be_sent(client: Client) -> None:
    """Is said in the call, and the client goes on."""
    with pytest.raises(OverflowError, match="cannot be sent"):
        client.swap(SWAP2CPU, [1 << 70], [1])
    with pytest.raises(TypeError, match="cannot be sent"):
        client.swap(SWAP2CPU, [1], [1], node_ids=[object()])
    with pytest.raises(ValueError, match="are the most"):
        client.swap(SWAP2CPU, [1], [1], events=[b"x" * messages.MAX_MESSAGE_NBYTES, None])
    assert client.under_way == 0 and client.result(client.swap(SWAP2CPU, [1], [1])).ok


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_client_after_fork(client: Client) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            client.swap(SWAP2CPU, [1], [1])
        except kvswap.Error as error:
            os._exit(0 if "fork()" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_one_source_may_go_to_many(client: Client) -> None:
    assert client.result(client.swap(SWAP2CPU, [3, 3], [1, 2])).ok


def test_the_same_id_twice(client: Client) -> None:
    client.swap(SWAP2CPU, [3], [1], task_id="one")
    with pytest.raises(ValueError, match="'one' is of a task whose result is not collected"):
        client.swap(SWAP2CPU, [3], [1], task_id="one")
    assert client.result("one").ok


def test_a_full_queue_is_an_answer() -> None:
    with Manager(2, "--queue_limit", "4", "--rank_timeout", "60") as manager:
        client = manager.ready_client()
        manager.signal(1, signal.SIGSTOP)
        tasks = [client.swap(SWAP2CPU, [i], [i]) for i in range(4)]
        for _ in range(20):
            with pytest.raises(kvswap.QueueFull, match="4 tasks are under way"):
                client.swap(SWAP2CPU, [5], [5])
        manager.signal(1, signal.SIGCONT)
        assert all(client.result(task, PATIENCE).ok for task in tasks)
        assert client.result(client.swap(SWAP2CPU, [5], [5])).ok


# -- ranks that fail --------------------------------------------------------------------------------------------------


def test_a_rank_that_is_killed() -> None:
    """What it had in hand is reported failed with its number, once and soon; the others go on; it comes back."""
    with Manager(4) as manager:
        client = manager.ready_client()
        model = Model(manager, client)
        model.write(range(GPU_BLOCKS))
        first = [client.swap(SWAP2CPU, [i], [i]) for i in range(4)]
        assert all(client.result(task).ok for task in first)
        manager.signal(2, signal.SIGSTOP)
        tasks = [client.swap(SWAP2CPU, [i], [8 + i]) for i in range(20)]
        begun = time.monotonic()
        manager.kill(2)
        results = [client.next_result(PATIENCE) for _ in tasks]
        assert time.monotonic() - begun < AT_ONCE
        assert sorted(result.transfer_task_id for result in results) == sorted(tasks)
        assert {(result.ok, result.rank) for result in results} == {(False, 2)}
        assert all("rank 2" in result.reason and "died" in result.reason for result in results)
        with pytest.raises(NotReady, match="rank 2 of 4 is not there"):
            client.swap(SWAP2CPU, [1], [1])
        manager.start(2)
        refused = "rank 2 has created caches that the engine has not opened"
        until(lambda: refused in client.status()["why_not"], "the rank")
        with pytest.raises(NotReady, match=r"it does by handles\(\)"):
            client.swap(SWAP2CPU, [1], [1])
        assert [rank["generation"] for rank in client.handles()] != [rank["generation"] for rank in model.told]
        client.wait_ready(PATIENCE)
        result = client.result(client.swap(SWAP2GPU, [9], [1]))
        assert not result.ok and result.rank == 2 and "holds nothing" in result.reason
        assert client.result(client.swap(SWAP2CPU, [9], [1])).ok
        assert client.result(client.swap(SWAP2GPU, [10], [1])).ok
        with pytest.raises(TimeoutError):
            client.next_result(0.2)  # nothing is reported twice
        model.close()


def test_a_rank_that_is_silent() -> None:
    with Manager(2, "--rank_timeout", "4") as manager:
        client = manager.ready_client()
        manager.signal(1, signal.SIGSTOP)
        task = client.swap(SWAP2CPU, [1], [1])
        result = client.result(task, PATIENCE)
        assert not result.ok and result.rank == 1 and "silent for 4 s" in result.reason
        manager.signal(1, signal.SIGCONT)  # the rank connects again and drops its earlier tasks
        client.wait_ready(PATIENCE)
        result = client.result(client.swap(SWAP2GPU, [2], [1]))
        assert not result.ok and result.rank == 1 and "holds nothing" in result.reason
        assert client.result(client.swap(SWAP2CPU, [1], [1])).ok
        assert client.result(client.swap(SWAP2GPU, [2], [1])).ok


def test_rank_0_is_stopped_for_a_while() -> None:
    """It does not take the others for dead because it was away itself."""
    with Manager(2, "--rank_timeout", "6") as manager:
        client = manager.ready_client()
        manager.signal(0, signal.SIGSTOP)

        def swap() -> str:
            with pytest.raises(TimeoutError) as caught:
                client.swap(SWAP2CPU, [1], [1], task_id="late", timeout=0.3)
            return str(caught.value)

        until(lambda: "rank 0 did not answer" in swap(), "a task that was sent")
        time.sleep(6.5)
        manager.signal(0, signal.SIGCONT)
        assert client.result("late", PATIENCE).ok
        assert client.result(client.swap(SWAP2CPU, [1], [1])).ok
        assert "lost" not in manager.log(0)


def test_a_task_that_takes_too_long() -> None:
    """It is reported, and no other is taken while the rank may still write its blocks."""
    with Manager(2, "--rank_timeout", "60", "--task_timeout", "0.5") as manager:
        client = manager.ready_client()
        manager.signal(1, signal.SIGSTOP)
        result = client.result(client.swap(SWAP2CPU, [1], [1]), PATIENCE)
        assert not result.ok and result.rank == 1 and "took longer than 0.5 s" in result.reason
        with pytest.raises(NotReady, match="rank 1 still works on a task"):
            client.swap(SWAP2CPU, [2], [2])
        manager.signal(1, signal.SIGCONT)
        client.wait_ready(PATIENCE)
        assert client.result(client.swap(SWAP2CPU, [2], [2])).ok
        with pytest.raises(TimeoutError):
            client.next_result(0.1)


def test_rank_0_is_killed() -> None:
    """Clients are told at once; the other rank waits for it, and goes on when it is started again."""
    with Manager(2) as manager:
        client = manager.ready_client()
        manager.signal(1, signal.SIGSTOP)
        tasks = [client.swap(SWAP2CPU, [i], [i]) for i in range(5)]
        begun = time.monotonic()
        manager.kill(0)
        results = [client.next_result(PATIENCE) for _ in tasks]
        assert time.monotonic() - begun < AT_ONCE
        assert {(result.ok, result.rank) for result in results} == {(False, 0)} and "died" in results[0].reason
        assert results[0].gpu_block_ids == [0] and results[0].event_type == 1
        manager.signal(1, signal.SIGCONT)
        assert manager.segments()  # left behind, as is the socket
        manager.start(0)
        client.wait_started(PATIENCE)
        with pytest.raises(NotReady, match="rank 0 has created caches"):
            client.swap(SWAP2CPU, [1], [1])
        client.attach()  # the engine has opened them
        assert client.result(client.swap(SWAP2CPU, [1], [1])).ok
        assert "has ended: " in manager.log(1)  # what it was given is not done behind the client's back


def test_all_are_killed_and_started_again() -> None:
    with Manager(2) as manager:
        manager.ready_client()
        for rank in (0, 1):
            manager.kill(rank)
        assert (manager.directory / "manager.sock").exists() and manager.segments()
        for rank in (0, 1):
            manager.start(rank)
        client = manager.ready_client()
        model = Model(manager, client)
        model.write([1, 2])
        assert client.result(model.swap(SWAP2CPU, [1, 2], [3, 4])).ok
        model.check_host()
        model.close()


def test_a_rank_twice(shared: Manager, client: Client) -> None:
    """The second one ends, the first one is not disturbed."""
    for rank in (0, 1):
        first = shared.processes[rank]
        second = shared.start(rank)
        shared.processes[rank] = first
        assert second.wait(PATIENCE) == 3
        assert f"rank {rank} runs already in" in shared.log(rank)
    assert client.result(client.swap(SWAP2CPU, [1], [1])).ok


def test_a_rank_with_another_shape() -> None:
    with Manager(2) as manager:
        client = manager.ready_client()
        manager.kill(1)
        other = manager.start(1, "--num_cpu_blocks", "33")
        assert other.wait(PATIENCE) == 3
        manager.processes[1] = None
        assert "rank 0 refuses this rank" in manager.log(1) and "33 host blocks" in manager.log(1)
        manager.start(1)
        client.wait_started(PATIENCE)
        client.handles()
        client.wait_ready(PATIENCE)


# -- clearing and restoring -------------------------------------------------------------------------------------------


def test_clear_in_the_middle_twice_and_restore() -> None:
    """Swaps that were taken end, others are refused; freed once; new handles, and old ones open no more."""
    with Manager(2) as manager:
        client, other = manager.ready_client(), manager.ready_client()
        model = Model(manager, client)
        for generation in range(2):
            model.write(range(GPU_BLOCKS))
            tasks = [model.swap_some() for _ in range(200)]
            errors: list[BaseException] = []
            threads = [threading.Thread(target=_clear, args=(each, errors)) for each in (client, other)]
            for thread in threads:
                thread.start()
            refused = None
            while refused is None:
                try:
                    tasks.append(model.swap_some())
                except NotReady as error:
                    refused = str(error)
            for thread in threads:
                thread.join(PATIENCE)
            assert errors == [] and "CLEAR" in refused
            assert all(result.ok for result in model.collect(len(tasks)))
            assert client.status()["state"] == "CLEARED" and manager.segments() == []
            client.clear()
            with pytest.raises(NotReady, match="CLEARED"):
                client.swap(SWAP2CPU, [1], [1])
            old = model.told
            model.written[:] = False
            model.close()
            client.restore()
            client.restore()
            assert client.status()["state"] == "NORMAL"
            new = client.handles()
            assert all(b["generation"] > a["generation"] for a, b in zip(old, new, strict=True))
            for rank in (0, 1):
                data = next(iter(old[rank]["handles"].values()))
                with pytest.raises(ValueError, match="generation"):
                    memory.open(data, generation=new[rank]["generation"])
                with pytest.raises((ValueError, kvswap.Error)):
                    memory.open(data)
            model.open()
            model.check()  # zeros
            assert not client.result(client.swap(SWAP2GPU, [1], [1])).ok, generation
        model.write([5])
        assert client.result(model.swap(SWAP2CPU, [5], [6])).ok
        model.check_host()
        model.close()


def _clear(client: Client, errors: list[BaseException]) -> None:
    try:
        client.clear(PATIENCE)
    except BaseException as error:
        errors.append(error)


def test_a_clear_that_fails_half_way() -> None:
    """A rank dies in it: the state says so, nothing is taken, and the same call goes on when the rank is back."""
    with Manager(2, "--rank_timeout", "60") as manager:
        client = manager.ready_client()
        manager.signal(1, signal.SIGSTOP)
        with pytest.raises(ManagerError, match="rank 1 is clearing") as caught:
            client.clear(0.5)
        assert caught.value.code == "timeout"
        status = client.status()
        assert status["state"] == "CLEARING" and "rank 1" in status["last_failure"]
        with pytest.raises(NotReady, match="CLEARING"):
            client.swap(SWAP2CPU, [1], [1])
        with pytest.raises(ManagerError, match="clear again first"):
            client.restore()
        manager.kill(1)
        until(lambda: not client.status()["ranks"][1]["here"], "news of its end")
        with pytest.raises(ManagerError, match="rank 1 is not there"):
            client.clear(0.3)
        manager.start(1)
        client.clear(PATIENCE)
        assert client.status()["state"] == "CLEARED"
        client.restore()
        assert client.result(client.swap(SWAP2CPU, [1], [1])).ok


def test_rank_0_is_killed_while_cleared() -> None:
    """It remembers: the engine's memory is given back, and nothing is allocated until it says so."""
    with Manager(2) as manager:
        client = manager.ready_client()
        client.clear()
        manager.kill(0)
        manager.start(0)
        until(lambda: _state(client) == "CLEARED", "a state")
        assert manager.segments() == []
        until(lambda: all(rank["here"] for rank in client.status()["ranks"]), "the ranks")
        client.restore()
        client.wait_ready(PATIENCE)


def _state(client: Client) -> str:
    try:
        return str(client.status(1)["state"])
    except (ManagerError, TimeoutError):
        return ""


def test_kept_swap_space_holds_nothing_either() -> None:
    with Manager(1, "--keep_swap_space") as manager:
        client = manager.ready_client()
        client.result(client.swap(SWAP2CPU, [1], [1]))
        client.clear()
        client.restore()
        assert "holds nothing" in client.result(client.swap(SWAP2GPU, [1], [1])).reason


# -- draining and stopping --------------------------------------------------------------------------------------------


def test_drain(client: Client) -> None:
    tasks = [client.swap(SWAP2CPU, [i], [i]) for i in range(20)]
    client.drain()
    status = client.status()
    assert status["under_way"] == 0 and status["draining"] and not status["ready"]
    with pytest.raises(NotReady, match="draining"):
        client.swap(SWAP2CPU, [1], [1])
    client.drain(undo=True)
    assert all(client.result(task).ok for task in tasks)
    assert client.result(client.swap(SWAP2CPU, [1], [1])).ok


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["rank 0 first", "rank 1 first"])
def test_sigterm_loses_nothing(order: tuple[int, int]) -> None:
    with Manager(2) as manager:
        client = manager.ready_client()
        tasks = [client.swap(SWAP2CPU, [i % GPU_BLOCKS], [i % CPU_BLOCKS]) for i in range(300)]
        for rank in order:
            manager.signal(rank, signal.SIGTERM)
        results = [client.next_result(PATIENCE) for _ in tasks]
        assert sorted(result.transfer_task_id for result in results) == sorted(tasks)
        assert [result.reason for result in results if not result.ok] == []
        assert [manager.wait(rank) for rank in (0, 1)] == [0, 0]
        assert all(f"step=stop rank={rank} ok=True" in manager.log(rank) for rank in (0, 1))
        assert not (manager.directory / "manager.sock").exists() and manager.segments() == []
        with pytest.raises(TimeoutError, match="does rank 0 run"):
            client.status(0.2)


def test_sigterm_of_one_rank() -> None:
    """It ends what it has, and tasks are refused from then on."""
    with Manager(2) as manager:
        client = manager.ready_client()
        tasks = [client.swap(SWAP2CPU, [i % GPU_BLOCKS], [i % CPU_BLOCKS]) for i in range(100)]
        manager.signal(1, signal.SIGTERM)
        assert manager.wait(1) == 0
        assert all(client.result(task, PATIENCE).ok for task in tasks)
        with pytest.raises(NotReady, match="rank 1"):
            client.swap(SWAP2CPU, [1], [1])


# -- clients ----------------------------------------------------------------------------------------------------------


def test_a_client_that_dies(shared: Manager, client: Client) -> None:
    """Its tasks end, their results go nowhere, and others are served on."""
    script = f"""
        import os, signal
        from kvswap.fastdeploy.client import Client
        client = Client({str(shared.directory)!r})
        for i in range(50):
            client.swap(1, [i % 20], [i % 30])
        os.kill(os.getpid(), signal.SIGKILL)
    """
    before = client.status()["done"]
    assert _run(script).returncode == -signal.SIGKILL
    until(lambda: client.status()["done"] >= before + 50, "the dead client's tasks")
    until(lambda: client.status()["undelivered"] == 0, "its results to be dropped")
    assert client.result(client.swap(SWAP2CPU, [1], [1])).ok


def _run(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    places = [str(Path(kvswap.__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_many_clients_one_after_the_other(shared: Manager, client: Client) -> None:
    """Those that have gone are forgotten."""
    for _ in range(300):
        with Client(shared.directory) as short:
            assert short.status(PATIENCE)["state"] == "NORMAL"
    assert client.status()["ready"]


def test_threads_share_a_client(client: Client) -> None:
    taken: list[str] = []
    ended: list[str] = []

    def put(first: int) -> None:
        taken.extend(client.swap(SWAP2CPU, [first + i % 4], [first + i % 4]) for i in range(40))

    def get() -> None:
        ended.extend(client.next_result(PATIENCE).transfer_task_id for _ in range(80))

    threads = [threading.Thread(target=put, args=(4 * i,)) for i in range(4)]
    threads += [threading.Thread(target=get) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(taken) == 160 and sorted(taken) == sorted(ended)


def test_asyncio(shared: Manager) -> None:
    async def use() -> None:
        async with AsyncClient(shared.directory) as client:
            await client.wait_started(PATIENCE)
            await client.attach()
            await client.wait_ready(PATIENCE)
            tasks = await asyncio.gather(*(client.swap(SWAP2CPU, [i], [i]) for i in range(20)))
            results = await asyncio.gather(*(client.result(task) for task in tasks))
            assert all(result.ok for result in results)
            with pytest.raises(TimeoutError):
                await client.next_result(0.05)
            waiting = asyncio.ensure_future(client.next_result(PATIENCE))
            await asyncio.sleep(0.02)
            waiting.cancel()  # takes nobody's result away
            await asyncio.gather(waiting, return_exceptions=True)
            task = await client.swap(SWAP2GPU, [1], [1])
            assert (await client.next_result()).transfer_task_id == task
            with pytest.raises(ManagerError, match="Invalid enum value 9"):
                await client.swap(9, [1], [1])
            assert (await client.status())["ready"]
            assert len(await client.handles()) == 2
            await client.drain()
            await client.drain(undo=True)
            await client.clear()
            await client.restore()

    asyncio.run(use())


def test_no_manager(tmp_path: Path) -> None:
    with pytest.raises(kvswap.Error, match="no manager was started"):
        Client(tmp_path / "none")
    tmp_path.chmod(0o700)
    with Client(tmp_path) as client, pytest.raises(TimeoutError, match="does rank 0 run"):
        client.status(0.1)


# -- who may talk to it, and how --------------------------------------------------------------------------------------


def test_malformed_messages(shared: Manager, client: Client) -> None:
    """A thousand of them: each is answered or dropped, and tasks are served beside them."""
    random = np.random.default_rng(5)
    good = messages.encode(messages.Submit(1, messages.Task("a", messages.Kind.SWAP2CPU, [1], [1])))
    kinds = (
        lambda: random.bytes(int(random.integers(0, 200))),
        lambda: good[: int(random.integers(0, len(good)))],
        lambda: bytes(b ^ int(random.integers(0, 256)) if random.random() < 0.1 else b for b in good),
        lambda: b"\x91" * int(random.integers(100, 100_000)),  # lists in lists in lists
        lambda: b"\xc7\xff" + random.bytes(8),
        lambda: messages.encode({"type": "Submit", "request": -1, "task": {}}),
        lambda: messages.encode({"type": "Submit", "request": 1 << 63, "task": None}),
        lambda: messages.encode({"type": "Nothing"}),
        lambda: messages.encode({"type": "Beat", "rank": 1, "ready": True, "phase": "", "generation": 1}),
        lambda: messages.encode({"type": "Hello", "rank": 7, "shape": "?"}),
    )
    context: zmq.Context[Any] = zmq.Context()
    raw = context.socket(zmq.DEALER)
    raw.connect(f"ipc://{places.socket_path(shared.directory)}")
    before, codes = client.status()["failed"], collections.Counter()  # type: collections.Counter[str]
    for i in range(1000):
        if i % 50 == 7:
            raw.send_multipart([b"two", b"parts"])
        else:
            raw.send(kinds[i % len(kinds)]())
        if i % 100 == 0:
            assert client.result(client.swap(SWAP2CPU, [2], [2])).ok
        while raw.poll(0):
            codes.update(str(getattr(_read(raw.recv()), "code", "")).split())
    while raw.poll(200):
        codes.update(str(getattr(_read(raw.recv()), "code", "")).split())
    raw.close(0)
    context.term()
    assert codes["malformed"] > 500
    assert client.status()["failed"] == before and client.status()["ready"]


def _read(data: bytes) -> Any:
    for decoder in (messages.to_client, messages.to_rank):
        try:
            return decoder.decode(data)
        except Exception:
            continue
    return None


def test_a_message_that_is_too_long(shared: Manager, client: Client) -> None:
    context: zmq.Context[Any] = zmq.Context()
    raw = context.socket(zmq.DEALER)
    raw.connect(f"ipc://{places.socket_path(shared.directory)}")
    raw.send(b"\0" * (messages.MAX_MESSAGE_NBYTES + 1))
    assert not raw.poll(300)
    raw.close(0)
    context.term()
    assert client.status()["ready"]


def test_answers_that_a_client_does_not_read_have_a_limit(shared: Manager, client: Client) -> None:
    """libzmq keeps some 10,000 of them (SNDHWM), and as many questions (RCVHWM). What is more is dropped, and other
    clients are served."""
    context: zmq.Context[Any] = zmq.Context()
    raw, asked = context.socket(zmq.DEALER), 50_000
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        raw.setsockopt(option, 1)
    raw.connect(f"ipc://{places.socket_path(shared.directory)}")
    for request in range(asked):
        raw.send(messages.encode(messages.Ask(request, "status")))
    assert client.result(client.swap(SWAP2CPU, [2], [2])).ok
    answers = sum(1 for _ in iter(lambda: raw.poll(2000) and raw.recv(), 0))
    raw.close(0)
    context.term()
    assert 1000 < answers < asked, answers


STRANGER = """
    import os, sys, zmq
    from kvswap.fastdeploy.manager import messages
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    context = zmq.Context()
    raw = context.socket(zmq.DEALER)
    raw.connect("ipc://" + sys.argv[1])
    raw.send(messages.encode(messages.Ask(1, "status")))
    print("answered" if raw.poll(1000) else "silence")
    raw.close(0)
    context.term()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(shared: Manager, client: Client) -> None:
    """Twice: by the folder, and if that were open by what the kernel says of the message's sender."""
    path = places.socket_path(shared.directory)

    def ask() -> str:
        ended = _run(STRANGER, str(path))
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    assert ask() == "silence"
    folders = [shared.directory, shared.directory.parent]
    modes = [(folder, folder.stat().st_mode) for folder in folders]
    try:
        for folder in folders:
            folder.chmod(0o755)
        path.chmod(0o777)
        assert ask() == "silence"
    finally:
        for folder, mode in modes:
            folder.chmod(mode)
        path.chmod(0o700)
    assert "message of user 65534" in shared.log(0)
    assert client.result(client.swap(SWAP2CPU, [1], [1])).ok


def test_folders_of_others_are_not_entered(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(kvswap.Error, match="mode 755: it must be 700"):
        Client(folder)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(kvswap.Error, match="no folder"):
        Client(link)
    folder.chmod(0o700)
    for mode in (0o777, 0o770):
        tmp_path.chmod(mode)
        with pytest.raises(kvswap.Error, match="others could put another folder in the place"):
            Client(folder)
    tmp_path.chmod(0o1777)  # as /tmp is
    Client(folder).close()
    tmp_path.chmod(0o700)
    if os.getuid() == 0:
        os.chown(folder, 65534, 65534)
        with pytest.raises(kvswap.Error, match="belongs to user 65534"):
            Client(folder)


def test_nothing_is_world_readable(shared: Manager) -> None:
    modes = {path.name: path.stat().st_mode & 0o077 for path in [shared.directory, *shared.directory.iterdir()]}
    assert set(modes.values()) == {0} and "manager.sock" in modes
    for name in shared.segments():
        assert Path("/dev/shm", name).stat().st_mode & 0o777 == 0o600


# -- the engine's caches ----------------------------------------------------------------------------------------------


class Engine:
    """Caches of an engine: allocated here, opened by the managers."""

    def __init__(self, manager: Manager, names: list[str], nbytes: int) -> None:
        self.device = [kvswap.Device(f"host:{rank}") for rank in range(manager.ranks)]
        self.caches = [[device.alloc(nbytes) for _ in names] for device in self.device]
        self.names = [
            [name.format(rank=rank, device=manager.device_id + rank) for name in names] for rank in range(manager.ranks)
        ]
        for rank in self.caches:
            for cache in rank:
                np.asarray(cache)[:] = 0

    def handles(self) -> list[dict[str, bytes]]:
        return [
            {name: memory.export(cache).to_bytes() for name, cache in zip(names, caches, strict=True)}
            for names, caches in zip(self.names, self.caches, strict=True)
        ]

    def segments(self) -> None:
        for names, caches in zip(self.names, self.caches, strict=True):
            for name, cache in zip(names, caches, strict=True):
                ipc.set_data_ipc(cache, name)

    def free(self) -> None:
        for names, caches in zip(self.names, self.caches, strict=True):
            for name, cache in zip(names, caches, strict=True):
                ipc.unlink_segment(name)
                cache.free()


NAMES = [f"{kind}_caches_{layer}_rank{{rank}}.device{{device}}" for layer in (0, 1) for kind in ("key", "value")]
CACHE_NBYTES = int(np.prod(SHAPE)) * 2


@pytest.mark.parametrize("by", ["handles", "segments"])
def test_attach_to_the_engines_caches(by: str) -> None:
    with Manager(2, create=False) as manager:
        engine = Engine(manager, NAMES, CACHE_NBYTES)
        client = manager.client()

        def waits() -> str:
            with pytest.raises(TimeoutError) as caught:
                client.wait_ready(1)
            return str(caught.value)

        until(lambda: re.search(r"waits for attach\(\)|not there", waits()), "ranks that wait for their caches")
        with pytest.raises(ManagerError, match="there is no segment" if by == "segments" else "no handle of"):
            client.attach(None if by == "segments" else [{}, {}])
        assert not client.status()["ready"]
        if by == "segments":
            engine.segments()
            client.attach()
        else:
            client.attach(engine.handles())
        _swap_there_and_back(client, engine)
        manager.kill(1)  # it is given the caches again when it is back
        manager.start(1)
        client.wait_ready(PATIENCE)
        _swap_there_and_back(client, engine)
        client.clear()
        engine.free()
        with pytest.raises(ManagerError, match=r"rank \d: "):
            client.restore()
        assert client.status()["state"] == "UPDATING"
        engine = Engine(manager, NAMES, CACHE_NBYTES)
        if by == "segments":
            engine.segments()
        client.restore(None if by == "segments" else engine.handles())
        _swap_there_and_back(client, engine)
        client.clear()
        engine.free()


def _swap_there_and_back(client: Client, engine: Engine) -> None:
    """Blocks 1, 2 -> host -> 3, 4, in all caches of all ranks."""
    client.wait_ready(PATIENCE)
    block = CACHE_NBYTES // SHAPE[0]
    random = np.random.default_rng(3)
    for caches in engine.caches:
        for cache in caches:
            np.asarray(cache)[:] = random.integers(0, 256, CACHE_NBYTES, np.uint8)
    for kind, gpu_ids in ((SWAP2CPU, [1, 2]), (SWAP2GPU, [3, 4])):
        result = client.result(client.swap(kind, gpu_ids, [9, 7]))
        assert result.ok, result.reason
    for caches in engine.caches:
        for cache in caches:
            found = np.asarray(cache).reshape(-1, block)
            np.testing.assert_array_equal(found[[3, 4]], found[[1, 2]])


def test_attach_tells_other_shapes() -> None:
    with Manager(1, create=False) as manager:
        engine = Engine(manager, NAMES, CACHE_NBYTES // 2)
        client = manager.client()
        client.wait_started(PATIENCE)
        with pytest.raises(ManagerError, match=rf"{CACHE_NBYTES // 2} bytes, but the cache has {CACHE_NBYTES}"):
            client.attach(engine.handles())
        engine.free()


def test_attach_tells_segments_of_one_allocation() -> None:
    """As FastDeploy's own op writes them for tensors that share an allocation: all would be its beginning."""
    with Manager(1, create=False) as manager:
        engine = Engine(manager, NAMES, CACHE_NBYTES)
        engine.segments()
        first = Path("/dev/shm", engine.names[0][0])
        Path("/dev/shm", engine.names[0][2]).write_bytes(first.read_bytes())
        client = manager.client()
        client.wait_started(PATIENCE)
        with pytest.raises(ManagerError, match=r"key_caches_1.* same memory as .*key_caches_0"):
            client.attach()
        engine.free()


@pytest.mark.parametrize("kind", ["key only", "scales", "extra layers", "slab"])
def test_kinds_of_caches(kind: str) -> None:
    """Data and scales, layers and extra layers move together."""
    shape = "24,2,4,8"
    options = {
        "key only": ["--num_layers", "3", "--key_cache_shape", shape],
        "scales": ["--num_layers", "2", "--key_cache_shape", shape, "--value_cache_shape", shape, "--cache_dtype",
                   "block_wise_fp8", "--default_dtype", "bfloat16"],
        "extra layers": ["--num_layers", "2", "--num_gpu_blocks", "24", "--kv_num_head", "2", "--block_size", "4",
                         "--head_dim", "8", "--speculative_config",
                         '{"num_extra_cache_layer": 1, "num_gpu_block_expand_ratio": 0.75}'],
        "slab": ["--num_layers", "2", "--key_cache_shape", shape, "--value_cache_shape", shape, "--slab"],
    }[kind]  # fmt: skip
    counts = {"key only": 3, "scales": 8, "extra layers": 6, "slab": 4}
    with Manager(1, *options, model=("--num_cpu_blocks", "8")) as manager:
        client = manager.ready_client()
        told = client.handles()[0]
        assert len(told["handles"]) == counts[kind]
        assert len(manager.segments()) == (0 if kind == "slab" else counts[kind])
        caches = {name: memory.open(data) for name, data in told["handles"].items()}
        random, before = np.random.default_rng(1), {}
        for name, cache in caches.items():
            blocks = 18 if "_2_" in name and kind == "extra layers" else 24
            view = np.asarray(cache).view(np.uint8).reshape(blocks, -1)
            view[:] = random.integers(0, 256, view.shape, np.uint8)
            before[name] = view.copy()
            del view  # close() refuses while it is there
        for swap, ids in ((SWAP2CPU, [3, 17]), (SWAP2GPU, [0, 5])):
            assert client.result(client.swap(swap, ids, [7, 2])).ok
        for name, cache in caches.items():
            before[name][[0, 5]] = before[name][[3, 17]]
            np.testing.assert_array_equal(np.asarray(cache).view(np.uint8).reshape(before[name].shape), before[name])
        if kind == "extra layers":
            with pytest.raises(ManagerError, match=r"must be in \[0, 18\)"):
                client.swap(SWAP2CPU, [18], [0])
        for cache in caches.values():
            cache.close()


# -- the command, the queue by FastDeploy's names, metrics -------------------------------------------------------------


def test_status_and_drain_on_the_command_line(shared: Manager, client: Client) -> None:
    def kvswap_manager(*args: str) -> str:
        command = ["manager", *args, "--socket_dir", str(shared.directory)]
        ended = _run("import sys\nfrom kvswap.cli import main\nsys.exit(main(sys.argv[1:]))", *command)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    text = kvswap_manager("status")
    assert "NORMAL, ready" in text and "rank 1" in text and "float16" in text
    found = json.loads(kvswap_manager("status", "--json"))
    assert found["ready"] and len(found["ranks"]) == 2
    assert json.loads(kvswap_manager("drain", "--timeout", "20", "--json"))["draining"]
    assert client.status()["draining"]
    with pytest.raises(NotReady, match=r"is draining; kvswap manager drain --undo"):
        client.swap(SWAP2CPU, [0], [0])
    kvswap_manager("drain", "--undo")
    assert client.status()["ready"]


class CacheStatus(SimpleNamespace):
    """An enum's member, as FastDeploy's."""


@pytest.mark.parametrize("newer", [False, True])
def test_the_queue_by_fastdeploys_names(
    monkeypatch: pytest.MonkeyPatch, shared: Manager, client: Client, newer: bool
) -> None:
    monkeypatch.setattr(places, "default_directory", lambda port, number: shared.directory)
    queue = EngineCacheQueue(("127.0.0.1", 9923), b"", False, 2, 0, 1, 0)

    def item(kind: int, gpu_ids: list[int], cpu_ids: list[int], name: str) -> tuple[Any, ...]:
        status, nodes = CacheStatus(value=kind), [4, 5]
        return (status, name, nodes, gpu_ids, cpu_ids) if newer else (nodes, gpu_ids, cpu_ids, status, name)

    client.clear()
    client.restore()
    assert queue.get_transfer_done_signal() is None and queue.empty()
    put = [item(1, [i], [i], f"t{i}") for i in range(5)]
    for each in put:
        queue.put_transfer_task(each)
    got = [until(queue.get_transfer_done_signal, "a result") for _ in put]
    assert sorted(got, key=str) == sorted(put, key=str) and queue.empty()
    assert all(any(a is b for b in put) for a in got)
    bad = item(2, [1], [31], "bad")
    queue.put_transfer_task(bad)
    with pytest.raises(TaskFailed, match="holds nothing") as caught:
        until(queue.get_transfer_done_signal, "a failure")
    assert caught.value.item is bad or caught.value.item == bad
    with pytest.raises(ValueError, match="has 5 items"):
        queue.put_transfer_task((CacheStatus(value=4), "storage"))
    with pytest.raises(ManagerError, match="Invalid enum value 7"):
        queue.put_transfer_task(item(7, [1], [1], "seven"))
    assert queue.get_server_port() == 9923
    queue.close()


def test_metrics_and_json_logs() -> None:
    pytest.importorskip("prometheus_client")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with Manager(1, "--metrics_port", str(port), "--log_format", "json") as manager:
        client = manager.ready_client()
        assert client.result(client.swap(SWAP2CPU, [1], [2], task_id="seen")).ok
        assert not client.result(client.swap(SWAP2GPU, [1], [3])).ok
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as answer:
            text = answer.read().decode()
        assert 'kvswap_manager_tasks_total{rank="0",state="done",type="SWAP2CPU"} 1.0' in text
        assert 'kvswap_manager_tasks_total{rank="0",state="failed",type="SWAP2GPU"} 1.0' in text
        assert 'kvswap_manager_bytes_total{rank="0",type="SWAP2CPU"} 512.0' in text
        assert 'kvswap_transfer_bytes_total{device="host:0",direction="d2h"' in text  # of the rank's device too
        lines = [json.loads(line) for line in manager.log(0).splitlines()]
        seen = [line for line in lines if line.get("task") == "seen"]
        assert len(seen) == 1 and seen[0]["ok"] and seen[0]["bytes"] == 512 and seen[0]["type"] == "SWAP2CPU"


def test_a_model_that_does_not_fit() -> None:
    """The process ends and says so."""
    manager = Manager(1, model=("--num_gpu_blocks", "2000000000", "--head_dim", "100000"))
    manager.start(0)
    assert manager.wait(0) == 3
    assert "kvswap: MemoryError" in manager.log(0).splitlines()[-1]
    manager.__exit__()
