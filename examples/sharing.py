"""Two processes: one owns a cache on the device, the other opens it and reads blocks out of it.

python examples/sharing.py [--device cuda:0]
"""

import argparse
import subprocess
import sys

import numpy as np

import kvswap
from kvswap import memory

blocks, nbytes = 32, 16384


def own(name: str) -> None:
    """The process that has the cache: a model's worker, say."""
    device = kvswap.Device(name)
    cache = device.alloc(blocks * nbytes)  # on a GPU it may be a torch tensor as well
    values = np.arange(blocks, dtype=np.uint8).repeat(nbytes)  # block i holds the byte i
    kvswap.swap_blocks_batch([values], [cache], values.nbytes, device=device).wait(timeout=10)

    # 512 bytes say where the memory lies, which process owns it, how large it is, and the generation of its contents.
    # Send them as you like: kvswap writes them to no file. Only processes of the same user can open the memory.
    data = memory.export(cache, generation=1).to_bytes()
    other = subprocess.run(
        [sys.executable, __file__, "--device", name, "--read"], input=data, timeout=120, check=True
    )  # the owner keeps the memory for as long as others have it open
    assert other.returncode == 0


def read(name: str) -> None:
    """The other process. It opens the memory, and copies three blocks to its own host memory."""
    data = sys.stdin.buffer.read()
    with memory.open(data, device=name, generation=1) as cache:  # another generation is refused
        host = np.zeros((blocks, nbytes), np.uint8)
        ids = [3, 30, 17]
        kvswap.swap_cache_per_layer(
            cache, host, nbytes, blocks, blocks, ids, ids, kvswap.Direction.D2H, device=cache.device
        )
        assert all((host[i] == i).all() for i in ids)
        print(f"read blocks {ids} of process {cache.owner}; the owner runs: {cache.alive()}")


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--device", default="host:0", help="host:0, or a GPU such as cuda:0")
parser.add_argument("--read", action="store_true", help=argparse.SUPPRESS)
args = parser.parse_args()
(read if args.read else own)(args.device)
