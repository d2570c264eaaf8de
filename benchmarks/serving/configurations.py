"""What is compared: vLLM's configuration and environment for each way to offload."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from serving.regimes import Regime

NAMES = {
    "none": "no offloading",
    "nothing": "a connector that does nothing, for phase idle",
    "native": "vLLM's OffloadingConnector and CPUOffloadingSpec",
    "native-swap": "the same, its copies by kvswap (KVSWAP_VLLM_SWAP_BLOCKS=1)",
    "spec": "vLLM's OffloadingConnector, kvswap's spec",
    "kvswap": "KVSwapConnector with its spec",
    "kvswap-layers": "the same, without kvswap_block_first: a tensor a layer",
    "kvswap-overlap": "KVSwapConnector, requests in the step that loads their blocks (kvswap_overlap)",
    "kvswap-overlap-layers": "the same, without kvswap_block_first: a tensor a layer",
    "kvswap-overlap-ended": "as kvswap-overlap, loads are reported when they have ended (kvswap_overlap_ahead: false)",
    "kvswap-exact": "KVSwapConnector, blocks coded without loss (kvswap_codec: exact)",
    "kvswap-mxfp8": "KVSwapConnector, blocks coded in half the bytes, with loss (kvswap_codec: mxfp8)",
    "kvswap-lend": "as kvswap, with a neighbour: an idle engine on the next GPU, and each lends its link (kvswap_lend)",
    "kvswap-replicas": "as kvswap, with a neighbour on the next GPU that has the same host pool (kvswap_replicas)",
    "kvswap-replicas-lend": "the same, and each lends its link",
    "native-files": "vLLM's TieringOffloadingSpec, and its tier of files (fs)",
    "kvswap-files": "KVSwapConnector with kvswap's, and FileTier",
    "simple": "vLLM's SimpleCPUOffloadConnector",
    "simple-kvswap": "the same, its copies by kvswap (KVSWAP_VLLM_SIMPLE_OFFLOAD=1)",
    "lmcache": "LMCache's LMCacheMPConnector and the server that it starts, the mode that LMCache recommends",
    "lmcache-inprocess": "LMCacheConnectorV1: LMCache in the engine's process, which LMCache calls deprecated",
}


def split(name: str) -> tuple[str, str]:
    """kvswap:background is configuration kvswap at kvswap_priority background; also a path (kvswap:dma)."""
    base, _, option = name.partition(":")
    if base not in NAMES:
        raise SystemExit(f"no configuration {base!r}; there are {', '.join(NAMES)}")
    return base, option


_OVERLAP = ("kvswap-overlap", "kvswap-overlap-layers", "kvswap-overlap-ended")
_CODECS = {"kvswap-exact": "exact", "kvswap-mxfp8": "mxfp8"}
_LEND = ("kvswap-lend", "kvswap-replicas-lend")
_REPLICAS = ("kvswap-replicas", "kvswap-replicas-lend")
_CONNECTOR = ("kvswap", "kvswap-layers", "kvswap-files", "kvswap-lend", *_REPLICAS, *_OVERLAP, *_CODECS)
_LMCACHE = ("lmcache", "lmcache-inprocess")
_WITH_SKIPPED = (*_CONNECTOR, "spec", "simple-kvswap")
REPEATED = ("hits", "foreign", "burst", "alone", "loads", "stores", "idle")  # phases, asked for in turns


def takes(name: str, phase: str) -> bool:
    """Whether a phase says anything about this configuration."""
    base, _ = split(name)
    if phase == "meet":
        return has_neighbour(name)
    if phase == "foreign":
        return base in _REPLICAS
    if base in _REPLICAS and phase in ("stores", "scatter"):  # no block can be taken out of their pool
        return False
    if base == "none":
        return phase in ("prepare", "store", "hits", "burst", "alone", "loads", "stores", "idle", "profile")
    if base == "nothing":
        return phase in ("prepare", "alone", "idle")
    if base in _LMCACHE:  # its cache cannot be looked into: no block can be taken out, or handed out in random order
        return phase in ("prepare", "truth", "store", "hits", "burst", "alone", "loads", "idle")
    if base in _CODECS:  # a copy that is left out shows as a block that cannot be decoded, which is computed again
        return phase != "skipped"
    return phase != "skipped" or base in _WITH_SKIPPED


def has_neighbour(name: str) -> bool:
    """Whether a second engine runs beside it, on the next GPU."""
    return lends(name) or split(name)[0] in _REPLICAS


def lends(name: str) -> bool:
    """Whether it and its neighbour lend each other their links."""
    return split(name)[0] in _LEND


def lossy(name: str) -> bool:
    """Whether blocks come back from the host other than they were computed."""
    return _CODECS.get(split(name)[0], "exact") != "exact"


def register(name: str) -> None:
    """What a release before 0.33 has to be told, and the plugin that a kvswap tells vLLM of if it is installed."""
    if environment(name):
        import kvswap.vllm

        kvswap.vllm.register()
    if split(name)[0] == "kvswap-files":
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        SecondaryTierFactory.register_tier("FileTier", "kvswap.vllm", "FileTier")


def environment(name: str) -> dict[str, str]:
    """The switches of this configuration."""
    switches = {"native-swap": "KVSWAP_VLLM_SWAP_BLOCKS", "simple-kvswap": "KVSWAP_VLLM_SIMPLE_OFFLOAD"}
    base, _ = split(name)
    return {switches[base]: "1"} if base in switches else {}


def remove_shared(process: int) -> None:
    """The files that vLLM has the host cache of the engine in this process in: some releases and specs."""
    for path in Path("/dev/shm").glob(f"vllm_offload_{_engine_id(process)}.mmap*"):
        path.unlink(missing_ok=True)


def _engine_id(process: int) -> str:
    return f"serving-{process}"


def _lmcache(base: str, regime: Regime) -> dict[str, Any]:
    """LMCache 0.5.6 as its documentation sets it up: chunks of 256 tokens (its default), only host memory.

    https://docs.lmcache.ai/getting_started/quickstart.html has the connector's module, the server's options and the
    chunk; https://docs.lmcache.ai/mp/configuration.html the other options. All host memory is allocated at the start,
    as the others do, and eviction begins when it is full: by default at four fifths.
    https://docs.lmcache.ai/kv_cache/storage_backends/cpu_ram.html has the options of the mode in the process."""
    if base == "lmcache-inprocess":
        extra: dict[str, Any] = {"lmcache.local_cpu": True, "lmcache.chunk_size": regime.lmcache_chunk}
        extra["lmcache.max_local_cpu_size"] = regime.cpu_gib
        return {"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": extra}
    server = f"--l1-size-gb {regime.cpu_gib} --no-l1-use-lazy --eviction-policy LRU --eviction-trigger-watermark 0.99"
    server += f" --chunk-size {regime.lmcache_chunk} --http-port {_free_port()}"
    if regime.device == "cpu":
        server += " --supported-transfer-mode auto"
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "127.0.0.1", "lmcache.mp.port": _free_port(),
            "lmcache.mp.autostart": True, "lmcache.mp.autostart.server_args": server,
            "lmcache.mp.autostart.wait_timeout": 180.0,
        },
    }  # fmt: skip


