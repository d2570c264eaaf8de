"""What an SGLang loads by name, to keep its KV cache with kvswap. Installing kvswap is all that it takes.

    sglang serve MODEL --enable-hierarchical-cache --hicache-storage-backend dynamic \\
      --hicache-storage-backend-extra-config '{
        "backend_name": "kvswap", "module_path": "kvswap.sglang", "class_name": "FileStorage", "interface_v1": 1,
        "directory": "/mnt/nvme/kv", "capacity": 536870912000}'

- FileStorage: a storage backend of SGLang's HiCache over kvswap.files. A page that it delivers has exactly the stored
  bytes; a page that is lost, or damaged, is reported as such, and SGLang computes it again.

Importing this imports no SGLang; its names do, when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvswap._devices import log_build
from kvswap._log import into

if TYPE_CHECKING:
    from kvswap.sglang._storage import FileStorage

__all__ = ["FileStorage"]


def __getattr__(name: str) -> Any:
    if name == "FileStorage":
        into("sglang")
        log_build()
        from kvswap.sglang import _storage

        return _storage.FileStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
