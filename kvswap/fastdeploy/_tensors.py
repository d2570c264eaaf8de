"""What the ops need to know of a tensor and its streams, whoever made it. Nothing is imported that is not loaded."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

__all__ = ["Blocks", "blocks_of", "framework_gpu", "itemsize", "order_of"]


class Blocks(NamedTuple):
    """A cache as blocks: `num` of them, one behind the other, `nbytes` each."""

    num: int
    nbytes: int


def _described(tensor: Any) -> dict[str, Any]:
    for name in ("__cuda_array_interface__", "__array_interface__"):
        interface = getattr(tensor, name, None)
        if isinstance(interface, dict):
            return interface
    return {}


def _shape(tensor: Any, name: str) -> tuple[int, ...]:
    shape = getattr(tensor, "shape", None)
    if isinstance(shape, tuple):  # torch's and NumPy's, of ints: hundreds of caches are looked at in every call
        return shape
    if shape is None:
        shape = _described(tensor).get("shape")
    if shape is None:
        raise TypeError(f"{name} must be a tensor with a shape, not {type(tensor).__name__}")
    return tuple(int(extent) for extent in shape)


def itemsize(tensor: Any, name: str) -> int:
    """Bytes of an element. TypeError: the tensor does not say."""
    method = getattr(tensor, "element_size", None)  # torch, paddle
    if callable(method):
        return int(method())
    size = getattr(tensor, "itemsize", None)  # NumPy, CuPy
    if isinstance(size, int):
        return size
    typestr = _described(tensor).get("typestr")
    if isinstance(typestr, str) and typestr[2:].isdigit():
        return int(typestr[2:])
    raise TypeError(f"{name} does not say how large its elements are: {type(tensor).__name__} has no element_size()")


def _check_contiguous(tensor: Any, shape: tuple[int, ...], name: str) -> None:
    """Of a strided tensor, block i is not where it is looked for."""
    method = getattr(tensor, "is_contiguous", None)
    if callable(method):
        contiguous = bool(method())
    elif (flags := getattr(tensor, "flags", None)) is not None:
        contiguous = bool(flags["C_CONTIGUOUS"] if hasattr(flags, "__getitem__") else flags.c_contiguous)
    else:
        contiguous = True  # the swap reads it by its protocols, which say so if it is not
    if not contiguous:
        raise ValueError(f"{name} is not contiguous (shape {list(shape)}): its blocks do not lie one behind the other")


def blocks_of(tensor: Any, name: str) -> Blocks:
    """The blocks of a cache [num_blocks, kv_heads, block_size, head_dim], or of scales [num_blocks, heads, block_size].

    TypeError: no tensor. ValueError: not 3-D or 4-D, not contiguous.
    """
    shape = _shape(tensor, name)
    if len(shape) not in (3, 4):
        raise ValueError(
            f"{name} has shape {list(shape)}: a cache is [num_blocks, kv_heads, block_size, head_dim], "
            "scales are [num_blocks, kv_heads, block_size]"
        )
    _check_contiguous(tensor, shape, name)
    num, *extents = shape
    return Blocks(num, math.prod(extents) * itemsize(tensor, name))


# -- streams ----------------------------------------------------------------------------------------------------------


def _cupy_stream() -> int:
    """CuPy's current stream in this thread, 0 where none is set (or CuPy is not in use)."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return 0
    return int(cupy.cuda.get_current_stream().ptr)


def _paddle_stream(paddle: Any, tensor: Any) -> Any:
    place = getattr(tensor, "place", None)
    if place is None or not place.is_gpu_place():
        return None
    stream = paddle.device.current_stream(f"gpu:{place.gpu_device_id()}")
    return getattr(stream, "stream_base", stream)  # an object with cuda_stream


def stream_of(tensor: Any) -> Any:
    """The stream that the tensor's framework queues its kernels on, or None where there is no such thing."""
    framework = type(tensor).__module__.partition(".")[0]
    module = sys.modules.get(framework)
    if framework == "torch" and module is not None and tensor.is_cuda:
        return module.cuda.current_stream(tensor.device)
    if framework == "paddle" and module is not None:
        return _paddle_stream(module, tensor)
    return None


def framework_gpu(tensor: Any) -> int | None:
    """The number of the tensor's GPU, or of the one that paddle was set to, where there is such a thing."""
    framework = type(tensor).__module__.partition(".")[0]
    if framework == "torch" and tensor.is_cuda:
        return int(tensor.device.index)
    get_device = getattr(getattr(sys.modules.get("paddle"), "device", None), "get_device", None)
    if callable(get_device):
        kind, _, number = str(get_device()).partition(":")
        if kind == "gpu" and number.isdigit():
            return int(number)
    return None


def order_of(tensor: Any, stream: Any) -> tuple[Any, tuple[Any, ...]]:
    """The stream that a swap behaves as if enqueued on, and what else it starts after.

    The stream that is given, else CuPy's current one where one is set, else the tensor's. On a stream that is not the
    tensor's, a swap also starts after the kernels that the tensor's holds so far: they write what it reads, or read
    what it overwrites.
    """
    own = stream_of(tensor)
    if stream is not None:
        return stream, ()
    cupy = _cupy_stream()
    if not cupy or cupy == getattr(own, "cuda_stream", None):
        return own, ()
    return cupy, () if own is None else (own,)
