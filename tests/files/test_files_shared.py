"""One directory, several writers: each finds what the others stored, and nothing wrong."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import file_reader
import numpy as np
import pytest
from conftest import PATIENCE, ROOT, random_bytes, run_python, until
from test_files import have_engine, keys_of

import kvswap
from kvswap import _C, testing
from kvswap.files import FileStore, Layout

NBYTES, PER_SEGMENT = 5000, 8
SLOT = 4096 + 8192
SEGMENT = 4096 + PER_SEGMENT * SLOT
LAYOUT = Layout(NBYTES, model="m", tp_rank=0)


def open_store(folder: Path, segments: int = 16, **options: Any) -> FileStore:
    more = {"capacity": segments * SEGMENT, "segment_nbytes": SEGMENT, **options}
    return FileStore(folder / "s", LAYOUT, shared=True, **more)


def block_of(key: bytes) -> Any:
    """A key stands for its bytes."""
    return random_bytes(int.from_bytes(key[-6:], "little"), NBYTES)


def put(store: FileStore, keys: list[bytes], **options: Any) -> Any:
    transfer = store.store(keys, [block_of(key) for key in keys], **options)
    transfer.wait(PATIENCE)
    return transfer


def check(store: FileStore, keys: list[bytes]) -> None:
    target = np.zeros((len(keys), NBYTES), np.uint8)
    store.load(keys, target, range(len(keys))).wait(PATIENCE)
    for key, block in zip(keys, target, strict=True):
        np.testing.assert_array_equal(block, block_of(key))


def finds(store: FileStore, keys: list[bytes]) -> None:
    until(lambda: all(store.contains(keys)))


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
def test_each_finds_what_the_others_store(tmp_path: Path, engine: str) -> None:
    have_engine(engine, tmp_path)
    a, b = keys_of(20, "a"), keys_of(20, "b")
    with open_store(tmp_path, engine=engine) as one, open_store(tmp_path, engine=engine) as two:
        put(one, a)
        finds(two, a)
        check(two, a)
        put(two, b)
        finds(one, b)
        check(one, b)
        with open_store(tmp_path, engine=engine) as three:  # it is there at once
            assert all(three.contains(a + b))
            check(three, a + b)
            assert sorted(three.keys()) == sorted(a + b)
            three.refresh()
        put(one, keys_of(30, "more"))  # new segments
        finds(two, keys_of(30, "more"))
        check(two, keys_of(30, "more"))
    folders = sorted(path.name for path in (tmp_path / "s").glob("writer-*"))
    assert folders == ["writer-0000", "writer-0001", "writer-0002"]
    held = [file_reader.read_store(tmp_path / "s" / name) for name in folders]  # each is a store of one writer
    assert [len(blocks) for blocks in held] == [50, 20, 0]


def test_refreshing_finds_new_writers_at_once(tmp_path: Path) -> None:
    with open_store(tmp_path) as one:
        for i in range(3):
            with open_store(tmp_path) as two:
                put(two, keys_of(3, f"{i}"))
                one.refresh()
                assert one.contains(keys_of(3, f"{i}")) == [True] * 3
                with open_store(tmp_path) as three:
                    put(three, keys_of(3, f"{i}-three"))
                    one.refresh()
                    assert one.contains(keys_of(3, f"{i}-three")) == [True] * 3


@pytest.mark.parametrize(("name", "is_one"), [("writer-0255", True), ("writer-0256", False), ("writer-00001", False)])
def test_names_of_writers(tmp_path: Path, name: str, is_one: bool) -> None:
    with open_store(tmp_path) as one:
        put(one, keys_of(3))
    (tmp_path / "s" / "writer-0000").rename(tmp_path / "s" / name)
    with open_store(tmp_path) as one:
        assert one.contains(keys_of(3)) == [is_one] * 3


def test_a_writer_that_cannot_be_read_keeps_nobody_from_the_others(tmp_path: Path) -> None:
    """Not even those whose folder is listed after its own."""
    with open_store(tmp_path) as one:
        for number in range(4, 40):
            (tmp_path / "s" / f"writer-{number:04}").write_bytes(b"a file")
        (tmp_path / "other" / "s").mkdir(parents=True, mode=0o700)
        shutil.copy(tmp_path / "s" / "epoch.kvs", tmp_path / "other" / "s")  # blocks of another epoch are gone
        with open_store(tmp_path / "other") as elsewhere:  # a writer of this directory that the open one does not know
            put(elsewhere, keys_of(3))
        (tmp_path / "s" / "writer-0020").unlink()
        (tmp_path / "other" / "s" / "writer-0000").rename(tmp_path / "s" / "writer-0020")
        finds(one, keys_of(3))
        check(one, keys_of(3))


def test_what_is_no_writer_refuses_nothing(tmp_path: Path) -> None:
    """Neither an open nor a refresh, whatever has a writer's name; the other writers are found."""
    with open_store(tmp_path) as one:
        put(one, keys_of(3))
        folder = tmp_path / "s"
        for name in ("writer-0001", "writer-0200"):
            (folder / name).write_bytes(b"a file")
        for name in ("writer-0002", "writer-0201"):
            (folder / name).symlink_to(folder / "nothing")
        (folder / "writer-0202").mkdir(mode=0o777)
        (folder / "writer-0202").chmod(0o777)
        one.refresh()
        with open_store(tmp_path) as two:
            assert two.contains(keys_of(3)) == [True] * 3
            put(two, keys_of(3, "two"))
            one.refresh()
            assert one.contains(keys_of(3, "two")) == [True] * 3
            assert (folder / "writer-0003").is_dir()
        with pytest.raises(ValueError, match="holds blocks of another layout"):
            FileStore(folder, Layout(NBYTES, model="other"), capacity=1 << 20, shared=True)


