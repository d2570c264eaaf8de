"""kvswap.remote over Mooncake's own master and nodes on loopback; skipped where Mooncake is not installed.

test_remote_calls.py has what needs no nodes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, elsewhere, random_bytes

from kvswap import Error, cli
from kvswap.files import Layout, MissingKey

pytest.importorskip("mooncake.store", reason="Mooncake is not installed: pip install mooncake-transfer-engine-non-cuda")
from mooncake_nodes import Cluster, Raw

from kvswap.remote import RemoteStore, _store

pytestmark = pytest.mark.not_sanitized("Mooncake's nodes, which no sanitizer looks at")

NBYTES = 64 << 10
LEASE = 0.6


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("mooncake"), lease=LEASE) as cluster:
        yield cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """For tests that break it."""
    with Cluster(tmp_path, lease=LEASE) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_store, "LEASE_SECONDS", LEASE)


@pytest.fixture
def layout(request: pytest.FixtureRequest) -> Layout:
    return Layout(NBYTES, test=request.node.name, time=time.time_ns())


def blocks_of(count: int, seed: int = 1) -> Any:
    return random_bytes(seed, count * NBYTES).reshape(count, -1).copy()


def keys_of(*numbers: int) -> list[bytes]:
    return [b"key %d" % number for number in numbers]


def until(what: Any, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def name_of(store: RemoteStore, key: bytes) -> str:
    epoch = store._epoch.known()
    assert epoch is not None
    return _store.names(store.identity, epoch, [key])[0]


def test_blocks_go_to_nodes_and_come_back(shared: Cluster, layout: Layout) -> None:
    blocks, found = blocks_of(40), np.full((41, NBYTES), 0xEE, np.uint8)
    keys = keys_of(*range(40))
    with RemoteStore(shared.address, layout) as store, RemoteStore(shared.address, layout) as other:
        assert store.contains(keys) == [False] * 40
        store.store(keys, blocks, range(40)).wait(PATIENCE)
        until(lambda: all(store.contains(keys)), 2.0)
        load = other.load([*keys, b"none"], found, range(41))
        with pytest.raises(MissingKey, match="on no node"):
            load.wait(PATIENCE)
        assert load.failed_positions.tolist() == [40] and load.state == "failed"
        np.testing.assert_array_equal(found[:40], blocks)
        assert (found[40] == 0xEE).all()
        assert other.contains([*keys, b"none"]) == [True] * 40 + [False]
        assert len(other.stats()["nodes"]) == 2 and set(other.stats()["nodes"].values()) == {"up"}


def test_a_key_that_comes_twice(shared: Cluster, layout: Layout) -> None:
    block, found = blocks_of(1), np.zeros((3, NBYTES), np.uint8)
    with RemoteStore(shared.address, layout) as store:
        store.store([b"k"] * 3, block, [0, 0, 0]).wait(PATIENCE)
        store.load([b"k"] * 3, found, range(3)).wait(PATIENCE)
    assert (found == block).all()


def test_long_keys_and_other_layouts_do_not_mix(shared: Cluster, layout: Layout) -> None:
    blocks, found = blocks_of(3), np.zeros((3, NBYTES), np.uint8)
    keys = [b"x" * 512, b"x" * 511, b"y" * 41]
    with RemoteStore(shared.address, layout) as store:
        store.store(keys, blocks, range(3)).wait(PATIENCE)
        store.load(keys, found, range(3)).wait(PATIENCE)
        np.testing.assert_array_equal(found, blocks)
    with RemoteStore(shared.address, Layout(NBYTES, another=1)) as other:
        assert other.contains(keys) == [False] * 3


def test_arguments(shared: Cluster, layout: Layout) -> None:
    for options, match in (
        ({"threads": 3}, "threads is 3"),
        ({"threads": 100_000}, "threads is 100000"),
        ({"timeout": 0}, "above 0"),
        ({"timeout": float("inf")}, "above 0"),
        ({"timeout": "1"}, "timeout must be a number"),
        ({"replicas": True}, "replicas is True"),
        ({"staging_nbytes": NBYTES}, "threads need"),
        ({"staging_nbytes": "64MiB"}, "staging_nbytes is '64MiB'"),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            RemoteStore(shared.address, layout, **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"kvswap\.files\.Layout, not int"):
        RemoteStore(shared.address, NBYTES)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        RemoteStore("nowhere", layout)
    with pytest.raises(Error, match="no way to the master"):
        RemoteStore("127.0.0.1:1", layout)
    with pytest.raises(Error, match="cannot use the master"):
        RemoteStore(shared.address, layout, protocol="none")
    with RemoteStore(shared.address, layout) as store:
        with pytest.raises(IndexError, match=r"ids\[0\] is 9"):
            store.store([b"k"], blocks_of(1), [9])
        with pytest.raises(TypeError, match="keys must be a sequence"):
            store.contains(b"k")
        with pytest.raises(ValueError, match=r"blocks\[1\] is a null address"):
            store.store([b"k", b"l"], [blocks_of(1).ctypes.data, 0])
        with pytest.raises(ValueError, match="overlap"):
            store.load([b"k", b"l"], blocks_of(2), [1, 1])
        with pytest.raises(ValueError, match="must be 16 bytes"):
            store.clear(identity=b"i")
        with pytest.raises(ValueError, match="address is -1"):
            store.register(-1, 10)
        for call in (store.clear, store.close, store.load([], blocks_of(1), []).wait):
            with pytest.raises(ValueError, match="timeout is -1"):
                call(timeout=-1)
    with pytest.raises(Error, match="closed"):
        store.register(store._base, 64)


# -- clear and delete --------------------------------------------------------------------------------------------------


def test_clear_is_known_everywhere_within_a_second(shared: Cluster, layout: Layout) -> None:
    blocks, found = blocks_of(4), np.zeros((4, NBYTES), np.uint8)
    keys = keys_of(*range(4))
    with RemoteStore(shared.address, layout) as store, RemoteStore(shared.address, layout) as other:
        store.store(keys, blocks, range(4)).wait(PATIENCE)
        assert all(other.contains(keys))
        store.clear()
        assert not any(store.contains(keys))
        time.sleep(1.0)
        assert not any(other.contains(keys))
        load = other.load(keys, found, range(4))
        with pytest.raises(MissingKey):
            load.wait(PATIENCE)
        assert len(load.failed_positions) == 4
        other.store(keys, blocks, range(4)).wait(PATIENCE)
        until(lambda: all(store.contains(keys)), 3.0)


def test_two_clear_at_once(shared: Cluster, layout: Layout) -> None:
    stores = [RemoteStore(shared.address, layout) for _ in range(2)]
    for round_ in range(2):
        key = [b"%d" % round_]
        stores[0].store(key, blocks_of(1), [0]).wait(PATIENCE)
        threads = [threading.Thread(target=store.clear) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        time.sleep(1.0)
        assert stores[0]._epoch.known() == stores[1]._epoch.known() is not None
        assert [store.contains(key) for store in stores] == [[False], [False]]
    for store in stores:
        store.close()


def test_a_lost_epoch_is_a_new_one(shared: Cluster, layout: Layout) -> None:
    raw = Raw(shared)
    with RemoteStore(shared.address, layout) as store:
        store.store([b"k"], blocks_of(1), [0]).wait(PATIENCE)
        before = store._epoch.known()
        assert raw.store.remove(store._epoch.name, True) == 0
        until(lambda: store._epoch.known() not in (None, before))
        assert store.contains([b"k"]) == [False]
        store.store([b"k"], blocks_of(1), [0]).wait(PATIENCE)
    raw.close()


def test_a_damaged_epoch_is_a_new_one(shared: Cluster, layout: Layout) -> None:
    raw = Raw(shared)
    with RemoteStore(shared.address, layout) as store:
        before = store._epoch.known()
        raw.flip(store._epoch.name, 70)
        until(lambda: store._epoch.known() not in (None, before))
        assert not store.stats()["epoch"]
    raw.close()


CLEARED = """
import sys, time
import numpy as np
from kvswap.files import Layout
from kvswap.remote import RemoteStore
store = RemoteStore(sys.argv[1], Layout(int(sys.argv[2]), test="stopped"))
assert store.contains([b"k"]) == [True]
print("there", flush=True)
sys.stdin.readline()
found = np.zeros(int(sys.argv[2]), np.uint8)
load = store.load([b"k"], found, [0])
while not load.done(): time.sleep(0.001)
print("found" if not len(load.failed_positions) else "missing", store.contains([b"k"]), flush=True)
store.close()
"""


def test_a_client_that_was_stopped_across_a_clear(shared: Cluster) -> None:
    layout = Layout(NBYTES, test="stopped")
    with RemoteStore(shared.address, layout) as store:
        store.store([b"k"], blocks_of(1), [0]).wait(PATIENCE)
        command = [sys.executable, "-c", CLEARED, shared.address, str(NBYTES)]
        with subprocess.Popen(
            command, **elsewhere(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdin is not None and child.stdout is not None
            assert child.stdout.readline() == "there\n"
            child.send_signal(signal.SIGSTOP)
            store.clear()
            child.send_signal(signal.SIGCONT)
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "missing [False]\n"
        assert child.returncode == 0


def test_delete_says_what_became_of_each(shared: Cluster, layout: Layout) -> None:
    keys = keys_of(1, 2)
    with RemoteStore(shared.address, layout) as store:
        store.store(keys, blocks_of(2), range(2)).wait(PATIENCE)
        assert store.contains(keys[:1]) == [True]
        assert store.delete([*keys, b"none"]) == ["leased", "removed", "absent"]
        time.sleep(LEASE + 0.1)
        assert store.delete(keys) == ["removed", "absent"]
        assert store.contains(keys) == [False, False]


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "reason"),
    [
        (0, "no_header"),
        (9, "no_header"),
        (20, "no_header"),
        (50, "no_header"),
        (64, "wrong_bytes"),
        (NBYTES + 63, "wrong_bytes"),
    ],
)
def test_a_flipped_bit_is_a_miss_and_is_repaired(shared: Cluster, layout: Layout, offset: int, reason: str) -> None:
    blocks, found = blocks_of(1), np.full((1, NBYTES), 0xEE, np.uint8)
    raw = Raw(shared)
    with RemoteStore(shared.address, layout) as store:
        store.store([b"k"], blocks, [0]).wait(PATIENCE)
        raw.flip(name_of(store, b"k"), offset)
        load = store.load([b"k"], found, [0])
        with pytest.raises(MissingKey, match=reason.replace("_", " ")):
            load.wait(PATIENCE)
        assert (found == 0xEE).all() and store.stats()[reason] == 1
        assert store.contains([b"k"]) == [False]
        time.sleep(LEASE + 0.1)  # its lease has ended: a store removes it, and stores it again
        store.store([b"k"], blocks, [0]).wait(PATIENCE)
        store.load([b"k"], found, [0]).wait(PATIENCE)
        np.testing.assert_array_equal(found, blocks)
    raw.close()


def test_an_object_of_another_key_is_no_block(shared: Cluster, layout: Layout) -> None:
    found = np.full((2, NBYTES), 0xEE, np.uint8)
    raw = Raw(shared)
    with RemoteStore(shared.address, layout) as store:
        store.store([b"a"], blocks_of(1), [0]).wait(PATIENCE)
        whole = raw.get(name_of(store, b"a"), NBYTES + 64)
        assert raw.put(name_of(store, b"b"), whole) == 0
        assert raw.put(name_of(store, b"c"), whole[:-1]) == 0
        load = store.load([b"b", b"c"], found, range(2))
        with pytest.raises(MissingKey, match="other key"):
            load.wait(PATIENCE)
        assert len(load.failed_positions) == 2 and (found == 0xEE).all()
    raw.close()


def test_blocks_without_the_secret_are_refused(shared: Cluster, layout: Layout, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdef")
    with pytest.raises(Error, match="mode 600"):
        RemoteStore(shared.address, layout, secret=path)
    path.chmod(0o600)
    found = np.full((1, NBYTES), 0xEE, np.uint8)
    raw = Raw(shared)
    with RemoteStore(shared.address, layout, secret=path) as store:
        store.store([b"k"], blocks_of(1), [0]).wait(PATIENCE)
        store.load([b"k"], found, [0]).wait(PATIENCE)
        whole = bytearray(raw.get(name_of(store, b"k"), NBYTES + 64))
        whole[56:64] = bytes(8)  # as a writer without it has it
        assert raw.put(name_of(store, b"forged"), bytes(whole)) == 0
        with pytest.raises(MissingKey):
            store.load([b"forged"], found, [0]).wait(PATIENCE)
        with RemoteStore(shared.address, layout, timeout=1.0) as without:
            assert without._epoch.known() == store._epoch.known(), "a reader without the secret trusts the checksum"
        path.write_bytes(b"another one, as long")
        with RemoteStore(shared.address, layout, timeout=0.5, secret=path) as other:
            assert "another secret" in other.stats()["epoch"] and other.contains([b"k"]) == [False]
        assert store.contains([b"k"]) == [True], "the epoch is as it was"
        with RemoteStore(shared.address, layout, secret=path) as other:
            other.clear()
            assert other.epoch is not None, "an epoch that it cannot read is no reason to make none"
    raw.close()


# -- faults ------------------------------------------------------------------------------------------------------------


def ended(transfer: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not transfer.done():
        assert time.monotonic() < end, transfer
        time.sleep(0.005)


def test_a_stopped_node_is_a_miss_at_the_limit_and_the_other_one_serves(cluster: Cluster, layout: Layout) -> None:
    blocks, found = blocks_of(64), np.zeros((64, NBYTES), np.uint8)
    keys = keys_of(*range(64))
    store = RemoteStore(cluster.address, layout, timeout=1.0)
    raw = Raw(cluster)
    store.store(keys, blocks, range(64)).wait(PATIENCE)
    stopped, serving = cluster.nodes[0].pid, []
    for i, key in enumerate(keys):
        if raw.place(name_of(store, key))[0] != stopped:
            serving.append(i)
    assert 0 < len(serving) < 64
    epoch_node = raw.place(store._epoch.name)[0]
    which = 0 if epoch_node != stopped else 1
    if which:
        serving = [i for i in range(64) if i not in serving]
    cluster.nodes[which].send_signal(signal.SIGSTOP)
    for _ in range(6):
        begin = time.monotonic()
        load = store.load(keys, found, range(64))
        ended(load, 2.0)
        assert time.monotonic() - begin < 2.0
        failed = set(load.failed_positions.tolist())
        assert not failed & set(serving), load.error
        np.testing.assert_array_equal(found[serving], blocks[serving])
    assert "no answer" in store.stats()["nodes"].values()
    mine, many = found[serving], [keys[i] for i in serving]
    begin = time.monotonic()
    store.load(many, mine, range(len(mine))).wait(PATIENCE)
    assert time.monotonic() - begin < 1.0
    begin = time.monotonic()
    store.close()
    assert time.monotonic() - begin < 2.0
    with pytest.raises(Error, match="closed"):
        store.load(keys, found, range(64))
    cluster.nodes[which].send_signal(signal.SIGCONT)


def test_a_stopped_master_is_a_miss_at_the_limit(cluster: Cluster, layout: Layout) -> None:
    store = RemoteStore(cluster.address, layout, timeout=0.7)
    store.store([b"k"], blocks_of(1), [0]).wait(PATIENCE)
    cluster.master.send_signal(signal.SIGSTOP)
    found = np.full((1, NBYTES), 0xEE, np.uint8)
    for _ in range(12):
        begin = time.monotonic()
        assert store.contains([b"other"]) == [False]
        for transfer in (store.load([b"k"], found, [0]), store.store([b"l"], blocks_of(1), [0])):
            ended(transfer, 1.7)
        assert time.monotonic() - begin < 3.5
    assert (found == 0xEE).all() and store.stats()["epoch"]
    begin = time.monotonic()
    with pytest.raises(Error):
        store.clear()
    store.close()
    assert time.monotonic() - begin < 3.4
    cluster.master.send_signal(signal.SIGCONT)


def test_a_master_that_restarts_and_a_node_that_dies(cluster: Cluster, layout: Layout) -> None:
    blocks, found = blocks_of(16), np.zeros((16, NBYTES), np.uint8)
    keys = keys_of(*range(16))
    with RemoteStore(cluster.address, layout, timeout=2.0) as store:
        store.store(keys, blocks, range(16)).wait(PATIENCE)
        before = store._epoch.known()
        cluster.nodes[0].kill()
        load = store.load(keys, found, range(16))
        ended(load, 3.0)
        right = sorted(set(range(16)) - set(load.failed_positions.tolist()))
        np.testing.assert_array_equal(found[right], blocks[right])
        cluster.restart_master()

        def again() -> bool:
            store.store([b"new"], blocks_of(1), [0])
            load = store.load([b"new"], found, [0])
            ended(load, 3.0)
            return not len(load.failed_positions)

        until(again)
        assert store._epoch.known() != before
        np.testing.assert_array_equal(found[0], blocks_of(1)[0])
        load = store.load(keys, found, range(16))
        ended(load, 3.0)
        assert len(load.failed_positions) == 16


def test_the_command(shared: Cluster, layout: Layout, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["remote", "check", shared.address]) == 0
    out = capsys.readouterr().out
    assert "loaded                16 of 16 blocks of 1 MiB" in out and out.count(" up\n") == 2
    with RemoteStore(shared.address, layout) as store:
        store.store([b"k"], blocks_of(1), [0]).wait(PATIENCE)
        assert cli.main(["remote", "clear", shared.address, store.identity.hex()]) == 0
        time.sleep(1.0)
        assert store.contains([b"k"]) == [False]
    for wrong in (["check", "nowhere"], ["clear", shared.address, "xx"]):
        assert cli.main(["remote", *wrong]) == 2


# -- an engine's process -----------------------------------------------------------------------------------------------

CLOSING = """
import sys, threading, time
import numpy as np
from kvswap import Error
from kvswap.files import Layout
from kvswap.remote import RemoteStore
NBYTES = 65536
def use(store, i):
    blocks = np.zeros((8, NBYTES), np.uint8)
    try:
        for n in range(1000):
            keys = [b"%d %d %d" % (i, n, k) for k in range(8)]
            store.store(keys, blocks, range(8))
            store.contains(keys)
            store.load(keys, blocks, range(8))
            if n % 3 == 0: store.delete(keys)
    except Error:
        return
