#!/usr/bin/env bash
# Unit, integration and documentation tests of every crate.
source scripts/tiers/common.sh

cargo test --workspace --no-fail-fast
