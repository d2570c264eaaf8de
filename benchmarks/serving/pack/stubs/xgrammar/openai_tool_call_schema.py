"""Its names."""

from __future__ import annotations

from . import __getattr__  # noqa: F401
