"""The replay's third tier on nodes, over the stand-in for NIXL of remote_agent.py."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
import test_remote

from kvswap import cli
from kvswap.replay import geometry, run

SHAPE = geometry.scale(geometry.named("llama-3.1-8b"), 64 << 10)
TRACE = Path(cli.__file__).parent / "data" / "demo_trace.jsonl.gz"
TIERS = ["--gpu-blocks", "64", "--host-blocks", "128", "--bytes-per-block", "64KiB", "--requests", "150"]


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with test_remote.listed_nodes(tmp_path, monkeypatch, 2, blocks=500, nbytes=SHAPE.block_nbytes) as nodes:
        yield nodes


def replay(folder: Path, *more: str) -> int:
    where = ["--remote", str(folder / "nodes"), "--remote-key", str(folder / "key"), "--remote-blocks", "400"]
    return cli.main(["replay", str(TRACE), "--device", "host:0", *TIERS, *where, *more])


def test_blocks_go_to_nodes_and_come_back(tmp_path: Path, nodes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(tmp_path, f"--json={tmp_path / 'out.json'}") == 0, capsys.readouterr().err
    told = json.loads((tmp_path / "out.json").read_text())
    tier = told["remote_tier"]
    assert tier["hits"] > 50 and tier["bytes_stored"] > 0 and tier["bytes_loaded"] > 0 and tier["verified_at_end"] > 50
    assert told["wrong_bytes"] == 0 and told["ended"] == "complete" and "2 nodes" in tier["how"]
    assert "hits in the remote tier" in capsys.readouterr().out
    assert all(node.server.counts["stored"] > 50 for node in nodes)


def test_a_wrong_block_would_be_found(
    tmp_path: Path, nodes: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the tier gave one block for another."""
    good = run.RemoteTier.store
    monkeypatch.setattr(run.RemoteTier, "store", lambda self, hashes, *rest: good(self, hashes[::-1].copy(), *rest))
    assert replay(tmp_path) == 1
    assert "remote tier" in capsys.readouterr().err


def test_a_node_that_is_down_is_named(tmp_path: Path, nodes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    nodes[1].stop()
    from kvswap.replay import remote_tier

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_tier, "_PATIENCE", 2.0)
        assert replay(tmp_path) == 3
    assert nodes[1].address in capsys.readouterr().err


def test_wrong_arguments(tmp_path: Path, nodes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, why in (
        (["--remote", "x"], "go together"),
        (
            ["--remote", "x", "--remote-key", "y", "--remote-blocks", "4", "--file-tier", "z", "--file-blocks", "4"],
            "exclude",
        ),
    ):
        assert cli.main(["demo", "--device", "host:0", *wrong]) == 2
        assert why in capsys.readouterr().err
    assert replay(tmp_path, "--host-blocks", "0") == 2
    assert "the remote tier takes" in capsys.readouterr().err
    (tmp_path / "nodes").write_text("nonsense\n")
    assert replay(tmp_path) == 2
    assert "nodes, line 1: must be HOST:PORT" in capsys.readouterr().err
    (tmp_path / "key").unlink()
    assert replay(tmp_path) == 2
    assert "key: No such file" in capsys.readouterr().err
