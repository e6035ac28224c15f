#!/usr/bin/env bash
# Stands for cargo where the wheel of pallas_bridge is built for CI's tests:
#
#     CARGO=scripts/cargo_of_tests.sh pip wheel ./pallas_bridge
#
# Has the library built with the features and the profile of the tier host, which compiled all of it.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/help.sh"
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

[[ $* == "rustc --release --locked --package xentile-xla "* ]] || {
    printf 'cargo_of_tests: error: %s is not what pallas_bridge/hatch_build.py asks of cargo\n' "$*" >&2
    exit 2
}
source scripts/tiers/common.sh
exec cargo build --locked --message-format json "${like_workspace[@]}" --package xla-ffi --features xla-ffi/testing --lib
