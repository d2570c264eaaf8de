"""The kvswap command: what it prints, where, and its exit status."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import types
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, elsewhere, run_python

from kvswap import _C, _links, cli, info, testing
from kvswap.commands import info as info_command
from kvswap.commands import replay as replay_command
from kvswap.replay.check import WrongBytes
from kvswap.replay.errors import UsageError
from kvswap.replay.progress import Progress, progress_text
from kvswap.replay.run import Replay

pytestmark = pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")

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
    args = ["replay", str(packed), "--device", device_name, *SMALL, f"--json={result}", "--model", "gpt-oss-120b"]
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
    assert cli.main(["replay", str(trace), "--device", device_name, *SMALL, "--requests", "7", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["requests"] == 7
    assert "wrong bytes" in err


def test_a_malformed_line_ends_it_before_any_block_moves(
    trace: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_device(name: str | None) -> None:
        raise AssertionError("a device was opened")

    monkeypatch.setattr(replay_command, "open_device", no_device)
    lines = trace.read_text().splitlines()
    lines[16] = lines[16].replace("[", "[-1, ")
    trace.write_text("\n".join(lines))
    result = tmp_path / "out.json"
    assert cli.main(["replay", str(trace), "--requests", "3", f"--json={result}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvswap: {trace}:17: 'hash_ids[0]'")
    assert not result.exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--bytes-per-block", "4KiB"], "--allow-tiny"),
        (["--bytes-per-block", "1TiB"], "is more than"),
        (["--model", "gpt-2"], "no geometry is called 'gpt-2'"),
        (["--layers", "3"], "needs --layers, --kv-heads and --head-dim"),
        (["--model", "qwen3-8b", "--layers", "3", "--kv-heads", "1", "--head-dim", "64"], "exclude each other"),
        (["--gpu-blocks", "0"], "at least one block"),
        (["--gpu-bytes", "1KiB"], "--gpu-bytes 1 KiB holds no block: one of llama-3.1-8b has 64 MiB"),
        (["--host-bytes", "900000TiB"], "the GPU tier and the host tier, which are both in host memory"),
        (["--device", "tpu:0"], "tpu:0"),
        (["--json=/nowhere/at/all.json"], "--json /nowhere/at/all.json: No such file"),
        (["--json=/"], "--json /: it is a directory"),
        (["--fault", "copy:skip"], "--fault takes KIND:ACTION:EVERY"),
        (
            ["--fault", "eat:skip:5"],
            "there is no kind 'eat'; kinds and their actions are copy: fail, skip; code: spoil; call",
        ),
        (["--fault", "copy:eat:5"], "kind copy has no action 'eat'; its actions are fail, skip"),
        (["--fault", "call:skip:5"], "kind call has no action 'skip'; its actions are fail, lose, delay"),
        (["--fault", "copy:skip:0"], "EVERY must be a whole number above 0, not '0'"),
    ],
)
def test_wrong_usage(trace: Path, capsys: Output, options: list[str], complaint: str) -> None:
    device = [] if "--device" in options else ["--device", "host:0"]
    assert cli.main(["replay", str(trace), *device, *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith("kvswap: ")
    assert complaint in err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["replay", "t", "--in-flight", "0"], "--in-flight: not a whole number above 0: '0'"),
        (["replay", "t", "--requests", "x"], "--requests: not a whole number"),
        (["replay", "t", "--seconds", "nan"], "--seconds: not a number of seconds"),
        (["replay", "t", "--gpu-bytes", "8 XB"], "--gpu-bytes: not a size: '8 XB'"),
        (["replay", "t", "--bytes-per-block", "lots"], "--bytes-per-block: not a size: 'lots'"),
        (["replay", "t", "--bytes-per-block", "64kb"], "write 64KiB, which is 65,536 bytes, or 64KB"),
        (["replay", "t", "--path", "usb"], "unknown --path usb: there are auto, dma,"),
        (["replay", "t", "--path", "brust"], "unknown --path brust: did you mean burst?"),
        (["replay"], "missing: TRACE"),
        (["manager", "status", "--timeout", "abc"], "--timeout: not a number: 'abc'"),
        (["demo", "--gpu-bytes"], "--gpu-bytes: needs a value"),
        (["manager", "status", "--cache_queue_port", "abc"], "--cache_queue_port: not a whole number, 0 or more:"),
        ([], "COMMAND is missing: there are info, doctor, demo, replay, bench"),
        (["completion", "csh"], "unknown SHELL csh: there are bash, zsh, fish"),
        (["completion", "bsh"], "unknown SHELL bsh: did you mean bash? There are bash, zsh, fish"),
        (["bench", "--shape", "12x3"], "unknown --shape 12x3: there are run, scattered"),
        (["bench", "--size", "5P"], "units are KiB, MiB, GiB, TiB, KB"),
        (["top", "abc"], "PID: not a whole number above 0: 'abc'"),
        (["repaly", "t"], "unknown command repaly: did you mean replay?"),
        (["xyzzy"], "unknown command xyzzy: there are info, doctor, demo, replay"),
        (["bench", "--methd", "auto"], "unknown option --methd: did you mean --method?"),
        (["manager", "status", "--port=1"], "unknown option --port=1: did you mean --cache_queue_port?"),
        (["bench", "--repaets=3"], "unknown option --repaets=3: did you mean --repeats?"),
        (["files", "stats", "d"], "unknown command stats: did you mean stat?"),
        (["info", "host:0"], "unknown argument host:0"),
        (["demo", "--json", "x.json"], "unknown argument x.json: a file is named as --json=x.json"),
    ],
)
def test_wrong_usage_that_the_parser_sees(capsys: Output, arguments: list[str], complaint: str) -> None:
    """One line that says what was wrong, and one that says where to look."""
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert out == "" and first.startswith("kvswap: ") and complaint in first
    words = arguments[: 2 if arguments[:1] == ["manager"] else 1]
    if "unknown command" in first:
        words = words if arguments[:1] == ["files"] else []
    assert second == f"Try '{' '.join(['kvswap', *words])} --help'."


def test_a_trace_that_is_not_there(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "nowhere.jsonl"
    assert cli.main(["replay", str(path)]) == 2
    assert capsys.readouterr().err == f"kvswap: {path} cannot be read: No such file or directory\n"


def test_a_skipped_copy_ends_with_status_1(trace: Path, device_name: str, tmp_path: Path, capsys: Output) -> None:
    result = tmp_path / "out.json"
    args = ["--device", device_name, *SMALL, "--fault", "copy:skip:900", f"--json={result}"]
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
    out, err = capsys.readouterr()
    assert err.startswith("kvswap: ") and "Traceback" not in err
    assert out.splitlines()[-1].split(maxsplit=1) == ["FAILED", err.removeprefix("kvswap: ").rstrip()]


def test_the_help_lists_the_faults() -> None:
    found = dict(part.split(": ") for part in replay_command._FAULTS.replace(" (of the driver)", "").split("; "))
    assert {kind: tuple(actions.split(", ")) for kind, actions in found.items()} == {
        kind: actions for kind, actions in testing.ACTIONS_OF.items() if testing.parse_kind(kind)
    }


def test_bytes_of_a_tier_are_those_of_blocks_that_are_not_scaled(trace: Path, tmp_path: Path, capsys: Output) -> None:
    """So that the tiers have as many blocks as on the real model, however many bytes are moved."""
    result = tmp_path / "out.json"
    args = ["--device", "host:0", "--gpu-bytes", "800MiB", "--host-bytes", "1600MiB", f"--json={result}"]
    for command in (["demo", "--requests", "3"], ["replay", str(trace)], ["replay", str(trace), *SMALL[:3]]):
        assert cli.main([*command, *args]) == 0
        found = json.loads(result.read_text())
        assert (found["gpu_blocks"], found["host_blocks"], found["scaled"]) == (12, 25, True)
        out = capsys.readouterr().out
        assert "  unscaled  GPU tier 768 MiB, host tier 1.56 GiB, with the model's blocks of 64 MiB" in out


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
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(replay_command, "open_device", None)
    assert cli.main(["replay", str(trace), "--device", "host:0", "--plot", "x.png"]) == 2
    assert "pip install 'kvswap[plot]'" in capsys.readouterr().err


def test_a_plot_that_could_not_be_written_is_refused_before_anything_runs(
    tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", types.ModuleType("figure"))
    monkeypatch.setattr(replay_command, "open_device", None)
    (tmp_path / "d.png").mkdir()
    for name, complaint in (
        ("x.doc", "writes .png, .svg, .pdf"),
        (str(tmp_path / "d.png"), "it is a directory"),
        (str(tmp_path / "none" / "x.png"), "No such file or directory"),
        ("/proc/x.png", "--plot /proc/x.png: "),
    ):
        assert cli.main(["demo", "--plot", name]) == 2
        assert complaint in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["d.png"]


def test_a_plot(trace: Path, device_name: str, tmp_path: Path, capsys: Output) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: .ci/run has a step with it")
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


def test_info_names_wrong_variables() -> None:
    given = {"PTH": "dma", "PATH": "foo", "CALIBRATION": "/nonexist", "TOP": "off", "NVTX": "1"}
    done = run_python(
        "from kvswap import cli\nassert cli.main(['info']) == 0",
        **{f"KVSWAP_{name}": value for name, value in given.items()},
    )
    assert done.returncode == 0, done.stderr
    wrong = [line for line in done.stdout.splitlines() if line.startswith("wrong ")]
    assert [line.split()[1] for line in wrong] == [f"KVSWAP_{name}" for name in ("PTH", "TOP", "CALIBRATION", "PATH")]
    assert wrong[0].endswith("did you mean KVSWAP_PATH?") and "'foo'; it is one of auto, dma" in wrong[3]


def test_info_knows_the_variables_of_the_docs() -> None:
    documented = re.findall(r"`(KVSWAP_[A-Z_]+)`", (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8"))
    assert set(documented) == set(info.VARIABLES)


def test_info_as_json(capsys: Output) -> None:
    assert cli.main(["info", "--json", "--open"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"][-1]["name"] == "host:0"
    assert found["devices"][-1]["paths"]["dma"] == "on"
    assert found["opened"]["host:0"]["error"] is None
    gpus = {device["name"]: device["numa_node"] for device in found["devices"][:-1]}
    assert found["links"]["nodes"] == gpus and {"measured", "gbps", "borrow"} < found["links"].keys()


def test_info_shows_links_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of GPUs that are made up: their nodes, what they reach together, and what can be borrowed."""
    found = info.collect()
    host = found.devices[-1]
    gpus = [replace(host, name=f"cuda:{i}", kind="cuda", numa_node=i) for i in range(2)]
    monkeypatch.setattr(_C, "_cuda_info", lambda ordinal: {"name": "a GPU", "driver": 13000})
    monkeypatch.setenv("KVSWAP_CALIBRATION", str(tmp_path / "costs"))

    def lines(count: int = 2, **tuning: float) -> str:
        costs = _C._costs_read(None)
        costs["tuning"] |= {"link_gbps_d2h": 50.0, "link_gbps_h2d": 50.0, **tuning}
        _C._costs_write(tmp_path / "costs", costs, "a machine")
        together = _links.links(gpus[:count], _links.tuning_of(gpus[:count]))
        return replace(found, devices=[*gpus[:count], host], links=together).to_text()

    assert "what 2 GPUs reach together is not known" in lines()
    assert "links    " not in lines(1)
    four = {"host_links": 4, "host_gbps_d2h": 125.0, "host_gbps_h2d": 211.0, "host_gbps_both": 201.0}
    for count in (1, 2):  # the sum of the machine, also where one GPU is seen
        text = lines(count, **four)
        assert "links    4 links together reach 125.0 GB/s D2H, 211.0 H2D, 201.0 both ways" in text
        assert "a store can borrow 1.5 links and a load 3.0 links beside its own" in text
    assert "link and host pools on NUMA node 1" in text
    assert "a store can borrow no link and a load 1.0 link " in lines(
        **{**four, "host_gbps_d2h": 52, "host_gbps_h2d": 100}
    )
    assert "borrowing brings nothing here" in lines(**{**four, "host_gbps_d2h": 52, "host_gbps_h2d": 40})
    gpus[0] = replace(gpus[0], numa_node=-1)
    monkeypatch.setattr(_links, "_NODES", str(tmp_path / "node[0-9]"))
    assert "on the only NUMA node" in lines()
    for i in range(2):
        (tmp_path / f"node{i}").touch()
    assert "the NUMA node of its link is not known: host pools are on any of 2" in lines()


