#!/usr/bin/env bash
# Formatting, lints and types, with warnings denied.
source scripts/tiers/common.sh

# For the types of JAX.
scripts/setup.sh scripts/requirements-jax.txt
python=(scripts crates pallas_bridge benches)
mapfile -t shell < <(grep -rlIE '^#!.*bash|^# shellcheck shell=bash' scripts .ci)

check rustfmt cargo fmt --all --check
check "rustfmt, fuzz" cargo fmt --check --manifest-path fuzz/Cargo.toml
check clippy cargo clippy --workspace --all-targets -- -D warnings
if [[ -n ${XENTILE_NVCC:-} ]]; then
    check "clippy, CUDA" cargo clippy --package xentile-cuda --package xentile-xla \
        --features xentile-xla/cuda --all-targets -- -D warnings
else
    echo "left out: clippy, CUDA, as CUDA's compiler has wheels for Linux only"
fi
check "clippy, fuzz" env CARGO_TARGET_DIR="$target_dir/fuzz" \
    cargo clippy --manifest-path fuzz/Cargo.toml -- -D warnings
check rustdoc env RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps
check ruff ruff check "${python[@]}"
check "ruff format" ruff format --check "${python[@]}"
check mypy mypy scripts
check "mypy, pallas_bridge" mypy pallas_bridge/src
check shellcheck shellcheck --external-sources "${shell[@]}"
finish_checks
