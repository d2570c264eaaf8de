"""SGLang's copies between device and host memory beside kvswap's: python3 benchmarks/bench_sglang.py SOURCE.

SOURCE: a folder with SGLang's package in it; benchmarks/sglang_pack.sh makes one for a machine without a network. Its
pools and its transfer engine run as its cache controller calls them: token ids of random pages, on the GPU for the
device's side, on the CPU for the host's, brought over by its move_indices where its own ways want them.

  sglang    its engine, io backend `kernel`: its JIT kernels (TMA, or registers), in page_first the staged write-back
  method    where these do not build: the same method in kvswap's terms, a call a layer by 4 CTAs of bulk copies, and a
            write-back of 64 pages at a time through a buffer on the GPU. For measuring only
  kvswap    kvswap's engine (KVSWAP_SGLANG_COPIES)

GB/s of the whole call, from the ids to the end, and milliseconds that the call holds its caller, after a slash those in
kvswap's own call; `device`: milliseconds between the events round the copies on SGLang's stream; then the path that
kvswap took. Medians of turns that alternate; --json has all turns. First comes one copy of as many bytes. Every byte is
checked for each way; then the last page is left out, which must be noticed. --beside: a decode step alone, and beside
copies without pause: how much longer it takes, and GB/s meanwhile. Exit status 1: a byte was wrong. --device cpu: a
look at the program itself, without a GPU.
"""

# SGLang and torch are not there where types are checked.
# mypy: ignore-errors

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import kvswap

HERE = Path(__file__).resolve().parent
LAYERS, HEADS = 32, 8
PAGES, TOKEN_BYTES, LAYOUTS = (16, 64), (256, 512, 1024, 2048), ("layer_first", "page_first")
DIRECTIONS = ("D2H", "H2D")
STAGED_PAGES = 64
ABSENT = ("sgl_kernel", "IPython")
PATIENCE = 60


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", help="folder with SGLang's package")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--bytes", type=int, default=512 << 20, help="of a copy (default: 512 MiB)")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--priority", choices=["high", "normal", "background"], default="high")
    parser.add_argument("--pages", type=int, nargs="+", default=PAGES)
    parser.add_argument("--token-bytes", type=int, nargs="+", default=TOKEN_BYTES)
    parser.add_argument("--layouts", nargs="+", choices=[*LAYOUTS, "page_first_direct"], default=LAYOUTS)
    parser.add_argument(
        "--beside", type=float, default=0, metavar="SECONDS", help="of each window beside a decode step"
    )
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


class _Nothing:
    """A name of what is not here. A call of it is an error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(f"{self._name}.{name}")

    def __call__(self, *given: Any, **options: Any) -> Any:
        raise RuntimeError(f"{self._name} is not here")


class _Absent(ModuleType):
    """What SGLang imports, and does not call here."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(_Nothing(self.__name__), name)


