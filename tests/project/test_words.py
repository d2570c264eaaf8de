"""The project's words: docs/glossary.md has the terms, and the words that they replaced are not used again."""

from __future__ import annotations

import re
from pathlib import Path

from conftest import ROOT

OLD = {
    "spine": "lane stream",
    "relay": "burst",
    "sheet": "copy group",
    "party": "accessor",
    "visitor": "accessor",
    "orphan": "abandoned",
    "stranger": "foreign uid",
    "forgive": "clear failures",
    "beyond hope": "device lost",
    "clocks hear": "join",
    "moment": "snapshot",
    "whoever": "the caller, the transfer, ...",
}
# Where such a word is what others say, or an English one in its own sense.
ALLOWED = {
    ("docs/security.md", "whoever"),  # people: who is trusted
    ("docs/security.md", "moment"),  # of time
    ("benchmarks/picture.py", "spine"),  # matplotlib's
}
SUFFIXES = (".c", ".h", ".cu", ".cuh", ".py", ".pyi", ".md", ".sh")
FOLDERS = ("csrc", "kvswap", "docs", "benchmarks", "examples")


def texts() -> list[Path]:
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "setup.py")]
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
    return [path for path in pages + found if path.exists()]


def words_of(text: str) -> set[str]:
    """Those of the old ones that stand in it: alone, in the plural, or as a part of an identifier."""
    return {old for old in OLD if re.search(rf"(?<![a-z]){old.replace(' ', '[ _]')}(?:s|ies)?(?![a-z])", text.lower())}


def test_old_words_are_found() -> None:
    assert words_of("kvs_sheet_open(lane->spine) /* Whoever calls */") == {"sheet", "spine", "whoever"}
    assert words_of("a third-party sheeted momentum") == {"party"}
    assert words_of("kvs_copy_group_open(lane->stream)") == set()


def test_old_words_are_gone() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {word}: say {OLD[word]}"
        for path in texts()
        for word in sorted(words_of(path.read_text(encoding="utf-8")))
        if (str(path.relative_to(ROOT)), word) not in ALLOWED
    ]
    assert wrong == []


def test_the_glossary_has_each_term_once() -> None:
    terms = re.findall(r"^\| ([^|]+?) \|", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)[
        2:
    ]
    assert len(terms) > 30 and sorted(terms, key=str.lower) == terms and len(set(terms)) == len(terms)
