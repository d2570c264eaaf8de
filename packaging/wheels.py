"""Builds manylinux_2_28 wheels from an sdist, for x86-64 and by cross compilation for aarch64, without containers: the
C compiler of zig links against the symbols of glibc 2.28. A wheel has the kernels (NVRTC of the packages that
kvswap_build/cuda.py pins) and liburing in it, and neither debugging information nor a path of this machine.

    python packaging/wheels.py SDIST --liburing liburing_2.9.orig.tar.gz --out wheelhouse

Runs in an environment with packaging/requirements.txt. Interpreters: --python, else those of VERSIONS in pyenv and
PATH; those of this machine build for aarch64 too."""

import argparse
import contextlib
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from kvswap_build import cuda  # noqa: E402

GLIBC = "2.28"
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.14t")
ARCHS = ("x86_64", "aarch64")
LIBURING = {  # the release's tar archive, as in Debian's source package liburing: its SHA-256
    "2.9": "57e9b36e4ac1e46b8e0351dfb1694dc59638fc25e384b4ba36d87b800b16db1a",
}
ENVIRONMENT = {
    "KVSWAP_CUDA": "require",
    "KVSWAP_NVCC": "index",
    "KVSWAP_URING": "require",
    "KVSWAP_TEST_BINDINGS": "off",
}
FACTS = """
import json, sys, sysconfig
version = sysconfig.get_python_version() + sys.abiflags
print(json.dumps([version, sysconfig.get_config_var("EXT_SUFFIX"), sysconfig.get_config_h_filename()]))
"""

# Run by the interpreter that the wheel is for, in the unpacked sdist. The interpreter's own flags (of its distribution,
# its compiler and its machine) are replaced, so that they cannot matter.
BUILD = """
import json, sys, sysconfig
sysconfig.get_config_vars().update(json.loads(sys.argv[1]))
sys.argv[1:] = []
from setuptools import build_meta
print(build_meta.build_wheel("dist"))
"""


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **options)
    if done.returncode:
        output = "\n".join(line[:300] for line in (done.stdout + done.stderr).splitlines()[-40:])
        raise SystemExit(f"{command[0]} failed with {done.returncode}:\n{output}")
    return done.stdout


class Interpreter:
    def __init__(self, path):
        self.path = path
        self.version, self.suffix, config_h = json.loads(run(path, "-c", FACTS))
        self.config_h = Path(config_h)

    def environment(self, folder):
        """A new virtual environment with what a wheel is built with; its interpreter."""
        run(self.path, "-m", "venv", "--clear", folder)
        python = Path(folder, "bin/python")
        run(python, "-m", "pip", "install", "-q", "-r", HERE / "build.txt", *cuda.REQUIREMENTS)
        return python


def zig():
    """The program of the package ziglang."""
    try:
        import ziglang
    except ImportError:
        raise SystemExit("there is no ziglang: pip install -r packaging/requirements.txt") from None
    return Path(ziglang.__file__).with_name("zig")


