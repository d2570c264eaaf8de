#!/usr/bin/env bash
# The core under ThreadSanitizer, used by ten threads: tests/c/tsan.sh [SECONDS [SEED]]. Without a seed it draws one; the
# program prints it. The exit status is 0 where nothing was wrong and no race was reported; no report is suppressed.
# CORE=libcore.a: the core, compiled so already, as test_c.py does.
set -euo pipefail
cd "$(dirname "$0")/../.."
seconds=${1:-60} seed=${2:-$RANDOM}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
flags="-std=c11 -D_GNU_SOURCE -O1 -g1 -pthread -fsanitize=thread -Icsrc"
if [ -z "${CORE:-}" ]; then
  CORE=$folder/libcore.a
  find csrc -name '*.c' ! -path 'csrc/py/*' | tr / _ >"$folder/names"
  find csrc -name '*.c' ! -path 'csrc/py/*' | paste - "$folder/names" |
    xargs -P "${JOBS:-2}" -L 1 bash -c "${CC:-cc} $flags -c \"\$0\" -o \"$folder/\$1.o\""
  ar rcs "$CORE" "$folder"/*.o
fi
${CC:-cc} $flags tests/c/test_threads.c "$CORE" -o "$folder/test_threads" -ldl -lm
run=("$folder/test_threads" "$seconds" "$seed")
if command -v setarch >/dev/null; then run=(setarch "$(uname -m)" -R "${run[@]}"); fi # it needs addresses where it expects them
TSAN_OPTIONS="exitcode=66:halt_on_error=0 ${TSAN_OPTIONS:-}" timeout "$((${seconds%.*} + 120))" "${run[@]}"
