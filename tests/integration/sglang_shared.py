"""One host pool for all ranks in a real SGLang: KVSWAP_SGLANG_SHARE, with its radix tree, controller and host pools.

    python tests/integration/sglang_shared.py SOURCE [--layout page_first_direct] [--ranks 2]

SOURCE as for sglang_package.py; sglang_package.py --mla --ranks 2 --copies under KVSWAP_SGLANG_SHARE=1 runs the same
with files. No GPU is needed. Of each token whose KV SGLang counts as computed, every byte is compared. It runs: prompts
that go out and come back, and what each rank brought; random prompts, more than the host holds, with SGLang's three
write policies, flushes between them, and a rank that is late; what is not shared; a block that is left out of a load;
ranks that do not agree on their pages, which ends the engine before wrong bytes are used.
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from types import SimpleNamespace

import sglang_package


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", nargs="?", help="folder with SGLang's package; default: the installed one")
    parser.add_argument("--layout", choices=["page_first_direct", "page_first"], default="page_first_direct")
    parser.add_argument("--ranks", type=int, default=2, help="tensor-parallel ranks, a process each")
    parser.add_argument("--tokens", type=int, default=2048, help="of the device's pool")
    parser.add_argument("--prompts", type=int, default=150, help="random ones, for each write policy")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.copies, options.swa, options.mla, options.host_gb = True, False, True, 0
    return options


def evict_all(engine) -> None:
    """The device's copies of everything that the host has."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    engine.settle()
    engine.tree.evict_for_alloc(EvictParams(num_tokens=engine.options.tokens))
    engine.settle()


def host_of(engine):
    return engine.tree.host_pool_group.anchor_entry.host_pool


