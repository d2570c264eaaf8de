"""Two real SGLang engines that lend each other their links: KVSWAP_SGLANG_LEND, with SGLang's radix trees, controllers
and host pools.

    python tests/integration/sglang_lend.py SOURCE [--layout page_first_direct] [--mla] [--ranks 2]

SOURCE as for sglang_package.py. No GPU is needed: an engine is a process for each rank.
Of each token whose KV SGLang counts as computed, every byte is compared. It runs: prompts that go out and come back,
without a lender and with one; both engines at once; random prompts, more than the hosts hold, with two write policies
and flushes between them; an engine that is killed while it brings pages; a lender whose model runs; what is not lent; a
block that is left out of a load.
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
from types import SimpleNamespace

import sglang_package

LIMIT = 240.0  # seconds, with the start of an engine
LEAST = 16  # pages of a load that goes over several links


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", nargs="?", help="folder with SGLang's package; default: the installed one")
    parser.add_argument("--layout", choices=["page_first_direct", "page_first"], default="page_first_direct")
    parser.add_argument("--mla", action="store_true", help="a latent a token, in place of K and V")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks of each engine, a process each")
    parser.add_argument("--tokens", type=int, default=2048, help="of the device's pool; the host's is twice as large")
    parser.add_argument("--prompts", type=int, default=60, help="random ones of each engine, for each write policy")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.copies, options.swa, options.host_gb = True, False, 0
    return options


class Rank:
    """What a rank of an engine does when it is told to."""

    def __init__(self, options, rank: int) -> None:
        from sglang.srt.mem_cache.pool_host import common

        import kvswap

        self.options, self.rank, self.engine = options, rank, None
        device = kvswap.Device("host:0")  # each process has its own
        common._cuda_host_register = lambda buffer, *_: device.register(
            buffer.data_ptr(), buffer.numel() * buffer.element_size()
        )

    def make(self, **more) -> str:
        from sglang_engine import VERSION, Engine

        from kvswap.sglang import _lend, _plugin
        from kvswap.share import _lend as share_lend

        options = SimpleNamespace(**vars(self.options) | more)
        row = 16 * 3 * 128  # bytes of a page: 16 tokens, 3 layers
        _lend._PIECE, _lend._LEAST_STORE, _lend._STALL, share_lend._LOOK = 4 * row, LEAST * row, 10.0, 0.1
        asked = _plugin.lend()
        _plugin.lend = lambda: asked._replace(least_nbytes=LEAST * row)
        self.engine = Engine(options, self.rank, None)
        return VERSION

    @property
    def host(self):
        return self.engine.tree.host_pool_group.anchor_entry.host_pool

    @property
    def lending(self):
        from kvswap.sglang import _lend

        return _lend._pools[self.host].lending

    def lends(self) -> bool:
        from kvswap.sglang import _lend

        return self.host in _lend._pools

    def peers(self) -> int:
        return len(self.lending.member.peers)

    def brought(self) -> list[int]:
        """By others: stores, loads, and pieces that were given up."""
        stats = self.lending.member.stats()
        return [stats["brought_by_others_d2h"], stats["brought_by_others_h2d"], stats["pieces_late"]]

    def lent(self) -> list[list[int]]:
        """Registered bytes, and those brought, of each loan."""
        return [[loan.registered_nbytes, *loan.brought] for loan in self.lending.loans]

    def run_step(self, runs: bool) -> None:
        """A step that is not over."""
        from kvswap.sglang._lend import steps

        (steps.begin if runs else steps.end)()

    def evict(self) -> None:
        """The device's copies of everything that the host has."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.engine.settle()
        self.engine.tree.evict_for_alloc(EvictParams(num_tokens=self.options.tokens))
        self.engine.settle()

    def again(self, seed: int, pages: int) -> int:
        """A prompt goes out and comes back: how many of its tokens were not computed the second time."""
        tokens = sglang_package.prompt(seed, pages)
        self.engine.serve(tokens)
        self.evict()
        for _, _, buffer in self.engine.parts:
            buffer.fill_(0)
        return self.engine.serve(tokens)[1]

    def often(self, seed: int, pages: int, times: int) -> int:
        """A prompt comes back so many times: the fewest tokens that were not computed."""
        tokens, fewest = sglang_package.prompt(seed, pages), self.again(seed, pages)
        for _ in range(times):
            self.evict()
            fewest = min(fewest, self.engine.serve(tokens)[1])
        return fewest

    def many(self, seed: int, prompts: int) -> list[int]:
        """Random prompts with common beginnings: tokens that were not computed, and all."""
        chosen, hits, tokens, engine = random.Random(seed), 0, 0, self.engine
        trunks = [sglang_package.prompt(100 + i, 24) for i in range(6)]
        for number in range(prompts):
            prompt = chosen.choice(trunks)[: chosen.randrange(1, 25) * 16]
            prompt = prompt + sglang_package.prompt(chosen.randrange(200, 260), chosen.randrange(1, 9))
            hits, tokens = hits + engine.serve(prompt)[1], tokens + len(prompt)
            if number % 4 == 0:
                self.evict()
            if number % 30 == 29:  # as SGLang flushes: what is under way is forgotten
                engine.tree.reset()
                engine.allocator.clear()
        engine.settle()
        engine.tree.sanity_check()
        return [hits, tokens]

    def leave_out(self) -> str:
        """The last block of each load."""
        from kvswap.sglang._lend import _Lent

        submit = _Lent.submit

        def all_but_one(lent, ids, direction, queue):
            given = tuple(each[:-1] for each in ids) if direction == "H2D" else ids
            return submit(lent, given, direction, queue)

        _Lent.submit = all_but_one
        try:
            self.again(77, 48)
        except AssertionError as error:
            return str(error)
        finally:
            _Lent.submit = submit
        raise AssertionError("a block was left out, and this test did not notice")

    def close(self) -> None:
        self.engine.close()
        self.host.destroy()


