"""Coded pages in a real SGLang: KVSWAP_SGLANG_CODEC, with its radix tree, its cache controller and its host pools.

    python tests/integration/sglang_codec.py SOURCE [--codec exact] [--layout page_first_direct] [--mla] [--ranks 2]

SOURCE as for sglang_package.py. No GPU is needed. Of each token whose KV SGLang counts as computed, every byte is
compared. It runs: prompts that go out to coded host memory and come back; how many pages the same bytes of host memory
hold; pages that do not fit, on the last rank only: a prefix ends there on all; random prompts, more than the host
holds; drafts; a spoilt coded page, which is found, or with KVSWAP_VERIFY_CODEC=1 is no hit; what is refused; coded
pages in files.
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
from types import SimpleNamespace

import sglang_package

PINNED = []  # buffers
WILD = 50_000  # a token from which on the KV of a page does not fit


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", nargs="?", help="folder with SGLang's package; default: the installed one")
    parser.add_argument("--codec", default="exact")
    parser.add_argument(
        "--layout", choices=["page_first_direct", "page_first", "layer_first"], default="page_first_direct"
    )
    parser.add_argument("--mla", action="store_true", help="a latent a token, in place of K and V")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks, a process each")
    parser.add_argument("--tokens", type=int, default=2048, help="of the device's pool")
    parser.add_argument("--prompts", type=int, default=150, help="random ones")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.copies, options.swa, options.host_gb = True, False, 0
    return options


def pin(buffer, *given) -> None:
    """In the place of cudaHostRegister: kvswap's host device then knows it from the device's tensors, which are of the
    same memory here. It stays so: the address is nothing else's."""
    import kvswap

    kvswap.Device("host:0").register(buffer.data_ptr(), buffer.nbytes)
    PINNED.append(buffer)


