"""Clearing: a new epoch, which all processes of a directory see."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import json
import os
from pathlib import Path

import file_reader
import numpy as np
import pytest
from conftest import PATIENCE, until
from test_files import keys_of
from test_files_shared import LAYOUT, NBYTES, PER_SEGMENT, SEGMENT, block_of, check, finds, open_store, put

import kvswap
from kvswap import _C, cli, files, testing
from kvswap.files import FileStore


def open_one(folder: Path, **options: object) -> FileStore:
    more = {} if options.get("readonly") else {"capacity": 8 * SEGMENT, "segment_nbytes": SEGMENT}
    return FileStore(folder / "one", LAYOUT, **more, **options)


def load_fails(store: FileStore, keys: list[bytes]) -> None:
    target = np.zeros((len(keys), NBYTES), np.uint8)
    load = store.load(keys, target, range(len(keys)))
    with pytest.raises(kvswap.Error, match="is not in the store"):
        load.wait(PATIENCE)
    assert len(load.failed_positions) == len(keys)


@pytest.mark.parametrize("shared", [True, False])
def test_what_was_stored_is_gone_for_all(tmp_path: Path, shared: bool) -> None:
    keys = keys_of(12)
    first = open_store(tmp_path) if shared else open_one(tmp_path)
    put(first, keys)
    first.pin(keys[:2])
    second = open_store(tmp_path) if shared else open_one(tmp_path, readonly=True)
    assert all(second.contains(keys))
    second.clear()
    for store in (first, second):
        assert not any(store.contains(keys)) and store.keys() == []
        load_fails(store, keys)
        with pytest.raises(kvswap.Error, match="is not in the store: nothing was pinned"):
            store.pin(keys[:1])
    assert first.stats()["blocks"] == 0
    first.unpin(keys[:2])
    put(first, keys[:5])
    if not shared:
        second.refresh()
    finds(second, keys[:5])
    check(second, keys[:5])
    assert not any(second.contains(keys[5:]))
    second.close()
    first.close()
    with open_store(tmp_path) if shared else open_one(tmp_path) as again:
        assert again.contains(keys) == [True] * 5 + [False] * 7
        check(again, keys[:5])


def test_slots_are_free_again(tmp_path: Path) -> None:
    """Without a new file, in the engine that runs and in the next one."""
    with open_one(tmp_path) as store:
        for turn in range(5):
            put(store, keys_of(2 * PER_SEGMENT, f"{turn}"))
            store.clear()
        assert store.stats()["segments"] == 2 and store.stats()["evicted"] == 0
    with open_one(tmp_path) as store:
        put(store, keys_of(2 * PER_SEGMENT, "more"))
        assert store.stats()["segments"] == 2 and store.stats()["evicted"] == 0 and store.stats()["found"] == 0
    blocks = file_reader.read_store(tmp_path / "one")
    assert set(blocks) == set(keys_of(2 * PER_SEGMENT, "more"))


def test_engines_that_have_ended(tmp_path: Path) -> None:
    """Blocks of writers that do not run are cleared, too."""
    keys = keys_of(6)
    for part in (keys[:3], keys[3:]):
        with open_store(tmp_path) as store:
            put(store, part)
    _C._file_clear(tmp_path / "s")
    with open_store(tmp_path) as store:
        assert not any(store.contains(keys))


def test_a_writers_directory_is_of_the_epoch_around_it(tmp_path: Path) -> None:
    keys = keys_of(3)
    with open_store(tmp_path) as store:
        put(store, keys)
    with FileStore(tmp_path / "s" / "writer-0000", LAYOUT, readonly=True) as reader:
        assert all(reader.contains(keys))
        check(reader, keys)
        _C._file_clear(tmp_path / "s")
        assert not any(reader.contains(keys))
    assert not (tmp_path / "s" / "writer-0000" / "epoch.kvs").exists()


def test_several_directories(tmp_path: Path) -> None:
    """A new epoch in any of them is one of the store."""
    where, keys = [tmp_path / name for name in ("a", "b", "c")], keys_of(9)
    options = {"capacity": 24 * SEGMENT, "segment_nbytes": SEGMENT}
    with FileStore(where, LAYOUT, **options) as store, FileStore(where, LAYOUT, readonly=True) as reader:
        put(store, keys)
        store.clear()
        assert not any(store.contains(keys) + reader.contains(keys))
        for folder in where:
            put(store, keys)
            reader.refresh()
            assert all(reader.contains(keys))
            _C._file_clear(folder)
            assert not any(store.contains(keys) + reader.contains(keys))
        put(store, keys)
        assert len({file_reader.read_epoch(folder) for folder in where}) == 3
    with FileStore(where[::-1], LAYOUT, **options) as store:
        assert all(store.contains(keys))


def test_a_store_that_was_submitted_before(tmp_path: Path) -> None:
    """Is not published, and its slot is free; what is submitted afterwards is stored."""
    keys = keys_of(4)
    with open_one(tmp_path, engine="threads", depth=1) as store, open_one(tmp_path, readonly=True) as reader:
        put(store, [b"first-"])  # which makes the file
        with testing.file_fault(store, "write", "delay", delay=100.0):
            blocks = [block_of(key) for key in keys]
            before = store.store(keys, blocks)
            until(lambda: store.stats()["unfinished_stores"])
            reader.clear()
            after = store.store(keys[:2], blocks[:2])
        with pytest.raises(kvswap.Error, match="storing block 0: the store was cleared after the block was submitted"):
            before.wait(PATIENCE)
        assert len(before.failed_positions) == 4
        after.wait(PATIENCE)
        assert store.contains(keys) == [True, True, False, False]
        check(store, keys[:2])
        put(store, keys_of(PER_SEGMENT - 2, "more"))
        assert store.stats()["segments"] == 1  # of 8 slots: none is lost


def test_a_load_that_began_before(tmp_path: Path) -> None:
    """Fails as missing, and its slot is not written before it has ended."""
    keys = keys_of(PER_SEGMENT)
    with open_one(tmp_path, engine="threads", depth=2) as store:
        put(store, keys)
        target = np.zeros((1, NBYTES), np.uint8)
        with testing.file_fault(store, "read", "delay", delay=100.0):
            load = store.load(keys[:1], target, [0])
            with pytest.raises(TimeoutError):
                load.wait(1.0)  # its read begins
            _C._file_clear(tmp_path / "one")
            put(store, keys_of(PER_SEGMENT - 1, "new"))
            assert store.stats()["segments"] == 1
            assert not load.done()
        with pytest.raises(kvswap.Error, match="block 0 is not in the store: it was cleared during the load"):
            load.wait(PATIENCE)
        assert store.stats()["missed"] == 1
        put(store, [b"last-one"])
        assert store.stats()["segments"] == 1 and store.stats()["evicted"] == 0
        check(store, keys_of(PER_SEGMENT - 1, "new"))


def test_deletes_that_had_not_begun(tmp_path: Path) -> None:
    keys = keys_of(PER_SEGMENT)
    with open_one(tmp_path, engine="threads", depth=1) as store:
        put(store, keys)
        with testing.file_fault(store, "write", "delay", delay=100.0):
            deletes = [store.delete(keys[i : i + 1]) for i in range(4)]
            _C._file_clear(tmp_path / "one")
            assert not any(store.contains(keys))
        for delete in deletes:
            delete.wait(PATIENCE)
        put(store, keys_of(PER_SEGMENT, "new"))
        assert store.stats()["segments"] == 1 and store.stats()["evicted"] == 0
        check(store, keys_of(PER_SEGMENT, "new"))


def test_a_delete_that_began_before(tmp_path: Path) -> None:
    """Its slot is given back once."""
    keys = keys_of(PER_SEGMENT)
    with open_one(tmp_path, engine="threads", depth=2) as store:
        put(store, keys)
        with testing.file_fault(store, "write", "delay", delay=100.0):
            delete = store.delete(keys[:1])
            until(lambda: store.stats()["unfinished_stores"])
            _C._file_clear(tmp_path / "one")
            assert not any(store.contains(keys))
        delete.wait(PATIENCE)
        put(store, keys_of(PER_SEGMENT, "new"))
        assert store.stats()["segments"] == 1 and store.stats()["evicted"] == 0
        check(store, keys_of(PER_SEGMENT, "new"))


@pytest.mark.parametrize("call", ["open", "write", "sync"])
def test_clears_that_fail(tmp_path: Path, call: str) -> None:
    """At any of their calls: what was stored is there, all of it or nothing, and the next clear is not hindered."""
    outcomes = []
    with open_one(tmp_path) as store, open_one(tmp_path, readonly=True) as reader:
        for nth in range(1, 5):
            put(store, keys_of(5))
            reader.refresh()
            with testing.file_fault(store, call, "fail", nth=nth):
                try:
                    store.clear()
                    failed = False
                except kvswap.Error as error:
                    assert str(error).startswith("clearing ")
                    failed = True
            there = set(store.contains(keys_of(5)) + reader.contains(keys_of(5)))
            assert len(there) == 1 and (failed or there == {False})
            outcomes.append((failed, *there))
            if there == {True}:
                check(reader, keys_of(5))
            store.clear()
            assert not any(store.contains(keys_of(5)) + reader.contains(keys_of(5)))
    assert outcomes[0] == (True, True) and outcomes[-1] == (False, False)
    assert ((True, False) in outcomes) == (call == "sync")  # of the directory, after the rename


# -- from outside -----------------------------------------------------------------------------------------------------


def nbytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("segment-*"))


def open_files(store: FileStore) -> list[str]:
    return [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two identities, one of them of LMCache's depth; an engine runs, others have ended."""
    keys = keys_of(3)
    for name in ("a", "4096"):
        (tmp_path / name).mkdir(mode=0o700)
    running = open_store(tmp_path / "a")
    with open_store(tmp_path / "a") as ended:
        put(running, keys[:1])
        put(ended, keys[1:])
        finds(running, keys)
    with FileStore(tmp_path / "4096" / "b", LAYOUT, capacity=8 * SEGMENT, segment_nbytes=SEGMENT) as other:
        put(other, keys)
    assert cli.main(["files", "clear", str(tmp_path), "--identity", "s"]) == 0
    text = capsys.readouterr().out
    assert f"{tmp_path}/a/s: cleared, 100 KiB of files removed; 1 running processes keep theirs" in text.replace(
        "\n", " "
    )
    assert not any(running.contains(keys)) and nbytes_of(tmp_path / "a") == SEGMENT
    assert nbytes_of(tmp_path / "4096") == SEGMENT
    until(lambda: not any("writer-0001/segment" in name for name in open_files(running)))  # its space is free
    put(running, keys)
    with open_store(tmp_path / "a") as again:
        assert all(again.contains(keys))
    with FileStore(tmp_path / "4096" / "b", LAYOUT, readonly=True) as other:
        assert all(other.contains(keys))
    assert cli.main(["files", "clear", str(tmp_path), f"--json={tmp_path / 'out.json'}"]) == 0
    found = json.loads((tmp_path / "out.json").read_text())["stores"]
    assert [(Path(one["directory"]).name, one["freed_nbytes"], one["running"]) for one in found] == [
        ("b", SEGMENT, 0),
        ("s", 0, 1),
    ]
    assert not any(running.contains(keys)) and nbytes_of(tmp_path / "4096") == 0
    running.close()
    with FileStore(tmp_path / "4096" / "b", LAYOUT, capacity=8 * SEGMENT, segment_nbytes=SEGMENT) as other:
        put(other, keys)
        check(other, keys)


