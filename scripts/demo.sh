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
    --prompt "What is the name of the barge that carried the stone?" 2>&1

echo
echo "== second process: resume the session from disk, ask something else =="
kvnumba run --session "$session" --chat --n-predict 48 \
    --prompt "How tall is the tower?" 2>&1
