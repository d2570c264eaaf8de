"""A file store that several processes of one machine open under the same configuration: engines, ranks, replicas."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from kvswap import _C
from kvswap._log import logger
from kvswap.files import FileStore, FileTransfer, Layout
from kvswap.identity import folder, forget

_log = logger("kvswap.files")
_OPEN_AGAIN_SECONDS = 10.0
_READER_AGAIN_SECONDS = 0.1
_REFRESH_SHARE = 10.0
_MOST_PAUSE_SECONDS = 0.05
_CLOCK_SECONDS = 0.05  # more than the steps in which a file system's times rise
_FOR_READERS = ("engine", "depth", "queue", "buffered")


Directory = str | list[str]


def is_one(directory: Directory) -> bool:
    """Whether it is one directory, which has one bound for all stores in it."""
    return isinstance(directory, str) or len(directory) == 1


def shares(directory: Directory, options: dict[str, Any]) -> bool:
    """Whether all processes write."""
    shared: bool = options.get("shared", True)
    return shared and is_one(directory)


class SharedFiles:
    """The store of one layout: a folder of `directory`, named after the layout.

    capacity: limit of all files in `bound`, of every layout and process; of several directories, of this store's.
    bound: a directory around `directory`; None: that one.
    may_write: False: this process stores nothing.
    options: of FileStore. shared: every process that may write does, and finds what the others stored.

    Where that is not possible, with shared=False or a list of directories (several disks), one process writes and the
    others read. A process that may write and finds another writer reads, and tries again to become the writer when it
    is asked to store, every ten seconds at most. A reader finds what the writer has stored since (refresh()) when it is
    asked for a key that it does not know and the files have changed; the refreshes take at most a tenth of its time.
    While the writer has not made the folder, nothing is found. Any thread may call.
    """

    def __init__(
        self,
        directory: Directory,
        layout: Layout,
        capacity: int,
        may_write: bool,
        options: dict[str, Any],
        bound: str | None = None,
    ) -> None:
        self.folders = [folder(each, layout) for each in ([directory] if isinstance(directory, str) else directory)]
        self.layout, self.capacity, self.may_write = layout, capacity, may_write
        self.options = {**options, "shared": shares(directory, options)}
        if is_one(directory):
            self.options["bound"] = bound or self.folders[0].parent
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._store: FileStore | None = None  # guarded by _lock, as are the fields below
        self._writes = self._closed = False  # _writes: no other process's store has to be looked at
        self._next_open = 0.0
        self._next_refresh = 0.0  # guarded by _refreshing, as is _seen
        self._seen: set[tuple[str, int]] = set()
        for each in self.folders:
            each.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._open(at_start=True)

    @property
    def _place(self) -> Path | list[Path]:
        return self.folders if len(self.folders) > 1 else self.folders[0]

    @property
    def name(self) -> str:
        """Its folders, for messages."""
        return ", ".join(map(str, self.folders))

    @property
    def writes(self) -> bool:
        """Whether this process stores what it is told to."""
        return self._writes and self.may_write

    def find(self, keys: list[bytes]) -> list[bool]:
        """Whether each key's block exists."""
        store = self._reader()
        if store is None:
            return [False] * len(keys)
        found = store.contains(keys)
        if not all(found) and not self._writes and self._refresh(store):
            found = store.contains(keys)
        return found

    def touch(self, keys: list[bytes]) -> None:
        """The blocks count as used now, the first one as the most recent."""
        store = self._store
        if store is not None and self._writes:
            store.touch(keys)

    def load(self, keys: list[bytes], blocks: Any, parts: list[int] | None = None) -> FileTransfer | None:
        """Load to host memory; None: there is no store yet. QueueFull."""
        store = self._reader()
        return None if store is None else store.load(keys, blocks, parts=parts)

    def store(self, keys: list[bytes], blocks: Any, parts: list[int] | None = None) -> FileTransfer | None:
        """Store from host memory; existing blocks are left unchanged. None: another process writes. QueueFull."""
        store = self._writer()
        return None if store is None else store.store(keys, blocks, parts=parts, replace=False)

    def delete(self, keys: list[bytes]) -> FileTransfer | None:
        """None: another process writes. QueueFull."""
        store = self._writer()
        return None if store is None else store.delete(keys)

    def clear(self) -> None:
        """Remove all blocks, those of other processes too, of ended ones included. Error: the directory cannot be
        written, and nothing has changed."""
        store = self._reader()
        if store is not None:
            store.clear()
        else:
            for folder in self.folders:
                if folder.exists():
                    _C._file_clear(folder)

    def close(self) -> None:
        """Close the store; later calls find nothing."""
        with self._lock:
            store, self._store, self._closed, self._writes = self._store, None, True, False
        if store is not None:
            store.close()
        forget(self.layout, self.folders)

    def _reader(self) -> FileStore | None:
        if self._store is None:
            with self._lock:
                if self._store is None and not self._closed and time.monotonic() >= self._next_open:
                    self._open_reader()
        return self._store

    def _writer(self) -> FileStore | None:
        if not self.may_write:
            return None
        if not self._writes:
            with self._lock:
                if not self._writes and not self._closed and time.monotonic() >= self._next_open:
                    self._open()
        return self._store if self._writes else None

    def _open(self, *, at_start: bool = False) -> None:
        """As the writer, if that is possible."""
        self._next_open = time.monotonic() + _OPEN_AGAIN_SECONDS
        if not self.may_write and not self.options["shared"]:
            return self._open_reader()
        try:
            store = FileStore(self._place, self.layout, capacity=self.capacity, **self.options)
        except _C.Error as error:
            if "written by another process" not in str(error):
                raise
            if at_start:
                _log.warning("%s; until that process ends, this one reads the store and stores nothing", error)
                self._open_reader()
            return None
        self._store, self._writes = store, True  # transfers that use the one before keep it
        _log.info("%s: this process writes it: %s, %s", self.name, store, store.info)
        return None

    def _open_reader(self) -> None:
        self._next_open = time.monotonic() + _READER_AGAIN_SECONDS
        reads = {
            name: value for name, value in self.options.items() if name in ("engine", "depth", "queue", "buffered")
        }
        if not all((each / "store.kvs").exists() for each in self.folders):
            return  # the writer has not made it yet
        try:
            self._store = FileStore(self._place, self.layout, readonly=True, **reads)
            _log.info("%s: this process reads it", self.name)
        except _C.Error as error:
            _log.warning("%s: %s; it is tried again", self.name, error)

    def _refresh(self, store: FileStore) -> bool:
        """Whether the store was looked at again. That reads the header of every block, so it is not done always."""
        with self._refreshing:
            pause = self._next_refresh - time.monotonic()
            if pause > _MOST_PAUSE_SECONDS:
                return False
            time.sleep(max(0.0, pause))
            now = self._files()
            if now == self._seen:
                return False
            begin = time.monotonic()
            try:
                store.refresh()
            except _C.Error as error:
                _log.warning("%s: %s", self.name, error)
                return False
            end = time.monotonic()
            self._next_refresh = end + _REFRESH_SHARE * (end - begin)
            newest = max((when for _, when in now), default=0)
            settled = time.time_ns() - newest > _CLOCK_SECONDS * 1e9  # else a later change may show the same time
            self._seen = now if settled else set()
            return True

    def _files(self) -> set[tuple[str, int]]:
        """The segments, and when each was written to."""
        try:
            found = [each for place in self.folders for each in os.scandir(place)]
            return {(each.path, each.stat().st_mtime_ns) for each in found if each.name.startswith("segment-")}
        except OSError:  # a file was removed meanwhile
            return {("", time.monotonic_ns())}
