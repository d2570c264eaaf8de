"""benchmarks/serving without an engine: its tables, options and the package that it carries."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not (ROOT / "benchmarks" / "serving").exists(), reason="a source package has no benchmarks"
)


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def hits(config, repeat, ttft, run=1, cached=4080, probe=1.0):
    record = {"ttft_ms": [ttft], "cached": [cached], "floor_ms": [5.0], "floor_cached": [4080]}
    line = {"run": run, "regime": "r", "config": config, "phase": "hits", "repeat": repeat, "record": record}
    return {**line, "probe_ms": probe}


class TestTable:
    def rows(self, lines):
        from serving import table

        return {row.split("  ")[0]: row for row in table.tables(lines).splitlines()}

    def test_ratios_are_of_pairs(self):
        """Medians are 20 and 10; the pairs' ratios 0.5, 0.25 and 1."""
        theirs, ours = (20.0, 40.0, 10.0), (10.0, 10.0, 10.0)
        lines = [hits("native", i, ttft) for i, ttft in enumerate(theirs)]
        lines += [hits("kvswap", i, ttft) for i, ttft in enumerate(ours)]
        assert "20" in (row := self.rows(lines)["TTFT, the host has it, ms"])
        assert "10 (0.50, 0.25-1.00)" in row

    def test_the_least_and_the_largest_of_the_turns(self):
        lines = [hits("native", i, ttft) for i, ttft in enumerate((20.0, 40.0, 10.0))] + [hits("kvswap", 0, 5.0)]
        assert any(row == "turns, TTFT, the host has it, ms: native 10-40" for row in self.rows(lines))

    def test_no_pair_across_two_runs(self):
        lines = [hits("native", 0, 20.0, run=1), hits("kvswap", 0, 10.0, run=2)]
        assert "(" not in self.rows(lines)["TTFT, the host has it, ms"]

    def test_turns_at_two_speeds_of_the_processor_are_no_pair(self):
        lines = [hits("native", 0, 20.0), hits("native", 1, 20.0, probe=1.5)]
        lines += [hits("kvswap", 0, 10.0), hits("kvswap", 1, 19.0)]
        rows = self.rows(lines)
        assert "(0.50)" in rows["TTFT, the host has it, ms"]
        assert any("1.50 times slower" in row for row in rows)

    def test_a_prompt_that_the_host_did_not_have_is_not_a_hit(self):
        lines = [hits("native", 0, 90.0, cached=0), hits("kvswap", 0, 10.0)]
        row = self.rows(lines)["TTFT, the host has it, ms"]
        assert "90" not in row and "10" in row

    def test_host_memory_for_as_many_blocks(self):
        """13 GiB that hold 6,656 blocks, or 8,711 coded ones."""
        about = {"run": 1, "regime": "r", "about": {"host_gib": 13.0, "host_blocks": 6656}}
        coded = {"run": 1, "regime": "r", "about": {"host_gib": 13.0, "host_blocks": 8711}}
        lines = [{**about, "config": "native"}, {**coded, "config": "kvswap-exact"}]
        row = self.rows(lines)["host memory for 4,096 blocks, GiB"]
        assert row.split("GiB")[1].split()[:2] == ["8", "6.113"]

    def test_blocks_that_differ_are_named(self):
        record = {"blocks": [100, 100], "differ": [0, 3], "distinct": 100}
        lines = [hits("native", 0, 1.0)]
        lines.append({"run": 1, "regime": "r", "config": "native", "phase": "truth", "repeat": 0, "record": record})
        assert "truth, native: 3 of 200 blocks differ, 100 distinct" in self.rows(lines)
        lossy = {**lines[-1], "config": "kvswap-mxfp8", "record": {**record, "differ": [0], "changed": 99}}
        assert any("two loads are compared, 99 blocks differ from those" in row for row in self.rows([lossy]))

    def line(self, phase, record, config="simple", repeat=0):
        return {"run": 1, "regime": "r", "config": config, "phase": phase, "repeat": repeat, "record": record}

    def test_a_phase_without_what_it_is_about_has_no_figure_and_says_so(self):
        from serving import table

        fast = {"tokens_per_s": 9000}
        lines = [self.line("burst", {**fast, "short": ["tokens that the host had: 0 of 100"]})]
        lines.append(self.line("burst", fast, config="kvswap"))
        text = table.tables(lines)
        assert "NOT MEASURED: simple, burst, turn 0: tokens that the host had: 0 of 100" in text.splitlines()
        assert "simple" not in text.splitlines()[2] and "9,000" in text
        assert table.faults(lines[1:], "r") == []

    def test_a_phase_that_was_asked_for_and_did_not_run(self):
        """With all its engines lost, a regime has a part of the output still."""
        from serving import table

        asked = {"run": 1, "regime": "r", "asked": ["hits", "burst", "loads"], "configs": ["nothing", "simple"]}
        failed = {"run": 1, "regime": "r", "config": "simple", "phase": "loads", "repeat": 1, "failed": "Error()"}
        assert table.faults([asked, hits("nothing", 0, 1.0), hits("simple", 0, 1.0), failed], "r") == [
            "FAILED: simple, loads, turn 1: Error()",
            "NOT MEASURED: simple: burst, loads: not run, see the log, or give it more time",
        ]
        assert table.tables([asked]).splitlines()[0] == "r"

    def test_wrong_bytes_are_a_fault(self):
        from serving import table

        truth = self.line("truth", {"blocks": [9, 9], "differ": [0, 2], "distinct": 9})
        skipped = self.line("skipped", {"blocks": 9, "differ": 0})
        wrong, blind = table.faults([truth, skipped], "r")
        assert wrong == "WRONG BYTES: simple, truth: 2 blocks differ" and blind.startswith("NOT MEASURED: simple, skip")

    def test_stores_that_did_not_keep_pace(self):
        stores = {"itl_ms": {"mean": 5.0, "p99": 6.0}, "seconds": 1.0, "streamed": 8, "planned": 10}
        assert any("8 of 10 were begun" in row for row in self.rows([self.line("stores", stores)]))
        assert not any("9 of 10" in row for row in self.rows([self.line("stores", {**stores, "streamed": 9})]))

    def test_what_steps_waited_for(self):
        own = {"layers": 11, "whole": 1}
        lines = [self.line("hits", {**hits("simple", i, 7.5)["record"], "own_steps": own}, repeat=i) for i in range(2)]
        assert any("22 waited for layer by layer, 2 as a whole" in row for row in self.rows(lines))
        lines = [self.line("hits", {**hits("simple", 0, 7.5)["record"], "own_steps": {}})]
        assert not any("layer by layer" in row for row in self.rows(lines))

    def test_of_a_file(self, tmp_path, capsys):
        """Lines without a record, of engines that started or failed, are passed over."""
        import runpy
        import sys

        path = tmp_path / "serving.jsonl"
        lines = [{"run": 1, "regime": "r", "config": "native", "about": {}}, hits("native", 0, 7.5)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        sys.argv[1:] = [str(path)]
        sys.modules.pop("serving.table", None)
        runpy.run_module("serving.table", run_name="__main__")
        assert "7.5" in capsys.readouterr().out


class TestOptions:
    def test_values_of_fields(self):
        from serving.__main__ import overrides_of

        assert overrides_of(["chunk=8", "mode=eager", "fragmented=true"]) == {
            "chunk": 8, "mode": "eager", "fragmented": True,
        }  # fmt: skip
        with pytest.raises(SystemExit, match=r"chunks=8.*chunk"):
            overrides_of(["chunks=8"])

    def test_configurations_of_vllm(self):
        from serving.configurations import environment, split, transfer_config
        from serving.regimes import regime

        made = regime("chunk8", {})
        assert transfer_config("none", made, Path()) is None
        assert transfer_config("kvswap:background", made, Path())["kv_connector_extra_config"] == {
            "cpu_bytes_to_use": 31 << 30, "blocks_per_chunk": 8, "kvswap_priority": "background",
        }  # fmt: skip
        assert transfer_config("kvswap:dma", made, Path())["kv_connector_extra_config"]["kvswap_path"] == "dma"
        assert "blocks_per_chunk" not in transfer_config("simple", made, Path())["kv_connector_extra_config"]
        assert environment("simple-kvswap") == {"KVSWAP_VLLM_SIMPLE_OFFLOAD": "1"}
        assert environment("native") == {}
        coded = transfer_config("kvswap-exact", made, Path())
        assert coded["kv_connector"] == "KVSwapConnector"
        assert coded["kv_connector_extra_config"]["kvswap_codec"] == "exact"
        with pytest.raises(SystemExit, match=r"'nativ'.*native"):
            split("nativ")

    def test_lmcache_has_the_same_host_memory(self):
        from serving.configurations import transfer_config
        from serving.regimes import regime

        made = regime("rivals", {})
        server = transfer_config("lmcache", made, Path())
        assert server["kv_connector_module_path"] == "lmcache.integration.vllm.lmcache_mp_connector"
        extra = server["kv_connector_extra_config"]
        assert f"--l1-size-gb {made.cpu_gib} " in extra["lmcache.mp.autostart.server_args"]
        assert "--chunk-size 256 " in extra["lmcache.mp.autostart.server_args"]
        assert str(extra["lmcache.mp.port"]) not in extra["lmcache.mp.autostart.server_args"]
        inside = transfer_config("lmcache-inprocess", made, Path())
        assert inside["kv_connector"] == "LMCacheConnectorV1"
        assert inside["kv_connector_extra_config"]["lmcache.max_local_cpu_size"] == made.cpu_gib

    def test_what_is_asked_of_whom(self):
        """LMCache's cache cannot be looked into; a codec with loss changes bytes."""
        from serving.configurations import takes

        assert all(takes("none", phase) for phase in ("store", "hits", "burst", "loads")) and not takes("none", "truth")
        assert takes("lmcache", "truth") and not any(takes("lmcache", phase) for phase in ("stores", "scatter"))
        assert takes("kvswap-exact", "truth") and takes("kvswap-mxfp8", "truth")
        assert takes("kvswap", "skipped") and not takes("kvswap-exact", "skipped")

    def test_pages_of_models(self):
        from serving.regimes import REGIMES

        pages = [REGIMES[name].model.page() for name in ("pages64k", "pages16k", "mla")]
        assert pages == [65536, 16384, 18432]
        assert REGIMES["one-tensor"].model.block() == 2 << 20

    def test_the_host_keeps_what_the_phases_load(self):
        """Prompts, and what decoding and the resident prompts store between two times that they are loaded; or files
        keep the prompts, and the host those of a burst."""
        from serving.models import BLOCK
        from serving.regimes import REGIMES

        for name, made in REGIMES.items():
            assert made.length % BLOCK == 1, name  # else a connector loads a block where none computes it
            host = int(made.cpu_gib * 2**30) // made.model.block()
            if name in ("files", "toy-files"):
                assert made.at_once * made.length // BLOCK <= host, name
                continue
            prompts = (made.prompts + made.resident) * made.length // BLOCK
            decoded = 3 * made.decoders * (8 + made.decode_tokens // BLOCK)
            assert prompts + decoded <= host, name


def test_the_gpus_cache_is_empty_once_a_step_has_said_that_the_last_request_ended(monkeypatch):
    """With asynchronous scheduling two steps are queued before that one: LMCache frees a request's blocks by it."""
    from serving.engine import Engine

    engine, steps = Engine.__new__(Engine), []
    monkeypatch.setattr(engine, "settle", lambda: None, raising=False)
    monkeypatch.setattr(engine, "step", lambda running: steps.append(running), raising=False)
    monkeypatch.setattr(engine, "one", lambda *_: steps.clear(), raising=False)
    engine.llm = SimpleNamespace(reset_prefix_cache=lambda: len(steps) > 2)
    engine.forget()
    assert len(steps) > 2


class TestProcess:
    @pytest.fixture
    def folder(self, monkeypatch, tmp_path):
        paths = [str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
        return tmp_path

    def test_an_engine_that_does_not_start_says_why(self, folder):
        from serving.process import Failed, Process

        engine = Process("none", "pages1k", {}, folder)
        with pytest.raises(Failed, match=r"none: SystemExit.*no regime 'pages1k'"):
            engine.ready(PATIENCE)
        with pytest.raises(Failed, match="none has ended"):
            engine.ask("hits", PATIENCE)
        engine.end()
        assert "no regime" in engine.tail()

    def test_an_engine_that_does_not_answer_is_ended(self, folder, monkeypatch):
        """A stand-in for Python that sleeps."""
        from serving import process

        sleeper = folder / "sleeper"
        sleeper.write_text("#!/bin/sh\nexec sleep 1000\n")
        sleeper.chmod(0o755)
        monkeypatch.setattr(process.sys, "executable", str(sleeper))
        engine = process.Process("native:dma", "toy", {}, folder)
        with pytest.raises(process.Failed, match="native:dma has not answered within 0 s"):
            engine.ready(0.2)
        engine.end()
        assert engine._child.returncode == -9 and engine.log.name == "log-toy-native_dma.txt"

    def test_an_engine_that_ends_leaves_nothing_in_shared_memory(self, folder):
        """vLLM makes the files (two, from 0.33 on), and only an engine that shuts down removes them."""
        from serving import configurations, process
        from serving.regimes import regime

        named = configurations.transfer_config("kvswap-files", regime("files", {}), folder)["engine_id"]
        engine = process.Process("none", "pages1k", {}, folder)
        left = Path(f"/dev/shm/vllm_offload_{named.replace(str(os.getpid()), str(engine._child.pid))}.mmap")
        files = left, Path(f"{left}.1")
        for file in files:
            file.touch()
        engine.end()
        assert not any(file.exists() for file in files)

    def test_an_engine_sees_its_gpu(self, folder, monkeypatch):
        """A stand-in for Python that answers with what it sees."""
        from serving import process

        says = folder / "says"
        says.write_text('#!/bin/sh\nfor last; do :; done\necho "{\\"gpus\\": $CUDA_VISIBLE_DEVICES}" > /dev/fd/$last\n')
        says.chmod(0o755)
        monkeypatch.setattr(process.sys, "executable", str(says))
        engine = process.Process("kvswap-lend", "toy-neighbours", {}, folder, gpu=1)
        assert engine.ready(PATIENCE) == {"gpus": 1}
        engine.end()
        assert engine.log.name == "log-toy-neighbours-kvswap-lend-gpu1.txt"


class TestNeighbours:
    @pytest.mark.parametrize(
        ("name", "keys"),
        [
            ("kvswap", set()),
            ("kvswap-lend", {"kvswap_lend"}),
            ("kvswap-replicas", {"kvswap_replicas"}),
            ("kvswap-replicas-lend", {"kvswap_lend", "kvswap_replicas"}),
        ],
    )
    def test_both_engines_have_the_same_names(self, name, keys, tmp_path):
        from serving import configurations
        from serving.regimes import regime

        made = configurations.transfer_config(name, regime("neighbours", {}), tmp_path)
        extra = made["kv_connector_extra_config"]
        assert {key for key in extra if key in ("kvswap_lend", "kvswap_replicas")} == keys
        assert all(f"serving-{os.getppid()}" in extra[key] for key in keys)
        assert made["kv_connector"] == "KVSwapConnector" and "spec_name" not in extra
        assert configurations.has_neighbour(name) == bool(keys)
        assert configurations.takes(name, "foreign") == ("kvswap_replicas" in keys)

    def test_what_a_neighbour_has_stored(self):
        from serving import table

        made = {"ttft_ms": [20.0], "cached": [4096], "blocks": 256, "differ": 0}
        line = {"run": 1, "regime": "r", "config": "kvswap-replicas", "phase": "foreign", "repeat": 0}
        text = table.tables([{**line, "record": made}])
        assert "the neighbour's prompts, kvswap-replicas: 0 of 256 blocks differ" in text
        assert "TTFT, the neighbour's prompt, ms  20" in text and "WRONG" not in text
        wrong = [{**line, "record": {**made, "differ": 2}}]
        assert "WRONG BYTES: kvswap-replicas, foreign, turn 0: 2 blocks differ" in table.faults(wrong, "r")

    def test_what_came_over_its_link_and_the_ratio_to_no_neighbour(self):
        from serving import table

        alone, lent = hits("kvswap", 0, 20.0), hits("kvswap-lend", 0, 14.0)
        for line, took in (alone, 10.0), (lent, 6.0):
            line["record"]["load"] = {"bytes": 1 << 29, "device_s": took / 1e3, "jobs": 1, "submit_ms": [0.1]}
        lent["record"]["by_neighbour"] = [1 << 28, 1 << 28]
        text = table.tables([alone, lent])
        assert "a load on the device, ms" in text and "6 (0.60)" in text and "14 (0.70)" in text
        assert "links, kvswap-lend: 0.268 GB came over the neighbour's, which counted 0.268" in text
        share = next(row for row in text.splitlines() if row.startswith("of what is loaded"))
        assert share.split()[-2:] == ["-", "0.5"]


class TestManaged:
    @pytest.mark.parametrize("word", ["block", "chunk"])
    def test_blocks_are_taken_out_and_scattered(self, word):
        """vLLM's manager of the host's cache, as far as host.Managed looks at it, before 0.30 and since."""
        from serving.host import host_of

        there = {key: SimpleNamespace(ref_cnt=0, **{f"{word}_id": i}) for i, key in enumerate("abcd")}
        policy = SimpleNamespace(get=there.get, remove=there.pop, **{f"{word}s": there})
        counts = {f"_num_{word}s": 8, f"_num_evictable_cache_{word}s": 4, f"_num_allocated_{word}s": 4}
        manager = SimpleNamespace(_policy=policy, _free_list=[], **counts)
        free = manager._free_list
        setattr(manager, f"_free_{word}", lambda block: free.append(getattr(block, f"{word}_id")))
        scheduler = SimpleNamespace(manager=manager)
        host = host_of(SimpleNamespace(connector_scheduler=scheduler, reset_cache=there.clear))
        assert host.capacity() == 8 and host.keys() == set("abcd")
        there["d"].ref_cnt = 1
        assert not host.evict({"a", "d"}) and free == []
        assert host.evict({"a", "c", "x"}) and free == [2, 0] and host.keys() == {"b", "d"}
        assert getattr(manager, f"_num_evictable_cache_{word}s") == 2
        assert host.scatter() == 8 and sorted(free) == list(range(8)) and free != sorted(free)
        assert getattr(manager, f"_num_allocated_{word}s") == 8 and not host.keys()


class Pool:
    """vLLM's BlockPool, as far as host.Pooled looks at it."""

    class Queue:
        def __init__(self, blocks):
            self.blocks = list(blocks)

        def remove(self, block):
            self.blocks.remove(block)

        def prepend_n(self, blocks):
            self.blocks[:0] = blocks

    def __init__(self, count):
        self.blocks = [SimpleNamespace(block_id=i, block_hash=None, ref_cnt=0, is_null=i == 0) for i in range(count)]
        self._cache = {}
        self.cached_block_hash_to_block = SimpleNamespace(_cache=self._cache, get_one_block=self._cache.get)
        self.free_block_queue = self.Queue(self.blocks[1:])

    def cache(self, key, number):
        self.blocks[number].block_hash = key
        self._cache[key] = self.blocks[number]
        self.free_block_queue.remove(self.blocks[number])
        self.free_block_queue.blocks.append(self.blocks[number])

    def evict_blocks(self, numbers):
        for number in numbers:
            del self._cache[self.blocks[number].block_hash]
            self.blocks[number].block_hash = None

    def free(self):
        return [block.block_id for block in self.free_block_queue.blocks]


class TestHost:
    @pytest.fixture
    def pooled(self):
        from serving.host import host_of

        pool = Pool(6)
        manager = SimpleNamespace(cpu_block_pool=pool, _store_event_to_blocks={}, reset=lambda: True)
        for key, number in (("a", 4), ("b", 2), ("c", 1)):
            pool.cache(key, number)
        return host_of(SimpleNamespace(scheduler_manager=manager)), manager, pool

    def test_blocks_of_a_pool_are_taken_out(self, pooled):
        host, _, pool = pooled
        assert host.keys() == {"a", "b", "c"} and pool.free() == [3, 5, 4, 2, 1]
        assert host.evict({"a", "b", "gone"})
        assert host.keys() == {"c"} and pool.free() == [2, 4, 3, 5, 1]

    @pytest.mark.parametrize("use", ["load", "store"])
    def test_blocks_of_a_pool_that_are_in_use_stay(self, pooled, use):
        host, manager, pool = pooled
        if use == "load":
            pool.blocks[2].ref_cnt = 1
        else:
            pool.blocks[3].block_hash = "d"
            manager._store_event_to_blocks[7] = SimpleNamespace(cpu_block_ids=[3])
        assert not host.evict({"a", "b", "d"}) and host.keys() == {"a", "b", "c"}
        assert host.evict({"a", "c"})

    def test_a_pool_is_scattered(self, pooled):
        host, manager, pool = pooled
        assert host.scatter() == 5
        assert sorted(pool.free()) == [1, 2, 3, 4, 5] != pool.free()
        manager.reset = lambda: False
        with pytest.raises(RuntimeError, match="under way"):
            host.scatter()

    def test_blocks_of_a_manager(self):
        """Which hands out the last of its free list first."""
        from serving.host import host_of

        blocks = {key: SimpleNamespace(block_id=i, ref_cnt=0) for i, key in enumerate("abc")}
        policy = SimpleNamespace(blocks=blocks, get=blocks.get, remove=blocks.pop)
        manager = SimpleNamespace(_policy=policy, _free_list=[], _num_evictable_cache_blocks=3)
        manager._free_block = lambda block: manager._free_list.append(block.block_id)
        host = host_of(SimpleNamespace(connector_scheduler=SimpleNamespace(manager=manager)))
        blocks["b"].ref_cnt = -1
        assert not host.evict({"a", "b"}) and len(host.keys()) == 3
        blocks["b"].ref_cnt = 0
        assert host.evict({"a", "b"}) and host.keys() == {"c"}
        assert manager._free_list == [1, 0] and manager._num_evictable_cache_blocks == 1

    def test_others_are_not_known(self):
        from serving.host import host_of

        assert host_of(None) is None and host_of(SimpleNamespace(connector_scheduler=SimpleNamespace())) is None


class TestSpans:
    def test_a_step_ends_with_its_update(self):
        """A connector's calls within schedule() are noted before schedule() itself."""
        from serving import spans

        found = [
            ("connector.build_connector_meta", 0.1, 0.01), ("schedule", 0.0, 0.2), ("execute", 0.2, 0.5),
            ("connector.get_finished", 0.3, 0.02), ("update", 0.8, 0.1), ("connector.get_finished", 1.0, 0.04),
            ("update", 1.1, 0.1), ("schedule", 1.2, 0.1),
        ]  # fmt: skip
        assert spans.steps(found) == pytest.approx([0.03, 0.04])
        assert spans.total(found, 0.5, 1.15) == pytest.approx({"update": 200.0, "connector.get_finished": 40.0})
        assert spans.middles(found)["connector.get_finished"] == pytest.approx(0.03)

    def test_runs_of_host_blocks(self):
        from serving.watch import Direction

        direction = Direction()
        direction.count(np.array([5, 6, 7, 20, 3, 4]))
        assert (direction.blocks, direction.runs) == (6, 3)

    def test_a_copy_thread_is_timed(self):
        from serving.watch import Direction, Watch

        watch = Watch(SimpleNamespace(transfers=None, connector_worker=None))
        assert not watch.sees
        loads, stores = object(), object()
        copy = watch._threaded(lambda *_: None, SimpleNamespace(_load_params=loads, _store_params=stores))
        launch = watch._launched(lambda *_, **__: None)
        for params, store in ((loads, False), (stores, True), (stores, True)):
            launch([1, 2], [4, 6], is_store=store, event_idx=0)
            copy([1, 2], [4, 6], params)
        assert (len(watch.load.threads), len(watch.store.threads)) == (1, 2)
        made = watch.take()
        assert made["load"]["host_blocks_a_run"] == 2.0 and made["store"]["host_blocks_a_run"] == 1.0
        assert len(made["store"]["thread_ms"]) == 2 and "thread_ms" not in Direction().record()

    def test_enough_of_what_a_phase_is_about(self):
        from serving.phases import short

        assert short("tokens:", 950, 1000) == [] and short("tokens:", 0, 0) == []
        assert short("tokens:", 949, 1000) == ["tokens: 949 of 1,000"]

    def test_sums_of_blocks_that_both_have(self):
        """A block that a window has left behind is in one of them alone."""
        from serving.sums import compare

        before, after = {("0", 0, i): (i, i) for i in range(4)}, {("0", 0, i): (i, i) for i in range(1, 5)}
        assert compare(before, after) == (3, 0)
        after["0", 0, 2] = (2, 7)  # on one of two ranks
        assert compare(before, after) == (3, 1)


class TestPackage:
    def library(self, images):
        """An ELF file with one section of one container. images: (kind, arch, bytes)."""
        body = b""
        for kind, arch, code in images:
            header = struct.pack("<HHIQ", kind, 0, 64, len(code)).ljust(28, b"\0") + struct.pack("<I", arch)
            body += header.ljust(64, b"\0") + code
        container = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
        names = b"\0.nv_fatbin\0.strings\0"
        sections = 64 + len(container) + len(names)
        header = b"\x7fELF" + bytes(36) + struct.pack("<Q", sections) + bytes(10) + struct.pack("<HHH", 64, 3, 2)
        table = [(0, 0, 0, 0, 0, 0), (1, 1, 0, 0, 64, len(container)), (12, 3, 0, 0, 64 + len(container), len(names))]
        rows = b"".join(struct.pack("<IIQQQQ", *row).ljust(64, b"\0") for row in table)
        return header.ljust(64, b"\0") + container + names + rows

    def kept(self, data):
        from serving.pack import keep_sm90

        made, _ = keep_sm90.keep(data)
        assert len(made) == len(data)
        (container,) = keep_sm90.containers(made)
        return [(image.arch, made[image.at + 64 : image.at + image.size]) for image in container.images]

    def test_images_of_other_cards_go(self):
        images = [(2, 80, b"a" * 64), (2, 90, b"b" * 128), (1, 90, b"ptx" * 16), (2, 100, b"c" * 64)]
        assert self.kept(self.library(images)) == [(90, b"b" * 128)]

    def test_a_container_without_one_keeps_the_smallest(self):
        assert self.kept(self.library([(2, 80, b"a" * 128), (2, 100, b"c" * 64)])) == [(100, b"c" * 64)]

    def test_files_of_the_wheel(self):
        from serving.pack.take_wheel import taken

        for name in ("vllm/_C_stable_libtorch.abi3.so", "vllm/a.py", "vllm-0.26.0.dist-info/METADATA"):
            assert taken(name), name
        for name in ("vllm/_flashmla_C.abi3.so", "vllm/", "vllm-0.26.0.dist-info/RECORD", "vllm/a.cubin"):
            assert not taken(name), name

    def test_what_is_built_from_is_copied(self):
        """run.sh builds kvswap in a folder of its own."""
        (listed,) = re.findall(r'cp -r --parents (.*) "\$copy"', (ROOT / "benchmarks/serving/run.sh").read_text())
        copied = {path for name in listed.split() for path in ROOT.glob(name)}
        setup = (ROOT / "setup.py").read_text() + (ROOT / "packaging/kvswap_build/extension.py").read_text()
        read = {ROOT / name for name in re.findall(r'"((?:csrc|tests|monitoring|packaging)/[\w./-]+)"', setup)}
        assert len(read) > 2
        assert [path for path in read if path.exists() and not copied & {path, *path.parents}] == []
