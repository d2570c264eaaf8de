#!/usr/bin/env bash
# Makes a machine's record: benchmarks/record.sh OUT [PART...]. A file a part, which names its commit; all parts by default.
# OUT becomes benchmarks/results/MACHINE when it is committed. From a clean commit, on a GPU that nothing else uses.
# Expects kvswap installed for python3; torch is used where present. TRACE: a trace for the replay. FILES: a folder on the
# disk that the file tier is measured on. KV: an .npz file of real keys and values. On an H200 load takes eleven minutes,
# bench six, kvbench eight, borrow three, the others two.
set -uo pipefail
cd "$(dirname "$0")/.."
all="load bench kvbench calls driver memory peers borrow fastdeploy files codecs replay"
out=${1:-}
parts=${*:2}
if [ -z "$out" ]; then
  echo "benchmarks/record.sh OUT [PART...]: a part is one of: $all" >&2
  exit 2
fi
for part in ${parts:=$all}; do
  [[ " $all " == *" $part "* ]] || { echo "there is no part '$part': it is one of: $all" >&2; exit 2; }
done
commit=${COMMIT:-$(git rev-parse --short=9 HEAD)}
[ -n "${COMMIT:-}" ] || [ -z "$(git status --porcelain)" ] || { echo "commit first: a record names its commit" >&2; exit 2; }
card=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1)
mkdir -p "$out"
export PYTHONPATH="$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}"

run() { timeout "$1" python3 -P -m "${@:2}"; }
program() { timeout "$1" python3 -P "benchmarks/$2" "${@:3}"; }
# What ran, what it printed, and its exit status where that is not 0.
section() {
  local title=$1
  echo "== $title"
  "${@:2}" 2>&1 || echo "exit status $?"
  echo
}
bench() { section "kvswap bench ${*:2}" run "$1" kvswap bench "${@:2}"; }

# Copies beside a model: a decode step, there what engines do by hand, with one hardware queue, with the step's own copies, a product of matrices; marks
# behind transfers.
part_load() {
  local block_first=(--shape 64x32k --shape 80x8k --shape 61x36k --method auto)
  local rivals=(--shape 64x32k --shape 80x8k --method auto --method numpy --method warp)
  bench 330 --load step
  bench 150 --load step "${rivals[@]}"
  (export CUDA_DEVICE_MAX_CONNECTIONS=1 && bench 80 --load step "${block_first[@]}")
  bench 120 --load tokens --shape 64x32k --method auto --method high
  bench 330 --load matmul
  section marks.py program 60 marks.py --device cuda:0
}

# Every path and what others do, on the shapes of a model's cache; path strided where a case is small.
part_bench() {
  bench 500
  bench 60 --shape slab --method strided --bytes 160MiB
}

# Path auto against all others on random shapes, calibrated here; vLLM's job queue.
part_kvbench() {
  section "kvswap calibrate" run 60 kvswap calibrate --output "$out/calibration.tmp"
  (
    export KVSWAP_CALIBRATION="$out/calibration.tmp"
    for seed in ${SEEDS:-5 21}; do
      section "kvbench regret --seed $seed" run 150 kvbench regret --seed "$seed"
    done
    section "kvbench handlers" run 400 kvbench handlers
  )
  rm -f "$out/calibration.tmp"
}

# How long calls hold their caller, and what order costs.
part_calls() {
  section bench_calls.py program 60 bench_calls.py --device cuda:0
  section bench_order.py program 120 bench_order.py --device cuda:0
}

# Which calls of the driver wait for the GPU; what kernels on other streams cost a CUDA graph.
part_driver() {
  section driver_waits.py program 100 driver_waits.py
  section bench_graph.py program 150 bench_graph.py
}

# Host pools beside the driver's allocation, and memory of a process in another one.
part_memory() {
  section "bench_host_pool.py --size 64GiB" program 200 bench_host_pool.py --device cuda:0 --size 64GiB --repeats 2
  section bench_ipc.py program 100 bench_ipc.py --device cuda:0
}

# Two GPUs.
part_peers() {
  section bench_peer.py program 100 bench_peer.py
}

# Transfers over another GPU's link too, where there are two.
part_borrow() {
  section "bench_borrow.py --beside" program 200 bench_borrow.py --beside
  section "bench_borrow.py --own" program 90 bench_borrow.py --own
}

# FastDeploy's ops and the manager; its ranks, where there are two GPUs.
part_fastdeploy() {
  section bench_fastdeploy.py program 200 bench_fastdeploy.py --device cuda:0
  section "bench_fastdeploy.py ranks" program 100 bench_fastdeploy.py ranks
}

# Blocks of the GPU to files and back, by pinned staging and by libcufile.
part_files() {
  section bench_files.py program 250 bench_files.py "${FILES:-$out/files.tmp}" --bytes 2GiB --device cuda:0 --gds compat \
    --device-only
  rm -rf "$out/files.tmp"
}

# Coded transfers. KV: real keys and values; without it they are normal numbers.
part_codecs() {
  section "bench_codecs.py --beside --at 50 --kernels" program 240 bench_codecs.py ${KV:+--kv "$KV"} --shape 64x32k --codec exact \
    --codec mxfp8 --codec fp4 --beside --at 50 --kernels
  section "bench_codecs.py --shape 32x64k --shape 80x8k" program 100 bench_codecs.py --shape 32x64k --shape 80x8k --codec exact
  section "bench_codecs.py --host random" program 60 bench_codecs.py ${KV:+--kv "$KV"} --shape 64x32k --host random --codec exact
}

part_replay() {
  section "kvswap demo" run 60 kvswap demo
  [ -n "${TRACE:-}" ] || return 0
  section "kvswap replay" run 200 kvswap replay "$TRACE"
  section "kvswap replay --fault copy:skip:10000: exit status 1 is right" \
    run 100 kvswap replay "$TRACE" --fault copy:skip:10000
}

for part in $parts; do
  {
    echo "# kvswap $commit, $card: benchmarks/record.sh OUT $part"
    "part_$part"
  } >"$out/$part.txt"
  echo "$out/$part.txt: $(grep -c '^exit status' "$out/$part.txt") commands failed" >&2
done
