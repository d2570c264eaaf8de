"""A vLLM engine in this process: requests by token numbers, step by step, and a look at its GPU cache."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from serving.configurations import environment, register, split, transfer_config
from serving.host import Host, host_of
from serving.models import BLOCK, VOCABULARY
from serving.regimes import Regime
from serving.worker import CPU_FOLDER

LIMIT = 60.0  # seconds that a request, or a set of them, may take
# Steps after the last request, as a server makes them: LMCache keeps a request's blocks until a step reports that it
# has ended, and with asynchronous scheduling up to two steps are queued before that one.
BEHIND = 4

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler and the cache are in this process, to be looked at
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "KVSWAP_LOG": "info",
}


def prompt(kind: int, number: int, length: int) -> list[int]:
    """Tokens that differ from those of any other kind or number from the first block on."""
    made: list[int] = np.random.default_rng([kind, number]).integers(3, VOCABULARY, length).tolist()
    return made


class Request:
    """A request on its way."""

    def __init__(self, name: str, tokens: list[int]) -> None:
        self.name, self.prompt = name, tokens
        self.begin = self.end = 0.0
        self.cached = 0  # tokens of the prompt
        self.times: list[float] = []  # of the tokens of the answer
        self.tokens: list[int] = []

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.begin


def set_environment(name: str, regime: Regime, folder: Path) -> None:
    """Before vLLM is imported."""
    os.environ.update(_ENVIRONMENT, VLLM_USE_V2_MODEL_RUNNER="1" if regime.runner == "v2" else "0")
    os.environ.update(environment(name))
    if regime.device == "cpu":
        os.environ.update(
            {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", CPU_FOLDER: str(folder / "cpu")}
        )
        from serving import cpu_platform

        cpu_platform.install(folder / "cpu")


class Engine:
    """vLLM's LLM of one regime under one configuration, in a process that set_environment() was called in."""

    def __init__(self, name: str, regime: Regime, folder: Path) -> None:
        from vllm import LLM, SamplingParams

        register(name)
        self.name, self.regime, self._params = name, regime, SamplingParams
        self._requests = 0
        begin = time.perf_counter()
        self.llm = LLM(**self._keywords(folder))
        self.seconds = time.perf_counter() - begin
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.each("serving_scale_weights", 0.0 if regime.model.kind == "groups" else 1.0)  # Gemma's norms add 1

    def _keywords(self, folder: Path) -> dict[str, Any]:
        regime, model = self.regime, self.regime.model
        made: dict[str, Any] = {
            "model": str(model.write(folder)), "load_format": "dummy", "skip_tokenizer_init": True,
            "dtype": "bfloat16", "max_model_len": regime.max_len, "max_num_batched_tokens": regime.batched,
            "max_num_seqs": 64, "block_size": BLOCK, "num_gpu_blocks_override": regime.gpu_blocks,
            "enable_prefix_caching": True, "disable_log_stats": False, "seed": 0, "gpu_memory_utilization": 0.1,
            "kv_cache_memory_bytes": (regime.gpu_blocks + 1) * model.block() // regime.ranks,
            "tensor_parallel_size": regime.ranks, "worker_extension_cls": "serving.worker.Worker",
        }  # fmt: skip
        if regime.mode == "eager":
            made["enforce_eager"] = True
        elif regime.mode == "graph":  # of decoding alone, so that nothing is compiled
            sizes = [1, 2, 4, 8, 16, 32, 40]
            made["compilation_config"] = {
                "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes,
            }  # fmt: skip
        if transfer := transfer_config(self.name, regime, folder):
            made["kv_transfer_config"] = transfer
        if regime.device == "cpu":
            made["disable_hybrid_kv_cache_manager"] = self.name == "lmcache-inprocess"  # it refuses groups
        return made

    def each(self, call: str, *arguments: Any) -> list[Any]:
        """A method of worker.Worker in each of the engine's workers: what they return, by rank."""
        found: list[Any] = self.llm.collective_rpc(call, args=arguments)
        return found

    @property
    def gpu_blocks(self) -> int:
        """Of the GPU's cache."""
        return int(self.core.vllm_config.cache_config.num_gpu_blocks)

    # -- requests -----------------------------------------------------------------------------------------------------

    def add(self, tokens: list[int], new: int) -> Request:
        """A request for `new` tokens."""
        self._requests += 1
        request = Request(f"r{self._requests}", tokens)
        params = self._params(max_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False)
        request.begin = time.perf_counter()
        self.engine.add_request(request.name, {"prompt_token_ids": tokens}, params)
        return request

    def step(self, running: dict[str, Request]) -> list[Request]:
        """One of the engine's. The requests that ended, which are taken out of running."""
        ended = []
        for output in self.engine.step():
            now = time.perf_counter()
            request = running.get(output.request_id)
            if request is None:
                continue
            tokens = list(output.outputs[0].token_ids)
            request.times += [now] * (len(tokens) - len(request.tokens))
            request.tokens = tokens
            request.cached = max(request.cached, getattr(output, "num_cached_tokens", None) or 0)
            if output.finished:
                request.end = now
                ended.append(running.pop(request.name))
        return ended

    def run(self, prompts: list[list[int]], new: int) -> list[Request]:
        """All at once, to their ends."""
        requests = [self.add(tokens, new) for tokens in prompts]
        running = {request.name: request for request in requests}
        limit = time.monotonic() + LIMIT
        while running:
            self.step(running)
            if time.monotonic() > limit:
                raise TimeoutError(f"{len(running)} of {len(requests)} requests have not ended after {LIMIT} s")
        return requests

    def one(self, tokens: list[int], new: int, at_first: Callable[[Request], Any] | None = None) -> Request:
        """One alone. at_first: called once, when it has a token."""
        request = self.add(tokens, new)
        running = {request.name: request}
        limit = time.monotonic() + LIMIT
        while running:
            self.step(running)
            if at_first is not None and request.times:
                at_first(request)
                at_first = None
            if time.monotonic() > limit:
                raise TimeoutError(f"a request has not ended after {LIMIT} s")
        return request

    # -- the connector ------------------------------------------------------------------------------------------------

    @property
    def connector(self) -> Any:
        """The scheduler's side; None: no offloading."""
        return getattr(self.core.scheduler, "connector", None)

    @property
    def connector_scheduler(self) -> Any:
        """Of the OffloadingConnector; None: another, or none."""
        return getattr(self.connector, "connector_scheduler", None)

    @property
    def host(self) -> Host | None:
        """The host's cache; None: there is none, or it cannot be looked into."""
        return host_of(self.connector)

    @property
    def host_blocks(self) -> int:
        """GPU blocks that the host's cache has room for; of one that cannot be looked into, those of its bytes."""
        if host := self.host:
            return host.capacity() * self.regime.chunk
        if not split(self.name)[0].startswith("lmcache"):
            return 0
        return int(self.regime.cpu_gib * 2**30) // self.regime.model.block()

    @property
    def connector_worker(self) -> Any:
        """The worker's side of the connector; None: no offloading."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        return get_kv_transfer_group() if has_kv_transfer_group() else None

    @property
    def transfers(self) -> Any:
        """What the OffloadingConnector submits its jobs to; None: another connector, or none."""
        return getattr(getattr(self.connector_worker, "connector_worker", None), "worker", None)

    # -- the GPU's cache ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Until what was to be stored is stored: stores begin with the step after the one that computed."""
        limit = time.monotonic() + LIMIT
        for turn in range(10_000):
            self.one(prompt(0, turn % 7, 5), 3)
            jobs = getattr(self.connector_scheduler, "_jobs", None) or self._has_pending_work()
            if turn >= 2 and not jobs:
                break
            if time.monotonic() > limit:
                raise TimeoutError(f"transfers have not ended after {LIMIT} s: {jobs!r:.200}")
            time.sleep(0.005)
        self.each("serving_synchronize")

    def _has_pending_work(self) -> bool:
        """Whether tiers behind the host's have, or SimpleCPUOffloadConnector."""
        manager = getattr(self.connector_scheduler, "manager", None)
        if hasattr(self.connector, "has_pending_transfers"):
            return bool(self.connector.has_pending_transfers())
        return bool(manager is not None and manager.has_pending_work())

    def forget(self) -> None:
        """Empty the GPU's prefix cache; the host's stays."""
        self.settle()
        for turn in range(100):
            for _ in range(BEHIND):
                self.step({})
            if self.llm.reset_prefix_cache():
                return
            time.sleep(0.02)
            self.one(prompt(0, turn % 7, 5), 3)
        raise TimeoutError("the prefix cache was not emptied")

    def overwrite(self) -> None:
        """forget(), and its bytes become useless."""
        self.forget()
        self.each("serving_overwrite")

    def blocks_of(self, request: Request) -> list[list[int]]:
        """GPU blocks of a running request, a list a group."""
        requests = self.core.scheduler.requests
        internal = next(key for key in requests if key == request.name or key.startswith(request.name + "-"))
        return [list(blocks) for blocks in self.core.scheduler.kv_cache_manager.get_block_ids(internal)]
