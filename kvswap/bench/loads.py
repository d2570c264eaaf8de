"""Loads of a GPU as a model makes them: a decode step, the same with an engine's own copies, matrix products, and a
stream through memory.

With torch, a load is what its name says. Without torch, kvswap's copy kernel replaces it: every SM copies within GPU
memory, in launches about as long as the replaced kernels, and the load's name says so. On a host device NumPy computes
on the processors that also copy.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvswap import _C

from . import step
from .methods import NotMeasured, Pieces
from .shapes import WAIT_LIMIT
from .with_torch import ordinal, torch_for

_PIECE_SECONDS = 0.01


@dataclass(frozen=True)
class Kind:
    """A load. product: m, k and n of a matrix product; none: a stream, or a decode step where there is a model.
    awaited: with an engine's copies before and after each piece."""

    description: str
    product: tuple[int, int, int] | None
    host_product: tuple[int, int, int] | None
    stand_in_nbytes: int  # that kvswap's copy kernel moves a launch
    model: step.Size | None = None
    host_model: step.Size | None = None
    awaited: bool = False


# A launch of the stand-in moves as many bytes as one of the five large kernels of a layer.
_STEP = Kind(f"decode step of {step.LLAMA}", None, None, 192 << 20, step.LLAMA, step.SMALL)

KINDS = {
    "step": _STEP,
    "tokens": replace(_STEP, awaited=True),
    "matmul": Kind("8192^3 bf16 product", (8192, 8192, 8192), (512, 512, 512), 3 << 30),
    "decode": Kind("64x4096 by 4096x14336 bf16 product", (64, 4096, 14336), (16, 1024, 3584), 64 << 20),
    "stream": Kind("elementwise over 1 GiB of GPU memory", None, None, 1 << 30),
}


class Load(ABC):
    """Work that comes in equal pieces of about 10 ms, or of a decode step each.

    stream: where pieces are queued. clock: where the begin of a window is recorded; on `stream` it could wait for
    copies. ahead: how many pieces may be queued before the first has ended, so that the stream does not run dry while
    the caller is delayed; a window is longer by as many pieces.
    """

    ahead = 1

    def __init__(self, device: _C.Device, name: str, stream: Any) -> None:
        self.name, self.stream, self.clock = name, stream, _C.Stream(device)

    @abstractmethod
    def queue(self) -> None:
        """Queue one piece."""


def load_for(device: _C.Device, key: str) -> Load:
    """The load of that name for this device, warmed up."""
    load = _make(device, key)
    return _Awaited(device, load) if KINDS[key].awaited else load


def _make(device: _C.Device, key: str) -> Load:
    kind = KINDS[key]
    if device.kind == "host":
        return _NumpyLoad(device, kind)
    try:
        torch = torch_for(device)
    except NotMeasured as why:
        return _StandIn(device, key, kind, str(why))
    return _TorchLoad(device, kind, torch)


class _Awaited(Load):
    """A load as an engine's loop makes it: before each piece inputs are copied to the GPU, after it tokens to the host.
    The copy engine makes both, as it makes the copies that run beside the load."""

    ahead = 1  # the tokens of a piece are there before the next one is queued
    _INPUTS, _TOKENS = 64 << 10, 256  # bytes; a driver pushes inputs of less than 28 KiB past the copy engine

    def __init__(self, device: _C.Device, load: Load) -> None:
        super().__init__(device, f"{load.name}, inputs copied before and tokens after it", load.stream)
        self._device, self._load = device, load
        self._gpu, self._host = device.alloc(self._INPUTS), device.alloc(self._INPUTS + self._TOKENS, host=True)

    def queue(self) -> None:
        handle = getattr(self.stream, "handle", None) or self.stream.cuda_stream
        gpu, inputs = self._gpu.ptr, self._host.ptr
        _C._seam(self._device, "copy", gpu, inputs, self._INPUTS, handle)
        self._load.queue()
        _C._seam(self._device, "copy", inputs + self._INPUTS, gpu, self._TOKENS, handle)


