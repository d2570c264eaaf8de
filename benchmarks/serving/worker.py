"""What is done in an engine's workers, each with a rank's part of the model: vLLM mixes Worker into its own class."""

from __future__ import annotations

import os
import zlib
from math import sqrt
from pathlib import Path
from typing import Any

CPU_FOLDER = "SERVING_CPU"  # in the environment: cpu_platform.install()'s folder; empty: there is a GPU

if os.environ.get(CPU_FOLDER):
    from serving import cpu_platform

    cpu_platform.install(Path(os.environ[CPU_FOLDER]))


class Worker:
    """Called by collective_rpc(), so the names must be none of vLLM's."""

    vllm_config: Any
    model_runner: Any

    def _serving_caches(self) -> list[Any]:
        """A tensor a layer."""
        import torch

        found = []
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            cache = getattr(layer, "kv_cache", None)
            cache = cache[0] if isinstance(cache, (list, tuple)) and cache else cache
            if isinstance(cache, torch.Tensor) and cache.numel():
                found.append(cache)
        return found

    def _serving_rows(self, blocks: int) -> list[Any]:
        """Each layer's part of the cache once, a row a block: layers of several groups may have the same memory."""
        found = {}
        for cache in self._serving_caches():
            found[cache.data_ptr()] = cache if cache.shape[0] == blocks else cache.transpose(0, 1)
        return list(found.values())

    def serving_about(self) -> dict[str, Any]:
        """What vLLM chose."""
        caches = self._serving_caches()
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        return {
            "layers": len(caches), "cache_shape": list(caches[0].shape), "runner": type(self.model_runner).__module__,
            "attention": sorted({type(layer.impl).__name__ for layer in layers if hasattr(layer, "impl")}),
        }  # fmt: skip

    def serving_scale_weights(self, norm: float) -> None:
        """vLLM's dummy weights are near 0, where what attention reads would not show. These do not vanish, and are the
        same in each engine. norm: of vectors."""
        import torch

        with torch.inference_mode():
            for name, value in self.model_runner.get_model().named_parameters():
                if value.dim() == 1:
                    value.fill_(norm)
                    continue
                made = torch.Generator(value.device).manual_seed(zlib.crc32(name.encode()))
                gain = 2.0 if "qkv_proj" in name else 1.0
                value.normal_(0.0, 1.0 if "embed" in name else gain / sqrt(value.shape[-1]), generator=made)

    def serving_synchronize(self) -> None:
        """Until the GPU is idle."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def serving_overwrite(self) -> None:
        """The cache's bytes become useless."""
        for cache in self._serving_caches():
            cache.fill_(1.0)
        self.serving_synchronize()

    def serving_sums(self, blocks: list[int], of: int) -> list[int]:
        """One number for the bytes of each of these blocks in all layers; of: how many the cache has."""
        import torch

        total: Any = None
        weights: dict[int, Any] = {}
        for rows in self._serving_rows(of):
            page = rows.index_select(0, torch.tensor(blocks, device=rows.device)).flatten(1).view(torch.int64)
            if page.shape[1] not in weights:
                made = torch.Generator("cpu").manual_seed(7)
                drawn = torch.randint(-(2**62), 2**62, (page.shape[1],), generator=made) | 1
                weights[page.shape[1]] = drawn.to(rows.device)
            part = (page * weights[page.shape[1]]).sum(1)
            total = part if total is None else total * 1_000_003 + part
        found: list[int] = total.tolist()
        return found

    def serving_links(self) -> dict[str, int]:
        """Under kvswap_lend: how many lend to this rank, and to how many it lends; bytes of both directions so far: got
        over others' links, and given over its own."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group()
        member, lending = worker._watch.handlers[0].member, worker._lending()
        stats = member.stats()
        loans = [loan for loan in lending.loans if loan.lends] if lending else []
        given = [loan.brought for loan in loans] or [(stats["brought_for_others_d2h"], stats["brought_for_others_h2d"])]
        return {
            "lenders": len(member.peers), "borrowers": len(loans) if lending else len(member.peers),
            "registered": sum(loan.registered_nbytes for loan in loans),
            "got": stats["brought_by_others_d2h"] + stats["brought_by_others_h2d"],
            "given": sum(map(sum, given)),
        }  # fmt: skip

    def serving_skip_one_copy(self) -> None:
        """kvswap leaves a copy out, until serving_skip_none()."""
        import torch

        import kvswap
        from kvswap import testing

        name = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "host:0"
        self._serving_fault = testing.fault(kvswap.Device(name), "copy", "skip")
        self._serving_fault.__enter__()

    def serving_skip_none(self) -> None:
        """Of serving_skip_one_copy()."""
        self._serving_fault.__exit__(None, None, None)