def test_a_segment_of_another_writer_that_cannot_be_opened(tmp_path: Path) -> None:
    """That writer's blocks are missing until it can; the store opens, and finds those of others."""
    folder = tmp_path / "s"
    with open_store(tmp_path) as one, open_store(tmp_path) as two:
        put(one, keys_of(3))
        put(two, keys_of(3, "two"))
        segment = folder / "writer-0000" / "segment-00000000.kvs"
        apart = segment.rename(tmp_path / "apart")
        segment.symlink_to(apart)
        with open_store(tmp_path) as three:
            three.refresh()
            assert three.contains(keys_of(3) + keys_of(3, "two")) == [False] * 3 + [True] * 3
            apart.replace(segment)
            finds(three, keys_of(3))
            check(three, keys_of(3))


def test_a_relative_path_is_of_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with open_store(Path()) as one:
        monkeypatch.chdir("/")
        with open_store(tmp_path) as two:
            put(two, keys_of(3))
            finds(one, keys_of(3))
            check(one, keys_of(3))


def test_a_block_that_another_has_is_kept(tmp_path: Path) -> None:
    keys = keys_of(10)
    with open_store(tmp_path) as one, open_store(tmp_path) as two:
        put(one, keys)
        finds(two, keys)
        put(two, keys, replace=False)
        assert two.stats()["kept"] == 10 and two.stats()["stored"] == 0
        put(two, keys[:3])  # replace: an own copy
        assert two.stats()["stored"] == 3
        check(one, keys)
        check(two, keys)
    assert len(file_reader.read_store(tmp_path / "s" / "writer-0001")) == 3


def test_what_another_evicts_is_gone(tmp_path: Path) -> None:
    """And neither kept nor served from a slot that has another block."""
    with open_store(tmp_path, segments=2) as one, open_store(tmp_path) as two:
        put(one, keys_of(16, "old"))
        finds(two, keys_of(16, "old"))
        put(one, keys_of(16, "new"))
        finds(two, keys_of(16, "new"))
        assert two.contains(keys_of(16, "old")) == [False] * 16
        _C._file_limit(tmp_path / "s", 16 * SEGMENT)
        until(lambda: two.info["capacity"] == 16 * SEGMENT)
        put(two, keys_of(16, "old"), replace=False)
        assert two.stats()["stored"] == 16 and two.stats()["kept"] == 0
        assert one.stats()["evicted"] == 16
        check(two, keys_of(16, "old") + keys_of(16, "new"))
        finds(one, keys_of(16, "old"))
        check(one, keys_of(16, "old"))


