"""vllm_package.py --hybrid: what vLLM stores wrong of a sliding window, and KVSwapConnector does not store.

Each case in few steps, with real blocks: a load finds other bytes. So it is without kvswap.vllm._windows, and with
--stock, which is vLLM's own connector.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any
from unittest import mock

from vllm_worker import TOKENS

from kvswap.vllm import _windows


def after_a_reset(engine: Any, prompt: Any) -> None:
    """The connector's cache is reset while a request runs whose window has passed its first blocks, which others have
    by then."""
    tokens = prompt(1, 9)
    engine.add(tokens, 60)
    for seed in range(10, 20):
        engine.add(prompt(seed, 5), 2)
        for _ in range(3):
            engine.step()
    assert engine.scheduler.connector.reset_cache() is not False
    engine.run()
    engine.again(tokens)


def behind_a_gap(engine: Any, prompt: Any) -> None:
    """A request finds the last block of another's chunk in the prefix cache, in the step that completes the chunk."""
    tokens = prompt(2, 14)
    engine.add(prompt(3, 2))  # with it a step ends behind the first block of a chunk
    engine.add(tokens)
    engine.step()
    blocks = engine.scheduler.requests["request-2"].num_computed_tokens // TOKENS
    assert blocks % 2 == 1, blocks
    engine.add(tokens[: blocks * TOKENS] + prompt(4, 2))
    engine.run()
    engine.again(tokens)


_PLAYS = (after_a_reset, behind_a_gap)


def scenario(make: Any, options: Any, say: Any, prompt: Any) -> None:
    """make: an engine."""
    for play in _PLAYS:
        if not options.stock:
            found = wrong(make, play, prompt)
            assert found is None, found
            say(f"a window {play.__name__.replace('_', ' ')}: all blocks checked")
        if play is behind_a_gap and not _windows._stores_gaps(_scheduler_of(make)):
            continue  # vLLM has mended it
        with mock.patch.object(_windows, "install", lambda *_: None):
            found = wrong(make, play, prompt)
        assert found is not None, f"{play.__name__}: vLLM's own code stored nothing wrong"
        say(f"  with all of vLLM's code: {found}")


def wrong(make: Any, play: Any, prompt: Any) -> str | None:
    """The block that is found to hold other bytes."""
    engine = make()
    try:
        play(engine, prompt)
    except AssertionError as error:
        assert "holds other bytes" in str(error), error
        return str(error)
    finally:
        close(engine)
    return None


def _scheduler_of(make: Any) -> Any:
    engine = make()
    close(engine)
    return engine.scheduler.connector.connector_scheduler


def close(engine: Any) -> None:
    engine.workers.call("shutdown")
    engine.workers.close()
    engine.scheduler.shutdown()
