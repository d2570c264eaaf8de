#!/usr/bin/env bash
# On a machine without a network: unpack pack/make.sh's archive, build kvswap from this tree, and compare (python -m serving).
#   PACK=FOLDER OUT=FOLDER [LMCACHE=FOLDER] [LIMIT=560] benchmarks/serving/run.sh OPTIONS [-- OPTIONS ...]
# PACK: with part-00 and SHA256.  LMCACHE: the same of pack/lmcache.sh.  OUT: gets serving.jsonl, summary.txt, machine.txt
# and logs.tar.gz.  LIMIT: seconds for all.
# -- begins another comparison, which gets the time that is left. What was unpacked and built stays in BASE, under /tmp.
# PROGRAM: serving; serving_sglang with the pack of that folder; serving.server, whose OPTIONS say how many --seconds each
# part gets: OUT gets server.txt in the place of serving.jsonl and summary.txt.
# PYTHON: python3, with PyTorch and transformers.  KVSWAP_CUDA: as setup.py takes it (require).  SETUP_ONLY=1: no more.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tree=$(cd "$here/../.." && pwd)
base=${BASE:-/tmp/kvswap-serving} pack=${PACK:?a folder with part-00 and SHA256} python=${PYTHON:-python3}
limit=${LIMIT:-560} program=${PROGRAM:-serving}
mkdir -p "$base" "${OUT:=$base/results}"
OUT=$(realpath "$OUT")
rm -rf "$base/run" && mkdir "$base/run"
fail() { echo "run.sh: $*" >&2; exit 2; }

unpack() { # FOLDER, what SHA256 and part-00 are in; TO
  cmp -s "$1/SHA256" "$2/unpacked" && return
  (cd "$1" && sha256sum --quiet -c SHA256) || fail "$1/part-00 is not whole"
  rm -rf "$2/tree" "$2/site" "$2/unpacked" && mkdir -p "$2"
  "$python" -c "import sys, tarfile; tarfile.open(sys.argv[1], 'r:xz').extractall(sys.argv[2], filter='tar')" \
    "$1/part-00" "$2" || fail "$1/part-00 was not unpacked"
  "$python" -m compileall -q -j 0 "$2/tree" "$2/site" > /dev/null 2>&1  # some files are templates
  cp "$1/SHA256" "$2/unpacked"
  echo "$1 unpacked after $SECONDS s"
}

build() {
  local copy=$base/source stamp
  rm -rf "$copy" && mkdir "$copy"
  (cd "$tree" && cp -r --parents setup*.py pyproject.toml MANIFEST.in README.md LICENSE packaging monitoring cmake csrc kvswap tests/bindings "$copy") ||
    fail "the source is not whole in $tree"
  find "$copy" \( -name '*.so' -o -name '*.pyc' -o -name kvswap_version.h \) -delete  # what builds make
  stamp=$(cd "$copy" && find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum)
  [ "$stamp" = "$(cat "$base/built" 2> /dev/null)" ] && return
  rm -rf "$base/kvswap" "$base/built"
  export KVSWAP_CUDA=${KVSWAP_CUDA:-require}
  (cd "$copy" && "$python" -m pip install -q --no-index --no-build-isolation --no-deps --target "$base/kvswap" .) \
    > "$base/build.log" 2>&1 || { tail -n 20 "$base/build.log"; fail "kvswap was not built"; }
  echo "$stamp" > "$base/built"
  echo "kvswap built after $SECONDS s"
}

build & builder=$!
unpack "$pack" "$base"
[ -z "${LMCACHE:-}" ] || unpack "$LMCACHE" "$base/lmcache"
wait "$builder" || exit 2

# The engine, LMCache and kvswap come before what the machine has, site/ behind it: of that, only what is missing is taken.
mkdir -p "$base/first"
printf 'import sys\n\nsys.path.append("%s")\n' "$base/site" > "$base/first/sitecustomize.py"
export PYTHONPATH="$base/first:$base/kvswap:$base/tree:$base/lmcache/tree:$base/lmcache/site:$(dirname "$here")"
export PYTHONUNBUFFERED=1
export LMCACHE_TRACK_USAGE=false
export VLLM_CACHE_ROOT="$base/cache" VLLM_CONFIG_ROOT="$base/config" TRITON_CACHE_DIR="$base/triton" HF_HOME="$base/hf"
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
(
  nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader 2> /dev/null
  grep MemTotal /proc/meminfo
  cd "$base" || exit
  "$python" -c "import kvswap, torch; print('kvswap', kvswap.__version__, 'torch', torch.__version__)"
  "$python" -c "from kvswap.cli import main; main(['info'])"
) > "$OUT/machine.txt" 2>&1
head -n 4 "$OUT/machine.txt"
echo "ready after $SECONDS s"
[ -n "${SETUP_ONLY:-}" ] && exit 0

status=0 options=()
compare() {
  local left=$((limit - SECONDS - 10)) given=(--out "$OUT" --work "$base/run")
  [ "$left" -lt 30 ] && { echo "no time left for $*"; status=1; return; }
  [ "$program" = serving.server ] || given+=(--seconds "$((left - 5))")
  (cd "$base" && timeout -k 5 "$left" "$python" -m "$program" "${given[@]}" "$@") || status=$?
}
for option in "$@" --; do
  if [ "$option" = -- ]; then
    compare "${options[@]}"
    options=()
  else
    options+=("$option")
  fi
done
(cd "$base/run" && tar -czf "$OUT/logs.tar.gz" log-*)
[ "$program" = serving.server ] ||
  (cd "$base" && "$python" -m "$program.table" "$OUT/serving.jsonl" > "$OUT/summary.txt" && cat "$OUT/summary.txt")
echo "ended with $status after $SECONDS s"
exit "$status"
