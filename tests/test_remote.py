"""The remote tier over the stand-in agent of remote_agent.py: nodes in threads of this process, with real control
messages. With NIXL itself: test_remote_nixl.py."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, until
from remote_agent import LocalAgent, be_patient

import kvswap
from kvswap.files import Layout

zmq = pytest.importorskip("zmq")
pytest.importorskip("msgspec")
from kvswap import remote  # noqa: E402
from kvswap.remote import _messages as m  # noqa: E402
from kvswap.remote import _store  # noqa: E402
from kvswap.remote._store import RemoteStore  # noqa: E402

if not zmq.has("curve"):
    pytest.skip("this libzmq has no CURVE", allow_module_level=True)

NBYTES = 4096 + 40
LAYOUT = Layout(NBYTES, model="test")
_numbers = itertools.count()


class NodeThread:
    """A node in a thread."""

    def __init__(self, allowed: list[str], blocks: int = 32, bind: str = "127.0.0.1:0", **options: Any) -> None:
        self.pair = options.pop("pair", None) or remote.new_secret()
        self.agent = LocalAgent(f"node-{next(_numbers)}")
        nbytes = options.pop("nbytes", NBYTES)
        self.server = remote.Server(bind, nbytes, blocks, self.pair, allowed, self.agent, **options)
        self.address = self.server.address
        self.node = remote.Node(self.address, self.pair.public, options.get("name", ""))
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()

    def stop(self) -> None:
        """Also as a crash looks from outside."""
        self.agent.dead = True
        self.server.stop()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self.server.close()


class Rack:
    """Nodes, and clients of theirs."""

    def __init__(self) -> None:
        self.pair = remote.new_secret()
        self.nodes: list[NodeThread] = []
        self.stores: list[Any] = []

    def node(self, **options: Any) -> NodeThread:
        self.nodes.append(NodeThread([self.pair.public], **options))
        return self.nodes[-1]

    def store(self, *nodes: NodeThread, up: int | None = None, **options: Any) -> Any:
        agent = LocalAgent(f"client-{next(_numbers)}")
        listed = options.pop("listed", None) or [each.node for each in nodes or self.nodes]
        store = RemoteStore(
            listed, options.pop("layout", LAYOUT), key=options.pop("key", self.pair), agent=agent, **options
        )
        self.stores.append(store)
        store.agent = agent
        if up is None:
            assert store.wait_nodes(timeout=PATIENCE) == len(store._peers), store.stats()
        return store

    def close(self) -> None:
        for store in self.stores:
            store.agent.stuck.clear()
            store.close(PATIENCE)
        for node in self.nodes:
            if node._thread.is_alive():
                node.stop()


@contextmanager
def listed_nodes(folder: Path, patch: pytest.MonkeyPatch, count: int = 1, **options: Any) -> Iterator[list[NodeThread]]:
    """Nodes as a user names them: listed in folder/nodes, a client's secret in folder/key."""
    be_patient(patch, PATIENCE)
    pair = remote.new_secret()
    remote.write_secret(folder / "key", pair)
    patch.setattr(_store, "NixlAgent", LocalAgent)
    nodes = [NodeThread([pair.public], **options) for _ in range(count)]
    (folder / "nodes").write_text("".join(f"{node.address} {node.pair.public}\n" for node in nodes))
    yield nodes
    for node in nodes:
        if node._thread.is_alive():
            node.stop()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch, PATIENCE)


@pytest.fixture
def rack(patient: None) -> Iterator[Rack]:
    rack = Rack()
    yield rack
    rack.close()


def keys(*numbers: int) -> list[bytes]:
    return [b"key-%d" % number for number in numbers]


def block(number: int, version: int = 0) -> Any:
    return np.random.default_rng([number, version]).integers(0, 256, NBYTES, np.uint8)


def blocks(numbers: Any, version: int = 0) -> Any:
    return np.stack([block(number, version) for number in numbers])


