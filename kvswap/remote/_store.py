"""RemoteStore: blocks by key in the memory of other nodes, by Mooncake Store. See docs/many-nodes.md."""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import logging
import math
import os
import stat
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvswap import _C
from kvswap._timeouts import seconds
from kvswap.files import Layout

from . import _codes, _counts
from ._calls import MASTER, STORES, Calls, Turn
from ._client import Client, Closed, split_address
from ._codes import Meaning
from ._epoch import SLOT_NBYTES, SLOTS, Epoch, node_of
from ._names import HASH_NBYTES, as_bytes, hashes, identity_of, names
from ._transfer import RemoteTransfer

_log = logging.getLogger("kvswap.remote")

HEADER_NBYTES = 64
_THREADS = 8
_MOST_THREADS = 256
_MOST_SECONDS = 86400
_STAGING_NBYTES = 128 << 20
LEASE_SECONDS = 10.0  # of a key that was looked up or loaded: the master's default_kv_lease_ttl, unless it is changed
_MISS_SECONDS = 1.0
_GRACE_SECONDS = 0.2  # for an answer that says why there is none
_LOOKUP_SECONDS = 1.0  # limit of a look-up
_MOST_ANSWERS = 65536
_MOST_DAMAGED = 4096
_MOST_LOCATED = 1024  # keys of one question to the master
_MOST_NODES = 1024
_VERDICTS = ("", "no_header", "other_identity", "other_key", "other_length", "wrong_bytes", "wrong_mac")
_COPY, _AGAIN, _IN_PLACE = range(3)  # how a block is checked
_memories: dict[int, NDArray[Any]] = {}  # staging memory, by the id of its client
Removal = Literal["removed", "leased", "absent", "unknown"]


@dataclass(eq=False)
class _Part:
    """Blocks of a transfer that go together, with distinct keys."""

    transfer: RemoteTransfer
    epoch: bytes
    positions: list[int]
    keys: list[bytes]
    addresses: NDArray[np.uint64]

    def some(self, chosen: Sequence[int]) -> _Part:
        return _Part(
            self.transfer,
            self.epoch,
            [self.positions[i] for i in chosen],
            [self.keys[i] for i in chosen],
            self.addresses[np.asarray(chosen, np.intp)],
        )


