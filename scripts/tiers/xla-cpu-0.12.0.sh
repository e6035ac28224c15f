#!/usr/bin/env bash
# Real XLA on the CPU, through JAX 0.12.0.
source scripts/tiers/common.sh

exec scripts/test_jax.sh 0.12.0
