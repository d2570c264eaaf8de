"""kvswap_replicas: which engines share a pool, what is refused, and what a scheduler's manager promises.
tests/integration/vllm_package.py --replicas runs it in vLLM's own schedulers and workers, memory/test_replicas.py the
index below."""

# mypy: ignore-errors

from __future__ import annotations

import contextlib
import enum
import importlib
import logging
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvswap
from kvswap import _C, info
from kvswap.vllm import _handler, _replicas, _share

pytestmark = pytest.mark.not_sanitized("Python only")
if not Path("/dev/shm").is_dir():
    pytest.skip("no /dev/shm", allow_module_level=True)

ROW, CHUNKS = 8192, 8


@pytest.fixture
def name() -> Iterator[str]:
    made = f"test-{os.getpid()}-{random.randrange(1 << 30)}"
    yield made
    with contextlib.suppress(FileNotFoundError):
        Path(f"/dev/shm/kvswap.replicas-{os.geteuid()}-{made}").unlink()


def engine(extra: dict[str, Any], number: int = 0, ranks: int = 1, rank: int = 0, events: bool = False) -> Any:
    """A spec of vLLM's."""
    parallel = SimpleNamespace(world_size=ranks, rank=rank, data_parallel_index=number)
    config = SimpleNamespace(parallel=parallel, engine_id="engine", enable_kv_cache_events=events)
    return SimpleNamespace(
        extra_config=extra, config=config, num_chunks=CHUNKS, kv_bytes_per_chunk=ROW,
        cpu_page_size_per_worker=ROW // ranks, replicated_layout=False,
    )  # fmt: skip


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """As under KVSwapConnector."""
    transfer = SimpleNamespace(kv_connector_extra_config={})
    with _share.allowed(SimpleNamespace(kv_transfer_config=transfer, model_config=None), object):
        yield


def replicas(name: str, *args: Any, **kwargs: Any) -> Any:
    with allowed():
        return _replicas.of(engine({"kvswap_replicas": name}, *args, **kwargs))


# -- which engines -----------------------------------------------------------------------------------------------------


