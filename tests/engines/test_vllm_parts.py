"""How a block of all layers is cut for a step's own load, and which parts a layer waits for."""

# mypy: ignore-errors

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest

from kvswap.vllm._parts import LEAST_NBYTES, cut, cut_blocks, parts_of

pytestmark = pytest.mark.not_sanitized("Python only")

KIB = 1 << 10


def sizes(pages: list[int]) -> list[int]:
    """KiB of the parts of a block with these pages, in KiB, in the model's order."""
    ends = [0, *accumulate(page * KIB for page in pages)]
    return [(end - begin) // KIB for begin, end in cut(ends[-1], list(pairwise(ends)))]


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ([64] * 32, [256, 512, 512, 512, 256]),
        ([128] * 32, [256, 640, 512, 640, 640, 512, 640, 256]),
        ([32] * 32, [128, 256, 256, 256, 128]),
        ([16] * 32, [128, 256, 128]),
        ([8] * 32, [128, 128]),
        ([4] * 32, [128]),
        ([16] * 15, [240]),
        ([2048], [2048]),  # one layer
        ([1024] * 4, [1024] * 4),  # not within a layer
        ([24] * 22, [144, 240, 144]),
        ([512, 16, 16, 16, 16, 512], [512, 576]),  # uneven: none is small
        ([16, 240] * 4, [256, 256, 256, 256]),
    ],
)
def test_the_rule(pages: list[int], expected: list[int]) -> None:
    assert sizes(pages) == expected


def test_no_part_is_small_and_none_begins_within_a_layer() -> None:
    rng = np.random.default_rng(3)
    for _ in range(500):
        pages = [16 * KIB * int(size) for size in rng.integers(1, rng.integers(2, 40), rng.integers(1, 80))]
        ends = [0, *accumulate(pages)]
        parts = cut(ends[-1], list(pairwise(ends)))
        assert [part[0] for part in parts] == [0, *(end for _, end in parts[:-1])] and parts[-1][1] == ends[-1]
        assert len(parts) <= 8 and {edge for part in parts for edge in part} <= {*ends}
        assert len(parts) == 1 or all(end - begin >= LEAST_NBYTES for begin, end in parts)


def test_parts_are_moved_in_the_order_in_which_layers_need_them() -> None:
    """Not in that of their places; what no layer has is last."""
    pages = [(i * 64 * KIB, (i + 1) * 64 * KIB) for i in range(16)]
    forward, backward = cut(1024 * KIB, pages), cut(1024 * KIB, pages[::-1])
    assert backward == forward[::-1]
    assert cut(1024 * KIB, pages[8:])[0][0] == 512 * KIB
    assert cut(1024 * KIB, pages[8:])[-1] == (0, 512 * KIB)


def test_layers_that_lie_all_over_a_block_are_not_cut() -> None:
    """As with the heads outside of the layers."""
    over_all = [(i * 4 * KIB, 1024 * KIB - (31 - i) * 4 * KIB) for i in range(32)]
    assert cut(1024 * KIB, over_all) == ((0, 1024 * KIB),)
    assert cut(1024 * KIB, []) == ((0, 1024 * KIB),)


class Packed:
    """A cache of all layers together, with pages of these sizes, and the layers as an attention backend has them."""

    def __init__(self, pages: dict[str, int], blocks: int = 3) -> None:
        ends = [0, *accumulate(pages.values())]
        self.tensor = np.zeros((blocks, ends[-1]), np.int8)
        self.layers = {
            name: self.tensor[:, begin:end].reshape(blocks, 2, -1, 64)
            for name, (begin, end) in zip(pages, pairwise(ends), strict=True)
        }
        assert all(np.shares_memory(layer, self.tensor) for layer in self.layers.values())

    def numbers(self) -> dict[str, tuple[int, ...]]:
        return parts_of(self.layers, [self.tensor], cut_blocks(self.layers, [self.tensor]))


