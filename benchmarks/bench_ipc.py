"""Memory of one process in another: python3 benchmarks/bench_ipc.py [--device cuda:0] [--json FILE].

A tensor that lies inside an allocation is exported by one process and opened by another, which copies all of it to
pinned memory and verifies it. On a GPU it is torch's, from its caching allocator and from expandable segments (where
torch is installed), else kvswap's own. Milliseconds of the calls, and GB/s of the copy beside one from memory of the
process's own. Exit status 1: a byte was wrong.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

import kvswap
from kvswap import memory

ROUNDS = 7
KINDS = {"caching": "", "expandable": "expandable_segments:True"}


def _numbers(host: kvswap.Memory) -> NDArray[np.int32]:
    return np.frombuffer(cast(bytearray, host), np.int32)


def own(kind: str, device: kvswap.Device, nbytes: int) -> tuple[Any, str]:
    """A tensor of int32 0, 1, 2, ... with something before it in its allocation; and whose it is."""
    if device.kind == "cuda" and importlib.util.find_spec("torch") is not None:
        torch: Any = importlib.import_module("torch")
        whole = torch.arange(-1024, nbytes // 4, dtype=torch.int32, device=device.name)
        torch.cuda.synchronize()
        return whole[1024:], "torch"
    whole = device.alloc(nbytes + 4096, chunks=kind == "expandable")
    host = device.alloc(nbytes + 4096, host=True)
    _numbers(host)[:] = np.arange(-1024, nbytes // 4, dtype=np.int32)
    kvswap.swap_blocks_batch([host], [whole], nbytes + 4096, device=device).wait(60)
    whole_and_offset = (whole, whole.ptr + 4096)
    return whole_and_offset, "kvswap"


def serve(kind: str, name: str, nbytes: int) -> None:
    """The owner: says how long exporting took, and the bytes; ends when its input does."""
    device = kvswap.Device(name)
    tensor, whose = own(kind, device, nbytes)
    begin = time.perf_counter()
    if isinstance(tensor, tuple):
        export = memory.export(tensor[1], device=device, nbytes=nbytes)
    else:
        export = memory.export(tensor)
    print(json.dumps({"export_ms": (time.perf_counter() - begin) * 1e3, "of": whose, "data": export.to_bytes().hex()}))
    sys.stdout.flush()
    sys.stdin.read()


def copy_gbps(device: kvswap.Device, source: Any, host: kvswap.Memory, nbytes: int) -> float:
    took = []
    for _ in range(ROUNDS + 1):
        transfer = kvswap.swap_blocks_batch([source], [host], nbytes, device=device)
        transfer.wait(60)
        took.append(transfer.elapsed or 0.0)
    return nbytes / statistics.median(took[1:]) / 1e9


def use(kind: str, name: str, nbytes: int) -> dict[str, Any]:
    """The other process: this one."""
    device = kvswap.Device(name)
    environment = {**os.environ, **({"PYTORCH_CUDA_ALLOC_CONF": KINDS[kind]} if KINDS[kind] else {})}
    command = [sys.executable, __file__, "--device", name, "--serve", kind, "--nbytes", str(nbytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as owner:
        assert owner.stdout is not None and owner.stdin is not None
        answer = json.loads(owner.stdout.readline())
        host, mine, opened, closed = device.alloc(nbytes, host=True), device.alloc(nbytes), [], []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            mapped = memory.open(bytes.fromhex(answer["data"]), device=device)
            opened.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            mapped.close()
            closed.append(time.perf_counter() - begin)
        with memory.open(bytes.fromhex(answer["data"]), device=device) as mapped:
            gbps = copy_gbps(device, mapped, host, nbytes)
            wrong = int((_numbers(host) != np.arange(nbytes // 4, dtype=np.int32)).sum())
        row = {
            "kind": kind, "of": answer["of"], "nbytes": nbytes, "wrong": wrong, "export_ms": answer["export_ms"],
            "open_ms": statistics.median(opened) * 1e3, "close_ms": statistics.median(closed) * 1e3,
            "gbps": gbps, "own_gbps": copy_gbps(device, mine, host, nbytes),
        }  # fmt: skip
        owner.stdin.close()
        owner.wait(60)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None)
    parser.add_argument("--nbytes", type=int, default=1 << 30)
    parser.add_argument("--serve", choices=list(KINDS), help=argparse.SUPPRESS)
    parser.add_argument("--json")
    options = parser.parse_args()
    name = options.device or kvswap.Device().name
    if options.serve:
        serve(options.serve, name, options.nbytes)
        return 0
    rows = [use(kind, name, options.nbytes) for kind in KINDS]
    for row in rows:
        print(
            f"{name}, {row['of']}'s memory ({row['kind']}), {row['nbytes'] >> 20} MiB inside an allocation: export "
            f"{row['export_ms']:.2f} ms, open {row['open_ms']:.2f} ms, close {row['close_ms']:.2f} ms; to the host at "
            f"{row['gbps']:.1f} GB/s, own memory at {row['own_gbps']:.1f}; {row['wrong']} wrong words"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"device": name, "rows": rows}, file, indent=1)
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
