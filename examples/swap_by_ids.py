"""Swap blocks between a GPU cache and host memory by their ids: the one call that most engines need.

python examples/swap_by_ids.py                    # on the host device: no GPU is needed
python examples/swap_by_ids.py --device cuda:0
"""

import argparse

import numpy as np

import kvswap

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--device", default="host:0", help="host:0, or a GPU such as cuda:0")
device = kvswap.Device(parser.parse_args().device)

# A cache of 4 layers. Each layer is one tensor: 100 blocks of 16 KiB on the GPU, 400 on the host.
layers, block_nbytes, gpu_blocks, host_blocks = 4, 16384, 100, 400

# An engine has its tensors already: torch, NumPy, CuPy, DLPack or plain addresses. Here kvswap allocates them, so that
# the example runs on any device. Host memory is pinned: the GPU can then copy it at the link's speed.
gpu = [device.alloc(gpu_blocks * block_nbytes) for _ in range(layers)]
pinned = [device.alloc(host_blocks * block_nbytes, host=True) for _ in range(layers)]
host = [np.frombuffer(memory, np.uint8).reshape(host_blocks, block_nbytes) for memory in pinned]
for layer in host:
    layer[:] = np.random.randint(0, 255, layer.shape, np.uint8)

# Onboard: host blocks 200, 201 and 9 go to GPU blocks 3, 4 and 17, in every layer. One call moves all layers.
load = kvswap.swap_cache_all_layers_async(
    gpu, host, block_nbytes, gpu_blocks, host_blocks, [3, 4, 17], [200, 201, 9], kvswap.Direction.H2D, device=device
)
# The call returned at once. The lists of ids may be overwritten now; the bytes may be used after wait().
load.wait(timeout=10)

# Offload: the same GPU blocks go to host blocks 7, 8 and 0. A call without _async returns when the bytes are there.
kvswap.swap_cache_all_layers(
    gpu, host, block_nbytes, gpu_blocks, host_blocks, [3, 4, 17], [7, 8, 0], kvswap.Direction.D2H, device=device
)
assert all((layer[[7, 8, 0]] == layer[[200, 201, 9]]).all() for layer in host)
print(f"moved {load.nbytes} bytes there by path {load.path!r} and back: every byte is right")
