"""What an LMCache loads by name, to keep its KV cache in files with kvswap: an L2 adapter of its server (MP mode).

    lmcache server --l2-adapter '{
      "type": "native_plugin", "module_path": "kvswap.lmcache", "class_name": "FileConnector",
      "adapter_params": {"directory": "/mnt/nvme/kv", "capacity": "500GiB", "revision": "0e9e39f249a1"}}'

- FileConnector: the client that LMCache's native_plugin adapter drives. An object that it delivers has exactly the
  stored bytes; each one that is lost, or damaged, is reported as such.

It imports neither LMCache nor torch.
"""

from __future__ import annotations

from kvswap.lmcache._connector import FileConnector

__all__ = ["FileConnector"]
