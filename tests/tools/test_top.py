"""kvswap top and the socket that it asks: who may ask, what a bad client or server can do, and what is shown."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import stat
import struct
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE, comes_down, run_python, until
from processes import Process

import kvswap
from kvswap import _top_socket, cli, metrics, top

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")

REQUEST = b"kvswap-metrics 1\n"
MOVER = """
    from kvswap import metrics
    device = kvswap.Device("host:84")
    a, b, ids = np.zeros(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8), np.arange(256)
    def move(times):
        for _ in range(times):
            kvswap.swap_cache_per_layer(a, b, 4096, 256, 256, ids, ids, 0, device=device)
"""


@pytest.fixture(autouse=True)
def run_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the test's own for sockets, with a short name."""
    folder = Path(tempfile.mkdtemp(prefix="kvt"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("KVSWAP_TOP", raising=False)
    yield folder
    metrics.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def path() -> str:
    return metrics.serve()


@pytest.fixture
def mover(run_folder: Path) -> Iterator[Process]:
    with Process(MOVER, XDG_RUNTIME_DIR=str(run_folder), KVSWAP_TOP="1") as process:
        yield process


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "kvswap-top"]


def connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(PATIENCE)
    _top_socket._connect(connection, Path(path), time.monotonic() + PATIENCE)
    return connection


def read_all(connection: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


# -- the socket -------------------------------------------------------------------------------------------------------


def test_it_answers_and_ends_without_a_trace(path: str, run_folder: Path) -> None:
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(Path(path).parent).st_mode) == 0o700
    assert Path(path).parent == run_folder / f"kvswap-{os.geteuid()}"
    answer = _top_socket.ask(Path(path))
    assert answer["pid"] == os.getpid() and answer.keys() == metrics.snapshot().keys()
    assert metrics.serve() == path and threads() == ["kvswap-top"]  # the same
    before = len(os.listdir("/proc/self/fd"))
    metrics.close()
    assert not os.path.exists(path) and threads() == []
    assert comes_down(lambda: len(os.listdir("/proc/self/fd")), before - 3)
    metrics.close()
    assert metrics.serve() == path and _top_socket.ask(Path(path))["pid"] == os.getpid()


def test_many_threads_serve_and_close(run_folder: Path) -> None:
    begin = threading.Barrier(8)

    def work() -> None:
        begin.wait(PATIENCE)
        for _ in range(20):
            metrics.serve()
            metrics.close()

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE)
        assert not worker.is_alive()
    metrics.close()
    assert threads() == [] and list((run_folder / f"kvswap-{os.geteuid()}").iterdir()) == []


def test_counters_by_the_socket_are_the_processes_own(mover: Process, run_folder: Path) -> None:
    (found,) = _top_socket.sockets().items()
    assert found[0] == mover.pid
    mover.do("move(7)")
    (device,) = _top_socket.ask(found[1])["devices"]
    (row,) = device["paths"]
    assert device["device"] == "host:84" and row["size"]["sum"] == 7 << 20 and row["blocks"] == 7 * 256


@pytest.mark.parametrize("request_", [b"", b"x", b"kvswap-metrics 2\n", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100000])
def test_a_wrong_request_is_not_answered(path: str, request_: bytes) -> None:
    with connect(path) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(request_)
            connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""
    assert _top_socket.ask(Path(path))["pid"] == os.getpid()


def test_a_request_in_pieces_is_answered(path: str) -> None:
    with connect(path) as connection:
        for letter in REQUEST:
            connection.sendall(bytes([letter]))
        assert json.loads(read_all(connection))["pid"] == os.getpid()


