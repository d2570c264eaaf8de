"""Where the layers of one of SGLang's host pools lie, on the device and in host memory, and which blocks a list of
token ids names.

SGLang lists tokens, page after page. In the layouts layer_first and page_first_direct the tokens of a page lie together
on both sides, layer by layer, so that a block is a page. In page_first all layers of a token lie together on the host,
so that a block is a token; page after page they make long runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvswap import _C

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Order = tuple[NDArray[np.int64], NDArray[np.int64], list[int]]

# Groups of layers in which a load is queued: K of a group's layers, then their V, so that a block of a group is one run
# of host memory for each. Path `burst` divides a load of so many blocks likewise.
_GROUPS = {"layer_first": 1 << 30, "page_first": 4, "page_first_direct": 8}

_ORDERS = 16  # that are kept; a model and its drafts have a few


class NotOurs(Exception):
    """The pool is copied by SGLang's own ways; the reason."""


@dataclass(frozen=True)
class Places:
    """The tensors of a pair of pools: a row a layer, a column for K, and one for V where there is one."""

    device: _C.Device
    rows: dict[int, int]  # by SGLang's number of a layer
    targets: frozenset[int]  # numbers that a transfer without is_draft has
    gpu: NDArray[np.int64]  # addresses
    cpu: NDArray[np.int64]
    tokens: int  # of a block
    nbytes: int  # of a block in one tensor
    gpu_blocks: int
    cpu_blocks: int
    gpu_stride: int
    cpu_stride: int
    groups: int
    orders: dict[tuple[int, ...], Order] = field(default_factory=dict)  # of earlier loads

    coded = shared = False
    how = ""

    @property
    def begin(self) -> int:
        """The address of the host's memory."""
        return int(self.cpu[0, 0])

    def joins(self, blocks: int, direction: str | None = None) -> bool:
        """Whether a copy of so many blocks, of all tensors, goes over several links: submit() makes it.

        direction: None: it is not known yet.
        """
        return False

    def everything(self) -> tuple[Any, Any]:
        """The tensors of both sides, in the order of a write-back."""
        return self.gpu.T.ravel(), self.cpu.T.ravel()

    def call(
        self, gpu: Any, cpu: Any, ids: tuple[Any, Any], direction: str
    ) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """The function of kvswap._C that copies between these tensors, its arguments and options of its own."""
        given = (gpu, cpu, self.nbytes, self.gpu_blocks, self.cpu_blocks, *ids, direction)
        options = {"gpu_stride": self.gpu_stride, "cpu_stride": self.cpu_stride, "device": self.device}
        return "swap_cache_all_layers_async", given, options

    def made(self, copy: _C.Transfer, ids: tuple[Any, Any], direction: str) -> Any:
        """What stands for the transfer."""
        return copy

    def order(self, rows: Sequence[int]) -> Order:
        """Addresses of these rows' tensors in the order of a load, and for each row the position after which it is
        whole. Nothing runs on the device meanwhile, so that it is made once: a model loads the same rows each time."""
        key = tuple(rows)
        if key not in self.orders:
            if len(self.orders) == _ORDERS:
                self.orders.clear()
            self.orders[key] = self._order(rows)
        return self.orders[key]

    def _order(self, rows: Sequence[int]) -> Order:
        size = max(1, -(-len(rows) // self.groups))
        chosen, parts = np.asarray(rows, np.int64), self.gpu.shape[1]
        gpu, cpu, ends = list[Any](), list[Any](), list[int]()
        for begin in range(0, len(rows), size):
            group = chosen[begin : begin + size]
            gpu.append(self.gpu[group].T.ravel())
            cpu.append(self.cpu[group].T.ravel())
            last = begin * parts + (parts - 1) * len(group)
            ends += range(last, last + len(group))
        return np.concatenate(gpu), np.concatenate(cpu), ends


def buffers_of(pool: Any, mla: bool) -> tuple[list[Sequence[Any]], dict[int, int], frozenset[int]]:
    """The device's tensors by part and layer, the rows by SGLang's numbers, and the numbers without drafts."""
    if not mla:
        for info in pool._buffer_infos:
            if info.buffers.layout.value != "nhd" or info.scales is not None or info.transfer_buffers is not None:
                raise NotOurs("its device tensors are not a row of heads a token")
        rows = {layer: layer for layer in range(pool.layer_num)}
        return [pool.device_k_buffers, pool.device_v_buffers], rows, frozenset(range(pool.target_layer_num))
    if pool._is_dummy or pool._native_buffers is not None or pool._layer_shard_enabled or pool.dcp_size != 1:
        raise NotOurs("it is divided among ranks, or for another kind of device")
    rows = dict(pool._host_layer_by_controller)
    if rows != dict(pool._buffer_index_by_layer):
        raise NotOurs("its layers are in another order on the host")
    return [pool.device_kv_buffers], rows, frozenset(pool._target_layer_indices)


def block_rows(parts: list[Sequence[Any]], rows: dict[int, int], layers: int) -> tuple[int, int, int]:
    """Of the device's tensors: tokens, bytes from row to row, and bytes of a row. NotOurs: they differ."""
    tensors = [tensor for part in parts for tensor in part]
    shapes = {(len(t), t.stride(0) * t.element_size(), t[0].numel() * t.element_size()) for t in tensors}
    if len(shapes) != 1 or any(len(part) != layers for part in parts) or sorted(rows.values()) != list(range(layers)):
        raise NotOurs(f"{len(tensors)} device tensors of {len(shapes)} shapes for {layers} layers")
    if not all(t[0].is_contiguous() for t in tensors):
        raise NotOurs("device rows with gaps in them")
    return shapes.pop()


def places_of(pool: Any, mla: bool) -> Places:
    """The places of a host pool (SGLang's MHATokenToKVPoolHost or MLATokenToKVPoolHost). NotOurs: it has others."""
    if pool.layout not in _GROUPS:
        raise NotOurs(f"layout {pool.layout}")
    if pool.shared_allocation_domain is not None:
        raise NotOurs("its pages move in the host memory that it shares with other pools")
    parts, rows, targets = buffers_of(pool, mla)
    layers, page, tokens, item = pool.layer_num, pool.page_size, pool.size, pool.token_stride_size
    host = pool.kv_buffer
    nbytes = host.numel() * host.element_size()
    if not host.is_contiguous() or nbytes != len(parts) * layers * tokens * item or tokens % page:
        raise NotOurs(f"host memory of {nbytes} bytes for {tokens} tokens of {layers} layers, {item} bytes each")
    device_tokens, stride, row = block_rows(parts, rows, layers)
    if row != item:
        raise NotOurs(f"device rows of {row} bytes, host rows of {item}")
    block = 1 if pool.layout == "page_first" or stride != item else page
    if pool.layout == "page_first_direct" and block != page:
        raise NotOurs(f"device rows {stride} bytes apart, of {item} bytes")
    per_layer, cpu_stride = {
        "layer_first": (tokens * item, block * item),
        "page_first": (item, layers * item),
        "page_first_direct": (page * item, layers * page * item),
    }[pool.layout]
    half = nbytes // len(parts)
    begin = host.data_ptr()
    return Places(
        device=_C.Device(pool._transfer_device),
        rows=rows,
        targets=targets,
        gpu=np.array([[part[i].data_ptr() for part in parts] for i in range(layers)], np.int64),
        cpu=np.array([[begin + p * half + i * per_layer for p in range(len(parts))] for i in range(layers)], np.int64),
        tokens=block,
        nbytes=block * item,
        gpu_blocks=device_tokens // block,
        cpu_blocks=tokens // block,
        gpu_stride=block * stride,
        cpu_stride=cpu_stride,
        groups=_GROUPS[pool.layout],
    )


def blocks_of(ids: Any, tokens: int) -> NDArray[np.int64] | None:
    """The blocks of a list of tokens in host memory; None: they are not whole blocks, one after the other."""
    listed: NDArray[np.int64] = np.asarray(ids)
    if tokens == 1:
        return listed
    if len(listed) % tokens:
        return None
    rows = listed.reshape(-1, tokens)
    blocks: NDArray[np.int64] = rows[:, 0] // tokens
    return blocks if np.array_equal(rows, blocks[:, None] * tokens + np.arange(tokens)) else None


def device_blocks_of(ids: Any, tokens: int) -> Any:
    """The same of a list in device memory, for a transfer: a row of tokens for each block. The transfer looks whether
    they are whole blocks, and fails those that are not. None: the length does not fit."""
    if tokens == 1:
        return ids
    return None if len(ids) % tokens else ids.reshape(-1, tokens)
