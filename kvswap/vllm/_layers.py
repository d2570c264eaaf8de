"""Loads in the step that needs them: the worker's side of kvswap_overlap.

They are submitted before the step's inputs are prepared, or else before the model's forward pass. In a step that runs
as Python, or as CUDA graphs of pieces, vLLM calls wait_for_layer_load() before each layer's attention, and the model's
stream waits for this layer's tensors alone, or, in a cache of all layers together, for the part of the blocks with its
bytes (_parts.py). A full CUDA graph does not call it (vLLM #29608): before such a step, and before one of which this is
not known, the stream waits for all of the load. Known means: in earlier steps of the same kind each layer with a cache
was waited for.

The stream also waits, at the beginning of a step and as a whole, for loads that were reported before they ended
(_ahead.py).

After the forward pass finish() waits on the host until the loads have ended, so that the step's output is told together
with their failures. A layer that was not waited for in a step that relied on it counts as one, and a wait that could
not be queued.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm.forward_context import get_forward_context

from kvswap import _C
from kvswap._log import logger
from kvswap.vllm._handler import VLLMHandler
from kvswap.vllm._parts import parts_of

_logger = logger("kvswap.vllm")

_CALLED = ("NONE", "PIECEWISE")  # CUDAGraphMode: vLLM calls wait_for_layer_load() in steps of these kinds


def _kind_of(forward_context: Any) -> str | None:
    """NONE or PIECEWISE; None: a full graph, or not known."""
    if not getattr(forward_context, "attn_metadata", None):
        return None
    name = getattr(getattr(forward_context, "cudagraph_runtime_mode", None), "name", None)
    return name if name in _CALLED else None


class StepLoads:
    """The loads that the step waits for. One thread calls, vLLM's worker, in this order: wait_for(), begin(),
    before_forward(), wait_for_layer() in the forward pass, finish()."""

    def __init__(self, handlers: Iterable[VLLMHandler], kv_caches: Mapping[str, Any]) -> None:
        self._handlers = [handler for handler in handlers if not handler.gpu_to_cpu]
        load = self._handlers[0]
        self._parts = parts_of(kv_caches, load.dst_tensors, load.layer_parts)
        self._names = frozenset(kv_caches)
        self._seen: dict[str, set[str]] = {}  # layers that were waited for, by the kind of step
        self._waited: set[str] = set()  # in this step
        self._by_layers = self._quiet = self._broken = False
        self._refused: dict[int, str] = {}  # loads that the model's stream may not have waited for, and why
        self.jobs: frozenset[int] = frozenset()  # of this step's own requests
        self.awaited: frozenset[int] = frozenset()  # of requests that were reported before their loads had ended
        self.submitting = False
        self.counts = {"layers": 0, "whole": 0}  # steps with loads, by what they waited for
        self.reported = 0  # loads that steps waited for because they were reported before they had ended

    def wait_for(self, jobs: Iterable[int]) -> None:
        """Before anything of the step is queued: its stream waits for these loads, or for those that still run."""
        self.awaited = frozenset(jobs)
        if self.awaited and not self.reported:
            _logger.info("a step waits for a load that was reported before it had ended")
        self.reported += len(self.awaited)
        self._wait(None, self.awaited)

    def begin(self, jobs: set[int], forward_context: Any = None) -> None:
        """These jobs, of the ones that are about to be submitted, load for the step's own requests. Without a context
        the step may be of any kind that was seen; before_forward() knows it."""
        self.jobs = frozenset(jobs)
        if not jobs:  # most steps; finish() has left the rest as it has to be
            return
        self.submitting = True
        self._waited.clear()
        kinds = self._seen if forward_context is None else (_kind_of(forward_context),)
        self._by_layers = any(self._waits(kind) for kind in kinds)
        for handler in self._handlers:
            handler.in_layers = self.jobs if self._by_layers else frozenset()

    def _waits(self, kind: str | None) -> bool:
        """Whether steps of this kind are known to wait for each layer."""
        known = kind is not None and self._names <= self._seen.get(kind, set())
        return known and bool(self._names) and not self._broken

    def before_forward(self, forward_context: Any) -> None:
        """All is submitted, and the forward pass is next."""
        if not self.jobs:
            return
        self.submitting = False
        self._by_layers = self._by_layers and self._waits(_kind_of(forward_context))
        if not self._by_layers:
            self._wait(None)
        how = "layers" if self._by_layers else "whole"
        if not self.counts[how]:
            after = "layer by layer" if self._by_layers else "as a whole, in this kind of step"
            _logger.info("a step waits for the load of its own blocks %s", after)
        self.counts[how] += 1

    def _wait(self, parts: tuple[int, ...] | None, jobs: frozenset[int] | None = None) -> None:
        for job in self.jobs if jobs is None else jobs:
            for handler in self._handlers:
                try:
                    handler.make_wait(job, parts)
                except _C.Error as error:  # of the load, whose result tells it too, or of the wait itself
                    self._refused.setdefault(job, f"the forward pass may not have waited for it: {error}")

    def wait_for_layer(self, name: str) -> None:
        """Before a layer's attention is queued."""
        if self._by_layers:
            self._waited.add(name)
            self._wait(self._parts.get(name))
        elif not self._quiet:
            seen = self._seen.setdefault(_kind_of(get_forward_context()) or "unknown", set())
            seen.add(name)
            self._quiet = self._names <= seen  # nothing more to learn in this step

    def finish(self) -> dict[int, str]:
        """After the forward pass, with the loads ended: those that cannot be trusted, and why."""
        self._quiet = False
        if not self.jobs and not self.awaited:
            return {}
        own, missed = self.jobs, self._names - self._waited if self._by_layers else None
        self.jobs, self.awaited, self._by_layers = frozenset(), frozenset(), False
        refused, self._refused = self._refused, {}
        for handler in self._handlers:
            handler.in_layers = frozenset()
        if not missed:
            return refused
        self._broken = True
        text = f"the forward pass did not wait for layers that were being loaded: {', '.join(sorted(missed)[:4])}"
        _logger.error("%s. From now on steps wait for their loads as a whole", text)
        return {**refused, **dict.fromkeys(own, text)}
