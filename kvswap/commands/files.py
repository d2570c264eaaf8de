"""kvswap files check|stat|gc DIR: inspects and cleans a store's directory."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvswap._regular import open_regular
from kvswap.replay.units import format_size

if TYPE_CHECKING:
    from kvswap.files import FileStore, Layout

_BATCH_NBYTES = 64 << 20  # read at once by check and gc
_WAIT = 600.0
_PAGE = 4096
_AS_IT_IS = 1 << 62  # a capacity that gives up nothing


def add_files(commands: Any) -> None:
    """The command's arguments."""
    parser = commands.add_parser("files", help="check, describe or tidy up a directory of the file tier")
    parser.add_argument(
        "what",
        choices=("check", "stat", "gc"),
        help="check: read every block and compare its checksum "
        "(beside a writer too); stat: what there is; gc: erase what is damaged and remove files that hold nothing",
    )
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    what = {"check": _check, "stat": _stat, "gc": _gc}
    return what[args.what](args.directory)


def _layout(directory: Path) -> Layout:
    from kvswap import _C
    from kvswap.files import Layout

    text, block_nbytes = _C._file_peek(directory)
    try:
        layout = Layout.parse(block_nbytes, text)
    except ValueError as error:
        raise _C.Error(f"{directory} holds no store that kvswap made: {error}") from None
    if layout.text != text:
        raise _C.Error(f"{directory} holds no store that kvswap made: its layout {text!r} is not as kvswap writes it")
    return layout


@contextlib.contextmanager
def _open(directory: Path, *, readonly: bool) -> Iterator[FileStore]:
    from kvswap.files import FileStore

    with FileStore(directory, _layout(directory), capacity=_AS_IT_IS, readonly=readonly) as store:
        yield store


def _stat(directory: Path) -> int:
    with _open(directory, readonly=True) as store:
        stats, info = store.stats(), store.info
    rows = [
        ("layout", _layout(directory).text),
        ("a block", format_size(info["block_nbytes"])),
        (
            "blocks",
            f"{stats['blocks']:,} of {stats['slots']:,} slots, {format_size(stats['blocks'] * info['block_nbytes'])}",
        ),
        (
            "segments",
            f"{stats['segments']:,} of {format_size(info['segment_nbytes'])}, {format_size(stats['file_nbytes'])}",
        ),
        ("torn or damaged", f"{stats['cut']:,} headers or blocks since the last checkpoint"),
        ("unreadable", f"{stats['foreign']:,} segment files, {stats['lost_slots']:,} slots"),
        ("O_DIRECT", "yes" if info["direct"] else f"no: {info['direct_note']}"),
        ("engine", info["engine"] + (f" ({info['engine_note']})" if info["engine_note"] else "")),
    ]
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows))
    return 0


def _read_all(store: FileStore) -> tuple[int, dict[bytes, Exception]]:
    """Load every block; returns how many were right, and why the others were not."""
    import numpy as np

    from kvswap import _C

    keys, nbytes = store.keys(), store.block_nbytes
    batch = max(1, min(1024, _BATCH_NBYTES // nbytes))
    room = np.empty((batch, nbytes), np.uint8)
    bad: dict[bytes, Exception] = {}
    for begin in range(0, len(keys), batch):
        some = keys[begin : begin + batch]
        load = store.load(some, room, range(len(some)))
        try:
            load.wait(_WAIT)
        except _C.Error:
            bad.update({some[position]: reason for position, reason in load.reasons.items()})
    return len(keys) - len(bad), bad


def _check(directory: Path) -> int:
    """Exit status 1: a block is damaged. What the writer gave up meanwhile is no damage."""
    with _open(directory, readonly=True) as store:
        stats = store.stats()
        good, bad = _read_all(store)
    damaged = {key: reason for key, reason in bad.items() if "is not in the store" not in str(reason)}
    for key, reason in damaged.items():
        print(f"{_name(key)}: {reason}")
    print(
        f"{good:,} blocks are right, {len(damaged):,} damaged; {stats['cut']:,} torn or damaged headers or blocks that "
        f"are not served; {stats['foreign']:,} segment files and {stats['lost_slots']:,} slots cannot be read"
    )
    return 1 if damaged else 0


def _gc(directory: Path) -> int:
    _layout(directory)  # which says so if it is no store
    before = _nbytes(directory)
    with _open(directory, readonly=False) as store:  # which erases what is torn or superseded
        cut = store.stats()["cut"]
        _, bad = _read_all(store)
        bad = {key: reason for key, reason in bad.items() if "is damaged" in str(reason)}  # not: cannot be read now
        if bad:
            store.delete(list(bad)).wait(_WAIT)
    removed = _remove_empty(directory)
    print(
        f"erased {cut + len(bad):,} blocks that were damaged, removed {removed:,} files that held nothing: "
        f"{format_size(before - _nbytes(directory))} less"
    )
    return 0


def _remove_empty(directory: Path) -> int:
    """Segments without a block, and what a crash left; under the writer's lock. What cannot be read is left alone."""
    slot = _PAGE + -(-_layout(directory).block_nbytes // _PAGE) * _PAGE
    removed = 0
    with open(open_regular(directory / "store.kvs"), "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # a writer came in between: they are its now
            return 0
        for path in [*directory.glob("segment-*.kvs"), *directory.glob("new.tmp")]:
            if path.name != "new.tmp" and _holds_anything(path, slot):
                continue
            with contextlib.suppress(OSError):  # a directory stays
                path.unlink()
                removed += 1
    return removed


def _holds_anything(path: Path, slot: int) -> bool:
    """Whether any slot's header page begins with something, or may."""
    try:
        with open(open_regular(path), "rb", buffering=0) as file:
            if file.read(8) != b"KVSSEGMT":
                return True
            size = os.fstat(file.fileno()).st_size
            return any(any(os.pread(file.fileno(), 8, at)) for at in range(_PAGE, size, slot))
    except OSError:
        return True


def _nbytes(directory: Path) -> int:
    total = 0
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # a writer gave it up
            total += path.lstat().st_size
    return total


def _name(key: bytes) -> str:
    """A key as people can read it."""
    text = key.decode("ascii", "replace")
    return text if text.isprintable() and text.isascii() else key.hex()
