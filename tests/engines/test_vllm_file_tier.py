"""The file tier as vLLM's tiering loads it, with vLLM's own classes; skipped where there is no vLLM."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import errno
import inspect
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, random_bytes

import kvswap
from kvswap import testing
from kvswap.files import clear

pytestmark = pytest.mark.not_sanitized("Python only")

tiering = pytest.importorskip("vllm.v1.kv_offload.tiering.base", reason="needs vLLM's tiered offloading")

base = pytest.importorskip("vllm.v1.kv_offload.base")
factory = pytest.importorskip("vllm.v1.kv_offload.tiering.factory")
vllm_file_tier = pytest.importorskip("kvswap.vllm._file_tier")
_tier_stats = pytest.importorskip("kvswap.vllm._tier_stats")

Factory = factory.SecondaryTierFactory
BY_PATH = "module_path" in inspect.getsource(Factory.get_tier_class)
if not BY_PATH:  # older: tiers have to be registered
    Factory.register_tier("FileTier", "kvswap.vllm", "FileTier")

CHUNKS, NBYTES = 12, 12288


def spec(rank: int = 0, events: bool = False) -> Any:
    """As much of an OffloadingSpec as tells blocks apart."""
    layers = [f"model.layers.{i}.self_attn" for i in range(80)]
    return SimpleNamespace(
        blocks_per_chunk=1,
        config=SimpleNamespace(
            groups=[SimpleNamespace(tokens_per_block=16, layer_names=layers)],
            parallel=SimpleNamespace(
                tp_size=8, pp_size=1, pcp_size=1, dcp_size=1, rank=rank, is_parallelism_agnostic=False
            ),
            canonical_layout=None,
            kv_cache_layout=None,
            replicated_layout=False,
            model=SimpleNamespace(name="org/model", dtype="bfloat16"),
            cache=SimpleNamespace(tokens_per_hash=16),
        ),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=events),
    )


def key_of(number: int) -> bytes:
    return base.make_offload_key(number.to_bytes(32, "little"), 0)


class Rig:
    def __init__(self, folder: Path | list[Path], rank: int = 0, events: bool = False, **options: Any) -> None:
        self.memory = random_bytes(1, CHUNKS * NBYTES).reshape(CHUNKS, NBYTES).copy()
        self.before = self.memory.copy()
        directory: Any = list(map(str, folder)) if isinstance(folder, list) else str(folder)
        self.open(
            {"type": "FileTier", "directory": directory, "capacity": 8 << 20, "revision": "r"} | options, rank, events
        )
        self.context = (
            base.ReqContext(req_id="request") if "req_id" in inspect.signature(base.ReqContext).parameters else None
        )
        self.jobs = 0

    def open(self, config: dict[str, Any], rank: int = 0, events: bool = False) -> None:
        config |= {"module_path": "kvswap.vllm"} if BY_PATH else {}
        self.tier = Factory.create_secondary_tier(config, memoryview(self.memory), spec(rank, events))

    def job(self, numbers: list[int], chunks: list[int], load: bool) -> int:
        kind = getattr(tiering, "TransferJob", None) or tiering.JobMetadata
        ids = "chunk_ids" if "chunk_ids" in inspect.signature(kind).parameters else "block_ids"
        self.jobs += 1
        job = kind(
            job_id=self.jobs,
            keys=[key_of(number) for number in numbers],
            is_promotion=load,
            req_context=self.context,
            **{ids: np.array(chunks)},
        )
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return self.jobs

    def finished(self, count: int = 1) -> dict[int, Any]:
        found: dict[int, Any] = {}
        end = time.monotonic() + PATIENCE
        while len(found) < count and time.monotonic() < end:
            found |= {result.job_id: result for result in self.tier.get_finished_jobs()}
        return found

    def has(self, number: int) -> bool:
        answer = self.tier.lookup(key_of(number), self.context)
        assert answer in (base.LookupResult.HIT, base.LookupResult.MISS)
        return bool(answer == base.LookupResult.HIT)


@pytest.fixture(autouse=True)
def keys_of_engines_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.26 takes a random seed without it."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.tier.shutdown()


def test_blocks_go_down_and_come_up(rig: Rig) -> None:
    assert not rig.has(7)
    job = rig.job([7, 8, 9], [2, 0, 11], load=False)
    result = rig.finished()[job]
    assert result.success and getattr(result, "transfer_bytes", 3 * NBYTES) == 3 * NBYTES
    assert rig.has(7) and rig.has(9) and not rig.has(1)
    rig.memory[:] = 0xEE
    job = rig.job([9, 7], [5, 6], load=True)
    assert rig.finished()[job].success
    np.testing.assert_array_equal(rig.memory[[5, 6]], rig.before[[11, 2]])
    assert (np.delete(rig.memory, [5, 6], axis=0) == 0xEE).all()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"enable_kv_events": "false"}, '"enable_kv_events" of .*"FileTier".* \'false\'; it is true or false'),
        ({"directory": ""}, '"directory" of .* absolute path'),
        ({"directory": "kv"}, '"directory" of .* absolute path'),
        ({"directory": []}, '"directory" of .* absolute path'),
        ({"capacity": None}, 'needs "capacity"'),
        ({"capacity": True}, '"capacity" of .* is True'),
        ({"capacity": "500G"}, '"500GiB"'),
        ({"durability": "sync"}, "one of none, flush, fsync"),
        ({"depth": "8"}, '"depth" of'),
        ({"enable_kv_event": True}, 'is "enable_kv_events" meant'),
    ],
)
def test_options_that_cannot_be_meant_are_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    options = {"type": "FileTier", "directory": str(tmp_path), "capacity": 8 << 20, **given}
    options |= {"module_path": "kvswap.vllm"} if BY_PATH else {}
    memory = np.zeros((CHUNKS, NBYTES), np.uint8)
    with pytest.raises(ValueError, match=said):
        Factory.create_secondary_tier(options, memoryview(memory), spec())


def test_a_directory_below_home_and_a_size_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    rig = Rig(Path("~/kv"), capacity="8MiB", nodes="/somewhere")
    assert rig.tier._store.stats()["blocks"] == 0 and (tmp_path / "kv").is_dir() and not (tmp_path / "~").exists()
    rig.tier.shutdown()


def test_it_is_a_tier_as_vllm_has_them(rig: Rig) -> None:
    assert isinstance(rig.tier, tiering.SecondaryTierManager)
    rig.tier.on_new_request(rig.context)
    rig.tier.touch([key_of(1)], rig.context)
    rig.tier.drain_jobs()
    assert list(rig.tier.get_finished_jobs()) == []


def test_a_key_that_is_lost_is_told(rig: Rig) -> None:
    rig.finished(rig.job([1, 2, 3], [1, 2, 3], load=False))
    job = rig.job([3, 99, 1], [4, 5, 6], load=True)
    result = rig.finished()[job]
    assert not result.success
    if hasattr(result, "successful_keys"):
        assert set(result.successful_keys) == {key_of(3), key_of(1)}
    np.testing.assert_array_equal(rig.memory[[4, 6]], rig.before[[3, 1]])


def test_a_block_that_cannot_be_read_is_stored_again(rig: Rig) -> None:
    """Until then vLLM must not be told of it: it would ask again and again, and its request never run."""
    rig.finished(rig.job([7, 8], [2, 0], load=False))
    with testing.file_fault(rig.tier._store, "read", "fail", nth=1, every=1, code=errno.EIO):
        job = rig.job([7], [3], load=True)
        assert not rig.finished()[job].success
    assert not rig.has(7) and rig.has(8)
    rig.finished(rig.job([7], [2], load=False))
    job = rig.job([7], [3], load=True)
    assert rig.has(7) and rig.finished()[job].success


def test_a_disk_that_cannot_keep_up_costs_stores_not_the_engine(tmp_path: Path) -> None:
    rig = Rig(tmp_path, engine="threads", depth=1, queue=2)
    with testing.file_fault(rig.tier._store, "write", "delay", every=1, delay=5 * PATIENCE):
        begin = time.monotonic()
        jobs = [rig.job([i], [i], load=False) for i in range(6)]
        assert time.monotonic() - begin < PATIENCE, "submitting waited"
    results = rig.finished(6)
    assert [results[job].success for job in jobs[:2]] == [True, True]
    assert not results[jobs[-1]].success and not rig.has(5) and rig.has(0)
    rig.tier.shutdown()


def test_draining(tmp_path: Path) -> None:
    rig = Rig(tmp_path, engine="threads", depth=1)
    with testing.file_fault(rig.tier._store, "write", "delay", every=1, delay=0.02):
        job = rig.job([1, 2, 3], [1, 2, 3], load=False)
        rig.tier.drain_jobs()
        assert [result.job_id for result in rig.tier.get_finished_jobs()] == [job]
    rig.tier.shutdown()


def test_the_next_engine_finds_them_and_another_rank_does_not(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.finished(rig.job([1, 2], [1, 2], load=False))
    beside = Rig(tmp_path)  # while the first still writes
    assert beside.has(1) and not beside.tier._readonly
    assert beside.finished(beside.job([3, 1], [3, 1], load=False))
    assert beside.tier._store.stats()["stored"] == 1  # the other's block is kept
    loaded = beside.job([2], [9], load=True)
    assert beside.finished()[loaded].success
    np.testing.assert_array_equal(beside.memory[9], rig.before[2])
    end = time.monotonic() + PATIENCE
    while not rig.has(3) and time.monotonic() < end:
        time.sleep(0.01)
    loaded = rig.job([3], [10], load=True)
    assert rig.finished()[loaded].success
    np.testing.assert_array_equal(rig.memory[10], beside.before[3])
    beside.tier.shutdown()
    rig.tier.shutdown()
    again, other = Rig(tmp_path), Rig(tmp_path, rank=3)
    assert again.has(1) and again.has(3) and not again.tier._readonly
    assert not other.has(1) and not other.tier._readonly
    again.tier.shutdown()
    other.tier.shutdown()


def test_several_disks_have_one_writer(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    rig = Rig(folders)
    rig.finished(rig.job([1, 2], [1, 2], load=False))
    reader = Rig(folders)
    assert reader.tier._readonly and reader.has(1)
    refused = reader.job([3], [3], load=False)
    assert not reader.finished()[refused].success
    reader.tier.shutdown()
    rig.tier.shutdown()
    assert all(list(folder.glob("*/store.kvs")) for folder in folders)


@pytest.mark.skipif(not hasattr(base, "OffloadingEvent"), reason="this vLLM has no KV events of tiers")
def test_events(tmp_path: Path) -> None:
    rig, other = Rig(tmp_path, events=True, enable_kv_events=True), Rig(tmp_path, enable_kv_events=True)
    rig.finished(rig.job([1, 2], [1, 2], load=False))
    events = list(rig.tier.take_events())
    assert sorted(key for event in events for key in event.keys) == sorted([key_of(1), key_of(2)])
    assert not any(event.removed for event in events)
    other.finished(other.job([3], [3], load=False))
    assert list(other.tier.take_events()) == []
    end, events = time.monotonic() + PATIENCE, []
    while not events and time.monotonic() < end:
        events = list(rig.tier.take_events())
    assert [event.keys for event in events] == [[key_of(3)]]
    rig.tier.shutdown()
    other.tier.shutdown()


@pytest.mark.skipif(not hasattr(base, "OffloadingEvent"), reason="this vLLM has no KV events of tiers")
def test_events_of_a_restart_and_of_a_clear(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.finished(rig.job([1, 2], [1, 2], load=False))
    rig.tier.shutdown()
    rig = Rig(tmp_path, events=True, enable_kv_events=True)
    for removed in (False, True):
        events = list(rig.tier.take_events())
        assert sorted(key for event in events for key in event.keys) == sorted([key_of(1), key_of(2)])
        assert all(event.removed == removed for event in events)
        assert list(rig.tier.take_events()) == []
        clear(tmp_path)
    rig.tier.shutdown()


def test_what_it_adds_to_vllms_metrics(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics")
    if not hasattr(base, "OffloadingCounterMetadata"):
        pytest.skip("this vLLM's tiers have no metrics")
    monkeypatch.setattr(_tier_stats, "_EVERY_SECONDS", 0.0)
    defined = type(rig.tier).build_metric_definitions({})
    rig.job([1, 2, 3], [1, 2, 3], load=False)
    rig.finished()
    rig.job([3, 99], [4, 5], load=True)
    rig.finished()
    told = stats.OffloadingConnectorStats().aggregate(rig.tier.get_stats())
    assert told.reduce() == {
        "kvswap_tier_blocks:('FileTier', 'stored')": 3,
        "kvswap_tier_blocks:('FileTier', 'loaded')": 1,
        "kvswap_tier_blocks:('FileTier', 'missed')": 1,
        "kvswap_tier_held_blocks:('FileTier',)": 3,
        "kvswap_tier_file_bytes:('FileTier',)": rig.tier._store.stats()["file_nbytes"],
    }
    assert set(told._types) <= set(defined)
    assert all(len(labels) == len(defined[name].labelnames) for name, all_ in told._values.items() for labels in all_)
    assert rig.tier.get_stats() is None
    rig.job([4], [4], load=False)
    rig.finished()
    assert rig.tier.get_stats().reduce()["kvswap_tier_blocks:('FileTier', 'stored')"] == 1
    monkeypatch.setattr(_tier_stats, "_EVERY_SECONDS", PATIENCE)
    rig.job([5], [5], load=False)
    rig.finished()
    assert rig.tier.get_stats() is not None  # and from now on too soon
    rig.job([6], [6], load=False)
    rig.finished()
    assert rig.tier.get_stats() is None


def test_what_the_tier_is_told_of(tmp_path: Path) -> None:
    """tests/integration/vllm_identity.py has vLLM's own configurations."""
    rig, other = Rig(tmp_path), Rig(tmp_path, rank=1)
    assert rig.tier.identity.fields["model"] == "org/model" and not rig.tier.identity.own
    assert rig.tier.identity != other.tier.identity
    for one in (rig, other):
        one.tier.shutdown()
    own = Rig(tmp_path, revision=None)
    assert own.tier.identity.own and own.tier.identity.unknown[0] == "revision"
    own.finished(own.job([1], [1], load=False))
    again = Rig(tmp_path, revision=None)
    assert own.has(1) and not again.has(1)
    folders = [folder for one in (own, again) for folder in one.tier._folders]
    assert all(folder.is_dir() for folder in folders)
    for one in (own, again):
        one.tier.shutdown()
    assert not any(folder.exists() for folder in folders)


