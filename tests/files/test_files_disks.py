"""A store over several directories, as on several disks."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import file_reader
import numpy as np
import pytest
from conftest import PATIENCE, ROOT, random_bytes, run_python
from test_files import have_engine, keys_of

import kvswap
from kvswap import testing
from kvswap.files import FileStore, Layout

NBYTES, PER_SEGMENT = 5000, 8
SLOT = 4096 + 8192
SEGMENT = 4096 + PER_SEGMENT * SLOT
LAYOUT = Layout(NBYTES, model="m", tp_rank=0)


def disks(folder: Path, count: int = 2) -> list[Path]:
    return [folder / f"disk{i}" for i in range(count)]


def open_store(directories: Any, segments: int = 16, **options: Any) -> FileStore:
    return FileStore(directories, LAYOUT, **{"capacity": segments * SEGMENT, "segment_nbytes": SEGMENT, **options})


def blocks_of(seed: int, count: int) -> Any:
    return random_bytes(seed, count * NBYTES).reshape(count, NBYTES)


def put(store: FileStore, keys: list[bytes], blocks: Any) -> None:
    store.store(keys, blocks, range(len(keys))).wait(PATIENCE)


def check(store: FileStore, keys: list[bytes], blocks: Any) -> None:
    target = np.zeros((len(keys), NBYTES), np.uint8)
    store.load(keys, target, range(len(keys))).wait(PATIENCE)
    np.testing.assert_array_equal(target, blocks)


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
@pytest.mark.parametrize("count", [2, 3])
def test_blocks_are_spread(tmp_path: Path, engine: str, count: int) -> None:
    """Over all directories; and found again, whatever the order of the directories."""
    have_engine(engine, tmp_path)
    where, blocks, keys = disks(tmp_path, count), blocks_of(1, 60), keys_of(60)
    with open_store(where, engine=engine) as store:
        put(store, keys, blocks)
        check(store, keys, blocks)
        stats = store.stats()
    epoch = file_reader.epoch_of(where)
    held = [len(file_reader.read_store(folder, epoch)) for folder in where]
    assert sum(held) == 60 and min(held) >= 5
    assert stats["segments"] == sum(len(list(folder.glob("segment-*"))) for folder in where)
    with open_store(where[::-1]) as store:
        assert store.stats()["found"] == 60 and store.stats()["cut"] == 0
        check(store, keys, blocks)
        put(store, keys[:30], blocks[30:])
        store.delete(keys[30:40]).wait(PATIENCE)
    with open_store(where, readonly=True, capacity=None) as reader:
        check(reader, keys[:30] + keys[40:], np.concatenate([blocks[30:], blocks[40:]]))
        assert reader.contains(keys[30:40]) == [False] * 10


def test_the_files_are_those_of_one_directory(tmp_path: Path) -> None:
    """But for a field of the layout, which names the set."""
    where = disks(tmp_path)
    with open_store(where) as store:
        put(store, keys_of(20), blocks_of(1, 20))
    texts = [
        file_reader.read_geometry((folder / "store.kvs").read_bytes()[:4096], b"KVSSTORE").layout for folder in where
    ]
    assert texts[0] == texts[1] and texts[0].startswith('{"":"') and texts[0].endswith('/2",' + LAYOUT.text[1:])
    for folder in where:
        assert [c.clean for c in file_reader.read_checkpoints(folder / "store.kvs")][-1:] != []
        geometry, found = file_reader.read_segment(next(iter(folder.glob("segment-*"))))
        assert geometry.layout == texts[0]
        assert all(file_reader.crc32c(block.data) == block.header.data_crc for block in found)


def test_all_directories_or_none(tmp_path: Path) -> None:
    where, blocks = disks(tmp_path, 4), blocks_of(1, 20)
    with open_store(where[:2]) as store:
        put(store, keys_of(20), blocks)
    with open_store(where[2:]) as store:
        put(store, keys_of(20), blocks)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.kvs")}
    one_of = "is one of the 2 directories of a store, and {} were named: name all of them, and no others"
    for named, message in (
        (where[:1], "holds blocks of another layout"),
        ([where[0], tmp_path / "new"], "has no store's files, but the other directories have"),
        (where[:3], one_of.format(3)),
        ([where[0], where[2]], one_of.format(2)),
    ):
        for readonly in (False, True):
            with pytest.raises((ValueError, kvswap.Error), match=message if not readonly else None):
                open_store(named, readonly=readonly)
    with pytest.raises(kvswap.Error, match="open twice in this one"):
        open_store([where[0], where[0]])
    assert {path: path.read_bytes() for path in before} == before
    with open_store(where[:2]) as store:
        check(store, keys_of(20), blocks)


def test_a_store_of_one_directory_joins_no_other(tmp_path: Path) -> None:
    where = disks(tmp_path)
    with open_store(where[0]) as store:
        put(store, keys_of(3), blocks_of(1, 3))
    with pytest.raises(ValueError, match="disk0 holds blocks of another layout"):
        open_store(where)
    with open_store([where[0]]) as store:
        check(store, keys_of(3), blocks_of(1, 3))


def test_a_new_disk_in_place_of_a_lost_one(tmp_path: Path) -> None:
    """The lost one could come back with what was deleted since: all begin anew."""
    where = disks(tmp_path)
    with open_store(where) as store:
        put(store, keys_of(20), blocks_of(1, 20))
    shutil.rmtree(where[1])
    with pytest.raises(ValueError, match=r"disk1 has no store's files, .* empty all of them to begin anew"):
        open_store(where)
    shutil.rmtree(where[1])
    for path in where[0].iterdir():
        path.unlink()
    with open_store(where) as store:
        assert store.stats()["found"] == 0
        put(store, keys_of(20), blocks_of(1, 20))


def test_opening_was_interrupted(tmp_path: Path) -> None:
    """One directory has the set's first page, the other none yet."""
    where = disks(tmp_path)
    open_store(where).close()
    os.unlink(where[1] / "store.kvs")
    with open_store(where) as store:
        put(store, keys_of(20), blocks_of(1, 20))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_first_page_is_made_again(tmp_path: Path, lost: int) -> None:
    where, blocks = disks(tmp_path), blocks_of(1, 40)
    with open_store(where) as store:
        put(store, keys_of(40), blocks)
    with open(where[lost] / "store.kvs", "r+b") as file:
        file.write(bytes(4096))
    with open_store(where) as store:
        check(store, keys_of(40), blocks)


