"""vLLM's offloading specs with kvswap's transfers: kvswap replaces the handlers of both directions and the
host allocation; everything else stays vLLM's (vllm/v1/kv_offload/cpu/spec.py and tiering/).

While vLLM builds its worker (create_worker()), the handler class is replaced by kvswap's. If vLLM's class has unknown
arguments, vLLM's class stays. A worker without a shared region gets block-first memory, see _memory.py; a region's rows
are used unchanged. The region is pinned as a whole, as releases before 0.33 do.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import vllm
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

import kvswap
from kvswap._log import logger
from kvswap.offload._layout import device_of
from kvswap.share._steps import Steps
from kvswap.vllm import _lend
from kvswap.vllm._codec import Plan, shrink, take_plan
from kvswap.vllm._handler import VLLMHandler, options_of, port_of
from kvswap.vllm._memory import SlabRegion, allocating, worker_class
from kvswap.vllm._memory import why_not as why_not_block_first
from kvswap.vllm._metrics import number_of, serve
from kvswap.vllm._replicas import Replicas, manager_for, region_for
from kvswap.vllm._replicas import of as replicas_of
from kvswap.vllm._share import by_blocks, describe, in_blocks, is_allowed, meet, say_one_rank, seconds_of

_logger = logger("kvswap.vllm")

_TAKEN = {
    "self",
    "gpu_tensors",
    "cpu_tensors",
    "kv_cache_groups_data_refs",
    "gpu_to_cpu",
    "mmap_region",
    "blocks_per_chunk",
    "layer_refs_per_group",
    "canonical_layout",
    "host_memory_is_pinned",
}
_CLASS = "SingleDirectionOffloadingHandler"
_building = threading.Lock()


def why_not() -> str | None:
    """Why vLLM's own handlers must stay; None: they can be replaced."""
    theirs = getattr(gpu_worker, _CLASS, None)
    if not isinstance(theirs, type):
        return f"its gpu_worker has no {_CLASS}"
    taken = set(inspect.signature(theirs.__init__).parameters)  # type: ignore[misc]
    unknown = sorted(taken - _TAKEN)
    if unknown:
        return f"its {_CLASS} takes {', '.join(unknown)}"
    return None


def _whole(pin: Callable[[Any], None]) -> Callable[..., None]:
    """vLLM's pin_mmap_region, for the whole region. One registration for each slot would leave unpinned gaps inside the
    range of a tensor, and kvswap would use the copy engine for all blocks, after many look-ups.
    """

    def pin_whole(region: Any, worker_slot_only: bool = False) -> None:
        del worker_slot_only
        if not isinstance(region, SlabRegion):  # a slab is pinned when allocated
            pin(region)

    return pin_whole


def _leave(spec: KVSwapTransfers, reason: str) -> None:
    if spec.plan is not None:
        raise kvswap.Error(f"kvswap_codec: {reason} (vLLM {vllm.__version__}, kvswap {kvswap.__version__})")
    if spec.steps is not None:
        raise kvswap.Error(f"kvswap_lend: {reason} (vLLM {vllm.__version__}, kvswap {kvswap.__version__})")
    if spec.share_wait is not None:
        raise kvswap.Error(f"kvswap_share: {reason} (vLLM {vllm.__version__}, kvswap {kvswap.__version__})")
    if spec.replicas is not None:
        raise kvswap.Error(f"kvswap_replicas: {reason} (vLLM {vllm.__version__}, kvswap {kvswap.__version__})")
    versions = (vllm.__version__, kvswap.__version__, reason)
    _logger.warning("vLLM %s with kvswap %s: %s. vLLM's own transfers stay", *versions)


def _needs_ours(spec: KVSwapTransfers) -> bool:
    """Whether the host memory cannot be as vLLM allocates it."""
    return any(option is not None for option in (spec.plan, spec.share_wait, spec.steps, spec.replicas))


