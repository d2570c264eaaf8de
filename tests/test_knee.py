"""What path kernel costs a load beside it: the decision from measured rows, and how the rows are measured."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import pytest

import kvswap
from kvswap import _C, _knee, calibrate, testing
from kvswap._knee import Choice, Pair, Row
from kvswap._rig import Direction, Rig, Shape
from kvswap.replay.check import WrongBytes

# Beside a decode step, one H200 on PCIe 5: the bare copy, then path kernel by CTAs and pace.
H200: dict[Direction, list[Row]] = {
    "d2h": [
        Row("d2h", None, 55.4, (1.012,)),
        Row("d2h", Pair(2), 30.7, (1.003,)),
        Row("d2h", Pair(4, 40), 37.3, (1.027,)),
        Row("d2h", Pair(4, 46), 42.3, (1.043,)),
        Row("d2h", Pair(4, 50), 45.0, (1.132,)),
        Row("d2h", Pair(8, 46), 45.8, (1.208,)),
        Row("d2h", Pair(8), 50.8, (2.51,)),
    ],
    "h2d": [
        Row("h2d", None, 55.3, (1.050,)),
        Row("h2d", Pair(2), 25.6, (1.025,)),
        Row("h2d", Pair(4, 40), 39.4, (1.081,)),
        Row("h2d", Pair(4, 46), 40.7, (1.063,)),
        Row("h2d", Pair(4, 50), 41.8, (1.065,)),
        Row("h2d", Pair(8, 46), 45.7, (1.129,)),
        Row("h2d", Pair(8), 49.3, (1.150,)),
    ],
}
# Beside the load that stands in for it: 2 CTAs have four warps each, as calibrations run them.
STAND_IN: dict[Direction, list[Row]] = {
    "d2h": [
        Row("d2h", None, 54.6, (1.012,)),
        Row("d2h", Pair(1), 19.1, (1.022,)),
        Row("d2h", Pair(2, 27.5), 26.6, (1.038,)),
        Row("d2h", Pair(2, 35.8), 32.9, (1.094,)),
        Row("d2h", Pair(2), 27.1, (1.101,)),
        Row("d2h", Pair(4, 45.7), 43.6, (1.153,)),
        Row("d2h", Pair(8), 49.2, (2.530,)),
    ],
    "h2d": [
        Row("h2d", None, 55.0, (1.022,)),
        Row("h2d", Pair(1), 26.2, (1.040,)),
        Row("h2d", Pair(2, 27.6), 27.1, (1.068,)),
        Row("h2d", Pair(2, 35.9), 31.2, (1.085,)),
        Row("h2d", Pair(2), 32.4, (1.089,)),
        Row("h2d", Pair(4, 45.8), 44.6, (1.129,)),
        Row("h2d", Pair(8), 47.8, (1.219,)),
    ],
}
OTHERWISE = Choice(Pair(5, 17.0), Pair(3))
choose = functools.partial(_knee.choose, suffers=1.0)


def around(middle: float, spread: float) -> tuple[float, ...]:
    return tuple(middle + spread * step for step in (-2, -1, 0, 1, 2))


# -- the decision -----------------------------------------------------------------------------------------------------


def test_an_h200_takes_what_its_decode_step_hardly_feels() -> None:
    assert choose(H200["d2h"], OTHERWISE) == Choice(Pair(4, 46), Pair(2))
    assert choose(H200["h2d"], OTHERWISE) == Choice(Pair(4, 50), Pair(2))


def test_the_load_suffers_more_than_a_model() -> None:
    assert _knee.choose(STAND_IN["d2h"], OTHERWISE) == Choice(Pair(2, 35.8), Pair(2, 27.5))
    assert _knee.choose(STAND_IN["h2d"], OTHERWISE) == Choice(Pair(2), Pair(1))
    assert choose(STAND_IN["d2h"], OTHERWISE).normal == Pair(2, 27.5), "as if it were a model"


def test_the_order_of_rows_does_not_matter() -> None:
    for rows in H200.values():
        assert choose(rows[::-1], OTHERWISE) == choose(rows, OTHERWISE)


def test_the_careful_values_follow_the_link() -> None:
    """csrc/plan/cost_default.c has those of an H200, for where nothing was calibrated."""
    built_in = _C._costs_read(None)["tuning"]
    for direction, link, kernels in (
        ("d2h", 55.3, (built_in["kernel_normal_d2h"], built_in["kernel_background_d2h"])),
        ("h2d", 55.3, (built_in["kernel_normal_h2d"], built_in["kernel_background_h2d"])),
    ):
        careful, half = _knee.careful(direction, link, 132), _knee.careful(direction, link / 2, 132)
        for pair, halved, (ctas, pace, gbps) in zip(
            (careful.normal, careful.background), (half.normal, half.background), kernels, strict=True
        ):
            assert pair.ctas == halved.ctas == ctas
            assert pair.pace_gbps == pytest.approx(pace, rel=0.01)
            assert halved.pace_gbps == pytest.approx(pace / 2, rel=0.01)
            assert not pace or gbps <= pace
        assert _knee.careful(direction, link, 1, "why").normal == Pair(1, careful.normal.pace_gbps)


def test_the_limits_are_of_what_comes_on_top_of_the_bare_copy() -> None:
    for bare in (1.0, 1.2):
        rows = [
            Row("d2h", None, 50, (bare,)),
            Row("d2h", Pair(1), 10, (bare + _knee.BACKGROUND_EXTRA - 0.001,)),
            Row("d2h", Pair(2), 20, (bare + _knee.BACKGROUND_EXTRA + 0.001,)),
            Row("d2h", Pair(3), 30, (bare + _knee.NORMAL_EXTRA - 0.001,)),
            Row("d2h", Pair(4), 40, (bare + _knee.NORMAL_EXTRA + 0.001,)),
            Row("d2h", Pair(8), 45, (bare + 1,)),
        ]
        assert choose(rows, OTHERWISE) == Choice(Pair(3), Pair(1))
    assert _knee.BACKGROUND_EXTRA < _knee.NORMAL_EXTRA < 0.05, "a model is promised 0.05"


def test_the_fastest_counts_not_the_most_ctas() -> None:
    rows = [
        Row("d2h", None, 50, (1.0,)),
        Row("d2h", Pair(2), 31, (1.0,)),
        Row("d2h", Pair(8, 30), 30, (1.0,)),
        Row("d2h", Pair(8), 50, (3.0,)),
    ]
    assert choose(rows, OTHERWISE).normal == Pair(2)


def careful_because(rows: list[Row], why: str) -> None:
    choice = choose(rows, OTHERWISE)
    assert (choice.normal, choice.background) == (OTHERWISE.normal, OTHERWISE.background)
    assert why in choice.note and choice.note.endswith("careful values")


def test_what_tells_nothing_leaves_the_careful_values() -> None:
    d2h = H200["d2h"]
    careful_because([], "nothing was measured")
    careful_because(d2h[:1], "nothing was measured")
    careful_because(d2h[1:], "nothing was measured")
    careful_because(d2h[:4], "no pace costs the load 0.05 more")  # it goes on as if there was no kernel
    careful_because([Row("d2h", None, 55, around(1.012, 0.05)), *d2h[1:]], "beside one bare copy is known to 0.0")
    noisy = [Row("d2h", row.pair, row.gbps, around(row.slowdown, 0.1)) for row in d2h[1:]]
    careful_because([d2h[0], *noisy], "varies too much")


def test_noise_of_the_size_of_a_gpus_changes_nothing() -> None:
    for rows in H200.values():
        noisy = [Row(row.direction, row.pair, row.gbps, around(row.slowdown, 0.006)) for row in rows]
        assert choose(noisy, OTHERWISE) == choose(rows, OTHERWISE)


def test_a_pair_that_cannot_be_told_from_noise_is_not_taken() -> None:
    rows = [
        Row(row.direction, row.pair, row.gbps, around(row.slowdown, 0.1 if row.pair == Pair(4, 46) else 0.001))
        for row in H200["d2h"]
    ]
    assert choose(rows, OTHERWISE) == Choice(Pair(4, 40), Pair(2))


def test_where_nothing_is_gentle_enough_the_gentlest_is_taken() -> None:
    rows = [
        Row("h2d", None, 55, (1.0,)),
        Row("h2d", Pair(1), 10, (1.02,)),
        Row("h2d", Pair(2), 20, (1.3,)),
    ]
    choice = choose(rows, OTHERWISE)
    assert (choice.normal, choice.background) == (Pair(1), Pair(1))
    assert choice.note == "background costs the load 0.020 more than one bare copy, not 0.01 at most"
    choice = choose([rows[0], rows[2]], OTHERWISE)
    assert (choice.normal, choice.background) == (Pair(2), Pair(2))
    assert "normal costs the load 0.300 more" in choice.note


def test_pairs_fit_the_device() -> None:
    pairs = _knee.pairs(50.0, 132)
    assert Pair(2) in pairs and Pair(8) in pairs and Pair(4, 41.5) in pairs
    assert all(pair.pace_gbps < 50 for pair in pairs) and len(set(pairs)) == len(pairs)
    assert _knee.pairs(50.0, 1) == _knee.pairs(50.0, 0) == [Pair(1)]


# -- measuring --------------------------------------------------------------------------------------------------------


class Script:
    """A load and jobs that take no time. Notes what runs when; with a job, a window takes what the job costs."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.running = ""
        self.drift = 1.0

    def seconds(self, meanwhile: Callable[[], None]) -> float:
        self.running = ""
        meanwhile()
        self.log.append(self.running or "alone")
        self.drift *= 1.01  # as a GPU that grows warm
        return {"": 1.0, "bare": 1.01, "kernel": 1.5}[self.running] * self.drift


