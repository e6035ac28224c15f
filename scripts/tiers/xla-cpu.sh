#!/usr/bin/env bash
# Custom calls through real XLA: JAX on the CPU, and the ABI against the header that jaxlib carries.
source scripts/tiers/common.sh

scripts/setup.sh scripts/requirements-jax.txt
XLA_FFI_JAXLIB_INCLUDE=$(python -c 'import jaxlib; print(jaxlib.__path__[0])')/include
export XLA_FFI_JAXLIB_INCLUDE
cargo test -p xla-ffi --test abi -- --include-ignored
pytest crates/xla-ffi/tests/jax
