"""Clears the stores of a directory: a new epoch of each, and the space of those that no process writes."""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvswap import _C
from kvswap._regular import open_regular

__all__ = ["Cleared", "clear"]

_DEPTH = 3  # the deepest layout is LMCache's: SIZE/LAYOUT/writer-NNNN
_WRITER = re.compile(r"writer-(0[0-9]{3}|[0-9]{4})")


@dataclass(frozen=True)
class Cleared:
    """What clear() did to a store.

    directory: of the store. freed_nbytes: of files that were removed. running: how many processes write it: their
    files stay, and have room for new blocks.
    """

    directory: Path
    freed_nbytes: int
    running: int


def clear(directory: str | os.PathLike[str], *, identity: str | None = None) -> list[Cleared]:
    """Remove all blocks of the stores in a directory, at most three levels down, as FileStore.clear() does.

    identity: the name of one store's folder: only its blocks are removed; None: those of all stores.

    Files are removed if no process writes the store. ValueError: there is no store, or none of that name. Error: a
    store cannot be cleared; the stores before it have been.
    """
    path = Path(directory)
    if not path.is_dir():
        raise ValueError(f"{path} is no directory")
    if _WRITER.fullmatch(path.resolve().name) and not (path / "epoch.kvs").exists():
        raise ValueError(f"{path} is that of one writer: clear the directory around it, which is cleared as a whole")
    found = sorted(_places(path, _DEPTH))
    if not found:
        raise ValueError(f"{path} holds no store, nor does a folder of it, {_DEPTH} levels down")
    if identity is not None:
        names = ", ".join(sorted({place.resolve().name for place in found}))
        found = [place for place in found if place.resolve().name == identity]
        if not found:
            raise ValueError(f"{path} holds no store {identity}; there are {names}")
    return [_clear_one(place) for place in found]


def _places(folder: Path, depth: int) -> set[Path]:
    """The directories of stores: of a shared one that around its writers."""
    found: set[Path] = set()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name in ("store.kvs", "epoch.kvs") or fnmatch.fnmatch(entry.name, "segment-*.kvs"):
                found.add(folder)
            elif depth and entry.is_dir(follow_symlinks=False):
                below = _places(folder / entry.name, depth - 1)
                is_writer = _WRITER.fullmatch(entry.name) and folder / entry.name in below
                found |= {folder} if is_writer else below
    return found


def _clear_one(place: Path) -> Cleared:
    _C._file_clear(place)
    writers = [each for each in sorted(place.glob("writer-*")) if _WRITER.fullmatch(each.name)]
    freed, running = 0, 0
    for writer in writers or [place]:
        nbytes = _remove_files(writer)
        running += nbytes is None
        freed += nbytes or 0
    if freed and running:
        _C._file_clear(place)  # those that run read the directories again, and close the files that were removed
    return Cleared(place, freed, running)


def _remove_files(folder: Path) -> int | None:
    """The bytes of the segments, which are removed. None: a process writes them."""
    try:
        fd = open_regular(folder / "store.kvs")
    except FileNotFoundError:
        return 0
    removed = 0
    with open(fd, "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        for path in [*folder.glob("segment-*.kvs"), folder / "new.tmp"]:
            with contextlib.suppress(FileNotFoundError):
                nbytes = path.lstat().st_size
                path.unlink()
                removed += nbytes
    return removed
