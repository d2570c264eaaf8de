"""The transfer manager's modes for files."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Gate
from test_transfer_manager import FP4, HALF, SECONDARY, Rig

import kvswap
from kvswap.files import read_block_files, write_block_files
from kvswap.trtllm import Block

OPTIONS = {"file_options": {"capacity": 4 << 20, "staging_nbytes": 1 << 16}}


@pytest.fixture
def rig(device: kvswap.Device) -> Rig:
    return Rig(device, HALF, FP4, **OPTIONS)


def test_there_and_back(rig: Rig, tmp_path: Path) -> None:
    stored = rig.manager.offload([3, 7], [1000, 2], 0, "posix", str(tmp_path / "kv"))
    stored.wait(PATIENCE)
    rig.check()  # secondary memory is not touched
    rig.manager.onboard([2, 1000], [0, 9], 0, "posix", str(tmp_path / "kv")).wait(PATIENCE)
    rig.copied(Block(7), Block(0))
    rig.copied(Block(3), Block(9))
    rig.check()
    stats = rig.manager.get_and_reset_transfer_stats()
    assert (stats.offload_blocks, stats.onboard_blocks) == (2, 2)
    assert stats.offload_bytes == stored.nbytes == 2 * sum(pool.nbytes() for pool in rig.pools)
    rig.manager.close(PATIENCE)
    again = Rig(rig.device, HALF, FP4, **OPTIONS)
    again.model[True] = [rows.copy() for rows in again.model[True]]
    again.manager.onboard(Block(1000, False), Block(4), 0, "posix", str(tmp_path / "kv")).wait(PATIENCE)
    for mine, theirs in zip(again.model[True], rig.model[True], strict=True):
        mine[4] = theirs[9]
    again.check()
    again.manager.close(PATIENCE)


def test_copies_of_both_kinds_are_in_order(rig: Rig, tmp_path: Path) -> None:
    """Memory, file, memory again, all on the same blocks and submitted at once."""
    folder = str(tmp_path)
    for step in range(20):
        rig.manager.onboard([step % SECONDARY], [1])
        rig.copied(Block(step % SECONDARY, False), Block(1))
        rig.manager.offload([1], [step], 0, "posix", folder)
        rig.manager.onboard([(step + 3) % SECONDARY], [1])
        rig.copied(Block((step + 3) % SECONDARY, False), Block(1))
        rig.manager.onboard([step], [2], 0, "posix", folder)
        rig.manager.offload([2], [5])
        rig.copied(Block(step % SECONDARY, False), Block(2))
        rig.copied(Block(2), Block(5, False))
    rig.manager.sync_transfers(0)
    rig.check()
    rig.manager.close(PATIENCE)


def test_it_waits_for_compute(rig: Rig, tmp_path: Path) -> None:
    model = kvswap.Stream(rig.device)
    with Gate(rig.device) as gate:
        gate.hold(model)
        rig.write(model, 3, 77)
        rig.manager.sync_with_compute(model)
        stored = rig.manager.offload([3], [0], 0, "posix", str(tmp_path))
        with pytest.raises(TimeoutError):
            stored.wait(0.05)
        gate.open()
        stored.wait(PATIENCE)
    rig.manager.onboard([0], [6], 0, "posix", str(tmp_path)).wait(PATIENCE)
    assert rig.look(kvswap.Stream(rig.device), Block(6), 77).result(PATIENCE)[0] == 0
    rig.manager.close(PATIENCE)


def test_files_of_others(rig: Rig, tmp_path: Path) -> None:
    """block_{id}_pool_{i}.bin, as TensorRT-LLM writes them."""
    sizes = [pool.nbytes() for pool in rig.pools]
    data = np.random.default_rng(3).integers(0, 256, sum(sizes), np.uint8)
    write_block_files(tmp_path, 12, sizes, data)
    assert [path.stat().st_size for path in sorted(tmp_path.glob("block_12_pool_*.bin"))] == sizes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["block_12_pool_0.bin", "block_12_pool_1.bin"]
    found = read_block_files(tmp_path, 12, sizes)
    assert found is not None and (found == data).all() and read_block_files(tmp_path, 13, sizes) is None
    rig.manager.onboard([12], [8], 0, "posix", str(tmp_path)).wait(PATIENCE)
    begin = 0
    for rows, nbytes in zip(rig.model[True], sizes, strict=True):
        rows[8, :nbytes] = data[begin : begin + nbytes]
        begin += nbytes
    rig.check()
    (tmp_path / "block_13_pool_0.bin").write_bytes(b"short")
    (tmp_path / "block_13_pool_1.bin").write_bytes(b"short")
    with pytest.raises(ValueError, match="has 5 bytes; a block of that pool has"):
        rig.manager.onboard([13], [8], 0, "posix", str(tmp_path))
    rig.manager.close(PATIENCE)


def test_a_block_file_that_is_none(tmp_path: Path) -> None:
    """Nothing waits for it, and no more is read than a block has."""
    path = tmp_path / "block_1_pool_0.bin"
    os.mkfifo(path)
    with pytest.raises(OSError, match="is a link, directory, pipe"):
        read_block_files(tmp_path, 1, [8])
    path.unlink()
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(ValueError, match=f"has {1 << 40} bytes"):
        read_block_files(tmp_path, 1, [8])


def test_block_files_are_not_written_through_links(tmp_path: Path) -> None:
    aside = tmp_path / "aside"
    aside.write_bytes(b"another's")
    (tmp_path / "block_3_pool_0.tmp").symlink_to(aside)
    write_block_files(tmp_path, 3, [8], np.arange(8, dtype=np.uint8))
    assert aside.read_bytes() == b"another's"
    block = read_block_files(tmp_path, 3, [8])
    assert block is not None and block.tolist() == list(range(8))


def test_what_is_not_there(rig: Rig, tmp_path: Path) -> None:
    load = rig.manager.onboard([5], [1], 0, "posix", str(tmp_path))
    with pytest.raises(kvswap.Error, match="block 0 is not in the store"):
        load.wait(PATIENCE)
    rig.manager.sync_transfers(0)
    rig.check()
    rig.manager.close(PATIENCE)


def test_wrong_arguments(rig: Rig, tmp_path: Path) -> None:
    calls: list[tuple[Any, type[Exception], str]] = [
        (lambda: rig.manager.offload(1, 2, 0, "posix"), ValueError, "directory is needed"),
        (lambda: rig.manager.offload(1, -2, 0, "posix", str(tmp_path)), ValueError, "a number from 0 on"),
        (lambda: rig.manager.offload(99, 2, 0, "posix", str(tmp_path)), IndexError, "99"),
        (lambda: rig.manager.offload([1, 2], 2, 0, "posix", str(tmp_path)), ValueError, "items"),
        (lambda: rig.manager.offload(1, Block(2), 0, "posix", str(tmp_path)), ValueError, "primary memory and files"),
        (lambda: rig.manager.offload(1, 2, 0, "posix", str(tmp_path), layer_events=True), ValueError, "not for files"),
        (lambda: rig.manager.offload(1, 2, 0, "gds", str(tmp_path)), kvswap.Error, "mode 'gds' cannot be used: libcuf"),
        (lambda: rig.manager.offload(1, 2, 0, "disk", str(tmp_path)), ValueError, "one of 'dram', 'posix', 'gds'"),
    ]
    for call, kind, message in calls:
        with pytest.raises(kind, match=message):
            call()
    rig.check()
    rig.manager.close(PATIENCE)
