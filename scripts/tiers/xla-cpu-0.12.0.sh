#!/usr/bin/env bash
# Real XLA on the CPU, through JAX 0.12.0.
source scripts/tiers/common.sh

# For time: most tests have a grid of cases.
[[ -z ${XENTILE_TEST_QUICK:-}${XENTILE_TEST_ALL:-} ]] || export THIN=8
# The other half runs through the oldest.
[[ -z ${XENTILE_TEST_ALL:-} ]] || export HALF=0
exec scripts/test_jax.sh 0.12.0
