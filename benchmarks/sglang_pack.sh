#!/usr/bin/env bash
# Make OUT/sglang.tar.xz for bench_sglang.py on a GPU machine without a network: SGLang's Python and kernel sources, and
# what it imports that PyTorch's environment lacks, for CPython 3.12.
#   benchmarks/sglang_pack.sh OUT        SGLANG_VERSION (0.5.23), PYTHON (python3): any that has pip
# There, where nvcc is for SGLang's own kernels:
#   python3 -c 'import tarfile; tarfile.open("sglang.tar.xz").extractall("/tmp", filter="tar")'
#   PYTHONPATH=/tmp/sglang-site python3 -P benchmarks/bench_sglang.py /tmp/sglang-tree
set -euo pipefail
out=${1:?usage: sglang_pack.sh OUT}
version=${SGLANG_VERSION:-0.5.23} python=${PYTHON:-python3}
. "$(dirname "${BASH_SOURCE[0]}")/serving/pack/common.sh"

"$python" -m pip download -qq "${wheels[@]}" -d "$work/wheel" "sglang==$version"
"$python" -m zipfile -e "$work"/wheel/sglang-*.whl "$work/sglang-tree"
rm -rf "$work"/sglang-tree/sglang/{multimodal_gen,test,benchmark} "$work"/sglang-tree/*.data
find "$work/sglang-tree" \( -name '*.so' -o -name 'E=*.json' -o -name '*.png' \) -delete
"$python" -m pip install -qq "${wheels[@]}" --no-compile --target "$work/sglang-site" \
  apache-tvm-ffi==0.1.11 annotated-types compressed-tensors dill gguf loguru msgspec orjson pybase64 pydantic==2.12.4 \
  pydantic-core==2.41.5 pyzmq starlette typing-inspection
mkdir -p "$out"
tar -C "$work" -cf - sglang-tree sglang-site | xz -T2 > "$out/sglang.tar.xz"
ls -l "$out/sglang.tar.xz"
