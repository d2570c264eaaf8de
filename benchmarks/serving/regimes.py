"""What is compared under: the model's shape, the caches, and how much of each phase is run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from serving.models import Model


@dataclass(frozen=True)
class Regime:
    """One set of engines. cpu_gib: the host cache of each. chunk: GPU blocks in a host block. runner v1: the cache is
    one tensor, whose blocks are all layers together. ranks: GPUs, each with a part of the heads; what is done in
    workers of their own (submissions, the connector's calls) is not watched then. fragmented: host blocks are handed
    out in random order, as in a server that has run for long. prompt_only: serving.server offloads no answers, as is
    vLLM's default."""

    model: Model = field(default_factory=Model)
    gpu_blocks: int = 2048
    cpu_gib: float = 31.0
    chunk: int = 1
    runner: str = "v2"
    ranks: int = 1
    fragmented: bool = False
    prompt_only: bool = False
    lmcache_chunk: int = 256
    prompts: int = 48
    length: int = 4097  # tokens in a prompt: whole blocks, and the one token that is computed where they are cached
    hits: int = 12  # prompts taken one at a time
    at_once: int = 0  # prompts in a burst; 0: all
    truth: int = 8
    resident: int = 4  # prompts that the GPU keeps while decode beside stores runs
    pace: int = 3  # tokens that a decoder makes between two requests that store
    decoders: int = 32
    decode_tokens: int = 128
    in_flight: int = 2  # requests beside the decoders
    max_len: int = 8192
    batched: int = 8192  # tokens in a step
    mode: str = "graph"
    device: str = "cuda"


_TOY = Regime(
    model=Model(layers=2, kv_heads=2, hidden=256),
    gpu_blocks=96,
    cpu_gib=0.008,
    prompts=4,
    length=193,
    hits=3,
    truth=3,
    resident=2,
    decoders=3,
    decode_tokens=24,
    max_len=512,
    batched=512,
    mode="eager",
    device="cpu",
    runner="v1",
    lmcache_chunk=64,
)

REGIMES: dict[str, Regime] = {
    "pages64k": Regime(),
    # pages64k for six engines in 128 GiB of host memory. LMCache evicts a fifth once its cache is full: it has to fit.
    "rivals": Regime(cpu_gib=13.0, prompts=16, truth=4, hits=8, decode_tokens=64),
    "pages16k": Regime(model=Model(kv_heads=2), cpu_gib=8.0),
    "layers8": Regime(model=Model(layers=8), cpu_gib=8.0),
    "fragmented": Regime(fragmented=True),
    "fragmented16k": Regime(model=Model(kv_heads=2), cpu_gib=8.0, fragmented=True),
    "chunk8": Regime(chunk=8),
    "one-tensor": Regime(runner="v1"),
    "mla": Regime(model=Model(kind="mla", hidden=2048), cpu_gib=9.0),
    "groups": Regime(model=Model(kind="groups", layers=16), gpu_blocks=4096, cpu_gib=16.0),  # a block is of one group
    # An engine's host cache is in /dev/shm from 0.33 on, and that of kvswap-replicas in any case.
    "neighbours": Regime(cpu_gib=2.75, prompts=3, hits=3, truth=2, resident=1, decoders=8, decode_tokens=16),
    "ranks2": Regime(ranks=2, cpu_gib=32.0),
    # vLLM counts a block that files have as missing while the host has no room for it: a burst has to fit.
    "files": Regime(model=Model(kv_heads=2), cpu_gib=2.0, at_once=12),
    "toy": _TOY,
    "toy-files": replace(_TOY, cpu_gib=0.0009, at_once=2),
    "toy-neighbours": replace(  # a load is of 16 MiB and more, which links are lent for
        _TOY,
        model=Model(layers=8, kv_heads=8, hidden=512),
        gpu_blocks=288,
        cpu_gib=0.13,
        length=1057,
        truth=2,
        max_len=1280,
        batched=1280,
    ),
    "toy-ranks": replace(_TOY, ranks=2),
    "toy-groups": replace(_TOY, model=replace(_TOY.model, kind="groups", window=64)),
}


def regime(name: str, overrides: dict[str, Any]) -> Regime:
    """The regime of this name; overrides: fields that are other than its own."""
    if name not in REGIMES:
        raise SystemExit(f"no regime {name!r}; there are {', '.join(REGIMES)}")
    return replace(REGIMES[name], **overrides)
