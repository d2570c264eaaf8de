"""kvswap_lend: engines on one machine lend each other their GPU's link to the host (docs/share.md, "Between engines").

A worker's host memory is vLLM's SharedOffloadRegion: rows in a file, each with a cell of every rank. From 0.33 on,
vLLM splits a large region into several files, of which it keeps one descriptor: here it is one file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from kvswap import _C
from kvswap.offload._lend import Lend
from kvswap.share._lend import HostFile
from kvswap.share._steps import Steps
from kvswap.vllm import _together
from kvswap.vllm._handler import lend_of

_SEGMENTS = "_REGION_SEGMENTS"


def _refuse(why: str) -> ValueError:
    return ValueError(f"kvswap_lend: {why}")


def check(spec: Any, allowed: bool) -> bool:
    """Whether the workers of this spec lend. ValueError: they cannot, and why. allowed: the connector is kvswap's."""
    if lend_of(spec.extra_config) is None:
        return False
    _together.check_lend(spec.extra_config, allowed)
    config: Any = getattr(spec, "config", None)  # OffloadingConfig, from 0.30 on
    if config is None or not hasattr(config, "parallel"):
        raise _refuse("it needs vLLM 0.30 or later")
    if config.cache.blocks_per_chunk > 1:
        raise _refuse(
            f"a chunk has {config.cache.blocks_per_chunk} blocks, layer by layer, and lenders bring whole blocks. "
            "Leave out block_size and blocks_per_chunk"
        )
    if len(config.groups) > 1:
        raise _refuse(f"the cache has {len(config.groups)} groups of layers, and lenders bring blocks of all layers")
    return True


def refuse_sleep(vllm_config: Any, connector: type) -> None:
    """ValueError: the engine sleeps, and vLLM does not say when."""
    lends = lend_of(vllm_config.kv_transfer_config.kv_connector_extra_config) is not None
    if (
        lends
        and getattr(vllm_config.model_config, "enable_sleep_mode", False)
        and not hasattr(connector, "unregister_kv_caches")
    ):
        raise _refuse(
            "lent links must be given back before the engine goes to sleep, and this vLLM does not tell the connector "
            "of it. Leave out enable_sleep_mode, or use vLLM 0.33 or later"
        )


@contextlib.contextmanager
def one_file(spec: Any) -> Iterator[None]:
    """While vLLM makes the region."""
    from vllm.v1.kv_offload.cpu import spec as module

    segments = getattr(module, _SEGMENTS, None)
    if lend_of(spec.extra_config) is None or segments is None:
        yield
        return
    setattr(module, _SEGMENTS, 1)
    try:
        yield
    finally:
        setattr(module, _SEGMENTS, segments)


def _no_file() -> _C.Error:
    return _C.Error(
        "kvswap_lend: the host memory of this worker is not one file that others could map. It is on CUDA GPUs, and "
        'with "spec_name": "TieringOffloadingSpec"'
    )


def describe(spec: Any, region: Any, steps: Steps) -> Lend:
    """region: vLLM's; None, or one that is not in one file: kvswap.Error."""
    fd = getattr(region, "fd", None)
    if fd is None or len(getattr(region, "_segments", [None])) > 1:
        raise _no_file()
    asked = lend_of(spec.extra_config)
    assert asked is not None
    name, lenders = asked
    parallel, file = spec.config.parallel, os.fstat(fd)
    cells = parallel.world_size > 1 and not getattr(spec, "replicated_layout", False)
    engine = f"{spec.config.engine_id}\0{parallel.data_parallel_index}"
    place = HostFile(fd, 0, region._base.data_ptr())
    return Lend(name, engine, f"vllm {file.st_dev}", file.st_ino, place, cells, lenders, steps.is_idle)


def start(steps: Steps, handlers: list[Any]) -> None:
    """The worker is made: steps of its model are seen from now on. kvswap.Error: its region was not seen."""
    if not handlers or handlers[0].lending is None:
        raise _no_file()
    steps.attach(handlers[0].device, handlers[0].compute_stream)
