"""Blocks that cannot be read, and disks that refuse writes: what is lost is not counted as stored, and the rest is
served."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE
from test_files import PAGE, Rig, blocks_of, engine, keys_of  # noqa: F401  # engine is a fixture

import kvswap
from kvswap import testing
from kvswap.files import FileStore, Layout


def load(store: FileStore, keys: list[bytes], nbytes: int) -> tuple[Any, dict[int, str]]:
    """The bytes, and the failures."""
    target = np.zeros((len(keys), nbytes), np.uint8)
    transfer = store.load(keys, target, range(len(keys)))
    with contextlib.suppress(kvswap.Error):
        transfer.wait(PATIENCE)
    return target, {int(at): str(why) for at, why in transfer.reasons.items()}


def check_healed(rig: Rig, keys: list[bytes], data: Any, lost: dict[int, str]) -> None:
    """The lost ones are not stored; stored as engines do, all are there."""
    assert lost and rig.store.contains(keys) == [i not in lost for i in range(len(keys))]
    again = rig.store.store(keys, data, range(len(keys)), replace=False)
    again.wait(PATIENCE)
    assert again.num_kept == len(keys) - len(lost)
    np.testing.assert_array_equal(rig.get(keys), data)


@pytest.mark.parametrize("at", [0, PAGE, 2 * PAGE, PAGE + 5000, PAGE + 3 * 12288 + 100])
@pytest.mark.parametrize("full", [False, True])
def test_a_truncated_segment(tmp_path: Path, engine: str, at: int, full: bool) -> None:  # noqa: F811
    """Its slots are used again, also where there are no others."""
    rig = Rig(tmp_path, engine=engine, slots=8 if full else 64)
    data, keys = blocks_of(1, 8, rig.nbytes), keys_of(8)
    rig.put(keys, data)
    os.truncate(rig.files()[0], at)
    target, lost = load(rig.store, keys, rig.nbytes)
    assert all((target[i] == data[i]).all() for i in range(8) if i not in lost)
    assert "shorter than it should be" in lost[max(lost)] or "damaged" in lost[max(lost)]
    check_healed(rig, keys, data, lost)
    assert rig.store.stats()["lost_slots"] == 0
    rig.reopen()
    np.testing.assert_array_equal(rig.get(keys), data)
    rig.store.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.EUCLEAN, errno.EREMOTEIO])
def test_unreadable_and_unwritable(tmp_path: Path, engine: str, code: int) -> None:  # noqa: F811
    """The header of the bad slot cannot be erased either."""
    rig = Rig(tmp_path, engine=engine)
    data, keys = blocks_of(2, 4, rig.nbytes), keys_of(4)
    rig.put(keys, data)
    with testing.file_fault(rig.store, "read", "fail", every=1, code=code):
        _, lost = load(rig.store, keys, rig.nbytes)
    assert len(lost) == 4
    with testing.file_fault(rig.store, "write", "fail", nth=1, code=code):
        rig.put(keys[:1], data[:1], replace=False)
    check_healed(rig, keys[1:], data[1:], {0: "", 1: "", 2: ""})
    for seed in range(3):  # the block whose older copy is still there is not evicted
        rig.put(keys_of(64, f"more-{seed}"), blocks_of(seed, 64, rig.nbytes))
    np.testing.assert_array_equal(rig.get(keys[:1]), data[:1])
    rig.store.delete(keys[:1]).wait(PATIENCE)
    rig.reopen()
    assert rig.store.contains(keys[:1]) == [False]
    rig.store.close()


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EAGAIN, errno.EMFILE])
def test_a_load_that_fails_for_another_reason_loses_nothing(tmp_path: Path, code: int) -> None:
    rig = Rig(tmp_path, engine="threads")
    data, keys = blocks_of(3, 4, rig.nbytes), keys_of(4)
    rig.put(keys, data)
    with testing.file_fault(rig.store, "read", "fail", every=1, code=code):
        _, failed = load(rig.store, keys, rig.nbytes)
    assert len(failed) == 4 and rig.store.contains(keys) == [True] * 4
    np.testing.assert_array_equal(rig.get(keys), data)
    rig.store.close()


@pytest.mark.parametrize("how", ["truncated", "EIO"])
def test_a_block_of_another_writer(tmp_path: Path, how: str) -> None:
    """It is forgotten here; then an own copy is stored."""
    nbytes, keys = 4096, keys_of(4)
    data = blocks_of(4, 4, nbytes)
    options: dict[str, Any] = {"capacity": 1 << 20, "segment_nbytes": 1 << 18, "shared": True}
    with (
        FileStore(tmp_path / "kv", Layout(nbytes), **options) as theirs,
        FileStore(tmp_path / "kv", Layout(nbytes), **options) as own,
    ):
        theirs.store(keys, data, range(4)).wait(PATIENCE)
        end = time.monotonic() + PATIENCE
        while own.contains(keys) != [True] * 4 and time.monotonic() < end:
            time.sleep(0.01)
        if how == "truncated":
            os.truncate(next((tmp_path / "kv" / "writer-0000").glob("segment-*")), PAGE)
            _, lost = load(own, keys, nbytes)
        else:
            with testing.file_fault(own, "read", "fail", every=1, code=errno.EIO):
                _, lost = load(own, keys, nbytes)
        assert len(lost) == 4 and own.contains(keys) == [False] * 4
        again = own.store(keys, data, range(4), replace=False)
        again.wait(PATIENCE)
        assert again.num_kept == 0
        np.testing.assert_array_equal(load(own, keys, nbytes)[0], data)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO, errno.EACCES, errno.ENOENT, errno.EMFILE])
def test_a_disk_that_refuses_segments_is_not_full(tmp_path: Path, code: int) -> None:
    rig = Rig(tmp_path)
    data, keys = blocks_of(5, 8, rig.nbytes), keys_of(8)
    rig.put(keys, data)
    with testing.file_fault(rig.store, "open", "fail", every=1, code=code):
        transfer = rig.store.store(keys_of(4, "new"), data, range(4))
        with pytest.raises(kvswap.Error, match=f"errno {code}"):
            transfer.wait(PATIENCE)
    assert len(transfer.failed_positions) == 4 and rig.store.stats()["evicted"] == 0
    np.testing.assert_array_equal(rig.get(keys), data)
    time.sleep(2.1)
    rig.put(keys_of(4, "new"), data[:4])
    rig.store.close()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO])
def test_writes_that_fail_do_not_drain_the_store(tmp_path: Path, code: int) -> None:
    """A full store on a disk that takes no writes any more keeps serving what it has."""
    rig = Rig(tmp_path, slots=64)
    data, keys = blocks_of(6, 64, rig.nbytes), keys_of(64)
    rig.put(keys, data)
    with testing.file_fault(rig.store, "write", "fail", every=1, code=code):
        for i in range(200):
            transfer = rig.store.store(keys_of(1, f"new-{i}"), data, [0])
            with pytest.raises(kvswap.Error, match=f"errno {code}"):
                transfer.wait(PATIENCE)
    there = [i for i, found in enumerate(rig.store.contains(keys)) if found]
    assert len(there) == 64 if code == errno.EROFS else len(there) >= 64 - 12
    np.testing.assert_array_equal(rig.get([keys[i] for i in there]), data[there])
    time.sleep(2.1)  # then the store tries one write
    rig.put(keys_of(1, "later"), data[:1])
    rig.put(keys_of(4, "later"), data[:4])
    rig.reopen()
    np.testing.assert_array_equal(rig.get(keys_of(4, "later")), data[:4])
    rig.store.close()


def test_a_slot_that_cannot_be_written_is_used_last(tmp_path: Path) -> None:
    rig = Rig(tmp_path, slots=8)
    data = blocks_of(7, 20, rig.nbytes)
    rig.put([b"first"], data[:1])
    with testing.file_fault(rig.store, "write", "fail", nth=1, code=errno.EIO):
        transfer = rig.store.store([b"k"], data[1:2], [0])
        with pytest.raises(kvswap.Error, match="errno 5"):
            transfer.wait(PATIENCE)
    for i in range(18):
        rig.put(keys_of(1, f"{i}"), data[i : i + 1])
    stats = rig.store.stats()
    assert (stats["lost_slots"], stats["segments"], stats["blocks"]) == (0, 1, 7)  # one slot is free still
    rig.store.close()
