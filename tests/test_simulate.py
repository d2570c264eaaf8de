"""kvswap simulate: the replay's tiers, the remote tier's placement, and times that follow from links."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvswap import cli
from kvswap.remote._names import Namer
from kvswap.remote._placement import Placement
from kvswap.replay import geometry
from kvswap.replay.errors import UsageError
from kvswap.replay.file_tier import keys_of
from kvswap.replay.tiers import Tiers
from kvswap.replay.trace import Trace, read_trace
from kvswap.simulate.links import Link, through
from kvswap.simulate.report import Report
from kvswap.simulate.run import SILENCE, Simulation, simulate
from kvswap.simulate.settings import Settings, parse_failure
from kvswap.simulate.traffic import Traffic

DEMO = Path(cli.__file__).parent / "data" / "demo_trace.jsonl.gz"
SHAPE = geometry.scale(geometry.named("llama-3.1-8b"), 1 << 20)
BASE = Settings(SHAPE, nodes=4, gpu_blocks=64, host_blocks=128, pool_blocks=400, gpus=1)

Make = Callable[..., Trace]


@pytest.fixture(scope="module")
def demo() -> Trace:
    return read_trace(DEMO)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A trace of (seconds, blocks) requests."""

    def trace(*requests: tuple[float, list[int]]) -> Trace:
        path = tmp_path / "trace.jsonl"
        with path.open("w") as file:
            for at, ids in requests:
                record = {"timestamp": at * 1e3, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
                file.write(json.dumps(record) + "\n")
        return read_trace(path)

    return trace


def hits(report: Report) -> dict[str, int]:
    found: dict[str, int] = report.to_dict()["hits"]
    return found


def link(report: Report, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in report.links if each["name"] == name)
    return found


# -- the parts that are others' ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("third", [0, 1200])
def test_one_node_has_the_hits_of_the_replay(demo: Trace, third: int) -> None:
    """The third tier has room for all: a node notices uses in another order, which matters when it is full."""
    tiers, counts = Tiers(64, 128, third), np.zeros(4, int)
    for i in range(len(demo)):
        admission = tiers.admit(demo.blocks(i))
        counts += [admission.gpu_hits, admission.host_hits, admission.file_hits, admission.misses]
    one = replace(BASE, nodes=1, store_nodes=1 if third else 0, pool_blocks=third, stores="evicted")
    report = simulate(demo, one)
    assert [*hits(report).values(), report.misses] == [counts[0], counts[1], 0, counts[2], counts[3]]
    assert report.requests == len(demo) and report.tokens_saved > 0 and (counts[2] > 0) == (third > 0)


def test_blocks_lie_where_the_remote_tier_places_them(demo: Trace) -> None:
    simulation = Simulation(demo, replace(BASE, replicas=2))
    simulation.run()
    blocks = np.arange(100, dtype=np.uint64)
    names = Namer(SHAPE.block_nbytes, "kvswap simulate").names(keys_of(blocks))
    order = Placement([f"node{i}" for i in range(4)]).order(names, 2)
    held = 0
    for block, nodes in zip(blocks.tolist(), order.tolist(), strict=True):
        for number, store in simulation._stores.items():
            assert block not in store.pool or number in nodes
            held += block in store.pool
    assert held > 50


def test_a_silent_node_costs_what_the_heartbeats_need() -> None:
    pytest.importorskip("zmq")
    from kvswap.remote import _link

    assert SILENCE == _link.HEARTBEAT


# -- links ------------------------------------------------------------------------------------------------------------


def test_transfers_of_a_link_wait_for_each_other() -> None:
    slow, fast = Link(100.0, 0.5, 10.0), Link(1000.0, 0.0, 10.0)
    assert slow.take(1.0, 200) == pytest.approx(3.5)
    assert slow.take(2.0, 100) == pytest.approx(4.5)  # after the first, which leaves at 3.0
    assert slow.take(9.0, 200) == pytest.approx(11.5)
    assert slow.busy == pytest.approx(5.0) and slow.times == pytest.approx([4.0, 1.0]) and slow.peak() == 0.4
    assert through([fast, slow], 20.0, 100) == pytest.approx(21.5)
    assert through([], 20.0, 100) == 20.0


def test_the_time_that_a_request_waits(make: Make) -> None:
    """A block comes from the host tier, from another node, from the files of one; each way by hand."""
    trace = make((0, [1, 2]), (10, [3, 4]), (20, [1, 2]))
    nbytes = SHAPE.block_nbytes
    rates = {"gpu_link": nbytes / 0.1, "nic": nbytes / 0.5, "disk": nbytes / 1.0}
    base = replace(BASE, gpu_blocks=2, latency=0.0, rtt=0.25, **rates)
    local = simulate(trace, replace(base, nodes=1, host_blocks=4, pool_blocks=0))
    assert list(local.waits) == pytest.approx([0, 0, 0.2]) and hits(local)["host"] == 2
    own = simulate(trace, replace(base, nodes=1, host_blocks=0))  # its own part of the shared tier: over no NIC
    assert hits(own)["own_pool"] == 2 and not any(each["name"].startswith("NIC") for each in own.links)
    for pool, files, bytes_take in ((9, 0, 1.0), (0, 9, 2.0)):
        far = replace(base, nodes=1, store_nodes=1, host_blocks=0, pool_blocks=pool, file_blocks=files)
        report = simulate(trace, far)
        assert hits(report)["pools"] == 2
        assert list(report.shared_loads) == pytest.approx([0.25 + bytes_take])
        assert report.waits[2] == pytest.approx(0.25 + 0.25 + bytes_take + 0.2, abs=1e-4)
        assert list(report.shared_stores) == pytest.approx([0.25 + 1.0 + 0.25] * 2)
        assert link(report, "NIC out")["bytes"] == 4 * nbytes + 2 * nbytes  # of both ends: stores, and loads


def test_with_so_many_at_a_time_the_clock_is_that_of_the_links(make: Make) -> None:
    trace = make(*((1000.0 * i, [i]) for i in range(8)))
    base = replace(BASE, nodes=1, pool_blocks=0, gpu_link=SHAPE.block_nbytes / 0.5, latency=0.0)
    assert simulate(trace, replace(base, in_flight=1)).seconds == pytest.approx(4.0)
    assert simulate(trace, base).seconds == pytest.approx(7000.5)
    assert simulate(trace, replace(base, speed=1000.0)).seconds == pytest.approx(7.5)


# -- many nodes -------------------------------------------------------------------------------------------------------


def test_a_block_of_one_node_is_a_hit_on_another(make: Make) -> None:
    trace = make((0, [1, 2, 3]), (1, [1, 2, 3]), (2, [1, 2, 3]))
    report = simulate(trace, replace(BASE, nodes=3))
    assert report.misses == 3 and hits(report)["gpu"] == hits(report)["host"] == 0
    assert hits(report)["own_pool"] + hits(report)["pools"] == 6
    assert simulate(trace, replace(BASE, nodes=3, pool_blocks=0)).misses == 9
    prefix = simulate(trace, replace(BASE, nodes=3, route="prefix"))
    assert hits(prefix)["gpu"] == 6 and prefix.misses == 3


def test_copies_share_only_the_common_prefixes(demo: Trace) -> None:
    alone = Traffic(demo, replace(BASE, copies=3))
    shared = Traffic(demo, replace(BASE, copies=3, common=0.4))
    arrivals = list(shared)
    assert len(arrivals) == 3 * len(demo) and [a.time for a in arrivals] == sorted(a.time for a in arrivals)
    of: dict[int, dict[int, list[int]]] = {}
    for arrival in arrivals:
        of.setdefault(arrival.request, {})[arrival.copy] = shared.blocks(arrival).tolist()
    common = total = 0
    for copies in of.values():
        same = [a == b for a, b in zip(copies[0], copies[1], strict=True)]
        assert same == sorted(same, reverse=True)  # beginnings
        common, total = common + sum(same), total + len(same)
    assert 0.2 < common / total <= 0.4 and shared.common_share == pytest.approx(common / total)
    assert alone.common_blocks == 0 and not set(alone.blocks(arrivals[0]).tolist()) & {alone.num_blocks}
    everything = Traffic(demo, replace(BASE, copies=2, common=1.0))
    assert everything.common_share == 1.0


def test_lists_of_a_rack_keep_bytes_in_the_rack(demo: Trace) -> None:
    racks = replace(BASE, nodes=6, rack=3, uplink=1e9, copies=2)
    everywhere, inside = simulate(demo, racks), simulate(demo, replace(racks, lists="rack"))
    assert link(everywhere, "uplinks out")["bytes"] > 0
    assert not any(each["name"].startswith("uplinks") for each in inside.links)
    assert hits(inside)["pools"] > 0


def test_files_take_what_leaves_memory(demo: Trace) -> None:
    small = replace(BASE, nodes=2, host_blocks=32, pool_blocks=40)
    without, behind = simulate(demo, small), simulate(demo, replace(small, file_blocks=1000))
    assert behind.misses < without.misses
    assert link(behind, "disk reads")["bytes"] > 0 and link(behind, "disk writes")["bytes"] > 0


def test_a_run_is_the_same_each_time(demo: Trace) -> None:
    settings = replace(BASE, copies=2, common=0.2, failures=(parse_failure("1@20+10"),))
    first, second = (simulate(demo, settings).to_dict() for _ in range(2))
    for found in (first, second):
        del found["took_seconds"]
    assert first == second
    other = simulate(demo, replace(settings, seed=1)).to_dict()
    assert other["wait_ms"] != first["wait_ms"]


# -- failures ---------------------------------------------------------------------------------------------------------


def test_what_a_dead_node_held_is_lost_but_not_its_files(make: Make) -> None:
    blocks = list(range(1, 9))
    trace = make((0, blocks), (10, blocks), (30, blocks))
    base = replace(BASE, nodes=1, store_nodes=1, gpu_blocks=8, host_blocks=0)
    base = replace(base, failures=(parse_failure("node0@4"), parse_failure("0@5+3")))

    def found(**changes: Any) -> list[int]:
        report = simulate(trace, replace(base, **changes))
        return [*hits(report).values(), report.misses]

    assert found(failures=()) == [16, 0, 0, 0, 8]
    died = parse_failure("0@5+3")  # the serving node: its GPU tier is lost
    assert found(failures=(died,)) == [8, 0, 0, 8, 8]
    store = parse_failure("1@5+3")  # the other one, too
    assert found(failures=(died, store)) == [8, 0, 0, 0, 16]
    assert found(failures=(died, store), file_blocks=20) == [8, 0, 0, 8, 8]


def test_what_a_failure_costs_is_told(demo: Trace) -> None:
    settings = replace(BASE, nodes=8, host_blocks=0, gpu_blocks=40, failures=(parse_failure("3@40"),))
    alone = simulate(demo, settings).failure
    twice = simulate(demo, replace(settings, replicas=2, pool_blocks=800)).failure
    assert alone["hits_lost"] > 0 and 0 < alone["worst_window_share"] <= 1
    assert twice["hits_lost"] < alone["hits_lost"]
    assert alone["as_before_after_seconds"] is None or alone["as_before_after_seconds"] > 0


def test_a_silent_node_holds_up_look_ups(make: Make) -> None:
    trace = make((0, [1, 2]), (10.1, [3, 4]), (20, [5, 6]))
    settings = replace(BASE, nodes=1, store_nodes=2, gpu_blocks=2, host_blocks=0)
    report = Simulation(trace, replace(settings, failures=(parse_failure("1@10"), parse_failure("2@10")))).run()
    assert report.waits[1] == pytest.approx(SILENCE - 0.1, abs=1e-3)
    assert report.waits[2] < 0.01


def test_requests_without_a_node_are_refused(make: Make) -> None:
    trace = make((0, [1]), (10, [1]))
    report = simulate(trace, replace(BASE, nodes=1, failures=(parse_failure("0@5"),)))
    assert report.refused == 1 and "no node was up" in report.to_text()


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    args = ["simulate", str(DEMO), "--nodes", "6", "--rack", "3", "--uplink", "100GiB", "--fail", "rack1@30+10"]
    assert cli.main([*args, f"--json={out}", "--copies", "2", "--pool-blocks", "200", "--host-blocks", "50"]) == 0
    told, err = capsys.readouterr()
    assert err == ""
    for part in ("6 nodes of 8 GPUs, 2 racks", "hits in pools", "wait for blocks", "hot prefixes", "as before"):
        assert part in told
    found = json.loads(out.read_text())
    assert found["requests"] == 2 * found["trace_requests"] and sum(found["hits"].values()) > 0
    assert found["failure"]["failures"] == [{"what": "rack 1", "at": 30.0, "back": 40.0}]


def test_sizes_in_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of blocks of 64 MiB, also where these are scaled."""
    out = tmp_path / "out.json"
    sizes = ["--gpu-bytes", "10GiB", "--host-bytes", "1GiB", "--requests", "10", f"--json={out}"]
    for scaled in ([], ["--bytes-per-block", "1MiB"]):
        assert cli.main(["simulate", str(DEMO), *sizes, *scaled]) == 0
        tiers = json.loads(out.read_text())["tiers"]
        assert (tiers["gpu"], tiers["host"]) == (160, 16)
        assert ("unscaled  GPU 10 GiB, host 1 GiB" in capsys.readouterr().out) == bool(scaled)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--gpu-blocks", "0"], "--gpu-blocks must be at least 1, not 0"),
        (["--host-bytes", "1MiB"], "--host-bytes 1 MiB holds no block: one of llama-3.1-8b has 64 MiB"),
        (["--nodes", "0"], "not a whole number above 0"),
        (["--replicas", "11"], "--replicas 11 is more than the 10 nodes of a list"),
        (["--store-nodes", "2", "--replicas", "3"], "the 2 nodes of a list"),
        (["--uplink", "1GiB"], "say with --rack"),
        (["--lists", "rack"], "--lists rack needs --rack N"),
        (["--common", "1.5"], "not a share, 0 to 1"),
        (["--fail", "soon"], "--fail takes 3@600"),
        (["--fail", "10@3"], "there is no node 10: there are 0 to 9"),
        (["--fail", "rack0@3"], "--fail rackN needs --rack N"),
        (["--rack", "5", "--fail", "rack2@3"], "there is no rack 2: there are 0 to 1"),
        (["--stores", "evicted", "--host-blocks", "0"], "there is none (--host-blocks 0)"),
        (["--nic", "fast"], "not a size: 'fast'"),
        (["--model", "gpt-2"], "no geometry is called 'gpt-2'"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], options: list[str], complaint: str) -> None:
    assert cli.main(["simulate", str(DEMO), *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("kvswap: ") and complaint in err, err


def test_settings_that_the_command_cannot_give() -> None:
    for wrong in ({"copies": 0}, {"host_blocks": -1}, {"speed": 0.0}, {"common": 2.0}):
        with pytest.raises(UsageError, match="--"):
            replace(BASE, **wrong)  # type: ignore[arg-type]
