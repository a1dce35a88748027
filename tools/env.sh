# Sourced by the scripts of this repository: a Python with everything installed. Uses the active virtual environment, or
# makes .venv beside this repository's README. Arguments: further requirement files.

_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

_pick_python() {
    local name
    for name in python3 python3.12 python3.11 python3.10 python; do
        if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    echo "error: Python 3.10, 3.11 or 3.12 is needed; python3 here is $(python3 --version 2>&1)" >&2
    return 1
}

if [ -z "${VIRTUAL_ENV:-}" ] && [ -z "${CONDA_PREFIX:-}" ]; then
    if [ ! -x "$_root/.venv/bin/python" ]; then
        _python=$(_pick_python) || exit 1
        echo "making a virtual environment in $_root/.venv"
        "$_python" -m venv "$_root/.venv"
    fi
    # shellcheck disable=SC1091
    . "$_root/.venv/bin/activate"
fi

# a GPU machine has paddlepaddle-gpu: do not lay the CPU wheel over it
_requirements=$(mktemp)
if python -m pip show -q paddlepaddle-gpu 2>/dev/null; then
    grep -v '^paddlepaddle' "$_root/requirements.txt" > "$_requirements"
else
    cp "$_root/requirements.txt" "$_requirements"
fi
_more=()
for _file in "$@"; do _more+=(-r "$_root/$_file"); done
python -m pip install --quiet --disable-pip-version-check -r "$_requirements" "${_more[@]}"
rm -f "$_requirements"
