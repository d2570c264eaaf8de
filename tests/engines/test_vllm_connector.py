"""What KVSwapConnector does with a configuration, on a stand-in for vLLM's connector.

tests/integration/vllm_package.py runs the real one: its scheduler, its worker, failing stores and loads.
"""

# mypy: ignore-errors

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvswap
from kvswap.offload import TransferResult
from kvswap.vllm._handler import VLLMHandler

pytestmark = pytest.mark.not_sanitized("Python only")

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"


class OurHandler(VLLMHandler):
    """Recognised by its class."""

    def __init__(self) -> None:
        self.strict = True


class OffloadingConnector:
    """vLLM's: the spec by its name, and the spec's worker when the caches are registered."""

    workers: dict[str, list[Any]]

    def __init__(self, vllm_config: Any, role: str, kv_cache_config: Any) -> None:
        del role, kv_cache_config
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.spec_name = extra.get("spec_name", "CPUOffloadingSpec")
        self.connector_worker = SimpleNamespace(spec=type(self.spec_name, (), {})(), worker=None)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        del vllm_config
        return "LBHNC"

    def register_kv_caches(self, kv_caches: Any) -> None:
        self.connector_worker._load_jobs = {}
        store, load = self.workers[self.spec_name]
        self.connector_worker.worker = SimpleNamespace(
            _store_handler=store, _load_handler=load, get_finished=list, submit_load=lambda *_: True
        )

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        del request
        return 96 - num_computed_tokens, True

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        del scheduler_output

    def update_connector_output(self, connector_output: Any) -> None:
        self.connector_scheduler = SimpleNamespace(_jobs={})

    def handle_preemptions(self, meta: Any) -> None:
        self.calls = [("theirs", meta)]
        self.connector_worker.start_kv_transfers = lambda meta: self.calls.append(("loads", meta))

    def start_load_kv(self, forward_context: Any) -> None:
        del forward_context
        self.calls.append(("loads", self._connector_metadata))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        del finished_req_ids
        ended = [result.job_id for result in self.connector_worker.worker.get_finished()]
        return set(), {self.connector_worker._load_jobs.pop(job) for job in ended}


@dataclass
class OffloadingWorkerMetadata:
    pass


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A KVSwapConnector of such options, its caches registered."""
    parts = V1.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    contents = {
        **{name: {} for name in names},
        "vllm": {"__version__": "0.0"},
        f"{V1}.base": {"KVConnectorRole": SimpleNamespace(SCHEDULER="scheduler", WORKER="worker")},
        f"{V1}.offloading": {},
        f"{V1}.offloading.common": {"OffloadingWorkerMetadata": OffloadingWorkerMetadata},
        f"{V1}.offloading_connector": {"OffloadingConnector": OffloadingConnector},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "kvswap.vllm._connector", raising=False)
    ours = [OurHandler(), OurHandler()]
    monkeypatch.setattr(
        OffloadingConnector,
        "workers",
        {
            "KVSwapOffloadingSpec": ours,
            "KVSwapTieringOffloadingSpec": ours,
            "CPUOffloadingSpec": [object()] * 2,
            "TieringOffloadingSpec": [object()] * 2,
            "TheirSpec": [object()] * 2,
        },
        raising=False,
    )
    module = importlib.import_module("kvswap.vllm._connector")

    def make(caches: Any = None, **extra: Any) -> Any:
        one = SimpleNamespace(pipeline_parallel_size=1)
        transfer = SimpleNamespace(kv_connector_extra_config=extra)
        config = SimpleNamespace(kv_transfer_config=transfer, parallel_config=one)
        made = module.KVSwapConnector(config, "worker", caches or SimpleNamespace(kv_cache_groups=[None]))
        made.register_kv_caches({})
        return made

    yield make
    sys.modules.pop("kvswap.vllm._connector", None)


@pytest.mark.parametrize(
    ("extra", "spec"),
    [
        ({}, "KVSwapOffloadingSpec"),
        ({"spec_name": "CPUOffloadingSpec"}, "KVSwapOffloadingSpec"),
        ({"spec_name": "CPUOffloadingSpec", "spec_module_path": "kvswap.vllm"}, "KVSwapOffloadingSpec"),
        ({"spec_name": "TieringOffloadingSpec"}, "KVSwapTieringOffloadingSpec"),
        ({"spec_name": "KVSwapTieringOffloadingSpec"}, "KVSwapTieringOffloadingSpec"),
        ({"spec_name": "KVSwapOffloadingSpec", "spec_module_path": "kvswap.vllm"}, "KVSwapOffloadingSpec"),
    ],
)
def test_the_connector_takes_kvswaps_spec_by_itself(connector: Any, extra: dict[str, str], spec: str) -> None:
    made = connector(**extra, cpu_bytes_to_use=1 << 30)
    assert made.spec_name == spec
    assert not made.connector_worker.worker._store_handler.strict


def test_transfers_that_are_not_kvswaps_are_refused(connector: Any) -> None:
    with pytest.raises(kvswap.Error, match=r'TheirSpec.*vLLM 0\.0.*"KVSwapOffloadingSpec" and "kvswap\.vllm"'):
        connector(spec_name="TheirSpec", spec_module_path="theirs")


def test_handlers_that_could_not_be_replaced_are_refused(connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """kvswap's spec was taken, and left vLLM's handlers in place, because it does not know them."""
    monkeypatch.setitem(OffloadingConnector.workers, "KVSwapOffloadingSpec", [object()] * 2)
    with pytest.raises(kvswap.Error, match="does not move blocks by kvswap"):
        connector()


def test_a_step_does_not_rely_on_loads_that_may_be_vllms(connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a release that would have overlapped them, and whose own workers do not wait for loads in a step."""
    module = sys.modules["kvswap.vllm._connector"]
    monkeypatch.setattr(module, "_why_no_overlap", lambda *_: None)
    assert not module._has_own_sync_loads()
    assert not connector(kvswap_overlap=True, kvswap_fallback=True)._overlaps


