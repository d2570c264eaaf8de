"""Engines with host memory of their own that lend each other their links: every byte; owners and lenders that come
late, are killed, sleep, or break the rules. Host devices, a process for each engine."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, ROOT, elsewhere, until

import kvswap
from kvswap import info, metrics, testing
from kvswap._top_socket import prepare_folder
from kvswap.codecs import Coding
from kvswap.share import _lend, _loan, _meet, _offer

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")

KIB = 1 << 10
LAYERS, PAGE, ROW, BLOCKS = 3, 4 * KIB, 16 * KIB, 200  # a row has other bytes behind the block
BLOCK = LAYERS * PAGE
LOOK = 0.1  # seconds
names = iter(range(1 << 20))

ENGINE = """
import json, os, sys, threading
sys.path[:0] = json.loads(sys.argv[2])
from test_share_lend import BLOCKS, ROW, Engine
given = json.loads(sys.argv[1])
engine = Engine(**given)
for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
engine.close()
"""


class Engine:
    """A cache on a device, and its host memory: a file in /dev/shm that has no name any more. parts: as of Place.
    codec: of the blocks in host memory."""

    def __init__(
        self,
        name: str,
        engine: str,
        device: str = "host:0",
        idle: bool = True,
        file: str = "",
        parts: int = 1,
        build: str = "",
        codec: str = "",
        **options: Any,
    ) -> None:
        _lend._LOOK = LOOK
        if build:
            _offer.MAGIC, _loan._AGAIN = f"kvslend2{build}".encode(), LOOK
        self.device, self.idle = kvswap.Device(device), idle
        path = file or f"/dev/shm/kvswap-test-{os.getpid()}-{next(names)}"
        self.fd = os.open(path, os.O_RDWR if file else os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        if not file:
            os.unlink(path)
            os.ftruncate(self.fd, parts * BLOCKS * ROW)
        self.map = mmap.mmap(self.fd, parts * BLOCKS * ROW)
        self.rows = np.frombuffer(self.map, np.uint8).reshape(parts * BLOCKS, ROW)
        if not file:
            self.rows[:] = 0xEE
        self.ptr = self.rows.ctypes.data
        self.device.register(self.ptr, parts * BLOCKS * ROW)
        self.gpu = np.zeros((parts * LAYERS, BLOCKS, PAGE), np.uint8)
        self.coding = Coding(PAGE, codec) if codec else None
        page = self.coding.coded_nbytes if self.coding else PAGE
        self.block = LAYERS * page
        self.pools: tuple[list[Any], list[Any]] = [], []
        for i in range(parts * LAYERS):
            host = self.ptr + i // LAYERS * BLOCKS * ROW + i % LAYERS * page
            places = (0, self.gpu[i].ctypes.data, PAGE, PAGE, None), (1, host, page, ROW, self.coding)
            for side, ptr, nbytes, stride, coding in places:
                more: Any = {"group": self.pools[side][0]} if self.pools[side] else {}
                more.update(stride=stride, coding=coding)
                self.pools[side].append(kvswap.Pool(self.device, ptr, BLOCKS, nbytes, **more))
        there = os.fstat(self.fd)
        form = True, ROW, parts, BLOCKS * ROW
        place = kvswap.share.Place(self.ptr, parts * self.block, BLOCKS, f"test {there.st_dev}", there.st_ino, *form)
        behind = _lend.HostFile(self.fd, 0, self.ptr)
        given: dict[str, Any] = {"piece_nbytes": 4 * self.block, "stall": 10.0, **options}
        sides = tuple(self.pools[0]), tuple(self.pools[1])
        self.lending = _lend.Lending(name, engine, place, *sides, behind, is_idle=lambda: self.idle, **given)
        self.rng = np.random.default_rng(7)

    def set_idle(self, idle: bool) -> bool:
        self.idle = idle
        return idle

    def lent(self) -> list[list[Any]]:
        """pid, registered bytes, whether it is lent, bytes brought D2H and H2D, of each loan."""
        return [[*loan[:3], *loan.brought] for loan in self.lending.loans]

    def registered(self) -> int:
        """Bytes, on this device."""
        return sum(
            row["registered_bytes"] for row in metrics.snapshot()["devices"] if row["device"] == self.device.name
        )

    def check(self, count: int = BLOCKS) -> list[int]:
        """A store and a load of new bytes; what came over other links, of both."""
        gpu, host = self.rng.permutation(BLOCKS)[:count], self.rng.permutation(BLOCKS)[:count]
        new = self.rng.integers(0, 256, (len(self.gpu), count, PAGE), dtype=np.uint8)
        if self.coding is not None:
            new[..., 1::2] = 0x3F  # of bf16: one exponent, which fits
        self.gpu[:, gpu] = new
        rows, pages = self.rows.copy(), new if self.coding is None else self.coding.encode(new)[0]
        for part in range(len(self.gpu) // LAYERS):
            own = pages.reshape(len(self.gpu), count, -1)[part * LAYERS : (part + 1) * LAYERS]
            rows[part * BLOCKS + host, : self.block] = own.transpose(1, 0, 2).reshape(count, self.block)
        store = self.lending.member.store(gpu, host)
        store.wait(PATIENCE)
        assert np.array_equal(self.rows, rows)
        self.gpu[:] = 0
        load = self.lending.member.load(host, gpu)
        load.wait(PATIENCE)
        assert np.array_equal(self.gpu[:, gpu], new) and int(self.gpu.sum()) == int(new.sum())
        return [store.by_others, load.by_others]

    def close(self) -> None:
        self.lending.close(PATIENCE)
        self.pools = [], []
        self.device.unregister(self.ptr)
        os.close(self.fd)


class Other:
    """An Engine in another process, which evaluates lines."""

    def __init__(self, name: str, engine: str, **options: Any) -> None:
        given = json.dumps({"name": name, "engine": engine, "device": "host:1", **options})
        path = json.dumps([os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))])
        self.popen = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", ENGINE, given, path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **elsewhere(),
        )  # fmt: skip

    def ask(self, line: str) -> Any:
        assert self.popen.stdin is not None and self.popen.stdout is not None
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()
        return json.loads(self.popen.stdout.readline())

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.communicate(timeout=PATIENCE)

    def end(self) -> int:
        self.popen.communicate(timeout=PATIENCE)
        return self.popen.returncode


@pytest.fixture
def name() -> str:
    return f"t{os.getpid()}.{next(names)}"


@pytest.fixture
def here(name: str) -> Iterator[Engine]:
    engine = Engine(name, "here")
    yield engine
    engine.close()


def lenders(engine: Engine, count: int) -> None:
    until(lambda: len(engine.lending.member.peers) == count)


def check_lent(engine: Engine) -> None:
    """Until others have brought pieces of a store and of a load."""
    found = [0, 0]
    while not all(found):
        found = [a + b for a, b in zip(found, engine.check(), strict=True)]


def test_each_lends_to_the_other(here: Engine, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_loan, "CHUNK", 1 << 20)  # several registrations

    def shown(device: str) -> list[tuple[int, int]]:
        rows = metrics.snapshot()["share"]
        return [(row["lenders"], row["borrowers"]) for row in rows if row["device"] == device]

    def lines() -> list[str]:
        return [line for line in info.collect().to_text().splitlines() if line.startswith(f"lend     {name}")]

    assert shown("host:0") == [(0, 0)]  # an engine that nothing is lent to can be seen
    assert [line.endswith("to which no other lends its link: kvswap doctor says why") for line in lines()] == [True]
    other = Other(name, "other", parts=2, codec="exact")  # as keys and values
    try:
        lenders(here, 1)
        check_lent(here)
        until(lambda: other.ask("engine.lending.member.peers"))
        while not all(other.ask("engine.check()")):
            pass
        until(lambda: shown("host:0") == [(1, 1)])
        assert shown("host:1") == []
        brought = here.lending.member.stats()
        pid, registered, lends, *by_them = other.ask("engine.lent()")[0]
        assert (pid, registered, lends) == (os.getpid(), BLOCKS * ROW, True)
        assert here.lending.loans[0].registered_nbytes == 2 * BLOCKS * ROW
        assert by_them == [brought["brought_by_others_d2h"], brought["brought_by_others_h2d"]]
        assert ["to which 1 others lend" in line for line in lines()] == [True, True]
    finally:
        assert other.end() == 0
    lenders(here, 0)
    assert here.check() == [0, 0]
    until(lambda: here.lending.loans == [])
    assert shown("host:0") == [(0, 0)]


def test_replicas_have_registered_their_memory(here: Engine, name: str) -> None:
    """Engines with one host memory: nothing is mapped or registered twice."""
    other = Other(name, "other", file=f"/proc/{os.getpid()}/fd/{here.fd}")
    lenders(here, 1)
    check_lent(here)
    assert other.ask("engine.lent()")[0][:3] == [os.getpid(), BLOCKS * ROW, True]
    assert other.ask("engine.registered()") == BLOCKS * ROW
    assert other.end() == 0
    until(lambda: here.lending.loans == [])
    assert here.check() == [0, 0]


def test_who_does_not_lend_to_each_other(here: Engine, name: str) -> None:
    """Processes of one engine, and engines with another name."""
    others = [Other(name, "here"), Other(f"{name}x", "third")]
    for other in others:
        other.ask("1")
    time.sleep(5 * LOOK)
    assert [other.ask("engine.lent()") for other in others] == [[], []] and here.lending.loans == []
    for other in others:
        assert other.end() == 0


def test_memory_is_registered_while_the_engine_is_idle(here: Engine, name: str) -> None:
    here.set_idle(False)
    other = Other(name, "other", idle=False)
    until(lambda: other.ask("len(engine.lent())") and here.lending.loans)
    time.sleep(3 * LOOK)
    assert other.ask("engine.lent()")[0][1:3] == [0, False]
    other.ask("engine.set_idle(True)")
    until(lambda: other.ask("engine.lent()")[0][1] == BLOCKS * ROW)
    assert here.lending.member.peers == () and here.lending.loans[0][1:3] == (0, False)
    here.set_idle(True)
    lenders(here, 1)
    until(lambda: here.lending.loans[0].lends)
    here.set_idle(False)
    assert other.end() == 0
    until(lambda: here.lending.loans == [])
    assert here.lending._loans.waits
    here.set_idle(True)
    until(lambda: not here.lending._loans.waits)


def test_a_sleeping_engine_lends_nothing(here: Engine, name: str) -> None:
    other = Other(name, "other")
    lenders(here, 1)
    assert other.ask("engine.lending.pause()") is None
    assert not any(lent[2] for lent in other.ask("engine.lent()"))
    lenders(here, 0)
    assert here.check() == [0, 0]
    assert other.ask("engine.lending.resume()") is None
    lenders(here, 1)
    check_lent(here)
    assert other.end() == 0


@pytest.mark.parametrize("ends", ["lender", "owner"])
def test_one_that_is_killed_is_forgotten(here: Engine, name: str, ends: str) -> None:
    other = Other(name, "other")
    lenders(here, 1)
    until(lambda: other.ask("engine.lending.member.peers"))
    if ends == "lender":
        gpu, host = here.rng.permutation(BLOCKS), here.rng.permutation(BLOCKS)
        jobs = [here.lending.member.load(host, gpu) for _ in range(4)]
        other.kill()
        for job in jobs:
            job.wait(PATIENCE)
        assert np.array_equal(here.gpu[:, gpu].transpose(1, 0, 2).reshape(BLOCKS, BLOCK), here.rows[host, :BLOCK])
    else:
        assert other.popen.stdin is not None
        other.popen.stdin.write("[engine.check() for _ in range(100)]\n")
        other.popen.stdin.flush()
        until(lambda: any(sum(loan.brought) for loan in here.lending.loans))
        other.kill()
    until(lambda: here.lending.loans == [] and not here.lending._loans.waits)
    lenders(here, 0)
    assert here.check() == [0, 0]
    again = Other(name, "other")
    lenders(here, 1)
    assert again.end() == 0


def test_memory_that_is_not_registered_is_not_asked_for_again(
    here: Engine, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with testing.fault(here.device, "call", "fail", operation="host_register", every=1, code=2):
        other = Other(name, "other")
        until(lambda: "its host memory cannot be used" in caplog.text)
        lenders(here, 1)  # the other way it goes
        time.sleep(3 * LOOK)
    time.sleep(3 * LOOK)
    assert here.lending.loans == [] and caplog.text.count("no link is lent to process") == 1
    assert other.ask("engine.lending.member.peers") == [] and other.end() == 0


def test_an_end_does_not_wait_for_all_memory(here: Engine, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Other(name, "other")
    lenders(here, 1)
    until(lambda: here.lending.loans and here.lending.loans[0].lends)
    monkeypatch.setattr(_lend, "_GIVE_BACK", 0.0)
    here.lending.close()
    [left] = _loan._kept
    assert left.registered == BLOCKS * ROW
    while left.unregister_next():
        pass
    _loan._kept.clear()
    assert other.end() == 0


def test_a_file_that_is_cut_off_is_left(here: Engine, name: str) -> None:
    """Its owner ends by a bus error where it copies itself; the lender does not."""
    other = Other(name, "other")
    until(lambda: other.ask("engine.lending.member.peers"))
    assert other.popen.stdin is not None
    load = "engine.lending.member.load(range(BLOCKS), range(BLOCKS)).wait(60)"
    other.popen.stdin.write(f"[os.ftruncate(engine.fd, BLOCKS * 3 // 4 * ROW), {load}]\n")
    other.popen.stdin.flush()
    assert other.end() == -signal.SIGBUS
    until(lambda: here.lending.loans == [])
    assert here.check() == [0, 0]


def test_lenders_have_no_links_among_each_other(here: Engine, name: str) -> None:
    """Those would count as lent ones."""
    others = [Other(name, f"other {i}") for i in range(2)]
    peers = "[loan.member.peers for loan in engine.lending._loans._loans if loan.member]"
    lenders(here, 2)
    for other in others:
        until(lambda other=other: len(other.ask(peers)) == 2 and all(other.ask(peers)))  # type: ignore[misc]
    time.sleep(5 * LOOK)
    assert [other.ask(peers) for other in others] == [[[0], [0]]] * 2
    for other in others:
        assert other.end() == 0


def test_a_folder_that_was_removed(here: Engine, name: str) -> None:
    """What is lent goes on."""
    other = Other(name, "other")
    lenders(here, 1)
    here.lending._loans._folder = here.lending._folder / "gone"
    time.sleep(3 * LOOK)
    check_lent(here)
    assert here.lending._thread.is_alive() and other.end() == 0


def test_lenders_come_until_there_are_enough(name: str) -> None:
    here = Engine(name, "here", lenders=1)
    others = [Other(name, f"other {i}", lenders=1) for i in range(2)]
    lenders(here, 1)
    assert here.lending._offering._most == 1
    for other in others:
        assert other.end() == 0
    here.close()


# -- owners that break the rules ---------------------------------------------------------------------------------------


class Fake:
    """An owner's socket, which sends what it is told."""

    def __init__(self, name: str) -> None:
        self.path = prepare_folder() / f"lend-{name}-{'0' * 16}.sock"
        self.listening = _meet.listen_at(self.path.parent, self.path, "taken")

    def answer(self, message: bytes, *fds: int) -> None:
        self.listening.settimeout(PATIENCE)
        while True:
            connection, _ = self.listening.accept()
            connection.settimeout(PATIENCE)
            if greeting := connection.recv(100):
                break
            connection.close()  # another engine looked whether somebody listens
        assert len(greeting) == _offer.HELLO.size
        socket.send_fds(connection, [message], fds)
        assert connection.recv(100) == b""  # it has ended the connection
        connection.close()

    def close(self) -> None:
        self.listening.close()
        self.path.unlink()


