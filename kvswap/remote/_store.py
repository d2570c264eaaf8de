"""The client's side: RemoteStore. See docs/remote.md for the life of a block."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import queue as queue_module
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvswap import _C
from kvswap.files import Layout
from kvswap.typing import DeviceLike

from . import _counts
from . import _messages as m
from ._agent import Agent, NixlAgent
from ._link import Link, NodeDown, Peer
from ._mover import Move, Mover
from ._names import Namer
from ._placement import Node, NodeFile, Placement, check_nodes
from ._secrets import Secret, need_curve, read_secret
from ._transfer import RemoteTransfer

_log = logging.getLogger("kvswap.remote")

HEADER_NBYTES = 64
_WORKERS = 4
_ANSWER_SECONDS = 0.8  # limit of an answer
_STAGING_NBYTES = 64 << 20
_PIECE_NBYTES = 8 << 20  # moved at once
_NAME = m.KEY_NBYTES
_VERDICTS = ("", "is gone", "is another block", "was written again", "has another length", "has wrong bytes")
_WRONG_BYTES = 5
After: TypeAlias = "_C.Event | _C.Transfer"


@dataclass(eq=False)
class _Part:
    """Blocks of a transfer whose next candidate is one node."""

    transfer: RemoteTransfer
    positions: NDArray[np.int64]
    names: bytes
    addresses: NDArray[np.uint64]
    peers: Sequence[Peer]  # candidates that are left, the first one now; of a store all of them
    replace: bool
    whys: dict[int, Exception]  # of all parts of the transfer that were cut from one: why blocks have not succeeded yet

    def some(self, chosen: NDArray[np.intp]) -> _Part:
        names = np.frombuffer(self.names, np.uint8).reshape(-1, _NAME)[chosen].tobytes()
        addresses = self.addresses[chosen]
        return _Part(self.transfer, self.positions[chosen], names, addresses, self.peers, self.replace, self.whys)

    def note(self, error: Exception) -> None:
        for position in self.positions.tolist():
            self.whys[position] = error


class _Staging:
    """Slots of this client's memory, the only memory that NIXL knows of here."""

    def __init__(self, agent: Agent, stride: int, nbytes: int, device: _C.Device | None) -> None:
        self.stride, self.count = stride, max(2, nbytes // stride)
        size = self.count * stride + 64
        self._memory: Any
        if device is None:
            self._memory = np.zeros(size, np.uint8)
            self._base = -(-self._memory.ctypes.data // 64) * 64
        else:
            self._memory = device.alloc(size, host=True)
            self._base = -(-self._memory.ptr // 64) * 64
        self._free = list(range(self.count))
        self._late: list[tuple[_C.Transfer, list[int], Any]] = []  # slots that a copy of the device may still use
        self._changed = threading.Condition()
        agent.register(self._base, self.count * stride)

    def take(self, most: int, end: float) -> list[int]:
        """At least one slot; kvswap.Error: none came free in time."""
        with self._changed:
            while not self._free and not self._ended():
                left = end - time.monotonic()
                if left <= 0:
                    raise _C.Error("no staging memory came free in time")
                self._changed.wait(min(left, 0.05) if self._late else left)
            taken, self._free = self._free[:most], self._free[most:]
        return taken

    def _ended(self) -> bool:
        """Whether there are free slots, those of late copies that have ended among them."""
        for each in [each for each in self._late if each[0].done()]:
            self._late.remove(each)
            self._free.extend(each[1])
        return bool(self._free)

    def give(self, slots: list[int], copy: _C.Transfer | None = None, hold: Any = None) -> None:
        """copy: it may still use them, and the memory that hold keeps, until it has ended."""
        with self._changed:
            if copy is not None and not copy.done():
                self._late.append((copy, slots, hold))
            else:
                self._free.extend(slots)
            self._changed.notify_all()

    def addresses(self, slots: list[int]) -> NDArray[np.uint64]:
        found: NDArray[np.uint64] = np.uint64(self._base) + np.asarray(slots, np.uint64) * np.uint64(self.stride)
        return found


class RemoteStore:
    """Blocks by key in the memory of other nodes, and in their files. A load returns exactly the stored bytes, or says
    for each block that it is missing: what was read is compared with key, generation, length and checksum.

    nodes: where `kvswap remote serve` runs: a list of Node, or the path of a file with a node a line (HOST:PORT
      PUBLIC-KEY [NAME]), which is looked at again once a second.
    layout: a kvswap.files.Layout: what tells blocks of one kind from another.
    key: this client's key pair: a path of `kvswap remote keygen`, or a Secret.
    replicas: nodes that hold each block. queue: limit of unfinished transfers before QueueFull.
    timeout: seconds that the bytes of one chunk may take. staging_nbytes: memory that NIXL reads and writes here.
    device: a Device, or what Device() takes: blocks may also be in its memory. kvswap's transfers then copy all blocks
      from and to staging memory, which is pinned; they come after what the device's compute stream has at the call.
      None: host memory alone.
    agent: what moves the bytes; None: NIXL with UCX. It must be new, and belongs to the store.

    Between calls there is no order: wait for a store before a load of the same keys. Any thread may use it. The child
    of a fork() must make its own. kvswap.Error: NIXL, pyzmq or msgspec is missing, or the key cannot be read.
    """

    def __init__(
        self,
        nodes: Sequence[Node] | str | os.PathLike[str],
        layout: Layout,
        *,
        key: Secret | str | os.PathLike[str],
        replicas: int = 1,
        queue: int = 128,
        timeout: float = 5.0,
        staging_nbytes: int = _STAGING_NBYTES,
        agent: Agent | None = None,
        device: DeviceLike | None = None,
    ) -> None:
        need_curve()
        if not isinstance(replicas, int) or replicas < 1:
            raise ValueError(f"replicas is {replicas}: must be at least 1")
        if queue < 1 or not timeout > 0:
            raise ValueError(f"queue is {queue} and timeout {timeout}: must be at least 1, and above 0")
        self.layout, self.replicas, self.timeout = layout, replicas, timeout
        self._file = NodeFile(nodes) if isinstance(nodes, (str, os.PathLike)) else None
        listed = self._file.nodes if self._file is not None else list(nodes)  # type: ignore[arg-type]
        check_nodes(listed)
        pair = key if isinstance(key, Secret) else read_secret(key)
        self._namer = Namer(layout.block_nbytes, layout.text)
        self._agent = agent or NixlAgent(f"kvswap-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(6)}")
        self._stride = -(-(HEADER_NBYTES + layout.block_nbytes) // 64) * 64
        self._device = None if device is None else _C.Device(device)
        self._copies = None if self._device is None else _C.Stream(self._device)  # nothing else is queued on it
        self._staging = _Staging(self._agent, self._stride, staging_nbytes, self._device)
        self._piece = max(1, min(self._staging.count // 2, _PIECE_NBYTES // self._stride))
        self._limit, self.pid = queue, os.getpid()
        self._lock = threading.Lock()
        self._unfinished: set[RemoteTransfer] = set()  # guarded by _lock, as the next two
        self._peers: dict[Node, Peer] = {}
        self._order = (Placement([]), [])  # type: tuple[Placement, list[Peer]]
        self._closed = False
        self.counts = _counts.new()
        mover = self._mover = Mover(self._agent)
        self._link = Link(
            pair,
            layout.block_nbytes,
            lambda peer, welcome: mover.connect((peer, peer.run), welcome.metadata),
            lambda peer: mover.disconnect((peer, peer.run), peer.down()),
        )
        self._set_nodes(listed)
        self._tasks: queue_module.SimpleQueue[_Part | None] = (
            queue_module.SimpleQueue()
        )  # the limit of unfinished transfers bounds it
        self._workers = [
            threading.Thread(target=_work, args=(weakref.ref(self), self._tasks), name="kvswap-remote", daemon=True)
            for _ in range(_WORKERS)
        ]
        for worker in self._workers:
            worker.start()
        weakref.finalize(self, _stop, self._link, mover, self._tasks)  # a store that is dropped; never waits
        _counts.add(self)

    # -- calls --------------------------------------------------------------------------------------------------------

    def store(
        self, keys: Any, blocks: Any, ids: Any = None, *, replace: bool = True, after: Sequence[After] = ()
    ) -> RemoteTransfer:
        """Store blocks under keys; returns the RemoteTransfer at once. The bytes must not change until it ended.

        keys: a sequence of bytes (1 to 512 each) or of pairs (block id, pool), or a 2-D array of bytes, a row a key.
        blocks, ids: one tensor, block i at its address + i * block_nbytes, with i in ids; or, without ids, one address
          or tensor a key; of host memory, or of the store's device. Tensors are held until the transfer ended; memory
          behind plain addresses must stay mapped as long.
        after: with a device, kvswap Events and Transfers that the copies start after; none of a Transfer that failed.
        replace: False: an existing key is left unchanged and counts as stored, for keys that determine the bytes.

        A block is stored if one of its nodes has it. QueueFull: too many unfinished transfers. ValueError, IndexError,
        TypeError: wrong arguments; nothing was queued. Later failures: RemoteTransfer.failed_blocks."""
        return self._submit("store", keys, blocks, ids, replace, after)

    def load(self, keys: Any, blocks: Any, ids: Any = None, *, after: Sequence[After] = ()) -> RemoteTransfer:
        """Load the blocks of these keys; returns the RemoteTransfer at once. A block that is missing, was evicted while
        it was read, or is damaged, is among the failed blocks, and its memory is unchanged; that of a block whose copy
        to the device failed, or did not end in time, is undefined. Arguments and errors: as in store()."""
        return self._submit("load", keys, blocks, ids, False, after)

    def delete(self, keys: Any, /) -> RemoteTransfer:
        """Delete blocks; returns the RemoteTransfer at once. A missing key counts as deleted. A block of which a node
        is down fails: the node may have it when it returns."""
        return self._submit("delete", keys, None, None, False)

    def contains(self, keys: Any, /) -> list[bool]:
        """Whether each key's block exists now: a list of bool. It may be evicted before it is loaded. A node that is
        down, or does not answer within a second, has none."""
        names = self._namer.names(keys)
        self._look()
        placement, peers = self._order
        order = placement.order(names, self.replicas)
        rows = np.frombuffer(names, np.uint8).reshape(-1, _NAME)
        there = np.zeros(len(rows), bool)
        for rank in range(order.shape[1]):
            self._ask_contains(rows, order[:, rank], peers, there)
        found: list[bool] = there.tolist()
        return found

    def stats(self) -> dict[str, Any]:
        """Counters, and of each node whether it is up."""
        with self._lock:
            peers, unfinished = list(self._peers.values()), len(self._unfinished)
        nodes = {peer.node.placed_by: "up" if peer.welcome is not None else peer.why for peer in peers}
        return {**self.counts, "unfinished": unfinished, "nodes": nodes}

    def wait_nodes(self, count: int | None = None, timeout: float = 10.0) -> int:
        """Wait until so many nodes are up (None: all), or the time is over; returns how many are."""
        end = time.monotonic() + timeout
        while True:
            self._look()
            with self._lock:
                peers = list(self._peers.values())
            up = sum(peer.welcome is not None for peer in peers)
            if up >= (len(peers) if count is None else count) or time.monotonic() > end:
                return up
            time.sleep(0.005)

    def close(self, timeout: float = 60.0) -> None:
        """Refuse new calls, let the transfers end for `timeout` seconds, then disconnect. A second call does
        nothing."""
        if self.pid != os.getpid():
            return
        with self._lock:
            first, self._closed = not self._closed, True
            unfinished = list(self._unfinished)
        if not first:
            return
        end = time.monotonic() + timeout
        for transfer in unfinished:
            transfer._ended.wait(max(0.0, end - time.monotonic()))
            transfer.cancel()
        self._stop()

    def _stop(self) -> None:
        for _ in self._workers:
            self._tasks.put(None)
        self._link.close()
        for worker in self._workers:
            worker.join(self.timeout + 1)
        if self._mover.close():
            self._agent.close()
        _counts.remove(self)

    def __enter__(self) -> RemoteStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RemoteStore of {len(self._peers)} nodes, blocks of {self.layout.block_nbytes} bytes>"

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        if self._file is not None:
            with self._lock:
                changed = self._file.changed()
            if changed:
                self._set_nodes(self._file.nodes)

    def _set_nodes(self, nodes: Sequence[Node]) -> None:
        with self._lock:
            new = [node for node in nodes if node not in self._peers]
            gone = [self._peers.pop(node) for node in list(self._peers) if node not in nodes]
            self._peers.update(zip(new, self._link.connect(new), strict=True))
            self._order = Placement(node.placed_by for node in nodes), [self._peers[node] for node in nodes]
        self._link.leave(gone)

    # -- submitting ---------------------------------------------------------------------------------------------------

    def _submit(
        self, what: Any, keys: Any, blocks: Any, ids: Any, replace: bool, after: Sequence[After] = ()
    ) -> RemoteTransfer:
        if self.pid != os.getpid():
            raise _C.Error("this store was opened before fork(): make one in this process")
        names = self._namer.names(keys)
        count = len(names) // _NAME
        addresses, hold = np.zeros(count, np.uint64), None
        if what != "delete":
            self._check_device(blocks, after)
            addresses, hold = _C._remote_addresses(blocks, ids, self.layout.block_nbytes, count, what == "load")
        if self._device is not None and what != "delete":  # this ends when the compute stream's work so far has ended
            after = [*after, _C.swap_blocks_batch([], [], 1, device=self._device)]
        self._look()
        with self._lock:
            if self._closed:
                raise _C.Error("the store is closed")
            if len(self._unfinished) >= self._limit:
                self.counts["refused_full"] += 1
                raise _C.QueueFull(f"{self._limit} transfers of the remote store have not ended: call again later")
            transfer = RemoteTransfer(what, count, self.layout.block_nbytes, hold, self._ended)
            transfer._after = tuple(after)
            if count:
                self._unfinished.add(transfer)
            placement, peers = self._order
        part = _Part(transfer, np.arange(count), names, addresses, [], replace, {})
        order = placement.order(names, self.replicas)
        if count and order.shape[1] == 0:
            self._fail(part, _C.MissingKey("the list of nodes is empty"))
            return transfer
        kinds, kind_of = np.unique(order, axis=0, return_inverse=True)
        for kind in range(len(kinds)):
            mine = part.some(np.flatnonzero(kind_of.reshape(-1) == kind))
            mine.peers = [peers[i] for i in kinds[kind]]
            self._cut(mine)
        return transfer

    def _check_device(self, blocks: Any, after: Sequence[After]) -> None:
        """Without a device the processor copies the bytes, which cannot read there, and knows no events."""
        if self._device is None:
            for i, each in enumerate(blocks if isinstance(blocks, (list, tuple)) else (blocks,)):
                if not isinstance(each, int) and hasattr(each, "__cuda_array_interface__"):
                    raise TypeError(f"blocks[{i}] is in GPU memory: that needs RemoteStore(device=...)")
            if len(after):
                raise TypeError("after is for a store with a device: RemoteStore(device=...)")
        for i, each in enumerate(after):
            if not isinstance(each, (_C.Event, _C.Transfer)):
                raise TypeError(f"after[{i}] is a {type(each).__name__}: it must be a kvswap Event or Transfer")

    def _cut(self, part: _Part) -> None:
        most = m.MOST_KEYS if part.transfer.what == "delete" else self._piece
        for begin in range(0, len(part.positions), most):
            self._tasks.put(part.some(np.arange(begin, min(begin + most, len(part.positions)))))

    def _ended(self, transfer: RemoteTransfer) -> None:
        with self._lock:
            self._unfinished.discard(transfer)

    def _ask_contains(self, rows: NDArray[Any], node_of: NDArray[Any], peers: list[Peer], there: NDArray[Any]) -> None:
        """One rank of replicas: all nodes are asked at once."""
        asked = []
        end = time.monotonic() + _ANSWER_SECONDS
        for node in np.unique(node_of[~there]).tolist():
            chosen = np.flatnonzero((node_of == node) & ~there)
            for begin in range(0, len(chosen), m.MOST_KEYS):
                some = chosen[begin : begin + m.MOST_KEYS]
                try:
                    future = self._link.ask(peers[node], functools.partial(_contains, rows[some].tobytes()))
                except NodeDown:
                    continue
                asked.append((peers[node], some, future))
        for peer, some, future in asked:
            try:
                answer = self._link.answer(peer, future, end)
            except _C.Error:
                continue
            if isinstance(answer, m.Flags) and len(answer.flags) == len(some):
                there[some] = np.frombuffer(answer.flags, np.uint8) != 0

    # -- a part, on a worker's thread ---------------------------------------------------------------------------------

    def _run(self, part: _Part) -> None:
        try:
            late = self._late(part.transfer)
            if part.transfer.cancelled:
                self._fail(part, _C.Error("cancelled"))
            elif late is not None:
                self._fail(part, late)
            elif part.transfer.what == "load":
                self._load(part)
            elif part.transfer.what == "store":
                self._store(part)
            else:
                self._delete(part)
        except Exception as error:  # no transfer is left without an end
            _log.exception("kvswap.remote: a defect")
            self._fail(part, error)

    def _late(self, transfer: RemoteTransfer) -> Exception | None:
        """Wait for what the copies come after: here, where no slot is claimed yet, and in no lane that others use."""
        end = time.monotonic() + self.timeout
        try:
            for each in transfer._after:
                wait = each.synchronize if isinstance(each, _C.Event) else each.wait
                wait(max(0.0, end - time.monotonic()))
        except TimeoutError:
            return _C.Error(f"on {self._device!r} what a copy comes after did not end within {self.timeout:g} seconds")
        except _C.Error as error:
            return error
        return None

    def _fail(self, part: _Part, otherwise: Exception) -> None:
        """Each block for its own reason, if it has one."""
        found = [(position, part.whys.get(position, otherwise)) for position in part.positions.tolist()]
        misses = sum(isinstance(error, (_C.MissingKey, NodeDown)) for _, error in found)
        with self._lock:
            self.counts["missed"] += misses
            self.counts["failed"] += len(found) - misses
        part.transfer._settle([], found)

    def _succeed(self, part: _Part, right: NDArray[np.bool_], kept: int = 0) -> None:
        positions = part.positions[right].tolist()
        with self._lock:
            self.counts[{"load": "loaded", "store": "stored", "delete": "deleted"}[part.transfer.what]] += len(
                positions
            )
        part.transfer._settle(positions, kept=kept)

    def _request(self, peer: Peer, make: Callable[[int], m.Message]) -> Any:
        end = time.monotonic() + _ANSWER_SECONDS
        return self._link.answer(peer, self._link.ask(peer, make), end)

    # -- loading

    def _load(self, part: _Part) -> None:
        """From the first candidate; what it has not goes on to the next one."""
        peer, found = part.peers[0], np.zeros(len(part.positions), bool)
        try:
            self._load_from(peer, part, found)
        except _C.Error as error:
            part.note(error)
        self._succeed(part, found)
        if found.all():
            return
        rest = part.some(np.flatnonzero(~found))
        rest.peers = part.peers[1:]
        if rest.peers:
            self._load(rest)
        else:
            self._fail(rest, _C.MissingKey("the block is on no node"))

    def _load_from(self, peer: Peer, part: _Part, found: NDArray[np.bool_]) -> None:
        """Note in `found` which blocks have arrived: also where a later read fails."""
        welcome, run = peer.welcome, peer.run
        if welcome is None:
            raise peer.down()
        places = self._request(peer, lambda number: m.Locate(number, part.names))
        slots, generations = _places(places, len(part.positions), welcome)
        at = np.flatnonzero(slots >= 0)
        end = time.monotonic() + self.timeout
        while len(at):
            staged = self._staging.take(len(at), end)
            some, at = at[: len(staged)], at[len(staged) :]
            found[some] = self._read(peer, run, staged, part.some(some), _addresses(welcome, slots[some]),
                                     generations[some], end)  # fmt: skip

    def _read(
        self, peer: Peer, run: int, staged: list[int], part: _Part, remote: NDArray[Any], generations: NDArray[Any],
        end: float,
    ) -> NDArray[np.bool_]:  # fmt: skip
        """Read slots, check them, and copy what is right to where it is wanted. Which blocks have arrived."""
        local, copies = self._staging.addresses(staged), list[Any]()
        move = self._move("READ", (peer, run), local, remote, staged, copies)
        to = part.addresses if self._device is None else None
        try:
            move.wait(end)
            checked = _C._remote_check(local, to, self.layout.block_nbytes, part.names, generations)
            verdicts = np.frombuffer(checked, np.uint8)
            arrived: NDArray[np.bool_] = verdicts == 0
            if to is None and arrived.any():
                right = np.flatnonzero(arrived)
                arrived[right] = self._copy(part.some(right), local[right], copies, end)
        finally:
            if self._mover.finish(move):
                self._link.tell(peer, m.Release(part.names, generations.astype("<i8").tobytes()))
        self._tell_wrong(peer, part, generations, verdicts)
        return arrived

    def _move(self, operation: Any, key: object, local: Any, remote: Any, staged: list[int], copies: list[Any]) -> Move:
        """copies: when the move is left, one that may use the staging memory, too, and what keeps the caller's."""
        nbytes = HEADER_NBYTES + self.layout.block_nbytes
        move = Move(operation, key, local, remote, nbytes, lambda: self._staging.give(staged, *copies))
        self._mover.begin(move)
        return move

    def _copy(self, part: _Part, slots: NDArray[np.uint64], copies: list[Any], end: float) -> NDArray[np.bool_]:
        """Copy blocks between the caller's memory and slots, by the device. Which have arrived; kvswap.Error: none."""
        source, to = part.addresses, slots + np.uint64(HEADER_NBYTES)
        if part.transfer.what == "load":
            source, to = to, source
        copy = _C.swap_blocks_batch(source, to, self.layout.block_nbytes, stream=self._copies, device=self._device)
        copies += copy, part.transfer._hold
        try:
            copy.wait(max(0.0, end - time.monotonic()))
        except TimeoutError:
            raise _C.Error(f"on {self._device!r} a copy did not end within {self.timeout:g} seconds") from None
        except _C.Error as error:
            part.some(copy.failed_blocks).note(error)
        arrived = np.ones(len(slots), bool)
        arrived[copy.failed_blocks] = False
        return arrived

    def _tell_wrong(self, peer: Peer, part: _Part, generations: NDArray[Any], verdicts: NDArray[np.uint8]) -> None:
        wrong = np.flatnonzero(verdicts)
        if not len(wrong):
            return
        with self._lock:
            self.counts["changed"] += len(wrong)
        suspect = part.some(wrong)
        for position, verdict in zip(suspect.positions.tolist(), verdicts[wrong].tolist(), strict=True):
            why = f"the block {_VERDICTS[verdict]}: it was evicted or damaged while it was read"
            part.whys[position] = _C.MissingKey(why)
        self._link.tell(peer, m.Suspect(suspect.names, generations[wrong].astype("<i8").tobytes()))

    # -- storing

    def _store(self, part: _Part) -> None:
        """To all candidates; one of them is enough."""
        stored, kept = np.zeros(len(part.positions), bool), np.zeros(len(part.positions), bool)
        for peer in part.peers:
            try:
                mine, old = self._store_to(peer, part)
                stored |= mine
                kept |= old
            except _C.Error as error:
                part.note(error)
        self._succeed(part, stored, int(kept.sum()))
        rest = part.some(np.flatnonzero(~stored))
        if len(rest.positions):
            self._fail(rest, _C.Error("no node has room for the block"))

    def _store_to(self, peer: Peer, part: _Part) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which blocks are stored, and which of them had been before. All workers together claim half of the slots."""
        welcome = peer.welcome
        if welcome is None:
            raise peer.down()
        count, most = len(part.positions), max(1, welcome.slots // (2 * _WORKERS))
        stored, kept = np.zeros(count, bool), np.zeros(count, bool)
        end = time.monotonic() + self.timeout
        for begin in range(0, count, most):
            some = np.arange(begin, min(begin + most, count))
            stored[some], kept[some] = self._store_some(peer, welcome, part.some(some), end)
        return stored, kept

    def _store_some(
        self, peer: Peer, welcome: m.Welcome, part: _Part, end: float
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        run = peer.run
        places = self._request(peer, lambda number: m.Claim(number, part.names, part.replace))
        slots, generations = _places(places, len(part.positions), welcome)
        kept = slots == m.KEPT
        stored = kept.copy()
        at = np.flatnonzero(slots >= 0)
        try:
            while len(at):
                staged = self._staging.take(len(at), end)
                some, at = at[: len(staged)], at[len(staged) :]
                remote = _addresses(welcome, slots[some])
                stored[some] = self._write(peer, run, staged, part.some(some), remote, generations[some], end)
        finally:
            if len(at):
                self._link.tell(peer, m.Abort(generations[at].astype("<i8").tobytes(), True))
        return stored, kept

    def _write(
        self, peer: Peer, run: int, staged: list[int], part: _Part, remote: NDArray[Any], generations: NDArray[Any],
        end: float,
    ) -> NDArray[np.bool_]:  # fmt: skip
        """Bring blocks to staging memory, seal and write them, and have the node check and publish them."""
        local = self._staging.addresses(staged)
        if self._device is None:
            return self._write_from(part.addresses, peer, run, staged, part, remote, generations, end)
        copies, arrived = list[Any](), np.zeros(len(staged), bool)
        try:
            arrived = self._copy(part, local, copies, end)
        finally:
            lost = np.flatnonzero(~arrived)
            if len(lost):
                self._link.tell(peer, m.Abort(generations[lost].astype("<i8").tobytes(), True))
                self._staging.give([staged[i] for i in lost], *copies)
        at, found = np.flatnonzero(arrived), np.zeros(len(staged), bool)
        if len(at):
            found[at] = self._write_from(local[at] + np.uint64(HEADER_NBYTES), peer, run, [staged[i] for i in at],
                                         part.some(at), remote[at], generations[at], end)  # fmt: skip
        return found

    def _write_from(
        self, blocks: NDArray[np.uint64], peer: Peer, run: int, staged: list[int], part: _Part, remote: NDArray[Any],
        generations: NDArray[Any], end: float,
    ) -> NDArray[np.bool_]:  # fmt: skip
        local = self._staging.addresses(staged)
        numbers = generations.astype("<i8").tobytes()
        _C._remote_seal(local, blocks, self.layout.block_nbytes, part.names, generations)
        move = self._move("WRITE", (peer, run), local, remote, staged, [])
        try:
            move.wait(end)
        except _C.Error:
            self._link.tell(peer, m.Abort(numbers, self._mover.finish(move)))
            raise
        self._mover.finish(move)
        answer = self._request(peer, lambda number: m.Commit(number, numbers))
        if not isinstance(answer, m.Flags) or len(answer.flags) != len(staged):
            raise _C.Error(f"node {peer.node.placed_by} answered a commit with {type(answer).__name__}")
        found: NDArray[np.bool_] = np.frombuffer(answer.flags, np.uint8) != 0
        return found

    # -- deleting

    def _delete(self, part: _Part) -> None:
        """On all candidates: each may have it."""
        for peer in part.peers:
            try:
                self._request(peer, lambda number: m.Delete(number, part.names))
            except _C.Error as error:
                part.note(error)
        if part.whys.keys() & set(part.positions.tolist()):
            self._fail(part, _C.Error("not reached: each has a reason"))
            return
        self._succeed(part, np.ones(len(part.positions), bool))


def _contains(names: bytes, number: int) -> m.Contains:
    return m.Contains(number, names)


def _stop(link: Link, mover: Mover, tasks: queue_module.SimpleQueue[_Part | None]) -> None:
    for _ in range(_WORKERS):
        tasks.put(None)
    link.stop()
    mover.stop()


@atexit.register
def _close_all() -> None:
    for store in _counts.stores():
        store.close(1.0)


def _work(store: Callable[[], RemoteStore | None], tasks: queue_module.SimpleQueue[_Part | None]) -> None:
    while (part := tasks.get()) is not None:
        own = store()
        if own is not None:
            own._run(part)
        del own, part


def _places(answer: Any, count: int, welcome: m.Welcome) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of a node that is trusted with nothing: slots of its pool, or negative numbers."""
    if not isinstance(answer, m.Places) or len(answer.slots) != 8 * count or len(answer.generations) != 8 * count:
        raise _C.Error(f"the node answered {count} keys with {type(answer).__name__}")
    slots = np.frombuffer(answer.slots, "<i8").astype(np.int64)
    if (slots >= welcome.slots).any():
        raise _C.Error("the node named a slot that it does not have")
    return slots, np.frombuffer(answer.generations, "<i8").astype(np.int64)


def _addresses(welcome: m.Welcome, slots: NDArray[np.int64]) -> NDArray[np.uint64]:
    found: NDArray[np.uint64] = np.uint64(welcome.base) + slots.astype(np.uint64) * np.uint64(welcome.stride)
    return found
