#!/usr/bin/env bash
# Unit, integration and documentation tests of every crate.
source scripts/tiers/common.sh

cargo test --workspace --no-fail-fast
if [[ -n ${XENTILE_NVCC:-} ]]; then
    cargo test --no-fail-fast --package xentile-cuda --package xentile-xla --features xentile-xla/cuda
else
    echo "left out: what the feature cuda adds, as CUDA's compiler has wheels for Linux only"
fi
