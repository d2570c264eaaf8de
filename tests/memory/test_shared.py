"""Shared pools between real processes: who finds what, who waits for whom, and what is left behind by whom."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import fcntl
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import AT_ONCE, PATIENCE, ROOT, SANITIZED, Buffer, comes_down, until
from disks import cannot
from processes import no_more_files

import kvswap
from kvswap import memory, testing
from kvswap.memory import SharedPool

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")

FOLDER = Path("/dev/shm")
PAGE = os.sysconf("SC_PAGESIZE")
MIB = 1 << 20
VERSION_AT, PID_AT, START_AT, SPACE_AT, GENERATION_AT, BLOCKS_AT, WORDS_AT = 8, 16, 24, 32, 40, 48, 80

if not FOLDER.is_dir():
    pytest.skip("no /dev/shm", allow_module_level=True)

PRELUDE = """
import os, sys, time
import numpy as np
import kvswap
from kvswap import memory, testing
from kvswap.memory import SharedPool
device, name = kvswap.Device(sys.argv[1]), sys.argv[2]
def say(*words):
    print(*words, flush=True)
def heard():
    return sys.stdin.readline().strip()
"""


class Process:
    """Another Python with a device of its own, that is told lines and answers with lines."""

    def __init__(self, device: str, name: str, code: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(code), device, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT / "tests",
        )

    def line(self) -> str:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline().rstrip("\n")
        assert line, self.popen.communicate(timeout=PATIENCE)[1]
        return line

    def tell(self, text: str = "go") -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(text + "\n")
        self.popen.stdin.flush()

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.communicate(timeout=PATIENCE)

    def end(self) -> str:
        """What it still says, once it ended well."""
        out, err = self.popen.communicate(timeout=PATIENCE)
        assert self.popen.returncode == 0, err
        return out


Start = Callable[..., Process]


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A name of this test's own; nothing may be left at it."""
    text = f"test-{os.getpid()}-{abs(hash(request.node.name)) % 10**8}"
    yield text
    gc.collect()
    left = FOLDER / f"kvswap.{text}"
    there = left.exists()
    left.unlink(missing_ok=True)
    assert not there, "left behind"


@pytest.fixture
def start(name: str) -> Iterator[Start]:
    """Segments are memory of the host: a process is on a host device, which comes up at once, unless its test is about
    what a driver does with them."""
    started: list[Process] = []

    def make(code: str, on: str = "host:0") -> Process:
        started.append(Process(on, name, code))
        return started[-1]

    yield make
    for process in started:
        if process.popen.poll() is None:
            process.kill()


def path_of(name: str) -> Path:
    return FOLDER / f"kvswap.{name}"


def clean(name: str) -> list[str]:
    """kvswap.memory.clean(), of this test's names: other suites may run beside."""
    return sorted(other for other in memory.clean() if other.startswith(name))


def segments() -> int:
    """Mappings of shared pools that this process has, of files without a name too."""
    maps = Path("/proc/self/maps").read_text()
    return maps.count(f"{FOLDER}/kvswap.") + maps.count(f"{FOLDER}/#")


def rewrite(name: str, at: int, data: bytes) -> None:
    """Change a header behind everybody's back."""
    with path_of(name).open("r+b") as file:
        file.seek(at)
        file.write(data)


# -- one process ------------------------------------------------------------------------------------------------------


def test_it_is_a_host_pool(device: kvswap.Device, name: str) -> None:
    with SharedPool(name, 32, 4 * 4096, device=device, layers=4, chunk_nbytes=1 << 17) as pool:
        assert (pool.num_blocks, pool.slot_nbytes, pool.nbytes) == (32, 16384, 32 * 16384)
        assert pool.pinned and pool.state == "ready" and pool.chunks == 4
        assert set(pool.notices) <= {"what a process left behind when it died was removed"}  # of another run's tests
        assert pool.owner and pool.owner_alive and pool.owner_pid == os.getpid() and pool.generation > 0
        assert segments() >= 1
        assert pool.path == str(path_of(name)) and name in repr(pool)
        stat = path_of(name).stat()
        assert stat.st_mode & 0o777 == 0o600 and stat.st_size == pool.mapped_nbytes + 2 * PAGE
        for i in range(4):
            pool.layer(i)[:] = i
        assert (np.asarray(pool).reshape(32, 4, 4096) == np.arange(4)[:, None]).all()
        assert pool.ready(31)
        gpu = Buffer(device, 32 * 16384)
        ids = np.random.default_rng(1).permutation(32)
        kvswap.swap_cache_per_layer(gpu.ptr, pool, 16384, 32, 32, np.arange(32), ids, 1, device=device)
        assert (gpu.get().reshape(32, 4, 4096) == np.arange(4)[:, None]).all()
        gc.collect()
    assert not path_of(name).exists() and pool.state == "closed"
    for use in (lambda: pool.publish([0]), lambda: pool.generation, pool.unlink, lambda: pool.wait_ready([0])):
        with pytest.raises(kvswap.Error, match="closed"):
            use()


