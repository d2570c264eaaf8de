"""kvswap's copies between device and host memory in a real SGLang: its plugin hook, its cache controllers, its pools.

    python tests/integration/sglang_copies.py SOURCE [--turns 60] [--seed 1] [--device cuda:0]

SOURCE: a folder with SGLang's package in it (pip download --no-deps sglang; unzip), or nothing: the one that is
installed. No GPU is needed: the copies run on streams of a host device, beside the caller. sglang_package.py --copies
runs them below SGLang's radix tree and storage. With --device cuda:0 nothing stands in for CUDA; SGLang's compiled part
(sgl_kernel) need not be there, and what needs it is left out: lists that are not whole pages.

For K and V (MHA) and latents (MLA), in the layouts layer_first, page_first and page_first_direct, with
HiCacheController and with HybridCacheController, random pages are written back and loaded, several requests at once.
When SGLang's LayerDoneCounter reports a layer, every byte that was loaded of it is compared; at the end every byte of
both sides, those that nothing should have touched too. Then: drafts, lists that are not whole pages, copies that fail,
a page that is left out, host memory, an SGLang that kvswap does not know, and removal.
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import logging
import os
import random
import socket
import sys
import threading
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
PAGE, TOKENS, HOST_TOKENS = 16, 1024, 2048
LAYERS, HEADS, HEAD_DIM, LATENT, ROPE = 5, 2, 16, 48, 16
LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", nargs="?", help="folder with SGLang's package; default: the installed one")
    parser.add_argument("--turns", type=int, default=60, help="requests of each combination")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu (streams of a host device), or cuda:0")
    return parser.parse_args()


def prepare(options: argparse.Namespace) -> None:
    """What must be there before SGLang is imported."""
    os.environ.setdefault("SGLANG_LOGGING_LEVEL", "warning")
    os.environ["KVSWAP_SGLANG_COPIES"] = "1"  # sglang_engine then leaves SGLang's own copies out
    warnings.filterwarnings("ignore")
    sys.path[:0] = [str(Path(__file__).parent), *([str(Path(options.source).resolve())] if options.source else [])]
    import torch.distributed as dist

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        place = f"tcp://127.0.0.1:{found.getsockname()[1]}"
    dist.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    Cache.device = options.device
    if options.device != "cpu":
        sys.path.append(str(ROOT / "benchmarks"))
        import bench_sglang

        bench_sglang.Absentees()


class Log(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


class Cache:
    """A device pool, a host pool and one of SGLang's controllers over them."""

    device = "cpu"  # of all
    pinned = False  # the host pools of a CPU

    def __init__(self, kind: str, layout: str, hybrid: bool, drafts: int = 0):
        import torch
        import torch.distributed as dist
        from sglang.srt.managers import cache_controller
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.hicache_storage import PoolName
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
        from sglang.srt.mem_cache.pool_host import common, mha, mla
        from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry

        shape = {"size": TOKENS, "page_size": PAGE, "dtype": torch.bfloat16, "device": self.device}
        shape |= {"enable_memory_saver": False}
        own = {"device_capacity_tokens": TOKENS, "host_token_capacity": HOST_TOKENS, "start_layer": 0}
        own |= {"end_layer": LAYERS, "pin_memory": self.pinned or self.device != "cpu"}

        def pool(layers):
            if kind == "MLA":
                return MLATokenToKVPool(kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, layer_num=layers, **shape)
            return MHATokenToKVPool(head_num=HEADS, head_dim=HEAD_DIM, layer_num=layers, **shape)

        self.pool, self.drafts = pool(LAYERS), [pool(1) for _ in range(drafts)]
        pools = [self.pool, *self.drafts]
        if kind == "MLA":
            infos = [each.get_device_pool_infos()[0].buffer_info for each in pools]
            more = {"draft_buffer_infos": infos[1:], "target_layer_num": LAYERS}
            self.host = mla.MLATokenToKVPoolHost(infos[0], 2.0, 0, PAGE, layout, **more, **own)
            self.parts = [[buffer for each in pools for buffer in each.kv_buffer]]
        else:
            infos = [each._mha_buffer_info() for each in pools]
            self.host = mha.MHATokenToKVPoolHost(infos[0], 2.0, 0, PAGE, layout, draft_buffer_infos=infos[1:], **own)
            self.parts = [[buffer for each in pools for buffer in each.k_buffer]]
            self.parts.append([buffer for each in pools for buffer in each.v_buffer])
        if self.device != "cpu":  # else it stays registered, and the next pool may have the same addresses
            weakref.finalize(self.host, common._cuda_host_unregister, self.host.kv_buffer)
        self.allocator = PagedTokenToKVPoolAllocator(TOKENS, PAGE, torch.bfloat16, self.device, self.pool, False)
        io_backend = "kernel" if layout == "page_first" else "direct"
        given = (PAGE, dist.group.WORLD, threading.Event())
        if hybrid:
            name = next(iter(PoolName))
            entry = PoolEntry(
                name, self.host, self.pool, lambda layer: layer if layer < LAYERS + drafts else None,
                is_primary_index_anchor=True, packed_draft_device_pools=tuple(self.drafts),
            )  # fmt: skip
            self.controller = HybridCacheController(
                self.allocator, HostPoolGroup([entry]), *given, io_backend=io_backend
            )
        else:
            self.controller = cache_controller.HiCacheController(
                self.allocator, self.host, *given, io_backend=io_backend
            )
        self.layout, self.layers = layout, LAYERS + drafts
        generator = torch.Generator().manual_seed(7)
        for tensor in (self.host.kv_buffer, *(buffer for part in self.parts for buffer in part)):
            bits = tensor.view(torch.int16)
            bits.copy_(torch.randint(-30000, 30000, bits.shape, generator=generator).to(torch.int16))

    def reads_ids(self):
        """Whether a kernel reads the ids where they are, on a GPU, and no copy of a block is counted; else they are
        moved to host memory from now on, for faults. SGLang moves those of page_first the other way."""
        if self.device != "cpu" and self.layout == "page_first":
            return True
        self.controller.l2_transfer_engine._takes_device_ids = False
        return False

    def device_rows(self, part, layer):
        import torch

        buffer = self.parts[part][layer].view(torch.int16)
        return buffer.reshape(len(buffer), -1)

    def host_rows(self, part, layer):
        """All tokens of a layer, by SGLang's own views."""
        import torch

        bits = self.host.kv_buffer.view(torch.int16)
        if len(self.parts) == 2:
            bits = bits[part]
        if self.layout == "layer_first":
            rows = bits[layer]
        elif self.layout == "page_first":
            rows = bits[:, layer]
        else:
            rows = bits[:, layer].reshape(HOST_TOKENS, *bits.shape[3:])
        return rows.reshape(HOST_TOKENS, -1)

    def each(self):
        return [(part, layer) for part in range(len(self.parts)) for layer in range(self.layers)]

    def picture(self):
        return {at: (self.device_rows(*at).cpu().clone(), self.host_rows(*at).clone()) for at in self.each()}

    def same(self, picture):
        return all(
            bool((self.device_rows(*at).cpu() == device).all()) and bool((self.host_rows(*at) == host).all())
            for at, (device, host) in picture.items()
        )

    def settle(self):
        """As SGLang's scheduler: until all acknowledgements are there."""
        for queue in (self.controller.ack_write_queue, self.controller.ack_load_queue):
            while queue:
                ack = queue.pop(0)
                ack.finish_event.synchronize()
                assert ack.finish_event.query()
                if ack.timing_enabled:
                    assert ack.start_event.elapsed_time(ack.finish_event) >= 0

    def await_layers(self, producer, check):
        from sglang.srt.managers import cache_controller

        counter = self.controller.layer_done_counter
        counter.set_consumer(producer)
        for layer in range(LAYERS):
            counter.wait_until(layer)
            cache_controller.device_module.current_stream().synchronize()
            check(layer)


