"""kvswap bench: what it moves, by which methods, what it times, and that one wrong byte ends it."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, bindings

import kvswap
from kvswap import Direction, cli, testing
from kvswap.bench import beside, loads, measure, step, table
from kvswap.bench.methods import METHODS, NotMeasured, Pieces
from kvswap.bench.shapes import FAMILIES, LAYOUTS, SPREAD, Place, Shape
from kvswap.replay.check import WrongBytes
from kvswap.replay.errors import UsageError

pytestmark = pytest.mark.not_sanitized("measures, and measures the sanitizer")

QUICK = ["bench", "--quick", "--bytes", "1MiB"]
SHAPES = [
    Shape(3, 4096, 20),
    Shape(3, 4096, 20, slab=True),
    Shape(3, 4096, 20, host_run=0),
    Shape(3, 4096, 20, gpu_run=4, host_run=8, block_first=False),
    Shape(1, 1040, 7),
]

Output = pytest.CaptureFixture[str]


@pytest.fixture
def lab(device: kvswap.Device) -> Iterator[measure.Lab]:
    with measure.opened(device, 1) as opened:
        yield opened


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


# -- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_lie_apart_and_inside(lab: measure.Lab, shape: Shape) -> None:
    (place,) = lab.places((shape,))
    gpu, host = place.addresses()
    for ends in (gpu, host):
        assert len(ends) == shape.copies
        assert (np.diff(np.sort(ends)) >= shape.block_nbytes).all()
    inside = host - np.uint64(place.host_ptr)
    assert int(inside.max()) + shape.block_nbytes <= shape.side_nbytes(shape.host_run)
    first = gpu.reshape(shape.tensors, -1) - place.gpu_ptrs[:, None]
    assert int(first.max()) + shape.block_nbytes <= place.gpu_slots * shape.block_nbytes


def test_runs_of_ids() -> None:
    device = kvswap.Device("host:0")
    with measure.opened(device, 1) as lab:
        (place,) = lab.places((Shape(2, 64, 40, gpu_run=8, host_run=0),))
        assert (np.diff(place.gpu_ids.reshape(5, 8), axis=1) == 1).all()
        assert (np.diff(place.host_ids) == 1).all() and place.host_is_one_run
        assert place.gpu_ids.max() < place.gpu_slots == 40 * SPREAD
        (scattered,) = lab.places((Shape(2, 64, 40),))
        assert (np.diff(scattered.host_ids) != 1).any() and not scattered.host_is_one_run


def test_tensors_at_equal_pitch_only_in_a_slab(lab: measure.Lab) -> None:
    """Within one allocation; those that lie apart are allocations of their own."""

    def allocations(place: Place) -> int:
        return len({bindings.seam(lab.device, "pointer_query", int(ptr))["base"] for ptr in place.gpu_ptrs})

    assert allocations(*lab.places((SHAPES[0],))) == 3
    assert allocations(*lab.places((SHAPES[1],))) == 1


def test_families_make_up_the_bytes() -> None:
    for family in FAMILIES.values():
        for size in table.SIZES:
            shapes = family.of(size, 1 << 30)
            total = sum(shape.nbytes for shape in shapes)
            assert 0.98 * (1 << 30) < total <= 1 << 30 or shapes[0].blocks == family.most_blocks


def test_a_layout_is_of_one_size() -> None:
    """Which another size that is asked for leaves out."""
    for family in (*LAYOUTS.values(), FAMILIES["rows"]):
        assert family.sizes(None, table.SIZES) == (family.size,) == family.sizes([1, family.size], table.SIZES)
        assert family.sizes([1], table.SIZES) == ()
    assert FAMILIES["run"].sizes([1], table.SIZES) == (1,)
    (rows,) = FAMILIES["rows"].of(656, 1 << 30)
    assert (rows.tensors, rows.block_nbytes, rows.blocks) == (1, 656, 100_000)
    (layout,) = LAYOUTS["80x16k-slab-layers"].of(16 << 10, 256 << 20)
    assert (layout.tensors, layout.slab, layout.block_first, layout.host_run) == (80, True, False, 1)


def test_what_an_earlier_copy_left_is_wrong(lab: measure.Lab) -> None:
    (place,) = lab.places((SHAPES[0],))
    job = lab.job(METHODS["dma"], (SHAPES[0],), "D2H")
    lab.warm_up(job)
    place.check(Direction.D2H, lab.stream, "what was copied")
    job.fill()
    with pytest.raises(WrongBytes, match=r"WRONG BYTES: dma D2H 3 x 4 KiB x 20: block 0 of the list, tensor 0, off"):
        job.check()


# -- methods ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["D2H", "H2D", "both"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_method_moves_every_byte(lab: measure.Lab, shape: Shape, direction: str) -> None:
    shapes = (shape,) * (2 if direction == "both" else 1)
    measured, noted = set(), {}
    for key, method in METHODS.items():
        try:
            with measure.refusals(lab.device):
                figures = lab.figures(lab.job(method, shapes, direction), 1, 10.0)
        except NotMeasured as why:
            noted[key] = str(why)
            continue
        measured.add(key)
        assert figures.gbps > 0 and figures.blocked_ms > 0 and figures.cpu_ms > 0 and figures.repeats == 1
        assert (figures.device_gbps or 0) > 0 or (direction == "both" and not figures.queued)
    assert measured >= {"auto", "high", "background", "dma", "loop", "batch", "numpy", "pointers"}
    assert noted.get("strided") == (None if shape.slab else "path dma was taken")
    if lab.device.info["kernels"]:
        assert measured >= {"kernel", "warp"}
    if lab.device.kind == "host":
        assert noted["torch"] == noted["triton"] == "torch has no such device"
    else:
        assert "host devices" in noted["direct"]


def test_what_is_refused_is_no_figure_but_wrong_bytes_are_no_refusal(device: kvswap.Device) -> None:
    with pytest.raises(NotMeasured, match=r"^not here$"), measure.refusals(device):
        raise kvswap.Error("not here\nat all")
    with pytest.raises(WrongBytes), measure.refusals(device):
        raise WrongBytes("wrong", wrong_bytes=1, block=0, layer=0, offset=0)


def test_pieces_say_that_there_are_no_kernels() -> None:
    class Without:
        info = {"kernels": False, "kernels_note": "built without nvcc"}

    with pytest.raises(NotMeasured, match="no kernels: built without nvcc"):
        Pieces(Without(), *(np.zeros(1, np.uint64),) * 3)


# -- times ------------------------------------------------------------------------------------------------------------


def test_the_spin_keeps_the_callers_time_out_of_the_devices(lab: measure.Lab) -> None:
    """Five copies whose every call takes 2 ms: the caller sees them, the device does not."""
    shape = Shape(1, 4096, 5)
    job = lab.job(METHODS["loop"], (shape,), "D2H")
    with testing.fault(lab.device, "call", "delay", operation="copy", every=1, delay=0.002):
        for _ in range(10):  # on a busy machine a call may outlast the spin, or the device's thread be held up
            figures = lab.figures(job, 3, 10.0)
            assert figures.repeats == 3 and figures.blocked_ms >= 10
            assert shape.nbytes / figures.gbps / 1e9 >= 0.010
            assert figures.device_gbps is not None
            if figures.queued and shape.nbytes / figures.device_gbps / 1e9 < 0.008:
                return
    raise AssertionError(figures)


def test_a_call_that_outlasts_the_spin_is_told(lab: measure.Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_LONGEST_SPIN", 0.001)
    job = lab.job(METHODS["loop"], (Shape(1, 4096, 5),), "D2H")
    with testing.fault(lab.device, "call", "delay", operation="copy", every=1, delay=0.002):
        figures = lab.figures(job, 1, 10.0)
        assert not figures.queued and figures.device_gbps is not None
        both = lab.figures(lab.job(METHODS["loop"], (Shape(1, 4096, 5),) * 2, "both"), 1, 10.0)
        assert not both.queued and both.device_gbps is None  # they did not begin together


def test_repeats_end_with_the_time(lab: measure.Lab) -> None:
    assert lab.figures(lab.job(METHODS["dma"], (SHAPES[0],), "D2H"), 1000, 0.0).repeats == 1


def test_median_interval() -> None:
    """Ten values: the second and the ninth, which hold the median with 97.9 %; fewer than six: all."""
    assert beside.median_interval(list(range(10))) == (1, 8)
    assert beside.median_interval(list(range(20, 0, -1))) == (6, 15)
    assert beside.median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert beside.median_interval([4.0]) == (4.0, 4.0)


def test_only_bytes_within_the_window_count() -> None:
    spans = [(0.0, 1.0), (1.0, 2.0), (2.0, 4.0), (4.0, 5.0), (6.0, 6.0)]
    assert beside.copies_within(spans, 0.5, 3.0) == pytest.approx(0.5 + 1 + 0.5)
    assert beside.copies_within(spans, 0.25, 0.5) == pytest.approx(0.25)
    assert beside.copies_within(spans, 5.0, 9.0) == 0


@pytest.mark.parametrize("kind", loads.KINDS)
def test_a_load_comes_in_pieces(device: kvswap.Device, kind: str) -> None:
    load = loads.load_for(device, kind)
    window = beside._run_load(device, load, 0.2)
    assert window.pieces >= 1
    assert window.pieces * window.piece_seconds >= 0.199  # the load ran for as long as it was asked to
    assert "NumPy" in load.name if device.kind == "host" else "torch" in load.name


def test_tokens_are_copied_around_each_step(device: kvswap.Device) -> None:
    """Inputs before it and tokens after it, in the order of the load's stream, and each piece awaits its tokens. (The
    model computes none: here the tokens are the first of the inputs.)"""
    load = loads.load_for(device, "tokens")
    assert load.ahead == 1
    memory = np.frombuffer(load._host, np.uint8)
    inputs, tokens = memory[: load._INPUTS], memory[load._INPUTS :]
    for turn in (1, 2):
        inputs[:] = np.random.default_rng(turn).integers(0, 256, inputs.size, np.uint8)
        with testing.fault(device, "call", "fail", operation="copy", nth=3):  # there are two
            load.queue()
        device.synchronize(60)
        assert tokens.size == 256 and np.array_equal(tokens, inputs[: tokens.size])


def float32_model() -> step.Model:
    rng = np.random.default_rng(3)
    return step.model(step.SMALL, lambda shape, scale: rng.standard_normal(shape, np.float32) * np.float32(scale))


def test_a_decode_step_looks_at_all_that_it_should() -> None:
    """Each request's output depends on its own cache and input, every layer and weight counts, and it stays finite."""
    model = float32_model()
    before = step.by_numpy(model)
    assert before.shape == (step.SMALL.batch, step.SMALL.hidden) and np.isfinite(before).all()
    for number, layer in enumerate(model.layers):
        for name in ("qkv", "out", "gate_up", "down"):
            weight = getattr(layer, name)
            kept = weight.copy()
            weight[...] = np.roll(kept, 1, axis=0)
            assert not np.allclose(step.by_numpy(model), before), (number, name)
            weight[...] = kept
        for cache in (layer.keys, layer.values):
            kept = cache[1, -1, -1].copy()
            cache[1, -1, -1] += 5  # the last token of the last head of one request
            changed = np.abs(step.by_numpy(model) - before).max(axis=1) > 1e-4
            assert changed.tolist() == [False, True, False, False]
            cache[1, -1, -1] = kept
    assert np.array_equal(step.by_numpy(model), before)


