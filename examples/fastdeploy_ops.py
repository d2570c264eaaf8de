"""FastDeploy's swap ops by their own names and arguments.

python examples/fastdeploy_ops.py [--device cuda:0]     # on a GPU torch makes the caches
"""

import argparse
import ctypes

import numpy as np

from kvswap.fastdeploy import cuda_host_alloc, cuda_host_free, swap_cache_all_layers

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--device", default="host:0", help="host:0, or a GPU such as cuda:0")
name = parser.parse_args().device
kind, _, rank = name.partition(":")

# The caches are [num_blocks, kv_heads, block_size, head_dim], a tensor a layer: paddle's, torch's or, on the host
# device, NumPy's.
blocks, host_blocks, layers, shape = 40, 100, 4, (2, 16, 64)
if kind == "cuda":
    import torch

    caches = [torch.rand(blocks, *shape, device=name).half() for _ in range(layers)]
    values = [cache.cpu().numpy() for cache in caches]
else:
    caches = values = [np.random.rand(blocks, *shape).astype(np.float16) for _ in range(layers)]
nbytes = values[0][0].nbytes

# FastDeploy's manager keeps the host side as one address a layer.
pinned = [cuda_host_alloc(host_blocks * nbytes, device=name) for _ in range(layers)]

# rank is the GPU's number; the last argument is the mode: 0 from the GPU to the host, 1 back.
swap_cache_all_layers(caches, pinned, host_blocks, [3, 4, 17], [90, 91, 5], int(rank or 0), 0, device=name)
for ptr, before in zip(pinned, values, strict=True):
    found = np.frombuffer((ctypes.c_char * nbytes).from_address(ptr + 91 * nbytes), np.float16)
    assert (found == before[4].ravel()).all()

swap_cache_all_layers(caches, pinned, host_blocks, [30], [91], int(rank or 0), 1, device=name)  # host 91 -> GPU 30
after = [cache.cpu().numpy() if kind == "cuda" else cache for cache in caches]
assert all((cache[30] == cache[4]).all() for cache in after)

# A wrong id is an error before any byte moves.
try:
    swap_cache_all_layers(caches, pinned, host_blocks, [40], [0], int(rank or 0), 0, device=name)
except IndexError as error:
    print("refused:", error)
for ptr in pinned:
    cuda_host_free(ptr)
print("3 blocks to the host, 1 back: every byte is right")
