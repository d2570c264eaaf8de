#!/usr/bin/env bash
# Make OUT/part-00 and OUT/SHA256: a vLLM for one kind of card (sm_90) and machines without a network, 40 MiB at most.
#   benchmarks/serving/pack/make.sh OUT
# VLLM_VERSION (0.26.0), PYTHON (python3): any that has pip; the package is for CPython 3.12, JOBS (2): threads of xz.
# Needs pip's index, GNU tar, xz, 1.5 GB under TMPDIR and some minutes; no GPU. The archive holds tree/, vLLM, and
# site/, the packages of requirements.txt, which run.sh puts behind the machine's own.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:?usage: make.sh OUT}
version=${VLLM_VERSION:-0.26.0} python=${PYTHON:-python3}
. "$here/common.sh"

echo "vLLM $version"
"$python" -m pip download -qq "${wheels[@]}" -d "$work/wheel" "vllm==$version"
"$python" "$here/take_wheel.py" "$work"/wheel/vllm-*.whl "$work/tree"
"$python" "$here/keep_sm90.py" "$work"/tree/vllm/{_C,_moe_C}_stable_libtorch.abi3.so
echo "what it imports"
take_packages "$here/requirements.txt"
rm -rf "$work"/site/{pycountry/locales,mistral_common/data}
cp -r "$here/stubs/." "$work/site/"
echo "one archive"
make_archive
