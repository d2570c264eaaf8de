"""kvswap files check, stat and gc."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import file_reader
import numpy as np
import pytest
from conftest import PATIENCE, random_bytes

from kvswap import _shared_files, cli, testing
from kvswap.commands import files as command
from kvswap.files import FileStore, Layout

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")

NBYTES, SLOT = 5000, 12288
SEGMENT = 4096 + 8 * SLOT
LAYOUT = Layout(NBYTES, model="m", heads=8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty blocks in three files."""
    with FileStore(tmp_path / "s", LAYOUT, capacity=8 * SEGMENT, segment_nbytes=SEGMENT) as store:
        data = random_bytes(1, 20 * NBYTES).reshape(20, NBYTES)
        store.store([b"key-%d" % i for i in range(20)], data, range(20)).wait(PATIENCE)
    return tmp_path / "s"


def damage(folder: Path, *keys: bytes) -> None:
    blocks = file_reader.read_store(folder)
    for key in keys:
        with blocks[key].path.open("r+b") as file:
            file.seek(blocks[key].offset + 4096 + 1000)
            file.write(bytes([blocks[key].data[1000] ^ 1]))


def test_stat(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["files", "stat", str(folder)]) == 0
    told = capsys.readouterr().out
    assert '{"heads":8,"model":"m"}' in told and "20 of 24 slots" in told and "3 of 100 KiB" in told


def test_check(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["files", "check", str(folder)]) == 0
    assert "20 blocks are right, 0 damaged" in capsys.readouterr().out
    damage(folder, b"key-3", b"key-11")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert cli.main(["files", "check", str(folder)]) == 1
    told = capsys.readouterr().out
    assert "18 blocks are right, 2 damaged" in told and "key-3: block" in told and "key-11: block" in told
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_check_beside_a_writer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FileStore(folder, LAYOUT, capacity=8 * SEGMENT):
        assert cli.main(["files", "check", str(folder)]) == 0
        assert "20 blocks are right" in capsys.readouterr().out
        assert cli.main(["files", "gc", str(folder)]) == 3
        assert "is being written" in capsys.readouterr().err


