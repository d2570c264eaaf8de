"""A build without a compiler or headers says what to install."""

from __future__ import annotations

import os
import shlex
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE, ROOT

CC = os.environ.get("CC") or "cc"


@pytest.fixture
def setup_compiler(monkeypatch: pytest.MonkeyPatch) -> Any:
    if not (ROOT / "packaging" / "kvswap_build").is_dir():
        pytest.skip("only in a source tree")
    monkeypatch.syspath_prepend(str(ROOT / "packaging"))
    from kvswap_build import compiler

    return compiler


@pytest.fixture
def compiler() -> list[str]:
    words = shlex.split(CC)
    if shutil.which(words[0]) is None:
        pytest.skip(f"no C compiler ({CC})")
    return words


def test_nothing_is_missing_here(setup_compiler: Any, compiler: list[str]) -> None:
    assert setup_compiler.what_is_missing(compiler) is None
    setup_compiler.require(CC)


def test_no_compiler(setup_compiler: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        setup_compiler.require(["no-such-cc", "-O2"])
    first, second = str(caught.value).splitlines()
    assert first.startswith("kvswap: cannot be built from source without a C compiler: apt-get install gcc ")
    assert second == "there is no program 'no-such-cc'"


def fake(folder: Path, refused: str) -> list[str]:
    """A compiler that lacks one header."""
    complain = f'{{ echo "no {refused}" >&2; exit 1; }}'
    script = f'for f; do case "$f" in *.c) ! grep -q "{refused}" "$f" || {complain};; esac; done'
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return [str(path)]


@pytest.mark.parametrize(
    ("refused", "what"),
    [("Python.h", "Python's headers: apt-get install python3"), ("stdlib.h", "the C library's headers")],
)
def test_no_headers(setup_compiler: Any, tmp_path: Path, refused: str, what: str) -> None:
    with pytest.raises(SystemExit, match=rf"cannot be built from source without {what}[^\n]*\nno {refused}"):
        setup_compiler.require(fake(tmp_path, refused))


class Compiler:
    """As setuptools': sources to objects, one after the other."""

    def __init__(self, at_once: int) -> None:
        self.together = threading.Barrier(at_once)

    def object_filenames(self, sources: list[str], output_dir: str = "") -> list[str]:
        return [str(Path(output_dir, source).with_suffix(".o")) for source in sources]

    def compile(self, sources: list[str], output_dir: str = "", **options: Any) -> list[str]:
        assert options == {"debug": None}
        made = self.object_filenames(sources, output_dir)
        for path in made:
            if "wrong" in path:
                raise RuntimeError(f"{path} was not compiled")
            self.together.wait(PATIENCE)  # for the others
            Path(path).touch()
        return made


def test_sources_are_compiled_at_once(setup_compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    compiler = Compiler(3)
    setup_compiler.compile_in_parallel(compiler)
    sources = [f"{folder}/{name}.c" for folder in "ab" for name in "xyz"]
    made = compiler.compile(sources, output_dir=str(tmp_path), debug=None)
    assert made == [str(tmp_path / source)[:-1] + "o" for source in sources]
    assert all(Path(path).is_file() for path in made)


def test_a_source_that_does_not_compile(setup_compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    compiler = Compiler(1)
    setup_compiler.compile_in_parallel(compiler)
    with pytest.raises(RuntimeError, match=r"wrong\.o was not compiled"):
        compiler.compile(["right.c", "wrong.c"], output_dir=str(tmp_path), debug=None)
