"""Which steps KVSwapConnector leaves out of vLLM's scheduler side, and what of the others, on stand-ins.

tests/integration/vllm_idle.py compares it with the real one.
"""

# mypy: ignore-errors

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"


class Manager:
    """vLLM's OffloadingManager."""

    def on_schedule_end(self, context: Any) -> None:
        pass


class TieredManager(Manager):
    def on_schedule_end(self, context: Any) -> None:
        del context


@dataclass
class SchedulerOutput:
    num_scheduled_tokens: dict[str, int]
    scheduled_cached_reqs: Any
    scheduled_new_reqs: list[Any] = field(default_factory=list)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] | None = None
    kv_cache_block_copies: list[Any] | None = None
    kv_connector_block_state: Any = None


@dataclass
class OffloadingConnectorMetadata:
    load_jobs: dict[int, Any]
    store_jobs: dict[int, Any]
    jobs_to_flush: set[int] | None = None


class OffloadingConnectorScheduler:
    """vLLM's, of chunks of 32 tokens, as far as _idle looks at it; it offers as many chunks as a request's .stored."""

    def __init__(self, manager: Any, prompt_only: bool = True) -> None:
        self.manager = manager
        groups = (SimpleNamespace(tokens_per_chunk=32),)
        self.config = SimpleNamespace(kv_group_configs=groups, offload_prompt_only=prompt_only)
        self._req_status: dict[str, Any] = {}
        self._current_batch_load_jobs: dict[int, Any] = {}
        self._current_batch_jobs_to_flush: set[int] = set()
        self._current_batch_allocated_block_ids: set[int] = set()
        self._sliding_window_groups = ()
        self._block_id_to_pending_jobs: dict[int, set[int]] = {}
        self.planned: list[Any] = []
        self.resets = 0

    def build_connector_meta(self, output: Any) -> Any:
        self.planned.append(output)
        for name in output.num_scheduled_tokens:
            status = self._req_status[name]
            status.group_states[0].next_stored_chunk_idx = status.stored
        return "theirs"

    def reset_cache(self) -> None:
        self.resets += 1


