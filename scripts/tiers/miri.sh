#!/usr/bin/env bash
# The unit tests of xentile-cpu, and tests of small sizes, under Miri, which sees undefined behaviour that a
# sanitizer cannot, such as aliasing. It finds no vector extension, so only the portable kernels run.
source scripts/tiers/common.sh

cargo +nightly miri --version >/dev/null 2>&1 ||
    absent "a nightly toolchain with miri (rustup component add --toolchain nightly miri)"
# Threads and the clock of the test runner need the real machine. What rayon is built on, crossbeam, breaks
# the rules of stacked borrows and keeps those of tree borrows, casts integers to pointers, and
# never frees what it holds for threads.
flags=(disable-isolation tree-borrows permissive-provenance ignore-leaks)
MIRIFLAGS=${flags[*]/#/-Zmiri-} CARGO_TARGET_DIR=$target_dir/miri \
    cargo +nightly miri test --no-fail-fast -p xentile-cpu --lib \
    --test kv_cache --test linear_attention --test optimizers
