"""The site of the documentation: `sphinx-build -W -c docs . OUT`, with what the extra `docs` installs.

The pages are the Markdown files that a code host shows as well, at their own places: the source folder is the root of
the repository. What only the site has is added while the pages are read: the navigation, the reference of a module
where a page says `<!-- api: MODULE -->`, and a file's text where it says `<!-- source: PATH -->`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT / "packaging")]

import docstrings  # noqa: E402
from kvswap_build import readme  # noqa: E402

import kvswap  # noqa: E402

project = "kvswap"
author = copyright = "the kvswap authors"
release = version = kvswap.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]

NAVIGATION = {  # captions; pages, with a shorter title where one serves
    "Start": [
        "which", "Python: start/python", "C: start/c", "vLLM: start/vllm", "SGLang: start/sglang",
        "LMCache: start/lmcache", "TensorRT-LLM: start/tensorrt-llm", "FastDeploy: start/fastdeploy", "coming-from",
        "examples",
    ],
    "Understand": ["concepts", "glossary", "architecture", "performance"],
    "How to": ["howto/path", "howto/pool", "howto/order", "howto/failure", "howto/calibrate", "howto/metrics"],
    "Guide": [
        "guide", "paths", "order", "memory", "Sharing between processes: ipc", "Shared links: share", "files", "codecs",
        "many-nodes", "scale", "metrics", "calibration", "configuration",
    ],
    "Engines": ["vllm", "sglang", "lmcache", "trtllm", "fastdeploy"],
    "Reference": ["api/index", "C: c"],
    "Help": ["troubleshooting", "faq"],
    "Project": [
        "roadmap", "../CHANGELOG", "packaging", "Trust: security", "../SECURITY", "../CONTRIBUTING",
        "../CODE_OF_CONDUCT",
    ],
}  # fmt: skip

# Pages of modules that this build does not have: neither they nor their rows are in the site.
MODULE_PAGES = {path.name: path.stem.replace("-", ".") for path in (HERE / "api").glob("kvswap*.md")}
ABSENT = [name for name, module in MODULE_PAGES.items() if importlib.util.find_spec(module) is None]

root_doc = "docs/index"
include_patterns = ["docs/*.md", "docs/*/*.md", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md"]
exclude_patterns = ["**/.*", ".venv", "build", "dist", *(f"docs/api/{name}" for name in ABSENT)]
myst_heading_anchors = 3  # as a code host makes them
nitpicky = False

html_theme = "furo"
html_title = f"kvswap {release}"
if readme.REPOSITORY:  # "edit this page"
    html_theme_options = {"source_repository": readme.REPOSITORY, "source_branch": "main", "source_directory": ""}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = False
html_extra_path = ["_site"]  # index.html, which leads to the home page

autodoc_member_order = "bysource"
OF_ENGINES = ("kvswap.sglang", "kvswap.vllm")
autodoc_mock_imports = ["sglang", "vllm"]
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"


def toctree(entries: list[str], caption: str = "") -> str:
    """A hidden one. A page that is not there (yet) is left out."""
    lines = ["", "```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else []), ""]
    for entry in entries:
        title, _, name = entry.rpartition(": ")
        path = (HERE / f"{name}.md").resolve()
        page = f"/{path.relative_to(ROOT).with_suffix('')}"
        if path.exists():
            lines.append(f"{title} <{page}>" if title else page)
    return "\n".join([*lines, "```", ""])


def reference(module: str) -> str:
    """The entries of a module: its docstring, then each name of its `__all__`."""
    lines = [f".. automodule:: {module}", "   :no-members:", ""]
    for name in importlib.import_module(module).__all__:
        if name == "__version__":  # a str, whose own docstring is str's
            lines += [f".. py:data:: {name}", "   :type: str", "", "   The version.", ""]
            continue
        lines += [f".. {directive(module, name)}:: {module}.{name}", *options(module, name), ""]
    return "\n".join(["```{eval-rst}", *lines, "```"])


def directive(module: str, name: str) -> str:
    if module in OF_ENGINES and name not in (
        "register",
        "unregister",
    ):  # loaded when they are asked for, out of the engine's classes
        return "autoclass"
    thing = getattr(importlib.import_module(module), name)
    if isinstance(thing, type):
        return "autoexception" if issubclass(thing, BaseException) else "autoclass"
    return "autofunction" if inspect.isroutine(thing) else "autodata"


def options(module: str, name: str) -> list[str]:
    kind = directive(module, name)
    if kind == "autoclass" and module not in OF_ENGINES:
        base = getattr(importlib.import_module(module), name).__base__
        own = base.__module__ == "kvswap._C"  # what a base of the extension has is this class's
        return ["   :members:", *(["   :inherited-members:"] if own else [])]
    return ["   :no-value:"] if kind == "autodata" else []


def read_source(app: Any, docname: str, source: list[str]) -> None:
    folder = (ROOT / f"{docname}.md").parent  # a link to a folder is text here: only a code host shows folders
    text = re.sub(r"\[([^]]*)\]\(([^):#]+)\)", lambda found: found[(folder / found[2]).is_dir()], source[0])
    text = re.sub(r"^<!-- api: (\S+) -->$", lambda found: reference(found[1]), text, flags=re.MULTILINE)
    text = re.sub(
        r"^<!-- source: (\S+) -->$", r"```{literalinclude} \1\n:language: python\n```", text, flags=re.MULTILINE
    )
    if docname == root_doc:
        text += "".join(toctree(entries, caption) for caption, entries in NAVIGATION.items())
    elif docname == "docs/api/index":
        text = "".join(line for line in text.splitlines(keepends=True) if not any(name in line for name in ABSENT))
        text += toctree([f"api/{name}" for name in re.findall(r"\]\((kvswap[\w-]*)\.md\)", text)])
    source[0] = text


def process_docstring(app: Any, what: str, name: str, thing: Any, given: Any, lines: list[str]) -> None:
    lines[:] = docstrings.attribute_to_rst(lines) if what == "attribute" else docstrings.to_rst(lines)


def skip_member(app: Any, what: str, name: str, thing: Any, skip: bool, given: Any) -> bool | None:
    """Leave out fields without words of their own, which would show those of their value's type."""
    plain = isinstance(thing, int | float | str | tuple | None)
    return True if plain or (getattr(thing, "__doc__", "") or "").startswith("Alias for field") else None


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", read_source)
    app.connect("autodoc-process-docstring", process_docstring)
    app.connect("autodoc-skip-member", skip_member)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
