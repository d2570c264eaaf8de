"""The docstrings of the C code for the stub kvswap/_C.pyi, which has none of its own. Editors show those of a wheel.

A build runs `python stub_docs.py PATH`, with the built package on PYTHONPATH.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvswap import _C

Documented = ast.ClassDef | ast.FunctionDef


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
    """The stub with the docstrings of the C code in place of its "..."."""
    lines = source.splitlines(keepends=True)
    for node, text in sorted(documented(ast.parse(source)), key=lambda pair: -pair[0].lineno):
        first = node.body[0]
        if not text:
            continue
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and first.value.value is ...:
            head = lines[first.lineno - 1][: first.col_offset].rstrip()
            lines[first.lineno - 1] = f"{head}\n" if head else ""
            lines.insert(first.lineno, _quoted(text, " " * (node.col_offset + 4)))
        else:
            decorators = [each.lineno for each in getattr(first, "decorator_list", [])]
            lines.insert(min([first.lineno, *decorators]) - 1, _quoted(text, " " * (node.col_offset + 4)))
    return "".join(lines)


if __name__ == "__main__":
    stub = Path(sys.argv[1])
    stub.write_text(written(stub.read_text()))
