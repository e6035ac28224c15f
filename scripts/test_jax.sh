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

source scripts/tiers/common.sh
source scripts/jax_environment.sh
unset XENTILE_XLA_LIBRARY # what is installed is under test
version=${1:?usage: scripts/test_jax.sh VERSION [PYTEST ARGUMENTS]}
shift
use_jax_environment ".venv-jax/$version" "$version"

XLA_FFI_JAXLIB_INCLUDE=$(python -c 'import jaxlib; print(jaxlib.__path__[0])')/include
export XLA_FFI_JAXLIB_INCLUDE
cargo test "${like_workspace[@]}" --package xla-ffi --test abi -- "$rest"
if [[ $XENTILE_TEST_SET == default ]]; then
    echo "left out: pallas_bridge as it is installed; tests read the checkout, and the library that was built for them"
    build_binaries
    rm -rf "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/pallas_bridge*
    export XENTILE_XLA_LIBRARY=$library
    export PYTHONPATH=$PWD/pallas_bridge/src
else
    compile_kernels_once
    install_pallas_bridge
fi
# In two runs: these want two devices, those do not know of it.
pytest crates/xla-ffi/tests/jax "$@"
pytest crates/xentile-programs/tests/jax "$@"
if (($#)); then
    pytest pallas_bridge/tests "$@"
    exit
fi
status=0 others=(-m "not numbers")
if [[ $XENTILE_TEST_SET == default ]]; then
    echo "left out: kernels for TPUs, which are interpreted"
    others=(--ignore-glob='*pallas_tpu.py')
elif [[ ${XENTILE_TEST_NUMBERS:-1} != 0 ]]; then
    mapfile -t numbers < <(grep -l 'pytest\.mark\.numbers' pallas_bridge/tests/test_*.py)
    scripts/pytest_in_shares.sh "${numbers[@]}" -m numbers || status=$?
fi
# Most of the time is XLA's, which compiles programs that run once: where the results are not those of
# kernels, and in the default set, it optimises nothing, and compiles each as one piece.
quickly="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
quickly+=" --xla_cpu_parallel_codegen_split_count=1"
# Half of what is left are XLA's emitters of fusions, without which the oldest versions of JAX still do.
[[ $version != 0.9.* && $version != 0.10.* ]] || quickly+=" --xla_cpu_use_fusion_emitters=false"
XLA_FLAGS="$quickly ${XLA_FLAGS:-}" \
    scripts/pytest_in_shares.sh pallas_bridge/tests "${others[@]}" || status=$?
exit "$status"
