"""Where the tensors of a job, or their parts, lie in its transfers, so that a stream can wait for some of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle
from typing import TypeAlias

from kvswap import _C

Order: TypeAlias = tuple[tuple[int, tuple[int, ...], bool], ...]  # OffloadMap.order
Places: TypeAlias = dict[int, tuple[tuple[int, int], ...]]  # tensor -> (transfer, its last layer of the tensor), ...

_PAUSE = 0.0001  # seconds between two looks at a layer


def by_parts(order: Order, numbers: Sequence[tuple[int, int, int]]) -> Order:
    """The order with parts in the place of their tensors, in the groups that are cut (Layout.numbers). A map may have
    them several times, once for each place of a block in a chunk."""
    found: dict[tuple[int, int], list[int]] = {}
    for group, tensor, number in numbers:
        found.setdefault((group, tensor), []).append(number)
    parts = {key: cycle(each) for key, each in found.items()}
    return tuple(
        (group, tuple(next(parts[group, t]) if (group, t) in parts else t for t in tensors), every)
        for group, tensors, every in order
    )


def places_of(order: Order, has_blocks: Sequence[bool]) -> tuple[int, Places] | None:
    """The number of transfers of a load with blocks in these groups, and the places of each tensor in them.

    None: which transfers there are depends on the blocks, so that the job can be waited for as a whole only.
    """
    transfers = [(tensors, every_block) for group, tensors, every_block in order if has_blocks[group]]
    if not all(every_block for _, every_block in transfers):
        return None
    last: dict[int, dict[int, int]] = {}
    for number, (tensors, _) in enumerate(transfers):
        for layer, tensor in enumerate(tensors):
            last.setdefault(tensor, {})[number] = layer
    return len(transfers), {tensor: tuple(places.items()) for tensor, places in last.items()}


def waits_of(
    transfers: Sequence[_C.Transfer], places: tuple[int, Places] | None, tensors: Sequence[int] | None
) -> list[tuple[_C.Transfer, int | None]]:
    """What to wait for before these tensors are read: transfers, and how many of their layers. None: all of it."""
    if tensors is None or places is None or places[0] != len(transfers):
        return [(transfer, None) for transfer in transfers]
    needed: dict[int, int] = {}
    for tensor in tensors:
        for number, layer in places[1].get(tensor, ()):
            needed[number] = max(layer, needed.get(number, 0))
    return [(transfers[number], layer) for number, layer in needed.items()]


def wait_here(transfer: _C.Transfer, layer: int, timeout: float | None) -> None:
    """The calling thread waits for layers 0 to `layer`. kvswap.Error: the transfer failed. TimeoutError."""
    end = None if timeout is None else time.monotonic() + timeout
    while not transfer.layer_done(layer):
        if end is not None and time.monotonic() > end:
            raise TimeoutError(f"layer {layer} of a load has not arrived after {timeout:g} s; it goes on")
        time.sleep(_PAUSE)