class RequestOffloadState:
    def __init__(self, stored: int, prompt: int = 70, limit: int | None = None, ended: bool = False) -> None:
        self.stored, self.max_offload_tokens = stored, limit
        self.req = SimpleNamespace(num_prompt_tokens=prompt, is_finished=lambda: ended)
        self.group_states = (SimpleNamespace(next_stored_chunk_idx=0),)
        self.keys, self.blocks = 0, []

    def update_offload_keys(self) -> None:
        self.keys += 1

    def update_block_id_groups(self, blocks: Any) -> None:
        self.blocks.append(blocks)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, which knows these stand-ins."""
    parts = V1.split(".")
    contents = {
        **{".".join(parts[: i + 1]): {} for i in range(len(parts))},
        "vllm.distributed.kv_transfer.kv_connector.utils": {"yield_req_data": lambda output: output},
        f"{V1}.offloading": {},
        f"{V1}.offloading.scheduler": {},
        f"{V1}.offloading.worker": {},
        f"{V1}.offloading.common": {"OffloadingConnectorMetadata": OffloadingConnectorMetadata},
        f"{V1}.offloading_connector": {},
        "vllm.v1": {}, "vllm.v1.core": {}, "vllm.v1.core.sched": {}, "vllm.v1.kv_offload": {},
        "vllm.v1.core.sched.output": {"SchedulerOutput": SchedulerOutput},
        "vllm.v1.kv_offload.base": {"OffloadingManager": Manager},
    }  # fmt: skip
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            above, _, last = name.rpartition(".")
            setattr(sys.modules[above], last, module)
    monkeypatch.delitem(sys.modules, "kvswap.vllm._idle", raising=False)
    made = importlib.import_module("kvswap.vllm._idle")
    monkeypatch.setattr(made, "digest", lambda: "these")
    monkeypatch.setitem(made._READ, "these", "stand-ins")
    yield made
    sys.modules.pop("kvswap.vllm._idle", None)


def step(*names: str, blocks: dict[str, Any] | None = None, resumed: set[str] = frozenset(), **more: Any) -> Any:
    """A step in which these requests decode."""
    cached = SimpleNamespace(
        req_ids=list(names), new_block_ids=[(blocks or {}).get(name) for name in names], resumed_req_ids=resumed
    )
    return SchedulerOutput(dict.fromkeys(names, 1), cached, **more)


def made(idle: Any, manager: Any = None, **requests: RequestOffloadState) -> OffloadingConnectorScheduler:
    """A scheduler that has planned one step with these requests."""
    theirs = OffloadingConnectorScheduler(manager or Manager())
    theirs._req_status.update(requests)
    idle.install(theirs)
    assert theirs.build_connector_meta(step(*requests)) == "theirs"
    theirs.planned.clear()
    return theirs


def nothing() -> OffloadingConnectorMetadata:
    return OffloadingConnectorMetadata({}, {}, set())


@pytest.mark.parametrize(
    ("status", "settled"),
    [
        (RequestOffloadState(2), True),
        (RequestOffloadState(1), False),
        (RequestOffloadState(0, prompt=31), True),
        (RequestOffloadState(1, limit=63), True),
        (RequestOffloadState(1, limit=64), False),
        (RequestOffloadState(2, limit=1000), True),
        (RequestOffloadState(2, ended=True), False),
    ],
)
def test_a_request_is_settled_when_all_that_it_may_store_was_offered(idle: Any, status: Any, settled: bool) -> None:
    theirs = made(idle, a=status)
    assert theirs.build_connector_meta(step("a")) == (nothing() if settled else "theirs")
    assert len(theirs.planned) == (not settled)


def test_the_rest_of_a_step_is_planned_without_settled_requests(idle: Any) -> None:
    theirs = made(idle, a=RequestOffloadState(2), b=RequestOffloadState(1), c=RequestOffloadState(2))
    blocks = {"c": ([7],)}
    theirs.build_connector_meta(step("a", "b", "c", blocks=blocks))
    (seen,) = theirs.planned
    assert seen.num_scheduled_tokens == {"b": 1}
    assert seen.scheduled_cached_reqs.req_ids == ["b", "c"]
    assert seen.scheduled_cached_reqs.new_block_ids == [None, ([7],)]


def test_new_blocks_are_noted(idle: Any) -> None:
    a, b = RequestOffloadState(2), RequestOffloadState(2)
    theirs = made(idle, a=a, b=b)
    assert theirs.build_connector_meta(step("a", "b", blocks={"b": ([7],)})) == nothing()
    assert (a.keys, a.blocks, b.keys, b.blocks) == (0, [], 1, [([7],)])


@pytest.mark.parametrize("known", [{"_sliding_window_groups": (1,)}, {"_block_id_to_pending_jobs": {7: {1}}}])
def test_new_blocks_that_may_have_been_others_are_for_vllm(idle: Any, known: dict[str, Any]) -> None:
    a = RequestOffloadState(2)
    theirs = made(idle, a=a)
    vars(theirs).update(known)
    assert theirs.build_connector_meta(step("a", blocks={"a": ([7],)})) == "theirs"
    assert a.blocks == [] and theirs.planned[0].scheduled_cached_reqs.req_ids == ["a"]
    assert theirs.build_connector_meta(step("a")) == nothing()


@pytest.mark.parametrize(
    ("more", "due"),
    [
        ({"scheduled_new_reqs": [SimpleNamespace(req_id="b")]}, ["b"]),
        ({"resumed": {"b"}}, ["b"]),
        ({"finished_req_ids": {"z"}}, []),
        ({"preempted_req_ids": {"z"}}, []),
        ({"kv_cache_block_copies": ["copy"]}, []),
        ({"kv_connector_block_state": SimpleNamespace(boundary_state_offloads={"a": [1]})}, ["a", "b"]),
    ],
)
def test_what_else_a_step_tells_is_for_vllm(idle: Any, more: dict[str, Any], due: list[str]) -> None:
    theirs = made(idle, a=RequestOffloadState(2), b=RequestOffloadState(2))
    assert theirs.build_connector_meta(step("a", "b", **more)) == "theirs"
    assert list(theirs.planned[0].num_scheduled_tokens) == due
    state = SimpleNamespace(boundary_state_offloads={})
    assert theirs.build_connector_meta(step("a", "b", kv_connector_block_state=state)) == nothing()


@pytest.mark.parametrize(
    "planned",
    [
        {"_current_batch_load_jobs": {1: "job"}},
        {"_current_batch_jobs_to_flush": {1}},
        {"_current_batch_allocated_block_ids": {7}},
    ],
)
def test_what_is_planned_already_is_for_vllm(idle: Any, planned: dict[str, Any]) -> None:
    theirs = made(idle, a=RequestOffloadState(2))
    vars(theirs).update(planned)
    assert theirs.build_connector_meta(step("a")) == "theirs"


def test_a_request_that_ended_is_forgotten(idle: Any) -> None:
    theirs = made(idle, a=RequestOffloadState(2))
    theirs.build_connector_meta(step(finished_req_ids={"a"}))
    theirs._req_status["a"] = RequestOffloadState(0)
    assert theirs.build_connector_meta(step("a")) == "theirs"


def test_a_cache_that_is_reset_is_offered_all_again(idle: Any) -> None:
    theirs = made(idle, a=RequestOffloadState(2))
    theirs.reset_cache()
    assert theirs.resets == 1
    assert theirs.build_connector_meta(step("a")) == "theirs"
    assert list(theirs.planned[0].num_scheduled_tokens) == ["a"]


def test_a_manager_with_tiers_has_each_step(idle: Any) -> None:
    theirs = made(idle, TieredManager(), a=RequestOffloadState(2))
    assert theirs.build_connector_meta(step("a")) == "theirs"
    assert theirs.planned[0].num_scheduled_tokens == {}


def test_answers_that_are_stored_stay_vllms(idle: Any) -> None:
    theirs = OffloadingConnectorScheduler(Manager(), prompt_only=False)
    idle.install(theirs)
    assert "build_connector_meta" not in vars(theirs)


def _no_text() -> str:
    raise OSError("could not get source code")


def _elsewhere() -> str:
    raise AttributeError("module 'utils' has no attribute 'yield_req_data'")


@pytest.mark.parametrize("digest", [lambda: "others", _no_text, _elsewhere])
def test_code_that_was_not_read_stays_vllms(idle: Any, monkeypatch: pytest.MonkeyPatch, digest: Any) -> None:
    monkeypatch.setattr(idle, "digest", digest)
    theirs = OffloadingConnectorScheduler(Manager())
    idle.install(theirs)
    assert not idle.known() and "build_connector_meta" not in vars(theirs)
