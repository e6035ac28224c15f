#!/usr/bin/env bash
# What is uploaded, as those get it who have no checkout: the wheel, made of the sdist, in clean environments of
# each Python; the crates, built from their archives; and an installed prefix, from C++.
source scripts/tiers/common.sh

[[ $(uname -s) == Linux ]] || absent "Linux, which wheels are for"
scripts/setup.sh scripts/requirements-packaging.txt
# By name it makes what is uploaded.
[[ -z ${XENTILE_TEST_ALL:-} ]] || compile_kernels_once
# test.sh has the tiers of JAX take their wheel from here.
wheels=${XENTILE_TEST_WHEELS:-$(mktemp -d)}
check "wheel of the sdist" scripts/wheels.sh --out "$wheels" "$(uname -m)"
check "crates" scripts/check_crates.sh
check "installed prefix" scripts/tests/install/test.sh
finish_checks
