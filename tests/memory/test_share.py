"""Links shared by processes: every byte of loads and stores; members that are late, break the rules or are killed."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import mmap
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Buffer, Gate, elsewhere, of_threads, sums, until

import kvswap
from kvswap import info, share, testing
from kvswap._top_socket import prepare_folder, start_time
from kvswap.codecs import Coding
from kvswap.memory import SharedPool
from kvswap.share import _meet

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")

KIB = 1 << 10
LAYERS, PAGE, BLOCKS = 3, 4 * KIB, 400
BLOCK = LAYERS * PAGE
PIECE = 8 * BLOCK
names = iter(range(1 << 20))

MEMBER = """
import json, sys
import kvswap
from kvswap import share
from kvswap.codecs import Coding
from kvswap.memory import SharedPool
given = json.loads(sys.argv[1])
device = kvswap.Device(given["device"])
page, layers = given["block"] // given["layers"], given["layers"]
codec, _, kind = (given["codec"] or "").partition(":")
coding = Coding(page, codec, fields=[(0, page, kind or "bf16")]) if codec else None
part = coding.coded_nbytes if coding else page
memory = SharedPool(given["name"], given["blocks"], layers * part, create=False, layers=layers, device=device)
buffers = [device.alloc(given["blocks"] * page) for _ in range(given["layers"])]
pools = []
for buffer in buffers:
    pools.append(kvswap.Pool(device, buffer.ptr, given["blocks"], page, **({"group": pools[0]} if pools else {})))
