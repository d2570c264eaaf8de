"""What is public, name by name, and what of it the differential program leaves out, with the reason."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

from members import members_of

import kvswap
from differential import table  # noqa: F401  # fills OPERATIONS
from differential.frame import OPERATIONS

MODULES = ("fastdeploy", "files", "memory", "offload", "testing", "trtllm")

# Public modules of which nothing is called, and why.
MODULES_LEFT_OUT = {
    "bench": "measures; it has a table of its own of what it verified",
    "calibrate": "measures, and writes one file: test_calibrate.py",
    "cli": "the command line over the rest: test_cli.py",
    "codecs": "arrays in, arrays out: test_codecs.py",
    "commands": "its subcommands: test_cli.py",
    "identity": "names what a stored block is, and moves nothing: test_identity.py",
    "info": "describes the machine: test_cli.py",
    "lmcache": "needs LMCache: tests/integration runs it, test_lmcache.py without it; it is kvswap.files below",
    "metrics": "reads counters: test_metrics.py",
    "remote": "needs Mooncake's nodes: test_remote.py; tests/random/remote_soak.py has random operations on several",
    "sglang": "needs SGLang: tests/integration runs it, test_sglang_*.py a stand-in; files, remote or swaps below",
    "typing": "types for annotations: tests/project/typing_user.py",
    "replay": "is such a program itself, over one trace: test_replay.py",
    "share": "several processes: test_share.py, which kills them at random",
    "top": "the live view: test_top.py",
    "tracing": "ranges round the same calls: test_metrics.py",
    "vllm": "needs vLLM: tests/integration runs it; its handler is kvswap.offload's",
}

# Public names that no operation calls, and why.
LEFT_OUT = {
    "__version__": "a text",
    "Memory.__cuda_array_interface__": "its address, for other libraries; the tests of the bindings read it",
    "Memory.__array_interface__": "the same",
    "memory.Mapped.__cuda_array_interface__": "the same",
    "memory.Mapped.__array_interface__": "the same",
    "files.Layout.codings": "of a store of coded blocks: test_files_coded.py",
    "trtllm.KVCacheBlockPool.secondary_nbytes": "of coded blocks: test_transfer_manager.py",
    "offload.SingleDirectionOffloadingHandler.member": "of handlers of several processes: test_offload_share.py",
    "offload.SingleDirectionOffloadingHandler.lending": "the same: test_offload_lend.py",
    "offload.SingleDirectionOffloadingHandler.compute_stream": "what the constructor was given",
    "memory.HostPool.torch": "needs torch; layer() is the same view",
    "memory.SharedPool.torch": "needs torch; layer() is the same view",
    "files.MissingKey": "raised, not called",
    "files.Cleared": "what clear() returns",
    "files.FileStore.clear": "ends all blocks of the model: test_files_epoch.py, test_files_epoch_races.py",
    "files.clear": "the same, of a directory",
    "testing.Action": "a type",
    "testing.Kind": "a type",
    "testing.parse_action": "a text to a text",
    "testing.parse_kind": "a text to a text",
    "fastdeploy.install": "patches other libraries' modules; test_fastdeploy.py",
    "fastdeploy.get_data_ptr_ipc": "segments of FastDeploy between processes: test_fastdeploy_ipc.py",
    "fastdeploy.set_data_ipc": "the same",
    "fastdeploy.share_external_data": "the same",
    "fastdeploy.unset_data_ipc": "the same",
    "offload.CanonicalPageMapping": "fragments of pages: test_offload.py has a model of them",
    "offload.CanonicalPageMapping.is_writer": "the same",
    "offload.CopyRun": "the same",
    "offload.HandlerStats": "counts; stats() is called",
    "offload.Job": "what a handler keeps of a job",
    "offload.Job.ended": "the same",
    "offload.Job.seconds": "the same",
    "offload.Job.why_failed": "the same",
    "files.FileStore.take_events": "test_files_events.py compares it with the keys",
    "trtllm.DiskAddress": "pages of the caller's open files: test_trtllm.py",
    "trtllm.DiskCopy": "the same",
    "trtllm.DiskCopy.done": "the same",
    "trtllm.DiskCopy.failed": "the same",
    "trtllm.DiskCopy.wait": "the same",
    "trtllm.copy_disk_to_disk": "the same",
    "trtllm.copy_disk_to_host": "the same",
    "trtllm.copy_host_to_disk": "the same",
    "trtllm.KVCacheBlockPool.bits": "arithmetic of a shape: test_transfer_manager.py",
    "trtllm.KVCacheBlockPool.can_cut": "the same",
    "trtllm.KVCacheBlockPool.cuts": "the same",
    "trtllm.KVCacheBlockPool.layer_nbytes": "the same",
}


def members(name: str, value: Any) -> set[str]:
    """A class's own methods and properties; not of exceptions, enumerations and tuples."""
    if not inspect.isclass(value) or issubclass(value, (BaseException, int, tuple)):
        return set()
    return {
        f"{name}.{key}"
        for key, member in members_of(value).items()
        if not key.startswith("_") and (callable(member) or not isinstance(member, (int, str, float, type(None))))
        if not isinstance(member, (list, dict))
    } | {f"{name}.{key}" for key in vars(value) if key in ("__cuda_array_interface__", "__array_interface__")}


def public_names() -> set[str]:
    """As the program's operations name them: "Transfer.wait", "memory.HostPool.grow", "trtllm.batched_copy"."""
    found: set[str] = set()
    for name in kvswap.__all__:
        found |= {name} | members(name, getattr(kvswap, name))
    for module_name in MODULES:
        module = importlib.import_module(f"kvswap.{module_name}")
        for name in module.__all__:
            value, full = getattr(module, name), f"{module_name}.{name}"
            found |= {full} | members(full, value)
    return found


def public_modules() -> set[str]:
    return {info.name for info in pkgutil.iter_modules(kvswap.__path__) if not info.name.startswith("_")}


def called_names() -> set[str]:
    return {name for entry in OPERATIONS.values() for name in entry.calls}
