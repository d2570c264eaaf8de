"""Every call of the file tier that may wait, over a disk that does not answer: Ctrl-C ends it, dropping never waits."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import AT_ONCE, PATIENCE, run_python

from kvswap import testing
from kvswap.files import FileStore, FileTransfer, Layout

# Names that may wait for the disk, each tried below; the others look at memory alone.
WAITS = {"FileStore", "clear", "close", "refresh", "wait"}
NO_WAITS = {
    FileStore: {"store", "load", "delete", "contains", "pin", "unpin", "touch", "keys", "stats", "info",
                "block_nbytes", "take_events"},
    FileTransfer: {"done", "cancel", "what", "state", "nbytes", "num_blocks", "num_kept", "elapsed", "error",
                   "failed_positions", "reasons"},
}  # fmt: skip


@pytest.mark.parametrize("kind", [FileStore, FileTransfer])
def test_the_list_is_whole(kind: type) -> None:
    """A new method is listed as one that waits, and tried here, or as one that does not."""
    assert {name for name in dir(kind) if not name.startswith("_")} - WAITS == NO_WAITS[kind]
    assert all(name in ENTRIES for name in WAITS)


ENTRIES = """
import contextlib, io, os, signal, sys, threading, time
import numpy as np
from kvswap import cli, testing
from kvswap.files import FileStore, Layout

HANGS = 100.0
signal.signal(signal.SIGINT, signal.default_int_handler)
what, folder = os.environ["WHAT"], os.environ["FOLDER"]
block = np.zeros((1, 5000), np.uint8)


def open_store(**options):
    return FileStore(folder, Layout(5000), capacity=64 << 20, engine="threads", **options)


def stopped(store, *calls):
    faults = contextlib.ExitStack()
    for call in calls:
        faults.enter_context(testing.file_fault(store, call, "delay", nth=1, every=1, delay=HANGS))
    return faults


def command(*words):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if cli.main(["files", *words]) == cli.EXIT_INTERRUPTED:
            raise KeyboardInterrupt


with open_store() as first:
    first.store([b"key"], block, [0]).wait(10)
if what in ("open", "check", "stat", "gc"):
    call = {"open": lambda: FileStore(folder, Layout(5000), capacity=64 << 20)}.get(what, lambda: command(what, folder))
    faults = stopped(None, "read")
else:
    store = open_store(readonly=what == "refresh")
    faults = stopped(store, "read", "write")
    if what != "close of an idle store":
        transfer = None if what == "refresh" else store.store([b"other"], block, [0])
    call = {
        "clear": lambda: store.clear(),
        "close": lambda: store.close(),
        "close at once": lambda: store.close(timeout=0.0),
        "close of an idle store": lambda: store.close(),
        "with": lambda: store.__exit__(None, None, None),
        "refresh": lambda: store.refresh(),
        "wait": lambda: transfer.wait(),
    }[what]
begun = 0.0


def interrupt():
    global begun
    time.sleep(0.4)
    begun = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)


with faults:
    try:
        threading.Thread(target=interrupt).start()
        call()
        print("it did not wait", flush=True)
    except KeyboardInterrupt:
        print(time.monotonic() - begun, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    "what",
    ["open", "check", "stat", "gc", "clear", "close", "close at once", "close of an idle store", "with", "refresh",
     "wait"],
)  # fmt: skip
def test_ctrl_c_over_a_disk_that_hangs(tmp_path: Path, what: str) -> None:
    ran = run_python(ENTRIES, WHAT=what, FOLDER=os.fspath(tmp_path / "s"))
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < AT_ONCE


DROPS = """
import os, time
import numpy as np
from kvswap import _testing
from kvswap.files import FileStore, Layout

folder, device = os.environ["FOLDER"], os.environ["DEVICE"] or None
store = FileStore(folder, Layout(5000), capacity=64 << 20, engine="threads", device=device, staging_nbytes=1 << 20)
_testing.file_set_fault(store, "write", "delay", 1, 1, 0, float(os.environ["HANGS"]))
transfer = store.store([b"key"], np.ones((1, 5000), np.uint8), [0])
begun = time.monotonic()
if os.environ["LAST"] == "transfer":
    del store, transfer
else:
    del transfer, store
print(time.monotonic() - begun, flush=True)
if os.environ["AGAIN"]:
    with FileStore(folder, Layout(5000), capacity=64 << 20) as again:
        print(again.contains([b"key"])[0], flush=True)
if float(os.environ["HANGS"]) > 10:
    os._exit(0)  # else it waits for stores and devices, 12 s in all
"""


@pytest.mark.parametrize("device", ["", "host:0"])
@pytest.mark.parametrize("last", ["store", "transfer"])
def test_dropping_never_waits(tmp_path: Path, last: str, device: str) -> None:
    """The last handle of a store with a write under way."""
    ran = run_python(DROPS, FOLDER=os.fspath(tmp_path / "s"), LAST=last, DEVICE=device, HANGS="100", AGAIN="")
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < AT_ONCE


@pytest.mark.parametrize("device", ["", "host:0"])
def test_the_end_of_the_process_waits_a_little_for_what_was_dropped(tmp_path: Path, device: str) -> None:
    """Two seconds; of three attempts, since other work on the machine may take as much."""
    there = False
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        ran = run_python(DROPS, FOLDER=os.fspath(folder), LAST="store", DEVICE=device, HANGS="0.3", AGAIN="")
        assert ran.returncode == 0, ran.stderr
        with FileStore(folder, Layout(5000), capacity=64 << 20) as store:
            there = there or store.contains([b"key"]) == [True]
        if there:
            break
    assert there


@pytest.mark.parametrize("device", ["", "host:0"])
def test_what_was_dropped_is_opened_again(tmp_path: Path, device: str) -> None:
    """Opening waits for the thread that closes it."""
    ran = run_python(DROPS, FOLDER=os.fspath(tmp_path / "s"), LAST="store", DEVICE=device, HANGS="0.5", AGAIN="1")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[1] == "True"


def test_a_wait_that_was_left_ends_by_itself(tmp_path: Path) -> None:
    """The close that Ctrl-C left goes on: what was under way is stored, and the directory is free."""
    store = FileStore(tmp_path / "s", Layout(1), capacity=64 << 20, engine="threads")
    with testing.file_fault(store, "write", "delay", nth=1, every=1, delay=PATIENCE):
        store.store([b"key"], [bytes(1)])
        with pytest.raises(TimeoutError):
            store.store([b"other"], [bytes(1)]).wait(0.01)
    store.close(PATIENCE)
    with FileStore(tmp_path / "s", Layout(1), capacity=64 << 20) as again:
        assert again.contains([b"key", b"other"]) == [True, True]