member = share.join(given["name"], given["rank"], memory, pools, coding=coding, **given["options"])
for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
member.close(30)
"""


def bf16(rng: Any, shape: tuple[int, ...]) -> Any:
    """Normal values, as bytes."""
    values = rng.standard_normal(shape, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


class Other:
    """A member in a process of its own, which evaluates lines."""

    source = MEMBER

    def __init__(self, name: str, rank: int, layers: int = LAYERS, blocks: int = BLOCKS, block: int = BLOCK,
                 codec: str | None = None, bad: Sequence[int] = (), device: str | None = None,
                 **options: Any) -> None:  # fmt: skip
        given = {
            "name": name,
            "rank": rank,
            "device": device or f"host:{rank}",
            "layers": layers,
            "blocks": blocks,
            "block": block,
            "codec": codec,
            "bad": list(bad),
        }
        given["options"] = {"piece_nbytes": PIECE, **options}
        self.popen = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", self.source, json.dumps(given)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **elsewhere(),
        )  # fmt: skip

    def say(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()

    def hear(self) -> Any:
        assert self.popen.stdout is not None
        return json.loads(self.popen.stdout.readline())

    def ask(self, line: str) -> Any:
        self.say(line)
        return self.hear()

    def stop(self, how: int = signal.SIGKILL) -> None:
        self.popen.send_signal(how)
        if how == signal.SIGSTOP:
            os.waitid(os.P_PID, self.popen.pid, os.WSTOPPED | os.WNOWAIT)

    def end(self) -> int:
        self.popen.communicate(timeout=PATIENCE)
        return self.popen.returncode


class Here:
    """The member under test, in this process: its blocks on both sides, and what they should hold."""

    def __init__(
        self, name: str, layers: int = LAYERS, blocks: int = BLOCKS, block: int = BLOCK, codec: str | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        self.name, self.layers, self.blocks, self.page = name, layers, blocks, block // layers
        self.coding = None if codec is None else Coding(self.page, codec)
        self.device = kvswap.Device("host:0")
        slot = block if self.coding is None else layers * self.coding.coded_nbytes
        self.memory = SharedPool(name, blocks, slot, layers=layers, device=self.device)
        self.buffers = [Buffer(self.device, blocks * self.page) for _ in range(layers)]
        self.pools: list[kvswap.Pool] = []
        for buffer in self.buffers:
            group: Any = {"group": self.pools[0]} if self.pools else {}
            self.pools.append(kvswap.Pool(self.device, buffer.ptr, blocks, self.page, **group))
        self.rng = np.random.default_rng(blocks)
        self.options = {"piece_nbytes": PIECE, "stall": 10.0, **options}
        self.hosts = share._pools_of(self.memory, [self.coding] * layers)
        self.member = share.join(name, 0, self.memory, self.pools, host=self.hosts, **self.options)
        self.fill()

    def fill(self) -> None:
        for layer in range(self.layers):
            self.memory.layer(layer)[:] = self.on_host(self.content())
            self.buffers[layer].put(self.content().ravel())

    def content(self) -> Any:
        """New blocks of a layer, which every codec can hold."""
        if self.coding is None:
            return self.rng.integers(0, 256, (self.blocks, self.page), dtype=np.uint8)
        return bf16(self.rng, (self.blocks, self.page // 2))

    def on_host(self, blocks: Any) -> Any:
        """Blocks of a layer as the host has them."""
        return blocks if self.coding is None else self.coding.encode(blocks)[0]

    def on_gpu(self, blocks: Any) -> Any:
        return blocks if self.coding is None else self.coding.decode(blocks)[0]

    def gpu(self, layer: int) -> Any:
        return self.buffers[layer].get().reshape(self.blocks, self.page)

    def ids(self, count: int) -> tuple[Any, Any]:
        return self.rng.permutation(self.blocks)[:count], self.rng.permutation(self.blocks)[:count]

    def check_load(self, count: int, during: Callable[[], object] = lambda: None) -> share.ShareTransfer:
        host, gpu = self.ids(count)
        wanted = [self.gpu(layer).copy() for layer in range(self.layers)]
        for layer in range(self.layers):
            wanted[layer][gpu] = self.on_gpu(self.memory.layer(layer)[host])
        transfer = self.member.load(host, gpu)
        during()
        transfer.wait(PATIENCE)
        assert all(np.array_equal(self.gpu(layer), wanted[layer]) for layer in range(self.layers))
        return transfer

    def check_store(self, count: int, during: Callable[[], object] = lambda: None) -> share.ShareTransfer:
        host, gpu = self.ids(count)
        wanted = [self.memory.layer(layer).copy() for layer in range(self.layers)]
        for layer in range(self.layers):
            wanted[layer][host] = self.on_host(self.gpu(layer)[gpu])
        transfer = self.member.store(gpu, host)
        during()
        transfer.wait(PATIENCE)
        assert all(np.array_equal(self.memory.layer(layer), wanted[layer]) for layer in range(self.layers))
        return transfer

    def close(self) -> None:
        self.member.close(PATIENCE)
        self.pools, self.hosts = [], ()
        self.memory.close(PATIENCE, force=True)


@pytest.fixture
def name() -> str:
    return f"share{os.getpid()}.{next(names)}"


@pytest.fixture
def here(name: str) -> Iterator[Here]:
    one = Here(name)
    yield one
    one.close()


@pytest.fixture
def other(here: Here) -> Iterator[Other]:
    one = Other(here.name, 1)
    here.member.wait_peers([1], PATIENCE)
    yield one
    one.stop(signal.SIGCONT)
    one.stop()
    one.end()


# -- right bytes -------------------------------------------------------------------------------------------------------


def test_others_bring_a_share_of_each_load_and_store(here: Here, other: Other) -> None:
    by_others, before = [0, 0], here.device.stats()
    for count in (BLOCKS, 1, 7, 8, 9, 100, BLOCKS, 0, 333):
        by_others[0] += here.check_load(count).by_others
        by_others[1] += here.check_store(count).by_others
    assert all(by_others)
    mine, theirs = here.member.stats(), other.ask("member.stats()")
    assert [mine["brought_by_others_h2d"], mine["brought_by_others_d2h"]] == by_others
    assert [theirs["brought_for_others_h2d"], theirs["brought_for_others_d2h"]] == by_others
    lent = other.ask("[device.stats()['lent_bytes_h2d'], device.stats()['lent_bytes_d2h']]")
    assert lent == by_others  # what monitoring reads
    after = here.device.stats()
    assert [after["borrowed_bytes_h2d"] - before["borrowed_bytes_h2d"], after["borrowed_bytes_d2h"] -
            before["borrowed_bytes_d2h"]] == by_others  # fmt: skip
    assert mine["pieces_late"] == mine["answers_dropped"] == mine["links_lost"] == 0
    assert here.member.peers == (1,)


@pytest.mark.parametrize(
    ("layers", "page", "blocks", "piece"), [(1, 1000, 300, 4000), (5, 24, 2000, 9000), (2, 70001, 40, 1)]
)
def test_any_form(name: str, layers: int, page: int, blocks: int, piece: int) -> None:
    """Sizes that are no multiple of anything, and pieces of one block."""
    form: dict[str, Any] = {"layers": layers, "blocks": blocks, "block": layers * page, "piece_nbytes": piece}
    here = Here(name, **form)
    other = Other(name, 1, **form)
    here.member.wait_peers([1], PATIENCE)
    until(lambda: here.check_load(blocks).by_others > 0)
    until(lambda: here.check_store(blocks).by_others > 0)
    here.close()
    other.end()


def test_several_at_once(here: Here, other: Other) -> None:
    """Jobs of both directions from several threads, over disjoint blocks."""
    host, gpu = here.ids(BLOCKS)
    wanted_gpu = [here.gpu(layer).copy() for layer in range(LAYERS)]
    wanted_host = [here.memory.layer(layer).copy() for layer in range(LAYERS)]
    parts = np.array_split(np.arange(BLOCKS), 8)
    for i, part in enumerate(parts):
        for layer in range(LAYERS):
            if i % 2:
                wanted_gpu[layer][gpu[part]] = here.memory.layer(layer)[host[part]]
            else:
                wanted_host[layer][host[part]] = here.gpu(layer)[gpu[part]]

    def run(i: int) -> None:
        if i % 2:
            here.member.load(host[parts[i]], gpu[parts[i]]).wait(PATIENCE)
        else:
            here.member.store(gpu[parts[i]], host[parts[i]]).wait(PATIENCE)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    for layer in range(LAYERS):
        assert np.array_equal(here.gpu(layer), wanted_gpu[layer])
        assert np.array_equal(here.memory.layer(layer), wanted_host[layer])


def test_three_members(here: Here, other: Other) -> None:
    third = Other(here.name, 2)
    here.member.wait_peers([1, 2], PATIENCE)
    brought = "[member.stats()[f'brought_for_others_{way}'] for way in ('h2d', 'd2h')]"
    while not all(all(each.ask(brought)) for each in (other, third)):  # on a busy machine one may come too late
        here.check_load(BLOCKS)
        here.check_store(BLOCKS)
    assert other.ask("member.peers") == [0, 2]
    third.end()
    until(lambda: here.member.peers == (1,))
    assert here.member.stats()["links_lost"] == 0


def test_one_that_lends_nothing_is_asked_nothing(name: str) -> None:
    here, other = Here(name), Other(name, 1, lend=False)
    here.member.wait_peers([1], PATIENCE)
    assert here.check_load(BLOCKS).by_others == here.check_store(BLOCKS).by_others == 0
    here.close()
    other.end()


@pytest.mark.parametrize("loads", [False, True])
def test_a_lender_that_copies_itself_brings_nothing(here: Here, other: Other, loads: bool) -> None:
    """In the direction in which it does, and no part of a store while it loads."""

    def brought(call: str) -> int:
        return other.ask(f"[job := member.{call}(range(300), range(300)), job.wait({PATIENCE}), job.by_others][2]")

    held = kvswap.Stream(here.device)
    sides = (here.hosts, here.pools) if loads else (here.pools, here.hosts)
    with Gate(here.device) as gate:
        gate.hold(held)
        own = kvswap.move_blocks(*sides, [399], [399], stream=held)
        assert brought("store") == 0
        if loads:
            assert brought("load") == 0
        else:
            until(lambda: brought("load"))
        gate.open()
        own.wait(PATIENCE)
    until(lambda: brought("store") and brought("load"))


def test_alone_all_comes_over_the_own_link(here: Here) -> None:
    assert here.check_load(BLOCKS).by_others == here.check_store(BLOCKS).by_others == 0
    assert here.member.peers == ()


def test_the_time_before_it_begins_is_not_its_own(here: Here) -> None:
    """As of an engine's store, which begins after the step that computes its blocks."""
    stream, held = kvswap.Stream(here.device), 0.05

    def measured_without() -> bool:
        with Gate(here.device) as gate:
            gate.hold(stream)
            begin = time.monotonic()
            store = here.member.store([1, 2], [3, 4], after=stream)
            time.sleep(held)
            gate.open()
            store.wait(PATIENCE)
        assert store.elapsed is not None and store.elapsed >= 0
        return store.elapsed < time.monotonic() - begin - held / 2

    until(measured_without)


