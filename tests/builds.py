"""What tests compile: libkvswap and the core under sanitizers, each once a session (fixtures `prefix` and `core` of
conftest.py), and C programs on them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import ROOT

CC = shlex.split(os.environ.get("CC") or "cc")
EXAMPLES = sorted(path.stem for path in (ROOT / "examples" / "c").glob("*.c"))
CORE = sorted(path for path in (ROOT / "csrc").rglob("*.c") if path.parent.name != "py")
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-g1", "-pthread", "-I", "csrc"]
# What one sanitizer cannot run, a program leaves to the other, and a function that only that uses.
STRICT = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror", "-Wno-unused-function"]
KINDS = {
    "address,undefined": [
        "-O1",
        "-fno-omit-frame-pointer",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    ],
    "thread": ["-O1", "-fsanitize=thread"],
}


def run(command: list[str], cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    names = ("KVSWAP_CUDA", "KVSWAP_NVCC", "KVSWAP_URING", "KVSWAP_SANITIZE", "KVSWAP_DEBUG", "LD_PRELOAD", "MAKEFLAGS",
             "KVSWAP_ARCHS")  # fmt: skip
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run(
        command, cwd=cwd, env=inherited | environment, capture_output=True, text=True, timeout=280, check=False
    )


def succeed(command: list[str], cwd: Path = ROOT, **environment: str) -> str:
    done = run(command, cwd, **environment)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def need(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"no {program} here; .ci/run has it")


def cmake_compiler() -> list[str]:
    """CC may be two words, "ccache gcc"."""
    launcher = [f"-DCMAKE_C_COMPILER_LAUNCHER={CC[0]}"] if len(CC) > 1 else []
    return [*launcher, f"-DCMAKE_C_COMPILER={CC[-1]}"]


def build_library(folder: Path) -> None:
    """libkvswap and the examples, by CMake with what a user leaves as it is, without kernels; installed to `prefix`.
    But for -O1, which takes the compiler a third less than a user's -O3."""
    need(CC[0], "cmake")
    options = [
        "-DCMAKE_C_FLAGS_RELEASE=-O1 -DNDEBUG",
        "-DKVSWAP_CUDA=off",
        "-DKVSWAP_WERROR=ON",
        "-DKVSWAP_EXAMPLES=ON",
        "-DCMAKE_INSTALL_LIBDIR=lib",
    ]
    succeed(["cmake", "-S", str(ROOT), "-B", str(folder / "build"), *options, *cmake_compiler()])
    succeed(["cmake", "--build", str(folder / "build"), "-j2"])
    succeed(["cmake", "--install", str(folder / "build"), "--prefix", str(folder / "prefix")])


def lacks(kind: str, folder: Path) -> str | None:
    """Why this compiler cannot build such programs, or None."""
    if shutil.which(CC[0]) is None:
        return f"no C compiler ({shlex.join(CC)})"
    source = folder / "empty.c"
    source.write_text("int main(void) { return 0; }\n")
    done = run([*CC, f"-fsanitize={kind}", str(source), "-o", str(folder / "empty")])
    return None if done.returncode == 0 else f"{shlex.join(CC)} has no {kind} sanitizer here"


def object_of(folder: Path, source: Path) -> Path:
    return folder / f"{source.parent.name}_{source.stem}.o"


def compile_core(kind: str, folder: Path) -> None:
    """libcore.a in that folder; where this compiler cannot build it, the reason in a file beside it."""
    reason = lacks(kind, folder)
    if reason is not None:
        (folder / "lacks").write_text(reason)
        return

    def compiled(source: Path) -> str:
        target = str(object_of(folder, source))
        succeed([*CC, *FLAGS, *KINDS[kind], "-c", str(source), "-o", target])
        return target

    with ThreadPoolExecutor(2) as pool:
        succeed(["ar", "rcs", str(folder / "libcore.a"), *pool.map(compiled, CORE)])


def pkg_config(prefix: Path) -> dict[str, str]:
    need("pkg-config")
    return {"PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig")}


def with_archive(prefix: Path) -> list[str]:
    """What a program is linked with that has libkvswap in itself."""
    flags = succeed(["pkg-config", "--static", "--libs", "kvswap"], **pkg_config(prefix)).split()
    return ["-l:libkvswap.a" if flag == "-lkvswap" else flag for flag in flags]


def check_example(name: str, program: Path, tmp_path: Path, **environment: str) -> None:
    arguments = [str(tmp_path)] if name == "files" else []
    done = run([str(program), *arguments], tmp_path, **environment)
    if name == "cuda" and done.returncode == 77:
        assert done.stdout.startswith("no GPU: "), done.stdout
    else:
        assert done.returncode == 0 and "every byte is right" in done.stdout, done.stdout + done.stderr
