"""In the place of xgrammar, which vLLM imports for annotations: no structured output is asked for here."""

from __future__ import annotations

from typing import Any

__version__ = "0.2.1"


class _Absent:
    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("xgrammar is not in this package: structured output does not work")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_Absent,), {})
