"""kvswap_share: which engines' ranks share loads, what is refused, and a worker's place in its group.
tests/integration/vllm_package.py --share runs it in vLLM's own scheduler and workers, test_offload_share.py its
handlers."""

# mypy: ignore-errors

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvswap.vllm import _handler, _share

SHARE = {"kvswap_share": True}


def engine(
    extra: dict[str, Any], ranks: int = 2, replicated: bool | None = True, blocks: int = 1, groups: int = 1
) -> Any:
    """A spec of vLLM's."""
    spec = SimpleNamespace(extra_config=extra, replicated_layout=replicated)
    if replicated is None:  # to 0.29
        del spec.replicated_layout
        return spec
    parallel = SimpleNamespace(world_size=ranks, rank=1, data_parallel_index=0)
    cache = SimpleNamespace(blocks_per_chunk=blocks)
    spec.config = SimpleNamespace(parallel=parallel, cache=cache, groups=(None,) * groups, engine_id="engine")
    return spec


def model(extra: dict[str, Any], sleeps: bool = False) -> Any:
    transfer = SimpleNamespace(kv_connector_extra_config=extra)
    return SimpleNamespace(kv_transfer_config=transfer, model_config=SimpleNamespace(enable_sleep_mode=sleeps))


class Tells:
    """A connector of 0.33 on."""

    def unregister_kv_caches(self) -> None:
        pass


def test_ranks_with_one_copy_of_the_cache_share() -> None:
    spec = engine({**SHARE, "kvswap_share_wait_ms": 5})
    with _share.allowed(model(spec.extra_config), Tells):
        assert _share.seconds_of(spec) == 0.005
        assert _share.seconds_of(engine(SHARE)) == 0.002
        assert _share.seconds_of(engine({})) is None
        assert _share.seconds_of(engine({"kvswap_share": False, "canonical_layout": True})) is None
        assert _share.seconds_of(engine(SHARE, ranks=16)) == 0.002
        coded = {**SHARE, "kvswap_codec": "exact"}
        assert _share.seconds_of(engine(coded)) == _share.seconds_of(engine(coded, blocks=4)) == 0.002
        tier = {"secondary_tiers": [{"type": "FileTier"}]}
        assert _share.seconds_of(engine({**SHARE, **tier}, blocks=4)) == 0.002
        assert _share.seconds_of(engine({**SHARE, "secondary_tiers": [{"type": "fs"}]})) == 0.002


