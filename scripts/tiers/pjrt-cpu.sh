#!/usr/bin/env bash
# XLA's CPU as a PJRT plug-in, from Rust: the ABI, programs that run, and the tools on xla:cpu.
source scripts/tiers/common.sh

[[ $(uname -sm) == "Linux x86_64" ]] ||
    absent "Linux on x86-64, which xla-cpu-pjrt has its only wheels for"
scripts/setup.sh scripts/requirements-pjrt.txt
packages=$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
export XENTILE_PJRT_CPU=$packages/xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so
export XENTILE_PJRT_INCLUDE=$packages/xla_plugins/xla_cpu_pjrt/include

cargo test "${like_workspace[@]}" --test xla -- "$rest"
# Its other tests need other plug-ins.
cargo test "${like_workspace[@]}" --package pjrt-client --no-fail-fast \
    --test abi --test cpu --test open --test soak -- "$rest"
