"""`kvswap bench --handlers`: it measures what it says, and finds wrong bytes."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import kvswap
from kvswap import cli, testing
from kvswap.bench import handlers
from kvswap.replay.check import WrongBytes


def small(device: kvswap.Device) -> handlers.Plan:
    caches = tuple(
        replace(cache, tensors=min(cache.tensors, 4), page=min(cache.page, 4096), blocks=8) for cache in handlers.CACHES
    )
    return replace(handlers.plan(device, quick=True), caches=caches)


def test_every_cache_both_ways(device: kvswap.Device) -> None:
    lines: list[str] = []
    result = handlers.run(small(device), lines.append)
    measured = {(row.cache, row.direction, row.method) for row in result.rows if row.figures is not None}
    wanted = {
        (cache.key, direction, method)
        for cache in handlers.CACHES
        for direction in ("D2H", "H2D")
        for method in ("kvswap", "vllm-batch")
    }
    assert wanted <= measured
    assert result.bytes_verified > 0 and result.wrong_bytes == 0
    assert any("x vLLM's best" in line for line in lines)
    json.dumps(result.to_dict())


def test_a_block_that_is_not_moved_is_found(device: kvswap.Device) -> None:
    plan = small(device)
    with testing.fault(device, "copy", "skip", nth=3), pytest.raises(WrongBytes):
        handlers.run(replace(plan, caches=plan.caches[:1], directions=("D2H",)), lambda _: None)


def test_no_gain_is_said() -> None:
    def row(method: str, gbps: float) -> handlers.Row:
        return handlers.Row("a", "D2H", method, handlers.Figures(gbps, None, 0.1, 0.1, "dma", 1, True))

    (line,) = handlers._gains([row("kvswap", 10.0), row("vllm-batch", 20.0), row("vllm-triton", 5.0)])
    assert "0.50" in line and "NO GAIN" in line
    (line,) = handlers._gains([row("kvswap", 20.0), row("vllm-batch", 10.0)])
    assert "2.00" in line and "NO GAIN" not in line


def test_by_the_command(device: kvswap.Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "handlers.json"
    assert cli.main(["bench", "--handlers", "--quick", "--device", device.name, f"--json={out}"]) == 0
    assert "0 wrong bytes" in capsys.readouterr().out
    assert {row["cache"] for row in json.loads(out.read_text())["rows"]} == {c.key for c in handlers.CACHES[:3]}
    assert cli.main(["bench", "--handlers", "--method", "dma", "--device", device.name]) == 2
    assert cli.main(["bench", "--handlers", "--draws", "3", "--device", device.name]) == 2
