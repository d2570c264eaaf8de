"""The index of blocks that replicas share: against a model, between processes, and with processes that are killed."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE

import kvswap
from kvswap import _C

FOLDER = Path("/dev/shm")
FOREVER = 1e6
SLOT = 4096

if not FOLDER.is_dir():
    pytest.skip("no /dev/shm", allow_module_level=True)


@pytest.fixture
def name() -> Iterator[str]:
    made = f"replicas-{os.getpid()}-{random.randrange(1 << 30)}"
    yield made
    with contextlib.suppress(FileNotFoundError):
        (FOLDER / f"kvswap.{made}").unlink()


def joined(name: str, member: str, slots: int = 4, identity: str | None = "same") -> _C._ReplicaIndex:
    return _C._ReplicaIndex(name, slots, SLOT, member, identity)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def taken(index: _C._ReplicaIndex, *keys: bytes) -> list[int]:
    """Slots for new blocks."""
    answer = index.take(list(keys))
    assert answer is not None
    slots = [slot for slot in answer[0] if slot is not None]
    assert len(slots) == len(keys)
    return slots


def stored(index: _C._ReplicaIndex, *keys: bytes) -> list[int]:
    slots = taken(index, *keys)
    index.settle(slots, True)
    return slots


PRELUDE = """
import os, random, sys, time
from kvswap import _C
name, member = sys.argv[1:3]
index = _C._ReplicaIndex(name, int(sys.argv[3]), 4096, member, "same")
"""


@contextlib.contextmanager
def replica(name: str, member: str, slots: int, code: str) -> Iterator[subprocess.Popen[str]]:
    """Another process, which says a line when it has done its code."""
    argv = [sys.executable, "-P", "-c", PRELUDE + code, name, member, str(slots)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


# -- what one replica stores, the others find ------------------------------------------------------------------------


def test_a_block_is_a_hit_for_all_after_its_write(name: str) -> None:
    a, b = joined(name, "a"), joined(name, "b")
    (slot,) = taken(a, b"x")
    assert a.find(b"x", FOREVER) is True and b.find(b"x", FOREVER) is True
    assert b.find(b"x", 0) is False and a.find(b"x", 0) is True  # another's write is not waited for beyond the limit
    assert b.take([b"x"]) == ([None], 0)
    with pytest.raises(ValueError, match=rf"slots\[0\] is {slot}, which this replica does not write"):
        b.settle([slot], True)
    a.settle([slot], True)
    assert a.find(b"x", 0) == (slot, False) and b.find(b"x", 0) == (slot, True)
    assert a.find(b"x" + b"\0", 0) is False and a.find(b"", 0) is False
    (other,) = taken(a, b"y")
    a.settle([other], False)
    assert b.find(b"y", FOREVER) is False
    with pytest.raises(ValueError, match="does not write"):
        a.settle([other], True)


def test_the_oldest_blocks_that_nothing_reads_make_room(name: str) -> None:
    a, b = joined(name, "a"), joined(name, "b")
    slots = stored(a, b"0", b"1", b"2", b"3")
    assert a.find(b"0", 0) == (slots[0], False)  # pinned
    b.touch([b"1"])
    assert b.take([b"4", b"5"]) == ([slots[2], slots[3]], 2)
    assert b.take([b"1", b"6", b"7"]) is None  # there would be room if "1" were not asked for
    b.settle(slots[2:], True)
    assert [a.find(key, 0) is False for key in (b"0", b"1", b"2", b"4")] == [False, False, True, False]
    assert b.take([b"7", b"8"]) is None  # a reads all but "5"
    a.unpin([slots[1]])
    assert b.take([b"7", b"8"]) == ([slots[1], slots[3]], 2)
    a.unpin([slots[0], slots[0]])
    with pytest.raises(ValueError, match="does not read"):
        a.unpin([slots[0]])


def test_arguments_are_checked(name: str) -> None:
    a = joined(name, "a")
    with pytest.raises(ValueError, match="has 41 bytes; at most 40"):
        a.find(b"k" * 41, 0)
    with pytest.raises(TypeError, match=r"keys\[1\] must be bytes, not str"):
        a.take([b"k", "l"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"slots\[0\] is 4, "):
        a.unpin([4])
    for slots, nbytes, member in ((0, 1, "b"), (1 << 32, 1, "b"), (4, 0, "b"), (4, SLOT, ""), (4, SLOT, "b" * 101)):
        with pytest.raises(ValueError):
            _C._ReplicaIndex(f"{name}-other", slots, nbytes, member, "same")


class Model:
    """The same in a few lines of Python."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.ready: dict[bytes, str] = {}  # in the order of use; who stored it
        self.writing: dict[bytes, str] = {}
        self.pins: Counter[tuple[str, bytes]] = Counter()

    def pinned(self, key: bytes) -> bool:
        return any(count and at[1] == key for at, count in self.pins.items())

    def touch(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            if key in self.ready:
                self.ready[key] = self.ready.pop(key)

    def take(self, who: str, keys: list[bytes]) -> list[bytes] | None:
        new = [key for key in keys if key not in self.ready and key not in self.writing]
        self.touch(keys[::-1])
        short = len(new) - (self.slots - len(self.ready) - len(self.writing))
        idle = [key for key in self.ready if key not in keys and not self.pinned(key)]
        if short > len(idle):
            return None
        for key in idle[: max(0, short)]:
            del self.ready[key]
        self.writing.update(dict.fromkeys(new, who))
        return new

    def die(self, who: str) -> None:
        self.writing = {key: writer for key, writer in self.writing.items() if writer != who}
        self.pins = Counter({at: count for at, count in self.pins.items() if at[0] != who})


@pytest.mark.parametrize("seed", range(4))
def test_it_is_what_a_model_is(name: str, seed: int) -> None:
    chance, slots = random.Random(seed), 6
    model, where = Model(slots), dict[bytes, int]()
    indexes = {who: joined(name, who, slots) for who in "abc"}
    keys = [bytes([i]) * chance.choice((1, 36, 40)) for i in range(14)]
    for _ in range(1500):
        who = chance.choice("abc")
        index, some = indexes[who], chance.sample(keys, chance.randrange(1, 5))
        what = chance.randrange(100)
        if what < 30:
            answer, new = index.take(some), model.take(who, some)
            assert (answer is None) == (new is None)
            if answer is not None and new is not None:
                assert [key for key, slot in zip(some, answer[0], strict=True) if slot is not None] == new
                where.update((key, slot) for key, slot in zip(some, answer[0], strict=True) if slot is not None)
        elif what < 55:
            mine = [key for key, writer in model.writing.items() if writer == who][: chance.randrange(4)]
            success = chance.random() < 0.8
            index.settle([where[key] for key in mine], success)
            for key in mine:
                writer = model.writing.pop(key)
                model.ready.update({key: writer} if success else {})
        elif what < 75:
            key = some[0]
            found = index.find(key, FOREVER)
            if key in model.ready:
                assert found == (where[key], model.ready[key] != who)
                model.pins[who, key] += 1
            else:
                assert found is (key in model.writing)
        elif what < 90:
            mine = [key for (reader, key), count in model.pins.items() if reader == who and count]
            index.unpin([where[key] for key in mine])
            model.pins.subtract((who, key) for key in mine)
        elif what < 98:
            index.touch(some)
            model.touch(some)
        else:
            index._check()
            info = index.info()
            assert info["ready"] == len(model.ready) and info["writing"] == len(model.writing)
            assert info["pinned"] == sum(count for at, count in model.pins.items() if at[0] == who) + sum(
                writer == who for writer in model.writing.values()
            )
    where_ready = [where[key] for key in (*model.ready, *model.writing)]
    assert len(set(where_ready)) == len(where_ready)


# -- resets ----------------------------------------------------------------------------------------------------------


def test_replicas_that_are_all_reset_share_again(name: str) -> None:
    a, b = joined(name, "a"), joined(name, "b")
    (slot,) = stored(a, b"x")
    (late,) = taken(b, b"late")
    b.reset()
    assert b.find(b"x", 0) is False and a.find(b"x", 0) == (slot, False)  # a still has the weights of before
    b.settle([late], True)  # of before the reset
    assert b.find(b"late", 0) is False
    stored(b, b"new")
    assert a.find(b"new", 0) is False
    a.unpin([slot])
    a.reset()
    assert a.find(b"new", 0) and a.find(b"x", 0) is False and a.find(b"late", 0) is False
    c = joined(name, "c")  # has the weights that an engine loads
    assert c.find(b"new", 0) is False
    c.reset()
    assert c.find(b"new", 0)
    assert a.info()["ready"] == 1  # no other block can be found any more


def test_a_reset_keeps_what_is_under_way(name: str) -> None:
    a = joined(name, "a")
    (read,) = stored(a, b"read")
    assert a.find(b"read", 0)
    writes = taken(a, b"0", b"1", b"2")
    a.reset()
    assert a.take([b"3"]) is None
    a.unpin([read])
    a.settle(writes[:1], False)
    assert a.take([b"3", b"4"]) is not None


# -- members ---------------------------------------------------------------------------------------------------------


def test_blocks_of_another_meaning_are_refused(name: str) -> None:
    a = joined(name, "a", identity='{"a":1,"b":2}')
    with pytest.raises(
        ValueError, match='the blocks of its replicas mean something else: "b":2} there, and "b":3} here'
    ):
        joined(name, "b", identity='{"a":1,"b":3}')
    with pytest.raises(ValueError, match="is another pool: its num_blocks is 4, and 5 was asked for"):
        joined(name, "b", slots=5)
    stored(a, b"x")
    a.close()
    assert joined(name, "b", identity="other").find(b"x", 0) is False  # nobody has the others


def test_workers_come_first_and_belong_to_their_scheduler(name: str) -> None:
    worker = joined(name, "a", identity=None)
    a, b = joined(name, "a"), joined(name, "b")
    assert a.info()["members"] == 2
    with pytest.raises(kvswap.Error, match="has joined as 'a' already"):
        joined(name, "a")
    a.close()
    until(lambda: b.info()["members"] == 2)
    worker.close()
    assert b.info()["members"] == 1


def test_there_are_sixteen_members(name: str) -> None:
    members = [joined(name, f"{i}") for i in range(16)]
    with pytest.raises(kvswap.Error, match="there are 16 replicas"):
        joined(name, "one more")
    members.pop().close()
    joined(name, "one more")


def test_the_last_one_takes_the_memory_with_it(name: str) -> None:
    path = FOLDER / f"kvswap.{name}"
    device, nbytes = kvswap.Device("host:0"), _C._replica_index_nbytes(4)
    pool = _C.SharedPool(name, 4, SLOT, create=None, device=device, index_nbytes=nbytes)
    a, b = joined(name, "a"), joined(name, "b")
    stored(a, b"x")
    with pytest.raises(ValueError, match="belongs to all processes that have opened it"):
        pool.unlink()
    a.close()
    a.close()
    with pytest.raises(kvswap.Error, match="the index is closed"):
        a.find(b"x", 0)
    pool.close()
    assert path.exists() and b.find(b"x", 0)
    assert _C.SharedPool(name, 4, SLOT, create=False, device=device, index_nbytes=nbytes).path == str(path)
    del b
    until(lambda: not path.exists())


def test_a_pool_without_an_index_is_another(name: str) -> None:
    index = joined(name, "a")
    with pytest.raises(ValueError, match=r"index_nbytes is [0-9]+, and 0 was asked for"):
        _C.SharedPool(name, 4, SLOT, create=None, device=kvswap.Device("host:0"))
    del index


# -- processes that are killed -----------------------------------------------------------------------------------------


def test_what_a_killed_replica_had_is_given_back(name: str) -> None:
    a = joined(name, "a")
    (slot,) = stored(a, b"x")
    code = "index.find(b'x', 0); index.take([b'y', b'z'])\nprint('done', flush=True)\nsys.stdin.read()"
    with replica(name, "b", 4, code) as process:
        assert said(process) == "done"
        assert a.take([b"1", b"2"]) is None and a.find(b"y", FOREVER) is True
        process.kill()
        until(lambda: a.find(b"y", FOREVER) is False)
        assert len(taken(a, b"1", b"2", b"3", b"4")) == 4 and a.find(b"x", 0) is False
    assert a.info()["members"] == 1 and slot == 0


def test_a_worker_of_a_killed_scheduler_may_still_copy(name: str) -> None:
    a = joined(name, "a")
    worker = joined(name, "b", identity=None)
    with replica(name, "b", 4, "index.take([b'y'])\nprint('done', flush=True)\nsys.stdin.read()") as process:
        assert said(process) == "done"
        process.kill()
        process.wait()
        time.sleep(0.05)
        assert a.find(b"y", FOREVER) is True and a.take([b"0", b"1", b"2", b"3"]) is None
        with pytest.raises(kvswap.Error, match="was killed, workers still run"):
            joined(name, "b")
    worker.close()
    until(lambda: a.find(b"y", FOREVER) is False)


def test_a_lock_whose_owner_is_killed_is_given_up(name: str) -> None:
    a = joined(name, "a")
    stored(a, b"x")
    with replica(name, "b", 4, "index._hold()\nprint('done', flush=True)\nsys.stdin.read()") as process:
        assert said(process) == "done"
        begin = time.monotonic()
        for _ in range(20):  # only the first waits
            with pytest.raises(TimeoutError, match="does not go on holds the lock"):
                a.find(b"x", 0)
        assert time.monotonic() - begin < PATIENCE
        process.kill()
        process.wait()
    assert a.find(b"x", 0)
    a._check()


CHAOS = """
chance = random.Random(member)
keys = [bytes([i]) * 36 for i in range(40)]
pins, writes = [], []
print("begun", flush=True)
while True:
    some = chance.sample(keys, 6)
    found = index.find(some[0], 1e6)
    if found is not True and found is not False:
        pins.append(found[0])
    answer = index.take(some[1:])
    if answer is not None:
        writes += [slot for slot in answer[0] if slot is not None]
    index.touch(some)
    if len(writes) > 6:
        index.settle(writes, chance.random() < 0.9)
        writes = []
    if len(pins) > 6:
        index.unpin(pins)
        pins = []
"""


@pytest.mark.not_sanitized("processes, which take long to start")
def test_replicas_killed_at_random_leave_the_index_right(name: str) -> None:
    a, chance = joined(name, "a", 24), random.Random(1)
    for turn in range(3):
        with contextlib.ExitStack() as stack:
            others = [stack.enter_context(replica(name, f"b{turn}{i}", 24, CHAOS)) for i in range(2)]
            assert [said(process) for process in others] == ["begun"] * 2
            for process in others:
                time.sleep(chance.uniform(0, 0.05))
                process.send_signal(signal.SIGKILL)
        a._check()
        until(lambda: a.info()["members"] == 1)
        a._check()
        info: dict[str, Any] = a.info()
        assert info["writing"] == info["pinned"] == 0
    assert len(taken(a, *(b"%d" % i for i in range(24)))) == 24  # nothing is pinned


def test_a_forked_child_has_no_index(name: str) -> None:
    a = joined(name, "a")
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                a.find(b"x", 0)
            except kvswap.Error as error:
                code = 0 if "before fork" in str(error) else 2
            a.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    stored(a, b"x")
    assert joined(name, "b").find(b"x", 0)
