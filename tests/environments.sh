#!/usr/bin/env bash
# The suite where a machine is not as a developer's is: tests/environments.sh [NAME...]; without names, each of them once.
#   sigint      SIGINT is ignored, as for what a script starts in the background
#   user        an ordinary user, who may write neither here nor in a home
#   no_sys      nothing in /sys
#   small_shm   /dev/shm of 64 MiB
#   beside      two suites at once
#   order:N     in random order, of seed N
# Expects kvswap with the packages of its tests, and pytest-randomly for order, in VENV (.venv by default), and root for
# user, no_sys and small_shm. PYTEST_ADDOPTS: "-n auto" by default. Prints a line for each environment, and what failed;
# the whole output of those is kept in $TMPDIR.
set -uo pipefail
cd "$(dirname "$0")/.."
export venv=${VENV:-$PWD/.venv} PYTEST_ADDOPTS="${PYTEST_ADDOPTS:--n auto}"
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

suite() { "$venv/bin/pytest" -q -p no:cacheprovider "${@:--pno:randomly}"; }
export -f suite

mounted() { unshare -m bash -euc "mount --make-rprivate /; $1; suite"; }

run() {
  case $1 in
    sigint) bash -c 'trap "" INT; suite' ;;
    user) setpriv --reuid=nobody --regid=nogroup --clear-groups env HOME=/nonexistent PYTHONDONTWRITEBYTECODE=1 bash -c suite ;;
    no_sys) mounted 'mount -t tmpfs none /sys' ;;
    small_shm) mounted 'mount -t tmpfs -o size=64m none /dev/shm' ;;
    order:*) local seed=${1#order} && suite --randomly-seed "${seed#:}" ;;
    beside)
      suite >"$logs/other" 2>&1 &
      local other=$! status=0
      suite || status=1
      wait "$other" || status=1
      cat "$logs/other"
      return $status
      ;;
    *)
      echo "no such environment: $1"
      return 2
      ;;
  esac
}

failed=0
echo "kvswap $(git rev-parse --short HEAD), $("$venv/bin/python" --version), $(nproc) cores, pytest $PYTEST_ADDOPTS"
[ $# -gt 0 ] || set -- sigint user no_sys small_shm beside order:1
for name in "$@"; do
  begin=$SECONDS status=0
  run "$name" >"$logs/$name" 2>&1 || status=$?
  counts=$(sed -nE 's/^(=+ )?([0-9]+ (passed|failed|skipped|error).*) in [0-9.]+s.*/\2/p' "$logs/$name" | paste -sd ';')
  printf '%-10s %s in %d s, exit status %d\n' "$name" "$counts" $((SECONDS - begin)) $status
  if [ $status != 0 ]; then
    failed=1
    grep -E '^(FAILED|ERROR|no such)|Timeout' "$logs/$name"
    cp "$logs/$name" "${TMPDIR:-/tmp}/environment-$name.log"
  fi
done
exit $failed
