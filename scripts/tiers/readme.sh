#!/usr/bin/env bash
# Every command in README.md, as a reader would run it, and those in docs/ that fetch something.
source scripts/tiers/common.sh

compile_kernels_once
use_cargo_of_tests
pytest -v scripts/tests/test_readme.py