class Job:
    nbytes = 1 << 30

    def __init__(self, script: Script, name: str) -> None:
        self.script, self.name = script, name
        self.filled = self.checked = 0

    def fill(self) -> None:
        self.filled += 1

    def check(self) -> None:
        self.checked += 1

    def submit(self) -> _C.Transfer:
        self.script.running = self.name
        return Done()  # type: ignore[return-value]


class Done:
    elapsed = 0.02

    def done(self) -> bool:
        return True

    def wait(self, timeout: float) -> None:
        pass


def test_windows_alternate_and_every_round_is_verified() -> None:
    script = Script()
    jobs = {("d2h", None): Job(script, "bare"), ("d2h", Pair(8)): Job(script, "kernel")}
    (*_, rows) = _knee.measure(jobs, script.seconds, time.monotonic() - 1)  # type: ignore[arg-type]
    rounds = _knee._LEAST_ROUNDS
    assert script.log == ["alone", *(["bare", "alone", "kernel", "alone"] * rounds)]
    assert [job.filled for job in jobs.values()] == [job.checked for job in jobs.values()] == [rounds, rounds]
    assert [(row.direction, row.pair) for row in rows] == list(jobs)
    assert rows[0].slowdown == pytest.approx(1.01, rel=1e-3)  # whatever the drift
    assert rows[1].slowdown == pytest.approx(1.5, rel=1e-3)
    assert [len(row.slowdowns) for row in rows] == [rounds, rounds]
    assert rows[0].gbps == pytest.approx((1 << 30) / 0.02 / 1e9)


