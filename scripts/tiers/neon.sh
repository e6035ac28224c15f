#!/usr/bin/env bash
# The NEON kernels, under emulation.
source scripts/tiers/common.sh

scripts/test_neon.sh