def an_offer(fd: int, **changed: Any) -> bytes:
    there = os.fstat(fd)
    values = {
        "rank": 1, "slots": 4, "pid": os.getpid(), "device": there.st_dev, "inode": there.st_ino, "begin": 0,
        "stride": ROW, "num_blocks": 4, "offset": 0, "block_nbytes": BLOCK, "piece_nbytes": 4 * BLOCK,
        "parts": 1, "part_stride": 0, "generation": 1, "path": "fake",
    }  # fmt: skip
    return _offer.Offer(**{**values, **changed}).pack()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"inode": 1}, "its host memory is another file than it announced"),
        ({"num_blocks": 5}, "its host memory has 65536 bytes, and it announced 81920"),
        ({"num_blocks": 0}, "its offer has numbers that no memory has"),
        ({"num_blocks": 1 << 60}, "its offer has numbers that no memory has"),
        ({"offset": ROW - BLOCK + 1}, "its offer has numbers that no memory has"),
        ({"rank": 0}, "its offer has numbers that no memory has"),
        ({"parts": 2, "part_stride": 4 * ROW + 1}, "its offer has numbers that no memory has"),
        ({"begin": 100, "num_blocks": 3}, "its rows begin at 100, and not on a page"),
        (None, "its offer of 3 bytes is not of this build of kvswap"),
        ("no descriptor", "0 descriptors came with its offer"),
        ("a pipe", "its host memory is no file of this user"),
    ],
)
def test_a_wrong_offer_is_not_taken(
    here: Engine, name: str, changed: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    fake = Fake(name)
    fd = os.memfd_create("fake")
    os.ftruncate(fd, 4 * ROW)
    pipe = os.pipe()
    try:
        if changed is None:
            fake.answer(b"abc", fd)
        elif changed == "no descriptor":
            fake.answer(an_offer(fd))
        elif changed == "a pipe":
            fake.answer(an_offer(fd), pipe[0])
        else:
            fake.answer(an_offer(fd, **changed), fd)
        assert re.search(f"no link is lent to process .*{re.escape(why)}", caplog.text)
        assert here.lending.loans == []
    finally:
        fake.close()
        for each in (fd, *pipe):
            os.close(each)


def test_another_user_is_refused_on_both_sides(
    here: Engine, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel's answer stands in for another user's process."""
    monkeypatch.setattr(_meet, "peer_of", lambda connection: (1, os.geteuid() + 1))
    fake = Fake(name)
    try:
        until(lambda: f"it is a process of user {os.geteuid() + 1}" in caplog.text)
        assert here.lending.loans == []
    finally:
        fake.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(here.lending._path))
        connection.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionError):
            connection.send(_offer.hello())
            assert connection.recv(1000) == b""
    until(lambda: "the host memory is not offered to a process" in caplog.text)


def test_another_build_registers_nothing(here: Engine, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The owner says so once, although the other one asks again."""
    other = Other(name, "other", build="0" * 32)
    try:
        until(lambda: f"not offered to process {other.popen.pid}: it has another build of kvswap" in caplog.text)
        time.sleep(5 * LOOK)
        assert caplog.text.count("it has another build of kvswap") == 1
        assert other.ask("engine.lent()") == [] and here.lending.loans == []
    finally:
        assert other.end() == 0


def test_wrong_arguments_are_named(name: str) -> None:
    place, file = kvswap.share.Place(0, 1, 1, "", 1), _lend.HostFile(0, 0, 0)
    for lenders in (0, 16):
        with pytest.raises(ValueError, match=f"lenders is {lenders}"):
            _lend.Lending(name, "here", place, (), (), file, lenders=lenders)
    with pytest.raises(ValueError, match="name is 'a/b'"):
        _lend.Lending("a/b", "here", place, (), (), file)


def test_parts_that_no_memory_has(here: Engine) -> None:
    place = kvswap.share.Place(here.ptr, 2 * BLOCK, BLOCKS, "test", 1, True, ROW)
    for parts, step, why in (
        (9, 0, "a block of 24576 bytes in 9 parts: 1 to 8 parts of equal size"),
        (2, BLOCKS * ROW - 1, f"part_stride is {BLOCKS * ROW - 1}; the blocks of a part take {BLOCKS * ROW} bytes"),
        (1, 0, f"stride is {ROW}, less than a block's 24576 bytes"),
    ):
        sides = tuple(here.pools[0]), tuple(here.pools[1])
        with pytest.raises(ValueError, match=re.escape(why)):
            kvswap.share.core_of(place._replace(parts=parts, part_stride=step), *sides)


def test_chunks_end_between_rows() -> None:
    """A registration that ended within a block would keep lenders from copying it."""
    fd = os.memfd_create("rows")
    rows = 40 << 20, 3 * KIB, 4 * KIB, 656 * 61
    for stride in rows:
        blocks = -(-(130 << 20) // stride)
        os.ftruncate(fd, stride * blocks)
        there = os.fstat(fd)
        offer = _offer.Offer(1, 4, 1, there.st_dev, there.st_ino, 0, stride, blocks, 0, stride, stride, 1, 0, 1, "")
        memory = _loan._Memory(kvswap.Device("host:0"), offer, fd)
        while memory.registered < memory.nbytes:
            memory.register_next()
        assert memory.registered == stride * blocks
        assert all(begin % stride == 0 and begin % mmap.PAGESIZE == 0 for begin in memory._registered)
        assert len(memory._registered) >= 2
        while memory.unregister_next():
            pass
        memory.unmap()
    os.close(fd)


@pytest.mark.slow
def test_engines_killed_and_stopped_at_random() -> None:
    """A few turns; 50 kills take `python tests/random/kill_lenders.py 200 1`."""
    program = [sys.executable, str(ROOT / "tests" / "random" / "kill_lenders.py"), "12", "1"]
    done = subprocess.run(program, **elsewhere(), capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
