#!/usr/bin/env bash
# Every shipped gradcheck config but those over real text, which have a tier of their own.
source scripts/tiers/common.sh

cargo build --release --bin gradcheck
for config in configs/gradcheck/*.yaml; do
    [[ $config == */real_text* ]] ||
        check "$config" "$target_dir/release/gradcheck" --config "$config"
done
finish_checks
