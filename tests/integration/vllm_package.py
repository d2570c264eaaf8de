"""A real vLLM with kvswap's offloading spec and connector: its scheduler, its connector, its worker, real blocks.

    python tests/integration/vllm_package.py SOURCE [--device cuda:0] [--spec ...] [--stock]

SOURCE: an unpacked vLLM source package (pip download --no-deps --no-binary vllm), or nothing: the one that is
installed. Nothing of vLLM is compiled or replaced; on a GPU, vllm_compiled_part.py stands in for the modules that would
be, which offloading does not use. What there is of a model is this script: it takes what vLLM's
scheduler decided, hands the connector's metadata to the worker's connector as vLLM's model runner does, writes each
block that is to be computed as a function of its tokens, and checks the bytes of every block that vLLM counts as
computed. So a block that was loaded wrong, or not at all, is found.

It runs: a cold prompt (computed, stored), the same after the GPU's cache was emptied (loaded), faults in stores (the
keys are dropped: computed again) and in loads (recomputed), several requests at once, and the end. With --stock it runs
vLLM's own connector around our spec, where a fault has to raise and name the job.

--ranks 2: tensor-parallel ranks in processes of their own, which share the region of vLLM's tiering spec; what they
tell goes through vLLM's aggregator. On GPUs, each has one of its own. --sleep: vLLM's engine is put to sleep while
transfers run, its memory goes, and it is woken up. --sync-loads (0.33): requests run in the step that loads their
blocks, and what it computed beside a load that failed is stored nowhere. --overlap: each layer waits for its own part
of such a load (vllm_overlap.py); with --block-first, for a part of each block.
--hybrid: also as vllm_windows.py says. --lend: as vllm_lend.py says. --share: ranks load the latents of MLA once, each
a part (kvswap_share).
--replicas: several engines with one host pool, as vllm_replicas.py says.
vllm_worker.py says what stands in for what.
"""

# ruff: noqa: E402  (vLLM is imported once it is known from where)
# mypy: ignore-errors

from __future__ import annotations

import argparse
import atexit
import logging
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

import torch


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", nargs="?", help="unpacked source package of vLLM; default: the installed one")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks-per-chunk", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--gpu-blocks", type=int, default=64)
    parser.add_argument("--spec", default="KVSwapOffloadingSpec")
    parser.add_argument("--hybrid", action="store_true", help="two groups: full attention, and a sliding window")
    parser.add_argument("--mla", action="store_true", help="a latent a token, in place of K and V")
    parser.add_argument("--block-first", action="store_true", help="all layers of a block together, as vLLM plans it")
    parser.add_argument("--stock", action="store_true", help="vLLM's own connector: a fault must raise")
    parser.add_argument("--simple", action="store_true", help="vLLM's SimpleCPUOffloadConnector: a fault must raise")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks, a process each")
    parser.add_argument("--sleep", action="store_true", help="sleep and wake up instead of faults")
    parser.add_argument("--sync-loads", action="store_true", help="requests run in the step that loads their blocks")
    parser.add_argument("--overlap", action="store_true", help="kvswap_overlap: layers are read behind their load")
    parser.add_argument("--shared-ms", type=float, default=1.0, help="kvswap_overlap_shared_ms")
    parser.add_argument("--async-scheduling", action="store_true", help="a step is scheduled before the last has ended")
    parser.add_argument("--codec", choices=["exact", "mxfp8"], help="kvswap_codec, for a cache of bfloat16")
    parser.add_argument("--keep", type=int, action="append", default=[], help="kvswap_codec_keep: a layer")
    parser.add_argument("--share", action="store_true", help="kvswap_share: ranks load what is the same on them once")
    parser.add_argument("--lend", action="store_true", help="kvswap_lend: two engines lend each other their links")
    parser.add_argument("--lend-name", help=argparse.SUPPRESS)
    parser.add_argument("--lender", action="store_true", help=argparse.SUPPRESS)  # the second engine
    parser.add_argument("--replicas", action="store_true", help="engines with one host pool (kvswap_replicas)")
    parser.add_argument("--replica", help="be the engine that is killed")
    parser.add_argument("--policy", default="recompute", choices=["recompute", "fail"])
    options = parser.parse_args()
    if options.source and not Path(options.source, "vllm").is_dir():
        parser.error(f"{options.source} is no unpacked source package of vLLM: it has no folder vllm")
    if options.ranks > 1 and "Tiering" not in options.spec and not options.replicas:
        parser.error("ranks share memory under --spec KVSwapTieringOffloadingSpec")
    if options.share and (options.ranks == 1 or not options.mla):
        parser.error("--share needs --mla and --ranks 2: what is the same on all ranks")
    if options.lend and "Tiering" not in options.spec and not options.replicas:
        parser.error("--lend needs vLLM's region: --spec KVSwapTieringOffloadingSpec")
    options.lend_name = options.lend_name or (f"test{os.getpid()}" if options.lend else None)
    if options.simple or options.lend_name:
        options.blocks_per_chunk = 1
    if options.sleep and options.device != "cpu":
        parser.error("--sleep has memory of its own to take away: --device cpu")
    return options


