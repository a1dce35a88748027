#!/usr/bin/env bash
# Runs the test suite, set-up included: bash tests/run.sh [--full] [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/env.sh tests/requirements.txt

full=()
if [ "${1:-}" = "--full" ]; then full=(--full); shift; fi

# one thread a process: results do not depend on the machine's cores, and several processes share two of them
export OMP_NUM_THREADS=1 GLOG_minloglevel=2 PYTHONWARNINGS=ignore

echo "== style and types"
python -m ruff check .
python -m ruff format --check .
python -m mypy
echo "== tests"
exec python -m pytest --durations=10 "${full[@]}" "$@"
