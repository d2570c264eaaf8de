"""The C tests, without Python: each program of tests/c is built and run with the core under sanitizers. Its exit status
and its last line, "N passed, 0 failed", are what counts. The core without them is what all other tests run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from builds import CC, EXAMPLES, FLAGS, KINDS, STRICT, check_example, succeed, with_archive
from conftest import ROOT

PROGRAMS = sorted(path.stem for path in (ROOT / "tests" / "c").glob("test_*.c"))
THREADED = [
    "test_engine",
    "test_device_host",
    "test_kernels",
    "test_code",
    "test_pool",
    "test_racecheck",
    "test_hostpool",
    "test_files",
    "test_files_shared",
    "test_share",
    "test_share_members",
    "test_threads",
    "test_borrow",
]
CASES = [("address,undefined", program) for program in PROGRAMS] + [("thread", program) for program in THREADED]

Build = Callable[[str, str], Path]


@pytest.fixture
def build(core: Callable[[str], Path], tmp_path: Path) -> Build:
    """The program of tests/c, linked with the core."""

    def build(kind: str, program: str) -> Path:
        target, archive = tmp_path / Path(program).name, core(kind) / "libcore.a"
        flags = [*FLAGS, *STRICT, *KINDS[kind], f"tests/c/{program}.c", "-o", str(target)]
        succeed([*CC, *flags, str(archive), "-ldl", "-lm"])
        return target

    return build


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "program"), CASES, ids=[f"{program}-{kind}" for kind, program in CASES])
def test_c(build: Build, kind: str, program: str) -> None:
    command = [str(build(kind, program))]
    if kind == "thread" and shutil.which("setarch"):
        command = ["setarch", os.uname().machine, "-R", *command]  # it needs addresses where it expects them
    environment = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "LD_LIBRARY_PATH")}
    environment |= {
        "CC": shlex.join(CC),
        "ASAN_OPTIONS": "detect_leaks=1",
        "TSAN_OPTIONS": "halt_on_error=0:exitcode=66",
    }
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if kind == "thread" and run.returncode != 0 and "WARNING: ThreadSanitizer" not in run.stderr:
        refused = re.search(r"unexpected memory mapping|personality|Operation not permitted", run.stderr)
        if refused:
            pytest.skip(f"ThreadSanitizer does not start here: {run.stderr.strip().splitlines()[-1]}")
    last = run.stdout.strip().splitlines()[-1] if run.stdout.strip() else ""
    assert (run.returncode, re.sub(r"^\d+", "N", last)) == (0, "N passed, 0 failed"), f"{last}\n{run.stderr[-4000:]}"
    assert not last.startswith("0 passed")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_under_sanitizers(build: Build, tmp_path: Path, name: str) -> None:
    check_example(name, build("address,undefined", f"../../examples/c/{name}"), tmp_path)


@pytest.mark.slow
def test_the_corpus_of_the_fuzzer(build: Build) -> None:
    """What it once began with or found: pages and stores, whole and hurt."""
    corpus = sorted((ROOT / "tests" / "random" / "fuzz" / "corpus").iterdir())
    command = [str(build("address,undefined", "../random/fuzz/fuzz_files")), *map(str, corpus)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (run.returncode, run.stdout) == (0, f"{len(corpus)} passed, 0 failed\n"), run.stderr[-4000:]


@pytest.mark.slow
def test_the_c_surface_alone(prefix: Path, tmp_path: Path) -> None:
    """A program that includes kvswap.h and nothing else of ours, as C and, where there is a compiler, as C++."""
    source = tmp_path / "surface.c"
    source.write_text(
        '#include "kvswap.h"\n#include <stdio.h>\n#include <string.h>\n'
        "int main(void) {\n"
        "  struct kvs_engine *engine;\n  struct kvs_transfer *transfer;\n  struct kvs_error err;\n"
        '  char src[64] = "some bytes", dst[64] = "";\n'
        "  uint64_t from = (uint64_t)(uintptr_t)src, to = (uint64_t)(uintptr_t)dst, size = sizeof src;\n"
        "  struct kvs_options options;\n  memset(&options, 0, sizeof options);\n"
        "  options.priority = KVS_PRIORITY_NORMAL;\n"
        '  if (kvs_engine_open("host:0", &engine, &err)) return 1;\n'
        "  if (kvs_swap_batch(engine, &from, &to, &size, true, 1, &options, &transfer, &err)) return 2;\n"
        "  if (kvs_transfer_wait(transfer, -1, &err)) return 3;\n"
        "  kvs_transfer_unref(transfer);\n  kvs_shutdown(1000000000);\n  kvs_engine_unref(engine);\n"
        "  puts(dst);\n  return 0;\n}\n"
    )
    for language in ("c", "c++"):
        compiler = CC if language == "c" else ["c++", "-x", "c++"]
        if shutil.which(compiler[0]) is None:
            continue
        program, more = tmp_path / f"surface-{len(compiler)}", [] if language == "c" else ["-x", "none"]
        arguments = [
            "-Wall",
            "-Werror",
            "-I",
            "csrc",
            str(source),
            *more,
            "-o",
            str(program),
            "-pthread",
            *with_archive(prefix),
        ]
        run = subprocess.run([*compiler, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        assert subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout == "some bytes\n"


def test_nothing_links_the_driver() -> None:
    """The extension needs the C library and nothing of CUDA's."""
    from kvswap import _C

    if shutil.which("readelf") is None:
        pytest.skip("no readelf")
    assert _C.__file__ is not None and sys.platform == "linux"
    dynamic = subprocess.run(["readelf", "-d", _C.__file__], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert not [name for name in needed if re.search(r"cuda|nv", name)], needed


def test_the_extension_exports_the_public_functions_alone() -> None:
    """Not the core's own, and none of a library that is linked into it."""
    from kvswap import _C

    if shutil.which("nm") is None:
        pytest.skip("no nm")
    table = subprocess.run(["nm", "-D", "--defined-only", str(_C.__file__)], capture_output=True, text=True, check=True)
    exported = {line.split()[2] for line in table.stdout.splitlines()}
    headers = "".join(path.read_text() for path in (ROOT / "csrc").glob("kvswap*.h"))
    declared = set(re.findall(r"^KVS_API[^;(]*?(kvs_\w+)\(", headers, re.MULTILINE))
    assert exported == declared | {"PyInit__C"}
