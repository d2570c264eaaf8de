"""One bound for a directory that several stores share, of running and of ended processes."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import file_reader
import numpy as np
import pytest
from conftest import PATIENCE, random_bytes, until
from disks import cannot
from processes import Process

import kvswap
from kvswap import _C, cli, testing
from kvswap.files import FileStore, Layout

NBYTES, PER_SEGMENT = 5000, 8
SLOT = 4096 + 8192
SEGMENT = 4096 + PER_SEGMENT * SLOT


def keys_of(count: int, name: str) -> list[bytes]:
    return [f"{name}-{i:06}".encode() for i in range(count)]


def block_of(model: str, key: bytes) -> Any:
    """A key of a model stands for its bytes."""
    return random_bytes(int.from_bytes(hashlib.sha256(model.encode() + b" " + key).digest()[:6], "little"), NBYTES)


def folder_of(model: str) -> str:
    """As engines name the folder of an identity."""
    return model.encode().hex().rjust(12, "0")[-12:]


def open_store(directory: Path, model: str = "a", limit: int = 16, **options: Any) -> FileStore:
    more = {"capacity": limit * SEGMENT, "segment_nbytes": SEGMENT, "bound": directory, "shared": True, **options}
    return FileStore(directory / folder_of(model), Layout(NBYTES, model=model), **more)


def put(store: FileStore, model: str, keys: list[bytes]) -> None:
    for at in range(0, len(keys), 32):
        some = keys[at : at + 32]
        store.store(some, [block_of(model, key) for key in some]).wait(PATIENCE)


def fill(store: FileStore, model: str, segments: int, name: str = "k") -> list[bytes]:
    keys = keys_of(segments * PER_SEGMENT, name)
    put(store, model, keys)
    return keys


def check(store: FileStore, model: str, keys: list[bytes]) -> int:
    """How many of the blocks are there; those have their bytes."""
    target = np.zeros((len(keys), NBYTES), np.uint8)
    load = store.load(keys, target, range(len(keys)))
    try:
        load.wait(PATIENCE)
    except kvswap.Error:
        assert all("is not in the store" in str(reason) for reason in load.reasons.values())
    failed = set(load.failed_positions.tolist())
    for i, key in enumerate(keys):
        if i not in failed:
            np.testing.assert_array_equal(target[i], block_of(model, key))
    return len(keys) - len(failed)


def held(directory: Path, model: str | None = None) -> int:
    """Segments below."""
    place = directory if model is None else directory / folder_of(model)
    return sum(1 for _ in place.glob("**/segment-*.kvs"))


# -- engines that have ended -------------------------------------------------------------------------------------------


def test_ended_engines_leave_no_more_than_the_limit(tmp_path: Path) -> None:
    """Of four models, one after the other; each fills the directory."""
    for model in "abcd":
        with open_store(tmp_path, model, limit=8) as store:
            keys = fill(store, model, 10)
            assert held(tmp_path) == 8
            assert check(store, model, keys) == 8 * PER_SEGMENT
    assert [path.parent.name for path in tmp_path.glob("*/writer-*")] == [folder_of("d")]


def test_the_blocks_used_last_are_kept_longest(tmp_path: Path) -> None:
    """Of ended engines of the same model and of others: what was written, or loaded by a running one, counts."""
    with ExitStack() as running:
        stores = [running.enter_context(open_store(tmp_path, "a")) for _ in range(3)]
        keys = [fill(store, "a", 2, f"w{i}") for i, store in enumerate(stores)]
        with open_store(tmp_path, "other") as other:
            other_keys = fill(other, "other", 2)
            for folder, ago in (("writer-0000", 300), ("writer-0001", 200), ("writer-0002", 100)):
                age(tmp_path / folder_of("a") / folder, ago)
            age(tmp_path / folder_of("other"), 250)
    with open_store(tmp_path, "a", limit=16) as first, open_store(tmp_path, "a", limit=16) as store:
        assert check(first, "a", keys[2]) == 2 * PER_SEGMENT  # writer-0000 and -0001 run again, -0002 does not
        assert _C._file_limit(tmp_path, 7 * SEGMENT)[0] == 7 * SEGMENT
        until(lambda: held(tmp_path, "other") == 1)
        assert check(store, "a", keys[2]) == 2 * PER_SEGMENT
        age(tmp_path / folder_of("a") / "writer-0002", 1000)
        assert check(store, "a", keys[2]) == 2 * PER_SEGMENT  # which is a use
        fill(store, "a", 1, "more")
        assert held(tmp_path, "other") == 0
        with open_store(tmp_path, "other") as other:
            assert check(other, "other", other_keys) == 0
        assert check(store, "a", keys[2]) == 2 * PER_SEGMENT
        assert store.stats()["reclaimed_segments"] + first.stats()["reclaimed_segments"] == 2


def age(folder: Path, seconds: float) -> None:
    """The files below were used last so long ago."""
    when = time.time() - seconds
    for path in folder.glob("**/segment-*.kvs"):
        os.utime(path, (when, when))


# -- engines that run --------------------------------------------------------------------------------------------------


def test_a_newcomer_gets_half_of_its_share(tmp_path: Path) -> None:
    """Of a directory that a running engine has filled. Blocks of that engine are evicted, and none is wrong."""
    with open_store(tmp_path, "a", events=10000) as old:
        keys = fill(old, "a", 16)
        assert held(tmp_path) == 16
        with open_store(tmp_path, "b") as new:
            new_keys = fill(new, "b", 1)
            until(lambda: held(tmp_path) == 13)  # half of b's share of 8 is 4
            new_keys += fill(new, "b", 7, "l")
            assert held(tmp_path, "b") == 4 and held(tmp_path, "a") == 12
            assert check(new, "b", new_keys) == 4 * PER_SEGMENT
            assert old.stats()["retired_segments"] == 4
            until(lambda: old.stats()["segments"] == 12)
            assert check(old, "a", keys) == old.stats()["blocks"] == 12 * PER_SEGMENT
            gone = {key for key, there in old.take_events()[0] if not there}
            assert gone == {key for key, there in zip(keys, old.contains(keys), strict=True) if not there}
            more = fill(old, "a", 3, "more")  # in the room of its own
            assert held(tmp_path, "a") == 12
            assert check(old, "a", more) == 3 * PER_SEGMENT
    with open_store(tmp_path, "a") as again:
        assert check(again, "a", more) == 3 * PER_SEGMENT and again.stats()["blocks"] == 12 * PER_SEGMENT


def test_engines_of_one_model_divide_its_share(tmp_path: Path) -> None:
    with open_store(tmp_path, "a") as one:
        keys = fill(one, "a", 16)
        with open_store(tmp_path, "a") as two:
            more = fill(two, "a", 1, "l")
            until(lambda: one.stats()["segments"] == 12 + 1)  # and two's one
            more += fill(two, "a", 5, "m")
            assert held(tmp_path) == 16
            assert check(two, "a", more[-3 * PER_SEGMENT :]) >= 2 * PER_SEGMENT  # threads may change their order
            until(lambda: one.contains(more[-PER_SEGMENT:]) == [True] * PER_SEGMENT)
            check(one, "a", keys + more)
            check(two, "a", keys + more)


def test_a_pinned_block_keeps_its_segment(tmp_path: Path) -> None:
    with open_store(tmp_path, "a", limit=4) as old:
        keys = fill(old, "a", 4)
        pinned = keys[::PER_SEGMENT][:3]
        old.pin(pinned)
        with open_store(tmp_path, "b", limit=4) as new:
            fill(new, "b", 1)
            until(lambda: old.stats()["segments"] == 3)
            assert check(old, "a", pinned) == 3
            old.unpin(pinned)


def test_loads_that_run_while_their_segment_goes(tmp_path: Path) -> None:
    """Own loads and those of another engine of the model: the file is unlinked, and keeps its bytes until they end."""
    with open_store(tmp_path, "a", 4) as old, open_store(tmp_path, "a", 4) as reader:
        keys = fill(old, "a", 4)
        until(lambda: all(reader.contains(keys)))
        targets = [np.zeros((len(keys), NBYTES), np.uint8) for _ in range(2)]
        with (
            testing.file_fault(old, "read", "delay", delay=0.3, every=1),
            testing.file_fault(reader, "read", "delay", delay=0.3, every=1),
        ):
            loads = [s.load(keys, t, range(len(keys))) for s, t in zip((old, reader), targets, strict=True)]
            with open_store(tmp_path, "b", 4) as new:
                fill(new, "b", 1)
                until(lambda: held(tmp_path, "a") <= 3)
                until(lambda: not all(reader.contains(keys)))
        for load, target in zip(loads, targets, strict=True):
            try:
                load.wait(PATIENCE)
            except kvswap.Error:
                assert all("is not in the store" in str(reason) for reason in load.reasons.values())
            for i in sorted(set(range(len(keys))) - set(load.failed_positions.tolist())):
                np.testing.assert_array_equal(target[i], block_of("a", keys[i]))
        until(lambda: open_files(tmp_path, deleted=True) == 0)


def open_files(folder: Path, *, deleted: bool) -> int:
    """Segments below that this process holds open."""
    found = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd.isdigit() and is_link(fd)]
    names = [name for name in found if name.startswith(str(folder)) and "segment-" in name]
    return sum(name.endswith("(deleted)") == deleted for name in names)


def is_link(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


ENGINE = """
import random, sys, time
from pathlib import Path
from test_files_bound import *

