"""docs/troubleshooting.md has an entry for each warning and error that a user can meet, and none for what is gone.

An entry is a row; the code in its first column is a part of the message, in which `...` stands for anything. Errors of
arguments (ValueError, IndexError, TypeError) say themselves what to do, and need none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from conftest import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
ARGUMENTS = ("INVALID", "RANGE", "TYPE")
ERRORS = ("Error", "QueueFull", "ManagerError", "NotReady", "TimeoutError", "ImportError", "RuntimeError", "OSError")
# What the command and the benchmarks say is for their own output; a host device refuses what a driver would.
OTHERS = (
    "kvswap/bench/",
    "kvswap/replay/",
    "kvswap/cli",
    "kvswap/calibrate",
    "kvswap/_rig",
    "csrc/host/",
    "csrc/py/seam",
)
OPERATIONS = ("cuMemHostAlloc",)  # the name of a driver's call, where the message is made of it and its code
# First columns that are no text of ours: of the system or of Python, an attribute, or put together from parts.
ELSEWHERE = {
    "gcc", "Python.h: No such file", "transfer.path", "dma", "BufferError", "No space left on device", "'msgspec'",
    "'prometheus_client'", "'matplotlib'", "No module named 'zmq'", "copy failed with code ...", "client.clear()",
    "ok=False", "XDG_RUNTIME_DIR", "...; that side of tensor ... has ... blocks, 0 to ...",
    "cuModuleLoadData on sm_...", "no kernels (...)", "no batched copies (...)",
    "this machine has a GPU, and kvswap was built without nvcc",
}  # fmt: skip


def sources() -> Iterator[tuple[str, str]]:
    for path in [*sorted((ROOT / "csrc").rglob("*.c")), *sorted((ROOT / "kvswap").rglob("*.py"))]:
        name = str(path.relative_to(ROOT))
        if not name.startswith(OTHERS):
            yield name, path.read_text(encoding="utf-8")


def joined(code: str) -> str:
    """The longest string of C code: neighbours are one, PRIu64 and the like are a number."""
    code = re.sub(
        r'"\s*PRI\w+\s*"|"\s*PRI\w+|PRI\w+\s*"', lambda found: "%" if found[0].count('"') == 2 else '%"', code
    )
    found = ["".join(re.findall(r'"((?:[^"\\]|\\.)*)"', run)) for run in re.findall(r'(?:"(?:[^"\\]|\\.)*"\s*)+', code)]
    return max(found, key=len, default="").replace('\\"', '"')


def of_c(name: str, text: str) -> Iterator[tuple[str, str]]:
    for call in re.finditer(r"\bkvs_fail(?:_driver)?\(\s*[^,]+,\s*(?:KVS_(\w+)|\w+)\s*,([^;]*?);", text, re.DOTALL):
        said = joined(call[2])
        if call[1] not in ARGUMENTS and len(said) > 10 and said not in OPERATIONS:
            yield name, said
    for call in re.finditer(r"\bkvs_host_pool_note\(\s*\w+,([^;]*?);", text, re.DOTALL):
        if len(said := joined(call[1])) > 10:
            yield name, said
    for call in re.finditer(r"\bPyErr_Warn(?:Format|Ex)\(([^;]*?);", text, re.DOTALL):
        yield name, joined(call[1])


def words(node: ast.expr) -> str:
    """A string's text, with % for what is put into it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "%" for part in node.values)
    if isinstance(node, ast.BinOp):
        return words(node.left) + words(node.right)
    return ""


def plain(node: ast.expr) -> str:
    return re.sub(r"%[sdr]?", "", words(node))


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_log(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and function.attr in ("warning", "error")
        and "log" in name_of(function.value)
    )


def of_python(name: str, text: str) -> Iterator[tuple[str, str]]:
    tree = ast.parse(text)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and name_of(node.exc.func) in ERRORS:
            for said in map(words, node.exc.args):
                if len(said) > 12:
                    yield name, said
        elif isinstance(node, ast.Call) and is_log(node.func) and node.args and len(plain(node.args[0])) > 4:
            yield name, words(node.args[0])
    for function in functions.values():
        if any(isinstance(node, ast.Name) and node.id == "RuntimeWarning" for node in ast.walk(function)):
            yield from ((name, said) for said in warned(function, functions))


def warned(function: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> Iterator[str]:
    """What it says in warnings.warn(), or puts together for it in a list, by itself or in a function that it calls."""
    called = [functions[name_of(node.func)] for node in ast.walk(function)
              if isinstance(node, ast.Call) and name_of(node.func) in functions]  # fmt: skip
    for body in (function, *called):
        for node in ast.walk(body):
            if isinstance(node, ast.Call) and name_of(node.func) in ("warn", "append") and node.args:
                said = words(node.args[0])
                if len(said.replace("%", "")) > 12:
                    yield said


@cache
def messages() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, text in sources():
        found += of_c(name, text) if name.endswith(".c") else of_python(name, text)
    return found


@cache
def entries() -> dict[str, re.Pattern[str]]:
    firsts = re.findall(r"^\| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    codes = {code for first in firsts for code in re.findall(r"`([^`]+)`", first)}
    codes = {
        code for code in codes if len(code.replace("...", "").strip()) > 6
    }  # a shorter one would be found anywhere
    return {code: re.compile(".*".join(map(re.escape, code.strip(". ").split("...")))) for code in codes}


def test_the_messages_are_found() -> None:
    said = [text for _, text in messages()]
    assert len(said) > 150
    assert any("do not fit: control group" in text for text in said)  # of C, over several lines
    assert any(text.startswith("vLLM %s with kvswap %s") for text in said)  # a log's
    assert any("rank 0 did not answer in %" in text for text in said)  # an f-string


def test_each_warning_and_error_has_an_entry() -> None:
    missing = [
        f"{name}: {text}" for name, text in messages() if not any(entry.search(text) for entry in entries().values())
    ]
    assert missing == []


def test_no_entry_is_of_a_message_that_is_gone() -> None:
    texts = [text for _, text in messages()]
    everything = "\n".join(strings(name, text) for name, text in sources())
    gone = [
        code
        for code, entry in entries().items()
        if code not in ELSEWHERE and not entry.search(everything) and not any(map(entry.search, texts))
    ]
    assert gone == []


def strings(name: str, text: str) -> str:
    if name.endswith(".py"):
        found = [words(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant | ast.JoinedStr)]
        return "\n".join(found)
    runs = re.findall(r'(?:"(?:[^"\\]|\\.)*"(?:\s|PRI\w+)*)+', text)
    return "\n".join(joined(run) for run in runs)


def test_links_of_the_page_are_short_and_rows_have_three_columns() -> None:
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("| exit") and "|---" not in line:
            assert line.count(" | ") in (1, 2), line


def test_this_file_names_folders_that_exist() -> None:
    assert all(list(Path(ROOT).glob(other + "*")) for other in OTHERS)
