"""kvswap.lmcache.FileConnector, driven as LMCache drives it: integration/lmcache_package.py has LMCache itself."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Cache, random_bytes, run_python, until
from processes import Process

import kvswap
from kvswap import testing
from kvswap.lmcache import FileConnector, _connector

NBYTES = 12_300
CAPACITY = 32 << 20


class Rig:
    """A connector, objects of a buffer, and who waits for the completions."""

    def __init__(self, folder: Path, *, seed: int = 1, directory: Any = None, **options: Any) -> None:
        options = {"unversioned": True} | options
        self.connector = FileConnector(directory or str(folder / "kv"), CAPACITY, **options)
        self.memory = random_bytes(seed, 16 * NBYTES).reshape(16, NBYTES).copy()
        self.before = self.memory.copy()
        self.told: dict[int, tuple[bool, str, list[bool]]] = {}

    def views(self, objects: list[int]) -> list[memoryview]:
        return [memoryview(self.memory[i]) for i in objects]

    def wait(self, number: int) -> tuple[bool, str, list[bool]]:
        end = time.monotonic() + PATIENCE
        while number not in self.told:
            ready, _, _ = select.select([self.connector.event_fd()], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"operation {number} is not told"
            for done, ok, error, each in self.connector.drain_completions():
                assert done not in self.told
                self.told[done] = (ok, error, each)
        return self.told[number]

    def store(self, numbers: list[int], objects: list[int]) -> list[bool]:
        return self.wait(self.connector.submit_batch_set(keys_of(*numbers), self.views(objects)))[2]

    def load(self, numbers: list[int], objects: list[int]) -> list[bool]:
        return self.wait(self.connector.submit_batch_get(keys_of(*numbers), self.views(objects)))[2]

    def exists(self, *numbers: int) -> list[bool]:
        ok, _, found = self.wait(self.connector.submit_batch_exists(keys_of(*numbers)))
        assert ok
        return found

    def files(self, nbytes: int = NBYTES) -> Any:
        return self.connector._stores[nbytes]._store


def keys_of(*numbers: int) -> list[str]:
    return [f"org/model@00000001@0@{number:064x}" for number in numbers]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.connector.close()


def test_objects_go_down_and_come_up(rig: Rig) -> None:
    assert rig.exists(1, 2) == [False, False]
    assert rig.store([1, 2, 3], [5, 0, 15]) == [True] * 3
    assert rig.exists(1, 9, 3) == [True, False, True]
    rig.memory[:] = 0xEE
    assert rig.load([3, 9, 1], [7, 8, 9]) == [True, False, True]
    np.testing.assert_array_equal(rig.memory[[7, 9]], rig.before[[15, 5]])
    assert (np.delete(rig.memory, [7, 8, 9], axis=0) == 0xEE).all()


def test_ends_are_told_once(rig: Rig) -> None:
    number = rig.connector.submit_batch_set(keys_of(*range(8)), rig.views(list(range(8))))
    assert rig.wait(number) == (True, "", [True] * 8)
    assert rig.connector.drain_completions() == []
    assert not select.select([rig.connector.event_fd()], [], [], 0)[0]


def test_objects_of_several_sizes(rig: Rig, tmp_path: Path) -> None:
    views = [memoryview(rig.memory[0]), memoryview(rig.memory[1])[:500], memoryview(rig.memory[2])]
    ok, error, each = rig.wait(rig.connector.submit_batch_set(keys_of(1, 2, 3), views))
    assert (ok, error, each) == (True, "", [True] * 3)
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["12300", "500", "bound.kvs"]
    assert rig.exists(1, 2, 3, 4) == [True, True, True, False]
    to = np.zeros((3, NBYTES), np.uint8)
    wanted = [memoryview(to[0]), memoryview(to[1])[:500], memoryview(to[2])[:500]]  # of 3 there is none of 500 bytes
    assert rig.wait(rig.connector.submit_batch_get(keys_of(1, 2, 3), wanted))[2] == [True, True, False]
    np.testing.assert_array_equal(to[0], rig.before[0])
    np.testing.assert_array_equal(to[1, :500], rig.before[1, :500])
    number = rig.connector.submit_batch_get(keys_of(1), [memoryview(to[0])[:77]])
    assert rig.wait(number)[2] == [False] and not (tmp_path / "kv" / "77").exists()


def test_each_object_is_told(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.store([1, 2, 3], [1, 2, 3])
    with testing.file_fault(rig.files(), "write", "fail", nth=2, code=errno.EIO):
        ok, error, each = rig.wait(rig.connector.submit_batch_set(keys_of(11, 12, 13), rig.views([1, 2, 3])))
    assert not ok and each.count(False) == 1 and "Input/output error" in error
    assert rig.exists(11, 12, 13) == each
    with testing.file_fault(rig.files(), "read", "fail", every=1):
        assert rig.load([1, 2], [8, 9]) == [False, False]
    assert rig.exists(1, 2) == [False, False]  # what cannot be read is no longer stored
    assert rig.store([1, 2], [1, 2]) == [True, True] and rig.load([1, 2], [8, 9]) == [True, True]
    assert "storing: 1 of 3 objects failed" in caplog.text


def test_an_operation_that_ends_between_two_looks_is_told(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its transfers go on when it is asked, and have ended when they are."""
    whole, asked = _connector._Operation.ended, set()

    def ended(operation: _connector._Operation) -> bool:
        first = operation.number not in asked
        asked.add(operation.number)
        for _, transfer in operation.parts:
            transfer.wait(PATIENCE)
        return not first and whole(operation)

    monkeypatch.setattr(_connector._Operation, "ended", ended)
    assert rig.store([1, 2], [1, 2]) == [True, True]


