# Sourced by the scripts of this repository: makes `python` one with everything installed. Uses the active virtual
# environment, or makes and enters .venv beside this repository's README. Arguments: further requirement files.

_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
_supported='import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))'

_fail() {
    echo "error: $*" >&2
    exit 1
}

_make_venv() {
    local name
    for name in python3 python3.12 python3.11 python3.10 python none; do
        if "$name" -c "$_supported" 2>/dev/null; then break; fi
    done
    [ "$name" != none ] || _fail "Python 3.10, 3.11 or 3.12 is needed; python3 here is: $(python3 --version 2>&1)"
    echo "making a virtual environment in $_root/.venv ($("$name" --version))"
    "$name" -m venv "$_root/.venv" ||
        _fail "$name cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)"
}

# conda's own base environment is not one that somebody chose
_environment=${VIRTUAL_ENV:-}
if [ -z "$_environment" ] && [ "${CONDA_DEFAULT_ENV:-base}" != base ]; then _environment=${CONDA_PREFIX:-}; fi
if [ -z "$_environment" ]; then
    _environment=$_root/.venv
    [ -e "$_environment" ] || _make_venv
    # shellcheck disable=SC1091
    . "$_environment/bin/activate" && python -m pip --version >/dev/null 2>&1 ||
        _fail "$_environment is unfinished or was moved: remove it (rm -r $_environment) and start again"
fi
# never install into another Python than the one meant
python -c 'import os, sys; sys.exit(os.path.realpath(sys.prefix) != os.path.realpath(sys.argv[1]))' "$_environment" ||
    _fail "the environment is $_environment, but python is $(command -v python): was it moved? Remove it, or activate it anew"
python -c "$_supported" || _fail "Python 3.10, 3.11 or 3.12 is needed; $_environment has $(python --version 2>&1)"

_install() {
    local requirements file more=()
    requirements=$(cat "$_root/requirements.txt")
    # a GPU machine has paddlepaddle-gpu: do not lay the CPU wheel over it
    if python -m pip show -q paddlepaddle-gpu 2>/dev/null; then
        requirements=$(grep -v '^paddlepaddle' "$_root/requirements.txt")
    fi
    for file in "$@"; do more+=(-r "$_root/$file"); done
    python -m pip install --quiet --disable-pip-version-check -r /dev/stdin ${more[@]+"${more[@]}"} <<< "$requirements"
}

_install "$@" || _fail "the packages of requirements.txt could not be installed into $_environment"
