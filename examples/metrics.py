"""What kvswap counts: moves some blocks, then prints the numbers. On a GPU: --device cuda:0.

With --port 9400 it goes on moving and serves them for Prometheus until Ctrl-C; `kvswap top` shows it as well.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

import kvswap
from kvswap import metrics

BLOCKS, NBYTES = 256, 64 << 10


def moved() -> int:
    return sum(path["size"]["sum"] for row in metrics.snapshot()["devices"] for path in row["paths"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="host:0")
    parser.add_argument("--port", type=int, help="serve Prometheus on 127.0.0.1 and go on")
    args = parser.parse_args()
    try:
        import prometheus_client
    except ImportError:
        print("this example needs prometheus_client: pip install 'kvswap[metrics]'", file=sys.stderr)
        return 2

    registry = prometheus_client.CollectorRegistry()
    registry.register(metrics.Collector(rank=0))

    device = kvswap.Device(args.device)
    gpu = device.alloc(BLOCKS * NBYTES)
    cpu = device.alloc(BLOCKS * NBYTES, host=True)

    def move(turn: int) -> None:
        ids = np.random.default_rng(turn).permutation(BLOCKS)[:64]
        for direction in kvswap.Direction:
            kvswap.swap_cache_per_layer(gpu, cpu, NBYTES, BLOCKS, BLOCKS, ids, ids, direction, device=device)

    before = moved()
    for turn in range(10):
        move(turn)
    assert moved() - before == 10 * 2 * 64 * NBYTES  # the counters are exact

    # As plain dicts, without prometheus_client:
    for row in metrics.snapshot()["devices"]:
        for path in row["paths"]:
            assert path["size"]["sum"] > 0, path
            count, seconds = sum(path["duration"]["buckets"]), path["duration"]["sum"]
            mean = seconds / count * 1e3
            what = f"{row['device']} {path['direction']} by {path['path']}"
            print(f"{what}: {count} transfers, {path['size']['sum'] / 1e6:.1f} MB, {mean:.3f} ms each")

    # As Prometheus scrapes them:
    print(prometheus_client.generate_latest(registry).decode())

    if args.port is not None:
        prometheus_client.start_http_server(args.port, addr="127.0.0.1", registry=registry)
        print(f"kvswap top sees this process by {metrics.serve()}", flush=True)
        try:
            while True:
                turn += 1
                move(turn)
                time.sleep(0.02)
        except KeyboardInterrupt:
            metrics.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
