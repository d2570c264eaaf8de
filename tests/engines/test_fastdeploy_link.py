"""A client whose rank 0 dies, or never was: what was asked ends, once, with what is known of it."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import asyncio
import collections
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

import zmq
from conftest import AT_ONCE, PATIENCE, ROOT, until
from managers import Manager

import kvswap
from kvswap.fastdeploy import _link
from kvswap.fastdeploy.client import SWAP2CPU, SWAP2GPU, AsyncClient, Client, ManagerError
from kvswap.fastdeploy.manager import messages, places, process
from kvswap.fastdeploy.queue import EngineCacheQueue

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")

SOCKET = """
    import os, sys, zmq
    from kvswap.fastdeploy.manager import messages
    from kvswap.fastdeploy.manager.messages import Answer, Ask, Result, Submit
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind("ipc://" + sys.argv[1])
    print("bound", flush=True)

    def take():
        name, data = socket.recv_multipart()
        message = messages.to_server.decode(data)
        print(type(message).__name__, flush=True)
        return name, message

    def say(name, message):
        socket.send_multipart([name, messages.encode(message)])

"""


class Fake:
    """A rank 0 that does what a test needs: a process with a script for its socket."""

    def __init__(self, folder: Path, script: str) -> None:
        path = places.socket_path(folder)
        path.unlink(missing_ok=True)
        lines = [line[4:] for line in (SOCKET + script).splitlines()]
        places_of = [str(Path(kvswap.__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, "-c", "\n".join(lines), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT / "tests",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places_of)},
        )
        self.heard("bound")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def heard(self, what: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == what

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


SILENT = """
    while True:
        name, message = take()
        if isinstance(message, Ask):
            say(name, Answer(message.request, "ok"))
"""
TAKES = """
    while True:
        name, message = take()
        say(name, Answer(message.request, "ok"))
"""


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """What it returned, or raised."""
    told: list[Any] = []

    def run() -> None:
        try:
            told.append(call())
        except BaseException as error:
            told.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def ended() -> Any:
        thread.join(PATIENCE)
        (only,) = told
        return only

    return ended


def nothing_left(client: Client) -> None:
    """Neither a result nor anything that is kept for one."""
    assert client.under_way == 0
    with pytest.raises(TimeoutError):
        client.next_result(0.05)
    kept = {
        name: value for name, value in vars(client._link).items() if isinstance(value, dict | set | collections.deque)
    }
    assert not any(kept.values()), kept


@pytest.mark.parametrize("heard_before", [True, False])
def test_rank_0_dies_while_swap_awaits_its_answer(folder: Path, heard_before: bool) -> None:
    """The caller is told by the call, and by nothing else."""
    with Fake(folder, SILENT) as fake, Client(folder) as client:
        if heard_before:
            client.status()
            fake.heard("Ask")
        swap = in_thread(lambda: client.swap(SWAP2CPU, [1], [1], task_id="a", timeout=PATIENCE))
        fake.heard("Submit")
        begun = time.monotonic()
        fake.kill()
        error = swap()
        assert isinstance(error, ManagerError) and error.code == "died"
        assert time.monotonic() - begun < AT_ONCE
        nothing_left(client)
        with pytest.raises(ValueError, match="no task 'a'"):
            client.result("a")
        with Fake(folder, TAKES):  # the next one takes what the caller sends again
            assert client.swap(SWAP2CPU, [1], [1], task_id="a", timeout=PATIENCE) == "a" and client.under_way == 1


def test_rank_0_dies_after_swap_gave_up(folder: Path) -> None:
    """TimeoutError says that it has a result if it was taken: as nobody knows, it has one."""
    with Fake(folder, SILENT) as fake, Client(folder) as client:

        def swap() -> str:
            with pytest.raises(TimeoutError) as caught:
                client.swap(SWAP2CPU, [1], [1], task_id="a", timeout=0.2)
            return str(caught.value)

        until(lambda: "did not answer" in swap(), "somebody who takes it")
        assert client.under_way == 1
        fake.kill()
        result = client.next_result(PATIENCE)
        assert (result.transfer_task_id, result.ok) == ("a", False) and "died" in result.reason
        nothing_left(client)


def test_rank_0_dies_with_a_task(folder: Path) -> None:
    """Calls that wait for the task and later calls both report the failure."""
    with Fake(folder, TAKES) as fake, Client(folder) as client:
        for name in ("a", "b"):
            client.swap(SWAP2CPU, [1], [1], task_id=name)
        waits = in_thread(lambda: client.result("a", PATIENCE))
        fake.kill()
        assert not waits().ok and not client.next_result(PATIENCE).ok
        nothing_left(client)


def test_rank_0_dies_before_its_first_message_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process can no longer be watched then."""

    class Late(places.Peer):
        def __init__(self, frame: Any) -> None:
            fake.kill()
            super().__init__(frame)

    monkeypatch.setattr(places, "Peer", Late)
    with Fake(folder, TAKES) as fake, Client(folder) as client:
        client.swap(SWAP2CPU, [1], [1], task_id="a")
        assert "died" in client.result("a", PATIENCE).reason
        nothing_left(client)


