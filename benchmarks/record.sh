#!/usr/bin/env bash
# What needs a GPU, with a record: benchmarks/record.sh OUT_FOLDER PART [TRACE]. What lies in
# benchmarks/results is listed in its index.ini:
#   benchmarks/record.sh --stale                    which records are of older code than this; exit status 1 if any
#   benchmarks/record.sh --stamp COMMIT FILE...     these files are of that commit
# Expects kvswap installed for python3, with pytest, pytest-xdist and hypothesis; torch and cupy are used where present.
# On an H200 sanitize takes up to ten minutes, load (LOADS names what beside) eleven, suite five, differential and soak nine,
# bench six, regret four, hazards two and a half, replay one.
set -uo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in
--stale | --stamp) exec python3 -P benchmarks/records.py "${1#--}" "${@:2}" ;;
esac
parts="suite hazards differential soak sanitize bench regret calls load graph waits tune memory peers handlers fastdeploy gds replay"
out=${1:-} part=${2:-} trace=${3:-}
if [ -z "$out" ] || [[ " $parts " != *" $part "* ]]; then
  echo "benchmarks/record.sh OUT_FOLDER PART [TRACE]: the part is '$part'; it is one of: $parts" >&2
  exit 2
fi
mkdir -p "$out"
touch "$out/begun.tmp"
run() { timeout "$1" python3 -P -m "${@:2}"; }
# Out of time, pytest still says what has failed.
pytest() { timeout -s INT -k 20 "$1" python3 -P -m pytest -p no:cacheprovider --limit 200 --device cuda:0 "${@:2}"; }
# A command's part of a record: what ran, what it printed, and its exit status where that is not 0.
section() {
  local title=$1
  echo "== $title"
  "${@:2}" 2>&1 || echo "exit status $?"
  echo
}

{
  echo "kvswap ${COMMIT:-$(git rev-parse --short HEAD)} on $(uname -sr), $(nproc) cores"
  nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max --format=csv,noheader
  python3 -c 'import sys, numpy; print("Python", sys.version.split()[0], "NumPy", numpy.__version__)'
  run 60 kvswap info --open
} >"$out/machine.txt" 2>&1

