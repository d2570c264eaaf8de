"""Loads in the step that needs them (kvswap_overlap), in vllm_package.py's engine.

The model there checks a layer's blocks after wait_for_layer_load() of that layer. A request that computed from wrong
bytes samples a token of its own, which must not come out of vLLM's scheduler.
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus
from vllm_worker import TOKENS


class Scenario:
    """The engine, and what it did since the last look."""

    def __init__(self, engine: Any, options: argparse.Namespace, say: Callable[[str], None], prompt: Any) -> None:
        self.engine, self.options, self.say, self.prompt = engine, options, say, prompt
        self.last = options.ranks - 1
        self.chunk = options.blocks_per_chunk * TOKENS

    def own(self) -> dict[str, int]:
        return self.engine.workers.call("own_loads")[0]

    def whole(self, tokens: list[int]) -> int:
        return len(tokens) // self.chunk * self.chunk

    def stored(self, seed: int, blocks: int) -> list[int]:
        """A prompt that the host has, and the GPU has not."""
        tokens = self.prompt(seed, blocks)
        self.engine.add(tokens)
        self.engine.run()
        self.engine.forget_gpu()
        self.engine.external = self.engine.recomputed = 0
        return tokens

    def go(self, tokens: list[int]) -> str:
        name = self.engine.add(tokens)
        self.engine.run()
        return name

    def check_answer(self, name: str, tokens: list[int]) -> None:
        assert self.engine.answers[name] == [len(tokens) % 900, (len(tokens) + 1) % 900], self.engine.answers[name]

    # -- what goes well -----------------------------------------------------------------------------------------------

    def alone(self) -> None:
        before = self.own()
        tokens = self.stored(20, 9)
        steps = self.engine.steps
        name = self.go(tokens)
        self.check_answer(name, tokens)
        own = self.own()
        assert self.engine.external == self.whole(tokens)
        assert own["layers"] == before["layers"] + 1 and own["whole"] == before["whole"], own
        self.say(f"a request alone ran in the step that loaded its blocks: {self.engine.steps - steps} steps in all")

    def shared(self) -> None:
        """Beside a running request a load longer than the limit is asynchronous, a shorter one is not."""
        tokens = self.stored(21, 9)
        before = self.own()
        self.engine.add(self.prompt(22, 3), max_tokens=40)
        for _ in range(3):
            self.engine.step()
        overlap = self.engine.scheduler.connector._overlap
        overlap._bytes, overlap._seconds = 1.0, 1.0  # a slow link
        self.go(tokens)
        assert self.engine.external == self.whole(tokens) and self.own() == before
        self.engine.forget_gpu()
        self.engine.add(self.prompt(36, 3), max_tokens=40)
        for _ in range(3):
            self.engine.step()
        overlap._bytes, overlap._seconds = 1e15, 1.0
        self.go(tokens)
        assert self.own()["layers"] == before["layers"] + 1
        overlap._bytes = overlap._seconds = 0.0
        self.say("beside a running request: asynchronous over a slow link, in the step over a fast one")

    def whole_prompt(self) -> None:
        """A prompt that the host has to its last token: the step computes the last block. A window is loaded as it was
        looked up, asynchronously."""
        tokens = self.stored(23, 8)[: 8 * TOKENS]
        before = self.own()
        name = self.go(tokens)
        self.check_answer(name, tokens)
        if self.options.hybrid:
            assert self.own() == before
            self.say("a prompt that the host has to its last token is loaded asynchronously: there is a window")
            return
        assert self.own()["layers"] == before["layers"] + 1
        assert self.engine.external == 7 * TOKENS, self.engine.external
        self.say("of a prompt that the host has to its last token all blocks but one are loaded")

    def chunked(self) -> None:
        """The rest of the prompt takes several steps; the GPU has its beginning."""
        first = self.stored(24, 6)
        tokens = first[: 6 * TOKENS] + self.prompt(25, 30)
        name = self.go(tokens)
        self.check_answer(name, tokens)
        assert self.engine.external == 6 * TOKENS // self.chunk * self.chunk
        self.engine.external = 0
        longer = tokens + self.prompt(26, 2)
        self.engine.forget_gpu()
        self.go(tokens[: 4 * TOKENS + 3])
        self.engine.external = 0
        name = self.go(longer)
        self.check_answer(name, longer)
        assert self.engine.external > 4 * TOKENS
        self.say(f"a prompt whose rest takes several steps; {self.engine.external} tokens computed or loaded before")

    def graphs(self) -> None:
        """Before a full graph, which waits for no layer, the step waits for all of the load."""
        for kind in ("full", "outside"):
            tokens = self.stored(27, 9)
            before = self.own()
            self.engine.workers.call("play", kind)
            self.engine.workers.call("hold", 0.2)
            name = self.go(tokens)
            self.engine.workers.call("play")
            self.check_answer(name, tokens)
            assert self.own()["whole"] == before["whole"] + 1 and self.own()["layers"] == before["layers"]
        self.say("a step that is a full graph waited for all of its load")

    def held(self) -> None:
        tokens = self.stored(28, 9)
        self.engine.workers.call("hold", 0.3)
        self.check_answer(self.go(tokens), tokens)
        self.say("a load that is late is waited for, layer by layer")

    def parts(self) -> None:
        """What each layer waits for. With all layers of a block together, it is a part of the block."""
        self.engine.forget_gpu()
        parts = self.engine.workers.call("parts")[0]
        if self.options.block_first:
            assert len(parts) == 1 and len(parts[0]) > 1, parts
            text = " + ".join(str(kib) for kib in parts[0])
            self.say(f"a load in a step moves a block in parts of {text} KiB, and each layer waits for its own")
        else:
            assert all(len(each) == 1 for each in parts), parts

    # -- what does not ------------------------------------------------------------------------------------------------

    def failing(self, seed: int, steps: int = 0, *, then: Callable[[str], None] | None = None) -> tuple[str, list[int]]:
        """A request whose load fails on one rank; `then` is done after so many steps."""
        tokens = self.stored(seed, 9)
        before = self.own()
        self.engine.workers.call_one(self.last, "fault", "fail")
        name = self.engine.add(tokens)
        for _ in range(steps):
            self.engine.step()
        if steps:
            self.engine.workers.call_one(self.last, "fault", None)
        if then is not None:
            then(name)
        self.engine.run()
        self.engine.workers.call_one(self.last, "fault", None)
        assert self.own()["layers"] + self.own()["whole"] == before["layers"] + before["whole"] + 1
        return name, tokens

    def fails(self) -> None:
        name, tokens = self.failing(30, 1)
        if self.options.policy == "fail":
            assert self.engine.answers.get(name, []) == [] and "error" in self.engine.ended[name].lower()
            self.say("a load failed: its request ended with an error, and no token came out")
        else:
            self.check_answer(name, tokens)
            assert self.engine.scheduler.connector._overlap._given_up == set()
            self.say(f"a load failed: {self.engine.recomputed} blocks were reported, and its request was computed")
        hits = self.engine.again(tokens)
        again = self.engine.again(tokens)
        assert again == self.whole(tokens), (hits, again)
        self.say(f"what was computed from it was stored nowhere: {hits} tokens hit, and then {again}")

    def fails_beside_its_likes(self) -> None:
        """Requests that share the blocks: in the same step, and in the next."""
        if self.options.hybrid and not hasattr(KVConnectorOutput(), "failed_recving"):
            return  # one of them loads asynchronously, and this release cannot recompute that: hybrid_faults()
        tokens = self.stored(31, 9)
        self.engine.workers.call_one(self.last, "fault", "fail")
        names = [self.engine.add(tokens), self.engine.add(tokens)]
        self.engine.step()
        self.engine.workers.call_one(self.last, "fault", None)
        names.append(self.engine.add(tokens))
        self.engine.run()
        for name in names:
            if self.options.policy == "recompute":
                self.check_answer(name, tokens)
        self.engine.again(tokens)
        self.say(f"three requests shared the blocks: {self.options.policy}, and no token of wrong bytes")

    def fails_and_is_aborted(self) -> None:
        scheduler = self.engine.scheduler

        def abort(name: str) -> None:
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

        _, tokens = self.failing(32, 1, then=abort)
        others = [self.go(tokens) for _ in range(2)]
        for other in others:
            self.check_answer(other, tokens)
        self.say("a request was aborted while its load failed: the next ones with its prompt are right")

    def fails_and_is_preempted(self) -> None:
        """For want of blocks, in the step after its load."""
        scheduler = self.engine.scheduler

        def preempt(name: str) -> None:
            request = scheduler.requests.get(name)
            if request is None or request.status != RequestStatus.RUNNING:
                return
            scheduler.running.remove(request)
            scheduler._preempt_request(request, 0.0)
            scheduler.prev_step_scheduled_req_ids.discard(name)

        name, tokens = self.failing(33, 1, then=preempt)
        if self.options.policy == "recompute":
            self.check_answer(name, tokens)
        else:
            assert self.engine.answers.get(name, []) == []
        self.check_answer(self.go(tokens), tokens)
        self.say("a request was preempted while its load failed: nothing wrong came out")

    def a_layer_is_not_waited_for(self) -> None:
        """The planted failures: a model that leaves out a layer is told of, and waits that are left out are found."""
        if self.options.ranks == 1 and not self.options.async_scheduling:
            tokens = self.stored(34, 9)
            self.engine.workers.call("forget_waits")
            self.engine.workers.call("hold", 1.0)
            try:
                self.go(tokens)
            except AssertionError as error:
                assert "holds other bytes" in str(error) or "wrong bytes" in str(error)
                self.say(f"waits that are left out are found: {error}")
                return
            raise AssertionError("waits were left out, and this test did not notice")

    def a_layer_is_skipped(self) -> None:
        tokens = self.stored(35, 9)
        before = self.own()
        skipped = next(iter(self.engine.workers.local.layers)) if self.engine.workers.local else None
        if skipped is None:
            return
        self.engine.workers.call("play", "eager", skipped)
        self.engine.workers.call("hold", 0.3)
        name = self.go(tokens)
        if self.options.policy == "recompute":
            self.check_answer(name, tokens)
            assert self.engine.recomputed > 0
        assert self.own()["layers"] == before["layers"] + 1
        self.engine.forget_gpu()
        name = self.go(tokens)
        self.check_answer(name, tokens)
        assert self.own()["whole"] == before["whole"] + 1
        self.engine.workers.call("play")
        self.say(
            "a layer that the model did not wait for: its step did not count, and later ones wait for all of a load"
        )


def scenario(engine: Any, options: argparse.Namespace, say: Callable[[str], None], prompt: Any) -> None:
    tests = Scenario(engine, options, say, prompt)
    assert engine.scheduler.connector._overlaps, "it is off"
    tests.parts()
    tests.alone()
    tests.shared()
    tests.whole_prompt()
    tests.chunked()
    tests.graphs()
    tests.held()
    tests.fails()
    tests.fails_beside_its_likes()
    tests.fails_and_is_aborted()
    tests.fails_and_is_preempted()
    tests.a_layer_is_skipped()
    tests.a_layer_is_not_waited_for()


def left_out_of_a_part(engine: Any, options: argparse.Namespace, say: Callable[[str], None], prompt: Any) -> None:
    """A copy of a load's last part is left out: the bytes of its first layer say so. The engine cannot go on after
    it."""
    tests = Scenario(engine, options, say, prompt)
    worker = engine.workers.local
    parts = len(worker.parts()[0])
    tokens = tests.stored(41, 9)
    blocks = tests.whole(tokens) // TOKENS
    before = tests.own()
    worker.fault("skip", 1 + (parts - 1) * blocks)
    try:
        tests.go(tokens)
    except AssertionError as error:
        assert tests.own()["layers"] == before["layers"] + 1
        worker.fault(None)
        name = worker.first_wrong
        assert worker.connector._own_loads._parts[name] == (parts - 1,), f"{name} holds other bytes first"
        say(f"a copy left out of part {parts} of {parts} is found, in {name}: {error}")
        return
    raise AssertionError("a copy was left out, and this test did not notice")
