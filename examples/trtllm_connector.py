"""A KV cache connector for TensorRT-LLM's PyTorch backend: blocks go to a host pool and come back layer by layer.

    python examples/trtllm_connector.py                    # the example plays the engine, on the host device
    python examples/trtllm_connector.py --device cuda:0    # torch makes the cache

TensorRT-LLM takes a worker and a scheduler class by name (KvCacheConnectorConfig). This is the worker, which moves the
bytes. The scheduler, which decides what is kept, only fills in Step: docs/trtllm.md says how the two meet.
"""

import argparse
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import kvswap
from kvswap.memory import HostPool

try:
    from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import KvCacheConnectorWorker
except ImportError:
    KvCacheConnectorWorker = object


@dataclass
class Step:
    """What the scheduler tells the worker for one step: (GPU blocks, host slots) by request."""

    loads: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    saves: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)


class Worker(KvCacheConnectorWorker):
    slots = 64  # blocks of host memory

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """The whole cache: (blocks, layers, ...), contiguous, so that a block is one piece."""
        blocks, layers = kv_cache_tensor.shape[:2]
        self.device = kvswap.Device(getattr(self, "device_name", None))
        nbytes = kv_cache_tensor.nbytes // blocks
        self.host = HostPool(self.slots, nbytes, device=self.device)
        self.gpu, self.kept = kvswap.Pool(self.device, kv_cache_tensor), self.host.pool()
        step = nbytes // layers  # a layer is a part of a block: pair, layer, offset, rows, bytes, pitch
        self.parts = np.array([[0, i, i * step, 1, step, step] for i in range(layers)])
        self.loads: dict[int, kvswap.Transfer] = {}
        self.saves: dict[int, kvswap.Transfer] = {}
        self.failed: dict[int, Exception] = {}

    def start_load_kv(self, stream: Any) -> None:
        """Before the forward pass. after=: not before the kernels that may still use the overwritten blocks."""
        for request, (blocks, slots) in self.get_connector_meta().loads.items():
            self.loads[request] = kvswap.move_blocks(
                self.kept, self.gpu, slots, blocks, parts=self.parts, layer_events=True, after=stream
            )

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Before a layer's kernels are queued: they start after this layer has arrived. The host does not wait.

        A load that is known to have failed raises here: the engine must not compute with its blocks.
        """
        for load in self.loads.values():
            load.make_wait_layer(layer_idx, stream)

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: the blocks are saved as a whole, after the last layer."""

    def wait_for_save(self, stream: Any) -> None:
        """At the end of the forward pass. Nothing is waited for: a request keeps its blocks until get_finished()."""
        for request, (blocks, slots) in self.get_connector_meta().saves.items():
            self.saves[request] = kvswap.move_blocks(self.gpu, self.kept, blocks, slots, after=stream)

    def get_finished(self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]) -> Any:
        """Requests whose saves and loads have ended, well or not. A save that failed must not be offered again."""
        ended = [[r for r, transfer in moves.items() if transfer.done()] for moves in (self.saves, self.loads)]
        self.failed = {r: self.loads[r].error for r in ended[1] if self.loads[r].error}
        self.lost = {r: self.saves[r].error for r in ended[0] if self.saves[r].error}
        for moves, requests in zip((self.saves, self.loads), ended, strict=True):
            for request in requests:
                del moves[request]
        return tuple(ended)

    def take_failed_load_request_ids(self) -> set[int]:
        return set(self.failed)


if KvCacheConnectorWorker is object:  # of TensorRT-LLM's base class, what the worker uses
    Worker.bind_connector_meta = lambda self, metadata: setattr(self, "metadata", metadata)  # type: ignore[attr-defined]
    Worker.get_connector_meta = lambda self: self.metadata  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="host:0", help="host:0, or a GPU such as cuda:0")
    name = parser.parse_args().device

    cache: Any = np.random.rand(32, 4, 2, 16, 64).astype(np.float16)  # blocks, layers, K and V, tokens, values
    if name.startswith("cuda"):
        import torch

        cache = torch.from_numpy(cache).to(name)
    worker = Worker.__new__(Worker)  # the engine passes its arguments to __init__; the example has none
    worker.device_name = name
    worker.register_kv_caches(cache)
    model = kvswap.Stream(worker.device)

    for step in (Step(saves={1: ([3, 4, 5], [10, 11, 12])}), Step(loads={2: ([20, 21, 22], [10, 11, 12])})):
        worker.bind_connector_meta(step)  # what the engine does in a step
        worker.start_load_kv(model)
        for layer in range(4):
            worker.wait_for_layer_load(layer, model)
            worker.save_kv_layer(layer, model)
        worker.wait_for_save(model)
        worker.device.synchronize(timeout=10)
        saved, loaded = worker.get_finished([], [])
        print(f"requests saved in this step: {saved}, loaded: {loaded}")
        assert not worker.failed and not worker.lost
    assert (cache[20:23] == cache[3:6]).all()
    print("blocks 3 to 5 went to host memory and came back as blocks 20 to 22: every byte is right")


if __name__ == "__main__":
    main()
