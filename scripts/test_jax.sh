#!/usr/bin/env bash
# Tests our custom calls through one version of JAX on the CPU, in a virtual environment of its own:
#
#     scripts/test_jax.sh 0.10.2
#
# Installs pallas_bridge there from its wheel, and holds the ABI of xla-ffi against the header that this
# jaxlib carries. What follows the version is passed on to pytest. Exits 77 where no Python is found that
# this version runs on.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/help.sh"
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

source scripts/jax_environment.sh
unset XENTILE_XLA_LIBRARY # what is installed is under test
version=${1:?usage: scripts/test_jax.sh VERSION [PYTEST ARGUMENTS]}
shift
use_jax_environment ".venv-jax/$version" "$version"
# Most of the time is XLA's, which compiles programs that run once; where nobody holds their numbers it may hurry.
hurried="--xla_backend_optimization_level=0 ${XLA_FLAGS:-}"
[[ ${XENTILE_TEST_NUMBERS:-1} != 0 ]] || export XLA_FLAGS=$hurried

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
    install_pallas_bridge
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
