"""Gaps in what the copy engine is given, in which it serves a model's own copies: how many there are, that a refused
one changes nothing, and, on a GPU, that a small copy does not wait for all of a transfer."""

# mypy: disable-error-code="arg-type"

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import PATIENCE, run_python, usable
from transfers import MIB, Sides, Work, plain

import kvswap
from kvswap import _C, testing

# bytes of a block in a tensor, tensors, blocks, path, gaps: one before what would be more than 16 MiB without
FORMS = {
    "one copy": (512 << 10, 1, 80, "dma", 2),  # of neighbours
    "a list": (256 << 10, 1, 96, "dma", 1),
    "large blocks": (4 * MIB, 1, 6, "dma", 1),
    "blocks by rows": (64 << 10, 64, 6, "strided", 1),
    "rows of a large block": (272 << 10, 64, 1, "strided", 1),
    "slots": (64 << 10, 64, 6, "burst", 1),
}


def of_form(form: str, direction: int) -> tuple[Work, str]:
    nbytes, tensors, blocks, path, _ = FORMS[form]
    work = plain(nbytes, tensors, blocks, direction)
    if form == "one copy":
        work = replace(work, gpu_ids=np.arange(blocks), cpu_ids=np.arange(blocks))
    return work, path


def gaps_of(works: list[Work], **options: object) -> int:
    """How many gaps these transfers have, one after the other, on a new device: the last whose loss loses it."""
    for gaps in range(20):
        sides = Sides(testing.deterministic_device(1), 72 * MIB)
        with testing.fault(sides.device, "call", "lose", operation="gap", nth=gaps + 1):
            for work in works:
                try:
                    sides.run(work, **options)
                except kvswap.Error:
                    break
        if not sides.device.lost:
            return gaps
    raise AssertionError("20 gaps or more")


@pytest.mark.parametrize("form", FORMS)
def test_their_number(direction: int, form: str) -> None:
    work, path = of_form(form, direction)
    found = [gaps_of([work], path=path, priority=priority) for priority in ("normal", "background", "high")]
    assert found == [FORMS[form][-1], FORMS[form][-1], 0]


def test_small_transfers_add_up(direction: int) -> None:
    """What a lane's transfers give the engine counts together: it does not pause between two of them."""
    work = plain(MIB, 1, 9, direction)
    assert [gaps_of([work] * transfers, path="dma") for transfers in (1, 2, 3)] == [0, 1, 2]


@pytest.mark.parametrize("form", FORMS)
def test_a_refused_gap_changes_nothing(direction: int, form: str) -> None:
    work, path = of_form(form, direction)
    sides = Sides(testing.deterministic_device(2), 72 * MIB)
    with testing.fault(sides.device, "call", "fail", operation="gap", every=1):
        assert sides.run(work, path=path).path == path


def test_they_can_be_disabled() -> None:
    script = """
        from test_gaps import gaps_of, of_form
        print([gaps_of([work], path=path) for work, path in (of_form("one copy", 0), of_form("slots", 1))])
        """
    assert run_python(script, KVSWAP_DISABLE="gaps").stdout == "[0, 0]\n"


@pytest.mark.parametrize("path", ["dma", "strided", "burst"])
def test_a_models_copy_comes_in_between(cuda: kvswap.Device, direction: int, path: str) -> None:
    """64 KiB on a stream of their own have arrived while 512 MiB that were queued before them are still under way."""
    usable(cuda, path)
    if not cuda.info["memops"]:
        pytest.skip("this driver has no stream memory operations, so that there are no gaps")
    blocks, layers, page = 256, 32, 64 << 10
    gpu, host = cuda.alloc(blocks * layers * page), cuda.alloc(blocks * layers * page, host=True)
    small = cuda.alloc(64 << 10), cuda.alloc(64 << 10, host=True)
    stream = kvswap.Stream(cuda)
    rng = np.random.default_rng(1)
    transfer = kvswap.swap_cache_all_layers_async(
        gpu.ptr + blocks * page * np.arange(layers),
        host.ptr + page * np.arange(layers),
        page,
        blocks,
        blocks,
        rng.permutation(blocks),
        rng.permutation(blocks),
        direction,
        cpu_stride=page * layers,
        device=cuda,
        path=path,
    )
    source, target = small if direction == 0 else small[::-1]
    _C._seam(cuda, "copy", target.ptr, source.ptr, 64 << 10, stream.handle)
    stream.synchronize(PATIENCE)
    early = not transfer.done()
    transfer.wait(PATIENCE)
    assert transfer.path == path and early