def test_torchs_decode_step_is_numpys() -> None:
    torch = pytest.importorskip("torch")
    model = float32_model()
    layers = [
        step.Layer(*(torch.from_numpy(getattr(layer, name)) for name in step.Layer.__dataclass_fields__))
        for layer in model.layers
    ]
    found = step.by_torch(torch, step.Model(model.size, torch.from_numpy(model.x), tuple(layers)))
    np.testing.assert_allclose(found.numpy(), step.by_numpy(model), rtol=1e-3, atol=1e-3)


# -- the command ------------------------------------------------------------------------------------------------------


def test_table(device_name: str, tmp_path: Path, capsys: Output) -> None:
    result = tmp_path / "bench.json"
    assert cli.main([*QUICK, "--device", device_name, f"--json={result}"]) == 0
    out = capsys.readouterr().out
    assert "one bare copy of 1 MiB" in out and "0 wrong bytes" in out and "not measured: path dma was taken" in out
    found = read_json(result)
    assert (found["what"], found["wrong_bytes"], found["device"]) == ("table", 0, device_name)
    assert found["bytes_verified"] > 0
    assert set(found["ceilings_gbps"]) == {"D2H", "H2D", "both"}
    measured = [row for row in found["rows"] if row["figures"]]
    assert {row["family"] for row in measured} == set(FAMILIES)
    assert {row["direction"] for row in measured} == {"D2H", "H2D", "both"}
    assert {row["method"] for row in measured} >= {"auto", "dma", "strided", "loop", "batch", "numpy", "pointers"}
    assert all(row["share"] > 0 for row in measured)
    assert all(row["note"] for row in found["rows"] if not row["figures"])
    assert {row["method"] for row in measured} >= {"high"}
    rows = [row for row in measured if row["family"] == "rows"]
    assert rows and all((row["tensors"], row["block_nbytes"]) == (1, 656) for row in rows)
    for row in measured:
        bare = found["bare_copies"][str(1 << 20 if row["nbytes"] >= 0.9 * (1 << 20) else row["nbytes"])]
        bare = bare[row["direction"]]
        assert row["whole_share"] == pytest.approx(row["figures"]["gbps"] / bare["gbps"])
        device = row["figures"]["device_gbps"] or row["figures"]["gbps"]
        assert row["share"] == pytest.approx(device / (bare["device_gbps"] or bare["gbps"]))
    small = {row["method"]: row for row in found["small_rows"]}
    assert small["bare"]["p50_us"] > 0 and small["bare"]["p99_us"] >= small["bare"]["p50_us"]
    assert {row["nbytes"] for row in found["small_rows"]} == {64 << 10}  # the others are larger than a case
    assert len({row["key"] for row in found["rows"] + found["small_rows"]}) == len(found["rows"] + found["small_rows"])


