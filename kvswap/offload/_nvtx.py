"""NVTX ranges around submissions, for Nsight: torch's where torch runs on a GPU, else the nvtx package's, else none."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


def ranges(kind: str) -> Callable[[str], AbstractContextManager[Any]]:
    """Who opens a range; kind: of the device. Nothing is imported that is not there already but the nvtx package."""
    torch = sys.modules.get("torch")
    if kind != "cuda":
        return lambda _: nullcontext()
    if torch is not None and torch.cuda.is_available():
        push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    elif importlib.util.find_spec("nvtx") is not None:
        module = importlib.import_module("nvtx")
        push, pop = module.push_range, module.pop_range
    else:
        return lambda _: nullcontext()

    @contextmanager
    def opened(name: str) -> Any:
        push(name)
        try:
            yield
        finally:
            pop()

    return opened
