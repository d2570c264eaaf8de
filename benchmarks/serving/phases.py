"""What an engine is made to do, and what is measured meanwhile. Each phase returns a record for JSON."""

from __future__ import annotations

import random
import time
from itertools import pairwise
from typing import Any

from serving import spans
from serving.engine import LIMIT, Engine, Request, prompt
from serving.models import BLOCK
from serving.sums import Sums, compare, sums_of
from serving.watch import Watch

# Kinds of prompts: none shares a block with another. 0 is Engine's own.
WARM, TRUTH, STORED, DECODERS, RESIDENT = range(1, 6)
ANSWER = 16  # tokens


def _ms(values: list[float]) -> list[float]:
    return [round(1e3 * value, 4) for value in values]


class Phases:
    """Of one engine, in the order in which they are asked for."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.regime = engine, engine.regime
        self.watch, self.spans = Watch(engine), spans.Spans(engine)
        self._decoders = 0  # prompts of decoders so far
        self._resident: set[Any] = set()  # keys of host blocks of what the GPU keeps

    def _prompts(self, kind: int, count: int, first: int = 0) -> list[list[int]]:
        return [prompt(kind, first + i, self.regime.length) for i in range(count)]

    # -- before measuring ---------------------------------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Kernels, and the first store and load."""
        for _ in range(2):
            self.engine.one(prompt(WARM, 0, self.regime.length), 8)
            self.engine.overwrite()
        scattered = self._scatter() if self.regime.fragmented else 0
        self.watch.take()
        return {"scattered": scattered}

    def _scatter(self) -> int:
        """Host blocks are handed out in random order from now on. The number of them; 0: the connector is another."""
        manager = self.engine.manager
        if manager is None:
            return 0
        self.engine.settle()
        self.engine.connector.reset_cache()
        manager._free_list[:] = range(manager._num_blocks)
        random.Random(0).shuffle(manager._free_list)
        manager._num_allocated_blocks = manager._num_blocks
        return int(manager._num_blocks)

    def scatter(self) -> dict[str, Any]:
        """An empty host cache, whose blocks are handed out in random order, as in a server that has run for long."""
        self.engine.forget()
        self._resident = set()
        return {"scattered": self._scatter()}

    def truth(self) -> dict[str, Any]:
        """Blocks as computed, and as they came back from the host, twice."""
        found: list[Sums] = []
        tokens: list[list[list[int]]] = []
        cached = []
        for _ in range(3):
            made, done = self._summed(self._prompts(TRUTH, self.regime.truth))
            found.append(made)
            tokens.append([request.tokens for request in done])
            cached.append(sum(request.cached for request in done))
            self.engine.overwrite()
        compared = [compare(found[0], after) for after in found[1:]]
        return {
            "blocks": [count for count, _ in compared], "differ": [wrong for _, wrong in compared],
            "distinct": len(set(found[0].values())), "tokens_cached": cached,
            "same_answers": [sum(a == b for a, b in zip(tokens[0], each, strict=True)) for each in tokens[1:]],
            **self.watch.take(),
        }  # fmt: skip

    def _summed(self, prompts: list[list[int]]) -> tuple[Sums, list[Request]]:
        made: Sums = {}
        done = []
        for number, tokens in enumerate(prompts):

            def keep(request: Request, number: int = number) -> None:
                made.update(sums_of(self.engine, str(number), request, len(request.prompt) - 1))

            done.append(self.engine.one(tokens, ANSWER, keep))
        return made, done

    def skipped(self) -> dict[str, Any]:
        """A copy that kvswap leaves out has to show in what truth() compares."""
        prompts = self._prompts(TRUTH, 1)
        before, _ = self._summed(prompts)
        self.engine.overwrite()
        self.engine.each("serving_skip_one_copy")
        try:
            after, _ = self._summed(prompts)
        finally:
            self.engine.each("serving_skip_none")
        self.engine.overwrite()
        self.watch.take()
        blocks, differ = compare(before, after)
        return {"blocks": blocks, "differ": differ}

    def store(self) -> dict[str, Any]:
        """The prompts that the later phases load, computed and stored one at a time."""
        self.engine.forget()
        done = []
        for tokens in self._prompts(STORED, self.regime.prompts):
            done.append(self.engine.one(tokens, 1))
            if self.engine.name.endswith("files"):  # 0.26's tiering ends with a KeyError where the host has no room
                self.engine.settle()
        self.engine.settle()
        return {"ttft_ms": _ms([request.ttft for request in done]), **self.watch.take()}

    # -- measured again and again -------------------------------------------------------------------------------------

    def hits(self, repeat: int = 0) -> dict[str, Any]:
        """Prompts one at a time: when the host has them, and at once again, when the GPU has them (the floor)."""
        self.engine.forget()
        self.watch.take()
        first, again = [], []
        for i in range(self.regime.hits):
            tokens = prompt(STORED, (repeat * self.regime.hits + i) % self.regime.prompts, self.regime.length)
            first.append(self.engine.one(tokens, 1))
            again.append(self.engine.one(tokens, 1))
        return {
            "ttft_ms": _ms([request.ttft for request in first]), "floor_ms": _ms([request.ttft for request in again]),
            "cached": [request.cached for request in first], "floor_cached": [request.cached for request in again],
            **self.watch.take(),
        }  # fmt: skip

    def burst(self, repeat: int = 0) -> dict[str, Any]:
        """All prompts at once."""
        del repeat
        self.engine.forget()
        self.watch.take()
        prompts = self._prompts(STORED, self.regime.prompts)
        begin = time.perf_counter()
        done = self.engine.run(prompts, ANSWER)
        seconds = time.perf_counter() - begin
        return {
            "seconds": round(seconds, 4), "tokens_per_s": round(sum(map(len, prompts)) / seconds),
            "ttft_ms": _ms([request.ttft for request in done]), "cached": sum(request.cached for request in done),
            **self.watch.take(),
        }  # fmt: skip

    def alone(self, repeat: int = 0) -> dict[str, Any]:
        """Decoding, with the stores that it makes itself."""
        del repeat
        self.engine.forget()
        return self._decode(None)

    def loads(self, repeat: int = 0) -> dict[str, Any]:
        """Decoding beside requests that the host has, so many in flight at all times."""
        self.engine.forget()
        prompts, first = self._prompts(STORED, self.regime.prompts), repeat * self.regime.hits
        return self._decode(prompts[first % len(prompts) :] + prompts[: first % len(prompts)])

    def stores(self, repeat: int = 0) -> dict[str, Any] | None:
        """Decoding beside requests that the GPU has and the host does not: each stores its blocks, and computes one.

        None: what the connector has stored cannot be looked at."""
        del repeat
        manager = self.engine.manager
        if manager is None and self.engine.connector is not None:
            return None
        self.engine.forget()
        before = set(manager._policy.blocks) if manager else set()
        prompts = self._prompts(RESIDENT, self.regime.resident)
        for tokens in prompts:
            self.engine.one(tokens, 1)
        self.engine.settle()
        if manager and not self._resident:
            self._resident = set(manager._policy.blocks) - before
        return self._decode(prompts, evict=manager)

    def _evict(self, manager: Any) -> None:
        """The resident prompts' host blocks, by the manager's own bookkeeping."""
        policy = manager._policy
        for key in self._resident:
            block = policy.get(key)
            if block is not None and block.ref_cnt == 0:
                policy.remove(key)
                manager._free_block(block)
                manager._num_evictable_cache_blocks -= 1

    def _decode(self, stream: list[list[int]] | None, evict: Any = None) -> dict[str, Any]:
        engine, regime = self.engine, self.regime
        self.watch.take()
        decoders = []
        for _ in range(regime.decoders):
            self._decoders += 1
            decoders.append(engine.add(prompt(DECODERS, self._decoders, 8 * BLOCK), regime.decode_tokens))
        running = {request.name: request for request in decoders}
        limit = time.monotonic() + LIMIT
        while not all(request.times for request in decoders):
            engine.step(running)
            if time.monotonic() > limit:
                raise TimeoutError("decoding has not begun")
        if evict is not None:
            self._evict(evict)
        begin, number = time.perf_counter(), 0
        streamed: dict[str, Request] = {}
        done: list[Request] = []
        while any(request.name in running for request in decoders):
            while stream and len(streamed) < regime.in_flight:
                if evict is not None and number and number % len(stream) == 0:
                    self._evict(evict)
                request = engine.add(stream[number % len(stream)], 1)
                number += 1
                running[request.name] = streamed[request.name] = request
            done += [request for request in engine.step(running) if streamed.pop(request.name, None) is not None]
            if time.monotonic() > limit:
                raise TimeoutError("decoding has not ended")
        seconds = time.perf_counter() - begin
        while running:
            done += [request for request in engine.step(running) if request.name in streamed]
        gaps = [b - a for request in decoders for a, b in pairwise(request.times) if a >= begin]
        engine.settle()
        return {
            "itl_ms": _itl(gaps), "seconds": round(seconds, 4), "streamed": len(done),
            "stream_ttft_ms": _ms([request.ttft for request in done]),
            "cached": sum(request.cached for request in done), **self.watch.take(),
        }  # fmt: skip

    # -- where the time goes ------------------------------------------------------------------------------------------

    def idle(self, repeat: int = 0) -> dict[str, Any] | None:
        """Steps of one request's decoding: what the connector's calls take, when there is nothing to move. None: they
        are in other processes."""
        del repeat
        if self.regime.ranks > 1:
            return None
        self.engine.forget()
        with self.spans.recording() as found:
            self._decoders += 1
            self.engine.one(prompt(DECODERS, self._decoders, 4 * BLOCK), 8 * BLOCK)
        each = sorted(spans.steps(found))
        return {
            "steps": len(each), "connector_us": [round(1e6 * value, 2) for value in each],
            "call_us": {name: round(1e6 * value, 2) for name, value in spans.middles(found).items()},
        }  # fmt: skip

    def profile(self, repeat: int = 0) -> dict[str, Any]:
        """Three prompts that the host has, and again when the GPU has them: milliseconds by call."""
        self.engine.forget()
        made: dict[str, Any] = {"hit": [], "floor": []}
        for i in range(3):
            tokens = prompt(STORED, (repeat + 7 * i) % self.regime.prompts, self.regime.length)
            for kind in made:
                self.watch.take()
                with self.spans.recording() as found:
                    request = self.engine.one(tokens, 1)
                made[kind].append(self._account(request, found))
        return made

    def _account(self, request: Request, found: list[tuple[str, float, float]]) -> dict[str, Any]:
        """Milliseconds before the load was submitted, while it ran, and after it was seen to have ended."""
        end, load = request.times[0], self.watch.load
        record: dict[str, Any] = {"ttft_ms": round(1e3 * request.ttft, 3)}
        if not load.begun or not load.seen:
            return {**record, "to_token": spans.total(found, request.begin, end)}
        submitted, seen = load.begun[0] + load.submitting[0], load.seen[-1]
        return {
            **record,
            "to_submission_ms": round(1e3 * (submitted - request.begin), 3),
            "loading_ms": round(1e3 * (seen - submitted), 3),
            "device_ms": round(1e3 * load.seconds, 3),
            "to_token_ms": round(1e3 * (end - seen), 3),
            "to_submission": spans.total(found, request.begin, submitted),
            "polls": sum(name == "connector.get_finished" and submitted <= at < seen for name, at, _ in found),
            "to_token": spans.total(found, seen, end),
        }


def _itl(gaps: list[float]) -> dict[str, float]:
    """Of the gaps between tokens, in milliseconds."""
    ordered = sorted(1e3 * gap for gap in gaps)
    if not ordered:
        return {}
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    made = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in at.items()}
    made.update(mean=sum(ordered) / len(ordered), max=ordered[-1])
    return {name: round(value, 4) for name, value in made.items()} | {"n": len(ordered)}