def test_a_layer_waits_for_the_part_with_its_bytes() -> None:
    names = [f"layer.{i}" for i in range(32)]
    cache = Packed(dict.fromkeys(names, 64 * KIB))
    parts = [0] * 4 + [1] * 8 + [2] * 8 + [3] * 8 + [4] * 4
    assert cache.numbers() == {name: (part,) for name, part in zip(names, parts, strict=True)}
    cache.layers = dict(reversed(cache.layers.items()))  # the last of the block is the first of the model
    assert cache.numbers() == {name: (4 - part,) for name, part in zip(names, parts, strict=True)}


def test_pages_of_several_sizes() -> None:
    pages = {f"layer.{i}": (192 if i % 3 == 0 else 32) * KIB for i in range(12)}
    cache = Packed(pages)
    found = list(cache.numbers().values())
    assert found == sorted(found) and all(len(numbers) == 1 for numbers in found)
    (parts,) = cut_blocks(cache.layers, [cache.tensor])
    for layer, (number,) in zip(cache.layers.values(), found, strict=True):
        begin, end = parts[number]
        assert np.shares_memory(layer, cache.tensor[:, begin:end])
        rest = [part for part in parts if part != (begin, end)]
        layer[:] = 1
        assert not any(cache.tensor[:, first:last].any() for first, last in rest)
        layer[:] = 0


def test_a_layer_of_two_parts_waits_for_both() -> None:
    names = [f"layer.{i}" for i in range(32)]
    cache = Packed(dict.fromkeys(names, 64 * KIB))
    parts = cut_blocks(cache.layers, [cache.tensor])
    split = {"both": [cache.layers["layer.0"], cache.layers["layer.31"]], "across": cache.tensor[:, 200 * KIB :]}
    split["across"] = split["across"][:, : 100 * KIB]
    assert parts_of(split, [cache.tensor], parts) == {"both": (0, 4), "across": (0, 1)}


def test_groups_that_lie_over_each_other() -> None:
    """A block is one group's: layers of two groups have the same bytes."""
    cache = Packed({f"full.{i}": 64 * KIB for i in range(16)})
    windows = {name.replace("full", "window"): layer for name, layer in cache.layers.items()}
    cache.layers = {**cache.layers, **windows}
    found = cache.numbers()
    assert all(found[f"window.{i}"] == found[f"full.{i}"] for i in range(16)) and len(set(found.values())) == 5


def test_a_cache_with_other_blocks_waits_for_all() -> None:
    """As an attention backend may have them, that takes a block for two."""
    cache = Packed({f"layer.{i}": 64 * KIB for i in range(16)}, blocks=4)
    halves = cache.tensor.reshape(8, -1)[:, : 64 * KIB]
    parts = cut_blocks(cache.layers, [cache.tensor])
    for first in (0, 1):  # from the beginning of a block on, and from its middle on
        assert parts_of({"layer.0": halves[first:]}, [cache.tensor], parts) == {"layer.0": (0, 1, 2, 3, 4)}


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_tensor_a_layer_is_not_cut(blocks: int) -> None:
    slab = np.zeros((4, blocks, 1024 * KIB), np.int8)
    layers: dict[str, Any] = {f"layer.{i}": layer.reshape(blocks, 2, 64, -1) for i, layer in enumerate(slab)}
    parts = cut_blocks(layers, list(slab))
    assert parts == [((0, 1024 * KIB),)] * 4
    assert parts_of({**layers, "both": [slab[1], slab[3]], "none": np.zeros(9)}, list(slab), parts) == {
        **{f"layer.{i}": (i,) for i in range(4)},
        "both": (1, 3),
        "none": (),
    }


def test_k_and_v_apart() -> None:
    """Each a tensor of its own, and a layer's cache is one view of both."""
    slab = np.zeros((2, 2, 5, 64 * KIB), np.int8)  # layers, K and V, blocks
    tensors = [slab[layer, side] for layer in range(2) for side in range(2)]
    layers = {f"layer.{i}": slab[i].reshape(2, 5, 16, -1) for i in range(2)}
    parts = cut_blocks(layers, tensors)
    assert parts_of(layers, tensors, parts) == {"layer.0": (0, 1), "layer.1": (2, 3)}
    swapped = {name: layer.swapaxes(0, 1) for name, layer in layers.items()}
    assert parts_of(swapped, tensors, parts) == {"layer.0": (0, 1), "layer.1": (2, 3)}
