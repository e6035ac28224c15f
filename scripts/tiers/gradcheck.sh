#!/usr/bin/env bash
# Every shipped gradcheck config but those over real text, which have a tier of their own; and the tools
# on linear cross-entropy, whose programs come from JAX, as those of columns do.
source scripts/tiers/common.sh

status=0
build_binaries
exported=""
if use_exported_programs; then
    exported=1
    cargo test --no-fail-fast "${like_workspace[@]}" --test face --test linear --test operations -- \
        --include-ignored || status=1
fi
configs=()
for config in configs/gradcheck/*.yaml; do
    [[ $config != *real_text* ]] || continue
    # What runs on XLA comes from JAX.
    [[ -n $exported ]] || ! grep -q "^backend: xla" "$config" || continue
    if [[ $XENTILE_TEST_SET == ci ]] && grep -q -- "gradcheck -- --config $config\$" README.md docs/tools.md; then
        echo "left out: $config, which the tiers readme and docs run"
        continue
    fi
    configs+=("$config")
done
for config in "${configs[@]}"; do
    began=${EPOCHREALTIME/[.,]/}
    check "$config" "$binaries/gradcheck" --config "$config"
    printf -- '-- %s took %d ms\n' "$config" $(((${EPOCHREALTIME/[.,]/} - began) / 1000))
done
finish_checks || status=1
exit "$status"
