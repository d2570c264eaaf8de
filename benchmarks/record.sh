#!/usr/bin/env bash
# What needs a GPU, with a record: benchmarks/record.sh OUT_FOLDER PART [TRACE]; the parts stand at its end
# Expects kvswap installed for python3, with pytest and hypothesis; torch and cupy are used where present. On an H200 suite
# and sanitize take up to ten minutes each, hazards two and a half, bench six, load nine a kind, replay one.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1 part=$2 trace=${3:-}
mkdir -p "$out"
run() { timeout "$1" python3 -P -m "${@:2}"; }
pytest() { run "$1" pytest -p no:cacheprovider -o faulthandler_timeout=60 --device cuda:0 "${@:2}"; }

{
  echo "kvswap ${COMMIT:-$(git rev-parse --short HEAD)} on $(uname -sr), $(nproc) cores"
  nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max --format=csv,noheader
  python3 -c 'import sys, numpy; print("Python", sys.version.split()[0], "NumPy", numpy.__version__)'
  run 60 kvswap info --open
} >"$out/machine.txt" 2>&1

# The suite, six (or JOBS) of its files at a time; each file's own output, then what all came to.
suite_part() { pytest 560 -q --durations=3 --long-seconds=2 "$1" >"$parts/$(basename "$1" .py).log" 2>&1; }

