#!/usr/bin/env bash
# Real XLA on the CPU, through JAX 0.12.0.
source scripts/tiers/common.sh

[[ -z ${XENTILE_TEST_QUICK:-} ]] || export THIN=6
exec scripts/test_jax.sh 0.12.0
