"""FastDeploy's cache ops by their own names and arguments, and a cache transfer manager.

    from kvswap.fastdeploy import cuda_host_alloc, swap_cache_all_layers

    ptrs = [cuda_host_alloc(num_cpu_blocks * block_nbytes) for _ in caches]
    swap_cache_all_layers(caches, ptrs, num_cpu_blocks, [3, 4], [17, 90], 0, 0)   # GPU blocks 3, 4 -> host 17, 90

The ops are in kvswap.fastdeploy.ops. docs/fastdeploy.md has all of it.
"""

from kvswap.fastdeploy.ops import (
    cuda_host_alloc,
    cuda_host_free,
    swap_cache,
    swap_cache_all_layers,
    swap_cache_all_layers_async,
    swap_cache_layout,
    swap_cache_layout_async,
    swap_cache_per_layer,
    swap_cache_per_layer_async,
)

__all__ = [
    "cuda_host_alloc",
    "cuda_host_free",
    "swap_cache",
    "swap_cache_all_layers",
    "swap_cache_all_layers_async",
    "swap_cache_layout",
    "swap_cache_layout_async",
    "swap_cache_per_layer",
    "swap_cache_per_layer_async",
]
