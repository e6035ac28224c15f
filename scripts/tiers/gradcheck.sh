#!/usr/bin/env bash
# Every shipped gradcheck config but those over real text, which have a tier of their own; and the tools
# on linear cross-entropy, whose programs come from JAX, as those of columns do.
source scripts/tiers/common.sh

status=0
build_binaries
exported=""
if use_exported_programs; then
    exported=1
    skip=()
    if [[ $XENTILE_TEST_SET != nightly ]]; then
        skip=(--skip every_variant_passes_gradcheck_on_xla)
        echo "left out: variants of operations on XLA"
    fi
    cargo test --no-fail-fast "${like_workspace[@]}" --test face --test linear --test operations -- \
        "$rest" "${skip[@]}" || status=1
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
# Of the vocabularies of models, up to hundreds of MB of logits.
long='^shape:.* seq_len: (129|257|512|513|1025), vocab: [0-9]{5}'
[[ $XENTILE_TEST_SET != ci ]] || echo "left out: tokens beyond 33 of a sequence of 129 and more, of configs of a vocabulary of more than 9999"
# Python exports the programs of many configs, by one thread: as many configs at once as there are cores.
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
run_config() {
    local log=$logs/${1##*/} began=${EPOCHREALTIME/[.,]/} status=0
    local fewer=()
    [[ $XENTILE_TEST_SET != ci ]] || ! grep -qE "$long" "$1" || fewer=(--set shape.seq_len=33)
    "$binaries/gradcheck" --config "$1" "${fewer[@]}" >"$log" 2>&1 || status=$?
    printf -- '-- %s took %d ms\n' "$1" $(((${EPOCHREALTIME/[.,]/} - began) / 1000)) >>"$log"
    echo "$status" >"$log.status"
}
# shellcheck disable=SC2329 # `check` runs it
replay() {
    cat "$1"
    return "$(<"$1.status")"
}
for config in "${configs[@]}"; do
    while (($(jobs -rp | wc -l) >= $(nproc))); do
        wait -n
    done
    run_config "$config" &
done
wait
for config in "${configs[@]}"; do
    check "$config" replay "$logs/${config##*/}"
done
finish_checks || status=1
exit "$status"