def test_scales_of_run_time_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvswap.identity import RUN_TIME

    found = vllm_file_tier.identity_of(spec(), vllm_file_tier.Said("r")).found
    at_run_time = vllm_file_tier.Identity("vllm", {**found, "kv_scales": RUN_TIME}, vllm_file_tier.Said("r"))
    monkeypatch.setattr(vllm_file_tier, "identity_of", lambda *_: at_run_time)
    rig = Rig(tmp_path)
    job = rig.job([1], [1], load=False)
    assert not rig.finished()[job].success and not rig.has(1)
    job = rig.job([1], [2], load=True)
    assert not rig.finished()[job].success
    rig.tier.touch([key_of(1)], rig.context)
    assert rig.tier.get_stats() is None and list(rig.tier.take_events()) == []
    rig.tier.shutdown()
    assert not list(tmp_path.iterdir())


def test_what_the_store_refuses_ends_no_engine(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's scheduler calls a tier unguarded."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise kvswap.Error("the store has no memory left")

    rig.finished(rig.job([1], [1], load=False))
    long, context = b"x" * 600, rig.context
    assert rig.tier.lookup(long, context) == base.LookupResult.MISS == rig.tier.lookup(b"", context)
    rig.tier.touch([long, b""], context)
    for name in ("store", "load", "contains", "touch"):
        monkeypatch.setattr(rig.tier, "_store", _Refusing(rig.tier._store, name, refuse))
        assert rig.has(1) == (name != "contains")
        rig.tier.touch([key_of(1)], context)
        for load in (False, True):
            job = rig.job([1], [2], load=load)
            result = rig.finished()[job]
            assert result.success == (name != ("load" if load else "store"))
        monkeypatch.undo()
    job = rig.job([1], [2], load=True)
    assert rig.finished()[job].success


class _Refusing:
    def __init__(self, store: Any, name: str, refuse: Any) -> None:
        self._store, self._name, self._refuse = store, name, refuse

    def __getattr__(self, name: str) -> Any:
        return self._refuse if name == self._name else getattr(self._store, name)


def test_a_store_beside_loads_that_never_pause(tmp_path: Path) -> None:
    """And a look-up answers meanwhile; no store is dropped because loads fill the queue."""
    rig = Rig(tmp_path, engine="threads", depth=1, queue=8)
    numbers = list(range(CHUNKS))
    first = rig.job(numbers, numbers, load=False)
    assert rig.finished()[first].success
    with testing.file_fault(rig.tier._store, "read", "delay", every=1, delay=0.002):
        loads: set[int] = set()
        store, results, end = 0, {}, time.monotonic() + PATIENCE
        while store not in results and time.monotonic() < end:
            while len(loads) < 8:
                loads.add(rig.job(numbers, numbers, load=True))
            store = store or rig.job([99], [0], load=False)
            results = {result.job_id: result for result in rig.tier.get_finished_jobs()}
            loads -= results.keys()
            time.sleep(0.001)
        assert results[store].success and rig.has(99)
        rig.tier.drain_jobs()
    rig.tier.shutdown()