def test_a_size_without_its_unit_is_told(capsys: Output) -> None:
    only = ["--shape", "tensor", "--direction", "H2D", "--method", "dma", "--repeats", "1", "--bytes", "4KiB"]
    assert cli.main(["bench", "--device", "host:0", "--quick", *only, "--size", "16", "--size", "4KiB"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kvswap: ")]
    assert said == ["kvswap: --size 16 is 16 bytes a block: a case may take minutes; 16KiB would be 16,384"]


def test_the_table_is_what_the_list_says(device_name: str, tmp_path: Path, capsys: Output) -> None:
    only = ["--shape", "tensor", "--size", "4KiB", "--size", "64KiB", "--direction", "h2d", "--method", "dma"]
    result = tmp_path / "bench.json"
    assert cli.main([*QUICK, "--device", device_name, *only, "--list"]) == 0
    listed = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert cli.main([*QUICK, "--device", device_name, *only, f"--json={result}"]) == 0
    found = read_json(result)
    assert listed == [row["key"] for row in found["rows"] + found["small_rows"]]
    small = ["small/64KiBx1/H2D/bare", "small/64KiBx1/H2D/dma"]
    assert listed == ["tensor/4KiB/H2D/dma", "tensor/64KiB/H2D/dma", *small]


def test_small_transfers_of_all_layers(device: kvswap.Device) -> None:
    """2 to 34 MB, each as a multiple of a bare copy of as many bytes in the same run."""
    methods, lines = ["dma", "loop"], []  # of which one is kvswap's
    plan = table.plan(device, quick=True, nbytes=12 << 20, families=["tensor"], sizes=[1 << 20], methods=methods)
    result = table.run(plan, lines.append)
    shapes = ["64 KiB x 1", "64 x 32 KiB x 1", "80 x 16 KiB x 8"]  # 64 x 8 KiB x 64 is more than a case has
    cells = [(shape, way, method) for shape in shapes for way in ("D2H", "H2D") for method in ("bare", "dma")]
    assert [(row.shape, row.direction, row.method) for row in result.small_rows] == cells
    assert {row.nbytes for row in result.small_rows} == {64 << 10, 2 << 20, 80 * (16 << 10) * 8}
    for bare, dma in zip(result.small_rows[::2], result.small_rows[1::2], strict=True):
        assert bare.times_bare == 1.0 and dma.times_bare == dma.p50_us / bare.p50_us
        assert (bare.path, dma.path) == ("", "dma")
    assert sum("64 x 32 KiB x 1  " in line for line in lines) == 4 and any("x bare" in line for line in lines)
    picked = table.plan(device, nbytes=64 << 10, families=["rows"], methods=["background"], directions=["D2H"])
    lines.clear()
    table.run(picked, lines.append)
    assert sum("background" in line and " took " in line for line in lines) == 2
    largest = [case.key for case in table.cases(table.plan(device, nbytes=32 << 20)) if case.key.endswith("bare")][-1]
    assert largest == "small/64x8KiBx64/H2D/bare"


def test_a_case_is_compared_with_a_bare_copy_of_as_many_bytes(device: kvswap.Device) -> None:
    nbytes = 100_000 * 656 * 2
    plan = table.plan(
        device, quick=True, nbytes=nbytes, families=["rows"], directions=["D2H"], methods=["direct", "dma"]
    )
    with measure.opened(device, 1) as lab:
        result = table.Result("", "", "", 0)
        result.bare_copies = {nbytes // 2: lab.bare_copies(nbytes // 2, 1)}  # and of no other number of bytes
        (row, *_) = [case.run(lab, result) for case in table.cases(plan) if case.key == "rows/656B/D2H/dma"]
    assert row.nbytes == nbytes // 2 and row.whole_share is not None


def test_a_wrong_byte_ends_it(device_name: str, capsys: Output) -> None:
    with testing.fault(kvswap.Device(device_name), "copy", "skip", nth=30):
        assert cli.main([*QUICK, "--device", device_name, "--method", "dma"]) == 1
    assert "WRONG BYTES: dma " in capsys.readouterr().err


BESIDE = ["--load", "stream", "--seconds", "0.05", "--pairs", "2"]


def test_no_bare_copy_that_ended_is_no_error() -> None:
    """In short windows of a busy machine none may."""
    copy = beside.Row("", "one copy", "D2H", 1, 4096, 1, slowdown=1.0, gbps=0.0)
    row = beside.compared(beside.Row("run", "dma", "D2H", 1, 4096, 1, slowdown=1.5, gbps=2.0), copy)
    assert (row.above_copy, row.of_copy) == (0.5, None)


def test_beside_a_load(device_name: str, tmp_path: Path, capsys: Output) -> None:
    result = tmp_path / "bench.json"
    shapes = ["--shape", "run", "--shape", "64x32k", "--size", "16KiB", "--size", "32KiB"]
    methods = ["--method", "dma", "--method", "triton"]
    options = [*BESIDE, *shapes, *methods, f"--json={result}"]
    for seconds in ("0.05", "0.2", "0.8"):  # of a window: on a busy machine no copy may end within a short one
        assert cli.main([*QUICK, "--bytes", "4MiB", "--device", device_name, *options, "--seconds", seconds]) == 0
        out = capsys.readouterr().out
        if all(row["gbps"] != 0 for row in read_json(result)["rows"]):
            break
    assert "above copy" in out and "of copy" in out and "one bare copy over the run, 6 windows: slow-down" in out
    found = read_json(result)
    assert (found["what"], found["load"], found["pairs"], found["wrong_bytes"]) == ("beside a load", "stream", 2, 0)
    cells = [("", "one copy")] + [(key, method) for key in ("run", "run", "64x32k") for method in ("dma", "triton")]
    assert [(row["layout"], row["method"]) for row in found["rows"]] == cells * 2
    assert [row["direction"] for row in found["rows"]] == ["D2H"] * 7 + ["H2D"] * 7
    assert [row["block_nbytes"] >> 10 for row in found["rows"][1:7]] == [16, 16, 32, 32, 32, 32]
    for row in found["rows"]:
        if row["method"] == "triton" and row["slowdown"] is None:
            assert row["note"]
            continue
        copy = found["rows"][0 if row["direction"] == "D2H" else 7]
        windows = 2 * (3 if row is copy else 1)  # the bare copy takes its turn in each of three shapes
        assert len(row["slowdowns"]) == len(row["rates"]) == windows
        assert row["gbps"] > 0 and row["gbps_alone"] > 0
        low, high = row["slowdown_interval"]
        assert 0 < low <= row["slowdown"] <= high
        assert row["above_copy"] == pytest.approx(row["slowdown"] - copy["slowdown"])
        assert row["of_copy"] == pytest.approx(row["gbps"] / copy["gbps"])
        assert row["path"] == ("dma" if row["method"] == "dma" else "")


def test_beside_a_load_each_layout_at_each_priority(device: kvswap.Device) -> None:
    plan = beside.plan(device, "step")
    assert [family.key for family, _ in plan.layouts] == list(LAYOUTS)
    assert plan.methods == ("auto", "background", "high") and plan.directions == ("D2H", "H2D")
    assert 2 * plan.about_seconds < 150  # of the windows alone, without what is filled and checked between them
    quick = beside.plan(device, "step", quick=True, nbytes=4 << 20, directions=["D2H"], seconds=0.05)
    result = beside.run(quick, lambda _: None)
    assert [row.method for row in result.rows] == ["one copy", "auto", "background", "high"]
    assert result.rows[0].path == ""
    assert all(row.path and "auto" not in row.path for row in result.rows[1:])  # what was taken, not asked for
    assert "decode step" in result.load_is or "stand-in for step" in result.load_is
    assert result.first_piece_seconds > 0 and result.last_piece_seconds > 0


def test_long_measurements_show_how_far_they_are(device: kvswap.Device) -> None:
    class Seen:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def __call__(self, done: int, total: int, what: str) -> None:
            self.calls.append((done, total))

        def clear(self) -> None:
            self.calls.append("clear")

    seen = Seen()
    plan = beside.plan(device, "stream", pairs=2, seconds=0.02, nbytes=4 << 20, families=["64x32k"], methods=["dma"])
    beside.run(plan, lambda _: None, seen)
    assert seen.calls == [(1, 4), (2, 4), (3, 4), (4, 4), "clear"] * 2
    seen.calls.clear()
    cases = table.plan(device, quick=True, nbytes=1 << 20, families=["run"], directions=["D2H"], methods=["auto"])
    table.run(cases, lambda _: None, seen)
    total = len(list(table.cases(cases)))
    assert seen.calls == [call for number in range(total) for call in ((number, total), "clear")] and total > 2


def test_a_load_that_stands_still_ends_the_copies(lab: measure.Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pieces wait until the copies pause, as tokens do behind a copy engine that serves another stream."""
    paused = threading.Event()

    class Waits(loads.Load):
        def queue(self) -> None:
            assert paused.wait(PATIENCE)

    def run_while(copies: beside._Copies, running: Callable[[], bool]) -> None:
        run(copies, running)
        calls.append(running)
        if len(calls) == 2:  # the first ends before the load begins
            paused.set()

    run, calls = beside._Copies.run_while, list[object]()
    monkeypatch.setattr(beside._Copies, "run_while", run_while)
    places = lab.places((Shape(1, 64 << 10),))
    job = measure.Job(lab, METHODS["dma"], places, [Direction.D2H])
    with ThreadPoolExecutor(1) as thread:
        found = beside._run_both(lab, Waits(lab.device, "waits", kvswap.Stream(lab.device)), job, 0.1, thread)
    assert found.stood_still and found.piece_seconds > 1.9  # two seconds, of which the load misses 0.01
    samples = beside._Samples()
    samples.add(found.piece_seconds / 0.1, found)
    row = samples.fill(beside.Row("", "one copy", "D2H", 1, 4096, 1))
    assert row.stood_still and beside.compared(row, row).above_copy is None


def test_copies_take_turns(device: kvswap.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that becomes slower all the time does so to the bare copy and to every method alike."""
    turns: list[str] = []
    monkeypatch.setattr(beside, "_warm_up", lambda *_: None)
    monkeypatch.setattr(beside, "_run_load", lambda *_: turns.append("load") or beside._Window(None, None, 0))
    monkeypatch.setattr(beside._Window, "piece_seconds", property(lambda _: 1.0 * len(turns)))

    def both(lab: measure.Lab, load: object, job: measure.Job, *_: object) -> beside.Beside:
        turns.append(job._what)
        return beside.Beside(1.0 * len(turns), 1.0, beside.Counter())

    monkeypatch.setattr(beside, "_run_both", both)
    plan = beside.plan(device, "stream", nbytes=4 << 20, families=["64x32k"], methods=["dma", "numpy"], pairs=2)
    result = beside.run(plan, lambda _: None)
    first = ["loop", "load", "dma", "load", "numpy", "load"]
    second = ["dma", "load", "numpy", "load", "loop", "load"]
    alone = ["load"] * beside._ALONE_WINDOWS
    assert turns == [*alone, *["load", *first, *second] * 2, *alone]
    assert [row.slowdown for row in result.rows] == [1.0] * 6


def test_what_is_refused_beside_a_load_is_left_out(device: kvswap.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the load that ran then has ended before the next window."""
    run_both, run_load, running = beside._run_both, beside._run_load, []

    def load_alone(*args: object) -> beside._Window:
        running.append(1)
        window = run_load(*args)
        assert len(running) == 1
        running.clear()
        return window

    def refuse(lab: measure.Lab, load: loads.Load, job: measure.Job, seconds: float, thread: object) -> object:
        if job._what == "dma":
            submit = job.submit

            def failing() -> object:
                if running:
                    raise kvswap.QueueFull("three in flight are too many")
                return submit()

            monkeypatch.setattr(job, "submit", failing)
        return run_both(lab, load, job, seconds, thread)

    monkeypatch.setattr(beside, "_run_load", load_alone)
    monkeypatch.setattr(beside, "_run_both", refuse)
    options = {"nbytes": 4 << 20, "families": ["64x32k"], "methods": ["dma", "loop"], "directions": ["H2D"]}
    result = beside.run(beside.plan(device, "stream", pairs=2, seconds=0.05, **options), lambda _: None)
    copy, dma, loop = result.rows
    assert (dma.note, dma.slowdown, dma.above_copy) == ("three in flight are too many", None, None)
    assert len(copy.slowdowns) == len(loop.slowdowns) == 2


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--pairs", "3"], "--pairs is for --load"),
        (["--load", "matmul", "--repeats", "2"], "--repeats is for the table"),
        (["--load", "decode", "--shape", "both"], "takes one direction at a time"),
        (["--load", "decode", "--shape", "64x32k", "--shape", "both"], "takes one direction at a time"),
        (["--load", "decode", "--shape", "64x32k", "--size", "8KiB"], "no --shape of 64x32k has blocks of such a size"),
        (["--bytes", "900TiB"], "is free: ask for fewer --bytes"),
        (["--size", "900TiB"], "is free: ask for fewer --bytes"),
        (["--json=/nowhere/at/all.json"], "--json /nowhere/at/all.json: No such file"),
        (["--device", "tpu:0"], "tpu:0"),
    ],
)
def test_wrong_usage(capsys: Output, options: list[str], complaint: str) -> None:
    device = [] if "--device" in options else ["--device", "host:0"]
    assert cli.main(["bench", "--quick", *device, *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("kvswap: ") and err.count("\n") == 1
    assert complaint in err


@pytest.mark.parametrize(
    "options",
    [
        ["--load", "matmul", "--list"],
        ["--load", "usb"],
        ["--method", "usb"],
        ["--shape", "usb"],
        ["--size", "0"],
        ["--bytes", "8 XB"],
        ["--load", "stream", "--seconds", "nan"],
        ["--repeats", "0"],
    ],
)
def test_wrong_usage_that_the_parser_sees(capsys: Output, options: list[str]) -> None:
    assert cli.main(["bench", *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith("kvswap: ") and err.endswith("Try 'kvswap bench --help'.\n")


def test_a_load_that_cannot_run_is_told(device: kvswap.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise NotMeasured("no such thing")

    monkeypatch.setattr(beside, "load_for", none)
    with pytest.raises(UsageError, match="--load matmul cannot run here: no such thing"):
        beside.run(beside.plan(device, "matmul", quick=True, nbytes=1 << 20), lambda _: None)