def put(store: Any, numbers: Any, **options: Any) -> Any:
    numbers = list(numbers)
    data = blocks(numbers, options.pop("version", 0))
    transfer = store.store(keys(*numbers), data, range(len(numbers)), **options)
    transfer.wait(PATIENCE)
    return transfer


def get(store: Any, numbers: Any, version: int = 0) -> tuple[set[int], Any]:
    """Which of the numbers arrived; all others must be failed, and their memory unchanged."""
    numbers = list(numbers)
    to = np.full((len(numbers), NBYTES), 0xEE, np.uint8)
    load = store.load(keys(*numbers), to, range(len(numbers)))
    with suppress(kvswap.Error):
        load.wait(PATIENCE)
    failed = set(load.failed_blocks.tolist())
    for i, number in enumerate(numbers):
        assert (to[i] == (0xEE if i in failed else block(number, version))).all(), f"a wrong block of key {number}"
    return {number for i, number in enumerate(numbers) if i not in failed}, load


# -- blocks -----------------------------------------------------------------------------------------------------------


def test_stored_blocks_are_loaded(rack: Rack) -> None:
    rack.node()
    store = rack.store()
    transfer = put(store, range(20))
    assert transfer.state == "done" and transfer.num_kept == 0 and transfer.nbytes == 20 * NBYTES and transfer.elapsed
    assert store.contains(keys(*range(30))) == [i < 20 for i in range(30)]
    arrived, load = get(store, range(30))
    assert arrived == set(range(20))
    assert load.state == "failed" and load.failed_blocks.tolist() == list(range(20, 30))
    assert isinstance(load.error, kvswap.MissingKey) and isinstance(load.reasons[29], kvswap.MissingKey)
    counts = store.stats()
    assert counts["stored"] == counts["loaded"] == 20 and counts["missed"] == 10 and counts["failed"] == 0


def test_blocks_of_all_kinds_of_arguments(rack: Rack) -> None:
    rack.node()
    store = rack.store()
    data = blocks(range(4))
    store.store([(7, 0), (7, 1)], [data[0], data[1].ctypes.data]).wait(PATIENCE)
    rows = np.arange(16, dtype=np.uint8).reshape(2, 8)
    store.store(rows, data, [2, 3]).wait(PATIENCE)
    to = np.zeros((4, NBYTES), np.uint8)
    store.load([b"block_7_pool_0", b"block_7_pool_1", *map(bytes, rows)], to, [3, 2, 1, 0]).wait(PATIENCE)
    assert (to[::-1] == data).all()
    empty = store.load([], to, [])
    empty.wait(0)
    assert empty.done() and empty.failed_blocks.tolist() == [] and store.contains([]) == []


def test_replace_and_keep(rack: Rack) -> None:
    rack.node()
    store = rack.store()
    put(store, range(4))
    assert put(store, range(6), version=1, replace=False).num_kept == 4
    assert get(store, range(4))[0] == set(range(4)) and get(store, [4, 5], version=1)[0] == {4, 5}
    put(store, range(6), version=2)
    assert get(store, range(6), version=2)[0] == set(range(6))


def test_delete(rack: Rack) -> None:
    rack.node()
    store = rack.store()
    put(store, range(4))
    store.delete(keys(1, 3, 99)).wait(PATIENCE)
    assert store.contains(keys(0, 1, 2, 3)) == [True, False, True, False]
    assert get(store, range(4))[0] == {0, 2}


def test_layouts_do_not_share_blocks(rack: Rack) -> None:
    rack.node()
    put(rack.store(), range(4))
    other = rack.store(layout=Layout(NBYTES, model="another"))
    assert other.contains(keys(*range(4))) == [False] * 4 and get(other, range(4))[0] == set()


def test_the_least_recently_used_blocks_are_evicted(rack: Rack) -> None:
    rack.node(blocks=8, lease=0.0)
    store = rack.store()
    for number in range(8):
        put(store, [number])
    assert get(store, [0])[0] == {0}  # used
    for number in range(8, 12):
        put(store, [number])
    assert store.contains(keys(*range(12))) == [True] + [False] * 4 + [True] * 7


