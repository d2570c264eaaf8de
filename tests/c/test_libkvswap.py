"""libkvswap as a user of C meets it: built by CMake, installed to an empty prefix, and used from there with
pkg-config and find_package, shared and static, in C and in C++. It is built once a session, without kernels."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from builds import CC, EXAMPLES, check_example, cmake_compiler, need, pkg_config, run, succeed
from conftest import ROOT

VERSION = re.search(r'^version = "(.*?)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def abi() -> object:
    spec = importlib.util.spec_from_file_location("abi", ROOT / "tests" / "c" / "abi.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- what is installed -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_installed(prefix: Path) -> None:
    assert VERSION is not None
    found = {str(path.relative_to(prefix)) for path in prefix.rglob("*") if not path.is_dir()}
    headers = {f"include/kvswap/{path.name}" for path in (ROOT / "csrc").glob("kvswap*.h")}
    headers = headers - {"include/kvswap/kvswap_capi.h"} | {"include/kvswap/kvswap_version.h"}
    libraries = {f"lib/libkvswap.{end}" for end in ("a", "so", "so.0", f"so.0.{VERSION[1]}")}
    package = {
        f"lib/cmake/kvswap/kvswap{end}.cmake" for end in ("Config", "ConfigVersion", "Targets", "Targets-release")
    }
    assert found == headers | libraries | package | {"lib/pkgconfig/kvswap.pc"}
    assert (prefix / "lib/libkvswap.so").resolve().name == f"libkvswap.so.0.{VERSION[1]}"


@pytest.mark.slow
def test_the_version(prefix: Path) -> None:
    assert VERSION is not None
    library = ctypes.CDLL(str(prefix / "lib" / "libkvswap.so.0"), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    library.kvs_version.restype = library.kvs_path_name.restype = ctypes.c_char_p
    assert library.kvs_version() == VERSION[1].encode()
    assert library.kvs_path_name(1) == b"dma" and library.kvs_path_name(99) == b"unknown"
    text = (prefix / "include/kvswap/kvswap_version.h").read_text()
    numbers = re.findall(r"^#define KVSWAP_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$", text, re.MULTILINE)
    assert ".".join(numbers) == re.match(r"\d+\.\d+\.\d+", VERSION[1])[0]  # type: ignore[index]
    need("pkg-config")
    assert succeed(["pkg-config", "--modversion", "kvswap"], **pkg_config(prefix)).strip() == VERSION[1]


def test_the_package_has_the_version_header_too() -> None:
    import kvswap

    header = Path(kvswap.get_include(), "kvswap_version.h")
    assert header.exists(), "setup.py writes it: build the extension again"
    numbers = re.findall(r"^#define KVSWAP_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$", header.read_text(), re.MULTILINE)
    assert kvswap.__version__.startswith(".".join(numbers)) and len(numbers) == 3


@pytest.mark.slow
def test_nothing_but_the_public_functions_is_exported(prefix: Path) -> None:
    need("nm", "readelf")
    library = str((prefix / "lib" / "libkvswap.so").resolve())
    table = succeed(["nm", "-D", "--defined-only", library])
    exported = sorted(line.split()[2] for line in table.splitlines())
    declared = abi().functions(abi().surface(prefix / "include" / "kvswap"))  # type: ignore[attr-defined]
    listed = re.findall(r"^function (\w+)$", (ROOT / "tests/c/abi.txt").read_text(), re.MULTILINE)
    assert exported == declared, "libkvswap exports something else than the public headers declare"
    assert exported == listed, "see tests/c/abi.py, and docs/c.md for what may change"
    dynamic = succeed(["readelf", "-d", library])
    assert "soname: [libkvswap.so.0]" in dynamic and not re.search(r"RPATH|RUNPATH", dynamic)
    assert not re.search(r"NEEDED.*(cuda|nv|python)", dynamic)
    archive = succeed(["nm", "--defined-only", "-g", str(prefix / "lib" / "libkvswap.a")])
    assert {
        name for name in re.findall(r" [A-Z] (\w+)$", archive, re.MULTILINE) if not name.startswith("kvs_")
    } == set()


@pytest.mark.slow
def test_what_compiled_programs_rely_on() -> None:
    need(CC[0])
    listed = (ROOT / "tests" / "c" / "abi.txt").read_text().splitlines()
    assert abi().lines(ROOT / "csrc") == listed, "see tests/c/abi.py, and docs/c.md for what may change"  # type: ignore[attr-defined]


@pytest.mark.slow
def test_each_header_compiles_alone(prefix: Path, tmp_path: Path) -> None:
    headers = sorted(path.name for path in (prefix / "include" / "kvswap").glob("*.h"))
    assert len(headers) > 6
    compilers = [[*CC, "-x", "c", "-std=c11"]]
    if shutil.which("c++"):
        compilers.append(["c++", "-x", "c++", "-std=c++17"])
    for name in headers:
        source = tmp_path / f"{name}.c"
        source.write_text(f"#include <{name}>\ntypedef int more;\n")
        for compiler in compilers:
            strict = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror", "-pedantic-errors"]
            succeed([*compiler, *strict, "-fsyntax-only", f"-I{prefix}/include/kvswap", str(source)])


# -- programs ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("device_name")  # one of them runs on a GPU where there is one
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_by_its_own_line(prefix: Path, tmp_path: Path, name: str) -> None:
    """The command that stands in the example's first comment."""
    shutil.copy(ROOT / "examples" / "c" / f"{name}.c", tmp_path)
    line = re.search(r"^ \*   (cc .*kvswap\) -o \w+) && ", (tmp_path / f"{name}.c").read_text(), re.MULTILINE)
    assert line is not None
    command = re.sub("^cc ", f"{shlex.join(CC)} -Wall -Wextra -Wpedantic -Werror ", line[1])
    succeed(["sh", "-c", command], tmp_path, **pkg_config(prefix))
    check_example(name, tmp_path / name, tmp_path, LD_LIBRARY_PATH=str(prefix / "lib"))


