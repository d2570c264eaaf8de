"""Requests of io_uring outlive a process that is killed: the next writer waits until they have ended.

A request that does not end needs a disk that does not answer. Here a copy of the ring's descriptor does instead: the
kernel lets go of what is registered in a ring after the ring's last request, and after its last descriptor.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE
from processes import Process
from test_files import have_engine

import kvswap
from kvswap.files import FileStore, Layout

PIDFD_GETFD = 438  # number of the system call
KINDS: dict[str, tuple[int, dict[str, Any], str]] = {
    "one directory": (1, {}, ""),
    "two directories": (2, {}, ""),
    "shared": (1, {"shared": True}, ""),
    "few descriptors": (1, {}, "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))"),
}


@contextmanager
def ring_of(process: int) -> Iterator[Callable[[], None]]:
    """A copy of the only ring of a process, and what closes the copy."""
    links = {int(path.name): os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir()}
    (ring,) = [number for number, link in links.items() if "io_uring" in link]
    pidfd = os.pidfd_open(process)
    copy = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, pidfd, ring, 0)
    os.close(pidfd)
    if copy < 0:
        pytest.skip(f"needs pidfd_getfd(): {os.strerror(ctypes.get_errno())}")
    left = [copy]
    try:
        yield lambda: os.close(left.pop())
    finally:
        for each in left:
            os.close(each)


class Writer:
    """A store in another process, which is killed when it has stored a block."""

    def __init__(self, tmp_path: Path, kind: str) -> None:
        have_engine("io_uring", tmp_path)
        count, self.options, self.prelude = KINDS[kind]
        self.folders = [str(tmp_path / str(i)) for i in range(count)]

    def open(self) -> FileStore:
        folders = self.folders if len(self.folders) > 1 else self.folders[0]
        return FileStore(folders, Layout(5000), capacity=8 << 20, engine="io_uring", depth=1, **self.options)

    @contextmanager
    def killed(self) -> Iterator[Callable[[], None]]:
        folders = self.folders if len(self.folders) > 1 else self.folders[0]
        with Process(self.prelude) as process:
            process.do(f"""
                from kvswap.files import FileStore, Layout
                options = {self.options!r}
                store = FileStore({folders!r}, Layout(5000), capacity=8 << 20, engine="io_uring", depth=1, **options)
                store.store([b"k"], [np.full(5000, 7, np.uint8)]).wait(60)
            """)
            with ring_of(process.pid) as let_go:
                process.kill()
                yield let_go


@pytest.mark.parametrize("kind", KINDS)
def test_opening_waits_for_the_requests_of_a_killed_process(tmp_path: Path, kind: str) -> None:
    writer, opened = Writer(tmp_path, kind), []
    with writer.killed() as let_go:
        thread = threading.Thread(target=lambda: opened.append(writer.open()), daemon=True)
        thread.start()
        thread.join(1)
        assert thread.is_alive(), "the store is open although requests may be in flight"
        let_go()
        thread.join(PATIENCE)
    (store,) = opened
    block = np.zeros(5000, np.uint8)
    store.load([b"k"], [block]).wait(PATIENCE)
    assert (block == 7).all()
    store.close()
    if kind == "shared":
        names = [path.name for path in Path(writer.folders[0]).glob("writer-*")]
        assert names == ["writer-0000"]  # it took over the directory of the killed one


def test_opening_does_not_wait_without_end(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "one directory")
    with writer.killed() as let_go:
        with pytest.raises(kvswap.Error, match="its writes are still on their way to the disk after 10 s"):
            writer.open()
        let_go()
        with writer.open() as store:
            assert store.contains([b"k"]) == [True]


def test_a_shared_directory_has_another_place_for_a_writer(tmp_path: Path) -> None:
    """The blocks of the killed one are there; only what it may still write is left alone."""
    writer = Writer(tmp_path, "shared")
    with writer.killed(), writer.open() as store:
        assert {path.name for path in Path(writer.folders[0]).glob("writer-*")} == {"writer-0000", "writer-0001"}
        assert store.contains([b"k"]) == [True]


def test_a_directory_that_users_lock_can_be_opened(tmp_path: Path) -> None:
    """As `flock DIRECTORY COMMAND` does."""
    import fcntl

    (tmp_path / "kv").mkdir(0o700)
    folder = os.open(tmp_path / "kv", os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        FileStore(tmp_path / "kv", Layout(5000), capacity=8 << 20).close()
    finally:
        os.close(folder)
