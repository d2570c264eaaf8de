#!/usr/bin/env bash
# The Python extension under ThreadSanitizer, by hand: tests/c/tsan_extension.sh FOLDER [TEST...]. Builds it into FOLDER
# and runs the tests that use threads most, one file after another, in an interpreter that has libtsan preloaded; each
# file's last line and every report go to FOLDER/tsan.txt. The exit status is 0 where nothing failed and nothing was
# reported. PYTHON: the interpreter, with pytest and NumPy. NAMES: of tests, as pytest's -k.
#
# The interpreter and NumPy are not built for it: what only they touch is not seen, and what the GIL orders is ordered.
# One that was (./configure --with-thread-sanitizer --disable-gil) needs no library preloaded: it brings its own.
set -uo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd) && shift || exit 2
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
tests=("$@")
if [ ${#tests[@]} = 0 ]; then
  tests=(tests/core/test_{arrays_race,pool,order,lifetime,racechecker,waits}.py tests/memory/test_{shared,host_pool}.py
    tests/engines/test_{offload,transfer_manager}.py tests/files/test_{files,files_arrays,files_waits}.py
    tests/random/test_{hazards,public}.py)
fi
KVSWAP_SANITIZE=thread KVSWAP_CUDA=off nice "$python" setup.py -q build --build-base "$folder/build" \
  --build-lib "$folder/lib" || exit 1
# glibc frees what a detached thread had of this library's thread-local data once the kernel says that the thread has ended,
# which ThreadSanitizer does not see. And in test_arrays_race and test_files_arrays NumPy writes to the arrays that kvswap reads
# meanwhile, for that is what they are of. SUPPRESSIONS: a file of the interpreter's own (CPython's Tools/tsan).
cat "${SUPPRESSIONS:-/dev/null}" - <<<"race:_dl_deallocate_tls" >"$folder/suppressions"
cat "$folder/suppressions" - <<<"race:_contig_to_contig" >"$folder/suppressions_arrays"
preload=$(gcc -print-file-name=libtsan.so)
"$python" -c 'import sysconfig as s; exit("fsanitize=thread" in s.get_config_var("PY_CFLAGS"))' || preload=""
rm -f "$folder"/report.*
{
  echo "kvswap $(git rev-parse --short HEAD), $("$python" -VV | tr '\n' ' '), $(gcc --version | head -n 1), $(nproc) cores"
  for test in "${tests[@]}"; do
    echo "== $test ${NAMES:+-k '$NAMES'}"
    # A report is no end, and children of a fork go on to their exec. 70: of a test that passed with reports.
    options="halt_on_error=0:exitcode=70:die_after_fork=0:log_path=$folder/report:print_suppressions=0:suppressions=$folder/suppressions"
    [[ $test == *arrays* ]] && options+="_arrays"
    TSAN_OPTIONS=$options LD_PRELOAD=$preload PYTHONPATH="$folder/lib" timeout "${LIMIT:-900}" setarch "$(uname -m)" -R \
      "$python" -P -m pytest -p no:cacheprovider -q --limit 600 --long-seconds "${SECONDS_EACH:-20}" \
      ${NAMES:+-k "$NAMES"} "$test" >"$folder/last.log" 2>&1
    status=$?
    grep -E "^(FAILED|ERROR) |^[0-9]+ (passed|failed)|^no tests|seeds" "$folder/last.log"
    [ $status = 0 ] || echo "exit status $status"
  done
  echo "== reports"
  cat "$folder"/report.* 2>/dev/null || echo "none"
} | tee "$folder/tsan.txt"
! grep -qE "^exit status|^WARNING: ThreadSanitizer" "$folder/tsan.txt"
