"""What became of loaded blocks, on stand-ins for vLLM's connector, its scheduler side and its statistics.

tests/integration/vllm_package.py compares the counts with what the real one loads, in all that it runs.
"""

# mypy: ignore-errors

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import kvswap.vllm

pytestmark = pytest.mark.not_sanitized("Python only")

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"


class OffloadingConnectorStats:
    def __init__(self) -> None:
        self.counts = Counter()

    def is_empty(self) -> bool:
        return not self.counts

    def increase_counter(self, name: str, more: int, labelvalues: tuple[str, ...] = ()) -> None:
        self.counts[(name, *labelvalues)] += more


class OffloadPromMetrics:
    def __init__(self) -> None:
        self._offloading_metric_metadata = {"vllm:theirs": SimpleNamespace(documentation="theirs", labelnames=())}
        self._offloading_metric_defs = {}
        for name, about in self._offloading_metric_metadata.items():
            self._offloading_metric_defs[name] = self._create_metric(name, about)

    def _create_metric(self, name: str, about: Any) -> str:
        return f"{name}{list(about.labelnames)}: {about.documentation}"


class OtherPromMetrics:
    """A release that keeps its metrics elsewhere."""

    def __init__(self) -> None:
        self.metrics = {}


@dataclass
class OffloadingCounterMetadata:
    documentation: str
    labelnames: tuple[str, ...] = ()


@dataclass
class OffloadingWorkerMetadata:
    ended: tuple[int, ...] = ()


class Side:
    """vLLM's connector_scheduler: the jobs that have not ended, and the loads of the next step."""

    def __init__(self) -> None:
        self.manager = SimpleNamespace(complete_store=lambda *_: None)
        self._jobs: dict[int, Any] = {}
        self.next: dict[int, Any] = {}
        if Side.stats != "missing":
            self._connector_stats = OffloadingConnectorStats()

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        del scheduler_output
        loads, self.next = self.next, {}
        return SimpleNamespace(load_jobs=loads)


class OffloadingConnector:
    def __init__(self, vllm_config: Any, role: str, kv_cache_config: Any) -> None:
        del vllm_config, role, kv_cache_config
        self.connector_scheduler = Side()

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self.connector_scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        for job_id in getattr(connector_output.kv_connector_worker_meta, "ended", ()):
            del self.connector_scheduler._jobs[job_id]

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        del request, block_ids
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        return self.request_finished(request, block_ids)

    def get_kv_connector_stats(self) -> Any:
        return None

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any) -> Any:
        del vllm_config
        return sys.modules[f"{V1}.offloading.metrics"].OffloadPromMetrics()


class Engine:
    """What vLLM's scheduler tells the connector."""

    def __init__(self, made: Any) -> None:
        self.made, self.side, self.jobs = made, made.connector_scheduler, 0

    def load(self, name: str, *blocks: int) -> int:
        """The next step begins to load these blocks for a request."""
        self.jobs += 1
        job = SimpleNamespace(req_id=name, dst_spec=SimpleNamespace(block_ids=list(blocks)))
        self.side.next[self.jobs] = self.side._jobs[self.jobs] = job
        return self.jobs

    def step(self, *names: str) -> None:
        """A step of these requests is planned."""
        scheduled = dict.fromkeys(names, 1)
        self.made.build_connector_meta(
            SimpleNamespace(num_scheduled_tokens=scheduled, total_num_scheduled_tokens=len(scheduled))
        )

    def report(self, *ended: int, received: set[str] | None = None, failed: set[str] | None = None) -> None:
        """The workers' report after a step."""
        meta = OffloadingWorkerMetadata(ended) if ended else None
        self.made.update_connector_output(
            SimpleNamespace(kv_connector_worker_meta=meta, finished_recving=received, failed_recving=failed)
        )

    def end(self, name: str, status: str = "FINISHED_ABORTED", groups: int = 1) -> None:
        request = SimpleNamespace(request_id=name, status=SimpleNamespace(name=status))
        if groups == 1:
            self.made.request_finished(request, [])
        else:
            self.made.request_finished_all_groups(request, ([], []))

    @property
    def counts(self) -> dict[str, int]:
        """What vLLM's statistics were told, and nothing else."""
        counts = self.side._connector_stats.counts
        assert {name for name, _ in counts} <= {"kvswap_loaded_blocks"}
        return {what: count for (_, what), count in counts.items()}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-ins by module; a connector's class is made of them by kind_of()."""
    parts = V1.split(".")
    contents = {
        **{".".join(parts[: i + 1]): {} for i in range(len(parts))},
        "vllm": {"__version__": "0.0"},
        "vllm.v1": {},
        "vllm.v1.kv_offload": {},
        "vllm.v1.kv_offload.base": {
            "OffloadingCounterMetadata": OffloadingCounterMetadata,
            "OffloadingGaugeMetadata": OffloadingCounterMetadata,
        },
        f"{V1}.base": {"KVConnectorRole": SimpleNamespace(SCHEDULER="scheduler", WORKER="worker")},
        f"{V1}.offloading": {},
        f"{V1}.offloading.common": {"OffloadingWorkerMetadata": OffloadingWorkerMetadata},
        f"{V1}.offloading.metrics": {
            "OffloadingConnectorStats": OffloadingConnectorStats,
            "OffloadPromMetrics": OffloadPromMetrics,
        },
        f"{V1}.offloading_connector": {"OffloadingConnector": OffloadingConnector},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Side, "stats", "there", raising=False)
    ours = ("_connector", "_outcomes", "_own_stats")
    for name in ours:
        monkeypatch.delitem(sys.modules, f"kvswap.vllm.{name}", raising=False)
        monkeypatch.delattr(kvswap.vllm, name, raising=False)
    yield SimpleNamespace(metrics=sys.modules[f"{V1}.offloading.metrics"])
    for name in ours:
        sys.modules.pop(f"kvswap.vllm.{name}", None)