def _free_port() -> int:
    """Of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


def transfer_config(name: str, regime: Regime, folder: Path) -> dict[str, Any] | None:
    """vLLM's --kv-transfer-config; None: no connector. folder: for files."""
    base, option = split(name)
    if base == "none":
        return None
    extra: dict[str, Any] = {"cpu_bytes_to_use": int(regime.cpu_gib * 2**30)}
    made: dict[str, Any] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    made["engine_id"] = _engine_id(os.getpid())
    if base == "nothing":
        return {**made, "kv_connector": "NothingConnector", "kv_connector_module_path": "serving.nothing"}
    if base in _LMCACHE:
        return {**made, **_lmcache(base, regime)}
    if base.startswith("simple"):
        made["kv_connector"] = "SimpleCPUOffloadConnector"
    elif regime.chunk > 1:
        extra["blocks_per_chunk"] = regime.chunk
    if base == "spec":
        extra.update(spec_name="KVSwapOffloadingSpec", spec_module_path="kvswap.vllm")
    if base in _OVERLAP:
        extra["kvswap_overlap"] = True
    if base == "kvswap-overlap-ended":
        extra["kvswap_overlap_ahead"] = False
    if has_neighbour(name):
        group = f"serving-{os.getppid()}"  # of the comparison, which has started both
        extra.update({"kvswap_lend": group} if lends(name) else {})
        extra.update({"kvswap_replicas": f"{group}{'-lend' * lends(name)}"} if base in _REPLICAS else {})
        if base == "kvswap-lend" and regime.device == "cpu":  # where vLLM has a file for its host cache
            extra.update(spec_name="TieringOffloadingSpec", secondary_tiers=[])
    if base in _CODECS:
        extra["kvswap_codec"] = _CODECS[base]
    if base in ("kvswap-layers", "kvswap-overlap-layers"):
        extra["kvswap_block_first"] = False
    if base in _CONNECTOR:
        made.update(kv_connector="KVSwapConnector", kv_connector_module_path="kvswap.vllm")
        made["kv_load_failure_policy"] = "recompute"
    if base == "native-files":
        extra.update(spec_name="TieringOffloadingSpec")
        extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(folder / "files-native")}]
    if base == "kvswap-files":
        tier = {"type": "FileTier", "directory": str(folder / "files-kvswap"), "capacity": 16 << 30}
        extra.update(spec_name="TieringOffloadingSpec", secondary_tiers=[tier])
    if option:
        kind = "kvswap_priority" if option in ("normal", "high", "background") else "kvswap_path"
        extra[kind] = option
    return {**made, "kv_connector_extra_config": extra}
