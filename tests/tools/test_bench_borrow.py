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
