"""vllm_package.py --replicas: engines of one name (kvswap_replicas) read and write one host pool.

Two whole engines are in this process, each with vLLM's scheduler, connector and worker; a third one is a process that
stores until it is killed. All blocks that come from the host are checked, as everywhere in vllm_package.py.
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import atexit
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOKENS = 16
BEGUN = "it stores"
LIMIT = 60.0
UNFIT = 999  # vllm_worker.UNFIT, which imports this


def store_for_ever(engine: Any, prompt: Callable[[int, int], list[int]]) -> None:
    """The third engine."""
    print(BEGUN, flush=True)
    for seed in range(1000, 1 << 20):
        engine.again(prompt(seed, 6))


def scenario(
    engine: Any,
    another: Callable[..., Any],
    options: argparse.Namespace,
    say: Callable[[str], None],
    prompt: Callable[[int, int], list[int]],
    folder: Path,
) -> None:
    """another: makes an engine with a number, and a folder."""
    chunk = options.blocks_per_chunk * TOKENS
    other = another(1)
    engines = engine, other
    index = engine.scheduler.connector.connector_scheduler.manager._index
    whole = 13 * TOKENS // chunk * chunk

    first = prompt(20, 13)
    engine.add(first)
    engine.run()
    assert other.again(first) == whole and engine.again(first) == whole
    second = prompt(21, 13)
    jobs = other.stats("jobs")
    other.again(second)
    assert engine.again(second) == whole
    loads = [one.scheduler.connector.connector_scheduler.manager.loads for one in engines]
    assert loads[1]["others"] == whole // chunk, loads
    say(f"what one engine stored is a hit of the other: {whole} tokens, all blocks checked; by who stored: {loads}")
    before = other.stats("jobs")
    other.again(first)
    assert before > jobs and other.stats("jobs") == before + options.ranks, "it stored again what the other has"

    both_at_once(engines, prompt, whole, say)
    other_meaning(another, folder, say)
    if options.codec:
        other_codec(another, options, say)
        unfit(engines, options, prompt, chunk, say)
    faults(engines, options, prompt, chunk, say)
    resets(engines, prompt, whole, say)
    killed(engines, options, index, say)
    evictions(engines, prompt, index, say)
    if options.lend:
        links = [stats for one in engines for stats in one.workers.call("shared")]
        brought = [stats["brought_by_others_h2d"] for stats in links]
        assert all(brought) and not any(stats["brought_by_others_d2h"] for stats in links), links
        say(f"loads came over the link of another engine, too: {[nbytes >> 10 for nbytes in brought]} KiB")
    other.workers.call("shutdown")
    other.scheduler.shutdown()
    assert engine.again(second) in (0, whole) and index.info()["members"] == 1


def in_vllms_metrics(engine: Any, options: argparse.Namespace, value: Callable[..., Any], say: Any) -> None:
    """What vLLM's frontend shows of links and of replicas. value: of a metric with labels."""
    if options.lend:
        stats, carried = engine.workers.call("shared"), {}
        for way in ("d2h", "h2d"):
            mine = sum(one[f"brought_by_others_{way}"] for one in stats)
            labels = {"engine": "0", "what": "borrowed", "direction": way}
            carried[way] = value("kvswap_shared_link_bytes_total", labels) or 0
            both = options.replicas  # engines of this process have one device
            assert carried[way] == mine or (both and carried[way] > mine), (way, carried, mine)
        assert carried["h2d"] > 0
        say(f"vLLM's metrics say how much came over other links: {carried}")
    if options.replicas:
        loads = engine.scheduler.connector.connector_scheduler.manager.loads
        shown = {who: value("kvswap_replica_loaded_chunks_total", {"engine": "0", "stored_by": who}) for who in loads}
        assert shown == loads and value("kvswap_replica_engines", {"engine": "0"}) == 1, (shown, loads)
        say(f"vLLM's metrics say who stored the loaded chunks: {shown}")


def both_at_once(engines: Any, prompt: Any, whole: int, say: Any) -> None:
    """Both compute the same prompt: one of them stores a block, or the other waits for it."""
    tokens = prompt(22, 13)
    for one in engines:
        one.forget_gpu()
        one.external = 0
        one.add(tokens)
    end = time.monotonic() + LIMIT
    while any(one.scheduler.requests or one.scheduler.connector.connector_scheduler._jobs for one in engines):
        assert time.monotonic() < end
        for one in engines:
            one.step()
    assert [one.again(tokens) for one in engines] == [whole, whole]
    say(f"both at once: {[one.external for one in engines]} tokens from the host, and no block is stored twice")


def other_meaning(another: Any, folder: Path, say: Any) -> None:
    """Another model of the same shape."""
    place = folder / "another-model"
    place.mkdir()
    try:
        another(2, place)
    except ValueError as error:
        assert "mean something else" in str(error) and '"model":"another-model"' in str(error), error
        say(f"another model is refused: {error}")
        return
    raise AssertionError("an engine of another model has joined")


