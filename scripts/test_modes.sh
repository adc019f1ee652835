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
    tests/test_recurrent_stateful.py tests/test_recurrent_traces.py tests/test_window_stateful.py
    tests/test_hybrid_stateful.py tests/test_streams_stateful.py tests/test_sliding.py
    tests/test_memory.py tests/test_masks.py tests/test_positions_2d.py tests/test_layer_kinds.py
    tests/runner/test_quants.py tests/runner/test_linear.py
    tests/runner/test_ops.py tests/runner/test_llama.py tests/runner/test_mamba.py
)

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# The main run has the most examples; plain Python is a hundred times slower and has the fewest.
for mode in NUMBA_BOUNDSCHECK:some NUMBA_DISABLE_JIT:few; do
    profile=${mode#*:}
    mode=${mode%:*}
    echo "== $mode=1 ==" >&2
    mkdir "$scratch/$mode"
    env "$mode=1" NUMBA_CACHE_DIR="$scratch/$mode" HYPOTHESIS_PROFILE="$profile" \
        python -m pytest -q -m "not slow and not model" -k "not left_out_operation" "${tests[@]}" "$@"
done
