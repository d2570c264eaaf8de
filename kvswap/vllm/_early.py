"""A step's own loads begin before its inputs are prepared, in vLLM's second model runner too (kvswap_overlap).

The first runner calls the connector's handle_preemptions() before it prepares a step's inputs; the second one (0.26 to
0.33) after that, just before the forward pass, which is 2 to 4 ms later, and behind work that reads and writes blocks.
Here its execute_model() lets KVSwapConnector begin the step before anything else.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

_RUNNER = "vllm.v1.worker.gpu.model_runner"


def has_second_runner() -> bool:
    """Whether the worker may have it."""
    return _RUNNER in sys.modules


def _may_begin(scheduler_output: Any) -> bool:
    """Whether loads may begin. Not where the runner writes to blocks first, clears new ones or copies shared ones; nor
    where it runs an encoder first, whose inputs would be copied behind the load; nor where no model runs."""
    first = ("new_block_ids_to_zero", "kv_cache_block_copies", "scheduled_encoder_inputs")
    return scheduler_output.total_num_scheduled_tokens > 0 and not any(
        getattr(scheduler_output, name, None) for name in first
    )


def install(kind: type) -> str | None:
    """In a worker with the second runner, whose connector is of this class: it has begin_step(). Once. What of the
    runner is not known; None: nothing, or the worker has the first runner."""
    runner = getattr(sys.modules.get(_RUNNER), "GPUModelRunner", None)
    if runner is None:
        return None
    theirs = runner.execute_model
    if getattr(theirs, "of_kvswap", False):
        return None
    if list(inspect.signature(inspect.unwrap(theirs)).parameters)[:2] != ["self", "scheduler_output"]:
        return "GPUModelRunner.execute_model"

    @functools.wraps(theirs)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        meta = scheduler_output.kv_connector_metadata
        if isinstance(connector, kind) and meta is not None:
            connector.begin_step(meta, lambda: _may_begin(scheduler_output))  # type: ignore[attr-defined]
        return theirs(self, scheduler_output, *args, **kwargs)

    execute_model.of_kvswap = True  # type: ignore[attr-defined]
    runner.execute_model = execute_model
    return None
