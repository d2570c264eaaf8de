"""kvswap_share: the ranks of one engine load a cache that is the same on all of them once (docs/share.md).

vLLM says that it is (OffloadingConfig.replicated_layout, from 0.30 on: MLA under tensor parallelism), and keeps one
copy of it in a region that all ranks have mapped. It gives all ranks the same loads, and rank 0 alone the stores. So
the members of a group are the ranks, and their memory is vLLM's region: the scheduler, the tiers and the bytes in host
memory are the same as without it.

Stores stay rank 0's, and the links of the others take part in them. To let each rank store a part, vLLM's rule would
have to be changed, and each store would wait for the reports of all ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from kvswap._log import logger
from kvswap.offload._member import Share
from kvswap.vllm import _lend, _together
from kvswap.vllm._codec import step_of
from kvswap.vllm._handler import codec_of, share_of
from kvswap.vllm._together import TIERS, foreign_tier

_logger = logger("kvswap.vllm")

_MOST_RANKS = 16  # of kvswap.share
_SECONDS = 10.0  # for all ranks to meet
_STALL = 0.02  # seconds beyond the wait for its call, in which a rank answers

_allowed: ContextVar[bool] = ContextVar("kvswap_share", default=False)


@contextlib.contextmanager
def allowed(vllm_config: Any, connector: type) -> Iterator[None]:
    """Specs that are made here may share. ValueError: the engine sleeps, and vLLM does not say when."""
    shares = share_of(vllm_config.kv_transfer_config.kv_connector_extra_config) is not None
    sleeps = shares and getattr(vllm_config.model_config, "enable_sleep_mode", False)
    if sleeps and not hasattr(connector, "unregister_kv_caches"):
        raise _refuse(
            "shared loads must end before the engine goes to sleep, and this vLLM does not tell the connector of it. "
            "Leave out enable_sleep_mode, or use vLLM 0.33 or later"
        )
    _lend.refuse_sleep(vllm_config, connector)
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)


def is_allowed() -> bool:
    """Whether the connector is kvswap's, which ends such transfers before the engine sleeps."""
    return _allowed.get()


def _refuse(why: str) -> ValueError:
    return ValueError(f"kvswap_share: {why}")


def by_blocks(config: Any, extra_config: Mapping[str, Any]) -> bool:
    """Whether the blocks of a chunk lie one behind the other in vLLM's region, and not layer by layer: members bring
    blocks of all layers. config: vLLM's OffloadingConfig."""
    cache = getattr(config, "cache", None)
    several = cache is not None and cache.blocks_per_chunk > 1 and config.parallel.world_size > 1
    return several and share_of(extra_config) is not None and codec_of(extra_config) is None


def in_blocks(config: Any, alignment: int) -> Any:
    """The config for by_blocks(). alignment: of a chunk."""
    nbytes, step = int(config.worker_kv_bytes_per_block), step_of(config, alignment)
    return dataclasses.replace(config, worker_kv_bytes_per_block=-(-nbytes // step) * step)


def seconds_of(spec: Any) -> float | None:
    """How long the ranks of this spec wait for each other's loads; None: they do not share. ValueError: they cannot
    share, and why."""
    wait = share_of(spec.extra_config)
    if wait is None:
        return None
    _together.check_share(spec.extra_config, is_allowed())
    config: Any = getattr(spec, "config", None)  # OffloadingConfig, from 0.30 on
    ranks = config.parallel.world_size if config is not None else 0
    if ranks == 1:
        return None
    if ranks > _MOST_RANKS:
        raise _refuse(f"the engine has {ranks} ranks, and a group at most {_MOST_RANKS}")
    if not getattr(spec, "replicated_layout", False):
        raise _refuse(
            "vLLM does not keep one copy of the cache for all ranks. It does for MLA, with tensor parallelism alone, "
            "ranks on one machine (distributed_executor_backend mp), and vLLM 0.30 or later"
        )
    foreign = foreign_tier(spec.extra_config) if by_blocks(config, spec.extra_config) else None
    if foreign is not None:
        raise _refuse(
            f"the blocks of a chunk lie one behind the other, and the secondary tier {foreign} takes them for vLLM's "
            f"layers. Use {' or '.join(TIERS)} of kvswap.vllm, or leave out block_size and blocks_per_chunk"
        )
    if len(config.groups) > 1:
        raise _refuse(f"the cache has {len(config.groups)} groups of layers, and members bring blocks of all layers")
    return wait


def describe(config: Any, region: Any, wait: float) -> Share:
    """A worker's place in its group. region: vLLM's, which is the same file for all ranks, and unlinked once they have
    it."""
    parallel, file = config.parallel, os.fstat(region.fd)
    engine = f"{config.engine_id}\0{parallel.data_parallel_index}"
    group = f"vllm-{hashlib.blake2b(engine.encode(), digest_size=12).hexdigest()}"
    here = parallel.rank, parallel.world_size
    return Share(group, *here, f"vllm {file.st_dev}", file.st_ino, wait, wait + _STALL)


def say_one_rank(spec: Any) -> None:
    """The option is set, and there is nothing to share."""
    if share_of(spec.extra_config) is not None and spec.share_wait is None:
        _logger.info("kvswap_share: the engine has one rank, so that its loads are as without it")


def meet(member: Any, ranks: int) -> None:
    """Wait for the other ranks, which register their caches at the same time, and say who is here."""
    others = [rank for rank in range(ranks) if rank != member.rank]
    with contextlib.suppress(TimeoutError):
        member.wait_peers(others, _SECONDS)
    missing = sorted(set(others) - set(member.peers))
    if missing:
        _logger.warning(
            "kvswap_share: of %d ranks, rank %d does not reach %s after %g s. It loads their parts over its own link "
            "until they come; kvswap.share says above what is wrong",
            *(ranks, member.rank, ", ".join(map(str, missing)), _SECONDS),
        )
    else:
        _logger.info("kvswap_share: rank %d of %d shares loads with all others", member.rank, ranks)
