"""How long host memory takes to come up: host pools, with pages of the usual size and of 2 MiB, beside one allocation
by the driver (cudaHostAlloc on a GPU), all of the same size in one run. Then every path copies blocks to and from each
pool, to every chunk of it, the first and the last block of each among them. The ends of every block are checked where
they lie in the pool, and every byte where it came back.

On a GPU: --size 64GiB. On the host device: --device host:0 --size 256MiB. Exit status 1: wrong bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

import kvswap
from kvswap import _C, _testing
from kvswap.memory import HostPool
from kvswap.replay.progress import Progress
from kvswap.replay.units import format_size, parse_size
from kvswap.typing import Path

LAYERS, LAYER_NBYTES = 32, 64 << 10
BLOCK_NBYTES = LAYERS * LAYER_NBYTES
PATHS: tuple[Path, ...] = get_args(Path)
LIMIT = 120.0  # seconds until a copy counts as lost


class Layers:
    """As many blocks in memory of the device, layer-first in one slab, that are written and checked there."""

    def __init__(self, device: kvswap.Device, num_blocks: int) -> None:
        self.device, self.num_blocks = device, num_blocks
        self.memory = device.alloc(num_blocks * BLOCK_NBYTES)
        self.ptrs = self.memory.ptr + np.arange(LAYERS, dtype=np.uint64) * np.uint64(num_blocks * LAYER_NBYTES)
        self._stream = kvswap.Stream(device)

    def keys(self, seed: int) -> NDArray[np.uint64]:
        """What a block holds follows from its key: of its number, layer and seed. Shape (layers, blocks)."""
        ids = np.arange(self.num_blocks, dtype=np.uint64)
        layers = np.arange(LAYERS, dtype=np.uint64)[:, None]
        keys: NDArray[np.uint64] = np.uint64(seed << 40) + layers * np.uint64(1 << 20) + ids
        return keys

    def pattern(self, check: bool, seed: int) -> int:
        """Write, or check and count the wrong bytes."""
        ids = np.arange(self.num_blocks, dtype=np.uint64)
        where = (self.ptrs[:, None] + ids * np.uint64(LAYER_NBYTES)).ravel()
        sizes, keys = np.full(where.size, LAYER_NBYTES, np.uint64), self.keys(seed).ravel()
        job = _C._pattern(self.device, check, where, sizes, keys, self._stream)
        return job.result(LIMIT)[0]


def choose(pool: HostPool, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Blocks of every chunk: its first and last, and others at random; in random order."""
    edges = np.linspace(0, pool.num_blocks, pool.chunks + 1).astype(np.int64)
    ends = np.unique(np.clip(np.concatenate([edges, edges - 1]), 0, pool.num_blocks - 1))
    rest = rng.permutation(np.setdiff1d(np.arange(pool.num_blocks), ends))[: max(0, count - ends.size)]
    return rng.permutation(np.concatenate([ends, rest]))[:count]


def wrong_in_pool(pool: HostPool, slots: NDArray[np.int64], keys: NDArray[np.uint64]) -> int:
    """Bytes that differ in the first and the last word of every block's part in every layer."""
    wrong = 0
    for layer in range(LAYERS):
        there = pool.layer(layer)[slots].view(np.uint64)
        for word in (0, there.shape[1] - 1):
            expected = np.array([_testing.pattern_word(int(key), word) for key in keys[layer, : slots.size]], np.uint64)
            wrong += 8 * int((there[:, word] != expected).sum())
    return wrong


def verify(device: kvswap.Device, pool: HostPool, gpu: Layers, seed: int) -> list[dict[str, Any]]:
    """Every path, both ways."""
    rng, rows = np.random.default_rng(seed), []
    ids = np.arange(gpu.num_blocks)
    for number, path in enumerate(PATHS):
        if path == "direct" and device.kind != "host":
            continue
        slots = choose(pool, gpu.num_blocks, rng)
        common = (gpu.ptrs, pool.layer_ptrs(), LAYER_NBYTES, gpu.num_blocks, pool.num_blocks, ids[: slots.size], slots)
        row: dict[str, Any] = {"path": path, "blocks": int(slots.size), "wrong_bytes": 0}
        for direction in kvswap.Direction:
            if direction is kvswap.Direction.D2H:
                gpu.pattern(False, seed + number)
            else:
                gpu.pattern(False, 999)  # what must not be there afterwards
            transfer = kvswap.swap_cache_all_layers_async(
                *common, direction, cpu_stride=pool.layer_stride, device=device, path=path
            )
            transfer.wait(LIMIT)
            seconds = transfer.elapsed
            row[direction.name] = {
                "took": transfer.path,
                "gbps": round(transfer.nbytes / seconds / 1e9, 2) if seconds else None,
            }
            if direction is kvswap.Direction.D2H:
                row["wrong_bytes"] += wrong_in_pool(pool, slots, gpu.keys(seed + number))
        row["wrong_bytes"] += gpu.pattern(True, seed + number)
        rows.append(row)
    return rows


