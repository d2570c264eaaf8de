#!/usr/bin/env bash
# Make OUT/part-00 and OUT/SHA256: LMCache for run.sh's configurations lmcache and lmcache-inprocess, beside make.sh's vLLM.
#   PYTHON=python3.12 benchmarks/serving/pack/lmcache.sh OUT
# LMCACHE_VERSION (0.5.6), JOBS (2). PYTHON: CPython 3.12 with torch 2.11 for CUDA 13, setuptools 77 to 80, setuptools_scm,
# ninja, packaging and wheel. Needs pip's index, nvcc 13, g++, GNU tar, xz and ten minutes on two cores; no GPU.
# LMCache's wheel is compiled for torch 2.13: with 2.11 cuda_ops ends with "undefined symbol: c10::NotImplementedError".
# So the wheel's Python files are taken, and its extensions are compiled from the source package, for sm_90 only.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:?usage: lmcache.sh OUT}
version=${LMCACHE_VERSION:-0.5.6} python=${PYTHON:-python3}
. "$here/common.sh"

echo "LMCache $version"
"$python" -m pip download -qq "${wheels[@]}" -d "$work/wheel" "lmcache==$version"
mkdir -p "$work/tree" "$work/source"
"$python" -m zipfile -e "$work"/wheel/lmcache-*.whl "$work/tree"
rm -rf "$work"/tree/lmcache/{*.so,tools}
"$python" -m pip download -qq --no-deps --no-binary :all: --no-build-isolation -d "$work/source" "lmcache==$version"
tar -xf "$work"/source/lmcache-*.tar.gz -C "$work/source"
headers=$("$python" -c "import nvidia.cu13 as made; print(*made.__path__, sep='/include:')")/include # that torch wants
: > "$work/nothing.cu"
cuda=$(nvcc --dryrun -c "$work/nothing.cu" 2>&1 | sed -n 's/^#\$ TOP=//p') # nvcc may be a script that starts another
export CUDA_HOME=${CUDA_HOME:-$cuda} CPATH=$headers CFLAGS=-g0
export TORCH_CUDA_ARCH_LIST=9.0 MAX_JOBS=${JOBS:-2} NVCC_THREADS=1
(cd "$work/source/lmcache-$version" && "$python" setup.py -q build_ext --build-lib "$work/built" > "$work/log" 2>&1) ||
  { grep -m 5 error "$work/log"; exit 1; }
cp "$work"/built/lmcache/*.so "$work/tree/lmcache/"
echo "what it imports"
take_packages "$here/lmcache.txt"
echo "one archive"
make_archive
