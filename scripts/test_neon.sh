#!/usr/bin/env bash
# Runs the tests of xentile-cpu, and a call through the shared library, as aarch64 programs under qemu's
# user-mode emulation, so that the NEON kernels are tested on any x86-64 machine:
#
#     scripts/test_neon.sh [CARGO ARGUMENTS, such as --lib: which tests]
#
# scripts/aarch64.sh gets what that takes. Exits 77 where this machine cannot do that; the last line
# then says what it would need. XENTILE_XLA_LIBRARY=FILE calls that library, such as a wheel's, and runs
# nothing else.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/help.sh"
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

source scripts/aarch64.sh

target=aarch64-unknown-linux-gnu
[[ $(uname -m) != aarch64 ]] || absent "no emulator: every other tier runs NEON on this machine"
use_aarch64

export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/aarch64/build
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=$tools/bin/aarch64-linux-gnu-gcc
# `max` has every extension that the kernels look for.
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="$root/usr/bin/qemu-aarch64-static -cpu max -L $root/usr/aarch64-linux-gnu"
call=(cargo test --target "$target" -p xentile-xla --test library)
if [[ -n ${XENTILE_XLA_LIBRARY:-} ]]; then
    "${call[@]}"
    exit
fi
# What they hold is of no instruction set: how work is cut, and arrays beyond the caches.
slow=(real_vocabularies large_results large bits_do_not_depend_on_threads tokens_of_a_task logits_may_be_kept)
echo "left out: tests of sizes and threads, which take minutes under emulation: ${slow[*]}"
(($#)) || set -- --lib --tests
cargo test --no-fail-fast --target "$target" -p xentile-cpu "$@" -- "${slow[@]/#/--skip=}"
"${call[@]}"
