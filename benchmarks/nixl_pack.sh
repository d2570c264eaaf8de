#!/usr/bin/env bash
# Make OUT/nixl.tar.xz for bench_remote.py on a machine without a network: NIXL with UCX and POSIX alone (13 MB of 59), and
# what kvswap.remote imports, for CPython 3.12.
#   benchmarks/nixl_pack.sh OUT        NIXL_VERSION (1.5.1), PYTHON (python3): any that has pip
# There:
#   mkdir /tmp/nixl && python3 -c 'import tarfile; tarfile.open("nixl.tar.xz").extractall("/tmp/nixl", filter="tar")'
#   PYTHONPATH=/tmp/nixl python3 -P benchmarks/bench_remote.py
set -euo pipefail
out=${1:?usage: nixl_pack.sh OUT}
version=${NIXL_VERSION:-1.5.1} python=${PYTHON:-python3}
. "$(dirname "${BASH_SOURCE[0]}")/serving/pack/common.sh"

"$python" -m pip install -qq "${wheels[@]}" --no-compile --target "$work/site" \
  "nixl==$version" "nixl-cu13==$version" msgspec pyzmq
(
  cd "$work/site"
  rm -rf nixl_ep_cu13 bin nixl_cu13.libs/lib{aws,azure}* nixl_cu13.libs/ucx/libucx_perftest*
  find . -name 'libplugin_*.so' ! -name '*_UCX.so' ! -name '*_POSIX.so' -delete
)
tar -C "$work/site" -cf - . | xz -T2 > "$work/nixl.tar.xz"
mkdir -p "$out"
mv "$work/nixl.tar.xz" "$out/"
ls -l "$out/nixl.tar.xz"
