#!/usr/bin/env bash
# How long what the docs tell people to run takes, in seconds: benchmarks/times.sh OUT [LOG]
# Makes OUT/times.txt from a clean clone, without ccache. LOG: the output of .ci/run of this commit, which has the time
# of the tests and of all checks; without it they are left out. Nothing else should run meanwhile. No CUDA kernels are
# compiled.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath "${1:?OUT}")/times.txt log=${2:+$(realpath "$2")}
[ -z "$(git status --porcelain)" ] || { echo "commit first: a record names its commit" >&2; exit 1; }
export PIP_DISABLE_PIP_VERSION_CHECK=1 CCACHE_DISABLE=1 KVSWAP_CUDA=off
unset CC
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git clone -q . "$work/kvswap"
echo "# kvswap $(git rev-parse --short=9 HEAD), $(nproc) cores of a shared machine: benchmarks/times.sh OUT, without kernels" >"$out"
cd "$work/kvswap"

timed() { # NAME COMMAND...: a row, of a command that succeeds or ends with a warning
  local name=$1 begin=$EPOCHREALTIME status=0
  shift
  "$@" >"$work/log" 2>&1 || status=$?
  [ "$status" -le 1 ] || { cat "$work/log" >&2; return 1; }
  awk -v name="$name" -v begin="$begin" -v end="$EPOCHREALTIME" 'BEGIN { printf "%-36s %7.1f s\n", name, end - begin }' |
    tee -a "$out"
}

timed "install and demo" bash -euo pipefail -c "$(sed -n '/^<!-- command: demo -->$/,/^```$/p' README.md | grep '^python3')"
timed "kvswap doctor" .venv/bin/kvswap doctor
rm -rf build # or the wheel is made of what the installation has compiled
timed "a wheel" .venv/bin/pip wheel -q --no-deps -w dist .
timed "install to contribute" .venv/bin/pip install -q -e '.[test,dev,docs]' --config-settings editable_mode=compat
touch csrc/paths/dma.c
timed "build after a change of a C file" .venv/bin/python setup.py -q build_ext --inplace
timed ".ci/quick" .ci/quick
timed "the site of the docs" .venv/bin/sphinx-build -q -W -c docs . "$work/site"
if [ -n "$log" ]; then # its steps say after how many seconds they begin
  awk '/^== / { s = $(NF - 1); sub(/^\(after /, "", s); if (tests != "") { printf "%-36s %7.1f s\n", "all tests", s - tests; tests = "" }
                if (/README.s own command/) tests = s; last = s }
       END { printf "%-36s %7.1f s\n", ".ci/run", last }' "$log" | tee -a "$out"
fi
