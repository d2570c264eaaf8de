"""kvswap_overlap: what a step waits for, which loads run in their request's step, and what happens if one fails; on
stand-ins for the parts of vLLM.

tests/integration/vllm_package.py --overlap runs the real ones.
"""

# mypy: ignore-errors

from __future__ import annotations

import importlib
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, Gate

import kvswap
from kvswap.offload import CanonicalKVCacheRef, CPULoadStoreSpec, GPULoadStoreSpec
from kvswap.vllm import _parts
from kvswap.vllm._handler import OverlapSettings, VLLMHandler, overlap_of

pytestmark = pytest.mark.not_sanitized("Python only")

OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
LAYERS, PAGE, BLOCKS = 4, 512, 24


@dataclass
class TransferJob:
    req_id: str
    src_spec: Any
    dst_spec: Any


@dataclass
class OffloadingConnectorMetadata:
    load_jobs: dict[int, Any]
    store_jobs: dict[int, Any]


def output(new: Iterable[str] = (), resumed: Iterable[str] = (), tokens: int = 16) -> Any:
    """What a step's plan says of its requests, each of which begins with so many tokens."""
    fresh = [SimpleNamespace(req_id=name, num_computed_tokens=tokens) for name in new]
    names = ["running", *resumed]
    cached = SimpleNamespace(req_ids=names, num_computed_tokens=[tokens] * len(names), resumed_req_ids=set(resumed))
    return SimpleNamespace(scheduled_new_reqs=fresh, scheduled_cached_reqs=cached)


OUTPUT = output()


def report(meta: Any = None, received: set[str] | None = None) -> Any:
    """What the workers tell after a step."""
    return SimpleNamespace(kv_connector_worker_meta=meta, finished_recving=received, finished_sending=None)


class OffloadingConnectorScheduler:
    """As in 0.26: what is asked of it, and the names that update_state_after_alloc() has."""

    def __init__(self, tokens_per_block: int = 16) -> None:
        self.config = SimpleNamespace(kv_group_configs=[SimpleNamespace(tokens_per_block=tokens_per_block)])
        self._jobs: dict[int, Any] = {}
        self._req_status: dict[str, Any] = {}
        self._current_batch_load_jobs: dict[int, Any] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        raise NotImplementedError

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        fresh = []
        for block in blocks.blocks[0]:
            if not block.is_null and block.block_hash is None:
                fresh.append(block.block_id)
        spec = SimpleNamespace(block_ids=np.array(fresh))
        job_id = len(self._jobs)
        self._current_batch_load_jobs[job_id] = TransferJob(request.request_id, None, spec)
        self._jobs[job_id] = SimpleNamespace(is_store=False, req_id=request.request_id)


class Scheduler:
    def _handle_invalid_blocks(self, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]) -> set[str]:
        self.theirs = set(invalid_block_ids)
        return set()

    def _preempt_request(self, request: Any, timestamp: float) -> None:
        assert request not in self.running
        request.status = "preempted"


class State(str):
    """A request's status, which is a string where it is compared."""

    @property
    def name(self) -> str:
        return self.upper()


class Request:
    def __init__(self, name: str, tokens: int = 100) -> None:
        self.request_id, self.num_tokens, self.status = name, tokens, State("running")
        self.async_tokens_to_discard = self.num_in_flight_tokens = self.num_output_placeholders = 0
        self.is_prefill_chunk = False

    def is_finished(self) -> bool:
        return self.status == "finished"


STATUS = SimpleNamespace(WAITING_FOR_REMOTE_KVS="loading", WAITING="waiting", PREEMPTED="preempted")


@dataclass
class SchedulerOutput:
    """Of 0.26."""


class AttentionSpec:
    page_size_bytes, block_size = PAGE, 16


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """kvswap's modules over the stand-ins, and the forward context that there is."""
    here = SimpleNamespace(context=None)
    contents = {
        f"{OFFLOADING}.common": {
            "TransferJob": TransferJob,
            "OffloadingConnectorMetadata": OffloadingConnectorMetadata,
        },
        f"{OFFLOADING}.scheduler": {"OffloadingConnectorScheduler": OffloadingConnectorScheduler},
        "vllm.v1.kv_cache_interface": {"AttentionSpec": AttentionSpec},
        "vllm.v1.core.sched.output": {"SchedulerOutput": SchedulerOutput},
        "vllm.v1.core.sched.scheduler": {"Scheduler": type("Scheduler", (), dict(vars(Scheduler)))},
        "vllm.v1.request": {
            "Request": Request,
            "RequestStatus": STATUS,
        },
        "vllm.forward_context": {"get_forward_context": lambda: here.context},
    }
    for name, content in contents.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            path = ".".join(parts[:i])
            if path not in sys.modules or not getattr(sys.modules[path], "stand_in", False):
                module = ModuleType(path)
                module.stand_in = True
                monkeypatch.setitem(sys.modules, path, module)
        vars(sys.modules[name]).update(content)
        for i in range(1, len(parts)):
            setattr(sys.modules[".".join(parts[:i])], parts[i], sys.modules[".".join(parts[: i + 1])])
    ours = ("_failures", "_unfinished", "_overlap", "_layers")
    for name in ours:
        monkeypatch.delitem(sys.modules, f"kvswap.vllm.{name}", raising=False)
    for name in ours:
        setattr(here, name.strip("_"), importlib.import_module(f"kvswap.vllm.{name}"))
    here.scheduler = sys.modules["vllm.v1.core.sched.scheduler"].Scheduler
    yield here
    for name in ours:
        sys.modules.pop(f"kvswap.vllm.{name}", None)


