"""What a vLLM loads by name, to offload its KV cache with kvswap. Installing kvswap is all that it takes.

    vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "KVSwapConnector", "kv_connector_module_path": "kvswap.vllm", "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"cpu_bytes_to_use": 34359738368}}'

- KVSwapOffloadingSpec: vLLM's CPUOffloadingSpec, whose transfers kvswap does. KVSwapTieringOffloadingSpec: the same of
  its TieringOffloadingSpec. Under vLLM's own connector ("kv_connector": "OffloadingConnector") a transfer that fails
  raises, and the engine ends.
- KVSwapConnector: vLLM's OffloadingConnector with these specs, which survives it: a failed store is as if it had not
  been, a failed load is recomputed.
- FileTier: a secondary tier for vLLM's tiering, over kvswap.files.
- RemoteTier: another one, over kvswap.remote.
- register: vLLM calls it as a plugin. With KVSWAP_VLLM_SWAP_BLOCKS=1 it replaces vLLM's swap_blocks_batch(), with
  KVSWAP_VLLM_SIMPLE_OFFLOAD=1 the copies of vLLM's SimpleCPUOffloadConnector. Under KVSwapConnector the engine's core
  may plan a cache with all layers of a block together.

Importing this imports no vLLM; its names do, when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvswap._devices import log_build
from kvswap._engines import VLLM
from kvswap._log import into
from kvswap.vllm._plugin import register

if TYPE_CHECKING:
    from kvswap.vllm._connector import KVSwapConnector
    from kvswap.vllm._file_tier import FileTier
    from kvswap.vllm._remote_tier import RemoteTier
    from kvswap.vllm._spec import KVSwapOffloadingSpec, KVSwapTieringOffloadingSpec

__all__ = [
    "FileTier",
    "KVSwapConnector",
    "KVSwapOffloadingSpec",
    "KVSwapTieringOffloadingSpec",
    "RemoteTier",
    "register",
]
_MODULES = {
    "FileTier": "_file_tier",
    "KVSwapConnector": "_connector",
    "KVSwapOffloadingSpec": "_spec",
    "KVSwapTieringOffloadingSpec": "_spec",
    "RemoteTier": "_remote_tier",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    into("vllm")  # vLLM uses kvswap
    log_build()
    with VLLM.needed():
        return getattr(importlib.import_module(f"kvswap.vllm.{_MODULES[name]}"), name)
