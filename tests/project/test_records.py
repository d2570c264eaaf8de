"""Records under benchmarks/results: few, each names its commit, and the docs quote what they have."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from figures import COMMENT, marks_of

RESULTS = ROOT / "benchmarks" / "results"
pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="a source package has no records")

PAGES = (
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))] if RESULTS.exists() else []
)
RECORDS = sorted(RESULTS.rglob("*.txt"))
HEAD = re.compile(r"# kvswap [0-9a-f]{7,40}, [^:]+: \S")
LINK = re.compile(r"\((?:\.\./)*(benchmarks/results/[^)#]+)\)")
# A figure: a number with a fraction, or one before a unit. Not a number of a version, nor one in code or in a link.
FIGURE = re.compile(
    r"(?<![\w.,-])[-+]?\d[\d,]*\.\d+(?: %)?(?![\w.]*\.\d)|(?<![\w.,-])\d[\d,]*(?= (?:GB/s|tokens/s|us|ms)\b)"
)
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
NO_FIGURES = re.compile(r"`[^`]*`|\]\([^)]*\)|\b(?:CUDA|vLLM|SGLang|torch|Mooncake)(?: Store)? [\d.]+|#\d+")


def blocks_of(page: str) -> Iterator[str]:
    """The paragraphs, list items and tables of a page; a paragraph that ends with a colon has the table behind it."""
    found = [part for part in re.split(r"\n\n|\n(?=- )", page) if part.strip()]
    for i, part in enumerate(found):
        table = found[i + 1] if part.rstrip().endswith(":") and found[i + 1 : i + 2] else ""
        yield part + "\n" + (table if table.lstrip().startswith("|") else "")


def figures_of(text: str) -> set[str]:
    return set(FIGURE.findall(NO_FIGURES.sub(" ", text)))


def numbers_of(record: str) -> set[float]:
    return {float(number.replace(",", "")) for number in NUMBER.findall(record)}


def is_in(figure: str, numbers: set[float]) -> bool:
    """Whether one of the numbers is this figure, rounded to its places; of "4.8 %" also 0.048 or 1.048."""
    plain = figure.replace(",", "").removesuffix(" %")
    value, places = float(plain), len(plain.partition(".")[2])
    wanted = [value]
    if figure.endswith("%"):
        wanted, places = [value, value / 100, 1 + value / 100], places + 2
    return any(abs(number - each) <= 0.5000001 * 10**-places for number in numbers for each in wanted)


def without_marked(page: str) -> str:
    for mark in marks_of(page):
        page = re.sub(rf"(?<![\w.,+-]){re.escape(mark.figure)}", "", page)
    return COMMENT.sub("", page)


def quotes() -> Iterator[tuple[str, str, set[str]]]:
    """Page, block and records of all that links one. Figures with a mark are left out: test_figures.py has them."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in blocks_of(without_marked(text)):
            records = {link for link in LINK.findall(block) if link.endswith(".txt")}
            if records:
                yield str(page.relative_to(ROOT)), block, records


QUOTES = list(quotes())


@pytest.mark.parametrize(
    ("page", "block", "records"), QUOTES, ids=[f"{page}-{i}" for i, (page, *_) in enumerate(QUOTES)]
)
def test_quoted_figures_are_in_the_record(page: str, block: str, records: set[str]) -> None:
    numbers = set().union(*(numbers_of((ROOT / record).read_text(encoding="utf-8")) for record in records))
    assert sorted(figure for figure in figures_of(block) if not is_in(figure, numbers)) == []


def test_a_figure_that_is_not_in_the_record_shows() -> None:
    text = "On CUDA 13.0 it is 0.97 at 54.6 GB/s, +0.007 more, [52](x/1.5) of 0.26.0, `1.25`, and 1,024.5 in 16 us."
    assert figures_of(text) == {"0.97", "54.6", "+0.007", "1,024.5", "16"}
    assert figures_of("by 4.8 %, -0.3 % and 5 %") == {"4.8 %", "-0.3 %"}
    assert (
        is_in("4.8 %", {1.048}) and is_in("-0.3 %", {-0.0032}) and is_in("4.8 %", {0.0479}) and is_in("90.5 %", {90.5})
    )
    assert not is_in("4.8 %", {1.049}) and not is_in("4.8 %", {0.48, 4.7, 48.0})
    numbers = numbers_of("auto 0.967 54.55 GB/s 0.007 1024.5 15.4us 3x 2.5e-1")
    assert numbers >= {0.967, 54.55, 0.007, 1024.5, 0.25}
    assert [f for f in ("0.97", "54.6", "+0.007", "1,024.5", "16") if not is_in(f, numbers)] == ["16"]


@pytest.mark.parametrize("path", RECORDS, ids=[str(path.relative_to(RESULTS)) for path in RECORDS])
def test_each_record_names_its_commit_and_is_quoted(path: Path) -> None:
    head = path.read_text(encoding="utf-8").partition("\n")[0]
    assert HEAD.match(head), head
    assert any(str(path.relative_to(ROOT)) in records for *_, records in QUOTES)


def test_records_are_few() -> None:
    for folder in {path.parent for path in RECORDS}:
        assert len(list(folder.iterdir())) <= 12, folder
    assert sum(path.read_text(encoding="utf-8").count("\n") for path in RECORDS) < 2500


def test_every_link_to_a_record_leads_somewhere() -> None:
    links = {link for page in PAGES for link in LINK.findall(page.read_text(encoding="utf-8"))}
    assert [link for link in sorted(links) if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("arguments", [[], ["OUT", "bench", "nothing"]])
def test_a_part_that_is_not_there_is_refused(arguments: list[str]) -> None:
    script = ["bash", str(ROOT / "benchmarks" / "record.sh"), *arguments]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "one of: load bench" in done.stderr


def test_the_picture_has_a_bar_a_row_and_the_rivals_of_a_later_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from picture import bars_of

    plain = "             256 MiB x 1    D2H  one copy  1.008 1.008-1.009  0.000   55.08    1.00   55.33\n"
    rows = [f"64x32k  64 x 32 KiB x 128  {way}  9.9-9.9  0.007   53.39    0.97   54.62 \n"
            for way in ("D2H  auto  1.015", "D2H  high  1.030", "H2D  auto  1.058", "D2H  warp  31.030")]  # fmt: skip
    first, by_hand = plain + "".join(rows[:3]), rows[0] + rows[3]
    record = f"# kvswap\n== --load step\n{first}\n== other\n{rows[3]}\n== --method numpy\n{by_hand}"
    found = [(bar.name, round(bar.longer, 1), bar.colour) for bar in bars_of(record)]
    assert found == [
        ("one plain copy of 256 MiB", 0.8, "grey"), ("64 x 32 KiB, host block-first", 1.5, "tab:blue"),
        ("64 x 32 KiB, a warp a block", 3003.0, "tab:orange"),
    ]  # fmt: skip


def test_the_picture_is_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn again after the record or the program changed: python3 benchmarks/picture.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from picture import bars_of

    drawn = (ROOT / "docs" / "beside.svg").read_text(encoding="utf-8")
    bars = bars_of((RESULTS / "h200" / "load.txt").read_text(encoding="utf-8"))
    texts = [text for bar in bars for text in (bar.name, bar.label)]
    assert [text for text in texts if text.replace("'", "&#39;") not in drawn and text not in drawn] == []