@pytest.mark.parametrize(
    ("extra", "more", "why"),
    [
        ({"kvswap_overlap": True}, {}, "the layers of a shared load come in any order, and kvswap_overlap waits"),
        ({"canonical_layout": True}, {}, "with canonical_layout each rank stores pages of its own"),
        ({"kvswap_path": "dma"}, {}, "kvswap_path does not apply"),
        ({"kvswap_priority": "high"}, {}, "kvswap_priority does not apply"),
        ({"kvswap_max_ctas": 8}, {}, "kvswap_max_ctas does not apply"),
        ({"kvswap_pace_gbps": 8}, {}, "kvswap_pace_gbps does not apply"),
        ({}, {"ranks": 17}, "the engine has 17 ranks, and a group at most 16"),
        ({}, {"replicated": False}, "vLLM does not keep one copy of the cache for all ranks"),
        ({}, {"replicated": None}, "vLLM does not keep one copy of the cache for all ranks"),
        (
            {"secondary_tiers": [{"type": "FileTier"}, {"type": "fs"}]},
            {"blocks": 4},
            "the blocks of a chunk lie one behind the other, and the secondary tier fs takes them for vLLM's layers",
        ),
        ({}, {"groups": 2}, "the cache has 2 groups of layers"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(extra: dict[str, Any], more: dict[str, Any], why: str) -> None:
    with _share.allowed(model(SHARE), Tells), pytest.raises(ValueError, match=f"kvswap_share: {why}"):
        _share.seconds_of(engine({**SHARE, **extra}, **more))
    assert _share.seconds_of(engine(extra, **more)) is None


def test_chunks_of_several_blocks_have_room_for_whole_blocks() -> None:
    """Which are slots at one distance: vLLM rounds up a chunk, not each of its blocks."""

    @dataclasses.dataclass
    class Config:
        blocks: int = 4
        ranks: int = 2
        worker_kv_bytes_per_block: int = 5000
        replicated_layout: bool = True

        def __post_init__(self) -> None:
            self.cache = SimpleNamespace(blocks_per_chunk=self.blocks)
            self.parallel = SimpleNamespace(world_size=self.ranks)

    assert _share.by_blocks(Config(), SHARE)
    made = _share.in_blocks(Config(), 4096)
    assert made.worker_kv_bytes_per_block == 5120 and 4 * 5120 % 4096 == 0
    for config, extra in (
        (Config(), {}),
        (Config(blocks=1), SHARE),
        (Config(ranks=1), SHARE),
        (Config(), {**SHARE, "kvswap_codec": "exact"}),
        (SimpleNamespace(), SHARE),  # to 0.29
    ):
        assert not _share.by_blocks(config, extra)


def test_it_needs_kvswaps_connector() -> None:
    """Which ends shared transfers before the engine sleeps."""
    with pytest.raises(ValueError, match='kvswap_share: it needs "kv_connector": "KVSwapConnector"'):
        _share.seconds_of(engine(SHARE))


@pytest.mark.parametrize("connector", [Tells, object])
@pytest.mark.parametrize("sleeps", [True, False])
@pytest.mark.parametrize("extra", [SHARE, {}])
def test_an_engine_that_sleeps_has_to_say_so(connector: type, sleeps: bool, extra: dict[str, Any]) -> None:
    if connector is object and sleeps and extra:
        with (
            pytest.raises(ValueError, match="this vLLM does not tell the connector"),
            _share.allowed(model(extra, sleeps), connector),
        ):
            pass
        return
    with _share.allowed(model(extra, sleeps), connector):
        pass


def test_one_rank_has_todays_loads_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    spec = engine(SHARE, ranks=1, replicated=False)
    with _share.allowed(model(SHARE), Tells), caplog.at_level(logging.INFO, "kvswap.vllm"):
        spec.share_wait = _share.seconds_of(spec)
        assert spec.share_wait is None
        _share.say_one_rank(spec)
        assert caplog.text.count("the engine has one rank") == 1
        for other in (
            SimpleNamespace(extra_config={}, share_wait=None),
            SimpleNamespace(extra_config=SHARE, share_wait=1),
        ):
            _share.say_one_rank(other)
    assert caplog.text.count("the engine has one rank") == 1


def test_a_group_is_one_engine_and_one_region(tmp_path: Path) -> None:
    first, second = (os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("first", "second"))
    again = os.open(tmp_path / "first", os.O_RDWR)
    config = engine(SHARE).config

    def described(fd: int, **more: Any) -> Any:
        vars(config.parallel).update(more)
        return _share.describe(config, SimpleNamespace(fd=fd), 0.002)

    mine = described(first)
    assert (mine.rank, mine.ranks, mine.share_wait) == (1, 2, 0.002) and mine.stall > mine.share_wait
    theirs = described(again, rank=0)
    assert theirs == mine._replace(rank=0)
    assert described(second, rank=1).group == mine.group
    assert described(second, rank=1)[3:5] != mine[3:5]
    assert described(first, data_parallel_index=1).group != mine.group
    config.engine_id = "other"
    assert described(first, data_parallel_index=0).group != mine.group
    for fd in (first, second, again):
        os.close(fd)


class Member:
    rank = 1

    def __init__(self, *peers: int) -> None:
        self.peers = peers

    def wait_peers(self, ranks: list[int], timeout: float) -> None:
        assert ranks == [0, 2] and timeout > 0
        if self.peers != (0, 2):
            raise TimeoutError


def test_the_log_says_who_shares(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvswap.vllm"):
        _share.meet(Member(0, 2), 3)
        assert "rank 1 of 3 shares loads with all others" in caplog.text
        _share.meet(Member(2), 3)
        assert "of 3 ranks, rank 1 does not reach 0 after 10 s" in caplog.text


@pytest.mark.parametrize("wrong", [{"kvswap_share": "yes"}, {"kvswap_share": True, "kvswap_share_wait_ms": -1}])
def test_options_are_read_strictly(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"kvswap_share.* is "):
        _handler.share_of(wrong)
