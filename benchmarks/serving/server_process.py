"""`vllm serve` over HTTP on a socket in a folder, of one regime and configuration.

python3 -m serving.server_process CONFIGURATION REGIME OVERRIDES FOLDER

The workers are other processes, which run this module too: the platform without a GPU is set up by the import of
serving.worker in each of them.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from serving.configurations import register, transfer_config
from serving.engine import set_environment
from serving.models import BLOCK
from serving.regimes import Regime, regime
from serving.worker import Worker

SOCKET = "socket"  # in the folder

if hasattr(signal, "SIGUSR1"):
    faulthandler.register(signal.SIGUSR1)  # where each thread is, into the log: for a server that hangs


class FaultyWorker(Worker):
    """Called by /collective_rpc of vLLM's development mode."""

    _serving_faults: ExitStack | None = None

    def serving_fault(self, kind: str | None = None, action: str = "", options: dict[str, Any] | None = None) -> None:
        """kvswap.testing.fault() until the next call; None: none."""
        import torch

        import kvswap
        from kvswap import testing

        if self._serving_faults is not None:
            self._serving_faults.close()
        self._serving_faults = ExitStack()
        if kind is not None:
            name = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "host:0"
            fault: Any = testing.fault
            self._serving_faults.enter_context(fault(kvswap.Device(name), kind, action, **(options or {})))

    def serving_jobs(self) -> dict[str, int]:
        """kvswap's jobs since the start; nothing where vLLM's own worker moves the blocks."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        from kvswap.vllm._connector import _handlers_of

        found = {"stores": 0, "loads": 0, "failed_stores": 0, "failed_loads": 0}
        side = get_kv_transfer_group() if has_kv_transfer_group() else None
        worker = getattr(getattr(side, "connector_worker", None), "worker", None)
        for handler in _handlers_of(getattr(worker, "_worker", worker)) if worker is not None else ():
            kind, stats = "stores" if handler.gpu_to_cpu else "loads", handler.stats()
            found[kind] += stats.jobs
            found[f"failed_{kind}"] += stats.failed
        return found


def in_float32(made: Regime) -> Regime:
    """The regime whose caches have the same numbers of blocks; sizes of a Model are those of bfloat16."""
    return replace(made, cpu_gib=2 * made.cpu_gib)


def arguments(name: str, made: Regime, folder: Path) -> list[str]:
    """Of `vllm serve`."""
    made = in_float32(made)
    options = {
        "load-format": "dummy", "dtype": "float32", "max-model-len": made.max_len, "max-num-seqs": 64,
        "max-num-batched-tokens": made.batched, "block-size": BLOCK, "num-gpu-blocks-override": made.gpu_blocks,
        "kv-cache-memory-bytes": 2 * (made.gpu_blocks + 1) * made.model.block() // made.ranks,
        "tensor-parallel-size": made.ranks, "uds": folder / SOCKET, "gpu-memory-utilization": 0.1,
        "worker-extension-cls": "serving.server_process.FaultyWorker",
    }  # fmt: skip
    if (transfer := transfer_config(name, made, folder)) is not None:
        transfer["kv_connector_extra_config"]["offload_prompt_only"] = made.prompt_only
        options["kv-transfer-config"] = json.dumps(transfer)
    switches = ["--skip-tokenizer-init", "--enforce-eager", "--disable-uvicorn-access-log"]
    if made.device == "cpu":
        switches.append("--no-disable-hybrid-kv-cache-manager")
    pairs = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    return ["serve", str(made.model.write(folder)), *pairs, *switches]


def main() -> None:
    """vLLM's command line, to its end."""
    name, regime_name, overrides, folder = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), Path(sys.argv[4])
    made = regime(regime_name, overrides)
    set_environment(name, made, folder)
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_SERVER_DEV_MODE="1")
    os.environ["TRITON_F32_DEFAULT"] = "ieee"  # a GPU's attention in float32 is Triton's, which would take TF32
    register(name)
    from vllm.entrypoints.cli import main as command

    sys.argv[1:] = arguments(name, made, folder)
    command.main()


if __name__ == "__main__":
    main()
