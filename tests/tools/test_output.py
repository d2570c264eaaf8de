"""What the command writes on a terminal, in a pipe and as JSON; the narrow tables; the scripts of completion."""

# mypy: disable-error-code="no-untyped-def,import-untyped"

from __future__ import annotations

import importlib
import io
import json
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from conftest import ROOT

from kvswap import cli
from kvswap.bench.report import Rows, Table
from kvswap.commands import parser
from kvswap.commands.output import Output, document
from kvswap.files import FileStore, Layout
from kvswap.replay.errors import UsageError, check_writable
from kvswap.replay.progress import Eta, Progress

pytestmark = pytest.mark.not_sanitized("Python only")

LINE = "CUDA     no devices: there is no CUDA driver here: libcuda.so.1: cannot open shared object file"
WITHOUT = "is not installed: .ci/run has a step with it"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an installation without rich, in a terminal of 60 columns."""
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


# -- text -------------------------------------------------------------------------------------------------------------


def test_lines_are_wrapped_on_a_terminal_alone() -> None:
    pipe, terminal = io.StringIO(), Terminal()
    Output(pipe)(LINE, hang=9)
    Output(terminal)(LINE, hang=9)
    assert pipe.getvalue() == f"{LINE}\n"
    first, second = terminal.getvalue().splitlines()
    assert (
        len(first) <= 60
        and second.startswith(" " * 9 + "l")
        and re.sub(r"\s+", " ", first + second) in [re.sub(r"\s+", " ", LINE)]
    )


def test_rich_colours_and_changes_no_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rich.console")
    pytest.importorskip("rich", reason=f"rich {WITHOUT}")
    text = "path dma     on\nWRONG BYTES: here\nstrided  not measured: why\n4 MiB verified, 0 wrong bytes\n" + LINE
    written = {}
    for name, no_color in (("colour", ""), ("none", "1")):
        monkeypatch.setenv("NO_COLOR", no_color)
        terminal = Terminal()
        Output(terminal).text(text, hang=9)
        written[name] = terminal.getvalue()
    plain = [re.sub("\x1b\\[[0-9;]*m", "", drawn) for drawn in written.values()]
    monkeypatch.setitem(sys.modules, "rich.console", None)
    without = Terminal()
    Output(without).text(text, hang=9)
    assert plain == [without.getvalue()] * 2
    assert "\x1b[1;31mWRONG BYTES" in written["colour"] and "31m" not in written["none"]
    monkeypatch.delitem(sys.modules, "rich.console")
    for stream, term in ((io.StringIO(), "xterm"), (Terminal(), "dumb")):
        monkeypatch.setenv("TERM", term)
        Output(stream).text(text, hang=9)
        assert "\x1b" not in stream.getvalue()


def test_progress_is_not_drawn_on_a_dumb_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for term, drawn in (("xterm", True), ("dumb", False)):
        monkeypatch.setenv("TERM", term)
        terminal = Terminal()
        progress = Progress(terminal)
        progress(3, 12, "x" * 100)
        progress.clear()
        assert bool(terminal.getvalue()) == drawn
        if drawn:
            line = terminal.getvalue().split("\x1b")[0]
            assert line.startswith("\r[######") and "] 3/12  xxx" in line and len(line) == 60


def test_progress_by_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rich.console")
    pytest.importorskip("rich", reason=f"rich {WITHOUT}")
    monkeypatch.setattr("kvswap.replay.progress._INTERVAL", 0.0)
    terminal = Terminal()
    progress = Progress(terminal)
    progress(3, 12, "[bold]" + "x" * 100)
    progress.clear()
    first = terminal.getvalue()
    progress(4, 12, "y")  # shown again
    progress.clear()
    progress.clear()
    text = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "━" in text and "3/12  [bold]xxx" in text and "xxx…" in text and "4/12  y" in text
    for drawn in (first, terminal.getvalue()):
        assert drawn.endswith("\x1b[2K")  # the line is empty
    pipe = io.StringIO()
    Progress(pipe)(3, 12, "x")
    assert pipe.getvalue() == ""


def test_the_time_that_is_left() -> None:
    eta = Eta()
    assert [eta.left(done, 100, now) for done, now in ((0, 5.0), (0, 9.0), (10, 5.5))] == ["", "", ""]
    assert eta.left(10, 100, 15.0) == "1:30 left" and eta.left(20, 100, 25.0) == "1:20 left"
    assert eta.left(99, 100, 104.0) == "0:01 left" and eta.left(100, 100, 105.0) == ""
    assert eta.left(1, 100, 200.0) == "" and eta.left(2, 100, 300.0) == "2:43:20 left"  # it begins anew
    assert eta.left(2, 50, 301.0) == "" and eta.left(2, 50, 302.0) == "" and eta.left(3, 50, 303.0) == "1:34 left"


# -- tables -----------------------------------------------------------------------------------------------------------

TABLE = Table(
    ("shape", "<30"), ("dir", "<4"), ("method", "<10"), ("GB/s on the device", ">18.2f", "GB/s", ">6.1f"), lead=2
)


def test_a_table_that_is_too_wide_is_narrow() -> None:
    wide, narrow = io.StringIO(), Terminal()
    for stream in (wide, narrow):
        rows = Rows(TABLE, Output(stream))
        rows.add(["80 x 4 KiB", "D2H", "auto", 12.345], after="  took dma")
        rows.add(["80 x 4 KiB", "D2H", "burst"], "no such thing")
        rows.add(["80 x 4 KiB", "H2D", "auto", None])
    assert wide.getvalue().splitlines()[1:] == [
        f"{'80 x 4 KiB':<30} D2H  auto       {'12.35':>18}  took dma",
        f"{'80 x 4 KiB':<30} D2H  burst       not measured: no such thing",
        f"{'80 x 4 KiB':<30} H2D  auto       {'-':>18}",
    ]
    assert narrow.getvalue().splitlines() == [
        "method       GB/s",
        "80 x 4 KiB  D2H",
        "auto         12.3  took dma",
        "burst       not measured: no such thing",
        "80 x 4 KiB  H2D",
        "auto            -",
    ]


@pytest.mark.parametrize("options", [[], ["--load", "stream", "--seconds", "0.05", "--pairs", "1"]], ids=str)
def test_the_tables_of_bench_fit_80_columns(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    only = ["--method", "auto", "--shape", "64x32k", "--bytes", "4MiB"]
    assert cli.main(["bench", "--quick", "--device", "host:0", *options, *only]) == 0
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    method = next(number for number, line in enumerate(lines) if line.startswith("method"))
    assert any(line.startswith("auto ") for line in lines[method:])


# -- documents --------------------------------------------------------------------------------------------------------


def test_a_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.json"
    for name in ("-", str(file)):
        with document(Namespace(json=name), "files stat") as out:
            out.write({"a": 1, "key": b"\x01\xff", "path": Path("x")})
    text = capsys.readouterr().out
    assert text == file.read_text()
    assert json.loads(text).items() >= {"command": "files stat", "a": 1, "key": "01ff", "path": "x"}.items()
    with document(Namespace(json=None), "info") as out:
        out.write({"a": 1})
    assert capsys.readouterr().out == ""


def test_a_file_without_a_document_is_not_left(tmp_path: Path) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("old")
    for path in (new, old):
        with pytest.raises(RuntimeError), document(Namespace(json=str(path)), "info"):
            raise RuntimeError
    assert not new.exists() and old.read_text() == "old"


def test_what_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    for name in ("new", "old"):
        check_writable("--plot", str(tmp_path / name))
    assert [path.name for path in tmp_path.iterdir()] == ["old"] and (tmp_path / "old").read_text() == "old"
    for wrong in (tmp_path, tmp_path / "none" / "x", tmp_path / "old" / "x"):
        with pytest.raises(UsageError, match=f"--plot {wrong}: "):
            check_writable("--plot", str(wrong))


DEMO = str(Path(cli.__file__).parent / "data" / "demo_trace.jsonl.gz")
SMALL_BENCH = ["bench", "--quick", "--bytes", "1MiB", "--device", "host:0"]
BESIDE = ["--load", "stream", "--seconds", "0.05", "--pairs", "1", "--shape", "64x32k", "--method", "auto"]


@pytest.mark.parametrize(
    ("row", "arguments"),
    [
        ("`info`", ["info"]),
        (
            "`replay`, `demo`",
            ["demo", "--device", "host:0", "--requests", "3", "--file-tier", "D", "--file-blocks", "9"],
        ),
        ("`bench`", [*SMALL_BENCH, "--shape", "run", "--method", "auto"]),
        ("`bench`", [*SMALL_BENCH, *BESIDE]),
        ("`bench`", [*SMALL_BENCH, "--list"]),
        ("`calibrate`", ["calibrate", "--device", "host:0", "--show"]),
        ("`files`", ["files", "stat", "D"]),
        ("`files`", ["files", "check", "D"]),
        ("`files`", ["files", "gc", "D"]),
    ],
    ids=lambda value: " ".join(value[:4]) if isinstance(value, list) else "",
)
def test_the_fields_of_a_document_are_documented(
    row: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with FileStore("D", Layout(512), capacity=1 << 20):
        pass
    if arguments[0] == "demo":
        shutil.rmtree("D")
    assert cli.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found)[:2] == ["command", "kvswap"] and found["command"] == " ".join(
        arguments[: 2 if arguments[0] == "files" else 1]
    )
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    (documented,) = re.findall(rf"^\| {row} \| (.*) \|$", page, re.MULTILINE)
    names = [*found, *(name for store in found["stores"] for name in store)] if row == "`files`" else [*found]
    assert [name for name in names[2:] if f"`{name}`" not in documented] == []


def test_the_exit_statuses_are_documented() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    documented = {int(status) for status in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    statuses = {value for name, value in vars(parser).items() if name.startswith("EXIT_")}
    assert documented == statuses == {int(status) for status in re.findall(r"^  (\d+) ", cli._EPILOG, re.MULTILINE)}


# -- plots ------------------------------------------------------------------------------------------------------------


def test_no_label_without_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    figure_type = pytest.importorskip("matplotlib.figure", reason=f"matplotlib {WITHOUT}").Figure
    figures = []
    monkeypatch.setattr(figure_type, "savefig", lambda figure, path: figures.append(figure))
    from kvswap.replay import plot
    from kvswap.replay.report import Moves, Report

    report = Report("t", "host:0", "h", "g", 1024, 1024, 4, 4, 1, 0, "auto", 3)
    report.history = [(0.1, 1, 0, 0, 2), (0.2, 1, 0, 0, 1)]
    report.loads = Moves(seconds=[0.1, 0.2])
    plot.draw(report, "x.png")
    (figure,) = figures
    labels = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes]
    assert labels == [["computed", "GPU tier"], ["host to GPU (H2D)"]]


# -- completion -------------------------------------------------------------------------------------------------------


def test_completion_needs_its_package(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 2
    assert "pip install 'kvswap[cli]'" in capsys.readouterr().err
    assert cli.main(["completion", "tcsh"]) == 2
    assert "unknown SHELL tcsh" in capsys.readouterr().err


def test_bash_completes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("shtab", reason=f"shtab {WITHOUT}")
    for shell in ("zsh", "fish"):
        assert cli.main(["completion", shell]) == 0
        assert "calibrate" in capsys.readouterr().out
    assert cli.main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "trace.jsonl").touch()
    script = """
        source ./script
        try() {
            COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
            _shtab_kvswap kvswap "${@: -1}"
            echo "${COMPREPLY[@]}"
        }
        try kvswap de; try kvswap bench --me; try kvswap bench --method st; try kvswap files st; try kvswap replay tr
    """
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["demo", "--method", "strided", "stat", "trace.jsonl"], done.stderr


def test_every_module_of_the_table_adds_itself() -> None:
    built = cli.build_parser()
    (commands,) = built._subparsers._group_actions  # type: ignore[union-attr]
    for module in cli.COMMANDS:
        assert callable(importlib.import_module(module).add)
    assert {"info", "demo", "replay", "remote", "bench", "calibrate", "files", "manager", "completion"} <= set(
        commands.choices
    )
