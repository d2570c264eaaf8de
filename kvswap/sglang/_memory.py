"""SGLang's HostTensorAllocator (sglang/srt/mem_cache/pool_host/common.py), with kvswap's host memory: near the device,
in transparent huge pages, populated by several threads. SGLang registers it with the driver as it registers its own."""

from __future__ import annotations

import math
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.pool_host import common

from kvswap import _C
from kvswap._log import logger

_log = logger("kvswap.sglang")
_SLOT = 2 << 20  # bytes: a huge page


class HostPoolAllocator(common.HostTensorAllocator):  # type: ignore[misc]  # SGLang may be missing
    """Allocates host tensors. The memory lives as long as the last tensor over it."""

    def allocate(self, dims: tuple[int, ...], dtype: Any, device: str) -> Any:
        """A tensor on the CPU, zeros. Where SGLANG_HUGEPAGE_SIZE is set, or memory is short, it is SGLang's own."""
        nbytes = math.prod(dims) * dtype.itemsize
        if device != "cpu" or not nbytes or envs.SGLANG_HUGEPAGE_SIZE.get():
            return super().allocate(dims, dtype, device)
        try:
            pool = _C.HostPool(-(-nbytes // _SLOT), _SLOT, pages="transparent", register=False)
        except (MemoryError, _C.Error) as error:
            _log.warning("host memory of %d bytes is left to SGLang: %s", nbytes, error)
            return super().allocate(dims, dtype, device)
        _log.info("host memory of %d bytes is kvswap's: %s pages, NUMA node %s", nbytes, pool.pages, pool.numa_node)
        self.dtype, self.dims = dtype, dims
        return torch.frombuffer(pool, dtype=dtype, count=math.prod(dims)).reshape(dims)
