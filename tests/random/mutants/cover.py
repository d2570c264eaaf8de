"""A plugin of pytest: for each test, how long it took and which basic blocks of the extension it reached, in its other
processes too. The extension is built with cover.c. KVSWAP_COVER_DIR: sites.npy there has the blocks' places; what was
reached is written there."""

from __future__ import annotations

import base64
import json
import os
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

NBYTES = 8 << 20
CASES = 3  # of one parametrized test that are run: spread over all
DIR = Path(os.environ["KVSWAP_COVER_DIR"])
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
MAP = DIR / f"{WORKER}.map"
MAP.write_bytes(b"")
os.truncate(MAP, NBYTES)
os.environ["KVSWAP_COVER"] = str(MAP)
SITES = np.load(DIR / "sites.npy")
hits = np.memmap(MAP, np.uint8, "r+")
passed = pytest.StashKey[bool]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    items[:] = [
        item
        for case in cases.values()
        for item in (case if len(case) <= CASES else [case[i * (len(case) - 1) // (CASES - 1)] for i in range(CASES)])
    ]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[passed] = report.passed
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    hits[:] = 0
    begin = time.monotonic()
    result = yield
    if item.stash.get(passed, False):
        reached = base64.b64encode(zlib.compress(np.packbits(hits[SITES]).tobytes())).decode()
        with open(DIR / f"{WORKER}.jsonl", "a") as out:
            row = {"test": item.nodeid, "seconds": time.monotonic() - begin, "hits": reached}
            out.write(json.dumps(row) + "\n")
    return result
