"""Replaces only the copy function of vLLM's own handlers (vllm/_custom_ops.py, swap_blocks_batch)."""

from __future__ import annotations

import logging
import os
from typing import Any

from kvswap import _C

_logger = logging.getLogger("kvswap.vllm")

SWITCH = "KVSWAP_VLLM_SWAP_BLOCKS"


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


def register() -> None:
    """vLLM's plugin hook (group vllm.general_plugins). Does nothing unless KVSWAP_VLLM_SWAP_BLOCKS=1."""
    if os.environ.get(SWITCH, "0") in ("", "0"):
        return
    from vllm import _custom_ops

    if not hasattr(_custom_ops, "swap_blocks_batch"):
        _logger.warning("%s is set, but this vLLM has no swap_blocks_batch: nothing is replaced", SWITCH)
        return
    _custom_ops.swap_blocks_batch = swap_blocks_batch
    _logger.info("vLLM's swap_blocks_batch is kvswap's now")
