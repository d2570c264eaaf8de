#!/usr/bin/env bash
# Installs a wheel in an empty environment and uses it, away from the checkout's kvswap/:
#   packaging/try.sh PYTHON WHEEL [OPTION OF PYTEST...]
# It runs `kvswap demo` with NumPy alone, then the tests that need no test bindings (packaging/tests.txt).
# KVSWAP_TRY_TESTS="tests/core/test_pool.py ..." runs those instead.
set -euo pipefail
python=$1 wheel=$(realpath "$2")
shift 2
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH

"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install -q "$wheel"
cd "$work"
venv/bin/kvswap info | head -n 20
venv/bin/kvswap demo
venv/bin/pip install -q "kvswap[test] @ file://$wheel"
cp -a "$root/tests" "$root/pyproject.toml" "$work/" # without kvswap/ and csrc/ beside them
# shellcheck disable=SC2046
venv/bin/pytest -q -n 2 -p no:cacheprovider "$@" ${KVSWAP_TRY_TESTS:-$(grep -v '^#' "$root/packaging/tests.txt")}