class Absentees:
    """Finds what of ABSENT is not installed, whatever below it is asked for."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in self.names:
            return ModuleSpec(name, self, is_package=True)
        return None

    def __init__(self) -> None:
        self.names = {name for name in ABSENT if importlib.util.find_spec(name) is None}
        sys.meta_path.append(self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def prepare(options: argparse.Namespace) -> None:
    """What must be there before SGLang is imported."""
    os.environ.setdefault("SGLANG_LOGGING_LEVEL", "warning")
    sys.path.insert(0, str(Path(options.source).resolve()))
    Absentees()
    if options.device == "cpu":
        sys.path[:0] = [str(HERE.parent / "tests" / "integration")]
        os.environ["KVSWAP_SGLANG_COPIES"] = "1"
        import sglang_engine  # noqa: F401
        import sglang_plugin

        sglang_plugin.use_streams()


class Case:
    """SGLang's pools of one shape, and random pages of both."""

    def __init__(self, options: argparse.Namespace, layout: str, page: int, token_bytes: int) -> None:
        import torch
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

        self.torch, self.page, self.layout, self.device = torch, page, layout, options.device
        layers = LAYERS if options.device != "cpu" else 4
        count = max(1, options.bytes // (2 * layers * token_bytes * page))
        tokens, self.nbytes = count * page, count * page * 2 * layers * token_bytes
        self.pool = MHATokenToKVPool(
            size=2 * tokens, page_size=page, dtype=torch.bfloat16, head_num=HEADS, head_dim=token_bytes // 2 // HEADS,
            layer_num=layers, device=options.device, enable_memory_saver=False,
        )  # fmt: skip
        self.host = MHATokenToKVPoolHost(
            self.pool._mha_buffer_info(), 1.5, 0, page, layout, pin_memory=options.device != "cpu",
            device_capacity_tokens=2 * tokens, start_layer=0, end_layer=layers, host_token_capacity=3 * tokens,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(page * token_bytes)
        each = torch.arange(page)

        def ids(pages: int) -> Any:
            chosen = torch.randperm(pages, generator=generator)[:count]
            return (chosen[:, None] * page + each).reshape(-1)

        self.host_ids = ids(3 * tokens // page)
        self.device_ids_on_cpu = ids(2 * tokens // page)
        self.device_ids = self.device_ids_on_cpu.to(options.device)
        self.host_ids_on_device = self.host_ids.to(options.device)  # to compare there
        self.parts = [self.pool.k_buffer, self.pool.v_buffer]

    def device_rows(self, part: int, layer: int) -> Any:
        buffer = self.parts[part][layer].view(self.torch.int16)
        return buffer.reshape(len(buffer), -1)

    def host_rows(self, part: int, layer: int) -> Any:
        bits = self.host.kv_buffer.view(self.torch.int16)[part]
        rows = bits[layer] if self.layout == "layer_first" else bits[:, layer]
        return rows.reshape(self.host.size, -1)

    def scramble(self, direction: str, seed: int) -> None:
        """Other bytes in the source, and nonsense where the copy goes."""
        generator = self.torch.Generator(self.device).manual_seed(seed)
        for part in range(2):
            for layer in range(len(self.parts[part])):
                device, rows = self.device_rows(part, layer), self.host_rows(part, layer)
                source, target = (device, rows) if direction == "D2H" else (rows, device)
                made = self.torch.empty(source.shape, dtype=source.dtype, device=self.device)
                source.copy_(made.random_(0, 30000, generator=generator))
                target.fill_(-7)

    def wrong(self, direction: str) -> int:
        """Wrong tokens, of all layers; also ones that the copy should not have touched."""
        found = self.torch.zeros((), dtype=self.torch.int64, device=self.device)
        for part in range(2):
            for layer in range(len(self.parts[part])):
                device, rows = self.device_rows(part, layer), self.host_rows(part, layer).to(self.device)
                found += (device[self.device_ids] != rows[self.host_ids_on_device]).any(1).sum()
                to_host = direction == "D2H"
                side, ids = (rows, self.host_ids_on_device) if to_host else (device, self.device_ids)
                rest = self.torch.ones(len(side), dtype=bool, device=self.device)
                rest[ids] = False
                found += (side[rest] != -7).any(1).sum()
        return int(found)


class Way:
    """One of the engines, called as SGLang's controller calls it."""

    def __init__(self, name: str, engine: Any, moves: bool) -> None:
        self.name, self.engine, self.moves = name, engine, moves
        self.own = 0.0  # seconds in kvswap's call, of the last submission
        if name == "kvswap":
            submit = engine._submit

            def timed(*given: Any) -> Any:
                begin = time.perf_counter()
                try:
                    return submit(*given)
                finally:
                    self.own += time.perf_counter() - begin

            engine._submit = timed

    def submit(self, case: Case, direction: str, tokens: int | None = None) -> Any:
        from sglang.srt.managers.cache_controller import HiCacheController
        from sglang.srt.mem_cache.l2_transfer import L2Transfer

        host, device = case.host_ids[:tokens], case.device_ids[:tokens]
        self.own = 0.0
        staged = direction == "D2H" and getattr(case.host, "can_use_write_back_jit", False)
        if self.moves and not staged:
            controller = SimpleNamespace(io_backend="kernel", device=case.device, mem_pool_host=case.host)
            host, device = HiCacheController.move_indices(controller, host, device)
        self.engine.on_cpu = case.device_ids_on_cpu[:tokens].numpy()  # for the method alone, at no cost
        transfers = [L2Transfer(case.host, case.pool, host, device)]
        if direction == "D2H":
            return self.engine.submit_device_to_host(transfers)
        layers = case.pool.layer_num
        return self.engine.submit_host_to_device(transfers, transfer_layer_id_max=layers, on_layer_done=_events(layers))


def _events(layers: int) -> Any:
    from sglang.srt.managers.cache_controller import LayerLoadingEvent

    return LayerLoadingEvent(layers).complete


def method_engine(device: kvswap.Device) -> Any:
    """SGLang's method again: see the top."""
    import torch
    from sglang.srt.mem_cache import l2_transfer

    from kvswap.sglang._places import places_of

    class Again(l2_transfer.L2TransferEngine):
        def submit_device_to_host(self, transfers: list[Any]) -> Any:
            stream = self.device_to_host_stream
            with self._submission(transfers, stream, "device_to_host") as (prepared, completion):
                (call,) = prepared
                if call.host_pool.layout == "page_first":
                    self.staged(call)
                else:
                    places = places_of(call.host_pool, False)
                    self.kernel(call, places, range(len(places.gpu)), "D2H", stream)
            return completion

        def submit_host_to_device(self, transfers: list[Any], *, transfer_layer_id_max: int, **more: Any) -> Any:
            stream = self.host_to_device_stream
            with self._submission(transfers, stream, "host_to_device") as (prepared, completion):
                places = places_of(prepared[0].host_pool, False)
                for layer in range(transfer_layer_id_max):
                    self.kernel(prepared[0], places, [layer], "H2D", stream)
                    more["on_layer_done"](layer)
            return completion

        def kernel(self, call: Any, places: Any, rows: Any, direction: str, stream: Any) -> None:
            gpu, cpu, _ = places.order([*rows])
            ids = [each[:: places.tokens] // places.tokens for each in (self.on_cpu, call.host_indices.numpy())]
            given = (gpu, cpu, places.nbytes, places.gpu_blocks, places.cpu_blocks, *ids, direction)
            strides = {"gpu_stride": places.gpu_stride, "cpu_stride": places.cpu_stride}
            how = {"stream": stream, "path": "kernel", "max_ctas": 4, "priority": "high", "device": device}
            kvswap.swap_cache_all_layers_async(*given, **strides, **how)

        def staged(self, call: Any) -> None:
            pool, page = call.host_pool, call.host_pool.page_size
            for begin in range(0, len(call.host_indices), STAGED_PAGES * page):
                tokens = call.device_indices[begin : begin + STAGED_PAGES * page]
                for buffer, layers in ((pool.k_buffer, pool.device_k_buffers), (pool.v_buffer, pool.device_v_buffers)):
                    packed = torch.stack([layer[tokens] for layer in layers], 1)
                    for at in range(0, len(tokens), page):
                        row = int(call.host_indices[begin + at])
                        buffer[row : row + page].copy_(packed[at : at + page], non_blocking=True)

    return Again("kernel")


def ways_of(options: argparse.Namespace, case: Case, device: kvswap.Device) -> list[Way]:
    from sglang.srt.mem_cache import l2_transfer

    from kvswap.sglang._copies import CopyEngine

    ways = [Way("kvswap", CopyEngine("kernel"), moves=False)]
    if options.device == "cpu":
        return ways
    staged = case.layout != "page_first" or case.host.can_use_write_back_jit
    if case.host.can_use_jit and staged:
        return [Way("sglang", l2_transfer.L2TransferEngine("kernel"), moves=True), *ways]
    return [Way("method", method_engine(device), moves=False), *ways]


def measure(options: argparse.Namespace, case: Case, ways: list[Way], direction: str) -> list[dict[str, Any]]:
    took: dict[str, list[dict[str, float]]] = {way.name: [] for way in ways}
    paths = dict[str, str]()
    for turn in range(options.turns + 1):
        for way in ways if turn % 2 else reversed(ways):
            synchronize(case)
            begin = time.perf_counter()
            completion = way.submit(case, direction)
            called = time.perf_counter()
            completion.finish_event.synchronize()
            whole = time.perf_counter() - begin
            copies = vars(completion.finish_event).get("_transfers", ()) if way.name == "kvswap" else ()
            paths[way.name] = " ".join(sorted({copy.path for copy in copies}))
            device = completion.start_event.elapsed_time(completion.finish_event)
            if turn:
                seconds = {"whole_ms": whole, "call_ms": called - begin, "own_ms": way.own, "device_ms": device / 1e3}
                took[way.name].append({name: 1e3 * value for name, value in seconds.items()})
    rows = []
    for way in ways:
        median = {name: statistics.median(turn[name] for turn in took[way.name]) for name in took[way.name][0]}
        case.scramble(direction, 1)
        way.submit(case, direction).finish_event.synchronize()
        synchronize(case)
        wrong = case.wrong(direction)
        if way.name == "kvswap" and not way.engine._takes_device_ids:
            raise SystemExit("this kvswap takes no ids in device memory: its rows would be SGLang's own")
        case.scramble(direction, 2)
        way.submit(case, direction, -case.page).finish_event.synchronize()
        synchronize(case)
        row = {"layout": case.layout, "page": case.page, "direction": direction, "way": way.name}
        row |= {
            "token_bytes": case.host.token_stride_size,
            "nbytes": case.nbytes,
            "gbps": case.nbytes / median["whole_ms"] / 1e6,
        }
        row |= {"wrong_tokens": wrong, "left_out_is_noticed": case.wrong(direction) > 0}
        row |= median | {"path": paths[way.name], "turns": took[way.name]}
        rows.append(row)
    return rows


def beside(options: argparse.Namespace, case: Case, ways: list[Way], direction: str, load: Any) -> list[dict[str, Any]]:
    """How much longer a decode step takes beside each way, and beside one copy of as many bytes."""
    from kvswap.bench.beside import _run_load

    device, rows = kvswap.Device(options.device), []
    host, memory = device.alloc(case.nbytes, host=True), device.alloc(case.nbytes)
    pair = (memory, host) if direction == "D2H" else (host, memory)
    bare = SimpleNamespace(name="copy", submit=lambda case, direction: _Bare(device, *pair, case.nbytes))
    for way in (bare, *ways):
        alone, slowed, rates = [], [], []
        for _ in range(3):
            alone.append(_run_load(device, load, options.beside).piece_seconds)
            with ThreadPoolExecutor(1) as thread:
                flight, count, began = [], 0, time.perf_counter()
                future = thread.submit(_run_load, device, load, options.beside)
                while not future.done():
                    flight.append(way.submit(case, direction))
                    if len(flight) > 1:
                        flight.pop(0).finish_event.synchronize()
                        count += 1
                rates.append(count * case.nbytes / (time.perf_counter() - began) / 1e9)
                slowed.append(future.result().piece_seconds)
                for each in flight:
                    each.finish_event.synchronize()
        row = {"layout": case.layout, "page": case.page, "direction": direction, "way": way.name}
        row |= {"token_bytes": case.host.token_stride_size, "priority": options.priority}
        row |= {"slow_down": statistics.median(s / a for s, a in zip(slowed, alone, strict=True))}
        rows.append(row | {"gbps": statistics.median(rates)})
    return rows


class _Bare:
    """One copy by the copy engine, with a completion of SGLang's shape."""

    def __init__(self, device: kvswap.Device, src: Any, dst: Any, nbytes: int) -> None:
        copy = kvswap.swap_blocks_batch([src.ptr], [dst.ptr], nbytes, device=device, path="dma")
        self.finish_event = SimpleNamespace(synchronize=lambda: copy.wait(PATIENCE))


def synchronize(case: Case) -> None:
    if case.device != "cpu":
        case.torch.cuda.synchronize()


def bare_gbps(options: argparse.Namespace, direction: str) -> float:
    if options.device == "cpu":
        return 0.0
    device = kvswap.Device(options.device)
    host, memory = device.alloc(options.bytes, host=True), device.alloc(options.bytes)
    pair, took = (memory, host) if direction == "D2H" else (host, memory), []
    for _ in range(options.turns + 1):
        device.synchronize(PATIENCE)
        begin = time.perf_counter()
        _Bare(device, *pair, options.bytes).finish_event.synchronize()
        took.append(time.perf_counter() - begin)
    return float(options.bytes / statistics.median(took[1:]) / 1e9)


def main() -> int:
    options = parse()
    prepare(options)
    device = kvswap.Device("host:0" if options.device == "cpu" else options.device)
    device.set_defaults(priority=options.priority)
    ceilings = {direction: bare_gbps(options, direction) for direction in DIRECTIONS}
    rows, windows, load = [], [], None
    print(f"{device.info['name']}, priority {options.priority}, one copy: " + str(ceilings), flush=True)
    for layout in options.layouts:
        for page in options.pages:
            for token_bytes in options.token_bytes:
                case = Case(options, layout, page, token_bytes)
                ways = ways_of(options, case, device)
                for direction in DIRECTIONS:
                    done = measure(options, case, ways, direction)
                    rows += done
                    print(f"{layout:17} page {page:3} x {token_bytes:5} B {direction}  " + "  ".join(
                        f"{row['way']} {row['gbps']:5.1f} GB/s, call {row['call_ms']:.2f}"
                        + (f"/{row['own_ms']:.2f}" if row["own_ms"] else "")
                        + f" ms, device {row['device_ms']:.2f} {row['path']}".rstrip() for row in done
                    ), flush=True)  # fmt: skip
                    if options.beside:
                        from kvswap.bench.loads import load_for

                        load = load or load_for(device, "step")
                        done = beside(options, case, ways, direction, load)
                        windows += done
                        told = (f"{row['way']} {row['slow_down']:.3f}x at {row['gbps']:.1f}" for row in done)
                        print("    beside a step: " + "  ".join(told), flush=True)
                with contextlib.suppress(Exception):
                    case.host.destroy()
                del case, ways
                if options.json:  # after each case: what was measured stays, whatever comes
                    with open(options.json, "w", encoding="utf-8") as file:
                        json.dump({"copy_gbps": ceilings, "rows": rows, "beside": windows}, file, indent=1)
    bad = [row for row in rows if row["wrong_tokens"] or not row["left_out_is_noticed"]]
    print(f"{len(rows)} rows, every byte checked: {len(bad)} wrong", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
