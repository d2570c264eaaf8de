"""The file tier on what somebody else left in its directory: numbers at their ends, names that are no files."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import file_reader
import numpy as np
import pytest
from conftest import AT_ONCE, PATIENCE, run_python
from test_files import PAGE, Rig, blocks_of, keys_of

import kvswap
from kvswap import cli, testing
from kvswap.files import FileStore, Layout

LAST = 1 << 62  # the last sequence number, and generation


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    with contextlib.suppress(kvswap.Error):
        rig.store.close()


def forge(path: Path, at: int, field: int, value: int, nbytes: int = 8) -> None:
    """Write a number into a page, and make the page's checksum right."""
    with open(path, "r+b") as file:
        file.seek(at)
        page = bytearray(file.read(PAGE))
        page[field : field + nbytes], page[12:16] = value.to_bytes(nbytes, "little"), bytes(4)
        page[12:16] = file_reader.crc32c(bytes(page)).to_bytes(4, "little")
        file.seek(at)
        file.write(page)


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 1, LAST - 2**32, LAST - 3, LAST, LAST + 1, LAST + 2, 2**63, 2**64 - 1])
@pytest.mark.parametrize("what", ["header", "checkpoint", "generation", "unreadable"])
def test_numbers_near_their_end(rig: Rig, what: str, value: int) -> None:
    """What is acknowledged is there after the next open, whatever number a page holds."""
    blocks = blocks_of(1, 20, rig.nbytes)
    rig.put(keys_of(2, "first"), blocks[:2])
    rig.store.close()
    state, segment = rig.folder / "store.kvs", rig.files()[0]
    if what in ("header", "unreadable"):
        forge(segment, file_reader.read_store(rig.folder)[b"first-0"].offset, 32, value)
        if what == "unreadable":  # numbers go on 2**32 higher
            (rig.folder / "segment-00000099.kvs").write_bytes(b"x" * PAGE)
    else:
        newest = max(file_reader.read_checkpoints(state), key=lambda c: c.generation)
        forge(state, PAGE * (1 + newest.generation % 2), 24 if what == "checkpoint" else 16, value)
    told = {}
    with contextlib.suppress(kvswap.Error):
        rig.store = rig.open()
        for i, key in enumerate(keys_of(20)):
            with contextlib.suppress(kvswap.Error):
                rig.store.store([key], blocks, [i]).wait(PATIENCE)
                told[key] = i
        rig.store.close()
    if told:
        for path in rig.files()[: 1 if what == "unreadable" else None]:
            assert all(1 <= block.header.sequence <= LAST for block in file_reader.read_segment(path)[1])
    if value > LAST + 1:
        assert len(told) == 20  # the page is damaged, and no more than that
    with contextlib.suppress(kvswap.Error) if not told else contextlib.nullcontext():
        rig.store = rig.open()
        for key, i in told.items():
            assert (rig.get([key])[0] == blocks[i]).all(), key


def test_no_number_is_left(rig: Rig) -> None:
    """Each block that cannot have a number is told so, and costs no slot."""
    rig.put(keys_of(1, "first"), blocks_of(1, 1, rig.nbytes))
    rig.store.close()
    forge(rig.files()[0], file_reader.read_store(rig.folder)[b"first-0"].offset, 32, LAST - 1)
    rig.store = rig.open()
    blocks = blocks_of(2, 5, rig.nbytes)
    rig.put([b"fits"], blocks[:1])
    for _ in range(100):  # more than there are slots
        load = rig.store.store(keys_of(5), blocks, range(5))
        with pytest.raises(kvswap.Error, match="no sequence number is left"):
            load.wait(PATIENCE)
        assert len(load.failed_positions) == 5
    rig.reopen()
    assert (rig.get([b"fits"]) == blocks[:1]).all() and rig.store.stats()["lost_slots"] == 0


# -- names ------------------------------------------------------------------------------------------------------------

NAMES = ["store.kvs", "segment-00000000.kvs", "segment-00000777.kvs", "new.tmp"]
OTHERS = ["pipe", "directory", "link", "link to nothing", "link to itself", "socket", "device"]

OPEN_ALL = """
import contextlib, io, json, os
import kvswap
from kvswap import _C, cli
from kvswap.files import FileStore, Layout

def open_all(folder):
    told, layout = [], Layout(5000, model="m", tp_rank=0)
    for readonly in (True, False):
        try:
            with FileStore(folder, layout, capacity=64 << 20, readonly=readonly) as store:
                if not readonly:
                    store.store([b"more"], bytes(5000), [0]).wait(10)
            told.append("opened")
        except kvswap.Error as error:
            told.append(str(error))
    with contextlib.suppress(kvswap.Error):
        _C._file_peek(folder)
    for what in ("check", "stat", "gc"):
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            cli.main(["files", what, folder])
    return told

print(json.dumps({folder: open_all(folder) for folder in json.loads(os.environ["FOLDERS"])}))
"""


