"""An engine's process: phases are asked for by lines of JSON on stdin, and answered on a descriptor of their own.

python3 -m serving.child CONFIGURATION REGIME OVERRIDES FOLDER DESCRIPTOR
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving.configurations import remove_shared


def _pinning(seconds: list[float]) -> None:
    """Note how long a connector takes to register the caches: there the host memory is allocated and pinned."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector, simple_cpu_offload_connector

    for owner in (
        offloading_connector.OffloadingConnector,
        simple_cpu_offload_connector.SimpleCPUOffloadConnector,
    ):
        for name in ("register_kv_caches", "register_cross_layers_kv_cache"):
            if name in vars(owner):
                setattr(owner, name, _timed(vars(owner)[name], seconds))


def _timed(call: Any, seconds: list[float]) -> Any:
    def timed(*args: Any, **keywords: Any) -> Any:
        begin = time.perf_counter()
        try:
            return call(*args, **keywords)
        finally:
            seconds.append(time.perf_counter() - begin)

    return timed


def _about(engine: Any, imported: float, pinning: list[float]) -> dict[str, Any]:
    import torch
    import vllm

    return {
        **engine.each("serving_about")[0],
        "vllm": vllm.__version__, "torch": torch.__version__, "import_s": round(imported, 1),
        "start_s": round(engine.seconds, 1), "register_s": [round(value, 2) for value in pinning],
        "gpu_blocks": engine.gpu_blocks,
        "groups": len(engine.core.scheduler.kv_cache_config.kv_cache_groups),
        "worker": type(getattr(engine.transfers, "_worker", engine.transfers)).__name__,
        "host_gib": engine.regime.cpu_gib, "host_blocks": engine.host_blocks,
    }  # fmt: skip


def _probe() -> float:
    """Milliseconds of a fixed piece of Python: how fast the processor is now. Its speed changes on a shared machine."""
    best = float("inf")
    for _ in range(5):
        begin, total = time.perf_counter(), 0
        for i in range(20_000):
            total += i % 7
        best = min(best, time.perf_counter() - begin)
    return 1e3 * best


def _run(phases: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """A phase's record. One that fails leaves an engine that may serve the next."""
    probe, begin = _probe(), time.perf_counter()
    try:
        record = getattr(phases, asked.pop("phase"))(**asked)
    except Exception as error:
        traceback.print_exc()
        return {"failed": repr(error)[:500]}
    took = time.perf_counter() - begin
    return {"record": record, "took_s": round(took, 2), "probe_ms": round((probe + _probe()) / 2, 4)}


def serve(descriptor: int, start: Callable[[], tuple[Any, dict[str, Any]]]) -> int:
    """Answers on the descriptor until stdin ends: first what start() says of its engine, then a phase a line. start()
    gives the phases too. The exit status."""
    faulthandler.enable()
    answers = os.fdopen(descriptor, "w")

    def answer(record: dict[str, Any]) -> None:
        answers.write(json.dumps(record) + "\n")
        answers.flush()

    try:
        phases, about = start()
        answer(about)
        for line in sys.stdin:
            answer(_run(phases, json.loads(line)))
    except BaseException as error:
        traceback.print_exc()
        answer({"error": repr(error)[:500]})
        return 1
    return 0


def _start(name: str, regime_name: str, overrides: str, folder: str) -> tuple[Any, dict[str, Any]]:
    from serving.engine import Engine, set_environment
    from serving.phases import Phases
    from serving.regimes import regime

    made, begin, pinning = regime(regime_name, json.loads(overrides)), time.perf_counter(), list[float]()
    set_environment(name, made, Path(folder))
    _pinning(pinning)
    imported = time.perf_counter() - begin
    engine = Engine(name, made, Path(folder))
    phases = Phases(engine)
    return phases, _about(engine, imported, pinning)


def main() -> None:
    """One of vLLM's engines."""
    *what, descriptor = sys.argv[1:]
    status = serve(int(descriptor), lambda: _start(*what))
    remove_shared(os.getpid())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the process's memory goes with it, so nothing is tidied up


if __name__ == "__main__":
    main()
