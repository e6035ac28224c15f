#!/usr/bin/env bash
# Unit, integration and documentation tests of every crate.
source scripts/tiers/common.sh

compile_kernels_once
status=0
if [[ -n $cuda ]]; then
    echo "left out: tests of crates without the feature cuda"
    echo "left out: debug assertions and checks of overflow in xentile and xentile-cpu"
elif [[ -n ${XENTILE_NVCC:-} ]]; then
    # Whole files of tests, as the feature adds nothing to others. Beside all that has the features of the
    # workspace: the kernels for CPUs are there, and would be compiled again for two packages by themselves.
    # First, as both build a libxentile_xla.so, and later tiers find the one that was built last.
    files=(crates/xentile-{cuda,xla}/tests/*.rs)
    mapfile -t files < <(basename --suffix .rs -- "${files[@]}")
    cargo test --no-fail-fast "${like_workspace[@]}" --package xentile-cuda --features xentile-xla/cuda \
        "${files[@]/#/--test=}" || status=1
else
    echo "left out: what the feature cuda adds, which needs CUDA's compiler"
fi
others=()
if [[ $XENTILE_TEST_SET == default ]]; then
    echo "left out: debug assertions and checks of overflow, which CI's set has"
    echo "left out: unit tests and examples of xentile-cpu, for which its kernels are compiled again"
    others=(--exclude xentile-cpu)
    files=(crates/xentile-cpu/tests/*.rs)
    mapfile -t files < <(basename --suffix .rs -- "${files[@]}")
    # Not beside xentile-xla, which has tests of the same names.
    cargo test --no-fail-fast "${profile[@]}" --package xentile --package xentile-tools --package xentile-cpu \
        "${files[@]/#/--test=}" || status=1
fi
cargo test --no-fail-fast "${profile[@]}" --workspace "${others[@]}" ${cuda:+--features "$cuda"} || status=1
for flag in avx2 avx512f avx512_bf16 amx_bf16; do
    grep --quiet --word-regexp $flag /proc/cpuinfo 2>/dev/null ||
        echo "left out: what is written for $flag, which this processor has not"
done
exit "$status"
