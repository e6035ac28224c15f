#!/usr/bin/env bash
# Every command in README.md, as a reader would run it, and those in docs/ that fetch something.
source scripts/tiers/common.sh

compile_kernels_once
use_cargo_of_tests
[[ $XENTILE_TEST_SET != ci ]] || echo "left out: builds without the features of tests, as README's commands make them"
pytest -v scripts/tests/test_readme.py
