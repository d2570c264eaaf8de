"""The kvswap command: what it prints, where, and its exit status."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvswap import _C, cli
from kvswap.replay.progress import Progress, progress_line
from kvswap.replay.run import Replay

SMALL = ["--bytes-per-block", "1KiB", "--allow-tiny", "--gpu-blocks", "12", "--host-blocks", "24"]
KEYS = {
    "wrong_bytes",
    "bytes_loaded",
    "bytes_stored",
    "blocks_verified",
    "hits",
    "misses",
    "requests",
    "tokens_saved",
    "tokens_total",
    "gbps_load",
    "gbps_store",
    "load_ms",
    "store_ms",
    "device",
    "geometry",
    "bytes_per_block",
    "scaled",
    "seconds",
    "truncated",
}

Output = pytest.CaptureFixture[str]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty requests over five conversations that grow: hits in both tiers, evictions from both."""
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for i in range(40):
            conversation, length = i * 7 % 5, 2 + i // 5
            ids = [1000 * conversation + block for block in range(length)]
            record = {"timestamp": i, "input_length": 512 * length, "output_length": 3, "hash_ids": ids}
            file.write(json.dumps(record) + "\n")
    return path


def test_replay(trace: Path, device_name: str, capsys: Output) -> None:
    assert cli.main(["replay", str(trace), "--device", device_name, *SMALL]) == 0
    out, err = capsys.readouterr()
    assert err == ""  # no progress in a pipe
    for part in (
        "40 requests",
        "SCALED from 64 MiB",
        "GPU tier",
        "hits in the host tier",
        "prefill saved",
        "GB/s",
        "p99",
    ):
        assert part in out
    assert out.splitlines()[-1].split() == ["wrong", "bytes", "0"]


def test_replay_of_gzip_to_json(trace: Path, device_name: str, tmp_path: Path, capsys: Output) -> None:
    packed, result = tmp_path / "t.bin", tmp_path / "out.json"
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    args = ["replay", str(packed), "--device", device_name, *SMALL, "--json", str(result), "--model", "gpt-oss-120b"]
    assert cli.main(args) == 0
    found = json.loads(result.read_text())
    assert found.keys() >= KEYS
    assert found["wrong_bytes"] == 0
    assert found["requests"] == 40
    assert found["geometry"] == "gpt-oss-120b"
    assert found["scaled"] is True
    assert found["hits"]["gpu"] > 0 and found["hits"]["host"] > 0
    assert found["bytes_loaded"] == found["hits"]["host"] * found["bytes_per_block"]
    assert found["load_ms"].keys() == {"p50", "p99"}
    capsys.readouterr()


