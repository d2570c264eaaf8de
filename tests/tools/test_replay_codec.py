"""A replay with a codec: blocks come back as they must, those that do not fit are not stored and nothing else is, and
what a codec or a copy does wrong is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Buffer, usable
from test_replay import make_trace, settings

import kvswap
from kvswap import _C, cli, testing
from kvswap.codecs import CODECS, Coding, Verdict
from kvswap.replay import geometry, pattern
from kvswap.replay.errors import UsageError
from kvswap.replay.report import Report
from kvswap.replay.run import Replay
from kvswap.replay.settings import Settings, host_nbytes

SHAPE = geometry.scale(geometry.custom(3, 4, 64), 3 * 1024, allow_tiny=True)
SHARES = {pattern.ESCAPES: (3, 0), pattern.FULL: (4, 1), pattern.MISFIT: (10, 0), pattern.BEYOND: (10, 5)}
TWO_GROUPS = geometry.scale(geometry.named("gpt-oss-120b"), 36 * 1024, allow_tiny=True)


@pytest.fixture(autouse=True)
def _kernels(session_device: kvswap.Device) -> None:
    usable(session_device, "kernel")


@pytest.fixture(autouse=True)
def _many_misfits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pattern, "_SHARES", SHARES)


def replayed(device: _C.Device, options: Settings, requests: int = 160) -> Report:
    return Replay(make_trace(requests), options, device).run()


def check(report: Report, options: Settings) -> None:
    """Something was stored, came back, and was verified on each way."""
    assert report.ended == "complete" and report.wrong_bytes == 0
    assert report.host_hits > 20 and report.verified_given_up > 20 and report.verified_at_end["host"] > 10
    assert report.stores.nbytes == report.offered * options.geometry.block_nbytes
    told = report.to_dict()["codec"]
    assert told["bytes_per_block"] == host_nbytes(options.geometry, options.codec) < options.geometry.block_nbytes
    assert told["link_bytes_loaded"] == report.host_hits * told["bytes_per_block"]
    assert (report.misfits > 5) == (options.codec == "exact")


# -- patterns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bytes", "window", "coarse"])
@pytest.mark.parametrize("key", [4096, 4097, 4098, 4099, 5 << 2 | 3, 1 << 62 | 0xFFFF])
@pytest.mark.parametrize("nbytes", [6, 4096, 70000])
def test_the_kernel_writes_what_numpy_says(device: kvswap.Device, kind: Any, key: int, nbytes: int) -> None:
    buffer, stream = Buffer(device, nbytes, "gpu"), kvswap.Stream(device)
    items = [np.array([word], np.uint64) for word in (buffer.ptr, nbytes, key)]
    _C._pattern(device, False, *items, stream, kind).result(PATIENCE)
    wanted = pattern.pattern_bytes(key, nbytes, kind)
    np.testing.assert_array_equal(buffer.get(), wanted)
    assert _C._pattern(device, True, *items, stream, kind).result(PATIENCE) == (0, None, None)
    wanted[5] ^= 1
    buffer.put(wanted)
    assert _C._pattern(device, True, *items, stream, kind).result(PATIENCE) == (1, 0, 5)


@pytest.mark.parametrize("nbytes", [1024, 1168, 4096, 48 << 10])
def test_which_patterns_fit(nbytes: int) -> None:
    most, drawn = pattern.most_escapes(nbytes), pattern.mix(np.arange(64, dtype=np.uint64))
    for which in (pattern.PLAIN, pattern.ESCAPES, pattern.MISFIT, pattern.FULL, pattern.BEYOND):
        for key in pattern.window_keys(drawn, np.full(64, which, np.uint64), most).tolist():
            block = pattern.pattern_bytes(key, nbytes, "window").reshape(1, -1)
            coded, verdicts = Coding(nbytes, "exact").encode(block)
            fits = which not in (pattern.MISFIT, pattern.BEYOND)
            assert verdicts[0] == (Verdict.GOOD if fits else Verdict.NOT_STORED)
            escapes = int(coded[0, 6:8].view(np.uint16)[0])
            assert (escapes > 0) == (which in (pattern.ESCAPES, pattern.FULL))
            assert which != pattern.FULL or escapes == most


def test_how_many_are_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    hashes = pattern.mix(np.arange(400_000, dtype=np.uint64))
    found = np.bincount(pattern.classes(hashes, 7).astype(np.int64), minlength=5) / len(hashes)
    np.testing.assert_allclose(found[1:], [0.099, 0.0005, 0.01, 0.0005], rtol=0.2)
    assert len(pattern.misfits(hashes, 7, "window")) == round((found[2] + found[4]) * len(hashes))


@pytest.mark.parametrize("codec", CODECS)
def test_coarse_values_come_back(codec: str) -> None:
    blocks = np.stack([pattern.pattern_bytes(key, 12288, "coarse") for key in range(50)])
    coding = Coding(12288, codec)
    np.testing.assert_array_equal(coding.decode(coding.encode(blocks)[0])[0], blocks)


# -- replays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("path", ["auto", "burst", "kernel"])
def test_a_replay(device: _C.Device, codec: str, path: Any) -> None:
    options = settings(SHAPE, codec=codec, path=path)
    check(replayed(device, options), options)


def test_two_groups(device: _C.Device) -> None:
    options = settings(TWO_GROUPS, codec="exact")
    check(replayed(device, options), options)


@pytest.mark.parametrize("codec", ["exact", "fp4"])
def test_with_files(device: _C.Device, tmp_path: Path, codec: str) -> None:
    from kvswap.replay.settings import Sizes

    options = Settings(geometry=SHAPE, sizes=Sizes(10, 12, 40), codec=codec, file_tier=str(tmp_path / "tier"))
    report = replayed(device, options)
    assert report.ended == "complete" and report.wrong_bytes == 0
    assert report.file_hits > 5 and report.verified_in_files > 5
    assert report.file_stores.nbytes % host_nbytes(SHAPE, codec) == 0


# -- what is found ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("path", ["burst", "kernel"])
def test_a_coder_that_is_wrong_once(device: _C.Device, codec: str, path: Any) -> None:
    options = settings(SHAPE, codec=codec, path=path)
    with (
        testing.fault(device, "code", "spoil", nth=40),
        pytest.raises(_C.Error, match=r"WRONG BYTES"),
    ):
        replayed(device, options)


def test_a_block_in_another_slot(device: _C.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    swap = Replay._swap

    def shifted(self: Any, memory: Any, direction: int, slots: Any, *more: Any) -> Any:
        return swap(self, memory, direction, np.roll(slots, direction), *more)  # of loads

    monkeypatch.setattr(Replay, "_swap", shifted)
    with pytest.raises(_C.Error, match="WRONG BYTES"):
        replayed(device, settings(SHAPE, codec="mxfp8"))


def test_a_misfit_that_was_stored(device: _C.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks all fit, and the replay expects that some do not."""
    monkeypatch.setattr(pattern, "_SHARES", {})
    monkeypatch.setattr(pattern, "misfits", lambda hashes, seed, kind: np.arange(len(hashes))[:1])
    with pytest.raises(_C.Error, match="1 blocks do not fit their coded size, and a store of them did not fail"):
        replayed(device, settings(SHAPE, codec="exact"))