def copies_on() -> str:
    """kvswap's device."""
    return "host:0" if Cache.device == "cpu" else Cache.device


def requests(cache: Cache, turns: int, chosen: random.Random) -> int:
    """Random write-backs and loads; returns the bytes that were compared."""
    import torch

    kept, compared, wanted = [], 0, cache.picture()
    for _ in range(turns):
        free = cache.allocator.available_size() // PAGE
        for _ in range(chosen.randrange(1, 3)):
            count = chosen.randrange(1, 9)
            if count > free:
                break
            tokens = cache.allocator.alloc(count * PAGE)
            host = cache.controller.write(tokens, node_id=len(kept))
            if host is None:
                cache.allocator.free(tokens)
                break
            for device, rows in wanted.values():
                rows[host] = device[tokens.cpu()]
            kept.append((tokens, host))
            free -= count
        if kept and chosen.random() < 0.7:
            cache.settle()
            loads, chosen_nodes = [], chosen.sample(kept, min(len(kept), chosen.randrange(1, 4)))
            for _, host in chosen_nodes:
                tokens = cache.controller.load(host)
                if tokens is not None:
                    loads.append((tokens, host))
            for tokens, host in loads:
                for device, rows in wanted.values():
                    device[tokens.cpu()] = rows[host]
            producer = cache.controller.start_loading()

            def check(layer, loads=loads):
                nonlocal compared
                for part in range(len(cache.parts)):
                    for tokens, _ in loads:
                        rows = cache.device_rows(part, layer)[tokens].cpu()
                        assert torch.equal(rows, wanted[part, layer][0][tokens.cpu()]), f"layer {layer}: wrong bytes"
                        compared += rows.nbytes

            if producer >= 0:
                cache.await_layers(producer, check)
            for tokens, _ in loads:
                cache.allocator.free(tokens)
        cache.settle()
        while kept and chosen.random() < 0.6:
            tokens, host = kept.pop(chosen.randrange(len(kept)))
            cache.allocator.free(tokens)
            cache.controller.evict_host(host)
    cache.settle()
    assert cache.same(wanted), "bytes that nothing should have touched differ"
    return compared + sum(device.nbytes + host.nbytes for device, host in wanted.values())


