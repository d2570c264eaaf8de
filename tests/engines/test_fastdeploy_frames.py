"""Rank 0 of the manager survives whatever arrives at its socket: bytes that are no ZMTP, old ZMTP, half handshakes,
frames that are too large or never end, messages that are none, and more connections than it has descriptors for."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import contextlib
import random
import resource
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import PATIENCE, until

msgspec = pytest.importorskip("msgspec")
zmq = pytest.importorskip("zmq")

from managers import Manager  # noqa: E402

from kvswap.fastdeploy.client import SWAP2CPU, ManagerError  # noqa: E402
from kvswap.fastdeploy.manager import door, messages, places  # noqa: E402

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING = SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
READY = b"\x04\x26\x05READY" + b"\x0bSocket-Type\0\0\0\x06DEALER" + b"\x08Identity\0\0\0\0"


@pytest.fixture(scope="module")
def manager() -> Iterator[Manager]:
    with Manager() as manager:
        manager.ready_client()
        yield manager


def connect(manager: Manager) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(PATIENCE)
    until(lambda: try_connect(made, manager), "room in the queue of connections")
    return made


def try_connect(made: socket.socket, manager: Manager) -> bool:
    with contextlib.suppress(BlockingIOError):
        made.connect(str(manager.directory / "manager.sock"))
        return True
    return False


def send(manager: Manager, *parts: bytes, pause: float = 0.0) -> socket.socket:
    """What rank 0 does not want to read any more is lost with the connection."""
    made = connect(manager)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for part in parts:
            made.sendall(part)
            time.sleep(pause)
    return made


def works(manager: Manager, timeout: float = PATIENCE) -> None:
    """The process runs, and swaps for a client that comes now."""
    manager.check_alive()
    client = manager.ready_client(timeout)
    result = client.result(client.swap(SWAP2CPU, [1], [2]), timeout=PATIENCE)
    assert result.ok, result
    client.close()


def frame(content: bytes, flags: int = 0) -> bytes:
    if len(content) < 256:
        return bytes([flags, len(content)]) + content
    return bytes([flags | 2]) + len(content).to_bytes(8, "big") + content


OLD = {
    "ZMTP 1: one message": (b"\x01\x00", b"\x02\x00x"),
    "ZMTP 1: no identity, then parts": (b"\x01\x00", b"\x02\x01a\x02\x01b\x02\x00c"),
    "ZMTP 1: an identity": (b"\x06\x00hello", b"\x02\x00x"),
    "ZMTP 1: a frame without bytes": (b"\x01\x00", b"\x01\x00" * 3),
    "ZMTP 1: a frame of length 0": (b"\x01\x00", b"\x00" * 40),
    "ZMTP 1: a frame of 2^63 bytes": (b"\x01\x00", b"\xff" + b"\x7f" * 8 + b"\0x"),
    "ZMTP 2": (SIGNATURE + b"\x01\x05", b"\x00\x00", frame(b"x"), frame(b"y", 1) + frame(b"z")),
    "ZMTP 2: an identity of 300 bytes": (SIGNATURE + b"\x01\x05", frame(b"i" * 300), frame(b"x")),
    "half a signature": (SIGNATURE[:5],),
    "half a greeting": (GREETING[:20],),
    "a greeting, and nothing": (GREETING,),
    "half of READY": (GREETING, READY[:11]),
    "no READY, a message": (GREETING, frame(b"x")),
    "another mechanism": (GREETING.replace(b"NULL", b"CURV"),),
    "ZMTP 9.9": (GREETING.replace(b"\x03\x00NULL", b"\x09\x09NULL"), READY),
    "an ERROR command": (GREETING, frame(b"\x05ERROR\x04oops", 4)),
    "a PING without an end": (GREETING, READY, frame(b"\x04PING", 4)),
    "a command that is none": (GREETING, READY, frame(b"\xffNONE", 4)),
    "a frame of no bytes": (GREETING, READY, frame(b"") * 5),
    "parts": (GREETING, READY, frame(b"a", 1) * 50 + frame(b"b")),
    "a message without an end": (GREETING, READY, frame(b"a" * 1000, 1) * 1000),
    "a frame of 2^63 bytes": (GREETING, READY, b"\x02" + b"\x7f" + b"\xff" * 7 + b"x" * 100),
    "a frame beyond the limit": (GREETING, READY, b"\x02" + (9 << 20).to_bytes(8, "big") + bytes(9 << 20)),
    "reserved flags": (GREETING, READY, frame(b"x", 0xF8)),
    "a wrong socket type": (GREETING, READY.replace(b"DEALER", b"ROUTER"), frame(b"x")),
}


@pytest.mark.parametrize("name", OLD)
def test_frames(manager: Manager, name: str) -> None:
    left = [send(manager, *OLD[name], pause=0.01), send(manager, b"".join(OLD[name]))]  # with pauses, and at once
    works(manager)
    for each in left:
        each.close()
    works(manager)


def test_a_frame_without_an_address_is_nobody_s() -> None:
    class Frame:
        def get(self, name: str) -> str:
            raise zmq.ZMQError(zmq.EINVAL)

    peer = places.Peer(Frame())
    assert (peer.uid, peer.pid, peer.ours) == (-1, -1, False)


def test_slow_senders(manager: Manager) -> None:
    """They hold up nobody but themselves."""
    slow = [send(manager, GREETING[:n], pause=0) for n in range(1, 30)]
    slow += [send(manager, GREETING, READY, frame(bytes(200))[:n]) for n in range(1, 20)]
    works(manager)
    for each in slow:
        with contextlib.suppress(OSError):
            each.sendall(b"\0")
    works(manager)
    for each in slow:
        each.close()


# -- messages ---------------------------------------------------------------------------------------------------------

ODD: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        1,
        2**31,
        2**62,
        2**63 - 1,
        -(2**63),
        1.5,
        float("nan"),
        float("inf"),
        "",
        "x" * 300,
        b"",
        b"\xff",
    ),
    *(
        [],
        [0],
        [-1],
        [2**31],
        [None],
        {},
        {"x": b"y"},
        {1: 2},
        [[]],
        [{}],
        "Submit",
        "\udc80".encode("utf-8", "replace"),
    ),
]


def kinds() -> list[type]:
    return [*messages.FromClient.__args__, *messages.FromRank.__args__, messages.Bye, messages.Do, messages.Answer]


def some_message(chance: random.Random) -> bytes:
    """A message of a kind, whose fields are right or odd; or not even that."""
    kind = chance.choice(kinds())
    right: dict[str, Any] = {
        "request": chance.randrange(1 << 20),
        "rank": chance.randrange(3),
        "number": chance.randrange(9),
        "timeout": 0.0,
        "shape": "x",
        "ready": True,
        "phase": "x",
        "busy": 1,
        "generation": 1,
        "ok": True,
        "reason": "",
        "nbytes": 0,
        "seconds": 0.0,
        "handles": None,
        "what": chance.choice(["status", "handles", "attach", "clear", "restore", "drain", "undo"]),
        "known": [1],
        "code": "ok",
        "task": {
            "transfer_task_id": f"fuzz{chance.randrange(50)}",
            "event_type": chance.choice([1, 2, 3, -1]),
            "gpu_block_ids": [chance.randrange(40) for _ in range(chance.randrange(4))],
            "cpu_block_ids": [chance.randrange(40) for _ in range(chance.randrange(4))],
        },
    }
    fields: dict[str, Any] = {"type": kind.__name__}
    for name in kind.__struct_fields__:
        if chance.random() < 0.9:
            fields[name] = right.get(name, 0) if chance.random() < 0.8 else chance.choice(ODD)
    if isinstance(fields.get("task"), dict) and chance.random() < 0.5:
        fields["task"] = {**fields["task"], chance.choice([*fields["task"], "events", "more"]): chance.choice(ODD)}
    data = bytearray(msgspec.msgpack.encode(fields))
    if chance.random() < 0.3:
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data[: chance.randrange(len(data) + 1)] if chance.random() < 0.1 else data)


def fuzz_raw(manager: Manager, chance: random.Random) -> None:
    parts = [GREETING, READY, *(frame(some_message(chance), chance.choice([0, 0, 0, 1, 4])) for _ in range(4))]
    data = bytearray(b"".join(parts))
    for _ in range(chance.randrange(4)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    at = chance.randrange(len(data)) if chance.random() < 0.5 else len(data)
    send(manager, bytes(data[:at]), bytes(chance.randrange(256) for _ in range(chance.randrange(30)))).close()


@pytest.mark.parametrize("seed", range(3))
def test_fuzz(manager: Manager, seed: int) -> None:
    """Raw bytes, and messages of a client that speaks ZMTP as it should. The seed is the test's name."""
    chance, context = random.Random(seed), zmq.Context()
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    client.connect(f"ipc://{manager.directory}/manager.sock")
    end = time.monotonic() + 2.0
    try:
        while time.monotonic() < end:
            fuzz_raw(manager, chance)
            for _ in range(20):
                with contextlib.suppress(zmq.Again):
                    client.send_multipart([some_message(chance)] * chance.choice([1, 1, 1, 1, 2]), zmq.NOBLOCK)
            while client.poll(0):
                client.recv(zmq.NOBLOCK)
        client.send(messages.encode(messages.Bye()))
        time.sleep(0.1)
    finally:
        client.close()
        context.term()
    manager.check_alive()
    again = manager.client()

    def undone() -> bool:  # what the fuzz may have asked for; its last messages may still be on their way
        try:
            again.drain(undo=True)
            again.clear()
            again.restore()
            again.wait_ready(5)
            works(manager, 5)
        except (ManagerError, TimeoutError):  # a late message has cleared or drained it again
            return False
        return True

    until(undone, "a manager that works")


