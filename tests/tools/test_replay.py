"""The replay moves real blocks, in the right order, and sees every wrong byte."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import Gate

from kvswap import _C, testing
from kvswap.replay import geometry
from kvswap.replay.check import WrongBytes
from kvswap.replay.report import Report, _contradicting
from kvswap.replay.run import Replay
from kvswap.replay.settings import Settings, Sizes
from kvswap.replay.tiers import Tiers
from kvswap.replay.trace import Trace

TINY = geometry.scale(geometry.custom(3, 1, 64), 384, allow_tiny=True)
TWO_GROUPS = geometry.scale(geometry.named("gpt-oss-120b"), 36 * 48, allow_tiny=True)


def make_trace(requests: int, *, seed: int = 1, longest: int = 8) -> Trace:
    """Random paths in a tree of blocks: equal ids have equal ids before them, as in a real trace."""
    rng = random.Random(seed)
    ids: dict[tuple[int, ...], int] = {}
    lists = []
    for _ in range(requests):
        path: tuple[int, ...] = ()
        blocks = []
        for _ in range(rng.randint(0 if requests > 5 else 1, longest)):
            path = (*path, rng.choices((0, 1, 2), (6, 2, 1))[0])
            blocks.append(ids.setdefault(path, len(ids)))
        lists.append(blocks)
    return trace_of(lists)


def trace_of(lists: list[list[int]]) -> Trace:
    lengths = np.array([len(blocks) for blocks in lists], np.int64)
    return Trace(
        name="made",
        timestamps=np.zeros(len(lists)),
        input_tokens=lengths * 512 - np.minimum(lengths, 1) * 100,  # the last block is partly filled
        output_tokens=np.ones(len(lists), np.int64),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        hashes=np.array([block for blocks in lists for block in blocks], np.uint64),
        repeated=0,
    )


def settings(shape: geometry.Geometry = TINY, gpu: int = 12, host: int = 20, **options: object) -> Settings:
    return Settings(geometry=shape, sizes=Sizes(gpu, host), **options)  # type: ignore[arg-type]


def replay(device: _C.Device, trace: Trace, options: Settings) -> Report:
    return Replay(trace, options, device).run()


def check_sums(report: Report, trace: Trace, options: Settings) -> None:
    """What the report says agrees with the book-keeping done by itself, and adds up."""
    tiers = Tiers(options.sizes.gpu_blocks, options.sizes.host_blocks)
    found = [tiers.admit(trace.blocks(i)) for i in range(len(trace))]
    block = options.geometry.block_nbytes
    assert report.ended == "complete"
    assert report.wrong_bytes == 0
    assert report.requests == len(trace)
    assert report.gpu_hits == sum(one.gpu_hits for one in found)
    assert report.host_hits == sum(one.host_hits for one in found)
    assert report.misses == sum(one.misses for one in found)
    assert report.loads.nbytes == report.host_hits * block
    assert report.stores.nbytes == sum(len(one.stores) for one in found) * block
    assert report.verified_where_used == report.gpu_hits + report.host_hits
    assert report.verified_given_up == report.poisoned["host"] == sum(len(one.host_given_up.slots) for one in found)
    assert report.poisoned["gpu"] == sum(len(one.gpu_given_up.slots) for one in found)
    assert report.verified_at_end == {"gpu": len(tiers.gpu), "host": len(tiers.host)}
    assert report.truncated_blocks == sum(one.cut for one in found)
    assert report.tokens_total == int(trace.input_tokens.sum())
    saved = [min(int(trace.input_tokens[one.request]), 512 * one.leading) for one in found]
    assert report.tokens_saved == sum(saved)


@pytest.mark.parametrize("shape", [TINY, TWO_GROUPS], ids=["one-group", "two-groups"])
def test_a_replay_adds_up(device: _C.Device, shape: geometry.Geometry, path: str) -> None:
    trace = make_trace(120)
    options = settings(shape, path=path)
    report = replay(device, trace, options)
    check_sums(report, trace, options)
    assert report.host_hits > 0 and report.poisoned["gpu"] > 0 and report.poisoned["host"] > 0
    assert report.path == path
    groups = len(shape.groups)
    assert report.loads.transfers % groups == report.stores.transfers % groups == 0


@pytest.mark.not_sanitized("minutes: all interleavings")
@pytest.mark.parametrize("seed", [*range(1, 41), 106])
def test_every_interleaving_gives_the_same(seed: int) -> None:
    """Work runs in an order that the seed decides: what is not ordered on the device comes out in the wrong order."""
    rng = random.Random(seed)
    longest = rng.choice([2, 3, 5, 8])
    gpu, host, in_flight = rng.randint(longest, 24), rng.randint(1, 30), rng.choice([2, 4, 8, 16])
    if seed % 2:
        trace = make_trace(80, seed=seed, longest=longest)
    else:
        blocks = range(rng.choice([12, 30]))
        trace = trace_of([rng.sample(blocks, rng.randint(0, longest)) for _ in range(80)])
    options = settings(TWO_GROUPS if seed % 4 == 0 else TINY, gpu, host, in_flight=in_flight, seed=seed)
    check_sums(replay(testing.deterministic_device(seed), trace, options), trace, options)


def test_an_interleaving_can_be_replayed() -> None:
    def run(seed: int) -> int:
        device = testing.deterministic_device(seed)
        replay(device, make_trace(25), settings())
        return testing.trace(device)

    assert run(5) == run(5)
    assert run(5) != run(6)


@pytest.mark.parametrize(
    ("gpu", "host", "in_flight"),
    [(8, 20, 8), (1, 1, 8), (3, 2, 2), (12, 0, 8), (500, 500, 1), (12, 20, 1), (9, 500, 50)],
)
def test_tiers_of_any_size(device: _C.Device, gpu: int, host: int, in_flight: int) -> None:
    trace = make_trace(80, seed=3)
    options = settings(gpu=gpu, host=host, in_flight=in_flight)
    report = replay(device, trace, options)
    check_sums(report, trace, options)
    assert (report.truncated_requests > 0) == (gpu < 8)


def test_traces_that_no_server_writes(device: _C.Device) -> None:
    """Holes in prefixes: blocks are computed again where they lie, while their stores may still run."""
    rng = random.Random(4)
    trace = trace_of([rng.sample(range(30), rng.randint(0, 9)) for _ in range(150)])
    options = settings()
    check_sums(replay(device, trace, options), trace, options)
    again = testing.deterministic_device(9)
    check_sums(replay(again, trace, options), trace, options)


def test_counts_depend_on_the_trace_alone(device: _C.Device) -> None:
    trace = make_trace(60)
    seen = []
    for in_flight, seed in ((1, 0), (8, 1), (8, 1)):
        document = replay(device, trace, settings(in_flight=in_flight, seed=seed)).to_dict()
        timed = ("seconds", "gbps_load", "gbps_store", "load_ms", "store_ms", "in_flight", "seed")
        seen.append({key: value for key, value in document.items() if key not in timed})
    assert seen[0] == seen[1] == seen[2]


def test_a_lane_that_is_full_is_waited_for() -> None:
    device = _C.Device("host:6")  # of its own: the depth is for lanes made afterwards
    testing.set_lane_depth(device, 1)
    trace = make_trace(60)
    check_sums(replay(device, trace, settings(TWO_GROUPS)), trace, settings(TWO_GROUPS))


@pytest.mark.parametrize("nth", [1, 2, 50, 301, 600])
def test_one_copy_that_did_not_happen_is_found(device: _C.Device, nth: int) -> None:
    job = Replay(make_trace(120), settings(TWO_GROUPS), device)
    with testing.fault(device, "copy", "skip", nth=nth), pytest.raises(WrongBytes) as caught:
        job.run()
    error = caught.value
    assert 0 < error.wrong_bytes == job.report.wrong_bytes <= 48
    assert 0 <= error.layer < 36
    assert 0 <= error.offset < 48
    assert job.report.ended == "wrong bytes"
    for part in (f"block {error.block},", f"layer {error.layer} (group ", f"offset {error.offset},", " slot "):
        assert part in str(error)
    assert job.report.error == str(error)
    check_sums(replay(device, make_trace(30), settings()), make_trace(30), settings())  # the device is as before


def test_a_copy_that_is_refused_ends_the_replay(device: _C.Device) -> None:
    job = Replay(make_trace(60), settings(), device)
    with testing.fault(device, "copy", "fail", nth=40), pytest.raises(_C.Error):
        job.run()
    assert job.report.ended == "failed"
    assert job.report.error
    for requests in (0, 3):  # no table where nothing was done
        job.report.requests = requests
        told = job.report.to_text().splitlines()
        assert told[-1].split(maxsplit=1) == ["FAILED", job.report.error]
        assert ("hits in the GPU tier" in "".join(told)) == (requests > 0)
    check_sums(replay(device, make_trace(30), settings()), make_trace(30), settings())


def test_an_interrupt_gives_what_was_done(device: _C.Device) -> None:
    def interrupt(report: Report, total: int) -> None:
        assert total == 60
        if report.requests >= 20:
            raise KeyboardInterrupt

    report = Replay(make_trace(60), settings(), device).run(interrupt)
    assert report.ended == "interrupted"
    assert 20 <= report.requests < 60
    check_sums(replay(device, make_trace(30), settings()), make_trace(30), settings())


def test_no_wait_is_without_limit(device: _C.Device) -> None:
    job = Replay(make_trace(60), settings(wait_limit=0.05), device)
    with Gate(device) as gate:

        def stall(report: Report, total: int) -> None:
            gate.hold(job._compute)
            job._progress = lambda report, total: None

        with pytest.raises(TimeoutError):
            job.run(stall)
    assert job.report.ended == "failed"
    device.synchronize(60)
    device.set_compute_stream(0)


def test_the_time_limit_ends_admission_not_verification(device: _C.Device) -> None:
    trace = make_trace(60)
    report = Replay(trace, settings(seconds=1e-9), device).run()
    assert report.ended == "seconds"
    assert report.requests < len(trace)
    assert report.verified_at_end["host"] <= report.misses


def test_the_demo_shows_all_there_is_to_see(device: _C.Device) -> None:
    from kvswap.replay.trace import read_trace

    trace = read_trace(Path(geometry.__file__).parents[1] / "data" / "demo_trace.jsonl.gz")
    options = settings(gpu=128, host=512)
    report = replay(device, trace, options)
    check_sums(report, trace, options)
    assert min(report.gpu_hits, report.host_hits, report.poisoned["gpu"], report.poisoned["host"]) > 100


def test_a_trace_of_other_blocks_is_noticed() -> None:
    """Ids that are not one for each block of the input: the tokens that are said to be saved would mean nothing."""
    trace = make_trace(20)
    tokens = settings().geometry.block_tokens
    lengths = np.diff(trace.offsets) * tokens
    right = replace(trace, input_tokens=lengths - np.arange(20) % tokens, repeated=0)
    assert _contradicting(right, tokens) == 0
    wrong = replace(right, input_tokens=np.where(np.arange(20) < 3, right.input_tokens + tokens, right.input_tokens))
    assert _contradicting(wrong, tokens) == 3
