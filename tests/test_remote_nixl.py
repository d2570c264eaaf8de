"""The remote tier with NIXL itself, between processes. Where NIXL is not installed this is skipped:

pip install --no-deps nixl nixl-cu13     (327 MB)
UCX_TLS=tcp pytest tests/test_remote_nixl.py
"""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, ROOT

import kvswap
from kvswap.files import Layout

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
pytest.importorskip("nixl", reason="NIXL is not installed: see the top of this file; CI has none")
from kvswap import remote
from kvswap.remote._store import RemoteStore

NBYTES = 300_000
LAYOUT = Layout(NBYTES, model="test")
BLOCKS = np.random.default_rng(5).integers(0, 256, (64, NBYTES), np.uint8)
KEYS = [b"key-%d" % i for i in range(64)]


class Node:
    """kvswap remote serve."""

    def __init__(self, folder: Path, allowed: Path, *more: str) -> None:
        self.secret, self.bind = folder / "node.key", "127.0.0.1:0"
        remote.write_secret(self.secret, remote.new_secret())
        self.more = ["--blocks", "128", "--key", str(self.secret), "--clients", str(allowed), *more]
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "kvswap", "remote", "serve", "--bind", self.bind, "--block", str(NBYTES)]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        end = time.monotonic() + PATIENCE
        while True:
            environment = {**os.environ, "PYTHONPATH": path}
            self.process = subprocess.Popen([*command, *self.more], stdout=subprocess.PIPE, text=True, env=environment)
            self.line = self.process.stdout.readline()
            if self.line:
                break
            self.stop(signal.SIGKILL)
            assert time.monotonic() < end, "the node does not start"
        self.bind = self.line.split()[0]

    def stop(self, number: int) -> int:
        self.process.send_signal(number)
        self.process.stdout.close()
        return self.process.wait(PATIENCE)


@pytest.fixture
def rack(tmp_path: Path) -> Iterator[Any]:
    pair, nodes, stores = remote.new_secret(), [], []
    (tmp_path / "allowed").write_text(pair.public + "\n")
    (tmp_path / "allowed").chmod(0o600)

    def make(
        count: int = 1, more: tuple[str, ...] = (), up: int | None = None, **options: Any
    ) -> tuple[list[Node], Any]:
        for i in range(count):
            (tmp_path / str(i)).mkdir()
            nodes.append(Node(tmp_path / str(i), tmp_path / "allowed", *more))
        listed = remote.parse_nodes("".join(node.line for node in nodes))
        store = RemoteStore(listed, LAYOUT, key=pair, **options)
        stores.append(store)
        if up is None:
            assert store.wait_nodes(timeout=PATIENCE) == count, store.stats()
        return nodes, store

    yield make
    for store in stores:
        store.close(PATIENCE)
    for node in nodes:
        if node.process.poll() is None:
            node.stop(signal.SIGKILL)


def load(store: Any) -> set[int]:
    """The positions that arrived. All else is missing and unchanged."""
    to = np.full_like(BLOCKS, 0xEE)
    transfer = store.load(KEYS, to, range(64))
    assert transfer._ended.wait(PATIENCE), "a hang"
    failed = set(transfer.failed_blocks.tolist())
    for i in range(64):
        assert (to[i] == (0xEE if i in failed else BLOCKS[i])).all(), f"block {i} is wrong"
    return set(range(64)) - failed


def test_blocks_come_back(rack: Any) -> None:
    nodes, store = rack(2)
    store.store(KEYS, BLOCKS, range(64)).wait(PATIENCE)
    assert load(store) == set(range(64)) and store.contains(KEYS) == [True] * 64
    store.delete(KEYS[:10]).wait(PATIENCE)
    assert load(store) == set(range(10, 64))
    assert [node.stop(signal.SIGTERM) for node in nodes] == [0, 0]