def test_a_fallback_is_asked_for(connector: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvswap.vllm"):
        made = connector(spec_name="TheirSpec", spec_module_path="theirs", kvswap_fallback=True)
    assert made.spec_name == "TheirSpec" and "vLLM's own transfers stay" in caplog.text
    with pytest.raises(ValueError, match=r"kvswap_fallback.* is 'yes'"):
        connector(kvswap_fallback="yes")


class Blocks:
    """Block numbers that count how often they are read."""

    def __init__(self, *blocks: int) -> None:
        self.blocks, self.reads = blocks, 0

    def __iter__(self) -> Iterator[int]:
        self.reads += 1
        return iter(self.blocks)


def load(made: Any, job: int, blocks: Any) -> None:
    """As vLLM submits one."""
    made.connector_worker._load_jobs[job] = f"request-{job}"
    made.connector_worker.worker.submit_load(job, "source", SimpleNamespace(block_ids=blocks, group_sizes=[3]))


def end(made: Any, *results: TransferResult) -> None:
    made.connector_worker.worker._worker.get_finished = lambda: list(results)


def test_a_load_costs_nothing_a_block_unless_it_fails(connector: Any) -> None:
    """Submitting and collecting are in an engine's step."""
    made, blocks = connector(), Blocks(1, 2, 3)
    load(made, 7, blocks)
    end(made, TransferResult(7, True, 100, 0.1))
    assert made.get_finished(set()) == (set(), {"request-7"})
    assert blocks.reads == 0 and made.get_block_ids_with_load_errors() == set()


def test_a_failed_load_reports_its_blocks(connector: Any) -> None:
    made = connector()
    load(made, 7, np.array([4, 5, 6], np.int32))
    load(made, 8, np.array([9], np.int32))
    end(made)
    assert made.get_finished(set()) == (set(), set())
    end(made, TransferResult(8, True, 100, 0.1), TransferResult(7, False, 0, 0.1, error=kvswap.Error("refused")))
    assert made.get_finished(set()) == (set(), {"request-7", "request-8"})
    found = made.get_block_ids_with_load_errors()
    assert found == {4, 5, 6} and {type(block) for block in found} == {int}
    end(made)
    assert made.get_finished(set()) == (set(), set())
    assert made.get_block_ids_with_load_errors() == set()


def test_a_load_that_could_not_be_submitted_ends_in_the_next_step(connector: Any) -> None:
    made = connector()
    made.connector_worker.worker._worker.submit_load = lambda *_: False
    load(made, 7, [4])
    end(made)
    assert made.get_finished(set()) == (set(), {"request-7"})
    assert made.get_block_ids_with_load_errors() == {4}


def of_step(**values: Any) -> Any:
    """A step's metadata. jobs: its loads, all of its own requests."""
    return SimpleNamespace(**{"jobs_to_flush": set(), "load_jobs": dict.fromkeys(values["jobs"]), **values})


class OwnLoads:
    """As StepLoads, for the order of the calls."""

    def __init__(self, calls: Any) -> None:
        self.calls, self.waits = calls, []
        self.wait_for = self.waits.append

    def begin(self, jobs: set[int], forward_context: Any = None) -> None:
        self.calls().append(("begin", jobs, forward_context))

    def before_forward(self, forward_context: Any) -> None:
        self.calls().append(("forward", forward_context))


@pytest.mark.parametrize(("zeroing", "jobs", "early"), [(False, {3}, True), (True, {3}, False), (False, set(), False)])
def test_loads_of_a_steps_own_requests_come_first(connector: Any, zeroing: bool, jobs: set[int], early: bool) -> None:
    """Before vLLM prepares the step's inputs; not where it clears new blocks then."""
    made = connector(SimpleNamespace(kv_cache_groups=[None], needs_kv_cache_zeroing=zeroing))
    made._own_loads, made._sync_loads_of = OwnLoads(lambda: made.calls), lambda meta: meta.jobs
    for _ in range(2):
        meta = of_step(jobs=jobs)
        made.handle_preemptions(meta)
        loads = [("begin", jobs, None if early else "step"), ("loads", meta)]
        assert made.calls == [("theirs", meta), *(loads if early else [])]
        made._connector_metadata = meta
        made.start_load_kv("step")
        assert made.calls == [("theirs", meta), *loads, ("forward", "step")]
        assert made.connector_worker._load_jobs == dict.fromkeys(jobs)


def test_a_step_that_had_only_begun_is_no_excuse(connector: Any) -> None:
    """The loads of a step are submitted, whatever became of the step before."""
    made = connector(SimpleNamespace(kv_cache_groups=[None], needs_kv_cache_zeroing=False))
    made._own_loads, made._sync_loads_of = OwnLoads(lambda: made.calls), lambda meta: meta.jobs
    made.handle_preemptions(of_step(jobs={1}))
    made._connector_metadata = later = of_step(jobs={2})
    made.start_load_kv("step")
    assert made.calls[-2:] == [("loads", later), ("forward", "step")]


@pytest.fixture
def early(connector: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A connector with loads of a step's own, in a worker whose model runner calls it after preparing inputs."""
    made = connector(SimpleNamespace(kv_cache_groups=[None], needs_kv_cache_zeroing=False))
    made._own_loads, made._sync_loads_of = OwnLoads(lambda: made.calls), lambda meta: meta.jobs
    made.calls, before = [], []

    class GPUModelRunner:
        def execute_model(self, scheduler_output: Any, dummy_run: bool = False) -> str:
            meta = scheduler_output.kv_connector_metadata
            before[:] = made.calls
            if meta is not None:
                made.handle_preemptions(meta)
                made._connector_metadata = meta
                made.start_load_kv("step")
            return "output"

    for name, content in (
        ("vllm.v1.worker.gpu.model_runner", {"GPUModelRunner": GPUModelRunner}),
        (
            "vllm.distributed.kv_transfer",
            {"get_kv_transfer_group": lambda: made, "has_kv_transfer_group": lambda: True},
        ),
    ):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules.pop("kvswap.vllm._early", None)
    module = importlib.import_module("kvswap.vllm._early")

    def run(**output: Any) -> tuple[list[Any], list[Any]]:
        """The calls before the inputs were prepared, and all."""
        made.calls = []
        given = {"kv_connector_metadata": None, "total_num_scheduled_tokens": 1, **output}
        assert GPUModelRunner().execute_model(SimpleNamespace(**given)) == "output"
        return list(before), made.calls

    yield SimpleNamespace(made=made, module=module, runner=GPUModelRunner, run=run)
    sys.modules.pop("kvswap.vllm._early", None)


def test_the_second_runner_begins_a_steps_loads_before_its_inputs(early: Any) -> None:
    theirs = early.runner.execute_model
    for _ in range(2):  # once is enough
        early.made._begin_early()
    assert early.runner.execute_model.__wrapped__ is theirs
    for _ in range(2):
        meta = of_step(jobs={3})
        begun = [("theirs", meta), ("begin", {3}, None), ("loads", meta)]
        assert early.run(kv_connector_metadata=meta) == (begun, [*begun, ("forward", "step")])


@pytest.mark.parametrize(
    "output",
    [
        {"new_block_ids_to_zero": [4]},
        {"kv_cache_block_copies": [(1, 2)]},
        {"scheduled_encoder_inputs": {"request": [0]}},
        {"total_num_scheduled_tokens": 0},
        {"jobs": set()},
        {"of": None},
    ],
    ids=str,
)
def test_the_second_runner_begins_other_steps_as_before(
    early: Any, monkeypatch: pytest.MonkeyPatch, output: dict[str, Any]
) -> None:
    """Blocks are written or an encoder runs first, no model runs, nothing is loaded, it is another connector's."""
    early.made._begin_early()
    jobs = output.pop("jobs", {3})
    if "of" in output:
        monkeypatch.setattr(early.module, "get_kv_transfer_group", lambda: output.pop("of"))
    before, calls = early.run(kv_connector_metadata=of_step(jobs=jobs), **output)
    assert before == [] and [call[0] for call in calls[:1]] == ["theirs"] and calls[-1] == ("forward", "step")


def test_dummy_steps_and_unknown_runners_are_left_alone(
    early: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    early.made._begin_early()
    assert early.run() == ([], [])
    monkeypatch.setattr(early.runner, "execute_model", lambda self, what: None)
    with caplog.at_level(logging.WARNING, "kvswap.vllm"):
        early.made._begin_early()
    assert (
        "loads begin only when a step's inputs are prepared, and are reported only when they have ended: "
        "GPUModelRunner.execute_model is not known" in caplog.text
    )
    assert not hasattr(early.runner.execute_model, "of_kvswap")
    monkeypatch.delitem(sys.modules, "vllm.v1.worker.gpu.model_runner")
    assert early.module.install(type(early.made)) is None


@pytest.mark.parametrize("output", [{}, {"new_block_ids_to_zero": [4]}, {"total_num_scheduled_tokens": 0}], ids=str)
def test_the_second_runner_waits_for_reported_loads_first(early: Any, output: dict[str, Any]) -> None:
    """Also in steps that write to blocks first, whose blocks may be those that are loaded."""
    early.made._begin_early()
    assert not early.made._sees_beginnings
    early.made.connector_worker._load_jobs = {5: None, 6: "name"}
    waits = early.made._own_loads.waits
    for awaited in ({4, 5}, {4, 5}, {9}):
        meta = of_step(jobs=set(), awaited=frozenset(awaited))
        early.run(kv_connector_metadata=meta, **output)
    flushed = of_step(jobs=set(), jobs_to_flush={6, 8})  # vLLM takes its blocks for free
    early.run(kv_connector_metadata=flushed, **output)
    assert waits == [{5}, {5}, set(), {6}] and early.made._sees_beginnings


def test_loads_are_reported_ahead(connector: Any) -> None:
    made = connector()
    loads = made.connector_worker._load_jobs
    loads.update({1: "a", 2: "b", 3: None})
    made._connector_metadata = SimpleNamespace(store_jobs={})
    asked: list[list[int]] = []
    made._watch.get_finished = list
    made._ahead = SimpleNamespace(stepped=lambda: asked.append([]), due=lambda jobs: asked[-1].extend(jobs) or [2])
    assert made.get_finished(set()) == (set(), set()) and asked == [[]]  # not called before all work of a step
    made._sees_beginnings = True
    assert made.get_finished(set()) == (set(), {"b"}) and asked[1:] == [[1, 2, 3]]
    assert loads == {1: "a", 2: None, 3: None}


def test_requests_that_are_loaded_come_before_one_without_room(connector: Any) -> None:
    """vLLM 0.26 looks no further than the first one without room: the engine would stand still."""
    made = connector()
    made.connector_scheduler = SimpleNamespace(_jobs={})
    large, loads = SimpleNamespace(request_id="large"), SimpleNamespace(request_id="loads")

    def found() -> list[Any]:
        return [made.get_num_new_matched_tokens(request, 16)[0] for request in (large, loads)]

    def step(*names: str) -> None:
        scheduled = dict.fromkeys(names, 1)
        made.build_connector_meta(
            SimpleNamespace(num_scheduled_tokens=scheduled, total_num_scheduled_tokens=len(scheduled))
        )

    def report() -> None:
        made.update_connector_output(
            SimpleNamespace(kv_connector_worker_meta=None, finished_recving={"loads", "of another connector"})
        )

    for _ in range(3):
        step()
    assert found() == [80, 80]
    report()
    assert found() == [None, 80]
    step()
    assert found() == [80, 80]  # it may have room where the other one has none
    step()
    assert found() == [None, 80]
    step("loads")
    assert found() == [80, 80]
    report()
    step("of another request")
    assert found() == [80, 80]  # something runs, and will give up its room
    for _ in range(3):
        step()
    assert found() == [None, 80]
    made.compute_instead({"loads"})
    assert found() == [80, 0]
    report()
    assert found() == [None, 0]
    made._forget(SimpleNamespace(request_id="loads"))
    assert found() == [80, 80]


def test_the_class_prefers_blocks_of_all_layers(connector: Any) -> None:
    transfer = SimpleNamespace(kv_connector="KVSwapConnector", kv_connector_extra_config={})
    kind = type(connector())
    blocks = SimpleNamespace(block_size=16)
    config = SimpleNamespace(kv_transfer_config=transfer, model_config=None, cache_config=blocks)
    assert kind.get_required_kvcache_layout(config) == "BLHNC"
    transfer.kv_connector_extra_config["kvswap_block_first"] = False
    assert kind.get_required_kvcache_layout(config) == "LBHNC"


@pytest.mark.parametrize(
    ("strides", "groups", "said"),
    [
        ([2048, 2048], 1, "all layers of a block lie together"),
        ([0, 0], 0, "a tensor a layer: the attention backend does not take it"),
        ([0, 0], 2, "a tensor a layer: the cache has 2 groups"),
        ([0, 0], 1, "a tensor a layer: this process has not loaded kvswap's plugin"),
    ],
)
def test_the_log_says_how_blocks_lie(
    connector: Any, caplog: pytest.LogCaptureFixture, strides: list[int], groups: int, said: str
) -> None:
    """0.26, with the second runner; the first one, and later releases, log it themselves."""
    transfer = SimpleNamespace(kv_connector="KVSwapConnector", kv_connector_extra_config={})
    blocks = SimpleNamespace(block_size=16)
    config = SimpleNamespace(
        kv_transfer_config=transfer, model_config=None, cache_config=blocks, use_v2_model_runner=True
    )
    spec = SimpleNamespace(indexes_kv_by_block_stride=groups > 0, block_size=16)
    cache = SimpleNamespace(
        kv_cache_tensors=[SimpleNamespace(block_stride=stride) for stride in strides],
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)] * (groups or 1),
    )
    say = type(connector())._say_how_blocks_lie
    with caplog.at_level(logging.INFO, "kvswap.vllm"):
        say(None, config, cache)
        assert said in caplog.text
        caplog.clear()
        config.use_v2_model_runner = False
        say(None, config, cache)
        config.use_v2_model_runner, blocks.kv_cache_layout = True, "BLHNC"
        say(None, config, cache)
        assert "kvswap_block_first" not in caplog.text


# -- chunks that a codec does not store --------------------------------------------------------------------------------


def test_a_worker_reports_chunks_that_are_not_stored(connector: Any) -> None:
    """The job has ended well; its chunks are reported once, beside its end."""
    made = connector()
    result = TransferResult(7, True, 100, 0.1, not_stored={1: "codec", 4: "codec"})
    made._watch._worker.get_finished = lambda: [result]
    assert made._watch.get_finished() == [result] and not made._watch.failures
    kind = sys.modules[type(made).__module__]
    OffloadingConnector.build_connector_worker_meta = lambda _: OffloadingWorkerMetadata()
    try:
        meta = made.build_connector_worker_meta()
        assert isinstance(meta, kind.KVSwapWorkerMetadata) and meta.not_stored == {7: {1: "codec", 4: "codec"}}
        assert made.build_connector_worker_meta().not_stored == {}
    finally:
        del OffloadingConnector.build_connector_worker_meta


def test_the_reports_of_ranks_are_joined(connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = sys.modules[type(connector()).__module__]
    monkeypatch.setattr(OffloadingWorkerMetadata, "aggregate", lambda self, _: self, raising=False)
    one = kind.KVSwapWorkerMetadata(not_stored={1: {0: "codec"}, 2: {3: "codec"}})
    other = kind.KVSwapWorkerMetadata(not_stored={1: {5: "codec"}, 4: {0: "codec"}})
    joined = one.aggregate(other).aggregate(OffloadingWorkerMetadata())
    assert joined.not_stored == {1: {0: "codec", 5: "codec"}, 2: {3: "codec"}, 4: {0: "codec"}}


class Stores:
    """Stands in for vLLM's scheduler side and its offloading manager. As there, a store job keeps its keys as a set,
    without their order, and ends when both of two ranks have reported it."""

    def __init__(self, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self.completed, self.counted = made, [], []
        self.meta = SimpleNamespace(store_jobs={}, load_jobs={})
        self.jobs: dict[int, Any] = {}
        made.connector_scheduler = SimpleNamespace(_jobs=self.jobs)
        made._prepare_store = lambda keys: SimpleNamespace(keys_to_store=keys, store_spec=object()) if keys else None
        made._complete_store = lambda keys, context, success: self.counted.append(1) or self.primary(keys, success)
        made._drop_chunks = lambda keys, context, success: self.primary(keys, success)
        monkeypatch.setattr(OffloadingConnector, "build_connector_meta", lambda *_: self.meta)
        monkeypatch.setattr(OffloadingConnector, "update_connector_output", lambda _, output: self.ended(output))

    def primary(self, keys: Any, success: bool) -> None:
        self.completed.append((sorted(keys), success))

    def plan(self, jobs: dict[int, str]) -> None:
        """A step with these stores, a letter a key."""
        for job, keys in jobs.items():
            output = self.made._prepare_store_in_order(list(keys))
            self.jobs[job] = SimpleNamespace(keys=set(keys), left=2)
            self.meta.store_jobs[job] = SimpleNamespace(dst_spec=output.store_spec)
        self.made.build_connector_meta(SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0))

    def ended(self, output: Any) -> None:
        for job, count in output.kv_connector_worker_meta.completed.items():
            self.jobs[job].left -= count
            if not self.jobs[job].left:
                self.made._complete_store_truly(self.jobs[job].keys, None)
                del self.jobs[job]

    def report(self, completed: dict[int, int], not_stored: Any = None, failed: Any = None) -> list[Any]:
        """The report of a step; what the manager hears."""
        self.completed.clear()
        meta = SimpleNamespace(completed=completed, not_stored=not_stored or {}, failed_stores=failed or {})
        output = SimpleNamespace(kv_connector_worker_meta=meta, finished_recving=None)
        self.made.update_connector_output(output)
        return list(self.completed)


def test_a_part_of_a_job_is_stored(connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the chunks that some rank could not store, by their order; all others hit. vLLM counts one call a job."""
    stores = Stores(connector(), monkeypatch)
    stores.plan({1: "dacb", 2: "xyz", 3: "pq"})
    assert stores.report({1: 1}, {1: {2: "codec"}}) == []  # of one rank
    assert stores.report({1: 1, 2: 2}, {1: {0: "codec"}}) == [
        (["c", "d"], False),
        (["a", "b"], True),
        (["x", "y", "z"], True),
    ]
    assert stores.report({3: 2}, {3: {0: "codec", 1: "codec"}}) == [(["p", "q"], False), ([], True)]
    assert len(stores.counted) == 3
    assert not stores.made._orders and not stores.made._not_stored


def test_a_job_whose_order_is_not_known_is_dropped(connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = Stores(connector(), monkeypatch)
    stores.plan({1: "ab"})
    stores.made._orders.clear()
    assert stores.report({1: 2}, {1: {0: "codec"}}) == [(["a", "b"], False), ([], True)]


def test_a_job_that_failed_is_dropped_whole(connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = Stores(connector(), monkeypatch)
    stores.plan({1: "ab"})
    assert stores.report({1: 1}, {1: {0: "codec"}}) == []
    assert stores.report({1: 1}, failed={1: "the device is lost"}) == [(["a", "b"], False)]