# The suite on the GPU, less the tests that are the same on any device, in six parts, which share LIMIT seconds, in JOBS
# processes each. A test that hangs ends its process, and the rest goes on in another one. With ten processes, and as many
# of their children, an H100 had no channel left, and cuDevicePrimaryCtxRetain was out of memory; the kernel's log says so
# (kfifoChidMgrAllocChid). SUITE: these parts alone, such as '1 2 3'. What failed runs again at the end, a test at a time,
# which says whether the crowd was the cause.
suite() {
  local part files until=$((SECONDS + ${LIMIT:-570})) parts=6 failed
  {
    head -n 1 "$out/machine.txt"
    for part in ${SUITE:-1 2 3 4 5 6}; do
      mapfile -t files < <(find tests -name "test_*.py" | sort | awk -v part="$part" -v parts="$parts" 'NR % parts == part - 1')
      section "pytest --device-only, part $part of $parts" pytest $((until > SECONDS ? until - SECONDS : 1)) \
        -q --device-only \
        -n "${JOBS:-6}" --dist worksteal --max-worker-restart 8 --durations=20 --long-seconds=2 \
        "${files[@]}"
    done
    mapfile -t failed < <(sed -nE 's/^(FAILED|ERROR) (.*::.*)/\2/p' "$out/suite.txt" | sed 's/ - .*//' | sort -u)
    [ ${#failed[@]} = 0 ] || section "those ${#failed[@]} again, alone" \
      pytest $((until > SECONDS ? until - SECONDS : 1)) -q --device-only "${failed[@]}"
    section "what the driver told the kernel" sh -c 'dmesg | grep -E "NVRM|nvidia" | tail -n 20'
  } >"$out/suite.txt"
  grep -E "passed|exit status|^(FAILED|ERROR)" "$out/suite.txt"
}

# Random programs of copies against their model, and random transfers, on the GPU and its own copy paths.
hazards() {
  {
    section "tests/long/test_hazards.py" pytest 170 -q -k "test_threads or silent" --long-seconds=50 tests/long/test_hazards.py
    section "tests/long/test_any_transfer.py" pytest 200 -q -s --long-seconds=25 tests/long/test_any_transfer.py
  } >"$out/random.txt"
  tail -n 20 "$out/random.txt"
}

# Random operations over the whole API against their model; and what the process takes meanwhile, over minutes. Out of
# time, the first says where its threads are.
differential() {
  for seed in ${SEEDS:-1 2}; do
    section "tests/differential --seed $seed" timeout -s ABRT 280 python3 -X faulthandler tests/differential --device cuda:0 \
      --seed "$seed" --operations 50000 --seconds 260
  done >"$out/differential.txt"
  grep -E "^==|difference|DIFFERENCE|exit status" "$out/differential.txt"
}

soak() {
  section "tests/differential --soak" timeout 560 python3 tests/differential --device cuda:0 --seed 3 --soak \
    --seconds 480 --every 5 >"$out/soak.txt"
  tail -n 12 "$out/soak.txt"
}

# The same tests, less what starts processes of its own, counts Python's objects, captures graphs in torch, or holds
# streams up (--serial: the tools run one command at a time). Calls that the driver is meant to refuse are no errors; what
# a tool says of memory and kernels is. initcheck sees neither what a batch call writes nor a copy of rows far apart: it
# runs without batch calls and far_apart. memcheck takes one read across two registrations side by side for one beyond the
# first: it runs without over_seams. racecheck sometimes loses track of a launch, an error of its own in another test each
# time, which it counts as a hazard: then the part runs once more, and both runs are kept.
sanitize_part() {
  local tool=$1 tests=$2 only="${*:3} not allocators and not context and not capture and not lost_device_is_told"
  local title="$*" log again longest
  log="$parts/${title% and}"
  only+=" and not keeps_a_manager and not beside and not a_child and not elapsed and not whatever"
  only+=" and not high_overtakes and not high_waits"
  [ "$tool" = initcheck ] && export KVSWAP_DISABLE=batch &&
    only+=" and not far_apart and not interleaving and not defaults_of and not environment and not copy_batch" &&
    only+=" and not H2D-batch and not D2H-batch"
  [ "$tool" = memcheck ] && only+=" and not over_seams"
  for again in "" " again"; do
    longest=$((until - $(date +%s)))
    [ $longest -gt 20 ] || break
    PYTHONFAULTHANDLER=1 timeout -k 5 "$longest" compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 9 \
      python3 -P -m pytest -p no:cacheprovider --limit $((longest - 10)) -vx --device cuda:0 --serial --device-only \
      -k "$only" "tests/test_$tests.py" >"$log$again.log" 2>&1
    printf '\nexit status %d\n' $? >>"$log$again.log"
    grep -q "Internal Sanitizer Error" "$log$again.log" || break
  done
}

# PARTS: a regular expression of those to run, such as "memcheck (pool|burst)". JOBS at a time: six. With fourteen
# cuDevicePrimaryCtxRetain was out of memory, as in the suite with ten.
sanitize() {
  export parts=$(mktemp -d) until=$(($(date +%s) + ${LIMIT:-560} - 20))
  export -f sanitize_part
  {
    for way in "D2H and" "H2D and"; do # the slow ones first
      printf '%s\n' "memcheck faults $way" "memcheck burst $way call_of_a_layer and" "memcheck burst $way not call_of_a_layer and"
      printf "%s burst $way\n" racecheck initcheck synccheck
    done
    for way in "D2H and" "H2D and" "not D2H and not H2D and"; do
      printf "%s copy_engine $way\n" memcheck racecheck initcheck synccheck
    done
    for tests in gpu_ids swap strided gpu pool order transfer regions conformance transfer_manager validation; do
      printf "%s $tests\n" racecheck memcheck initcheck synccheck
    done
  } | grep -E "${PARTS:-.}" | timeout "${LIMIT:-560}" xargs -P "${JOBS:-6}" -L 1 bash -c 'sanitize_part "$@"' _
  for log in "$parts"/*.log; do
    echo "== $(basename "$log" .log)"
    sed '/^=* test session starts/,/^collecting/d' "$log" | grep -vE "PASSED|SKIPPED|^=+ short test summary|^$" |
      awk '{line[NR] = $0} END {for (i = 1; i <= NR; i++) if (i <= 40 || i > NR - 8) print line[i]; else if (i == 41) print "..."}'
  done >"$out/sanitizer.txt"
  grep -E "^== |SUMMARY|exit status|passed|failed| error" "$out/sanitizer.txt"
}

# What this machine was calibrated to is what path auto goes by in this part.
calibrated() {
  run 60 kvswap calibrate --output "$out/calibration.tmp" 2>/dev/null
  export KVSWAP_CALIBRATION="$out/calibration.tmp"
}

bench() {
  calibrated >/dev/null
  run 500 kvswap bench >"$out/bench.txt" 2>&1
  cat "$out/bench.txt"
}

regret() {
  {
    section "kvswap calibrate" calibrated
    for seed in ${SEEDS:-5 21}; do
      section "kvbench regret --seed $seed" env PYTHONPATH=benchmarks timeout 150 python3 -m kvbench regret --seed "$seed"
    done
  } >"$out/regret.txt"
  tail -n 40 "$out/regret.txt"
}

calls() {
  {
    section bench_calls.py timeout 60 python3 -P benchmarks/bench_calls.py --device cuda:0
    section bench_few.py timeout 60 python3 -P benchmarks/bench_few.py --device cuda:0
    section bench_order.py timeout 120 python3 -P benchmarks/bench_order.py --device cuda:0
  } | tee "$out/calls.txt"
}

# What copies cost a model beside them: under five minutes a load, and under one with a single hardware queue; what marks
# behind transfers cost them, and other streams that work first, two minutes; a scattered transfer by two paths at once, five.
load() {
  local block_first=(--shape 64x32k --shape 80x8k --shape 61x36k --method auto)
  {
    for kind in ${LOADS:-step matmul tokens}; do
      local shapes=()
      [ "$kind" = tokens ] && shapes=(--shape 64x32k --method auto --method high)
      section "kvswap bench --load $kind ${shapes[*]}" run 330 kvswap bench --load "$kind" "${shapes[@]}"
      [ "$kind" = tokens ] || # without gaps the tokens stand still
        section "CUDA_DEVICE_MAX_CONNECTIONS=1 kvswap bench --load $kind ${block_first[*]}" \
          env CUDA_DEVICE_MAX_CONNECTIONS=1 timeout 80 python3 -P -m kvswap bench --load "$kind" "${block_first[@]}"
    done
    section marks.py timeout 60 python3 -P benchmarks/marks.py --device cuda:0
    for streams in 0 1; do
      section "CUDA_DEVICE_MAX_CONNECTIONS=32 marks.py --streams $streams" env CUDA_DEVICE_MAX_CONNECTIONS=32 \
        timeout 60 python3 -P benchmarks/marks.py --device cuda:0 --streams "$streams"
    done
    section two_paths.py timeout 400 python3 -P benchmarks/two_paths.py --device cuda:0
  } | tee "$out/load.txt"
}

# What kernels on other streams cost a CUDA graph.
graph() {
  section bench_graph.py timeout 150 python3 -P benchmarks/bench_graph.py | tee "$out/graph.txt"
}

# Which calls of the driver wait for the GPU.
waits() {
  section driver_waits.py timeout 100 python3 -P benchmarks/driver_waits.py | tee "$out/waits.txt"
}

# What the settings of kernels and batch calls are good for: the constants of csrc are from here; and path strided.
tune() {
  for program in batch_parts tune_copy strided_parts small_copies; do
    nvcc -O2 -std=c++17 -arch=native -Icsrc/kernels -o "$out/$program" "benchmarks/$program.cu" -lcuda &&
      section "$program" timeout 150 "$out/$program"
    rm -f "$out/$program"
  done >"$out/tune.txt"
  for size in 1GiB 160MiB; do
    section "kvswap bench --shape slab --method strided --bytes $size" run 60 kvswap bench --shape slab --method strided \
      --bytes "$size"
  done >"$out/strided.txt"
}

# Host pools beside the driver's allocation, and memory of a process in another one.
memory() {
  {
    section "bench_host_pool.py --size 64GiB" timeout 200 python3 -P benchmarks/bench_host_pool.py --device cuda:0 \
      --size 64GiB --repeats "${REPEATS:-2}"
    section bench_ipc.py timeout 100 python3 -P benchmarks/bench_ipc.py --device cuda:0
  } >"$out/memory.txt"
  tail -n 20 "$out/memory.txt"
}

# Two GPUs. What FastDeploy's ranks print goes to the end of fastdeploy.txt.
peers() {
  {
    section bench_peer.py timeout 100 python3 -P benchmarks/bench_peer.py
    section tests/test_peer.py pytest 100 -q tests/test_peer.py
  } >"$out/peers.txt"
  section "bench_fastdeploy.py ranks" timeout 100 python3 -P benchmarks/bench_fastdeploy.py ranks >>"$out/fastdeploy.txt"
  tail -n 20 "$out/peers.txt" "$out/fastdeploy.txt"
}

# vLLM's job queue.
handlers() {
  PYTHONPATH=benchmarks timeout 400 python3 -m kvbench handlers >"$out/handlers.txt" 2>&1
  cat "$out/handlers.txt"
}

# FastDeploy's ops and the manager.
fastdeploy() {
  section bench_fastdeploy.py timeout 200 python3 -P benchmarks/bench_fastdeploy.py --device cuda:0 | tee "$out/fastdeploy.txt"
}

# The file tier by libcufile, in its compatibility mode where nvidia-fs is not loaded: its tests, the checksum's kernel
# under compute-sanitizer, GB/s. FILES: a folder on a file system that libcufile takes: without udev's data, as in a
# container, that is none on a disk; /dev/shm it takes.
gds() {
  local folder="${FILES:-$out/files}"
  mkdir -p "$folder"
  {
    section "bench_files.py" timeout 250 python3 -P benchmarks/bench_files.py "$folder/bench" --bytes 2GiB --device cuda:0 \
      --gds compat --device-only
    section "tests/test_files_gds.py" pytest 300 -q --basetemp "$folder/pytest" tests/test_files_gds.py
    for tool in memcheck racecheck initcheck synccheck; do
      section "$tool" timeout -k 5 100 compute-sanitizer --tool "$tool" --error-exitcode 9 python3 -P -m pytest \
        -p no:cacheprovider -q --device cuda:0 --serial -k checksum_of_a_kernel tests/test_files_gds.py
    done
  } >"$out/gds.txt"
  grep -E "^==|GB/s|SUMMARY|exit status|passed" "$out/gds.txt"
}

replay() {
  {
    section "kvswap demo" run 60 kvswap demo
    if [ -n "$trace" ]; then
      section "kvswap replay" run 200 kvswap replay "$trace"
      section "kvswap replay --fault copy:skip:10000: exit status 1 is right" \
        run 100 kvswap replay "$trace" --fault copy:skip:10000
    fi
  } >"$out/replay.txt"
  tail -n 24 "$out/replay.txt"
}

"$part"
card=$(grep -om1 'NVIDIA [A-Z][0-9]*' "$out/machine.txt" | tr -d ' ' | tr '[:upper:]' '[:lower:]')
card=${card#nvidia}
made=$(find "$out" -maxdepth 1 \( -name "*.txt" -o -name "*.png" \) -newer "$out/begun.tmp" -printf "$card/%f ")
rm -f "$out"/*.tmp
echo "once they lie in benchmarks/results/$card: benchmarks/record.sh --stamp ${COMMIT:-HEAD} ${made:-(nothing was made)}" >&2