def test_two_in_one_process(device: kvswap.Device, name: str) -> None:
    owner = SharedPool(name, 8, 4096, device=device)
    other = SharedPool(name, 8, 4096, device=device, create=False)
    assert not other.owner and other.generation == owner.generation and other.ptr != owner.ptr
    np.asarray(owner)[:] = 5
    assert (np.asarray(other) == 5).all()
    gc.collect()
    with pytest.raises(ValueError, match="owns the segment"):
        other.unlink()
    owner.unlink()
    owner.unlink()
    assert not path_of(name).exists()
    third = SharedPool(name, 8, 4096, device=device)
    owner.close()  # its name is another's by now
    assert path_of(name).exists() and third.generation != other.generation
    assert (np.asarray(other) == 5).all()
    gc.collect()
    third.close()
    other.close()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"name": ""}, ValueError, "name is ''"),
        ({"name": "a/b"}, ValueError, "name is 'a/b'"),
        ({"name": "x" * 101}, ValueError, "1 to 100 letters"),
        ({"name": "a\0b"}, ValueError, "a zero in it"),
        ({"name": 3}, TypeError, "name must be a str"),
        ({"create": 1}, TypeError, "create must be a bool or None"),
        ({"generation": 5}, ValueError, "generation is for create=False"),
        ({"create": False, "generation": 0}, ValueError, "generation is 0"),
        ({"create": False}, ValueError, "there is no shared pool at"),
        ({"layers": 3}, ValueError, "not a multiple"),
        ({"num_blocks": 1 << 31, "slot_nbytes": MIB}, MemoryError, "do not fit|can address"),
    ],
)
def test_wrong_arguments(
    device: kvswap.Device, name: str, arguments: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        SharedPool(**{"name": name, "num_blocks": 4, "slot_nbytes": 4096, "device": device, **arguments})
    assert not path_of(name).exists()


def test_more_than_there_is_room_for(device: kvswap.Device, name: str) -> None:
    """Found before anything is allocated."""
    start, room = time.monotonic(), os.statvfs(FOLDER)
    nbytes = room.f_bavail * room.f_frsize + (1 << 30)
    with pytest.raises(MemoryError, match="do not fit"):
        SharedPool(name, nbytes // MIB, MIB, device=device, reserve=-(1 << 50))
    assert time.monotonic() - start < AT_ONCE


def test_words(device: kvswap.Device, name: str) -> None:
    with SharedPool(name, 8, 4096, device=device) as pool:
        assert not pool.published(np.arange(8)).any()
        assert pool.claim([1, 2]).tolist() == [True, True]
        assert pool.claim(np.array([2, 3], np.int32)).tolist() == [False, True]
        pool.publish([1, 2])
        assert pool.published([0, 1, 2, 3]).tolist() == [False, True, True, False]
        pool.wait_ready([1, 2], timeout=0)
        with pytest.raises(TimeoutError, match=rf"blocks\[1\] = 3 .* process {os.getpid()} is writing it"):
            pool.wait_ready([1, 3], timeout=0.01)
        with pytest.raises(TimeoutError, match=r"blocks\[0\] = 7 was not published in time; nobody claimed it"):
            pool.wait_ready([7], timeout=0.1)
        pool.retract([1])
        assert not pool.published([1])[0] and pool.claim([1])[0]
        for call in (pool.publish, pool.retract, pool.claim, pool.published, pool.wait_ready):
            for wrong in ([0, 8], [-1]):
                with pytest.raises(IndexError, match=r"blocks\[\d\] is (8|-1); the pool has 8 blocks, 0 to 7"):
                    call(wrong)
        assert not pool.published([0])[0]


# -- several processes ------------------------------------------------------------------------------------------------

JOIN = """
pool = SharedPool(name, 64, 65536, device=device, create=False)
say("joined")
"""


def test_what_one_writes_the_other_reads(device: kvswap.Device, device_name: str, name: str, start: Start) -> None:
    """By transfers of their devices, in both directions, one block after the other."""
    pool = SharedPool(name, 64, 65536, device=device)
    reader = start(
        JOIN
        + """
assert pool.pinned and not pool.owner and pool.owner_alive
gpu = device.alloc(65536)
for block in range(64):
    pool.wait_ready([block], timeout=30)
    kvswap.swap_cache_per_layer(gpu, pool, 65536, 1, 64, [0], [block], 1, device=device)
    kvswap.swap_cache_per_layer(gpu, pool, 65536, 1, 64, [0], [63 - block], 0, device=device) if block >= 32 else None
say(int(pool.layer(0)[0, 0]))
pool.close()
""",
        on=device_name,
    )
    assert reader.line() == "joined"
    gpu = Buffer(device, 65536)
    for block in range(64):
        gpu.put(np.full(65536, block + 1, np.uint8))
        assert pool.claim([block])[0]
        kvswap.swap_cache_per_layer(gpu.ptr, pool, 65536, 1, 64, [0], [block], 0, device=device)
        pool.publish([block])
    assert reader.line() == "64"
    reader.end()
    expected = np.maximum(np.arange(64), np.arange(64)[::-1]) + 1  # the reader wrote the first half anew
    assert (pool.layer(0) == expected[:, None]).all()
    gc.collect()
    pool.close()


def test_waiting_in_another_process(device: kvswap.Device, name: str, start: Start) -> None:
    pool = SharedPool(name, 64, 65536, device=device)
    waiter = start(
        JOIN
        + """
begin = time.monotonic()
try:
    pool.wait_ready([3], timeout=0.2)
except TimeoutError:
    say("late", 0.15 < time.monotonic() - begin < 20)
pool.wait_ready([3, 4, 5], timeout=60)
say("woken", time.monotonic())
"""
    )
    waiter.line()
    assert waiter.line() == "late True"
    pool.publish([5, 3])
    time.sleep(0.1)
    told = time.monotonic()
    pool.publish([4])
    word, when = waiter.line().split()
    assert word == "woken" and float(when) - told < AT_ONCE
    waiter.end()
    pool.close()


def test_one_writer_of_many(device: kvswap.Device, name: str, start: Start) -> None:
    """Eight processes claim all blocks: each block is one's."""
    pool = SharedPool(name, 64, 65536, device=device)
    claimers = [
        start(
            JOIN
            + """
heard()
order = np.random.default_rng(os.getpid()).permutation(64)
mine = np.concatenate([order[i : i + 1][pool.claim(order[i : i + 1])] for i in range(64)])
pool.layer(0)[mine] = os.getpid() % 251
pool.publish(mine)
say(*mine)
heard()
"""
        )
        for _ in range(4)
    ]
    for claimer in claimers:
        assert claimer.line() == "joined"
    for claimer in claimers:
        claimer.tell()
    pool.wait_ready(np.arange(64), timeout=PATIENCE)
    for claimer in claimers:
        claimer.tell()
    theirs = [(claimer.popen.pid, [int(word) for word in claimer.end().split()]) for claimer in claimers]
    assert sorted(block for _, blocks in theirs for block in blocks) == list(range(64))
    for pid, blocks in theirs:
        assert (pool.layer(0)[blocks] == pid % 251).all()
    gc.collect()
    pool.close()


def test_what_is_claimed_meanwhile_is_not_published(
    device: kvswap.Device, name: str, start: Start, tmp_path: Path
) -> None:
    """One process publishes and retracts long lists; what another one claims among them stays that one's."""
    blocks, enough = 4096, tmp_path / "enough"
    pool = SharedPool(name, blocks, 4096, device=device)
    claimer = start(
        f"""
pool = SharedPool(name, {blocks}, 4096, device=device, create=False)
say("joined")
heard()
last, won = [{blocks - 1}], 0
end = time.monotonic() + 60
while not (won and os.path.exists({str(enough)!r})) and time.monotonic() < end:
    if not pool.claim(last)[0]:
        continue
    won += 1
    for _ in range(20):
        assert not pool.published(last)[0], "published by another process while this one wrote it"
    pool.retract(last)
say(won)
pool.close()
"""
    )
    assert claimer.line() == "joined"
    claimer.tell()
    every = np.arange(blocks)
    refused, turns, there = 0, 0, False
    while claimer.popen.poll() is None:
        turns += 1
        if refused >= 3 and turns >= 50:
            enough.touch()
        for call in (pool.publish, pool.retract):
            try:
                call(every)
                there = call == pool.publish
            except ValueError as error:
                assert f"= {blocks - 1} is being written by process {claimer.popen.pid}" in str(error)
                refused += 1
            assert (pool.published(every[:-1]) == there).all()  # all of them, or none
    assert int(claimer.line()) > 0 and refused > 0
    claimer.end()
    pool.close()


def test_a_list_that_is_written_to_meanwhile(device: kvswap.Device, name: str, start: Start) -> None:
    """What was asked for counts, not what the caller's array becomes while another thread waits for it."""
    waiter = start(
        """
import threading
pool = SharedPool(name, 8, 4096, device=device)
blocks = np.array([2, 3])
done = []
thread = threading.Thread(target=lambda: (pool.wait_ready(blocks, timeout=30), done.append(True)))
thread.start()
time.sleep(0.1)
blocks[:] = 1 << 40
pool.publish([2, 3])
thread.join(30)
say(done)
pool.close()
"""
    )
    assert waiter.line() == "[True]"
    waiter.end()


def test_a_writer_is_not_taken_for_dead_when_no_files_can_be_opened(
    device: kvswap.Device, name: str, start: Start
) -> None:
    """When a process was born is read from a file."""
    pool = SharedPool(name, 64, 65536, device=device)
    writer = start(JOIN + "pool.claim([7])\nsay('writing')\nheard()")
    assert [writer.line(), writer.line()] == ["joined", "writing"]
    with no_more_files():
        assert not pool.claim([7])[0]
        assert pool.claim([8])[0]
        with pytest.raises(ValueError, match="7 is being written by process"):
            pool.retract([7])
        with pytest.raises(TimeoutError):
            pool.wait_ready([7], timeout=0.05)
    writer.tell()
    writer.end()
    assert pool.claim([7])[0]
    pool.close()


def test_a_writer_that_dies(device: kvswap.Device, name: str, start: Start) -> None:
    pool = SharedPool(name, 64, 65536, device=device)
    writer = start(JOIN + "pool.claim([7, 8])\npool.publish([8])\nsay('writing')\nheard()")
    writer.line()
    assert writer.line() == "writing"
    with pytest.raises(ValueError, match=rf"blocks\[1\] = 7 is being written by process {writer.popen.pid}"):
        pool.publish([6, 7])
    assert not pool.published([6])[0]
    assert not pool.claim([7])[0]
    killer = threading.Timer(0.2, writer.kill)
    killer.start()
    with pytest.raises(kvswap.Error, match="died while it wrote block 7"):
        pool.wait_ready([8, 7], timeout=PATIENCE)
    killer.join()
    assert pool.claim([7, 8]).tolist() == [True, False]
    pool.publish([7])
    pool.wait_ready([7, 8])
    pool.close()


@pytest.mark.parametrize("create", [True, None])
def test_creators_that_race(name: str, start: Start, create: bool | None) -> None:
    """One makes it; the others join, or are told who has it."""
    racers = [
        start(
            f"""
            say("up")
            heard()
            try:
                pool = SharedPool(name, 16, 65536, device=device, create={create})
                say("owner" if pool.owner else "joined", pool.generation)
            except ValueError as error:
                say("refused", "exists already" in str(error))
            heard()
            """
        )
        for _ in range(4)
    ]
    for racer in racers:
        racer.line()
    for racer in racers:
        racer.tell()
    answers = [racer.line().split() for racer in racers]
    assert sorted(answer[0] for answer in answers) == sorted(["owner"] + 3 * ["refused" if create else "joined"])
    if create is None:
        assert len({answer[1] for answer in answers}) == 1
    for racer in racers:
        racer.tell()
        racer.end()


def test_replacing_a_stale_one_in_a_race(device: kvswap.Device, name: str, start: Start) -> None:
    """A process never removes a pool that another one has just created under the same name."""
    for _ in range(5):
        dead = start("pool = SharedPool(name, 16, 65536, device=device)\nsay('up')\nheard()")
        dead.line()
        racers = [
            start(
                """
                say("up")
                heard()
                pool = SharedPool(name, 16, 65536, device=device, create=None)
                say(pool.generation)
                heard()
                """
            )
            for _ in range(3)
        ]
        for racer in racers:
            racer.line()
        dead.kill()
        for racer in racers:
            racer.tell()
        assert len({racer.line() for racer in racers}) == 1
        for racer in racers:
            racer.tell()
            racer.end()


# -- who is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_blocks": 65}, "num_blocks is 64, and 65 was asked for"),
        ({"slot_nbytes": 65536 * 2}, "slot_nbytes is 65536, and 131072 was asked for"),
        ({"layers": 2}, "layers is 1, and 2 was asked for"),
        ({"layout": "layer-first"}, "layout"),
        ({"generation": 12345}, "generation is .*, and 12345 was asked for"),
    ],
)
def test_another_geometry(device: kvswap.Device, name: str, change: dict[str, object], text: str) -> None:
    with SharedPool(name, 64, 65536, device=device) as pool:
        options = {"num_blocks": 64, "slot_nbytes": 65536, "device": device, "create": False, **change}
        with pytest.raises(ValueError, match=f"is another pool: its {text}"):
            SharedPool(name, **options)
        SharedPool(name, 64, 65536, device=device, create=False, generation=pool.generation).close()
        assert path_of(name).exists()


