"""The replay's third tier: its book-keeping against a brute-force model, and blocks that go to files and back."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import file_reader
import numpy as np
import pytest

from kvswap import _C, cli
from kvswap.replay import file_tier, run
from kvswap.replay.errors import UsageError
from kvswap.replay.geometry import named
from kvswap.replay.settings import Settings, Sizes
from kvswap.replay.tiers import Tiers


class Brute:
    """Three lists, the least recently used block first."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes
        self.tiers: list[list[int]] = [[], [], []]

    def touch(self, blocks: list[int]) -> None:
        for tier in self.tiers:
            for block in reversed(blocks):
                if block in tier:
                    tier.remove(block)
                    tier.append(block)

    def give_up(self, tier: int, count: int) -> list[int]:
        surplus = max(0, len(self.tiers[tier]) + count - self.sizes[tier])
        leaving, self.tiers[tier] = self.tiers[tier][:surplus], self.tiers[tier][surplus:]
        return leaving

    def admit(self, blocks: list[int]) -> tuple[int, int, int, list[int], list[int]]:
        gpu, host, file = self.tiers
        leading = next((i for i, b in enumerate(blocks) if b not in gpu + host + file), len(blocks))
        hits = [sum(b in gpu for b in blocks[:leading])]
        hits.append(sum(b in host and b not in gpu for b in blocks[:leading]))
        hits.append(leading - sum(hits))
        self.touch(blocks)
        new = [b for b in blocks if b not in gpu]
        self.give_up(0, len(new))
        self.tiers[0] += new
        self.touch(blocks)
        stores = [b for b in blocks[leading:] if b not in host][: self.sizes[1] - sum(b in host for b in blocks)]
        leaving = self.give_up(1, len(stores))
        self.tiers[1] += stores
        self.touch(blocks)
        to_file = [b for b in leaving if b not in self.tiers[2]]
        to_file = to_file[max(0, len(to_file) - self.sizes[2]) :]
        dropped = self.give_up(2, len(to_file))
        self.tiers[2] += to_file
        for block in reversed(to_file):
            self.tiers[2].remove(block)
            self.tiers[2].append(block)
        return hits[0], hits[1], hits[2], to_file, dropped


@pytest.mark.parametrize("seed", range(30))
def test_the_tiers(seed: int) -> None:
    rng = random.Random(seed)
    sizes = rng.randint(4, 12), rng.randint(1, 12), rng.randint(1, 20)
    tiers, brute = Tiers(*sizes), Brute(*sizes)
    for _ in range(300):
        start = rng.randint(0, 40)
        blocks = list(range(start, start + rng.randint(1, sizes[0])))
        admission = tiers.admit(np.array(blocks, np.uint64))
        gpu, host, file, to_file, dropped = brute.admit(blocks)
        assert (admission.gpu_hits, admission.host_hits, admission.file_hits) == (gpu, host, file)
        given_up = admission.host_given_up.hashes[admission.file_stores].tolist()
        assert (given_up, admission.file_given_up.tolist()) == (to_file, dropped)
        assert tiers.file.residents()[0].tolist() == brute.tiers[2]
        assert len(admission.loads) + len(admission.file_loads) + admission.gpu_hits == admission.leading


def replay(folder: Path, *more: str) -> int:
    tiers = ["--gpu-blocks", "64", "--host-blocks", "128", "--file-tier", str(folder / "tier"), "--file-blocks", "400"]
    return cli.main(["demo", "--device", "host:0", "--requests", "150", *tiers, *more])


