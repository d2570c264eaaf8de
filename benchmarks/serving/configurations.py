"""What is compared: vLLM's configuration and environment for each way to offload."""

from __future__ import annotations

import os
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
    "native-files": "vLLM's TieringOffloadingSpec, and its tier of files (fs)",
    "kvswap-files": "KVSwapConnector with kvswap's, and FileTier",
    "simple": "vLLM's SimpleCPUOffloadConnector",
    "simple-kvswap": "the same, its copies by kvswap (KVSWAP_VLLM_SIMPLE_OFFLOAD=1)",
}


def split(name: str) -> tuple[str, str]:
    """kvswap:background is configuration kvswap at kvswap_priority background; also a path (kvswap:dma)."""
    base, _, option = name.partition(":")
    if base not in NAMES:
        raise SystemExit(f"no configuration {base!r}; there are {', '.join(NAMES)}")
    return base, option


_OVERLAP = ("kvswap-overlap", "kvswap-overlap-layers", "kvswap-overlap-ended")
_CONNECTOR = ("kvswap", "kvswap-layers", "kvswap-files", *_OVERLAP)
_WITH_SKIPPED = (*_CONNECTOR, "spec", "simple-kvswap")
REPEATED = ("hits", "burst", "alone", "loads", "stores", "idle")  # phases, asked for in turns


def takes(name: str, phase: str) -> bool:
    """Whether a phase says anything about this configuration."""
    base, _ = split(name)
    if base == "none":
        return phase in ("prepare", "hits", "alone", "stores", "idle", "profile")
    if base == "nothing":
        return phase in ("prepare", "alone", "idle")
    return phase != "skipped" or base in _WITH_SKIPPED


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


def shared_file(process: int) -> Path:
    """Where vLLM's tiering spec has the host cache of the engine in this process."""
    return Path(f"/dev/shm/vllm_offload_{_engine_id(process)}.mmap")


def _engine_id(process: int) -> str:
    return f"serving-{process}"


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
