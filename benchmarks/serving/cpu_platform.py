"""vLLM's CPU platform with PyTorch in the place of its compiled part: to try this benchmark without a GPU. Slow."""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any


def install(folder: Path) -> None:
    """Before vLLM is imported: vLLM takes the CPU platform if its installed version says so. folder: for that."""
    info = folder / "vllm-0+cpu.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0+cpu\n")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    importlib.invalidate_caches()
    sys.modules["vllm._C"] = types.ModuleType("vllm._C")
    import torch
    import vllm._custom_ops as ops

    torch.accelerator.current_device_index = lambda: 0  # the tiering spec asks for its rank by it
    compiled = torch.ops._C
    compiled.init_cpu_memory_env = lambda *_: None
    compiled.cpu_attn_has_isa = lambda *_: False
    compiled.compute_slot_mapping_kernel_impl = _slots
    compiled.silu_and_mul = _silu_and_mul
    compiled.gelu_tanh_and_mul = _gelu_tanh_and_mul
    compiled.greedy_argmax = lambda logits: logits.argmax(-1)
    ops._supports_onednn = False
    ops.cpu_attn_get_scheduler_metadata = lambda **_: torch.zeros(1)
    ops.cpu_attn_reshape_and_cache = _store
    ops.cpu_attention_with_kv_cache = _attend
    ops.rotary_embedding = _rotate
    from vllm.v1.attention.backends import cpu_attn

    sizes = staticmethod(lambda *_: [cpu_attn.MultipleOf(16)])  # vLLM's compiled part takes 32 from 0.33 on
    cpu_attn.CPUAttentionBackend.get_supported_kernel_block_sizes = sizes
    from vllm.v1.simple_kv_offload import worker

    cuda = types.SimpleNamespace(Stream=_Stream, current_stream=_Stream)
    worker.torch = types.SimpleNamespace(**{**vars(torch), "cuda": cuda, "Event": _Stream})


class _Stream:
    """Or an event, of SimpleCPUOffloadConnector's worker: kvswap's copies do not look at them."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def record(self, *_: Any) -> None:
        pass


def _slots(starts: Any, positions: Any, table: Any, out: Any, block: int) -> None:
    out.fill_(-1)
    for row in range(len(starts) - 1):
        tokens = slice(int(starts[row]), int(starts[row + 1]))
        at = positions[tokens]
        out[tokens] = table[row][(at // block).long()].long() * block + at % block


def _silu_and_mul(out: Any, x: Any) -> None:
    from torch.nn import functional

    gate, up = x.chunk(2, -1)
    out.copy_(functional.silu(gate) * up)


def _gelu_tanh_and_mul(out: Any, x: Any) -> None:
    from torch.nn import functional

    gate, up = x.chunk(2, -1)
    out.copy_(functional.gelu(gate, approximate="tanh") * up)


def _store(key: Any, value: Any, keys: Any, values: Any, slots: Any, isa: Any, **_: Any) -> None:
    del isa
    taken = slots >= 0
    block, at = slots[taken].long() // keys.shape[2], slots[taken].long() % keys.shape[2]
    keys[block, :, at, :] = key[: len(slots)][taken]
    values[block, :, at, :] = value[: len(slots)][taken]


def _attend(
    *, query: Any, key_cache: Any, value_cache: Any, output: Any, query_start_loc: Any, seq_lens: Any, scale: float,
    block_table: Any, **_: Any,
) -> None:  # fmt: skip
    import torch
    from torch.nn import functional

    for row, length in enumerate(seq_lens.tolist()):
        begin, end = int(query_start_loc[row]), int(query_start_loc[row + 1])
        if begin == end:
            continue
        blocks = block_table[row][: -(-length // key_cache.shape[2])].long()
        keys, values = (_gathered(cache, blocks, length, query.shape[1]) for cache in (key_cache, value_cache))
        seen = torch.arange(length)[None, :] <= (torch.arange(end - begin) + length - (end - begin))[:, None]
        queries = query[begin:end].permute(1, 0, 2).float()
        made = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=scale)
        output[begin:end] = made.permute(1, 0, 2).reshape(output[begin:end].shape).to(output.dtype)


def _gathered(cache: Any, blocks: Any, length: int, heads: int) -> Any:
    """(heads, length, numbers of a head) of the cache's blocks."""
    flat = cache[blocks].permute(1, 0, 2, 3).flatten(1, 2)[:, :length]
    return flat.repeat_interleave(heads // flat.shape[0], 0).float()


def _rotate(positions: Any, query: Any, key: Any, head: int, table: Any, neox: bool) -> None:
    del neox
    cos, sin = (half[:, None] for half in table[positions].chunk(2, -1))
    for each in (query, key):
        if each is None:
            continue
        heads = each.view(each.shape[0], -1, head)
        left, right = (half.clone() for half in heads.chunk(2, -1))
        heads[..., : head // 2] = left * cos - right * sin
        heads[..., head // 2 :] = right * cos + left * sin
