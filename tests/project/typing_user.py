"""A user's calls, for mypy --strict: it accepts the right ones and refuses the wrong ones. Nothing here runs.

test_stubs.py runs mypy over this file. A wrong call carries `# type: ignore[code]`: mypy complains of one that it would
have accepted (--warn-unused-ignores, which --strict includes).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import kvswap
from kvswap import files
from kvswap.typing import Address, After, DeviceLike, DeviceStats, FileStats, Ids, OpenedInfo, StreamLike


class Tensor:
    """What torch's tensors have."""

    def data_ptr(self) -> int: ...  # type: ignore[empty-body]


class CudaArray:
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...  # type: ignore[empty-body]


class TorchStream:
    @property
    def cuda_stream(self) -> int: ...  # type: ignore[empty-body]


class TorchDevice:
    @property
    def type(self) -> str: ...  # type: ignore[empty-body]
    @property
    def index(self) -> int | None: ...


def right(
    device: kvswap.Device, gpu: NDArray[np.float16], cpu: NDArray[np.float16], pools: Sequence[kvswap.Pool]
) -> None:
    ids = np.arange(4)
    kvswap.swap_cache_all_layers([gpu], [cpu], 1024, 8, 8, ids, [1, 2, 3, 4], kvswap.Direction.D2H)
    kvswap.swap_cache_all_layers([Tensor()], [CudaArray()], [1024], 8, 8, ids.astype(np.uint64), range(4), "H2D")
    kvswap.swap_cache_all_layers(
        np.array([1 << 40]), [0x7F0000000000], 1024, 8, 8, ids.astype(np.int32), (1, 2, 3, 4), 0, stream=TorchStream()
    )
    assert_type(
        kvswap.copy_blocks(gpu, [cpu], ids, [1, 2, 3, 4], stream=TorchStream(), layer_events=True), kvswap.Transfer
    )
    kvswap.copy_blocks((Tensor(), CudaArray()), [cpu, bytearray(8)], CudaArray(), ids)
    kvswap.swap_cache_per_layer(gpu, cpu.ctypes.data, 1024, 8, 8, ids, ids, 1, device=0, stream=0)
    kvswap.swap_cache_per_layer(Tensor(), bytearray(8), 1024, 8, 8, ids, ids, 1, device=TorchDevice(), path="burst")
    transfer = kvswap.swap_blocks_batch([gpu], [cpu], 1024, after=kvswap.Event(device), device="cuda:0")
    assert_type(transfer, kvswap.Transfer)
    kvswap.swap_blocks_batch([gpu], [cpu], [1024], after=[transfer, kvswap.Stream(device), 0], priority="high")
    kvswap.move_blocks(pools, pools, ids, [1, 2, 3, 4], after_layers=[None, transfer])
    kvswap.Pool("cpu", gpu, 8, 1024)
    assert_type(kvswap.Device().info, OpenedInfo)
    assert_type(device.info["kernels"], bool)
    assert_type(device.stats(), DeviceStats)
    assert_type(device.stats()["paths"]["d2h"]["dma"]["seconds"], float)
    assert_type(transfer.failed_positions, NDArray[np.int64])


def aliases(address: Address, ids: Ids, stream: StreamLike, after: After, device: DeviceLike) -> None:
    """A wrapper's own arguments."""
    kvswap.swap_cache_per_layer(address, address, 1, 1, 1, ids, ids, 0, stream=stream, after=after, device=device)


async def awaiting(transfer: kvswap.Transfer, stored: files.FileTransfer) -> None:
    await transfer
    await stored


def file_tier(folder: Path, gpu: NDArray[np.uint8], pool: kvswap.Pool) -> None:
    with files.FileStore(folder, files.Layout(1024, model="m"), capacity=1 << 30) as store:
        stored = store.store([b"a"], [gpu])
        store.load([(1, 0)], pool, [1], after=stored_after(pool))
        store.load([b"a"], gpu, [0])
        assert_type(stored.reasons, dict[int, Exception])
        assert_type(store.stats(), FileStats)
        assert_type(store.info["engine_note"], str)
        store.store(["a"], [gpu])  # type: ignore[arg-type]
        store.store([b"a"], pool, [1.0])  # type: ignore[list-item]
        store.load([b"a"], pool, [1], replace=True)  # type: ignore[call-arg]
        files.FileStore(folder, 65536, capacity=1)  # type: ignore[arg-type]
        files.FileStore(folder, files.Layout(1), engine="uring")  # type: ignore[arg-type]


def stored_after(pool: kvswap.Pool) -> kvswap.Event:
    return kvswap.Event(pool.device)


def wrong(device: kvswap.Device, gpu: NDArray[np.float16], pools: Sequence[kvswap.Pool]) -> None:
    ids = np.arange(4)
    kvswap.swap_cache_all_layers(Tensor(), [gpu], 1, 1, 1, ids, ids, 0)  # type: ignore[arg-type]
    kvswap.swap_cache_all_layers(gpu, [gpu], 1, 1, 1, ids, ids, 0)  # type: ignore[arg-type]
    kvswap.swap_cache_per_layer([gpu], gpu, 1, 1, 1, ids, ids, 0)  # type: ignore[arg-type]
    kvswap.swap_cache_per_layer(gpu, gpu, 1, 1, 1, ids, ids * 0.5, 0)  # type: ignore[arg-type]
    kvswap.swap_cache_per_layer(gpu, gpu, 1, 1, 1, 3, ids, 0)  # type: ignore[arg-type]
    kvswap.swap_cache_per_layer(gpu, gpu, 1, 1, 1, {1, 2}, ids, 0)  # type: ignore[arg-type]
    kvswap.swap_cache_per_layer(gpu, gpu, 1.5, 1, 1, ids, ids, 0)  # type: ignore[arg-type]
    kvswap.swap_cache_per_layer(gpu, gpu, 1, 1, 1, ids, ids, "down")  # type: ignore[arg-type]
    kvswap.swap_cache_per_layer(gpu, gpu, 1, 1, 1, ids, ids, 0, stream="default")  # type: ignore[arg-type]
    kvswap.swap_cache_per_layer(gpu, gpu, 1, 1, 1, ids, ids, 0, path="DMA")  # type: ignore[arg-type]
    kvswap.swap_cache_per_layer(gpu, gpu, 1, 1, 1, ids, ids, 0, device=1.5)  # type: ignore[arg-type]
    kvswap.swap_cache_per_layer(gpu, gpu, 1, 1, 1, ids, ids, 0, strem=0)  # type: ignore[call-arg]
    kvswap.swap_cache_per_layer(gpu, None, 1, 1, 1, ids, ids, 0)  # type: ignore[arg-type]
    kvswap.swap_blocks_batch([gpu], [gpu], 1, after=3.5)  # type: ignore[arg-type]
    kvswap.move_blocks(gpu, pools, ids, ids)  # type: ignore[arg-type]
    kvswap.Pool(gpu, 8, 1024, device)  # type: ignore[arg-type]
    device.stats()["transfers"]  # type: ignore[typeddict-item]
    device.info["sm"]  # type: ignore[typeddict-item]
    device.set_compute_stream(None)  # type: ignore[arg-type]
    kvswap.swap_cache_per_layer(gpu, gpu, 1, 1, 1, ids, ids, 0).wait()  # type: ignore[func-returns-value]