suite() {
  export parts=$(mktemp -d)
  export -f suite_part pytest run
  ls -S tests/test_*.py tests/long/test_[as]*.py | grep -vF test_c.py | timeout 570 xargs -P "${JOBS:-6}" -n 1 bash -c 'suite_part "$1"' _
  {
    head -n 1 "$out/machine.txt"
    tail -n +1 "$parts"/*.log
    awk '/ in [0-9.]+s/ {for (i = 2; i <= NF; i++) if ($i ~ /^(passed|failed|skipped|errors?),?$/) {
      sub(",", "", $i); sum[$i] += $(i - 1)}} END {for (key in sum) printf "%d %s ", sum[key], key; print "in all"}' \
      "$parts"/*.log
  } >"$out/suite.txt"
  tail -n 1 "$out/suite.txt"
  grep -E "^(FAILED|ERROR)" "$out/suite.txt"
}

# Random programs of copies against their model, on the GPU and its own copy paths.
hazards() {
  pytest 170 -q -k "test_threads or silent" --long-seconds=50 tests/long/test_hazards.py >"$out/hazards.txt" 2>&1
  tail -n 12 "$out/hazards.txt"
}

# The suite, less what starts processes of its own, counts Python's objects or captures graphs in torch, and less what holds
# streams up (--serial: the tools run one command at a time). Calls that the driver is meant to refuse are no errors; what
# a tool says of memory and kernels is. initcheck sees neither what a batch call writes nor a copy of rows far apart: it
# runs without batch calls and far_apart. memcheck takes one read across two registrations side by side for one beyond the
# first: it runs without over_seams. A relay needs a kernel and copies at once, which the tools do not let run: each of its
# transfers gives up after a quarter of a second and is done again, so that it is looked at in test_swap alone; not by
# initcheck, since what it had copied by then may be anything.
sanitize_part() {
  local tool=$1 tests=$2 only="${*:3} not allocators and not context and not capture and not lost_device_is_told"
  local log="$parts/$tool-$tests${3:+-$3}.log"
  only+=" and not keeps_a_manager and not beside and not elapsed and not whatever"
  [ "$tests-$tool" = swap-initcheck ] || [ "$tests" != swap ] && only+=" and not relay"
  [ "$tool" = initcheck ] && export KVSWAP_DISABLE=batch,relay &&
    only+=" and not far_apart and not interleaving and not defaults_of and not environment"
  [ "$tool" = memcheck ] && only+=" and not over_seams"
  timeout -k 5 400 compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 9 \
    python3 -P -m pytest -p no:cacheprovider -o faulthandler_timeout=100 -v --device cuda:0 --serial \
    -k "$only" "tests/test_$tests.py" >"$log" 2>&1
  printf '\nexit status %d\n' $? >>"$log"
}

sanitize() {
  export parts=$(mktemp -d)
  export -f sanitize_part
  {
    printf '%s\n' "memcheck faults D2H and" "memcheck faults H2D and" # the slow ones first
    printf '%s copy_engine kernel and\n' racecheck memcheck initcheck synccheck
    for tests in swap strided gpu pool order transfer regions conformance transfer_manager validation; do
      printf "%s $tests\n" racecheck memcheck initcheck synccheck
    done
  } | timeout 560 xargs -P 8 -L 1 bash -c 'sanitize_part "$@"' _
  for log in "$parts"/*.log; do
    echo "== $(basename "$log" .log)"
    sed '/^=* test session starts/,/^collecting/d' "$log" | grep -vE "PASSED|SKIPPED|^=+ short test summary|^$"
  done >"$out/sanitizer.txt"
  grep -E "^== |SUMMARY|exit status|passed|failed| error" "$out/sanitizer.txt"
}

# What this machine was calibrated to stands beside what that makes of path auto.
bench() {
  run 60 kvswap calibrate --output "$out/calibration.txt" >"$out/calibrate.txt" 2>&1
  export KVSWAP_CALIBRATION="$out/calibration.txt"
  run 250 kvswap bench --json "$out/bench.json" --plot "$out/bench.png" >"$out/bench.txt" 2>&1
  cat "$out/bench.txt"
  run 100 kvswap bench --regret --seed 1 --json "$out/regret.json" --plot "$out/regret.png" >"$out/regret.txt" 2>&1
  timeout 60 python3 -P benchmarks/bench_calls.py --device cuda:0 --json "$out/bench_calls.json" | tee "$out/bench_calls.txt"
  timeout 120 python3 -P benchmarks/bench_order.py --device cuda:0 --json "$out/bench_order.json" | tee "$out/bench_order.txt"
}

# What copies cost a model beside them: nine minutes a load.
load() {
  for kind in decode matmul; do
    run 320 kvswap bench --load "$kind" --size 16KiB --method background --method high --method kernel --method warp \
      --json "$out/$kind-run.json" --plot "$out/$kind-run.png" >"$out/$kind-run.txt" 2>&1
    run 150 kvswap bench --load "$kind" --shape tensor --size 64KiB --method background --method high \
      --json "$out/$kind-tensor.json" >"$out/$kind-tensor.txt" 2>&1
    run 120 kvswap bench --load "$kind" --shape slab --size 16KiB --method strided --json "$out/$kind-slab.json" \
      >"$out/$kind-slab.txt" 2>&1
  done
}

# What the settings of kernels, the relay and batch calls are good for: the constants of csrc are from here.
tune() {
  for program in batch_parts tune_copy; do
    nvcc -O2 -std=c++17 -arch=native -Icsrc/kernels -o "$out/$program" "benchmarks/$program.cu" -lcuda &&
      timeout 300 "$out/$program" >"$out/$program.txt"
    rm -f "$out/$program"
  done
}

# Host pools beside the driver's allocation, and memory of a process in another one.
memory() {
  timeout 200 python3 -P benchmarks/bench_host_pool.py --device cuda:0 --size 64GiB --repeats "${REPEATS:-2}" \
    --json "$out/host_pool.json" >"$out/host_pool.txt" 2>&1
  timeout 100 python3 -P benchmarks/bench_ipc.py --device cuda:0 --json "$out/ipc.json" >"$out/ipc.txt" 2>&1
  tail -n 20 "$out/host_pool.txt" "$out/ipc.txt"
}

# Two GPUs.
peers() {
  pytest 100 -q tests/test_peer.py >"$out/peer_suite.txt" 2>&1
  timeout 100 python3 -P benchmarks/bench_peer.py --json "$out/peer.json" >"$out/peer.txt" 2>&1
  timeout 100 python3 -P benchmarks/bench_fastdeploy.py ranks --json "$out/ranks.json" >"$out/ranks.txt" 2>&1
  tail -n 20 "$out/peer_suite.txt" "$out/peer.txt" "$out/ranks.txt"
}

# vLLM's job queue; FastDeploy's ops and the manager; the file tier.
engines() {
  run 200 kvswap bench --handlers --json "$out/handlers.json" >"$out/handlers.txt" 2>&1
  timeout 200 python3 -P benchmarks/bench_fastdeploy.py --device cuda:0 --json "$out/fastdeploy.json" \
    >"$out/fastdeploy.txt" 2>&1
  timeout 200 python3 -P benchmarks/bench_files.py "${FILES:-$out}" --device cuda:0 >"$out/files.txt" 2>&1
  tail -n 20 "$out/handlers.txt" "$out/fastdeploy.txt" "$out/files.txt"
}

# The file tier by libcufile, in its compatibility mode where nvidia-fs is not loaded: its tests, the checksum's kernel
# under compute-sanitizer, GB/s. FILES: a folder on a file system that libcufile takes: without udev's data, as in a
# container, that is none on a disk; /dev/shm it takes.
gds() {
  local folder="${FILES:-$out/files}"
  mkdir -p "$folder"
  pytest 300 -q --basetemp "$folder/pytest" tests/test_files_gds.py >"$out/gds_suite.txt" 2>&1
  for tool in memcheck racecheck initcheck synccheck; do
    echo "== $tool"
    timeout -k 5 100 compute-sanitizer --tool "$tool" --error-exitcode 9 python3 -P -m pytest -p no:cacheprovider -q \
      --device cuda:0 --serial -k checksum_of_a_kernel tests/test_files_gds.py
    echo "exit status $?"
  done >"$out/gds_sanitizer.txt" 2>&1
  timeout 250 python3 -P benchmarks/bench_files.py "$folder/bench" --bytes 2GiB --device cuda:0 --gds compat \
    --device-only >"$out/gds.txt" 2>&1
  tail -n 3 "$out/gds_suite.txt"
  grep -E "^==|SUMMARY|exit status|passed" "$out/gds_sanitizer.txt"
  cat "$out/gds.txt"
}

replay() {
  run 60 kvswap demo >"$out/demo.txt" 2>&1
  tail -n 12 "$out/demo.txt"
  if [ -n "$trace" ]; then
    run 200 kvswap replay "$trace" --json "$out/replay.json" >"$out/replay.txt" 2>&1
    echo "exit status $?" >>"$out/replay.txt"
    run 100 kvswap replay "$trace" --fault copy:skip:10000 >"$out/replay_skip.txt" 2>&1
    echo "exit status $?" >>"$out/replay_skip.txt"
    tail -n 6 "$out/replay.txt" "$out/replay_skip.txt"
  fi
}

case $part in
suite | hazards | sanitize | bench | load | tune | memory | peers | engines | gds | replay) "$part" ;;
*)
  echo "the part is '$part'; it is one of: suite, hazards, sanitize, bench, load, tune, memory, peers, engines, gds, replay" >&2
  exit 2
  ;;
esac
