"""In the place of xgrammar, which engines import for annotations: no structured output is asked for here."""

from __future__ import annotations

from typing import Any

__version__ = "0.2.1"


class _Absent:
    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("xgrammar is not in this package: structured output does not work")

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> dict[str, Any]:
        return {"type": "any"}


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_Absent,), {})
