"""What the results of all benchmarks have in common, and tables of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvswap import _C


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
    """Columns by name and format: "<5" of a text, ">8.2f" of a number."""

    def __init__(self, *columns: tuple[str, str]) -> None:
        self.columns = columns

    def header(self) -> str:
        return " ".join(f"{name:{form.partition('.')[0]}}" for name, form in self.columns)

    def line(self, cells: Sequence[str | float | None], note: str = "") -> str:
        """A row; one that was not measured has only its first cells, and a note that says why."""
        texts = [
            f"{'-':{form.partition('.')[0]}}" if cell is None else f"{cell:{form}}"
            for cell, (_, form) in zip(cells, self.columns, strict=False)
        ]
        return " ".join(texts) + (f"  not measured: {note}" if note else "")
