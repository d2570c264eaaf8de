"""The extensions kvswap._C, with the kernels that it embeds, and kvswap._testing, for setup.py.

Environment, read when building:
  KVSWAP_CUDA      auto (default): kernels where nvcc is found and works; require: no build without them; off: none
  KVSWAP_ARCHS     architectures of the kernels, "80,90" say; all that cuda.py lists unless set
  KVSWAP_NVCC      path of nvcc; or `index`: NVRTC of pinned packages of the package index (cuda.py lists them)
  KVSWAP_URING     auto (default): io_uring for files where liburing is found; require: no build without it; off: none
  KVSWAP_TEST_BINDINGS  on (default); off, as in wheels: without kvswap._testing (tests/bindings)
  KVSWAP_WERROR=1  warnings of the C compiler are errors
  KVSWAP_SANITIZE  e.g. address,undefined: build with these sanitizers, at -O1, which compiles in two thirds of the time
  KVSWAP_DEBUG=1   unoptimised, with assertions and full debugging information
"""

import itertools
import os
import subprocess
import sys
from glob import glob
from pathlib import Path

import numpy
from setuptools import Extension
from setuptools.command.build_ext import build_ext

from . import compiler, cuda, uring

STUB_DOCS = Path(__file__).with_name("stub_docs.py")

CUDA = os.environ.get("KVSWAP_CUDA") or "auto"
NVCC = os.environ.get("KVSWAP_NVCC", "")
URING = os.environ.get("KVSWAP_URING") or "auto"
TEST_BINDINGS = os.environ.get("KVSWAP_TEST_BINDINGS") or "on"
SANITIZE = os.environ.get("KVSWAP_SANITIZE", "")
DEBUG = os.environ.get("KVSWAP_DEBUG", "") not in ("", "0")
WERROR = os.environ.get("KVSWAP_WERROR", "") not in ("", "0")
if CUDA not in ("auto", "require", "off"):
    raise SystemExit(f"KVSWAP_CUDA={CUDA!r}: must be auto, require or off")
if URING not in ("auto", "require", "off"):
    raise SystemExit(f"KVSWAP_URING={URING!r}: must be auto, require or off")
if TEST_BINDINGS not in ("on", "off"):
    raise SystemExit(f"KVSWAP_TEST_BINDINGS={TEST_BINDINGS!r}: must be on or off")


class Build(build_ext):
    def run(self):
        super().run()
        if not self.inplace:
            self.add_stub_docs()

    def add_stub_docs(self):
        """Of a build that runs on this machine, which one for another machine or with sanitizers may not."""
        stub = Path(self.build_lib, "kvswap", "_C.pyi")
        paths = [os.path.abspath(self.build_lib), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-B", os.fspath(STUB_DOCS), os.fspath(stub)]  # -B: no .pyc beside the built package
        if (
            stub.exists()
            and subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}).returncode
        ):
            print("kvswap: note: the built extension does not run here, so its stub has no docstrings")

    def build_extension(self, ext):
        compiler.require(self.compiler.compiler_so)
        compiler.compile_in_parallel(self.compiler)
        ext.define_macros.append(("KVSWAP_VERSION", f'"{self.distribution.get_version()}"'))
        if ext.name == "kvswap._C" and CUDA != "off":
            self.add_kernels(ext)
        if ext.name == "kvswap._C" and URING != "off":
            self.add_uring(ext)
        self.depend_on_flags(ext)
        super().build_extension(ext)

    def add_kernels(self, ext):
        nvcc, why = cuda.find_nvcc(NVCC)
        if nvcc:
            ext.extra_compile_args += [f"-isystem{path}" for path in cuda.include_dirs(nvcc)]
            target = Path(self.build_temp, "kvswap.fatbin").absolute()
            try:
                archs = cuda.compile_fatbin(nvcc, target, ["-Werror=all-warnings"] if WERROR else [])
            except OSError as error:
                why = str(error)
            else:
                ext.define_macros += [("KVSWAP_FATBIN", f'"{target}"'), ("KVSWAP_FATBIN_ARCHS", f'"{archs}"')]
                ext.depends.append(str(target))
                return
        if CUDA == "require" or (NVCC and not nvcc):  # what was asked for by name is not left out in silence
            raise SystemExit(f"kvswap: KVSWAP_CUDA={CUDA}, but the kernels cannot be built: {why}")
        print(f"kvswap: note: built without kernels, GPUs will be served by their copy engines alone: {why}")

    def add_uring(self, ext):
        words = self.compiler.compiler_so  # CC may be more than one, "ccache gcc" say
        link = uring.find_uring([*itertools.takewhile(lambda word: not word.startswith("-"), words)])
        if link:
            ext.define_macros.append(("KVSWAP_URING", "1"))
            ext.extra_link_args += link
        elif URING == "require":
            raise SystemExit("kvswap: KVSWAP_URING=require, but there is no liburing to build with (liburing-dev)")
        else:
            print("kvswap: note: built without liburing, files will be read and written by threads")

    def depend_on_flags(self, ext):
        """Other flags than the last time are a reason to compile again; setuptools compares only the times of files."""
        stamp, text = Path(self.build_temp, f"{ext.name}.flags.txt"), f"{ext.define_macros}\n{ext.extra_compile_args}\n"
        if not stamp.exists() or stamp.read_text() != text:
            stamp.parent.mkdir(parents=True, exist_ok=True)
            stamp.write_text(text)
        ext.depends.append(str(stamp))


def extensions():
    """kvswap._C is all of csrc/; libkvswap is the same without csrc/py (CMakeLists.txt)."""
    flags = [
        "-std=c11",
        "-D_GNU_SOURCE",
        "-Wall",
        "-Wextra",
        "-Wshadow",
        "-Wconversion",
        "-fvisibility=hidden",
        "-pthread",
    ]
    flags += ["-O0", "-g3", "-UNDEBUG"] if DEBUG else ["-O1" if SANITIZE else "-O3", "-g1"]
    flags += ["-Werror"] if WERROR else []
    sanitize = [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer"] if SANITIZE else []
    sources = {"kvswap._C": glob("csrc/**/*.c", recursive=True), "kvswap._testing": ["tests/bindings/testing.c"]}
    return [
        Extension(
            name,
            sources=sorted(files),
            depends=[__file__, "pyproject.toml", *sorted(glob("csrc/**/*.[ch]", recursive=True))],
            include_dirs=["csrc", numpy.get_include()],
            extra_compile_args=flags + sanitize,
            extra_link_args=["-pthread", "-ldl", *sanitize],
        )
        for name, files in sources.items()
        if name == "kvswap._C" or TEST_BINDINGS == "on"
    ]


def requirements():
    """Packages that a build needs besides those of pyproject.toml."""
    return cuda.REQUIREMENTS if NVCC == "index" and not cuda.index_libraries() else []
