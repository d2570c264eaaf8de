"""The manager on the device under test, a GPU too: caches of this process in another, and kernels it must wait for.

The bytes are written and looked at by work on the device (patterns), which shares nothing with the copies.
"""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from conftest import PATIENCE, Gate, check_pattern, write_pattern
from managers import Manager

import kvswap
from kvswap import memory
from kvswap.fastdeploy import ipc
from kvswap.fastdeploy.client import SWAP2CPU, SWAP2GPU, Client, ManagerError

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")

BLOCKS, BLOCK_NBYTES, LAYERS = 32, 64 << 10, 2  # 2 MiB each: a GPU's driver gives each its own memory
SHAPE = f"{BLOCKS},8,32,128"
MODEL = ("--num_layers", str(LAYERS), "--key_cache_shape", SHAPE, "--value_cache_shape", SHAPE,
         "--num_cpu_blocks", "16", "--cache_dtype", "float16")  # fmt: skip


class Caches:
    """All caches of a rank, as addresses here."""

    def __init__(self, device: kvswap.Device, ptrs: list[int]) -> None:
        self.device, self.stream = device, kvswap.Stream(device)
        self.ptrs = np.array(ptrs, np.uint64)

    def _at(self, blocks: list[int]) -> Any:
        return (self.ptrs[:, None] + np.array(blocks, np.uint64) * np.uint64(BLOCK_NBYTES)).reshape(-1)

    def _keys(self, blocks: list[int], key: int) -> Any:
        """By key, cache, and place in the list."""
        return key * 1000 + np.arange(self.ptrs.size * len(blocks))

    def write(self, blocks: list[int], key: int, stream: Any = None) -> Any:
        stream = self.stream if stream is None else stream
        return write_pattern(self.device, self._at(blocks), BLOCK_NBYTES, self._keys(blocks, key), stream)

    def wrong(self, blocks: list[int], key: int) -> int:
        """Bytes that are not those."""
        job = check_pattern(self.device, self._at(blocks), BLOCK_NBYTES, self._keys(blocks, key), self.stream)
        return int(job.result(PATIENCE)[0])


@pytest.fixture
def manager(device_name: str) -> Iterator[Manager]:
    with Manager(1, model=MODEL, create=False, device=device_name) as manager:
        yield manager


@pytest.fixture
def owned(device: kvswap.Device, manager: Manager) -> Iterator[dict[str, kvswap.Memory]]:
    """The engine's caches, by FastDeploy's names."""
    names = [
        f"{kind}_caches_{layer}_rank0.device{manager.device_id}" for layer in range(LAYERS) for kind in ("key", "value")
    ]
    made = {name: device.alloc(BLOCKS * BLOCK_NBYTES) for name in names}
    yield made
    for name, cache in made.items():
        ipc.unlink_segment(name)
        cache.free()


def swap(client: Client, kind: int, gpu_ids: list[int], cpu_ids: list[int], **options: Any) -> None:
    result = client.result(client.swap(kind, gpu_ids, cpu_ids, **options), PATIENCE)
    assert result.ok, result.reason


@pytest.mark.parametrize("by", ["handles", "segments"])
def test_the_engines_caches(device: kvswap.Device, manager: Manager, owned: dict[str, kvswap.Memory], by: str) -> None:
    client = manager.client()
    client.wait_started(PATIENCE)
    if by == "handles":
        client.attach([{name: memory.export(cache).to_bytes() for name, cache in owned.items()}])
    else:
        for name, cache in owned.items():
            ipc.set_data_ipc(cache, name, device=device)
        client.attach()
    client.wait_ready(PATIENCE)
    caches = Caches(device, [cache.ptr for cache in owned.values()])
    out, back = [3, 4, 30, 0], [9, 31, 8, 1]
    caches.write(out, 1).result(PATIENCE)
    swap(client, SWAP2CPU, out, [15, 2, 3, 0])
    caches.write(out, 2).result(PATIENCE)
    swap(client, SWAP2GPU, back, [15, 2, 3, 0])
    assert caches.wrong(back, 1) == caches.wrong(out, 2) == 0
    client.clear()


def test_the_managers_caches(device: kvswap.Device, device_name: str) -> None:
    """Created and exported there, opened here; after a clear and a restore others with a higher generation."""
    with Manager(1, model=MODEL, device=device_name) as manager:
        client, generations = manager.ready_client(), []
        for key in (1, 2):
            told = client.handles()[0]
            generations.append(told["generation"])
            mapped = [memory.open(data, generation=told["generation"]) for data in told["handles"].values()]
            caches = Caches(device, [each.ptr for each in mapped])
            caches.write([5, 6], key).result(PATIENCE)
            swap(client, SWAP2CPU, [5, 6], [1, 2])
            swap(client, SWAP2GPU, [20, 21], [1, 2])
            assert caches.wrong([20, 21], key) == 0
            for each in mapped:
                each.close()
            client.clear()
            client.restore()
        assert generations[1] > generations[0]


def test_the_engines_kernels_come_first(
    device: kvswap.Device, manager: Manager, owned: dict[str, kvswap.Memory]
) -> None:
    """A store behind a kernel that has not run: with the kernel's event it waits for it, across the processes; without
    one it stores what was there before, which is what the event is for. A load waits in the same way."""
    client = manager.client()
    client.wait_started(PATIENCE)
    client.attach([{name: memory.export(cache).to_bytes() for name, cache in owned.items()}])
    caches, stream = Caches(device, [cache.ptr for cache in owned.values()]), kvswap.Stream(device)
    event = kvswap.Event(device, timing=False, interprocess=True)
    exported = [memory.export_event(event)]
    caches.write([1], 1).result(PATIENCE)
    with Gate(device) as gate:
        gate.hold(stream)
        job = caches.write([1], 2, stream)  # dropped, it would wait
        event.record(stream)
        swap(client, SWAP2CPU, [1], [5])
        late = client.swap(SWAP2CPU, [1], [6], events=exported)
        with pytest.raises(TimeoutError):
            client.result(late, 0.3)
        gate.open()
        assert client.result(late, PATIENCE).ok and job.done()
    swap(client, SWAP2GPU, [3, 4], [5, 6])
    assert caches.wrong([3], 1) == caches.wrong([4], 2) == 0
    with Gate(device) as gate:  # a kernel that still works on block 3, and a load that is to replace it
        gate.hold(stream)
        job = caches.write([3], 3, stream)
        event.record(stream)
        late = client.swap(SWAP2GPU, [3], [6], events=exported)
        with pytest.raises(TimeoutError):
            client.result(late, 0.3)
        gate.open()
        assert client.result(late, PATIENCE).ok and job.done()
    assert caches.wrong([3], 2) == 0
    client.clear()


def test_events_that_are_none(device: kvswap.Device, manager: Manager, owned: dict[str, kvswap.Memory]) -> None:
    client = manager.client()
    client.wait_started(PATIENCE)
    client.attach([{name: memory.export(cache).to_bytes() for name, cache in owned.items()}])
    result = client.result(client.swap(SWAP2CPU, [1], [2], events=[b"rubbish"]))
    assert not result.ok and result.rank == 0
    with pytest.raises(ManagerError, match="events has 2 items: one for each of 1 ranks"):
        client.swap(SWAP2CPU, [1], [2], events=[None, None])
    swap(client, SWAP2CPU, [1], [2], events=[None])
    client.clear()
