"""What is compared, and under what: the environment and the arguments of sglang.Engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.models import Model

PAGE = 16
NAMES = {
    "sglang": "SGLang's HiCache",
    "kvswap": "the same, copies and host memory by kvswap",
    "kvswap-copies": "the same, copies by kvswap, host memory by SGLang",
}
LAYOUTS = ("page_first", "layer_first", "page_first_direct")  # SGLang's default first


@dataclass(frozen=True)
class Sizes:
    """host_gb: of each engine's host pool. pace: tokens that a decoder makes between two requests beside the decoders.
    graphs: largest batch of a CUDA graph; 0: none."""

    model: Model = field(default_factory=Model)
    gpu_tokens: int = 65536
    host_gb: int = 20
    prompts: int = 32
    length: int = 4096
    hits: int = 12
    truth: int = 6
    decoders: int = 32
    decode_tokens: int = 128
    pace: int = 4
    graphs: int = 40
    device: str = "cuda"


TOY = Sizes(
    model=Model(layers=2, kv_heads=2, hidden=256),
    gpu_tokens=2048,
    host_gb=1,
    prompts=4,
    length=200,
    hits=2,
    truth=2,
    decoders=2,
    decode_tokens=12,
    graphs=0,
    device="cpu",
)


def split(way: str) -> tuple[str, str]:
    """kvswap:layer_first is kvswap with that layout of the host memory; without one, SGLang's default."""
    name, _, layout = way.partition(":")
    layout = layout or LAYOUTS[0]
    if name not in NAMES or layout not in LAYOUTS:
        raise SystemExit(f"no way {way!r}; there are {', '.join(NAMES)}, and layouts {', '.join(LAYOUTS)}")
    return name, layout


def environment(way: str) -> dict[str, str]:
    """Of the engine's processes, before SGLang is imported."""
    name, _ = split(way)
    made = {
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",  # the pack has the newest that loads into its PyTorch
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",  # the extension in Rust wants SGLang's own PyTorch
        "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",  # it takes a minute
        "TOKENIZERS_PARALLELISM": "false",
        "KVSWAP_LOG": "info",
    }
    if name.startswith("kvswap"):
        made["KVSWAP_SGLANG_COPIES"] = "1"
    if name == "kvswap":
        made["KVSWAP_SGLANG_HOST_MEMORY"] = "1"
    return made


def arguments(way: str, sizes: Sizes, folder: Path, more: dict[str, Any]) -> dict[str, Any]:
    """Of sglang.Engine. more: as the command line has them."""
    _, layout = split(way)
    made: dict[str, Any] = {
        "model_path": str(sizes.model.write(folder)), "load_format": "dummy", "skip_tokenizer_init": True,
        "dtype": "bfloat16", "context_length": 8192, "max_total_tokens": sizes.gpu_tokens, "page_size": PAGE,
        "max_running_requests": 64, "chunked_prefill_size": 8192, "mem_fraction_static": 0.88, "random_seed": 0,
        "attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none",
        "enable_hierarchical_cache": True, "hicache_size": sizes.host_gb, "hicache_write_policy": "write_through",
        "hicache_mem_layout": layout, "hicache_io_backend": "direct" if layout == "page_first_direct" else "kernel",
        "disable_prefill_cuda_graph": True, "log_level": "info",
    }  # fmt: skip
    if sizes.graphs:
        made["cuda_graph_bs_decode"] = [size for size in (1, 2, 4, 8, 16, 24, 32, 40, 48, 64) if size <= sizes.graphs]
    else:
        made["disable_cuda_graph"] = True
    if sizes.device == "cpu":
        made |= {"device": "cpu", "attention_backend": "torch_native", "mem_fraction_static": 0.5}
    return made | more
