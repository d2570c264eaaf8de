"""Gaps in what the copy engine is given, in which it serves a model's own copies: how many there are, that a refused
one changes nothing, and, on a GPU, that a small copy does not wait for a whole transfer. test_missing.py shows
where they are in the calls to a driver."""

# mypy: disable-error-code="arg-type"

from __future__ import annotations

import mmap
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from conftest import PATIENCE, Buffer, Gate, run_python, seam, usable
from transfers import MIB, Sides, Work, carry_out, plain

import kvswap
from kvswap import testing

# bytes of a block in a tensor, tensors, blocks, path, gaps: one before what would be more than 24 MiB without
FORMS = {
    "one copy": (512 << 10, 1, 120, "dma", 2),  # of neighbours
    "a list": (256 << 10, 1, 144, "dma", 1),
    "a list that fits badly": (33 << 10, 1, 1500, "dma", 2),
    "large blocks": (4 * MIB, 1, 9, "dma", 1),
    "blocks by rows": (64 << 10, 64, 9, "strided", 1),
    "rows of a large block": (408 << 10, 64, 1, "strided", 1),
    "slots": (64 << 10, 64, 9, "burst", 1),
}


# Each form in one direction, each path in both.
CASES = [(number % 2, form) for number, form in enumerate(FORMS)] + [(1, "slots")]
OF_A_PATH = ["a list", "blocks by rows", "slots"]


def of_form(form: str, direction: int) -> tuple[Work, str]:
    nbytes, tensors, blocks, path, _ = FORMS[form]
    work = plain(nbytes, tensors, blocks, direction)
    if form == "one copy":
        work = replace(work, gpu_ids=np.arange(blocks), cpu_ids=np.arange(blocks))
    return work, path


def end_of(works: list[Work]) -> int:
    return max(max(work.gpu.end, work.cpu.end) for work in works)


def carry_out_all(sides: Sides, works: list[Work], path: str, priority: str, at_once: bool) -> None:
    """at_once: all are queued before the first begins."""
    sides.prepare(end_of(works))
    with Gate(sides.device) as gate:
        stream = kvswap.Stream(sides.device)
        if at_once:
            gate.hold(stream)
        for work in works:
            transfer = sides.swap(work, path=path, priority=priority, after=stream)
            assert transfer.path == path
            if not at_once:
                transfer.wait(PATIENCE)
        gate.open()
        transfer.wait(PATIENCE)
    for work in works:
        carry_out(work, sides.gpu_model, sides.cpu_model)
    sides.check()


def gaps_of(works: list[Work], path: str, priority: str = "normal", *, at_once: bool = True) -> int:
    """How many gaps these transfers have on a new device: the last whose loss loses it."""
    for gaps in range(20):
        sides = Sides(testing.deterministic_device(1), end_of(works))
        with testing.fault(sides.device, "call", "lose", operation="gap", nth=gaps + 1):
            try:
                carry_out_all(sides, works, path, priority, at_once)
            except kvswap.Error:
                if not sides.device.lost:
                    raise
        if not sides.device.lost:
            return gaps
    raise AssertionError("20 gaps or more")


@pytest.mark.parametrize(("direction", "form"), CASES)
def test_their_number(direction: int, form: str) -> None:
    work, path = of_form(form, direction)
    assert gaps_of([work], path) == FORMS[form][-1]


@pytest.mark.parametrize("form", OF_A_PATH)
def test_their_number_by_priority(form: str) -> None:
    work, path = of_form(form, 1)
    assert [gaps_of([work], path, priority) for priority in ("background", "high")] == [FORMS[form][-1], 0]


def test_small_transfers_add_up(direction: int) -> None:
    """The engine does not pause between two transfers of a lane; it does where each ends before the next is given."""
    work = plain(MIB, 1, 14, direction)
    assert [gaps_of([work] * transfers, "dma") for transfers in (1, 2, 3, 4)] == [0, 1, 1, 2]
    assert gaps_of([work] * 4, "dma", at_once=False) == 0


def test_a_long_queue_has_fewer() -> None:
    """A driver's stream takes some 1,024 commands. Of transfers of 96 MiB, which have four gaps, the 256th gap would be
    in the 65th; they grow rarer, so that it is in a later one."""
    work = plain(8 * MIB, 1, 12, 0)
    sides = Sides(testing.deterministic_device(1), end_of([work]))
    sides.prepare(sides.room)
    stream, submitted = kvswap.Stream(sides.device), 0
    with (
        testing.fault(sides.device, "call", "lose", operation="gap", nth=256),
        pytest.raises(kvswap.Error),
        Gate(sides.device) as gate,
    ):
        gate.hold(stream)
        while not sides.device.lost:
            sides.swap(work, path="dma", after=stream)
            submitted += 1
    assert submitted == 80