@pytest.mark.slow
def test_linked_statically_by_pkg_config(prefix: Path, tmp_path: Path) -> None:
    """As docs/c.md has it. The program then runs without the library."""
    found = re.search(r"^(cc .*libkvswap\.a.*)$", (ROOT / "docs" / "c.md").read_text(), re.MULTILINE)
    assert found is not None
    shutil.copy(ROOT / "examples" / "c" / "host.c", tmp_path / "program.c")
    succeed(["sh", "-c", re.sub("^cc ", f"{shlex.join(CC)} ", found[1])], tmp_path, **pkg_config(prefix))
    assert "every byte is right" in succeed([str(tmp_path / "program")], tmp_path)


PROGRAM = """
#include <cstdio>
#include <kvswap.h>
#include <kvswap_file.h>
static_assert(KVSWAP_VERSION_NUMBER >= 100, "");
int main() {
  struct kvs_error err;
  kvs_engine *engine;
  kvs_after after{};
  after.kind = KVS_AFTER_NONE;
  if (kvs_engine_open("host:0", &engine, &err) != KVS_OK) return 1;
  std::printf("%s %s\\n", kvs_engine_name(engine), kvs_version());
  kvs_engine_unref(engine);
  kvs_shutdown(1000000000);
}
"""
PROJECT = """
cmake_minimum_required(VERSION 3.18)
project(user LANGUAGES C CXX)
find_package(kvswap {version} REQUIRED)
add_executable(shared program.cpp)
target_link_libraries(shared kvswap::kvswap)
add_executable(static program.cpp)
target_link_libraries(static kvswap::kvswap_static)
"""


@pytest.mark.slow
def test_found_by_cmake(prefix: Path, tmp_path: Path) -> None:
    assert VERSION is not None
    need("c++")
    (tmp_path / "program.cpp").write_text(PROGRAM)
    options = [f"-DCMAKE_PREFIX_PATH={prefix}", *cmake_compiler()]
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(version=VERSION[1].rpartition(".")[0]))
    succeed(["cmake", "-S", ".", "-B", "build", *options], tmp_path)
    succeed(["cmake", "--build", "build"], tmp_path)
    for name in ("shared", "static"):
        assert succeed([str(tmp_path / "build" / name)], tmp_path) == f"host:0 {VERSION[1]}\n"
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(version="99.0"))
    refused = run(["cmake", "-S", ".", "-B", "other", *options], tmp_path)
    assert refused.returncode != 0 and 'requested version "99.0"' in refused.stderr


