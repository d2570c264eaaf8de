"""The site of the docs: the reference has every public name, and the site is built without a warning from these pages.

The first tests need nothing. The site itself is built where Sphinx is: `pip install -e '.[docs]'`, as .ci/run does.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
from conftest import ROOT, elsewhere
from members import members_of

import kvswap

DOCS = ROOT / "docs"
# Modules without an underscore that are the command's or the manager's own.
INNER = (
    "kvswap.memory.ipc",
    "kvswap.bench",
    "kvswap.replay",
    "kvswap.commands",
    "kvswap.top",
    "kvswap.cli",
    "kvswap.info",
    "kvswap.calibrate",
    "kvswap.fastdeploy.manager",
)
SHOWN = ("kvswap.typing",)  # types alone: their page is the text of the module
FIELDS = ("getset_descriptor", "member_descriptor", "property")


def public_modules() -> list[str]:
    names = ["kvswap"] + [module.name for module in pkgutil.walk_packages(kvswap.__path__, "kvswap.")]
    return [name for name in names if "._" not in name and not name.startswith(INNER)]


def page_of(module: str) -> Path:
    return DOCS / "api" / f"{module.replace('.', '-')}.md"


def loaded(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"needs {error.name}: .ci/run has it")


def test_each_public_module_has_a_page_and_a_row() -> None:
    index = (DOCS / "api" / "index.md").read_text(encoding="utf-8")
    for module in public_modules():
        page = page_of(module)
        assert page.exists(), f"add {page.relative_to(ROOT)}, like those beside it, and its row to docs/api/index.md"
        mark = f"source: ../../{module.replace('.', '/')}.py" if module in SHOWN else f"api: {module}"
        assert f"<!-- {mark} -->" in page.read_text(encoding="utf-8").splitlines()
        assert f"]({page.name})" in index, f"docs/api/index.md has no row of {module}"


def described() -> list[str]:
    return [module for module in public_modules() if module not in SHOWN]


@pytest.mark.parametrize("module", described())
def test_each_public_name_has_a_docstring_of_its_own(module: str) -> None:
    found = loaded(module)
    assert found.__doc__ and found.__all__
    engine = module.removeprefix("kvswap.")
    if engine in ("sglang", "vllm") and importlib.util.find_spec(engine) is None:
        assert classes_of(engine) >= set(found.__all__) - {"register", "unregister"}
        return
    for name in found.__all__:
        thing = getattr(found, name)
        if isinstance(thing, type) or inspect.isroutine(thing):
            assert (thing.__doc__ or "").strip(), f"{module}.{name}"
        if isinstance(thing, type):
            assert [f"{module}.{name}.{member}" for member in undocumented(thing)] == []


def classes_of(engine: str) -> set[str]:
    """The documented classes of kvswap.vllm or kvswap.sglang, which are made out of the engine's: by their source."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "kvswap" / engine).glob("_*.py")))
    return set(re.findall(r'^ *class ([A-Z]\w+)\([^)]*\):[^\n]*\n +"""', text, re.MULTILINE))


def undocumented(thing: type) -> Iterator[str]:
    """Methods and properties without a word. Fields of records are described by the docstring of the class."""
    for name, member in members_of(thing).items():
        if name.startswith("_"):
            continue
        function = inspect.isroutine(member) or isinstance(member, classmethod | staticmethod)
        record = type(member).__name__ == "member_descriptor" or hasattr(thing, "_fields")
        if (function or type(member).__name__ in FIELDS) and not record:
            doc = getattr(thing, name).__doc__ if function else member.__doc__
            if not (doc or "").strip():
                yield name


def test_a_docstring_becomes_a_list_code_and_text_without_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    docstrings = importlib.import_module("docstrings")
    text = [
        "Copy *all* of a_ and |b|; see kvswap.Device.", "",
        "src, dst: pools, in this", "  order. count: how many.", "Free text.",
        "sizes (bytes): one `int`.", "", "    call(1)", "", "    name  what it", "          means",
    ]  # fmt: skip
    lines = [line for line in docstrings.to_rst(text) if line]
    assert lines == [
        r"Copy \*all\* of a\_ and \|b\|; see \ ``kvswap.Device``\ .",
        "* **src, dst**: pools, in this order.", "* **count**: how many.", "Free text.",
        "* **sizes (bytes)**: one ``int``.", ".. code-block:: python", "   call(1)", "* **name**: what it means",
    ]  # fmt: skip
    assert docstrings.attribute_to_rst(["tuple of int: its", "shape."])[0] == "*tuple of int*: its shape."


def test_the_pictures_are_those_that_the_script_draws(tmp_path: Path) -> None:
    script = DOCS / "pictures" / "draw.py"
    subprocess.run([sys.executable, script, tmp_path], check=True, timeout=60)
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_bytes() for path in script.parent.glob("*.svg")} and len(drawn) > 4


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for need in ("sphinx", "myst_parser", "furo"):
        if importlib.util.find_spec(need) is None:
            pytest.skip(f"needs {need}: pip install -e '.[docs]', as .ci/run does")
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            "-W",
            "--keep-going",
            "-q",
            "-d",
            out / "trees",
            "-c",
            DOCS,
            ROOT,
            out / "html",
        ],
        **elsewhere(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(out / "html")


class Links(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id" and value:
                self.places.add(value)


@pytest.mark.slow
def test_the_site_is_built_and_all_of_its_links_lead_somewhere(site: Path) -> None:
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    assert len(pages) > 40
    lost, seen = [], 0
    for page, found in pages.items():
        for link in found.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue  # the world outside is not asked
            seen += 1
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            place = unquote(parts.fragment)
            if not target.exists() or (place and target in pages and place not in pages[target].places | {"top"}):
                lost.append(f"{page.relative_to(site)}: {link}")
    assert lost == [] and seen > 1000
    assert "docs/index.html" in (site / "index.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_public_name_is_in_the_site(site: Path) -> None:
    with (site / "objects.inv").open("rb") as file:
        for _ in range(4):
            file.readline()
        names = {line.split(" ")[0] for line in zlib.decompress(file.read()).decode().splitlines()}
    wanted = {f"{module}.{name}" for module in described() for name in loaded(module).__all__}
    assert wanted - names == set() and len(wanted) > 100


@pytest.mark.slow
def test_every_page_is_in_the_navigation(site: Path) -> None:
    home = (site / "docs" / "index.html").read_text(encoding="utf-8")
    for page in [*DOCS.rglob("*.md"), *(ROOT / f"{name}.md" for name in ("CHANGELOG", "SECURITY", "CONTRIBUTING"))]:
        link = os.path.relpath(page.with_suffix(".html"), DOCS)
        absent = page.parent.name == "api" and importlib.util.find_spec(page.stem.replace("-", ".")) is None
        assert page.stem == "index" or absent or f'href="{link}"' in home, (
            f"docs/conf.py's navigation lacks {page.relative_to(ROOT)}"
        )
