"""Load a cache layer by layer: the model starts on layer 0 while the other layers are still on their way.

python examples/layer_by_layer.py [--device cuda:0]
"""

import argparse

import numpy as np

import kvswap

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--device", default="host:0", help="host:0, or a GPU such as cuda:0")
device = kvswap.Device(parser.parse_args().device)

layers, block_nbytes, blocks = 8, 32768, 64
gpu = [device.alloc(blocks * block_nbytes) for _ in range(layers)]
host = [np.frombuffer(device.alloc(blocks * block_nbytes, host=True), np.uint8) for _ in range(layers)]
for number, layer in enumerate(host):
    layer[:] = number + 1
back = [np.frombuffer(device.alloc(blocks * block_nbytes, host=True), np.uint8) for _ in range(layers)]
ids = list(range(0, blocks, 2))

# layer_events=True: the layers are copied in order, and each of them can be waited for alone.
load = kvswap.swap_cache_all_layers_async(
    gpu, host, block_nbytes, blocks, blocks, ids, ids, kvswap.Direction.H2D, device=device, layer_events=True
)

# The model's loop. make_wait_layer() puts a wait into the model's stream: work that is queued there from now on starts
# after layers 0 to i have arrived. The host does not wait. Here the "kernel" of a layer is a copy back to the host.
model = kvswap.Stream(device)
kernels = []
for i in range(layers):
    load.make_wait_layer(i, model)
    kernels.append(
        kvswap.swap_cache_per_layer_async(
            gpu[i], back[i], block_nbytes, blocks, blocks, ids, ids, kvswap.Direction.D2H, device=device, stream=model
        )
    )

# The wait on the device gives order. Only the end of the transfer says that every block has arrived: ask for its error.
for kernel in kernels:
    kernel.wait(timeout=10)
load.wait(timeout=10)
assert load.error is None
for number, layer in enumerate(back):
    assert (layer.reshape(blocks, block_nbytes)[ids] == number + 1).all()
print(f"{layers} layers were used in order, each as soon as it had arrived (path {load.path!r})")