def test_another_version(device: kvswap.Device, name: str) -> None:
    with SharedPool(name, 4, 4096, device=device):
        rewrite(name, VERSION_AT, struct.pack("<I", 99))
        with pytest.raises(ValueError, match="format 99, this one has"):
            SharedPool(name, 4, 4096, device=device, create=False)


def test_words_that_lie_elsewhere(device: kvswap.Device, name: str) -> None:
    """Offsets in a header that lead beyond the file are refused."""
    pool = SharedPool(name, 16, 65536, device=device)
    right = path_of(name).read_bytes()[WORDS_AT : WORDS_AT + 8]
    assert struct.unpack("<Q", right)[0] == PAGE
    for wrong in (0, 2 * PAGE, 1 << 40):
        rewrite(name, WORDS_AT, struct.pack("<Q", wrong))
        with pytest.raises(ValueError, match=f"words_offset is {wrong}, and {PAGE} was asked for"):
            SharedPool(name, 16, 65536, device=device, create=False)
    rewrite(name, WORDS_AT, right)
    pool.close()


def test_a_shorter_file(device: kvswap.Device, name: str) -> None:
    """A header that promises more than the file has would be a SIGBUS later."""
    with SharedPool(name, 4, 4096, device=device) as pool:
        os.truncate(path_of(name), pool.mapped_nbytes)
        with pytest.raises(ValueError, match="its length is 16384"):
            SharedPool(name, 4, 4096, device=device, create=False)
        os.truncate(path_of(name), pool.mapped_nbytes + 2 * PAGE)


