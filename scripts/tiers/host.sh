#!/usr/bin/env bash
# Unit, integration and documentation tests of every crate.
source scripts/tiers/common.sh

compile_kernels_once
status=0
cargo test --workspace --no-fail-fast || status=1
if [[ -n ${XENTILE_NVCC:-} ]]; then
    cargo test --no-fail-fast --package xentile-cuda --package xentile-xla --features xentile-xla/cuda ||
        status=1
else
    echo "left out: what the feature cuda adds, which needs CUDA's compiler"
fi
for flag in avx2 avx512f avx512_bf16 amx_bf16; do
    grep --quiet --word-regexp $flag /proc/cpuinfo 2>/dev/null ||
        echo "left out: what is written for $flag, which this processor has not"
done
exit "$status"
