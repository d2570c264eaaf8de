"""What the results of all benchmarks have in common, and tables of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvswap import _C

Cell: TypeAlias = str | float | None


@dataclass
class Document:
    """The head of a result. wrong_bytes: the first wrong byte ends a benchmark, so what is written has none."""

    kvswap: str
    device: str
    device_name: str
    driver: int
    bytes_verified: int = 0
    wrong_bytes: int = 0

    def title(self) -> str:
        return f"kvswap bench on {self.device} ({self.device_name})"


def document(device: _C.Device) -> dict[str, Any]:
    """The fields of a Document that the device gives."""
    info = device.info
    name = str(info.get("name") or device.name)
    return {"kvswap": _C.__version__, "device": device.name, "device_name": name, "driver": int(info["driver"])}


class Table:
    """Columns by name and format: "<5" of a text, ">8.2f" of a number; then, for a narrow terminal, both once more.

    lead: how many columns, from the first, say what a row is of. On a narrow terminal they are a line of their own.
    """

    def __init__(self, *columns: Sequence[str], lead: int = 0) -> None:
        self.lead = lead
        self._wide = [(column[0], column[1]) for column in columns]
        self._narrow = [(column[-2], column[-1]) for column in columns[lead:]]

    def columns(self, narrow: bool) -> list[tuple[str, str]]:
        return self._narrow if narrow else self._wide

    def header(self, *, narrow: bool = False) -> str:
        return " ".join(f"{name:{form.partition('.')[0]}}" for name, form in self.columns(narrow))

    def line(self, cells: Sequence[Cell], note: str = "", *, narrow: bool = False) -> str:
        """A row; one that was not measured has only its first cells, and a note that says why."""
        texts = [
            f"{'-':{form.partition('.')[0]}}" if cell is None else f"{cell:{form}}"
            for cell, (_, form) in zip(cells, self.columns(narrow), strict=False)
        ]
        return " ".join(texts) + (f"  not measured: {note}" if note else "")


class Rows:
    """Writes a table's rows as they are measured.

    show: writes a line. If it has a width, a wider table is written narrow; its header() writes the names of columns.
    """

    def __init__(self, table: Table, show: Callable[[str], object]) -> None:
        width: int | None = getattr(show, "width", None)
        self._table, self._show = table, show
        self._narrow = width is not None and len(table.header()) > width
        self._lead: list[Cell] = []
        getattr(show, "header", show)(table.header(narrow=self._narrow))

    def add(self, cells: Sequence[Cell], note: str = "", *, after: str = "") -> None:
        lead, rest = list(cells[: self._table.lead]), cells[self._table.lead :]
        if not self._narrow:
            rest = cells
        elif lead != self._lead:
            self._lead = lead
            self._show("  ".join(str(cell) for cell in lead if cell != ""))
        self._show((self._table.line(rest, note, narrow=self._narrow) + after).rstrip())
