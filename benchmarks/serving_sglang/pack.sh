#!/usr/bin/env bash
# Make OUT/part-00 and OUT/SHA256: a SGLang for one kind of card (sm_90) and machines without a network, 40 MiB at most.
#   benchmarks/serving_sglang/pack.sh OUT
# SGLANG_VERSION (0.5.23), KERNEL_VERSION (0.4.5: the newest sglang-kernel for PyTorch 2.11), PYTHON (python3): any that
# has pip; the package is for CPython 3.12. Needs pip's index, GNU tar, xz and 1 GB under TMPDIR; no GPU. The archive
# holds tree/, SGLang and sgl_kernel, and site/, what they import that PyTorch's environment lacks; serving/run.sh takes it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
vllm=$here/../serving/pack
out=${1:?usage: pack.sh OUT}
version=${SGLANG_VERSION:-0.5.23} kernel=${KERNEL_VERSION:-0.4.5} python=${PYTHON:-python3}
NEWEST_GLIBC=2_39
. "$vllm/common.sh"

echo "SGLang $version, sglang-kernel $kernel"
"$python" -m pip download -qq "${wheels[@]}" -d "$work/wheel" "sglang==$version" "sglang-kernel==$kernel"
for wheel in "$work"/wheel/*.whl; do "$python" -m zipfile -e "$wheel" "$work/tree"; done
rm -rf "$work"/tree/sglang/{multimodal_gen,test,benchmark} "$work"/tree/{*.data,triton_kernels}
mv "$work/tree/sgl_kernel/sm90/common_ops.abi3.so" "$work/common_ops" # of its libraries a dense model takes this one
find "$work/tree" \( -name '*.so' -o -name 'E=*.json' -o -name '*.png' -o -name RECORD \) -delete
mv "$work/common_ops" "$work/tree/sgl_kernel/sm90/common_ops.abi3.so"
"$python" "$vllm/keep_sm90.py" "$work/tree/sgl_kernel/sm90/common_ops.abi3.so"
cp "$here/stubs/cutedsl_dual_gemm.py" "$work/tree/sglang/kernels/ops/gemm/"
echo "what it imports"
take_packages "$here/requirements.txt"
cp -r "$vllm/stubs/xgrammar" "$here/stubs/IPython" "$work/site/"
echo "one archive"
make_archive
