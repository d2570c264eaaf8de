"""Every timeout of the public API takes the same values and refuses the same ones.

The functions are found in the stub, in the package's sources and in the C headers: a new one needs a row here."""

# mypy: disable-error-code="arg-type,call-overload,misc,func-returns-value,attr-defined,no-any-return"

from __future__ import annotations

import ast
import functools
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import ROOT

import kvswap
from kvswap import _C, files, memory, offload, share, trtllm

TAKEN: list[Any] = [0, 0.5, 5, 1e10, math.inf, None, 10**400, np.float64(2), np.int32(3)]
REFUSED: list[tuple[Any, type[Exception], str]] = [
    (-1, ValueError, "must be 0 or more seconds"),
    (-1e-9, ValueError, "must be 0 or more seconds"),
    (-math.inf, ValueError, "must be 0 or more seconds"),
    (math.nan, ValueError, "must be 0 or more seconds"),
    (-(10**400), ValueError, "must be 0 or more seconds"),
    (True, TypeError, "must be a number of seconds or None, not bool"),
    (False, TypeError, "must be a number of seconds or None, not bool"),
    ("5", TypeError, "must be a number of seconds or None, not str"),
    (b"5", TypeError, "must be a number of seconds or None, not bytes"),
    ([], TypeError, "must be a number of seconds or None, not list"),
]
Waits = Callable[[Any], Any]


def device() -> kvswap.Device:
    return kvswap.Device("host:0")


def transfer() -> kvswap.Transfer:
    return kvswap.swap_blocks_batch([], [], 1, device="host:0")


def store(folder: Path) -> files.FileStore:
    place = tempfile.mkdtemp(dir=folder)
    return files.FileStore(f"{place}/s", files.Layout(4096), capacity=1 << 20, engine="threads")


def handler() -> Any:
    gpu, cpu = np.zeros((8, 256), np.uint8), np.ones((8, 256), np.uint8)
    refs = [[offload.CanonicalKVCacheRef(0, 256)]]
    return offload.SingleDirectionOffloadingHandler([gpu], [cpu], 1, refs, True, device=device())


def stub_functions() -> set[str]:
    """Class.method, and functions, of kvswap/_C.pyi with an argument `timeout`."""
    found = set()
    tree = ast.parse((ROOT / "kvswap" / "_C.pyi").read_text())
    for node in tree.body:
        holder = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for each in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(each, ast.FunctionDef):
                arguments = [a.arg for a in (*each.args.args, *each.args.kwonlyargs)]
                if "timeout" in arguments:
                    found.add(holder + each.name)
    return found


def test_c_takes_every_limit() -> None:
    """tests/c/test_timeouts.c calls each function of the headers that has one."""
    text = (ROOT / "tests" / "c" / "test_timeouts.c").read_text()
    for header in sorted((ROOT / "csrc").glob("kvswap*.h")):
        for name in re.findall(r"\b(kvs_\w+)\((?:[^;()]|\n)*\bint64_t timeout_ns", header.read_text()):
            assert name in text, f"{name} of {header.name}"


# -- Python -----------------------------------------------------------------------------------------------------------

Row = Callable[[Path, list[Any]], Waits]  # a folder, and a list of what is to be closed -> the call, of a timeout


def kept(closing: list[Any], made: Any) -> Any:
    closing.append(made)
    return made


def pool() -> Any:
    made = _C.HostPool(2, 4096, max_blocks=4, device="host:0")
    made.wait()
    return made


def shared() -> Any:
    return _C.SharedPool(f"kvs-timeouts-{os.getpid()}", 2, 4096, create=True, device="host:0")


def deleted(folder: Path, closing: list[Any]) -> Any:
    done = kept(closing, store(folder)).delete([b"x"])
    while not done.done():
        time.sleep(0.001)
    return done


def unregister(timeout: Any) -> None:
    array = np.zeros(1 << 16, np.uint8)
    device().register(array)
    try:
        device().unregister(array, timeout)
    except (TypeError, ValueError, TimeoutError):
        device().unregister(array)
        raise


def free(timeout: Any) -> None:
    ptr = _C.host_alloc(4096, device="host:0")
    try:
        _C.host_free(ptr, timeout=timeout)
    except (TypeError, ValueError, TimeoutError):
        _C.host_free(ptr)
        raise


def host_unregister(timeout: Any) -> None:
    array = np.zeros(1 << 16, np.uint8)
    _C.host_register(array, array.nbytes, device="host:0")
    try:
        _C.host_unregister(array, timeout=timeout)
    except (TypeError, ValueError, TimeoutError):
        _C.host_unregister(array)
        raise


def close_mapped(timeout: Any) -> None:
    held = device().alloc(4096)
    with memory.open(memory.export(held)) as opened:
        opened.close(timeout)


