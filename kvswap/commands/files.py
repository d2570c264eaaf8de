"""`kvswap files check|stat|gc|clear|limit DIR`: inspects and cleans the directory of a file tier.

A directory is a store, or has stores in it, at most _DEPTH levels down. A replay of a model with several groups of
layers makes one a group. An engine's directory has a folder for each layout of blocks, and where writers share it, a
store of each writer in that.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import fnmatch
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kvswap._regular import open_regular
from kvswap.replay.errors import UsageError
from kvswap.replay.units import format_size, parse_size

from .output import Output, document, for_person
from .parser import EXIT_DEVICE, EXIT_OK, EXIT_WRONG_BYTES, Commands, Parser, add_json, complain

if TYPE_CHECKING:
    from kvswap.files import FileStore, Layout

Found: TypeAlias = "dict[str, Any]"

_BATCH_NBYTES = 64 << 20  # read at once by check and gc
_WAIT = 600.0
_PAGE = 4096
_EPOCH, _EPOCH_AT, _HEADER_EPOCH_AT = 16, 16, 568  # bytes of an epoch; where it is in its file and in a block's header
_KEEP_ALL = 1 << 62  # a capacity at which no block is evicted
_HANG = 17
_DEPTH = 3  # the deepest layout is LMCache's: SIZE/LAYOUT/writer-NNNN
_HELP = {
    "check": "read every block and compare its checksum, also while a writer runs",
    "stat": "layout, blocks, files, and what is damaged",
    "gc": "erase damaged blocks, and remove files without blocks",
}


_DIR_HELP = ("a store's directory, or one that has stores in it, as an engine's", "a store's directory")


def add(commands: Commands[Parser]) -> None:
    parser = commands.add_parser("files", help="check, describe or clean the directory of a file tier")
    own = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, what in _HELP.items():
        one = own.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        one.add_argument("directory", metavar="DIR", type=Path, help=_DIR_HELP[name == "gc"])
        add_json(one)
        one.set_defaults(run=_run, what=name)
    what = "remove all blocks, for all processes, those that run included, and the files of ended ones"
    one = own.add_parser("clear", help=what, description=f"{what[0].upper()}{what[1:]}.")
    one.add_argument("directory", metavar="DIR", type=Path, help=_DIR_HELP[0])
    one.add_argument("--identity", metavar="NAME", help="of one store only: the name of its folder")
    add_json(one)
    one.set_defaults(run=_run_clear)
    what = "show or change the limit of the directory that engines were given"
    one = own.add_parser("limit", help=what, description=f"{what[0].upper()}{what[1:]}.")
    one.add_argument("directory", metavar="DIR", type=Path, help="the directory")
    one.add_argument("limit", metavar="BYTES", nargs="?", type=parse_size, help="of all files below: 500GiB, say")
    add_json(one)
    one.set_defaults(run=_run_limit)


_Action: TypeAlias = Callable[[Path, Output], Found]


def _run(args: argparse.Namespace) -> int:
    """Each store of the directory in turn."""
    actions: dict[str, _Action] = {"check": _check, "stat": _stat, "gc": _gc}
    show, found = for_person(args), []
    with document(args, f"files {args.what}") as out:
        directories = stores(args.directory)
        bound = {}
        if args.what == "stat" and (args.directory / "bound.kvs").exists():
            bound = {"bound": _bound(args.directory)}
            show(f"{args.directory}: {_in_words(bound['bound'])}")
        if args.what == "gc" and directories != [args.directory]:
            if args.directory not in directories:
                names = ", ".join(map(str, directories))
                raise UsageError(f"gc takes one store, and {args.directory} has stores in it: name one of {names}")
            directories = [args.directory]
        for directory in directories:
            if directories != [args.directory]:
                show.header(str(directory))
            found.append({"directory": str(directory), **_one(actions[args.what], directory, show, directories)})
        out.write({**bound, "stores": found})
    if any(store.get("damaged") for store in found):
        return EXIT_WRONG_BYTES
    return EXIT_DEVICE if any("error" in store for store in found) else EXIT_OK


def _run_limit(args: argparse.Namespace) -> int:
    """Engines that run go by a new limit within a second."""
    if args.limit is not None and not 0 < args.limit <= _KEEP_ALL:
        raise UsageError(f"BYTES is {args.limit}: must be 1 to 2**62")
    show = for_person(args)
    with document(args, "files limit") as out:
        bound = _bound(args.directory, args.limit or 0)
        show(_in_words(bound))
        out.write(bound)
    return EXIT_OK


def _bound(directory: Path, limit: int = 0) -> Found:
    """The limit of a directory, 0: unchanged; what its stores take, and how many processes write there."""
    from kvswap import _C

    limit, nbytes, running = _C._file_limit(directory, limit)
    return {"directory": str(directory), "limit_nbytes": limit, "file_nbytes": nbytes, "running": running}


def _in_words(bound: Found) -> str:
    limit, nbytes = format_size(bound["limit_nbytes"]), format_size(bound["file_nbytes"])
    return f"limit {limit}; {nbytes} in files, {bound['running']} running writers"


def _run_clear(args: argparse.Namespace) -> int:
    from kvswap.files import clear

    show = for_person(args)
    with document(args, "files clear") as out:
        try:
            found = clear(args.directory, identity=args.identity)
        except ValueError as error:
            raise UsageError(str(error)) from None
        for one in found:
            text = f"{one.directory}: cleared, {format_size(one.freed_nbytes)} of files removed"
            show(text + (f"; {one.running} running processes keep theirs, for new blocks" if one.running else ""))
        out.write(
            {
                "stores": [
                    {"directory": str(one.directory), "freed_nbytes": one.freed_nbytes, "running": one.running}
                    for one in found
                ]
            }
        )
    return EXIT_OK


def _one(action: _Action, directory: Path, show: Output, directories: list[Path]) -> Found:
    """Of several stores, one that cannot be read does not hide the others."""
    from kvswap import _C

    try:
        return action(directory, show)
    except (_C.Error, OSError) as error:
        if len(directories) == 1:
            raise
        complain(str(error))
        return {"error": str(error)}


def stores(directory: Path) -> list[Path]:
    """The directory if it is a store, and the stores in it."""
    from kvswap import _C

    if not directory.is_dir():
        what = "it is a file; name the directory of a store" if directory.exists() else "there is no such directory"
        raise UsageError(f"{directory}: {what}")
    found: list[Path] = []
    unread: list[str] = []
    _find(directory, _DEPTH, found, unread)
    for message in unread:
        complain(message)
    if not found:
        raise _C.Error(
            f"{directory} is no store: there is neither store.kvs nor segment-*.kvs in it, nor in a folder of it, "
            f"{_DEPTH} levels down"
        )
    return found


def _find(directory: Path, depth: int, found: list[Path], unread: list[str]) -> None:
    """The stores from here on, in the order of their names. A folder that cannot be read does not hide the others."""
    folders = []
    is_store = False
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                is_store |= entry.name == "store.kvs" or fnmatch.fnmatch(entry.name, "segment-*.kvs")
                if depth and entry.is_dir():
                    folders.append(directory / entry.name)
    except OSError as error:
        unread.append(f"{directory}: {error.strerror}")
    if is_store:
        found.append(directory)
    for folder in sorted(folders):
        _find(folder, depth - 1, found, unread)


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
def _open(directory: Path, *, readonly: bool, engine: Literal["auto", "threads"] = "auto") -> Iterator[FileStore]:
    from kvswap.files import FileStore

    with FileStore(directory, _layout(directory), capacity=_KEEP_ALL, readonly=readonly, engine=engine) as store:
        yield store


def _stat(directory: Path, show: Output) -> Found:
    from kvswap import _C
    from kvswap.identity import in_words

    with _open(directory, readonly=True, engine="threads") as store:  # reads no block: nothing is to be hinted at
        stats, info, layout = store.stats(), store.info, _layout(directory)
    why_not, _ = _C._file_facts()
    info["engine"], info["engine_note"] = "threads" if why_not else "io_uring", why_not
    words = in_words(layout.fields)
    slots, blocks, segments = stats["slots"], stats["blocks"], stats["segments"]
    rows = (
        *(words or [("layout", layout.text)]),
        ("a block", format_size(info["block_nbytes"])),
        ("blocks", f"{blocks:,} of {slots:,} slots, {format_size(blocks * info['block_nbytes'])}"),
        ("segments", f"{segments:,} of {format_size(info['segment_nbytes'])}, {format_size(stats['file_nbytes'])}"),
        ("torn or damaged", f"{stats['cut']:,} headers or blocks since the last checkpoint"),
        ("unreadable", f"{stats['foreign']:,} segment files, {stats['lost_slots']:,} slots"),
        ("O_DIRECT", "on" if info["direct"] else f"off: {info['direct_note']}"),
        ("engine", info["engine"] + (f" ({info['engine_note']})" if info["engine_note"] else "")),
    )
    for name, value in rows:
        show(f"{name:<{_HANG - 2}}  {value}", hang=_HANG)
    return {
        "layout": layout.text,
        "identity": dict(words),
        "block_nbytes": info["block_nbytes"],
        "blocks": blocks,
        "slots": slots,
        "segments": segments,
        "segment_nbytes": info["segment_nbytes"],
        "file_nbytes": stats["file_nbytes"],
        "torn": stats["cut"],
        "unreadable_segments": stats["foreign"],
        "unreadable_slots": stats["lost_slots"],
        "direct": bool(info["direct"]),
        "engine": info["engine"],
    }


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


def _check(directory: Path, show: Output) -> Found:
    """Blocks that the writer evicts meanwhile are not damaged."""
    with _open(directory, readonly=True) as store:
        stats = store.stats()
        good, bad = _read_all(store)
    damaged = {_name(key): str(reason) for key, reason in bad.items() if "is not in the store" not in str(reason)}
    for name, reason in damaged.items():
        show(f"{name}: {reason}")
    show(f"{good:,} blocks are right, {len(damaged):,} damaged")
    if stats["cut"]:
        show(f"{stats['cut']:,} torn or damaged headers or blocks, which no load returns")
    if stats["foreign"] or stats["lost_slots"]:
        show(f"{stats['foreign']:,} segment files and {stats['lost_slots']:,} slots cannot be read")
    return {
        "right": good,
        "damaged": damaged,
        "torn": stats["cut"],
        "unreadable_segments": stats["foreign"],
        "unreadable_slots": stats["lost_slots"],
    }


def _gc(directory: Path, show: Output) -> Found:
    _layout(directory)  # raises if it is no store
    before = _nbytes(directory)
    with _open(directory, readonly=False) as store:  # which erases torn and superseded blocks
        cut = store.stats()["cut"]
        _, bad = _read_all(store)
        bad = {key: reason for key, reason in bad.items() if "is damaged" in str(reason)}  # others may be read later
        if bad:
            store.delete(list(bad)).wait(_WAIT)
    removed = _remove_empty(directory)
    freed = before - _nbytes(directory)
    show(
        f"erased {cut + len(bad):,} damaged blocks, removed {removed:,} files without blocks: {format_size(freed)} less"
    )
    return {"erased": cut + len(bad), "removed_files": removed, "freed_nbytes": freed}


def _remove_empty(directory: Path) -> int:
    """Removes segments without a block, and what a crash left, under the writer's lock. Unreadable files stay."""
    slot = _PAGE + -(-_layout(directory).block_nbytes // _PAGE) * _PAGE
    epoch = _epoch(directory)
    removed = 0
    with open(open_regular(directory / "store.kvs"), "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # a writer has opened the store meanwhile, and its files stay
            return 0
        for path in [*directory.glob("segment-*.kvs"), *directory.glob("new.tmp")]:
            if path.name != "new.tmp" and _holds_anything(path, slot, epoch):
                continue
            with contextlib.suppress(OSError):  # a directory stays
                path.unlink()
                removed += 1
    return removed


def _epoch(directory: Path) -> bytes:
    """Of the store. No file: zeros; one that cannot be read: no block's."""
    place = directory.resolve()
    if fnmatch.fnmatch(place.name, "writer-[0-9][0-9][0-9][0-9]"):
        place = place.parent
    try:
        with open(open_regular(place / "epoch.kvs"), "rb") as file:
            return file.read(_EPOCH_AT + _EPOCH)[_EPOCH_AT:]
    except FileNotFoundError:
        return bytes(_EPOCH)


def _holds_anything(path: Path, slot: int, epoch: bytes) -> bool:
    """Whether any slot has a header of this epoch, or the file cannot be read."""
    try:
        with open(open_regular(path), "rb", buffering=0) as file:
            if file.read(8) != b"KVSSEGMT":
                return True
            size = os.fstat(file.fileno()).st_size
            return any(
                any(os.pread(file.fileno(), 8, at)) and os.pread(file.fileno(), _EPOCH, at + _HEADER_EPOCH_AT) == epoch
                for at in range(_PAGE, size, slot)
            )
    except OSError:
        return True


def _nbytes(directory: Path) -> int:
    total = 0
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # a writer removed it
            total += path.lstat().st_size
    return total


def _name(key: bytes) -> str:
    """A key as people can read it."""
    text = key.decode("ascii", "replace")
    return text if text.isprintable() and text.isascii() else key.hex()
