#!/usr/bin/env bash
# Every shipped gradcheck config but those over real text, which have a tier of their own; and the tools
# on linear cross-entropy, whose programs come from JAX.
source scripts/tiers/common.sh

status=0
cargo build --release
exported=""
if use_exported_programs; then
    exported=1
    cargo test "${like_workspace[@]}" --test linear --test face --test operations -- --include-ignored || status=1
fi
for config in configs/gradcheck/*.yaml; do
    [[ $config == *real_text* || ($config == */linear_* && -z $exported) ]] ||
        check "$config" "$target_dir/release/gradcheck" --config "$config"
done
finish_checks || status=1
exit "$status"
