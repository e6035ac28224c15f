#!/usr/bin/env bash
# Unit, integration and documentation tests of every crate.
source scripts/tiers/common.sh

cargo test --workspace --no-fail-fast
# What there is with CUDA alone, as the library for Python is built.
cargo test --release --no-fail-fast --package xentile-cuda --package xentile-xla --features xentile-xla/cuda