def test_it_looks_less_often_while_the_model_runs(here: Here) -> None:
    """Each look is a call to the driver, whose locks the model's launches take."""

    if not Path("/proc/self/schedstat").exists():
        pytest.skip("the kernel does not say how long a thread ran")

    def on_the_processor() -> float:
        """Seconds of the members' threads."""
        found = [stat for name, stat in of_threads("comm", "schedstat") if name == "kvswap-share"]
        return sum(int(stat.split()[0]) for stat in found) / 1e9

    stream = kvswap.Stream(here.device)
    with Gate(here.device) as gate:
        gate.hold(stream)
        store = here.member.store([1, 2], [3, 4], after=stream)
        before, begin = on_the_processor(), time.monotonic()
        time.sleep(0.1)
        used, took = on_the_processor() - before, time.monotonic() - begin
        gate.open()
        store.wait(PATIENCE)
    assert 0 < used < took / 2


def test_a_transfer_says_what_it_is(here: Here) -> None:
    transfer = here.member.load([1, 2], [3, 4])
    transfer.wait(PATIENCE)
    assert transfer.done() and transfer.error is None and transfer.state == "done"
    assert (transfer.direction, transfer.num_blocks, transfer.nbytes) == ("H2D", 2, 2 * BLOCK)
    assert repr(transfer) == "<kvswap.share.ShareTransfer load of 2 blocks, done>"
    assert transfer.cancel() is False and transfer.failed_positions.size == 0
    with pytest.raises(IndexError, match=r"host_ids\[1\] is 400; the pool has 400 blocks, 0 to 399"):
        here.member.load([1, 400], [3, 4])
    with pytest.raises(IndexError, match=r"gpu_ids\[0\] is -1"):
        here.member.store([-1], [3])
    with pytest.raises(ValueError, match=r"gpu_ids\[1\] is 3, which is named before"):
        here.member.load([1, 2], [3, 3])
    with pytest.raises(ValueError, match="host_ids has 1 ids and gpu_ids 2"):
        here.member.load([1], [3, 4])


# -- members that come and go ------------------------------------------------------------------------------------------


def test_a_rank_is_taken_once(here: Here, other: Other) -> None:
    with pytest.raises(kvswap.Error, match="another process has rank 1 of group"):
        share.join(here.name, 1, here.memory, here.pools, host=here.hosts)


def test_it_comes_again_after_it_was_killed(here: Here, other: Other) -> None:
    other.stop()
    other.end()
    until(lambda: here.member.peers == ())
    again = Other(here.name, 1)
    here.member.wait_peers([1], PATIENCE)
    here.check_load(BLOCKS)
    here.check_store(BLOCKS)
    assert here.member.stats()["links_lost"] == 1
    assert again.end() == 0


def test_one_that_nothing_refers_to_leaves_when_its_process_ends(here: Here, other: Other) -> None:
    """It stays until then: also beside a device that was opened later, whose end comes first."""
    socket = prepare_folder() / f"share-{here.name}.1.sock"
    other.ask("[globals().update(later=kvswap.Device('host:5')), globals().pop('member'), 1][2]")
    assert socket.exists()
    other.stop(signal.SIGINT)
    assert other.popen.wait(PATIENCE) != 0  # KeyboardInterrupt: its last line, member.close(), is not reached
    assert not socket.exists()


def test_others_of_another_form_stay_apart(here: Here, caplog: pytest.LogCaptureFixture) -> None:
    other = Other(here.name, 1, piece_nbytes=2 * PIECE)
    until(lambda: "it has another shared pool, or pieces of another size" in caplog.text)
    assert here.member.peers == ()
    other.stop()
    other.end()


@pytest.mark.parametrize("seed", range(12))
def test_killed_at_any_time(here: Here, seed: int) -> None:
    """Whatever the other was doing: all blocks are right, soon."""
    chance = random.Random(seed)
    other = Other(here.name, 1)
    here.member.wait_peers([1], PATIENCE)
    killer = threading.Timer(chance.random() * 0.05, other.stop)
    begin = time.monotonic()
    killer.start()
    while here.member.peers or time.monotonic() < begin + 0.1:
        here.check_load(chance.randrange(BLOCKS)), here.check_store(chance.randrange(BLOCKS))
        assert time.monotonic() < begin + PATIENCE
    other.end()
    here.check_load(BLOCKS), here.check_store(BLOCKS)


@pytest.fixture
def hasty(name: str) -> Iterator[Here]:
    one = Here(name, stall=0.2)
    yield one
    one.close()


def test_a_load_goes_on_without_one_that_has_stopped(hasty: Here) -> None:
    other = Other(hasty.name, 1)
    hasty.member.wait_peers([1], PATIENCE)
    other.stop(signal.SIGSTOP)
    hasty.check_load(BLOCKS)
    assert hasty.member.stats()["pieces_late"] > 0
    other.stop(signal.SIGCONT)
    until(lambda: hasty.check_load(BLOCKS).by_others > 0)
    assert other.end() == 0


@pytest.mark.parametrize("how", [signal.SIGCONT, signal.SIGKILL])
def test_a_store_ends_when_one_that_has_stopped_writes_no_more(hasty: Here, how: int) -> None:
    other = Other(hasty.name, 1)
    hasty.member.wait_peers([1], PATIENCE)
    other.stop(signal.SIGSTOP)

    host, gpu = hasty.ids(BLOCKS)
    transfer = hasty.member.store(gpu, host)
    with pytest.raises(TimeoutError):
        transfer.wait(1.0)
    other.stop(how)
    transfer.wait(PATIENCE)
    assert all(np.array_equal(hasty.memory.layer(layer)[host], hasty.gpu(layer)[gpu]) for layer in range(LAYERS))
    assert other.end() == (0 if how == signal.SIGCONT else -signal.SIGKILL)