def run(directory, model, seed, seconds, span, limit, log=None):
    rng, served, end = random.Random(seed), 0, time.monotonic() + seconds
    keys = keys_of(span, "r")
    with open_store(Path(directory), model, limit, engine=rng.choice(("threads", "auto"))) as store:
        while time.monotonic() < end:
            some = rng.sample(keys, rng.choice((1, 3, 8, 24)))
            what = rng.random()
            if what < 0.5:
                store.store(some, [block_of(model, key) for key in some], replace=rng.random() < 0.3).wait(PATIENCE)
            elif what < 0.55:
                try:
                    store.delete(some).wait(PATIENCE)
                except kvswap.Error as error:
                    assert "was stored by another process" in str(error), error
            else:
                served += check(store, model, some)
        return served, store.stats()
"""


@pytest.mark.not_sanitized("processes that are killed, for seconds: what they run, other tests run under sanitizers")
def test_engines_that_come_and_go_at_random(tmp_path: Path) -> None:
    """Of three models, killed now and then; every byte is compared, and the directory stays within its limit and a
    segment a writer."""
    seed = int(os.environ.get("KVSWAP_SEED", time.time_ns() % 1000000))
    print(f"seed {seed}")
    rng = random.Random(seed)
    limit, most, served = 10, 0, 0
    begin = time.monotonic()
    with ExitStack() as stack:
        engines = [stack.enter_context(Process(ENGINE)) for _ in range(4)]
        for engine in engines:
            start(engine, tmp_path, rng, limit)
        while time.monotonic() - begin < 2.5:
            time.sleep(0.05)
            most = max(most, held(tmp_path))
            if rng.random() < 0.08:
                i = rng.randrange(len(engines))
                engines[i].kill()
                engines[i] = stack.enter_context(Process(ENGINE))
                start(engines[i], tmp_path, rng, limit)
        for engine in engines:
            count, stats = engine.answer()
            served += count
            assert stats["damaged"] == 0
    assert most <= limit + 4 and served > 0
    for model in "abc":
        with open_store(tmp_path, model, limit) as store:
            check(store, model, keys_of(100, "r"))


def start(engine: Process, directory: Path, rng: random.Random, limit: int) -> None:
    engine.tell(f"run({str(directory)!r}, {rng.choice('abc')!r}, {rng.randrange(1 << 30)}, 10, 100, {limit})")


# -- the limit ---------------------------------------------------------------------------------------------------------


def test_who_asks_for_another_limit_gets_that_of_the_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_store(tmp_path, "a", 6) as first:
        assert first.info["bound"] == str(tmp_path) and not first.info["bound_note"]
        with open_store(tmp_path, "b", 9) as second, open_store(tmp_path, "c", 9) as third:
            for store in (second, third):
                assert store.info["capacity"] == 6 * SEGMENT
                assert "not the" in store.info["bound_note"]
        told = [record.getMessage() for record in caplog.records if "is limited to" in record.getMessage()]
        assert told == [
            f"{tmp_path} is limited to {6 * SEGMENT} bytes, not the {9 * SEGMENT} asked for: `kvswap files limit` "
            "changes it"
        ]
    with open_store(tmp_path, "a", 9) as later:
        fill(later, "a", 12)
    assert held(tmp_path) == 6


def test_the_limit_is_changed_while_engines_run(tmp_path: Path) -> None:
    with open_store(tmp_path, "a", 12) as one, open_store(tmp_path, "b", 12) as two:
        keys = fill(one, "a", 8)
        fill(two, "b", 8)
        assert held(tmp_path) == 12
        begin = time.monotonic()
        assert _C._file_limit(tmp_path, 4 * SEGMENT) == (4 * SEGMENT, 12 * SEGMENT, 2)
        until(lambda: held(tmp_path) == 4)
        assert time.monotonic() - begin < 5
        until(lambda: one.stats()["segments"] == two.stats()["segments"] == 2)
        assert check(one, "a", keys) == one.stats()["blocks"] <= 2 * PER_SEGMENT
        fill(one, "a", 4, "l")
        assert held(tmp_path) == 4
        _C._file_limit(tmp_path, 20 * SEGMENT)
        until(lambda: one.info["capacity"] == 20 * SEGMENT)
        keys = fill(one, "a", 12, "m")
        assert check(one, "a", keys) == 12 * PER_SEGMENT
        assert 14 <= held(tmp_path) <= 20
        assert one.stats()["directory_nbytes"] == held(tmp_path) * SEGMENT
        _C._file_limit(tmp_path, 1)  # a writer keeps one segment
        until(lambda: held(tmp_path) == 2)
        assert check(one, "a", fill(one, "a", 1, "n")) == PER_SEGMENT
    with open_store(tmp_path, "a", 12) as again:
        assert check(again, "a", keys_of(PER_SEGMENT, "n")) == PER_SEGMENT


def test_a_shared_store_bounds_its_own_directory(tmp_path: Path) -> None:
    options: dict[str, Any] = {"capacity": 4 * SEGMENT, "segment_nbytes": SEGMENT, "shared": True}
    layout = Layout(NBYTES, model="a")
    with FileStore(tmp_path / "s", layout, **options) as one, FileStore(tmp_path / "s", layout, **options) as two:
        assert one.info["bound"] == str(tmp_path / "s")
        fill(one, "a", 6, "one")
        fill(two, "a", 6, "two")
        until(lambda: held(tmp_path / "s") == 4)
    for path in ("alone", "readonly"):
        with FileStore(tmp_path / "alone", layout, capacity=4 * SEGMENT, readonly=path == "readonly") as store:
            assert store.info["bound"] == "" and not (tmp_path / "alone" / "bound.kvs").exists()


def test_a_store_of_one_writer_may_have_a_bound(tmp_path: Path) -> None:
    with open_store(tmp_path, "a", 6, shared=False) as one, open_store(tmp_path, "b", 6, shared=False) as two:
        fill(one, "a", 8)
        until(lambda: fill(two, "b", 4) and held(tmp_path, "b") == 2)
        until(lambda: held(tmp_path) <= 6)
    with open_store(tmp_path, "c", 6, shared=False) as three:
        assert check(three, "c", fill(three, "c", 6)) == 6 * PER_SEGMENT
    assert held(tmp_path) == 6
    with open_store(tmp_path, "a", 6, shared=False) as one:  # its folder still exists, without segments
        assert one.stats()["blocks"] == 0
        fill(one, "a", 1)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(tmp_path, "a", 8) as store:
        fill(store, "a", 2)
        assert cli.main(["files", "limit", str(tmp_path)]) == 0
        assert "1 running writers" in capsys.readouterr().out
        assert cli.main(["files", "limit", str(tmp_path), "1GiB"]) == 0
        assert "limit 1 GiB" in capsys.readouterr().out
        until(lambda: store.info["capacity"] == 1 << 30)
    assert cli.main(["files", "limit", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["limit_nbytes"], found["file_nbytes"], found["running"]) == (1 << 30, 2 * SEGMENT, 0)
    assert cli.main(["files", "stat", str(tmp_path)]) == 0
    assert "limit 1 GiB" in capsys.readouterr().out
    assert cli.main(["files", "limit", str(tmp_path), "0"]) == 2
    (tmp_path / "none").mkdir()
    assert cli.main(["files", "limit", str(tmp_path / "none")]) != 0
    assert "bound.kvs" in capsys.readouterr().err


# -- what else may be there --------------------------------------------------------------------------------------------


def test_foreign_files_are_not_counted_and_left_alone(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    directory = tmp_path / "kv"
    directory.mkdir()
    with open_store(directory, "a", 4) as store:
        fill(store, "a", 4)
    (outside / "segment-00000000.kvs").write_bytes(bytes(SEGMENT))
    (directory / "link").symlink_to(outside)
    (directory / "notes.txt").write_bytes(bytes(10 * SEGMENT))
    (directory / "data" / "deep" / "er" / "still").mkdir(parents=True)
    (directory / "data" / "segment-00000000.kvs").write_bytes(bytes(SEGMENT))  # a segment's name: counted
    (directory / folder_of("a") / "writer-0000" / "segment-00000099.kvs").symlink_to(outside / "segment-00000000.kvs")
    assert _C._file_limit(directory, 0)[1] == 5 * SEGMENT
    with open_store(directory, "b", 4) as store:
        fill(store, "b", 4)
        assert check(store, "b", keys_of(4 * PER_SEGMENT, "k")) == 3 * PER_SEGMENT
    assert (directory / "data" / "segment-00000000.kvs").stat().st_size == SEGMENT
    assert (outside / "segment-00000000.kvs").exists() and (directory / "notes.txt").exists()
    assert (directory / folder_of("a") / "writer-0000" / "segment-00000099.kvs").is_symlink()


def test_a_bound_that_cannot_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The store then bounds its own segments, and says why."""
    for name, what in (
        ("link", "it is a link"),
        ("mode", "may be written by other users"),
        ("other", "another version"),
    ):
        directory = tmp_path / name
        directory.mkdir(mode=0o700)
        path = directory / "bound.kvs"
        if name == "link":
            path.symlink_to(tmp_path / "elsewhere")
        elif name == "mode":
            path.write_bytes(bytes(4096))
            path.chmod(0o666)
        else:
            path.write_bytes(page(version=2))
            path.chmod(0o600)
        before = path.read_bytes() if name != "link" else b""
        with open_store(directory, "a", 3) as store:
            assert what in store.info["bound_note"] and store.info["bound"] == ""
            fill(store, "a", 5)
            assert held(directory) == 3
        assert name == "link" or path.read_bytes() == before
        assert any(what in record.getMessage() for record in caplog.records)
    assert not (tmp_path / "elsewhere").exists()


