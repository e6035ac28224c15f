#!/usr/bin/env bash
# Every shipped gradcheck config but those over real text, which have a tier of their own; and the tools
# on linear cross-entropy, whose programs come from JAX, as those of columns do.
source scripts/tiers/common.sh

status=0
build_binaries
exported=""
if use_exported_programs; then
    exported=1
    of_programs=(--test linear --test operations)
    if [[ -n ${XENTILE_TEST_QUICK:-}${XENTILE_TEST_ALL:-} ]]; then
        echo "left out: the tools' tests of linear losses, or else those of every operation, which XENTILE_TEST_DRAW chooses"
        of_programs=("${of_programs[@]:XENTILE_TEST_DRAW % 2 * 2:2}")
    fi
    cargo test --no-fail-fast "${like_workspace[@]}" --test face "${of_programs[@]}" -- --include-ignored || status=1
fi
configs=()
for config in configs/gradcheck/*.yaml; do
    [[ $config != *real_text* ]] || continue
    # What runs on XLA comes from JAX.
    [[ -n $exported ]] || ! grep -q "^backend: xla" "$config" || continue
    configs+=("$config")
done
one_in=1
[[ -z ${XENTILE_TEST_ALL:-} ]] || one_in=2
[[ -z ${XENTILE_TEST_QUICK:-} ]] || one_in=4
if ((one_in > 1)); then
    echo "left out: all but one in $one_in of gradcheck's configs, which XENTILE_TEST_DRAW chooses"
    # The first number is the draw's, and decides all.
    mapfile -t configs < <(shuf --random-source=<(yes "$XENTILE_TEST_DRAW") \
        --head-count=$((${#configs[@]} / one_in)) --echo "${configs[@]}")
fi
for config in "${configs[@]}"; do
    began=${EPOCHREALTIME/[.,]/}
    check "$config" "$binaries/gradcheck" --config "$config"
    printf -- '-- %s took %d ms\n' "$config" $(((${EPOCHREALTIME/[.,]/} - began) / 1000))
done
finish_checks || status=1
exit "$status"
