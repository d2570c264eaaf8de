"""The file tier on host memory: bytes, keys, room, restart, failures; and what stands on disk, read without kvswap."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import file_reader
import numpy as np
import pytest
from conftest import PATIENCE, bindings, comes_down, random_bytes, run_python, until

import kvswap
from kvswap import testing
from kvswap.files import FileStore, FileTransfer, Layout, MissingKey

PAGE = 4096
SIZES = [1, 100, 4095, 4096, 4097, 12288, 70001]
ENGINES = ["threads", "io_uring"]


def aligned(nbytes: int, by: int = PAGE, off: int = 0) -> Any:
    """Memory that begins at a multiple of `by`, plus `off`."""
    room = np.zeros(nbytes + by + off, np.uint8)
    start = -room.ctypes.data % by + off
    return room[start : start + nbytes]


def blocks_of(seed: int, count: int, nbytes: int, off: int = 0) -> Any:
    data = aligned(count * nbytes, off=off)
    data[:] = random_bytes(seed, count * nbytes)
    return data.reshape(count, nbytes)


def keys_of(count: int, prefix: str = "key") -> list[bytes]:
    return [f"{prefix}-{i}".encode() for i in range(count)]


class Rig:
    """A store of small blocks, in a folder that can be opened again."""

    def __init__(self, folder: Path, nbytes: int = 5000, slots: int = 64, **options: Any) -> None:
        self.folder, self.nbytes = folder / "store", nbytes
        self.slot = PAGE + -(-nbytes // PAGE) * PAGE
        self.layout = Layout(nbytes, model="m", tp_rank=0)
        per_segment = min(8, slots)
        self.options: dict[str, Any] = {
            "segment_nbytes": PAGE + per_segment * self.slot,
            "capacity": slots // per_segment * (PAGE + per_segment * self.slot),
            **options,
        }
        self.store = self.open()

    def open(self, **options: Any) -> FileStore:
        return FileStore(self.folder, self.layout, **{**self.options, **options})

    def reopen(self, **options: Any) -> FileStore:
        self.store.close()
        self.store = self.open(**options)
        return self.store

    def put(self, keys: Any, blocks: Any, **options: Any) -> None:
        self.store.store(keys, blocks, range(len(keys)), **options).wait(PATIENCE)

    def get(self, keys: Any) -> Any:
        target = np.full((len(keys), self.nbytes), 0xEE, np.uint8)
        self.store.load(keys, target, range(len(keys))).wait(PATIENCE)
        return target

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("segment-*.kvs"))


def have_engine(name: str, folder: Path) -> str:
    """The engine, or a visible skip."""
    if name == "io_uring":
        try:
            FileStore(folder / "probe", Layout(1), capacity=1 << 20, engine=name).close()
        except kvswap.Error as error:
            pytest.skip(f"no io_uring: {error}")
    return name


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return have_engine(str(request.param), tmp_path)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.store.close()


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("off", [0, 1, 512])
@pytest.mark.parametrize("buffered", [False, True])
def test_there_and_back(tmp_path: Path, engine: str, nbytes: int, off: int, buffered: bool) -> None:
    """Every size and alignment, in place and through scratch; the bytes beside the blocks stay as they are."""
    rig = Rig(tmp_path, nbytes, engine=engine, buffered=buffered)
    data, keys = blocks_of(1, 9, nbytes, off), keys_of(9)
    rig.put(keys, data)
    target = aligned(11 * nbytes + 64, off=off)
    target[:] = 0xEE
    ids = [5, 1, 9, 3, 2, 8, 7, 6, 4]
    rig.store.load(keys, target, ids).wait(PATIENCE)
    wanted = np.full_like(target, 0xEE)
    for row, place in zip(data, ids, strict=True):
        wanted[place * nbytes : (place + 1) * nbytes] = row
    np.testing.assert_array_equal(target, wanted)
    assert rig.store.info["engine"] == engine
    rig.store.close()


def test_blocks_by_pointer_by_tensor_and_by_id(rig: Rig) -> None:
    data, keys = blocks_of(2, 6, rig.nbytes), keys_of(6)
    rig.store.store(keys[:2], [data[0], data[1]]).wait(PATIENCE)
    rig.store.store(keys[2:4], data[2:4].ctypes.data + np.arange(2) * rig.nbytes).wait(PATIENCE)
    rig.store.store(keys[4:], data, np.array([4, 5], np.int32)).wait(PATIENCE)
    np.testing.assert_array_equal(rig.get(keys), data)
    parts = [np.zeros(rig.nbytes, np.uint8) for _ in range(6)]
    rig.store.load(keys, parts).wait(PATIENCE)
    np.testing.assert_array_equal(np.stack(parts), data)


def test_keys_of_every_kind(rig: Rig) -> None:
    data = blocks_of(3, 4, rig.nbytes)
    rig.put([b"\0", b"\0\0", bytes(range(256)) * 2, (7, 3)], data)
    np.testing.assert_array_equal(rig.get([b"block_7_pool_3", b"\0\0", (7, 3)]), data[[3, 1, 3]])
    hashes = np.random.default_rng(0).integers(0, 256, (4, 32), np.uint8)
    rig.put(hashes, data)
    np.testing.assert_array_equal(rig.get([row.tobytes() for row in hashes]), data)
    assert rig.store.contains(hashes) == [True] * 4
    assert rig.store.contains([b"block_7_pool_0", b"x"]) == [False, False]


def test_nothing_to_do_is_a_transfer(rig: Rig) -> None:
    for transfer in (rig.store.store([], []), rig.store.load([], []), rig.store.delete([])):
        transfer.wait(PATIENCE)
        assert (transfer.state, transfer.nbytes, transfer.num_blocks) == ("done", 0, 0)
    assert rig.store.contains([]) == []


def test_what_a_transfer_says(rig: Rig) -> None:
    data = blocks_of(4, 3, rig.nbytes)
    store = rig.store.store(keys_of(3), data, range(3))
    store.wait(PATIENCE)
    assert (store.what, store.state, store.num_blocks, store.nbytes) == ("store", "done", 3, 3 * rig.nbytes)
    assert store.error is None and store.failed_positions.size == 0 and store.reasons == {}
    assert store.elapsed > 0 and store.done() and not store.cancel()
    again = rig.store.store(keys_of(4), np.concatenate([data, data[:1]]), range(4), replace=False)
    again.wait(PATIENCE)
    assert (again.num_kept, rig.store.stats()["kept"], rig.store.stats()["blocks"]) == (3, 3, 4)
    load = rig.store.load([b"key-0", b"nobody", b"key-1", b"none"], [np.zeros(rig.nbytes, np.uint8) for _ in range(4)])
    with pytest.raises(kvswap.Error, match="block 1 is not in the store; in all 2 of 4 blocks failed"):
        load.wait(PATIENCE)
    assert (load.state, load.failed_positions.tolist(), sorted(load.reasons)) == ("failed", [1, 3], [1, 3])
    assert "block 3 is not in the store" in str(load.reasons[3])
    assert "load of 4 blocks, failed" in repr(load)
    assert rig.store.stats()["missed"] == 2


def test_calls_on_one_key_take_effect_in_order(rig: Rig) -> None:
    """Submitted without waiting for any: a load sees the store before it, and no store after it."""
    data = blocks_of(5, 50, rig.nbytes)
    targets = [np.zeros(rig.nbytes, np.uint8) for _ in range(50)]
    transfers: list[FileTransfer] = []
    for i in range(40):
        transfers.append(rig.store.store([b"one"], [data[i]]))
        transfers.append(rig.store.load([b"one"], [targets[i]]))
    gone = rig.store.delete([b"one"])
    missing = rig.store.load([b"one"], [targets[49]])
    for transfer in (*transfers, gone):
        transfer.wait(PATIENCE)
    np.testing.assert_array_equal(np.stack(targets[:40]), data[:40])
    with pytest.raises(kvswap.Error, match="not in the store"):
        missing.wait(PATIENCE)
    assert rig.store.stats()["blocks"] == 0


def test_a_key_twice_in_one_call(rig: Rig) -> None:
    data = blocks_of(6, 3, rig.nbytes)
    rig.put([b"k", b"k", b"k"], data)
    np.testing.assert_array_equal(rig.get([b"k", b"k"]), data[[2, 2]])
    rig.store.delete([b"k", b"k"]).wait(PATIENCE)
    assert rig.store.contains([b"k"]) == [False]


def test_many_threads(rig: Rig) -> None:
    """Each with its own keys, storing, loading and deleting; what is loaded is what that thread stored last."""
    wrong: list[str] = []

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        target = np.zeros(rig.nbytes, np.uint8)
        for step in range(60):
            key = [f"{number}-{rng.integers(3)}".encode()]
            data = rng.integers(0, 256, rig.nbytes, np.uint8)
            rig.store.store(key, [data]).wait(PATIENCE)
            rig.store.load(key, [target]).wait(PATIENCE)
            if not np.array_equal(target, data):
                wrong.append(f"thread {number}, step {step}")
            if step % 5 == 0:
                rig.store.delete(key).wait(PATIENCE)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert wrong == []


# -- what stands on disk ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 4096, 5000])
def test_the_format(tmp_path: Path, nbytes: int) -> None:
    rig = Rig(tmp_path, nbytes)
    data, keys = blocks_of(7, 20, nbytes), [*keys_of(19), b"\xff" * 512]
    rig.put(keys, data)
    rig.put(keys[:3], data[5:8])
    rig.store.delete(keys[10:12]).wait(PATIENCE)
    rig.store.close()
    found = file_reader.read_store(rig.folder)
    wanted = dict(zip(keys, data, strict=True)) | dict(zip(keys[:3], data[5:8], strict=True))
    assert set(found) == set(keys) - set(keys[10:12])
    for key, block in found.items():
        assert block.data == wanted[key].tobytes()
        assert block.header.data_crc == file_reader.crc32c(block.data)
    geometry, _ = file_reader.read_segment(rig.files()[0])
    assert json.loads(geometry.layout) == {"model": "m", "tp_rank": 0} and geometry.block_nbytes == nbytes
    assert geometry.slots == 8 and geometry.slot_nbytes == rig.slot
    newest = max(file_reader.read_checkpoints(rig.folder / "store.kvs"), key=lambda c: c.generation)
    assert newest.clean and newest.sequence == 24  # 20 blocks and 3 once more
    assert len({block.header.sequence for block in found.values()}) == len(found)
    everything = [b.header.key for path in rig.files() for b in file_reader.read_segment(path)[1]]
    assert len(everything) == len(set(everything)), "an older block of a key was not erased"


def test_nobody_else_may_read_it(rig: Rig) -> None:
    rig.put(keys_of(1), blocks_of(8, 1, rig.nbytes))
    assert stat.S_IMODE(rig.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in rig.folder.iterdir()} == {0o600}


@pytest.mark.parametrize("what", ["", "store.kvs", "segment-00000000.kvs"])
@pytest.mark.parametrize("readonly", [False, True])
def test_what_others_may_write_is_not_trusted(rig: Rig, what: str, readonly: bool) -> None:
    rig.put(keys_of(1), blocks_of(8, 1, rig.nbytes))
    rig.store.close()
    path = rig.folder / what
    right = 0o600 if what else 0o700
    for more in (0o020, 0o002, 0o077):
        path.chmod(right | more)
        before = {file.name: file.read_bytes() for file in rig.folder.iterdir()}
        with pytest.raises(kvswap.Error, match=f"{path} may be written by other users .mode 0{right | more:o}.: chmod"):
            rig.open(readonly=readonly)
        assert {file.name: file.read_bytes() for file in rig.folder.iterdir()} == before
        if not what.startswith("segment"):
            with pytest.raises(kvswap.Error, match="may be written by other users"):
                kvswap._C._file_peek(rig.folder)
    path.chmod(right | 0o044)  # reading is the owner's to allow
    rig.open(readonly=readonly).close()
    path.chmod(right)
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
        with pytest.raises(kvswap.Error, match=f"{path} belongs to user 12345, and this process is user 0: "):
            rig.open(readonly=readonly)
        os.chown(path, 0, -1)
    if what:
        path.rename(rig.folder / "aside")
        path.symlink_to(rig.folder / "aside")
        with pytest.raises(kvswap.Error, match=f"opening {path}: it is a link"):
            rig.open(readonly=readonly)
        path.unlink()
        path.mkdir()
        with pytest.raises(kvswap.Error, match=f"opening {path}: it is a link, directory, pipe, socket or device"):
            rig.open(readonly=readonly)


def test_the_files_stay_within_the_budget(tmp_path: Path) -> None:
    rig = Rig(tmp_path, slots=16)
    rig.put(keys_of(100), blocks_of(9, 100, rig.nbytes))
    assert sum(path.stat().st_size for path in rig.files()) <= rig.options["capacity"]
    assert rig.store.stats()["file_nbytes"] <= rig.options["capacity"]
    assert rig.store.stats()["blocks"] == 16


# -- wrong bytes ------------------------------------------------------------------------------------------------------


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


FIELDS = {
    "magic": (0, 8),
    "version": (8, 12),
    "header checksum": (12, 16),
    "layout": (16, 32),
    "sequence": (32, 40),
    "length": (40, 48),
    "data checksum": (48, 52),
    "key length": (52, 54),
    "gap": (54, 56),
    "key": (56, 61),
    "zeros": (61, 4096),
    "data": (4096, 9096),
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("reopened", [False, True], ids=["open", "reopened"])
def test_a_flipped_bit_is_reported_and_never_served(tmp_path: Path, field: str, reopened: bool) -> None:
    rig = Rig(tmp_path)
    data, keys = blocks_of(10, 8, rig.nbytes), keys_of(8)
    rig.put(keys, data)
    begin, end = FIELDS[field]
    rng = np.random.default_rng(begin)
    if reopened:
        rig.store.close()
    places = {block.header.key: block for block in file_reader.read_segment(rig.files()[0])[1]}
    for i in (1, 4, 6):
        at = places[keys[i]].offset + int(rng.integers(begin, end))
        flip(places[keys[i]].path, at, int(rng.integers(8)))
    if reopened:
        rig.store = rig.open()
    target = np.full((8, rig.nbytes), 0xEE, np.uint8)
    load = rig.store.load(keys, target, range(8))
    with pytest.raises(kvswap.Error, match=r"is damaged on disk|is not in the store"):
        load.wait(PATIENCE)
    assert load.failed_positions.tolist() == [1, 4, 6]
    good = [0, 2, 3, 5, 7]
    np.testing.assert_array_equal(target[good], data[good])
    if not reopened:
        assert rig.store.stats()["damaged"] == 3
    assert rig.store.contains(keys) == [i in good for i in range(8)]
    rig.put(keys, data)  # and can be stored again
    np.testing.assert_array_equal(rig.get(keys), data)
    assert (rig.reopen().contains(keys)) == [True] * 8
    np.testing.assert_array_equal(rig.get(keys), data)


def test_blocks_that_changed_places(tmp_path: Path) -> None:
    """Whole and right, but another key's, or from another store: never served for this key."""
    rig = Rig(tmp_path)
    data, keys = blocks_of(11, 2, rig.nbytes), keys_of(2)
    rig.put(keys, data)
    path, slot = rig.files()[0], rig.slot
    raw = path.read_bytes()
    first, second = raw[PAGE : PAGE + slot], raw[PAGE + slot : PAGE + 2 * slot]
    path.write_bytes(raw[:PAGE] + second + first + raw[PAGE + 2 * slot :])
    load = rig.store.load(keys, [np.zeros(rig.nbytes, np.uint8) for _ in keys])
    with pytest.raises(kvswap.Error, match="damaged"):
        load.wait(PATIENCE)
    assert load.failed_positions.tolist() == [0, 1]
    rig.store.close()