for round in range(int(sys.argv[2])):
    store = RemoteStore(sys.argv[1], Layout(NBYTES, test="closing"), staging_nbytes=8 << 20, timeout=5.0)
    threads = [threading.Thread(target=use, args=(store, i)) for i in range(8)]
    for thread in threads: thread.start()
    time.sleep(0.01 * (round % 7))
    store.close()
    for thread in threads: thread.join(20); assert not thread.is_alive()
print("closed", flush=True)
"""


def test_close_beside_eight_threads(shared: Cluster) -> None:
    command = [sys.executable, "-c", CLOSING, shared.address, "5"]
    done = subprocess.run(command, **elsewhere(), capture_output=True, text=True, timeout=PATIENCE * 2, check=False)
    assert done.returncode == 0 and done.stdout == "closed\n", done.stderr[-2000:]


FORKING = """
import os, sys, time
import numpy as np
from kvswap.files import Layout
from kvswap.remote import RemoteStore
store = RemoteStore(sys.argv[1], Layout(65536, test="fork"))
block = np.zeros((1, 65536), np.uint8)
store.store([b"k"], block, [0]).wait(10)
running = store.load([b"k"], block, [0])
pid = os.fork()
if pid == 0:
    load = store.load([b"k"], block, [0])
    assert load.done() and len(load.failed_positions) == 1 and running.done() and len(running.failed_positions) == 1
    assert store.contains([b"k"]) == [False] and store.delete([b"k"]) == ["unknown"]
    store.close()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