def hooked(log: Log) -> None:
    import sglang_plugin
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache import l2_transfer

    own = l2_transfer.L2TransferEngine
    sglang_plugin.load_plugins(KVSWAP_SGLANG_COPIES="0")
    assert cache_controller.L2TransferEngine is own, "without the switch"
    sglang_plugin.load_plugins(KVSWAP_SGLANG_COPIES="1", KVSWAP_SGLANG_HOST_MEMORY="1")
    assert l2_transfer.L2TransferEngine is cache_controller.L2TransferEngine is not own
    assert [line for line in log.lines if "kvswap's now" in line] == [
        "SGLang's copies between device and host memory are kvswap's now",
        "SGLang's host memory is kvswap's now",
    ], log.lines


def removed(log: Log) -> None:
    import sglang_plugin
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache import l2_transfer
    from sglang.srt.mem_cache.pool_host import common

    from kvswap.sglang import unregister

    assert len(unregister()) == 4
    assert l2_transfer.L2TransferEngine is cache_controller.L2TransferEngine
    assert l2_transfer.L2TransferEngine.__module__ == "sglang.srt.mem_cache.l2_transfer"
    assert common.HostTensorAllocator.__module__.startswith("sglang.")
    cache = Cache("MHA", "layer_first", False)
    assert type(cache.controller.l2_transfer_engine) is l2_transfer.L2TransferEngine
    kept = vars(l2_transfer.L2TransferEngine)["_submission"]
    del l2_transfer.L2TransferEngine._submission
    log.lines.clear()
    sglang_plugin.load_plugins()
    l2_transfer.L2TransferEngine._submission = kept
    assert "is set, but this SGLang is not known: L2TransferEngine._submission" in log.lines[0], log.lines
    assert l2_transfer.L2TransferEngine.__module__.startswith("sglang.")
    sglang_plugin.load_plugins()
    assert l2_transfer.L2TransferEngine.__name__ == "CopyEngine", "and again"


def not_pages(log: Log) -> None:
    """Such a list is copied by SGLang's own way, for which something stands in here."""
    import sglang_engine
    import torch
    from sglang.srt.mem_cache.l2_transfer import L2Transfer
    from sglang.srt.mem_cache.pool_host import mha

    from kvswap.sglang._places import device_blocks_of

    cache = Cache("MHA", "layer_first", False)
    mha.transfer_kv_direct, calls = sglang_engine._rows_of_layers, []

    def counted(**given):
        calls.append(len(given["src_layers"]))
        sglang_engine._rows_of_layers(**given)

    mha.transfer_kv_direct = counted
    host, tokens = torch.arange(3, 3 + 2 * PAGE), torch.randperm(TOKENS)[: 2 * PAGE]
    engine = cache.controller.l2_transfer_engine
    engine.submit_device_to_host([L2Transfer(cache.host, cache.pool, host, tokens)]).finish_event.synchronize()
    for at in cache.each():
        assert torch.equal(cache.host_rows(*at)[host], cache.device_rows(*at)[tokens])
    call = [L2Transfer(cache.host, cache.pool, host, tokens)]
    engine.submit_host_to_device(call, transfer_layer_id_max=LAYERS).finish_event.synchronize()
    assert calls == [2 * LAYERS] + [2] * LAYERS, calls
    del mha.transfer_kv_direct
    rows = device_blocks_of(torch.arange(3 * PAGE), PAGE)  # as on a GPU, by the same operation
    assert rows.shape == (3, PAGE) and rows[1].tolist() == list(range(PAGE, 2 * PAGE))


def faults(log: Log) -> None:
    import kvswap
    from kvswap import testing

    device = kvswap.Device(copies_on())
    for layout in LAYOUTS:
        for direction in ("write", "load"):
            cache = Cache("MHA", layout, True)
            fault = {"kind": "call", "operation": "launch"} if cache.reads_ids() else {"kind": "copy"}
            tokens = cache.allocator.alloc(4 * PAGE)
            host = cache.controller.write(tokens, node_id=1)
            cache.settle()
            try:
                with testing.fault(device, action="fail", every=1, **fault):
                    if direction == "write":
                        cache.controller.write(tokens, node_id=2)
                    else:
                        cache.controller.load(host)
                        cache.controller.start_loading()
                    cache.settle()
            except kvswap.Error as error:
                refused = cache.device != "cpu" and isinstance(error, kvswap.DeviceError)  # by the driver, in the call
                assert refused or "SGLang's acknowledgement of a copy cannot report a failure" in str(error), error
            else:
                raise AssertionError(f"{layout}, {direction}: a copy failed, and SGLang was not told")


