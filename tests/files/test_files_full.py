"""A store outlives its disk: opened again on a full, read-only or over-quota file system it serves what it has."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, ROOT, until
from disks import KINDS, RESERVES, Disk, cannot, disk
from test_files import blocks_of, keys_of

import kvswap
from kvswap import testing
from kvswap.files import FileStore, Layout

NBYTES = 65536
MKFS = {"quota": "btrfs"}


@pytest.fixture(params=KINDS)
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    with disk(str(request.param), tmp_path) as made:
        yield made


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Disk]:
    with disk("tmpfs", tmp_path) as made:
        yield made


def open_store(folder: Path, **options: Any) -> FileStore:
    return FileStore(folder, Layout(NBYTES, model="m"), **{"capacity": 16 << 20, "segment_nbytes": 1 << 20, **options})


def put(store: FileStore, keys: list[bytes], data: Any) -> None:
    store.store(keys, data, range(len(keys)), replace=False).wait(PATIENCE)


def check(store: FileStore, keys: list[bytes], data: Any) -> None:
    until(lambda: store.contains(keys) == [True] * len(keys))
    target = np.zeros_like(data)
    store.load(keys, target, range(len(keys))).wait(PATIENCE)
    np.testing.assert_array_equal(target, data)


def refuses(store: FileStore, code: int | tuple[int, ...], key: bytes = b"new") -> None:
    """Stores and deletes fail block by block, with the reason; kept ones do not fail."""
    transfer = store.store([key], np.zeros((1, NBYTES), np.uint8), [0], replace=False)
    with pytest.raises(kvswap.Error) as raised:
        transfer.wait(PATIENCE)
    codes = code if isinstance(code, tuple) else (code,)
    assert any(f"errno {each}" in str(raised.value) for each in codes), raised.value
    assert transfer.failed_positions.tolist() == [0] and list(transfer.reasons) == [0]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("durability", ["none", "fsync"])
def test_opened_again_on_a_full_disk(
    small: Disk, shared: bool, durability: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """With reservations it stays writable: older blocks make way. Elsewhere it is read-only, and says so once."""
    data, keys = blocks_of(1, 24, NBYTES), keys_of(24)
    options = {"shared": shared, "durability": durability}
    with open_store(small.path / "kv", **options) as store:
        put(store, keys, data)
        small.fill()
        check(store, keys, data)
    for turn in range(4):
        caplog.clear()
        with open_store(small.path / "kv", **options) as store:
            check(store, keys[4 * turn :], data[4 * turn :])
            readonly = store.info["readonly"]
            assert bool(store.info["readonly_note"]) == readonly == bool(len(warnings_of(caplog)))
            if small.kind in RESERVES:
                assert not readonly
                put(store, keys_of(4, f"more-{turn}"), data[:4])
                check(store, keys_of(4, f"more-{turn}"), data[:4])
            elif readonly:
                refuses(store, (errno.ENOSPC, errno.EDQUOT))
                assert "the file store is read-only until it is opened again" in warnings_of(caplog)[0]
    small.drain()
    with open_store(small.path / "kv", **options) as store:
        assert not store.info["readonly"] and store.info["readonly_note"] == ""
        put(store, [b"later"], data[:1])
        check(store, [b"later"], data[:1])


@pytest.mark.parametrize("shared", [False, True])
def test_a_read_only_file_system(small: Disk, shared: bool, caplog: pytest.LogCaptureFixture) -> None:
    data, keys = blocks_of(2, 12, NBYTES), keys_of(12)
    with open_store(small.path / "kv", shared=shared) as store:
        put(store, keys, data)
    if not small.remount("ro"):
        cannot("the file system cannot be remounted")
    try:
        for _ in range(2):
            caplog.clear()
            with open_store(small.path / "kv", shared=shared) as store, open_store(small.path / "kv", shared=shared):
                check(store, keys, data)
                refuses(store, errno.EROFS)
                with pytest.raises(kvswap.Error, match="errno 30"):
                    store.delete(keys[:1]).wait(PATIENCE)
                assert store.info["readonly"] and "Read-only file system" in store.info["readonly_note"]
                assert store.store(keys, data, range(12), replace=False).wait(PATIENCE) is None
            assert len(warnings_of(caplog)) == 2  # one a store
    finally:
        assert small.remount("rw")
    with open_store(small.path / "kv", shared=shared) as store:
        put(store, [b"later"], data[:1])
        check(store, [*keys, b"later"], np.concatenate([data, data[:1]]))


def test_nothing_to_serve_is_the_error_of_the_disk(tmpfs: Disk) -> None:
    tmpfs.fill()
    for shared in (False, True):
        with pytest.raises(kvswap.Error, match="No space left"):
            open_store(tmpfs.path / f"kv{shared}", shared=shared)


def test_writers_of_a_full_directory(small: Disk) -> None:
    """Free places of writers are taken over without new space; where there is none, the blocks of all are served."""
    if small.kind not in RESERVES:
        pytest.skip("copies on write: the others show it")
    data, keys = blocks_of(3, 12, NBYTES), keys_of(12)
    one, two = (open_store(small.path / "kv", shared=True) for _ in range(2))
    put(one, keys[:6], data[:6])
    put(two, keys[6:], data[6:])
    one.close()
    small.fill()
    with open_store(small.path / "kv", shared=True) as again:
        check(again, keys, data)
        assert not again.info["readonly"]
        put(again, [b"more"], data[:1])
        with open_store(small.path / "kv", shared=True) as third:
            assert third.info["readonly"]
            check(third, keys, data)
            refuses(third, errno.ENOSPC)
            put(two, [b"news"], data[:1])
            check(third, [b"news"], data[:1])
    two.close()


def test_a_store_of_an_older_version_on_a_full_disk(tmpfs: Disk, caplog: pytest.LogCaptureFixture) -> None:
    """Its file has a page that was never allocated."""
    data, keys = blocks_of(4, 8, NBYTES), keys_of(8)
    with open_store(tmpfs.path / "kv") as store:
        put(store, keys, data)
    with open(tmpfs.path / "kv" / "store.kvs", "r+b") as file:
        state = file.read()
        file.truncate(4096)
        file.truncate(8192)
        newest = max(4096, 8192, key=lambda at: state[at + 16 : at + 24][::-1])
        file.seek(newest)
        file.write(state[newest : newest + 4096])
    tmpfs.fill()
    with open_store(tmpfs.path / "kv") as store:
        check(store, keys, data)
        refuses(store, errno.ENOSPC)
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_write_that_fails_at_open(tmp_path: Path, code: int, nth: int) -> None:
    data, keys = blocks_of(5, 8, NBYTES), keys_of(8)
    with open_store(tmp_path / "kv") as store:
        put(store, keys, data)
    with testing.file_fault(None, "write", "fail", nth=nth, every=1, code=code):
        store = open_store(tmp_path / "kv")
    check(store, keys, data)
    if nth < 3:
        refuses(store, code)
    store.close()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("how", ["removed", "replaced", "renamed"])
def test_a_directory_that_is_removed_or_replaced(
    tmp_path: Path, shared: bool, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Loads go on; stores fail, said once; where it comes back they go on."""
    data, keys = blocks_of(7, 12, NBYTES), keys_of(12)
    folder = tmp_path / "kv"
    with open_store(folder, shared=shared) as store:
        put(store, keys, data)
        if how == "removed":
            shutil.rmtree(folder)
        else:
            folder.rename(tmp_path / "elsewhere")
        if how == "replaced":
            shutil.copytree(tmp_path / "elsewhere", folder)
        until(lambda: (store.stats(), warnings_of(caplog))[1])
        for i in range(20):
            refuses(store, (errno.ENOENT, errno.ESTALE), b"new-%d" % i)
            check(store, keys, data)
        time.sleep(1.2)
        store.contains(keys)
        assert len(warnings_of(caplog)) == 1 and "was removed or replaced" in warnings_of(caplog)[0]
        assert store.stats()["evicted"] == 0 and store.stats()["blocks"] == 12
        if how != "removed":
            shutil.rmtree(folder, ignore_errors=True)
            (tmp_path / "elsewhere").rename(folder)
            time.sleep(1.2)
            put(store, [b"back"], data[:1])
            check(store, [b"back"], data[:1])


