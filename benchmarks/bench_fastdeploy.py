"""FastDeploy's ops and the cache transfer manager: python3 benchmarks/bench_fastdeploy.py [PART ...] [--device cuda:0].

ops: 64 tensors x 32 KiB x 128 blocks, each in an allocation of its own as torch and paddle have them, host layer-first:
  kvswap's swap_cache_all_layers beside one batch call and a kernel of one warp a block. Every byte is verified.
race: blocks are stored by a manager in another process while the kernel that writes them has not run: how many stores
  are stale without the kernel's event, and with it.
slowdown: a load in this process while a manager in another one swaps without pause: by the copy engine alone, and by
  kernels, which without MPS take time slices from it.
ranks: as many ranks as --ranks says, each on a GPU of its own: GB/s through the manager, verified on every GPU.

What the manager's parts move is timed from the task's submission to its result, two tasks in flight.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvswap
from kvswap import _C, Direction, fastdeploy, memory
from kvswap.bench.loads import load_for
from kvswap.bench.measure import opened, refusals
from kvswap.bench.methods import METHODS, Method, NotMeasured, Submit
from kvswap.bench.shapes import Place, Shape
from kvswap.fastdeploy.client import SWAP2CPU, SWAP2GPU, Client

TENSORS, BLOCKS, BLOCK_NBYTES = 64, 128, 32 << 10
WAIT = 120.0


class Cache:
    """GPU blocks as the ops take them: [blocks, 1, 1, bytes], one byte an element."""

    def __init__(self, ptr: int, blocks: int, block_nbytes: int) -> None:
        self.ptr, self.shape = ptr, (blocks, 1, 1, block_nbytes)

    def data_ptr(self) -> int:
        return self.ptr

    def element_size(self) -> int:
        return 1

    def numel(self) -> int:
        return self.shape[0] * self.shape[3]


# -- ops --------------------------------------------------------------------------------------------------------------


def _bind_ops(place: Place, direction: Direction, _: _C.Stream) -> Submit:
    caches = [Cache(int(ptr), place.gpu_slots, place.shape.block_nbytes) for ptr in place.gpu_ptrs]
    ptrs = [int(ptr) for ptr in place.host_ptrs]
    return lambda: fastdeploy.swap_cache_all_layers_async(
        caches, ptrs, place.host_slots, place.gpu_ids, place.host_ids, 0, int(direction), device=place.device
    )


def ops(device: kvswap.Device, args: argparse.Namespace) -> dict[str, Any]:
    shape = Shape(args.tensors, args.block_nbytes, args.blocks, block_first=False)
    methods = [
        Method("fastdeploy", "kvswap.fastdeploy.swap_cache_all_layers_async", _bind_ops),
        *(METHODS[key] for key in ("batch", "warp", "loop")),
    ]
    rows: list[dict[str, Any]] = []
    with opened(device, 1) as lab:
        ceilings = lab.ceilings(shape.nbytes, 5)
        print(f"{shape}, each tensor by itself, host layer-first; one bare copy: {_pair(ceilings)}")
        for direction in ("D2H", "H2D"):
            for method in methods:
                row: dict[str, Any] = {"method": method.key, "direction": direction}
                try:
                    with refusals(device):
                        figures = lab.figures(lab.job(method, (shape,), direction), args.repeats, 30.0)
                    row |= {
                        "gbps": figures.device_gbps or figures.gbps,
                        "gbps_of_call": figures.gbps,
                        "blocked_ms": figures.blocked_ms,
                        "path": figures.path,
                    }
                    print(f"  {direction} {method.key:<11}{row['gbps']:7.1f} GB/s on the device, "
                          f"{row['gbps_of_call']:6.1f} of the whole call, which holds its caller for "
                          f"{row['blocked_ms']:.2f} ms  {figures.path}")  # fmt: skip
                except NotMeasured as why:
                    row["note"] = str(why)
                    print(f"  {direction} {method.key:<11}not measured: {why}")
                rows.append(row)
        verified = lab.bytes_verified
    print(f"  {verified / 2**30:.1f} GiB verified, 0 wrong bytes")
    return {"ceilings": ceilings, "rows": rows, "bytes_verified": verified}


def _pair(ceilings: dict[str, float]) -> str:
    return " / ".join(f"{ceilings[way]:.1f}" for way in ("D2H", "H2D"))


# -- an engine and its managers ---------------------------------------------------------------------------------------


class Engine:
    """This process's caches, on one GPU a rank, and managers that have opened them."""

    def __init__(self, devices: Sequence[kvswap.Device], args: argparse.Namespace, client: Client) -> None:
        self.devices, self.client = devices, client
        self.blocks, self.nbytes = 2 * args.blocks, args.block_nbytes
        self.caches = [[device.alloc(self.blocks * self.nbytes) for _ in range(args.tensors)] for device in devices]
        names = [f"{kind}_caches_{layer}" for layer in range(args.tensors // 2) for kind in ("key", "value")]
        client.wait_started(WAIT)
        client.attach(
            [
                {
                    f"{name}_rank{rank}.device{rank}": memory.export(cache, device=device).to_bytes()
                    for name, cache in zip(names, caches, strict=True)
                }
                for rank, (device, caches) in enumerate(zip(devices, self.caches, strict=True))
            ],
            WAIT,
        )
        client.wait_ready(WAIT)

    def pattern(self, check: bool, rank: int, ids: Sequence[int], key: int, stream: _C.Stream) -> _C._PatternJob:
        """Write, or look at, these blocks of all caches: bytes by key and place in the list."""
        bases = np.array([cache.ptr for cache in self.caches[rank]], np.uint64)
        ptrs: NDArray[np.uint64] = (bases[:, None] + np.array(ids, np.uint64) * np.uint64(self.nbytes)).reshape(-1)
        keys = np.uint64(key) * np.uint64(1 << 32) + np.arange(ptrs.size, dtype=np.uint64)
        sizes = np.full(ptrs.size, self.nbytes, np.uint64)
        return _C._pattern(self.devices[rank], check, ptrs, sizes, keys, stream)

    def wrong(self, rank: int, ids: Sequence[int], key: int, stream: _C.Stream) -> int:
        return self.pattern(True, rank, ids, key, stream).result(WAIT)[0]

    def swap(self, kind: int, gpu_ids: Sequence[int], cpu_ids: Sequence[int], events: Any = None) -> int:
        """Wait for its end; bytes moved on all ranks."""
        return self.end(self.client.swap(kind, gpu_ids, cpu_ids, events=events, timeout=WAIT))

    def end(self, task: str) -> int:
        result = self.client.result(task, WAIT)
        if not result.ok:
            raise SystemExit(f"task failed on rank {result.rank}: {result.reason}")
        return result.nbytes

    def close(self) -> None:
        self.client.clear(WAIT)
        for caches in self.caches:
            for cache in caches:
                cache.free()


@contextmanager
def managed(
    devices: Sequence[kvswap.Device], args: argparse.Namespace, *options: str, **environment: str
) -> Iterator[Engine]:
    package = str(Path(kvswap.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    shape = f"{2 * args.blocks},1,1,{args.block_nbytes}"
    with tempfile.TemporaryDirectory(prefix="kvb-") as folder:
        directory = Path(folder, "m")
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "kvswap.fastdeploy.manager", "--rank", str(rank), "--device_id", str(rank),
                 "--mp_num", str(len(devices)), "--device", device.name, "--socket_dir", str(directory),
                 "--num_layers", str(args.tensors // 2), "--key_cache_shape", shape, "--value_cache_shape", shape,
                 "--cache_dtype", "uint8", "--num_cpu_blocks", str(2 * args.blocks), "--log_level", "warning",
                 *options],
                env={**os.environ, "PYTHONPATH": path, **environment},
                cwd=folder,  # not the source tree, whose package is not built
            )
            for rank, device in enumerate(devices)
        ]  # fmt: skip
        try:
            until = time.monotonic() + WAIT
            while not (directory / "manager.sock").exists():
                if time.monotonic() > until or any(process.poll() is not None for process in processes):
                    raise SystemExit("a manager did not start")
                time.sleep(0.05)
            with Client(directory) as client:
                engine = Engine(devices, args, client)
                yield engine
                engine.close()
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(WAIT)


# -- race -------------------------------------------------------------------------------------------------------------


def race(device: kvswap.Device, args: argparse.Namespace) -> dict[str, Any]:
    """Blocks are written by work that is held up; a store follows, and comes back to other blocks to be looked at."""
    found: dict[str, Any] = {"rounds": args.rounds}
    source, back = list(range(8)), list(range(8, 16))
    with managed([device], args) as engine:
        stream, event = _C.Stream(device), _C.Event(device, timing=False, interprocess=True)
        exported = memory.export_event(event)
        for name, events in (("without", None), ("with", [exported])):
            stale = 0
            for key in range(1, args.rounds + 1):
                engine.pattern(False, 0, source, 0, stream).result(WAIT)
                _C._delay(device, 0.02, stream)
                job = engine.pattern(False, 0, source, key, stream)
                event.record(stream)
                engine.swap(SWAP2CPU, source, source, events)
                job.result(WAIT)
                engine.swap(SWAP2GPU, back, source)
                stale += engine.wrong(0, back, key, stream) > 0
            found[f"stale_{name}_event"] = stale
            print(f"  {stale} of {args.rounds} stores across two processes were stale {name} the kernels' event")
    return found


# -- slow-down --------------------------------------------------------------------------------------------------------


def _for(seconds: float) -> Callable[[], bool]:
    """True for so long from now."""
    until = time.perf_counter() + seconds
    return lambda: time.perf_counter() < until


def _stream_tasks(engine: Engine, kind: int, running: Callable[[], bool]) -> tuple[int, float]:
    """Swap without pause, two tasks in flight; bytes and seconds."""
    ids, slots = list(range(engine.blocks // 2)), list(range(engine.blocks // 2))
    np.random.default_rng(3).shuffle(slots)
    begin, nbytes = time.perf_counter(), 0
    waiting: list[str] = []
    while running():
        waiting.append(engine.client.swap(kind, ids, slots, timeout=WAIT))
        if len(waiting) > 1:
            nbytes += engine.end(waiting.pop(0))
    for task in waiting:
        nbytes += engine.end(task)
    return nbytes, time.perf_counter() - begin


def _pieces(device: kvswap.Device, load: Any, seconds: float) -> float:
    """Seconds a piece of the load takes, while this process does nothing else on the device."""
    marks = [_C.Event(device, timing=False) for _ in range(load.ahead)]
    begin, end = _C.Event(device), _C.Event(device)
    begin.record(load.stream)
    begin.synchronize(WAIT)
    count, until = 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        marks[count % load.ahead].synchronize(WAIT)
        load.queue()
        marks[count % load.ahead].record(load.stream)
        count += 1
    end.record(load.stream)
    end.synchronize(WAIT)
    return begin.elapsed_time(end) / count


def slowdown(device: kvswap.Device, args: argparse.Namespace) -> list[dict[str, Any]]:
    from concurrent.futures import ThreadPoolExecutor

    load = load_for(device, args.load)
    print(f"  load: {load.name}; {args.pairs} pairs of {args.seconds:g} s")
    rows = []
    ways: list[tuple[str, tuple[str, ...], dict[str, str]]] = [("copy engine", (), {})]
    if device.kind == "cuda":
        ways.append(("kernels, no MPS", ("--mps",), {"KVSWAP_PATH": "kernel"}))
    for name, options, environment in ways:
        with managed([device], args, *options, **environment) as engine, ThreadPoolExecutor(1) as thread:
            _stream_tasks(engine, SWAP2CPU, iter([True, False]).__next__)
            for kind in (SWAP2CPU, SWAP2GPU):
                alone, slow, gbps = [_pieces(device, load, args.seconds)], [], []
                for _ in range(args.pairs):
                    copies = thread.submit(_stream_tasks, engine, kind, _for(args.seconds + 0.2))
                    time.sleep(0.1)
                    piece = _pieces(device, load, args.seconds)
                    nbytes, seconds = copies.result()
                    alone.append(_pieces(device, load, args.seconds))
                    slow.append(piece / statistics.mean(alone[-2:]))
                    gbps.append(nbytes / seconds / 1e9)
                row = {"by": name, "direction": kind.name, "load": load.name, "slowdown": statistics.median(slow),
                       "slowdowns": slow, "gbps": statistics.median(gbps)}  # fmt: skip
                rows.append(row)
                print(f"  {name:<16}{kind.name}  load {row['slowdown']:.3f} times as long at {row['gbps']:.1f} GB/s")
    return rows


# -- ranks ------------------------------------------------------------------------------------------------------------


def ranks(device: kvswap.Device, args: argparse.Namespace) -> dict[str, Any]:
    kind, _, first = device.name.partition(":")
    devices = [kvswap.Device(f"{kind}:{int(first) + i}") for i in range(args.ranks)]
    found: dict[str, Any] = {"ranks": args.ranks}
    with managed(devices, args) as engine:
        half = engine.blocks // 2
        streams = [_C.Stream(each) for each in devices]
        out, back = list(range(half)), list(range(half, 2 * half))
        for rank, stream in enumerate(streams):
            engine.pattern(False, rank, out, 9 + rank, stream).result(WAIT)
        engine.swap(SWAP2CPU, out, out)
        engine.swap(SWAP2GPU, back, out)
        found["wrong_bytes"] = sum(engine.wrong(rank, back, 9 + rank, stream) for rank, stream in enumerate(streams))
        for task in (SWAP2CPU, SWAP2GPU):
            nbytes, seconds = _stream_tasks(engine, task, _for(args.seconds))
            found[task.name] = nbytes / seconds / 1e9
            print(f"  {args.ranks} ranks: {task.name} {found[task.name]:.1f} GB/s in all")
    print(f"  {found['wrong_bytes']} wrong bytes")
    return found


PARTS: dict[str, Callable[[kvswap.Device, argparse.Namespace], Any]] = {
    "ops": ops,
    "race": race,
    "slowdown": slowdown,
    "ranks": ranks,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all but ranks by default")
    parser.add_argument("--device", default=None, help="cuda:N or host:N")
    parser.add_argument("--ranks", type=int, default=2, help="of part ranks")
    parser.add_argument("--load", default="decode", help="of part slowdown: matmul, decode or stream")
    parser.add_argument("--tensors", type=int, default=TENSORS)
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--block-nbytes", type=int, default=BLOCK_NBYTES)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    device = kvswap.Device(args.device)
    found: dict[str, Any] = {"device": device.name, "info": repr(device), "version": kvswap.__version__}
    for part in args.parts or [name for name in PARTS if name != "ranks"]:
        if part not in PARTS:
            parser.error(f"{part!r} is no part: {', '.join(PARTS)}")
        print(f"{part}:", flush=True)
        found[part] = PARTS[part](device, args)
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
