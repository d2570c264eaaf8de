"""A store outlives its disk: what disks do to it at random, and it is opened again after each.

    python tests/random/disk_life.py [--seed N] [--openings 3000] [--kinds tmpfs,ext4,xfs,overlay,btrfs,quota]

Needs root: it mounts small file systems. EIO is injected by kvswap.testing.file_fault with both engines, and on ext4
also made by a loop device that has lost its second half; no device mapper is needed. Ends with status 1 where a byte
was wrong, an opening was refused although blocks could be served, or an action was tried too rarely.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, os.fspath(Path(__file__).resolve().parent.parent))

from disks import KINDS, Disk, disk

import kvswap
from kvswap import testing
from kvswap.files import FileStore, Layout

NBYTES, KEYS, CAPACITY, SEGMENT = 16384, 300, 6 << 20, 5 * 20480 + 4096
WAIT = 60.0


def key_of(number: int) -> bytes:
    return b"key %d" % number


def block_of(number: int) -> Any:
    return np.random.default_rng(number).integers(0, 256, NBYTES, np.uint8)


class Life:
    """One disk with a store of one writer and a shared one, which take turns."""

    def __init__(self, made: Disk, rng: random.Random, counts: Counter[str], wrong: list[str]) -> None:
        self.disk, self.rng, self.counts, self.wrong = made, rng, counts, wrong
        self.blocks = np.stack([block_of(number) for number in range(KEYS)])
        self.sure: dict[bool, set[int]] = {False: set(), True: set()}  # that can be served, of the shared store and not
        self.full = self.readonly = False
        self.elsewhere = made.place / "elsewhere"

    def folder(self, shared: bool) -> Path:
        return self.disk.path / ("shared" if shared else "kv")

    def say(self, text: str) -> None:
        self.wrong.append(f"{self.disk.kind}: {text}")
        print("WRONG", self.wrong[-1], flush=True)

    def open(self, shared: bool, limit: int | None = None) -> FileStore | None:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        engine: Any = self.rng.choice(("threads", "io_uring"))
        with contextlib.ExitStack() as stack:
            if limit:
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
                stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
            self.counts["openings"] += 1
            try:
                return FileStore(
                    self.folder(shared),
                    Layout(NBYTES, model="life"),
                    capacity=CAPACITY,
                    segment_nbytes=SEGMENT,
                    shared=shared,
                    engine=engine,
                )
            except kvswap.Error as error:
                if self.sure[shared]:
                    self.say(f"refused with {len(self.sure[shared])} blocks: {error}")
                self.counts["nothing to serve"] += 1
                return None

    def load(self, store: FileStore, shared: bool) -> None:
        numbers = self.rng.sample(range(KEYS), 40)
        target = np.zeros((40, NBYTES), np.uint8)
        load = store.load([key_of(number) for number in numbers], target, range(40))
        with contextlib.suppress(kvswap.Error):
            load.wait(WAIT)
        lost = set(load.failed_positions.tolist())
        for at, number in enumerate(numbers):
            if at in lost:
                self.sure[shared].discard(number)
                continue
            self.counts["served"] += 1
            if not np.array_equal(target[at], self.blocks[number]):
                self.say(f"key {number} has other bytes")

    def store(self, store: FileStore, shared: bool) -> None:
        numbers = self.rng.sample(range(KEYS), self.rng.randint(1, 40))
        transfer = store.store([key_of(n) for n in numbers], self.blocks, numbers, replace=self.rng.random() < 0.2)
        with contextlib.suppress(kvswap.Error):
            transfer.wait(WAIT)
        lost = set(transfer.failed_positions.tolist())
        self.counts["stored"] += len(numbers) - len(lost)
        self.counts["not stored"] += len(lost)
        self.sure[shared] |= {number for at, number in enumerate(numbers) if at not in lost}
        there = store.contains([key_of(number) for number in range(KEYS)])
        self.sure[shared] &= {number for number in range(KEYS) if there[number]}

    # -- actions: before an opening, or while the store is open --------------------------------------------------------

    def fill(self, shared: bool) -> None:
        if not self.readonly:
            self.disk.fill()
            self.full = True

    def drain(self, shared: bool) -> None:
        if not self.readonly:
            self.disk.drain()
            self.full = False

    def remount(self, shared: bool) -> None:
        if self.disk.remount("rw" if self.readonly else "ro"):
            self.readonly = not self.readonly
        else:
            self.counts["remounts refused"] += 1

    def files(self, shared: bool) -> list[Path]:
        return sorted(self.folder(shared).rglob("segment-*.kvs"))

    def truncate(self, shared: bool) -> None:
        files = [] if self.readonly else self.files(shared)
        if files:
            path = self.rng.choice(files)
            os.truncate(path, self.rng.choice((0, 100, 4096, path.stat().st_size // 2)))

    def remove_segment(self, shared: bool) -> None:
        files = [] if self.readonly else self.files(shared)
        if files:
            self.rng.choice(files).unlink()

    def cut_notices(self, shared: bool) -> None:
        for path in [] if self.readonly else self.folder(shared).rglob("notices.kvs"):
            os.truncate(path, self.rng.choice((0, 39, 4096)))

    def remove(self, shared: bool) -> None:
        if not self.readonly and self.folder(shared).exists():
            shutil.rmtree(self.folder(shared))
            self.sure[shared].clear()

    def replace(self, shared: bool) -> None:
        """By an empty directory, or by what it was before."""
        folder = self.folder(shared)
        if self.readonly or not folder.exists():
            return
        before = folder.with_name(f"{folder.name}-before")
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
        self.sure[shared].clear()
        if self.rng.random() < 0.5 and not self.full:
            shutil.copytree(before, folder)

    def act(self, what: str, shared: bool) -> None:
        with contextlib.suppress(OSError):  # the disk is full, perhaps
            getattr(self, what)(shared)

    def fault(self, store: FileStore, contexts: contextlib.ExitStack) -> None:
        call: Any = self.rng.choice(("read", "write", "open", "allocate"))
        code = self.rng.choice((errno.EIO, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EACCES))
        nth, every = self.rng.randint(1, 5), self.rng.randint(1, 6)
        contexts.enter_context(testing.file_fault(store, call, "fail", nth=nth, every=every, code=code))

    def fault_at_open(self, contexts: contextlib.ExitStack) -> None:
        code = self.rng.choice((errno.EIO, errno.EROFS, errno.ENOSPC, errno.EDQUOT))
        nth, every = self.rng.randint(1, 3), self.rng.choice((0, 1))
        contexts.enter_context(testing.file_fault(None, "write", "fail", nth=nth, every=every, code=code))

    def turn(self) -> None:
        shared = self.rng.random() < 0.4
        beside = ("fill", "drain", "truncate", "remove_segment", "cut_notices", "remove", "replace")
        before = self.rng.choice((*beside, "remount", "fault_at_open", "descriptors", "none", "none"))
        during = self.rng.choice((*beside, "fault", "none", "none"))
        if self.disk.kind in ("btrfs", "quota") and self.full and before != "drain" and self.rng.random() < 0.7:
            before = "drain"
        self.counts[before] += 1
        if hasattr(self, before) and before != "fault_at_open":
            self.act(before, shared)
        with contextlib.ExitStack() as contexts:
            if before == "fault_at_open":
                self.fault_at_open(contexts)
            store = self.open(shared, 64 if before == "descriptors" else None)
        if store is None:
            return
        with store, contextlib.ExitStack() as contexts:
            self.load(store, shared)
            self.store(store, shared)
            self.counts[during] += 1
            if during == "fault":
                self.fault(store, contexts)
            elif hasattr(self, during):
                self.act(during, shared)
            for _ in range(2):
                self.load(store, shared)
                self.store(store, shared)
            self.counts["read-only"] += store.info["readonly"]
        if during in ("remove", "replace"):
            self.sure[shared].clear()


def lost_device(place: Path, rng: random.Random, counts: Counter[str], wrong: list[str]) -> None:
    """ext4 on a device whose second half cannot be read any more: EIO by the kernel, with both engines."""
    with disk("ext4", place) as made:
        life = Life(made, rng, counts, wrong)
        for _ in range(3):
            store = life.open(False)
            if store is not None:
                with store:
                    life.store(store, False)
                    life.load(store, False)
        store = life.open(False)
        assert store is not None
        with store:
            made.cut()
            for _ in range(10):
                life.load(store, False)
                life.store(store, False)
            counts["lost device"] += 1
            made.uncut()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--openings", type=int, default=3000)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--least", type=int, default=100, help="how often each action is tried at least")
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    logging.getLogger("kvswap").setLevel(logging.ERROR)
    rng, counts, wrong = random.Random(options.seed), Counter[str](), list[str]()
    print(f"seed {options.seed}", flush=True)
    kinds = options.kinds.split(",")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        for number, kind in enumerate(kinds):
            share = options.openings * (number + 1) // len(kinds)
            with disk(kind, Path(place, f"{number}")) as made:
                life = Life(made, rng, counts, wrong)
                while counts["openings"] < share:
                    life.turn()
                if life.readonly:
                    life.remount(False)
            print(f"{kind}: {counts['openings']} openings, {time.monotonic() - begin:.0f} s", flush=True)
        if "ext4" in kinds:
            for number in range(max(1, options.least // 20)):
                lost_device(Path(place, f"lost-{number}"), rng, counts, wrong)
    actions = ("fill", "drain", "truncate", "remove_segment", "cut_notices", "remove", "replace", "remount")
    rare = {
        what: counts[what]
        for what in (*actions, "fault_at_open", "descriptors", "fault")
        if counts[what] < options.least
    }
    print(f"seed {options.seed}: {dict(sorted(counts.items()))}; {len(wrong)} wrong; too rare: {rare}")
    return 1 if wrong or rare else 0


if __name__ == "__main__":
    sys.exit(main())
