"""FileStore.take_events(): which blocks came and went."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE
from test_files import blocks_of, keys_of
from test_files_shared import LAYOUT, NBYTES, SEGMENT, finds, open_store, put

from kvswap.files import FileStore


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
