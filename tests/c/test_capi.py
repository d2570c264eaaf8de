"""kvswap._C._API: the example extension is built and used, and one that was built for another kvswap is refused."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from conftest import PATIENCE, ROOT, Gate

import kvswap
from kvswap import _C

CC = shlex.split(os.environ.get("CC") or "cc")
SOURCE = ROOT / "examples" / "extension" / "mirror.c"
STRICT = ["-Wall", "-Wextra", "-Werror"]
PYTHON_H = sysconfig.get_path("include")
# Of kvswap.h, kvswap_pool.h and kvswap_file.h, what is not in the table: what opens and ends devices and stores is
# Python's, and the race checker is the process's.
LEFT_OUT = {"version", "engine_open", "engine_open_deterministic", "shutdown"}
LEFT_OUT |= {"file_open", "file_close", "file_shutdown", "file_peek", "file_limit", "file_clear_directory", "file_gds"}
LEFT_OUT |= {f"racecheck_{name}" for name in ("start", "stop", "active", "found", "take")}


def build(folder: Path, include: str, *flags: str) -> Path:
    if shutil.which(CC[0]) is None:
        pytest.skip(f"no C compiler ({CC[0]})")
    if not Path(PYTHON_H, "Python.h").exists():
        pytest.skip(f"no Python.h in {PYTHON_H} (apt-get install python3-dev)")
    target = folder / f"mirror{sysconfig.get_config_var('EXT_SUFFIX')}"
    command = [*CC, "-shared", "-fPIC", "-std=c11", *STRICT, f"-I{include}", "-isystem", PYTHON_H, *flags]
    done = subprocess.run([*command, str(SOURCE), "-o", str(target)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("mirror", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(build(tmp_path_factory.mktemp("mirror"), kvswap.get_include()))


def test_an_extension_submits_and_waits(mirror: Any) -> None:
    device = kvswap.Device("host:0")
    src, dst = np.arange(4096, dtype=np.uint8), np.zeros(4096, np.uint8)
    transfers = [mirror.copy(place, src.ctypes.data, dst.ctypes.data, 512, 8) for place in (device, "host:0")]
    assert all(isinstance(transfer, kvswap.Transfer) for transfer in transfers)
    mirror.wait_all(transfers, PATIENCE)
    assert (dst == src).all() and [transfer.state for transfer in transfers] == ["done", "done"]
    assert transfers[0].device == device and transfers[0].num_blocks == 8
    mirror.wait_all([], 0.0)


def test_what_an_extension_raises_is_what_kvswap_raises(mirror: Any) -> None:
    src = np.zeros(64, np.uint8)
    with pytest.raises(ValueError, match="sizes"):
        kvswap.swap_blocks_batch([src.ctypes.data], [src.ctypes.data + 32], 0, device="host:0")
    with pytest.raises(ValueError, match="sizes"):
        mirror.copy("host:0", src.ctypes.data, src.ctypes.data + 32, 0, 1)
    with pytest.raises(ValueError, match="moon:0"):
        mirror.copy("moon:0", 0, 0, 1, 1)
    with pytest.raises(TypeError, match=r"transfer must be a kvswap\.Transfer, not int"):
        mirror.wait_all([3], 1.0)
    with pytest.raises(TypeError, match="device"):
        mirror.copy(3.5, 0, 0, 1, 1)


def test_a_transfer_that_is_late(mirror: Any) -> None:
    device = kvswap.Device("host:0")
    stream, src, dst = kvswap.Stream(device), np.ones(64, np.uint8), np.zeros(64, np.uint8)
    with Gate(device) as gate:
        gate.hold(stream)
        late = kvswap.swap_blocks_batch([src.ctypes.data], [dst.ctypes.data], 64, stream=stream, device=device)
        with pytest.raises(TimeoutError):
            mirror.wait_all([late], 0.0)
        assert late.state == "running" and not dst.any()
        with pytest.raises(TypeError, match="NoneType"):
            mirror.wait_all([late, None], PATIENCE)
        gate.open()
        mirror.wait_all((late, late), PATIENCE)
    assert dst.all() and late.state == "done"


def table() -> str:
    return (ROOT / "csrc" / "kvswap_capi.h").read_text()


def test_the_table_has_all_functions_on_handles() -> None:
    headers = ("kvswap.h", "kvswap_status.h", "kvswap_lend.h", "kvswap_pool.h", "kvswap_file.h")
    text = "".join((ROOT / "csrc" / name).read_text() for name in headers)
    declared = re.findall(r"^KVS_API[^;(]*?\bkvs_(\w+)\(", text, re.MULTILINE)
    listed = re.findall(r"^  X\((\w+)\)", table(), re.MULTILINE)
    assert len(listed) == len(set(listed)) > 50
    assert set(listed) == set(declared) - LEFT_OUT and set(declared) >= LEFT_OUT


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("#define KVSWAP_ABI_VERSION 0", "#define KVSWAP_ABI_VERSION 7", "built for ABI 7 of kvswap, and kvswap .* 0"),
        ("  KVSWAP_CAPI_LIST(KVSWAP_CAPI_MEMBER)\n", "  KVSWAP_CAPI_LIST(KVSWAP_CAPI_MEMBER)\n  int (*more)(void);\n",
         "built for a newer kvswap than"),
    ],
    ids=["another ABI", "a newer table"],
)  # fmt: skip
def test_an_extension_for_another_kvswap_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    headers = tmp_path / "include"
    headers.mkdir()
    count = 0
    for path in Path(kvswap.get_include()).glob("kvswap*.h"):
        count += path.read_text().count(old)
        (headers / path.name).write_text(path.read_text().replace(old, new))
    assert count == 1
    with pytest.raises(ImportError, match=message):
        load(build(tmp_path, str(headers)))


def test_a_kvswap_without_a_table(mirror: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_C, "_API")
    with pytest.raises(ImportError, match="no table of C functions"):
        load(Path(mirror.__file__))


@pytest.mark.not_sanitized("builds an extension without the sanitizer")
@pytest.mark.slow
def test_the_setup_of_the_example(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="setuptools, with which the example is built, is not installed")
    build(tmp_path, kvswap.get_include())  # skips where nothing can be built
    shutil.copytree(SOURCE.parent, tmp_path / "source")
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "build_ext", "--inplace"]
    environment = {**os.environ, "CC": shlex.join(CC), "PYTHONPATH": str(Path(kvswap.__file__).parent.parent)}
    done = subprocess.run(
        command, cwd=tmp_path / "source", env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    program = (
        "import mirror, numpy as np; a = np.ones(8, np.uint8); b = a * 0; t = mirror.copy('host:0', a.ctypes.data, "
    )
    program += f"b.ctypes.data, 8, 1); mirror.wait_all([t], {PATIENCE}); assert b.all(); print('right')"
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path / "source",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.stdout == "right\n", run.stderr


def test_the_header_in_c_plus_plus(tmp_path: Path) -> None:
    if shutil.which("c++") is None or not Path(PYTHON_H, "Python.h").exists():
        pytest.skip("no C++ compiler, or no Python.h")
    (tmp_path / "use.cpp").write_text("#include <kvswap_capi.h>\nint use(); int use() { return import_kvswap(); }\n")
    command = ["c++", "-std=c++17", *STRICT, "-fsyntax-only", f"-I{kvswap.get_include()}", "-isystem", PYTHON_H]
    done = subprocess.run([*command, str(tmp_path / "use.cpp")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
