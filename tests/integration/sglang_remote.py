#!/usr/bin/env python3
"""A real SGLang with kvswap's remote storage: two engines, a process each, over Mooncake's own master and nodes.

    python tests/integration/sglang_remote.py SOURCE

SOURCE: as for sglang_package.py, whose engine this is. The first engine computes prompts and stores their pages; the
second one, with nothing of its own, loads all of them while the first one runs, and every byte is checked. Then the
first one clears: the second finds nothing.
"""

# ruff: noqa: E402  (the folders come first)
# mypy: ignore-errors

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import sglang_package as package

PROMPTS, PAGES = 4, 12


def engine(number: int, source: str, address: str, meet: Any) -> None:
    options = SimpleNamespace(source=source, copies=False, ranks=1, mla=False, swa=False, tokens=2048)
    options.layout = "page_first_direct"
    package.start(options, 0, package.free_port())
    from sglang_engine import Engine

    extra = {"class_name": "RemoteStorage", "master": address, "directory": None, "capacity": None}
    made = Engine(options, 0, Path(), **extra)
    prompts = [package.prompt(seed, PAGES) for seed in range(PROMPTS)]
    whole = len(prompts[0])
    if number == 0:
        assert [made.serve(tokens) for tokens in prompts] == [(0, 0)] * PROMPTS
        made.settle()
    meet.wait()
    if number == 1:
        assert [made.serve(tokens) for tokens in prompts] == [(whole, whole)] * PROMPTS
        print(f"{made.checked} rows of tokens checked: {PROMPTS} prompts of {whole} tokens came from the nodes")
    meet.wait()
    if number == 0:
        made.storage.clear()
    meet.wait()
    time.sleep(1.0)
    if number == 1:
        assert made.again(prompts[0]) == 0
        print("after the other engine's clear nothing is found")
    meet.wait()
    made.close()


def main() -> int:
    from mooncake_nodes import Cluster

    own = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
        meet = own.Barrier(2)
        both = [own.Process(target=engine, args=(i, sys.argv[1], cluster.address, meet)) for i in range(2)]
        for each in both:
            each.start()
        while any(each.is_alive() for each in both):
            for each in both:
                each.join(0.2)
            if any(each.exitcode for each in both):
                meet.abort()
    return max(abs(each.exitcode or 0) for each in both)


if __name__ == "__main__":
    sys.exit(main())