def test_a_block_that_should_have_fitted(device: _C.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pattern, "misfits", lambda hashes, seed, kind: np.zeros(0, np.int64))
    with pytest.raises(_C.Error, match="does not fit the coded size"):
        replayed(device, settings(SHAPE, codec="exact"))


# -- the command ------------------------------------------------------------------------------------------------------


def test_bytes_of_the_host_tier_hold_more_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["demo", "--device", "host:0", "--requests", "3", "--host-bytes", "8GiB"]
    told = []
    for more in ([], ["--codec", "exact"]):
        assert cli.main([*few, *more]) == 0
        told.append(capsys.readouterr().out)
    assert "host tier 128 blocks" in told[0] and "host tier 167 blocks" in told[1]
    assert "coded by exact: 0.763 of the size" in told[1] and "not coded" in told[1] and "not coded" not in told[0]


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    for more, why in (
        (["--codec", "zip"], "--codec zip: there are exact, mxfp8, fp4"),
        (["--codec", "exact", "--path", "dma"], "--path dma moves bytes as they are"),
        (["--codec", "exact", "--fault", "copy:skip:10"], "would never happen: coded blocks have faults of kind code"),
        (["--fault", "code:spoil:10"], "would never happen"),
        (["--codec", "exact", "--host-blocks", "0"], "--codec is of the host tier: there is none"),
    ):
        assert cli.main(["demo", "--device", "host:0", *more]) == 2
        assert why in capsys.readouterr().err
    with pytest.raises(UsageError, match="needs 1024 bytes a block in each layer, and there are 128"):
        settings(codec="exact")
    with pytest.raises(UsageError, match="there are exact"):
        settings(SHAPE, codec="zip")


def test_elements_of_another_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n')
    assert cli.main(["replay", str(trace), "--codec", "exact", "--dtype-bytes", "1"]) == 2
    assert "--codec exact codes bf16" in capsys.readouterr().err
