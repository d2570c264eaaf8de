"""Geometry and stream of a tensor of any framework. Uses a framework only if the process has imported it."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

__all__ = ["Blocks", "blocks_of", "framework_gpu", "framework_of", "itemsize", "order_of"]


class Blocks(NamedTuple):
    """A cache as `num` contiguous blocks of `nbytes` bytes each."""

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
    if isinstance(shape, tuple):  # torch's and NumPy's, of ints: the fast way, since a call checks hundreds of caches
        return shape
    if shape is None:
        shape = _described(tensor).get("shape")
    if shape is None:
        raise TypeError(f"{name} must be a tensor with a shape, not {type(tensor).__name__}")
    return tuple(int(extent) for extent in shape)


def itemsize(tensor: Any, name: str) -> int:
    """Bytes of an element. TypeError: the tensor has neither an item size nor an array interface."""
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


def blocks_of(tensor: Any, name: str) -> Blocks:
    """The blocks of a cache [num_blocks, kv_heads, block_size, head_dim], or of scales [num_blocks, heads, block_size].

    TypeError: not a tensor. ValueError: not 3-D or 4-D. The core checks that it is contiguous.
    """
    shape = _shape(tensor, name)
    if len(shape) not in (3, 4):
        raise ValueError(
            f"{name} has shape {list(shape)}: a cache is [num_blocks, kv_heads, block_size, head_dim], "
            "scales are [num_blocks, kv_heads, block_size]"
        )
    num, *extents = shape
    return Blocks(num, math.prod(extents) * itemsize(tensor, name))


# -- streams ----------------------------------------------------------------------------------------------------------


def framework_of(tensor: Any) -> tuple[str, Any]:
    """The name of the tensor's framework and its module; None if the process has not imported it."""
    framework = type(tensor).__module__.partition(".")[0]
    return framework, sys.modules.get(framework)


def stream_of(tensor: Any) -> Any:
    """The current stream of the tensor's framework, or None if the framework has none."""
    framework, module = framework_of(tensor)
    if framework == "torch" and module is not None and tensor.is_cuda:
        return module.cuda.current_stream(tensor.device)
    place = getattr(tensor, "place", None)
    if framework == "paddle" and module is not None and place is not None and place.is_gpu_place():
        stream = module.device.current_stream(f"gpu:{place.gpu_device_id()}")
        return getattr(stream, "stream_base", stream)  # an object with cuda_stream
    return None


def framework_gpu(tensor: Any) -> int | None:
    """The number of the tensor's GPU, else of paddle's current GPU, else None."""
    if framework_of(tensor)[0] == "torch" and tensor.is_cuda:
        return int(tensor.device.index)
    get_device = getattr(getattr(sys.modules.get("paddle"), "device", None), "get_device", None)
    if callable(get_device):
        kind, _, number = str(get_device()).partition(":")
        if kind == "gpu" and number.isdigit():
            return int(number)
    return None


def order_of(tensor: Any, stream: Any) -> tuple[Any, tuple[Any, ...]]:
    """The stream that a swap behaves as if enqueued on, and further streams that it starts after.

    The stream is the given one, else CuPy's current stream if one is set, else the tensor's. On a stream other than
    the tensor's, a swap also starts after the kernels queued on the tensor's stream so far: they may write the swap's
    source or read its destination.
    """
    own = stream_of(tensor)
    if stream is not None:
        return stream, ()
    cupy = sys.modules.get("cupy")
    current = 0 if cupy is None else int(cupy.cuda.get_current_stream().ptr)  # 0: none is set
    if not current or current == getattr(own, "cuda_stream", None):
        return own, ()
    return current, () if own is None else (own,)
