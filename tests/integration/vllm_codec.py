"""A part of vllm_package.py: blocks that a codec cannot store, in vLLM's own scheduler."""

# mypy: ignore-errors

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm_worker import PAGE, TOKENS, UNFIT, sizes_of, unfit_rank

_CHUNKS = 256  # of a job


def sizes(engine: Any, options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """The scheduler and all workers compute the same sizes, of coded blocks."""
    ours = sizes_of(engine.spec)
    theirs = engine.workers.call("sizes")
    assert theirs == [ours] * options.ranks, (ours, theirs)
    ratio = ours["cpu_page_size_per_worker"] / (PAGE * options.layers * options.blocks_per_chunk)
    kept = len(options.keep) / options.layers
    assert 0.2 + kept / 2 < ratio < 0.88 + kept / 4, ours  # blocks have few KiB here, and are rounded up
    say(f"scheduler and workers have {ours}: {ratio:.3f} of the bytes on the GPU")


def scenario(engine: Any, options: argparse.Namespace, say: Callable[[str], None], prompt: Any) -> None:
    sizes(engine, options, say)
    chunk = options.blocks_per_chunk * TOKENS
    manager = engine.scheduler.connector.connector_scheduler.manager
    tokens = prompt(7, _CHUNKS * options.blocks_per_chunk)
    bad = 200
    tokens[bad * chunk + TOKENS - 1] = UNFIT[1]  # the first block of a chunk
    taken: list[list[Any]] = []
    prepare = manager.prepare_store

    def prepare_store(keys: Any, *args: Any, **kwargs: Any) -> Any:
        output = prepare(keys, *args, **kwargs)
        taken.append(list(output.keys_to_store))
        return output

    manager.prepare_store = prepare_store
    engine.forget_gpu()
    name = engine.add(tokens)
    engine.run()
    manager.prepare_store = prepare
    (keys,) = [keys for keys in taken if keys]
    assert len(keys) == _CHUNKS or options.hybrid, len(keys)
    found = [manager.lookup(key, ReqContext(name)) for key in keys]
    unfit = options.ranks > unfit_rank(options) and options.codec == "exact" and 2 not in options.keep  # UNFIT's layer
    wanted = [LookupResult.MISS if unfit and i == bad else LookupResult.HIT for i in range(len(keys))]
    assert found == wanted, [i for i, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1]]
    not_stored = engine.stats("not_stored")
    assert not_stored == unfit, not_stored
    hits = found.count(LookupResult.HIT)
    misses = found.count(LookupResult.MISS)
    say(f"a job of {len(keys)} chunks, {not_stored} block that does not fit: {hits} hits, {misses} misses")
    external = engine.again(tokens)
    assert external == (bad if unfit else _CHUNKS) * chunk, external
    assert engine.stats("failed") == 0 and engine.stats("not_stored") == 2 * unfit
    say(f"then {external} of {len(tokens)} tokens come from the host, and no job has failed")
