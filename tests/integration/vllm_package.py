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
"""

# ruff: noqa: E402  (vLLM is imported once it is known from where)
# mypy: ignore-errors

from __future__ import annotations

import argparse
import atexit
import dataclasses
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import torch

TOKENS = 16  # of a block
HEADS, HEAD_SIZE = 2, 32


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", nargs="?", help="unpacked source package of vLLM; default: the installed one")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--blocks-per-chunk", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--gpu-blocks", type=int, default=64)
    parser.add_argument("--spec", default="KVSwapOffloadingSpec")
    parser.add_argument("--hybrid", action="store_true", help="two groups: full attention, and a sliding window")
    parser.add_argument("--stock", action="store_true", help="vLLM's own connector: a fault must raise")
    return parser.parse_args()


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

import vllm
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import ForwardContext
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

import kvswap
from kvswap import testing
from kvswap.vllm._handler import VLLMHandler


def made(cls: Any, **values: Any) -> Any:
    """An object of a release's class, with those of the values that it has a place for."""
    names = {f.name for f in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in values.items() if name in names})


def model_folder(folder: Path, layers: int) -> str:
    """A configuration, and no weights: no model is loaded."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HEADS * HEAD_SIZE,
        "intermediate_size": 128,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_SIZE,
        "num_hidden_layers": layers,
        "vocab_size": 1000,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def make_config(folder: Path) -> VllmConfig:
    extra = {
        "cpu_bytes_to_use": 64 << 20,
        "spec_name": OPTIONS.spec,
        "spec_module_path": "kvswap.vllm",
        "block_size": TOKENS * OPTIONS.blocks_per_chunk,
        "kvswap_wait_timeout_s": 60,
        "offload_prompt_only": False,
    }
    connector = {"kv_connector": "KVSwapConnector", "kv_connector_module_path": "kvswap.vllm"}
    transfer = KVTransferConfig(
        **({"kv_connector": "OffloadingConnector"} if OPTIONS.stock else connector),
        kv_role="kv_both",
        kv_connector_extra_config=extra,
        kv_load_failure_policy="recompute",
    )
    model = ModelConfig(
        model=model_folder(folder, OPTIONS.layers),
        skip_tokenizer_init=True,
        dtype="float16",
        max_model_len=4096,
        enforce_eager=True,
    )
    scheduler = SchedulerConfig(
        max_num_seqs=16,
        max_num_batched_tokens=256,
        max_model_len=4096,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    cache = CacheConfig(block_size=TOKENS, enable_prefix_caching=True)
    if hasattr(cache, "kv_cache_layout"):
        cache.kv_cache_layout = "LBNHC"  # the engine does so before it makes connectors
    device = DeviceConfig("cuda" if OPTIONS.device.startswith("cuda") else "cpu")
    return VllmConfig(
        model_config=model,
        scheduler_config=scheduler,
        cache_config=cache,
        kv_transfer_config=transfer,
        device_config=device,
    )


class Engine:
    """vLLM's scheduler and worker-side connector, and blocks that are written and checked here."""

    def __init__(self, folder: Path) -> None:
        self.config = make_config(folder)
        shape = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": HEAD_SIZE, "dtype": torch.float16}
        specs = [FullAttentionSpec(**shape)]
        if OPTIONS.hybrid:
            specs.append(SlidingWindowSpec(**shape, sliding_window=4 * TOKENS))
        numbers = range(OPTIONS.layers)
        self.groups = [
            [f"model.layers.{len(specs) * i + g}.self_attn.attn" for i in numbers] for g in range(len(specs))
        ]
        page, blocks = specs[0].page_size_bytes, OPTIONS.gpu_blocks
        if any(f.name == "layers" for f in dataclasses.fields(KVCacheTensor)):
            strides = {"layer_stride": page * blocks, "block_stride": page}
            size = page * blocks * OPTIONS.layers
            tensors = [KVCacheTensor(size=size, layers=names, **strides) for names in self.groups]
        else:
            shared = zip(*self.groups, strict=True)
            tensors = [KVCacheTensor(size=page * blocks, shared_by=list(names)) for names in shared]
        cache = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=tensors,
            kv_cache_groups=[KVCacheGroupSpec(names, spec) for names, spec in zip(self.groups, specs, strict=True)],
        )
        self.config.cache_config.num_gpu_blocks = blocks
        # (blocks, K and V, tokens, heads, head size) a layer; groups lie over each other, a block is one group's
        slab = torch.zeros(
            OPTIONS.layers, blocks, 2, TOKENS, HEADS, HEAD_SIZE, dtype=torch.float16, device=OPTIONS.device
        )
        self.layers = {name: slab[i] for names in self.groups for i, name in enumerate(names)}
        with set_current_vllm_config(self.config):
            self.scheduler = Scheduler(
                vllm_config=self.config,
                kv_cache_config=cache,
                structured_output_manager=StructuredOutputManager(self.config),
                block_size=TOKENS,
                **(
                    {"hash_block_size": TOKENS} if "hash_block_size" in signature(Scheduler.__init__).parameters else {}
                ),
                log_stats=True,
            )
            self.worker = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, cache)
            self.worker.register_kv_caches(self.layers)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(TOKENS, sha256)
        self.context = made(ForwardContext, no_compile_layers={}, attn_metadata={}, slot_mapping={})
        self.tokens: dict[str, list[int]] = {}
        self.recomputed = self.reported = 0
        self.requests = 0
        self.checked = 0
        self.external = 0

    # -- bytes --------------------------------------------------------------------------------------------------------

    def expected(self, name: str, tokens: tuple[int, ...]) -> torch.Tensor:
        """What a block holds that ends these tokens: 64 bits of their hash begin a random page."""
        seed = int.from_bytes(sha256((name, tokens))[:7], "big")
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, (2 * TOKENS * HEADS * HEAD_SIZE * 2,), dtype=torch.uint8, generator=generator)

    def page(self, name: str, block: int) -> torch.Tensor:
        return self.layers[name][block].view(torch.uint8).view(-1)

    def places(self, request: str, begin: int, end: int) -> Iterator[tuple[int, int, str]]:
        """Blocks [begin, end) of a request, in each layer; a window's group keeps none of what lies behind it."""
        for names, blocks in zip(self.groups, self.scheduler.kv_cache_manager.get_block_ids(request), strict=True):
            for index in range(begin, min(end, len(blocks))):
                if blocks[index] != 0:  # vLLM's null block
                    yield from ((index, blocks[index], name) for name in names)

    def compute(self, request: str, begin: int, end: int) -> None:
        """Write the blocks that tokens [begin, end) complete; what came before them must be there."""
        tokens = self.tokens[request]
        for index, block, name in self.places(request, 0, begin // TOKENS):
            if not torch.equal(
                self.page(name, block).cpu(), self.expected(name, tuple(tokens[: (index + 1) * TOKENS]))
            ):
                raise AssertionError(f"{request}: block {index} (GPU block {block}) of {name} holds other bytes")
            self.checked += 1
        for index, block, name in self.places(request, begin // TOKENS, end // TOKENS):
            self.page(name, block).copy_(self.expected(name, tuple(tokens[: (index + 1) * TOKENS])))

    # -- steps --------------------------------------------------------------------------------------------------------

    def add(self, tokens: list[int], max_tokens: int = 2) -> str:
        self.requests += 1
        name = f"request-{self.requests}"
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        params.update_from_generation_config({}, 999)
        request = made_request(name, tokens, params, self.hasher)
        self.tokens[name] = list(tokens)
        self.scheduler.add_request(request)
        return name

    def step(self) -> None:
        """One engine step, in the order of vLLM's model runner."""
        plan = self.scheduler.schedule()
        meta = plan.kv_connector_metadata
        self.worker.handle_preemptions(meta)
        self.worker.bind_connector_metadata(meta)
        self.worker.start_load_kv(self.context)
        for new in plan.scheduled_new_reqs:
            self.external += new.num_computed_tokens
        running: list[str] = list(plan.num_scheduled_tokens)
        for request in running:
            before = self.scheduler.requests[request].num_computed_tokens - plan.num_scheduled_tokens[request]
            self.compute(request, before, before + plan.num_scheduled_tokens[request])
        self.worker.wait_for_save()
        output = KVConnectorOutput()
        if hasattr(output, "failed_recving"):
            results = self.worker.get_transfer_results(plan.finished_req_ids)
            output.finished_sending, output.finished_recving = results.finished_sending, results.finished_recving
            output.failed_recving = results.failed_recving
            self.reported += len(results.failed_recving)
        else:
            output.finished_sending, output.finished_recving = self.worker.get_finished(plan.finished_req_ids)
        output.invalid_block_ids = self.worker.get_block_ids_with_load_errors()
        self.recomputed += len(output.invalid_block_ids)
        output.kv_connector_worker_meta = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        self.finish(plan, running, output)

    def finish(self, plan: Any, running: list[str], output: Any) -> None:
        sampled = []
        for request in running:
            known = self.scheduler.requests[request]
            done = known.num_computed_tokens >= known.num_tokens
            sampled.append([len(self.tokens[request]) % 900] if done else [])
            self.tokens[request] += sampled[-1]
        result = made(
            ModelRunnerOutput,
            req_ids=running,
            req_id_to_index={request: i for i, request in enumerate(running)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=output,
        )
        self.scheduler.update_from_output(plan, result)

    def run(self, *, limit: float = 60.0) -> None:
        """Until all requests are finished and all transfers told of."""
        end = time.monotonic() + limit
        scheduler = self.scheduler
        jobs = scheduler.connector.connector_scheduler._jobs
        while scheduler.requests or scheduler.finished_req_ids or jobs:
            assert time.monotonic() < end, "the engine does not come to an end"
            self.step()
            time.sleep(0.001)

    def forget_gpu(self) -> None:
        """The GPU's prefix cache is emptied, and its bytes are made useless."""
        assert self.scheduler.reset_prefix_cache()
        for tensor in self.layers.values():
            tensor.view(torch.uint8).fill_(0xEE)

    def handlers(self) -> list[VLLMHandler]:
        from kvswap.vllm import _connector

        worker = self.worker.connector_worker.worker
        return _connector._handlers_of(getattr(worker, "_worker", worker))


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
    if OPTIONS.stock:
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
    failed = sum(handler.stats().failed for handler in engine.handlers())
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
    before = sum(handler.stats().failed for handler in engine.handlers())
    with testing.fault(device, "copy", "fail"):
        engine.add(tokens)
        engine.run()
    failed = sum(handler.stats().failed for handler in engine.handlers()) - before
    assert engine.recomputed > 0 and failed > 0
    say(f"{failed} transfers failed beside a load: {engine.recomputed} blocks were reported, and computed again")
    engine.forget_gpu()
    engine.external = 0
    engine.add(prompt(6, 6))
    engine.add(tokens)
    engine.run()
    say(f"and it goes on: {engine.external} tokens from the host")
    engine.forget_gpu()
    try:
        with testing.fault(device, "copy", "skip"):
            engine.add(tokens)
            engine.run()
    except AssertionError as error:
        say(f"a copy that was left out in silence is found: {error}")
        return
    raise AssertionError("a copy was left out, and this test did not notice")


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


def stock_faults(engine: Engine, device: kvswap.Device) -> None:
    engine.forget_gpu()
    try:
        with testing.fault(device, "copy", "fail"):
            engine.add(prompt(5, 8))
            engine.run()
    except kvswap.Error as error:
        assert "job" in str(error)
        say(f"under vLLM's own connector it raises: {str(error)[:150]}...")
        return
    raise AssertionError("a failed transfer went unnoticed under vLLM's own connector")


def main() -> int:
    logging.getLogger("kvswap").setLevel(logging.CRITICAL)
    print(
        f"vLLM {vllm.__version__} (from {Path(vllm.__file__).parent.name}/), torch {torch.__version__}, kvswap ", end=""
    )
    print(
        f"{kvswap.__version__}, {OPTIONS.device}, {OPTIONS.spec}, {OPTIONS.blocks_per_chunk} blocks a chunk, ", end=""
    )
    print("two groups, " if OPTIONS.hybrid else "", end="")
    print("OffloadingConnector" if OPTIONS.stock else "KVSwapConnector", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder))
        handlers = engine.handlers()
        assert handlers, "vLLM's own handlers are in use"
        say(f"{len(handlers)} handlers of kvswap's on {handlers[0].device.name}")
        scenario(engine)
        jobs = sum(handler.stats().jobs for handler in handlers)
        paths = {path for handler in handlers for path in handler.stats().paths}
        if not OPTIONS.stock:
            engine.worker.shutdown()
            engine.worker.shutdown()
        say(f"{jobs} jobs by {sorted(paths)}, {engine.checked} blocks of layers checked: all right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