def test_rows_beyond_the_largest_pitch(direction: int) -> None:
    """A block of 36 MiB whose rows are 2 GiB apart is a box of as many slices, and cut between them."""
    row, rows, apart = 3 * MIB, 12, 2 << 30
    whole = np.frombuffer(mmap.mmap(-1, rows * apart, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000), np.uint8)
    far = whole.reshape(rows, apart)[:, :row]  # 0x4000: MAP_NORESERVE
    for nth, gaps in ((1, True), (2, False)):
        device = testing.deterministic_device(1)
        device.register(whole.ctypes.data, rows * apart)
        gpu = Buffer(device, rows * row, "gpu")
        gpu.randomise(nth)
        expected = gpu.get().reshape(rows, row)
        far[:] = ~expected
        if direction == 1:
            expected = far.copy()
        starts = gpu.ptr + row * np.arange(rows), whole.ctypes.data + apart * np.arange(rows)
        with (
            testing.fault(device, "call", "lose", operation="gap", nth=nth),
            pytest.raises(kvswap.Error, match="gap failed") if gaps else nullcontext(),
        ):
            kvswap.swap_cache_all_layers(*starts, row, 1, 1, [0], [0], direction, device=device, path="strided")
        if not gaps:
            assert np.array_equal(far, expected) and np.array_equal(gpu.get().reshape(rows, row), expected)
            device.unregister(whole.ctypes.data)


def test_copies_within_a_gpu_have_none() -> None:
    """They are not on the link."""
    device = testing.deterministic_device(1)
    memory = device.alloc(48 * MIB)
    with testing.fault(device, "call", "lose", operation="gap"):
        transfer = kvswap.swap_blocks_batch([memory.ptr], [memory.ptr + 24 * MIB], 24 * MIB, device=device, path="dma")
        transfer.wait(PATIENCE)
    assert not device.lost


@pytest.mark.parametrize(("direction", "form"), CASES)
def test_a_refused_gap_changes_nothing(direction: int, form: str) -> None:
    work, path = of_form(form, direction)
    sides = Sides(testing.deterministic_device(2), end_of([work]))
    with testing.fault(sides.device, "call", "fail", operation="gap", every=1):
        assert sides.run(work, path=path).path == path


@pytest.mark.not_sanitized("whole processes, which take minutes under a sanitizer")
@pytest.mark.parametrize("environment", [{"KVSWAP_DISABLE": "gaps"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}])
def test_where_there_are_none(environment: dict[str, str]) -> None:
    """Because they are not wanted, and where one hardware queue makes them useless."""
    script = """
        from test_gaps import gaps_of, of_form
        print([gaps_of([work], path) for work, path in (of_form("one copy", 0), of_form("slots", 1))])
        """
    assert run_python(script, **environment).stdout == "[0, 0]\n"


@pytest.mark.parametrize("path", ["dma", "strided", "burst"])
def test_a_models_copy_comes_in_between(cuda: kvswap.Device, direction: int, path: str) -> None:
    """64 KiB on a stream of their own, queued behind two transfers of 512 MiB, arrive before the first has ended. On a
    busy machine this thread may see it too late, but not five times."""
    usable(cuda, path)
    if not cuda.info["memops"]:
        pytest.skip("this driver has no stream memory operations, so that there are no gaps")
    blocks, (layers, page) = 256, (1, 2 * MIB) if path == "dma" else (32, 64 << 10)
    gpu, host = cuda.alloc(blocks * layers * page), cuda.alloc(blocks * layers * page, host=True)
    small = cuda.alloc(64 << 10), cuda.alloc(64 << 10, host=True)
    stream = kvswap.Stream(cuda)
    rng = np.random.default_rng(1)
    source, target = small if direction == 0 else small[::-1]

    def comes_early() -> bool:
        transfers = [
            kvswap.swap_cache_all_layers_async(
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
            for _ in range(2)
        ]
        seam(cuda, "copy", target.ptr, source.ptr, 64 << 10, stream.handle)
        stream.synchronize(PATIENCE)
        early = not transfers[0].done()
        for transfer in transfers:
            transfer.wait(PATIENCE)
        assert transfers[0].path == path
        return early

    assert any(comes_early() for _ in range(5))