def test_somebody_elses_file(device: kvswap.Device, name: str) -> None:
    for text in (b"", b"something else", bytes(4096)):
        path_of(name).write_bytes(text)
        path_of(name).chmod(0o600)
        for create in (True, False, None):
            with pytest.raises(ValueError, match=r"is no shared pool of kvswap"):
                SharedPool(name, 4, 4096, device=device, create=create)
        assert clean(name) == [] and path_of(name).exists()
        path_of(name).unlink()
    path_of(name).symlink_to("/etc/passwd")
    with pytest.raises(kvswap.Error, match="cannot be opened"):
        SharedPool(name, 4, 4096, device=device, create=False)
    path_of(name).unlink()


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


ODD: dict[str, Callable[[Path], object]] = {
    "pipe": lambda path: os.mkfifo(path, 0o600),
    "directory": Path.mkdir,
    "dangling link": lambda path: path.symlink_to("/nonexistent"),
    "socket": make_socket,
}


@pytest.mark.parametrize("odd", ODD)
def test_what_is_no_file(device: kvswap.Device, name: str, odd: str) -> None:
    """Any user can put it there: it is refused at once, and stays."""
    path = path_of(name)
    ODD[odd](path)
    for create in (True, False, None):
        with pytest.raises(kvswap.Error, match=rf"{name} (is no file|cannot be opened)"):
            SharedPool(name, 4, 4096, device=device, create=create)
    assert clean(name) == [] and os.path.lexists(path)
    path.rmdir() if odd == "directory" else path.unlink()


