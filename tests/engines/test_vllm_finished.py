"""What KVSwapConnector stores of requests that ended, and that a load which failed is not tried again, on stand-ins.

benchmarks/serving/server.py runs both with the real scheduler.
"""

# mypy: ignore-errors

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest

from kvswap.vllm import _finished

pytestmark = pytest.mark.not_sanitized("Python only")


def request(computed, prompt, tokens, ended=True):
    return SimpleNamespace(
        num_computed_tokens=computed, num_prompt_tokens=prompt, num_tokens=tokens, is_finished=lambda: ended
    )


class Scheduler:
    """vLLM 0.26's OffloadingConnectorScheduler, as far as _finished looks at it: chunks of 2 blocks of 16 tokens."""

    def __init__(self) -> None:
        groups = (SimpleNamespace(tokens_per_chunk=32),)
        self.config = SimpleNamespace(blocks_per_chunk=2, kv_group_configs=groups)

    def _calc_num_offloadable_tokens(self, status, tokens):
        return min(tokens, status.req.num_tokens)

    def _build_store_jobs(self, scheduler_output):
        del scheduler_output

    def of(self, req, blocks):
        """As vLLM asks for a request with so many GPU blocks."""
        states = (SimpleNamespace(block_ids=list(range(1, 1 + blocks))),)
        status = SimpleNamespace(req=req, group_states=states)
        return self._calc_num_offloadable_tokens(status, req.num_tokens)


class MendedScheduler(Scheduler):
    def _build_store_jobs(self, scheduler_output):
        return scheduler_output.status.FINISHED_ABORTED, scheduler_output.num_prompt_tokens


@pytest.fixture
def scheduler():
    made = Scheduler()
    _finished.install(made)
    return made


@pytest.mark.parametrize(
    ("req", "blocks", "stored"),
    [
        (request(0, 100, 100), 0, 0),  # waits, and its client went away
        (request(96, 100, 100), 0, 0),  # waits for a load
        (request(0, 100, 130), 9, 0),  # preempted: its blocks are others' now
        (request(64, 100, 100), 4, 64),  # a part of the prompt
        (request(127, 100, 128), 8, 127),  # the last token ends a block, and was never computed
        (request(128, 100, 128), 8, 127),  # the same with a step ahead
        (request(64, 64, 65), 5, 64),
    ],
)
def test_what_was_never_computed_is_not_stored(scheduler, req, blocks, stored):
    assert scheduler.of(req, blocks) == stored


def test_a_request_that_runs_is_vllms(scheduler):
    assert scheduler.of(request(0, 100, 100, ended=False), 0) == 100


def test_releases_that_mend_it_are_left_alone():
    made = MendedScheduler()
    _finished.install(made)
    assert made.of(request(127, 100, 128), 8) == 128
    _finished.install(SimpleNamespace())  # knows nothing of it


@dataclass(eq=False)
class Loading:
    """A request."""

    request_id: str
    blocks: set[int]


class TestGivingUp:
    """_failures, on a stand-in for vLLM's scheduler."""

    @pytest.fixture
    def failures(self, monkeypatch):
        class EngineScheduler:
            def _handle_invalid_blocks(self, invalid_block_ids, num_scheduled_tokens):
                del num_scheduled_tokens
                bad = {one.request_id for one in self._inflight_prefills if one.blocks & invalid_block_ids}
                self.failed_recving_kv_req_ids |= bad
                return set()

        names = ["vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"]
        contents = {name: {} for name in names}
        contents["vllm.v1.core.sched.scheduler"] = {"Scheduler": EngineScheduler}
        contents["vllm.v1.request"] = {"Request": type("Request", (), {}), "RequestStatus": SimpleNamespace()}
        for name, content in contents.items():
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "kvswap.vllm._failures", raising=False)
        yield importlib.import_module("kvswap.vllm._failures")
        sys.modules.pop("kvswap.vllm._failures", None)

    def test_a_request_whose_load_failed_keeps_no_room(self, failures):
        """vLLM 0.26 keeps it for what loads, so that a load may not begin and nothing runs."""

        class Connector:
            has_sync_loads = False

            def __init__(self) -> None:
                self.given_up = set()

            def compute_instead(self, requests):
                self.given_up |= requests

        assert failures.install(Connector) is None
        scheduler = failures.Scheduler()
        well, bad = Loading("well", {1, 2}), Loading("bad", {3, 4})
        scheduler.connector, scheduler._inflight_prefills = Connector(), {well, bad}
        scheduler.failed_recving_kv_req_ids = set()
        assert scheduler._handle_invalid_blocks({3}, {}) == set()
        assert scheduler._inflight_prefills == {well} and scheduler.connector.given_up == {"bad"}
        scheduler.connector, scheduler._inflight_prefills = object(), {bad}  # another's connector
        scheduler._handle_invalid_blocks({3}, {})
        assert scheduler._inflight_prefills == {bad}

    def test_a_scheduler_of_another_shape_is_named(self, failures, monkeypatch):
        monkeypatch.setattr(failures.Scheduler, "_handle_invalid_blocks", lambda self, blocks: None)
        assert failures.install(object) == failures.why_not() == "Scheduler._handle_invalid_blocks"
        monkeypatch.delattr(failures.Scheduler, "_handle_invalid_blocks")
        assert "_handle_invalid_blocks" in failures.install(object)
