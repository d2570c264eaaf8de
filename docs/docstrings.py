"""kvswap's docstrings, which are plain text for help(), as reStructuredText for the site.

Paragraphs stay. `name, other: words`, with continuation lines indented by two, becomes an item of a list, and so does
`- words`. An indented paragraph is code, or, if it has two columns, a list. No docstring can break the site: whatever
markup would take for its own is escaped.
"""

from __future__ import annotations

import re

ONE = r"[a-z_]\w*(?: \([^()]*\))?"
ITEM = re.compile(rf"^({ONE}(?:(?:, | and ){ONE})*): (.*)$")
COLUMNS = re.compile(r"^ {4}([a-z_]\w*) {2,}(\S.*)$")
CODE = re.compile(r"``?([^`]+)``?")
NAME = re.compile(
    r"(?<![\w.`/])(kvswap(?:\.\w+)+(?:\(\))?|[A-Z]\w+\.[a-z_]\w+(?:\(\))?|[a-z_]\w*\(\)"
    r"|[a-z_]\w*=(?:'[^']*'|[\w.()]+\w)|'[^' ]+'|[A-Z]\w*Error|QueueFull)(?!\w)"
)
NEXT = re.compile(r"(?<=\.) (?=[a-z_]\w*(?:, [a-z_]\w*)*: )")  # an item that begins within a line
TYPE = re.compile(r"^([A-Za-z][\w. ,']*?): (.*)$")


def inline(text: str) -> str:
    """Code in backticks stays code; names, arguments and strings become code; the rest is escaped."""
    parts = []
    for i, part in enumerate(CODE.split(text)):
        if i % 2:
            parts.append(f"``{part}``")
            continue
        for j, word in enumerate(NAME.split(part)):
            escaped = re.sub(r"([\\*`|_<>])", r"\\\1", word)
            parts.append(f"\\ ``{word}``\\ " if j % 2 else escaped)
    return "".join(parts)


def items(lines: list[str]) -> list[tuple[str, str]]:
    """(name, or "" for a paragraph, or "-" of a list; its words) in order."""
    whole: list[str] = []
    for line in lines:
        if line.startswith("  ") and whole:
            whole[-1] += f" {line.strip()}"
        else:
            whole.append(line.strip())
    found: list[tuple[str, str]] = []
    for line in whole:
        item = ITEM.match(line)
        if item:
            found.append((item[1], item[2]))
        elif line.startswith("- "):
            found.append(("-", line[2:]))
        elif found and (not found[-1][0] or not found[-1][1].endswith((".", ":"))):
            found[-1] = found[-1][0], f"{found[-1][1]} {line}"  # the text of an item that goes on without an indent
        else:
            found.append(("", line))
    return found


def paragraph(lines: list[str]) -> list[str]:
    if all(line.startswith("    ") for line in lines):
        columns = [COLUMNS.match(line) for line in lines]
        if not columns[0] or not all(
            match or line.startswith("        ") for match, line in zip(columns, lines, strict=True)
        ):
            return [".. code-block:: python", "", *(f"   {line[4:]}" for line in lines), ""]
        flat = [
            f"{match[1]}: {match[2]}" if match else f"  {line.strip()}"
            for match, line in zip(columns, lines, strict=True)
        ]
        return paragraph(flat)
    out: list[str] = []
    for name, words in items(lines):
        if not name:
            out += ["", inline(words), ""]
        elif name == "-":
            out.append(f"* {inline(words)}")
        else:
            first, *more = NEXT.split(words)
            out.append(f"* **{name}**: {inline(first)}")
            out += [f"* **{other}**: {inline(text)}" for other, _, text in (item.partition(": ") for item in more)]
    return [*out, ""]


def attribute_to_rst(lines: list[str]) -> list[str]:
    """An attribute's docstring begins with its type."""
    found = TYPE.match(lines[0]) if lines else None
    if not found:
        return to_rst(lines)
    return [f"*{found[1]}*: {inline(' '.join([found[2], *map(str.strip, lines[1:])]).strip())}", ""]


def to_rst(lines: list[str]) -> list[str]:
    out: list[str] = []
    block: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            block.append(line.rstrip())
        elif block:
            out += ["", *paragraph(block)]
            block = []
    return out
