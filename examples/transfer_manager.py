"""TensorRT-LLM's KVCacheTransferManager on kvswap: the steps of an engine that offloads and onboards blocks.

python examples/transfer_manager.py [--device cuda:0]
"""

import argparse

import numpy as np

import kvswap
from kvswap.trtllm import Block, KVCacheBlockPool, KVCacheTransferManager

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--device", default="host:0", help="host:0, or a GPU such as cuda:0")
device = kvswap.Device(parser.parse_args().device)

# One pool: the blocks of all layers that share a shape. Primary memory is on the GPU, secondary memory on the host.
layers, heads, tokens, size, blocks, host_blocks = 4, 2, 16, 64, 32, 64
block_nbytes = layers * 2 * heads * tokens * size * 2
primary = device.alloc(blocks * block_nbytes)  # an engine passes its own tensors
pinned = device.alloc(host_blocks * block_nbytes, host=True)
secondary = np.frombuffer(pinned, np.float16).reshape(host_blocks, layers, 2, heads, tokens, size)
secondary[17] = np.random.rand(*secondary.shape[1:])
pool = KVCacheBlockPool(
    primary, pinned, blocks, host_blocks, num_layers=layers, kv_factor=2, num_kv_heads=heads, tokens_per_block=tokens,
    size_per_head=size, dtype="fp16",
)  # fmt: skip

model = kvswap.Stream(device)  # the stream of prefill and decode kernels
with KVCacheTransferManager([pool], device=device) as manager:
    # A step of the engine. Copies start after the kernels that the model has queued so far ...
    manager.sync_with_compute(model)  # TensorRT-LLM: syncWithBufferManager()
    load = manager.onboard([17], [4])  # secondary block 17 -> primary block 4
    manager.onboard(Block(4), 5, 7)  # partial reuse: the first 7 tokens of primary block 4 -> primary block 5
    store = manager.offload(4, 40)  # waits for the onboard of block 4, on the device
    # ... and the kernels that the model queues from now on start after the copies.
    manager.sync_transfers(model)  # TensorRT-LLM: syncTransfers()

    # Order is not success: before the bytes are trusted, ask each transfer. (TensorRT-LLM has no such question.)
    for transfer in (load, store):
        transfer.wait(timeout=10)
    assert (secondary[40] == secondary[17]).all()

    manager.offload(5, 41).wait(timeout=10)
    assert (secondary[41, :, :, :, :7] == secondary[17, :, :, :, :7]).all()
    stats = manager.get_and_reset_transfer_stats()
print(f"onboarded {stats.onboard_blocks}, offloaded {stats.offload_blocks}, copied {stats.intra_device_copy_blocks}")
