"""FastDeploy's cache ops by their own names and arguments, and a cache transfer manager.

    from kvswap.fastdeploy import cuda_host_alloc, swap_cache_all_layers

    ptrs = [cuda_host_alloc(num_cpu_blocks * block_nbytes) for _ in caches]
    swap_cache_all_layers(caches, ptrs, num_cpu_blocks, [3, 4], [17, 90], 0, 0)   # GPU blocks 3, 4 -> host 17, 90

The swap ops are in kvswap.fastdeploy.ops, the segments in kvswap.fastdeploy.ipc. docs/fastdeploy.md has all of it.
"""

from kvswap._devices import log_build
from kvswap.fastdeploy import ops
from kvswap.fastdeploy._install import install
from kvswap.fastdeploy.ipc import get_data_ptr_ipc, set_data_ipc, share_external_data, unset_data_ipc
from kvswap.fastdeploy.ops import *  # noqa: F403

__all__ = ["get_data_ptr_ipc", "install", "set_data_ipc", "share_external_data", "unset_data_ipc"]
__all__ += ops.__all__

log_build()
