#!/usr/bin/env bash
# The tests, in a virtual environment of their own. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
make_venv "${KVNUMBA_VENV:-.venv-test}" test
python -m pytest "$@"
