"""Methods that need torch with CUDA, and Triton. Imported when they are asked for."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from typing import Any

import numpy as np

from kvswap import _C, Direction

from .methods import ByHand, NotMeasured, Submit
from .shapes import Place

_TRITON_CTAS = 12
_TRITON_CHUNK = 1024  # words that a CTA has in flight
_WORD = 8


def torch_for(device: _C.Device) -> Any:
    """torch, if it supports this device; else NotMeasured says why not."""
    if device.kind != "cuda":
        raise NotMeasured("torch has no such device")
    if importlib.util.find_spec("torch") is None:
        raise NotMeasured("torch is not installed")
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise NotMeasured("this torch has no CUDA")
    return torch


def ordinal(device: _C.Device) -> int:
    return int(device.name.partition(":")[2])


class _Raw:
    """Device memory that torch makes a tensor of."""

    def __init__(self, ptr: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {"data": (ptr, False), "shape": shape, "typestr": "<i8", "version": 3}


def _words(place: Place) -> int:
    if place.shape.block_nbytes % _WORD:
        raise NotMeasured(f"blocks are no multiple of {_WORD} bytes")
    return place.shape.block_nbytes // _WORD


def by_hand(place: Place, direction: Direction, compute: _C.Stream) -> Submit:
    """D2H: gather by indexing, then one copy. H2D: one copy, then scatter. The host's side must be one run."""
    torch, words = torch_for(place.device), _words(place)
    if not place.host_is_one_run:
        raise NotMeasured("the host's side is not one run")
    shape, cuda = place.shape, torch.device("cuda", ordinal(place.device))
    stream = torch.cuda.Stream(device=cuda)  # torch's own: its allocators use the stream after the job ends
    queue_on = ByHand(place.device, compute, stream)
    tensors = [torch.as_tensor(_Raw(int(ptr), (place.gpu_slots, words)), device=cuda) for ptr in place.gpu_ptrs]
    ids = torch.from_numpy(place.gpu_ids).to(cuda)
    stage = torch.empty((shape.blocks, shape.tensors, words), dtype=torch.int64, device=cuda)
    begin = place.host_ptr + int(place.host_ids[0]) * place.host_stride
    pinned = np.ctypeslib.as_array((ctypes.c_int64 * (shape.nbytes // _WORD)).from_address(begin))
    host = torch.from_numpy(pinned).view(stage.shape)
    torch.cuda.synchronize(cuda)

    def queue(_: int) -> None:
        with torch.cuda.stream(stream):
            if direction == Direction.D2H:
                for i, tensor in enumerate(tensors):
                    stage[:, i] = tensor[ids]
                host.copy_(stage, non_blocking=True)
            else:
                stage.copy_(host, non_blocking=True)
                for i, tensor in enumerate(tensors):
                    tensor[ids] = stage[:, i]

    return lambda: queue_on.submit(queue)


def by_triton(place: Place, direction: Direction, compute: _C.Stream) -> Submit:
    """A kernel that reads pinned memory; the pointers go up in the call."""
    torch, words = torch_for(place.device), _words(place)
    if direction != Direction.H2D:
        raise NotMeasured("vLLM's kernel is for H2D alone")
    if importlib.util.find_spec("triton") is None:
        raise NotMeasured("triton is not installed")
    copy_words = importlib.import_module("kvswap.bench.triton_copy").copy_words
    cuda, count = torch.device("cuda", ordinal(place.device)), place.shape.copies
    stream = torch.cuda.Stream(device=cuda)
    queue_on = ByHand(place.device, compute, stream)
    pinned = torch.from_numpy(np.stack(place.ends(direction)).astype(np.int64)).pin_memory()
    pointers = torch.empty_like(pinned, device=cuda)

    def launch(nblocks: int) -> None:
        with torch.cuda.device(cuda), torch.cuda.stream(stream):
            pointers.copy_(pinned, non_blocking=True)
            copy_words[(_TRITON_CTAS,)](pointers[0], pointers[1], nblocks, words, CHUNK=_TRITON_CHUNK)

    try:
        launch(0)  # compiles
    except Exception as error:  # Triton raises errors of many types
        raise NotMeasured(f"triton does not compile here: {type(error).__name__}") from error
    torch.cuda.synchronize(cuda)
    return lambda: queue_on.submit(lambda _: launch(count))