def evict_all(engine) -> None:
    """The device's copies of everything that the host has."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    engine.settle()
    engine.tree.evict_for_alloc(EvictParams(num_tokens=engine.options.tokens))
    engine.settle()


class Scenario:
    def __init__(self, options, rank: int) -> None:
        import torch
        from sglang_engine import PAGE, Engine

        class Coded(Engine):
            def values(self, tokens, begin, part, layer, width):
                """bf16 that the codec gives back: any sign, seven exponents, a mantissa of one bit. Of a wild token
                on the last rank: any exponent."""
                bits = super().values(tokens, begin, part, layer, width).to(torch.int64)
                tame = bits & 1 << 15 | (bits % 7 + 121) << 7 | (bits & 8) << 3
                if options.codec == "fp4":
                    tame = bits & 1 << 15 | 0x40C0  # 6, the largest element: its scale is 1
                wild = (torch.tensor(tokens[begin:]) == WILD) & (self.rank == options.ranks - 1)
                tame[wild] = (torch.arange(width) * 29 % 251 + 1) << 7
                return torch.where(tame >= 1 << 15, tame - (1 << 16), tame).to(torch.int16)

        self.options, self.rank, self.page = options, rank, PAGE
        self.make = lambda folder=None, **more: Coded(SimpleNamespace(**vars(options) | more), rank, folder)
        self.checked = 0

    def say(self, what: str) -> None:
        if self.rank == 0:
            print(f"  {what}", flush=True)

    def run(self) -> None:
        for step in (
            self.there_and_back,
            self.more_pages,
            self.misfits,
            self.many,
            self.drafts,
            self.spoilt,
            self.refusals,
            self.files,
        ):
            step()

    def there_and_back(self) -> None:
        engine, tokens = self.make(), sglang_package.prompt(1, 12)
        assert engine.serve(tokens) == (0, 0)
        evict_all(engine)
        assert engine.serve(tokens) == (0, len(tokens))
        host = engine.tree.host_pool_group.anchor_entry.host_pool
        self.say(f"{type(host).__name__}: {len(tokens)} tokens stored and loaded, all bytes right")
        engine.close()

    def more_pages(self) -> None:
        gigabytes = 64 * 1024 * 192 / 1e9
        engine = self.make(host_gb=gigabytes)
        host = engine.tree.host_pool_group.anchor_entry.host_pool
        parts, row = (1, 128) if self.options.mla else (2, 64)
        uncoded = int(gigabytes * 1e9 // (parts * host.layer_num * row)) // self.page + 1
        assert host.kv_buffer.numel() <= gigabytes * 1e9 + 2 * host.slot_nbytes, host.kv_buffer.shape
        ratio = host.page_num / uncoded
        assert ratio > (1.2 if self.options.codec == "exact" else 1.8), ratio
        self.say(f"{gigabytes * 1e9:.0f} bytes of host memory: {host.page_num} pages, {uncoded} uncoded: {ratio:.2f}")
        engine.close()

    def misfits(self) -> None:
        if self.options.codec != "exact":
            return
        engine, page = self.make(), self.page
        host = engine.tree.host_pool_group.anchor_entry.host_pool
        tokens = sglang_package.prompt(2, 12)
        tokens[5 * page : 6 * page] = [WILD] * page
        other = tokens[: 3 * page] + sglang_package.prompt(3, 5)
        for _ in range(2):
            for each in (tokens, other):
                engine.serve(each)
            evict_all(engine)
            assert engine.serve(tokens) == (0, 5 * page), "the prefix ends before the page that did not fit"
            assert engine.serve(tokens) == (0, 12 * page), "on the device it is a hit like any other"
            evict_all(engine)
            assert engine.serve(other) == (0, 8 * page)
        assert host.not_stored == 1 and host.missing.sum() == 1, (host.not_stored, host.missing.sum())
        first = sglang_package.prompt(4, 4)
        first[0] = WILD
        engine.serve(first)
        evict_all(engine)
        assert engine.serve(first) == (0, 0)
        engine.settle()
        engine.tree.sanity_check()
        engine.tree.reset()
        engine.allocator.clear()
        assert not host.missing.any(), "freed pages are as good as any"
        self.say("a page that does not fit, on the last rank: prefixes end before it, on all ranks")
        engine.close()

    def many(self) -> None:
        engine, chosen, page = self.make(), random.Random(self.options.seed), self.page
        hits = tokens = 0
        trunks = [sglang_package.prompt(100 + i, 6) for i in range(8)]
        for number in range(self.options.prompts):
            prompt = chosen.choice(trunks)[: chosen.randrange(1, 7) * page]
            prompt = prompt + sglang_package.prompt(chosen.randrange(200, 260), chosen.randrange(1, 9))
            if chosen.random() < 0.3:
                prompt[chosen.randrange(len(prompt))] = WILD
            found = engine.serve(prompt)[1]
            hits, tokens = hits + found, tokens + len(prompt)
            if number % 3 == 0:
                engine.settle()
            if number % 10 == 0:
                evict_all(engine)
        engine.settle()
        engine.tree.sanity_check()
        host = engine.tree.host_pool_group.anchor_entry.host_pool
        assert hits > tokens / 10 and (self.options.codec != "exact" or host.not_stored), (hits, host.not_stored)
        self.say(
            f"{self.options.prompts} random prompts: {hits} of {tokens} tokens not computed, {host.not_stored} pages "
            f"did not fit, {engine.checked} tokens of layers compared"
        )
        self.checked += engine.checked
        engine.close()

    def drafts(self) -> None:
        """Packed drafts, and both of SGLang's cache controllers."""
        import sglang_copies
        import torch
        from sglang.srt.managers import cache_controller

        sglang_copies.Cache.pinned = True
        get_parallel = cache_controller.get_parallel
        cache_controller.get_parallel = lambda: SimpleNamespace(attn_dcp_size=1, attn_dcp_rank=0)
        for hybrid, drafts in ((True, 0), (True, 3), (False, 0)):
            cache = sglang_copies.Cache("MLA" if self.options.mla else "MHA", self.options.layout, hybrid, drafts)
            for number, at in enumerate(cache.each()):
                rows = cache.device_rows(*at)
                rows[:] = 0x40C0 + (torch.arange(len(rows)) * 7 + number)[:, None] % 2 * -(1 << 15)
            tokens = cache.allocator.alloc(4 * sglang_copies.PAGE)
            host, wanted = cache.controller.write(tokens, node_id=1), {}
            cache.settle()
            for at in cache.each():
                wanted[at] = cache.device_rows(*at)[tokens].clone()
                cache.device_rows(*at)[tokens] = 7
            back = cache.controller.load(host)
            cache.await_layers(cache.controller.start_loading(), lambda layer: None)
            cache.settle()
            for at in cache.each():
                assert torch.equal(cache.device_rows(*at)[back], wanted[at]), (hybrid, drafts, at)
        cache_controller.get_parallel = get_parallel
        self.say("HiCacheController, HybridCacheController, drafts: all bytes right")

    def spoilt(self) -> None:
        import kvswap
        from kvswap import testing

        engine, tokens = self.make(), sglang_package.prompt(5, 6)
        with testing.fault(kvswap.Device("host:0"), "code", "spoil", nth=3):
            engine.serve(tokens)
            engine.settle()
        evict_all(engine)
        if os.environ.get("KVSWAP_VERIFY_CODEC") == "1":
            known = engine.serve(tokens)[1]
            assert known < len(tokens), "the spoilt page is a hit"
            self.say(f"a spoilt page is no hit: {known} of {len(tokens)} tokens are loaded, all bytes right")
            return
        try:
            engine.serve(tokens)
        except (AssertionError, kvswap.Error) as error:
            self.say(f"a spoilt page is found: {error}")
        else:
            raise AssertionError("a coded page was spoilt, and this test did not notice")

    def refusals(self) -> None:
        engine = self.make()
        done, why = engine.tree.attach_storage_backend("file")
        assert not done and "only kvswap.sglang.FileStorage takes coded pages, and this is HiCacheFile" in why, (
            done,
            why,
        )
        assert engine.tree.cache_controller.storage_backend is None and not engine.tree.enable_storage
        host = engine.tree.host_pool_group.anchor_entry.host_pool
        for call in (host.get_dummy_flat_data_page, host.get_data_page, host.backup_from_device_all_layer):
            try:
                call(0)
            except NotImplementedError as error:
                assert "coded pages" in str(error)
            else:
                raise AssertionError(call)
        self.say("SGLang's own storage backend is refused")
        engine.close()

    def files(self) -> None:
        """kvswap's storage backend: from nothing but the files, in the same engine and in the next one."""
        folder = sglang_package.Path(tempfile.gettempdir()) / f"kvswap-coded-{os.getppid()}"
        engine, tokens = self.make(folder=folder), sglang_package.prompt(6, 12)
        assert engine.serve(tokens) == (0, 0)
        assert engine.again(tokens) == len(tokens)
        wild, stored = sglang_package.prompt(7, 12), 12
        if self.options.codec == "exact" and not (self.options.mla and self.options.ranks > 1):
            wild[5 * self.page], stored = WILD, 5  # of MLA the last rank alone has it, and the first one stores for all
        assert engine.serve(wild) == (0, 0)
        assert engine.again(wild) == stored * self.page, "files end before the page that did not fit"
        engine.close()
        engine = self.make(folder=folder)
        assert engine.serve(tokens) == (len(tokens), len(tokens))
        assert engine.serve(wild)[0] == stored * self.page
        (coding,) = engine.storage._pages["kv"].layout.codings
        assert coding.codec == self.options.codec and coding == engine.storage._pages["kv"].pool.page_coding
        engine.close()
        shutil.rmtree(folder, ignore_errors=True)
        self.say(f"files: {len(tokens)} tokens stored coded and loaded, also by the next engine, all bytes right")


def rank_of(options: argparse.Namespace, rank: int, port: int) -> None:
    os.environ["KVSWAP_SGLANG_CODEC"] = options.codec
    sglang_package.start(options, rank, port)
    from sglang.srt.mem_cache.pool_host import common

    common._cuda_host_register = pin
    scenario = Scenario(options, rank)
    if rank == 0:
        from sglang_engine import VERSION

        kind = "MLA" if options.mla else "MHA"
        print(f"SGLang {VERSION}, {options.codec}, {options.layout}, {kind}, {options.ranks} rank(s)", flush=True)
    scenario.run()


def main() -> int:
    return sglang_package.run_ranks(rank_of, parse())


if __name__ == "__main__":
    result = main()
    sys.stdout.flush()
    os._exit(result)
