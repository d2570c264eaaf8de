"""In the place of watchfiles, which vLLM's HTTP server imports for certificates that change: it has none here."""

from __future__ import annotations

from typing import Any

Change = int


def awatch(*_: Any, **__: Any) -> Any:
    raise RuntimeError("watchfiles is not in this package: changed certificates are not read again")