def test_another_rank_0_is_there_at_once(folder: Path) -> None:
    """What the one before was asked is lost, what the new one is asked is not."""
    with Fake(folder, SILENT) as fake, Client(folder) as client:
        swap = in_thread(lambda: client.swap(SWAP2CPU, [1], [1], task_id="a", timeout=PATIENCE))
        fake.heard("Submit")
        fake.kill()
        with Fake(folder, TAKES) as new:
            later = in_thread(lambda: client.swap(SWAP2CPU, [1], [1], task_id="b", timeout=PATIENCE))
            assert getattr(swap(), "code", "") == "died" and later() == "b"
            new.kill()
            assert not client.result("b", PATIENCE).ok
            nothing_left(client)


def test_what_was_being_written_when_rank_0_died(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one does not know: the client does not ask it for such a block before its caller was told."""
    with Client(folder) as client:
        with Fake(folder, TAKES) as fake:
            for name, block in (("a", 1), ("b", 2)):
                client.swap(SWAP2GPU, [block], [block], task_id=name)
            monkeypatch.setattr(client._link, "_send", lambda socket: True)  # as if there were no room
            swap = in_thread(lambda: client.swap(SWAP2CPU, [7, 1], [1, 2], timeout=PATIENCE))
            until(lambda: client.under_way == 3, "a task that is not sent")
            fake.kill()
            error = swap()
            assert isinstance(error, ManagerError) and "gpu_block_ids[1] is 1: task 'a'" in str(error)
            assert client.under_way == 0
            monkeypatch.undo()
        with Fake(folder, TAKES):
            with pytest.raises(ManagerError, match=r"gpu_block_ids\[1\] is 1: task 'a', which should have written"):
                client.swap(SWAP2CPU, [7, 1], [1, 2])
            client.swap(SWAP2GPU, [1], [3])
            assert not client.result("a").ok
            client.swap(SWAP2CPU, [1], [4])
            with pytest.raises(ManagerError, match="task 'b'"):
                client.swap(SWAP2CPU, [2], [4])


def test_nobody_is_there(folder: Path) -> None:
    """What was given up before it was sent leaves nothing behind."""
    with Client(folder) as client:
        for _ in range(3):
            with pytest.raises(TimeoutError, match="does rank 0 run"):
                client.swap(SWAP2CPU, [1], [1], task_id="a", timeout=0.02)
        nothing_left(client)
        waits = in_thread(lambda: client.swap(SWAP2CPU, [1], [1], timeout=PATIENCE))
        until(lambda: client.under_way == 1, "a task")
    assert getattr(waits(), "code", "") == "closed"  # and no result comes from a client that is closed


def test_a_task_that_was_refused_after_the_caller_left(folder: Path) -> None:
    """Cancelled, or out of patience: it was not taken, so it is under way no more."""

    async def use() -> None:
        async with AsyncClient(folder) as client:
            swap = asyncio.ensure_future(client.swap(SWAP2CPU, [1], [1], task_id="a"))
            await asyncio.sleep(0.05)
            swap.cancel()  # nobody is there: it was not sent
            await asyncio.gather(swap, return_exceptions=True)
            assert client.under_way == 0
            with Fake(folder, TAKES) as fake:
                swap = asyncio.ensure_future(client.swap(SWAP2CPU, [1], [1], task_id="b"))
                await asyncio.to_thread(fake.heard, "Submit")
                await swap
                assert client.under_way == 1

    asyncio.run(use())


def test_an_answer_that_comes_with_the_end_of_patience(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the caller is told is what becomes of the task."""
    refusing = SILENT.replace("        if isinstance(message, Ask):\n    ", "").replace('"ok"', '"refused", "no"')
    with Fake(folder, refusing), Client(folder) as client:
        for i in range(200):
            try:
                client.swap(SWAP2CPU, [1], [1], task_id="a", timeout=0.0001 * (i % 10))
            except (TimeoutError, ManagerError) as error:
                assert isinstance(error, TimeoutError) or error.code == "refused"
            until(lambda: client.under_way == 0, "the answer")
        nothing_left(client)


LATE = """
    name, message = take()
    sys.stdin.readline()
    task = message.task
    say(name, Answer(message.request, "ok"))
    say(name, Result(task.transfer_task_id, 1, task.swap_node_ids, task.gpu_block_ids, task.cpu_block_ids, True))
    take()
"""


def test_the_queue_by_fastdeploys_names_keeps_what_may_be_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "default_directory", lambda port, number: folder)
    queue = EngineCacheQueue(timeout=0.2)
    item = ([4], [1], [2], SWAP2CPU, "a")

    def put() -> str:
        with pytest.raises(TimeoutError) as caught:
            queue.put_transfer_task(item)
        return str(caught.value)

    assert "nobody took" in put()
    with Fake(folder, LATE) as fake:
        until(lambda: "did not answer" in put(), "somebody who takes it")
        fake.go_on()
        assert until(queue.get_transfer_done_signal, "the task") is item and queue.empty()
    queue.close()