class _TorchLoad(Load):
    """A CUDA graph of the products of a piece, or of one decode step: always one launch."""

    ahead = 5
    _STEPS_AHEAD = 12  # about as long on an H200

    def __init__(self, device: _C.Device, kind: Kind, torch: Any) -> None:
        self._torch, cuda = torch, torch.device("cuda", ordinal(device))
        super().__init__(device, f"{kind.description} (torch {torch.__version__})", torch.cuda.Stream(cuda))
        with torch.cuda.stream(self.stream):  # alone: kernels on another stream would slow the graph
            self._work = self._make(kind, cuda)  # kept: the graph has the tensors' addresses, but does not hold them
            per_piece = _repeats(self._work, self.stream.synchronize)  # which warms up
            if kind.model is not None:
                per_piece, self.ahead = 1, self._STEPS_AHEAD
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self.stream):
                for _ in range(per_piece):
                    self._work()
        torch.cuda.synchronize(cuda)

    def _make(self, kind: Kind, cuda: Any) -> Callable[[], object]:
        torch, options = self._torch, {"dtype": self._torch.bfloat16, "device": cuda}
        if kind.model is not None:
            model = step.model(kind.model, lambda shape, scale: torch.empty(shape, **options).normal_(std=scale))
            return lambda: step.by_torch(torch, model)
        if kind.product is None:
            source = torch.ones(kind.stand_in_nbytes // 4, **options)  # read and written: half of the bytes each
            target = torch.empty_like(source)
            return lambda: torch.mul(source, 1.5, out=target)
        m, k, n = kind.product
        a, b = torch.randn((m, k), **options), torch.randn((k, n), **options)
        out = torch.empty((m, n), **options)
        return lambda: torch.mm(a, b, out=out)

    def queue(self) -> None:
        with self._torch.cuda.stream(self.stream):
            self._graph.replay()


class _StandIn(Load):
    """kvswap's copy kernel on every SM, within GPU memory."""

    ahead = 2  # of plain launches a driver's queue holds few
    _ENTRY = 32 << 10
    _BUFFER = 256 << 20  # larger than any cache; a long launch copies it several times

    def __init__(self, device: _C.Device, key: str, kind: Kind, why: str) -> None:
        stream, entries = _C.Stream(device), kind.stand_in_nbytes // 2 // self._ENTRY  # read and written
        super().__init__(device, f"stand-in for {key}: kvswap's copy kernel within GPU memory ({why})", stream)
        at = np.arange(entries, dtype=np.uint64) * np.uint64(self._ENTRY) % np.uint64(self._BUFFER)
        self._buffers = [device.alloc(self._BUFFER) for _ in range(2)]
        src, dst = (np.uint64(buffer.ptr) + at for buffer in self._buffers)
        self._pieces = Pieces(device, src, dst, np.full_like(src, self._ENTRY))
        self._pieces.upload(stream.handle)
        self._ctas = 2 * int(device.info["sms"])
        self._per_piece = _repeats(self._launch, lambda: stream.synchronize(WAIT_LIMIT))

    def _launch(self) -> None:
        self._pieces.launch(self.stream.handle, threads=512, ctas=self._ctas)

    def queue(self) -> None:
        for _ in range(self._per_piece):
            self._launch()


class _NumpyLoad(Load):
    """Computes in the caller's thread; the stream stays empty and only gives the time."""

    def __init__(self, device: _C.Device, kind: Kind) -> None:
        rng = np.random.default_rng(1)
        self._work: Callable[[], object]
        if kind.host_model is not None:
            model = step.model(
                kind.host_model, lambda shape, scale: rng.standard_normal(shape, np.float32) * np.float32(scale)
            )
            what = f"decode step of a small model of {kind.host_model.layers} layers"
            self._work = lambda: step.by_numpy(model)
        elif kind.host_product is None:
            source = rng.random(4 << 20)
            target, what = np.empty_like(source), "elementwise over 64 MiB"
            self._work = lambda: np.multiply(source, 1.5, out=target)
        else:
            m, k, n = kind.host_product
            a, b = rng.random((m, k), np.float32), rng.random((k, n), np.float32)
            out, what = np.empty((m, n), np.float32), f"{m}x{k} by {k}x{n} float32 product"
            self._work = lambda: np.matmul(a, b, out=out)
        super().__init__(device, f"{what} (NumPy, on the processors that also copy)", _C.Stream(device))
        self._per_piece = _repeats(self._work, lambda: None)

    def queue(self) -> None:
        for _ in range(self._per_piece):
            self._work()


def _repeats(work: Callable[[], object], wait: Callable[[], object]) -> int:
    """How many calls of work() make up a piece."""
    work()
    wait()
    begin = time.perf_counter()
    for _ in range(3):
        work()
    wait()
    return max(1, round(3 * _PIECE_SECONDS / (time.perf_counter() - begin)))
