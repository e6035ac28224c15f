# Sourced from the repository root by what fills virtual environments.
# shellcheck shell=bash

# Prints where uv is, if it is: in .venv, where scripts/requirements-test.txt puts it, or on PATH.
find_uv() {
    local candidate
    for candidate in "$PWD/.venv/bin/uv" uv; do
        # pyenv's shims are on PATH for versions that are not chosen, and fail.
        if "$candidate" --version &>/dev/null; then
            command -v -- "$candidate"
            return
        fi
    done
    return 1
}

# Gives a Python pip, which environments made by uv lack.
#
#     ensure_pip PYTHON
ensure_pip() {
    "$1" -c 'import pip' 2>/dev/null || "$1" -m ensurepip >/dev/null
}

# Makes a virtual environment, which may be without pip, in place of one that is there.
#
#     make_environment PYTHON FOLDER
make_environment() {
    local uv
    if uv=$(find_uv); then
        # An interpreter by its path, which pyenv's shims are not.
        "$uv" venv --quiet --clear --python "$("$1" -c 'import sys; print(sys.executable)')" "$2"
    else
        "$1" -m venv --clear "$2"
    fi
}

# Installs packages in the environment of a Python, and nothing that they depend on. By uv, which takes a tenth of
# pip's time; by pip where there is no uv, or it does not find what pip's settings have pip find.
#
#     install_packages PYTHON PIP_ARGUMENTS
install_packages() {
    local python=$1 uv
    shift
    if uv=$(find_uv) && "$uv" pip install --quiet --python "$python" --no-deps "$@"; then
        return
    fi
    ensure_pip "$python"
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps "$@"
}
