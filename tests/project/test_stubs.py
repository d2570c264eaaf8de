"""The stubs say what the C code says, and types keep a user from mistakes."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from conftest import ROOT

import kvswap
from kvswap import _C, typing
from kvswap.files import FileStore, Layout

STUB = ROOT / "kvswap" / "_C.pyi"


@pytest.fixture
def stub_docs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if not (ROOT / "packaging" / "kvswap_build").is_dir():
        pytest.skip("not run from a checkout")
    monkeypatch.syspath_prepend(str(ROOT / "packaging"))
    from kvswap_build import stub_docs

    return stub_docs


def test_docstrings_stand_in_the_c_code(stub_docs: ModuleType) -> None:
    found = list(stub_docs.documented(ast.parse(STUB.read_text())))
    assert [node.name for node, text in found if text and ast.get_docstring(node)] == []
    assert len(found) > 150 and any("Copy sizes[i] bytes" in text for _, text in found)


def test_the_stub_of_a_wheel_has_docstrings(stub_docs: ModuleType, tmp_path: Path) -> None:
    """As the build makes it: in a process of its own, of a copy."""
    copy = tmp_path / "_C.pyi"
    copy.write_text(STUB.read_text())
    subprocess.run([sys.executable, stub_docs.__file__, copy], check=True, cwd=tmp_path)
    done, before = ast.parse(copy.read_text()), ast.parse(STUB.read_text())
    assert all((ast.get_docstring(node) or "") == text for node, text in stub_docs.documented(done))
    for node in ast.walk(done):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[:1] = [] if len(node.body) > 1 else [ast.Expr(ast.Constant(...))]
    assert ast.unparse(done) == ast.unparse(before)


@pytest.mark.parametrize("public", [value for value in vars(_C).values() if inspect.isclass(value)], ids=str)
def test_no_docstring_runs_into_the_next_line(public: Any) -> None:
    """Text of the C code that lacks a space or a line's end where two literals meet."""
    for member in (public, *(value for name, value in vars(public).items() if not name.startswith("__"))):
        for line in inspect.cleandoc(getattr(member, "__doc__", None) or "").splitlines():
            assert len(line) <= 125, line


def keys(made: Any) -> set[str]:
    return set(get_type_hints(made))


def test_typed_dicts_have_the_keys_of_info_and_stats(tmp_path: Path) -> None:
    device = kvswap.Device("host:79")
    assert keys(typing.OpenedInfo) == device.info.keys()
    assert keys(typing.DeviceStats) == device.stats().keys()
    array = np.zeros(64, np.uint8)
    kvswap.swap_blocks_batch([array[:8]], [array[8:16]], 8, device=device).wait(60)
    (path,) = next(iter(device.stats()["paths"].values())).values()
    assert keys(typing.PathStats) == path.keys()
    assert keys(typing.BuildInfo) == _C._fatbin().keys()
    with FileStore(tmp_path, Layout(64), capacity=1 << 20) as store:
        assert keys(typing.FileInfo) == store.info.keys()
        assert keys(typing.FileStats) == store.stats().keys()


def test_paths_have_the_names_of_the_c_code() -> None:
    wrong: Any = "none"
    with pytest.raises(ValueError, match="must be one of ") as error:
        kvswap.swap_blocks_batch([], [], 8, device="host:79", path=wrong)
    assert re.findall(r"'(\w+)'", str(error.value).partition("one of ")[2]) == list(get_args(typing.Path))


def test_a_users_calls(tmp_path: Path) -> None:
    """mypy --strict accepts the right ones of typing_user.py and complains of the wrong ones."""
    api = pytest.importorskip("mypy.api", reason="needs mypy; .ci/quick checks typing_user.py")
    user = ROOT / "tests" / "project" / "typing_user.py"
    output, errors, status = api.run(["--strict", "--cache-dir", str(tmp_path), str(user)])
    assert (output.splitlines()[-1:], errors, status) == (["Success: no issues found in 1 source file"], "", 0), output
