"""FileStore.take_events(): which blocks came and went."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE
from test_files import blocks_of, keys_of
from test_files_shared import LAYOUT, NBYTES, SEGMENT, finds, open_store, put

from kvswap import _C, testing
from kvswap.files import FileStore, Layout


def open_one(folder: Path, **options: object) -> FileStore:
    return FileStore(folder / "one", LAYOUT, capacity=SEGMENT, segment_nbytes=SEGMENT, **options)


def store_blocks(store: FileStore, keys: list[bytes]) -> None:
    store.store(keys, blocks_of(1, len(keys), NBYTES), range(len(keys))).wait(PATIENCE)


def test_stores_deletes_and_evictions(tmp_path: Path) -> None:
    keys = keys_of(12)
    with open_one(tmp_path, events=100) as store:
        store_blocks(store, keys[:7])  # of 8 places: what is replaced needs one beside its old one
        found, lost = store.take_events()
        assert sorted(found) == sorted((key, True) for key in keys[:7]) and lost == 0
        assert store.take_events() == ([], 0)
        store_blocks(store, keys[:1])  # replaced: it was there
        assert store.take_events() == ([], 0)
        store.delete(keys[1:2]).wait(PATIENCE)
        store.delete(keys[1:2]).wait(PATIENCE)
        assert store.take_events() == ([(keys[1], False)], 0)
        store_blocks(store, keys[7:])
        there = set(keys[:1] + keys[2:7])
        found, lost = store.take_events()
        for key, now in found:
            assert (key in there) != now
            (there.add if now else there.discard)(key)
        assert there == set(store.keys()) and len(there) == 8 and lost == 0
    with open_one(tmp_path, events=100) as store:
        found, lost = store.take_events()
        assert sorted(found) == sorted((key, True) for key in there) and lost == 0
        assert store.take_events() == ([], 0) and len(store.keys()) == 8


def test_a_list_that_is_not_taken_is_dropped_as_a_whole(tmp_path: Path) -> None:
    with open_one(tmp_path, events=5) as store:
        store_blocks(store, keys_of(8))
        assert store.take_events() == ([], 8)
        store.delete(keys_of(2)).wait(PATIENCE)
        assert len(store.take_events()[0]) == 2
    with open_one(tmp_path) as store:
        store_blocks(store, keys_of(8, "other"))
        assert store.take_events() == ([], 0)
    with pytest.raises(ValueError, match="events is 0: must be 1 to"):
        open_one(tmp_path, events=0)


def test_a_damaged_block_is_gone(tmp_path: Path) -> None:
    with open_one(tmp_path, events=5, buffered=True) as store:
        store_blocks(store, keys_of(1))
        (path,) = (tmp_path / "one").glob("segment-*")
        with open(path, "r+b") as file:
            file.seek(4096 + 4096 + 100)
            file.write(b"damaged")
        load = store.load(keys_of(1), np.zeros((1, NBYTES), np.uint8), [0])
        with pytest.raises(Exception, match="damaged"):
            load.wait(PATIENCE)
        assert store.take_events() == ([(keys_of(1)[0], True), (keys_of(1)[0], False)], 0)


def test_those_of_other_writers(tmp_path: Path) -> None:
    keys = keys_of(4)
    with open_store(tmp_path) as one, open_store(tmp_path, events=100) as two:
        put(one, keys[:3])
        finds(two, keys[:3])
        put(two, keys[2:])
        assert sorted(two.take_events()[0]) == sorted((key, True) for key in keys)
        one.delete(keys[:1]).wait(PATIENCE)
        end = []
        while not end:
            end = two.take_events()[0]
        assert end == [(keys[0], False)]


# -- many at once -----------------------------------------------------------------------------------------------------

MANY = 10_000  # more than a piece of take_events(), and than the list has room for
SMALL = Layout(100)
SMALL_SEGMENT = 4096 + 1024 * 8192


def open_small(folder: Path, **options: object) -> FileStore:
    more = {"capacity": 64 * SMALL_SEGMENT, "segment_nbytes": SMALL_SEGMENT, "events": 50, "buffered": True, **options}
    return FileStore(folder / "s", SMALL, **more)


def store_many(store: FileStore, keys: list[bytes]) -> None:
    block = np.zeros((1, 100), np.uint8)
    for i in range(0, len(keys), 1000):
        store.store(keys[i : i + 1000], block, [0] * len(keys[i : i + 1000])).wait(PATIENCE)


def told(store: FileStore, known: set[bytes]) -> int:
    """Applies all events to what is known; returns in how many pieces they came."""
    pieces = 0
    while True:
        found, lost = store.take_events()
        assert lost == 0 and len(found) <= 4096 + 50
        if not found:
            return pieces
        pieces += 1
        assert len(set(found)) == len(found)
        for key, there in found:
            assert there != (key in known)  # each change is told once
            (known.add if there else known.discard)(key)


@pytest.mark.parametrize("shared", [True, False])
def test_what_was_found_and_what_was_cleared(tmp_path: Path, shared: bool) -> None:
    """After a restart every block is named once, and a clear by another process removes every one that was."""
    keys = keys_of(MANY)
    with open_small(tmp_path, shared=shared, events=None) as store:
        store_many(store, keys)
    known: set[bytes] = set()
    with open_small(tmp_path, shared=shared) as store:
        store.delete(keys[:20]).wait(PATIENCE)  # before anybody knows of them: no event
        first, lost = store.take_events()
        assert lost == 0 and all(there for _, there in first) and not {key for key, _ in first} & set(keys[:20])
        known.update(key for key, _ in first)
        store.delete(keys[20:40]).wait(PATIENCE)  # between pieces
        store_many(store, keys[:10])
        assert told(store, known) >= 2
        assert known == set(store.keys()) and len(known) == MANY - 30
        store.delete(keys[40:50]).wait(PATIENCE)
        _C._file_clear(tmp_path / "s")
        assert not any(store.contains(keys[:50]))
        store_many(store, keys[:30])  # comes after the removals
        assert told(store, known) >= 2
        assert known == set(keys[:30]) == set(store.keys())
        store.clear()
        store.clear()
        assert told(store, known) == 1 and known == set()


def test_what_nobody_knew_of_is_not_removed(tmp_path: Path) -> None:
    with open_small(tmp_path, events=None) as store:
        store_many(store, keys_of(100))
    with open_small(tmp_path) as store:
        store.clear()
        assert store.take_events() == ([], 0)


def test_the_blocks_of_another_writer(tmp_path: Path) -> None:
    """Those found in its files do not exhaust the list; what is read again gives events of changes alone."""
    keys = keys_of(MANY)
    with open_small(tmp_path, shared=True, events=None) as one:
        store_many(one, keys)
        known: set[bytes] = set()
        with open_small(tmp_path, shared=True) as two:
            assert told(two, known) >= 3 and known == set(keys)
            with testing.file_fault(two, "read", "delay", every=1, delay=0.2):  # its thread is busy
                one.delete(keys[:20]).wait(PATIENCE)
                for _ in range(5):
                    store_many(one, keys[100:1100])  # more notices than the ring holds
                store_many(one, keys_of(30, "new"))
            two.refresh()
            assert told(two, known) >= 1
            assert known == {*keys[20:], *keys_of(30, "new")}


def test_removals_that_nobody_takes_are_bounded(tmp_path: Path) -> None:
    """They are lost in the end, and counted, and what comes later is told again."""
    keys = keys_of(1000)
    with open_small(tmp_path, events=2000) as store:
        lost = 0
        for turn in range(8):
            store_many(store, keys)
            found, more = store.take_events() if turn == 0 else ([], 0)
            lost += more
            store.clear()
        found, lost = store.take_events()
        assert found == [] and lost > 2000
        store_many(store, keys[:5])
        assert sorted(store.take_events()[0]) == [(key, True) for key in sorted(keys[:5])]
