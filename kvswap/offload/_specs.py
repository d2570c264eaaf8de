"""The argument types of the offloading handlers: vLLM's classes (vllm/v1/kv_offload, releases 0.26 and 0.30 to 0.33),
for use without vLLM. Objects with the same attributes work too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


class LoadStoreSpec:
    """One side of a transfer."""


class BlockIDsLoadStoreSpec(LoadStoreSpec):
    """Blocks by their numbers. block_ids: int32 or int64 array, or a sequence of ints; kept as an array."""

    block_ids: NDArray[Any]

    def __init__(self, block_ids: Sequence[int] | NDArray[Any]) -> None:
        if isinstance(block_ids, np.ndarray) and block_ids.dtype in (np.int32, np.int64):
            self.block_ids = block_ids.copy()
        else:
            self.block_ids = np.array(block_ids, dtype=np.int64)
        if self.block_ids.ndim != 1:
            raise ValueError(f"block_ids has shape {self.block_ids.shape}: it is one list")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids.tolist()})"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Blocks of the GPU's cache, group after group.

    group_sizes: number of blocks of each group; their sum is len(block_ids). block_indices: for each group the index of
      its first block within the request, which gives the block's place in a chunk.
    """

    def __init__(
        self, block_ids: Sequence[int] | NDArray[Any], group_sizes: Sequence[int], block_indices: Sequence[int]
    ) -> None:
        super().__init__(block_ids)
        if sum(group_sizes) != len(self.block_ids):
            raise ValueError(
                f"group_sizes adds up to {sum(group_sizes)}, but there are {len(self.block_ids)} block_ids"
            )
        if len(block_indices) != len(group_sizes):
            raise ValueError(f"block_indices has {len(block_indices)} items, but group_sizes has {len(group_sizes)}")
        self.group_sizes = group_sizes
        self.block_indices = block_indices

    @staticmethod
    def medium() -> str:
        """Where the blocks are."""
        return "GPU"


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Chunks of the host cache, each of block_size_factor GPU blocks."""

    @staticmethod
    def medium() -> str:
        """Where the blocks are."""
        return "CPU"

    @property
    def chunk_ids(self) -> NDArray[Any]:
        """Another name of block_ids."""
        return self.block_ids


@dataclass
class CanonicalKVCacheTensor:
    """A tensor whose first dimension is the blocks, and the bytes of a block, padding included."""

    tensor: Any
    page_size_bytes: int


@dataclass(frozen=True)
class CopyRun:
    """Fragments of a page: number i lies at local_offset + i * local_stride on the GPU and at canonical_offset +
    i * canonical_stride in the host's page; all in bytes."""

    local_offset: int
    canonical_offset: int
    fragment_size: int
    num_fragments: int
    local_stride: int
    canonical_stride: int


@dataclass(frozen=True)
class CanonicalPageMapping:
    """The place of this worker's page in a page that several workers share. Of num_writers workers with the same bytes,
    each stores the pages with (page number) % num_writers == writer_index."""

    canonical_page_size_bytes: int
    local_page_size_bytes: int
    runs: tuple[CopyRun, ...]
    num_writers: int
    writer_index: int
    parallelism_agnostic: bool

    def is_writer(self, block_id: int) -> bool:
        """Whether this worker stores that host page."""
        return block_id % self.num_writers == self.writer_index


@dataclass
class CanonicalKVCacheRef:
    """A layer's part of a tensor: the first page_size_bytes bytes of each block, or the mapping's fragments."""

    tensor_idx: int
    page_size_bytes: int
    mapping: CanonicalPageMapping | None = None


@dataclass
class CanonicalKVCaches:
    """The tensors of a cache, and the references of each group of layers."""

    tensors: list[CanonicalKVCacheTensor]
    group_data_refs: list[list[CanonicalKVCacheRef]]


@dataclass
class TransferResult:
    """The outcome of a job. transfer_size: bytes. transfer_time: seconds on the device, positive.

    transfer_type: ("GPU", "CPU") or ("CPU", "GPU"). error: the reason if success is False. not_stored: of a store of
    coded blocks: the positions, in the job's list of chunks, of those of which a block does not fit its coded size,
    and the reason. These are not stored; all others are.
    """

    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None
    transfer_type: tuple[str, str] | None = None
    error: BaseException | None = None
    not_stored: dict[int, str] = field(default_factory=dict)