def test_gc(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segments = {key: block.path for key, block in file_reader.read_store(folder).items()}
    last = sorted(folder.glob("segment-*"))[-1]
    gone = [key for key, path in segments.items() if path == last]
    bad, kept = sorted(set(segments) - set(gone))[:2]
    damage(folder, bad)
    (folder / "new.tmp").write_bytes(b"left")
    with FileStore(folder, LAYOUT, capacity=8 * SEGMENT) as store:
        store.delete(gone).wait(PATIENCE)
    assert cli.main(["files", "gc", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "erased 1 damaged blocks, removed 2 files" in told
    assert not last.exists() and not (folder / "new.tmp").exists()
    assert set(file_reader.read_store(folder)) == set(segments) - set(gone) - {bad}
    assert cli.main(["files", "check", str(folder)]) == 0
    with FileStore(folder, LAYOUT, capacity=8 * SEGMENT) as store:
        target = np.zeros((1, NBYTES), np.uint8)
        store.load([kept], target, [0]).wait(PATIENCE)


def test_gc_leaves_alone_what_cannot_be_read(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither blocks that cannot be loaded now, nor files whose headers cannot be looked at."""
    open_store, pread, last = command._open, os.pread, sorted(folder.glob("segment-*"))[-1]
    segments = {key: block.path for key, block in file_reader.read_store(folder).items()}
    damage(folder, b"key-5")
    with FileStore(folder, LAYOUT, capacity=8 * SEGMENT) as store:
        gone = [key for key, path in segments.items() if path == last]
        store.delete(gone).wait(PATIENCE)

    @contextmanager
    def failing(directory: Path, *, readonly: bool) -> Iterator[FileStore]:
        with (
            open_store(directory, readonly=readonly) as store,
            testing.file_fault(store, "read", "fail", nth=2, every=4, code=errno.EIO),
        ):
            yield store

    def refuse(fd: int, nbytes: int, at: int) -> bytes:
        if at > 4096 and os.readlink(f"/proc/self/fd/{fd}") == str(last):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, nbytes, at)

    monkeypatch.setattr(command, "_open", failing)
    monkeypatch.setattr(os, "pread", refuse)
    assert cli.main(["files", "gc", str(folder)]) == 0
    assert last.exists()
    assert set(segments) - set(file_reader.read_store(folder)) - set(gone) <= {b"key-5"}


def test_what_is_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for what in ("check", "stat", "gc"):
        assert cli.main(["files", what, str(tmp_path)]) == 3
        assert "is no store" in capsys.readouterr().err
        assert cli.main(["files", what, str(tmp_path / "none")]) == 2
        assert f"{tmp_path / 'none'}: there is no such directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_bytes(b"")
    assert cli.main(["files", "stat", str(tmp_path / "file")]) == 2
    assert "it is a file; name the directory of a store" in capsys.readouterr().err


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(what: str, status: int = 0) -> dict[str, object]:
        assert cli.main(["files", what, "--json", str(folder)]) == status
        out, err = capsys.readouterr()
        found = json.loads(out)
        (store,) = found.pop("stores")
        assert (found["command"], store.pop("directory")) == (f"files {what}", str(folder)) and err != ""
        return store

    told = run("stat")
    assert (told["blocks"], told["slots"], told["block_nbytes"]) == (20, 24, NBYTES)
    assert run("check")["right"] == 20
    damage(folder, b"key-3")
    told = run("check", status=1)
    assert told["right"] == 19 and list(told["damaged"]) == ["key-3"]
    assert run("gc")["erased"] == 1
    assert run("check")["right"] == 19


def test_a_directory_of_several_stores(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FileStore(tmp_path / "t", LAYOUT, capacity=8 * SEGMENT, segment_nbytes=SEGMENT):
        pass
    assert cli.main(["files", "stat", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert told.index(str(folder)) < told.index("20 of 24") < told.index(str(tmp_path / "t")) < told.index("0 of 0")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "store.kvs").write_bytes(b"x" * 4096)
    assert cli.main(["files", "check", "--json", str(tmp_path)]) == 3
    out, err = capsys.readouterr()
    found = {Path(store["directory"]).name: store for store in json.loads(out)["stores"]}
    assert found["s"]["right"] == 20 and "error" in found["bad"] and found["bad"]["error"] in err
    shutil.rmtree(tmp_path / "bad")
    damage(folder, b"key-3")
    assert cli.main(["files", "check", str(tmp_path)]) == 1
    capsys.readouterr()
    assert cli.main(["files", "gc", str(tmp_path)]) == 2  # which erases: one at a time
    assert f"name one of {folder}, {tmp_path / 't'}" in capsys.readouterr().err
    assert len(file_reader.read_store(folder)) == 20


@pytest.mark.parametrize("above", ["kv", "kv/12300"], ids=["SGLang", "LMCache"])
def test_the_directory_of_an_engine(tmp_path: Path, above: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Stores are writer-NNNN in a folder of their layout; what is deeper is not looked at."""
    options = {"durability": "none", "engine": "auto", "depth": None, "queue": None, "buffered": False}
    data = random_bytes(1, 3 * NBYTES).reshape(3, NBYTES)
    engines = [_shared_files.SharedFiles(str(tmp_path / above), LAYOUT, 64 << 20, True, options) for _ in range(2)]
    transfer = engines[0].store([b"a", b"b", b"c"], list(data))
    assert transfer is not None
    transfer.wait(PATIENCE)
    for what in ("stat", "check"):
        assert cli.main(["files", what, "--json", str(tmp_path / "kv")]) == 0
        found = json.loads(capsys.readouterr().out)["stores"]
        assert [Path(store["directory"]).name for store in found] == ["writer-0000", "writer-0001"]
        assert [store.get("blocks", store.get("right")) for store in found] == [3, 0]
    for engine in engines:
        engine.close()
    layout = engines[0].folders[0]
    shutil.rmtree(layout / "writer-0001")
    assert cli.main(["files", "stat", str(tmp_path / "kv")]) == 0
    assert f"{layout / 'writer-0000'}\n" in capsys.readouterr().out
    assert cli.main(["files", "gc", str(tmp_path / "kv")]) == 2
    assert f"name one of {layout / 'writer-0000'}" in capsys.readouterr().err
    deep = tmp_path / "x" / "1" / "2" / "3" / "4"
    shutil.copytree(layout / "writer-0000", deep)
    assert cli.main(["files", "stat", str(tmp_path / "x")]) == 3
    assert "neither store.kvs nor segment-*.kvs in it, nor in a folder of it, 3 levels down" in capsys.readouterr().err
    assert cli.main(["files", "stat", str(tmp_path / "x" / "1")]) == 0


def test_a_folder_that_cannot_be_read(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    scan = os.scandir

    def refuse(path: Path) -> Iterator[os.DirEntry[str]]:
        if path == tmp_path / "other":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert cli.main(["files", "stat", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "20 of 24 slots" in out and f"{tmp_path / 'other'}: Permission denied" in err
