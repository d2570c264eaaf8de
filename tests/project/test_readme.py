"""What the README and the docs show works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import ROOT

PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
SNIPPET = re.compile(r"^(?:<!-- (needs|fragment): (.*?) -->\n)?```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SNIPPETS = [
    pytest.param(*found, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, found in enumerate(SNIPPET.findall(page.read_text(encoding="utf-8")))
]


def test_the_readme_is_read_in_a_minute() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_every_snippet_is_found() -> None:
    assert sum(page.read_text(encoding="utf-8").count("```python") for page in PAGES) == len(SNIPPETS) > 10


@pytest.mark.parametrize(("mark", "what", "code"), SNIPPETS)
def test_the_snippet_runs_alone(mark: str, what: str, code: str, device_name: str) -> None:
    """A `fragment` shows a call among things of the reader's own, and says whose: it compiles."""
    program = compile(code, "snippet", "exec")
    if mark == "fragment":
        return
    for need in what.split():
        if need == "cuda" and not device_name.startswith("cuda"):
            pytest.skip("needs a GPU: run with --device cuda:0")
        if need != "cuda":
            pytest.importorskip(need)
    exec(program, {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere_and_nothing_is_left_to_fill_in(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", text)  # tests/project/test_site.py looks at the anchors
    assert [link for link in links if not (page.parent / link).exists()] == []
    assert re.findall(r"@[A-Z]+@", text) == []
