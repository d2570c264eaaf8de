"""TensorRT-LLM's KVCacheTransferManager, and the copy functions of its kv_cache_manager_v2.

    from kvswap.trtllm import KVCacheBlockPool, KVCacheTransferManager

    pool = KVCacheBlockPool(gpu_tensor, host_tensor, 4096, 16384, num_layers=32, kv_factor=2, num_kv_heads=8,
                            tokens_per_block=32, size_per_head=128, dtype="fp16")
    manager = KVCacheTransferManager([pool], device="cuda:0")
    # in every step, as in TensorRT-LLM:
    manager.sync_with_compute(model_stream)    # TensorRT-LLM: syncWithBufferManager()
    manager.offload(3, 17)                     # primary block 3 -> secondary block 17
    manager.onboard([17, 18], [4, 5])          # secondary blocks 17, 18 -> primary blocks 4, 5: one transfer
    manager.sync_transfers(model_stream)       # TensorRT-LLM: syncTransfers()
    # then queue the model's kernels on model_stream

Names and behaviour follow TensorRT-LLM's cpp/include/tensorrt_llm/batch_manager/kvCacheTransferManager.h and
cpp/tensorrt_llm/batch_manager/kvCacheTransferManager.cpp, in Python's spelling. Differences: the pools are given once,
to the constructor; a batch of blocks is one call; each call returns a Transfer, which can be waited for, also layer by
layer, and reports failures; a copy waits for exactly the earlier copies that it conflicts with (a pool records every
slot's last write and its reads since), and no synchronisation call drops these records.

The copy functions move pages by their addresses:

    from kvswap.trtllm import CacheTier, batched_copy

    batched_copy(CacheTier.HOST_MEM, CacheTier.GPU_MEM, page_nbytes, tasks, stream)

Names and arguments follow TensorRT-LLM's tensorrt_llm/runtime/kv_cache_manager_v2 (_copy_engine.py, _common.py) and the
native functions below it (copy_device_to_host and similar). Every function behaves as if enqueued on `stream`: the
copies start after all its work so far, its later work waits for them, and the call returns at once.

    tasks      a sequence of (dst, src) pairs of addresses, of CopyTask or of any object with .dst and .src, or an array
               (n, 2) of int64 or uint64: dst in column 0, src in column 1. Empty: does nothing.
    num_bytes  bytes of every task; any number
    stream     int handle, or a torch, cupy or kvswap stream
    device     kvswap.Device, its name, or None: the stream's if it is a kvswap, torch or cupy stream, else the
               current GPU, else host:0

The caller keeps the addresses mapped, and accesses their bytes only by work on `stream`, until `stream` has executed
the copies. A copy that the device refuses when queued is an error of the call. A later failure is sticky: the device
reports errors from then on. Any thread may call.

CacheTier.DISK is open files: where a task names memory by its address, it names a page of a file by
DiskAddress(fd, pos), or any object with .fd and .pos. The stream's later work waits until the bytes have moved, as with
memory. Between GPU and files they go through 64 MiB of pinned memory; disk_backend="nixl_gds" does the same. The caller
may close a descriptor after the call, not while it runs.

A file can fail when the call has returned long ago: it is short, the disk is full. A stream cannot report that.
batched_copy() therefore returns a DiskCopy: wait() raises the failure, and failed names the tasks. A failure that was
not reported so is raised by the next copy function that is called, as CUDA does with asynchronous errors, and that call
does nothing else. Until then the stream's later work runs: a page of the GPU that could not be read is zeros, a page of
host memory is undefined. A caller that must not compute with such a page waits first.
"""

from kvswap._devices import log_build
from kvswap.trtllm._copies import (
    CacheTier,
    CopyTask,
    DiskAddress,
    DiskCopy,
    batched_copy,
    copy_device_to_device,
    copy_device_to_host,
    copy_disk_to_disk,
    copy_disk_to_host,
    copy_host_to_device,
    copy_host_to_disk,
    copy_host_to_host,
)
from kvswap.trtllm._manager import (
    Block,
    KVCacheBlockPool,
    KVCacheTransferManager,
    KvCacheTransferStats,
    TransferMode,
)

__all__ = [
    "Block",
    "CacheTier",
    "CopyTask",
    "DiskAddress",
    "DiskCopy",
    "KVCacheBlockPool",
    "KVCacheTransferManager",
    "KvCacheTransferStats",
    "TransferMode",
    "batched_copy",
    "copy_device_to_device",
    "copy_device_to_host",
    "copy_disk_to_disk",
    "copy_disk_to_host",
    "copy_host_to_device",
    "copy_host_to_disk",
    "copy_host_to_host",
]

log_build()