def rank_of(options: argparse.Namespace, rank: int, port: int, name: str, pipe) -> None:
    os.environ["KVSWAP_SGLANG_LEND"] = name
    sglang_package.start(options, rank, port)
    from kvswap.share import _steps

    _steps.IDLE, _steps._STUCK = 0.0, LIMIT
    here = Rank(options, rank)
    while True:
        what, args, more = pipe.recv()
        if what == "end":
            break
        pipe.send(getattr(here, what)(*args, **more))
    os._exit(0)


class Side:
    """An engine: a process for each rank."""

    def __init__(self, options: argparse.Namespace, name: str, **more) -> None:
        own, port = multiprocessing.get_context("spawn"), sglang_package.free_port()
        options = argparse.Namespace(**vars(options) | more)
        self.pipes, self.processes = [], []
        for rank in range(options.ranks):
            pipe, their = own.Pipe()
            process = own.Process(target=rank_of, args=(options, rank, port, name, their), daemon=True)
            process.start()
            their.close()
            self.pipes.append(pipe)
            self.processes.append(process)

    def say(self, what: str, *args, **more) -> None:
        for pipe in self.pipes:
            pipe.send((what, args, more))

    def hear(self) -> list:
        found = []
        for pipe in self.pipes:
            assert pipe.poll(LIMIT), "an engine does not answer"
            found.append(pipe.recv())
        return found

    def ask(self, what: str, *args, **more) -> list:
        self.say(what, *args, **more)
        return self.hear()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(LIMIT)

    def end(self) -> None:
        self.ask("close")
        self.say("end")
        for process in self.processes:
            process.join(LIMIT)
            assert process.exitcode == 0, process.exitcode


def until(holds) -> None:
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end, "it does not come about"
        time.sleep(0.02)


def totals(rows: list[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*rows, strict=True)]


