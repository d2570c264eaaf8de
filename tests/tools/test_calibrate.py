"""kvswap calibrate: what it stores and where, what it makes of what it measured, and when it stores nothing."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import stat
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, bindings, run_python

import kvswap
from kvswap import _C, _rig, _together, calibrate, cli, testing
from kvswap.calibrate import DIRECTIONS, PATHS, SIZES, Point, Shape
from kvswap.commands import calibrate as command

pytestmark = pytest.mark.not_sanitized("measures, and measures the sanitizer")

Output = pytest.CaptureFixture[str]
MOVED = 64 << 20  # as on a GPU
REFUSE = command.refuse_host_device


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and none of the variables that a calibration minds."""
    for name in ("KVSWAP_CALIBRATION", *calibrate._UNWANTED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "refuse_host_device", lambda device: None)  # as the tests run where there is no GPU
    return tmp_path / "cache"


def stored(device: str) -> Path:
    info = kvswap.Device(device).info
    return Path(_C._costs_path(_C._costs_what(info["name"], info["driver"])))


def predicted(costs: _C._Costs, point: Point) -> float:
    """Seconds, as the planner has them."""
    shape = point.shape
    numbers = {"copies": shape.rows, "rows": shape.rows, "runs": 1 if shape.together else shape.blocks}
    numbers |= {"rects": shape.blocks, "rect_rows": shape.rows, "rect_nbytes": shape.nbytes, "pieces": shape.rows}
    if shape.apart:
        numbers |= {"apart_rows": shape.rows, "apart_nbytes": shape.nbytes}
    if shape.skew:
        numbers |= {"skew_pieces": shape.rows, "skew_nbytes": shape.nbytes}
    return bindings.costs_predict(costs, point.path, point.direction, shape.nbytes, **numbers) / 1e9


def costs_of_all() -> _C._Costs:
    """The built-in costs; of a path that has none yet, those of `direct`."""
    costs = _C._costs_read(None)
    for of_direction in costs["d2h"], costs["h2d"]:
        for path in PATHS:
            of_direction.setdefault(path, copy.deepcopy(of_direction["direct"]))
    return costs


def all_points() -> list[Point]:
    return [p for path in PATHS for direction in DIRECTIONS for p in calibrate.points(path, direction, MOVED)]


# -- the command ------------------------------------------------------------------------------------------------------


