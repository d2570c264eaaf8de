"""Segments are opened when they are used: thousands of them work with few descriptors, and most are left to others."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, run_python, until
from test_files import engine, keys_of  # noqa: F401  # engine is a fixture

import kvswap
from kvswap import testing
from kvswap.files import FileStore, Layout

NBYTES = 4096
COUNT = 1500  # segments of two blocks each


@contextmanager
def limit(most: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def count(folder: Path) -> int:
    """Open segments."""
    links = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            links += each.readlink().name.startswith("segment-") and folder in each.readlink().parents
    return links


def open_store(folder: Path, **options: Any) -> FileStore:
    return FileStore(folder, Layout(NBYTES), capacity=64 << 20, segment_nbytes=5 * 4096, **options)


def blocks(first: int, n: int) -> Any:
    return np.stack([np.full(NBYTES, number * 7 % 251, np.uint8) for number in range(first, first + n)])


def check(store: FileStore, keys: list[bytes], data: Any) -> None:
    target = np.zeros_like(data)
    store.load(keys, target, range(len(keys))).wait(PATIENCE)
    np.testing.assert_array_equal(target, data)


@pytest.mark.parametrize("most", [64, 128])
def test_many_segments_and_few_descriptors(tmp_path: Path, engine: str, most: int) -> None:  # noqa: F811
    script = f"""
        import resource
        from pathlib import Path
        from test_files_descriptors import *
        folder = Path({str(tmp_path)!r}) / "kv"
        resource.setrlimit(resource.RLIMIT_NOFILE, ({most}, {most}))
        keys, data = keys_of(2 * COUNT), blocks(0, 2 * COUNT)
        for turn in range(2):
            with open_store(folder, engine={engine!r}) as store:
                if turn == 0:
                    for at in range(0, 2 * COUNT, 500):
                        store.store(keys[at : at + 500], data[at : at + 500], range(500)).wait(PATIENCE)
                assert store.stats()["segments"] >= COUNT, store.stats()
                assert count(folder) <= {most} // 4 + 8, count(folder)
                order = np.random.default_rng(turn).permutation(2 * COUNT)
                for at in range(0, 2 * COUNT, 500):
                    some = order[at : at + 500]
                    check(store, [keys[i] for i in some], data[some])
                    assert count(folder) <= {most} // 4 + 8, count(folder)
                files = [open("/dev/null") for _ in range({most} // 4)]  # left to the engine
                for file in files: file.close()
                store.store(keys[:3], data[3:6], range(3)).wait(PATIENCE)
                check(store, keys[:3], data[3:6])
                store.store(keys[:3], data[:3], range(3)).wait(PATIENCE)
                assert store.stats()["failed"] == 0
        with open_store(folder, readonly=True, engine={engine!r}) as store:
            check(store, keys[::3], data[::3])
            assert count(folder) <= {most} // 4 + 8
        print("done")
    """
    run = run_python(script)
    assert run.stdout.strip() == "done", run.stdout + run.stderr


def test_the_limit_falls_while_segments_are_open(tmp_path: Path, engine: str) -> None:  # noqa: F811
    """Descriptors that are given up are not used under their registered numbers."""
    keys, data = keys_of(400), blocks(0, 400)
    with open_store(tmp_path / "kv", engine=engine) as store:
        store.store(keys[:200], data[:200], range(200)).wait(PATIENCE)
        assert count(tmp_path / "kv") >= 100
        with limit(160):
            store.store(keys[200:], data[200:], range(200)).wait(PATIENCE)
            check(store, keys, data)
            assert count(tmp_path / "kv") <= 41
            others = [open(__file__, "rb") for _ in range(20)]  # noqa: SIM115  # under the numbers of segments that were closed
            for _ in range(3):
                check(store, keys, data)
                store.store(keys, data, range(400)).wait(PATIENCE)
            for file in others:
                file.close()
        assert store.stats()["failed"] == 0
        check(store, keys, data)


@pytest.mark.parametrize("shared", [False, True])
def test_no_descriptor_is_left(tmp_path: Path, engine: str, shared: bool) -> None:  # noqa: F811
    """What is open goes on; what has to be opened makes room for itself, or fails with the reason and loses nothing."""
    keys, data = keys_of(200), blocks(0, 200)
    with open_store(tmp_path / "kv", engine=engine, shared=shared) as store:
        store.store(keys, data, range(200)).wait(PATIENCE)
        taken = []
        with limit(150):
            check(store, keys, data)
            with suppress(OSError):
                while True:
                    taken.append(open("/dev/null"))  # noqa: SIM115
            target = np.zeros_like(data)
            load = store.load(keys, target, range(200))
            with suppress(kvswap.Error):
                load.wait(PATIENCE)
            lost = set(load.failed_positions.tolist())
            assert all("errno 24" in str(why) for why in load.reasons.values())
            assert all((target[i] == data[i]).all() for i in range(200) if i not in lost)
            assert store.contains(keys) == [True] * 200
            for file in taken:
                file.close()
        check(store, keys, data)


def test_segments_of_other_writers(tmp_path: Path, engine: str) -> None:  # noqa: F811
    keys, data = keys_of(300), blocks(0, 300)
    with (
        open_store(tmp_path / "kv", shared=True, engine=engine) as one,
        open_store(tmp_path / "kv", shared=True, engine=engine) as two,
        limit(128),
    ):
        for at in range(0, 300, 50):
            one.store(keys[at : at + 50], data[at : at + 50], range(50)).wait(PATIENCE)
        until(lambda: two.contains(keys) == [True] * 300)
        check(two, keys, data)
        check(one, keys, data)
        assert count(tmp_path / "kv") <= 32


def test_a_segment_that_was_closed_and_replaced(tmp_path: Path) -> None:
    """Another file under its name is not taken for it."""
    keys, data = keys_of(300), blocks(0, 300)
    with open_store(tmp_path / "kv", engine="threads") as store, limit(160):
        store.store(keys, data, range(300)).wait(PATIENCE)
        first = sorted((tmp_path / "kv").glob("segment-*"))[:100]
        for path in first:
            before = path.rename(tmp_path / path.name)
            path.write_bytes(before.read_bytes())
            path.chmod(0o600)
        target = np.zeros_like(data)
        load = store.load(keys, target, range(300))
        with suppress(kvswap.Error):
            load.wait(PATIENCE)
        lost = set(load.failed_positions.tolist())
        assert lost and all((target[i] == data[i]).all() for i in range(300) if i not in lost)
        assert store.contains(keys) == [i not in lost for i in range(300)]
        store.store(keys, data, range(300), replace=False).wait(PATIENCE)
        check(store, keys, data)


def test_opening_with_a_fault(tmp_path: Path) -> None:
    """EMFILE at the opening of a segment: another one is closed."""
    keys, data = keys_of(300), blocks(0, 300)
    with open_store(tmp_path / "kv", engine="threads") as store, limit(160):
        store.store(keys, data, range(300)).wait(PATIENCE)
        with testing.file_fault(store, "open", "fail", every=7, code=24):
            check(store, keys, data)
