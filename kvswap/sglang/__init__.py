"""What an SGLang loads by name, to keep its KV cache with kvswap. Installing kvswap is all that it takes.

    sglang serve MODEL --enable-hierarchical-cache --hicache-storage-backend dynamic \\
      --hicache-storage-backend-extra-config '{
        "backend_name": "kvswap", "module_path": "kvswap.sglang", "class_name": "FileStorage", "interface_v1": 1,
        "directory": "/mnt/nvme/kv", "capacity": "500GiB"}'

- FileStorage: a storage backend of SGLang's HiCache over kvswap.files. A page that it delivers has exactly the stored
  bytes; a page that is lost, or damaged, is reported as such, and SGLang computes it again.
- RemoteStorage: the same over kvswap.remote: pages in the memory of other nodes.
- register: SGLang calls it as a plugin; with KVSWAP_SGLANG_COPIES=1 the copies between GPU and host memory are
  kvswap's, with KVSWAP_SGLANG_HOST_MEMORY=1 the host memory too, with KVSWAP_SGLANG_CODEC=exact its pages are coded,
  with KVSWAP_SGLANG_SHARE=1 ranks with the same latents keep one host pool, with KVSWAP_SGLANG_LEND=1 engines lend each
  other their links, and else it does nothing. unregister undoes it.

Importing this imports no SGLang; its names do, when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvswap._devices import log_build
from kvswap._engines import SGLANG
from kvswap._log import into
from kvswap.sglang._plugin import register, unregister

if TYPE_CHECKING:
    from kvswap.sglang._remote import RemoteStorage
    from kvswap.sglang._storage import FileStorage

__all__ = ["FileStorage", "RemoteStorage", "register", "unregister"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        into("sglang")
        log_build()
        module = "kvswap.sglang._storage" if name == "FileStorage" else "kvswap.sglang._remote"
        with SGLANG.needed():
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