def test_deleting(tmp_path: Path) -> None:
    keys = keys_of(4)
    with open_store(tmp_path) as one, open_store(tmp_path) as two:
        put(one, keys[:2])
        put(two, keys[2:])
        finds(one, keys)
        finds(two, keys)
        one.delete(keys[:1]).wait(PATIENCE)
        until(lambda: two.contains(keys) == [False, True, True, True])
        transfer = two.delete(keys)
        with pytest.raises(kvswap.Error, match="block 1 was stored by another process, which alone deletes it"):
            transfer.wait(PATIENCE)
        assert transfer.failed_positions.tolist() == [1]
        until(lambda: one.contains(keys) == [False, True, False, False])
    with open_store(tmp_path) as again:
        assert again.contains(keys) == [False, True, False, False]


def test_a_reader_that_fell_behind_reads_the_headers(tmp_path: Path) -> None:
    """The ring holds 4096 notices; while the reader looks at none, more are written."""
    with open_store(tmp_path) as one, open_store(tmp_path) as two:
        put(one, keys_of(8, "first"))
        finds(two, keys_of(8, "first"))
        with testing.file_fault(two, "read", "delay", every=1, delay=0.2):  # its thread is busy
            for i in range(40):
                keys = keys_of(100, f"{i}")
                put(one, keys)
        finds(two, keys_of(100, "39"))
        there = two.contains(keys_of(100, "0") + keys_of(8, "first"))
        assert not any(there)  # evicted long ago: 128 blocks fit
        check(two, keys_of(100, "39"))


def test_a_writer_is_followed_by_another(tmp_path: Path) -> None:
    """A process that ends leaves its blocks; the next takes its directory over, and readers go on."""
    with open_store(tmp_path) as reader:
        for turn in range(3):
            with open_store(tmp_path) as writer:
                put(writer, keys_of(20, f"{turn}"))
                finds(reader, keys_of(20, f"{turn}"))
            check(reader, keys_of(20, f"{turn}"))
        for turn in range(3):
            check(reader, keys_of(20, f"{turn}"))
    assert len(list((tmp_path / "s").glob("writer-*"))) == 2


