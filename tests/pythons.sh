#!/usr/bin/env bash
# The README's test command with each of these interpreters, from a clean copy: tests/pythons.sh PYTHON...
# Prints a line for each; the whole output of those that fail is kept in $TMPDIR. In a root of another distribution:
# chroot ROOT /kvswap/tests/pythons.sh python3, where /kvswap is a clone. PYTEST_ADDOPTS is heeded.
set -uo pipefail
cd "$(dirname "$0")/.."
command=$(sed -n '/^<!-- command: test -->$/,/^```$/p' README.md | grep '^python3')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
echo "kvswap $(git rev-parse --short HEAD), $(nproc) cores: $command"
for python in "$@"; do
  begin=$SECONDS status=0
  rm -rf "$work/src" && git clone -q . "$work/src"
  (cd "$work/src" && bash -euo pipefail -c "${command/#python3/\"$python\"}") >"$work/log" 2>&1 || status=$?
  counts=$(sed -nE 's/^=+ ([0-9]+ (passed|failed|skipped|error).*) in [0-9.]+s.*/\1/p' "$work/log")
  packages=$("$work/src/.venv/bin/python" -c 'import numpy, pytest; print("NumPy", numpy.__version__, "pytest", pytest.__version__)')
  printf '%s, %s: %s in %d s, exit status %d\n' "$("$python" --version)" "$packages" "$counts" $((SECONDS - begin)) $status
  if [ $status != 0 ]; then
    failed=1
    grep -E '^(FAILED|ERROR)|Timeout' "$work/log" || tail -n 5 "$work/log"
    cp "$work/log" "${TMPDIR:-/tmp}/python-$(basename "$python").log"
  fi
done
exit $failed
