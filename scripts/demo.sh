#!/usr/bin/env bash
# The main job: a model reads a document through the cache and answers a question; then a second
# process resumes the session from disk and answers another one.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
make_venv "${KVNUMBA_VENV:-.venv-demo}" run

session=${KVNUMBA_DEMO_SESSION:-.demo-session}
rm -rf "$session"
echo "compiling the kernels (only the first time) ..." >&2
kvnumba warmup

echo
echo "== first process: read the document, answer, exit =="
kvnumba run --session "$session" --chat --n-predict 48 \
    --file docs/demo/lighthouse.txt \
    --prompt "Who designed the lighthouse at Skarn Point?" 2>&1

echo
echo "== second process: resume the session from disk, ask something else =="
kvnumba run --session "$session" --chat --n-predict 48 \
    --prompt "What was the name of the keeper's goat?" 2>&1
