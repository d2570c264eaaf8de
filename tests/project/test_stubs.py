"""The stubs say what the C code says, and types keep a user from mistakes."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import stub_docs
from conftest import ROOT

import kvswap
from kvswap import _C, typing
from kvswap.files import FileStore, Layout


def test_docstrings_are_those_of_the_c_code() -> None:
    found = list(stub_docs.documented(ast.parse(stub_docs.STUB.read_text())))
    other = [node.name for node, text in found if (ast.get_docstring(node) or "") != text]
    assert other == [], "run python tests/project/stub_docs.py"
    assert len(found) > 150 and any("Copy sizes[i] bytes" in text for _, text in found)


def test_docstrings_are_written_where_they_are_not() -> None:
    """What stub_docs.py writes is what it compares, from any state of the stub."""
    source = stub_docs.STUB.read_text()
    plain = re.sub(r'"""(?:\\.|(?!""").)*"""', "...", source, flags=re.DOTALL)
    wrong = source.replace('"""Device: the transfer runs on it."""', '"""Something else."""')
    for stub in (plain, wrong):
        assert stub != source
        done = ast.parse(stub_docs.written(stub))
        assert all((ast.get_docstring(node) or "") == text for node, text in stub_docs.documented(done))


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
