"""kill -9 at random points of writers of a shared directory, beside readers that run on, and what these find.

    python kill_shared.py FOLDER SEED POINTS SECONDS

Two writers store, two readers load. At each point a writer is killed and started again, now and then a reader. Then
both readers must find every block that was acknowledged since the directory was made, with its bytes, within a time
limit. The directory is made anew every 40 points, before it is full. Ends after POINTS or SECONDS, but not before 10
points. Prints what it found as JSON; exit status 1: something was wrong. The processes are forked from one that opens
no store itself.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import struct
import sys
import time
from contextlib import suppress
from typing import Any

import numpy as np

import kvswap
from kvswap.files import FileStore, Layout

NBYTES, SLOTS = 20000, 4096
SLOT = 4096 + -(-NBYTES // 4096) * 4096
RECORD = struct.Struct("<cQ")  # what, key
PATIENCE = 60.0
LEAST, ROUND = 10, 40  # points


def key_of(number: int) -> bytes:
    return b"key-%d" % number


def block_of(number: int) -> Any:
    """A key stands for its bytes."""
    block = np.full(NBYTES, (number * 7) % 251, np.uint8)
    block[:8] = block[-8:] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
    return block


def open_store(folder: str, rng: random.Random) -> FileStore:
    options: dict[str, Any] = {"engine": rng.choice(("threads", "auto")), "durability": rng.choice(("none", "flush"))}
    capacity = SLOTS // 16 * (4096 + 16 * SLOT)
    segment = 4096 + 16 * SLOT
    return FileStore(folder, Layout(NBYTES), capacity=capacity, segment_nbytes=segment, shared=True, **options)


def write(folder: str, seed: int, first: int, log: int) -> None:
    """Until killed; at most as many blocks as fit."""
    rng = random.Random(seed)
    store, number = open_store(folder, rng), first
    os.write(log, RECORD.pack(b"o", 0))
    while number < first + SLOTS // (2 * ROUND):
        numbers = range(number, number + rng.choice((1, 1, 2, 8)))
        number = numbers[-1] + 1
        transfer = store.store([key_of(n) for n in numbers], [block_of(n) for n in numbers], replace=rng.random() < 0.5)
        transfer.wait(PATIENCE)
        os.write(log, b"".join(RECORD.pack(b"a", n) for n in numbers))
    time.sleep(PATIENCE)


def find(store: FileStore, numbers: list[int]) -> list[str]:
    """What is wrong."""
    keys, end = [key_of(n) for n in numbers], time.monotonic() + PATIENCE / 2
    while not all(store.contains(keys)) and time.monotonic() < end:
        time.sleep(0.001)
    blocks = np.zeros((len(numbers), NBYTES), np.uint8)
    load = store.load(keys, blocks, range(len(keys)))
    with suppress(kvswap.Error):
        load.wait(PATIENCE)
    wrong = [f"key {numbers[i]}: {reason}" for i, reason in load.reasons.items()]
    failed = set(load.failed_positions.tolist())
    return wrong + [
        f"key {n}: wrong bytes"
        for i, n in enumerate(numbers)
        if i not in failed and not np.array_equal(blocks[i], block_of(n))
    ]


def read(folder: str, seed: int, orders: int, log: int) -> None:
    """Answers each line of numbers with a line of what is wrong."""
    store = open_store(folder, random.Random(seed))
    with os.fdopen(orders) as lines, os.fdopen(log, "w") as answers:
        for line in lines:
            answers.write(json.dumps(find(store, json.loads(line))) + "\n")
            answers.flush()


class Child:
    def __init__(self, call: Any, *arguments: Any) -> None:
        self.orders, self.log = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
        self.process = os.fork()
        if self.process == 0:
            try:
                os.close(self.orders[1])
                os.close(self.log[0])
                call(*arguments, *((self.orders[0],) if call is read else ()), self.log[1])
                os._exit(0)
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
                os._exit(3)
        os.close(self.orders[0])
        os.close(self.log[1])
        self.answers = os.fdopen(self.log[0], "rb")

    def kill(self) -> bytes:
        """All that it still told."""
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self.orders[1])
        with self.answers:
            return self.answers.read()

    def ask(self, numbers: list[int]) -> list[str]:
        os.write(self.orders[1], (json.dumps(numbers) + "\n").encode())
        answer = self.answers.readline()
        return json.loads(answer) if answer else ["a reader ended by itself"]


class Round:
    """A new directory, until it could be full."""

    def __init__(self, folder: str, rng: random.Random) -> None:
        self.folder, self.rng, self.next = folder, rng, 0
        self.acknowledged: list[int] = []
        self.writers = [self.writer() for _ in range(2)]
        self.readers = [self.reader() for _ in range(2)]

    def writer(self) -> Child:
        self.next += SLOTS
        return Child(write, self.folder, self.rng.getrandbits(32), self.next)

    def reader(self) -> Child:
        return Child(read, self.folder, self.rng.getrandbits(32))

    def point(self) -> list[str]:
        which = self.rng.randrange(2)
        writer = self.writers[which]
        head = writer.answers.read(RECORD.size) if self.rng.random() < 0.9 else b""  # it is open
        time.sleep(self.rng.choice((0.003, 0.02, 0.1)) * self.rng.random())
        data = head + writer.kill()
        told = [RECORD.unpack_from(data, at) for at in range(0, len(data) - RECORD.size + 1, RECORD.size)]
        self.acknowledged += [number for what, number in told if what == b"a"]
        self.writers[which] = self.writer()
        if self.rng.random() < 0.2:
            self.readers[which].kill()
            self.readers[which] = self.reader()
        recent = self.acknowledged[-200:]
        some = recent + self.rng.sample(self.acknowledged[:-200], min(50, max(0, len(self.acknowledged) - 200)))
        return [text for reader in self.readers for text in reader.ask(some)]

    def end(self) -> None:
        for child in self.writers + self.readers:
            child.kill()


def main(folder: str, seed: int, points: int, seconds: float) -> int:
    rng, begin = random.Random(seed), time.monotonic()
    done, blocks = 0, 0
    wrong: list[str] = []
    while done < points and (done < LEAST or time.monotonic() - begin < seconds) and not wrong:
        one = Round(folder, rng)
        for _ in range(ROUND):
            wrong = one.point()
            done += 1
            if wrong or done >= points or (done >= LEAST and time.monotonic() - begin > seconds):
                break
        blocks += len(one.acknowledged)
        one.end()
        if not wrong:
            shutil.rmtree(folder)
    report = {"points": done, "seed": seed, "acknowledged": blocks, "wrong": wrong[:20]}
    print(json.dumps(report | {"seconds": round(time.monotonic() - begin, 1)}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
