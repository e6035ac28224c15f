#!/usr/bin/env bash
# Fuzzes what reads untrusted bytes, each target for a while from its committed seeds. FUZZ_SECONDS
# changes how long. What crashes a target is left in fuzz/artifacts/.
source scripts/tiers/common.sh

use_sanitizers
if ! cargo fuzz --version >/dev/null 2>&1; then
    # It only starts what is built: quickly made is better than fast.
    cargo install --debug cargo-fuzz --version 0.13.2 --locked --root "$target_dir/tools"
    export PATH=$target_dir/tools/bin:$PATH
fi
for source in fuzz/fuzz_targets/*.rs; do
    name=$(basename "$source" .rs)
    # New inputs go to the first folder; the seeds are only read.
    mkdir -p "fuzz/corpus/$name"
    # As one unit a crate would be compiled by one core; what is fuzzed is small.
    check "$name" cargo fuzz run --target-dir "$target_dir/fuzz" --codegen-units 16 \
        "$name" "fuzz/corpus/$name" "fuzz/seeds/$name" -- \
        -max_total_time="${FUZZ_SECONDS:-10}" -timeout=10 -print_final_stats=1
done
finish_checks