def test_json_to_the_standard_output(trace: Path, device_name: str, capsys: Output) -> None:
    assert cli.main(["replay", str(trace), "--device", device_name, *SMALL, "--requests", "7", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["requests"] == 7
    assert "wrong bytes" in err


def test_a_malformed_line_ends_it_before_any_block_moves(
    trace: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_device(name: str | None) -> None:
        raise AssertionError("a device was opened")

    monkeypatch.setattr(cli, "open_device", no_device)
    lines = trace.read_text().splitlines()
    lines[16] = lines[16].replace("[", "[-1, ")
    trace.write_text("\n".join(lines))
    result = tmp_path / "out.json"
    assert cli.main(["replay", str(trace), "--requests", "3", "--json", str(result)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvswap: trace.jsonl:17: 'hash_ids[0]'")
    assert not result.exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--bytes-per-block", "4KiB"], "--allow-tiny"),
        (["--bytes-per-block", "lots"], "not a size"),
        (["--bytes-per-block", "1TiB"], "is more than"),
        (["--model", "gpt-2"], "no geometry is called 'gpt-2'"),
        (["--layers", "3"], "needs --layers, --kv-heads and --head-dim"),
        (["--model", "qwen3-8b", "--layers", "3", "--kv-heads", "1", "--head-dim", "64"], "exclude each other"),
        (["--gpu-blocks", "0"], "at least one block"),
        (["--gpu-bytes", "1KiB"], "at least one block"),
        (["--host-bytes", "900TiB"], "the host tier needs"),
        (["--device", "tpu:0"], "tpu:0"),
        (["--json", "/nowhere/at/all.json"], "--json /nowhere/at/all.json: No such file"),
        (["--fault", "copy:skip"], "KIND:ACTION:EVERY"),
        (["--fault", "copy:eat:5"], "KIND:ACTION:EVERY"),
        (["--fault", "copy:skip:0"], "KIND:ACTION:EVERY"),
    ],
)
def test_wrong_usage(trace: Path, capsys: Output, options: list[str], complaint: str) -> None:
    device = [] if "--device" in options else ["--device", "host:0"]
    assert cli.main(["replay", str(trace), *device, *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith("kvswap: ")
    assert complaint in err


@pytest.mark.parametrize(
    "options",
    [["--in-flight", "0"], ["--requests", "x"], ["--seconds", "nan"], ["--gpu-bytes", "8 XB"], ["--path", "usb"], []],
)
def test_wrong_usage_that_the_parser_sees(capsys: Output, options: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["replay", "t", *options] if options else [])
    assert caught.value.code == 2
    assert "usage: kvswap" in capsys.readouterr().err


def test_a_trace_that_is_not_there(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "nowhere.jsonl"
    assert cli.main(["replay", str(path)]) == 2
    assert capsys.readouterr().err == f"kvswap: {path}: No such file or directory\n"


def test_a_skipped_copy_ends_with_status_1(trace: Path, device_name: str, tmp_path: Path, capsys: Output) -> None:
    result = tmp_path / "out.json"
    args = ["--device", device_name, *SMALL, "--fault", "copy:skip:900", "--json", str(result)]
    assert cli.main(["replay", str(trace), *args]) == 1
    out, err = capsys.readouterr()
    for part in ("WRONG BYTES: block ", ", layer ", ", offset ", " slot "):
        assert part in err
    assert "Traceback" not in err
    assert "(wrong bytes)" in out
    found = json.loads(result.read_text())
    assert found["wrong_bytes"] > 0
    assert found["ended"] == "wrong bytes"


def test_a_device_that_fails_ends_with_status_3(trace: Path, device_name: str, capsys: Output) -> None:
    assert cli.main(["replay", str(trace), "--device", device_name, *SMALL, "--fault", "copy:fail:100"]) == 3
    err = capsys.readouterr().err
    assert err.startswith("kvswap: ") and "Traceback" not in err


def test_an_interrupt_ends_with_status_130(
    trace: Path, device_name: str, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: Progress, report: object, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "update", interrupt)
    assert cli.main(["replay", str(trace), "--device", device_name, *SMALL]) == 130
    out, err = capsys.readouterr()
    assert "interrupted" in err
    assert "of 40 (interrupted)" in out


def test_a_plot_needs_matplotlib_before_anything_runs(
    trace: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(Replay, "run", None)
    assert cli.main(["replay", str(trace), "--device", "host:0", "--plot", "x.png"]) == 2
    assert "pip install 'kvswap[plot]'" in capsys.readouterr().err


def test_a_plot(trace: Path, device_name: str, tmp_path: Path, capsys: Output) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "x.png"
    assert cli.main(["replay", str(trace), "--device", device_name, *SMALL, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["replay", str(trace), "--device", device_name, *SMALL, "--plot", "x.doc"]) == 2
    assert "x.doc" in capsys.readouterr().err


def test_demo(device_name: str, capsys: Output) -> None:
    assert cli.main(["demo", "--device", device_name, "--requests", "60"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "replay of demo_trace.jsonl.gz: 60 requests" in out
    assert "requests" in out and "60 of 60 in" in out


def test_info(capsys: Output) -> None:
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert f"kvswap {_C.__version__}" in out
    assert "host:0" in out and "path direct" in out and "NumPy" in out


def test_info_as_json(capsys: Output) -> None:
    assert cli.main(["info", "--json", "--open"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"][-1]["name"] == "host:0"
    assert found["devices"][-1]["paths"]["dma"] == "on"
    assert found["opened"]["host:0"]["error"] is None


def test_progress_is_one_line_on_a_terminal(trace: Path, device_name: str) -> None:
    from kvswap.replay.geometry import named, scale
    from kvswap.replay.settings import Settings, Sizes
    from kvswap.replay.trace import read_trace

    shape = scale(named("llama-3.1-8b"), 1024, allow_tiny=True)
    terminal = io.StringIO()
    progress = Progress(terminal, enabled=True)
    job = Replay(read_trace(trace), Settings(geometry=shape, sizes=Sizes(12, 24)), _C.Device(device_name))
    report = job.run(progress.update)
    progress.clear()
    drawn = terminal.getvalue()
    assert drawn.startswith("\r[") and drawn.endswith("\r\x1b[K")
    assert "\n" not in drawn
    assert "40/40" in progress_line(report, 40)
    silent = io.StringIO()
    Progress(silent).update(report, 40)
    assert silent.getvalue() == ""


def test_as_a_program(trace: Path) -> None:
    command = [sys.executable, "-m", "kvswap"]
    version = subprocess.run([*command, "--version"], cwd=trace.parent, capture_output=True, text=True, timeout=120)
    assert version.stdout == f"kvswap {_C.__version__}\n"
    args = ["replay", "-", "--device", "host:0", *SMALL]
    read = trace.read_bytes()
    done = subprocess.run([*command, *args], cwd=trace.parent, input=read, capture_output=True, timeout=120)
    assert done.returncode == 0
    assert b"replay of standard input: 40 requests" in done.stdout
    assert done.stderr == b""
