"""Figures of a page and their marks: for each number with a unit the record, the row and the field that have it.

A page ends with a comment "Where each figure stands". Its marks are in the order of the page's figures:

    h200/load.txt > SECTION > ...                        the record, and lines to go to first
    ROW: FIELD = FIGURE; FIELD = FIGURE | ROW: ...       words of a row; a column or key of it

FIELD may be arithmetic on fields: "slow-down - 1 = 0.8 %", "1 / size = 1.3 times".
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

RATES, SIZES, RATIOS = r"[GMT]B/s|tokens/s|[num]?s", r"[KMGT]i?B", r"%|times"
WORDS = r"seconds?|minutes?|hours?|milliseconds?|microseconds?"
UNIT = re.compile(rf"(?<![\w/])(?:{RATES})(?![\w/])")
FIGURE = re.compile(rf"(?<![\w.,])[-+]?\d[\d,]*(?:\.\d+)?\s(?:{RATES}|{SIZES}|{RATIOS}|{WORDS})(?![\w/])")
SPELT = re.compile(rf"\b(?:half an?|an?|one|two|three|four|five|six|seven|eight|nine|ten|twenty|thirty)\s(?:{WORDS})\b")
COMMENT = re.compile(r"<!-- Where each figure stands.*?\n(.*?) -->", re.DOTALL)
HIDDEN = re.compile(r"^```.*?^```|`[^`]*`|<!--.*?-->|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?![\w.])")


@dataclass(frozen=True)
class Mark:
    record: str
    row: str  # places and the row, " > " between them
    field: str
    figure: str


def figures_of(page: str) -> list[str]:
    """Each number with a unit, those in words among them, but those in code and in targets of links."""
    text = HIDDEN.sub(" ", page)
    found = [*FIGURE.finditer(text), *SPELT.finditer(text)]
    return [" ".join(match[0].split()) for match in sorted(found, key=lambda match: match.start())]


def marks_of(page: str) -> list[Mark]:
    marks, record, places = [], "", [""]
    comment = COMMENT.search(page)
    for line in comment[1].splitlines() if comment else []:
        if re.match(r"[\w/]+\.txt\b", line):
            record, *places = line.split(" > ")
            continue
        for part in line.split(" | "):
            row, _, fields = part.strip().partition(": ")
            for field in fields.split("; "):
                name, _, figure = field.rpartition(" = ")
                marks.append(Mark(record, " > ".join([*places, row]), name, figure))
    return marks


def words(text: str) -> list[str]:
    return re.findall(r'[^\s"{}:,]+', text)


def find_row(lines: list[str], row: str) -> int | None:
    """The first line that has these words in their order, behind the places that are named before it."""
    at = -1
    for place in row.split(" > "):
        found = (i for i in range(at + 1, len(lines)) if has_words(lines[i], words(place)))
        if (at := next(found, len(lines))) == len(lines):
            return None
    return at


def has_words(line: str, wanted: list[str]) -> bool:
    rest = iter(words(line))
    return all(word in rest for word in wanted)


def cell(lines: list[str], at: int, field: str) -> str | None:
    """What a row has in a field: a JSON line by its key, a table below the nearest heading of that name."""
    if lines[at].startswith("{"):
        return str(json.loads(lines[at]).get(field))
    name = re.compile(rf"(?<!\S){re.escape(field)}(?!\S)")
    heading = next((found for line in reversed(lines[:at]) if (found := name.search(line))), None)
    pattern = r"\S+(?: \S+)*" if field == "shape" else r"\S+"
    found = heading and next((part for part in re.finditer(pattern, lines[at])
                              if part.start() < heading.end() and heading.start() < part.end()), None)  # fmt: skip
    return found[0] if found else None


def value(lines: list[str], at: int, field: str) -> float | None:
    """Of arithmetic on fields, from the left, but with a quotient first."""
    if " - " in field:
        left, right = (value(lines, at, part) for part in field.split(" - ", 1))
        return None if left is None or right is None else left - right
    if " / " in field:
        left, right = (value(lines, at, part) for part in field.split(" / ", 1))
        return None if left is None or not right else left / right
    number = NUMBER.fullmatch(field if NUMBER.fullmatch(field) else cell(lines, at, field) or "")
    return float(number[0].replace(",", "")) if number else None


def fault_of(mark: Mark, results: Path) -> str:
    """Why the record does not have the figure, or nothing."""
    path = results / mark.record
    if not mark.record or not path.is_file():
        return f"no record {mark.record}"
    lines = path.read_text(encoding="utf-8").splitlines()
    at = find_row(lines, mark.row)
    if at is None:
        return f"{mark.record} has no row {mark.row}"
    number, unit = mark.figure.rsplit(" ", 1)
    if re.fullmatch(SIZES, unit):
        text = cell(lines, at, mark.field) or ""
        return "" if re.search(rf"(?<![\d.,]){re.escape(mark.figure)}\b", text) else f"{mark.field} is {text}"
    found = value(lines, at, mark.field)
    if found is None:
        return f"{mark.record}, {mark.row}: no number in {mark.field}"
    has = UNIT.search(mark.field) or UNIT.search(mark.row.split(" > ")[-1])
    ratio = has is None or " / " in mark.field
    if ratio != bool(re.fullmatch(RATIOS, unit)) or (not ratio and has and has[0] != unit):
        return f"{mark.field} is not in {unit}"
    places = len(number.partition(".")[2])
    found *= 100 if unit == "%" else 1
    near = abs(found - float(number.replace(",", ""))) <= 0.5000001 * 10**-places
    return "" if near else f"{mark.record}, {mark.row}: {mark.field} is {found:g} {unit}"


def faults_of(page: str, results: Path) -> list[str]:
    """Figures without a mark, marks without a figure, and figures that their records do not have."""
    figures, marks = figures_of(page), marks_of(page)
    for i, figure in enumerate(figures):
        if i >= len(marks) or marks[i].figure != figure:
            after = f" after {figures[i - 1]}" if i else ""
            return [f"{figure}{after}: the mark there is of {marks[i].figure if i < len(marks) else 'nothing'}"]
    if len(marks) > len(figures):
        return [f"the page has no {marks[len(figures)].figure} at its end, and a mark of it"]
    return [f"{mark.figure}: {fault}" for mark in marks if (fault := fault_of(mark, results))]