def interpreters(paths):
    """Those that were named; else one for each of VERSIONS that is here."""
    pyenv = sorted(Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv").glob("versions/*/bin"), reverse=True)
    found = {}
    for version in VERSIONS if not paths else ():
        for path in (shutil.which(f"python{version}", path=str(place)) for place in [*pyenv, os.environ["PATH"]]):
            if path and version not in found:
                found[version] = Interpreter(path)
    for path in paths:
        interpreter = Interpreter(path)
        found[interpreter.version] = interpreter
    return found


def compiler(folder, arch):
    """A script that is a C compiler for glibc 2.28 of that machine; programs expect its name to be one word."""
    script = folder / "cc"
    uring = folder / "liburing"
    words = [zig(), "cc", "-target", f"{arch}-linux-gnu.{GLIBC}"]
    words += [f"-isystem{uring}/include", f"-L{uring}/lib"]
    (uring / "lib").mkdir(parents=True, exist_ok=True)
    script.write_text(f'#!/bin/sh\nexec {" ".join(map(str, words))} "$@" -g0\n')
    script.chmod(0o755)
    return script


def build_liburing(archive, folder, cc):
    """liburing.a and its headers, to folder/liburing."""
    digest = hashlib.sha256(Path(archive).read_bytes()).hexdigest()
    if digest not in LIBURING.values():
        raise SystemExit(f"{archive}: SHA-256 {digest} is not that of liburing {', '.join(LIBURING)}")
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    run("./configure", "--use-libc", f"--cc={cc}", f"--cxx={cc}", cwd=source)
    flags = "CFLAGS=-O3 -g0 -fPIC -fvisibility=hidden"
    run("make", "-s", "-C", "src", "ENABLE_SHARED=0", flags, f"AR={zig()} ar", "liburing.a", cwd=source)
    shutil.copytree(source / "src/include", folder / "liburing/include", dirs_exist_ok=True)
    shutil.copy(source / "src/liburing.a", folder / "liburing/lib")


def debian_headers(config_h, arch, folder):
    """Options of the compiler for Debian's Python, whose pyconfig.h includes <MACHINE-linux-gnu/pythonX/pyconfig.h>.
    zig does not look in that folder, which has this machine's only; aarch64's says the same."""
    name = config_h.parent.name
    here = config_h.parent.parent / f"{platform.machine()}-linux-gnu" / name
    if not here.is_dir():
        return ""
    link = folder / f"{arch}-linux-gnu" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(here)
    return f" -isystem{folder}"


def build_wheel(sdist, python, interpreter, arch, cc, folder, stub=None):
    """Build a wheel with the interpreter of a build environment; its path. All interpreters use one folder: with
    equal paths ccache reuses the objects that do not include Python.h. stub: kvswap/_C.pyi with the docstrings, for
    another machine: a build takes them from the extension, which does not run here then."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with tarfile.open(sdist) as tar:
        tar.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    if stub is not None:
        (source / "kvswap/_C.pyi").write_bytes(stub)
    settings = {
        "CC": f"ccache {cc}" if shutil.which("ccache") else str(cc),
        "CFLAGS": f"-DNDEBUG -fwrapv -fno-strict-aliasing -ffile-prefix-map={source}=."
        + debian_headers(interpreter.config_h, arch, folder.with_name("headers")),
        "CCSHARED": "-fPIC",
        "LDSHARED": f"{cc} -shared -Wl,-s",
        "EXT_SUFFIX": interpreter.suffix.replace(platform.machine(), arch),
        "Py_ENABLE_SHARED": 0,
    }
    environment = {**os.environ, **ENVIRONMENT, "_PYTHON_HOST_PLATFORM": f"manylinux_{GLIBC.replace('.', '_')}-{arch}"}
    for name in ("CC", "CFLAGS", "CPPFLAGS", "LDFLAGS", "LDSHARED", "CPATH", "PYTHONPATH"):
        environment.pop(name, None)
    log = run(python, "-c", BUILD, json.dumps(settings), cwd=source, env=environment)
    return source / "dist" / log.splitlines()[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sdist", type=Path)
    parser.add_argument("--out", type=Path, default=Path("wheelhouse"), help="where the wheels go (wheelhouse)")
    parser.add_argument("--liburing", type=Path, required=True, help=f"tar archive of {', '.join(LIBURING)}")
    parser.add_argument("--arch", action="append", choices=ARCHS, help="x86_64 and aarch64, unless given")
    parser.add_argument("--python", action="append", default=[], help="an interpreter; may be given more than once")
    parser.add_argument("--work", type=Path, help="a folder to build in, which is kept; else a temporary one")
    parser.add_argument("--require-all", action="store_true", help=f"fail unless there are {', '.join(VERSIONS)}")
    args = parser.parse_args()

    zig()  # before anything is built
    if not shutil.which("make"):
        raise SystemExit("there is no make, which builds liburing: apt-get install make")
    found = interpreters(args.python)
    if missing := [version for version in VERSIONS if version not in found]:
        print(f"left out, for there is no interpreter: {', '.join(missing)}", file=sys.stderr)
    if not found or (missing and args.require_all):
        raise SystemExit("name the missing ones by --python")
    os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")  # 1980, the earliest of a zip file
    args.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        work = args.work and args.work.resolve()
        work = work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvswap-wheels-")))
        os.environ.setdefault("ZIG_GLOBAL_CACHE_DIR", str(work / "zig"))
        os.environ["ZIG_LOCAL_CACHE_DIR"] = os.environ["ZIG_GLOBAL_CACHE_DIR"]
        os.environ["CCACHE_COMPILERCHECK"] = f"string:zig {metadata.version('ziglang')}"
        tools = {}
        for arch in sorted(args.arch or ARCHS, key=lambda arch: arch != platform.machine()):
            tools[arch] = compiler(work / arch, arch)
            if not (work / arch / "liburing/lib/liburing.a").exists():
                build_liburing(args.liburing, work / arch, tools[arch])
        for version, interpreter in found.items():
            python, stub = interpreter.environment(work / f"python{version}"), None
            for arch, cc in tools.items():
                wheel = build_wheel(args.sdist.resolve(), python, interpreter, arch, cc, work / arch / "build", stub)
                shutil.copy(wheel, args.out)
                if arch == platform.machine():
                    with zipfile.ZipFile(wheel) as archive:
                        stub = archive.read("kvswap/_C.pyi")
                print(version, arch, flush=True)
    for wheel in sorted(args.out.glob("*.whl")):
        print(f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel}")


if __name__ == "__main__":
    main()