def test_a_node_is_killed_in_mid_transfer_and_returns(rack: Any) -> None:
    (node,), store = rack()
    for wait in (0.0, 0.005, 0.02):
        assert store.wait_nodes(timeout=PATIENCE) == 1
        store.store(KEYS, BLOCKS, range(64)).wait(PATIENCE)
        to = np.full_like(BLOCKS, 0xEE)
        begun = [store.load(KEYS, to, range(64)), store.store(KEYS, BLOCKS, range(64))]
        time.sleep(wait)
        node.stop(signal.SIGKILL)
        for transfer in begun:
            assert transfer._ended.wait(PATIENCE), "a hang"
        failed = set(begun[0].failed_blocks.tolist())
        assert all((to[i] == (0xEE if i in failed else BLOCKS[i])).all() for i in range(64))
        assert load(store) == set()
        node.start()
    assert store.wait_nodes(timeout=PATIENCE) == 1
    store.store(KEYS, BLOCKS, range(64)).wait(PATIENCE)
    assert load(store) == set(range(64))


def test_a_node_is_stopped_and_goes_on(rack: Any) -> None:
    (node,), store = rack(timeout=2.0)
    store.store(KEYS, BLOCKS, range(64)).wait(PATIENCE)
    node.process.send_signal(signal.SIGSTOP)
    load(store)  # ends, with whatever arrived
    assert store.contains(KEYS[:1]) == [False]
    node.process.send_signal(signal.SIGCONT)
    end = time.monotonic() + PATIENCE
    while load(store) != set(range(64)):
        assert time.monotonic() < end, store.stats()
        time.sleep(0.05)


def test_the_files_of_a_node_outlive_it(rack: Any, tmp_path: Path) -> None:
    (node,), store = rack(more=("--directory", str(tmp_path / "kv"), "--capacity", "256MiB"))
    store.store(KEYS, BLOCKS, range(64)).wait(PATIENCE)
    node.stop(signal.SIGTERM)
    node.start()
    end = time.monotonic() + PATIENCE
    while store.wait_nodes(timeout=1) == 0 or load(store) != set(range(64)):
        assert time.monotonic() < end, store.stats()


def test_what_nodes_say(rack: Any, tmp_path: Path) -> None:
    nodes, store = rack(2)
    store.store(KEYS, BLOCKS, range(64)).wait(PATIENCE)
    (tmp_path / "nodes").write_text("".join(node.line for node in nodes))
    remote.write_secret(tmp_path / "key", store._link._pair)
    command = [
        sys.executable,
        "-m",
        "kvswap",
        "remote",
        "stat",
        str(tmp_path / "nodes"),
        "--key",
        str(tmp_path / "key"),
    ]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=PATIENCE
    )
    assert run.returncode == 0 and sum(int(line.split()[1]) for line in run.stdout.splitlines()) == 64, run
    nodes[0].stop(signal.SIGKILL)
    run = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=PATIENCE
    )
    assert run.returncode == 3 and "is down" in run.stdout


def test_a_replay(rack: Any, tmp_path: Path) -> None:
    """The trace that ships with kvswap, through a third tier on a node."""
    from kvswap import cli
    from kvswap.replay import geometry

    shape = geometry.scale(geometry.named("llama-3.1-8b"), 64 << 10)
    (node,), store = rack(more=("--block", str(shape.block_nbytes), "--blocks", "600"), up=0)
    (tmp_path / "nodes").write_text(node.line)
    remote.write_secret(tmp_path / "key", store._link._pair)
    trace = Path(cli.__file__).parent / "data" / "demo_trace.jsonl.gz"
    tiers = ["--gpu-blocks", "64", "--host-blocks", "128", "--bytes-per-block", "64KiB", "--requests", "150"]
    nodes = ["--remote", str(tmp_path / "nodes"), "--remote-key", str(tmp_path / "key"), "--remote-blocks", "400"]
    assert cli.main(["replay", str(trace), "--device", "host:0", *tiers, *nodes]) == 0


def test_an_agent_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvswap.remote._agent import NixlAgent

    with pytest.raises(kvswap.Error, match="backend"):
        NixlAgent("x", backend="NO_SUCH")