@pytest.mark.parametrize("where", ["store.kvs", "segment", "both"])
def test_a_damaged_first_page(tmp_path: Path, where: str) -> None:
    """store.kvs is made again from the segments. A damaged segment is left as it is, and the others are read."""
    rig = Rig(tmp_path)
    data, keys = blocks_of(12, 16, rig.nbytes), keys_of(16)
    rig.put(keys, data)
    rig.store.close()
    if where != "segment":
        flip(rig.folder / "store.kvs", 40, 3)
    lost = rig.files()[0]
    held = {block.header.key for block in file_reader.read_segment(lost)[1]}
    if where != "store.kvs":
        flip(lost, 48, 0)
    before = lost.read_bytes()
    store = rig.store = rig.open()
    wanted = [key not in held or where == "store.kvs" for key in keys]
    assert store.contains(keys) == wanted
    assert store.stats()["foreign"] == (where != "store.kvs")
    rig.put(keys, data)
    np.testing.assert_array_equal(rig.get(keys), data)
    if where != "store.kvs":
        assert lost.read_bytes() == before
    store.close()


def test_a_segment_that_was_cut_off(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    data, keys = blocks_of(13, 8, rig.nbytes), keys_of(8)
    rig.put(keys, data)
    rig.store.close()
    os.truncate(rig.files()[0], PAGE + 3 * rig.slot + 100)
    rig.store = rig.open()
    kept = rig.store.contains(keys)
    assert sum(kept) == 3
    rig.put(keys, data)
    np.testing.assert_array_equal(rig.get(keys), data)
    rig.store.close()


@pytest.mark.parametrize("left", [1, 100, 4095, PAGE + 100, 2 * PAGE])
def test_a_reader_of_a_file_that_ends_within_a_page(tmp_path: Path, engine: str, left: int) -> None:
    """With O_DIRECT too, where what is left of a page can never be read: that block is lost, and nothing hangs.

    In a process of its own: threads that go round for ever would not let this one end."""
    rig = Rig(tmp_path)
    data, keys = blocks_of(37, 8, rig.nbytes), keys_of(8)
    rig.put(keys, data)
    rig.store.close()
    script = f"""
        import os
        import numpy as np
        from kvswap.files import FileStore, Layout
        keys = [b"key-%d" % i for i in range(8)]
        def reader():
            layout = Layout({rig.nbytes}, model="m", tp_rank=0)
            return FileStore({str(rig.folder)!r}, layout, engine={engine!r}, readonly=True)
        store = reader()
        os.truncate({str(rig.files()[0])!r}, {PAGE + 3 * rig.slot + left})
        load = store.load(keys, np.zeros((8, {rig.nbytes}), np.uint8), range(8))
        try:
            load.wait(20)
        except TimeoutError:
            os._exit(5)
        except Exception as error:
            print(error)
        assert load.failed_positions.size == 5, load.failed_positions
        store.close()
        with reader() as store:
            assert sum(store.contains(keys)) == 3
        os.truncate({str(rig.folder / "store.kvs")!r}, {left})
        with reader() as store:
            assert sum(store.contains(keys)) == 3
    """
    run = run_python(script, timeout=90, KVSWAP_LOG="error")
    assert (run.returncode, run.stderr) == (0, "")
    assert "the file is shorter than it should be" in run.stdout


def test_a_torn_block_is_cut_at_the_next_start(tmp_path: Path) -> None:
    """A crash leaves the last checkpoint where it was: blocks written since are compared with their checksums."""
    folder = tmp_path / "store"
    script = """
        import os, sys
        import numpy as np
        from kvswap.files import FileStore, Layout
        store = FileStore(sys.argv[1], Layout(5000, model="m", tp_rank=0), capacity=1 << 20, segment_nbytes=1 << 18)
        data = np.arange(10 * 5000, dtype=np.uint32).astype(np.uint8).reshape(10, 5000)
        store.store([b"key-%d" % i for i in range(10)], data, range(10)).wait(60)
        os._exit(0)  # no checkpoint, no close
    """
    assert run_python(script.replace("sys.argv[1]", repr(str(folder)))).returncode == 0
    blocks = file_reader.read_store(folder)
    for key in (b"key-2", b"key-7"):
        flip(blocks[key].path, blocks[key].offset + PAGE + 4000, 2)
    store = FileStore(folder, Layout(5000, model="m", tp_rank=0), capacity=1 << 20)
    assert store.stats()["cut"] == 2 and store.stats()["found"] == 8
    assert store.contains([b"key-2", b"key-7", b"key-3"]) == [False, False, True]
    store.close()
    assert set(file_reader.read_store(folder)) == {b"key-%d" % i for i in range(10)} - {b"key-2", b"key-7"}


# -- what cannot be read at open --------------------------------------------------------------------------------------


def crash(folder: Path, nbytes: int, calls: str) -> None:
    """A process that stores blocks and ends without a close: nothing since its open is in a checkpoint."""
    script = f"""
        import os
        import numpy as np
        import kvswap
        from kvswap.files import FileStore, Layout
        from kvswap.testing import file_fault
        store = FileStore({str(folder)!r}, Layout({nbytes}, model="m", tp_rank=0), capacity=1 << 20)
        def put(key, value):
            store.store([key], [np.full({nbytes}, value, np.uint8)]).wait(60)
        {calls}
        os._exit(0)
    """
    assert run_python(script).returncode == 0


@pytest.mark.parametrize("buffered", [False, True])
def test_headers_that_cannot_be_read_are_left_alone(tmp_path: Path, buffered: bool) -> None:
    """Their blocks are out of reach until the next open, and nothing is written where they are."""
    rig = Rig(tmp_path, buffered=buffered)
    data, keys = blocks_of(43, 24, rig.nbytes), keys_of(24)
    rig.put(keys[:16], data[:16])
    rig.store.close()
    before = {path: path.read_bytes() for path in rig.files()}
    unread: set[bytes] = set()
    for nth in range(10, 34):  # after the first pages
        with testing.file_fault(None, "read", "fail", nth=nth, code=errno.EIO):
            rig.store = rig.open()
        stats = rig.store.stats()
        lost = [key for key, there in zip(keys[:16], rig.store.contains(keys[:16]), strict=True) if not there]
        assert (stats["lost_slots"], stats["cut"]) == (1, 0) and len(lost) <= 1  # it may be that of an empty slot
        unread.update(lost)
        rig.put(keys[16:], data[16:])
        rig.store.delete(keys[16:]).wait(PATIENCE)
        rig.store.close()
        found = file_reader.read_store(rig.folder)
        assert set(found) == set(keys[:16])
        for path, raw in before.items():
            np.testing.assert_array_equal(
                np.frombuffer(path.read_bytes()[: len(raw)], np.uint8), np.frombuffer(raw, np.uint8)
            )
    assert len(unread) >= 2
    rig.store = rig.open()
    np.testing.assert_array_equal(rig.get(keys[:16]), data[:16])
    rig.store.close()


def test_what_was_not_read_does_not_outlive_what_was_stored_since(tmp_path: Path) -> None:
    """Blocks of unknown sequence: those that are written now count as newer all the same."""
    folder, layout = tmp_path / "store", Layout(5000, model="m", tp_rank=0)
    crash(folder, 5000, 'for i in range(20): put(b"k", i)')
    with testing.file_fault(None, "read", "fail", nth=7, every=1, code=errno.EIO):
        store = FileStore(folder, layout, capacity=1 << 20)  # none of its headers is read: it seems empty
    assert store.stats()["found"] == 0
    store.store([b"k"], [np.full(5000, 99, np.uint8)]).wait(PATIENCE)
    store.close()
    for _ in range(2):
        target = np.zeros(5000, np.uint8)
        with FileStore(folder, layout, capacity=1 << 20) as store:
            store.load([b"k"], [target]).wait(PATIENCE)
        assert (target == 99).all()


def test_data_that_cannot_be_read_is_not_cut_off(tmp_path: Path) -> None:
    """After a crash: whether such a block is whole stays open, also for the opens that follow, until it can be read."""
    folder = tmp_path / "store"
    crash(folder, 5000, 'for i in range(10): put(b"key-%d" % i, i)')
    layout, keys = Layout(5000, model="m", tp_rank=0), keys_of(10)
    hurt = file_reader.read_store(folder)[b"key-4"]
    flip(hurt.path, hurt.offset + PAGE + 4000, 2)
    for every in (1, 2, 3):
        with testing.file_fault(None, "read", "fail", nth=8, every=2 * every, code=errno.EIO):
            store = FileStore(folder, layout, capacity=1 << 20)
        cut = store.stats()["cut"]
        target = np.zeros((10, 5000), np.uint8)
        load = store.load(keys, target, range(10))
        while not load.done():
            time.sleep(0.001)
        there = [i for i in range(10) if i not in load.failed_positions]
        assert (target[there] == np.array(there)[:, None]).all() and cut <= 1
        store.close()
    with FileStore(folder, layout, capacity=1 << 20) as store:
        assert store.contains(keys) == [i != 4 for i in range(10)]
        assert store.stats()["damaged"] == 0


def two_of_a_key(folder: Path) -> file_reader.Block:
    """A crash while both are on disk; the newer one, which is torn."""
    calls = """put(b"k", 1)
        with file_fault(store, "write", "fail", nth=2):  # the second erases the first block
            put(b"k", 2)"""
    crash(folder, 5000, calls)
    blocks = [b for path in sorted(folder.glob("segment-*")) for b in file_reader.read_segment(path)[1]]
    newer = max(blocks, key=lambda block: block.header.sequence)
    assert len(blocks) == 2
    flip(newer.path, newer.offset + PAGE + 10, 1)
    return newer


def test_a_failed_write_that_cannot_be_erased_does_not_cost_the_older_block(tmp_path: Path) -> None:
    """Its header may be on disk, and its data not: the next open compares them, whatever was checkpointed since."""
    folder, layout = tmp_path / "store", Layout(5000, model="m", tp_rank=0)
    torn, target = np.full(5000, 2, np.uint8), np.zeros(5000, np.uint8)
    store = FileStore(folder, layout, capacity=1 << 20)
    store.store([b"k"], [np.full(5000, 1, np.uint8)]).wait(PATIENCE)
    with testing.file_fault(store, "write", "fail", nth=1, every=1, code=errno.EIO):
        failed = store.store([b"k"], [torn])
        with pytest.raises(kvswap.Error, match="Input/output error"):
            failed.wait(PATIENCE)
    assert store.stats()["lost_slots"] == 1
    store.store([b"other"], [torn]).wait(PATIENCE)
    store.close()  # with a checkpoint
    blocks = file_reader.read_store(folder)
    older, other = blocks[b"k"], blocks[b"other"]
    between = (older.offset + other.offset) // 2
    assert other.offset - older.offset == 2 * 12288 and other.header.sequence == older.header.sequence + 2
    with older.path.open("r+b") as file:  # what the write could have left: its header, and half of its data
        file.seek(older.offset)
        page = bytearray(file.read(PAGE))
        page[32:40] = (older.header.sequence + 1).to_bytes(8, "little")
        page[48:52] = file_reader.crc32c(torn.tobytes()).to_bytes(4, "little")
        page[12:16] = bytes(4)
        page[12:16] = file_reader.crc32c(bytes(page)).to_bytes(4, "little")
        file.seek(between)
        file.write(page + torn[:2500].tobytes())
    with FileStore(folder, layout, capacity=1 << 20) as store:
        assert store.stats()["cut"] == 1
        store.load([b"k"], [target]).wait(PATIENCE)
    assert (target == 1).all()


def test_an_older_block_stays_where_the_newer_one_cannot_be_read(tmp_path: Path) -> None:
    """The newer one may be torn, as it is here: the open that can read it again goes back to the older one."""
    folder, layout = tmp_path / "store", Layout(5000, model="m", tp_rank=0)
    two_of_a_key(folder)
    store = None
    for nth in range(6, 12):  # until it is the newer one's data
        with testing.file_fault(None, "read", "fail", nth=nth, code=errno.EIO):
            store = FileStore(folder, layout, capacity=1 << 20, readonly=True)
        there = store.contains([b"k"])[0] and store.stats()["cut"] == 0
        newest = there and store.load([b"k"], [np.zeros(5000, np.uint8)])
        store.close()
        if newest and "damaged" in str(newest.error):
            break
    else:
        raise AssertionError("it was never that block whose data was not read")
    with testing.file_fault(None, "read", "fail", nth=nth, code=errno.EIO):
        store = FileStore(folder, layout, capacity=1 << 20)
    assert (store.stats()["cut"], store.stats()["lost_slots"]) == (0, 1)
    store.close()
    target = np.zeros(5000, np.uint8)
    with FileStore(folder, layout, capacity=1 << 20) as store:
        assert store.stats()["cut"] == 1
        store.load([b"k"], [target]).wait(PATIENCE)
    assert (target == 1).all()


def test_a_segment_whose_first_page_cannot_be_read_is_checked_once_it_can(tmp_path: Path) -> None:
    folder, layout = tmp_path / "store", Layout(5000, model="m", tp_rank=0)
    crash(folder, 5000, 'for i in range(10): put(b"key-%d" % i, i)')
    hurt = file_reader.read_store(folder)[b"key-4"]
    flip(hurt.path, hurt.offset + PAGE + 4000, 2)

    def foreign(nth: int, readonly: bool) -> int:
        with testing.file_fault(None, "read", "fail", nth=nth, code=errno.EIO):
            store = FileStore(folder, layout, capacity=1 << 20, readonly=readonly)
        count = store.stats()["foreign"]
        store.close()
        return int(count)

    which = next(nth for nth in range(4, 7) if foreign(nth, readonly=True))
    assert foreign(which, readonly=False) == 1
    with FileStore(folder, layout, capacity=1 << 20) as store:
        assert store.stats()["cut"] == 1 and store.stats()["found"] == 9


def test_a_torn_block_that_cannot_be_erased_stays_torn(tmp_path: Path) -> None:
    """It is not taken for whole at the next open, where it would cost the older block of its key."""
    folder = tmp_path / "store"
    two_of_a_key(folder)
    layout, target = Layout(5000, model="m", tp_rank=0), np.zeros(5000, np.uint8)
    with testing.file_fault(None, "write", "fail", nth=2, code=errno.EIO):  # of the store's file, then that block
        store = FileStore(folder, layout, capacity=1 << 20)
    for _ in range(3):
        target[:] = 0
        store.load([b"k"], [target]).wait(PATIENCE)
        assert (target == 1).all()
        store.close()
        store = FileStore(folder, layout, capacity=1 << 20)
    store.close()


# -- restart ----------------------------------------------------------------------------------------------------------


def test_a_restart_finds_its_blocks(tmp_path: Path, engine: str) -> None:
    rig = Rig(tmp_path, engine=engine)
    data, keys = blocks_of(14, 40, rig.nbytes), keys_of(40)
    rig.put(keys, data)
    rig.put(keys[:5], data[35:])
    rig.store.delete(keys[20:25]).wait(PATIENCE)
    wanted = np.concatenate([data[35:], data[5:20], data[25:]])
    left = keys[:20] + keys[25:]
    for _ in range(3):
        store = rig.reopen()
        assert store.stats()["found"] == 35 and store.stats()["cut"] == 0
        np.testing.assert_array_equal(rig.get(left), wanted)
        assert store.contains(keys[20:25]) == [False] * 5
    rig.store.close()


def test_the_order_of_use_begins_as_the_order_of_writing(tmp_path: Path) -> None:
    rig = Rig(tmp_path, slots=16)
    data, keys = blocks_of(15, 16, rig.nbytes), keys_of(16)
    for i in range(16):
        rig.put(keys[i : i + 1], data[i : i + 1])
    rig.reopen()
    rig.put([b"new-%d" % i for i in range(5)], data[:5])
    assert rig.store.contains(keys) == [False] * 5 + [True] * 11
    rig.store.close()


def test_another_layout_is_refused_by_name_and_left_alone(rig: Rig) -> None:
    data, keys = blocks_of(16, 4, rig.nbytes), keys_of(4)
    rig.put(keys, data)
    rig.store.close()
    before = {path.name: path.read_bytes() for path in rig.folder.iterdir()}
    others = [
        Layout(rig.nbytes, model="m", tp_rank=1),
        Layout(rig.nbytes + 1, model="m", tp_rank=0),
        Layout(rig.nbytes),
    ]
    for other in others:
        with pytest.raises(ValueError, match=r'holds blocks of another layout .*"model":"m","tp_rank":0.*asked for'):
            FileStore(rig.folder, other, capacity=1 << 20)
    (rig.folder / "store.kvs").unlink()  # the segments say it too
    with pytest.raises(ValueError, match=r"another layout .segment-"):
        FileStore(rig.folder, others[0], capacity=1 << 20)
    (rig.folder / "store.kvs").unlink()
    assert {p.name: p.read_bytes() for p in rig.folder.iterdir()} == {
        k: v for k, v in before.items() if k != "store.kvs"
    }
    rig.store = rig.open()
    np.testing.assert_array_equal(rig.get(keys), data)


def test_a_smaller_budget_gives_up_files(tmp_path: Path) -> None:
    rig = Rig(tmp_path, slots=32)
    data, keys = blocks_of(17, 32, rig.nbytes), keys_of(32)
    rig.put(keys, data)
    half = rig.options["capacity"] // 2
    store = rig.reopen(capacity=half)
    assert sum(path.stat().st_size for path in rig.files()) <= half
    left = [i for i, there in enumerate(store.contains(keys)) if there]
    assert len(left) == 16
    np.testing.assert_array_equal(rig.get([keys[i] for i in left]), data[left])
    store.close()


@pytest.mark.parametrize("first", [0, 1], ids=["the newer first", "the older first"])
def test_of_two_blocks_of_a_key_the_newer_is_taken(tmp_path: Path, first: int) -> None:
    """As where a process is killed before it has erased the header of the block that it replaced."""
    rig = Rig(tmp_path, slots=8)
    data = blocks_of(37, 4, rig.nbytes)
    if first == 0:
        rig.put([b"a"], data[:1])
    rig.put([b"k"], data[1:2])
    (path,) = rig.files()
    with path.open("r+b") as file:
        at = file.read().index(data[1].tobytes()) - PAGE
        file.seek(at)
        older = file.read(rig.slot)
        if first == 0:
            rig.store.delete([b"a"]).wait(PATIENCE)
        rig.put([b"k"], data[2:3])
        file.seek(0)
        newer = file.read().index(data[2].tobytes()) - PAGE
        assert newer < at if first == 0 else newer > at
        rig.store.close()
        file.seek(at)
        file.write(older)
    rig.store = rig.open()
    np.testing.assert_array_equal(rig.get([b"k"]), data[2:3])
    assert [block.header.key for block in file_reader.read_segment(path)[1]] == [b"k"]  # the older one is erased
    rig.store.close()


# -- sharing ----------------------------------------------------------------------------------------------------------


def test_one_writer(rig: Rig) -> None:
    with pytest.raises(kvswap.Error, match="being written by another process, or open twice in this one"):
        rig.open()
    script = f"""
        from kvswap.files import FileStore, Layout
        FileStore({str(rig.folder)!r}, Layout({rig.nbytes}, model="m", tp_rank=0), capacity=1 << 20)
    """
    run = run_python(script)
    assert run.returncode == 1 and "being written by another process" in run.stderr


def test_a_child_of_the_writer_does_not_keep_the_lock(tmp_path: Path) -> None:
    """It has copies of its parent's descriptors: neither when the store is closed nor when its process is killed may
    another writer find the directory locked."""
    script = f"""
        import os, warnings
        from kvswap.files import FileStore, Layout
        warnings.simplefilter("ignore")
        (ended, end), (lives, tell) = os.pipe(), os.pipe()
        def open_store():
            return FileStore({str(tmp_path / "store")!r}, Layout(5000), capacity=8 << 20)
        def in_a_child(call):
            child = os.fork()
            if child == 0:
                call()
                os._exit(0)
            return child
        def live():  # until this process says so, or ends
            os.close(end)
            os.write(tell, b".")
            os.read(ended, 1)
        store = open_store()
        child = in_a_child(live)
        os.read(lives, 1)
        store.close()
        open_store().close()

        def die():
            store = open_store()
            in_a_child(live)
            os.read(lives, 1)
            os.kill(os.getpid(), 9)
        os.waitpid(in_a_child(die), 0)
        open_store().close()
        assert os.waitpid(child, os.WNOHANG)[0] == 0  # it lives
        os.close(end)
        assert os.waitpid(child, 0)[1] == 0
    """
    run = run_python(script, timeout=60, KVSWAP_LOG="error")
    assert (run.returncode, run.stderr) == (0, "")


def test_a_reader_beside_the_writer(rig: Rig) -> None:
    data, keys = blocks_of(18, 20, rig.nbytes), keys_of(20)
    rig.put(keys[:10], data[:10])
    reader = rig.open(readonly=True)
    target = np.zeros((20, rig.nbytes), np.uint8)
    reader.load(keys[:10], target, range(10)).wait(PATIENCE)
    np.testing.assert_array_equal(target[:10], data[:10])
    for call in (lambda: reader.store(keys[:1], data, [0]), lambda: reader.delete(keys[:1])):
        with pytest.raises(kvswap.Error, match="readonly"):
            call()
    rig.put(keys[10:], data[10:])
    assert reader.contains(keys[9:11]) == [True, False]
    reader.refresh()
    assert reader.contains(keys) == [True] * 20
    rig.store.delete(keys[3:4]).wait(PATIENCE)  # the reader has not seen this yet
    load = reader.load(keys, target, range(20))
    with pytest.raises(kvswap.Error, match="block 3 is not in the store"):
        load.wait(PATIENCE)
    assert load.failed_positions.tolist() == [3]
    others = [i for i in range(20) if i != 3]
    np.testing.assert_array_equal(target[others], data[others])
    reader.close()


def test_two_readers_and_a_writer(tmp_path: Path) -> None:
    """Blocks come and go under the readers: what they are given is whole, and the key's own."""
    rig = Rig(tmp_path, slots=16)
    stop = threading.Event()
    wrong: list[str] = []
    served = [0, 0]

    def block(number: int, version: int) -> Any:
        return np.full(rig.nbytes, (number * 31 + version) % 256, np.uint8)

    def write() -> None:
        rng, end = np.random.default_rng(1), time.monotonic() + PATIENCE / 2
        for version in itertools.count(1):
            if version >= 400 and (min(served) > 0 or time.monotonic() > end):
                break
            numbers = rng.choice(40, 4, replace=False)
            keys = [b"%d" % number for number in numbers]
            if version % 5 == 0:
                rig.store.delete(keys).wait(PATIENCE)
            else:
                rig.store.store(keys, [block(int(number), version) for number in numbers]).wait(PATIENCE)
        stop.set()

    def read(which: int) -> None:
        reader = rig.open(readonly=True)
        while not stop.is_set():
            reader.refresh()
            target = np.zeros((40, rig.nbytes), np.uint8)
            load = reader.load([b"%d" % number for number in range(40)], target, range(40))
            while not load.done():
                time.sleep(0.0001)
            lost = set(load.failed_positions.tolist())
            served[which] += 40 - len(lost)
            for number in set(range(40)) - lost:
                if (target[number] != target[number][0]).any():
                    wrong.append(f"reader {which}, key {number}")
        reader.close()

    threads = [threading.Thread(target=write), *(threading.Thread(target=read, args=(i,)) for i in range(2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert wrong == [] and min(served) > 0
    rig.store.close()


def test_a_refresh_beside_loads(tmp_path: Path, engine: str) -> None:
    """Loads go on while the reader looks again: each block is there or told, and what was pinned stays pinned."""
    rig = Rig(tmp_path, slots=16)
    data, keys = blocks_of(38, 16, rig.nbytes), keys_of(16)
    rig.put(keys[:8], data[:8])
    reader = rig.open(readonly=True, engine=engine)
    reader.pin(keys[:2])
    target = np.zeros((8, rig.nbytes), np.uint8)
    with testing.file_fault(reader, "read", "delay", every=1, delay=0.02):
        load = reader.load(keys[:8], target, range(8))
        rig.put(keys[8:], data[8:])
        rig.store.delete(keys[1:2]).wait(PATIENCE)
        reader.refresh()
        while not load.done():
            time.sleep(0.001)
    good = [i for i in range(8) if i not in load.failed_positions]
    assert set(load.failed_positions.tolist()) <= {1}
    np.testing.assert_array_equal(target[good], data[good])
    assert reader.contains(keys) == [i != 1 for i in range(16)]
    assert reader.stats()["pinned"] == 2 and reader.stats()["blocks"] == 15
    reader.unpin(keys[:2])
    reader.refresh()
    assert sorted(reader.keys()) == sorted(k for k in keys if k != keys[1])
    reader.close()
    rig.store.close()


def test_threads_that_load_and_refresh(rig: Rig) -> None:
    """No call is refused because of the other, but for two that refresh at once; all blocks are there all the time."""
    data, keys = blocks_of(39, 8, rig.nbytes), keys_of(8)
    rig.put(keys, data)
    reader = rig.open(readonly=True)
    end = time.monotonic() + 1.0
    wrong: list[str] = []

    def load() -> None:
        target = np.zeros((8, rig.nbytes), np.uint8)
        while time.monotonic() < end:
            target[:] = 0
            reader.load(keys, target, range(8)).wait(PATIENCE)
            if not np.array_equal(target, data) or reader.contains(keys) != [True] * 8:
                wrong.append("bytes")

    def refresh() -> None:
        while time.monotonic() < end:
            try:
                reader.refresh()
            except kvswap.Error as error:
                if "another thread refreshes" not in str(error):
                    wrong.append(str(error))

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=run, args=(call,)) for call in (load, load, refresh, refresh)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert wrong == []
    reader.close()


def test_a_reader_lets_go_of_files_that_the_writer_gave_up(tmp_path: Path, engine: str) -> None:
    """Their blocks are gone from the next refresh on, and so is the room that they took on disk. A file that comes
    under the same name is another."""

    def open_files() -> list[str]:
        found = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/self/fd/{fd}"))
        return [path for path in found if path.startswith(str(rig.folder))]

    rig = Rig(tmp_path, slots=32)
    data, keys = blocks_of(40, 40, rig.nbytes), keys_of(40)
    rig.put(keys[:32], data[:32])
    reader = rig.open(readonly=True, engine=engine)
    target = np.zeros((40, rig.nbytes), np.uint8)
    reader.load(keys[:32], target, range(32)).wait(PATIENCE)
    store = rig.reopen(capacity=rig.options["capacity"] // 2)
    left = store.contains(keys)
    assert sum(left) == 16 and sum("(deleted)" in path for path in open_files()) == 2
    reader.refresh()
    assert reader.contains(keys) == left and reader.stats()["segments"] == 2
    assert not any("(deleted)" in path for path in open_files())
    store.close()
    for path in rig.files():
        path.unlink()
    rig.store = store = rig.open(capacity=2 * rig.options["capacity"])
    rig.put(keys[30:40], data[30:40])
    reader.refresh()
    assert reader.contains(keys) == [i >= 30 for i in range(40)]
    assert not any("(deleted)" in path for path in open_files())
    rig.put(keys[:30], data[:30])
    reader.refresh()  # whose new files have descriptors that others had before
    target[:] = 0
    reader.load(keys, target, range(40)).wait(PATIENCE)
    np.testing.assert_array_equal(target, data)
    reader.close()
    store.close()


@pytest.mark.parametrize("becomes", ["another key's", "newer", "torn"])
def test_a_block_that_is_replaced_while_a_reader_reads_it(tmp_path: Path, engine: str, becomes: str) -> None:
    """It is not damaged: it is gone, or there again. One that stays torn is."""
    rig = Rig(tmp_path)
    data = blocks_of(41, 3, rig.nbytes)
    rig.put([b"mine"], data[:1])
    reader = rig.open(readonly=True, engine=engine)
    before = file_reader.read_store(rig.folder)[b"mine"]
    other = b"other" if becomes == "another key's" else b"mine"
    rig.put([other], data[1:2])
    rig.store.close()
    after = file_reader.read_store(rig.folder)[other]
    whole = after.path.read_bytes()[after.offset : after.offset + rig.slot]
    target = np.zeros(rig.nbytes, np.uint8)

    def write(slot: bytes) -> None:
        with before.path.open("r+b") as file:
            file.seek(before.offset)
            file.write(slot)

    write(whole[: PAGE + 100] + bytes(rig.slot - PAGE - 100))
    with testing.file_fault(reader, "read", "delay", nth=2, delay=PATIENCE):  # a second look waits for the end
        load = reader.load([b"mine"], [target])
        with contextlib.suppress(TimeoutError, MissingKey):
            load.wait(0.2)
        if becomes != "torn":
            write(whole)
    while not load.done():
        time.sleep(0.001)
    if becomes == "newer":
        load.wait(PATIENCE)
        np.testing.assert_array_equal(target, data[1])
    else:
        said = {"another key's": "block 0 is not in the store", "torn": "block 0 is damaged on disk"}
        assert said[becomes] in str(load.reasons[0])
    reader.close()


def test_a_refresh_that_finds_a_block_no_more_while_its_load_waits(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    data, keys = blocks_of(42, 2, rig.nbytes), keys_of(2)
    rig.put(keys, data)
    reader = rig.open(readonly=True, engine="threads", depth=1)
    targets = [np.zeros(rig.nbytes, np.uint8) for _ in keys]
    with testing.file_fault(reader, "read", "delay", nth=1, delay=PATIENCE):
        first = reader.load(keys[:1], targets[:1])
        second = reader.load(keys[1:], targets[1:])
        rig.store.delete(keys[1:]).wait(PATIENCE)
        reader.refresh()
    first.wait(PATIENCE)
    with pytest.raises(kvswap.Error, match="block 0 is not in the store"):
        second.wait(PATIENCE)
    reader.close()
    rig.store.close()


def test_a_reader_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(kvswap.Error, match="opening the directory"):
        FileStore(tmp_path / "nothing", Layout(1), readonly=True)
    with pytest.raises(kvswap.Error, match="is no store"):
        FileStore(tmp_path, Layout(1), readonly=True)


# -- room -------------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_leave(tmp_path: Path) -> None:
    rig = Rig(tmp_path, slots=16)
    data, keys = blocks_of(19, 24, rig.nbytes), keys_of(24)
    for i in range(16):
        rig.put(keys[i : i + 1], data[i : i + 1])
    rig.get(keys[0:1])
    rig.get(keys[3:4])
    for i in range(16, 20):
        rig.put(keys[i : i + 1], data[i : i + 1])
    gone = {1, 2, 4, 5}
    assert rig.store.contains(keys) == [i < 20 and i not in gone for i in range(24)]
    assert rig.store.stats()["evicted"] == 4
    rig.store.close()


def test_touched_blocks_stay_and_keys_are_told_in_order(tmp_path: Path) -> None:
    rig = Rig(tmp_path, slots=8)
    data, keys = blocks_of(36, 12, rig.nbytes), keys_of(12)
    for i in range(8):
        rig.put(keys[i : i + 1], data[i : i + 1])
    rig.store.touch([keys[1], b"nobody", keys[0]])
    assert rig.store.keys() == [*keys[2:8], keys[0], keys[1]]
    for i in range(8, 12):
        rig.put(keys[i : i + 1], data[i : i + 1])
    assert rig.store.keys() == [*keys[6:8], keys[0], keys[1], *keys[8:12]]
    rig.store.close()


def test_pinned_blocks_stay(tmp_path: Path) -> None:
    rig = Rig(tmp_path, slots=8)
    data, keys = blocks_of(20, 24, rig.nbytes), keys_of(24)
    rig.put(keys[:8], data[:8])
    rig.store.pin(keys[:5])
    rig.store.pin(keys[:1])
    rig.put(keys[8:11], data[8:11])
    assert rig.store.contains(keys[:11]) == [True] * 5 + [False] * 3 + [True] * 3
    rig.store.pin(keys[8:11])
    assert rig.store.stats()["pinned"] == 8
    full = rig.store.store(keys[11:13], data, [11, 12])
    with pytest.raises(kvswap.Error, match="no room to store block 0: all blocks of the store are pinned"):
        full.wait(PATIENCE)
    assert full.failed_positions.tolist() == [0, 1]
    rig.put(keys[:5], data[11:16])  # in their places
    np.testing.assert_array_equal(rig.get(keys[:5]), data[11:16])
    with pytest.raises(kvswap.Error, match=r"keys\[1\] is not in the store: nothing was pinned"):
        rig.store.pin([keys[0], b"nobody"])
    with pytest.raises(ValueError, match=r"keys\[1\] is not pinned: nothing was unpinned"):
        rig.store.unpin([keys[0], keys[20]])
    rig.store.unpin(keys[:5])
    rig.store.unpin(keys[:1])
    rig.put(keys[11:12], data[11:12])
    assert rig.store.stats()["blocks"] == 8
    rig.store.close()


def test_a_full_queue_is_an_answer(tmp_path: Path) -> None:
    rig = Rig(tmp_path, queue=4, engine="threads", depth=1)
    data, keys = blocks_of(21, 8, rig.nbytes), keys_of(8)
    with testing.file_fault(rig.store, "write", "delay", every=1, delay=PATIENCE):
        running = [rig.store.store(keys[i : i + 1], data, [i]) for i in range(4)]
        with pytest.raises(kvswap.QueueFull, match="holds 4 unfinished stores "):
            rig.store.store(keys[4:5], data, [4])
        assert rig.store.contains(keys[4:5]) == [False]
        loading = rig.store.load(keys[:1], np.zeros((1, rig.nbytes), np.uint8), [0])  # has a queue of its own
    for transfer in [*running, loading]:
        transfer.wait(PATIENCE)
    assert rig.store.stats()["refused_full"] == 1
    rig.put(keys, data)
    rig.store.close()


def test_loads_go_before_stores(tmp_path: Path) -> None:
    rig = Rig(tmp_path, engine="threads", depth=1)
    data, keys = blocks_of(22, 30, rig.nbytes), keys_of(30)
    rig.put(keys[:1], data)
    with testing.file_fault(rig.store, "write", "delay", every=1, delay=PATIENCE):
        stores = rig.store.store(keys[1:], data, range(1, 30))
        load = rig.store.load(keys[:1], np.zeros((1, rig.nbytes), np.uint8), [0])
        with testing.file_fault(rig.store, "write", "delay", nth=6, every=1, delay=PATIENCE):  # two more may be written
            load.wait(PATIENCE / 2)
            assert not stores.done()
    stores.wait(PATIENCE)
    rig.store.close()


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["short", "interrupt"])
@pytest.mark.parametrize("buffered", [False, True])
def test_parts_and_interruptions_do_not_show(tmp_path: Path, engine: str, action: str, buffered: bool) -> None:
    rig = Rig(tmp_path, 70001, engine=engine, buffered=buffered)
    data, keys = blocks_of(23, 10, rig.nbytes), keys_of(10)
    with (
        testing.file_fault(rig.store, "write", action, every=2),
        testing.file_fault(rig.store, "read", action, every=3),
    ):
        rig.put(keys, data)
        np.testing.assert_array_equal(rig.get(keys), data)
    rig.reopen()
    np.testing.assert_array_equal(rig.get(keys), data)
    rig.store.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
def test_a_write_that_fails_is_a_failed_block(tmp_path: Path, engine: str, code: int) -> None:
    rig = Rig(tmp_path, engine=engine, slots=16)
    data, keys = blocks_of(24, 8, rig.nbytes), keys_of(8)
    with testing.file_fault(rig.store, "write", "fail", nth=4, code=code):  # the first one makes the segment
        transfer = rig.store.store(keys, data, range(8))
        with pytest.raises(kvswap.Error, match=f"storing block . *: {os.strerror(code)} .errno {code}"):
            transfer.wait(PATIENCE)
    assert transfer.failed_positions.size == 1
    bad = int(transfer.failed_positions[0])
    assert os.strerror(code) in str(transfer.reasons[bad])
    assert rig.store.contains(keys) == [i != bad for i in range(8)]
    rig.put(keys, data)
    np.testing.assert_array_equal(rig.get(keys), data)
    assert rig.store.stats()["lost_slots"] == 0 and rig.store.stats()["failed"] == 1
    rig.store.close()


def test_a_read_that_fails_is_a_block_that_is_lost(tmp_path: Path, engine: str) -> None:
    """It can be stored again, in another slot; the bad one is not used until the next open."""
    rig = Rig(tmp_path, engine=engine)
    data, keys = blocks_of(25, 8, rig.nbytes), keys_of(8)
    rig.put(keys, data)
    with testing.file_fault(rig.store, "read", "fail", nth=3, code=errno.EIO):
        load = rig.store.load(keys, np.zeros_like(data), range(8))
        with pytest.raises(kvswap.Error, match=r"loading block .: Input/output error"):
            load.wait(PATIENCE)
    assert load.failed_positions.size == 1
    lost = int(load.failed_positions[0])
    assert rig.store.contains(keys) == [i != lost for i in range(8)]
    again = rig.store.store(keys, data, range(8), replace=False)
    again.wait(PATIENCE)
    assert again.num_kept == 7 and rig.store.stats()["lost_slots"] == 1
    np.testing.assert_array_equal(rig.get(keys), data)
    rig.reopen()
    assert rig.store.stats()["found"] == 8 and rig.store.stats()["lost_slots"] == 0
    np.testing.assert_array_equal(rig.get(keys), data)
    rig.store.close()


@pytest.mark.parametrize("call", ["allocate", "open"])
def test_no_room_for_another_file(tmp_path: Path, call: Any) -> None:
    """What has room goes on: blocks that are there make way; with none there, the reason is told."""
    rig = Rig(tmp_path)
    data, keys = blocks_of(26, 12, rig.nbytes), keys_of(12)
    with testing.file_fault(rig.store, call, "fail", every=1, code=errno.ENOSPC):
        transfer = rig.store.store(keys[:3], data, range(3))
        with pytest.raises(kvswap.Error, match="storing block 0: No space left on device"):
            transfer.wait(PATIENCE)
        assert transfer.failed_positions.tolist() == [0, 1, 2]
    time.sleep(2.1)  # it is not tried at each block
    rig.put(keys[:8], data[:8])
    with testing.file_fault(rig.store, call, "fail", every=1, code=errno.ENOSPC):
        rig.put(keys[8:], data[8:])
    assert rig.store.stats()["evicted"] == 4 and rig.store.stats()["segments"] == 1
    rig.store.close()


def test_a_block_that_cannot_be_erased(tmp_path: Path) -> None:
    """A delete that fails leaves the block; an older version that cannot be erased never comes back."""
    rig = Rig(tmp_path)
    data = blocks_of(27, 4, rig.nbytes)
    rig.put([b"k"], data[:1])
    with testing.file_fault(rig.store, "write", "fail", nth=1, code=errno.EIO):
        failed = rig.store.delete([b"k"])
        with pytest.raises(kvswap.Error, match="deleting block 0: Input/output error"):
            failed.wait(PATIENCE)
    assert rig.store.contains([b"k"]) == [True]
    with testing.file_fault(rig.store, "write", "fail", nth=2, code=errno.EIO):  # the second erases the first block
        rig.put([b"k"], data[1:2])
    np.testing.assert_array_equal(rig.get([b"k"]), data[1:2])
    assert rig.store.stats()["lost_slots"] == 1
    rig.store.delete([b"k"]).wait(PATIENCE)
    assert rig.store.contains([b"k"]) == [False]
    assert rig.reopen().contains([b"k"]) == [False]
    rig.store.close()


def test_an_older_block_does_not_come_back_when_the_newer_one_leaves(tmp_path: Path) -> None:
    """The older one could not be erased: then the newer one is not evicted, or the next start would serve the older."""
    rig = Rig(tmp_path, slots=8)
    data, keys = blocks_of(35, 30, rig.nbytes), keys_of(30)
    rig.put([b"k"], data[:1])
    with testing.file_fault(rig.store, "write", "fail", nth=2, code=errno.EIO):
        rig.put([b"k"], data[1:2])
    for i in range(2, 30):
        rig.put(keys[i : i + 1], data[i : i + 1])
    assert rig.store.contains([b"k"]) == [True]
    assert rig.reopen().contains([b"k"]) == [True]
    np.testing.assert_array_equal(rig.get([b"k"]), data[1:2])
    rig.store.close()


@pytest.mark.parametrize("engine_of_two", ENGINES)
def test_a_full_disk(tmp_path: Path, engine_of_two: str, full_disk: Path) -> None:
    """A file system smaller than the budget: the store serves what fits, and says what does not."""
    engine = have_engine(engine_of_two, tmp_path)
    nbytes = 256 << 10
    options = {"capacity": 1 << 30, "segment_nbytes": 4 << 20, "engine": engine}
    store = FileStore(full_disk / engine, Layout(nbytes), **options)
    data, keys = blocks_of(28, 100, nbytes), keys_of(100)
    stored = store.store(keys, data, range(100))
    with pytest.raises(kvswap.Error) if stored.error else _nothing():
        stored.wait(PATIENCE)
    there = [i for i, here in enumerate(store.contains(keys)) if here]
    assert 0 < len(there) < 100 and store.stats()["blocks"] == len(there)
    target = np.zeros_like(data)
    store.load([keys[i] for i in there], target, there).wait(PATIENCE)
    np.testing.assert_array_equal(target[there], data[there])
    store.close()
    store = FileStore(full_disk / engine, Layout(nbytes), **options)
    store.load([keys[i] for i in there], target, there).wait(PATIENCE)
    store.close()


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    import subprocess

    folder = tmp_path / "small"
    folder.mkdir()
    mount = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
        if os.geteuid() == 0
        else None
    )
    if mount is None or mount.returncode:
        pytest.skip(f"no small file system can be mounted here: {mount.stderr.strip() if mount else 'not root'}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_directory_that_vanishes(tmp_path: Path) -> None:
    rig = Rig(tmp_path, slots=16)
    data, keys = blocks_of(29, 24, rig.nbytes), keys_of(24)
    rig.put(keys[:4], data[:4])
    rig.folder.rename(tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere").iterdir():
        path.unlink()
    (tmp_path / "elsewhere").rmdir()
    np.testing.assert_array_equal(rig.get(keys[:4]), data[:4])  # the file is still open
    failed = rig.store.store(keys[8:18], data[8:18], range(10))
    with pytest.raises(kvswap.Error, match="No such file or directory"):
        failed.wait(PATIENCE)
    np.testing.assert_array_equal(rig.get(keys[:4]), data[:4])  # none has made way
    assert rig.store.stats()["evicted"] == 0
    rig.store.close()


def test_no_descriptors_are_left(tmp_path: Path, engine: str) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    rig = Rig(tmp_path, engine=engine)
    before = count()
    rig.store.close()
    closed = count()
    for _ in range(5):
        with testing.file_fault(rig.reopen(), "open", "fail", every=2, code=errno.EMFILE):
            transfer = rig.store.store(keys_of(30), blocks_of(30, 30, rig.nbytes), range(30))
            while not transfer.done():
                time.sleep(0.001)
        rig.store.close()
        with pytest.raises(ValueError):
            FileStore(rig.folder, Layout(1), capacity=1 << 20)
        assert comes_down(count, closed)
    assert closed < before


# -- waiting, cancelling, closing -------------------------------------------------------------------------------------


def test_wait_with_a_limit_and_cancel(tmp_path: Path) -> None:
    rig = Rig(tmp_path, engine="threads", depth=1)
    data, keys = blocks_of(31, 20, rig.nbytes), keys_of(20)
    with testing.file_fault(rig.store, "write", "delay", nth=8, every=1, delay=PATIENCE):
        transfer = rig.store.store(keys, data, range(20))
        with pytest.raises(TimeoutError, match=r"did not end within 0.01 s; it goes on"):
            transfer.wait(0.01)
        while not rig.store.contains(keys[:1])[0]:
            time.sleep(0.001)
        assert transfer.cancel()
    with pytest.raises(kvswap.Error, match="cancelled before block"):
        transfer.wait(PATIENCE)
    assert transfer.state == "cancelled" and 0 < transfer.failed_positions.size < 20
    assert rig.store.contains(keys) == [i not in transfer.failed_positions for i in range(20)]
    rig.store.close()


def test_a_delay_ends_with_its_block(rig: Rig) -> None:
    with testing.file_fault(rig.store, "write", "delay", every=1, delay=5 * PATIENCE):
        transfer = rig.store.store(keys_of(3), blocks_of(1, 3, rig.nbytes), range(3))
        with pytest.raises(TimeoutError):
            transfer.wait(0.2)
    transfer.wait(PATIENCE)


def test_tensors_are_held_until_the_end(rig: Rig) -> None:
    class Tensor(np.ndarray):
        pass

    data = np.zeros((2, rig.nbytes), np.uint8).view(Tensor)
    with testing.file_fault(rig.store, "write", "delay", every=1, delay=PATIENCE):
        transfer = rig.store.store(keys_of(2), [data[0], data[1]])
        gone = weakref.ref(data)
        del data
        assert gone() is not None
    transfer.wait(PATIENCE)
    assert gone() is None


def test_closing(rig: Rig) -> None:
    data, keys = blocks_of(32, 4, rig.nbytes), keys_of(4)
    transfer = rig.store.store(keys, data, range(4))
    rig.store.close()
    assert transfer.state == "done"
    rig.store.close()
    assert rig.store.stats()["blocks"] == 4 and rig.store.stats()["segments"] == 1 and rig.store.info["slot_nbytes"]
    for call in (lambda: rig.store.store(keys, data, range(4)), lambda: rig.store.load(keys, data, range(4))):
        with pytest.raises(kvswap.Error, match="closed"):
            call()


def test_what_waits_for_a_slot_can_be_cancelled(tmp_path: Path) -> None:
    """All slots are being written, and these writes do not end meanwhile."""
    rig = Rig(tmp_path, slots=4, engine="threads", depth=8)
    data = blocks_of(33, 5, rig.nbytes)
    rig.put(keys_of(4, "old"), data[:4])
    with testing.file_fault(rig.store, "write", "delay", every=1, delay=2 * PATIENCE):
        full = rig.store.store(keys_of(4), data, range(4))
        until(lambda: not any(rig.store.contains(keys_of(4, "old"))))
        starved = rig.store.store([b"more"], data, [4])
        time.sleep(0.2)  # its turn has come, and it waits
        assert starved.cancel()
        with pytest.raises(kvswap.Error, match="cancelled"):
            starved.wait(PATIENCE)
        assert not full.done()
    full.wait(PATIENCE)
    rig.store.close()


def test_the_largest_depth(rig: Rig) -> None:
    assert rig.reopen(depth=256).info["depth"] == 256
    rig.put(keys_of(3), blocks_of(36, 3, rig.nbytes))


def test_closing_cancels_what_has_not_begun(tmp_path: Path) -> None:
    rig = Rig(tmp_path, engine="threads", depth=1)
    data, keys = blocks_of(33, 20, rig.nbytes), keys_of(20)
    with testing.file_fault(rig.store, "write", "delay", every=1, delay=0.2):
        transfer = rig.store.store(keys, data, range(20))
        rig.store.close(timeout=0.05)
    assert transfer.state == "cancelled"
    rig.store = rig.open()
    assert rig.store.contains(keys) == [i not in transfer.failed_positions for i in range(20)]
    rig.store.close()


def test_leaving_the_interpreter(tmp_path: Path) -> None:
    """With transfers under way, and without a close: it ends, and what was queued is there."""
    script = f"""
        import numpy as np
        from kvswap.files import FileStore, Layout
        store = FileStore({str(tmp_path / "store")!r}, Layout(5000), capacity=8 << 20)
        transfer = store.store([b"key-%d" % i for i in range(100)], np.ones((100, 5000), np.uint8), range(100))
    """
    run = run_python(script, timeout=60, KVSWAP_LOG="error")
    assert (run.returncode, run.stderr) == (0, "")
    with FileStore(tmp_path / "store", Layout(5000), capacity=8 << 20) as store:
        assert store.stats()["found"] == 100 and store.stats()["cut"] == 0


def test_a_forked_child(tmp_path: Path) -> None:
    script = f"""
        import os, warnings
        import numpy as np, kvswap
        from kvswap.files import FileStore, Layout
        warnings.simplefilter("ignore")
        store = FileStore({str(tmp_path / "store")!r}, Layout(5000), capacity=8 << 20)
        data = np.ones((4, 5000), np.uint8)
        keys = [b"key-%d" % i for i in range(4)]
        child = os.fork()
        if child == 0:
            calls = (lambda: store.store(keys, data, range(4)), lambda: store.contains(keys), store.close)
            for call in (*calls, store.stats, store.refresh, store.keys, lambda: store.pin(keys)):
                try:
                    call()
                except kvswap.Error as error:
                    assert "fork" in str(error)
                else:
                    os._exit(3)
            assert "fork" in repr(store) and store.info["block_nbytes"] == 5000
            reader = FileStore({str(tmp_path / "store")!r}, Layout(5000), readonly=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        store.store(keys, data, range(4)).wait(60)
        store.close()
    """
    run = run_python(script, timeout=60, KVSWAP_LOG="error")
    assert (run.returncode, run.stderr) == (0, "")


def test_a_store_that_was_dropped_opens_again(tmp_path: Path) -> None:
    """While a thread closes it, or has just done so: in one of 300 tries that was taken for another writer."""
    options: dict[str, Any] = {"capacity": 8 << 20, "segment_nbytes": 1 << 20, "engine": "threads", "depth": 1}
    chance = np.random.default_rng(1)
    for _ in range(700):
        store = FileStore(tmp_path, Layout(4096), durability="fsync", **options)
        del store
        end = time.perf_counter() + chance.random() * 300e-6
        while time.perf_counter() < end:
            pass


@pytest.mark.parametrize("durability", ["none", "flush", "fsync"])
def test_dropping_a_store_does_not_wait_for_its_checkpoint(tmp_path: Path, durability: Any) -> None:
    """Opening the directory again does, and finds a store that was closed."""
    options: dict[str, Any] = {"capacity": 1 << 22, "durability": durability}
    store = FileStore(tmp_path, Layout(5000), **options)
    store.store([b"k"], blocks_of(1, 1, 5000), [0]).wait(PATIENCE)
    bindings.file_set_fault(store, "write", "delay", 1, 1, 0, 1.0)
    begin = time.monotonic()
    del store
    dropped = time.monotonic() - begin
    with FileStore(tmp_path, Layout(5000), **options) as again:
        assert dropped < 0.9 < 1.0 <= time.monotonic() - begin
        assert again.contains([b"k"]) == [True]


@pytest.mark.parametrize("shared", [False, True])
def test_a_new_directory_is_synced_with_fsync_alone(tmp_path: Path, shared: bool) -> None:
    """Its names, and its own in its parent: one call of fsync each, counted by the one that fails."""
    options: dict[str, Any] = {"capacity": 1 << 22, "segment_nbytes": 1 << 20, "shared": shared}
    with testing.file_fault(None, "sync", "fail", every=1):
        FileStore(tmp_path / "other", Layout(5000), durability="flush", **options).close()
    layers = 3 if shared else 2  # writer-0000, the directory, its parent
    for nth in range(1, layers + 1):  # a failure leaves no store that counts as synced
        with (
            testing.file_fault(None, "sync", "fail", nth=nth),
            pytest.raises(kvswap.Error, match=r"syncing the directory .*Input/output error"),
        ):
            FileStore(tmp_path / "s", Layout(5000), durability="fsync", **options)
    with testing.file_fault(None, "sync", "fail", nth=layers + 1):
        FileStore(tmp_path / "s", Layout(5000), durability="fsync", **options).close()
    with testing.file_fault(None, "sync", "fail", nth=2):  # it is not new any more
        FileStore(tmp_path / "s", Layout(5000), durability="fsync", **options).close()


def test_removed_segments_are_synced_with_fsync(tmp_path: Path) -> None:
    """Else a power failure brings blocks back, of which newer ones may have been deleted since."""
    options: dict[str, Any] = {"segment_nbytes": 1 << 18, "durability": "fsync"}
    with FileStore(tmp_path, Layout(5000), capacity=1 << 22, **options) as store:
        store.store(keys_of(100), blocks_of(1, 100, 5000), range(100)).wait(PATIENCE)
    before = len(list(tmp_path.glob("segment-*")))
    with (
        testing.file_fault(None, "sync", "fail", nth=1),
        pytest.raises(kvswap.Error, match=r"syncing the directory .*Input/output error"),
    ):
        FileStore(tmp_path, Layout(5000), capacity=1 << 19, **options)
    assert len(list(tmp_path.glob("segment-*"))) == 2 < before  # removed before the directory is synced


def test_a_file_system_that_cannot_sync_directories(tmp_path: Path) -> None:
    """Some of the network say EINVAL."""
    options: dict[str, Any] = {"capacity": 1 << 22, "durability": "fsync"}
    for nth in (1, 2):
        with testing.file_fault(None, "sync", "fail", nth=nth, code=errno.EINVAL):
            FileStore(tmp_path / str(nth), Layout(5000), **options).close()


@pytest.mark.parametrize("parts", [None, [5000]])
def test_memory_is_not_freed_under_a_transfer(tmp_path: Path, parts: list[int] | None) -> None:
    """Else the load would write to what is allocated there next."""
    device = kvswap.Device("host:0")
    with FileStore(tmp_path, Layout(5000), capacity=1 << 20) as store:
        store.store([b"k"], blocks_of(1, 1, 5000), [0]).wait(PATIENCE)
        memory: Any = device.alloc(8192, host=True)
        with testing.file_fault(store, "read", "delay", delay=0.5):
            load = store.load([b"k"], [memory], [0], parts=parts) if parts else store.load([b"k"], [memory])
            with pytest.raises(BufferError, match="transfers of a FileStore still use this memory"):
                memory.free()
            load.wait(PATIENCE)
        assert bytes(memoryview(memory)[:5000]) == blocks_of(1, 1, 5000)[0].tobytes()
        memory.free()


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("what", ["load", "store"])
def test_memory_is_not_freed_under_a_transfer_of_a_pool_in_it(tmp_path: Path, what: str, rows: int) -> None:
    """Of one row in place, of two through staging. The memory outlives its pools."""
    device = kvswap.Device("host:0")
    blocks = blocks_of(1, 8, 4096)
    with FileStore(tmp_path, Layout(4096), capacity=1 << 20, device=device) as store:
        store.store(keys_of(8), blocks, range(8)).wait(PATIENCE)
        memory: Any = device.alloc(8 * 4096, host=True)
        pool = kvswap.Pool(device, memory, 8, 4096, rows=rows, pitch=8 * 2048 if rows == 2 else 0)
        with testing.file_fault(store, "read" if what == "load" else "write", "delay", delay=0.5):
            transfer = getattr(store, what)(keys_of(8), pool, range(8))
            with pytest.raises(BufferError, match="transfers of a FileStore still use this memory"):
                memory.free()
            del pool
            with pytest.raises(BufferError, match="transfers of a FileStore still use this memory"):
                memory.free()
            transfer.wait(PATIENCE)
        if what == "load":
            now = np.frombuffer(bytes(memoryview(memory)), np.uint8).reshape(rows, 8, -1).swapaxes(0, 1).reshape(8, -1)
            np.testing.assert_array_equal(now, blocks)
        memory.free()


def test_a_capacity_below_a_segment_removes_none(tmp_path: Path) -> None:
    """Nor where what the folder holds is known from the segments alone."""
    layout, blocks = Layout(5000, model="m"), blocks_of(1, 40, 5000)
    with FileStore(tmp_path, layout, capacity=1 << 22, segment_nbytes=1 << 18) as store:
        store.store(keys_of(40), blocks, range(40)).wait(PATIENCE)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"capacity is 131072 bytes; .*: give it more"):
            FileStore(tmp_path, layout, capacity=1 << 17)
        (tmp_path / "store.kvs").unlink(missing_ok=True)
    with FileStore(tmp_path, layout, capacity=1 << 22) as store:
        assert all(store.contains(keys_of(40)))


# -- arguments --------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[Rig, Any], Any], type[Exception], str]] = {
    "key": (lambda r, d: r.store.store([b""], d, [0]), ValueError, r"keys\[0\] has 0 bytes: a key has 1 to 512"),
    "long key": (lambda r, d: r.store.store([b"k", b"x" * 513], d, [0, 1]), ValueError, r"keys\[1\] has 513 bytes"),
    "str key": (lambda r, d: r.store.store(["k"], d, [0]), TypeError, r"keys\[0\] must be bytes or a pair"),
    "one key": (lambda r, d: r.store.store(b"k", d, [0]), TypeError, "must be a sequence of keys, not bytes"),
    "negative pair": (lambda r, d: r.store.store([(-1, 0)], d, [0]), ValueError, r"keys\[0\] is -1"),
    "keys of words": (lambda r, d: r.store.store(np.zeros((2, 2)), d, [0]), TypeError, "keys is an array of 2"),
    "fewer ids": (lambda r, d: r.store.store([b"a", b"b"], d, [0]), ValueError, "ids has 1 items, but keys has 2"),
    "fewer blocks": (lambda r, d: r.store.load([b"a", b"b"], [d[0]]), ValueError, "blocks has 1 items, but keys has 2"),
    "id": (lambda r, d: r.store.store([b"a", b"b"], d, [0, 4]), IndexError, r"ids\[1\] is 4; blocks has 4 blocks"),
    "negative id": (lambda r, d: r.store.load([b"a"], d, [-1]), IndexError, r"ids\[0\] is -1"),
    "short block": (
        lambda r, d: r.store.store([b"a"], [d[0][:100]]),
        ValueError,
        r"blocks\[0\] has 100 bytes; a block",
    ),
    "read-only": (lambda r, d: r.store.load([b"a"], [b"x" * r.nbytes]), ValueError, "read-only"),
    "null": (lambda r, d: r.store.store([b"a", b"b"], [d[0], 0]), ValueError, r"blocks\[1\] is a null address"),
    "keyword": (lambda r, d: r.store.load([b"a"], d, [0], replace=True), TypeError, "unexpected keyword"),
    "capacity": (lambda r, d: FileStore(r.folder, r.layout), TypeError, "capacity is needed"),
    "no capacity": (lambda r, d: r.open(capacity=0), ValueError, "capacity is 0"),
    "depth": (lambda r, d: r.open(depth=257), ValueError, "depth is 257: must be 1 to 256"),
    "engine": (lambda r, d: r.open(engine="aio"), ValueError, "engine is 'aio': must be one of"),
    "durability": (lambda r, d: r.open(durability="sync"), ValueError, "durability is 'sync'"),
    "layout": (lambda r, d: FileStore(r.folder, "m", capacity=1), TypeError, "layout must be"),
    "layout's fields": (lambda r, d: Layout(1, x=object()), ValueError, "must be what JSON can hold"),
    "layout's size": (lambda r, d: Layout(1, x="x" * 4000), ValueError, "at most 3072"),
    "no bytes": (lambda r, d: Layout(0), ValueError, "block_nbytes is 0"),
    "small": (lambda r, d: FileStore(f"{r.folder}2", r.layout, capacity=1000), ValueError, "capacity is 1000 bytes"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(rig: Rig, case: str) -> None:
    call, kind, message = WRONG[case]
    data = np.zeros((4, rig.nbytes), np.uint8)
    with pytest.raises(kind, match=message):
        call(rig, data)
    assert rig.store.stats()["stored"] == 0 and rig.store.contains([b"a", b"b"]) == [False, False]


@pytest.mark.parametrize("durability", ["none", "flush", "fsync"])
@pytest.mark.parametrize("buffered", [False, True])
def test_durability(tmp_path: Path, engine: str, durability: str, buffered: bool) -> None:
    rig = Rig(tmp_path, durability=durability, engine=engine, buffered=buffered)
    data, keys = blocks_of(34, 10, rig.nbytes), keys_of(10)
    rig.put(keys, data)
    rig.put(keys[:2], data[2:4])
    rig.store.delete(keys[9:]).wait(PATIENCE)
    rig.reopen()
    np.testing.assert_array_equal(rig.get(keys[:9]), np.concatenate([data[2:4], data[2:9]]))
    rig.store.close()


def test_layouts() -> None:
    layout = Layout(np.int64(4096), model="m", heads=8)
    assert layout == Layout(4096, heads=8, model="m") and hash(layout) == hash(Layout(4096, heads=8, model="m"))
    assert layout != Layout(4096, heads=9, model="m") and layout != Layout(4097, heads=8, model="m")
    assert Layout.parse(4096, layout.text) == layout
    assert repr(layout) == "Layout(4096, model='m', heads=8)"