@pytest.mark.parametrize("word", [1, 12345, 0x7FFFFFFF, 0x80000001, 0xFFFFFFFF])
def test_words_of_any_value(device: kvswap.Device, name: str, word: int) -> None:
    """Another process may write them: they are a process's or none's, and lead nowhere."""
    with SharedPool(name, 4, 4096, device=device) as pool:
        with open(path_of(name), "r+b") as file:
            file.seek(PAGE)
            file.write(struct.pack("<4I", *[word] * 4))
        with pytest.raises(kvswap.Error, match="died while it wrote block 3"):
            pool.wait_ready([3], timeout=PATIENCE)
        assert pool.claim([0]).tolist() == [True] and pool.published([0, 1]).tolist() == [False, False]
        pool.publish([0, 1])
        pool.retract([2])
        assert pool.published([0, 1, 2]).tolist() == [True, True, False]
        assert pool.claim([2]).tolist() == [True]


def test_one_that_others_may_open(device: kvswap.Device, name: str) -> None:
    with SharedPool(name, 4, 4096, device=device):
        path_of(name).chmod(0o666)
        with pytest.raises(kvswap.Error, match="can be opened by other users"):
            SharedPool(name, 4, 4096, device=device, create=False)


def test_another_pid_namespace(device: kvswap.Device, name: str) -> None:
    with SharedPool(name, 4, 4096, device=device):
        rewrite(name, SPACE_AT, struct.pack("<Q", 1))
        rewrite(name, PID_AT, struct.pack("<q", 2**22 + 5))
        for create in (True, False, None):
            with pytest.raises(kvswap.Error, match="another pid namespace"):
                SharedPool(name, 4, 4096, device=device, create=create)
        assert clean(name) == []


def test_a_second_user(device: kvswap.Device, name: str, start: Start) -> None:
    if os.geteuid() != 0:
        cannot("only root can become another user")
    become = "os.setgroups([])\nos.setgid(65534)\nos.setuid(65534)\n"
    code = """
    try:
        SharedPool(name, 4, 4096, device=device, create={create})
        say("opened")
    except kvswap.Error as error:
        say("refused", "belongs to" in str(error))
    """
    with SharedPool(name, 4, 4096, device=device):
        for create in (True, False, None):
            other = start(become + textwrap.dedent(code.format(create=create)))
            assert other.line() == "refused True"
            other.end()
    theirs = start(become + "pool = SharedPool(name, 4, 4096, device=device)\nsay('up')\nheard()")
    assert theirs.line() == "up"
    with pytest.raises(kvswap.Error, match="belongs to user 65534, and only memory of one's own user is trusted"):
        SharedPool(name, 4, 4096, device=device, create=False)
    theirs.tell()
    theirs.end()


# -- what is left behind ----------------------------------------------------------------------------------------------

