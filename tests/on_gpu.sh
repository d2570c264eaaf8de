#!/usr/bin/env bash
# What the tests do on a GPU beyond the suite's own command: tests/on_gpu.sh PART
# Expects kvswap installed for python3, with pytest, pytest-xdist and hypothesis; torch and cupy are used where present.
# On an H200 sanitize takes up to ten minutes, suite five, differential and soak nine, hazards two and a half.
set -uo pipefail
cd "$(dirname "$0")/.."
parts="suite hazards differential soak sanitize gds peers"
part=${1:-}
if [[ -z "$part" || " $parts " != *" $part "* ]]; then
  echo "tests/on_gpu.sh PART: the part is '$part'; it is one of: $parts" >&2
  exit 2
fi
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
# Out of time, pytest still says what has failed.
pytest() { timeout -s INT -k 20 "$1" python3 -P -m pytest -p no:cacheprovider --limit 200 --device cuda:0 "${@:2}"; }
# What ran, what it printed, and its exit status where that is not 0.
section() {
  local title=$1
  echo "== $title"
  "${@:2}" 2>&1 || echo "exit status $?"
  echo
}

# The suite on the GPU, less the tests that are the same on any device, in six parts, which share LIMIT seconds, in JOBS
# processes each. A test that hangs ends its process, and the rest goes on in another one. With ten processes, and as many
# of their children, an H100 had no channel left, and cuDevicePrimaryCtxRetain was out of memory; the kernel's log says so
# (kfifoChidMgrAllocChid). SUITE: these parts alone, such as '1 2 3'. What failed runs again at the end, a test at a time,
# which says whether the crowd was the cause.
suite() {
  local part files until=$((SECONDS + ${LIMIT:-570})) parts=6 failed
  {
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
  } | tee "$out/suite.txt"
}

# Random programs of copies against their model, and random transfers, on the GPU and its own copy paths.
hazards() {
  section "tests/random/test_hazards.py" pytest 170 -q -k "test_threads or silent" --long-seconds=50 tests/random/test_hazards.py
  section "tests/random/test_any_transfer.py" pytest 200 -q -s --long-seconds=25 tests/random/test_any_transfer.py
}

# Random operations over the whole API against their model; and what the process takes meanwhile, over minutes. Out of
# time, the first says where its threads are.
differential() {
  for seed in ${SEEDS:-1 2}; do
    section "tests/random/differential --seed $seed" timeout -s ABRT 280 python3 -X faulthandler tests/random/differential --device cuda:0 \
      --seed "$seed" --operations 50000 --seconds 260
  done
}

soak() {
  section "tests/random/differential --soak" timeout 560 python3 tests/random/differential --device cuda:0 --seed 3 --soak \
    --seconds 480 --every 5
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
      -k "$only" "$(find tests -name "test_$tests.py")" >"$log$again.log" 2>&1
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
    for tests in gpu_ids swap strided gpu pool order transfer regions conformance transfer_manager validation coded_pools verify_codec borrow; do
      printf "%s $tests\n" racecheck memcheck initcheck synccheck
    done
  } | grep -E "${PARTS:-.}" | timeout "${LIMIT:-560}" xargs -P "${JOBS:-6}" -L 1 bash -c 'sanitize_part "$@"' _
  for log in "$parts"/*.log; do
    echo "== $(basename "$log" .log)"
    sed '/^=* test session starts/,/^collecting/d' "$log" | grep -vE "PASSED|SKIPPED|^=+ short test summary|^$" |
      awk '{line[NR] = $0} END {for (i = 1; i <= NR; i++) if (i <= 40 || i > NR - 8) print line[i]; else if (i == 41) print "..."}'
  done
}

# The file tier by libcufile, in its compatibility mode where nvidia-fs is not loaded; the checksum's kernel under
# compute-sanitizer. FILES: a folder on a file system that libcufile takes: without udev's data, as in a container, that is
# none on a disk; /dev/shm it takes.
gds() {
  local tests tool
  tests=$(find tests -name test_files_gds.py)
  section "test_files_gds.py" pytest 300 -q --basetemp "${FILES:-$out}/pytest" "$tests"
  for tool in memcheck racecheck initcheck synccheck; do
    section "$tool" timeout -k 5 100 compute-sanitizer --tool "$tool" --error-exitcode 9 python3 -P -m pytest \
      -p no:cacheprovider -q --device cuda:0 --serial -k checksum_of_a_kernel "$tests"
  done
}

# Two GPUs.
peers() {
  section "test_peer.py" pytest 100 -q "$(find tests -name test_peer.py)"
}

"$part"
