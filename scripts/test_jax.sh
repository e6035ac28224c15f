#!/usr/bin/env bash
# Tests our custom calls through one version of JAX on the CPU, in a virtual environment of its own:
#
#     scripts/test_jax.sh 0.10.2
#
# Installs pallas_bridge there from its wheel, and holds the ABI of xla-ffi against the header that this
# jaxlib carries. What follows the version is passed on to pytest. Exits 77 where no Python is found that
# this version runs on.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

unset XENTILE_XLA_LIBRARY # what is installed is under test
version=${1:?usage: scripts/test_jax.sh VERSION [PYTEST ARGUMENTS]}
shift
case $version in
    0.9.* | 0.10.*) oldest=11 ;;
    *) oldest=12 ;;
esac

# The first interpreter that is new enough: PYTHON, those on PATH, pyenv's.
find_python() {
    local candidates=("${PYTHON:-python3}" python3.{11,12,13,14}) candidate
    if command -v pyenv >/dev/null; then
        candidates+=("$(pyenv root)"/versions/*/bin/python)
    fi
    for candidate in "${candidates[@]}"; do
        # pyenv's shims are on PATH for versions that are not chosen, and fail.
        if "$candidate" -c "import sys; sys.exit(not (3, $oldest) <= sys.version_info < (3, 14))" \
            2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    printf 'absent: needs python 3.%d to 3.13, which jax %s runs on\n' "$oldest" "$version"
    exit 77
}

environment=$PWD/.venv-jax/$version
stamp=$environment/requirements.cksum
sum=$(cat scripts/requirements-jax.txt scripts/requirements-test.txt | cksum)
if [[ ! -f $stamp || $(<"$stamp") != "$sum" ]]; then
    found=$(find_python) || {
        printf '%s\n' "$found"
        exit 77
    }
    rm -rf "$environment"
    "$found" -m venv "$environment"
    # Versions of all but jax and jaxlib are those of the other tests.
    sed -E "s/^(jax|jaxlib)==.*/\1==$version/" scripts/requirements-jax.txt |
        "$environment/bin/pip" install --quiet --disable-pip-version-check --no-deps \
            --requirement /dev/stdin
    grep -E '^(pytest|iniconfig|packaging|pluggy|pygments)==' scripts/requirements-test.txt |
        "$environment/bin/pip" install --quiet --disable-pip-version-check --no-deps \
            --requirement /dev/stdin
    # Last, so that an environment that was cut short is made again.
    printf '%s\n' "$sum" >"$stamp"
fi
export PATH=$environment/bin:$PATH
# Most of the time is XLA's, which compiles programs that run once; where nobody holds their numbers it may hurry.
hurried="--xla_backend_optimization_level=0 ${XLA_FLAGS:-}"
[[ ${XENTILE_TEST_NUMBERS:-1} != 0 ]] || export XLA_FLAGS=$hurried
python -c 'import jax, sys; print(f"jax {jax.__version__}, python {sys.version.split()[0]}")'

XLA_FFI_JAXLIB_INCLUDE=$(python -c 'import jaxlib; print(jaxlib.__path__[0])')/include
export XLA_FFI_JAXLIB_INCLUDE
# With the features of the whole workspace, as in scripts/tiers/common.sh.
cargo test --package xentile --package xentile-tools --package xentile-xla --package xla-ffi \
    --test abi -- --include-ignored
if [[ -n ${XENTILE_TEST_QUICK:-} ]]; then
    echo "left out: pallas_bridge as it is installed; tests read the checkout, and the library that was built for them"
    cargo build --workspace --features xla-ffi/testing
    pip uninstall --quiet --disable-pip-version-check --yes pallas_bridge
    export XENTILE_XLA_LIBRARY=${CARGO_TARGET_DIR:-$PWD/target}/debug/libxentile_xla.so
    export PYTHONPATH=$PWD/pallas_bridge/src
else
    # One wheel serves every version of JAX of a run of scripts/test.sh.
    wheels=${XENTILE_TEST_WHEELS:-$(mktemp -d)}
    compgen -G "$wheels/pallas_bridge-*.whl" >/dev/null ||
        pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$wheels" ./pallas_bridge
    # --force-reinstall, as the version stays the same from one change to the next.
    pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$wheels"/pallas_bridge-*.whl
fi
# In two runs: these want two devices, those do not know of it.
pytest crates/xla-ffi/tests/jax "$@"
pytest crates/xentile-programs/tests/jax "$@"
if (($#)); then
    pytest pallas_bridge/tests "$@"
    exit
fi
status=0
# In these XLA only stands in for a TPU, and may hurry with every version.
XLA_FLAGS=$hurried scripts/pytest_in_shares.sh pallas_bridge/tests/test*pallas_tpu.py || status=$?
scripts/pytest_in_shares.sh pallas_bridge/tests --ignore-glob='*pallas_tpu.py' || status=$?
exit "$status"