def timed(what: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = what()
    return round(time.perf_counter() - begin, 3), result


def by_driver(device: kvswap.Device, nbytes: int) -> dict[str, Any]:
    seconds, memory = timed(lambda: device.alloc(nbytes, host=True))
    if device.kind == "host":  # there it is only mapped: make it as ready as a GPU's driver does
        touched, _ = timed(lambda: np.frombuffer(memory, np.uint8)[::4096].fill(0))
        seconds += touched
    freed, _ = timed(memory.free)
    return {"method": "driver", "seconds": round(seconds, 3), "free_seconds": freed}


def by_pool(device: kvswap.Device, arguments: argparse.Namespace, pages: Any) -> dict[str, Any]:
    progress = Progress(sys.stderr)
    begin = time.perf_counter()
    pool = HostPool(
        arguments.nbytes // BLOCK_NBYTES,
        BLOCK_NBYTES,
        device=device,
        layers=LAYERS,
        pages=pages,
        chunk_nbytes=arguments.chunk,
        threads=arguments.threads,
        reserve=arguments.reserve,
        progress=progress.memory,
        wait=False,
    )
    while not pool.ready(0) and pool.state == "populating":
        time.sleep(0.001)
    first = time.perf_counter() - begin
    pool.wait()
    seconds = time.perf_counter() - begin
    progress.clear()
    row = {
        "method": f"pool, pages {pages}",
        "seconds": round(seconds, 3),
        "first_block_seconds": round(first, 3),
        "pages": pool.pages,
        "pinned": pool.pinned,
        "chunks": pool.chunks,
        "numa_node": pool.numa_node,
        "mapped_nbytes": pool.mapped_nbytes,
        "notices": list(pool.notices),
    }
    if arguments.blocks:
        gpu = Layers(device, min(arguments.blocks, pool.num_blocks))
        row["copies"] = verify(device, pool, gpu, arguments.seed)
        gpu.memory.free()
    row["close_seconds"], _ = timed(pool.close)
    return row


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None)
    parser.add_argument("--size", default="1GiB", help="of each pool (default 1GiB)")
    parser.add_argument("--chunk", type=parse_size, default=1 << 30, help="of a registration (default 1GiB)")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--blocks", type=int, default=512, help="copied by each path, of 2 MiB; 0: none (default 512)")
    parser.add_argument(
        "--reserve", type=int, default=None, help="bytes to leave free; negative: memory that will grow"
    )
    parser.add_argument("--repeats", type=int, default=1, help="rounds over all methods")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    arguments.nbytes = parse_size(arguments.size) // BLOCK_NBYTES * BLOCK_NBYTES
    if arguments.nbytes == 0:
        parser.error(f"--size is less than one block of {format_size(BLOCK_NBYTES)}")
    return arguments


def main() -> int:
    arguments = parse()
    device = kvswap.Device(arguments.device)
    rows: list[dict[str, Any]] = []
    for _ in range(arguments.repeats):
        for pages in ("default", "transparent", None):  # None: the driver's, with the machine as warm as for the others
            row = by_driver(device, arguments.nbytes) if pages is None else by_pool(device, arguments, pages)
            rows.append(row)
            print(f"{row['method']:24} {row['seconds']:8.2f} s", end="")
            if pages is not None:
                print(
                    f", first block {row['first_block_seconds']:.2f} s, {row['chunks']} chunks, "
                    f"{'pinned' if row['pinned'] else 'NOT pinned'}, closed in {row['close_seconds']:.2f} s",
                    end="",
                )
            print(flush=True)
            for copy in row.get("copies", []):
                ways = "  ".join(f"{way} {copy[way]['gbps']} GB/s ({copy[way]['took']})" for way in ("D2H", "H2D"))
                print(f"    {copy['path']:8} {copy['blocks']} blocks  {ways}  wrong bytes {copy['wrong_bytes']}")
    best = {method: min(r["seconds"] for r in rows if r["method"] == method) for method in {r["method"] for r in rows}}
    wrong = sum(copy["wrong_bytes"] for row in rows for copy in row.get("copies", []))
    ratios = {method: round(seconds / best["driver"], 3) for method, seconds in sorted(best.items())}
    print(f"{format_size(arguments.nbytes)} on {device.name}; of the driver's time: {ratios}; wrong bytes {wrong}")
    if arguments.json:
        record = {"device": device.name, "nbytes": arguments.nbytes, "rows": rows, "ratios": ratios, "wrong": wrong}
        with open(arguments.json, "w") as file:
            json.dump(record, file, indent=1)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
