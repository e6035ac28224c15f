#!/usr/bin/env bash
# Sweeps time_block x block_size, one process a cell:
#
#   scripts/time_block_sweep.sh [CONFIG] [--set KEY=VALUE]...
#
# CONFIG is configs/sweep/cross_entropy_cpu.yaml unless given. What the config leaves open is
# relative to the repository root. Ends with 0 when every cell ran, 1 when one failed (its row says
# why), 2 on bad input.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/help.sh"

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
config=$root/configs/sweep/cross_entropy_cpu.yaml
if [[ $# -gt 0 && $1 != -* ]]; then
    config=$1
    # The sweep runs in the root; the name was given where the caller stands.
    [[ $config == /* ]] || config=$PWD/$config
    shift
fi
cd -- "$root"

cargo build --quiet --release --package xentile-tools --bin microbench || {
    echo "time_block_sweep: error: microbench does not build: see above" >&2
    exit 2
}
exec "${CARGO_TARGET_DIR:-target}/release/microbench" sweep --config "$config" "$@"