def test_silent_clients_delay_only_themselves(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All places but one are taken by clients that say nothing; each is given up after its time."""
    monkeypatch.setattr(_top_socket, "_CLIENT_SECONDS", 3.0)
    silent = [connect(path) for _ in range(_top_socket._CLIENTS - 1)]
    assert _top_socket.ask(Path(path), PATIENCE)["pid"] == os.getpid()
    more = [connect(path) for _ in range(3)]  # now there is no place: these wait, and so does who asks
    assert _top_socket.ask(Path(path), PATIENCE)["pid"] == os.getpid()
    for connection in silent:
        assert read_all(connection) == b""  # ended by the server
    for connection in silent + more:
        connection.close()


def test_clients_that_never_read_keep_nobody_waiting(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer larger than the socket's buffer, to clients that ask and do not read."""
    server: Any = metrics._server
    monkeypatch.setattr(server, "_snapshot", lambda: {"pid": os.getpid(), "filling": "x" * (4 << 20)})
    greedy = [connect(path) for _ in range(3)]
    for connection in greedy:
        connection.sendall(REQUEST)
    assert len(_top_socket.ask(Path(path), PATIENCE)["filling"]) == 4 << 20
    until(lambda: len(server._clients) == 0, "the clients that do not read are given up")
    for connection in greedy:
        connection.close()


def test_a_client_that_leaves_in_the_middle(path: str) -> None:
    for _ in range(20):
        with connect(path) as connection:
            connection.sendall(REQUEST[:5])
        with connect(path) as connection:
            connection.sendall(REQUEST)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert _top_socket.ask(Path(path), PATIENCE)["pid"] == os.getpid() and threads() == ["kvswap-top"]


def test_the_process_is_not_kept_busy(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many questions at once are answered with numbers of the same age."""
    taken = []
    monkeypatch.setattr(metrics._server, "_snapshot", lambda: taken.append(1) or {"pid": os.getpid()})
    begin = time.monotonic()
    for _ in range(200):
        _top_socket.ask(Path(path), PATIENCE)
    assert len(taken) <= 2 + (time.monotonic() - begin) / _top_socket._FRESH_SECONDS


def test_another_user_is_not_answered(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_top_socket, "peer_of", lambda connection: (1, os.geteuid() + 1))
    with connect(path) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(REQUEST)
        assert read_all(connection) == b""
    with pytest.raises(kvswap.Error, match="belongs to user"):  # nor asked
        _top_socket.ask(Path(path))


def test_a_snapshot_that_raises_ends_one_client(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = metrics._server

    def broken() -> Any:
        raise RuntimeError("no numbers")

    with monkeypatch.context() as patch:
        patch.setattr(server, "_snapshot", broken)
        with pytest.raises((kvswap.Error, OSError)):
            _top_socket.ask(Path(path))
    until(lambda: time.monotonic() - server._answered > _top_socket._FRESH_SECONDS, "a new answer is due")
    assert _top_socket.ask(Path(path), PATIENCE)["pid"] == os.getpid()


def test_folders_of_others_are_not_used(run_folder: Path) -> None:
    folder = run_folder / f"kvswap-{os.geteuid()}"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    for call in (metrics.serve, _top_socket.sockets):
        with pytest.raises(kvswap.Error, match="not a folder that only this user can use"):
            call()
    folder.rmdir()
    folder.symlink_to(run_folder)
    with pytest.raises(kvswap.Error, match="not a folder that only this user can use"):
        metrics.serve()
    assert threads() == []


def test_what_a_killed_process_leaves_is_removed(mover: Process, run_folder: Path) -> None:
    (left,) = _top_socket.sockets().values()
    mover.kill()
    assert left.exists()
    metrics.serve()
    assert not left.exists()


def test_all_descriptors_closed_by_the_program() -> None:
    """Daemons do that: the thread ends, and what now has the numbers is neither read nor closed."""
    run = run_python(
        """
        import os, threading, time
        from kvswap import metrics
        path = metrics.serve()
        os.closerange(3, 200)
        held = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
        os.unlink(path)
        metrics.close()
        for fd in held:
            os.fstat(fd)
        """
    )
    assert run.returncode == 0, run.stderr


FORK = """
    import os, sys, threading, time, warnings
    from pathlib import Path
    from kvswap import _top_socket, metrics

    warnings.simplefilter("ignore", DeprecationWarning)
    path = metrics.serve() if not os.environ.get("KVSWAP_TOP") else str(_top_socket.sockets()[os.getpid()])
    fds = len(os.listdir("/proc/self/fd"))
    child = os.fork()
    if child == 0:
        try:
            there = {"again": 1, "none": 0}[sys.argv[1] if len(sys.argv) > 1 else os.environ["WHAT"]]
            assert (metrics._server is not None) == bool(there)
            assert os.path.exists(path)  # the parent's
            if there:
                assert _top_socket.ask(Path(metrics._server.path), 60)["pid"] == os.getpid()
                assert metrics._server.path != path
                metrics.close()
            else:
                assert len(os.listdir("/proc/self/fd")) == fds - 3
                metrics.close()
            assert os.path.exists(path)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _top_socket.ask(Path(path), 60)["pid"] == os.getpid()
"""


@pytest.mark.parametrize(("what", "environment"), [("none", ""), ("again", "1")])
def test_a_forked_child(what: str, environment: str) -> None:
    run = run_python(FORK, WHAT=what, KVSWAP_TOP=environment)
    assert run.returncode == 0, run.stderr


def test_nothing_is_left_when_the_process_ends(run_folder: Path) -> None:
    run = run_python("from kvswap import _top_socket\nprint(_top_socket.sockets())", KVSWAP_TOP="1")
    assert run.returncode == 0 and "top-" in run.stdout, run.stderr
    assert list((run_folder / f"kvswap-{os.geteuid()}").iterdir()) == []


def test_nothing_is_made_unasked(run_folder: Path) -> None:
    run = run_python("import kvswap, threading\nassert threading.active_count() == 1", KVSWAP_TOP="0")
    assert run.returncode == 0, run.stderr
    assert list(run_folder.iterdir()) == []


# -- bad servers ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(run_folder: Path, answer: Any) -> Iterator[Path]:
    """A process of this user that answers what it likes."""
    folder = run_folder / f"kvswap-{os.geteuid()}"
    folder.mkdir(mode=0o700)
    path = folder / "top-1-1.sock"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    listening.listen()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(64)
                    answer(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield path
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(PATIENCE)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe", b'{"pid": 1}'])
def test_answers_that_are_none(run_folder: Path, text: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with server(run_folder, lambda connection: connection.sendall(text)):
        assert cli.main(["top", "1", "--once", "--interval", "0.1"]) == 3
    assert "did not answer as" in capsys.readouterr().err


def test_an_answer_without_end(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_top_socket, "_MOST_ANSWER", 1 << 20)

    def pour(connection: socket.socket) -> None:
        while True:
            connection.sendall(b"x" * 65536)

    with server(run_folder, pour) as path, pytest.raises(kvswap.Error, match="more than 1 MiB"):
        _top_socket.ask(path, PATIENCE)


def test_an_answer_that_does_not_come(run_folder: Path) -> None:
    done = threading.Event()
    with server(run_folder, lambda connection: done.wait(PATIENCE)) as path:
        with pytest.raises(TimeoutError):
            _top_socket.ask(path, 0.2)
        done.set()


# -- the command ------------------------------------------------------------------------------------------------------


def test_no_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top"]) == 2
    assert "no process shows itself: start it with KVSWAP_TOP=1" in capsys.readouterr().err
    assert cli.main(["top", "12"]) == 2
    assert "process 12 does not show itself (those that do: none)" in capsys.readouterr().err
    assert cli.main(["top", "--list"]) == 0
    out, err = capsys.readouterr()
    assert out == "" and "no process of this user" in err


@pytest.mark.parametrize("value", ["0", "-1", "nan", "x", "1e9"])
def test_intervals(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--interval", value]) == 2
    assert "is not a number of seconds" in capsys.readouterr().err


def test_a_process_at_work(mover: Process, capsys: pytest.CaptureFixture[str]) -> None:
    mover.do("move(3)")
    assert cli.main(["top", "--list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["pid"] == mover.pid and row["devices"] == ["host:84"] and row["bytes"] == 3 << 20
    assert cli.main(["top", "--list"]) == 0
    assert f"{mover.pid}  host:84" in capsys.readouterr().out

    assert cli.main(["top", "--once", "--json", "--interval", "0.1"]) == 0
    seen = json.loads(capsys.readouterr().out)
    (path,) = seen["rates"]["paths"]
    assert seen["pid"] == mover.pid and path["gbps"] == 0 and path["total_bytes"] == 3 << 20

    assert cli.main(["top", str(mover.pid), "--once", "--interval", "0.1"]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text  # it is no terminal
    assert f"process {mover.pid}" in text and "d2h" in text and "3 MiB" in text and "0 of 128" in text


def test_views_follow_each_other_until_the_process_ends(
    mover: Process, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    views = []

    def sleep(seconds: float) -> None:
        views.append(seconds)
        time.sleep(2 * _top_socket._FRESH_SECONDS)
        if len(views) < 4:
            mover.do("move(2)")
        else:
            mover.kill()

    monkeypatch.setattr(top, "time", types.SimpleNamespace(sleep=sleep))
    assert cli.main(["top", "--json", "--interval", "7"]) == 0
    out, err = capsys.readouterr()
    seen = [json.loads(line) for line in out.splitlines()]
    assert views == [7.0] * 4 and len(seen) == 3 and f"process {mover.pid} has ended" in err
    for each in seen[1:]:  # 2 MiB a view, over the time that the process itself measured
        (path,) = each["rates"]["paths"]
        assert path["gbps"] * each["rates"]["seconds"] * 1e9 == pytest.approx(2 << 20)
        assert path["transfers_per_second"] * each["rates"]["seconds"] == pytest.approx(2)


def numbers(monotonic: float, **path: Any) -> Any:
    empty = {"buckets": [0, 0], "sum": 0}
    row = {"direction": "h2d", "path": "dma", "failed": {}, "duration": empty, "queue": empty, "size": empty, **path}
    device = {"device": "cuda:0", "lost": True, "paths": [row], "lanes": []}
    return {
        "pid": 5,
        "rank": "1",
        "command": "python\x1b[31m serve\n",
        "monotonic": monotonic,
        "devices": [device],
        "files": [],
        "host_pools": [],
        "handlers": [
            {"device": "cuda:0", "direction": "d2h", "unfinished": 3, "bytes": 4 << 30, "stalls": 5, "failed": 6}
            | {"duration": {"buckets": [70, 7], "sum": 1.0}}
        ],
    }


def test_rates_are_differences_over_time() -> None:
    before = numbers(10.0, size={"buckets": [3, 1], "sum": 10**9}, duration={"buckets": [4, 0], "sum": 1.0})
    now = numbers(
        12.0,
        size={"buckets": [3, 5], "sum": 5 * 10**9},
        duration={"buckets": [8, 0], "sum": 3.0},
        queue={"buckets": [8, 0], "sum": 1.0},
        failed={"lost": 2},
    )
    change = top.rates(before, now)
    (path,) = change["paths"]
    assert change["seconds"] == 2 and path["gbps"] == 2 and path["transfers_per_second"] == 2
    assert path["mean_seconds"] == 0.5 and path["mean_queue_seconds"] == 0.25 and path["failed"] == 2
    before["devices"] = []  # opened since
    (path,) = top.rates(before, now)["paths"]
    assert path["gbps"] == 2.5


def test_what_another_program_wrote_moves_no_cursor() -> None:
    now = numbers(1.0, failed={"lo\x1bst": 2})
    now["devices"][0]["lanes"] = [
        {"direction": "h2d", "priority": "high", "unfinished": 1, "bytes": 0, "fullest": 1, "limit": 8}
        | {"oldest_seconds": 90.0, "lanes": 1}
    ]
    title, tables = top.view(now, top.rates(now, now))
    text = top._as_text(title, tables)
    assert "\x1b" not in text and "python?[31m serve?" in text and "2 lo?st" in text
    assert "cuda:0  d2h        77    3           4 GiB  5       6" in text
    assert "cuda:0 LOST" in text and "1 of 8" in text and "90 s" in text and "rank 1" in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_view_replaces_the_last(mover: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(top.sys, "stdout", screen)
    monkeypatch.setattr(top.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["top", "--once", "--interval", "0.1"]) == 0
    assert screen.getvalue().startswith("\x1b[H\x1b[2Jprocess")


def test_with_rich(mover: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    from rich import console

    screen = Terminal()
    monkeypatch.setattr(top.sys, "stdout", screen)
    monkeypatch.setattr("rich._console", console.Console(file=screen, force_terminal=True, width=200), raising=False)
    mover.do("move(1)")
    assert cli.main(["top", "--once", "--interval", "0.1"]) == 0
    assert "transfers/s" in screen.getvalue() and f"process {mover.pid}" in screen.getvalue()
