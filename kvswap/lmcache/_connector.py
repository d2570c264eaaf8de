"""The client of LMCache's native_plugin L2 adapter (lmcache/v1/distributed/l2_adapters/native_connector_l2_adapter.py).

Submitting returns a number at once. When that operation has ended, event_fd() becomes readable, and
drain_completions() tells the number, whether all went well, a message, and one bool a key. One thread waits for the
transfers; another answers lookups, because a process that only reads may have to look at the files for them.

Objects of one size are one store, in a folder of that number under the directory. Other names there are not kvswap's:
they are left alone, and a line of the log names them once.

Nothing but wrong use (a closed connector, lists of different lengths) raises. What fails is the completion of those
objects, and what fails for objects of one size leaves the other sizes alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvswap import _C, _options
from kvswap._devices import log_build
from kvswap._log import into, logger
from kvswap._shared_files import SharedFiles
from kvswap.files import FileTransfer
from kvswap.identity import Identity, Said, folder

_log = logger("kvswap.lmcache")
_MOST_KEY = 512
_HASHED = b"sha256@"  # begins the stored form of hashed keys
_SIZE = re.compile(r"[1-9][0-9]{0,18}", re.ASCII)  # a folder's name
_MOST_NBYTES = (1 << 63) - 1
_AGAIN_SECONDS = 10.0  # until files that could not be opened are tried again
_FEW = 5
_PAUSE = 0.01  # seconds until the next look, where waiting itself has failed
_Completion = tuple[int, bool, str, list[bool] | None]


@dataclass(eq=False)
class _Operation:
    """A submitted operation, and what it was cut into: the positions of keys of one size, and their transfer."""

    number: int
    what: str
    done: list[bool]
    parts: list[tuple[list[int], FileTransfer]] = field(default_factory=list)
    error: str = ""

    def ended(self) -> bool:
        return all(transfer.done() for _, transfer in self.parts)


class FileConnector:
    """Objects of LMCache by key in the files of a directory.

    directory: created if missing. A list: several disks, over which the objects are spread.
    capacity: limit of the bytes of all files in the directory, of all servers and sizes of objects; the first server
      sets it. Beyond it the least recently used objects are evicted. Of a list: of the files of each size.
    revision, weight_version, name: tell apart caches in which the same key may mean other bytes of the same number.
      LMCache's keys name model, rank and group, but neither the revision of the weights nor the KV format. Without any
      of these the objects are this process's own, unless unversioned is true.
    durability, engine, depth, queue, buffered: as for kvswap.files.FileStore.
    shared: all servers of the machine that name the directory store in it, and find each other's objects. False, for
      network file systems, and a list of directories: the first process writes, the others read.
    """

    def __init__(
        self, directory: str | list[str] | None = None, capacity: int | str | None = None, **options: Any
    ) -> None:
        into("lmcache")
        log_build()
        given = {"directory": directory, "capacity": capacity, **options}
        self._options = _options.read(given, _options.FILE_STORAGE, "adapter_params")
        place = self._options.pop("directory")
        self._directories: list[str] = place if isinstance(place, list) else [place]
        self._capacity = self._options.pop("capacity")
        self._identity = Identity("lmcache", {}, Said.pop(self._options))
        self._identity.warn(_log, "adapter_params")
        self._opening = threading.Lock()
        self._stores: dict[int, SharedFiles] = {}  # by bytes of an object; guarded by _opening, as the next one
        self._failed: dict[int, tuple[float, str]] = {}  # those that could not be opened: until when, and why
        self._foreign: set[str] = set()  # names that were reported; guarded by _opening
        self._lock = threading.Lock()
        self._running: list[_Operation] = []  # guarded by _lock, as are the fields below
        self._completions: deque[_Completion] = deque()
        self._next = 0
        self._closed = False
        for each in self._directories:
            Path(each).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._open_known()
        self._event: int | None = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lookups = ThreadPoolExecutor(1, "kvswap-lmcache-lookup")
        self._waiter = threading.Thread(target=self._wait, name="kvswap-lmcache", daemon=True)
        self._waiter.start()

    # -- LMCache's interface ------------------------------------------------------------------------------------------

    def event_fd(self) -> int:
        """Readable while there are completions."""
        with self._lock:
            if self._event is None:
                raise RuntimeError(_CLOSED)
            return self._event

    def submit_batch_set(self, keys: Sequence[str], memviews: Sequence[Any]) -> int:
        """Store objects, unless they are; their bytes must not change until the completion."""
        return self._submit("store", keys, memviews)

    def submit_batch_get(self, keys: Sequence[str], memviews: Sequence[Any]) -> int:
        """Load objects into these buffers. What an object that failed leaves in its buffer is undefined."""
        return self._submit("load", keys, memviews)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Look objects up."""
        operation = self._begin("lookup", len(keys))
        self._lookups.submit(self._look_up, operation, [_key(key) for key in keys])
        return operation.number

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Delete objects; a missing one counts as deleted."""
        operation = self._begin("delete", len(keys))
        stored, positions = [_key(key) for key in keys], list(range(len(keys)))
        for store in self._known():
            self._start(operation, positions, partial(store.delete, stored))
        self._run(operation)
        return operation.number

    def drain_completions(self) -> list[_Completion]:
        """The completions since the last call: number, whether all went well, a message, and a bool a key."""
        with self._lock:
            if self._event is not None:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._event)
            found = list(self._completions)
            self._completions.clear()
        return found

    def close(self) -> None:
        """End what is running, and close the files. The next process finds the objects."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._lookups.shutdown(cancel_futures=True)
        for store in self._known():
            try:
                store.close()
            except Exception as error:  # a disk that does not answer; the others are closed
                _log.warning("closing %s failed: %s", store.name, error)
        _C._await_tell()
        self._waiter.join(60)
        with self._lock:
            event, self._event = self._event, None
        if event is not None:
            os.close(event)

    # -- stores -------------------------------------------------------------------------------------------------------

    def _open_known(self) -> None:
        """The stores that there are. One that cannot be opened is tried again later."""
        for nbytes in self._sizes():
            try:
                if self._is_there(nbytes):
                    self._store_of(nbytes)
            except Exception as error:
                _log.warning("objects of %d bytes are not looked up: %s", nbytes, error)

    def _sizes(self) -> list[int]:
        """Sizes of which the directory has folders, and no store is open or has just failed to open."""
        try:
            names = sorted(os.listdir(self._directories[0]))
        except OSError as error:
            _log.warning("%s cannot be listed: %s", self._directories[0], error)
            return []
        with self._opening:
            known, now = self._stores.keys() | self._failed.keys(), time.monotonic()
            known -= {nbytes for nbytes, (until, _) in self._failed.items() if until <= now}
            names = [name for name in names if name not in self._foreign and name != "bound.kvs"]
        sizes = {name: int(name) for name in names if _SIZE.fullmatch(name) and int(name) <= _MOST_NBYTES}
        self._report([name for name in names if name not in sizes or not Path(self._directories[0], name).is_dir()])
        return [nbytes for nbytes in sizes.values() if nbytes not in known]

    def _report(self, foreign: list[str]) -> None:
        with self._opening:
            new = [name for name in foreign if name not in self._foreign]
            self._foreign.update(new)
        if new:
            shown = ", ".join(map(repr, new[:_FEW])) + (f" and {len(new) - _FEW} more" if len(new) > _FEW else "")
            _log.warning("%s has names that are not kvswap's and are left alone: %s", self._directories[0], shown)

    def _is_there(self, nbytes: int) -> bool:
        """Whether this process or another one has made the store."""
        return folder(Path(self._directories[0], str(nbytes)), self._identity.layout(nbytes)).is_dir()

    def _store_of(self, nbytes: int) -> SharedFiles:
        with self._opening:
            if self._closed:
                raise RuntimeError(_CLOSED)
            store = self._stores.get(nbytes)
            if store is not None:
                return store
            until, why = self._failed.get(nbytes, (0.0, ""))
            if time.monotonic() < until:
                raise _C.Error(why)
            places, bound = [str(Path(each, str(nbytes))) for each in self._directories], self._directories[0]
            layout = self._identity.layout(nbytes)
            try:
                store = SharedFiles(places, layout, self._capacity, True, dict(self._options), bound)
                self._stores[nbytes] = store
            except Exception as error:
                self._failed[nbytes] = time.monotonic() + _AGAIN_SECONDS, str(error)
                raise
            self._failed.pop(nbytes, None)
            return store

    def _known(self) -> list[SharedFiles]:
        with self._opening:
            return list(self._stores.values())

    # -- operations ---------------------------------------------------------------------------------------------------

    def _submit(self, what: str, keys: Sequence[str], memviews: Sequence[Any]) -> int:
        if len(keys) != len(memviews):
            raise ValueError(f"{what}: {len(keys)} keys and {len(memviews)} buffers")
        operation = self._begin(what, len(keys))
        sizes: dict[int, list[int]] = {}
        for i, view in enumerate(memviews):
            sizes.setdefault(memoryview(view).nbytes, []).append(i)
        for nbytes, positions in sizes.items():
            stored, buffers = [_key(keys[i]) for i in positions], [memviews[i] for i in positions]
            self._start(operation, positions, partial(self._move, what, nbytes, stored, buffers))
        self._run(operation)
        return operation.number

    def _move(self, what: str, nbytes: int, keys: list[bytes], buffers: list[Any]) -> FileTransfer | None:
        if what == "store":
            return self._store_of(nbytes).store(keys, buffers)
        return self._store_of(nbytes).load(keys, buffers) if self._is_there(nbytes) else None

    def _begin(self, what: str, count: int) -> _Operation:
        with self._lock:
            if self._closed:
                raise RuntimeError(_CLOSED)
            self._next += 1
            return _Operation(self._next, what, [what == "delete"] * count)

    def _start(self, operation: _Operation, positions: list[int], begin: Callable[[], FileTransfer | None]) -> None:
        """Begin the transfer of a part. What cannot begin is told as failed; nothing is raised."""
        try:
            transfer = begin()
        except Exception as error:
            transfer, operation.error = None, str(error) or repr(error)
            _log.warning("%s: %d objects failed: %s", _DOING[operation.what], len(positions), operation.error)
        else:
            if transfer is None:
                operation.error = "another process writes the files" if operation.what != "load" else "not stored"
        if transfer is not None:
            operation.parts.append((positions, transfer))
        elif operation.what == "delete":
            operation.done = [False] * len(operation.done)

    def _run(self, operation: _Operation) -> None:
        with self._lock:
            self._running.append(operation)
        _C._await_tell()

    def _look_up(self, operation: _Operation, keys: list[bytes]) -> None:
        try:
            for again in (False, True):
                if again:  # a size that another process has begun to store
                    self._open_known()
                for store in self._known():
                    self._find(store, operation.done, keys)
                if all(operation.done):
                    break
        except Exception as error:  # the lookup is answered in any case
            operation.done, operation.error = [False] * len(keys), str(error)
            _log.warning("looking up %d objects: %s", len(keys), error)
        self._tell(operation, ok=not operation.error)

    @staticmethod
    def _find(store: SharedFiles, done: list[bool], keys: list[bytes]) -> None:
        missing = [i for i, there in enumerate(done) if not there]
        try:
            found = store.find([keys[i] for i in missing])
        except Exception as error:  # the other sizes are looked up all the same
            _log.warning("looking up %d objects in %s failed: %s", len(missing), store.name, error)
            return
        for i, there in zip(missing, found, strict=True):
            done[i] = there

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        going, known = True, ""
        while going:
            try:
                going = self._once()
            except Exception as error:  # out of memory, say: nothing else tells operations, so this goes on by asking
                if known != repr(error):
                    known = repr(error)
                    _log.error("waiting for stores and loads failed, they are asked for now: %s", known)
                time.sleep(_PAUSE)

    def _once(self) -> bool:
        with self._lock:
            seen, running = _C._await_news(), list(self._running)
            if self._closed and not running:
                return False
        ended = [operation for operation in running if operation.ended()]
        for operation in ended:
            self._end(operation)
        if not ended:
            transfers = [transfer for each in running for _, transfer in each.parts if not transfer.done()]
            if transfers or not running:  # else all have ended since they were asked
                _C._wait_first(transfers, seen)
        return True

    def _end(self, operation: _Operation) -> None:
        try:
            self._settle(operation)
        except Exception as error:
            operation.done, operation.error = [False] * len(operation.done), repr(error)
            _log.error(
                "%s of %d objects failed: how it ended is unknown: %r", operation.what, len(operation.done), error
            )
        with self._lock:
            self._running.remove(operation)
        self._tell(operation, ok=all(operation.done))

    def _settle(self, operation: _Operation) -> None:
        for positions, transfer in operation.parts:
            failed = {int(i) for i in transfer.failed_positions}
            for i, position in enumerate(positions):
                good = i not in failed
                operation.done[position] = good and (operation.what != "delete" or operation.done[position])
            if failed:
                operation.error, what = str(transfer.error), _DOING[operation.what]
                _log.warning("%s: %d of %d objects failed: %s", what, len(failed), len(positions), operation.error)

    def _tell(self, operation: _Operation, *, ok: bool) -> None:
        with self._lock:
            self._completions.append((operation.number, ok, operation.error, list(operation.done)))
            if self._event is not None:
                os.eventfd_write(self._event, 1)


_CLOSED = "this connector is closed"
_DOING = {"store": "storing", "load": "loading", "delete": "deleting"}


def _key(key: str) -> bytes:
    """The key of a store: readable, unless it is too long, or begins as hashed ones do. No two are stored as one."""
    stored = key.encode(errors="surrogatepass")
    if 1 <= len(stored) <= _MOST_KEY and not stored.startswith(_HASHED):
        return stored
    return _HASHED + hashlib.sha256(stored).hexdigest().encode()