# -- what a step waits for --------------------------------------------------------------------------------------------


def context(kind: str = "NONE") -> Any:
    return SimpleNamespace(attn_metadata={"layer.0": object()}, cudagraph_runtime_mode=SimpleNamespace(name=kind))


class Rig:
    """A worker of four layers, a load that a gate holds, and a model that reads a layer's blocks before each layer.

    together: all layers of a block lie together, and each is a part of the block."""

    def __init__(self, vllm: SimpleNamespace, gate: Gate, together: bool) -> None:
        self.vllm, self.gate = vllm, gate
        rng = np.random.default_rng(1)
        tensors, page = (1, LAYERS * PAGE) if together else (LAYERS, PAGE)
        gpu, self.cpu = (
            [rng.integers(-128, 128, (BLOCKS, page), dtype=np.int8) for _ in range(tensors)] for _ in range(2)
        )
        self.gpu = [gpu[0][:, i * PAGE : (i + 1) * PAGE] for i in range(LAYERS)] if together else gpu
        self.expected = [tensor[[20, 21]].copy() for tensor in self.gpu]  # what the store brings to the host
        refs = [[CanonicalKVCacheRef(i, page) for i in range(tensors)]]
        self.names = [f"layer.{i}" for i in range(LAYERS)]
        layers = dict(zip(self.names, self.gpu, strict=True))
        options = {"device": gate.device, "wait_timeout": PATIENCE, "layers": layers}
        self.store, self.load = (VLLMHandler(gpu, self.cpu, 1, refs, to_cpu, **options) for to_cpu in (True, False))
        self.store.strict = self.load.strict = False
        self.loads = vllm.layers.StepLoads([self.store, self.load], layers)
        self.behind = kvswap.Stream(gate.device)

    def submit(self, kind: Any, early: bool = False) -> None:
        """A step that loads blocks 1 and 2, which a store that the gate holds is bringing to the host."""
        self.gate.hold(self.behind)
        self.gate.device.set_compute_stream(self.behind)
        try:
            self.store.transfer_async(1, GPULoadStoreSpec([20, 21], [2], [0]), CPULoadStoreSpec([5, 6]))
        finally:
            self.gate.device.set_compute_stream(0)
        self.loads.begin({2}, None if early else kind)
        self.load.transfer_async(2, CPULoadStoreSpec([5, 6]), GPULoadStoreSpec([1, 2], [2], [0]))
        self.vllm.context = kind

    def before_forward(self) -> None:
        self.loads.before_forward(self.vllm.context)

    def forward(self, skip: str | None = None) -> list[np.ndarray]:
        """What each layer reads."""
        read = []
        for name, tensor in zip(self.names, self.gpu, strict=True):
            if name != skip:
                self.loads.wait_for_layer(name)
            read.append(tensor[[1, 2]].copy())
        return read

    def learn(self) -> None:
        """A step without loads."""
        self.vllm.context = context()
        self.loads.begin(set(), self.vllm.context)
        self.before_forward()
        self.forward()
        assert self.loads.finish() == {}

    def again(self) -> None:
        """After the transfers of a step: the gate is closed, and their targets are cleared, for another one."""
        for handler in (self.store, self.load):
            handler.drain(PATIENCE)
            assert [result.success for result in handler.get_finished()] == [True]
        self.gate.close()
        for tensor in (*self.gpu, *self.cpu):
            tensor[[1, 2, 5, 6]] = 0

    def shut(self) -> None:
        for handler in (self.store, self.load):
            handler.shutdown(PATIENCE)

    def close(self) -> None:
        self.again()
        self.shut()


def held(rig: Rig, call: Callable[[], Any]) -> Any:
    """The call does not return before the gate is opened."""
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(call()))
    thread.start()
    thread.join(0.2)
    early = list(result)
    rig.gate.open()
    thread.join(PATIENCE)
    assert not early, "it did not wait"
    return result[0]


