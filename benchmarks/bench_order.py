"""What order costs, and what it gives: python3 benchmarks/bench_order.py [--device cuda:0] [--json FILE].

submit: how long a caller is held up by a batch of 512 blocks that is validated, hazard-checked and submitted, where
every block conflicts with a transfer of the other lane.
layers (needs torch and a GPU): a load beside a loop of matrix products, one a layer: waiting for each layer before its
product, against one wait for the whole load. Everything in one run, interleaved; medians.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from typing import Any

import numpy as np

import kvswap
from kvswap.trtllm import KVCacheBlockPool, KVCacheTransferManager

LAYERS = 32
BLOCKS = 512
ROUNDS = 15


def manager_of(device: kvswap.Device, blocks: int, layer_nbytes: int, path: str) -> KVCacheTransferManager:
    nbytes = blocks * LAYERS * layer_nbytes
    pool = KVCacheBlockPool(
        device.alloc(nbytes),
        device.alloc(nbytes, host=True),
        blocks,
        blocks,
        num_layers=LAYERS,
        kv_factor=2,
        num_kv_heads=8,
        tokens_per_block=16,
        size_per_head=layer_nbytes // (2 * 8 * 16 * 2),
        dtype="fp16",
    )
    return KVCacheTransferManager([pool], device=device, path=path)


def submit(device: kvswap.Device) -> dict[str, float]:
    """Microseconds of the caller for one batch, in steady state."""
    manager = manager_of(device, 4 * BLOCKS, 8192, "auto")
    rng = np.random.default_rng(1)
    took = []
    for _ in range(200):
        primary, secondary = rng.permutation(4 * BLOCKS)[:BLOCKS], rng.permutation(4 * BLOCKS)[:BLOCKS]
        loaded = manager.onboard(secondary, primary)
        begin = time.perf_counter()
        stored = manager.offload(primary, secondary)
        took.append(time.perf_counter() - begin)
        loaded.wait()
        stored.wait()
    manager.close()
    stats = device.stats()
    return {
        "submit_us": statistics.median(took) * 1e6,
        "submit_us_p90": sorted(took)[len(took) * 9 // 10] * 1e6,
        "waits": stats["waits_raw"] + stats["waits_war"] + stats["waits_waw"],
    }


def layers(device: kvswap.Device, path: str) -> dict[str, Any]:
    """Seconds of a loop over the layers that uses what a load brings."""
    torch: Any = importlib.import_module("torch")
    manager = manager_of(device, 256, 65536, path)
    stream = torch.cuda.Stream(device=device.name)
    a = torch.randn(8192, 3072, device=device.name, dtype=torch.bfloat16)
    b = torch.randn(3072, 3072, device=device.name, dtype=torch.bfloat16)
    rng = np.random.default_rng(2)

    def loop(transfer: kvswap.Transfer | None, layer_wise: bool) -> None:
        with torch.cuda.stream(stream):
            if transfer is not None and not layer_wise:
                transfer.make_wait(stream)
            for layer in range(LAYERS):
                if transfer is not None and layer_wise:
                    transfer.make_wait_layer(layer, stream)
                torch.matmul(a, b)

    def timed(load: bool, work: bool, layer_wise: bool) -> float:
        device.synchronize()
        ids = rng.permutation(256)[:192]
        begin = time.perf_counter()
        transfer = manager.onboard(ids, ids[::-1].copy(), layer_events=True) if load else None
        if work:
            loop(transfer, layer_wise)
        device.synchronize()
        return time.perf_counter() - begin

    cases = {
        "load": (True, False, False),
        "loop": (False, True, False),
        "wait_for_all": (True, True, False),
        "wait_for_layers": (True, True, True),
    }
    took: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(ROUNDS + 2):
        for name, case in cases.items():
            seconds = timed(*case)
            if i >= 2:
                took[name].append(seconds)
    manager.close()
    result: dict[str, Any] = {name: statistics.median(values) for name, values in took.items()}
    result["hidden_share_of_the_load"] = (result["wait_for_all"] - result["wait_for_layers"]) / result["load"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None)
    parser.add_argument("--json")
    options = parser.parse_args()
    device = kvswap.Device(options.device)
    results: dict[str, Any] = {"device": device.name, "name": device.info["name"], **submit(device)}
    print(
        f"{device.name}: a batch of {BLOCKS} blocks holds the caller up for {results['submit_us']:.1f} us "
        f"(p90 {results['submit_us_p90']:.1f}); {results['waits']} waits for hazards in 200 batches"
    )
    if device.kind == "cuda":
        results["layers"] = {path: layers(device, path) for path in ("dma", "kernel")}
        for path, row in results["layers"].items():
            print(
                f"{path}: load of 192 blocks x {LAYERS} layers x 64 KiB {row['load'] * 1e3:.2f} ms, loop of {LAYERS} "
                f"products {row['loop'] * 1e3:.2f} ms; loop that waits for the whole load "
                f"{row['wait_for_all'] * 1e3:.2f} ms, for each layer {row['wait_for_layers'] * 1e3:.2f} ms: "
                f"{row['hidden_share_of_the_load']:.0%} of the load hidden"
            )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
