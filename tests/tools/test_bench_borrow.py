"""benchmarks/bench_borrow.py on host devices: what it prints, and that it checks what it moves."""

from __future__ import annotations

import json
import sys

import pytest
from conftest import ROOT

from kvswap import testing

DEVICES = ["host:220", "host:221"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_borrow

    monkeypatch.setattr(sys, "argv", ["bench_borrow.py", "--devices", *DEVICES, "--nbytes", str(16 << 20), *arguments])
    return int(bench_borrow.main())


def test_it_measures_and_checks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--repeats", "1", "--shape", "64x32k", "--codec", "exact", "--slots", str(256 << 10), "2"]
    assert run(monkeypatch, *few, "--slots", str(512 << 10), "2", "--beside") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "0 wrong words"
    rows = [json.loads(line) for line in lines[1:-1]]
    borrowed = [row for row in rows if "lent" in row]
    assert [row["codec"] for row in borrowed] == [None] * 4 + ["exact"] * 2
    assert all(row["lent"] == pytest.approx(0.5, abs=0.1) and row["borrow GB/s"] > 0 for row in borrowed)
    assert [row["way"] for row in rows if "both" in row] == ["store", "load"]
    assert len([row for row in rows if row.get("beside") == "the lender's step" and row["slow_down"] > 0]) == 4


def test_wrong_bytes_are_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import kvswap

    few = ["--repeats", "1", "--shape", "64x32k", "--codec", "exact", "--slots", str(256 << 10), "2"]
    with testing.fault(kvswap.Device(DEVICES[0]), "code", "spoil", nth=1, every=100):
        assert run(monkeypatch, *few, "--slots", str(512 << 10), "2") == 1
    assert not capsys.readouterr().out.endswith("\n0 wrong words\n")


@pytest.mark.parametrize("spoiled", [False, True])
def test_own_transfers_of_the_lender(
    spoiled: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import kvswap

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_borrow

    monkeypatch.setattr(bench_borrow, "OWN_SAMPLES", 2)
    few = ["--repeats", "1", "--own", "--slots", str(256 << 10), "2"]
    if spoiled:
        with testing.fault(kvswap.Device(DEVICES[1]), "copy", "skip", nth=1, every=1):
            assert run(monkeypatch, *few) == 1
        return
    assert run(monkeypatch, *few) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert [(row["nbytes"], row["own"]) for row in rows[::4]] == [
        (nbytes, path) for nbytes in (64 << 10, 2 << 20, 16 << 20) for path in ("auto", "dma")
    ]
    ways = [(row["dir"], row["borrowed"]) for row in rows[:4]]
    assert ways == [("D2H", "D2H"), ("D2H", "H2D"), ("H2D", "D2H"), ("H2D", "H2D")]
    assert sum(row["lent GB/s"] for row in rows) > 0
    assert all(row["ms"] > 0 and row["alone ms"] > 0 for row in rows)
