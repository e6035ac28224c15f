#!/usr/bin/env bash
# The tests of examples and benchmarks that need their environment, of layers for Flax and Equinox, and of checkpoints.
# What leans most on JAX's insides runs here too, as this environment has an older JAX than other tiers of CI's set.
# And nightly the smallest validation of all kernels in examples/train, and every table of benches/transformer_bench
# of the small size at length 128.
source scripts/tiers/common.sh

XENTILE_VENV=.venv-train scripts/setup.sh scripts/requirements-{jax,test,real,train}.txt
export PATH=$PWD/.venv-train/bin:$PATH
build_binaries
export XENTILE_XLA_LIBRARY=$library
export PYTHONPATH=$PWD/pallas_bridge/src JAX_PLATFORMS=cpu

status=0
# Each with a conftest.py of its own, which has XLA compile in a hurry.
for tests in examples/tests benches/tests; do
    scripts/pytest_in_shares.sh --durations=5 "$tests" || status=1
done
# They need Flax, Equinox and safetensors, which the environments of versions of JAX do not have.
XLA_FLAGS="--xla_backend_optimization_level=0 ${XLA_FLAGS:-}" \
    scripts/pytest_in_shares.sh --durations=5 pallas_bridge/tests/test_{nnx,equinox,generation_checkpoints,lowered_rewrites,program}.py || status=1
if [[ $XENTILE_TEST_SET == nightly ]]; then
    cargo build --release
    export XENTILE_XLA_LIBRARY=$target_dir/release/libxentile_xla.so
    check "validate_training.sh, 12 steps" scripts/validate_training.sh --num_train_steps 12 \
        --out "$target_dir/validation-test" -- --model_size test --text README.md CHANGELOG.md
    check "transformer_bench, every table of the small size" \
        scripts/transformer_small.sh "$target_dir/transformer"
    finish_checks || status=1
else
    echo "left out: validate_training.sh, which the tier readme runs, and the tables of transformer_bench"
fi
exit "$status"