@pytest.mark.slow
def test_blocks_go_to_files_and_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(tmp_path, f"--json={tmp_path / 'out.json'}") == 0
    told = json.loads((tmp_path / "out.json").read_text())
    tier = told["file_tier"]
    assert tier["hits"] > 50 and tier["bytes_stored"] > 0 and tier["bytes_loaded"] > 0 and tier["verified_at_end"] > 50
    assert told["wrong_bytes"] == 0 and told["ended"] == "complete"
    assert "hits in the file tier" in capsys.readouterr().out
    assert cli.main(["files", "stat", "--json", str(tmp_path / "tier")]) == 0
    (store,) = json.loads(capsys.readouterr().out)["stores"]
    assert store["blocks"] == tier["verified_at_end"] and store["block_nbytes"] == told["bytes_per_block"]
    held = [file_reader.read_geometry(path.read_bytes()[:4096], b"KVSSTORE") for path in tmp_path.rglob("store.kvs")]
    assert [json.loads(geometry.layout)["use"] for geometry in held] == ["kvswap replay"]
    assert replay(tmp_path) == 0  # once more, in the same folder


@pytest.mark.slow
def test_a_model_of_two_groups_makes_two_stores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    requests = [{"timestamp": i, "input_length": 2048, "output_length": 1, "hash_ids": [4 * i + j for j in range(4)]}
                for i in range(12)]  # fmt: skip
    trace.write_text("".join(json.dumps(request) + "\n" for request in requests))
    tiers = ["--gpu-blocks", "8", "--host-blocks", "8", "--file-tier", str(tmp_path / "tier"), "--file-blocks", "20"]
    assert cli.main(["replay", str(trace), "--model", "gpt-oss-120b", "--device", "host:0", *tiers]) == 0
    assert cli.main(["files", "check", "--json", str(tmp_path / "tier")]) == 0
    out = capsys.readouterr().out
    stores = json.loads(out[out.index("\n{") :])["stores"]
    assert [Path(store["directory"]).name for store in stores] == ["full", "sliding"]
    assert [store["right"] for store in stores] == [20, 20]


@pytest.mark.slow
def test_another_block_from_a_file_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks can fail: two blocks of one load change places."""
    load = file_tier.FileTier.load

    def swapped(self: Any, hashes: Any, slots: Any, after: Any) -> Any:
        return load(self, np.roll(hashes, 1), slots, after)

    monkeypatch.setattr(file_tier.FileTier, "load", swapped)
    assert replay(tmp_path) == 1
    assert "WRONG BYTES" in (told := capsys.readouterr().err) and "file tier" in told


def test_what_goes_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--device", "host:0", "--file-blocks", "4"]) == 2
    assert "--file-tier DIR and --file-blocks N go together" in capsys.readouterr().err
    with pytest.raises(UsageError, match="takes what leaves the host tier"):
        Settings(geometry=named("llama-3.1-8b"), sizes=Sizes(4, 0, 4), file_tier=str(tmp_path))


def test_a_folder_that_cannot_be_the_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["demo", "--device", "host:0", "--requests", "2", "--file-blocks", "4", "--file-tier"]
    assert cli.main([*few, str(tmp_path / "tier")]) == 0
    assert cli.main([*few, str(tmp_path / "tier"), "--seed", "1"]) == 2  # the seed is a part of the layout
    told = capsys.readouterr().err
    assert "holds blocks of another layout" in told and "name another folder, or empty it" in told
    (tmp_path / "file").write_bytes(b"")
    assert cli.main([*few, str(tmp_path / "file")]) == 2
    assert "it is a file; name a directory" in capsys.readouterr().err


def test_more_blocks_than_can_be_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> Tiers:
        raise MemoryError

    monkeypatch.setattr(run, "Tiers", refuse)
    assert replay(tmp_path) == 3
    assert "400 file blocks do not fit into memory: give" in capsys.readouterr().err


def test_a_tier_that_does_not_open_ends_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise _C.Error("the disk is gone")

    monkeypatch.setattr(file_tier, "FileStore", refuse)
    assert replay(tmp_path, f"--json={tmp_path / 'out.json'}") == 3
    out = capsys.readouterr().out
    assert out.splitlines()[-1].split(maxsplit=1) == ["FAILED", "the disk is gone"] and "wrong bytes" not in out
    told = json.loads((tmp_path / "out.json").read_text())
    assert (told["ended"], told["error"]) == ("failed", "the disk is gone")