def test_its_forked_child_keeps_no_link(here: Here, other: Other) -> None:
    """The child holds the socket of a member that was killed."""
    child = other.ask("__import__('os').fork() or __import__('time').sleep(600)")
    other.stop()
    until(lambda: here.member.peers == ())
    os.kill(child, signal.SIGKILL)
    here.check_load(BLOCKS), here.check_store(BLOCKS)


FAULT = "globals().update(f=__import__('kvswap.testing').testing.fault(device, 'call', {}, operation={}, every={}))"


@pytest.mark.parametrize(("operation", "every"), [("copy", 3), ("copy_batch", 2), ("event_record", 5)])
def test_what_a_lenders_driver_refuses(here: Here, other: Other, operation: str, every: int) -> None:
    other.ask(FAULT.format("'fail'", repr(operation), every))
    other.ask("f.__enter__()")
    for _ in range(6):
        here.check_load(BLOCKS), here.check_store(BLOCKS)
        time.sleep(0.25)  # it is asked again
    assert here.member.peers == (1,)


def test_a_lender_loses_its_device(here: Here, other: Other) -> None:
    other.ask(FAULT.format("'lose'", "'copy'", 3))
    other.ask("f.__enter__()")
    for _ in range(6):
        here.check_load(BLOCKS), here.check_store(BLOCKS)
        time.sleep(0.25)
    other.stop()


@pytest.mark.parametrize(("operation", "every"), [("launch", 3), ("copy_batch", 2), ("event_record", 7)])
def test_what_the_own_driver_refuses(here: Here, other: Other, operation: str, every: int) -> None:
    """A block is right, or it is named."""
    for _ in range(6):
        host, gpu = here.ids(BLOCKS)
        with testing.fault(here.device, "call", "fail", operation=operation, every=every):
            transfer = here.member.load(host, gpu)
            until(transfer.done)
        right = np.setdiff1d(np.arange(BLOCKS), transfer.failed_positions)
        assert (transfer.error is None) == (right.size == BLOCKS)
        for layer in range(LAYERS):
            assert np.array_equal(here.gpu(layer)[gpu[right]], here.memory.layer(layer)[host[right]])
    here.check_load(BLOCKS), here.check_store(BLOCKS)


def test_a_failure_is_the_jobs_alone(here: Here) -> None:
    """The pools do not pass it on: others write the same blocks, of which this process's pools know nothing."""
    host, gpu = np.arange(BLOCKS), np.arange(BLOCKS)[::-1].copy()
    with testing.fault(here.device, "copy", "fail", nth=1, every=1):
        for transfer in (here.member.load(host, gpu), here.member.store(gpu, host)):
            until(transfer.done)
            assert transfer.failed_positions.size == BLOCKS
    here.fill()
    store = here.member.store(gpu, host)
    store.wait(PATIENCE)
    assert all(np.array_equal(here.memory.layer(layer)[host], here.gpu(layer)[gpu]) for layer in range(LAYERS))
    here.member.load(host, gpu).wait(PATIENCE)


def test_it_starts_after_a_stream(here: Here) -> None:
    stream = kvswap.Stream(here.device)
    new = here.rng.integers(0, 256, 40 * PAGE, dtype=np.uint8)
    testing.delay(here.device, 0.3, stream)
    kvswap.swap_blocks_batch([new.ctypes.data], [here.buffers[0].ptr], [new.size], stream=stream, device=here.device)
    here.member.store(np.arange(40), np.arange(40), after=stream).wait(PATIENCE)
    assert np.array_equal(here.memory.layer(0)[:40].ravel(), new)
    with pytest.raises(TypeError, match="after must be a stream"):
        here.member.load([1], [1], after="stream")


def test_a_lender_closes_its_pool(here: Here, other: Other) -> None:
    """Closing waits for what it brings; then it brings nothing."""
    closing = threading.Timer(0.02, other.ask, args=["memory.close(30, force=True)"])
    closing.start()
    while closing.is_alive():
        here.check_load(BLOCKS), here.check_store(BLOCKS)
    time.sleep(0.25)
    assert here.check_load(BLOCKS).by_others == here.check_store(BLOCKS).by_others == 0
    assert here.member.peers == (1,)


def test_closing_ends_what_has_begun(here: Here, other: Other) -> None:
    transfers = [here.member.load(*here.ids(BLOCKS)) for _ in range(3)]
    here.member.close(PATIENCE)
    assert all(transfer.done() for transfer in transfers)
    for transfer in transfers:
        assert transfer.error is None or (
            transfer.failed_positions.size and "the member was closed" in str(transfer.error)
        )
    with pytest.raises(kvswap.Error, match="the member is closed"):
        here.member.load([1], [1])
    here.member.close(0)


# -- one that breaks the rules -----------------------------------------------------------------------------------------

_MESSAGE = struct.Struct("<IHHIiIIIIQQ")
_MAGIC, TAKE, DROP, DONE, BYE, BUSY = 0x3153564B, 1, 2, 3, 4, 6


