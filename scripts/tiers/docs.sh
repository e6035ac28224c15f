#!/usr/bin/env bash
# The site in docs/: it builds without a warning, what is made from code is up to date, and the code on its
# pages runs. The first two in the environment of the tier train, with Sphinx; pages in environments that have the wheel.
source scripts/tiers/common.sh
source scripts/jax_environment.sh

XENTILE_VENV=.venv-train scripts/setup.sh scripts/requirements-{jax,test,train,docs}.txt
export PATH=$PWD/.venv-train/bin:$PATH
compile_kernels_once
build_pallas_bridge
cargo build --release
# Copies, as the tier readme may build others beside this one.
export XENTILE_TEST_BINARIES=$target_dir/docs
mkdir -p "$XENTILE_TEST_BINARIES"
for name in libxentile_xla.so gradcheck microbench xentile; do
    cp --remove-destination "$target_dir/release/$name" "$XENTILE_TEST_BINARIES"
done
export XENTILE_XLA_LIBRARY=$XENTILE_TEST_BINARIES/libxentile_xla.so
export PYTHONPATH=$PWD/pallas_bridge/src JAX_PLATFORMS=cpu
python scripts/pages.py left-out
scripts/pytest_in_shares.sh -v --durations=5 scripts/tests/test_pages.py
