"""Every array argument of every call of FileStore, written to by another thread during the call.

Which of the values a call sees is not said; that it sees each once is: what was checked is what is used.
"""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE

import kvswap
from kvswap.files import FileStore, Layout

N, WIDTH, NBYTES = 2000, 512, 64
SECONDS = 1.0  # of trying, a test
NO_ARRAYS = {"take_events", "close", "info", "block_nbytes", "keys", "refresh", "stats", "clear"}
TRIED = {"store", "load", "delete", "contains", "pin", "unpin", "touch"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with FileStore(tmp_path / "s", Layout(NBYTES), capacity=512 << 20, device="host:0", buffered=True) as store:
        yield store
    sys.setswitchinterval(before)


@contextlib.contextmanager
def changing(array: Any, values: list[Any]) -> Iterator[None]:
    """Another thread writes these into the array, again and again. NumPy does it without the GIL.

    Whole words: np.copyto() is a memcpy, which writes byte by byte where two arrays lie in the same place of a page.
    """
    stop = threading.Event()
    written = [np.asarray(value).astype(array.dtype) for value in values]

    def write() -> None:
        while not stop.is_set():
            for value in written:
                np.add(value, array.dtype.type(0), out=array)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def tries() -> Iterator[int]:
    end, count = time.monotonic() + SECONDS, 0
    while time.monotonic() < end or count < 2:  # a call may take that long on a busy machine
        yield count
        count += 1


def test_the_list_is_whole() -> None:
    """Each public method is tried here or takes no arrays."""
    assert {name for name in dir(FileStore) if not name.startswith("_")} == NO_ARRAYS | TRIED


def numbered(count: int) -> Any:
    """Blocks, each of which is its number again and again."""
    return np.arange(count, dtype=np.uint64).repeat(NBYTES // 8).view(np.uint8).reshape(count, NBYTES)


def some_keys() -> tuple[Any, list[Any]]:
    """Keys that differ in their first 8 bytes, and what the rest of them becomes."""
    keys = np.zeros((N, WIDTH), np.uint8)
    keys[:, :8] = np.arange(N, dtype=np.uint64).view(np.uint8).reshape(N, 8)
    return keys, [np.uint8(value) for value in range(256)]


def check_index(store: FileStore) -> list[bytes]:
    """Each block is found by the key that it is listed under."""
    listed = store.keys()
    assert len(set(listed)) == len(listed)
    assert sum(store.contains(listed)) == len(listed)
    return listed


def test_keys_of_a_store(store: FileStore) -> None:
    keys, values = some_keys()
    blocks = np.zeros((N, NBYTES), np.uint8)
    for _ in tries():
        with changing(keys[:, 8:], values):
            store.store(keys, blocks, range(N)).wait(PATIENCE)
        listed = check_index(store)
        store.delete(listed).wait(PATIENCE)
        assert store.stats()["blocks"] == 0


@pytest.mark.parametrize("what", ["load", "delete", "contains", "pin", "touch"])
def test_keys_of_other_calls(store: FileStore, what: str) -> None:
    """Two lists of keys are there, and the array becomes the one or the other."""
    one, _ = some_keys()
    other = one.copy()
    other[:, 8:] = 7
    blocks = numbered(2 * N)
    target = np.zeros((N, NBYTES), np.uint8)
    keys = one.copy()
    store.store(np.concatenate([one, other]), blocks, range(2 * N)).wait(PATIENCE)
    known = set(store.keys())
    for _ in tries():
        with changing(keys, [one, other]), contextlib.suppress(kvswap.Error, ValueError):  # a key that is half of each
            if what == "load":
                load = store.load(keys, target, range(N))
                load.wait(PATIENCE)
            elif what == "delete":
                store.delete(keys).wait(PATIENCE)
            elif what == "pin":
                store.pin(keys)
            else:
                assert len(getattr(store, what)(keys) or keys) == N
        if what == "load":  # each block is the one of its place in one of the lists, unless it was missed
            place = target[:, :8].copy().view(np.uint64)[:, 0]
            right = (place == np.arange(N)) | (place == np.arange(N) + N)
            right[load.failed_positions] = True
            assert right.all()
        if what == "pin":  # all or none: what is pinned is taken off again, and then nothing is
            for key in check_index(store) if store.stats()["pinned"] else ():
                with contextlib.suppress(ValueError):
                    store.unpin([key])
            assert store.stats()["pinned"] == 0
        assert set(check_index(store)) <= known
        if what == "delete":
            store.store(np.concatenate([one, other]), blocks, range(2 * N)).wait(PATIENCE)


def test_keys_of_unpin(store: FileStore) -> None:
    one, _ = some_keys()
    other = one.copy()
    other[:, 8:] = 7
    keys = one.copy()
    store.store(np.concatenate([one, other]), np.zeros((2 * N, NBYTES), np.uint8), range(2 * N)).wait(PATIENCE)
    for _ in tries():
        store.pin(one)
        with changing(keys, [one, other]):
            try:
                store.unpin(keys)
            except ValueError:  # nothing was unpinned
                assert store.stats()["pinned"] == N
        for key in one.reshape(N, WIDTH):
            with contextlib.suppress(ValueError):
                store.unpin([key.tobytes()])
        assert store.stats()["pinned"] == 0


@pytest.mark.parametrize("by", ["rows", "pool"])
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_ids_of_a_load(store: FileStore, kind: Any, by: str) -> None:
    """Bytes before and after the given n rows stay as they are."""
    n = 600  # few, so that they are read between two changes; fewer are written with the GIL
    source = np.full((n, NBYTES), 1, np.uint8)
    store.store([b"%d" % i for i in range(n)], source, range(n)).wait(PATIENCE)
    memory = np.zeros((3 * n, NBYTES), np.uint8)
    rows = memory[n : 2 * n]
    device = kvswap.Device("host:0")
    target = rows if by == "rows" else kvswap.Pool(device, rows.ctypes.data, n, NBYTES)
    good = np.arange(n, dtype=kind)
    ids, names = good.copy(), [b"%d" % i for i in range(n)]
    ends = {"taken": 0, "refused": 0}
    with changing(ids, [*[good] * 8, -n // 2, *[good] * 8, n + n // 2]):
        for _ in tries():
            for _ in range(50):
                try:
                    store.load(names, target, ids).wait(PATIENCE)
                    ends["taken"] += 1
                except (IndexError, ValueError):
                    ends["refused"] += 1
    assert not memory[:n].any() and not memory[2 * n :].any()
    assert all(ends.values())


def test_ids_of_a_store(store: FileStore) -> None:
    """Each block is that of one of the ids."""
    blocks = numbered(2 * N)
    check_sources(store, blocks, np.arange(N), np.arange(N, 2 * N), blocks)


def test_addresses(store: FileStore) -> None:
    blocks = numbered(2 * N)
    addresses = blocks.ctypes.data + np.arange(2 * N) * NBYTES
    check_sources(store, None, addresses[:N].copy(), addresses[N:].copy(), blocks)


def check_sources(store: FileStore, tensor: Any, one: Any, other: Any, blocks: Any) -> None:
    array = one.copy()
    names = [b"%d" % i for i in range(N)]
    back = np.zeros((N, NBYTES), np.uint8)
    for _ in tries():
        with changing(array, [one, other]):
            (store.store(names, array) if tensor is None else store.store(names, tensor, array)).wait(PATIENCE)
        store.load(names, back, range(N)).wait(PATIENCE)
        assert ((back == blocks[:N]) | (back == blocks[N:])).all(axis=1).all()