def test_rounds_end_by_themselves() -> None:
    script = Script()
    jobs = {("h2d", None): Job(script, "bare")}
    rounds = list(_knee.measure(jobs, script.seconds, time.monotonic() + 600))  # type: ignore[arg-type]
    assert len(rounds) == _knee._MOST_ROUNDS


@pytest.fixture
def rig(device: kvswap.Device) -> Rig:
    stream = kvswap.Stream(device)
    device.set_compute_stream(stream)
    return Rig(device, stream)


def test_copies_run_beside_the_load_and_are_verified(device: kvswap.Device, rig: Rig) -> None:
    load = _knee.Load(device, 8 << 20, 4 << 20)
    try:
        shape = Shape(1, 32 << 10, 16)
        job = rig.job("kernel", "d2h", shape, 1, 5.0)
        seconds, gbps = _knee.beside(job, load.seconds)
        assert 0 < seconds < 10
        assert 0 < gbps <= 5.1, "the pace"
        assert rig.bytes_verified == shape.nbytes
        seconds, gbps = _knee.beside(rig.copy_job("h2d", 1 << 20), load.seconds)
        assert seconds > 0 and gbps > 0 and rig.bytes_verified == shape.nbytes + (1 << 20)
    finally:
        load.close()
        rig.close()


def test_wrong_bytes_beside_the_load_end_it() -> None:
    device = kvswap.Device("host:0")
    stream = kvswap.Stream(device)
    device.set_compute_stream(stream)
    rig = Rig(device, stream)
    try:
        job = rig.job("dma", "d2h", Shape(1, 32 << 10, 16))
        with (
            testing.fault(device, "copy", "skip", nth=5, every=16),
            pytest.raises(WrongBytes, match="dma d2h, 32 KiB a block: block 4"),
        ):
            _knee.beside(job, lambda meanwhile: 1.0)  # the copies that run before it
    finally:
        rig.close()
        device.set_compute_stream(0)


