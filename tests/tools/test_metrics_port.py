"""KVSWAP_METRICS_PORT: one process of the user serves all of them, another takes over, and clients are bounded."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE, elsewhere, run_python, until
from processes import Process

import kvswap
from kvswap import _metrics_port, _top_socket, info, metrics

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")

MOVE = """
    a, b, ids = np.zeros(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8), np.arange(256)
    kvswap.swap_cache_per_layer(a, b, 4096, 256, 256, ids, ids, 0, device="host:0")
"""
SERVES = "kvswap.metrics._port.serving"


@pytest.fixture(autouse=True)
def run_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the test's own for sockets, with a short name."""
    folder = Path(tempfile.mkdtemp(prefix="kvm"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    for name in ("KVSWAP_TOP", "KVSWAP_METRICS_PORT", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield folder
    metrics.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def server(port: int, monkeypatch: pytest.MonkeyPatch) -> _metrics_port.Server:
    """Of this process."""
    monkeypatch.setenv("KVSWAP_METRICS_PORT", str(port))
    metrics.start_from_environment()
    assert metrics._port is not None
    until(lambda: metrics._port.serving, "the port is served")
    return metrics._port


def scrape(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE) as answer:
        return str(answer.read().decode())


def scraped(port: int) -> str:
    """Empty where nothing answers."""
    try:
        return scrape(port)
    except OSError:
        return ""


def up(text: str) -> int:
    line = next((line for line in text.splitlines() if line.startswith('kvswap_processes{state="up"}')), "x -1")
    return int(float(line.split()[1]))


def of_pid(text: str, name: str, pid: int) -> list[float]:
    lines = [line for line in text.splitlines() if line.startswith(name + "{") and f'pid="{pid}"' in line]
    return [float(line.rpartition(" ")[2]) for line in lines]


def subprocess_of(script: str, **environment: str) -> Any:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], **elsewhere(**environment),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


# -- several processes ------------------------------------------------------------------------------------------------


def test_one_process_serves_all_and_another_takes_over(port: int, run_folder: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(run_folder), "KVSWAP_METRICS_PORT": str(port)}
    with Process(MOVE, **environment) as first:
        until(lambda: first.do(SERVES))
        with Process(MOVE, **environment, RANK="1") as second:
            text = until(lambda: up(scraped(port)) == 2 and scraped(port), "both are there")
            for process, rank in ((first, ""), (second, "1")):
                assert of_pid(text, "kvswap_transfer_blocks_total", process.popen.pid) == [256]
                assert f'rank="{rank}",device="host:0",direction="d2h"' in text
            assert not second.do(SERVES)
            first.popen.kill()
            first.popen.wait()
            until(lambda: second.do(SERVES), "the second one takes over")
            text = until(lambda: up(scraped(port)) == 1 and scraped(port))
            assert of_pid(text, "kvswap_transfer_blocks_total", first.popen.pid) == []
            assert 'kvswap_processes{state="no_answer"} 0.0' in text  # it has ended, and is none of them


def test_a_process_that_does_not_answer(server: _metrics_port.Server, port: int, run_folder: Path) -> None:
    with Process(XDG_RUNTIME_DIR=str(run_folder), KVSWAP_TOP="1") as other:
        until(lambda: up(scraped(port)) == 2)
        os.kill(other.popen.pid, signal.SIGSTOP)
        threads = Path(f"/proc/{other.popen.pid}/task")
        try:
            until(lambda: all("T (stopped)" in (each / "status").read_text() for each in threads.iterdir()))
            text = scrape(port)
        finally:
            os.kill(other.popen.pid, signal.SIGCONT)
        assert up(text) == 1 and 'kvswap_processes{state="no_answer"} 1.0' in text


def test_a_port_of_another_program_is_one_warning(port: int, run_folder: Path) -> None:
    stranger = socket.create_server(("127.0.0.1", port))
    with Process(XDG_RUNTIME_DIR=str(run_folder), KVSWAP_METRICS_PORT=str(port)) as process:
        process.do("""
            import logging
            said, port = [], kvswap.metrics._port
            handler = logging.Handler()
            handler.emit = lambda record: said.append(record.getMessage())
            logging.getLogger("kvswap.metrics").addHandler(handler)
            port._warned = False
            tries, listen = [], port._listen
            port._listen = lambda: tries.append(1) or listen()
        """)
        until(lambda: process.do("len(tries)") >= 3, "it is tried again")
        (text,) = process.do("said")
        assert text.endswith(f"127.0.0.1:{port}: another program listens there. It is tried again")
        stranger.close()
        until(lambda: process.do(SERVES))
        assert up(scrape(port)) == 1


def test_the_child_of_a_fork_holds_neither_lock_nor_port(port: int, run_folder: Path) -> None:
    script = """
        import os, sys, time
        from kvswap import metrics
        while not metrics._port.serving:
            time.sleep(0.01)
        del os.environ["KVSWAP_METRICS_PORT"]
        if os.fork():
            os._exit(0)
        assert metrics._port is None
        print("child", flush=True)
        sys.stdin.read()  # until the test ends
    """
    with subprocess_of(script, XDG_RUNTIME_DIR=str(run_folder), KVSWAP_METRICS_PORT=str(port)) as child:
        assert child.stdout.readline() == "child\n"
        with Process(XDG_RUNTIME_DIR=str(run_folder), KVSWAP_METRICS_PORT=str(port)) as other:
            until(lambda: other.do(SERVES))


def test_the_child_of_a_fork_is_a_process_of_its_own(port: int, run_folder: Path) -> None:
    script = f"""
        import os, time, urllib.request
        from kvswap import metrics
        while not metrics._port.serving:
            time.sleep(0.01)
        child = os.fork()
        if child == 0:
            time.sleep({PATIENCE})
            os._exit(0)
        try:
            text = ""
            while f'pid="{{child}}"' not in text:
                text = urllib.request.urlopen("http://127.0.0.1:{port}/metrics").read().decode()
            assert 'state="up"}} 2.0' in text
        finally:
            os.kill(child, 9)
    """
    done = run_python(script, XDG_RUNTIME_DIR=str(run_folder), KVSWAP_METRICS_PORT=str(port))
    assert done.returncode == 0, done.stderr


# -- what is served ---------------------------------------------------------------------------------------------------


def test_the_text_is_prometheus_own(server: _metrics_port.Server, port: int) -> None:
    """Every sample of the collector is there, as Prometheus's parser reads it, with a pid."""
    parser = pytest.importorskip("prometheus_client.parser")
    registry = pytest.importorskip("prometheus_client").CollectorRegistry()
    registry.register(metrics.Collector())
    kvswap.Device("host:0")
    pid = str(os.getpid())
    text = scrape(port)
    found = {(sample.name, tuple(sorted(sample.labels.items())))
             for family in parser.text_string_to_metric_families(text) for sample in family.samples}  # fmt: skip
    expected = {
        (sample.name, tuple(sorted({**sample.labels, "pid": pid}.items())))
        for family in registry.collect()
        for sample in family.samples
    }
    assert expected - found == set() and len(expected) > 10
    assert text.count("# TYPE kvswap_info gauge") == 1


def test_labels_are_escaped() -> None:
    snapshot = metrics.snapshot('a "rank"\n\\')
    text = _metrics_port.text_of([(7, snapshot)])
    assert 'rank="a \\"rank\\"\\n\\\\",version=' in text
    assert text.endswith('kvswap_processes{state="up"} 1.0\nkvswap_processes{state="no_answer"} 0.0\n')


@pytest.mark.parametrize(
    "wrong",
    [
        {"devices": 7},
        {"devices": [{}]},
        {"rank": 3},
        {"version": 'x"} 1\nforged{'},
        {"remote": [{"nodes": 3}]},
        {
            "host_pools": [
                {"device": "d", "shared": 1, "state": "s", "pinned": 1, "bytes": "9\nx 1", "populated_bytes": 1}
            ]
        },
    ],
    ids=str,
)
def test_what_another_version_answers(wrong: dict[str, Any]) -> None:
    """It is counted, or left out as a process that does not answer; no line is forged, and others are there."""
    text = _metrics_port.text_of(
        [(7, {**metrics.snapshot(), **wrong}), (8, json.loads(json.dumps(metrics.snapshot())))]
    )
    assert 'pid="8"' in text
    assert all(line.startswith(("# ", "kvswap_")) for line in text.splitlines())


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /metrics HTTP/1.1", b"200"),
        (b"GET /metrics?name[]=up HTTP/1.0", b"200"),
        (b"HEAD / HTTP/1.1", b"200"),
        (b"GET /other HTTP/1.1", b"404"),
        (b"POST /metrics HTTP/1.1", b"405"),
        (b"nonsense", b"400"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 9000, b"200"),
        (b"\x16\x03\x01" + bytes(64), b"400"),
    ],
)
def test_requests(server: _metrics_port.Server, port: int, request_line: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as client:
        client.sendall(request_line + b"\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while part := client.recv(65536):
                answer += part
        except ConnectionResetError:  # of a request that is longer than what is read
            assert len(request_line) > 8192
    assert answer.split()[1:2] == [status]
    assert (len(answer.split(b"\r\n\r\n", 1)[1]) > 0) is not request_line.startswith(b"HEAD")


def test_silent_clients_are_bounded(server: _metrics_port.Server, port: int) -> None:
    """Clients beyond the limit are refused; when the silent ones' time is over, others are served."""
    silent = [socket.create_connection(("127.0.0.1", port), PATIENCE) for _ in range(_metrics_port._CLIENTS)]
    with pytest.raises((OSError, urllib.error.URLError)):
        scrape(port)
    until(lambda: scraped(port))
    for client in silent:
        client.settimeout(PATIENCE)
        assert b" 400 " in client.recv(100) or client.recv(100) == b""
        client.close()


def test_a_client_wakes_a_server_that_closes(
    server: _metrics_port.Server, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread has let go of the port between close()'s look and its use."""
    still_ours = server._still_ours

    def client_first() -> bool:
        ours = still_ours()
        if threading.current_thread() is not server._thread and server._thread.is_alive():
            socket.create_connection(("127.0.0.1", port), PATIENCE).close()
            server._thread.join(PATIENCE)
            assert server._listening is None
        return ours

    monkeypatch.setattr(server, "_still_ours", client_first)
    server.close()


# -- who may ask, and what is left ------------------------------------------------------------------------------------


def test_only_this_machine_and_only_this_user(server: _metrics_port.Server, port: int, run_folder: Path) -> None:
    listening = Path("/proc/net/tcp").read_text()
    assert f"0100007F:{port:04X} 00000000:0000 0A" in listening and f"00000000:{port:04X}" not in listening
    for path in (run_folder / f"kvswap-{os.geteuid()}").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_another_address(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSWAP_METRICS_PORT", f"0.0.0.0:{port}")
    metrics.start_from_environment()
    until(lambda: metrics._port.serving)
    assert f"00000000:{port:04X} 00000000:0000 0A" in Path("/proc/net/tcp").read_text()


def test_close_frees_port_and_lock(server: _metrics_port.Server, port: int) -> None:
    metrics.close()
    assert metrics._port is None and not server._thread.is_alive()
    socket.create_server(("127.0.0.1", port)).close()
    assert os.listdir(_top_socket.folder_path()) == [f"metrics-{port}.lock"]


def test_a_program_that_closes_all_descriptors(run_folder: Path, port: int) -> None:
    """What has the numbers afterwards is left open, and the port is served again."""
    script = """
        import os, socket, time
        from kvswap import metrics
        while not metrics._port.serving:
            time.sleep(0.01)
        numbers = metrics._port._descriptors()
        os.closerange(3, 64)
        mine = [os.open(os.devnull, os.O_RDONLY) for _ in range(61)]
        assert set(numbers) <= set(mine)
        while not (metrics._port.serving and set(metrics._port._descriptors()) - set(mine)):
            time.sleep(0.01)
            try:  # a thread that waits for a connection does not notice
                socket.create_connection(metrics._port.address).close()
            except OSError:
                pass
        metrics.close()
        for fd in mine:
            os.fstat(fd)
    """
    done = run_python(script, XDG_RUNTIME_DIR=str(run_folder), KVSWAP_METRICS_PORT=str(port))
    assert done.returncode == 0, done.stderr


# -- the variable -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9400", ("127.0.0.1", 9400)),
        ("0.0.0.0:9400", ("0.0.0.0", 9400)),
        ("[::1]:9400", ("::1", 9400)),
        (":9400", ("127.0.0.1", 9400)),
        ("node7:1", ("node7", 1)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert _metrics_port.address_of(text) == address


@pytest.mark.parametrize("text", ["", "0", "65536", "-1", "x", "9400:", "1.5", "[]:94", "٩٤٠٠", "9400 9401"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="it is a port from 1 to 65535, or HOST:PORT"):
        _metrics_port.address_of(text)


def test_a_wrong_value_is_a_warning() -> None:
    done = run_python("import kvswap, threading\nprint(threading.active_count())", KVSWAP_METRICS_PORT="many")
    assert done.returncode == 0 and "KVSWAP_METRICS_PORT is 'many'; it is a port" in done.stderr
    assert "KVSWAP_METRICS_PORT" in info.VARIABLES


def test_info_names_a_wrong_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSWAP_METRICS_PORT", "many")
    assert any("KVSWAP_METRICS_PORT is 'many'" in text for text in info.wrong_variables())
