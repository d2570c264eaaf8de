"""Memory of torch's allocator in another process: on a GPU, with torch in the process that owns it."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, check_pattern, seam
from processes import Process

import kvswap
from kvswap import memory

ALLOCATORS = {"caching": "", "expandable": "expandable_segments:True"}

OWNER = """
import torch
device = kvswap.Device({device!r})
torch.cuda.init()
with torch.cuda.device({device!r}):
    before = [torch.zeros(n, dtype=torch.uint8, device="cuda") for n in (100, 5 << 20, 33 << 20)]
    tensor = torch.arange(40 << 20, dtype=torch.int32, device="cuda").view(40, 1 << 20)
    torch.cuda.synchronize()
"""


@pytest.fixture(params=ALLOCATORS)
def owner(request: pytest.FixtureRequest, cuda: kvswap.Device) -> Iterator[Process]:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    environment = {"PYTORCH_CUDA_ALLOC_CONF": ALLOCATORS[request.param]} if ALLOCATORS[request.param] else {}
    with Process("pass", **environment) as process:
        process.do("import torch", 300)
        if not process.do("torch.cuda.is_available()"):
            pytest.skip("this torch has no CUDA")
        process.do(OWNER.format(device=cuda.name), 300)
        yield process


def exported(owner: Process, expression: str) -> memory.Export:
    owner.do(f"export = memory.export({expression})")
    return memory.Export.from_bytes(bytes.fromhex(owner.do("export.to_bytes().hex()")))


def bytes_of(device: kvswap.Device, mapped: memory.Mapped) -> np.ndarray[Any, Any]:
    host, stream = device.alloc(mapped.nbytes, host=True), kvswap.Stream(device)
    seam(device, "copy", host.ptr, mapped.ptr, mapped.nbytes, stream.handle)
    stream.synchronize(PATIENCE)
    return np.frombuffer(host, np.uint8).copy()


@pytest.mark.parametrize("rows", [(0, 40), (17, 18), (3, 31), (39, 40)])
def test_an_interior_tensor_of_torch(cuda: kvswap.Device, owner: Process, rows: tuple[int, int]) -> None:
    export = exported(owner, f"tensor[{rows[0]}:{rows[1]}]")
    assert export.dtype == "int32" and export.shape == (rows[1] - rows[0], 1 << 20)
    with memory.open(export) as mapped:
        assert mapped.device == cuda and mapped.shape == export.shape and not mapped.local
        there = bytes_of(cuda, mapped).view(np.int32)
    np.testing.assert_array_equal(there, np.arange(rows[0] << 20, rows[1] << 20, dtype=np.int32))


def test_tensors_of_one_allocation_and_of_others(cuda: kvswap.Device, owner: Process) -> None:
    mapped = [memory.open(exported(owner, f"tensor[{row}]")) for row in (5, 6)]
    small = memory.open(exported(owner, "before[0]"))
    assert (bytes_of(cuda, small) == 0).all()
    for row, one in zip((5, 6), mapped, strict=True):
        assert bytes_of(cuda, one).view(np.int32)[0] == row << 20
    for one in (*mapped, small):
        one.close()


def test_what_is_written_here_is_read_there(cuda: kvswap.Device, owner: Process) -> None:
    with memory.open(exported(owner, "tensor[20:22]")) as mapped:
        host = cuda.alloc(mapped.nbytes, host=True)
        np.frombuffer(host, np.int32)[:] = -7
        kvswap.swap_blocks_batch([host], [mapped], mapped.nbytes).wait(PATIENCE)
    rows = owner.do("[(tensor[row] == -7).all().item() for row in (19, 20, 21, 22)]")
    assert rows == [False, True, True, False]


def test_a_pool_of_torchs_memory(cuda: kvswap.Device, owner: Process) -> None:
    """Written with the pattern there, moved to the host here by each path, and checked."""
    owner.do("from conftest import write_pattern")
    owner.do("pool, stream = kvswap.Pool(device, tensor, 640, 256 << 10), kvswap.Stream(device)")
    owner.do("ptrs = [pool.ptr + i * (256 << 10) for i in range(640)]")
    owner.do("write_pattern(device, ptrs, 256 << 10, range(640), stream).result(60)")
    with memory.open(exported(owner, "pool")) as mapped:
        pool = mapped.pool()
        host = kvswap.Pool(cuda, cuda.alloc(640 * (256 << 10), host=True), 640, 256 << 10)
        order, stream = np.random.default_rng(1).permutation(640), kvswap.Stream(cuda)
        for path in ("dma", "kernel", "burst", "auto"):
            kvswap.move_blocks(pool, host, order, np.arange(640), path=path, stream=stream)
            ptrs = [host.ptr + i * (256 << 10) for i in range(640)]
            assert check_pattern(cuda, ptrs, 256 << 10, order, stream).result(PATIENCE)[0] == 0, path


def test_a_stream_waits_for_torchs_kernels(cuda: kvswap.Device, owner: Process) -> None:
    owner.do("event = kvswap.Event(device, interprocess=True); stream = torch.cuda.Stream(device.name)")
    event = memory.open_event(bytes.fromhex(owner.do("memory.export_event(event).hex()")))
    with memory.open(exported(owner, "tensor[:8]")) as mapped:
        host, stream = cuda.alloc(mapped.nbytes, host=True), kvswap.Stream(cuda)
        for turn in range(1, 6):
            owner.do(
                f"""
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(20_000_000)
                    tensor[:8].fill_({turn})
                    event.record(stream)
                """
            )
            event.wait(stream)
            transfer = kvswap.swap_blocks_batch([mapped], [host], mapped.nbytes, stream=stream)
            transfer.wait(PATIENCE)
            assert (np.frombuffer(host, np.int32) == turn).all()
            event.synchronize(PATIENCE)
