#!/usr/bin/env bash
# Inputs made by a real model from real text: that they are made well, and gradcheck over them.
source scripts/tiers/common.sh

status=0
pytest scripts/tests/test_make_real_logits.py || status=1
build_binaries
gradcheck=$binaries/gradcheck
if [[ $XENTILE_TEST_SET == nightly ]]; then
    check "make_real_logits" scripts/make_real_logits
    check "configs/gradcheck/real_text.yaml" "$gradcheck" --config configs/gradcheck/real_text.yaml
else
    echo "left out: make_real_logits and configs/gradcheck/real_text.yaml, which the tier readme runs"
fi
if use_exported_programs; then
    # Two gradients of [30522, 384] in float64 take a while for each token.
    check "make_real_logits --form hidden" scripts/make_real_logits --form hidden --batch 1 \
        --seq-len 128 --out target/inputs/real_hidden.safetensors
    config=configs/gradcheck/linear_real_text.yaml
    check "$config" "$gradcheck" --config "$config"
fi
finish_checks || status=1
exit "$status"