class RemoteStore:
    """Blocks by key in the memory of other nodes, which Mooncake Store runs (mooncake_master, mooncake_client). A load
    returns exactly the stored bytes, or says for each block that it is missing: header, key, length and checksum are
    compared after the read. A block never changes: a key determines its bytes.

    master: HOST:PORT of mooncake_master.
    layout: a kvswap.files.Layout: what tells blocks of one kind from another.
    timeout: seconds until a load or a store ends, whatever nodes and master do: what has no answer then has failed.
    replicas: nodes that hold each block, as far as there are so many.
    secret: path of a file that only this user can read, of 16 bytes or more: blocks of clients without it are refused.
    threads, staging_nbytes: each thread makes one call at a time, over its part of the staging memory. None: 128 MiB,
      or a block a thread if that is more.
    queue: limit of unfinished transfers before QueueFull.
    hostname: by which nodes reach this machine; None: its address on the way to the master.
    metadata, protocol, devices: as Mooncake's setup() takes them.
    direct: loads go from the node into the caller's memory, and are checked there, without the copy. A load ends then
      only when Mooncake's call has returned, a minute and more after the limit; a block that failed leaves any bytes.
      register() that memory. A node that is silent for longer and comes back can write there until close().

    Between calls there is no order: wait for a store before a load of the same keys. Any thread may use it. In the
    child of a fork() each call is a miss. kvswap.Error: Mooncake is missing, or its client cannot use the master.
    """

    def __init__(
        self,
        master: str,
        layout: Layout,
        *,
        timeout: float = 10.0,
        replicas: int = 1,
        secret: str | os.PathLike[str] | None = None,
        threads: int = _THREADS,
        staging_nbytes: int | None = None,
        queue: int = 128,
        hostname: str | None = None,
        metadata: str = "P2PHANDSHAKE",
        protocol: str = "tcp",
        devices: str = "",
        direct: bool = False,
    ) -> None:
        _check(master, layout, timeout)
        for name, value, least, most in (
            ("replicas", replicas, 1, 1 << 16),
            ("threads", threads, 4, _MOST_THREADS),
            ("queue", queue, 1, 1 << 31),
            ("staging_nbytes", _STAGING_NBYTES if staging_nbytes is None else staging_nbytes, 0, 1 << 48),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ValueError(f"{name} is {value!r}: must be an integer from {least:,} to {most:,}")
        self.master, self.layout, self.timeout, self.replicas = master, layout, timeout, replicas
        self.direct = direct
        self.pid = os.getpid()
        self.identity = identity_of(layout.block_nbytes, layout.text)
        self._secret = None if secret is None else read_secret(secret)
        self._nbytes = HEADER_NBYTES + layout.block_nbytes
        self._stride = -(-self._nbytes // 64) * 64
        least = threads * self._stride
        staging_nbytes = max(_STAGING_NBYTES, least) if staging_nbytes is None else staging_nbytes
        self._piece = staging_nbytes // least
        if self._piece < 1:
            raise ValueError(f"staging_nbytes is {staging_nbytes}: {threads} threads need {least}, for a block each")
        self._limit = queue
        self._lock = threading.Lock()
        self._unfinished: set[RemoteTransfer] = set()  # guarded by _lock, as the next four
        self._of: bytes | None = None  # the epoch of the next two
        self._answers: dict[bytes, float] = {}  # of look-ups: until when it is there; negative: it is not
        self._damaged: dict[bytes, float] = {}  # from when on the block can be removed
        self._nodes: dict[str, None] = {}
        self._closed = False
        self._stores_turn, self._loads_turn = (Turn(protocol == "tcp") for _ in range(2))
        self._failed = set[int]()  # threads whose staging memory a transfer that failed may still write to
        self.counts = _counts.new()
        size = threads * self._piece * self._stride + 2 * SLOTS * SLOT_NBYTES
        self._memory = np.zeros(size + 64, np.uint8)
        self._base = -(-self._memory.ctypes.data // 64) * 64
        self._client = Client(master, hostname, metadata, protocol, devices)
        self._config = self._client.config()
        self._config.replica_num = replicas
        _memories[id(self._client)] = self._memory  # until no call can write there
        try:
            self._client.register(self._base, size)
        except BaseException:
            _close_client(self._client, 0.0)
            raise
        end = self._base + size
        slots = range(end - 2 * SLOTS * SLOT_NBYTES, end, SLOT_NBYTES)
        self._epoch = Epoch(self._client, self.identity, self._secret, list(slots[:SLOTS]), self._loads_turn)
        self._reader_slots = list(slots[SLOTS:])  # for another identity's
        self._calls = Calls(threads, late=timeout)
        weakref.finalize(self, _stop, self._client, self._calls, self._epoch)  # a store that is dropped; never waits
        self._epoch.since(time.monotonic(), time.monotonic() + min(timeout, 5.0))
        if self._epoch.why:
            _log.warning("%s: %s; until it can be read everything is a miss", self, self._epoch.why)
        _counts.add(self)

    # -- calls --------------------------------------------------------------------------------------------------------

    def store(self, keys: Any, blocks: Any, ids: Any = None) -> RemoteTransfer:
        """Store blocks under keys; returns the RemoteTransfer at once. The bytes must not change until it ended.

        keys: a sequence of bytes (1 to 512 each) or of pairs (block id, pool), or a 2-D array of bytes, a row a key.
        blocks, ids: one tensor, block i at its address + i * block_nbytes, with i in ids; or, without ids, one address
          or tensor a key; of host memory. Tensors are held until the transfer ended; memory behind plain addresses must
          stay mapped as long.

        A block that did not fail is accepted: Mooncake has it, or had it, or another client is writing it. QueueFull:
        too many unfinished transfers. ValueError, IndexError, TypeError: wrong arguments; nothing was queued. Later
        failures: RemoteTransfer.failed_positions."""
        return self._submit("store", keys, blocks, ids)

    def load(self, keys: Any, blocks: Any, ids: Any = None) -> RemoteTransfer:
        """Load the blocks of these keys; returns the RemoteTransfer at once. A block that is missing, damaged, or has
        not arrived within the limit, is among the failed blocks. Its memory is unchanged, or, where the block was
        cleared meanwhile or the limit came before the end, has its bytes. Arguments and errors: as in store()."""
        return self._submit("load", keys, blocks, ids)

    def contains(self, keys: Any, /) -> list[bool]:
        """Whether each key's block is there: a list of bool. What is there stays for LEASE_SECONDS unless its node
        dies, and is not asked for again meanwhile; what is not is asked for again after a second. All are missing if
        the master does not answer within a second."""
        listed = as_bytes(keys)
        epoch = self._known()
        if epoch is None:
            return [False] * len(listed)
        with self._lock:
            answers = self._answers if self._is_of_locked(epoch) else {}
            if self._damaged:
                answers = answers | dict.fromkeys(self._damaged, -math.inf)
            known = list(map(answers.get, listed))
        now = time.monotonic()
        unknown = listed
        if any(known):
            unknown = [key for key, until in zip(listed, known, strict=True) if until is None or -now <= until <= now]
        found = self._look_up(epoch, list(dict.fromkeys(unknown))) if unknown else {}
        if len(found) == len(listed):  # none was known, none comes twice: they are in their order
            return [until > now for until in found.values()]
        return [until is not None and until > now for until in map(found.get, listed, known)]

    def delete(self, keys: Any, /) -> list[Removal]:
        """Remove blocks, as far as Mooncake lets them go now: 'removed', 'leased' (somebody looked it up or loaded it
        in the last ten seconds: it stays), 'absent', or 'unknown' (no answer within the limit) for each key."""
        listed = as_bytes(keys)
        epoch = self._known()
        if epoch is None:
            return ["unknown"] * len(listed)
        distinct = list(dict.fromkeys(listed))
        codes = self._ask_all("batch_remove", epoch, distinct, self.timeout)
        became = {key: _removal(code) for key, code in zip(distinct, codes or (), strict=False)}
        self._forget(key for key, what in became.items() if what != "leased")
        self._count("deleted", sum(what == "removed" for what in became.values()))
        return [became.get(key, "unknown") for key in listed]

    def clear(self, timeout: float | None = None, *, identity: bytes | None = None) -> None:
        """Begin a new epoch: no client finds a block of this layout that was stored before, at the latest a second
        after the return. Their memory comes back by Mooncake's eviction. identity: another layout's, as `identity` has
        it. kvswap.Error: it is not sure that the new epoch is known everywhere; call it again."""
        self._refuse_closed()
        if identity is not None and (not isinstance(identity, bytes) or len(identity) != HASH_NBYTES):
            raise ValueError(f"identity is {identity!r}: must be {HASH_NBYTES} bytes, as the other store's `identity`")
        limit = self._seconds(timeout)
        end = time.monotonic() + limit
        epoch = self._epoch
        if identity is not None:
            epoch = Epoch(self._client, identity, self._secret, self._reader_slots, self._loads_turn)
        try:
            why = self._calls.ask(STORES, lambda thread: epoch.renew(self._slot(thread), end), limit + _GRACE_SECONDS)
        finally:
            if epoch is not self._epoch:
                epoch.close()
        if why != "":
            raise _C.Error(f"clear(): {why or f'no answer within {limit:g} seconds'}; call it again")
        self._count("cleared", 1)

    def register(self, address: int, nbytes: int) -> None:
        """Tell Mooncake of memory that direct loads go to, once. It must stay mapped until close()."""
        self._refuse_closed()
        for name, value in (("address", address), ("nbytes", nbytes)):
            if not isinstance(value, int) or not 0 < value < 1 << 64:
                raise ValueError(f"{name} is {value!r}: must be an integer above 0")
        self._client.register(address, nbytes)

    @property
    def epoch(self) -> bytes | None:
        """As it was read in the last second; None: it cannot be read, and everything is a miss."""
        return self._known()

    def stats(self) -> dict[str, Any]:
        """Counters; of each node that is known whether it answers; why nothing can be found, if so."""
        silent = set(self._calls.late())
        with self._lock:
            nodes = {node: "no answer" if node in silent else "up" for node in self._nodes}
            counts, unfinished = dict(self.counts), sum(not each.done() for each in self._unfinished)
        return {**counts, "unfinished": unfinished, "nodes": nodes, "epoch": self._epoch.why}

    def close(self, timeout: float | None = None) -> None:
        """Refuse new calls, wait for unfinished transfers, at most `timeout` seconds (None: the store's), and leave
        Mooncake. If a call has not returned then, its thread and memory stay until the process ends. A second call does
        nothing."""
        end = time.monotonic() + self._seconds(timeout)
        if self.pid != os.getpid():
            return
        with self._lock:
            first, self._closed = not self._closed, True
            unfinished = list(self._unfinished)
        if not first:
            return
        for transfer in unfinished:
            if not transfer.done():
                transfer._ended.wait(max(0.0, end - time.monotonic()))
                transfer.cancel()
        self._epoch.close()
        self._calls.close()
        if not _close_client(self._client, max(0.3, end - time.monotonic())):
            _log.warning("%s: calls of Mooncake have not returned; its client stays open until the process ends", self)
        _counts.remove(self)

    def __enter__(self) -> RemoteStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        what = f"identity {self.identity.hex()}, blocks of {self.layout.block_nbytes} bytes"
        return f"<RemoteStore at {self.master}, {what}>"

    # -- submitting ---------------------------------------------------------------------------------------------------

    def _seconds(self, timeout: float | None) -> float:
        limit = seconds(timeout)
        return self.timeout if limit is None else limit

    def _refuse_closed(self) -> None:
        if self.pid != os.getpid() or self._closed:
            raise _C.Error("the store is closed, or was opened before fork()")

    def _known(self) -> bytes | None:
        if self.pid != os.getpid() or self._closed:
            return None
        return self._epoch.known()

    def _submit(self, what: Literal["store", "load"], keys: Any, blocks: Any, ids: Any) -> RemoteTransfer:
        listed = as_bytes(keys)
        count = len(listed)
        for i, each in enumerate(blocks if isinstance(blocks, (list, tuple)) else (blocks,)):
            if not isinstance(each, int) and hasattr(each, "__cuda_array_interface__"):
                raise TypeError(f"blocks[{i}] is in GPU memory: a remote store takes host memory")
        addresses, hold = _C._remote_addresses(blocks, ids, self.layout.block_nbytes, count, what == "load")
        if not addresses.all():
            raise ValueError(f"blocks[{np.flatnonzero(addresses == 0)[0]}] is a null address")
        if what == "load" and (np.diff(np.sort(addresses)) < self.layout.block_nbytes).any():
            raise ValueError("blocks of a load overlap: two keys would have the same memory")
        transfer = RemoteTransfer(what, count, self.layout.block_nbytes, hold, self.timeout)
        if self.pid != os.getpid():
            transfer._settle((), [(i, _C.Error("the store was opened before fork()")) for i in range(count)])
            return transfer
        epoch = self._epoch.known()  # before a thread of the store reads the bytes
        with self._lock:
            if self._closed:
                raise _C.Error("the store is closed")
            self._unfinished = {each for each in self._unfinished if not each.done()}
            if len(self._unfinished) >= self._limit:
                self.counts["refused_full"] += 1
                raise _C.QueueFull(f"{self._limit} transfers of the remote store have not ended: call again later")
            self._unfinished.add(transfer)
        if epoch is None:
            self._fail(transfer, range(count), _C.MissingKey(f"everything is a miss: {self._epoch.why}"), "missed")
            return transfer
        whole = _Part(transfer, epoch, list(range(count)), listed, addresses)
        for part in _distinct(whole):
            if what == "store":
                self._queue(STORES, part, self._store, self._piece)
            else:
                self._queue(MASTER, part, self._locate, _MOST_LOCATED)
        return transfer

    def _queue(self, lane: str, part: _Part, run: Any, most: int) -> None:
        """In pieces of about equal size, as many as it takes."""
        count = len(part.keys)
        pieces = -(-count // most)
        for i in range(pieces):
            some = part.some(range(count * i // pieces, count * (i + 1) // pieces))
            if not self._calls.submit(lane, functools.partial(self._run, run, some)):
                self._fail(some.transfer, some.positions, _C.Error(f"{lane} does not answer"), "late")

    def _run(self, run: Any, part: _Part, thread: int) -> None:
        try:
            if not part.transfer.done():
                run(part, thread)
        except Closed:
            self._fail(part.transfer, part.positions, _C.Error("the store is closed"), "failed")
        except Exception as error:  # no transfer is left without an end
            _log.exception("kvswap.remote: a defect")
            self._fail(part.transfer, part.positions, error, "failed")

    def _slot(self, thread: int) -> int:
        return self._base + thread * self._piece * self._stride

    def _slots(self, thread: int, count: int) -> NDArray[np.uint64]:
        found: NDArray[np.uint64] = np.uint64(self._slot(thread)) + np.arange(count, dtype=np.uint64) * np.uint64(
            self._stride
        )
        return found

    # -- a part, on a thread ------------------------------------------------------------------------------------------

    def _store(self, part: _Part, thread: int) -> None:
        count = len(part.keys)
        named, slots = names(self.identity, part.epoch, part.keys), self._slots(thread, count)
        if not part.transfer._touch(part.positions):
            return
        try:
            _C._remote_seal(slots, part.addresses, self.layout.block_nbytes, self.identity, hashes(named), self._secret)
        finally:
            part.transfer._untouch(part.positions)
        self._remove_damaged(part)
        with self._stores_turn.taken():
            codes = self._client.codes(
                "batch_put_from", count, named, slots.tolist(), [self._nbytes] * count, self._config
            )
        right = [i for i, code in enumerate(codes) if _codes.meaning(code) is Meaning.HIT]
        self._forget((part.keys[i] for i in right), misses_only=True)
        self._count("stored", len(right))
        part.transfer._settle([part.positions[i] for i in right])
        for i in set(range(count)).difference(right):
            why = "no_room" if codes[i] == _codes.NO_ROOM else "failed"
            self._fail(part.transfer, [part.positions[i]], _C.Error(_codes.reason(codes[i])), why)

    def _remove_damaged(self, part: _Part) -> None:
        """A put would answer 0 and keep them."""
        now = time.monotonic()
        with self._lock:
            keys = [key for key in part.keys if self._damaged.get(key, now) < now] if self._of == part.epoch else []
        if keys:
            codes = self._client.codes("batch_remove", len(keys), names(self.identity, part.epoch, keys))
            with self._lock:
                for key, code in zip(keys, codes, strict=True):
                    if code in (0, _codes.ABSENT):
                        self._damaged.pop(key, None)

    def _locate(self, part: _Part, thread: int) -> None:
        """Ask the master which node has each block, and queue a load from each node."""
        named = names(self.identity, part.epoch, part.keys)
        try:
            replicas = self._client.call("batch_get_replica_desc", named)
        except Closed:
            raise
        except Exception as error:
            self._fail(part.transfer, part.positions, _C.Error(f"the master does not answer: {error}"), "failed")
            return
        by_node: dict[str, list[int]] = {}
        with self._lock:
            damaged = set(self._damaged)
        for i, (key, name) in enumerate(zip(part.keys, named, strict=True)):
            node = None if key in damaged else node_of(replicas.get(name, ()))
            if node is None:
                self._miss(part, i, "the block is on no node")
            else:
                by_node.setdefault(node, []).append(i)
        with self._lock:
            self._nodes.update(dict.fromkeys(by_node))
            while len(self._nodes) > _MOST_NODES:
                del self._nodes[next(iter(self._nodes))]
        for node, chosen in by_node.items():
            self._queue(node, part.some(chosen), self._load, self._piece)

    def _load(self, part: _Part, thread: int) -> None:
        if self.direct and not part.transfer._touch(part.positions):
            return
        slots, size = self._slots(thread, len(part.keys)), self._nbytes
        codes = self._get(part, slots)
        arrived = [i for i, code in enumerate(codes) if code == size]
        if any(_codes.meaning(code) is Meaning.DOWN for code in codes):
            self._failed.add(thread)
        for i, code in enumerate(codes):
            if code != size:
                self._miss(part, i, "it has another length" if code > 0 else _codes.reason(code))
        some = part.some(arrived)
        if not arrived or not (self.direct or part.transfer._touch(some.positions)):
            return
        checked = _C._remote_check(
            slots[np.asarray(arrived, np.intp)],
            some.addresses,
            self.layout.block_nbytes,
            self.identity,
            hashes(names(self.identity, part.epoch, some.keys)),
            self._secret,
            _IN_PLACE if self.direct else _AGAIN if thread in self._failed else _COPY,
        )
        for i, verdict in enumerate(checked):
            if verdict:
                self._refuse(some, i, _VERDICTS[verdict])
        right = [position for position, verdict in zip(some.positions, checked, strict=True) if verdict == 0]
        whole = part.transfer._untouch(right)
        self._epoch.then(functools.partial(self._end_load, part.transfer, part.epoch, right), at_once=whole)

    def _get(self, part: _Part, slots: NDArray[np.uint64]) -> list[int]:
        named, count, at = names(self.identity, part.epoch, part.keys), len(part.keys), slots.tolist()
        if not self.direct:
            with self._loads_turn.taken():
                return self._client.codes("batch_get_into", count, named, at, [self._nbytes] * count)
        sizes = [[HEADER_NBYTES, self.layout.block_nbytes]] * count
        both = [list(pair) for pair in zip(at, part.addresses.tolist(), strict=True)]
        with self._loads_turn.taken():
            return self._client.codes("batch_get_into_multi_buffers", count, named, both, sizes)

    def _end_load(self, transfer: RemoteTransfer, epoch: bytes, right: list[int], now: bytes) -> None:
        """Blocks have arrived; now: the epoch, read after them."""
        if now == epoch:
            self._count("loaded", len(right))
            transfer._settle(right)
        else:
            self._fail(transfer, right, _C.MissingKey("it was cleared"), "missed")

    def _miss(self, part: _Part, i: int, why: str) -> None:
        self._forget([part.keys[i]])
        self._fail(part.transfer, [part.positions[i]], _C.MissingKey(why), "missed")

    def _refuse(self, part: _Part, i: int, why: str) -> None:
        """What was read is not the block: it is a miss, until a store after its lease removes it and puts it again."""
        self._miss(part, i, f"the check after the read found {why.replace('_', ' ')}")
        self._count(why, 1)
        with self._lock:
            if self._is_of_locked(part.epoch) and len(self._damaged) < _MOST_DAMAGED:
                self._damaged[part.keys[i]] = time.monotonic() + LEASE_SECONDS

    def _fail(self, transfer: RemoteTransfer, positions: Iterable[int], error: Exception, count: str) -> None:
        wrong = [(position, error) for position in positions]
        self._count(count, len(wrong))
        transfer._settle((), wrong)

    def _count(self, name: str, more: int) -> None:
        with self._lock:
            self.counts[name] += more

    # -- questions to the master --------------------------------------------------------------------------------------

    def _is_of_locked(self, epoch: bytes) -> bool:
        """Whether what is known of blocks is of this epoch. A new epoch begins with nothing."""
        if self._of != epoch and self._epoch.known() == epoch:
            self._of = epoch
            self._answers.clear()
            self._damaged.clear()
        return self._of == epoch

    def _look_up(self, epoch: bytes, wanted: list[bytes]) -> dict[bytes, float]:
        """Until when each is there, negative where it is not; empty if there is no answer."""
        begin = time.monotonic()
        codes = self._ask_all("batch_is_exist", epoch, wanted, min(self.timeout, _LOOKUP_SECONDS))
        if codes is None:
            return {}
        there, missing = begin + LEASE_SECONDS, -begin - _MISS_SECONDS
        found = dict(zip(wanted, [there if code == _codes.THERE else missing for code in codes], strict=True))
        with self._lock:
            if self._is_of_locked(epoch):
                self._answers.update(found)
                if len(self._answers) > _MOST_ANSWERS:  # the older half, in one go: a dict's first key is slow to find
                    for key in list(itertools.islice(self._answers, _MOST_ANSWERS // 2)):
                        del self._answers[key]
        return found

    def _forget(self, keys: Iterable[bytes], *, misses_only: bool = False) -> None:
        with self._lock:
            for key in keys:
                if self._answers.get(key, math.inf) < (0.0 if misses_only else math.inf):
                    del self._answers[key]

    def _ask_all(self, call: str, epoch: bytes, keys: list[bytes], limit: float) -> list[int] | None:
        """Mooncake's code for each key; None: none within the limit."""
        if self._closed:
            return None
        named = names(self.identity, epoch, keys)
        found: list[int] | None = self._calls.ask(MASTER, lambda _: self._client.codes(call, len(keys), named), limit)
        return found


def _check(master: str, layout: Layout, timeout: float) -> None:
    split_address(master)
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a kvswap.files.Layout, not {type(layout).__name__}")
    limit = seconds(timeout)
    if limit is None or not 0 < limit <= _MOST_SECONDS:
        raise ValueError(f"timeout is {timeout}: must be above 0 seconds, and at most {_MOST_SECONDS:,}")


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """16 bytes from a file's bytes. kvswap.Error: others may read it, or it is too short."""
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        text = file.read(1 << 16)
    if found.st_uid not in (os.getuid(), 0) or stat.S_IMODE(found.st_mode) & 0o077:
        raise _C.Error(f"secret {os.fspath(path)} must belong to this user, with mode 600: others may not read it")
    if len(text.strip()) < 16:
        raise _C.Error(f"secret {os.fspath(path)} has {len(text.strip())} bytes: it must have at least 16")
    return hashlib.blake2b(text.strip(), digest_size=HASH_NBYTES, person=b"kvswap secret").digest()


def _distinct(part: _Part) -> list[_Part]:
    """Parts in which no key comes twice."""
    if len(set(part.keys)) == len(part.keys):
        return [part] if part.keys else []
    times: dict[bytes, int] = {}
    ranks: dict[int, list[int]] = {}
    for i, key in enumerate(part.keys):
        times[key] = times.get(key, -1) + 1
        ranks.setdefault(times[key], []).append(i)
    return [part.some(chosen) for chosen in ranks.values()]


def _removal(code: int) -> Removal:
    if code == 0:
        return "removed"
    if code == _codes.ABSENT:
        return "absent"
    return "leased" if _codes.meaning(code) is Meaning.RETRY else "unknown"


def _close_client(client: Client, timeout: float) -> bool:
    closed = client.close(timeout)
    if closed:
        _memories.pop(id(client), None)
    return closed


def _stop(client: Client, calls: Calls, epoch: Epoch) -> None:
    epoch.close()
    calls.close()
    _close_client(client, 0.0)


@atexit.register
def _close_all() -> None:
    for store in _counts.stores():
        store.close(1.0)
