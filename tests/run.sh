#!/usr/bin/env bash
# Runs style and type checks and the test suite, set-up included: bash tests/run.sh [--full] [pytest arguments]
# --full also runs the long matrices. Every part runs even if an earlier one fails; the exit code is 0 if all passed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/env.sh tests/requirements.txt

# one thread in pytest's own process; what tests start says its own number (Global.cpu_threads in tests/training.py)
export OMP_NUM_THREADS=1 GLOG_minloglevel=2 PYTHONWARNINGS=ignore

summary=() failed=0
part() {
    local name=$1 start=$SECONDS verdict=passed
    shift
    echo "== $name"
    "$@" </dev/null || { verdict="FAILED (exit code $?)"; failed=1; }
    summary+=("$(printf '%-7s %s, %d s' "$name" "$verdict" $((SECONDS - start)))")
}

part style python -m ruff check .
part format python -m ruff format --check .
part types python -m mypy
part tests python -m pytest --durations=10 "$@"

echo "== summary: $(python -c 'import platform, importlib.metadata as m; print("Python", platform.python_version() + ", Paddle", m.version("paddlepaddle"))' 2>/dev/null || python --version)"
printf '%s\n' "${summary[@]}"
exit "$failed"
