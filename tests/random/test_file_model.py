"""Long runs of the file tier, seeded. Each takes ``--long-seconds`` (1 by default); by hand, whole:

    pytest tests/random/test_file_model.py --long-seconds 600 --long-seed 1 -s

The model: random calls on a store, several under way, with injected short reads and writes, interruptions, failures,
delays, and restarts; what a load delivers must be one of the versions that the calls allow. Kill -9 at random points.
"""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, ROOT

import kvswap
from kvswap import testing
from kvswap.files import FileStore, FileTransfer, Layout

pytestmark = pytest.mark.slow

MISSING = 0


class Model:
    """A store and, for each key, which versions it may hold (MISSING: it may not be there)."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.roomy = self.rng.random() < 0.5  # nothing is ever evicted: then nothing may be missing either
        self.keys = 60
        self.nbytes = self.rng.choice((64, 4096, 5000))
        slot = 4096 + -(-self.nbytes // 4096) * 4096
        slots = 3 * self.keys if self.roomy else self.rng.choice((4, 16, 40))
        self.segment = 4096 + min(slots, 12) * slot
        self.capacity = max(1, slots // 12) * self.segment
        self.folder = folder
        self.version = 0
        self.buffered = self.rng.random() < 0.5
        self.allowed: list[set[int]] = [{MISSING} for _ in range(self.keys)]
        self.ever: list[set[int]] = [{MISSING} for _ in range(self.keys)]
        self.hidden = False  # not all could be read at the last open
        self.fresh: set[int] = set()  # keys that were stored since, and not deleted
        self.under_way: list[tuple[FileTransfer, list[int], list[int], list[Any]]] = []
        self.counts: Counter[str] = Counter()
        self.store = self.open()

    def open(self) -> FileStore:
        return FileStore(
            self.folder,
            Layout(self.nbytes),
            capacity=self.capacity,
            segment_nbytes=self.segment,
            engine=self.rng.choice(("threads", "auto")),
            depth=self.rng.choice((1, 4, 16)),
            buffered=self.buffered,
        )

    def block(self, number: int, version: int) -> Any:
        words = np.arange(-(-self.nbytes // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return (words + np.uint64(number * 1000003 + version * 7919)).view(np.uint8)[: self.nbytes].copy()

    def call(self) -> None:
        """Submit one call; its effect on the model is noted when it has ended."""
        count = self.rng.choice((1, 3, 8, 30))
        numbers = self.rng.sample(range(self.keys), count)
        keys = [b"%d" % number for number in numbers]
        what = self.rng.choice(("store", "store", "load", "load", "load", "delete"))
        if what == "store":
            self.version += 1
            blocks = [self.block(number, self.version) for number in numbers]
            transfer = self.store.store(keys, blocks)
        elif what == "load":
            blocks = [np.zeros(self.nbytes, np.uint8) for _ in numbers]
            transfer = self.store.load(keys, blocks)
        else:
            blocks = []
            transfer = self.store.delete(keys)
        self.under_way.append((transfer, numbers, [self.version] * count, blocks))
        self.counts[what] += count

    def settle(self) -> None:
        """Calls on one key have their effect in the order in which they were made: so does the model."""
        last_unread: dict[
            int, int
        ] = {}  # a block that could not be read is not there any more, for loads beside that one
        for at, (transfer, numbers, _, _) in enumerate(self.under_way):
            with suppress(kvswap.Error):
                transfer.wait(PATIENCE)
            unread = [numbers[position] for position, reason in transfer.reasons.items() if "errno" in str(reason)]
            last_unread |= dict.fromkeys(unread if transfer.what == "load" else (), at)
        for at, (transfer, numbers, versions, blocks) in enumerate(self.under_way):
            reasons = transfer.reasons
            self.counts["failed"] += len(reasons)
            for position, number in enumerate(numbers):
                reason = str(reasons.get(position, ""))
                assert "damaged" not in reason, reason
                if transfer.what == "store" and not reason and at > last_unread.get(number, at):
                    del last_unread[number]
                if number in last_unread:
                    self.allowed[number] = self.allowed[number] | {MISSING}
                self.note(transfer.what, number, versions[position], reason, blocks[position] if blocks else None)
                if number in last_unread:
                    self.allowed[number] = self.allowed[number] | {MISSING}
        self.under_way.clear()

    def note(self, what: str, number: int, version: int, reason: str, block: Any) -> None:
        allowed = self.allowed[number]
        if not self.roomy or self.store.stats()["evicted"]:  # slots that cannot be erased make it less roomy
            allowed.add(MISSING)
        if what == "store":
            self.ever[number].add(version)
        if what != "load":
            (self.fresh.add if what == "store" and not reason else self.fresh.discard)(number)
        if what == "store":  # one that failed may have cost the older block, where that was in its way
            allowed = allowed | {MISSING} if reason else {version}
        elif what == "delete":
            allowed = allowed if reason else {MISSING}
        elif not reason:
            allowed = {v for v in allowed if v != MISSING and np.array_equal(block, self.block(number, v))}
            told = [v for v in range(self.version + 1) if np.array_equal(block, self.block(number, v))]
            assert allowed, f"key {number}: loaded version {told}, may be {sorted(self.allowed[number])} (0: none)"
        elif "not in the store" in reason:
            assert MISSING in allowed, f"key {number} is not there, but must hold {sorted(allowed)}"
            # what was evicted, not deleted, may come back at a restart: if its slot could not be written after all
        self.allowed[number] = allowed

    def faults(self) -> ExitStack:
        stack = ExitStack()
        for call in ("read", "write"):
            action = self.rng.choice(("none", "short", "interrupt", "fail", "delay"))
            if action != "none":
                fault: Any = {"every": self.rng.randint(3, 40), "code": self.rng.choice((errno.ENOSPC, errno.EIO))}
                stack.enter_context(testing.file_fault(self.store, call, action, delay=0.0005, **fault))
        if not self.roomy and self.rng.random() < 0.3:
            stack.enter_context(testing.file_fault(self.store, "allocate", "fail", every=2, code=errno.ENOSPC))
        return stack

    def reopen(self) -> None:
        """Perhaps with reads that fail. What could not be read is not there, may be there again later, and never in
        place of what was stored since."""
        were_hidden = self.hidden
        with ExitStack() as stack:
            if self.rng.random() < 0.4:
                action: Any = self.rng.choice(("fail", "fail", "short", "interrupt"))
                nth, every = self.rng.randint(1, 80), self.rng.randint(2, 60)
                stack.enter_context(testing.file_fault(None, "read", action, nth=nth, every=every, code=errno.EIO))
            try:
                self.store = self.open()
                opened = True
            except kvswap.Error as error:
                assert "Input/output error" in str(error), error
                opened = False
        if not opened:
            self.store = self.open()
        stats = self.store.stats()
        self.hidden = stats["lost_slots"] + stats["foreign"] > 0
        self.counts["hidden"] += self.hidden
        for number, allowed in enumerate(self.allowed):
            if self.hidden or (were_hidden and not (self.roomy and number in self.fresh)):  # fresh ones may be evicted
                self.allowed[number] = allowed | self.ever[number] | {MISSING}
        self.fresh.clear()

    def round(self) -> None:
        with self.faults():
            for _ in range(self.rng.randint(1, 30)):
                self.call()
                if self.rng.random() < 0.1:
                    self.settle()
            self.settle()
        if self.rng.random() < 0.2:
            self.counts["restarts"] += 1
            self.roomy &= self.store.stats()["evicted"] == 0
            self.store.close()
            self.reopen()
            for number, allowed in enumerate(self.allowed):
                there = self.store.contains([b"%d" % number])[0]
                assert there or MISSING in allowed or not self.roomy, f"key {number} is gone after a restart"
                assert not there or allowed != {MISSING}, f"key {number} is back after a restart"


def test_the_model(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A million operations take some minutes: --long-seconds 600."""
    begin, limit = time.monotonic(), float(request.config.getoption("--long-seconds"))
    seed = first = int(request.config.getoption("--long-seed"))
    counts: Counter[str] = Counter()
    while seed == first or time.monotonic() - begin < limit:
        model = Model(tmp_path / f"{seed}", seed)
        try:
            for _ in range(40):
                model.round()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        model.store.close()
        counts += model.counts
        seed += 1
    operations = sum(counts[what] for what in ("store", "load", "delete"))
    with capsys.disabled():
        print(f" seeds {first} to {seed - 1}, {operations} operations: {dict(counts)}", end="")


@pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")
def test_kill_9(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """500 points take half a minute: --long-seconds 60."""
    seed, limit = int(request.config.getoption("--long-seed")), float(request.config.getoption("--long-seconds"))
    points = 10**6 if limit > 5 else 60
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/random/kill_files.py"), str(tmp_path / "store")]
    environment = {"PYTHONPATH": str(Path(kvswap.__file__).resolve().parent.parent)}
    run = subprocess.run(
        [*command, str(seed), str(points), str(limit)],
        capture_output=True,
        text=True,
        timeout=limit + 120,
        check=False,
        env={**os.environ, **environment},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(run.stdout)
    assert report["points"] >= 20 and report["there"] > 0 and report["calls"] > report["points"]
    with capsys.disabled():
        print(f" {run.stdout.strip()}", end="")
