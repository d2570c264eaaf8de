"""KVSWAP_VERIFY_CODEC=1: a block that a wrong coder coded fails, and is never loaded."""

# mypy: disable-error-code="arg-type,misc,no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Gate, run_python, usable
from test_coded_pools import CODECS, LAYERS, PAGE, PATHS, Tiers, bf16, check_stored, coding_of, there_and_back
from test_gpu_ids import DeviceIds
from transfers import tiny_slots

import kvswap
from kvswap import testing
from kvswap.codecs import Coding, Field, Verdict

WRONG = r"the block at position {} is coded wrong, and is not stored in slot {} of pool .*KVSWAP_VERIFY_CODEC"


@pytest.fixture
def verifying(monkeypatch: pytest.MonkeyPatch) -> kvswap.Device:
    """A device that was opened with the switch, which is read then."""
    monkeypatch.setenv("KVSWAP_VERIFY_CODEC", "1")
    return kvswap.Device("host:145")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("codec", CODECS)
def test_what_is_coded_right_is_stored(verifying: kvswap.Device, codec: str, path: str) -> None:
    there_and_back(Tiers(verifying, coding_of(codec), split=path == "burst"), path=path)
    with tiny_slots(verifying):
        there_and_back(Tiers(verifying, coding_of(codec)), path=path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("codec", CODECS)
def test_a_block_that_is_coded_wrong_fails(verifying: kvswap.Device, codec: str, path: str) -> None:
    tiers = Tiers(verifying, coding_of(codec))
    units = tiers.coding.units * LAYERS
    with testing.fault(verifying, "code", "spoil", nth=units + 1):  # the first unit of the second block
        transfer = tiers.store([4, 7, 9], [11, 2, 5], path=path)
        with pytest.raises(kvswap.Error, match=WRONG.format(r"\d", r"\d+")):
            transfer.wait(PATIENCE)
    assert len(transfer.failed_positions) == 1, transfer.failed_positions
    (bad,) = transfer.failed_positions
    before = tiers.blocks()
    loaded = tiers.load([11, 2, 5], [20, 21, 22])
    with pytest.raises(kvswap.Error):
        loaded.wait(PATIENCE)
    assert loaded.failed_positions.tolist() == [bad], "its slot fails as one that was not stored does"
    after = tiers.blocks()
    for i, source in enumerate([4, 7, 9]):
        if i != bad:
            expected = tiers.coding.decode(tiers.coding.encode(before[source : source + 1])[0])[0]
            np.testing.assert_array_equal(after[20 + i], expected[0])


@pytest.mark.parametrize("codec", CODECS)
def test_a_load_that_was_queued_before_fails(verifying: kvswap.Device, codec: str) -> None:
    """By the block's own bytes: the verdict is not known yet."""
    tiers = Tiers(verifying, coding_of(codec))
    stream = kvswap.Stream(verifying)
    with testing.fault(verifying, "code", "spoil", nth=1), Gate(verifying) as gate:
        gate.hold(stream)
        stored = tiers.store([4, 7], [2, 11], stream=stream)
        loaded = tiers.load([2, 11], [20, 21])
        gate.open()
        for transfer in (stored, loaded):
            with pytest.raises(kvswap.Error):
                transfer.wait(PATIENCE)
    assert stored.failed_positions.tolist() == loaded.failed_positions.tolist() == [0]
    assert tiers.coding.decode(tiers.coded()[[2, 11]])[1].tolist() == [Verdict.NOT_STORED, Verdict.GOOD]


@pytest.mark.parametrize("codec", CODECS)
def test_without_the_switch_it_is_not_noticed(codec: str) -> None:
    device = kvswap.Device("host:146")
    tiers = Tiers(device, coding_of(codec))
    with testing.fault(device, "code", "spoil", nth=1):
        tiers.store([4, 7], [11, 2]).wait(PATIENCE)
    tiers.load([11, 2], [20, 21]).wait(PATIENCE)


def test_what_does_not_fit_is_told_apart(verifying: kvswap.Device) -> None:
    """A misfit is no coder's fault; where both are, the message is about the coder."""
    tiers = Tiers(verifying, coding_of("exact"))
    pages = tiers.gpu.get().reshape(tiers.shape)
    pages[0, 4] = np.random.default_rng(1).integers(0, 256, PAGE)
    tiers.put(pages)
    transfer = tiers.store([4, 7, 9], [11, 2, 5])
    with pytest.raises(kvswap.Error, match="position 0 does not fit the coded size"):
        transfer.wait(PATIENCE)
    assert transfer.failed_positions.tolist() == [0]
    with testing.fault(verifying, "code", "spoil", nth=tiers.coding.units * LAYERS + 1):
        transfer = tiers.store([4, 7, 9], [2, 5, 11], path="kernel")
        with pytest.raises(kvswap.Error, match=WRONG.format(1, 5)):
            transfer.wait(PATIENCE)
    assert transfer.failed_positions.tolist() == [0, 1]


def test_other_fields_and_partial_pages(verifying: kvswap.Device) -> None:
    """Rows with a pitch, fp16, pages of which only some bytes count, ids in device memory."""
    fields = [Field(0, 512, "e4m3"), Field(512, 16, "fp32"), Field(528, 128, "fp16")]
    coding = Coding(3 * 64 * 656, "mxfp8", page_nbytes=64 * 656, fields=fields, pitch=656)
    tiers = Tiers(verifying, coding)
    tiers.store([1, 2], [3, 4]).wait(PATIENCE)
    check_stored(tiers, [1, 2], [3, 4])
    for codec in CODECS:
        tiers = Tiers(verifying, coding_of(codec))
        tiers.store([1, 2], [3, 4], valid_nbytes=1000).wait(PATIENCE)
        for path in PATHS:
            tiers.store(DeviceIds(verifying, [5, 6]), [7, 8], path=path).wait(PATIENCE)


def test_it_is_counted(verifying: kvswap.Device) -> None:
    from kvswap import metrics

    def counted() -> int:
        (row,) = [row for row in metrics.snapshot()["devices"] if row["device"] == "host:145"]
        return sum(path["failed"].get("miscoded", 0) for path in row["paths"])

    tiers, before = Tiers(verifying, coding_of("exact")), counted()
    with testing.fault(verifying, "code", "spoil", nth=1), pytest.raises(kvswap.Error):
        tiers.store([4], [11]).wait(PATIENCE)
    assert counted() == before + 1


def test_the_kernel_may_be_refused(verifying: kvswap.Device) -> None:
    """A burst is repeated by path kernel, as where the coder is refused; then its blocks fail."""
    tiers = Tiers(verifying, coding_of("exact"))
    with testing.fault(verifying, "call", "fail", operation="launch", nth=2):  # 1 is that of CODE
        transfer = tiers.store([4, 7], [2, 11], path="burst")
        transfer.wait(PATIENCE)
    check_stored(tiers, [4, 7], [2, 11])
    with testing.fault(verifying, "call", "fail", operation="launch", nth=2, every=1):
        transfer = tiers.store([4, 7], [2, 11])
        with pytest.raises(kvswap.Error):
            transfer.wait(PATIENCE)
    assert transfer.failed_positions.tolist() == [0, 1]


ON_A_DEVICE = """
import numpy as np
import kvswap
from kvswap import testing
from kvswap.codecs import Coding

device = kvswap.Device({device!r})
for codec in ("exact", "mxfp8", "fp4"):
    coding = Coding(1 << 20, codec, page_nbytes=64 << 10)
    values = (np.random.default_rng(1).standard_normal(8 << 19, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    source, memory = device.alloc(8 << 20), device.alloc(8 * coding.coded_nbytes, host=True)
    staged = device.alloc(8 << 20, host=True)
    np.frombuffer(staged, np.uint16)[:] = values
    pool = kvswap.Pool(device, source, 8, 1 << 20)
    host = kvswap.Pool(device, memory, 8, coding.coded_nbytes, coding=coding)
    kvswap.move_blocks(kvswap.Pool(device, staged, 8, 1 << 20), pool, range(8), range(8)).wait(60)
    for path in ("burst", "kernel"):
        kvswap.move_blocks(pool, host, range(8), range(8), path=path).wait(60)
        with testing.fault(device, "code", "spoil", nth=70):
            transfer = kvswap.move_blocks(pool, host, range(8), range(8), path=path)
            try:
                transfer.wait(60)
            except kvswap.Error as error:
                assert "is coded wrong" in str(error), error
            else:
                raise AssertionError("not noticed")
        assert len(transfer.failed_positions) == 1
print("good")
"""


def test_on_a_device(device: kvswap.Device) -> None:
    usable(device, "kernel")
    run = run_python(ON_A_DEVICE.format(device=device.name), KVSWAP_VERIFY_CODEC="1")
    assert (run.returncode, run.stderr, run.stdout) == (0, "", "good\n")


def test_a_value_that_is_neither() -> None:
    run = run_python("import kvswap; kvswap.Device('host:0')", KVSWAP_VERIFY_CODEC="yes")
    assert "KVSWAP_VERIFY_CODEC is 'yes'; it is 1 or 0" in run.stderr


def test_values_of_other_seeds(verifying: kvswap.Device) -> None:
    """Nothing that the codecs code right is ever turned down: normal values, special ones, any bits."""
    for seed in range(6):
        for codec in CODECS:
            tiers = Tiers(verifying, coding_of(codec), seed=seed)
            pages = bf16((tiers.shape[0], tiers.shape[1], PAGE // 2), seed)
            words, random = pages.view(np.uint16), np.random.default_rng(seed)
            words[random.random(words.shape) < 0.002] = random.choice([0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 1, 0x8000])
            if codec != "exact":
                words[:, ::3] = random.integers(0, 1 << 16, words[:, ::3].shape)
            tiers.put(pages)
            transfer: Any = tiers.store(range(30), range(30))
            transfer.wait(PATIENCE)
