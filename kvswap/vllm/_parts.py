"""Where a layer's bytes lie in a block, and the parts of a block that a step's own load moves one after another.

In a cache of all layers together (_block_first.py) a tensor's block holds the pages of all layers. For a load that
layers wait for, such a block is cut into parts between layers. A layer waits for the parts that hold bytes of it, and
for those moved before them. All other transfers move the block as one copy.

How many parts: each is a copy of its own, and small copies are slower: by the built-in costs the link gets 48 GB/s of
copies of 128 KiB, 49 of 256 KiB, 53 of 512 KiB and 54 of 2 MiB. With fewer parts the first layer waits for longer, and
more layers are computed behind the last part. So a block is cut at four places, or at up to seven where 512 KiB still
lie between two of them. The first and the last part have half of what the others have, since the model waits for the
one, and computes behind the other. None is smaller than 128 KiB, so that a short block has fewer, down to one: then
layers wait for all of the load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvswap.offload._layout import Blocks, Ranges, blocks_of, extent_of, geometry_of

LEAST_NBYTES = 128 << 10  # of a part
_LARGE_NBYTES = 512 << 10  # between two cuts, where there are more than _FEW
_FEW, _MOST = 4, 7  # cuts


def _range_of(cache: Any, blocks: Blocks, name: str) -> tuple[int, int] | None:
    """The bytes of a block of this tensor that a layer's cache lies in; None: it has none."""
    begin, end = extent_of(cache, name)
    if end <= blocks.ptr or begin >= blocks.ptr + (blocks.blocks - 1) * blocks.stride + blocks.page:
        return None
    ptr, shape, strides, size = geometry_of(cache, name)
    first = (ptr - blocks.ptr) % blocks.stride
    inner = ((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True) if stride % blocks.stride)
    last = first + sum(inner) + size
    if last > blocks.stride:  # it has other blocks than the tensor
        return 0, blocks.page
    return (first, min(last, blocks.page)) if first < blocks.page else None


def _ranges_of(cache: Any, blocks: Blocks, name: str) -> Ranges:
    """Of a cache in one piece or several: K and V, say."""
    parts = cache if isinstance(cache, (list, tuple)) else [cache]
    found = (_range_of(part, blocks, name) for part in parts)
    return tuple(each for each in found if each is not None)


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def cut(nbytes: int, layers: Sequence[tuple[int, int]]) -> Ranges:
    """The parts of a block of so many bytes, in the order in which the layers need them. layers: the bytes of each, in
    the model's order. A part begins with a layer, so that what may lie behind a layer's cache moves with the layer."""
    wanted = min(max(_FEW, nbytes // _LARGE_NBYTES), _MOST, nbytes // (2 * LEAST_NBYTES))
    between = sorted({begin for begin, _ in layers if not any(first < begin < last for first, last in layers)})
    cuts = [0]
    for k in range(wanted):
        ideal = nbytes * (2 * k + 1) // (2 * wanted)
        places = [edge for edge in between if cuts[-1] + LEAST_NBYTES <= edge <= nbytes - LEAST_NBYTES]
        if places:
            cuts.append(min(places, key=lambda edge, ideal=ideal: abs(edge - ideal)))  # type: ignore[misc]
    parts = list(zip(cuts, [*cuts[1:], nbytes], strict=True))
    needed = {part: next((i for i, layer in enumerate(layers) if _overlap(part, layer)), len(layers)) for part in parts}
    return tuple(sorted(parts, key=lambda part: needed[part]))


def cut_blocks(kv_caches: Mapping[str, Any], gpu_tensors: Iterable[Any]) -> list[Ranges]:
    """The parts of each tensor's block. kv_caches: the layers' caches, in the model's order."""
    found = []
    for tensor in gpu_tensors:
        blocks = blocks_of(tensor, "a tensor of the handler")
        layers = [each for name, cache in kv_caches.items() for each in _ranges_of(cache, blocks, name)]
        found.append(cut(blocks.page, layers))
    return found


def parts_of(
    kv_caches: Mapping[str, Any], gpu_tensors: Iterable[Any], layer_parts: Iterable[Ranges]
) -> dict[str, tuple[int, ...]]:
    """The numbers of the parts, through all tensors, that each layer's cache has bytes in."""
    found: dict[str, tuple[int, ...]] = dict.fromkeys(kv_caches, ())
    first = 0
    for tensor, parts in zip(gpu_tensors, layer_parts, strict=True):
        blocks = blocks_of(tensor, "a tensor of the handler")
        for name, cache in kv_caches.items():
            ranges = _ranges_of(cache, blocks, name)
            numbers = (first + k for k, part in enumerate(parts) if any(_overlap(part, each) for each in ranges))
            found[name] += tuple(numbers)
        first += len(parts)
    return found