def test_capacity_is_of_all_directories(tmp_path: Path) -> None:
    where = disks(tmp_path)
    with open_store(where, segments=4) as store:
        for i in range(6):
            put(store, keys_of(16, f"{i}"), blocks_of(i, 16))
        stats = store.stats()
        assert stats["segments"] == 4 and stats["blocks"] == 32 and stats["evicted"] == 64
        assert store.contains(keys_of(16, "5") + keys_of(16, "4")) == [True] * 32
    assert [len(list(folder.glob("segment-*"))) for folder in where] == [2, 2]
    with open_store(where, segments=2) as store:  # the oldest of both go
        assert store.stats()["segments"] == 2 and store.stats()["blocks"] == 16
    assert [len(list(folder.glob("segment-*"))) for folder in where] == [1, 1]


def test_one_directory_is_full(tmp_path: Path) -> None:
    """The other takes the blocks."""
    where, blocks = disks(tmp_path), blocks_of(1, 24)
    with open_store(where) as store:
        with testing.file_fault(store, "allocate", "fail", nth=1, code=errno.ENOSPC):
            put(store, keys_of(24), blocks)
        check(store, keys_of(24), blocks)
    assert sorted(len(list(folder.glob("segment-*"))) for folder in where) == [0, 3]


def test_newer_blocks_win_over_older_ones_elsewhere(tmp_path: Path) -> None:
    """A replaced block whose header could not be erased lies on one disk, its successor on the other."""
    where, blocks = disks(tmp_path), blocks_of(1, 2)
    with open_store(where) as store:
        put(store, [b"a"], blocks[:1])
        saved = {path: path.read_bytes() for path in tmp_path.rglob("segment-*")}
        put(store, [b"a"], blocks[1:])
    (path,) = saved  # bring the older one back, as an erase that was lost would
    path.write_bytes(saved[path])
    with open_store(where) as store:
        check(store, [b"a"], blocks[1:])
    with open_store(where) as store:  # it was erased
        store.delete([b"a"]).wait(PATIENCE)
    with open_store(where) as store:
        assert store.contains([b"a"]) == [False]


def test_reader_beside_the_writer(tmp_path: Path) -> None:
    where, blocks = disks(tmp_path), blocks_of(1, 40)
    with open_store(where) as store, open_store(where, readonly=True) as reader:
        put(store, keys_of(40), blocks)
        reader.refresh()
        check(reader, keys_of(40), blocks)


def test_wrong_directories(tmp_path: Path) -> None:
    for error, message, directories in (
        (ValueError, "directory is a list of 0: must be of 1 to 64", []),
        (ValueError, "directory is a list of 65", disks(tmp_path, 65)),
        (TypeError, "int", [tmp_path / "a", 7]),
        (ValueError, "directory 1 is empty", [tmp_path / "a", ""]),
    ):
        with pytest.raises(error, match=message):
            open_store(directories)
    for text in ("[]", '{"x":"' + "y" * 3040 + '"}'):

        class Odd:
            block_nbytes = NBYTES

        Odd.text = text
        with pytest.raises(ValueError, match="must be a JSON object of at most"):
            FileStore(disks(tmp_path), Odd(), capacity=1 << 20)


def test_pools_of_a_device(tmp_path: Path) -> None:
    device = kvswap.Device("host:5")
    memory = device.alloc(40 * NBYTES)
    pool = kvswap.Pool(device, memory.ptr, 40, NBYTES)
    blocks, view = blocks_of(1, 20), np.asarray(memory).reshape(40, NBYTES)
    view[:20] = blocks
    with open_store(disks(tmp_path), device=device) as store:
        store.store(keys_of(20), pool, range(20)).wait(PATIENCE)
        store.load(keys_of(20), pool, range(20, 40)).wait(PATIENCE)
        np.testing.assert_array_equal(view[20:], blocks)


@pytest.mark.not_sanitized("processes that are killed, for seconds: what they run, other tests run under sanitizers")
def test_killed_at_any_point(tmp_path: Path) -> None:
    """An odd seed has two directories (tests/random/kill_files.py); thousands of points take `... 1 3000 600`."""
    program = ROOT / "tests" / "random" / "kill_files.py"
    run = run_python(f"""
        import runpy, sys
        sys.argv = ["kill_files.py", {str(tmp_path)!r}, "1", "60", "20"]
        runpy.run_path({str(program)!r}, run_name="__main__")
    """)
    assert run.returncode == 0, run.stdout + run.stderr