@pytest.mark.parametrize("what", ["emptied", "cut", "removed", "replaced"])
def test_notices_that_are_cut_beneath_their_readers_and_writer(tmp_path: Path, what: str) -> None:
    """Nothing is mapped: no bus error; what is stored later is found again."""
    data = blocks_of(6, 30, NBYTES)
    with open_store(tmp_path / "kv", shared=True) as one, open_store(tmp_path / "kv", shared=True) as two:
        for turn in range(4):
            keys = keys_of(6, f"{turn}")
            put(one, keys, data[:6])
            check(two, keys, data[:6])
            path = tmp_path / "kv" / "writer-0000" / "notices.kvs"
            if what in ("emptied", "cut"):
                os.truncate(path, 0 if what == "emptied" else 5000)
            else:
                path.unlink(missing_ok=True)
            if what == "replaced":
                path.write_bytes(b"\0" * 3_000_000)
                path.chmod(0o600)
            for i in range(20):
                put(one, keys_of(1, f"beside-{turn}-{i}"), data[:1])
                two.contains(keys)
        check(two, [b"beside-3-%d-0" % i for i in range(20)], np.repeat(data[:1], 20, axis=0))
        until(lambda: path.exists() and path.stat().st_size > 2_000_000)


@pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")
def test_what_disks_do(tmp_path: Path) -> None:
    """A short run of tests/random/disk_life.py; 3,000 openings take three minutes."""
    if os.geteuid():
        cannot("a file system can be mounted by root only")
    command = [sys.executable, os.fspath(ROOT / "tests" / "random" / "disk_life.py"), "--openings", "120"]
    kinds = [kind for kind in KINDS if kind in ("tmpfs", "overlay") or shutil.which(f"mkfs.{MKFS.get(kind, kind)}")]
    command += ["--least", "1", "--seed", "20", "--folder", os.fspath(tmp_path), "--kinds", ",".join(kinds)]
    environment = {**os.environ, "PYTHONPATH": os.fspath(Path(kvswap.__file__).parent.parent)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    if "Skipped" in run.stderr:
        cannot(run.stderr.strip().splitlines()[-1])
    assert run.returncode == 0, run.stdout + run.stderr
