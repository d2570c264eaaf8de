"""A real SGLang with kvswap's storage backend: its radix tree, its cache controller, its host pools, real pages.

    python tests/integration/sglang_package.py SOURCE [--layout page_first_direct] [--mla | --swa] [--ranks 2]
                                               [--copies]

SOURCE: a folder with SGLang's package in it (pip download --no-deps sglang; unzip), or nothing: the one that is
installed. Nothing of SGLang is compiled; no GPU is needed. No model runs: sglang_engine.py writes each token's KV as a
function of the tokens up to it, and checks the bytes of every token that SGLang counts as computed, so that a page that
was loaded wrong, or not at all, is found.

It runs: cold prompts (computed, backed up to files), the same from nothing but the files, a restart, prefixes,
eviction, a full disk, reads and writes that fail, damaged files, SGLang's own HiCacheStorageFailureInjector, an engine
that is killed while it stores, and a page that is left out in silence. --ranks: tensor-parallel ranks in processes of
their own; with --mla one writes what all read, else each has files of its own. --copies: the copies between device and
host memory are kvswap's too, by SGLang's plugin hook, on streams that run beside it.
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import errno
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", nargs="?", help="folder with SGLang's package; default: the installed one")
    parser.add_argument(
        "--layout", choices=["page_first_direct", "page_first", "layer_first"], default="page_first_direct"
    )
    parser.add_argument("--mla", action="store_true", help="a latent a token, in place of K and V")
    parser.add_argument("--swa", action="store_true", help="a layer with a sliding window beside two without")
    parser.add_argument("--copies", action="store_true", help="kvswap's copies; page_first has no others here")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks, a process each")
    parser.add_argument("--tokens", type=int, default=2048, help="of the device's pool; the host's is twice as large")
    parser.add_argument("--kills", type=int, default=3, help="how often an engine is killed while it stores")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.layout == "page_first" and not options.copies:
        parser.error("--layout page_first needs --copies")
    return options


def prompt(seed: int, pages: int) -> list[int]:
    from sglang_engine import PAGE

    chosen = random.Random(seed)
    return [chosen.randrange(50_000) for _ in range(pages * PAGE)]


def start(options: argparse.Namespace, rank: int, port: int) -> None:
    """In the process of a rank."""
    os.environ.setdefault("SGLANG_LOGGING_LEVEL", "warning")
    warnings.filterwarnings("ignore")
    sys.path[:0] = [str(Path(__file__).parent), *([str(Path(options.source).resolve())] if options.source else [])]
    import torch.distributed as dist

    if options.copies:
        os.environ["KVSWAP_SGLANG_COPIES"] = "1"
        import sglang_engine  # noqa: F401  # what stands in comes before SGLang's modules
        import sglang_plugin

        sglang_plugin.use_streams()
        sglang_plugin.load_plugins()
    place = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=options.ranks)


class Scenario:
    """The same steps on every rank."""

    def __init__(self, options: argparse.Namespace, rank: int, folder: Path) -> None:
        from sglang_engine import PAGE, Engine

        from kvswap import testing

        self.options, self.rank, self.folder, self.page, self.testing = options, rank, folder, PAGE, testing
        self.make = lambda name="kv", **extra: Engine(options, rank, folder / name, **extra)
        self.last = rank == options.ranks - 1
        self.checked = 0

    def say(self, what: str) -> None:
        if self.rank == 0:
            print(f"  {what}", flush=True)

    def end(self, engine: Any) -> None:
        engine.close()
        self.checked += engine.checked

    def run(self) -> None:
        for step in (
            self.there_and_back,
            self.layouts,
            self.evictions,
            self.faults,
            self.injected,
            self.killed,
            self.left_out,
        ):
            step()

    def there_and_back(self) -> None:
        first, page = prompt(1, 12), self.page
        engine = self.make()
        assert engine.serve(first) == (0, 0)
        assert engine.again(first) == 12 * page
        self.say(f"stored and loaded: {12 * page} of {len(first)} tokens came from files, all bytes checked")
        branches = [first[: 5 * page] + prompt(seed, 4) for seed in (2, 3, 4)]
        engine.forget()
        hits = [engine.serve(tokens)[1] for tokens in branches]
        assert hits == [5 * page] * 3, hits
        engine.forget()
        hits = [engine.serve(tokens)[0] for tokens in [*branches, first]]
        assert hits == [9 * page, 4 * page, 4 * page, 7 * page], hits
        self.say("three prompts with a common prefix: whole from files, the prefix loaded once")
        self.end(engine)
        engine = self.make()
        assert engine.again(first) == 12 * page
        self.say("an engine that starts anew finds them")
        writers = [path.parent.name for path in (self.folder / "kv").rglob("segment-00000000.kvs")]
        expected = 1 if self.options.mla else self.options.ranks * (2 if self.options.swa else 1)
        assert len(writers) == expected, writers
        self.say(f"{self.options.ranks} ranks, {expected} stores")
        if self.options.mla and self.options.ranks > 1:
            stored = engine.storage._pages["kv"].store.writes
            assert stored == (self.rank == 0), "the rank that SGLang names writes"
        self.replica(engine)
        self.end(engine)

    def replica(self, engine: Any) -> None:
        """The storage of another engine on this machine, without the engine itself, finds what this engine stores."""
        from kvswap.sglang import FileStorage

        tokens, storage = prompt(8, 4), FileStorage(engine.tree.cache_controller.storage_config, {})
        for entry in engine.tree.host_pool_group.entries:
            storage.register_mem_host_pool_v2(entry.host_pool, entry.name)
        storage.on_host_pools_registered()
        engine.serve(tokens)
        engine.settle()
        end = time.monotonic() + 60
        while True:
            known = list(storage._pages["kv"].store._store.keys())
            keys = sorted({key.decode().partition(".")[0] for key in known})
            if len(keys) == 28 and storage.batch_exists(keys) == 28:  # 12 and three times 4, and the 4 of this prompt
                break
            assert time.monotonic() < end, f"a second engine finds {len(keys)} pages"
            time.sleep(0.05)
        storage.close()
        self.say(f"a second engine on the same folder finds {len(keys)} pages while the first one runs")

    def layouts(self) -> None:
        """Pages of SGLang's host pools in layouts whose copies to the device need a GPU, through the storage alone."""
        import torch

        from kvswap.sglang import FileStorage

        if self.options.swa:
            return
        engine, page = self.make("layouts"), self.page
        config = engine.tree.cache_controller.storage_config
        layouts = ["page_first", "layer_first"] if self.options.mla else ["page_first", "page_head", "layer_first"]
        layouts = [layout for layout in layouts if layout != self.options.layout]  # that one is the engine's
        for layout in layouts:
            storage, host = FileStorage(config, {}), engine.host_pool(layout)
            storage.register_mem_pool_host(host)
            storage.on_host_pools_registered()
            keys, rows = [f"{layout}-{i}" for i in range(9)], torch.arange(9 * page)
            before = [host.get_data_page(i * page).view(torch.int16).clone() for i in range(9)]
            if storage._pages["kv"].store.writes:
                assert storage.batch_set_v1(keys, rows) == [True] * 9
            self.meet()
            host.kv_buffer.view(torch.int16).fill_(-7)
            end = time.monotonic() + 60
            while storage.batch_exists([*keys, "none"]) != 9:  # of MLA, on a rank that reads
                assert time.monotonic() < end, "pages are not found"
                time.sleep(0.01)
            assert storage.batch_get_v1(list(reversed(keys)), rows) == [True] * 9
            after = [host.get_data_page(i * page).view(torch.int16) for i in range(9)]
            assert all(torch.equal(*each) for each in zip(after, reversed(before), strict=True)), layout
            storage.close()
        self.say(f"pages of SGLang's host pools in the layouts {', '.join(layouts)}")
        self.end(engine)

    def meet(self) -> None:
        import torch.distributed as dist

        dist.barrier()

    def evictions(self) -> None:
        engine = self.make("small", capacity=200 * 1024)
        prompts = [prompt(100 + i, 6) for i in range(12)]
        for tokens in prompts:
            engine.serve(tokens)
            engine.settle()
        hits = [engine.again(tokens) for tokens in reversed(prompts)]
        assert hits[0] == 6 * self.page and hits[-1] == 0, hits
        self.say(f"files of 200 KiB: of 12 prompts the newest {sum(hit > 0 for hit in hits)} are there")
        self.end(engine)

    def fault(self, engine: Any, call: str, **how: Any) -> Any:
        """On the last rank; of MLA on the one that writes."""
        here = self.rank == 0 if self.options.mla and call == "write" else self.last
        return self.testing.file_fault(engine.files, call, "fail", **how) if here else nullcontext()

    def faults(self) -> None:
        engine, page = self.make("faults"), self.page
        tokens = prompt(5, 8)
        with self.fault(engine, "write", every=1, code=errno.ENOSPC):
            engine.serve(tokens)
            engine.settle()
        assert engine.again(tokens) == 0
        end, hits = time.monotonic() + 60, [0]
        while hits[-1] != 8 * page:  # files that could not grow are tried again after a pause
            assert time.monotonic() < end, hits
            time.sleep(0.3)
            hits.append(engine.again(tokens))
        self.say("a full disk: nothing is offered, the engine goes on, and later it is stored")
        other = prompt(6, 8)
        with self.fault(engine, "write", nth=4):
            engine.serve(other)
            engine.settle()
        hits = engine.again(other)
        assert 0 <= hits < 8 * page, hits
        assert engine.again(other) == 8 * page
        self.say(f"one write that fails: {hits} tokens of a prefix are offered")
        engine.forget()
        with self.fault(engine, "read", nth=5):
            _, hits = engine.serve(other)
        assert hits < 8 * page, hits
        self.say(f"a read that fails: {hits} tokens are loaded, the others computed")
        engine.forget()
        if not self.options.mla or self.rank == 0:
            damage(engine)
        engine.until(lambda: True, "the damage")
        _, hits = engine.serve(tokens)
        assert hits < 8 * page, hits
        engine.settle()
        assert engine.again(tokens) == 8 * page
        self.say(f"a damaged page: {hits} tokens before it are loaded; it is stored again")
        self.end(engine)

    def injected(self) -> None:
        os.environ |= {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.25"}
        os.environ |= {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.005"}
        engine = self.make("injected")
        kind = type(engine.tree.cache_controller.storage_backend).__name__
        assert kind == "HiCacheStorageFailureInjector", kind
        chosen, served = random.Random(self.options.seed), [0, 0]
        prompts = [prompt(200 + i // 3, 4) + prompt(300 + i, 5) for i in range(9)]
        for _ in range(60):
            if chosen.random() < 0.5:
                engine.forget()
            from_files, known = engine.serve(chosen.choice(prompts))
            served[0] += from_files
            served[1] += known
        assert served[0] > 0
        self.say(f"{kind}: 60 prompts, {served[0]} tokens from files, {served[1]} not computed, all bytes right")
        self.end(engine)
        del (
            os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"],
            os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY"],
        )

    def killed(self) -> None:
        if self.options.ranks > 1:
            return  # gloo's other ranks would end with it
        hits = []
        for kill in range(self.options.kills):
            own = multiprocessing.get_context("spawn")
            told = own.Event()
            victim = own.Process(target=store_until_killed, args=(self.options, self.folder, told, kill), daemon=True)
            victim.start()
            assert told.wait(240), "the other engine does not start"
            time.sleep(random.Random(kill).random() * 0.3)
            os.kill(victim.pid, signal.SIGKILL)
            victim.join(60)
            engine = self.make("killed")
            found = [engine.again(prompt(1000 * kill + i, 6)) for i in range(4)]
            assert found[0] == 6 * self.page, "a prompt that was stored is lost"
            hits.append(sum(found))
            self.end(engine)
        self.say(f"{len(hits)} engines killed while they stored: {hits} tokens of what they stored, all bytes right")

    def left_out(self) -> None:
        """A page that is told as loaded, and was not: the bytes say so. The engine cannot go on after it."""
        from kvswap.sglang._pages import Pages

        engine, tokens = self.make("left-out"), prompt(7, 6)
        engine.serve(tokens)
        engine.forget()
        move = Pages.load

        def but_one(pages: Any, keys: list[str], indices: Any) -> list[bool]:
            return [*move(pages, keys[:-1], indices[: (len(keys) - 1) * self.page]), True]

        Pages.load = but_one
        try:
            engine.serve(tokens)
        except AssertionError as error:
            self.say(f"a page that was left out in silence is found: {error}")
        else:
            raise AssertionError("a page was left out, and this test did not notice")
        finally:
            Pages.load = move


def damage(engine: Any) -> None:
    """One bit of the data of a page in the middle of the prompt."""
    from sglang_engine import PAGE

    (folder,) = engine.storage._pages["kv"].store.folders
    for path in sorted(folder.rglob("segment-*.kvs")):
        content = bytearray(path.read_bytes())
        marks = [at for at in range(4096, len(content), 4096) if content[at : at + 8] == b"KVSBLOCK"]
        content[marks[len(marks) // 4] + 4096 + PAGE] ^= 1
        path.write_bytes(content)


def store_until_killed(options: argparse.Namespace, folder: Path, told: Any, kill: int) -> None:
    start(options, 0, free_port())
    scenario = Scenario(options, 0, folder)
    engine = scenario.make("killed")
    engine.serve(prompt(1000 * kill, 6))
    engine.settle()
    told.set()
    for i in range(1, 10_000):
        engine.serve(prompt(1000 * kill + i, 6))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def rank_of(options: argparse.Namespace, rank: int, port: int, folder: Path) -> None:
    start(options, rank, port)
    scenario = Scenario(options, rank, folder)
    if rank == 0:
        from sglang_engine import VERSION

        kind = "MLA" if options.mla else "MHA with a sliding window" if options.swa else "MHA"
        what = "storage and copies" if options.copies else "storage"
        print(f"SGLang {VERSION}, {options.layout}, {kind}, {options.ranks} rank(s), kvswap's {what}", flush=True)
    scenario.run()
    scenario.say(f"{scenario.checked} tokens of layers checked on rank 0: all right")


def run_ranks(rank_of: Callable[..., None], options: argparse.Namespace, *more: object) -> int:
    """Run `rank_of(options, rank, port, *more)` for each rank, in a process of its own if there are several. Returns
    the exit status."""
    port = free_port()
    if options.ranks == 1:
        rank_of(options, 0, port, *more)
        return 0
    own = multiprocessing.get_context("spawn")
    ranks = [own.Process(target=rank_of, args=(options, i, port, *more)) for i in range(options.ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory() as name:
        return run_ranks(rank_of, options, Path(name))


if __name__ == "__main__":
    result = main()
    sys.stdout.flush()
    os._exit(result)  # threads of SGLang's storage of the engine that was not closed
