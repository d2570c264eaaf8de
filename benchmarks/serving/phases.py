"""What an engine is made to do, and what is measured meanwhile. Each phase returns a record for JSON."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from serving import spans
from serving.configurations import lends, lossy
from serving.engine import LIMIT, Engine, Request, prompt
from serving.models import BLOCK
from serving.sums import Sums, compare, sums_of
from serving.watch import Watch

# Kinds of prompts: none shares a block with another. 0 is Engine's own.
WARM, TRUTH, STORED, DECODERS, RESIDENT, FOREIGN = range(1, 7)
ANSWER = 16  # tokens
STORING = (
    2  # of a request whose blocks are to be stored: vLLM's simple connector stores with the step after, if one comes
)
ENOUGH = 0.95  # of what a phase is about: with less it has measured something else


def ms(values: list[float]) -> list[float]:
    return [round(1e3 * value, 4) for value in values]


def short(what: str, found: int, of: int) -> list[str]:
    """What there was too little of. A record that has a line of it under "short" is no measurement."""
    return [] if found >= ENOUGH * of else [f"{what} {found:,} of {of:,}"]


class Phases:
    """Of one engine, in the order in which they are asked for."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.regime = engine, engine.regime
        self.watch, self.spans = Watch(engine), spans.Spans(engine)
        self._decoders = 0  # prompts of decoders so far
        self._offered = 0  # prompts that were computed for a neighbour
        self._loaded = 0  # of the prompts that store() computed, by the phases until now
        self._resident: dict[int, set[Any]] = {}  # keys of the host's blocks of what the GPU keeps, by prompt

    def _prompts(self, kind: int, count: int, first: int = 0) -> list[list[int]]:
        return [prompt(kind, first + i, self.regime.length) for i in range(count)]

    def _stored(self, count: int) -> list[list[int]]:
        """The next prompts that store() computed, from the first again after the last. A host cache that holds a part
        of them does not have these."""
        first, self._loaded = self._loaded, self._loaded + count
        return [prompt(STORED, (first + i) % self.regime.prompts, self.regime.length) for i in range(count)]

    @property
    def _whole(self) -> int:
        """Tokens of a prompt that the host can have."""
        chunk = BLOCK * self.regime.chunk
        return (self.regime.length - 1) // chunk * chunk

    def _short_of_hits(self, found: int, prompts: int) -> list[str]:
        """Of prompts that were to come from the host."""
        return short("tokens that the host had:", found, prompts * self._whole) if self.engine.connector else []

    # -- before measuring ---------------------------------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Kernels, and the first store and load."""
        for _ in range(2):
            self.engine.one(prompt(WARM, 0, self.regime.length), 8)
            self.engine.overwrite()
        scattered = self._scatter() if self.regime.fragmented else 0
        self.watch.take()
        return {"scattered": scattered}

    def meet(self) -> dict[str, Any]:
        """Until this engine and its neighbour lend each other their links. An engine takes part while it is idle."""
        begin = time.monotonic()
        while lends(self.engine.name):
            links = self.links()
            if links["lenders"] and links["borrowers"]:
                return {"waited_s": round(time.monotonic() - begin, 2), **links}
            if time.monotonic() - begin > LIMIT:
                raise TimeoutError(f"the engines do not lend each other their links after {LIMIT} s: {links}")
            time.sleep(0.1)
        return {}

    def links(self) -> dict[str, Any]:
        """What crossed the links of both engines so far; nothing where they do not lend them."""
        return self.engine.each("serving_links")[0] if lends(self.engine.name) else {}

    def _scatter(self) -> int:
        """Host blocks are handed out in random order from now on. The number of them; 0: the connector is another."""
        host = self.engine.host
        if host is None:
            return 0
        self.engine.settle()
        return host.scatter()

    def scatter(self) -> dict[str, Any]:
        """An empty host cache, whose blocks are handed out in random order, as in a server that has run for long."""
        self.engine.forget()
        self._resident = {}
        scattered = self._scatter()
        missing = ["the host's blocks cannot be scattered"] if self.engine.connector and not scattered else []
        return {"scattered": scattered, "short": missing}

    def truth(self) -> dict[str, Any]:
        """Blocks as computed, and as they came back from the host, twice. Under a lossy codec the two loads are
        compared, and "changed" counts the blocks that differ from those computed."""
        found: list[Sums] = []
        tokens: list[list[list[int]]] = []
        cached = []
        for _ in range(3):
            made, done = self._summed(self._prompts(TRUTH, self.regime.truth))
            found.append(made)
            tokens.append([request.tokens for request in done])
            cached.append(sum(request.cached for request in done))
            self.engine.overwrite()
        known, *later = found[1:] if lossy(self.engine.name) else found
        compared = [compare(known, after) for after in later]
        return {
            "changed": compare(found[0], found[1])[1],
            "blocks": [count for count, _ in compared], "differ": [wrong for _, wrong in compared],
            "distinct": len(set(known.values())), "tokens_cached": cached,
            "short": self._short_of_hits(sum(cached[1:]), 2 * self.regime.truth),
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

    def offer(self) -> dict[str, Any]:
        """Compute and store prompts that the neighbour is to load: their number, and the sums of their blocks."""
        self.engine.forget()
        first, self._offered = self._offered, self._offered + self.regime.truth
        made, _ = self._summed(self._prompts(FOREIGN, self.regime.truth, first))
        self.engine.settle()
        return {"first": first, "sums": [[*place, list(sums)] for place, sums in made.items()]}

    def foreign(self, first: int, sums: list[Any]) -> dict[str, Any]:
        """Prompts that only the neighbour has computed: offer()'s."""
        self.engine.forget()
        self.watch.take()
        prompts = self._prompts(FOREIGN, self.regime.truth, first)
        done = [self.engine.one(tokens, 1) for tokens in prompts]
        measured, cached = self.watch.take(), [request.cached for request in done]
        self.engine.overwrite()
        found, again = self._summed(prompts)
        blocks, differ = compare({(name, group, at): tuple(of) for name, group, at, of in sums}, found)
        whole = 2 * len(prompts)
        return {
            "ttft_ms": ms([request.ttft for request in done]), "cached": cached, "blocks": blocks, "differ": differ,
            "short": self._short_of_hits(sum(cached) + sum(request.cached for request in again), whole), **measured,
        }  # fmt: skip

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
            done.append(self.engine.one(tokens, STORING))
            if self.engine.name.endswith("files"):  # 0.26's tiering ends with a KeyError where the host has no room
                self.engine.settle()
        self.engine.settle()
        return {"ttft_ms": ms([request.ttft for request in done]), **self.watch.take()}

    # -- measured again and again -------------------------------------------------------------------------------------

    def hits(self) -> dict[str, Any]:
        """Prompts one at a time: when the host has them, and at once again, when the GPU has them (the floor)."""
        self.engine.forget()
        self.watch.take()
        before = self._own_steps()
        first, again = [], []
        for tokens in self._stored(self.regime.hits):
            first.append(self.engine.one(tokens, 1))
            loads = len(self.watch.load.begun)
            again.append(self.engine.one(tokens, 1))
            if len(self.watch.load.begun) > loads:  # the GPU did not have it
                again[-1].cached = 0
        cached, floor_cached = ([request.cached for request in each] for each in (first, again))
        own = {how: count - before[how] for how, count in self._own_steps().items()}
        return {
            "ttft_ms": ms([request.ttft for request in first]), "floor_ms": ms([request.ttft for request in again]),
            "cached": cached, "floor_cached": floor_cached,
            "short": self._short_of_hits(sum(cached), len(cached)) + self._short_on_gpu(sum(floor_cached), len(again))
            + (short("loads in their request's step:", sum(own.values()), len(cached)) if own else []),
            "own_steps": own, **self.watch.take(),
        }  # fmt: skip

    @property
    def _own_loads(self) -> Any:
        """The worker's side of kvswap_overlap; None: it is off."""
        return getattr(self.engine.connector_worker, "_own_loads", None)

    def _own_steps(self) -> dict[str, int]:
        """Under kvswap_overlap: steps that loaded blocks of their own requests, by what they waited for."""
        return dict(self._own_loads.counts) if self._own_loads else {}

    def _reported_ahead(self) -> int:
        """Under kvswap_overlap: loads that were reported ahead, and that a step then waited for."""
        return int(self._own_loads.reported) if self._own_loads else 0

    def _short_on_gpu(self, found: int, prompts: int) -> list[str]:
        return short("tokens that the GPU had:", found, prompts * ((self.regime.length - 1) // BLOCK * BLOCK))

    def burst(self) -> dict[str, Any]:
        """All prompts at once, or as many as the host has room for."""
        self.engine.forget()
        self.watch.take()
        prompts, ahead = self._stored(self.regime.at_once or self.regime.prompts), self._reported_ahead()
        begin = time.perf_counter()
        done = self.engine.run(prompts, ANSWER)
        seconds = time.perf_counter() - begin
        return {
            "seconds": round(seconds, 4), "tokens_per_s": round(sum(map(len, prompts)) / seconds),
            "ttft_ms": ms([request.ttft for request in done]), "cached": (cached := sum(each.cached for each in done)),
            "short": self._short_of_hits(cached, len(done)), "ahead": self._reported_ahead() - ahead,
            **self.watch.take(),
        }  # fmt: skip

    def alone(self) -> dict[str, Any]:
        """Decoding, with the stores that it makes itself."""
        self.engine.forget()
        return self._decode(None)

    def loads(self) -> dict[str, Any]:
        """Decoding beside requests that the host has, so many in flight at all times."""
        self.engine.forget()
        record = self._decode(self._stored(self.regime.prompts))
        self._loaded += record["streamed"]
        return {**record, "short": self._short_of_hits(record["cached"], record["streamed"])}

    def stores(self) -> dict[str, Any] | None:
        """Decoding beside requests that the GPU has and the host does not: each stores its blocks, computes a token.

        One begins with every few tokens of the decoders, so that all configurations have as much to do, and that with
        no offloading too; later, if its blocks are still being stored from the last time.

        None: what the connector has stored cannot be looked at."""
        host = self.engine.host
        if host is None and self.engine.connector is not None:
            return None
        self.engine.forget()
        prompts = self._prompts(RESIDENT, self.regime.resident)
        for number, tokens in enumerate(prompts):
            before = host.keys() if host else set()
            self.engine.one(tokens, STORING)
            if host and number not in self._resident:
                self.engine.settle()
                self._resident[number] = host.keys() - before
        self.engine.settle()
        evict = (lambda number: host.evict(self._resident[number])) if host else (lambda _: True)
        record = self._decode(prompts, ready=evict, pace=self.regime.pace)
        loaded = len(record.get("load", {}).get("submit_ms", ()))
        missing = short("requests that the GPU had:", record["streamed"] - loaded, record["streamed"])
        missing += self._short_on_gpu(record["cached"], record["streamed"])
        if host and self.watch.sees:
            each = self._whole // (BLOCK * self.regime.chunk)  # at least: groups with a window have some more
            missing += short("blocks stored:", record.get("store", {}).get("blocks", 0), record["streamed"] * each)
        return {**record, "short": missing}

    def _decode(
        self, stream: list[list[int]] | None, ready: Callable[[int], bool] = lambda _: True, pace: int = 0
    ) -> dict[str, Any]:
        """Decoders, and beside them stream's requests again and again, in_flight at a time. ready: of a number in the
        stream, whether it may begin. pace: tokens of a decoder between two; 0: none."""
        engine, regime, ahead = self.engine, self.regime, self._reported_ahead()
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
        begin, number = time.perf_counter(), 0
        made = len(decoders[0].times)  # tokens before
        streamed: dict[str, Request] = {}
        done: list[Request] = []

        def due() -> bool:
            return len(streamed) < regime.in_flight and len(decoders[0].times) - made >= number * pace

        while any(request.name in running for request in decoders):
            while stream and due() and ready(number % len(stream)):
                request = engine.add(stream[number % len(stream)], 1)
                number += 1
                running[request.name] = streamed[request.name] = request
            done += [request for request in engine.step(running) if streamed.pop(request.name, None) is not None]
            if time.monotonic() > limit:
                raise TimeoutError("decoding has not ended")
        seconds = time.perf_counter() - begin
        planned = -(-(len(decoders[0].times) - made) // pace) if pace else number
        while running:
            done += [request for request in engine.step(running) if request.name in streamed]
        gaps = [b - a for request in decoders for a, b in pairwise(request.times) if a >= begin]
        engine.settle()
        return {
            "itl_ms": itl(gaps), "seconds": round(seconds, 4), "streamed": len(done),
            "stream_ttft_ms": ms([request.ttft for request in done]),
            "cached": sum(request.cached for request in done), "planned": planned,
            "ahead": self._reported_ahead() - ahead, **self.watch.take(),
        }  # fmt: skip

    # -- where the time goes ------------------------------------------------------------------------------------------

    def idle(self) -> dict[str, Any] | None:
        """Steps of one request's decoding: what the connector's calls take, when there is nothing to move. None: they
        are in other processes."""
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

    def profile(self) -> dict[str, Any]:
        """Three prompts that the host has, and again when the GPU has them: milliseconds by call."""
        self.engine.forget()
        made: dict[str, Any] = {"hit": [], "floor": []}
        cached = 0
        for tokens in self._stored(3):
            for kind in made:
                self.watch.take()
                with self.spans.recording() as found:
                    request = self.engine.one(tokens, 1)
                cached += request.cached if kind == "hit" else 0
                made[kind].append(self._account(request, found))
        return {**made, "short": self._short_of_hits(cached, 3)}

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


def itl(gaps: list[float]) -> dict[str, float]:
    """Of the gaps between tokens, in milliseconds."""
    ordered = sorted(1e3 * gap for gap in gaps)
    if not ordered:
        return {}
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    made = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in at.items()}
    made.update(mean=sum(ordered) / len(ordered), max=ordered[-1])
    return {name: round(value, 4) for name, value in made.items()} | {"n": len(ordered)}