STUB: dict[str, Row] = {
    "Device.set_slots": lambda folder, closing: lambda timeout: device().set_slots(1 << 20, timeout=timeout),
    "Device.lend": lambda folder, closing: lambda timeout: kvswap.Device("host:59").lend(device(), 0, timeout=timeout),
    "Device.synchronize": lambda folder, closing: device().synchronize,
    "Device.unregister": lambda folder, closing: unregister,
    "Memory.free": lambda folder, closing: device().alloc(4096).free,
    "Mapped.close": lambda folder, closing: close_mapped,
    "Stream.synchronize": lambda folder, closing: kvswap.Stream(device()).synchronize,
    "Event.synchronize": lambda folder, closing: kvswap.Event(device()).synchronize,
    "_AnyTransfer.wait": lambda folder, closing: transfer().wait,
    "_AnyTransfer.wait of files": lambda folder, closing: deleted(folder, closing).wait,
    "FileStore.close": lambda folder, closing: kept(closing, store(folder)).close,
    "_AnyHostPool.wait": lambda folder, closing: kept(closing, pool()).wait,
    "_AnyHostPool.close": lambda folder, closing: kept(closing, pool()).close,
    "_AnyHostPool.wait shared": lambda folder, closing: kept(closing, shared()).wait,
    "_AnyHostPool.close shared": lambda folder, closing: kept(closing, shared()).close,
    "HostPool.grow": lambda folder, closing: functools.partial(kept(closing, pool()).grow, 3),
    "HostPool.shrink": lambda folder, closing: functools.partial(kept(closing, pool()).shrink, 1),
    "SharedPool.wait_ready": lambda folder, closing: functools.partial(kept(closing, shared()).wait_ready, []),
    "host_free": lambda folder, closing: free,
    "host_unregister": lambda folder, closing: host_unregister,
}
PYTHON: dict[str, Row] = {
    "offload/_jobs.py: SingleDirectionOffloadingHandler.wait": lambda folder, closing: functools.partial(
        kept(closing, handler()).wait, [1]
    ),
    "offload/_jobs.py: SingleDirectionOffloadingHandler.drain": lambda folder, closing: kept(closing, handler()).drain,
    "offload/_jobs.py: SingleDirectionOffloadingHandler.shutdown": lambda folder, closing: kept(
        closing, handler()
    ).shutdown,
    "trtllm/_manager.py: KVCacheTransferManager.close": lambda folder, closing: kept(closing, manager()).close,
    "share/__init__.py: Member.close": lambda folder, closing: kept(closing, member(closing)).close,
    "share/__init__.py: Member.wait_peers": lambda folder, closing: functools.partial(
        kept(closing, member(closing)).wait_peers, []
    ),
}
ELSEWHERE = {  # tested with what they need, or they pass the timeout on to a row's function
    "trtllm/_copies.py": "passed on to Event.synchronize",
    "fastdeploy/client.py": "test_a_client_s_timeouts",
    "offload/_handlers.py": "passed on to SingleDirectionOffloadingHandler",
    "vllm/_handler.py": "passed on to SingleDirectionOffloadingHandler",
    "vllm/_file_tier.py": "of the tier itself, called without",
    "offload/_layers.py": "internal",
    "trtllm/_files.py": "internal: of KVCacheTransferManager.close",
    "_top_socket.py": "internal: of kvswap top",
    "_timeouts.py": "reads them",
}


def member(closing: list[Any]) -> Any:
    pool = shared()
    closing.append(SimpleNamespace(close=lambda: pool.close(force=True)))  # the call still holds the member
    return share.join(f"timeouts-{os.getpid()}", 0, pool, kvswap.Pool(device(), device().alloc(8192), 2, 4096))


def manager() -> Any:
    primary, secondary = np.zeros((4, 256), np.uint8), np.zeros((4, 256), np.uint8)
    pools = [trtllm.KVCacheBlockPool(primary, secondary, 4, 4, 1, 1, 1, 16, 8, "float16")]
    return trtllm.KVCacheTransferManager(pools, device=device())


def python_functions() -> Iterator[str]:
    """Of the package's sources: file, class and method with an argument `timeout`. Commands and the like have none."""
    for path in sorted((ROOT / "kvswap").rglob("*.py")):
        name = str(path.relative_to(ROOT / "kvswap"))
        if name.startswith(("bench/", "commands/", "replay/", "simulate/", "remote/", "fastdeploy/manager/")):
            continue
        for node in ast.parse(path.read_text()).body:
            holder = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            for each in node.body if isinstance(node, ast.ClassDef) else [node]:
                if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) or each.name.startswith("_"):
                    continue
                if "timeout" in [a.arg for a in (*each.args.args, *each.args.kwonlyargs)]:
                    yield f"{name}: {holder}{each.name}"


def test_each_function_has_a_row() -> None:
    rows = {name.partition(" ")[0] for name in STUB}
    assert stub_functions() - {"_PatternJob.result", "_shutdown"} == rows
    found = set(python_functions())
    missing = {name for name in found - PYTHON.keys() if name.partition(":")[0] not in ELSEWHERE}
    assert not missing and PYTHON.keys() <= found, missing or PYTHON.keys() - found


@pytest.mark.parametrize("name", [*STUB, *PYTHON])
def test_values(name: str, tmp_path: Path) -> None:
    row = {**STUB, **PYTHON}[name]
    closing: list[Any] = []
    try:
        for value in TAKEN:
            call = row(tmp_path, closing)
            try:
                call(value)
            except TimeoutError:
                assert value is not None and value <= 0.5, value
            close(closing)
        for value, kind, text in REFUSED:
            with pytest.raises(kind, match=f"timeout.*{text}") as caught:
                row(tmp_path, closing)(value)
            assert caught.type is kind, (value, caught.value)
            close(closing)
    finally:
        close(closing)


def close(closing: list[Any]) -> None:
    while closing:
        made = closing.pop()
        (made.shutdown if hasattr(made, "shutdown") else made.close)()


def test_a_client_s_timeouts(tmp_path: Path) -> None:
    """Of FastDeploy's manager: no number is sent that the manager would call malformed."""
    client = pytest.importorskip("kvswap.fastdeploy.client", reason="needs msgspec and zmq")
    for value in TAKEN:
        assert 0 <= client._limit(value) <= 1e6
    for value, kind, text in REFUSED:
        with pytest.raises(kind, match=text):
            client._limit(value)