def test_a_full_node_refuses_blocks(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its blocks are leased by readers, until they say that they are done."""
    node = rack.node(blocks=8, lease=1000.0)
    store, other = rack.store(), rack.store()
    put(store, range(4))
    put(store, range(4, 8))
    assert get(store, range(8))[0] == set(range(8))
    put(store, [20])
    put(store, range(8))
    monkeypatch.setattr(other._link, "tell", lambda *_: None)  # a reader that never says so
    assert get(other, range(8))[0] == set(range(8))
    transfer = store.store(keys(8), blocks([8]), [0])
    with pytest.raises(kvswap.Error, match="no node has room"):
        transfer.wait(PATIENCE)
    assert transfer.failed_blocks.tolist() == [0] and node.server.stats()["refused"] == 1
    assert get(store, range(8))[0] == set(range(8))


def test_more_blocks_than_staging_memory(rack: Rack) -> None:
    rack.node(blocks=300)
    store = rack.store(staging_nbytes=3 * NBYTES)
    put(store, range(100))
    assert get(store, range(100))[0] == set(range(100))


def test_what_arrived_before_a_read_failed_is_there(rack: Rack) -> None:
    rack.node()
    store, reads = rack.store(staging_nbytes=8 * NBYTES), []

    def between(operation: str, piece: int) -> None:
        reads.append(piece)
        if len(reads) == 2:
            raise ConnectionError("cut")

    put(store, range(3))
    taken = store._staging.take(store._staging.count - 1, time.monotonic() + PATIENCE)
    store.agent.between = between
    assert get(store, range(3))[0] == {0}
    assert reads == [0, 0]
    store._staging.give(taken)


def test_the_queue_is_bounded(rack: Rack) -> None:
    rack.node()
    store = rack.store(queue=2, timeout=PATIENCE)
    store.agent.stuck.set()
    data = blocks([0])
    begun = [store.store(keys(i), data, [0]) for i in range(2)]
    with pytest.raises(kvswap.QueueFull):
        store.load(keys(5), data, [0])
    with pytest.raises(TimeoutError):
        begun[0].wait(0.01)
    assert begun[0].state == "running" and begun[0].failed_blocks.size == 0
    store.agent.stuck.clear()
    for each in begun:
        each.wait(PATIENCE)
    assert store.stats()["refused_full"] == 1


def test_wrong_arguments(rack: Rack) -> None:
    rack.node()
    store = rack.store()
    data = blocks([0])
    gpu = SimpleNamespace(__cuda_array_interface__={}, data_ptr=lambda: 4096)
    for wrong, error in (
        (lambda: store.load(keys(1), gpu, [0]), TypeError),
        (lambda: store.load(keys(1), [gpu]), TypeError),
        (lambda: store.load(b"key", data, [0]), TypeError),
        (lambda: store.load([b""], data, [0]), ValueError),
        (lambda: store.load(["key"], data, [0]), TypeError),
        (lambda: store.load([b"x" * 513], data, [0]), ValueError),
        (lambda: store.load(keys(1), data, [1]), IndexError),
        (lambda: store.load(keys(1, 2), data, [0]), ValueError),
        (lambda: store.load(keys(1), [data[0][:-1]]), ValueError),
        (lambda: store.load(np.zeros(4, np.uint8), data, [0]), ValueError),
        (lambda: rack.store(replicas=0), ValueError),
        (lambda: rack.store(listed=[rack.nodes[0].node] * 2), ValueError),
    ):
        with pytest.raises(error):
            wrong()
    store.close()
    with pytest.raises(kvswap.Error, match="closed"):
        store.load(keys(1), data, [0])


# -- truth ------------------------------------------------------------------------------------------------------------


def overwrite(node: NodeThread, number: int) -> None:
    """A slow reader's nightmare: the block is evicted, and its slot is written for another key."""
    table = node.server._table
    name = NAMES(number)
    slot = table.blocks[name].slot
    address = node.server._base + slot * node.server.stride
    other = blocks([number], version=9)
    array = np.array([address], np.int64)
    kvswap._C._remote_seal(array, np.array([other.ctypes.data]), NBYTES, NAMES(number + 1000), np.array([1 << 61]))


def NAMES(*numbers: int) -> bytes:
    from kvswap.remote._names import Namer

    return Namer(NBYTES, LAYOUT.text).names(keys(*numbers))


def test_a_block_that_is_overwritten_while_it_is_read_is_a_miss(rack: Rack) -> None:
    node = rack.node()
    store = rack.store()
    put(store, range(6))
    store.agent.between = lambda operation, i: overwrite(node, 3) if i == 1 else None
    arrived, load = get(store, range(6))
    assert arrived == {0, 1, 2, 4, 5}
    assert isinstance(load.reasons[3], kvswap.MissingKey) and "while it was read" in str(load.reasons[3])
    store.agent.between = None
    until(lambda: not store.contains(keys(3))[0])  # the reader told the node, which looked itself
    assert node.server.stats()["damaged"] == 1 and store.stats()["changed"] == 1


def test_every_prefix_of_an_overwrite_is_a_miss(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header or the bytes, from old and new, cut anywhere. The key is the same: its block was written again."""
    node = rack.node()
    store = rack.store()
    put(store, [0])
    monkeypatch.setattr(store._link, "tell", lambda *_: None)  # the node would drop the block
    base, new = (
        node.server._base + node.server._table.blocks[NAMES(0)].slot * node.server.stride,
        blocks([0], version=1),
    )
    whole = np.ctypeslib.as_array(ctypes.cast(base, ctypes.POINTER(ctypes.c_uint8)), (64 + NBYTES,))
    kept = whole.copy()
    kvswap._C._remote_seal(np.array([base]), np.array([new.ctypes.data]), NBYTES, NAMES(0), np.array([1 << 61]))
    written = whole.copy()
    for cut in [*range(1, 64, 7), 64, 65, 1000, 64 + NBYTES - 1, 64 + NBYTES]:
        for first, second in ((kept, written), (written, kept)):
            whole[:cut], whole[cut:] = first[:cut], second[cut:]
            assert get(store, [0])[0] == ({0} if (whole == kept).all() else set()), cut


def test_a_claimed_slot_has_no_block(rack: Rack) -> None:
    """Its old header is gone before the new writer may begin, although all old bytes are still there."""
    rack.node(blocks=1, lease=0.0)
    store, other = rack.store(), rack.store()
    put(store, [0])
    (peer,) = other._peers.values()

    def claim(operation: str, i: int) -> None:
        places = other._request(peer, lambda number: m.Claim(number, NAMES(5), True))
        assert np.frombuffer(places.slots, "<i8").tolist() == [0]

    store.agent.between = claim
    arrived, load = get(store, [0])
    assert arrived == set() and "is gone" in str(load.reasons[0])


def test_a_byte_that_changes_on_the_way_is_noticed(rack: Rack) -> None:
    node = rack.node()
    store = rack.store()
    put(store, range(4))
    flips = itertools.count()

    def damage(operation: str, to: int) -> None:
        if next(flips) == 2:
            ctypes.c_uint8.from_address(to + 64 + 17).value ^= 4

    store.agent.damage = damage
    assert len(get(store, range(4))[0]) == 3
    assert get(store, range(4))[0] == set(range(4))  # the node found its block to be right
    flips = itertools.count()
    transfer = store.store(keys(*range(10, 14)), blocks(range(10, 14)), range(4))
    with pytest.raises(kvswap.Error):
        transfer.wait(PATIENCE)
    assert transfer.failed_blocks.tolist() == [2] and node.server.stats()["wrong"] == 1
    assert store.contains(keys(10, 11, 12, 13)) == [True, True, False, True]


def test_two_clients_write_read_and_evict_at_once(rack: Rack, long_seconds: float) -> None:
    """Eight slots, many keys and versions: a version in the bytes says what was read."""
    rack.node(blocks=8, lease=0.0)
    stop = time.monotonic() + long_seconds
    wrong: list[str] = []
    hits = [0]

    def client(seed: int) -> None:
        rng = np.random.default_rng(seed)
        store = rack.store(staging_nbytes=16 * NBYTES)
        while time.monotonic() < stop:
            numbers = rng.choice(16, 4, replace=False)
            names = keys(*numbers)
            if rng.random() < 0.5:
                data = np.repeat(rng.integers(0, 256, (4, 1), np.uint8), NBYTES, axis=1)
                data[:, 0] = numbers
                transfer = store.store(names, data, range(4))
            else:
                data = np.full((4, NBYTES), 0xEE, np.uint8)
                transfer = store.load(names, data, range(4))
            assert transfer._ended.wait(PATIENCE), "a hang"
            if transfer.what == "load":
                bad = set(transfer.failed_blocks.tolist())
                for i, number in enumerate(numbers):
                    if i not in bad:
                        hits[0] += 1
                        if data[i, 0] != number or len(set(data[i, 1:].tolist())) != 1:
                            wrong.append(f"key {number}: {set(data[i].tolist())}")

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive()
    assert wrong == [] and hits[0] > 0


@pytest.fixture
def long_seconds(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("--long-seconds"))


# -- nodes ------------------------------------------------------------------------------------------------------------


def test_blocks_are_spread_over_nodes(rack: Rack) -> None:
    for _ in range(3):
        rack.node(blocks=128)
    store = rack.store()
    put(store, range(90))
    held = [each.server.stats()["blocks"] for each in rack.nodes]
    assert sum(held) == 90 and min(held) > 5
    assert get(store, range(90))[0] == set(range(90)) and all(store.contains(keys(*range(90))))


def test_a_dead_node_is_a_miss_and_returns(rack: Rack) -> None:
    first, second = rack.node(blocks=128), rack.node(blocks=128)
    store = rack.store()
    put(store, range(60))
    on_second = {i for i in range(60) if NAMES(i) in second.server._table.blocks}
    assert 0 < len(on_second) < 60
    second.stop()
    until(lambda: store.wait_nodes(timeout=0) == 1)
    assert get(store, range(60))[0] == set(range(60)) - on_second
    assert store.contains(keys(*range(60))) == [i not in on_second for i in range(60)]
    failed = store.delete(keys(*on_second))
    with pytest.raises(kvswap.Error, match="is down"):
        failed.wait(PATIENCE)
    again = rack.node(blocks=128, bind=second.address, pair=second.pair)
    assert store.wait_nodes(timeout=PATIENCE) == 2
    assert get(store, range(60))[0] == set(range(60)) - on_second  # its memory was lost
    put(store, range(60))
    assert get(store, range(60))[0] == set(range(60))
    assert {i for i in range(60) if NAMES(i) in again.server._table.blocks} == on_second
    del first


def test_replicas_outlive_a_node(rack: Rack) -> None:
    for _ in range(3):
        rack.node(blocks=128)
    store = rack.store(replicas=2)
    put(store, range(60))
    assert sum(each.server.stats()["blocks"] for each in rack.nodes) == 120
    rack.nodes[1].stop()
    until(lambda: store.wait_nodes(timeout=0) == 2)
    assert get(store, range(60))[0] == set(range(60)) and all(store.contains(keys(*range(60))))
    put(store, range(60, 80))  # one replica is enough
    assert get(store, range(80))[0] == set(range(80))


def test_a_node_that_dies_in_mid_transfer(rack: Rack) -> None:
    node = rack.node()
    store = rack.store(timeout=PATIENCE)
    put(store, range(8))
    store.agent.stuck.set()
    to = np.full((8, NBYTES), 0xEE, np.uint8)
    load = store.load(keys(*range(8)), to, range(8))
    until(lambda: store._mover._begun)
    begin = time.monotonic()
    node.stop()
    with pytest.raises(kvswap.Error, match="is down"):
        load.wait(PATIENCE)  # although the agent never says that its transfer has ended
    assert time.monotonic() - begin < PATIENCE / 2
    assert load.failed_blocks.tolist() == list(range(8)) and (to == 0xEE).all()
    assert len(store._staging._free) < store._staging.count  # NIXL may still write there
    store.agent.stuck.clear()
    until(lambda: len(store._staging._free) == store._staging.count)


def test_a_late_writer_cannot_harm_another_block(rack: Rack) -> None:
    """Its transfer was left; the slot rests. Even if it is used at once, a reader notices."""
    node = rack.node(blocks=4, lease=0.0)
    slow, store = rack.store(timeout=0.2), rack.store()
    slow.agent.stuck.set()
    late = slow.store(keys(0), blocks([0]), [0])
    with pytest.raises(kvswap.Error, match="did not arrive in time"):
        late.wait(PATIENCE)
    until(lambda: node.server.stats()["resting"] == 1)
    node.server._table._resting[0] = (0.0, node.server._table._resting[0][1])
    until(lambda: node.server.stats()["free"] == 4)
    put(store, range(1, 3))
    put(store, range(3, 5))
    assert get(store, range(1, 5))[0] == {1, 2, 3, 4}
    slow.agent.stuck.clear()
    until(lambda: len(slow._staging._free) == slow._staging.count)  # it has written now
    assert len(get(store, range(1, 5))[0]) == 3


def test_a_watched_list_of_nodes(rack: Rack, tmp_path: Path) -> None:
    first, second = rack.node(blocks=64), rack.node(blocks=64)
    path = tmp_path / "nodes"
    path.write_text(f"# the rack\n\n{first.address} {first.pair.public} one\n")
    store = rack.store(listed=str(path))
    put(store, range(20))
    path.write_text(f"{first.address} {first.pair.public} one\n{second.address} {second.pair.public} two\n")
    until(lambda: store.contains([]) == [] and len(store._peers) == 2)
    assert store.wait_nodes(timeout=PATIENCE) == 2
    arrived = get(store, range(20))[0]
    assert 0 < len(arrived) < 20  # those whose place is the same
    put(store, range(20))
    assert get(store, range(20))[0] == set(range(20))
    path.write_text("nonsense\n")
    until(lambda: store.contains([]) == [] and "line 1" in store._file.problem)
    assert get(store, range(20))[0] == set(range(20))
    path.write_text(f"{first.address} {first.pair.public} one\n")
    until(lambda: store.contains([]) == [] and len(store._peers) == 1)
    assert get(store, range(20))[0] >= arrived


# -- files ------------------------------------------------------------------------------------------------------------


def test_blocks_come_back_from_the_files_of_a_node(rack: Rack, tmp_path: Path) -> None:
    node = rack.node(blocks=8, lease=0.0, directory=tmp_path / "kv", capacity=64 << 20)
    store = rack.store()
    for number in range(0, 24, 4):
        put(store, range(number, number + 4))
        until(lambda: not node.server._keeping)
    assert store.contains(keys(*range(24))) == [True] * 24
    for number in range(0, 24, 4):
        assert get(store, range(number, number + 4))[0] == set(range(number, number + 4))
    assert put(store, range(24), version=1, replace=False).num_kept == 24
    store.delete(keys(0, 1)).wait(PATIENCE)
    assert get(store, [0, 1, 2])[0] == {2}
    node.stop()
    rack.node(blocks=8, lease=0.0, directory=tmp_path / "kv", capacity=64 << 20, bind=node.address, pair=node.pair)
    until(lambda: store.wait_nodes(timeout=0) == 1)
    for number in range(4, 24, 4):
        assert get(store, range(number, number + 4))[0] == set(range(number, number + 4))


# -- foreign -----------------------------------------------------------------------------------------------------------


def test_a_client_that_is_not_allowed_is_not_answered(rack: Rack) -> None:
    rack.node()
    foreign = rack.store(key=remote.new_secret(), up=0)
    assert foreign.wait_nodes(timeout=1.0) == 0
    assert foreign.contains(keys(1)) == [False]
    begin = time.monotonic()
    load = foreign.load(keys(1), blocks([1]), [0])
    with pytest.raises(kvswap.Error, match="is down"):
        load.wait(PATIENCE)
    assert time.monotonic() - begin < PATIENCE / 2


def test_a_node_with_another_key_is_not_believed(rack: Rack) -> None:
    node = rack.node()
    wrong = remote.Node(node.address, remote.new_secret().public)
    store = rack.store(listed=[wrong], up=0)
    assert store.wait_nodes(timeout=1.0) == 0


def test_another_size_or_version_is_refused_and_said(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    rack.node()
    store = rack.store(layout=Layout(NBYTES * 2), up=0)
    until(lambda: any("blocks of" in why for why in store.stats()["nodes"].values()))
    monkeypatch.setattr(m, "VERSION", 2)  # a client from the future; the node compares with it, too
    monkeypatch.setattr("kvswap.remote._server.m", type("Old", (), {**vars(m), "VERSION": 1}))
    later = rack.store(up=0)
    until(lambda: any("version" in why for why in later.stats()["nodes"].values()))


def test_malformed_messages_are_refused(rack: Rack) -> None:
    node = rack.node()
    store = rack.store()
    put(store, [1])
    context = zmq.Context()
    try:
        for routing in (None, b"files"):
            socket = context.socket(zmq.DEALER)
            socket.linger = 0
            if routing:
                socket.routing_id = routing
            socket.curve_serverkey = node.pair.public.encode()
            socket.curve_publickey, socket.curve_secretkey = rack.pair.public.encode(), rack.pair.secret.encode()
            socket.connect(f"tcp://{node.address}")
            hello = [b""] if routing else [m.encode(m.Hello(1, m.VERSION, NBYTES))]
            for data in (*hello, b"", b"\xff" * 40, m.encode(m.Locate(2, b"x" * 17)), m.encode(m.Commit(3, b"1")),
                         m.encode(m.Abort(b"x" * 16, True)), m.encode(m.Suspect(b"y" * 16, b""))):  # fmt: skip
                socket.send(data)
            answers = []
            while len(answers) < 5 and socket.poll(int(1000 * PATIENCE)):
                answers.append(m.to_client.decode(socket.recv()))
            assert {type(each) for each in answers} <= {m.Welcome, m.Refused} and len(answers) == 5
            socket.close()
    finally:
        context.destroy(linger=0)
    assert node.server.counts["malformed"] >= 5
    assert get(store, [1])[0] == {1}


# -- the end ----------------------------------------------------------------------------------------------------------


def test_a_dropped_store_stops_its_threads(rack: Rack) -> None:
    rack.node()
    store = rack.store()
    put(store, [1])
    threads = [store._link._thread, store._mover._thread, *store._workers]
    rack.stores.clear()
    del store
    until(lambda: not any(thread.is_alive() for thread in threads))


def test_closing_ends_what_is_stuck(rack: Rack) -> None:
    rack.node()
    store = rack.store(timeout=0.5)
    store.agent.stuck.set()
    transfer = store.store(keys(0), blocks([0]), [0])
    store.close(0.1)
    assert transfer._ended.wait(PATIENCE) and transfer.failed_blocks.tolist() == [0]
    with pytest.raises(kvswap.Error):
        transfer.wait(0)


def test_a_node_that_forgot_its_clients(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    node = rack.node()
    store = rack.store()
    put(store, [1])
    node.server._clients.clear()
    assert get(store, [1])[0] == set()  # refused, and so it says Hello again
    until(lambda: get(store, [1])[0] == {1})


def test_a_defect_ends_the_transfer(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens to a part: each block has one outcome, and nothing waits for ever."""
    for _ in range(2):
        rack.node()
    store = rack.store(replicas=2)
    put(store, range(4))
    rack.nodes[0].server._table.blocks.clear()  # some are on the second replica alone
    calls = itertools.count()
    good = store._load_from

    def broken(peer: Any, part: Any, found: Any) -> None:
        if next(calls):
            raise RuntimeError("a defect")
        good(peer, part, found)

    monkeypatch.setattr(store, "_load_from", broken)
    load = store.load(keys(*range(6)), np.zeros((6, NBYTES), np.uint8), range(6))
    with pytest.raises((RuntimeError, kvswap.Error)):
        load.wait(PATIENCE)
    assert load.done() and set(load.reasons) >= {4, 5}


def test_a_file_store_that_fails_does_not_end_the_node(rack: Rack, tmp_path: Path) -> None:
    node = rack.node(directory=tmp_path / "kv", capacity=64 << 20)
    store = rack.store()
    put(store, range(3))
    until(lambda: not node.server._keeping)
    node.server._files.close()
    assert store.contains(keys(9)) == [False]
    assert get(store, [0, 1, 2])[0] == {0, 1, 2}
    assert node._thread.is_alive()


def test_the_child_of_a_fork_counts_no_stores(rack: Rack) -> None:
    from kvswap.remote import _counts

    rack.node()
    store = rack.store()
    assert [row["nodes"] for row in _counts.rows()] == [{rack.nodes[0].address: "up"}]
    store.pid = -1
    assert _counts.rows() == []
    with pytest.raises(kvswap.Error, match="before fork"):
        store.load(keys(1), blocks([1]), [0])

    store.pid = os.getpid()


# -- NIXL's connections -----------------------------------------------------------------------------------------------


def drop_connection(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the network had cut the control connection: the node goes on, with the same agent."""
    link = store._link
    (peer,) = store._peers.values()

    def cut() -> None:
        peer.socket.disconnect(f"tcp://{peer.node.address}")
        peer.socket.connect(f"tcp://{peer.node.address}")

    pending = [cut]
    once = link._once
    monkeypatch.setattr(link, "_once", lambda *args: (pending and pending.pop()(), once(*args)))
    run = peer.run
    until(lambda: peer.run > run)


@pytest.mark.parametrize("stuck", [False, True])
def test_a_node_returns_with_the_same_agent(rack: Rack, monkeypatch: pytest.MonkeyPatch, stuck: bool) -> None:
    """What was kept of the earlier connection must not be taken from the new one, neither now nor later."""
    from kvswap.remote import _mover

    monkeypatch.setattr(_mover, "_FORCE_SECONDS", 0.5)
    rack.node()
    store = rack.store(timeout=PATIENCE)
    put(store, range(4))
    if stuck:
        store.agent.stuck.set()
        load = store.load(keys(1), blocks([1]), [0])
        until(lambda: store._mover._begun)
    drop_connection(store, monkeypatch)
    if stuck:
        with pytest.raises(kvswap.Error, match="is down"):
            load.wait(PATIENCE)
        time.sleep(0.7)
        store.agent.stuck.clear()
    until(lambda: get(store, range(4))[0] == set(range(4)))
    until(lambda: not store._mover._leaving)
    time.sleep(0.2)
    assert get(store, range(4))[0] == set(range(4))


def test_a_broken_connection_of_nixl_is_made_anew(rack: Rack) -> None:
    """The control connection is fine all the time."""
    rack.node()
    store = rack.store()
    put(store, range(4))
    store.agent.known.clear()
    arrived, load = get(store, range(4))
    assert arrived == set() and "NIXL: KeyError" in str(load.error)
    until(lambda: get(store, range(4))[0] == set(range(4)))