def test_who_sent_a_message() -> None:
    """A process that cannot be seen from here has no number: its end could not be noticed."""

    def frame(text: str) -> Any:
        return SimpleNamespace(get=lambda name: {"Peer-Address": text}[name])

    mine = os.getuid()
    assert places.Peer(frame(f"localhost:{mine}:0:17")).ours and not places.Peer(frame(f"localhost:{mine}:0:17")).unseen
    assert "another pid namespace" in places.Peer(frame(f"localhost:{mine}:0:0")).unseen
    assert not places.Peer(frame(f"localhost:{mine + 1}:0:17")).ours
    assert not places.Peer(frame("localhost")).ours


def test_a_manager_that_never_stops_talking(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The thread comes back to its own work, and its log does not grow with each message."""
    link = _link.Link(folder)
    link.close()
    frame = SimpleNamespace(get=lambda _: f"::{os.getuid()}:0:{os.getpid()}", buffer=b"\xc1")
    taken = []

    def recv_multipart(flags: int, copy: bool) -> Any:
        taken.append(1)
        assert len(taken) < 10_000
        return [frame]

    link._take(SimpleNamespace(recv_multipart=recv_multipart))
    assert 0 < len(taken) <= 1000 and len(caplog.records) == 1


def test_dropping_a_client_waits_for_nothing(folder: Path) -> None:
    """Not even for the lock: the collector may run in a thread that holds it."""
    client = Client(folder)
    link = client._link
    with link._lock:
        begun = time.monotonic()
        del client
        assert time.monotonic() - begun < AT_ONCE
    until(lambda: not link._thread.is_alive(), "its thread to end")
    with pytest.raises(kvswap.Error, match="the client is closed"):
        link.ask("status")
    link.close()


def test_a_manager_that_ends_does_not_wait_for_a_client_that_reads_nothing() -> None:
    """It is asked to read its last message, and given a few seconds; a client that reads has all its results."""
    with Manager(1) as manager, zmq.Context() as context:
        client, silent = manager.ready_client(), context.socket(zmq.DEALER)
        silent.connect(f"ipc://{places.socket_path(manager.directory)}")
        silent.send(messages.encode(messages.Ask(1, "status")))
        assert silent.poll(PATIENCE * 1000)  # it is known to rank 0
        task = client.swap(SWAP2CPU, [1], [1])
        manager.signal(0, signal.SIGTERM)
        assert manager.wait(0) == 0 and client.result(task, PATIENCE).ok
        silent.close(0)


def test_a_lock_or_a_state_that_is_no_file(tmp_path: Path) -> None:
    """Nobody waits for a pipe, and what a link points to is not written."""
    aside = tmp_path / "aside"
    aside.write_text("mine")
    os.mkfifo(tmp_path / "rank0.lock")
    os.mkfifo(tmp_path / "state")
    (tmp_path / "rank1.lock").symlink_to(aside)
    for rank in (0, 1):
        with pytest.raises(kvswap.Error, match=f"rank{rank}.lock is a link, directory, pipe"):
            places.Lock(tmp_path, rank)
    with pytest.raises(kvswap.Error, match="state is a link, directory, pipe"):
        process._read_state(tmp_path / "state")
    (tmp_path / "state").unlink()
    (tmp_path / "state").write_bytes(b"\xff" * 100)
    assert process._read_state(tmp_path / "state") == messages.State.NORMAL
    assert aside.read_text() == "mine"


def test_a_process_that_has_ended_can_be_watched() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(PATIENCE)
    watch = places.watch_process(ended.pid)
    assert watch is not None and zmq.select([watch], [], [], 0)[0] == [watch]
    os.close(watch)


def test_a_task_ends_while_a_caller_stops_waiting(folder: Path) -> None:
    """The result stays for the next caller."""
    with Fake(folder, TAKES) as fake, Client(folder) as client:
        waiter: Any = client._link.collect_next()
        client.swap(SWAP2CPU, [1], [1], task_id="a")
        fake.kill()
        until(waiter.done, "the end of the task")
        client._link.leave(waiter)
        assert client.next_result(PATIENCE).transfer_task_id == "a" and not client._link._waiters
        nothing_left(client)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_fork_that_finds_the_lock_taken(folder: Path) -> None:
    """The client's own thread may have held it: the child is told, and ends, instead of waiting for nobody."""
    with Client(folder) as client:
        with client._link._lock:
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)
                calls = (client.status, lambda: client.under_way, lambda: client.next_result(0.1), client.close)
                told = 0
                for call in calls:
                    try:
                        call()
                    except kvswap.Error as error:
                        told += "fork()" in str(error)
                os._exit(told)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
