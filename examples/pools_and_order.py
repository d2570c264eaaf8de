"""Pools put transfers of the same blocks in order, on the device and without a wait of the host.

python examples/pools_and_order.py [--device cuda:0]
"""

import argparse

import numpy as np

import kvswap
from kvswap import testing

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--device", default="host:0", help="host:0, or a GPU such as cuda:0")
device = kvswap.Device(parser.parse_args().device)

# A pool is blocks of one size. kvswap records the last write to each slot of it, and the reads since.
nbytes = 65536
gpu = kvswap.Pool(device, device.alloc(64 * nbytes), 64, nbytes, name="gpu")
pinned = device.alloc(256 * nbytes, host=True)
host = kvswap.Pool(device, pinned, 256, nbytes, name="host")
blocks = np.frombuffer(pinned, np.uint8).reshape(256, nbytes)
blocks[:8] = np.random.randint(0, 255, (8, nbytes), np.uint8)

# Three transfers, submitted one after the other. Nothing waits between the calls.
first = kvswap.move_blocks(host, gpu, range(8), range(8))  # onboard: host 0-7 -> GPU 0-7
second = kvswap.move_blocks(gpu, host, range(8), range(100, 108))  # offload: reads what `first` writes
third = kvswap.move_blocks(host, gpu, range(8, 16), range(8))  # onboard: overwrites what `second` reads

# Loads and stores run side by side, on lanes of their own. kvswap saw that `second` reads the slots that `first`
# writes, and that `third` overwrites them, and made each wait for the one before, on the device.
third.wait(timeout=10)
assert (blocks[100:108] == blocks[:8]).all()
waits = device.stats()
print(f"waits: {waits['waits_raw']} for a read after a write, {waits['waits_war']} for a write after a read")

# Kernels are ordered by streams. stream=S: start after the work that S holds; later work of S waits for the transfer.
model = kvswap.Stream(device)  # an engine passes its own: torch's, CuPy's, or an integer handle
store = kvswap.move_blocks(gpu, host, [0], [200], stream=model)
store.wait(timeout=10)

# Was anything left without an order? The race checker reports accesses that nothing orders, whatever their timing was.
with testing.race_checker(raise_at_exit=False) as checker:
    testing.note_access(model, gpu, [5], True)  # the engine says: a kernel on `model` writes GPU block 5
    other = kvswap.Stream(device)
    testing.note_access(other, gpu, [5], False)  # and a kernel on another stream reads it
assert len(checker.races) == 1
print(f"found, as planted: {checker.races[0]}")