def put_other(path: Path, what: str) -> bool:
    """False: only root makes devices."""
    if what == "pipe":
        os.mkfifo(path, 0o600)
    elif what == "directory":
        path.mkdir()
        (path / "not empty").touch()
    elif what == "link":
        path.symlink_to(path.with_name("aside"))
    elif what == "link to nothing":
        path.symlink_to("/nowhere/at/all")
    elif what == "link to itself":
        path.symlink_to(path.name)
    elif what == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)  # bind() takes no path of more than 107 bytes
    else:
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero never ends
        except PermissionError:
            return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_file(rig: Rig, tmp_path: Path, name: str) -> None:
    """Opening the directory fails immediately, names the entry, and leaves it unchanged."""
    rig.put(keys_of(1), blocks_of(1, 1, rig.nbytes))
    rig.store.close()
    before = {}
    for what in OTHERS:
        path = tmp_path / what / name
        shutil.copytree(rig.folder, path.parent)
        if path.exists():
            path.rename(path.with_name("aside"))
        if put_other(path, what):
            before[path] = os.lstat(path)
    ran = run_python(OPEN_ALL, timeout=60, FOLDERS=json.dumps([os.fspath(path.parent) for path in before]))
    assert ran.returncode == 0, ran.stderr
    for path, told in zip(before, json.loads(ran.stdout.splitlines()[-1]).values(), strict=True):
        wanted = f"opening {path}: it is a link, directory, pipe, socket or device"
        if name == "new.tmp":
            assert told[0] == "opened", path
            assert told[1] == "opened" or "new.tmp" in told[1], path
        else:
            assert len(told) == 2 and all(wanted in line for line in told), (path, told)
            assert os.lstat(path).st_ino == before[path].st_ino, path


@pytest.mark.parametrize("what", ["directory", "pipe"])
def test_what_is_in_the_way_of_a_new_segment(rig: Rig, what: str) -> None:
    rig.store.close()
    shutil.rmtree(rig.folder)
    rig.store = rig.open()
    put_other(rig.folder / "new.tmp", what)
    store = rig.store.store(keys_of(1), blocks_of(1, 1, rig.nbytes), [0])
    if what == "pipe":
        store.wait(PATIENCE)
    else:
        with pytest.raises(kvswap.Error, match=r"new\.tmp in the store's directory"):
            store.wait(PATIENCE)


# -- numbers of segments ----------------------------------------------------------------------------------------------


def stored_again(rig: Rig, count: int = 20) -> None:
    """What is stored now is there when the store is opened again."""
    blocks = blocks_of(7, count, rig.nbytes)
    rig.store = rig.open()
    rig.put(keys_of(count), blocks)
    assert (rig.get(keys_of(count)) == blocks).all()
    rig.reopen()
    assert rig.store.contains(keys_of(count)) == [True] * count
    assert (rig.get(keys_of(count)) == blocks).all()


@pytest.mark.parametrize("taken", [(99999999,), (99999998, 99999999), (0, 99999999), (0, 1, 3)])
def test_names_that_are_taken(rig: Rig, taken: tuple[int, ...]) -> None:
    rig.store.close()
    for number in taken:
        (rig.folder / f"segment-{number:08}.kvs").touch(0o600)
    stored_again(rig)
    assert rig.store.stats()["foreign"] == len(taken)
    for path in rig.files():
        assert len(path.name) == len("segment-00000000.kvs")
    for number in taken:
        assert (rig.folder / f"segment-{number:08}.kvs").stat().st_size == 0  # left alone


def test_the_last_number_is_ours(rig: Rig) -> None:
    """A whole segment with the last number: the next ones begin at the first free number."""
    rig.put(keys_of(1, "first"), blocks_of(1, 1, rig.nbytes))
    rig.store.close()
    last = rig.folder / "segment-99999999.kvs"
    rig.files()[0].rename(last)
    forge(last, 0, 60, 99999999, 4)
    stored_again(rig)
    assert rig.store.contains([b"first-0"]) == [True]
    assert {path.name for path in rig.files()} >= {"segment-00000000.kvs", last.name}


def test_names_that_are_almost_segments(rig: Rig) -> None:
    """Nothing but eight digits is a number."""
    rig.store.close()
    names = ["+0000001", "-0000001", " 0000001", "100000000", "4294967296", "0000001", "0000000a", "00000001.kvs.old"]
    for name in names:
        (rig.folder / f"segment-{name}.kvs").write_bytes(b"mine")
    stored_again(rig)
    assert rig.store.stats()["foreign"] == 0
    assert all((rig.folder / f"segment-{name}.kvs").read_bytes() == b"mine" for name in names)


def test_a_file_that_comes_beside_a_writer(rig: Rig) -> None:
    """It is not written over by a new segment of that name."""
    rig.put(keys_of(1, "first"), blocks_of(1, 1, rig.nbytes))
    new = [rig.folder / f"segment-{number:08}.kvs" for number in (1, 2)]
    new[0].write_bytes(b"mine")
    new[1].mkdir()
    blocks = blocks_of(2, 20, rig.nbytes)
    rig.put(keys_of(20), blocks)
    assert new[0].read_bytes() == b"mine" and new[1].is_dir()
    new[1].rmdir()
    rig.reopen()
    assert (rig.get(keys_of(20)) == blocks).all()