@pytest.fixture(params=[False, True], ids=["tensor-a-layer", "together"])
def rig(request: pytest.FixtureRequest, vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(_parts, "LEAST_NBYTES", PAGE // 2)
    with Gate(kvswap.Device("host:62")) as gate:
        yield Rig(vllm, gate, request.param)


def test_a_layer_is_read_behind_its_load(rig: Rig) -> None:
    rig.learn()
    rig.submit(context())
    rig.before_forward()  # does not wait
    read = held(rig, rig.forward)
    np.testing.assert_array_equal(read, rig.expected)
    assert rig.loads.finish() == {} and rig.loads.counts == {"layers": 1, "whole": 0}
    rig.close()


def test_a_load_before_it_is_known_what_its_step_is(rig: Rig) -> None:
    """It is submitted for layers if any kind of step is known to wait for each; a step of another waits for all."""
    rig.learn()
    for kind, counts in (
        ("NONE", {"layers": 1, "whole": 0}),
        ("FULL", {"layers": 1, "whole": 1}),
        ("NONE", {"layers": 2, "whole": 1}),
        ("PIECEWISE", {"layers": 2, "whole": 2}),  # its first one
        ("PIECEWISE", {"layers": 3, "whole": 2}),
    ):
        layers = counts["layers"] - rig.loads.counts["layers"]
        rig.submit(context(kind), early=True)
        if layers:
            rig.before_forward()
            read = held(rig, rig.forward)
        else:
            held(rig, rig.before_forward)
            read = rig.forward()
        np.testing.assert_array_equal(read, rig.expected)
        assert rig.loads.finish() == {} and rig.loads.counts == counts
        rig.again()
    rig.shut()


def test_waits_that_are_left_out_are_found(rig: Rig) -> None:
    """The test above can fail: here nothing waits, and the gate stays closed until all is read."""
    rig.learn()
    rig.submit(context())
    rig.before_forward()
    rig.loads._wait = lambda _: None
    read = rig.forward()
    rig.gate.open()
    assert not any(np.array_equal(*pair) for pair in zip(read, rig.expected, strict=True))
    rig.close()


@pytest.mark.parametrize(
    "kind",
    [
        context("FULL"),
        context("ANOTHER"),
        context("PIECEWISE"),  # no step of this kind has shown that its layers are waited for
        SimpleNamespace(attn_metadata=None, cudagraph_runtime_mode=SimpleNamespace(name="NONE")),
        SimpleNamespace(),
    ],
    ids=["full", "unknown", "piecewise", "outside", "nothing"],
)
def test_a_step_that_may_not_call_waits_for_all(rig: Rig, kind: Any) -> None:
    rig.learn()
    rig.submit(kind)
    held(rig, rig.before_forward)
    for tensor, expected in zip(rig.gpu, rig.expected, strict=True):
        np.testing.assert_array_equal(tensor[[1, 2]], expected)
    assert rig.loads.finish() == {} and rig.loads.counts == {"layers": 0, "whole": 1}
    rig.close()


def test_the_first_step_waits_for_all(rig: Rig) -> None:
    rig.submit(context())
    held(rig, rig.before_forward)
    rig.forward()
    assert rig.loads.finish() == {} and rig.loads.counts == {"layers": 0, "whole": 1}
    rig.close()


def test_a_layer_that_was_not_waited_for(rig: Rig) -> None:
    rig.learn()
    rig.submit(context())
    rig.before_forward()
    rig.gate.open()
    rig.forward(skip="layer.2")
    assert "layer.2" in rig.loads.finish()[2]
    rig.loads.begin({3}, context())
    rig.before_forward()
    assert rig.loads.counts == {"layers": 1, "whole": 1}  # from now on
    rig.shut()


@pytest.mark.parametrize("kind", ["NONE", "FULL"])
def test_a_wait_that_cannot_be_queued(rig: Rig, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The load ends well, and yet the model may have read before it."""

    def refuse(job_id: int, tensors: Any = None) -> None:
        raise kvswap.Error("a stream that is being captured")

    rig.learn()
    rig.gate.open()
    rig.submit(context(kind))
    with monkeypatch.context() as patch:
        patch.setattr(rig.load, "make_wait", refuse)
        rig.before_forward()
        rig.forward()
    assert "may not have waited for it: a stream that is being captured" in rig.loads.finish()[2]
    rig.learn()  # of later steps nothing is said
    rig.close()


def test_each_layer_waits_for_its_own_part(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two blocks that adjoin, a store and a load of a tensor a layer copy each layer at once. Where layers lie
    together, the store is one copy in all, and the load copies a layer of each block."""
    waits = []
    rig.learn()
    rig.gate.open()
    before = rig.load.device.stats()["copies"]
    rig.submit(context())
    together = len(rig.load.dst_tensors) == 1
    assert rig.load.device.stats()["copies"] - before == 2 * LAYERS + (1 if together else 0)
    rig.before_forward()
    with monkeypatch.context() as patch:
        patch.setattr(rig.load, "make_wait", lambda job, parts: waits.append(parts))
        rig.forward()
    assert waits == [(i,) for i in range(LAYERS)] and rig.loads.finish() == {}
    rig.close()


def test_a_step_waits_for_loads_that_were_reported(rig: Any) -> None:
    """Before it begins, and for all of them; a job that has ended meanwhile is no error."""
    rig.submit(context())
    rig.loads.finish()  # the step that submitted it
    rig.loads.wait_for(frozenset())
    assert not rig.loads.awaited
    held(rig, lambda: rig.loads.wait_for({2, 77}))
    np.testing.assert_array_equal(rig.forward(), rig.expected)
    assert rig.loads.awaited == {2, 77} and rig.loads.reported == 2
    assert rig.loads.finish() == {} and not rig.loads.awaited
    rig.close()


def test_a_reported_load_that_cannot_be_waited_for(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.submit(context())
    rig.loads.finish()
    rig.gate.open()

    def refuse(job: int, parts: Any) -> None:
        raise kvswap.Error("no wait")

    monkeypatch.setattr(rig.load, "make_wait", refuse)
    rig.loads.wait_for({2})
    reasons = rig.loads.finish()
    assert [*reasons] == [2] and "may not have waited for it: no wait" in reasons[2]
    rig.close()


# -- which loads ------------------------------------------------------------------------------------------------------


def test_the_settings() -> None:
    assert overlap_of({}) == OverlapSettings(False, 1.0, 0)
    assert overlap_of({"kvswap_overlap": True}) == OverlapSettings(True, 1.0, 1 << 30, True)
    assert not overlap_of({"kvswap_overlap": True, "kvswap_overlap_ahead": False}).ahead
    with pytest.raises(ValueError, match=r"kvswap_overlap_ahead.* is 1"):
        overlap_of({"kvswap_overlap": True, "kvswap_overlap_ahead": 1})
    assert overlap_of({"kvswap_overlap": True, "sync_load_budget_bytes": 5}).budget == 5
    with pytest.raises(ValueError, match=r"kvswap_overlap.* is 'yes'"):
        overlap_of({"kvswap_overlap": "yes"})
    for wrong in (-1, True, math.inf, "1"):
        with pytest.raises(ValueError, match=r"kvswap_overlap_shared_ms.* is"):
            overlap_of({"kvswap_overlap_shared_ms": wrong})
    for wrong in (None, "1 GiB", math.inf, [], True, -1, 1.5):
        with pytest.raises(ValueError, match=r"sync_load_budget_bytes.* is"):
            overlap_of({"sync_load_budget_bytes": wrong})


def cache(*specs: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer.{i}" for i in range(LAYERS)]) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups or None)


def config(**values: Any) -> Any:
    parallel = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**parallel, **values}),
        speculative_config=values.get("speculative_config"),
        model_config=SimpleNamespace(is_encoder_decoder=values.get("encoder", False)),
    )


@pytest.mark.parametrize(
    ("values", "spec", "reason"),
    [
        ({}, AttentionSpec(), None),
        ({"speculative_config": object()}, AttentionSpec(), "draft model"),
        ({"pipeline_parallel_size": 2}, AttentionSpec(), "pipeline"),
        ({"decode_context_parallel_size": 2}, AttentionSpec(), "context parallelism"),
        ({"enable_dbo": True}, AttentionSpec(), "several threads"),
        ({"use_ubatching": True}, AttentionSpec(), "several threads"),
        ({"encoder": True}, AttentionSpec(), "encoder"),
        ({}, SimpleNamespace(), "no attention cache"),
    ],
)
def test_where_it_is_off(vllm: SimpleNamespace, values: Any, spec: Any, reason: str | None) -> None:
    found = vllm.overlap.why_not(config(**values), cache(spec))
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("name", ["_handle_invalid_blocks", "_preempt_request"])
def test_a_scheduler_that_is_not_known(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(vllm.scheduler, name, lambda self, other: None)
    assert name in vllm.overlap.why_not(config(), cache(AttentionSpec()))


def test_a_connector_that_is_not_known(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffloadingConnectorScheduler, "update_state_after_alloc", lambda *_: None)
    assert "update_state_after_alloc is not known" in vllm.overlap.why_not(config(), cache(AttentionSpec()))
    monkeypatch.setattr(OffloadingConnectorScheduler, "_reserve_sync_load", lambda self, hit: None, raising=False)
    assert "_reserve_sync_load is not known" in vllm.overlap.why_not(config(), cache(AttentionSpec()))


@pytest.mark.parametrize(("name", "known"), [("max_num_new_tokens", True), ("another", False)])
def test_what_a_lookup_takes(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str, known: bool) -> None:
    taken: dict[str, Any] = {}
    exec(f"def asked(self, request, num_computed_tokens, {name}=None): ...", taken)
    monkeypatch.setattr(OffloadingConnectorScheduler, "get_num_new_matched_tokens", taken["asked"])
    found = vllm.overlap.why_not(config(), cache(AttentionSpec()))
    assert found is None if known else "get_num_new_matched_tokens is not known" in found


@pytest.fixture
def overlap(vllm: SimpleNamespace) -> Any:
    """100 tokens are 12,800 bytes: at 10 GB/s they take 1.3 us. The budget is 200 tokens'."""
    settings = OverlapSettings(True, 1.5e-3, 200 * 128)
    return vllm.overlap.make(OffloadingConnectorScheduler(), cache(AttentionSpec()), settings)


def test_a_request_alone_loads_in_its_step(overlap: Any) -> None:
    request = Request("a")
    overlap.added(request)
    assert overlap.matched(request, 0, (96, True)) == (96, False)
    assert overlap.matched(request, 0, (0, False)) == (0, False)
    assert overlap.matched(request, 0, (None, False)) == (None, False)
    built(overlap)
    assert overlap.matched(Request("b", 1000), 0, (208, True)) == (208, True)  # more than the budget


HITS = {  # of 100 tokens in blocks of 16: computed, hit, and what its step loads
    "all of the prompt": (0, 100, 96),
    "all but what the GPU has": (16, 84, 80),
    "into the block of the last token": (0, 98, 96),
    "to the middle of a block": (0, 90, 80),
    "less than a block": (96, 3, 0),
}


@pytest.mark.parametrize(("computed", "hit", "loaded"), HITS.values(), ids=HITS)
def test_the_step_computes_the_block_that_a_hit_ends_in(overlap: Any, computed: int, hit: int, loaded: int) -> None:
    request = Request("a")
    overlap.added(request)
    expected = (loaded, False) if loaded else (hit, True)
    assert overlap.matched(request, computed, (hit, True)) == expected


@pytest.mark.parametrize("name", ["sliding_window", "attention_chunk_size"])
def test_a_window_is_loaded_as_it_was_looked_up(vllm: SimpleNamespace, name: str) -> None:
    spec = AttentionSpec()
    setattr(spec, name, 64)
    overlap = vllm.overlap.make(OffloadingConnectorScheduler(), cache(spec), OverlapSettings(True, 1.0, 1 << 20))
    request = Request("a")
    overlap.added(request)
    assert overlap.matched(request, 0, (100, True)) == (100, True)
    assert overlap.matched(request, 0, (96, True)) == (96, False)


def test_where_vllm_reserves_the_load(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """As 0.33: what is reserved is what the request is told of."""
    reserved = []
    theirs = OffloadingConnectorScheduler()
    theirs._current_batch_sync_loads = set()
    theirs._reserve_sync_load = lambda status, computed, hit: reserved.append(hit) or True
    monkeypatch.setattr(OffloadingConnectorScheduler, "_reserve_sync_load", None, raising=False)
    overlap = vllm.overlap.make(theirs, cache(AttentionSpec()), OverlapSettings(True, 1.0, 1 << 20))
    request = Request("a")
    overlap.added(request)
    assert theirs._reserve_sync_load(SimpleNamespace(req=request), 0, 100)
    assert reserved == [96]
    assert overlap.matched(request, 0, (100, False)) == (96, False)
    assert overlap.matched(request, 0, (100, True)) == (100, True)  # not reserved
    assert not theirs._reserve_sync_load(SimpleNamespace(req=request), 96, 3)


def test_a_shared_step_waits_for_a_stated_time(overlap: Any) -> None:
    first, second = Request("a"), Request("b")
    overlap.added(first)
    overlap.added(second)
    assert overlap.matched(first, 0, (96, True)) == (96, False)  # 1.23 us
    assert overlap.matched(second, 0, (32, True)) == (32, True)  # 1.64 us with that
    built(overlap)
    assert overlap.matched(second, 0, (32, True)) == (32, False)
    built(overlap)
    slow = SimpleNamespace(transfer_stats=SimpleNamespace(load=SimpleNamespace(bytes=1000, time=1e-6)))
    overlap.reported(report(slow))  # 1 GB/s
    assert overlap.matched(second, 0, (32, True)) == (32, True)
    overlap.ended(first)
    assert overlap.matched(second, 0, (32, True)) == (32, False)


def test_beside_asynchronous_loads_it_is_one(overlap: Any) -> None:
    overlap.scheduler._jobs[7] = SimpleNamespace(is_store=False)
    request = Request("a")
    overlap.added(request)
    assert overlap.matched(request, 0, (96, True)) == (96, True)
    overlap.scheduler._jobs[7].is_store = True
    assert overlap.matched(request, 0, (96, True)) == (96, False)


def planned(overlap: Any, request: Request, blocks: list[int], computed: int, tokens: int) -> Any:
    """The request's step: its load is in what the workers are told."""
    overlap.added(request)
    assert overlap.matched(request, computed, (tokens, True)) == (tokens, False)
    theirs = overlap.scheduler
    states = [SimpleNamespace(block_ids=blocks)]
    theirs._req_status[request.request_id] = SimpleNamespace(num_locally_computed_tokens=computed, group_states=states)
    table = [SimpleNamespace(block_id=block, is_null=False, block_hash=b"hash") for block in blocks]
    given = overlap.allocate(request, SimpleNamespace(blocks=(table,)), tokens)
    theirs.update_state_after_alloc(request, given, tokens)
    overlap.allocated(request, tokens)

    def build(_: Any) -> OffloadingConnectorMetadata:
        assert all(job.is_store for job in theirs._jobs.values())  # for vLLM's assertions
        return OffloadingConnectorMetadata(theirs._current_batch_load_jobs, {})

    meta = overlap.build(build, output([request.request_id], tokens=computed + tokens))
    assert not any(job.is_store for job in theirs._jobs.values())
    return meta


def test_blocks_that_have_a_hash_are_loaded(vllm: SimpleNamespace, overlap: Any) -> None:
    meta = planned(overlap, Request("a"), [3, 4, 5, 6], 16, 48)
    assert vllm.overlap.sync_loads_of(meta) == {0}
    assert meta.load_jobs[0].dst_spec.block_ids.tolist() == [4, 5, 6]
    assert vllm.overlap.sync_loads_of(OffloadingConnectorMetadata({1: SimpleNamespace(sync=True)}, {})) == {1}


def test_groups_that_are_not_offloaded_stay(overlap: Any) -> None:
    """From 0.30 on a connector may have some of the groups."""
    overlap.scheduler.config.kv_group_configs = [SimpleNamespace(tokens_per_block=16, group_idx=1)]
    overlap.scheduler._req_status["a"] = SimpleNamespace(num_locally_computed_tokens=16)
    overlap._now.add("a")
    others, ours = ([SimpleNamespace(block_id=i, is_null=False, block_hash=b"hash") for i in range(2)] for _ in "ab")
    given = overlap.allocate(Request("a"), SimpleNamespace(blocks=(others, ours)), 16)
    assert given.blocks[0] is others
    assert [block.block_hash for block in given.blocks[1]] == [b"hash", None]


# -- loads that are reported before they end --------------------------------------------------------------------------


def asynchronous(overlap: Any, name: str, job_id: int, *groups: list[int]) -> None:
    """A step submits this load, for a request of these blocks."""
    blocks = [block for group in groups for block in group]
    theirs = overlap.scheduler
    overlap.added(Request(name))
    theirs._jobs[job_id] = SimpleNamespace(is_store=False, is_sync_load=False, req_id=name)
    states = [SimpleNamespace(block_ids=group) for group in groups]
    theirs._req_status[name] = SimpleNamespace(group_states=states)
    job = TransferJob(name, None, SimpleNamespace(block_ids=np.array(blocks)))
    meta = OffloadingConnectorMetadata({job_id: job}, {})
    assert overlap.build(lambda _: meta, OUTPUT) is meta


def built(overlap: Any, plan: Any = OUTPUT) -> Any:
    return overlap.build(lambda _: OffloadingConnectorMetadata({}, {}), plan)


def test_the_next_step_waits_for_a_load_that_was_reported(vllm: SimpleNamespace, overlap: Any) -> None:
    for job_id, name in enumerate("abc", 7):
        asynchronous(overlap, name, job_id, [job_id * 10, job_id * 10 + 1])
    jobs = overlap.scheduler._jobs
    del jobs[8]  # it has ended
    told = report(None, {"a", "b"})
    overlap.reported(told)
    assert told.finished_recving == {"a", "b"} and told.finished_sending is None
    assert overlap.loads and overlap.loads.failed({70}) == ({"a"}, {70, 71})
    assert overlap.is_sync(7, jobs[7]) and not overlap.is_sync(9, jobs[9])
    overlap.scheduler._req_status["a"].group_states[0].block_ids.append(72)  # the step has room for a new block
    meta = built(overlap, output("a", tokens=32))
    assert meta.awaited == {7} and vllm.overlap.sync_loads_of(meta) == set()
    assert overlap.loads.failed({70}) == ({"a"}, {70, 71, 72})
    assert not hasattr(built(overlap), "awaited")  # once
    assert not jobs[7].is_store  # as it is for vLLM's assertions, while a step is planned
    del jobs[7]
    overlap.reported(report())
    assert not overlap.loads and overlap.loads.failed({70}) == (set(), {70})
    assert not overlap.loads._ahead


def test_a_load_that_ended_before_the_next_step_is_not_waited_for(overlap: Any) -> None:
    asynchronous(overlap, "a", 7, [4, 5])
    overlap.reported(report(None, {"a"}))
    del overlap.scheduler._jobs[7]
    overlap.reported(report())
    assert not hasattr(built(overlap), "awaited")
    asynchronous(overlap, "b", 8, [6, 7])
    overlap.reported(report(None, {"b"}))
    assert built(overlap).awaited == {8}


@pytest.mark.parametrize("status", ["finished_aborted", "finished_error"])
def test_a_request_that_ends_before_its_load_keeps_its_blocks(overlap: Any, status: str) -> None:
    """It ends after the report. vLLM is told to free them when the load has ended."""
    asynchronous(overlap, "a", 7, [4, 5])
    asynchronous(overlap, "b", 8, [6, 7])
    overlap.reported(report(None, {"a", "b"}))
    requests = [Request("a"), Request("b")]
    overlap.scheduler._req_status["a"].group_states[0].block_ids.append(9)
    assert built(overlap, output("ab", tokens=32)).awaited == {7, 8}
    requests[0].status = State(status)
    for request in requests:
        overlap.ended(request)
    assert [overlap.loads.keeps(request.request_id) for request in requests] == [True, False]  # the other ended well
    del overlap.scheduler._req_status["a"]
    assert overlap.loads.failed({4}) == ({"a"}, {4, 5, 9})  # what it computed may still be found
    told = report()
    overlap.reported(told)
    assert told.finished_sending is None
    overlap.scheduler._jobs.clear()
    overlap.reported(told)
    assert told.finished_sending == {"a"} and not (overlap.loads._kept or overlap.loads._ahead or overlap.loads)


def test_a_request_that_ended_before_the_report(overlap: Any) -> None:
    """vLLM frees its blocks when it is told: not before the load has ended."""
    asynchronous(overlap, "a", 7, [4, 5])
    overlap.ended(Request("a"))
    assert not overlap.loads.keeps(Request("a").request_id)  # vLLM does
    told = report(None, {"a", "other"})
    overlap.reported(told)
    assert told.finished_recving == {"other"} and overlap.loads and not hasattr(built(overlap), "awaited")
    overlap.scheduler._jobs.clear()
    told = report()
    overlap.reported(told)
    assert told.finished_recving == {"a"} and told.finished_sending is None and not overlap.loads


def test_requests_that_share_the_blocks_of_an_unfinished_load(overlap: Any) -> None:
    """Also what a sharer of the same step computed, and what sharers that ended or were preempted had computed."""
    asynchronous(overlap, "a", 7, [4, 5])
    overlap.reported(report(None, {"a"}))
    tables = {"b": [4, 8], "c": [1, 2], "d": [4, 8, 9], "e": [9, 10], "f": [3], "g": [20, 21], "h": [22]}
    for name, blocks in tables.items():
        overlap.scheduler._req_status[name] = SimpleNamespace(group_states=[SimpleNamespace(block_ids=blocks)])
    plan = output("chged", resumed="b")
    copies = [(4, 20), (3, 22)]  # a request has a copy of a block whose beginning it shares
    plan.kv_cache_block_copies = [SimpleNamespace(src_block_id=src, dst_block_id=dst) for src, dst in copies]
    built(overlap, plan)
    assert overlap.loads.failed({5}) == (set("abdeg"), {4, 5, 8, 9, 10, 20, 21})
    tables["d"].append(11)
    overlap.ended(Request("d"))
    tables["e"].append(12)
    tables["f"].append(5)  # neither new nor resumed: it cannot be
    built(overlap)
    assert overlap.loads.failed({5}) == (set("abdeg"), {4, 5, 8, 9, 10, 11, 12, 20, 21})


def test_a_window_of_a_sharer_may_hold_none_of_its_blocks(overlap: Any) -> None:
    """In each group all that it computed counts, from the tokens on that it began with."""
    overlap.scheduler.config.kv_group_configs = [SimpleNamespace(tokens_per_block=size) for size in (16, 32)]
    asynchronous(overlap, "a", 7, [4, 5], [30])
    overlap.reported(report(None, {"a"}))
    groups = [SimpleNamespace(block_ids=blocks) for blocks in ([4, 8, 9], [0, 31, 32])]
    overlap.scheduler._req_status["b"] = SimpleNamespace(group_states=groups)
    built(overlap, output("b", tokens=32))
    assert overlap.loads.failed({4}) == (set("ab"), {4, 5, 30, 9, 31, 32})


def test_what_an_aborted_request_computed_is_not_stored(overlap: Any) -> None:
    """It had ended when the failure was told, and vLLM stores the rest of such a request in the next step."""
    asynchronous(overlap, "a", 7, [4, 5])
    status = overlap.scheduler._req_status["a"]
    status.max_offload_tokens = None
    overlap.compute_instead({"a", "unknown"})
    assert status.max_offload_tokens is None
    overlap.ended(Request("a"))
    overlap.compute_instead({"a"})
    assert status.max_offload_tokens == 0


def test_where_vllm_has_loads_of_its_own_steps(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """As 0.33: the metadata says which of a step's jobs are its own."""
    theirs = OffloadingConnectorScheduler()
    theirs._reserve_sync_load = lambda *_: True
    monkeypatch.setattr(OffloadingConnectorScheduler, "_reserve_sync_load", None, raising=False)
    overlap = vllm.overlap.make(theirs, cache(AttentionSpec()), OverlapSettings(True, 1.0, 1 << 20))
    asynchronous(overlap, "a", 3, [5, 6])
    overlap.reported(report(None, {"a"}))
    assert theirs._jobs[3].is_sync_load
    theirs._req_status["b"] = SimpleNamespace(group_states=[SimpleNamespace(block_ids=[8])])
    own = SimpleNamespace(req_id="b", dst_spec=SimpleNamespace(block_ids=[8]), sync=True)
    meta = overlap.build(lambda _: OffloadingConnectorMetadata({4: own}, {}), output("b"))
    assert meta.awaited == {3} and vllm.overlap.sync_loads_of(meta) == {4} and meta.load_jobs == {4: own}


# -- a load that fails ------------------------------------------------------------------------------------------------


class Connector:
    has_sync_loads = True

    def __init__(self, overlap: Any) -> None:
        self.failed_sync_loads, self.compute_instead = overlap.loads.failed, overlap.compute_instead


class Engine:
    """As much of a scheduler as failures touch. tables: the blocks of each request."""

    def __init__(
        self, vllm: SimpleNamespace, overlap: Any, tables: dict[str, list[int]], recompute: bool = True
    ) -> None:
        vllm.failures.install(Connector)
        made = vllm.scheduler()
        self.made, self.evicted = made, set()
        made.connector, made.recompute_kv_load_failures = Connector(overlap), recompute
        made.requests = {name: Request(name) for name in tables}
        made.running = list(made.requests.values())
        made.prev_step_scheduled_req_ids, made.failed_recving_kv_req_ids = set(tables), set()
        made.kv_cache_config = SimpleNamespace(kv_cache_groups=[None])
        made.kv_cache_manager = SimpleNamespace(
            get_block_ids=lambda name: (tables[name],), evict_blocks=self.evicted.update
        )

    def fail(self, blocks: set[int], scheduled: dict[str, int]) -> set[str]:
        return self.made._handle_invalid_blocks(blocks, scheduled)


def test_a_failed_load_preempts_its_request(vllm: SimpleNamespace, overlap: Any) -> None:
    planned(overlap, Request("a"), [3, 4, 5, 6, 7], 16, 48)
    tables = {"a": [3, 4, 5, 6, 7], "b": [3, 8], "c": [3, 4, 9], "d": [9, 10]}
    engine = Engine(vllm, overlap, tables)
    requests = engine.made.requests
    requests["a"].num_in_flight_tokens = 20  # and in no later step
    requests["c"].num_in_flight_tokens = 1  # in the next step alone
    requests["c"].num_output_placeholders = 1
    assert engine.fail({5}, {"a": 20, "b": 1}) == {"a", "c", "d"}
    assert engine.evicted == {4, 5, 6, 7, 9, 10}
    assert [request.request_id for request in engine.made.running] == ["b"]
    assert requests["a"].async_tokens_to_discard == 0 and requests["c"].async_tokens_to_discard == 1
    assert requests["c"].num_output_placeholders == 0 and engine.made.prev_step_scheduled_req_ids == {"b"}
    assert overlap.matched(requests["a"], 0, (96, True)) == (0, False)  # it is not tried again
    requests["a"].status = State("finished_error")
    overlap.scheduler._req_status["a"].max_offload_tokens = None
    overlap.ended(requests["a"])
    assert overlap._given_up == set()
    assert overlap.scheduler._req_status["a"].max_offload_tokens == 0  # nothing more of it is stored


def test_a_failed_load_of_a_request_without_room(vllm: SimpleNamespace, overlap: Any) -> None:
    """It was reported, and no step has run its request yet: it gives up its blocks."""
    asynchronous(overlap, "a", 7, [4, 5])
    overlap.reported(report(None, {"a"}))
    engine, freed = Engine(vllm, overlap, {"a": [4, 5], "b": [8]}), []
    engine.made.running = [engine.made.requests["b"]]
    engine.made.kv_cache_manager.free = lambda request: freed.append(request.request_id)
    for status in ("waiting", "preempted"):
        freed.clear()
        engine.made.requests["a"].status = status
        engine.made._inflight_prefills = {engine.made.requests["a"], engine.made.requests["b"]}
        engine.made.requests["a"].num_computed_tokens = 32
        assert engine.fail({5}, {"b": 1}) == {"a"}
        assert freed == ["a"] and engine.made.requests["a"].num_computed_tokens == 0
        assert engine.made._inflight_prefills == {engine.made.requests["b"]}  # no room is kept for it
    assert [request.request_id for request in engine.made.running] == ["b"]


def test_a_failed_load_and_requests_that_load_behind_it(vllm: SimpleNamespace, overlap: Any) -> None:
    """Each of those that share its blocks is computed from its first token on; one that has ended waits for its own
    load alone."""
    asynchronous(overlap, "a", 7, [4, 5])
    overlap.reported(report(None, {"a"}))
    engine = Engine(vllm, overlap, {"a": [4, 5], "b": [4, 5, 8], "c": [4, 5, 9], "d": [4, 10], "e": [11]})
    requests = engine.made.requests
    engine.made.running = [requests["a"]]
    for name in "bcde":
        requests[name].status, requests[name].num_computed_tokens = "loading", 48
    requests["d"].status = "finished"
    assert engine.fail({4, 5}, {"a": 1}) == {"a"}
    assert [requests[name].num_computed_tokens for name in "bcde"] == [0, 0, 48, 48]
    assert engine.made.failed_recving_kv_req_ids == {"b", "c"}
    engine.made.recompute_kv_load_failures = False
    assert engine.fail({4, 5}, {"a": 1}) == {"a", "b", "c"}


def test_a_failed_load_ends_its_request(vllm: SimpleNamespace, overlap: Any) -> None:
    planned(overlap, Request("a"), [3, 4, 5, 6], 16, 48)
    engine = Engine(vllm, overlap, {"a": [3, 4, 5, 6], "b": [3, 8]}, recompute=False)
    assert engine.fail({4}, {"a": 20, "b": 1}) == {"a"}
    assert len(engine.made.running) == 2 and engine.evicted == {4, 5, 6}


def test_a_request_that_went_meanwhile(vllm: SimpleNamespace, overlap: Any) -> None:
    """What it computed is in the prefix cache, and a preempted one has an output under way."""
    request = Request("a")
    blocks = [3, 4, 5, 6]
    planned(overlap, request, blocks, 16, 48)
    blocks += [7, 8]
    overlap.ended(request)
    engine = Engine(vllm, overlap, {"b": [3, 9], "c": [8, 11]})
    assert engine.fail({4, 5, 6}, {"a": 20}) == {"a", "c"}
    assert engine.evicted == {4, 5, 6, 7, 8, 11}
    engine = Engine(vllm, overlap, {"a": []})
    preempted = engine.made.requests["a"]
    preempted.status = "preempted"
    engine.made.running.clear()
    preempted.num_output_placeholders = 1
    assert engine.fail({4}, {"a": 20}) == {"a"} and preempted.num_output_placeholders == 0


def test_an_output_that_vllm_discards_is_not_skipped(vllm: SimpleNamespace, overlap: Any) -> None:
    """vLLM would discard the next one in its place, which is good."""
    planned(overlap, Request("a"), [3, 4, 5], 16, 48)
    tables = {"a": [3, 4, 5]}
    engine = Engine(vllm, overlap, tables)
    request = engine.made.requests["a"]
    request.num_in_flight_tokens = 40  # in the step that is looked at, and in the next
    assert engine.fail({5}, {"a": 20}) == {"a"} and request.async_tokens_to_discard == 1
    tables["a"], request.num_in_flight_tokens = [], 20  # preempted: that next step is looked at
    assert engine.fail({5}, {"a": 20}) == set() and request.async_tokens_to_discard == 1
    tables["a"], request.num_in_flight_tokens = [5], 40  # or it was resumed meanwhile
    request.status = State("running")
    engine.made.running.append(request)
    assert engine.fail({5}, {"a": 20}) == set() and request.async_tokens_to_discard == 2


def test_other_connectors_are_left_alone(vllm: SimpleNamespace, overlap: Any) -> None:
    engine = Engine(vllm, overlap, {"a": [1]})
    engine.made.connector = object()
    assert engine.fail({1}, {}) == set() and len(engine.made.running) == 1 and engine.made.theirs == {1}
