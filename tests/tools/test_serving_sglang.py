"""benchmarks/serving_sglang without SGLang: its table, its ways and its sums."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not (ROOT / "benchmarks" / "serving_sglang").exists(), reason="a source package has no benchmarks"
)


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def line(way, phase, record, repeat=0):
    return {"regime": "sglang", "config": way, "phase": phase, "repeat": repeat, "record": record, "probe_ms": 1.0}


def hits(way, ttft, repeat=0, cached=4080):
    record = {"ttft_ms": [ttft], "cached": [cached], "floor_ms": [5.0], "floor_cached": [4080]}
    return line(way, "hits", record, repeat)


class TestTable:
    def row(self, lines):
        from serving_sglang import table

        return next(row for row in table.tables(lines).splitlines() if row.startswith("TTFT, the host"))

    def test_ratios_are_of_pairs(self):
        lines = [hits("sglang", ttft, i) for i, ttft in enumerate((20.0, 40.0, 10.0))]
        lines += [hits("kvswap", 10.0, i) for i in range(3)]
        assert "10 (0.50, 0.25-1.00)" in self.row(lines)

    def test_ratios_are_to_sglang_in_the_same_layout(self):
        lines = [hits("sglang", 40.0), hits("sglang:layer_first", 20.0), hits("kvswap:layer_first", 10.0)]
        assert "(0.50," in self.row(lines)

    def test_without_the_layout_ratios_are_to_the_default(self):
        assert "(0.25," in self.row([hits("sglang", 40.0), hits("kvswap:layer_first", 10.0)])

    def test_what_the_host_did_not_have_is_no_hit(self):
        with pytest.raises(StopIteration):
            self.row([hits("sglang", 40.0, cached=0)])

    @pytest.mark.parametrize(
        ("phase", "record", "wrong"),
        [
            ("truth", {"differ": [0, 0], "from_host": [0, 96, 96]}, False),
            ("truth", {"differ": [0, 1], "from_host": [0, 96, 96]}, True),
            ("truth", {"differ": [0, 0], "from_host": [0, 96, 0]}, True),
            ("skipped", {"differ": 1}, False),
            ("skipped", {"differ": 0}, True),
        ],
    )
    def test_what_is_wrong(self, phase, record, wrong):
        from serving_sglang import table

        assert table.wrong([line("kvswap", phase, record)]) is wrong


class TestWays:
    def test_switches(self):
        from serving_sglang.ways import environment

        switches = {
            way: {name for name in environment(way) if name.startswith("KVSWAP_SGLANG")}
            for way in ("sglang", "kvswap-copies", "kvswap:layer_first")
        }
        copies, memory = "KVSWAP_SGLANG_COPIES", "KVSWAP_SGLANG_HOST_MEMORY"
        assert switches == {"sglang": set(), "kvswap-copies": {copies}, "kvswap:layer_first": {copies, memory}}

    def test_arguments(self, tmp_path):
        from serving_sglang.ways import Sizes, arguments

        made = arguments("kvswap:page_first_direct", Sizes(graphs=8), tmp_path, {"page_size": 64})
        assert made["hicache_io_backend"] == "direct" and made["page_size"] == 64
        assert made["cuda_graph_bs_decode"] == [1, 2, 4, 8]
        assert arguments("sglang", Sizes(), tmp_path, {})["hicache_mem_layout"] == "page_first"

    @pytest.mark.parametrize("way", ["vllm", "kvswap:page_last"])
    def test_a_way_that_there_is_not(self, way):
        from serving_sglang.ways import split

        with pytest.raises(SystemExit, match="there are"):
            split(way)

    def test_options(self):
        from serving.options import values_of

        assert values_of(["a=1", "b=fa3", "c=false"]) == {"a": 1, "b": "fa3", "c": False}
        with pytest.raises(SystemExit, match="there are hits"):
            values_of(["hit=1"], {"hits"})


class TestSums:
    @pytest.fixture
    def looks(self):
        torch = pytest.importorskip("torch")
        from serving_sglang.scheduler import Looks
        from serving_sglang.ways import PAGE

        made = Looks.__new__(Looks)
        generator = torch.Generator().manual_seed(1)
        shape = (4 * PAGE, 2, 8)
        made.buffers = [torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(4)]
        return made

    def test_a_page_has_its_own_wherever_it_lies(self, looks):
        import torch
        from serving_sglang.ways import PAGE

        first = torch.arange(PAGE)
        before = looks._sums(torch.cat([first, first + PAGE]))
        for buffer in looks.buffers:
            buffer[2 * PAGE : 3 * PAGE] = buffer[:PAGE]
        assert looks._sums(first + 2 * PAGE) == before[:1] and len(set(before)) == 2

    @pytest.mark.parametrize("swapped", [False, True])
    def test_a_change_shows(self, looks, swapped):
        import torch
        from serving_sglang.ways import PAGE

        first, buffer = torch.arange(PAGE), looks.buffers[2]
        before = looks._sums(first)
        if swapped:
            buffer[[3, 4]] = buffer[[4, 3]]
        else:
            buffer[5, 1, 7] += 1
        assert looks._sums(first) != before

    def test_the_last_page_of_the_next_load_is_left_out(self):
        from serving_sglang.scheduler import Looks
        from serving_sglang.ways import PAGE

        class Transfer(SimpleNamespace):
            def _replace(self, **other):
                return Transfer(**{**vars(self), **other})

        loaded, transfers = [], [Transfer(host_indices=[*range(2 * PAGE)], device_indices=[*range(2 * PAGE)])]
        looks = Looks.__new__(Looks)
        looks._calls, looks._tokens, looks._left_out = {"load": [], "store": []}, {"load": 0, "store": 0}, 0
        submit = looks._watched("load", lambda given: loaded.append(len(given[0].device_indices)))
        submit(transfers)
        looks.leave_out()
        submit(transfers)
        assert loaded == [2 * PAGE, PAGE] and looks.left_out()
        assert looks.take()["load"]["tokens"] == 3 * PAGE and looks.take() == {}


def test_an_engine_that_cannot_start_is_told(tmp_path):
    """SGLang is missing, or has no GPU: an error in the record, exit status 1, and no process is left."""
    command = [sys.executable, "-m", "serving_sglang", "--ways", "sglang", "--size", "device=nothing"]
    command += ["--engine", "no_such_argument=1", "--out", str(tmp_path), "--work", str(tmp_path / "work")]
    done = subprocess.run(
        command, cwd=ROOT / "benchmarks", capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 1, done.stderr
    (record,) = [json.loads(text) for text in (tmp_path / "serving.jsonl").read_text().splitlines()]
    assert record["config"] == "sglang" and "error" in record