def test_progress_is_one_line_on_a_terminal(trace: Path, device_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
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
    assert "/40  in " in drawn and progress_text(report).endswith("wrong 0")
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


# -- exit statuses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (UsageError("it cannot be so"), 2, "it cannot be so"),
        (WrongBytes("WRONG BYTES: here", wrong_bytes=1, block=0, layer=0, offset=0), 1, "WRONG BYTES: here"),
        (_C.Error("the device is lost"), 3, "the device is lost"),
        (OSError(28, "No space left on device"), 3, "No space left on device"),
        (PermissionError(13, "Permission denied", "/a/file"), 3, "/a/file: Permission denied"),
        (FileNotFoundError(2, "No such file or directory", "f"), 3, "f: No such file or directory"),
        (TimeoutError("no answer within 5 s"), 3, "no answer within 5 s"),
        (TimeoutError(), 3, "the time limit is over"),
        (MemoryError(), 3, "out of memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_failure_has_its_status_and_one_line(
    error: BaseException, status: int, told: str, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(info_command, "for_person", fail)
    assert cli.main(["info"]) == status
    assert capsys.readouterr().err == f"kvswap: {told}\n"


def test_a_defect_is_told_with_its_traceback(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its status is not the one of wrong bytes, which is Python's own."""
    monkeypatch.setattr(info_command, "for_person", None)
    assert cli.main(["info"]) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err and "TypeError" in err and err.endswith("report it with the lines above\n")


def test_a_warning_is_one_line(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(_: object) -> None:
        warnings.simplefilter("always")
        warnings.warn("slower than it could be", RuntimeWarning, stacklevel=2)
        raise UsageError("over")

    monkeypatch.setattr(info_command, "for_person", warn)
    assert cli.main(["info"]) == 2
    assert capsys.readouterr().err == "kvswap: warning: slower than it could be\nkvswap: over\n"


def run_command(*arguments: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "kvswap", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, timeout=120, **elsewhere(), **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["info"], ["demo", "--device", "host:0", "--requests", "2"]], ids=" ".join
)
def test_output_that_cannot_be_written(arguments: list[str]) -> None:
    """A full file system is a failure; a reader that has gone ends the command without a word."""
    with open("/dev/full", "wb") as full:
        done = run_command(*arguments, stdout=full)
    assert (done.returncode, done.stderr) == (3, b"kvswap: No space left on device\n")
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run_command(*arguments, stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_interrupt_by_its_signal() -> None:
    script = """
        import sys
        from kvswap import cli
        from kvswap.replay import trace

        def open_trace(path, open_trace=trace._open):
            print("reading", flush=True)
            return open_trace(path)

        trace._open = open_trace
        sys.exit(cli.main(["replay", "-"]))
    """
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdin=pipe, stdout=pipe, stderr=pipe, text=True, **elsewhere()
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "kvswap: interrupted\n")


def test_version_and_help(capsys: Output) -> None:
    for option in ("-V", "--version"):
        assert cli.main([option]) == 0
        assert capsys.readouterr().out == f"kvswap {_C.__version__}\n"
    assert cli.main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"  {status} " in told for status in (0, 1, 2, 3, 70, 130, 141))


def test_a_device_that_is_not_there(capsys: Output) -> None:
    assert cli.main(["demo", "--device", "gpu0"]) == 2
    assert "devices are called cuda:0" in capsys.readouterr().err
    assert cli.main(["demo", "--device", "cuda:99"]) in (2, 3)  # 3: there is no driver
    assert capsys.readouterr().err.startswith("kvswap: ")


def test_a_file_tier_that_cannot_be_made(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "file").touch()
    tiers = ["--file-tier", str(tmp_path / "file" / "tier"), "--file-blocks", "8"]
    assert cli.main(["demo", "--device", "host:0", "--requests", "2", *tiers]) == 3
    assert capsys.readouterr().err == f"kvswap: {tmp_path / 'file' / 'tier'}: Not a directory\n"


def test_powers_of_1000_are_said_on_stderr(capsys: Output) -> None:
    assert cli.main(["demo", "--device", "host:0", "--requests", "2", "--gpu-bytes", "640MB", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["gpu_blocks"] == 640_000_000 // (64 << 20)
    assert err.startswith("kvswap: 640MB is 640,000,000 bytes; 640MiB would be 671,088,640\n")
