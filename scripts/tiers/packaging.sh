#!/usr/bin/env bash
# What is uploaded, as those get it who have no checkout: the wheel, made of the sdist, in clean environments of
# each Python; the crates, built from their archives; an installed prefix, from C++; and with a checkout but no GPU,
# the package, by pip.
source scripts/tiers/common.sh

[[ $(uname -s) == Linux ]] || absent "Linux, which wheels are for"
scripts/setup.sh scripts/requirements-packaging.txt
wheels=$(mktemp -d)
check "wheel of the sdist" scripts/wheels.sh --out "$wheels" "$(uname -m)"
rm -r "$wheels"
check "crates" scripts/check_crates.sh
check "checkout without a GPU" scripts/tests/install/checkout.sh
check "installed prefix" scripts/tests/install/test.sh
finish_checks
