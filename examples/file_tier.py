"""The file tier: blocks go to files by key, and come back with exactly their bytes, or are reported as lost.

python examples/file_tier.py [--device cuda:0] [--directory /mnt/nvme/kv]
"""

import argparse
import tempfile

import numpy as np

import kvswap
from kvswap.files import FileStore, Layout

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--device", default="host:0", help="host:0, or a GPU such as cuda:0")
parser.add_argument("--directory", help="where the files are kept; default: a temporary folder")
args = parser.parse_args()
device = kvswap.Device(args.device)

# Blocks on the device: slots of a pool. kvswap stages them through pinned memory, or by GPUDirect Storage.
blocks, nbytes = 16, 65536
gpu = kvswap.Pool(device, device.alloc(blocks * nbytes), blocks, nbytes)
pinned = device.alloc(blocks * nbytes, host=True)
host = kvswap.Pool(device, pinned, blocks, nbytes)
values = np.frombuffer(pinned, np.uint8).reshape(blocks, nbytes)
values[:4] = np.random.randint(0, 255, (4, nbytes), np.uint8)
kvswap.move_blocks(host, gpu, range(4), range(4)).wait(timeout=10)

# The layout says what kind of blocks these are. A directory of another layout is refused.
layout = Layout(nbytes, model="example", dtype="bf16", tokens=16)
keys = [b"prefix-%d" % i for i in range(4)]  # an engine uses its block hashes
with tempfile.TemporaryDirectory() as folder:
    with FileStore(args.directory or folder, layout, capacity=64 << 20, device=device) as store:
        # Both calls return a FileTransfer at once. Calls on one key take effect in the order of the calls.
        store.store(keys, gpu, range(4)).wait(timeout=30)
        store.load(keys, gpu, range(8, 12)).wait(timeout=30)  # checked against the checksum that the store made
        kvswap.move_blocks(gpu, host, range(8, 12), range(8, 12)).wait(timeout=10)
        assert (values[8:12] == values[:4]).all()

        # A missing block fails by itself; the others arrive.
        load = store.load([keys[0], b"never stored", keys[3]], gpu, [12, 13, 14])
        try:
            load.wait(timeout=30)
        except kvswap.Error as error:
            print("one block is lost:", error)
        assert load.failed_positions.tolist() == [1]

    # The blocks outlive the process. Opening reads the headers and builds the index again.
    with FileStore(args.directory or folder, layout, capacity=64 << 20, device=device) as store:
        assert store.contains(keys) == [True] * 4
        print({name: store.stats()[name] for name in ("blocks", "found", "file_nbytes")})