def test_connectors_of_one_process_and_an_await_wake_their_own_threads(tmp_path: Path) -> None:
    """All sleep where the end of a transfer is waited for, and one of them is told that there is a new one."""

    async def store_one(device: kvswap.Device) -> None:
        cache = Cache(device, 4, 96)
        testing.delay(cache.device, 0.05, stream := kvswap.Stream(cache.device))
        await cache.swap([1], [1], stream=stream)

    asyncio.run(asyncio.wait_for(store_one(kvswap.Device("host:0")), PATIENCE))
    rigs = [Rig(tmp_path / name) for name in ("a", "b")]
    for number in range(3):
        for rig in rigs:
            assert rig.store([number], [number]) == [True]
    for rig in rigs:
        rig.connector.close()
        assert not rig.connector._waiter.is_alive()


def test_an_end_that_cannot_be_read_is_told_as_a_failure(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def settle(operation: _connector._Operation) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(rig.connector, "_settle", settle)
        ok, error, each = rig.wait(rig.connector.submit_batch_set(keys_of(1, 2), rig.views([1, 2])))
    assert (ok, each) == (False, [False, False]) and "no memory" in error and "no memory" in caplog.text
    assert rig.load([1, 2], [5, 6]) == [True, True]


def test_where_waiting_fails_ends_are_asked_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def once() -> bool:
        if rig.connector._running:
            calls.append(1)
            if len(calls) < 4:
                raise MemoryError("no memory")
        return whole()

    calls: list[int] = []
    whole = rig.connector._once
    rig.store([0], [0])  # the thread comes back from where it sleeps, and then calls the other
    monkeypatch.setattr(rig.connector, "_once", once)
    for i in range(1, 4):
        assert rig.store([i], [i]) == [True]
    assert len(calls) >= 4 and caplog.text.count("waiting for stores and loads failed") == 1


def test_what_begins_with_any_error_is_told_as_a_failure(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def move(*arguments: Any) -> None:
        raise RuntimeError("not now")

    with monkeypatch.context() as patch:
        patch.setattr(rig.connector, "_move", move)
        assert rig.wait(rig.connector.submit_batch_set(keys_of(1), rig.views([1]))) == (False, "not now", [False])
    assert rig.store([1], [1]) == [True]


def test_a_damaged_object_is_not_served(rig: Rig, tmp_path: Path) -> None:
    rig.store([1, 2], [1, 2])
    (segment,) = (tmp_path / "kv").rglob("segment-*.kvs")
    content = bytearray(segment.read_bytes())
    content[content.index(rig.before[2].tobytes()) + 99] ^= 1
    with segment.open("r+b") as file:
        file.write(content)
    assert rig.load([1, 2], [5, 6]) == [True, False]
    assert rig.exists(1, 2) == [True, False]


def test_deleting(rig: Rig) -> None:
    rig.store([1, 2], [1, 2])
    assert rig.wait(rig.connector.submit_batch_delete(keys_of(1, 9))) == (True, "", [True, True])
    assert rig.exists(1, 2) == [False, True]
    with testing.file_fault(rig.files(), "write", "fail", every=1):
        ok, error, each = rig.wait(rig.connector.submit_batch_delete(keys_of(2)))
    assert (ok, each) == (False, [False]) and "Input/output error" in error


def test_nothing_to_do_is_told_too(rig: Rig) -> None:
    for number in (
        rig.connector.submit_batch_get([], []),
        rig.connector.submit_batch_set([], []),
        rig.connector.submit_batch_exists([]),
        rig.connector.submit_batch_delete([]),
    ):
        assert rig.wait(number) == (True, "", [])


def test_long_keys(rig: Rig) -> None:
    keys = ["m" * 600 + str(i) for i in range(3)]
    rig.wait(rig.connector.submit_batch_set(keys, rig.views([0, 1, 2])))
    assert rig.wait(rig.connector.submit_batch_exists([*keys, "m" * 600]))[2] == [True] * 3 + [False]
    rig.wait(rig.connector.submit_batch_get([keys[2]], rig.views([9])))
    np.testing.assert_array_equal(rig.memory[9], rig.before[2])


def test_no_two_keys_are_stored_as_one(rig: Rig) -> None:
    """Long keys are stored by a hash, whose text a short key may be."""
    long = "m" * 600
    hashed = "sha256@" + hashlib.sha256(long.encode()).hexdigest()
    keys = [long, hashed, "sha256@", "sha256@" + hashlib.sha256(hashed.encode()).hexdigest(), "", "\udc80", "k" * 512]
    for i, key in enumerate(keys):
        assert rig.wait(rig.connector.submit_batch_exists(keys))[2] == [k < i for k in range(len(keys))]
        assert rig.wait(rig.connector.submit_batch_set([key], rig.views([i])))[2] == [True]
    to = np.zeros((len(keys), NBYTES), np.uint8)
    assert all(rig.wait(rig.connector.submit_batch_get(keys, [memoryview(row) for row in to]))[2])
    np.testing.assert_array_equal(to, rig.before[: len(keys)])
    assert all(rig.wait(rig.connector.submit_batch_delete(keys[:1]))[2])
    assert rig.wait(rig.connector.submit_batch_exists(keys))[2] == [False] + [True] * (len(keys) - 1)
    assert set(keys_of(1)[0].encode()) and _connector._key(keys_of(1)[0]) == keys_of(1)[0].encode()  # readable


FOREIGN = ["\u0663", "007", "\u00b2", "\u2460", "0", "+8", " 9", "1_000", "9" * 30, "9" * 5000, "lost+found", "4096"]


def test_foreign_names_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kv = tmp_path / "kv"
    kv.mkdir()
    for name in FOREIGN:
        if len(name) > 255:
            continue
        path = kv / name
        if name == "4096":
            path.write_text("a file")
        else:
            path.mkdir()
    (kv / "16384").mkdir()  # of another cache, perhaps; there is nothing of this one
    (kv / "8192").symlink_to("nowhere")
    before = sorted(os.listdir(kv))
    with caplog.at_level(logging.WARNING):
        rig = Rig(tmp_path)
        assert rig.store([1], [1]) == [True]
        for _ in range(3):
            assert rig.exists(1, 2) == [True, False]
        assert rig.load([1], [5]) == [True]
    said = [record.getMessage() for record in caplog.records if "not kvswap's" in record.getMessage()]
    assert len(said) == 1 and "'007'" in said[0] and "more" in said[0]
    assert sorted(os.listdir(kv)) == sorted([*before, str(NBYTES), "bound.kvs"]) and not list((kv / "16384").iterdir())
    assert (kv / "4096").read_text() == "a file" and "4096" in rig.connector._foreign
    # an object whose folder's name is taken: told as failed, each time, and the others go on
    for _ in range(2):
        block = [memoryview(bytearray(4096))]
        ok, error, each = rig.wait(rig.connector.submit_batch_set(keys_of(9), block))
        assert (ok, each) == (False, [False]) and "4096" in error
        assert rig.wait(rig.connector.submit_batch_get(keys_of(9), block))[:1] == (False,)
        assert rig.exists(1, 9) == [True, False]
    rig.connector.close()


def test_a_store_that_cannot_be_opened_leaves_the_other_sizes_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)
    small = [memoryview(bytearray(range(77)))]
    assert rig.store([1], [1]) == [True] and rig.wait(rig.connector.submit_batch_set(keys_of(2), small))[0]
    rig.connector.close()
    (store,) = (path for path in (tmp_path / "kv" / "77").iterdir() if path.is_dir())
    store.chmod(0o777)  # not trusted
    with caplog.at_level(logging.WARNING):
        again = Rig(tmp_path)
        assert again.exists(1, 2) == [True, False] and again.exists(1, 2) == [True, False]
        ok, error, _ = again.wait(again.connector.submit_batch_set(keys_of(3), small))
        assert not ok and "other users" in error
    said = [record.getMessage() for record in caplog.records if "of 77 bytes are not looked up" in record.getMessage()]
    assert len(said) == 1 and "other users" in said[0]  # it is not tried again at once
    store.chmod(0o700)
    monkeypatch.setattr(_connector.time, "monotonic", lambda clock=time.monotonic: clock() + 11)
    assert again.exists(1, 2) == [True, True]
    monkeypatch.undo()
    again.connector.close()


def test_a_look_up_that_fails_in_one_size_finds_the_others(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(keys: list[bytes]) -> list[bool]:
        raise OSError("no such device")

    rig.store([1], [1])
    small = [memoryview(bytearray(range(77)))]
    assert rig.wait(rig.connector.submit_batch_set(keys_of(2), small))[0]
    monkeypatch.setattr(rig.connector._stores[77], "find", fail)
    assert rig.exists(1, 2) == [True, False]
    assert "looking up 1 objects in" in caplog.text and "no such device" in caplog.text


def test_after_close_nothing_is_read_from_a_descriptor_of_others(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.connector.submit_batch_exists(keys_of(1))
    descriptor = rig.connector.event_fd()
    rig.connector.close()
    others = os.eventfd(5)
    try:
        assert others == descriptor
        rig.connector.drain_completions()
        assert os.eventfd_read(others) == 5
    finally:
        os.close(others)
    with pytest.raises(RuntimeError, match="closed"):
        rig.connector.event_fd()


def test_without_a_revision_objects_are_this_process_s_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LMCache's keys name the model, not its weights."""
    given: dict[str, Any]
    for given, shared in (
        ({"unversioned": False}, False),
        ({"unversioned": False, "revision": "0c1d9e5"}, True),
        ({"unversioned": False, "weight_version": "7"}, True),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            rig = Rig(tmp_path / str(len(given)) / str(given), **given)
        assert ("revision is not known" in caplog.text) == (not shared)
        assert rig.store([1], [1]) == [True] and rig.exists(1) == [True] and rig.load([1], [2]) == [True]
        rig.connector.close()
        again = Rig(tmp_path / str(len(given)) / str(given), **given)
        assert again.exists(1) == [shared]
        again.connector.close()
    other = Rig(tmp_path / "2" / str({"unversioned": False, "revision": "0c1d9e5"}), revision="ffffff")
    assert other.exists(1) == [False]
    other.connector.close()


def test_a_full_queue_is_told_as_failures(tmp_path: Path) -> None:
    rig = Rig(tmp_path, engine="threads", depth=1, queue=2)
    rig.store([0], [0])
    with testing.file_fault(rig.files(), "write", "delay", every=1, delay=0.5):
        numbers = [rig.connector.submit_batch_set(keys_of(i), rig.views([i])) for i in range(1, 6)]
        told = [rig.wait(number) for number in numbers]
    assert [ok for ok, _, _ in told[:2]] == [True, True] and not told[-1][0] and told[-1][1]
    assert rig.exists(1, 5) == [True, False]
    rig.connector.close()


def test_what_was_stored_survives_and_another_name_is_another_cache(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.store([1, 2], [1, 2])
    rig.connector.close()
    again = Rig(tmp_path, seed=2)
    assert again.exists(1, 2, 3) == [True, True, False]
    assert again.load([2], [0]) == [True]
    np.testing.assert_array_equal(again.memory[0], rig.before[2])
    again.connector.close()
    other = Rig(tmp_path, name="fp8")
    assert other.exists(1, 2) == [False, False]
    other.connector.close()


def test_objects_over_several_disks(tmp_path: Path) -> None:
    disks = [str(tmp_path / "one"), str(tmp_path / "two")]
    rig = Rig(tmp_path, directory=disks)
    assert rig.store(list(range(16)), list(range(16))) == [True] * 16
    rig.connector.close()
    again = Rig(tmp_path, seed=2, directory=disks)
    assert again.exists(*range(17)) == [True] * 16 + [False]
    assert again.load(list(range(16)), list(range(16))) == [True] * 16
    np.testing.assert_array_equal(again.memory, rig.before)
    again.connector.close()
    assert all(list((tmp_path / name).rglob("segment-*.kvs")) for name in ("one", "two"))


@pytest.mark.parametrize("shared", [True, False])
def test_two_processes(tmp_path: Path, shared: bool) -> None:
    code = f"from test_lmcache import *\nrig = Rig(Path({str(tmp_path)!r}), shared={shared})"
    with Process(code) as writer:
        reader = Rig(tmp_path, seed=2, shared=shared)  # before anything is stored
        assert reader.exists(1) == [False] and reader.load([1], [1]) == [False]
        assert writer.do("rig.store([1, 2], [1, 2])") == [True, True]
        until(lambda: reader.exists(1, 2) == [True, True], "objects of the other process are not found")
        assert reader.load([1, 2], [1, 2]) == [True, True]
        np.testing.assert_array_equal(reader.memory[[1, 2]], random_bytes(1, 16 * NBYTES).reshape(16, NBYTES)[[1, 2]])
        ok, error, each = reader.wait(reader.connector.submit_batch_set(keys_of(3), reader.views([3])))
        assert (ok, each) == (shared, [shared]) and ("another process" in error) != shared
        assert reader.wait(reader.connector.submit_batch_delete(keys_of(1)))[0] is False
        writer.kill()
        assert reader.exists(1, 2) == [True, True] and reader.load([2], [4]) == [True]
    reader.connector.close()


def test_closing_ends_what_is_running(tmp_path: Path) -> None:
    rig = Rig(tmp_path, engine="threads", depth=1)
    rig.store([0], [0])
    descriptor = rig.connector.event_fd()
    with testing.file_fault(rig.files(), "write", "delay", every=1, delay=0.1):
        rig.connector.submit_batch_set(keys_of(1, 2, 3), rig.views([1, 2, 3]))
        rig.connector.close()
    rig.connector.close()
    with pytest.raises(OSError):
        os.fstat(descriptor)
    with pytest.raises(RuntimeError, match="closed"):
        rig.connector.submit_batch_exists(keys_of(1))
    again = Rig(tmp_path)
    assert again.exists(1, 2, 3) == [True] * 3
    again.connector.close()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"directory": ""}, "directory"),
        ({"capacity": "1 TB"}, "capacity"),
        ({"capacity": 0}, "capacity"),
        ({"shared": "false"}, "\"shared\" of adapter_params is 'false'; it is true or false"),
        ({"buffered": None}, '"buffered" of adapter_params is None; it is true or false'),
        ({"capacity": None}, 'adapter_params needs "capacity"'),
        ({"directory": "kv"}, "absolute path"),
        ({"name": 3}, '"name" of adapter_params is 3'),
        ({"durabilty": "fsync"}, 'is "durability" meant'),
        ({"queue": 0}, '"queue" of adapter_params is 0'),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FileConnector(**{"directory": str(tmp_path), "capacity": CAPACITY, **given})


def test_wrong_arguments(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="2 keys and 1 buffers"):
        rig.connector.submit_batch_get(keys_of(1, 2), rig.views([1]))
    rig.store([1], [1])
    constant = memoryview(bytes(NBYTES))
    assert rig.wait(rig.connector.submit_batch_get(keys_of(1), [constant]))[2] == [False]  # nothing may be read into it
    with caplog.at_level(logging.WARNING):
        assert rig.wait(rig.connector.submit_batch_set(keys_of(2), [memoryview(b"")]))[2] == [False]


def test_importing_it_needs_neither_lmcache_nor_torch() -> None:
    done: subprocess.CompletedProcess[str] = run_python("""
        import sys
        import kvswap.lmcache
        assert not {"torch", "lmcache"} & set(sys.modules)
    """)
    assert done.returncode == 0, done.stderr