# -- sizes and layouts ------------------------------------------------------------------------------------------------


def forge_geometry(path: Path, slots: int, slot_nbytes: int, number: int) -> None:
    forge(path, 0, 48, PAGE + slots * slot_nbytes)
    forge(path, 0, 56, slots, 4)
    forge(path, 0, 60, number, 4)


@pytest.mark.parametrize("slots", [1, 7, 65536])
def test_a_segment_of_another_size(rig: Rig, slots: int) -> None:
    """The store's own file says how large segments are: a foreign one in front of them changes nothing."""
    blocks = blocks_of(1, 20, rig.nbytes)
    rig.put(keys_of(20), blocks)
    rig.store.close()
    first = rig.files()[0]
    for path in reversed(rig.files()):  # make room for number 0
        number = int(path.stem.split("-")[1]) + 1
        path.rename(path.with_name(f"segment-{number:08}.kvs"))
        forge(path.with_name(f"segment-{number:08}.kvs"), 0, 60, number, 4)
    first.write_bytes(rig.files()[0].read_bytes()[:PAGE])
    first.chmod(0o600)
    forge_geometry(first, slots, rig.slot, 0)
    for readonly in (True, False):
        rig.store = rig.open(readonly=readonly)
        assert rig.store.stats()["foreign"] == 1
        assert (rig.get(keys_of(20)) == blocks).all()
        rig.store.close()
    assert first.stat().st_size == PAGE


def test_a_cut_segment_that_says_it_is_huge(rig: Rig) -> None:
    """No more disk is taken than the store may take, and nothing is removed to make room for it."""
    rig.put(keys_of(1), blocks_of(1, 1, rig.nbytes))
    rig.store.close()
    (rig.folder / "store.kvs").unlink()
    forge_geometry(rig.files()[0], 65536, rig.slot, 0)
    begun = time.monotonic()
    with (
        testing.file_fault(None, "allocate", "delay", nth=2, every=1, delay=PATIENCE),  # the first is of store.kvs
        pytest.raises(ValueError, match=r"a segment of 65536 blocks takes \d+: give it more"),
    ):
        rig.open()
    assert time.monotonic() - begun < AT_ONCE and len(rig.files()) == 1


@pytest.mark.parametrize(
    "text", ["[" * 3000, "[1]", "{", "{ }", '{"self":1}', '{"block_nbytes":1}', '{"a":NaN}', "\x01"]
)
@pytest.mark.parametrize("what", ["check", "stat", "gc"])
def test_a_layout_that_is_none(rig: Rig, capsys: pytest.CaptureFixture[str], what: str, text: str) -> None:
    """The commands say so, without a traceback."""
    rig.store.close()
    path, data = rig.folder / "store.kvs", text.encode()
    page = bytearray(path.read_bytes()[:PAGE])
    page[64:] = len(data).to_bytes(4, "little") + data + bytes(PAGE - 68 - len(data))
    page[16:32] = file_reader.layout_hash(data, rig.nbytes)
    with open(path, "r+b") as file:
        file.write(page)
    forge(path, 0, 64, len(data), 4)
    assert cli.main(["files", what, os.fspath(rig.folder)]) == cli.EXIT_DEVICE
    assert "holds no store that kvswap made" in capsys.readouterr().err


@pytest.mark.parametrize("at", [0, 100, PAGE, PAGE + 5, 20000])
def test_a_segment_that_shrinks_beneath_a_store(rig: Rig, at: int) -> None:
    """Every load ends, right or lost; what is stored afterwards is there."""
    blocks = blocks_of(1, 8, rig.nbytes)
    rig.put(keys_of(8), blocks)
    reader = rig.open(readonly=True)
    os.truncate(rig.files()[0], at)
    for store in (reader, rig.store):
        target = np.zeros_like(blocks)
        load = store.load(keys_of(8), target, range(8))
        with contextlib.suppress(kvswap.Error):
            load.wait(PATIENCE)
        lost = set(load.failed_positions)
        assert lost and all((target[i] == blocks[i]).all() for i in range(8) if i not in lost)
    reader.close()
    rig.put([b"after"], blocks[:1])
    assert (rig.get([b"after"]) == blocks[:1]).all()


@pytest.mark.parametrize("nbytes", [2**40 + 1, 2**63, 2**64 - 1])
def test_a_block_that_is_too_large(tmp_path: Path, nbytes: int) -> None:
    """Its pages would overflow."""
    with pytest.raises(ValueError, match=r"must be 1 to 2\*\*40"):
        FileStore(tmp_path / "s", Layout(nbytes), capacity=1 << 20)
    assert not (tmp_path / "s").exists()