def page(limit: int = 1 << 30, version: int = 1) -> bytes:
    """As docs/files.md describes bound.kvs."""
    found = bytearray(4096)
    struct.pack_into("<8sII3Q", found, 0, b"KVSBOUND", version, 0, limit, 0, 0)
    struct.pack_into("<I", found, 12, file_reader.crc32c(bytes(found)))
    return bytes(found)


def test_the_page_is_as_described(tmp_path: Path) -> None:
    with open_store(tmp_path, "a", 5) as store:
        fill(store, "a", 2)
        found = (tmp_path / "bound.kvs").read_bytes()
        file_reader.check_page(found, b"KVSBOUND")
        assert struct.unpack_from("<2Q", found, 16) == (5 * SEGMENT, 2 * SEGMENT)
        (tmp_path / "bound.kvs").write_bytes(page(3 * SEGMENT))
        until(lambda: store.info["capacity"] == 3 * SEGMENT)
    assert (tmp_path / "bound.kvs").stat().st_mode & 0o777 == 0o600


def test_a_damaged_or_removed_page(tmp_path: Path) -> None:
    def is_whole() -> bool:
        with suppress(kvswap.Error):  # it is there, and not written yet
            return _C._file_limit(tmp_path, 0) == (5 * SEGMENT, 0, 1)
        return False

    with open_store(tmp_path, "a", 5) as store:
        (tmp_path / "bound.kvs").unlink()
        until(is_whole)
        fill(store, "a", 7)
        assert held(tmp_path) == 5
        with open_store(tmp_path, "b", 5) as other:
            fill(other, "b", 1)
            until(lambda: held(tmp_path) <= 5)
    (tmp_path / "bound.kvs").write_bytes(b"x" * 4096)
    with pytest.raises(kvswap.Error, match="has no limit"):
        _C._file_limit(tmp_path, 0)
    with open_store(tmp_path, "a", 4) as store:
        assert "was damaged" in store.info["bound_note"]
        fill(store, "a", 5)
        assert held(tmp_path) == 4