def kind_of() -> Any:
    return importlib.import_module("kvswap.vllm._connector").KVSwapConnector


def config_of(**extra_config: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra_config),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        cache_config=SimpleNamespace(kv_cache_layout="BLHNC"),
    )


def make() -> Engine:
    return Engine(kind_of()(config_of(), "scheduler", SimpleNamespace(kv_cache_groups=[None])))


@pytest.fixture
def engine(vllm: Any) -> Engine:
    return make()


def test_a_load_is_used_by_the_first_step_of_its_request(engine: Engine) -> None:
    job = engine.load("a", 4, 5, 6)
    engine.step()
    engine.step("b")
    engine.report(job, received={"a"})
    assert engine.counts == {}  # it may be aborted yet
    engine.step("a", "b")
    assert engine.counts == {"used": 3} and engine.made._outcomes.loads == {}
    engine.step("a")
    engine.report()
    engine.end("a", "FINISHED_STOPPED")
    assert engine.counts == {"used": 3}


@pytest.mark.parametrize("ends", [0, 1], ids=["while it loads", "before its step"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_request_that_is_aborted_has_used_nothing(engine: Engine, ends: int, groups: int) -> None:
    job, other = engine.load("a", 4, 5, 6), engine.load("b", 7)
    engine.step()
    if ends:
        engine.report(job, received={"a"})
    engine.end("a", groups=groups)
    assert engine.counts == {"aborted": 3}
    if not ends:
        engine.report(job, received={"a"})
    engine.report(other, received={"b"})
    engine.step("b")
    assert engine.counts == {"aborted": 3, "used": 1} and engine.made._outcomes.loads == {}


def test_a_load_that_failed_is_not_used_by_the_step_that_computes_instead(engine: Engine) -> None:
    """vLLM's scheduler handles the failure before the connector reads the report."""
    job = engine.load("a", 4, 5, 6)
    engine.step()
    engine.made.compute_instead({"a", "of no load"})
    engine.report(job, received={"a"})
    engine.step("a")
    engine.end("a", "FINISHED_STOPPED")
    assert engine.counts == {"failed": 3}


def test_a_load_whose_request_is_reported(engine: Engine) -> None:
    """A model of several groups, which has no blocks to report."""
    jobs = engine.load("a", 4, 5, 6), engine.load("b", 7)
    engine.step()
    engine.report(*jobs, received={"b"}, failed={"a"})
    engine.step("a", "b")
    assert engine.counts == {"failed": 3, "used": 1}


def test_a_request_that_ends_because_its_load_failed(engine: Engine) -> None:
    """kv_load_failure_policy "fail"."""
    job = engine.load("a", 4, 5, 6)
    engine.step()
    engine.end("a", "FINISHED_ERROR")
    engine.report(job)
    assert engine.counts == {"failed": 3}


def test_a_request_that_is_preempted_has_used_its_load_and_loads_again(engine: Engine) -> None:
    first = engine.load("a", 4, 5, 6)
    engine.step()
    engine.report(first, received={"a"})
    engine.step("a")
    engine.step("b")  # it gave its blocks to this one
    assert engine.counts == {"used": 3}
    again = engine.load("a", 7, 8)
    engine.step("b")
    engine.report(again, received={"a"})
    assert engine.counts == {"used": 3}
    engine.end("a")
    assert engine.counts == {"used": 3, "aborted": 2}


# -- kvswap_overlap: the step that loads the blocks has the request ---------------------------------------------------


def test_a_load_in_its_requests_step_is_used_when_it_has_ended(engine: Engine) -> None:
    job, other = engine.load("a", 4, 5, 6), engine.load("b", 7)
    engine.step("a")
    assert engine.counts == {}  # it may fail yet
    engine.report(job)
    assert engine.counts == {"used": 3}
    engine.step("a")
    engine.report(other, received={"b"})
    engine.step("a", "b")
    assert engine.counts == {"used": 4}


def test_a_load_that_fails_beside_its_step(engine: Engine) -> None:
    job, sharer = engine.load("a", 4, 5, 6), engine.load("b", 7)
    engine.step("a", "b")
    engine.made.compute_instead({"a", "b"})  # b shares its blocks
    engine.report(job, sharer)
    engine.step("a", "b")
    assert engine.counts == {"failed": 4}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("gone", ["preempted", "aborted"])
def test_a_request_that_goes_while_its_step_loads(engine: Engine, fails: bool, gone: str) -> None:
    """The next step is planned before this one has ended: with asynchronous scheduling."""
    job = engine.load("a", 4, 5, 6)
    engine.step("a")
    engine.step("b")
    if gone == "aborted":
        engine.end("a")
    assert engine.counts == {}
    if fails:
        engine.made.compute_instead({"a"})
    engine.report(job)
    assert engine.counts == ({"failed": 3} if fails else {"used": 3})


def test_a_load_that_was_reported_before_its_end(engine: Engine) -> None:
    job = engine.load("a", 4, 5, 6)
    engine.step()
    engine.report(received={"a"})
    engine.step("a")
    assert engine.counts == {}
    engine.report(job)
    assert engine.counts == {"used": 3}


def test_a_load_that_a_reset_has_forgotten_in_its_step(engine: Engine) -> None:
    """vLLM drops its jobs; the step waits for the load all the same."""
    engine.load("a", 4, 5, 6)
    engine.step("a")
    engine.side._jobs.clear()
    engine.step("a")
    assert engine.counts == {"used": 3}


# -- vLLM's side ------------------------------------------------------------------------------------------------------


def test_steps_without_loads_are_not_looked_at(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's step with nothing to move is to cost nothing."""
    calls: list[str] = []
    outcomes = engine.made._outcomes
    for name in ("planned", "reported", "failed"):
        monkeypatch.setattr(outcomes, name, lambda *_, name=name: calls.append(name))
    engine.step("a")
    engine.report()
    assert calls == []
    engine.load("a", 4)
    engine.step("a")
    assert calls == ["planned"]


@pytest.mark.parametrize("lacks", ["module", "describing", "stats"])
def test_a_release_without_such_statistics(vllm: Any, monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    """Nothing is counted, for vLLM's frontend would refuse it; and nothing else changes."""
    if lacks == "module":
        monkeypatch.delitem(sys.modules, f"{V1}.offloading.metrics")
    elif lacks == "describing":
        monkeypatch.setattr(vllm.metrics, "OffloadPromMetrics", OtherPromMetrics)
    else:
        monkeypatch.setattr(Side, "stats", "missing")
    engine = make()
    assert engine.made._outcomes is None
    job = engine.load("a", 4)
    engine.step("a")
    engine.made.compute_instead({"a"})
    engine.report(job)
    engine.end("a")
    if lacks == "describing":
        assert vars(type(engine.made).build_prom_metrics(config_of())) == {"metrics": {}}


def test_vllms_frontend_knows_the_metric(vllm: Any) -> None:
    metrics = kind_of().build_prom_metrics(config_of())
    assert [*metrics._offloading_metric_metadata] == [*metrics._offloading_metric_defs]
    assert [*metrics._offloading_metric_metadata] == ["vllm:theirs", "kvswap_loaded_blocks"]
    assert metrics._offloading_metric_defs["kvswap_loaded_blocks"].startswith(
        "kvswap_loaded_blocks['what']: GPU blocks"
    )


@pytest.mark.parametrize(
    ("extra_config", "more"),
    [
        ({"kvswap_lend": True}, {"kvswap_shared_link_bytes"}),
        ({"kvswap_share": True}, {"kvswap_shared_link_bytes"}),
        ({"kvswap_replicas": "kv"}, {"kvswap_replica_loaded_chunks", "kvswap_replica_engines"}),
    ],
)
def test_vllms_frontend_knows_the_metrics_of_what_is_configured(
    vllm: Any, extra_config: dict[str, Any], more: set[str]
) -> None:
    metrics = kind_of().build_prom_metrics(config_of(**extra_config))
    assert metrics._offloading_metric_metadata.keys() == {"vllm:theirs", "kvswap_loaded_blocks", *more}


def test_what_links_carried_for_and_by_other_engines(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a worker: in vLLM's statistics as differences, once a second."""
    own_stats = importlib.import_module("kvswap.vllm._own_stats")
    carried = dict.fromkeys(("lent_bytes_d2h", "lent_bytes_h2d", "borrowed_bytes_d2h", "borrowed_bytes_h2d"), 7)
    engine.made._links = own_stats.links_of(SimpleNamespace(stats=lambda: dict(carried)))
    assert engine.made.get_kv_connector_stats() is None
    carried["borrowed_bytes_h2d"] += 4096
    carried["lent_bytes_d2h"] += 100
    assert engine.made.get_kv_connector_stats() is None  # within the same second
    engine.made._links._next = 0.0
    name = "kvswap_shared_link_bytes"
    found = {(name, "borrowed", "h2d"): 4096, (name, "lent", "d2h"): 100}
    assert engine.made.get_kv_connector_stats().counts == found
    engine.made._links._next = 0.0
    assert engine.made.get_kv_connector_stats() is None
