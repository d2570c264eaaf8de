"""How members of a group meet: descriptors that run out, wrong greetings, links that only one side makes."""

# ruff: noqa: F811  # fixtures of test_share are arguments
# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import struct
import time
from typing import Any

import pytest
from conftest import PATIENCE, until
from processes import no_more_files
from test_share import BLOCKS, Here, Other, Rogue
from test_share import here as here
from test_share import name as name

from kvswap import testing
from kvswap._top_socket import prepare_folder
from kvswap.share import _meet

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def ended(one: Other) -> None:
    one.stop()
    one.end()


def test_descriptors_above_1023(name: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    many = [os.open("/dev/null", os.O_RDONLY) for _ in range(1030)]
    try:
        here = Here(name)
        other = Other(name, 1)
        here.member.wait_peers([1], PATIENCE)
        assert here.member._meeting._listening.fileno() > 1023
        ended(other)
        here.close()
    finally:
        for fd in many:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_sockets_of_killed_processes_are_removed(name: str) -> None:
    """Of groups and engines of any name. Those of processes that run stay, and what is no socket."""
    folder = prepare_folder()
    killed = [folder / f"share-{name}-other.3.sock", folder / f"lend-{name}-0123456789abcdef.sock"]
    for path in killed:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
            left.bind(str(path))
    file = folder / f"share-{name}-file.0.sock"
    file.touch()
    here, other = Here(name), Here(f"{name}-2")
    assert not any(path.exists() for path in killed)
    assert file.exists() and (folder / f"share-{name}.0.sock").exists()
    file.unlink()
    other.close()
    here.close()


@pytest.mark.parametrize(
    ("at", "form", "value"),
    [(40, "I", 99), (40, "I", 2**32 - 1), (40, "I", 0), (44, "I", 0), (44, "I", 2**31), (8, "I", 0)],
)
def test_a_wrong_greeting_is_that_members_affair(here: Here, at: int, form: str, value: int) -> None:
    """Ranks and numbers of slots that do not exist, and another build: others are met after that."""
    greeting = bytearray(here.member._meeting._hello)
    struct.pack_into("<I", greeting, 40, 1)
    struct.pack_into("<" + form, greeting, at, value)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as wrong:
        wrong.settimeout(PATIENCE)
        wrong.connect(str(prepare_folder() / f"share-{here.name}.0.sock"))
        fd = os.memfd_create("slots")
        socket.send_fds(wrong, [greeting], [fd])
        os.close(fd)
        while wrong.recv(1000):  # its own greeting, BYE, the end
            pass
    Rogue(here).close()


def test_no_descriptor_for_a_connection(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection stays in the backlog: it is looked at now and then, and taken as soon as that is possible."""
    calls = []
    admit = _meet.Meeting._admit
    monkeypatch.setattr(_meet.Meeting, "_admit", lambda self: calls.append(1) or admit(self))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waiting:
        with no_more_files():
            waiting.connect(str(prepare_folder() / f"share-{here.name}.0.sock"))
            until(lambda: calls)
            time.sleep(0.5)
            assert len(calls) < 10
        Rogue(here).close()


@pytest.mark.parametrize("call", ["pidfd_open", "dup"])
def test_no_descriptor_for_a_link(here: Here, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Tried again, with nothing left behind: it must not count as a member whose end cannot be seen."""
    calls = []

    def refuse(_: int) -> int:
        calls.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        other = Other(here.name, 1)
        until(lambda: len(calls) == 2)
        some = fds()
        until(lambda: len(calls) == 5)
        until(lambda: fds() <= some + 4)  # those of the meeting that goes on
        assert here.member.peers == ()
    here.member.wait_peers([1], PATIENCE)
    other.stop()
    until(lambda: here.member.peers == ())
    other.end()
    here.check_store(BLOCKS)


def test_a_python_or_kernel_without_pidfds(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    other = Other(here.name, 1)
    here.member.wait_peers([1], PATIENCE)
    until(lambda: here.check_load(BLOCKS).by_others > 0)  # a busy machine may be late
    ended(other)


def test_a_link_that_one_side_could_not_make(here: Here) -> None:
    """The other side made it, and hears that it is none: its store ends, and they meet again later."""
    with testing.fault(here.device, "call", "fail", operation="chunk_map", nth=2, every=2):
        other = Other(here.name, 1)
        store = "member.store(list(range(400)), list(range(400))).wait(30)"
        until(lambda: other.ask("member.stats()['links_lost']") is not None)
        for _ in range(20):
            assert other.ask(store) is None
        assert other.ask("member.stats()['links_lost']") == 0
    here.member.wait_peers([1], PATIENCE)
    ended(other)


def test_one_that_makes_no_link_is_tried_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are allocated for each attempt. One that is not there costs nothing."""
    clock = [0.0]
    monkeypatch.setattr(_meet.time, "monotonic", lambda: clock[0])

    def attempts(allocated: bool) -> int:
        meeting: Any = object.__new__(_meet.Meeting)
        meeting._rank, meeting._kind, meeting._stop, count = 1, "share", False, [0]

        class Core:
            def linked(self) -> int:
                return 0

        def guarded(*_: Any) -> bool:
            count[0] += 1
            meeting._allocated = allocated
            return True

        meeting._core, meeting._guarded = Core(), guarded
        due, pause = [0.0], [0.02]
        end = clock[0] + 600
        while clock[0] < end:
            meeting._reach_all(due, pause)
            clock[0] += 0.02
        return count[0]

    assert attempts(True) < 75
    assert attempts(False) > 500


def test_closing_beside_a_member_that_has_stopped(here: Here) -> None:
    other = Other(here.name, 1)
    here.member.wait_peers([1], PATIENCE)
    other.stop(signal.SIGSTOP)
    here.member.close(PATIENCE)
    other.stop(signal.SIGCONT)
    ended(other)


def test_a_process_exits_beside_a_store_that_has_not_ended(here: Here) -> None:
    """A stopped process took part in it: the exit waits for 10 seconds, and not for as long as that is stopped."""
    leaving, stopped = Other(here.name, 1, stall=0.05), Other(here.name, 2)
    here.member.wait_peers([1, 2], PATIENCE)
    leaving.ask("member.wait_peers([0, 2], 60)")
    stopped.stop(signal.SIGSTOP)
    leaving.ask("globals().update(t=member.store(list(range(400)), list(range(400))))")
    until(lambda: leaving.ask("member.stats()['pieces_late']"))
    leaving.say("__import__('sys').exit(3)")
    assert leaving.popen.wait(PATIENCE) == 3
    leaving.end()
    ended(stopped)