@contextmanager
def _ours_in_place(spec: KVSwapTransfers, kv_caches: Any) -> Iterator[list[Any]]:
    """While vLLM builds a worker. The handlers that are made meanwhile."""
    reason = why_not()
    if reason is not None:
        _leave(spec, reason)
        yield []
        return
    options: dict[str, Any] = {
        **options_of(spec.extra_config),
        "remember_failures": spec.remember_failures,
        "layers": spec.layers,
    }
    pages: list[int] | None = None
    if spec.plan is not None:
        options["codings"] = spec.plan.codings(kv_caches)
        pages = [coding.coded_nbytes for coding in options["codings"]]
    elif spec.by_blocks:
        pages = [int(entry.page_size_bytes) for entry in kv_caches.tensors]
    port = port_of(spec.extra_config)
    if port is not None:
        serve(port, number_of(spec))
    shared: Callable[[Any], None] | None = None
    if spec.share_wait is not None:
        wait = spec.share_wait
        shared = lambda region: options.update(share=describe(spec.config, region, wait))  # noqa: E731
    if spec.steps is not None:
        steps = spec.steps
        shared = lambda region: options.update(lend=_lend.describe(spec, region, steps))  # noqa: E731
    own = None if spec.replicas is None else partial(region_for, spec.replicas, options, pages)
    made: list[Any] = []
    regions: list[SlabRegion] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        """kvswap's handler; or vLLM's for the whole worker, if the first cannot be created."""
        try:
            if not made or isinstance(made[0], VLLMHandler):
                made.append(VLLMHandler(*args, **kwargs, **options))
                return made[-1]
        except (TypeError, ValueError, IndexError) as error:
            if made:
                raise
            _leave(spec, f"its cache has a shape that is not known: {error}")
        if regions:
            kwargs["cpu_tensors"] = regions[-1].rows()
        made.append(theirs(*args, **kwargs))
        return made[-1]

    worker = worker_class(gpu_worker)
    reason = why_not_block_first(worker)
    if reason is not None and _needs_ours(spec):
        _leave(spec, reason)
    if reason is not None:
        _logger.warning(
            "vLLM %s with kvswap %s: %s. Its host memory stays as vLLM allocates it, a tensor at a time",
            *(vllm.__version__, kvswap.__version__, reason),
        )
    with _building:
        theirs, pin = getattr(gpu_worker, _CLASS), getattr(gpu_worker, "pin_mmap_region", None)
        setattr(gpu_worker, _CLASS, make)
        if pin is not None:
            gpu_worker.pin_mmap_region = _whole(pin)
        init = None if reason else worker.__init__
        if init is not None:
            worker.__init__ = allocating(init, regions.append, pages, shared, own)
        try:
            yield made
        finally:
            if init is not None:
                worker.__init__ = init
            setattr(gpu_worker, _CLASS, theirs)
            if pin is not None:
                gpu_worker.pin_mmap_region = pin


def _on_host(kv_caches: Any) -> bool:
    return all(device_of(entry.tensor) == "host:0" for entry in kv_caches.tensors)


def _refuse_less_than_a_chunk(spec: Any) -> None:
    """ValueError: the host memory has no room for a chunk, so that nothing could be stored."""
    nbytes, blocks = getattr(spec, "kv_bytes_per_chunk", 0), getattr(spec, "blocks_per_chunk", None)
    chunks = getattr(spec, "num_chunks", getattr(spec, "num_blocks", None))  # from 0.30 on; before
    if not nbytes or chunks is None or chunks > 0:
        return
    asked = spec.extra_config["cpu_bytes_to_use"]
    raise ValueError(
        f"cpu_bytes_to_use is {asked}, less than one chunk: {blocks} GPU block(s) of all workers take {nbytes} bytes "
        f"of host memory. Set cpu_bytes_to_use in kv_connector_extra_config to {nbytes} or more; a cache of use has "
        "room for thousands of chunks"
    )


