"""Loads in the step that needs them (kvswap_overlap), in vllm_package.py's engine.

The model there checks a layer's blocks after wait_for_layer_load() of that layer. A request that computed from wrong
bytes samples a token of its own, which must not come out of vLLM's scheduler.
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus
from vllm_worker import TOKENS

STATE = ("_asynchronous", "_loads", "_awaited", "_ahead", "_kept", "_withheld")  # of Unfinished, between requests


class Scenario:
    """The engine, and what it did since the last look."""

    def __init__(self, engine: Any, options: argparse.Namespace, say: Callable[[str], None], prompt: Any) -> None:
        self.engine, self.options, self.say, self.prompt = engine, options, say, prompt
        self.last = options.ranks - 1
        self.chunk = options.blocks_per_chunk * TOKENS
        # Whether this release can recompute what an asynchronous load was to bring.
        self.bears_failed_loads = not options.hybrid or hasattr(KVConnectorOutput(), "failed_recving")

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

    # -- loads that are reported before they end ----------------------------------------------------------------------

    def slow_link(self, slow: bool = True) -> None:
        """Loads are asynchronous beside other requests; and reported in the step that submits them."""
        overlap = self.engine.scheduler.connector._overlap
        overlap._bytes = overlap._seconds = float(slow)
        self.engine.workers.call("report_ahead", slow)

    def decode_beside(self, seed: int, max_tokens: int = 40) -> None:
        """A request that decodes meanwhile."""
        self.engine.add(self.prompt(seed, 3), max_tokens=max_tokens)
        for _ in range(3):
            self.engine.step()

    def beside(self, seed: int, blocks: int = 9) -> tuple[str, list[int], int]:
        """A request whose asynchronous load was reported while it runs, beside another request; and the loads that
        steps had waited for so until then."""
        tokens = self.stored(seed, blocks)
        before = sum(self.engine.workers.call("reported"))
        self.decode_beside(seed + 1)
        self.slow_link()
        self.engine.workers.call("hold", 1.0)  # longer than the steps until the report, beside other programs too
        name = self.engine.add(tokens)
        return name, tokens, before

    def report(self, name: str) -> Any:
        """Steps, until the scheduler has the report; and the load still runs."""
        scheduler = self.engine.scheduler
        for _ in range(6):
            self.engine.step()
            if name in scheduler.finished_recving_kv_req_ids:
                break
        assert name in scheduler.finished_recving_kv_req_ids, "nothing was reported"
        jobs = scheduler.connector.connector_scheduler._jobs.values()
        assert any(job.req_id == name and not job.is_store for job in jobs), "it has ended"
        return scheduler.requests[name]

    def end(self, before: int) -> None:
        self.engine.run()
        self.slow_link(False)
        assert sum(self.engine.workers.call("reported")) > before, "no step waited for it"
        self.check_state()

    def check_state(self) -> None:
        """Nothing is left behind."""
        state = vars(self.engine.scheduler.connector._overlap.loads)
        assert not any(state[name] for name in STATE), state

    def ahead(self) -> None:
        name, tokens, before = self.beside(60)
        self.report(name)
        self.end(before)
        self.check_answer(name, tokens)
        assert self.engine.external == self.whole(tokens)
        self.say("a load that was reported while it ran: the step of its request waited for it")

    def ahead_by_estimate(self) -> None:
        """The loads so far say how long one takes."""
        name, tokens, _ = self.beside(62)
        self.engine.workers.call("report_ahead", False)
        self.engine.run()
        self.slow_link(False)
        self.check_answer(name, tokens)

    def ahead_fails(self) -> None:
        if self.options.policy == "fail":
            return
        name, tokens, before = self.beside(64)
        self.engine.workers.call_one(self.last, "fault", "fail")
        request = self.report(name)
        self.end(before)
        self.engine.workers.call_one(self.last, "fault", None)
        self.check_answer(name, tokens)
        assert request.num_preemptions == 1, request.num_preemptions
        hits, again = self.engine.again(tokens), self.engine.again(tokens)
        assert again == self.whole(tokens), (hits, again)
        self.say(f"such a load failed: its request was computed again; {hits} tokens hit afterwards, and then {again}")

    def ahead_fails_without_room(self) -> None:
        """No step has room for the request until its load has failed."""
        if self.options.policy == "fail":
            return
        name, tokens, before = self.beside(66)
        self.engine.workers.call_one(self.last, "fault", "fail")
        request = self.report(name)
        manager, refused = self.engine.scheduler.kv_cache_manager, []
        allocate = manager.allocate_slots

        def no_room(asked: Any, *args: Any, **kwargs: Any) -> Any:
            if asked is not request or not manager.get_block_ids(name)[0]:
                return allocate(asked, *args, **kwargs)
            refused.append(request.status)
            return None

        manager.allocate_slots = no_room
        for _ in range(4):
            self.engine.step()
        assert refused and request not in self.engine.scheduler.running
        assert not any(manager.get_block_ids(name)), "it holds blocks of a load that failed"
        manager.allocate_slots = allocate
        self.end(before)
        self.engine.workers.call_one(self.last, "fault", None)
        self.check_answer(name, tokens)
        self.say(f"such a load failed before a step had room for its request, after {len(refused)} tries")

    def ahead_and_gone(self) -> None:
        """Aborted while its load runs: the next requests take its blocks."""
        name, tokens, before = self.beside(68)
        self.report(name)
        self.engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        others = [self.prompt(seed, 20) for seed in (70, 71, 72)]
        names = [self.engine.add(other) for other in others]
        self.end(before)
        for each, other in zip(names, others, strict=True):
            self.check_answer(each, other)
        self.check_answer(self.go(tokens), tokens)
        self.say("its request was aborted meanwhile: those that took its blocks are right")

    def ahead_and_aborted_first(self) -> None:
        """Aborted before the report is read: vLLM, which then frees the blocks, is told when the load has ended."""
        if not self.options.async_scheduling:  # the step that submits the load reads its report
            return
        name, tokens, _ = self.beside(74)
        self.engine.step()
        self.engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        others = [self.prompt(seed, 20) for seed in (76, 77, 78)]
        names = [self.engine.add(other) for other in others]
        self.engine.step()
        withheld = self.engine.scheduler.connector._overlap.loads._withheld
        assert name in withheld.values() and name in self.engine.scheduler.requests, withheld
        self.engine.run()
        self.slow_link(False)
        self.check_state()
        for each, other in zip(names, others, strict=True):
            self.check_answer(each, other)
        self.check_answer(self.go(tokens), tokens)
        self.say("its request was aborted before the report was read: the blocks stayed allocated until the end")

    def ahead_and_preempted(self) -> None:
        """In the step after the first that waited."""
        name, tokens, before = self.beside(80)
        self.report(name)
        self.engine.step()
        self.preempt(name)
        self.end(before)
        self.check_answer(name, tokens)
        self.say("its request was preempted meanwhile")

    def fails_beside_loads(self, ahead: bool) -> None:
        """Requests that share its blocks, each of which waits for a load of its own."""
        if self.options.hybrid or self.options.policy == "fail":  # of a shorter prompt the host has no window
            return
        shared = self.prompt(100, 8)[: 8 * TOKENS]
        longer = [shared + self.prompt(seed, 4) for seed in (101, 102)]
        for tokens in longer:
            self.go(tokens)
        self.engine.forget_gpu()
        if ahead:
            self.decode_beside(103, 60)
            self.slow_link()
        self.engine.workers.call_one(self.last, "fault", "fail")
        self.engine.workers.call("hold", 0.3)
        first = self.engine.add(shared + self.prompt(104, 0))
        if ahead:
            self.report(first)
        self.engine.step()
        self.slow_link()
        names = [self.engine.add(tokens) for tokens in longer]
        self.engine.step()
        self.engine.workers.call_one(self.last, "fault", None)
        self.engine.run()
        self.slow_link(False)
        for name, tokens in zip(names, longer, strict=True):
            self.check_answer(name, tokens)
        self.say(
            f"a load failed {'after its report ' * ahead}beside loads of requests that share its blocks: all right"
        )

    def fails_and_a_sharer_goes(self, ahead: bool, then: str) -> None:
        """A request that computed from the blocks is preempted or aborted before the failure is known."""
        if not self.bears_failed_loads or self.options.policy == "fail":
            return
        before = 0
        if ahead:
            name, tokens, before = self.beside(110)
            self.engine.workers.call_one(self.last, "fault", "fail")
            self.report(name)
        else:
            tokens = self.stored(110, 9)
            self.engine.workers.call_one(self.last, "fault", "fail")
            name = self.engine.add(tokens)
        longer = tokens[: 9 * TOKENS] + self.prompt(112, 4)
        sharer = self.engine.add(longer)
        self.engine.step()
        if then == "preempted":
            self.preempt(sharer)
        else:
            self.engine.scheduler.finish_requests(sharer, RequestStatus.FINISHED_ABORTED)
        self.engine.step()
        self.engine.workers.call_one(self.last, "fault", None)
        if ahead:
            self.end(before)
        self.engine.run()
        self.check_answer(name, tokens)
        if then == "preempted":
            self.check_answer(sharer, longer)
        self.check_answer(self.go(longer), longer)
        self.say(f"a load failed, and a request that shared its blocks was {then} before that was known: all right")

    def answers_of_all_that_is_stored(self, tokens: list[int]) -> None:
        """What was stored is loaded: again, and again behind what that stored."""
        for _ in range(2):
            self.engine.forget_gpu()
            self.check_answer(self.go(tokens), tokens)

    def fails_in_a_long_prompt(self) -> None:
        """What an ended request had not computed is not stored under its keys."""
        if not self.bears_failed_loads:
            return
        start = self.stored(160, 6)
        tokens = start[: 6 * TOKENS] + self.prompt(161, 20 if self.options.hybrid else 46)  # as the GPU has room
        self.engine.workers.call_one(self.last, "fault", "fail")
        name = self.engine.add(tokens)
        for _ in range(3):
            self.engine.step()
        self.engine.workers.call_one(self.last, "fault", None)
        self.engine.run()
        if self.options.policy == "recompute":
            self.check_answer(name, tokens)
        self.answers_of_all_that_is_stored(tokens)
        self.say("a load failed in a prompt of several steps: nothing wrong was stored")

    def fails_and_a_store_is_made_up_for(self, then: str) -> None:
        """The host had no room for what the step computed, and the request ends before the failure is told."""
        if not self.bears_failed_loads or self.options.hybrid:
            return
        scheduler = self.engine.scheduler
        manager = scheduler.connector.connector_scheduler.manager
        start = self.stored(170 if then == "aborted" else 172, 8)
        tokens = start[: 8 * TOKENS] + self.prompt(174, 4)
        self.engine.workers.call_one(self.last, "fault", "fail")
        prepare, update, full = manager.prepare_store, scheduler.update_from_output, [True]

        def prepare_store(*args: Any) -> Any:
            return None if full else prepare(*args)

        def update_from_output(plan: Any, output: Any) -> Any:
            if name in plan.num_scheduled_tokens and full:
                full.clear()
                if then == "aborted":
                    scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            return update(plan, output)

        manager.prepare_store, scheduler.update_from_output = prepare_store, update_from_output
        self.engine.add(start)
        name = self.engine.add(tokens)
        self.engine.step()
        self.engine.step()
        self.engine.workers.call_one(self.last, "fault", None)
        self.engine.run()
        manager.prepare_store, scheduler.update_from_output = prepare, update
        self.answers_of_all_that_is_stored(tokens)
        self.say(
            f"a load failed, and a request that shared its blocks was {then} with stores to make up for: all right"
        )

    def fails_beside_a_right_window(self) -> None:
        """A request shares the blocks of the full group alone: the window's are old ones."""
        if not self.options.hybrid or self.options.policy == "fail":
            return
        manager = self.engine.scheduler.kv_cache_manager
        tokens = self.stored(180, 12)
        start = self.engine.add(tokens[: 6 * TOKENS] + self.prompt(181, 0), max_tokens=1)
        blocks: Any = [[]]
        while start in self.engine.scheduler.requests:
            held = manager.get_block_ids(start)
            blocks = held if any(held[0]) else blocks
            self.engine.step()
            time.sleep(0.01)
        self.engine.run()
        manager.evict_blocks(set(blocks[0]) - {0})  # as vLLM does: the full group's are freed first
        self.engine.workers.call_one(self.last, "fault", "fail")
        names = [self.engine.add(tokens)]
        longer = tokens[: 6 * TOKENS] + self.prompt(182, 6)
        names.append(self.engine.add(longer))
        self.engine.step()
        self.engine.step()
        self.engine.workers.call_one(self.last, "fault", None)
        self.engine.run()
        for name, asked in zip(names, (tokens, longer), strict=True):
            self.check_answer(name, asked)
        again = longer + self.prompt(183, 1)
        self.check_answer(self.go(again), again)
        self.say("a load failed, of which another request had the full group's blocks alone: all right")

    def ahead_fails_and_is_gone(self) -> None:
        """Nobody else has its blocks, and no other request is computed again or ends."""
        name, tokens, before = self.beside(120)
        self.engine.workers.call_one(self.last, "fault", "fail")
        self.report(name)
        manager = self.engine.scheduler.kv_cache_manager
        held = {block for group in manager.get_block_ids(name) for block in group}
        self.engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        others = [self.prompt(seed, 10) for seed in (122, 123, 124, 125)]
        names = [self.engine.add(other) for other in others]
        self.engine.step()
        taken = {block for each in names for group in manager.get_block_ids(each) for block in group}
        assert not held & taken - {0}, f"blocks {sorted(held & taken)} are other requests', and are being loaded"
        self.engine.workers.call_one(self.last, "fault", None)
        self.end(before)
        for each, other in zip(names, others, strict=True):
            self.check_answer(each, other)
        assert name not in self.engine.scheduler.requests
        self.check_answer(self.go(tokens), tokens)
        self.say("such a load failed after its request was aborted: no other request is concerned")

    def ahead_fails_beside_another(self) -> None:
        """Two loads are waited for by one step; one had failed before: the other one counts."""
        tokens = [self.stored(seed, 6) for seed in (130, 131)]
        self.decode_beside(132, 60)
        self.slow_link()
        self.engine.workers.call_one(self.last, "fault", "fail")
        self.engine.workers.call("hold", 0.3)
        names = [self.engine.add(each) for each in tokens]
        self.report(names[0])
        other = self.engine.scheduler.requests[names[1]]
        time.sleep(0.6)
        for _ in range(3):
            self.engine.step()
        self.engine.workers.call_one(self.last, "fault", None)
        self.engine.run()
        self.slow_link(False)
        assert other.num_preemptions == 0 and "error" not in self.engine.ended[names[1]].lower()
        self.check_answer(names[1], tokens[1])
        if self.options.policy == "recompute":
            self.check_answer(names[0], tokens[0])
        self.say("of two such loads one failed, and the request of the other one ran on")

    def ahead_fails_without_room_before_others(self) -> None:
        """When a request loses its blocks, vLLM also frees the room that it reserved for the request."""
        if not self.bears_failed_loads or self.options.policy == "fail":
            return
        scheduler, manager = self.engine.scheduler, self.engine.scheduler.kv_cache_manager
        start = self.prompt(140, 4)[: 4 * TOKENS]
        waits, fails = start + self.prompt(141, 32), self.prompt(142, 32)
        for tokens in (waits, fails):
            self.go(tokens)
        self.engine.forget_gpu()
        self.slow_link()
        self.engine.workers.call("hold", 0.3)
        self.engine.workers.call_one(self.last, "fault", "fail")
        first, name = self.engine.add(waits), self.engine.add(fails)
        self.engine.add(self.prompt(144, 3))
        look_up, allocate, full = scheduler.connector.get_num_new_matched_tokens, manager.allocate_slots, [True]

        def later(request: Any, *args: Any) -> Any:
            return (None, False) if request.request_id == first and full else look_up(request, *args)

        def no_room(request: Any, *args: Any, **kwargs: Any) -> Any:
            held = request.request_id == name and request.num_computed_tokens and request not in scheduler.running
            return None if full and held else allocate(request, *args, **kwargs)

        scheduler.connector.get_num_new_matched_tokens, manager.allocate_slots = later, no_room
        for _ in range(12):
            self.engine.step()
            if scheduler.requests[name].status == RequestStatus.WAITING and not any(manager.get_block_ids(name)):
                break
        self.engine.workers.call_one(self.last, "fault", None)
        full.clear()
        self.engine.run(limit=20)
        scheduler.connector.get_num_new_matched_tokens, manager.allocate_slots = look_up, allocate
        self.slow_link(False)
        self.check_answer(name, fails)
        self.check_answer(first, waits)
        self.say("such a load failed before its request had room: no other request waits for the room of it")

    def loaded_behind_one_without_room(self) -> None:
        """A request whose lookup was put off comes first again, and finds no room beside one that is loaded."""
        if self.options.hybrid:
            return
        loads, large = self.stored(160, 20), self.prompt(161, 50)
        scheduler = self.engine.scheduler
        self.slow_link()
        first = self.engine.add(large)
        look_up, puts_off = scheduler.connector.get_num_new_matched_tokens, [True]

        def later(request: Any, *args: Any) -> Any:
            return (None, False) if request.request_id == first and puts_off else look_up(request, *args)

        scheduler.connector.get_num_new_matched_tokens = later
        self.engine.step()
        name = self.engine.add(loads)
        self.engine.step()
        assert scheduler.requests[name].status == RequestStatus.WAITING_FOR_REMOTE_KVS
        puts_off.clear()
        self.engine.run(limit=20)
        scheduler.connector.get_num_new_matched_tokens = look_up
        self.slow_link(False)
        self.check_answer(name, loads)
        self.check_answer(first, large)
        self.say("a request without room waited for one behind it, whose blocks were loaded")

    def ahead_and_reset(self) -> None:
        """The connector's cache is reset before the report is read."""
        if self.options.hybrid:
            return
        name, tokens, _ = self.beside(150)
        theirs = self.engine.scheduler.connector.connector_scheduler
        for _ in range(6):
            self.engine.step()
            if any(job.req_id == name for job in theirs._jobs.values()):
                break
        self.engine.scheduler.connector.reset_cache()
        self.engine.run()
        self.slow_link(False)
        self.check_answer(name, tokens)
        self.check_state()
        self.say("the connector's cache was reset before a report was read")

    def ahead_at_random(self, rounds: int = 12) -> None:
        """Requests that share prompts, some aborted, some preempted, while some of their loads fail."""
        chance, scheduler = random.Random(5), self.engine.scheduler
        prompts = [self.stored(seed, 9) for seed in range(90, 94)]
        prompts += [tokens[: 5 * TOKENS] + self.stored(seed, 6) for seed, tokens in enumerate(prompts, 95)]
        overlap = scheduler.connector._overlap
        before = sum(self.engine.workers.call("reported"))
        recomputed = answered = 0
        for _ in range(rounds):
            for rank in range(self.options.ranks):  # with several, some report when the load has ended
                self.engine.workers.call_one(rank, "report_ahead", self.last == 0 or chance.random() < 0.7)
            self.engine.forget_gpu()
            overlap._bytes, overlap._seconds = 1.0, 1.0
            names = {self.engine.add(tokens): tokens for tokens in chance.choices(prompts, k=7)}
            failing = chance.random() < 0.5 and self.bears_failed_loads
            if failing:
                self.engine.workers.call_one(self.last, "fault", "fail", chance.randint(1, 20))
            gone = set()
            for _ in range(8):
                self.engine.workers.call("hold", chance.choice([0, 0.003, 0.02]))
                self.engine.step()
                name = chance.choice(list(names))
                request, what = scheduler.requests.get(name), chance.random()
                if request is not None and what < 0.2:
                    scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
                    gone.add(name)
                elif request is not None and what < 0.4 and request.num_output_tokens == 0:
                    self.preempt(name)
            self.engine.workers.call_one(self.last, "fault", None)
            self.engine.run()
            for name in names.keys() - gone:
                if "error" in self.engine.ended[name].lower():
                    assert failing and self.options.policy == "fail" and not self.engine.answers.get(name)
                    continue
                self.check_answer(name, names[name])
                answered += 1
            recomputed += failing
        overlap._bytes = overlap._seconds = 0.0
        self.engine.workers.call("report_ahead", False)
        count = sum(self.engine.workers.call("reported")) - before
        assert count > rounds // 2, count  # a busy machine ends some before their step begins
        self.say(
            f"at random: {count} loads reported ahead, {answered} answers are right, {recomputed} rounds had faults"
        )

    def preempt(self, name: str) -> None:
        scheduler = self.engine.scheduler
        request = scheduler.requests.get(name)
        if request is None or request.status != RequestStatus.RUNNING:
            return
        scheduler.running.remove(request)
        scheduler._preempt_request(request, 0.0)
        scheduler.prev_step_scheduled_req_ids.discard(name)

    def ahead_without_waits(self) -> None:
        """The planted failure: a step that does not wait. The engine cannot go on after it."""
        if self.options.ranks > 1 or not self.options.async_scheduling:
            return
        name, _, _ = self.beside(82)
        self.report(name)
        own = type(self.engine.workers.local.connector._own_loads)
        with mock.patch.object(own, "wait_for", lambda own, jobs: setattr(own, "awaited", frozenset(jobs))):
            try:
                self.engine.run()
            except AssertionError as error:
                assert "wrong bytes" in str(error), error
                self.say(f"a wait that is left out is found: {error}")
                return
        raise AssertionError("a wait was left out, and this test did not notice")

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
        if not self.bears_failed_loads:
            return  # one of them loads asynchronously: hybrid_faults()
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

    def every_load_fails(self, rounds: int = 20) -> None:
        """As of a lost device, while requests that share prompts come one after the other: no token of an answer is
        left out, and none comes twice."""
        if not self.bears_failed_loads or self.options.policy == "fail":
            return
        chance, most = random.Random(7), 0
        prompts = [self.stored(seed, 9) for seed in (150, 151)]
        prompts += [tokens[: 5 * TOKENS] + self.stored(seed, 6) for seed, tokens in enumerate(prompts, 152)]
        overlap = self.engine.scheduler.connector._overlap
        for _ in range(rounds):
            self.engine.forget_gpu()
            overlap._bytes, overlap._seconds = 1e15, 1.0  # no load is too long for a step
            self.engine.workers.call_one(self.last, "fault", "fail", 1, 1)
            names = {}
            for _ in range(8):
                tokens = chance.choice(prompts)
                names[self.engine.add(tokens, max_tokens=6)] = tokens
                for _ in range(chance.randint(0, 2)):
                    self.engine.step()
            requests = [self.engine.scheduler.requests.get(name) for name in names]
            self.engine.run()
            self.engine.workers.call_one(self.last, "fault", None)
            for name, tokens in names.items():
                right = [(len(tokens) + i) % 900 for i in range(6)]
                assert self.engine.answers[name] == right, (name, self.engine.answers[name], right)
            most = max(most, *(request.num_preemptions for request in requests if request is not None))
            for tokens in prompts:  # stores failed as well
                self.go(tokens)
        overlap._bytes = overlap._seconds = 0.0
        self.say(f"every load failed for a while: all answers are whole; a request was preempted {most} times")

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
        name, tokens = self.failing(33, 1, then=self.preempt)
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
    tests.ahead()
    tests.ahead_by_estimate()
    tests.ahead_fails()
    tests.ahead_fails_without_room()
    tests.ahead_and_gone()
    tests.ahead_and_aborted_first()
    tests.ahead_and_preempted()
    for ahead in (True, False):
        tests.fails_beside_loads(ahead)
        for then in ("preempted", "aborted"):
            tests.fails_and_a_sharer_goes(ahead, then)
    tests.fails_in_a_long_prompt()
    for then in ("aborted", "recomputed or ended"):
        tests.fails_and_a_store_is_made_up_for(then)
    tests.fails_beside_a_right_window()
    tests.ahead_fails_and_is_gone()
    tests.ahead_fails_beside_another()
    tests.ahead_fails_without_room_before_others()
    tests.loaded_behind_one_without_room()
    tests.ahead_and_reset()
    tests.ahead_at_random()
    tests.fails()
    tests.fails_beside_its_likes()
    tests.every_load_fails()
    tests.fails_and_is_aborted()
    tests.fails_and_is_preempted()
    tests.a_layer_is_skipped()
    tests.a_layer_is_not_waited_for()
    tests.ahead_without_waits()


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
