#!/usr/bin/env bash
# Everything that needs a GPU, in one go, with a record: benchmarks/record.sh OUT_FOLDER [TRACE]
# Expects kvswap installed for python3, with pytest and hypothesis; torch and cupy are used where present.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1 trace=${2:-}
mkdir -p "$out"
pytest() { timeout "$1" python3 -P -m pytest -p no:cacheprovider -o faulthandler_timeout=60 --device cuda:0 "${@:2}"; }

{
  echo "kvswap ${COMMIT:-$(git rev-parse --short HEAD)} on $(uname -sr), $(nproc) cores"
  nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max --format=csv,noheader
  python3 -c 'import sys, numpy; print("Python", sys.version.split()[0], "NumPy", numpy.__version__)'
  python3 -P -m kvswap info --open
} >"$out/machine.txt" 2>&1

(time pytest 250 -q --durations=15 --ignore=tests/test_c.py --long-seconds=3 tests) >"$out/suite.txt" 2>&1
tail -n 4 "$out/suite.txt"

for tool in memcheck racecheck initcheck synccheck; do
  echo "== $tool"
  timeout 70 compute-sanitizer --tool $tool --error-exitcode 9 \
    python3 -P -m pytest -p no:cacheprovider -q --device cuda:0 tests/test_swap.py -k "kernel and (sizes or alone or strides or tiny)"
  echo "exit status $?"
done >"$out/sanitizer.txt" 2>&1
grep -E "== |ERROR SUMMARY|RACECHECK SUMMARY|exit status|passed|failed" "$out/sanitizer.txt"

timeout 120 python3 -P benchmarks/bench_gpu.py --repeats 7 --json "$out/bench_gpu.json" >"$out/bench_gpu.txt" 2>&1
cat "$out/bench_gpu.txt"
timeout 60 python3 -P -m kvswap demo >"$out/demo.txt" 2>&1
tail -n 12 "$out/demo.txt"
if [ -n "$trace" ]; then
  timeout 200 python3 -P -m kvswap replay "$trace" --json "$out/replay.json" >"$out/replay.txt" 2>&1
  echo "exit status $?" >>"$out/replay.txt"
  timeout 100 python3 -P -m kvswap replay "$trace" --fault copy:skip:10000 >"$out/replay_skip.txt" 2>&1
  echo "exit status $?" >>"$out/replay_skip.txt"
  tail -n 6 "$out/replay.txt" "$out/replay_skip.txt"
fi
