"""Survive a failure: find the lost blocks, see how a loss travels, and mend it.

python examples/failure.py [--device cuda:0]
"""

import argparse

import numpy as np

import kvswap
from kvswap import testing

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--device", default="host:0", help="host:0, or a GPU such as cuda:0")
device = kvswap.Device(parser.parse_args().device)

nbytes = 16384
gpu = kvswap.Pool(device, device.alloc(32 * nbytes), 32, nbytes, name="gpu")
pinned = device.alloc(32 * nbytes, host=True)
host = kvswap.Pool(device, pinned, 32, nbytes, name="host")
blocks = np.frombuffer(pinned, np.uint8).reshape(32, nbytes)
blocks[:] = np.random.randint(0, 255, blocks.shape, np.uint8)

# 1. A wrong argument is an exception of the call. It names the list, the index, the value and the range; nothing moved.
try:
    kvswap.move_blocks(host, gpu, [0, 1], [3, 99])
except IndexError as error:
    print("refused:", error)

# 2. A copy that the driver refuses fails its block, not the call. Here a fault is injected: from the third copy on each
#    one is refused. (Ids that are not neighbours, so that each block is a copy of its own.)
with testing.fault(device, "copy", "fail", nth=3, every=1):
    load = kvswap.move_blocks(host, gpu, [0, 2, 4, 6], [1, 3, 5, 7], path="dma")
    try:
        load.wait(timeout=10)
    except kvswap.DeviceError as error:
        print("failed:", error)
lost = load.failed_positions.tolist()  # positions in the lists of ids
print("lost:", [(host.name, [0, 2, 4, 6][i], gpu.name, [1, 3, 5, 7][i]) for i in lost])
assert lost

# 3. A loss travels. A transfer that reads a lost slot fails for that block; it never delivers older bytes as if they
#    were right. Its other blocks arrive.
store = kvswap.move_blocks(gpu, host, [1, 3, 5, 7], [20, 21, 22, 23])
try:
    store.wait(timeout=10)
except kvswap.Error as error:
    print("travels:", error)
assert store.failed_positions.tolist() == lost
arrived = [i for i in range(4) if i not in lost]
assert all((blocks[20 + i] == blocks[2 * i]).all() for i in arrived)

# 4. Writing the whole block mends it: by another transfer, as here, or by a kernel that note_access() reports.
kvswap.move_blocks(host, gpu, [0, 2, 4, 6], [1, 3, 5, 7]).wait(timeout=10)
kvswap.move_blocks(gpu, host, [1, 3, 5, 7], [20, 21, 22, 23]).wait(timeout=10)
assert (blocks[20:24] == blocks[[0, 2, 4, 6]]).all()

# 5. A wait has a limit, and a time that is over leaves the transfer running. device.lost: restart the process.
assert not device.lost
print("mended: every byte is right")
