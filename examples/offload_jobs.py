"""vLLM's job queue without vLLM: submit stores and loads by number, collect what has ended.

python examples/offload_jobs.py                    # NumPy, on the host device
python examples/offload_jobs.py --device cuda:0    # torch
"""

import argparse
from typing import Any

import numpy as np

from kvswap.offload import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CpuGpuOffloadingHandlers,
    CPULoadStoreSpec,
    GPULoadStoreSpec,
)

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--device", default="host:0", help="host:0, or a GPU such as cuda:0")
name = parser.parse_args().device

page, layers, blocks = 65536, 4, 100
tensors: list[Any] = [np.random.randint(-128, 127, (blocks, page), np.int8) for _ in range(layers)]
if name.startswith("cuda"):
    import torch

    tensors = [torch.from_numpy(tensor).to(name) for tensor in tensors]

# The cache: tensors whose first dimension is the blocks, and which layers use them. Here one group of layers uses all.
caches = CanonicalKVCaches(
    [CanonicalKVCacheTensor(tensor, page) for tensor in tensors],
    [[CanonicalKVCacheRef(i, page) for i in range(layers)]],
)
# Host memory is counted in chunks. A chunk holds block_size_factor GPU blocks of one request, here 2.
handlers = CpuGpuOffloadingHandlers(caches, block_size_factor=2, num_cpu_blocks=50, device=name)
store, load = handlers.gpu_to_cpu_handler, handlers.cpu_to_gpu_handler

# Job 1: GPU blocks 3, 17, 5 and 9 of a request go to chunks 40 and 41. Job 2 brings them back to other GPU blocks; it
# starts after job 1, on the device, because it reads what job 1 writes.
chunks = CPULoadStoreSpec([40, 41])
assert store.transfer_async(1, (GPULoadStoreSpec([3, 17, 5, 9], group_sizes=[4], block_indices=[0]), chunks))
assert load.transfer_async(2, (chunks, GPULoadStoreSpec([60, 61, 62, 63], group_sizes=[4], block_indices=[0])))
load.wait({2}, timeout=10)
store.wait({1}, timeout=10)

# An engine polls get_finished() each step. It never blocks, and reports each job once, also those that failed.
for handler in (store, load):
    for result in handler.get_finished():
        print(f"job {result.job_id}: success {result.success}, {result.transfer_size} bytes, {result.transfer_type}")
        assert result.success, result.error
for tensor in tensors:
    array = tensor if isinstance(tensor, np.ndarray) else tensor.cpu().numpy()
    assert (array[[60, 61, 62, 63]] == array[[3, 17, 5, 9]]).all()
for handler in (store, load):
    handler.shutdown()