def test_a_killed_writer(tmp_path: Path) -> None:
    """What it acknowledged is there for the others, and for the next that takes its directory."""
    with open_store(tmp_path) as reader:
        for turn in range(3):
            run = run_python(f"""
                import os
                from pathlib import Path
                from test_files_shared import open_store, put
                from test_files import keys_of
                store = open_store(Path({str(tmp_path)!r}))
                put(store, keys_of(20, "{turn}"))
                os.kill(os.getpid(), 9)
            """)
            assert run.returncode == -9, run.stderr
            finds(reader, keys_of(20, f"{turn}"))
            check(reader, keys_of(20, f"{turn}"))
        with open_store(tmp_path) as again:
            for turn in range(3):
                check(again, keys_of(20, f"{turn}"))
                check(reader, keys_of(20, f"{turn}"))


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
def test_two_writers_and_two_readers(tmp_path: Path, engine: str) -> None:
    """Small capacities, so that blocks come and go under everybody: each load is right or missing."""
    have_engine(engine, tmp_path)
    stop, wrong, served = threading.Event(), [], [0, 0]
    stores = [open_store(tmp_path, segments=3, engine=engine) for _ in range(4)]
    keys = keys_of(60)
    blocks = {key: block_of(key) for key in keys}

    def write(store: FileStore, seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            some = [keys[i] for i in rng.choice(60, 5, replace=False)]
            store.store(some, [blocks[key] for key in some], replace=bool(rng.integers(2))).wait(PATIENCE)

    def read(store: FileStore, number: int) -> None:
        rng = np.random.default_rng(number)
        while not stop.is_set():
            some = [keys[i] for i in rng.choice(60, 5, replace=False)]
            target = np.full((5, NBYTES), 0xEE, np.uint8)
            load = store.load(some, target, range(5))
            try:
                load.wait(PATIENCE)
            except kvswap.Error:
                for reason in load.reasons.values():
                    if "is not in the store" not in str(reason):
                        wrong.append(str(reason))
            failed = set(load.failed_positions.tolist())
            for i, key in enumerate(some):
                if i not in failed:
                    served[number] += 1
                    if not np.array_equal(target[i], blocks[key]):
                        wrong.append(f"wrong bytes of {key!r}")

    threads = [threading.Thread(target=write, args=(stores[i], i)) for i in (0, 1)]
    threads += [threading.Thread(target=read, args=(stores[2 + i], i)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    begin = time.monotonic()
    until(lambda: (min(served) >= 20 and time.monotonic() - begin > 1) or bool(wrong))
    stop.set()
    for thread in threads:
        thread.join()
    for store in stores:
        store.close()
    assert wrong == [] and min(served) > 0


def test_calls_beside_close(tmp_path: Path) -> None:
    keys = keys_of(20)
    with open_store(tmp_path) as one:
        put(one, keys)
        for _ in range(5):
            two, stop = open_store(tmp_path), threading.Event()

            def ask(store: FileStore = two, stop: threading.Event = stop) -> None:
                while not stop.is_set():
                    store.contains(keys)
                    store.keys()

            thread = threading.Thread(target=ask)
            thread.start()
            put(one, keys)
            two.close()
            two.contains(keys)
            stop.set()
            thread.join()


@pytest.mark.not_sanitized("processes that are killed, for seconds: what they run, other tests run under sanitizers")
def test_killed_at_any_point(tmp_path: Path) -> None:
    """Two writers, two readers; thousands of points take `python tests/random/kill_shared.py DIR 1 3000 900`."""
    program = ROOT / "tests" / "random" / "kill_shared.py"
    run = run_python(f"""
        import runpy, sys
        sys.argv = ["kill_shared.py", {str(tmp_path / "s")!r}, "3", "40", "10"]
        runpy.run_path({str(program)!r}, run_name="__main__")
    """)
    assert run.returncode == 0, run.stdout + run.stderr


# -- a block that several writers have --------------------------------------------------------------------------------


def fill(store: FileStore, name: str, segments: int = 2) -> None:
    """Evict all that this store wrote."""
    for i in range(0, segments * PER_SEGMENT, 4):
        put(store, keys_of(segments * PER_SEGMENT, name)[i : i + 4])


@pytest.mark.parametrize("first", [0, 1])
def test_a_block_that_was_evicted_here_is_anothers(tmp_path: Path, first: int) -> None:
    """In either order of the two stores."""
    keys = keys_of(PER_SEGMENT)
    with open_store(tmp_path, 2, events=1000) as one, open_store(tmp_path, 2) as two:
        for store in (one, two) if first == 0 else (two, one):
            put(store, keys)
            finds(one, keys)
            one.refresh()
        fill(one, "others of one")
        assert one.contains(keys) == [True] * len(keys)
        check(one, keys)
        there: dict[bytes, bool] = dict(one.take_events()[0])
        assert all(there[key] for key in keys)
        fill(two, "others of two")
        until(lambda: not any(one.contains(keys)))
        with pytest.raises(kvswap.Error, match="is not in the store"):
            check(one, keys[:1])


def test_a_block_that_two_others_have_stays_until_both_have_evicted_it(tmp_path: Path) -> None:
    keys = keys_of(PER_SEGMENT)
    with open_store(tmp_path, 2) as one, open_store(tmp_path, 2) as two, open_store(tmp_path) as reader:
        for store in (one, two):
            put(store, keys)
            reader.refresh()
        fill(two, "others of two")
        reader.refresh()
        assert reader.contains(keys) == [True] * len(keys)
        check(reader, keys)
        fill(one, "others of one")
        until(lambda: not any(reader.contains(keys)))


def test_a_block_that_comes_while_its_own_is_overwritten(tmp_path: Path) -> None:
    """The store that takes the slot holds the key meanwhile; the notice is not lost."""
    keys = keys_of(2 * PER_SEGMENT)
    with open_store(tmp_path, 2) as one, open_store(tmp_path) as two:
        put(one, keys)
        with testing.file_fault(one, "write", "delay", delay=0.5):
            other = one.store([b"new"], [block_of(b"new-00")])
            until(lambda: not all(one.contains(keys)))
            gone = [key for key, there in zip(keys, one.contains(keys), strict=True) if not there]
            put(two, gone)
            one.refresh()
            assert one.contains(gone) == [False]
            other.wait(PATIENCE)
        assert one.contains(gone) == [True]
        check(one, gone)


def test_a_block_that_moved_while_a_store_here_failed(tmp_path: Path) -> None:
    """The other writer stored it again meanwhile: its new slot takes the place of the old one."""
    keys = keys_of(1)
    with open_store(tmp_path) as one, open_store(tmp_path, engine="threads") as two:
        put(one, keys)
        two.refresh()
        with (
            testing.file_fault(two, "allocate", "delay", delay=0.5, every=1),
            testing.file_fault(two, "write", "fail", every=1),
        ):
            failing = two.store(keys, [block_of(keys[0])])
            put(one, keys)
            two.refresh()
            with pytest.raises(kvswap.Error, match="Input/output error"):
                failing.wait(PATIENCE)
        check(two, keys)


def test_a_damaged_or_deleted_block_is_anothers(tmp_path: Path) -> None:
    keys = keys_of(PER_SEGMENT)
    with open_store(tmp_path, buffered=True) as one, open_store(tmp_path) as two:
        put(one, keys)
        put(two, keys)
        one.refresh()
        with open(tmp_path / "s" / "writer-0000" / "segment-00000000.kvs", "r+b") as file:
            file.seek(4096 + 4096)
            file.write(b"damage")
        target = np.zeros((len(keys), NBYTES), np.uint8)
        load = one.load(keys, target, range(len(keys)))
        with pytest.raises(kvswap.Error, match="is damaged"):
            load.wait(PATIENCE)
        assert len(load.failed_positions) == 1
        check(one, keys)
        whole = [key for i, key in enumerate(keys) if i not in load.failed_positions]
        one.delete(whole).wait(PATIENCE)  # its own
        check(one, keys)
        with pytest.raises(kvswap.Error):
            one.delete(whole).wait(PATIENCE)


def test_other_kinds_of_stores_are_refused(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, keys_of(1))
    with pytest.raises(ValueError, match="is shared by several writers: open it with `shared`"):
        FileStore(tmp_path / "s", LAYOUT, capacity=1 << 20)
    FileStore(tmp_path / "one", LAYOUT, capacity=1 << 20).close()
    with pytest.raises(ValueError, match="is the store of one writer: open it without `shared`"):
        FileStore(tmp_path / "one", LAYOUT, capacity=1 << 20, shared=True)
    for more in ({"readonly": True}, {"directory": [tmp_path / "a", tmp_path / "b"]}):
        with pytest.raises(ValueError, match="a shared store has one directory, and its readers open it with `shared`"):
            FileStore(**{"directory": tmp_path / "a", "layout": LAYOUT, "capacity": 1 << 20, "shared": True, **more})
    with pytest.raises(ValueError, match="holds blocks of another layout"):
        FileStore(tmp_path / "s", Layout(NBYTES, model="other"), capacity=1 << 20, shared=True)


def test_forged_notices_cost_a_miss(tmp_path: Path) -> None:
    """The ring is only a hint: whatever stands in it, loads compare the header."""
    keys = keys_of(20)
    with open_store(tmp_path) as one, open_store(tmp_path) as two:
        put(one, keys)
        finds(two, keys)
        path = tmp_path / "s" / "writer-0000" / "notices.kvs"
        rng = np.random.default_rng(1)
        with open(path, "r+b") as file:
            size = path.stat().st_size
            for turn in range(20):
                file.seek(40)
                file.write(rng.integers(0, 256, size - 40, np.uint8).tobytes())
                file.flush()
                put(one, keys_of(3, f"{turn}"))
                two.contains(keys)
                target = np.zeros((20, NBYTES), np.uint8)
                load = two.load(keys, target, range(20))
                try:
                    load.wait(PATIENCE)
                except kvswap.Error as error:
                    assert "is not in the store" in str(error)
                for i in set(range(20)) - set(load.failed_positions.tolist()):
                    np.testing.assert_array_equal(target[i], block_of(keys[i]))


def test_pools_of_a_device(tmp_path: Path) -> None:
    device = kvswap.Device("host:4")
    memory = device.alloc(40 * NBYTES)
    pool = kvswap.Pool(device, memory.ptr, 40, NBYTES)
    view = np.asarray(memory).reshape(40, NBYTES)
    keys = keys_of(20)
    for i, key in enumerate(keys):
        view[i] = block_of(key)
    with open_store(tmp_path, device=device) as one, open_store(tmp_path, device=device) as two:
        one.store(keys, pool, range(20)).wait(PATIENCE)
        finds(two, keys)
        two.load(keys, pool, range(20, 40)).wait(PATIENCE)
        np.testing.assert_array_equal(view[20:], view[:20])
