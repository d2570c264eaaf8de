"""kvswap.remote over a stand-in for Mooncake: codes, calls that do not return, the end. test_remote.py has nodes."""

from __future__ import annotations

import random
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, random_bytes

from kvswap import _C, Error, QueueFull
from kvswap.files import Layout, MissingKey
from kvswap.remote import RemoteStore, _client, _codes, _names, _store

NBYTES = 4096
SIZE = NBYTES + 64


class Descriptor:
    status = types.SimpleNamespace(name="COMPLETE")

    def __init__(self, node: str) -> None:
        self.transport_endpoint = node
        self.buffer_descriptor = self

    def is_memory_replica(self) -> bool:
        return True

    def get_memory_descriptor(self) -> Descriptor:
        return self


class StandIn:
    """Mooncake's client: objects of one process. Tests replace its answers, and hold its calls up."""

    objects: dict[str, bytes]
    codes: dict[str, int]  # by call: what it answers for each key
    held: dict[str, threading.Event]  # by node: its gets and puts wait for the event
    error: Exception | None
    calls: list[str]
    open: int

    @classmethod
    def reset(cls) -> None:
        cls.objects, cls.codes, cls.held, cls.error, cls.calls, cls.open = {}, {}, {}, None, [], 0

    def setup(self, *args: Any) -> int:
        StandIn.open += 1
        return 0

    def register_buffer(self, address: int, nbytes: int) -> int:
        return 0

    def close(self) -> None:
        StandIn.open -= 1
        self.closed = True

    def _begin(self, call: str, names: list[str]) -> None:
        assert not hasattr(self, "closed"), f"{call} after close()"
        StandIn.calls.append(call)
        assert len(set(names)) == len(names), "a key comes twice in a batch"
        for name in names:
            if not name.endswith("/epoch"):
                event = self.held.get(node_of(name) if "get" in call else call)
                if event is not None:
                    event.wait(PATIENCE)
                if self.error is not None:
                    raise self.error

    def _answers(self, call: str, names: list[str], answers: list[int]) -> list[int]:
        return [self.codes.get(call, mine) if not name.endswith("/epoch") else mine
                for name, mine in zip(names, answers, strict=True)]  # fmt: skip

    def batch_is_exist(self, names: list[str]) -> list[int]:
        self._begin("exist", names)
        return self._answers("exist", names, [int(name in self.objects) for name in names])

    def batch_get_replica_desc(self, names: list[str]) -> dict[str, list[Descriptor]]:
        StandIn.calls.append("desc")
        return {name: [Descriptor(node_of(name))] for name in names if name in self.objects}

    def batch_get_into(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self._begin("get", names)
        answers = []
        for name, address, size in zip(names, addresses, sizes, strict=True):
            data = self.objects.get(name)
            if data is not None and len(data) <= size:
                memory(address, len(data))[:] = np.frombuffer(data, np.uint8)
            answers.append(-704 if data is None else len(data) if len(data) <= size else -600)
        return self._answers("get", names, answers)

    def batch_put_from(self, names: list[str], addresses: list[int], sizes: list[int], config: Any) -> list[int]:
        self._begin("put", names)
        answers = self._answers("put", names, [0] * len(names))
        for name, address, size, code in zip(names, addresses, sizes, answers, strict=True):
            if code == 0:
                self.objects.setdefault(name, memory(address, size).tobytes())
        return answers

    def batch_upsert_from(self, names: list[str], addresses: list[int], sizes: list[int], config: Any) -> list[int]:
        for name in names:
            self.objects.pop(name, None)
        return self.batch_put_from(names, addresses, sizes, config)

    def batch_remove(self, names: list[str]) -> list[int]:
        self._begin("remove", names)
        answers = self._answers("remove", names, [0 if name in self.objects else -704 for name in names])
        for name, code in zip(names, answers, strict=True):
            if code == 0:
                self.objects.pop(name, None)
        return answers


def node_of(name: str) -> str:
    return f"node {int(name.encode()[-1]) % 2}"


def memory(address: int, nbytes: int) -> Any:
    import ctypes

    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = types.ModuleType("mooncake.store")
    module.MooncakeDistributedStore = StandIn  # type: ignore[attr-defined]
    module.ReplicateConfig = types.SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    monkeypatch.setattr(_client, "_address", lambda master: "127.0.0.1")
    StandIn.reset()
    yield
    for event in StandIn.held.values():
        event.set()


def make(**options: Any) -> RemoteStore:
    options = {"timeout": PATIENCE, "staging_nbytes": 1 << 20, "hostname": "127.0.0.1", **options}
    return RemoteStore("127.0.0.1:9", Layout(NBYTES, test=1), **options)


def blocks_of(count: int) -> Any:
    return random_bytes(3, count * NBYTES).reshape(count, -1).copy()


def until_done(transfer: Any) -> Any:
    end = time.monotonic() + PATIENCE
    while not transfer.done():
        assert time.monotonic() < end
        time.sleep(0.001)
    return transfer


# -- the table ---------------------------------------------------------------------------------------------------------

OTHERS = [-2, -999, -31337, 2, 7, SIZE + 1, 1 << 40]


@pytest.mark.parametrize("code", [*_codes.CODES, *OTHERS])
def test_every_code_of_every_call(code: int) -> None:
    known = _codes.meaning(code)
    assert known is _codes.Meaning.MISS or code in _codes.CODES
    with make() as store:
        StandIn.codes["exist"] = code
        assert store.contains([b"a"]) == [False], "only 1 means that it is there"
        StandIn.codes["put"] = code
        stored = until_done(store.store([b"a"], blocks_of(1), [0]))
        accepted = known is _codes.Meaning.HIT
        assert (not len(stored.failed_positions)) == accepted
        assert accepted or str(code) in str(stored.error)
        StandIn.codes.pop("put")
        until_done(store.store([b"b"], blocks_of(1), [0]))
        found = np.full((1, NBYTES), 0xEE, np.uint8)
        StandIn.codes["get"] = code
        loaded = until_done(store.load([b"b"], found, [0]))
        assert isinstance(loaded.error, MissingKey) and (found == 0xEE).all()
        StandIn.codes["remove"] = code
        expected = {0: "removed", -704: "absent"}.get(code, "leased" if known is _codes.Meaning.RETRY else "unknown")
        assert store.delete([b"b"]) == [expected]


def test_what_mooncake_raises_is_a_miss() -> None:
    with make() as store:
        until_done(store.store([b"a"], blocks_of(1), [0]))
        StandIn.error = RuntimeError("from C++")
        assert store.contains([b"a"]) == [False]
        for transfer in (store.store([b"b"], blocks_of(1), [0]), store.load([b"a"], blocks_of(1), [0])):
            assert len(until_done(transfer).failed_positions) == 1


def test_put_answers_0_and_keeps_what_is_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storing again repairs nothing: the block stays a miss until it is removed, which its lease permits."""
    monkeypatch.setattr(_store, "LEASE_SECONDS", 0.3)
    block, found = blocks_of(1), np.full((1, NBYTES), 0xEE, np.uint8)
    with make() as store:
        until_done(store.store([b"a"], block, [0]))
        (name,) = (name for name in StandIn.objects if not name.endswith("/epoch"))
        whole = bytearray(StandIn.objects[name])
        whole[100] ^= 1
        StandIn.objects[name] = bytes(whole)
        for _ in range(2):
            assert isinstance(until_done(store.load([b"a"], found, [0])).error, MissingKey)
            assert not len(until_done(store.store([b"a"], block, [0])).failed_positions)
            assert (found == 0xEE).all() and store.contains([b"a"]) == [False]
        assert store.stats()["wrong_bytes"] == 1, "it is not read again"
        assert "remove" not in StandIn.calls, "its lease has not ended"
        time.sleep(0.3)
        StandIn.codes["remove"] = -706  # another client has a lease
        until_done(store.store([b"a"], block, [0]))
        assert store.contains([b"a"]) == [False] and StandIn.objects[name] == bytes(whole)
        del StandIn.codes["remove"]
        until_done(store.store([b"a"], block, [0]))
        assert store.contains([b"a"]) == [True]
        until_done(store.load([b"a"], found, [0])).wait()
        np.testing.assert_array_equal(found, block)


# -- calls that do not return ------------------------------------------------------------------------------------------


def test_the_limit_holds_and_a_late_answer_reaches_nobody() -> None:
    blocks, found = blocks_of(8), np.full((8, NBYTES), 0xEE, np.uint8)
    keys = [b"%d" % i for i in range(8)]
    with make(timeout=1.0) as store:
        store.store(keys, blocks, range(8)).wait(PATIENCE)
        odd = np.array([i for i in range(8) if node_of(_names.names(b"", b"", [keys[i]])[0]) == "node 1"])
        even = np.setdiff1d(np.arange(8), odd)
        StandIn.held["node 1"] = threading.Event()
        for _ in range(3):
            begin = time.monotonic()
            load = until_done(store.load(keys, found, range(8)))
            assert time.monotonic() - begin < 2.0
            assert load.failed_positions.tolist() == odd.tolist()
            np.testing.assert_array_equal(found[even], blocks[even])
        begin = time.monotonic()
        load = until_done(store.load([keys[odd[0]]], found, [odd[0]]))
        assert time.monotonic() - begin < 0.5 and "node 1 does not answer" in str(load.error), "at once"
        assert store.stats()["nodes"] == {"node 0": "up", "node 1": "no answer"}
        StandIn.held["node 1"].set()
        time.sleep(0.1)
        assert (found[odd] == 0xEE).all(), "the limit has passed"
        load = until_done(store.load(keys, found, range(8)))
        assert load.state == "done"
        np.testing.assert_array_equal(found, blocks)


def test_stores_that_hang_leave_half_of_the_threads() -> None:
    with make(timeout=0.5) as store:
        until_done(store.store([b"0"], blocks_of(1), [0]))
        StandIn.held["put"] = threading.Event()
        stores = [store.store([b"new %d" % i], blocks_of(1), [0]) for i in range(20)]
        found = np.zeros((1, NBYTES), np.uint8)
        store.load([b"0"], found, [0]).wait(PATIENCE)
        assert all(len(until_done(each).failed_positions) for each in stores)
        store.load([b"0"], found, [0]).wait(PATIENCE)
        running = store._calls._lanes["stores"].running
        assert 0 < len(running) <= store._calls.threads // 2
        StandIn.held["put"].set()


def test_close_does_not_wait_beyond_its_limit_and_makes_no_call_afterwards(caplog: Any) -> None:
    store = make(timeout=0.5)
    until_done(store.store([b"0"], blocks_of(1), [0]))
    StandIn.held["put"] = threading.Event()
    transfer = store.store([b"1"], blocks_of(1), [0])
    time.sleep(0.1)
    begin = time.monotonic()
    store.close()
    assert time.monotonic() - begin < 1.5
    assert transfer.done() and StandIn.open == 1, "a call is in flight: the client is left open"
    assert "have not returned" in caplog.text
    before = len(StandIn.calls)
    assert store.contains([b"0"]) == [False] and store.delete([b"0"]) == ["unknown"]
    for call in (lambda: store.store([b"0"], blocks_of(1), [0]), lambda: store.clear()):
        with pytest.raises(Error, match="closed"):
            call()
    StandIn.held["put"].set()
    time.sleep(0.2)
    assert len(StandIn.calls) == before
    _C._remote_exit_count(False)  # what was left on purpose would end this process by _exit()
    store.close()


def test_a_full_queue_says_so() -> None:
    with make(queue=2, timeout=1.0) as store:
        StandIn.held["put"] = threading.Event()
        for i in range(2):
            store.store([b"%d" % i], blocks_of(1), [0])
        with pytest.raises(QueueFull):
            store.store([b"2"], blocks_of(1), [0])
        time.sleep(1.1)
        store.store([b"3"], blocks_of(1), [0])  # those have ended, by their limit
        assert store.stats()["refused_full"] == 1
        StandIn.held["put"].set()


def test_cancel_and_wait() -> None:
    with make() as store:
        StandIn.held["put"] = threading.Event()
        transfer = store.store([b"0"], blocks_of(1), [0])
        with pytest.raises(TimeoutError):
            transfer.wait(0.05)
        assert transfer.state == "running" and transfer.cancel() and transfer.state == "cancelled"
        assert not transfer.cancel() and transfer.elapsed is not None
        with pytest.raises(Error, match="cancelled"):
            transfer.wait()
        StandIn.held["put"].set()
        empty = store.load([], blocks_of(1), [])
        assert empty.state == "done"


# -- epochs ------------------------------------------------------------------------------------------------------------


def test_a_block_that_was_read_before_a_clear_is_no_hit() -> None:
    block, found = blocks_of(1), np.full((1, NBYTES), 0xEE, np.uint8)
    with make() as store, make() as other:
        until_done(store.store([b"0"], block, [0]))
        name = next(name for name in StandIn.objects if not name.endswith("/epoch"))
        event = StandIn.held[node_of(name)] = threading.Event()
        load = other.load([b"0"], found, [0])
        time.sleep(0.1)
        store.clear()
        event.set()  # it returns the bytes of before
        assert isinstance(until_done(load).error, MissingKey)


def test_an_epoch_that_cannot_be_read_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    with make(timeout=0.3) as store:
        until_done(store.store([b"0"], blocks_of(1), [0]))
        monkeypatch.setattr(store._epoch, "_get", lambda slot: -900)
        time.sleep(1.6)
        assert store.contains([b"0"]) == [False] and "-900" in store.stats()["epoch"]
        for transfer in (store.store([b"1"], blocks_of(1), [0]), store.load([b"0"], blocks_of(1), [0])):
            assert transfer.done() and isinstance(transfer.error, MissingKey)
        with pytest.raises(Error, match="call it again"):
            store.clear()


def test_a_new_epoch_is_the_one_that_is_read_back() -> None:
    """Put answers 0 and keeps what another client has made meanwhile."""
    with make() as store:
        theirs = StandIn.objects[store._epoch.name]
        with make() as other:
            assert other._epoch.known() == store._epoch.known()
        assert StandIn.objects[store._epoch.name] == theirs


# -- names and messages ------------------------------------------------------------------------------------------------


def test_names_differ_where_anything_does() -> None:
    seen = set()
    keys = [b"a", b"a\0", b"61", b"h" * 40, b"h" * 41, b"h" * 512, bytes(40), bytes(41)]
    for identity in (b"1" * 16, b"2" * 16):
        for epoch in (b"1" * 16, b"2" * 16):
            seen.update(_names.names(identity, epoch, keys))
    assert len(seen) == 4 * len(keys) and max(map(len, seen)) < 200
    assert _names.identity_of(1, "a") != _names.identity_of(11, "a") != _names.identity_of(1, "1 a")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(Error, match="-non-cuda"):
        make()


# -- the header --------------------------------------------------------------------------------------------------------


def sip(key: bytes, data: bytes) -> int:
    """SipHash-2-4, from its paper."""
    mask = (1 << 64) - 1
    k0, k1 = (int.from_bytes(key[i : i + 8], "little") for i in (0, 8))
    v = [k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573]

    def rotl(x: int, b: int) -> int:
        return (x << b | x >> (64 - b)) & mask

    def rounds(n: int) -> None:
        for _ in range(n):
            v[0] = (v[0] + v[1]) & mask
            v[1] = rotl(v[1], 13) ^ v[0]
            v[0] = rotl(v[0], 32)
            v[2] = (v[2] + v[3]) & mask
            v[3] = rotl(v[3], 16) ^ v[2]
            v[0] = (v[0] + v[3]) & mask
            v[3] = rotl(v[3], 21) ^ v[0]
            v[2] = (v[2] + v[1]) & mask
            v[1] = rotl(v[1], 17) ^ v[2]
            v[2] = rotl(v[2], 32)

    padded = data + bytes(-(len(data) + 1) % 8) + bytes([len(data) & 0xFF])
    for i in range(0, len(padded), 8):
        word = int.from_bytes(padded[i : i + 8], "little")
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 0xFF
    rounds(4)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def sealed(nbytes: int, secret: bytes | None) -> tuple[Any, Any]:
    block, slot = random_bytes(5, nbytes).copy(), np.zeros(64 + nbytes, np.uint8)
    at = [np.array([each.ctypes.data], np.uint64) for each in (slot, block)]
    _C._remote_seal(at[0], at[1], nbytes, b"i" * 16, b"k" * 16, secret)
    return slot, block


def check(
    slot: Any, nbytes: int, secret: bytes | None, to: Any = None, who: bytes = b"i" * 16, key: bytes = b"k" * 16
) -> int:
    at = np.array([slot.ctypes.data], np.uint64)
    return _C._remote_check(
        at, None if to is None else np.array([to.ctypes.data], np.uint64), nbytes, who, key, secret
    )[0]


@pytest.mark.parametrize("nbytes", [1, 7, 8, 64, 1000, (64 << 10) + 5])
@pytest.mark.parametrize("secret", [None, bytes(range(16))], ids=["plain", "secret"])
def test_no_bit_can_change(nbytes: int, secret: bytes | None) -> None:
    assert sip(bytes(range(16)), bytes(range(15))) == 0xA129CA6149BE45E5  # the paper's vector
    slot, block = sealed(nbytes, secret)
    np.testing.assert_array_equal(slot[64:], block)
    to = np.zeros(nbytes, np.uint8)
    assert check(slot, nbytes, secret, to) == 0
    np.testing.assert_array_equal(to, block)
    if secret is not None:
        mac = int.from_bytes(slot[56:64].tobytes(), "little")
        assert mac == sip(secret, slot[:56].tobytes() + block.tobytes())
    chosen = random.Random(nbytes)
    to[:] = 0xEE
    for offset in [*range(56 if secret is None else 64), *(64 + chosen.randrange(nbytes) for _ in range(50))]:
        bit = 1 << chosen.randrange(8)
        slot[offset] ^= bit
        assert check(slot, nbytes, secret, to) == (1 if offset < 56 else 6 if offset < 64 else 5), offset
        slot[offset] ^= bit
    assert (to == 0xEE).all()
    assert (
        check(slot, nbytes, secret, None, b"j" * 16) == 2
        and check(slot, nbytes, secret, None, b"i" * 16, b"l" * 16) == 3
    )
    at = [np.array([each.ctypes.data], np.uint64) for each in (slot, to)]
    assert _C._remote_check(at[0], at[1], nbytes, b"i" * 16, b"k" * 16, secret, 1) == b"\0"
    np.testing.assert_array_equal(to, block)
    assert check(slot, nbytes, secret, None) == 0 and check(slot, nbytes, b"x" * 16) == 6
    if nbytes > 1:
        assert check(slot, nbytes - 1, secret) == 4


def test_the_header_as_other_programs_read_it() -> None:
    slot, _ = sealed(100, None)
    assert slot[:4].tobytes() == b"KVR1" and slot[4:8].tobytes() == bytes(4)
    assert int.from_bytes(slot[8:16].tobytes(), "little") == 100
    assert slot[16:48].tobytes() == b"i" * 16 + b"k" * 16 and slot[56:64].tobytes() == bytes(8)


def test_arguments_of_the_c_calls() -> None:
    slot, _ = sealed(8, None)
    at = np.array([slot.ctypes.data], np.uint64)
    for changed, match in (
        ({"identity": b"short"}, "identity has 5 bytes"),
        ({"keys": b"k" * 17}, "keys has 17 bytes"),
        ({"secret": b"s"}, "secret has 1 bytes"),
        ({"blocks": np.zeros(2, np.uint64)}, "blocks"),
    ):
        given = {"slots": at, "blocks": None, "nbytes": 8, "identity": b"i" * 16, "keys": b"k" * 16, "secret": None}
        with pytest.raises(ValueError, match=match):
            _C._remote_check(**{**given, **changed})  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _C._remote_seal(at, None, 8, b"i" * 16, b"k" * 16, None)  # type: ignore[arg-type]


def test_addresses_and_hosts() -> None:
    for wrong in ("", "host", ":1", "host:", "host:0", "host:70000", "host:x"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            _client.split_address(wrong)
    assert _client.split_address("[::1]:5") == ("::1", 5)
    with pytest.raises(Error, match="no address of this machine"):
        make(hostname="192.0.2.1")
    assert _store._removal(-706) == "leased"