def large(here: Side, other: Side, stores: bool) -> list[int]:
    """Prompts that go out and come back, until others have brought some of it: how much, as the lender counts it."""
    before, earlier = totals(here.ask("brought")), totals([each for rank in other.ask("lent") for each in rank])
    for seed in range(1000, 1050):
        assert set(here.ask("again", seed, 64)) == {64 * 16}
        got = [now - first for now, first in zip(totals(here.ask("brought")), before, strict=True)]
        if got[1] and (got[0] or not stores):
            break
    assert got[1] and bool(got[0]) == stores, got
    lent = totals([each for rank in other.ask("lent") for each in rank])
    counted = [now - first for now, first in zip(lent, earlier, strict=True)][1:]
    assert all(theirs >= mine and (got[2] or theirs == mine) for theirs, mine in zip(counted, got, strict=False)), (
        counted,
        got,
    )
    return got


def scenario(options: argparse.Namespace, say) -> None:
    name, ranks = f"i{os.getpid()}", options.ranks
    here = Side(options, name)
    other = Side(options, name, mla=not options.mla, layout="page_first" if options.mla else options.layout)
    version = here.ask("make", write_policy="write_through")[0]
    kind = "MLA" if options.mla else "MHA"
    print(f"SGLang {version}, {options.layout}, {kind}, two engines of {ranks} rank(s)", flush=True)
    assert set(here.ask("again", 1, 64)) == {64 * 16} and totals(here.ask("brought")) == [0, 0, 0]
    say("no lender: all bytes came over the own link")
    other.ask("make", write_policy="write_back")
    until(lambda: here.ask("peers") == [ranks] * ranks and other.ask("peers") == [ranks] * ranks)
    got = large(here, other, False)
    say(f"another engine came: it brought {got[1] >> 10} KiB of loads, and nothing of what is written through")
    got = large(other, here, True)
    say(f"the other one, which writes back: {got[0] >> 10} KiB of stores and {got[1] >> 10} of loads")
    other.say("again", 2, 60)
    assert set(here.ask("again", 3, 60)) == set(other.hear()) == {60 * 16}
    other.say("many", options.seed, options.prompts)
    found = [*here.ask("many", options.seed + 1, options.prompts), *other.hear()]
    assert all(hits > tokens / 20 for hits, tokens in found), found
    say(f"both at once, random prompts: tokens that were not computed, of all, by rank: {found}")

    here.say("often", 4, 64, 40)
    lent = totals([each for rank in other.ask("lent") for each in rank])
    until(lambda: totals([each for rank in other.ask("lent") for each in rank]) != lent)
    other.kill()
    assert set(here.hear()) == {64 * 16}
    until(lambda: here.ask("peers") == [0] * ranks)
    before = here.ask("brought")
    assert set(here.ask("again", 5, 64)) == {64 * 16} and here.ask("brought") == before
    say("an engine that was killed beside loads: all bytes right, and its pieces came over the own link")

    other = Side(options, name)
    other.ask("run_step", True)
    other.ask("make", write_policy="write_back")
    until(lambda: other.ask("peers") == [ranks] * ranks and all(other.ask("lent")))
    assert here.ask("peers") == [0] * ranks and not any(each[0] for rank in other.ask("lent") for each in rank)
    other.ask("run_step", False)
    until(lambda: here.ask("peers") == [ranks] * ranks)
    got = large(here, other, False)
    say("a lender whose model runs registers nothing until its step has ended")
    found = here.ask("leave_out")
    say(f"a block that was left out is found: {found[0]}")
    here.kill()
    until(lambda: other.ask("peers") == [0] * ranks)
    assert set(other.ask("again", 6, 64)) == {64 * 16}
    other.end()

    here = Side(options, name)
    here.ask("make", layout="layer_first")
    assert here.ask("lends") == [False] * ranks and set(here.ask("again", 7, 40)) == {40 * 16}
    here.kill()
    say("layer_first: links are not lent, and all goes on")


def main() -> int:
    options = parse()
    scenario(options, lambda what: print(f"  {what}", flush=True))
    return 0


if __name__ == "__main__":
    result = main()
    sys.stdout.flush()
    os._exit(result)
