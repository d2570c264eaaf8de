"""A host pool: pinned memory of exactly the size that was asked for, with all layers of a block together.

python examples/host_pool.py [--device cuda:0]
"""

import argparse

import numpy as np

import kvswap
from kvswap.memory import HostPool

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--device", default="host:0", help="host:0, or a GPU such as cuda:0")
device = kvswap.Device(parser.parse_args().device)

layers, block_nbytes, gpu_blocks = 8, 16384, 64
gpu = [device.alloc(gpu_blocks * block_nbytes) for _ in range(layers)]

# A slot holds one block of all layers. wait=False: the constructor returns at once, and threads populate the pool.
# max_blocks reserves addresses, and no memory, for growing later.
pool = HostPool(256, layers * block_nbytes, device=device, layers=layers, max_blocks=512, wait=False)
pool.wait(timeout=60)  # an engine would load its model meanwhile; pool.ready(block) says which blocks can be used
print(pool, *pool.notices, sep="\n")

# layer(i) is a layer as a NumPy array: a view, whose rows have gaps, because the other layers of a block lie there.
for i in range(layers):
    pool.layer(i)[:4] = np.random.randint(0, 255, (4, block_nbytes), np.uint8)

# The swap calls take the pool as its layers' addresses and one stride.
for direction, slots in ((kvswap.Direction.H2D, [0, 1, 2, 3]), (kvswap.Direction.D2H, [40, 30, 20, 10])):
    kvswap.swap_cache_all_layers(
        gpu, pool.layer_ptrs(), block_nbytes, gpu_blocks, pool.num_blocks, [5, 6, 7, 8], slots, direction,
        cpu_stride=pool.layer_stride, device=device,
    )  # fmt: skip
assert all((pool.layer(i)[[40, 30, 20, 10]] == pool.layer(i)[:4]).all() for i in range(layers))

# Addresses and contents stay when the pool grows or shrinks.
before, where = pool.layer(0)[10].copy(), pool.ptr
pool.grow(512)
assert pool.ptr == where and (pool.layer(0)[10] == before).all()
pool.shrink(128)
print(f"{pool.num_blocks} blocks, {pool.nbytes} bytes")

# close() waits for the transfers that may use the pool. While arrays of the pool are alive it raises BufferError.
pool.close()
