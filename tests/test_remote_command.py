"""kvswap remote keygen, stat and serve, as far as they go without NIXL; key files."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
import test_remote
from remote_agent import be_patient

import kvswap
from kvswap import cli, remote
from kvswap.remote._secrets import read_allowed


@pytest.fixture
def secret(tmp_path: Path) -> remote.Secret:
    pair = remote.new_secret()
    remote.write_secret(tmp_path / "key", pair)
    return pair


def test_keygen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new"
    assert cli.main(["remote", "keygen", str(path)]) == 0
    public = capsys.readouterr().out.strip()
    assert path.stat().st_mode & 0o777 == 0o600 and remote.read_secret(path).public == public
    before = path.read_text()
    assert cli.main(["remote", "keygen", str(path)]) == 3  # a secret is never overwritten
    assert path.read_text() == before and str(path) in capsys.readouterr().err
    assert remote.read_secret(path).secret not in repr(remote.read_secret(path))


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path, secret: remote.Secret) -> None:
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(kvswap.Error, match="has mode 640: it must be 600"):
        remote.read_secret(tmp_path / "key")


@pytest.mark.parametrize("text", ["", "x\n", "a b c\n", "k" * 40 + "\n", "k" * 40 + "\n" + "l" * 39 + "\n"])
def test_a_file_without_a_secret(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(kvswap.Error, match="holds no key pair"):
        remote.read_secret(tmp_path / "key")


def test_a_public_key_of_another_secret(tmp_path: Path, secret: remote.Secret) -> None:
    (tmp_path / "key").write_text(f"{remote.new_secret().public}\n{secret.secret}\n")
    with pytest.raises(kvswap.Error, match="is not that of its secret key"):
        remote.read_secret(tmp_path / "key")


def test_who_may_connect(tmp_path: Path) -> None:
    one, two = remote.new_secret().public, remote.new_secret().public
    path = tmp_path / "allowed"
    path.write_text(f"# the rack\n\n{one} worker one\n  {two}\n")
    path.chmod(0o644)
    assert read_allowed(path) == {one, two}
    path.write_text(f"{one}\n{two[1:]}\n")
    with pytest.raises(kvswap.Error, match="line 2: must begin with a public key"):
        read_allowed(path)
    path.write_text(f"{one}\n")
    path.chmod(0o666)
    with pytest.raises(kvswap.Error, match="others may write to it"):
        read_allowed(path)


def test_stat(
    tmp_path: Path, secret: remote.Secret, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch, 60.0)
    node = test_remote.NodeThread([secret.public])
    try:
        line = f"{node.address} {node.pair.public} first\n"
        (tmp_path / "nodes").write_text(line)
        command = ["remote", "stat", str(tmp_path / "nodes"), "--key", str(tmp_path / "key")]
        assert cli.main([*command, "--timeout", "60", "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["nodes"]
        assert row["node"] == "first" and row["up"] and row["slots"] == 32 and row["blocks"] == 0
        (tmp_path / "nodes").write_text(f"{line}127.0.0.1:1 {node.pair.public} second\n")
        assert cli.main([*command, "--timeout", "2"]) == 3
        told = capsys.readouterr().out
        assert "second" in told and "is down" in told and "0 of 32 slots" in told
        (tmp_path / "nodes").write_text("nonsense\n")
        assert cli.main(command) == 2 and "line 1" in capsys.readouterr().err
        (tmp_path / "nodes").unlink()
        assert cli.main(command) == 2 and "nodes: No such file" in capsys.readouterr().err
        (tmp_path / "nodes").write_text(line)
        (tmp_path / "key").unlink()
        assert cli.main(command) == 2 and "key: No such file" in capsys.readouterr().err
    finally:
        node.stop()


def test_serve_says_what_is_missing(tmp_path: Path, secret: remote.Secret, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["remote", "serve", "--bind", "127.0.0.1:0", "--block", "4096", "--blocks", "8"]
    command += ["--key", str(tmp_path / "key"), "--clients", str(tmp_path / "allowed")]
    assert cli.main([*command, "--capacity", "1GiB"]) == 2 and "go together" in capsys.readouterr().err
    assert cli.main(command) == 2 and "allowed: No such file" in capsys.readouterr().err
    (tmp_path / "allowed").write_text("nonsense\n")
    (tmp_path / "allowed").chmod(0o600)
    assert cli.main(command) == 2 and "line 1: must begin with a public key" in capsys.readouterr().err
    (tmp_path / "allowed").write_text("# nobody\n")
    (tmp_path / "allowed").chmod(0o600)
    assert cli.main(command) == 2 and "no client could connect" in capsys.readouterr().err
    if importlib.util.find_spec("nixl") is None:
        (tmp_path / "allowed").write_text(secret.public + "\n")
        assert cli.main(command) == 3 and "needs NIXL" in capsys.readouterr().err


def test_a_package_that_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "msgspec", None)
    stat = ["remote", "stat", str(tmp_path / "nodes"), "--key", str(tmp_path / "key")]
    for command in (["remote", "keygen", str(tmp_path / "new")], stat):
        assert cli.main(command) == 2
        assert "needs msgspec: pip install 'kvswap[remote]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
