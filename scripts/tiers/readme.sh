#!/usr/bin/env bash
# Every command in README.md, as a reader would run it.
source scripts/tiers/common.sh

pytest -v scripts/tests/test_readme.py
