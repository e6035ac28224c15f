#!/usr/bin/env bash
# Real XLA on the CPU, through JAX 0.9.0.
source scripts/tiers/common.sh

# Numbers are held with the newest JAX.
export XENTILE_TEST_NUMBERS=0
exec scripts/test_jax.sh 0.9.0
