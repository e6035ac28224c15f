#!/usr/bin/env bash
# Makes the project's virtual environment, .venv, and fills it from each requirements file named:
#
#     scripts/setup.sh scripts/requirements-test.txt
#
# A file is installed again only after it has changed. PYTHON names the interpreter that makes
# .venv (default: python3), and XENTILE_VENV another folder than .venv.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/help.sh"

fail() {
    printf 'setup: error: %s\n' "$1" >&2
    exit 2
}

require_311() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && return
    fail "$1 ($("$1" --version 2>&1 | head -n 1 || true)) is not python 3.11 or later: $2"
}

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source scripts/packages.sh
venv=${XENTILE_VENV:-.venv}

for requirements in "$@"; do
    [[ -f $requirements ]] ||
        fail "no file $requirements: name requirements files from the repository root"
done

# One at a time: what another installs now, this one finds.
if command -v flock >/dev/null; then
    exec 9<scripts/setup.sh
    flock 9
fi
if [[ ! -e $venv ]]; then
    python=${PYTHON:-python3}
    command -v -- "$python" >/dev/null ||
        fail "$python not found: install python 3.11 or later, or set PYTHON to one"
    require_311 "$python" "install one, or set PYTHON to one"
    echo "setup: making $venv" >&2
    "$python" -m venv "$venv" >&2 || {
        # Half an environment would pass for a whole one next time.
        rm -rf "$venv"
        fail "$python -m venv failed: install its venv module (python3-venv on Debian)"
    }
fi
require_311 "$venv/bin/python" "remove $venv and run this again"

for requirements in "$@"; do
    stamp=$venv/$(basename -- "$requirements" .txt).cksum
    sum=$(cksum <"$requirements")
    [[ ! -f $stamp || $(<"$stamp") != "$sum" ]] || continue
    "$venv"/bin/python -c 'import pip' 2>/dev/null ||
        fail "$venv has no pip: run $venv/bin/python -m ensurepip, or remove $venv"
    echo "setup: installing $requirements" >&2
    # The files pin all that is needed, so nothing else may come along.
    install_packages "$venv/bin/python" --requirement "$requirements" >&2 ||
        fail "pip could not install $requirements: see above, then run this again"
    # Last, so that an install cut short is done again.
    printf '%s\n' "$sum" >"$stamp"
done
