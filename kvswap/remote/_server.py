"""A node of the remote tier: a pool of slots that clients read and write by NIXL, and one thread for its messages.

The node calls NIXL to register its pool, and never again: clients move all bytes. Behind the pool a FileStore may keep
more blocks; each committed block is stored there too, and is brought back when a reader asks for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import zmq
import zmq.utils.z85
from numpy.typing import NDArray

from kvswap import _C, memory
from kvswap.files import FileStore, FileTransfer, Layout

from . import _messages as m
from ._agent import Agent
from ._secrets import Secret, curve_server
from ._slots import Block, SlotTable

_log = logging.getLogger("kvswap.remote")

HEADER_NBYTES = 64
_POLL_MS = 100
_AT_ONCE = 64  # messages between two looks at the clock
_TICK = 0.1
_FETCH_SECONDS = 0.5  # how long an answer waits for files
_MOST_FETCHES = 64
_MOST_CLIENTS = 4096
_MOST_CHECKED_NBYTES = 256 << 20  # of one Commit
_OWN = b"files"  # the client of claims that are filled from files


@dataclass(eq=False)
class _Fetch:
    """Blocks that come from files, and the answer that waits for them."""

    client: bytes
    request: int
    names: list[bytes]
    claims: list[int]
    wanted: list[bytes]
    transfer: FileTransfer
    until: float
    answered: bool = False


@dataclass(eq=False)
class _Kept:
    """Blocks that are being stored in files."""

    transfer: FileTransfer
    blocks: list[Block]


class Server:
    """A node. run() serves until stop(), from one thread.

    bind: HOST:PORT of the control messages; port 0: any. block_nbytes, num_blocks: of the pool. pair: its CURVE keys;
    allowed: the public keys of clients. agent: registers the pool. directory, capacity: of a FileStore behind it.
    """

    def __init__(
        self,
        bind: str,
        block_nbytes: int,
        num_blocks: int,
        pair: Secret,
        allowed: Iterable[str],
        agent: Agent,
        *,
        directory: str | os.PathLike[str] | None = None,
        capacity: int | None = None,
        lease: float = 2.0,
    ) -> None:
        self.block_nbytes, self.stride = block_nbytes, -(-(HEADER_NBYTES + block_nbytes) // 64) * 64
        self.counts = dict.fromkeys(("stored", "located", "missed", "refused", "wrong", "damaged", "malformed"), 0)
        self._stopping = threading.Event()
        self._clients: OrderedDict[bytes, None] = OrderedDict()  # that said a right Hello; silent for longest first
        self._table = SlotTable(num_blocks, first=time.time_ns(), lease=lease)
        self._fetches: list[_Fetch] = []
        self._keeping: deque[_Kept] = deque()
        self._files: FileStore | None = None
        self._agent = agent
        self._pool = memory.HostPool(num_blocks, self.stride, device="host:0", register=False)
        self._context: zmq.Context[Any] = zmq.Context()
        try:
            self._base = self._pool.ptr
            agent.register(self._base, self._pool.nbytes)
            self._metadata = agent.metadata()
            if directory is not None:
                layout = Layout(self.stride, use="kvswap remote", of=block_nbytes)
                self._files = FileStore(directory, layout, capacity=capacity)
            self._open(bind, pair, set(allowed))
        except BaseException:
            self.close()
            raise

    def _open(self, bind: str, pair: Secret, allowed: set[str]) -> None:
        self._gate = _Gate(self._context, allowed)
        socket = self._socket = self._context.socket(zmq.ROUTER)
        curve_server(socket, pair)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, int(bind.startswith("[")))
        socket.setsockopt(zmq.SNDHWM, 256)  # of one client; beyond it answers are dropped
        socket.setsockopt(zmq.RCVHWM, 256)
        socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_NBYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 500)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 2000)
        try:
            socket.bind(f"tcp://{bind}")
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"cannot listen there: {error}", bind) from None
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._gate.socket, zmq.POLLIN)
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")

    def stop(self) -> None:
        """From any thread or signal handler: run() returns soon."""
        self._stopping.set()

    def close(self) -> None:
        """After run(). Waits for the files."""
        self._context.destroy(linger=0)
        if self._files is not None:
            self._files.close()
        self._agent.close()
        self._pool.close()

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until stop()."""
        next_tick = 0.0
        while not self._stopping.is_set():
            ready = dict(self._poller.poll(1 if self._fetches else _POLL_MS))
            if self._gate.socket in ready:
                self._gate.answer()
            if self._socket in ready:
                self._take()
            self._answer_fetches()
            if time.monotonic() >= next_tick:
                self._end_keeping()
                self._table.tick(time.monotonic())
                next_tick = time.monotonic() + _TICK

    def _take(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                client, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._one(client, frames)

    def _one(self, client: bytes, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1 or client[:1] != b"\0":  # the names that a ROUTER gives begin so, others are chosen
                raise ValueError(f"{len(frames)} frames from {client!r}")
            message = m.from_client.decode(frames[0])
            answer = self._handle(client, message)
        except (msgspec.MsgspecError, ValueError) as error:
            self.counts["malformed"] += 1
            _log.warning("malformed message of a client: %s", error)
            answer = m.Refused(0, "malformed", str(error)[:200])
        except (_C.Error, OSError) as error:  # of the files: the node goes on
            _log.warning("the files of this node: %s", error)
            answer = m.Refused(getattr(message, "request", 0), "failed", str(error)[:200])
        if answer is not None:
            self._send(client, answer)

    def _send(self, client: bytes, answer: m.Message) -> None:
        with suppress(zmq.Again, zmq.ZMQError):  # a client that reads nothing, or has gone, gets none
            self._socket.send_multipart([client, m.encode(answer)], zmq.NOBLOCK)

    def _handle(self, client: bytes, message: m.FromClient) -> m.Message | None:
        if isinstance(message, m.Hello):
            return self._hello(client, message)
        if client not in self._clients:
            return m.Refused(getattr(message, "request", 0), "hello", "the first message must be Hello")
        self._clients.move_to_end(client)
        if isinstance(message, m.Abort):
            self._abort(client, message)
            return None
        if isinstance(message, (m.Release, m.Suspect)):
            self._places_read(message)
            return None
        if isinstance(message, m.Commit):
            return self._commit(client, message)
        if isinstance(message, m.GetStats):
            return m.Stats(message.request, self.stats())
        names = _split(message.keys, m.KEY_NBYTES)
        if isinstance(message, m.Locate):
            return self._locate(client, message.request, names)
        if isinstance(message, m.Claim):
            return self._claim(client, message, names)
        if isinstance(message, m.Delete):
            return self._delete(message, names)
        there = [name in self._table.blocks for name in names]
        if self._files is not None and not all(there):
            there = [a or b for a, b in zip(there, self._files.contains(names), strict=True)]
        return m.Flags(message.request, bytes(there))

    def _hello(self, client: bytes, message: m.Hello) -> m.Message:
        if message.version != m.VERSION:
            text = f"this node has version {m.VERSION} of the messages, not {message.version}"
            return m.Refused(message.request, "version", text)
        if message.block_nbytes not in (0, self.block_nbytes):
            text = f"this node has blocks of {self.block_nbytes} bytes, not {message.block_nbytes}"
            return m.Refused(message.request, "size", text)
        self._clients[client] = None
        while len(self._clients) > _MOST_CLIENTS:  # it says Hello again when it is refused
            self._clients.popitem(last=False)
        return m.Welcome(
            message.request,
            m.VERSION,
            self.block_nbytes,
            self._agent.name,
            self._metadata,
            self._base,
            self.stride,
            self._table.slots,
        )

    # -- readers ------------------------------------------------------------------------------------------------------

    def _locate(self, client: bytes, request: int, names: list[bytes]) -> m.Message | None:
        if self._files is not None and len(self._fetches) < _MOST_FETCHES:
            absent = list(dict.fromkeys(name for name in names if name not in self._table.blocks))
            if absent and self._fetch(client, request, names, absent):
                return None
        return self._places(request, names)

    def _places(self, request: int, names: list[bytes]) -> m.Message:
        now = time.monotonic()
        found = [self._table.locate(name, now) for name in names]
        missed = sum(slot < 0 for slot, _ in found)
        self.counts["missed"] += missed
        self.counts["located"] += len(found) - missed
        return m.Places(request, *_joined(found))

    def _places_read(self, message: m.Release | m.Suspect) -> None:
        """A block that is damaged in memory is dropped; one that was evicted while it was read is not there any
        more."""
        names, numbers = _split(message.keys, m.KEY_NBYTES), _numbers(message.generations)
        if len(names) != len(numbers):
            raise ValueError(f"{len(names)} keys and {len(numbers)} generations")
        for i, (name, generation) in enumerate(zip(names, numbers.tolist(), strict=True)):
            self._table.release(name, generation)
            block = self._table.blocks.get(name)
            if isinstance(message, m.Release) or block is None or block.generation != generation:
                continue
            if self._check([block.slot], name, numbers[i : i + 1]):
                self.counts["damaged"] += 1
                self._table.drop(name, time.monotonic())

    # -- writers ------------------------------------------------------------------------------------------------------

    def _claim(self, client: bytes, message: m.Claim, names: list[bytes]) -> m.Message:
        kept = [False] * len(names)
        if self._files is not None and not message.replace:
            kept = self._files.contains(names)
        now = time.monotonic()
        found = [
            (m.KEPT, 0) if there else self._table.claim(name, client, message.replace, now)
            for name, there in zip(names, kept, strict=True)
        ]
        self.counts["refused"] += sum(slot == m.FULL for slot, _ in found)
        self._void([slot for slot, _ in found if slot >= 0])
        return m.Places(message.request, *_joined(found))

    def _commit(self, client: bytes, message: m.Commit) -> m.Message:
        """Publish what is right; the other claims are over, too."""
        now = time.monotonic()
        generations = _numbers(message.generations)
        if len(generations) * self.block_nbytes > max(_MOST_CHECKED_NBYTES, self.block_nbytes):
            raise ValueError(f"a Commit of {len(generations)} blocks")
        claims = [self._table.of_client(number, client) for number in generations.tolist()]
        good = bytearray(len(claims))
        for i, (number, claim) in enumerate(zip(generations.tolist(), claims, strict=True)):
            if claim is None or self._table.of_client(number, client) is None:  # expired, or twice in the list
                continue
            if self._check([claim.slot], claim.name, generations[i : i + 1]):
                self.counts["wrong"] += 1
                self._table.give_up(number, now, idle=False)
                continue
            self._keep(claim.name, self._table.publish(number, now), claim.replace)
            good[i] = 1
        self.counts["stored"] += sum(good)
        return m.Flags(message.request, bytes(good))

    def _abort(self, client: bytes, message: m.Abort) -> None:
        for number in _numbers(message.generations).tolist():
            if self._table.of_client(number, client) is not None:
                self._table.give_up(number, time.monotonic(), idle=message.idle)

    def _delete(self, message: m.Delete, names: list[bytes]) -> m.Message:
        if self._files is not None and names:
            try:
                self._keeping.append(_Kept(self._files.delete(list(dict.fromkeys(names))), []))
            except _C.QueueFull as error:
                return m.Refused(message.request, "busy", str(error))
        now = time.monotonic()
        return m.Flags(message.request, bytes([self._table.drop(name, now) for name in names]))

    # -- memory -------------------------------------------------------------------------------------------------------

    def _addresses(self, slots: list[int]) -> NDArray[np.int64]:
        return self._base + np.asarray(slots, np.int64) * self.stride

    def _check(self, slots: list[int], names: bytes, generations: NDArray[np.int64] | None) -> int:
        """0: the block is right."""
        return _C._remote_check(self._addresses(slots), None, self.block_nbytes, names, generations)[0]

    def _void(self, slots: list[int]) -> None:
        if slots:
            _C._remote_void(self._addresses(slots))

    # -- files --------------------------------------------------------------------------------------------------------

    def _keep(self, name: bytes, block: Block, replace: bool) -> None:
        """Store a block in the files, too; when they cannot keep up, it is in memory alone."""
        if self._files is None:
            return
        with suppress(_C.QueueFull):
            transfer = self._files.store([name], self._addresses([block.slot]), replace=replace)
            block.busy += 1
            self._keeping.append(_Kept(transfer, [block]))

    def _end_keeping(self) -> None:
        for _ in range(len(self._keeping)):
            kept = self._keeping.popleft()
            if not kept.transfer.done():
                self._keeping.append(kept)
                continue
            for block in kept.blocks:
                block.busy -= 1
            if kept.transfer.error is not None:
                _log.warning("the files of this node: %s", kept.transfer.error)

    def _fetch(self, client: bytes, request: int, names: list[bytes], absent: list[bytes]) -> bool:
        """Begin to load blocks from the files. False: none of them is there, or there is no room."""
        assert self._files is not None
        now = time.monotonic()
        claims, wanted, slots = [], [], []
        for name, there in zip(absent, self._files.contains(absent), strict=True):
            slot, generation = self._table.claim(name, _OWN, True, now) if there else (m.NONE, 0)
            if slot >= 0:
                claims.append(generation)
                wanted.append(name)
                slots.append(slot)
        if not claims:
            return False
        self._void(slots)
        try:
            transfer = self._files.load(wanted, self._addresses(slots))
        except _C.QueueFull:
            for generation in claims:
                self._table.give_up(generation, now, idle=True)
            return False
        self._fetches.append(_Fetch(client, request, names, claims, wanted, transfer, now + _FETCH_SECONDS))
        return True

    def _answer_fetches(self) -> None:
        now = time.monotonic()
        for fetch in list(self._fetches):
            done = fetch.transfer.done()
            if done:
                self._publish(fetch, now)
                self._fetches.remove(fetch)
            if not fetch.answered and (done or now > fetch.until):
                fetch.answered = True
                self._send(fetch.client, self._places(fetch.request, fetch.names))

    def _publish(self, fetch: _Fetch, now: float) -> None:
        failed = set(fetch.transfer.failed_blocks.tolist())
        for i, (name, generation) in enumerate(zip(fetch.wanted, fetch.claims, strict=True)):
            claim = self._table.of_client(generation, _OWN)
            if claim is None:
                continue
            if i in failed or name in self._table.blocks or self._check([claim.slot], name, None):
                self._table.give_up(generation, now, idle=True)
                continue
            _C._remote_renumber(self._addresses([claim.slot]), np.array([generation], np.int64))
            self._table.publish(generation, now)

    def stats(self) -> dict[str, Any]:
        """What `kvswap remote stat` shows of a node."""
        files: dict[str, Any] = dict(self._files.stats()) if self._files is not None else {}
        return {
            **self.counts,
            **self._table.counts(),
            "block_nbytes": self.block_nbytes,
            "files": {name: value for name, value in files.items() if isinstance(value, int)},
        }


class _Gate:
    """Answers ZeroMQ's questions (ZAP, its RFC 27) whether a client may connect."""

    def __init__(self, context: zmq.Context[Any], allowed: set[str]) -> None:
        self._allowed = {zmq.utils.z85.decode(key) for key in allowed}
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        with suppress(zmq.Again):
            version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart(
                zmq.NOBLOCK
            )
            good = mechanism == b"CURVE" and len(credentials) == 1 and credentials[0] in self._allowed
            status = (b"200", b"OK") if good else (b"400", b"this key is not allowed")
            self.socket.send_multipart([version, request, *status, b"", b""], zmq.NOBLOCK)


def _split(joined: bytes, nbytes: int) -> list[bytes]:
    if len(joined) % nbytes:
        raise ValueError(f"{len(joined)} bytes of keys are no multiple of {nbytes}")
    return [joined[at : at + nbytes] for at in range(0, len(joined), nbytes)]


def _numbers(joined: bytes) -> NDArray[np.int64]:
    if len(joined) % 8:
        raise ValueError(f"{len(joined)} bytes of numbers are no multiple of 8")
    return np.frombuffer(joined, "<i8").astype(np.int64)


def _joined(found: list[tuple[int, int]]) -> tuple[bytes, bytes]:
    both = np.array(found, "<i8").reshape(-1, 2)
    return both[:, 0].tobytes(), both[:, 1].tobytes()
