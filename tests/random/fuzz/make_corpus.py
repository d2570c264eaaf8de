"""Writes the first inputs of fuzz_files.c: a store as kvswap makes it, whole and hurt, and each kind of page.

python tests/random/fuzz/make_corpus.py tests/random/fuzz/corpus
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from kvswap.files import FileStore, Layout

PAGE, SLOT = 4096, 8192
SEGMENT = PAGE + 4 * SLOT


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        with FileStore(place, Layout(100), capacity=4 * SEGMENT, segment_nbytes=SEGMENT, buffered=True) as store:
            data = np.arange(400, dtype=np.uint16).astype(np.uint8).reshape(4, 100)
            store.store([b"a", b"bb", (1, 2)], data, range(3)).wait(10)
            store.store([b"a"], data, [3]).wait(10)
        state = (Path(place) / "store.kvs").read_bytes()[: 3 * PAGE].ljust(3 * PAGE, b"\0")
        segment = (Path(place) / "segment-00000000.kvs").read_bytes()
    whole = state + segment
    for name, first in (("whole", 4), ("right", 6), ("stateless", 2)):
        (folder / name).write_bytes(bytes([first]) + whole)
    (folder / "cut").write_bytes(bytes([4]) + whole[: len(whole) - SLOT - 100])
    odd = {"numbers": 4, "names": 8, "last": 16, "pipe": 32, "last-numbers": 20, "names-numbers": 12}
    for name, how in odd.items():
        (folder / f"odd-{name}").write_bytes(bytes([2 * (how | 3)]) + whole)
        (folder / f"odd-{name}-stateless").write_bytes(bytes([2 * (how | 1)]) + whole)
    for number in range(8):  # each end that a number comes near
        page = bytearray(whole)
        page[4 * PAGE + SLOT + 32], page[PAGE + 24], page[2 * PAGE + 24] = number, number, number
        (folder / f"odd-end-{number}").write_bytes(bytes([2 * 7]) + page)
    twice = bytearray(whole)
    twice[3 * PAGE + PAGE + SLOT : 3 * PAGE + PAGE + 2 * SLOT] = twice[4 * PAGE : 4 * PAGE + SLOT]
    (folder / "twice").write_bytes(bytes([6]) + twice)
    pages = {
        "state": state[:PAGE],
        "check": state[PAGE : 2 * PAGE],
        "segment": segment[:PAGE],
        "block": segment[PAGE : 2 * PAGE],
    }
    for name, page in pages.items():
        (folder / f"page-{name}").write_bytes(bytes([3]) + page)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
