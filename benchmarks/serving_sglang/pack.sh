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
version=${SGLANG_VERSION:-0.5.23} kernel=${KERNEL_VERSION:-0.4.5} python=${PYTHON:-python3} most=$((40 << 20))
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

wheels=(--python-version 3.12 --implementation cp --only-binary=:all: --no-deps)
for glibc in 2_39 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do
  wheels+=(--platform "manylinux_${glibc}_x86_64")
done
for older in 2014 2010 1; do wheels+=(--platform "manylinux${older}_x86_64"); done
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore

echo "SGLang $version, sglang-kernel $kernel"
"$python" -m pip download -qq "${wheels[@]}" -d "$work/wheel" "sglang==$version" "sglang-kernel==$kernel"
for wheel in "$work"/wheel/*.whl; do "$python" -m zipfile -e "$wheel" "$work/tree"; done
rm -rf "$work"/tree/sglang/{multimodal_gen,test,benchmark} "$work"/tree/{*.data,triton_kernels}
mv "$work/tree/sgl_kernel/sm90/common_ops.abi3.so" "$work/common_ops" # of its libraries a dense model takes this one
find "$work/tree" \( -name '*.so' -o -name 'E=*.json' -o -name '*.png' -o -name RECORD \) -delete
mv "$work/common_ops" "$work/tree/sgl_kernel/sm90/common_ops.abi3.so"
"$python" "$vllm/keep_sm90.py" "$work/tree/sgl_kernel/sm90/common_ops.abi3.so"
echo "what it imports"
"$python" -m pip install -qq "${wheels[@]}" --no-compile --target "$work/site" -r "$here/requirements.txt"
sed -i '\#^\.\./\.\./bin/#d' "$work"/site/*.dist-info/RECORD # they name this machine's Python
rm -rf "$work"/site/{bin,*/tests}
cp -r "$vllm/stubs/xgrammar" "$here/stubs/IPython" "$work/site/"
find "$work/tree" "$work/site" -name __pycache__ -type d -prune -exec rm -r {} +
echo "one archive"
mkdir -p "$out"
same=(--sort=name --owner=0 --group=0 --numeric-owner --mode=u+rw,go=rX --mtime=2026-01-01T00:00:00Z)
tar "${same[@]}" -C "$work" -cf - tree site |
  xz -9 -T"${JOBS:-2}" --block-size=192MiB --memlimit-compress=0 > "$work/part-00"
size=$(stat -c %s "$work/part-00")
[ "$size" -le "$most" ] || { echo "the archive has $size bytes, but $most are the most" >&2; exit 1; }
(cd "$work" && sha256sum part-00 > SHA256)
mv "$work/part-00" "$work/SHA256" "$out/"
echo "$out/part-00: $size bytes, after $SECONDS s"
