#!/usr/bin/env bash
# On a machine with a GPU and no network: vLLM's own tests of the offloading layer, and the real package with its
# scheduler, against kvswap on cuda:0.
#   bash tests/integration/vllm_on_gpu.sh PACKED OUT      (DEVICE=cpu: without one; ONLY=0.26: one release;
#                                                          RANKS=2: two ranks as well, on two GPUs)
# PACKED: what vllm_pack.py wrote. OUT: where the records go. kvswap and torch are installed for python3.
set -uo pipefail
packed=$1 out=$2 here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
for archive in "$packed"/*.tar.xz; do tar -xJf "$archive" -C "$work"; done
# Behind what the machine has: only what is missing there is taken from here.
export KVSWAP_VLLM_SITE="$work/site"
cat > "$work/sitecustomize.py" <<'PY'
import os, sys

sys.path.append(os.environ["KVSWAP_VLLM_SITE"])
PY
export PYTHONPATH="$work"
export VLLM_LOGGING_LEVEL=ERROR HF_HUB_OFFLINE=1
status=0
for source in "$work"/vllm-${ONLY:-}*/; do
  version=$(basename "$source")
  echo "== $version"
  timeout 280 python3 -P -W ignore "$here/vllm_package.py" "$source" --device "${DEVICE:-cuda:0}" 2>&1 | grep -v WARNING |
    tee "$out/$version-package.txt" | tail -n 12
  [ "${PIPESTATUS[0]}" = 0 ] || status=1
  if [ "${RANKS:-1}" -gt 1 ]; then
    timeout 280 python3 -P -W ignore "$here/vllm_package.py" "$source" --device "${DEVICE:-cuda:0}" --ranks "$RANKS" \
      --spec KVSwapTieringOffloadingSpec 2>&1 | grep -v WARNING | tee "$out/$version-ranks.txt" | tail -n 12
    [ "${PIPESTATUS[0]}" = 0 ] || status=1
  fi
  timeout 400 python3 -P -W ignore "$here/vllm_own_tests.py" "$source" --device "${DEVICE:-cuda:0}" 2>&1 |
    grep -v '^FAILED' | tee "$out/$version-own-tests.txt" | grep -E 'mode|notice|has to be|Error' | tail -n 12
  [ "${PIPESTATUS[0]}" = 0 ] || status=1
done
exit $status
