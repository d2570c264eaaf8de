"""Offloading of KV-cache blocks between GPU and host memory with vLLM's classes: jobs are submitted and collected.

    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, page_size_bytes), ...], [[CanonicalKVCacheRef(0, page)]])
    handlers = CpuGpuOffloadingHandlers(caches, block_size_factor=4, num_cpu_blocks=1000)
    gpu = GPULoadStoreSpec([3, 4, 5], group_sizes=[3], block_indices=[0])
    handlers.gpu_to_cpu_handler.transfer_async(1, (gpu, CPULoadStoreSpec([17])))  # queued on the device by now
    for result in handlers.gpu_to_cpu_handler.get_finished():                   # never blocks
        result.job_id, result.success, result.error

Names and shapes are vLLM's (vllm/v1/kv_offload: base.py and cpu/gpu_worker.py; releases 0.26 and 0.30 to 0.33). vLLM
need not be installed; vLLM itself loads `kvswap.vllm`. Tensors are torch's on a GPU or the CPU, NumPy arrays, or
objects with DLPack or an array interface.
"""

from kvswap.offload._handlers import CpuGpuOffloadingHandlers, OffloadingWorker
from kvswap.offload._jobs import HandlerStats, Job, SingleDirectionOffloadingHandler
from kvswap.offload._specs import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    TransferResult,
)

__all__ = [
    "BlockIDsLoadStoreSpec",
    "CPULoadStoreSpec",
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "CanonicalPageMapping",
    "CopyRun",
    "CpuGpuOffloadingHandlers",
    "GPULoadStoreSpec",
    "HandlerStats",
    "Job",
    "LoadStoreSpec",
    "OffloadingWorker",
    "SingleDirectionOffloadingHandler",
    "TransferResult",
]
