"""Each number with a unit in the README and on the docs' first page has a mark, and its record has that figure."""

from __future__ import annotations

import re
from pathlib import Path

import figures
import pytest
from conftest import ROOT

RESULTS = ROOT / "benchmarks" / "results"
pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="a source package has no records")

PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md"]
RECORD = """# kvswap
== first
layout      dir  method     slow-down interval      above copy    GB/s of copy
64x32k      64 x 32 KiB x 128     D2H  auto            1.015 1.013-1.045        0.007   53.39    0.97
{"shape": "64x32k", "method": "exact", "dir": "D2H", "size": 0.7612, "GB/s of KV": 70.1}
== second
                    native   kvswap
TTFT, the host, ms  31.29    24.33 (0.76)
burst, tokens/s     131,460  155,061
"""
PAGE = """Copies at 53.4 GB/s add +0.7 %, hold 1.3 times as much; 24.3 ms, not 31.3 ms: 22 % less. `9 ms` [a](b/8 ms).

<!-- Where each figure stands:
a.txt > first
64x32k D2H auto: GB/s = 53.4 GB/s; above copy = +0.7 % | exact D2H: 1 / size = 1.3 times
a.txt > second
TTFT, the host, ms: kvswap = 24.3 ms; native = 31.3 ms; 1 - kvswap / native = 22 % -->
"""


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text(RECORD.replace("layout      dir", "layout      shape                 dir"))
    (tmp_path / "b.txt").write_text("# kvswap, another record\n")
    return tmp_path


@pytest.mark.parametrize("path", PAGES, ids=[path.name for path in PAGES])
def test_each_figure_has_a_mark_and_stands_in_its_record(path: Path) -> None:
    assert figures.faults_of(path.read_text(encoding="utf-8"), RESULTS) == []


@pytest.mark.parametrize("path", PAGES, ids=[path.name for path in PAGES])
def test_another_number_record_or_unit_of_any_figure_shows(path: Path) -> None:
    """Figure and mark are changed alike, so that only the record can tell."""
    page = path.read_text(encoding="utf-8")
    marks = figures.marks_of(page)
    others = [str(record.relative_to(RESULTS)) for record in RESULTS.rglob("*.txt")]
    assert marks
    for mark in marks:
        number, unit = mark.figure.rsplit(" ", 1)
        digit = re.search(r"\d(?=\D*$)", number)
        assert digit
        number = number[: digit.start()] + str((int(digit[0]) + 1) % 10) + number[digit.end() :]
        assert fault(mark, figure=f"{number} {unit}")
        for other in ("GB/s", "TB/s", "tokens/s", "ms", "us", "s", "%", "times", "MiB", "KiB"):
            assert other == unit or fault(mark, figure=f"{mark.figure.rsplit(' ', 1)[0]} {other}"), other
        assert [other for other in others if other != mark.record and not fault(mark, record=other)] == []


def fault(mark: figures.Mark, record: str = "", figure: str = "") -> str:
    return figures.fault_of(figures.Mark(record or mark.record, mark.row, mark.field, figure or mark.figure), RESULTS)


def test_figures_are_numbers_with_a_unit_in_the_text() -> None:
    assert figures.figures_of(PAGE) == ["53.4 GB/s", "+0.7 %", "1.3 times", "24.3 ms", "31.3 ms", "22 %"]
    text = "vLLM 0.26, 1,024 blocks, 32 KiB,\n131,460\ntokens/s; half a millisecond, nine minutes, 0.05 more"
    assert figures.figures_of(text) == ["32 KiB", "131,460 tokens/s", "half a millisecond", "nine minutes"]


def test_marks_name_record_row_and_field(results: Path) -> None:
    assert figures.faults_of(PAGE, results) == []
    assert figures.marks_of(PAGE)[3] == figures.Mark("a.txt", "second > TTFT, the host, ms", "kvswap", "24.3 ms")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("53.4", "53.5", "is 53.39 GB/s"),
        ("53.4 GB/s", "53.4 TB/s", "is not in TB/s"),
        ("24.3 ms", "24.3 %", "is not in %"),
        ("1.3 times", "1.3 ms", "is not in ms"),
        ("a.txt > second", "b.txt > second", "has no row second"),
        ("a.txt > second", "c.txt > second", "no record c.txt"),
        ("D2H auto: GB/s", "D2H auto: GB/h", "no number in GB/h"),
        ("64x32k D2H auto", "64x32k H2D auto", "has no row"),
        ("; native = 31.3 ms", "", "31.3 ms after 24.3 ms: the mark there is of 22 %"),
        (" = 22 % -->", " = 22 %; native = 31.3 ms -->", "no 31.3 ms at its end"),
        ("22 % less", "22 % less, in 5 s", "5 s after 22 %: the mark there is of nothing"),
    ],
)
def test_what_is_wrong_is_said(results: Path, old: str, new: str, said: str) -> None:
    assert old in PAGE
    found = figures.faults_of(PAGE.replace(old, new), results)
    assert len(found) >= 1 and said in found[0]


def test_the_questions_on_the_readme_have_answers() -> None:
    text = (ROOT / "tests" / "project" / "readme_questions.md").read_text(encoding="utf-8")
    asked = re.findall(r"^\d+\. [^\n]+\?\n(.*?)(?=^\d+\. |\Z)", text, re.DOTALL | re.MULTILINE)
    assert len(asked) == 10 and all("**" in answer for answer in asked)
