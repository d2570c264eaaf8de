"""Compiles the kernels into one fatbin, by nvcc or by NVRTC. extension.py lists the environment variables that choose;
CMakeLists.txt uses this as a program."""

import importlib.util
import os
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

from . import nvrtc

# What compiles the wheels' kernels (KVSWAP_NVCC=index): the last release of CUDA 12, for what the one of CUDA 13 makes
# is refused by drivers of CUDA 12 (docs/packaging.md).
INDEX = {"nvidia-cuda-nvrtc-cu12": "12.9.86", "nvidia-nvfatbin-cu12": "12.9.82"}
LIBRARIES = ("cuda_nvrtc/lib/libnvrtc.so.12", "nvfatbin/lib/libnvfatbin.so.12")  # in nvidia/ of site-packages
# Machine code for each, as far as the compiler knows it; PTX of the first serves all others from 8.0 on.
SASS = ("80", "86", "89", "90", "100", "103", "120")
SOURCE = "csrc/kernels/fatbin.cu"
REQUIREMENTS = [f"{name}=={version}" for name, version in INDEX.items()]


def architectures():
    """Those of SASS that KVSWAP_ARCHS names, all of them if it is not set."""
    text = os.environ.get("KVSWAP_ARCHS", "")
    given = text.split(",") if text else SASS
    if set(given) - set(SASS):
        raise SystemExit(f"KVSWAP_ARCHS={text!r}: must be some of {','.join(SASS)}, with commas between them")
    return tuple(arch for arch in SASS if arch in given)


def index_libraries():
    """Paths of NVRTC and nvFatbin, of the packages in INDEX; None where one is missing."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    found = [next((path for root in roots if (path := Path(root, name)).is_file()), None) for name in LIBRARIES]
    return found if all(found) else None


def find_nvcc(choice):
    """(path, or "index", ""), or (None, why there is none). `choice` is KVSWAP_NVCC."""
    if choice == "index":
        if index_libraries():
            return "index", ""
        return None, f"KVSWAP_NVCC=index, but its packages are not installed: pip install {' '.join(REQUIREMENTS)}"
    if choice:
        found = shutil.which(choice)
        return found, "" if found else f"KVSWAP_NVCC={choice}: no such program"
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    for path in [shutil.which("nvcc"), *(os.path.join(root, "bin/nvcc") for root in roots if root)]:
        if path and os.access(path, os.X_OK):
            return path, ""
    why = "no nvcc in PATH, CUDA_HOME, CUDA_PATH or /usr/local/cuda: install the CUDA toolkit (12.0 or newer), "
    return None, why + "name its nvcc in KVSWAP_NVCC, or set KVSWAP_NVCC=index to compile by pinned packages instead"


def include_dirs(nvcc):
    """Where the cuda.h beside this nvcc is: the C code then checks its own declarations against it."""
    if nvcc == "index":
        return []
    roots = [Path(nvcc).resolve().parent.parent, os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    found = [Path(root, "include") for root in roots if root and Path(root, "include/cuda.h").is_file()]
    return [str(path) for path in found[:1]]


def run(*command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout}")
    return done.stdout


def compile_fatbin(nvcc, target, flags=()):
    """Bring `target` up to date; returns what is in it ("sm_80 sm_90 compute_80"). OSError carries nvcc's output."""
    if nvcc == "index":
        return compile_by_index(target)
    known = run(nvcc, "--list-gpu-code").split()
    sass = [arch for arch in architectures() if f"sm_{arch}" in known]
    if not sass:
        raise OSError(f"{nvcc} compiles for none of {', '.join('sm_' + arch for arch in architectures())}")
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in sass]
    codes += [f"-gencode=arch=compute_{sass[0]},code=compute_{sass[0]}"]
    command = [nvcc, "--fatbin", "--no-compress", "-O3", "-std=c++17", "--threads=0", "-Icsrc", *flags, *codes]
    if is_stale(target, " ".join(command), nvcc):
        print(run(*command, "-o", str(target), SOURCE), end="")
        target.with_suffix(".txt").write_text(" ".join(command))
    return " ".join([*(f"sm_{arch}" for arch in sass), f"compute_{sass[0]}"])


def compile_by_index(target):
    libraries = index_libraries()
    compiler = nvrtc.Compiler(*libraries)
    if not INDEX["nvidia-cuda-nvrtc-cu12"].startswith(compiler.version + "."):
        raise OSError(f"{libraries[0]} is of CUDA {compiler.version}: pip install {' '.join(REQUIREMENTS)}")
    sass = architectures()
    archs = [*(f"sm_{arch}" for arch in sass), f"compute_{sass[0]}"]
    if is_stale(target, " ".join(archs), *libraries, nvrtc.__file__):
        target.write_bytes(compiler.fatbin(SOURCE, archs, ["-Icsrc"]))
        target.with_suffix(".txt").write_text(" ".join(archs))
    return " ".join(archs)


def is_stale(target, text, *tools):
    """Whether `target` was made otherwise than `text` says, or before its sources. Makes its folder."""
    stamp = target.with_suffix(".txt")
    newest = max(os.path.getmtime(path) for path in [*tools, *glob("csrc/kernels/*.*"), *glob("csrc/codecs/*.*h")])
    target.parent.mkdir(parents=True, exist_ok=True)
    return not (target.exists() and stamp.exists() and stamp.read_text() == text and target.stat().st_mtime > newest)


def main(words):
    """For CMake, from the root of the sources. `find` prints the path of nvcc, or why there is none to stderr.
    `build FOLDER` writes kvswap.fatbin there, and fatbin.flags: what the C compiler needs to embed it."""
    nvcc, why = find_nvcc(os.environ.get("KVSWAP_NVCC", ""))
    if not nvcc:
        raise SystemExit(why)
    if words == ["find"]:
        print(nvcc)
    else:
        target = Path(words[1], "kvswap.fatbin").absolute()
        archs = compile_fatbin(nvcc, target)
        flags = f'-DKVSWAP_FATBIN="\\"{target}\\"" -DKVSWAP_FATBIN_ARCHS="\\"{archs}\\""\n'
        Path(words[1], "fatbin.flags").write_text(flags)


if __name__ == "__main__":
    main(sys.argv[1:])