class Rogue:
    """Rank 1 of the group, by hand: it has the socket, and the receive slots that the member has for it."""

    def __init__(self, here: Here) -> None:
        path = here.memory.path.encode()
        block, blocks, slot, *_ = here.member._core.form()
        self.slot_nbytes, self.block, self.here = slot, block, here
        hello = _meet._HELLO.pack(
            _meet._MAGIC, 1, 4, os.getpid(), start_time(os.getpid()).encode(), True, here.memory.generation, blocks,
            block, slot, path,
        )  # fmt: skip
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(str(prepare_folder() / f"share-{here.name}.0.sock"))
        nbytes = -(-4 * slot // 65536) * 65536
        fd = os.memfd_create("slots", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        socket.send_fds(self.socket, [hello], [fd])
        os.close(fd)
        _, fds, _, _ = socket.recv_fds(self.socket, 1000, 4)
        self.slots = mmap.mmap(fds[0], nbytes)
        os.close(fds[0])
        here.member.wait_peers([1], PATIENCE)

    def hear(self) -> tuple[int, int, int, int, list[int]]:
        """kind, slot, generation, direction, ids"""
        data = self.socket.recv(8192)
        magic, kind, slot, generation, _, direction, count, *_ = _MESSAGE.unpack_from(data)
        assert magic == _MAGIC
        return kind, slot, generation, direction, list(struct.unpack_from(f"<{count}I", data, _MESSAGE.size))

    def quiet(self) -> bool:
        return not select.select([self.socket], [], [], 0.05)[0]

    def say(self, kind: int, slot: int = 0, generation: int = 0, status: int = 0, count: int = 0, ids: bytes = b"",
            magic: int = _MAGIC, direction: int = 1) -> None:  # fmt: skip
        self.socket.send(_MESSAGE.pack(magic, kind, slot, generation, status, direction, count, 0, 0, 0, 0) + ids)

    def bring(self, slot: int, direction: int, ids: list[int], junk: bool = False) -> None:
        """What a bringer's copies do."""
        for i, block in enumerate(ids):
            at = slot * self.slot_nbytes + i * self.block
            host = memoryview(self.here.memory).cast("B")[block * self.block : (block + 1) * self.block]
            if direction == 1:
                self.slots[at : at + self.block] = os.urandom(self.block) if junk else bytes(host)
            else:
                host[:] = self.slots[at : at + self.block]

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def rogue(here: Here) -> Iterator[Rogue]:
    one = Rogue(here)
    yield one
    one.close()


def serve(rogue: Rogue, chance: random.Random, left: Callable[[], bool]) -> None:
    """Answers in any order, after a while, with copies of earlier answers in between, and junk in slots before the
    right bytes: what is announced too early, or taken for another use of the slot, is noticed."""
    asked: list[tuple[int, int, int, list[int]]] = []
    old: list[tuple[int, int]] = []
    while left() or asked:
        while not rogue.quiet():
            kind, slot, generation, direction, ids = rogue.hear()
            if kind != TAKE:
                continue
            rogue.bring(slot, direction, ids if direction == 1 else [], junk=True)
            asked.append((slot, generation, direction, ids))
        for slot, generation in chance.sample(old, min(2, len(old))):
            if not any(one[0] == slot and one[1] == generation for one in asked):
                rogue.say(DONE, slot, generation)
        if not asked:
            continue
        slot, generation, direction, ids = asked.pop(chance.randrange(len(asked)))
        rogue.bring(slot, direction, ids)
        rogue.say(DONE, slot, generation)
        old.append((slot, generation))


@pytest.mark.parametrize("seed", range(4))
def test_answers_late_in_any_order_and_again(here: Here, rogue: Rogue, seed: int) -> None:
    chance = random.Random(seed)
    done = threading.Event()
    thread = threading.Thread(target=serve, args=(rogue, chance, lambda: not done.is_set()))
    thread.start()
    try:
        for _ in range(3):
            here.check_load(BLOCKS), here.check_store(BLOCKS)
    finally:
        done.set()
        thread.join(PATIENCE)
    assert here.member.stats()["answers_dropped"] > 0 and here.member.stats()["links_lost"] == 0


FOUR = 12 * 8  # blocks: the own link begins with 8 pieces, and 4 are asked of the other
CANCELLED = -14


def asked_for(rogue: Rogue) -> list[tuple[int, int, int, list[int]]]:
    """The next four TAKEs; recalled pieces count as begun."""
    takes: list[tuple[int, int, int, list[int]]] = []
    while len(takes) < 4:
        kind, *rest = rogue.hear()
        if kind == TAKE:
            takes.append((rest[0], rest[1], rest[2], rest[3]))
    return takes


def answer(rogue: Rogue, take: tuple[int, int, int, list[int]], brought: bool) -> None:
    slot, generation, direction, ids = take
    if brought:
        rogue.bring(slot, direction, ids)
    rogue.say(DONE, slot, generation, 0 if brought else CANCELLED)


@pytest.mark.parametrize("old_at", range(5))
def test_all_answers_in_all_orders(here: Here, rogue: Rogue, old_at: int) -> None:
    """Each of four pieces is brought or not, in each order, with an old answer for its slot in between."""
    dropped = 0
    for order in itertools.permutations(range(4)):
        for brought in itertools.product((True, False), repeat=4):

            def other_side(order: Any = order, brought: Any = brought) -> None:
                takes = asked_for(rogue)
                for take in takes:
                    rogue.bring(take[0], 1, take[3], junk=True)
                for turn, piece in enumerate(order):
                    if turn == old_at:
                        rogue.say(DONE, takes[piece][0], takes[piece][1] - 1)
                    answer(rogue, takes[piece], brought[piece])
                if old_at == 4:
                    rogue.say(DONE, takes[0][0], takes[0][1] - 1)

            transfer = here.check_load(FOUR, other_side)
            assert transfer.by_others == 8 * BLOCK * sum(brought)
            dropped += 1
    until(lambda: here.member.stats()["answers_dropped"] == dropped)
    assert here.member.stats()["pieces_late"] == here.member.stats()["links_lost"] == 0


def most_asked(here: Here, rogue: Rogue, store: bool, busy: int, told: list[int]) -> int:
    """Pieces that are on their way at once, while the other member is busy in these directions. All come."""
    most, takes = 0, []

    def other_side() -> None:
        nonlocal most
        while not rogue.quiet():
            kind, *take = rogue.hear()
            if kind == TAKE:
                takes.append(take)
            elif kind == BUSY:
                told.append(take[2])
        most = max(most, len(takes))
        while takes:
            answer(rogue, takes.pop(), True)

    done = threading.Event()
    thread = threading.Thread(target=lambda: [other_side() for _ in iter(done.is_set, True)])
    rogue.say(BUSY, direction=busy)
    try:
        (here.check_store if store else here.check_load)(BLOCKS, thread.start)
    finally:
        done.set()
        thread.join(PATIENCE)
        other_side()
    return most


LOADS, STORES = 2, 1  # bits of BUSY


@pytest.mark.parametrize(
    ("store", "busy", "reached", "pieces"),
    [
        (False, 0, {"h2d": 1.9}, 4),
        (False, 0, {"h2d": 1.5}, 2),
        (False, 0, {"h2d": 1.05}, 0),
        (True, 0, {"d2h": 1.5, "h2d": 1.05}, 2),
        (False, LOADS, {"h2d": 3.0}, 2),  # a link is left, and two members have the same right to it
        (False, LOADS, {"h2d": 2.05}, 0),
        (False, STORES, {"h2d": 1.9, "d2h": 1.0, "both": 1.9}, 4),
        (True, LOADS, {"both": 2.9}, 0),
        (True, LOADS, {"both": 3.2}, 4),
    ],
)
def test_no_more_is_asked_than_the_host_reaches(
    here: Here, rogue: Rogue, store: bool, busy: int, reached: dict[str, float], pieces: int
) -> None:
    found: list[int] = []
    told: list[int] = []
    with sums(here.device, **reached):

        def asks() -> bool:
            found.append(most_asked(here, rogue, store, busy, told))
            return found[-1] == pieces

        until(asks, "pieces on their way")
    assert max(found) == pieces
    own = [STORES if store else LOADS, 0]
    assert told[-2:] == (own if pieces else told and own), "a job that begins and ends in one round is not told"
    assert here.member.peers == (1,)


def test_a_member_that_does_not_read_is_told_no_more(here: Here, rogue: Rogue) -> None:
    """Its link stays. Once it has said something, it is told the latest."""
    stream = kvswap.Stream(here.device)
    with sums(here.device, h2d=1), Gate(here.device) as gate:
        for _ in range(15):  # each is told twice, unless it ends before the thread has seen it
            gate.hold(stream)
            load = here.member.load(range(9), range(9), after=stream)
            time.sleep(0.003)
            gate.open()
            load.wait(PATIENCE)
            gate.close()
        told = 0
        while not rogue.quiet():
            told += rogue.hear()[0] == BUSY
        assert told <= 16 and here.member.peers == (1,)
        rogue.say(BUSY)
        until(lambda: here.check_load(BLOCKS).done() and not rogue.quiet(), "it is told again")
        assert rogue.hear()[0] == BUSY


@pytest.mark.parametrize("store", [False, True])
def test_each_set_of_pieces_may_be_late(name: str, store: bool) -> None:
    """Late pieces touch no block of a load. A store ends when they have been answered for."""
    here = Here(name, stall=0.05)
    rogue = Rogue(here)
    for late in itertools.product((True, False), repeat=4):
        takes: list[tuple[int, int, int, list[int]]] = []
        late_before = here.member.stats()["pieces_late"]

        def other_side(late: Any = late, takes: Any = takes) -> None:
            takes += asked_for(rogue)
            for take, is_late in zip(takes, late, strict=True):
                if not is_late:
                    answer(rogue, take, True)
            if store:
                time.sleep(0.1)
                for take, is_late in zip(takes, late, strict=True):
                    if is_late:
                        answer(rogue, take, True)

        transfer = here.check_store(FOUR, other_side) if store else here.check_load(FOUR, other_side)
        were_late = here.member.stats()["pieces_late"] - late_before  # on a busy machine others, too
        assert transfer.by_others == 8 * BLOCK * (4 - were_late) and (store or were_late >= sum(late))
        if not store:
            before = [here.gpu(layer).copy() for layer in range(LAYERS)]
            for take, is_late in zip(takes, late, strict=True):
                if is_late:
                    rogue.bring(take[0], 1, take[3], junk=True)
                    rogue.say(DONE, take[0], take[1])
            assert all(np.array_equal(here.gpu(layer), before[layer]) for layer in range(LAYERS))
        time.sleep(0.21)  # it is asked again
    rogue.close()
    here.close()


def test_a_late_slot_is_not_used_before_the_answer(hasty: Here) -> None:
    """Pieces that come after their limit touch no block, and their slots wait for the answer."""
    here, rogue = hasty, Rogue(hasty)
    here.check_load(BLOCKS)
    asked = []
    while not rogue.quiet():
        asked.append(rogue.hear())
    takes = [one for one in asked if one[0] == TAKE]
    assert len(takes) == 4 and {one[0] for one in asked} == {TAKE, DROP}
    time.sleep(0.25)
    here.check_load(BLOCKS)
    assert rogue.quiet()  # it has no free slot
    for _, slot, generation, direction, ids in takes:
        rogue.bring(slot, direction, ids, junk=True)
        rogue.say(DONE, slot, generation)
    until(lambda: not here.member.load(*here.ids(BLOCKS)).wait(PATIENCE) and not rogue.quiet())
    kinds = rogue.hear()
    assert kinds[0] == TAKE and all(one[1:3] != kinds[1:3] for one in takes)
    rogue.close()


@pytest.mark.parametrize(
    "message",
    [
        {"kind": 9},
        {"kind": TAKE, "magic": 1},
        {"kind": TAKE, "count": 1, "ids": b""},
        {"kind": TAKE, "count": 1, "ids": struct.pack("<I", BLOCKS)},
        {"kind": TAKE, "count": 0},
        {"kind": TAKE, "count": 2000, "ids": bytes(8000)},
        {"kind": TAKE, "count": 9, "ids": bytes(36)},
        {"kind": TAKE, "count": 1, "slot": 4, "ids": bytes(4)},
        {"kind": TAKE, "count": 1, "direction": 2, "ids": bytes(4)},
        {"kind": DONE, "slot": 4},
    ],
    ids=str,
)
def test_a_message_of_a_wrong_form_ends_the_link(here: Here, rogue: Rogue, message: dict[str, Any]) -> None:
    rogue.say(**message)
    until(lambda: here.member.peers == ())
    here.check_load(BLOCKS), here.check_store(BLOCKS)
    assert here.member.stats()["links_lost"] == 1


def test_a_failed_piece_comes_over_the_own_link(here: Here, rogue: Rogue) -> None:
    def refuse() -> None:
        for _ in range(4):
            kind, slot, generation, *_ = rogue.hear()
            assert kind == TAKE
            rogue.say(DONE, slot, generation, status=-8)

    assert here.check_load(BLOCKS, refuse).by_others == 0


# -- shared loads and stores -------------------------------------------------------------------------------------------

SHARED = """
import numpy as np
def content():  # of all layers, block by block
    flat = [np.empty(given["blocks"] * page, np.uint8) for _ in buffers]
    for buffer, array in zip(buffers, flat):
        kvswap.swap_blocks_batch([buffer.ptr], [array.ctypes.data], array.nbytes, device=device).wait(30)
    return np.stack([array.reshape(-1, page) for array in flat], 1)
def wanted(ids):
    stored = [memory.layer(i)[ids] for i in range(layers)]
    return np.stack([coding.decode(each)[0] if coding else each for each in stored], 1)
def load(seed, **how):
    rng = np.random.default_rng(seed)
    host = rng.permutation(given["blocks"])[: given["blocks"] * 3 // 4]
    gpu = np.random.default_rng([seed, given["rank"]]).permutation(given["blocks"])[: len(host)]
    global transfer
    transfer = member.load(host, gpu, **how)
    try:
        transfer.wait(30)
    except kvswap.Error:
        if not coding:
            raise
    failed = transfer.failed_positions
    right = np.setdiff1d(np.arange(len(host)), failed)
    good = bool((content()[gpu[right]] == wanted(host[right])).all()) and failed.tolist() == unreadable(host)
    return [good, transfer.by_others, transfer.nbytes]
def unreadable(ids):  # positions of what no coder has written, or what did not fit
    bad = np.zeros(len(ids), bool)
    for layer in range(layers if coding else 0):
        bad |= coding.decode(memory.layer(layer)[ids])[1] != 0
    return np.flatnonzero(bad).tolist()
def fill(seed):  # the same on each rank
    rng, shape = np.random.default_rng(seed), (given["blocks"], layers, page)
    data = rng.integers(0, 256, shape, dtype=np.uint8)
    if coding:  # a bf16 of an exponent that each codec holds, and blocks that `exact` does not hold
        data.view(np.uint16)[:] = data.view(np.uint16) & 0x807F | 0x3F80
        if not coding.lossless:
            data = coding.decode(coding.encode(data.reshape(-1, page))[0])[0].reshape(shape)
        for block in given["bad"]:
            data[block] = rng.integers(0, 256, shape[1:], dtype=np.uint8)
    for i, buffer in enumerate(buffers):
        array = np.ascontiguousarray(data[:, i])
        kvswap.swap_blocks_batch([array.ctypes.data], [buffer.ptr], array.nbytes, device=device).wait(30)
    return data
def store(seed, wrong=False, **how):
    data, rng = fill(seed), np.random.default_rng(seed)
    gpu, host = (rng.permutation(given["blocks"])[: given["blocks"] * 3 // 4] for _ in range(2))
    global transfer
    transfer = member.store(gpu, host[::-1] if wrong else host, **how)
    try:
        transfer.wait(30)
        why = None
    except kvswap.Error as error:
        why = str(error)
    right = np.setdiff1d(np.arange(len(gpu)), transfer.failed_positions)
    return [bool((wanted(host[right]) == data[gpu[right]]).all()), transfer.failed_positions.tolist(), why]
"""


class Rank(Other):
    """A member that makes shared loads and stores."""

    source = MEMBER.replace("for line in", SHARED + "for line in")


def all_ask(members: list[Rank], *lines: str) -> list[Any]:
    for member, line in zip(members, lines * len(members), strict=False):
        member.say(line)
    return [member.hear() for member in members]


@contextlib.contextmanager
def three_ranks(name: str, **options: Any) -> Iterator[list[Rank]]:
    members = [Rank(name, rank, **options) for rank in range(3)]
    for member in members:
        assert member.ask("member.wait_peers([0, 1, 2], 60)") is None
    yield members
    for member in members:
        member.stop()
        member.end()


@pytest.fixture
def ranks(name: str) -> Iterator[list[Rank]]:
    memory = SharedPool(name, BLOCKS, BLOCK, layers=LAYERS, device=kvswap.Device("host:0"))
    rng = np.random.default_rng(5)
    for layer in range(LAYERS):
        memory.layer(layer)[:] = rng.integers(0, 256, (BLOCKS, PAGE), dtype=np.uint8)
    with three_ranks(name, stall=10.0, share_wait=5.0, store_wait=20.0) as members:
        yield members
    memory.close(PATIENCE, force=True)


def test_each_brings_a_part_and_takes_the_others(ranks: list[Rank]) -> None:
    for seed in range(3):
        found = all_ask(ranks, f"load({seed}, shared='one', generation={seed})")
        assert all(right for right, _, _ in found)
        assert all(by_others > 0 for _, by_others, _ in found)
    stats = [member.ask("member.stats()") for member in ranks]
    assert sum(one["passed_on"] for one in stats) == sum(one["brought_by_others_h2d"] for one in stats)
    assert all(one["pieces_late"] == one["links_lost"] == 0 for one in stats)


def test_one_that_does_not_call_is_not_waited_for(name: str) -> None:
    with SharedPool(name, BLOCKS, BLOCK, layers=LAYERS, device=kvswap.Device("host:0")):
        members = [Rank(name, rank, stall=10.0, share_wait=0.05) for rank in range(2)]
        for member in members:
            member.ask("member.wait_peers([0, 1], 60)")
        right, by_others, _ = members[0].ask("load(1, shared='x')")
        assert right and by_others == 0
        assert members[1].ask("load(1, shared='x')")[0]  # later, alone
        for member in members:
            assert member.end() == 0


def test_one_that_has_finished_answers_at_once(name: str) -> None:
    """Its call does not come again: another one that is later has its pieces from the host, and waits for nothing."""
    with SharedPool(name, BLOCKS, BLOCK, layers=LAYERS, device=kvswap.Device("host:0")):
        members = [Rank(name, rank, stall=PATIENCE, share_wait=wait) for rank, wait in enumerate((PATIENCE, 0.05))]
        for member in members:
            member.ask("member.wait_peers([0, 1], 60)")
        for member in members:  # within 30 seconds
            right, by_others, _ = member.ask("load(1, shared='x', generation=7)")
            assert right and by_others == 0
        for member in members:
            assert member.end() == 0


def test_ranks_that_disagree_load_alone(ranks: list[Rank]) -> None:
    found = all_ask(ranks, *(f"load({rank}, shared='two')" for rank in range(3)))
    assert all(right and by_others == 0 for right, by_others, _ in found)
    found = all_ask(ranks, *(f"load(3, shared='three', ranks={[0, 1] if rank < 2 else [0, 2]})" for rank in range(3)))
    assert all(right for right, _, _ in found)


def test_a_store_is_written_once_in_parts(ranks: list[Rank]) -> None:
    before = [member.ask("member.stats()") for member in ranks]
    for seed in range(3):
        found = all_ask(ranks, f"store({seed}, shared='s', generation={seed})")
        assert found == [[True, [], None]] * 3
    written = [member.ask("device.stats()['bytes_d2h']") for member in ranks]
    assert sum(written) < 3 * 2 * BLOCKS * BLOCK + 3 * BLOCKS * BLOCK  # content() is not asked for here
    assert [member.ask("member.stats()") for member in ranks] == before


def test_a_block_that_one_did_not_store_is_stored_for_none(ranks: list[Rank]) -> None:
    """One calls with other ids; then one does not call."""
    found = all_ask(ranks, "store(1, shared='t')", "store(1, shared='t')", "store(1, True, shared='t')")
    pieces = np.arange(BLOCKS * 3 // 4) // 8 % 3
    for rank in (0, 1):
        assert found[rank][1] == np.flatnonzero(pieces == 2).tolist()
        assert "rank 2 did not store its part" in found[rank][2]
    assert found[2][1] == np.flatnonzero(pieces != 2).tolist()
    ranks[2].stop()
    for rank in (0, 1):
        ranks[rank].say("store(2, shared='u', ranks=[0, 1, 2])")
    for rank in (0, 1):
        assert ranks[rank].hear()[:2] == [True, np.flatnonzero(pieces == 2).tolist()]


@pytest.mark.parametrize("seed", range(2))
def test_killed_during_a_shared_load(ranks: list[Rank], seed: int) -> None:
    for turn in range(3):
        for member in ranks:
            member.say(f"load({turn}, shared='k', generation={turn})")
        if turn == 1:
            time.sleep(random.Random(seed).random() * 0.02)
            killed = ranks.pop()
            killed.stop()
            killed.end()
        assert all(member.hear()[0] for member in ranks)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_a_group_needs(here: Here) -> None:
    with pytest.raises(IndexError, match="rank is 16; a group has ranks 0 to 15"):
        share.join(here.name, 16, here.memory, here.pools)
    with pytest.raises(ValueError, match="group is 'a/b'"):
        share.join("a/b", 1, here.memory, here.pools)
    with pytest.raises(TypeError, match="memory must be a SharedPool, not int"):
        share.join(here.name, 1, 5, here.pools)
    with pytest.raises(ValueError, match="gpu has 2 pools, and memory 3 layers"):
        share.join(here.name, 1, here.memory, here.pools[:2])
    with pytest.raises(ValueError, match="slots is 9"):
        share.join(here.name, 1, here.memory, here.pools, host=here.hosts, slots=9)
    with pytest.raises(ValueError, match="share is 0"):
        share.join(here.name, 1, here.memory, here.pools, host=here.hosts, share=0)
    with pytest.raises(ValueError, match="stall or another limit is no time in seconds"):
        share.join(here.name, 1, here.memory, here.pools, host=here.hosts, stall=0)
    with pytest.raises(TimeoutError):
        here.member.wait_peers([1], 0.05)


def test_a_pool_must_be_block_first_and_registered(name: str) -> None:
    device = kvswap.Device("host:0")
    buffer = Buffer(device, BLOCKS * PAGE)
    gpu = kvswap.Pool(device, buffer.ptr, BLOCKS, PAGE)
    for options, why in (
        ({"register": False}, "is not registered with host:0"),
        ({"layout": "layer-first"}, "block-first"),
    ):
        with SharedPool(name, BLOCKS, 2 * PAGE, layers=2, device=device, **options) as memory:
            host = kvswap.Pool(device, int(memory.layer_ptrs()[0]), BLOCKS, PAGE, stride=int(memory.layer_stride))
            with pytest.raises((ValueError, kvswap.Error), match=why):
                share.join(name, 0, memory, gpu, host=host)
            del host


def test_a_forked_child_joins_anew(here: Here, other: Other) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            here.member.load([1], [1])
        except kvswap.Error as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert b"join anew" in os.read(reader, 1000)
    os.close(reader), os.close(writer)
    here.check_load(BLOCKS)


def test_info_names_the_members(here: Here) -> None:
    def found() -> list[str]:
        return [str(group) for group in info.collect().share if group.name == here.name]

    assert found() == [f"group {here.name}: rank 0 alone, so that all comes over its own link"]
    other, third = Other(here.name, 1), Other(here.name, 2, piece_nbytes=2 * PIECE)
    here.member.wait_peers([1], PATIENCE)
    until(
        lambda: found()
        == [f"group {here.name}: ranks 0, 1, 2, 1 of 3 links: the log of each rank says what is missing"]
    )
    third.stop()
    third.end()
    until(lambda: found() == [f"group {here.name}: ranks 0, 1, each linked to all others"])
    assert "share    group " + here.name in info.collect().to_text()
    other.end()
    here.member.close(PATIENCE)
    assert found() == []


def test_the_sockets_are_this_users_only(here: Here) -> None:
    path = prepare_folder() / f"share-{here.name}.0.sock"
    assert path.stat().st_mode & 0o777 == 0o600 and Path(path.parent).stat().st_mode & 0o77 == 0
