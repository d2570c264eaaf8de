"""What is done in SGLang's scheduler process: Scheduler gets a method that SGLang's collective_rpc() calls."""

from __future__ import annotations

import importlib
import json
import sys
import time
import zlib
from array import array
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

from serving_sglang.ways import PAGE

INTEGRATION = Path(__file__).resolve().parents[2] / "tests" / "integration"
PATIENCE = 60.0


def run(server_args: Any, *arguments: Any, **more: Any) -> None:
    """In the place of run_scheduler_process, which it calls."""
    if server_args.device == "cpu":
        _without_a_gpu()
    from sglang.srt.managers import scheduler

    scheduler.Scheduler.serving_look = _look
    scheduler.run_scheduler_process(server_args, *arguments, **more)


def _without_a_gpu() -> None:
    """SGLang's HiCache is for GPUs: streams of a host device, and copies that stand in for SGLang's own."""
    sys.path.insert(0, str(INTEGRATION))
    importlib.import_module("sglang_engine")
    importlib.import_module("sglang_plugin").use_streams()
    from sglang.srt.managers import cache_controller

    wait = cache_controller.LayerDoneCounter.wait_until

    def wait_until(self: Any, layer: int) -> None:
        wait(self, layer)
        cache_controller.device_module.current_stream().synchronize()  # the CPU computes in no stream

    cache_controller.LayerDoneCounter.wait_until = wait_until


def _look(self: Any, call: str, given: str, answer: str) -> None:
    """One of Looks' methods. given: its arguments, and answer: a file for what it returns, as JSON."""
    if not hasattr(self, "serving_looks"):
        self.serving_looks = Looks(self)
    made = getattr(self.serving_looks, call)(**json.loads(given))
    Path(answer).write_text(json.dumps(made))


class Looks:
    """At a scheduler, and at its caches. All but about() and take() want a scheduler with nothing to do."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.tree = scheduler, scheduler.tree_cache
        self.allocator = scheduler.token_to_kv_pool_allocator
        pool = self.allocator.get_kvcache()
        self.buffers = [*pool.k_buffer, *pool.v_buffer]
        self.transfers = self.tree.cache_controller.l2_transfer_engine
        self._calls: dict[str, list[float]] = {"load": [], "store": []}
        self._tokens = dict.fromkeys(self._calls, 0)
        self._left_out = 0
        for kind, name in (("load", "submit_host_to_device"), ("store", "submit_device_to_host")):
            setattr(self.transfers, name, self._watched(kind, getattr(self.transfers, name)))

    def _watched(self, kind: str, submit: Callable[..., Any]) -> Callable[..., Any]:
        def timed(transfers: list[Any], **more: Any) -> Any:
            if kind == "load" and self._left_out:
                self._left_out -= 1
                transfers = [
                    each._replace(host_indices=each.host_indices[:-PAGE], device_indices=each.device_indices[:-PAGE])
                    for each in transfers
                ]
            begin = time.perf_counter()
            try:
                return submit(transfers, **more)
            finally:
                self._calls[kind].append(time.perf_counter() - begin)
                self._tokens[kind] += sum(len(each.host_indices) for each in transfers)

        return timed

    def take(self) -> dict[str, Any]:
        """Milliseconds in each submission since the last call, and tokens."""
        made = {
            kind: {"submit_ms": [round(1e3 * value, 4) for value in each], "tokens": self._tokens[kind]}
            for kind, each in self._calls.items()
            if each
        }
        for kind, each in self._calls.items():
            each.clear()
            self._tokens[kind] = 0
        return made

    def about(self) -> dict[str, Any]:
        """What SGLang chose."""
        host = self.tree.cache_controller.mem_pool_host
        host = host.entries[0].host_pool if hasattr(host, "entries") else host
        runner = self.scheduler.tp_worker.model_runner
        return {
            "engine_of_copies": type(self.transfers).__module__, "io": self.transfers.io_backend,
            "host_pool": type(host).__name__, "allocator": type(host.allocator).__name__, "layout": host.layout,
            "jit": host.can_use_jit, "jit_write_back": host.can_use_write_back_jit, "host_tokens": host.size,
            "gpu_tokens": self.allocator.size, "page": self.tree.page_size, "overlap": self.scheduler.enable_overlap,
            "attention": type(runner.attn_backend).__name__, "tree": type(self.tree.tree_core).__name__,
        }  # fmt: skip

    def scale_weights(self) -> None:
        """SGLang's dummy weights are near 0, where what attention reads would not show. These do not vanish, and are
        the same in each engine."""
        import torch

        with torch.inference_mode():
            for name, value in self.scheduler.tp_worker.model_runner.model.named_parameters():
                if value.dim() == 1:
                    value.fill_(1.0)
                    continue
                made = torch.Generator(value.device).manual_seed(zlib.crc32(name.encode()))
                gain = 2.0 if "qkv_proj" in name else 1.0
                value.normal_(0.0, 1.0 if "embed" in name else gain / sqrt(value.shape[-1]), generator=made)

    def settle(self) -> bool:
        """Until nothing is copied; whether the scheduler has nothing to do either."""
        limit = time.monotonic() + PATIENCE
        while self.tree.ongoing_write_through or self.tree.ongoing_load_back:
            self.tree.check_hicache_events()
            if time.monotonic() > limit:
                raise TimeoutError("copies do not end")
            time.sleep(0.001)
        return bool(self.scheduler.is_fully_idle())

    def forget(self, overwrite: bool = False) -> int:
        """The GPU keeps nothing, the host what it has: tokens left there. overwrite: its bytes become useless."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.settle()
        self.tree.evict(EvictParams(num_tokens=self.allocator.size))
        self.settle()
        if overwrite:
            for buffer in self.buffers:
                buffer.fill_(1.0)
            self._synchronize()
        return int(self.allocator.size - self.allocator.available_size())

    def clear(self) -> bool:
        """Neither the GPU nor the host keeps anything."""
        self.settle()
        return bool(self.scheduler.flush_cache())

    def leave_out(self) -> None:
        """The last page of the next load is not copied."""
        self._left_out = 1

    def left_out(self) -> bool:
        """Whether that has happened. It will not any more."""
        done, self._left_out = not self._left_out, 0
        return done

    def sums(self, prompts: list[list[int]]) -> list[list[int]]:
        """One number for the bytes of each page of these prompts that the GPU has, in all layers."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        self.settle()
        self._synchronize()
        made = []
        for tokens in prompts:
            found = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
            indices = self.tree.path_device_indices(found.last_device_node)[: found.device_prefix_len]
            made.append(self._sums(indices))
        return made

    def _sums(self, indices: Any) -> list[int]:
        import torch

        total: Any = torch.zeros(len(indices), dtype=torch.int64, device=indices.device)
        weights: Any = None
        for buffer in self.buffers:
            rows = buffer.reshape(len(buffer), -1).view(torch.int64).index_select(0, indices)
            if weights is None or len(weights) != rows.shape[1]:
                made = torch.Generator("cpu").manual_seed(7)
                weights = (torch.randint(-(2**62), 2**62, (rows.shape[1],), generator=made) | 1).to(rows.device)
            total = total * 1_000_003 + (rows * weights).sum(1)
        places = (torch.arange(PAGE, device=total.device) * 2 + 1) * 982_451_653
        found: list[int] = (total.view(-1, PAGE) * places).sum(1).tolist()
        return found

    def _synchronize(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
