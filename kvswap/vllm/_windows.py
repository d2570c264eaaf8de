"""What vLLM's OffloadingConnector stores of groups whose blocks are freed while their request runs (sliding windows).

vLLM (0.26 to 0.33) offers bytes of other requests, or bytes that were never stored, in two cases:

- reset_cache() lets each request store its prompt again from chunk 0. Its list of GPU blocks still has those that the
  window has passed, which hold other requests' bytes by now: vLLM strikes such blocks out from next_stored_chunk_idx on
  alone. Here such a group goes on where it was; what it had stored before is not stored again.
- To 0.32 a chunk of several blocks is stored if its last block is in the list. Others may be struck out: the window has
  passed them, or another request found them in the prefix cache. A load of the chunk delivers what the host block held
  before; and as a job's blocks are counted from its first one on, those behind a gap go to wrong places. Here a chunk
  with a gap is not stored.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from kvswap._log import logger

_logger = logger("kvswap.vllm")


def has_window(spec: Any) -> bool:
    """Of an attention layer: a load may want any block of a chunk. Of Mamba's it wants the last."""
    return any(getattr(spec, name, None) is not None for name in ("sliding_window", "attention_chunk_size"))


class _Windows:
    """In the place of vLLM's reset_cache() and _build_store_jobs()."""

    def __init__(self, theirs: Any, specs: list[Any]) -> None:
        self._scheduler, self._reset, self._build = theirs, theirs.reset_cache, theirs._build_store_jobs
        self._groups = theirs._sliding_window_groups
        configs = theirs.config.kv_group_configs
        self._windows = [group for group in self._groups if has_window(specs[configs[group].group_idx])]
        self._per_chunk = theirs.config.blocks_per_chunk

    def reset_cache(self) -> Any:
        known = [status for status in self._scheduler._req_status.values() if status.req.status.name != "PREEMPTED"]
        states = [status.group_states[group] for status in known for group in self._groups]
        before = [state.next_stored_chunk_idx for state in states]
        done = self._reset()
        for state, index in zip(states, before, strict=True):
            if state.block_ids:  # else, as after a preemption, the request gets new blocks
                state.next_stored_chunk_idx = index
        return done

    def build_store_jobs(self, output: Any) -> Any:
        known, taken = self._scheduler._req_status, list[tuple[list[int], int, int]]()
        for name in (*output.num_scheduled_tokens, *(output.finished_req_ids or ())):
            if name in known:
                for group in self._windows:
                    taken += self._ends_of_gaps(known[name].group_states[group])
        for blocks, index, _ in taken:
            blocks[index] = 0  # vLLM's code passes over a chunk whose last block is struck out
        try:
            return self._build(output)
        finally:
            for blocks, index, block in taken:
                blocks[index] = block

    def _ends_of_gaps(self, state: Any) -> Iterator[tuple[list[int], int, int]]:
        """The last blocks of chunks with a gap: where each stands, and which it is."""
        blocks, per_chunk = state.block_ids, self._per_chunk
        for end in range((state.next_stored_chunk_idx + 1) * per_chunk, len(blocks) + 1, per_chunk):
            if blocks[end - 1] != 0 and 0 in blocks[end - per_chunk : end]:
                yield blocks, end - 1, blocks[end - 1]


def _stores_gaps(theirs: Any) -> bool:
    code = inspect.unwrap(type(theirs)._build_store_jobs).__code__
    return "chunk_start" not in code.co_varnames + code.co_cellvars  # 0.33 looks at each block of a chunk


def install(theirs: Any, kv_cache_config: Any) -> None:
    """vLLM's connector_scheduler stores the blocks that its requests have, and whole chunks."""
    if not getattr(theirs, "_sliding_window_groups", ()) or not hasattr(theirs, "_build_store_jobs"):
        return
    try:
        windows = _Windows(theirs, [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups])
    except (AttributeError, IndexError) as error:
        _logger.warning("blocks that sliding windows have passed may be stored: %s", error)
        return
    theirs.reset_cache = windows.reset_cache
    if windows._per_chunk > 1 and _stores_gaps(theirs):
        theirs._build_store_jobs = windows.build_store_jobs
