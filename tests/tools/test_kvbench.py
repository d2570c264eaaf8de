"""benchmarks/kvbench: its measurements are what they say, wrong bytes end them, and its plots have few lines."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from conftest import ROOT

import kvswap
from kvswap import cli, testing
from kvswap.replay.check import WrongBytes

pytestmark = [
    pytest.mark.skipif(not (ROOT / "benchmarks" / "kvbench").exists(), reason="a source package has no benchmarks"),
    pytest.mark.not_sanitized("measures, and measures the sanitizer"),
]
WITHOUT = "matplotlib is not installed: .ci/run has a step with it"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def run(*args):
    from kvbench import __main__ as command

    command.main([str(arg) for arg in args])


class TestHandlers:
    def small(self, device):
        from kvbench import handlers

        caches = tuple(
            replace(cache, tensors=min(cache.tensors, 4), page=min(cache.page, 4096), blocks=8)
            for cache in handlers.CACHES
        )
        return replace(handlers.plan(device, quick=True), caches=caches)

    def test_every_cache_both_ways(self, device):
        from kvbench import handlers

        lines = []
        result = handlers.run(self.small(device), lines.append)
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

    def test_a_block_that_is_not_moved_is_found(self, device):
        from kvbench import handlers

        plan = self.small(device)
        with testing.fault(device, "copy", "skip", nth=3), pytest.raises(WrongBytes):
            handlers.run(replace(plan, caches=plan.caches[:1], directions=("D2H",)), lambda _: None)

    def test_no_gain_is_said(self):
        from kvbench import handlers

        def row(method, gbps):
            return handlers.Row("a", "D2H", method, handlers.Figures(gbps, None, 0.1, 0.1, "dma", 1, True))

        (line,) = handlers._gains([row("kvswap", 10.0), row("vllm-batch", 20.0), row("vllm-triton", 5.0)])
        assert "0.50" in line and "NO GAIN" in line
        (line,) = handlers._gains([row("kvswap", 20.0), row("vllm-batch", 10.0)])
        assert "2.00" in line and "NO GAIN" not in line

    def test_by_the_command(self, device, tmp_path, capsys):
        from kvbench import handlers

        out = tmp_path / "handlers.json"
        run("handlers", "--quick", "--device", device.name, f"--json={out}")
        assert "0 wrong bytes" in capsys.readouterr().out
        assert {row["cache"] for row in json.loads(out.read_text())["rows"]} == {c.key for c in handlers.CACHES[:3]}


class TestRegret:
    def test_by_the_command(self, device_name, tmp_path, capsys):
        result = tmp_path / "regret.json"
        run(
            "regret",
            "--quick",
            "--bytes",
            "1MiB",
            "--device",
            device_name,
            "--draws",
            5,
            "--seed",
            7,
            f"--json={result}",
        )
        out = capsys.readouterr().out
        assert "seed 7" in out and "within 5 %" in out and "the worst shapes" in out
        found = json.loads(result.read_text())
        ratios = [row["ratio"] for row in found["rows"]]
        assert len(ratios) == found["draws"] == 5
        assert found["least"] == min(ratios)
        assert found["near"] == sum(ratio >= 0.95 for ratio in ratios) / 5
        for row in found["rows"]:
            assert row["ratio"] == row["gbps"]["auto"] / max(row["gbps"].values())
            assert {"auto", "dma", row["took"]} <= set(row["gbps"])

    def test_draws_follow_the_seed_and_keep_to_the_limit(self):
        from kvbench import regret

        device, most = kvswap.Device("host:0"), 2 << 20
        plans = [regret.plan(device, seed, draws=200, nbytes=most) for seed in (1, 1, 2)]
        assert plans[0].draws == plans[1].draws != plans[2].draws
        shapes = [drawn.shape for drawn in plans[0].draws]
        assert all(0 < shape.nbytes <= most and shape.block_nbytes % 16 == 0 for shape in shapes)
        assert {drawn.direction for drawn in plans[0].draws} == {"D2H", "H2D"}
        assert {shape.slab for shape in shapes} == {shape.block_first for shape in shapes} == {False, True}
        sizes = [shape.block_nbytes for shape in shapes]
        assert min(sizes) < 2048 and max(sizes) > 1 << 20
        assert max(shape.tensors for shape in shapes) > 32 and max(shape.gpu_run for shape in shapes) == 64


class TestPlot:
    def row(self, method, size, gbps):
        from kvbench.plot import Fields

        figures = None if gbps is None else Fields(device_gbps=gbps, gbps=0.0)
        return Fields(family="run", block_nbytes=size, direction="D2H", method=method, figures=figures)

    def test_few_lines_and_auto_in_front(self):
        from kvbench.plot import lines_of

        methods = ("auto", "dma", "strided", "burst", "kernel", "high", "loop", "batch", "numpy")
        cases = [(number, method, size) for number, method in enumerate(methods) for size in (1024, 2048)]
        rows = [self.row(method, size, number + size / 1024) for number, method, size in cases]
        rows += [self.row("torch", 1024, None), self.row("warp", 2048, 99.0)]
        lines = lines_of(rows, few=True)
        assert list(lines) == ["dma", "strided", "burst", "kernel", "fastest by hand", "auto"]
        assert lines["fastest by hand"] == {1024: 9.0, 2048: 99.0} and lines["auto"] == {1024: 1.0, 2048: 2.0}
        assert list(lines_of(rows, few=False))[-1] == "auto" and "torch" not in lines_of(rows, few=False)

    @pytest.mark.parametrize(
        "options",
        [
            ["--shape", "run", "--shape", "both", "--size", "4KiB"],
            ["--load", "decode", "--seconds", "0.05", "--pairs", "1", "--method", "dma"],
            None,
        ],
        ids=["table", "load", "regret"],
    )
    def test_by_the_command(self, device_name, tmp_path, capsys, options):
        pytest.importorskip("matplotlib", reason=WITHOUT)
        result, picture = tmp_path / "x.json", tmp_path / "x.png"
        common = ["--quick", "--bytes", "1MiB", "--device", device_name, f"--json={result}"]
        if options:
            assert cli.main(["bench", *common, *options]) == 0
        else:
            run("regret", *common, "--draws", 3)
        run("plot", result, picture)
        assert picture.read_bytes().startswith(b"\x89PNG")

    def test_no_label_without_a_line(self):
        figure_type = pytest.importorskip("matplotlib.figure", reason=WITHOUT).Figure
        from kvbench import plot

        rows = [self.row(method, size, 1.0) for method in ("auto", "dma") for size in (1024, 2048)]
        rows.append(self.row("warp", 1024, None))
        head = {"device_name": "h", "bytes_per_case": 1024}
        figure = plot._table(figure_type, plot.Fields(ceilings_gbps={"D2H": 2.0}, rows=rows, **head))
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == ["auto", "dma", "one bare copy"]
        lines = {line.get_label(): line for line in figure.axes[0].lines}
        assert lines["auto"].get_zorder() > lines["dma"].get_zorder()
        assert {line.get_linestyle() for line in lines.values() if line.get_label() != "one bare copy"} == {"None"}
        rows += [self.row("auto", 4096, 1.0)]
        figure = plot._table(figure_type, plot.Fields(ceilings_gbps={"D2H": 2.0}, rows=rows, **head))
        assert "-" in {line.get_linestyle() for line in figure.axes[0].lines}  # three sizes are joined
        drawn = [plot.Fields(ratio=ratio, choice=ratio) for ratio in (0.9, 1)]
        figure = plot._regret(figure_type, plot.Fields(device_name="h", draws=2, seed=1, rows=drawn))
        assert figure.axes[0].lines[1].get_label() == "auto"

    def test_what_has_no_plot(self, tmp_path):
        (tmp_path / "x.json").write_text('{"what": "handlers"}')
        with pytest.raises(ValueError, match="a result of handlers has no plot"):
            run("plot", tmp_path / "x.json", tmp_path / "x.png")