def test_a_host_device_is_refused(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to do, before anything is measured; --show measures nothing."""
    monkeypatch.setattr(command, "refuse_host_device", REFUSE)
    monkeypatch.setattr(calibrate, "calibrate", None)
    assert cli.main(["calibrate", "--device", "host:0"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "host:0 is a host device" in err and "--device cuda:N" in err
    assert cli.main(["calibrate", "--device", "host:0", "--show"]) == 0


def test_json(cache: Path, tmp_path: Path, device_name: str, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that is made; --output counts more than the variable."""
    file = tmp_path / "new" / "costs.txt"
    monkeypatch.setenv("KVSWAP_CALIBRATION", str(tmp_path / "by variable.txt"))
    assert cli.main(["calibrate", "--device", device_name, "--seconds", "0.01", "--output", str(file), "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["command"], found["file"], found["wrong_bytes"]) == ("calibrate", str(file), 0)
    assert found["costs"]["d2h"]["dma"] == _C._costs_read(file)["d2h"]["dma"] and found["bytes_verified"] > 0
    assert f"stored in {file}" in err
    assert not cache.exists() and os.listdir(tmp_path) == ["new"]
    monkeypatch.delenv("KVSWAP_CALIBRATION")
    assert cli.main(["calibrate", "--device", device_name, "--show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["file"] is None and shown["costs"]["h2d"].keys() == _C._costs_read(None)["h2d"].keys()


def test_it_stores_what_it_finds(device_name: str, cache: Path, capsys: Output) -> None:
    assert cli.main(["calibrate", "--device", device_name, "--seconds", "0.2"]) == 0
    out = capsys.readouterr().out
    path = stored(device_name)
    assert path.parent == cache / "kvswap" and f"stored in {path}" in out
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == [path.name]
    costs = _C._costs_read(path)
    expected = set(PATHS) if device_name.startswith("host") else set(PATHS) - {"direct"}
    for found in (costs["d2h"], costs["h2d"]):
        assert found.keys() - {"burst"} == expected - {"burst"}
        for path_name, cost in found.items():
            assert len(cost["each"]) == len(SIZES)
            # What a busy machine measures in a fifth of a second may leave all to any of them.
            assert max(cost["start"], cost["extra"], *cost["each"], *cost["run"]) > 0 or path_name == "burst", path_name
    tuning = costs["tuning"]
    assert len(tuning) == 8
    assert min(tuning["link_gbps_d2h"], tuning["link_gbps_h2d"]) > 0
    for name, link in (("d2h", tuning["link_gbps_d2h"]), ("h2d", tuning["link_gbps_h2d"])):
        normal, high, background = (tuning[f"kernel_{way}_{name}"] for way in ("normal", "high", "background"))
        assert high[0] >= normal[0] >= 1 and high[0] >= background[0] >= 1
        assert high[1] == 0 and 0 <= normal[1] < link and 0 <= background[1] < link
        assert normal[2] == 0, "whose costs say what it reaches"
    assert "0 wrong bytes" in out and "interpolated for want of time" in out
    assert calibrate.table(costs) in out


def test_show(device_name: str, capsys: Output) -> None:
    assert cli.main(["calibrate", "--device", device_name, "--show"]) == 0
    out = capsys.readouterr().out
    assert calibrate.table(_C._costs_of(kvswap.Device(device_name))) in out
    assert f"built in, since there is no {stored(device_name)}" in out
    costs = _C._costs_read(None)
    costs["d2h"]["dma"]["start"] = 123456.0
    _C._costs_write(stored(device_name), costs, "a machine")
    assert cli.main(["calibrate", "--device", device_name, "--show"]) == 0
    out = capsys.readouterr().out
    assert out == f"{calibrate.table(costs)}\n{stored(device_name)}\n"
    assert " 123.5 " in out


def test_the_variable_says_where(
    device_name: str, tmp_path: Path, cache: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured is the same (test_json)."""
    costs = {**_C._costs_read(None), "tuning": _C._costs_of(kvswap.Device(device_name))["tuning"]}
    monkeypatch.setattr(calibrate, "calibrate", lambda *_: calibrate.Result(device_name, "a device", costs))
    file = tmp_path / "by variable.txt"
    monkeypatch.setenv("KVSWAP_CALIBRATION", str(file))
    assert cli.main(["calibrate", "--device", device_name]) == 0
    assert f"stored in {file}" in capsys.readouterr().out
    assert not cache.exists() and _C._costs_read(file)["d2h"].keys() == costs["d2h"].keys()
    assert cli.main(["calibrate", "--show", "--output", str(file)]) == 0
    assert capsys.readouterr().out.endswith(f"{file}\n")


def test_wrong_bytes_end_it_and_nothing_is_stored(cache: Path, capsys: Output) -> None:
    device = kvswap.Device("host:0")
    for old in (None, b"an old one\n"):
        if old is not None:
            stored("host:0").parent.mkdir(parents=True, exist_ok=True)
            stored("host:0").write_bytes(old)
        with testing.fault(device, "copy", "skip", nth=20):
            assert cli.main(["calibrate", "--device", "host:0", "--seconds", "0.01"]) == 1
        out, err = capsys.readouterr()
        assert err.startswith("kvswap: WRONG BYTES: ") and "nothing is stored" in err
        assert out == ""
        assert stored("host:0").read_bytes() == old if old is not None else not stored("host:0").exists()


def test_a_refused_copy_ends_it_and_nothing_is_stored(cache: Path, capsys: Output) -> None:
    with testing.fault(kvswap.Device("host:0"), "copy", "fail", nth=20):
        assert cli.main(["calibrate", "--device", "host:0", "--seconds", "0.01"]) == 3
    assert capsys.readouterr().err.startswith("kvswap: ")
    assert not stored("host:0").exists()


@pytest.mark.parametrize("variable", calibrate._UNWANTED)
def test_what_is_set_for_one_run_is_not_stored_for_all(
    variable: str, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "calibrate", None)
    monkeypatch.setenv(variable, "1")
    assert cli.main(["calibrate", "--device", "host:0"]) == 2
    assert f"{variable} is set" in capsys.readouterr().err
    monkeypatch.setenv(variable, "")
    calibrate.check_environment()


def test_wrong_usage(tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found before anything is measured."""
    monkeypatch.setattr(calibrate, "calibrate", None)
    (tmp_path / "file").write_text("x")
    for options, complaint in (
        (["--output", "/proc/nowhere/at/all.txt"], "/proc/nowhere"),
        (["--output", str(tmp_path)], "cannot be stored there"),
        (["--output", str(tmp_path / "file" / "x.txt")], "file"),
        (["--show", "--output", str(tmp_path / "none.txt")], "there is no such file"),
        (["--show", "--output", str(tmp_path / "file")], "line 1"),
        (["--device", "tpu:0"], "tpu:0"),
    ):
        assert cli.main(["calibrate", "--device", "host:0", *options]) == 2
        err = capsys.readouterr().err
        assert err.startswith("kvswap: ") and complaint in err
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["calibrate", "--device", "host:0"]) == 2
    assert "set HOME, XDG_CACHE_HOME or KVSWAP_CALIBRATION" in capsys.readouterr().err
    assert cli.main(["calibrate", "--seconds", "0"]) == 2


# -- several links at once --------------------------------------------------------------------------------------------


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices that are measured together; the costs of one are not measured, and the sums are unknown."""
    names = ["host:0", "host:1"]
    monkeypatch.setattr(command, "devices_together", lambda device: names)
    monkeypatch.setattr(calibrate, "calibrate", lambda *_: calibrate.Result("host:0", "a device", _C._costs_read(None)))
    return names


def test_the_links_of_several_devices(several: list[str], capsys: Output) -> None:
    assert cli.main(["calibrate", "--device", "host:0", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    tuning, (together,) = _C._costs_read(stored("host:0"))["tuning"], found["together"]
    assert tuning["host_links"] == together["links"] == 2 and found["together_note"] is None
    assert (tuning["host_gbps_d2h"], tuning["host_gbps_h2d"]) == (together["d2h"], together["h2d"])
    assert tuning["host_gbps_both"] == together["both"] > 0
    for way in ("d2h", "h2d"):  # of figures with three digits
        assert 0 < 2 * together[f"{way}_least"] <= together[way] + 0.002
    assert found["bytes_verified"] == 2 * 2 * _together.PLACES * _together.PLACE["host"]
    assert "2 links at once: D2H " in err and "2 links    D2H " in err


@pytest.mark.parametrize("names", [["host:0"], ["host:0", "host:1"]])
def test_sums_that_are_not_measured_stay(several: list[str], capsys: Output, names: list[str]) -> None:
    """Where one device is seen alone, or another one cannot be used."""
    costs = _C._costs_read(None)
    costs["tuning"] |= {"host_links": 4, "host_gbps_d2h": 156.0, "host_gbps_both": 201.0}
    _C._costs_write(stored("host:0"), costs, "a machine")
    several[:] = names
    with testing.fault(kvswap.Device(names[-1]), "call", "fail", operation="alloc"):
        assert cli.main(["calibrate", "--device", "host:0"]) == 0
    assert ("were not measured at once: " in capsys.readouterr().out) == (len(names) > 1)
    assert _C._costs_read(stored("host:0")) == costs


def test_wrong_bytes_of_one_of_several(several: list[str], capsys: Output) -> None:
    with testing.fault(kvswap.Device("host:1"), "copy", "skip", every=1):
        assert cli.main(["calibrate", "--device", "host:0"]) == 1
    assert "WRONG BYTES: d2h of host:1 with others at once" in capsys.readouterr().err
    assert not stored("host:0").exists()


def test_how_many_links_are_measured_at_once() -> None:
    assert [_together.numbers(count) for count in (2, 3, 4, 5, 8)] == [[2], [2, 3], [2, 4], [2, 4, 5], [2, 4, 8]]


# -- what is measured -------------------------------------------------------------------------------------------------


def test_the_plan_fits_and_says_what_it_claims() -> None:
    for point in all_points():
        shape = point.shape
        assert 1 <= shape.rows <= 8192
        # Every other slot: at most all of the memory, which is four times as much as most move.
        assert shape.nbytes <= (2 if point.path == "burst" else 1) * MOVED
        if point.kind in ("each", "run"):
            assert shape.row_nbytes == SIZES[point.index]
            assert shape.together == (point.kind == "each" and point.path == "burst")
            assert shape.apart == (point.kind == "run" and point.path == "strided")
            assert shape.skew == (point.kind == "run" and point.path == "kernel")
        if point.path == "burst" and point.kind == "extra":
            assert shape.nbytes == calibrate._SLOT, "it fills a slot, and no more"
        if point.path == "strided":
            assert shape.tensors > 1, "one tensor is no rows"
    assert all(2 * _rig.MOVED[kind] <= _rig.AREA[kind] for kind in ("cuda", "host"))


class Rig:
    """Takes no time, and knows what each transfer costs."""

    area, moved, bytes_verified = 1 << 30, MOVED, 0

    def __init__(self, costs: _C._Costs, refused: dict[str, int] | None = None) -> None:
        self.kernel_runs: dict[str, tuple[int, float]] = {}
        self.costs, self.refused = costs, refused or {}
        self.device = kvswap.Device("host:0")
        self.asked: list[tuple[str, str, Shape]] = []

    def measure_link(self, direction: str) -> float:
        return self.area / {"d2h": 50e9, "h2d": 40e9}[direction]

    def measure(
        self,
        path: str,
        direction: str,
        shape: Shape,
        repeats: int,
        max_ctas: int | None = None,
        pace_gbps: float | None = None,
    ) -> float:
        assert repeats >= 3
        self.asked.append((path, direction, shape))
        if shape.row_nbytes >= self.refused.get(path, sys.maxsize):
            raise calibrate.Unavailable("because")
        return predicted(self.costs, Point(path, direction, "each", 0, shape))  # type: ignore[arg-type]


def found_by(rig: Rig, seconds: float) -> calibrate.Result:
    result = calibrate.Result("fake:0", "a fake", {"d2h": {}, "h2d": {}, "tuning": {}})
    calibrate._measure_points(rig, result, time.monotonic() + seconds, lambda done, total, what: None)  # type: ignore[arg-type]
    return result


def test_without_time_every_path_is_still_known() -> None:
    costs = costs_of_all()
    result = found_by(Rig(costs), -1)
    assert {(point.path, point.direction) for point in result.seconds} == set(itertools.product(PATHS, DIRECTIONS))
    assert result.skipped > 100
    found = calibrate.solve(result.seconds)
    assert found["d2h"].keys() == found["h2d"].keys() == set(PATHS)
    for point, seconds in result.seconds.items():
        near = 6e-2 if point.path == "burst" else 1e-2  # of whose two sides the faster is only bounded
        assert predicted(found, point) == pytest.approx(seconds, rel=near)


def test_with_time_everything_is_measured() -> None:
    result = found_by(Rig(costs_of_all()), 60)
    assert result.skipped == 0 and set(result.seconds) == set(all_points())


def test_a_path_that_is_not_there_is_unknown() -> None:
    rig = Rig(costs_of_all(), {"kernel": 1, "burst": 1})
    result = found_by(rig, 60)
    assert result.unavailable == {"kernel": "because", "burst": "because"}
    assert len([1 for path, *_ in rig.asked if path == "kernel"]) == 1, "asked again"
    result.costs = calibrate.solve(result.seconds)
    assert result.costs["d2h"].keys() == result.costs["h2d"].keys() == set(PATHS) - {"kernel", "burst"}
    result.costs["tuning"] = calibrate._measure_tuning(rig, lambda done, total, what: None)  # type: ignore[arg-type]
    assert result.costs["tuning"] == {"link_gbps_d2h": 50, "link_gbps_h2d": 40}
    assert rig.kernel_runs == {}
    asked = len(rig.asked)
    calibrate._measure_kernels(rig, result.costs["tuning"], lambda done, total, what: None)  # type: ignore[arg-type]
    assert len(result.costs["tuning"]) == 2 and len(rig.asked) == asked, "there is no kernel"
    assert "kernel   not available: because" in calibrate.summary(result)
    assert math.isinf(bindings.costs_predict(result.costs, "kernel", "d2h", 4096, rows=1))


def test_a_size_that_is_refused_is_taken_from_its_neighbours() -> None:
    costs = _C._costs_read(None)
    found = calibrate.solve(found_by(Rig(costs, {"strided": 1 << 20}), 60).seconds)
    each, truth = found["h2d"]["strided"]["each"], costs["h2d"]["strided"]["each"]
    assert each[:11] == pytest.approx(truth[:11], rel=1e-3)
    assert each[11:] == pytest.approx([2 * each[10], 4 * each[10], 8 * each[10]])


@pytest.mark.parametrize("path", PATHS)
def test_costs_are_found_again(path: str) -> None:
    """What was predicted from random costs leads back to them."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        per_byte, extra, start, run = (
            1 / rng.uniform(10, 60),
            rng.uniform(10, 2000),
            rng.uniform(1e3, 1e5),
            rng.uniform(100, 3e3),
        )
        if path == "burst":
            extra /= 20  # of a row, which costs less than a run
        each = [round(extra + size * per_byte, 3) for size in SIZES]
        runs = {
            "strided": [round(extra + size * per_byte * 1.2, 3) for size in SIZES],
            "kernel": [round(extra + size * per_byte * 1.3, 3) for size in SIZES],
            "burst": [round(run + size * per_byte, 3) for size in SIZES],
        }
        cost: _C._PathCost = {
            "start": round(start, 3),
            "extra": round(run, 3) if path in ("dma", "strided", "burst") else 0.0,
            "each": each,
            "run": runs.get(path, []),
        }
        costs: _C._Costs = {"d2h": {path: cost}, "h2d": {}, "tuning": {}}
        seconds = {p: predicted(costs, p) for p in all_points() if (p.path, p.direction) == (path, "d2h")}
        found = calibrate.solve(seconds)["d2h"][path]
        if path != "burst":  # of which only what it is bound by shows: each path of it in its own transfers
            assert found["start"] == pytest.approx(cost["start"], rel=1e-2)
            assert found["extra"] == pytest.approx(cost["extra"], rel=1e-2)
            assert found["each"] == pytest.approx(cost["each"], rel=1e-2)
            assert found["run"] == pytest.approx(cost["run"], rel=1e-2)
        both: _C._Costs = {"d2h": {path: found}, "h2d": {}, "tuning": {}}
        for point, took in seconds.items():
            assert predicted(both, point) == pytest.approx(took, rel=1e-2)


@pytest.mark.parametrize("gbps", [60, 300, 1500])
def test_a_burst_shorter_than_those_measured(gbps: float) -> None:
    """Where the link takes longer than the gathering, long transfers do not show how long the gathering takes."""
    truth: _C._PathCost = {
        "start": 29000.0,
        "extra": 12000.0,
        "each": [round(size / gbps, 3) for size in SIZES],
        "run": [round(900 + size / 55, 3) for size in SIZES],
    }
    costs: _C._Costs = {"d2h": {"burst": truth}, "h2d": {}, "tuning": {}}
    seconds = {p: predicted(costs, p) for p in all_points() if (p.path, p.direction) == ("burst", "d2h")}
    found: _C._Costs = {"d2h": {"burst": calibrate.solve(seconds)["d2h"]["burst"]}, "h2d": {}, "tuning": {}}
    for row, blocks in ((3 << 10, 40), (16 << 10, 8), (64 << 10, 4)):
        point = Point("burst", "d2h", "each", 0, Shape(80, row, blocks))
        assert predicted(found, point) == pytest.approx(predicted(costs, point), rel=0.05)


def test_no_noise_makes_a_cost_negative() -> None:
    rng = np.random.default_rng(4)
    for _ in range(20):
        found = calibrate.solve({point: float(rng.uniform(0, 1e-3)) for point in all_points()})
        for cost in [*found["d2h"].values(), *found["h2d"].values()]:
            assert min(cost["start"], cost["extra"], *cost["each"], *cost["run"]) >= 0
        bindings.costs_predict(found, "dma", "d2h", 1, copies=1)  # which refuses what is negative


def test_runs_of_a_burst_are_copies() -> None:
    """Measured slower than those of path dma, they are taken to be as fast."""
    costs = costs_of_all()
    dma, burst = costs["d2h"]["dma"]["each"], costs["d2h"]["burst"]
    slow = copy.deepcopy(costs)
    slow["d2h"]["burst"]["run"] = [2 * ns for ns in burst["run"]]
    seconds = {p: predicted(slow, p) for p in all_points()}
    assert calibrate.solve(seconds)["d2h"]["burst"]["run"] == pytest.approx(dma, rel=0.02)
    alone = {p: took for p, took in seconds.items() if p.path != "dma"}
    assert calibrate.solve(alone)["d2h"]["burst"]["run"] == pytest.approx(slow["d2h"]["burst"]["run"], rel=0.02)


def test_sizes_between_are_as_the_planner_has_them() -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        indices = sorted({int(i) for i in rng.integers(0, len(SIZES), 5)})
        values = {i: float(rng.uniform(1, 1e6)) for i in indices}
        filled = calibrate.fill(values)
        assert all(filled[i] == pytest.approx(value) for i, value in values.items())
        assert filled[: indices[0]] == [values[indices[0]]] * indices[0]
        for low, high in itertools.pairwise(indices):
            share = [(SIZES[i] - SIZES[low]) / (SIZES[high] - SIZES[low]) for i in range(low, high)]
            assert filled[low:high] == pytest.approx(
                [values[low] + (values[high] - values[low]) * part for part in share]
            )
        last = indices[-1]
        assert filled[last:] == pytest.approx([values[last] * size / SIZES[last] for size in SIZES[last:]])


def test_the_fewest_ctas_that_are_enough() -> None:
    assert calibrate.fewest({1: 10.0, 2: 19.5, 4: 20.0, 8: 19.0}, 19.4) == 2
    assert calibrate.fewest({1: 10.0}, 11) == 0
    rig = Rig(_C._costs_read(None))
    gbps = {"d2h": {1: 10, 2: 20, 4: 28, 8: 36, 16: 39, 32: 40}, "h2d": {1: 10, 2: 39, 4: 40, 8: 40, 16: 40, 32: 40}}

    def measure(path: str, direction: str, shape: Shape, repeats: int, max_ctas: int) -> float:
        return shape.nbytes / (gbps[direction].get(max_ctas, 40) * 1e9)

    rig.measure = measure  # type: ignore[assignment]
    rig.device = type("Device", (), {"info": {"sms": 32}})()
    tuning = calibrate._measure_tuning(rig, lambda done, total, what: None)  # type: ignore[arg-type]
    assert rig.kernel_runs == {"d2h": (16, 0), "h2d": (4, 0)}  # 39 of 40 is enough, and two CTAs are too few
    assert (tuning["link_gbps_d2h"], tuning["link_gbps_h2d"]) == (50, 40)
    gbps["d2h"] = gbps["h2d"] = {}
    for sms, few in ((132, 8), (6, 4), (1, 1)):  # to the host not fewer than eight, where there are so many
        rig.device = type("Device", (), {"info": {"sms": sms}})()
        calibrate._measure_tuning(rig, lambda done, total, what: None)  # type: ignore[arg-type]
        assert rig.kernel_runs == {"d2h": (few, 0), "h2d": (min(few, 4), 0)}


class Paced:
    """What calibrate needs of a rig to see what the kernel reaches: its pace, unpaced 30 GB/s."""

    moved = MOVED

    def __init__(self, kind: str, high: int, memory_gbps: int = 0) -> None:
        self.device = type("Device", (), {"kind": kind, "info": {"memory_gbps": memory_gbps}})()
        self.kernel_runs = {"d2h": (high, 0.0), "h2d": (high, 0.0)}
        self.asked: list[tuple[str, int, float]] = []

    def measure(self, path: str, direction: str, shape: Shape, repeats: int, ctas: int, pace: float) -> float:
        assert (path, shape) == ("kernel", Shape(1, 32 << 10, MOVED >> 15))
        self.asked.append((direction, ctas, pace))
        return shape.nbytes / 1e9 / (pace or 30.0)


def gentle(rig: Paced, d2h: float, h2d: float) -> _C._Tuning:
    """What is added to the tuning."""
    tuning: _C._Tuning = {"link_gbps_d2h": d2h, "link_gbps_h2d": h2d}
    calibrate._measure_kernels(rig, tuning, lambda done, total, what: None)  # type: ignore[arg-type]
    assert (tuning.pop("link_gbps_d2h"), tuning.pop("link_gbps_h2d")) == (d2h, h2d)
    return tuning


@pytest.mark.parametrize("memory_gbps", [0, 4000, 4917])
def test_what_is_gentle_follows_the_measured_link(memory_gbps: int) -> None:
    for d2h, h2d in ((55.3, 55.4), (25.0, 24.0), (400.0, 300.0)):
        rig = Paced("cuda", 8, memory_gbps)
        found = gentle(rig, d2h, h2d)
        pace, slow, slow_h2d = (round(share, 3) for share in (0.77 * d2h, 0.5 * d2h, 0.5 * h2d))
        assert found == {
            "kernel_normal_d2h": (2, pace, 0),
            "kernel_normal_h2d": (2, 0, 0),
            "kernel_high_d2h": (8, 0, 30),
            "kernel_high_h2d": (8, 0, 30),
            "kernel_background_d2h": (2, slow, slow),
            "kernel_background_h2d": (2, slow_h2d, slow_h2d),
        }
        assert rig.kernel_runs == {"d2h": (2, pace), "h2d": (2, 0)}, "what the costs are measured with"
        assert rig.asked == [("d2h", 8, 0), ("h2d", 8, 0), ("d2h", 2, slow), ("h2d", 2, slow_h2d)]


@pytest.mark.parametrize("memory_gbps", [1, 3352, 3999])
def test_less_memory_bandwidth_has_a_lower_pace(memory_gbps: int) -> None:
    """From device to host; beside a host device there is no model."""
    rig = Paced("cuda", 8, memory_gbps)
    found = gentle(rig, 55.3, 55.4)
    pace = round(0.47 * 55.3, 3)
    assert found == {
        "kernel_normal_d2h": (2, pace, 0),
        "kernel_normal_h2d": (2, 0, 0),
        "kernel_high_d2h": (8, 0, 30),
        "kernel_high_h2d": (8, 0, 30),
        "kernel_background_d2h": (2, pace, 0),  # as at normal, whose costs say what it reaches
        "kernel_background_h2d": (2, 27.7, 27.7),
    }
    assert rig.kernel_runs == {"d2h": (2, pace), "h2d": (2, 0)}
    assert set(gentle(Paced("host", 4, memory_gbps), 6, 5).values()) == {(4, 0, 0)}


def test_the_built_in_costs_are_as_gentle() -> None:
    """With the shares of an H200's link."""
    built_in = _C._costs_read(None)["tuning"]
    found = gentle(Paced("cuda", 8), 55.3, 55.3)
    assert len(found) == 6
    for name, (ctas, pace, _) in found.items():
        assert built_in[name][0] == (4 if name == "kernel_high_h2d" else ctas)
        assert built_in[name][1] == pytest.approx(pace, rel=0.01)
        assert built_in[name][2] == 0 if "normal" in name else 0 < built_in[name][2] <= (pace or 55.3)


def test_one_sm_has_one_cta() -> None:
    found = gentle(Paced("cuda", 1), 50, 40)
    assert {ctas for ctas, *_ in found.values()} == {1}
    assert found["kernel_normal_d2h"] == (1, 38.5, 0), "and the same pace"
    assert found["kernel_high_d2h"] == (1, 0, 30)
    assert found["kernel_high_h2d"] == (1, 0, 0), "as at priority normal, whose costs say what it reaches"


def test_a_host_device_has_no_model_beside_it() -> None:
    rig = Paced("host", 4)
    assert set(gentle(rig, 6, 5).values()) == {(4, 0, 0)}
    assert rig.asked == []


def test_how_the_kernel_runs_is_told() -> None:
    costs = _C._costs_read(None)
    costs["tuning"] |= gentle(Paced("cuda", 1), 50, 40)
    lines = calibrate.table(costs).splitlines()
    assert "normal     D2H 1 CTA at 38.5 GB/s, H2D 1 CTA unpaced" in lines
    assert "high       D2H 1 CTA unpaced (30.0), H2D 1 CTA unpaced" in lines


def test_the_rig_measures_and_verifies(device: kvswap.Device, device_name: str) -> None:
    stream = kvswap.Stream(device)
    device.set_compute_stream(stream)
    rig = _rig.Rig(device, stream)
    try:
        shape = Shape(4, 1000, 7)
        assert 0 < rig.measure("dma", "d2h", shape, 3) < 60
        assert rig.bytes_verified == 4 * shape.nbytes
        paced = Shape(1, 4 << 10, 128)  # each warp's last row begins a row's time before the end
        assert rig.measure("kernel", "d2h", paced, 3, 1, 0.1) > 0.9 * paced.nbytes / 0.1e9
        with pytest.raises(calibrate.Unavailable, match="runs as dma"):
            rig.measure("strided", "h2d", Shape(1, 512, 3), 3)
        if device_name.startswith("host"):
            for other in (replace(shape, apart=True), replace(shape, skew=True), replace(shape, together=True)):
                assert 0 < rig.measure("strided", "d2h", other, 3) < 60
        if device_name.startswith("host"):
            with testing.fault(device, "copy", "skip", nth=40), pytest.raises(kvswap.Error, match="kernel h2d, 1000 B"):
                rig.measure("kernel", "h2d", shape, 3)
        else:
            with pytest.raises(calibrate.Unavailable):
                rig.measure("direct", "d2h", shape, 3)
    finally:
        rig.close()


def test_a_slow_link_is_given_less_to_move() -> None:
    assert calibrate.moved(64 << 20, 55) == 64 << 20
    assert calibrate.moved(64 << 20, 25) == 32 << 20
    assert calibrate.moved(64 << 20, 13) == 16 << 20
    assert calibrate.moved(64 << 20, 0.1) == calibrate.moved(8 << 20, 0.1) == 8 << 20


def test_a_path_that_lacks_what_it_needs_is_unknown() -> None:
    """A cost that was not measured is not guessed."""
    seconds = found_by(Rig(costs_of_all()), -1).seconds
    for path, kind in (("burst", "run"), ("strided", "extra"), ("dma", "start"), ("kernel", "each")):
        found = calibrate.solve({p: took for p, took in seconds.items() if (p.path, p.kind) != (path, kind)})
        assert found["d2h"].keys() == found["h2d"].keys() == set(PATHS) - {path}


def test_tables_fit_a_terminal_of_80_columns() -> None:
    costs = _C._costs_read(None)
    assert {"direct", "kernel", "burst"} <= costs["d2h"].keys()
    lines = calibrate.table(costs).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.endswith("GB/s") and "link" not in line] == ["D2H, GB/s", "H2D, GB/s"]


# -- dicts and files --------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    costs = _C._costs_read(None)
    del costs["d2h"]["burst"], costs["tuning"]["kernel_normal_h2d"]
    costs["h2d"]["strided"]["extra"] = 0.125
    costs["tuning"] |= {"host_links": 4, "host_gbps_d2h": 156.5, "host_gbps_h2d": 211, "host_gbps_both": 201}
    _C._costs_write(tmp_path / "x", costs, "a machine")
    assert _C._costs_read(tmp_path / "x") == costs
    assert (tmp_path / "x").read_text().splitlines()[:2] == ["kvswap calibration 5", "machine a machine"]
    with pytest.raises(IndexError, match="nowhere"):
        _C._costs_read(tmp_path / "nowhere")
    (tmp_path / "x").chmod(0o606)
    with pytest.raises(ValueError, match="others can write it"):
        _C._costs_read(tmp_path / "x")


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e11, "5", None])
@pytest.mark.parametrize("part", ["start", "extra", "each", "run", "tuning"])
def test_values_that_are_no_costs_are_refused(tmp_path: Path, part: str, value: object) -> None:
    costs = _C._costs_read(None)
    if part == "tuning":
        costs["tuning"]["kernel_background_d2h"] = (1, value, 0)
    elif part in ("start", "extra"):
        costs["d2h"]["strided"][part] = value
    else:
        costs["d2h"]["burst"][part][5] = value
    with pytest.raises((ValueError, TypeError), match=r"kernel_background_d2h|start|extra|each|run"):
        _C._costs_write(tmp_path / "x", costs, "a machine")
    assert os.listdir(tmp_path) == []


def test_a_dict_that_changes_while_it_is_read(tmp_path: Path) -> None:
    costs = _C._costs_read(None)
    wanted = _C._costs_read(None)

    class Number:
        def __float__(self) -> float:
            costs["d2h"]["dma"].clear()
            costs["d2h"].clear()
            costs.clear()
            return float(wanted["d2h"]["dma"]["start"])

    costs["d2h"]["dma"]["start"] = Number()
    _C._costs_write(tmp_path / "x", costs, "a machine")
    assert costs == {} and _C._costs_read(tmp_path / "x") == wanted


def test_dicts_that_are_no_costs_are_refused() -> None:
    def refuse(error: type[Exception], **parts: object) -> None:
        with pytest.raises(error):
            bindings.costs_predict(parts, "dma", "d2h", 1, copies=1)

    cost = {"start": 1, "extra": 4, "each": [1] * 14, "run": []}
    assert bindings.costs_predict({"d2h": {"dma": cost}}, "dma", "d2h", 512, copies=1) == 2
    assert bindings.costs_predict({"d2h": {"dma": cost}}, "dma", "d2h", 1024, copies=2) == 11
    refuse(ValueError, other={})
    refuse(TypeError, d2h=5)
    refuse(ValueError, d2h={"auto": cost})
    refuse(TypeError, d2h={"dma": 5})
    for part in cost:
        refuse(ValueError, d2h={"dma": {name: value for name, value in cost.items() if name != part}})
    refuse(ValueError, d2h={"dma": {**cost, "more": 1}})
    refuse(ValueError, d2h={"dma": {**cost, "each": [1] * 13}})
    refuse(ValueError, d2h={"dma": {**cost, "run": [1]}})
    refuse(ValueError, tuning={"ctas": 1})
    refuse(ValueError, tuning={"kernel_ctas": 8})
    refuse(ValueError, tuning={"kernel_normal_d2h": (1.5, 0, 0)})
    refuse(ValueError, tuning={"kernel_normal_d2h": (1, 0)})
    refuse(TypeError, tuning={"kernel_normal_d2h": 1})
    refuse(TypeError, tuning={"link_gbps_h2d": (1, 0, 0)})
    with pytest.raises(TypeError):
        bindings.costs_predict([], "dma", "d2h", 1, copies=1)  # type: ignore[arg-type]


def test_the_built_in_costs_were_made_by_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import cost_table

    costs = _C._costs_read(None)
    text = (ROOT / "csrc" / "paths" / "costs_default.c").read_text()
    assert cost_table.table(costs, costs) == text
    for of_direction in (gpu := _C._costs_read(None))["d2h"], gpu["h2d"]:
        del of_direction["direct"]
    gpu["tuning"] = {}
    assert cost_table.table(gpu, costs) == text


def test_built_in_costs_of_one_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import cost_table

    built_in, found = _C._costs_read(None), _C._costs_read(None)
    for of_direction in (found["d2h"], found["h2d"]):
        for cost in of_direction.values():
            cost |= {"start": 1.0, "each": [2.0] * len(SIZES), "run": [3.0] * len(SIZES)}
    found["tuning"] |= {
        "kernel_normal_d2h": (7, 1, 2),
        "kernel_high_d2h": (7, 1, 2),
        "kernel_background_d2h": (7, 1, 2),
    }
    for path in ("burst", "kernel"):
        both = cost_table.with_rows(path, found, _C._costs_read(None))
        for of_direction in ("d2h", "h2d"):
            for other in both[of_direction]:
                rows = found if other == path else built_in
                assert both[of_direction][other]["each"] == rows[of_direction][other]["each"]
                assert both[of_direction][other]["run"] == rows[of_direction][other]["run"]
                assert both[of_direction][other]["start"] == built_in[of_direction][other]["start"]
        if path == "burst":
            assert both["tuning"] == built_in["tuning"]
    ctas, pace, _ = built_in["tuning"]["kernel_normal_d2h"]
    assert both["tuning"]["kernel_normal_d2h"] == (ctas, pace, 2), "how the kernel runs stays what it was"
    assert both["tuning"]["kernel_high_d2h"] == (7, 1, 2)
    assert both["tuning"]["kernel_background_d2h"] == built_in["tuning"]["kernel_background_d2h"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no calibration\n", "line 1: it is not 'kvswap calibration 5'"),
        (
            "kvswap calibration 2\nmachine m\nkernel_ctas 8\nend\n",
            "the format is version 2, this kvswap reads versions 4 and 5",
        ),
    ],
)
def test_a_calibration_that_cannot_be_used_is_said_once(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "costs"
    file.write_text(text)
    file.chmod(0o600)
    script = """
        import kvswap
        device = kvswap.Device("host:0")
        kvswap.Device("host:0")
        print(device.info["costs"])
    """
    run = run_python(script, KVSWAP_CALIBRATION=str(file))
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("built in, since ") and str(file) in run.stdout
    assert why in run.stdout
    assert run.stderr.count("the calibration cannot be used") == 1 and str(file) in run.stderr
