"""SGLang's host pools of coded pages (docs/codecs.md).

Page i of the pool is slot i of its memory: the tensors of a page one after the other, each coded to its size, layer by
layer, keys before values. SGLang computes from the coded size how many pages its memory holds. CopyEngine (_copies.py)
codes and decodes on the way; SGLang's own copies cannot.

A page that does not fit its coded size is known when its write-back has ended. SGLang's acknowledgement of a write-back
cannot say so, and nothing takes a page out of SGLang's tree. So the pool remembers such pages, until SGLang frees them,
and a prefix that is looked up ends before the first one (_coded_tree.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from kvswap import _C
from kvswap.codecs import Coding
from kvswap.sglang import _plugin
from kvswap.sglang._codec import page_of
from kvswap.sglang._places import NotOurs, block_rows, buffers_of


def refuse(label: str, why: str) -> ValueError:
    """The error of an engine that cannot be started with a codec."""
    return ValueError(f"{_plugin.CODEC_SWITCH}: host pool {label} {why}. Unset {_plugin.CODEC_SWITCH} for this engine")


def _not_here(*given: Any, **named: Any) -> Any:
    raise NotImplementedError(
        "a host pool of coded pages: kvswap's copies code and decode them, and kvswap.sglang.FileStorage stores them; "
        f"SGLang's own copies and storage backends cannot. Unset {_plugin.CODEC_SWITCH}"
    )


class CodedPages:
    """What makes a coded pool of SGLang's. Its page size, rows and layers are SGLang's."""

    can_use_jit = False  # SGLang's own copies
    parts: int  # tensors of a layer
    layer_num: int
    page_num: int
    page_size: int

    def places(self) -> CodedPlaces:
        """For CopyEngine."""
        return _places_of(self)

    def plan(self, label: str, dtype: Any, page_size: int, token_nbytes: int) -> None:
        """Before SGLang computes sizes. ValueError: the codec makes these pages no smaller."""
        self.dtype, self.page_size, self.token_stride_size = dtype, page_size, token_nbytes
        codec = _plugin.codec()
        assert codec is not None
        if _plugin.is_incomplete(_plugin.CODEC_SWITCH):
            raise refuse(label, "cannot be coded: SGLang did not apply all of kvswap's hooks, as its log says")
        self._page = page = page_of(label, self)
        if not page.is_coded(codec):
            raise refuse(label, f"has pages of {page.nbytes} bytes of {dtype}, which {codec} makes no smaller")
        self.coding: Coding = page.coding(codec)
        self.missing: NDArray[np.bool_] = np.zeros(0, np.bool_)  # of each page, whether it did not fit
        self.not_stored = 0  # pages that did not fit, so far

    @property
    def slot_nbytes(self) -> int:
        """Of a page."""
        return self.coding.coded_nbytes * self.layer_num * self.parts

    @property
    def page_coding(self) -> Coding:
        """Of a page: what a file store is told (FileStorage)."""
        return self._page.coding(self.coding.codec, self.layer_num * self.parts)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """SGLang's: addresses and sizes of the pieces of these tokens' pages. A page is one piece."""
        pool: Any = self
        slots = np.asarray(indices)[:: self.page_size] // self.page_size
        nbytes = self.slot_nbytes
        return [pool.kv_buffer.data_ptr() + int(slot) * nbytes for slot in slots], [nbytes] * len(slots)

    def get_size_per_token(self) -> int:
        """SGLang's: bytes of host memory, rounded up."""
        return -(-self.slot_nbytes // self.page_size)

    def init_kv_buffer(self) -> Any:
        """SGLang's: the host memory."""
        pool: Any = self
        return ALLOC_MEMORY_FUNCS[pool._transfer_device.type](
            (self.page_num, self.slot_nbytes),
            dtype=torch.uint8,
            device=pool.device,
            pin_memory=pool.pin_memory,
            allocator=pool.allocator,
            registration_granularity_bytes=self.slot_nbytes,
        )

    def clear(self) -> None:
        """SGLang's: nothing is stored."""
        super().clear()  # type: ignore[misc]
        self.missing = np.zeros(self.page_num, np.bool_)

    def free(self, indices: Any) -> Any:
        """SGLang's: these tokens' pages are given back."""
        self.missing[np.unique(np.asarray(indices.cpu()) // self.page_size)] = False
        return super().free(indices)  # type: ignore[misc]

    def miss(self, pages: NDArray[np.int64]) -> None:
        """These pages did not fit: they are no hits until they are written anew."""
        self.missing[pages] = True
        self.not_stored += len(pages)

    load_to_device_per_layer = backup_from_device_all_layer = _not_here
    get_data_page = get_dummy_flat_data_page = set_from_flat_data_page = _not_here
    get_split_heads_page_buffer_meta = get_hybrid_pool_buffer = _not_here
    get_contiguous_buf_infos = _not_here
    k_buffer = v_buffer = property(_not_here)


class CodedMHATokenToKVPoolHost(CodedPages, MHATokenToKVPoolHost):  # type: ignore[misc]  # SGLang may be missing
    """Keys and values."""

    parts = 2

    def __init__(
        self, buffer_info: Any, host_to_device_ratio: float, host_size: int, page_size: int, *given: Any, **named: Any
    ) -> None:
        row = buffer_info.head_num * buffer_info.head_dim * buffer_info.dtype.itemsize
        self.plan(named.get("pool_label", "kv"), buffer_info.dtype, page_size, row)
        super().__init__(buffer_info, host_to_device_ratio, host_size, page_size, *given, **named)

    def _initialize_transfer_views(self, buffer_info: Any, write_back_staging: Any) -> None:
        """SGLang's: it makes views of its layouts here, for its own copies."""
        self.can_use_write_back_jit = False


class CodedMLATokenToKVPoolHost(CodedPages, MLATokenToKVPoolHost):  # type: ignore[misc]  # SGLang may be missing
    """Latents."""

    parts = 1

    def __init__(
        self, buffer_info: Any, host_to_device_ratio: float, host_size: int, page_size: int, *given: Any, **named: Any
    ) -> None:
        label = named.get("pool_label", "kv")
        if named.get("dcp_size", 1) != 1 or not hasattr(buffer_info, "buffers"):
            raise refuse(label, "is divided among ranks, or has no memory of its own")
        width = named.get("override_kv_cache_dim") or buffer_info.kv_lora_rank + buffer_info.qk_rope_head_dim
        self.plan(label, buffer_info.dtype, page_size, width * buffer_info.dtype.itemsize)
        super().__init__(buffer_info, host_to_device_ratio, host_size, page_size, *given, **named)

    def _initialize_transfer_views(self) -> None:
        """As that of keys and values."""
        self.can_use_write_back_jit = False


@dataclass(frozen=True)
class CodedPlaces:
    """What Places is for pools that are not coded: a pool of kvswap's for each tensor, on both sides."""

    device: _C.Device
    rows: dict[int, int]  # by SGLang's number of a layer
    targets: frozenset[int]  # numbers that a transfer without is_draft has
    tokens: int  # of a block
    gpu: list[list[_C.Pool]]  # by layer and part
    cpu: list[list[_C.Pool]]
    host: Any  # SGLang's pool

    coded, shared = True, False

    @property
    def how(self) -> str:
        """For the log."""
        coding = self.host.coding
        return f", coded by {coding.codec} to {coding.ratio:.3f} of their size"

    def joins(self, blocks: int, direction: str | None = None) -> bool:
        """As Places.joins()."""
        return False

    @property
    def begin(self) -> int:
        """As Places.begin."""
        return self.cpu[0][0].ptr

    def order(self, rows: Sequence[int]) -> tuple[list[_C.Pool], list[_C.Pool], list[int]]:
        """As Places.order()."""
        gpu, cpu = ([pool for row in rows for pool in side[row]] for side in (self.gpu, self.cpu))
        parts = len(self.gpu[0])
        return gpu, cpu, [(i + 1) * parts - 1 for i in range(len(rows))]

    def everything(self) -> tuple[list[_C.Pool], list[_C.Pool]]:
        """As Places.everything()."""
        return self.order(range(len(self.gpu)))[:2]

    def call(
        self, gpu: Any, cpu: Any, ids: tuple[Any, Any], direction: str
    ) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """As Places.call()."""
        given = (gpu, cpu, *ids) if direction == "D2H" else (cpu, gpu, ids[1], ids[0])
        on_device = not isinstance(ids[0], np.ndarray)  # SGLang's streams and fences order what is on the GPU
        return "move_blocks", given, {"gpu_order": "stream"} if on_device else {}

    def made(self, copy: _C.Transfer, ids: tuple[Any, Any], direction: str) -> Any:
        """What stands for the transfer."""
        return WriteBack(copy, self.host, ids[1]) if direction == "D2H" else copy


class WriteBack:
    """A write-back, for a _C.Transfer. A page that does not fit is no error: `lost` has it when it has ended."""

    def __init__(self, transfer: _C.Transfer, host: Any, pages: NDArray[np.int64]) -> None:
        self._transfer, self.host, self.pages = transfer, host, pages

    @property
    def lost(self) -> NDArray[np.int64]:
        """Positions of pages that did not fit, once it has ended."""
        return self._transfer.failed_positions if type(self._transfer.error) is _C.Error else np.zeros(0, np.int64)

    @property
    def error(self) -> Exception | None:
        """Why it failed as a whole."""
        return None if type(self._transfer.error) is _C.Error else self._transfer.error

    def make_wait(self, stream: Any) -> None:
        """As Transfer.make_wait(): one that has ended with pages that did not fit is not waited for."""
        try:
            self._transfer.make_wait(stream)
        except _C.Error:
            if not self._transfer.done() or self.error is not None:
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transfer, name)


def _places_of(pool: Any) -> CodedPlaces:
    """The places of a coded host pool. ValueError: its device's tensors have another form, or the device has no kernels
    for the codec."""
    label = pool.pool_label
    try:
        parts, rows, targets = buffers_of(pool, isinstance(pool, CodedMLATokenToKVPoolHost))
        tokens, stride, row = block_rows(parts, rows, pool.layer_num)
    except (NotOurs, AttributeError) as error:
        raise refuse(label, f"cannot be coded: {error}") from error
    if stride != row or row != pool.token_stride_size:
        raise refuse(label, f"cannot be coded: device rows of {row} bytes are {stride} bytes apart")
    device, page, coding = _C.Device(pool._transfer_device), pool.page_size * row, pool.coding
    begin, gpu, cpu = pool.kv_buffer.data_ptr(), list[list[_C.Pool]](), list[list[_C.Pool]]()
    for layer in range(pool.layer_num):
        gpu.append([])
        cpu.append([])
        for part in parts:
            at = begin + (layer * len(parts) + len(cpu[-1])) * coding.coded_nbytes
            for side, ptr, blocks, nbytes, step, how in (
                (gpu, part[layer].data_ptr(), tokens // pool.page_size, page, page, None),
                (cpu, at, pool.page_num, coding.coded_nbytes, pool.slot_nbytes, coding),
            ):
                group = side[0][0] if side[0] else None
                side[-1].append(_C.Pool(device, ptr, blocks, nbytes, stride=step, group=group, coding=how))
    return CodedPlaces(device, rows, targets, pool.page_size, gpu, cpu, pool)
