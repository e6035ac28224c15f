#!/usr/bin/env bash
# Unit, integration and documentation tests of every crate.
source scripts/tiers/common.sh

cargo test --workspace --no-fail-fast
if [[ -n ${XENTILE_NVCC:-} ]]; then
    cargo test --no-fail-fast --package xentile-cuda --package xentile-xla --features xentile-xla/cuda
else
    echo "left out: what the feature cuda adds, as CUDA's compiler has wheels for Linux only"
fi
for flag in avx2 avx512f avx512_bf16 amx_bf16; do
    grep --quiet --word-regexp $flag /proc/cpuinfo 2>/dev/null ||
        echo "left out: what is written for $flag, which this processor has not"
done