def test_engines_of_one_name_have_one_pool_and_names_of_their_own() -> None:
    one, two = replicas("kv", 0), replicas("kv", 1)
    assert one.segment == two.segment == f"replicas-{os.geteuid()}-kv" and one.member != two.member
    assert replicas("other").segment != one.segment
    assert replicas("kv", 0, ranks=2, rank=1)[-4:] == (ROW // 2, 2, 1, None)
    assert _replicas.of(engine({})) is None
    long = engine({"kvswap_replicas": "kv"})
    long.config.engine_id = "e" * 200
    with allowed():
        assert len(_replicas.of(long).member) <= 100


def test_ranks_of_one_engine_lend_to_the_same_ranks_of_others() -> None:
    def group(number: int, name: str, **kwargs: Any) -> str:
        spec = engine({"kvswap_replicas": name, "kvswap_lend": True}, number, **kwargs)
        with allowed():
            return _replicas.of(spec).group

    long = "n" * 30
    for name in ("kv", long):
        ranks = [[group(number, name, ranks=2, rank=rank) for rank in (0, 1)] for number in (0, 1)]
        assert ranks[0] == ranks[1] and ranks[0][0] != ranks[0][1]
        assert all(len(made) <= 40 for made in (*ranks[0], group(0, name)))
        assert group(0, name) == group(1, name) not in ranks[0]


@pytest.mark.parametrize(
    ("extra", "more", "why"),
    [
        ({"kvswap_share": True}, {}, "kvswap_share is for the ranks of one engine"),
        ({"kvswap_fallback": True}, {}, "with kvswap_fallback vLLM's own transfers may stay"),
        ({"canonical_layout": True}, {}, "canonical_layout has rows of another form"),
        ({"eviction_policy": "arc"}, {}, "Leave out eviction_policy"),
        ({"cache_policy_module_path": "mine"}, {}, "Leave out eviction_policy, cache_policy_module_path"),
        ({"store_threshold": 2}, {}, "Leave out store_threshold"),
        ({"kvswap_replicas": "a/b"}, {}, "'a/b' is no name"),
        ({}, {"events": True}, "Leave out enable_kv_cache_events"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(extra: dict[str, Any], more: dict[str, Any], why: str) -> None:
    with allowed(), pytest.raises(ValueError, match=f"kvswap_replicas: .*{why}"):
        _replicas.of(engine({"kvswap_replicas": "kv", **extra}, **more))


def test_other_specs_connectors_and_releases_are_refused() -> None:
    spec = engine({"kvswap_replicas": "kv"})
    with pytest.raises(ValueError, match='it needs "kv_connector": "KVSwapConnector"'):
        _replicas.of(spec)

    class TieringOffloadingSpec(SimpleNamespace):
        pass

    with allowed(), pytest.raises(ValueError, match="secondary tiers take the host pool for one engine's"):
        _replicas.of(TieringOffloadingSpec(**vars(spec)))
    del spec.config
    with allowed(), pytest.raises(ValueError, match=r"it needs vLLM 0\.30 or later"):
        _replicas.of(spec)
    with pytest.raises(ValueError, match=r'"kvswap_replicas" of .* is 7; it is a text'):
        _handler.replicas_of({"kvswap_replicas": 7})


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"hash": None}, "the hash of blocks is not known: set PYTHONHASHSEED"),
        ({"kv_scales": kvswap.identity.RUN_TIME}, "calculate_kv_scales"),
        ({}, None),
    ],
)
def test_blocks_of_which_the_meaning_is_not_known_are_not_shared(
    found: dict[str, Any], why: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = {"model": "m", "revision": None, "kv_format": "bf16", "ranks": "whole", "hash": ["sha256", "0"], **found}
    monkeypatch.setattr(_replicas, "identity_of", lambda _, said: kvswap.identity.Identity("vllm", known, said))
    if why is not None:
        with pytest.raises(ValueError, match=why):
            _replicas._identity_text(None)
        return
    with caplog.at_level(logging.WARNING, "kvswap.vllm"):
        text = _replicas._identity_text(None)
    assert text == _replicas._identity_text(None) and '"model":"m"' in text
    assert "the version of the weights of m is not known" in caplog.text


# -- workers -----------------------------------------------------------------------------------------------------------


def region(name: str, pages: list[int] | None = None, blocks: int = 1, **kwargs: Any) -> Any:
    tensor = SimpleNamespace(tensor=np.zeros(16, np.int8))
    arguments = {"kv_caches": SimpleNamespace(tensors=[tensor]), "blocks_per_chunk": blocks}
    return _replicas.region_for(replicas(name, **kwargs), {}, pages, arguments)


def test_each_rank_of_each_replica_has_its_cell_of_the_same_rows(name: str) -> None:
    views = {
        (number, rank): [made.create_next_view(1024), made.create_next_worker_view(3072)]
        for number in (0, 1)
        for rank in (0, 1)
        for made in [region(name, number=number, ranks=2, rank=rank)]
    }
    for rank in (0, 1):
        views[0, rank][0][:] = 1 + rank
        views[0, rank][1][:] = 11 + rank
    for rank in (0, 1):
        assert (views[1, rank][0] == 1 + rank).all() and (views[1, rank][1] == 11 + rank).all()
        assert views[1, rank][1].shape == (CHUNKS, 3072)
    full = region(name, number=2, ranks=2, rank=1)
    full.create_next_view(4096)
    with pytest.raises(ValueError, match="has 0 bytes left, and a tensor 1"):
        full.create_next_view(1)


def test_coded_blocks_of_a_chunk_lie_one_behind_the_other(name: str) -> None:
    """In the cell of their rank, with what is left of it behind each."""
    made = region(name, [256, 768], 2, ranks=2, rank=1)
    first, second = (made.create_next_worker_view(1 << 20) for _ in range(2))  # asked for as on the GPU
    assert (first.shape, second.shape) == ((CHUNKS, 2, 256), (CHUNKS, 2, 768))
    row, block, begin = ROW, ROW // 4, first.ctypes.data
    assert first.strides == second.strides == (row, block, 1) and second.ctypes.data == begin + 256
    flat = np.frombuffer(made.pool, np.int8)
    assert begin == flat.ctypes.data + ROW // 2
    with pytest.raises(ValueError, match="a block has 4096 bytes, and a cell of the region 2048 for it"):
        region(name, [4096], 2, number=1, ranks=2)


def test_a_pool_of_another_size_is_refused(name: str) -> None:
    first = region(name)
    shown = [pool for pool in info.collect().replicas if pool.name == name]
    assert len(shown) == 1 and shown[0].nbytes > CHUNKS * ROW
    assert f"replicas {name}: " in info.collect().to_text()
    spec = engine({"kvswap_replicas": name}, 1)
    spec.num_chunks += 1
    with allowed():
        other = _replicas.of(spec)
    tensor = SimpleNamespace(tensor=np.zeros(16, np.int8))
    with pytest.raises(ValueError, match=r"kvswap_replicas: .*num_blocks is 8, and 9 was asked for.*cpu_bytes_to_use"):
        _replicas.region_for(other, {}, None, {"kv_caches": SimpleNamespace(tensors=[tensor])})
    first.cleanup()
    first.cleanup()


# -- a scheduler's manager ---------------------------------------------------------------------------------------------


class LookupResult(enum.Enum):
    MISS, HIT, HIT_PENDING, RETRY = range(4)


@dataclass
class PrepareStoreOutput:
    keys_to_store: list[bytes]
    store_spec: Any
    evicted_keys: list[bytes]


class Gauges(dict):
    set_gauge = dict.__setitem__

    def increase_counter(self, name: str, more: int, labels: tuple[str, ...]) -> None:
        key = (name, *labels)
        self[key] = self.get(key, 0) + more


class OffloadPromMetrics:
    def __init__(self) -> None:
        self._offloading_metric_metadata = self._offloading_metric_defs = {}
        self._create_metric("")

    def _create_metric(self, name: str) -> None: ...


@pytest.fixture
def manager_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes managers, on stand-ins for vLLM's modules."""
    gauges = {f"CPU_CACHE_{name}USAGE_PERC": name for name in ("", "WRITE_", "READ_")}
    modules = {
        "vllm.v1.kv_offload.base": {
            "LookupResult": LookupResult,
            "OffloadingCounterMetadata": object,
            "OffloadingGaugeMetadata": object,
            "OffloadingManager": object,
            "PrepareStoreOutput": PrepareStoreOutput,
            "RequestOffloadingContext": object,
        },
        "vllm.v1.kv_offload.cpu.common": {
            "CPULoadStoreSpec": lambda slots: SimpleNamespace(block_ids=list(slots)),
            "CPUOffloadingMetrics": SimpleNamespace(**gauges),
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": {
            "OffloadingConnectorStats": Gauges,
            "OffloadPromMetrics": OffloadPromMetrics,
        },
    }
    for full, names in modules.items():
        parts = full.split(".")
        for end in range(1, len(parts) + 1):
            at = ".".join(parts[:end])
            if at not in sys.modules:
                monkeypatch.setitem(sys.modules, at, ModuleType(at))
        vars(sys.modules[full]).update(names)
    ours = ("kvswap.vllm._replica_manager", "kvswap.vllm._own_stats")
    for full in ours:
        monkeypatch.delitem(sys.modules, full, raising=False)
    module = importlib.import_module(ours[0])
    for full in ours:
        monkeypatch.delitem(sys.modules, full)

    def make(name: str, number: int) -> Any:
        return module.ReplicaManager(replicas(name, number).join("same"), CHUNKS)

    return make


def store(manager: Any, *keys: bytes, success: bool = True) -> None:
    output = manager.prepare_store(keys, None)
    assert output.keys_to_store == list(keys) and output.evicted_keys == []
    manager.complete_store(set(keys), None, success)


def hits(manager: Any, *keys: bytes) -> list[LookupResult]:
    found = [manager.lookup(key, None) for key in keys]
    manager.on_schedule_end(None)
    return found


HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING


def test_what_one_replica_stored_is_loaded_by_another(manager_of: Any, name: str) -> None:
    one, two = manager_of(name, 0), manager_of(name, 1)
    long = b"k" * 100
    output = one.prepare_store([b"x", long], None)
    assert hits(two, b"x", b"y", long) == [PENDING, MISS, PENDING]
    assert two.prepare_store([b"x", b"y"], None).keys_to_store == [b"y"]
    one.complete_store([b"x", long], None)
    assert two.lookup(b"x", None) is HIT and two.lookup(long, None) is HIT and two.lookup(long + b"k", None) is MISS
    load = two.prepare_load([b"x", long], None)
    assert load.block_ids == output.store_spec.block_ids
    assert two.loads == {"own": 0, "others": 2}
    stats = two.get_stats()
    assert stats["kvswap_replica_loaded_chunks", "others"] == 2 and stats["kvswap_replica_engines"] == 2
    assert ("kvswap_replica_loaded_chunks", "own") not in stats
    assert "kvswap_replica_loaded_chunks" not in str(two.get_stats())  # only what came since
    two.on_schedule_end(None)
    assert two._index.info()["pinned"] == 3  # both, and "y"
    two.complete_load([b"x", long], None)
    two.complete_store([b"y"], None, False)
    assert two._index.info()["pinned"] == 0 and hits(one, b"y") == [MISS]
    store(one, b"z", success=False)
    assert hits(two, b"z") == [MISS]
    assert one.prepare_store([b"x"], None).keys_to_store == []


def test_a_hit_stays_until_the_end_of_the_step(manager_of: Any, name: str) -> None:
    one, two = manager_of(name, 0), manager_of(name, 1)
    keys = [b"%d" % i for i in range(CHUNKS)]
    store(one, *keys)
    assert two.lookup(keys[0], None) is HIT and two.lookup(keys[1], None) is HIT
    more = [b"m%d" % i for i in range(CHUNKS)]
    assert one.prepare_store(more[:7], None) is None  # else a block would be gone that is about to be loaded
    store(one, *more[:6])
    two.prepare_load([keys[0]], None)
    two.prepare_load([keys[0]], None)  # by another request
    two.on_schedule_end(None)
    store(one, *more[6:], b"last")
    two.complete_load([keys[0]], None)
    assert hits(one, *keys[:2]) == [HIT, MISS]
    two.complete_load([keys[0]], None)
    assert two._index.info()["pinned"] == 0
    with pytest.raises(kvswap.Error, match="was not looked up in this step"):
        two.prepare_load([keys[0], b"gone"], None)
    two.on_schedule_end(None)


def test_after_a_reset_slots_are_held_until_their_jobs_have_ended(manager_of: Any, name: str) -> None:
    one = manager_of(name, 0)
    store(one, b"read")
    one.lookup(b"read", None)
    one.prepare_load([b"read"], None)
    one.prepare_store([b"write"], None)
    one.lookup(b"read", None)  # looked up only
    one.unfinished = lambda: {5: SimpleNamespace(pending_count=2), 6: SimpleNamespace(pending_count=1)}
    one.reset_cache()
    one.unfinished = dict
    assert hits(one, b"read", b"write") == [MISS, MISS] and one._index.info()["pinned"] == 2
    stats = one.get_stats()
    assert [stats[name] for name in ("", "WRITE_", "READ_")] == [2 / CHUNKS, 1 / CHUNKS, 1 / CHUNKS]
    store(one, b"write")  # the same key again, beside the copy that is under way
    one.reported({5: 1, 6: 1, 7: 1})
    assert one._index.info()["pinned"] == 2
    one.reported({5: 1})
    assert one._index.info()["pinned"] == 0 and hits(one, b"write") == [HIT]
    one.reset_cache()
    assert hits(one, b"write") == [MISS]


def test_a_lock_that_cannot_be_had_makes_misses_and_later_calls(
    manager_of: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    one, holder = manager_of(name, 0), manager_of(name, 1)
    store(one, b"x")
    one.lookup(b"x", None)
    one.prepare_load([b"x"], None)
    one.prepare_store([b"y"], None)
    holder._index._hold()
    with caplog.at_level(logging.WARNING, "kvswap.vllm"):
        assert hits(one, b"x") == [MISS] and one.prepare_store([b"z"], None) is None
        one.touch([b"x"], None)
        one.complete_load([b"x"], None)
        one.complete_store([b"y"], None)
    assert caplog.text.count("nothing is found or stored") == 1
    assert len(one._owed) == 2
    holder._index._let_go()
    one.on_schedule_end(None)
    assert not one._owed and hits(one, b"y") == [HIT] and one._index.info()["pinned"] == 0


def test_a_manager_leaves(manager_of: Any, name: str) -> None:
    one, two = manager_of(name, 0), manager_of(name, 1)
    store(one, b"x")
    one.lookup(b"x", None)
    one.shutdown()
    assert two._index.info()["members"] == 1 and hits(two, b"x") == [HIT]
    assert two.take_events() == () and two.config_info() == [{}]
    with pytest.raises(kvswap.Error, match="has joined as 'engine/1' already"):
        replicas(name, 1).join("same")
    with pytest.raises(ValueError, match=r"kvswap_replicas: .*mean something else"):
        replicas(name, 0).join("other")
    assert isinstance(two._index, _C._ReplicaIndex)
