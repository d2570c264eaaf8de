"""KV-cache blocks between GPU and host memory as vLLM offloads them: jobs, submitted and collected.

    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, page_size_bytes), ...], [[CanonicalKVCacheRef(0, page)]])
    handlers = CpuGpuOffloadingHandlers(caches, block_size_factor=4, num_cpu_blocks=1000)
    gpu = GPULoadStoreSpec([3, 4, 5], group_sizes=[3], block_indices=[0])
    handlers.gpu_to_cpu_handler.transfer_async(1, (gpu, CPULoadStoreSpec([17])))  # queued on the device by now
    for result in handlers.gpu_to_cpu_handler.get_finished():                   # never blocks
        result.job_id, result.success, result.error

Names and shapes are those of vLLM (vllm/v1/kv_offload), which need not be installed: `kvswap.vllm` is what a vLLM
loads. Tensors are torch's, of a GPU or of the CPU, NumPy's, or anything that speaks DLPack or an array interface.
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