ROOM = os.statvfs(FOLDER)
LARGE = max(4, min(256, ROOM.f_bavail * ROOM.f_frsize // (4 * MIB)))  # blocks of 1 MiB, where there is room for them
CREATE = f"pool = SharedPool(name, {LARGE}, 1 << 20, device=device, chunk_nbytes={LARGE // 4} << 20"
MOMENTS = {
    "created": f"say('up')\n{CREATE}, wait=False)\nheard()",
    "populating": f"{CREATE}, wait=False, threads=1)\nsay('up')\nheard()",
    "registering": (
        "with testing.fault(device, 'call', 'delay', operation='host_register', every=1, delay=60):\n"
        f"    {CREATE}, wait=False)\n    say('up')\n    heard()"
    ),
    "used": (
        f"{CREATE})\ngpu = device.alloc(1 << 20)\nsay('up')\n"
        f"while True:\n    kvswap.swap_cache_per_layer(gpu, pool, 1 << 20, 1, {LARGE}, [0], [3], 0, device=device)"
    ),
}


@pytest.mark.parametrize("pause", [0.0, 0.03, 0.1])
@pytest.mark.parametrize("moment", MOMENTS)
def test_kill(device: kvswap.Device, device_name: str, name: str, start: Start, moment: str, pause: float) -> None:
    """kill -9 in the middle of it: the next start makes the same pool, and nothing is left of the old one."""
    if device.kind != "host" and pause != 0.03:
        pytest.skip("one pause is enough where a driver takes seconds to come up")
    process = start(MOMENTS[moment], on=device_name)
    assert process.line() == "up"
    time.sleep(pause)
    process.kill()
    if path_of(name).exists():
        told = rf"process {process.popen.pid} left behind when it died|there is no shared pool"  # others clean too
        with pytest.raises(ValueError, match=told):
            SharedPool(name, LARGE, MIB, device=device, create=False)
    with SharedPool(name, LARGE, MIB, device=device) as pool:
        assert not np.asarray(pool)[:: 64 * 1024].any()
        assert pool.owner and not pool.published(np.arange(LARGE)).any()
        gc.collect()
    assert segments() == 0 and not path_of(name).exists()


def test_joiners_outlive_their_owner(device: kvswap.Device, name: str, start: Start) -> None:
    owner = start("pool = SharedPool(name, 8, 4096, device=device)\nnp.asarray(pool)[:] = 9\nsay('up')\nheard()")
    owner.line()
    joined = SharedPool(name, 8, 4096, device=device, create=False)
    owner.kill()
    assert not joined.owner_alive
    assert (np.asarray(joined) == 9).all()
    gc.collect()
    with SharedPool(name, 8, 4096, device=device, create=None) as anew:
        assert anew.owner and anew.generation != joined.generation and not np.asarray(anew).any()
        assert (np.asarray(joined) == 9).all()
        gc.collect()
    joined.close()


def test_clean(device: kvswap.Device, name: str, start: Start) -> None:
    for _ in range(10):  # until no other process of the machine that creates a pool cleans them first
        processes = [
            start(f"pool = SharedPool(name + '-{i}', 8, 4096, device=device)\nsay('up')\nheard()") for i in range(3)
        ]
        for process in processes:
            process.line()
        assert clean(name) == []
        for process in processes[:2]:
            process.kill()
        cleaned = clean(name)
        assert not any(path_of(f"{name}-{i}").exists() for i in range(2))
        assert clean(name) == [] and path_of(f"{name}-2").exists()
        if cleaned == [f"{name}-0", f"{name}-1"]:
            break
        processes[2].kill()
    assert cleaned == [f"{name}-0", f"{name}-1"]
    processes[2].kill()
    SharedPool(name, 8, 4096, device=device).close()  # creating a pool removes those of ended processes first
    assert not path_of(f"{name}-2").exists()


def make_unlocked(pool: SharedPool, name: str, start: int, space: int | None = None) -> None:
    """The file of an older kvswap, whose owner this process is; it holds no lock."""
    header = bytearray(Path(pool.path).read_bytes())
    header[VERSION_AT : VERSION_AT + 4] = struct.pack("<I", 1)
    header[START_AT : START_AT + 8] = struct.pack("<Q", start)
    if space is not None:
        header[SPACE_AT : SPACE_AT + 8] = struct.pack("<Q", space)
    path_of(name).write_bytes(header)
    path_of(name).chmod(0o600)


def test_an_owner_without_a_lock(device: kvswap.Device, name: str) -> None:
    """Of older versions: the pid and the start time say whether it lives, where pids mean anything."""
    with SharedPool(name, 8, 4096, device=device) as pool:
        old, own_start = f"{name}-old", struct.unpack("<Q", path_of(name).read_bytes()[START_AT : START_AT + 8])[0]
        make_unlocked(pool, old, own_start)
        assert clean(name) == []
        with pytest.raises(ValueError, match="exists already, and process"):
            SharedPool(old, 8, 4096, device=device)
        with pytest.raises(ValueError, match="another version of kvswap"):
            SharedPool(old, 8, 4096, device=device, create=False)
        make_unlocked(pool, old, 1, space=1)
        assert clean(name) == []
        for create in (True, False, None):
            with pytest.raises(kvswap.Error, match="made by an older kvswap in another pid namespace"):
                SharedPool(old, 8, 4096, device=device, create=create)
        make_unlocked(pool, old, 1)  # the pid is another process's by now
        with SharedPool(old, 8, 4096, device=device) as anew:
            assert anew.owner
        assert path_of(name).exists()


def test_a_live_owner_whatever_the_header_says(device: kvswap.Device, name: str) -> None:
    with SharedPool(name, 8, 4096, device=device):
        rewrite(name, START_AT, struct.pack("<Q", 1))
        assert clean(name) == []
        with pytest.raises(ValueError, match="exists already"):
            SharedPool(name, 8, 4096, device=device)


def test_somebody_who_is_removing_it_and_does_not_go_on(device: kvswap.Device, name: str, start: Start) -> None:
    """A process that was stopped in the middle of it, say: the wait for its lock ends."""
    owner = start("pool = SharedPool(name, 8, 4096, device=device)\nsay('up')\nheard()")
    owner.line()
    with path_of(name).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # first: what is left behind is removed by any process that creates a pool
        owner.kill()
        assert clean(name) == []
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match="does not go on"):
            SharedPool(name, 8, 4096, device=device)
        assert time.monotonic() - begin < AT_ONCE
    SharedPool(name, 8, 4096, device=device).close()


def test_a_process_that_ends_without_closing(device_name: str, name: str, start: Start) -> None:
    process = start(
        "import builtins\nbuiltins.kept = SharedPool(name, 8, 4096, device=device)\nsay(os.path.exists(kept.path))",
        on=device_name,
    )
    assert process.line() == "True"
    process.end()
    assert not path_of(name).exists()


def test_a_forked_child_does_not_take_it_away(device_name: str, name: str, start: Start) -> None:
    process = start(
        """
        pool = SharedPool(name, 8, 4096, device=device)
        child = os.fork()
        if child == 0:
            try:
                pool.close()
            except kvswap.Error as error:
                say("fork" in str(error))
            try:
                pool.publish([0])
            except kvswap.Error as error:
                say("fork" in str(error))
            del pool
            sys.exit(0)
        os.waitpid(child, 0)
        say(os.path.exists(pool.path))
        """,
        on=device_name,
    )
    assert [process.line() for _ in range(3)] == ["True", "True", "True"]
    process.end()


def test_a_forked_child_has_pools_of_its_own(name: str, start: Start) -> None:
    """Whatever threads of its parent were doing with theirs when it was forked."""
    process = start(
        """
        import signal, threading
        pool = SharedPool(name, 4096, 4096, device=device)
        def use():
            while not done:
                pool.publish(np.arange(4096))
                pool.retract(np.arange(4096))
        def make():
            while not done:
                SharedPool(name + "-made", 1, 4096, device=device, register=False).close()
        done, threads = False, [threading.Thread(target=work) for work in (use, make)]
        for thread in threads:
            thread.start()
        for _ in range(10):
            time.sleep(0.01)
            child = os.fork()
            if child == 0:
                signal.alarm(10)
                with SharedPool(name + "-child", 8, 4096, device=kvswap.Device("host:1")) as own:
                    own.publish([1])
                    assert own.published([1])[0]
                os._exit(0)
            say(os.waitpid(child, 0)[1])
        done = True
        """
    )
    assert [process.line() for _ in range(10)] == 10 * ["0"]
    process.end()


LIVING = {  # children that outlive their owner; each prints its pid
    "forked": "child = os.fork()\nif child == 0:\n    time.sleep(600)\n    os._exit(0)\nsay(child)",
    "forked and executed": (
        "child = os.fork()\nif child == 0:\n    os.execlp('sleep', 'sleep', '600')\n    os._exit(0)\nsay(child)"
    ),
    "executed by vfork": "import subprocess\nsay(subprocess.Popen(['sleep', '600'], close_fds=False).pid)",
    "forked without handlers": (
        "import ctypes\nchild = ctypes.CDLL(None).syscall(57)\nif child == 0:\n    time.sleep(600)\nsay(child)"
    ),
}


@pytest.mark.parametrize("how", LIVING)
def test_a_living_child_of_a_dead_owner(device: kvswap.Device, name: str, start: Start, how: str) -> None:
    if how == "forked without handlers" and os.uname().machine != "x86_64":
        pytest.skip("the number of the system call is that of x86_64")
    owner = start(f"pool = SharedPool(name, 8, 4096, device=device)\n{LIVING[how]}\nheard()")
    child = int(owner.line())
    try:
        joined = SharedPool(name, 8, 4096, device=device, create=False)
        assert joined.owner_alive and clean(name) == []
        owner.popen.send_signal(signal.SIGKILL)
        owner.popen.wait(PATIENCE)
        assert not joined.owner_alive and os.kill(child, 0) is None
        with SharedPool(name, 8, 4096, device=device) as anew:
            assert anew.owner and anew.generation != joined.generation
        joined.close()
    finally:
        os.kill(child, signal.SIGKILL)
        owner.kill()


def test_an_owner_that_becomes_another_program(device: kvswap.Device, name: str, start: Start) -> None:
    """exec(): the pid and the start time stay, and the pool goes."""
    owner = start("pool = SharedPool(name, 8, 4096, device=device)\nsay('up')\nheard()\nos.execlp('cat', 'cat')")
    owner.line()
    joined = SharedPool(name, 8, 4096, device=device, create=False)
    assert joined.owner_alive
    owner.tell()
    until(lambda: Path(f"/proc/{owner.popen.pid}/comm").read_text() == "cat\n")
    until(lambda: not joined.owner_alive)  # its files close a moment later
    SharedPool(name, 8, 4096, device=device).close()
    joined.close()


def test_an_owner_that_closes_all_descriptors(device: kvswap.Device, name: str, start: Start) -> None:
    owner = start("pool = SharedPool(name, 8, 4096, device=device)\nos.closerange(3, 4096)\nsay('up')\nheard()")
    assert owner.line() == "up"
    assert clean(name) == []
    with pytest.raises(ValueError, match="exists already"):
        SharedPool(name, 8, 4096, device=device)
    owner.tell()
    owner.end()


def test_forks_while_pools_are_made(device_name: str, name: str, start: Start) -> None:
    """No child has the lock of a pool that a thread of its parent is just making."""
    process = start(
        """
        import threading
        made, done = [], False
        def make():
            for i in range(200):
                made.append(SharedPool(f"{name}-{i}", 1, 4096, device=device, register=False))
        thread = threading.Thread(target=make)
        thread.start()
        children = []
        while thread.is_alive() and len(children) < 100:
            child = os.fork()
            if child == 0:
                time.sleep(600)
            children.append(child)
            time.sleep(0.001)
        thread.join()
        say(len(children), *children)
        heard()
        """
    )
    children = [int(word) for word in process.line().split()][1:]
    try:
        process.popen.send_signal(signal.SIGKILL)
        process.popen.wait(PATIENCE)
        clean(name)
        assert list(FOLDER.glob(f"kvswap.{name}-*")) == []
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        process.kill()


@pytest.mark.slow
def test_no_leak(device: kvswap.Device, name: str) -> None:
    """Open and close, as owner and as joiner, 200 times; fewer on a GPU, where registering takes its time."""

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE

    def mappings() -> int:
        """Of shared memory; of anonymous memory threads keep addresses, for as many arenas as they were at once."""
        return sum(
            "/dev/shm/" in line or "/memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines()
        )

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def cycle() -> None:
        with (
            SharedPool(name, 16, 65536, device=device, chunk_nbytes=65536) as pool,
            SharedPool(name, 16, 65536, device=device, create=False) as joined,
        ):
            pool.claim([1])
            pool.publish([1])
            joined.wait_ready([1])
            joined.layer(0)[1] = 3
            assert mappings() > mapped

    mapped = mappings()
    for _ in range(20):
        cycle()
    before, files = resident(), descriptors()
    for _ in range(200 if device.kind == "host" else 40):
        cycle()
    assert resident() - before < (40 if SANITIZED else 2) * MIB
    assert comes_down(mappings, mapped) and comes_down(descriptors, files) and comes_down(segments, 0)


def test_closing_while_another_thread_waits(device: kvswap.Device, name: str) -> None:
    """The thread is told; no crash."""
    pool = SharedPool(name, 8, 4096, device=device)
    told: list[Exception] = []

    def wait() -> None:
        try:
            pool.wait_ready([3], timeout=PATIENCE)
        except Exception as error:
            told.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    pool.close()
    thread.join(PATIENCE)
    assert len(told) == 1 and "closed" in str(told[0])


def test_threads_that_use_it_while_it_closes(device: kvswap.Device, name: str) -> None:
    """Each thread gets an answer or an error, and none hangs or crashes."""
    for _ in range(20):
        pool, wrong = SharedPool(name, 64, 4096, device=device), []

        def use(pool: SharedPool = pool, wrong: list[Exception] = wrong) -> None:
            while True:
                try:
                    pool.publish(np.flatnonzero(pool.claim(np.arange(64))))
                    pool.wait_ready(np.arange(64), timeout=PATIENCE)
                    assert pool.published([5])[0] and pool.owner
                except kvswap.Error:
                    return
                except Exception as error:
                    wrong.append(error)
                    return

        threads = [threading.Thread(target=use) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.01)
        pool.close()
        for thread in threads:
            thread.join(PATIENCE)
        assert wrong == []


def test_population_that_fails(device: kvswap.Device, name: str) -> None:
    """The memory is not to be had after all: an error for who waits, and nothing but closing is left to do."""
    owner = SharedPool(name, 8, MIB, device=device)
    with testing.fault(device, "call", "delay", operation="host_register", delay=PATIENCE):
        joined = SharedPool(name, 8, MIB, device=device, create=False, chunk_nbytes=MIB, threads=1, wait=False)
        os.truncate(path_of(name), 4 * MIB)  # as if what lies behind could not be had
    with pytest.raises(MemoryError, match="no memory left for the next"):
        joined.wait(PATIENCE)
    assert joined.state == "failed" and not joined.pinned and not joined.ready(7)
    with pytest.raises(MemoryError):
        joined.wait(PATIENCE)
    joined.close()
    owner.close()


def test_it_keeps_its_size(device: kvswap.Device, name: str) -> None:
    with SharedPool(name, 8, 4096, device=device) as pool:
        assert not hasattr(pool, "grow") and not hasattr(pool, "shrink")


@pytest.mark.parametrize("pages", ["2MiB", "1GiB"])
def test_pages_that_shared_memory_has_not(device: kvswap.Device, name: str, pages: str) -> None:
    with SharedPool(name, 8, 4096, device=device, pages=pages) as pool:
        assert any("no pages of 2 MiB or 1 GiB set aside" in notice for notice in pool.notices)


def test_a_chunk_that_will_not_register(device: kvswap.Device, name: str) -> None:
    with testing.fault(device, "call", "fail", operation="host_register", nth=2):
        pool = SharedPool(name, 64, 65536, device=device, chunk_nbytes=1 << 20)
    assert not pool.pinned and any("pageable" in notice for notice in pool.notices)
    other = SharedPool(name, 64, 65536, device=device, create=False)
    assert other.pinned
    other.close()
    pool.close()
