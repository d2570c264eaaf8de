"""kill -9 at random points of a process that stores, replaces and deletes blocks, and what is there afterwards.

    python kill_files.py FOLDER SEED POINTS SECONDS

An odd SEED spreads the store over two directories. Ends after POINTS or SECONDS, but not before 20 points, however slow
the machine is. Prints what it found as JSON; exit status 1: something was wrong. This process opens no store itself:
who writes and who looks are forked, so that thousands of points cost no start of Python.
"""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import sys
import time
from contextlib import suppress
from typing import Any

import numpy as np

import kvswap
from kvswap.files import FileStore, Layout

KEYS, NBYTES, SLOTS = 48, 20000, 160
RECORD = struct.Struct("<cII")  # what, key, version
SLOT = 4096 + -(-NBYTES // 4096) * 4096
PATIENCE = 30.0
LEAST = 20  # points


def key_of(number: int) -> bytes:
    return b"key-%d" % number


def block_of(number: int, version: int) -> Any:
    block = np.full(NBYTES, (number * 7 + version * 13) % 251, np.uint8)
    block[: RECORD.size] = np.frombuffer(RECORD.pack(b"b", number, version), np.uint8)
    block[-RECORD.size :] = block[: RECORD.size]
    return block


def version_of(block: Any, number: int) -> int | None:
    """None: these are no bytes that were ever stored under the key."""
    what, key, version = RECORD.unpack(block[: RECORD.size].tobytes())
    good = what == b"b" and key == number and np.array_equal(block, block_of(number, version))
    return version if good else None


def open_store(folder: str, options: dict[str, Any]) -> FileStore:
    options = dict(options)
    capacity = SLOTS // 16 * (4096 + 16 * SLOT)
    folders = [f"{folder}/0", f"{folder}/1"] if options.pop("disks") == 2 else folder
    return FileStore(folders, Layout(NBYTES), capacity=capacity, segment_nbytes=4096 + 16 * SLOT, **options)


def write(folder: str, options: dict[str, Any], seed: int, first: int, log: int) -> None:
    """Until killed. Each record is in the pipe before what it tells of is done; acknowledgements come after."""
    rng = random.Random(seed)
    store, version = open_store(folder, options), first
    os.write(log, RECORD.pack(b"o", 0, 0))
    while True:
        numbers = rng.sample(range(KEYS), rng.choice((1, 1, 2, 8)))
        version += 1
        if rng.random() < 0.25:
            os.write(log, b"".join(RECORD.pack(b"d", number, version) for number in numbers))
            transfer = store.delete([key_of(number) for number in numbers])
        else:
            os.write(log, b"".join(RECORD.pack(b"s", number, version) for number in numbers))
            blocks = [block_of(number, version) for number in numbers]
            transfer = store.store([key_of(number) for number in numbers], blocks)
        if rng.random() < 0.1:
            continue  # unacknowledged, beside the next
        transfer.wait(PATIENCE)
        os.write(log, b"".join(RECORD.pack(b"a", number, version) for number in numbers))


def look(folder: str, options: dict[str, Any], found: int) -> None:
    """The version of each key, 0: not there, 1: wrong bytes or an error."""
    with open_store(folder, options) as store:
        blocks = [np.zeros(NBYTES, np.uint8) for _ in range(KEYS)]
        load = store.load([key_of(number) for number in range(KEYS)], blocks)
        with suppress(kvswap.Error):
            load.wait(PATIENCE)
        reasons = load.reasons
        for number, block in enumerate(blocks):
            version = version_of(block, number) or 1
            if number in reasons:
                version = 0 if "not in the store" in str(reasons[number]) else 1
            os.write(found, RECORD.pack(b"f", number, version))


def in_a_child(call: Any, *arguments: Any) -> tuple[int, int]:
    """Its process, and where to read what it tells."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        try:
            call(*arguments, writer)
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(3)
    os.close(writer)
    return child, reader


def read_all(reader: int, limit: float) -> list[tuple[bytes, int, int]]:
    data, end = b"", time.monotonic() + limit
    while time.monotonic() < end:
        part = os.read(reader, 1 << 16)
        if not part:
            break
        data += part
    os.close(reader)
    return [RECORD.unpack_from(data, at) for at in range(0, len(data) - RECORD.size + 1, RECORD.size)]


def allow(allowed: dict[int, set[int]], records: list[tuple[bytes, int, int]]) -> int:
    """What each key may hold after these records; returns the last version."""
    pending: dict[int, list[int]] = {}
    last = 1
    for what, number, version in records:
        last = max(last, version)
        if what in (b"s", b"d"):
            outcome = version if what == b"s" else 0
            pending.setdefault(number, []).append(version)
            outcomes[version, number] = outcome
            allowed[number].add(outcome)
        elif what == b"a":  # this call and all before it on the key have had their effect, in order
            later = [v for v in pending.get(number, []) if v > version]
            allowed[number] = {outcomes[version, number], *(outcomes[v, number] for v in later)}
            pending[number] = later
    return last


outcomes: dict[tuple[int, int], int] = {}


def one_point(
    folder: str, rng: random.Random, first: int, allowed: dict[int, set[int]], buffered: bool, disks: int
) -> tuple[int, list[str]]:
    options = {
        "engine": rng.choice(("threads", "auto")),
        "durability": rng.choice(("none", "none", "flush", "fsync")),
        "disks": disks,
        "buffered": buffered,  # always or never: mixing them, the kernel reports EIO for pages it cannot drop
    }
    child, reader = in_a_child(write, folder, options, rng.getrandbits(32), first)
    delay = rng.choice((0.003, 0.02, 0.1)) * rng.random()
    if rng.random() < 0.9:
        os.set_blocking(reader, True)
        head = os.read(reader, RECORD.size)  # it is open; else it may be killed while it opens
    else:
        head = b""
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        return first, [f"the writer ended by itself, with {os.WEXITSTATUS(status)} ({options})"]
    last = max(first, allow(allowed, [r for r in read_all(reader, PATIENCE) if head or r[0] != b"o"]))
    looker, reader = in_a_child(look, folder, options)
    found = {number: version for _, number, version in read_all(reader, PATIENCE)}
    if os.waitpid(looker, 0)[1] or len(found) != KEYS:
        return last, [f"it could not be looked at ({options})"]
    wrong = [
        f"key {number} holds version {version}, may be {sorted(allowed[number])} (0: none, 1: wrong; {options})"
        for number, version in found.items()
        if version not in allowed[number]
    ]
    for number, version in found.items():
        allowed[number] = {version}
    return last, wrong


def main(folder: str, seed: int, points: int, seconds: float) -> int:
    rng, begin = random.Random(seed), time.monotonic()
    os.makedirs(folder, 0o700, exist_ok=True)
    allowed: dict[int, set[int]] = {number: {0} for number in range(KEYS)}
    version, done, wrong = 1, 0, []
    while done < points and (done < LEAST or time.monotonic() - begin < seconds) and not wrong:
        version, wrong = one_point(folder, rng, version, allowed, seed % 3 == 0, 1 + seed % 2)
        done += 1
    there = sum(next(iter(versions)) > 1 for versions in allowed.values())
    report = {"points": done, "seed": seed, "calls": version, "there": there, "wrong": wrong}
    print(json.dumps(report | {"seconds": round(time.monotonic() - begin, 1)}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
