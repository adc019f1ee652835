#!/usr/bin/env bash
# Kernel tests and state machines twice more: with bounds checks, and without compilation. Each
# mode has an empty cache of its own, because Numba's disk cache ignores these switches.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
make_venv "${KVNUMBA_VENV:-.venv-test}" test
tests=(
    tests/kernels tests/test_unified_stateful.py tests/test_unified_traces.py
    tests/test_position_cases.py tests/store/test_committed.py
    tests/runner/test_quants.py tests/runner/test_linear.py
    tests/runner/test_ops.py tests/runner/test_llama.py
)

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for mode in NUMBA_BOUNDSCHECK NUMBA_DISABLE_JIT; do
    echo "== $mode=1 ==" >&2
    mkdir "$scratch/$mode"
    env "$mode=1" NUMBA_CACHE_DIR="$scratch/$mode" HYPOTHESIS_PROFILE="${HYPOTHESIS_PROFILE:-ci}" \
        python -m pytest -q -m "not slow and not model" "${tests[@]}" "$@"
done
