"""Its names. Formats are made when vLLM is imported, from 0.33 on; what takes them is not in this package."""

from __future__ import annotations

from typing import Any

from . import _Absent


class _Format(_Absent):
    def __init__(self, *_: Any, **__: Any) -> None:
        pass


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_Format,), {})
