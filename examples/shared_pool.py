"""A pool in host memory that several processes map: one writes a block, the others wait until it is published.

python examples/shared_pool.py [--device cuda:0]
"""

import argparse
import os
import subprocess
import sys

import kvswap
from kvswap.memory import SharedPool

blocks, nbytes = 64, 65536


def open_pool(name: str, device: kvswap.Device) -> SharedPool:
    """create=None: join the pool of this name, or create it. All processes must name the same sizes."""
    return SharedPool(name, blocks, nbytes, create=None, device=device)


def owner(device: kvswap.Device) -> None:
    name = f"example-{os.getpid()}"
    with open_pool(name, device) as pool:  # /dev/shm/kvswap.example-PID, mode 0600
        command = [sys.executable, __file__, "--device", device.name, "--join", name]
        with subprocess.Popen(command) as child:
            pool.wait_ready([7], timeout=60)  # raises if the process that claimed the block has ended
            assert (pool.layer(0)[7] == 42).all()
            assert child.wait(timeout=60) == 0
        print("block 7 was written by the other process")


def other(device: kvswap.Device, name: str) -> None:
    with open_pool(name, device) as pool:
        if pool.claim([7])[0]:  # exactly one process gets an empty block
            pool.layer(0)[7] = 42  # or a transfer: publish after its end
            pool.publish([7])


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--device", default="host:0", help="host:0, or a GPU such as cuda:0")
parser.add_argument("--join", help=argparse.SUPPRESS)
args = parser.parse_args()
opened = kvswap.Device(args.device)
if args.join:
    other(opened, args.join)
else:
    owner(opened)
