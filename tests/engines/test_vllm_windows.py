"""What of a sliding window KVSwapConnector lets vLLM's scheduler side store, on stand-ins.

tests/integration/vllm_windows.py checks the bytes with the real one.
"""

# mypy: ignore-errors

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvswap.vllm import _windows

pytestmark = pytest.mark.not_sanitized("Python only")

FULL = SimpleNamespace(block_size=16, sliding_window=None)
WINDOW = SimpleNamespace(block_size=16, sliding_window=64)
CHUNKED = SimpleNamespace(block_size=16, attention_chunk_size=96)
MAMBA = SimpleNamespace(block_size=16)


class Scheduler:
    """vLLM's OffloadingConnectorScheduler, as far as _windows looks at it: chunks of 2 blocks of 16 tokens."""

    def __init__(self, per_chunk=2):
        groups = tuple(SimpleNamespace(group_idx=i) for i in range(3))
        self.config = SimpleNamespace(blocks_per_chunk=per_chunk, kv_group_configs=groups)
        self._sliding_window_groups = (1, 2)
        self._req_status = {}

    def add(self, name, *groups, status="RUNNING"):
        """groups: blocks, and the chunks that were stored."""
        req = SimpleNamespace(status=SimpleNamespace(name=status))
        states = tuple(SimpleNamespace(block_ids=blocks, next_stored_chunk_idx=stored) for blocks, stored in groups)
        self._req_status[name] = SimpleNamespace(group_states=states, req=req)

    def indices(self, name):
        return [state.next_stored_chunk_idx for state in self._req_status[name].group_states]

    def reset_cache(self):
        for status in self._req_status.values():
            for state in status.group_states:
                state.next_stored_chunk_idx = 0
        return True

    def _build_store_jobs(self, output):
        """What it would store: the blocks of chunks whose last block is there."""
        found = {}
        for name in (*output.num_scheduled_tokens, *(output.finished_req_ids or ())):
            for group, state in enumerate(self._req_status[name].group_states if name in self._req_status else ()):
                blocks, n = state.block_ids, 2
                chunks = [blocks[i : i + n] for i in range(n * state.next_stored_chunk_idx, len(blocks) - n + 1, n)]
                found[name, group] = [chunk for chunk in chunks if chunk[-1] != 0]
        return found


class MendedScheduler(Scheduler):
    def _build_store_jobs(self, output):
        chunk_start = 0
        return output, chunk_start


def installed(scheduler, specs=(FULL, WINDOW, MAMBA)):
    _windows.install(
        scheduler, SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])
    )
    return scheduler


def step(*names, finished=None):
    return SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 16), finished_req_ids=finished)


def test_a_reset_leaves_windows_where_they_were():
    scheduler = installed(Scheduler())
    scheduler.add("runs", ([1, 2, 3, 4], 2), ([5, 6, 7, 8], 2), ([0, 0, 0, 9], 1))
    scheduler.add("waits", ([], 2), ([], 2), ([], 2))
    scheduler.add("starts again", ([1, 2], 1), ([3, 4], 1), ([5, 6], 1), status="PREEMPTED")
    assert scheduler.reset_cache() is True
    assert scheduler.indices("runs") == [0, 2, 1]  # what the window has passed may be another's by now
    assert scheduler.indices("waits") == [0, 0, 0]
    assert scheduler.indices("starts again") == [0, 0, 0]  # both get new blocks


@pytest.mark.parametrize("window", [WINDOW, CHUNKED])
def test_a_chunk_with_a_gap_is_not_stored(window):
    scheduler = installed(Scheduler(), (FULL, window, MAMBA))
    blocks = [0, 6, 7, 8, 9, 0, 0, 10, 11, 12, 0]
    scheduler.add("a", ([1, 2, 3, 4], 0), (blocks, 0), ([0, 5, 0, 6], 0))
    scheduler.add("b", ([1, 2], 0), ([3, 4], 0), ([], 0))
    before = list(blocks)
    found = scheduler._build_store_jobs(step("a", "unknown", finished={"b"}))
    assert found["a", 0] == [[1, 2], [3, 4]]
    assert found["a", 1] == [[7, 8], [11, 12]]
    assert found["a", 2] == [[0, 5], [0, 6]]  # a state is in the last block
    assert found["b", 1] == [[3, 4]]
    assert blocks == before
    assert scheduler._build_store_jobs(step(finished=set())) == {}


def test_what_was_stored_is_not_looked_at():
    scheduler = installed(Scheduler())
    scheduler.add("a", ([], 0), ([0, 6, 0, 8], 1), ([], 0))
    assert scheduler._build_store_jobs(step("a"))["a", 1] == []


def test_the_list_is_whole_again_when_vllms_code_raises(monkeypatch):
    def fail(self, output):
        raise RuntimeError(output)

    monkeypatch.setattr(Scheduler, "_build_store_jobs", fail)
    scheduler, blocks = installed(Scheduler()), [0, 6]
    scheduler.add("a", ([], 0), (blocks, 0), ([], 0))
    with pytest.raises(RuntimeError):
        scheduler._build_store_jobs(step("a"))
    assert blocks == [0, 6]


@pytest.mark.parametrize("scheduler", [MendedScheduler(), Scheduler(per_chunk=1)])
def test_where_no_gap_is_stored_vllms_code_stays(scheduler):
    installed(scheduler)
    assert "_build_store_jobs" not in vars(scheduler) and "reset_cache" in vars(scheduler)


def test_a_model_without_windows_is_left_alone():
    scheduler = Scheduler()
    scheduler._sliding_window_groups = ()
    assert not {"_build_store_jobs", "reset_cache"} & set(vars(installed(scheduler)))
    installed(SimpleNamespace())  # a stand-in that knows of none


def test_a_scheduler_with_other_names_is_left_alone(caplog):
    scheduler = Scheduler()
    scheduler.config.kv_group_configs = tuple(SimpleNamespace() for _ in range(3))
    before = scheduler.reset_cache
    installed(scheduler)
    assert scheduler.reset_cache == before
    assert "has no attribute 'group_idx'" in caplog.text
