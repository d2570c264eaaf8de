"""vLLM's own tests of its offloading layer, run against kvswap's classes.

    python tests/integration/vllm_own_tests.py SOURCE [--device cuda:0]

SOURCE: an unpacked vLLM source package, which holds them (pip download --no-deps --no-binary vllm). They are taken from
there as they are. What stands in for what:

- SingleDirectionOffloadingHandler of vllm.v1.kv_offload.cpu.gpu_worker is kvswap's, inside vLLM's own worker (mode
  "handlers"); in a second run the worker is kvswap's as well (mode "worker").
- vllm._custom_ops.swap_blocks_batch is kvswap's. The compiled part of vLLM is not needed and not there.
- The fixtures default_vllm_config and caplog_vllm are made here, as vLLM's tests/conftest.py makes them; that file
  itself wants all that vLLM's whole suite does, and is left out.

Tests that reach into the insides of vLLM's own classes are left out by name, below. Then the same tests run with a
handler that drops the last block of each job: that run has to fail, in every test that moves blocks.
"""

# mypy: ignore-errors

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# test_shared_offload_region.py is about the region alone, which stays vLLM's; test_gpu_worker.py moves blocks in one.
FILES = ("test_gpu_worker.py", "test_canonical_layout.py", "test_swap_blocks_batch.py")

INSIDES = {
    "handlers": {
        "test_handler_shutdown_skips_transfers_after_event_sync_failure": "vLLM's pools of streams and events"
    },
    "worker": {
        "test_handler_shutdown_skips_transfers_after_event_sync_failure": "vLLM's pools of streams and events",
        "test_worker_shutdown_releases_region_and_runs_both_handlers": "builds vLLM's worker without its constructor",
        "test_worker_logs_handler_error_and_cleans_region": "the same",
        "test_worker_syncs_before_cleanup_after_handler_failure": "the same",
    },
}
MOVING = ("test_transfer", "test_transfer_multi_group")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path, help="unpacked source package of vLLM")
    parser.add_argument("--device", default=None, help="cpu or cuda:0; default: the GPU if there is one")
    parser.add_argument("--mode", choices=("handlers", "worker"), help=argparse.SUPPRESS)  # of one run
    parser.add_argument("--drop-last", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


class Results:
    """Counts, the fixtures that are vLLM's, and what is left out."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.outcomes: dict[str, list[str]] = {}
        self.left_out: list[str] = []

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        out = [item for item in items if item.name.partition("[")[0] in INSIDES[self.mode]]
        self.left_out = [item.name for item in out]
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes.setdefault(report.outcome, []).append(report.nodeid.rpartition("::")[2])

    @pytest.fixture
    def default_vllm_config(self) -> Iterator[None]:
        from vllm.config import VllmConfig, set_current_vllm_config

        with set_current_vllm_config(VllmConfig()):
            yield

    @pytest.fixture
    def caplog_vllm(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[pytest.LogCaptureFixture]:
        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
        with caplog.at_level(logging.INFO):
            yield caplog


def make_dropping(base: type) -> type:
    """A handler that forgets the last block of every job."""
    from kvswap.offload import CPULoadStoreSpec, GPULoadStoreSpec

    class Dropping(base):
        def transfer_async(self, job_id: int, spec: Any, dst_spec: Any = None) -> bool:
            source, target = spec if dst_spec is None else (spec, dst_spec)
            gpu, cpu = (source, target) if self.gpu_to_cpu else (target, source)
            sizes, factor = list(gpu.group_sizes), self.blocks_per_chunk
            group = max(i for i, size in enumerate(sizes) if size)
            begin = gpu.block_indices[group] % factor
            chunks = list(cpu.block_ids)
            if -(-(begin + sizes[group] - 1) // factor) < -(-(begin + sizes[group]) // factor):
                chunks.pop()
            sizes[group] -= 1
            less = GPULoadStoreSpec(gpu.block_ids[:-1], sizes, gpu.block_indices), CPULoadStoreSpec(chunks)
            return super().transfer_async(job_id, less if self.gpu_to_cpu else less[::-1])

    return Dropping


def run_once(options: argparse.Namespace) -> int:
    """In a process of its own: vLLM's tests with our classes in the place of vLLM's."""
    import vllm
    from vllm import _custom_ops
    from vllm.v1.kv_offload.cpu import gpu_worker

    import kvswap.offload
    from kvswap.offload import _handlers
    from kvswap.vllm import _plugin

    handler = kvswap.offload.SingleDirectionOffloadingHandler
    if options.drop_last:
        handler = make_dropping(handler)
    gpu_worker.SingleDirectionOffloadingHandler = handler
    _handlers.SingleDirectionOffloadingHandler = handler
    _custom_ops.swap_blocks_batch = _plugin.swap_blocks_batch
    if options.mode == "worker":
        gpu_worker.CPUOffloadingWorker = kvswap.offload.OffloadingWorker
    results = Results(options.mode)
    folder = options.source / "tests" / "v1" / "kv_offload" / "cpu"
    tests = [str(folder / name) for name in FILES if (folder / name).exists()]
    quiet = [
        "-q",
        "--no-header",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "--tb=no" if options.drop_last else "--tb=short",
    ]
    pytest.main([*quiet, f"--rootdir={options.source}", "-W", "ignore", *tests], plugins=[results])
    counts = {outcome: len(names) for outcome, names in sorted(results.outcomes.items())}
    what = f"vLLM {vllm.__version__}, mode {options.mode}{', last block dropped' if options.drop_last else ''}"
    print(f"{what}: {counts}; left out: {sorted({name.partition('[')[0] for name in results.left_out})}", flush=True)
    if not options.drop_last:
        moved = [name for name in results.outcomes.get("passed", []) if name.startswith(MOVING)]
        return 0 if moved and not results.outcomes.get("failed") else 1
    passed = [name for name in results.outcomes.get("passed", []) if name.startswith(MOVING)]
    failed = [name for name in results.outcomes.get("failed", []) if name.startswith(MOVING)]
    print(f"  of those that move blocks, {len(failed)} fail as they should and {len(passed)} do not notice", flush=True)
    return 0 if failed and not passed else 1


def metadata_for(source: Path, folder: Path, cpu: bool) -> None:
    """vLLM reads its platform from its package's metadata, which a source package does not have."""
    version = source.name.removeprefix("vllm-") + ("+cpu" if cpu else "")
    described = folder / f"vllm-{version}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def main() -> int:
    options = parse()
    options.source = options.source.resolve()
    if options.mode:
        return run_once(options)
    cpu = options.device == "cpu"
    if options.device is None:
        import torch

        cpu = not torch.cuda.is_available()
    status = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        metadata_for(options.source, folder, cpu)
        before = filter(None, [os.environ.get("PYTHONPATH")])
        places = os.pathsep.join([str(folder), str(options.source), *before])
        environment = {**os.environ, "PYTHONPATH": places, "VLLM_LOGGING_LEVEL": "ERROR"}
        for extra in (["--mode", "handlers"], ["--mode", "worker"], ["--mode", "handlers", "--drop-last"]):
            command = [sys.executable, __file__, str(options.source), *extra]
            status |= subprocess.run(command, env=environment, check=False, cwd=folder).returncode
    print("all as it has to be" if status == 0 else "NOT as it has to be", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