class Scenario:
    def __init__(self, options, rank: int) -> None:
        from sglang_engine import PAGE, Engine

        self.options, self.rank, self.page = options, rank, PAGE
        self.make = lambda **more: Engine(SimpleNamespace(**vars(options) | more), rank, None)

    def say(self, what: str) -> None:
        if self.rank == 0:
            print(f"  {what}", flush=True)

    def all_ranks(self, value) -> list:
        import torch.distributed as dist

        found = [None] * self.options.ranks
        dist.all_gather_object(found, value)
        return found

    def run(self) -> None:
        for step in (self.there_and_back, self.many, self.not_shared, self.left_out, self.disagree):
            step()

    def there_and_back(self) -> None:
        engine, tokens = self.make(), sglang_package.prompt(1, 64)
        host = host_of(engine)
        assert type(host).__name__ == "SharedMLATokenToKVPoolHost", type(host)
        assert len(set(self.all_ranks(host.shared.path))) == 1
        before, rounds, brought = host.member.stats(), 0, []
        assert engine.serve(tokens) == (0, 0)
        while not any(each.get("passed_on") for each in brought):  # a rank that is late on a busy machine takes no part
            assert rounds < 50, brought
            rounds += 1
            evict_all(engine)
            assert engine.serve(tokens) == (0, len(tokens))
            now = host.member.stats()
            brought = self.all_ranks({name: now[name] - before[name] for name in now if now[name] != before[name]})
        row = host.kv_buffer[0].clone()
        self.all_ranks(None)  # nobody writes now
        if self.rank == self.options.ranks - 1:
            host.kv_buffer[0] = 7
        self.all_ranks(None)
        assert (host.kv_buffer[0] == 7).all(), "the memory is not that of all ranks"
        self.all_ranks(None)
        host.kv_buffer[0] = row
        engine.settle()
        engine.tree.sanity_check()
        self.say(f"{len(tokens)} tokens stored, {rounds} times loaded, all bytes right; by rank: {brought}")
        engine.close()

    def many(self) -> None:
        for policy in ("write_through", "write_through_selective", "write_back"):
            engine = self.make(write_policy=policy, tokens=self.options.tokens // 2)  # the host holds twice as much
            chosen = random.Random(self.options.seed)
            own, hits, tokens, freed = random.Random(self.rank), 0, 0, []
            host, free = host_of(engine), host_of(engine).free
            host.free = lambda indices, free=free, freed=freed: freed.append(len(indices)) or free(indices)
            trunks = [sglang_package.prompt(100 + i, 6) for i in range(8)]
            for number in range(self.options.prompts):
                prompt = chosen.choice(trunks)[: chosen.randrange(1, 7) * self.page]
                prompt = prompt + sglang_package.prompt(chosen.randrange(200, 260), chosen.randrange(1, 9))
                if own.random() < 0.1:
                    time.sleep(own.random() * 0.01)
                found = engine.serve(prompt)[1]
                hits, tokens = hits + found, tokens + len(prompt)
                if number % 3 == 0:
                    engine.settle()
                if number % 10 == 0:
                    evict_all(engine)
                if number % 50 == 49:  # as SGLang flushes: what is under way is forgotten
                    engine.tree.reset()
                    engine.allocator.clear()
            engine.settle()
            engine.tree.sanity_check()
            assert hits > tokens / 10 and (freed or policy == "write_through_selective"), (hits, freed)
            assert len({str(each) for each in self.all_ranks((host.numbers, freed))}) == 1
            self.say(
                f"{policy}: {self.options.prompts} random prompts: {hits} of {tokens} tokens not computed, "
                f"{engine.checked} tokens of layers compared; {host.numbers['H2D']} loads and {host.numbers['D2H']} "
                f"stores, {sum(freed)} tokens evicted from the host"
            )
            engine.close()

    def not_shared(self) -> None:
        for more in ({"mla": False}, {"layout": "layer_first"}):
            engine, tokens = self.make(**more), sglang_package.prompt(1, 8)
            assert getattr(host_of(engine), "shared", None) is None
            engine.serve(tokens)
            evict_all(engine)
            assert engine.serve(tokens) == (0, len(tokens))
            engine.close()
        self.say("K and V of heads, and layer_first: each rank has its own host pool")

    def left_out(self) -> None:
        """The bytes say so. The engine cannot go on after it."""
        from kvswap.sglang._shared import SharedPlaces

        engine, tokens, submit = self.make(), sglang_package.prompt(7, 6), SharedPlaces.submit
        engine.serve(tokens)
        evict_all(engine)
        SharedPlaces.submit = lambda places, ids, *rest: submit(places, tuple(each[:-1] for each in ids), *rest)
        for _, _, buffer in engine.parts:
            buffer.fill_(0)
        try:
            engine.serve(tokens)
        except AssertionError as error:
            self.say(f"a block that was left out is found: {error}")
        else:
            raise AssertionError("a block was left out, and this test did not notice")
        finally:
            SharedPlaces.submit = submit

    def disagree(self) -> None:
        import kvswap

        engine = self.make()
        engine.serve(sglang_package.prompt(8, 6))
        engine.settle()
        if self.rank == 1:
            host_of(engine).alloc(self.page)
        engine.serve(sglang_package.prompt(9, 6))
        engine.tree.flush_pending_backups()
        try:
            engine.tree.cache_controller.ack_write_queue[-1].finish_event.synchronize()
        except kvswap.Error as error:
            self.say(f"ranks that do not agree on their pages: {error}")
        else:
            raise AssertionError("ranks do not agree on their pages, and the store succeeded")


def rank_of(options: argparse.Namespace, rank: int, port: int) -> None:
    os.environ["KVSWAP_SGLANG_SHARE"] = "1"
    sglang_package.start(options, rank, port)
    from kvswap import share

    join = share.join
    share.join = lambda *given, **named: join(*given, piece_nbytes=8 << 10, **named)  # pools are small here
    scenario = Scenario(options, rank)
    if rank == 0:
        from sglang_engine import VERSION

        print(f"SGLang {VERSION}, {options.layout}, MLA, {options.ranks} ranks, one host pool", flush=True)
    scenario.run()


def main() -> int:
    return sglang_package.run_ranks(rank_of, parse())


if __name__ == "__main__":
    result = main()
    sys.stdout.flush()
    os._exit(result)