def take_source(source: Path) -> None:
    """Import vLLM from there, in the processes too in which it looks at models.

    A package that was not installed has no metadata. vLLM reads there which platform it was built for.
    """
    folder = Path(tempfile.mkdtemp(prefix="vllm-metadata-"))
    atexit.register(shutil.rmtree, folder, True)
    version = source.name.removeprefix("vllm-") + ("+cpu" if OPTIONS.device == "cpu" else "")
    described = folder / f"vllm-{version}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    places = [str(folder), str(source)]  # which has metadata of its own, without the platform
    sys.path[:0] = places
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, *filter(None, [os.environ.get("PYTHONPATH")])])


OPTIONS = parse()
if OPTIONS.source:
    take_source(Path(OPTIONS.source).resolve())
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path.append(str(Path(__file__).parent))

import vllm
import vllm_codec
import vllm_lend
import vllm_overlap
import vllm_replicas
import vllm_windows
from prometheus_client import REGISTRY
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm_worker import TOKENS, Workers, connector_of, expected, groups_of, made, make_cache, make_config, places

import kvswap
from kvswap import testing

WRONG = 950  # a token that was computed from wrong bytes


class Engine:
    """vLLM's scheduler, and its ranks."""

    def __init__(self, folder: Path, number: int = 0) -> None:
        engine_id = f"kvswap-test-{os.getpid()}" + (f"-{number}" if number else "")
        self.folder = folder
        self.config = make_config(OPTIONS, folder, engine_id, 0)
        cache = make_cache(OPTIONS, self.config)
        self.config.cache_config.num_gpu_blocks = cache.num_blocks
        specs: list[Any] = []
        create = OffloadingSpecFactory.create_spec
        with (
            set_current_vllm_config(self.config),
            mock.patch.object(
                OffloadingSpecFactory, "create_spec", lambda *args: specs.append(create(*args)) or specs[-1]
            ),
        ):
            self.scheduler = (AsyncScheduler if OPTIONS.async_scheduling else Scheduler)(
                vllm_config=self.config,
                kv_cache_config=cache,
                structured_output_manager=StructuredOutputManager(self.config),
                block_size=TOKENS,
                **(
                    {"hash_block_size": TOKENS} if "hash_block_size" in signature(Scheduler.__init__).parameters else {}
                ),
                log_stats=True,
            )
        self.spec = specs[0] if specs else None  # the scheduler's
        self.workers = Workers(OPTIONS, folder, engine_id)
        self.aggregator = KVOutputAggregator(OPTIONS.ranks)
        self.region = Path(f"/dev/shm/vllm_offload_{engine_id}.mmap")
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(TOKENS, sha256)
        self.tokens: dict[str, list[int]] = {}
        self.recomputed = self.reported = 0
        self.requests = self.steps = 0
        self.held: tuple[Any, ...] | None = None  # a step whose outputs the scheduler has not seen
        self.preempted: dict[str, int] = {}
        self.answers: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.external = 0
        self.loaded = 0  # GPU blocks that loads were planned for
        self.stats_told: list[dict[str, Any]] = []  # of the connector, as vLLM's frontend gets them

    # -- steps --------------------------------------------------------------------------------------------------------

    def add(self, tokens: list[int], max_tokens: int = 2, limit: int | None = None) -> str:
        """limit: tokens that may be stored at most."""
        self.requests += 1
        name = f"request-{self.requests}"
        extra = None if limit is None else {"kv_transfer_params": {"max_offload_tokens": limit}}
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        params.update_from_generation_config({}, 999)
        request = made_request(name, tokens, params, self.hasher)
        self.tokens[name] = list(tokens)
        self.scheduler.add_request(request)
        return name

    def step(self) -> None:
        """One engine step."""
        self.steps += 1
        plan = self.scheduler.schedule()
        for new in plan.scheduled_new_reqs:
            self.external += new.num_computed_tokens
        if not OPTIONS.simple:
            self.loaded += sum(map(blocks_of, plan.kv_connector_metadata.load_jobs.values()))
        running: list[str] = list(plan.num_scheduled_tokens)
        work = []
        for request in running:
            end = self.scheduler.requests[request].num_computed_tokens
            blocks = self.scheduler.kv_cache_manager.get_block_ids(request)
            begin = (end - plan.num_scheduled_tokens[request]) // TOKENS
            work.append((request, self.tokens[request], list(places(OPTIONS, blocks, end // TOKENS)), begin))
        known = [self.scheduler.requests[request] for request in running]
        done = [request.num_computed_tokens >= request.num_tokens for request in known]
        epochs = [request.num_preemptions for request in known]
        if self.held is not None:  # the scheduler sees the last step's outputs when this one is on its way
            self.finish(*self.held)
            self.held = None
        outputs = self.workers.call("step", plan.kv_connector_metadata, plan.finished_req_ids, work)
        unsound = set().union(*self.workers.call("take_unsound"))
        sampled = []
        for request, ends, epoch in zip(running, done, epochs, strict=True):
            sampled.append([WRONG if request in unsound else len(self.tokens[request]) % 900] if ends else [])
            if epoch == self.preempted.get(request, 0):
                self.tokens[request] = self.tokens[request] + sampled[-1]
        if OPTIONS.async_scheduling:
            self.held = plan, running, outputs, sampled
        else:
            self.finish(plan, running, outputs, sampled)

    def finish(self, plan: Any, running: list[str], outputs: list[Any], sampled: list[list[int]]) -> None:
        results = [
            made(
                ModelRunnerOutput,
                req_ids=running,
                req_id_to_index={request: i for i, request in enumerate(running)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
                kv_connector_output=output,
            )
            for output in outputs
        ]
        result = results[0] if len(results) == 1 else self.aggregator.aggregate(results)
        self.reported += len(getattr(result.kv_connector_output, "failed_recving", None) or ())
        self.recomputed += len(result.kv_connector_output.invalid_block_ids or ())
        for core in self.scheduler.update_from_output(plan, result).values():
            told = core.scheduler_stats and core.scheduler_stats.kv_connector_stats
            self.stats_told += [told] if told else []
            for output in core.outputs:
                assert WRONG not in output.new_token_ids, f"{output.request_id}: a token of wrong bytes was let out"
                self.answers.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.ended[output.request_id] = str(output.finish_reason)
        for name, request in self.scheduler.requests.items():
            if request.num_preemptions != self.preempted.get(name, 0):
                self.preempted[name] = request.num_preemptions
                self.tokens[name] = list(request.all_token_ids)

    def run(self, *, limit: float = 60.0) -> None:
        """Until all requests are finished and all transfers told of."""
        end = time.monotonic() + limit
        scheduler = self.scheduler
        connector = scheduler.connector
        jobs = (lambda: connector.scheduler_manager.has_pending_stores()) if OPTIONS.simple else None
        jobs = jobs or (lambda: connector.connector_scheduler._jobs)
        while scheduler.requests or scheduler.finished_req_ids or jobs() or (self.held and self.held[1]):
            assert time.monotonic() < end, "the engine does not come to an end"
            self.step()
            time.sleep(0.001)

    def forget_gpu(self) -> None:
        """The GPU's prefix cache is emptied, and its bytes are made useless."""
        assert self.scheduler.reset_prefix_cache()
        self.workers.call("forget")

    def stats(self, key: str) -> int:
        """Of all ranks."""
        return sum(stats[key] for stats in self.workers.call("stats"))

    def outcomes(self) -> dict[str, int]:
        """What became of loaded blocks, as it was told to vLLM's frontend."""
        more = self.scheduler.connector.get_kv_connector_stats()  # since the last step
        self.stats_told += [more.data] if more else []
        found: Counter[str] = Counter()
        for told in self.stats_told:
            for (what,), count in told["data"].get("kvswap_loaded_blocks", {}).items():
                found[what] += count
        return dict(found)

    def again(self, tokens: list[int]) -> int:
        """With an empty GPU: how many of the tokens come from the host."""
        self.forget_gpu()
        self.external = 0
        self.add(tokens)
        self.run()
        return self.external


def blocks_of(load: Any) -> int:
    """GPU blocks of a load's job."""
    return len(load.dst_spec.block_ids)


def made_request(name: str, tokens: list[int], params: Any, hasher: Any) -> Request:
    values = {
        "request_id": name,
        "prompt_token_ids": tokens,
        "sampling_params": params,
        "pooling_params": None,
        "eos_token_id": 999,
        "block_hasher": hasher,
        "mm_features": None,
    }
    names = signature(Request.__init__).parameters
    return Request(**{key: value for key, value in values.items() if key in names})


def say(what: str) -> None:
    print(f"  {what}", flush=True)


def prompt(seed: int, blocks: int) -> list[int]:
    return torch.randint(1, 900, (blocks * TOKENS + 3,), generator=torch.Generator().manual_seed(seed)).tolist()


def scenario(engine: Engine) -> None:
    device = kvswap.Device("host:0" if OPTIONS.device == "cpu" else OPTIONS.device)
    chunk = OPTIONS.blocks_per_chunk * TOKENS
    first = prompt(1, 13)

    engine.add(first)
    engine.run()
    engine.forget_gpu()
    assert engine.external == 0
    engine.add(first)
    engine.run()
    assert engine.external == len(first) // chunk * chunk, engine.external
    say(f"stored and loaded: {engine.external} of {len(first)} tokens came from the host, all blocks checked")

    engine.forget_gpu()
    engine.external = 0
    many = [prompt(seed, 5) for seed in (2, 3, 4)] + [first]
    for tokens in many:
        engine.add(tokens)
    engine.run()
    assert engine.external == len(first) // chunk * chunk
    engine.forget_gpu()
    engine.external = 0
    for tokens in many:
        engine.add(tokens)
    engine.run()
    loaded = sum(len(tokens) // chunk * chunk for tokens in many)
    assert engine.external == loaded, (engine.external, loaded)
    say(f"four requests at once: {loaded} tokens from the host")
    if not (OPTIONS.stock or OPTIONS.simple):
        assert engine.outcomes() == {"used": engine.loaded}, (engine.outcomes(), engine.loaded)
    if OPTIONS.replicas:
        vllm_replicas.scenario(
            engine,
            lambda number, place=engine.folder: Engine(place, number),
            OPTIONS,
            say,
            prompt,
            engine.folder,
        )
    elif OPTIONS.codec and not OPTIONS.lend:
        vllm_codec.scenario(engine, OPTIONS, say, prompt)
    elif OPTIONS.overlap:
        vllm_overlap.scenario(engine, OPTIONS, say, prompt)
    elif OPTIONS.sync_loads:
        faults_beside_the_model(engine)
    elif OPTIONS.sleep:
        sleep_and_wake(engine)
    elif OPTIONS.lend:
        OPTIONS.naps = hasattr(OffloadingConnector, "restore_kv_caches")
        vllm_lend.scenario(engine, OPTIONS, say, prompt, OPTIONS.lend_name)
    elif OPTIONS.ranks > 1:
        shared_region(engine, first)
        faults_of_a_rank(engine)
    elif OPTIONS.stock or OPTIONS.simple:
        stock_faults(engine, device)
    elif OPTIONS.hybrid:
        hybrid_faults(engine, device)
    else:
        faults(engine, device)


def faults(engine: Engine, device: kvswap.Device) -> None:
    chunk = OPTIONS.blocks_per_chunk * TOKENS
    tokens = prompt(5, 8)
    engine.external = 0
    engine.forget_gpu()
    with testing.fault(device, "copy", "fail"):
        engine.add(tokens)
        engine.run()
    failed = engine.stats("failed")
    assert failed > 0
    engine.forget_gpu()
    engine.add(tokens)
    engine.run()
    assert engine.external < len(tokens) // chunk * chunk, "a store that failed was offered as a hit"
    engine.forget_gpu()
    before, engine.external = engine.external, 0
    engine.add(tokens)
    engine.run()
    assert engine.external == len(tokens) // chunk * chunk
    say(f"{failed} stores failed: their keys were dropped ({before} tokens hit), stored again, and then all hit")

    engine.forget_gpu()
    engine.external = engine.recomputed = 0
    before = engine.stats("failed")
    with testing.fault(device, "copy", "fail"):
        engine.add(tokens)
        engine.run()
    failed = engine.stats("failed") - before
    assert engine.recomputed > 0 and failed > 0
    assert engine.outcomes()["failed"] == engine.recomputed, engine.outcomes()
    say(f"{failed} transfers failed beside a load: {engine.recomputed} blocks were reported, and computed again")
    engine.forget_gpu()
    engine.external = 0
    engine.add(prompt(6, 6))
    engine.add(tokens)
    engine.run()
    say(f"and it goes on: {engine.external} tokens from the host")
    aborted(engine, tokens)
    left_out_in_silence(engine, device, tokens)


def aborted(engine: Engine, tokens: list[int]) -> None:
    """A request goes away while it loads, or before it runs."""
    engine.forget_gpu()
    before = engine.loaded
    name = engine.add(tokens)
    engine.step()
    engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert engine.outcomes()["aborted"] == engine.loaded - before > 0, engine.outcomes()


def left_out_in_silence(engine: Engine, device: kvswap.Device, tokens: list[int]) -> None:
    """A load whose copy is left out: the bytes say so. The engine cannot go on after it."""
    engine.forget_gpu()
    try:
        with testing.fault(device, "copy", "skip"):
            engine.add(tokens)
            engine.run()
    except AssertionError as error:
        say(f"a copy that was left out in silence is found: {error}")
        return
    raise AssertionError("a copy was left out, and this test did not notice")


def faults_beside_the_model(engine: Engine) -> None:
    """A step that loads what it needs computes nonsense where the load fails; vLLM does it again, and stores go on."""
    whole = 12 * TOKENS
    tokens = prompt(7, 12)
    engine.add(tokens[: whole // 2 + 3])
    engine.run()
    engine.forget_gpu()
    engine.external = engine.recomputed = 0
    engine.workers.call_one(OPTIONS.ranks - 1, "fault", "fail")
    engine.add(tokens)
    engine.run()
    engine.workers.call_one(OPTIONS.ranks - 1, "fault", None)
    assert engine.external == whole // 2 and engine.recomputed > 0
    hits = engine.again(tokens)  # of the first half, and of what was computed anew; their bytes are checked
    again = engine.again(tokens)
    assert again == whole
    computed = f"{engine.recomputed} blocks were computed again"
    say(f"a load failed beside the model: {computed}, {hits} tokens hit, and then {again}")


def hybrid_faults(engine: Engine, device: kvswap.Device) -> None:
    tokens = prompt(1, 13)
    engine.forget_gpu()
    engine.external = 0
    try:
        with testing.fault(device, "copy", "fail"):
            engine.add(tokens)
            engine.run()
    except kvswap.Error as error:
        assert "cannot recompute" in str(error) and not hasattr(KVConnectorOutput(), "failed_recving")
        say(f"a load of several groups cannot be computed again in this release, and it says so: {error}")
        return
    assert engine.reported > 0
    say(f"{engine.reported} request(s) reported whose load failed, and computed again")
    engine.forget_gpu()
    engine.external = 0
    engine.add(tokens)
    engine.run()
    say(f"and it goes on: {engine.external} tokens from the host")


def in_vllms_metrics(engine: Engine) -> None:
    """What became of all blocks that were loaded, through vLLM's own metrics for Prometheus and its log."""
    time.sleep(1.0)
    engine.step()  # tells of the last second
    counts = engine.outcomes()
    pending = sum(load.blocks for load in engine.scheduler.connector._outcomes.loads.values())
    assert sum(counts.values()) + pending == engine.loaded > 0, (counts, pending, engine.loaded)
    metrics = KVConnectorProm(engine.config, ["engine"], {0: ["0"]})
    log = KVConnectorLogging(engine.config.kv_transfer_config)
    for told in engine.stats_told:
        metrics.observe(told)
        log.observe(told)
    for what, count in counts.items():
        labels = {"engine": "0", "what": what}
        assert REGISTRY.get_sample_value("kvswap_loaded_blocks_total", labels) == count
    if OPTIONS.lend or OPTIONS.replicas:
        vllm_replicas.in_vllms_metrics(engine, OPTIONS, REGISTRY.get_sample_value, say)
    lines: list[str] = []
    log.log(lambda text, *values: lines.append(text % values))
    assert "kvswap_loaded_blocks" in lines[0]
    each = ", ".join(f"{counts[what]} {what}" for what in ("used", "failed", "aborted") if what in counts)
    say(f"vLLM's metrics say what became of the loaded blocks: {each}")


def shared_region(engine: Engine, tokens: list[int]) -> None:
    """Each rank's blocks lie in their place of the region that all have mapped, and that belongs to nobody else."""
    if engine.region.exists():
        assert engine.region.stat().st_mode & 0o777 == 0o600
    view = engine.scheduler.connector.connector_scheduler.manager.primary_tier.get_kv_memoryview()
    whole = bytes(view.cast("B"))
    row, found, ranks = view.strides[0], [set(), set()], range(1 if OPTIONS.mla else OPTIONS.ranks)
    for rank in ranks:
        for index in range(len(tokens) // (OPTIONS.blocks_per_chunk * TOKENS)):
            for name in groups_of(OPTIONS)[0]:
                ends = tuple(tokens[: (index + 1) * TOKENS])
                at = whole.find(expected(rank, name, ends).numpy().tobytes())
                assert at >= 0, f"rank {rank}: block {index} of {name} is not in the region"
                found[rank].add(at % row // (row // OPTIONS.ranks))
                once = whole.find(expected(rank, name, ends).numpy().tobytes(), at + 1) < 0
    if OPTIONS.mla:
        copies = "one copy" if once else "a copy each"
        say(f"{OPTIONS.ranks} ranks in one region of {view.nbytes >> 20} MiB, with {copies} of the latents")
        return
    assert found == [{0}, {1}], found
    say(f"{OPTIONS.ranks} ranks in one region of {view.nbytes >> 20} MiB: each block lies in its rank's part of a row")


def faults_of_a_rank(engine: Engine) -> None:
    """One rank fails; the others' part of the block is of no use then."""
    if OPTIONS.share:
        faults_of_a_sharing_rank(engine)
        return
    whole = 8 * TOKENS // (OPTIONS.blocks_per_chunk * TOKENS) * OPTIONS.blocks_per_chunk * TOKENS
    tokens = prompt(5, 8)
    engine.forget_gpu()
    engine.workers.call_one(1, "fault", "fail")
    engine.add(tokens)
    engine.run()
    engine.workers.call_one(1, "fault", None)
    failed = [stats["failed"] for stats in engine.workers.call("stats")]
    assert failed[0] == 0 and failed[1] > 0, failed
    hits = engine.again(tokens)
    assert hits < whole, "a store that failed on one rank was offered as a hit"
    assert engine.again(tokens) == whole
    say(f"{failed[1]} stores failed on rank 1 alone: their keys were dropped ({hits} tokens hit), and stored again")

    engine.recomputed = 0
    engine.workers.call_one(1, "fault", "fail")
    engine.again(tokens)
    engine.workers.call_one(1, "fault", None)
    assert engine.recomputed > 0
    say(f"a load failed on rank 1 alone: {engine.recomputed} blocks were computed again on both")
    say(f"and it goes on: {engine.again(tokens)} tokens from the host")
    engine.workers.call_one(1, "fault", "skip")
    try:
        engine.again(tokens)
    except AssertionError as error:
        assert "on rank 1" in str(error)
        say(f"a copy that rank 1 left out in silence is found: {error}")
        return
    raise AssertionError("a copy was left out, and this test did not notice")


def faults_of_a_sharing_rank(engine: Engine) -> None:
    """Of what ranks share: rank 0 stores, and each rank's own load may fail."""
    whole = 8 * TOKENS
    tokens = prompt(5, 8)
    engine.forget_gpu()
    engine.workers.call_one(0, "fault", "fail", 1, 1)
    engine.add(tokens)
    engine.run()
    engine.workers.call_one(0, "fault", None)
    failed = [stats["failed"] for stats in engine.workers.call("stats")]
    assert failed[0] > 0 and failed[1] == 0, failed
    hits = engine.again(tokens)
    assert hits < whole and engine.again(tokens) == whole
    say(f"{failed[0]} stores failed on rank 0: their keys were dropped ({hits} tokens hit), and stored again")

    for rank in (0, 1):
        engine.recomputed = 0
        engine.workers.call_one(rank, "fault", "fail", 1, 1)
        engine.again(tokens)
        engine.workers.call_one(rank, "fault", None)
        assert engine.recomputed > 0
        say(f"a load failed on rank {rank} alone: {engine.recomputed} blocks were computed again on both")
        assert engine.again(tokens) == whole
    engine.workers.call_one(1, "fault", "skip", 1, 1)
    try:
        engine.again(tokens)
    except AssertionError as error:
        assert "holds other bytes" in str(error)  # on either rank: rank 1 passes parts on
        say(f"copies that rank 1 left out in silence are found: {error}")
        return
    raise AssertionError("copies were left out, and this test did not notice")


class Executor:
    """What EngineCore sleeps by."""

    def __init__(self, workers: Workers) -> None:
        self.workers, self.is_sleeping = workers, False

    def collective_rpc(self, name: str, **_: Any) -> list[Any]:
        assert name == "synchronize_device", name
        return self.workers.call("synchronize")

    def sleep(self, level: int) -> None:
        self.workers.call("sleep", level)
        self.is_sleeping = True

    def wake_up(self, tags: list[str] | None) -> None:
        self.workers.call("wake_up", tags)
        self.is_sleeping = False

    def get_kv_connector_handshake_metadata(self) -> list[Any]:
        return self.workers.call("handshake")

    def reset_mm_cache(self) -> None:
        pass

    def reset_encoder_cache(self) -> None:
        pass


class Core(EngineCore):
    """vLLM's engine, as far as it sleeps and wakes up."""

    def __init__(self, engine: Engine) -> None:
        self.vllm_config, self.scheduler = engine.config, engine.scheduler
        self.model_executor = Executor(engine.workers)
        self.mm_receiver_cache = None


def sleep_and_wake(engine: Engine) -> None:
    """Put to sleep with transfers under way: nothing touches the memory that is gone, what is there afterwards is new,
    and nothing of before is taken for it.
    """
    core = Core(engine)
    chunk = OPTIONS.blocks_per_chunk * TOKENS
    whole = (13 * TOKENS + 3) // chunk * chunk
    for number, (mode, steps) in enumerate((("abort", 1), ("keep", 1), ("abort", 2), ("keep", 2))):
        tokens = prompt(50 + number, 13)
        engine.forget_gpu()
        engine.add(tokens)
        engine.step()
        held = 0.0
        if steps == 2:  # its blocks are being stored, behind a model that takes its time; else they are to be
            held = 0.5
            engine.workers.call("hold", held)
            engine.step()
            assert engine.stats("unfinished") > 0
        begin = time.monotonic()
        core.sleep(1, mode)
        assert time.monotonic() - begin >= held / 2, "it did not wait for the transfers"
        assert core.is_sleeping() and engine.stats("failed") == 0
        time.sleep(0.1)
        core.wake_up()
        assert not core.is_sleeping()
        engine.run()
        engine.workers.call("forget")
        assert engine.scheduler.reset_prefix_cache()
        engine.external = 0
        engine.add(tokens)
        engine.run()
        hits, again = engine.external, engine.again(tokens)
        assert again == whole, (mode, hits, again)
        when = "while it stored" if held else "before it stored"
        say(f"slept ({mode}) {when}, woke up: {hits} tokens from the host at first, then {again}, all blocks checked")
    assert engine.stats("failed") == 0
    if "Tiering" in OPTIONS.spec:
        kept_in_files(engine, core, whole)


def kept_in_files(engine: Engine, core: Core, whole: int) -> None:
    """vLLM empties its host memory when it goes to sleep, and no secondary tier."""
    tokens, other = prompt(60, 13), prompt(61, 2)
    engine.again(tokens)
    core.sleep(1, "abort")
    core.wake_up()
    engine.again(other)  # until then vLLM brings nothing into the memory that it has emptied
    hits = engine.again(tokens)
    assert hits == whole, hits
    say(f"what a file tier has when the engine goes to sleep is found when it wakes up: {hits} tokens, all checked")


def stock_faults(engine: Engine, device: kvswap.Device) -> None:
    engine.forget_gpu()
    try:
        with testing.fault(device, "copy", "fail"):
            engine.add(prompt(5, 8))
            engine.run()
    except kvswap.Error as error:
        assert ("the engine has to end" if OPTIONS.simple else "job") in str(error)
        say(f"under vLLM's own connector it raises: {str(error)[:150]}...")
        return
    raise AssertionError("a failed transfer went unnoticed under vLLM's own connector")


def dropped_copy(engine: Engine, device: kvswap.Device) -> None:
    """A new engine, which ends with it."""
    tokens = prompt(8, 8)
    engine.add(tokens)
    engine.run()
    left_out_in_silence(engine, device, tokens)


def lend() -> int:
    """The second engine of vllm_lend.py."""
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder))
        vllm_lend.serve(engine, lambda: Core(engine), prompt)
        engine.workers.call("shutdown")
        engine.workers.close()
        engine.scheduler.shutdown()
    return 0


def main() -> int:
    logging.getLogger("kvswap").setLevel(logging.CRITICAL)
    if OPTIONS.lender:
        return lend()
    print(
        f"vLLM {vllm.__version__} (from {Path(vllm.__file__).parent.name}/), torch {torch.__version__}, kvswap ", end=""
    )
    print(
        f"{kvswap.__version__}, {OPTIONS.device}, {OPTIONS.spec}, {OPTIONS.blocks_per_chunk} blocks a chunk, ", end=""
    )
    print("two groups, " if OPTIONS.hybrid else "MLA, " if OPTIONS.mla else "", end="")
    print(f"{OPTIONS.ranks} ranks, " if OPTIONS.ranks > 1 else "", end="")
    print(connector_of(OPTIONS)["kv_connector"], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if OPTIONS.replica is not None:
            vllm_replicas.store_for_ever(Engine(vllm_replicas.model_of(OPTIONS), 9), prompt)
        engine = Engine(vllm_replicas.model_of(OPTIONS) if OPTIONS.replicas else Path(folder))
        first = engine.workers.call("stats")[0]
        assert first["handlers"], "vLLM's own handlers are in use"
        say(f"{first['handlers']} handlers of kvswap's on {first['device']}" + ", a rank" * (OPTIONS.ranks > 1))
        if not OPTIONS.simple:  # which allocates a tensor a layer
            common = OPTIONS.ranks > 1 or OPTIONS.replicas
            padded = OPTIONS.codec and common  # behind each block, to a page of all blocks of a chunk
            assert first["runs"] == (OPTIONS.blocks_per_chunk if padded else 1), (
                f"a chunk is {first['runs']} runs on the host"
            )
            say(f"a chunk of all layers, {first['tensors']} tensors, is one run on the host")
        scenario(engine)
        if not (OPTIONS.stock or OPTIONS.simple):
            in_vllms_metrics(engine)
        ends = engine.workers.call("stats")
        if OPTIONS.share:
            shares = engine.workers.call("shared")
            assert all(mine["brought_by_others_h2d"] > 0 for mine in shares), shares
            brought = ", ".join(f"{mine['brought_by_others_h2d'] >> 10} KiB of loads" for mine in shares)
            say(f"by the other rank's link came, on rank 0 and 1: {brought}")
        paths = sorted({path for stats in ends for path in stats["paths"]})
        if not (OPTIONS.stock or OPTIONS.simple):
            engine.workers.call("shutdown")
        engine.workers.close()
        engine.scheduler.shutdown()
        assert not engine.region.exists(), "the region was left behind"
        jobs, checked = (sum(stats[key] for stats in ends) for key in ("jobs", "checked"))
        if OPTIONS.simple:
            dropped_copy(Engine(Path(folder)), kvswap.Device(first["device"]))
        elif OPTIONS.hybrid and not (OPTIONS.overlap or OPTIONS.async_scheduling or OPTIONS.codec):
            vllm_windows.scenario(lambda: Engine(Path(folder)), OPTIONS, say, prompt)
        if OPTIONS.overlap and OPTIONS.block_first and OPTIONS.ranks == 1 and not OPTIONS.codec:
            vllm_overlap.left_out_of_a_part(Engine(Path(folder)), OPTIONS, say, prompt)
        say(f"{jobs} jobs by {paths}, {checked} blocks of layers checked: all right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
