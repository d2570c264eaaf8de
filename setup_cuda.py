"""Finds an nvcc and compiles the kernels into one fatbin. Used by setup.py, which lists the environment variables, and
as a program by CMakeLists.txt and Makefile."""

import importlib.util
import os
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

# nvcc and what it needs to compile device code, of one CUDA release (KVSWAP_NVCC=index)
INDEX = {
    "nvidia-cuda-nvcc": "13.0.88",
    "nvidia-nvvm": "13.0.88",
    "nvidia-cuda-crt": "13.0.88",
    "nvidia-cuda-runtime": "13.0.96",
    "nvidia-cuda-cccl": "13.0.85",
}
SASS = ("80", "90", "100", "120")  # of these, the ones that nvcc knows; PTX of the first serves all others from 8.0 on
SOURCE = "csrc/kernels/fatbin.cu"
REQUIREMENTS = [f"{name}=={version}" for name, version in INDEX.items()]


def index_nvcc():
    """nvcc of the packages in INDEX, or None. They unpack to nvidia/cu13 in site-packages."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    return next((str(path) for root in roots for path in [Path(root, "cu13/bin/nvcc")] if path.is_file()), None)


def find_nvcc(choice):
    """(path, ""), or (None, why there is none). `choice` is KVSWAP_NVCC."""
    if choice == "index":
        path = index_nvcc()
        why = f"KVSWAP_NVCC=index, but its packages are not installed: pip install {' '.join(REQUIREMENTS)}"
        return path, "" if path else why
    if choice:
        found = shutil.which(choice)
        return found, "" if found else f"KVSWAP_NVCC={choice}: no such program"
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    for path in [shutil.which("nvcc"), *(os.path.join(root, "bin/nvcc") for root in roots if root)]:
        if path and os.access(path, os.X_OK):
            return path, ""
    why = "no nvcc in PATH, CUDA_HOME, CUDA_PATH or /usr/local/cuda: install the CUDA toolkit (12.0 or newer), "
    return None, why + "name its nvcc in KVSWAP_NVCC, or set KVSWAP_NVCC=index to take it from the package index"


def include_dirs(nvcc):
    """Where the cuda.h beside this nvcc is: the C code then checks its own declarations against it."""
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
    known = run(nvcc, "--list-gpu-code").split()
    sass = [arch for arch in SASS if f"sm_{arch}" in known]
    if not sass:
        raise OSError(f"{nvcc} compiles for none of {', '.join('sm_' + arch for arch in SASS)}")
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in sass]
    codes += [f"-gencode=arch=compute_{sass[0]},code=compute_{sass[0]}"]
    command = [nvcc, "--fatbin", "--no-compress", "-O3", "-std=c++17", "--threads=0", "-Icsrc", *flags, *codes]
    stamp, text = target.with_suffix(".txt"), " ".join(command)
    newest = max(os.path.getmtime(path) for path in [nvcc, *glob("csrc/kernels/*.*")])
    if not (target.exists() and stamp.exists() and stamp.read_text() == text and target.stat().st_mtime > newest):
        target.parent.mkdir(parents=True, exist_ok=True)
        print(run(*command, "-o", str(target), SOURCE), end="")
        stamp.write_text(text)
    return " ".join([*(f"sm_{arch}" for arch in sass), f"compute_{sass[0]}"])


def main(words):
    """For CMake and make, from the root of the sources. `find` prints the path of nvcc, or why there is none to stderr.
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