def test_a_store_must_lie_in_its_bound(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="is not in the directory that bounds it"):
        FileStore(tmp_path / "a", Layout(NBYTES), capacity=1 << 20, bound=tmp_path / "other")
    with pytest.raises(ValueError, match="a store of several directories has a capacity of its own, and no bound"):
        FileStore([tmp_path / "a", tmp_path / "b"], Layout(NBYTES), capacity=1 << 20, bound=tmp_path)
    with FileStore(tmp_path / "s", Layout(NBYTES), capacity=1 << 20, bound=tmp_path, shared=True) as store:
        assert store.info["bound"] == str(tmp_path)  # the lock was released


def test_a_writer_that_belongs_to_others_is_not_reclaimed(tmp_path: Path) -> None:
    with open_store(tmp_path, "a", 4) as store:
        fill(store, "a", 4)
    (tmp_path / folder_of("a") / "writer-0000").chmod(0o777)
    with open_store(tmp_path, "b", 4) as store:
        fill(store, "b", 4)
        assert held(tmp_path, "a") == 4 and held(tmp_path, "b") == 1
    (tmp_path / folder_of("a") / "writer-0000").chmod(0o700)
    with open_store(tmp_path, "b", 4) as store:
        fill(store, "b", 4)
        assert held(tmp_path, "b") == 4


