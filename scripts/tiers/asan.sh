#!/usr/bin/env bash
# The kernels under AddressSanitizer. They read and write rows through raw pointers with vector
# intrinsics: Miri does not know most of these, and this sees them all run on the processor.
source scripts/tiers/common.sh

use_sanitizers
try_fewer_arguments
# With --target, build scripts and macros are built without the sanitizer. Its reports have line numbers.
CARGO_TARGET_DIR=$target_dir/asan RUSTFLAGS=-Zsanitizer=address \
    CARGO_PROFILE_DEV_DEBUG=line-tables-only \
    cargo test --no-fail-fast -p xentile-cpu --target "$(host_triple)" --lib --tests