def test_all_of_it_on_a_host_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With so little work that its figures say nothing: every cell has its row, and every direction its choice."""
    device = kvswap.Device("host:0")
    stream = kvswap.Stream(device)
    device.set_compute_stream(stream)
    rig = Rig(device, stream)
    rig.moved = 1 << 20
    monkeypatch.setattr(_knee, "Load", functools.partial(_knee.Load, launch_nbytes=1 << 20, buffer_nbytes=1 << 20))
    monkeypatch.setattr(_knee, "_WINDOW_SECONDS", 1e-3)
    result = calibrate.Result("host:0", "a host", {"d2h": {}, "h2d": {}, "tuning": {}})
    links: dict[Direction, float] = {"d2h": 6.0, "h2d": 5.0}
    result.choices = {direction: _knee.careful(direction, link, 2) for direction, link in links.items()}
    try:
        calibrate._choose(rig, result, links, time.monotonic(), lambda *_: None)
    finally:
        rig.close()
        device.set_compute_stream(0)
    cells = [(d, pair) for d, link in links.items() for pair in [None, *_knee.pairs(link, int(device.info["sms"]))]]
    assert [(row.direction, row.pair) for row in result.knee] == cells
    assert all(row.slowdown > 0 and row.gbps > 0 for row in result.knee)
    assert rig.bytes_verified == len(cells) * _knee._LEAST_ROUNDS << 20
    assert result.choices.keys() == links.keys()


# -- in a calibration -------------------------------------------------------------------------------------------------


class Fake:
    """What calibrate needs of a rig, on a GPU that is not there."""

    class device:
        kind, info, lost = "cuda", {"sms": 132}, False

    moved, kernel_ctas = 64 << 20, 8

    def __init__(self) -> None:
        self.measured: list[tuple[str, int, float]] = []

    def measure(self, path: str, direction: str, shape: Shape, repeats: int, ctas: int, pace: float) -> float:
        self.measured.append((direction, ctas, pace))
        return shape.nbytes / 1e9 / (pace or 25.0)

    def job(self, *args: object) -> object:
        return object()

    copy_job = job


def tuned(rig: Fake, seconds: float) -> calibrate.Result:
    tuning: _C._Tuning = {"link_gbps_d2h": 55.4, "link_gbps_h2d": 55.3, "kernel_high_d2h": (8, 0.0, 0.0)}
    result = calibrate.Result("fake:0", "a fake", {"d2h": {}, "h2d": {}, "tuning": tuning})
    calibrate._measure_knee(rig, result, time.monotonic() + seconds, lambda *_: None)  # type: ignore[arg-type]
    return result


def fake_load(monkeypatch: pytest.MonkeyPatch, rows: dict[Direction, list[Row]]) -> None:
    class Load:
        seconds = None

        def __init__(self, device: object) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(_knee, "Load", Load)
    monkeypatch.setattr(_knee, "measure", lambda jobs, *_: iter([[*rows["d2h"], *rows["h2d"]]]))


def test_a_calibration_stores_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_knee, "LOAD_SUFFERS", 1.0)  # the rows are a decode step's
    fake_load(monkeypatch, H200)
    rig = Fake()
    result = tuned(rig, 10)
    tuning = result.costs["tuning"]
    assert tuning["kernel_normal_d2h"] == (4, 46, 46.0)
    assert tuning["kernel_normal_h2d"] == (4, 50, 50.0)
    assert tuning["kernel_background_d2h"] == tuning["kernel_background_h2d"] == (2, 0.0, 25.0)
    assert sorted(rig.measured) == [("d2h", 2, 0.0), ("d2h", 4, 46), ("h2d", 2, 0.0), ("h2d", 4, 50)]
    lines = calibrate.summary(result).splitlines()
    assert "4 CTAs at 46.0 GB/s      d2h    42.3      1.043   0.031  normal" in lines
    assert "2 CTAs unpaced           h2d    25.6      1.025  -0.025  background" in lines
    assert "one bare copy            h2d    55.3      1.050" in lines
    assert "kernel   normal     4 CTAs at 46.0 GB/s (46.0) d2h, 4 CTAs at 50.0 GB/s (50.0) h2d" in lines
    assert not any(line.startswith("knee") for line in lines)


def test_a_calibration_says_why_it_is_careful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_knee, "LOAD_SUFFERS", 1.0)  # the rows are a decode step's
    fake_load(monkeypatch, {"d2h": H200["d2h"][:4], "h2d": H200["h2d"]})
    result = tuned(Fake(), 10)
    assert result.costs["tuning"]["kernel_normal_d2h"][:2] == (2, round(0.77 * 55.4, 3))
    assert result.costs["tuning"]["kernel_normal_h2d"][:2] == (4, 50), "the other direction has its own knee"
    assert "knee     d2h: no pace costs the load 0.05 more than one bare copy does: careful values" in (
        calibrate.summary(result)
    )
    short = tuned(Fake(), 1)
    assert short.knee == [] and short.choices["h2d"].note == "no time to measure it: careful values"
    assert short.costs["tuning"]["kernel_normal_h2d"][:2] == (2, 0.0)

    class Full:
        def __init__(self, device: object) -> None:
            raise MemoryError("no room")

    monkeypatch.setattr(_knee, "Load", Full)
    result = tuned(Fake(), 10)
    assert result.choices["d2h"].note == "no load to measure it by (no room): careful values"
    assert result.costs["tuning"]["kernel_background_d2h"] == (2, 27.7, 27.7)


def test_a_host_device_has_no_knee(device_name: str) -> None:
    if not device_name.startswith("host"):
        pytest.skip("of host devices")
    result = calibrate.calibrate(kvswap.Device(device_name), time.monotonic())
    assert result.knee == []
    assert "knee     d2h: no SMs to share with a model" in calibrate.summary(result)
    tuning = result.costs["tuning"]
    assert tuning["kernel_normal_d2h"] == tuning["kernel_background_h2d"] == tuning["kernel_high_d2h"]


def test_a_gpu_has_one(cuda: kvswap.Device) -> None:
    """The load suffers at full speed, and what was chosen keeps to the limits."""
    result = calibrate.calibrate(cuda, time.monotonic() + 10)
    assert {row.direction for row in result.knee} == {"d2h", "h2d"}
    for direction in result.choices:
        rows = {row.pair: row for row in result.knee if row.direction == direction}
        normal = rows.get(result.choices[direction].normal)
        if not result.choices[direction].note:
            assert normal is not None and normal.slowdown <= rows[None].slowdown + _knee.NORMAL_EXTRA
