"""kvswap_replicas: data-parallel replicas of vLLM on one machine read one host pool with one index (docs/share.md).

Each replica's workers map the same shared pool in the place of vLLM's own region, and its scheduler has a manager whose
index is in that pool (_replica_manager.py). What one replica has stored is a hit for all others.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvswap import _C
from kvswap._log import logger
from kvswap._replicas import segment_of
from kvswap.identity import Said
from kvswap.offload._layout import device_of, is_torch
from kvswap.offload._member import Share
from kvswap.vllm import _share, _together
from kvswap.vllm._handler import lend_of, replicas_of
from kvswap.vllm._identity import identity_of
from kvswap.vllm._memory import SlabRegion, give_block_views

_logger = logger("kvswap.vllm")

_NAME = re.compile(r"[A-Za-z0-9._-]{1,30}")
_MEMBER_NBYTES = 100
_CURES = {
    "hash": "set PYTHONHASHSEED to the same number for all replicas, or leave out prefix_caching_hash_algo",
    "kv_format": "set --kv-cache-dtype",
    "ranks": "set the engine's parallel sizes",
}


def _refuse(why: str) -> ValueError:
    return ValueError(f"kvswap_replicas: {why}")


class Replicas(NamedTuple):
    """The pool of these replicas, and this one's name in it."""

    name: str  # as in the configuration
    segment: str  # of the shared pool
    member: str
    chunks: int
    row: int  # bytes of a chunk of all ranks
    cell: int  # bytes of a chunk of one rank
    ranks: int  # that have cells
    rank: int  # whose cell
    group: str | None  # kvswap_lend: of the members that lend each other their links: one rank of each replica

    def join(self, identity: str | None) -> _C._ReplicaIndex:
        """Join. identity: of a scheduler; None: a worker. ValueError, kvswap.Error: it cannot, and why."""
        try:
            return _C._ReplicaIndex(self.segment, self.chunks, self.row, self.member, identity)
        except ValueError as error:
            raise _refuse(f"{self.name!r}: {error}. Replicas of one name run the same model in the same way") from None
        except _C.Error as error:
            raise _C.Error(f"kvswap_replicas: {self.name!r}: {error}") from None


def of(spec: Any) -> Replicas | None:
    """Of a spec that vLLM has made; None: without the option. ValueError: it cannot be, and why."""
    name = replicas_of(spec.extra_config)
    if name is None:
        return None
    if not _NAME.fullmatch(name):
        raise _refuse(f"{name!r} is no name: 1 to 30 letters, digits, '.', '_' or '-'")
    config: Any = getattr(spec, "config", None)  # OffloadingConfig, from 0.30 on
    if config is None or not hasattr(spec, "num_chunks"):
        raise _refuse("it needs vLLM 0.30 or later")
    tiering = any(kind.__name__ == "TieringOffloadingSpec" for kind in type(spec).__mro__)
    _together.check_replicas(spec.extra_config, _share.is_allowed(), tiering)
    if config.enable_kv_cache_events:
        raise _refuse(
            "events name the blocks that one engine has, and here other engines store and evict them. Leave out "
            "enable_kv_cache_events"
        )
    engine = f"{config.engine_id}/{config.parallel.data_parallel_index}"
    if len(engine.encode()) > _MEMBER_NBYTES:
        engine = hashlib.blake2b(engine.encode(), digest_size=16).hexdigest()
    cell = spec.cpu_page_size_per_worker
    ranks, rank = (1, 0) if spec.replicated_layout else (config.parallel.world_size, config.parallel.rank)
    group = _group_of(name, config.parallel) if lend_of(spec.extra_config) is not None else None
    row = spec.kv_bytes_per_chunk
    return Replicas(name, segment_of(name), engine, spec.num_chunks, row, cell, ranks, rank, group)


def _group_of(name: str, parallel: Any) -> str:
    """Ranks of one engine load at the same times, and are in groups of their own: a rank of each engine. No name of
    replicas gives two of them the same group."""
    return f"replicas-{name}" if parallel.world_size == 1 else f"replica{parallel.rank}-{name}"


# -- worker -----------------------------------------------------------------------------------------------------------


