"""Docstrings of kvswap/_C.pyi are those of the C code: `python tests/project/stub_docs.py` writes them, test_stubs.py
compares.

Of a class, function or property without its own docstring in the C code the stub has none either.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvswap import _C

STUB = Path(__file__).resolve().parents[2] / "kvswap" / "_C.pyi"
Documented = ast.ClassDef | ast.FunctionDef


def members_of(thing: type) -> dict[str, Any]:
    """A class's own, and those of its base in the extension."""
    own = [base for base in thing.__mro__ if base is thing or base.__module__ == "kvswap._C"]
    return {name: member for base in reversed(own) for name, member in vars(base).items()}


def documented(tree: ast.Module) -> Iterator[tuple[Documented, str]]:
    """Each class, function, method and property of the stub, and the docstring that the C code gives it."""
    yield from _walk(tree.body, _C)


def _walk(body: list[ast.stmt], owner: Any) -> Iterator[tuple[Documented, str]]:
    for node in body:
        if not isinstance(node, Documented) or node.name.startswith("__"):
            continue
        member = inspect.getattr_static(owner, node.name, None)
        if member is not None:
            yield node, inspect.cleandoc(member.__doc__ or "")
        if isinstance(node, ast.ClassDef) and member is not None:
            yield from _walk(node.body, member)


def _quoted(text: str, indent: str) -> str:
    text = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    if text.endswith('"'):
        text = text[:-1] + '\\"'
    return textwrap.indent(f'"""{text}"""', indent) + "\n"


def written(source: str) -> str:
    """The stub with the docstrings of the C code."""
    lines = source.splitlines(keepends=True)
    for node, text in sorted(documented(ast.parse(source)), key=lambda pair: -pair[0].lineno):
        first, indent = node.body[0], " " * (node.col_offset + 4)
        has = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        quoted = _quoted(text, indent) if text else ""
        assert first.end_lineno is not None
        if not has:  # nothing, or "..."
            if quoted:
                lines.insert(first.lineno - 1, quoted)
            continue
        only = len(node.body) == 1
        if isinstance(first.value, ast.Constant) and first.value.value is ...:  # type: ignore[union-attr]
            if not quoted:
                continue
            head = lines[first.lineno - 1][: first.col_offset].rstrip()
            lines[first.lineno - 1 : first.end_lineno] = [head + "\n" if head else "", quoted]
        else:
            lines[first.lineno - 1 : first.end_lineno] = [quoted or (f"{indent}...\n" if only else "")]
    return "".join(lines)


if __name__ == "__main__":
    STUB.write_text(written(STUB.read_text()))
