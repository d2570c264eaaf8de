"""Host memory for a cache, block-first: all tensors of a block lie together, so that a block is one long run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvswap import _C

# Bytes that are registered at once. What one registration holds can go by 2-D copies; one of hundreds of GB takes a
# driver minutes, or is refused.
_REGISTRATION = 64 << 30
_ALIGN = 16  # bytes: of each tensor in a block. Pages of engines are multiples of it, so that nothing lies between them


class Slab:
    """One piece of host memory: chunk after chunk, in a chunk block after block, in a block tensor after tensor.

    pages: bytes that a block has of each tensor. groups: of references with a tensor_idx; tensors of the same groups
    lie together, since a job moves the blocks of a group.

    The memory is a host pool whose slots are the chunks: zeros, exactly as large as asked for, near the GPU, populated
    by threads. MemoryError: there is not that much, and what to do about it.
    """

    def __init__(
        self, device: _C.Device, pages: Sequence[int], groups: Sequence[Sequence[Any]], chunks: int, factor: int
    ) -> None:
        if chunks < 1 or factor < 1:
            raise ValueError(f"{chunks} chunks of {factor} blocks: there must be one of each at least")
        self.pages, self.chunks, self.factor = list(pages), chunks, factor
        used = [
            [g for g, refs in enumerate(groups) if any(ref.tensor_idx == i for ref in refs)] for i in range(len(pages))
        ]
        self.offsets, self.block_stride = [0] * len(pages), 0
        for i in sorted(range(len(pages)), key=lambda i: used[i]):
            self.offsets[i] = self.block_stride
            self.block_stride += -(-pages[i] // _ALIGN) * _ALIGN
        self.memory = _C.HostPool(
            chunks, factor * self.block_stride, device=device, pages="transparent", chunk_nbytes=_REGISTRATION
        )

    def tensors(self, torch: bool) -> list[Any]:
        """Views of it, as torch's tensors or NumPy's arrays: (chunks, factor, page), or (chunks, page) for factor 1."""
        blocks = self._flat(torch).reshape(self.chunks, self.factor, self.block_stride)
        if self.factor == 1:
            blocks = blocks[:, 0]
        return [blocks[..., at : at + page] for at, page in zip(self.offsets, self.pages, strict=True)]

    def rows(self, torch: bool) -> list[Any]:
        """The same memory as rows (chunks, factor * page), in a chunk tensor after tensor. For code that knows no
        blocks at a distance; not beside tensors()."""
        chunks = self._flat(torch).reshape(self.chunks, self.factor * self.block_stride)
        begins = [at * self.factor for at in self.offsets]
        return [chunks[:, at : at + page * self.factor] for at, page in zip(begins, self.pages, strict=True)]

    def _flat(self, torch: bool) -> Any:
        if not torch:
            return np.frombuffer(self.memory, np.int8)  # type: ignore[call-overload]
        import torch as library

        return library.frombuffer(self.memory, dtype=library.int8)
