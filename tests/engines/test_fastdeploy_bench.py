"""benchmarks/bench_fastdeploy.py runs, and its race is one."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

import kvswap

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")

pytest.importorskip("zmq")
pytest.importorskip("msgspec")


@pytest.mark.slow
def test_the_benchmark(device_name: str, tmp_path: Path) -> None:
    """Small: the bytes of every part count, not its speed."""
    record = tmp_path / "record.json"
    small = ["--tensors", "4", "--blocks", "16", "--block-nbytes", "131072", "--repeats", "1", "--rounds", "3",
             "--pairs", "1", "--seconds", "0.2"]  # fmt: skip
    parts = ["ops", "race", "slowdown", *(["ranks"] if device_name == "host:0" else [])]
    places = [str(Path(kvswap.__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "bench_fastdeploy.py"), *parts, "--device", device_name,
         "--json", str(record), *small],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(record.read_text())
    assert found["ops"]["bytes_verified"] > 0
    assert {row["method"] for row in found["ops"]["rows"]} == {"fastdeploy", "batch", "warp", "loop"}
    assert found["race"]["stale_with_event"] == 0
    if device_name == "host:0":  # a GPU may let the store of the other process wait behind the kernel by chance
        assert found["race"]["stale_without_event"] > 0  # of 3; on a busy machine a copy may be late enough
    assert all(row["gbps"] > 0 for row in found["slowdown"])
    if "ranks" in parts:
        assert found["ranks"]["wrong_bytes"] == 0 and found["ranks"]["SWAP2GPU"] > 0