@pytest.mark.slow
def test_the_examples_as_a_project_of_cmake(prefix: Path, tmp_path: Path) -> None:
    source = str(ROOT / "examples" / "c")
    succeed(["cmake", "-S", source, "-B", str(tmp_path), f"-DCMAKE_PREFIX_PATH={prefix}", *cmake_compiler()])
    succeed(["cmake", "--build", str(tmp_path)])
    for name in EXAMPLES:
        check_example(name, tmp_path / name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_of_the_build(prefix: Path, tmp_path: Path, name: str) -> None:
    check_example(name, prefix.parent / "build" / "examples" / "c" / name, tmp_path)


# -- settings ----------------------------------------------------------------------------------------------------------

REFUSED = [
    ("KVSWAP_CUDA", "maybe", "must be auto, require or off"),
    ("KVSWAP_URING", "1", "must be auto, require or off"),
    ("KVSWAP_NVCC", "/no/such/nvcc", "no such program"),
]


@pytest.mark.parametrize(("name", "value", "message"), REFUSED)
def test_a_wrong_setting_is_refused(name: str, value: str, message: str, tmp_path: Path) -> None:
    need("cmake", CC[0])
    done = run(["cmake", "-S", str(ROOT), "-B", str(tmp_path), f"-D{name}={value}", *cmake_compiler()])
    assert done.returncode != 0 and message in re.sub(r"\s+", " ", done.stderr), done.stderr


def test_without_liburing(tmp_path: Path) -> None:
    """A compiler that finds none: `require` is refused, `auto` says what is left."""
    need("cmake", CC[0])
    compiler = tmp_path / "cc"
    real = shlex.join([str(shutil.which(CC[0])), *CC[1:]])
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-luring*) exit 1;; esac\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    for value in ("require", "auto"):
        settings = [f"-DCMAKE_C_COMPILER={compiler}", f"-DKVSWAP_URING={value}", "-DKVSWAP_CUDA=off"]
        done = run(["cmake", "-S", str(ROOT), "-B", f"{tmp_path}/{value}", *settings])
        if value == "require":
            assert done.returncode != 0 and "there is no liburing" in re.sub(r"\s+", " ", done.stderr), done.stderr
        else:
            assert done.returncode == 0 and "io_uring: off, files" in done.stdout, done.stderr


NVCC = r"""#!/bin/sh
case "$*" in
*--list-gpu-code*) printf 'sm_75\nsm_80\nsm_90\n' ;;
*" -o "*) while [ "$1" != -o ]; do shift; done; printf 'not really a fatbin' >"$2" ;;
esac
"""


@pytest.mark.slow
def test_kernels_are_embedded(tmp_path: Path) -> None:
    """By an nvcc that only pretends: architectures that it does not know are left out, and its output is embedded."""
    need("cmake", "make", "python3", CC[0])
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    folder, rules = tmp_path / "build", "CMakeFiles/kvswap_objects.dir"
    settings = [f"-DKVSWAP_NVCC={nvcc}", "-DKVSWAP_CUDA=require", "-DKVSWAP_URING=off", *cmake_compiler()]
    succeed(["cmake", "-G", "Unix Makefiles", "-S", str(ROOT), "-B", str(folder), *settings])
    succeed(["make", "-f", f"{rules}/build.make", f"{rules}/csrc/cuda/fatbin.c.o"], folder)
    (found,) = folder.rglob("fatbin*.o")
    data = found.read_bytes()
    assert b"not really a fatbin" in data and b"sm_80 sm_90" in data and b"sm_120" not in data


@pytest.mark.slow
def test_sanitizers(tmp_path: Path) -> None:
    need("cmake", "make", "nm", CC[0])
    folder, rules = tmp_path / "build", "CMakeFiles/kvswap_objects.dir"
    settings = ["-DKVSWAP_SANITIZE=address,undefined", "-DKVSWAP_CUDA=off", "-DKVSWAP_URING=off", *cmake_compiler()]
    succeed(["cmake", "-G", "Unix Makefiles", "-S", str(ROOT), "-B", str(folder), *settings])
    succeed(["make", "-f", f"{rules}/build.make", f"{rules}/csrc/plan/plan.c.o"], folder)
    (found,) = folder.rglob("plan*.o")
    assert {"__asan_report_load8", "__ubsan_handle_add_overflow"} <= set(succeed(["nm", str(found)]).split())