class ReplicaRegion(SlabRegion):
    """The common pool with the methods of vLLM's SharedOffloadRegion that the worker uses."""

    def __init__(self, replicas: Replicas, device: _C.Device, torch: bool) -> None:
        try:
            self.pool = _C.SharedPool(
                replicas.segment,
                replicas.chunks,
                replicas.row,
                create=None,
                index_nbytes=_C._replica_index_nbytes(replicas.chunks),
                device=device,
                pages="transparent",
                numa="interleave",  # GPUs of all nodes read it
            )
        except ValueError as error:
            raise _refuse(
                f"{replicas.name!r}: {error}. Replicas of one name have the same model, parallel sizes, kvswap_codec "
                "and cpu_bytes_to_use"
            ) from None
        self.is_pinned = self.pool.pinned
        self._index: _C._ReplicaIndex | None = replicas.join(None)
        self.number = self._index.info()["member"]
        self._rows = _rows_of(self.pool, replicas, torch)
        self._worker_offset, self._worker_area_end = replicas.rank * replicas.cell, (replicas.rank + 1) * replicas.cell
        self.rows = list

    def create_next_view(self, nbytes: int) -> Any:
        """The next tensor's chunks, in this rank's cell of each row."""
        begin, end = self._worker_offset, self._worker_offset + nbytes
        left = self._worker_area_end - begin
        if nbytes > left:
            raise ValueError(f"a chunk of this rank has {left} bytes left, and a tensor {nbytes}")
        self._worker_offset = end
        return self._rows[:, begin:end]

    create_next_worker_view = create_next_view

    def cleanup(self) -> None:
        """Called after the handlers have ended. The memory is left with the last tensor."""
        index, self._index = self._index, None
        if index is not None:
            index.close()
        self._rows = None

    def share(self, replicas: Replicas, group: str) -> Share:
        """This worker among those that lend their links. ranks 0: their loads are their own."""
        return Share(group, self.number, 0, self.pool.path, self.pool.generation, cells=replicas.ranks > 1)


def _rows_of(pool: _C.SharedPool, replicas: Replicas, torch: bool) -> Any:
    if torch:
        import torch as library

        flat: Any = library.frombuffer(pool, dtype=library.int8)
    else:
        import numpy as np

        flat = np.frombuffer(pool, np.int8)  # type: ignore[call-overload]
    return flat.reshape(replicas.chunks, replicas.row)


def region_for(
    replicas: Replicas, options: dict[str, Any], pages: Sequence[int] | None, arguments: Mapping[str, Any]
) -> ReplicaRegion:
    """For a worker that is made with these arguments. options: of its handlers, which are added to. pages: bytes of a
    coded block of each tensor; None: blocks are not coded."""
    first = arguments["kv_caches"].tensors[0].tensor
    region = ReplicaRegion(replicas, _C.Device(device_of(first)), is_torch(first))
    _logger.info(
        "kvswap_replicas: the host memory is that of all replicas of %r: %d chunks of %d bytes, %.2f GB",
        *(replicas.name, replicas.chunks, replicas.row, replicas.chunks * replicas.row / 1e9),
    )
    if pages is not None:
        give_block_views(region, pages, arguments["blocks_per_chunk"])
    if replicas.group is not None:
        options.update(share=region.share(replicas, replicas.group))
    return region


# -- scheduler --------------------------------------------------------------------------------------------------------


def _identity_text(spec: Any) -> str:
    """What the blocks mean. ValueError: it is not known, so that others might mean something else.

    The name vouches for weights of a model without a known version: all replicas run now."""
    identity = identity_of(spec, Said(unversioned=True))
    if not identity.storable:
        raise _refuse("the scales of the KV are computed at run time, differently in each replica. Set "
                      "calculate_kv_scales to false")  # fmt: skip
    for field in identity.unknown:
        raise _refuse(f"the {field.replace('_', ' ')} of blocks is not known: {_CURES[field]}")
    if "revision" not in identity.fields:
        _logger.warning(
            "kvswap_replicas: the version of the weights of %s is not known: all replicas of one name must have the "
            "same weights",
            identity.fields.get("model"),
        )
    return identity.text


def manager_for(replicas: Replicas, spec: Any) -> Any:
    """A scheduler's. ValueError, kvswap.Error: it cannot join the others, and why."""
    from kvswap.vllm._replica_manager import ReplicaManager  # which needs a release that has such managers

    index = replicas.join(_identity_text(spec))
    others = index.info()["members"] - 1
    _logger.info("kvswap_replicas: one index of %r, with %d other replicas now", replicas.name, others)
    return ReplicaManager(index, replicas.chunks, getattr(spec, "cpu_info", None))
