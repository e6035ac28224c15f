#!/usr/bin/env bash
# What is uploaded, as those get it who have no checkout: the wheel, made of the sdist, in clean environments of
# each Python; the crates, built from their archives; and an installed prefix, from C++.
source scripts/tiers/common.sh

[[ $(uname -s) == Linux ]] || absent "Linux, which wheels are for"
scripts/setup.sh scripts/requirements-packaging.txt
wheels=$(mktemp -d)
check "wheel of the sdist" scripts/wheels.sh --out "$wheels" "$(uname -m)"
rm -r "$wheels"
check "crates" scripts/check_crates.sh
check "installed prefix" scripts/tests/install/test.sh
finish_checks