class KVSwapTransfers:
    """Mixed into one of vLLM's specs that keep blocks in host memory: kvswap does its transfers.

    kv_connector_extra_config, besides vLLM's own: kvswap_path, kvswap_priority, kvswap_max_ctas, kvswap_pace_gbps (as
    kvswap.swap_blocks_batch takes them), kvswap_wait_timeout_s (300; None: no limit), kvswap_metrics_port
    (None; worker N serves Prometheus on 127.0.0.1, this port + N; N counts over all data-parallel engines),
    kvswap_codec (None; under KVSwapConnector: one of kvswap.codecs.CODECS, for the blocks in host memory),
    kvswap_codec_keep ([]; numbers of layers whose blocks it keeps as they are), kvswap_share (false; under
    KVSwapConnector: ranks that hold the same cache load it once), kvswap_share_wait_ms (2; for another rank's call),
    kvswap_lend (false; under KVSwapConnector: engines of this name, true for a default one, lend each other their GPU's
    link), kvswap_lenders (3; engines at most that lend to a worker, and to which it lends),
    kvswap_replicas (None; under KVSwapConnector: a name; replicas of one name have one host pool).
    """

    remember_failures = True
    layers: Mapping[str, Any] | None = None  # the layers' caches, if steps wait for one layer after another
    plan: Plan | None  # of coded blocks
    share_wait: float | None  # seconds; None: loads are not shared
    by_blocks: bool  # the blocks of a chunk lie one behind the other in vLLM's region
    steps: Steps | None  # of this worker; None: links are not lent
    replicas: Replicas | None = None  # the pool that is common to several engines
    _manager: Any
    config: Any  # OffloadingConfig
    extra_config: dict[str, Any]
    BLOCK_SIZE_ALIGNMENT: int
    _worker: Any

    def __init__(self, config: Any) -> None:
        self.plan = take_plan(config.extra_config)
        if self.plan is not None:
            config = shrink(config, self.plan, self.BLOCK_SIZE_ALIGNMENT)
        self.by_blocks = by_blocks(config, config.extra_config)
        if self.by_blocks:
            config = in_blocks(config, self.BLOCK_SIZE_ALIGNMENT)
        super().__init__(config)  # type: ignore[call-arg]
        _refuse_less_than_a_chunk(self)
        self.share_wait = seconds_of(self)
        self.replicas = replicas_of(self)
        lends = _lend.check(self, is_allowed())
        self.steps = Steps() if lends and self.replicas is None else None
        if self.replicas is not None:
            self.remember_failures = False  # other engines write to the host's blocks as well

    def get_manager(self) -> Any:
        """As vLLM's; of replicas, one whose index they have in common."""
        if self.replicas is None:
            return super().get_manager()  # type: ignore[misc]
        if self._manager is None:
            self._manager = manager_for(self.replicas, self)
        return self._manager

    def _uses_shared_region(self) -> bool:
        """As vLLM's; replicas have a region that is not vLLM's."""
        return self.replicas is None and bool(super()._uses_shared_region())  # type: ignore[misc]

    def create_worker(self, kv_caches: Any) -> Any:
        """As vLLM's, with kvswap's handlers."""
        with _ours_in_place(self, kv_caches) as handlers, _lend.one_file(self):
            worker = super().create_worker(kv_caches)  # type: ignore[misc]
        say_one_rank(self)
        if self.steps is not None:
            _lend.start(self.steps, handlers)
        if self.share_wait is not None:
            meet(handlers[0].member, self.config.parallel.world_size)
        return worker

    def get_worker(self, kv_caches: Any) -> Any:
        """As vLLM's; on the CPU platform too, which vLLM refuses at this point: the host device moves its cache."""
        if _on_host(kv_caches) and not self._worker:
            self._worker = self.create_worker(kv_caches)
        return super().get_worker(kv_caches)  # type: ignore[misc]


class KVSwapOffloadingSpec(KVSwapTransfers, CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's CPUOffloadingSpec with kvswap's transfers; KVSwapTransfers has its options."""


def _tiering() -> type:
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    class KVSwapTieringOffloadingSpec(KVSwapTransfers, TieringOffloadingSpec):  # type: ignore[misc]
        """vLLM's TieringOffloadingSpec with kvswap's transfers; KVSwapTransfers has its options."""

        remember_failures = False  # other tiers write to the host's blocks as well

    return KVSwapTieringOffloadingSpec


def __getattr__(name: str) -> Any:
    if name == "KVSwapTieringOffloadingSpec":
        made = globals()[name] = _tiering()
        return made
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