def other_codec(another: Any, options: argparse.Namespace, say: Any) -> None:
    """Another codec, or none: an engine whose blocks would be read wrong."""
    codec, keep = options.codec, options.keep
    for options.codec, options.keep in ((None, []), (codec, [1])):
        try:
            another(2)
        except ValueError as error:
            say(f"another codec is refused: {error}")
            continue
        raise AssertionError("an engine with another codec has joined")
    options.codec, options.keep = codec, keep


def unfit(engines: Any, options: argparse.Namespace, prompt: Any, chunk: int, say: Any) -> None:
    """A block that does not fit on rank 1 is no hit of any engine."""
    if options.ranks == 1 or options.codec != "exact":
        return
    engine, other = engines
    tokens = prompt(26, 13)
    tokens[2 * chunk + TOKENS - 1] = UNFIT
    engine.again(tokens)
    assert other.again(tokens) == 2 * chunk and engine.again(tokens) == 2 * chunk
    counts = [one.stats("not_stored") for one in engines], [one.stats("failed") for one in engines]
    assert counts == ([2, 1], [0, 0]), counts
    say(f"of a prompt with a block that does not fit, {2 * chunk} tokens are hits of both engines")


def faults(engines: Any, options: argparse.Namespace, prompt: Any, chunk: int, say: Any) -> None:
    engine, other = engines
    rank = options.ranks - 1
    tokens = prompt(23, 8)
    whole = 8 * TOKENS // chunk * chunk
    engine.forget_gpu()
    engine.workers.call_one(rank, "fault", "fail")
    engine.add(tokens)
    engine.run()
    engine.workers.call_one(rank, "fault", None)
    hits = other.again(tokens)
    assert engine.stats("failed") > 0 and hits < whole, "a store that failed is a hit of the other engine"
    assert engine.again(tokens) == whole
    other.forget_gpu()
    other.recomputed = 0
    other.workers.call_one(rank, "fault", "fail")
    other.add(tokens)
    other.run()
    other.workers.call_one(rank, "fault", None)
    assert other.recomputed > 0 and other.again(tokens) == whole and engine.again(tokens) == whole
    say(f"a store that failed is no hit of the other ({hits} tokens), a load that failed is computed again")


def resets(engines: Any, prompt: Any, whole: int, say: Any) -> None:
    """An engine that was reset, as for new weights, finds no block of before, and none of an engine that was not."""
    engine, other = engines
    tokens = prompt(24, 13)
    engine.add(tokens)
    engine.step()
    engine.workers.call("hold", 0.5)
    engine.step()  # its stores are under way
    unfinished = len(engine.scheduler.connector.connector_scheduler._jobs)
    assert unfinished > 0
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.run()
    manager = engine.scheduler.connector.connector_scheduler.manager
    assert not manager._jobs and manager._left == ([], []), (manager._jobs, manager._left)
    late = prompt(25, 13)
    other.again(late)
    found = engine.again(late)
    assert found == 0, "a block of an engine with other weights was found"
    assert other.again(late) == whole
    assert other.scheduler.reset_prefix_cache(reset_connector=True)
    assert other.again(late) == whole  # the engine that was reset before has stored it meanwhile
    say(f"a reset beside {unfinished} jobs: blocks of before are found by the other engine only, until it is reset too")


def killed(engines: Any, options: argparse.Namespace, index: Any, say: Any) -> None:
    for turn in range(2):
        argv = [sys.executable, *sys.argv, "--replica", str(turn)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                if BEGUN in line:
                    break
            assert index.info()["members"] == 3
            time.sleep(random.Random(turn).uniform(0.2, 0.6))
            process.send_signal(signal.SIGKILL)
        end = time.monotonic() + LIMIT
        while index.info()["members"] > 2:
            assert time.monotonic() < end, "a killed engine is still there"
            time.sleep(0.01)
        index._check()
        info = index.info()
        assert info["writing"] == 0 and info["pinned"] == 0, info
    say(f"an engine was killed while it stored: nothing stays taken, {info['ready']} blocks can be found")


def evictions(engines: Any, prompt: Any, index: Any, say: Any) -> None:
    """More prompts than there is room for: each engine makes room where the other neither reads nor writes."""
    chance, slots = random.Random(1), index.info()["num_slots"]
    hits = asked = 0
    for turn in range(60):
        one, tokens = engines[turn % 2], prompt(100 + chance.randrange(12), 13)
        one.again(tokens)
        hits, asked = hits + one.external, asked + 13 * TOKENS
    info = index.info()
    assert info["free"] == 0 and info["writing"] == info["pinned"] == 0, info
    index._check()
    assert 0 < hits < asked
    say(f"{slots} chunks for 12 prompts of two engines: {hits} of {asked} tokens from the host, all checked")


def model_of(options: argparse.Namespace) -> Path:
    """The folder of the model, which belongs to what blocks mean."""
    del options
    place = Path(tempfile.gettempdir(), name_of())
    if not place.is_dir():
        place.mkdir()
        atexit.register(shutil.rmtree, place, True)
    return place


def name_of() -> str:
    """Of the pool: the same in the engine that is another process."""
    return os.environ.setdefault("KVSWAP_TEST_REPLICAS", f"test-{os.getpid()}")
