"""Memory of another GPU as the other side of a swap: python3 benchmarks/bench_peer.py [--devices A B] [--json FILE].

Blocks of a pool on the one are swapped with blocks of a pool on the other, permuted on both sides, by each path and by
kernels of several widths; beside one plain peer copy of as many bytes, in the same run. GB/s in the device's own time,
medians; every byte is checked, on the device where it lands. Exit status 1: a byte was wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvswap
from kvswap import _C

ROUNDS = 5
WAYS: list[tuple[str, int | None]] = [("auto", None), ("dma", None), *(("kernel", ctas) for ctas in (8, 16, 32, 64))]


class Side:
    """A pool of blocks on one device."""

    def __init__(self, device: kvswap.Device, nbytes: int) -> None:
        self.device, self.memory, self.stream = device, device.alloc(nbytes), kvswap.Stream(device)

    def pattern(self, check: bool, block: int, slots: NDArray[np.int64], keys: NDArray[np.uint64]) -> int:
        """Write it into these blocks, or count the words that are not it."""
        ptrs = np.uint64(self.memory.ptr) + slots.astype(np.uint64) * np.uint64(block)
        sizes = np.full(slots.size, block, np.uint64)
        return _C._pattern(self.device, check, ptrs, sizes, keys, self.stream).result(120)[0]


def plain_copy(dst: Side, src: Side, nbytes: int, runner: Side) -> float:
    """GB/s of one copy by the driver."""
    begin, end = kvswap.Event(runner.device), kvswap.Event(runner.device)
    took = []
    for _ in range(ROUNDS + 1):
        begin.record(runner.stream)
        _C._seam(runner.device, "copy", dst.memory.ptr, src.memory.ptr, nbytes, runner.stream.handle)
        end.record(runner.stream)
        end.synchronize(120)
        took.append(begin.elapsed_time(end))
    return nbytes / statistics.median(took[1:]) / 1e9


def swaps(src: Side, dst: Side, block: int, nbytes: int, path: Any, ctas: int | None) -> dict[str, Any]:
    """Blocks of src to dst, run by the device of src; permuted."""
    count = nbytes // block
    pools = [kvswap.Pool(side.device, side.memory, count, block) for side in (src, dst)]
    rng, took, wrong = np.random.default_rng(block), [], 0
    for turn in range(ROUNDS + 1):
        ids, slots = rng.permutation(count), rng.permutation(count)
        keys = (np.arange(count) + 1000003 * turn + block).astype(np.uint64)
        src.pattern(False, block, ids, keys)
        transfer = kvswap.move_blocks(pools[0], pools[1], ids, slots, path=path, max_ctas=ctas)
        transfer.wait(120)
        wrong += dst.pattern(True, block, slots, keys)
        took.append(transfer.elapsed or 0.0)
    return {
        "gbps": nbytes / statistics.median(took[1:]) / 1e9,
        "took": transfer.path,
        "wrong": wrong,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"])
    parser.add_argument("--nbytes", type=int, default=1 << 30)
    parser.add_argument(
        "--blocks", nargs="*", type=int, default=[16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20, 8 << 20]
    )
    parser.add_argument("--json")
    options = parser.parse_args()
    sides = [Side(kvswap.Device(name), options.nbytes) for name in options.devices]
    results: dict[str, Any] = {"devices": [side.device.info["name"] for side in sides], "rows": []}
    swaps(sides[0], sides[1], 8 << 20, options.nbytes, "dma", None)  # which has peer access enabled: else all is staged
    plain = {"push": plain_copy(sides[1], sides[0], options.nbytes, sides[0])}
    plain["pull"] = plain_copy(sides[0], sides[1], options.nbytes, sides[0])
    results["plain"] = plain
    print(f"{' and '.join(options.devices)}, {options.nbytes >> 20} MiB; one plain copy: ", end="")
    print(", ".join(f"{name} {gbps:.1f} GB/s" for name, gbps in plain.items()))
    for block in options.blocks:
        for path, ctas in WAYS:
            row = {
                "block": block,
                "path": path,
                "max_ctas": ctas,
                **swaps(sides[0], sides[1], block, options.nbytes, path, ctas),
            }
            row["of_plain"] = row["gbps"] / plain["push"]
            results["rows"].append(row)
            print(
                f"{block >> 10:6d} KiB {path:>6} {ctas or '':>3} ({row['took']}): {row['gbps']:6.1f} GB/s, "
                f"{row['of_plain']:.2f} of a plain copy, {row['wrong']} wrong words"
            )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)
    return int(any(row["wrong"] for row in results["rows"]))


if __name__ == "__main__":
    sys.exit(main())
