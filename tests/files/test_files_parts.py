"""Blocks of files in several ranges of host memory: K and V, layers, groups."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, random_bytes
from test_files import have_engine, keys_of

import kvswap
from kvswap.files import FileStore, Layout

CASES = {"halves": [4096, 4096], "odd": [1, 5000, 70, 4096], "layers": [300] * 40, "one": [9000]}


@pytest.fixture(params=["threads", "io_uring"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield have_engine(str(request.param), tmp_path)


def open_store(folder: Path, parts: list[int], **options: Any) -> FileStore:
    return FileStore(folder / "s", Layout(sum(parts)), capacity=64 << 20, **options)


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_addresses_key_by_key(tmp_path: Path, name: str, engine: str, buffered: bool) -> None:
    """Gathered in order; the file holds what a contiguous store would; scattered back to other places."""
    parts, count = CASES[name], 7
    source = [random_bytes(i, size * count).reshape(count, size) for i, size in enumerate(parts)]
    whole = np.concatenate(source, axis=1)
    order = np.random.default_rng(1).permutation(count)
    addresses = [part.ctypes.data + int(i) * part.shape[1] for i in order for part in source]
    with open_store(tmp_path, parts, engine=engine, buffered=buffered) as store:
        store.store(keys_of(count), addresses, parts=parts).wait(PATIENCE)
        contiguous = np.zeros_like(whole)
        store.load(keys_of(count), contiguous, range(count)).wait(PATIENCE)
        np.testing.assert_array_equal(contiguous, whole[order])
        target = [np.zeros_like(part) for part in source]
        places = np.array([part.ctypes.data + int(i) * part.shape[1] for i in order for part in target], np.uint64)
        store.load(keys_of(count), places, parts=np.array(parts)).wait(PATIENCE)
        for part, expected in zip(target, source, strict=True):
            np.testing.assert_array_equal(part, expected)


def test_tensors_with_ids(tmp_path: Path) -> None:
    """One tensor a part, one list of ids for all, as K and V of layers are."""
    parts = [512, 512, 3000]
    source = [random_bytes(i, size * 10).reshape(10, size) for i, size in enumerate(parts)]
    target = [np.zeros_like(part) for part in source]
    with open_store(tmp_path, parts) as store:
        store.store(keys_of(3), source, [9, 0, 4], parts=parts).wait(PATIENCE)
        store.load(keys_of(3), target, np.array([1, 2, 9], np.int32), parts=parts).wait(PATIENCE)
        for part, expected in zip(target, source, strict=True):
            np.testing.assert_array_equal(part[[1, 2, 9]], expected[[9, 0, 4]])
            assert not part[[0, 3, 4, 5, 6, 7, 8]].any()


def test_tensors_key_by_key(tmp_path: Path) -> None:
    keys_, values = random_bytes(1, 4 * 100).reshape(4, 100), random_bytes(2, 4 * 60).reshape(4, 60)
    tensors = [tensor[i] for i in range(4) for tensor in (keys_, values)]
    with open_store(tmp_path, [100, 60]) as store:
        store.store(keys_of(4), tensors, parts=(100, 60)).wait(PATIENCE)
        loaded = np.zeros((4, 160), np.uint8)
        store.load(keys_of(4), loaded, range(4)).wait(PATIENCE)
        np.testing.assert_array_equal(loaded, np.concatenate([keys_, values], axis=1))
        with pytest.raises(ValueError, match=r"blocks\[1\] has 60 bytes; its part has 100"):
            store.store(keys_of(4), tensors, parts=(60, 100))


def test_a_missing_block_leaves_the_others(tmp_path: Path) -> None:
    parts = [100, 60]
    source, target = random_bytes(1, 160), np.zeros((2, 160), np.uint8)
    with open_store(tmp_path, parts) as store:
        store.store([b"a"], [source.ctypes.data, source.ctypes.data + 100], parts=parts).wait(PATIENCE)
        places = [target[i].ctypes.data + off for i in range(2) for off in (0, 100)]
        load = store.load([b"b", b"a"], places, parts=parts)
        with pytest.raises(kvswap.Error, match="block 0 is not in the store"):
            load.wait(PATIENCE)
        assert load.failed_positions.tolist() == [0]
        np.testing.assert_array_equal(target[1], source)


def test_wrong_parts(tmp_path: Path) -> None:
    block = np.zeros((4, 160), np.uint8)
    addresses = [block.ctypes.data, block.ctypes.data + 100]
    device = kvswap.Device("host:6")
    memory = device.alloc(160 * 4)
    pool = kvswap.Pool(device, memory.ptr, 4, 160)
    with open_store(tmp_path, [160], device=device) as store:
        for error, message, arguments, parts in (
            (ValueError, "parts have 159 bytes in all; a block of the store 160", (addresses,), [100, 59]),
            (ValueError, r"parts\[1\] is 61 bytes: .* a block has 160 in all", (addresses,), [100, 61]),
            (ValueError, r"parts\[0\] is 0: must be 1 to 160", (addresses,), [0, 160]),
            (ValueError, r"parts\[1\] is 161: must be 1 to 160", (addresses,), [1, 161]),
            (ValueError, "parts has 0 sizes", (addresses,), []),
            (TypeError, "int", (addresses,), 100),
            (ValueError, "blocks has 2 items, but keys times parts has 3", (addresses,), [50, 50, 60]),
            (ValueError, "blocks has 1 tensors; .* each of 2 parts", ([block], [0]), [100, 60]),
            (IndexError, r"ids\[0\] is 7; blocks has 6 blocks of 100 bytes", ([block, block], [7]), [100, 60]),
            (ValueError, "parts are of host memory", (pool, [0]), [100, 60]),
        ):
            with pytest.raises(error, match=message):
                store.store([b"a"], *arguments, parts=parts)
        assert store.stats()["stored"] == 0 and store.stats()["unfinished_stores"] == 0