running.wait(10)
assert store.contains([b"k"]) == [True]
if sys.argv[2] == "close": store.close()
print("done", flush=True)
"""


@pytest.mark.parametrize("how", ["close", "leave"])
def test_a_forks_child_finds_nothing_and_ends(shared: Cluster, how: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKING, shared.address, how]
    done = subprocess.run(command, **elsewhere(), capture_output=True, text=True, timeout=PATIENCE * 2, check=False)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr[-2000:]


# -- look-ups ----------------------------------------------------------------------------------------------------------


def test_a_key_is_asked_for_once_a_lease(shared: Cluster, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    with RemoteStore(shared.address, layout) as store:
        store.store([b"k"], blocks_of(1), [0]).wait(PATIENCE)
        real = store._client.codes
        monkeypatch.setattr(
            store._client,
            "codes",
            lambda call, count, *rest: (
                asked.append(count) if call == "batch_is_exist" else None,
                real(call, count, *rest),
            )[1],
        )
        end = time.monotonic() + 2.5 * LEASE
        while time.monotonic() < end:
            assert store.contains([b"k"]) == [True]
    assert 3 <= len(asked) <= 4


def test_looked_up_keys_keep_a_full_node_from_new_ones_and_a_count_says_so(tmp_path: Path, layout: Layout) -> None:
    blocks = blocks_of(16)
    full = Cluster(tmp_path, nodes=1, memory="16MB", lease=30.0)
    with full as cluster, RemoteStore(cluster.address, layout) as store:
        stored: list[bytes] = []
        for i in range(40):
            keys = [b"%d %d" % (i, n) for n in range(16)]
            ended(store.store(keys, blocks, range(16)), PATIENCE)
            store.contains(keys)
            stored += keys
            if store.stats()["no_room"]:
                break
        assert store.stats()["no_room"] > 0
        for i in range(64):  # smaller batches fit into what is left, for a while
            transfer = store.store([b"one more %d" % i], blocks, [0])
            ended(transfer, PATIENCE)
            if transfer.error:
                break
        assert "stays until its lease ends" in str(transfer.error)
