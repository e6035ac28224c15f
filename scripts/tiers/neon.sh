#!/usr/bin/env bash
# The NEON kernels, under emulation.
source scripts/tiers/common.sh

try_fewer_arguments
scripts/test_neon.sh
