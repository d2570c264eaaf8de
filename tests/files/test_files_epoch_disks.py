"""Epochs on disks that are full, read-only or damaged, and files of it that are lost or left by a killed process."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import os
from pathlib import Path

import file_reader
import pytest
from conftest import PATIENCE, until
from disks import RESERVES
from disks import disk as mounted
from test_files import keys_of
from test_files_epoch import load_fails, open_one
from test_files_shared import LAYOUT, block_of, check, open_store, put

import kvswap
from kvswap import _C, files
from kvswap.files import FileStore

KEYS = keys_of(5)


@pytest.mark.parametrize("kind", RESERVES)
def test_a_full_disk_can_be_cleared(tmp_path: Path, kind: str) -> None:
    """Again and again: the space of the next file is reserved. xfs frees that of the older file a while later."""
    with mounted(kind, tmp_path) as disk, open_one(disk.path) as store:
        put(store, KEYS)
        for _ in range(1 if kind == "xfs" else 4):
            disk.fill()
            with pytest.raises(OSError, match="No space left"):
                (disk.path / "more").write_bytes(bytes(20000))
            store.clear()
            assert not any(store.contains(KEYS))
            put(store, KEYS)  # its slots are there
            check(store, KEYS)
            (disk.path / "more").unlink(missing_ok=True)


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_a_disk_that_is_read_only(tmp_path: Path, kind: str) -> None:
    """Clearing fails, nothing has changed; a reader sees it when it is done later."""
    with mounted(kind, tmp_path) as disk:
        with open_one(disk.path) as store:
            put(store, KEYS)
        disk.remount("ro")
        with open_one(disk.path, readonly=True) as reader:
            for clear in (reader.clear, lambda: files.clear(disk.path)):
                with pytest.raises(kvswap.Error, match=r"clearing .*one: Read-only file system"):
                    clear()
            assert all(reader.contains(KEYS))
            check(reader, KEYS)
            disk.remount("rw")
            assert all(reader.contains(KEYS))
            files.clear(disk.path)
            assert not any(reader.contains(KEYS))
            load_fails(reader, KEYS)


@pytest.mark.parametrize("shared", [True, False])
def test_an_older_store(tmp_path: Path, shared: bool) -> None:
    """Without a file, and of headers of zeros: it is found, also where no file can be made, until it is cleared."""
    folder = tmp_path / ("s" if shared else "one")
    for part in (KEYS[:1], KEYS):  # the second time it is no new store
        for name in ("epoch.kvs", "epoch.tmp"):
            (folder / name).unlink(missing_ok=True)
        with open_store(tmp_path) if shared else open_one(tmp_path) as store:
            put(store, part)
    for name in ("epoch.kvs", "epoch.tmp"):
        (folder / name).unlink()
    writer = folder / "writer-0000" if shared else folder
    assert {block.header.epoch for block in file_reader.read_store(writer).values()} == {bytes(16)}
    with FileStore(writer, LAYOUT, readonly=True) as reader:
        assert all(reader.contains(KEYS)) and not (folder / "epoch.kvs").exists()
        check(reader, KEYS)
        with open_store(tmp_path) if shared else open_one(tmp_path) as store:  # which makes the file
            assert all(store.contains(KEYS) + reader.contains(KEYS))
            assert file_reader.read_epoch(folder) == bytes(16)
            reader.clear()
            assert not any(store.contains(KEYS) + reader.contains(KEYS))
            load_fails(reader, KEYS)


def test_a_file_that_is_lost(tmp_path: Path) -> None:
    """A new store's epoch is random, so that no block belongs to the zero without a file. An engine that runs keeps its
    own."""
    with open_one(tmp_path) as store:
        put(store, KEYS)
        store.clear()
        put(store, KEYS[:2])
        (tmp_path / "one" / "epoch.kvs").unlink()
        with open_one(tmp_path, readonly=True) as reader:
            assert not any(reader.contains(KEYS))
        check(store, KEYS[:2])
    with open_one(tmp_path) as store:
        assert not any(store.contains(KEYS)) and store.stats()["blocks"] == 0
        put(store, KEYS)
        check(store, KEYS)


def test_a_mark_that_a_killed_process_left(tmp_path: Path) -> None:
    """Look-ups are by name, and right; the next opening removes the mark."""
    with open_one(tmp_path) as store:
        put(store, KEYS)
        path = tmp_path / "one" / "epoch.kvs"
        with open(path, "r+b") as file:
            file.seek(4096)
            file.write(b"\1")
        check(store, KEYS)
        assert all(store.contains(KEYS))
        store.clear()
        assert not any(store.contains(KEYS))
        put(store, KEYS)
        with open(path, "r+b") as file:
            file.seek(4096)
            file.write(b"\1")
    with open_one(tmp_path) as store:
        assert path.read_bytes()[4096] == 0
        check(store, KEYS)


@pytest.mark.parametrize("how", ["damaged", "others", "link"])
def test_a_file_that_cannot_be_trusted(tmp_path: Path, how: str) -> None:
    """No block is found, and none stored, until the store is cleared; opening it as a writer does that."""
    path = tmp_path / "one" / "epoch.kvs"

    def spoil() -> None:
        if how == "damaged":
            with open(path, "r+b") as file:
                file.seek(20)
                file.write(b"spoilt")
        elif how == "others":
            path.chmod(0o666)
        else:
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")

    with open_one(tmp_path) as store:
        put(store, KEYS)
        spoil()
        until(lambda: not any(store.contains(KEYS)))
        refused = store.store(KEYS, [block_of(key) for key in KEYS])
        with pytest.raises(kvswap.Error, match=r"epoch.kvs in the store's directory cannot be read: clear the store"):
            refused.wait(PATIENCE)
        store.clear()
        put(store, KEYS)
        check(store, KEYS)
        spoil()
    with open_one(tmp_path, readonly=True) as reader:
        assert not any(reader.contains(KEYS))
    with open_one(tmp_path) as store:
        assert not any(store.contains(KEYS))
        put(store, KEYS)
        check(store, KEYS)


def test_a_process_that_hangs_while_it_clears(tmp_path: Path) -> None:
    """Another one does not wait without end, and nothing is cleared."""
    import fcntl

    with open_one(tmp_path) as store:
        put(store, KEYS)
        with open(tmp_path / "one" / "epoch.tmp", "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(kvswap.Error, match="another process has been clearing it for 10 s: nothing is cleared"):
                _C._file_clear(tmp_path / "one")
            check(store, KEYS)
        _C._file_clear(tmp_path / "one")
        assert not any(store.contains(KEYS))
    assert os.listdir(tmp_path / "one")