def left_out(log: Log) -> None:
    import torch

    import kvswap
    from kvswap import testing

    for layout in LAYOUTS:
        cache = Cache("MHA", layout, True)
        if cache.reads_ids():
            print(f"  {layout}: none left out, since a kernel makes no single copies that could be skipped", flush=True)
            continue
        tokens = cache.allocator.alloc(4 * PAGE)
        with testing.fault(kvswap.Device(copies_on()), "copy", "skip", nth=3):
            host = cache.controller.write(tokens, node_id=1)
            cache.settle()
        assert not all(
            torch.equal(cache.host_rows(*at)[host], cache.device_rows(*at)[tokens].cpu()) for at in cache.each()
        ), "a copy was left out, and this test did not notice"


class OnDevice:
    """Blocks in memory that a host device reads as its own: its kernels take them, and the call does not."""

    def __init__(self, blocks):
        self.blocks = blocks.astype("int64")

    @property
    def __cuda_array_interface__(self):
        shape = {"shape": self.blocks.shape, "typestr": "<i8", "data": (self.blocks.ctypes.data, False)}
        return {**shape, "strides": None, "version": 3, "stream": None}


def device_ids(turns: int, chosen: random.Random) -> int:
    """The same requests with the device's ids as a GPU has them; 0: this kvswap takes none."""
    import kvswap.typing
    from kvswap.sglang._copies import CopyEngine

    if not hasattr(kvswap.typing, "GpuIds"):
        return 0
    own, compared = CopyEngine._ids, 0

    def on_device(engine, transfer, *more):
        found = own(engine, transfer, *more)
        return found and (OnDevice(found[0]), found[1])

    CopyEngine._ids = on_device
    for kind in ("MHA", "MLA"):
        for layout in LAYOUTS:
            compared += requests(Cache(kind, layout, True), turns, chosen)
    CopyEngine._ids = own
    return compared


def main() -> int:
    options = parse()
    prepare(options)
    if options.device == "cpu":
        import sglang_engine  # noqa: F401 (what stands in comes before SGLang's modules)
    import sglang
    import sglang_plugin

    log = Log()
    logging.getLogger("kvswap.sglang").addHandler(log)
    logging.getLogger("kvswap.sglang").setLevel(logging.INFO)
    from sglang.srt.managers import cache_controller

    cache_controller.get_parallel = lambda: SimpleNamespace(attn_dcp_size=1, attn_dcp_rank=0)
    if options.device == "cpu":
        sglang_plugin.use_streams()
    print(f"SGLang {sglang.__version__}, copies by kvswap on {copies_on()}, {options.turns} requests each", flush=True)
    hooked(log)
    print("  the plugin hook replaces SGLang's engine with the switch, and not without", flush=True)
    chosen, total = random.Random(options.seed), 0
    for kind in ("MHA", "MLA"):
        for layout in LAYOUTS:
            for hybrid in (False, True):
                total += requests(Cache(kind, layout, hybrid), options.turns, chosen)
            for drafts in (1, 3):
                total += requests(Cache(kind, layout, True, drafts), options.turns // 4, chosen)
            print(f"  {kind}, {layout}: HiCacheController, HybridCacheController, drafts: all bytes right", flush=True)
    if options.device == "cpu":  # on a GPU all of the above had them
        on_device = device_ids(options.turns // 2, chosen)
        total += on_device
        what = "all bytes right" if on_device else "this kvswap takes none, and SGLang copies"
        print(f"  ids in device memory, of a host device: {what}", flush=True)
    assert not any("stays with SGLang's own copies" in line for line in log.lines), log.lines
    assert any("host memory of" in line and "is kvswap's" in line for line in log.lines), "its host memory"
    own_way = (not_pages, "a list that is not whole pages is copied by SGLang's own way")
    for step, what in (
        *([own_way] if options.device == "cpu" else []),
        (faults, "a copy that fails raises in SGLang's scheduler, in each layout and direction"),
        (left_out, "a page that is left out in silence is found"),
        (removed, "removal restores SGLang's own; an SGLang that is not known is told, and left alone"),
    ):
        step(log)
        print(f"  {what}", flush=True)
    print(f"  {total / 1e6:.0f} MB compared: all right", flush=True)
    return 0


if __name__ == "__main__":
    result = main()
    sys.stdout.flush()
    os._exit(result)
