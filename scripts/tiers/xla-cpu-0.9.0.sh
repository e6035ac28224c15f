#!/usr/bin/env bash
# Real XLA on the CPU, through JAX 0.9.0.
source scripts/tiers/common.sh

# Numbers are held with the newest JAX.
export XENTILE_TEST_NUMBERS=0
# For time: the first case of each test, of the files whose code leans most on what JAX may change.
if [[ $XENTILE_TEST_SET != nightly ]]; then
    export XENTILE_TEST_CASES=one
    export XENTILE_TEST_FILES="export linear_pallas_tpu lowered_rewrites mapping mesh_layouts nn pallas_tpu"
    XENTILE_TEST_FILES+=" platforms program sharding strict_modes symbolic_shapes transformations"
fi
exec scripts/test_jax.sh 0.9.0