def test_writers_of_another_bound_are_not_reclaimed(tmp_path: Path) -> None:
    """They hold the lock of their store, though none in this directory's bound.kvs."""
    folder = tmp_path / folder_of("a")
    with FileStore(
        folder, Layout(NBYTES, model="a"), capacity=4 * SEGMENT, segment_nbytes=SEGMENT, shared=True
    ) as apart:
        keys = fill(apart, "a", 4)
        with open_store(tmp_path, "b", 4) as store:
            fill(store, "b", 4)
            assert held(tmp_path, "a") == 4 and held(tmp_path, "b") == 1
            assert check(apart, "a", keys) == 4 * PER_SEGMENT


# -- crashes and full disks --------------------------------------------------------------------------------------------


@pytest.mark.not_sanitized("processes that are killed, for seconds: what they run, other tests run under sanitizers")
def test_killed_while_reclaiming(tmp_path: Path) -> None:
    """At any step: the next engine goes on, and what is left has its bytes."""
    for turn in range(6):
        with open_store(tmp_path, "a", 8) as store:
            fill(store, "a", 6)
        with Process(ENGINE) as engine:
            engine.tell(f"run({str(tmp_path)!r}, 'b', {turn}, 60, 100, 8)")
            until(lambda most=6 - turn % 3: held(tmp_path, "a") < most)
            engine.kill()
        assert held(tmp_path) <= 9
        with open_store(tmp_path, "a", 8) as store:
            check(store, "a", keys_of(6 * PER_SEGMENT, "k"))
        with open_store(tmp_path, "b", 8) as store:
            check(store, "b", keys_of(100, "r"))


def test_a_full_disk_takes_the_room_of_ended_engines(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", (8 << 20) + 4 * SEGMENT) as disk:
        with open_store(disk, "a", 100) as store:
            fill(store, "a", 4)
        room = os.statvfs(disk)
        (disk / "more").write_bytes(bytes(room.f_bavail * room.f_frsize - (5 << 19)))  # of others
        with open_store(disk, "b", 100) as store:
            keys = fill(store, "b", 12)
            assert check(store, "b", keys[-4 * PER_SEGMENT :]) == 4 * PER_SEGMENT
            assert store.stats()["reclaimed_segments"] == 4 and held(disk, "a") == 0


@contextmanager
def small_disk(path: Path, nbytes: int) -> Iterator[Path]:
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=0700", "tmpfs", str(path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        cannot("needs root, and permission to mount")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=False)
