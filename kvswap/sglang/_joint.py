"""Copies over several links (kvswap.share) of SGLang's host pools: which engines can have them, kvswap's pools of the
tensors, and what stands for a _C.Transfer."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_disagg, get_memory

from kvswap import _C, share
from kvswap.sglang import _plugin
from kvswap.sglang._places import Places

LAYOUTS = ("page_first", "page_first_direct")  # in which all layers of a block lie together


class Joint:
    """A load or store over several links, for a _C.Transfer. No stream can wait for it: a load has ended when this is
    made, and SGLang asks for the end of a store before it uses its pages."""

    joint = True  # its events do not say how long it took

    def __init__(self, transfer: share.ShareTransfer, number: int) -> None:
        self._transfer, self.number = transfer, number

    def make_wait(self, stream: Any) -> None:
        """As Transfer.make_wait()."""

    def make_wait_layer(self, layer: int, stream: Any) -> None:
        """As Transfer.make_wait_layer()."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transfer, name)


def why_not(cache: Any, switch: str) -> str | None:
    """Why the copies of this engine cannot go over several links, the same on all ranks; None: they can."""
    if _plugin.is_incomplete(_plugin.SWITCH) or _plugin.is_incomplete(switch):
        return "SGLang did not apply all of kvswap's hooks, as its log says"
    if set(cache.tree_components) != {ComponentType.FULL}:
        return "the model has more than full attention"
    if get_memory().hicache_host_memory_mode != "cache":
        return f"--hicache-host-memory-mode is {get_memory().hicache_host_memory_mode}"
    if get_disagg().disaggregation_mode == "decode":
        return "this is a decode instance of disaggregated serving"
    if cache.pp_size > 1:
        return "there are several pipeline stages"
    if cache.attn_cp_group is not None and torch.distributed.get_world_size(group=cache.attn_cp_group) > 1:
        return "there is context parallelism"
    return None


def group_of(cache: Any) -> Any:
    """SGLang's group, on the CPU, of the tensor-parallel ranks that have the same pages; None: there is one rank."""
    return cache.tp_group if cache.attn_tp_group is None else cache.attn_tp_group


def tell(data: bytes, group: Any) -> bytes:
    """To all ranks the bytes of the first one; each passes as many. Objects would be pickled."""
    told = torch.tensor(list(data), dtype=torch.uint8)
    torch.distributed.broadcast(told, src=torch.distributed.get_process_group_ranks(group)[0], group=group)
    return bytes(told.tolist())


def pools_of(places: Places) -> tuple[tuple[_C.Pool, ...], tuple[_C.Pool, ...]]:
    """kvswap's pools on the device and on the host: one for each layer and part."""
    sides: tuple[list[_C.Pool], list[_C.Pool]] = [], []
    for made, addresses, blocks, stride in (
        (sides[0], places.gpu, places.gpu_blocks, places.gpu_stride),
        (sides[1], places.cpu, places.cpu_blocks, places.cpu_stride),
    ):
        for ptr in addresses.ravel():
            group = made[0] if made else None
            made.append(_C.Pool(places.device, int(ptr), blocks, places.nbytes, stride=stride, group=group))
    return tuple(sides[0]), tuple(sides[1])
