"""Random operations over the whole public API against a model in NumPy: the program in tests/random/differential. Each
test takes ``--long-seconds`` (1 by default). By hand, for a million operations:

    python3 tests/random/differential --operations 1000000
    python3 tests/random/differential --device cuda:0 --operations 100000

A failure names its seed and round, and the command that repeats it; ``--long-seed N`` begins with seed N.
"""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import ast
import inspect
import itertools
import logging
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE, ROOT, bindings
from differential import public
from differential.frame import CELL, OPERATIONS, Area, Difference, Totals, World, bits, in_runs
from differential.program import Failed, describe, run
from differential.soak import Samples

import kvswap
from kvswap import testing

pytestmark = pytest.mark.slow


def program(*options: str) -> subprocess.CompletedProcess[str]:
    package = Path(kvswap.__file__).resolve().parent.parent
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "tests/random/differential"), *options],
        cwd=ROOT / "tests",
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE,
        check=False,
    )


def test_the_whole_api(
    request: pytest.FixtureRequest, device: kvswap.Device, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own: it forks and interrupts itself."""
    if request.config.getoption("--serial"):
        pytest.skip("--serial: a stream that is held up would never go on")
    seed, seconds = int(request.config.getoption("--long-seed")), float(request.config.getoption("--long-seconds"))
    done = program("--seed", str(seed), "--seconds", str(seconds), "--device", device.name)
    assert done.returncode == 0, done.stdout + done.stderr
    with capsys.disabled():
        print("\n" + done.stdout.splitlines()[1], end=" ")


def test_every_public_name_is_called_or_left_out_with_a_reason() -> None:
    names, called, left_out = public.public_names(), public.called_names(), set(public.LEFT_OUT)
    assert names - called - left_out == set(), "public, but the program does not call it"
    assert called - names == set(), "no longer public, but operations name it"
    assert left_out - names == set(), "no longer public, but left out"
    assert called & left_out == set(), "called, and left out"
    assert public.public_modules() - set(public.MODULES) == set(public.MODULES_LEFT_OUT)


@lru_cache
def used_in(module: str) -> set[str]:
    """Names that stand in the module's code; not those in texts."""
    nodes = list(ast.walk(ast.parse(inspect.getsource(sys.modules[module]))))
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {node.id for node in nodes if isinstance(node, ast.Name)}
    return used | {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_operations_call_what_they_say() -> None:
    """Each name stands in the code of its operation's file, or in the frame's."""
    missing = [
        name
        for entry in OPERATIONS.values()
        for name in entry.calls
        if name.split(".")[-1] not in used_in(entry.do.__module__) | used_in("differential.frame")
    ]
    assert missing == []


@pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")
def test_a_round_is_the_same_again() -> None:
    """Seed and round decide what is done."""
    first, second = (program("--seed", "5", "--round", "3").stdout.splitlines() for _ in range(2))
    assert first[2] == second[2] and "swap" in first[2]


# -- the program can fail ---------------------------------------------------------------------------------------------


DEVICES = (kvswap.Device(f"host:{number}") for number in itertools.count(10))


@pytest.fixture
def own() -> Iterator[kvswap.Device]:
    """A device that no other test uses: the faults are its own, and what a round that fails leaves held stays there."""
    level = logging.getLogger("kvswap").level
    yield next(DEVICES)
    logging.getLogger("kvswap").setLevel(level)


def fails(device: kvswap.Device) -> None:
    """Sooner or later: whether a wait that is left out does harm depends on the threads' timing."""
    with pytest.raises(Failed, match=r"wrong|differs|loaded with other bytes"):
        run(device, 1, seconds=200)


@pytest.mark.parametrize(("kind", "action"), [("copy", "skip"), ("code", "spoil")])
def test_a_skipped_copy_or_a_wrong_code_is_found(
    own: kvswap.Device, kind: Any, action: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = World.__init__

    def faulty(self: World, *args: Any, **options: Any) -> None:
        whole(self, *args, **options)
        bindings.set_fault(self.device, kind, action, nth=40, every=40)
        self.fault = lambda: None

    monkeypatch.setattr(World, "__init__", faulty)
    try:
        fails(own)
    finally:
        bindings.set_fault(own, kind, "none")


@pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")
@pytest.mark.parametrize("kind", ["raw", "war", "waw"])
def test_a_missing_wait_between_pools_is_found(own: kvswap.Device, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = World.__init__

    def without(self: World, *args: Any, **options: Any) -> None:
        whole(self, *args, **options)
        bindings.set_fault(self.device, "hazard", "skip", operation=kind)

    monkeypatch.setattr(World, "__init__", without)
    try:
        fails(own)
    finally:
        bindings.set_fault(own, "hazard", "none")


def test_order_that_the_program_leaves_out_is_found(own: kvswap.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `after` and make_wait() are for: without them bytes differ."""
    monkeypatch.setattr(World, "put", lambda self, use, stream, after: None)
    fails(own)


def test_a_lost_block_that_is_not_told_of_is_found(own: kvswap.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that does not hear of failed blocks differs."""
    monkeypatch.setattr(Area, "forget", lambda self, where: None)
    fails(own)


def test_cells_cover_their_bytes() -> None:
    assert bits([0, CELL * 3 + 5], [1, CELL * 4 + 1], CELL * 8) == 0b11001
    assert bits([CELL], [2 * CELL], CELL * 8) == 0b10


def test_runs_are_ids_without_twins() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        lengths = [rng.randint(1, 5) for _ in range(rng.randint(1, 6))]
        blocks = sum(lengths) + rng.randint(0, 4)
        ids = in_runs(rng, blocks, lengths).tolist()
        assert len(set(ids)) == sum(lengths) and min(ids) >= 0 and max(ids) < blocks
        assert ids[: lengths[0]] == list(range(ids[0], ids[0] + lengths[0]))


# -- soak -------------------------------------------------------------------------------------------------------------


def soaked(values: Callable[[int], float]) -> tuple[str, bool]:
    samples = Samples(testing.deterministic_device(1), 0.0)
    for i in range(40):
        samples.times.append(60.0 * i)
        samples.taken.setdefault("RSS, MiB", []).append(values(i))
        samples.taken.setdefault("descriptors", []).append(20.0)
    return samples.verdict()


def test_soak_says_what_grows() -> None:
    assert soaked(lambda i: 100.0 + i % 3)[1]
    assert soaked(lambda i: 50.0 + 5.0 * min(i, 9))[1], "the warm-up does not count"
    text, flat = soaked(lambda i: 100.0 + i)
    assert not flat and "RSS, MiB" in text and "GROWS" in text and text.count("flat") == 1
    assert not Samples(testing.deterministic_device(1), 0.0).verdict()[1], "nothing was seen"


def test_soak_samples() -> None:
    samples = Samples(testing.deterministic_device(1), 0.0)
    samples.tick(Totals())
    assert samples.taken["RSS, MiB"][0] > 1 and samples.taken["descriptors"][0] > 2 and samples.taken["threads"][0] >= 1


def test_the_description() -> None:
    totals = Totals(operations=5, rounds=1)
    totals.by_name["swap"] = 5
    assert textwrap.dedent(describe(totals, 7, 1.0)).startswith("seed 7: 5 operations") and issubclass(
        Difference, AssertionError
    )
