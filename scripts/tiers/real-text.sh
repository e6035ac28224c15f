#!/usr/bin/env bash
# Inputs made by a real model from real text: that they are made well, and gradcheck over them.
source scripts/tiers/common.sh

status=0
pytest scripts/tests/test_make_real_logits.py || status=1
check "make_real_logits" scripts/make_real_logits
cargo build --release --bin gradcheck
for config in configs/gradcheck/real_text*.yaml; do
    check "$config" "$target_dir/release/gradcheck" --config "$config"
done
finish_checks || status=1
exit "$status"