# -- connections ------------------------------------------------------------------------------------------------------


def test_more_connections_than_descriptors() -> None:
    """libzmq ends the process where it has no descriptor left: those beyond the limit are shut down before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4000:
        pytest.skip(f"this process may have {hard} descriptors only")
    with Manager() as manager:
        early = manager.ready_client()
        process = manager.processes[0]
        assert process is not None
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (1500, 1500))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4000), hard))
        held: list[socket.socket] = []
        for _ in range(2500):
            held.append(connect(manager))
            time.sleep(0.0005)  # a thread of the manager has to keep up
            held[-1].setblocking(False)
        until(lambda: sum(is_shut(each) for each in held) > 2000, "connections that are shut down")
        assert early.result(early.swap(SWAP2CPU, [3], [4]), timeout=PATIENCE).ok  # it was there before
        for each in held:
            each.close()
        until(lambda: works(manager) is None, "a manager that works")
        assert "connections to the manager: the newest is shut down" in manager.log(0)


def is_shut(connection: socket.socket) -> bool:
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def test_a_door_shuts_only_its_own(tmp_path: Any) -> None:
    """libzmq's number of a connection may be that of another descriptor by the time it is read."""
    path = tmp_path / "s"
    context = zmq.Context()
    listening = context.socket(zmq.ROUTER)
    own = door.Door(listening, path, 1)
    pair = socket.socketpair()
    with (tmp_path / "file").open("w") as file:
        for descriptor in (pair[0].fileno(), 10**6, file.fileno()):
            own._shut(descriptor)
    pair[1].sendall(b"still open")
    assert pair[0].recv(16) == b"still open"
    for each in pair:
        each.close()
    own.close()
    assert not own._thread.is_alive()
    listening.close()
    context.term()
