"""What vLLM's plugin hook replaces. Two things have a switch in the environment: the copy function of vLLM's own
handlers (vllm/_custom_ops.py, swap_blocks_batch), and the copies of its SimpleCPUOffloadConnector (_simple.py). In a
process that plans caches, the function that decides how their layers lie is replaced too; it decides otherwise under
KVSwapConnector alone (_block_first.py)."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from typing import Any

from kvswap import _C
from kvswap._log import into, logger
from kvswap._switches import switch

_logger = logger("kvswap.vllm")

PLANNER = "vllm.v1.core.kv_cache_utils"  # loaded where vLLM plans caches, before it calls the hook there
SWITCH = "KVSWAP_VLLM_SWAP_BLOCKS"
SIMPLE_SWITCH = "KVSWAP_VLLM_SIMPLE_OFFLOAD"


def swap_blocks_batch(src_ptrs: Any, dst_ptrs: Any, sizes: Any, is_src_access_order_any: bool = False) -> None:
    """vLLM's function of this name: copy sizes[i] bytes from src_ptrs[i] to dst_ptrs[i], on torch's current stream.

    src_ptrs, dst_ptrs, sizes: torch CPU tensors of int64 (or uint64), one entry a copy; they may be overwritten when it
    returns. is_src_access_order_any: ignored, sources are read in the stream's order. A wrong argument raises and
    names the entry, and nothing has moved. A copy that the driver refuses raises too; others may still run.
    """
    import torch

    del is_src_access_order_any
    if len(sizes) == 0:
        return
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else 0
    transfer = _C.swap_blocks_batch(src_ptrs.numpy(), dst_ptrs.numpy(), sizes.numpy(), stream=stream)
    transfer.make_wait(stream)  # ordered already; this call raises refused copies


def _is_on(name: str) -> bool:
    return switch(name, "Nothing is replaced", "kvswap.vllm") is True


def _replace_swap_blocks() -> None:
    from vllm import _custom_ops

    if not hasattr(_custom_ops, "swap_blocks_batch"):
        _logger.warning("%s is set, but this vLLM has no swap_blocks_batch: nothing is replaced", SWITCH)
        return
    _custom_ops.swap_blocks_batch = swap_blocks_batch
    _logger.info("vLLM's swap_blocks_batch is kvswap's now")


def _why_not_simple(worker: Any) -> str | None:
    """Why the copies of this worker module cannot be replaced; None: they can."""
    from kvswap.vllm._simple import CopyBackend

    theirs = getattr(worker, "DmaCopyBackend", None)
    if theirs is None or not hasattr(getattr(worker, "SimpleCPUOffloadWorker", None), "bind_connector_metadata"):
        return "it has no DmaCopyBackend, or no SimpleCPUOffloadWorker.bind_connector_metadata"
    for name in ("init", "launch_copy", "shutdown"):
        wanted = list(inspect.signature(getattr(CopyBackend, name)).parameters)
        found = list(inspect.signature(getattr(theirs, name, lambda: None)).parameters)
        if found != wanted:
            return f"its DmaCopyBackend.{name} takes {found[1:]}, not {wanted[1:]}"
    return None


def _replace_simple_copies() -> None:
    from kvswap.vllm._simple import CopyBackend

    try:
        worker: Any = importlib.import_module("vllm.v1.simple_kv_offload.worker")
        reason = _why_not_simple(worker)
    except ImportError as error:
        reason = str(error)
    if reason is not None:
        _logger.warning("%s is set, but this vLLM is not known: %s. Nothing is replaced", SIMPLE_SWITCH, reason)
        return
    if worker.DmaCopyBackend is CopyBackend:
        return
    bind = worker.SimpleCPUOffloadWorker.bind_connector_metadata

    @functools.wraps(bind)
    def bind_before_step(self: Any, metadata: Any) -> None:
        """vLLM calls it before it queues the model's step."""
        if getattr(metadata, "load_cpu_blocks", None) and isinstance(self._backend, CopyBackend):
            self._backend.before_step()
        bind(self, metadata)

    worker.DmaCopyBackend = CopyBackend
    worker.SimpleCPUOffloadWorker.bind_connector_metadata = bind_before_step
    _logger.info("the copies of vLLM's SimpleCPUOffloadConnector are kvswap's now")


def register() -> None:
    """vLLM's plugin hook (group vllm.general_plugins).

    KVSWAP_VLLM_SWAP_BLOCKS=1: vLLM's swap_blocks_batch() is kvswap's. KVSWAP_VLLM_SIMPLE_OFFLOAD=1: the copies of
    vLLM's SimpleCPUOffloadConnector are kvswap's. In vLLM's engine core: under KVSwapConnector a cache may have all
    layers of a block together. Otherwise nothing changes.
    """
    if PLANNER in sys.modules:
        from kvswap.vllm import _block_first

        _block_first.install()
    if any(os.environ.get(name) for name in (SWITCH, SIMPLE_SWITCH)):
        into("vllm")
    if _is_on(SWITCH):
        _replace_swap_blocks()
    if _is_on(SIMPLE_SWITCH):
        _replace_simple_copies()