def test_what_cannot_be_cleared(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no directory"):
        files.clear(tmp_path / "nothing")
    with pytest.raises(ValueError, match="holds no store, nor does a folder of it, 3 levels down"):
        files.clear(tmp_path)
    with open_store(tmp_path) as store:
        put(store, keys_of(3))
        with pytest.raises(ValueError, match=f"{tmp_path} holds no store other; there are s"):
            files.clear(tmp_path, identity="other")
        with pytest.raises(ValueError, match="is that of one writer: clear the directory around it"):
            files.clear(tmp_path / "s" / "writer-0000")
        assert all(store.contains(keys_of(3)))
        (tmp_path / "s").chmod(0o770)
        with pytest.raises(kvswap.Error, match="may be written by other users"):
            files.clear(tmp_path)
        (tmp_path / "s").chmod(0o700)
        assert all(store.contains(keys_of(3)))
        files.clear(tmp_path / "s")
        assert not any(store.contains(keys_of(3)))


def test_gc_after_a_clear(tmp_path: Path) -> None:
    """Files without a block of this epoch hold nothing. At depth 1 the last blocks are in one file."""
    with open_one(tmp_path, engine="threads", depth=1) as store:
        put(store, keys_of(2 * PER_SEGMENT))
        store.clear()
        put(store, keys_of(3))
    assert cli.main(["files", "gc", str(tmp_path / "one")]) == 0
    assert nbytes_of(tmp_path) == SEGMENT
    with open_one(tmp_path) as store:
        check(store, keys_of(3))
